"""What the transports over foreign engines share.

A foreign engine has ports, threads and completions of its own; here it only moves bytes. What two ends must say to each other
goes over the link's channel as in shared memory: how to reach the other's engine, which memory, notices, and the end.

No foreign engine can recall what it has begun: a batch that is ended early costs the link when the engine does not finish what
is under way in a moment, and neither that nor `close` can promise that nothing lands any more (`fences` is False).
"""

from __future__ import annotations

import abc
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

from hicache_mooncake.transfer.batches import Batch
from hicache_mooncake.transfer.channel_link import ChannelLink, Memory
from hicache_mooncake.transfer.channel_transport import ChannelTransport, Own
from hicache_mooncake.transfer.copying import Copier, Place
from hicache_mooncake.transfer.transport import Op, Pending, Piece, TransportError, TransportOptions

_LENGTH = struct.Struct("<4sI")
_MAX_HELLO = 1 << 20
_KIND = b"eng1"
_GRACE_S = 0.5
"""For what is under way in the engine when a batch has ended."""
_DEFAULT_THREADS = 2


class Engine(abc.ABC):
    """One process's foreign engine. Thread-safe; each method raises TransportError."""

    @abc.abstractmethod
    def hello(self) -> bytes:
        """What a peer's engine needs to reach this one."""

    @abc.abstractmethod
    def attach(self, hello: bytes, host: str) -> str:
        """A peer's hello: the name by which this engine knows it. `host`: where the peer was reached."""

    @abc.abstractmethod
    def detach(self, peer: str) -> None:
        """It is gone."""

    @abc.abstractmethod
    def register(self, address: int, length: int) -> None: ...

    @abc.abstractmethod
    def unregister(self, address: int) -> None: ...

    @abc.abstractmethod
    def how(self, address: int) -> bytes:
        """What a peer's engine needs to reach this registered memory, besides the hello."""

    @abc.abstractmethod
    def reach(self, peer: str, how: bytes) -> None:
        """The peer's `how`."""

    @abc.abstractmethod
    def move(self, op: Op, peer: str, pieces: Sequence[Piece]) -> None:
        """Until all bytes are moved, or nothing of it moves any more as far as the engine can tell."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what can be given back."""


class ForeignTransport(ChannelTransport):
    """`TransportOptions.copy_threads`: batches of a link that the engine has at a time; 0: two."""

    fences: ClassVar[bool] = False
    magic: ClassVar[bytes]
    """4 bytes, which both ends say first."""

    def __init__(self, options: TransportOptions) -> None:
        super().__init__()
        self._threads = options.copy_threads or _DEFAULT_THREADS
        self._engine: Engine | None = None
        self._starting = threading.Lock()
        self._waiting: dict[int, int] = {}
        """Memory that was registered before the engine was started: it is when it is known by which address it is reached."""

    @abc.abstractmethod
    def start(self, host: str) -> Engine:
        """An engine of this process. `host`: this host's address on the first link. Raises TransportError."""

    def admit(self, address: int, length: int, fd: int, fd_offset: int) -> bytes:
        with self._starting:
            if self._engine is None:
                self._waiting[address] = length
            else:
                self._engine.register(address, length)
        return _KIND

    def expel(self, address: int) -> None:
        with self._starting:
            if self._engine is None:
                self._waiting.pop(address, None)
            else:
                self._engine.unregister(address)

    def meet(self, channel: socket.socket, deadline: float) -> ChannelLink:
        local = channel.family == socket.AF_UNIX
        host = "127.0.0.1" if local else channel.getsockname()[0]
        engine = self._started(host)
        hello = _greet(channel, self.magic, engine.hello(), deadline)
        peer = engine.attach(hello, "127.0.0.1" if local else channel.getpeername()[0])
        return ForeignLink(self, channel, engine, peer, self._threads)

    def _started(self, host: str) -> Engine:
        with self._starting:
            if self._engine is None:
                engine = self.start(host)
                for address, length in self._waiting.items():
                    engine.register(address, length)
                self._engine, self._waiting = engine, {}
            return self._engine

    def close(self) -> None:
        try:
            super().close()
        finally:
            with self._starting:
                engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()


class ForeignPlace(Place):
    def __init__(self, number: int, address: int, length: int, link: ForeignLink) -> None:
        super().__init__(number, address, length)
        self._link = link

    def copy(self, op: Op, pieces: Sequence[Piece]) -> None:
        self._link.move(op, pieces)

    def close(self) -> None:
        """The engine keeps what it knows of a peer's memory."""


class ForeignLink(ChannelLink):
    turn_bytes: ClassVar[int] = 16 << 20
    patience_s: ClassVar[float] = 3.0

    def __init__(self, transport: ForeignTransport, channel: socket.socket, engine: Engine, peer: str, threads: int) -> None:
        super().__init__(transport, channel, f"{transport.scheme} peer {peer}")
        self._engine, self._peer = engine, peer
        self._copier = Copier(threads, f"{transport.scheme}-move")

    def place(self, kind: bytes, number: int, address: int, length: int) -> Place:
        if kind != _KIND:
            raise TransportError("bounds", "a token that is not of this transport")
        return ForeignPlace(number, address, length, self)

    def offer(self, own: Own) -> tuple[Memory, list[int]]:
        return Memory(own.id, True, how=self._engine.how(own.address)), []

    def reach(self, place: Place, memory: Memory, fd: int) -> None:
        self._engine.reach(self._peer, memory.how)
        place.ready = True

    def begin(self, batch: Batch) -> Pending:
        if not batch.done:
            self._copier.put(self.turn)
        return _ForeignPending(self, batch)

    def move(self, op: Op, pieces: Sequence[Piece]) -> None:
        try:
            self._engine.move(op, self._peer, pieces)
        except TransportError:
            raise
        except Exception as error:  # its bindings raise what they like, and the batch must end
            raise TransportError("device", f"the engine of {self.who} failed to {op}: {error!r}") from error

    def let_go(self) -> None:
        self._copier.close(_GRACE_S)  # a thread that is in the engine ends with what it does there
        self._engine.detach(self._peer)


class _ForeignPending(Pending):
    """A batch that has ended and of which the engine still moves something costs the link."""

    def __init__(self, link: ForeignLink, batch: Batch) -> None:
        self._link, self._batch = link, batch

    @property
    def done(self) -> bool:
        return self._batch.done or (self._batch.ended and not self._link.alive)

    def wait(self) -> None:
        if not self._batch.wait_quiet(self._batch.deadline - time.monotonic()):
            self._batch.expire()
            self._settle()
        if self._batch.error is not None:
            raise TransportError(self._batch.error.reason, str(self._batch.error))

    def cancel(self) -> None:
        self._batch.stop(TransportError("cancelled", "the batch was cancelled"))
        self._settle()

    def _settle(self) -> None:
        if not self._batch.wait_quiet(_GRACE_S):
            self._link.stop("peer", "the engine did not end what was under way, and cannot be made to")


def _greet(channel: socket.socket, magic: bytes, hello: bytes, deadline: float) -> bytes:
    """The peer's hello."""
    try:
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        channel.sendall(_LENGTH.pack(magic, len(hello)) + hello)
        said, length = _LENGTH.unpack(_exactly(channel, _LENGTH.size, deadline))
        if said != magic or length > _MAX_HELLO:
            raise TransportError("peer", f"what is at the other end does not speak this transport: it said {said!r}")
        return _exactly(channel, length, deadline)
    except TimeoutError as error:
        raise TransportError("deadline", "the peer did not greet before the deadline") from error
    except OSError as error:
        raise TransportError("peer", f"greeting the peer over its channel: {error.strerror or error}") from error


def _exactly(channel: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        channel.settimeout(left)
        part = channel.recv(size - len(data))
        if not part:
            raise TransportError("peer", "the peer closed the channel instead of greeting")
        data += part
    return data
