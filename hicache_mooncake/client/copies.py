"""Copies of one batch, by several threads where that is faster: large pages, and cores to spare.

One core copies with its checksum at most as fast as one core reads memory, which is a part of what a socket has. The copies let
go of the interpreter lock, so threads of the mover do. They belong to the batch: when it has been gone through, none is under
way any more, and a mover that is killed takes them along.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from hicache_mooncake.client.batch import Batch
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import BodyLayout, Group

LARGE_BYTES = 512 << 10
"""Of smaller pages handing over costs more than it brings."""
GROUP_BYTES = 1 << 20
"""Pages are copied so many bytes at a time: between two groups the deadline is looked at, and whatever else there is."""
HANDED_BYTES = 4 << 20
"""At most so many are handed to a thread at a time: handing over 1 MiB costs a fifth more of the processors' time."""
_CORES_A_THREAD, _MOST = 4, 4
"""Unless the operator says otherwise: movers of eight ranks may copy at once, beside the engine."""
_START_S = 10.0

Copy = Callable[[Group, BodyLayout, Mapping], Iterator[int | None]]
"""`EngineMemory.store_pages` or `load_pages`."""
_Place = TypeVar("_Place", bound=tuple[int, ...])
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def threads_for(cores: int, wanted: int = 0) -> int:
    """How many threads copy where this process may use so many cores. `wanted`: the setting, 0 for what is sensible."""
    return wanted or max(1, min(_MOST, cores // _CORES_A_THREAD))


class Copies:
    """`wanted`: as the setting `copy_threads`. Used by one thread. The threads start with the first batch that has use for
    them, with its affinity; without any the copies are made one after the other."""

    def __init__(self, wanted: int = 0) -> None:
        self._wanted = wanted
        self._pool: ThreadPoolExecutor | None = None
        self._threads = 0
        """0: not decided yet."""

    def pages(
        self,
        copy: Copy,
        batch: Batch,
        segment: Mapping,
        places: Sequence[_Place],
        deadline: float,
    ) -> Iterator[tuple[Sequence[_Place], list[int | str]]]:
        """Pages, as (page, offset in the segment, ...): yields them group by group, in order, with the checksum of each, or why
        there is none."""
        if not places:
            return iter(())
        layout = batch.layout
        aside = self._aside(len(places), layout)
        in_turn = None if aside else copy(batch.group(places), layout, segment)
        group_bytes = GROUP_BYTES
        if aside:
            group_bytes = max(GROUP_BYTES, min(HANDED_BYTES, len(places) * layout.length // self._threads))
        at_once = max(1, group_bytes // layout.length)
        groups = [places[first : first + at_once] for first in range(0, len(places), at_once)]

        def copied(group: Sequence[_Place]) -> list[int | str]:
            if time.monotonic() > deadline:
                return ["deadline"] * len(group)
            checksums = copy(batch.group(group), layout, segment) if in_turn is None else itertools.islice(in_turn, len(group))
            return ["engine_memory" if checksum is None else checksum for checksum in checksums]

        return zip(groups, self.each(copied, groups, layout), strict=True)

    def each(self, work: Callable[[_Item], _Result], items: Sequence[_Item], layout: BodyLayout) -> Iterator[_Result]:
        """What `work` returns for each item, in order; with large pages it runs on several threads at once and must not raise.
        Whoever stops going through it stops the rest: what had begun has ended when it is closed."""
        if not self._aside(len(items), layout):
            yield from map(work, items)
            return
        assert self._pool is not None
        futures = [self._pool.submit(work, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def _aside(self, count: int, layout: BodyLayout) -> bool:
        """Whether so many items are given to the threads."""
        return count > 1 and layout.length >= LARGE_BYTES and not layout.strided and self._several()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._threads = 1

    def _several(self) -> bool:
        if not self._threads:
            self._threads = threads_for(len(os.sched_getaffinity(0)), self._wanted)
            if self._threads > 1:
                self._pool = _started(self._threads)
                if self._pool is None:
                    self._threads = 1
        return self._threads > 1


def _started(threads: int) -> ThreadPoolExecutor | None:
    """A pool all of whose threads run; None when this user or container may have no more: then a batch must not find out."""
    pool = ThreadPoolExecutor(threads, "copy")
    together = threading.Barrier(threads)

    def begin() -> None:
        together.wait(_START_S)

    begun: list[Future[None]] = []
    try:
        begun += [pool.submit(begin) for _ in range(threads)]
        for each in begun:
            each.result()
    except (RuntimeError, threading.BrokenBarrierError):
        together.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        return None
    return pool
