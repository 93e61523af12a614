"""Which address of this host other nodes are told, by interface, by wildcard, and over IPv6."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing

import pytest

from hicache_mooncake.config import Settings
from hicache_mooncake.node.service import Node, NodeError
from hicache_mooncake.testing.local import FakeRank, page_hash
from hicache_mooncake.transfer import addresses, tcp
from hicache_mooncake.transfer.addresses import AddressError, InterfaceAddress
from tests.conftest import MasterProcess, NodeProcess, wait_until

NS = b"n" * 16

HOST = [
    InterfaceAddress("lo", "", True),
    InterfaceAddress("lo", "127.0.0.1", True),
    InterfaceAddress("lo", "::1", True),
    InterfaceAddress("eth0", "fe80::1", True),
    InterfaceAddress("eth0", "fd00::2", True),
    InterfaceAddress("eth0", "10.0.0.2", True),
    InterfaceAddress("eth0", "10.0.0.3", True),
    InterfaceAddress("eth1", "fe80::2", True),
    InterfaceAddress("eth1", "2001:db8::5", True),
    InterfaceAddress("eth2", "fe80::3", True),
    InterfaceAddress("eth2", "169.254.1.1", True),
    InterfaceAddress("eth3", "", False),
    InterfaceAddress("eth4", "10.4.0.1", False),
]


def has_ipv6() -> bool:
    try:
        tcp.listen("[::1]:0").close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")

# --------------------------------------------------------------------------- choosing


def test_an_interface_gives_its_first_ipv4_address_else_its_routable_ipv6_one() -> None:
    assert addresses.of_interface("eth0", HOST) == "10.0.0.2"
    assert addresses.of_interface("eth1", HOST) == "2001:db8::5"
    assert addresses.of_interface("lo", HOST) == "127.0.0.1"
    assert addresses.owner("10.0.0.3", HOST) == "eth0"
    assert addresses.owner("10.0.0.9", HOST) == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eth9", "there is no network interface 'eth9' here, only lo (127.0.0.1, ::1), eth0 (fd00::2, 10.0.0.2, 10.0.0.3)"),
        ("eth2", "only link-local addresses"),
        ("eth3", "no address and is down"),
        ("eth4", "is down (10.4.0.1)"),
    ],
)
def test_an_interface_that_gives_none_is_refused_with_what_there_is(name: str, words: str) -> None:
    with pytest.raises(AddressError) as caught:
        addresses.of_interface(name, HOST)
    assert words in str(caught.value)


def test_a_host_of_a_thousand_interfaces_is_listed_in_a_line() -> None:
    many = [InterfaceAddress(f"veth{number}", f"10.0.{number // 250}.{number % 250}", True) for number in range(1000)]
    with pytest.raises(AddressError, match="and 984 more") as caught:
        addresses.of_interface("eth0", many)
    assert len(str(caught.value)) < 1000


def test_this_machines_interfaces_are_listed() -> None:
    found = addresses.table()
    assert InterfaceAddress("lo", "127.0.0.1", True, "127.0.0.0/8") in found
    assert "lo (127.0.0.1" in addresses.listing(found)


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not known here; addresses are no names. A name server that does not answer takes its time."""
    ask = socket.getaddrinfo

    def known(host: str, *arguments: object, **more: object) -> object:
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(host, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", known)


@pytest.mark.usefixtures("no_names")
def test_the_address_towards_another_host_is_one_of_this_host() -> None:
    assert addresses.towards("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(AddressError, match=r"leads to no-such-host\.invalid"):
        addresses.towards("no-such-host.invalid", 9)


# --------------------------------------------------------------------------- listening


@needs_ipv6
def test_the_data_port_is_reached_over_both_by_one_wildcard() -> None:
    with closing(tcp.listen("[::]:0")) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=20).close()
    with closing(tcp.listen("[::1]:0")) as listener, pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=20)


def test_a_name_is_listened_on_by_ipv4() -> None:
    with closing(tcp.listen("localhost:0")) as listener:
        assert listener.getsockname()[0].startswith("127.")


def start(**settings: object) -> Node:
    node = Node(Settings(dram_bytes=1 << 20, name="n", **settings))  # type: ignore[arg-type]
    node.start()
    return node


@pytest.mark.usefixtures("no_names")
@pytest.mark.parametrize("listen", ["203.0.113.77:0", "no-such-host.invalid:0"])
def test_an_address_that_is_not_this_hosts_is_refused_at_the_start(listen: str, tmp_path: object) -> None:
    with pytest.raises(NodeError) as caught:
        start(socket=f"{tmp_path}/n.sock", listen=listen)
    assert f"--listen {listen}" in str(caught.value)
    assert "This host has lo" in str(caught.value) or "address of this host" in str(caught.value)


def test_what_was_bound_is_advertised(tmp_path: object) -> None:
    node = start(socket=f"{tmp_path}/n.sock", listen="0.0.0.0:0", masters=("127.0.0.1:9",), advertise="gate:0")
    try:
        host, _, port = node.data_address.rpartition(":")
        assert host == "gate"
        socket.create_connection(("127.0.0.1", int(port)), timeout=20).close()
    finally:
        node.stop()
    with pytest.raises(NodeError, match=r"only IPv4 is listened on.*--interface NAME"):
        start(socket=f"{tmp_path}/n.sock", listen="0.0.0.0:0", masters=("[2001:db8::1]:9",))


@needs_ipv6
def test_pages_cross_over_ipv6(start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]) -> None:
    master = start_master()
    nodes = [
        start_node(name, "16MiB", (master.address,), ("--listen", "[::1]:0", "--host-id", name)) for name in ("six-a", "six-b")
    ]
    a, b = (FakeRank(node.settings(deadline_s=7.5)) for node in nodes)
    try:
        pages = [page_hash(number) for number in range(5)]
        wait_until(lambda: (report := a.client.status()) and len(report.cluster) == 2, 30, "both nodes joined")
        assert a.store(NS, pages).ok == b"\x01" * 5
        wait_until(lambda: b.exists(NS, pages) == 5, 30, "the pages are found")
        outcome = b.load(NS, pages)
        assert outcome.ok == b"\x01" * 5, outcome.reasons
        assert outcome.remote_bytes == 5 * b.page_bytes
        report = a.client.status()
        assert report is not None
        assert str(report.node["data"]).startswith("[::1]:")
    finally:
        a.close()
        b.close()
