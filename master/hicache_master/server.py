"""The master as a process: a ZMQ socket, a clock and an HTTP port around `MasterCore`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from zmq.utils.monitor import recv_monitor_message

from hicache_mooncake.config_values import join_address, split_address
from hicache_mooncake.observe import Observatory
from hicache_mooncake.protocol import (
    HASH_BYTES,
    MAX_KEYS_PER_MESSAGE,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    ClusterStatus,
    Join,
    Lookup,
    Message,
    ProtocolError,
    Report,
    ToMaster,
    decoder,
    encode,
)
from hicache_mooncake.security import Doorkeeper, SecurityError, secure_server
from hicache_mooncake.sharing import sentence
from hicache_mooncake.stacks import StackDump

from .backlog import Backlog, Waiting
from .core import MasterCore
from .election import LEADER, Election, ElectionError
from .events_out import KEPT_BYTES
from .events_socket import EventsSocket
from .membership import is_loopback, is_wildcard
from .shard import make_shard

if TYPE_CHECKING:
    from hicache_mooncake.security import ClusterKey

log = logging.getLogger("hicache_master")

DEFAULT_PORT = 50051
DEFAULT_MAX_KEYS = 50_000_000
SEND_HWM = 256
"""Answers queued per peer. Those to a peer that does not read are lost, and it asks again."""
RECEIVE_HWM = 32
"""Messages queued per peer before it must wait. ZMQ lets it go on when half of them are done: many would make long pauses."""
MAX_MESSAGE_BYTES = 2 * MAX_KEYS_PER_MESSAGE * HASH_BYTES
"""Twice what the keys of the largest message take. A peer that sends more is cut off."""
MAX_BACKLOG_BYTES = 32 << 20
"""Updates and snapshots that wait their turn behind lookups. Beyond it nothing more is read until some are done."""
RECEIVE_BATCH = 64
SLICE_S = 0.005
TICK_S = 0.05
MAX_EVENTS = 256
STOOD_STILL_S = 1.0
"""A turn of the loop that took longer (SIGSTOP, a frozen host, swapping) is not held against the nodes."""
VIEW_S = 0.2
LOG_EVERY_S = 60.0
STALLED_S = 10.0

_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

_COUNTERS = {
    "joins": ("joins", "Joins accepted."),
    "refused_joins": ("refused_joins", "Joins refused, and nodes sent away because of their address."),
    "lookups": ("lookups", "Lookup requests."),
    "lookup_keys": ("lookup_keys", "Keys asked for."),
    "lookup_hits": ("hits", "Keys asked for that an active node holds."),
    "updates": ("updates", "Updates taken from nodes."),
    "gaps": ("gaps", "Times updates of a node were found missing, so that its snapshot was asked for."),
    "snapshots": ("snapshots", "Snapshots completed."),
    "snapshots_broken": ("snapshots_broken", "Snapshots that stopped or lost a part."),
    "clears": ("clears", "Namespaces cleared."),
    "unknown_node": ("unknown_node", "Messages of nodes that must join first."),
    "name_clashes": ("name_clashes", "Joins under a name that another live node has."),
    "refused_adds": ("refused_adds", "Keys not taken because the directory is full (max_keys)."),
    "garbage": ("garbage", "Frames dropped because no message of this protocol looks like them."),
    "errors": ("errors", "Messages that made this master fail: report these."),
    "reports": ("reports", "Reports of failed reads."),
    "sick": ("sick", "Times a node was taken out of lookups because others could not read from it."),
    "foreign_keys": ("foreign_keys", "Keys of other shards that nodes sent here, ignored."),
    "strangers": ("strangers", "Connections refused: without this cluster's key, or not of ZeroMQ at all."),
    "kv_events": ("kv_events", "KV events published (--kv-events)."),
    "kv_events_dropped": ("kv_events_dropped", "Batches of KV events and answers to subscribers that could not be sent."),
    "kv_event_replays": ("kv_event_replays", "Replays of KV events that subscribers asked for."),
    "kv_event_snapshots": ("kv_event_snapshots", "Times subscribers asked for, or needed, all that nodes hold."),
}


class MasterError(ValueError):
    """The master cannot start; the text says what to change."""


@dataclass(slots=True)
class View:
    """What the HTTP side sees of the master: a copy, so that a scrape takes nothing from the loop."""

    at: float
    keys: int
    bytes: int
    warming: bool
    shard: str
    role: str
    etcd: str
    """Why etcd cannot be used; empty: it can, or there is none."""
    refusals: list[dict[str, str | int]]
    nodes: dict[str, int]
    counters: dict[str, int]
    engines: dict[str, int]
    """By role."""
    unshared_engines: int
    unshared: list[str]
    """Prefill and decode engines that can never share, a sentence each."""


class MasterServer:
    """Binds in the constructor, serves in `serve` on the caller's thread until `stop`, from any thread. Raises MasterError when
    an address cannot be had. `address` and `metrics_address` are what was bound, `host:port`.

    `shard`: (index, count). With `key` only members of the cluster are let in; without one only this host's own address is
    served, unless `allow_unauthenticated`. `etcd`: its servers, where this master is listed in `cluster` under `advertise`
    (host or host:port; default is what was bound). `kv_events`: host:port where KV events are published, in the clear and to
    everybody who reaches it, and `kv_events_replay` where what was missed is had; empty: nothing is. What was bound is in
    `kv_events_address` and `kv_events_replay_address`."""

    def __init__(
        self,
        listen: str,
        metrics_listen: str | None = None,
        *,
        heartbeat_s: float = 1.0,
        ttl_s: float = 5.0,
        forget_s: float = 60.0,
        max_keys: int = DEFAULT_MAX_KEYS,
        max_bytes: int | None = None,
        shard: tuple[int, int] = (0, 1),
        key: ClusterKey | None = None,
        allow_unauthenticated: bool = False,
        etcd: str | None = None,
        cluster: str = "",
        advertise: str = "",
        kv_events: str = "",
        kv_events_replay: str = "",
    ) -> None:
        if not 0 < heartbeat_s < ttl_s:
            raise MasterError(
                f"heartbeat_s {heartbeat_s:g} and ttl_s {ttl_s:g}: the heartbeat must be the shorter, and positive"
            )
        if max_keys < 1:
            raise MasterError(f"max_keys {max_keys}: must be at least 1")
        try:
            make_shard(*shard)
        except ValueError as error:
            raise MasterError(f"--shard: {error}") from None
        host, port = _split(listen, "nodes", DEFAULT_PORT)
        if key is None and not allow_unauthenticated and not is_loopback(host):
            raise MasterError(
                f"without a key anybody who reaches {listen} could read, list and clear this cluster. Make a key"
                " (hicache-mooncake keygen FILE) and give it to every master and node (--key-file FILE); or listen on"
                " 127.0.0.1; or say that this network has only friends (--allow-unauthenticated)"
            )
        if kv_events_replay and not kv_events:
            raise MasterError("--kv-events-replay repeats what was published: give --kv-events as well")
        published = [
            _split_events(option, given, key is not None or allow_unauthenticated)
            for option, given in (("--kv-events", kv_events), ("--kv-events-replay", kv_events_replay))
            if given
        ]
        if max_bytes is not None and max_bytes < 1 << 20:
            raise MasterError(f"max_bytes {max_bytes}: must be at least a MiB")
        self.core = MasterCore(
            os.urandom(8),
            heartbeat_s=heartbeat_s,
            ttl_s=ttl_s,
            forget_s=forget_s,
            max_keys=max_keys,
            max_bytes=max_bytes,
            shard=shard,
            events_kept_bytes=None if not kv_events else KEPT_BYTES if kv_events_replay else 0,
        )
        self._garbage = 0
        self._errors = 0
        self._strangers = 0
        self._turned_at = 0.0
        self._stranger_logged_at = float("-inf")
        self._decoder = decoder(ToMaster)
        self._backlog = Backlog()
        self._stopping = False
        self.alive: Callable[[], None] = lambda: None
        """Called at each turn of `serve`; set it before."""
        self._context = zmq.Context(io_threads=1)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._http: Observatory | None = None
        self._election: Election | None = None
        self._kv_events: EventsSocket | None = None
        self.kv_events_address = self.kv_events_replay_address = ""
        self._doorkeeper: Doorkeeper | None = None
        self._publish(time.monotonic())
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._doorkeeper = secure_server(self._socket, key, self._context)
            self._events = self._socket.get_monitor_socket(_HANDSHAKE_FAILED)
            self.address = _bind(self._socket, listen, host, port)
            if etcd:
                self._election = Election(etcd, cluster, shard[0], self.core.incarnation, _reached_at(advertise, self.address))
            if self.core.events is not None:
                try:
                    self._kv_events = EventsSocket(self.core.events, published[0], published[1] if kv_events_replay else None)
                except zmq.ZMQError as error:
                    raise _cannot_bind(" and ".join(filter(None, (kv_events, kv_events_replay))), "KV events", error) from error
                self.kv_events_address = self._kv_events.address
                self.kv_events_replay_address = self._kv_events.replay_address
            self.metrics_address: str | None = None
            if metrics_listen:
                self._http = _serve_http(metrics_listen, self)
                self.metrics_address = self._http.address
        except BaseException as error:
            self.close()
            if isinstance(error, SecurityError | ElectionError):
                raise MasterError(str(error)) from None
            raise

    def stop(self) -> None:
        """End `serve` soon. Safe from any thread and from a signal handler."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def serve(self) -> None:
        """Serve until `stop`; releases the addresses when it returns. Once only."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        if self._kv_events is not None and self._kv_events.replay_socket is not None:
            poller.register(self._kv_events.replay_socket, zmq.POLLIN)
        next_tick = next_view = 0.0
        if self._election is not None:
            self._election.start()
        self._turned_at = time.monotonic()
        try:
            while not self._stopping:
                self.alive()
                busy = bool(self._backlog) or self.core.sweeping or (self._kv_events is not None and self._kv_events.busy)
                ready = dict(poller.poll(0 if busy else int(TICK_S * 1000)))
                now = self._turn()
                self._receive()
                if self._events in ready:
                    self._count_strangers(now)
                self._work(time.monotonic() + SLICE_S)
                now = self._turn()
                # Behind a full backlog there are signs of life not read yet: nobody is suspected meanwhile.
                if self._backlog.bytes <= MAX_BACKLOG_BYTES and (now >= next_tick or self.core.sweeping):
                    next_tick = now + TICK_S
                    self._guard(self._tick, now)
                if self._kv_events is not None:
                    self._guard(self._kv_events.turn, now)
                if now >= next_view:
                    next_view = now + VIEW_S
                    self._guard(self._publish, now)
        finally:
            self.close()

    def close(self) -> None:
        """Release the addresses of a server that will not serve. `serve` does it itself."""
        if self._http is not None:
            self._http.stop()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            if self._election is not None:
                self._election.close()
            if self._kv_events is not None:
                self._kv_events.close()
            self._context.destroy(linger=0)

    def __del__(self) -> None:
        # Not in close: `stop` may come at any time, and must not write to another file that got the number.
        if hasattr(self, "_wake"):
            os.close(self._wake)

    def _turn(self) -> float:
        """The time. Asked twice a turn, so that no silence is judged by a clock that ran on while nobody could be heard."""
        now = time.monotonic()
        if now - self._turned_at > STOOD_STILL_S:
            self.core.excuse(now - self._turned_at, now)
        self._turned_at = now
        if self._election is not None:  # before anything is answered: a leader that was frozen may be none any more
            self.core.role = self._election.role(now)
        return now

    def _receive(self) -> None:
        """Answer lookups and joins at once; put what changes the directory in line: no lookup waits for eight snapshots."""
        for _ in range(RECEIVE_BATCH):
            if self._backlog.bytes > MAX_BACKLOG_BYTES:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                sender, body = frames
                message = self._decoder.decode(body)
            except (ValueError, msgspec.MsgspecError, RecursionError):
                self._garbage += 1
                continue
            now = time.monotonic()
            if isinstance(message, Lookup | Join | ClusterStatus | Report):
                self._handle(message, sender, now)
            else:
                self.core.heard(message, now)
                self._backlog.push(Waiting(sender, message, len(body), now))

    def _work(self, until: float) -> None:
        while self._backlog:
            waiting = self._backlog.pop()
            self._handle(waiting.message, waiting.sender, waiting.received_at)
            if time.monotonic() >= until:
                return

    def _handle(self, message: Message, sender: bytes, now: float) -> None:
        try:
            self._send(self.core.handle(message, sender, now))
        except ProtocolError:
            self._garbage += 1
        except Exception:  # one message must not end the service for everybody
            self._failed(f"a {type(message).__name__} message")

    def _guard(self, what: Callable[[float], None], now: float) -> None:
        try:
            what(now)
        except Exception:  # nor must housekeeping, nor what is only to be looked at
            self._failed(what.__name__)

    def _failed(self, what: str) -> None:
        self._errors += 1
        if self._errors <= 10:
            log.exception("%s failed; please report this", what)

    def _tick(self, now: float) -> None:
        self._send(self.core.tick(now))
        if self._election is not None:
            self.core.masters = list(self._election.masters)
        while self.core.notes:
            log.log(*self.core.notes.popleft())

    def _count_strangers(self, now: float) -> None:
        for _ in range(MAX_EVENTS):
            if not self._events.poll(0):
                return
            recv_monitor_message(self._events)
            self._strangers += 1
            if now - self._stranger_logged_at > LOG_EVERY_S:
                self._stranger_logged_at = now
                log.warning(
                    "a connection was refused: who made it %s (%d since this master started);"
                    " give every master, node and tool the same --key-file",
                    "has a key, and this master none" if self._doorkeeper is None else "has no key, or another cluster's",
                    self._strangers,
                )

    def _send(self, output: list[tuple[bytes, Message]]) -> None:
        for receiver, message in output:
            try:
                self._socket.send_multipart((receiver, encode(message)), zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # gone or not reading: it asks again

    def _publish(self, now: float) -> None:
        core = self.core
        counters = asdict(core.stats)
        counters["name_clashes"] = core.membership.name_clashes
        counters["refused_adds"] = core.directory.refused_adds
        counters["garbage"] = self._garbage
        counters["errors"] = self._errors
        counters["strangers"] = self._strangers
        if core.events is not None:
            told = core.events.stats
            counters["kv_events"], counters["kv_events_dropped"] = told.events, told.dropped
            counters["kv_event_replays"], counters["kv_event_snapshots"] = told.replays, told.snapshots
        refusals: list[dict[str, str | int]] = [
            {"at": _wall(refusal.at, now), "node": refusal.node, "reason": refusal.reason, "times": refusal.times}
            for refusal in core.refusals.last()
        ]
        verdict = core.sharing.verdict(now)
        self.view = View(
            now,
            len(core.directory),
            core.directory.resident_bytes,
            core.warming,
            str(core.shard),
            core.role,
            self._election.problem if self._election is not None else "",
            refusals,
            core.membership.counts(),
            counters,
            core.sharing.roles(),
            len(verdict.engines),
            [sentence(pair) for pair in verdict.unshared],
        )


def run_master(
    listen: str,
    metrics_listen: str | None,
    *,
    heartbeat_s: float = 1.0,
    ttl_s: float = 5.0,
    max_keys: int = DEFAULT_MAX_KEYS,
    max_bytes: int | None = None,
    shard: tuple[int, int] = (0, 1),
    key: ClusterKey | None = None,
    allow_unauthenticated: bool = False,
    etcd: str | None = None,
    cluster: str = "",
    advertise: str = "",
    kv_events: str = "",
    kv_events_replay: str = "",
    ready: Callable[[str, str | None], None] | None = None,
) -> None:
    """Run a master until SIGTERM or SIGINT. `ready` is called with what was bound, once nodes can connect.

    The options are MasterServer's. Raises MasterError when it cannot start.
    Off the main thread no signals are caught: use MasterServer and its `stop` there.
    """
    server = MasterServer(
        listen,
        metrics_listen,
        heartbeat_s=heartbeat_s,
        ttl_s=ttl_s,
        max_keys=max_keys,
        max_bytes=max_bytes,
        shard=shard,
        key=key,
        allow_unauthenticated=allow_unauthenticated,
        etcd=etcd,
        cluster=cluster,
        advertise=advertise,
        kv_events=kv_events,
        kv_events_replay=kv_events_replay,
    )
    log.info(
        "master %s serves: address=%s shard=%s key=%s etcd=%s metrics=%s heartbeat_s=%g ttl_s=%g forget_s=%g max_keys=%d"
        " protocol=%d..%d",
        server.core.incarnation.hex(),
        server.address,
        server.core.shard,
        key.fingerprint if key is not None else "none: whoever reaches it is let in",
        etcd or "off",
        server.metrics_address or "off",
        heartbeat_s,
        ttl_s,
        server.core.membership.forget_s,
        max_keys,
        PROTOCOL_MIN,
        PROTOCOL_MAX,
    )
    if kv_events:
        log.info(
            "KV events are published at tcp://%s, replay=%s: whoever reaches these ports reads which pages the pool holds",
            server.kv_events_address,
            f"tcp://{server.kv_events_replay_address}" if kv_events_replay else "off",
        )
    stacks = StackDump()
    server.alive = stacks.alive
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, lambda *_: server.stop())
    try:
        if ready is not None:
            ready(server.address, server.metrics_address)
        server.serve()
    finally:
        stacks.stop()
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    log.info("master %s stopped", server.core.incarnation.hex())


def _split(listen: str, what: str, default_port: int | None) -> tuple[str, int]:
    try:
        host, port = split_address(listen, default_port)
        if host == "*":
            return "0.0.0.0", port
        # Numeric, because ZMQ binds to interface names and not to host names; IPv4 first, as connecting ZMQ sockets do.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        numeric = min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0]
    except (ValueError, OSError) as error:
        raise MasterError(f"cannot listen on {listen!r} for {what}: {error}") from error
    return str(numeric), port


def _split_events(option: str, given: str, anywhere: bool) -> tuple[str, int]:
    host, port = _split(given, "KV events", None)
    if not anywhere and not is_loopback(host):
        raise MasterError(
            f"{option} {given}: what is published there is read by whoever reaches it, and this cluster has no key. Listen on"
            " 127.0.0.1; or give the cluster a key (hicache-mooncake keygen FILE, --key-file FILE) and keep strangers off this"
            " port; or say that this network has only friends (--allow-unauthenticated)"
        )
    return host, port


def _cannot_bind(listen: str, what: str, error: OSError | zmq.ZMQError) -> MasterError:
    return MasterError(
        f"cannot listen on {listen!r} for {what}: {error.strerror}. Another process may have the port (ss -ltnp shows which):"
        " stop it, or give another address or port 0 for any"
    )


def _bind(router: zmq.Socket[bytes], listen: str, host: str, port: int) -> str:
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, SEND_HWM)
    router.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.BACKLOG, 1024)
    router.setsockopt(zmq.TCP_KEEPALIVE, 1)
    router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    router.setsockopt(zmq.IPV6, int(":" in host))
    try:
        router.bind(f"tcp://{join_address(host, port)}")
    except zmq.ZMQError as error:
        raise _cannot_bind(listen, "nodes", error) from error
    return bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode().removeprefix("tcp://")


def _reached_at(advertise: str, bound: str) -> str:
    """The address that goes into etcd."""
    host, port = split_address(bound)
    if advertise:
        try:
            host, port = split_address(advertise, port)
        except ValueError as error:
            raise MasterError(f"--advertise {advertise!r}: {error}") from None
    if is_wildcard(host):
        raise MasterError(
            f"{join_address(host, port)} is an address to listen on, which no node can connect to: say under which host or"
            " host:port nodes reach this master (--advertise)"
        )
    return join_address(host, port)


def _wall(at: float, now: float) -> str:
    """A time of the monotonic clock as an operator reads it."""
    return (datetime.now(UTC) - timedelta(seconds=max(0.0, now - at))).isoformat(timespec="seconds")


# --------------------------------------------------------------------------- HTTP


class _Metrics(Collector):  # type: ignore[misc]
    """A prometheus collector over the server's view."""

    def __init__(self, server: MasterServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Any]:
        view = self._server.view
        nodes = GaugeMetricFamily("hicache_master_nodes", "Nodes by state.", labels=["state"])
        for state, count in view.nodes.items():
            nodes.add_metric([state], count)
        yield nodes
        yield GaugeMetricFamily("hicache_master_keys", "Distinct pages in the directory.", value=view.keys)
        yield GaugeMetricFamily("hicache_master_directory_bytes", "Memory of the directory, estimated.", value=view.bytes)
        yield GaugeMetricFamily(
            "hicache_master_warming", "1 until everything is known that the nodes hold.", value=int(view.warming)
        )
        yield GaugeMetricFamily("hicache_master_leader", "1 while this master leads its shard.", value=int(view.role == LEADER))
        shard = GaugeMetricFamily("hicache_master_shard_info", "Which part of the keys this master has.", labels=["shard"])
        shard.add_metric([view.shard], 1)
        yield shard
        engines = GaugeMetricFamily("hicache_master_engines", "Engines that have said who they are, by role.", labels=["role"])
        for role, count in view.engines.items():
            engines.add_metric([role], count)
        yield engines
        yield GaugeMetricFamily(
            "hicache_master_unshared_engines",
            "Prefill and decode engines that should share pages with the other side and cannot; /health says why.",
            value=view.unshared_engines,
        )
        for field_name, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"hicache_master_{name}", text, value=view.counters.get(field_name, 0))


def _serve_http(listen: str, server: MasterServer) -> Observatory:
    def health() -> tuple[bool, dict[str, object]]:
        view = server.view
        well = time.monotonic() - view.at < STALLED_S
        return well, {
            "status": "ok" if well else "stalled",
            "warming": view.warming,
            "shard": view.shard,
            "role": view.role,
            "nodes": view.nodes,
            "keys": view.keys,
            "strangers": view.counters["strangers"],
            "etcd": view.etcd,
            "refusals": view.refusals,
            "engines": view.engines,
            "unshared": view.unshared,
        }

    host, port = _split(listen, "metrics", None)
    try:
        return Observatory(join_address(host, port), _Metrics(server), health)
    except OSError as error:
        raise _cannot_bind(listen, "metrics", error) from error
