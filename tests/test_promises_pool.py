"""Promised pages in real nodes, with masters, disks and signals: what was promised comes, however fast the pool is filled."""

from __future__ import annotations

import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake.client.promised import LOOKUP_S
from hicache_mooncake.testing.local import FakeRank, page_hash
from tests.conftest import MasterProcess, NodeProcess, wait_until
from tests.test_drain import active, ended
from tests.test_pool_cluster import NS, found_everywhere, hashes, report_of

MIB = 1 << 20
PROMISE_S = 60.0
"""As long as may be: on a busy machine nothing here takes longer."""
StartRank = Callable[..., FakeRank]
StartNode = Callable[..., NodeProcess]
StartMaster = Callable[[], MasterProcess]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup may take as long as a load: a machine may have much else to do."""
    monkeypatch.setattr("hicache_mooncake.client.client.LOOKUP_S", 7.5)


@pytest.fixture
def start_rank() -> Iterator[StartRank]:
    started: list[FakeRank] = []

    def start(node: NodeProcess, promise_s: float = 0.0, **options: object) -> FakeRank:
        started.append(FakeRank(node.settings(**{"promise_s": promise_s, "deadline_s": 7.5} | options)))
        return started[-1]

    yield start
    for rank in started:
        rank.close()


def fill(rank: FakeRank, name: str, mib: int) -> None:
    """So many new pages, as fast as they can be stored."""
    for number in range(mib * MIB // rank.page_bytes // 16):
        stored(rank, [page_hash((name, number, i)) for i in range(16)])


def stored(rank: FakeRank, pages: list[bytes]) -> None:
    wait_until(lambda: rank.store(NS, pages).ok == b"\x01" * len(pages), 60, "all of them are stored")


def all_come(rank: FakeRank, pages: list[bytes]) -> None:
    for at in range(0, len(pages), 16):
        outcome = rank.load(NS, pages[at : at + 16])
        assert outcome.ok == b"\x01" * len(pages[at : at + 16]), outcome.reasons
    assert not rank.client.broken


def test_promised_pages_come_though_the_pool_was_filled_many_times(start_node: StartNode, start_rank: StartRank) -> None:
    node = start_node("a", "32MiB", (), ("--metrics", "127.0.0.1:0"))
    decode, other = start_rank(node, PROMISE_S), start_rank(node)
    promised, unpromised = hashes(*range(32)), hashes(*range(100, 116))
    other.store(NS, promised[:16])
    other.store(NS, promised[16:])
    other.store(NS, unpromised)
    assert decode.exists(NS, promised) == 32
    assert other.exists(NS, unpromised) == 16
    fill(other, "more", 128)
    assert other.exists(NS, unpromised) == 0
    assert report_of(decode)["promised_bytes"] == 32 * decode.page_bytes
    all_come(decode, promised)
    wait_until(lambda: report_of(decode)["promised"] == 0, 30, "what is loaded is kept no longer")
    fill(other, "again", 64)
    assert other.exists(NS, promised) == 0
    figures = report_of(decode)
    assert (figures["promises_loaded"], figures["promises_dropped"], figures["promises_lost"]) == (32, 0, 0)


def test_a_broken_promise_is_counted_with_its_reason(start_node: StartNode, start_rank: StartRank) -> None:
    """More is promised than may be kept: the oldest is dropped, and that shows on the rank and on the node."""
    node = start_node("a", "32MiB", (), ("--metrics", "127.0.0.1:0", "--promise-share", "0.0625"))
    decode, other = start_rank(node, PROMISE_S), start_rank(node)
    first, second = hashes(*range(16)), [page_hash((i, j)) for i in range(2) for j in range(16)]
    other.store(NS, first)
    other.store(NS, second[:16])
    other.store(NS, second[16:])
    assert decode.exists(NS, first) == 16
    assert decode.exists(NS, second) == 32
    fill(other, "more", 64)
    outcome = decode.load(NS, first)
    assert outcome.ok == bytes(16)
    assert decode.client.broken == {"evicted": 16}
    all_reported = lambda: report_of(decode).get("broken promise: evicted") == 16  # noqa: E731
    wait_until(lambda: (decode.load(NS, hashes("nothing")), all_reported())[1], 30, "the node hears of it")
    assert decode.client.broken == {"evicted": 16}, "what was never promised breaks nothing"
    with urllib.request.urlopen(f"http://{report_of(decode)['metrics']}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert 'hicache_node_broken_promises_total{reason="evicted"} 16.0' in lines
    assert "hicache_node_promises_dropped_total 16.0" in lines
    for at in (0, 16):
        assert decode.load(NS, second[at : at + 16]).ok == b"\x01" * 16


def test_the_holder_on_another_host_keeps_what_was_promised(
    start_master: StartMaster, start_node: StartNode, start_rank: StartRank
) -> None:
    """It hears of it from the master, without a question, and lets it go when it has been read."""
    master = start_master()
    options = ("--replicate-after", "0", "--no-spill")
    holder, near = (start_node(name, "32MiB", (master.address,), options) for name in ("a", "b"))
    writer, decode = start_rank(holder), start_rank(near, PROMISE_S)
    active(decode, 2)
    pages = hashes(*range(16))
    writer.store(NS, pages)
    found_everywhere(decode, pages, 16)
    wait_until(lambda: report_of(writer)["promised"] == 16, 30, "the holder heard of it")
    fill(writer, "more", 128)
    assert decode.exists(NS, pages) == 16
    outcome = decode.load(NS, pages)
    assert outcome.ok == b"\x01" * 16, outcome.reasons
    assert outcome.remote_bytes == 16 * decode.page_bytes
    assert not decode.client.broken


def test_what_lies_on_the_disk_stays_there_as_long(start_node: StartNode, start_rank: StartRank, tmp_path: Path) -> None:
    cold = ("--cold", str(tmp_path / "cold"), "--cold-bytes", "64MiB", "--cold-floor", "0", "--eviction", "lru")
    node = start_node("a", "16MiB", (), cold)
    decode, other = start_rank(node, PROMISE_S), start_rank(node)
    pages, others = hashes(*range(16)), hashes(*range(100, 116))
    stored(other, pages)
    stored(other, others)
    total = 2

    def churn(name: object, mib: int) -> None:
        """So many pages come to the disk, and none leaves DRAM before it is there."""
        nonlocal total
        for number in range(mib):
            stored(other, [page_hash((name, number, i)) for i in range(16)])
            total += 1
            due = (total - 14) * MIB
            wait_until(lambda: int(report_of(other)["cold_written_bytes"]) >= due, 60, "the disk keeps up")  # noqa: B023
            wait_until(lambda: int(report_of(other)["used_bytes"]) <= 0.95 * 16 * MIB, 60, "room again")

    churn("first", 20)
    assert report_of(decode)["promised"] == 0
    assert decode.exists(NS, pages) == other.exists(NS, others) == 16
    assert report_of(decode)["promised"] == 0, "none of them was in DRAM"
    churn("second", 90)
    assert report_of(decode)["cold_promises_broken"] == 0
    all_come(decode, pages)


def test_a_node_that_ends_hands_promised_pages_over_first(
    start_master: StartMaster, start_node: StartNode, start_rank: StartRank
) -> None:
    """They are its coldest, and the other node has room for a part only."""
    master = start_master()
    options = ("--replicate-after", "0", "--no-spill")
    holder = start_node("a", "64MiB", (master.address,), options)
    near = start_node("b", "8MiB", (master.address,), options)
    writer, decode = start_rank(holder), start_rank(near, PROMISE_S)
    active(decode, 2)
    pages = hashes(*range(16))
    writer.store(NS, pages)
    found_everywhere(decode, pages, 16)
    wait_until(lambda: report_of(writer)["promised"] == 16, 30, "the holder heard of it")
    fill(writer, "hotter", 48)
    assert report_of(writer)["promised"] == 16
    holder.signal(signal.SIGTERM)
    ended(holder, 30)
    all_come(decode, pages)


def test_what_is_cleared_is_cleared_though_somebody_counts_on_it(start_node: StartNode, start_rank: StartRank) -> None:
    node = start_node("a", "32MiB")
    decode = start_rank(node, PROMISE_S)
    pages = hashes(*range(16))
    decode.store(NS, pages)
    assert decode.exists(NS, pages) == 16
    assert decode.client.clear(NS) == 16
    assert decode.load(NS, pages).ok == bytes(16)
    wait_until(lambda: report_of(decode)["used_bytes"] == 0, 30, "its memory is free")


def test_an_engine_that_is_gone_counts_on_nothing(start_node: StartNode, start_rank: StartRank) -> None:
    node = start_node("a", "32MiB")
    other, decode = start_rank(node), FakeRank(node.settings(promise_s=PROMISE_S))
    pages = hashes(*range(16))
    decode.store(NS, pages)
    assert decode.exists(NS, pages) == 16
    assert report_of(other)["promised"] == 16
    decode.close()
    wait_until(lambda: report_of(other)["promised"] == 0, 30, "its connection has ended")


def test_a_node_that_hangs_costs_a_decode_server_s_scheduler_half_a_second_once(
    start_node: StartNode, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup is made on the scheduler's thread. It never raises, and after the first the node is asked beside the calls."""
    node = start_node("a", "32MiB")
    decode = start_rank(node, 5.0)
    pages = hashes(*range(4))
    decode.store(NS, pages)
    assert decode.exists(NS, pages) == 4
    monkeypatch.setattr("hicache_mooncake.client.client.LOOKUP_S", LOOKUP_S)
    node.signal(signal.SIGSTOP)
    started = time.monotonic()
    assert [decode.exists(NS, pages) for _ in range(50)] == [0] * 50
    assert time.monotonic() - started < LOOKUP_S + 5.0, "and not 50 times 7.5 s, nor once"
    assert decode.client.reasons["node_timeout"] == 4 * 50
    node.signal(signal.SIGCONT)
    wait_until(lambda: decode.exists(NS, pages) == 4, 60, "it is found again")
