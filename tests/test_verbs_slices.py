"""How a batch becomes RDMA work requests: every byte exactly once, and no limit of a device passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.transfer.transport import Piece
from hicache_mooncake.transfer.verbs.registration import Part
from hicache_mooncake.transfer.verbs.slices import MIN_SLICE, Cutter, Limits, Lookup, merged, requests

WIDE = Limits(max_sge=30, max_message=1 << 30)


def memory(border: int, key: int) -> Lookup:
    """All addresses are registered, in parts of `border` bytes, whose keys are `key` + their number."""

    def find(address: int) -> Part:
        number = address // border
        return Part(number * border, border, key + number)

    return find


def inside(lookup: Lookup, address: int, length: int, key: int) -> bool:
    """These bytes lie in one part, which has this key."""
    part = lookup(address)
    return part.key == key and address + length <= part.start + part.length


ONE = memory(1 << 50, 7)


def moves(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.local + i, piece.remote + i) for piece in pieces for i in range(piece.length)]


@st.composite
def batches(draw: st.DrawFn) -> list[Piece]:
    """Pieces that are sometimes neighbours here, there, or on both sides."""
    made: list[Piece] = []
    local, remote = 1000, 5000
    for _ in range(draw(st.integers(0, 12))):
        local += draw(st.sampled_from((0, 0, 3, 100)))
        remote += draw(st.sampled_from((0, 0, 5, 70)))
        length = draw(st.integers(0, 40))
        made.append(Piece(local, remote, length))
        local, remote = local + length, remote + length
    return made


@given(batches(), st.integers(1, 5), st.integers(1, 50), st.integers(1, 64), st.integers(1, 64))
def test_every_byte_is_moved_once_and_limits_are_kept(
    pieces: list[Piece], max_sge: int, max_message: int, border_here: int, border_there: int
) -> None:
    here, there = memory(border_here, 100), memory(border_there, 900)
    made = list(requests(pieces, Limits(max_sge, max_message), here, there))
    assert [move for request in made for move in moves(list(request.pieces()))] == moves(pieces)
    for request in made:
        assert 0 < len(request.local) <= max_sge
        assert 0 < request.length <= max_message
        assert sum(sge.length for sge in request.local) == request.length
        assert inside(there, request.remote, request.length, request.rkey)
        for sge in request.local:
            assert inside(here, *sge)


@given(batches(), st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), min_size=1))
def test_slices_cover_a_batch_in_order_also_when_some_come_back(pieces: list[Piece], takes: list[tuple[int, int]]) -> None:
    cutter = Cutter(pieces)
    wanted = moves(pieces)
    assert cutter.left == len(wanted)
    seen: list[tuple[int, int]] = []
    turn = 0
    while cutter.left:
        most_bytes, most_pieces = takes[turn % len(takes)]
        taken = cutter.take(most_bytes, most_pieces)
        assert 0 < sum(piece.length for piece in taken) <= most_bytes
        assert len(taken) <= most_pieces
        if turn % 3 == 1 and turn < 200:
            cutter.put_back(taken)
        else:
            seen += moves(taken)
        assert cutter.left == len(wanted) - len(seen)
        turn += 1
    assert seen == wanted


@given(st.lists(st.integers(1, 5 * MIN_SLICE), min_size=1, max_size=6), st.integers(2 * MIN_SLICE, 7 * MIN_SLICE))
def test_only_small_pieces_make_small_slices(lengths: list[int], most: int) -> None:
    pieces = [Piece(i << 30, i << 30, length) for i, length in enumerate(lengths)]
    cutter = Cutter(pieces)
    while cutter.left:
        taken = cutter.take(most, 100)
        size = sum(piece.length for piece in taken)
        assert size <= most
        assert size >= MIN_SLICE or not cutter.left
        if not cutter.left and size < MIN_SLICE:
            assert pieces[-1].length < MIN_SLICE


def test_a_page_that_is_scattered_here_and_whole_there_is_one_request() -> None:
    layers = [Piece(layer * 10_000, 1 << 20 | layer * 512, 512) for layer in range(30)]
    (request,) = requests(layers, WIDE, ONE, ONE)
    assert (request.remote, request.length, len(request.local)) == (1 << 20, 30 * 512, 30)


def test_neighbours_on_both_sides_are_one_stretch() -> None:
    pages = [Piece(page * 4096, (1 << 30) + page * 4096, 4096) for page in range(64)]
    assert list(merged(pages)) == [Piece(0, 1 << 30, 64 * 4096)]


def test_what_is_scattered_at_the_peer_needs_a_request_each() -> None:
    pieces = [Piece(page * 4096, page * 9000, 4096) for page in range(5)]
    assert [request.length for request in requests(pieces, WIDE, ONE, ONE)] == [4096] * 5


def test_nothing_is_handed_out_of_a_batch_that_was_dropped() -> None:
    cutter = Cutter([Piece(0, 0, 1000)])
    cutter.drop()
    assert cutter.left == 0
    assert cutter.take(1000, 10) == []
