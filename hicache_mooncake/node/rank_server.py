"""The node's UNIX socket: the ranks of this host and their movers, a thread each."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Protocol

from hicache_mooncake import protocol as p
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.wire import Wire, WireClosed, WireTimeout

log = logging.getLogger(__name__)

_from_client = p.decoder(p.FromClient)

_MAX_CONNECTIONS = 1024
_SEND_TIMEOUT_S = 5.0


class Serving(Protocol):
    """What ranks and movers are served with: a node."""

    def welcome(self, version: int, role: str, *, cold: bool) -> tuple[p.Welcome, list[int]]:
        """The answer to a Hello, and the descriptors that go with it."""

    def handle(self, owner: int, message: p.Message) -> p.Message | None: ...

    def answered(self, message: p.Message) -> None:
        """Its answer is on its way, or could not be sent: the time for what nobody waits for."""

    def gone(self, owner: int) -> None:
        """Its connection has ended."""

    def new_owner(self) -> int: ...


class RankServer:
    """Bound with `bind`, serving from `start` to `stop`. Counters are written under `_lock`."""

    def __init__(self, node: Serving, path: str) -> None:
        self.path = Path(path)
        self.refused = 0
        self._node = node
        self._lock = threading.Lock()
        self._connections: dict[int, Wire] = {}
        self._last_at = time.monotonic()
        self._stopping = False
        self._quiet = QuietLog(log)
        self._resources = contextlib.ExitStack()

    def bind(self) -> None:
        """Raises OSError, or ValueError with a sentence for the operator; what it opened goes with `stop`."""
        path = self.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.parent.stat()
        if owner.st_uid not in (os.getuid(), 0) or (owner.st_mode & stat.S_IWOTH and not owner.st_mode & stat.S_ISVTX):
            raise ValueError(f"--socket {path}: {path.parent} belongs to another user or is writable by everyone")
        lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._resources.callback(os.close, lock_fd)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"--socket {path}: another node serves this socket. Stop it, or choose another --socket"
            ) from error
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # left by a node that was killed: we hold its lock, so it is gone
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._resources.callback(self._socket.close)
        old_mask = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(old_mask)

    def start(self) -> None:
        self._socket.listen(256)  # only now: whoever can connect can be served
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def hang_up(self) -> None:
        """No new connections, and an end to those that there are."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with self._lock:
            self._stopping = True
            wires = list(self._connections.values())
        for wire in wires:
            wire.shutdown()

    def close(self) -> None:
        self._stopping = True
        self._resources.close()

    def idle_seconds(self) -> float:
        """How long nobody has been connected."""
        with self._lock:
            return 0.0 if self._connections else time.monotonic() - self._last_at

    def report(self) -> dict[str, int | float | str | bool]:
        with self._lock:
            return {"connections": len(self._connections), "connections_refused": self.refused}

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._stopping:
                    return
                time.sleep(0.05)  # out of descriptors: serve those that are connected
                continue
            owner, wire = self._node.new_owner(), Wire(sock)
            with self._lock:
                full = self._stopping or len(self._connections) >= _MAX_CONNECTIONS
                if full:
                    self.refused += 1
                else:
                    self._connections[owner] = wire
            if full:
                wire.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(owner, wire), name=f"client-{owner}", daemon=True).start()
            except RuntimeError as error:  # no more threads for this user or container: not the end of the socket
                with self._lock:
                    self._connections.pop(owner, None)
                    self.refused += 1
                wire.close()
                self._quiet(logging.ERROR, "thread", f"a client was turned away: {error}. Raise the limit of processes")
                time.sleep(0.05)

    def _serve(self, owner: int, wire: Wire) -> None:
        client = "?"
        try:
            hello = wire.receive(_from_client, time.monotonic() + _SEND_TIMEOUT_S)
            if not isinstance(hello, p.Hello):
                raise p.ProtocolError("the first message must be Hello")
            client = f"{hello.role} {hello.client}"
            version = p.negotiate(hello.version_min, hello.version_max)
            if version is None:
                reason = (
                    f"this node speaks protocol {p.PROTOCOL_MIN}..{p.PROTOCOL_MAX}, the client "
                    f"{hello.version_min}..{hello.version_max}: install the same hicache-mooncake release on both sides"
                )
                log.error("refused %s: %s", client, reason)
                with self._lock:
                    self.refused += 1
                wire.send(p.Refused(reason), deadline=time.monotonic() + _SEND_TIMEOUT_S)
                return
            welcome, fds = self._node.welcome(version, hello.role, cold=hello.cold)
            wire.send(welcome, fds, time.monotonic() + _SEND_TIMEOUT_S)
            while True:
                message = wire.receive(_from_client)
                _want_no_descriptors(wire)
                answer = self._node.handle(owner, message)
                try:
                    if answer is not None:
                        wire.send(answer, deadline=time.monotonic() + _SEND_TIMEOUT_S)
                finally:
                    self._node.answered(message)
        except WireClosed:
            pass
        except (WireTimeout, p.ProtocolError) as error:
            self._quiet(logging.WARNING, "client", f"connection of {client} ended: {error}")
        except Exception:
            log.exception("connection of %s ended by an internal error", client)
        finally:
            self._node.gone(owner)
            with self._lock:
                self._connections.pop(owner, None)
                self._last_at = time.monotonic()
            wire.close()


def _want_no_descriptors(wire: Wire) -> None:
    """Raises ProtocolError when some have come: they would be kept as long as the connection, and this process has only so
    many."""
    fds = wire.take_fds()
    for fd in fds:
        os.close(fd)
    if fds:
        raise p.ProtocolError(f"{len(fds)} descriptors came with a message that has none")
