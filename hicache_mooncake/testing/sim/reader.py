"""A mover's reads from other nodes: the real plan and the real breakers, over connections whose bodies arrive in pieces."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import BLAME_AFTER_S, Admission, Breaker
from hicache_mooncake.client.remote import Ask, Doubt, FetchPlan

from .network import Stream
from .pages import Body
from .world import Violation

if TYPE_CHECKING:
    from .mover import Job, Landing, Mover, Outcome

_CONNECTING_S = 0.5
_RECALLED_SHARE = 0.5
_BREAKER_S = (0.5, 8.0)
Address = tuple[str, str, int]


@dataclass
class Wait:
    """For mail, at most until then; gives (source, what) or None."""

    until: float


@dataclass
class Sleep:
    """A step of a copy, which nothing interrupts."""

    seconds: float


def _address(peer: p.Peer) -> Address:
    return (peer.node, peer.host, peer.port)


class Reading:
    """One Ask on its way: connecting, or on a stream whose answer is read piece by piece."""

    def __init__(self, ask: Ask, number: int, now: float) -> None:
        self.ask = ask
        self.number = number
        self.began = now
        self.last_at = now
        self.connect_until = 0.0
        self.stream: Stream | None = None
        self.reused = False
        self.over = False
        self.heard = False
        self.held: list[tuple[int, int, bool]] | None = None
        """(page, checksum, is it from a disk) of the bodies that follow, once the reply is there."""
        self.arrived = 0


class Reader:
    """One a mover."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self._idle: dict[Address, Stream] = {}
        self._breakers: dict[Address, Breaker] = {}
        self._number = 0
        self._readings: list[Reading] = []

    def strange(self, source: Any, what: Any) -> None:
        """Mail that nobody waits for: the end of an idle connection, or something that came too late."""
        if isinstance(what, Stream):
            what.close()
        elif isinstance(source, Stream) and source is not self.mover.node:
            source.close()

    def fetch(
        self,
        job: Job,
        located: p.Located,
        remote: dict[int, int],
        landing: Landing,
        outcome: Outcome,
        deadline: float,
        before: dict[int, Doubt],
    ) -> Generator[Any, Any, FetchPlan]:
        """Read these pages (page of the job -> entry of `located`); returns the plan that was carried out."""
        mover, world = self.mover, self.mover.world
        until = world.now + (deadline - world.now) * _RECALLED_SHARE if located.recalled else None
        plan = FetchPlan(deadline, recalled_until=until, before=before)
        for page, at in remote.items():
            holders = [located.peers[located.where[at]]]
            if located.others and located.others[at] >= 0:
                holders.append(located.peers[located.others[at]])
            plan.add(page, holders)
        while True:
            for ask in plan.next(world.now, self._admit):
                self._start(job, ask)
            if plan.done:
                break
            due = plan.due()
            connecting = [reading.connect_until for reading in self._readings if reading.stream is None]
            mail = yield Wait(min([deadline if due is None else due, *connecting]))
            if mail is not None:
                source, what = mail
                reading = next((r for r in self._readings if source is r or source is r.stream), None)
                if reading is None:
                    if source is mover.node and what is None:
                        mover.drop_node()
                    else:
                        self.strange(source, what)
                elif source is reading:
                    self._connected(job, plan, reading, what)
                else:
                    yield from self._take(job, plan, reading, what, landing, outcome)
            for reading in list(self._readings):
                if reading.stream is None and world.now >= reading.connect_until:
                    self._end(reading, keep=False)
                    self._blame(plan, reading, "peer_down", at_fault=world.now - reading.began >= BLAME_AFTER_S)
            for ask in plan.expired(world.now):
                self._give_up(plan, ask)
        for reading in list(self._readings):
            raise Violation(f"{mover.process.name}: a plan is done while {reading.ask.peer.node} is still read from")
        outcome.reasons += plan.reasons
        return plan

    # ------------------------------------------------------------------ asking

    def _start(self, job: Job, ask: Ask) -> None:
        mover, world = self.mover, self.mover.world
        self._number += 1
        reading = Reading(ask, self._number, world.now)
        self._readings.append(reading)
        stream = self._idle.pop(_address(ask.peer), None)
        if stream is not None and stream.open:
            reading.reused = True
            self._send(job, reading, stream)
            return
        reading.connect_until = min(ask.until, world.now + _CONNECTING_S)
        host, listener = mover.find_peer(ask.peer)

        def connected(stream: Stream | None) -> None:
            if stream is not None:
                mover.listen(stream)
            if not reading.over:
                mover.post(reading, stream)
            elif stream is not None:
                stream.close()

        mover.network.connect(mover.process, mover.host, host, listener, connected)

    def _connected(self, job: Job, plan: FetchPlan, reading: Reading, stream: Stream | None) -> None:
        if stream is None:
            self._end(reading, keep=False)
            self._blame(plan, reading, "peer_down", at_fault=True)
        elif not stream.open:
            self._end(reading, keep=False)
            self._broke(plan, reading, "peer_down")
        else:
            self._send(job, reading, stream)

    def _send(self, job: Job, reading: Reading, stream: Stream) -> None:
        reading.stream = stream
        hashes = b"".join(job.hashes[page] for page in reading.ask.pages)
        node, pool = self.mover.node_name, job.pool
        fetch = p.Fetch(p.FETCH_VERSION, node, pool.namespace, hashes, pool.length, reading.number, job.touch)
        fetch.reader = job.reader
        stream.send(fetch)

    # ------------------------------------------------------------------ receiving

    def _take(
        self, job: Job, plan: FetchPlan, reading: Reading, what: Any, landing: Landing, outcome: Outcome
    ) -> Generator[Any, Any, None]:
        ask, world = reading.ask, self.mover.world
        if what is None:
            self._end(reading, keep=False)
            self._broke(plan, reading, "peer_failed")
            return
        reading.heard, reading.last_at = True, world.now
        match what:
            case p.FetchReply() if reading.held is None and what.id == reading.number:
                if not len(what.status) == len(what.checksum) == len(ask.pages):
                    raise Violation(f"{what.node} answers {len(what.status)} of {len(ask.pages)} pages")
                reading.held = []
                disk = what.cold or bytes(len(ask.pages))
                for page, status, checksum, cold in zip(ask.pages, what.status, what.checksum, disk, strict=True):
                    if status == p.LOCAL:
                        reading.held.append((page, checksum, bool(cold)))
                    else:
                        plan.missed(ask, page, "wrong_length" if status == p.WRONG_LENGTH else "gone_remote")
            case Body() if reading.held is not None and reading.arrived < len(reading.held):
                yield from self._take_body(job, plan, reading, what, landing, outcome)
            case _:
                raise Violation(f"{self.mover.process.name}: {ask.peer.node} is out of step")
        if not reading.over and reading.held is not None and reading.arrived == len(reading.held):
            self._end(reading, keep=True)
            breaker = self._breakers.get(_address(ask.peer))
            if breaker is not None:
                breaker.succeeded()
            plan.ended(ask)

    def _take_body(
        self, job: Job, plan: FetchPlan, reading: Reading, body: Body, landing: Landing, outcome: Outcome
    ) -> Generator[Any, Any, None]:
        assert reading.held is not None
        page, checksum, cold = reading.held[reading.arrived]
        place = job.places[page]
        through_segment = page in landing.offsets
        if through_segment:
            landing.segment.write(landing.offsets[page] + body.at, body.piece)
        else:
            place.write(body.at, body.piece)
        if body.at + len(body.piece) < job.pool.length:
            return
        if through_segment:
            offset = landing.offsets[page]
            yield from self.mover.copy(
                job.pool.length, lambda at, end: place.write(at, landing.segment.read(offset + at, end - at))
            )
        reading.arrived += 1
        if self.mover.holds(job.pool, job.hashes[page], place.data, checksum):
            outcome.ok[page] = 1
            if through_segment:
                landing.checksums[page] = checksum
            plan.arrived(reading.ask, page)
        else:
            plan.missed(reading.ask, page, "checksum_cold" if cold else "checksum_remote", blame=not cold)

    # ------------------------------------------------------------------ ends

    def _end(self, reading: Reading, *, keep: bool) -> None:
        """Without `keep` the connection is closed, and that is the fence: what the peer still sends lands nowhere."""
        reading.over = True
        self._readings.remove(reading)
        if reading.stream is None:
            return
        if keep:
            self._idle[_address(reading.ask.peer)] = reading.stream
        else:
            reading.stream.close()

    def _give_up(self, plan: FetchPlan, ask: Ask) -> None:
        now = self.mover.world.now
        reading = next(reading for reading in self._readings if reading.ask is ask)
        self._end(reading, keep=False)
        if reading.stream is None:
            self._blame(plan, reading, "peer_down", at_fault=now - ask.asked_at >= BLAME_AFTER_S)
            return
        slow = reading.heard and now - reading.last_at < BLAME_AFTER_S
        forgiven = slow and (ask.arrived or now < plan.deadline)
        self._blame(plan, reading, "deadline", at_fault=not forgiven and now - reading.began >= BLAME_AFTER_S)

    def _broke(self, plan: FetchPlan, reading: Reading, reason: str) -> None:
        if reading.reused and not reading.heard:
            self._undecided(reading.ask.peer)
            plan.again(reading.ask)
        else:
            self._blame(plan, reading, reason, at_fault=True)

    def _blame(self, plan: FetchPlan, reading: Reading, reason: str, *, at_fault: bool) -> None:
        if at_fault:
            world = self.mover.world
            breaker = self._breakers.get(_address(reading.ask.peer))
            if breaker is None:
                breaker = self._breakers[_address(reading.ask.peer)] = Breaker(*_BREAKER_S, lambda: world.now, world.rng)
            breaker.failed()
        else:
            self._undecided(reading.ask.peer)
        plan.ended(reading.ask, reason, blame=at_fault, stay=not at_fault)

    def _undecided(self, peer: p.Peer) -> None:
        breaker = self._breakers.get(_address(peer))
        if breaker is not None:
            breaker.undecided()

    def _admit(self, peer: p.Peer) -> Admission:
        breaker = self._breakers.get(_address(peer))
        return breaker.admit() if breaker is not None else Admission.GO
