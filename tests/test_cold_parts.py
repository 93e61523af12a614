"""The parts of a cold tier, each by itself: where bodies lie, what was asked for, and reads of which some fail or hang."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake.cold import reading
from hicache_mooncake.cold.asked import Asked
from hicache_mooncake.cold.index import Index, Key, Place
from hicache_mooncake.cold.layout import BLOCK, Layout, Segment, blocks
from hicache_mooncake.cold.pages_file import PagesFile, huge_scratch
from hicache_mooncake.cold.reading import READ_BYTES, Reader
from hicache_mooncake.transfer.mapping import HUGE_PAGE
from tests.cold import MIB, NS, OTHER, hashes
from tests.conftest import wait_until

# --------------------------------------------------------------------------- Layout

_SEGMENT = 8 * BLOCK
_STEPS = st.lists(st.one_of(st.integers(1, _SEGMENT), st.sampled_from(["lose", "regain", "restart", "seal", "take back"])))


@given(st.integers(2, 6), _STEPS)
def test_no_two_bodies_ever_lie_on_one_another(count: int, steps: list[int | str]) -> None:
    layout = Layout(count, _SEGMENT)
    lying: dict[int, dict[int, int]] = {}
    """Filling -> offset -> bytes."""
    fillings: list[int] = []
    for step in steps:
        if step == "lose" and (number := layout.next_free()) is not None:
            layout.lose(number)
        elif step == "regain":
            layout.regain()
        elif step == "restart":
            kept = [Segment(each.number, each.filling, each.used) for each in layout._filled.values() if each.used]
            layout = Layout(count, _SEGMENT, reversed(kept))
        elif step == "seal":
            layout.seal()
        elif step == "take back" and layout.open is not None and layout.room() >= BLOCK:
            used = layout.open.used
            layout.append(1)
            layout.take_back(used)
        elif isinstance(step, int):
            _append(layout, step, lying, fillings)
        ranges = sorted((at, at + size) for bodies in lying.values() for at, size in bodies.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert layout.used_bytes <= count * _SEGMENT
        assert all(start >= 0 and end <= count * _SEGMENT for start, end in ranges)
        for filling, bodies in lying.items():
            for at, size in bodies.items():
                assert layout.holds(at, size, filling)
                assert not layout.holds(at, size, filling + 1)
    assert fillings == sorted(fillings), "one number is never given twice"
    offsets, lengths = [*range(0, count * _SEGMENT + 2, BLOCK), 1, _SEGMENT - 1, 1 << 63], (0, 1, BLOCK, _SEGMENT)
    asked = list(itertools.product(offsets, lengths, range(max(0, len(fillings) - count), len(fillings) + 2)))
    columns = [np.array(column, kind) for column, kind in zip(zip(*asked, strict=True), ("u8", "u4", "u4"), strict=True)]
    assert layout.holds_each(*columns).tolist() == [layout.holds(*each) for each in asked]


def _append(layout: Layout, length: int, lying: dict[int, dict[int, int]], fillings: list[int]) -> None:
    """As the tier does it."""
    if blocks(length) > layout.room():
        if layout.next_free() is None:
            oldest = layout.oldest()
            if oldest is None:
                return
            assert all(oldest.filling <= other for other in lying)
            lying.pop(oldest.filling, None)
            layout.emptied(oldest)
        fillings.append(layout.begin().filling)
    segment = layout.open
    assert segment is not None
    at = layout.append(length)
    assert at % BLOCK == 0
    lying.setdefault(segment.filling, {})[at] = blocks(length)


def test_what_does_not_fit_is_refused() -> None:
    layout = Layout(2, _SEGMENT)
    with pytest.raises(ValueError, match="no room"):
        layout.append(1)
    layout.begin()
    layout.append(_SEGMENT - BLOCK)
    with pytest.raises(ValueError, match="no room"):
        layout.append(BLOCK + 1)
    assert layout.holds(0, _SEGMENT - BLOCK, 1)
    assert not layout.holds(0, _SEGMENT, 1)
    assert not layout.holds(1, 1, 1)
    assert not layout.holds(0, 0, 1)
    assert not layout.holds(1 << 40, 1, 1)


# --------------------------------------------------------------------------- Asked


@given(st.lists(st.lists(st.integers(0, 30), max_size=20, unique=True), max_size=40))
def test_what_was_asked_for_is_never_counted_too_low(batches: list[list[int]]) -> None:
    """Until the counts are halved, which 1,024 counters are not within so many."""
    asked, names = Asked(1024), [os.urandom(32) for _ in range(31)]
    counts: Counter[int] = Counter()
    for batch in batches:
        asked.more(b"n" * 16, [names[each] for each in batch])
        counts.update(batch)
    for each, name in enumerate(names):
        assert asked.times(b"n" * 16, [name])[0] >= min(counts[each], 15)


def test_counts_end_at_fifteen_and_fade() -> None:
    asked, name = Asked(64), os.urandom(32)
    for _ in range(300):
        asked.more(b"n" * 16, [name])
    assert asked.times(b"n" * 16, [name])[0] == 15
    for _ in range(4 * 8):
        asked.more(b"o" * 16, hashes(64))
    assert asked.times(b"n" * 16, [name])[0] < 15


def test_most_pages_that_were_never_asked_for_are_known_as_such() -> None:
    asked = Asked(1 << 14)
    asked.more(b"n" * 16, hashes(4000))
    assert asked.times(b"n" * 16, hashes(300)).count(0) >= 270
    assert asked.times(b"o" * 16, hashes(300)).count(0) >= 270


# --------------------------------------------------------------------------- Reader

_PLACES = [(at * 3 * BLOCK, 1 + 100 * at) for at in range(60)]
"""None of them neighbours; the longest is two blocks."""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[PagesFile]:
    path = tmp_path / "pages"
    path.write_bytes(b"".join(bytes([at % 251]) * BLOCK for at in range(1024)))
    file = PagesFile(path, writable=False)
    yield file
    file.close()


@pytest.mark.parametrize("can_be_had", [0, 1])
def test_who_can_have_no_more_threads_reads_with_fewer_or_not_at_all(
    file: PagesFile, monkeypatch: pytest.MonkeyPatch, can_be_had: int
) -> None:
    """A mover without them would end, and its engine load nothing from anywhere."""
    start, started = threading.Thread.start, iter(range(can_be_had))

    def refused(thread: threading.Thread) -> None:
        if next(started, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        reader = Reader(file)
    came = [None if view is None else len(view) for view in reader.read([(0, 1), (8 * BLOCK, 1)], time.monotonic() + 20)]
    assert came == ([BLOCK] * 2 if can_be_had else [None] * 2)
    reader.close()


class Disk:
    """Reads at some offsets hang, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hanging: set[int] = set()
        self.failing: set[int] = set()
        self.go_on = threading.Event()
        self.waited: list[int] = []
        """Where reads hung."""
        self.written: list[memoryview] = []
        """Into which reads that hung have read."""
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.read)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        size = sum(map(len, views))
        if any(offset <= at < offset + size for at in self.failing):
            raise OSError(errno.EIO, "bad sector")
        if any(offset <= at < offset + size for at in self.hanging):
            self.waited.append(offset)
            assert self.go_on.wait(60)
            self.written.extend(views)
        return self._preadv(fd, views, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.go_on.set()


@pytest.fixture
def reader(file: PagesFile) -> Iterator[Reader]:
    reader = Reader(file)
    yield reader
    reader.close()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def right(place: tuple[int, int], view: object) -> bool:
    """Did these bytes come, all of them?"""
    if not isinstance(view, memoryview):
        return False
    offset, length = place
    expected = b"".join(bytes([(offset // BLOCK + at) % 251]) * BLOCK for at in range(blocks(length) // BLOCK))
    assert bytes(view) == expected
    return True


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def read(reader: Reader, places: Sequence[tuple[int, int]], deadline: float) -> list[bool]:
    return [right(place, view) for place, view in zip(places, reader.read(places, deadline), strict=True)]


@pytest.mark.parametrize("places", [_PLACES, [(at * BLOCK, 4000) for at in range(900)], [(5 * BLOCK, 9)] * 40, []])
def test_bodies_come_in_order(reader: Reader, places: list[tuple[int, int]]) -> None:
    assert all(read(reader, places, soon()))
    assert all(read(reader, places[::-1], soon()))


@pytest.mark.parametrize("step", [1, -1])
def test_neighbours_are_one_read_up_to_a_size_in_either_order(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    sizes: list[int] = []
    preadv = os.preadv

    def counting(fd: int, views: Sequence[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, views)))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", counting)
    assert all(read(reader, [(at * BLOCK, BLOCK) for at in range(READ_BYTES // BLOCK * 2)][::step], soon()))
    assert sizes == [READ_BYTES] * 2


def test_one_that_fails_costs_no_other(reader: Reader, disk: Disk) -> None:
    places = [(at * BLOCK, BLOCK) for at in range(300)]
    disk.failing = {7 * BLOCK, 200 * BLOCK}
    assert [at for at, good in enumerate(read(reader, places, soon())) if not good] == [7, 200]
    got = list(reader.read(places[5:9], soon()))
    assert isinstance(got[2], OSError)
    assert [at for at, good in enumerate(read(reader, places[::-1], soon())) if not good] == [99, 292]


def test_past_the_end_of_the_file_is_an_error(reader: Reader) -> None:
    assert read(reader, [(1020 * BLOCK, 4 * BLOCK), (1030 * BLOCK, 1), (0, 1)], soon()) == [True, False, True]


def test_one_that_hangs_costs_the_deadline_and_its_memory_is_not_used_again(reader: Reader, disk: Disk) -> None:
    disk.hanging = {_PLACES[3][0]}
    assert not read(reader, _PLACES[:4], soon(3))[3]
    assert reader.stuck == 1
    disk.hanging = set()
    seen: list[memoryview] = []
    for _ in range(5):
        for place, view in zip(_PLACES, reader.read(_PLACES, soon()), strict=True):
            assert right(place, view)
            assert isinstance(view, memoryview)
            seen.append(view)
    disk.go_on.set()
    wait_until(lambda: reader.stuck == 0, 30)
    assert len(disk.written) == 1
    assert address(disk.written[0]) not in map(address, seen)


def test_a_disk_that_hangs_altogether_costs_one_deadline_and_then_nothing(reader: Reader, disk: Disk) -> None:
    disk.hanging = {place[0] for place in _PLACES}
    assert not any(read(reader, _PLACES, soon(3)))
    assert reader.stuck == reading.DEPTH
    assert not any(read(reader, _PLACES, soon(600))), "nobody waits for it now"
    disk.go_on.set()
    wait_until(lambda: reader.stuck == 0, 30)
    assert all(read(reader, _PLACES, soon()))


def test_a_disk_that_hangs_costs_somebody_with_patience_no_more_than_that(reader: Reader, disk: Disk) -> None:
    """And what has come by then comes all the same, but nothing more is begun."""
    disk.hanging = {_PLACES[2][0]}
    came = [view is not None for view in reader.read(_PLACES, soon(600), patience_s=1.0)]
    assert came[:3] == [True, True, False]
    assert not any(came[2 + reading.DEPTH + reading._WAITING :])
    disk.hanging = {place[0] for place in _PLACES}
    assert not any(view is not None for view in reader.read(_PLACES, soon(600), patience_s=0.05))
    disk.hanging.clear()
    disk.go_on.set()
    wait_until(lambda: reader.stuck == 0, 30)
    views = reader.read(_PLACES, soon(), patience_s=10.0)
    assert all(right(place, view) for place, view in zip(_PLACES, views, strict=True))


def test_the_time_that_a_reader_takes_for_what_came_is_none_of_the_disks(reader: Reader) -> None:
    for place, view in zip(_PLACES, reader.read(_PLACES, soon(60), patience_s=3.0), strict=True):
        assert right(place, view)
        if place == _PLACES[0]:
            time.sleep(3.2)


def test_who_stops_early_leaves_the_next_one_all_there_is(reader: Reader) -> None:
    for _ in range(50):
        one = reader.read(_PLACES, soon())
        next(one)
        one.close()
        assert all(read(reader, _PLACES, soon()))


def test_reads_that_hang_after_their_caller_stopped_early_are_known_as_stuck(
    reader: Reader, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.0)
    disk.hanging = {place[0] for place in _PLACES[1:]}
    one = reader.read(_PLACES, soon())
    next(one)
    wait_until(lambda: len(disk.waited) == reading.DEPTH, 30)
    one.close()
    assert reader.stuck == reading.DEPTH


def test_a_generator_that_was_never_begun_holds_nothing(reader: Reader) -> None:
    for _ in range(20):
        reader.read(_PLACES, soon()).close()
    assert all(read(reader, _PLACES, soon()))


def test_many_threads_read_at_once(reader: Reader, disk: Disk) -> None:
    disk.failing = {_PLACES[11][0]}
    wrong: list[object] = []

    def go() -> None:
        try:
            for _ in range(10):
                good = read(reader, _PLACES, soon(60))
                if good != [at != 11 for at in range(60)]:
                    wrong.append(good)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=go) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert sum(map(len, reader._buffers)) <= reading._BUFFER_BYTES


def test_the_disk_goes_on_while_a_caller_copies_what_came(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    preadv = os.preadv

    def counting(fd: int, views: Sequence[memoryview], offset: int) -> int:
        size = preadv(fd, views, offset)
        ended.append(offset)
        return size

    monkeypatch.setattr(os, "preadv", counting)
    one = reader.read(_PLACES, soon())
    next(one)
    wait_until(lambda: len(ended) > reading.DEPTH, 30)
    one.close()


def test_neighbours_are_given_together_with_the_place_of_each(reader: Reader) -> None:
    places = [(at * BLOCK, BLOCK) for at in (3, 2, 1, 10, 11, 30)]
    came = list(reader.groups(places, soon()))
    assert [begins for _, begins in came] == [[2 * BLOCK, BLOCK, 0], [0, BLOCK], [0]]
    assert all(isinstance(view, memoryview) for view, _ in came)


@pytest.mark.parametrize("length", [1, READ_BYTES, HUGE_PAGE, HUGE_PAGE + 1])
def test_memory_for_reads_is_whole_huge_pages(length: int) -> None:
    memory = huge_scratch(length)
    assert address(memory) % HUGE_PAGE == len(memory) % HUGE_PAGE == 0
    assert length <= len(memory) < length + HUGE_PAGE
    memory[-1] = 1


def test_two_reads_share_a_huge_page(reader: Reader) -> None:
    places = [(at * BLOCK, BLOCK) for at in range(2 * READ_BYTES // BLOCK)]
    begins = {address(view) // READ_BYTES for view in reader.read(places, soon()) if isinstance(view, memoryview)}
    assert len({begin // (HUGE_PAGE // READ_BYTES) for begin in begins}) == 1
    assert len(begins) == 2


def test_buffers_that_are_kept_are_bounded_in_bytes(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_BUFFER_BYTES", 2 * READ_BYTES)
    assert all(read(reader, [(0, 900 * BLOCK)] * 6, soon()))
    assert sum(map(len, reader._buffers)) <= 2 * READ_BYTES


def test_a_reader_that_is_closed_gives_nothing_and_raises_nothing(reader: Reader) -> None:
    under_way = reader.read(_PLACES, soon())
    next(under_way)
    reader.close()
    assert len(list(under_way)) == len(_PLACES) - 1
    assert not any(read(reader, _PLACES, soon()))


# --------------------------------------------------------------------------- Index


@pytest.mark.parametrize("at_once", [1, 2, 7, 1000])
def test_all_records_are_read_in_parts_of_any_size(tmp_path: Path, at_once: int) -> None:
    index = Index(tmp_path, 16 * MIB)
    there: dict[Key, Place] = {}
    for filling, namespace in enumerate((NS, OTHER, b"c" * 16), 1):
        number = index.id_of(namespace)
        pages = [(number, each, Place(at * BLOCK, filling, 1 + at, 1 << 63, at)) for at, each in enumerate(hashes(40))]
        index.put(Segment(filling, filling, BLOCK), pages)
        there |= {Key(namespace, each): place for _, each, place in pages}
    index.forget(OTHER)
    read = [each for part in index.entries(at_once) for each in part]
    assert len(read) == 80
    assert dict(read) == {key: place for key, place in there.items() if key.namespace != OTHER}
    index.close()


def test_records_that_come_and_go_between_two_parts_are_no_harm(tmp_path: Path) -> None:
    """The key after which the next part begins may be gone by then."""
    index = Index(tmp_path, 16 * MIB)
    number, pages = index.id_of(NS), sorted(hashes(60))

    def put(filling: int, some: Sequence[bytes]) -> None:
        index.put(Segment(filling, filling, BLOCK), [(number, each, Place(0, filling, 1, 7, 7)) for each in some])

    put(1, pages[:40:2])
    put(2, pages[1:40:2])
    parts = index.entries(7)
    read = [key.hash for key, _ in next(parts)]
    assert read == pages[:7]
    index.empty(Segment(1, 1, BLOCK))
    put(3, pages[40:])
    read += [key.hash for part in parts for key, _ in part]
    assert read == [*pages[:7], *pages[7:40:2], *pages[40:]]
    index.close()
