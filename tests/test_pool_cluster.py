"""Two real nodes and a real master on one machine, as two hosts: pages cross by TCP, and nothing that fails costs more."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.testing.local import FakeRank, free_port, page_hash, pattern
from hicache_mooncake.transfer import tcp
from tests.conftest import START_S, MasterProcess, NodeProcess, wait_until
from tests.test_pool_local import Admin

NS = b"n" * 16
Cluster = tuple[MasterProcess, NodeProcess, NodeProcess, FakeRank, FakeRank]


def hashes(*names: object) -> list[bytes]:
    return [page_hash(name) for name in names]


@pytest.fixture
def cluster(
    start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]
) -> Iterator[Callable[..., Cluster]]:
    ranks: list[FakeRank] = []

    def build(dram: str = "64MiB", page_bytes: int = 64 << 10, memfd: bool = True, **settings: object) -> Cluster:
        master = start_master()
        nodes = [start_node(name, dram, (master.address,), ("--metrics", "127.0.0.1:0")) for name in ("a", "b")]
        for node in nodes:
            ranks.append(FakeRank(node.settings(**settings), page_bytes=page_bytes, memfd=memfd))
        wait_until(lambda: all(is_joined(rank) for rank in ranks), START_S, "both nodes joined")
        return master, nodes[0], nodes[1], ranks[0], ranks[1]

    yield build
    for rank in ranks:
        rank.close()


def is_joined(rank: FakeRank) -> bool:
    report = rank.client.status()
    return report is not None and len([n for n in report.cluster if n.state == "active"]) == 2


def report_of(rank: FakeRank) -> dict[str, int | float | str | bool]:
    report = rank.client.status()
    assert report is not None
    return report.node


def found_everywhere(rank: FakeRank, pages: list[bytes], count: int) -> None:
    wait_until(lambda: rank.exists(NS, pages) == count, 30, f"{count} pages found through the master")


@pytest.mark.parametrize("mode", ["memfd", "process_vm", "segment"])
def test_what_one_host_stores_the_other_loads(cluster: Callable[..., Cluster], mode: str) -> None:
    """P44 P71: two clients on 127.0.0.1; the bytes cross by the data port, never by a local address."""
    _, _, _, a, b = cluster(memfd=mode == "memfd", copy_mode=mode)
    pages = hashes(*range(12))
    assert a.store(NS, pages).ok == b"\x01" * 12
    found_everywhere(b, pages, 12)
    outcome = b.load(NS, pages)
    assert outcome.ok == b"\x01" * 12, outcome.reasons
    assert (outcome.local_bytes, outcome.remote_bytes) == (0, 12 * b.page_bytes)
    wait_until(lambda: report_of(a)["remote_sent_bytes"] == 12 * a.page_bytes, 30)


def test_a_chain_spread_over_both_hosts_is_one_prefix(cluster: Callable[..., Cluster]) -> None:
    _, _, _, a, b = cluster()
    chain = hashes(*range(9))
    a.store(NS, chain[0:3])
    b.store(NS, chain[3:6])
    a.store(NS, chain[6:8])
    found_everywhere(a, chain, 8)
    found_everywhere(b, chain, 8)
    for rank in (a, b):
        outcome = rank.load(NS, chain)
        assert outcome.ok == b"\x01" * 8 + b"\x00", outcome.reasons
        assert outcome.local_bytes + outcome.remote_bytes == 8 * rank.page_bytes
        assert outcome.local_bytes > 0
        assert outcome.remote_bytes > 0


def test_master_killed_between_lookup_and_load(cluster: Callable[..., Cluster]) -> None:
    """P18: all False, host pages untouched, one lookup's time; local pages go on; everything heals with the master."""
    master, _, _, a, b = cluster()
    pages, own = hashes(*range(4)), hashes("own")
    a.store(NS, pages)
    b.store(NS, own)
    found_everywhere(b, pages, 4)
    master.kill()
    wait_until(lambda: report_of(b)["master"] != "joined", 20, "its node knows")
    started = time.monotonic()
    outcome = b.load(NS, pages)
    assert time.monotonic() - started < 2.5
    assert outcome.ok == bytes(4)
    assert outcome.reasons == {"master_down": 4}
    assert bytes(b.memory.view) == b"\xaa" * b.memory.length
    assert b.load(NS, own).ok == b"\x01"
    assert b.exists(NS, own) == 1
    started = time.monotonic()
    for _ in range(10):
        assert b.exists(NS, pages) == 0
    assert time.monotonic() - started < 2.5, "a dead master costs one timeout, not one a call"
    master.start()
    found_everywhere(b, pages, 4)
    wait_until(lambda: b.load(NS, pages).ok == b"\x01" * 4, 30)


def test_a_load_right_after_its_lookup_asks_no_master(cluster: Callable[..., Cluster]) -> None:
    master, _, _, a, b = cluster()
    pages = hashes(*range(4))
    a.store(NS, pages)
    found_everywhere(b, pages, 4)

    def loaded_without_a_master() -> bool:
        found_everywhere(b, pages, 4)
        assert master.process is not None
        master.process.send_signal(signal.SIGSTOP)
        try:
            return b.load(NS, pages).ok == b"\x01" * 4
        finally:
            master.process.send_signal(signal.SIGCONT)

    wait_until(loaded_without_a_master, 30)
    assert int(report_of(b)["lookups_recalled"]) > 0


def test_node_killed_between_lookup_and_load(cluster: Callable[..., Cluster]) -> None:
    _, node_a, _, a, b = cluster()
    pages = hashes(*range(4))
    a.store(NS, pages)
    found_everywhere(b, pages, 4)
    node_a.kill()
    started = time.monotonic()
    outcome = b.load(NS, pages)
    assert time.monotonic() - started < 2.5
    assert outcome.ok == bytes(4)
    assert outcome.reasons == {"peer_down": 4}
    node_a.start()
    wait_until(lambda: b.exists(NS, pages) == 0, 20, "its new life holds nothing, and the master knows")
    wait_until(lambda: a.store(NS, pages).ok == b"\x01" * 4, 30)
    found_everywhere(b, pages, 4)
    wait_until(lambda: b.load(NS, pages).ok == b"\x01" * 4, 30)


def test_a_frozen_peer_costs_one_deadline_then_nothing(cluster: Callable[..., Cluster]) -> None:
    _, node_a, _, a, b = cluster(deadline_s=1.0)
    pages, own = hashes(*range(4)), hashes("own")
    a.store(NS, pages)
    b.store(NS, own)
    found_everywhere(b, pages, 4)
    assert b.load(NS, pages).ok == b"\x01" * 4
    node_a.signal(signal.SIGSTOP)
    started = time.monotonic()
    outcome = b.load(NS, pages)
    first = time.monotonic() - started
    assert outcome.ok == bytes(4)
    assert first < 2.0
    started = time.monotonic()
    outcome = b.load(NS, [*own, *pages])
    assert time.monotonic() - started < 0.5, "its breaker is open"
    assert outcome.ok == b"\x01" + bytes(4)
    assert outcome.reasons == {"peer_down": 4}
    node_a.signal(signal.SIGCONT)
    wait_until(lambda: b.load(NS, pages).ok == b"\x01" * 4, 30, "the peer is probed back in")


def test_a_frozen_peer_takes_nothing_from_a_healthy_one(
    cluster: Callable[..., Cluster], start_node: Callable[..., NodeProcess]
) -> None:
    """Answers are read as they come: the healthy peer's pages arrive, and it is not blamed for the other's silence."""
    master, node_a, _, a, b = cluster(deadline_s=1.0)
    third = FakeRank(start_node("c", "64MiB", (master.address,)).settings())
    from_a, from_c = hashes(*range(4)), hashes(*range(10, 14))
    a.store(NS, from_a)
    third.store(NS, from_c)
    found_everywhere(b, [*from_a, *from_c], 8)
    node_a.signal(signal.SIGSTOP)
    outcome = b.load(NS, [*from_a, *from_c])
    assert outcome.ok == bytes(4) + b"\x01" * 4
    assert b.load(NS, from_c).ok == b"\x01" * 4
    node_a.signal(signal.SIGCONT)
    third.close()


def test_two_nodes_at_one_address_never_answer_for_each_other(
    start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]
) -> None:
    """The same --advertise on two hosts: pages of the one that is not there are misses, never the other one's bytes."""
    master, port = start_master(), free_port()
    address = f"127.0.0.1:{port}"
    ranks = [
        FakeRank(start_node(name, "16MiB", (master.address,), extra).settings())
        for name, extra in (("a", ("--listen", address)), ("b", ("--advertise", address)), ("c", ()))
    ]
    a, b, c = ranks
    for turn in range(5):
        from_a, from_b = hashes(*((turn, "a", i) for i in range(4))), hashes(*((turn, "b", i) for i in range(4)))
        a.store(NS, from_a)
        b.store(NS, from_b)
        found_everywhere(c, [*from_a, *from_b], 8)
        assert c.load(NS, [*from_a, *from_b]).ok == b"\x01" * 4 + bytes(4)
        assert c.load(NS, [*from_b, *from_a]).ok == bytes(4) + b"\x01" * 4
    for rank in ranks:
        rank.close()


def test_black_holes_do_not_cost_the_pages_that_are_here(
    cluster: Callable[..., Cluster], start_node: Callable[..., NodeProcess]
) -> None:
    """A rack that fails: connecting to its nodes takes what time it takes, but only after the local pages are copied."""
    master, _, _, a, b = cluster(deadline_s=1.0)
    holes, lost = [], []
    for number in range(4):
        hole = socket.create_server(("127.0.0.1", 0), backlog=0)
        plug = [socket.socket() for _ in range(4)]  # fills the backlog: later connections get no answer at all
        for sock in plug:
            sock.setblocking(False)
            sock.connect_ex(hole.getsockname())
        holes += [hole, *plug]
        extra = ("--advertise", f"127.0.0.1:{hole.getsockname()[1]}")
        rank = FakeRank(start_node(f"hole{number}", "1MiB", (master.address,), extra).settings())
        lost += hashes(("lost", number))
        rank.store(NS, lost[-1:])
        rank.close()
    own, healthy = hashes("own", "own2"), hashes("healthy")
    b.store(NS, own)
    a.store(NS, healthy)
    found_everywhere(b, [*lost, *own, *healthy], 7)
    assert b.load(NS, healthy).ok == b"\x01", "now there is a connection to the healthy one"
    started = time.monotonic()
    outcome = b.load(NS, [*lost, *own, *healthy])
    assert time.monotonic() - started < 1.2
    assert outcome.ok == bytes(4) + b"\x01" * 3, outcome.reasons
    for sock in holes:
        sock.close()


def test_damage_at_the_holder_is_a_miss_at_the_reader(cluster: Callable[..., Cluster]) -> None:
    """P15 P28, the remote path."""
    _, node_a, _, a, b = cluster()
    pages = hashes(*range(3))
    a.store(NS, pages)
    found_everywhere(b, pages, 3)
    admin = Admin(node_a)
    admin.damage(NS, pages[1], a.page_bytes, at=100)
    admin.close()
    outcome = b.load(NS, pages)
    assert outcome.ok == b"\x01\x00\x01"
    assert outcome.reasons == {"checksum_remote": 1}


def test_a_page_evicted_after_the_lookup_is_a_miss(cluster: Callable[..., Cluster]) -> None:
    """P29: the directory is a hint; the holder decides."""
    _, _, _, a, b = cluster()
    pages = hashes(*range(3))
    a.store(NS, pages)
    found_everywhere(b, pages, 3)
    a.client._queries.ask(p.Clear(NS, everywhere=False), 2.0)
    outcome = b.load(NS, pages)
    assert outcome.ok == bytes(3)
    assert set(outcome.reasons) <= {"gone_remote", "absent"}
    wait_until(lambda: b.exists(NS, pages) == 0, 30, "the directory follows")


def test_clear_reaches_the_other_host_and_no_other_namespace(cluster: Callable[..., Cluster]) -> None:
    """P126."""
    _, _, _, a, b = cluster()
    other = b"o" * 16
    a.store(NS, hashes("a"))
    b.store(NS, hashes("b"))
    b.store(other, hashes("b"))
    a.client.clear(NS)
    wait_until(lambda: b.exists(NS, hashes("b")) == 0, 30)
    assert b.load(NS, hashes("b")).ok == b"\x00"
    assert b.load(other, hashes("b")).ok == b"\x01"


def test_bytes_between_nodes_are_in_the_metrics(cluster: Callable[..., Cluster]) -> None:
    _, _, _, a, b = cluster()
    pages = hashes(*range(2))
    a.store(NS, pages)
    found_everywhere(b, pages, 2)
    b.load(NS, pages)
    wait_until(lambda: report_of(a)["remote_sent_pages"] == 2, 30)
    text = urllib.request.urlopen(f"http://{report_of(a)['metrics']}/metrics", timeout=5).read().decode()
    assert f"hicache_node_remote_sent_bytes_total {float(2 * a.page_bytes)}" in text
    assert "hicache_node_objects 2.0" in text
    health = urllib.request.urlopen(f"http://{report_of(a)['metrics']}/health", timeout=5).read()
    assert b'"status": "ok"' in health


def test_the_data_port_refuses_another_version_and_survives_garbage(cluster: Callable[..., Cluster]) -> None:
    """P114."""
    _, _, _, a, b = cluster()
    host, _, port = str(report_of(a)["data"]).rpartition(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        tcp.send_message(sock, p.Fetch(99, "future", NS, page_hash("a"), 4096))
        answer = tcp.receive_message(sock, tcp.reply_decoder, time.monotonic() + 5)
        assert isinstance(answer, p.Refused)
        assert "99" in answer.reason
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x05\x00\x00\x00hello"):
        with socket.create_connection((host, int(port)), 5) as sock:
            sock.sendall(garbage)
            sock.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert not sock.recv(1000)
    pages = hashes("x")
    a.store(NS, pages)
    found_everywhere(b, pages, 1)
    assert b.load(NS, pages).ok == b"\x01"


class SlowPeer:
    """Stands between a reader and a node: passes requests on, and answers at a rate of its own, for ever if it is let."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.rate_bytes_s = 0
        self.pass_after = 0
        self.broken: list[Exception] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(reader,), daemon=True).start()

    def _relay(self, reader: socket.socket) -> None:
        node = socket.create_connection(self._target)

        def requests() -> None:
            try:
                while data := reader.recv(65536):
                    node.sendall(data)
            except OSError:
                pass

        threading.Thread(target=requests, daemon=True).start()
        passed = 0
        try:
            while data := node.recv(16384):
                if self.rate_bytes_s and passed >= self.pass_after:
                    time.sleep(len(data) / self.rate_bytes_s)
                reader.sendall(data)
                passed += len(data)
        except OSError as error:
            self.broken.append(error)

    def close(self) -> None:
        self._listener.close()


def test_a_slow_peer_that_goes_on_sending_is_fenced(
    cluster: Callable[..., Cluster], start_node: Callable[..., NodeProcess]
) -> None:
    """P08: the call ends at its deadline, and what the peer sends afterwards lands nowhere."""
    master, _, _, a, b = cluster(page_bytes=1 << 20, deadline_s=1.0)
    target_host, _, target_port = str(report_of(a)["data"]).rpartition(":")
    proxy = SlowPeer((target_host, int(target_port)))
    slow = start_node("slow", "64MiB", (master.address,), ("--advertise", f"127.0.0.1:{proxy.port}"))
    # The third node's own data port is what the proxy really stands before.
    rank = FakeRank(slow.settings(), page_bytes=1 << 20)
    slow_host, _, slow_port = bound_data_address(slow).rpartition(":")
    proxy._target = (slow_host, int(slow_port))
    pages = hashes(*range(8))
    rank.store(NS, pages)
    found_everywhere(b, pages, 8)
    assert b.load(NS, pages).ok == b"\x01" * 8, "through the proxy at full speed"
    proxy.pass_after, proxy.rate_bytes_s = 1 << 20, 500_000
    own = hashes("own")
    b.store(NS, own)
    b.scramble()
    started = time.monotonic()
    outcome = b.transfer("load", NS, [*own, *pages])
    assert time.monotonic() - started < 1.5
    assert outcome.ok[0] == 1, "the page that is here does not wait for the slow one"
    assert outcome.ok[1:] != b"\x01" * 8
    assert set(outcome.reasons) == {"deadline"}, "the mover stopped by itself, nobody had to kill it"
    after = bytes(b.memory.view)
    time.sleep(1.0)
    assert bytes(b.memory.view) == after, "bytes landed after the call had returned"
    for place, page in enumerate([*own, *pages]):
        if outcome.ok[place]:
            assert b.read(place) == pattern(page, b.page_bytes)
    rank.close()
    proxy.close()


def bound_data_address(node: NodeProcess) -> str:
    """The port that the node really listens on, whatever it advertises."""
    assert node.process is not None
    fds = Path(f"/proc/{node.process.pid}/fd")
    links = [os.readlink(fd) for fd in fds.iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and inode in inodes:
            return f"127.0.0.1:{int(local.split(':')[1], 16)}"
    raise AssertionError("no listening port")


def test_a_wildcard_is_never_advertised(
    start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]
) -> None:
    """P111."""
    master = start_master()
    wide = start_node("wide", "1MiB", (master.address,), ("--listen", "0.0.0.0:0", "--allow-unauthenticated"))
    rank = FakeRank(wide.settings())
    host, _, port = str(report_of(rank)["data"]).rpartition(":")
    assert host not in ("0.0.0.0", "::", "")
    assert int(port) > 0
    rank.close()


def test_nodes_that_start_before_their_master_all_join(
    start_node: Callable[..., NodeProcess], start_master: Callable[[], MasterProcess]
) -> None:
    """P75."""
    master = start_master()
    master.kill()
    nodes = [start_node(f"n{i}", "1MiB", (master.address,)) for i in range(4)]
    rank = FakeRank(nodes[0].settings())
    assert rank.store(NS, hashes("a")).ok == b"\x01", "without a master a node serves its host"
    master.start()

    def joined() -> bool:
        report = rank.client.status()
        return report is not None and len([n for n in report.cluster if n.state == "active"]) == 4

    wait_until(joined, 30)
    rank.close()
