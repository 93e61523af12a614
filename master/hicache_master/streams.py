"""Where the master stands in each node's numbered stream of updates, and what of it is in the directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hicache_mooncake.protocol import (
    COLD,
    DRAM,
    NAMESPACE_BYTES,
    ProtocolError,
    Snapshot,
    Update,
    count_hashes,
)

from .directory import Directory
from .shard import Shard
from .stats import Stats

if TYPE_CHECKING:
    from .events_out import EventsOut

TIERS = (DRAM, COLD)
MAX_LATER_KEYS = 524_288
"""Keys in updates that overtook the snapshot they follow. Past this the snapshot is asked for again."""
MAX_LATER_UPDATES = 65_536
MAX_SNAPSHOTS = 16
"""Nodes that are asked for a snapshot at once. When a master has restarted all have one to send: the first are whole in
seconds, and a lookup waits for a part of each of these at most."""
ASKED_S = 5.0
"""Who was asked, and has sent nothing for so long, makes room for another one."""
FULL_SHARE = 0.9
"""A directory that was full and has shrunk to this part of its cap takes again what it did not take then."""

Columns = list[tuple[bytes, bytes]]
"""Pairs of (namespace, blob of 32-byte hashes)."""


class Holder(NamedTuple):
    """What a slot of the directory stands for."""

    name: str
    tier: int


@dataclass(slots=True)
class Incoming:
    """A snapshot that has not all come. It fills slots of its own, so that what was known is answered until then."""

    seq: int
    last_part_at: float
    slots: dict[int, int] = field(default_factory=dict)
    dram_is_live: bool = False
    """Pages in DRAM have all come, and are answered already: those of a cold tier can take a minute."""
    next_part: int = 0
    later: dict[int, Update] = field(default_factory=dict)
    later_keys: int = 0


@dataclass(slots=True)
class Stream:
    """One node's."""

    name: str
    incarnation: bytes
    seq: int
    want_snapshot: bool
    slots: dict[int, int] = field(default_factory=dict)
    """Tier -> slot of the directory."""
    incoming: Incoming | None = None
    whole: bool = False
    """Is everything known that the node held before it joined?"""
    refused: bool = False
    """The directory was full when this node had pages to add."""
    again: bool = False
    """Once the snapshot that is coming is whole another one is wanted: of this one not all was told."""

    @property
    def asks_for_snapshot(self) -> bool:
        """Is one missing, and none on its way?"""
        return self.want_snapshot and self.incoming is None


class Streams:
    """The streams of all nodes that are members, by name. Not thread-safe.

    A stream that misses a number, or restarts, wants a snapshot; until that is whole, what is known stays. Updates that come
    while it is on its way are applied at once and, if they follow it, again to it. Keys of other shards are counted and left
    out. `version` moves when slots come or go. `events` hears of all that comes and goes."""

    def __init__(self, directory: Directory, shard: Shard, stats: Stats, events: EventsOut | None = None) -> None:
        self.version = 0
        self._events = events
        self._directory = directory
        self._shard = shard
        self._stats = stats
        self._streams: dict[str, Stream] = {}
        self._holders: dict[int, Holder] = {}
        self._asked: dict[str, float] = {}
        """Nodes that were asked for a snapshot, and when."""

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def get(self, name: str) -> Stream | None:
        return self._streams.get(name)

    def holder(self, slot: int) -> Holder:
        """Raises KeyError for a slot that is nobody's, or of a snapshot that is not whole."""
        return self._holders[slot]

    def holders(self, namespace: bytes, page_hash: bytes) -> set[Holder]:
        """All that hold this page, whatever their state. For tests: costs the number of slots."""
        held = set()
        for slot, holder in self._holders.items():
            ranks = bytes(slot) + b"\1"
            if any(self._directory.find(namespace, page_hash, prefix=False, ranks=ranks).column):
                held.add(holder)
        return held

    def keys_of(self, name: str) -> int:
        """Pages that a node is known to hold, each tier's."""
        stream = self._streams.get(name)
        return sum(map(self._directory.keys_of, stream.slots.values())) if stream is not None else 0

    @property
    def have_room(self) -> bool:
        """Does the directory take what it did not take when it was full?"""
        directory = self._directory
        in_bytes = directory.max_bytes is None or directory.resident_bytes < FULL_SHARE * directory.max_bytes
        return in_bytes and len(directory) < FULL_SHARE * directory.max_keys

    # ------------------------------------------------------------------ its life

    def open(self, name: str, incarnation: bytes, seq: int) -> Stream:
        """A node joined, and has sent updates up to `seq`. The stream it had goes on if it is the same life of it."""
        stream = self._streams.get(name)
        if stream is None or stream.incarnation != incarnation:
            self.close(name)
            stream = self._streams[name] = Stream(name, incarnation, seq, want_snapshot=seq != 0, whole=seq == 0)
            return stream
        if stream.incoming is not None:
            self.break_off(stream)
        if stream.seq != seq:
            stream.seq = seq
            stream.want_snapshot = True
        return stream

    def close(self, name: str) -> None:
        """Forget a node and what it holds; the directory does so in steps. Nothing happens if there is none of this name."""
        stream = self._streams.pop(name, None)
        if stream is not None:
            if stream.incoming is not None:
                self._drop(stream.incoming.slots)
            self._drop(stream.slots)
            if self._events is not None:
                self._events.cleared(name)

    def resync(self, stream: Stream) -> None:
        """Have this node send all that it holds once more, for those who listen. What is known stays meanwhile."""
        if stream.incoming is not None:
            stream.again = True
        else:
            stream.want_snapshot = True

    def resync_holders(self, namespace: bytes) -> None:
        """The same of all nodes that hold pages of this namespace."""
        for stream in self._streams.values():
            if self._has(stream, namespace):
                self.resync(stream)

    def ask(self, stream: Stream, now: float) -> bool:
        """Is this node to be asked for its snapshot now? One that has to wait is asked with a later heartbeat."""
        if not stream.asks_for_snapshot:
            return False
        if stream.name not in self._asked:
            if len(self._asked) >= MAX_SNAPSHOTS:
                self._asked = {name: at for name, at in self._asked.items() if self._is_sending(name, at, now)}
            if len(self._asked) >= MAX_SNAPSHOTS:
                return False
            self._asked[stream.name] = now
        return True

    def behind(self, stream: Stream, seq: int) -> None:
        """The node says in a heartbeat how far it is. What was sent before has come by now, or is lost."""
        if stream.refused and self.have_room:
            stream.refused = False
            stream.want_snapshot = True
        if seq > stream.seq and not stream.want_snapshot:
            self._gap(stream)

    def drop_namespace(self, namespace: bytes, origin: str) -> None:
        """Forget a namespace of every node, since all will clear it, as `origin` has done. What that one is known to hold of it
        in DRAM may be from after its clear: it is asked for a snapshot. In the cold tier it is from before: that forgets in
        steps and tells so for a long time, and a node that repeats a clear sends a snapshot unasked."""
        stream = self._streams.get(origin)
        newer = False
        if stream is not None:
            known = [stream.slots] if stream.incoming is None else [stream.slots, stream.incoming.slots]
            newer = any(DRAM in slots and self._directory.has(slots[DRAM], namespace) for slots in known)
        if self._events is not None:
            self.tell_dropped(self._events, namespace)
        self._directory.drop_namespace(namespace)
        if stream is not None and newer:
            if stream.incoming is not None:
                self.break_off(stream)
            self._gap(stream)

    def tell_dropped(self, events: EventsOut, namespace: bytes) -> None:
        """A namespace is about to be forgotten. Others that are told on its topics are told anew by those who hold them."""
        alike = events.alike(namespace)
        for stream in self._streams.values() if alike else ():
            if self._has(stream, namespace):
                events.cleared(stream.name, namespace)
                if any(self._has(stream, other) for other in alike if other != namespace):
                    self.resync(stream)

    def break_off(self, stream: Stream) -> None:
        """The snapshot that is coming has lost a part."""
        assert stream.incoming is not None
        self._stats.snapshots_broken += 1
        self._drop(stream.incoming.slots)
        stream.incoming = None
        stream.again = False
        stream.want_snapshot = True

    # ------------------------------------------------------------------ what comes

    def update(self, stream: Stream, message: Update) -> None:
        """Take an update that `check_update` found well-formed."""
        self._stats.updates += 1
        if message.seq <= stream.seq:
            return
        incoming = stream.incoming
        if incoming is not None and message.seq > incoming.seq:
            keys = count_keys(message.added) + count_keys(message.removed)
            if len(incoming.later) >= MAX_LATER_UPDATES or incoming.later_keys + keys > MAX_LATER_KEYS:
                self.break_off(stream)
            elif message.seq not in incoming.later:
                incoming.later[message.seq] = message
                incoming.later_keys += keys
        if message.seq == stream.seq + 1:
            stream.seq = message.seq
        elif not stream.want_snapshot:
            self._gap(stream)
        # After a gap too: a wrong hint costs a miss, a missing one as well, and the snapshot puts both right.
        self._apply(stream, message)

    def snapshot(self, stream: Stream, message: Snapshot, now: float) -> bool:
        """Take a part of a snapshot that `check_snapshot` found well-formed; returns whether more is answered with it: all, or
        all that is in DRAM, after which the cold tier begins."""
        if message.part == 0:
            if message.seq < stream.seq and not stream.want_snapshot:
                return False  # older than what is known already
            if stream.incoming is not None:
                if message.seq < stream.incoming.seq:
                    return False
                self.break_off(stream)
            stream.incoming = Incoming(message.seq, now)
            stream.want_snapshot = True
            if self._events is not None:
                self._events.cleared(stream.name)
        incoming = stream.incoming
        if incoming is None or incoming.seq != message.seq or message.part < incoming.next_part:
            return False
        if message.part > incoming.next_part:
            self.break_off(stream)
            return False
        incoming.next_part += 1
        incoming.last_part_at = now
        begins_cold = message.tier != DRAM and DRAM in incoming.slots
        if begins_cold:
            self._make_dram_live(stream, incoming)
        if message.added:
            slots = stream.slots if incoming.dram_is_live and message.tier == DRAM else incoming.slots
            slot = slots.get(message.tier)
            if slot is None:
                slot = slots[message.tier] = self._directory.allocate()
            self._add(stream, slot, message.added)
            if self._events is not None:
                self._events.changed(stream.name, message.tier, message.added, [])
        if message.last:
            self._complete(stream, incoming)
        return message.last or begins_cold

    def validate(self) -> None:
        """For tests: slots are those of the streams, and what waits is bounded."""
        slots: dict[int, Holder] = {}
        for name, stream in self._streams.items():
            assert stream.name == name
            slots |= {slot: Holder(name, tier) for tier, slot in stream.slots.items()}
            if stream.incoming is not None:
                assert stream.want_snapshot
                assert not set(stream.incoming.slots.values()) & set(self._holders)
                assert all(seq > stream.incoming.seq for seq in stream.incoming.later)
                assert stream.incoming.later_keys <= MAX_LATER_KEYS
        assert slots == self._holders
        assert len(self._asked) <= MAX_SNAPSHOTS

    # ------------------------------------------------------------------ inside

    def _make_dram_live(self, stream: Stream, incoming: Incoming) -> None:
        if DRAM in stream.slots:
            self._drop({DRAM: stream.slots.pop(DRAM)})
        self._take_over(stream, {DRAM: incoming.slots.pop(DRAM)})
        incoming.dram_is_live = True
        for seq in sorted(incoming.later):
            if incoming.later[seq].tier == DRAM:
                self._apply(stream, incoming.later[seq])

    def _take_over(self, stream: Stream, slots: dict[int, int]) -> None:
        stream.slots |= slots
        self._holders |= {slot: Holder(stream.name, tier) for tier, slot in slots.items()}
        self.version += 1

    def _complete(self, stream: Stream, incoming: Incoming) -> None:
        self._stats.snapshots += 1
        live = {DRAM: stream.slots.pop(DRAM)} if incoming.dram_is_live else {}
        self._drop(stream.slots)
        self._take_over(stream, live | incoming.slots)
        stream.seq = incoming.seq
        stream.want_snapshot, stream.again = stream.again, False
        stream.whole = True
        stream.incoming = None
        for seq in sorted(incoming.later):
            if seq == stream.seq + 1:
                stream.seq = seq
            elif not stream.want_snapshot:
                self._gap(stream)
            self._apply(stream, incoming.later[seq])

    def _is_sending(self, name: str, asked_at: float, now: float) -> bool:
        stream = self._streams.get(name)
        if stream is None or not stream.want_snapshot:
            return False
        last_at = asked_at if stream.incoming is None else max(asked_at, stream.incoming.last_part_at)
        return now - last_at <= ASKED_S

    def _has(self, stream: Stream, namespace: bytes) -> bool:
        known = [stream.slots] if stream.incoming is None else [stream.slots, stream.incoming.slots]
        return any(self._directory.has(slot, namespace) for slots in known for slot in slots.values())

    def _gap(self, stream: Stream) -> None:
        self._stats.gaps += 1
        stream.want_snapshot = True

    def _apply(self, stream: Stream, message: Update) -> None:
        if self._events is not None:
            self._events.changed(stream.name, message.tier, message.added, message.removed)
        slot = stream.slots.get(message.tier)
        if slot is not None:
            for namespace, hashes in message.removed:
                self._directory.remove(slot, namespace, hashes)
        if message.added:
            if slot is None:
                slot = stream.slots[message.tier] = self._directory.allocate()
                self._holders[slot] = Holder(stream.name, message.tier)
                self.version += 1
            self._add(stream, slot, message.added)

    def _add(self, stream: Stream, slot: int, columns: Columns) -> None:
        before = self._directory.refused_adds
        for namespace, hashes in columns:
            own, foreign = self._shard.own(hashes)
            self._stats.foreign_keys += foreign
            if own:
                self._directory.add(slot, namespace, own)
        if self._directory.refused_adds > before:
            stream.refused = True

    def _drop(self, slots: dict[int, int]) -> None:
        for slot in slots.values():
            self._holders.pop(slot, None)
            self._directory.drop_node(slot)
        slots.clear()
        self.version += 1


def check_update(message: Update) -> None:
    """Raises ProtocolError for one that no honest node sends."""
    count_keys(message.added)
    count_keys(message.removed)
    _check_tier(message.tier)


def check_snapshot(message: Snapshot) -> None:
    """Raises ProtocolError for one that no honest node sends."""
    count_keys(message.added)
    _check_tier(message.tier)
    if message.seq < 0 or message.part < 0:
        raise ProtocolError(f"snapshot part {message.part} of update {message.seq}")


def count_keys(columns: Iterable[tuple[bytes, bytes]]) -> int:
    """Page hashes in all columns. Raises ProtocolError for a namespace or hashes of a wrong length."""
    keys = 0
    for namespace, hashes in columns:
        if len(namespace) != NAMESPACE_BYTES:
            raise ProtocolError(f"a namespace of {len(namespace)} bytes: must be {NAMESPACE_BYTES}")
        keys += count_hashes(hashes)
    return keys


def _check_tier(tier: int) -> None:
    if tier not in TIERS:
        raise ProtocolError(f"tier {tier}: there are {TIERS}")
