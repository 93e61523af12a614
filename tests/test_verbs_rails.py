"""The rails of a link: who carries how much, who is set aside, and when it is tried again."""

from __future__ import annotations

import random
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.backoff import STABLE_S
from hicache_mooncake.transfer.verbs.rails import (
    ANSWER_S,
    FIRST_PAUSE_S,
    MAX_SLICE,
    MIN_WINDOW,
    MOST_PAUSE_S,
    STALLED_S,
    STORM,
    Loss,
    Port,
    Rail,
    Rails,
    State,
    pairs,
    routes,
)
from hicache_mooncake.transfer.verbs.slices import MIN_SLICE


def rails_up(count: int, now: float = 0.0) -> Rails:
    rails = Rails([(i, i) for i in range(count)], rng=random.Random(1))
    for rail in rails.due(now):
        rails.pairing(rail, now)
        rails.came_up(rail, now)
    return rails


def anybody(_rail: Rail) -> bool:
    return True


def carry(rails: Rails, speeds: list[float], total: int) -> list[int]:
    """Moves so many bytes over rails that carry so many bytes/s; returns what each has moved."""
    now = 0.0
    under_way: list[tuple[float, int, Rail]] = []
    free_at = [0.0] * len(speeds)
    before = [rail.moved for rail in rails.all]
    while total or under_way:
        while total:
            size = min(rails.slice_bytes(total), total)
            rail = rails.choose(anybody, size)
            if rail is None:
                break
            rails.posted(rail, size, now)
            free_at[rail.index] = max(free_at[rail.index], now) + size / speeds[rail.index]
            under_way.append((free_at[rail.index], size, rail))
            total -= size
        under_way.sort(key=lambda entry: entry[0])
        now, size, rail = under_way.pop(0)
        rails.completed(rail, size, now)
        rails.validate()
    return [rail.moved - was for rail, was in zip(rails.all, before, strict=True)]


def test_rails_carry_in_proportion_to_what_they_achieve() -> None:
    rails = rails_up(3)
    speeds = [10e9, 10e9, 2.5e9]
    carry(rails, speeds, 4 << 30)
    first, second, third = carry(rails, speeds, 4 << 30)
    assert first == pytest.approx(second, rel=0.1)
    assert third == pytest.approx(first / 4, rel=0.3)


def test_a_slow_rail_that_has_become_fast_is_found_out() -> None:
    rails = rails_up(2)
    carry(rails, [10e9, 0.2e9], 4 << 30)
    assert rails.all[1].rate < 1e9
    carry(rails, [10e9, 10e9], 4 << 30)
    assert rails.all[1].rate > 5e9


def test_a_nearer_device_carries_more_where_the_rates_are_equal() -> None:
    rails = Rails([(0, 0), (1, 1)])
    for rail in rails.due(0.0):
        rails.pairing(rail, 0.0)
        rails.came_up(rail, 0.0)
    carried = [0, 0]
    for _ in range(30):
        rail = rails.choose(anybody, MIN_SLICE, lambda rail: (0.5, 1.0)[rail.index])
        assert rail is not None
        rails.posted(rail, MIN_SLICE, 0.0)
        carried[rail.index] += 1
    assert carried == [10, 20]


def test_a_batch_is_cut_for_all_rails_but_not_below_64_kib() -> None:
    rails = rails_up(4)
    assert rails.slice_bytes(100 << 10) == MIN_SLICE
    assert rails.slice_bytes(4 << 20) == (4 << 20) // 8
    assert rails.slice_bytes(1 << 30) == MAX_SLICE
    assert rails_up(1).slice_bytes(1 << 30) == 1 << 30


def test_a_rail_whose_window_is_full_gets_nothing() -> None:
    rails = rails_up(1)
    (rail,) = rails.all
    rails.posted(rail, MIN_WINDOW, 0.0)
    assert rails.choose(anybody, 1) is None
    rails.completed(rail, 1, 0.001)
    assert rails.choose(anybody, 1) is rail
    assert rails.choose(lambda _rail: False, 1) is None


def fail(rails: Rails, rail: Rail, now: float) -> None:
    assert rails.lost(rail, Loss.FAILED, now, gone=False) is Loss.FAILED
    assert rail.state is State.ENDING
    rails.gone(rail)
    rails.validate()


def test_a_rail_that_failed_is_set_aside_and_probed_back() -> None:
    rails = rails_up(2)
    rail = rails.all[0]
    fail(rails, rail, 100.0)
    assert rails.up == [rails.all[1]]
    assert not rails.hopeless(100.0)
    assert rails.due(100.0) == []
    at = rails.next_due()
    assert at is not None
    assert 0.5 * FIRST_PAUSE_S < at - 100.0 < 2 * FIRST_PAUSE_S
    assert rails.due(at) == [rail]
    assert rails.pairing(rail, at) == 2
    rails.came_up(rail, at)
    assert rails.up == rails.all


def test_a_rail_that_dies_again_at_once_waits_longer_and_longer_and_is_quarantined() -> None:
    rails = rails_up(2)
    rail = rails.all[0]
    now, waited = 100.0, []
    for _ in range(6):
        fail(rails, rail, now)
        at = rails.next_due()
        assert at is not None
        waited.append(at - now)
        now = at
        assert rails.due(now) == [rail]
        rails.pairing(rail, now)
        rails.came_up(rail, now)
        now += 0.003
    assert waited[0] < waited[1] < MOST_PAUSE_S / 2
    assert all(pause > MOST_PAUSE_S / 2 for pause in waited[STORM - 1 :])
    assert rail.quarantined
    fail(rails, rail, now + STABLE_S + 1)
    assert not rail.quarantined
    at = rails.next_due()
    assert at is not None
    assert at - (now + STABLE_S + 1) < 2 * FIRST_PAUSE_S


def test_a_rail_that_cannot_be_paired_is_tried_again_later_and_later_but_that_is_no_storm() -> None:
    """As long as a port is down, nobody knows how its queue pairs would fare."""
    rails = Rails([(0, 0)], rng=random.Random(1))
    now, waited = 0.0, []
    for _ in range(2 * STORM):
        (rail,) = rails.due(now)
        rails.pairing(rail, now)
        rails.lost(rail, Loss.FAILED, now, gone=True)
        assert rails.hopeless(now)
        at = rails.next_due()
        assert at is not None
        waited.append(at - now)
        now = at
    assert rail.failures == 2 * STORM
    assert not rail.quarantined
    assert waited[-1] > 5 * waited[0]


def test_the_link_is_dead_when_every_rail_is_set_aside() -> None:
    rails = rails_up(2)
    fail(rails, rails.all[0], 5.0)
    assert not rails.hopeless(5.0)
    rails.lost(rails.all[1], Loss.FAILED, 5.0, gone=False)
    assert rails.hopeless(5.0)


def test_a_peer_that_does_not_answer_is_found_out_when_no_rail_is_up() -> None:
    rails = rails_up(2)
    rails.lost(rails.all[0], Loss.FENCED, 5.0, gone=False)
    assert not rails.silent(5.1 + ANSWER_S)
    rails.lost(rails.all[1], Loss.FENCED, 7.0, gone=False)
    assert not rails.silent(6.9 + ANSWER_S)
    assert rails.silent(7.1 + ANSWER_S)


def test_a_fence_costs_the_rail_no_pause() -> None:
    rails = rails_up(1)
    (rail,) = rails.all
    rails.posted(rail, 1000, 5.0)
    assert rails.lost(rail, Loss.FENCED, 5.1, gone=False) is Loss.FENCED
    assert not rails.hopeless(5.1)
    assert rails.due(5.1) == []  # the peer's end is not gone yet
    rails.gone(rail)
    assert rails.due(5.1) == [rail]
    assert rail.in_flight == 0


def test_a_rail_on_which_nothing_moved_is_set_aside_when_it_is_fenced() -> None:
    rails = rails_up(1)
    (rail,) = rails.all
    rails.posted(rail, 1000, 5.0)
    rails.posted(rail, 1000, 5.0 + STALLED_S)
    assert rails.lost(rail, Loss.FENCED, 5.0 + STALLED_S, gone=True) is Loss.FAILED
    assert rails.hopeless(5.0 + STALLED_S)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ptcfgxd"), st.floats(0, 30)), max_size=60))
def test_whatever_happens_in_whatever_order_the_account_is_right(events: list[tuple[int, str, float]]) -> None:
    rails = Rails([(0, 0), (1, 1), (2, 2)], rng=random.Random(3))
    now = 0.0
    for index, what, passed in events:
        now += passed
        rail = rails.all[index]
        match what, rail.state:
            case "p", State.DOWN if rail in rails.due(now):
                rails.pairing(rail, now)
            case "t", State.PAIRING:
                rails.came_up(rail, now)
            case "d", State.UP:
                rails.posted(rail, 100, now)
            case "c", State.UP if rail.in_flight:
                rails.completed(rail, 100, now)
            case "f", State.UP | State.PAIRING:
                rails.lost(rail, Loss.FAILED, now, gone=False)
            case "x", State.UP:
                rails.lost(rail, Loss.FENCED, now, gone=True)
            case "g", State.ENDING:
                rails.gone(rail)
        rails.validate()
        assert rails.choose(anybody, 1) in (None, *rails.up)
        assert all(rail.state is State.DOWN for rail in rails.due(now))


def port(number: int, gid: str = "0000:0000:0000:0000:0000:ffff:0a00:0001", link_layer: str = "Ethernet") -> Port:
    return Port(f"mlx5_{number}", 1, link_layer, gid, 0, 4096)


def test_every_port_is_on_a_rail_and_equal_ones_share_one() -> None:
    four, two = [port(i) for i in range(4)], [port(i) for i in range(2)]
    assert pairs(four, four) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert pairs(four, two) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert pairs(two, four) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert pairs([], two) == []


def test_ports_of_different_fabrics_make_no_rail() -> None:
    ib = port(0, "fe80:0000:0000:0000:0002:c903:0000:0001", "InfiniBand")
    other_subnet = port(1, "fec0:0000:0000:0001:0002:c903:0000:0002", "InfiniBand")
    v6 = port(2, "2001:0db8:0000:0000:0000:0000:0000:0002")
    assert pairs([ib, port(1)], [port(0), other_subnet]) == [(1, 0)]
    assert pairs([v6], [port(0)]) == []
    assert pairs([port(0), v6, ib], [ib, v6]) == [(1, 1), (2, 0)]


def v4(number: int, network: int) -> Port:
    return port(number, f"0000:0000:0000:0000:0000:ffff:0a00:{network:02x}{number + 1:02x}")


NETWORKS = {1: ip_network("10.0.1.0/24"), 2: ip_network("10.0.2.0/24"), 3: ip_network("10.0.3.0/24")}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((1, 2), (2, 1), [(0, 1), (1, 0)]),
        ((1, 2), (2,), [(0, 0), (1, 0)]),
        ((2,), (1, 2), [(0, 1)]),
        ((1, 1, 2), (2, 1), [(0, 1), (1, 1), (2, 0)]),
        ((1, 2, 3), (3, 9, 1), [(0, 2), (1, 1), (2, 0)]),
        ((1, 2), (8, 9), [(0, 0), (1, 1)]),
    ],
    ids=["crosswise", "fewer there", "fewer here", "two on one", "one unknown", "routed"],
)
def test_ports_of_one_network_are_a_rail(
    ours: tuple[int, ...], theirs: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    here = [v4(number, network) for number, network in enumerate(ours)]
    there = [v4(100 + number, network) for number, network in enumerate(theirs)]
    found = routes(here, [NETWORKS[network] for network in ours], there)
    assert sorted(found.pairs) == expected
    for (_, port_there), others in zip(found.pairs, found.others, strict=True):
        assert sorted((port_there, *others)) == list(range(len(theirs)))


def test_where_networks_are_not_known_or_all_the_same_ports_are_paired_in_order() -> None:
    here, there = [v4(i, 1) for i in range(4)], [v4(100 + i, 1) for i in range(4)]
    in_order = [(i, i) for i in range(4)]
    assert routes(here, [None] * 4, there).pairs == routes(here, [NETWORKS[1]] * 4, there).pairs == in_order


def test_an_infiniband_port_without_a_gid_may_be_in_any_subnet_and_never_on_ethernet() -> None:
    ib = port(0, "fe80:0000:0000:0000:0002:c903:0000:0001", "InfiniBand")
    bare = port(1, "", "InfiniBand")
    assert routes([bare], [None], [port(0), ib]).pairs == [(0, 1)]
    assert routes([ib], [None], [bare]).pairs == [(0, 0)]
    assert routes([port(0)], [None], [bare, ib]).pairs == []


def test_a_rail_that_never_worked_goes_through_the_peers_ports_and_one_that_did_stays() -> None:
    rails = Rails([(0, 0), (0, 3)], random.Random(1), [(1, 2, 3), (0, 1, 2)])
    rail, tried, now = rails.all[0], [], 0.0
    for _ in range(5):
        tried.append(rail.remote)
        assert rails.tried(now) is False
        assert rail in rails.due(now)
        rails.pairing(rail, now)
        rails.lost(rail, Loss.FAILED, now, gone=True)
        rails.validate()
        now = now if rail.pause.due() else rail.pause.at
    assert tried[:3] == [0, 1, 2], "3 is another rail's"
    rails.pairing(rail, now)
    rails.came_up(rail, now)
    remote = rail.remote
    for _ in range(3):
        rails.lost(rail, Loss.FAILED, now, gone=True)
        now = rail.pause.at
        assert rail.remote == remote
        rails.due(now)
        rails.pairing(rail, now)
