"""Which pages are written to the cold tier, and when: those that would be evicted next, while they are still here. No I/O.

A page is written ahead of its eviction, so nobody who needs room waits for a disk; one that is `kept` is simply forgotten when
its time comes. There is no queue: what the disk does not take in time is evicted all the same, and counted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from hicache_mooncake.node.allocator import blocks_of
from hicache_mooncake.node.heat import Heat
from hicache_mooncake.node.store import REPLICA, Entry, LogicalPage, Store

BATCH_BYTES = 32 << 20
BATCH_PAGES = 512
_AHEAD_SHARE = 8
"""This part of the segment, the one that goes first, is to be on the disk,"""
_MOST_AHEAD_SHARE = 2
"""or up to this part after bursts that were more than that."""
_CALM_S = 60.0
"""So long without one, and half of it is enough."""
_TIER_SHARE = 4
"""And no more than this part of the tier."""
_AHEAD_PAGES = 4096
"""As many as are looked at under the node's lock."""
_BATCH_SHARE = 8
"""No more of the segment is pinned for a batch."""
_MAX_WANTED = 4096
MAX_SAVED = 1 << 20
"""Pages that a node that ends would save if it had the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Pages to be written, pinned until `done`."""

    pin: int
    pages: list[tuple[LogicalPage, tuple[Entry, ...]]]

    @property
    def parts(self) -> list[Entry]:
        return [part for _, parts in self.pages for part in parts]

    @property
    def size_bytes(self) -> int:
        return sum(blocks_of(part.length) for part in self.parts)


class Keeping:
    """Not thread-safe: every call runs under the node's lock. `owner` is the writer's, and has one batch at a time.

    `after_loads`: a page that was loaded so often within a minute is written as well, long before its eviction, so that it is
    there after a crash; 0: never. `tier_bytes`: what the tier holds; 0: more than enough."""

    def __init__(self, store: Store, after_loads: int = 0, tier_bytes: int = 0) -> None:
        store.keeping = True
        self.kept = 0
        """Pages written since start."""
        self._store = store
        self._heat = Heat(after_loads)
        self.counts_loads = after_loads > 0
        """Does `loaded` want to hear of them?"""
        self._wanted: deque[LogicalPage] = deque(maxlen=_MAX_WANTED)
        self._to_save: deque[LogicalPage] | None = None
        capacity = store.allocator.capacity
        most = tier_bytes // _TIER_SHARE if tier_bytes else capacity
        """Else pages would push each other out of a small tier, and be written again and again."""
        self._least_ahead, self._most_ahead = (min(capacity // share, most) for share in (_AHEAD_SHARE, _MOST_AHEAD_SHARE))
        self._ahead_bytes = self._least_ahead
        self._unkept = 0
        """Pages that had been evicted unwritten when the next batch was last asked for."""
        self._calm_at = float("-inf")
        self.batch_bytes = min(BATCH_BYTES, capacity // _BATCH_SHARE)
        """Of a batch, unless one page has more."""
        self.able = False
        """The tier takes pages: none needs to be evicted that is not there yet."""

    def loaded(self, namespace: bytes, hashes: Iterable[bytes], now: float) -> None:
        """These were loaded from DRAM."""
        if self.counts_loads:
            for page_hash in hashes:
                if self._heat.fetched(namespace, page_hash, now):
                    page = self._store.page(namespace, page_hash)
                    if page is not None and not self._store.is_kept(page):
                        self._wanted.append(page)

    def next(self, owner: int, now: float) -> Batch | None:
        """What is to be written now, or None."""
        self._look_ahead(now)
        pages = self._taken(_popped(self._wanted))
        if not pages and self._store.used_bytes > self._store.low_bytes - self._ahead_bytes:
            pages = self._taken(self._going())
        return self._pinned(owner, pages, now)

    def save(self, owner: int, now: float) -> Batch | None:
        """The same for a node that ends: all that is not kept yet, what was used last first. None: that was all."""
        if self._to_save is None:
            self._to_save = deque(self._store.hottest(MAX_SAVED))
        return self._pinned(owner, self._taken(_popped(self._to_save)), now)

    def done(self, owner: int, batch: Batch, found: Sequence[bool]) -> int:
        """Which of the batch's parts can be found in the tier now. Returns how many pages are kept."""
        self._store.release(owner, batch.pin)
        at = kept = 0
        for page, parts in batch.pages:
            if all(found[at : at + len(parts)]) and set(parts) == set(page.parts):
                page.kept = self._store.tier_life
                kept += 1
            at += len(parts)
        self.kept += kept
        return kept

    def gone(self, pages: Iterable[tuple[bytes, bytes]]) -> None:
        """These have left the tier: (namespace, hash)."""
        for namespace, page_hash in pages:
            page = self._store.page(namespace, page_hash)
            if page is not None:
                page.kept = 0

    def began_anew(self) -> None:
        """The tier has lost all that it had."""
        self._store.tier_life += 1

    # ------------------------------------------------------------------ inside

    def _look_ahead(self, now: float) -> None:
        """Pages went unwritten: more is to be on the disk before the next burst. None did for a while: less is enough."""
        unkept = self._store.stats.evicted_unkept
        if unkept > self._unkept:
            self._ahead_bytes = min(2 * self._ahead_bytes, self._most_ahead)
        elif now < self._calm_at:
            return
        else:
            self._ahead_bytes = max(self._ahead_bytes // 2, self._least_ahead)
        self._unkept = unkept
        self._calm_at = now + _CALM_S

    def _going(self) -> Iterable[LogicalPage]:
        """Pages that would be evicted next, and are not kept. Nearly all of them are: this is what looking costs."""
        left, life = self._ahead_bytes, self._store.tier_life
        for page in itertools.islice(self._store.going(), _AHEAD_PAGES):
            kept = page.kept == life
            if not kept and page.in_use:
                continue
            held = page.held
            left -= blocks_of(held.length) if isinstance(held, Entry) else page.size_bytes
            if left < 0:
                return
            if not kept:
                yield page

    def _taken(self, pages: Iterable[LogicalPage]) -> list[LogicalPage]:
        """A batch of those that are to be written."""
        taken: dict[LogicalPage, None] = {}
        size = count = 0
        for page in pages:
            if page in taken or not self._is_to_be_written(page):
                continue
            size += page.size_bytes
            count += len(page.parts)
            if taken and (size > self.batch_bytes or count > BATCH_PAGES):
                break
            taken[page] = None
        return list(taken)

    def _is_to_be_written(self, page: LogicalPage) -> bool:
        if self._store.is_kept(page) or page.rank == REPLICA or page.writers or not page.parts:
            return False
        return all(map(self._store.holds, page.parts))  # it may have gone since it was noted

    def _pinned(self, owner: int, pages: list[LogicalPage], now: float) -> Batch | None:
        if not pages:
            return None
        return Batch(self._store.pin_pages(owner, pages, now), [(page, tuple(page.parts)) for page in pages])


def _popped(pages: deque[LogicalPage]) -> Iterator[LogicalPage]:
    """From the left. The one at which whoever takes them stops is still there."""
    while pages:
        yield pages[0]
        pages.popleft()
