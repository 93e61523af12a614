"""The connected socket on which both ends of a verbs link talk: whole messages each way, and nothing waits for the peer."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator

from hicache_mooncake.transfer.transport import TransportError
from hicache_mooncake.transfer.verbs.handshake import Control, Frames, frame
from hicache_mooncake.transfer.verbs.progress import Progress

_READ = 64 << 10
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 30_000))
"""A peer whose host is gone is noticed without traffic."""


class Channel:
    """Not thread-safe. Owns the socket."""

    def __init__(self, sock: socket.socket, progress: Progress, ready: Callable[[int], None]) -> None:
        """`ready` is called in the thread of `progress`, from `open` on, when something can be heard or `flush`ed."""
        self._sock, self._progress, self._ready = sock, progress, ready
        self._frames = Frames()
        self._unsent = bytearray()
        self.peer = _name(sock)
        """Who it is, for messages."""

    def open(self) -> None:
        self._sock.setblocking(False)
        if self._sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    self._sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._progress.watch(self._sock.fileno(), self._ready)

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken."""
        return len(self._unsent)

    def say(self, message: Control) -> None:
        """Raises TransportError, `peer`, when the channel is broken."""
        self._unsent += frame(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the peer takes now. Raises TransportError, `peer`."""
        waited = len(self._unsent)
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise TransportError("peer", f"the channel to {self.peer} is broken: {error}") from error
        if self._unsent:
            self._progress.watch(self._sock.fileno(), self._ready, select.EPOLLIN | select.EPOLLOUT)
        elif waited:
            self._progress.watch(self._sock.fileno(), self._ready)

    def hear(self) -> Iterator[Control]:
        """What has come. Raises TransportError, `peer`, when the channel is broken, closed by the peer, or has what is no
        message."""
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            raise TransportError("peer", f"the channel to {self.peer} is broken: {error}") from error
        if not data:
            raise TransportError("peer", f"{self.peer} has closed the channel")
        yield from self._frames.feed(data)

    def end(self, message: Control | None) -> None:
        """Closes it, after a last message if the peer takes it at once. May be called again."""
        if message is not None:
            self._unsent += frame(message)
            with contextlib.suppress(OSError):
                self._sock.send(self._unsent)
        if self._sock.fileno() >= 0:
            self._progress.unwatch(self._sock.fileno())
        self._sock.close()


def _name(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:
        return "the peer"
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a process of this host"
