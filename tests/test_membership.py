"""A node is joining, active, sick, suspected, draining or gone; silence, signs of life, its own word and that of its readers
move it, and the newest incarnation has the name."""

from __future__ import annotations

import pytest
from hicache_master.membership import (
    ACTIVE,
    DRAINING,
    GONE,
    JOINING,
    SICK,
    SUSPECTED,
    Membership,
    NoRoom,
    is_loopback,
    is_wildcard,
)


@pytest.fixture
def members() -> Membership:
    return Membership(ttl_s=5.0, forget_s=60.0)


def join(members: Membership, name: str = "a", incarnation: bytes = b"1", host: str = "10.0.0.1", now: float = 0.0) -> bool:
    _, clash = members.join(name, incarnation, host, 7000, 1 << 30, now)
    members.validate()
    return clash


def state(members: Membership, name: str = "a") -> str:
    members.validate()
    return next(member.state for member in members if member.name == name)


def test_a_node_is_joining_until_its_snapshot_is_complete(members: Membership) -> None:
    join(members)
    assert state(members) == JOINING
    members.complete("a")
    assert state(members) == ACTIVE


def test_silence_suspects_then_forgets(members: Membership) -> None:
    join(members)
    members.complete("a")
    assert members.expire(5.0) == []
    assert state(members) == ACTIVE
    assert members.expire(5.1) == []
    assert state(members) == SUSPECTED
    assert [member.name for member in members.expire(60.1)] == ["a"]
    assert state(members) == GONE
    assert members.expire(61.0) == []
    assert members.touch("a", b"1", 62.0) is None
    assert members.live() == []
    members.expire(700.0)
    assert list(members) == []


def test_a_sign_of_life_brings_a_suspected_node_straight_back(members: Membership) -> None:
    join(members, "a")
    join(members, "b")
    members.complete("a")
    members.expire(6.0)
    assert members.touch("a", b"1", 7.0) is not None
    assert members.touch("b", b"1", 7.0) is not None
    assert (state(members, "a"), state(members, "b")) == (ACTIVE, JOINING)


def test_a_snapshot_that_completes_while_its_node_is_suspected_counts_when_it_is_back(members: Membership) -> None:
    join(members)
    members.expire(6.0)
    members.complete("a")
    assert state(members) == SUSPECTED
    members.touch("a", b"1", 7.0)
    assert state(members) == ACTIVE


def test_a_new_incarnation_replaces_the_old_one_and_starts_over(members: Membership) -> None:
    join(members, incarnation=b"1")
    members.complete("a")
    assert not join(members, incarnation=b"2", now=1.0)  # same address: a restart
    assert state(members) == JOINING
    assert members.touch("a", b"1", 2.0) is None
    assert members.name_clashes == 0


def test_joining_again_keeps_what_is_known(members: Membership) -> None:
    join(members)
    members.complete("a")
    assert not join(members, host="10.0.0.9", now=1.0)
    assert state(members) == ACTIVE
    member = members.get("a")
    assert member is not None
    assert member.host == "10.0.0.9"


def test_two_live_nodes_of_one_name_are_a_clash_that_the_newer_wins(members: Membership) -> None:
    join(members, incarnation=b"1", host="10.0.0.1")
    assert join(members, incarnation=b"2", host="10.0.0.2", now=1.0)
    assert members.name_clashes == 1
    assert members.get("a", b"2") is not None
    members.expire(7.0)
    assert not join(members, incarnation=b"3", host="10.0.0.3", now=7.0), "a node that was silent may have moved"


def test_a_node_that_leaves_is_off_the_list_but_only_by_its_own_word(members: Membership) -> None:
    join(members, incarnation=b"2")
    assert members.leave("a", b"1") is None
    assert members.leave("a", b"2") is not None
    assert list(members) == []


def test_there_is_a_most_of_nodes_and_gone_ones_make_room() -> None:
    members = Membership(ttl_s=5.0, forget_s=60.0, max_nodes=2)
    join(members, "a")
    join(members, "b", now=50.0)
    with pytest.raises(NoRoom, match="2 nodes"):
        join(members, "c", now=51.0)
    members.expire(61.0)
    join(members, "c", now=62.0)
    assert {member.name for member in members} == {"b", "c"}


def test_the_clock_of_a_late_message_does_not_turn_time_back(members: Membership) -> None:
    join(members, now=10.0)
    members.touch("a", b"1", 9.0)
    members.validate()


def three(members: Membership) -> None:
    for name in "abc":
        join(members, name)
        members.complete(name)


def test_a_node_drains_by_its_own_word_and_may_take_it_back(members: Membership) -> None:
    join(members)
    members.drain("a", True)
    assert state(members) == JOINING, "what it holds is not known yet"
    members.complete("a")
    assert state(members) == DRAINING
    members.expire(6.0)
    assert state(members) == SUSPECTED
    members.touch("a", b"1", 7.0)
    assert state(members) == DRAINING
    members.drain("a", False)
    assert state(members) == ACTIVE


def test_a_node_may_join_in_order_to_drain(members: Membership) -> None:
    members.join("a", b"1", "h", 1, 1, 0.0, draining=True)
    members.complete("a")
    assert state(members) == DRAINING
    members.join("a", b"1", "h", 1, 1, 1.0)
    assert state(members) == ACTIVE


def test_readers_make_a_node_sick_and_time_brings_it_back(members: Membership) -> None:
    three(members)
    version = members.version
    assert members.report("b", ["a"], 1.0) == []
    assert [member.name for member in members.report("c", ["a"], 1.0)] == ["a"]
    assert state(members) == SICK
    assert members.version > version, "who answers lookups must hear of it"
    members.touch("a", b"1", 4.0)
    assert state(members) == SICK, "its heart beats: that is the point"
    assert members.recover(5.9) == []
    assert [member.name for member in members.recover(6.1)] == ["a"]
    assert state(members) == ACTIVE


def test_a_sick_node_that_falls_silent_is_suspected_and_stays_sick_until_its_time(members: Membership) -> None:
    three(members)
    members.report("b", ["a"], 4.0)
    members.report("c", ["a"], 4.0)
    members.expire(5.1)
    assert state(members) == SUSPECTED
    members.touch("a", b"1", 6.0)
    assert state(members) == SICK
    members.recover(9.1)
    assert state(members) == ACTIVE


def test_a_new_incarnation_of_a_sick_node_is_not_sick(members: Membership) -> None:
    three(members)
    members.report("b", ["a"], 1.0)
    members.report("c", ["a"], 1.0)
    join(members, "a", incarnation=b"2", now=2.0)
    members.complete("a")
    assert state(members) == ACTIVE


def test_a_pause_of_the_master_itself_is_nobodys_silence(members: Membership) -> None:
    three(members)
    members.touch("b", b"1", 9.5)
    members.expire(4.0)
    members.excuse(90.0, 94.0)
    assert members.expire(94.0) == []
    assert {state(members, name) for name in "abc"} == {ACTIVE}
    members.expire(98.9)
    assert state(members, "b") == ACTIVE
    members.expire(99.1)
    assert state(members, "b") == SUSPECTED, "no sign of life lies in the future"


def test_whoever_has_a_member_in_hand_sees_that_it_was_replaced(members: Membership) -> None:
    join(members)
    members.complete("a")
    old = members.get("a")
    assert old is not None
    join(members, incarnation=b"2", now=1.0)
    assert old.state == GONE


def test_two_nodes_at_one_address_are_seen_unless_one_is_silent_or_gone(members: Membership) -> None:
    join(members, "a")
    join(members, "b")
    assert members.at_address("10.0.0.1", 7000, "b") == "a"
    assert members.at_address("10.0.0.1", 7001, "b") == ""
    members.touch("b", b"1", 100.0)
    members.expire(100.0)
    assert state(members, "a") == GONE
    assert members.at_address("10.0.0.1", 7000, "b") == ""


def test_the_clock_may_turn_back(members: Membership) -> None:
    three(members)
    members.expire(6.0)
    members.touch("a", b"1", 7.0)
    assert members.expire(1.0) == []
    assert state(members) == ACTIVE
    assert members.recover(0.0) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "*", "[::]", "::ffff:0.0.0.0"])
def test_wildcards_are_known(host: str) -> None:
    assert is_wildcard(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"])
def test_loopback_addresses_are_known(host: str) -> None:
    assert is_loopback(host)
    assert not is_wildcard(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "node-7", "2001:db8::1", "localhost.example.com"])
def test_other_addresses_are_neither(host: str) -> None:
    assert not is_loopback(host)
    assert not is_wildcard(host)
