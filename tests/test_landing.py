"""Room that links write to: whose it is, what must be fenced before it goes back, and what never does."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_mooncake.node.landing import KEEP_S, Ended, Landing, Landings

BODY = 4096


def test_links_that_are_quiet_need_no_fence_and_all_others_do() -> None:
    landings = Landings(1 << 20)
    landing = landings.open(1, BODY, {7: [0, BODY], 8: [2 * BODY]}, {7: "a", 8: "b"}, 0.0)
    assert landings.begin_end(landing, [7]) == {8}
    assert landings.ended(landing) == Ended([0, BODY, 2 * BODY], [])
    assert landings.lent_bytes == 0


def test_a_landing_is_ended_once() -> None:
    """The mover says that it is done while its time runs out."""
    landings = Landings(1 << 20)
    landing = landings.open(1, BODY, {7: [0]}, {7: "a"}, 0.0)
    assert landings.begin_end(landing) == {7}
    assert landings.begin_end(landing, [7]) is None
    assert landings.find(1, landing.id) is landing, "its end can be waited for"
    landings.ended(landing)
    assert landings.find(1, landing.id) is None


def test_room_of_a_link_that_cannot_be_fenced_counts_as_lent_for_good() -> None:
    landings = Landings(4 * BODY)
    landing = landings.open(1, BODY, {7: [0], 8: [BODY, 2 * BODY]}, {7: "a", 8: "b"}, 0.0)
    landings.begin_end(landing)
    assert landings.ended(landing, [8]) == Ended([0], [BODY, 2 * BODY])
    assert (landings.lent_bytes, landings.stranded_bytes) == (2 * BODY, 2 * BODY)
    assert landings.room_for(1, BODY) == 2


def test_stranded_room_comes_back_when_all_links_that_may_write_there_are_ended() -> None:
    landings = Landings(4 * BODY)
    landing = landings.open(1, BODY, {7: [0], 8: [BODY]}, {7: "a", 8: "b"}, 0.0, txn=3, claimed=[7, 8], claimed_bytes=2 * BODY)
    assert not landings.may_claim(3 * BODY)
    landings.begin_end(landing)
    landings.strand([7, 8], [2 * BODY, 3 * BODY], 2 * BODY)
    landings.ended(landing, [7, 8])
    landings.validate()
    assert landings.stranded_bytes == 4 * BODY
    assert landings.fenced(7) == [0]
    assert landings.fenced(7) == landings.fenced(9) == []
    assert sorted(landings.fenced(8)) == [BODY, 2 * BODY, 3 * BODY]
    landings.validate()
    assert (landings.lent_bytes, landings.claimed_bytes, landings.stranded_bytes) == (0, 0, 0)
    assert landings.may_claim(4 * BODY)


def test_nobody_ends_a_landing_of_somebody_else() -> None:
    landings = Landings(1 << 20)
    landing = landings.open(1, BODY, {7: [0]}, {7: "a"}, 0.0)
    assert landings.find(2, landing.id) is None
    assert landings.of_owner(2) == []


def test_claimed_room_is_known_by_its_transaction_and_does_not_expire() -> None:
    landings = Landings(1 << 20)
    plain = landings.open(1, BODY, {7: [0]}, {7: "a"}, 0.0)
    claimed = landings.open(1, BODY, {}, {}, 0.0, txn=5, claimed=[7])
    assert landings.of_txn(1, 5) is claimed
    assert landings.of_txn(1, 0) is None
    assert landings.of_txn(2, 5) is None
    assert landings.expired(KEEP_S - 1) == []
    assert landings.expired(KEEP_S) == [plain]
    assert landings.begin_end(claimed) == {7}


def test_an_owner_has_a_few_landings_at_a_time() -> None:
    landings = Landings(1 << 20)
    count = 0
    while landings.may_open(1):
        landings.open(1, BODY, {7: [count * BODY]}, {7: "a"}, 0.0)
        count += 1
        assert count < 100
    assert landings.room_for(1, BODY) == 0
    assert landings.room_for(2, BODY) > 0
    landings.validate()


class Model(RuleBasedStateMachine):
    """Offsets are given out by a set; whatever happens none is free while a link that is not fenced may write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.landings = Landings(16 * BODY)
        self.free = set(range(0, 64 * BODY, BODY))
        self.open: list[Landing] = []
        self.ending: list[tuple[Landing, set[int]]] = []
        self.now = 0.0

    @rule(owner=st.integers(1, 3), wanted=st.lists(st.integers(0, 4), min_size=1, max_size=3), txn=st.booleans())
    def lend(self, owner: int, wanted: list[int], txn: bool) -> None:
        places: dict[int, list[int]] = {}
        left = self.landings.room_for(owner, BODY)
        for link, count in enumerate(wanted):
            count = min(count, left)
            places[link] = [self.free.pop() for _ in range(count)]
            left -= count
        if self.landings.may_open(owner) and (any(places.values()) or txn):
            nodes = dict.fromkeys(places, "n")
            number = 100 + len(self.open) if txn else 0
            opened = self.landings.open(owner, BODY, places, nodes, self.now, txn=number, claimed=[9] if txn else [])
            self.open.append(opened)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50), quiet=st.sets(st.sampled_from([0, 1, 2, 9])))
    def begin(self, which: int, quiet: set[int]) -> None:
        landing = self.open.pop(which % len(self.open))
        fence = self.landings.begin_end(landing, quiet)
        assert fence == landing.links - quiet
        self.ending.append((landing, fence))

    @precondition(lambda self: self.ending)
    @rule(which=st.integers(0, 50), refuse=st.booleans())
    def end(self, which: int, refuse: bool) -> None:
        landing, fence = self.ending.pop(which % len(self.ending))
        ended = self.landings.ended(landing, fence if refuse else ())
        writable = {at for link in fence for at in landing.places.get(link, ())} if refuse else set()
        assert set(ended.stranded) == writable
        assert not set(ended.free) & writable
        self.free |= set(ended.free)

    @rule(link=st.integers(0, 2))
    def fenced_late(self, link: int) -> None:
        freed = self.landings.fenced(link)
        assert not self.free & set(freed)
        self.free |= set(freed)

    @rule(step=st.floats(0, KEEP_S))
    def wait(self, step: float) -> None:
        self.now += step
        assert all(not each.claimed and not each.ending for each in self.landings.expired(self.now))

    @invariant()
    def holds(self) -> None:
        self.landings.validate()
        assert len(self.landings) == len(self.open) + len(self.ending)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
