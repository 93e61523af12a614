"""Real nodes, movers and masters, with a fault proxy before the node that is read from: what a rank sees when they fail."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.testing.local import FakeRank, free_port, page_hash, pattern
from hicache_mooncake.wire import connect
from tests.conftest import MasterProcess, NodeProcess, wait_until
from tests.faults.proxy import FaultProxy, Faults
from tests.test_pool_local import Admin

NS = b"n" * 16
HANG_S = 10.0
"""More than any call here may take: a limit on hangs, not a measurement."""


def names(*which: object) -> list[bytes]:
    return [page_hash(name) for name in which]


class Cluster:
    """A master, node a behind a proxy with a rank that writes, node b with ranks that read."""

    def __init__(self, master: MasterProcess, start_node: Callable[..., NodeProcess]) -> None:
        self.master = master
        port = free_port()
        self.proxy = FaultProxy(("127.0.0.1", port))
        behind = ("--listen", f"127.0.0.1:{port}", "--advertise", self.proxy.address)
        self.a = start_node("a", "64MiB", (master.address,), behind)
        # Without replicas: pages that are read again and again come from the other node each time.
        self.b = start_node("b", "64MiB", (master.address,), ("--replicate-after", "0"))
        self.ranks: list[FakeRank] = []
        self.writer = self.rank(self.a)

    def rank(
        self, node: NodeProcess, *, pages: int = 16, page_bytes: int = 64 << 10, shared: bool = False, **settings: object
    ) -> FakeRank:
        rank = FakeRank(node.settings(**settings), pages=pages, page_bytes=page_bytes, shared=shared)
        self.ranks.append(rank)
        return rank

    def reader(self, **options: object) -> FakeRank:
        return self.rank(self.b, **options)  # type: ignore[arg-type]

    def publish(self, pages: list[bytes], reader: FakeRank) -> None:
        """On node a, and known to node b."""
        assert self.writer.store(NS, pages).ok == b"\x01" * len(pages)
        wait_until(lambda: reader.exists(NS, pages) == len(pages), 20, "found through the master")

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.proxy.close()


@pytest.fixture
def cluster(start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]) -> Iterator[Cluster]:
    made = Cluster(start_master(), start_node)
    yield made
    made.close()


def report(rank: FakeRank) -> dict[str, int | float | str | bool]:
    answer = rank.client.status()
    assert answer is not None
    return answer.node


def nothing_pinned(rank: FakeRank) -> bool:
    return report(rank)["pinned_bytes"] == 0


def test_a_second_node_serves_what_the_first_does_not(cluster: Cluster, start_node: Callable[..., NodeProcess]) -> None:
    """A page on two nodes outlives the silence of either, within the deadline of the one call."""
    c = cluster.rank(start_node("c", "64MiB", (cluster.master.address,)))
    reader = cluster.reader()
    pages = names(*range(8))
    cluster.publish(pages, reader)
    assert c.store(NS, pages).ok == b"\x01" * 8
    time.sleep(0.3)  # both are in the directory, or the first rounds see one of them
    cluster.proxy.faults = Faults(after_bytes=100_000, swallow=True)
    for _ in range(4):
        began = time.monotonic()
        outcome = reader.load(NS, pages)
        assert time.monotonic() - began < HANG_S
        assert outcome.ok == b"\x01" * 8, outcome.reasons
        cluster.proxy.drop_all()


def test_requests_that_share_pages_that_fail_both_recompute(cluster: Cluster) -> None:
    """P20: two requests want the same pages and the bytes are damaged on the way. Neither is told that it has them, nobody
    else finds them here, and what one of them computes anew is what both get afterwards."""
    one, two = (cluster.reader(shared=True) for _ in range(2))
    pages = names(*range(4))
    cluster.publish(pages, one)
    for rank in (one, two):
        wait_until(lambda rank=rank: rank.load(NS, names("absent")).reasons == {"absent": 1}, 20)  # type: ignore[misc]
    cluster.proxy.faults = Faults(after_bytes=2000, corrupt=True)
    outcomes: list[bytes] = []

    def load(rank: FakeRank) -> None:
        outcomes.append(rank.load(NS, pages).ok)

    threads = [threading.Thread(target=load, args=(rank,)) for rank in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(outcomes) == 2
    assert all(ok != b"\x01" * 4 for ok in outcomes)
    held = [page for page in pages if one.exists(NS, [page]) and _is_here(cluster.b, page, one.page_bytes)]
    assert len(held) < 4
    assert one.store(NS, pages).ok == b"\x01" * 4
    for rank in (one, two):
        assert rank.load(NS, pages).ok == b"\x01" * 4


def _is_here(node: NodeProcess, page: bytes, length: int) -> bool:
    admin = Admin(node)
    try:
        located = admin.ask(p.Locate(NS, page, length))
        assert isinstance(located, p.Located)
        return located.status[0] == p.LOCAL
    finally:
        admin.close()


def test_a_slow_get_from_a_node_that_is_full_and_reuses_its_memory(cluster: Cluster) -> None:
    """P14 P15: what is being sent stays as it is for as long as that takes, though the pool is full and written over and over;
    what is gone is a miss. The bytes of whatever is reported are compared."""
    reader = cluster.reader(deadline_s=1.5)
    full = cluster.rank(cluster.a, pages=128, page_bytes=256 << 10)
    pages = names(*range(16))
    cluster.publish(pages, reader)
    assert reader.load(NS, pages).ok == b"\x01" * 16
    cluster.proxy.faults = Faults(after_bytes=2000, rate_bytes_s=1_000_000)
    stop = threading.Event()

    def overwrite() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            full.transfer("store", b"o" * 16, names(*((turn, i) for i in range(128))))

    thread = threading.Thread(target=overwrite)
    thread.start()
    wait_until(lambda: report(cluster.writer)["evicted"], 20, "the pool is full")
    arrived = 0
    for _ in range(4):
        cluster.writer.store(NS, pages)
        arrived += reader.load(NS, pages).ok.count(1)
    stop.set()
    thread.join(HANG_S)
    assert arrived > 0
    cluster.proxy.faults = Faults()
    wait_until(lambda: nothing_pinned(cluster.writer), 20)


def test_a_swallowed_completion_costs_one_deadline_and_is_counted(cluster: Cluster) -> None:
    """P63: an answer never comes. The call ends, says why, and the next one is served."""
    reader = cluster.reader(deadline_s=1.0)
    pages, own = names(*range(4)), names("own")
    cluster.publish(pages, reader)
    assert reader.store(NS, own).ok == b"\x01"
    assert reader.load(NS, pages).ok == b"\x01" * 4
    cluster.proxy.faults = Faults(after_bytes=70_000, swallow=True)
    began = time.monotonic()
    outcome = reader.load(NS, pages)
    assert time.monotonic() - began < HANG_S
    assert outcome.ok != b"\x01" * 4
    assert set(outcome.reasons) <= {"deadline", "peer_down"}
    assert sum(outcome.reasons.values()) == outcome.ok.count(0)
    assert reader.load(NS, own).ok == b"\x01", "the next call"
    absent = names("absent")

    def counted() -> bool:  # the next miss takes the count along
        return reader.load(NS, absent).ok == b"\x00" and "client miss: deadline" in report(reader)

    wait_until(counted, 30, "counted at the node")
    cluster.proxy.faults = Faults()
    wait_until(lambda: reader.load(NS, pages).ok == b"\x01" * 4, 30, "healed")


def test_memory_of_peers_and_of_the_own_node_goes_while_traffic_runs(cluster: Cluster) -> None:
    """P64: the nodes on both ends are killed and come back again and again under load. No call hangs, no byte is wrong, and
    afterwards all works."""
    reader = cluster.reader(deadline_s=1.0)
    pages, own = names(*range(8)), names(*(("own", i) for i in range(8)))
    cluster.publish(pages, reader)
    assert reader.store(NS, own).ok == b"\x01" * 8
    stop = threading.Event()
    longest = [0.0]
    wrong: list[BaseException] = []

    def traffic() -> None:
        try:
            while not stop.is_set():
                began = time.monotonic()
                reader.load(NS, [*own, *pages])
                longest[0] = max(longest[0], time.monotonic() - began)
                reader.transfer("store", NS, [])
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=traffic)
    thread.start()
    for node in (cluster.a, cluster.b, cluster.a):
        time.sleep(0.4)
        node.kill()
        time.sleep(0.4)
        node.start()
    stop.set()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert not wrong
    assert longest[0] < HANG_S
    wait_until(lambda: cluster.writer.store(NS, pages).ok == b"\x01" * 8, 20)
    wait_until(lambda: reader.store(NS, own).ok == b"\x01" * 8, 20)
    wait_until(lambda: reader.load(NS, [*own, *pages]).ok == b"\x01" * 16, 30)


def test_512_threads_queue_and_none_waits_for_ever(cluster: Cluster) -> None:
    """P72: every call gets its verdicts or a reason within its deadline; nothing grows with the number that wait."""
    reader = cluster.reader(pages=16)
    pages, own = names(*range(8)), names(*(("own", i) for i in range(8)))
    cluster.publish(pages, reader)
    assert reader.store(NS, own).ok == b"\x01" * 8
    assert reader.load(NS, [*own, *pages]).ok == b"\x01" * 16
    before = descriptors(os.getpid())
    outcomes: list[tuple[bytes, dict[str, int]]] = []
    found: list[int] = []
    begin = threading.Barrier(512)

    def call(number: int) -> None:
        begin.wait()
        if number % 8 == 7:
            found.append(reader.exists(NS, own))
            return
        outcome = reader.transfer("load", NS, [*own, *pages])
        outcomes.append((outcome.ok, outcome.reasons))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(512)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - began < 60
    assert len(outcomes) == 448
    assert len(found) == 64
    for ok, reasons in outcomes:
        assert sum(reasons.values()) == ok.count(0)
        assert set(reasons) <= {"busy", "deadline", "fenced", "mover_down", "peer_down"}
    assert any(ok == b"\x01" * 16 for ok, _ in outcomes)
    for place, page in enumerate([*own, *pages]):
        assert reader.read(place) == pattern(page, reader.page_bytes)
    wait_until(lambda: reader.load(NS, [*own, *pages]).ok == b"\x01" * 16, 30)
    wait_until(lambda: descriptors(os.getpid()) <= before + 2, 30, "nothing is left of the crowd")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


# --------------------------------------------------------------------------- aborts give everything back


def in_the_welcome(node: NodeProcess, pages: list[bytes], length: int) -> None:
    wire = connect(node.socket, 2.0)
    wire.send(p.Hello(1, 1, "load", "aborts"))
    wire.close()


def in_mid_frame(node: NodeProcess, pages: list[bytes], length: int) -> None:
    admin = Admin(node)
    admin.wire._sock.sendall(b"\xff\x00\x00\x00half a frame")
    admin.close()


def with_pins(node: NodeProcess, pages: list[bytes], length: int) -> None:
    admin = Admin(node)
    assert isinstance(admin.ask(p.Locate(NS, b"".join(pages), length)), p.Located)
    admin.close()


def before_the_answer(node: NodeProcess, pages: list[bytes], length: int) -> None:
    admin = Admin(node)
    admin.wire.send(p.Locate(NS, b"".join(pages), length))
    admin.close()


def with_room_reserved(node: NodeProcess, pages: list[bytes], length: int) -> None:
    admin = Admin(node)
    fresh = names(*(("aborted", i) for i in range(len(pages))))
    reserved = admin.ask(p.Reserve(NS, b"".join(fresh), length))
    assert isinstance(reserved, p.Reserved)
    assert list(reserved.status) == [p.WRITE] * len(pages)
    admin.close()


def with_half_committed(node: NodeProcess, pages: list[bytes], length: int) -> None:
    admin = Admin(node)
    fresh = names(*(("half", i) for i in range(len(pages))))
    reserved = admin.ask(p.Reserve(NS, b"".join(fresh), length))
    assert isinstance(reserved, p.Reserved)
    admin.wire.send(p.Commit(reserved.txn, bytes(len(pages)), [0] * len(pages)))
    admin.close()


def with_claims(node: NodeProcess, pages: list[bytes], length: int) -> None:
    admin = Admin(node)
    remote = names(*range(8))
    located = admin.ask(p.Locate(NS, b"".join(remote), length, shared=True))
    assert isinstance(located, p.Located)
    assert p.FETCH in located.status
    admin.close()


PHASES = [in_the_welcome, in_mid_frame, with_pins, before_the_answer, with_room_reserved, with_half_committed, with_claims]


def test_whoever_aborts_leaves_nothing_behind(cluster: Cluster) -> None:
    """P84: an abort in any phase of a load or store gives its room, pins and claims back."""
    reader = cluster.reader()
    cluster.publish(names(*range(8)), reader)
    own = names(*(("own", i) for i in range(4)))
    assert reader.store(NS, own).ok == b"\x01" * 4

    def held() -> tuple[object, ...]:
        at = report(reader)
        return tuple(at[key] for key in ("used_bytes", "pinned_bytes", "objects", "connections"))

    assert reader.load(NS, own).ok == b"\x01" * 4  # both of its movers are connected
    wait_until(lambda: nothing_pinned(reader), 30, "what it read has been let go of")
    before = held()
    for phase in PHASES:
        for _ in range(3):
            phase(cluster.b, own, reader.page_bytes)
            wait_until(lambda: held() == before, 30, f"all is given back after an abort {phase.__name__.replace('_', ' ')}")


def test_a_reader_killed_in_mid_load_leaves_no_pin_at_either_end(cluster: Cluster) -> None:
    """P84, across the network: its mover dies while another node sends to it."""
    reader = cluster.reader(shared=True)
    pages, own = names(*range(8)), names("own")
    cluster.publish(pages, reader)
    assert reader.store(NS, own).ok == b"\x01"
    used = report(reader)["used_bytes"]
    for _ in range(3):
        wait_until(lambda: reader.load(NS, own).ok == b"\x01", 20, "its mover runs")
        cluster.proxy.faults = Faults(after_bytes=100_000, swallow=True)
        pid = reader.client.mover_pids()["load"]
        assert pid is not None
        thread = threading.Thread(target=reader.load, args=(NS, pages))
        thread.start()
        wait_until(lambda: not nothing_pinned(cluster.writer) or report(reader)["used_bytes"] != used, 10, "under way")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        thread.join(HANG_S)
        assert not thread.is_alive()
        cluster.proxy.drop_all()
        cluster.proxy.faults = Faults()
        wait_until(lambda: nothing_pinned(cluster.writer) and nothing_pinned(reader), 15, "no pin at either end")
        wait_until(lambda: report(reader)["used_bytes"] == used, 15, "and no room")


# --------------------------------------------------------------------------- flat over time


def resident(pid: int | None) -> int:
    """Pages of memory of its own, without what it shares with the nodes and the engine."""
    statm = Path(f"/proc/{pid}/statm").read_text().split()
    return int(statm[1]) - int(statm[2])


def test_memory_of_each_rank_is_flat_over_many_batches(cluster: Cluster) -> None:
    """P89: two pipeline stages load and store batch after batch, from here and from elsewhere. Compared in pages of memory,
    after as many batches as it takes to have touched everything."""
    stages = [cluster.reader(pages=16) for _ in range(2)]
    spaces = [b"s" * 15 + bytes([stage]) for stage in range(2)]
    remote, own = names(*range(8)), names(*(("own", i) for i in range(8)))
    for stage, space in zip(stages, spaces, strict=True):
        assert cluster.writer.store(space, remote).ok == b"\x01" * 8
        wait_until(lambda stage=stage, space=space: stage.exists(space, remote) == 8, 20)  # type: ignore[misc]

    def batches(count: int) -> None:
        for number in range(count):
            for stage, space in zip(stages, spaces, strict=True):
                assert stage.store(space, own).ok == b"\x01" * 8
                assert stage.load(space, [*own, *remote]).ok == b"\x01" * 16
                assert stage.load(space, names(("absent", number))).ok == b"\x00"

    def movers() -> list[int]:
        return [resident(pid) for stage in stages for pid in stage.client.mover_pids().values()]

    batches(60)
    before = movers()
    fds = [descriptors(pid) for stage in stages for pid in stage.client.mover_pids().values() if pid]
    batches(240)
    grown = [after - first for first, after in zip(before, movers(), strict=True)]
    assert max(grown) < 128, f"pages of memory grown in 240 batches, per mover: {grown}"
    assert fds == [descriptors(pid) for stage in stages for pid in stage.client.mover_pids().values() if pid]


@pytest.mark.parametrize("seed", [129, 130])
def test_a_short_soak_under_changing_faults(cluster: Cluster, seed: int) -> None:
    """P129: loads, stores, aborts and clears while the network does something else every moment. Every byte is compared; in the
    end all works, and nothing is left."""
    rng = random.Random(seed)
    readers = [cluster.reader(deadline_s=1.0, shared=shared) for shared in (False, True)]
    pages = names(*range(12))
    cluster.publish(pages, readers[0])
    stop = threading.Event()
    wrong: list[BaseException] = []
    reasons: Counter[str] = Counter()
    whole = [0]

    def work(reader: FakeRank, seed: int) -> None:
        mine = random.Random(seed)
        try:
            while not stop.is_set():
                some = mine.sample(pages, mine.randrange(1, 12))
                outcome = reader.load(NS, some)
                whole[0] += outcome.ok.count(1)
                reasons.update(outcome.reasons)
                if mine.random() < 0.1:
                    reader.client.clear(NS) if mine.random() < 0.2 else reader.store(b"o" * 16, some)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(reader, seed + i)) for i, reader in enumerate(readers)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        kind = rng.choice(["none", "none", "cut", "swallow", "corrupt", "slow", "young", "refuse", "abort"])
        at = rng.randrange(400_000)
        faults = {
            "cut": Faults(after_bytes=at, cut=True),
            "swallow": Faults(after_bytes=at, swallow=True),
            "corrupt": Faults(after_bytes=at, corrupt=True),
            "slow": Faults(after_bytes=at, rate_bytes_s=1_000_000),
            "young": Faults(die_after_s=rng.random() / 20),
        }.get(kind, Faults())
        cluster.proxy.faults = faults
        cluster.proxy.refuse() if kind == "refuse" else cluster.proxy.accept()
        if kind == "abort":
            pid = rng.choice(readers).client.mover_pids()["load"]
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.15)
        if rng.random() < 0.2:
            cluster.writer.store(NS, pages)
    stop.set()
    cluster.proxy.faults = Faults()
    cluster.proxy.accept()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert not wrong
    assert whole[0] > 0
    assert reasons, "some of it went wrong, as it was meant to"
    wait_until(lambda: cluster.writer.store(NS, pages).ok == b"\x01" * 12, 20)
    for reader in readers:
        wait_until(lambda reader=reader: reader.load(NS, pages).ok == b"\x01" * 12, 40, "all is well again")  # type: ignore[misc]
    wait_until(lambda: nothing_pinned(cluster.writer) and nothing_pinned(readers[0]), 20, "no pin is left")
