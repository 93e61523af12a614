"""A mover of the simulated cluster: what `client.mover` does, in virtual time and with copies that take several steps.

The decisions are the real ones where they are made apart from sockets: what a node answers, which peer is asked for what. The
copying itself is here, since its steps are what the simulator is about: between two of them anything may happen.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from hicache_mooncake import protocol as p
from hicache_mooncake.client.remote import Doubt

from .cold import Disk
from .network import Listener, Network, Stream
from .pages import HostPage, Pool, Segment, checksum
from .reader import Reader, Sleep, Wait
from .world import Process, Violation, World

_NO_ROOM_RETRIES_S = (0.01, 0.03)
WAIT_SHARE = 0.5
_RECALL_LEAST_S = 0.5

Steps = Generator[Wait | Sleep, Any, Any]
"""What a mover does: it yields what it waits for."""


class NodeUnavailable(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Job:
    """One batch of a rank: pages of one pool, each with its place in engine memory."""

    op: str
    pool: Pool
    hashes: list[bytes]
    places: list[HostPage]
    budget_s: float
    shared: bool = False
    touch: bool = True
    reader: str = ""
    counts_on: Promised | None = None
    """What of a load was promised to the rank."""


@dataclass
class Promised:
    """What a rank was told of, and its node has in DRAM: the pages of a job, until when they stay, and as long as what."""

    pages: set[int]
    until: float
    excuses: tuple[object, ...]


@dataclass
class Outcome:
    ok: bytearray
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass
class Landing:
    """Room in the node's segment for pages that one rank fetches for all."""

    segment: Segment
    txn: int
    offsets: dict[int, int] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)


class Mover:
    """One life of a mover process. `find_node` gives the local node's socket, `find_peer` a peer's host and data port."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        role: str,
        host: str,
        find_node: Callable[[], Listener | None],
        find_peer: Callable[[p.Peer], tuple[str, Listener | None]],
        *,
        step_s: float,
        check_checksums: bool = True,
    ) -> None:
        self.world, self.network = world, network
        self.role, self.host = role, host
        self.find_node, self.find_peer = find_node, find_peer
        self.process = Process(world, name)
        self.step_s = step_s
        self.check_checksums = check_checksums
        self.node: Stream | None = None
        self.node_name = ""
        self.data_key = b""
        self.segment: Segment | None = None
        self.disk: Disk | None = None
        self.frozen = False
        """Was it, ever?"""
        self._generator: Steps | None = None
        self._finished: Callable[[Outcome], None] = lambda outcome: None
        self._mail: deque[tuple[Any, Any]] = deque()
        self._turn = 0
        self._waiting = False
        self._last_id = 0
        self.reader = Reader(self)

    # ------------------------------------------------------------------ running

    @property
    def busy(self) -> bool:
        return self._generator is not None

    def run(self, job: Job, finished: Callable[[Outcome], None]) -> None:
        """One batch at a time."""
        assert not self.busy
        self._finished = finished
        for source, what in self._mail:  # answers to nothing that is still asked
            self.reader.strange(source, what)
        self._mail.clear()
        self._generator = self._load(job) if job.op == "load" else self._store(job)
        self._go(None)

    def post(self, source: Any, what: Any) -> None:
        """Something arrived."""
        self._mail.append((source, what))
        if self._waiting:
            self._waiting = False
            self._go(self._mail.popleft())

    def listen(self, stream: Stream) -> None:
        """What comes on this connection is mail, and its end as well."""
        stream.received = lambda item: self.post(stream, item)
        stream.closed = lambda: self.post(stream, None)

    def _go(self, value: Any) -> None:
        while self._generator is not None:
            try:
                wish = self._generator.send(value)
            except StopIteration as end:
                self._generator = None
                self._finished(end.value)
                return
            if isinstance(wish, Wait) and self._mail:
                value = self._mail.popleft()
                continue
            self._turn += 1
            self._waiting = isinstance(wish, Wait)
            pause = wish.until - self.world.now if isinstance(wish, Wait) else wish.seconds
            self.process.later(max(0.0, pause), self._wake, self._turn)
            return

    def _wake(self, turn: int) -> None:
        if turn == self._turn and self._generator is not None:
            self._turn += 1
            self._waiting = False
            self._go(None)

    # ------------------------------------------------------------------ the local node

    def ask(self, message: p.Message, deadline: float) -> Steps:
        """One question, one answer, on a connection that is made anew once."""
        for _ in (0, 1):
            fresh = self.node is None
            if fresh:
                yield from self._connect(deadline)
            answer = yield from self._exchange(message, deadline)
            if answer is not None:
                return answer
            if fresh:
                break
        raise NodeUnavailable("node_down")

    def ask_same(self, message: p.Message, deadline: float) -> Steps:
        """On the open connection or not at all: it refers to an earlier answer."""
        if self.node is None:
            raise NodeUnavailable("node_down")
        answer = yield from self._exchange(message, deadline)
        if answer is None:
            raise NodeUnavailable("node_down")
        return answer

    def tell(self, message: p.Message) -> None:
        if self.node is not None:
            self.node.send(message)

    def drop_node(self) -> None:
        if self.node is not None:
            self.node.close()
        self.node = None
        self.segment = None

    def _connect(self, deadline: float) -> Steps:
        listener = self.find_node()
        attempt = object()

        def connected(stream: Stream | None) -> None:
            if stream is not None:
                stream.received = lambda item: self.post(attempt, item)
                stream.closed = lambda: self.post(attempt, None)
                stream.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, self.role, self.process.name))
            self.post(attempt, stream)

        self.network.connect(self.process, self.host, self.host, listener, connected)
        stream: Stream | None = None
        while True:
            mail = yield Wait(deadline)
            if mail is None:
                if stream is not None:
                    stream.close()
                raise NodeUnavailable("node_timeout")
            source, what = mail
            if source is not attempt:
                self.reader.strange(source, what)
                continue
            if isinstance(what, Stream):
                stream = what
            elif isinstance(what, tuple):
                assert stream is not None
                welcome, self.segment, self.disk = what
                self.node_name, self.data_key = welcome.node, welcome.data_key
                self.node = stream
                self.listen(stream)
                return
            else:
                raise NodeUnavailable("node_down")

    def _exchange(self, message: p.Message, deadline: float) -> Steps:
        stream = self.node
        assert stream is not None
        stream.send(message)
        while True:
            if not stream.open:
                self.drop_node()
                return None
            mail = yield Wait(deadline)
            if mail is None:
                self.drop_node()  # the answer is still to come
                raise NodeUnavailable("node_timeout")
            source, what = mail
            if source is stream:
                if what is None:
                    self.drop_node()
                    return None
                if isinstance(what, p.Refused):
                    raise NodeUnavailable("node_refused")
                return what
            self.reader.strange(source, what)

    # ------------------------------------------------------------------ copies

    def copy(self, size: int, move: Callable[[int, int], None]) -> Steps:
        """`move(at, end)` for pieces of a body one after the other, with time between them."""
        rng = self.world.rng
        cuts = sorted({0, size, *(rng.randrange(size) for _ in range(rng.randrange(3)))})
        for at, end in itertools.pairwise(cuts):
            yield Sleep(self.step_s * rng.uniform(0.3, 1.7))
            move(at, end)

    @staticmethod
    def _from_segment(segment: Segment, offset: int, place: HostPage) -> Callable[[int, int], None]:
        return lambda at, end: place.write(at, segment.read(offset + at, end - at))

    @staticmethod
    def _to_segment(segment: Segment, offset: int, data: bytearray) -> Callable[[int, int], None]:
        return lambda at, end: segment.write(offset + at, bytes(data[at:end]))

    def holds(self, pool: Pool, of: bytes, data: bytes | bytearray, expected: int) -> bool:
        return not self.check_checksums or checksum(pool, of, data) == expected

    # ------------------------------------------------------------------ load

    def _load(self, job: Job) -> Steps:
        deadline = self.world.now + job.budget_s
        outcome = Outcome(bytearray(len(job.hashes)))
        try:
            everything = list(range(len(job.hashes)))
            waiting, doubtful = yield from self._load_some(job, everything, outcome, deadline, shared=job.shared)
            if doubtful:
                yield from self._load_again(job, doubtful, outcome, deadline)
            if waiting:
                wait_s = max(0.0, deadline - self.world.now) * WAIT_SHARE
                yield from self._load_some(job, waiting, outcome, deadline, wait_s=wait_s)
        except NodeUnavailable as error:
            outcome.reasons[error.reason] += outcome.ok.count(0) - sum(outcome.reasons.values())
        return outcome

    def _load_again(self, job: Job, doubtful: dict[int, Doubt], outcome: Outcome, deadline: float) -> Steps:
        counted = Counter(outcome.reasons)
        try:
            waiting, still = yield from self._load_some(job, list(doubtful), outcome, deadline, before=doubtful)
        except NodeUnavailable:
            if outcome.reasons != counted:
                raise Violation(f"{self.process.name}: pages are counted, and then the node is not there") from None
            outcome.reasons.update(doubt.why for doubt in doubtful.values())
            return
        if waiting or still:
            raise Violation(f"{self.process.name}: {len(waiting) + len(still)} pages have no verdict")

    def _load_some(
        self,
        job: Job,
        pages: list[int],
        outcome: Outcome,
        deadline: float,
        *,
        shared: bool = False,
        wait_s: float = 0.0,
        before: dict[int, Doubt] | None = None,
    ) -> Steps:
        """Returns the pages that another rank fetches, and those that did not come from where they were recalled to be."""
        pool, before = job.pool, before or {}
        left = max(0.0, deadline - self.world.now - wait_s)
        hashes = b"".join(job.hashes[i] for i in pages)
        again = bool(before)
        recall = not wait_s and not again and left >= _RECALL_LEAST_S
        question = p.Locate(
            pool.namespace,
            hashes,
            pool.length,
            shared,
            pool.group,
            wait_s,
            job.touch,
            left,
            recall=recall,
            again=again,
            cold=not again,
            reader=job.reader,
        )
        located = yield from self.ask(question, deadline)
        if not isinstance(located, p.Located) or not len(located.status) == len(located.where) == len(pages):
            raise Violation(f"{self.process.name}: {type(located).__name__} of another length answers a Locate")
        segment = self.segment
        assert segment is not None
        disk = self.disk
        cold: list[tuple[int, int, int, int]] = []
        cold_room = iter(located.cold_room)
        local: list[tuple[int, int, int]] = []
        remote: dict[int, int] = {}
        waiting: list[int] = []
        landing = Landing(segment, located.txn)
        room = iter(located.room)
        for at, (i, status, where, sum_) in enumerate(zip(pages, located.status, located.where, located.checksum, strict=True)):
            if status == p.LOCAL:
                local.append((i, where, sum_))
            elif status in (p.REMOTE, p.FETCH):
                remote[i] = at
                if status == p.FETCH:
                    landing.offsets[i] = next(room)
            elif status == p.WAIT:
                waiting.append(i)
            elif status in (p.READ, p.READ_ON):
                cold.append((i, where, sum_, next(cold_room) if status == p.READ_ON else -1))
            else:
                absent = "wrong_length" if status == p.WRONG_LENGTH else located.reason or "absent"
                outcome.reasons[before[i].why if i in before else absent] += 1
        bad = bytearray()
        loaded = 0
        for i, offset, sum_ in local:
            if self.world.now > deadline:
                outcome.reasons["deadline"] += 1
                continue
            yield from self.copy(pool.length, self._from_segment(segment, offset, job.places[i]))
            if self.holds(pool, job.hashes[i], job.places[i].data, sum_):
                outcome.ok[i] = 1
                loaded += 1
            else:
                outcome.reasons["checksum"] += 1
                bad += job.hashes[i]
        cold_failed: dict[int, Doubt] = {}
        bad_cold: list[tuple[bytes, int]] = []
        stays: dict[int, int] = {}
        for i, offset, sum_, room_at in cold:
            reason = yield from self._read_cold(job, i, disk, offset, sum_, deadline)
            if not reason:
                outcome.ok[i] = 1
                if room_at >= 0 and self.segment is segment:
                    segment.write(room_at, bytes(job.places[i].data))
                    stays[i] = sum_
                continue
            cold_failed[i] = Doubt(reason, [])
            if reason == "checksum_cold":
                bad_cold.append((job.hashes[i], offset))
        self.tell(p.Release(located.pin, pool.namespace, bytes(bad), loaded=loaded, bad_cold=bad_cold))
        if self.segment is not segment:
            landing.offsets.clear()
        plan = yield from self.reader.fetch(job, located, remote, landing, outcome, deadline, before)
        if landing.offsets and self.segment is segment:
            whole = [landing.checksums.get(i) for i in landing.offsets]
            commit = p.Commit(landing.txn, bytes(c is not None for c in whole), [c or 0 for c in whole])
            with contextlib.suppress(NodeUnavailable):  # the pages are in the engine all the same
                yield from self.ask_same(commit, deadline + 0.1)
        if located.cold_room and self.segment is segment:
            whole = [stays.get(i) for i, _, _, room_at in cold if room_at >= 0]
            commit = p.Commit(located.cold_txn, bytes(c is not None for c in whole), [c or 0 for c in whole])
            with contextlib.suppress(NodeUnavailable):
                yield from self.ask_same(commit, deadline + 0.1)
        if located.recalled and plan.reasons:
            raise Violation(f"{self.process.name}: {dict(plan.reasons)} by a recalled answer, and no master was asked")
        if plan.blamed:
            self.tell(p.Release(0, peer_down=plan.blamed))
        return waiting, plan.doubtful | cold_failed

    def _read_cold(self, job: Job, i: int, disk: Disk | None, offset: int, expected: int, deadline: float) -> Steps:
        """A page from the node's disk, as client/cold_reads.py: into memory of the mover's own, and from there to the engine.
        Returns why it did not come; "" when it did."""
        size = job.pool.length
        pieces: list[bytes] = []
        for at, end in ((0, size // 2), (size // 2, size)):  # it may be written over in between
            yield Sleep(self.step_s * self.world.rng.uniform(0.3, 1.7))
            while disk is not None and disk.hanging and self.world.now < deadline:
                yield Sleep(min(0.02, deadline - self.world.now))
            if self.world.now >= deadline:
                return "deadline"
            piece = disk.read(offset + at, end - at) if disk is not None else None
            if piece is None:
                return "cold_unreadable"
            pieces.append(piece)
        body = b"".join(pieces)
        place = job.places[i]
        yield from self.copy(size, lambda at, end: place.write(at, body[at:end]))
        return "" if self.holds(job.pool, job.hashes[i], place.data, expected) else "checksum_cold"

    # ------------------------------------------------------------------ store

    def _store(self, job: Job) -> Steps:
        deadline = self.world.now + job.budget_s
        outcome = Outcome(bytearray(len(job.hashes)))
        todo = list(range(len(job.hashes)))
        try:
            for pause in (*_NO_ROOM_RETRIES_S, None):
                todo = yield from self._store_once(job, todo, outcome, deadline)
                if not todo or pause is None or self.world.now + pause > deadline:
                    outcome.reasons["no_room"] += len(todo)
                    break
                yield Sleep(pause)
        except NodeUnavailable as error:
            outcome.reasons[error.reason] += outcome.ok.count(0) - sum(outcome.reasons.values())
        return outcome

    def _store_once(self, job: Job, todo: list[int], outcome: Outcome, deadline: float) -> Steps:
        pool = job.pool
        hashes = b"".join(job.hashes[i] for i in todo)
        reserved = yield from self.ask(p.Reserve(pool.namespace, hashes, pool.length, pool.group), deadline)
        if not isinstance(reserved, p.Reserved) or not len(reserved.status) == len(reserved.where) == len(todo):
            raise Violation(f"{self.process.name}: {type(reserved).__name__} of another length answers a Reserve")
        segment = self.segment
        assert segment is not None
        refused: list[int] = []
        written: list[int] = []
        whole = bytearray()
        sums: list[int] = []
        for i, status, offset in zip(todo, reserved.status, reserved.where, strict=True):
            if status == p.HAVE:
                outcome.ok[i] = 1
            elif status == p.REFUSED:
                refused.append(i)
            else:
                written.append(i)
                if self.world.now > deadline:
                    outcome.reasons["deadline"] += 1
                    whole.append(0)
                    sums.append(0)
                    continue
                data = job.places[i].data
                yield from self.copy(pool.length, self._to_segment(segment, offset, data))
                whole.append(1)
                sums.append(checksum(pool, job.hashes[i], segment.read(offset, pool.length)))
        if written:
            committed = yield from self.ask_same(p.Commit(reserved.txn, bytes(whole), sums), deadline + 0.1)
            for i, good, done in zip(written, whole, committed.ok, strict=True):
                if done:
                    outcome.ok[i] = 1
                elif good:
                    outcome.reasons["not_committed"] += 1
        return refused
