"""What a router counts, as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .accounts import Accounts
from .fairness import Gate
from .workers import Worker

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_OWN_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.05, 0.1, 0.5)
_PREFIX = "hicache_router_"


class Metrics:
    """`page_bytes` and `page_tokens` say what a token is in bytes."""

    def __init__(
        self,
        workers: Iterable[Worker],
        gate: Gate,
        accounts: Accounts,
        token_bytes: Callable[[], float],
        more: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(f"{_PREFIX}requests", "By path and how they ended.", ["path", "outcome"], registry=registry)
        self.rejected = Counter(f"{_PREFIX}rejected", "Turned away, by reason.", ["reason"], registry=registry)
        self.retries = Counter(f"{_PREFIX}retries", "Sent to another engine, nothing having come.", registry=registry)
        self.failures = Counter(f"{_PREFIX}engine_failures", "Of engines, as requests saw them.", ["worker"], registry=registry)
        self.ttft = Histogram(f"{_PREFIX}ttft_seconds", "From arrival to the first byte.", buckets=_TTFT_S, registry=registry)
        self.own = Histogram(
            f"{_PREFIX}overhead_seconds", "From arrival to sending, without waiting.", buckets=_OWN_S, registry=registry
        )
        self.pool = Counter(f"{_PREFIX}pool_questions", "To the masters, by what came of them.", ["result"], registry=registry)
        registry.register(_State(workers, gate, accounts, token_bytes, more))

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))


class _State:
    def __init__(
        self,
        workers: Iterable[Worker],
        gate: Gate,
        accounts: Accounts,
        token_bytes: Callable[[], float],
        more: Callable[[], dict[str, float]],
    ) -> None:
        self._workers, self._gate, self._accounts = workers, gate, accounts
        self._token_bytes, self._more = token_bytes, more

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        up = GaugeMetricFamily(f"{_PREFIX}worker_up", "1 where requests may go.", labels=["worker", "role"])
        busy = GaugeMetricFamily(f"{_PREFIX}worker_requests", "That run or wait there.", labels=["worker", "role"])
        for worker in self._workers:
            up.add_metric([worker.name, worker.role], float(worker.state == "up"))
            busy.add_metric([worker.name, worker.role], worker.in_flight)
        yield up
        yield busy
        yield GaugeMetricFamily(f"{_PREFIX}in_flight", "Requests in engines.", value=self._gate.inside)
        yield GaugeMetricFamily(f"{_PREFIX}waiting", "Requests in the waiting room.", value=self._gate.queued)
        accounts = self._accounts
        yield CounterMetricFamily(f"{_PREFIX}prompt_tokens", "Of complete answers.", value=accounts.prompt_tokens)
        yield CounterMetricFamily(f"{_PREFIX}cached_tokens", "Of these, what engines found.", value=accounts.cached_tokens)
        missed = CounterMetricFamily(f"{_PREFIX}computed_tokens", "The others, and why.", labels=["reason"])
        for reason, tokens in accounts.missed.items():
            missed.add_metric([reason], tokens)
        yield missed
        tiers = CounterMetricFamily(f"{_PREFIX}cached_tokens_by_tier", "Where engines say so.", labels=["tier"])
        volume = CounterMetricFamily(f"{_PREFIX}cached_bytes_by_tier", "The same in bytes.", labels=["tier"])
        for tier, tokens in accounts.by_tier.items():
            tiers.add_metric([tier], tokens)
            volume.add_metric([tier], tokens * self._token_bytes())
        yield tiers
        yield volume
        for name, value in self._more().items():
            yield GaugeMetricFamily(f"{_PREFIX}{name}", "Of what the router knows.", value=value)
