"""Pages in the order in which they would be evicted, at a fraction of what a linked list of them costs in CPython.

Pages come and are used in batches, so the order is one of segments: each has pages that came together, coldest first, and every
page knows its segment. A page that moves leaves its slot behind, which counts for nothing as the page then names another
segment. All operations are O(pages named), amortised; a page costs 25 bytes here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

_LONGEST = 128
"""Pages of a segment."""
_FEW = 16
"""So few pages go to the segment that is there, if it has room."""


class Evictable(msgspec.Struct, gc=False, eq=False):
    """What a policy knows of a page. Not seen by the garbage collector, which would stop the process for a tenth of a second
    to walk over a million of them: whoever drops pages ends the cycles between them and what they refer to."""

    hash: bytes
    segment: Segment[Any] | None = None
    """Where it is in the order; the policy's own."""
    uses: int = 0
    """The policy's own."""

    @property
    def in_use(self) -> bool:
        return False


P = TypeVar("P", bound=Evictable)


class Segment(Generic[P]):
    """Neighbours in a queue, coldest first. `live` of its `pages` are still here, none of them before `start`. A tuple, as the
    garbage collector passes over those."""

    __slots__ = ("live", "newer", "older", "pages", "queue", "stamp", "start")

    def __init__(self, queue: Queue[P], stamp: int, pages: tuple[P, ...], older: Segment[P] | None) -> None:
        self.queue = queue
        self.stamp = stamp
        self.pages = pages
        self.live = 0
        self.start = 0
        self.older = older
        self.newer: Segment[P] | None = None

    def __iter__(self) -> Iterator[P]:
        return (page for page in self.pages[self.start :] if page.segment is self)

    def __reversed__(self) -> Iterator[P]:
        return (page for page in reversed(self.pages[self.start :]) if page.segment is self)


class Queue(Generic[P]):
    """Not thread-safe, and not to be changed while it is iterated over. Whoever lets go of a queue that has pages calls
    `clear`."""

    __slots__ = ("_newest", "_oldest", "count")

    def __init__(self) -> None:
        self.count = 0
        self._oldest: Segment[P] | None = None
        self._newest: Segment[P] | None = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[P]:
        """Coldest first."""
        segment = self._oldest
        while segment is not None:
            yield from segment
            segment = segment.newer

    def __reversed__(self) -> Iterator[P]:
        segment = self._newest
        while segment is not None:
            yield from reversed(segment)
            segment = segment.older

    def append(self, pages: Sequence[P], stamp: int = 0) -> None:
        """These, coldest first, are now the hottest; they leave whatever queue they are in. A page named twice counts once."""
        if len(pages) <= _FEW:
            if pages:
                self._append_few(pages, stamp)
            return
        for at in range(0, len(pages), _LONGEST):
            self._append_many(tuple(pages[at : at + _LONGEST]), stamp)

    def victims(self, limit: int, stamp: int = 0) -> Sequence[P]:
        """The coldest pages that are not in use, at most `limit` (> 0) and no more than are neighbours; none when all are in
        use. They stay in the queue. Those in use that are met before the first move up, and then it is only that one, as the
        queue is younger than it was."""
        for moved in range(self.count):
            page = self.first()
            if page is None:
                break
            if not page.in_use:
                return self._idle(1 if moved else limit)
            self._append_few((page,), stamp)
        return ()

    def first(self) -> P | None:
        """The coldest page."""
        if self._oldest is None:
            return None
        segment: Segment[P] = self._oldest
        pages, at = segment.pages, segment.start
        while id(pages[at].segment) != id(segment):
            at += 1
        segment.start = at
        return pages[at]

    def _idle(self, limit: int) -> list[P]:
        """Of the coldest segment, up to the first page that is in use."""
        segment = self._oldest
        idle: list[P] = []
        for page in itertools.islice(segment.pages, segment.start, None) if segment is not None else ():
            if page.segment is not segment:
                continue
            if page.in_use:
                break
            idle.append(page)
            if len(idle) == limit:
                break
        return idle

    @property
    def coldest_stamp(self) -> int:
        """Of the coldest page's segment. The queue has pages."""
        assert self._oldest is not None
        return self._oldest.stamp

    def clear(self) -> None:
        """Empty, and none of its pages refers to it."""
        while self._oldest is not None:
            segment = self._oldest
            for page in segment:
                page.segment = None
            segment.live = 0
            self._unlink(segment)
        self.count = 0

    def _append_few(self, pages: Sequence[P], stamp: int) -> None:
        pages = tuple(dict.fromkeys(pages) if len(pages) > 1 else pages)
        segment = self._newest
        if segment is not None and segment.pages[-len(pages) :] == pages and all(page.segment is segment for page in pages):
            return
        leave(pages)
        segment = self._newest
        # Nothing is added to a segment that a page has left: the page might come back, and would be in it twice.
        if (
            segment is None
            or segment.live != len(segment.pages)
            or segment.live + len(pages) > max(1, min(64, self.count >> 5))
        ):
            segment = self._new_segment(stamp, pages)
        else:
            segment.pages += pages
        for page in pages:
            page.segment = segment
        segment.live += len(pages)
        self.count += len(pages)

    def _append_many(self, pages: tuple[P, ...], stamp: int) -> None:
        segment = self._new_segment(stamp, pages)
        segment.live = _move(pages, segment)
        if segment.live < len(pages):
            segment.pages = tuple(dict.fromkeys(pages))
        self.count += segment.live

    def _new_segment(self, stamp: int, pages: tuple[P, ...]) -> Segment[P]:
        segment = Segment(self, stamp, pages, self._newest)
        if self._newest is None:
            self._oldest = segment
        else:
            self._newest.newer = segment
        self._newest = segment
        return segment

    def _left(self, segment: Segment[P], pages: int) -> None:
        """So many pages name another segment, or none, from now on."""
        self.count -= pages
        segment.live -= pages
        if segment.live == 0:
            self._unlink(segment)
        elif len(segment.pages) > 2 * segment.live + 8:
            segment.pages = tuple(segment)
            segment.start = 0

    def _unlink(self, segment: Segment[P]) -> None:
        older, newer = segment.older, segment.newer
        if older is None:
            self._oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        segment.older = segment.newer = None
        segment.pages = ()

    def validate(self) -> None:
        count = 0
        older: Segment[P] | None = None
        segment = self._oldest
        while segment is not None:
            pages = list(segment)
            assert segment.older is older
            assert segment.queue is self
            assert pages, "a segment without pages is not kept"
            assert len(pages) == segment.live == len(set(map(id, pages)))
            assert not any(page.segment is segment for page in segment.pages[: segment.start])
            assert len(segment.pages) <= 2 * segment.live + 8
            count += segment.live
            older, segment = segment, segment.newer
        assert self._newest is older
        assert self.count == count


def leave(pages: Iterable[Evictable]) -> None:
    """Out of their queues, those that are in one."""
    _move(pages, None)


def _move(pages: Iterable[Evictable], to: Segment[Any] | None) -> int:
    """Out of their segments into this one, or into none. Returns how many were not there yet."""
    moved = run = 0
    last: Segment[Any] | None = None
    for page in pages:
        segment = page.segment
        if segment is to:
            continue
        if segment is not last:
            if last is not None:
                last.queue._left(last, run)
            last, run = segment, 0
        page.segment = to
        moved += 1
        run += 1
    if last is not None:
        last.queue._left(last, run)
    return moved
