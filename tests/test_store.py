"""The node's state machine: what is visible, what is pinned, what goes first, and that no block ever has two owners."""

from __future__ import annotations

import random

import pytest

from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.node.store import GUEST, OWN, REPLICA, Store
from hicache_mooncake.protocol import FETCH, HAVE, LOCAL, MISS, REFUSED, REMOTE, WAIT, WRITE, WRONG_LENGTH
from hicache_mooncake.testing.local import page_hash

NS = b"n" * 16
OTHER = b"o" * 16
PAGE = 2 * GRANULE


def keys(*names: object) -> bytes:
    return b"".join(page_hash(name) for name in names)


def store_all(
    store: Store, blob: bytes, *, owner: int = 1, namespace: bytes = NS, length: int = PAGE, group: bytes = b""
) -> bytes:
    """Reserve, and commit everything that got room. One byte per key: 1 where it is stored or was there."""
    txn, status, _ = store.reserve(owner, namespace, blob, length, group)
    writes = status.count(WRITE)
    done = store.commit(owner, txn, b"\x01" * writes, range(writes))
    left = list(done)
    verdict = bytes(1 if s == HAVE or (s == WRITE and left.pop(0)) else 0 for s in status)
    store.validate()
    return verdict


def present(store: Store, *names: object, namespace: bytes = NS) -> list[int]:
    return list(store.present(namespace, keys(*names), touch=False))


def small(pages: int = 4, **options: object) -> Store:
    return Store(pages * PAGE, high_watermark=1.0, low_watermark=1.0, max_pinned_share=1.0, **options)  # type: ignore[arg-type]


def test_an_object_is_visible_after_commit_and_not_before() -> None:
    store = small()
    txn, status, where = store.reserve(1, NS, keys("a"), PAGE)
    assert list(status) == [WRITE]
    assert present(store, "a") == [0]
    assert store.locate(2, NS, keys("a"), PAGE, 0.0)[1] == bytes([MISS])
    assert store.commit(1, txn, b"\x01", [77]) == b"\x01"
    pin, located, offsets, checksums = store.locate(2, NS, keys("a"), PAGE, 0.0)
    assert (list(located), offsets, checksums) == ([LOCAL], where, [77])
    store.release(2, pin)
    store.validate()


def test_what_was_not_copied_whole_stays_invisible_and_its_memory_returns() -> None:
    store = small()
    txn, _, _ = store.reserve(1, NS, keys("a", "b"), PAGE)
    assert store.commit(1, txn, b"\x00\x01", [0, 5]) == b"\x00\x01"
    assert present(store, "a", "b") == [0, 1]
    assert store.used_bytes == PAGE
    store.validate()


def test_a_dead_writers_reservation_is_given_back() -> None:
    store = small()
    store.reserve(1, NS, keys("a", "b", "c", "d"), PAGE)
    assert store.used_bytes == 4 * PAGE
    store.drop_owner(1)
    store.validate()
    assert store.used_bytes == 0
    assert store_all(store, keys("a", "b", "c", "d"), owner=2) == b"\x01" * 4


def test_nobody_commits_or_releases_what_another_owner_holds() -> None:
    store = small()
    txn, _, _ = store.reserve(1, NS, keys("a"), PAGE)
    assert store.commit(2, txn, b"\x01", [1]) == b"\x00"
    assert present(store, "a") == [0]
    store_all(store, keys("b"))
    pin, *_ = store.locate(1, NS, keys("b"), PAGE, 0.0)
    store.release(2, pin)
    assert store.pinned_bytes == PAGE


def test_two_writers_of_one_key_leave_one_object() -> None:
    store = small()
    first, _, _ = store.reserve(1, NS, keys("a"), PAGE)
    second, _, _ = store.reserve(2, NS, keys("a"), PAGE)
    assert store.commit(2, second, b"\x01", [2]) == b"\x01"
    assert store.commit(1, first, b"\x01", [1]) == b"\x01"
    store.validate()
    assert store.objects == 1
    assert store.used_bytes == PAGE


def test_the_same_key_twice_in_one_batch_is_stored_once() -> None:
    store = small()
    assert store_all(store, keys("a", "a")) == b"\x01\x01"
    assert store.objects == 1
    assert store.used_bytes == PAGE


def test_another_length_under_the_same_key_is_a_miss_and_is_replaced() -> None:
    store = small()
    store_all(store, keys("a"))
    assert store.locate(1, NS, keys("a"), GRANULE, 0.0)[1] == bytes([WRONG_LENGTH])
    assert store_all(store, keys("a"), length=GRANULE) == b"\x01"
    assert store.locate(1, NS, keys("a"), GRANULE, 0.0)[1] == bytes([LOCAL])
    store.validate()


def test_namespaces_do_not_meet_and_clear_touches_one() -> None:
    store = small()
    store_all(store, keys("a", "b"))
    store_all(store, keys("a"), namespace=OTHER)
    assert store.clear(NS) == 2
    store.validate()
    assert present(store, "a", "b") == [0, 0]
    assert present(store, "a", namespace=OTHER) == [1]
    assert store.sweep() == 2
    store.validate()
    assert store.used_bytes == PAGE


def test_clearing_takes_objects_apart_in_slices_and_makes_room_at_once() -> None:
    """A namespace of a million objects must not hold everybody else up."""
    store = small(8, track_changes=True)
    store_all(store, keys(*range(8)))
    pin, *_ = store.locate(9, NS, keys(7), PAGE, 0.0)
    store.drain_changes(100)
    assert store.clear(NS) == 8
    assert present(store, *range(8)) == [0] * 8
    assert store_all(store, keys(0, "new")) == b"\x01\x01", "room comes from what was cleared"
    assert store.sweep(3) == 3
    store.validate()
    while store.sweep(3):
        store.validate()
    assert present(store, 0, "new", 1) == [1, 1, 0]
    added, removed = store.drain_changes(100)
    assert {b[i : i + 32] for _, b in removed for i in range(0, len(b), 32)} == {page_hash(n) for n in range(1, 8)}
    assert {b[i : i + 32] for _, b in added for i in range(0, len(b), 32)} == {page_hash(0), page_hash("new")}
    assert store.used_bytes == 3 * PAGE, "two new ones, and one that is still being read"
    store.release(9, pin)
    store.validate()
    assert store.used_bytes == 2 * PAGE


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    store = small(4)
    store_all(store, keys(0, 1, 2, 3))
    store_all(store, keys("x"))
    assert present(store, 0, 1, 2, 3) == [1, 1, 1, 0]
    store_all(store, keys("y"))
    assert present(store, 0, 1, 2, 3) == [1, 1, 0, 0]


def test_a_lookup_keeps_a_chain_alive() -> None:
    store = small(4)
    store_all(store, keys("old0", "old1"))
    store_all(store, keys("new0", "new1"))
    store.present(NS, keys("old0", "old1"))
    store_all(store, keys("x", "y"))
    assert present(store, "old0", "old1", "new0", "new1") == [1, 1, 0, 0]


def test_pinned_objects_are_not_evicted_and_their_memory_not_reused() -> None:
    store = small(2)
    store_all(store, keys("a", "b"))
    pin, _, offsets, _ = store.locate(1, NS, keys("a", "b"), PAGE, 0.0)
    assert store_all(store, keys("c")) == b"\x00"
    store.discard(NS, keys("a"), "checksum")
    store.validate()
    assert present(store, "a") == [0]
    assert store_all(store, keys("c")) == b"\x00", "a is gone, but somebody still reads its memory"
    store.release(1, pin)
    store.validate()
    assert store_all(store, keys("c")) == b"\x01"
    assert store.locate(1, NS, keys("c"), PAGE, 0.0)[2][0] in offsets


def test_a_pin_ends_at_its_expiry() -> None:
    store = small(1, pin_seconds=10.0)
    store_all(store, keys("a"))
    store.locate(1, NS, keys("a"), PAGE, 100.0)
    assert store.expire_pins(109.9) == 0
    assert store_all(store, keys("b")) == b"\x00"
    assert store.expire_pins(110.0) == 1
    assert store_all(store, keys("b")) == b"\x01"


def test_reads_never_pin_more_than_their_share() -> None:
    store = Store(4 * PAGE, high_watermark=1.0, low_watermark=1.0, max_pinned_share=0.5)
    store_all(store, keys(0, 1, 2, 3))
    _, status, _, _ = store.locate(1, NS, keys(0, 1, 2, 3), PAGE, 0.0)
    assert list(status) == [LOCAL, LOCAL, MISS, MISS]
    assert store.stats.reasons["pin_limit"] == 2
    assert store_all(store, keys("x")) == b"\x01"


def test_a_batch_larger_than_the_segment_keeps_its_head() -> None:
    store = small(3)
    assert store_all(store, keys(*range(5))) == b"\x01\x01\x01\x00\x00"
    assert present(store, *range(5)) == [1, 1, 1, 0, 0]


def test_room_for_a_suffix_is_not_made_by_evicting_its_prefix() -> None:
    store = small(3)
    store_all(store, keys(0, 1))
    assert store_all(store, keys(0, 1, 2, 3)) == b"\x01\x01\x01\x00"
    assert present(store, 0, 1, 2) == [1, 1, 1]


def test_an_object_larger_than_the_segment_is_refused_and_evicts_nothing() -> None:
    store = small(2)
    store_all(store, keys("a", "b"))
    _, status, _ = store.reserve(1, NS, keys("big"), 3 * PAGE)
    assert list(status) == [REFUSED]
    assert present(store, "a", "b") == [1, 1]


def test_a_larger_page_gets_room_among_smaller_ones() -> None:
    store = small(8)
    store_all(store, keys(*range(8)))
    assert store_all(store, keys("big"), length=3 * PAGE) == b"\x01"


def test_background_eviction_stops_at_the_low_watermark() -> None:
    store = Store(10 * PAGE, high_watermark=0.8, low_watermark=0.5)
    store_all(store, keys(*range(8)))
    assert store.evict_to_low() == 0
    store_all(store, keys(8))
    while store.evict_to_low(1):
        store.validate()
    assert store.used_bytes == 5 * PAGE
    assert present(store, 8) == [1]


def test_a_page_stored_anew_is_not_what_the_cold_tier_has() -> None:
    store = small()
    store_all(store, keys("a"), length=PAGE)
    store.keep(NS, [keys("a")])
    page = store.page(NS, keys("a"))
    assert page is not None
    assert page.kept
    store_all(store, keys("a"), length=GRANULE)
    assert store.page(NS, keys("a")) is page
    assert not page.kept


def test_room_for_what_comes_back_from_a_disk_costs_only_what_is_there_too() -> None:
    store = small(4)
    for name in "abcd":
        store_all(store, keys(name))
    store.keep(NS, [keys("a")])
    assert store.evict_kept(PAGE, 3) == 1
    assert present(store, *"abcd") == [0, 1, 1, 1]
    txn, column, room = store.claim(1, NS, keys("x", "y", "z"), PAGE, 0.0, rank=OWN, evict=False)
    assert (column, len(room)) == (bytes([FETCH, REMOTE, REMOTE]), 1)
    store.commit(1, txn, b"\x01", [7])
    assert present(store, *"bcdx") == [1, 1, 1, 1]
    store.validate()


def test_no_more_goes_than_it_takes() -> None:
    store = small(100)
    for chain in range(10):
        store_all(store, keys(*((chain, page) for page in range(10))))
    txn, status, _ = store.reserve(1, NS, keys(*range(7)), PAGE)
    assert status == bytes([WRITE]) * 7
    assert (store.stats.evicted, store.used_bytes) == (7, 100 * PAGE)
    store.commit(1, txn, b"\x01" * 7, [0] * 7)
    store.validate()


def test_changes_are_told_in_their_order_however_few_at_once() -> None:
    store = small(8, track_changes=True)
    store_all(store, keys(*range(6)))
    store.discard(NS, keys(2, 3), "checksum")
    store_all(store, keys(3, 7))
    known: set[bytes] = set()
    for _ in range(20):
        added, removed = store.drain_changes(3)
        assert sum(len(blob) // 32 for _, blob in added + removed) <= 3
        known |= {blob[at : at + 32] for _, blob in added for at in range(0, len(blob), 32)}
        known -= {blob[at : at + 32] for _, blob in removed for at in range(0, len(blob), 32)}
    assert known == {keys(n) for n in (0, 1, 3, 4, 5, 7)}


def test_changes_tell_the_master_the_last_word_on_each_key() -> None:
    store = small(2, track_changes=True)
    store_all(store, keys("a", "b"))
    store_all(store, keys("c"))
    added, removed = store.drain_changes(100)
    assert added == [(NS, keys("a") + keys("c"))] or added == [(NS, keys("c") + keys("a"))]
    assert removed == [(NS, keys("b"))]
    assert store.drain_changes(100) == ([], [])
    assert sorted(store.snapshot()[0][1][i : i + 32] for i in (0, 32)) == sorted([page_hash("a"), page_hash("c")])


def test_too_many_waiting_changes_become_a_snapshot() -> None:
    store = small(4, track_changes=True, max_changes=3)
    store_all(store, keys(0, 1, 2, 3))
    assert store.changes_lost
    store.snapshot()
    assert not store.changes_lost


def test_one_reader_fetches_a_page_for_all() -> None:
    store = small(3)
    txn, column, where = store.claim(1, NS, keys("a", "b", "a"), PAGE, 0.0)
    assert list(column) == [FETCH, FETCH, WAIT]
    assert len(where) == 2
    other, column, _ = store.claim(2, NS, keys("b", "c", "d"), PAGE, 0.0)
    assert list(column) == [WAIT, FETCH, REMOTE], "no room for d"
    store.validate()
    assert store.claimed(NS, keys("x", "a"), 1.0)
    assert not store.claimed(OTHER, keys("a"), 1.0)
    assert store.commit(1, txn, b"\x01\x00", [5, 6]) == b"\x01\x00"
    assert not store.claimed(NS, keys("a", "b"), 1.0)
    assert present(store, "a", "b", "c") == [1, 0, 0]
    store.drop_owner(2)
    assert store.commit(2, other, b"\x01", [7]) == b"\x00"
    assert not store.claimed(NS, keys("c"), 1.0)
    store.validate()


def test_a_claim_whose_reader_is_frozen_is_taken_over() -> None:
    store = small(4, claim_seconds=4.0)
    frozen, column, _ = store.claim(1, NS, keys("a"), PAGE, 100.0)
    assert list(column) == [FETCH]
    assert store.claimed(NS, keys("a"), 103.9)
    assert not store.claimed(NS, keys("a"), 104.0), "nobody waits for it any longer"
    txn, column, _ = store.claim(2, NS, keys("a"), PAGE, 104.0)
    assert list(column) == [FETCH]
    store.validate()
    assert store.commit(1, frozen, b"\x01", [5]) == b"\x01", "it woke up, and its page is good"
    assert store.claimed(NS, keys("a"), 105.0), "the other's claim is still the other's"
    assert store.commit(2, txn, b"\x01", [6]) == b"\x01"
    store.validate()
    assert store.used_bytes == PAGE


MODEL = b"g" * 16


def test_the_parts_of_a_page_are_evicted_together() -> None:
    """P46: K and V of two ranks and an index; never a part without the others."""
    store = small(6)
    for namespace in (NS, OTHER):
        store_all(store, keys(0, 1, 2), namespace=namespace, group=MODEL)
    assert store_all(store, keys("x"), namespace=b"x" * 16) == b"\x01"
    assert present(store, 0, 1, 2) == present(store, 0, 1, 2, namespace=OTHER) == [1, 1, 0]
    assert store.objects == 5


def test_reading_or_writing_one_part_keeps_the_others() -> None:
    """P07: the index page must not go while the KV page of the same tokens is read."""
    store = small(4)
    for namespace in (NS, OTHER):
        store_all(store, keys(0, 1), namespace=namespace, group=MODEL)
    pin, *_ = store.locate(1, NS, keys(0, 1), PAGE, 0.0)
    assert store_all(store, keys("x"), namespace=b"x" * 16) == b"\x00"
    assert present(store, 0, 1, namespace=OTHER) == [1, 1]
    store.release(1, pin)
    store.discard(NS, keys(0), "checksum")
    assert present(store, 0, namespace=OTHER) == [0], "damage to one part ends the page"
    _, status, _ = store.reserve(2, b"z" * 16, keys(1), PAGE, MODEL)
    assert list(status) == [WRITE]
    assert store_all(store, keys("x", "y"), namespace=b"x" * 16) == b"\x01\x00"
    assert present(store, 1) == present(store, 1, namespace=OTHER) == [1], "a third part is being written"
    store.drop_owner(2)
    store.validate()


def test_a_touch_of_one_part_keeps_the_whole_page_recent() -> None:
    store = small(4)
    for name in ("old", "new"):
        for namespace in (NS, OTHER):
            store_all(store, keys(name), namespace=namespace, group=MODEL)
    store.present(OTHER, keys("old"))
    store_all(store, keys("x"), namespace=b"x" * 16)
    assert present(store, "old", "new") == present(store, "old", "new", namespace=OTHER) == [1, 0]


def test_a_tiny_pool_never_keeps_a_part_alone() -> None:
    """P46: side pages of a whole node first, then its KV pages, as SGLang stores them, into far too little room."""
    store = small(8)
    for chain in range(6):
        names = [(chain, page) for page in range(6)]
        side = store_all(store, keys(*names), namespace=OTHER, length=GRANULE, group=MODEL)
        kv = store_all(store, keys(*[name for name, ok in zip(names, side, strict=True) if ok]), group=MODEL)
        here = present(store, *names)
        assert here == present(store, *names, namespace=OTHER)[: len(here)] or kv.count(1) < len(names)
        whole = sum(here)
        assert whole > 0
        assert here[:whole] == [1] * whole, "what is left of the chain is its head"


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_events_keeps_the_books(seed: int) -> None:
    """Random owners reserve, commit, give up, read, die; sizes differ; everything is checked after every event."""
    rng = random.Random(seed)
    store = Store(24 * PAGE, high_watermark=0.9, low_watermark=0.7, pin_seconds=5.0, track_changes=True)
    now = 0.0
    txns: list[tuple[int, int, int]] = []
    pins: list[tuple[int, int]] = []
    known: set[tuple[bytes, bytes]] = set()
    for _ in range(600):
        now += rng.random()
        owner = rng.randrange(1, 5)
        namespace = rng.choice((NS, OTHER))
        length = rng.choice((GRANULE, PAGE, 3 * GRANULE - 7))
        blob = keys(*(rng.randrange(40) for _ in range(rng.randrange(1, 9))))
        match rng.randrange(10):
            case 0 | 1:
                txn, status, where = store.reserve(owner, namespace, blob, length, rng.choice((b"", MODEL, MODEL)))
                assert len({w for w, s in zip(where, status, strict=True) if s == WRITE}) == status.count(WRITE)
                txns.append((owner, txn, status.count(WRITE)))
            case 2 | 3 if txns:
                who, txn, count = txns.pop(rng.randrange(len(txns)))
                store.commit(who, txn, bytes(rng.random() < 0.8 for _ in range(count)), range(count))
            case 4:
                pin, *_ = store.locate(owner, namespace, blob, length, now)
                pins.append((owner, pin))
            case 5 if pins:
                store.release(*pins.pop(rng.randrange(len(pins))))
            case 6:
                store.expire_pins(now)
                store.evict_to_low(4)
            case 7:
                store.present(namespace, blob)
                if rng.random() < 0.2:
                    store.clear(namespace)
                    assert store.present(namespace, blob) == bytes(len(blob) // 32)
                store.sweep(rng.randrange(4))
                store.discard(namespace, blob[:32], "checksum")
            case 8:
                if rng.random() < 0.3:
                    store.drop_owner(owner)
            case 9:
                txn, status, where = store.claim(owner, namespace, blob, length, now, rng.choice((b"", MODEL)))
                assert len(where) == status.count(FETCH)
                txns.append((owner, txn, len(where)))
        store.validate()
        added, removed = store.drain_changes(1000)
        known |= {(ns, b[i : i + 32]) for ns, b in added for i in range(0, len(b), 32)}
        known -= {(ns, b[i : i + 32]) for ns, b in removed for i in range(0, len(b), 32)}
        held = {(ns, b[i : i + 32]) for ns, b in store.snapshot() for i in range(0, len(b), 32)}
        if store._condemned:
            assert known >= held, "what was cleared is still being taken apart"
        else:
            assert known == held, "the stream of changes and the truth agree"
    for owner in range(1, 5):
        store.drop_owner(owner)
    store.clear(NS)
    store.clear(OTHER)
    while store.sweep():
        store.validate()
    assert store.used_bytes == 0


def test_replicas_go_first_then_guests_then_own_pages() -> None:
    store = small(6)
    store_all(store, keys("own0", "own1"))
    txn, *_ = store.reserve(1, NS, keys("guest0", "guest1"), PAGE, rank=GUEST)
    store.commit(1, txn, b"\x01\x01", [0, 0])
    txn, *_ = store.claim(1, NS, keys("copy0", "copy1"), PAGE, 0.0)
    store.commit(1, txn, b"\x01\x01", [0, 0])
    store.validate()
    assert [page.hash for page in store.coldest(9)] == [
        page_hash(n) for n in ("copy1", "copy0", "guest1", "guest0", "own1", "own0")
    ]
    assert [page.hash for page in store.hottest(3)] == [page_hash(n) for n in ("own0", "own1", "guest0")]
    store_all(store, keys("x", "y", "z"))
    assert present(store, "copy0", "copy1", "guest0", "guest1", "own0", "own1") == [0, 0, 1, 0, 1, 1]


def test_a_guest_or_a_copy_that_is_written_here_or_is_the_last_one_becomes_an_own_page() -> None:
    store = small(4)
    txn, *_ = store.reserve(1, NS, keys("guest"), PAGE, rank=GUEST)
    store.commit(1, txn, b"\x01", [0])
    txn, *_ = store.claim(1, NS, keys("copy"), PAGE, 0.0)
    store.commit(1, txn, b"\x01", [0])
    store_all(store, keys("guest", "copy"))
    (copy,) = store.coldest(9, REPLICA)
    assert copy.hash == page_hash("copy"), "others hold it, whoever stores it once more"
    store.set_rank(copy, OWN)
    store.validate()
    assert [page.hash for page in store.coldest(9, OWN)] == [page_hash("guest"), page_hash("copy")]
    store.remove_page(copy)
    store.set_rank(copy, GUEST)
    store.validate()


def test_a_part_that_is_stored_here_makes_the_whole_page_an_own_one() -> None:
    store = small(4)
    txn, *_ = store.claim(1, NS, keys("a"), PAGE, 0.0, MODEL)
    store.commit(1, txn, b"\x01", [0])
    store_all(store, keys("a"), namespace=OTHER, group=MODEL)
    (page,) = store.coldest(9)
    assert (page.rank, len(page.parts)) == (OWN, 2)
    txn, *_ = store.claim(1, b"z" * 16, keys("a"), PAGE, 0.0, MODEL)
    store.commit(1, txn, b"\x01", [0])
    assert page.rank == OWN
    store.validate()


def test_room_for_guests_is_never_made_by_evicting() -> None:
    store = small(3)
    store_all(store, keys("a", "b"))
    txn, status, _ = store.reserve(1, NS, keys("c", "d"), PAGE, rank=GUEST, evict=False)
    assert list(status) == [WRITE, REFUSED]
    assert present(store, "a", "b") == [1, 1]
    store.commit(1, txn, b"\x01", [0])
    store.validate()


def test_a_page_is_given_away_whole_or_not_at_all() -> None:
    store = small(4)
    for namespace in (NS, OTHER):
        store_all(store, keys("a"), namespace=namespace, group=MODEL)
    (page,) = store.coldest(1)
    pin = store.pin_pages(7, [page], 0.0)
    assert store.coldest(1) == [], "it is being read"
    sent = list(page.parts)
    _, _, [third] = store.reserve(1, b"z" * 16, keys("a"), GRANULE, MODEL)
    assert third % GRANULE == 0
    assert store.remove_page(page, sent) == 0, "more of it is being written"
    store.drop_owner(1)
    assert store.remove_page(page, sent[:1]) == 0, "not all of its parts were sent"
    assert store.remove_page(page, sent) == 2
    assert store.remove_page(page, sent) == 0
    assert store.used_bytes == 2 * PAGE, "still being read"
    store.release(7, pin)
    store.validate()
    assert store.used_bytes == 0


def test_room_below_the_low_watermark_is_what_others_may_send() -> None:
    store = Store(10 * PAGE, high_watermark=0.8, low_watermark=0.5)
    assert store.free_below_low == 5 * PAGE
    store_all(store, keys(*range(7)))
    assert store.free_below_low == 0


def test_the_number_of_objects_is_capped_like_their_bytes() -> None:
    """P88: millions of tiny pages must not take the host's memory with their index."""
    store = small(100, max_objects=4)
    assert store_all(store, keys(*range(6))) == b"\x01\x01\x01\x01\x00\x00"
    assert store_all(store, keys("a", "b")) == b"\x01\x01"
    assert (store.objects, present(store, 0, 1, 2, 3)) == (4, [1, 1, 0, 0])
    txn, *_ = store.reserve(1, NS, keys("c", "d", "e"), PAGE)
    store.validate()
    _, status, _ = store.reserve(2, NS, keys("f", "g"), PAGE)
    assert list(status) == [WRITE, REFUSED], "what is being written counts"
    store.commit(1, txn, b"\x01" * 3, [0] * 3)
    store.validate()
    store.clear(NS)
    assert store_all(store, keys("h")) == b"\x01", "cleared objects make way at once"


def test_lent_room_is_no_object_and_evicts_nothing() -> None:
    store = Store(64 << 12)
    lent = store.lend(4096, 60)
    assert len(lent) == 60
    assert store.lend(4096, 10) != []
    assert store.lend(4096, 10) == [], "nothing is left, and nothing is evicted"
    assert store.objects == 0
    store.validate()
    store.take_back(lent)
    assert store.used_bytes == 4 << 12
    store.validate()


def test_a_stranded_reservation_is_neither_stored_nor_free() -> None:
    store = Store(64 << 12)
    hashes = bytes(32) + bytes([1]) * 32
    txn, status, _ = store.claim(1, b"n" * 16, hashes, 4096, 0.0)
    assert bytes(status) == bytes([FETCH]) * 2
    assert store.strand(2, txn) == ([], 0), "it is not this owner's"
    stranded = store.strand(1, txn)
    assert (len(stranded.offsets), stranded.size_bytes) == (2, 2 * 4096)
    assert store.commit(1, txn, b"\x01\x01", [1, 2]) == b"\x00\x00"
    assert not store.claimed(b"n" * 16, hashes, 0.0), "others fetch them themselves"
    store.drop_owner(1)
    assert (store.objects, store.used_bytes) == (0, 2 * 4096)
    store.validate()
    store.take_back(stranded.offsets)
    assert store.used_bytes == 0
    store.validate()
