"""Which links there are, when one is made anew, and when the last user lets one be forgotten."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import STABLE_S
from hicache_mooncake.node.link_book import IDLE_S, RETRY_MAX_S, UNKNOWN_S, LinkBook, State

LIFE, NEXT_LIFE = b"i" * 8, b"j" * 8


def peer(node: str, incarnation: bytes = LIFE) -> p.Peer:
    return p.Peer(node, incarnation, "10.0.0.1", 1)


def book_of() -> LinkBook:
    return LinkBook(random.Random(1))


def stands(book: LinkBook, link: int, node: str = "a", incarnation: bytes = LIFE, now: float = 0.0) -> list[int]:
    assert book.accept(link, node, incarnation, now) == ""
    return book.up(link, now)


def test_one_link_is_made_at_a_time_and_then_used() -> None:
    book = book_of()
    assert book.want(peer("a"), 1, 0.0)
    assert not book.want(peer("a"), 2, 0.0)
    assert book.link_to("a", LIFE, 0.0) == 0
    book.up(1, 0.1)
    assert book.link_to("a", LIFE, 0.2) == 1
    assert book.link_to("b", LIFE, 0.2) == 0


def test_a_link_to_a_former_life_is_not_used_and_ended_when_the_next_one_has_one() -> None:
    book = book_of()
    stands(book, 1)
    assert book.link_to("a", NEXT_LIFE, 1.0) == 0
    assert stands(book, 2, incarnation=NEXT_LIFE, now=2.0) == [1]
    assert book.link_to("a", NEXT_LIFE, 3.0) == 2


def test_a_node_that_asks_again_and_again_replaces_its_oldest_link() -> None:
    book = book_of()
    assert stands(book, 1) == []
    assert stands(book, 2, now=1.0) == [], "both ends may have begun at once"
    assert stands(book, 3, now=2.0) == [1]


def test_links_that_die_young_are_made_ever_more_seldom() -> None:
    """Each new one dies within milliseconds: made some ten times in the first minutes, and not ten times a second."""
    book = book_of()
    made, now = 0, 0.0
    while now < 300.0:
        if book.want(peer("a"), made + 1, now):
            made += 1
            book.up(made, now)
            book.down(made, now + 0.001, "completion with error")
            book.forget()
        now += 0.05
    assert 5 <= made <= 12
    (view,) = book.views(10)
    assert (view.state, view.why) == ("down", "completion with error")


def test_one_that_stood_for_long_is_made_anew_soon() -> None:
    book = book_of()
    now = 0.0
    for link in range(1, 8):
        while not book.want(peer("a"), link, now):
            now += 0.05
        book.up(link, now)
        book.down(link, now + 0.001, "died")
        book.forget()
    while not book.want(peer("a"), 100, now):
        now += 0.05
    book.up(100, now)
    book.down(100, now + STABLE_S, "the peer has ended")
    assert book.want(peer("a"), 101, now + STABLE_S + 1.0)


def test_who_knows_no_links_is_left_alone_for_long_but_its_next_life_is_asked() -> None:
    book = book_of()
    assert book.want(peer("a"), 1, 0.0)
    book.down(1, 0.0, "an older release", at_least_s=UNKNOWN_S)
    assert not book.want(peer("a"), 2, UNKNOWN_S * 0.75)
    assert book.want(peer("a", NEXT_LIFE), 3, 1.0)
    book.down(3, 1.0, "not up yet")
    assert not book.want(peer("a"), 4, 2.0), "whichever life a master names"
    assert UNKNOWN_S <= RETRY_MAX_S


def test_a_link_is_remembered_until_nobody_uses_it() -> None:
    book = book_of()
    stands(book, 1)
    assert book.use(1, 0.0)
    book.down(1, 1.0, "died")
    assert not book.use(1, 1.0)
    assert book.forget() == []
    assert book.accept(1, "b", LIFE, 1.0) != "", "its id is taken"
    book.unuse(1)
    assert book.forget() == [1]
    assert book.find(1) is None


def test_what_nobody_uses_is_named_after_a_while() -> None:
    book = book_of()
    stands(book, 1)
    stands(book, 2, "b")
    book.link_to("b", LIFE, IDLE_S / 2)
    assert book.idle(IDLE_S) == [1]


class Model(RuleBasedStateMachine):
    """Whatever comes in whatever order: a link is up to one life of one node, and what is in use is not forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LinkBook(random.Random(2))
        self.now = 0.0
        self.next = 0
        self.users: dict[int, int] = {}

    @rule(node=st.sampled_from("abc"), life=st.sampled_from([LIFE, NEXT_LIFE]))
    def want(self, node: str, life: bytes) -> None:
        self.next += 1
        if self.book.want(peer(node, life), self.next, self.now):
            entry = self.book.find(self.next)
            assert entry is not None
            assert entry.state is State.MAKING

    @rule(node=st.sampled_from("abc"), life=st.sampled_from([LIFE, NEXT_LIFE]))
    def accept(self, node: str, life: bytes) -> None:
        self.next += 1
        assert self.book.accept(self.next, node, life, self.now) == ""

    def some(self, which: int, *states: State) -> int:
        ids = [link for link in range(1, self.next + 1) if (e := self.book.find(link)) is not None and e.state in states]
        return ids[which % len(ids)] if ids else 0

    @rule(which=st.integers(0, 99))
    def up(self, which: int) -> None:
        link = self.some(which, State.MAKING)
        if link:
            for former in self.book.up(link, self.now):
                assert former != link
                self.book.down(former, self.now, "replaced")

    @rule(which=st.integers(0, 99))
    def down(self, which: int) -> None:
        link = self.some(which, State.MAKING, State.UP)
        if link:
            self.book.down(link, self.now, "died")

    @rule(which=st.integers(0, 99))
    def use(self, which: int) -> None:
        link = self.some(which, State.MAKING, State.UP, State.DOWN)
        if link and self.book.use(link, self.now):
            self.users[link] = self.users.get(link, 0) + 1

    @rule(which=st.integers(0, 99))
    def unuse(self, which: int) -> None:
        if self.users:
            link = sorted(self.users)[which % len(self.users)]
            self.book.unuse(link)
            self.users[link] -= 1
            if not self.users[link]:
                del self.users[link]

    @rule()
    def forget(self) -> None:
        assert not set(self.book.forget()) & set(self.users)

    @rule(step=st.floats(0, 100))
    def wait(self, step: float) -> None:
        self.now += step

    @invariant()
    def holds(self) -> None:
        self.book.validate()
        for node in "abc":
            for life in (LIFE, NEXT_LIFE):
                link = self.book.link_to(node, life, self.now)
                entry = self.book.find(link)
                assert not link or (entry is not None and (entry.node, entry.incarnation) == (node, life))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
