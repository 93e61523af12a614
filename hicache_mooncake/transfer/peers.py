"""A reader's connections to other nodes' data ports, how they are made, and when to leave a node alone."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import BLAME_AFTER_S, Admission, Breaker
from hicache_mooncake.config_values import MAX_LANES
from hicache_mooncake.transfer.tcp import PeerConnection
from hicache_mooncake.transfer.tls import DataSocket, Tls
from hicache_mooncake.wire import Soon

_BREAKER_FIRST_S, _BREAKER_MAX_S = 0.5, 8.0
_MAX_BREAKERS = 1024
_MAX_IDLE = 512
_IDLE_S = 300.0
"""The other end closes after twice as long."""
_MAX_CONNECTING = 64
_MAX_IDLE_EACH = MAX_LANES

Address = tuple[str, str, int]


def address_of(peer: p.Peer) -> Address:
    """Connections are to a node at an address: whoever else listens there has not proved to be that node."""
    return (peer.node, peer.host, peer.port)


class Connecting:
    """An attempt to connect, on a thread of its own until it is among `Peers.connected()`. Then one of `connection` and `error`
    is set; the connection is the caller's."""

    def __init__(self, peer: p.Peer, deadline: float) -> None:
        self.peer = peer
        self.deadline = deadline
        self.began = time.monotonic()
        self.connection: PeerConnection | None = None
        self.error: Exception | None = None
        self.at_fault = True
        """Of an error: the peer is, and not this process, which has no thread or no time."""
        self.abandoned = False


class Peers:
    """Idle connections to other nodes' data ports, as many each as were used at once, and a breaker each.

    A connection that is in use is its user's: `keep` gives it back. One user's thread; connecting goes on beside it, so that
    many dead peers cost no more than one.
    """

    def __init__(self, connect: Callable[..., PeerConnection] = PeerConnection) -> None:
        self._connect = connect
        self.soon = Soon()
        """Whether to look for the beginning of an answer before sleeping for it."""
        self._idle: dict[PeerConnection, float] = {}
        """Since when; longest idle first."""
        self._of: dict[Address, list[PeerConnection]] = {}
        """The same by node."""
        self._breakers: dict[Address, Breaker] = {}
        self._data_key = b""
        self._requester = ""
        self._tls: Tls | None = None
        self._lock = threading.Lock()
        self._made: deque[Connecting] = deque()
        self._connecting = 0
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def identify(self, data_key: bytes, requester: str, tls: Tls | None = None) -> None:
        """What new connections prove: `PeerConnection`. Others than before end the connections that proved those."""
        if (data_key, tls) != (self._data_key, self._tls):
            self._close_idle(len(self._idle))
            self._tls = tls
        self._data_key, self._requester = data_key, requester

    # ------------------------------------------------------------------ connections

    def take(self, peer: p.Peer) -> PeerConnection | None:
        """An idle connection to this peer, if there is one that still stands: the one used last, so that those that are too
        many grow old."""
        idle = self._of.get(address_of(peer), [])
        while idle:
            connection = idle[-1]
            self._drop(connection)
            if not peer_closed(connection.sock):
                return connection
            connection.close()
        return None

    def connected_to(self, peer: p.Peer) -> bool:
        """There is an idle connection to it, for all that is known."""
        return bool(self._of.get(address_of(peer)))

    def keep(self, connection: PeerConnection) -> None:
        """It is idle: nothing more comes on it until it is asked. Closes the oldest of too many, and those idle for long."""
        now = time.monotonic()
        self._idle[connection] = now
        same = self._of.setdefault(address_of(connection.peer), [])
        same.append(connection)
        if len(same) > _MAX_IDLE_EACH:
            oldest = same[0]
            self._drop(oldest)
            oldest.close()
        too_many = max(0, len(self._idle) - _MAX_IDLE)
        old = 0
        for since in self._idle.values():
            if now - since < _IDLE_S:
                break
            old += 1
        self._close_idle(max(too_many, old))

    def _close_idle(self, count: int) -> None:
        for connection in list(self._idle)[:count]:
            self._drop(connection)
            connection.close()

    def _drop(self, connection: PeerConnection) -> None:
        """It is not idle any more."""
        del self._idle[connection]
        same = self._of[address_of(connection.peer)]
        same.remove(connection)
        if not same:
            del self._of[address_of(connection.peer)]

    def connect(self, peer: p.Peer, deadline: float) -> Connecting:
        """Begin to connect; what comes of it is announced by `fileno` and told by `connected`."""
        attempt = Connecting(peer, deadline)
        try:
            with self._lock:
                if self._connecting >= _MAX_CONNECTING:
                    raise RuntimeError(f"{_MAX_CONNECTING} connections are being made already")
                self._connecting += 1
            try:
                threading.Thread(target=self._work, args=(attempt,), name="connect", daemon=True).start()
            except RuntimeError:
                with self._lock:
                    self._connecting -= 1
                raise
        except RuntimeError as error:  # no more threads for this user or container
            attempt.error, attempt.at_fault = error, False
            self._tell(attempt)
        return attempt

    def _work(self, attempt: Connecting) -> None:
        try:
            attempt.connection = self._connect(attempt.peer, attempt.deadline, self._data_key, self._requester, self._tls)
        except TimeoutError as error:
            attempt.error = error
            attempt.at_fault = time.monotonic() - attempt.began >= BLAME_AFTER_S
        except Exception as error:
            attempt.error = error
        finally:
            with self._lock:
                self._connecting -= 1
            self._tell(attempt)

    def _tell(self, attempt: Connecting) -> None:
        with self._lock:
            if attempt.abandoned or self._closed:
                if attempt.connection is not None:
                    attempt.connection.close()
                return
            self._made.append(attempt)
            os.eventfd_write(self._wake, 1)

    def abandon(self, attempt: Connecting) -> None:
        """Nobody waits for it any more: a connection that is still made is closed."""
        with self._lock:
            attempt.abandoned = True
            if attempt.connection is not None:
                attempt.connection.close()

    def connected(self) -> list[Connecting]:
        """The attempts that have ended since the last call, without those that were abandoned."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with self._lock:
            made = [attempt for attempt in self._made if not attempt.abandoned]
            self._made.clear()
        return made

    def fileno(self) -> int:
        """Readable when `connected` has something to tell."""
        return self._wake

    def close(self) -> None:
        """Of what is still being made, too, nothing is left."""
        self._close_idle(len(self._idle))
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for attempt in self._made:
                if attempt.connection is not None:
                    attempt.connection.close()
            os.close(self._wake)

    # ------------------------------------------------------------------ breakers

    def admit(self, peer: p.Peer) -> Admission:
        """Whether to ask this peer now. After a PROBE tell what became of it."""
        breaker = self._breakers.get(address_of(peer))
        return breaker.admit() if breaker is not None else Admission.GO

    def failed(self, peer: p.Peer) -> None:
        """Leave it alone for a while."""
        breaker = self._breakers.get(address_of(peer))
        if breaker is None:
            if len(self._breakers) >= _MAX_BREAKERS:
                self._forget()
            breaker = self._breakers[address_of(peer)] = Breaker(_BREAKER_FIRST_S, _BREAKER_MAX_S)
        breaker.failed()

    def works(self, peer: p.Peer) -> None:
        breaker = self._breakers.get(address_of(peer))
        if breaker is not None:
            breaker.succeeded()

    def undecided(self, peer: p.Peer) -> None:
        """It was asked, and it was not its fault that nothing came of it."""
        breaker = self._breakers.get(address_of(peer))
        if breaker is not None:
            breaker.undecided()

    def _forget(self) -> None:
        for address in [address for address, breaker in self._breakers.items() if breaker.forgettable]:
            del self._breakers[address]
        if len(self._breakers) >= _MAX_BREAKERS:
            del self._breakers[next(iter(self._breakers))]


def peer_closed(sock: DataSocket) -> bool:
    """Between requests nothing may arrive: readable means closed, or out of step."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
