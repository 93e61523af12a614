"""What `make bench-engines` makes of its requests; without servers."""

from __future__ import annotations

import pytest

from benchmarks import engines
from benchmarks.engines import OURS, PLAIN, Pair, Run, Sample, columns, figures, long_prompt, long_prompt_line, markdown, plots
from hicache_mooncake.cli import charts
from hicache_mooncake.testing.sglang_cpu.servers import Cached

COLD = Run(
    [Sample(0, 100, 1.0, Cached(), (1,)), Sample(0, 100, 2.0, Cached(), (2,)), Sample(1, 200, 3.0, Cached(), (3,))], 10.0
)
WARM = Run(
    [
        Sample(0, 100, 1.0, Cached(), (1,)),
        Sample(0, 100, 1.0, Cached(16, 0, 32), (2,)),
        Sample(1, 200, 0.5, Cached(16, 32, 96), (3,)),
    ],
    5.0,
)


def test_times_rates_and_hits_by_round_are_those_of_all_runs() -> None:
    found = figures([WARM, COLD], [COLD, COLD])
    assert (found["runs"], found["requests"]) == (2, 6)
    assert found["ttft_mean_s"] == pytest.approx(8.5 / 6)
    assert found["ttft_p99_s"] == 3.0
    assert found["requests_per_s"] == pytest.approx((3 / 10 + 3 / 5) / 2)
    assert found["prompt_tokens_per_s"] == pytest.approx((40 + 80) / 2)
    assert found["prompt_tokens_by_round"] == [200, 200]
    assert found["hits_by_round"] == [24, 72]
    assert found["storage_by_round"] == [16, 48]
    assert found["ttft_mean_s_by_round"] == [pytest.approx(5 / 4), 1.75]
    assert found["different"] == 0


def test_answers_that_are_not_those_of_the_reference_are_counted() -> None:
    other = Run([*WARM.samples[:2], Sample(1, 200, 0.5, Cached(), (4,))], 5.0)
    assert figures([other, WARM], [COLD, COLD])["different"] == 1


def test_the_long_prompts_ratio_is_the_median_of_pairs_and_its_hit_the_least() -> None:
    row = long_prompt([Pair(0.2, 1.0, 2288), Pair(0.6, 2.0, 2288), Pair(9.0, 1.0, 2272)])
    assert row["ratio"] == pytest.approx(0.3)
    assert row["storage_tokens"] == 2272
    assert "missed" in long_prompt_line(row)
    assert "met" in long_prompt_line(row | {"ratio": engines.TARGET})


def test_the_table_has_a_line_for_each_arm_and_as_many_cells_as_headings() -> None:
    arms = {PLAIN: figures([COLD], [COLD]), OURS: figures([WARM], [COLD])}
    lines = markdown(arms, long_prompt([Pair(0.2, 1.0, 2288)]))
    assert {line.count("|") for line in lines[:4]} == {len(engines.HEADINGS) + 2}
    assert lines[3].startswith(f"| {OURS} | ")
    assert "48 / 144" in columns(arms[OURS])


def test_the_plots_have_a_bar_of_each_arm_for_each_round() -> None:
    hits, ttft = plots({PLAIN: figures([COLD], [COLD]), OURS: figures([WARM], [COLD])})
    assert isinstance(hits, charts.Bars)
    assert isinstance(ttft, charts.Bars)
    assert (hits.groups, hits.bars) == (["1", "2"], {PLAIN: [0, 0], OURS: [48, 144]})
    assert ttft.bars == {PLAIN: [1.5, 3.0], OURS: [1.0, 0.5]}


def test_the_chats_of_the_last_round_do_not_fit_into_l2_and_those_at_once_fit_into_l1() -> None:
    last = engines.FIRST_TOKENS + (engines.ROUNDS - 1) * (engines.ADDED_TOKENS + engines.ANSWER_TOKENS)
    assert engines.CLIENTS * last > engines.DEVICE_TOKENS * engines.HOST_RATIO
    assert engines.AT_ONCE * (last + engines.ANSWER_TOKENS) <= engines.DEVICE_TOKENS
