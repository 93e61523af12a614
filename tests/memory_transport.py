"""A transport within one process, with faults at will: what a slow, failing, lying or unstoppable card does."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hicache_mooncake.transfer.transport import Extents, Link, Op, Pending, Piece, Transport, TransportError, TransportOptions

_STEP = 16 << 10


@dataclass
class Faults:
    """Of all transports of one test."""

    gate: threading.Event = field(default_factory=threading.Event)
    """Every write stops in the middle until this is set."""
    fail: bool = False
    """Writes fail in the middle."""
    corrupt: bool = False
    """One byte of each piece arrives damaged."""
    stillborn: bool = False
    """New links are dead at once."""
    unstoppable: bool = False
    """A link cannot be ended, and what is under way goes on."""
    stuck: threading.Event = field(default_factory=threading.Event)
    """The end of a link does not return before this is set."""
    writes: int = 0
    """That were begun."""
    waiting: int = 0
    """That stand in the middle."""
    late: int = 0
    """Bytes that landed after the link's end had been promised."""
    links: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.stuck.set()


class _Pending(Pending):
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.error: TransportError | None = None
        self.stop = threading.Event()
        self.ended = threading.Event()

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self.stop.set()
        self.ended.wait()


class MemoryLink(Link):
    """`fence` is held around every step into this end's memory."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.faults = transport.faults
        self.there = Extents()
        self.fence = threading.Lock()
        self.closed = False
        self.peer: MemoryLink | None = None
        self.paired = threading.Event()

    def learn(self, address: int, length: int, token: bytes) -> None:
        self.there.add(address, length, token)

    def submit(self, op: Op, pieces: Sequence[Piece], deadline: float) -> Pending:
        if op != "write":
            raise TransportError("unavailable", "this one only writes")
        if not self.alive:
            raise TransportError("closed", "the link has ended")
        self.transport.memory.check((piece.local, piece.length) for piece in pieces)
        self.there.check((piece.remote, piece.length) for piece in pieces)
        pending = _Pending(deadline)
        self.faults.writes += 1
        threading.Thread(target=self._work, args=(list(pieces), pending), name="memory-link", daemon=True).start()
        return pending

    def _work(self, pieces: list[Piece], pending: _Pending) -> None:
        try:
            self._move(pieces, pending)
        except TransportError as error:
            pending.error = error
        finally:
            pending.ended.set()

    def _move(self, pieces: list[Piece], pending: _Pending) -> None:
        half = sum(piece.length for piece in pieces) // 2
        moved, stood = 0, False
        for piece in pieces:
            for at in range(0, piece.length, _STEP):
                if moved >= half and not stood:
                    stood = True
                    self._stand(pending)
                size = min(_STEP, piece.length - at)
                data = ctypes.string_at(piece.local + at, size)
                if self.faults.corrupt and at == 0:
                    data = bytes([data[0] ^ 1]) + data[1:]
                self._land(piece.remote + at, data)
                moved += size

    def _stand(self, pending: _Pending) -> None:
        self.faults.waiting += 1
        try:
            while not self.faults.gate.wait(0.01):
                if pending.stop.is_set():
                    raise TransportError("cancelled", "told to stop")
                if not self.faults.unstoppable and (self.closed or time.monotonic() > pending.deadline):
                    raise TransportError("closed" if self.closed else "deadline", "stood still")
        finally:
            self.faults.waiting -= 1
        if self.faults.fail:
            raise TransportError("peer", "the card has failed")

    def _land(self, address: int, data: bytes) -> None:
        peer = self.peer
        assert peer is not None
        with peer.fence:
            if (peer.closed or self.closed) and not self.faults.unstoppable:
                raise TransportError("peer", "the peer has ended the link")
            self.faults.late += len(data) * peer.closed
            ctypes.memmove(address, data, len(data))

    def notify(self, message: bytes, deadline: float) -> None:
        raise TransportError("unavailable", "it tells nothing")

    def notices(self) -> list[bytes]:
        return []

    @property
    def alive(self) -> bool:
        peer = self.peer
        return not self.closed and peer is not None and not peer.closed

    def close(self) -> None:
        self.faults.stuck.wait()
        with self.fence:
            self.closed = True
        if self.faults.unstoppable:
            raise TransportError("device", "the card does not answer")


class MemoryTransport(Transport):
    """Ends of one process find each other by a number that goes over the channel."""

    scheme = "memory"
    _waiting: ClassVar[dict[bytes, MemoryLink]] = {}

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.memory = Extents()
        self.links: list[MemoryLink] = []

    def register(self, address: int, length: int, fd: int = -1, fd_offset: int = 0) -> bytes:
        self.memory.add(address, length, b"token")
        return b"token"

    def unregister(self, address: int) -> None:
        self.memory.remove(address)

    def connect(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        link = self._made(MemoryLink(self))
        name = os.urandom(16)
        self._waiting[name] = link
        with channels[0] as channel:
            channel.sendall(name)
            if not link.paired.wait(deadline - time.monotonic()):
                raise TransportError("deadline", "the other end did not come")
        return link

    def accept(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        link = self._made(MemoryLink(self))
        with channels[0] as channel:
            other = self._waiting.pop(channel.recv(16, socket.MSG_WAITALL), None)
        if other is None:
            raise TransportError("peer", "the other end broke off")
        link.peer, other.peer = other, link
        if self.faults.stillborn:
            link.closed = other.closed = True
        other.paired.set()
        return link

    def _made(self, link: MemoryLink) -> MemoryLink:
        self.faults.links += 1
        self.links.append(link)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()


def opener(faults: Faults):  # type: ignore[no-untyped-def]
    """In the place of `open_transport`."""

    def opened(_scheme: str, _options: TransportOptions) -> MemoryTransport:
        return MemoryTransport(faults)

    return opened
