"""One real node, real movers, a rank without an engine: every byte compared on every read."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.client.mover_process import MoverUnavailable
from hicache_mooncake.client.node_link import NodeLink, NodeUnavailable
from hicache_mooncake.config import load_settings
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.testing.local import FakeRank, page_hash, pattern
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.wire import Wire, WireClosed, WireTimeout, connect
from tests.conftest import NodeProcess, environment, wait_until

NS = b"n" * 16
StartNode = Callable[..., NodeProcess]


def hashes(*names: object) -> list[bytes]:
    return [page_hash(name) for name in names]


@pytest.fixture
def make_rank() -> Iterator[Callable[..., FakeRank]]:
    ranks: list[FakeRank] = []

    def make(
        at: NodeProcess, *, memfd: bool = True, pages: int = 16, page_bytes: int = 64 << 10, **settings: object
    ) -> FakeRank:
        rank = FakeRank(at.settings(**settings), pages=pages, page_bytes=page_bytes, memfd=memfd)
        ranks.append(rank)
        return rank

    yield make
    for rank in ranks:
        rank.close()


class Admin:
    """The segment as only a store mover sees it: for putting faults into it."""

    def __init__(self, node: NodeProcess) -> None:
        self.wire = connect(node.socket, 2.0)
        self.wire.send(p.Hello(1, 1, "store", "test"))
        welcome = self.ask(None)
        assert isinstance(welcome, p.Welcome)
        (fd,) = self.wire.take_fds()
        self.segment = Mapping(fd, welcome.segment_bytes, writable=True)
        os.close(fd)

    def ask(self, message: p.Message | None) -> p.Message:
        if message is not None:
            self.wire.send(message)
        answer: p.Message = self.wire.receive(p.decoder(p.FromNode), time.monotonic() + 5)
        return answer

    def damage(self, namespace: bytes, page: bytes, length: int, at: int = 0) -> None:
        """Flip one byte of a stored object behind everybody's back."""
        located = self.ask(p.Locate(namespace, page, length))
        assert isinstance(located, p.Located)
        assert list(located.status) == [p.LOCAL]
        self.segment.view[located.where[0] + at] ^= 0xFF
        self.wire.send(p.Release(located.pin))

    def close(self) -> None:
        self.wire.close()
        self.segment.close()


@pytest.fixture(params=["memfd", "process_vm", "segment"])
def copy_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --------------------------------------------------------------------------- the three ways to the engine's memory


def test_pages_come_back_whole_each_way(start_node: StartNode, make_rank: Callable[..., FakeRank], copy_mode: str) -> None:
    rank = make_rank(start_node(), memfd=copy_mode == "memfd", copy_mode=copy_mode)
    assert rank.mode == copy_mode
    pages = hashes(*range(12))
    assert rank.exists(NS, pages) == 0
    stored = rank.store(NS, pages)
    assert stored.ok == b"\x01" * 12, stored.reasons
    assert rank.exists(NS, pages) == 12
    loaded = rank.load(NS, pages)
    assert loaded.ok == b"\x01" * 12, loaded.reasons
    assert loaded.local_bytes == 12 * rank.page_bytes


@pytest.mark.parametrize("page_bytes", [2, 4096, 4098, (256 << 10) + 6, (1 << 20) + 4098])
def test_odd_sizes_come_back_whole(
    start_node: StartNode, make_rank: Callable[..., FakeRank], copy_mode: str, page_bytes: int
) -> None:
    rank = make_rank(start_node(), memfd=copy_mode == "memfd", copy_mode=copy_mode, page_bytes=page_bytes, pages=8)
    pages = hashes("a", "b", "c")
    assert rank.store(NS, pages).ok == b"\x01" * 3
    assert rank.load(NS, pages).ok == b"\x01" * 3


def test_the_way_is_chosen_by_what_the_pool_is(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    node = start_node()
    assert make_rank(node, memfd=True).mode == "memfd"
    assert make_rank(node, memfd=False).mode == "process_vm"


def test_a_forced_way_that_cannot_work_is_refused_with_what_to_do(start_node: StartNode) -> None:
    node = start_node()
    with pytest.raises(MoverUnavailable, match='"allocator": "shm"'):
        FakeRank(node.settings(copy_mode="memfd"), memfd=False)


def test_a_batch_larger_than_the_copy_buffer_goes_in_rounds(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    rank = make_rank(start_node(dram="400MiB"), copy_mode="segment", page_bytes=10 << 20, pages=16, deadline_s=7.0)
    pages = hashes(*range(16))
    assert rank.store(NS, pages).ok == b"\x01" * 16
    assert rank.load(NS, pages).ok == b"\x01" * 16


# --------------------------------------------------------------------------- verified reads


def test_damaged_memory_is_a_miss_on_every_read_path(
    start_node: StartNode, make_rank: Callable[..., FakeRank], copy_mode: str
) -> None:
    """P15 P28 P164: the checksum is taken of the bytes that arrived; the bad object is dropped and counted."""
    node = start_node()
    rank = make_rank(node, memfd=copy_mode == "memfd", copy_mode=copy_mode)
    pages = hashes("a", "b", "c")
    rank.store(NS, pages)
    admin = Admin(node)
    admin.damage(NS, pages[1], rank.page_bytes, at=rank.page_bytes - 1)
    outcome = rank.load(NS, pages)
    assert outcome.ok == b"\x01\x00\x01"
    assert outcome.reasons == {"checksum": 1}
    wait_until(lambda: rank.exists(NS, pages) == 1, 30)
    report = rank.client.status()
    assert report is not None
    assert report.node["discarded"] == 1
    assert rank.store(NS, pages).ok == b"\x01" * 3, "and can be stored again"
    assert rank.load(NS, pages).ok == b"\x01" * 3
    admin.close()


def test_the_suite_notices_a_wrong_page(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """P28, mutation check: were a page with wrong bytes ever reported as loaded, `load` itself would fail the test."""
    rank = make_rank(start_node())
    pages = hashes("a", "b")
    rank.store(NS, pages, generation=1)
    with pytest.raises(AssertionError, match="wrong bytes"):
        rank.load(NS, pages, generation=2)


def test_a_page_of_another_size_under_the_same_key_is_refused(
    start_node: StartNode, make_rank: Callable[..., FakeRank]
) -> None:
    """P02: forced onto one key, half a page is never a page."""
    node = start_node()
    bf16, fp8 = make_rank(node, page_bytes=64 << 10), make_rank(node, page_bytes=32 << 10)
    pages = hashes("a")
    bf16.store(NS, pages)
    outcome = fp8.load(NS, pages)
    assert outcome.ok == b"\x00"
    assert outcome.reasons == {"wrong_length": 1}
    assert fp8.read(0) == b"\xaa" * fp8.page_bytes, "nothing was written over the page"


def test_every_miss_has_its_own_reason(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """P35: absent, wrong length, damaged, no room, node gone: five names, and absence is not an error line."""
    node = start_node(dram="1MiB")
    rank = make_rank(node, page_bytes=64 << 10)
    assert rank.load(NS, hashes("absent")).reasons == {"absent": 1}
    big = make_rank(node, page_bytes=2 << 20, pages=2)
    assert big.store(NS, hashes("big")).reasons == {"no_room": 1}
    rank.store(NS, hashes("a"))
    node.kill()
    assert rank.load(NS, hashes("a")).reasons == {"node_down": 1}
    off = make_rank(node, node="off")
    assert off.load(NS, hashes("a")).reasons == {"off": 1}
    assert rank.exists(NS, []) == 0
    assert rank.load(NS, []).ok == b""


def test_an_unknown_page_leaves_the_host_page_untouched(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    rank = make_rank(start_node())
    rank.store(NS, hashes("a", "c"))
    outcome = rank.load(NS, hashes("a", "b", "c"))
    assert outcome.ok[:2] == b"\x01\x00"
    assert rank.read(1) == b"\xaa" * rank.page_bytes


def test_addresses_outside_the_shared_memory_are_refused(
    start_node: StartNode, make_rank: Callable[..., FakeRank], copy_mode: str
) -> None:
    if copy_mode == "segment":
        pytest.skip("the copy is made in the engine, by SGLang's own addresses")
    rank = make_rank(start_node(), memfd=copy_mode == "memfd", copy_mode=copy_mode)
    for op in ("store", "load"):
        for place in (10_000, -1_000, rank.pages - 1):  # beyond, before, and over the end of the second half
            runs = [rank.runs[0], p.Run(rank.runs[1].address + 8, rank.half, rank.half)]
            blob = b"".join(hashes("a", (op, place)))
            outcome = rank.client.transfer(op, Body(NS, tuple(runs)), blob, array("q", [0, place]))
            assert outcome.ok == (b"\x01\x00"), (op, place)
            if op == "store":
                assert outcome.reasons == {"engine_memory": 1}
                assert rank.exists(NS, hashes((op, place))) == 0


# --------------------------------------------------------------------------- deadlines and fences


def test_a_frozen_mover_is_fenced_and_nothing_lands_after_the_call(
    start_node: StartNode, make_rank: Callable[..., FakeRank]
) -> None:
    """P08 P18: the mover is stopped in mid-copy. The call returns in time, the process is gone, the memory stays as it is."""
    rank = make_rank(start_node(dram="600MiB"), page_bytes=16 << 20, pages=16, deadline_s=1.0)
    pages = hashes(*range(16))
    assert rank.store(NS, pages).ok == b"\x01" * 16
    pid = rank.client.mover_pids()["load"]
    assert pid is not None
    stopped = threading.Event()

    def stop_in_mid_copy() -> None:
        while bytes(rank.memory.view[:4]) == b"\xaa" * 4:
            pass
        os.kill(pid, signal.SIGSTOP)
        stopped.set()

    rank.scramble()
    watcher = threading.Thread(target=stop_in_mid_copy, daemon=True)
    watcher.start()
    started = time.monotonic()
    outcome = rank.transfer("load", NS, pages)
    took = time.monotonic() - started
    assert stopped.wait(5)
    assert outcome.ok == bytes(16)
    assert outcome.reasons == {"fenced": 16}
    assert took < 1.5, "the call ends within its deadline of 1 s, with some allowance for a busy machine"
    assert exiting(pid), "it may still be unmapping, but it writes no more"
    before = bytes(rank.memory.view[::4096])
    time.sleep(0.3)
    assert bytes(rank.memory.view[::4096]) == before
    wait_until(lambda: rank.load(NS, pages).ok == b"\x01" * 16, 30, "a new mover")


def test_a_frozen_store_leaves_nothing_visible_and_no_memory_behind(
    start_node: StartNode, make_rank: Callable[..., FakeRank]
) -> None:
    """P12: what the caller was told has failed is not found later, half written or whole."""
    rank = make_rank(start_node(dram="600MiB"), page_bytes=16 << 20, pages=16, deadline_s=1.0)
    pages = hashes(*range(16))
    rank.store(NS, hashes("warm"))
    pid = rank.client.mover_pids()["store"]
    assert pid is not None

    def used() -> int:
        report = rank.client.status()
        return int(report.node["used_bytes"]) if report is not None else 0

    reserved = threading.Event()

    def stop_after_reserve() -> None:
        while used() <= rank.page_bytes:
            pass
        os.kill(pid, signal.SIGSTOP)
        reserved.set()

    threading.Thread(target=stop_after_reserve, daemon=True).start()
    outcome = rank.transfer("store", NS, pages)
    assert reserved.wait(5)
    assert outcome.ok == bytes(16)
    assert rank.exists(NS, pages) == 0
    wait_until(lambda: used() == rank.page_bytes, 5, "the reservation is given back")
    wait_until(lambda: rank.store(NS, pages).ok == b"\x01" * 16, 30)


def test_a_frozen_node_costs_one_deadline_and_comes_back_intact(
    start_node: StartNode, make_rank: Callable[..., FakeRank]
) -> None:
    node = start_node()
    rank = make_rank(node, deadline_s=0.5)
    pages = hashes(*range(4))
    rank.store(NS, pages)
    node.signal(signal.SIGSTOP)
    calls = (lambda: rank.exists(NS, pages), lambda: rank.load(NS, pages), lambda: rank.store(NS, hashes("x")))
    for call in calls:
        started = time.monotonic()
        call()
        assert time.monotonic() - started < 1.0
        started = time.monotonic()
        call()
        assert time.monotonic() - started < 0.2, "asked again at once, a frozen node costs nothing"
    node.signal(signal.SIGCONT)
    wait_until(lambda: rank.exists(NS, pages) == 4, 30)
    wait_until(lambda: rank.load(NS, pages).ok == b"\x01" * 4, 30)


def test_a_killed_node_is_misses_and_heals_without_the_engine(
    start_node: StartNode, make_rank: Callable[..., FakeRank]
) -> None:
    node = start_node()
    rank = make_rank(node)
    pages = hashes(*range(4))
    rank.store(NS, pages)
    assert rank.exists(NS, pages) == 4
    node.kill()
    assert rank.load(NS, pages).ok == bytes(4)
    assert rank.exists(NS, pages) == 0
    assert rank.store(NS, pages).ok == bytes(4)
    node.start()
    wait_until(lambda: rank.store(NS, pages).ok == b"\x01" * 4, 30, "store after restart")
    wait_until(lambda: rank.exists(NS, pages) == 4, 30, "lookup after restart")
    assert rank.load(NS, pages).ok == b"\x01" * 4


def test_without_any_node_everything_is_a_quick_miss(tmp_path: Path) -> None:
    node = NodeProcess(str(tmp_path / "none.sock"), "1MiB")
    rank = FakeRank(node.settings())
    started = time.monotonic()
    for _ in range(20):
        assert rank.exists(NS, hashes("a")) == 0
        assert rank.load(NS, hashes("a")).ok == b"\x00"
        assert rank.store(NS, hashes("a")).ok == b"\x00"
    assert time.monotonic() - started < 5
    rank.close()


def test_an_engine_that_dies_in_mid_store_leaves_no_half_page_and_no_memory(start_node: StartNode) -> None:
    """P90 P132: the writer's connection ends after Reserve; what it had reserved is free, other clients are untouched."""
    node = start_node(dram="1MiB")
    rank = FakeRank(node.settings(), page_bytes=64 << 10, pages=16)
    rank.store(NS, hashes("mine"))
    admin = Admin(node)
    reserved = admin.ask(p.Reserve(NS, b"".join(hashes(*range(8))), 64 << 10))
    assert isinstance(reserved, p.Reserved)
    assert reserved.status.count(p.WRITE) == 8
    admin.close()

    def used() -> object:
        report = rank.client.status()
        return report is not None and report.node["used_bytes"]

    wait_until(lambda: used() == 64 << 10, 5)
    assert rank.exists(NS, hashes(0)) == 0
    assert rank.load(NS, hashes("mine")).ok == b"\x01"
    rank.close()


# --------------------------------------------------------------------------- several clients, bounds, leaks


def test_a_second_cold_rank_finds_what_the_first_wrote(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """P44."""
    node = start_node()
    first, second = make_rank(node), make_rank(node)
    pages = hashes(*range(8))
    first.store(NS, pages)
    assert second.exists(NS, pages) == 8
    assert second.load(NS, pages).ok == b"\x01" * 8


def test_a_page_that_is_found_is_whole_at_once(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """P12 P25: one rank stores, another asks without pause; the moment a page is found, its bytes are right."""
    node = start_node()
    writer, reader = make_rank(node, page_bytes=1 << 20, deadline_s=7.0), make_rank(node, page_bytes=1 << 20, deadline_s=7.0)
    batches = [hashes(*((batch, i) for i in range(16))) for batch in range(8)]
    done = threading.Event()

    def write() -> None:
        for pages in batches:
            writer.store(NS, pages)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    while not done.is_set() or seen == 0:
        for pages in batches:
            found = reader.exists(NS, pages)
            if found:
                assert reader.load(NS, pages[:found]).ok == b"\x01" * found
                seen += found
    thread.join()
    assert all(reader.load(NS, pages).ok == b"\x01" * 16 for pages in batches)


def test_a_node_prints_the_configuration_it_runs_with(start_node: StartNode) -> None:
    """P116."""
    node = start_node(dram="8MiB", extra=("--high-watermark", "0.8", "--low-watermark", "0.7"))
    assert node.log is not None
    text = node.log.read_text()
    assert "dram_bytes=8388608 (--dram)" in text
    assert "high_watermark=0.8" in text
    command = [sys.executable, "-m", "hicache_mooncake.cli", "node", "--high-watermark", "0.5", "--low-watermark", "0.9"]
    refused = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30, check=False)
    assert refused.returncode != 0
    assert "watermark" in refused.stderr


def test_clear_is_for_its_own_namespace(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """P126."""
    rank = make_rank(start_node())
    other = b"o" * 16
    rank.store(NS, hashes("a", "b"))
    rank.store(other, hashes("a"))
    assert rank.client.clear(NS) == 2
    assert rank.exists(NS, hashes("a")) == 0
    assert rank.load(other, hashes("a")).ok == b"\x01"


def test_a_full_segment_evicts_and_keeps_serving(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    node = start_node(dram="8MiB")
    rank = make_rank(node, page_bytes=64 << 10)
    for round_ in range(20):
        pages = hashes(*((round_, i) for i in range(16)))
        assert rank.store(NS, pages).ok == b"\x01" * 16
        assert rank.load(NS, pages).ok == b"\x01" * 16
    report = rank.client.status()
    assert report is not None
    assert int(report.node["used_bytes"]) <= 8 << 20
    assert int(report.node["evicted"]) >= 20 * 16 - 128
    assert int(report.node["evicted"]) >= 10 * 16 - 32


def test_repeated_stores_copy_nothing(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    rank = make_rank(start_node())
    pages = hashes(*range(4))
    rank.store(NS, pages)
    again = rank.store(NS, pages)
    assert (again.ok, again.had, again.local_bytes) == (b"\x01" * 4, 4, 0)


def test_many_threads_share_one_client(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    rank = make_rank(start_node(), deadline_s=7.0)
    problems: list[str] = []
    rank.store(NS, hashes("base"))

    def work(thread: int) -> None:
        for i in range(30):
            if rank.exists(NS, hashes("base")) != 1:
                problems.append(f"lookup {thread} {i}")
            page = thread % 16
            if rank.transfer("store", NS, hashes(("t", thread, i)), pages=[page]).ok != b"\x01":
                problems.append(f"store {thread} {i}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_descriptors_and_memory_stay_flat(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """P83 P87: thousands of batches, some fenced and reconnected; descriptors and resident memory do not grow."""
    node = start_node(dram="4MiB")
    rank = make_rank(node, page_bytes=16 << 10)
    assert node.process is not None
    movers = [pid for pid in rank.client.mover_pids().values() if pid is not None]
    pids = [os.getpid(), node.process.pid, *movers]

    def descriptors() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    def resident() -> list[int]:
        # Private memory only: pages of shared segments count when they are first touched.
        return [int(line.split()[1]) for pid in pids for line in open(f"/proc/{pid}/status") if line.startswith("RssAnon")]

    def rounds(count: int, tag: str) -> None:
        for i in range(count):
            pages = hashes(*((tag, i, k) for k in range(8)))
            assert rank.store(NS, pages[:2]).ok == b"\x01\x01"
            rank.transfer("load", NS, pages[:2])
            rank.exists(NS, pages)

    def fence() -> None:
        """A mover that is killed and started again, and connections that come and go."""
        for role in ("load", "store"):
            pid = rank.client.mover_pids()[role]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda role=role: rank.transfer(role, NS, hashes("fence")).ok == b"\x01", 30)  # type: ignore[misc]
        pids[2:] = [pid for pid in rank.client.mover_pids().values() if pid is not None]

    rank.store(NS, hashes("fence"))
    fence()
    rounds(200, "warm")
    before_fds, before_rss = descriptors(), resident()
    rounds(750, "run")
    rank.store(NS, hashes("fence"))
    fence()
    rounds(750, "run again")
    assert descriptors() == before_fds
    grown = [after - before for before, after in zip(before_rss, resident(), strict=True)]
    assert all(kib < 4096 for kib in grown), f"grown by {grown} KiB"


def test_killing_one_of_three_clients_touches_only_its_own(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """P90."""
    node = start_node()
    ranks = [make_rank(node) for _ in range(3)]
    for n, rank in enumerate(ranks):
        rank.store(NS, hashes(("r", n)))
    for pid in ranks[0].client.mover_pids().values():
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    for rank in ranks[1:]:
        for n in range(3):
            assert rank.load(NS, hashes(("r", n))).ok == b"\x01"
    wait_until(lambda: ranks[0].load(NS, hashes(("r", 0))).ok == b"\x01", 30)


def test_leftovers_of_a_killed_node_are_swept_at_the_next_start(start_node: StartNode) -> None:
    node = start_node()
    node.kill()
    assert os.path.exists(node.socket), "kill -9 leaves the socket behind"
    node.start()
    rank = FakeRank(node.settings())
    assert rank.store(NS, hashes("a")).ok == b"\x01"
    rank.close()


def test_a_second_node_on_one_socket_is_refused(start_node: StartNode) -> None:
    node = start_node()
    command = [sys.executable, "-m", "hicache_mooncake.cli", "node", "--socket", node.socket, "--dram", "1MiB"]
    twin = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30, check=False)
    assert twin.returncode == 1
    assert "another node serves this socket" in twin.stderr
    rank = FakeRank(node.settings())
    assert rank.store(NS, hashes("a")).ok == b"\x01", "the first one still serves"
    rank.close()


def test_only_the_owner_can_reach_socket_and_files(start_node: StartNode) -> None:
    """P168."""
    node = start_node()
    assert stat.S_IMODE(os.stat(node.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(node.socket + ".lock").st_mode) == 0o600
    assert node.process is not None
    segments = [
        os.stat(f"/proc/{node.process.pid}/fd/{fd}").st_mode
        for fd in os.listdir(f"/proc/{node.process.pid}/fd")
        if "memfd:hicache" in os.readlink(f"/proc/{node.process.pid}/fd/{fd}")
    ]
    assert segments
    assert all(stat.S_IMODE(mode) == 0o600 for mode in segments)


def test_another_protocol_version_is_refused_where_the_operator_looks(
    start_node: StartNode, caplog: pytest.LogCaptureFixture
) -> None:
    """P114: client log, node log and metric."""
    node = start_node()
    wire = connect(node.socket, 2.0)
    wire.send(p.Hello(99, 100, "query", "from-the-future"))
    answer = wire.receive(p.decoder(p.FromNode), time.monotonic() + 5)
    assert isinstance(answer, p.Refused)
    assert "99..100" in answer.reason
    assert "same hicache-mooncake release" in answer.reason
    rank = FakeRank(node.settings())
    report = rank.client.status()
    assert report is not None
    assert report.node["connections_refused"] == 1
    assert node.log is not None
    assert "from-the-future" in node.log.read_text()
    rank.close()


def test_garbage_on_the_socket_ends_that_connection_only(start_node: StartNode) -> None:
    node = start_node()
    rank = FakeRank(node.settings())
    rank.store(NS, hashes("a"))
    for garbage in (b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"GET / HTTP/1.0\r\n\r\n", b"\x01\x00\x00\x00\xc0"):
        wire = connect(node.socket, 2.0)
        wire._sock.sendall(garbage)
        wire._sock.settimeout(5)
        with contextlib.suppress(ConnectionError):
            while wire._sock.recv(1024):
                pass
        wire.close()
    for message in (p.Exists([NS], b"x" * 33), p.Reserve(NS, bytes(32), 0), p.Reserve(NS, bytes(32), -5)):
        other = connect(node.socket, 2.0)
        other.send(p.Hello(1, 1, "query", "odd"))
        other.receive(p.decoder(p.FromNode), time.monotonic() + 5)
        other.send(message)
        with pytest.raises(WireClosed):
            other.receive(p.decoder(p.FromNode), time.monotonic() + 5)
        other.close()
    assert rank.load(NS, hashes("a")).ok == b"\x01"
    rank.close()


def test_data_calls_log_nothing_per_key(
    start_node: StartNode, make_rank: Callable[..., FakeRank], caplog: pytest.LogCaptureFixture
) -> None:
    """P100."""
    node = start_node()
    rank = make_rank(node)
    assert node.log is not None
    with caplog.at_level(logging.INFO):
        rank.store(NS, hashes("first"))
        size = node.log.stat().st_size
        for i in range(50):
            rank.store(NS, hashes(*((i, k) for k in range(8))))
            rank.load(NS, hashes(*((i, k) for k in range(8))))
            rank.exists(NS, hashes("nothing", i))
    assert node.log.stat().st_size == size
    assert not [record for record in caplog.records if record.name.startswith("hicache_mooncake")]


def test_one_lookup_is_one_message(
    start_node: StartNode, make_rank: Callable[..., FakeRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P102: a thousand keys, one request and one answer."""
    rank = make_rank(start_node())
    rank.exists(NS, hashes("connect"))
    sent: list[p.Message] = []
    send = Wire.send

    def counting(self: Wire, message: p.Message, *args: object, **kwargs: object) -> None:
        sent.append(message)
        send(self, message, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Wire, "send", counting)
    rank.exists(NS, hashes(*range(1000)))
    rank.client.transfer("load", Body(NS, rank.runs), b"".join(hashes(*range(16))), array("q", range(16)))
    assert [type(message) for message in sent if not isinstance(message, p.Missed)] == [p.Exists, p.Transfer]


def test_a_busy_python_thread_does_not_stop_the_copies(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """P68 P98: beside a thread that never lets go of the interpreter, batches still complete (their rate is a benchmark's)."""
    rank = make_rank(start_node())
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        for i in range(10):
            pages = hashes(*((i, k) for k in range(16)))
            assert rank.store(NS, pages).ok == b"\x01" * 16
            assert rank.load(NS, pages).ok == b"\x01" * 16
    finally:
        stop.set()
        thread.join()


def test_nothing_moves_after_close(start_node: StartNode) -> None:
    rank = FakeRank(start_node().settings())
    rank.store(NS, hashes("a"))
    pids = rank.client.mover_pids()
    rank.client.close()
    for pid in pids.values():
        assert pid is not None
        assert exiting(pid)
    assert rank.transfer("load", NS, hashes("a")).ok == b"\x00"
    rank.close()


def test_movers_end_with_their_engine(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node()
    program = (
        "import os, sys, time\n"
        "from hicache_mooncake.config import load_settings\n"
        "from hicache_mooncake.testing.local import FakeRank\n"
        f"rank = FakeRank(load_settings({{}}, {{}}, {{'socket': {node.socket!r}, 'node': 'external'}})[0])\n"
        "print(*rank.client.mover_pids().values(), flush=True)\n"
        "time.sleep(60)\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE)
    assert engine.stdout is not None
    pids = [int(word) for word in engine.stdout.readline().split()]
    assert len(pids) == 2
    engine.kill()
    engine.wait()

    def gone(pid: int) -> bool:
        try:
            return open(f"/proc/{pid}/stat").read().split(")")[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(lambda: all(gone(pid) for pid in pids), 30, "movers end")


def test_a_store_shows_its_pattern_and_not_a_neighbours(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """Pages are stored and loaded into other places than they came from."""
    rank = make_rank(start_node())
    pages = hashes(*range(8))
    rank.store(NS, pages)
    rank.scramble()
    places = [5, 3, 15, 0, 9, 1, 12, 7]
    assert rank.transfer("load", NS, pages, pages=places).ok == b"\x01" * 8
    for page, place in zip(pages, places, strict=True):
        assert rank.read(place) == pattern(page, rank.page_bytes)


def test_clients_of_unknown_roles_get_no_segment(start_node: StartNode) -> None:
    wire = connect(start_node().socket, 2.0)
    wire.send(p.Hello(1, 1, "query", "q"))
    assert isinstance(wire.receive(p.decoder(p.FromNode), time.monotonic() + 5), p.Welcome)
    assert wire.take_fds() == []
    wire.close()


@pytest.mark.parametrize("whole", [True, False], ids=["with each message", "with one that never ends"])
def test_a_client_that_sends_descriptors_does_not_fill_the_node_with_them(start_node: StartNode, whole: bool) -> None:
    """They were kept as long as it was connected, until the node could not accept anybody any more."""
    node = start_node()
    assert node.process is not None
    held = f"/proc/{node.process.pid}/fd"
    before = len(os.listdir(held))
    wire = connect(node.socket, 30.0)
    wire.send(p.Hello(1, 1, "query", "q"))
    assert isinstance(wire.receive(p.decoder(p.FromNode), time.monotonic() + 30), p.Welcome)
    sock = socket.socket(fileno=os.dup(wire.fileno()))
    body = p.encode(p.Missed({}))
    data = len(body).to_bytes(4, "little") + body if whole else (1 << 20).to_bytes(4, "little")
    with sock, contextlib.suppress(ConnectionError):
        for _ in range(8):
            socket.send_fds(sock, [data], [0] * 200)
    with pytest.raises(WireClosed):
        wire.receive(p.decoder(p.FromNode), time.monotonic() + 30)
    wire.close()
    wait_until(lambda: len(os.listdir(held)) < before + 100, 30, "they are closed")


def test_client_without_movers_still_answers(start_node: StartNode) -> None:
    client = PoolClient(start_node().settings(), "bare")
    outcome = client.transfer("load", Body(NS, (p.Run(0, 0, 4096),)), page_hash("a"), array("q", [0]))
    assert outcome.ok == b"\x00"
    assert outcome.reasons == {"not_attached": 1}
    client.close()


# --------------------------------------------------------------------------- what a review found


def exiting(pid: int) -> bool:
    """Is every task of this process, which was killed, gone or in the kernel for good?"""
    from hicache_mooncake.client.mover_process import _cannot_write

    return _cannot_write(pid)


def test_an_interrupted_call_leaves_no_answer_for_the_next_one(
    start_node: StartNode, make_rank: Callable[..., FakeRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception between request and answer (Ctrl-C, no memory): the next batch must not get the last one's verdicts."""
    rank = make_rank(start_node())
    stored, unknown = hashes(*range(8)), hashes(*range(100, 108))
    rank.store(NS, stored)
    receive = Wire.receive

    def interrupted(self: Wire, *args: object, **kwargs: object) -> None:
        monkeypatch.setattr(Wire, "receive", receive)
        raise KeyboardInterrupt

    for call in (lambda: rank.transfer("load", NS, stored), lambda: rank.exists(NS, stored)):
        monkeypatch.setattr(Wire, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
        assert rank.exists(NS, unknown) == 0
        assert rank.transfer("load", NS, unknown).ok == bytes(8)
    wait_until(lambda: rank.load(NS, stored).ok == b"\x01" * 8, 30)
    wait_until(lambda: rank.exists(NS, stored) == 8, 30)


def test_a_pool_that_is_registered_anew_replaces_its_former_self(start_node: StartNode) -> None:
    """The kernel may give a new pool the old one's address: pages must land in the new one."""
    rank = FakeRank(start_node().settings())
    pages = hashes(*range(4))
    rank.store(NS, pages)
    old = rank.memory
    fd = os.memfd_create("second")
    os.ftruncate(fd, old.length)
    second = Mapping(fd, old.length, writable=True)
    geometry = dataclasses.replace(rank.geometry, fds=(fd,))  # at the same addresses, another memory
    for _ in range(70):
        rank.client._pools["kv"] = geometry
    rank.client.share(geometry)
    old.view[:] = b"\xaa" * old.length
    assert rank.transfer("load", NS, pages).ok == b"\x01" * 4
    assert bytes(old.view) == b"\xaa" * old.length
    rank.memory = second
    assert all(rank.read(i) == pattern(page, rank.page_bytes) for i, page in enumerate(pages))
    rank.memory = old
    second.close()
    os.close(fd)
    rank.close()


def test_a_call_that_waited_while_the_client_closed_touches_nothing(start_node: StartNode) -> None:
    rank = FakeRank(start_node().settings(copy_mode="segment"))
    rank.store(NS, hashes("a"))
    rank.scramble()
    outcomes: list[bytes] = []
    with rank.client._bounce_locks["load"]:
        waiting = threading.Thread(target=lambda: outcomes.append(rank.transfer("load", NS, hashes("a")).ok))
        waiting.start()
        time.sleep(0.1)
        closing = threading.Thread(target=rank.client.close)
        closing.start()
        wait_until(lambda: not rank.client.enabled, 30)
    waiting.join(10)
    closing.join(10)
    assert outcomes == [b"\x00"]
    assert bytes(rank.memory.view) == b"\xaa" * rank.memory.length
    assert all(pid is None for pid in rank.client.mover_pids().values())
    rank.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_a_node_of_another_user_is_not_trusted_on_the_default_path(tmp_path: Path) -> None:
    """Anybody can make /tmp/hicache-mooncake-UID first."""
    os.chmod(tmp_path, 0o777)
    for parent in list(tmp_path.parents)[:3]:
        os.chmod(parent, os.stat(parent).st_mode | 0o011)
    path = str(tmp_path / "node.sock")
    stranger = os.fork()
    if stranger == 0:
        try:
            os.setuid(65534)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()
            os.chmod(path, 0o777)  # last: that is what is waited for
            time.sleep(100)
        finally:
            os._exit(0)
    try:
        wait_until(lambda: os.path.exists(path) and os.stat(path).st_mode & 0o002, 60)
        connect(path, 2.0).close()
        with pytest.raises(WireClosed, match="served by user 65534"):
            connect(path, 2.0, own_user=True)
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)


def test_a_peer_that_reads_slowly_cannot_hold_a_send_beyond_its_deadline() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stop = threading.Event()

    def drain() -> None:
        while not stop.wait(0.05):
            theirs.recv(4096)

    thread = threading.Thread(target=drain)
    thread.start()
    wire = Wire(ours)
    started = time.monotonic()
    with pytest.raises(WireTimeout):
        wire.send(p.Exists([NS], bytes(32 * 100_000)), deadline=time.monotonic() + 0.5)
    assert time.monotonic() - started < 2.0
    stop.set()
    thread.join()
    wire.close()
    theirs.close()


def test_a_lookup_of_more_keys_than_a_message_takes(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """SGLang asks for a whole prompt at once: with page_size 1 that can be hundreds of thousands of keys."""
    rank = make_rank(start_node())
    stored = hashes(*range(4))
    rank.store(NS, stored)
    many = stored + [os.urandom(32) for _ in range(140_000)]
    assert rank.exists(NS, many) == 4
    assert rank.exists(NS, many[4:]) == 0
    assert rank.exists(NS, stored) == 4
    assert not rank.client.reasons


def test_idle_movers_let_go_of_a_dead_nodes_memory(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    node = start_node()
    rank = make_rank(node)
    rank.store(NS, hashes("a"))
    rank.load(NS, hashes("a"))
    pids = list(rank.client.mover_pids().values())

    def maps_a_segment(pid: int | None) -> bool:
        return "/memfd:hicache-mooncake " in Path(f"/proc/{pid}/maps").read_text()

    assert all(maps_a_segment(pid) for pid in pids)
    node.kill()
    wait_until(lambda: not any(maps_a_segment(pid) for pid in pids), 30, "the segment is unmapped without another batch")
    assert list(rank.client.mover_pids().values()) == pids


def test_movers_end_with_their_engine_though_a_forked_child_lives_on(start_node: StartNode) -> None:
    node = start_node()
    program = (
        "import os, time\n"
        "from hicache_mooncake.config import load_settings\n"
        "from hicache_mooncake.testing.local import FakeRank\n"
        f"rank = FakeRank(load_settings({{}}, {{}}, {{'socket': {node.socket!r}, 'node': 'external'}})[0])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        "print(child, *rank.client.mover_pids().values(), flush=True)\n"
        "time.sleep(60)\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE)
    assert engine.stdout is not None
    child, *movers = (int(word) for word in engine.stdout.readline().split())
    try:
        engine.kill()
        engine.wait()
        wait_until(lambda: all(exiting(pid) for pid in movers), 30, "movers end")
    finally:
        os.kill(child, signal.SIGKILL)


def test_misses_of_a_rank_that_never_asks_reach_the_node(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """A decode server that only writes: lookups are what opened its connection."""
    node = start_node(extra=("--metrics", "127.0.0.1:0"))
    report = make_rank(node).client.status()
    assert report is not None
    writer = make_rank(node)

    def metrics() -> str:
        writer.client.miss({"bad_key": 1})
        return str(urllib.request.urlopen(f"http://{report.node['metrics']}/metrics", timeout=5).read().decode())

    wait_until(lambda: 'hicache_node_client_misses_total{reason="bad_key"}' in metrics(), 30)


def test_misses_reach_the_nodes_metrics(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    node = start_node(extra=("--metrics", "127.0.0.1:0"))
    rank = make_rank(node)
    report = rank.client.status()
    assert report is not None
    rank.store(NS, hashes("a"))
    admin = Admin(node)
    admin.damage(NS, hashes("a")[0], rank.page_bytes)
    admin.close()
    rank.load(NS, hashes("a", "b"))

    def metrics() -> str:
        rank.load(NS, hashes("c"))  # reports ride along with later misses
        return str(urllib.request.urlopen(f"http://{report.node['metrics']}/metrics", timeout=5).read().decode())

    wait_until(lambda: 'hicache_node_client_misses_total{reason="checksum"} 1.0' in metrics(), 30)
    assert 'hicache_node_client_misses_total{reason="absent"}' in metrics()
    assert "hicache_node_loaded_total 0.0" in metrics(), "what failed its checksum was not loaded"
    again = rank.client.status()
    assert again is not None
    assert again.node["client miss: checksum"] == 1


def test_a_peer_that_stays_away_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "noise")  # another test may have quietened the root
    quiet = QuietLog(logging.getLogger("noise"))
    for i in range(1000):
        quiet(logging.WARNING, "same", f"line {i}")
        quiet(logging.WARNING, f"kind {i}", "many kinds")
    assert len(caplog.records) < 300
    assert caplog.records[0].getMessage() == "line 0"


def test_an_embedded_node_that_cannot_start_is_tried_ever_more_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hicache_mooncake.client import queries

    tries: list[float] = []

    def failing(_settings: object, _timeout_s: float) -> bool:
        tries.append(time.monotonic())
        return False

    monkeypatch.setattr(queries, "ensure_node", failing)
    settings = load_settings({"socket": str(tmp_path / "n.sock"), "node": "embedded"}, {})[0]
    client = PoolClient(settings, "test")
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        client._queries._retry.retry_now()
        assert client.exists(NS, hashes("a")[0]) == 0
        time.sleep(0.01)
    assert 1 <= len(tries) <= 2
    client.close()


def test_bytes_of_another_page_fail_the_checksum(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """Whole, undamaged, and somebody else's: the checksum is seeded with the page's identity."""
    node = start_node()
    rank = make_rank(node)
    one, two = hashes("one", "two")
    rank.store(NS, [one, two])
    admin = Admin(node)
    located = admin.ask(p.Locate(NS, one + two, rank.page_bytes))
    assert isinstance(located, p.Located)
    admin.wire.send(p.Release(located.pin))
    # The other page's record and body are taken for this one's, both as they are: an index that went wrong.
    reserved = admin.ask(p.Reserve(NS, page_hash("three"), rank.page_bytes))
    assert isinstance(reserved, p.Reserved)
    size = rank.page_bytes
    body = bytes(admin.segment.view[located.where[0] : located.where[0] + size])
    admin.segment.view[reserved.where[0] : reserved.where[0] + size] = body
    admin.ask(p.Commit(reserved.txn, b"\x01", [located.checksum[0]]))
    outcome = rank.transfer("load", NS, hashes("three"))
    assert outcome.ok == b"\x00"
    assert outcome.reasons == {"checksum": 1}
    assert rank.load(NS, [one, two]).ok == b"\x01\x01"
    admin.close()


def test_a_node_that_gets_no_thread_turns_a_client_away_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container at its limit of processes."""
    from hicache_mooncake.node.service import Node

    settings = load_settings({}, {}, {"socket": str(tmp_path / "n.sock"), "dram": "1MiB", "node": "embedded"})[0]
    node = Node(settings)
    node.start()
    start = threading.Thread.start
    failures = iter([True, True])

    def failing(self: threading.Thread) -> None:
        if self.name.startswith("client-") and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", failing)
    try:
        for _ in range(2):
            wire = connect(settings.socket, 2.0)
            with pytest.raises(WireClosed):
                wire.receive(p.decoder(p.FromNode), time.monotonic() + 5)
            wire.close()
        wire = connect(settings.socket, 2.0)
        wire.send(p.Hello(1, 1, "query", "third"))
        assert isinstance(wire.receive(p.decoder(p.FromNode), time.monotonic() + 5), p.Welcome)
        wire.close()
        assert node.connections_refused == 2
    finally:
        node.stop()


def test_a_mover_starts_again_though_calls_are_short(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """Starting a process may take longer than a call may: it is done beside the calls."""
    rank = make_rank(start_node(), deadline_s=0.06)
    wait_until(lambda: rank.store(NS, hashes("a")).ok == b"\x01", 30)
    for role in ("load", "store"):
        pid = rank.client.mover_pids()[role]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rank.load(NS, hashes("a")).ok == b"\x01", 20)
    wait_until(lambda: rank.store(NS, hashes("b")).ok == b"\x01", 20)


def test_movers_work_where_pidfds_do_not(start_node: StartNode, tmp_path: Path) -> None:
    """Some sandboxes have no pidfd_open."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef none(*_):\n    raise OSError(38, 'not implemented')\nos.pidfd_open = none\n"
    )
    program = (
        "from hicache_mooncake.config import load_settings\n"
        "from hicache_mooncake.testing.local import FakeRank, page_hash\n"
        f"rank = FakeRank(load_settings({{}}, {{}}, {{'socket': {start_node().socket!r}, 'node': 'external'}})[0])\n"
        "print(rank.mode, rank.store(b'n' * 16, [page_hash(1)]).ok, rank.load(b'n' * 16, [page_hash(1)]).ok)\n"
        "rank.close()\n"
    )
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["memfd", "b'\\x01'", "b'\\x01'"]


def test_a_frozen_node_costs_one_lookup_its_time_and_the_others_nothing(
    start_node: StartNode, make_rank: Callable[..., FakeRank]
) -> None:
    """P69: a decode node asks on its scheduler's thread. That the node serves again is found out beside the calls."""
    node = start_node()
    rank = make_rank(node, deadline_s=1.0)
    stored = hashes(1, 2)
    rank.store(NS, stored)
    node.signal(signal.SIGSTOP)
    assert rank.exists(NS, stored) == 0
    asked: list[float] = []
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        asked.append(time.monotonic())
        assert rank.exists(NS, stored) == 0
        time.sleep(0.01)
    assert len(asked) > 20, "a call that waits for its deadline each time gets to three"
    node.signal(signal.SIGCONT)
    wait_until(lambda: rank.exists(NS, stored) == 2, 30, "the node is asked again")
    assert rank.client.reasons["node_timeout"] > 20


def test_a_call_without_time_is_not_begun_and_blames_nobody(start_node: StartNode, make_rank: Callable[..., FakeRank]) -> None:
    """The later objects of a page share their call's time: a mover killed for want of it costs the next call too."""
    rank = make_rank(start_node())
    stored = hashes(1, 2)
    rank.store(NS, stored)
    movers = rank.client.mover_pids()
    for left in (-1.0, 0.0, 0.001, 0.05):
        body = Body(NS, rank.runs)
        outcome = rank.client.transfer("load", body, b"".join(stored), array("q", [0, 1]), deadline=time.monotonic() + left)
        assert (outcome.ok, outcome.reasons) == (b"\x00\x00", {"deadline": 2})
        assert rank.load(NS, stored).ok == b"\x01\x01"
    assert rank.client.mover_pids() == movers
    assert rank.client._queries.ask(p.Exists([NS], stored[0]), 0.001) == (None, "deadline")
    assert rank.exists(NS, stored) == 2


def test_a_node_that_was_asked_too_late_is_not_left_alone(start_node: StartNode) -> None:
    node = start_node()
    link = NodeLink(node.socket, "load", "test")
    question = p.Locate(NS, page_hash(1), 4096)
    assert isinstance(link.ask(question, time.monotonic() + 5), p.Located)
    with pytest.raises(NodeUnavailable) as late:
        link.ask(question, time.monotonic() - 1)
    assert late.value.reason == "deadline"
    assert isinstance(link.ask(question, time.monotonic() + 5), p.Located)
    link.drop()


def test_more_memfds_than_a_frame_can_carry_go_another_way(start_node: StartNode) -> None:
    client = PoolClient(start_node().settings(), "test")
    fds = [os.memfd_create(f"pool-{i}") for i in range(300)]
    regions = tuple(p.Region((1 << 40) + i * 8192, 4096, i) for i in range(300))
    assert client.share(PoolGeometry("kv", (p.Run(1 << 40, 4096, 4096),), 1, 1, regions, tuple(fds), affine=True)) != "memfd"
    client.close()
    for fd in fds:
        os.close(fd)
