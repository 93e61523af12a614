"""How two transfer engines meet: the messages between them, how one is dialled, and who comes in at a listening one.

A control connection begins with proofs of membership, where there is a key, and with Greet and Greeted. Then the side that
connected asks for one transport after the other with Open until one works, and from then on each side says what it shares.
The channels of a transport are further connections: they begin with the same proofs, and a Channel says what they are for.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hicache_mooncake import protocol as p
from hicache_mooncake import security
from hicache_mooncake.config_values import join_address, split_address
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer import tcp

VERSION = 1
_MAX_STRANGERS = 64
_MAX_NAME = 128
_MAX_FIRST_BYTES = 4096
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 30_000))
"""A peer whose host is gone is noticed within half a minute."""
_log = QuietLog(logging.getLogger("hicache_mooncake.engine"))


class Sample(p.Message):
    """Where some bytes lie in a process, by which it is seen whether another process may copy from and to it."""

    pid: int
    address: int
    content: bytes


class Greet(p.Message):
    version: int
    name: str
    boot_id: str
    """Of the host's kernel: two ends that have the same are on one host."""
    schemes: list[str]
    sample: Sample | None = None
    """Of who has memory without a descriptor, which shared memory serves only where the peer may reach into the process."""


class Greeted(p.Message):
    boot_id: str
    socket: str
    """UNIX socket on which this engine listens, too; a leading @ says that it is abstract."""
    schemes: list[str]
    sample: Sample | None = None


class Open(p.Message):
    """Try this transport. `budget_s`: for its whole handshake."""

    scheme: str
    channels: int
    budget_s: float


class Opened(p.Message):
    ticket: bytes


class Channel(p.Message):
    """The first message of a connection that is channel number `index` of what `ticket` was given for."""

    ticket: bytes
    index: int


class Settled(p.Message):
    """What came of the handshake at this end. Empty: it has a link."""

    error: str = ""


class Share(p.Message):
    """Memory that the peer may reach."""

    name: str
    address: int
    length: int
    token: bytes


class Unshare(p.Message):
    address: int


class Shared(p.Message):
    """All that was registered when the link was made has been told."""


greeted_decoder = p.decoder(Greeted | p.Refused)
opened_decoder = p.decoder(Opened | p.Refused)
settled_decoder = p.decoder(Settled)
asked_decoder = p.decoder(Open | Settled)
told_decoder = p.decoder(Share | Unshare | Shared)
_first_decoder = p.decoder(Greet | Channel)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def check_name(name: str) -> None:
    """Raises ValueError."""
    if not name or len(name.encode()) > _MAX_NAME or any(c in name for c in "@\n\r\0"):
        raise ValueError(f"the name of an engine has 1 to {_MAX_NAME} bytes and no @: {name!r}")


def split_name(address: str) -> tuple[str, str, int]:
    """An engine's address as (name, host, port). Raises ValueError with what is wrong."""
    name, at, where = address.rpartition("@")
    if not at:
        raise ValueError(f"{address!r}: the address of an engine is name@host:port")
    check_name(name)
    return (name, *split_address(where))


def join_name(name: str, host: str, port: int) -> str:
    return f"{name}@{join_address(host, port)}"


def _unix_name(path: str) -> str:
    return "\0" + path[1:] if path.startswith("@") else path


def _bind(sock: socket.socket, path: str) -> None:
    """Takes the place of a socket that nobody serves any more, as one is left by who is killed. Raises OSError."""
    try:
        sock.bind(_unix_name(path))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise OSError(error.errno, f"unix_socket {path}: {error.strerror}") from error
        with socket.socket(socket.AF_UNIX) as probe:
            if not Path(path).is_socket() or probe.connect_ex(path) != errno.ECONNREFUSED:
                what = f"unix_socket {path} is another's, or no socket: give each engine a path of its own"
                raise OSError(error.errno, what) from error
        os.unlink(path)
        sock.bind(_unix_name(path))


class Dialler:
    """How to reach one engine. `data_key`: of the cluster, or empty."""

    def __init__(self, address: str, data_key: bytes, requester: str) -> None:
        name, host, port = split_name(address)
        self._peer = p.Peer(node=name, incarnation=b"", host=host, port=port)
        self._data_key, self._requester = data_key, requester

    def tcp(self, deadline: float) -> socket.socket:
        """Connected, proved. Raises OSError, TimeoutError or ProtocolError; TimeoutErrors are OSErrors."""
        sock = socket.create_connection((self._peer.host, self._peer.port), timeout=_left(deadline))
        try:
            tcp.prepare(sock)
            keep_alive(sock)
            self._prove(sock, deadline)
        except BaseException:
            sock.close()
            raise
        return sock

    def unix(self, path: str, deadline: float) -> socket.socket:
        """The same, over its UNIX socket."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(_left(deadline))
            sock.connect(_unix_name(path))
            sock.settimeout(None)
            self._prove(sock, deadline)
        except BaseException:
            sock.close()
            raise
        return sock

    def _prove(self, sock: socket.socket, deadline: float) -> None:
        if self._data_key:
            tcp.prove(sock, self._peer, self._data_key, self._requester, deadline)
        tcp.set_timeouts(sock, _left(deadline))


def keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def unbounded(sock: socket.socket) -> socket.socket:
    """As a transport or a Wire wants it: without the bounds of the handshake."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(16))
    return sock


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    return left


class Gathering:
    """The channels that are to come for one ticket. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._channels: dict[int, socket.socket] = {}
        self._count = count
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False

    def put(self, index: int, channel: socket.socket) -> bool:
        """False when it is not wanted; it stays the caller's then."""
        with self._lock:
            if self._closed or index in self._channels or not 0 <= index < self._count:
                return False
            self._channels[index] = channel
            if len(self._channels) == self._count:
                os.eventfd_write(self._wake, 1)
            return True

    def take(self, control: int, deadline: float) -> list[socket.socket] | None:
        """All of them, in order; None when something came on the descriptor `control` before, or the deadline."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(control, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        with self._lock:
            if len(self._channels) < self._count:
                return None
            channels, self._channels = self._channels, {}
            return [channels[index] for index in sorted(channels)]

    def close(self) -> None:
        """Nothing is taken any more, and what has not been taken is closed."""
        with self._lock:
            self._closed = True
            os.close(self._wake)
            for channel in self._channels.values():
                channel.close()


Visitor = Callable[[socket.socket, Greet], None]


def same_host(sock: socket.socket) -> bool:
    """Whether the other end of this connection is on this host: over TCP, when it has the address that it was connected to."""
    return sock.family == socket.AF_UNIX or sock.getpeername()[0] == sock.getsockname()[0]


class Door:
    """Listens on TCP and on a UNIX socket, asks for proofs, and hands connections on: a control connection to `visit`, with its
    Greet, on a thread that is its own; a channel to the `Gathering` of its ticket."""

    def __init__(
        self, name: str, listen: str, unix: str, data_key: bytes, visit: Visitor, *, own_host_only: bool = False
    ) -> None:
        """Raises OSError, and ValueError for an address that is none."""
        self._name, self._data_key, self._visit, self._own_host_only = name, data_key, visit, own_host_only
        self._lock = threading.Lock()
        self._strangers = 0
        self._tickets: dict[bytes, Gathering] = {}
        self._open: set[socket.socket] = set()
        self._closed = False
        self.socket = unix or f"@hicache-mooncake-engine-{os.urandom(8).hex()}"
        listeners = [tcp.listen(listen)]
        try:
            listeners.append(socket.socket(socket.AF_UNIX))
            _bind(listeners[1], self.socket)
            if unix:
                os.chmod(unix, 0o600)
            listeners[1].listen(256)
        except OSError:
            for listener in listeners:
                listener.close()
            raise
        self._listeners = listeners
        self.port: int = listeners[0].getsockname()[1]
        self._threads = [
            threading.Thread(target=self._accept, args=(each,), name="engine-listen", daemon=True) for each in listeners
        ]
        for thread in self._threads:
            thread.start()

    def ticket(self, count: int) -> tuple[bytes, Gathering]:
        with self._lock:
            ticket, gathering = os.urandom(16), Gathering(count)
            self._tickets[ticket] = gathering
        return ticket, gathering

    def void(self, ticket: bytes) -> None:
        """Once for each ticket."""
        with self._lock:
            gathering = self._tickets.pop(ticket)
        gathering.close()

    def close(self) -> None:
        """Waits for the listening threads, not for visits."""
        with self._lock:
            self._closed = True
            strangers = list(self._open)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for sock in strangers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()
        if not self.socket.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self.socket)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _log(logging.WARNING, "accept", f"engine {self._name} cannot take connections: {error}")
                time.sleep(0.1)  # no descriptors left, say
                continue
            with self._lock:
                full = self._strangers >= _MAX_STRANGERS
                self._strangers += not full
            if full:
                sock.close()
                continue
            try:
                threading.Thread(target=self._meet, args=(sock,), name="engine-peer", daemon=True).start()
            except RuntimeError:
                with self._lock:
                    self._strangers -= 1
                sock.close()

    def _meet(self, sock: socket.socket) -> None:
        first, taken = None, False
        with self._lock:
            self._open.add(sock)
        try:
            first = self._first(sock)
            if isinstance(first, Channel):
                with self._lock:
                    gathering = self._tickets.get(first.ticket)
                taken = gathering is not None and gathering.put(first.index, unbounded(sock))
        except (OSError, p.ProtocolError) as error:
            _log(logging.WARNING, "stranger", f"engine {self._name} refused a connection: {error}")
        finally:
            with self._lock:
                self._open.discard(sock)
                self._strangers -= 1
        if isinstance(first, Greet):
            self._visit(sock, first)
        elif not taken:
            sock.close()

    def _first(self, sock: socket.socket) -> Greet | Channel:
        deadline = time.monotonic() + security.HANDSHAKE_S
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            tcp.prepare(sock)
            keep_alive(sock)
        tcp.set_timeouts(sock, security.HANDSHAKE_S)
        if self._own_host_only and not same_host(sock):
            what = "has no key, so that only processes of its own host may be its peers: give key_file to both"
            tcp.refuse(sock, f"engine {self._name} {what}")
            raise p.ProtocolError(f"{sock.getpeername()[0]} is another host, and there is no key: set key_file on both")
        proved = tcp.accept_proof(sock, self._data_key, self._name, deadline)
        try:
            first = tcp.receive_message(sock, _first_decoder, deadline, _MAX_FIRST_BYTES)
            assert isinstance(first, Greet | Channel)
            if isinstance(first, Greet):
                if self._data_key and first.name != proved:
                    raise p.ProtocolError(f"{proved!r} calls itself {first.name!r}")
                if first.version != VERSION:
                    raise p.ProtocolError(f"it speaks version {first.version}")
                check_name(first.name)
        except (ValueError, p.ProtocolError) as error:
            detail = f"this is engine {self._name} of version {VERSION}, and it did not understand: {error}"
            if not self._data_key:
                detail += ". It has no key: has the other side one?"
            tcp.refuse(sock, detail)
            raise p.ProtocolError(str(error)) from error
        return first
