"""Who is turned away: by which load, at which priority, for how long; and that prediction keeps work from being in vain."""

from __future__ import annotations

import math
import random
from functools import cache
from itertools import pairwise

import pytest
from hicache_master.conductor.admission import MODES, RETRY_S, Admission, Mode, Rejection
from hicache_master.conductor.books import DecodeBatch
from hicache_master.conductor.cost import DecodeCost
from hicache_master.conductor.replay import Arrival, Outcome, Replay, Setup

COST = DecodeCost((0.01, 0.001, 0.0))


def batch(running: int, since: float = 0.0, coming: int = 0, begins: float = 0.0) -> DecodeBatch:
    made = DecodeBatch()
    for number in range(running):
        made.start(f"running {number}", 0, since + 0.01 * number)
    for number in range(coming):
        made.expect(f"coming {number}", 0, begins)
    return made


def test_load_above_one_is_turned_away_and_lower_priorities_sooner() -> None:
    admission = Admission("early", headroom=0.1)
    for priority, limit in ((0, 1.0), (1, 0.9), (2, 0.81)):
        assert admission.prefill(limit - 0.01, 10.0, 1.0, 0.1, priority, 0.0) is None
        assert admission.prefill(limit + 0.01, 10.0, 1.0, 0.1, priority, 0.0) is not None
        assert admission.decode((limit - 0.01) * 0.1, 0.1, [batch(5)], priority, 0.0, late=False) is None
        assert admission.decode((limit + 0.01) * 0.1, 0.1, [batch(5)], priority, 0.0, late=False) is not None


def test_off_turns_nobody_away() -> None:
    admission = Admission("off")
    assert admission.prefill(99.0, 10.0, 1.0, 0.1, 0, 0.0) is None
    assert admission.decode(99.0, 0.1, [batch(5)], 0, 0.0, late=True) is None


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("none of", {"mode": "lenient"}),
        ("ttft_slo_s", {"ttft_slo_s": 0}),
        ("tbt_slo_s", {"tbt_slo_s": math.nan}),
        ("headroom", {"headroom": 1}),
        ("confidence", {"confidence": -0.1}),
    ],
)
def test_settings_that_cannot_be_are_refused(words: str, more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=words):
        Admission(**more)  # type: ignore[arg-type]


def test_a_request_is_told_to_come_when_the_queue_will_have_passed() -> None:
    rejection = Admission("early").prefill(1.5, 20.0, 1.0, 0.1, 0, 100.0)
    assert rejection == Rejection("prefill", 1.5, pytest.approx(10.0))


def test_a_prompt_that_an_idle_cluster_would_be_too_slow_for_is_not_told_to_come_again() -> None:
    rejection = Admission("early").prefill(1.5, 20.0, 25.0, 0.1, 0, 100.0)
    assert rejection == Rejection("prefill", 1.5, None)


def test_a_request_is_told_to_come_when_enough_decodes_will_have_ended() -> None:
    admission = Admission("early", decode_s=20.0)
    running = DecodeBatch()
    for number in range(10):
        running.start(str(number), 0, float(number))
    rejection = admission.decode(0.125, 0.1, [running], 0, 10.0, late=False)
    assert rejection == Rejection("decode", 1.25, pytest.approx(11.0)), "a fifth is too much: the second of ten ends at 21"


def test_those_turned_away_at_one_moment_come_back_one_by_one_and_not_in_a_herd() -> None:
    admission = Admission("early", decode_s=20.0)
    waits = []
    for _ in range(500):
        rejection = admission.decode(0.2, 0.1, [batch(10)], 0, 10.0, late=False)
        assert rejection is not None
        assert rejection.retry_after_s is not None
        waits.append(rejection.retry_after_s)
    apart = [after - before for before, after in pairwise(waits)]
    assert apart[0] == pytest.approx(2.0), "ten decodes of 20 s end one every 2 s"
    assert max(waits) == RETRY_S[1]
    assert min(waits) >= RETRY_S[0]
    later = admission.decode(0.2, 0.1, [batch(10, 1000.0)], 0, 1000.0, late=False)
    assert later is not None
    assert later.retry_after_s is not None
    assert later.retry_after_s < 30, "what was promised for a time that has passed counts no more"


def test_early_looks_at_now_and_predictive_at_the_end_of_the_prefill() -> None:
    early, predictive = (Admission(mode, decode_s=10.0) for mode in ("early", "predictive"))
    ends_before = [batch(30, since=0.0)]
    assert early.expected_tbt_s(ends_before, 0, COST, at=15.0) == pytest.approx(0.041)
    assert predictive.expected_tbt_s(ends_before, 0, COST, at=15.0) == pytest.approx(0.011)
    comes_before = [batch(0, coming=30, begins=12.0)]
    assert early.expected_tbt_s(comes_before, 0, COST, at=15.0) == pytest.approx(0.011)
    assert predictive.expected_tbt_s(comes_before, 0, COST, at=15.0) == pytest.approx(0.041)
    two = [batch(30, since=10.0), batch(10, since=10.0)]
    assert predictive.expected_tbt_s(two, 0, COST, at=15.0) == pytest.approx(0.031), "of the mean engine"


def test_predictions_that_were_too_low_are_corrected() -> None:
    admission = Admission("predictive", confidence=0.6)
    busy = [batch(3), batch(0)]
    assert admission.correction(busy) == 1.0
    for number in range(200):
        admission.came_true(1.0, 1.5 if number % 2 else 1.0)
    assert admission.correction(busy) == 1.5
    early = Admission("early")
    for _ in range(100):
        early.came_true(1.0, 2.0)
    assert early.correction(busy) == 1.0


def test_predictions_that_were_far_too_low_do_not_shut_the_cluster_for_good() -> None:
    admission = Admission("predictive")
    for _ in range(200):
        admission.came_true(1.0, 100.0)
    assert admission.correction([batch(1)]) == 2.0
    assert admission.correction([batch(0), batch(0)]) == 1.0, "nobody is there: take it in, and learn"
    for _ in range(600):
        admission.came_true(1.0, 1.0)
    assert admission.correction([batch(1)]) == 1.0


def test_the_mean_decode_time_follows_what_is_seen() -> None:
    admission = Admission("predictive", decode_s=100.0)
    for _ in range(400):
        admission.decoded(10.0)
    admission.decoded(math.inf)
    admission.decoded(-1.0)
    assert admission.decode_s == pytest.approx(10.0, rel=0.01)


@cache
def overload(mode: Mode, load: float = 1.5) -> Outcome:
    """Requests of all lengths, `load` times as many as 4 decode engines can take; 4 prefill engines can take hardly more, so
    that a prefill waits long."""
    rng = random.Random(1)
    now, arrivals = 0.0, []
    for number in range(1000):
        now += rng.expovariate(4 * load)
        tokens = 1 + min(60_000, int(rng.lognormvariate(8.8, 0.6)))
        pages = tuple(range(1000 * number, 1000 * number + -(-tokens // 512)))
        arrivals.append(Arrival(now, tokens, 1 + int(rng.expovariate(1 / 300)), pages))
    setup = Setup(prefills=4, decodes=4, admission=mode, tbt_slo_s=0.05, ttft_slo_s=20, request_step_s=0.002)
    return Replay(setup).run(arrivals)


def test_prefills_in_vain_become_fewer_from_baseline_to_early_to_predictive() -> None:
    baseline, early, predictive = (overload(mode) for mode in MODES[1:])
    assert baseline.wasted_share > 0.1
    assert early.wasted_share < 0.75 * baseline.wasted_share
    assert predictive.wasted_share < 0.35 * baseline.wasted_share
    assert predictive.late < early.late < baseline.late
    assert all(set(each.rejected) <= {"prefill", "decode", "decode, after prefill"} for each in (baseline, early, predictive))


def test_nobody_is_turned_away_as_long_as_there_is_room() -> None:
    for mode in MODES[1:]:
        assert overload(mode, load=0.4).rejections == 0


def test_more_load_means_more_rejections_and_the_slo_holds() -> None:
    outcomes = [overload("predictive", load) for load in (1.0, 1.5, 2.5)]
    assert [each.rejections for each in outcomes] == sorted(each.rejections for each in outcomes)
    for outcome in outcomes:
        assert outcome.mean_tbt_s <= 0.05
        assert outcome.quantile_s(1.0) <= 20 * 1.1


def test_the_decode_load_does_not_swing_more_with_prediction_than_without() -> None:
    """Looking at now takes in too many while batches are empty, and all of them arrive a prefill later."""

    def swing(mode: Mode) -> float:
        decoding = overload(mode).decoding[300:]
        mean = sum(decoding) / len(decoding)
        return math.sqrt(sum((each - mean) ** 2 for each in decoding) / len(decoding)) / mean

    assert swing("predictive") < swing("early")
