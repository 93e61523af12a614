"""Calls that may hang with the disk: few wait for it, and all others go on without it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


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


class Newest(Generic[_T]):
    """The newest answer of a call that may hang, made on a thread of its own: nobody waits longer than `most_s`, and then
    the answer before it has to do. Thread-safe."""

    def __init__(self, call: Callable[[], _T | None], most_s: float, first: _T) -> None:
        """`call` must not raise; None from it is no answer. `first`: the answer until there is one."""
        self._call = call
        self._most_s = most_s
        self._lock = threading.Lock()
        self._answer = first
        self._asking: threading.Thread | None = None

    def get(self) -> _T:
        with self._lock:
            asking = self._asking
            if asking is None or not asking.is_alive():
                asking = self._asking = threading.Thread(target=self._ask, name="cold-newest", daemon=True)
                try:
                    asking.start()
                except RuntimeError:  # no more threads for this user or container
                    self._asking = None
                    return self._answer
        asking.join(self._most_s)
        return self._answer

    def _ask(self) -> None:
        answer = self._call()
        if answer is not None:
            self._answer = answer
