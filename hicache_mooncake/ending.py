"""Waiting for the signal that ends a daemon."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from types import FrameType


class Ending:
    """Takes signals over, in the main thread, for the rest of the process's life. The handler takes no lock: one that set a
    `threading.Event` while the main thread waits for it could wait for the main thread, which is itself."""

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self.by: signal.Signals | None = None
        """The first of them that came."""
        self.times = 0
        """How many came."""
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        for signum in signals:
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self.by = self.by or signal.Signals(signum)
        self.times += 1
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._event, 1)

    def wait(self, seconds: float) -> bool:
        """True when a signal has come, at once; False after so many seconds without one."""
        return bool(self._poll.poll(seconds * 1000))
