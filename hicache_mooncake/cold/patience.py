"""Calls that may hang with the disk: few wait for it, and all others go on without it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator


class Patience:
    """While a call has been under way for more than `most_s`, no other one begins. Thread-safe."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._since: dict[int, float] = {}
        """In the order in which they began."""

    @property
    def over(self) -> bool:
        """Does a call hang?"""
        with self._lock:
            return self._hangs(time.monotonic())

    def _hangs(self, now: float) -> bool:
        return now - next(iter(self._since.values()), now) > self._most_s

    @contextlib.contextmanager
    def call(self) -> Iterator[bool]:
        """Around a call. False: leave it."""
        now = time.monotonic()
        with self._lock:
            number = next(self._numbers)
            if may := not self._hangs(now):
                self._since[number] = now
        try:
            yield may
        finally:
            with self._lock:
                self._since.pop(number, None)
