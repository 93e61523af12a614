"""Greedy-Dual (Cherkasova's GDSF) with the loss as the cost: pages that cost more to lose and are used more often stay longer.

A page that goes takes all behind it along, as SGLang can only use a prefix. So what a page's loss costs is taken as the
logarithm of how many pages of its chain lie behind it, which also keeps every tail before its head. The size is left out: pages
of one model are equal, and what a byte of another model's page saves, the node cannot know.

Priority: the clock, which is that of the last page that went, plus uses times cost. Pages of one priority are a queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from hicache_mooncake.node.policy.base import Policy
from hicache_mooncake.node.policy.queue import P, Queue

_MOST_USES = 15


class Cost(Policy[P]):
    def __init__(self) -> None:
        self._queues: dict[int, Queue[P]] = {}
        self._priorities: list[int] = []
        """A heap of those that have a queue."""
        self._of_queue: dict[int, int] = {}
        """Its priority, by the identity of the queue."""
        self._clock = 0

    def queues(self) -> Iterable[Queue[P]]:
        return self._queues.values()

    def inserted(self, pages: Sequence[P]) -> None:
        for page in pages:
            page.uses = 1
        self._place(pages)

    def touched(self, pages: Sequence[P]) -> None:
        for page in pages:
            page.uses = min(_MOST_USES, page.uses + 1)
        self._place(pages)

    def arranged(self, pages: Sequence[P]) -> None:
        self._place(pages)

    def victims(self, limit: int) -> Sequence[P]:
        for _ in range(len(self._priorities)):
            priority = self._priorities[0]
            queue = self._queues[priority]
            if not queue.count:
                heapq.heappop(self._priorities)
                del self._queues[priority], self._of_queue[id(queue)]
                continue
            pages = queue.victims(limit)
            if not pages:
                break
            self._clock = max(self._clock, priority)
            return pages
        return next((pages for priority in sorted(self._queues) if (pages := self._queues[priority].victims(limit))), ())

    def coldest(self) -> Iterator[P]:
        return (page for priority in sorted(self._queues) for page in self._queues[priority])

    def hottest(self) -> Iterator[P]:
        return (page for priority in sorted(self._queues, reverse=True) for page in reversed(self._queues[priority]))

    def _place(self, pages: Sequence[P]) -> None:
        placed: dict[int, list[P]] = {}
        for behind, page in enumerate(reversed(pages), 1):
            priority = self._clock + page.uses * behind.bit_length()
            if page.segment is not None:
                priority = max(priority, self._of_queue[id(page.segment.queue)])
            placed.setdefault(priority, []).append(page)
        for priority, of_it in placed.items():
            queue = self._queues.get(priority)
            if queue is None:
                queue = self._queues[priority] = Queue()
                self._of_queue[id(queue)] = priority
                heapq.heappush(self._priorities, priority)
            queue.append(of_it)
