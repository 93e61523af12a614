"""The master as a process: a ZMQ socket, a clock and an HTTP port around `MasterCore`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import zmq
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hicache_mooncake.config_values import join_address, split_address
from hicache_mooncake.observe import Observatory
from hicache_mooncake.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    ClusterStatus,
    Join,
    Lookup,
    Message,
    ProtocolError,
    ToMaster,
    decoder,
    encode,
)

from .core import MasterCore
from .membership import STATES

log = logging.getLogger("hicache_master")

DEFAULT_PORT = 50051
DEFAULT_MAX_KEYS = 50_000_000
SEND_HWM = 256
"""Answers queued per peer. Those to a peer that does not read are lost, and it asks again."""
RECEIVE_HWM = 32
"""Messages queued per peer before it must wait. ZMQ lets it go on when half of them are done: many would make long pauses."""
MAX_BACKLOG_BYTES = 32 << 20
"""Updates and snapshots that wait their turn behind lookups. Beyond it nothing more is read until some are done."""
RECEIVE_BATCH = 64
SLICE_S = 0.005
TICK_S = 0.05
VIEW_S = 0.2
STALLED_S = 10.0

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
}


class MasterError(ValueError):
    """The master cannot start; the text says what to change."""


@dataclass(slots=True)
class View:
    """What the HTTP side sees of the master: a copy, so that a scrape takes nothing from the loop."""

    at: float
    keys: int = 0
    nodes: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


class MasterServer:
    """Binds in the constructor, serves in `serve` on the caller's thread until `stop`, from any thread. Raises MasterError when
    an address cannot be had. `address` and `metrics_address` are what was bound, `host:port`."""

    def __init__(
        self,
        listen: str,
        metrics_listen: str | None = None,
        *,
        heartbeat_s: float = 1.0,
        ttl_s: float = 5.0,
        forget_s: float = 60.0,
        max_keys: int = DEFAULT_MAX_KEYS,
    ) -> None:
        if not 0 < heartbeat_s < ttl_s:
            raise MasterError(
                f"heartbeat_s {heartbeat_s:g} and ttl_s {ttl_s:g}: the heartbeat must be the shorter, and positive"
            )
        if max_keys < 1:
            raise MasterError(f"max_keys {max_keys}: must be at least 1")
        self.core = MasterCore(os.urandom(8), heartbeat_s=heartbeat_s, ttl_s=ttl_s, forget_s=forget_s, max_keys=max_keys)
        self.view = View(time.monotonic(), nodes=dict.fromkeys(STATES, 0), counters=dict.fromkeys(_COUNTERS, 0))
        self._garbage = 0
        self._errors = 0
        self._decoder = decoder(ToMaster)
        self._backlog: deque[tuple[bytes, Message, int, float]] = deque()
        self._backlog_bytes = 0
        self._stopping = False
        self._context = zmq.Context(io_threads=1)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._http: Observatory | None = None
        try:
            self._socket, self.address = _bind(self._context, listen)
            self.metrics_address: str | None = None
            if metrics_listen:
                self._http = _serve_http(metrics_listen, self)
                self.metrics_address = self._http.address
        except BaseException:
            self._context.destroy(linger=0)
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
        next_tick = next_view = 0.0
        try:
            while not self._stopping:
                busy = bool(self._backlog) or self.core.sweeping
                poller.poll(0 if busy else int(TICK_S * 1000))
                self._receive()
                self._work(time.monotonic() + SLICE_S)
                now = time.monotonic()
                # Behind a full backlog there are signs of life not read yet: nobody is suspected meanwhile.
                if self._backlog_bytes <= MAX_BACKLOG_BYTES and (now >= next_tick or self.core.sweeping):
                    next_tick = now + TICK_S
                    self._send(self.core.tick(now))
                    while self.core.notes:
                        log.log(*self.core.notes.popleft())
                if now >= next_view:
                    next_view = now + VIEW_S
                    self._publish(now)
        finally:
            self.close()

    def close(self) -> None:
        """Release the addresses of a server that will not serve. `serve` does it itself."""
        if self._http is not None:
            self._http.stop()
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()

    def __del__(self) -> None:
        # Not in close: `stop` may come at any time, and must not write to another file that got the number.
        if hasattr(self, "_wake"):
            os.close(self._wake)

    def _receive(self) -> None:
        """Answer lookups and joins at once; put what changes the directory in line: no lookup waits for eight snapshots."""
        for _ in range(RECEIVE_BATCH):
            if self._backlog_bytes > MAX_BACKLOG_BYTES:
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
            if isinstance(message, Lookup | Join | ClusterStatus):
                self._handle(message, sender, now)
            else:
                self.core.heard(message, now)
                self._backlog.append((sender, message, len(body), now))
                self._backlog_bytes += len(body)

    def _work(self, until: float) -> None:
        while self._backlog:
            sender, message, size, received_at = self._backlog.popleft()
            self._backlog_bytes -= size
            self._handle(message, sender, received_at)
            if time.monotonic() >= until:
                return

    def _handle(self, message: Message, sender: bytes, now: float) -> None:
        try:
            self._send(self.core.handle(message, sender, now))
        except ProtocolError:
            self._garbage += 1
        except Exception:  # one message must not end the service for everybody
            self._errors += 1
            if self._errors <= 10:
                log.exception("a %s message failed; please report this", type(message).__name__)

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
        self.view = View(now, len(core.directory), core.membership.counts(), counters)


def run_master(
    listen: str,
    metrics_listen: str | None,
    *,
    heartbeat_s: float = 1.0,
    ttl_s: float = 5.0,
    max_keys: int = DEFAULT_MAX_KEYS,
    ready: Callable[[str, str | None], None] | None = None,
) -> None:
    """Run a master until SIGTERM or SIGINT. `ready` is called with what was bound, once nodes can connect.

    Raises MasterError when it cannot start. Off the main thread no signals are caught: use MasterServer and its `stop` there.
    """
    server = MasterServer(listen, metrics_listen, heartbeat_s=heartbeat_s, ttl_s=ttl_s, max_keys=max_keys)
    log.info(
        "master %s serves: address=%s metrics=%s heartbeat_s=%g ttl_s=%g forget_s=%g max_keys=%d protocol=%d..%d",
        server.core.incarnation.hex(),
        server.address,
        server.metrics_address or "off",
        heartbeat_s,
        ttl_s,
        server.core.membership.forget_s,
        max_keys,
        PROTOCOL_MIN,
        PROTOCOL_MAX,
    )
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, lambda *_: server.stop())
    try:
        if ready is not None:
            ready(server.address, server.metrics_address)
        server.serve()
    finally:
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


def _cannot_bind(listen: str, what: str, error: OSError | zmq.ZMQError) -> MasterError:
    return MasterError(
        f"cannot listen on {listen!r} for {what}: {error.strerror}. Another process may have the port (ss -ltnp shows which):"
        " stop it, or give another address or port 0 for any"
    )


def _bind(context: zmq.Context[zmq.Socket[bytes]], listen: str) -> tuple[zmq.Socket[bytes], str]:
    host, port = _split(listen, "nodes", DEFAULT_PORT)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, SEND_HWM)
    router.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    router.setsockopt(zmq.BACKLOG, 1024)
    router.setsockopt(zmq.TCP_KEEPALIVE, 1)
    router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    router.setsockopt(zmq.IPV6, int(":" in host))
    try:
        router.bind(f"tcp://{join_address(host, port)}")
    except zmq.ZMQError as error:
        router.close()
        raise _cannot_bind(listen, "nodes", error) from error
    return router, bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode().removeprefix("tcp://")


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
        for field_name, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"hicache_master_{name}", text, value=view.counters.get(field_name, 0))


def _serve_http(listen: str, server: MasterServer) -> Observatory:
    def health() -> tuple[bool, dict[str, object]]:
        view = server.view
        well = time.monotonic() - view.at < STALLED_S
        return well, {"status": "ok" if well else "stalled", "nodes": view.nodes, "keys": view.keys}

    host, port = _split(listen, "metrics", None)
    try:
        return Observatory(join_address(host, port), _Metrics(server), health)
    except OSError as error:
        raise _cannot_bind(listen, "metrics", error) from error
