"""What the master answers: messages and the time in, messages out. Directory and membership together, without I/O."""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from collections.abc import Sequence

from hicache_mooncake.protocol import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Answer,
    Beat,
    BeatReply,
    ClearNamespace,
    ClusterReport,
    ClusterStatus,
    Engines,
    Join,
    Joined,
    Keep,
    Leave,
    Lookup,
    LookupReply,
    Message,
    NodeInfo,
    ProtocolError,
    Refused,
    Report,
    Room,
    Snapshot,
    Unshared,
    Update,
    negotiate,
)
from hicache_mooncake.sharing import MAX_RANKS_OF_SOURCE, SharingTable, sentence

from .directory import Directory
from .events_out import EventsOut
from .lookups import Lookups, named_first
from .membership import ACTIVE, JOINING, Member, Membership, NoRoom, is_loopback, is_wildcard
from .refusals import Refusals
from .room import RoomTable
from .shard import Shard
from .stats import Stats
from .streams import Stream, Streams, check_snapshot, check_update, count_keys

MAX_NAME_BYTES = 255
MAX_REASON = 1_000
REMEMBER_CLEARS_S = 60.0
MAX_RECENT_CLEARS = 1024
CLEARS_AT_ONCE = 64
"""Told to a node that joins, and with each beat after that: what finds no place in the queue to a peer is lost, and a node that
misses some joins again."""
STALLED_SNAPSHOT_S = 15.0
"""A snapshot of which no part came for so long has lost one. Long: nodes whose connection breaks join again and start over, and
with many nodes sending theirs to a master that just restarted, each waits for its turn."""
MAX_WARMING_S = 60.0
"""A master that just started waits for the first snapshots of its nodes, but not longer for one that does not come."""
GATHER_S = (0.005, 0.25)
GATHER_S_PER_NODE = 0.0002
"""So the updates of all nodes together are at most 5,000 a second, whatever the size of the cluster."""
SWEEP_KEYS_PER_TICK = 5_000
"""A few milliseconds of work: no request waits for more of a dropped node than this."""

Output = list[tuple[bytes, Message]]


class MasterCore:
    """The whole master but its sockets and its clock.

    With `events_kept_bytes` what the pool holds is put into `events`, to be taken from there, and so much is kept for replay.
    `handle` raises ProtocolError for a message that no honest node sends, before it has changed anything. `notes` collects
    (level, sentence) for the log, the newest 100. `role` and `masters` are what a report says of them, and for others to set.
    Not thread-safe.
    """

    def __init__(
        self,
        incarnation: bytes,
        *,
        heartbeat_s: float = 1.0,
        ttl_s: float = 5.0,
        forget_s: float = 60.0,
        max_keys: int = 20_000_000,
        max_bytes: int | None = None,
        shard: tuple[int, int] = (0, 1),
        rng: random.Random | None = None,
        events_kept_bytes: int | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.heartbeat_s = heartbeat_s
        self.ttl_s = ttl_s
        self.shard = Shard(*shard)
        self.role = ""
        self.masters: list[str] = []
        self.warming = True
        """Until a ttl has passed, and every node that was met has given its first snapshot: what is not known may be there."""
        self.refusals = Refusals()
        rng = rng or random.Random()
        self.directory = Directory(max_keys, rng, max_bytes)
        self.membership = Membership(ttl_s, forget_s)
        self.stats = Stats()
        self.notes: deque[tuple[int, str]] = deque(maxlen=100)
        self.events = None if events_kept_bytes is None else EventsOut(self.shard, events_kept_bytes)
        self.streams = Streams(self.directory, self.shard, self.stats, self.events)
        self._untold: set[str] = set()
        """Silent nodes, whose pages listeners were told to forget."""
        self._untold_at = -1
        self._lookups = Lookups(self.directory, self.membership, self.streams, self.stats)
        self._senders: dict[str, bytes] = {}
        self.sharing = SharingTable()
        """The engines of all nodes, and which of them can never share."""
        self._unshared: dict[tuple[bytes, bytes], Unshared] = {}
        """As said in the log."""
        self._room = RoomTable(rng)
        self._born: float | None = None
        self._recent_clears: dict[bytes, tuple[str, float]] = {}
        """Namespace -> who cleared it, and until when nodes that join are told."""
        self._clears_told: dict[str, int] = {}
        """How many clears were passed on to each member since it joined. One that falls into a connection that is breaking is
        heard by nobody: the member would keep the pages, and they would be missing here."""
        self._clears_due: dict[str, dict[bytes, str]] = {}
        """Those of before it joined that each member is still to be told: namespace -> who cleared it."""
        self._now = 0.0
        self._full = False

    @property
    def sweeping(self) -> bool:
        """Is there dropped state left, so that `tick` should come soon?"""
        return self.directory.sweeping

    def handle(self, message: Message, sender: bytes, now: float) -> Output:
        """Take one message; returns what to send to whom."""
        if self._born is None:
            self._born = now
        match message:
            case Lookup():
                answers = self._lookups.answer(message)
                reply = LookupReply(message.id, answers, self.warming)
                return [(sender, reply), *self._tell_promised(message, answers)]
            case Update():
                return self._update(message, sender, now)
            case Snapshot():
                return self._snapshot(message, sender, now)
            case Beat():
                return [(sender, self._beat(message, sender, now)), *self._tell_due_clears(message.node, sender)]
            case Join():
                return self._join(message, sender, now)
            case Report():
                self._failed_reads(message, sender, now)
                return []
            case Leave():
                if self.membership.leave(message.node, message.incarnation) is not None:
                    self._forget(message.node)
                    self.notes.append((logging.INFO, f"node {message.node!r} left"))
                return []
            case ClearNamespace():
                return self._clear(message, sender)
            case ClusterStatus():
                return [(sender, self._report(message, now))]
            case Engines():
                return self._engines(message, sender, now)
        raise ProtocolError(f"{type(message).__name__} is not for a master")

    def heard(self, message: Message, now: float) -> None:
        """A message came in that `handle` gets later: its node is alive already now."""
        if isinstance(message, Beat | Update | Snapshot | Report):
            self.membership.touch(message.node, message.incarnation, now)

    def tick(self, now: float) -> Output:
        """Let time pass: suspect and forget nodes, take the sick back, drop a bounded part of what was given up."""
        self._now = max(self._now, now)
        if self._born is None:
            self._born = now
        for member in self.membership.expire(now):
            self._forget(member.name)
            self._warn(
                f"node {member.name!r} at {member.host}:{member.port} is gone: not heard of for {self.membership.forget_s:g} s,"
                " its keys are dropped"
            )
        for stream in self.streams:
            if stream.incoming is not None and now - stream.incoming.last_part_at > max(STALLED_SNAPSHOT_S, self.ttl_s):
                self.streams.break_off(stream)
        for member in self.membership.recover(now):
            self.notes.append((logging.INFO, f"node {member.name!r} is answered again: one more failed read sends it back"))
        self._compare_engines(now)
        self.directory.sweep(SWEEP_KEYS_PER_TICK)
        self._full = self._full and not self.streams.have_room
        self._warm(now)
        if self.events is not None:
            self._keep_told(self.events, now)
        return []

    def excuse(self, seconds: float, now: float) -> None:
        """The master itself stood still for so long: that is nobody's silence, no snapshot has stalled in it, and no node had
        the time to join."""
        if self._born is not None:
            self._born = min(now, self._born + seconds)
        self.membership.excuse(seconds, now)
        for stream in self.streams:
            if stream.incoming is not None:
                stream.incoming.last_part_at = min(now, stream.incoming.last_part_at + seconds)

    def holders(self, namespace: bytes, page_hash: bytes) -> set[tuple[str, int]]:
        """(node, tier) of all that hold this page, whatever their state. For tests: costs the number of nodes."""
        return {(holder.name, holder.tier) for holder in self.streams.holders(namespace, page_hash)}

    def validate(self) -> None:
        """For tests, after every event: all parts agree with each other."""
        self.directory.validate()
        self.membership.validate()
        self.streams.validate()
        self.sharing.validate()
        assert set(self.sharing.sources()) <= {stream.name for stream in self.streams}
        assert {stream.name for stream in self.streams} == {member.name for member in self.membership.live()}
        assert set(self._senders) == set(self._clears_told) == {stream.name for stream in self.streams}
        assert set(self._clears_due) == set(self._clears_told)
        for stream in self.streams:
            member = self.membership.get(stream.name, stream.incarnation)
            assert member is not None
            assert member.complete or stream.want_snapshot, "a node that is not complete must be asked for its snapshot"

    # ------------------------------------------------------------------ membership

    def _join(self, message: Join, sender: bytes, now: float) -> Output:
        version = negotiate(message.version_min, message.version_max)
        reason = self._why_not(message)
        if not reason:
            try:
                _, clash = self.membership.join(
                    message.node,
                    message.incarnation,
                    message.host,
                    message.port,
                    message.capacity_bytes,
                    now,
                    version=version or 0,
                    host_id=message.host_id,
                    draining=message.draining,
                    socket=message.socket,
                )
            except NoRoom as error:
                reason = f"Node {message.node!r} is refused: {error}."
        if reason:
            return [(sender, self._refuse(message.node, reason, now))]
        if clash:
            self._warn(
                f"two nodes are called {message.node!r}: the one at {message.host}:{message.port} replaces one that was alive"
                " at another address; give each node a name of its own (--name)"
            )
        if twin := self.membership.at_address(message.host, message.port, message.node):
            self._warn(
                f"nodes {twin!r} and {message.node!r} both advertise {message.host}:{message.port}: the pages of"
                " one of them cannot be read from there; check --advertise on both hosts"
            )
        self.stats.joins += 1
        if version == 1 and self.shard.count > 1:
            self._warn(
                f"node {message.node!r} speaks protocol version 1, which knows no shards: it finds about one of"
                f" {self.shard.count} pages that other nodes hold; upgrade it (pip install -U hicache-mooncake)"
            )
        output = self._evict_loopback(message, now)
        stream = self.streams.open(message.node, message.incarnation, message.seq)
        self._senders[message.node] = sender
        if not stream.want_snapshot:
            self.membership.complete(message.node)
        output.append(
            (
                sender,
                Joined(
                    version=version or PROTOCOL_MAX,
                    master=self.incarnation,
                    heartbeat_s=self.heartbeat_s,
                    ttl_s=self.ttl_s,
                    want_snapshot=self.streams.ask(stream, now),
                    warming=self.warming,
                    gather_s=self._gather_s(),
                ),
            )
        )
        # A node that was out of reach while another one cleared a namespace hears of it now. Behind the answer, or many clears
        # would fill the queue to a peer and crowd it out.
        self._clears_told[message.node] = 0
        self._clears_due[message.node] = {
            namespace: origin
            for namespace, (origin, until) in reversed(self._recent_clears.items())  # who joins again missed one lately
            if origin != message.node and until > now
        }
        return output + self._tell_due_clears(message.node, sender)

    def _tell_due_clears(self, node: str, sender: bytes) -> Output:
        if self._senders.get(node) != sender:
            return []
        due = itertools.islice(self._clears_due[node].items(), CLEARS_AT_ONCE)
        return [(sender, self._tell_clear(node, namespace, origin)) for namespace, origin in list(due)]

    def _tell_clear(self, node: str, namespace: bytes, origin: str) -> ClearNamespace:
        self._clears_due[node].pop(namespace, None)
        self._clears_told[node] += 1
        return ClearNamespace(namespace, origin, self._clears_told[node])

    def _warn(self, text: str) -> None:
        self.notes.append((logging.WARNING, text))

    def _refuse(self, node: str, reason: str, now: float) -> Refused:
        self.stats.refused_joins += 1
        if len(reason) > MAX_REASON:  # it quotes what it was sent, and is kept
            reason = f"{reason[:MAX_REASON]}…"
        if self.refusals.add(node[:MAX_NAME_BYTES], reason, now):
            self._warn(reason)
        return Refused(reason)

    def _gather_s(self) -> float:
        low, high = GATHER_S
        return max(low, min(high, self.membership.active * GATHER_S_PER_NODE))

    def _warm(self, now: float) -> None:
        """Time to say that this master knows all: what it does not know is nowhere, but for what is on its way?"""
        if not self.warming or self._born is None:
            return
        age_s = now - self._born
        if age_s < min(self.ttl_s, MAX_WARMING_S):
            return
        waiting = [member.name for member in self.membership if member.state == JOINING or self._lacks_pages(member)]
        if waiting and age_s < MAX_WARMING_S:
            return
        self.warming = False
        if waiting:
            self._warn(
                f"no first snapshot of {len(waiting)} nodes, such as {waiting[0]!r}, in {MAX_WARMING_S:g} s: going on without,"
                " their pages are misses for other nodes"
            )
        else:
            self.notes.append((logging.INFO, f"warm: {self.membership.active} nodes, {len(self.directory)} keys"))

    def _lacks_pages(self, member: Member) -> bool:
        """Is this one answered already, though what it has in its cold tier has not all come?"""
        stream = self.streams.get(member.name)
        return member.state == ACTIVE and stream is not None and not stream.whole

    def _why_not(self, message: Join) -> str:
        if negotiate(message.version_min, message.version_max) is None:
            older = "the node" if message.version_max < PROTOCOL_MIN else "the master"
            return (
                f"Node {message.node!r} speaks protocol versions {message.version_min} to {message.version_max}, this master"
                f" {PROTOCOL_MIN} to {PROTOCOL_MAX}: upgrade {older} (pip install -U hicache-mooncake)."
            )
        if not message.node or len(message.node.encode()) > MAX_NAME_BYTES or len(message.incarnation) > MAX_NAME_BYTES:
            return f"A node name must have 1 to {MAX_NAME_BYTES} bytes: set another one (--name)."
        if len(message.host_id) > MAX_NAME_BYTES:
            return f"Node {message.node!r} is refused: its host id has more than {MAX_NAME_BYTES} characters (--host-id)."
        if len(message.socket) > MAX_NAME_BYTES:
            return f"Node {message.node!r} is refused: its socket's path has more than {MAX_NAME_BYTES} characters (--socket)."
        if message.seq < 0:
            return f"Node {message.node!r} is refused: update number {message.seq} is negative."
        if is_wildcard(message.host) or len(message.host) > MAX_NAME_BYTES:
            return (
                f"Node {message.node!r} advertises {message.host!r}, an address to listen on that no other node can connect to:"
                " set the address that the other hosts reach it by (--advertise)."
            )
        if not 0 < message.port < 65536:
            return f"Node {message.node!r} advertises port {message.port}: it must be 1 to 65535 (--advertise)."
        if is_loopback(message.host):
            for other in self.membership.live():
                if other.name != message.node and not is_loopback(other.host):
                    return _loopback_reason(message.node, message.host, other)
        return ""

    def _evict_loopback(self, message: Join, now: float) -> Output:
        """A node that others can reach has come: those that only their own host can reach must not be answered any more."""
        if is_loopback(message.host):
            return []
        output: Output = []
        newcomer = self.membership.get(message.node)
        assert newcomer is not None
        for other in self.membership.live():
            if is_loopback(other.host):
                reason = _loopback_reason(other.name, other.host, newcomer)
                output.append((self._senders[other.name], self._refuse(other.name, reason, now)))
                self.membership.leave(other.name, other.incarnation)
                self._forget(other.name)
        return output

    def _beat(self, message: Beat, sender: bytes, now: float) -> BeatReply:
        stream = self._heard(message.node, message.incarnation, sender, now)
        member = self.membership.get(message.node, message.incarnation)
        if stream is None or member is None:
            return BeatReply(self.incarnation, known=False, want_snapshot=False)
        member.used_bytes = message.used_bytes
        member.capacity_bytes = message.capacity_bytes
        member.objects = message.objects
        member.hits = message.hits
        member.lookups = message.lookups
        member.load = message.load
        member.room_bytes = message.room_bytes
        member.reported = True
        if member.draining != message.draining:
            self.membership.drain(member.name, message.draining)
            if message.draining:
                self.notes.append((logging.INFO, f"node {member.name!r} is draining"))
        self.streams.behind(stream, message.seq)
        room: list[Room] = []
        if message.want_room:
            room = self._room.sample(member.name, self.membership, now)
        return BeatReply(
            self.incarnation,
            known=True,
            want_snapshot=self.streams.ask(stream, now),
            warming=self.warming,
            gather_s=self._gather_s(),
            room=room,
            clears=self._clears_told[member.name],
            want_engines=message.engines != self.sharing.number(member.name),
            unshared=self.sharing.verdict(now).of(self.sharing.ids(member.name)),
        )

    def _engines(self, message: Engines, sender: bytes, now: float) -> Output:
        if len(message.ranks) > MAX_RANKS_OF_SOURCE:
            raise ProtocolError(f"{len(message.ranks)} ranks of one node")
        if self._heard(message.node, message.incarnation, sender, now) is None:
            return [(sender, BeatReply(self.incarnation, known=False, want_snapshot=False))]
        self.sharing.put(message.node, message.ranks, now, message.number)
        if self.events is not None:
            for namespace in self.events.describe(message.ranks):
                self.streams.resync_holders(namespace)
            for namespace in self.events.surplus(self.sharing.ranks()) if self.events.full else ():
                self.streams.tell_dropped(self.events, namespace)
                self.events.forget(namespace)
        return []

    def _keep_told(self, events: EventsOut, now: float) -> None:
        """For those who follow events: nodes that are silent hold nothing, and those that are back, or that a subscriber wants
        to hear, say anew what they hold."""
        if self._untold_at != self.membership.version:
            self._untold_at = self.membership.version
            silent = {member.name for member in self.membership.live() if member.silent}
            for name in silent - self._untold:
                events.cleared(name)
            for name in self._untold - silent:
                self._resync(name)
            self._untold = silent
        for name in events.due([stream.name for stream in self.streams], now):
            self._resync(name)

    def _resync(self, name: str) -> None:
        stream = self.streams.get(name)
        if stream is not None:
            self.streams.resync(stream)

    def _compare_engines(self, now: float) -> None:
        verdict = self.sharing.verdict(now)
        found = {(pair.prefill, pair.decode): pair for pair in verdict.unshared}
        for key, pair in found.items():
            if self._unshared.get(key) != pair:
                self._warn(sentence(pair))
        self._unshared = found

    def _failed_reads(self, message: Report, sender: bytes, now: float) -> None:
        if self._heard(message.node, message.incarnation, sender, now) is None:
            return
        self.stats.reports += 1
        for member in self.membership.report(message.node, message.failed, now):
            self.stats.sick += 1
            self._warn(
                f"node {member.name!r} at {member.host}:{member.port} is sick: it reports in, but other nodes cannot read from"
                f" it, {message.node!r} the last; not answered for {self.membership.rotation.lasts_s(member.name):g} s"
            )

    def _heard(self, name: str, incarnation: bytes, sender: bytes, now: float) -> Stream | None:
        if self.membership.touch(name, incarnation, now) is None:
            self.stats.unknown_node += 1
            return None
        self._senders[name] = sender
        return self.streams.get(name)

    def _forget(self, name: str) -> None:
        del self._senders[name]
        del self._clears_told[name], self._clears_due[name]
        self.streams.close(name)
        self.sharing.drop(name, self._now)

    # ------------------------------------------------------------------ the stream of updates

    def _update(self, message: Update, sender: bytes, now: float) -> Output:
        check_update(message)
        stream = self._heard(message.node, message.incarnation, sender, now)
        if stream is None:
            return [(sender, BeatReply(self.incarnation, known=False, want_snapshot=False))]
        self.streams.update(stream, message)
        self._warn_if_full(stream)
        return []

    def _snapshot(self, message: Snapshot, sender: bytes, now: float) -> Output:
        check_snapshot(message)
        stream = self._heard(message.node, message.incarnation, sender, now)
        if stream is None:
            return [(sender, BeatReply(self.incarnation, known=False, want_snapshot=False))]
        if self.streams.snapshot(stream, message, max(now, self._now)):  # messages may have waited long
            self.membership.complete(message.node)
        self._warn_if_full(stream)
        return []

    def _warn_if_full(self, stream: Stream) -> None:
        if stream.refused and not self._full:
            self._full = True
            self._warn(
                f"the directory is full with {len(self.directory)} keys: pages of {stream.name!r} and others are not taken, and"
                " misses for other nodes; raise --max-keys or --max-bytes, or add shards (--shard)"
            )

    # ------------------------------------------------------------------ the rest

    def _clear(self, message: ClearNamespace, sender: bytes) -> Output:
        count_keys([(message.namespace, b"")])
        if len(message.origin) > MAX_NAME_BYTES:
            raise ProtocolError(f"the name of a node with {len(message.origin)} characters")
        self.stats.clears += 1
        self.streams.drop_namespace(message.namespace, message.origin)
        self._recent_clears.pop(message.namespace, None)
        self._recent_clears[message.namespace] = (message.origin, self._now + REMEMBER_CLEARS_S)
        while len(self._recent_clears) > MAX_RECENT_CLEARS:
            del self._recent_clears[next(iter(self._recent_clears))]
        return [
            (receiver, self._tell_clear(name, message.namespace, message.origin))
            for name, receiver in self._senders.items()
            if name != message.origin and receiver != sender
        ]

    def _tell_promised(self, message: Lookup, answers: Sequence[Answer]) -> Output:
        """The asker counts on the pages of this answer: those who were named first for them hear of it, behind the answer."""
        if message.promise_s <= 0:
            return []
        members = ((node, pages, self.membership.get(node)) for node, pages in named_first(message.questions, answers).items())
        return [
            (self._senders[node], Keep(message.asker, message.reader, message.promise_s, pages))
            for node, pages, member in members
            if member is not None and member.version >= 2
        ]

    def _report(self, asked: ClusterStatus, now: float) -> ClusterReport:
        brief = asked.brief
        return ClusterReport(
            self.incarnation,
            PROTOCOL_MAX,
            [] if brief else [self._info(member, now) for member in self.membership],
            len(self.directory),
            self.shard.index,
            self.shard.count,
            self.warming,
            self.role,
            self.masters,
            [] if brief else list(self.sharing.verdict(now).unshared),
            {} if brief else self.sharing.roles(),
            self.sharing.page_kinds() if asked.kinds else [],
        )

    def _info(self, member: Member, now: float) -> NodeInfo:
        """`age_s` is the time since the node was last heard of."""
        return NodeInfo(
            node=member.name,
            host=member.host,
            port=member.port,
            state=member.state,
            used_bytes=member.used_bytes,
            capacity_bytes=member.capacity_bytes,
            objects=member.objects,
            keys=self.streams.keys_of(member.name),
            age_s=max(0.0, now - member.last_heard),
            hits=member.hits,
            lookups=member.lookups,
            host_id=member.host_id,
            load=member.load,
        )


def _loopback_reason(name: str, host: str, other: Member) -> str:
    return (
        f"Node {name!r} advertises {host!r}, which only its own host can reach, while {other.name!r} advertises {other.host!r}:"
        f" set the address that the other hosts reach {name!r} by (--advertise)."
    )
