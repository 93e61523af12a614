"""What both bindings share: the objects of `api` over one package's `Calls`, with their locks, their closing in the right
order, and their errors."""

from __future__ import annotations

import abc
import contextlib
import errno
import ipaddress
import os
import secrets
import select
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hicache_mooncake.transfer.verbs import api, sysfs

_NO_RDMA = (errno.ENOSYS, errno.ENODEV, errno.ENOENT)
"""What libibverbs says of a kernel without RDMA, instead of an empty list."""
_STATES = {0: "NOP", 1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}
_ETHERNET = 2
"""IBV_LINK_LAYER_ETHERNET. InfiniBand is 1, or 0 with old providers, which say unspecified."""
_MAX_GIDS_ASKED = 256
_EMPTY_GID = bytes(16)


class Limits(NamedTuple):
    """Of `ibv_device_attr`."""

    ports: int
    max_sge: int
    max_mr_size: int
    max_mr: int
    max_qp_wr: int
    max_cqe: int
    max_qp_rd_atom: int


class Port(NamedTuple):
    """Of `ibv_port_attr`, in its numbers."""

    state: int
    link_layer: int
    lid: int
    active_mtu: int
    max_msg_sz: int
    gid_tbl_len: int


class Route(NamedTuple):
    """To a peer's queue pair."""

    remote: api.QpAddress
    dgid: bytes
    is_global: bool
    port: int
    gid_index: int
    mtu: int
    """As the verbs number it, 1 to 5."""
    rd_atomic: int
    dest_rd_atomic: int
    options: api.QpOptions


class Calls(abc.ABC):
    """The verbs in the words of one package. Handles are its own objects. Errors are those of `errors`; whoever calls takes
    care of order and of threads."""

    errors: tuple[type[Exception], ...]

    @abc.abstractmethod
    def errno(self, error: Exception) -> int:
        """0 where there is none."""

    @abc.abstractmethod
    def names(self) -> list[str]: ...

    @abc.abstractmethod
    def open(self, name: str) -> Any: ...

    @abc.abstractmethod
    def limits(self, context: Any) -> Limits: ...

    @abc.abstractmethod
    def port(self, context: Any, number: int) -> Port: ...

    @abc.abstractmethod
    def gid(self, context: Any, port: int, index: int) -> bytes: ...

    @abc.abstractmethod
    def protection_domain(self, context: Any) -> Any: ...

    @abc.abstractmethod
    def register(self, domain: Any, address: int, length: int) -> tuple[Any, int, int]:
        """The handle, lkey and rkey."""

    @abc.abstractmethod
    def channel(self, context: Any) -> tuple[Any, int]:
        """The handle and its descriptor."""

    @abc.abstractmethod
    def completion_queue(self, context: Any, channel: Any, entries: int) -> Any: ...

    @abc.abstractmethod
    def poll(self, cq: Any, limit: int) -> list[tuple[int, int]]:
        """(wr_id, status) of each."""

    @abc.abstractmethod
    def request_event(self, cq: Any) -> None: ...

    @abc.abstractmethod
    def take_event(self, channel: Any, cq: Any) -> None:
        """And acknowledge it."""

    @abc.abstractmethod
    def queue_pair(self, domain: Any, cq: Any, max_wr: int, max_sge: int) -> tuple[Any, int]:
        """The handle and its number."""

    @abc.abstractmethod
    def to_init(self, qp: Any, port: int) -> None: ...

    @abc.abstractmethod
    def connect(self, qp: Any, psn: int, route: Route) -> None: ...

    @abc.abstractmethod
    def post(self, qp: Any, works: Sequence[api.Work]) -> None: ...

    def close(self, handle: Any) -> None:
        """Raises when something of it is still open."""
        handle.close()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except self.errors as error:
            code = self.errno(error)
            raise api.VerbsError(f"{what}: {os.strerror(code) if code else error}", code) from error


class VerbsMr(api.Mr):
    def __init__(self, device: VerbsDevice, address: int, length: int) -> None:
        with device.calls.doing(f"register {length} bytes at {address:#x} on {device.info.name}"):
            self._handle, self.lkey, self.rkey = device.calls.register(device.domain, address, length)
        self.address, self.length = address, length
        self._device = device

    def close(self) -> None:
        with self._device.memory_lock:
            if self in self._device.mrs:
                with self._device.calls.doing(f"deregister {self.length} bytes at {self.address:#x}"):
                    self._device.calls.close(self._handle)
                self._device.mrs.discard(self)


class VerbsCq(api.Cq):
    def __init__(self, device: VerbsDevice, entries: int) -> None:
        self.qps: set[VerbsQp] = set()
        self._device = device
        self._lock = threading.Lock()
        """Around use, so that none meets the closing."""
        self._closed = False
        calls = device.calls
        with calls.doing(f"make a completion queue of {entries} on {device.info.name}"), contextlib.ExitStack() as undo:
            self._channel, self._fd = calls.channel(device.context)
            undo.callback(calls.close, self._channel)
            os.set_blocking(self._fd, False)
            self.handle = calls.completion_queue(device.context, self._channel, entries)
            undo.pop_all()

    def poll(self, limit: int) -> list[api.Completion]:
        with self._using("poll for completions"):
            found = self._device.calls.poll(self.handle, limit)
        return [api.Completion(wr_id, status, api.status_text(status)) for wr_id, status in found]

    def arm(self) -> None:
        with self._using("ask for an event"):
            self._device.calls.request_event(self.handle)

    def fileno(self) -> int:
        return self._fd

    def ack(self) -> None:
        with self._using("take an event"):
            waiting = select.poll()
            waiting.register(self._fd, select.POLLIN)
            while waiting.poll(0):
                self._device.calls.take_event(self._channel, self.handle)

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[None]:
        with self._lock, self._device.calls.doing(f"{what} of {self._device.info.name}"):
            if self._closed:
                raise api.VerbsError(f"{what}: the completion queue is closed", errno.EBADF)
            yield

    def close(self) -> None:
        calls = self._device.calls
        with self._device.lock:
            for qp in list(self.qps):
                qp.close()
            with self._lock, calls.doing(f"close a completion queue of {self._device.info.name}"):
                if not self._closed:
                    calls.close(self.handle)
                    self._closed = True
                    calls.close(self._channel)
                self._device.cqs.discard(self)


class VerbsQp(api.Qp):
    def __init__(self, device: VerbsDevice, cq: VerbsCq, port: int, max_wr: int, max_sge: int) -> None:
        self._device, self._cq, self.port = device, cq, port
        self._lock = threading.Lock()
        """Around use, so that none meets the closing."""
        self._closed = False
        self.psn = secrets.randbelow(1 << 24)
        with device.calls.doing(f"make a queue pair of {max_wr} works with {max_sge} stretches on {device.info.name}"):
            self._handle, self.number = device.calls.queue_pair(device.domain, cq.handle, max_wr, max_sge)

    def init(self) -> None:
        with self._using("take a queue pair to INIT"):
            self._device.calls.to_init(self._handle, self.port)

    def address(self, gid_index: int) -> api.QpAddress:
        with self._using(f"ask for GID {gid_index} of port {self.port}"):
            port = self._device.calls.port(self._device.context, self.port)
            gid = self._gid(port, gid_index)
        return api.QpAddress(
            self.number, self.psn, api.gid_text(gid) if gid else "", port.lid, max(self._device.info.max_rd_atomic, 1)
        )

    def _gid(self, port: Port, index: int) -> bytes:
        """Empty where an InfiniBand port has none, and its LID must do."""
        calls = self._device.calls
        try:
            gid = calls.gid(self._device.context, self.port, index)
        except calls.errors:
            if port.link_layer == _ETHERNET or not port.lid:
                raise
            return b""
        return b"" if gid == _EMPTY_GID and port.link_layer != _ETHERNET else gid

    def connect(self, remote: api.QpAddress, gid_index: int, mtu: int, options: api.QpOptions = api.DEFAULT_QP_OPTIONS) -> None:
        own_depth = max(self._device.info.max_rd_atomic, 1)
        with self._using(f"connect a queue pair to number {remote.number} at {remote.gid}, lid {remote.lid}"):
            try:
                dgid = ipaddress.IPv6Address(remote.gid).packed if remote.gid else b""
                mtu_code = api.MTUS.index(mtu) + 1
            except ValueError as error:
                raise api.VerbsError(f"cannot connect to {remote} with an MTU of {mtu}: {error}", errno.EINVAL) from error
            calls = self._device.calls
            port = calls.port(self._device.context, self.port)
            own = self._gid(port, gid_index)
            # Within one InfiniBand subnet the lid is enough; RoCE, and other subnets, need the global header.
            is_global = port.link_layer == _ETHERNET or not remote.lid or bool(own and dgid and own[:8] != dgid[:8])
            if is_global and not dgid:
                raise api.VerbsError(f"cannot connect to {remote}: it has neither a LID nor a GID", errno.EINVAL)
            calls.connect(
                self._handle,
                self.psn,
                Route(
                    remote, dgid or _EMPTY_GID, is_global, self.port, gid_index, mtu_code,
                    max(min(own_depth, remote.rd_atomic), 1), own_depth, options,
                ),
            )  # fmt: skip

    def post(self, works: Sequence[api.Work]) -> None:
        with self._using(f"post {len(works)} works"):
            self._device.calls.post(self._handle, works)

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[None]:
        with self._lock, self._device.calls.doing(f"{what}, {self._device.info.name}"):
            if self._closed:
                raise api.VerbsError(f"{what}: the queue pair is closed", errno.EBADF)
            yield

    def close(self) -> None:
        with self._device.lock, self._lock, self._device.calls.doing(f"destroy a queue pair of {self._device.info.name}"):
            if not self._closed:
                self._device.calls.close(self._handle)
                self._closed = True
            self._cq.qps.discard(self)


class VerbsDevice(api.Device):
    def __init__(self, calls: Calls, name: str) -> None:
        self.calls = calls
        self.lock = threading.RLock()
        """Around the making and closing of queues. Taken before a queue's own."""
        self.memory_lock = threading.Lock()
        """The same for memory, apart from it since pinning many GiB takes seconds."""
        self.mrs: set[VerbsMr] = set()
        self.cqs: set[VerbsCq] = set()
        self._closed = False
        with contextlib.ExitStack() as undo:
            with calls.doing(f"open {name}"):
                self.context = calls.open(name)
                undo.callback(calls.close, self.context)
            self.info = describe(calls, self.context, name)
            with calls.doing(f"make a protection domain on {name}"):
                self.domain = calls.protection_domain(self.context)
            undo.pop_all()

    def port(self, number: int) -> api.PortInfo:
        with self.lock:
            self._check()
            return describe_port(self.calls, self.context, self.info.name, number)

    def register(self, address: int, length: int) -> api.Mr:
        with self.memory_lock:
            self._check()
            mr = VerbsMr(self, address, length)
            self.mrs.add(mr)
            return mr

    def completions(self, entries: int) -> api.Cq:
        with self.lock:
            self._check()
            cq = VerbsCq(self, entries)
            self.cqs.add(cq)
            return cq

    def queue_pair(self, cq: api.Cq, port: int, max_wr: int, max_sge: int) -> api.Qp:
        with self.lock:
            self._check()
            if not isinstance(cq, VerbsCq) or cq not in self.cqs:
                raise api.VerbsError(f"the completion queue is not one of {self.info.name}, or closed", errno.EINVAL)
            qp = VerbsQp(self, cq, port, max_wr, max_sge)
            cq.qps.add(qp)
            return qp

    def _check(self) -> None:
        if self._closed:
            raise api.VerbsError(f"{self.info.name} is closed", errno.EBADF)

    def close(self) -> None:
        with self.lock:
            for cq in list(self.cqs):
                cq.close()
            for mr in list(self.mrs):
                mr.close()
            with self.memory_lock, self.calls.doing(f"close {self.info.name}"):
                if not self._closed:
                    self._closed = True
                    self.calls.close(self.domain)
                    self.calls.close(self.context)


class VerbsBinding(api.Binding):
    """Of a package: a subclass has its name and its `Calls`."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def devices(self) -> list[api.DeviceInfo]:
        found = []
        for name in self._names():
            try:
                with self.calls.doing(f"open {name}"):
                    context = self.calls.open(name)
                try:
                    found.append(describe(self.calls, context, name))
                finally:
                    with self.calls.doing(f"close {name}"):
                        self.calls.close(context)
            except api.VerbsError as error:
                found.append(api.DeviceInfo(name, problem=error.reason))
        return found

    def open(self, name: str) -> api.Device:
        names = self._names()
        if name not in names:
            raise api.VerbsError(f"there is no RDMA device {name}, only: {', '.join(names) or 'none'}", errno.ENODEV)
        return VerbsDevice(self.calls, name)

    def _names(self) -> list[str]:
        try:
            with self.calls.doing("list RDMA devices"):
                return sorted(self.calls.names())
        except api.VerbsError as error:
            if error.errno in _NO_RDMA:
                return []
            raise


def describe(calls: Calls, context: Any, name: str) -> api.DeviceInfo:
    """An open device as it is now. Raises VerbsError."""
    with calls.doing(f"ask {name} for its limits"):
        limits = calls.limits(context)
    ports = tuple(describe_port(calls, context, name, number) for number in range(1, limits.ports + 1))
    return api.DeviceInfo(
        name, ports, limits.max_sge, limits.max_mr_size, limits.max_mr, limits.max_qp_wr, limits.max_cqe, limits.max_qp_rd_atom
    )


def describe_port(calls: Calls, context: Any, name: str, number: int) -> api.PortInfo:
    with calls.doing(f"ask {name} for its port {number}"):
        port = calls.port(context, number)
        link_layer = "Ethernet" if port.link_layer == _ETHERNET else "InfiniBand"
        gids = (
            sysfs.gids(name, number, link_layer)
            if sysfs.present()
            else _asked_gids(calls, context, number, min(port.gid_tbl_len, _MAX_GIDS_ASKED))
        )
    mtu = api.MTUS[port.active_mtu - 1] if 1 <= port.active_mtu <= len(api.MTUS) else 0
    return api.PortInfo(number, _STATES.get(port.state, "DOWN"), link_layer, port.lid, mtu, port.max_msg_sz, gids)


def _asked_gids(calls: Calls, context: Any, port: int, length: int) -> tuple[api.Gid, ...]:
    found = []
    for index in range(length):
        try:
            gid = calls.gid(context, port, index)
        except calls.errors:
            continue  # an empty entry, with some providers
        if gid != _EMPTY_GID:
            found.append(api.Gid(index, api.gid_text(gid), "", ""))
    return tuple(found)
