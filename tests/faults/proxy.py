"""A TCP proxy that does to a connection what networks and dying hosts do: delay, throttle, cut, swallow, corrupt, refuse.

It knows nothing of what it carries. What comes from one side without a byte from the other in between is one *answer*, and
faults are placed by how far into an answer they strike, so that they can hit a header or the middle of a page.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

_PIECE = 16 << 10


@dataclass(frozen=True)
class Faults:
    """What is wrong with the network now. The default is nothing.

    `after_bytes`: how much of an answer passes before the fault strikes. Everything but `corrupt` then goes on to its end.
    """

    after_bytes: int = 0
    delay_s: float = 0.0
    """Before the byte at `after_bytes` of each answer."""
    rate_bytes_s: float = 0.0
    """The rest of an answer passes at this rate."""
    cut: bool = False
    """The connection is reset there, at both ends."""
    swallow: bool = False
    """Nothing more passes, and nobody is told, as long as this lasts; later it does."""
    corrupt: bool = False
    """One bit of the byte there is flipped."""
    die_after_s: float | None = None
    """Every new connection is reset after so long, whatever is on it."""
    upstream: bool = False
    """The faults are in what the client sends. Otherwise in what it gets."""


class FaultProxy:
    """Listens on a port of its own (`port`) and passes connections on to `target` (host, port). `faults` may be replaced at any
    time, also for what is under way. Thread-safe. Close it, or use it as a context manager."""

    def __init__(self, target: tuple[str, int], faults: Faults | None = None) -> None:
        self.target = target
        self.accepted = 0
        """Connections since the start."""
        self.cuts = 0
        self.asked_bytes = 0
        """That came from clients."""
        self._faults = faults or Faults()
        self._changed = threading.Condition()
        self._closed = False
        self._pairs: set[_Pair] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.accept()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        with self._changed:
            self._faults = faults
            self._changed.notify_all()

    @property
    def connections(self) -> int:
        """Open now."""
        with self._changed:
            return len(self._pairs)

    def refuse(self) -> None:
        """Nobody listens on the port any more; connections that are open stay."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            listener.close()

    def accept(self) -> None:
        """Listen (again), on the same port as before."""
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="proxy-accept", daemon=True).start()

    def drop_all(self) -> None:
        """Reset every connection that is open."""
        with self._changed:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.reset()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.refuse()
        self.drop_all()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._open, args=(client,), name="proxy-connection", daemon=True).start()

    def _open(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.target, timeout=10)
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _Pair(client, server)
        with self._changed:
            self._pairs.add(pair)
        lifetime = self._faults.die_after_s
        if lifetime is not None:
            timer = threading.Timer(lifetime, pair.reset)
            timer.daemon = True
            timer.start()
        up = threading.Thread(target=self._pass, args=(pair, True), name="proxy-up", daemon=True)
        up.start()
        self._pass(pair, False)
        up.join()
        with self._changed:
            self._pairs.discard(pair)
        pair.close()

    def _pass(self, pair: _Pair, upstream: bool) -> None:
        source, target = (pair.client, pair.server) if upstream else (pair.server, pair.client)
        try:
            while data := source.recv(_PIECE):
                at = pair.answered(upstream, len(data))
                if upstream:
                    with self._changed:
                        self.asked_bytes += len(data)
                self._send(pair, target, data, at, upstream)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pair.reset()

    def _send(self, pair: _Pair, target: socket.socket, data: bytes, at: int, upstream: bool) -> None:
        """Pass on what lies at `at` of an answer. Raises OSError where the connection is to end."""
        faults = self._faults
        if faults.upstream != upstream or at + len(data) <= faults.after_bytes:
            target.sendall(data)
            return
        strike = max(0, faults.after_bytes - at)
        if strike:
            target.sendall(data[:strike])
        if at + strike == faults.after_bytes:
            if faults.delay_s:
                self._sleep(pair, faults.delay_s)
            if faults.corrupt:
                data = data[:strike] + bytes([data[strike] ^ 1]) + data[strike + 1 :]
        if faults.cut:
            self.cuts += 1
            raise ConnectionResetError("cut")
        with self._changed:
            while (faults := self._faults).swallow and not self._closed and not pair.ended:
                self._changed.wait(0.05)
        step = 4096 if faults.rate_bytes_s else _PIECE
        for first in range(strike, len(data), step):
            piece = data[first : first + step]
            if faults.rate_bytes_s:
                self._sleep(pair, pair.ahead(at + first + len(piece) - faults.after_bytes, faults.rate_bytes_s))
            target.sendall(piece)

    def _sleep(self, pair: _Pair, seconds: float) -> None:
        """Not longer than the connection or the proxy lives, or than the faults stay as they are."""
        until, faults = time.monotonic() + seconds, self._faults
        with self._changed:
            while (left := until - time.monotonic()) > 0 and not pair.ended and not self._closed and self._faults is faults:
                self._changed.wait(min(left, 0.05))


@dataclass(eq=False)
class _Pair:
    """Both ends of a connection, and how much of the present answer has come."""

    client: socket.socket
    server: socket.socket
    ended: bool = False
    _upstream: bool = True
    _at: int = 0
    _throttled_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, upstream: bool, size: int) -> int:
        """Where in its answer a piece lies."""
        with self._lock:
            if upstream != self._upstream:
                self._upstream, self._at, self._throttled_at = upstream, 0, 0.0
            at, self._at = self._at, self._at + size
            return at

    def ahead(self, size: int, rate_bytes_s: float) -> float:
        """How long it is until so much of an answer may have passed. A proxy that got no turn on a busy machine catches up."""
        with self._lock:
            now = time.monotonic()
            self._throttled_at = self._throttled_at or now
            return max(0.0, self._throttled_at + size / rate_bytes_s - now)

    def reset(self) -> None:
        """Both ends see a reset (or, where they are in the middle of something, an end)."""
        self.ended = True
        for sock in (self.client, self.server):
            _linger(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes whoever reads it here

    def close(self) -> None:
        self.client.close()
        self.server.close()


def _linger(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _reset(sock: socket.socket) -> None:
    _linger(sock)
    sock.close()


class SilentPort:
    """A port that does not answer a connect at all, like that of a host without power: its backlog is full."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port = int(self._listener.getsockname()[1])
        self._plugs = [socket.socket() for _ in range(4)]
        for plug in self._plugs:
            plug.setblocking(False)
            plug.connect_ex(("127.0.0.1", self.port))

    def close(self) -> None:
        for sock in (self._listener, *self._plugs):
            sock.close()
