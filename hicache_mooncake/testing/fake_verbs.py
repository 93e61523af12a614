"""RDMA without devices: the interface of `transfer.verbs.api` within one process, with real copies between registered memories,
the limits of real devices, and their faults.

    with FakeFabric() as fabric:
        a, b = fabric.host("a"), fabric.host("b")
        device = a.binding().open("mlx5_0")
        b.cards["mlx5_0"].port_state(1, "DOWN")

A `FakeFabric` has hosts, a host has cards. Works are carried out by a thread of each card, one after the other, in chunks. What
a real device keeps is kept here: order within a queue pair, the fence of `Qp.close` and `Mr.close`, slots of the send queue
that only a polled completion frees, events that only come for what completes after `Cq.arm`. Everything is thread-safe.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from hicache_mooncake.testing.fake_card import CardLimits, FakeCard, entry
from hicache_mooncake.transfer.verbs import api

__all__ = ["CardLimits", "FakeBinding", "FakeCard", "FakeCq", "FakeDevice", "FakeFabric", "FakeHost", "FakeMr", "FakeQp"]

_MAX_CARDS = 200


class FakeFabric:
    """Everything that can reach each other. A context manager; `close` ends the threads of the cards."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Its lock is around all state of all objects here, and around each chunk that lands."""
        self.qps: dict[int, FakeQp] = {}
        self.closed = False
        self._hosts: dict[str, FakeHost] = {}
        self._numbers = itertools.count(0x100)
        self._keys = itertools.count(secrets.randbelow(1 << 16) << 8, 0x101)
        self._addresses = itertools.count(1)

    def host(self, name: str, cards: Sequence[str] = ("mlx5_0",), memlock: int = -1) -> FakeHost:
        """A new host with these cards, of one port each. `memlock`: bytes that its processes may pin, -1 for any."""
        with self.changed:
            assert name not in self._hosts, f"there is a host {name} already"
            host = self._hosts[name] = FakeHost(self, name, memlock)
            for card in cards:
                host.add_card(card)
            return host

    @property
    def hosts(self) -> list[FakeHost]:
        with self.changed:
            return list(self._hosts.values())

    def number(self) -> int:
        with self.changed:
            return next(self._numbers) & 0xFFFFFF

    def key(self) -> int:
        with self.changed:
            return next(self._keys) & 0xFFFFFFFF

    def address(self) -> int:
        with self.changed:
            number = next(self._addresses)
            assert number <= _MAX_CARDS, "too many cards for one fabric"
            return number

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            threads = [card.thread for host in self._hosts.values() for card in host.cards.values() if card.thread is not None]
        for thread in threads:
            thread.join()

    def __enter__(self) -> FakeFabric:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class FakeHost:
    """A host; in one process with the others."""

    def __init__(self, fabric: FakeFabric, name: str, memlock: int) -> None:
        self.fabric, self.name = fabric, name
        self.memlock = memlock
        self.pinned = 0
        """Bytes, of all cards together: each registration counts."""
        self.cards: dict[str, FakeCard] = {}

    def add_card(self, name: str, ports: int = 1, limits: CardLimits | None = None, link_layer: str = "Ethernet") -> FakeCard:
        with self.fabric.changed:
            card = self.cards[name] = FakeCard(self, name, ports, limits or CardLimits(), link_layer)
            return card

    def binding(self) -> FakeBinding:
        return FakeBinding(self)


class FakeMr(api.Mr):
    def __init__(self, device: FakeDevice, address: int, length: int) -> None:
        self._device = device
        self.address, self.length = address, length
        self.lkey, self.rkey = device.card.fabric.key(), device.card.fabric.key()

    def close(self) -> None:
        with self._device.card.fabric.changed:
            if self in self._device.mrs:
                self._device.mrs.discard(self)
                self._device.card.host.pinned -= self.length


class FakeCq(api.Cq):
    def __init__(self, device: FakeDevice, entries: int) -> None:
        self.device, self._entries = device, entries
        self.qps: set[FakeQp] = set()
        self._changed = device.card.fabric.changed
        self._found: deque[tuple[FakeQp, api.Work, int]] = deque()
        self._armed = False
        self._broken = False
        self._closed = False
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, qp: FakeQp, work: api.Work, status: int) -> None:
        if self._closed:
            return
        self._broken = self._broken or len(self._found) >= self._entries
        self._found.append((qp, work, status))
        if self._armed:
            self._armed = False
            os.eventfd_write(self._event, 1)

    def poll(self, limit: int) -> list[api.Completion]:
        with self._changed:
            self._check()
            if self._broken:
                raise api.VerbsError(f"poll for completions: more than {self._entries} were not polled", errno.EIO)
            taken = [self._found.popleft() for _ in range(min(limit, len(self._found)))]
            for qp, work, _ in taken:
                qp.release(work)
        return [api.Completion(work.wr_id, status, api.status_text(status)) for _, work, status in taken]

    def arm(self) -> None:
        with self._changed:
            self._check()
            self._armed = True

    def fileno(self) -> int:
        return self._event

    def ack(self) -> None:
        with self._changed:
            self._check()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)

    def _check(self) -> None:
        if self._closed:
            raise api.VerbsError("the completion queue is closed", errno.EBADF)

    def close(self) -> None:
        with self._changed:
            for qp in list(self.qps):
                qp.close()
            if not self._closed:
                self._closed = True
                os.close(self._event)
            self.device.cqs.discard(self)


class FakeQp(api.Qp):
    def __init__(self, device: FakeDevice, cq: FakeCq, port: int, max_wr: int, max_sge: int) -> None:
        self.device, self.card, self.port, self.max_wr, self.max_sge = device, device.card, port, max_wr, max_sge
        self._cq = cq
        self._changed = device.card.fabric.changed
        self.number, self.psn = device.card.fabric.number(), secrets.randbelow(1 << 24)
        self.state = "RESET"
        self.closed = False
        self.remote: api.QpAddress | None = None
        self.gid_index = self.mtu = 0
        self.outstanding: deque[api.Work] = deque()
        self.succeeded = 0

    def init(self) -> None:
        with self._changed:
            self._check("RESET", "take a queue pair to INIT")
            self.state = "INIT"

    def address(self, gid_index: int) -> api.QpAddress:
        with self._changed:
            self._check("", "ask for the address")
            found = entry(self.card.ports[self.port], gid_index)
            lid = self.card.ports[self.port].lid
            if not found.gid and not lid:
                raise api.VerbsError(f"{self.card.name} has no GID {gid_index}", errno.EINVAL)
            return api.QpAddress(self.number, self.psn, found.gid, lid, self.card.limits.max_rd_atomic)

    def connect(self, remote: api.QpAddress, gid_index: int, mtu: int, options: api.QpOptions = api.DEFAULT_QP_OPTIONS) -> None:
        with self._changed:
            self._check("INIT", "connect a queue pair")
            port = self.card.ports[self.port]
            by_gid = bool(entry(port, gid_index).gid) and len(remote.gid) == 39
            if mtu not in api.MTUS or mtu > port.active_mtu or not (by_gid or (port.lid and remote.lid)):
                raise api.VerbsError(
                    f"connect a queue pair of {self.card.name} by GID {gid_index} to {remote} with an MTU of {mtu}",
                    errno.EINVAL,
                )
            self.remote, self.gid_index, self.mtu, self.state = remote, gid_index, mtu, "RTS"

    def post(self, works: Sequence[api.Work]) -> None:
        with self._changed:
            self._check("", f"post {len(works)} works")
            if self.state not in ("RTS", "ERR"):
                raise api.VerbsError(f"post {len(works)} works in the state {self.state}", errno.EINVAL)
            code = self.card.begin(self, works)
            if code:
                raise api.VerbsError(f"post {len(works)} works: {os.strerror(code)}", code)

    def complete(self, work: api.Work, status: int) -> None:
        if self.closed:
            return
        if status:
            self.fail()
        if status or work.signaled:
            self.card.counts.completions += 1
            self._cq.put(self, work, status)

    def fail(self) -> None:
        self.state = "ERR"
        self._changed.notify_all()

    def release(self, work: api.Work) -> None:
        """Its completion was polled: it and those before it leave the send queue."""
        while self.outstanding and self.outstanding.popleft() is not work:
            pass

    def _check(self, state: str, what: str) -> None:
        if self.closed:
            raise api.VerbsError(f"{what}: the queue pair is closed", errno.EBADF)
        self.device.check()
        if state and self.state != state:
            raise api.VerbsError(f"{what}: it is in the state {self.state}, not {state}", errno.EINVAL)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self.card.fabric.qps.pop(self.number, None)
            self._cq.qps.discard(self)
            self._changed.notify_all()


class FakeDevice(api.Device):
    def __init__(self, card: FakeCard) -> None:
        self.card = card
        self.generation = card.generation
        self.info = card.info()
        self.mrs: set[FakeMr] = set()
        self.cqs: set[FakeCq] = set()
        self._closed = False
        card.devices.add(self)

    def port(self, number: int) -> api.PortInfo:
        with self.card.fabric.changed:
            self.check()
            if number not in self.card.ports:
                raise api.VerbsError(f"{self.card.name} has no port {number}", errno.EINVAL)
            return self.card.ports[number]

    def register(self, address: int, length: int) -> api.Mr:
        with self.card.fabric.changed:
            self.check()
            code = self.card.refuse_registration(length) if length > 0 else errno.EINVAL
            if code:
                raise api.VerbsError(
                    f"register {length} bytes at {address:#x} on {self.card.name}: {os.strerror(code)}", code
                )  # fmt: skip
            mr = FakeMr(self, address, length)
            self.mrs.add(mr)
            self.card.host.pinned += length
            return mr

    def completions(self, entries: int) -> api.Cq:
        with self.card.fabric.changed:
            self.check()
            if not 0 < entries <= self.card.limits.max_cqe:
                raise api.VerbsError(f"make a completion queue of {entries} on {self.card.name}", errno.EINVAL)
            cq = FakeCq(self, entries)
            self.cqs.add(cq)
            return cq

    def queue_pair(self, cq: api.Cq, port: int, max_wr: int, max_sge: int) -> api.Qp:
        with self.card.fabric.changed:
            self.check()
            limits = self.card.limits
            if not isinstance(cq, FakeCq) or cq not in self.cqs or port not in self.card.ports:
                raise api.VerbsError(f"no such completion queue, or port {port}, on {self.card.name}", errno.EINVAL)
            if not 0 < max_wr <= limits.max_qp_wr or not 0 < max_sge <= limits.max_sge:
                raise api.VerbsError(f"make a queue pair of {max_wr} works with {max_sge} stretches", errno.EINVAL)
            qp = FakeQp(self, cq, port, max_wr, max_sge)
            self.card.counts.queue_pairs += 1
            cq.qps.add(qp)
            self.card.fabric.qps[qp.number] = qp
            return qp

    def covers(self, key: int, address: int, length: int, local: bool) -> bool:
        return any(
            key == (mr.lkey if local else mr.rkey) and mr.address <= address and address + length <= mr.address + mr.length
            for mr in self.mrs
        )

    def check(self) -> None:
        if self._closed:
            raise api.VerbsError(f"{self.card.name} is closed", errno.EBADF)
        if self.generation != self.card.generation:
            raise api.VerbsError(f"{self.card.name} is gone", errno.EIO)

    def close(self) -> None:
        with self.card.fabric.changed:
            for cq in list(self.cqs):
                cq.close()
            for mr in list(self.mrs):
                mr.close()
            self._closed = True
            self.card.devices.discard(self)


class FakeBinding(api.Binding):
    name = "fake"

    def __init__(self, host: FakeHost) -> None:
        self._host = host

    def devices(self) -> list[api.DeviceInfo]:
        with self._host.fabric.changed:
            return [card.info() for _, card in sorted(self._host.cards.items()) if not card.gone]

    def open(self, name: str) -> api.Device:
        with self._host.fabric.changed:
            card = self._host.cards.get(name)
            if card is None or card.gone:
                there = ", ".join(info.name for info in self.devices()) or "none"
                raise api.VerbsError(f"there is no RDMA device {name}, only: {there}", errno.ENODEV)
            return FakeDevice(card)
