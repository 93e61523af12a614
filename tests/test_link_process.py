"""Real links and real master processes: masters die, hang, move and are found again, and nothing in a node makes it late."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake.config import load_settings
from hicache_mooncake.node.master_link import JoinFacts, MasterLink, Usage
from hicache_mooncake.node.service import Node
from hicache_mooncake.protocol import Question, shard_of
from hicache_mooncake.security import ClusterKey
from tests.conftest import environment
from tests.etcd import EtcdProcess, etcd_server, needs_etcd
from tests.test_master_process import NS, Source, eventually, hashes

log = logging.getLogger("test")


class Master:
    """`run_master` with options, in a process of its own."""

    def __init__(self, port: int = 0, **options: object) -> None:
        given = {"heartbeat_s": 0.1, "ttl_s": 3.0} | options
        key_file = given.pop("key_file", None)
        key = f"ClusterKey.load({key_file!r})" if key_file else "None"
        script = (
            "import sys, logging; logging.basicConfig(level='INFO');"
            "from hicache_master.server import run_master; from hicache_mooncake.security import ClusterKey;"
            f"run_master('127.0.0.1:{port}', None, key={key}, ready=lambda *a: print(*a, flush=True), **{given!r})"
        )
        self.process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line, "the master did not start"
        self.address = line[0]
        self.port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def masters() -> Iterator[Callable[..., Master]]:
    started: list[Master] = []

    def start(port: int = 0, **options: object) -> Master:
        started.append(Master(port, **options))
        return started[-1]

    yield start
    for master in started:
        master.kill()


@pytest.fixture
def links() -> Iterator[Callable[..., tuple[MasterLink, Source]]]:
    started: list[MasterLink] = []

    def start(name: str, *addresses: str, source: Source | None = None, **options: object) -> tuple[MasterLink, Source]:
        source = source or Source()
        facts = JoinFacts(name, os.urandom(8), "127.0.0.1", 7000 + len(started), 1 << 30)
        link = MasterLink(addresses, lambda: facts, source, source.clear, log=log, **options)  # type: ignore[arg-type]
        started.append(link)
        link.start()
        return link, source

    yield start
    for link in started:
        link.close()


def found(link: MasterLink, numbers: list[int], timeout_s: float = 5.0) -> list[str] | None:
    answers = link.lookup([Question(NS, hashes(*numbers), prefix=False)], timeout_s)
    if answers is None or not answers.complete:
        return None
    return [answers[0].peers[code - 1].node if code else "" for code in answers[0].holder]


# --------------------------------------------------------------------------- masters that die


def test_a_killed_master_of_100_000_keys_is_whole_again(masters, links) -> None:
    """P121: the new one starts empty, and every page is found through it again; what went meanwhile is not."""
    master = masters()
    count, parts = 100_000, 4
    for part in range(parts):
        source = Source()
        source.held = dict.fromkeys(hashes(n) for n in range(part, count, parts))
        links(f"node-{part}", master.address, source=source)
    asker, own = links("asker", master.address)
    everything = list(range(count))

    def whole() -> bool:
        return found(asker, everything, 10.0) == [f"node-{n % parts}" for n in everything]

    eventually(whole, 60)
    master.kill()
    masters(master.port)
    eventually(whole, 60)
    assert asker.counters["failures"] == 0
    assert own.snapshots >= 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_no_lookup_fails_when_one_of_two_masters_dies_or_hangs(masters, links, how) -> None:
    pair = [masters(), masters()]
    _, source = links("a", *(m.address for m in pair))
    askers = [links(name, *(m.address for m in pair))[0] for name in ("b", "c", "d", "e", "f")]
    source.add(1)
    for asker in askers:
        eventually(lambda asker=asker: found(asker, [1]) == ["a"])
        eventually(lambda asker=asker: all(m.state == "joined" and not m.warming for m in asker.view.masters))
    before = [asker.counters["lookup_failures"] for asker in askers]
    pair[0].process.send_signal(how)
    for _ in range(60):
        for asker in askers:  # some prefer the one, some the other
            assert found(asker, [1], 4.0) == ["a"]
        time.sleep(0.02)
    assert [asker.counters["lookup_failures"] for asker in askers] == before


def test_a_directory_of_two_shards_survives_a_master_of_each(masters, links) -> None:
    cluster = [masters(shard=(number % 2, 2)) for number in range(4)]
    addresses = [master.address for master in cluster]
    a, source = links("a", *addresses)
    b, _ = links("b", *addresses)
    numbers = list(range(300))
    source.add(*numbers)
    a.notify()
    eventually(lambda: found(b, numbers) == ["a"] * 300)
    prefix = b.lookup([Question(NS, hashes(*numbers, 1000, 1), prefix=True)], 5.0)
    assert prefix is not None
    assert prefix[0].holder == b"\1" * 300
    cluster[0].kill()
    cluster[1].kill()
    eventually(lambda: found(b, numbers) == ["a"] * 300)
    source.remove(0)
    source.add(500)
    a.notify()
    eventually(lambda: found(b, [0, 1, 500]) == ["", "a", "a"])
    cluster[2].kill()
    eventually(lambda: a.state == "shards 0 of 2 have no master")
    answers = b.lookup([Question(NS, hashes(*numbers), prefix=False)], 1.0)
    assert answers is not None
    assert not answers.complete
    expected = [1 if n and shard_of(hashes(n), 2) == 1 else 0 for n in numbers]
    assert list(answers[0].holder) == expected, "the shard that is there is answered"


def test_a_master_that_moved_is_found_where_its_name_points_now(masters, links) -> None:
    """P119: at each connection the name is resolved anew."""
    first = masters()
    where = [first.address]
    options = {"resolve": lambda name: where[0] if name == "masters.test:50051" else name, "allow_unauthenticated": True}
    a, source = links("a", "masters.test:50051", **options)
    b, _ = links("b", "masters.test:50051", **options)
    source.add(1)
    eventually(lambda: found(b, [1]) == ["a"])
    first.kill()
    where[0] = masters().address
    eventually(lambda: found(b, [1]) == ["a"])
    eventually(lambda: a.state == b.state == "joined")


def test_names_that_do_not_resolve_cost_a_retry(masters, links) -> None:
    master = masters()
    broken = [True]

    def resolve(name: str) -> str:
        if broken[0]:
            raise OSError("no such name")
        return master.address

    a, _ = links("a", "masters.test:50051", resolve=resolve, allow_unauthenticated=True)
    time.sleep(0.3)
    assert a.state == "unreachable"
    assert found(a, [1], 0.2) is None
    broken[0] = False
    eventually(lambda: a.state == "joined")


# --------------------------------------------------------------------------- nothing makes a node late


def test_a_locked_node_with_a_busy_interpreter_stays_a_member(masters, links, tmp_path: Path) -> None:
    """P104: the node's lock is held for twice the ttl, and a thread computes without a pause."""
    master = masters(ttl_s=2.0)
    watcher, _ = links("watcher", master.address)
    given = {"socket": str(tmp_path / "n.sock"), "dram": "16MiB", "listen": "127.0.0.1:0", "name": "n", "metrics": ""}
    node = Node(load_settings({}, {}, given | {"masters": master.address, "node": "external", "drain_s": 0})[0])
    node.start()
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(1000))

    def state() -> str:
        report = watcher.cluster_status(5.0)
        return next((info.state for info in report.nodes if info.node == "n"), "") if report is not None else "unknown"

    spinner = threading.Thread(target=spin, daemon=True)
    try:
        eventually(lambda: state() == "active")
        spinner.start()
        seen = set()
        with node.lock:
            until = time.monotonic() + 4.5
            while time.monotonic() < until:
                seen.add(state())
                time.sleep(0.05)
        assert seen <= {"active", "unknown"}
        assert "active" in seen
    finally:
        done.set()
        node.stop()


# --------------------------------------------------------------------------- what nodes and masters tell each other


def test_a_node_that_two_others_cannot_read_from_is_taken_out_of_rotation(masters, links) -> None:
    master = masters()
    holder, source = links("holder", master.address)
    readers = [links(name, master.address)[0] for name in "abc"]
    source.add(1)
    holder.notify()
    eventually(lambda: all(found(reader, [1]) == ["holder"] for reader in readers))
    for reader in readers[:2]:
        reader.report({"holder": 1})
    eventually(lambda: found(readers[2], [1]) == [""])
    report = readers[2].cluster_status(5.0)
    assert report is not None
    assert {info.node: info.state for info in report.nodes}["holder"] == "sick"


def test_who_wants_room_hears_of_it_and_a_draining_node_offers_none(masters, links) -> None:
    master = masters()
    wanting, roomy = Source(), Source()
    wanting.usage = lambda: Usage(capacity_bytes=100, used_bytes=100, room_bytes=0, want_room=True)  # type: ignore[method-assign]
    roomy.usage = lambda: Usage(capacity_bytes=100, room_bytes=70)  # type: ignore[method-assign]
    full, _ = links("full", master.address, source=wanting)
    empty, _ = links("empty", master.address, source=roomy)
    eventually(lambda: [(room.peer.node, room.free_bytes) for room in full.room()] == [("empty", 70)])
    assert empty.room() == [], "it did not ask"
    facts = empty.info()
    empty.info = lambda: dataclasses.replace(facts, draining=True)
    empty._core.facts = empty.info
    empty.beat_now()
    eventually(lambda: full.room() == [])


# --------------------------------------------------------------------------- keys


def test_links_and_masters_with_one_key_work_and_strangers_stay_out(masters, links, tmp_path, caplog) -> None:
    files = [str(tmp_path / name) for name in ("ours", "theirs")]
    keys = [ClusterKey.generate() for _ in files]
    for key, file in zip(keys, files, strict=True):
        key.save(file)
    master = masters(key_file=files[0])
    a, source = links("a", master.address, key=keys[0])
    b, _ = links("b", master.address, key=keys[0])
    source.add(1)
    eventually(lambda: found(b, [1]) == ["a"])
    for name, key in (("plain", None), ("foreign", keys[1])):
        stranger, _ = links(name, master.address, key=key)
        caplog.clear()
        eventually(lambda: any("--key-file" in record.getMessage() for record in caplog.records))
        assert stranger.state in ("unreachable", "joining")
        assert found(stranger, [1], 0.5) is None
    report = a.cluster_status(5.0)
    assert report is not None
    assert {info.node for info in report.nodes} == {"a", "b"}


def test_without_a_key_no_master_on_another_host_is_connected_to() -> None:
    source = Source()
    facts = JoinFacts("a", b"i", "h", 1, 1)
    with pytest.raises(ValueError, match=r"keygen.*--allow-unauthenticated"):
        MasterLink(("10.0.0.1:50051",), lambda: facts, source, source.clear, log=log)
    for options in ({"key": ClusterKey.generate()}, {"allow_unauthenticated": True}):
        MasterLink(("10.0.0.1:50051",), lambda: facts, source, source.clear, log=log, **options).close()


# --------------------------------------------------------------------------- etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with etcd_server(tmp_path) as server:
        yield server


@needs_etcd
def test_masters_are_found_through_etcd_and_kept_while_it_is_away(masters, links, etcd: EtcdProcess) -> None:
    url = f"etcd://{etcd.address}/prod"
    a, source = links("a", url)
    b, _ = links("b", url)
    source.add(1)
    time.sleep(0.5)
    assert a.state == "unreachable", "nobody has registered yet"
    options = {"etcd": f"http://{etcd.address}", "cluster": "prod"}
    first = masters(**options)
    eventually(lambda: found(b, [1]) == ["a"])
    second = masters(**options)
    eventually(lambda: set(b.masters) == {first.address, second.address})
    eventually(lambda: all(m.state == "joined" for m in b.view.masters))
    first.kill()
    eventually(lambda: set(a.masters) == set(b.masters) == {second.address})
    assert found(b, [1]) == ["a"]
    etcd.kill()
    source.add(2)
    a.notify()
    eventually(lambda: found(b, [1, 2]) == ["a", "a"])
    time.sleep(2.5)
    assert found(b, [1, 2]) == ["a", "a"]
    etcd.start()
    third = masters(**options)
    eventually(lambda: third.address in a.masters)


@needs_etcd
def test_a_master_of_another_host_that_etcd_names_is_not_connected_to_without_a_key(links, etcd: EtcdProcess, caplog) -> None:
    import etcd3gw

    host, _, port = etcd.address.rpartition(":")
    client = etcd3gw.client(host=host, port=int(port))
    client.put("/hicache-mooncake/prod/masters/0/abc", "10.9.9.9:50051")
    a, _ = links("a", f"etcd://{etcd.address}/prod")
    eventually(lambda: any("10.9.9.9:50051" in r.getMessage() and "keygen" in r.getMessage() for r in caplog.records))
    assert a.masters == ()
