"""The conductor's decisions applied to the engines that there are now, and the course of each request told to it. No I/O."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hicache_master.conductor.admission import Rejection
from hicache_master.conductor.decide import Conductor, Decision, Request
from hicache_master.conductor.policies import Candidate
from hicache_master.conductor.prefixes import DEVICE

from .accounts import Accounts, Assumed, PrefillMeter, Sorted, sort_out
from .agreement import Agreement
from .answers import Usage
from .bodies import Wishes
from .workers import Worker, Workers

log = logging.getLogger("hicache_master.router")

MAX_ASSUMED = 200_000
"""Pages of an engine that publishes no events."""
LEAST_DECODED = 8
"""Tokens of an answer from which the time of a step can be told."""


@dataclass(slots=True)
class Flight:
    """One request, from its decision to its end. `read`: its pages are known, not only about how many tokens it has."""

    id: str
    tokens: int
    keys: Sequence[int]
    read: bool
    exact: bool = False
    """By the engines' own names."""
    namespaced: bool = False
    wishes: Wishes = field(default_factory=Wishes)
    decision: Decision | None = None
    prefill: Worker | None = None
    answers: Worker | None = None
    """Where the answer comes from: the decode engine, or the same one."""
    candidates: list[Candidate] | None = None
    """To be filled, where somebody wants to know."""
    routed_at: float = 0.0
    prefilled_at: float = 0.0
    incarnation: str = ""
    guessed: bool = False
    """Nobody has seen when its first token came."""
    sending: bool = False

    @property
    def pair(self) -> bool:
        return self.prefill is not self.answers

    def scale(self, usage: Usage) -> float:
        """Tokens for one that was guessed."""
        return 1.0 if self.exact or not usage.prompt_tokens else usage.prompt_tokens / self.tokens

    def request(self) -> Request:
        wishes = self.wishes
        return Request(self.id, self.keys, self.tokens, wishes.priority, wishes.ttft_s, wishes.tbt_s)


class Routing:
    """`assume`: engines without KV events are taken to have what was sent to them. Time comes in; not thread-safe."""

    def __init__(self, conductor: Conductor, workers: Workers, assume: bool = True) -> None:
        self.conductor = conductor
        self.workers = workers
        self.accounts = Accounts()
        self.agreement = Agreement()
        self.meter = PrefillMeter()
        self.assumed = Assumed(MAX_ASSUMED) if assume else None
        self.follows: Callable[[str], bool] = lambda name: False
        """Is what this engine has known from itself? Then nothing is assumed of it."""
        self._incarnations: dict[str, str] = {}

    def joined(self, worker: Worker, now: float) -> None:
        """It answers, for the first time or again. One in another incarnation has nothing of what was known of it."""
        assert worker.facts is not None
        conductor = self.conductor
        if worker.role == "decode":
            conductor.add_decode(worker.name)
            return
        incarnation = worker.facts.incarnation
        if self._incarnations.get(worker.name) == incarnation:
            return
        conductor.remove_prefill(worker.name, now)
        self._forget(worker.name)
        conductor.add_prefill(worker.name, incarnation, now, worker.spec.store, decodes=worker.role == "plain")
        self._incarnations[worker.name] = incarnation

    def left(self, worker: Worker, now: float) -> None:
        if worker.role == "decode":
            self.conductor.remove_decode(worker.name, now)
        else:
            self.conductor.remove_prefill(worker.name, now)
            self._forget(worker.name)

    def hopeless(self, flight: Flight, now: float) -> Rejection | None:
        """What is rejected whatever its pages are, before anybody reads them. `tokens` may be a lower bound."""
        return self.conductor.hopeless(flight.request(), now, self.workers.avoid(now))

    def route(self, flight: Flight, now: float, tried: frozenset[str] = frozenset()) -> Rejection | None:
        """Sets where it goes. `tried`: engines that it has failed on; they get it again only if there is no other."""
        avoid = self.workers.avoid(now)
        result = self._decide(flight, now, avoid | tried)
        if isinstance(result, Rejection) and result.reason == "no engine" and tried:
            result = self._decide(flight, now, avoid)
        if isinstance(result, Rejection):
            return result
        decision = result
        prefill = self.workers.get(decision.prefill.engine)
        answers = self.workers.get(decision.decode or decision.prefill.engine)
        if prefill is None or answers is None or (prefill is answers and prefill.role != "plain"):
            self.conductor.failed(flight.id, now)
            return Rejection("no engine", math.inf, None)
        flight.decision, flight.prefill, flight.answers = decision, prefill, answers
        flight.incarnation = prefill.facts.incarnation if prefill.facts is not None else ""
        return None

    def explain(self, flight: Flight, now: float) -> Rejection | None:
        """As `route`, without a trace in the books."""
        rejection = self.route(flight, now)
        if rejection is None:
            self.conductor.failed(flight.id, now)
        return rejection

    def sent(self, flight: Flight, now: float) -> None:
        """It is on its way to its engines. From here on `ended` must be called, once."""
        assert flight.prefill is not None
        assert flight.answers is not None
        assert not flight.sending
        flight.sending, flight.routed_at, flight.prefilled_at, flight.guessed = True, now, 0.0, False
        for worker in {flight.prefill.name: flight.prefill, flight.answers.name: flight.answers}.values():
            worker.in_flight += 1
            worker.breaker.take(now)
        self.conductor.confirm(flight.id, now)
        self.meter.began(flight.prefill.name, now)

    def prefilled(self, flight: Flight, now: float, usage: Usage | None, guessed: bool = False) -> None:
        """Its first token has come, or, `guessed`, should have; only the first call counts. What `usage` does not say was as
        expected."""
        if flight.prefilled_at or flight.prefill is None or flight.decision is None:
            return
        flight.prefilled_at = now
        costs = self.conductor.costs
        cached = flight.decision.prefill.pages * costs.page_tokens
        if usage is not None and usage.cached_tokens is not None:
            cached = round(usage.cached_tokens / flight.scale(usage))
        cached = max(0, min(cached, flight.tokens))
        flight.guessed = guessed
        if guessed:
            self.meter.lost(flight.prefill.name)
        else:
            seen = self.meter.done(flight.prefill.name, flight.tokens, cached, now)
            if seen is not None:
                costs.prefill.fit.observe(*seen)
        self.conductor.prefilled(flight.id, now, cached, begun=True)
        self._assume(flight)

    def ended(self, flight: Flight, now: float, well: bool, completion_tokens: int | None = None) -> None:
        """The answer is complete, or will never be."""
        if not flight.sending or flight.prefill is None or flight.answers is None:
            return
        flight.sending = False
        for worker in {flight.prefill.name: flight.prefill, flight.answers.name: flight.answers}.values():
            worker.in_flight -= 1
        if well:
            if not flight.prefilled_at:
                self.prefilled(flight, now, None, guessed=True)
            self._learn_decode(flight, now, completion_tokens or 0)
            self.conductor.finished(flight.id, now)
            if self.follows(flight.prefill.name):  # it has said itself by now what it has
                self.conductor.prefixes.withdraw(flight.id)
        else:
            if not flight.prefilled_at:
                self.meter.lost(flight.prefill.name)
            self.conductor.failed(flight.id, now)

    def account(self, flight: Flight, usage: Usage, now: float) -> Sorted:
        """Of an answer that is complete. Call once a request."""
        decision = flight.decision
        page_tokens = max(1, round(self.conductor.costs.page_tokens * flight.scale(usage)))
        known, expected = (decision.known_pages, decision.prefill.pages) if decision is not None else (0, 0)
        tokens = usage.prompt_tokens if usage.prompt_tokens is not None else flight.tokens
        pages = min(len(flight.keys), max(0, tokens - 1) // page_tokens)  # the last token is always computed
        known, expected = min(known, pages), min(expected, pages)
        done = sort_out(tokens, page_tokens, pages, known, expected, usage.cached_tokens, flight.read)
        self.accounts.add(done, usage.by_tier)
        if flight.exact and usage.cached_tokens is not None and flight.prefill is not None:
            predicted, somewhere = expected * page_tokens, known * page_tokens
            name, apart = flight.prefill.name, flight.namespaced
            news = self.agreement.observe(name, predicted, done.cached, now, known=somewhere, namespaced=apart)
            if news:
                log.warning("%s", news)
        return done

    def _decide(self, flight: Flight, now: float, avoid: set[str]) -> Decision | Rejection:
        if flight.candidates is not None:
            flight.candidates.clear()
        return self.conductor.route(flight.request(), now, avoid, flight.candidates)

    def _learn_decode(self, flight: Flight, now: float, tokens: int) -> None:
        """What its steps took, in a batch as it is now."""
        if flight.guessed or tokens < LEAST_DECODED or flight.answers is None or flight.decision is None:
            return
        if flight.decision.decode and self.workers.get(flight.answers.name) is flight.answers:
            batch = self.conductor.batch(flight.answers.name)
            seconds = (now - flight.prefilled_at) / (tokens - 1)
            self.conductor.costs.decode.observe(max(1, batch.running), batch.running_tokens, seconds)

    def _assume(self, flight: Flight) -> None:
        worker = flight.prefill
        if self.assumed is None or worker is None or worker.facts is None or self.follows(worker.name):
            return
        if worker.facts.incarnation != flight.incarnation:
            return
        keys, prefixes = tuple(flight.keys), self.conductor.prefixes
        room = worker.facts.max_tokens // self.conductor.costs.page_tokens
        dropped = self.assumed.stored(worker.name, keys, room)
        prefixes.stored(worker.name, flight.incarnation, keys, DEVICE)
        prefixes.removed(worker.name, flight.incarnation, dropped, DEVICE)
        prefixes.withdraw(flight.id)

    def _forget(self, name: str) -> None:
        self._incarnations.pop(name, None)
        self.meter.forget(name)
        self.agreement.forget(name)
        if self.assumed is not None:
            self.assumed.forget(name)
