"""S3-FIFO (Yang et al., SOSP 2023): a small queue that most pages only pass through, a main one, and the memory of what passed.

Chains: pages come leaf first, so that within both queues the tail of a chain is always nearer the exit than its head; and as a
use of a page is one of all before it, none has fewer uses than those behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from hicache_mooncake.node.policy.base import Policy
from hicache_mooncake.node.policy.ghosts import Ghosts
from hicache_mooncake.node.policy.queue import P, Queue

_SMALL_SHARE = 0.1
_MOST_USES = 3


class S3Fifo(Policy[P]):
    def __init__(self) -> None:
        self._small: Queue[P] = Queue()
        self._main: Queue[P] = Queue()
        self._ghosts = Ghosts()

    def queues(self) -> Iterable[Queue[P]]:
        return self._small, self._main

    def inserted(self, pages: Sequence[P]) -> None:
        for page in pages:
            page.uses = 0
        back = [at + 1 for at, _, _ in self._ghosts.take([page.hash for page in pages])]
        self._append(pages, back[-1] if back else 0)

    def touched(self, pages: Sequence[P]) -> None:
        for page in pages:
            page.uses = min(_MOST_USES, page.uses + 1)

    def arranged(self, pages: Sequence[P]) -> None:
        """Only those that are new: the order of the others is that in which they came."""
        new = [page for page in pages if not page.uses]
        main = (at for at in range(len(new), 0, -1) if _queue(new[at - 1]) is self._main)
        self._append(new, next(main, 0))

    def removed(self, pages: Sequence[P], *, evicted: bool) -> None:
        passed = [page.hash for page in pages if _queue(page) is self._small] if evicted else []
        if passed:
            self._ghosts.put(passed, 0, len(self))
        super().removed(pages, evicted=evicted)

    def victims(self, limit: int) -> Sequence[P]:
        """One at a time, as with each it may become the other queue's turn. Pages that are met on the way lose a use or go to
        the end of the line."""
        for _ in range((_MOST_USES + 2) * len(self)):
            small = self._small.count > _SMALL_SHARE * len(self) or not self._main.count
            page = (self._small if small else self._main).first()
            if page is None:
                return ()
            if not page.uses and not page.in_use:
                return (page,)
            if page.uses:
                page.uses = 0 if small else page.uses - 1
            self._main.append((page,))
        return self._small.victims(1) or self._main.victims(1)

    def _append(self, pages: Sequence[P], main: int) -> None:
        """So many leading ones belong to the main queue: whoever asks for a page asks for all before it."""
        self._small.append(pages[main:][::-1])
        self._main.append(pages[:main][::-1])

    def coldest(self) -> Iterator[P]:
        """Those without a use first, those of the small queue before others."""
        return itertools.chain(
            (page for page in self._small if not page.uses),
            (page for page in self._main if not page.uses),
            (page for page in self._small if page.uses),
            (page for page in self._main if page.uses),
        )

    def hottest(self) -> Iterator[P]:
        return itertools.chain(
            (page for page in reversed(self._main) if page.uses),
            (page for page in reversed(self._small) if page.uses),
            (page for page in reversed(self._main) if not page.uses),
            (page for page in reversed(self._small) if not page.uses),
        )


def _queue(page: P) -> Queue[P] | None:
    return page.segment.queue if page.segment is not None else None
