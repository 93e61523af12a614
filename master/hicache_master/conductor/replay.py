"""A trace of real requests through the conductor's own decisions, in simulated time."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .admission import MODES, Admission, Mode, Rejection
from .cost import LLAMA3_70B, Costs, DecodeCost, Links, ModelShape, PrefillCost
from .decide import Conductor, Decision, Request
from .policies import POLICIES
from .prefixes import COLD, DRAM, Prefixes

A100_FLOPS = 312e12
GPUS = 8
"""Of one engine."""
_INCARNATION = "replayed"


@dataclass(frozen=True, slots=True)
class Arrival:
    """`pages`: names of the prompt's pages, each of which stands for the whole prefix up to it."""

    at_s: float
    tokens: int
    output_tokens: int
    pages: tuple[int, ...]


def read_trace(path: Path, requests: int | None = None) -> list[Arrival]:
    """The first requests of a file in the format that the Mooncake project published (FAST'25): a JSON object a line, in the
    order of time, with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

    Raises ValueError, with the line, for anything else."""
    arrivals: list[Arrival] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if requests is not None and len(arrivals) >= requests:
                break
            try:
                row = json.loads(line)
                arrival = Arrival(
                    float(row["timestamp"]) / 1e3,
                    int(row["input_length"]),
                    int(row["output_length"]),
                    tuple(int(page) for page in row["hash_ids"]),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error!r} instead of timestamp, input_length, output_length and hash_ids"
                ) from error
            before_s = arrivals[-1].at_s if arrivals else 0.0
            if not before_s <= arrival.at_s < math.inf or arrival.tokens < 1 or arrival.output_tokens < 0:
                raise ValueError(
                    f"{path}, line {number}: {arrival.tokens} tokens at {arrival.at_s:g} s after a request at {before_s:g} s: "
                    "a prompt has at least one token, and the lines are in the order of time"
                )
            arrivals.append(arrival)
    if not arrivals:
        raise ValueError(f"{path}: no request in it")
    return arrivals


@dataclass(frozen=True)
class Setup:
    """The cluster that is simulated. Defaults are the published comparison's: 8 A100 an engine, LLaMA3-70B, 87 GB/s."""

    policy: str = "pool-aware"
    prefills: int = 8
    decodes: int = 8
    """0: nobody decodes, and requests end with their prefill."""
    model: ModelShape = LLAMA3_70B
    mfu: float = 0.5
    fixed_s: float = 0.02
    speed: float = 1.0
    """How many times as fast as they came requests arrive."""
    page_tokens: int = 512
    cache_tokens: int = 3_000_000
    """DRAM of the store node of each prefill engine."""
    bandwidth: float = 87e9
    """Bytes a second out of each store node."""
    cold_tokens: int = 0
    """Disk of each store node."""
    cold_bandwidth: float = 6e9
    threshold: float = 1.3
    fetch_while_queued: bool = False
    admission: Mode = "off"
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    step_s: float = 0.015
    """A decode step of nothing."""
    request_step_s: float = 0.004
    """More for each request in it."""
    read_bandwidth: float = 8 * 2.039e12
    """Bytes a second at which a step reads the batch's KV."""
    noise: float = 0.0
    """Standard deviation of the logarithm of the time that a prefill takes over the model's."""
    prior: float = 1.0
    """What the conductor believes of prefill times at first, over what they are."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r} is none of {', '.join(POLICIES)}")
        if self.admission not in MODES:
            raise ValueError(f"admission {self.admission!r} is none of {', '.join(MODES)}")
        for name in ("prefills", "page_tokens", "cache_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("mfu", "speed", "bandwidth", "cold_bandwidth", "read_bandwidth", "step_s", "prior"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("decodes", "cold_tokens", "noise", "fixed_s", "request_step_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")

    def conductor(self) -> Conductor:
        flops = GPUS * A100_FLOPS * self.mfu
        page_bytes = self.model.token_bytes * self.page_tokens
        prior = self.model.prefill_prior(flops / self.prior, self.fixed_s * self.prior)
        costs = Costs(
            PrefillCost(prior),
            DecodeCost((self.step_s, self.request_step_s, self.model.token_bytes / self.read_bandwidth)),
            Links(self.bandwidth, self.cold_bandwidth),
            self.page_tokens,
            page_bytes,
            cold_page_s=page_bytes / self.cold_bandwidth,
            fetch_while_queued=self.fetch_while_queued,
            threshold=self.threshold,
        )
        admission = Admission(self.admission, self.ttft_slo_s, self.tbt_slo_s)
        return Conductor(POLICIES[self.policy](), costs, Prefixes(), admission)


@dataclass
class Outcome:
    """What became of the requests. Times in seconds; lists of prefill engines are in their order."""

    requests: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """Of each request whose prefill was done, in the order in which they ended."""
    rejected: dict[str, int] = field(default_factory=dict)
    """By reason: prefill, decode, and decode after prefill."""
    pages: int = 0
    reused_pages: int = 0
    fetched_pages: int = 0
    busy_s: list[float] = field(default_factory=list)
    wasted_s: float = 0.0
    """Of `busy_s`, for requests that were turned away afterwards."""
    decoding: list[int] = field(default_factory=list)
    """How many requests were being decoded when each one arrived."""
    arrived_s: list[float] = field(default_factory=list)
    """When that was."""
    decoded_tokens: int = 0
    decode_s: float = 0.0
    """Of all requests that were decoded, together."""

    @property
    def rejections(self) -> int:
        return sum(self.rejected.values())

    @property
    def late(self) -> int:
        return self.rejected.get("decode, after prefill", 0)

    @property
    def wasted_share(self) -> float:
        return self.wasted_s / max(1e-9, sum(self.busy_s))

    @property
    def mean_ttft_s(self) -> float:
        return sum(self.ttft_s) / len(self.ttft_s) if self.ttft_s else math.nan

    @property
    def hit_ratio(self) -> float:
        return self.reused_pages / max(1, self.pages)

    @property
    def imbalance(self) -> float:
        """The busiest prefill engine over the mean."""
        return max(self.busy_s) * len(self.busy_s) / max(1e-9, sum(self.busy_s))

    @property
    def mean_tbt_s(self) -> float:
        return self.decode_s / self.decoded_tokens if self.decoded_tokens else math.nan

    def quantile_s(self, share: float) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


@dataclass(slots=True)
class _Job:
    arrival: Arrival
    decision: Decision
    at: float
    reused: int = 0
    prefill_s: float = 0.0
    occupied_s: float = 0.0
    ready_at: float = 0.0


class _Store:
    """The pages of one store node, least recently used first; what leaves DRAM goes to the disk if there is one."""

    def __init__(self, pages: int, cold_pages: int) -> None:
        self._limits = pages, cold_pages
        self.dram: OrderedDict[int, None] = OrderedDict()
        self.cold: OrderedDict[int, None] = OrderedDict()

    def store(self, pages: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """The last page first, so that heads outlive tails. Returns what left DRAM, what came to the disk, what left it."""
        for page in reversed(pages):
            self.dram[page] = None
            self.dram.move_to_end(page)
        gone = [self.dram.popitem(last=False)[0] for _ in range(len(self.dram) - self._limits[0])]
        came: list[int] = []
        if self._limits[1]:
            came = gone
            for page in gone:
                self.cold[page] = None
                self.cold.move_to_end(page)
        left = [self.cold.popitem(last=False)[0] for _ in range(len(self.cold) - self._limits[1])]
        return gone, came, left


class _Batch:
    """One decode engine: all requests in it gain tokens at the same rate, which hangs on how many they are."""

    def __init__(self, cost: DecodeCost) -> None:
        self._cost = cost
        self._ends: list[tuple[float, str, int]] = []
        """Tokens at which each ends, request, KV tokens."""
        self._done = 0.0
        """Tokens that each would have gained if it had been here from the start."""
        self._as_of = 0.0
        self._kv_tokens = 0
        self.version = 0

    def __len__(self) -> int:
        return len(self._ends)

    def advance(self, now: float) -> None:
        if self._ends:
            self._done += (now - self._as_of) / self._step_s()
        self._as_of = now

    def join(self, request: str, kv_tokens: int, output_tokens: int, now: float) -> None:
        self.advance(now)
        heapq.heappush(self._ends, (self._done + max(1, output_tokens), request, kv_tokens))
        self._kv_tokens += kv_tokens
        self.version += 1

    def pop(self, now: float) -> str:
        self.advance(now)
        end, request, kv_tokens = heapq.heappop(self._ends)
        self._done = max(self._done, end)
        self._kv_tokens -= kv_tokens
        self.version += 1
        return request

    def next_end(self) -> float:
        return self._as_of + max(0.0, self._ends[0][0] - self._done) * self._step_s()

    def _step_s(self) -> float:
        return self._cost.tbt_s(len(self._ends), self._kv_tokens)


class _Node:
    """One prefill engine with the store node of its host."""

    def __init__(self, name: str, number: int, store: _Store) -> None:
        self.name = name
        self.number = number
        self.store = store
        self.queue: deque[_Job] = deque()
        self.busy = False


class Replay:
    """Runs a trace through a conductor and a cluster that does what it says. Deterministic."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.conductor = setup.conductor()
        self.outcome = Outcome(busy_s=[0.0] * setup.prefills)
        self._random = random.Random(setup.seed)
        flops = GPUS * A100_FLOPS * setup.mfu
        self._true = PrefillCost(setup.model.prefill_prior(flops, setup.fixed_s))
        self._page_bytes = self.conductor.costs.page_bytes
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbered = 0
        self._sending: dict[str, int] = {}
        self._nodes: dict[str, _Node] = {}
        self._batches: dict[str, _Batch] = {}
        self._began: dict[str, tuple[float, int]] = {}
        cache, cold = setup.cache_tokens // setup.page_tokens, setup.cold_tokens // setup.page_tokens
        for number in range(setup.prefills):
            name = f"prefill-{number}"
            self._nodes[name] = _Node(name, number, _Store(cache, cold))
            self.conductor.add_prefill(name, _INCARNATION, 0.0, store=name)
        for number in range(setup.decodes):
            name = f"decode-{number}"
            self._batches[name] = _Batch(DecodeCost(self.conductor.costs.decode.fit.coefficients))
            self.conductor.add_decode(name)

    def run(self, arrivals: Sequence[Arrival], progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """`progress` hears how many requests have arrived."""
        for number, arrival in enumerate(arrivals):
            at = arrival.at_s / self.setup.speed
            self._until(at)
            self._arrive(str(number), arrival, at)
            if number % 64 == 0:
                progress(number)
        self._until(math.inf)
        progress(len(arrivals))
        return self.outcome

    def _until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            at, _, act = heapq.heappop(self._events)
            act(at)

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        self._numbered += 1
        heapq.heappush(self._events, (time, self._numbered, act))

    def _arrive(self, name: str, arrival: Arrival, now: float) -> None:
        outcome = self.outcome
        outcome.requests += 1
        outcome.arrived_s.append(now)
        outcome.decoding.append(sum(len(batch) for batch in self._batches.values()))
        decision = self.conductor.route(Request(name, arrival.pages, arrival.tokens), now)
        if isinstance(decision, Rejection):
            self._reject(decision)
            return
        self.conductor.confirm(name, now)
        job = _Job(arrival, decision, now, ready_at=now)
        node = self._nodes[decision.prefill.engine]
        node.queue.append(job)
        if self.setup.fetch_while_queued:
            job.ready_at = now + self._fetch(job, node, now)
        self._serve(node, now)

    def _reject(self, rejection: Rejection) -> None:
        reason = rejection.reason + (", after prefill" if rejection.late else "")
        self.outcome.rejected[reason] = self.outcome.rejected.get(reason, 0) + 1

    def _serve(self, node: _Node, now: float) -> None:
        if node.busy or not node.queue:
            return
        node.busy = True
        job = node.queue[0]
        if self.setup.fetch_while_queued:
            job.occupied_s = max(0.0, job.ready_at - now)
        else:
            job.occupied_s = self._fetch(job, node, now)
        own, own_s = self._own(job, node)
        job.reused = max(job.reused, own)
        tokens = min(job.arrival.tokens, job.reused * self.setup.page_tokens)
        job.prefill_s = self._true.seconds(job.arrival.tokens, tokens)
        if self.setup.noise:
            job.prefill_s *= self._random.lognormvariate(0.0, self.setup.noise)
        job.occupied_s += own_s + job.prefill_s
        self._at(now + job.occupied_s, lambda at: self._prefilled(node, at))

    def _own(self, job: _Job, node: _Node) -> tuple[int, float]:
        """The leading run that is there, as far as the decision uses disks, and what reading them takes."""
        own = cold = 0
        for page in job.arrival.pages:
            if page not in node.store.dram:
                if page not in node.store.cold or own >= job.decision.prefill.pages:
                    break
                cold += 1
            own += 1
        return own, cold * self.conductor.costs.cold_page_s

    def _fetch(self, job: _Job, node: _Node, now: float) -> float:
        """Seconds until what other nodes still have of it has come; what they do not have any more is computed."""
        have, total_s = self._own(job, node)[0], 0.0
        request = job.decision.request
        for holder, start, end, cold in job.decision.fetches:
            store = self._nodes[holder].store
            there = store.cold if cold else store.dram
            first = have
            while start <= have < end and (job.arrival.pages[have] in there or job.arrival.pages[have] in store.dram):
                have += 1
            if have == first:
                continue
            sharing = self._sending.get(holder, 0) + 1
            self._sending[holder] = sharing
            rate = min(self.setup.bandwidth, self.setup.cold_bandwidth) if cold else self.setup.bandwidth
            size = (have - first) * self._page_bytes
            seconds = size * sharing / rate
            total_s += seconds
            self.outcome.fetched_pages += have - first
            self.conductor.costs.links.observe(holder, size, seconds, sharing, cold)
            self._at(now + total_s, lambda at, holder=holder: self._sent(holder))  # type: ignore[misc]
        job.reused = have
        self._at(now + total_s, lambda at: self.conductor.fetched(request))
        return total_s

    def _sent(self, holder: str) -> None:
        self._sending[holder] -= 1

    def _prefilled(self, node: _Node, now: float) -> None:
        job = node.queue.popleft()
        node.busy = False
        outcome, arrival, request = self.outcome, job.arrival, job.decision.request
        outcome.pages += len(arrival.pages)
        outcome.reused_pages += job.reused
        outcome.busy_s[node.number] += job.occupied_s
        self._report(node, node.store.store(arrival.pages), arrival.pages)
        cached = min(arrival.tokens, job.reused * self.setup.page_tokens)
        decode = self.conductor.prefilled(request, now, cached, job.prefill_s)
        self.conductor.prefixes.withdraw(request)
        if isinstance(decode, Rejection):
            outcome.wasted_s += job.occupied_s
            self._reject(decode)
        else:
            outcome.ttft_s.append(now - job.at)
            if decode:
                batch = self._batches[decode]
                self._began[request] = now, arrival.output_tokens
                batch.join(request, arrival.tokens, arrival.output_tokens, now)
                self._await(decode)
        self._serve(node, now)

    def _report(self, node: _Node, changes: tuple[Iterable[int], Iterable[int], Iterable[int]], pages: Iterable[int]) -> None:
        gone, came, left = changes
        prefixes = self.conductor.prefixes
        prefixes.stored(node.name, _INCARNATION, pages, DRAM)
        prefixes.removed(node.name, _INCARNATION, gone, DRAM)
        prefixes.stored(node.name, _INCARNATION, came, COLD)
        prefixes.removed(node.name, _INCARNATION, left, COLD)

    def _await(self, name: str) -> None:
        """The next end of a decode there, unless something changes before it."""
        batch = self._batches[name]
        if len(batch):
            version = batch.version
            self._at(batch.next_end(), lambda at: self._decoded(name, version, at))

    def _decoded(self, name: str, version: int, now: float) -> None:
        batch = self._batches[name]
        if batch.version != version:
            return
        request = batch.pop(now)
        began, tokens = self._began.pop(request)
        self.outcome.decoded_tokens += max(1, tokens)
        self.outcome.decode_s += now - began
        self.conductor.finished(request, now)
        self._await(name)
