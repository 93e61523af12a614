"""What links share: batches end once and are quiet only when nobody holds them, turns are fair and bounded, notices too."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_mooncake.transfer.batches import Batch, Batches, Fenced, Inbox, Turn, check_pieces, runs
from hicache_mooncake.transfer.transport import Extents, Piece, TransportError

LATER = time.monotonic() + 1e6


def _nothing() -> None:
    pass


def _batches(max_in_flight: int = 1 << 30, **bounds: int) -> Batches:
    return Batches(max_in_flight, _nothing, **bounds)


def _reason(batch: Batch) -> str:
    with pytest.raises(TransportError) as caught:
        batch.wait()
    return caught.value.reason


# --------------------------------------------------------------------------- holds


def test_what_has_ended_is_quiet_when_the_last_hold_is_gone() -> None:
    fenced = Fenced()
    assert fenced.hold()
    assert fenced.hold()
    assert fenced.end()
    fenced.release()
    assert fenced.ended
    assert not fenced.quiet
    fenced.release()
    assert fenced.quiet


def test_what_has_ended_cannot_be_held() -> None:
    fenced = Fenced()
    fenced.end()
    assert fenced.quiet
    assert not fenced.hold()


def test_the_first_end_counts() -> None:
    batch = Batch("read", [Piece(1, 1, 1)], LATER, lambda _: None)
    assert batch.end(TransportError("peer", "gone"))
    assert not batch.end(TransportError("closed", "too late"))
    assert _reason(batch) == "peer"


def test_a_batch_that_is_cancelled_waits_for_whoever_holds_it() -> None:
    hurried = threading.Event()
    batch = Batch("read", [Piece(1, 1, 1)], LATER, lambda _: hurried.set())
    assert batch.hold()
    cancelling = threading.Thread(target=batch.cancel)
    cancelling.start()
    assert hurried.wait(20)
    assert not batch.done
    assert cancelling.is_alive()
    batch.release()
    cancelling.join(20)
    assert batch.done
    assert _reason(batch) == "cancelled"


def test_a_deadline_is_seen_by_whoever_looks() -> None:
    late = time.monotonic() - 1
    for look in (lambda batch: batch.done, lambda batch: _reason(batch)):
        batch = Batch("write", [Piece(1, 1, 7)], late, lambda _: None)
        assert look(batch)
        assert _reason(batch) == "deadline"


# --------------------------------------------------------------------------- turns


def _all_turns(batches: Batches, op: str) -> list[Turn]:
    turns = []
    while (turn := batches.cut(op)) is not None:  # type: ignore[arg-type]
        turns.append(turn)
    return turns


@settings(deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1, max_size=4),
    st.integers(1, 60),
    st.integers(1, 5),
)
def test_turns_are_all_bytes_once_in_order_and_within_bounds(lengths: list[list[int]], turn_bytes: int, most: int) -> None:
    batches = _batches(turn_bytes=turn_bytes, turn_pieces=most)
    admitted, expected = [], {}
    for number, parts in enumerate(lengths):
        at = number * 10_000
        pieces = [Piece(at + i * 100, at + 5000 + i * 100, length) for i, length in enumerate(parts)]
        batch = batches.admit("read", pieces, LATER)
        admitted.append(batch)
        expected[batch] = [(p.local + i, p.remote + i) for p in pieces for i in range(p.length)]
    moved: dict[Batch, list[tuple[int, int]]] = {batch: [] for batch in admitted}
    for turn in _all_turns(batches, "read"):
        assert turn.size == sum(piece.length for piece in turn.pieces)
        assert 0 < turn.size <= turn_bytes
        assert len(turn.pieces) <= most
        moved[turn.batch] += [(p.local + i, p.remote + i) for p in turn.pieces for i in range(p.length)]
        batches.landed(turn)
    assert moved == expected
    for batch in admitted:
        assert batch.done
        batch.wait()
    assert batches.in_flight("read") == 0
    assert batches.moved("read") == sum(map(sum, lengths))


def test_batches_have_turns_one_after_the_other() -> None:
    batches = _batches(turn_bytes=10)
    huge = batches.admit("read", [Piece(0, 0, 1000)], LATER)
    small = batches.admit("read", [Piece(5000, 5000, 10)], LATER)
    order = [batches.cut("read"), batches.cut("read"), batches.cut("read")]
    assert [turn.batch for turn in order if turn] == [huge, small, huge]


def test_no_more_is_under_way_than_may_be() -> None:
    batches = _batches(100, turn_bytes=30)
    batches.admit("read", [Piece(0, 0, 1000)], LATER)
    batches.admit("write", [Piece(0, 0, 1000)], LATER)
    turns = _all_turns(batches, "read")
    assert batches.in_flight("read") == 90 == sum(turn.size for turn in turns)
    assert batches.cut("write") is not None, "each direction has its own room"
    batches.landed(turns[0])
    assert len(_all_turns(batches, "read")) == 1


def test_a_batch_is_cut_also_where_little_may_be_under_way() -> None:
    batches = _batches(1)
    batch = batches.admit("read", [Piece(0, 0, 3)], LATER)
    for _ in range(3):
        turns = _all_turns(batches, "read")
        assert [turn.size for turn in turns] == [1]
        batches.landed(turns[0])
    assert batch.done


def test_what_a_peer_may_still_be_moving_stays_under_way() -> None:
    batches = _batches(20, turn_bytes=10)
    batch = batches.admit("read", [Piece(0, 0, 1000)], LATER)
    turns = _all_turns(batches, "read")
    batch.cancel()
    batches.admit("read", [Piece(0, 0, 10)], LATER)
    assert batches.cut("read") is None
    batches.lost(turns[0])
    assert batches.cut("read") is not None


def test_a_batch_that_is_late_is_not_begun() -> None:
    batches = _batches()
    batch = batches.admit("read", [Piece(0, 0, 10)], time.monotonic() - 1)
    assert batches.cut("read") is None
    assert _reason(batch) == "deadline"


def test_batches_that_were_late_are_forgotten_while_nothing_can_be_begun() -> None:
    """A peer that does not answer keeps the room, and others go on asking."""
    batches = _batches(10)
    batches.admit("read", [Piece(1, 1, 10)], LATER)
    while batches.cut("read") is not None:
        pass
    late = batches.admit("read", [Piece(1, 1, 10)], time.monotonic() - 1)
    assert late.done
    kept = weakref.ref(late)
    del late
    gc.collect()
    assert kept() is None


def test_a_turn_that_is_lost_ends_its_batch() -> None:
    batches = _batches(turn_bytes=10)
    batch = batches.admit("write", [Piece(0, 0, 100)], LATER)
    turn = batches.cut("write")
    assert turn is not None
    batches.lost(turn, TransportError("bounds", "refused"))
    assert batches.cut("write") is None
    assert _reason(batch) == "bounds"


def test_too_many_batches_wait_until_their_deadline() -> None:
    batches = _batches(max_batches=2)
    first = batches.admit("read", [Piece(0, 0, 1)], LATER)
    batches.admit("read", [Piece(0, 0, 1)], LATER)
    with pytest.raises(TransportError) as caught:
        batches.admit("read", [Piece(0, 0, 1)], time.monotonic() + 0.01)
    assert caught.value.reason == "deadline"
    admitted: list[Batch] = []
    waiting = threading.Thread(target=lambda: admitted.append(batches.admit("read", [Piece(0, 0, 1)], LATER)))
    waiting.start()
    first.cancel()
    waiting.join(20)
    assert len(admitted) == 1


def test_closing_ends_all_and_admits_none() -> None:
    batches = _batches()
    batch = batches.admit("read", [Piece(0, 0, 10)], LATER)
    batches.close(TransportError("closed", "over"))
    assert _reason(batch) == "closed"
    assert batches.cut("read") is None
    with pytest.raises(TransportError) as caught:
        batches.admit("read", [], LATER)
    assert caught.value.reason == "closed"


def test_a_batch_without_bytes_is_done_at_once() -> None:
    batch = _batches().admit("read", [Piece(5, 5, 0)], LATER)
    assert batch.done
    batch.wait()


# --------------------------------------------------------------------------- extents


def _extents(*stretches: tuple[int, int, bytes]) -> Extents:
    extents = Extents()
    for stretch in stretches:
        extents.add(*stretch)
    return extents


def test_neighbours_are_one_run_within_a_stretch_and_two_across_stretches() -> None:
    extents = _extents((100, 50, b"a"), (150, 50, b"b"), (300, 10, b"c"))
    places = [(100, 10), (110, 10), (120, 0), (120, 30), (150, 5), (155, 5), (170, 5), (300, 10), (100, 1)]
    assert list(runs(places, extents)) == [
        (100, 50, b"a"),
        (150, 10, b"b"),
        (170, 5, b"b"),
        (300, 10, b"c"),
        (100, 1, b"a"),
    ]
    with pytest.raises(TransportError):
        list(runs([(145, 10)], extents))


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 30)), max_size=8))
def test_pieces_are_checked_on_both_sides(places: list[tuple[int, int, int]]) -> None:
    local, remote = _extents((10, 20, b""), (40, 10, b"")), _extents((5, 50, b""))

    def inside(at: int, length: int, stretches: list[tuple[int, int]]) -> bool:
        return not length or any(start <= at and at + length <= start + size for start, size in stretches)

    good = all(inside(i, n, [(10, 20), (40, 10)]) and inside(j, n, [(5, 50)]) for i, j, n in places)
    pieces = [Piece(*place) for place in places]
    if good:
        check_pieces(pieces, local, remote)
        return
    with pytest.raises(TransportError) as caught:
        check_pieces(pieces, local, remote)
    assert caught.value.reason == "bounds"


# --------------------------------------------------------------------------- notices


def test_notices_are_taken_once_in_order_and_bounded() -> None:
    inbox = Inbox(max_notices=3, max_bytes=10)
    assert inbox.put(b"one")
    assert inbox.put(b"two")
    assert not inbox.put(b"too long")
    assert inbox.put(b"x")
    assert not inbox.put(b"")
    assert inbox.take() == [b"one", b"two", b"x"]
    assert inbox.take() == []
    assert inbox.put(b"too long")


@pytest.mark.parametrize(("address", "length"), [(-1, 10), (-100, 200), (10, 0), (10, -5), ((1 << 64) - 5, 10), (1 << 70, 1)])
def test_what_no_memory_can_have_is_no_stretch(address: int, length: int) -> None:
    """A peer says where its memory lies, and a lane cannot write such a place down."""
    extents = Extents()
    for put in (extents.add, extents.replace):
        with pytest.raises(TransportError) as caught:
            put(address, length, b"")
        assert caught.value.reason == "bounds"
    extents.add((1 << 64) - 10, 10, b"")


def test_a_stretch_takes_the_place_of_those_it_overlaps() -> None:
    extents = Extents()
    for start in (0, 100, 200, 300):
        extents.add(start, 100, b"old")
    assert extents.replace(150, 100, b"new") == [100, 200]
    assert extents.find(150, 100) == (150, 100, b"new")
    assert [extents.find(start, 100)[2] for start in (0, 300)] == [b"old"] * 2
    for start in (100, 250):
        with pytest.raises(TransportError):
            extents.find(start, 50)
