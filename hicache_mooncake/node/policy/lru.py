"""Least recently used first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hicache_mooncake.node.policy.base import Policy
from hicache_mooncake.node.policy.queue import P, Queue


class Lru(Policy[P]):
    def __init__(self) -> None:
        self._queue: Queue[P] = Queue()

    def queues(self) -> Iterable[Queue[P]]:
        return (self._queue,)

    def inserted(self, pages: Sequence[P]) -> None:
        self._queue.append(pages[::-1])

    touched = arranged = inserted

    def victims(self, limit: int) -> Sequence[P]:
        return self._queue.victims(limit)

    def coldest(self) -> Iterator[P]:
        return iter(self._queue)

    def hottest(self) -> Iterator[P]:
        return reversed(self._queue)
