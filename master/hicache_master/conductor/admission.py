"""Which requests are turned away, when, and when they may come again (early rejection; Mooncake report, section 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from .books import DecodeBatch
from .cost import DecodeCost, Quantiles

Mode = Literal["off", "baseline", "early", "predictive"]
MODES: tuple[Mode, ...] = get_args(Mode)
Reason = Literal["prefill", "decode", "full", "no engine"]

HEADROOM = 0.1
"""Each priority is turned away at a load lower by this part than the one above it."""
RETRY_S = (1.0, 120.0)
"""The soonest and the latest time that anybody is told to come again."""
CONFIDENCE = 0.6
"""Part of the predictions that should not turn out too low: prefill times, and decode loads at the hand-over."""
LARGEST_CORRECTION = 2.0
"""And its inverse the smallest."""
LEAST_SEEN = 32
"""Outcomes before predictions are corrected by them."""
DURATION_STEP = 0.02
"""Weight of one more decode in their mean duration."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """HTTP 429. `load`: predicted over permitted time; `retry_after_s`: None where waiting does not help."""

    reason: Reason
    load: float
    retry_after_s: float | None
    late: bool = False
    """After the prefill, which was in vain."""


@dataclass
class Admission:
    """Load is predicted time over SLO; above 1, or less for lower priorities, a request is turned away.

    `off`: never. `baseline`: prefill load at arrival, decode load when the prefill is done. `early`: both at arrival, the
    decode load being that of this moment. `predictive`: the decode load of the moment when its prefill will be done, assuming
    that every decode lasts `decode_s`, the mean of those that were seen. All but `off` look at the decode load once more at the
    hand-over. Time comes in; not thread-safe."""

    mode: Mode = "predictive"
    ttft_slo_s: float = math.inf
    tbt_slo_s: float = math.inf
    decode_s: float = 20.0
    headroom: float = HEADROOM
    confidence: float = CONFIDENCE
    _outcomes: Quantiles = field(default_factory=Quantiles)
    """Of TBT at the hand-over over that predicted at arrival."""
    _promised: dict[Reason, float] = field(default_factory=dict)
    """For each reason the latest time that somebody was told to come again."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"admission {self.mode!r} is none of {', '.join(MODES)}")
        for name in ("ttft_slo_s", "tbt_slo_s", "decode_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("headroom", "confidence"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and less than 1, not {getattr(self, name)}")

    def limit(self, priority: int) -> float:
        """The load up to which a request is served. Priority 0 is the highest."""
        return float((1 - self.headroom) ** max(0, priority))

    def fits(self, tbt_s: float, slo_s: float, priority: int) -> bool:
        return self.mode == "off" or tbt_s <= slo_s * self.limit(priority)

    def decoded(self, seconds: float) -> None:
        """A decode took so long."""
        if 0 < seconds < math.inf:
            self.decode_s += DURATION_STEP * (seconds - self.decode_s)

    def prefill(
        self, load: float, slo_s: float, idle_s: float, spacing_s: float, priority: int, now: float
    ) -> Rejection | None:
        """At arrival. `idle_s`: the TTFT that an idle cluster would give it; `spacing_s`: between two that are taken in."""
        limit = self.limit(priority)
        if self.mode == "off" or load <= limit:
            return None
        if idle_s > limit * slo_s:
            return Rejection("prefill", load, None)
        return Rejection("prefill", load, self._retry("prefill", (load - limit) * slo_s, spacing_s, now))

    def decode(
        self, tbt_s: float, slo_s: float, batches: Sequence[DecodeBatch], priority: int, now: float, late: bool
    ) -> Rejection | None:
        """At arrival or, `late`, at the hand-over. `tbt_s`: predicted with this request in the batch."""
        if self.fits(tbt_s, slo_s, priority):
            return None
        load, limit = tbt_s / slo_s, self.limit(priority)
        ends = sorted(start + self.decode_s - now for batch in batches for start in batch.starts())
        surplus = min(len(ends), max(1, math.ceil(len(ends) * (1 - limit / load))))
        wait = ends[surplus - 1] if ends else 0.0
        spacing = self.decode_s / max(1, len(ends))
        return Rejection("decode", load, self._retry("decode", wait, spacing, now), late)

    def expected_tbt_s(self, batches: Sequence[DecodeBatch], tokens: int, cost: DecodeCost, at: float) -> float:
        """What `decode` judges at arrival: the mean decode engine with one more request of so many tokens, now or, predictive,
        when its prefill will be done (`at`)."""
        if self.mode == "predictive":
            counts = [batch.then(at, self.decode_s) for batch in batches]
        else:
            counts = [(batch.running, batch.running_tokens) for batch in batches]
        requests, held = (sum(column) / len(batches) for column in zip(*counts, strict=True))
        return cost.tbt_s(requests + 1, held + tokens)

    def came_true(self, predicted_s: float, tbt_s: float) -> None:
        """A TBT that was predicted at arrival, and what it was at the hand-over."""
        if predicted_s > 0:
            self._outcomes.add(tbt_s / predicted_s)

    def correction(self, batches: Sequence[DecodeBatch]) -> float:
        """What predictions are multiplied with: so many times as much it was at the hand-over in `confidence` of the last
        cases. Steady traffic keeps the batches about full, so that without it every other one would be too late. An idle
        cluster takes requests in as predicted: from rejections alone it would never learn that it was wrong."""
        idle = not any(batch.running or batch.coming for batch in batches)
        if self.mode != "predictive" or len(self._outcomes) < LEAST_SEEN or idle:
            return 1.0
        return min(LARGEST_CORRECTION, max(1 / LARGEST_CORRECTION, self._outcomes.at(self.confidence, 1.0)))

    def _retry(self, reason: Reason, wait_s: float, spacing_s: float, now: float) -> float:
        """Those who are turned away are told different times, as far apart as the cluster takes requests in: all at one time
        would be turned away again, and leave it idle until then."""
        earliest = now + max(RETRY_S[0], wait_s)
        at = min(max(earliest, self._promised.get(reason, -math.inf) + spacing_s), now + RETRY_S[1])
        self._promised[reason] = at
        return at - now
