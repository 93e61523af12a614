"""What a prefill, a decode step and a transfer will take, from a model's shape and from what was observed."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW = 512
"""Residuals that quantiles are of, the last ones."""
REMEMBERED = 400
"""Observations that a fit is about: older ones fade."""
PRIOR_OBSERVATIONS = 1.0
"""What the prior of each coefficient weighs, in observations."""
OUTLIER = 3.0
"""A residual of so many times the median one counts less, the less the larger it is."""
LEAST_RESIDUAL = 0.02
"""What the median residual is taken for at least, so that a perfect past does not make every deviation an outlier."""
LARGEST_FACTOR = 100.0
"""No coefficient leaves its prior by more."""


@dataclass(frozen=True)
class ModelShape:
    """A transformer, as far as its work and its KV bytes go (Mooncake, FAST'25, section 2.2)."""

    layers: int
    width: int
    heads_per_kv_head: int
    element_bytes: int = 2
    attention: float = 4.0
    linear: float = 22.0

    def work(self, tokens: float) -> float:
        """FLOP of a prefill of so many tokens without a cache. With p of n tokens cached it is work(n) - work(p)."""
        return self.layers * tokens * self.width * (self.attention * tokens + self.linear * self.width)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return 2 * self.layers * self.width * self.element_bytes // self.heads_per_kv_head

    def prefill_prior(self, flops: float, fixed_s: float) -> tuple[float, float, float]:
        """Seconds a prefill, a new token, and of n^2 - p^2, at so many FLOP a second."""
        linear = self.layers * self.linear * self.width * self.width
        return fixed_s, linear / flops, self.layers * self.attention * self.width / flops


LLAMA3_70B = ModelShape(layers=80, width=8192, heads_per_kv_head=8)


def min_bandwidth(model: ModelShape, cached_tokens: float, flops: float) -> float:
    """Bytes a second above which loading a cached prefix of this length is sooner done than computing it."""
    work = model.attention * cached_tokens * model.width + model.linear * model.width * model.width
    return 2 * model.width * model.element_bytes * flops / (model.heads_per_kv_head * work)


class Quantiles:
    """Of the last `size` values. A value costs O(log size) comparisons; not thread-safe."""

    def __init__(self, size: int = WINDOW) -> None:
        self._recent: deque[float] = deque(maxlen=size)
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._ordered[bisect_left(self._ordered, self._recent[0])]
        self._recent.append(value)
        insort(self._ordered, value)

    def at(self, share: float, default: float) -> float:
        """The smallest value that at least this share does not exceed; `default` where there is none yet."""
        if not self._ordered:
            return default
        return self._ordered[min(len(self._ordered) - 1, max(0, math.ceil(share * len(self._ordered)) - 1))]


class Regression:
    """Seconds as c0 + c1*x1 + c2*x2, refitted with every observation.

    Least squares of relative errors with exponentially fading weights, drawn to `prior` where observations do not say enough. A
    residual far beyond the usual ones counts less (Huber), so a stalled request hardly moves the fit, and a change that lasts
    does. Coefficients are never negative. Memory is constant. Not thread-safe.
    """

    def __init__(self, prior: Sequence[float], remembered: int = REMEMBERED) -> None:
        if len(prior) != 3 or min(prior) < 0 or not math.isfinite(sum(prior)) or sum(prior) == 0:
            raise ValueError(f"a prior is three coefficients, none negative and one positive at least, not {list(prior)!r}")
        self._prior = tuple(prior)
        self._fade = 1 - 1 / remembered
        self._factors = [1.0, 1.0, 1.0]
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._set()
        self._ratios = Quantiles()
        self._errors = Quantiles()

    @property
    def coefficients(self) -> tuple[float, float, float]:
        return self._c0, self._c1, self._c2

    def seconds(self, x1: float, x2: float) -> float:
        return self._c0 + self._c1 * x1 + self._c2 * x2

    def ratio_quantile(self, share: float) -> float:
        """Observed over predicted time, as it was predicted before the observation; 1 before the first."""
        return self._ratios.at(share, 1.0)

    def observe(self, x1: float, x2: float, seconds: float) -> None:
        """It took so long. Nonsense (nothing, negative, infinite) is ignored."""
        parts = [self._prior[0], self._prior[1] * x1, self._prior[2] * x2]
        expected = sum(parts)
        predicted = self.seconds(x1, x2)
        if not (0 < seconds < math.inf and 0 < expected < math.inf and predicted > 0 and min(parts) >= 0):
            return
        ratio = seconds / predicted
        error = abs(ratio - 1)
        limit = OUTLIER * max(LEAST_RESIDUAL, self._errors.at(0.5, error))
        self._ratios.add(ratio)
        self._errors.add(error)
        weight = 1.0 if error <= limit else limit / error
        shares = [part / expected for part in parts]
        target = seconds / expected
        for i in range(3):
            for j in range(3):
                self._products[i][j] = self._fade * self._products[i][j] + weight * shares[i] * shares[j]
            self._sums[i] = self._fade * self._sums[i] + weight * shares[i] * target
        self._factors = _solve(self._products, self._sums)
        self._set()

    def _set(self) -> None:
        self._c0, self._c1, self._c2 = (p * f for p, f in zip(self._prior, self._factors, strict=True))


def _solve(products: list[list[float]], sums: list[float]) -> list[float]:
    """Factors on the prior, by least squares with a pull towards 1; what would be negative is 0, the others fitted again."""
    free = [0, 1, 2]
    while True:
        rows = [[products[i][j] + (PRIOR_OBSERVATIONS if i == j else 0.0) for j in free] for i in free]
        right = [sums[i] + PRIOR_OBSERVATIONS for i in free]
        for k in range(len(free)):  # positive definite: no pivoting needed
            for i in range(k + 1, len(free)):
                share = rows[i][k] / rows[k][k]
                right[i] -= share * right[k]
                for j in range(k, len(free)):
                    rows[i][j] -= share * rows[k][j]
        found = [0.0] * len(free)
        for k in reversed(range(len(free))):
            rest = sum(rows[k][j] * found[j] for j in range(k + 1, len(free)))
            found[k] = (right[k] - rest) / rows[k][k]
        kept = [i for i, value in zip(free, found, strict=True) if value >= 0]
        if len(kept) == len(free):
            factors = [0.0, 0.0, 0.0]
            for i, value in zip(free, found, strict=True):
                factors[i] = min(value, LARGEST_FACTOR)
            return factors
        free = kept


class PrefillCost:
    """A prefill of n tokens of which p are there: c0 + c1*(n - p) + c2*(n^2 - p^2)."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.fit = Regression(prior)

    def seconds(self, tokens: int, cached: int) -> float:
        return self.fit.seconds(tokens - cached, tokens * tokens - cached * cached)

    def observe(self, tokens: int, cached: int, seconds: float) -> None:
        self.fit.observe(tokens - cached, tokens * tokens - cached * cached, seconds)


class DecodeCost:
    """A decode step, which is the TBT of all that are in it: c0 + c1*(requests) + c2*(KV tokens read)."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.fit = Regression(prior)

    def tbt_s(self, running: float, kv_tokens: float) -> float:
        return self.fit.seconds(running, kv_tokens)

    def observe(self, running: int, kv_tokens: int, seconds: float) -> None:
        self.fit.observe(running, kv_tokens, seconds)


RATE_STEP = 0.2
"""Weight of a new transfer in the measured rate."""
RATE_LIMIT = 10.0
"""The measured rate stays within a factor of so much of the nominal one."""
LEAST_MEASURED_BYTES = 64 << 10
"""Shorter transfers measure latency, not a rate."""


@dataclass(slots=True)
class _Link:
    bytes_per_s: float
    cold_bytes_per_s: float
    in_flight: int = 0


@dataclass
class Links:
    """How fast each holder sends: a measured rate, shared by the transfers that are under way from it. Not thread-safe.

    A holder is known from its first transfer until `forget`."""

    bytes_per_s: float
    """Nominal, of a holder's outgoing link."""
    cold_bytes_per_s: float = math.inf
    """Nominal, of a cold tier's disk."""
    latency_s: float = 0.0
    cold_latency_s: float = 0.0
    _links: dict[str, _Link] = field(default_factory=dict)

    def page_s(self, holder: str, size: int, cold: bool) -> float:
        """Seconds for so many bytes from this holder, if one more transfer from it starts now. Without the latency."""
        link = self._links.get(holder)
        if link is None:
            return size / (min(self.bytes_per_s, self.cold_bytes_per_s) if cold else self.bytes_per_s)
        rate = min(link.bytes_per_s, link.cold_bytes_per_s) if cold else link.bytes_per_s
        return size * (link.in_flight + 1) / rate

    def in_flight(self, holder: str) -> int:
        link = self._links.get(holder)
        return link.in_flight if link is not None else 0

    def begin(self, holder: str) -> None:
        link = self._links.get(holder)
        if link is None:
            link = self._links[holder] = _Link(self.bytes_per_s, self.cold_bytes_per_s)
        link.in_flight += 1

    def end(self, holder: str) -> None:
        """It is over, or will never be. One that was never begun, or whose holder was forgotten, is ignored."""
        link = self._links.get(holder)
        if link is not None and link.in_flight:
            link.in_flight -= 1

    def observe(self, holder: str, size: int, seconds: float, sharing: int, cold: bool) -> None:
        """So many bytes came in this time, while `sharing` transfers, this one counted, shared the holder's link."""
        if size < LEAST_MEASURED_BYTES or not 0 < seconds < math.inf:
            return
        link = self._links.get(holder)
        if link is None:
            return
        rate = size * max(1, sharing) / seconds
        if cold:
            link.cold_bytes_per_s = _step(link.cold_bytes_per_s, rate, self.cold_bytes_per_s)
        else:
            link.bytes_per_s = _step(link.bytes_per_s, rate, self.bytes_per_s)

    def forget(self, holder: str) -> None:
        self._links.pop(holder, None)

    def validate(self) -> None:
        assert all(link.in_flight >= 0 and link.bytes_per_s > 0 for link in self._links.values())


def _step(rate: float, seen: float, nominal: float) -> float:
    if math.isinf(nominal):
        return seen if math.isinf(rate) else rate + RATE_STEP * (seen - rate)
    seen = min(max(seen, nominal / RATE_LIMIT), nominal * RATE_LIMIT)
    return rate + RATE_STEP * (seen - rate)


@dataclass
class Costs:
    """What everything takes. Bytes are those of one page of all the layers and heads of the model."""

    prefill: PrefillCost
    decode: DecodeCost
    links: Links
    page_tokens: int
    page_bytes: int
    host_page_s: float = 0.0
    """One page from L2 to the device; 0 where loading is hidden behind the computation of the layers before."""
    dram_page_s: float = 0.0
    """One page from the store node of the engine's own host."""
    cold_page_s: float = 0.0
    """One page from its disk."""
    fetch_while_queued: bool = False
    """Do pages travel while the request waits (SGLang's prefetch), or when its turn has come (the paper)?"""
    threshold: float = 1.3
    """Pages are fetched only if that makes the prefix longer than this many times what the engine has."""

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise ValueError(f"threshold must be at least 1, not {self.threshold}")
        if self.page_tokens < 1 or self.page_bytes < 1:
            raise ValueError(f"a page has tokens and bytes, not {self.page_tokens} and {self.page_bytes}")

    def own_page_s(self, tier: int) -> float:
        return (0.0, self.host_page_s, self.dram_page_s, self.cold_page_s)[tier]
