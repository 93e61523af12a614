"""What SGLang's host pools say of the form of their bytes is in the namespace: equal lengths do not make equal pages."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_mooncake.client import identity, weights
from hicache_mooncake.client.geometry import of_pool
from hicache_mooncake.client.identity import Weights, namespace_of
from hicache_mooncake.config import Settings
from tests.sglang.families import FAMILIES
from tests.sglang.pools import mha_pool, storage_config


def digest(pool: Any, name: str = "kv", **config: Any) -> bytes:
    return namespace_of(storage_config(**config), pool, of_pool(pool, name), Settings(), Weights("w", "")).digest()


VALUES = {
    "temporal_state_shape": [(4, 16, 8), (4, 8, 16)],
    "conv_state_shapes": [[(64, 3)], [(32, 6)]],
    "temporal_dtype": [torch.float32, torch.bfloat16],
    "indexer_dtype": [torch.uint8, torch.int8],
    "dsa_kv_cache_store_fp8": [True, False],
}

OTHERS = [11, 12, "v41", "v41_new"]


@pytest.mark.parametrize("name", identity._FORM)
def test_each_attribute_of_a_pools_form_keeps_pages_apart(name: str) -> None:
    pool = mha_pool()
    without = digest(pool)
    seen = {without}
    for value in VALUES.get(name, OTHERS):
        setattr(pool, name, value)
        seen.add(digest(pool))
        assert digest(pool) in seen
    assert len(seen) == 1 + len(VALUES.get(name, OTHERS))


@pytest.mark.parametrize("name", identity._FORM_OF_DEVICE)
def test_each_attribute_of_a_device_pools_form_keeps_pages_apart(name: str) -> None:
    pool = mha_pool()
    seen = set()
    for value in (1, 2, None):
        pool.device_pool = SimpleNamespace(**{name: value})
        seen.add(digest(pool))
    assert len(seen) == 3


def test_a_value_that_means_something_in_one_process_only_is_not_in_it() -> None:
    pool = mha_pool()
    before = digest(pool)
    for value in (object(), torch.zeros(2), 0.1, [object()]):
        pool.row_bytes = value
        assert digest(pool) == before


def test_kinds_of_fp8_that_look_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang keeps e4m3fn, e5m2 and e4m3fnuz as bytes."""
    pool = mha_pool(dtype=torch.uint8)
    seen = set()
    for dtype in ("fp8_e4m3", "fp8_e5m2", "auto"):
        arguments = SimpleNamespace(kv_cache_dtype=dtype, device="cuda")
        monkeypatch.setattr(weights, "server_args", lambda arguments=arguments: arguments)
        seen.add(digest(pool))
    assert len(seen) == 3


@pytest.mark.parametrize("variable", identity._ENVIRONMENT)
def test_switches_that_change_the_bytes_are_in_it(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    pool = FAMILIES["deepseek_v4"].build("page_first")[1]
    seen = {digest(pool.pool, pool.name)}
    for value in ("v41", "v41_new"):
        monkeypatch.setenv(variable, value)
        seen.add(digest(pool.pool, pool.name))
    assert len(seen) == 3


def test_a_drafts_pages_are_of_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = FAMILIES["mha_mtp"].build("page_first")[0].pool
    plain = mha_pool()
    seen: dict[str, set[bytes]] = {"draft": set(), "packed": set(), "plain": set()}
    for path in ("draft-1", "draft-2"):
        arguments = SimpleNamespace(speculative_draft_model_path=path, device="cuda")
        monkeypatch.setattr(weights, "server_args", lambda arguments=arguments: arguments)
        seen["draft"].add(digest(plain, "draft"))
        seen["packed"].add(digest(packed))
        seen["plain"].add(digest(plain))
    assert {what: len(digests) for what, digests in seen.items()} == {"draft": 2, "packed": 2, "plain": 1}


def test_the_mamba_states_of_two_models_differ_in_their_names() -> None:
    """Their pools have no layer_num and no heads."""
    one, two = (FAMILIES[name].build("page_first")[-1] for name in ("mamba", "mamba_convs"))
    assert one.name == two.name == "mamba"
    namespace = namespace_of(storage_config(), one.pool, of_pool(one.pool, "mamba"), Settings(), Weights("w", ""))
    assert any(detail.startswith("temporal_state_shape=[") for detail in namespace.details)
    assert any(detail.startswith("conv_state_shapes=[[") for detail in namespace.details)
    assert digest(one.pool, "mamba") != digest(two.pool, "mamba")


@pytest.mark.parametrize("shape", [{"tp_size": 1}, {"tp_rank": 1, "tp_size": 2}])
def test_data_parallel_ranks_of_one_model_share(shape: dict[str, int]) -> None:
    """P56: whichever rank a request went to the last time, its pages are found. Under DP attention SGLang gives rank and size
    within the attention group, so ranks that shard a page stay apart."""
    known = {field.name for field in dataclasses.fields(storage_config())}
    ranks = [shape | {"dp_rank": rank} if "dp_rank" in known else shape for rank in range(4)]
    assert len({digest(mha_pool(), **rank) for rank in ranks}) == 1
    assert digest(mha_pool(), **shape) != digest(mha_pool(), tp_rank=0, tp_size=4)
