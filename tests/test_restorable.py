"""What of a chain can be restored, against the definition itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.client.restorable import both, restorable_lengths, trailing_lengths

columns = st.lists(st.booleans(), max_size=12).map(bytes)


@given(columns, st.integers(1, 15), st.integers(0, 14))
def test_a_trailing_pool_serves_the_prefixes_whose_last_pages_it_has(column: bytes, window: int, up_to: int) -> None:
    by_definition = [
        length for length in range(1, min(up_to, len(column)) + 1) if all(column[max(0, length - window) : length])
    ]
    assert trailing_lengths(column, window, up_to) == by_definition


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.lists(st.integers(1, 9), unique=True), max_size=3))
def test_a_prefix_is_restorable_when_every_pool_serves_it(runs: list[int], trailing: list[list[int]]) -> None:
    by_definition = [n for n in range(1, 10) if all(n <= run for run in runs) and all(n in served for served in trailing)]
    assert restorable_lengths(runs, trailing) == by_definition


def test_five_can_be_restorable_and_three_and_four_not() -> None:
    """P33: a window that ends where a node ended."""
    state = bytes([0, 1, 0, 0, 1, 0])
    assert trailing_lengths(state, 1, 6) == [2, 5]
    assert restorable_lengths([6, 5], [trailing_lengths(state, 1, 6)]) == [2, 5]
    assert restorable_lengths([], []) == []


def test_a_page_in_several_parts_is_there_when_all_parts_are() -> None:
    assert both([b"\1\1\0\1", b"\1\0\0\1"]) == b"\1\0\0\1"
    assert both([b"\1\0"]) == b"\1\0"
