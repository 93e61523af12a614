"""Pages that were asked for again outlive those that never were, by a factor that the pages themselves teach.

Two queues, each least recently used first: pages nobody has asked for since they came, and the others. The head of the first
goes when its age times `factor` exceeds the age of the head of the second: 1 is plain LRU. When a page comes back that was
dropped a moment ago, the queue that it went from was too short, and the factor moves its way. So a small cache keeps what is
proven and lets the many pages that are used once pass through, and one that is large enough for everything is an LRU.

A page that comes back within two generations of the cache is one that was asked for again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

from hicache_mooncake.node.policy.base import Policy
from hicache_mooncake.node.policy.ghosts import Ghosts
from hicache_mooncake.node.policy.queue import P, Queue

_FIRST_FACTOR, _LARGEST_FACTOR = 2.0, 64.0
_JUST_NOW = 0.1
"""Of the pages held: a page that comes back before so many others have gone would still be here with a little more room."""


class Adaptive(Policy[P]):
    def __init__(self) -> None:
        self._once: Queue[P] = Queue()
        self._again: Queue[P] = Queue()
        self._ghosts = Ghosts()
        self._clock = 0
        self.factor = _FIRST_FACTOR

    def queues(self) -> Iterable[Queue[P]]:
        return self._once, self._again

    def inserted(self, pages: Sequence[P]) -> None:
        back = 0
        for at, kind, age in self._ghosts.take([page.hash for page in pages]):
            back = at + 1
            if age <= _JUST_NOW:
                step = 1 + min(0.02, 300 / max(1, len(self)))
                self.factor = min(_LARGEST_FACTOR, self.factor * step) if kind else max(1.0, self.factor / step)
        self._append(pages, back)

    def touched(self, pages: Sequence[P]) -> None:
        self._append(pages, len(pages))

    def arranged(self, pages: Sequence[P]) -> None:
        again = (at for at in range(len(pages), 0, -1) if _queue(pages[at - 1]) is self._again)
        self._append(pages, next(again, 0))

    def removed(self, pages: Sequence[P], *, evicted: bool) -> None:
        held = len(self)
        for again, of_it in itertools.groupby(pages if evicted else (), lambda page: _queue(page) is self._again):
            hashes = [page.hash for page in of_it]
            self._ghosts.put(hashes, int(again), held)
            held -= len(hashes)
        super().removed(pages, evicted=evicted)

    def victims(self, limit: int) -> Sequence[P]:
        once, again = self._once, self._again
        first, second = (once, again) if self._once_first() else (again, once)
        return first.victims(limit, self._clock) or second.victims(limit, self._clock)

    def coldest(self) -> Iterator[P]:
        return heapq.merge(self._once, self._again, key=self._coldness, reverse=True)

    def hottest(self) -> Iterator[P]:
        return heapq.merge(reversed(self._again), reversed(self._once), key=self._coldness)

    def _append(self, pages: Sequence[P], again: int) -> None:
        """So many leading ones were asked for again: whoever asks for a page asks for all before it."""
        self._once.append(pages[again:][::-1], self._clock)
        self._again.append(pages[:again][::-1], self._clock)
        self._clock += len(pages)

    def _once_first(self) -> bool:
        if not self._once.count or not self._again.count:
            return self._once.count > 0
        once, again = self._clock - self._once.coldest_stamp, self._clock - self._again.coldest_stamp
        return once * self.factor >= again

    def _coldness(self, page: P) -> float:
        segment = page.segment
        assert segment is not None
        age = self._clock - segment.stamp
        return age * self.factor if segment.queue is self._once else age


def _queue(page: P) -> Queue[P] | None:
    return page.segment.queue if page.segment is not None else None
