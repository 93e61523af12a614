"""Where memory lies decides where movers run and where the store's pages go; a system that refuses costs speed only."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client import mover
from hicache_mooncake.testing.local import FakeRank, page_hash
from hicache_mooncake.transfer import numa
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.topology import NumaNode
from hicache_mooncake.wire import Wire
from tests import sysfs_trees
from tests.conftest import NodeProcess

PAGE = mmap.PAGESIZE
TWO_SOCKETS = "4 NICs, 8 GPUs behind 4 switches, 2 sockets"
FIRST, SECOND = {*range(32), *range(64, 96)}, {*range(32, 64), *range(96, 128)}


class FakeSystem(numa.System):
    """Two sockets. Memory below 1 GiB is on node 0, below 2 GiB on node 1, below 3 GiB on both by turns, and above there is
    none yet."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.allowed = set(range(128))
        self.may_use = [0, 1]
        self.asked = 0
        self.spread: list[tuple[int, int, list[int]]] = []
        self.thread: list[list[int]] = []

    def _check(self, call: str) -> None:
        if call == self.refuses:
            raise OSError(errno.EPERM, "Operation not permitted")

    def nodes_of_pages(self, pid: int, addresses: Sequence[int]) -> list[int]:
        self._check("move_pages")
        self.asked += len(addresses)
        return [(0, 1, address // PAGE % 2, -errno.ENOENT)[min(address >> 30, 3)] for address in addresses]

    def interleave_memory(self, address: int, length: int, nodes: Sequence[int]) -> None:
        self._check("mbind")
        self.spread.append((address, length, list(nodes)))

    def interleave_thread(self, nodes: Sequence[int]) -> None:
        self._check("set_mempolicy")
        self.thread.append(list(nodes))

    def cpus(self) -> set[int]:
        return set(self.allowed)

    def run_on(self, cpus: Iterable[int]) -> None:
        self.allowed = set(cpus)

    def memory_nodes(self) -> list[int]:
        return self.may_use


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    return sysfs_trees.unpack(TWO_SOCKETS, tmp_path)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("regions", "node"),
    [
        ([(0, GIB)], 0),
        ([(GIB, GIB)], 1),
        ([(2 * GIB, GIB)], None),
        ([(3 * GIB, GIB)], None),
        ([(0, GIB), (GIB, GIB)], None),
        ([(0, GIB), (GIB, GIB // 16)], 0),
        ([(GIB, GIB), (3 * GIB, 100 * GIB)], 1),
        ([(GIB + 5, 1)], 1),
        ([(0, 0)], None),
        ([], None),
    ],
    ids=str,
)
def test_memory_is_on_a_node_when_nearly_all_of_it_is(regions: list[tuple[int, int]], node: int | None) -> None:
    system = FakeSystem()
    assert numa.node_of(1, regions, system) == node
    assert system.asked <= 64 * len(regions), "a pool of a terabyte is asked about by a few pages"


def test_memory_in_very_many_pieces_is_asked_about_by_a_few_of_them() -> None:
    system = FakeSystem()
    assert numa.node_of(1, [(GIB + number * 2 * PAGE, PAGE) for number in range(10_000)], system) == 1
    assert system.asked <= 4096


def test_samples_are_pages_within_the_memory() -> None:
    for address, length in ((0, PAGE), (PAGE, 7 * PAGE), (12345, 10 << 30), (PAGE - 1, 2)):
        sampled = numa.sample(address, length)
        assert len(sampled) == len(set(sampled)) <= 64
        assert all(at % PAGE == 0 and address - PAGE < at < address + length for at in sampled)


def test_a_mover_runs_beside_the_memory_and_goes_with_it(two_sockets: Path) -> None:
    system = FakeSystem()
    near = numa.Nearness(system, two_sockets)
    assert "NUMA node 1" in near.move_to(7, [(GIB, GIB)])
    assert system.allowed == SECOND
    assert "NUMA node 0" in near.move_to(7, [(0, GIB)])
    assert system.allowed == FIRST
    assert near.move_to(7, [(2 * GIB, GIB)]) == ""
    assert system.allowed == FIRST | SECOND


def test_a_mover_stays_within_the_processors_it_was_given(two_sockets: Path) -> None:
    system = FakeSystem()
    system.allowed = {3, 4, 40}
    near = numa.Nearness(system, two_sockets)
    near.move_to(7, [(0, GIB)])
    assert system.allowed == {3, 4}
    near.move_to(7, [(GIB, GIB)])
    assert system.allowed == {40}
    only = FakeSystem()
    only.allowed = {3}
    assert numa.Nearness(only, two_sockets).move_to(7, [(GIB, GIB)]) == ""
    assert only.allowed == {3}


def test_a_refusal_leaves_the_mover_where_it_is_and_says_what_to_do(two_sockets: Path) -> None:
    system = FakeSystem(refuses="move_pages")
    said = numa.Nearness(system, two_sockets).move_to(7, [(0, GIB)])
    assert "--cap-add SYS_NICE" in said
    assert system.allowed == set(range(128))


def test_the_stores_memory_goes_over_all_nodes_that_have_memory_and_processors(two_sockets: Path) -> None:
    system = FakeSystem()
    interleaving = numa.Interleaving(True, system, two_sockets)
    with interleaving.allocating():
        assert system.thread == [[0, 1]]
    interleaving.of(1 << 40, GIB)
    assert system.thread == [[0, 1], []], "the thread is as it was"
    assert system.spread == [(1 << 40, GIB, [0, 1])]
    assert interleaving.problem == ""
    nodes = [NumaNode(0, (0,)), NumaNode(1, (1,)), NumaNode(2, ()), NumaNode(3, (2,), {}, False), NumaNode(4, (3,))]
    assert numa.spread(nodes, [0, 1, 2, 3]) == [0, 1]
    assert numa.spread(nodes, [4]) == []


def test_memory_is_not_spread_where_that_is_off_or_not_allowed(two_sockets: Path) -> None:
    for enabled, may_use in ((False, [0, 1]), (True, [1])):
        system = FakeSystem()
        system.may_use = may_use
        interleaving = numa.Interleaving(enabled, system, two_sockets)
        with interleaving.allocating():
            interleaving.of(1 << 40, GIB)
        assert (system.spread, system.thread, interleaving.problem) == ([], [], "")


@pytest.mark.parametrize("call", ["mbind", "set_mempolicy"])
def test_memory_that_cannot_be_spread_is_used_all_the_same(call: str, two_sockets: Path) -> None:
    system = FakeSystem(refuses=call)
    interleaving = numa.Interleaving(True, system, two_sockets)
    with interleaving.allocating():
        interleaving.of(1 << 40, GIB)
    assert call in interleaving.problem
    assert "SYS_NICE" in interleaving.problem


def test_one_node_is_left_alone(tmp_path: Path) -> None:
    root = sysfs_trees.unpack("nothing but processors", tmp_path)
    system = FakeSystem(refuses="move_pages")
    assert numa.Nearness(system, root).move_to(7, [(0, GIB)]) == ""
    assert system.allowed == set(range(128))
    assert numa.Interleaving(True, system, root).nodes == []
    assert numa.Interleaving(True, system, tmp_path / "nowhere").nodes == []


def test_a_mover_is_placed_before_it_maps_the_memory_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, list[tuple[int, int]]]] = []

    class Near:
        def move_to(self, pid: int, regions: list[tuple[int, int]]) -> str:
            asked.append((pid, regions))
            return "on NUMA node 1"

    monkeypatch.setattr(mover, "Nearness", Near)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=mover.serve, args=(theirs, "load"), daemon=True)
    thread.start()
    wire = Wire(ours)
    fd = create_memfd("test", PAGE)
    try:
        for placed in (True, False):
            attach = p.Attach("/nowhere", os.getpid(), "c", [p.Region(0x10000, PAGE, 0)], numa=placed)
            wire.send(attach, [fd])
            answer = wire.receive(p.decoder(p.FromMover), time.monotonic() + 20)
            assert answer == p.Attached("memfd", placed="on NUMA node 1" if placed else "")
    finally:
        os.close(fd)
        wire.close()
        thread.join(20)
    assert asked == [(os.getpid(), [(0x10000, PAGE)])]


# --------------------------------------------------------------------------- this machine


def test_this_machines_memory_can_be_asked_about_and_spread() -> None:
    """Each call works, or is refused with an OSError."""
    system = numa.System()
    fd = create_memfd("test", 64 * PAGE)
    mapping = Mapping(fd, 64 * PAGE, writable=True)
    os.close(fd)
    nodes = system.memory_nodes()
    assert nodes
    found = None
    with contextlib.suppress(PermissionError):  # as in many containers
        system.interleave_memory(mapping.address, mapping.length, nodes)
        mapping.view[:] = b"x" * mapping.length
        found = system.nodes_of_pages(os.getpid(), numa.sample(mapping.address, mapping.length))
    mapping.close()
    assert found is None or set(found) <= set(nodes)


def test_only_the_thread_that_moves_is_moved() -> None:
    before = os.sched_getaffinity(0)
    moved: list[set[int]] = []

    def work() -> None:
        system = numa.System()
        system.run_on([min(system.cpus())])
        moved.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert moved == [{min(before)}]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_a_pool_serves_whatever_this_machine_is(setting: str, start_node: object) -> None:
    node: NodeProcess = start_node("n", "16MiB", (), ("--numa", setting))  # type: ignore[operator]
    rank = FakeRank(node.settings(numa=setting, deadline_s=7.5))
    pages = [page_hash(number) for number in range(3)]
    try:
        assert rank.store(b"n" * 16, pages).ok == b"\x01" * 3
        assert rank.load(b"n" * 16, pages).ok == b"\x01" * 3
    finally:
        rank.close()
