"""A mover and its node, one message at a time: what is asked when, what waits until the rank has its answer, and what is left
when either is gone in the middle."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client.mover import Mover
from hicache_mooncake.client.node_link import NodeLink, NodeUnavailable
from hicache_mooncake.client.storing import Parts
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.rank_server import RankServer
from hicache_mooncake.node.store import Store
from hicache_mooncake.testing.local import FakeRank, page_hash, pattern
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.memory import MappedMemory
from hicache_mooncake.wire import Wire
from tests.conftest import NodeProcess, wait_until

NS = b"n" * 16
PAGE = 64 << 10
BASE = 1 << 40


class OwnNode:
    """In the place of a mover's connection to its node: a node's core in this process. `said` has every message, in order;
    after `dies_after` of them the connection is gone."""

    def __init__(self, dram: int) -> None:
        self.core = NodeCore("node", b"i" * 8, Store(dram), masters=False, log=lambda *_: None)
        self._fd = create_memfd("segment", dram)
        self.segment: Mapping | None = Mapping(self._fd, dram, writable=True)
        self._kept = self.segment
        self.node, self.data_key, self.tls = "node", b"", None
        self.said: list[p.Message] = []
        self.dies_after = 1 << 30
        self._answers: list[p.Message] = []

    def ask(self, message: p.Message, deadline: float) -> p.Message:
        assert not self._answers, "an answer is still to be taken"
        return self._answer(message)

    def ask_same(self, message: p.Message, deadline: float) -> p.Message:
        return self.ask(message, deadline)

    def ask_ahead(self, message: p.Message, deadline: float) -> None:
        self._answers.append(self._answer(message))

    def take(self, deadline: float) -> p.Message:
        return self._answers.pop(0)

    def tell(self, message: p.Message, deadline: float) -> None:
        self._handle(message)

    def _answer(self, message: p.Message) -> p.Message:
        answer = self._handle(message)
        assert answer is not None
        return answer

    def _handle(self, message: p.Message) -> p.Message | None:
        if len(self.said) >= self.dies_after:
            self.core.drop_owner(1)
            self._answers.clear()
            raise NodeUnavailable("node_down", "it died")
        self.said.append(message)
        try:
            next(self.core.handle(1, message, 0.0))
        except StopIteration as end:
            self.core.validate()
            return end.value  # type: ignore[no-any-return]
        raise AssertionError("there is no master to ask")

    def kinds(self) -> list[str]:
        said, self.said = self.said, []
        return [type(message).__name__ for message in said]

    def close(self) -> None:
        self._kept.close()
        os.close(self._fd)


class Pair:
    """A mover over engine memory, and its node."""

    def __init__(self, dram: int, pages: int) -> None:
        self.node = OwnNode(dram)
        self._fd = create_memfd("engine", pages * PAGE)
        self.engine = Mapping(self._fd, pages * PAGE, writable=True)
        memory = MappedMemory([p.Region(BASE, pages * PAGE, 0)], [self._fd])
        self.mover = Mover(memory, self.node, os.getpid())  # type: ignore[arg-type]

    def run(self, op: str, hashes: list[bytes], budget_s: float = 60.0) -> p.Transferred:
        numbers = array("q", range(len(hashes))).tobytes()
        return self.mover.run(p.Transfer(op, NS, b"".join(hashes), [p.Run(BASE, PAGE, PAGE)], numbers, budget_s))

    def store(self, hashes: list[bytes], budget_s: float = 60.0) -> p.Transferred:
        for place, page in enumerate(hashes):
            self.engine.view[place * PAGE : (place + 1) * PAGE] = pattern(page, PAGE)
        done = self.run("store", hashes, budget_s)
        assert sum(done.reasons.values()) == done.ok.count(0), "every page that is not stored has a reason"
        return done

    def load(self, hashes: list[bytes]) -> p.Transferred:
        self.engine.view[:] = bytes(self.engine.length)
        done = self.run("load", hashes)
        for place, page in enumerate(hashes):
            body = self.engine.view[place * PAGE : (place + 1) * PAGE]
            assert not done.ok[place] or body == pattern(page, PAGE)
        assert sum(done.reasons.values()) == done.ok.count(0)
        return done

    def close(self) -> None:
        self.mover.close()
        self.node.close()
        self.engine.close()
        os.close(self._fd)


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(dram: int = 16 << 20, pages: int = 64) -> Pair:
        pairs.append(Pair(dram, pages))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def chain(name: str, count: int) -> list[bytes]:
    return [page_hash((name, i)) for i in range(count)]


def test_a_large_store_is_reserved_as_a_whole_and_committed_in_parts(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pages = chain("a", 50)
    done = pair.store(pages)
    assert done.ok == b"\x01" * 50
    assert done.local_bytes == 50 * PAGE
    asked = [message for message in pair.node.said if isinstance(message, p.Reserve)]
    assert b"".join(message.hashes for message in asked) == b"".join(pages), "each page once, head first"
    kinds = pair.node.kinds()
    assert kinds == ["Reserve"] * 3 + ["Commit"] * 3
    assert pair.load(pages).ok == b"\x01" * 50


def test_a_small_store_is_one_question(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    assert pair.store(chain("a", 12)).ok == b"\x01" * 12
    pair.mover.settle()
    assert pair.node.kinds() == ["Reserve", "Commit"]


def test_the_head_of_what_was_stored_in_parts_outlives_its_tail(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pages = chain("a", 50)
    pair.store(pages)
    pair.mover.settle()
    assert pair.node.kinds()[-1] == "Touch"
    assert [page.hash for page in pair.node.core.store.coldest(50)] == pages[::-1]


def test_what_does_not_fit_is_the_tail(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(dram=40 * PAGE)
    pages = chain("a", 60)
    pair.store(pages)
    reserved = [message for message in pair.node.said if isinstance(message, p.Reserve)]
    assert b"".join(message.hashes for message in reserved[:3]) == b"".join(pages)
    assert reserved[3].hashes == b"".join(pages[40:]), "the tail found no room in the first round"
    assert pair.load(pages[:20]).ok == b"\x01" * 20, "and in the second it took none from the head"


def test_pages_that_are_there_cost_no_copy(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pages = chain("a", 40)
    pair.store(pages[10:30])
    pair.node.kinds()
    done = pair.store(pages)
    assert done.ok == b"\x01" * 40
    assert (done.had, done.local_bytes) == (20, 20 * PAGE)
    assert pair.load(pages).ok == b"\x01" * 40


def test_a_store_without_time_commits_nothing_and_leaves_nothing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    done = pair.store(chain("a", 40), budget_s=-1.0)
    assert done.reasons == {"deadline": 40}
    assert pair.node.core.store.used_bytes == 0


@pytest.mark.parametrize("after", range(6))
def test_a_node_that_dies_in_the_middle_leaves_no_page_in_doubt(make_pair: Callable[..., Pair], after: int) -> None:
    """After each message of the six: what is said to be stored is there, and nothing half-written is."""
    pair = make_pair()
    pages = chain("a", 40)
    pair.node.dies_after = after
    done = pair.store(pages)
    assert done.reasons["node_down"] == done.ok.count(0) > 0
    pair.node.dies_after = 1 << 30
    assert pair.node.core.store._reservations == {}
    found = pair.load(pages)
    assert all(stored <= there for stored, there in zip(done.ok, found.ok, strict=True))


def test_the_node_hears_of_the_end_of_a_load_after_the_rank(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pages = chain("a", 4)
    pair.store(pages)
    pair.mover.settle()
    pair.node.kinds()
    assert pair.load(pages).ok == b"\x01" * 4
    assert pair.node.kinds() == ["Locate"]
    assert pair.node.core.store.pinned_bytes == 4 * PAGE
    pair.mover.settle()
    assert pair.node.kinds() == ["Release"]
    assert pair.node.core.store.pinned_bytes == 0
    assert pair.node.core.store.stats.loaded == 4


def test_damage_is_reported_before_the_answer(make_pair: Callable[..., Pair]) -> None:
    """Who asks again at once must not be given the same bytes."""
    pair = make_pair()
    pages = chain("a", 4)
    pair.store(pages)
    home = pair.node.core.store._index[NS]
    pair.node._kept.view[home.pages[pages[2]].part(home).offset] ^= 0xFF
    pair.node.kinds()
    done = pair.load(pages)
    assert (done.ok, done.reasons) == (b"\x01\x01\x00\x01", {"checksum": 1})
    assert pair.node.kinds() == ["Locate", "Release"]
    assert pair.load(pages).reasons == {"absent": 1}


def test_a_load_after_one_that_was_all_here_is_looked_up_in_parts(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pages = chain("a", 40)
    pair.store(pages)
    pair.mover.settle()
    pair.node.kinds()
    for expected in (["Locate", "Release"], ["Locate", "Locate", "Release", "Release", "Touch"]):
        assert pair.load(pages).ok == b"\x01" * 40
        pair.mover.settle()
        assert pair.node.kinds() == expected
        assert pair.node.core.store.pinned_bytes == 0
    absent = [*pages[:20], *chain("b", 20)]
    done = pair.load(absent)
    assert done.reasons == {"absent": 20}
    assert done.ok == b"\x01" * 20 + bytes(20)
    pair.mover.settle()
    pair.node.kinds()
    assert pair.load(pages).ok == b"\x01" * 40
    pair.mover.settle()
    assert pair.node.kinds() == ["Locate", "Release"], "one question again, until all is here again"


def test_a_node_that_dies_between_two_parts_of_a_load_costs_misses_and_no_mover(make_pair: Callable[..., Pair]) -> None:
    """The connection was lost while the node was told of damage in the first part; the mover died of it in the second."""
    pair = make_pair()
    pages = chain("a", 40)
    pair.store(pages)
    pair.load(pages)  # all here: the next one is asked for in parts
    core = pair.node.core
    core.store.discard(NS, pages[0], "checksum")
    home = core.store._index[NS]
    pair.node._kept.view[home.pages[pages[1]].part(home).offset] ^= 0xFF

    def lost(_message: p.Message, _deadline: float) -> None:
        pair.node.segment = None

    pair.node.tell = lost  # type: ignore[method-assign]
    done = pair.load(pages)
    assert done.ok == bytes(2) + b"\x01" * 8 + bytes(30)
    assert done.reasons == {"absent": 1, "checksum": 1, "node_down": 30}


def test_the_head_of_what_was_loaded_in_parts_outlives_its_tail(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pages = chain("a", 40)
    pair.store(pages)
    pair.mover.settle()
    for _ in range(2):
        assert pair.load(pages).ok == b"\x01" * 40
        pair.mover.settle()
        assert [page.hash for page in pair.node.core.store.coldest(40)] == pages[::-1]


def test_an_answer_that_nobody_took_is_no_answer_to_the_next_question(start_node: Callable[..., NodeProcess]) -> None:
    node = start_node()
    link = NodeLink(node.socket, "load", "test")
    until = time.monotonic() + 60
    assert isinstance(link.ask(p.Locate(NS, page_hash(1), PAGE), until), p.Located)
    link.ask_ahead(p.Locate(NS, page_hash(1) + page_hash(2), PAGE), until)
    answer = link.ask(p.Locate(NS, page_hash(1), PAGE), until)
    assert isinstance(answer, p.Located)
    assert len(answer.status) == 1
    with pytest.raises(NodeUnavailable):
        link.take(until)
    link.drop()


@pytest.mark.parametrize("copy_mode", ["memfd", "segment"])
def test_movers_are_connected_before_the_first_batch(start_node: Callable[..., NodeProcess], copy_mode: str) -> None:
    """The first batch after a start had to start movers, connect them and fault the segment in, in its own time."""
    rank = FakeRank(start_node().settings(copy_mode=copy_mode))
    try:
        assert all(pid is not None for pid in rank.client.mover_pids().values())

        def connections() -> int:
            status = rank.client.status()
            return int(status.node["connections"]) if status is not None else 0

        wait_until(lambda: connections() >= 3, 60, "both movers and the rank are connected")
    finally:
        rank.close()


def store_often(parts: Parts, seconds: dict[bool, float], times: int) -> list[bool]:
    ways: list[bool] = []
    for _ in range(times):
        ways.append(parts.split())
        parts.took(ways[-1], seconds[ways[-1]])
    return ways


@pytest.mark.parametrize("better", [True, False])
def test_large_stores_are_made_the_way_that_is_faster_and_now_and_then_the_other(better: bool) -> None:
    """Where no core is idle, messages that overlap with copies take the mover's own time."""
    parts = Parts()
    ways = store_often(parts, {better: 1e-9, not better: 2e-9}, 200)
    assert ways[:6] == [True] * 3 + [False] * 3, "both are tried"
    assert 0 < ways[6:].count(not better) < 20
    after = store_often(parts, {better: 2e-9, not better: 1e-9}, 200)
    assert after[-100:].count(not better) > 80, "what has become slower is left"


def test_stores_go_on_whichever_way_is_tried(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    kinds = []
    for number in range(8):
        pages = chain(f"c{number}", 30)
        assert pair.store(pages).ok == b"\x01" * 30
        pair.mover.settle()
        kinds.append(pair.node.kinds().count("Reserve"))
        assert pair.load(pages).ok == b"\x01" * 30
        pair.mover.settle()
        pair.node.kinds()
    assert kinds[:6] == [3, 3, 3, 1, 1, 1]
    assert set(kinds[6:]) <= {1, 3}


class Served:
    """A node's core behind a real socket, which takes little at a time."""

    def __init__(self, path: str, dram: int) -> None:
        self._core = NodeCore("node", b"i" * 8, Store(dram), masters=False, log=lambda *_: None)
        self._lock = threading.Lock()
        self._dram, self._fd = dram, create_memfd("segment", dram)
        self._owners = itertools.count(1)
        self.afterwards: Callable[[], object] = lambda: None
        """What it does when an answer is on its way."""
        self._server = RankServer(self, path)
        self._server.bind()
        self._server.start()

    def welcome(self, version: int, role: str, *, cold: bool) -> tuple[p.Welcome, list[int]]:
        return p.Welcome(version, "node", b"i" * 8, self._dram), [self._fd]

    def handle(self, owner: int, message: p.Message) -> p.Message | None:
        with self._lock:
            try:
                next(self._core.handle(owner, message, 0.0))
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        raise AssertionError("there is no master to ask")

    def answered(self, message: p.Message) -> None:
        self.afterwards()

    def gone(self, owner: int) -> None:
        with self._lock:
            self._core.drop_owner(owner)

    def new_owner(self) -> int:
        return next(self._owners)

    def close(self) -> None:
        self._server.hang_up()
        self._server.close()
        os.close(self._fd)


def test_a_node_answers_before_it_does_what_nobody_waits_for(tmp_path: Path) -> None:
    node = Served(str(tmp_path / "node.sock"), 1 << 20)
    link = NodeLink(str(tmp_path / "node.sock"), "store", "test")
    answered = threading.Event()
    node.afterwards = lambda: answered.wait(30.0)
    try:
        reply = link.ask(p.Reserve(NS, page_hash("a"), 4096), time.monotonic() + 20.0)
        assert isinstance(reply, p.Reserved)
    finally:
        answered.set()
        link.drop()
        node.close()


def tight(sock: socket.socket) -> Wire:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 10)
    return Wire(sock)


def test_a_huge_batch_does_not_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mover and node each waited for the other to read: what was asked ahead, and the answers to it, filled the socket both
    ways. It took 70,000 pages, or here fewer and a smaller socket."""
    monkeypatch.setattr("hicache_mooncake.node.rank_server.Wire", tight)
    monkeypatch.setattr("hicache_mooncake.wire.Wire", tight)
    count, size = 10_000, 128
    pages, bodies = chain("a", count), random.Random(1).randbytes(count * size)
    fd = create_memfd("engine", count * size)
    engine = Mapping(fd, count * size, writable=True)
    node = Served(str(tmp_path / "node.sock"), 64 << 20)
    link = NodeLink(str(tmp_path / "node.sock"), "load", "test")
    mover = Mover(MappedMemory([p.Region(BASE, count * size, 0)], [fd]), link, os.getpid())
    numbers = array("q", range(count)).tobytes()
    try:
        engine.view[:] = bodies
        for op in ("store", "load", "load"):  # a load after one that was all here is asked for in parts
            done = mover.run(p.Transfer(op, NS, b"".join(pages), [p.Run(BASE, size, size)], numbers, 60.0))
            mover.settle()
            assert done.ok == b"\x01" * count, done.reasons
            assert engine.view == bodies
            engine.view[:] = bytes(count * size)
    finally:
        mover.close()
        link.drop()
        node.close()
        engine.close()
        os.close(fd)
