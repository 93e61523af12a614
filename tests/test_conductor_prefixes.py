"""Who holds which pages, and who will soon: leading runs by tier, incarnations, bounds."""

from __future__ import annotations

import random

import pytest
from hicache_master.conductor import prefixes as module
from hicache_master.conductor.prefixes import COLD, DEVICE, DRAM, HOST, SPECULATIVE_S, TIERS, Key, Prefixes, bit

PAGES: list[Key] = list(range(10))


def filled() -> Prefixes:
    prefixes = Prefixes()
    for name in "ab":
        prefixes.join(name, "1")
    prefixes.stored("a", "1", PAGES[:2], DEVICE)
    prefixes.stored("a", "1", PAGES[2:4], HOST)
    prefixes.stored("a", "1", PAGES[:6], DRAM)
    prefixes.stored("b", "1", PAGES[:3], COLD)
    prefixes.stored("b", "1", PAGES[6:8], COLD)
    return prefixes


def test_leading_runs_are_told_by_tier_and_holder() -> None:
    matches = filled().match(PAGES, 0.0)
    assert [matches.lengths[tier].get("a", 0) for tier in TIERS] == [2, 4, 6, 6]
    assert [matches.lengths[tier].get("b", 0) for tier in TIERS] == [0, 0, 0, 3]
    assert (matches.runs[0].start, matches.runs[-1].end) == (0, 8), (
        "the run of the pool goes on where another one has the pages"
    )
    assert all(before.end == after.start for before, after in zip(matches.runs, matches.runs[1:], strict=False))


def test_a_page_that_is_missing_ends_the_run() -> None:
    prefixes = filled()
    prefixes.removed("a", "1", PAGES[1:2], DRAM)
    prefixes.removed("a", "1", PAGES[1:2], DEVICE)
    matches = prefixes.match(PAGES, 0.0)
    assert matches.lengths[DRAM]["a"] == 1
    assert matches.runs[-1].end == 8, "b has it"
    prefixes.removed("b", "1", PAGES[1:2], COLD)
    assert prefixes.match(PAGES, 0.0).runs[-1].end == 1
    assert prefixes.match([], 0.0).runs == []
    prefixes.validate()


def test_siblings_count_on_what_the_first_of_them_will_bring() -> None:
    prefixes = filled()
    prefixes.expect("first", "b", PAGES, 0.0)
    prefixes.expect("second", "b", PAGES, 1.0)
    matches = prefixes.match(PAGES, 1.0)
    assert matches.lengths[DEVICE]["b"] == 10
    assert matches.runs[-1].end == 8, "nobody can fetch what is not there yet"
    prefixes.withdraw("first")
    assert prefixes.match(PAGES, 1.0).lengths[DEVICE]["b"] == 10
    prefixes.withdraw("second")
    assert prefixes.match(PAGES, 1.0).lengths[DEVICE].get("b", 0) == 0
    prefixes.validate()


def test_what_is_expected_and_never_comes_ends_with_its_time() -> None:
    prefixes = filled()
    prefixes.expect("first", "b", PAGES, 0.0)
    assert prefixes.match(PAGES, SPECULATIVE_S - 1).lengths[DEVICE]["b"] == 10
    assert prefixes.match(PAGES, SPECULATIVE_S).lengths[DEVICE].get("b", 0) == 0
    assert prefixes.expected_keys == 0
    prefixes.validate()


def test_a_new_incarnation_has_nothing_and_the_old_one_says_nothing_any_more() -> None:
    prefixes = filled()
    prefixes.expect("first", "a", PAGES, 0.0)
    assert not prefixes.join("a", "1")
    assert prefixes.join("a", "2")
    prefixes.stored("a", "1", PAGES, DRAM)
    prefixes.removed("b", "0", PAGES, COLD)
    matches = prefixes.match(PAGES, 0.0)
    assert all("a" not in lengths for lengths in matches.lengths)
    assert matches.lengths[COLD]["b"] == 3
    prefixes.stored("a", "2", PAGES[:1], DRAM)
    assert prefixes.match(PAGES, 0.0).lengths[DRAM]["a"] == 1
    prefixes.validate()


def test_a_holder_that_comes_and_goes_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HOLDERS", 4)
    prefixes = filled()
    for number in range(50):
        prefixes.join("c", str(number))
        prefixes.stored("c", str(number), PAGES, DRAM)
        prefixes.validate()
    prefixes.leave("c")
    matches = prefixes.match(PAGES, 0.0)
    assert all("c" not in lengths for lengths in matches.lengths)
    prefixes.join("c", "x")
    prefixes.join("d", "x")
    with pytest.raises(ValueError, match="limit is 4"):
        prefixes.join("e", "x")


def test_pages_known_and_pages_expected_are_bounded() -> None:
    prefixes = Prefixes(max_keys=100)
    prefixes.join("a", "1")
    for number in range(100):
        prefixes.stored("a", "1", [(number, page).__hash__() for page in range(7)], DRAM)
        prefixes.expect(str(number), "a", [(number, page).__hash__() for page in range(7)], 0.0)
        prefixes.validate()
    assert len(prefixes) == 100
    assert prefixes.dropped_keys == 600
    assert 90 < prefixes.expected_keys <= 100
    before = prefixes.expected_keys
    prefixes.expect("huge", "a", list(range(101)), 0.0)
    assert prefixes.expected_keys == before, "what has no room at all drives nothing out"
    prefixes.validate()


def test_what_was_asked_for_is_forgotten_last() -> None:
    prefixes = Prefixes(max_keys=3)
    prefixes.join("a", "1")
    prefixes.stored("a", "1", [1, 2, 3], DRAM)
    prefixes.touch([1])
    prefixes.stored("a", "1", [4], DRAM)
    assert prefixes.match([1], 0.0).lengths[DRAM] == {"a": 1}
    assert prefixes.match([2], 0.0).lengths[DRAM] == {}


@pytest.mark.parametrize("seed", range(6))
def test_any_history_agrees_with_a_plain_record_of_it(seed: int) -> None:
    rng = random.Random(seed)
    prefixes = Prefixes()
    held: set[tuple[str, int, Key]] = set()
    expected: dict[str, tuple[str, list[Key], float]] = {}
    incarnations: dict[str, str] = {}
    now = 0.0
    for step in range(400):
        now += rng.random()
        name = rng.choice("abcde")
        keys = [page for page in PAGES if rng.random() < 0.5]
        tier = rng.choice(TIERS)
        act = rng.randrange(7)
        if act == 0:
            if rng.random() < 0.2:
                incarnations[name] = str(step)
                held = {each for each in held if each[0] != name}
                expected = {request: each for request, each in expected.items() if each[0] != name}
                prefixes.join(name, str(step))
        elif act in (1, 2) and name in incarnations:
            prefixes.stored(name, incarnations[name], keys, tier)
            held |= {(name, tier, key) for key in keys}
        elif act == 3 and name in incarnations:
            prefixes.removed(name, incarnations[name], keys, tier)
            held -= {(name, tier, key) for key in keys}
        elif act == 4 and name in incarnations and keys:
            prefixes.expect(str(step), name, keys, now)
            expected[str(step)] = name, keys, now + SPECULATIVE_S
        elif act == 5 and expected:
            request = rng.choice(sorted(expected))
            del expected[request]
            prefixes.withdraw(request)
        expected = {request: each for request, each in expected.items() if each[2] > now}
        matches = prefixes.match(PAGES, now)
        prefixes.validate()
        soon = {(each[0], DEVICE, key) for each in expected.values() for key in each[1]}
        for name in incarnations:
            for tier, better in ((DEVICE, ()), (HOST, (DEVICE,)), (DRAM, ()), (COLD, (DRAM,))):
                length = 0
                while length < len(PAGES) and any((name, t, PAGES[length]) in held | soon for t in (tier, *better)):
                    length += 1
                assert matches.lengths[tier].get(name, 0) == length
        slots = {name: slot for slot, name in matches.slots.items()}
        at = 0
        for run in matches.runs:
            assert run.start == at
            for at in range(run.start, run.end):
                assert run.holders == sum(bit(slots[n], t) for n, t, key in held if key == PAGES[at])
            at = run.end
        assert at == len(PAGES) or not any(key == PAGES[at] for _, _, key in held)
