"""Transfers prefer the RDMA device that is near to the memory, where that is on one NUMA node; the store's is on all."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache_mooncake.testing.fake_verbs import FakeFabric
from hicache_mooncake.transfer import topology
from hicache_mooncake.transfer.transport import TransportOptions
from hicache_mooncake.transfer.verbs import nearness
from hicache_mooncake.transfer.verbs.nearness import Nearness
from hicache_mooncake.transfer.verbs.transport import VerbsTransport
from tests import sysfs_trees
from tests.test_numa import GIB, TWO_SOCKETS, FakeSystem

NICS = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
FAR = 10 / 21


@pytest.fixture
def host(tmp_path: Path) -> topology.Topology:
    return topology.read(sysfs_trees.unpack(TWO_SOCKETS, tmp_path))


def seen(found: Nearness, address: int, devices: Sequence[str] = NICS) -> list[float]:
    return [found.of(device, address) for device in devices]


def test_devices_of_the_memorys_node_are_near(host: topology.Topology) -> None:
    found = Nearness(NICS, host, FakeSystem())
    found.registered(0, GIB)
    found.registered(GIB, GIB)
    assert seen(found, 5) == [1.0, 1.0, FAR, FAR]
    assert seen(found, GIB + 5) == [FAR, FAR, 1.0, 1.0]
    assert seen(found, 5 * GIB) == [1.0] * 4
    found.forget(0)
    assert seen(found, 5) == [1.0] * 4


def test_memory_on_all_nodes_is_near_to_all(host: topology.Topology) -> None:
    found = Nearness(NICS, host, FakeSystem())
    found.registered(2 * GIB, GIB)
    assert seen(found, 2 * GIB) == [1.0] * 4


def test_where_nothing_can_be_gained_nothing_is_asked(host: topology.Topology) -> None:
    for devices, known in ((NICS[:2], host), (NICS, topology.Topology()), ((), host)):
        system = FakeSystem()
        found = Nearness(devices, known, system)
        found.registered(0, GIB)
        assert (system.asked, seen(found, 5)) == (0, [1.0] * 4)
    refused = Nearness(NICS, host, FakeSystem(refuses="move_pages"))
    refused.registered(0, GIB)
    assert seen(refused, 5) == [1.0] * 4


def test_a_transport_knows_it_of_what_is_registered(host: topology.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearness, "node_of", lambda pid, regions, system: 1)
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with FakeFabric() as fabric:
        transport = VerbsTransport(TransportOptions(), fabric.host("a", ("mlx5_0", "mlx5_2")).binding(), host)
        transport.register(address, 1 << 20)
        assert (transport.near("mlx5_0", address), transport.near("mlx5_2", address)) == (FAR, 1.0)
        transport.unregister(address)
        assert transport.near("mlx5_0", address) == 1.0
        transport.close()
