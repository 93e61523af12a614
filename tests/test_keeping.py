"""What is written to the cold tier next: the pages that would go first, each once, and none that is no longer what it was."""

from __future__ import annotations

import itertools

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.node.keeping import BATCH_PAGES, Batch, Keeping
from hicache_mooncake.node.store import GUEST, OWN, REPLICA, Store
from hicache_mooncake.testing.local import page_hash

NS, SIDE, GROUP = b"n" * 16, b"s" * 16, b"g" * 16
PAGE = 4096
CAPACITY = 64
AHEAD = CAPACITY // 8
"""Pages of DRAM that are to be written, and the most of a batch."""


class Shelf:
    """A store with a `Keeping`; pages are named by numbers."""

    def __init__(self, after_loads: int = 0) -> None:
        self.store = Store(CAPACITY * PAGE, track_changes=True)
        self.keeping = Keeping(self.store, after_loads)

    def put(self, *numbers: int, namespace: bytes = NS, rank: int = OWN, group: bytes = GROUP) -> None:
        for number in numbers:  # each by itself, so that what came first goes first
            txn, status, _ = self.store.reserve(1, namespace, page_hash(number), PAGE, group, rank=rank)
            assert bytes(status) == bytes([p.WRITE])
            assert self.store.commit(1, txn, b"\x01", [number]) == b"\x01"

    def page(self, number: int) -> object:
        return self.store.page(NS, page_hash(number))

    def next(self) -> Batch | None:
        batch = self.keeping.next(9, 0.0)
        self.store.validate()
        return batch

    def done(self, batch: Batch, found: bool = True) -> int:
        kept = self.keeping.done(9, batch, [found] * len(batch.parts))
        self.store.validate()
        return kept

    def written(self) -> list[int]:
        """All that is written before there is nothing to do."""
        numbers: list[int] = []
        while batch := self.next():
            numbers += numbers_of(batch)
            self.done(batch)
        return numbers


def numbers_of(batch: Batch) -> list[int]:
    return [part.checksum for part in batch.parts]


def test_pages_of_a_small_tier_do_not_push_each_other_out() -> None:
    shelf = Shelf()
    shelf.keeping = Keeping(shelf.store, tier_bytes=8 * PAGE)
    shelf.put(*range(CAPACITY))
    assert len(shelf.written()) == 2


def test_after_a_burst_that_was_too_much_more_is_written_ahead_and_less_again_when_all_is_calm() -> None:
    shelf = Shelf()
    shelf.put(*range(60))
    for most in (AHEAD, 2 * AHEAD, 4 * AHEAD, 4 * AHEAD):
        shelf.written()
        going = list(itertools.islice(shelf.store.going(), CAPACITY))
        assert [shelf.store.is_kept(page) for page in going[: most + 1]] == [True] * most + [False]
        first = 1000 * most + int(shelf.store.stats.evicted)
        shelf.put(*range(first, first + CAPACITY))
        assert shelf.store.stats.evicted_unkept
    for now in (61.0, 122.0, 183.0):
        while batch := shelf.keeping.next(9, now):
            shelf.done(batch)
    first = 10**6
    shelf.put(*range(first, first + 4 * AHEAD))
    written = 0
    while batch := shelf.keeping.next(9, 184.0):
        written += shelf.done(batch)
    assert written <= 2 * AHEAD


def test_nothing_is_written_while_there_is_room() -> None:
    shelf = Shelf()
    shelf.put(*range(CAPACITY // 2))
    assert shelf.next() is None


def test_what_goes_first_is_written_and_no_more() -> None:
    shelf = Shelf()
    shelf.put(*range(60))
    assert shelf.written() == list(range(AHEAD))
    assert shelf.keeping.kept == AHEAD
    shelf.put(60, 61)  # those are hot: the same pages go first
    assert shelf.next() is None
    shelf.store.touch(NS, page_hash(0) + page_hash(1))
    assert shelf.written() == [AHEAD, AHEAD + 1]


def test_a_page_that_is_kept_is_evicted_and_uncounted_and_another_one_is_counted() -> None:
    shelf = Shelf()
    shelf.put(*range(60))
    shelf.written()
    shelf.put(*range(60, 64))
    while shelf.store.evict_to_low(kept_only=True):
        pass
    assert shelf.store.stats.evicted > 0
    assert shelf.store.stats.evicted_unkept == 0
    shelf.put(*range(100, 160))
    assert shelf.store.stats.evicted_unkept > 0


def test_eviction_waits_at_the_first_page_that_is_not_written() -> None:
    shelf = Shelf()
    shelf.put(*range(62))
    assert shelf.store.evict_to_low(kept_only=True) == 0
    batch = shelf.next()
    assert batch is not None
    shelf.done(batch)
    assert shelf.store.evict_to_low(kept_only=True) > 0


def test_a_batch_holds_its_pages_until_it_is_done() -> None:
    shelf = Shelf()
    shelf.put(*range(60))
    batch = shelf.next()
    assert batch is not None
    assert shelf.store.pinned_bytes == AHEAD * PAGE
    shelf.put(*range(100, 200))
    assert all(shelf.page(number) is not None for number in numbers_of(batch))
    shelf.done(batch)
    assert shelf.store.pinned_bytes == 0


def test_what_could_not_be_written_is_written_the_next_time() -> None:
    shelf = Shelf()
    shelf.put(*range(60))
    batch = shelf.next()
    assert batch is not None
    assert shelf.done(batch, found=False) == 0
    assert shelf.written() == numbers_of(batch)


def test_replicas_are_not_written_and_guests_are() -> None:
    shelf = Shelf()
    shelf.put(*range(4), rank=REPLICA)
    shelf.put(*range(10, 14), rank=GUEST)
    shelf.put(*range(20, 75))
    assert shelf.written() == [10, 11, 12, 13]


def test_pages_that_are_read_or_written_wait() -> None:
    shelf = Shelf()
    shelf.put(*range(58))
    pin, *_ = shelf.store.locate(2, NS, page_hash(0), PAGE, 0.0, touch=False)
    txn, _, _ = shelf.store.reserve(2, SIDE, page_hash(1), PAGE, GROUP)
    assert shelf.written() == list(range(2, AHEAD + 2))
    shelf.store.release(2, pin)
    shelf.store.commit(2, txn, b"\x00", [0])
    assert shelf.written() == [0, 1]


def test_a_page_that_gets_another_part_is_written_again() -> None:
    shelf = Shelf()
    shelf.put(*range(59))
    shelf.written()
    shelf.put(0, namespace=SIDE)
    page = shelf.store.page(NS, page_hash(0))
    assert page is not None
    assert not page.kept
    shelf.store.touch(NS, b"".join(page_hash(number) for number in range(1, 59)))  # it goes first again
    batch = shelf.next()
    assert batch is not None
    assert {part.namespace for part in batch.pages[0][1]} == {NS, SIDE}


def test_a_part_that_comes_while_the_others_are_written_is_not_kept_with_them() -> None:
    shelf = Shelf()
    shelf.put(*range(58))
    batch = shelf.next()
    assert batch is not None
    shelf.put(0, namespace=SIDE)
    assert shelf.done(batch) == len(batch.pages) - 1
    page = shelf.store.page(NS, page_hash(0))
    assert page is not None
    assert not page.kept


def test_one_part_that_is_not_found_is_a_page_that_is_not_kept() -> None:
    shelf = Shelf()
    for number in range(30):
        shelf.put(number)
        shelf.put(number, namespace=SIDE)
    batch = shelf.next()
    assert batch is not None
    found = [part.namespace == NS or part.hash != page_hash(1) for part in batch.parts]
    shelf.keeping.done(9, batch, found)
    assert [page.kept for page, _ in batch.pages] == [page.hash != page_hash(1) for page, _ in batch.pages]


@pytest.mark.parametrize("how", ["cleared", "discarded", "stored anew"])
def test_a_page_that_ends_while_it_is_written_ends(how: str) -> None:
    shelf = Shelf()
    shelf.put(*range(60))
    batch = shelf.next()
    assert batch is not None
    if how == "cleared":
        shelf.store.clear(NS)
    else:
        shelf.store.discard(NS, page_hash(0), "checksum")
    if how == "stored anew":
        shelf.put(0)
    shelf.done(batch)
    page = shelf.store.page(NS, page_hash(0))
    assert page is None or not page.kept
    while shelf.store.sweep():
        pass
    shelf.store.validate()


def test_what_has_left_the_tier_is_written_again() -> None:
    shelf = Shelf()
    shelf.put(*range(60))
    shelf.written()
    shelf.keeping.gone([(NS, page_hash(3)), (NS, page_hash(1000)), (b"unknown", page_hash(0))])
    assert shelf.written() == [3]


def test_pages_that_are_loaded_often_are_written_early() -> None:
    shelf = Shelf(after_loads=2)
    shelf.put(*range(8))
    shelf.keeping.loaded(NS, [page_hash(3), page_hash(5)], 0.0)
    assert shelf.next() is None
    shelf.keeping.loaded(NS, [page_hash(3), page_hash(5), page_hash(7)], 1.0)
    shelf.keeping.loaded(NS, [page_hash(3)], 2.0)
    assert shelf.written() == [3, 5]
    shelf.keeping.loaded(NS, [page_hash(3)], 3.0)
    assert shelf.next() is None


def test_loads_of_what_is_evicted_meanwhile_are_no_harm() -> None:
    shelf = Shelf(after_loads=1)
    shelf.put(*range(8))
    shelf.keeping.loaded(NS, [page_hash(number) for number in range(8)], 0.0)
    shelf.store.discard(NS, page_hash(2), "checksum")
    shelf.store.clear(NS)
    assert shelf.next() is None


@pytest.mark.parametrize("many", [1, CAPACITY - 7])
def test_a_node_that_ends_loses_nothing(many: int) -> None:
    shelf = Shelf()
    shelf.put(*range(many))
    first = shelf.next()
    if first is not None:
        shelf.done(first)
    saved: list[int] = []
    batches = 0
    while batch := shelf.keeping.save(9, 0.0):
        batches += 1
        assert batches < 100, "it comes to an end"
        assert len(batch.parts) <= BATCH_PAGES
        saved += numbers_of(batch)
        shelf.done(batch)
    there = numbers_of(first) if first is not None else []
    assert sorted(saved + there) == list(range(many)), "each once"
    assert saved == sorted(saved, reverse=True), "what was used last first"


def test_a_page_that_is_being_read_is_saved_too() -> None:
    shelf = Shelf()
    shelf.put(*range(20))
    shelf.store.locate(2, NS, b"".join(page_hash(number) for number in range(20)), PAGE, 0.0, touch=False)
    saved = []
    while batch := shelf.keeping.save(9, 0.0):
        saved += numbers_of(batch)
        shelf.keeping.done(9, batch, [True] * len(batch.parts))
    assert sorted(saved) == list(range(20))


def test_a_namespace_that_is_cleared_during_the_save_does_not_end_it() -> None:
    shelf = Shelf()
    shelf.put(*range(20))
    shelf.put(*range(100, 120), namespace=SIDE, group=b"other")
    batch = shelf.keeping.save(9, 0.0)
    assert batch is not None
    shelf.done(batch)
    shelf.store.clear(SIDE)
    saved = numbers_of(batch)
    while batch := shelf.keeping.save(9, 0.0):
        saved += numbers_of(batch)
        shelf.done(batch)
    assert {number for number in saved if number < 100} == set(range(20))
