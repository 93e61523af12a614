"""A node's link without I/O: what it sends to real master cores while time passes, messages get lost, masters come and go."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import random
from collections.abc import Callable, Iterator

import pytest
from hicache_master.core import MasterCore

from hicache_mooncake.node import link_session
from hicache_mooncake.node.link_core import Busy, Close, Connect, JoinFacts, Keys, LinkCore, Usage, split_hashes
from hicache_mooncake.protocol import (
    Beat,
    BeatReply,
    ClearNamespace,
    ClusterReport,
    ClusterStatus,
    FromMaster,
    Join,
    Joined,
    Leave,
    Lookup,
    LookupReply,
    Message,
    Peer,
    Question,
    RankIdentity,
    Refused,
    Report,
    Room,
    Snapshot,
    ToMaster,
    Update,
    decoder,
    encode,
    select_hashes,
    shard_of,
)
from tests import old_protocol

NS = b"n" * 16
TICK_S = 0.02
_to_master, _from_master = decoder(ToMaster), decoder(FromMaster)


def page_hash(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


class Source:
    """What a node holds, by number, and what changed since it was asked."""

    def __init__(self) -> None:
        self.held: dict[int, None] = {}
        self.changes: list[tuple[int, bool]] = []
        self.busy = False
        self.lost = False
        self.figures = Usage(objects=1)
        self.cleared: list[bytes] = []
        self.snapshots = 0

    def add(self, *numbers: int) -> None:
        self.held.update(dict.fromkeys(numbers))
        self.changes += [(number, True) for number in numbers]

    def remove(self, *numbers: int) -> None:
        for number in numbers:
            self.held.pop(number, None)
        self.changes += [(number, False) for number in numbers]

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        self._check()
        now, self.changes = dict(self.changes[:limit]), self.changes[limit:]
        added = b"".join(page_hash(number) for number, is_added in now.items() if is_added)
        removed = b"".join(page_hash(number) for number, is_added in now.items() if not is_added)
        return ([(NS, added)] if added else []), ([(NS, removed)] if removed else [])

    def snapshot(self) -> Iterator[Keys]:
        self._check()
        self.snapshots += 1
        self.lost = False
        held = list(self.held)
        for at in range(0, len(held), 7):
            yield [(NS, b"".join(map(page_hash, held[at : at + 7])))]

    def changes_lost(self) -> bool:
        self._check()
        return self.lost

    def usage(self) -> Usage:
        self._check()
        return self.figures

    def on_clear(self, namespace: bytes) -> None:
        self._check()
        self.cleared.append(namespace)
        if namespace == NS:
            self.remove(*list(self.held))

    def _check(self) -> None:
        if self.busy:
            raise Busy


class Cold:
    """The same of a cold tier."""

    def __init__(self) -> None:
        self.source = Source()

    @property
    def changes_lost(self) -> bool:
        return self.source.changes_lost()

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        return self.source.drain_changes(limit)

    def snapshot_parts(self) -> Iterator[Keys]:
        return self.source.snapshot()


class Node:
    def __init__(self, net: Net, name: str, masters: tuple[str, ...], cold: Cold | None = None) -> None:
        self.name = name
        self.facts = JoinFacts(name, net.new_incarnation(), "10.0.0.1", 7000 + len(net.nodes), 1 << 30)
        self.source = Source()
        self.engines: tuple[int, list[RankIdentity]] = (0, [])
        self.core = LinkCore(
            masters,
            lambda: self.facts,
            self.source,
            random.Random(name),
            logging.getLogger("link"),
            self.source.on_clear,
            cold=cold,
            engines=lambda: self.engines,
        )
        self.connections: dict[str, int] = {}


class Net:
    """Nodes, masters and connections on a virtual clock. Messages to a master that is gone are lost in silence, as ZMQ does it.
    While `bad`, messages are lost, repeated and delivered out of order."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.bad = False
        self.loses: Callable[[str, Message], bool] = lambda node, message: False
        """Whether what a master tells a node is lost."""
        self.nodes: dict[str, Node] = {}
        self.masters: dict[str, MasterCore | OldMaster] = {}
        self.sent: list[tuple[str, str, Message]] = []
        """(node, master, message), everything that nodes sent."""
        self._numbers = itertools.count(1)
        self._wire: list[tuple[float, int, str, str, int, bytes, bool]] = []

    def new_incarnation(self) -> bytes:
        return next(self._numbers).to_bytes(8, "little")

    def master(self, address: str, shard: tuple[int, int] = (0, 1), **options: float) -> MasterCore:
        """Start a master at this address, empty."""
        core = MasterCore(self.new_incarnation(), shard=shard, rng=random.Random(self.rng.random()), **options)  # type: ignore[arg-type]
        self.masters[address] = core
        return core

    def node(self, name: str, *masters: str, cold: Cold | None = None) -> Node:
        self.nodes[name] = node = Node(self, name, masters, cold)
        return node

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = self.now + seconds
        while self.now < end and not until():
            self.now += TICK_S
            for address, core in self.masters.items():
                for receiver, message in core.tick(self.now):
                    self._to_node(receiver, address, message)
                if isinstance(core, MasterCore):
                    core.validate()
            for node in list(self.nodes.values()):
                self._drive(node)
            self._deliver()

    def until(self, condition: Callable[[], bool], within_s: float) -> float:
        """Run until it holds; returns how long that took."""
        began = self.now
        self.run(within_s, condition)
        assert condition(), f"not within {within_s} s"
        return self.now - began

    def knows(self, address: str, numbers: range, asker: str = "") -> dict[int, str]:
        """Which of these pages the master at this address answers, with their holders."""
        core = self.masters[address]
        question = Question(NS, b"".join(map(page_hash, numbers)), False)
        ((_, reply),) = core.handle(Lookup(1, [question], asker), b"?", self.now)
        assert isinstance(reply, LookupReply)
        (answer,) = reply.answers
        return {n: answer.peers[code - 1].node for n, code in zip(numbers, answer.holder, strict=True) if code}

    def state(self, node: str, master: str) -> str:
        return next(m.state for m in self.nodes[node].core.view().masters if m.master == master)

    def _drive(self, node: Node) -> None:
        core = node.core
        assert core.next_due(self.now) >= self.now
        for action in core.step(self.now):
            if isinstance(action, Connect):
                assert action.master not in node.connections, "one connection a master"
                node.connections[action.master] = next(self._numbers)
            elif isinstance(action, Close):
                node.connections.pop(action.master, None)
        core.validate()
        for address in list(node.connections):
            if address not in self.masters:
                continue  # nobody is there: it takes no messages
            for _ in range(16):
                message = core.take(address, self.now)
                core.validate()
                if message is None:
                    break
                self.sent.append((node.name, address, message))
                sender = f"{node.name} {node.connections[address]}".encode()
                self._put(node.name, address, node.connections[address], encode(message), True, sender)

    def _put(self, node: str, master: str, connection: int, body: bytes, to_master: bool, sender: bytes = b"") -> None:
        copies = 1
        if self.bad:
            copies = self.rng.choices((0, 1, 2), (0.05, 0.9, 0.05))[0]
        for _ in range(copies):
            arrival = self.now + (self.rng.random() * 0.3 if self.bad else 0.0)
            heapq.heappush(self._wire, (arrival, next(self._numbers), node, master, connection, body, to_master))

    def _to_node(self, receiver: bytes, master: str, message: Message) -> None:
        name, _, connection = receiver.decode().partition(" ")
        if name in self.nodes and not self.loses(name, message):
            self._put(name, master, int(connection), encode(message), False)

    def _deliver(self) -> None:
        while self._wire and self._wire[0][0] <= self.now:
            _, _, name, master, connection, body, to_master = heapq.heappop(self._wire)
            if to_master:
                core = self.masters.get(master)
                if core is not None:
                    for receiver, reply in core.handle(_to_master.decode(body), f"{name} {connection}".encode(), self.now):
                        self._to_node(receiver, master, reply)
            elif name in self.nodes and self.nodes[name].connections.get(master) == connection:
                self.nodes[name].core.received(master, _from_master.decode(body), self.now)
                self.nodes[name].core.validate()


class OldMaster:
    """A master of version 1 around today's core: it reads and writes what that version could."""

    def __init__(self, core: MasterCore) -> None:
        self._core = core
        self._decode = old_protocol.decoder(old_protocol.ToMaster).decode
        self.got: list[str] = []

    def tick(self, now: float) -> list[tuple[bytes, Message]]:
        return self._core.tick(now)

    def handle(self, message: Message, sender: bytes, now: float) -> list[tuple[bytes, Message]]:
        old = self._decode(encode(message))  # raises for what it does not know
        self.got.append(type(old).__name__)
        if isinstance(old, old_protocol.Join):
            old.version_max = min(old.version_max, old_protocol.PROTOCOL_MAX)  # as it negotiates
        replies = self._core.handle(_to_master.decode(old_protocol.encode(old)), sender, now)
        decode = old_protocol.decoder(old_protocol.FromMaster).decode
        return [(receiver, _from_master.decode(old_protocol.encode(decode(encode(r))))) for receiver, r in replies]


def joined(net: Net) -> bool:
    return all(m.state == "joined" for node in net.nodes.values() for m in node.core.view().masters)


def sent(net: Net, kind: type, node: str = "a") -> list[Message]:
    return [message for name, _, message in net.sent if name == node and isinstance(message, kind)]


# --------------------------------------------------------------------------- joining and staying


def test_a_master_is_asked_what_it_is_before_it_is_joined() -> None:
    net = Net()
    net.master("m1")
    net.node("a", "m1").source.add(1, 2, 3)
    net.until(lambda: net.knows("m1", range(5)) == {1: "a", 2: "a", 3: "a"}, 2)
    kinds = [type(message) for _, _, message in net.sent]
    assert kinds[:2] == [ClusterStatus, Join]
    assert net.sent[0][2] == ClusterStatus(brief=True)


def test_hours_of_silence_later_the_node_is_still_a_member() -> None:
    """P55: with the defaults on both sides, nothing to do for hours, and a clock that runs fast."""
    net = Net()
    core = net.master("m1")
    node = net.node("a", "m1")
    node.source.add(1)
    net.until(lambda: joined(net), 2)
    while net.now < 1000.0 + 7_200:
        due = node.core.next_due(net.now)
        assert due - net.now <= core.heartbeat_s
        net.now = max(net.now, due) - TICK_S
        net.run(TICK_S)
        net.now += 0.5  # and a shell that is late now and then
        net.sent.clear()
    assert net.knows("m1", range(3)) == {1: "a"}
    node.source.add(2)
    net.until(lambda: net.knows("m1", range(3)) == {1: "a", 2: "a"}, 1)
    assert node.core.counters["joins"] == 1


def test_a_node_that_was_forgotten_joins_again_by_itself() -> None:
    """P55 P118: reaped, or the master restarted empty: within a heartbeat the node is back, with its address and pages."""
    net = Net()
    net.master("m1")
    node = net.node("a", "m1")
    node.source.add(*range(100))
    net.until(lambda: len(net.knows("m1", range(100))) == 100, 2)
    first = net.masters["m1"]
    net.master("m1")  # another life at the same address; the connection notices nothing
    took = net.until(lambda: len(net.knows("m1", range(100))) == 100, 5)
    assert took <= 1.5
    assert isinstance(first, MasterCore)
    second = net.masters["m1"]
    assert isinstance(second, MasterCore)
    member = second.membership.get("a")
    assert member is not None
    assert (member.host, member.port, member.incarnation) == (node.facts.host, node.facts.port, node.facts.incarnation)


def test_a_master_that_is_away_is_tried_again_without_end_and_less_often() -> None:
    net = Net()
    node = net.node("a", "m1")
    net.run(60)
    assert 15 <= node.core.counters["connects"] <= 40, "each try takes a second, and the pause grows to two"
    net.master("m1")
    assert net.until(lambda: joined(net), 10) < 4


def test_what_a_shell_reports_lost_is_connected_to_anew_at_once() -> None:
    net = Net()
    net.master("m1")
    node = net.node("a", "m1")
    net.until(lambda: joined(net), 2)
    node.core.lost("m1", net.now, "closed the connection")
    assert node.core.view().masters[0].answers(net.now) is False, "lookups turn to others now, and not a ttl later"
    assert net.until(lambda: joined(net), 2) < 0.5
    assert node.core.counters["connects"] == 2


def test_a_turn_is_when_a_master_came_or_went_or_is_another_one_and_nothing_else() -> None:
    """Not the tries to reach one that is away: what the other one says goes on to count."""
    net = Net()
    net.master("m1")
    node = net.node("a", "m1", "m2")
    seen = [node.core.turn]

    def turned() -> bool:
        seen.append(node.core.turn)
        return seen[-1] != seen[-2]

    net.until(lambda: node.core.view().masters[0].answers(net.now), 2)
    assert turned(), "it came"
    net.run(30)
    assert not turned()
    net.master("m1")  # another life at the same address
    net.run(3)
    assert turned()
    node.core.lost("m1", net.now, "closed the connection")
    assert turned()


def test_a_refusal_ends_the_connection_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.master("m1")
    node = net.node("a", "m1")
    node.facts = JoinFacts("a", b"i", "0.0.0.0", 7000, 1)
    net.run(35)
    assert "--advertise" in node.core.view().masters[0].refusal
    assert len([r for r in caplog.records if "refused this node" in r.message]) == 1
    assert 3 <= len(sent(net, Join)) <= 8
    node.facts = JoinFacts("a", b"i", "10.0.0.1", 7000, 1)
    net.until(lambda: joined(net), 12)
    assert node.core.view().masters[0].refusal == ""


# --------------------------------------------------------------------------- a bad network


@pytest.mark.parametrize("seed", range(12))
def test_after_losses_repeats_and_reordering_every_master_knows_what_every_node_holds(seed: int) -> None:
    """P155. Sharded for every other seed; one master restarts, one node starts over under its old name."""
    net = Net(seed)
    shards = 1 + seed % 2 * 2
    addresses = [f"m{number}" for number in range(max(2, shards))]
    for number, address in enumerate(addresses):
        net.master(address, (number % shards, shards), forget_s=20.0)
    nodes = [net.node(name, *addresses) for name in "abc"]
    net.bad = True
    rng = random.Random(seed)
    for turn in range(120):
        for index, node in enumerate(net.nodes.values()):
            numbers = range(1000 * index, 1000 * index + 60)
            node.source.add(*rng.sample(numbers, rng.randrange(5)))
            node.source.remove(*rng.sample(numbers, rng.randrange(5)))
            node.core.notify()
            if rng.random() < 0.01:
                node.source.lost = True
                node.source.changes.clear()
        if turn == 50:
            net.master(addresses[0], (0, shards), forget_s=20.0)
        if turn == 80:
            net.nodes["b"] = Node(net, "b", tuple(addresses))  # a new life that holds nothing
        net.run(rng.random() * 0.5)
    net.bad = False
    nodes = list(net.nodes.values())

    def converged() -> bool:
        for number, address in enumerate(addresses):
            held = {
                n: node.name for node in nodes for n in node.source.held if shard_of(page_hash(n), shards) == number % shards
            }
            if net.knows(address, range(3000)) != held:
                return False
        return True

    net.until(converged, 40)
    assert all(node.core.counters["failures"] == 0 for node in nodes)


def test_a_gap_costs_a_snapshot_and_an_unbroken_stream_costs_none() -> None:
    net = Net()
    net.master("m1")
    node = net.node("a", "m1")
    net.until(lambda: joined(net), 2)
    for number in range(200):
        node.source.add(number)
        net.run(0.1)
    assert len(net.knows("m1", range(200))) == 200
    assert len(sent(net, Snapshot)) == 1, "the one it was asked for when it joined"
    net.masters.pop("m1")
    core = net.master("m1")
    net.until(lambda: len(net.knows("m1", range(200))) == 200, 5)
    assert node.source.snapshots == 2
    assert core.stats.gaps == 0


def test_a_source_that_is_busy_makes_nothing_late_but_its_own_news() -> None:
    """P104, without threads: beats go on with the last figures, and what could not be read is read later."""
    net = Net()
    net.master("m1")
    node = net.node("a", "m1")
    node.source.figures = Usage(objects=41)
    net.until(lambda: joined(net), 2)
    net.run(0.5)
    node.source.busy = True
    node.source.add(7)
    node.core.notify()
    node.core.received("m1", ClearNamespace(NS, "b"), net.now)
    net.sent.clear()
    net.run(20)
    beats = sent(net, Beat)
    assert len(beats) >= 19
    assert all(isinstance(beat, Beat) and beat.objects == 41 for beat in beats)
    assert node.source.cleared == []
    node.source.busy = False
    net.until(lambda: node.source.cleared == [NS], 0.5)
    node.source.add(8)
    net.until(lambda: net.knows("m1", range(10)) == {8: "a"}, 0.5)
    assert node.core.counters["failures"] == 0


def test_a_snapshot_waits_for_a_busy_source_and_for_nothing_else() -> None:
    net = Net()
    net.master("m1")
    node = net.node("a", "m1")
    node.source.held = dict.fromkeys(range(50))
    node.source.busy = True
    net.run(5)
    assert net.state("a", "m1") == "joined"
    assert sent(net, Snapshot) == []
    assert len(sent(net, Update)) == 0, "no number is spent on a snapshot that did not begin"
    node.source.busy = False
    net.until(lambda: len(net.knows("m1", range(50))) == 50, 1)


# --------------------------------------------------------------------------- shards


def test_each_master_gets_the_keys_of_its_shard_and_nothing_empty() -> None:
    net = Net()
    for number in range(4):
        net.master(f"m{number}", (number, 4))
    node = net.node("a", *(f"m{number}" for number in range(4)))
    net.until(lambda: joined(net), 2)
    net.run(0.5)
    net.sent.clear()
    only = next(n for n in itertools.count() if shard_of(page_hash(n), 4) == 2)
    node.source.add(only)
    net.run(0.5)
    assert [(master, m.seq) for _, master, m in net.sent if isinstance(m, Update)] == [("m2", 3)]
    node.source.add(*range(1000, 1400))
    net.run(0.5)
    for number in range(4):
        mine = {n: "a" for n in range(1000, 1400) if shard_of(page_hash(n), 4) == number}
        assert net.knows(f"m{number}", range(1000, 1400)) == mine
    for _, master, message in net.sent:
        if isinstance(message, Update):
            for _, blob in message.added:
                assert {shard_of(blob[i : i + 32], 4) for i in range(0, len(blob), 32)} == {int(master[1])}
    core = net.masters["m1"]
    assert isinstance(core, MasterCore)
    net.run(3)
    assert core.stats.gaps == 0, "an update of another shard is no gap in this one's stream"


def test_the_odd_master_is_named_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.master("odd", (0, 1))
    node = net.node("a", "odd", "m0", "m1")
    node.source.add(*range(50))
    net.until(lambda: net.state("a", "odd") == "joined", 2)  # it is alone so far
    net.master("m0", (0, 2))
    net.master("m1", (1, 2))
    net.until(lambda: net.state("a", "m0") == net.state("a", "m1") == "joined", 5)
    assert net.state("a", "odd") == "unfit"
    assert node.core.shards == 2
    assert [r.levelname for r in caplog.records if "odd" in r.getMessage() and "--shard" in r.getMessage()] == ["ERROR"]
    assert any(master == "odd" and isinstance(m, Leave) for _, master, m in net.sent), "it must not answer for us with old news"
    assert {m.master: m.shard for m in node.core.view().masters} == {"odd": -1, "m0": 0, "m1": 1}
    net.until(lambda: len(net.knows("m0", range(50)) | net.knows("m1", range(50))) == 50, 5)
    net.master("odd", (1, 2))  # started right
    net.until(lambda: net.state("a", "odd") == "joined", 8)
    held = {n: "a" for n in range(50) if shard_of(page_hash(n), 2) == 1}
    net.until(lambda: net.knows("odd", range(50)) == held, 3)


def test_with_as_many_for_either_the_larger_number_of_shards_counts() -> None:
    net = Net()
    net.master("m0", (0, 2))
    net.master("m1", (0, 3))
    node = net.node("a", "m0", "m1")
    net.run(3)
    assert node.core.shards == 3
    assert net.state("a", "m0") == "unfit"


def test_one_master_of_a_larger_number_does_not_take_a_whole_directory_away() -> None:
    net = Net()
    net.master("m0", (0, 1))
    net.master("odd", (0, 8))
    node = net.node("a", "m0", "odd")
    node.source.add(*range(20))
    net.run(3)
    assert node.core.shards == 1
    assert (net.state("a", "m0"), net.state("a", "odd")) == ("joined", "unfit")
    assert len(net.knows("m0", range(20))) == 20


def test_the_odd_one_is_used_when_the_others_are_gone_for_good() -> None:
    net = Net()
    net.master("m0", (0, 2))
    net.master("m1", (1, 2))
    net.master("odd", (0, 1))
    node = net.node("a", "m0", "m1", "odd")
    node.source.add(1)
    net.run(3)
    assert net.state("a", "odd") == "unfit"
    del net.masters["m0"], net.masters["m1"]
    net.run(30)
    assert net.state("a", "odd") == "unfit", "they may be back soon"
    net.until(lambda: net.knows("odd", range(3)) == {1: "a"}, 100)


def test_a_cluster_that_is_started_anew_with_more_shards_is_whole_again() -> None:
    net = Net()
    for number in range(2):
        net.master(f"m{number}")
    nodes = [net.node(name, "m0", "m1") for name in "ab"]
    for index, node in enumerate(nodes):
        node.source.add(*range(100 * index, 100 * index + 100))
    net.until(lambda: all(len(net.knows(m, range(200))) == 200 for m in net.masters), 5)
    for number in range(2):
        net.master(f"m{number}", (number, 2))
    net.until(lambda: all(node.core.shards == 2 for node in nodes), 5)
    net.until(lambda: len(net.knows("m0", range(200)) | net.knows("m1", range(200))) == 200, 15)


@pytest.mark.parametrize("shards", [2, 3, 5, 64])
def test_hashes_are_split_as_the_protocol_says(shards: int) -> None:
    blob = b"".join(map(page_hash, range(300)))
    parts = split_hashes(blob, shards)
    for shard, part in enumerate(parts):
        mine = [i for i in range(300) if shard_of(page_hash(i), shards) == shard]
        assert part == select_hashes(blob, mine)
    assert split_hashes(b"", shards) == [b""] * shards


@pytest.mark.parametrize("report", [(0, 0), (3, 3), (-1, 2), (0, 10**9)])
def test_a_master_that_talks_nonsense_about_shards_is_left(report: tuple[int, int]) -> None:
    net = Net()
    node = net.node("a", "m1")
    node.core.step(net.now)
    assert node.core.take("m1", net.now) == ClusterStatus(brief=True)
    node.core.received("m1", ClusterReport(b"m", 2, [], 0, *report), net.now)
    assert node.core.step(net.now) == [Close("m1")]
    assert node.core.shards == 0


# --------------------------------------------------------------------------- what beats carry and bring


def manual(net: Net, *, version: int = 2, masters: tuple[str, ...] = ("m1",)) -> Node:
    """A node joined at masters that the test plays itself."""
    node = net.node("a", *masters)
    node.core.step(net.now)
    for master in masters:
        node.core.take(master, net.now)
        node.core.received(master, ClusterReport(b"m", version, [], 0), net.now)
        assert isinstance(node.core.take(master, net.now), Join)
        node.core.received(master, Joined(version, b"m", 1.0, 5.0, False), net.now)
    node.core.step(net.now)
    return node


def beat(node: Node, net: Net, master: str = "m1") -> Beat:
    net.now += 1.01
    node.core.step(net.now)
    beats = [m for m in iter(lambda: node.core.take(master, net.now), None) if isinstance(m, Beat)]
    return beats[-1]


def test_beats_say_what_was_sent_since_the_last_one_to_each_master() -> None:
    net = Net()
    node = manual(net)
    node.source.figures = Usage(sent_bytes=100)
    assert beat(node, net).load == 100
    node.source.figures = Usage(sent_bytes=250)
    assert beat(node, net).load == 150
    assert beat(node, net).load == 0


def test_draining_is_told_at_once() -> None:
    net = Net()
    node = manual(net)
    assert not beat(node, net).draining
    node.facts = JoinFacts("a", b"i", "10.0.0.1", 7000, 1, draining=True)
    node.core.beat_now(net.now)
    node.core.step(net.now)
    message = node.core.take("m1", net.now)
    assert isinstance(message, Beat)
    assert message.draining


def test_the_room_table_comes_from_one_master_and_ages() -> None:
    net = Net()
    node = manual(net, masters=("m1", "m2"))
    node.source.figures = Usage(want_room=True)
    net.now += 1.01
    node.core.step(net.now)
    wanted = {}
    for master in ("m1", "m2"):
        wanted[master] = [m.want_room for m in iter(lambda m=master: node.core.take(m, net.now), None) if isinstance(m, Beat)]  # type: ignore[misc]
    assert wanted["m1"][-1:] + wanted["m2"][-1:] in ([True, False], [False, True])
    asked = "m1" if wanted["m1"][-1] else "m2"
    room = [Room(Peer("b", b"i", "h", 1), "host", 5, 10, 1.0)]
    node.core.received(asked, BeatReply(b"m", True, False, room=room), net.now)
    until, table = node.core.room_table
    assert table is room
    assert net.now < until <= net.now + 60
    other = "m2" if asked == "m1" else "m1"
    node.core.received(other, BeatReply(b"m", True, False), net.now)
    assert node.core.room_table[1] is room, "a master that was not asked says nothing about room"


def test_failed_reads_are_reported_together_and_only_to_masters_that_know_the_word() -> None:
    net = Net()
    node = manual(net, masters=("m1", "m2"))
    node.core.report({"b": 1}, net.now)
    node.core.report({"b": 2, "c": 1}, net.now + 0.1)
    for master in ("m1", "m2"):
        assert not [m for m in iter(lambda m=master: node.core.take(m, net.now), None) if isinstance(m, Report)]  # type: ignore[misc]
    assert node.core.next_due(net.now) <= net.now + 0.5
    net.now += 0.5
    node.core.step(net.now)
    for master in ("m1", "m2"):
        reports = [m for m in iter(lambda m=master: node.core.take(m, net.now), None) if isinstance(m, Report)]  # type: ignore[misc]
        assert reports == [Report("a", node.facts.incarnation, {"b": 3, "c": 1})]
    old = manual(Net(), version=1)
    old.core.report({"b": 1}, 1000.0)
    old.core.step(1001.0)
    assert not [m for m in iter(lambda: old.core.take("m1", 1001.0), None) if isinstance(m, Report)]


def test_changes_are_gathered_for_as_long_as_the_masters_say() -> None:
    net = Net()
    node = manual(net)
    node.core.received("m1", BeatReply(b"m", True, False, gather_s=0.2), net.now)
    net.now += 1
    node.core.step(net.now)
    node.source.add(1)
    node.core.notify()
    assert node.core.next_due(net.now) == pytest.approx(net.now + 0.2)
    node.core.received("m1", BeatReply(b"m", True, False, gather_s=1e9), net.now)
    assert node.core.next_due(net.now) <= net.now + 1.0, "no master can silence a node"


def test_a_clear_reaches_masters_that_are_away_when_they_are_back() -> None:
    net = Net()
    net.master("m1")
    a, b = net.node("a", "m1", "m2"), net.node("b", "m1", "m2")
    b.source.add(1)
    net.until(lambda: net.state("a", "m1") == net.state("b", "m1") == "joined", 3)
    a.core.clear_namespace(NS)
    net.until(lambda: b.source.cleared == [NS], 2)
    assert a.source.cleared == []
    net.run(3)
    before = len(sent(net, ClearNamespace))
    net.master("m2")
    net.until(lambda: net.state("a", "m2") == "joined", 8)
    net.run(1)
    assert len(sent(net, ClearNamespace)) == before + 1


def test_a_clear_that_is_lost_on_its_way_to_a_node_is_told_again() -> None:
    """The connection breaks and is mended behind both ends' backs: neither sees more of it than that something is missing."""
    net = Net()
    net.master("m1")
    a, b = net.node("a", "m1"), net.node("b", "m1")
    b.source.add(1)
    net.until(lambda: joined(net) and net.knows("m1", range(3)) == {1: "b"}, 3)
    net.loses = lambda node, message: isinstance(message, ClearNamespace)
    a.core.clear_namespace(NS)
    net.until(lambda: net.knows("m1", range(3)) == {}, 2)
    net.loses = lambda node, message: False
    assert b.source.cleared == []
    b.source.add(2)
    b.core.notify()
    net.until(lambda: b.source.cleared == [NS], 5)
    b.source.add(3)
    b.core.notify()
    net.until(lambda: net.knows("m1", range(5)) == {3: "b"}, 5)
    assert b.core.counters["clears_missed"] == 1
    joins = len(sent(net, Join, "b"))
    net.run(10)
    assert len(sent(net, Join, "b")) == joins, "and not again and again"


# --------------------------------------------------------------------------- masters come and go


def test_masters_that_are_found_are_joined_and_lost_ones_are_used_while_they_answer() -> None:
    net = Net()
    net.master("m1")
    net.master("m2")
    node = net.node("a", "m1")
    node.source.add(1)
    net.until(lambda: net.knows("m1", range(3)) == {1: "a"}, 3)
    node.core.set_masters(["m2"])
    net.until(lambda: net.knows("m2", range(3)) == {1: "a"}, 3)
    node.source.add(2)
    net.run(10)
    assert net.knows("m1", range(3)) == {1: "a", 2: "a"}, "it answers, whatever the list says"
    del net.masters["m1"]
    net.until(lambda: node.core.masters == ("m2",), 30)
    node.core.set_masters(["m1", "m2"])
    assert set(node.core.masters) == {"m1", "m2"}


def test_a_node_works_with_a_master_of_version_1() -> None:
    """It gets nothing that it does not know, and is missed in nothing."""
    net = Net()
    old = OldMaster(MasterCore(b"old", rng=random.Random(1)))
    net.masters["m1"] = old
    node, other = net.node("a", "m1"), net.node("b", "m1")
    node.source.add(*range(20))
    node.source.figures = Usage(want_room=True, sent_bytes=5, room_bytes=7)
    node.engines = 5, [RankIdentity(b"e", "", "decode", "tree", "plain", (0, 0, 0), (1, 1, 1), [])]
    net.until(lambda: joined(net), 3)
    assert node.core.view().masters[0].version == 1
    node.core.report({"b": 3}, net.now)
    other.core.clear_namespace(b"o" * 16)
    net.run(5)
    node.source.remove(0)
    net.run(1)
    assert net.knows("m1", range(21)) == dict.fromkeys(range(1, 20), "a")
    assert node.source.cleared == [b"o" * 16]
    assert set(old.got) == {"ClusterStatus", "Join", "Beat", "Update", "Snapshot", "ClearNamespace", "Lookup"}
    assert node.core.unshared == []
    assert node.core.room_table[1] == []


def test_an_old_and_a_new_master_side_by_side_both_know_everything() -> None:
    net = Net()
    net.masters["old"] = OldMaster(MasterCore(b"old", rng=random.Random(1)))
    net.master("new")
    node = net.node("a", "old", "new")
    node.source.add(*range(20))
    net.until(lambda: len(net.knows("old", range(20))) == len(net.knows("new", range(20))) == 20, 5)
    node.core.report({"b": 3}, net.now)
    net.run(2)
    assert [master for _, master, m in net.sent if isinstance(m, Report)] == ["new"]


def test_a_master_that_reads_slowly_costs_a_snapshot_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_session, "MAX_OUTBOX_MESSAGES", 256)
    net = Net()
    node = manual(net)
    for turn in range(6000):
        node.source.add(turn)
        node.core.notify()
        net.now += 0.01
        node.core.step(net.now)
        node.core.validate()
        if turn % 50 == 0:
            node.core.received("m1", BeatReply(b"m", True, False), net.now)
    assert node.core.counters["outbox_overflows"] == 1


def test_nothing_unexpected_from_a_master_hurts() -> None:
    net = Net()
    node = manual(net)
    for message in (
        Joined(2, b"x", -1.0, float("nan"), True, gather_s=float("nan")),
        BeatReply(b"other", True, True),
        LookupReply(3, []),
        ClusterReport(b"m", 9, [], 0, 5, 2),
        Refused("no"),
        Joined(2, b"x", 1.0, 5.0, True),
    ):
        node.core.received("m1", message, net.now)
        node.core.received("stranger", message, net.now)
        node.core.validate()
        node.core.step(net.now)
        node.core.take("m1", net.now)
        node.core.validate()
        assert node.core.next_due(net.now) < float("inf")


def take_all(node: Node, net: Net, master: str = "m1") -> list[Message]:
    return list(iter(lambda: node.core.take(master, net.now), None))


def pass_time(node: Node, net: Net, seconds: float) -> list[Message]:
    """What the node sends meanwhile to a master that says nothing."""
    sent = []
    for _ in range(round(seconds / 0.25)):
        net.now += 0.25
        node.core.step(net.now)
        sent += take_all(node, net)
    node.core.validate()
    return sent


def answer_beats(node: Node, net: Net, sent: list[Message], *, want_snapshot: bool = False) -> None:
    for message in sent:
        if isinstance(message, Beat):
            node.core.received("m1", BeatReply(b"m", True, want_snapshot), net.now)


def test_a_master_with_all_snapshots_to_read_is_waited_for_and_a_silent_one_is_not() -> None:
    """Each that loses patience sends all of it anew: a restarted master with many keys would never have read them."""
    net = Net()
    node = manual(net)
    node.source.add(*range(50))
    sent = pass_time(node, net, 3)
    answer_beats(node, net, sent, want_snapshot=True)
    sent = pass_time(node, net, 3)
    assert any(isinstance(message, Snapshot) and message.last for message in sent)
    sent += pass_time(node, net, 100)
    (view,) = node.core.view().masters
    assert view.state == "joined"
    assert not view.answers(net.now), "lookups prefer another one meanwhile"
    assert sum(isinstance(message, Snapshot) for message in sent) == 1
    answer_beats(node, net, sent)
    pass_time(node, net, 20)
    (view,) = node.core.view().masters
    assert view.state != "joined"


def test_what_did_not_fit_behind_a_slow_master_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clears that were dropped are told again, and beats that were dropped are not waited for."""
    monkeypatch.setattr(link_session, "MAX_OUTBOX_MESSAGES", 32)
    net = Net()
    node = manual(net)
    net.now += 1
    answer_beats(node, net, pass_time(node, net, 1))
    node.core.clear_namespace(NS)
    for turn in range(200):  # nothing is taken: the connection does not take any more
        node.source.add(turn)
        node.core.notify()
        net.now += 0.06
        node.core.step(net.now)
        node.core.validate()
    assert node.core.counters["outbox_overflows"] >= 1
    sent = pass_time(node, net, 1)
    assert ClearNamespace(NS, "a") in sent
    answer_beats(node, net, sent, want_snapshot=True)
    for _ in range(2):
        sent = pass_time(node, net, 1.25)
        assert any(isinstance(message, Snapshot) for message in sent)
        answer_beats(node, net, sent)
        answer_beats(node, net, pass_time(node, net, 1.25), want_snapshot=True)  # it was broken off there


def test_changes_that_were_lost_are_lost_for_every_master() -> None:
    """Also where one master's snapshot, for a reason of its own, is cut before the loss was looked for."""
    net = Net()
    node = manual(net, masters=("m1", "m2"))
    for master in ("m1", "m2"):
        take_all(node, net, master)
    node.core.received("m1", BeatReply(b"m", True, True), net.now)
    node.source.held[7] = None
    node.source.lost = True
    for master in ("m1", "m2"):
        assert any(isinstance(message, Snapshot) for message in take_all(node, net, master)), master
    assert not node.source.lost
