"""What the pool holds, told to others as the KV events that SGLang and vLLM publish. No I/O, no clock, and no copy of any key.

Events are made from nodes' messages as they pass, since the directory has no whole hashes. A topic a node and model,
`kv@NODE@MODEL`, with batches numbered from 0; the first one of a topic clears it, so that nobody keeps what an earlier life of
this master said."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from hicache_mooncake.protocol import COLD, DRAM, HASH_BYTES, NAMESPACE_BYTES, PoolIdentity, RankIdentity
from hicache_mooncake.sharing import KV, MAX_RANKS

from .shard import Shard

MAX_BATCH_HASHES = 4096
MAX_TOPICS = 8192
MAX_NAMESPACES = 2 * MAX_RANKS
"""Told of. Beyond it those go of engines that are gone, which were described longest ago first."""
MAX_MODEL_CHARS = 255
KEPT_BYTES = 64 << 20
KEPT_BATCHES = 20_000
KEPT_OVERHEAD = 256
"""Bytes that a batch is reckoned at beside its payload."""
MAX_REPLAYS = 16
"""Subscribers that are answered at a time."""
REPLAY_STALLED_S = 30.0
RESYNC_EVERY_S = 30.0
"""Nodes are asked to send all that they hold, because a subscriber wants it, no more often."""
SNAPSHOT = b"snapshot"
END_SEQ = (-1).to_bytes(8, "big", signed=True)
MEDIUM = {DRAM: "EXTERNAL", COLD: "DISK"}
"""By tier, with SGLang's names: EXTERNAL is a shared pool, DISK what is behind one."""

Columns = Sequence[tuple[bytes, bytes]]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """As SGLang's. The pool knows no tokens and no parents."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    """Tokens in a page; 0: not known."""
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing of this topic counts any more, whatever its medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    attn_dp_rank: int | None = None


class Batch(NamedTuple):
    topic: bytes
    seq: int
    payload: bytes

    def frames(self) -> list[bytes]:
        return [self.topic, self.seq.to_bytes(8, "big"), self.payload]


class _Told(NamedTuple):
    """What a namespace holds pages of."""

    model: str
    page_size: int


class _Change(NamedTuple):
    stored: bool
    medium: str
    page_size: int
    hashes: bytes


@dataclass(slots=True)
class _Topic:
    node: str
    model: str
    name: bytes
    next_seq: int = 0
    kept_from: int = 0
    """The first number that can still be replayed."""
    cleared: bool = True
    """The next batch begins with AllBlocksCleared."""
    waiting: list[_Change] = field(default_factory=list)


@dataclass(slots=True)
class EventStats:
    """Counters, which only grow."""

    events: int = 0
    dropped: int = 0
    """Batches and answers that could not be sent, and requests too many or not understood."""
    replays: int = 0
    snapshots: int = 0
    """Asked for by subscribers, or due to them because what they missed is not kept."""


class EventsOut:
    """Collects changes by topic; `take` makes numbered batches of them, and keeps those if `keep_bytes` is given.

    Only pages of namespaces that engines described are told of: the KV pool of an engine's first rank, so that each page is
    told once, whatever parts it has. Call `take` after every few messages: what waits for it is not bounded here. Not
    thread-safe."""

    def __init__(self, shard: Shard, keep_bytes: int = 0) -> None:
        self.stats = EventStats()
        self._shard = shard
        self._keep_bytes = keep_bytes
        self._namespaces: OrderedDict[bytes, _Told] = OrderedDict()
        self._topics: OrderedDict[tuple[str, str], _Topic] = OrderedDict()
        self._changed: dict[tuple[str, str], _Topic] = {}
        self._kept: dict[int, tuple[_Topic, Batch]] = {}
        """By the order in which they were published."""
        self._kept_bytes = 0
        self._published = 0
        self._replays: dict[bytes, Replay] = {}
        self._wanted: set[str] | None = set()
        """Nodes whose pages subscribers want told anew; None: all."""
        self._resynced_at = float("-inf")

    # ------------------------------------------------------------------ what happens in the pool

    def describe(self, ranks: Iterable[RankIdentity]) -> list[bytes]:
        """Engines have said who they are. Returns namespaces that are told of from now on, whose pages were not before."""
        new = []
        for namespace, pool in _told_pools(ranks).items():
            if namespace not in self._namespaces:
                size = pool.fields.get("page_size", "")
                page_size = int(size) if size.isdecimal() and len(size) < 10 else 0
                self._namespaces[namespace] = _Told(pool.fields.get("model", "")[:MAX_MODEL_CHARS], page_size)
                new.append(namespace)
            self._namespaces.move_to_end(namespace)
        return new

    @property
    def full(self) -> bool:
        """More namespaces are told of than there should be: `surplus` has those to forget."""
        return len(self._namespaces) > MAX_NAMESPACES

    def surplus(self, living: Iterable[RankIdentity]) -> list[bytes]:
        """Namespaces that are too many, and of none of these ranks; each is to be given to `forget` when its pages have been
        cleared."""
        kept = _told_pools(living)
        others = (namespace for namespace in self._namespaces if namespace not in kept)
        return list(itertools.islice(others, max(0, len(self._namespaces) - MAX_NAMESPACES)))

    def forget(self, namespace: bytes) -> None:
        del self._namespaces[namespace]

    def alike(self, namespace: bytes) -> list[bytes]:
        """The namespaces that are told on the same topics as this one, and it among them; none if it is not told of."""
        told = self._namespaces.get(namespace)
        return [] if told is None else [other for other, its in self._namespaces.items() if its.model == told.model]

    def changed(self, node: str, tier: int, added: Columns, removed: Columns) -> None:
        """A node no longer holds these pages in this tier, and now holds those."""
        for stored, columns in ((False, removed), (True, added)):
            for namespace, hashes in columns:
                told = self._namespaces.get(namespace)
                if told is None:
                    continue
                own, _ = self._shard.own(hashes)
                if own:
                    topic = self._topic(node, told.model)
                    topic.waiting.append(_Change(stored, MEDIUM[tier], told.page_size, own))

    def cleared(self, node: str, namespace: bytes | None = None) -> None:
        """What was told of this node is void: all, or what was told on the topic of this namespace, which must be told of."""
        told = None if namespace is None else self._namespaces[namespace]
        for topic in self._topics.values():
            if topic.node == node and (told is None or topic.model == told.model):
                self._void(topic)

    def take(self, ts: float) -> list[Batch]:
        """What is to be published now. `ts` is the wall clock's time."""
        batches = []
        for topic in self._changed.values():
            for events in _cut(topic):
                batch = Batch(topic.name, topic.next_seq, msgspec.msgpack.encode(EventBatch(ts, events)))
                batches.append(batch)
                topic.next_seq += 1
                self.stats.events += len(events)
                if self._keep_bytes:
                    self._keep(topic, batch)
            topic.waiting.clear()
            topic.cleared = False
        self._changed.clear()
        return batches

    # ------------------------------------------------------------------ subscribers that missed something

    def ask(self, client: bytes, request: Sequence[bytes], now: float) -> None:
        """A request of a subscriber, without the empty frame: a number (8 bytes, big endian) from which on it wants what was
        published, or `snapshot`; and the one topic it wants it of, or nothing for all. `replays` has the answers."""
        known = 1 <= len(request) <= 2 and (request[0] == SNAPSHOT or len(request[0]) == 8)
        if not known or (len(self._replays) >= MAX_REPLAYS and client not in self._replays):
            self.stats.dropped += 1
            return
        name = request[1] if len(request) == 2 else None
        topics = [topic for topic in self._topics.values() if name is None or topic.name == name]
        if request[0] == SNAPSHOT:
            self._want(None if name is None else {topic.node for topic in topics})
            start, place = 0, self._published
        else:
            self.stats.replays += 1
            start, place = int.from_bytes(request[0], "big"), self._published - len(self._kept)
            if lacking := {topic.node for topic in topics if start < topic.kept_from}:
                self._want(lacking)
        self._replays[client] = Replay(client, name, start, place, self._published, now)

    @property
    def replays(self) -> list[Replay]:
        return list(self._replays.values())

    def next_answer(self, replay: Replay) -> list[bytes]:
        """The frames that this subscriber is to get next, behind its empty one: a batch, or the end of the answer. The same
        again until `answered`."""
        for place in range(max(replay.place, self._published - len(self._kept)), replay.end):
            _, batch = self._kept[place]
            if batch.seq >= replay.start and replay.topic in (None, batch.topic):
                replay.place = place
                return batch.frames()
        replay.place = replay.end
        return [b"", END_SEQ, b""]

    def answered(self, replay: Replay, now: float) -> bool:
        """The last `next_answer` is on its way. Returns whether there is more."""
        replay.moved_at = now
        more = replay.place < replay.end
        if not more:
            del self._replays[replay.client]
        replay.place += 1
        return more

    def stalled(self, replay: Replay, now: float, *, gone: bool = False) -> None:
        """The subscriber does not take its answer, or is gone; it is given up after a while."""
        if gone or now - replay.moved_at > REPLAY_STALLED_S:
            self.stats.dropped += 1
            del self._replays[replay.client]

    def due(self, nodes: Iterable[str], now: float) -> list[str]:
        """Which of these nodes are to send all that they hold now, for subscribers that asked."""
        if (self._wanted is not None and not self._wanted) or now - self._resynced_at < RESYNC_EVERY_S:
            return []
        wanted, self._wanted, self._resynced_at = self._wanted, set(), now
        return [node for node in nodes if wanted is None or node in wanted]

    def validate(self) -> None:
        """For tests: bounds hold, and sums are right."""
        assert len(self._topics) <= MAX_TOPICS
        assert len(self._replays) <= MAX_REPLAYS
        assert self._kept_bytes == sum(_cost(batch) for _, batch in self._kept.values()) <= self._keep_bytes
        assert len(self._kept) <= KEPT_BATCHES
        assert list(self._kept) == list(range(self._published - len(self._kept), self._published))

    # ------------------------------------------------------------------ inside

    def _topic(self, node: str, model: str) -> _Topic:
        key = node, model
        topic = self._topics.get(key)
        if topic is None:
            if len(self._topics) >= MAX_TOPICS:
                _, oldest = self._topics.popitem(last=False)
                self._void(oldest)
            topic = self._topics[key] = _Topic(node, model, f"kv@{node}@{model}".encode())
        self._topics.move_to_end(key)
        self._changed[key] = topic
        return topic

    def _void(self, topic: _Topic) -> None:
        topic.waiting.clear()
        topic.cleared = True
        self._changed[topic.node, topic.model] = topic

    def _keep(self, topic: _Topic, batch: Batch) -> None:
        self._kept[self._published] = topic, batch
        self._published += 1
        self._kept_bytes += _cost(batch)
        while self._kept_bytes > self._keep_bytes or len(self._kept) > KEPT_BATCHES:
            its, oldest = self._kept.pop(self._published - len(self._kept))
            its.kept_from = oldest.seq + 1
            self._kept_bytes -= _cost(oldest)

    def _want(self, nodes: set[str] | None) -> None:
        self.stats.snapshots += 1
        self._wanted = None if nodes is None or self._wanted is None else self._wanted | nodes


@dataclass(slots=True)
class Replay:
    """How far one subscriber has been answered."""

    client: bytes
    topic: bytes | None
    start: int
    place: int
    end: int
    moved_at: float


def _told_pools(ranks: Iterable[RankIdentity]) -> dict[bytes, PoolIdentity]:
    """The pools whose pages are told of, by their namespace."""
    found = {}
    for rank in ranks:
        if not any(rank.rank) and rank.pools:
            pool = min(rank.pools, key=lambda pool: (pool.pool != KV, pool.pool))
            if pool.namespaces and len(pool.namespaces[0]) == NAMESPACE_BYTES:
                found[pool.namespaces[0]] = pool
    return found


def _cut(topic: _Topic) -> Iterator[list[Event]]:
    """All that waits, in batches of at most MAX_BATCH_HASHES."""
    events: list[Event] = [AllBlocksCleared()] if topic.cleared else []
    room = MAX_BATCH_HASHES
    for change in topic.waiting:
        keys = np.frombuffer(change.hashes, ">i8").reshape(-1, HASH_BYTES // 8)[:, 0]
        while len(keys):
            part: list[int] = keys[:room].tolist()
            keys = keys[room:]
            if change.stored:
                events.append(BlockStored(part, None, [], change.page_size, None, change.medium))
            else:
                events.append(BlockRemoved(part, change.medium))
            room -= len(part)
            if not room:
                yield events
                events, room = [], MAX_BATCH_HASHES
    if events:
        yield events


def _cost(batch: Batch) -> int:
    return len(batch.topic) + len(batch.payload) + KEPT_OVERHEAD
