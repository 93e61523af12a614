"""Room that a peer may be writing to: bounded, and shared fairly by those who read from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.node.window import RECENT_S, Window

MIB = 1 << 20


def test_one_reader_has_the_whole_window() -> None:
    window = Window(8 * MIB)
    assert window.take("a", 1, MIB, 100, 0.0) == 8
    assert window.held("a") == 8 * MIB
    assert window.take("a", 1, MIB, 100, 0.0) == 0
    assert window.take("b", 1, MIB, 3, 0.0) == 3, "each peer has its own"


def test_those_who_ask_share_it_evenly_as_soon_as_room_comes_back() -> None:
    window = Window(8 * MIB)
    assert window.take("a", 1, MIB, 100, 0.0) == 8
    assert window.take("a", 2, MIB, 100, 0.1) == 0
    window.give_back("a", 1, MIB, 8)
    assert window.take("a", 1, MIB, 100, 0.2) == 4, "the other one asked a moment ago"
    assert window.take("a", 2, MIB, 100, 0.3) == 4


def test_who_has_not_asked_for_a_while_is_no_longer_waited_for() -> None:
    window = Window(8 * MIB)
    window.take("a", 2, MIB, 0, 0.0)
    assert window.take("a", 1, MIB, 100, RECENT_S) == 8


def test_a_page_larger_than_the_window_comes_alone() -> None:
    window = Window(MIB)
    assert window.take("a", 1, 3 * MIB, 5, 0.0) == 1
    assert window.take("a", 2, 3 * MIB, 5, 0.0) == 0
    window.give_back("a", 1, 3 * MIB, 1)
    assert window.take("a", 2, 3 * MIB, 5, 0.0) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 4), st.integers(1, 64 << 10), st.integers(0, 9), st.booleans()),
        max_size=60,
    )
)
def test_whatever_is_asked_for_the_bound_holds_and_all_comes_back(asks: list[tuple[str, int, int, int, bool]]) -> None:
    window = Window(256 << 10)
    held: list[tuple[str, int, int, int]] = []
    for at, (peer, owner, size, count, give_back) in enumerate(asks):
        if give_back and held:
            window.give_back(*held.pop(0))
        granted = window.take(peer, owner, size, count, at * 0.1)
        assert 0 <= granted <= count
        held.append((peer, owner, size, granted))
        window.validate()
    for each in held:
        window.give_back(*each)
    window.validate()
    assert window.held("a") == window.held("b") == 0
