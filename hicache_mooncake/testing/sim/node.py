"""A store node of the simulated cluster: the real `NodeCore`, with its store and its link to the masters, in a shell that does
with virtual streams what the real one does with sockets and threads."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from hicache_mooncake import protocol as p
from hicache_mooncake.cold.index import Key
from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.node.asking import AskCold, AskMasters, ColdPlace, LocateCold
from hicache_mooncake.node.core import NodeCore, Served, Taking
from hicache_mooncake.node.spill import Give
from hicache_mooncake.node.store import Store

from .cold import Disk, SimCold
from .giver import Pushing
from .link import SimLink
from .network import Listener, Network, Stream
from .pages import Body, Pool, Segment, checksum
from .world import Process, Violation, World, short

_ROOM_S, _SETTLE_S, _LINGER_S = 1.5, 0.3, 0.5
HOUSEKEEPING_S = 0.1
_SEND_DEADLINE_S = 10.0
_LONGEST_WAIT_S = 10.0
_WINDOW = 6
"""Pieces of bodies that are under way to a reader before the sender waits for it."""
_from_client = p.decoder(p.FromClient)
_to_data = p.decoder(p.ToData)


@dataclass
class NodeOptions:
    """How every node of a run is set up."""

    pin_seconds: float = 30.0
    claim_seconds: float = 4.0
    step_s: float = 0.001
    """Time between two pieces of a body on a data connection."""
    validate_share: float = 1.0
    spill: bool = True
    replicate_after: int = 2
    drain_s: float = 3.0
    cold_pages: int = 0
    """Of the cold tier; 0: there is none."""
    cold_after_loads: int = 0
    promise_share: float = 0.125
    store: Callable[[dict[str, Any]], Store] = lambda options: Store(**options)


class Connection:
    """A rank's or mover's connection. One message at a time, as one thread serves it."""

    def __init__(self, owner: int, stream: Stream) -> None:
        self.owner = owner
        self.stream = stream
        self.inbox: deque[p.Message | None] = deque()
        self.busy = False


class Reader:
    """A connection at the data port, and the push that is being taken on it."""

    def __init__(self, owner: int, stream: Stream) -> None:
        self.owner = owner
        self.stream = stream
        self.push: p.Push | None = None
        self.taking: Taking | None = None
        self.whole = bytearray()


class SimNode:
    """A node of a name on a host, through all its lives."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        host: str,
        capacity: int,
        masters: list[str],
        find_master: Callable[[str], tuple[str, Listener | None]],
        find_peer: Callable[[p.Peer], tuple[str, Listener | None]],
        options: NodeOptions,
    ) -> None:
        self.world, self.network = world, network
        self.name, self.host, self.capacity = name, host, capacity
        self.address = f"10.0.0.{1 + int(name[1:])}"
        self.port = 7000
        self.masters = masters
        self.find_master = find_master
        self.find_peer = find_peer
        self.options = options
        self.skew_s = world.rng.uniform(0, 1e5)
        self.process = Process(world, f"node {name}")
        self.process.alive = False
        self.unix: Listener | None = None
        self.data: Listener | None = None
        self.lives = 0
        self.totals: Counter[str] = Counter()
        """What its former lives did."""
        self.clears = 0
        """Of this life."""
        self.refuse_room = False
        """Out of memory: every Reserve is refused."""
        self.core: NodeCore
        self.store: Store
        self.segment: Segment
        self.link: SimLink
        self.disk = Disk(options.cold_pages) if options.cold_pages else None
        self.cold: SimCold | None = None
        """Of this life."""

    @property
    def alive(self) -> bool:
        return self.process.alive

    def start(self) -> None:
        """A new life: another incarnation, an empty segment."""
        self.lives += 1
        self.process = Process(self.world, f"node {self.name}", self.skew_s)
        self.incarnation = self.world.token()
        self.store = self.options.store(
            {
                "capacity_bytes": self.capacity,
                "pin_seconds": self.options.pin_seconds,
                "claim_seconds": self.options.claim_seconds,
                "track_changes": True,
                "promise_share": self.options.promise_share,
            }
        )
        self.segment = Segment(self.store.allocator.capacity)
        self.core = self._make_core()
        self._owners = itertools.count(1)
        self.cold_owner = next(self._owners)
        self.connections: dict[int, Connection] = {}
        self.readers: dict[int, Reader] = {}
        self._giving = False
        self.clears = 0
        self._waiting: list[tuple[Connection, p.Locate, float]] = []
        if self.disk is not None:
            self.core.keep(self.options.cold_after_loads, self.disk.slots * GRANULE)
            self.cold = SimCold(self, self.disk)
            self.cold.start()
        self.link = SimLink(self)
        self.unix = Listener(self.process, self._accept_client)
        self.data = Listener(self.process, self._accept_reader)
        self.world.note(f"{self.process.name} starts as {self.incarnation.hex()}")
        self.link.start()
        self._housekeeping()

    def _make_core(self) -> NodeCore:
        return NodeCore(
            self.name,
            self.incarnation,
            self.store,
            masters=True,
            log=self._log,
            rng=random.Random(self.world.rng.getrandbits(64)),
            spill=self.options.spill,
            replicate_after=self.options.replicate_after,
            turn=lambda: self.link.core.turn,
        )

    def _log(self, level: int, kind: str, text: str) -> None:
        if level >= logging.WARNING:
            self.world.note(f"{self.process.name} logs: {text}")

    def crash(self) -> None:
        self.unix = self.data = None
        self._end()

    def _end(self) -> None:
        self.totals = self.figures()
        self.process.end()

    def figures(self) -> Counter[str]:
        """Of all its lives."""
        figures = Counter(self.totals)
        if self.alive:
            stats, counts = self.store.stats, self.core.spilling.counts
            figures["evicted"] += stats.evicted
            figures["expired_pins"] += stats.expired_pins
            figures["abandoned"] += stats.abandoned
            figures["spilled"] += counts.spilled
            figures["handed_over"] += counts.handed_over
            figures["taken"] += self.core.taken
            figures["replicated"] += self.core.replicated
            figures["recalled"] += self.core.recalled
            figures["promoted"] += self.core.promoted
            figures["cold written"] += self.cold.written if self.cold is not None else 0
            figures["snapshots"] += self.link.core.counters["snapshots"]
            promises = self.store.promises
            figures["promised"] += promises.made
            figures["promises loaded"] += promises.loaded
            figures["promises dropped"] += promises.dropped
        return figures

    @property
    def excuses(self) -> tuple[object, ...]:
        """As long as this does not change, what is promised here stays."""
        return self.alive, self.incarnation, self.clears, self.store.promises.dropped, self.store.stats.discarded

    def promised(self, pool: Pool, of: bytes) -> bool:
        """Is this page kept in DRAM for somebody?"""
        page = self.store.page(pool.namespace, of)
        return page is not None and page.promises > 0

    def validate(self) -> None:
        if self.store.promises.lost and not (self.clears or self.store.stats.discarded):
            raise Violation(f"{self.process.name}: {self.store.promises.lost} pages have gone that were promised")
        if self.world.rng.random() < self.options.validate_share:
            self.core.validate()
            if self.cold is not None:
                self.cold.validate()

    # ------------------------------------------------------------------ ranks and movers

    def _accept_client(self, stream: Stream) -> None:
        connection = Connection(next(self._owners), stream)
        self.connections[connection.owner] = connection
        stream.received = lambda message: self._mail(connection, message)
        stream.closed = lambda: self._mail(connection, None)

    def _mail(self, connection: Connection, message: p.Message | None) -> None:
        connection.inbox.append(message)
        self._serve(connection)

    def _serve(self, connection: Connection) -> None:
        while connection.inbox and not connection.busy:
            message = connection.inbox.popleft()
            if message is None:
                self._drop(connection)
                return
            self._take(connection, _from_client.decode(p.encode(message)))
            self.validate()

    def _drop(self, connection: Connection) -> None:
        self.core.drop_owner(connection.owner)
        self.connections.pop(connection.owner, None)
        self._look_again()
        self.validate()

    def _take(self, connection: Connection, message: p.Message) -> None:
        now = self.process.now
        self.world.note(f"{self.process.name} <- {connection.owner} {short(message)}")
        match message:
            case p.Hello():
                welcome = p.Welcome(p.PROTOCOL_MAX, self.name, self.incarnation, self.store.allocator.capacity)
                connection.stream.send((welcome, self.segment, self.disk))
            case p.Clear():
                count = self.clear(message.namespace)
                if message.everywhere:
                    self.link.clear_namespace(message.namespace)
                self.link.notify()
                connection.stream.send(p.Cleared(count))
            case p.Reserve() if self.refuse_room:
                count = len(message.hashes) // p.HASH_BYTES
                connection.stream.send(p.Reserved(0, bytes(count), [0] * count))
            case p.Locate() if message.wait_s > 0 and self.core.waits(message, now):
                connection.busy = True
                until = now + min(message.wait_s, _LONGEST_WAIT_S)
                self._waiting.append((connection, message, until))
                self.process.later(until - now, self._look_again)
            case _:
                self._start(connection, message)

    def keep_promised(self, keep: p.Keep) -> None:
        for namespace, hashes in self.core.keep_promised(keep, self.process.now):
            if self.cold is not None:
                here = self.cold.present(namespace, p.split(hashes), self.process.now + keep.promise_s)
                self.core.promises_late += here.count(0)
        self.validate()

    def clear(self, namespace: bytes) -> int:
        self.clears += 1
        count = self.core.clear(namespace, self.process.now)
        if self.cold is not None:
            self.cold.clear(namespace)
        return count

    def _look_again(self) -> None:
        """Pages that some wait for may have come."""
        now = self.process.now
        still: list[tuple[Connection, p.Locate, float]] = []
        ready: list[tuple[Connection, p.Locate, float]] = []
        for entry in self._waiting:
            _, message, until = entry
            (ready if now >= until or not self.core.waits(message, now) else still).append(entry)
        self._waiting = still
        for connection, message, _ in ready:
            self._start(connection, message)

    def _start(self, connection: Connection, message: p.Message) -> None:
        connection.busy = True
        try:
            steps = self.core.handle(connection.owner, message, self.process.now)
            self._step(connection, message, steps, None)
        except p.ProtocolError as error:
            raise Violation(f"{self.process.name}: an honest {type(message).__name__} was refused: {error}") from error

    def _step(self, connection: Connection, message: p.Message, steps: Any, told: Any) -> None:
        try:
            ask = steps.send(told)
        except StopIteration as end:
            self._answered(connection, message, end.value)
            return
        self.validate()

        def go_on(told: Any) -> None:
            self._step(connection, message, steps, told)

        match ask:
            case AskMasters():
                self.link.ask(ask.questions, ask.timeout_s, go_on, (ask.promise_s, ask.reader))
            case AskCold() | LocateCold():
                # Without the node's lock: anything may happen before the step goes on.
                told = self._ask_cold(ask)
                self.process.later(self.world.rng.uniform(0.0, 0.002), go_on, told)
            case _:
                raise AssertionError(ask)

    def _ask_cold(self, ask: AskCold | LocateCold) -> list[bytes] | list[ColdPlace | None]:
        assert self.cold is not None
        if isinstance(ask, AskCold):
            until = self.process.now + ask.promise_s if ask.promise_s > 0 else 0.0
            return [self.cold.present(namespace, p.split(hashes), until) for namespace, hashes in ask.questions]
        return self.cold.locate(ask.namespace, p.split(ask.hashes), ask.length)

    def _answered(self, connection: Connection, message: p.Message, answer: p.Message | None) -> None:
        if answer is not None:
            connection.stream.send(answer)
        if isinstance(message, p.Commit):
            self._look_again()
        if isinstance(message, p.Release) and self.cold is not None:
            for page_hash, offset in message.bad_cold:
                self.cold.doubt(message.namespace, page_hash, offset)
        if isinstance(message, p.Reserve | p.Commit | p.Release):
            self.link.notify()
        connection.busy = False
        self.process.later(0.0, self._serve, connection)

    # ------------------------------------------------------------------ other nodes

    def _accept_reader(self, stream: Stream) -> None:
        reader = Reader(next(self._owners), stream)
        self.readers[reader.owner] = reader
        stream.received = lambda message: self._from_reader(reader, message)
        stream.closed = lambda: self._reader_gone(reader)

    def _reader_gone(self, reader: Reader) -> None:
        self.readers.pop(reader.owner, None)
        self.core.drop_owner(reader.owner)
        self.validate()

    def _from_reader(self, reader: Reader, message: Any) -> None:
        if isinstance(message, Body):
            self._take_body(reader, message)
            return
        decoded = _to_data.decode(p.encode(message))
        self.world.note(f"{self.process.name} <- reader {short(decoded)}")
        match decoded:
            case p.Fetch():
                self._fetch(reader.stream, decoded)
            case p.Push():
                self._offered(reader, decoded)
            case _:
                raise Violation(f"{self.process.name}: a reader sends {type(decoded).__name__}")

    def _offered(self, reader: Reader, push: p.Push) -> None:
        taking = self.core.push_offer(reader.owner, push, self.process.now)
        reader.taking = taking if taking.offsets else None
        reader.push, reader.whole = push, bytearray()
        reader.stream.send(taking.reply)
        self.validate()

    def _take_body(self, reader: Reader, body: Body) -> None:
        taking, push = reader.taking, reader.push
        assert taking is not None
        assert push is not None
        at = len(reader.whole)
        offset = taking.offsets[at]
        self.segment.write(offset + body.at, body.piece)
        if body.at + len(body.piece) < push.length:
            return
        of = taking.hashes[at * p.HASH_BYTES : (at + 1) * p.HASH_BYTES]
        pool = Pool(push.namespace, push.group, push.length)
        whole = checksum(pool, of, self.segment.read(offset, push.length)) == taking.checksums[at]
        reader.whole.append(whole)
        if len(reader.whole) == len(taking.offsets):
            reader.taking = None
            done = self.core.push_done(reader.owner, taking, bytes(reader.whole), push.length)
            reader.stream.send(p.Pushed(done, push.id))
            self.link.notify()
            self.validate()

    def _fetch(self, stream: Stream, fetch: p.Fetch) -> None:
        owner = next(self._owners)
        served = self.core.fetch(owner, fetch, self.process.now)
        self.validate()
        status, sums = bytearray(served.reply.status), list(served.reply.checksum)
        cold = self._in_cold(fetch, served.reply)
        for i, place in cold.items():
            status[i], sums[i] = p.LOCAL, place.checksum
        reply = msgspec.structs.replace(served.reply, status=bytes(status), checksum=sums)
        if cold:
            reply.cold = bytes(i in cold for i in range(len(status)))
        stream.send(reply)
        here = iter(served.offsets)
        hashes = p.split(fetch.hashes)
        sources: list[int | tuple[Key, ColdPlace]] = [
            (Key(fetch.namespace, hashes[i]), cold[i]) if i in cold else next(here)
            for i, each in enumerate(status)
            if each == p.LOCAL
        ]
        self._send_bodies(stream, owner, served, sources, fetch.length, 0, 0, self.process.now + _SEND_DEADLINE_S)

    def _in_cold(self, fetch: p.Fetch, reply: p.FetchReply) -> dict[int, ColdPlace]:
        missing = [i for i, status in enumerate(reply.status) if status == p.MISS]
        if self.cold is None or not missing:
            return {}
        places = self.cold.locate(fetch.namespace, p.split(p.select_hashes(fetch.hashes, missing)), fetch.length)
        return {i: place for i, place in zip(missing, places, strict=True) if place is not None}

    def _send_bodies(
        self,
        stream: Stream,
        owner: int,
        served: Served,
        sources: list[int | tuple[Key, ColdPlace]],
        length: int,
        done: int,
        at: int,
        deadline: float,
    ) -> None:
        """A piece of a body, read from the segment as it goes out; then the next, a moment later."""
        now = self.process.now
        if not stream.open or now > deadline or done == len(sources):
            if now > deadline:
                stream.close()
            self.core.fetched(owner, served, sum(isinstance(source, int) for source in sources[:done]))
            self.validate()
            return
        pause = self.options.step_s * self.world.rng.uniform(0.1, 1.5)
        source = sources[done]
        waits = not isinstance(source, int) and self.disk is not None and self.disk.hanging
        if not waits and stream.other.unread + len(stream._held) < _WINDOW:
            if isinstance(source, int):
                body = self.segment.read(source, length)
            else:
                assert self.cold is not None
                body = self.cold.proved(*source, length) or bytes(length)
            end = length if self.world.chance(0.5) else self.world.rng.randrange(at, length) + 1
            stream.send(Body(at, body[at:end]), end - at)
            done, at = (done + 1, 0) if end == length else (done, end)
        self.process.later(pause, self._send_bodies, stream, owner, served, sources, length, done, at, deadline)

    # ------------------------------------------------------------------ housekeeping

    def _housekeeping(self) -> None:
        now = self.process.now
        while self.core.tick(now):
            self.link.notify()
        failed = self.core.take_peers_down()
        if failed:
            self.link.report(failed)
        self._take_room()
        if not self._giving and not self.core.draining:
            self._background(self.core.check_replicas(now), 0, lambda count: self._give())
        self.validate()
        self._look_again()
        self.process.later(HOUSEKEEPING_S, self._housekeeping)

    def _give(self) -> None:
        if self.core.give_due(self.process.now):
            owner = next(self._owners)
            self._background(self.core.give(owner, self.process.now), owner, lambda count: None)

    def _background(self, steps: Any, owner: int, done: Callable[[int], None]) -> None:
        """Run what is not a client's: one such thing at a time."""
        self._giving = True
        self._advance(steps, owner, None, done)

    def _advance(self, steps: Any, owner: int, told: Any, done: Callable[[int], None]) -> None:
        try:
            ask = steps.send(told)
        except StopIteration as end:
            self._giving = False
            self.core.drop_owner(owner)
            self.link.notify()
            self.validate()
            done(end.value)
            return
        self.validate()

        def go_on(told: Any) -> None:
            self._advance(steps, owner, told, done)

        match ask:
            case AskMasters():
                self.link.ask(ask.questions, ask.timeout_s, go_on)
            case Give():
                Pushing(self, ask, go_on).start()
            case _:
                raise AssertionError(ask)

    # ------------------------------------------------------------------ its end in order

    def terminate(self, gone: Callable[[], None]) -> None:
        """SIGTERM: no new pages; hot ones are handed over for a while, then the masters hear that it leaves, and a little later
        nobody reads any more. `gone` is called when it has ended. As the real shell does it (node/drain.py)."""
        if self.core.draining:
            return
        self.world.note(f"{self.process.name} drains")
        self.core.draining = True
        self.link.beat_now()
        until = self.process.now + self.options.drain_s
        self._hand_over(min(until, self.process.now + _ROOM_S), until, gone)

    def _hand_over(self, room_until: float, until: float, gone: Callable[[], None]) -> None:
        now = self.process.now
        _, rooms = self.link.core.room_table
        if now >= until or (now >= room_until and not rooms):
            self._leave(gone)
        elif self._giving or not rooms:
            self.process.later(0.02, self._hand_over, room_until, until, gone)
        else:
            self._take_room()
            owner = next(self._owners)

            def handed(count: int) -> None:
                if count:
                    self._hand_over(room_until, until, gone)
                else:
                    self.process.later(_SETTLE_S, self._leave, gone)

            self._background(self.core.give(owner, now), owner, handed)

    def _take_room(self) -> None:
        since, rooms = self.link.core.room_table
        self.core.placement.update(rooms, since)

    def _leave(self, gone: Callable[[], None]) -> None:
        self.link.close()
        self.process.later(_LINGER_S, self._gone, gone)

    def _gone(self, gone: Callable[[], None]) -> None:
        self.unix = self.data = None
        self._end()
        gone()
