"""The fake engine's names of pages against SGLang's."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64, storage_namespace_seed

from hicache_mooncake.testing.fake_pages import event_key, page_hashes, storage_seed

PAGE = 16


@pytest.mark.parametrize(("extra_key", "salt"), [(None, None), (None, "salt"), ("adapter", None), ("adapter", "")])
def test_pages_are_named_as_sglang_names_them(extra_key: str | None, salt: str | None) -> None:
    tokens = list(range(100_000, 100_100))
    ours = page_hashes(tokens, PAGE, storage_seed(extra_key, salt))
    theirs = get_hash_str(tokens[:96], storage_namespace_seed(extra_key, salt), page_size=PAGE)
    assert [each.hex() for each in ours] == theirs
    assert [event_key(each) for each in ours] == [hash_str_to_int64(each) for each in theirs]
