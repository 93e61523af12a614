"""The node's side of the metadata masters: one thread that keeps them up to date, and the way to lookups from any thread."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from hicache_mooncake.config_values import join_address, split_address
from hicache_mooncake.node.master_lookup import Asker, connect_dealer
from hicache_mooncake.protocol import (
    HASH_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Answer,
    Beat,
    BeatReply,
    ClearNamespace,
    ClusterReport,
    ClusterStatus,
    FromMaster,
    Join,
    Joined,
    Leave,
    Lookup,
    LookupReply,
    Message,
    Question,
    Refused,
    Snapshot,
    Update,
    count_hashes,
    decoder,
    encode,
)

DEFAULT_MASTER_PORT = 50051
DRAIN_KEYS = 4_096
"""Changes an update; also keys a snapshot part. About 5 ms of a master's time: its other work never waits longer for one."""
DRAINS_PER_PASS = 16
BATCH_S = 0.005
PAUSE_S = 0.05
UNASKED_DRAIN_S = 0.1
MAX_OUTBOX_MESSAGES = 4_096
"""Messages that wait for a master that reads slowly. Beyond it they are dropped, and the master asks for a snapshot."""
MAX_WAITING_CLEARS = 1024
SNAPSHOT_PARTS_PER_PASS = 8
CONNECT_S = 1.0
JOIN_ANSWER_S = 3.0
SILENT_S = 15.0
BACKOFF_S = (0.1, 2.0)
REFUSED_RETRY_S = 10.0

Keys = list[tuple[bytes, bytes]]
"""Pairs of (namespace, blob of 32-byte hashes)."""


@dataclass(frozen=True, slots=True)
class JoinFacts:
    """What a node says of itself. `host` and `port` are where other nodes reach it."""

    node: str
    incarnation: bytes
    host: str
    port: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a node reports with every heartbeat."""

    used_bytes: int = 0
    capacity_bytes: int = 0
    objects: int = 0
    hits: int = 0
    lookups: int = 0


class ChangeSource(Protocol):
    """What the link reads from the node. All of it is called on the link's thread, and should return within milliseconds."""

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        """Up to `limit` keys (added, removed) since the last call, oldest first; a key is at most in one of the two, its last
        state. Both empty when there are none."""

    def snapshot(self) -> Iterator[Keys]:
        """Everything held, in parts. What changes from this call on must still come out of `drain_changes`; whether a part
        already shows it makes no difference. With several masters, what was not drained yet before this call must come out as
        well, since the snapshot goes to one of them."""

    def changes_lost(self) -> bool:
        """Were changes dropped since the last snapshot, because nobody drained them in time? Then every master gets one."""

    def usage(self) -> Usage:
        """Figures for the heartbeat."""


# --------------------------------------------------------------------------- the stream of updates

_WAITING, _CONNECTING, _JOINING, _JOINED = "waiting", "connecting", "joining", "joined"


class _Session:
    """The link's thread and one master: a socket, and where that master stands. Driven by `step`; only that thread touches it,
    but for `state` and `refusal`, which any thread may read."""

    def __init__(self, link: MasterLink, master: str) -> None:
        self.link = link
        self.master = master
        self.state = _WAITING
        self.refusal = ""
        self.socket: zmq.Socket[bytes] | None = None
        self._incarnation = b""
        self._heartbeat_s = 1.0
        self._ttl_s = 5.0
        self._backoff_s = BACKOFF_S[0]
        self._retry_at = 0.0
        self._join_at = 0.0
        self._since = 0.0
        self._beat_at = 0.0
        self._answered_at = 0.0
        self._outbox: deque[bytes] = deque()
        self._parts: Iterator[tuple[Keys, bool]] | None = None
        self._snapshot_wanted = False
        self._snapshot_seq = 0
        self._part = 0
        self._beats_sent = 0
        self._beats_answered = 0
        self._beats_before_snapshot = 0
        self._complained = False
        self._clears: dict[bytes, int] = {}
        """Clears that this master may not have heard of yet: namespace -> beats sent when it was told, 0 before that."""

    @property
    def listens(self) -> bool:
        """Does this master take updates now?"""
        return self.state in (_JOINING, _JOINED)

    @property
    def answers(self) -> bool:
        """Is this node a member there, and was the master heard of lately?"""
        return self.state == _JOINED and time.monotonic() - self._answered_at <= self._ttl_s

    @property
    def wants_to_write(self) -> bool:
        if self.state == _CONNECTING:
            return time.monotonic() >= self._join_at
        return self.listens and bool(self._outbox or self._parts or self._snapshot_wanted)

    def push(self, message: Message) -> None:
        if not self.listens:
            return
        if len(self._outbox) >= MAX_OUTBOX_MESSAGES:
            self._outbox.clear()
            self.link.count("outbox_overflows")
        self._outbox.append(encode(message))

    def want_snapshot(self) -> None:
        self._parts = None
        self._snapshot_wanted = self.listens

    def clear(self, namespace: bytes) -> None:
        """Tell this master, now or as soon as it is back; the oldest are given up when too many wait."""
        self._clears.pop(namespace, None)
        self._clears[namespace] = 0
        while len(self._clears) > MAX_WAITING_CLEARS:
            del self._clears[next(iter(self._clears))]
            self.link.count("clears_lost")
        if self.state != _JOINED:
            self.link.log.warning(
                "master %s is not there: other nodes forget namespace %s only when it is back", self.master, namespace.hex()
            )

    def _send_clears(self) -> None:
        for namespace in [ns for ns, beat in self._clears.items() if not beat]:
            self._clears[namespace] = self._beats_sent + 1
            self.push(ClearNamespace(namespace, self.link.info().node))

    def step(self, now: float) -> None:
        """Do what can be done without waiting."""
        if self.state == _WAITING:
            if now >= self._retry_at:
                self._connect(now)
            return
        self._read(now)
        if self.state == _CONNECTING:
            if now >= self._join_at and self._writable():
                self._join(now)
            elif now - max(self._since, self._join_at) > CONNECT_S:
                self._fail("does not answer (is it running, and is the address right?)")
        elif self.state == _JOINING and now - self._since > JOIN_ANSWER_S:
            self._fail("takes connections but does not answer (is it a hicache-mooncake master?)")
        if self.state == _JOINED:
            self._send_clears()
            if now >= self._beat_at:
                self._beat(now)
            self._write_snapshot_and_outbox(now)
            # Patient: a master that was restarted has every node's snapshot to read, and connecting anew starts ours over.
            if now - self._answered_at > max(3 * self._ttl_s, SILENT_S):
                self._fail("stopped answering")
        elif self.state == _JOINING:
            self._write_outbox()

    def close(self, leave: bool) -> None:
        if self.socket is None:
            return
        if leave and self.listens:
            facts = self.link.info()
            try:
                self.socket.setsockopt(zmq.LINGER, 500)
                self.socket.send(encode(Leave(facts.node, facts.incarnation)), zmq.NOBLOCK)
            except zmq.ZMQError:
                pass  # it will notice the silence
        self.socket.close()
        self.socket = None
        self.state = _WAITING

    # ------------------------------------------------------------------ connection

    def _connect(self, now: float) -> None:
        try:
            self.socket = connect_dealer(self.link.context, self.master)
        except zmq.ZMQError as error:
            self._fail(f"cannot be connected to: {error.strerror}")
            return
        self.state = _CONNECTING
        self._since = now
        self._join_at = now
        self.link.count("connects")

    def _join(self, now: float) -> None:
        facts = self.link.info()
        self.state = _JOINING
        self._since = now
        self._join_at = now + random.uniform(0.2, 0.5)  # the soonest next one: two nodes of one name would join in turns
        self._outbox.clear()
        self._parts = None
        self._snapshot_wanted = False
        self._beats_sent = self._beats_answered = self._beats_before_snapshot = 0
        self._clears = dict.fromkeys(self._clears, 0)
        self.push(
            Join(
                PROTOCOL_MIN,
                PROTOCOL_MAX,
                facts.node,
                facts.incarnation,
                facts.host,
                facts.port,
                facts.capacity_bytes,
                self.link.seq,
            )
        )
        self._write_outbox()

    def _fail(self, why: str) -> None:
        log = self.link.log.debug if self._complained else self.link.log.warning
        log("master %s %s. Trying again; until then pages of other nodes are misses here", self.master, why)
        self._complained = True
        self._wait(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])

    def _refused(self, reason: str) -> None:
        if reason != self.refusal:
            self.link.log.error("master %s refused this node: %s", self.master, reason)
        self.refusal = reason
        self._wait(REFUSED_RETRY_S)

    def _wait(self, seconds: float) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        self.state = _WAITING
        self._outbox.clear()
        self._parts = None
        self._snapshot_wanted = False
        self._retry_at = time.monotonic() + seconds * random.uniform(0.5, 1.0)

    # ------------------------------------------------------------------ in

    def _read(self, now: float) -> None:
        for _ in range(64):
            if self.socket is None:
                return
            try:
                body = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self.link.decoder.decode(body)
            except msgspec.MsgspecError:
                self.link.count("garbage")
                continue
            self._take(message, now)

    def _take(self, message: Message, now: float) -> None:
        match message:
            case Joined():
                self._joined(message, now)
            case Refused():
                self._refused(message.reason)
            case BeatReply():
                self._answered_at = now
                self._beats_answered += 1
                # Beats and clears are read in order: an answer to a beat that was sent after a clear says that it arrived.
                self._clears = {ns: beat for ns, beat in self._clears.items() if not beat or beat >= self._beats_answered}
                if self.state != _JOINED:
                    return
                if not message.known or message.master != self._incarnation:
                    self.state = _CONNECTING
                    self._since = now
                elif message.want_snapshot and self._parts is None and self._beats_answered > self._beats_before_snapshot:
                    self._snapshot_wanted = True
            case ClearNamespace():
                self.link.on_clear(message.namespace)

    def _joined(self, message: Joined, now: float) -> None:
        if self.state != _JOINING:
            return
        self.state = _JOINED
        if self._incarnation != message.master or self._complained or self.refusal:
            self.link.log.info("joined master %s (%s)", self.master, message.master.hex())
        self._incarnation = message.master
        self._heartbeat_s = min(max(message.heartbeat_s, 0.01), 60.0)
        self._ttl_s = max(message.ttl_s, self._heartbeat_s)
        self._backoff_s = BACKOFF_S[0]
        self._complained = False
        self.refusal = ""
        self._answered_at = now
        self._beat_at = now
        self._snapshot_wanted = self._snapshot_wanted or message.want_snapshot
        self.link.count("joins")

    # ------------------------------------------------------------------ out

    def _beat(self, now: float) -> None:
        self._beat_at = now + self._heartbeat_s
        facts, usage = self.link.info(), self.link.source.usage()
        self._beats_sent += 1
        self.push(
            Beat(
                facts.node,
                facts.incarnation,
                self.link.seq,
                usage.used_bytes,
                usage.capacity_bytes,
                usage.objects,
                usage.hits,
                usage.lookups,
            )
        )

    def _write_snapshot_and_outbox(self, now: float) -> None:
        """Updates first: the snapshot takes seconds, they are news. The master puts both in order by their numbers."""
        self._write_outbox()
        for _ in range(SNAPSHOT_PARTS_PER_PASS):
            if self._outbox or not (self._parts or self._snapshot_wanted) or not self._writable():
                return
            if self._snapshot_wanted:
                self._snapshot_wanted = False
                self._beats_before_snapshot = self._beats_sent
                # A number of its own for each snapshot, so that parts of one that broke off never pass for parts of the next.
                self.link.number([], [])
                self._snapshot_seq = self.link.seq
                self._part = 0
                self._parts = _with_last(_rechunk(iter(self.link.source.snapshot())))
                self.link.count("snapshots")
            assert self._parts is not None
            try:
                keys, last = next(self._parts)
            except Exception:
                self.want_snapshot()
                raise
            if last:
                self._parts = None
            facts = self.link.info()
            self.push(Snapshot(facts.node, facts.incarnation, self._snapshot_seq, self._part, last, keys))
            self._part += 1
            self._answered_at = now  # the answers wait behind it
            self._write_outbox()

    def _write_outbox(self) -> None:
        assert self.socket is not None
        while self._outbox:
            try:
                self.socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    def _writable(self) -> bool:
        assert self.socket is not None
        return bool(self.socket.poll(0, zmq.POLLOUT))


def _rechunk(parts: Iterator[Keys]) -> Iterator[Keys]:
    step = DRAIN_KEYS * HASH_BYTES
    for part in parts:
        batch: Keys = []
        size = 0
        for namespace, hashes in part:
            for at in range(0, len(hashes), step):
                blob = hashes[at : at + step]
                if size + len(blob) > step:
                    yield batch
                    batch, size = [], 0
                batch.append((namespace, blob))
                size += len(blob)
        if batch:
            yield batch


def _with_last(parts: Iterator[Keys]) -> Iterator[tuple[Keys, bool]]:
    """Each part, and whether it is the last; one empty part when there are none."""
    before: Keys = next(parts, [])
    for part in parts:
        yield before, False
        before = part
    yield before, True


class MasterLink:
    """A node's link to all of its masters. With none everything here is a no-op.

    `start` starts the thread; `on_clear` is called on it when another node cleared a namespace. `lookup`, `cluster_status`,
    `notify`, `clear_namespace`, `state` and `counters` are for any thread. Raises ValueError for a master that is not
    host:port."""

    def __init__(
        self,
        masters: tuple[str, ...],
        info: Callable[[], JoinFacts],
        source: ChangeSource,
        on_clear: Callable[[bytes], None],
        *,
        log: logging.Logger,
    ) -> None:
        self.masters = tuple(
            dict.fromkeys(join_address(*split_address(m.removeprefix("tcp://"), DEFAULT_MASTER_PORT)) for m in masters)
        )
        self.info = info
        self.source = source
        self.log = log
        self.seq = 1
        """Number of the last update. One at the start, so that a master asks for what the node held before it first joined."""
        self.decoder = decoder(FromMaster)
        self.counters: dict[str, int] = dict.fromkeys(
            ("connects", "joins", "snapshots", "updates", "outbox_overflows", "garbage", "lookups", "lookup_failures"), 0
        )
        self._on_clear = on_clear
        self._clears: deque[bytes] = deque(maxlen=1024)
        self._ids = itertools.count(1)
        self._count_lock = threading.Lock()
        self._notified = False
        self._stopping = False
        self._leave = False
        self._failures = 0
        self._thread: threading.Thread | None = None
        if self.masters:
            self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._sessions = [_Session(self, master) for master in self.masters]
            self._askers = [Asker(self.context, master) for master in self.masters]
        else:
            self._sessions, self._askers = [], []

    # ------------------------------------------------------------------ for any thread

    @property
    def state(self) -> str:
        """One of `no master configured`, `joined`, `refused: <reason>`, `joining`, `unreachable`: of the master best off."""
        if not self._sessions:
            return "no master configured"
        if any(session.answers for session in self._sessions):
            return "joined"
        refusal = next((session.refusal for session in self._sessions if session.refusal), "")
        if refusal:
            return f"refused: {refusal}"
        return "joining" if any(session.state == _JOINING for session in self._sessions) else "unreachable"

    def start(self) -> None:
        """Start to join. Once."""
        if self._sessions and self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="master-link", daemon=True)
            self._thread.start()

    def notify(self) -> None:
        """The source has changes. Cheap; may be called under the source's lock."""
        if self._sessions and not self._notified:
            self._notified = True
            self._wake_up()

    def clear_namespace(self, namespace: bytes) -> None:
        """Have every other node drop this namespace: by each master, or as soon as it is back."""
        if self._sessions:
            self._clears.append(namespace)
            self._notified = True
            self._wake_up()

    def lookup(self, questions: Sequence[Question], timeout_s: float) -> list[Answer] | None:
        """Who holds these pages? One answer a question, or None when no master answers, after at most `timeout_s`, and at once
        while the last failure is fresh. With `prefix` a column ends before the first page that nobody else holds, without it
        has one entry a page. Raises ProtocolError for a ragged blob of hashes or too many."""
        counts = [count_hashes(question.hashes) for question in questions]
        asker = self._first_healthy(timeout_s)
        if asker is None:
            return None
        lookup = Lookup(next(self._ids), list(questions), self.info().node)
        reply = asker.ask(lookup, timeout_s, lambda message: isinstance(message, LookupReply) and message.id == lookup.id)
        self.count("lookups")
        if isinstance(reply, LookupReply):
            if len(reply.answers) == len(questions) and all(map(_fits, questions, counts, reply.answers)):
                return reply.answers
            self.count("garbage")
        self.count("lookup_failures")
        return None

    def cluster_status(self, timeout_s: float) -> ClusterReport | None:
        """What the first master that is well knows of all nodes, or None."""
        asker = self._first_healthy(timeout_s)
        if asker is None:
            return None
        answer = asker.ask(ClusterStatus(), timeout_s, lambda message: isinstance(message, ClusterReport))
        return answer if isinstance(answer, ClusterReport) else None

    def close(self, leave: bool = True) -> None:
        """End the thread and all sockets; with `leave` the masters drop this node at once. Safe to call twice."""
        if not self._sessions or self._stopping:
            return
        self._stopping, self._leave = True, leave
        self._wake_up()
        for asker in self._askers:
            asker.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        deadline = time.monotonic() + 2.0
        stuck = self._thread is not None and self._thread.is_alive()
        if not stuck and all(asker.drained(deadline) for asker in self._askers):
            self.context.term()  # with a socket in use it would wait for it; then the context ends with that socket

    def count(self, name: str, by: int = 1) -> None:
        with self._count_lock:
            self.counters[name] += by

    def _first_healthy(self, timeout_s: float) -> Asker | None:
        joined = [session.answers for session in self._sessions]
        for wanted in (True, False):
            for asker, is_joined, session in zip(self._askers, joined, self._sessions, strict=True):
                if is_joined is wanted and not session.refusal and asker.allows(timeout_s):
                    return asker
        return None

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it is awake
            os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        # Not in close: `notify` may come at any time, and must not write to another file that got the number.
        if hasattr(self, "_wake"):
            os.close(self._wake)

    # ------------------------------------------------------------------ the thread

    def on_clear(self, namespace: bytes) -> None:
        """Called by a session when a master passes a clear on."""
        try:
            self._on_clear(namespace)
        except Exception:
            self.log.exception("clearing namespace %s, as another node asked, failed", namespace.hex())

    def _run(self) -> None:
        drained_at = 0.0
        more = False
        while not self._stopping:
            now = time.monotonic()
            due = now - drained_at >= BATCH_S
            if more or (due and self._notified) or now - drained_at >= UNASKED_DRAIN_S:
                drained_at = now
                more = self._guard(self._send_changes)
            for session in self._sessions:
                self._guard(session.step)
            if more:
                self._pause(0.0)
            elif self._notified:
                # Changes wait for a batch's time after the last ones, so that busy writers make few updates.
                time.sleep(min(BATCH_S, max(0.0, drained_at + BATCH_S - time.monotonic())))
            else:
                self._pause(PAUSE_S)
        for session in self._sessions:
            session.close(self._leave)

    def _guard(self, step: Callable[[float], bool | None]) -> bool:
        """A bug in the source must not end the link: without it every page here is a miss elsewhere."""
        try:
            return bool(step(time.monotonic()))
        except Exception:
            self._failures += 1
            if self._failures <= 10:
                self.log.exception("the link to the masters failed; trying on. Please report this")
            time.sleep(0.1)
            return False

    def _send_changes(self, now: float) -> bool:
        self._send_clears()
        try:
            return self._drain()
        except Exception:
            self.seq += 1  # whatever was taken and is lost: every master sees the gap and asks for a snapshot
            raise

    def _drain(self) -> bool:
        """Number the changes and give them to every session; those of masters that do not listen are gaps there.

        Returns whether there may be more."""
        self._notified = False  # before the changes are read: what comes after rings again
        if self.source.changes_lost():
            self.seq += 1
            for session in self._sessions:
                session.want_snapshot()
        for _ in range(DRAINS_PER_PASS):
            added, removed = self.source.drain_changes(DRAIN_KEYS)
            if not added and not removed:
                return False
            self.number(added, removed)
        return True

    def number(self, added: Keys, removed: Keys) -> None:
        """Send the next update to every master that listens. On the link's thread only."""
        self.seq += 1
        self.count("updates")
        facts = self.info()
        update = Update(facts.node, facts.incarnation, self.seq, added, removed)
        for session in self._sessions:
            session.push(update)

    def _send_clears(self) -> None:
        while self._clears:
            namespace = self._clears.popleft()
            for session in self._sessions:
                session.clear(namespace)

    def _pause(self, wait_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for session in self._sessions:
            if session.socket is not None:
                poller.register(session.socket, zmq.POLLIN | (zmq.POLLOUT if session.wants_to_write else 0))
        poller.poll(int(wait_s * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def _fits(question: Question, count: int, answer: Answer) -> bool:
    entries = len(answer.holder)
    return (entries <= count if question.prefix else entries == count) and max(answer.holder, default=0) <= len(answer.peers)
