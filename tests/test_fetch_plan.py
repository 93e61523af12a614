"""Which holder is asked for which page, and what is tried after a failure: the decisions alone, without sockets or clocks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Admission, Breaker
from hicache_mooncake.client.remote import Ask, Doubt, FetchPlan
from hicache_mooncake.transfer.peers import address_of


def peer(name: str) -> p.Peer:
    return p.Peer(name, b"i" * 8, name, 1)


A, B, C = peer("a"), peer("b"), peer("c")


def go(_peer: p.Peer) -> Admission:
    return Admission.GO


def plan_of(pages: dict[int, list[p.Peer]], deadline: float = 10.0) -> FetchPlan:
    plan = FetchPlan(deadline)
    for page, holders in pages.items():
        plan.add(page, holders)
    return plan


def shape(asks: list[Ask]) -> dict[str, list[int]]:
    return {ask.peer.node: ask.pages for ask in asks}


def test_each_holder_is_asked_once_for_all_its_pages() -> None:
    plan = plan_of({0: [A], 1: [B], 2: [A, B]})
    asks = plan.next(0.0, go)
    assert shape(asks) == {"a": [0, 2], "b": [1]}
    assert plan.next(0.0, go) == []
    for ask in asks:
        for page in ask.pages:
            plan.arrived(ask, page)
        plan.ended(ask)
    assert plan.done
    assert not plan.reasons
    assert plan.blamed == []


def test_a_first_holder_gets_half_of_the_time_where_there_is_a_second() -> None:
    plan = plan_of({0: [A, B], 1: [C]})
    first, alone = plan.next(2.0, go)
    assert (first.until, alone.until) == (6.0, 10.0)
    assert plan.due() == 6.0
    assert plan.expired(5.9) == []
    assert plan.expired(6.0) == [first]
    plan.ended(first, "deadline", blame=True)
    (second,) = plan.next(6.0, go)
    assert (second.peer.node, second.pages, second.until) == ("b", [0], 10.0)
    assert plan.blamed == ["a"]


@pytest.mark.parametrize("reason", ["gone_remote", "wrong_length", "checksum_remote"])
def test_a_page_that_a_holder_cannot_give_is_asked_of_the_other(reason: str) -> None:
    plan = plan_of({0: [A, B], 1: [A]})
    (ask,) = plan.next(0.0, go)
    plan.missed(ask, 0, reason, blame=reason == "checksum_remote")
    plan.missed(ask, 1, reason, blame=reason == "checksum_remote")
    plan.ended(ask)
    assert plan.blamed == (["a"] if reason == "checksum_remote" else []), "once a failure, not once a page"
    (again,) = plan.next(0.0, go)
    assert (again.peer.node, again.pages) == ("b", [0])
    plan.arrived(again, 0)
    plan.ended(again)
    assert plan.done
    assert plan.reasons == {reason: 1}, "only the page that did not come"


def test_a_page_waits_for_its_second_holder_while_that_one_answers_another_ask() -> None:
    plan = plan_of({0: [A, B], 1: [B]})
    first, second = plan.next(0.0, go)
    plan.ended(first, "peer_failed", blame=True)
    assert plan.next(0.0, go) == [], "one request at a time on a connection"
    plan.arrived(second, 1)
    plan.ended(second)
    assert shape(plan.next(0.0, go)) == {"b": [0]}


def test_recalled_holders_have_half_of_the_time_and_what_they_do_not_give_is_no_miss_yet() -> None:
    plan = FetchPlan(10.0, recalled_until=6.0)
    for page, holders in {0: [A, B], 1: [A], 2: [C], 3: [C]}.items():
        plan.add(page, holders)
    first, alone = plan.next(2.0, go)
    assert (first.until, alone.until) == (4.0, 6.0), "and a first one half of that"
    plan.arrived(alone, 2)
    plan.ended(alone, "engine_memory", final=True)
    plan.ended(first, "deadline", blame=True)
    (second,) = plan.next(4.0, go)
    assert (second.peer.node, second.pages, second.until) == ("b", [0], 6.0)
    plan.ended(second, "deadline", stay=True)
    assert plan.next(6.0, go) == []
    assert plan.done
    assert plan.reasons == {"engine_memory": 1}, "no holder can help"
    a = address_of(A)
    assert plan.doubtful == {0: Doubt("deadline", [a]), 1: Doubt("deadline", [a])}, "b may only be slow"
    anew = FetchPlan(10.0, before=plan.doubtful)
    anew.add(0, [A, C])
    anew.add(1, [A])
    assert shape(anew.next(6.0, go)) == {"c": [0], "a": [1]}, "who was tried comes last"


def test_a_page_that_was_tried_before_keeps_its_reason_when_nobody_may_be_asked() -> None:
    plan = FetchPlan(10.0, before={0: Doubt("checksum_remote", []), 1: Doubt("gone_remote", [])})
    plan.add(0, [A])
    plan.add(1, [B])
    (ask,) = plan.next(0.0, lambda peer: Admission.NO if peer is A else Admission.GO)
    plan.ended(ask, "peer_failed", blame=True)
    assert plan.reasons == {"checksum_remote": 1, "peer_failed": 1}


def test_an_open_breaker_passes_the_pages_on_and_blames_nobody() -> None:
    plan = plan_of({0: [A, B], 1: [A], 2: [A, C]})
    asks = plan.next(0.0, lambda peer: Admission.NO if peer is A else Admission.GO)
    assert shape(asks) == {"b": [0], "c": [2]}
    assert plan.reasons == {"peer_down": 1}
    assert plan.blamed == []


def test_a_miss_keeps_the_reason_of_what_was_tried() -> None:
    plan = plan_of({0: [A, B]})
    (ask,) = plan.next(0.0, go)
    plan.missed(ask, 0, "checksum_remote", blame=True)
    plan.ended(ask)
    assert plan.next(0.0, lambda peer: Admission.NO) == []
    assert plan.reasons == {"checksum_remote": 1}


def test_a_probe_risks_one_page_and_little_time() -> None:
    """Half-open: one page that nobody else has; what others have goes there, and the rest waits for what becomes of it."""
    plan = plan_of({0: [A, B], 1: [A], 2: [A]})
    asks = plan.next(0.0, lambda peer: Admission.PROBE if peer is A else Admission.GO)
    assert shape(asks) == {"a": [1], "b": [0]}
    probe = asks[0]
    assert probe.probe
    assert probe.until == 0.5
    plan.arrived(probe, 1)
    plan.ended(probe)
    assert shape(plan.next(0.1, go)) == {"a": [2]}


def test_what_waited_for_a_probe_that_failed_is_a_miss() -> None:
    plan = plan_of({0: [A], 1: [A]})
    (probe,) = plan.next(0.0, lambda peer: Admission.PROBE)
    plan.ended(probe, "peer_failed", blame=True)
    assert plan.next(0.1, lambda peer: Admission.NO) == []
    assert plan.done
    assert plan.reasons == {"peer_failed": 1, "peer_down": 1}


def test_a_slow_holder_goes_on_with_what_nobody_else_has() -> None:
    plan = plan_of({0: [A, B], 1: [A], 2: [A]})
    (ask,) = plan.next(0.0, go)
    plan.ended(ask, "deadline", stay=True)
    asks = plan.next(5.0, go)
    assert shape(asks) == {"a": [1, 2], "b": [0]}
    assert [ask.until for ask in asks] == [10.0, 10.0]
    slow = next(ask for ask in asks if ask.peer is A)
    plan.arrived(slow, 1)
    plan.ended(slow, "deadline", stay=True)
    assert shape(plan.next(9.0, go)) == {}, "once"
    assert plan.reasons == {"deadline": 1}


def test_a_stale_connection_costs_nothing() -> None:
    plan = plan_of({0: [A], 1: [A]})
    (ask,) = plan.next(0.0, go)
    plan.arrived(ask, 0)
    plan.again(ask)
    assert shape(plan.next(0.0, go)) == {"a": [1]}
    assert plan.blamed == []


def test_without_time_nobody_is_asked() -> None:
    plan = plan_of({0: [A, B], 1: [B]}, deadline=1.0)
    assert plan.next(0.999, go) == []
    assert plan.done
    assert plan.reasons == {"deadline": 2}


def test_memory_that_cannot_be_written_is_not_tried_again() -> None:
    plan = plan_of({0: [A, B], 1: [A]})
    (ask,) = plan.next(0.0, go)
    plan.ended(ask, "engine_memory", final=True)
    assert plan.done
    assert plan.reasons == {"engine_memory": 2}


def test_a_large_batch_goes_in_turns() -> None:
    """P30: no request covers more than a bounded number of pages, and each has a part of the time of its own."""
    plan = plan_of({page: [A] for page in range(5000)})
    seen: list[int] = []
    while not plan.done:
        (ask,) = plan.next(0.0, go)
        assert len(ask.pages) <= 1024
        for page in ask.pages:
            plan.arrived(ask, page)
        seen += ask.pages
        plan.ended(ask)
    assert seen == list(range(5000))


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_page_ends_once_whatever_happens(rng: random.Random) -> None:
    """In any order of successes, failures, refusals and time: no page is lost, asked twice at once, or counted twice, nobody is
    asked after the deadline, and it ends."""
    peers = [A, B, C]
    pages = {page: rng.sample(peers, rng.choice([1, 2])) for page in range(rng.randrange(1, 20))}
    plan = plan_of(pages)
    now = 0.0
    arrived: set[int] = set()
    under_way: list[Ask] = []
    attempts = dict.fromkeys(pages, 0)
    for _ in range(2000):
        new = plan.next(now, lambda _: rng.choice([Admission.GO, Admission.GO, Admission.PROBE, Admission.NO]))
        under_way += new
        for ask in new:
            assert ask.until <= plan.deadline
            for page in ask.pages:
                attempts[page] += 1
                assert ask.peer in pages[page]
        asked = [page for ask in under_way for page in ask.left]
        assert len(asked) == len(set(asked))
        assert len({ask.peer.node for ask in under_way}) == len(under_way)
        if plan.done:
            break
        if not under_way:
            continue
        late = plan.expired(now)
        ask = late[0] if late else rng.choice(under_way)
        step = "late" if late else rng.choice(["arrived", "gone", "bad", "broke", "slow", "time"])
        if step == "time":
            now += rng.random()
            continue
        if step in ("arrived", "gone", "bad") and ask.left:
            page = next(iter(ask.left))
            if step == "arrived":
                plan.arrived(ask, page)
                assert page not in arrived
                arrived.add(page)
            else:
                plan.missed(ask, page, step, blame=step == "bad")
            if ask.left:
                continue
        under_way.remove(ask)
        plan.ended(ask, step, blame=step == "broke", stay=step == "slow")
    assert plan.done
    assert under_way == []
    assert len(arrived) + sum(plan.reasons.values()) == len(pages)
    assert max(attempts.values()) <= 3, "two holders, and once more where the only one is slow"


# --------------------------------------------------------------------------- the breaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock) -> Breaker:
    return Breaker(1.0, 8.0, clock, random.Random(1))


def test_a_breaker_lets_one_probe_through_at_a_time() -> None:
    clock = Clock()
    it = breaker(clock)
    assert it.admit() is Admission.GO
    it.failed()
    assert it.admit() is Admission.NO
    clock.now = 1.3
    assert it.admit() is Admission.PROBE
    assert it.admit() is Admission.NO, "the others wait for what becomes of it"
    it.undecided()
    assert it.admit() is Admission.PROBE
    it.succeeded()
    assert it.admit() is Admission.GO
    assert it.admit() is Admission.GO


def test_what_dies_again_at_once_is_left_alone_longer_each_time() -> None:
    """P101: a connection that is made, seems to work, and dies within milliseconds is no recovery."""
    clock = Clock()
    it = breaker(clock)
    pauses = []
    for _ in range(5):
        it.failed()
        failed_at = clock.now
        while it.admit() is Admission.NO:
            clock.now += 0.01
        pauses.append(clock.now - failed_at)
        it.succeeded()
        clock.now += 0.005
    assert all(later > 1.3 * earlier for earlier, later in itertools.pairwise(pauses[:4])), pauses
    assert max(pauses) < 8 * 1.2 + 0.1
    clock.now += 60
    it.failed()
    clock.now += 1.3
    assert it.admit() is Admission.PROBE, "after a minute of good work it is a new failure"
