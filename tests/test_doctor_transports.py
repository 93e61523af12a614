"""What `doctor` says of how pages travel between hosts, on hosts of many kinds, and what `status` shows of each peer."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_mooncake import protocol
from hicache_mooncake.cli import doctor_transports as d
from hicache_mooncake.cli.checks import Check
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.testing.fake_verbs import FakeFabric
from hicache_mooncake.transfer import addresses, topology
from hicache_mooncake.transfer.transport import Transport, TransportError, TransportOptions
from hicache_mooncake.transfer.verbs.api import Binding, BindingUnavailable, Device, DeviceInfo, Gid, PortInfo
from hicache_mooncake.transfer.verbs.transport import VerbsTransport
from tests import sysfs_trees
from tests.certificates import Authority, needs_openssl
from tests.test_cli import HEALTHY, run, scripted_node
from tests.test_numa import FakeSystem

FOUR, EIGHT = "4 NICs, 8 GPUs behind 4 switches, 2 sockets", "8 NICs on 2 sockets, InfiniBand, a dual-port card for storage"
V4 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "eth1")
V1 = Gid(2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v1", "eth1")
LOCAL = Gid(1, "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2", "eth1")


def device(name: str, state: str = "ACTIVE", gids: Sequence[Gid] = (V1, V4), problem: str = "") -> DeviceInfo:
    ports = () if problem else (PortInfo(1, state, "Ethernet", 0, 4096, 1 << 30, tuple(gids)),)
    return DeviceInfo(name, ports, problem=problem)


def binding(*infos: DeviceInfo, missing: Sequence[str] = ()) -> Callable[[str], Binding]:
    """Of `load_binding`, on a host with these devices and without the packages that are missing."""

    class Seen(Binding):
        name = "ibverbs"

        def devices(self) -> list[DeviceInfo]:
            return list(infos)

        def open(self, name: str) -> Device:
            raise AssertionError("doctor opens nothing itself")

    def load(choice: str) -> Binding:
        if choice in missing or set(d.BINDINGS) <= set(missing):
            raise BindingUnavailable(f"{choice} is not installed")
        return Seen()

    return load


def no_transport(scheme: str, options: TransportOptions) -> Transport:
    raise TransportError("unavailable", f"no RDMA port can be used for {scheme}")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"dram": "64mb"}, {"XDG_RUNTIME_DIR": str(tmp_path)})[0]


def named(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# --------------------------------------------------------------------------- devices


def found(settings: Settings, *infos: DeviceInfo, tree: topology.Topology | None = None) -> dict[str, Check]:
    return named(d.devices(settings, infos, tree or topology.Topology(), settings.transport != "tcp"))


def test_a_device_is_shown_with_its_port_and_the_gid_that_is_chosen(settings: Settings) -> None:
    check = found(settings, device("mlx5_0"))["RDMA mlx5_0"]
    assert check.status == "ok"
    assert check.found == "port 1 ACTIVE, Ethernet, MTU 4096, GID 3: RoCE v2, IPv4 address 10.0.0.1 of eth1"


def test_a_named_device_that_is_not_there_is_a_failure_that_shows_what_is(settings: Settings) -> None:
    wanted = replace(settings, rdma_devices=("mlx5_7",))
    check = found(wanted, device("mlx5_0", "DOWN"))["RDMA mlx5_7"]
    assert check.status == "fail"
    assert "mlx5_0 port 1 DOWN, GID table: 2: 10.0.0.1 RoCE v1 eth1; 3: 10.0.0.1 RoCE v2 eth1" in check.found
    assert "rdma_devices" in check.advice
    assert "not used: rdma_devices names others" in found(wanted, device("mlx5_0"))["RDMA mlx5_0"].found


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (device("mlx5_0", "DOWN"), "port 1 DOWN, Ethernet, GID table: 2: 10.0.0.1"),
        (device("mlx5_0", gids=[V1]), "no GID can be used"),
        (device("mlx5_0", problem="Permission denied"), "cannot be opened: Permission denied"),
    ],
    ids=["port down", "no GID", "cannot be opened"],
)
def test_a_device_that_cannot_be_used_is_a_warning_and_a_failure_when_it_was_named(
    info: DeviceInfo, words: str, settings: Settings
) -> None:
    check = found(settings, info)["RDMA mlx5_0"]
    assert (check.status, words in check.found) == ("warn", True)
    assert check.advice
    assert found(replace(settings, rdma_devices=("mlx5_0",)), info)["RDMA mlx5_0"].status == "fail"
    assert found(replace(settings, rdma_devices=("mlx5_0:1",)), info)["RDMA mlx5_0"].status == "fail"
    assert found(replace(settings, transport="tcp"), info)["RDMA mlx5_0"].status == "ok"


def test_a_port_that_is_not_there_and_a_gid_that_may_not_do(settings: Settings) -> None:
    check = found(replace(settings, rdma_devices=("mlx5_0:2",)), device("mlx5_0"))["RDMA mlx5_0"]
    assert (check.status, "there is no port 2, only 1" in check.found) == ("fail", True)
    check = found(settings, device("mlx5_0", gids=[LOCAL]))["RDMA mlx5_0"]
    assert (check.status, "network segment" in check.advice) == ("warn", True)


def test_a_device_that_no_package_speaks_to_is_shown_all_the_same(settings: Settings, tmp_path: Path) -> None:
    tree = topology.read(sysfs_trees.unpack(FOUR, tmp_path))
    checks = found(settings, tree=tree)
    assert len(checks) == 4
    assert (checks["RDMA mlx5_3"].status, "port 1 DOWN" in checks["RDMA mlx5_3"].found) == ("warn", True)
    assert "NUMA node 1" in found(settings, device("mlx5_2"), tree=tree)["RDMA mlx5_2"].found
    assert found(settings)["RDMA"].status == "ok"
    assert found(replace(settings, transport="verbs"))["RDMA"].status == "warn"


def test_packages_are_told_with_what_to_install(settings: Settings) -> None:
    infos, check = d.bindings(settings, True, True, binding(device("mlx5_0"), missing=["pyverbs"]))
    assert [info.name for info in infos] == ["mlx5_0"]
    assert (check.status, "ibverbs works, pyverbs does not" in check.found) == ("ok", True)
    infos, check = d.bindings(settings, True, True, binding(missing=d.BINDINGS))
    assert (infos, check.status, "pip install" in check.advice) == ([], "warn", True)
    assert d.bindings(settings, False, True, binding(missing=d.BINDINGS))[1].status == "ok"
    wanted = replace(settings, verbs_binding="pyverbs")
    assert d.bindings(wanted, True, True, binding(missing=["pyverbs"]))[1].status == "warn"


def test_locked_memory_counts_the_pool_once_a_device(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100 << 20, 100 << 20))
    monkeypatch.setattr(d, "_may_lock_all", lambda: False)
    assert d.memlock(settings, 0).status == "ok"
    assert d.memlock(settings, 1).status == "ok"
    check = d.memlock(settings, 2)
    assert (check.status, "128.0 MiB" in check.found, "LimitMEMLOCK=infinity" in check.advice) == ("warn", True, True)
    assert d.memlock(replace(settings, node="external"), 2).status == "skipped"
    monkeypatch.setattr(d, "_may_lock_all", lambda: True)
    assert "CAP_IPC_LOCK" in d.memlock(settings, 2).found
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert d.memlock(settings, 2).found == "unlimited"


# --------------------------------------------------------------------------- what is near what


def test_the_matrix_and_who_uses_what_are_shown(settings: Settings, tmp_path: Path) -> None:
    check = d.near_and_far(settings, topology.read(sysfs_trees.unpack(FOUR, tmp_path)))
    assert check.table[0][-1] == "NUMA"
    assert len(check.table) == 1 + 8 + 4
    assert "8 GPUs, 3 of 4 RDMA devices in use" in check.found
    assert "GPU0: mlx5_0; GPU1: mlx5_0; GPU2: mlx5_1" in check.found
    assert check.status == "ok"


def test_memory_without_a_near_nic_is_warned_of(settings: Settings, tmp_path: Path) -> None:
    tree = topology.read(sysfs_trees.unpack(EIGHT, tmp_path / "eight"))
    assert d.near_and_far(settings, tree).status == "ok"
    one_sided = replace(settings, rdma_devices=("mlx5_0", "mlx5_1:1"))
    check = d.near_and_far(one_sided, tree)
    assert (check.status, "NUMA node 1 has no NIC of its own" in check.found) == ("warn", True)
    assert "NUMA node 0: mlx5_0 mlx5_1" in check.found
    virtual = topology.read(sysfs_trees.unpack("virtual machine, no NUMA, a virtual function and Soft-RoCE", tmp_path / "vm"))
    assert d.near_and_far(settings, virtual).status == "ok"
    moved = topology.Topology(tree.nodes, virtual.devices)
    assert "NUMA node is not known" in d.near_and_far(settings, moved).found
    assert d.near_and_far(settings, topology.Topology()).table == ()


def test_memory_that_cannot_be_placed_is_warned_of(settings: Settings, tmp_path: Path) -> None:
    tree = topology.read(sysfs_trees.unpack(FOUR, tmp_path))
    assert d.placement(settings, tree, FakeSystem()).status == "ok"
    for call in ("move_pages", "mbind"):
        check = d.placement(settings, tree, FakeSystem(refuses=call))
        assert (check.status, "SYS_NICE" in check.advice) == ("warn", True)
    assert d.placement(replace(settings, numa="off"), tree, FakeSystem()).status == "warn"
    assert d.placement(settings, topology.Topology()).status == "ok"
    confined = FakeSystem(refuses="mbind")
    confined.may_use = [1]
    assert "may use one of them" in d.placement(settings, tree, confined).found


def test_the_address_that_others_are_told_is_shown(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(**changed: object) -> tuple[str, str]:
        check = d.data_port(replace(settings, **changed))  # type: ignore[arg-type]
        return check.status, check.found

    assert told() == ("ok", "listens on 127.0.0.1:0 (default); no master: nobody is told of it")
    cluster = {"listen": "0.0.0.0:7100", "masters": ("127.0.0.1:9",)}
    assert told(**cluster) == ("ok", "listens on 0.0.0.0:7100 (default), advertises 127.0.0.1:7100")
    assert told(**cluster, advertise="gate:0")[1].endswith("advertises gate:7100")
    assert told(listen="[::1]:0", masters=("[::1]:9",))[1].endswith("advertises ::1, with the port that it gets")
    monkeypatch.setattr(addresses, "towards", lambda host, port, family: "127.0.0.1")
    assert told(**cluster | {"masters": ("10.0.0.1:9",)})[0] == "warn"

    def nowhere(host: str, port: int, family: int) -> str:
        raise addresses.AddressError("no address of this host leads to 10.0.0.1")

    monkeypatch.setattr(addresses, "towards", nowhere)
    assert told(**cluster)[0] == "fail"
    assert told(**cluster, node="external")[0] == "skipped"


# --------------------------------------------------------------------------- which transport


class Ready:
    def report(self) -> dict[str, int | float | str | bool]:
        return {"binding": "ibverbs", "mlx5_0:1 gid": "3 ::ffff:10.0.0.1"}

    def close(self) -> None:
        pass


def test_one_line_says_which_transport_is_used_and_why(settings: Settings) -> None:
    def line(open_: Callable[[str, TransportOptions], Transport] = no_transport, **changed: object) -> tuple[str, str]:
        check = d.verdict(replace(settings, **changed), open_)  # type: ignore[arg-type]
        return check.status, check.found

    assert line() == ("ok", "tcp: no RDMA port can be used for verbs")
    assert line(transport="verbs")[0] == "fail"
    assert line(transport="tcp")[1].startswith("tcp: transport=tcp")
    assert "TLS" in line(tls_cert="/c")[1]
    assert "for nixl" in line(transport="nixl")[1]

    asked: list[TransportOptions] = []

    def ready(scheme: str, options: TransportOptions) -> Transport:
        asked.append(options)
        return Ready()  # type: ignore[return-value]

    status, text = line(ready, rdma_devices=("mlx5_0",), gid_index=3, verbs_binding="ibverbs")
    assert (status, text) == ("ok", "verbs with nodes that have it too (mlx5_0:1 gid 3 ::ffff:10.0.0.1), else tcp")
    assert asked == [TransportOptions(devices=("mlx5_0",), gid_index=3, verbs_binding="ibverbs")]


def test_the_line_comes_from_the_transport_that_a_node_would_open(settings: Settings) -> None:
    with FakeFabric() as fabric:
        host = fabric.host("a", ("mlx5_0", "mlx5_1"))
        host.cards["mlx5_1"].port_state(1, "DOWN")

        def open_(scheme: str, options: TransportOptions) -> Transport:
            return VerbsTransport(options, host.binding())

        check = d.verdict(settings, open_)
        assert check.status == "ok"
        assert check.found.startswith("verbs with nodes that have it too (mlx5_0:1 gid ")
        check = d.verdict(replace(settings, transport="verbs", rdma_devices=("mlx5_1",)), open_)
        assert check.status == "fail"
        assert "mlx5_1 port 1 is DOWN, not ACTIVE. GID table: " in check.found
        checks = named(d.examine(settings, "/nowhere", lambda choice: host.binding(), open_))
        assert (checks["RDMA mlx5_0"].status, checks["RDMA mlx5_1"].status) == ("ok", "warn")


def with_links(**facts: int | str) -> dict[type, protocol.Message]:
    return HEALTHY | {protocol.AdminStatus: protocol.AdminReport({"used_bytes": 0, **facts}, [])}


def test_a_node_that_runs_says_itself_what_it_uses(settings: Settings, tmp_path: Path) -> None:
    with scripted_node(tmp_path / "n.sock", with_links(transport="verbs", transport_why="", links=3)) as path:
        check = d.verdict(replace(settings, socket=path), no_transport)
    assert (check.status, "uses verbs, 3 links stand" in check.found) == ("ok", True)
    with scripted_node(tmp_path / "m.sock", with_links(transport="tcp", transport_why="memlock")) as path:
        check = d.verdict(replace(settings, socket=path, transport="verbs"), no_transport)
    assert (check.status, "uses tcp: memlock" in check.found) == ("warn", True)


# --------------------------------------------------------------------------- TLS, and all together


@needs_openssl
def test_certificates_are_checked_before_the_node_meets_them(settings: Settings, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    soon = replace(settings, **authority.settings("n"))  # type: ignore[arg-type]
    check = d.tls(soon)
    assert (check.status, "renew it" in check.advice) == ("warn", True), check
    cert, key = authority.sign("long", "-days", "400")
    check = d.tls(replace(soon, tls_cert=str(cert), tls_key=str(key)))
    assert (check.status, "valid for " in check.found) == ("ok", True), check
    assert d.tls(replace(soon, tls_key=str(tmp_path / "none"))).status == "fail"
    assert d.tls(replace(soon, node="external")).status == "skipped"
    assert d.tls(settings).status == "ok"


def test_everything_is_examined_on_every_kind_of_host(settings: Settings, tmp_path: Path) -> None:
    for number, name in enumerate(sysfs_trees.names()):
        root = sysfs_trees.unpack(name, tmp_path / str(number))
        for load in (binding(device("mlx5_0"), device("mlx5_1", "DOWN")), binding(missing=d.BINDINGS)):
            checks = d.examine(settings, root, load, no_transport)
            assert len({check.name for check in checks}) == len(checks)
            assert all(check.advice for check in checks if check.status == "fail")


# --------------------------------------------------------------------------- status


PEERS = {
    "transport": "verbs",
    "links": 1,
    "link_sent_bytes": 3 << 20,
    "peer h2": "verbs up",
    "peer h3": "verbs down; tcp is used: it broke off",
    "verbs mlx5_0:1 gid": "3 ::ffff:10.0.0.1",
    "verbs mlx5_0 h2 mlx5_1 bytes": 5 << 20,
}


def test_status_shows_how_each_peer_is_reached(tmp_path: Path) -> None:
    with scripted_node(tmp_path / "n.sock", with_links(**PEERS)) as path:
        shown = run("status", "--socket", path)
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout
    assert "how other nodes are reached" in text
    rows = [line for line in text.splitlines() if "h3" in line]
    assert len(rows) == 1
    assert "it broke off" in rows[0]
    assert "5.0 MiB" in next(line for line in text.splitlines() if "mlx5_0 h2 mlx5_1 bytes" in line)
    with scripted_node(tmp_path / "m.sock", with_links(**PEERS)) as path:
        told = json.loads(run("status", "--socket", path, "--json").stdout)
    assert told["node"]["peer h2"] == "verbs up"
