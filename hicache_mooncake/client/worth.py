"""Whether loading pages takes less time than computing them. No I/O and no clock: time comes in.

A pool behind a slow network or on a busy host may be slower than the engine's own prefill, and then a hit makes the first token
later. What a load takes is known from the loads before it: bytes a second, apart for pages of this host and of others, and how
much of what was loaded lately came from where. What the engine takes is the operator's to say (`skip_when_slower`).

A rank that loads nothing learns nothing, so now and then lookups are answered as if it were worth it. All ranks of a model have
to agree, as SGLang takes the shortest of their answers: that is why it is a matter of the time of day.
"""

from __future__ import annotations

import threading

PROBE_EVERY_S, PROBE_FOR_S = 30.0, 1.0
"""So much of the wall clock's time goes to trying again."""
STALE_S = 600.0
"""What was measured longer ago says nothing."""
_LEAST_LOADS = 3
_LEAST_BYTES = 256 << 10
"""Of smaller loads the time says nothing about a rate."""
_WEIGHT = 0.25
"""Of the newest measurement."""


class _Rate:
    """Seconds a byte, as a moving average."""

    def __init__(self) -> None:
        self.loads = 0
        self.seconds_a_byte = 0.0
        self.at = 0.0

    def add(self, seconds_a_byte: float, now: float) -> None:
        if now - self.at > STALE_S:
            self.loads = 0
        weight = _WEIGHT if self.loads else 1.0
        self.seconds_a_byte += weight * (seconds_a_byte - self.seconds_a_byte)
        self.loads += 1
        self.at = now

    def known(self, now: float) -> bool:
        return self.loads >= _LEAST_LOADS and now - self.at <= STALE_S


class Worth:
    """`tokens_per_s`: what the engine prefills; 0: everything is worth it. `now`: wall-clock time, in seconds. Thread-safe."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._lock = threading.Lock()
        self._here, self._elsewhere = _Rate(), _Rate()
        self._share_elsewhere = 0.0
        """Of what was loaded lately."""

    def loaded(self, here_bytes: int, elsewhere_bytes: int, seconds: float, now: float) -> None:
        """A load took so long. One from both sides tells only of how much comes from where."""
        total = here_bytes + elsewhere_bytes
        if not self._tokens_per_s or total < _LEAST_BYTES or seconds <= 0:
            return
        share = elsewhere_bytes / total
        with self._lock:
            self._share_elsewhere += _WEIGHT * (share - self._share_elsewhere)
            if share <= 0.1:
                self._here.add(seconds / total, now)
            elif share >= 0.9:
                self._elsewhere.add(seconds / total, now)

    def is_worth(self, bytes_a_page: int, tokens_a_page: int, now: float) -> bool:
        """Whether pages of this size are loaded sooner than computed. True while that is not known, and when it is time to
        measure it again."""
        if not self._tokens_per_s or bytes_a_page <= 0 or now % PROBE_EVERY_S < PROBE_FOR_S:
            return True
        with self._lock:
            here, elsewhere, share = self._here, self._elsewhere, self._share_elsewhere
            if not here.known(now) and not elsewhere.known(now):
                return True
            # With one side unknown, nearly nothing came from there.
            near = here.seconds_a_byte if here.known(now) else elsewhere.seconds_a_byte
            far = elsewhere.seconds_a_byte if elsewhere.known(now) else here.seconds_a_byte
            seconds = bytes_a_page * ((1 - share) * near + share * far)
        return seconds <= tokens_a_page / self._tokens_per_s
