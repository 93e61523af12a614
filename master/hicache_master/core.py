"""What the master answers: messages and the time in, messages out. Directory and membership together, without I/O."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache_mooncake.protocol import (
    COLD,
    DRAM,
    MAX_KEYS_PER_MESSAGE,
    MAX_NAMESPACES_PER_MESSAGE,
    NAMESPACE_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Answer,
    Beat,
    BeatReply,
    ClearNamespace,
    ClusterReport,
    ClusterStatus,
    Join,
    Joined,
    Leave,
    Lookup,
    LookupReply,
    Message,
    NodeInfo,
    Peer,
    ProtocolError,
    Question,
    Refused,
    Report,
    Room,
    Snapshot,
    Update,
    count_hashes,
    negotiate,
)

from .directory import Directory
from .membership import ACTIVE, DRAINING, GONE, JOINING, Member, Membership, NoRoom, is_loopback, is_wildcard
from .refusals import Refusals
from .room import RoomTable
from .shard import Shard

MAX_NAME_BYTES = 255
MAX_LATER_KEYS = 524_288
"""Keys in updates that overtook the snapshot they follow. Past this the snapshot is asked for again."""
REMEMBER_CLEARS_S = 60.0
MAX_RECENT_CLEARS = 1024
MAX_LATER_UPDATES = 65_536
STALLED_SNAPSHOT_S = 15.0
"""A snapshot of which no part came for so long has lost one. Long: nodes whose connection breaks join again and start over, and
with many nodes sending theirs to a master that just restarted, each waits for its turn."""
TIERS = (DRAM, COLD)
MAX_WARMING_S = 60.0
"""A master that just started waits for the first snapshots of its nodes, but not longer for one that does not come."""
GATHER_S = (0.005, 0.25)
GATHER_S_PER_NODE = 0.0002
"""So the updates of all nodes together are at most 5,000 a second, whatever the size of the cluster."""
FULL_SHARE = 0.9
"""A directory that was full and has shrunk to this part of its cap takes again what it did not take then."""
SWEEP_KEYS_PER_TICK = 5_000
"""A few milliseconds of work: no request waits for more of a dropped node than this."""

Output = list[tuple[bytes, Message]]


@dataclass(slots=True)
class Stats:
    """What happened since this master started."""

    joins: int = 0
    refused_joins: int = 0
    lookups: int = 0
    lookup_keys: int = 0
    lookup_hits: int = 0
    updates: int = 0
    gaps: int = 0
    snapshots: int = 0
    snapshots_broken: int = 0
    clears: int = 0
    unknown_node: int = 0
    reports: int = 0
    sick: int = 0
    foreign_keys: int = 0


class _Holder(NamedTuple):
    """What a slot of the directory stands for."""

    name: str
    tier: int


@dataclass(slots=True)
class _Incoming:
    """A snapshot that has not all come. It fills slots of its own, so that what was known is answered until then."""

    seq: int
    last_part_at: float
    slots: dict[int, int] = field(default_factory=dict)
    next_part: int = 0
    later: dict[int, Update] = field(default_factory=dict)
    later_keys: int = 0


@dataclass(slots=True)
class _Track:
    """Where the master stands in one node's stream of updates."""

    name: str
    incarnation: bytes
    sender: bytes
    seq: int
    want_snapshot: bool
    peer: Peer
    host_id: str = ""
    slots: dict[int, int] = field(default_factory=dict)
    """Tier -> slot of the directory."""
    incoming: _Incoming | None = None
    refused: bool = False
    """The directory was full when this node had pages to add."""


class _InRotation:
    """Which slots lookups answer, and in what order."""

    def __init__(self) -> None:
        self.ranks = bytearray()
        """A byte a slot: 0 is not answered, a lower one is before a higher one."""
        self._hosts: dict[str, set[int]] = {}
        self._members: dict[int, Member] = {}

    def add(self, member: Member, slots: dict[int, int]) -> None:
        for tier, slot in slots.items():
            self.ranks += bytes(max(0, slot + 1 - len(self.ranks)))
            self.ranks[slot] = 1 + len(TIERS) if member.state == DRAINING else 1 + TIERS.index(tier)
            self._members[slot] = member
            if member.host_id:
                self._hosts.setdefault(member.host_id, set()).add(slot)

    def near(self, host_id: str) -> Container[int]:
        """Slots of nodes on this host."""
        return self._hosts.get(host_id, ())

    def load(self, slot: int) -> float:
        return self._members[slot].load


class MasterCore:
    """The whole master but its sockets and its clock.

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
        self._tracks: dict[str, _Track] = {}
        self._by_slot: dict[int, _Holder] = {}
        self._room = RoomTable(rng)
        self._born: float | None = None
        self._recent_clears: dict[bytes, tuple[str, float]] = {}
        """Namespace -> who cleared it, and until when nodes that join are told."""
        self._now = 0.0
        self._answered = _InRotation()
        self._answered_version = -1

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
                return [(sender, self._lookup(message))]
            case Update():
                return self._update(message, sender, now)
            case Snapshot():
                return self._snapshot(message, sender, now)
            case Beat():
                return [(sender, self._beat(message, sender, now))]
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
                return [(sender, self._report(message.brief, now))]
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
        for track in self._tracks.values():
            if track.incoming is not None and now - track.incoming.last_part_at > max(STALLED_SNAPSHOT_S, self.ttl_s):
                self._break_off(track)
        for member in self.membership.recover(now):
            self.notes.append((logging.INFO, f"node {member.name!r} is answered again: one more failed read sends it back"))
        self.directory.sweep(SWEEP_KEYS_PER_TICK)
        self._warm(now)
        return []

    def excuse(self, seconds: float, now: float) -> None:
        """The master itself stood still for so long: that is nobody's silence, and no snapshot has stalled in it."""
        self.membership.excuse(seconds, now)
        for track in self._tracks.values():
            if track.incoming is not None:
                track.incoming.last_part_at = min(now, track.incoming.last_part_at + seconds)

    def holders(self, namespace: bytes, page_hash: bytes) -> set[tuple[str, int]]:
        """(node, tier) of all that hold this page, whatever their state. For tests: costs the number of nodes."""
        held = set()
        for slot, holder in self._by_slot.items():
            ranks = bytes(slot) + b"\1"
            if any(self.directory.find(namespace, page_hash, prefix=False, ranks=ranks).column):
                held.add((holder.name, holder.tier))
        return held

    def validate(self) -> None:
        """For tests, after every event: all parts agree with each other."""
        self.directory.validate()
        self.membership.validate()
        assert set(self._tracks) == {member.name for member in self.membership.live()}
        slots: dict[int, _Holder] = {}
        for name, track in self._tracks.items():
            member = self.membership.get(name, track.incarnation)
            assert member is not None
            assert member.complete or track.want_snapshot, "a node that is not complete must be asked for its snapshot"
            assert track.peer == Peer(name, track.incarnation, member.host, member.port)
            slots |= {slot: _Holder(name, tier) for tier, slot in track.slots.items()}
            if track.incoming is not None:
                assert track.want_snapshot
                assert not set(track.incoming.slots.values()) & set(self._by_slot)
                assert all(seq > track.incoming.seq for seq in track.incoming.later)
                assert track.incoming.later_keys <= MAX_LATER_KEYS
        assert slots == self._by_slot

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
        # A node that was out of reach while another one cleared a namespace hears of it now.
        output += [
            (sender, ClearNamespace(namespace, origin))
            for namespace, (origin, until) in self._recent_clears.items()
            if origin != message.node and until > now
        ]
        peer = Peer(message.node, message.incarnation, message.host, message.port)
        track = self._tracks.get(message.node)
        if track is None or track.incarnation != message.incarnation:
            if track is not None:
                self._forget(message.node)
            track = _Track(message.node, message.incarnation, sender, message.seq, message.seq != 0, peer, message.host_id)
            self._tracks[message.node] = track
            if not track.want_snapshot:
                self.membership.complete(message.node)
        else:
            track.sender, track.peer, track.host_id = sender, peer, message.host_id
            if track.incoming is not None:
                self._break_off(track)
            if track.seq != message.seq:
                track.seq = message.seq
                track.want_snapshot = True
        output.append(
            (
                sender,
                Joined(
                    version=version or PROTOCOL_MAX,
                    master=self.incarnation,
                    heartbeat_s=self.heartbeat_s,
                    ttl_s=self.ttl_s,
                    want_snapshot=track.want_snapshot,
                    warming=self.warming,
                    gather_s=self._gather_s(),
                ),
            )
        )
        return output

    def _warn(self, text: str) -> None:
        self.notes.append((logging.WARNING, text))

    def _refuse(self, node: str, reason: str, now: float) -> Refused:
        self.stats.refused_joins += 1
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
        waiting = [member.name for member in self.membership if member.state == JOINING]
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
                output.append((self._tracks[other.name].sender, self._refuse(other.name, reason, now)))
                self.membership.leave(other.name, other.incarnation)
                self._forget(other.name)
        return output

    def _beat(self, message: Beat, sender: bytes, now: float) -> BeatReply:
        track = self._heard(message.node, message.incarnation, sender, now)
        member = self.membership.get(message.node, message.incarnation)
        if track is None or member is None:
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
        if track.refused and self._has_room():
            track.refused = False
            track.want_snapshot = True
        if message.seq > track.seq and track.incoming is None and not track.want_snapshot:
            self.stats.gaps += 1
            track.want_snapshot = True
        room: list[Room] = []
        if message.want_room:
            room = self._room.sample(member.name, self.membership, now)
        return BeatReply(
            self.incarnation,
            known=True,
            want_snapshot=track.want_snapshot and track.incoming is None,
            warming=self.warming,
            gather_s=self._gather_s(),
            room=room,
        )

    def _has_room(self) -> bool:
        directory = self.directory
        in_bytes = directory.max_bytes is None or directory.resident_bytes < FULL_SHARE * directory.max_bytes
        return in_bytes and len(directory) < FULL_SHARE * directory.max_keys

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

    def _heard(self, name: str, incarnation: bytes, sender: bytes, now: float) -> _Track | None:
        if self.membership.touch(name, incarnation, now) is None:
            self.stats.unknown_node += 1
            return None
        track = self._tracks[name]
        track.sender = sender
        return track

    def _forget(self, name: str) -> None:
        track = self._tracks.pop(name)
        if track.incoming is not None:
            self._drop(track.incoming.slots)
        self._drop(track.slots)

    def _drop(self, slots: dict[int, int]) -> None:
        for slot in slots.values():
            self._by_slot.pop(slot, None)
            self.directory.drop_node(slot)
        slots.clear()
        self._answered_version = -1

    def _slot(self, track: _Track, tier: int) -> int:
        slot = track.slots.get(tier)
        if slot is None:
            slot = track.slots[tier] = self.directory.allocate()
            self._by_slot[slot] = _Holder(track.name, tier)
            self._answered_version = -1
        return slot

    def _add(self, track: _Track, slot: int, columns: list[tuple[bytes, bytes]]) -> None:
        before = self.directory.refused_adds
        for namespace, hashes in columns:
            own, foreign = self.shard.own(hashes)
            self.stats.foreign_keys += foreign
            if own:
                self.directory.add(slot, namespace, own)
        if self.directory.refused_adds > before and not track.refused:
            track.refused = True
            self._warn(
                f"the directory is full with {len(self.directory)} keys: pages of {track.name!r} are not taken, and misses for"
                " other nodes; raise --max-keys or --max-bytes, or add shards (--shard)"
            )

    # ------------------------------------------------------------------ the stream of updates

    def _update(self, message: Update, sender: bytes, now: float) -> Output:
        keys = _count(message.added) + _count(message.removed)
        _check_tier(message.tier)
        track = self._heard(message.node, message.incarnation, sender, now)
        if track is None:
            return [(sender, BeatReply(self.incarnation, known=False, want_snapshot=False))]
        self.stats.updates += 1
        if message.seq <= track.seq:
            return []
        incoming = track.incoming
        if incoming is not None and message.seq > incoming.seq:
            if len(incoming.later) >= MAX_LATER_UPDATES or incoming.later_keys + keys > MAX_LATER_KEYS:
                self._break_off(track)
            elif message.seq not in incoming.later:
                incoming.later[message.seq] = message
                incoming.later_keys += keys
        if message.seq == track.seq + 1:
            track.seq = message.seq
        elif not track.want_snapshot:
            self.stats.gaps += 1
            track.want_snapshot = True
        # After a gap too: a wrong hint costs a miss, a missing one as well, and the snapshot puts both right.
        self._apply(track, message)
        return []

    def _snapshot(self, message: Snapshot, sender: bytes, now: float) -> Output:
        _count(message.added)
        _check_tier(message.tier)
        if message.seq < 0 or message.part < 0:
            raise ProtocolError(f"snapshot part {message.part} of update {message.seq}")
        track = self._heard(message.node, message.incarnation, sender, now)
        if track is None:
            return [(sender, BeatReply(self.incarnation, known=False, want_snapshot=False))]
        if message.part == 0:
            if message.seq < track.seq and not track.want_snapshot:
                return []  # older than what is known already
            if track.incoming is not None:
                if message.seq < track.incoming.seq:
                    return []
                self._break_off(track)
            track.incoming = _Incoming(message.seq, max(now, self._now))
            track.want_snapshot = True
        incoming = track.incoming
        if incoming is None or incoming.seq != message.seq or message.part < incoming.next_part:
            return []
        if message.part > incoming.next_part:
            self._break_off(track)
            return []
        incoming.next_part += 1
        incoming.last_part_at = max(now, self._now)  # messages may have waited long
        if message.added:
            slot = incoming.slots.get(message.tier)
            if slot is None:
                slot = incoming.slots[message.tier] = self.directory.allocate()
            self._add(track, slot, message.added)
        if message.last:
            self._complete(track, incoming)
        return []

    def _complete(self, track: _Track, incoming: _Incoming) -> None:
        self.stats.snapshots += 1
        self._drop(track.slots)
        track.slots = incoming.slots
        self._by_slot |= {slot: _Holder(track.name, tier) for tier, slot in track.slots.items()}
        track.seq = incoming.seq
        track.want_snapshot = False
        track.incoming = None
        for seq in sorted(incoming.later):
            if seq == track.seq + 1:
                track.seq = seq
            elif not track.want_snapshot:
                self.stats.gaps += 1
                track.want_snapshot = True
            self._apply(track, incoming.later[seq])
        self.membership.complete(track.name)

    def _break_off(self, track: _Track) -> None:
        assert track.incoming is not None
        self.stats.snapshots_broken += 1
        self._drop(track.incoming.slots)
        track.incoming = None
        track.want_snapshot = True

    def _apply(self, track: _Track, message: Update) -> None:
        slot = track.slots.get(message.tier)
        if slot is not None:
            for namespace, hashes in message.removed:
                self.directory.remove(slot, namespace, hashes)
        if message.added:
            self._add(track, self._slot(track, message.tier), message.added)

    # ------------------------------------------------------------------ questions

    def _lookup(self, message: Lookup) -> LookupReply:
        if len(message.questions) > MAX_NAMESPACES_PER_MESSAGE:
            raise ProtocolError(f"{len(message.questions)} questions in one message: the limit is {MAX_NAMESPACES_PER_MESSAGE}")
        keys = _count([(question.namespace, question.hashes) for question in message.questions])
        if keys > MAX_KEYS_PER_MESSAGE:
            raise ProtocolError(f"{keys} pages asked for in one message: the limit is {MAX_KEYS_PER_MESSAGE}")
        self.stats.lookups += 1
        self.stats.lookup_keys += keys
        rotation = self._rotation()
        asker = self._tracks.get(message.asker)
        answers = [self._answer(question, rotation, asker) for question in message.questions]
        return LookupReply(message.id, answers, self.warming)

    def _answer(self, question: Question, rotation: _InRotation, asker: _Track | None) -> Answer:
        found = self.directory.find(
            question.namespace,
            question.hashes,
            prefix=question.prefix,
            ranks=rotation.ranks,
            exclude=() if asker is None else tuple(asker.slots.values()),
            near=() if asker is None else rotation.near(asker.host_id),
            load=rotation.load,
        )
        holders = [self._by_slot[slot] for slot in found.slots]
        peers = [self._tracks[holder.name].peer for holder in holders]
        tiers = bytes(holder.tier for holder in holders)
        self.stats.lookup_hits += len(found.column) - found.column.count(0)
        return Answer(found.column, peers, found.others, tiers if any(tiers) else b"")

    def _rotation(self) -> _InRotation:
        version = self.membership.version
        if version != self._answered_version:
            self._answered = _InRotation()
            for member in self.membership:
                if member.state in (ACTIVE, DRAINING):
                    self._answered.add(member, self._tracks[member.name].slots)
            self._answered_version = version
        return self._answered

    def _clear(self, message: ClearNamespace, sender: bytes) -> Output:
        _count([(message.namespace, b"")])
        self.stats.clears += 1
        self.directory.drop_namespace(message.namespace)
        self._recent_clears.pop(message.namespace, None)
        self._recent_clears[message.namespace] = (message.origin, self._now + REMEMBER_CLEARS_S)
        while len(self._recent_clears) > MAX_RECENT_CLEARS:
            del self._recent_clears[next(iter(self._recent_clears))]
        return [
            (track.sender, message)
            for track in self._tracks.values()
            if track.name != message.origin and track.sender != sender
        ]

    def _report(self, brief: bool, now: float) -> ClusterReport:
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
        )

    def _info(self, member: Member, now: float) -> NodeInfo:
        """`age_s` is the time since the node was last heard of."""
        slots = self._tracks[member.name].slots.values() if member.state != GONE else ()
        return NodeInfo(
            node=member.name,
            host=member.host,
            port=member.port,
            state=member.state,
            used_bytes=member.used_bytes,
            capacity_bytes=member.capacity_bytes,
            objects=member.objects,
            keys=sum(map(self.directory.keys_of, slots)),
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


def _count(columns: Iterable[tuple[bytes, bytes]]) -> int:
    keys = 0
    for namespace, hashes in columns:
        if len(namespace) != NAMESPACE_BYTES:
            raise ProtocolError(f"a namespace of {len(namespace)} bytes: must be {NAMESPACE_BYTES}")
        keys += count_hashes(hashes)
    return keys


def _check_tier(tier: int) -> None:
    if tier not in TIERS:
        raise ProtocolError(f"tier {tier}: there are {TIERS}")
