"""When to try again, and whom a wait may be blamed on."""

from __future__ import annotations

import enum
import math
import random
import time
from collections.abc import Callable

LEAST_S = 0.005
"""With less time than this nobody is asked: the answer could not come."""
BLAME_AFTER_S = 0.2
"""Who was waited for this long and did not answer is at fault; who was not given the time is not."""
STABLE_S = 10.0
"""Who failed again within this time of being seen to work did not really work."""


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

    @property
    def at(self) -> float:
        """When the next try is due, by the clock."""
        return self._at

    def failed(self, at_least_s: float = 0.0) -> None:
        self._pause_s = min(max(self._pause_s * 2, self._first_s, at_least_s), self._most_s)
        self._at = self._clock() + self._pause_s * self._rng.uniform(0.8, 1.2)

    def retry_now(self) -> None:
        """The next try is due at once; its failure still makes the pause longer."""
        self._at = 0.0

    def succeeded(self) -> None:
        self._pause_s = self._at = 0.0


class Admission(enum.Enum):
    GO = enum.auto()
    PROBE = enum.auto()
    """One try, to see whether it works again: the others wait for what becomes of it."""
    NO = enum.auto()


class Breaker:
    """Whether somebody is to be tried. After a failure not for a while, and then once, until it has been seen to work.

    A failure soon after it was seen to work makes the pause longer, as if it had never worked. Not thread-safe.
    """

    def __init__(
        self,
        first_s: float,
        most_s: float,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._pause = Backoff(first_s, most_s, clock, rng)
        self._clock = clock
        self._probing = False
        self._mended_at = -math.inf
        self.open = False

    def admit(self) -> Admission:
        """A PROBE must be followed by `failed`, `succeeded` or `undecided`: until then nobody else is let through."""
        if not self.open:
            return Admission.GO
        if self._probing or not self._pause.due():
            return Admission.NO
        self._probing = True
        return Admission.PROBE

    def failed(self) -> None:
        if not self.open and self._clock() - self._mended_at > STABLE_S:
            self._pause.succeeded()
        self.open, self._probing = True, False
        self._pause.failed()

    def succeeded(self) -> None:
        if self.open:
            self._mended_at = self._clock()
        self.open = self._probing = False

    def undecided(self) -> None:
        """The probe ended without telling whether it works."""
        self._probing = False

    @property
    def forgettable(self) -> bool:
        """It works, and has for a while."""
        return not self.open and self._clock() - self._mended_at > STABLE_S
