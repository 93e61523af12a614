"""Loads that would take longer than computing the same tokens are not made, and the pool gets another chance now and then."""

from __future__ import annotations

from hicache_mooncake.client.worth import PROBE_EVERY_S, PROBE_FOR_S, STALE_S, Worth

MIB = 1 << 20
NOW = 1_000_000 * PROBE_EVERY_S + 10.0
"""Not a moment at which it is tried again."""


def test_without_a_rate_everything_is_worth_it() -> None:
    worth = Worth(0.0)
    for _ in range(10):
        worth.loaded(0, MIB, 100.0, NOW)
    assert worth.is_worth(MIB, 64, NOW)


def test_nothing_is_skipped_before_it_is_known() -> None:
    worth = Worth(10_000)
    assert worth.is_worth(MIB, 64, NOW)
    worth.loaded(0, 64 * MIB, 64.0, NOW)
    worth.loaded(0, 64 * MIB, 64.0, NOW)
    assert worth.is_worth(MIB, 64, NOW), "two loads are not enough"
    worth.loaded(0, 64 * MIB, 64.0, NOW)
    assert not worth.is_worth(MIB, 64, NOW)


def test_the_slower_of_the_two_ways_is_not_taken() -> None:
    """64 tokens at 10,000 a second are 6.4 ms a page."""
    for rate, expected in ((MIB / 0.005, True), (MIB / 0.008, False)):
        worth = Worth(10_000)
        for _ in range(5):
            worth.loaded(0, 16 * MIB, 16 * MIB / rate, NOW)
        assert worth.is_worth(MIB, 64, NOW) is expected
        assert worth.is_worth(MIB // 4, 64, NOW), "smaller pages of as many tokens are"
        assert worth.is_worth(MIB, 128, NOW), "and larger ones of more"


def test_near_and_far_are_measured_apart_and_weighed_by_where_pages_came_from() -> None:
    worth = Worth(10_000)
    for _ in range(40):
        worth.loaded(16 * MIB, 0, 0.004, NOW)
    for _ in range(3):
        worth.loaded(0, 16 * MIB, 16.0, NOW)
    assert not worth.is_worth(MIB, 64, NOW), "lately half of it came over the slow network"
    for _ in range(40):
        worth.loaded(16 * MIB, 0, 0.004, NOW)
    assert worth.is_worth(MIB, 64, NOW), "now all of it is here"


def test_loads_that_say_nothing_of_a_rate_change_nothing() -> None:
    worth = Worth(10_000)
    for _ in range(20):
        worth.loaded(4096, 0, 5.0, NOW)
        worth.loaded(0, 0, 5.0, NOW)
        worth.loaded(16 * MIB, 0, 0.0, NOW)
        worth.loaded(8 * MIB, 8 * MIB, 5.0, NOW)
    assert worth.is_worth(MIB, 64, NOW)


def test_all_ranks_try_again_at_the_same_time() -> None:
    ranks = [Worth(10_000) for _ in range(4)]
    for rank, worth in enumerate(ranks):
        for _ in range(3 + rank):
            worth.loaded(0, 16 * MIB, 16.0, NOW)
    tried = 0
    for step in range(600):
        at = NOW + step * 0.1
        answers = {worth.is_worth(MIB, 64, at) for worth in ranks}
        assert len(answers) == 1
        tried += answers == {True}
    assert tried / 600 <= 2 * PROBE_FOR_S / PROBE_EVERY_S
    assert tried > 0


def test_a_pool_that_has_become_faster_is_used_again() -> None:
    worth = Worth(10_000)
    for _ in range(20):
        worth.loaded(0, 16 * MIB, 16.0, NOW)
    assert not worth.is_worth(MIB, 64, NOW)
    probes = 0
    while not worth.is_worth(MIB, 64, NOW):
        worth.loaded(0, 16 * MIB, 0.01, NOW)
        probes += 1
    assert probes < 40


def test_what_was_measured_long_ago_is_forgotten() -> None:
    worth = Worth(10_000)
    for _ in range(5):
        worth.loaded(0, 16 * MIB, 16.0, NOW)
    later = NOW + PROBE_EVERY_S * (1 + STALE_S // PROBE_EVERY_S)
    assert worth.is_worth(MIB, 64, later)
    worth.loaded(0, 16 * MIB, 16.0, later)
    assert worth.is_worth(MIB, 64, later), "it begins anew"
