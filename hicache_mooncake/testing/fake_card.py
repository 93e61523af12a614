"""A card of the fake RDMA devices (`fake_verbs`): what it carries out, on its own thread, and the switches of its faults."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicache_mooncake.transfer.verbs import api
from hicache_mooncake.transfer.verbs.api import Status

if TYPE_CHECKING:
    from hicache_mooncake.testing.fake_verbs import FakeDevice, FakeHost, FakeQp

CHUNK = 64 << 10
"""Bytes that land at once."""


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
        if not all(qp.device.covers(lkey, at, length, local=True) for at, length, lkey in work.sges if length):
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
            and (
                mine.link_layer == "InfiniBand"
                or (
                    qp.remote.gid == (there := entry(other, peer.gid_index)).gid
                    and there.type == entry(mine, qp.gid_index).type
                )
            )
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


def entry(port: api.PortInfo, index: int) -> api.Gid:
    return next((gid for gid in port.gids if gid.index == index), _NO_GID)
