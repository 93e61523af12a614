"""What moves bytes between the memory of two processes: one contract for shared memory, tcp, RDMA verbs and foreign
engines.

A `Transport` is one process's end: it registers memory, and makes links. A `Link` is to one peer; on it either side reads
from and writes to memory that the other has registered and told of. How the two ends first reach each other is not a
transport's business: it gets connected stream sockets (channels), whose other ends the peer's transport gets, runs its
handshake on them, and owns them from then on. A channel that breaks ends the link.

`open_transport` finds a transport by its scheme; packages bring their own by an entry point in the group
`hicache_mooncake.transports`, a subclass of `Transport`. `hicache_mooncake.testing.TransportTests` says whether one keeps
the contract.
"""

from __future__ import annotations

import abc
import bisect
import importlib
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, Literal, NamedTuple

Op = Literal["read", "write"]
ENTRY_POINTS = "hicache_mooncake.transports"
_BUILT_IN = {
    "shm": "hicache_mooncake.transfer.shm:ShmTransport",
    "tcp": "hicache_mooncake.transfer.tcp_transport:TcpTransport",
    "verbs": "hicache_mooncake.transfer.verbs.transport:VerbsTransport",
    "mooncake": "hicache_mooncake.transfer.foreign.mooncake:MooncakeTransport",
    "nixl": "hicache_mooncake.transfer.foreign.nixl:NixlTransport",
}
MAX_NOTICE_BYTES = 64 << 10
"""Of one `Link.notify`."""


class TransportError(Exception):
    """A transfer, a link or a registration that failed. `reason` is one word for metrics: `deadline`, `cancelled`,
    `closed` (this end closed the link), `peer` (the other end is gone, or broke the protocol), `bounds` (outside
    registered memory, or a token that is not valid any more), `memory` (it cannot be registered), `device`, `unavailable`
    (not on this host)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Piece(NamedTuple):
    """A stretch to be moved, `length` bytes: where it lies in this process, and where in the peer's. Lengths may be 0."""

    local: int
    remote: int
    length: int


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What an operator may choose. Each transport uses what concerns it."""

    devices: tuple[str, ...] = ()
    """RDMA devices, `name` or `name:port`; empty: all whose port is up."""
    gid_index: int = -1
    verbs_binding: str = "auto"
    lanes: int = 0
    max_in_flight: int = 64 << 20
    """Bytes of one link that are under way at a time, in each direction."""
    copy_threads: int = 0


class Pending(abc.ABC):
    """A batch under way. Thread-safe. When `done`, by whatever end, nothing of it lands any more in this process's
    memory; what a failed write still does to the peer's memory ends with the peer's end of the link."""

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Without waiting."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Until the batch is done, which is at its deadline at the latest. Raises TransportError unless all bytes have
        been moved. A batch that ended by deadline or was cancelled may have cost the link: `Link.alive` says."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Do not go on. Returns when the batch is done; one that had not ended yet ends with the reason `cancelled`."""


class Link(abc.ABC):
    """To one peer. Thread-safe: batches from several threads are carried out fairly, in pieces."""

    recalls: ClassVar[bool] = False
    """Of a write that has ended, by whatever end, nothing lands in the peer's memory any more either: this end copies."""

    @abc.abstractmethod
    def learn(self, address: int, length: int, token: bytes) -> None:
        """The peer has registered this stretch of its memory: what its `Transport.register` returned, however it came here.
        What was learned of before and overlaps it is forgotten: the peer has unregistered that. Raises TransportError."""

    def unlearn(self, address: int) -> None:  # noqa: B027
        """The peer has unregistered what was learned of at this address, and says so: it need not be kept track of any more.
        Nothing where the link hears of that by itself."""

    @abc.abstractmethod
    def submit(self, op: Op, pieces: Sequence[Piece], deadline: float) -> Pending:
        """Begin to move: `read` from the peer, `write` to it. `deadline` as `time.monotonic()`. Raises TransportError at
        once for pieces outside what is registered here or was learned, and on a link that is not alive; no byte is moved
        then. The memory must stay registered until the batch is done. May wait while too much is under way, up to the
        deadline."""

    @abc.abstractmethod
    def notify(self, message: bytes, deadline: float) -> None:
        """Tell the peer, after all batches that were done before. At most MAX_NOTICE_BYTES. Raises TransportError."""

    @abc.abstractmethod
    def notices(self) -> list[bytes]:
        """What the peer has told since the last call, in order; bounded: who is told too much without looking loses the
        link."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool: ...

    @abc.abstractmethod
    def close(self) -> None:
        """The fence: when this returns no byte of this link lands in this process's memory any more, neither of what it
        was reading nor of what the peer was writing, and what is under way has ended with the reason `closed`. Raises
        TransportError when that cannot be had: then the memory must not be used again."""

    def abort(self) -> None:
        """`close`, and what this end was writing and the peer has not received yet is thrown away, as far as that can be."""
        self.close()


class Transport(abc.ABC):
    """One process's end, thread-safe. Made with TransportOptions; raises TransportError (`unavailable`, `device`) with a
    sentence for the operator where it cannot work on this host."""

    scheme: ClassVar[str]
    fences: ClassVar[bool] = True
    """`Link.close` keeps its promise. False for engines that cannot: what they were writing to is then never used again unless
    the peer has said that it is done."""
    local_only: ClassVar[bool] = False
    """Channels are UNIX sockets: both ends are on one host."""
    device_memory: ClassVar[bool] = False
    """It can move memory that no CPU may touch, such as a GPU's."""

    @property
    def channels(self) -> int:
        """How many channels a link of this end wants; the side that connects decides."""
        return 1

    @abc.abstractmethod
    def register(self, address: int, length: int, fd: int = -1, fd_offset: int = 0) -> bytes:
        """Let peers reach this memory, and return the token that they need. `fd`: the descriptor of which it is a
        mapping, if it is one; it stays the caller's and must stay open. Raises TransportError that names the limit met
        and what raises it."""

    def token(self, address: int) -> bytes:
        """What a peer needs now for the memory that is registered at this address: a device that came up later reaches it, too.
        Empty: what `register` returned, which is good in any case."""
        return b""

    @abc.abstractmethod
    def unregister(self, address: int) -> None:
        """No peer reaches what was registered at this address any more when this returns."""

    @abc.abstractmethod
    def connect(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        """The handshake, on the side that connected. Owns the channels, and closes them when it raises TransportError."""

    @abc.abstractmethod
    def accept(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        """The same on the side that was connected to."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes all links and forgets all memory."""

    def report(self) -> dict[str, int | float | str | bool]:
        """For status pages and metrics."""
        return {}


def schemes() -> list[str]:
    """What can be asked of `open_transport`; whether it works on this host is another matter."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def open_transport(scheme: str, options: TransportOptions) -> Transport:
    """The transport of this scheme. An installed package's wins over a built-in one of the same name. Raises TransportError."""
    brought = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if scheme not in brought and scheme not in _BUILT_IN:
        raise TransportError("unavailable", f"there is no transport {scheme!r}, only {', '.join(schemes())}")
    try:
        if scheme in brought:
            made = brought[scheme].load()(options)
        else:
            module, _, name = _BUILT_IN[scheme].partition(":")
            made = getattr(importlib.import_module(module), name)(options)
    except ImportError as error:
        raise TransportError("unavailable", f"transport {scheme} cannot be loaded: {error}") from error
    if not isinstance(made, Transport):
        raise TransportError(
            "unavailable", f"what is installed as transport {scheme} is no Transport but {type(made).__name__}"
        )
    return made


_ADDRESSES = 1 << 64


def _check_range(address: int, length: int) -> None:
    if not (length > 0 and address >= 0 and address + length <= _ADDRESSES):
        raise TransportError("bounds", f"{length} bytes at {address} are no memory")


class Extents:
    """Stretches of memory by address, none of which overlap. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[int, tuple[int, bytes]] = {}
        self._starts: list[int] = []
        """The same, in order."""

    def add(self, address: int, length: int, token: bytes) -> None:
        """Raises TransportError when it overlaps another one, unless it is the same stretch, whose token is then the new
        one, and when it is none that memory can have."""
        _check_range(address, length)
        with self._lock:
            for start, size in self._overlapping(address, length):
                if (start, size) != (address, length):
                    raise TransportError("bounds", f"{length} bytes at {address:#x} overlap {size} bytes at {start:#x}")
            self._put(address, length, token)

    def replace(self, address: int, length: int, token: bytes) -> list[int]:
        """Add it in place of all that it overlaps. Returns where those began. Raises TransportError when it is none that memory
        can have."""
        _check_range(address, length)
        with self._lock:
            former = [start for start, _ in self._overlapping(address, length)]
            for start in former:
                self._drop(start)
            self._put(address, length, token)
        return former

    def _put(self, address: int, length: int, token: bytes) -> None:
        if address not in self._tokens:
            bisect.insort(self._starts, address)
        self._tokens[address] = (length, token)

    def _drop(self, address: int) -> bytes | None:
        if address not in self._tokens:
            return None
        del self._starts[bisect.bisect_left(self._starts, address)]
        return self._tokens.pop(address)[1]

    def _overlapping(self, address: int, length: int) -> list[tuple[int, int]]:
        first = max(0, bisect.bisect_right(self._starts, address) - 1)
        last = bisect.bisect_left(self._starts, address + length)
        near = [(start, self._tokens[start][0]) for start in self._starts[first:last]]
        return [(start, size) for start, size in near if address < start + size]

    def remove(self, address: int) -> bytes | None:
        """The token that was there."""
        with self._lock:
            return self._drop(address)

    def find(self, address: int, length: int) -> tuple[int, int, bytes]:
        """(start, length, token) of the stretch in which these bytes lie. Raises TransportError, `bounds`."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at >= 0:
                start = self._starts[at]
                size, token = self._tokens[start]
                if address + length <= start + size:
                    return start, size, token
        raise TransportError("bounds", f"{length} bytes at {address:#x} are in no registered memory")

    def check(self, places: Iterable[tuple[int, int]]) -> None:
        """Raises TransportError unless each (address, length) lies in one of them. A length of 0 lies anywhere."""
        for address, length in places:
            if length < 0:
                raise TransportError("bounds", f"a length of {length}")
            if length:
                self.find(address, length)
