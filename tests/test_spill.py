"""Pages given to nodes with room: whole clusters of real cores in one process, with a clock of their own, and real nodes."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

from hicache_mooncake import protocol as p
from hicache_mooncake.config import load_settings
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.node.asking import AskMasters
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.placement import FRESH_S, RAMP_S, Placement
from hicache_mooncake.node.service import Node
from hicache_mooncake.node.spill import BATCH_PAGES, Give, Given, GiveSteps, precedence
from hicache_mooncake.node.store import GUEST, OWN, Store
from hicache_mooncake.security import ClusterKey
from hicache_mooncake.testing.local import FakeRank, free_port, page_hash, pattern
from hicache_mooncake.transfer import tcp
from tests.conftest import MasterProcess, NodeProcess, environment, wait_until

NS, GROUP = b"n" * 16, b"g" * 16
PAGE = 4096


# --------------------------------------------------------------------------- a cluster without sockets


@dataclass
class Told:
    answers: list[p.Answer]
    complete: bool = True
    warming: bool = False


@dataclass
class Member:
    core: NodeCore
    joined_at: float
    alive: bool = True
    owner: int = 0

    @property
    def peer(self) -> p.Peer:
        return p.Peer(self.core.name, self.core.incarnation, "10.0.0.1", 1)

    @property
    def used_share(self) -> float:
        return self.core.store.used_bytes / self.core.store.allocator.capacity


@dataclass
class Cluster:
    """Cores that push to each other. `step` is a beat of everybody: room tables, then each gives what is due."""

    rng: random.Random = field(default_factory=lambda: random.Random(7))
    now: float = 1000.0
    members: dict[str, Member] = field(default_factory=dict)
    pushed: list[tuple[str, str, int]] = field(default_factory=list)
    """(from, to, bytes)"""
    on_push: Callable[[str], None] = lambda receiver: None
    _owner: int = 100

    def add(self, name: str, capacity: int, age_s: float = RAMP_S) -> NodeCore:
        store = Store(capacity, track_changes=True)
        core = NodeCore(name, name.encode().ljust(8), store, masters=True, log=lambda *_: None, rng=self.rng, spill=True)
        self.members[name] = Member(core, self.now - age_s)
        return core

    def others(self, name: str) -> list[Member]:
        return [member for other, member in self.members.items() if other != name and member.alive]

    def rooms(self, name: str) -> list[p.Room]:
        return [
            p.Room(
                member.peer,
                "one host",
                member.core.store.free_below_low,
                member.core.store.allocator.capacity,
                self.now - member.joined_at,
            )
            for member in self.others(name)
            if member.core.store.free_below_low
        ]

    def tell(self, name: str, ask: AskMasters) -> Told:
        others = self.others(name)
        peers = [member.peer for member in others]
        answers = []
        for question in ask.questions:
            each = [question.hashes[at : at + p.HASH_BYTES] for at in range(0, len(question.hashes), p.HASH_BYTES)]
            columns = [member.core.store.present(question.namespace, question.hashes, touch=False) for member in others]
            holder = bytes(next((1 + k for k, column in enumerate(columns) if column[i]), 0) for i in range(len(each)))
            answers.append(p.Answer(holder, peers))
        return Told(answers)

    def push(self, name: str, give: Give) -> Given | None:
        receiver = self.members[give.peer.node]
        self.on_push(give.peer.node)
        if not receiver.alive:
            return None
        self._owner += 1
        taking = receiver.core.push_offer(self._owner, give.push, self.now)
        done = receiver.core.push_done(self._owner, taking, b"\x01" * len(taking.offsets), give.push.length)
        receiver.core.drop_owner(self._owner)
        self.pushed.append((name, give.peer.node, done.count(1) * give.push.length))
        return Given(taking.reply.status, done)

    def give(self, name: str) -> int:
        core = self.members[name].core
        steps = core.give(1, self.now)
        answer: Told | Given | None = None
        try:
            wanted = next(steps)
            while True:
                answer = self.push(name, wanted) if isinstance(wanted, Give) else self.tell(name, wanted)
                wanted = steps.send(answer)
        except StopIteration as end:
            return int(end.value)

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for name, member in self.members.items():
            if member.alive:
                core = member.core
                core.placement.update(self.rooms(name), self.now)
                while core.give_due(self.now) and self.give(name):
                    pass
                while core.tick(self.now):
                    pass

    def write(self, name: str, pages: Sequence[bytes], length: int = PAGE, namespace: bytes = NS) -> bytes:
        core = self.members[name].core
        reserved = core.reserve(2, p.Reserve(namespace, b"".join(pages), length, GROUP), self.now)
        count = reserved.status.count(p.WRITE)
        core.commit(2, reserved.txn, b"\x01" * count, [0] * count)
        return reserved.status

    def where(self, page: bytes, namespace: bytes = NS) -> list[str]:
        alive = {name: member for name, member in self.members.items() if member.alive}
        return [name for name, m in alive.items() if m.core.store.present(namespace, page, touch=False) == b"\x01"]

    def validate(self) -> None:
        for member in self.members.values():
            member.core.validate()
            assert member.core.store.pinned_bytes == 0


def names(count: int, of: object = "") -> list[bytes]:
    return [page_hash((of, i)) for i in range(count)]


def test_a_full_node_gives_its_coldest_pages_to_one_with_room_and_loses_none() -> None:
    cluster = Cluster()
    cluster.add("a", 100 * PAGE)
    cluster.add("b", 100 * PAGE)
    pages = names(93)
    for page in pages:
        cluster.write("a", [page])
    cluster.step()
    assert [cluster.where(page) for page in pages] == [["b"]] * 3 + [["a"]] * 90
    assert {page.rank for page in cluster.members["b"].core.store.coldest(99)} == {GUEST}
    report = cluster.members["a"].core.report(0)
    assert (report["spilled"], report["spilled_bytes"], report["evicted"]) == (3, 3 * PAGE, 0)
    cluster.validate()


def test_what_others_hold_already_is_dropped_and_not_sent() -> None:
    cluster = Cluster()
    for name in "abc":
        cluster.add(name, 100 * PAGE)
    pages = sorted(names(93), key=lambda page: precedence("c", page) < precedence("a", page))  # first those that c keeps
    cluster.write("c", pages[:2])
    for page in pages:
        cluster.write("a", [page])
    cluster.step()
    assert [cluster.where(page) for page in pages[:2]] == [["c"], ["c"]]
    report = cluster.members["a"].core.report(0)
    assert (report["spilled"], report["spill_duplicates"]) == (1, 2)
    cluster.validate()


def begun(cluster: Cluster, name: str) -> tuple[GiveSteps, Told]:
    """The giving of a node that has asked the masters, and what they say."""
    core = cluster.members[name].core
    core.placement.update(cluster.rooms(name), cluster.now)
    steps = core.give(1, cluster.now)
    ask = next(steps)
    assert isinstance(ask, AskMasters)
    return steps, cluster.tell(name, ask)


def finish(cluster: Cluster, name: str, steps: GiveSteps, answer: Told | Given | None) -> None:
    with contextlib.suppress(StopIteration):
        while True:
            wanted = steps.send(answer)
            answer = cluster.push(name, wanted) if isinstance(wanted, Give) else cluster.tell(name, wanted)


def test_what_others_have_on_a_disk_is_given_away_all_the_same() -> None:
    cluster = Cluster()
    for name in "abc":
        cluster.add(name, 100 * PAGE)
    pages = sorted(names(93), key=lambda page: precedence("c", page) < precedence("a", page))
    cluster.write("c", pages[:2])
    for page in pages:
        cluster.write("a", [page])
    steps, told = begun(cluster, "a")
    told.answers = [p.Answer(each.holder, each.peers, each.others, bytes([p.COLD] * len(each.peers))) for each in told.answers]
    finish(cluster, "a", steps, told)
    report = cluster.members["a"].core.report(0)
    assert (report["spilled"], report["spill_duplicates"]) == (3, 0)


def test_two_nodes_that_spill_the_same_pages_at_once_do_not_both_drop_them() -> None:
    """Each is told that the other one has them."""
    cluster = Cluster()
    for name, capacity in (("a", 100), ("b", 100), ("c", 1000)):
        cluster.add(name, capacity * PAGE)
    pages = names(99)
    for name in "ab":
        cluster.write(name, pages)
    under_way = {name: begun(cluster, name) for name in "ab"}
    for name, (steps, told) in under_way.items():
        finish(cluster, name, steps, told)
    assert all(cluster.where(page) for page in pages)
    dropped = [cluster.members[name].core.report(0)["spill_duplicates"] for name in "ab"]
    assert sum(dropped) == 9, dropped  # type: ignore[arg-type]
    cluster.validate()


def test_a_part_that_came_while_the_masters_were_asked_is_not_dropped_with_the_others() -> None:
    cluster = Cluster()
    a, _ = cluster.add("a", 100 * PAGE), cluster.add("b", 100 * PAGE)
    pages = sorted(names(95), key=lambda page: precedence("b", page) < precedence("a", page))
    for page in pages:
        cluster.write("a", [page])
    cold = [page.hash for page in a.store.coldest(5)]
    cluster.write("b", cold)
    assert all(precedence("b", page) > precedence("a", page) for page in cold)
    steps, told = begun(cluster, "a")
    cluster.write("a", cold, namespace=b"s" * 16)
    finish(cluster, "a", steps, told)
    assert [cluster.where(page, b"s" * 16) for page in cold] == [["a"]] * 5
    assert [cluster.where(page) for page in cold] == [["a", "b"]] * 5
    cluster.validate()


@pytest.mark.parametrize("ends", [False, True])
def test_pages_of_a_cleared_namespace_are_given_to_nobody(ends: bool) -> None:
    """Not those that have not been swept yet, and not when the receiver hears of the clear too late or not at all."""
    cluster = Cluster()
    a, b = cluster.add("a", 1000 * PAGE), cluster.add("b", 1000 * PAGE)
    old, side = b"o" * 16, b"s" * 16
    cluster.write("a", names(300, "old"), namespace=old)
    cluster.write("a", names(300, "old"), namespace=side)
    cluster.write("a", names(350, "new"))
    a.draining = ends
    steps, told = begun(cluster, "a")
    give = steps.send(told)
    assert isinstance(give, Give), "those of the first namespace are on their way"
    a.clear(side, cluster.now)
    finish(cluster, "a", steps, cluster.push("a", give))
    assert not any(b.store.present(side, page, touch=False) == b"\x01" for page in names(300, "old"))
    a.clear(old, cluster.now)
    before = b.store.namespaces()
    cluster.give("a")
    after = b.store.namespaces()
    assert after.get(old, 0) == before.get(old, 0)
    assert side not in after
    cluster.validate()


def test_a_copy_of_what_its_giver_gives_away_is_kept_like_what_is_given() -> None:
    cluster = Cluster()
    b = cluster.add("b", 100 * PAGE)
    one, two = names(2)
    txn, *_ = b.store.claim(1, NS, one + two, PAGE, 0.0, GROUP)
    b.store.commit(1, txn, b"\x01\x01", [0, 0])
    for page, hot in ((one, False), (two, True)):
        taking = b.push_offer(9, p.Push(2, "a", NS, GROUP, page, PAGE, [0], hot), cluster.now)
        assert taking.reply.status == bytes([p.HAVE])
    assert {page.hash: page.rank for page in b.store.coldest(9)} == {one: GUEST, two: OWN}
    cluster.validate()


def test_guests_never_travel_on() -> None:
    cluster = Cluster()
    for name in "abc":
        cluster.add(name, 100 * PAGE)
    cluster.members["c"].alive = False
    for page in names(99, "a"):
        cluster.write("a", [page])
    cluster.step()
    guests = [page.hash for page in cluster.members["b"].core.store.coldest(99, GUEST)]
    assert len(guests) == 9
    cluster.members["c"].alive = True
    for page in names(89, "b"):
        cluster.write("b", [page])
    cluster.step()
    assert all(cluster.where(page) == ["b"] for page in guests)
    assert {(giver, taker) for giver, taker, _ in cluster.pushed} == {("a", "b"), ("b", "c")}


def test_all_parts_of_a_page_travel_together_or_it_stays() -> None:
    """The second part finds no room: the page stays where it is whole."""
    cluster = Cluster()
    a, b = cluster.add("a", 1000 * PAGE), cluster.add("b", 40 * PAGE)
    side = b"s" * 16
    pages = names(8)
    cluster.write("a", pages, 8 * PAGE, side)
    cluster.write("a", pages)
    cluster.write("a", names(840, "rest"))  # 912 pages' worth: 12 above the low watermark
    cluster.on_push = lambda _: None
    b.placement.update([], cluster.now)
    cluster.step()
    moved = [page for page in pages if "a" not in cluster.where(page)]
    assert moved
    for page in pages:
        assert cluster.where(page) == cluster.where(page, side), "both parts are in one place"
    cluster.validate()
    assert a.store.used_bytes <= a.store.low_bytes or not b.store.free_below_low // (8 * PAGE)


def test_a_receiver_that_takes_a_part_only_leaves_the_page_where_it_is() -> None:
    cluster = Cluster()
    a, b = cluster.add("a", 100 * PAGE), cluster.add("b", 100 * PAGE)
    side = b"s" * 16
    page = names(1)
    cluster.write("a", page)
    cluster.write("a", page, PAGE, side)
    cluster.write("a", names(90, "rest"))
    took: list[str] = []

    def fill_up(receiver: str) -> None:  # other nodes were faster, between the first part and the second
        took.append(receiver)
        if len(took) == 2:
            free = b.store.free_below_low // PAGE
            cluster.write("b", names(free, "faster"))

    cluster.on_push = fill_up
    cluster.step()
    assert "a" in cluster.where(page[0])
    assert "a" in cluster.where(page[0], side)
    cluster.validate()
    assert a.store.used_bytes > a.store.low_bytes


def test_a_receiver_that_dies_in_the_middle_costs_nothing() -> None:
    cluster = Cluster()
    a, _ = cluster.add("a", 100 * PAGE), cluster.add("b", 100 * PAGE)
    pages = names(94)
    cluster.write("a", pages)

    def die(receiver: str) -> None:
        cluster.members[receiver].alive = False

    cluster.on_push = die
    cluster.step()
    assert [cluster.where(page) for page in pages] == [["a"]] * 94
    assert a.report(0)["spill_failures"] == 1
    assert len(cluster.pushed) == 0
    cluster.validate()


@pytest.mark.parametrize("change", ["read", "cleared", "another part"])
def test_a_page_that_is_used_while_it_moves_stays(change: str) -> None:
    """It is pinned while it moves: its memory is not given to anybody else, whatever happens to it."""
    cluster = Cluster()
    a, b = cluster.add("a", 100 * PAGE), cluster.add("b", 100 * PAGE)
    pages = names(91)
    cluster.write("a", pages)
    cold = a.store.coldest(1)[0].hash
    offset = a.store.coldest(1)[0].parts[0].offset

    def use(_: str) -> None:
        if change == "read":
            a.store.locate(50, NS, cold, PAGE, cluster.now)
        elif change == "cleared":
            a.clear(NS, cluster.now)
            b.clear(NS, cluster.now)
            while a.tick(cluster.now):
                pass
            cluster.write("a", names(99, "next"), namespace=b"o" * 16)
            used = {part.offset for part in a.store.entries()}
            assert offset not in used, "still being sent"
        else:
            cluster.write("a", [cold], namespace=b"s" * 16)

    cluster.on_push = use
    cluster.now += 1
    a.placement.update(cluster.rooms("a"), cluster.now)
    cluster.give("a")
    a.drop_owner(50)
    assert ("a" in cluster.where(cold)) is (change != "cleared")
    assert ("b" in cluster.where(cold)) is (change != "cleared"), "a push never brings a cleared page back"
    cluster.validate()


def test_a_node_that_ends_gives_its_hottest_pages_to_a_newcomer_too() -> None:
    """Which takes a page at a time at first: nothing colder is given before them."""
    cluster = Cluster()
    a, _ = cluster.add("a", 1000 * PAGE), cluster.add("b", 400 * PAGE, age_s=0.01 * RAMP_S)
    pages = names(800)
    for page in pages:
        cluster.write("a", [page])
    a.draining = True
    a.placement.update(cluster.rooms("a"), cluster.now)
    while cluster.give("a"):
        pass
    assert len(cluster.pushed) > 64, "so many pushes"
    there = [cluster.where(page) == ["a", "b"] for page in reversed(pages)]
    count = there.count(True)
    assert count > 256, "more than a batch"
    assert all(there[:count])
    cluster.validate()


def test_a_batch_is_bounded() -> None:
    cluster = Cluster()
    cluster.add("a", 4000 * PAGE)
    cluster.add("b", 4000 * PAGE)
    cluster.write("a", names(3900))
    a = cluster.members["a"].core
    sizes: list[int] = []
    cluster.now += 1
    a.placement.update(cluster.rooms("a"), cluster.now)
    steps = a.give(1, cluster.now)
    ask = next(steps)
    assert isinstance(ask, AskMasters)
    give = steps.send(cluster.tell("a", ask))
    assert isinstance(give, Give)
    sizes.append(len(give.offsets))
    assert a.store.pinned_bytes == sizes[0] * PAGE
    steps.close()
    assert a.store.pinned_bytes == 0, "an end in the middle lets go"
    assert sizes[0] <= BATCH_PAGES


# --------------------------------------------------------------------------- placement


def room(name: str, free: int, capacity: int = 1000, age_s: float = RAMP_S, host_id: str = "h") -> p.Room:
    return p.Room(p.Peer(name, b"i" * 8, "10.0.0.1", 1), host_id, free, capacity, age_s)


def test_of_two_random_nodes_the_emptier_one_is_chosen() -> None:
    placement = Placement(random.Random(1))
    placement.update([room("full", 100), room("half", 500), room("empty", 900)], 0.0)
    chosen = [placement.choose(50, 0.0) for _ in range(300)]
    counts = {name: sum(peer is not None and peer.node == name for peer in chosen) for name in ("full", "half", "empty")}
    assert counts["full"] == 0
    assert 60 < counts["half"] < 140
    assert counts["empty"] > 160


def test_nobody_is_given_more_than_it_said_it_takes() -> None:
    placement = Placement(random.Random(1))
    placement.update([room("a", 100), room("b", 60)], 0.0)
    given = {"a": 0, "b": 0}
    while (peer := placement.choose(20, 0.0)) is not None:
        placement.sent(peer.node, 20)
        given[peer.node] += 20
    assert given == {"a": 100, "b": 60}
    assert not placement.any_room(0.0)


def test_an_old_table_and_a_node_that_failed_count_for_nothing() -> None:
    placement = Placement(random.Random(1))
    table = [room("a", 100)]
    placement.update(table, 0.0)
    placement.refused("a")
    assert placement.choose(1, 0.0) is None
    placement.update(table, 1.0)
    assert placement.choose(1, 1.0) is None, "the same table is no news"
    placement.update([room("a", 100)], 1.0)
    assert placement.choose(1, 1.0) is not None
    assert placement.choose(1, 1.1 + FRESH_S) is None


def test_nodes_of_one_host_share_what_comes() -> None:
    """Local first must not mean that pods with one host identity, or one of them, get everything."""
    for host_ids in (["h"] * 8, [str(i) for i in range(8)]):
        placement = Placement(random.Random(1))
        placement.update([room(str(i), 1000, host_id=host_id) for i, host_id in enumerate(host_ids)], 0.0)
        given = dict.fromkeys(map(str, range(8)), 0)
        for _ in range(400):
            peer = placement.choose(10, 0.0)
            assert peer is not None
            placement.sent(peer.node, 10)
            given[peer.node] += 10
        assert max(given.values()) - min(given.values()) <= 50


# --------------------------------------------------------------------------- long runs


def test_nodes_of_two_sizes_fill_evenly_and_lose_nothing_while_there_is_room() -> None:
    """400 and 1000 units, pages of three sizes, writers on two of eight nodes; then a newcomer."""
    cluster = Cluster()
    unit = 16 * PAGE
    for i in range(8):
        cluster.add(f"n{i}", (400 if i % 2 else 1000) * unit)
    rng = random.Random(3)
    capacity = sum(member.core.store.allocator.capacity for member in cluster.members.values())
    written = 0
    number = 0

    def used() -> int:
        return sum(member.core.store.used_bytes for member in cluster.members.values())

    def spread(without: Sequence[str] = ()) -> float:
        shares = [member.used_share for name, member in cluster.members.items() if name not in without]
        return max(shares) - min(shares)

    def write_a_second() -> None:
        nonlocal written, number
        for writer in ("n0", "n1"):
            for _ in range(4):
                length = rng.choice([PAGE, 3 * PAGE, 8 * PAGE])
                number += 1
                namespace = bytes([length // PAGE]) * 16
                status = cluster.write(writer, names(4, number), length, namespace)
                assert p.REFUSED not in status, f"refused with {1 - used() / capacity:.0%} free"
                written += 4 * length
        cluster.step(1.0)

    while used() < 0.55 * capacity:
        write_a_second()
    assert used() == written, "nothing was lost on the way"
    assert spread(without=("n0", "n1")) < 0.03
    assert max(cluster.members[name].used_share for name in ("n0", "n1")) < 0.95
    while used() < 0.86 * capacity:
        write_a_second()
    assert used() == written
    assert spread(without=("n0", "n1")) < 0.03

    before = len(cluster.pushed)
    newcomer = cluster.add("new", 1000 * unit, age_s=0.0)
    for _ in range(6):
        write_a_second()
    recent = cluster.pushed[before:]
    to_newcomer = sum(size for _, to, size in recent if to == "new")
    assert 0 < to_newcomer <= 0.15 * newcomer.store.allocator.capacity, "little by little"
    for _ in range(60):
        write_a_second()
    assert newcomer.store.used_bytes > 0.1 * newcomer.store.allocator.capacity, "but it is used"
    for _ in range(100):
        write_a_second()
        if spread() < 0.03:
            break
    assert spread() < 0.03
    for _ in range(50):  # full as it is, and with pages that come and go
        write_a_second()
        assert spread() < 0.06
    assert max(member.used_share for member in cluster.members.values()) < 0.95
    cluster.validate()


def test_a_chain_lies_where_it_was_written_so_that_a_lost_node_takes_only_its_own() -> None:
    """Eight nodes, each with chains of its own; one dies. Usable prefix pages kept: those of all others."""
    cluster = Cluster()
    for i in range(8):
        cluster.add(f"n{i}", 1000 * PAGE)
    chains = {f"n{i}": [names(50, (i, k)) for k in range(16)] for i in range(8)}
    for name, of_node in chains.items():
        for chain in of_node:
            cluster.write(name, chain)
    for _ in range(5):
        cluster.step()

    def usable() -> int:
        total = 0
        for of_node in chains.values():
            for chain in of_node:
                total += next((i for i, page in enumerate(chain) if not cluster.where(page)), len(chain))
        return total

    assert usable() == 8 * 16 * 50
    cluster.members["n3"].alive = False
    assert usable() >= 7 / 8 * 8 * 16 * 50

    scattered = Cluster()
    rng = random.Random(1)
    for i in range(8):
        scattered.add(f"n{i}", 1000 * PAGE)
    for of_node in chains.values():
        for chain in of_node:
            for page in chain:
                scattered.write(f"n{rng.randrange(8)}", [page])
    scattered.members["n3"].alive = False
    cluster = scattered
    assert usable() < 0.3 * 8 * 16 * 50, "what placement at random would keep"


def test_a_page_that_its_writer_spilled_outlives_the_writer() -> None:
    cluster = Cluster()
    cluster.add("a", 100 * PAGE)
    cluster.add("b", 1000 * PAGE)
    pages = names(300)
    for page in pages:
        cluster.write("a", [page])
        cluster.step(0.1)
    cluster.members["a"].alive = False
    assert [cluster.where(page) for page in pages[:210]] == [["b"]] * 210
    assert cluster.members["b"].core.store.coldest(1, OWN) == []


# --------------------------------------------------------------------------- real nodes


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    started: list[Node] = []

    def start(name: str = "n", **settings: object) -> Node:
        options = {"socket": str(tmp_path / f"{name}.sock"), "dram": "4MiB", "node": "embedded", "listen": "127.0.0.1:0"}
        started.append(Node(load_settings({}, {}, options | settings)[0]))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.stop()


class Pusher:
    """Another node, by hand."""

    def __init__(self, to: Node, data_key: bytes = b"") -> None:
        host, _, port = to.data_address.rpartition(":")
        peer = p.Peer(to.name, to.incarnation, host, int(port))
        self.connection = tcp.PeerConnection(peer, time.monotonic() + 5, data_key, "pusher")
        self.sock = self.connection.sock

    def offer(self, pages: Sequence[bytes], checksums: Sequence[int], length: int = PAGE) -> p.Message:
        tcp.send_message(self.sock, p.Push(2, "pusher", NS, GROUP, b"".join(pages), length, list(checksums), False, 3))
        return self.answer()

    def send(self, *bodies: bytes) -> p.Message:
        self.sock.sendall(b"".join(bodies))
        return self.answer()

    def answer(self) -> p.Message:
        message = tcp.receive_message(self.sock, p.decoder(p.FromData), time.monotonic() + 5)
        assert isinstance(message, p.Message)
        return message


def seeded(page: bytes, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=checksum_seed(NS, page))


def test_pushed_bytes_are_checked_and_only_whole_pages_count(node: Callable[..., Node]) -> None:
    to = node()
    one, two, three = names(3)
    bodies = [pattern(page, PAGE) for page in (one, two, three)]
    pusher = Pusher(to)
    checksums = [seeded(page, body) for page, body in zip((one, two, three), bodies, strict=True)]
    assert pusher.offer([one, two, three], checksums) == p.PushReply(bytes([p.WRITE] * 3), 3)
    swapped = pusher.send(bodies[1], bodies[0], bodies[2])
    assert swapped == p.Pushed(b"\x00\x00\x01", 3), "whole bytes of another page do not pass either"
    assert pusher.offer([one, two, three], checksums) == p.PushReply(bytes([p.WRITE, p.WRITE, p.HAVE]), 3)
    assert pusher.send(bodies[0], bodies[1]) == p.Pushed(b"\x01\x01", 3)
    for page, body in zip((one, two, three), bodies, strict=True):
        _, status, where, _ = to.store.locate(1, NS, page, PAGE, 0.0)
        assert status == bytes([p.LOCAL])
        assert bytes(to.segment.view[where[0] : where[0] + PAGE]) == body
    pusher.connection.close()


def test_a_push_that_breaks_off_leaves_nothing(node: Callable[..., Node]) -> None:
    to = node()
    for cut in (0, 1, PAGE, PAGE + 5):
        pusher = Pusher(to)
        assert isinstance(pusher.offer(names(2), [1, 2]), p.PushReply)
        assert to.store.used_bytes == 2 * PAGE
        pusher.sock.sendall(bytes(cut))
        pusher.connection.close()
        wait_until(lambda: to.store.used_bytes == 0, 10, "its room is free again")
    to.store.validate()
    assert to.store.objects == 0


def test_a_push_from_a_stranger_is_refused_where_the_cluster_has_a_key(node: Callable[..., Node], tmp_path: Path) -> None:
    key = ClusterKey.generate()
    key.save(str(tmp_path / "key"))
    to = node(key_file=str(tmp_path / "key"))
    stranger = Pusher(to)
    answer = stranger.offer(names(1), [1])
    assert isinstance(answer, p.Refused)
    assert "key" in answer.reason
    stranger.connection.close()
    assert to.store.used_bytes == 0
    member = Pusher(to, key.data_key)
    body = pattern(names(1)[0], PAGE)
    assert isinstance(member.offer(names(1), [seeded(names(1)[0], body)]), p.PushReply)
    assert member.send(body) == p.Pushed(b"\x01", 3)
    member.connection.close()


@pytest.fixture
def secured_master(tmp_path: Path) -> Iterator[tuple[MasterProcess, str]]:
    """A master with a key, and the key's file."""
    key_file = str(tmp_path / "key")
    ClusterKey.generate().save(key_file)
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "hicache_mooncake.cli", "master", "--listen", address, "--metrics", ""]
    master = MasterProcess(address, subprocess.Popen([*command, "--key-file", key_file], env=environment()))
    yield master, key_file
    master.kill()


def report_of(rank: FakeRank) -> dict[str, int | float | str | bool]:
    status = rank.client.status()
    assert status is not None
    return status.node


def test_what_one_node_has_no_room_for_another_one_keeps(
    secured_master: tuple[MasterProcess, str], start_node: Callable[..., NodeProcess]
) -> None:
    """25 MiB stored on a node of 16 MiB: nothing is evicted, and every byte is found again, from either host. In a cluster with
    a key, so that every push and every read proves itself."""
    master, key_file = secured_master
    small, large = (
        start_node(name, dram, (master.address,), ("--key-file", key_file))
        for name, dram in (("small", "16MiB"), ("large", "128MiB"))
    )
    ranks = [FakeRank(node.settings()) for node in (small, large)]
    try:
        pages = names(400)
        for first in range(0, 400, 16):
            assert ranks[0].store(NS, pages[first : first + 16]).ok == b"\x01" * 16
            wait_until(lambda: int(report_of(ranks[0])["used_bytes"]) <= 0.9 * (16 << 20), 30, "room again")
        figures = report_of(ranks[0])
        assert figures["evicted"] == 0
        assert int(figures["spilled"]) >= 170
        assert report_of(ranks[1])["taken"] == figures["spilled"]
        for rank in ranks:
            for first in range(0, 400, 16):
                some = pages[first : first + 16]
                wait_until(lambda rank=rank, some=some: rank.exists(NS, some) == 16, 30)  # type: ignore[misc]
                assert rank.load(NS, some).ok == b"\x01" * 16
    finally:
        for rank in ranks:
            rank.close()


def test_readers_of_pages_that_move_get_the_right_bytes_or_none(
    start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]
) -> None:
    """Stores, spills, evictions and reads by both hosts, all at once: `load` compares every byte."""
    master = start_master()
    small, large = (start_node(name, dram, (master.address,)) for name, dram in (("small", "16MiB"), ("large", "24MiB")))
    writer, *readers = [FakeRank(node.settings()) for node in (small, small, large)]
    batches = [names(16, i) for i in range(40)]
    stored = 0
    reasons: Counter[str] = Counter()
    loaded = [0, 0]
    wrong: list[AssertionError] = []
    done = threading.Event()

    def read(number: int) -> None:
        rng = random.Random(number)
        try:
            while not done.is_set():
                outcome = readers[number].load(NS, batches[rng.randrange(min(max(stored, 1), len(batches)))])
                loaded[number] += outcome.ok.count(1)
                reasons.update(outcome.reasons)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        # Again and again, since how soon the large one takes anything depends on its age: newcomers get little.
        deadline = time.monotonic() + RAMP_S + 30
        for batch in itertools.cycle(batches):
            writer.store(NS, batch)
            stored += 1
            wait_until(lambda: int(report_of(writer)["used_bytes"]) <= 0.95 * (16 << 20), 30, "room again")
            if stored >= len(batches) and all(loaded) and int(report_of(writer)["spilled"]):
                break
            assert time.monotonic() < deadline, f"nothing was given away: {report_of(writer)}"
            if wrong:
                break
    finally:
        done.set()
        for thread in threads:
            thread.join()
        figures = report_of(writer)
        for rank in (writer, *readers):
            rank.close()
    assert not wrong
    assert int(figures["spilled"]) > 0
    assert not {reason for reason in reasons if "checksum" in reason}
    assert figures["discarded"] == 0
