"""What is near what is read from sysfs, shown, and used: each buffer has the near NICs, every NIC has work, and none is
everybody's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hicache_mooncake.transfer import topology as t
from tests import sysfs_trees

FOUR, EIGHT = "4 NICs, 8 GPUs behind 4 switches, 2 sockets", "8 NICs on 2 sockets, InfiniBand, a dual-port card for storage"


def host(name: str, tmp_path: Path) -> t.Topology:
    return t.read(sysfs_trees.unpack(name, tmp_path))


def named(topology: t.Topology, name: str) -> t.Device:
    return next(device for device in topology.devices if device.name == name)


def test_a_host_is_read(tmp_path: Path) -> None:
    found = host(FOUR, tmp_path)
    assert [device.name for device in found.of("rdma")] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert [device.numa_node for device in found.of("rdma")] == [0, 0, 1, 1]
    assert [device.ports[0].state for device in found.of("rdma")] == ["ACTIVE", "ACTIVE", "ACTIVE", "DOWN"]
    first = named(found, "mlx5_0")
    assert first.pci == "0000:18:00.0"
    assert first.netdevs == ("ens1np0",)
    assert first.ports[0].rate == "400 Gb/sec (4X)"
    assert len(found.of("gpu")) == 8  # without the one of the management controller
    assert [device.name for device in found.of("net")] == ["eno1", "ens1np0", "ens2np0", "ens3np0", "ens4np0"]
    assert found.nodes[0].cpus == (*range(32), *range(64, 96))
    assert (found.node_distance(0, 1), found.node_distance(1, 1)) == (21, 10)


def test_devices_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = [device.name for device in host(EIGHT, tmp_path).of("rdma")]
    assert names == [*(f"mlx5_{number}" for number in range(6)), "mlx5_10", "mlx5_11"]


def test_a_host_with_nothing_to_tell_is_no_error(tmp_path: Path) -> None:
    assert t.read(tmp_path / "nowhere") == t.Topology()
    bare = host("nothing but processors", tmp_path)
    assert bare.devices == ()
    assert t.matrix(bare) == []
    (tmp_path / "devices/system/node/node0/cpulist").write_text("0-x")
    assert t.read(tmp_path).nodes[0].cpus == ()


def test_soft_roce_lies_where_its_interface_does(tmp_path: Path) -> None:
    found = host("virtual machine, no NUMA, a virtual function and Soft-RoCE", tmp_path)
    assert named(found, "rxe0").pci == "0000:00:03.0"
    assert named(found, "rxe0").netdevs == ("eth0",)
    assert named(found, "rxe1").path == ()
    assert named(found, "rxe1").numa_node == -1
    assert t.distance(named(found, "rxe0"), named(found, "mlx5_0")) == "PHB"
    assert t.distance(named(found, "rxe1"), named(found, "mlx5_0")) == "SYS"


@pytest.mark.parametrize(
    ("name", "one", "other", "expected"),
    [
        (FOUR, "mlx5_0", "mlx5_0", "X"),
        (FOUR, "mlx5_0", "GPU0", "PIX"),
        (FOUR, "GPU0", "GPU1", "PIX"),
        (FOUR, "mlx5_0", "mlx5_1", "NODE"),
        (FOUR, "mlx5_0", "GPU7", "SYS"),
        (EIGHT, "mlx5_0", "mlx5_1", "PHB"),
        (EIGHT, "mlx5_0", "mlx5_2", "NODE"),
        (EIGHT, "mlx5_0", "mlx5_4", "SYS"),
        (EIGHT, "mlx5_10", "mlx5_11", "PIX"),
        ("nested switches", "mlx5_0", "mlx5_1", "PXB"),
    ],
)
def test_distances_are_named_as_everywhere(name: str, one: str, other: str, expected: str, tmp_path: Path) -> None:
    found = host(name, tmp_path)
    assert t.distance(named(found, one), named(found, other)) == expected
    assert t.distance(named(found, other), named(found, one)) == expected


def test_the_matrix_is_printed(tmp_path: Path) -> None:
    rows = t.matrix(host("nested switches", tmp_path))
    assert rows == [["", "mlx5_0", "mlx5_1", "NUMA"], ["mlx5_0", "X", "PXB", "0"], ["mlx5_1", "PXB", "X", "0"]]
    rows = t.matrix(host(FOUR, tmp_path / "four"))
    assert rows[0] == ["", *(f"GPU{number}" for number in range(8)), "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "NUMA"]
    assert rows[1][9:] == ["PIX", "NODE", "SYS", "SYS", "0"]


def test_the_nearest_are_those_of_the_same_node(tmp_path: Path) -> None:
    found = host("4 NUMA nodes a socket, memory without processors", tmp_path)
    first, second = found.of("rdma")
    for node, expected in {0: [first], 1: [first], 2: [second], 3: [second], 4: [first, second], -1: [first, second]}.items():
        assert t.nearest([first, second], node, found) == expected
    assert t.nearest([], 0, found) == []
    assert t.nearness([first, second], 0, found) == [1.0, 12 / 32]
    assert t.nearness([first, second], 4, found) == [1.0, 1.0]
    assert t.nearness([second, first], -1, found) == [1.0, 1.0]
    assert t.nearness([], 0, found) == []
    assert found.nodes[4].cpus == ()


def nics(count: int, nodes: int) -> list[t.Device]:
    """NICs of which each NUMA node has an equal part."""
    return [t.Device("rdma", f"mlx5_{n}", (f"pci{n:04x}:00", f"{n:04x}:01:00.0"), n * nodes // count) for n in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("count", [1, 4, 8, 16])
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_nic_has_work_and_none_is_everybodys(count: int, ranks: int, nodes: int) -> None:
    devices = nics(count, nodes)
    shares = t.share(devices, [rank * nodes // ranks for rank in range(ranks)])
    assert shares == t.share(devices, [rank * nodes // ranks for rank in range(ranks)])
    users = Counter(device.name for share in shares for device in share)
    assert set(users) == {device.name for device in devices}, "a NIC without work"
    assert max(users.values()) <= -(-ranks // count), "a NIC with more users than needed"
    assert min(len(share) for share in shares) >= max(1, count // ranks), "a rank with too few"
    assert max(len(share) for share in shares) <= max(1, -(-count // ranks)), "a rank with too many"
    if ranks % nodes == 0 and count % nodes == 0:
        for rank, share in enumerate(shares):
            assert {device.numa_node for device in share} == {rank * nodes // ranks}, "a rank with a far NIC"


def test_ranks_that_are_unevenly_spread_still_use_every_nic() -> None:
    shares = t.share(nics(4, 2), [0] * 8)
    assert Counter(device.name for share in shares for device in share) == {f"mlx5_{n}": 2 for n in range(4)}
    shares = t.share(nics(4, 2), [0, 0, 0, 1, 1, 1, 1, 1])
    assert [share[0].numa_node for share in shares[:3]] == [0, 0, 0]
    assert [share[0].numa_node for share in shares[3:]].count(1) == 4


def test_ranks_with_gpus_have_the_nic_at_their_switch(tmp_path: Path) -> None:
    found = host(FOUR, tmp_path)
    shares = t.share(found.of("rdma"), found.of("gpu"), found)
    assert [[device.name for device in share] for share in shares] == [[f"mlx5_{gpu // 2}"] for gpu in range(8)]


def test_nobody_and_nothing_are_shared_without_fuss() -> None:
    assert t.share([], [0, 1]) == [[], []]
    assert t.share(nics(2, 1), []) == []
    far = [t.Device("rdma", "rxe0")]
    assert t.share(far, [-1, 0]) == [far, far]
