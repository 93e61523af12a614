"""Room for links as a node gives it: every byte that is lent comes back, and nobody's use of a link is forgotten."""

from __future__ import annotations

import random
import threading
from collections import Counter

from hicache_mooncake import protocol as p
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.rooms import Rooms
from hicache_mooncake.node.store import Store

NS = b"n" * 16
BODY = 4096
A, B = p.Peer("a", b"i" * 8, "a", 1), p.Peer("b", b"i" * 8, "b", 1)


class FakeLinks:
    """One link to each node in `up`. Counts users, and takes down what was fenced."""

    possible = True

    def __init__(self) -> None:
        self.up = {"a": 7, "b": 8}
        self.users: Counter[int] = Counter()
        self.fenced: list[int] = []
        self.refuses = False
        self.gave_up = ""

    def link_to(self, peer: p.Peer) -> int:
        return self.up.get(peer.node, 0)

    def begin(self, link: int, _peer: str) -> bool:
        self.users[link] += 1
        return True

    def done(self, link: int) -> None:
        self.users[link] -= 1

    def fence(self, link: int, _why: str) -> bool:
        self.fenced.append(link)
        return not self.refuses

    def received(self, size: int) -> None:
        pass

    def give_up(self, why: str) -> None:
        self.gave_up = why

    def resume(self) -> None:
        self.gave_up = ""


class FakeNode:
    def __init__(self, capacity: int = 64 * BODY) -> None:
        self.core = NodeCore("n", b"i" * 8, Store(capacity), masters=True, log=lambda *_: None, rng=random.Random(1))
        self.lock = threading.Lock()
        self.links = FakeLinks()
        self.rooms = Rooms(self, 64 * BODY)  # type: ignore[arg-type]

    @property
    def lent(self) -> int:
        self.core.store.validate()
        return self.core.store.used_bytes // BODY

    def land(self, where: list[int], *, peers: list[p.Peer], txn: int = 0, room: list[int] | None = None) -> p.Located:
        status = bytes([p.FETCH if room else p.REMOTE]) * len(where)
        located = p.Located(0, status, where, [0] * len(where), peers, "", txn, room or [])
        return self.rooms.land(1, p.Locate(NS, b"h" * 32 * len(where), BODY, links=True), located)

    def claim(self, count: int) -> tuple[int, list[int]]:
        hashes = b"".join(bytes([i]) * 32 for i in range(count))
        txn, _, room = self.core.store.claim(1, NS, hashes, BODY, 0.0)
        return txn, room


def test_a_node_that_is_named_twice_has_one_link_and_all_its_room() -> None:
    """Masters name a node once a tier."""
    node = FakeNode()
    located = node.land([0, 1, 0, 1], peers=[A, A])
    assert located.links == [7, 7]
    assert len(set(located.places)) == 4
    assert (node.lent, node.links.users[7]) == (4, 1)
    node.rooms.landed(1, p.Landed(located.landing, [7]))
    assert (node.lent, node.links.users[7], node.links.fenced) == (0, 0, [])


def test_what_found_no_room_names_no_link() -> None:
    node = FakeNode()
    first = node.land([0] * 8, peers=[A])  # an eighth of the segment
    assert first.links == [7]
    second = node.land([1], peers=[A, B])
    assert (second.landing, not any(second.links)) == (0, True)
    assert node.links.users == Counter({7: 1, 8: 0})
    node.rooms.landed(1, p.Landed(first.landing, [7]))
    assert node.lent == 0
    assert node.land([1], peers=[A, B]).links == [0, 8]


def test_nothing_is_evicted_for_it() -> None:
    node = FakeNode(8 * BODY)
    node.claim(8)
    assert node.land([0], peers=[A]).landing == 0
    assert node.links.users[7] == 0


def test_who_knows_no_links_gets_none() -> None:
    node = FakeNode()
    located = p.Located(0, bytes([p.REMOTE]), [0], [0], [A])
    assert node.rooms.land(1, p.Locate(NS, b"h" * 32, BODY), located) is located


def test_claimed_room_is_fenced_before_its_commit_unless_it_is_quiet() -> None:
    for quiet in ([], [7]):
        node = FakeNode()
        txn, room = node.claim(2)
        located = node.land([0, 0], peers=[A], txn=txn, room=room)
        assert located.places == room
        node.rooms.landed(1, p.Landed(located.landing, quiet))
        assert node.links.fenced == ([] if quiet else [7])
        node.rooms.settle(1, txn)
        assert node.links.fenced == ([] if quiet else [7]), "once"
        assert node.core.commit(1, txn, b"\x01\x01", [1, 2]) == b"\x01\x01"


def test_a_commit_without_a_word_of_the_links_fences_them() -> None:
    node = FakeNode()
    txn, room = node.claim(2)
    node.land([0, 0], peers=[A], txn=txn, room=room)
    node.rooms.settle(1, txn)
    assert node.links.fenced == [7]


def test_a_connection_that_ends_fences_all_that_it_had() -> None:
    node = FakeNode()
    txn, room = node.claim(1)
    node.land([0], peers=[A], txn=txn, room=room)
    node.land([0, 1], peers=[A, B])
    node.rooms.settle_owner(2)
    assert node.links.fenced == []
    node.rooms.settle_owner(1)
    node.core.drop_owner(1)
    assert set(node.links.fenced) == {7, 8}
    assert (node.lent, +node.links.users) == (0, Counter())


def test_room_that_cannot_be_fenced_is_lost_and_links_with_it_when_it_is_much() -> None:
    node = FakeNode()
    node.links.refuses = True
    located = node.land([0, 0, 1], peers=[A, B])
    node.rooms.landed(1, p.Landed(located.landing, [8]))
    assert node.lent == 2
    assert node.rooms.report() == {"landing_bytes": 0, "quarantined_bytes": 2 * BODY}
    assert not node.links.gave_up
    txn, room = node.claim(3)
    located = node.land([0, 0, 0], peers=[A], txn=txn, room=room)
    node.rooms.landed(1, p.Landed(located.landing))
    assert node.core.commit(1, txn, b"\x01" * 3, [1, 2, 3]) == bytes(3)
    assert node.lent == 5
    assert node.links.gave_up


def test_room_of_a_link_that_is_ended_after_all_comes_back_and_links_are_used_again() -> None:
    node = FakeNode()
    node.links.refuses = True
    txn, room = node.claim(4)
    located = node.land([0, 0, 0, 1], peers=[A, B], txn=txn, room=room)
    node.rooms.landed(1, p.Landed(located.landing))
    lent = node.land([0, 1], peers=[A, B])
    node.rooms.landed(1, p.Landed(lent.landing))
    assert node.links.gave_up
    assert node.rooms.report()["quarantined_bytes"] == 6 * BODY
    node.rooms.free(7)
    assert node.rooms.report()["quarantined_bytes"] == 5 * BODY, "both may have written to the claimed room"
    node.rooms.free(8)
    assert node.rooms.report() == {"landing_bytes": 0, "quarantined_bytes": 0}
    assert node.lent == 0
    assert not node.links.gave_up


def test_a_link_that_is_ended_while_its_room_is_set_aside_leaves_nothing_behind() -> None:
    node = FakeNode()
    located = node.land([0, 0], peers=[A])
    answers = iter((False, True))
    node.links.fence = lambda *_: next(answers)  # type: ignore[method-assign]
    node.rooms.landed(1, p.Landed(located.landing))
    assert node.rooms.report() == {"landing_bytes": 0, "quarantined_bytes": 0}
    assert node.lent == 0


def test_no_more_is_claimed_over_links_than_may_be_lost() -> None:
    node = FakeNode()
    for count, linked in ((5, True), (4, False), (3, True), (1, False)):
        hashes = b"".join(bytes([count, i]) * 16 for i in range(count))
        txn, _, room = node.core.store.claim(1, NS, hashes, BODY, 0.0)
        located = node.land([0] * count, peers=[A], txn=txn, room=room)
        assert (located.landing != 0, any(located.links)) == (linked, linked)
    assert node.links.users[7] == 2
