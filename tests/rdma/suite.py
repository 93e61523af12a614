"""What both bindings do over rxe devices in a guest, and the fake device everywhere: the same tests."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from hicache_mooncake.transfer.verbs.api import Binding, Completion, Device, QpAddress, QpOptions, Sge, Status, VerbsError, Work
from hicache_mooncake.transfer.verbs.registration import parse_token, register

SIZE = 4 << 20
PATIENT_S = 60.0
MAX_WR, MAX_SGE = 128, 20
QUICK = QpOptions(ack_timeout=16, retries=4)
"""For ends whose peer is to be missed."""


@dataclass
class Rig:
    """Two ends that reach each other by the devices of the same name."""

    bindings: tuple[Binding, Binding]
    devices: tuple[str, str]
    set_link: Callable[[str, bool], None]
    """Take a device's link down, or up again, on both ends."""


class End:
    """A device, registered memory, a completion queue and one queue pair."""

    def __init__(self, binding: Binding, name: str, entries: int = 512) -> None:
        self.device: Device = binding.open(name)
        self.memory = mmap.mmap(-1, SIZE)
        self._view = ctypes.c_char.from_buffer(self.memory)
        self.base = ctypes.addressof(self._view)
        self.registration = register({name: self.device}, self.base, SIZE)
        self.lkey = self.registration.tables[name].parts[0].key
        self.rkey = parse_token(self.registration.token, self.base, SIZE)[name].parts[0].key
        self.cq = self.device.completions(entries)
        self.make_qp()

    def make_qp(self) -> None:
        self.qp = self.device.queue_pair(self.cq, 1, MAX_WR, MAX_SGE)
        self.qp.init()

    def gid_index(self) -> int:
        """Of an IPv4 address, for RoCE v2. It comes a moment after the link."""
        deadline = time.monotonic() + PATIENT_S
        while time.monotonic() < deadline:
            port = self.device.port(1)
            for gid in port.gids:
                if gid.type == "RoCE v2" and gid.gid.startswith("0000:0000:0000:0000:0000:ffff:") and port.state == "ACTIVE":
                    return gid.index
            time.sleep(0.05)
        raise AssertionError(f"no routed GID: {self.device.port(1)}")

    def address(self) -> QpAddress:
        return self.qp.address(self.gid_index())

    def connect(self, remote: QpAddress, options: QpOptions) -> None:
        self.qp.connect(remote, self.gid_index(), self.device.port(1).active_mtu, options)

    def sges(self, stretches: Sequence[tuple[int, int]]) -> list[Sge]:
        return [Sge(self.base + start, length, self.lkey) for start, length in stretches]

    def read(self, stretches: Sequence[tuple[int, int]]) -> bytes:
        return b"".join(self.memory[start : start + length] for start, length in stretches)

    def completed(self, count: int) -> list[Completion]:
        found: list[Completion] = []
        deadline = time.monotonic() + PATIENT_S
        while len(found) < count:
            found += self.cq.poll(count - len(found))
            assert time.monotonic() < deadline, f"{len(found)} of {count} completions: {found}"
            time.sleep(0.001)
        return found

    def close(self) -> None:
        self.device.close()
        self.registration.close()
        del self._view
        self.memory.close()


def connect(a: End, b: End, options: QpOptions = QpOptions()) -> None:  # noqa: B008 (frozen)
    here, there = a.address(), b.address()
    a.connect(there, options)
    b.connect(here, options)


def write(stretches: list[Sge], peer: End, at: int, wr_id: int = 1, signaled: bool = True, rkey: int = 0) -> Work:
    return Work("write", stretches, peer.base + at, rkey or peer.rkey, wr_id, signaled)


def odd_stretches(rnd: random.Random, count: int, most: int) -> list[tuple[int, int]]:
    """With gaps, from the start of the memory on."""
    found, start = [], 100
    for _ in range(count):
        length = rnd.randrange(1, most)
        found.append((start, length))
        start += length + rnd.randrange(1, 3000)
    return found


class VerbsTests:
    """Wants a fixture `rig`."""

    @pytest.fixture
    def ends(self, rig: Rig) -> Iterator[tuple[End, End]]:
        with self.pair(rig, rig.devices[0]) as both:
            yield both

    @contextlib.contextmanager
    def pair(self, rig: Rig, name: str, options: QpOptions = QpOptions()) -> Iterator[tuple[End, End]]:  # noqa: B008
        with contextlib.ExitStack() as stack:
            a, b = End(rig.bindings[0], name), End(rig.bindings[1], name)
            stack.callback(a.close)
            stack.callback(b.close)
            connect(a, b, options)
            yield a, b

    def test_devices_are_described_with_their_limits_ports_and_gids(self, rig: Rig) -> None:
        found = {info.name: info for info in rig.bindings[0].devices()}
        assert set(rig.devices) <= set(found)
        for name in rig.devices:
            info = found[name]
            assert not info.problem
            assert info.max_sge >= MAX_SGE
            assert min(info.max_mr_size, info.max_mr, info.max_qp_wr, info.max_cqe, info.max_rd_atomic) > 0
            (port,) = info.ports
            assert (port.number, port.state, port.link_layer, port.lid) == (1, "ACTIVE", "Ethernet", 0)
            assert port.active_mtu in (1024, 2048, 4096)
            assert port.max_msg_sz >= 1 << 20
            assert any(gid.netdev and gid.type == "RoCE v2" for gid in port.gids)

    def test_a_name_that_is_not_there_is_refused_with_those_that_are(self, rig: Rig) -> None:
        with pytest.raises(VerbsError, match=rig.devices[0]) as caught:
            rig.bindings[0].open("mlx5_99")
        assert "mlx5_99" in caught.value.reason

    def test_a_write_gathers_and_a_read_scatters_odd_stretches(self, ends: tuple[End, End]) -> None:
        a, b = ends
        rnd = random.Random(7)
        stretches = odd_stretches(rnd, MAX_SGE, 40000)
        total = sum(length for _, length in stretches)
        a.memory[:] = rnd.randbytes(SIZE)
        a.qp.post([write(a.sges(stretches), b, 4099)])
        assert a.completed(1)[0][:2] == (1, 0)
        assert b.memory[4099 : 4099 + total] == a.read(stretches)
        assert not any(b.memory[:4099])
        assert not any(b.memory[4099 + total :])

        b.memory[: total + 3] = rnd.randbytes(total + 3)
        before = a.memory[:]
        a.qp.post([Work("read", a.sges(stretches), b.base + 3, b.rkey, 2)])
        assert a.completed(1)[0][:2] == (2, 0)
        assert a.read(stretches) == b.memory[3 : 3 + total]
        end = 0
        for start, length in stretches:
            assert a.memory[end:start] == before[end:start], "the bytes between the stretches"
            end = start + length
        assert a.memory[end:] == before[end:]

    def test_both_ends_post_lists_of_which_only_the_last_work_is_reported(self, ends: tuple[End, End]) -> None:
        a, b = ends
        rnd = random.Random(8)
        half, step, count = SIZE // 2, 3001, 100
        for end in ends:
            end.memory[:half] = rnd.randbytes(half)
        for round_ in range(3):  # the slots of silent works are used again
            for here, there in ((a, b), (b, a)):
                here.qp.post(
                    [
                        write(here.sges([(n * step, step)]), there, half + n * step, 100 * round_ + n, n == count - 1)
                        for n in range(count)
                    ]
                )
            for end in ends:
                assert [done[:2] for done in end.completed(1)] == [(100 * round_ + count - 1, 0)]
        assert b.memory[half : half + count * step] == a.memory[: count * step]
        assert a.memory[half : half + count * step] == b.memory[: count * step]
        assert not a.cq.poll(10)

    def test_an_event_comes_for_what_completes_after_it_was_asked_for(self, ends: tuple[End, End]) -> None:
        a, b = ends

        def event(wait_s: float) -> bool:
            return bool(select.select([a.cq], [], [], wait_s)[0])

        a.qp.post([write(a.sges([(0, 64)]), b, 0, 1)])
        a.completed(1)
        assert not event(0), "nobody asked"
        a.cq.arm()
        a.qp.post([write(a.sges([(0, 64)]), b, 0, 2)])
        assert event(PATIENT_S)
        a.cq.ack()
        assert not event(0)
        assert [done.wr_id for done in a.completed(1)] == [2]
        a.cq.ack()  # nothing to be taken is fine

    @pytest.mark.parametrize("mistake", ["wrong rkey", "past the end", "deregistered"])
    def test_memory_that_is_not_shared_is_out_of_reach(self, ends: tuple[End, End], mistake: str) -> None:
        a, b = ends
        a.memory[:64] = b"x" * 64
        if mistake == "deregistered":
            b.registration.close()
        at = SIZE - 10 if mistake == "past the end" else 0
        rkey = b.rkey ^ 0xFF00 if mistake == "wrong rkey" else b.rkey
        a.qp.post([write(a.sges([(0, 64)]), b, at, 1, rkey=rkey), write(a.sges([(0, 64)]), b, 128, 2)])
        first, second = a.completed(2)
        assert first[:2] == (1, Status.REM_ACCESS_ERR)
        assert "registered" in first.status_text
        assert second[:2] == (2, Status.WR_FLUSH_ERR)
        assert b.memory[:] == bytes(SIZE)

        if mistake != "deregistered":  # and a new queue pair on each end works
            for end in ends:
                end.qp.close()
                end.make_qp()
            connect(a, b)
            a.qp.post([write(a.sges([(0, 64)]), b, 256, 3)])
            assert a.completed(1)[0][:2] == (3, 0)
            assert b.memory[256:320] == b"x" * 64

    @pytest.mark.parametrize("op", ["write", "read"])
    def test_nothing_lands_once_a_queue_pair_is_closed_in_the_middle_of_a_batch(self, rig: Rig, op: str) -> None:
        """Whether the bytes come because the peer writes them, or because they were asked for."""
        with self.pair(rig, rig.devices[0], QUICK) as (a, b):
            writer, target = a, b
            target.memory[:] = bytes(SIZE)
            writer.memory[:] = random.Random(9).randbytes(SIZE)
            size = 256 << 10
            places = range(0, SIZE, size)
            if op == "write":
                writer.qp.post([write(writer.sges([(at, size)]), target, at, at) for at in places])
            else:
                target.qp.post([Work("read", target.sges([(at, size)]), writer.base + at, writer.rkey, at) for at in places])
            deadline = time.monotonic() + PATIENT_S
            while not any(target.memory[:4096]) and time.monotonic() < deadline:
                time.sleep(0)  # until the first bytes have come
            target.qp.close()
            landed = target.memory[:]
            assert any(landed)
            if op == "write":
                # The writer goes on until it finds that nobody answers.
                last = writer.completed(len(places))[-1]
                assert last.status in (0, Status.RETRY_EXC_ERR, Status.WR_FLUSH_ERR)
            else:
                time.sleep(0.5)
            assert target.memory[:] == landed

    def test_more_stretches_than_agreed_are_refused(self, ends: tuple[End, End]) -> None:
        a, b = ends
        too_many = a.device.info.max_sge + 1
        with pytest.raises(VerbsError) as caught:
            a.qp.post([write(a.sges([(n, 1) for n in range(too_many)]), b, 0)])
        assert caught.value.errno

    def test_what_is_closed_says_so_and_may_be_closed_again(self, ends: tuple[End, End]) -> None:
        a, b = ends
        a.qp.close()
        a.qp.close()
        with pytest.raises(VerbsError, match="closed"):
            a.qp.post([write(a.sges([(0, 64)]), b, 0)])
        a.cq.close()
        with pytest.raises(VerbsError, match="closed"):
            a.cq.poll(1)
        with pytest.raises(VerbsError, match="closed"):
            a.cq.arm()
        a.device.close()
        a.device.close()
        with pytest.raises(VerbsError, match="closed"):
            a.device.register(a.base, SIZE)
        with pytest.raises(VerbsError, match="closed"):
            a.device.completions(16)
        with pytest.raises(VerbsError, match="closed"):
            a.device.port(1)

    def test_closing_a_device_closes_what_was_made_of_it_and_no_descriptor_stays(self, rig: Rig) -> None:
        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        counts = []
        for _ in range(5):
            with self.pair(rig, rig.devices[0]) as (a, _):
                a.make_qp()
                a.device.completions(16)
                a.device.register(a.base, 4096)
            counts.append(descriptors())
        assert counts[-1] == counts[1], counts

    def test_a_link_that_goes_down_fails_its_works_and_no_others(self, rig: Rig) -> None:
        broken, sound = rig.devices
        with self.pair(rig, broken, QUICK) as (a, b), self.pair(rig, sound) as (c, d):
            for end in (a, c):
                end.memory[:64] = b"y" * 64
                end.qp.post([write(end.sges([(0, 64)]), b if end is a else d, 0)])
                assert end.completed(1)[0].status == 0
            rig.set_link(broken, False)
            try:
                deadline = time.monotonic() + PATIENT_S
                while a.device.port(1).state == "ACTIVE":
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                a.qp.post([write(a.sges([(0, 64)]), b, 64, 7), write(a.sges([(0, 64)]), b, 128, 8)])
                c.qp.post([write(c.sges([(0, 64)]), d, 64, 9)])
                assert [done[:2] for done in c.completed(1)] == [(9, 0)]
                first, second = a.completed(2)
                assert first.wr_id == 7
                assert first.status in (Status.RETRY_EXC_ERR, Status.LOC_QP_OP_ERR)
                assert second[:2] == (8, Status.WR_FLUSH_ERR)
            finally:
                rig.set_link(broken, True)
            for end in (a, b):
                end.qp.close()
                end.make_qp()
            connect(a, b)
            a.qp.post([write(a.sges([(0, 64)]), b, 192, 10)])
            assert a.completed(1)[0][:2] == (10, 0)
            assert b.memory[192:256] == b"y" * 64
