"""Bodies read from the pages' file, many at once, each into memory of the reader's own.

Neighbours in the file are one read, and as many reads are under way as a disk wants. Nobody else's memory is touched: a read
that hangs in the kernel holds a buffer and a thread of this reader, and nobody waits for it longer than until the deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from hicache_mooncake.cold.layout import blocks
from hicache_mooncake.cold.pages_file import PagesFile, scratch

DEPTH = 8
"""Reads under way at once."""
READ_BYTES = 1 << 20
"""Neighbours are read together up to this much. A larger body is one read."""
_BUFFER_BYTES = 64 << 20
"""Of all buffers, where bodies are so large that there would be more."""

_CALLS = 4
"""Whoever comes on top of them waits for its turn: each has buffers of its own."""

Bodies = Generator[memoryview | None, None, None]


class Reader:
    """Any number of threads may read; all of them share `depth` threads that wait for the disk. Buffers are kept for the next
    call. Close it last."""

    def __init__(self, file: PagesFile, depth: int = DEPTH) -> None:
        self._file = file
        self._depth = depth
        self._pool = ThreadPoolExecutor(depth, "cold-read")
        self._turns = threading.BoundedSemaphore(_CALLS)
        self._lock = threading.Lock()
        self._buffers: deque[memoryview] = deque()
        self._stuck = 0
        """Reads that nobody waits for any more."""

    @property
    def stuck(self) -> int:
        return self._stuck

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def read(self, wanted: Sequence[tuple[int, int]], deadline: float) -> Bodies:
        """Bodies at these places (offset, length), in order, each in whole blocks; None for one that cannot be read, and for
        all that have not come by the deadline. A view is good until the next one is asked for. Whoever does not go through it
        closes it."""
        groups = _grouped(wanted)
        ahead = max(2, min(self._depth, _BUFFER_BYTES // max((size for _, size, _ in groups), default=1)))
        under_way: deque[tuple[Future[None], memoryview]] = deque()
        begun = 0
        turn = self._turns.acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            for at, (_, _, lengths) in enumerate(groups):
                begun = max(begun, at)
                while begun < min(len(groups), at + ahead) and turn and self._may_begin(deadline):
                    offset, size, _ = groups[begun]
                    buffer = self._buffer(size)
                    under_way.append((self._pool.submit(self._file.read, offset, [buffer[:size]]), buffer))
                    begun += 1
                came = self._come(under_way, deadline) if begun > at else None
                start = 0
                for length in lengths:
                    yield None if came is None else came[start : start + blocks(length)]
                    start += blocks(length)
                if came is not None:
                    self._keep(came)
        finally:
            for future, buffer in under_way:
                self._abandon(future, buffer)
            if turn:
                self._turns.release()

    def _may_begin(self, deadline: float) -> bool:
        return self._stuck < self._depth and time.monotonic() < deadline

    def _come(self, under_way: deque[tuple[Future[None], memoryview]], deadline: float) -> memoryview | None:
        """What the first of these has read, or None."""
        future, buffer = under_way.popleft()
        try:
            future.result(max(0.0, deadline - time.monotonic()))
        except NotYet:
            self._abandon(future, buffer)
            return None
        except OSError:
            self._keep(buffer)
            return None
        return buffer

    def _buffer(self, size: int) -> memoryview:
        with self._lock:
            for index, buffer in enumerate(self._buffers):
                if len(buffer) >= size:
                    del self._buffers[index]
                    return buffer
        return scratch(max(size, READ_BYTES))

    def _keep(self, buffer: memoryview) -> None:
        with self._lock:
            self._buffers.append(buffer)
            while len(self._buffers) > self._depth:
                self._buffers.popleft()

    def _abandon(self, future: Future[None], buffer: memoryview) -> None:
        """Its buffer is the kernel's until it has ended."""
        if future.cancel():
            self._keep(buffer)
            return
        with self._lock:
            self._stuck += 1

        def ended(_future: Future[None]) -> None:
            with self._lock:
                self._stuck -= 1
            self._keep(buffer)

        future.add_done_callback(ended)


def _grouped(wanted: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[int]]]:
    """One read each: (offset, bytes, lengths of the bodies in it)."""
    groups: list[tuple[int, int, list[int]]] = []
    for offset, length in wanted:
        size = blocks(length)
        if groups:
            start, so_far, lengths = groups[-1]
            if start + so_far == offset and so_far + size <= READ_BYTES:
                lengths.append(length)
                groups[-1] = (start, so_far + size, lengths)
                continue
        groups.append((offset, size, [length]))
    return groups
