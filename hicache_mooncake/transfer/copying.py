"""Memory of a peer that this process copies to and from by itself, and the threads that do."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hicache_mooncake.transfer.batches import Fenced
from hicache_mooncake.transfer.transport import Op, Piece


class Place(Fenced, abc.ABC):
    """A stretch of the peer's memory that was learned. Who copies holds it; once it has ended and is quiet, `close` it."""

    def __init__(self, number: int, address: int, length: int) -> None:
        super().__init__()
        self.number, self.address, self.length = number, address, length
        self.ready = False

    def holds(self, piece: Piece) -> bool:
        return self.address <= piece.remote and piece.remote + piece.length <= self.address + self.length

    @abc.abstractmethod
    def copy(self, op: Op, pieces: Sequence[Piece]) -> None:
        """Held. Raises TransportError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nobody holds it any more."""


class Copier:
    """Threads that copy for links. They start when there is something to copy."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._name = name
        self._cond = threading.Condition()
        self._queue: deque[Callable[[], bool]] = deque()
        self._started: list[threading.Thread] = []
        self._closed = False

    def put(self, turn: Callable[[], bool]) -> None:
        """Call `turn`, which takes a short time, on all threads until it says that there is nothing to do."""
        with self._cond:
            self._queue.extend([turn] * self.threads)
            while len(self._started) < self.threads and not self._closed:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads: then whoever waits for a batch copies it
                    thread.start()
                self._started.append(thread)
            self._cond.notify_all()

    def _work(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                turn = self._queue.popleft()
            if turn():
                with self._cond:
                    self._queue.append(turn)

    def close(self, seconds: float = threading.TIMEOUT_MAX) -> None:
        """Waits at most so long for the threads."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
        until = time.monotonic() + seconds
        for thread in self._started:
            if thread.is_alive():
                thread.join(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
