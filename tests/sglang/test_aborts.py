"""Requests that are aborted while a storage thread moves their pages: SGLang takes the index tensor back and rewrites it. Users
saw segmentation faults and other requests' pages overwritten."""

from __future__ import annotations

import queue
import random
import threading
from array import array
from typing import Any

import pytest
import torch

from hicache_mooncake.client.client import Body, Outcome
from tests.sglang.conftest import MakeBackend
from tests.sglang.pools import PAGE_SIZE, PAGES, content, fill, holds, indices, key, mha_pool

ABORTS = 1000
_WAIT_S = 60.0


class Aborter:
    """The scheduler: takes an index tensor back as soon as its pages are about to be moved, and hands its slots to others."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._given: queue.Queue[torch.Tensor | None] = queue.Queue()
        self._rewritten = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def rewrite(self, tensor: torch.Tensor) -> None:
        self._given.put(tensor)
        assert self._rewritten.acquire(timeout=_WAIT_S)

    def _work(self) -> None:
        while (tensor := self._given.get()) is not None:
            kind = self._rng.randrange(3)
            if kind == 0:
                tensor.zero_()
            elif kind == 1:
                tensor.fill_(1 << 40)
            else:
                first = self._rng.randrange(PAGES - len(tensor) // PAGE_SIZE) * PAGE_SIZE
                tensor.copy_(torch.arange(first, first + len(tensor)))
            self._rewritten.release()

    def close(self) -> None:
        self._given.put(None)
        self._thread.join(_WAIT_S)


def test_pages_go_where_they_were_to_go_whatever_an_abort_does_to_the_indices(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = mha_pool()
    backend = make_backend(pool)
    names = [key(i) for i in range(4)]
    for page, name in enumerate(names):
        fill(pool, page, name)
    assert backend.batch_set_v1(names, indices(0, 1, 2, 3)) == [True] * 4
    for page in range(PAGES):
        fill(pool, page, key(("somebody else's", page)))
    others = [content(pool, page) for page in range(PAGES)]

    rng = random.Random(5)
    aborter = Aborter(random.Random(6))
    transfer = backend.client.transfer
    now: list[torch.Tensor] = []
    moved: list[list[int]] = []

    def aborted(op: str, body: Body, hashes: bytes, pages: array[int], *args: Any, **more: Any) -> Outcome:
        before = pages[:]
        aborter.rewrite(now[0])
        outcome = transfer(op, body, hashes, pages, *args, **more)
        assert pages == before, "what was captured does not change"
        moved.append(list(before))
        return outcome

    monkeypatch.setattr(backend.client, "transfer", aborted)
    try:
        for number in range(ABORTS):
            count = rng.randrange(1, 4)
            places = rng.sample(range(PAGES), count)
            now[:] = [indices(*places)]
            if number % 4 == 3:  # a store: what it takes must be these pages' bytes
                stored = [key(("store", number, i)) for i in range(count)]
                assert backend.batch_set_v1(stored, now[0]) == [True] * count
            else:
                assert backend.batch_get_v1(names[:count], now[0]) == [True] * count
                assert all(holds(pool, place, name) for place, name in zip(places, names, strict=False))
                for place in places:
                    fill(pool, place, key(("somebody else's", place)))
            assert moved.pop() == places
            if number % 50 == 49:
                assert [content(pool, page) for page in range(PAGES)] == others, "nobody else's page was touched"
    finally:
        aborter.close()


def test_a_tensor_that_is_rewritten_while_it_is_checked_is_checked_as_it_was(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked and used are the same copy: a tensor that was good when it was looked at may name other pages a moment later."""
    pool = mha_pool()
    backend = make_backend(pool)
    fill(pool, 3, key("a"))
    tensor = indices(3)
    original = torch.Tensor.clone

    def clone(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        taken = original(self, *args, **more)
        if self is tensor:
            tensor.copy_(indices(7))
        return taken

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    assert backend.batch_set_v1([key("a")], tensor) == [True]
    monkeypatch.undo()
    assert torch.equal(tensor, indices(7)), "it was rewritten"
    assert backend.batch_get_v1([key("a")], indices(9)) == [True]
    assert holds(pool, 9, key("a"))
