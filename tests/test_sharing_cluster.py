"""Prefill and decode engines that can never share, told of by their ranks: what nodes, masters and engines say of it."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake import sharing
from hicache_mooncake.client import introduction
from hicache_mooncake.client.introduction import Introduction
from hicache_mooncake.config import load_settings
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.service import Node
from hicache_mooncake.node.store import Store
from hicache_mooncake.sharing import DECODE, EVERY_S, OFFLOAD, PREFILL, SETTLED_S
from hicache_mooncake.wire import Wire, WireClosed, connect
from tests import old_protocol as old
from tests.conftest import START_S, wait_until
from tests.test_link_core import Net, joined, sent
from tests.test_master_server import Running
from tests.test_node_core import make_core
from tests.test_rolling_upgrade import Wire as MixedVersions
from tests.test_sharing import engine

PAGE_SIZE = [("page_size", "64", "16")]


# --------------------------------------------------------------------------- node and master, without sockets


def two_nodes(**decode: int) -> Net:
    net = Net()
    net.master("m1")
    net.node("a", "m1").engines = 1, engine("p", PREFILL, tp=2)
    net.node("b", "m1").engines = 7, engine("d", DECODE, tp=2, writer=OFFLOAD, **({"page_size": 16} | decode))
    net.until(lambda: joined(net), 5)
    return net


def differing(net: Net, node: str) -> list[list[tuple[str, str, str]]]:
    return [pair.differences for pair in net.nodes[node].core.unshared]


def test_both_nodes_hear_from_their_master_what_differs() -> None:
    net = two_nodes()
    net.run(SETTLED_S + 2 * EVERY_S + 2)
    assert differing(net, "a") == differing(net, "b") == [PAGE_SIZE]
    notes = [text for _, text in net.masters["m1"].notes]  # type: ignore[union-attr]
    assert [text for text in notes if "page_size is 64 in prefill and 16 in decode" in text] != []
    assert len(sent(net, p.Engines, "a")) == 1, "told once, and not with every beat"
    net.run(60)
    assert sum("page_size" in text for _, text in net.masters["m1"].notes) == 1, "said once"  # type: ignore[union-attr]


def test_sides_that_share_hear_nothing() -> None:
    net = two_nodes(page_size=64)
    net.run(SETTLED_S + 5)
    assert differing(net, "a") == differing(net, "b") == []


def test_an_engine_that_is_started_anew_as_it_should_be_ends_it() -> None:
    net = two_nodes()
    net.run(SETTLED_S + 5)
    net.nodes["b"].engines = 8, []
    net.until(lambda: not differing(net, "a") and not differing(net, "b"), 5)
    net.nodes["b"].engines = 9, engine("d", DECODE, tp=2, writer=OFFLOAD)
    net.run(SETTLED_S + 5)
    assert differing(net, "a") == []


def test_a_node_that_is_gone_takes_its_engines_along() -> None:
    net = two_nodes()
    net.run(SETTLED_S + 5)
    del net.nodes["b"]
    core = net.masters["m1"]
    net.until(lambda: not differing(net, "a"), 90)
    assert core.sharing.roles() == {"prefill": 1}  # type: ignore[union-attr]


def test_a_master_that_restarts_is_told_again() -> None:
    net = two_nodes()
    net.run(SETTLED_S + 5)
    net.master("m1")
    net.until(lambda: net.masters["m1"].sharing.roles() == {"prefill": 1, "decode": 1}, 30)  # type: ignore[union-attr]
    net.run(SETTLED_S + 5)
    assert differing(net, "a") == [PAGE_SIZE]


def test_what_is_lost_on_the_way_is_told_again() -> None:
    net = two_nodes()
    net.run(3)
    net.bad = True
    for number in range(20):
        fields = {"page_size": 16} if number % 2 else {"page_size": 32}
        net.nodes["b"].engines = 100 + number, engine("d", DECODE, tp=2, **fields)
        net.run(0.7)
    net.bad = False
    net.run(SETTLED_S + 8)
    assert differing(net, "a") == differing(net, "b") == [PAGE_SIZE]


def test_a_life_of_a_node_with_no_engines_does_not_inherit_those_of_the_last_one() -> None:
    net = two_nodes()
    net.run(SETTLED_S + 5)
    net.node("b", "m1")
    net.until(lambda: net.masters["m1"].sharing.roles() == {"prefill": 1}, 10)  # type: ignore[union-attr]


def test_a_master_of_version_1_is_told_of_no_engines_and_a_node_of_version_1_says_none() -> None:
    mixed = MixedVersions()
    mixed.answer("old", old.Join(1, 1, "old", b"i1", "10.0.0.1", 7000, 1 << 30, 0))
    mixed.answer("new", p.Join(1, 2, "new", b"i1", "10.0.0.2", 7000, 1 << 30, 0, "host-2"))
    assert mixed.say("new", p.Engines("new", b"i1", 3, [*engine("p", PREFILL), *engine("d", DECODE, page_size=16)])) == []
    mixed.now += SETTLED_S + EVERY_S
    reply = mixed.answer("old", old.Beat("old", b"i1", 0, 10, 20, 2, 3, 4))
    assert reply == old.BeatReply(b"master-1", True, want_snapshot=False), "it reads what it knows of a longer answer"
    reply = mixed.answer("new", p.Beat("new", b"i1", 0, 10, 20, 2, engines=3))
    assert isinstance(reply, p.BeatReply)
    assert not reply.want_engines
    assert [pair.differences for pair in reply.unshared] == [PAGE_SIZE]
    assert isinstance(mixed.answer("old", old.ClusterStatus()), old.ClusterReport)


def test_a_stranger_to_a_master_is_told_to_join_and_is_not_kept() -> None:
    mixed = MixedVersions()
    reply = mixed.answer("new", p.Engines("new", b"i1", 3, engine("p", PREFILL)))
    assert isinstance(reply, p.BeatReply)
    assert not reply.known
    assert mixed.core.sharing.ranks() == []


def test_a_node_that_tells_of_too_many_ranks_is_not_heard() -> None:
    mixed = MixedVersions()
    mixed.answer("new", p.Join(1, 2, "new", b"i1", "10.0.0.2", 7000, 1 << 30, 0, "host-2"))
    ranks = engine("p", PREFILL, tp=sharing.MAX_RANKS_OF_SOURCE + 1)
    with pytest.raises(p.ProtocolError):
        mixed.say("new", p.Engines("new", b"i1", 3, ranks))


# --------------------------------------------------------------------------- a node's own part


def test_a_node_tells_of_a_rank_for_as_long_as_its_connection_lives() -> None:
    core = make_core()
    first, second = engine("d", DECODE, tp=2)
    core.describe(1, first, 10.0)
    number, ranks = core.engines_told
    assert list(ranks) == [first]
    core.describe(1, msgspec.structs.replace(first, counts={"stored": 5}), 20.0)
    assert core.engines_told == (number, ranks), "what only counts is not news"
    core.describe(2, second, 20.0)
    assert [rank.rank for rank in core.engines_told[1]] == [(0, 0, 0), (1, 0, 0)]
    core.drop_owner(1)
    core.validate()
    later, ranks = core.engines_told
    assert list(ranks) == [second]
    assert later > number
    core.drop_owner(2)
    core.drop_owner(3)
    assert list(core.engines_told[1]) == []


def test_nothing_stays_of_a_rank_that_said_too_much() -> None:
    core = make_core()
    (rank,) = engine("d", DECODE)
    rank.pools[0].namespaces = [bytes(16)] * sharing.MAX_RANK_BYTES
    core.describe(1, rank, 10.0)
    assert list(core.engines_told[1]) == []
    core.drop_owner(1)
    assert core.sharing.sources() == []


def test_two_lives_of_a_node_do_not_count_alike() -> None:
    numbers = set()
    for incarnation in (b"12345678", b"abcdefgh"):
        core = NodeCore("a", incarnation, Store(1 << 20), masters=True, log=lambda *_: None)
        core.describe(1, engine("d", DECODE)[0], 10.0)
        numbers.add(core.engines_told[0])
    assert len(numbers) == 2


# --------------------------------------------------------------------------- processes, sockets, threads


class FakeRank:
    """The part of an engine's rank that says who it is, as its backend does."""

    def __init__(self, socket: str, rank: p.RankIdentity) -> None:
        settings = load_settings({}, {}, {"socket": socket, "node": "external"})[0]
        self.rank: p.RankIdentity | None = rank
        self.heard: list[p.Unshared] = []
        self.answers = 0
        self.introduction = Introduction(settings, "rank", lambda: self.rank, self._hear, first_s=0.05, every_s=0.2)
        self.introduction.start()

    def _hear(self, unshared: list[p.Unshared]) -> None:
        self.heard, self.answers = unshared, self.answers + 1

    def close(self) -> None:
        self.introduction.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "SETTLED_S", 1.0)
    monkeypatch.setattr(sharing, "EVERY_S", 0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(name: str, *masters: str) -> Node:
        options = {
            "socket": str(tmp_path / f"{name}.sock"),
            "dram": "4MiB",
            "node": "embedded",
            "metrics": "127.0.0.1:0",
            "listen": "127.0.0.1:0",
            "name": name,
            "host_id": name,
            "master": list(masters),
        }
        nodes.append(Node(load_settings({}, {}, options)[0]))
        nodes[-1].start()
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop()


@pytest.fixture
def ranks() -> Iterator[Callable[[Node, list[p.RankIdentity]], list[FakeRank]]]:
    made: list[FakeRank] = []

    def make(node: Node, identities: list[p.RankIdentity]) -> list[FakeRank]:
        made.extend(FakeRank(node.settings.socket, rank) for rank in identities)
        return made[-len(identities) :]

    yield make
    for rank in made:
        rank.close()


def scrape(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


def health(address: str) -> dict[str, object]:
    with urllib.request.urlopen(f"http://{address}/health", timeout=10) as answer:
        return dict(json.load(answer))


def test_two_hosts_and_a_master_all_say_what_differs(
    impatient: None,
    start: Callable[..., Node],
    ranks: Callable[[Node, list[p.RankIdentity]], list[FakeRank]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with contextlib.closing(Running(heartbeat_s=0.1, ttl_s=30.0)) as master:
        a, b = start("a", master.server.address), start("b", master.server.address)
        prefill = ranks(a, engine("p", PREFILL, tp=2))
        decode = ranks(b, engine("d", DECODE, tp=2, writer=OFFLOAD, page_size=16))
        wait_until(lambda: all(rank.heard for rank in (*prefill, *decode)), START_S, "all ranks know")
        assert [pair.differences for pair in decode[1].heard] == [PAGE_SIZE]
        for node in (a, b):
            assert scrape(node.metrics_address, "hicache_node_unshared_engines") == 1
            assert scrape(node.metrics_address, "hicache_node_engines") == 1
            (text,) = health(node.metrics_address)["unshared"]  # type: ignore[misc]
            assert "page_size is 64 in prefill and 16 in decode" in text
            report = node.handle(0, p.AdminStatus())
            assert isinstance(report, p.AdminReport)
            assert [pair.differences for pair in report.unshared] == [PAGE_SIZE]
            assert len(report.ranks) == 2
        address = master.server.metrics_address
        assert address is not None
        wait_until(lambda: scrape(address, "hicache_master_unshared_engines") == 2, START_S)
        assert scrape(address, 'hicache_master_engines{role="decode"}') == 1
        assert "page_size" in str(health(address)["unshared"])
        said = [record for record in caplog.records if "page_size is 64" in record.getMessage()]
        assert {record.name for record in said} == {"hicache_master", "hicache_mooncake.node.service"}
        assert all(record.levelno == logging.WARNING for record in said)

        for rank in decode:  # started anew as it should be
            rank.close()
        again = ranks(b, engine("d", DECODE, tp=2, writer=OFFLOAD))
        wait_until(lambda: scrape(address, "hicache_master_unshared_engines") == 0, START_S)
        wait_until(lambda: scrape(a.metrics_address, "hicache_node_unshared_engines") == 0, START_S)
        wait_until(lambda: all(not rank.heard for rank in (*prefill, *again)), START_S)


def test_without_a_master_a_node_compares_the_engines_of_its_host(
    impatient: None, start: Callable[..., Node], ranks: Callable[[Node, list[p.RankIdentity]], list[FakeRank]]
) -> None:
    node = start("a")
    both = ranks(node, engine("p", PREFILL, chain="bigrams") + engine("d", DECODE, writer=OFFLOAD))
    wait_until(lambda: all(rank.heard for rank in both), START_S, "both ranks know")
    assert both[0].heard[0].differences == [("chain", "bigrams", "plain")]
    assert scrape(node.metrics_address, "hicache_node_unshared_engines") == 2
    both[0].close()
    wait_until(lambda: not both[1].heard, START_S, "it is alone now")
    wait_until(lambda: scrape(node.metrics_address, "hicache_node_engines") == 1, START_S)


def test_a_rank_finds_its_node_again(
    start: Callable[..., Node], ranks: Callable[[Node, list[p.RankIdentity]], list[FakeRank]]
) -> None:
    node = start("a")
    (rank,) = ranks(node, engine("d", DECODE))
    wait_until(lambda: rank.answers > 0, START_S)
    node.stop()
    node = start("a")
    wait_until(lambda: scrape(node.metrics_address, "hicache_node_engines") == 1, START_S, "it says again who it is")


def test_nothing_is_said_before_it_is_known(
    start: Callable[..., Node], ranks: Callable[[Node, list[p.RankIdentity]], list[FakeRank]]
) -> None:
    node = start("a")
    (rank,) = ranks(node, engine("d", DECODE))
    wait_until(lambda: rank.answers > 0, START_S)
    rank.rank = None
    before = rank.answers
    time.sleep(0.5)
    assert rank.answers - before <= 1


@contextlib.contextmanager
def scripted(path: Path, version: int, *, silent: bool = False) -> Iterator[list[type]]:
    """A node of another release; yields the kinds of what it is told."""
    import socket

    told: list[type] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(8)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                wire = Wire(listener.accept()[0])
                with contextlib.suppress(WireClosed, p.ProtocolError):
                    while True:
                        message = wire.receive(p.decoder(p.FromClient))
                        told.append(type(message))
                        if isinstance(message, p.Hello):
                            wire.send(p.Welcome(version, "n", b"i", 1))
                        elif not silent:
                            raise p.ProtocolError("not known")
                wire.close()

    threading.Thread(target=serve, daemon=True).start()
    yield told
    listener.close()


def test_a_node_of_version_1_is_told_nothing(tmp_path: Path) -> None:
    with scripted(tmp_path / "n.sock", 1) as told:
        with contextlib.closing(FakeRank(str(tmp_path / "n.sock"), engine("d", DECODE)[0])):
            wait_until(lambda: told, START_S)
            time.sleep(0.5)
        assert told == [p.Hello], "and not asked again and again"


def test_a_node_that_does_not_answer_costs_nobody_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduction, "_ANSWER_S", 0.3)
    with scripted(tmp_path / "n.sock", 2, silent=True) as told:
        rank = FakeRank(str(tmp_path / "n.sock"), engine("d", DECODE)[0])
        wait_until(lambda: told.count(p.Describe) >= 2, START_S, "it is tried again")
        rank.close()
        thread = next((t for t in threading.enumerate() if t.name == "introduction"), None)
        if thread is not None:
            thread.join(START_S)
            assert not thread.is_alive()


def test_whoever_describes_himself_with_garbage_loses_his_connection_and_no_more(start: Callable[..., Node]) -> None:
    node = start("a")
    wire = connect(node.settings.socket, 5.0)
    wire.send(p.Hello(1, 2, "identity", "x"))
    decoder = p.decoder(p.FromNode)
    assert isinstance(wire.receive(decoder, time.monotonic() + 10), p.Welcome)
    rank = engine("d", DECODE)[0]
    rank.pools[0].fields = {str(n): "x" * 1000 for n in range(1000)}
    wire.send(p.Describe(rank))
    assert wire.receive(decoder, time.monotonic() + 10) == p.Described([])
    wire.close()
    wait_until(lambda: node.report()["engines"] == 0, START_S)
