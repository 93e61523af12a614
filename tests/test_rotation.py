"""A node that lives but cannot be read from is taken out of lookups by what its readers say, and comes back by itself."""

from __future__ import annotations

import random

import pytest
from hicache_master.rotation import HALF_OPEN_S, RELAPSE_S, SICK_S, WINDOW_S, Rotation

NODES = frozenset("abcdefgh")


class Readers:
    """A rotation with a clock, validated after everything that happens to it."""

    def __init__(self, nodes: frozenset[str] = NODES) -> None:
        self.rotation = Rotation()
        self.nodes = nodes
        self.now = 50.0

    def say(self, reader: str, *failed: str) -> list[str]:
        sick = self.rotation.report(reader, failed, self.nodes, self.now)
        self.rotation.validate(self.nodes)
        return sick

    def pass_time(self, seconds: float) -> list[str]:
        back = []
        for _ in range(10):
            self.now += seconds / 10
            back += self.rotation.recover(self.now)
            self.rotation.validate(self.nodes)
        return back

    def until_back(self, node: str) -> float:
        """How long it takes until the node is answered again."""
        began = self.now
        while self.rotation.is_sick(node):
            self.now += 0.25
            self.rotation.recover(self.now)
            assert self.now < began + 1000
        return self.now - began


@pytest.fixture
def readers() -> Readers:
    return Readers()


def test_one_reader_is_not_enough_two_are(readers: Readers) -> None:
    assert readers.say("b", "a") == []
    assert readers.say("b", "a") == [], "the same reader again is no second one"
    assert readers.say("c", "a") == ["a"]
    assert readers.rotation.is_sick("a")
    assert readers.say("d", "a") == [], "it is sick already"


def test_reports_that_lie_far_apart_do_not_add_up(readers: Readers) -> None:
    readers.say("b", "a")
    readers.pass_time(WINDOW_S + 1)
    assert readers.say("c", "a") == []
    readers.pass_time(WINDOW_S - 1)
    assert readers.say("d", "a") == ["a"]


def test_with_one_other_node_its_word_is_enough() -> None:
    readers = Readers(frozenset("ab"))
    assert readers.say("b", "a") == ["a"]


def test_a_reader_that_reaches_hardly_anybody_is_itself_cut_off(readers: Readers) -> None:
    readers.say("b", *"acdef")
    assert readers.say("c", *"adefg") == [], "five of eight each: it is they who are cut off"
    assert readers.say("d", "a", "e") == [], "and they do not count for anybody else's report"
    assert readers.say("f", "a") == ["a"]


def test_a_rack_that_loses_its_switch_takes_itself_out_and_nobody_else() -> None:
    """Half of the nodes cannot reach the other half: the smaller part goes, the larger serves on."""
    readers = Readers(frozenset("abcdefghi"))
    small, large = "abcd", "efghi"
    for node in small:
        assert readers.say(node, *large) == []  # five of nine
    sick = [node for reader in large for node in readers.say(reader, *small)]
    assert sorted(sick) == list(small), "four of nine are a minority, and out of rotation"
    assert not any(readers.rotation.is_sick(node) for node in large)


def test_a_node_that_reports_itself_or_strangers_says_nothing(readers: Readers) -> None:
    readers.say("b", "b", "nobody")
    readers.say("c", "b", "nobody")
    assert not readers.rotation.is_sick("b")
    assert not readers.rotation.is_sick("nobody")


def test_the_sick_come_back_and_one_report_sends_them_away_for_twice_as_long(readers: Readers) -> None:
    lasted = []
    readers.say("b", "a")
    readers.say("c", "a")
    for _ in range(6):
        lasted.append(round(readers.until_back("a")))
        readers.pass_time(HALF_OPEN_S / 2)
        assert readers.say("d", "a") == ["a"], "on probation one report is enough"
    assert lasted == [5, 10, 20, 40, 60, 60]


def test_what_was_said_before_the_return_is_not_held_against_it(readers: Readers) -> None:
    readers.say("b", "a")
    readers.say("c", "a")
    readers.pass_time(SICK_S[0] - 0.1)
    readers.say("d", "a")
    assert readers.pass_time(0.2) == ["a"]
    readers.pass_time(HALF_OPEN_S + 0.1)
    assert readers.say("e", "a") == [], "its probation is over: two again"


def test_after_a_probation_without_reports_it_is_a_new_case_in_a_minute(readers: Readers) -> None:
    readers.say("b", "a")
    readers.say("c", "a")
    readers.until_back("a")
    readers.pass_time(RELAPSE_S + 1)
    readers.say("b", "a")
    assert readers.say("c", "a") == ["a"]
    assert readers.until_back("a") == pytest.approx(SICK_S[0], abs=0.3)


def test_a_new_life_starts_with_a_clean_record(readers: Readers) -> None:
    readers.say("b", "a")
    readers.say("c", "a")
    readers.rotation.forget("a")
    assert not readers.rotation.is_sick("a")
    assert readers.say("d", "a") == []


def test_nothing_is_kept_for_ever(readers: Readers) -> None:
    for reader in "bcde":
        readers.say(reader, "a", "f")
    readers.until_back("a")
    readers.pass_time(RELAPSE_S + WINDOW_S + 1)
    readers.pass_time(1)
    assert readers.rotation._readers == {}
    assert readers.rotation._cases == {}


class _Counting(frozenset[str]):
    """Counts how often somebody asks whether a node is in it."""

    asked = 0

    def __contains__(self, node: object) -> bool:
        _Counting.asked += 1
        return super().__contains__(node)


def test_when_a_rack_fails_a_report_does_not_look_at_those_of_all_others() -> None:
    """A thousand nodes say within a second that they cannot read from fifty: the master has lookups to answer meanwhile."""
    nodes = _Counting(f"n{number}" for number in range(1000))
    rack = [f"n{number}" for number in range(50)]
    rotation = Rotation()
    for reader in range(100, 900):
        rotation.report(f"n{reader}", rack, nodes, 1.0)
    assert all(map(rotation.is_sick, rack))
    _Counting.asked = 0
    rotation.report("n900", [*rack, "n950"], nodes, 1.2)
    rotation.report("n901", ["n950"], nodes, 1.2)
    assert rotation.is_sick("n950")
    assert _Counting.asked < 5 * len(rack)


def _naive(said: dict[tuple[str, str], float], reader: str, failed: list[str], now: float) -> set[str]:
    """Who is sick by the rule, from everything that was ever said."""

    def lately(by: str) -> set[str]:
        return {node for (other, node), at in said.items() if other == by and now - at <= WINDOW_S}

    counts = {by: 2 * len(lately(by)) <= len(NODES) for by, _ in said}
    if not counts[reader]:
        return set()
    return {node for node in failed if sum(counts[by] and node in lately(by) for by in counts) >= 2}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_remembered_in_passing_gives_the_same_as_the_rule(seed: int) -> None:
    """Only who falls sick first is compared: there nothing is on probation."""
    rng = random.Random(seed)
    fallen = 0
    for _ in range(200):
        readers, said = Readers(), dict[tuple[str, str], float]()
        for _ in range(12):
            reader = rng.choice(sorted(NODES))
            failed = rng.sample(sorted(NODES - {reader}), rng.choice((1, 1, 2, 3, 6)))
            said |= {(reader, node): readers.now for node in failed}
            expected = _naive(said, reader, failed, readers.now)
            assert set(readers.say(reader, *failed)) == expected
            if expected:
                fallen += 1
                break
            readers.pass_time(rng.choice((1.1, 1.3, 2.5, 6.2)))
    assert fallen > 100
