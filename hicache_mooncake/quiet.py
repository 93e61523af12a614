"""Log lines that cannot fill a disk: the first of a kind at once, then at most one an interval, with how many were left out."""

from __future__ import annotations

import logging
import threading
import time

EVERY_S = 30.0
_MAX_KINDS = 256


class QuietLog:
    """Thread-safe. `kind` decides what is the same; more than a few hundred kinds are one kind."""

    def __init__(self, log: logging.Logger, every_s: float = EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}

    def __call__(self, level: int, kind: str, text: str, *, exc_info: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            if kind not in self._seen and len(self._seen) >= _MAX_KINDS:
                kind = ""
            last, left_out = self._seen.get(kind, (-self._every_s, 0))
            if now - last < self._every_s:
                self._seen[kind] = (last, left_out + 1)
                return
            self._seen[kind] = (now, 0)
        more = f" ({left_out} more like it since)" if left_out else ""
        self._log.log(level, "%s%s", text, more, exc_info=exc_info)
