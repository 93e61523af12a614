"""A real master in its own process, and real links: what operators see when masters come, go, and meet garbage."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from hicache_master.server import MasterError, MasterServer, run_master
from xxhash import xxh3_64_intdigest

from hicache_mooncake.cold.index import Key
from hicache_mooncake.cold.tier import Body, ColdTier
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.node import master_link
from hicache_mooncake.node.master_link import JoinFacts, Keys, MasterLink, Usage
from hicache_mooncake.node.master_lookup import Breaker
from hicache_mooncake.protocol import COLD, DRAM, ClusterReport, Question

NS = b"n" * 16
ROOT = Path(__file__).parents[1]
PATIENCE_S = 30.0

log = logging.getLogger("test")


def hashes(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in numbers)


def eventually(what: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


class Source:
    """A node's index as the link sees it: what is held, and what changed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[bytes, None] = {}
        self.changes: list[tuple[bytes, bool]] = []
        self.lost = False
        self.snapshots = 0
        self.cleared: list[bytes] = []

    def add(self, *numbers: int) -> None:
        with self.lock:
            for number in numbers:
                self.held[hashes(number)] = None
                self.changes.append((hashes(number), True))

    def remove(self, *numbers: int) -> None:
        with self.lock:
            for number in numbers:
                self.held.pop(hashes(number), None)
                self.changes.append((hashes(number), False))

    def clear(self, namespace: bytes) -> None:
        with self.lock:
            self.changes += [(page_hash, False) for page_hash in self.held]
            self.held.clear()
        self.cleared.append(namespace)

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        with self.lock:
            now, self.changes = dict(self.changes[:limit]), self.changes[limit:]
        added = b"".join(page_hash for page_hash, is_added in now.items() if is_added)
        removed = b"".join(page_hash for page_hash, is_added in now.items() if not is_added)
        return ([(NS, added)] if added else []), ([(NS, removed)] if removed else [])

    def snapshot(self) -> Iterator[Keys]:
        self.snapshots += 1
        with self.lock:
            self.lost = False
            held = list(self.held)
        for at in range(0, len(held), 1000):
            yield [(NS, b"".join(held[at : at + 1000]))]

    def changes_lost(self) -> bool:
        return self.lost

    def usage(self) -> Usage:
        with self.lock:
            return Usage(used_bytes=len(self.held), capacity_bytes=1 << 30, objects=len(self.held), hits=5, lookups=7)


class MasterProcess:
    """`run_master` in a process of its own, killed hard when the test ends."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        script = (
            "import sys, logging; logging.basicConfig(level='INFO');"
            "from hicache_master.server import run_master;"
            f"run_master('{host}:{port}', '127.0.0.1:0', heartbeat_s=0.1, ttl_s=2.0,"
            " ready=lambda *addresses: print(*addresses, flush=True))"
        )
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'master'}"}
        self.process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.address, self.metrics_address = self.process.stdout.readline().split()
        self.port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.metrics_address}{path}", timeout=10) as response:
            return str(response.read().decode())


@pytest.fixture
def masters() -> Iterator[Callable[..., MasterProcess]]:
    started: list[MasterProcess] = []

    def start(port: int = 0, host: str = "127.0.0.1") -> MasterProcess:
        started.append(MasterProcess(port, host))
        return started[-1]

    yield start
    for master in started:
        master.kill()


@pytest.fixture
def links() -> Iterator[Callable[..., tuple[MasterLink, Source]]]:
    started: list[MasterLink] = []

    def start(name: str, *addresses: str, host: str = "127.0.0.1") -> tuple[MasterLink, Source]:
        source = Source()
        facts = JoinFacts(name, os.urandom(8), host, 7000 + len(started), 1 << 30)
        link = MasterLink(addresses, lambda: facts, source, source.clear, log=log)
        link.start()
        started.append(link)
        return link, source

    yield start
    for link in started:
        link.close()


def found(link: MasterLink, *numbers: int) -> list[str]:
    reply = link.lookup([Question(NS, hashes(*numbers), prefix=False)], 5.0)
    return [] if reply is None else [reply[0].peers[i - 1].node if i else "" for i in reply[0].holder]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_page_that_one_node_stores_is_found_by_the_other(masters, links) -> None:
    master = masters()
    a, source = links("a", master.address)
    b, _ = links("b", master.address)
    eventually(lambda: a.state == b.state == "joined")
    source.add(1, 2)
    a.notify()
    eventually(lambda: found(b, 1, 2, 3) == ["a", "a", ""])
    reply = b.lookup([Question(NS, hashes(1, 2, 3, 1), prefix=True)], 5.0)
    assert reply is not None
    assert reply[0].holder == b"\1\1"
    assert (reply[0].peers[0].host, reply[0].peers[0].port) == ("127.0.0.1", 7000)
    several = b.lookup([Question(NS, hashes(1, 3), prefix=False), Question(b"x" * 16, hashes(1), prefix=True)], 5.0)
    assert several is not None
    assert [answer.holder for answer in several] == [b"\1\0", b""]
    assert found(a, 1) == [""], "the asker itself is not an answer"
    source.remove(1)
    a.notify()
    eventually(lambda: found(b, 1, 2) == ["", "a"])


def test_what_a_node_held_before_it_joined_is_found(masters, links) -> None:
    master = masters()
    source = Source()
    source.held = dict.fromkeys(hashes(number) for number in range(20_000))
    facts = JoinFacts("a", b"i", "127.0.0.1", 7000, 1)
    link = MasterLink((master.address,), lambda: facts, source, source.clear, log=log)
    link.start()
    try:
        b, _ = links("b", master.address)
        eventually(lambda: found(b, 0, 10_000, 19_999) == ["a", "a", "a"])
        assert source.snapshots == 1
    finally:
        link.close()
    eventually(lambda: found(b, 0) == [""])  # it left


def test_a_master_killed_and_restarted_is_whole_again_by_itself(masters, links) -> None:
    master = masters()
    a, source = links("a", master.address)
    b, _ = links("b", master.address)
    source.add(*range(5000))
    a.notify()
    eventually(lambda: found(b, 0, 4999) == ["a", "a"])
    master.kill()
    source.remove(0)
    source.add(6000)
    a.notify()
    masters(master.port)
    eventually(lambda: found(b, 0, 4999, 6000) == ["", "a", "a"])
    assert a.state == "joined"


def test_a_lookup_without_a_master_fails_within_its_timeout_and_then_at_once(masters, links) -> None:
    master = masters()
    a, _ = links("a", master.address)
    eventually(lambda: found(a, 1) == [""])
    master.process.send_signal(signal.SIGSTOP)  # worse than dead: connections stay open
    began = time.monotonic()
    assert a.lookup([Question(NS, hashes(1), prefix=True)], 0.5) is None
    assert time.monotonic() - began < 5.0
    began = time.monotonic()
    for _ in range(1000):
        if a.lookup([Question(NS, hashes(1), prefix=True)], 0.5) is not None:
            pytest.fail("a stopped master answered")
    assert time.monotonic() - began < 5.0, "a thousand lookups must cost a probe or two"
    master.kill()
    eventually(lambda: a.state == "unreachable")
    masters(master.port)
    eventually(lambda: found(a, 1) == [""])


def test_many_threads_ask_at_once_and_each_gets_its_own_answer(masters, links) -> None:
    master = masters()
    a, source = links("a", master.address)
    b, _ = links("b", master.address)
    source.add(*range(0, 64, 2))
    a.notify()
    eventually(lambda: found(b, 62) == ["a"])
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(20):
            if found(b, number) != ["a" if number % 2 == 0 else ""]:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_eight_nodes_that_start_before_the_master_all_join(masters, links) -> None:
    port = free_port()
    nodes = [links(f"node-{i}", f"127.0.0.1:{port}") for i in range(8)]
    for i, (_, source) in enumerate(nodes):
        source.add(*range(100 * i, 100 * i + 100))
    assert {link.state for link, _ in nodes} <= {"unreachable", "joining"}
    masters(port)
    eventually(lambda: all(link.state == "joined" for link, _ in nodes))
    asker, _ = nodes[0]
    eventually(lambda: found(asker, *range(100, 800, 100)) == [f"node-{i}" for i in range(1, 8)])
    report = asker.cluster_status(5.0)
    assert isinstance(report, ClusterReport)
    assert len(report.nodes) == 8
    eventually(lambda: all(info.objects == 100 for info in (asker.cluster_status(5.0) or report).nodes))


def test_a_link_of_another_protocol_is_refused_and_says_so(masters, links, monkeypatch, caplog) -> None:
    master = masters()
    monkeypatch.setattr(master_link, "PROTOCOL_MIN", 7)
    monkeypatch.setattr(master_link, "PROTOCOL_MAX", 9)
    a, _ = links("a", master.address)
    eventually(lambda: a.state.startswith("refused: "))
    assert "7 to 9" in a.state
    assert "upgrade the master" in a.state
    assert a.lookup([Question(NS, hashes(1), prefix=True)], 5.0) is None
    assert [record.levelname for record in caplog.records if "refused this node" in record.message] == ["ERROR"]
    assert 'hicache_master_nodes{state="active"} 0.0' in master.get("/metrics")


def test_addresses_that_others_cannot_reach_are_refused(masters, links) -> None:
    master = masters()
    wild, _ = links("wild", master.address, host="0.0.0.0")
    eventually(lambda: wild.state.startswith("refused: "))
    assert "--advertise" in wild.state
    local, _ = links("local", master.address, host="127.0.0.1")
    eventually(lambda: local.state == "joined")
    real, _ = links("real", master.address, host="10.1.2.3")
    eventually(lambda: real.state == "joined")
    eventually(lambda: local.state.startswith("refused: "))
    assert "'real'" in local.state


def garbage_seen(master: MasterProcess) -> float:
    lines = master.get("/metrics").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("hicache_master_garbage_total "))


def test_garbage_to_the_port_of_the_master_is_counted_and_hurts_nobody(masters, links) -> None:
    master = masters()
    a, source = links("a", master.address)
    b, _ = links("b", master.address)
    source.add(1)
    a.notify()
    eventually(lambda: found(b, 1) == ["a"])
    for body in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 70_000):
        with socket.create_connection(("127.0.0.1", master.port)) as raw:
            raw.sendall(body)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 2000)
        dealer.connect(f"tcp://{master.address}")
        for frames in ([b""], [b"x"], [b"\xc1" * 100], [b"a", b"b", b"c"], [b"\x91" * 5000], [b"\x92\xa6Lookup\x01"]):
            dealer.send_multipart(frames)
    context.term()
    # At least: what raw sockets send may pass for frames of ZMQ's oldest protocol.
    eventually(lambda: garbage_seen(master) >= 6)
    assert found(b, 1) == ["a"]
    assert "hicache_master_errors_total 0.0" in master.get("/metrics")
    assert a.state == b.state == "joined"


def test_a_clear_reaches_the_other_nodes(masters, links) -> None:
    master = masters()
    a, _ = links("a", master.address)
    b, source = links("b", master.address)
    c, _ = links("c", master.address)
    eventually(lambda: a.state == b.state == c.state == "joined")
    source.add(1)
    b.notify()
    eventually(lambda: found(c, 1) == ["b"])
    a.clear_namespace(NS)
    eventually(lambda: source.cleared == [NS])
    b.notify()
    eventually(lambda: found(c, 1) == [""])


def test_a_clear_while_the_master_is_away_reaches_the_other_nodes_when_it_is_back(masters, links, monkeypatch) -> None:
    """The master is away for so long that the links have given its connection up; the other node joins after the one that
    cleared, or before: either way it hears of it."""
    monkeypatch.setattr(master_link, "SILENT_S", 0.2)
    master = masters()
    a, own = links("a", master.address)
    others = [links(name, master.address) for name in "bc"]
    eventually(lambda: all(link.state == "joined" for link in (a, *(link for link, _ in others))))
    master.kill()
    eventually(lambda: all("unreachable" in link.state for link in (a, *(link for link, _ in others))))
    a.clear_namespace(NS)
    time.sleep(0.5)
    masters(master.port)
    eventually(lambda: all(source.cleared[:1] == [NS] for _, source in others))
    assert own.cleared == []


def test_with_two_masters_either_can_die(masters, links) -> None:
    first, second = masters(), masters()
    a, source = links("a", first.address, second.address)
    b, _ = links("b", first.address, second.address)
    source.add(1)
    a.notify()
    eventually(lambda: found(b, 1) == ["a"])
    first.kill()
    source.add(2)
    a.notify()
    eventually(lambda: found(b, 1, 2) == ["a", "a"])
    masters(first.port)
    second.kill()
    source.add(3)
    a.notify()
    eventually(lambda: found(b, 1, 2, 3) == ["a", "a", "a"])


def test_changes_that_the_source_lost_are_made_good_by_a_snapshot(masters, links) -> None:
    master = masters()
    a, source = links("a", master.address)
    b, _ = links("b", master.address)
    source.add(1, 2)
    a.notify()
    eventually(lambda: found(b, 1, 2) == ["a", "a"])
    with source.lock:
        source.held = {hashes(2): None, hashes(3): None}
        source.lost = True
    a.notify()
    eventually(lambda: found(b, 1, 2, 3) == ["", "a", "a"])


def test_a_source_that_fails_costs_nothing_for_good(masters, links) -> None:
    master = masters()
    a, source = links("a", master.address)
    b, _ = links("b", master.address)
    eventually(lambda: a.state == "joined")
    drain, snapshot = source.drain_changes, source.snapshot

    def broken(limit: int) -> tuple[Keys, Keys]:
        drain(limit)
        source.drain_changes = drain
        raise RuntimeError("a bug")

    def broken_snapshot() -> Iterator[Keys]:
        source.snapshot = snapshot
        yield [(NS, hashes(1))]
        raise RuntimeError("another bug")

    source.snapshot = broken_snapshot
    source.drain_changes = broken
    source.add(1, 2)
    a.notify()
    eventually(lambda: found(b, 1, 2) == ["a", "a"])


def test_health_and_metrics_say_how_the_master_is(masters, links) -> None:
    master = masters()
    a, source = links("a", master.address)
    source.add(1, 2, 3)
    a.notify()
    eventually(lambda: json.loads(master.get("/health"))["keys"] == 3)
    eventually(lambda: json.loads(master.get("/health"))["nodes"]["active"] == 1)
    health = json.loads(master.get("/health"))
    assert health["status"] == "ok"
    assert health["nodes"] == {"joining": 0, "active": 1, "sick": 0, "suspected": 0, "draining": 0, "gone": 0}
    assert (health["shard"], health["role"], health["refusals"], health["strangers"]) == ("0/1", "", [], 0)
    found(a, 1)
    eventually(lambda: "hicache_master_lookup_keys_total 1.0" in master.get("/metrics"))
    assert 'hicache_master_nodes{state="active"} 1.0' in master.get("/metrics")


def test_a_master_ends_with_sigterm(masters) -> None:
    master = masters()
    master.process.terminate()
    assert master.process.wait(timeout=20) == 0


def test_an_address_that_is_taken_is_said_clearly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(MasterError, match=r"ss -ltnp"):
            run_master(address, None)
        with pytest.raises(MasterError, match=r"for metrics"):
            run_master("127.0.0.1:0", address)
    with pytest.raises(MasterError, match=r"no-such-host"):
        run_master("no-such-host.invalid:1", None)
    with pytest.raises(MasterError, match=r"heartbeat"):
        run_master("127.0.0.1:0", None, heartbeat_s=5.0, ttl_s=1.0)


@pytest.mark.parametrize("listen", ["[::1]:0", "*:0", "localhost:0"])
def test_other_ways_to_write_an_address(listen: str, links) -> None:
    if listen.startswith("[") and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = MasterServer(listen, allow_unauthenticated=True)
    except MasterError:
        if listen.startswith("["):
            pytest.skip("no IPv6 here")
        raise
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        a, _ = links("a", server.address.replace("0.0.0.0", "127.0.0.1"))
        eventually(lambda: a.state == "joined")
        a.close()
    finally:
        server.stop()
        thread.join(timeout=20)
    assert not thread.is_alive()


def test_without_masters_a_link_does_nothing_quickly() -> None:
    source = Source()
    link = MasterLink((), lambda: JoinFacts("a", b"i", "h", 1, 1), source, source.clear, log=log)
    link.start()
    link.notify()
    link.clear_namespace(NS)
    assert link.lookup([Question(NS, hashes(1), prefix=True)], 100.0) is None
    assert link.cluster_status(100.0) is None
    assert link.state == "no master configured"
    link.close()


def test_a_master_address_that_is_none_is_refused_at_once() -> None:
    source = Source()
    with pytest.raises(ValueError, match="port"):
        MasterLink(("host:port",), lambda: JoinFacts("a", b"i", "h", 1, 1), source, source.clear, log=log)


def test_a_breaker_opens_longer_each_time_and_lets_one_probe_through() -> None:
    breaker = Breaker(0.5, 5.0)
    assert breaker.allows(0.0, 1.0)
    breaker.failed(1.0)
    breaker.failed(1.0)  # a second call that was under way
    assert not breaker.allows(1.4, 1.0)
    assert breaker.allows(1.5, 1.0)
    assert not breaker.allows(1.6, 1.0), "one probe at a time"
    breaker.failed(2.5)
    assert not breaker.allows(3.4, 1.0)
    for now in (10.0, 20.0, 30.0, 40.0, 50.0):
        assert breaker.allows(now, 1.0)
        breaker.failed(now)
    assert not breaker.allows(54.9, 1.0)
    assert breaker.allows(55.1, 1.0)
    breaker.succeeded()
    assert breaker.allows(55.2, 1.0)
    assert breaker.allows(55.2, 1.0)


class SlowCold:
    """A cold tier whose index takes its time to read; what the link asked for meanwhile is counted."""

    def __init__(self, source: Source, parts: int) -> None:
        self.changes_lost = False
        self.beats_meanwhile = 0
        self.whole = False
        self._source, self._parts = source, parts

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        return [], []

    def snapshot_parts(self) -> Iterator[Keys]:
        before = self._source.figures
        for _ in range(self._parts):
            time.sleep(0.06)
            yield [(NS, os.urandom(4096 * 32))]
        self.beats_meanwhile += self._source.figures - before
        self.whole = True


class Counting(Source):
    figures = 0

    def usage(self) -> Usage:
        self.figures += 1
        return super().usage()


def test_the_heart_beats_while_a_large_cold_tier_is_told_of(masters) -> None:
    master = masters()
    source = Counting()
    cold = SlowCold(source, 30)
    facts = JoinFacts("a", b"i", "127.0.0.1", 7000, 1)
    link = MasterLink((master.address,), lambda: facts, source, source.clear, log=log, cold=cold)
    link.start()
    try:
        eventually(lambda: cold.whole)
        assert cold.beats_meanwhile >= 3
    finally:
        link.close()


def test_pages_of_a_real_cold_tier_are_found_and_named_as_such(masters, links, tmp_path) -> None:
    master = masters()
    b, _ = links("b", master.address)
    source = Source()
    cold = ColdTier(tmp_path, 64 << 20, floor_bytes=0, direct=False)
    facts = JoinFacts("a", b"i", "127.0.0.1", 7100, 1)
    link = MasterLink((master.address,), lambda: facts, source, source.clear, log=log, cold=cold)

    def write(*numbers: int) -> None:
        body = memoryview(bytes(4096))
        bodies = [Body(Key(NS, hashes(n)), body, 4096, xxh3_64_intdigest(body, checksum_seed(NS, hashes(n)))) for n in numbers]
        assert all(cold.write(bodies, cold.clears))
        link.notify()

    def tiers() -> list[int]:
        reply = b.lookup([Question(NS, hashes(1, 2, 3), prefix=False)], 5.0)
        assert reply is not None
        answer = reply[0]
        return [(answer.tiers or bytes(len(answer.peers)))[code - 1] if code else -1 for code in answer.holder]

    try:
        write(1)
        link.start()
        eventually(lambda: tiers() == [COLD, -1, -1])
        write(2)
        source.add(3)
        eventually(lambda: tiers() == [COLD, COLD, DRAM])
        cold.clear(NS)
        while cold.sweep():
            pass
        link.notify()
        eventually(lambda: tiers() == [-1, -1, DRAM])
    finally:
        link.close()
        cold.close()
