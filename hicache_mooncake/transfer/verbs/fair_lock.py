"""A lock under which a busy thread does not keep the others out."""

from __future__ import annotations

import threading
import time


class FairLock:
    """Like `threading.RLock`, also beneath a `threading.Condition`, but who waits has it next: a thread that lets go of it and
    takes it again at once gets it after those that were waiting. With RLock that thread mostly wins, for seconds on end."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        """Held by the one that has it next. The others wait for this."""
        self._lock = threading.Lock()
        self._owner = 0
        self._depth = 0

    def acquire(self, timeout_s: float = threading.TIMEOUT_MAX) -> bool:
        """False when the time is over."""
        me = threading.get_ident()
        if self._owner != me:
            until = time.monotonic() + timeout_s
            if not self._next.acquire(timeout=timeout_s):
                return False
            try:
                if not self._lock.acquire(timeout=min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)):
                    return False
            finally:
                self._next.release()
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        assert self._is_owned(), "released by a thread that does not hold it"
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()

    # ------------------------------------------------------------------ for threading.Condition

    def _release_save(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()
