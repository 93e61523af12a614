"""The threads of a messenger: what is told and written to one peer, and what takes long for one address or peer."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer.engine_peer import Peer
from hicache_mooncake.transfer.transport import Pending, Piece, TransportError

_IDLE_S = 5.0
_LOOK_S = 0.0003
"""While writes are under way: links tell nobody when one has ended."""
_SHARE_S = 1.0
"""A peer's memory may be heard of after the addresses in it, since that comes by another connection."""
_SHARE_LOOK_S = 0.005
log = QuietLog(logging.getLogger("hicache_mooncake.messenger"))


class Worker:
    """A thread that does one job after the other, and ends when there is none for some seconds. Thread-safe.

    Jobs are bounded by who puts them: a few for each session."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cond = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = False

    def put(self, job: Callable[[], None]) -> None:
        with self._cond:
            self._jobs.append(job)
            self.start()

    def start(self) -> None:
        """With the lock."""
        self._cond.notify()
        if not self._running:
            self._running = True
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except RuntimeError as error:
                self._running = False
                log(logging.ERROR, "threads", f"no thread for a messenger: {error}; raise the limit of threads (ulimit -u)")

    @property
    def idle(self) -> bool:
        with self._cond:
            return not self._running and not self._jobs

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # of our own making: the sessions of this peer end by their deadlines
                log(logging.ERROR, "job", "a job of a messenger failed", exc_info=True)

    def _next(self) -> Callable[[], None] | None:
        with self._cond:
            if not self._cond.wait_for(lambda: self._jobs, _IDLE_S):
                self._running = False
                return None
            return self._jobs.popleft()


@dataclass(slots=True)
class _Write:
    pieces: Sequence[tuple[int, int, int]]
    size: int
    deadline: float
    ended: Callable[[str, str], None]
    submit_until: float


class Line(Worker):
    """The same for one peer, and what is written to it: in order, and so much at a time."""

    def __init__(self, peer: Peer, most_bytes: int) -> None:
        super().__init__("messenger-line")
        self.peer = peer
        self._most_bytes = most_bytes
        self._writes: deque[_Write] = deque()
        self._under_way: list[tuple[Pending, _Write]] = []
        self._bytes = 0
        self._not_before = 0.0
        self.peak_bytes = 0
        """The most that has been under way."""

    def write(
        self, pieces: Sequence[tuple[int, int, int]], size: int, deadline: float, ended: Callable[[str, str], None]
    ) -> None:
        """`ended` is called on the line's thread, with a reason and a text where it failed."""
        with self._cond:
            self._writes.append(_Write(pieces, size, deadline, ended, time.monotonic() + _SHARE_S))
            self.start()

    @property
    def idle(self) -> bool:
        with self._cond:
            return not self._running and not self._jobs and not self._writes

    def _next(self) -> Callable[[], None] | None:
        while True:
            if self._under_way:
                self._collect()
            with self._cond:
                write = self._fitting()
                if write is None and self._jobs:
                    return self._jobs.popleft()
                if write is None:
                    if self._under_way or self._writes:
                        self._cond.wait(_LOOK_S if self._under_way else _SHARE_LOOK_S)
                    elif not self._cond.wait_for(lambda: self._jobs or self._writes, _IDLE_S):
                        self._running = False
                        return None
            if write is not None:
                self._submit(write)

    def _fitting(self) -> _Write | None:
        if not self._writes or time.monotonic() < self._not_before:
            return None
        if self._under_way and self._bytes + self._writes[0].size > self._most_bytes:
            return None
        return self._writes.popleft()

    def _submit(self, write: _Write) -> None:
        try:
            pending = self.peer.write([Piece(*piece) for piece in write.pieces], write.deadline)
        except TransportError as error:
            if error.reason == "bounds" and time.monotonic() < write.submit_until:
                self._not_before = time.monotonic() + _SHARE_LOOK_S
                with self._cond:
                    self._writes.appendleft(write)
            else:
                self._end(write, error.reason, str(error))
            return
        self._not_before = 0.0
        self._under_way.append((pending, write))
        self._bytes += write.size
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _end(self, write: _Write, reason: str, why: str) -> None:
        try:
            write.ended(reason, why)
        except Exception:  # of our own making, as above
            log(logging.ERROR, "job", "a messenger failed over the end of a write", exc_info=True)

    def _collect(self) -> None:
        left = []
        for pending, write in self._under_way:
            if not pending.done:
                left.append((pending, write))
                continue
            self._bytes -= write.size
            reason, why = "", ""
            try:
                pending.wait()
            except TransportError as error:
                reason, why = error.reason, str(error)
            self._end(write, reason, why)
        self._under_way = left
