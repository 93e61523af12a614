"""What the conductor believes things take: the model's shape, what was observed, and who sends to whom."""

from __future__ import annotations

import math
import random

import pytest
from hicache_master.conductor.cost import (
    LLAMA3_70B,
    RATE_LIMIT,
    WINDOW,
    DecodeCost,
    Links,
    PrefillCost,
    Quantiles,
    Regression,
    min_bandwidth,
)

TFLOPS = 1e12
PRIOR = LLAMA3_70B.prefill_prior(8 * 312 * TFLOPS * 0.5, 0.02)


def test_a_models_bytes_and_the_bandwidth_that_makes_them_worth_loading() -> None:
    assert LLAMA3_70B.token_bytes == 320 << 10
    assert min_bandwidth(LLAMA3_70B, 8192, 8 * 312 * TFLOPS) == pytest.approx(5.9e9, rel=0.01)
    assert min_bandwidth(LLAMA3_70B, 8192, 8 * 989 * TFLOPS) == pytest.approx(18.6e9, rel=0.01)


def test_a_prefill_with_a_cached_prefix_is_the_work_that_is_left() -> None:
    cost = PrefillCost(PRIOR)
    for tokens, cached in ((8192, 0), (8192, 4096), (100_000, 99_999), (512, 512)):
        work = LLAMA3_70B.work(tokens) - LLAMA3_70B.work(cached)
        assert cost.seconds(tokens, cached) == pytest.approx(0.02 + work / (8 * 312 * TFLOPS * 0.5))


@pytest.mark.parametrize("prior", [(1, 2), (1, 2, -1), (0, 0, 0), (math.inf, 1, 1), (math.nan, 1, 1)])
def test_a_prior_that_is_none_is_refused(prior: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="prior"):
        Regression(prior)


def learned(true: PrefillCost, seed: int, outliers: float = 0.0, count: int = 600) -> PrefillCost:
    """A model that was wrong by two at first, after so many observations with 5 % of noise."""
    rng = random.Random(seed)
    cost = PrefillCost([2 * each for each in PRIOR])
    for _ in range(count):
        tokens = rng.randrange(100, 100_000)
        cached = rng.randrange(tokens)
        stalled = 50.0 if rng.random() < outliers else 1.0
        cost.observe(tokens, cached, true.seconds(tokens, cached) * rng.lognormvariate(0, 0.05) * stalled)
    return cost


@pytest.mark.parametrize("outliers", [0.0, 0.03])
def test_a_fit_finds_the_truth_even_among_outliers(outliers: float) -> None:
    true = PrefillCost(PRIOR)
    cost = learned(true, 1, outliers)
    for tokens, cached in ((8_000, 0), (8_000, 7_000), (60_000, 30_000)):
        assert cost.seconds(tokens, cached) == pytest.approx(true.seconds(tokens, cached), rel=0.1)
    assert 0.9 < cost.fit.ratio_quantile(0.5) < 1.1
    assert cost.fit.ratio_quantile(0.1) < cost.fit.ratio_quantile(0.9)


def test_a_change_that_lasts_is_followed() -> None:
    slower = PrefillCost([3 * each for each in PRIOR])
    cost = learned(PrefillCost(PRIOR), 2)
    rng = random.Random(3)
    for _ in range(1500):
        tokens = rng.randrange(100, 100_000)
        cost.observe(tokens, 0, slower.seconds(tokens, 0))
    assert cost.seconds(20_000, 0) == pytest.approx(slower.seconds(20_000, 0), rel=0.1)


def test_no_observation_makes_a_prediction_negative_or_nonsense() -> None:
    rng = random.Random(4)
    cost = PrefillCost(PRIOR)
    for _ in range(2000):
        tokens = rng.randrange(1, 200_000)
        seconds = rng.choice([0.0, -1.0, math.inf, math.nan, 1e-9, 1e6, rng.random()])
        cost.observe(tokens, rng.randrange(tokens), seconds)
        assert min(cost.fit.coefficients) >= 0
        assert 0 <= cost.seconds(50_000, 10_000) < math.inf


def test_decode_steps_are_fitted_as_well() -> None:
    cost = DecodeCost((0.02, 0.001, 1e-8))
    rng = random.Random(5)
    for _ in range(500):
        running = rng.randrange(1, 60)
        tokens = running * rng.randrange(1000, 20_000)
        cost.observe(running, tokens, 0.015 + 0.004 * running + 2e-8 * tokens)
    assert cost.tbt_s(30, 300_000) == pytest.approx(0.015 + 0.12 + 0.006, rel=0.05)


def test_quantiles_are_of_the_last_values() -> None:
    quantiles = Quantiles()
    assert quantiles.at(0.5, 7.0) == 7.0
    for value in range(3 * WINDOW):
        quantiles.add(float(value))
        assert len(quantiles) <= WINDOW
    assert quantiles.at(0, 0) == 2 * WINDOW
    assert quantiles.at(0.5, 0) == 2.5 * WINDOW - 1
    assert quantiles.at(1, 0) == 3 * WINDOW - 1


def test_transfers_under_way_share_their_holders_link() -> None:
    links = Links(10e9, 1e9)
    assert links.page_s("a", 10**9, cold=False) == pytest.approx(0.1)
    assert links.page_s("a", 10**9, cold=True) == pytest.approx(1.0)
    links.begin("a")
    links.begin("a")
    assert links.page_s("a", 10**9, cold=False) == pytest.approx(0.3)
    assert links.page_s("b", 10**9, cold=False) == pytest.approx(0.1)
    for _ in range(5):
        links.end("a")
    links.validate()
    assert links.in_flight("a") == 0
    assert links.page_s("a", 10**9, cold=False) == pytest.approx(0.1)


def test_a_rate_is_the_links_and_not_a_transfers_share_of_it() -> None:
    links = Links(10e9, 1e9)
    links.begin("a")
    for _ in range(100):
        links.observe("a", 10**9, 1.0, sharing=4, cold=False)
    assert links.page_s("a", 4 * 10**9, cold=False) == pytest.approx(2.0, rel=0.01), "4 GB/s, shared by two"
    assert links.page_s("a", 10**9, cold=True) == pytest.approx(2.0, rel=0.01), "the disk's rate is one of its own"


def test_one_absurd_measurement_moves_a_rate_by_a_bounded_step() -> None:
    links = Links(10e9)
    links.begin("a")
    links.end("a")
    links.observe("a", 10**12, 1e-9, sharing=1, cold=False)
    assert links.page_s("a", 10**9, cold=False) >= 0.1 / RATE_LIMIT
    links.observe("a", 100, 5.0, sharing=1, cold=False)
    links.observe("a", 10**9, 0.0, sharing=1, cold=False)
    assert links.page_s("a", 10**9, cold=False) < 0.1
