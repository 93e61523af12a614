"""Where a node stands with one metadata master: asked what it is, joined, beating, sending it its snapshot. Without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_mooncake.protocol import (
    COLD,
    DRAM,
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
    Message,
    Refused,
    Snapshot,
)

if TYPE_CHECKING:
    from hicache_mooncake.node.link_core import LinkCore
    from hicache_mooncake.node.link_sources import Part

MAX_OUTBOX_MESSAGES = 4_096
"""Messages that wait for a master that reads slowly. Beyond it they are dropped, and the master asks for a snapshot."""
MAX_WAITING_CLEARS = 1024
MAX_SHARDS = 4096
CONNECT_S = 1.0
ANSWER_S = 3.0
BACKOFF_S = (0.1, 2.0)
REFUSED_RETRY_S = 10.0
ASK_AGAIN_S = 5.0
ROOM_FRESH_S = 5.0
SNAPSHOT_READ_S = 180.0
"""So long a master may be silent while it has our snapshot to read: with 50 M keys of all nodes it takes more than a minute,
and who loses patience sends everything anew, and makes it take longer for all."""
SNAPSHOT_RETRY_S = 0.05
"""Of the source's snapshot, when it is busy."""

WAITING, CONNECTING, ASKING, JOINING, JOINED, UNFIT = "waiting", "connecting", "asking", "joining", "joined", "unfit"
"""`unfit`: it has another number of shards than the other masters, and is only asked now and then whether that has changed."""


class Busy(Exception):
    """Not now: a lock is held. Ask again soon."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to this master, its name resolved anew."""

    master: str


@dataclass(frozen=True, slots=True)
class Close:
    """End the connection to this master."""

    master: str


@dataclass(frozen=True, slots=True)
class JoinFacts:
    """What a node says of itself. `host` and `port` are where other nodes reach it."""

    node: str
    incarnation: bytes
    host: str
    port: int
    capacity_bytes: int
    host_id: str = ""
    draining: bool = False
    socket: str = ""
    """For nodes of its own host, or empty."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a node reports with every heartbeat. `sent_bytes`: to other nodes, since it started; masters get the difference."""

    used_bytes: int = 0
    capacity_bytes: int = 0
    objects: int = 0
    hits: int = 0
    lookups: int = 0
    sent_bytes: int = 0
    room_bytes: int = -1
    """What it would take from others: free bytes below its low watermark. -1: it does not say."""
    want_room: bool = False
    """Does it need to know who could take pages?"""


class Session:
    """One master, as `LinkCore` sees it. The core calls it; `state`, `refusal` and what the view shows are for reading."""

    def __init__(self, core: LinkCore, master: str) -> None:
        self.core = core
        self.master = master
        self.listed = True
        """Is it still configured, or found by discovery?"""
        self.state = WAITING
        self.refusal = ""
        self.shard = self.shards = 0
        """What the master said of itself; `shards` is 0 until it did."""
        self.version = 1
        self.warming = False
        self.answered_at = float("-inf")
        self.ttl_s = 5.0
        self.gather_s = 0.0
        self._incarnation = b""
        self._heartbeat_s = 1.0
        self._backoff_s = BACKOFF_S[0]
        self._retry_at = float("-inf")
        self._join_at = float("-inf")
        self._since = 0.0
        self._beat_at = 0.0
        self._outbox: deque[Message] = deque()
        self._parts: Iterator[Part] | None = None
        self._snapshot_wanted = False
        self._snapshot_at = float("-inf")
        self._snapshot_seq = 0
        self._part = 0
        self._beats_sent = 0
        self._beats_answered = 0
        self._beats_before_snapshot = 0
        self._beat_behind_snapshot = 0
        """Its answer says that the last snapshot has been read; 0 when there was none."""
        self._sent_bytes = 0
        self._complained = False
        self._clears: dict[bytes, int] = {}
        """Clears that this master may not have heard of yet: namespace -> beats sent when it was told, 0 before that."""
        self._repeats_clears = False
        """Was one of them told before this node joined anew?"""
        self._clears_heard = 0
        """Of those that the master has passed on since we joined: all up to this number."""
        self._engines_told = 0
        """Number of the last Engines that the master was sent, as far as it has not lost it."""

    @property
    def listens(self) -> bool:
        """Does this master take updates now?"""
        return self.state in (JOINING, JOINED)

    @property
    def tiers(self) -> tuple[int, ...]:
        """Those that this master knows of."""
        return (DRAM, COLD) if self.version >= 2 else (DRAM,)

    @property
    def connected(self) -> bool:
        return self.state in (ASKING, JOINING, JOINED, UNFIT)

    @property
    def fits(self) -> bool:
        """Is its number of shards that of the others?"""
        return 0 < self.shards == self.core.shards

    def answers(self, now: float) -> bool:
        """Is this node a member there, and was the master heard of lately?"""
        return self.state == JOINED and now - self.answered_at <= self.ttl_s

    def wants_to_send(self, now: float) -> bool:
        if self._outbox or self.state == CONNECTING:
            return bool(self._outbox) or now >= self._join_at
        return self._snapshot_ready(now)

    def validate(self) -> None:
        assert len(self._outbox) <= MAX_OUTBOX_MESSAGES
        assert len(self._clears) <= MAX_WAITING_CLEARS
        assert not self._outbox or self.listens or self.state == UNFIT
        assert self._parts is None or self.state == JOINED
        assert not self.listens or self.fits

    # ------------------------------------------------------------------ time

    def step(self, now: float) -> None:
        match self.state:
            case "waiting":
                if now >= self._retry_at and self.listed:
                    self.state = CONNECTING
                    self._since = self._join_at = now
                    self.core.act(Connect(self.master))
                    self.core.count("connects")
            case "connecting":
                if now - max(self._since, self._join_at) > CONNECT_S:
                    self.lost("does not answer (is it running, and is the address right?)", now)
            case "asking" | "joining":
                if now - self._since > ANSWER_S:
                    self.lost("takes connections but does not answer (is it a hicache-mooncake master?)", now)
            case "joined":
                self._tell_clears()
                if now >= self._beat_at:
                    self._beat(now)
                if now - self.answered_at > self._patience_s():
                    self.lost("stopped answering", now)
            case "unfit":
                if now - self.answered_at > max(3 * ASK_AGAIN_S, self.core.silent_s):
                    self.lost("stopped answering", now)
                elif now - self._since >= ASK_AGAIN_S:
                    self._since = now
                    self._outbox.append(ClusterStatus(brief=True))

    def next_due(self, now: float) -> float:
        match self.state:
            case "waiting":
                return self._retry_at
            case "connecting":
                return self._join_at if now < self._join_at else max(self._since, self._join_at) + CONNECT_S
            case "asking" | "joining":
                return self._since + ANSWER_S
            case "joined":
                # A snapshot that is ready waits for the connection, and not for time.
                waits = self._snapshot_wanted and now < self._snapshot_at
                return min(self._beat_at, self._snapshot_at) if waits else self._beat_at
            case _:
                return self._since + ASK_AGAIN_S

    def _patience_s(self) -> float:
        usual = max(3 * self.ttl_s, self.core.silent_s)
        unread = self._parts is not None or self._beats_answered < self._beat_behind_snapshot
        return max(usual, SNAPSHOT_READ_S) if unread else usual

    # ------------------------------------------------------------------ what the core tells it

    def push(self, message: Message) -> None:
        if not self.listens:
            return
        if len(self._outbox) >= MAX_OUTBOX_MESSAGES:
            self._overflow()
        self._outbox.append(message)

    def _overflow(self) -> None:
        """What waits is dropped; the master sees the gap. No answer comes to the beats in it, and its clears are told again."""
        self._beats_sent -= sum(isinstance(message, Beat) for message in self._outbox)
        self._beats_before_snapshot = min(self._beats_before_snapshot, self._beats_sent)
        self._beat_behind_snapshot = min(self._beat_behind_snapshot, self._beats_sent + 1)
        self._clears = dict.fromkeys(self._clears, 0)
        self._outbox.clear()
        self.core.count("outbox_overflows")

    @property
    def crowded(self) -> bool:
        """Does so much wait for this master that it should be sent fewer and larger updates?"""
        return len(self._outbox) > MAX_OUTBOX_MESSAGES // 4

    def want_snapshot(self) -> None:
        self._parts = None
        self._snapshot_wanted = self.listens

    def beat_now(self, now: float) -> None:
        self._beat_at = min(self._beat_at, now)

    def clear(self, namespace: bytes) -> None:
        """Tell this master, now or as soon as it is back; the oldest are given up when too many wait."""
        self._clears.pop(namespace, None)
        self._clears[namespace] = 0
        while len(self._clears) > MAX_WAITING_CLEARS:
            del self._clears[next(iter(self._clears))]
            self.core.count("clears_lost")
        if self.state != JOINED:
            self.core.log.warning(
                "master %s is not there: other nodes forget namespace %s only when it is back", self.master, namespace.hex()
            )

    def shards_changed(self, now: float) -> None:
        """The number of shards that counts is another one now."""
        if self.fits:
            if self.state == UNFIT:
                self._ask_anew(now)
        elif self.connected and self.shards and self.state != UNFIT:
            self._become_unfit(now)

    def lost(self, why: str, now: float) -> None:
        if self.state == WAITING:
            return
        log = self.core.log.debug if self._complained else self.core.log.warning
        meanwhile = (
            "another master answers meanwhile"
            if self.core.has_other(self, now)
            else "until then pages of other nodes are misses here"
        )
        log("master %s %s. Trying again; %s", self.master, why, meanwhile)
        self._complained = True
        self._wait(self._backoff_s, now)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])

    # ------------------------------------------------------------------ out

    def take(self, now: float) -> Message | None:
        """The next message, now that the connection can take one."""
        if self.state == CONNECTING:
            if now < self._join_at:
                return None
            self.state = ASKING
            self._since = now
            self._outbox.clear()
            return ClusterStatus(brief=True)
        if not self._outbox and self._snapshot_ready(now):
            # Updates first: the snapshot takes seconds, they are news. The master puts both in order by their numbers.
            self._cut_snapshot(now)
        return self._outbox.popleft() if self._outbox else None

    def _snapshot_ready(self, now: float) -> bool:
        if self.state != JOINED:
            return False
        return self._parts is not None or (self._snapshot_wanted and now >= self._snapshot_at)

    def _cut_snapshot(self, now: float) -> None:
        try:
            if self._snapshot_wanted:
                self._parts = self.core.snapshot(self.shard, self.tiers)
                self._snapshot_wanted = False
                self._snapshot_seq = self.core.seq(self.shard)
                self._part = 0
                self._beats_before_snapshot = self._beats_sent
            assert self._parts is not None
            part = next(self._parts)
        except Exception as error:
            self.want_snapshot()
            self._snapshot_at = now + SNAPSHOT_RETRY_S
            if not isinstance(error, Busy):
                self.core.failed("reading the snapshot")
            return
        if part.last:
            self._parts = None
            self._beat_behind_snapshot = self._beats_sent + 1
        facts = self.core.facts()
        self.push(Snapshot(facts.node, facts.incarnation, self._snapshot_seq, self._part, part.last, part.keys, part.tier))
        self._part += 1
        self.answered_at = now  # the answers wait behind it

    def _tell_clears(self) -> None:
        for namespace in [ns for ns, beat in self._clears.items() if not beat]:
            self._clears[namespace] = self._beats_sent + 1
            self.push(ClearNamespace(namespace, self.core.facts().node))

    def _beat(self, now: float) -> None:
        self._beat_at = now + self._heartbeat_s
        facts, usage = self.core.facts(), self.core.usage(now)
        self._beats_sent += 1
        load, self._sent_bytes = usage.sent_bytes - self._sent_bytes, usage.sent_bytes
        number, ranks = self.core.engines() if self.version >= 2 else (0, ())
        if number != self._engines_told:
            self._engines_told = number
            self.push(Engines(facts.node, facts.incarnation, number, list(ranks)))
        self.push(
            Beat(
                facts.node,
                facts.incarnation,
                self.core.seq(self.shard),
                usage.used_bytes,
                usage.capacity_bytes,
                usage.objects,
                usage.hits,
                usage.lookups,
                facts.draining,
                max(0, load),
                usage.want_room and self.core.asks_for_room(self, now),
                usage.room_bytes,
                number,
            )
        )

    def _join(self, now: float) -> None:
        facts = self.core.facts()
        self.state = JOINING
        self._since = now
        self._join_at = now + self.core.rng.uniform(0.2, 0.5)  # the soonest next one: two nodes of one name would join in turns
        self._outbox.clear()
        self._parts = None
        self._snapshot_wanted = False
        self._beats_sent = self._beats_answered = self._beats_before_snapshot = self._beat_behind_snapshot = 0
        self._sent_bytes = self.core.usage(now).sent_bytes
        # The master forgets with it what the cold tier took since, and told of.
        self._repeats_clears = self.core.has_cold and any(self._clears.values())
        self._clears = dict.fromkeys(self._clears, 0)
        self._clears_heard = 0
        self.push(
            Join(
                *self.core.versions,
                facts.node,
                facts.incarnation,
                facts.host,
                facts.port,
                facts.capacity_bytes,
                self.core.seq(self.shard),
                facts.host_id,
                facts.draining,
                facts.socket,
            )
        )

    # ------------------------------------------------------------------ in

    def received(self, message: Message, now: float) -> None:
        if self.state == WAITING:
            return
        match message:
            case ClusterReport():
                self._reported(message, now)
            case Joined():
                self._joined(message, now)
            case Refused():
                if message.reason != self.refusal:
                    self.core.log.error("master %s refused this node: %s", self.master, message.reason)
                self.refusal = message.reason
                self._wait(REFUSED_RETRY_S, now)
            case BeatReply():
                self._beat_answered(message, now)
            case ClearNamespace():
                self.core.hear_clear(message.namespace)
                if message.number == self._clears_heard + 1:
                    self._clears_heard += 1
            case Keep():
                self.core.hear_keep(message)

    def _reported(self, message: ClusterReport, now: float) -> None:
        if self.state not in (ASKING, UNFIT):
            return
        if not 0 <= message.shard < message.shards <= MAX_SHARDS:
            self.lost(f"says that it has shard {message.shard} of {message.shards}", now)
            return
        self.shard, self.shards = message.shard, message.shards
        self.version = min(message.version, self.core.versions[1])  # updates go out before it says what was agreed on
        self.warming = message.warming
        self.answered_at = now
        self.core.claimed(now)
        if self.fits:
            self._join(now)
        elif self.state != UNFIT:
            self._become_unfit(now)

    def _joined(self, message: Joined, now: float) -> None:
        if self.state != JOINING:
            return
        self._enter(JOINED)
        if self._incarnation != message.master or self._complained or self.refusal:
            self.core.log.info("joined master %s (%s)", self.master, message.master.hex())
        self._incarnation = message.master
        self._heartbeat_s = min(max(message.heartbeat_s, 0.01), 60.0)
        self.ttl_s = max(message.ttl_s, self._heartbeat_s)
        self.version = message.version
        self.warming = message.warming
        self.gather_s = message.gather_s
        self._backoff_s = BACKOFF_S[0]
        self._complained = False
        self.refusal = ""
        self.answered_at = now
        self._beat_at = now
        self._snapshot_wanted = self._snapshot_wanted or message.want_snapshot or self._repeats_clears
        self.core.count("joins")

    def _beat_answered(self, message: BeatReply, now: float) -> None:
        self.answered_at = now
        if self.state != JOINED:
            return
        if not message.known or message.master != self._incarnation:
            self._ask_anew(now)
            return
        if message.clears > self._clears_heard:
            # Some were lost with a connection that broke. Whoever joins is told of the newest again.
            self.core.count("clears_missed")
            self._ask_anew(now)
            return
        self._beats_answered += 1
        # Beats and clears are read in order: an answer to a beat that was sent after a clear says that it arrived.
        self._clears = {ns: beat for ns, beat in self._clears.items() if not beat or beat >= self._beats_answered}
        self.warming = message.warming
        self.gather_s = message.gather_s
        if self.core.asks_for_room(self, now):
            self.core.take_room(message.room, now + max(ROOM_FRESH_S, 3 * self._heartbeat_s))
            self.core.take_unshared(message.unshared)
        if message.want_engines:
            self._engines_told = -1
        if message.want_snapshot and self._parts is None and self._beats_answered > self._beats_before_snapshot:
            self._snapshot_wanted = True

    # ------------------------------------------------------------------ states

    def _enter(self, state: str) -> None:
        self.core.turn += JOINED in (self.state, state)
        self.state = state

    def _ask_anew(self, now: float) -> None:
        """The master does not know this node, or may be another one now, over the same connection."""
        self._enter(CONNECTING)
        self._since = now
        self._outbox.clear()
        self._parts = None
        self._snapshot_wanted = False

    def _become_unfit(self, now: float) -> None:
        was_member = self.listens
        self.core.log.error(
            "master %s has shard %d of %d, but the other masters have %d shards: it is not used until all masters are started"
            " with the same number of shards (--shard)",
            self.master,
            self.shard,
            self.shards,
            self.core.shards,
        )
        self._enter(UNFIT)
        self._since = now
        self._outbox.clear()
        self._parts = None
        self._snapshot_wanted = False
        if was_member:
            facts = self.core.facts()
            self._outbox.append(Leave(facts.node, facts.incarnation))

    def _wait(self, seconds: float, now: float) -> None:
        self.core.act(Close(self.master))
        self._enter(WAITING)
        self._outbox.clear()
        self._parts = None
        self._snapshot_wanted = False
        self._retry_at = now + seconds * self.core.rng.uniform(0.5, 1.0)
