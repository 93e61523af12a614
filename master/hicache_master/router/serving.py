"""The course of a request: read, let in, routed, carried, tried again elsewhere, and counted."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from hicache_master.conductor.admission import Rejection

from .answers import Usage
from .bodies import PATHS, Asked, BadRequest, Wishes, read_asked, read_wishes, rough, rough_page_tokens, tenant
from .decisions import Decisions, Entry, describe
from .fairness import Gate, Ticket
from .metrics import Metrics
from .pool import PoolView
from .probes import Prober
from .prompts import PromptError, Prompts
from .proxy import AnswerBroken, ClientGone, EngineFailed, Proxy, forwarded
from .routing import Flight, Routing

log = logging.getLogger("hicache_master.router")

RETRY_S = (1.0, 60.0)
BODY_S = 60.0
_STEP = 0.05
_OVERLOADED = 429
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class Limits:
    """`wait_s`: in the waiting room. `buffered_bytes`: bodies in memory. `retries`: on other engines, of one request."""

    body_bytes: int = 64 << 20
    buffered_bytes: int = 2 << 30
    wait_s: float = 30.0
    retries: int = 2
    pool_s: float = 0.01


class Refused(Exception):
    """What the client is told. `retry_s`: None where waiting does not help."""

    def __init__(self, status: int, reason: str, message: str, retry_s: float | None = None, load: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_s, self.load = status, reason, message, retry_s, load

    def response(self) -> web.Response:
        kinds = {_OVERLOADED: "overloaded", _UNAVAILABLE: "unavailable", 502: "bad_gateway"}
        error: dict[str, object] = {
            "message": self.message,
            "type": kinds.get(self.status, "invalid_request"),
            "code": self.status,
            "param": None,
            "reason": self.reason,
        }
        if self.load is not None:
            error["load"] = round(self.load, 3)
        headers = {}
        if self.retry_s is not None:
            error["retry_after_s"] = round(self.retry_s, 3)
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_s)))
        return web.json_response({"error": error}, status=self.status, headers=headers)


def refused(rejection: Rejection, problem: str = "") -> Refused:
    """A decision of the conductor's, for the client."""
    if rejection.reason == "no engine":
        return Refused(_UNAVAILABLE, "no engine", problem or "no engine takes requests now", RETRY_S[0])
    messages = {
        "prefill": "the prompt would not be done within the permitted time to first token",
        "decode": "the engines could not keep the permitted time between tokens",
        "full": "the router has too many requests",
    }
    load = rejection.load if math.isfinite(rejection.load) else None
    retry_s = rejection.retry_after_s if rejection.reason != "full" else RETRY_S[0]
    return Refused(_OVERLOADED, rejection.reason, messages[rejection.reason], retry_s, load)


@dataclass(slots=True)
class _Held:
    """Bytes of one body that are counted."""

    size: int = 0


@dataclass(slots=True)
class _Course:
    """One request on its way through."""

    http: web.Request
    asked: Asked
    wishes: Wishes
    tenant: str
    arrived: float
    flight: Flight
    waited_s: float = 0.0
    entry: Entry | None = None
    first_at: float = 0.0


class Serving:
    """Everything that happens to requests. For one event loop."""

    def __init__(
        self,
        routing: Routing,
        gate: Gate,
        proxy: Proxy,
        prober: Prober,
        metrics: Metrics,
        decisions: Decisions,
        limits: Limits,
        prompts: Prompts | None = None,
        pool: PoolView | None = None,
    ) -> None:
        self.routing, self.gate, self.proxy, self.prober = routing, gate, proxy, prober
        self.metrics, self.decisions, self.limits = metrics, decisions, limits
        self.prompts, self.pool = prompts, pool
        self.flights: dict[str, _Course] = {}
        """By the ids that engines know."""
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[Ticket, tuple[asyncio.Future[bool], str]] = {}
        self._ids = itertools.count(1)
        self._buffered = 0
        self._open = 0
        self._duration_s = 1.0

    @property
    def buffered(self) -> int:
        """Bytes of bodies, as they came, of all requests that are here."""
        return self._buffered

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """For all paths of `bodies.PATHS`."""
        path = http.path if http.path in PATHS else "other"
        outcome = "error"
        held = _Held()
        self._open += 1
        try:
            response, outcome = await self._serve(http, held)
            return response
        except BadRequest as error:
            outcome = "bad request"
            return Refused(400, "bad request", str(error)).response()
        except Refused as error:
            outcome = "rejected" if error.status == _OVERLOADED else "failed"
            if error.status == _OVERLOADED:
                self.metrics.rejected.labels(error.reason).inc()
            return error.response()
        except asyncio.CancelledError:
            outcome = "client gone"
            raise
        finally:
            self._open -= 1
            self._buffered -= held.size
            self.metrics.requests.labels(path, outcome).inc()

    def resize(self) -> None:
        """The engines have changed."""
        self.gate.room = self.routing.workers.capacity(self._loop.time())
        self._admit()

    async def look(self, path: str, body: dict[str, object], wishes: Wishes) -> Entry:
        """Where a request would go, and why; nothing is sent. Raises BadRequest."""
        asked = read_asked(path, msgspec.json.encode(body))
        flight = Flight("explain", 1, (), read=False, wishes=wishes, candidates=[])
        await self._read(flight, asked)
        now = self._loop.time()
        rejection = self.routing.explain(flight, now)
        return describe(flight, rejection, self.routing.workers.avoid(now))

    async def _serve(self, http: web.Request, held: _Held) -> tuple[web.StreamResponse, str]:
        arrived = self._loop.time()
        wishes, who = read_wishes(http.headers), tenant(http.headers)
        if self.gate.room and self.gate.refuses(who):
            raise self._full()
        asked = read_asked(http.path, await self._body(http, held))
        flight = Flight(str(next(self._ids)), self._least(asked), (), read=False, wishes=wishes)
        course = _Course(http, asked, wishes, who, arrived, flight)
        self._check(course)
        await self._enter(course)
        try:
            course.waited_s = self._loop.time() - arrived
            if asked.rid:
                self.flights.setdefault(asked.rid, course)
            return await self._within(course)
        finally:
            if self.flights.get(asked.rid) is course:
                del self.flights[asked.rid]
            self._duration_s += _STEP * (self._loop.time() - arrived - self._duration_s)
            self.gate.leave(who)
            self._admit()

    async def _body(self, http: web.Request, held: _Held) -> bytes:
        """Each byte is counted before the next ones are read, so that no more than permitted are in memory at once."""
        size, pieces = http.content_length or 0, []
        if self._open > 2 * (max(self.gate.room, 1) + self.gate.waiting):
            raise self._too_much()
        self._hold(held, size)
        try:
            async with asyncio.timeout(BODY_S):
                size = 0
                async for piece in http.content.iter_any():
                    size += len(piece)
                    self._hold(held, size)
                    pieces.append(piece)
        except TimeoutError:
            raise Refused(408, "slow", f"the body did not come within {BODY_S:g} s") from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _hold(self, held: _Held, size: int) -> None:
        if size > self.limits.body_bytes:
            raise Refused(413, "too large", f"the body has more than {self.limits.body_bytes} bytes")
        more = max(0, size - held.size)
        if self._buffered + more > self.limits.buffered_bytes:
            raise self._too_much()
        held.size += more
        self._buffered += more

    def _too_much(self) -> Refused:
        return Refused(_OVERLOADED, "full", "the router has too many requests", self._retry_s())

    def _least(self, asked: Asked) -> int:
        if self.prompts is not None:
            return max(1, self.prompts.least_tokens(asked.path, asked.body))
        return max(1, len(asked.raw) // 16)

    def _check(self, course: _Course) -> None:
        """What can be said before it waits and before anybody reads the prompt."""
        rejection = self.routing.hopeless(course.flight, course.arrived)
        if rejection is not None:
            raise refused(rejection, self._problems())

    def _problems(self) -> str:
        problems = [f"{each.name}: {each.problem or each.state}" for each in self.routing.workers if each.state != "up"]
        return "no engine takes requests now" + (f" ({'; '.join(problems[:4])})" if problems else "")

    # The waiting room

    async def _enter(self, course: _Course) -> None:
        ticket, victim = self.gate.ask(course.tenant)
        if ticket is None:
            return
        if victim is not None and victim != ticket:
            self._resolve(victim, False)
        if victim == ticket:
            raise self._full()
        future: asyncio.Future[bool] = self._loop.create_future()
        self._tickets[ticket] = future, course.tenant
        limit_s = min(self.limits.wait_s, course.wishes.ttft_s or self.routing.conductor.admission.ttft_slo_s)
        entered = False
        try:
            async with asyncio.timeout(limit_s):
                entered = await asyncio.shield(future)
        except TimeoutError:
            entered = future.done() and future.result()
        except asyncio.CancelledError:
            if future.done() and future.result():
                self.gate.leave(course.tenant)
                self._admit()
            raise
        finally:
            self._tickets.pop(ticket, None)
            self.gate.forget(ticket)
        if not entered:
            raise self._full()

    def _full(self) -> Refused:
        message = "the engines are full, and so is the waiting room, or it was waited in for too long"
        return Refused(_OVERLOADED, "waiting", message, self._retry_s())

    def _retry_s(self) -> float:
        """When those that wait now will be in."""
        wait_s = (self.gate.queued + 1) * self._duration_s / max(1, self.gate.room)
        return min(RETRY_S[1], max(RETRY_S[0], wait_s))

    def _admit(self) -> None:
        for ticket in self.gate.admit():
            self._resolve(ticket, True)

    def _resolve(self, ticket: Ticket, entered: bool) -> None:
        future, _ = self._tickets[ticket]
        future.set_result(entered)

    # Inside

    async def _within(self, course: _Course) -> tuple[web.StreamResponse, str]:
        flight, asked = course.flight, course.asked
        started = self._loop.time()
        await self._read(flight, asked)
        asked.body = {}  # it may be large, and what is sent is `raw`
        if self.decisions.wanted():
            flight.candidates = []
        headers = forwarded(course.http.headers)
        tried: set[str] = set()
        try:
            for attempt in range(self.limits.retries + 1):
                self._route(course, frozenset(tried))
                if not attempt:
                    self.metrics.own.observe(self._loop.time() - started)
                try:
                    return await self._attempt(course, headers)
                except EngineFailed as error:
                    self._failed(error.worker.name, error.problem, error.certain, error.fault)
                    if not error.fault or attempt == self.limits.retries:
                        return _passed_on(error), "failed"
                    tried.add(error.worker.name)
                    self.metrics.retries.inc()
            raise AssertionError("unreachable")
        finally:
            if course.entry is not None:
                self.decisions.keep(course.entry)

    async def _read(self, flight: Flight, asked: Asked) -> None:
        """Pages and tokens, if they can be known; else the request goes by load, and by what it looks like."""
        costs = self.routing.conductor.costs
        if self.prompts is None:
            found = rough(asked, costs.page_tokens)
            flight.tokens, flight.keys, flight.read = found.tokens, found.keys, True
            return
        try:
            prompt = await self.prompts.read(asked.path, asked.body)
        except PromptError:  # images, or whatever a tokenizer does not read: it goes by what it looks like
            found = rough(asked, rough_page_tokens(costs.page_tokens))
            keys = found.keys if costs.page_tokens == rough_page_tokens(costs.page_tokens) else ()
            flight.tokens, flight.keys, flight.read = max(flight.tokens, found.tokens), keys, False
            return
        flight.tokens, flight.keys, flight.read = max(1, prompt.tokens), prompt.keys, True
        flight.exact, flight.namespaced = True, prompt.namespaced
        if self.pool is not None and prompt.keys:
            answered = await self.pool.refresh(prompt, self.routing.conductor.prefixes, self.limits.pool_s)
            self.metrics.pool.labels("answered" if answered else "late").inc()

    def _route(self, course: _Course, tried: frozenset[str]) -> None:
        now = self._loop.time()
        rejection = self.routing.route(course.flight, now, tried)
        if course.flight.candidates is not None:
            course.entry = describe(course.flight, rejection, self.routing.workers.avoid(now) | tried)
            course.entry["tenant"], course.entry["path"] = course.tenant, course.asked.path
        if rejection is not None:
            raise refused(rejection, self._problems())
        self.routing.sent(course.flight, now)

    async def _attempt(self, course: _Course, headers: CIMultiDict[str]) -> tuple[web.StreamResponse, str]:
        flight, asked, routing = course.flight, course.asked, self.routing
        assert flight.prefill is not None
        assert flight.answers is not None
        assert flight.decision is not None
        timer: asyncio.TimerHandle | None = None
        if not asked.stream and not flight.pair:  # nobody will say when its prompt has been computed
            timer = self._loop.call_later(flight.decision.prefill.ttft_s, self._guess, flight, flight.decision)
        well, usage = False, Usage()
        try:
            answered = await self.proxy.carry(course.http, flight, asked, headers, partial(self._prefilled, course))
            well, usage = answered.well, answered.usage
            flight.prefill.breaker.succeeded()
            flight.answers.breaker.succeeded()
            return answered.response, "ok" if well else "client error" if 400 <= answered.status < 500 else "failed"
        except AnswerBroken as error:
            self._failed(error.worker.name, error.problem, certain=False, fault=True)
            return error.response, "broken"
        except ClientGone as error:
            return error.response, "client gone"
        finally:
            if timer is not None:
                timer.cancel()
            routing.ended(flight, self._loop.time(), well, usage.completion_tokens)
            if well:
                self._account(course, usage)

    def _guess(self, flight: Flight, decision: object) -> None:
        if flight.sending and flight.decision is decision:
            self.routing.prefilled(flight, self._loop.time(), None, guessed=True)

    def _prefilled(self, course: _Course, usage: Usage | None, first_byte: bool) -> None:
        now = self._loop.time()
        if first_byte and not course.first_at:
            course.first_at = now
            self.metrics.ttft.observe(now - course.arrived)
        self.routing.prefilled(course.flight, now, usage)

    def _account(self, course: _Course, usage: Usage) -> None:
        done = self.routing.account(course.flight, usage, self._loop.time())
        if course.entry is not None:
            ttft_ms = round((course.first_at - course.arrived) * 1e3, 3) if course.first_at else None
            course.entry["observed"] = {
                "ttft_ms": ttft_ms,
                "waited_ms": round(course.waited_s * 1e3, 3),
                "tokens": done.tokens,
                "cached": done.cached,
                "computed": dict(done.missed),
                "by_tier": usage.by_tier,
            }

    def _failed(self, name: str, problem: str, certain: bool, fault: bool) -> None:
        worker = self.routing.workers.get(name)
        if worker is None or not fault:
            return
        self.metrics.failures.labels(name).inc()
        was = worker.breaker.open
        worker.breaker.failed(self._loop.time(), certain)
        if worker.breaker.open and not was:
            log.warning("worker %s gets no requests for a while: %s", name, problem)
            self.resize()
        self.prober.poke(name)


def _passed_on(error: EngineFailed) -> web.Response:
    """What the last engine said, or that it said nothing."""
    if error.body and error.status:
        return web.Response(status=error.status, body=error.body, content_type="application/json")
    message = f"engine {error.worker.name} failed: {error.problem}"
    return Refused(502, "engine", message, RETRY_S[0]).response()
