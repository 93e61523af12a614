"""The segment allocator: blocks never overlap, freed neighbours become one block, and a full segment says no."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_mooncake.node.allocator import GRANULE, Allocator


def test_uniform_pages_fill_the_segment_to_the_last_one() -> None:
    allocator = Allocator(100 * 8192)
    offsets = [allocator.allocate(8192) for _ in range(100)]
    assert sorted(o for o in offsets if o is not None) == [i * 8192 for i in range(100)]
    assert allocator.allocate(1) is None
    allocator.validate([(o, 8192) for o in offsets if o is not None])


def test_freed_neighbours_coalesce_into_room_for_a_larger_page() -> None:
    allocator = Allocator(16 * GRANULE)
    offsets = [allocator.allocate(GRANULE) for _ in range(16)]
    for offset in offsets[4:8]:
        assert offset is not None
        allocator.free(offset, GRANULE)
    assert allocator.allocate(4 * GRANULE) == 4 * GRANULE
    held = [(o, GRANULE) for o in (*offsets[:4], *offsets[8:]) if o is not None]
    allocator.validate([*held, (4 * GRANULE, 4 * GRANULE)])


def test_a_block_is_rounded_up_to_whole_granules() -> None:
    allocator = Allocator(2 * GRANULE)
    first, second = allocator.allocate(1), allocator.allocate(GRANULE)
    assert {first, second} == {0, GRANULE}
    assert allocator.used == 2 * GRANULE


def test_bad_requests_are_errors_and_change_nothing() -> None:
    allocator = Allocator(4 * GRANULE)
    with pytest.raises(ValueError, match="0 bytes"):
        allocator.allocate(0)
    with pytest.raises(KeyError):
        allocator.free(GRANULE, GRANULE)
    with pytest.raises(ValueError, match="at least"):
        Allocator(10)
    assert allocator.allocate(GRANULE) == 0
    allocator.free(0, GRANULE)
    for offset in (0, 1, -GRANULE, 4 * GRANULE, 400 * GRANULE):
        with pytest.raises(KeyError):
            allocator.free(offset, GRANULE)
    allocator.validate([])


def test_a_quarter_of_a_million_cycles_leave_nothing_behind() -> None:
    """P83: uniform and mixed sizes, always half full; afterwards it is one free block again, and so are its books."""
    rng = random.Random(1)
    allocator = Allocator(512 * GRANULE)
    live: list[tuple[int, int]] = []
    for _ in range(250_000):
        if len(live) > 100 or (live and rng.random() < 0.5):
            at = rng.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            allocator.free(*live.pop())
        else:
            size = rng.choice((1, 1, 1, 2, 3)) * GRANULE
            offset = allocator.allocate(size)
            if offset is not None:
                live.append((offset, size))
    for offset, size in live:
        allocator.free(offset, size)
    allocator.validate([])
    assert (allocator.used, allocator._size_of_free) == (0, {0: allocator.capacity})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([1, 3, 8, 16])), max_size=20), st.integers(0, 2**32))
def test_blocks_freed_together_leave_what_they_leave_one_by_one(batches: list[tuple[int, int]], seed: int) -> None:
    rng = random.Random(seed)
    together, single = Allocator(1500 * GRANULE), Allocator(1500 * GRANULE)
    live: dict[int, set[int]] = {}
    for count, granules in batches:
        size = granules * GRANULE
        taken = together.allocate_many(size, count)
        assert taken == single.allocate_many(size, count)
        live.setdefault(size, set()).update(taken)
    for size, offsets in live.items():
        going = rng.sample(sorted(offsets), rng.randrange(len(offsets) + 1))
        offsets.difference_update(going)
        assert together.free_many(going, size) == sum(single.free(offset, size) for offset in going)
        for allocator in (together, single):
            allocator.validate((offset, size) for size, offsets in live.items() for offset in offsets)


def test_a_block_named_twice_is_an_error_and_the_books_hold() -> None:
    allocator = Allocator(8 * GRANULE)
    allocator.allocate_many(GRANULE, 4)
    with pytest.raises(KeyError):
        allocator.free_many([2 * GRANULE, GRANULE, 2 * GRANULE], GRANULE)
    allocator.validate([(0, GRANULE), (3 * GRANULE, GRANULE)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300 * GRANULE)), max_size=120), st.integers(0, 2**32))
def test_any_sequence_keeps_every_byte_in_one_block(steps: list[tuple[bool, int]], seed: int) -> None:
    rng = random.Random(seed)
    allocator = Allocator(1000 * GRANULE)
    live: dict[int, int] = {}
    for allocate, size in steps:
        if allocate or not live:
            offset = allocator.allocate(size)
            if offset is not None:
                assert all(offset + size <= o or o + s <= offset for o, s in live.items())
                live[offset] = size
            else:
                free = allocator.capacity - allocator.used
                assert free < size or live, "an empty segment must have room"
        else:
            offset = rng.choice(list(live))
            allocator.free(offset, live.pop(offset))
        allocator.validate(live.items())
    for offset, size in live.items():
        allocator.free(offset, size)
    allocator.validate([])
    assert allocator.allocate(allocator.capacity) == 0
