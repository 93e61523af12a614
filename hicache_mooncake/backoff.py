"""When to try again, and whom a wait may be blamed on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

LEAST_S = 0.005
"""With less time than this nobody is asked: the answer could not come."""
BLAME_AFTER_S = 0.2
"""Who was waited for this long and did not answer is at fault; who was not given the time is not."""


class Backoff:
    """The pause doubles with every failure, with jitter, up to a limit. Not thread-safe: whoever tries holds the lock."""

    def __init__(
        self,
        first_s: float,
        most_s: float,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._clock, self._rng = clock, rng or random.Random()
        self._pause_s = 0.0
        self._at = 0.0

    def due(self) -> bool:
        return self._clock() >= self._at

    def failed(self, at_least_s: float = 0.0) -> None:
        self._pause_s = min(max(self._pause_s * 2, self._first_s, at_least_s), self._most_s)
        self._at = self._clock() + self._pause_s * self._rng.uniform(0.8, 1.2)

    def retry_now(self) -> None:
        """The next try is due at once; its failure still makes the pause longer."""
        self._at = 0.0

    def succeeded(self) -> None:
        self._pause_s = self._at = 0.0
