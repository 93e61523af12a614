"""What a batch of pages is said to continue, and that the head of a long chain outlives its tail for it."""

from __future__ import annotations

from hicache_mooncake.client.chain import MAX_PAGES, PAGES_A_CALL, Chain
from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.node.store import Store
from hicache_mooncake.protocol import HASH_BYTES
from hicache_mooncake.testing.local import page_hash

NS = b"n" * 16


def batch(first: int, count: int = PAGES_A_CALL) -> bytes:
    return b"".join(page_hash(i) for i in range(first, first + count))


def test_full_batches_continue_each_other_and_a_short_one_ends_the_chain() -> None:
    chain = Chain()
    assert chain.before(batch(0), None) == b""
    assert chain.before(batch(128), None) == batch(0)
    assert chain.before(batch(256, 5), None) == batch(0, 256)
    assert chain.before(batch(1000), None) == b""


def test_sglangs_own_account_comes_first() -> None:
    chain = Chain()
    chain.before(batch(0), None)
    keys = [page_hash(i).hex() for i in range(3)]
    assert chain.before(batch(3), keys) == batch(0, 3)
    assert chain.before(batch(500), None) == b""
    assert chain.before(batch(3), [*keys, "not a hash"]) == b""


def test_a_chain_too_long_to_name_is_not_named() -> None:
    chain = Chain()
    named = [len(chain.before(batch(at), None)) // HASH_BYTES for at in range(0, MAX_PAGES + 512, PAGES_A_CALL)]
    assert max(named) == MAX_PAGES
    assert named[-1] < MAX_PAGES
    assert chain.before(batch(0), ["0" * 64] * (MAX_PAGES + 1)) == b""


def test_the_head_of_a_chain_of_several_batches_outlives_its_tail() -> None:
    """P36: otherwise pages 127, 126, ... of the first batch go first, and the second batch is of no use."""
    store = Store(300 * GRANULE, high_watermark=1.0, low_watermark=1.0, max_pinned_share=1.0)
    chain = Chain()
    for first in (0, 128):
        txn, status, _ = store.reserve(1, NS, batch(first), GRANULE, b"", chain.before(batch(first), None))
        store.commit(1, txn, b"\x01" * len(status), range(len(status)))
    for extra in range(100):
        blob = page_hash(("other", extra))
        txn, _, _ = store.reserve(1, b"o" * 16, blob, GRANULE)
        store.commit(1, txn, b"\x01", [0])
    store.validate()
    held = store.present(NS, batch(0, 256), touch=False)
    assert held == b"\x01" * 200 + bytes(56)
