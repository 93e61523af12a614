"""A node that is told to end: real processes, signals, readers that go on reading."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from hicache_mooncake.testing.local import FakeRank
from tests.conftest import MasterProcess, NodeProcess, wait_until
from tests.test_pool_cluster import NS, found_everywhere, hashes, report_of

StartRank = Callable[..., FakeRank]
StartNode = Callable[..., NodeProcess]
StartMaster = Callable[[], MasterProcess]


@pytest.fixture
def start_rank() -> Iterator[StartRank]:
    started: list[FakeRank] = []

    def start(node: NodeProcess) -> FakeRank:
        started.append(FakeRank(node.settings()))
        return started[-1]

    yield start
    for rank in started:
        rank.close()


def active(rank: FakeRank, count: int) -> None:
    def are() -> bool:
        report = rank.client.status()
        return report is not None and len([n for n in report.cluster if n.state == "active"]) == count

    wait_until(are, 20, f"{count} nodes active")


def ended(node: NodeProcess, within_s: float) -> None:
    assert node.process is not None
    assert node.process.wait(within_s) == 0


def test_a_node_that_ends_under_load_costs_its_readers_nothing(
    start_master: StartMaster, start_node: StartNode, start_rank: StartRank
) -> None:
    """SIGTERM while another host reads all the time: no read fails, every byte is right, and what only this node had is found
    afterwards."""
    master = start_master()
    node_a = start_node("a", "64MiB", (master.address,), ("--replicate-after", "0"))
    node_b = start_node("b", "64MiB", (master.address,), ("--replicate-after", "0"))
    a, b = start_rank(node_a), start_rank(node_b)
    active(b, 2)
    pages = hashes(*range(16))
    assert a.store(NS, pages).ok == b"\x01" * 16
    found_everywhere(b, pages, 16)
    reasons: Counter[str] = Counter()
    loads = [0, 0]
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            outcome = b.load(NS, pages)
            reasons.update(outcome.reasons)
            loads[0] += 1
            loads[1] += outcome.ok == b"\x01" * 16

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: loads[0] > 3, 20)
        node_a.signal(signal.SIGTERM)
        ended(node_a, 20)
        before = loads[0]
        wait_until(lambda: loads[0] > before + 3, 20)
    finally:
        stop.set()
        reader.join()
    assert not reasons
    assert loads[0] == loads[1]
    assert b.load(NS, pages).remote_bytes == 0
    assert report_of(b)["taken"] == 16
    assert node_a.log is not None
    assert "handed 16 pages" in node_a.log.read_text()


def test_while_it_drains_a_node_stores_nothing_new_serves_reads_and_says_so(
    start_master: StartMaster, start_node: StartNode, start_rank: StartRank
) -> None:
    """The other node is frozen, so that the end takes its time; a second signal ends it at once."""
    master = start_master()
    node_a = start_node("a", "64MiB", (master.address,), ("--metrics", "127.0.0.1:0", "--drain-s", "60"))
    node_b = start_node("b", "64MiB", (master.address,))
    a = start_rank(node_a)
    active(a, 2)
    pages = hashes(*range(8))
    a.store(NS, pages)
    metrics = report_of(a)["metrics"]
    node_b.signal(signal.SIGSTOP)
    node_a.signal(signal.SIGTERM)

    def health() -> dict[str, object]:
        with urllib.request.urlopen(f"http://{metrics}/health", timeout=5) as answer:
            said: dict[str, object] = json.load(answer)
            return said

    wait_until(lambda: health()["status"] == "draining", 30)
    assert a.load(NS, pages).ok == b"\x01" * 8
    outcome = a.store(NS, hashes("new"))
    assert outcome.ok == b"\x00"
    assert outcome.reasons == {"no_room": 1}
    assert node_a.process is not None
    assert node_a.process.poll() is None
    node_a.signal(signal.SIGTERM)
    ended(node_a, 20)
    node_b.signal(signal.SIGCONT)


def test_an_end_is_bounded_though_nobody_takes_anything(
    start_master: StartMaster, start_node: StartNode, start_rank: StartRank
) -> None:
    master = start_master()
    node_a = start_node("a", "64MiB", (master.address,), ("--drain-s", "2"))
    node_b = start_node("b", "64MiB", (master.address,))
    a = start_rank(node_a)
    active(a, 2)
    a.store(NS, hashes(*range(8)))
    node_b.signal(signal.SIGSTOP)
    node_a.signal(signal.SIGTERM)
    ended(node_a, 20)
    node_b.signal(signal.SIGCONT)


@pytest.mark.parametrize("drain_s", ["0", "60"])
def test_a_node_without_others_or_without_grace_just_ends(
    start_master: StartMaster, start_node: StartNode, start_rank: StartRank, drain_s: str
) -> None:
    master = start_master()
    nodes = [start_node("a", "16MiB", (master.address,), ("--drain-s", drain_s))]
    if drain_s == "0":
        nodes.append(start_node("b", "16MiB", (master.address,)))
    rank = start_rank(nodes[0])
    active(rank, len(nodes))
    rank.store(NS, hashes(*range(8)))
    nodes[0].signal(signal.SIGTERM)
    ended(nodes[0], 20)


def test_a_full_neighbour_is_not_made_to_forget_its_own(
    start_master: StartMaster, start_node: StartNode, start_rank: StartRank
) -> None:
    master = start_master()
    node_a, node_b = (start_node(name, "4MiB", (master.address,), ("--no-spill",)) for name in ("a", "b"))
    a, b = start_rank(node_a), start_rank(node_b)
    active(a, 2)
    own, theirs = hashes(*range(16)), [page for i in range(4) for page in hashes(*((i, k) for k in range(14)))]
    a.store(NS, own)
    for first in range(0, 56, 14):
        b.store(NS, theirs[first : first + 14])
    node_a.signal(signal.SIGTERM)
    ended(node_a, 20)
    for first in range(0, 56, 14):
        assert b.load(NS, theirs[first : first + 14]).ok == b"\x01" * 14
