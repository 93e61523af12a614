"""The transport over stream sockets: batches between registered memories through the kernel, for peers without anything faster.

A link is one or more *lanes* (`tcp_lane`), and a batch moves in *turns* of at most two mebibytes, each on whichever lane is
free.
Bytes go straight between registered memory and the socket, and are checked by the owner of the memory: a row whose token is
unknown or was revoked, or that leaves its stretch, touches nothing.

A batch that ends early in mid-body costs the link nothing: the rest of what arrives for it is thrown away, and zeros are sent
in place of the rest of what it was writing. Memory that is unregistered while a peer reads it costs the link when the peer does
not take the rest of its turn within a second, since half a turn cannot be taken back.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from hicache_mooncake.transfer.batches import Batches, Inbox, check_pieces
from hicache_mooncake.transfer.tcp_lane import TOKEN_BYTES, Broken, Lane, Note, Region
from hicache_mooncake.transfer.transport import (
    MAX_NOTICE_BYTES,
    Extents,
    Link,
    Op,
    Pending,
    Piece,
    Transport,
    TransportError,
    TransportOptions,
)

_HELLO = struct.Struct("<8s16sHH")
"""What both ends say first on each channel: magic, the link's nonce, which lane this is, of how many."""
_MAGIC = b"hcmtcp\x00\x01"
_DEFAULT_LANES, _MAX_LANES = 2, 64
_TURN_BYTES = 2 << 20
"""A turn costs Python as much as the kernel takes for a few hundred KiB."""
_NONE = memoryview(b"")
_REVOKE_GRACE_S = 1.0
_JOIN_S = 20.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 60_000))
"""A peer whose host is gone, or that has taken nothing for a minute, is noticed without traffic of ours."""


class TcpTransport(Transport):
    """See the module. Channels may be any connected stream sockets. Thread-safe."""

    scheme: ClassVar[str] = "tcp"

    def __init__(self, options: TransportOptions) -> None:
        if not 0 <= options.lanes <= _MAX_LANES:
            raise TransportError("unavailable", f"{options.lanes} lanes: tcp has 1 to {_MAX_LANES}, or 0 for {_DEFAULT_LANES}")
        self._options = options
        self._lock = threading.Lock()
        self._extents = Extents()
        self._regions: dict[bytes, Region] = {}
        self._links: weakref.WeakSet[TcpLink] = weakref.WeakSet()
        self._closed = False

    @property
    def channels(self) -> int:
        return self._options.lanes or _DEFAULT_LANES

    def register(self, address: int, length: int, fd: int = -1, fd_offset: int = 0) -> bytes:
        if length <= 0 or address <= 0:
            raise TransportError("memory", f"{length} bytes at {address:#x} cannot be registered")
        region = Region(address, length)
        with self._lock:
            if self._closed:
                raise TransportError("closed", "the transport is closed")
            before = self._named(address)
            self._extents.add(address, length, region.token)
            self._regions[region.token] = region
        if before is not None:
            self._revoke(before)
        return region.token

    def unregister(self, address: int) -> None:
        with self._lock:
            region = self._named(address)
            self._extents.remove(address)
        if region is not None:
            self._revoke(region)

    def _named(self, address: int) -> Region | None:
        return next((region for region in self._regions.values() if region.address == address and not region.ended), None)

    def _revoke(self, region: Region) -> None:
        region.end()
        with self._lock:
            self._regions.pop(region.token, None)
            links = list(self._links)
        for link in links:
            link.hurry()
        if region.wait_quiet(_REVOKE_GRACE_S):
            return
        for link in links:
            if link.sends_from(region):
                link.fail(TransportError("peer", "the peer did not take memory that was unregistered while it read it"))
        if not region.wait_quiet(_JOIN_S):
            raise TransportError("memory", f"{region.length} bytes at {region.address:#x} are still in use: do not free them")

    def find(self, token: bytes) -> Region | None:
        return self._regions.get(token)

    def views(self, pieces: Sequence[Piece]) -> list[memoryview]:
        """Where they lie in this process's registered memory. Raises TransportError."""
        views = []
        start = end = 0
        whole = _NONE
        for address, _, length in pieces:
            if not (start <= address and address + length <= end):
                start, size, token = self._extents.find(address, length)
                region = self.find(token)
                if region is None:
                    raise TransportError("bounds", f"{length} bytes at {address:#x} are not registered any more")
                end, whole = start + size, region.view
            views.append(whole[address - start : address - start + length])
        return views

    @property
    def extents(self) -> Extents:
        return self._extents

    def connect(self, channels: Sequence[socket.socket], deadline: float) -> TcpLink:
        return self._link(channels, deadline, _greet)

    def accept(self, channels: Sequence[socket.socket], deadline: float) -> TcpLink:
        return self._link(channels, deadline, _answer)

    def _link(
        self,
        channels: Sequence[socket.socket],
        deadline: float,
        handshake: Callable[[Sequence[socket.socket], float], list[socket.socket]],
    ) -> TcpLink:
        try:
            if not 1 <= len(channels) <= _MAX_LANES:
                raise TransportError("peer", f"{len(channels)} channels for a link: tcp takes 1 to {_MAX_LANES}")
            lanes = handshake(channels, deadline)
            with self._lock:
                if self._closed:
                    raise TransportError("closed", "the transport is closed")
                link = TcpLink(self, lanes, self._options.max_in_flight)
                self._links.add(link)
        except TimeoutError as error:
            _close_all(channels)
            raise TransportError("deadline", "the peer did not greet in time") from error
        except (OSError, RuntimeError, Broken) as error:  # RuntimeError: no more threads
            _close_all(channels)
            raise TransportError("peer", f"no link over tcp: {error}") from error
        except TransportError:
            _close_all(channels)
            raise
        return link

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, regions = list(self._links), list(self._regions.values())
        ends: list[Callable[[], None]] = [link.close for link in links]
        ends += [partial(self.unregister, region.address) for region in regions]
        failed: TransportError | None = None
        for end in ends:
            try:
                end()
            except TransportError as error:
                failed = error
        if failed is not None:
            raise failed

    def report(self) -> dict[str, int | float | str | bool]:
        with self._lock:
            links, regions = list(self._links), list(self._regions.values())
        return {
            "links": sum(link.alive for link in links),
            "lanes": self.channels,
            "registered_bytes": sum(region.length for region in regions),
            "bytes_under_way": sum(link.under_way for link in links),
        }


class TcpLink(Link):
    """See `Link`. Each lane's thread ends with the link."""

    def __init__(self, transport: TcpTransport, sockets: Sequence[socket.socket], max_in_flight: int) -> None:
        """Owns the sockets. Raises RuntimeError or OSError, and leaves them to the caller, when there can be no threads."""
        self.transport = transport
        self.batches = Batches(max_in_flight, self.hurry, turn_bytes=_TURN_BYTES)
        self.remote = Extents()
        self.inbox = Inbox()
        self._lock = threading.Lock()
        self._error: TransportError | None = None
        self.delivers = False
        """At its end: what was sent still arrives."""
        self._lanes: list[Lane] = []
        try:
            for number, sock in enumerate(sockets):
                self._lanes.append(Lane(self, sock, number))
            for lane in self._lanes:
                lane.start()
        except (OSError, RuntimeError) as error:
            self.fail(TransportError("closed", f"no threads for a link: {error}"))
            for lane in self._lanes:
                lane.join(_JOIN_S)
            raise

    def learn(self, address: int, length: int, token: bytes) -> None:
        if len(token) != TOKEN_BYTES:
            raise TransportError("bounds", f"a token of {len(token)} bytes: those of tcp have {TOKEN_BYTES}")
        self.remote.replace(address, length, token)

    def unlearn(self, address: int) -> None:
        self.remote.remove(address)

    def submit(self, op: Op, pieces: Sequence[Piece], deadline: float) -> Pending:
        self._check_alive()
        check_pieces(pieces, self.transport.extents, self.remote)
        batch = self.batches.admit(op, pieces, deadline)
        self.kick(all_lanes=batch.total > _TURN_BYTES)
        return batch

    def notify(self, message: bytes, deadline: float) -> None:
        if len(message) > MAX_NOTICE_BYTES:
            raise TransportError("bounds", f"a notice of {len(message)} bytes: at most {MAX_NOTICE_BYTES}")
        self._check_alive()
        note = Note(bytes(message))
        first = self._lanes[0]
        first.notes.append(note)
        first.wake()
        # A lane that has left meanwhile looks at its notes no more; the one that leaves after this line sees this one.
        if self.ended and not first.living:
            first.drop_notes()
        if not note.gone.wait(min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            with contextlib.suppress(ValueError):
                first.notes.remove(note)
            raise TransportError("deadline", "the peer did not take a notice in time")
        if not note.sent:
            self._check_alive()

    def notices(self) -> list[bytes]:
        return self.inbox.take()

    @property
    def alive(self) -> bool:
        return self._error is None

    @property
    def ended(self) -> bool:
        return self._error is not None

    @property
    def error(self) -> TransportError | None:
        """Why it has ended."""
        return self._error

    def _check_alive(self) -> None:
        if self._error is not None:
            raise TransportError(self._error.reason, f"the link has ended: {self._error}")

    @property
    def under_way(self) -> int:
        return self.batches.in_flight("read") + self.batches.in_flight("write")

    def kick(self, *, all_lanes: bool) -> None:
        """There is something to cut. A lane that is not idle will look by itself."""
        for lane in self._lanes:
            if lane.idle:
                lane.wake()
                if not all_lanes:
                    return

    def hurry(self) -> None:
        """Something that a lane may hold has ended."""
        for lane in self._lanes:
            lane.wake()

    def sends_from(self, region: Region) -> bool:
        return any(region in lane.sending for lane in self._lanes)

    def fail(self, error: TransportError) -> None:
        """The link ends, and its lanes soon. The first reason counts."""
        with self._lock:
            if self._error is None:
                self._error = error
        self.batches.close(self._error)
        self.hurry()

    def close(self) -> None:
        self.delivers = self._error is None
        self._end()

    def abort(self) -> None:
        self._end()

    def _end(self) -> None:
        self.fail(TransportError("closed", "this end closed the link"))
        for lane in self._lanes:
            if not lane.join(_JOIN_S):
                raise TransportError("closed", f"a thread of the link has not ended in {_JOIN_S:.0f} s: do not use its memory")


def _greet(channels: Sequence[socket.socket], deadline: float) -> list[socket.socket]:
    nonce = secrets.token_bytes(16)
    for number, channel in enumerate(channels):
        _prepare(channel)
        _bound(channel, deadline)
        channel.sendall(_HELLO.pack(_MAGIC, nonce, number, len(channels)))
    for number, channel in enumerate(channels):
        if _hear(channel, deadline) != (nonce, number, len(channels)):
            raise Broken("the peer answered with another link's greeting")
        channel.settimeout(0)
    return list(channels)


def _answer(channels: Sequence[socket.socket], deadline: float) -> list[socket.socket]:
    lanes: dict[int, socket.socket] = {}
    nonces = set()
    for channel in channels:
        _prepare(channel)
        nonce, number, count = _hear(channel, deadline)
        if count != len(channels) or number >= count or number in lanes:
            raise Broken(f"the peer calls one of {len(channels)} channels number {number} of {count}")
        nonces.add(nonce)
        lanes[number] = channel
    if len(nonces) != 1:
        raise Broken("these channels are of different links")
    for number, channel in lanes.items():
        _bound(channel, deadline)
        channel.sendall(_HELLO.pack(_MAGIC, nonce, number, len(channels)))
        channel.settimeout(0)
    return [lanes[number] for number in range(len(lanes))]


def _hear(channel: socket.socket, deadline: float) -> tuple[bytes, int, int]:
    data = b""
    while len(data) < _HELLO.size:
        _bound(channel, deadline)
        got = channel.recv(_HELLO.size - len(data))
        if not got:
            raise Broken("the peer closed it instead of greeting")
        data += got
    magic, nonce, number, count = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise Broken("the peer does not speak this build's tcp transport")
    return nonce, number, count


def _bound(channel: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    channel.settimeout(min(left, 3600.0))


def _prepare(channel: socket.socket) -> None:
    if channel.family in (socket.AF_INET, socket.AF_INET6):
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            channel.setsockopt(socket.IPPROTO_TCP, option, value)


def _close_all(channels: Sequence[socket.socket]) -> None:
    for channel in channels:
        channel.close()
