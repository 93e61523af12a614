"""RDMA verbs as far as this package needs them: reliable connections, reads and writes, completions.

Two Python packages speak to libibverbs, `ibverbs` (PyPI) and pyverbs (rdma-core's own). Both are reached through the classes
here, and so is the fake device of `hicache_mooncake.testing.fake_verbs`. `bindings.load_binding` chooses.

Order of use: `Binding.open`, `Device.register` and `Device.completions`, `Device.queue_pair`; `Qp.init`, the peers exchange
`Qp.address`, `Qp.connect` on both ends, `Qp.post`, `Cq.poll`. Everything is closed by `close`, which may be called again, and
which closes what was made of it first.
"""

from __future__ import annotations

import abc
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal, NamedTuple

Op = Literal["read", "write"]


class VerbsError(Exception):
    """A verb that failed. `reason` says what was tried and why it failed; `errno` is libibverbs', or 0 where there is none."""

    def __init__(self, reason: str, errno: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.errno = errno


class BindingUnavailable(VerbsError):
    """This binding cannot be used on this host: it is not installed, or the libraries beneath it are not. `reason` says what
    to install."""


class Status(IntEnum):
    """Of a completion: `ibv_wc_status`, those that matter here. Devices report others as well, so `Completion.status` is a
    plain int, and `Completion.status_text` names all."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    """rxe devices say so when their own link is down."""
    LOC_PROT_ERR = 4
    """A local address or lkey is not registered."""
    WR_FLUSH_ERR = 5
    """An earlier work of the queue pair failed, and this one was not, or not fully, carried out."""
    REM_ACCESS_ERR = 10
    """The peer's rkey, address or length is not, or no longer, registered there."""
    RETRY_EXC_ERR = 12
    """The peer, its port or the network does not answer."""
    FATAL_ERR = 19


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table. Empty entries are left out, so `index` has gaps."""

    index: int
    gid: str
    """Eight groups of four hexadecimal digits, as sysfs writes it: `0000:0000:0000:0000:0000:ffff:0a00:0001`."""
    type: str
    """`RoCE v2`, `RoCE v1`, `IB`, or `` where the system does not say."""
    netdev: str
    """Network interface of the address, `` for InfiniBand or where the system does not say."""


@dataclass(frozen=True, slots=True)
class PortInfo:
    """A port as it is at the moment of the query."""

    number: int
    """From 1."""
    state: str
    """`ACTIVE` works. Else `DOWN`, `INIT` or `ARMED`."""
    link_layer: str
    """`Ethernet` (RoCE) or `InfiniBand`."""
    lid: int
    """Address in an InfiniBand subnet; 0 on Ethernet."""
    active_mtu: int
    """Bytes."""
    max_msg_sz: int
    """Bytes that one work may move."""
    gids: tuple[Gid, ...]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device and its limits. Where it cannot be opened `problem` says why, and the rest is empty."""

    name: str
    ports: tuple[PortInfo, ...] = ()
    max_sge: int = 0
    """Of one work."""
    max_mr_size: int = 0
    """Bytes."""
    max_mr: int = 0
    max_qp_wr: int = 0
    """Works of one queue pair that may be outstanding."""
    max_cqe: int = 0
    max_rd_atomic: int = 0
    """Reads of one queue pair that the device carries out at a time."""
    problem: str = ""


class QpAddress(NamedTuple):
    """What a peer must know of a queue pair to connect its own to it."""

    number: int
    psn: int
    gid: str
    """Of the port and GID index that the queue pair uses, as in `Gid.gid`."""
    lid: int
    rd_atomic: int = 1
    """Reads that this end serves at a time."""


@dataclass(frozen=True, slots=True)
class QpOptions:
    """Of a connection. A peer that does not answer is given up after about 4.096 us * 2**ack_timeout * (retries + 1), the real
    devices' own rounding apart: 4 s as it stands here."""

    ack_timeout: int = 17
    """0 (for ever) to 31."""
    retries: int = 6
    """0 to 7."""
    traffic_class: int = 0
    service_level: int = 0
    hop_limit: int = 64


DEFAULT_QP_OPTIONS = QpOptions()


class Sge(NamedTuple):
    """A stretch of this process's registered memory."""

    address: int
    length: int
    lkey: int


class Work(NamedTuple):
    """One RDMA read or write: the stretches `sges`, one after the other, from or to the peer's memory at `remote`."""

    op: Op
    sges: Sequence[Sge]
    remote: int
    rkey: int
    wr_id: int
    """Comes back in the completion."""
    signaled: bool = True
    """Else it completes silently, unless it fails."""


class Completion(NamedTuple):
    wr_id: int
    status: int
    """0, or one of `Status`, or another that `status_text` names."""
    status_text: str


class Mr(abc.ABC):
    """Registered, pinned memory. The memory stays its owner's and must stay mapped until `close`."""

    address: int
    length: int
    lkey: int
    rkey: int

    @abc.abstractmethod
    def close(self) -> None:
        """Neither this end nor a peer reaches the memory through this registration any more when it returns."""


class Cq(abc.ABC):
    """A completion queue with a completion channel of its own. Thread-safe."""

    @abc.abstractmethod
    def poll(self, limit: int) -> list[Completion]:
        """Up to so many completions that are there, without waiting. Raises VerbsError when the queue is broken (it
        overflowed, or the device is gone)."""

    @abc.abstractmethod
    def arm(self) -> None:
        """The descriptor becomes readable at the next completion, once. What has completed before gives no event: poll once
        more after this."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """Descriptor for select, poll or epoll. Owned by this object."""

    @abc.abstractmethod
    def ack(self) -> None:
        """Take and acknowledge the events that are there, without waiting."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes its queue pairs first."""


class Qp(abc.ABC):
    """One end of a reliable connection. Thread-safe. An error takes it to the error state for good, where everything that is
    outstanding is flushed: `close` it and make another."""

    number: int
    psn: int
    port: int

    @abc.abstractmethod
    def init(self) -> None:
        """To the state INIT. Before the address is given to the peer."""

    @abc.abstractmethod
    def address(self, gid_index: int) -> QpAddress:
        """For the peer. `gid_index` must be that of `connect`."""

    @abc.abstractmethod
    def connect(self, remote: QpAddress, gid_index: int, mtu: int, options: QpOptions = DEFAULT_QP_OPTIONS) -> None:
        """To the state RTS, from which on works may be posted; the peer's can arrive as soon as it has connected too. `mtu`:
        bytes, 256 to 4096, the smaller of both ends' `active_mtu`. Raises VerbsError."""

    @abc.abstractmethod
    def post(self, works: Sequence[Work]) -> None:
        """Begin these works, in order, with one call of libibverbs and as one list. Each has at most the queue pair's
        `max_sge` stretches and its port's `max_msg_sz` bytes; with what is outstanding at most its `max_wr` works. A work is
        outstanding until a signaled one at or behind it has been polled. Raises VerbsError; then some may have begun, and the
        queue pair must be closed."""

    @abc.abstractmethod
    def close(self) -> None:
        """The fence: when this returns, no byte lands any more in this process's memory, neither of what the peer writes nor
        of what this end reads. Completions that were not polled may come or not. Raises VerbsError when the device refuses:
        then the memory must not be used again until the device is closed."""


class Device(abc.ABC):
    """An open device with one protection domain. Thread-safe."""

    info: DeviceInfo

    @abc.abstractmethod
    def port(self, number: int) -> PortInfo:
        """As it is now. Raises VerbsError."""

    @abc.abstractmethod
    def register(self, address: int, length: int) -> Mr:
        """For local reads and writes and those of peers. At most `max_mr_size` bytes. Raises VerbsError;
        `registration.register` does it for any length, on several devices, and says which limit was met."""

    @abc.abstractmethod
    def completions(self, entries: int) -> Cq:
        """A queue for so many completions that nobody has polled; who has more outstanding breaks it."""

    @abc.abstractmethod
    def queue_pair(self, cq: Cq, port: int, max_wr: int, max_sge: int) -> Qp:
        """In the state RESET. Raises VerbsError: what a device says it can do at most it need not do all at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes everything made of it first."""


class Binding(abc.ABC):
    """A Python package that speaks to libibverbs. Thread-safe, without state of its own."""

    name: ClassVar[str]

    @abc.abstractmethod
    def devices(self) -> list[DeviceInfo]:
        """By name. Empty where there is no RDMA: no device, no kernel module, no access to /dev/infiniband at all."""

    @abc.abstractmethod
    def open(self, name: str) -> Device:
        """Raises VerbsError that names the devices there are."""


MTUS = (256, 512, 1024, 2048, 4096)
"""Bytes, of the verbs' enumeration 1 to 5."""

_STATUS_TEXTS = (
    "success", "local length error", "local QP operation error", "local EE context operation error", "local protection error",
    "flushed: an earlier work of the queue pair failed", "memory window bind error", "bad response", "local access error",
    "remote invalid request", "remote access error: memory that is not, or no longer, registered there",
    "remote operation error", "retries exceeded: no answer from the peer, its port or the network",
    "retries exceeded: the receiver was not ready", "local RDD violation", "remote invalid RD request", "remote aborted",
    "invalid EE context number", "invalid EE context state", "fatal error", "response timeout", "general error",
    "tag matching error", "tag matching rendezvous incomplete",
)  # fmt: skip


def status_text(status: int) -> str:
    """Of a completion, for log lines and errors."""
    known = _STATUS_TEXTS[status] if 0 <= status < len(_STATUS_TEXTS) else "unknown"
    return f"{known} (verbs status {status})"


def gid_text(gid: bytes) -> str:
    """As in `Gid.gid`, of the 16 bytes."""
    return ipaddress.IPv6Address(gid).exploded
