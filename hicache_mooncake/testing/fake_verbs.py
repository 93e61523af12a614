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
import ctypes
import errno
import itertools
import os
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from hicache_mooncake.transfer.verbs import api
from hicache_mooncake.transfer.verbs.api import Status

CHUNK = 64 << 10
"""Bytes that land at once."""
_MAX_CARDS = 200


@dataclass(slots=True)
class CardLimits:
    """A real card's, but small enough to be met."""

    max_sge: int = 30
    max_mr_size: int = 1 << 40
    max_mr: int = 1 << 16
    max_qp_wr: int = 8192
    max_cqe: int = 1 << 16
    max_msg_sz: int = 1 << 30
    max_rd_atomic: int = 16


@dataclass(slots=True)
class Counts:
    """What a card did since it was made."""

    posts: int = 0
    """Calls, whatever their number of works."""
    works: int = 0
    bytes: int = 0
    """That landed, of works of this card."""
    completions: int = 0
    queue_pairs: int = 0
    """Made, not open."""


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


@dataclass(slots=True)
class _Faults:
    posts: int = 0
    post_errno: int = 0
    registrations: int = 0
    registration_errno: int = 0
    lost: int = 0
    life: int | None = None
    """Works after which a queue pair of this card breaks."""
    budget: int | None = None
    """Bytes that may still land before the card stands still."""
    bytes_per_s: float = 0.0


class FakeCard:
    """The hardware, and the switches of its faults. A fault is on until it is taken back, or has hit as often as was said."""

    def __init__(self, host: FakeHost, name: str, ports: int, limits: CardLimits, link_layer: str) -> None:
        self.host, self.fabric, self.name, self.limits = host, host.fabric, name, limits
        self.network = "lan"
        """Cards of different networks do not reach each other, as in clusters with one network a rail."""
        self.counts = Counts()
        self.ports = {
            number: api.PortInfo(
                number, "ACTIVE", link_layer, 0 if link_layer == "Ethernet" else number, 4096, limits.max_msg_sz,
                _gids(host.fabric.address(), link_layer, name, number),
            )
            for number in range(1, ports + 1)
        }  # fmt: skip
        self.generation = 0
        """Goes up when the card vanishes: what was opened before stays dead."""
        self.gone = False
        self.flushes = True
        self.devices: set[FakeDevice] = set()
        """Open ones: who leaks nothing leaves none."""
        self.thread: threading.Thread | None = None
        self._queue: deque[tuple[FakeQp, api.Work]] = deque()
        self._faults = _Faults()

    # ------------------------------------------------------------------ faults

    def port_state(self, number: int, state: str) -> None:
        """`ACTIVE`, or `DOWN` and the like: then works of this port and towards it end with RETRY_EXC_ERR."""
        with self.fabric.changed:
            self.ports[number] = replace(self.ports[number], state=state)

    def gid_table(self, number: int, gids: Sequence[api.Gid]) -> None:
        with self.fabric.changed:
            self.ports[number] = replace(self.ports[number], gids=tuple(gids))

    def fail_posts(self, count: int = 1, code: int = errno.ENOMEM) -> None:
        """The next calls of `Qp.post` raise."""
        with self.fabric.changed:
            self._faults.posts, self._faults.post_errno = count, code

    def fail_registrations(self, count: int = 1, code: int = errno.EFAULT) -> None:
        with self.fabric.changed:
            self._faults.registrations, self._faults.registration_errno = count, code

    def lose_completions(self, count: int = 1) -> None:
        """The next works that succeed are never reported; their bytes have landed."""
        with self.fabric.changed:
            self._faults.lost = count

    def break_queue_pairs(self, after_works: int | None = 0) -> None:
        """Each queue pair, old or new, goes to the error state once it has carried out so many works; None takes it back."""
        with self.fabric.changed:
            self._faults.life = after_works

    def slow(self, bytes_per_s: float) -> None:
        """0 takes it back."""
        with self.fabric.changed:
            self._faults.bytes_per_s = bytes_per_s

    def hold(self, after_bytes: int = 0) -> None:
        """Stand still once so many more bytes have landed, in the middle of a work if need be, until `resume`."""
        with self.fabric.changed:
            self._faults.budget = after_bytes

    def resume(self) -> None:
        with self.fabric.changed:
            self._faults.budget = None
            self.fabric.changed.notify_all()

    @property
    def held(self) -> bool:
        """Whether it stands still by `hold` with a work under way."""
        with self.fabric.changed:
            return self._faults.budget == 0 and bool(self._queue)

    @property
    def busy(self) -> bool:
        """Whether works are outstanding that it has not ended yet."""
        with self.fabric.changed:
            return bool(self._queue)

    def vanish(self, flushes: bool = True) -> None:
        """Pulled out, or its driver is reset. What is outstanding is flushed, or with `flushes=False` never heard of again.
        What was opened stays dead, also after `come_back`."""
        with self.fabric.changed:
            self.gone, self.flushes = True, flushes
            self.generation += 1
            self.fabric.changed.notify_all()

    def come_back(self) -> None:
        with self.fabric.changed:
            self.gone = False

    # ------------------------------------------------------------------ what the objects below call, under the lock

    def info(self) -> api.DeviceInfo:
        most = self.limits
        return api.DeviceInfo(
            self.name, tuple(self.ports.values()), most.max_sge, most.max_mr_size, most.max_mr, most.max_qp_wr, most.max_cqe,
            most.max_rd_atomic,
        )  # fmt: skip

    def refuse_registration(self, length: int) -> int:
        """The errno, or 0."""
        if self._faults.registrations:
            self._faults.registrations -= 1
            return self._faults.registration_errno
        if length > self.limits.max_mr_size:
            return errno.EINVAL
        if sum(len(device.mrs) for device in self.devices) >= self.limits.max_mr:
            return errno.ENOMEM
        return errno.ENOMEM if 0 <= self.host.memlock < self.host.pinned + length else 0

    def begin(self, qp: FakeQp, works: Sequence[api.Work]) -> int:
        """The errno, or 0. What fits has begun."""
        self.counts.posts += 1
        if self._faults.posts:
            self._faults.posts -= 1
            return self._faults.post_errno
        for work in works:
            if len(work.sges) > qp.max_sge:
                return errno.EINVAL
            if len(qp.outstanding) >= qp.max_wr:
                return errno.ENOMEM
            self.counts.works += 1
            qp.outstanding.append(work)
            self._queue.append((qp, work))
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name=f"fake card {self.host.name} {self.name}", daemon=True)
            self.thread.start()
        self.fabric.changed.notify_all()
        return 0

    # ------------------------------------------------------------------ the card's thread

    def _run(self) -> None:
        changed = self.fabric.changed
        while True:
            with changed:
                changed.wait_for(lambda: self._queue or self.fabric.closed)
                if self.fabric.closed:
                    return
                qp, work = self._queue[0]
            status = self._carry_out(qp, work)
            with changed:
                self._queue.popleft()
                if status is not None:
                    qp.complete(work, status)

    def _carry_out(self, qp: FakeQp, work: api.Work) -> int | None:
        """The status, or None when nobody will ever hear of it."""
        changed = self.fabric.changed
        total = sum(length for _, length, _ in work.sges)
        done = 0
        while True:
            with changed:
                status = self._problem(qp, work, total)
                if status is not None:
                    return status if status >= 0 else None
                if done == total:
                    return self._succeeded(qp)
                faults = self._faults
                if faults.budget == 0:
                    changed.wait_for(
                        lambda: self._faults.budget != 0 or self.fabric.closed or self._problem(qp, work, total) is not None
                    )
                    if self.fabric.closed:
                        return None
                    continue
                size = min(CHUNK, total - done, *([] if faults.budget is None else [faults.budget]))
                size = self._copy(work, done, size)
                done += size
                self.counts.bytes += size
                if faults.budget is not None:
                    faults.budget -= size
                rate = faults.bytes_per_s
                if rate:
                    changed.wait_for(lambda: self.fabric.closed, size / rate)
                if self.fabric.closed:
                    return None

    _DROPPED = -1

    def _problem(self, qp: FakeQp, work: api.Work, total: int) -> int | None:
        """A status with which the work ends, or None as long as it may go on."""
        if qp.closed:
            return self._DROPPED
        if qp.device.generation != self.generation:
            return int(Status.WR_FLUSH_ERR) if self.flushes else self._DROPPED
        if qp.state == "ERR":
            return int(Status.WR_FLUSH_ERR)
        if self._faults.life is not None and qp.succeeded >= self._faults.life:
            return int(Status.RETRY_EXC_ERR)
        if total > self.limits.max_msg_sz:
            return int(Status.LOC_LEN_ERR)
        if not all(qp.device.covers(lkey, address, length, local=True) for address, length, lkey in work.sges):
            return int(Status.LOC_PROT_ERR)
        peer = self._peer(qp)
        if peer is None:
            return int(Status.RETRY_EXC_ERR)
        if total and not peer.device.covers(work.rkey, work.remote, total, local=False):
            peer.fail()
            return int(Status.REM_ACCESS_ERR)
        return None

    def _peer(self, qp: FakeQp) -> FakeQp | None:
        """The other end, if it answers."""
        peer = self.fabric.qps.get(qp.remote.number) if qp.remote else None
        if peer is None or peer.remote is None or qp.remote is None or peer.state != "RTS":
            return None
        mine, other = self.ports[qp.port], peer.card.ports[peer.port]
        answers = (
            (qp.remote.number, qp.remote.psn) == (peer.number, peer.psn)
            and (peer.remote.number, peer.remote.psn) == (qp.number, qp.psn)
            and mine.state == other.state == "ACTIVE"
            and mine.link_layer == other.link_layer
            and self.network == peer.card.network
            and peer.device.generation == peer.card.generation
            and qp.remote.gid == (there := _entry(other, peer.gid_index)).gid
            and there.type == _entry(mine, qp.gid_index).type
            and peer.mtu == qp.mtu
        )
        return peer if answers else None

    def _succeeded(self, qp: FakeQp) -> int | None:
        qp.succeeded += 1
        if self._faults.lost:
            self._faults.lost -= 1
            return None
        return int(Status.SUCCESS)

    def _copy(self, work: api.Work, offset: int, size: int) -> int:
        """Of the bytes from `offset` at most `size` and at most one stretch. How many."""
        before = 0
        for address, length, _ in work.sges:
            if offset < before + length:
                local, remote = address + offset - before, work.remote + offset
                size = min(size, before + length - offset)
                ctypes.memmove(*((remote, local) if work.op == "write" else (local, remote)), size)
                return size
            before += length
        raise AssertionError(f"offset {offset} of {before} bytes")


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
            entry = _entry(self.card.ports[self.port], gid_index)
            if not entry.gid:
                raise api.VerbsError(f"{self.card.name} has no GID {gid_index}", errno.EINVAL)
            lid = self.card.ports[self.port].lid
            return api.QpAddress(self.number, self.psn, entry.gid, lid, self.card.limits.max_rd_atomic)

    def connect(self, remote: api.QpAddress, gid_index: int, mtu: int, options: api.QpOptions = api.DEFAULT_QP_OPTIONS) -> None:
        with self._changed:
            self._check("INIT", "connect a queue pair")
            port = self.card.ports[self.port]
            if mtu not in api.MTUS or mtu > port.active_mtu or not _entry(port, gid_index).gid or len(remote.gid) != 39:
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


def _gids(address: int, link_layer: str, card: str, port: int) -> tuple[api.Gid, ...]:
    """As a mlx5 card of this kind has them: on Ethernet link-local and IPv4, each for both versions of RoCE."""
    local = f"fe80:0000:0000:0000:0200:00ff:fe00:{address:04x}"
    if link_layer != "Ethernet":
        return (api.Gid(0, local, "IB", ""),)
    routed = f"0000:0000:0000:0000:0000:ffff:0a00:{address:04x}"
    netdev = f"{card}np{port}"
    entries = [(local, "RoCE v1"), (local, "RoCE v2"), (routed, "RoCE v1"), (routed, "RoCE v2")]
    return tuple(api.Gid(index, gid, kind, netdev) for index, (gid, kind) in enumerate(entries))


_NO_GID = api.Gid(-1, "", "", "")


def _entry(port: api.PortInfo, index: int) -> api.Gid:
    return next((gid for gid in port.gids if gid.index == index), _NO_GID)
