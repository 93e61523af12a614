"""The cold tier of a node: pages written as they leave DRAM, found again after any end of the process.

A body is written first, the index after it, and what the index says is only ever believed when the bytes have the checksum
that they had in DRAM. So a write that was cut short, a segment that was written over under a reader, a damaged disk and an
index that is behind are all the same: a miss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np
import xxhash

from hicache_mooncake.cold import directory as places
from hicache_mooncake.cold.asked import Asked
from hicache_mooncake.cold.index import DAMAGE, Index, Key, Place, Records, map_bytes_for
from hicache_mooncake.cold.layout import LEAST_SEGMENTS, Layout, Segment, blocks, segment_bytes_for, suits
from hicache_mooncake.cold.pages_file import ColdError, PagesFile
from hicache_mooncake.cold.patience import Newest, Patience
from hicache_mooncake.cold.reading import Bodies, Reader
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.quiet import QuietLog

if TYPE_CHECKING:
    from hicache_mooncake.cold.layout import Mask

log = logging.getLogger(__name__)

FLOOR_BYTES = 1 << 30
MAX_CHANGES = 1_000_000
_RETRY_S = 5.0
_KEEP_S = 5.0
"""For reading what is kept of a segment that is emptied."""
_CLOSE_S = 5.0
_PATIENCE_S = 0.5
"""With the index, of which a part may have to come from the disk: what is in DRAM must not wait behind it for long."""
_INDEX_HANGS = "the index cannot be read: meanwhile nothing is found here. Look at the disk (dmesg)"
_KEEP_AFTER = 2
_LEAST_PASSED_OVER, _PASSED_OVER_SHARE = 2, 8
"""So many segments, and at least so many, may be passed over since somebody counts on what is in them."""
_LOOK_EVERY_S = 60.0
_MAX_CLEARED = 4096
_SWEPT = 4096
"""Pages of cleared namespaces that are forgotten at once."""
_MOST_BAD = 65_536
_ANEW_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Body:
    """A page to be written. `view`: its bytes and what follows them up to a whole block, which must not change meanwhile."""

    key: Key
    view: memoryview
    length: int
    checksum: int


@dataclass(slots=True)
class Counts:
    """Since start; every one only grows."""

    written: int = 0
    written_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    """Written once more, out of a segment that was emptied."""
    emptied: int = 0
    evicted: int = 0
    damaged: int = 0
    unreadable: int = 0
    not_written: int = 0
    errors: int = 0
    promises_broken: int = 0
    """Segments emptied although somebody counted on pages in them."""


class ColdTier:
    """`write` and `sweep` are for one thread at a time; everything else for any. Nothing raises once it is there: a disk that
    fails makes misses, is counted, and is tried again later. `write`, `sweep` and `clear` wait for the disk, `read` does until
    its deadline; the others only look into the index."""

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        floor_bytes: int = FLOOR_BYTES,
        direct: bool = True,
        track_changes: bool = True,
    ) -> None:
        """Opens what is there, or makes it. `track_changes` False: nobody calls `drain_changes`. Raises ColdError with a
        sentence for the operator."""
        self.path = places.own_path(directory)
        self.capacity_bytes = capacity_bytes
        self.counts = Counts()
        self.changes_lost = False
        self._floor_bytes = floor_bytes
        self._track_changes = track_changes
        self._quiet = QuietLog(log)
        self._lock = threading.Lock()
        """Around what is written to the index and the layout; the disk may hang under it."""
        self._noting = threading.Lock()
        """Around the changes, and which namespaces there are. Nobody waits for the disk under it."""
        self._changes: deque[tuple[bool, Key]] = deque()
        self._gone: deque[Key] = deque(maxlen=MAX_CHANGES)
        self.clears = 0
        """How many there were: a batch to be written begins by noting it."""
        self.life = 1
        """Another one, when all that was here is lost. Nothing of that is in `take_gone`."""
        self._cleared: OrderedDict[bytes, int] = OrderedDict()
        """Namespaces cleared lately: the how manieth clear it was."""
        self._bad: dict[Key, Place] = {}
        """Damaged, and not yet forgotten by the index."""
        self._promised: dict[int, float] = {}
        """Fillings of segments in which somebody counts on pages: until when."""
        self._asked = Asked()
        self._patience = Patience(_PATIENCE_S)
        self._size = Newest(self._size_now, _PATIENCE_S, (0, 0))
        self._failed_until = float("-inf")
        self._looked_at = time.monotonic()
        self._sound = False
        self._anew_at = float("-inf")
        self.problem = self._lasting = ""
        with contextlib.ExitStack() as opened:
            try:
                self._open(directory, direct, opened)
            except OSError as error:
                raise ColdError(f"--cold {directory}: {error.strerror or error}") from error
            except lmdb.Error as error:
                raise ColdError(f"--cold {directory}: the index cannot be opened: {error}") from error
            self._resources = opened.pop_all()

    def _open(self, directory: Path, direct: bool, opened: contextlib.ExitStack) -> None:
        places.prepare(directory)
        opened.callback(os.close, places.locked(self.path))
        opened.callback(self._mark)
        try:
            segment_bytes = segment_bytes_for(self.capacity_bytes)
        except ValueError as error:
            raise ColdError(f"cold_bytes: {error}") from error
        places.check_index(self.path)
        places.mark_unclean(self.path)
        self._file = PagesFile(self.path / places.PAGES, writable=True, direct=direct)
        opened.callback(self._file.close)
        self._read_only = PagesFile(self.path / places.PAGES, writable=False, direct=self._file.direct)
        opened.callback(self._read_only.close)
        try:
            self._open_index(segment_bytes)
        except DAMAGE as error:
            log.error("cold tier: the index cannot be opened: %s", error)
            places.put_aside(self.path)
            self._open_index(segment_bytes)
        opened.callback(lambda: self._index.close())
        self._check_room(directory)
        self.reader = Reader(self._file)
        opened.callback(self.reader.close)
        self._sound = True

    def _open_index(self, segment_bytes: int) -> None:
        """Go on with what is there, as far as there is a file to it and it is of this size; or begin empty."""
        index = Index(self.path / places.INDEX, map_bytes_for(self.capacity_bytes))
        known = index.number("segment bytes") or segment_bytes
        segments = index.segments()
        if not suits(known, self.capacity_bytes):
            log.warning("cold tier: %s begins empty: the tier had a very different size", self.path)
            self._forget(index, segments)
            known, segments = segment_bytes, []
        size, number = os.fstat(self._file.fd).st_size, self.capacity_bytes // known
        there = [each for each in segments if each.used <= known and each.number * known + each.used <= size]
        if len(there) < len(segments):
            text = "cold tier: %s is shorter than it was: %d of %d segments are lost"
            log.error(text, self._file.path, len(segments) - len(there), len(segments))
        fit = {each.number: each for each in there if each.number < number}
        self._forget(index, (each for each in segments if each.number not in fit))
        if size > number * known:
            os.ftruncate(self._file.fd, number * known)
        index.set_number("segment bytes", known)
        self._index = index
        self._layout = Layout(number, known, fit.values())

    @staticmethod
    def _forget(index: Index, segments: Iterable[Segment]) -> None:
        for segment in segments:
            while not index.empty(segment)[1]:
                pass

    def _check_room(self, directory: Path) -> None:
        """A tier that is larger than ever needs room for it; one that was there already makes do with what there is."""
        had = self._index.number("capacity") or 0
        space = os.fstatvfs(self._file.fd)
        free = space.f_bavail * space.f_frsize + self._file.allocated_bytes()
        needed = self._layout.segments * self._layout.segment_bytes + self._floor_bytes
        if free < needed and self.capacity_bytes > had:
            raise ColdError(
                f"--cold {directory}: {free >> 20} MiB are free there, and {needed >> 20} MiB are needed "
                f"({self._floor_bytes >> 20} MiB of them are to be left free). Free some, or give less (cold_bytes)"
            )
        self._index.set_number("capacity", self.capacity_bytes)

    def _mark(self) -> None:
        if self._sound:
            places.mark_clean(self.path)

    def close(self) -> None:
        """After the last call of anything else. Again does nothing. Where a write hangs everything is left open, to the
        end of the process: a descriptor that is used again must not be written to."""
        if self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._resources.close()
            finally:
                self._lock.release()

    # ------------------------------------------------------------------ reading

    @property
    def direct(self) -> bool:
        return self._file.direct

    @property
    def read_fd(self) -> int:
        """For others to read from the file; this tier's."""
        return self._read_only.fd

    @property
    def pages(self) -> int:
        return self._index.pages()

    @property
    def largest_page(self) -> int:
        """Bytes. A larger one is never kept."""
        return self._layout.segment_bytes

    def present(self, namespace: bytes, hashes: Sequence[bytes], promised_until: float = 0.0) -> bytes:
        """One byte a page: 1 where it is here. Until `promised_until` (`time.monotonic()`) somebody counts on it: its segment
        is emptied later than its turn, as far as few others wait so."""
        places = self._find(namespace, hashes)
        for filling in {place.filling for place in places if place is not None} if promised_until else ():
            self._promised[filling] = max(promised_until, self._promised.get(filling, 0.0))
        return bytes(place is not None for place in places)

    def locate(self, namespace: bytes, hashes: Sequence[bytes], length: int) -> list[Place | None]:
        """Where these pages are, to be read now: they count as asked for. None for one that is not here in this length."""
        places = self._find(namespace, hashes)
        good = [place if place is not None and place.length == length else None for place in places]
        self._asked.more(namespace, [each for each, place in zip(hashes, good, strict=True) if place is not None])
        return good

    def often(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Which were asked for more than once lately: those belong into DRAM, and stay when their segment is emptied."""
        return [times >= _KEEP_AFTER for times in self._asked.times(namespace, hashes)]

    def read(
        self, namespace: bytes, wanted: Sequence[tuple[bytes, Place]], deadline: float, patience_s: float = math.inf
    ) -> Bodies:
        """Bodies of these pages (hash, place), in order, each proved; None for one that is damaged or does not come in time,
        and for all others when nothing has come for `patience_s`. A view is good until the next is asked for."""
        with contextlib.closing(self._blocks(namespace, wanted, deadline, patience_s)) as reading:
            for (_, place), view in zip(wanted, reading, strict=True):
                yield None if view is None else view[: place.length]

    def damaged(self, pages: Sequence[tuple[Key, Place]]) -> None:
        """Their bytes are not what they were: they are not found from here on, and forgotten with the next `write` or `sweep`.
        What was written over meanwhile is not damaged, and stays."""
        count = 0
        for key, place in pages:
            if self._find(key.namespace, [key.hash])[0] == place and len(self._bad) < _MOST_BAD:
                self._bad[key] = place
                count += 1
        self.counts.damaged += count
        if count:
            text = f"{count} pages were damaged and are forgotten. Look at the disk's health (smartctl -a, dmesg)"
            self._quiet(logging.ERROR, "damaged", f"cold tier {self.path}: {text}")

    def check(self, namespace: bytes, page_hash: bytes, offset: int, deadline: float) -> None:
        """Somebody has read this page at `offset`, and it was not right: read it, and forget it if it is damaged."""
        place = self._find(namespace, [page_hash])[0]
        if place is not None and place.offset == offset:
            for _ in self._blocks(namespace, [(page_hash, place)], deadline):
                pass

    def _find(self, namespace: bytes, hashes: Sequence[bytes]) -> list[Place | None]:
        try:
            with self._patience.call() as may:
                found = self._index.find(namespace, hashes) if may else None
        except Exception as error:
            self._fail("reading the index", error)
            return [None] * len(hashes)
        if found is None:
            self._quiet(logging.ERROR, "hangs", f"cold tier {self.path}: {_INDEX_HANGS}")
            return [None] * len(hashes)
        # Of a filling that is over, or past what was written: the index is right about neither when a disk was not.
        holds = self._layout.holds
        good = [place if place is not None and holds(place.offset, place.length, place.filling) else None for place in found]
        if self._bad:
            bad = [self._bad.get(Key(namespace, each)) for each in hashes]
            good = [place if place != worse else None for place, worse in zip(good, bad, strict=True)]
        return good

    # ------------------------------------------------------------------ writing

    def ready(self) -> bool:
        """Is there any use in writing now? Not for a while after the disk failed."""
        return time.monotonic() >= self._failed_until

    def here(self, bodies: Sequence[tuple[Key, int]]) -> list[bool]:
        """Which of these (page, checksum) need not be written: they are here, and the same."""
        by_namespace: dict[bytes, list[bytes]] = {}
        for key, _ in bodies:
            by_namespace.setdefault(key.namespace, []).append(key.hash)
        found = {namespace: iter(self._find(namespace, hashes)) for namespace, hashes in by_namespace.items()}
        places = [(next(found[key.namespace]), checksum) for key, checksum in bodies]
        return [place is not None and place.checksum == checksum for place, checksum in places]

    def write(self, bodies: Sequence[Body], since: int) -> list[bool]:
        """Write these, in as few and as large writes as it takes. Returns which can be found now: none of a namespace that was
        cleared after `clears` was `since`, which was before they were looked for."""
        done = [False] * len(bodies)
        if self.ready():
            with self._guarded("writing"):
                self._tidy()
                with self._noting:
                    numbers = [self._id_for(body.key.namespace, since) for body in bodies]
                at = 0
                while at < len(bodies):
                    end = self._write_some(bodies, numbers, at, done)
                    if end == at:
                        break
                    at = end
                self.problem = self._lasting
        self.counts.not_written += done.count(False)
        return done

    def _write_some(self, bodies: Sequence[Body], numbers: Sequence[int], first: int, done: list[bool]) -> int:
        """As many as the open segment takes, from `first` on: one write, one transaction. Returns where the next begin."""
        size = blocks(bodies[first].length)
        if size > self._layout.segment_bytes:
            self._too_large(size)
            return first + 1
        if size > self._layout.room() and not self._begin_segment(size):
            return first
        end, size = first, 0
        while end < len(bodies) and size + blocks(bodies[end].length) <= self._layout.room():
            size += blocks(bodies[end].length)
            end += 1
        some = bodies[first:end]
        with self._appending() as segment:
            done[first:end] = self._put(segment, self._append(segment, some, numbers[first:end]))
        self.counts.written += len(some)
        self.counts.written_bytes += size
        return end

    def _id_for(self, namespace: bytes, since: int) -> int:
        """0 for one that was cleared since: it must not come into being again by what was on its way."""
        if self.clears - since >= _MAX_CLEARED or self._cleared.get(namespace, 0) > since:
            return 0
        return self._index.id_of(namespace)

    @contextlib.contextmanager
    def _appending(self) -> Iterator[Segment]:
        """The open segment. The room of what then is not written, or not found, is used again."""
        segment = self._layout.open
        assert segment is not None
        used = segment.used
        try:
            yield segment
        except BaseException:
            self._layout.take_back(used)
            raise

    def _append(self, segment: Segment, bodies: Sequence[Body], numbers: Sequence[int]) -> list[tuple[int, Key, Place]]:
        """Write these behind one another. Returns what is to be put into the index."""
        assert all(len(body.view) == blocks(body.length) for body in bodies)
        offsets = [self._layout.append(body.length) for body in bodies]
        self._file.write(offsets[0], [body.view for body in bodies])
        self._file.forget(offsets[0], offsets[-1] + len(bodies[-1].view) - offsets[0])
        now = int(time.time())
        return [
            (number, body.key, Place(offset, segment.filling, body.length, body.checksum, now))
            for number, body, offset in zip(numbers, bodies, offsets, strict=True)
        ]

    def _too_large(self, size: int) -> None:
        least = size * LEAST_SEGMENTS >> 20
        text = (
            f"pages of {size >> 10} KiB are never kept: one of {self._layout.segment_bytes >> 10} KiB is the largest that this "
            f"tier takes. Stop the node, empty the tier (hicache-mooncake cold clear {self.path.parent} --all) and give it "
            f"{least + 1}mb or more (cold_bytes)"
        )
        self._lasting = self._lasting or text
        self._quiet(logging.WARNING, "too large", f"cold tier {self.path}: {text}")

    def _put(self, segment: Segment, records: Sequence[tuple[int, Key, Place]]) -> list[bool]:
        """In the index, for which the oldest pages make room if that takes it. Returns which are found now."""
        while True:
            try:
                with self._lock:
                    found = self._index.put(segment, [(number, key.hash, place) for number, key, place in records])
                    self._note(True, [key for (_, key, _), here in zip(records, found, strict=True) if here])
                return found
            except lmdb.MapFullError:
                if not self._empty_oldest():
                    with self._lock:
                        self._layout.seal()  # all of the index is of this one: it makes room the next time
                    raise

    def _begin_segment(self, size: int) -> bool:
        """Have an open segment with so much room. One is always left free: what is kept of the oldest can be written there."""
        if not self._have_free():
            return False
        with self._lock:
            self._layout.begin()
        if not self._layout.free and (oldest := self._oldest()) is not None:
            self._keep_some(oldest, self._layout.segment_bytes - size)
            self._empty(oldest)
        return True

    def _oldest(self) -> Segment | None:
        """The segment to be emptied next: the oldest in which nobody counts on a page, of the oldest few."""
        now, oldest = time.monotonic(), self._layout.oldest()
        for filling in [filling for filling, until in list(self._promised.items()) if until <= now]:
            del self._promised[filling]
        for segment in self._layout.oldest_few(max(_LEAST_PASSED_OVER + 1, self._layout.segments // _PASSED_OVER_SHARE)):
            if segment.filling not in self._promised:
                return segment
        return oldest

    def _have_free(self) -> bool:
        """A free segment, with room on the disk, the oldest one if there is no other. On a disk that is full it is not emptied:
        nothing would come of it."""
        while (number := self._layout.next_free()) is not None:
            if self._has_room(number):
                return True
            with self._lock:
                self._layout.lose(number)
        oldest = self._oldest()
        return oldest is not None and self._has_room(oldest.number) and self._empty(oldest)

    def _has_room(self, number: int) -> bool:
        size = self._layout.segment_bytes
        try:
            self._file.allocate(number * size, size, self._floor_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            text = f"the disk is full: it keeps {self._layout.used_bytes >> 20} MiB of pages and no more ({error.strerror})"
            self._quiet(logging.WARNING, "full", f"cold tier {self.path}: {text}")
            return False
        return True

    def _empty_oldest(self) -> bool:
        segment = self._oldest()
        return segment is not None and self._empty(segment)

    def _empty(self, segment: Segment) -> bool:
        if self._promised.pop(segment.filling, 0.0):
            self.counts.promises_broken += 1
        last = False
        while not last:
            with self._lock:
                gone, last = self._index.empty(segment)
                self._note(False, gone)
                if last:
                    self._layout.emptied(segment)
            self.counts.evicted += len(gone)
        self.counts.emptied += 1
        return True

    def _keep_some(self, old: Segment, most_bytes: int) -> None:
        """Write those pages of this segment anew that are asked for again and again, if they fit."""
        kept: list[tuple[int, Key, Place]] = []
        deadline = time.monotonic() + _KEEP_S
        with self._appending() as segment:
            for namespace, pages in self._to_keep(old, min(most_bytes, self._layout.keep_bytes)).items():
                wanted = [(key.hash, place) for _, key, place in pages]
                with contextlib.closing(self._blocks(namespace, wanted, deadline)) as reading:
                    for (number, key, place), view in zip(pages, reading, strict=True):
                        if view is not None:
                            kept += self._append(segment, [Body(key, view, place.length, place.checksum)], [number])
            if kept:
                self._put(segment, kept)
        self.counts.kept += len(kept)
        self.counts.kept_bytes += sum(blocks(place.length) for _, _, place in kept)

    def _to_keep(self, segment: Segment, most_bytes: int) -> dict[bytes, list[tuple[int, Key, Place]]]:
        """What is still found in a segment, and asked for, by namespace, with the id that this has."""
        found: dict[bytes, list[tuple[int, Key, Place]]] = {}
        for number, key in self._index.written(segment.filling):
            if self.often(key.namespace, [key.hash])[0]:
                place = self._find(key.namespace, [key.hash])[0]
                if place is not None and place.filling == segment.filling:
                    most_bytes -= blocks(place.length)
                    if most_bytes < 0:
                        break
                    found.setdefault(key.namespace, []).append((number, key, place))
        return found

    # ------------------------------------------------------------------ namespaces and housekeeping

    def clear(self, namespace: bytes, *, wait: bool = True) -> None:
        """Nothing of it is found from here on, after a restart neither: by when this returns, or, without `wait`, by the next
        `sweep` or `save_cleared`. The masters are told bit by bit, by `sweep`."""
        with self._noting:
            self.clears += 1
            self._cleared.pop(namespace, None)
            self._cleared[namespace] = self.clears
            if len(self._cleared) > _MAX_CLEARED:
                self._cleared.popitem(last=False)
            self._index.forget(namespace)
        if wait:
            self.save_cleared()

    def save_cleared(self) -> None:
        """Returns when all that was cleared so far stays cleared after a restart."""
        with self._lock, self._guarded("clearing a namespace"):
            self._index.save_cleared()

    def namespaces(self) -> list[bytes]:
        return self._index.namespaces()

    def sweep(self) -> bool:
        """What is due, every second or so. Returns whether there is more to do at once."""
        if not self.ready():
            return False
        with self._guarded("housekeeping"):
            self._tidy()
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_EVERY_S:
                self._looked_at = now
                self._look()
            with self._lock:
                gone = self._index.sweep(_SWEPT)
                self._note(False, gone or ())
            return gone is not None
        return False

    def _look(self) -> None:
        self._index.stale_readers()
        with self._lock:
            self._layout.regain()
            self._index.prune()
        if self._file.deleted or not (self.path / places.INDEX / "data.mdb").exists():
            self._lasting = f"{self.path} was deleted: what is written now is lost when this node ends. Restart it"
            self._problem("deleted", self._lasting)

    def _tidy(self) -> None:
        """What was left to the writer: to begin anew, to have clears outlive the process, and to forget damaged pages."""
        if not self._sound:
            self._begin_anew()
        bad = list(self._bad.items())
        with self._lock:
            self._index.save_cleared()
            if bad:
                self._note(False, self._index.drop(bad))
        for key, place in bad:
            if self._bad.get(key) == place:
                self._bad.pop(key, None)

    def _begin_anew(self) -> None:
        """The index is beyond use. Who still reads in it keeps it open until then."""
        now = time.monotonic()
        if now < self._anew_at:
            raise OSError(errno.EIO, "the index is damaged again")
        self._anew_at = now + _ANEW_EVERY_S
        with self._lock:
            places.put_aside(self.path)
            self._open_index(segment_bytes_for(self.capacity_bytes))
            self._index.set_number("capacity", self.capacity_bytes)
            self._sound = True
            self._bad.clear()
            with self._noting:
                self.life += 1
                self._gone.clear()
                self._changes.clear()
                self.changes_lost = True

    # ------------------------------------------------------------------ what the masters are told

    def drain_changes(self, limit: int) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
        """As `Store.drain_changes`."""
        with self._noting:
            last: dict[Key, bool] = {}
            for _ in range(min(limit, len(self._changes))):
                added, key = self._changes.popleft()
                last[key] = added
        return by_namespace(key for key, added in last.items() if added), by_namespace(
            key for key, added in last.items() if not added
        )

    def snapshot_parts(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """As `Store.snapshot_parts`. Needs no lock; ends early when the index cannot be read."""
        self.changes_lost = False
        with self._guarded("reading the index"):
            for part in self._index.records():
                told = [(namespace, rows["hash"][self._to_be_told(namespace, rows)].tobytes()) for namespace, rows in part]
                yield [(namespace, blob) for namespace, blob in told if blob]

    def _to_be_told(self, namespace: bytes, rows: Records) -> Mask:
        """As `_find`: not those of a filling that is over, nor the damaged ones."""
        good = self._layout.holds_each(rows["offset"], rows["length"], rows["filling"])
        bad = {key: place for key, place in list(self._bad.items()) if key.namespace == namespace}
        if bad:
            suspects = np.isin(rows["offset"], np.fromiter((place.offset for place in bad.values()), np.uint64))
            for at in np.flatnonzero(suspects):
                _, page_hash, *place = rows[at].tolist()
                good[at] &= bad.get(Key(namespace, page_hash)) != Place(*place)
        return good

    def take_gone(self) -> list[Key]:
        """What has left since the last call."""
        with self._noting:
            gone = list(self._gone)
            self._gone.clear()
        return gone

    def report(self) -> dict[str, int | float | str | bool]:
        counts = self.counts
        written = counts.written_bytes + counts.kept_bytes
        pages, index_bytes = self._size.get()
        return {
            "cold_pages": pages,
            "cold_used_bytes": self._layout.used_bytes,
            "cold_capacity_bytes": self._layout.segments * self._layout.segment_bytes,
            "cold_index_bytes": index_bytes,
            "cold_direct": self.direct,
            "cold_problem": _INDEX_HANGS if self._patience.over else self.problem,
            "cold_stuck_reads": self.reader.stuck,
            "cold_write_amplification": round(written / counts.written_bytes, 3) if counts.written_bytes else 1.0,
            **{f"cold_{name}": value for name, value in dataclasses.asdict(counts).items()},
        }

    def _size_now(self) -> tuple[int, int] | None:
        """Records in the index, and its bytes."""
        with self._patience.call() as may, self._guarded("reading the index"):
            if may:
                return self._index.pages(), self._index.file_bytes
        return None

    # ------------------------------------------------------------------ inside

    def _blocks(
        self, namespace: bytes, wanted: Sequence[tuple[bytes, Place]], deadline: float, patience_s: float = math.inf
    ) -> Bodies:
        """As `read`, in whole blocks."""
        bad: list[tuple[Key, Place]] = []
        reading = self.reader.read([(place.offset, place.length) for _, place in wanted], deadline, patience_s)
        try:
            for (page_hash, place), view in zip(wanted, reading, strict=True):
                if isinstance(view, memoryview):
                    if xxhash.xxh3_64_intdigest(view[: place.length], checksum_seed(namespace, page_hash)) == place.checksum:
                        yield view
                        continue
                    bad.append((Key(namespace, page_hash), place))
                else:
                    self.counts.unreadable += 1
                    if view is not None:
                        self._quiet(logging.ERROR, "reading", f"cold tier {self.path}: a page cannot be read: {view}")
                        bad.append((Key(namespace, page_hash), place))
                yield None
        finally:
            reading.close()
            if bad:
                self.damaged(bad)

    def _note(self, added: bool, pages: Iterable[Key]) -> None:
        pages = list(pages)
        with self._noting:
            if not added:
                self._gone.extend(pages)
            if self._track_changes and not self.changes_lost:
                self._changes.extend((added, key) for key in pages)
                if len(self._changes) > MAX_CHANGES:
                    self._changes.clear()
                    self.changes_lost = True

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """A disk or an index that fails is no reason to fail with it."""
        try:
            yield
        except Exception as error:
            self._fail(what, error)

    def _fail(self, what: str, error: Exception) -> None:
        self.counts.errors += 1
        self._failed_until = time.monotonic() + _RETRY_S
        if isinstance(error, DAMAGE):
            self._sound = False
        elif not isinstance(error, (OSError, lmdb.Error)):
            log.error("cold tier: %s failed", what, exc_info=error)
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        self._problem(what, f"{what} failed: {reason}. Tried again in {_RETRY_S:g} s; look at the disk ({_advice(error)})")

    def _problem(self, kind: str, text: str) -> None:
        self.problem = text
        self._quiet(logging.ERROR, kind, f"cold tier {self.path}: {text}")


def by_namespace(pages: Iterable[Key]) -> list[tuple[bytes, bytes]]:
    """(namespace, blob of hashes), as on the wire."""
    grouped: dict[bytes, list[bytes]] = {}
    for namespace, page_hash in pages:
        grouped.setdefault(namespace, []).append(page_hash)
    return [(namespace, b"".join(hashes)) for namespace, hashes in grouped.items()]


def _advice(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "the file system is read-only: mount -o remount,rw"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "df, df -i, quota"
    return "dmesg, smartctl -a"
