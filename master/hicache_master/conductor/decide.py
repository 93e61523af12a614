"""The conductor's decisions: where each request goes, what it takes with it, and whether it is served at all."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from .admission import Admission, Rejection
from .books import DecodeBatch, PrefillQueue
from .cost import Costs, PrefillCost
from .policies import Candidate, Fetch, Policy
from .prefixes import Key, Prefixes
from .sources import elsewhere, evaluate

UNCONFIRMED_S = 30.0
"""A request of which no engine has said anything for so long is taken out of the books."""
LONGEST_S = 1800.0
"""And one that an engine has taken, if nobody says how it goes on."""
MAX_REQUESTS = 100_000
"""In the books at once."""


@dataclass(frozen=True, slots=True)
class Request:
    """`keys`: the hashes of its pages, head first. An SLO of None is the cluster's; priority 0 is the highest.

    Raises ValueError for a prompt of nothing and an SLO that is not positive."""

    id: str
    keys: Sequence[Key]
    tokens: int
    priority: int = 0
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "ttft_slo_s", "tbt_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} of request {self.id} must be positive, not {value}")


@dataclass(frozen=True, slots=True)
class Decision:
    """`decode` is "" in a cluster without decode engines. `tbt_s`: with this request in the batch. `known_pages`: of the
    prompt, from its head on, that somebody has or will soon have."""

    request: str
    prefill: Candidate
    fetches: tuple[Fetch, ...]
    decode: str
    tbt_s: float
    known_pages: int = 0


@dataclass
class _Prefill:
    name: str
    store: str
    cost: PrefillCost
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    batch: DecodeBatch | None = None
    """Of an engine that decodes what it prefills."""


@dataclass(slots=True)
class _Routed:
    request: Request
    decision: Decision
    decode: str
    expected_tbt_s: float
    """As admission judged it."""
    until: float
    fetching: bool = True
    prefilled: bool = False


class Conductor:
    """Decides, and keeps the books of what it decided.

    What it routes counts at once, as queued, as a batch member to be, as transfers and as pages that will be there, so that
    the next request a millisecond later sees it. The shell says how it goes on: `confirm`, `fetched`, `prefilled`, `finished`,
    or `failed`, which takes back what counted. Whatever stays without news is taken back by `expire`. Events of unknown
    requests are ignored: they come late. Time comes in, never backwards; not thread-safe.

    `prefixes` is fed by the caller with what engines and store nodes report.
    """

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        prefixes: Prefixes,
        admission: Admission,
        unconfirmed_s: float = UNCONFIRMED_S,
        longest_s: float = LONGEST_S,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self.policy = policy
        self.costs = costs
        self.prefixes = prefixes
        self.admission = admission
        self._unconfirmed_s = unconfirmed_s
        self._longest_s = longest_s
        self._max_requests = max_requests
        self._prefills: dict[str, _Prefill] = {}
        self._decodes: dict[str, DecodeBatch] = {}
        self._unconfirmed: OrderedDict[str, _Routed] = OrderedDict()
        self._confirmed: OrderedDict[str, _Routed] = OrderedDict()
        """Both in the order in which they expire."""

    def __len__(self) -> int:
        """Requests in the books."""
        return len(self._unconfirmed) + len(self._confirmed)

    def add_prefill(
        self,
        name: str,
        incarnation: str,
        now: float,
        store: str = "",
        cost: PrefillCost | None = None,
        decodes: bool = False,
    ) -> list[str]:
        """An engine that computes prompts. `store`: the store node of its host. `cost`: its own, if it is not like the others.
        `decodes`: it is no half of a pair, and answers as well.

        Returns the requests that an earlier incarnation had, as `remove` does. Raises ValueError when there are too many."""
        if not self.prefixes.join(name, incarnation) and name in self._prefills:
            return []
        lost = self.remove_prefill(name, now)
        self.prefixes.join(name, incarnation)
        batch = DecodeBatch() if decodes else None
        self._prefills[name] = _Prefill(name, store, cost or self.costs.prefill, batch=batch)
        return lost

    def add_decode(self, name: str) -> None:
        self._decodes.setdefault(name, DecodeBatch())

    def remove_prefill(self, name: str, now: float) -> list[str]:
        """It is gone, with what was queued there: returns those requests, which are in the books no more."""
        self.remove_store(name)
        lost = [
            each.request.id
            for each in self._routed()
            if each.decision.prefill.engine == name and (not each.prefilled or each.decode == name)
        ]
        for request in lost:
            self.failed(request, now)
        self._prefills.pop(name, None)
        return lost

    def remove_store(self, name: str) -> None:
        """A store node is gone: nothing is fetched from it any more. It joins by `prefixes.join`."""
        self.prefixes.leave(name)
        self.costs.links.forget(name)

    def remove_decode(self, name: str, now: float) -> list[str]:
        """It is gone: returns the requests that were there or on their way to it, which are in the books no more."""
        lost = [each.request.id for each in self._routed() if each.decode == name]
        for request in lost:
            self.failed(request, now)
        self._decodes.pop(name, None)
        return lost

    def queue_s(self, name: str, now: float) -> float:
        return self._prefills[name].queue.seconds(now)

    def batch(self, name: str) -> DecodeBatch:
        """For reading."""
        return self._batch(name)

    def hopeless(self, request: Request, now: float, avoid: Container[str] = ()) -> Rejection | None:
        """A rejection that `route` would come to whatever the pages of this prompt are: by the queues alone, as if all of it
        were cached, and by the decode engines. `tokens` may be a lower bound. Nothing is noted."""
        engines = [each for each in self._prefills.values() if each.name not in avoid]
        if not engines:
            return Rejection("no engine", math.inf, None)
        if len(self) >= self._max_requests:
            return Rejection("full", math.inf, None)
        tokens = request.tokens
        best = min(engines, key=lambda each: self._queue_s(each, now) + each.cost.seconds(tokens, tokens))
        idle_s = best.cost.seconds(tokens, tokens)
        candidate = Candidate(best.name, self._queue_s(best, now), 0, 0, 0.0, 0.0, idle_s, self._queue_s(best, now) + idle_s)
        batches = self._batches(best, avoid)
        tbt_s = self.admission.expected_tbt_s(batches, tokens, self.costs.decode, now + candidate.ttft_s) if batches else 0.0
        spacing_s = best.cost.seconds(tokens, 0) / len(engines)
        return self._admit(request, candidate, idle_s, spacing_s, tbt_s, batches, now)

    def route(
        self, request: Request, now: float, avoid: Container[str] = (), candidates: list[Candidate] | None = None
    ) -> Decision | Rejection:
        """`avoid`: engines that get nothing new now. `candidates` is given what each prefill engine would make of it, for those
        who want to know. Raises ValueError for an id that is in the books."""
        if request.id in self._unconfirmed or request.id in self._confirmed:
            raise ValueError(f"request {request.id} was routed already")
        self.expire(now)
        engines = [each for each in self._prefills.values() if each.name not in avoid]
        if not engines:
            return Rejection("no engine", math.inf, None)
        if len(self) >= self._max_requests:
            return Rejection("full", math.inf, None)
        matches = self.prefixes.match(request.keys, now)
        others = elsewhere(self.policy.sources, matches, self.costs)
        found = [
            evaluate(each.name, each.store, self._queue_s(each, now), request.tokens, matches, others, each.cost, self.costs)
            for each in engines
        ]
        if candidates is not None:
            candidates += found
        chosen = self.policy.choose(found)
        engine = self._prefills[chosen.engine]
        ends_at = now + chosen.ttft_s
        batches = self._batches(engine, avoid)
        decode, tbt_s = self._choose_decode(request.tokens, coming=True, engine=engine, avoid=avoid)
        expected_s = self.admission.expected_tbt_s(batches, request.tokens, self.costs.decode, ends_at) if decode else 0.0
        idle_s = min(each.ttft_s - each.queue_s for each in found)
        spacing_s = (chosen.ttft_s - chosen.queue_s) / len(found)
        rejection = self._admit(request, chosen, idle_s, spacing_s, expected_s, batches, now)
        if rejection is not None:
            return rejection
        fetches = others.fetches(chosen.own_pages, chosen.pages) if chosen.pages > chosen.own_pages else ()
        decision = Decision(request.id, chosen, fetches, decode, tbt_s, matches.known_pages())
        engine.queue.add(request.id, chosen.ttft_s - chosen.queue_s, now)
        if decode:
            self._batch(decode).expect(request.id, request.tokens, ends_at)
        for fetch in fetches:
            self.costs.links.begin(fetch.holder)
        self.prefixes.touch(request.keys)
        self.prefixes.expect(request.id, chosen.engine, request.keys, now)
        self._unconfirmed[request.id] = _Routed(request, decision, decode, expected_s, now + self._unconfirmed_s)
        return decision

    def confirm(self, request: str, now: float) -> None:
        """The engine has taken it."""
        routed = self._unconfirmed.pop(request, None) or self._confirmed.pop(request, None)
        if routed is not None:
            routed.until = now + self._longest_s
            self._confirmed[request] = routed

    def fetched(self, request: str) -> None:
        """Its pages have come, or will not."""
        routed = self._find(request)
        if routed is not None and routed.fetching:
            routed.fetching = False
            for fetch in routed.decision.fetches:
                self.costs.links.end(fetch.holder)

    def prefilled(
        self, request: str, now: float, cached_tokens: int = 0, seconds: float = 0.0, begun: bool = False
    ) -> str | Rejection:
        """Its prompt has been computed, in `seconds` with so many tokens cached (0 where that is not known). Returns where it
        is decoded, which is where it was routed to, or another engine if there is no room there any more; or a rejection if
        there is none anywhere, and it is in the books no more then. "" if it is not decoded, or unknown. `begun`: its decode
        has begun where it was routed to, as in a pair of engines that were both asked at once; only the books change.

        Its pages count as expected for their time, or until `prefixes.withdraw` when the engine has reported them."""
        self.confirm(request, now)
        routed = self._confirmed.get(request)
        if routed is None or routed.prefilled:
            return ""
        self.fetched(request)
        asked, decision = routed.request, routed.decision
        engine = self._prefills[decision.prefill.engine]
        engine.queue.remove(request, now)
        routed.prefilled = True
        if seconds:
            engine.cost.observe(asked.tokens, cached_tokens, seconds)
        if not decision.decode:
            del self._confirmed[request]
            return ""
        slo_s = self._tbt_slo_s(asked)
        batch = self._batch(routed.decode)
        tbt_s = self.costs.decode.tbt_s(batch.running + 1, batch.running_tokens + asked.tokens)
        begun = begun or engine.batch is not None
        if not begun and not self.admission.fits(tbt_s, slo_s, asked.priority):
            better, tbt_s = self._choose_decode(asked.tokens, coming=False, engine=engine)
            batch.remove(request)
            routed.decode, batch = better, self._batch(better)
        self.admission.came_true(routed.expected_tbt_s, tbt_s)
        if not begun:
            rejection = self.admission.decode(tbt_s, slo_s, self._batches(engine), asked.priority, now, late=True)
            if rejection is not None:
                self.failed(request, now)
                return rejection
        batch.start(request, asked.tokens, now)
        return routed.decode

    def finished(self, request: str, now: float) -> None:
        """Its last token has been sent."""
        began = self._forget(request, now)
        if began is not None:
            self.admission.decoded(now - began)

    def failed(self, request: str, now: float) -> None:
        """It ended some other way, wherever it was: what counted for it is taken back, and so are the pages that it would have
        brought."""
        self._forget(request, now)

    def expire(self, now: float) -> list[str]:
        """Take back what nobody has said anything about for too long. Returns those requests."""
        gone = []
        for waiting in (self._unconfirmed, self._confirmed):
            while waiting:
                request, routed = next(iter(waiting.items()))
                if routed.until > now:
                    break
                self.failed(request, now)
                gone.append(request)
        self.prefixes.expire(now)
        return gone

    def validate(self) -> None:
        """For tests."""
        self.prefixes.validate()
        self.costs.links.validate()
        batches = dict(self._decodes)
        batches |= {each.name: each.batch for each in self._prefills.values() if each.batch is not None}
        waiting = dict.fromkeys(self._prefills, 0)
        coming = dict.fromkeys(batches, 0)
        running = dict.fromkeys(batches, 0)
        for each in self._routed():
            if not each.prefilled:
                waiting[each.decision.prefill.engine] += 1
            if each.decode:
                (running if each.prefilled else coming)[each.decode] += 1
        for name, engine in self._prefills.items():
            engine.queue.validate()
            assert len(engine.queue) == waiting[name]
        for name, batch in batches.items():
            batch.validate()
            assert (batch.running, batch.coming) == (running[name], coming[name])
        for books in (self._unconfirmed, self._confirmed):
            ends = [each.until for each in books.values()]
            assert ends == sorted(ends)
        assert len(self) <= self._max_requests

    def _queue_s(self, engine: _Prefill, now: float) -> float:
        """Until it turns to a new prompt. One that decodes ends the step that it is in first: this spreads prompts that are
        short, and answers that are long, over engines whose queues are empty."""
        queue_s, batch = engine.queue.seconds(now), engine.batch
        if batch is not None and batch.running + batch.coming:
            running = batch.running + batch.coming, batch.running_tokens + batch.coming_tokens
            queue_s += self.costs.decode.tbt_s(*running)
        return queue_s

    def _choose_decode(self, tokens: int, coming: bool, engine: _Prefill, avoid: Container[str] = ()) -> tuple[str, float]:
        """The one with the least TBT with this request, and this TBT; among equals the one with the fewest requests.
        `coming`: those that are on their way to it are counted. `engine`: where it is prefilled."""
        best, best_rank = "", (math.inf, 0)
        decodes = self._decodes if engine.batch is None else {engine.name: engine.batch}
        for name, batch in decodes.items():
            if name in avoid:
                continue
            requests, held = batch.running, batch.running_tokens
            if coming:
                requests, held = requests + batch.coming, held + batch.coming_tokens
            rank = self.costs.decode.tbt_s(requests + 1, held + tokens), requests
            if rank < best_rank:
                best, best_rank = name, rank
        return best, best_rank[0] if best else 0.0

    def _admit(
        self,
        request: Request,
        chosen: Candidate,
        idle_s: float,
        spacing_s: float,
        tbt_s: float,
        batches: tuple[DecodeBatch, ...],
        now: float,
    ) -> Rejection | None:
        admission = self.admission
        slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else admission.ttft_slo_s
        usual = self._prefills[chosen.engine].cost.fit.ratio_quantile(admission.confidence)
        load = usual * chosen.ttft_s / slo_s
        rejection = admission.prefill(load, slo_s, idle_s, spacing_s, request.priority, now)
        if rejection is not None or not batches or admission.mode == "baseline":
            return rejection
        tbt_s *= admission.correction(batches)
        return admission.decode(tbt_s, self._tbt_slo_s(request), batches, request.priority, now, late=False)

    def _tbt_slo_s(self, request: Request) -> float:
        return request.tbt_slo_s if request.tbt_slo_s is not None else self.admission.tbt_slo_s

    def _batches(self, engine: _Prefill, avoid: Container[str] = ()) -> tuple[DecodeBatch, ...]:
        """Where what this engine prefills may be decoded."""
        if engine.batch is not None:
            return (engine.batch,)
        return tuple(batch for name, batch in self._decodes.items() if name not in avoid)

    def _batch(self, name: str) -> DecodeBatch:
        """Raises KeyError for one that does not decode."""
        batch = self._decodes.get(name)
        if batch is None:
            batch = self._prefills[name].batch
        if batch is None:
            raise KeyError(name)
        return batch

    def _routed(self) -> Iterator[_Routed]:
        return chain(self._unconfirmed.values(), self._confirmed.values())

    def _find(self, request: str) -> _Routed | None:
        return self._unconfirmed.get(request) or self._confirmed.get(request)

    def _forget(self, request: str, now: float) -> float | None:
        """Take it out of all books. Returns since when it was in a decode batch, or None."""
        routed = self._find(request)
        if routed is None:
            return None
        self.fetched(request)
        self._unconfirmed.pop(request, None)
        self._confirmed.pop(request, None)
        decision = routed.decision
        if not routed.prefilled:
            self._prefills[decision.prefill.engine].queue.remove(request, now)
            self.prefixes.withdraw(request)
        return self._batch(routed.decode).remove(request) if routed.decode else None
