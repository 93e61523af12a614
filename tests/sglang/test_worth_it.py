"""`skip_when_slower`: what the pool takes longer to load than the engine to compute is not found."""

from __future__ import annotations

import pytest

from hicache_mooncake.client import worth
from tests.sglang.conftest import MakeBackend
from tests.sglang.pools import fill, indices, key, mha_pool


def test_a_lookup_finds_nothing_that_is_slower_than_computing_it(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "PROBE_FOR_S", 0.0)
    monkeypatch.setattr(worth, "_LEAST_BYTES", 1)
    pool = mha_pool()
    slow, fast = make_backend(pool, {"skip_when_slower": 1e8}), make_backend(pool, {"skip_when_slower": 0.01})
    never = make_backend(pool)
    names = [key(i) for i in range(4)]
    for page, name in enumerate(names):
        fill(pool, page, name)
    assert never.batch_set_v1(names, indices(0, 1, 2, 3)) == [True] * 4
    for backend in (slow, fast, never):
        assert backend.batch_exists(names) == 4, "nothing is known yet"
        for _ in range(3):
            assert backend.batch_get_v1(names, indices(0, 1, 2, 3)) == [True] * 4
    assert slow.batch_exists(names) == 0, "no pool gives 16 tokens in 0.16 us"
    assert slow.batch_exists_v2(names).kv_hit_pages == 0
    assert slow.client.reasons["not_worth_it"] == 8
    for backend in (fast, never):
        assert backend.batch_exists(names) == 4
        assert "not_worth_it" not in backend.client.reasons
    assert slow.batch_get_v1(names, indices(0, 1, 2, 3)) == [True] * 4, "who asks for them all the same gets them"
    monkeypatch.setattr(worth, "PROBE_FOR_S", worth.PROBE_EVERY_S)
    assert slow.batch_exists(names) == 4, "now and then it is tried again"
