"""Which batches are one operation's, and that the head of a long chain outlives its tail for it."""

from __future__ import annotations

import pytest

from hicache_mooncake.client.chain import MAX_PAGES, PAGES_A_CALL, Chain
from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.node.store import Store
from hicache_mooncake.protocol import HASH_BYTES
from hicache_mooncake.testing.local import page_hash

torch = pytest.importorskip("torch")
NS = b"n" * 16


def batch(name: object, first: int, count: int = PAGES_A_CALL) -> bytes:
    return b"".join(page_hash((name, i)) for i in range(first, first + count))


def moved(chain: Chain, name: object, pages: int, prefix: list[str] | None = None) -> list[bytes]:
    """An operation of so many pages, batch by batch, as SGLang slices its indices. What is told of it and of those before."""
    slots = torch.arange(pages)
    told = []
    for first in range(0, pages, PAGES_A_CALL):
        count = min(PAGES_A_CALL, pages - first)
        continues, ended = chain.begin(batch(name, first, count), slots[first : first + count], prefix)
        assert continues == (first > 0)
        told += [ended, chain.finish()]
    kept.append(slots)  # freed memory may be the next operation's
    return [each for each in told if each]


kept: list[object] = []


def test_batches_of_one_operation_are_told_together_and_once() -> None:
    chain = Chain()
    assert moved(chain, "a", 300) == [batch("a", 0, 300)]
    assert moved(chain, "short", 100) == []
    assert moved(chain, "b", 256) == [], "it may go on"
    assert moved(chain, "c", 1) == [batch("b", 0, 256)]


def test_full_batches_of_many_operations_are_not_one_chain() -> None:
    """Prompts of exactly one batch each: taken for one chain, the oldest would be the most recent and evict the newest."""
    chain = Chain()
    for name in range(20):
        assert moved(chain, name, PAGES_A_CALL) == []


def test_sglangs_own_account_of_what_comes_before() -> None:
    chain = Chain()
    keys = [page_hash(("a", i)).hex() for i in range(3)]
    slots = torch.arange(2)
    assert chain.begin(batch("a", 3, 2), slots, keys) == (False, b"")
    assert chain.finish() == batch("a", 0, 5)
    assert chain.begin(batch("a", 3, 2), slots, [*keys, "not a hash"]) == (False, b"")
    assert chain.finish() == b""


def test_of_a_very_long_chain_the_head_is_told() -> None:
    (told,) = moved(Chain(), "long", MAX_PAGES + 300)
    assert told == batch("long", 0, MAX_PAGES)
    assert len(told) == MAX_PAGES * HASH_BYTES


def test_indices_of_any_kind_are_taken() -> None:
    chain = Chain()
    for indices in (None, [1, 2], range(128)):
        assert chain.begin(batch("x", 0), indices, None) == (False, b"")
        assert chain.finish() == b""


def test_the_head_of_a_chain_of_several_batches_outlives_its_tail() -> None:
    """P36: otherwise pages 127, 126, ... of the first batch go first, and the second batch is of no use."""
    store = Store(300 * GRANULE, high_watermark=1.0, low_watermark=1.0, max_pinned_share=1.0)
    for first in (0, 128):
        txn, status, _ = store.reserve(1, NS, batch("a", first), GRANULE)
        store.commit(1, txn, b"\x01" * len(status), range(len(status)))
    (told,) = [*moved(Chain(), "a", 257)][:1]
    store.touch(NS, told)
    for extra in range(100):
        txn, _, _ = store.reserve(1, b"o" * 16, page_hash(("other", extra)), GRANULE)
        store.commit(1, txn, b"\x01", [0])
    store.validate()
    assert store.present(NS, batch("a", 0, 256), touch=False) == b"\x01" * 200 + bytes(56)


def test_within_a_batch_too_whatever_was_there_already() -> None:
    store = Store(8 * GRANULE, high_watermark=1.0, low_watermark=1.0, max_pinned_share=1.0)

    def put(blob: bytes) -> None:
        txn, status, _ = store.reserve(1, NS, blob, GRANULE)
        store.commit(1, txn, b"\x01" * status.count(1), range(status.count(1)))

    put(batch("a", 0, 4))
    put(batch("a", 0, 8))
    order = [entry.hash for entry in store.entries()]
    assert order == [page_hash(("a", i)) for i in range(7, -1, -1)]
