"""Where requests go: each policy in small situations, and books that count at once and forget exactly what failed."""

from __future__ import annotations

import math
import random

import pytest
from hicache_master.conductor.admission import Admission, Rejection
from hicache_master.conductor.books import DecodeBatch, PrefillQueue
from hicache_master.conductor.cost import Costs, DecodeCost, Links, PrefillCost
from hicache_master.conductor.decide import LONGEST_S, UNCONFIRMED_S, Conductor, Decision, Request
from hicache_master.conductor.policies import POLICIES, Candidate, Fetch
from hicache_master.conductor.prefixes import COLD, DEVICE, DRAM, HOST, Prefixes

PAGE_S = 0.1
"""Of computation, for a page."""
FETCH_S = 0.01
"""Of transfer."""


def cluster(
    policy: str = "pool-aware", prefills: int = 3, decodes: int = 2, admission: Admission | None = None, **more: float
) -> Conductor:
    """Prefills take 0.1 s a page of 100 tokens, a fetch 0.01 s a page, and a decode step 10 ms and 1 ms a request."""
    costs = Costs(
        PrefillCost((0.0, PAGE_S / 100, 0.0)),
        DecodeCost((0.01, 0.001, 0.0)),
        Links(1e9, cold_bytes_per_s=0.5e9),
        100,
        int(FETCH_S * 1e9),
        **more,  # type: ignore[arg-type]
    )
    conductor = Conductor(POLICIES[policy](), costs, Prefixes(), admission or Admission("off"))
    for number in range(prefills):
        conductor.add_prefill(f"p{number}", "1", 0.0, store=f"p{number}")
    for number in range(decodes):
        conductor.add_decode(f"d{number}")
    return conductor


def ask(conductor: Conductor, name: str, pages: int, now: float = 0.0, first: int = 0) -> Decision:
    decision = conductor.route(Request(name, range(first, first + pages), 100 * pages), now)
    conductor.validate()
    assert isinstance(decision, Decision)
    return decision


def holds(conductor: Conductor, name: str, pages: range, tier: int = DRAM) -> None:
    conductor.prefixes.stored(name, "1", pages, tier)


def test_random_round_robin_and_least_queue_do_not_look_at_pages() -> None:
    conductor = cluster("round-robin")
    assert [ask(conductor, str(number), 1).prefill.engine for number in range(4)] == ["p0", "p1", "p2", "p0"]
    conductor = cluster("random")
    assert {ask(conductor, str(number), 1).prefill.engine for number in range(30)} == {"p0", "p1", "p2"}
    conductor = cluster("least-queue")
    holds(conductor, "p0", range(9))
    assert [ask(conductor, str(number), 10).prefill.engine for number in range(3)] == ["p0", "p1", "p2"]


def test_longest_prefix_sends_everything_to_one_engine_and_ours_does_not() -> None:
    """A system prompt that all share is enough."""
    for policy, engines in (("longest-prefix", 1), ("pool-aware", 3)):
        conductor = cluster(policy)
        holds(conductor, "p1", range(1))
        used = set()
        for number in range(12):
            request = Request(str(number), [0, *range(100 * (number + 1), 100 * (number + 1) + 9)], 1000)
            decision = conductor.route(request, 0.0)
            assert isinstance(decision, Decision)
            used.add(decision.prefill.engine)
        assert len(used) == engines


@pytest.mark.parametrize(("waiting", "engine"), [(5, "p1"), (15, "p0")])
def test_local_aware_weighs_the_queue_against_what_is_there(waiting: int, engine: str) -> None:
    conductor = cluster("local-aware")
    holds(conductor, "p1", range(10))
    holds(conductor, "p1", range(300, 350))
    ask(conductor, "before", 50 + waiting, first=300)
    decision = ask(conductor, "r", 10)
    assert (decision.prefill.engine, decision.fetches) == (engine, ())


def test_pages_are_fetched_when_their_holder_is_busy() -> None:
    conductor = cluster()
    holds(conductor, "p1", range(20))
    holds(conductor, "p1", range(300, 350))
    assert ask(conductor, "idle", 20).fetches == ()
    assert ask(conductor, "before", 60, first=300).prefill.engine == "p1"
    conductor.failed("idle", 0.0)
    decision = ask(conductor, "r", 20)
    assert (decision.prefill.engine, decision.fetches) == ("p0", (Fetch("p1", 0, 20, False),))
    assert decision.prefill.ttft_s == pytest.approx(20 * FETCH_S)


def test_a_prefix_that_others_have_only_a_little_longer_is_not_fetched() -> None:
    for theirs, fetches in ((13, ()), (14, (Fetch("p1", 10, 14, False),))):
        conductor = cluster(prefills=1)
        conductor.prefixes.join("p1", "1")
        holds(conductor, "p0", range(10))
        holds(conductor, "p1", range(theirs))
        assert ask(conductor, "r", 20).fetches == fetches


def test_a_fetch_that_takes_longer_than_computing_is_not_made() -> None:
    conductor = cluster(prefills=1)
    conductor.costs.links = Links(1e9 * FETCH_S / PAGE_S * 0.9)
    conductor.prefixes.join("p1", "1")
    holds(conductor, "p1", range(10))
    assert ask(conductor, "r", 20).prefill.pages == 0


def test_the_pool_gives_each_page_from_whoever_has_it_and_algorithm_1_from_one_node() -> None:
    for policy, fetches in (
        ("pool-aware", (Fetch("s0", 0, 5, False), Fetch("s1", 5, 9, False))),
        ("algorithm-1", (Fetch("s0", 0, 5, False),)),
    ):
        conductor = cluster(policy, prefills=1)
        for name in ("s0", "s1"):
            conductor.prefixes.join(name, "1")
        holds(conductor, "s0", range(5))
        holds(conductor, "s1", range(5, 9))
        holds(conductor, "s1", range(2))
        assert ask(conductor, "r", 10).fetches == fetches


def test_the_less_busy_of_two_holders_is_asked() -> None:
    conductor = cluster(prefills=1)
    for name in ("s0", "s1"):
        conductor.prefixes.join(name, "1")
        holds(conductor, name, range(10))
    conductor.costs.links.begin("s0")
    assert ask(conductor, "r", 10).fetches == (Fetch("s1", 0, 10, False),)


def test_each_tier_has_its_price() -> None:
    conductor = cluster(prefills=1, host_page_s=0.001, dram_page_s=0.002, cold_page_s=0.004)
    holds(conductor, "p0", range(5), DEVICE)
    holds(conductor, "p0", range(10), HOST)
    holds(conductor, "p0", range(15), DRAM)
    holds(conductor, "p0", range(20), COLD)
    candidate = ask(conductor, "r", 25).prefill
    assert (candidate.pages, candidate.own_pages) == (20, 20)
    assert candidate.load_s == pytest.approx(5 * (0.001 + 0.002 + 0.004))
    assert candidate.prefill_s == pytest.approx(5 * PAGE_S)


def test_pages_on_a_disk_that_is_slower_than_computing_are_computed() -> None:
    for bytes_per_s, pages in ((0.5e9, 10), (0.09e9, 4)):
        conductor = cluster(prefills=1)
        conductor.costs.links = Links(1e9, cold_bytes_per_s=bytes_per_s)
        conductor.prefixes.join("s0", "1")
        holds(conductor, "s0", range(4))
        holds(conductor, "s0", range(4, 10), COLD)
        decision = ask(conductor, "r", 10)
        assert decision.prefill.pages == pages
        assert decision.fetches[0] == Fetch("s0", 0, 4, False)
        assert decision.fetches[1:] == ((Fetch("s0", 4, 10, True),) if pages == 10 else ())


def test_a_fetch_while_the_request_waits_costs_only_what_the_queue_does_not_hide() -> None:
    for hidden, ttft_s in ((False, 1.0 + 20 * FETCH_S), (True, 1.0)):
        conductor = cluster(prefills=1, fetch_while_queued=hidden)
        ask(conductor, "before", 10, first=500)
        conductor.prefixes.join("s0", "1")
        holds(conductor, "s0", range(20))
        assert ask(conductor, "r", 20).prefill.ttft_s == pytest.approx(ttft_s)


def test_a_burst_of_siblings_goes_together() -> None:
    conductor = cluster()
    engines = [ask(conductor, str(number), 20, now=0.001 * number).prefill.engine for number in range(5)]
    assert len(set(engines)) == 1, "only the first of them computes"
    assert conductor.queue_s(engines[0], 0.005) == pytest.approx(2.0, abs=0.01)


def test_equal_engines_are_taken_by_queue_and_then_in_order() -> None:
    conductor = cluster()
    assert [ask(conductor, str(number), 5, first=100 * number).prefill.engine for number in range(3)] == ["p0", "p1", "p2"]
    conductor.finished("1", 0.0)
    assert ask(conductor, "next", 5, first=900).prefill.engine == "p1"


def test_decode_goes_where_the_next_token_comes_soonest() -> None:
    conductor = cluster(decodes=3)
    assert [ask(conductor, str(number), 1, first=10 * number).decode for number in range(4)] == ["d0", "d1", "d2", "d0"]
    conductor.failed("2", 0.0)
    decision = ask(conductor, "next", 1, first=100)
    assert (decision.decode, decision.tbt_s) == ("d2", pytest.approx(0.011))


def state(conductor: Conductor, now: float) -> tuple[object, ...]:
    """All that decisions hang on."""
    return (
        [conductor.queue_s(f"p{number}", now) for number in range(3)],
        [(conductor.batch(f"d{number}").coming_tokens, conductor.batch(f"d{number}").running_tokens) for number in range(2)],
        [conductor.costs.links.in_flight(f"p{number}") for number in range(3)],
        conductor.prefixes.match(range(100), now).lengths,
        conductor.prefixes.expected_keys,
        len(conductor),
    )


def test_a_request_that_fails_leaves_no_trace() -> None:
    conductor = cluster()
    holds(conductor, "p1", range(20))
    ask(conductor, "stays", 60, first=300)
    before = state(conductor, 1.0)
    for number in range(20):
        ask(conductor, f"fails {number}", 30, now=1.0)
    assert state(conductor, 1.0) != before
    for number in range(20):
        conductor.failed(f"fails {number}", 1.0)
        conductor.validate()
    assert state(conductor, 1.0) == before
    conductor.failed("never heard of", 1.0)


@pytest.mark.parametrize("over", ["fetched", "prefilled", "failed"])
def test_a_transfer_counts_for_its_holder_until_it_is_over(over: str) -> None:
    conductor = cluster(prefills=1)
    conductor.prefixes.join("s0", "1")
    holds(conductor, "s0", range(10))
    assert ask(conductor, "r", 10).fetches
    assert conductor.costs.links.in_flight("s0") == 1
    for _ in range(2):
        if over == "fetched":
            conductor.fetched("r")
        else:
            getattr(conductor, over)("r", 1.0)
        assert conductor.costs.links.in_flight("s0") == 0


def test_requests_without_news_are_taken_back() -> None:
    conductor = cluster()
    ask(conductor, "silent", 10)
    ask(conductor, "taken", 10, first=100)
    conductor.confirm("taken", 1.0)
    assert conductor.expire(UNCONFIRMED_S - 1) == []
    assert conductor.expire(UNCONFIRMED_S) == ["silent"]
    assert conductor.expire(LONGEST_S) == []
    assert conductor.expire(LONGEST_S + 1) == ["taken"]
    assert len(conductor) == 0
    conductor.validate()


def test_an_engine_that_restarts_or_leaves_gives_its_requests_back() -> None:
    conductor = cluster(prefills=2)
    first = ask(conductor, "first", 10)
    second = ask(conductor, "second", 10, first=100)
    assert conductor.add_prefill(first.prefill.engine, "1", 0.0) == []
    assert conductor.add_prefill(first.prefill.engine, "2", 0.0, store=first.prefill.engine) == ["first"]
    assert conductor.queue_s(first.prefill.engine, 0.0) == 0
    assert conductor.remove_decode(second.decode, 0.0) == ["second"]
    assert conductor.remove_prefill("p0", 0.0) == []
    assert conductor.remove_prefill("p1", 0.0) == []
    conductor.validate()
    nobody = conductor.route(Request("third", range(10), 1000), 0.0)
    assert isinstance(nobody, Rejection)
    assert nobody.reason == "no engine"


def test_an_id_that_is_in_the_books_is_refused_and_so_is_one_request_too_many() -> None:
    conductor = cluster()
    ask(conductor, "a", 1)
    with pytest.raises(ValueError, match="routed already"):
        conductor.route(Request("a", range(1), 100), 0.0)
    few = Conductor(conductor.policy, conductor.costs, Prefixes(), Admission("off"), max_requests=1)
    few.add_prefill("p", "1", 0.0)
    assert isinstance(few.route(Request("a", range(1), 100), 0.0), Decision)
    full = few.route(Request("b", range(1), 100), 0.0)
    assert isinstance(full, Rejection)
    assert full.reason == "full"


@pytest.mark.parametrize("more", [{"tokens": 0}, {"tokens": 1, "ttft_slo_s": 0.0}, {"tokens": 1, "tbt_slo_s": float("nan")}])
def test_a_request_that_cannot_be_is_refused(more: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Request("r", [], **more)  # type: ignore[arg-type]


def test_what_was_observed_changes_what_is_predicted() -> None:
    conductor = cluster(prefills=1)
    for number in range(50):
        ask(conductor, str(number), 10, first=100 * number)
        conductor.prefilled(str(number), 0.0, 0, 10 * PAGE_S * 2)
        conductor.finished(str(number), 0.0)
    assert ask(conductor, "next", 10, first=10_000).prefill.prefill_s == pytest.approx(2 * 10 * PAGE_S, rel=0.05)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_books_stay_whole_whatever_happens(policy: str) -> None:
    rng = random.Random(policy)
    conductor = cluster(policy, admission=Admission("predictive", 5.0, 0.016))
    conductor.add_prefill("both", "1", 0.0, decodes=True)
    now, alive = 0.0, []
    for number in range(300):
        now += rng.expovariate(4)
        first = 40 * rng.randrange(4)
        result = conductor.route(
            Request(str(number), range(first, first + rng.randrange(30)), 100 * rng.randrange(1, 30), rng.randrange(3)),
            now,
            rng.sample(("p0", "p1", "both", "d0"), 2),
        )
        conductor.validate()
        if isinstance(result, Decision):
            assert min(result.prefill.ttft_s, result.prefill.queue_s, result.prefill.transfer_s, result.prefill.load_s) >= 0
            assert result.prefill.pages >= result.prefill.own_pages
            alive.append(str(number))
        for _ in range(rng.randrange(3)):
            request = rng.choice(alive or ["nobody"])
            act = rng.randrange(6)
            if act == 0:
                conductor.confirm(request, now)
            elif act == 1:
                conductor.fetched(request)
            elif act == 2:
                conductor.prefilled(request, now, 0, rng.random(), begun=rng.random() < 0.5)
            elif act == 3:
                conductor.finished(request, now)
            elif act == 4:
                conductor.failed(request, now)
            elif rng.random() < 0.1:
                name = f"p{rng.randrange(3)}"
                conductor.add_prefill(name, str(number), now, store=name)
            conductor.validate()
        if rng.random() < 0.1:
            conductor.prefixes.stored(
                f"p{rng.randrange(3)}", "1", range(first, first + 20), rng.choice((DEVICE, HOST, DRAM, COLD))
            )
    conductor.expire(now + LONGEST_S + 1)
    conductor.validate()
    assert len(conductor) == 0
    assert [conductor.queue_s(f"p{number}", now) for number in range(3)] == [0, 0, 0]
    assert [conductor.costs.links.in_flight(f"p{number}") for number in range(3)] == [0, 0, 0]


def test_an_engine_that_decodes_too_keeps_what_it_prefills_and_its_batch_makes_others_go_elsewhere() -> None:
    conductor = cluster(prefills=0, decodes=1)
    for name in ("a", "b"):
        conductor.add_prefill(name, "1", 0.0, decodes=True)
    used = []
    for number in range(6):
        decision = ask(conductor, str(number), 1, now=float(number), first=100 * number)
        assert decision.decode == decision.prefill.engine
        assert conductor.prefilled(str(number), number + 0.5) == decision.decode
        conductor.validate()
        used.append(decision.decode)
    assert used == ["a", "b"] * 3
    assert (conductor.batch("a").running, conductor.batch("d0").running) == (3, 0)
    assert sorted(conductor.remove_prefill("a", 9.0)) == ["0", "2", "4"]
    conductor.validate()


def test_engines_that_are_avoided_get_nothing() -> None:
    conductor = cluster()
    candidates: list[Candidate] = []
    for number in range(5):
        avoid = {"p0", "p2", "d1"}
        decision = conductor.route(Request(str(number), [number], 100), 0.0, avoid, candidates)
        assert isinstance(decision, Decision)
        assert (decision.prefill.engine, decision.decode) == ("p1", "d0")
    assert {each.engine for each in candidates} == {"p1"}
    assert conductor.route(Request("r", [1], 100), 0.0, {"p0", "p1", "p2"}) == Rejection("no engine", math.inf, None)


def test_a_decode_that_has_begun_is_not_moved_or_rejected() -> None:
    conductor = cluster(decodes=2, admission=Admission("early", tbt_slo_s=0.0115))
    decision = ask(conductor, "r", 1)
    conductor.batch(decision.decode).start("other", 100, 0.0)
    assert conductor.prefilled("r", 1.0, begun=True) == decision.decode


@pytest.mark.parametrize("slo_s", [1.0, 2.0, 3.0, 4.0])
def test_what_is_hopeless_would_be_rejected_with_all_of_its_pages_known(slo_s: float) -> None:
    conductor = cluster(prefills=2)
    for number in range(6):
        ask(conductor, str(number), 10, first=100 * number)
    conductor.admission = Admission("early", ttft_slo_s=slo_s)
    holds(conductor, "p0", range(900, 910), DEVICE)
    holds(conductor, "p1", range(900, 910), DEVICE)
    hopeless = conductor.hopeless(Request("r", (), 1), 0.0)
    assert (hopeless is not None) == (slo_s < 3.0)
    routed = conductor.route(Request("r", range(900, 910), 1000), 0.0)
    assert isinstance(routed, Rejection) == (hopeless is not None)


def test_a_queue_passes_with_time_but_not_below_what_waits_behind_the_first() -> None:
    queue = PrefillQueue()
    queue.add("a", 2.0, 10.0)
    queue.add("b", 3.0, 10.0)
    assert queue.seconds(11.0) == pytest.approx(4.0)
    assert queue.seconds(100.0) == pytest.approx(3.0), "the first is late, and about to end"
    queue.remove("a", 100.0)
    assert queue.seconds(101.0) == pytest.approx(2.0)
    queue.remove("b", 101.0)
    assert queue.seconds(101.0) == 0
    queue.validate()


def test_a_batch_knows_who_is_there_at_a_later_time() -> None:
    batch = DecodeBatch()
    batch.start("old", 10, 0.0)
    batch.start("young", 100, 8.0)
    batch.expect("soon", 1000, 12.0)
    batch.expect("late", 10_000, 30.0)
    assert batch.then(9.0, 10.0) == (2, 110)
    assert batch.then(13.0, 10.0) == (2, 1100)
    assert batch.then(35.0, 10.0) == (1, 10_000)
    batch.validate()
