"""Places that links write to, as a mover uses them: each by one page at a time, and none again that may still be written to."""

from __future__ import annotations

import random

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Admission
from hicache_mooncake.client.over_links import MAX_ASK_BYTES, OverLinks
from hicache_mooncake.client.remote import Ask, FetchPlan

A, B = p.Peer("a", b"i" * 8, "a", 1), p.Peer("b", b"i" * 8, "b", 1)
BODY = 64 << 10


def located(columns: list[tuple[int, int, int]], links: list[int], landing: int = 1) -> p.Located:
    """(status, peer, place) of each page."""
    status, where, places = (list(column) for column in zip(*columns, strict=True))
    return p.Located(0, bytes(status), where, [0] * len(columns), [A, B], links=links, landing=landing, places=places)


def of_a(count: int, placed: int) -> OverLinks:
    columns = [(p.REMOTE, 0, i * BODY if i < placed else -1) for i in range(count)]
    return OverLinks(located(columns, [7, 0]), range(count), BODY)


def ask(pages: list[int], peer: p.Peer = A, *, over_link: bool = True) -> Ask:
    return Ask(peer, pages, 0.0, 1.0, probe=False, over_link=over_link)


def go(_peer: p.Peer) -> Admission:
    return Admission.GO


def test_pages_without_a_link_are_asked_for_without() -> None:
    links = OverLinks(located([(p.REMOTE, 0, 0), (p.REMOTE, 1, -1)], [7, 0]), [0, 1], BODY)
    assert links.choose(A, [0]) == [0]
    assert links.choose(B, [1]) == []
    assert links.take(ask([1], B, over_link=False)) == (0, [])
    assert OverLinks(located([(p.REMOTE, 0, 0)], [7, 0], landing=0), [0], BODY).choose(A, [0]) == []


def test_pages_take_turns_in_the_places() -> None:
    links = of_a(5, placed=2)
    first = ask(links.choose(A, range(5)))
    assert first.pages == [0, 1]
    link, into = links.take(first)
    assert (link, sorted(into)) == (7, [0, BODY])
    assert links.choose(A, [2, 3, 4]) == [], "it is not answered yet"
    links.answered(first, failed=False)
    assert links.choose(A, [2, 3, 4]) == [], "and not copied on"
    links.copied(first)
    second = ask(links.choose(A, [2, 3, 4]))
    assert second.pages == [2, 3]
    assert sorted(links.take(second)[1]) == [0, BODY]


def test_a_page_that_stays_has_its_own_place() -> None:
    columns = [(p.FETCH, 0, 5 * BODY), (p.REMOTE, 0, 0), (p.FETCH, 0, 6 * BODY)]
    links = OverLinks(located(columns, [7, 0]), [10, 11, 12], BODY)
    whole = ask(links.choose(A, [10, 11, 12]))
    assert links.take(whole) == (7, [5 * BODY, 0, 6 * BODY])
    assert [links.place(whole, page) for page in whole.pages] == [5 * BODY, 0, 6 * BODY]
    assert links.spoilt() == {10, 12}, "while it is not answered"
    links.answered(whole, failed=False)
    links.copied(whole)
    assert links.spoilt() == set()
    assert links.choose(A, [1, 2]) == [1], "the one place that is anybody's"


@pytest.mark.parametrize("answered", [False, True], ids=["never answered", "said to have failed"])
def test_a_link_that_is_not_quiet_is_not_used_again(answered: bool) -> None:
    links = of_a(3, placed=3)
    first = ask([0])
    assert links.quiet() == [7]
    links.take(first)
    if answered:
        links.answered(first, failed=True)
    assert links.quiet() == []
    assert links.choose(A, [1, 2]) == []


def test_room_that_is_gone_is_not_used() -> None:
    links = of_a(3, placed=3)
    links.give_up()
    assert links.landing == 0
    assert links.choose(A, [0, 1, 2]) == []


def test_large_loads_are_asked_for_in_parts() -> None:
    assert len(of_a(8, placed=8).choose(A, range(8))) == 8, "too small to be worth two requests"
    assert len(of_a(64, placed=64).choose(A, range(64))) == 32
    count = 4 * MAX_ASK_BYTES // BODY
    assert len(of_a(count, placed=count).choose(A, range(count))) == MAX_ASK_BYTES // BODY


def test_whatever_happens_no_place_is_of_two_pages() -> None:
    """Asks begin, are answered, fail and are copied on in any order, also with the next one under way while one is copied."""
    for seed in range(200):
        rng = random.Random(seed)
        count, placed = rng.randint(1, 60), rng.randint(1, 60)
        columns = [(rng.choice([p.REMOTE, p.FETCH]), 0, i * BODY if i < placed else -1) for i in range(count)]
        links = OverLinks(located(columns, [7, 0]), range(count), BODY)
        left, answered = list(range(count)), []
        busy: dict[int, Ask] = {}
        while chosen := links.choose(A, left):
            begun = ask(chosen)
            left = [page for page in left if page not in chosen]
            for place in links.take(begun)[1]:
                assert place not in busy
                busy[place] = begun
            if rng.random() < 0.05:
                break  # never answered
            links.answered(begun, failed=False)
            answered.append(begun)
            while answered and rng.random() < 0.7:
                done = answered.pop(0)
                links.copied(done)
                busy = {place: of for place, of in busy.items() if of is not done}


def test_a_plan_asks_for_the_next_pages_while_the_first_are_copied() -> None:
    links = of_a(64, placed=64)
    plan = FetchPlan(10.0, over_link=links.choose)
    for page in range(64):
        plan.add(page, [A])
    (first,) = plan.next(0.0, go)
    assert first.over_link
    assert first.until == 5.0, "half of the time is for tcp"
    links.take(first)
    assert plan.next(0.0, go) == []
    links.answered(first, failed=False)
    plan.landed(first)
    (second,) = plan.next(1.0, go)
    assert len(first.pages) == len(second.pages) == 32
    for page in first.pages:
        plan.arrived(first, page)
    plan.ended(first)
    assert plan.expired(6.0) == [second]
    plan.ended(second, "deadline", stay=True)
    links.take(second)
    (third,) = plan.next(6.0, go)
    assert (third.over_link, third.pages, third.until) == (False, second.pages, 10.0)
