"""One memory registered on several devices, and what peers are told of it.

A device registers at most `max_mr_size` bytes at once, so a memory may be several parts on it. Each part has keys of its own,
and who reads or writes across a border needs a work for each side (`slices`).
"""

from __future__ import annotations

import bisect
import errno
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from hicache_mooncake.transfer.transport import TransportError
from hicache_mooncake.transfer.verbs.api import Device, DeviceInfo, Mr, VerbsError

_HUGE_PAGE = 2 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_DEVICES = 64
MAX_PARTS = 1 << 16
"""Of one memory on all devices together."""
_Key = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Part(NamedTuple):
    """Of a registered memory: a stretch with a key of its own."""

    start: int
    length: int
    key: int


class Table:
    """The parts of one memory on one device, without gaps, in order."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._starts = [part.start for part in parts]

    def part(self, address: int) -> Part:
        """The part in which this address lies. Raises TransportError, `bounds`."""
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0 or address >= self.parts[number].start + self.parts[number].length:
            raise TransportError("bounds", f"{address:#x} is in no registered memory")
        return self.parts[number]


class _Token(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What peers are told: for each device the rkeys of the parts, which but for the last have one length."""

    start: _Place
    length: _Place
    devices: Annotated[dict[str, tuple[_Place, list[_Key]]], msgspec.Meta(max_length=MAX_DEVICES)]


_decode = msgspec.msgpack.Decoder(_Token)


def parse_token(token: bytes, address: int, length: int) -> dict[str, Table]:
    """The parts of a peer's memory by the name of the peer's device: what `Registration.token` was. Raises TransportError,
    `peer`, for bytes that are not one, or one of other memory."""
    try:
        told = _decode.decode(token)
    except msgspec.DecodeError as error:
        raise TransportError("peer", f"what the peer says of its memory cannot be read: {error}") from error
    if (told.start, told.length) != (address, length):
        raise TransportError(
            "peer", f"the peer says {length} bytes at {address:#x}, and its token {told.length} at {told.start:#x}"
        )
    tables = {}
    total = 0
    for name, (step, keys) in told.devices.items():
        total += len(keys)
        if not step or total > MAX_PARTS or len(keys) != -(-length // step):
            raise TransportError("peer", f"the peer's memory is told in {len(keys)} parts of {step} bytes on its {name}")
        tables[name] = Table(
            [Part(address + n * step, min(step, length - n * step), key) for n, key in enumerate(keys)]
        )  # fmt: skip
    return tables


@dataclass(slots=True)
class Registration:
    """A memory that devices reach. The memory stays its owner's, and must stay mapped until `close`."""

    address: int
    length: int
    tables: dict[str, Table]
    """By device, with lkeys."""
    token: bytes
    problems: dict[str, str]
    """Devices that do not reach it, and why: limits met, and what raises them."""
    _registered: list[Mr]

    def joined(self, more: Registration) -> Registration:
        """On the devices of both, which are those of `more` where it names one anew."""
        told, added = _decode.decode(self.token), _decode.decode(more.token)
        told.devices |= added.devices
        return Registration(
            self.address,
            self.length,
            self.tables | more.tables,
            msgspec.msgpack.encode(told),
            {name: why for name, why in self.problems.items() if name not in more.tables},
            self._registered + more._registered,
        )

    def close(self) -> None:
        """No peer reaches the memory any more when this returns. May be called again. Raises VerbsError when a device refuses;
        the others have let go of it then, and another call tries again."""
        failed: VerbsError | None = None
        for mr in list(self._registered):
            try:
                mr.close()
                self._registered.remove(mr)
            except VerbsError as error:
                failed = error
        if failed is not None:
            raise failed


def register(devices: Mapping[str, Device], address: int, length: int) -> Registration:
    """Register on all of these devices, which are named as peers will call them. One that fails is left out, `problems` says
    why. Raises TransportError, `memory`, when all do. May take long: memory is pinned at some GiB a second."""
    if length <= 0:
        raise TransportError("memory", f"{length} bytes at {address:#x} cannot be registered")
    tables: dict[str, Table] = {}
    told: dict[str, tuple[int, list[int]]] = {}
    problems: dict[str, str] = {}
    registered: list[Mr] = []
    for name, device in devices.items():
        step = part_length(device.info.max_mr_size, length)
        mine: list[Mr] = []
        try:
            for start in range(address, address + length, step):
                mine.append(device.register(start, min(step, address + length - start)))
        except VerbsError as error:
            for mr in mine:
                mr.close()
            pinned = sum(mr.length for mr in registered)
            problems[name] = explain(error, device.info, address, length, pinned, len(mine))
            continue
        registered += mine
        tables[name] = Table([Part(mr.address, mr.length, mr.lkey) for mr in mine])
        told[name] = (step, [mr.rkey for mr in mine])
    if not tables:
        raise TransportError("memory", "; ".join(problems.values()) or "there is no RDMA device to register it on")
    token = msgspec.msgpack.encode(_Token(address, length, told))
    return Registration(address, length, tables, token, problems, registered)


def part_length(max_mr_size: int, length: int) -> int:
    """Of the parts in which a memory is registered: all of it where the device takes that, else as much as it takes, in whole
    huge pages where it takes one, so that a page belongs to one part."""
    if not max_mr_size or length <= max_mr_size:
        return length
    unit = _HUGE_PAGE if max_mr_size >= _HUGE_PAGE else _PAGE
    return max(max_mr_size // unit * unit, unit)


# ---------------------------------------------------------------------- why not

_RAISE_MEMLOCK = (
    "raise the limit: `ulimit -l unlimited` in a shell, LimitMEMLOCK=infinity in a systemd unit, `--ulimit memlock=-1` "
    "for docker, or the capability IPC_LOCK in Kubernetes"
)


def explain(
    error: VerbsError,
    info: DeviceInfo,
    address: int,
    length: int,
    pinned: int = 0,
    parts: int = 0,
    memlock: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    mapping: Callable[[int], tuple[str, str] | None] | None = None,
) -> str:
    """A sentence for the operator: why this memory cannot be registered on this device, which limit was met, and what raises
    it. `pinned` bytes were registered on other devices before (each device counts anew), and `parts` parts on this one."""
    tried = f"{info.name} cannot register {length} bytes at {address:#x} ({error.reason})"
    permissions, name = (mapping or _mapping)(address) or ("", "")
    if not permissions:
        return f"{tried}: nothing is mapped there"
    if error.errno == errno.ENOMEM:
        limit = memlock()
        needed = pinned + length
        if limit != resource.RLIM_INFINITY and needed > limit:
            return (
                f"{tried}: RLIMIT_MEMLOCK is {limit >> 10} KiB, and {needed >> 10} KiB are needed, every device counted by "
                f"itself; {_RAISE_MEMLOCK}"
            )
        if info.max_mr and parts >= info.max_mr:
            return (
                f"{tried}: it needs {-(-length // part_length(info.max_mr_size, length))} parts of at most max_mr_size "
                f"{info.max_mr_size} bytes, and the device has room for max_mr {info.max_mr}; share less memory, or raise the "
                "device's limits in its driver's settings"
            )
        return (
            f"{tried}: the device, or the memory control group, has no room for it. Share less memory, use huge pages "
            "(hugepages), which take 512 times fewer entries of the device's tables, or use fewer devices (rdma_devices)"
        )
    if "nvidia" in name:
        return (
            f"{tried}: it is GPU memory ({name}), and the pool's is host memory. With "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True PyTorch's cannot be registered at all"
        )
    if "w" not in permissions:
        return f"{tried}: it is mapped read-only, and peers write to what is registered"
    if error.errno == errno.EFAULT and "huge" in name:
        return (
            f"{tried}: the kernel ran out of huge pages. Reserve them with "
            f"`sysctl vm.nr_hugepages={-(-length // _HUGE_PAGE)}` or more, or turn hugepages off"
        )
    if error.errno in (errno.EFAULT, errno.EOPNOTSUPP, errno.EPERM) and name.startswith("/") and not _in_memory(name):
        return (
            f"{tried}: it is a mapping of the file {name}, which the kernel does not pin; use anonymous memory, a memfd or "
            "/dev/shm"
        )
    if error.errno == errno.EINVAL and info.max_mr_size and length > info.max_mr_size:
        return (
            f"{tried}: it refuses parts of {part_length(info.max_mr_size, length)} bytes too, as its max_mr_size of "
            f"{info.max_mr_size} asks for; share less memory, or raise the limit in its driver's settings"
        )
    if error.errno in (errno.EFAULT, errno.EINVAL):
        return (
            f"{tried}: the kernel cannot pin it. Memory of PyTorch's expandable segments "
            "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), of a driver, or partly unmapped is like that; unset that "
            "setting, and give memory that malloc, mmap or a memfd made"
        )
    return tried


def _in_memory(name: str) -> bool:
    return name.startswith(("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV", "/anon_hugepage"))


def _mapping(address: int) -> tuple[str, str] | None:
    """(permissions, name) of the mapping in which this process has the address."""
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                start, _, end = fields[0].partition("-")
                if int(start, 16) <= address < int(end, 16):
                    return fields[1], fields[5].strip() if len(fields) > 5 else ""
    except OSError:
        return "rw", ""
    return None
