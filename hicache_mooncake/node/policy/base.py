"""What the store tells an eviction policy, and what it asks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic

from hicache_mooncake.node.policy.queue import P, Queue, leave


class Policy(ABC, Generic[P]):
    """Decides which page goes next. Pages are given head of the chain first, and every policy lets a chain's tail go before its
    head, as SGLang can only use a prefix. No call scans all pages. Not thread-safe."""

    @abstractmethod
    def queues(self) -> Iterable[Queue[P]]:
        """All that it has."""

    @abstractmethod
    def inserted(self, pages: Sequence[P]) -> None:
        """Pages that are new here."""

    @abstractmethod
    def touched(self, pages: Sequence[P]) -> None:
        """Pages that somebody has asked for."""

    @abstractmethod
    def arranged(self, pages: Sequence[P]) -> None:
        """Pages whose place in a chain has become known. Nobody has asked for them anew."""

    def removed(self, pages: Sequence[P], *, evicted: bool) -> None:
        """They are gone: to make room, or for another reason."""
        leave(pages)

    @abstractmethod
    def victims(self, limit: int) -> Sequence[P]:
        """The pages that go first of those not in use, in order: at most `limit` (> 0), as many as are found at once, none when
        all are in use. They stay until `removed`; when the leading ones are, the others are still those that go first."""

    @abstractmethod
    def coldest(self) -> Iterator[P]:
        """All pages, the one that goes first first. Nothing may change meanwhile."""

    @abstractmethod
    def hottest(self) -> Iterator[P]:
        """The other way round."""

    def __len__(self) -> int:
        return sum(queue.count for queue in self.queues())

    def validate(self) -> None:
        for queue in self.queues():
            queue.validate()

    def __del__(self) -> None:
        for queue in self.queues():
            queue.clear()
