"""What masters have just said: recalled for slices of it, for a while, within bounds."""

from __future__ import annotations

import hashlib

from hicache_mooncake import protocol as p
from hicache_mooncake.node import recall
from hicache_mooncake.node.recall import Recall

NS, OTHER = b"n" * 16, b"o" * 16
A, B = (p.Peer(name, b"1", "10.0.0.1", 7000) for name in "ab")


def hashes(first: int, count: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(first, first + count))


def test_a_slice_is_answered_as_the_whole_was() -> None:
    memory = Recall()
    memory.learn(NS, hashes(0, 6), p.Answer(bytes([1, 2, 1, 2, 0, 1]), [A, B], bytes([0, 1, 2, 0, 0, 0]), b"\x00\x01"), 0.0)
    assert memory.find(NS, hashes(1, 3), 1.0) == p.Answer(bytes([2, 1, 2]), [A, B], bytes([1, 2, 0]), b"\x00\x01")
    assert memory.find(NS, hashes(3, 2), 1.0) is None, "nobody has the last one"
    assert memory.find(NS, hashes(5, 2), 1.0) is None, "more than was asked for"
    assert memory.find(OTHER, hashes(1, 3), 1.0) is None
    assert memory.find(NS, hashes(2, 1) + hashes(1, 1), 1.0) is None, "another order"


def test_an_answer_that_stopped_early_says_nothing_of_the_rest() -> None:
    memory = Recall()
    memory.learn(NS, hashes(0, 4), p.Answer(bytes([1, 1]), [A]), 0.0)
    assert memory.find(NS, hashes(0, 2), 0.0) == p.Answer(bytes([1, 1]), [A])
    assert memory.find(NS, hashes(1, 2), 0.0) is None


def test_only_whole_hashes_match() -> None:
    memory = Recall()
    page = bytes(range(32))
    memory.learn(NS, page + page, p.Answer(bytes([1, 1]), [A]), 0.0)
    assert memory.find(NS, page[16:] + page[:16], 0.0) is None


def test_the_newest_answer_counts_and_old_ones_are_forgotten() -> None:
    memory = Recall()
    memory.learn(NS, hashes(0, 2), p.Answer(bytes([1, 1]), [A]), 0.0)
    memory.learn(NS, hashes(0, 2), p.Answer(bytes([1, 1]), [B]), 1.0)
    found = memory.find(NS, hashes(0, 2), 1.5)
    assert found is not None
    assert found.peers == [B]
    assert memory.find(NS, hashes(0, 2), 1.0 + recall.RECALL_S) is None
    memory.learn(NS, hashes(0, 1), p.Answer(bytes([1]), [A]), 0.0)
    memory.forget()
    assert memory.find(NS, hashes(0, 1), 0.0) is None


def test_it_keeps_a_few_answers_and_a_few_bytes() -> None:
    memory = Recall()
    for number in range(1000):
        memory.learn(NS, hashes(number, 1), p.Answer(bytes([1]), [A]), 0.0)
    assert memory.find(NS, hashes(999, 1), 0.0) is not None
    assert memory.find(NS, hashes(999 - recall.MAX_ANSWERS, 1), 0.0) is None
    most = recall.MAX_BYTES // p.HASH_BYTES
    blobs = [bytes([number]) * (most // 2 * p.HASH_BYTES) for number in range(3)]
    for blob in blobs:
        memory.learn(NS, blob, p.Answer(bytes([1]) * (most // 2), [A]), 0.0)
    assert memory.find(NS, blobs[0], 0.0) is None
    assert memory.find(NS, blobs[1], 0.0) is not None
    memory.learn(NS, bytes(recall.MAX_BYTES + p.HASH_BYTES), p.Answer(bytes([1]) * (most + 1), [A]), 0.0)
    assert memory.find(NS, blobs[2], 0.0) is not None
