"""P143: engines of different tensor-parallel sizes and host layouts read each other's pages, head by head."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hicache_mooncake.backend import HiCacheMooncake
from hicache_mooncake.testing.local import pattern
from tests.sglang.conftest import MakeBackend
from tests.sglang.matrix import Supports
from tests.sglang.pools import LAYERS, PAGE_SIZE, indices, key, mha_pool, scramble

HEAD_DIM = 32
ROW = HEAD_DIM * 2
"""Bytes of one head of one token in one layer, bfloat16."""


def ranks(
    make: MakeBackend, total: int, tp_size: int, layout: str, **extra: object
) -> list[tuple[HiCacheMooncake, Any, range]]:
    """All ranks of one engine: backend, pool, and which heads of the model it holds."""
    made = []
    for rank in range(tp_size):
        pool = mha_pool(layout, heads=max(1, total // tp_size), head_dim=HEAD_DIM)
        settings = {"share_across_tp": True, "kv_heads": total, **extra}
        backend = make(pool, settings, tp_rank=rank, tp_size=tp_size)
        first = rank * total // tp_size
        made.append((backend, pool, range(first, first + pool.head_num)))
    return made


def row(name: str, half: str, head: int, token: int, layer: int) -> bytes:
    return pattern(f"{name}{half}{head}.{token}.{layer}".encode(), ROW)


def rows(pool: Any, page: int) -> list[tuple[str, int, int, int, int]]:
    """(K or V, the rank's head, token, layer, address) of everything in a page, by the shape of the pool's own tensors."""
    found = []
    for half, tensor in (("k", pool.k_buffer), ("v", pool.v_buffer)):
        for head in range(pool.head_num):
            for token in range(PAGE_SIZE):
                for layer in range(LAYERS):
                    slot = page * PAGE_SIZE + token
                    at = {
                        "layer_first": (layer, slot, head),
                        "page_first": (slot, layer, head),
                        "page_first_direct": (page, layer, token, head),
                        "page_head": (page, head, token, layer),
                    }[pool.layout]
                    found.append((half, head, token, layer, tensor[at].data_ptr()))
    return found


def fill_heads(pool: Any, page: int, name: str, held: range) -> None:
    for half, head, token, layer, address in rows(pool, page):
        ctypes.memmove(address, row(name, half, held[head], token, layer), ROW)


def holds_heads(pool: Any, page: int, name: str, held: range) -> bool:
    return all(
        ctypes.string_at(address, ROW) == row(name, half, held[head], token, layer)
        for half, head, token, layer, address in rows(pool, page)
    )


@pytest.mark.parametrize(
    ("total", "writers", "readers"),
    [
        (4, (4, "page_first"), (2, "page_first")),
        (4, (1, "layer_first"), (4, "page_head")),
        (4, (2, "page_head"), (1, "page_head")),
        (2, (4, "page_first_direct"), (1, "layer_first")),
        (2, (1, "page_first"), (4, "page_first")),
    ],
)
def test_any_size_reads_what_any_other_wrote(
    make_backend: MakeBackend, supports: Supports, total: int, writers: tuple[int, str], readers: tuple[int, str]
) -> None:
    names = [key((total, writers, readers, i)) for i in range(3)]
    for backend, pool, held in ranks(make_backend, total, *writers):
        for page, name in enumerate(names):
            fill_heads(pool, page, name, held)
        assert backend.batch_set_v1(names, indices(0, 1, 2)) == [True] * 3
    for backend, pool, held in ranks(make_backend, total, *readers):
        assert backend.batch_exists([*names, key("absent")]) == 3
        scramble(pool)
        assert backend.batch_get_v1(names, indices(7, 3, 5)) == [True] * 3
        assert all(holds_heads(pool, page, name, held) for page, name in zip((7, 3, 5), names, strict=True))
    supports(family="mha", layout=readers[1], shape="another TP size")


def test_heads_that_several_ranks_hold_are_stored_once(make_backend: MakeBackend) -> None:
    name = key("replicas")
    engine = ranks(make_backend, 2, 4, "page_first")
    for backend, pool, held in engine:
        fill_heads(pool, 0, name, held)
        assert backend.batch_set_v1([name], indices(0)) == [True]
    report = engine[0][0].client.status()
    assert report is not None
    assert (report.node["stored"], report.node["had"]) == (2, 2)


def test_a_head_that_nobody_stored_is_a_miss_for_who_needs_it(make_backend: MakeBackend) -> None:
    name = key("half")
    backend, pool, held = ranks(make_backend, 4, 4, "page_first")[0]
    fill_heads(pool, 0, name, held)
    assert backend.batch_set_v1([name], indices(0)) == [True]
    half, other = ranks(make_backend, 4, 2, "page_first")
    assert half[0].batch_exists([name]) == 0
    assert half[0].batch_get_v1([name], indices(0)) == [False]
    assert other[0].batch_exists([name]) == 0
    assert backend.batch_exists([name]) == 1


def test_sglangs_own_tp_lcm_size_is_the_same_for_page_head(make_backend: MakeBackend) -> None:
    name = key("lcm")
    for tp_size in (2, 4):
        for rank in range(tp_size):
            pool = mha_pool("page_head", heads=4 // tp_size, head_dim=HEAD_DIM)
            split = tp_size < 4
            backend = make_backend(pool, tp_rank=rank, tp_size=tp_size, tp_lcm_size=4, should_split_heads=split)
            held = range(rank * 4 // tp_size, (rank + 1) * 4 // tp_size)
            if tp_size == 2:
                fill_heads(pool, 0, name, held)
                assert backend.batch_set_v1([name], indices(0)) == [True]
            else:
                assert backend.batch_get_v1([name], indices(2)) == [True]
                assert holds_heads(pool, 2, name, held)


def test_a_wrong_number_of_heads_is_refused(make_backend: MakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    pool = mha_pool(heads=2, head_dim=HEAD_DIM)
    backend = make_backend(pool, {"share_across_tp": True, "kv_heads": 8}, tp_rank=0, tp_size=2)
    assert "8 KV heads over 2 ranks are 4 a rank, but its pool has 2" in caplog.text
    assert backend.batch_set_v1([key(0)], indices(0)) == [False]


def test_without_a_certain_number_of_heads_pages_stay_the_ranks_own(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    pool = mha_pool(heads=2, head_dim=HEAD_DIM)
    backend = make_backend(pool, {"share_across_tp": True}, tp_rank=0, tp_size=2)
    assert "say how many there are in all with kv_heads" in caplog.text
    assert backend._pools.view.pools["kv"].bodies[0].namespace == backend._pools.view.pools["kv"].namespace.digest()
