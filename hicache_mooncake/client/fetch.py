"""A mover's reads from other nodes: the shell around FetchPlan that connects, asks, and receives into the engine's memory.

Answers are read as they come, from all nodes at once on one thread, so that a slow one takes no time from the others. Closing a
connection is the fence: whatever the node still sends lands nowhere. It comes before the pages are asked of anybody else.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import time
from collections.abc import Collection, Generator, Sequence

import xxhash

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import BLAME_AFTER_S, LEAST_S
from hicache_mooncake.client.batch import Batch, Landing
from hicache_mooncake.client.lanes import Lanes
from hicache_mooncake.client.over_links import OverLinks
from hicache_mooncake.client.remote import Ask, FetchPlan
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.memory import EngineMemory, EngineMemoryError, advanced
from hicache_mooncake.transfer.peers import Connecting, Peers, address_of
from hicache_mooncake.transfer.tcp import PeerConnection
from hicache_mooncake.wire import Soon

_CONNECTING_S = 0.5
_SENDING_S = 0.2
"""A request is small: who does not take it within this time does not read."""
_TURN_BYTES = 1 << 20
"""From one node, over all its lanes, before the others are looked at."""
_ANSWER_BYTES = 32 << 10
"""More than the answer of a holder that has written over a link."""
_AT_ONCE_S = 0.002
"""Who began to read later than this after asking did something else first."""

_fetch_ids = itertools.count(1)

Reading = Generator[list[memoryview], None, None]


class _Stream:
    """An Ask under way on a connection: `wanted` is to be filled by what comes next."""

    def __init__(self, ask: Ask, connection: PeerConnection, soon: Soon, *, reused: bool) -> None:
        self.ask = ask
        self._soon = soon
        self.connection = connection
        self.reused = reused
        self.fetch_id = next(_fetch_ids)
        self.reading: Reading
        self.wanted: list[memoryview] = []
        self.began = self.last_at = time.monotonic()
        self.received = 0
        self._source = connection.source(self.began)

    def fileno(self) -> int:
        return self.connection.sock.fileno()

    def wait(self) -> int:
        """Fill as much of `wanted` as comes: how many bytes, or 0 at the end. Raises TimeoutError when the Ask's time is over.

        Waits in turns: what comes of a turn has come lately, which tells a slow node from a silent one. For the beginning of an
        answer is looked for a moment before sleeping."""
        if not self.received and (look_s := self._soon.look_s()):
            got = self._look(look_s)
            if got is not None:
                self._soon.paid()
                return got
            self._soon.in_vain()
        while True:
            try:
                return self._source(self.wanted)
            except TimeoutError:
                now = time.monotonic()
                if now >= self.ask.until:
                    if not self.ask.over_link or self.received > _ANSWER_BYTES:
                        raise
                    with contextlib.suppress(BlockingIOError):  # the link has written: that is not to be taken for silence
                        return self.at_once()
                    raise
                self._source = self.connection.source(min(self.ask.until, now + BLAME_AFTER_S / 2))

    def _look(self, look_s: float) -> int | None:
        until = time.monotonic() + look_s
        while True:
            try:
                return self.at_once()
            except BlockingIOError:
                if time.monotonic() > until:
                    return None
                os.sched_yield()

    def at_once(self) -> int:
        """The same with what is there. Raises BlockingIOError when nothing is."""
        if len(self.wanted) == 1:
            return self.connection.sock.recv_into(self.wanted[0], 0, socket.MSG_DONTWAIT)
        return self.connection.sock.recvmsg_into(self.wanted, 0, socket.MSG_DONTWAIT)[0]

    def advance(self, got: int) -> None:
        """So many bytes have come, at least one."""
        self.received += got
        self.last_at = time.monotonic()
        if got == sum(map(len, self.wanted)):
            self.wanted = []
            return
        self.wanted = advanced(self.wanted, got)


class _Timing:
    """How fast pages come from one node, where a load tells: all from this node, nothing else done meanwhile, and over
    connections that stood before."""

    def __init__(self) -> None:
        self._first: Ask | None = None
        self._began = 0.0
        self._tells = True

    def asked(self, ask: Ask, *, reused: bool) -> None:
        if self._first is None:
            self._first, self._began = ask, time.monotonic()
        same = address_of(ask.peer) == address_of(self._first.peer) and ask.lanes <= self._first.lanes
        self._tells = self._tells and same and reused and not ask.over_link

    def reading(self) -> None:
        self._tells = self._tells and time.monotonic() - self._began < _AT_ONCE_S

    def ended(self, lanes: Lanes, size: int) -> None:
        """`size` bytes came, and all that were asked for."""
        if self._first is not None and self._tells:
            lanes.loaded(self._first.peer, self._first.lanes, size, time.monotonic() - self._began)


class RemoteReads:
    """The remote pages of one batch. `begin`, then `poke` whenever there is a moment, then `run`; `close` in any case."""

    def __init__(
        self,
        peers: Peers,
        memory: EngineMemory,
        batch: Batch,
        landing: Landing,
        ok: bytearray,
        plan: FetchPlan,
        requester: str,
        lanes: Lanes,
        links: OverLinks,
        reader: str = "",
    ) -> None:
        self._peers = peers
        self._memory = memory
        self._batch = batch
        self._landing = landing
        self._ok = ok
        self._plan = plan
        self._requester = requester
        self._reader = reader
        self._lanes = lanes
        self._links = links
        self._timing = _Timing()
        self._streams: dict[int, _Stream] = {}
        self._connecting: dict[Connecting, Ask] = {}
        self._poll = select.poll()
        self._poll.register(peers.fileno(), select.POLLIN)
        self.received_bytes = 0
        """Of bodies that came whole."""

    def begin(self) -> None:
        """Ask those that we are connected to, and begin to connect to the others."""
        for ask in self._plan.next(time.monotonic(), self._peers.admit):
            self._start(ask)

    def poke(self) -> None:
        """Ask those that have been connected to meanwhile."""
        if self._connecting:
            self._take_connected()

    def run(self) -> None:
        """Until every page is settled. Returns at the plan's deadline."""
        self._timing.reading()
        while True:
            self.begin()
            if self._plan.done:
                if not self._plan.reasons and not self._plan.doubtful:
                    self._timing.ended(self._lanes, self.received_bytes)
                return
            if not self._streams and not self._connecting:
                continue  # all that was begun has failed at once
            if len(self._streams) == 1 and not self._connecting:
                (stream,) = self._streams.values()
                self._turn(stream, alone=True)
                continue
            now = time.monotonic()
            due = self._plan.due()
            left = max(0.0, (self._plan.deadline if due is None else due) - now)
            ready = {fd for fd, stream in self._streams.items() if stream.connection.buffered}
            ready |= {fd for fd, _ in self._poll.poll(0 if ready else left * 1000)}
            late = self._plan.expired(time.monotonic())
            for fd in ready:
                stream_ready = self._streams.get(fd)
                # The answer of who wrote over a link is short, and its link would be ended for a delay of this end's.
                if stream_ready is not None and (stream_ready.ask not in late or stream_ready.ask.over_link):
                    self._turn(stream_ready, alone=False)
            self._take_connected()
            for ask in late:
                self._give_up(ask, ready)

    def close(self) -> None:
        """Whatever is still under way is stopped: nothing lands any more."""
        for stream in list(self._streams.values()):
            self._end_stream(stream, keep=False)
            self._peers.undecided(stream.ask.peer)
        for attempt, ask in self._connecting.items():
            self._peers.abandon(attempt)
            self._peers.undecided(ask.peer)
        self._connecting.clear()

    # ------------------------------------------------------------------ asking

    def _start(self, ask: Ask) -> None:
        connection = self._peers.take(ask.peer)
        self._timing.asked(ask, reused=connection is not None)
        if connection is not None:
            self._send(ask, connection, reused=True)
            return
        until = min(ask.until, time.monotonic() + _CONNECTING_S)
        self._connecting[self._peers.connect(ask.peer, until)] = ask

    def _take_connected(self) -> None:
        for attempt in self._peers.connected():
            ask = self._connecting.pop(attempt, None)
            if ask is None:
                continue
            if attempt.connection is not None:
                self._send(ask, attempt.connection, reused=False)
            elif self._has_lane(ask):
                self._crowded(ask, "peer_down")
            elif isinstance(attempt.error, tcp.PeerFull):
                self._full(ask)
            elif attempt.at_fault:
                self._peers.failed(ask.peer)
                self._plan.ended(ask, "peer_down", blame=True)
            else:
                self._peers.undecided(ask.peer)
                self._plan.ended(ask, "peer_down")

    def _send(self, ask: Ask, connection: PeerConnection, *, reused: bool) -> None:
        stream = _Stream(ask, connection, self._peers.soon, reused=reused)
        job = self._batch.job
        hashes = p.select_hashes(job.hashes, ask.pages)
        link, into = self._links.take(ask)
        fetch = p.Fetch(
            p.FETCH_VERSION,
            self._requester,
            job.namespace,
            hashes,
            self._batch.body_bytes,
            stream.fetch_id,
            job.touch,
            link,
            into,
            self._reader,
        )
        stream.reading = self._reading(stream)
        stream.wanted = next(stream.reading)
        try:
            connection.request(fetch, min(ask.until, stream.began + _SENDING_S))
        except TimeoutError:
            connection.close()
            self._blame(stream, "peer_down", at_fault=time.monotonic() - stream.began >= _SENDING_S)
            return
        except ConnectionError:
            pass  # what it said before it ended is read
        except OSError:
            connection.close()
            self._broke(stream, "peer_down")
            return
        self._streams[stream.fileno()] = stream
        self._poll.register(stream.fileno(), select.POLLIN)

    # ------------------------------------------------------------------ receiving

    def _turn(self, stream: _Stream, *, alone: bool) -> None:
        """Read what has come. With nobody else to look at, wait for all of it."""
        ask = stream.ask
        turn_ends = stream.received + _TURN_BYTES // ask.lanes
        try:
            while alone or stream.received < turn_ends:
                while stream.wanted:
                    got = stream.wait() if alone else stream.at_once()
                    if got == 0:
                        raise ConnectionError("peer closed the connection in mid-answer")
                    stream.advance(got)
                stream.wanted = next(stream.reading)
        except StopIteration:
            self._end_stream(stream, keep=True)
            self._peers.works(ask.peer)
            self._plan.ended(ask)
        except BlockingIOError:
            pass
        except EngineMemoryError:
            self._end_stream(stream, keep=False)
            self._peers.undecided(ask.peer)
            self._plan.ended(ask, "engine_memory", final=True)
        except TimeoutError:
            self._give_up(ask, set())
        except tcp.PeerFull:
            self._end_stream(stream, keep=False)
            self._full(ask)
        except (OSError, p.ProtocolError):
            self._end_stream(stream, keep=False)
            self._broke(stream, "peer_failed")

    def _reading(self, stream: _Stream) -> Reading:
        """Yields what the answer's bytes go into, in order, and settles each page when its last one has come."""
        ask, plan = stream.ask, self._plan
        header = tcp.incoming(tcp.reply_decoder)
        while True:
            try:
                view = next(header)
            except StopIteration as read:
                reply = read.value
                break
            yield [view]
        if isinstance(reply, p.Refused):
            raise tcp.refusal(ask.peer, reply)
        if reply.id != stream.fetch_id or not len(reply.status) == len(reply.checksum) == len(ask.pages):
            raise p.ProtocolError("reply does not match the request")
        self._links.answered(ask, failed=reply.link_failed)
        cold = {page for page, from_disk in zip(ask.pages, reply.cold, strict=False) if from_disk}
        held: list[tuple[int, int]] = []
        for page, status, checksum in zip(ask.pages, reply.status, reply.checksum, strict=True):
            if status == p.LOCAL:
                held.append((page, checksum))
            else:
                plan.missed(ask, page, "wrong_length" if status == p.WRONG_LENGTH else "gone_remote")
        if reply.linked:
            plan.landed(ask)
            self.begin()  # the next pages are written while these are copied
            self._take_landed(ask, held)
            return
        through = self._landing.offsets.keys() - self._links.spoilt()
        bodies = self._bodies([page for page, _ in held], through)
        for page, checksum in held:
            arrived = None
            while arrived is None:
                wanted = next(bodies)
                if isinstance(wanted, int):
                    arrived = wanted
                else:
                    yield wanted
            self._settle(ask, page, checksum, arrived, in_segment=page in through, cold=page in cold)

    def _settle(self, ask: Ask, page: int, checksum: int, arrived: int, *, in_segment: bool, cold: bool = False) -> None:
        """All bytes of a page have come, and have this checksum. `in_segment`: they lie in the segment, too. `cold`: they were
        read from the holder's disk, whose damage is no fault of the node."""
        self.received_bytes += self._batch.body_bytes
        if arrived == checksum:
            self._ok[page] = 1
            if in_segment and page in self._landing.offsets:
                self._landing.checksums[page] = checksum
            self._plan.arrived(ask, page)
        else:
            self._plan.missed(ask, page, "checksum_cold" if cold else "checksum_remote", blame=not cold)

    def _take_landed(self, ask: Ask, held: Sequence[tuple[int, int]]) -> None:
        """These pages, with their checksums, lie in the segment. Copy them on; the bytes that are copied decide."""
        if not ask.over_link:
            raise p.ProtocolError("the holder says that it has written where it was not asked to")
        batch, segment = self._batch, self._landing.segment
        for page, checksum in held:
            if not self._links.landing:  # the segment has gone with the connection to the node
                self._plan.missed(ask, page, "node_down")
                continue
            if time.monotonic() > self._plan.deadline:
                self._plan.missed(ask, page, "deadline")
                continue
            place = self._links.place(ask, page)
            body = segment.view[place : place + batch.body_bytes]
            # A card's last bytes may be seen only after its word: what is not read back is right before the copy and after it.
            seed = batch.seed(page)
            arrived = checksum if self._memory.reads_back else xxhash.xxh3_64_intdigest(body, seed)
            if arrived == checksum:
                arrived = self._memory.load(body, segment.address + place, batch.addresses(page), batch.layout, seed)
            if arrived == checksum:
                self._links.received_bytes += batch.body_bytes
            self._settle(ask, page, checksum, arrived, in_segment=True)
        self._links.copied(ask)

    def _bodies(self, pages: Sequence[int], through: Collection[int]) -> Generator[list[memoryview] | int, None, None]:
        """As `EngineMemory.receiving`; those in `through` go through their places in the segment, where no link may write."""
        batch, landing = self._batch, self._landing
        for through_segment, group in itertools.groupby(pages, key=lambda page: page in through):
            members = list(group)
            if not through_segment:
                places, seeds = [batch.addresses(page) for page in members], [batch.seed(page) for page in members]
                yield from self._memory.receiving(places, batch.layout, seeds)
                continue
            for page in members:
                offset = landing.offsets[page]
                body = landing.segment.view[offset : offset + batch.body_bytes]
                yield [body]
                at = landing.segment.address + offset
                yield self._memory.load(body, at, batch.addresses(page), batch.layout, batch.seed(page))

    # ------------------------------------------------------------------ ends

    def _end_stream(self, stream: _Stream, *, keep: bool) -> None:
        fd = stream.fileno()
        if self._streams.pop(fd, None) is not None:
            self._poll.unregister(fd)
        stream.reading.close()
        if keep:
            self._peers.keep(stream.connection)
        else:
            stream.connection.close()

    def _give_up(self, ask: Ask, ready: set[int]) -> None:
        """Its time is over. `ready`: on these descriptors something waits to be read, which is not the node's fault."""
        for attempt, waiting in list(self._connecting.items()):
            if waiting is ask:
                del self._connecting[attempt]
                self._peers.abandon(attempt)
                self._blame_ask(ask, "peer_down", at_fault=time.monotonic() - ask.asked_at >= BLAME_AFTER_S)
                return
        for fd, stream in list(self._streams.items()):
            if stream.ask is ask:
                self._end_stream(stream, keep=False)
                now = time.monotonic()
                # One that goes on sending is slow. Where it has given something whole, that is no reason to leave it alone.
                slow = fd in ready or (stream.received > 0 and now - stream.last_at < BLAME_AFTER_S)
                forgiven = slow and (ask.arrived or now < self._plan.deadline - LEAST_S)
                # A holder that writes over a link says nothing meanwhile: whether it or the link hangs shows over tcp.
                forgiven = forgiven or ask.over_link
                self._blame(stream, "deadline", at_fault=not forgiven and now - stream.began >= BLAME_AFTER_S)
                return

    def _broke(self, stream: _Stream, reason: str) -> None:
        """The connection has ended. On an old one that had not said anything yet, this was only now to be seen; so ends a new
        one to an older release that takes no more, too."""
        if stream.reused and not stream.received:
            self._peers.undecided(stream.ask.peer)
            self._plan.again(stream.ask)
        elif not stream.received and self._has_lane(stream.ask):
            self._crowded(stream.ask, reason)
        else:
            self._blame(stream, reason, at_fault=True)

    def _full(self, ask: Ask) -> None:
        """The node takes no more connections. That is no fault; but with none at all it is left alone for a moment."""
        if self._has_lane(ask):
            self._crowded(ask, "peer_full")
        else:
            self._peers.failed(ask.peer)
            self._plan.ended(ask, "peer_full")

    def _has_lane(self, ask: Ask) -> bool:
        """Its node can be asked over another connection than the one that was to be made for this."""
        return self._plan.accompanied(ask) or self._peers.connected_to(ask.peer)

    def _crowded(self, ask: Ask, reason: str) -> None:
        """Another lane could not be had: what it was for waits for the others."""
        self._peers.undecided(ask.peer)
        self._lanes.refused(ask.peer)
        self._plan.crowded(ask, reason)

    def _blame(self, stream: _Stream, reason: str, *, at_fault: bool) -> None:
        self._blame_ask(stream.ask, reason, at_fault=at_fault)

    def _blame_ask(self, ask: Ask, reason: str, *, at_fault: bool) -> None:
        if at_fault:
            self._peers.failed(ask.peer)
        else:
            self._peers.undecided(ask.peer)
        self._plan.ended(ask, reason, blame=at_fault, stay=not at_fault)
