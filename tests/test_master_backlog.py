"""Changes wait for their turn: each node's in order, and no node behind another one's flood."""

from __future__ import annotations

import random

import pytest
from hicache_master.backlog import Backlog, Waiting

from hicache_mooncake.protocol import Leave


def waiting(sender: str, number: int) -> Waiting:
    return Waiting(sender.encode(), Leave(sender, b"i"), number, float(number))


def test_a_message_passes_another_nodes_flood_but_not_its_own_nodes() -> None:
    backlog = Backlog()
    for number in range(1000):
        backlog.push(waiting("flood", number))
    backlog.push(waiting("other", 1))
    backlog.push(waiting("other", 2))
    first = [backlog.pop() for _ in range(4)]
    assert [one.sender for one in first] == [b"flood", b"other", b"flood", b"other"]
    assert [one.size for one in first] == [0, 1, 1, 2]
    assert len(backlog) == 1


def test_it_counts_its_bytes_and_keeps_every_nodes_order() -> None:
    rng, backlog = random.Random(5), Backlog()
    sent: dict[bytes, list[int]] = {}
    got: dict[bytes, list[int]] = {}
    inside = 0
    for number in range(2000):
        if rng.random() < 0.6:
            one = waiting(rng.choice("abcdefgh"), number)
            sent.setdefault(one.sender, []).append(number)
            backlog.push(one)
            inside += number
        elif backlog:
            one = backlog.pop()
            got.setdefault(one.sender, []).append(one.size)
            inside -= one.size
        assert backlog.bytes == inside
    while backlog:
        one = backlog.pop()
        got.setdefault(one.sender, []).append(one.size)
    assert got == sent
    assert backlog.bytes == 0
    with pytest.raises(IndexError):
        backlog.pop()
