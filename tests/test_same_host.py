"""Several nodes on one host: a rank copies a neighbour's pages from the neighbour's segment, and whatever goes wrong with that
goes by tcp instead."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client.mover import Mover
from hicache_mooncake.client.node_link import NodeLink
from hicache_mooncake.client.siblings import MAX_NEIGHBOURS, Siblings
from hicache_mooncake.testing.local import FakeRank, page_hash, pattern
from hicache_mooncake.transfer.memory import ForeignMemory
from hicache_mooncake.wire import Wire, connect
from tests.conftest import MasterProcess, NodeProcess, wait_until
from tests.test_pool_local import Admin

NS = b"n" * 16
PAGE = 64 << 10
HERE = ("--host-id", "here")
PATIENT_S = 7.5


def hashes(*names: object) -> list[bytes]:
    return [page_hash(name) for name in names]


class Host:
    """Nodes on one host, or on several, each with a rank."""

    def __init__(self, start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]) -> None:
        self._start_node = start_node
        self.master = start_master()
        self.nodes: dict[str, NodeProcess] = {}
        self.ranks: dict[str, FakeRank] = {}

    def add(self, name: str, *options: str, shared: bool = False) -> FakeRank:
        node = self._start_node(name, "64MiB", (self.master.address,), options or HERE)
        self.nodes[name] = node
        self.ranks[name] = FakeRank(node.settings(deadline_s=PATIENT_S), page_bytes=PAGE, shared=shared)
        return self.ranks[name]

    def ready(self) -> None:
        def active() -> bool:
            reports = [rank.client.status() for rank in self.ranks.values()]
            states = [[node.state for node in report.cluster] if report else [] for report in reports]
            return all(state.count("active") == len(self.nodes) for state in states)

        wait_until(active, 60, "all nodes active")

    def found(self, reader: str, pages: list[bytes]) -> FakeRank:
        rank = self.ranks[reader]
        wait_until(lambda: rank.exists(NS, pages) == len(pages), 60, "pages found through the master")
        return rank

    def figures(self, name: str) -> dict[str, int | float | str | bool]:
        report = self.ranks[name].client.status()
        assert report is not None
        return report.node

    def sent(self, name: str) -> int:
        return int(self.figures(name)["remote_sent_bytes"])

    def close(self) -> None:
        for node in self.nodes.values():
            node.signal(signal.SIGCONT)
        for rank in self.ranks.values():
            rank.close()


@pytest.fixture
def host(start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]) -> Iterator[Host]:
    made = Host(start_master, start_node)
    yield made
    made.close()


def test_a_neighbours_pages_are_copied_from_its_segment(host: Host) -> None:
    a, _ = host.add("a"), host.add("b")
    host.ready()
    pages = hashes(*range(12))
    assert a.store(NS, pages).ok == b"\x01" * 12
    b = host.found("b", pages)
    for _ in range(3):
        outcome = b.load(NS, pages)
        assert outcome.ok == b"\x01" * 12, outcome.reasons
        assert (outcome.local_bytes, outcome.remote_bytes) == (12 * PAGE, 0)
    wait_until(lambda: host.figures("a")["loaded"] == 36, 60, "the neighbour hears that they arrived")
    assert host.figures("a")["pinned_bytes"] == 0
    assert host.sent("a") == 0
    assert host.figures("b")["replicas"] == 0, "what is as near as that needs no replica"


def test_ranks_that_share_pages_each_take_them_from_the_neighbour(host: Host) -> None:
    """No claim, no wait for each other, and no copy of them here."""
    a, _ = host.add("a", shared=True), host.add("b", shared=True)
    host.ready()
    pages = hashes(*range(8))
    a.store(NS, pages)
    b = host.found("b", pages)
    assert b.load(NS, pages).ok == b"\x01" * 8
    assert host.figures("b")["objects"] == 0
    assert host.sent("a") == 0


@pytest.mark.parametrize(
    ("holder", "reader"),
    [
        (("--host-id", "there"), HERE),
        ((*HERE, "--transport", "tcp"), HERE),
        (HERE, (*HERE, "--transport", "tcp")),
    ],
    ids=["another host", "tcp at the holder", "tcp at the reader"],
)
def test_others_are_read_by_tcp(host: Host, holder: tuple[str, ...], reader: tuple[str, ...]) -> None:
    a, _ = host.add("a", *holder), host.add("b", *reader)
    host.ready()
    pages = hashes(*range(4))
    a.store(NS, pages)
    outcome = host.found("b", pages).load(NS, pages)
    assert outcome.ok == b"\x01" * 4, outcome.reasons
    assert (outcome.local_bytes, outcome.remote_bytes) == (0, 4 * PAGE)


def test_a_neighbour_whose_socket_is_not_to_be_reached_is_read_by_tcp(host: Host) -> None:
    """As in another mount namespace, or another user's."""
    a, _ = host.add("a"), host.add("b")
    host.ready()
    pages = hashes(*range(4))
    a.store(NS, pages)
    b = host.found("b", pages)
    os.unlink(host.nodes["a"].socket)
    for _ in range(2):
        outcome = b.load(NS, pages)
        assert outcome.ok == b"\x01" * 4, outcome.reasons
        assert outcome.remote_bytes == 4 * PAGE


def test_pages_of_a_neighbour_that_cannot_be_reached_are_fetched_once_for_all_ranks(host: Host) -> None:
    """As another host's. Each rank fetched them for itself, every time."""
    a, first = host.add("a", shared=True), host.add("b", shared=True)
    second = FakeRank(host.nodes["b"].settings(deadline_s=PATIENT_S), page_bytes=PAGE, shared=True)
    try:
        host.ready()
        pages = hashes(*range(8))
        a.store(NS, pages)
        host.found("b", pages)
        os.unlink(host.nodes["a"].socket)
        assert first.load(NS, pages[:1]).ok == b"\x01"
        log = host.nodes["b"].log
        assert log is not None
        wait_until(
            lambda: "node a of this host cannot be read through its segment" in log.read_text(), 30, "its node hears of it"
        )
        before = host.sent("a")
        for rank in (first, second):
            assert rank.load(NS, pages).ok == b"\x01" * 8
        assert host.sent("a") - before == 8 * PAGE
        assert host.figures("b")["objects"] == 8
    finally:
        second.close()


def test_pages_here_at_a_neighbour_and_far_away_are_one_batch(host: Host) -> None:
    a, b, c = host.add("a"), host.add("b"), host.add("c", "--host-id", "there")
    host.ready()
    chain = hashes(*range(9))
    a.store(NS, chain[0:3])
    b.store(NS, chain[3:6])
    c.store(NS, chain[6:9])
    outcome = host.found("b", chain).load(NS, chain)
    assert outcome.ok == b"\x01" * 9, outcome.reasons
    assert (outcome.local_bytes, outcome.remote_bytes) == (6 * PAGE, 3 * PAGE)
    assert host.sent("a") == 0


def test_a_neighbour_that_hangs_costs_part_of_the_time_and_the_other_holder_gives_the_pages(host: Host) -> None:
    a, _, c = host.add("a"), host.add("b", *HERE, "--replicate-after", "0"), host.add("c", "--host-id", "there")
    host.ready()
    pages = hashes(*range(4))
    for rank in (a, c):
        rank.store(NS, pages)
    b = host.found("b", pages)
    wait_until(lambda: b.load(NS, pages).local_bytes == 4 * PAGE, 60, "read from the neighbour")
    host.nodes["a"].signal(signal.SIGSTOP)
    outcome = b.load(NS, pages)
    assert outcome.ok == b"\x01" * 4, outcome.reasons
    assert outcome.remote_bytes == 4 * PAGE
    host.nodes["a"].signal(signal.SIGCONT)
    wait_until(lambda: b.load(NS, pages).local_bytes == 4 * PAGE, 100, "it is asked again")


def test_damage_in_a_neighbours_segment_is_a_miss_and_told_to_it(host: Host) -> None:
    a, _ = host.add("a"), host.add("b")
    host.ready()
    pages = hashes(*range(4))
    a.store(NS, pages)
    b = host.found("b", pages)
    admin = Admin(host.nodes["a"])
    admin.damage(NS, pages[2], PAGE, at=777)
    admin.close()
    outcome = b.load(NS, pages)
    assert outcome.ok == b"\x01\x01\x00\x01"
    wait_until(lambda: host.figures("a")["discarded"] == 1, 60, "the neighbour drops it")


# --------------------------------------------------------------------------- the connection alone


@pytest.fixture
def siblings() -> Iterator[Siblings]:
    made = Siblings("test")
    yield made
    made.close()


def told_of(node: NodeProcess, incarnation: bytes = b"") -> p.Peer:
    """As a master would name it, in this life of it or another."""
    wire = connect(node.socket, 20.0)
    try:
        wire.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, "query", "test"))
        welcome = wire.receive(p.decoder(p.FromNode), time.monotonic() + 20)
    finally:
        wire.close()
    assert isinstance(welcome, p.Welcome)
    return p.Peer(node.name, incarnation or welcome.incarnation, "127.0.0.1", 1, node.socket)


def question(pages: list[bytes]) -> p.Locate:
    return p.Locate(NS, b"".join(pages), PAGE, here_only=True)


def test_what_was_located_can_be_read_after_the_neighbour_has_died(
    start_node: Callable[..., NodeProcess], siblings: Siblings
) -> None:
    node = start_node("a", "64MiB")
    rank = FakeRank(node.settings(deadline_s=PATIENT_S), page_bytes=PAGE)
    pages = hashes(1, 2)
    assert rank.store(NS, pages).ok == b"\x01\x01"
    rank.close()
    until = time.monotonic() + 60
    neighbour = siblings.ask(told_of(node), question(pages), until)
    assert neighbour is not None
    answer = siblings.answer(neighbour, until)
    assert answer is not None
    located, segment = answer
    assert list(located.status) == [p.LOCAL, p.LOCAL]
    node.kill()
    for page, at in zip(pages, located.where, strict=True):
        assert bytes(segment.view[at : at + PAGE]) == pattern(page, PAGE)
    siblings.tell(neighbour, p.Release(located.pin))
    wait_until(lambda: poll_readable(siblings), 60, "its end is seen")
    siblings.drop(siblings.filenos())
    assert siblings.filenos() == []


def poll_readable(siblings: Siblings) -> bool:
    poll = select.poll()
    for fd in siblings.filenos():
        poll.register(fd, select.POLLIN)
    return not siblings.filenos() or bool(poll.poll(0))


def test_another_life_of_the_node_is_not_taken_for_it(start_node: Callable[..., NodeProcess], siblings: Siblings) -> None:
    node = start_node("a", "16MiB")
    stranger = told_of(node, incarnation=b"former--")
    until = time.monotonic() + 60
    neighbour = siblings.ask(stranger, question(hashes(1)), until)
    assert neighbour is not None
    assert siblings.answer(neighbour, until) is None
    assert siblings.ask(stranger, question(hashes(1)), until) is None, "and it is left alone"
    other = siblings.ask(told_of(node), question(hashes(1)), until)
    assert other is not None
    answer = siblings.answer(other, until)
    assert answer is not None
    assert list(answer[0].status) == [p.MISS]


def test_who_cannot_be_reached_is_told_of_each_time_that_it_is_asked_for(
    start_node: Callable[..., NodeProcess], siblings: Siblings, tmp_path: Path
) -> None:
    """And who is slow, or takes no more, is not."""
    until = time.monotonic() + 60
    nowhere = p.Peer("a", b"i" * 8, "127.0.0.1", 1, str(tmp_path / "nowhere"))
    for _ in range(3):  # tried, and then left alone
        assert siblings.ask(nowhere, question(hashes(1)), until) is None
        ((node, incarnation, why),) = siblings.take_apart()
        assert (node, incarnation) == ("a", b"i" * 8)
        assert str(tmp_path / "nowhere") in why
    assert siblings.take_apart() == []
    elsewhere = told_of(start_node("b", "16MiB"))
    elsewhere.node = "c"  # its path leads to another node, as in containers that each have their own /run
    neighbour = siblings.ask(elsewhere, question(hashes(1)), until)
    assert neighbour is not None
    assert siblings.answer(neighbour, until) is None
    ((node, _, why),) = siblings.take_apart()
    assert node == "c"
    assert "it is b" in why


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Callable[[str], p.Peer]]:
    """Nodes that take connections and say nothing."""
    path = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(2 * MAX_NEIGHBOURS)
        yield lambda name: p.Peer(name, b"i" * 8, "127.0.0.1", 1, path)


def test_who_does_not_answer_is_left_alone_for_a_while(
    silent: Callable[[str], p.Peer], siblings: Siblings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_mooncake.client.siblings._FIRST_S", 60.0)
    peer = silent("a")
    neighbour = siblings.ask(peer, question(hashes(1)), time.monotonic() + 30)
    assert neighbour is not None
    assert siblings.answer(neighbour, time.monotonic() + 0.3) is None
    assert siblings.ask(peer, question(hashes(1)), time.monotonic() + 30) is None
    assert siblings.take_apart() == [], "it is there, and may answer again"
    assert siblings.filenos() == []


def test_an_answer_that_came_while_other_pages_were_copied_is_taken(
    start_node: Callable[..., NodeProcess], siblings: Siblings
) -> None:
    """Its pages went by tcp, and the neighbour was left alone for a while, because the asker's own copies had taken long."""
    node = start_node("a", "16MiB")
    for _ in range(2):  # with its welcome, and without
        neighbour = siblings.ask(told_of(node), question(hashes(1)), time.monotonic() + 60)
        assert neighbour is not None
        wait_until(lambda: poll_readable(siblings), 60, "it answers")
        over = time.monotonic()
        answer = siblings.answer(neighbour, over, over + 60)
        assert answer is not None
        assert list(answer[0].status) == [p.MISS]


def test_a_mover_without_work_lets_go_of_neighbours(
    start_node: Callable[..., NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection kept a node that nobody used any more, and all its memory, for as long as the engine slept."""
    monkeypatch.setattr("hicache_mooncake.client.siblings._IDLE_S", 0.5)
    monkeypatch.setattr("hicache_mooncake.client.mover._NEIGHBOURS_S", 0.05)
    node = start_node("a", "16MiB")
    ours, engines = socket.socketpair()
    mover = Mover(ForeignMemory(os.getpid(), []), NodeLink(node.socket, "load", "test"), os.getpid())
    until = time.monotonic() + 60
    neighbour = mover._siblings.ask(told_of(node), question(hashes(1)), until)
    assert neighbour is not None
    assert mover._siblings.answer(neighbour, until) is not None
    waiting = threading.Thread(target=mover.wait, args=(Wire(ours),), daemon=True)
    waiting.start()
    try:
        wait_until(lambda: mover._siblings.filenos() == [], 60, "it has let go")
    finally:
        engines.close()
        waiting.join(60)
        mover.close()
        ours.close()


def test_neighbours_are_bounded(silent: Callable[[str], p.Peer], siblings: Siblings) -> None:
    until = time.monotonic() + 60
    asked = [siblings.ask(silent(f"n{i}"), question(hashes(1)), until) for i in range(MAX_NEIGHBOURS + 3)]
    assert [neighbour is not None for neighbour in asked] == [True] * MAX_NEIGHBOURS + [False] * 3
    siblings.drop(())
    assert siblings.filenos() == [], "an answer that nobody took is no answer to the next question"
    assert siblings.ask(silent("another"), question(hashes(1)), until) is not None
