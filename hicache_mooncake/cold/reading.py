"""Bodies read from the pages' file, many at once, each into memory of the reader's own.

Neighbours in the file are one read, and as many reads are under way as a disk wants. Nobody else's memory is touched: a read
that hangs in the kernel holds a buffer and a thread of this reader, and nobody waits for it longer than until the deadline.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from hicache_mooncake.cold.layout import blocks
from hicache_mooncake.cold.pages_file import PagesFile, huge_scratch

DEPTH = 8
"""Reads under way at once."""
READ_BYTES = 1 << 20
"""Neighbours are read together up to this much. A larger body is one read."""
_BUFFER_BYTES = 64 << 20
"""Of all buffers of a call, where bodies are so large that there would be more; and of those that are kept."""
_PATIENCE_S = 1.0
"""With a read whose caller went away early."""
_WAITING = 4
"""Reads beyond these that a call has ready: a thread that has read goes on by itself, whatever its caller copies just then."""
_CALLS = 4
"""Whoever comes on top of them waits for its turn: each has buffers of its own."""

Bodies = Generator[memoryview | None, None, None]
Came = memoryview | BaseException | None
"""What has been read, or what went wrong, or nothing in time."""
Results = Generator[Came, None, None]
Groups = Generator[tuple[Came, list[int]], None, None]


class Reader:
    """Any number of threads may read; all of them share `depth` threads that wait for the disk. Buffers are kept for the next
    call. Close it before its file."""

    def __init__(self, file: PagesFile, depth: int = DEPTH) -> None:
        self.file = file
        self._depth = depth
        self._ahead = depth + _WAITING
        self._workers = _Workers(depth)
        self._turns = threading.BoundedSemaphore(_CALLS)
        self._lock = threading.Lock()
        self._buffers: deque[memoryview] = deque()
        self._abandoned: dict[Future[None], float] = {}
        """Reads that nobody waits for any more, and from when on they are taken to be stuck."""

    @property
    def stuck(self) -> int:
        """Reads that hang."""
        with self._lock:
            now = time.monotonic()
            return sum(since <= now for since in self._abandoned.values())

    def close(self) -> None:
        """Waits for nothing. Who reads on gets nothing."""
        self._workers.close()

    def read(self, wanted: Sequence[tuple[int, int]], deadline: float, patience_s: float = math.inf) -> Results:
        """Bodies at these places (offset, length), in order, each in whole blocks. What went wrong for one that cannot be read,
        and None for all that have not come by the deadline, or when nothing has come for `patience_s`. A view is good until the
        next one is asked for. Whoever does not go through it closes it."""
        with contextlib.closing(self.groups(wanted, deadline, patience_s)) as groups:
            first = 0
            for came, places in groups:
                for place in places:
                    size = blocks(wanted[first][1])
                    first += 1
                    yield came[place : place + size] if isinstance(came, memoryview) else came

    def groups(self, wanted: Sequence[tuple[int, int]], deadline: float, patience_s: float = math.inf) -> Groups:
        """The same for neighbours together: what has been read, and where in it each of the next bodies begins."""
        groups = _grouped(wanted)
        ahead = max(2, min(self._ahead, _BUFFER_BYTES // max((size for _, size, _ in groups), default=1)))
        under_way: deque[tuple[Future[None], memoryview]] = deque()
        begun = 0
        last = deadline
        deadline = min(last, time.monotonic() + patience_s)
        turn = self._turns.acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            for at, group in enumerate(groups):
                begun = max(begun, at)
                while begun < min(len(groups), at + ahead) and turn and self._may_begin(deadline):
                    under_way.append(self._begin(groups[begun][0], groups[begun][1]))
                    begun += 1
                came = self._come(under_way, deadline) if begun > at else None
                if came is None:
                    last = deadline  # nothing is waited for any more
                start, _, bodies = group
                if isinstance(came, BaseException) and len(bodies) > 1:
                    yield from self._one_by_one(bodies, deadline)
                else:
                    yield came, [offset - start for offset, _ in bodies]
                if isinstance(came, memoryview):
                    self._keep(came)
                deadline = min(last, time.monotonic() + patience_s)
        finally:
            for future, buffer in under_way:
                self._abandon(future, buffer, deadline)
            if turn:
                self._turns.release()

    def _one_by_one(self, bodies: Sequence[tuple[int, int]], deadline: float) -> Groups:
        """Some of these neighbours cannot be read, and the others shall not suffer for it."""
        for offset, length in bodies:
            came = None
            if self._may_begin(deadline):
                came = self._come(deque([self._begin(offset, blocks(length))]), deadline)
            yield came, [0]
            if isinstance(came, memoryview):
                self._keep(came)

    def _may_begin(self, deadline: float) -> bool:
        return self.stuck < self._depth and time.monotonic() < deadline

    def _begin(self, offset: int, size: int) -> tuple[Future[None], memoryview]:
        buffer = self._buffer(size)
        view = buffer[:size]
        return self._workers.submit(lambda: self.file.read(offset, [view])), buffer

    def _come(self, under_way: deque[tuple[Future[None], memoryview]], deadline: float) -> memoryview | BaseException | None:
        """What the first of these has read, or why it has not."""
        future, buffer = under_way.popleft()
        with contextlib.suppress(Exception):
            future.result(max(0.0, deadline - time.monotonic()))
        if not future.done() or future.cancelled():
            self._abandon(future, buffer, deadline)
            return None
        error = future.exception()
        if error is not None:
            self._keep(buffer)
        return error or buffer

    def _buffer(self, size: int) -> memoryview:
        with self._lock:
            for index, buffer in enumerate(self._buffers):
                if len(buffer) >= size:
                    del self._buffers[index]
                    return buffer
        fresh = huge_scratch(size)
        size = max(size, READ_BYTES)
        if len(fresh) - size >= READ_BYTES:
            self._keep(fresh[size:])
        return fresh[:size]

    def _keep(self, buffer: memoryview) -> None:
        with self._lock:
            self._buffers.append(buffer)
            while len(self._buffers) > self._ahead or sum(map(len, self._buffers)) > _BUFFER_BYTES:
                self._buffers.popleft()

    def _abandon(self, future: Future[None], buffer: memoryview, deadline: float) -> None:
        """Its buffer is the kernel's until it has ended."""
        if future.cancel():
            self._keep(buffer)
            return
        now = time.monotonic()
        with self._lock:
            self._abandoned[future] = now if now >= deadline else now + _PATIENCE_S

        def ended(_future: Future[None]) -> None:
            with self._lock:
                del self._abandoned[future]
            self._keep(buffer)

        future.add_done_callback(ended)


class _Workers:
    """Threads that a process does not wait for at its end: a disk that hangs would keep it from ending."""

    def __init__(self, count: int) -> None:
        self._count = 0
        self._closed = False
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        with contextlib.suppress(RuntimeError):  # no more threads for this user or container: fewer reads at once, or none
            for number in range(count):
                threading.Thread(target=self._work, name=f"cold-read-{number}", daemon=True).start()
                self._count += 1

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        if self._closed or not self._count:
            future.cancel()
        else:
            self._jobs.put((future, job))
        return future

    def close(self) -> None:
        self._closed = True
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while (given := self._jobs.get()) is not None:
            future, job = given
            if self._closed:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    job()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
            del given, future, job


def _grouped(wanted: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """One read each: (offset, bytes, the bodies in it). Neighbours lie in either order: the tail of a chain is evicted, and
    so written, first."""
    groups: list[tuple[int, int, list[tuple[int, int]]]] = []
    for offset, length in wanted:
        size = blocks(length)
        if groups:
            start, so_far, bodies = groups[-1]
            if offset in (start + so_far, start - size) and so_far + size <= READ_BYTES:
                bodies.append((offset, length))
                groups[-1] = (min(start, offset), so_far + size, bodies)
                continue
        groups.append((offset, size, [(offset, length)]))
    return groups
