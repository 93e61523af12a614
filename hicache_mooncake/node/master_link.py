"""The node's side of the metadata masters: one thread that keeps them up to date, and the way to lookups from any thread."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from hicache_mooncake.config_values import is_etcd, is_loopback, join_address, split_address
from hicache_mooncake.discovery import Discovery
from hicache_mooncake.node.link_core import (
    SILENT_S,
    ChangeSource,
    Close,
    ColdSource,
    Connect,
    JoinFacts,
    Keys,
    LinkCore,
    LinkView,
    Usage,
)
from hicache_mooncake.node.link_session import ASKING, JOINING
from hicache_mooncake.node.lookup_plan import NO_PROMISE, Answers
from hicache_mooncake.node.master_lookup import Asker, Resolve, Socket, connect_dealer
from hicache_mooncake.node.names import Names
from hicache_mooncake.protocol import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    ClusterReport,
    FromMaster,
    Keep,
    Question,
    RankIdentity,
    Room,
    Unshared,
    decoder,
    encode,
)
from hicache_mooncake.security import ClusterKey

__all__ = ["DEFAULT_MASTER_PORT", "ChangeSource", "ColdSource", "JoinFacts", "Keys", "MasterLink", "Usage"]

DEFAULT_MASTER_PORT = 50051
PAUSE_S = 0.1
MESSAGES_PER_PASS = 32
WRITE_S = 0.05
"""So long a pass writes to one master: it takes time to read what a cold tier holds, and the heart beats between two passes."""
MAX_ORDERS = 4096
MAX_SOCKETS = 16_384
"""As many lookups at once as there may be, each with a socket a shard, are more than ZMQ's default of 1023."""

HOW_TO_SECURE = (
    "Without a key anybody who reaches a master can read and spoil the directory. Make a key (hicache-mooncake keygen FILE) and"
    " give it to every node and master (--key-file FILE), or say that your network has only friends (--allow-unauthenticated)"
)

_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class _Connection:
    """A socket to one master, and what the link's thread waits for on it."""

    def __init__(self, context: zmq.Context[Socket], master: str, key: ClusterKey | None, resolve: Resolve | None) -> None:
        self.socket = connect_dealer(context, master, key, resolve, self._watch)
        self._unsent: bytes | None = None

    def _watch(self, socket: Socket) -> None:
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)

    def problem(self) -> str:
        """Why the connection is no good any more; "" when nothing is known against it."""
        try:
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return ""
        if event & _HANDSHAKE_FAILED:
            return "does not accept this node's key, or has another one (--key-file: the same on all nodes and masters)"
        return "closed the connection"

    def write(self, core: LinkCore, master: str, now: float) -> bool:
        """Send what there is, up to a limit. Returns whether there may be more that can be sent now."""
        until = time.monotonic() + WRITE_S
        for _ in range(MESSAGES_PER_PASS):
            if time.monotonic() >= until:
                return True
            if not self.socket.poll(0, zmq.POLLOUT):
                return False
            if self._unsent is None:
                message = core.take(master, now)
                if message is None:
                    return False
                self._unsent = encode(message)
            try:
                self.socket.send(self._unsent, zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._unsent = None
        return True

    def close(self, last: bytes | None = None) -> None:
        if last is not None:
            with contextlib.suppress(zmq.ZMQError):  # then the master will notice the silence
                self.socket.setsockopt(zmq.LINGER, 500)
                self.socket.send(last, zmq.NOBLOCK)
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()


class MasterLink:
    """A node's link to all of its masters. With none everything here is a no-op.

    `source` is the node with its DRAM; `cold`, where it has one, its cold tier, of which the masters hear as well;
    `engines` as in LinkCore.
    `start` starts the thread; `on_clear` is called on it when another node cleared a namespace, `on_keep` when a master has
    told a reader of another node of pages here. Everything public but `start`
    and `close` is for any thread. `key` is the cluster's; without one only masters on this host are connected to, unless
    `allow_unauthenticated`. `resolve` maps a master's address to the one to connect to, at each connection anew; by default
    it asks the host's name servers. Raises ValueError for a master that is not host:port, or must not be connected to."""

    def __init__(
        self,
        masters: Sequence[str],
        info: Callable[[], JoinFacts],
        source: ChangeSource,
        on_clear: Callable[[bytes], None],
        *,
        log: logging.Logger,
        on_keep: Callable[[Keep], None] = lambda keep: None,
        cold: ColdSource | None = None,
        engines: Callable[[], tuple[int, Sequence[RankIdentity]]] = lambda: (0, ()),
        key: ClusterKey | None = None,
        allow_unauthenticated: bool = False,
        resolve: Resolve | None = None,
    ) -> None:
        self.info = info
        self.log = log
        self._key = key
        self._may_leave_host = key is not None or allow_unauthenticated
        names = Names()  # not libzmq's: it resolves on the thread that all connections share
        self._resolve = resolve or names
        known = resolve or names.known
        found_by = [master for master in masters if is_etcd(master)]
        addresses = tuple(
            dict.fromkeys(
                join_address(*split_address(master.removeprefix("tcp://"), DEFAULT_MASTER_PORT))
                for master in masters
                if master not in found_by
            )
        )
        for master in addresses:
            if not self._may_connect(master):
                raise ValueError(f"master {master} is not on this host. {HOW_TO_SECURE}")
        self._core = LinkCore(
            addresses,
            info,
            source,
            random.Random(),
            log,
            on_clear,
            on_keep=on_keep,
            cold=cold,
            engines=engines,
            versions=(PROTOCOL_MIN, PROTOCOL_MAX),
            silent_s=SILENT_S,
        )
        self._view = self._core.view()
        self._discoveries = [Discovery(url, self._found, log) for url in found_by]
        self._lookups = {"lookups": 0, "lookup_failures": 0, "lookup_garbage": 0}
        self._orders: deque[Callable[[float], None]] = deque()
        self._count_lock = threading.Lock()
        self._decode = decoder(FromMaster).decode
        self._stopping = False
        self._leave = False
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._connections: dict[str, _Connection] = {}
        self._in_use = bool(masters)
        if self._in_use:
            self._context: zmq.Context[Socket] = zmq.Context(io_threads=1)
            self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._asker = Asker(lambda master: connect_dealer(self._context, master, key, known))

    # ------------------------------------------------------------------ for any thread

    @property
    def masters(self) -> tuple[str, ...]:
        """Addresses of the masters that are known now."""
        return tuple(master.master for master in self._view.masters)

    @property
    def view(self) -> LinkView:
        """Where each master stands."""
        return self._view

    @property
    def turn(self) -> int:
        """As in LinkCore."""
        return self._core.turn

    @property
    def counters(self) -> dict[str, int]:
        """What happened since the start."""
        return self._core.counters | self._lookups

    @property
    def state(self) -> str:
        """One of `no master configured`, `joined`, `shards <numbers> of <count> have no master`, `refused: <reason>`,
        `joining`, `unreachable`."""
        if not self._in_use:
            return "no master configured"
        view, now = self._view, time.monotonic()
        answering = {master.shard for master in view.masters if master.answers(now)} - {-1}
        if answering and len(answering) == view.shards:
            return "joined"
        refusal = next((master.refusal for master in view.masters if master.refusal), "")
        if refusal:
            return f"refused: {refusal}"
        if answering:
            missing = ", ".join(str(shard) for shard in range(view.shards) if shard not in answering)
            return f"shards {missing} of {view.shards} have no master"
        return "joining" if any(master.state in (ASKING, JOINING) for master in view.masters) else "unreachable"

    def start(self) -> None:
        """Start to join. Once."""
        if self._in_use and self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="master-link", daemon=True)
            self._thread.start()
            for discovery in self._discoveries:
                discovery.start()

    def notify(self) -> None:
        """The source has changes. Cheap; may be called under the source's lock."""
        if self._in_use and not self._core.notified:
            self._core.notify()
            self._wake_up()

    def clear_namespace(self, namespace: bytes) -> None:
        """Have every other node drop this namespace: by each master, or as soon as it is back."""
        self._order(lambda now: self._core.clear_namespace(namespace))

    def report(self, failed: dict[str, int]) -> None:
        """Tell every master that reads from these nodes failed, so often; gathered for a moment."""
        failed = dict(failed)
        self._order(lambda now: self._core.report(failed, now))

    def beat_now(self) -> None:
        """Something that the masters should know at once has changed, such as `draining`, or that room is wanted."""
        self._order(self._core.beat_now)

    def set_masters(self, masters: Sequence[str]) -> None:
        """From now on these are the masters. One that is not among them any more is used for as long as it answers."""
        addresses = tuple(dict.fromkeys(masters))
        self._order(lambda now: self._core.set_masters(addresses))

    def room(self) -> list[Room]:
        """Nodes that can take pages, as a master said lately; empty when none said, or `Usage.want_room` is not set. The same
        list object until a new one comes: do not change it."""
        fresh_until, room = self._core.room_table
        return room if time.monotonic() <= fresh_until else []

    def unshared(self) -> list[Unshared]:
        """Engines of this host that cannot share, as a master said last. Do not change it."""
        return self._core.unshared

    def lookup(
        self, questions: Sequence[Question], timeout_s: float, promise: tuple[float, str] = NO_PROMISE
    ) -> Answers | None:
        """Who holds these pages? See Answers. None when no master answers, after at most `timeout_s`, and at once while the
        last failure is fresh. Raises ProtocolError for a ragged blob of hashes or too many."""
        if not self._in_use:
            return None
        answers, garbage = self._asker.lookup(questions, self._view, self.info().node, timeout_s, promise)
        with self._count_lock:
            self._lookups["lookups"] += 1
            self._lookups["lookup_failures"] += answers is None or not answers.complete
            self._lookups["lookup_garbage"] += garbage
        return answers

    def cluster_status(self, timeout_s: float) -> ClusterReport | None:
        """What the first master that is well knows of all nodes, or None."""
        return self._asker.cluster_status(self._view, timeout_s) if self._in_use else None

    def close(self, leave: bool = True) -> None:
        """End the thread and all sockets; with `leave` the masters drop this node at once. Safe to call twice."""
        if not self._in_use or self._stopping:
            return
        self._stopping, self._leave = True, leave
        self._wake_up()
        for discovery in self._discoveries:
            discovery.close()
        self._asker.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        stuck = self._thread is not None and self._thread.is_alive()
        if not stuck and self._asker.drained(time.monotonic() + 2.0):
            self._context.term()  # with a socket in use it would wait for it; then the context ends with that socket

    def _order(self, order: Callable[[float], None]) -> None:
        """Have the link's thread do this with the time."""
        if self._in_use and len(self._orders) < MAX_ORDERS:
            self._orders.append(order)
            self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it is awake
            os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        # Not in close: `notify` may come at any time, and must not write to another file that got the number.
        if hasattr(self, "_wake"):
            os.close(self._wake)

    def _may_connect(self, master: str) -> bool:
        return self._may_leave_host or is_loopback(split_address(master)[0])

    def _found(self, masters: Sequence[str]) -> None:
        """The discovery's news, on its thread."""
        allowed = [master for master in masters if self._may_connect(master)]
        if len(allowed) < len(masters):
            self.log.error(
                "masters %s are not on this host and are not connected to. %s",
                ", ".join(master for master in masters if master not in allowed),
                HOW_TO_SECURE,
            )
        self.set_masters(allowed)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        more = False
        while not self._stopping:
            try:
                more = self._pass(more)
            except Exception:
                self._failures += 1
                if self._failures <= 10:
                    self.log.exception("the link to the masters failed; trying on. Please report this")
                time.sleep(0.1)
        last = {master: encode(message) for master, message in self._core.leave()} if self._leave else {}
        for master, connection in self._connections.items():
            connection.close(last.get(master))
        self._connections.clear()

    def _pass(self, more: bool) -> bool:
        """Wait for something to do and do it. Returns whether there is more to write at once."""
        core = self._core
        now = time.monotonic()
        self._wait(0.0 if more else min(core.next_due(now) - now, PAUSE_S), now)
        now = time.monotonic()
        while self._orders:
            self._orders.popleft()(now)
        for master, connection in list(self._connections.items()):
            self._read(master, connection, now)
        for action in core.step(now):
            self._act(action, now)
        more = False
        for master, connection in self._connections.items():
            more |= connection.write(core, master, now)
        view = core.view()
        if {m.master for m in view.masters} != {m.master for m in self._view.masters}:
            self._asker.keep([m.master for m in view.masters])
        self._view = view
        return more

    def _wait(self, wait_s: float, now: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for master, connection in self._connections.items():
            wants = self._core.wants_to_send(master, now)
            poller.register(connection.socket, zmq.POLLIN | (zmq.POLLOUT if wants else 0))
            poller.register(connection.monitor, zmq.POLLIN)
        poller.poll(max(0, int(wait_s * 1000 + 0.999)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _read(self, master: str, connection: _Connection, now: float) -> None:
        for _ in range(MESSAGES_PER_PASS):
            try:
                body = connection.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = self._decode(body)
            except msgspec.MsgspecError:
                self._core.count("garbage")
                continue
            self._core.received(master, message, now)
        if problem := connection.problem():
            self._core.lost(master, now, problem)

    def _act(self, action: Connect | Close, now: float) -> None:
        master = action.master
        if isinstance(action, Close):
            if connection := self._connections.pop(master, None):
                connection.close()
            self._asker.drop(master)
            return
        try:
            self._connections[master] = _Connection(self._context, master, self._key, self._resolve)
        except (zmq.ZMQError, OSError, ValueError) as error:
            self._core.lost(master, now, f"cannot be connected to: {error}")
