"""What masters have just said: recalled for slices of it, for a while, within bounds, and not when it may be wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.node import recall
from hicache_mooncake.node.recall import Recall

NS, OTHER = b"n" * 16, b"o" * 16
A, B = (p.Peer(name, b"1", "10.0.0.1", 7000) for name in "ab")


def hashes(first: int, count: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(first, first + count))


def learn(
    memory: Recall,
    blob: bytes,
    holder: Sequence[int],
    peers: list[p.Peer],
    others: Sequence[int] = (),
    now: float = 0.0,
    namespace: bytes = NS,
) -> None:
    answer = p.Answer(bytes(holder), peers, bytes(others), b"")
    memory.learn(memory.mark(), p.Question(namespace, blob, prefix=True), answer, now)
    memory.validate()


def test_a_slice_is_answered_as_the_whole_was() -> None:
    memory = Recall()
    learn(memory, hashes(0, 6), [1, 2, 1, 2, 0, 1], [A, B], [0, 1, 2, 0, 0, 0])
    assert memory.find(NS, hashes(1, 3), 1.0) == p.Answer(bytes([2, 1, 2]), [A, B], bytes([1, 2, 0]))
    assert memory.find(NS, hashes(0, 4), 1.0) is not None
    assert memory.find(NS, hashes(3, 2), 1.0) is None, "nobody has the last one"
    assert memory.find(NS, hashes(5, 2), 1.0) is None, "more than was asked for"
    assert memory.find(OTHER, hashes(1, 3), 1.0) is None
    assert memory.find(NS, hashes(2, 1) + hashes(1, 1), 1.0) is None, "another order"
    assert memory.find(NS, hashes(1, 1) + hashes(3, 1), 1.0) is None, "not next to each other"


def test_an_answer_that_stopped_early_says_nothing_of_the_rest() -> None:
    memory = Recall()
    learn(memory, hashes(0, 4), [1, 1], [A])
    assert memory.find(NS, hashes(0, 2), 0.0) == p.Answer(bytes([1, 1]), [A])
    assert memory.find(NS, hashes(1, 2), 0.0) is None


def test_only_whole_hashes_match() -> None:
    memory = Recall()
    page = bytes(range(32))
    learn(memory, page + page, [1, 1], [A])
    assert memory.find(NS, page[16:] + page[:16], 0.0) is None
    assert memory.find(NS, page, 0.0) is not None


def test_the_newest_answer_counts_and_old_ones_are_forgotten() -> None:
    memory = Recall()
    learn(memory, hashes(0, 2), [1, 1], [A])
    learn(memory, hashes(0, 2), [1, 1], [B], now=1.0)
    for when, expected in ((1.5, [B]), (2.9, [B])):
        found = memory.find(NS, hashes(0, 2), when)
        assert found is not None
        assert found.peers == expected
    assert memory.find(NS, hashes(0, 2), 1.0 + recall.RECALL_S) is None


@pytest.mark.parametrize(
    ("event", "left"),
    [
        (lambda memory: memory.forget(), []),
        (lambda memory: memory.forget_namespace(NS), [2]),
        (lambda memory: memory.forget_peer("b"), [0, 2]),
        (lambda memory: learn(memory, hashes(9, 1), [1], [p.Peer("b", b"2", "10.0.0.1", 7000)]), [0, 2]),
    ],
    ids=["masters lost", "cleared", "a holder is down", "a holder has a new life"],
)
def test_what_may_be_wrong_is_forgotten_and_not_learned_from_an_answer_under_way(
    event: Callable[[Recall], object], left: list[int]
) -> None:
    memory = Recall()
    learn(memory, hashes(0, 1), [1], [A])
    learn(memory, hashes(1, 1), [2], [A, B])
    learn(memory, hashes(2, 1), [1], [A], namespace=OTHER)
    mark = memory.mark()
    event(memory)
    memory.validate()
    found = [n for n in range(3) if memory.find(OTHER if n == 2 else NS, hashes(n, 1), 0.0) is not None]
    assert found == left
    memory.learn(mark, p.Question(NS, hashes(7, 1), prefix=False), p.Answer(b"\x01", [A]), 0.0)
    assert memory.find(NS, hashes(7, 1), 0.0) is None, "asked before, answered afterwards"


def test_nothing_that_was_heard_before_a_master_came_or_went_counts() -> None:
    turn = [0]
    memory = Recall(lambda: turn[0])
    learn(memory, hashes(0, 1), [1], [A])
    mark = memory.mark()
    turn[0] = 1
    assert memory.find(NS, hashes(0, 1), 0.0) is None
    memory.learn(mark, p.Question(NS, hashes(0, 1), prefix=False), p.Answer(b"\x01", [A]), 0.0)
    assert memory.find(NS, hashes(0, 1), 0.0) is None
    learn(memory, hashes(0, 1), [1], [A])
    assert memory.find(NS, hashes(0, 1), 0.0) is not None


def test_it_keeps_a_few_answers_and_a_few_bytes() -> None:
    memory = Recall()
    for number in range(1000):
        learn(memory, hashes(number, 1), [1], [A])
    assert memory.find(NS, hashes(999, 1), 0.0) is not None
    assert memory.find(NS, hashes(999 - recall.MAX_ANSWERS, 1), 0.0) is None
    most = recall.MAX_BYTES // p.HASH_BYTES
    blobs = [bytes([number]) * (most // 3 * p.HASH_BYTES) for number in range(4)]
    for blob in blobs:
        learn(memory, blob, [1] * (most // 3), [A])
    assert memory.find(NS, blobs[0], 0.0) is None
    assert memory.find(NS, blobs[3], 0.0) is not None
    learn(memory, bytes(recall.MAX_BYTES), [1] * most, [A])
    assert memory.find(NS, blobs[3], 0.0) is not None
    many = [p.Peer(f"n{number}", b"1", "10.0.0.1", 7000) for number in range(255)]
    for number in range(200):
        learn(memory, hashes(number, 1), [1], many)
    assert memory.find(NS, hashes(0, 1), 0.0) is None, "peers count as well"
    for number in range(3000):
        learn(memory, hashes(number, 1), [1], [p.Peer(f"life {number}", b"1", "10.0.0.1", 7000)])
