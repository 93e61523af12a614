"""The stacks of all threads on stderr when a daemon stands still: what nobody can get afterwards."""

from __future__ import annotations

import faulthandler
import time

STILL_S = 20.0
_RENEW_S = 1.0


class StackDump:
    """Whoever must not stand still says `alive`, often. After `still_s` without it the stacks are written, once; then it may
    be said again. The timer is faulthandler's, which needs no interpreter lock; a process has one, so this is for daemons."""

    def __init__(self, still_s: float = STILL_S) -> None:
        self._still_s = still_s
        self._renew_at = 0.0

    def alive(self) -> None:
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + min(_RENEW_S, self._still_s / 4)
            faulthandler.dump_traceback_later(self._still_s)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
