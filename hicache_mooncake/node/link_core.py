"""A node's link to all of its metadata masters as one state machine: no sockets, clocks or threads.

A shell, or a simulator, owns the connections and drives it like this, on one thread:

    core = LinkCore(("10.0.0.1:50051",), facts, source, random.Random(), log, on_clear)
    while True:
        for action in core.step(now):                 # also whenever something happened, and by core.next_due(now)
            if isinstance(action, Connect): ...       # open a connection; when that cannot be done: core.lost(master, now, why)
            if isinstance(action, Close): ...         # end it; nothing of it may reach `received` any more
        for master in connections_that_can_take_a_message:
            while (message := core.take(master, now)) is not None:
                send(master, message)
        for master, message in what_came_in:
            core.received(master, message, now)
        for master in connections_that_broke:         # only if the shell can tell; silence is noticed without it
            core.lost(master, now, "closed the connection")
    for master, message in core.leave(): send(master, message)

Connections may lose messages at any time, also while they stay open (ZMQ connects anew underneath): every stream is numbered.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hicache_mooncake.node.link_session import (
    JOINED,
    UNFIT,
    WAITING,
    Busy,
    Close,
    Connect,
    JoinFacts,
    Session,
    Usage,
)
from hicache_mooncake.node.link_sources import Changes, ChangeSource, ColdSource, Keys, Part, begin, cut, tiers_of
from hicache_mooncake.protocol import (
    COLD,
    DRAM,
    HASH_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Keep,
    Leave,
    Message,
    RankIdentity,
    Report,
    Room,
    Unshared,
    Update,
)

__all__ = [
    "Busy",
    "ChangeSource",
    "Close",
    "ColdSource",
    "Connect",
    "JoinFacts",
    "Keys",
    "LinkCore",
    "LinkView",
    "MasterView",
    "Usage",
]

DRAIN_KEYS = 4_096
"""Changes an update. About 5 ms of a master's time: its other work never waits longer for one."""
DRAINS_PER_PASS = 16
"""Of each tier."""
UNASKED_DRAIN_S = 0.1
RETRY_S = 0.02
GATHER_S = (0.005, 1.0)
"""Bounds for what masters say about how long changes are gathered."""
CROWDED_GATHER_S = 0.25
"""While much waits for a master, such as one that reads all nodes' snapshots."""
REPORT_S = 0.5
MAX_REPORTED = 1024
MAX_WAITING_CLEARS = 1024
MAX_WAITING_KEEPS = 256
SILENT_S = 15.0
USAGE_FRESH_S = 0.2
VOTE_S = 60.0
"""A master that is out of reach has a say in the number of shards for so long."""

Action = Connect | Close


@dataclass(frozen=True, slots=True)
class MasterView:
    """Where one master stands, for whoever chooses whom to ask."""

    master: str
    state: str
    shard: int
    """-1 while it is not known, or when it does not fit to the other masters."""
    refusal: str
    answered_at: float
    ttl_s: float
    warming: bool
    version: int

    def answers(self, now: float) -> bool:
        """Is this node a member there, and was the master heard of lately?"""
        return self.state == JOINED and now - self.answered_at <= self.ttl_s


@dataclass(frozen=True, slots=True)
class LinkView:
    """All masters at one moment, immutable. `shards` is 0 while none has answered."""

    shards: int = 0
    masters: tuple[MasterView, ...] = ()


class LinkCore:
    """Keeps every master's part of the directory up to date. Time and randomness come in as arguments.

    `source` is the node with its DRAM, `cold` its cold tier if it has one: the masters hear of both in one stream of updates.
    `facts` is called for every Join and Beat, `engines` for every Beat: the ranks of this host, and a number that grows when
    they change. `on_clear` is called from `step` with a namespace that another node cleared, and `on_keep` with pages here that
    a reader of another node was told of; both may raise Busy. Not thread-safe, but `notify` may be called from any thread."""

    def __init__(
        self,
        masters: Sequence[str],
        facts: Callable[[], JoinFacts],
        source: ChangeSource,
        rng: random.Random,
        log: logging.Logger,
        on_clear: Callable[[bytes], None] = lambda namespace: None,
        *,
        on_keep: Callable[[Keep], None] = lambda keep: None,
        cold: ColdSource | None = None,
        engines: Callable[[], tuple[int, Sequence[RankIdentity]]] = lambda: (0, ()),
        versions: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX),
        silent_s: float = SILENT_S,
    ) -> None:
        self.facts = facts
        self.engines = engines
        self.source = source
        self.rng = rng
        self.log = log
        self.versions = versions
        self.silent_s = silent_s
        self.shards = 0
        """How many parts the directory has; 0 until a master has said so."""
        self.turn = 0
        """Another number whenever a master came, went, or became another one. May be read by any thread."""
        self.counters: dict[str, int] = dict.fromkeys(
            (
                "connects",
                "joins",
                "snapshots",
                "updates",
                "outbox_overflows",
                "garbage",
                "clears_lost",
                "clears_missed",
                "keeps_lost",
                "reports",
                "failures",
            ),
            0,
        )
        self.room_table: tuple[float, list[Room]] = (float("-inf"), [])
        """Nodes with room, as a master said last, and until when that counts."""
        self.unshared: list[Unshared] = []
        """Engines of this host that cannot share, as a master said last. May be read by any thread."""
        self._tiers: dict[int, Changes] = tiers_of(source, cold)
        self._on_clear = on_clear
        self._on_keep = on_keep
        self._sessions: dict[str, Session] = {}
        self._actions: list[Action] = []
        self._seqs: list[int] = []
        """Number of the last update of each shard's stream."""
        self._first_seq = 1  # not 0, so that a master asks for what the node held before it first joined
        self._notified = False
        self._more = False
        self._drained_at = float("-inf")
        self._retry_at = float("-inf")
        self._usage = Usage()
        self._usage_at = float("-inf")
        self._clears_heard: dict[bytes, None] = {}
        self._keeps: deque[Keep] = deque()
        self._failed: Counter[str] = Counter()
        self._report_at = 0.0
        self.set_masters(masters)

    # ------------------------------------------------------------------ what the shell calls

    @property
    def masters(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def set_masters(self, masters: Sequence[str]) -> None:
        """From now on these are the masters. One that is not among them any more is used for as long as it answers."""
        for master in masters:
            if master not in self._sessions:
                self._sessions[master] = Session(self, master)
        for master, session in self._sessions.items():
            session.listed = master in masters

    @property
    def notified(self) -> bool:
        """Is it known already that the source has changes?"""
        return self._notified

    def notify(self) -> None:
        """The source has changes."""
        self._notified = True

    def step(self, now: float) -> list[Action]:
        """Do what is due. Returns the connections to open and to close, in order."""
        self._hear_clears(now)
        self._hear_keeps(now)
        if self._drain_due(now) <= now:
            self._drain(now)
        self._report(now)
        for session in list(self._sessions.values()):
            session.step(now)
            if not session.listed and session.state == WAITING:
                del self._sessions[session.master]
                self._vote(now)
        if any(session.state == UNFIT for session in self._sessions.values()):
            self._vote(now)  # those that outvoted it may be gone for good
        actions, self._actions = self._actions, []
        return actions

    def next_due(self, now: float) -> float:
        """When `step` has something to do even if nothing else happens. Not before `now`."""
        due = self._drain_due(now)
        if self._failed:
            due = min(due, self._report_at)
        if self._clears_heard or self._keeps:
            due = min(due, self._retry_at)
        for session in self._sessions.values():
            due = min(due, session.next_due(now))
        return max(now, due)

    def wants_to_send(self, master: str, now: float) -> bool:
        """Would `take` give a message? May say yes when it gives none."""
        session = self._sessions.get(master)
        return session is not None and session.wants_to_send(now)

    def take(self, master: str, now: float) -> Message | None:
        """The next message for this master, which the connection can take now; None when there is none. A snapshot is cut as it
        is taken, so stop after some when there is other work."""
        session = self._sessions.get(master)
        return None if session is None else session.take(now)

    def received(self, master: str, message: Message, now: float) -> None:
        """This master sent a message."""
        session = self._sessions.get(master)
        if session is not None:
            session.received(message, now)

    def lost(self, master: str, now: float, why: str) -> None:
        """The connection could not be made, or broke: a Close follows, and another Connect later."""
        session = self._sessions.get(master)
        if session is not None:
            session.lost(why, now)

    def clear_namespace(self, namespace: bytes) -> None:
        """Have every other node drop this namespace: by each master, or as soon as it is back."""
        for session in self._sessions.values():
            session.clear(namespace)

    def report(self, failed: dict[str, int], now: float) -> None:
        """Reads from these nodes failed so often. Told to every master a little later, all together."""
        if not self._failed:
            self._report_at = now + REPORT_S
        for node, times in failed.items():
            if node in self._failed or len(self._failed) < MAX_REPORTED:
                self._failed[node] += times

    def beat_now(self, now: float) -> None:
        """Something that the masters should know at once has changed, such as `draining`."""
        self._usage_at = float("-inf")
        for session in self._sessions.values():
            session.beat_now(now)

    def leave(self) -> list[tuple[str, Message]]:
        """The last message for each master that this node is a member of."""
        facts = self.facts()
        leave = Leave(facts.node, facts.incarnation)
        return [(session.master, leave) for session in self._sessions.values() if session.listens]

    def view(self) -> LinkView:
        return LinkView(
            self.shards,
            tuple(
                MasterView(
                    session.master,
                    session.state,
                    session.shard if session.fits else -1,
                    session.refusal,
                    session.answered_at,
                    session.ttl_s,
                    session.warming,
                    session.version,
                )
                for session in self._sessions.values()
            ),
        )

    def validate(self) -> None:
        """For tests, after every event."""
        assert len(self._seqs) == self.shards
        assert len(self._clears_heard) <= MAX_WAITING_CLEARS
        assert len(self._failed) <= MAX_REPORTED
        assert len(self._keeps) <= MAX_WAITING_KEEPS
        for master, session in self._sessions.items():
            assert session.master == master
            session.validate()

    # ------------------------------------------------------------------ what sessions call

    @property
    def has_cold(self) -> bool:
        return COLD in self._tiers

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def count(self, name: str) -> None:
        self.counters[name] += 1

    def seq(self, shard: int) -> int:
        return self._seqs[shard]

    def usage(self, now: float) -> Usage:
        """At most a moment old, but for a source that is busy or fails: the beat does not wait for it."""
        if now - self._usage_at >= USAGE_FRESH_S:
            try:
                self._usage = self.source.usage()
                self._usage_at = now
            except Busy:
                pass
            except Exception:
                self.failed("reading the node's figures")
        return self._usage

    def asks_for_room(self, session: Session, now: float) -> bool:
        """One master is enough: the first that is well."""
        able = [s for s in self._sessions.values() if s.state == JOINED and s.version >= 2]
        return bool(able) and min(able, key=lambda s: (not s.answers(now), s.warming)) is session

    def has_other(self, session: Session, now: float) -> bool:
        """Does another master of the same shard answer?"""
        return any(
            other is not session and other.fits and other.shard == session.shard and other.answers(now)
            for other in self._sessions.values()
        )

    def take_room(self, room: list[Room], fresh_until: float) -> None:
        self.room_table = fresh_until, room

    def take_unshared(self, unshared: list[Unshared]) -> None:
        self.unshared = unshared

    def hear_clear(self, namespace: bytes) -> None:
        """A master passed a clear on. Done in the next step."""
        if len(self._clears_heard) >= MAX_WAITING_CLEARS:
            self.count("clears_lost")
            return
        self._clears_heard[namespace] = None

    def hear_keep(self, keep: Keep) -> None:
        """A master told somebody of pages here. Done in the next step."""
        if len(self._keeps) >= MAX_WAITING_KEEPS:
            self.count("keeps_lost")
            return
        self._keeps.append(keep)

    def claimed(self, now: float) -> None:
        """A session's master said which shard of how many it has."""
        self._vote(now)

    def snapshot(self, shard: int, tiers: Container[int]) -> Iterator[Part]:
        """All that the node holds of a shard in these tiers, in parts. Raises Busy."""
        if any(source.changes_lost() for source in self._tiers.values()):
            self._lost_changes()  # this one makes the sources forget it, and the other masters miss them as well
        begun = [(tier, begin(source)) for tier, source in self._tiers.items()]
        # Numbered after it was begun: nothing was drained in between, so what is drained from now on has higher numbers. It has
        # a number of its own so that parts of one that broke off never pass for parts of the next.
        self._number(shard, [], [], DRAM)
        self.count("snapshots")
        return cut([(tier, parts) for tier, parts in begun if tier in tiers], lambda keys: self._of_shard(keys, shard))

    def failed(self, what: str) -> None:
        """A bug in the source must not end the link: without it every page here is a miss elsewhere."""
        self.counters["failures"] += 1
        if self.counters["failures"] <= 10:
            self.log.exception("%s failed in the link to the masters; trying on. Please report this", what)

    # ------------------------------------------------------------------ shards

    def _vote(self, now: float) -> None:
        heard = [s for s in self._sessions.values() if s.shards and now - s.answered_at < VOTE_S]
        if not heard:
            return
        votes = Counter(session.shards for session in heard)
        there = Counter(shards for shards, _ in {(session.shards, session.shard) for session in heard})
        # A directory that is all there before one that is not: one master with a wrong --shard must not take it away.
        best = max(votes, key=lambda shards: (there[shards] == shards, votes[shards], shards))
        if best == self.shards:
            return
        if self.shards:
            self.log.warning("the directory has %d shards now, %d before: every master gets a snapshot", best, self.shards)
        # Numbers go on from the highest, so that a master that knows this node from before sees the gap.
        self._first_seq = max([self._first_seq, *(seq + 1 for seq in self._seqs)])
        self._seqs = [self._first_seq] * best
        self.shards = best
        for session in self._sessions.values():
            session.shards_changed(now)

    def _of_shard(self, keys: Keys, shard: int) -> Keys:
        return keys if self.shards == 1 else self._split(keys)[shard]

    def _split(self, keys: Keys) -> list[Keys]:
        parts: list[Keys] = [[] for _ in range(self.shards)]
        for namespace, hashes in keys:
            for shard, blob in enumerate(split_hashes(hashes, self.shards)):
                if blob:
                    parts[shard].append((namespace, blob))
        return parts

    # ------------------------------------------------------------------ streams

    def _drain_due(self, now: float) -> float:
        if self._more:
            return max(now, self._retry_at)
        wait = self._gather_s() if self._notified else UNASKED_DRAIN_S
        return max(self._drained_at + wait, self._retry_at)

    def _gather_s(self) -> float:
        joined = [s for s in self._sessions.values() if s.state == JOINED]
        asked = max((CROWDED_GATHER_S if s.crowded else s.gather_s for s in joined), default=0.0)
        return min(max(asked, GATHER_S[0]), GATHER_S[1])

    def _drain(self, now: float) -> None:
        """Number the changes and give them to every session; those of masters that do not listen are gaps there."""
        self._notified = False  # before the changes are read: what comes after rings again
        self._more = False
        self._drained_at = now
        # The coldest first: a page is in the colder tier before it leaves the other, and the masters never miss it so.
        for tier, source in reversed(self._tiers.items()):
            try:
                self._drain_tier(tier, source)
            except Busy:
                self._more = True
                self._retry_at = now + RETRY_S
            except Exception:
                self._gap()  # whatever was taken and is lost: every master sees the gap and asks for a snapshot
                self._more = True
                self._retry_at = now + 0.1
                self.failed("reading the changes")

    def _drain_tier(self, tier: int, source: Changes) -> None:
        if source.changes_lost():
            self._lost_changes()
        for _ in range(DRAINS_PER_PASS):
            added, removed = source.drain_changes(DRAIN_KEYS)
            if not added and not removed:
                return
            self._publish(added, removed, tier)
        self._more = True

    def _lost_changes(self) -> None:
        self._gap()
        for session in self._sessions.values():
            session.want_snapshot()

    def _gap(self) -> None:
        self._seqs = [seq + 1 for seq in self._seqs]

    def _publish(self, added: Keys, removed: Keys, tier: int) -> None:
        if self.shards == 1:
            self._number(0, added, removed, tier)
        elif self.shards:
            for shard, (more, less) in enumerate(zip(self._split(added), self._split(removed), strict=True)):
                if more or less:
                    self._number(shard, more, less, tier)

    def _number(self, shard: int, added: Keys, removed: Keys, tier: int) -> None:
        """Send the next update of a shard to every master of it that listens: an empty one to those that do not know this
        tier, since all have the same numbers."""
        self._seqs[shard] += 1
        self.count("updates")
        facts = self.facts()
        update = Update(facts.node, facts.incarnation, self._seqs[shard], added, removed, tier)
        empty = Update(facts.node, facts.incarnation, self._seqs[shard], [], [])
        for session in self._sessions.values():
            if session.shard == shard:
                session.push(update if tier in session.tiers else empty)

    # ------------------------------------------------------------------ clears and reports

    def _hear_clears(self, now: float) -> None:
        if now < self._retry_at:
            return
        for namespace in list(self._clears_heard):
            try:
                self._on_clear(namespace)
            except Busy:
                self._retry_at = now + RETRY_S
                return
            except Exception:
                self.failed(f"clearing namespace {namespace.hex()}, as another node asked,")
            del self._clears_heard[namespace]

    def _hear_keeps(self, now: float) -> None:
        while self._keeps and now >= self._retry_at:
            try:
                self._on_keep(self._keeps[0])
            except Busy:
                self._retry_at = now + RETRY_S
                return
            except Exception:
                self.failed("keeping pages that another node was told of")
            self._keeps.popleft()

    def _report(self, now: float) -> None:
        if not self._failed or now < self._report_at:
            return
        facts = self.facts()
        report = Report(facts.node, facts.incarnation, dict(self._failed))
        self._failed.clear()
        for session in self._sessions.values():
            if session.state == JOINED and session.version >= 2:
                session.push(report)
                self.count("reports")


def split_hashes(hashes: bytes, shards: int) -> list[bytes]:
    """The hashes of each shard, in order: `shard_of` for a whole blob."""
    if shards == 1:
        return [hashes]
    rows, column = _rows_and_shards(hashes, shards)
    return [rows[column == shard].tobytes() for shard in range(shards)]


def positions_by_shard(hashes: bytes, shards: int) -> list[np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """For each shard the positions of its hashes, ascending."""
    _, column = _rows_and_shards(hashes, shards)
    return [np.flatnonzero(column == shard) for shard in range(shards)]


def _rows_and_shards(
    hashes: bytes, shards: int
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    rows = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
    return rows, np.ascontiguousarray(rows[:, 20:24]).view("<u4")[:, 0] % np.uint32(shards)
