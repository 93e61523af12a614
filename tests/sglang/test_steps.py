"""The backend's calls wait for no other rank and for no device: SGLang makes them while a step runs, and a collective or a
synchronisation in one of them would cost every step a part of its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from sglang.srt.mem_cache.hicache_storage import PoolTransfer

from tests.sglang.conftest import MakeBackend
from tests.sglang.pools import fill, holds, indices, key, mha_pool

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group"),
    *("recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)
SYNCHRONISATIONS = (
    (torch.cuda, "synchronize"),
    (torch.cuda, "current_stream"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cpu, "synchronize"),
    (torch.Tensor, "cuda"),
    (torch.Tensor, "to"),
)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was called. Noted, and not raised: the backend lets nothing out."""
    seen: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            seen.append(name)
            return real(*args, **more)

        monkeypatch.setattr(owner, name, noted)

    for name in COLLECTIVES:
        watch(torch.distributed, name)
    for owner, name in SYNCHRONISATIONS:
        watch(owner, name)
    return seen


def test_what_waits_would_be_seen(waits: list[str]) -> None:
    torch.zeros(1).to(torch.int64)
    with pytest.raises(ValueError, match="process group"):
        torch.distributed.barrier()
    assert waits == ["to", "barrier"]


def test_no_call_waits_for_another_rank_or_a_device(make_backend: MakeBackend, waits: list[str]) -> None:
    pool = mha_pool()
    backend = make_backend(pool, tp_rank=0, tp_size=2)
    names = [key(i) for i in range(4)]
    for page, name in enumerate(names):
        fill(pool, page, name)
    tensors = [torch.zeros(4096, dtype=torch.uint8) for _ in names]
    transfer = PoolTransfer(name="indexer", keys=names, host_indices=indices(0, 1, 2, 3))
    places = indices(*range(4))
    waits.clear()
    calls: list[tuple[Callable[[], object], object]] = [
        (lambda: backend.batch_set_v1(names, places), [True] * 4),
        (lambda: backend.batch_exists(names), 4),
        (lambda: backend.exists(names[0]), True),
        (lambda: backend.batch_exists_v2(names).kv_hit_pages, 4),
        (lambda: backend.batch_get_v1(names, places), [True] * 4),
        (lambda: backend.batch_set_v2([transfer]), {"indexer": [False] * 4}),
        (lambda: backend.batch_get_v2([transfer]), {"indexer": [False] * 4}),
        (lambda: backend.batch_set(names, tensors), True),
        (lambda: len(backend.batch_get(names, tensors)), 4),
        (lambda: backend.get_stats() is not None, True),
        (lambda: backend.clear(), None),
    ]
    for call, expected in calls:
        assert call() == expected
        assert waits == []
    assert holds(pool, 0, names[0])
    backend.close()
    assert waits == []
