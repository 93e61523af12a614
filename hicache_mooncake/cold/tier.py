"""The cold tier of a node: pages written as they leave DRAM, found again after any end of the process.

A body is written first, the index after it, and what the index says is only ever believed when the bytes have the checksum
that they had in DRAM. So a write that was cut short, a segment that was written over under a reader, a damaged disk and an
index that is behind are all the same: a miss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import xxhash

from hicache_mooncake import keys
from hicache_mooncake.cold.asked import Asked
from hicache_mooncake.cold.health import index_is_sound
from hicache_mooncake.cold.index import Index, Key, Place, map_bytes_for
from hicache_mooncake.cold.layout import Layout, Segment, blocks, segment_bytes_for
from hicache_mooncake.cold.pages_file import ColdError, PagesFile
from hicache_mooncake.cold.reading import Bodies, Reader
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.quiet import QuietLog

log = logging.getLogger(__name__)

FORMAT = 1
"""Of the file and the index. What another one left is never touched."""
FLOOR_BYTES = 1 << 30
MAX_CHANGES = 1_000_000
_RETRY_S = 5.0
_KEEP_S = 5.0
"""For reading what is kept of a segment that is emptied."""
_KEEP_AFTER = 2
_LOOK_EVERY_S = 60.0
_MAX_CLEARED = 4096
_SWEPT = 4096
"""Pages of cleared namespaces that are forgotten at once."""


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


def directory_name() -> str:
    return f"pages-{FORMAT}.{keys.FORMAT}"


class ColdTier:
    """`write`, `sweep` and `save` are for one thread at a time; everything else for any. Nothing raises after `open`: a disk
    that fails makes misses, is counted, and is tried again later."""

    def __init__(self, directory: Path, capacity_bytes: int, *, floor_bytes: int = FLOOR_BYTES, direct: bool = True) -> None:
        """Opens what is there, or makes it. Raises ColdError with a sentence for the operator."""
        self.path = directory / directory_name()
        self.capacity_bytes = capacity_bytes
        self.counts = Counts()
        self.changes_lost = False
        self._floor_bytes = floor_bytes
        self._quiet = QuietLog(log)
        self._lock = threading.Lock()
        """Around what is written to the index, the layout and the changes."""
        self._changes: deque[tuple[bool, Key]] = deque()
        self._gone: deque[Key] = deque(maxlen=MAX_CHANGES)
        self.clears = 0
        """How many there were: a batch to be written begins by noting it."""
        self._cleared: OrderedDict[bytes, int] = OrderedDict()
        """Namespaces cleared lately: the how manieth clear it was."""
        self._asked = Asked()
        self._failed_until = float("-inf")
        self._looked_at = time.monotonic()
        self.problem = ""
        with contextlib.ExitStack() as opened:
            try:
                self._open(directory, direct, opened)
            except OSError as error:
                raise ColdError(f"--cold {directory}: {error.strerror or error}") from error
            except lmdb.Error as error:
                raise ColdError(f"--cold {directory}: the index cannot be opened: {error}") from error
            self._resources = opened.pop_all()

    def _open(self, directory: Path, direct: bool, opened: contextlib.ExitStack) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _report_others(directory, self.path.name)
        self.path.mkdir(mode=0o700, exist_ok=True)
        owner = self.path.stat()
        if owner.st_uid != os.getuid() or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ColdError(f"--cold {directory}: {self.path} belongs to another user or may be written by others")
        opened.callback(os.close, _locked(self.path / "lock", directory))
        try:
            segment_bytes = segment_bytes_for(self.capacity_bytes)
        except ValueError as error:
            raise ColdError(f"cold_bytes: {error}") from error
        self._check_index()
        self._index = Index(self.path / "index", map_bytes_for(self.capacity_bytes))
        opened.callback(self._index.close)
        self._file = PagesFile(self.path / "pages", writable=True, direct=direct)
        opened.callback(self._file.close)
        self._adopt(segment_bytes)
        self._check_room(directory)
        self.reader = Reader(self._file)
        opened.callback(self.reader.close)
        (self.path / "unclean").touch(mode=0o600)

    def _check_index(self) -> None:
        """An index that a crash or a disk has damaged could end the process that reads it: it is looked at by another one."""
        index = self.path / "index"
        if (self.path / "unclean").exists() and index.exists() and not index_is_sound(index):
            aside = self.path / "index.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            index.rename(aside)
            log.error("cold tier: the index is damaged and was put aside as %s; the tier begins empty", aside)
        index.mkdir(mode=0o700, exist_ok=True)

    def _adopt(self, segment_bytes: int) -> None:
        """Go on with what is there. With another size of segments, or without its file, nothing of it can be found."""
        known = self._index.meta("segment bytes")
        segments = self._index.segments()
        if known is not None and segments:
            size = self._file_bytes()
            segment_bytes = int(known)
            lost = [each for each in segments if each.number * segment_bytes + each.used > size]
            for segment in lost:
                self._index.empty(segment)
            if lost:
                log.error(
                    "cold tier: %s is shorter than it was: %d of %d segments are lost",
                    self._file.path,
                    len(lost),
                    len(segments),
                )
                segments = [each for each in segments if each not in lost]
        else:
            self._index.set_meta({"segment bytes": str(segment_bytes).encode()})
        number = max(1, self.capacity_bytes // segment_bytes)
        beyond = sorted((each for each in segments if each.number >= number), key=lambda each: each.filling)
        for segment in beyond:  # the tier was larger
            self._index.empty(segment)
        if beyond:
            os.truncate(self._file.fd, number * segment_bytes)
        self._layout = Layout(number, segment_bytes, [each for each in segments if each.number < number])

    def _file_bytes(self) -> int:
        return os.fstat(self._file.fd).st_size

    def _check_room(self, directory: Path) -> None:
        space = os.fstatvfs(self._file.fd)
        free = space.f_bavail * space.f_frsize + self._file.allocated_bytes()
        needed = self._layout.segments * self._layout.segment_bytes + self._floor_bytes
        if free < needed:
            raise ColdError(
                f"--cold {directory}: {free >> 20} MiB are free there, and {needed >> 20} MiB are needed "
                f"({self._floor_bytes >> 20} MiB of them are to be left free). Free some, or give less (cold_bytes)"
            )

    def close(self) -> None:
        """After the last call of anything else."""
        with self._lock:
            with contextlib.suppress(OSError):
                (self.path / "unclean").unlink()
            self._resources.close()

    # ------------------------------------------------------------------ reading

    @property
    def direct(self) -> bool:
        return self._file.direct

    def present(self, namespace: bytes, hashes: Sequence[bytes]) -> bytes:
        """One byte a page: 1 where it is here."""
        return bytes(place is not None for place in self._find(namespace, hashes))

    def locate(self, namespace: bytes, hashes: Sequence[bytes], length: int) -> list[Place | None]:
        """Where these pages are, to be read now: they count as asked for. None for one that is not here in this length."""
        places = self._find(namespace, hashes)
        good = [place if place is not None and place.length == length else None for place in places]
        self._asked.more(namespace, [each for each, place in zip(hashes, good, strict=True) if place is not None])
        return good

    def often(self, namespace: bytes, page_hash: bytes) -> bool:
        """Was it asked for more than once lately? Then it belongs into DRAM."""
        return self._asked.times(namespace, page_hash) >= _KEEP_AFTER

    def read(self, namespace: bytes, wanted: Sequence[tuple[bytes, Place]], deadline: float) -> Bodies:
        """Bodies of these pages (hash, place), in order, each proved; None for one that is damaged or does not come in time. A
        view is good until the next one is asked for."""
        with contextlib.closing(self._blocks(namespace, wanted, deadline)) as reading:
            for (_, place), view in zip(wanted, reading, strict=True):
                yield None if view is None else view[: place.length]

    def damaged(self, pages: Sequence[tuple[Key, Place]]) -> None:
        """Their bytes are not what they were: forget them. What was written over meanwhile is not damaged, and stays."""
        with self._lock, self._guarded("forgetting damaged pages"):
            gone = self._index.drop(pages)
            self._note(False, gone)
            self.counts.damaged += len(gone)
            if gone:
                text = f"{len(gone)} pages were damaged and are forgotten. Look at the disk's health (smartctl -a, dmesg)"
                self._quiet(logging.ERROR, "damaged", f"cold tier {self.path}: {text}")

    def check(self, namespace: bytes, page_hash: bytes, offset: int, deadline: float) -> None:
        """Somebody has read this page at `offset`, and it was not right: read it, and forget it if it is damaged."""
        place = self._find(namespace, [page_hash])[0]
        if place is not None and place.offset == offset:
            for _ in self._blocks(namespace, [(page_hash, place)], deadline):
                pass

    def _find(self, namespace: bytes, hashes: Sequence[bytes]) -> list[Place | None]:
        try:
            found = self._index.find(namespace, hashes)
        except lmdb.Error as error:
            self._fail("reading the index", error)
            return [None] * len(hashes)
        # Of a filling that is over, or past what was written: the index is right about neither after a loss of power.
        layout = self._layout
        return [
            place
            if place is not None and layout.filling(place.offset) == place.filling and layout.holds(place.offset, place.length)
            else None
            for place in found
        ]

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
        if not self.ready():
            self.counts.not_written += len(bodies)
            return done
        with self._guarded("writing"):
            at = 0
            while at < len(bodies):
                end = self._write_some(bodies, at, done, since)
                if end == at:
                    break
                at = end
        self.counts.not_written += done.count(False)
        return done

    def _write_some(self, bodies: Sequence[Body], first: int, done: list[bool], since: int) -> int:
        """As many as the open segment takes, from `first` on: one write, one transaction. Returns where the next begin."""
        if blocks(bodies[first].length) > self._layout.segment_bytes:
            return first + 1  # no segment takes it
        if blocks(bodies[first].length) > self._layout.room() and not self._begin_segment():
            return first
        with self._lock:
            numbers = [self._id_for(body.key.namespace, since) for body in bodies[first:]]
        end, offsets = first, []
        segment = self._layout.open
        assert segment is not None
        while end < len(bodies) and blocks(bodies[end].length) <= self._layout.room():
            offsets.append(self._layout.append(bodies[end].length))
            end += 1
        some = bodies[first:end]
        self._file.write(offsets[0], [body.view for body in some])
        self._file.forget(offsets[0], offsets[-1] + blocks(some[-1].length) - offsets[0])
        now = int(time.time())
        records = [
            (number, body.key.hash, Place(offset, segment.filling, body.length, body.checksum, now))
            for number, body, offset in zip(numbers, some, offsets, strict=False)
        ]
        done[first:end] = self._put(segment, records)
        self.counts.written += len(some)
        self.counts.written_bytes += sum(len(body.view) for body in some)
        with self._lock:
            self._note(True, [body.key for body, found in zip(some, done[first:end], strict=True) if found])
        return end

    def _id_for(self, namespace: bytes, since: int) -> int:
        """0 for one that was cleared since: it must not come into being again by what was on its way."""
        if self.clears - since >= _MAX_CLEARED or self._cleared.get(namespace, 0) > since:
            return 0
        return self._index.id_of(namespace)

    def _put(self, segment: Segment, records: Sequence[tuple[int, bytes, Place]]) -> list[bool]:
        """In the index, for which the oldest pages make room if that takes it."""
        while True:
            try:
                with self._lock:
                    return self._index.put(segment, records)
            except lmdb.MapFullError:
                if not self._empty_oldest():
                    raise

    def _begin_segment(self) -> bool:
        """Have an open segment with room. One is always left free, into which what is kept of the oldest can be written."""
        number = self._layout.next_free()
        if number is None:
            return self._layout.oldest() is not None and self._empty_oldest() and self._begin_segment()
        try:
            self._file.allocate(number * self._layout.segment_bytes, self._layout.segment_bytes, self._floor_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            text = f"the disk is full: it keeps {self._layout.used_bytes >> 20} MiB of pages and no more ({error})"
            self._quiet(logging.WARNING, "full", f"cold tier {self.path}: {text}")
            with self._lock:
                self._layout.lose(number)
            return self._begin_segment()
        with self._lock:
            self._layout.begin()
        if not self._layout.free and self._layout.oldest() is not None:
            self._keep_some()
            self._empty_oldest()
        return self._layout.open is not None

    def _empty_oldest(self) -> bool:
        segment = self._layout.oldest()
        if segment is None:
            return False
        with self._lock:
            gone = self._index.empty(segment)
            self._layout.emptied(segment)
            self._note(False, gone)
        self.counts.emptied += 1
        self.counts.evicted += len(gone)
        return True

    def _keep_some(self) -> None:
        """Write those pages of the oldest segment anew that are asked for again and again."""
        segment, since = self._layout.oldest(), self.clears
        assert segment is not None
        by_namespace: dict[bytes, list[tuple[bytes, Place]]] = {}
        size = 0
        for key, place in self._of(segment):
            size += blocks(place.length)
            if size > self._layout.keep_bytes:
                break
            by_namespace.setdefault(key.namespace, []).append((key.hash, place))
        deadline = time.monotonic() + _KEEP_S
        for namespace, pages in by_namespace.items():
            with contextlib.closing(self._blocks(namespace, pages, deadline)) as reading:
                for (page_hash, place), view in zip(pages, reading, strict=True):
                    if view is not None and blocks(place.length) <= self._layout.room():
                        body = Body(Key(namespace, page_hash), view, place.length, place.checksum)
                        self._write_some([body], 0, [False], since)
                        self.counts.kept += 1
                        self.counts.kept_bytes += len(view)

    def _of(self, segment: Segment) -> Iterator[tuple[Key, Place]]:
        """What is still found in a segment, and asked for."""
        for key in self._index.written(segment.filling):
            if self.often(*key):
                place = self._index.find(key.namespace, [key.hash])[0]
                if place is not None and place.filling == segment.filling:
                    yield key, place

    # ------------------------------------------------------------------ namespaces and housekeeping

    def clear(self, namespace: bytes) -> None:
        """Nothing of it is found from here on, after a restart neither. The masters are told bit by bit, by `sweep`."""
        with self._lock, self._guarded("clearing a namespace"):
            self.clears += 1
            self._cleared.pop(namespace, None)
            self._cleared[namespace] = self.clears
            if len(self._cleared) > _MAX_CLEARED:
                self._cleared.popitem(last=False)
            self._index.clear(namespace)

    def sweep(self) -> bool:
        """What is due, every second or so. Returns whether there is more to do at once."""
        with self._guarded("housekeeping"):
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_EVERY_S:
                self._looked_at = now
                self._index.stale_readers()
                with self._lock:
                    self._layout.regain()
                if self._file.deleted:
                    text = f"{self._file.path} was deleted: what is written now is lost when this node ends. Restart it"
                    self._problem("deleted", text)
            with self._lock:
                gone = self._index.sweep(_SWEPT)
                self._note(False, gone or ())
            return gone is not None
        return False

    # ------------------------------------------------------------------ what the masters are told

    def drain_changes(self, limit: int) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
        """As `Store.drain_changes`."""
        with self._lock:
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
            for part in self._index.entries():
                yield by_namespace(key for key, _ in part)

    def take_gone(self) -> list[Key]:
        """What has left since the last call."""
        with self._lock:
            gone = list(self._gone)
            self._gone.clear()
        return gone

    def report(self) -> dict[str, int | float | str | bool]:
        counts = self.counts
        written = counts.written_bytes + counts.kept_bytes
        return {
            "cold_pages": self._index.pages(),
            "cold_used_bytes": self._layout.used_bytes,
            "cold_capacity_bytes": self._layout.segments * self._layout.segment_bytes,
            "cold_index_bytes": self._index.file_bytes,
            "cold_direct": self.direct,
            "cold_problem": self.problem,
            "cold_stuck_reads": self.reader.stuck,
            "cold_write_amplification": round(written / counts.written_bytes, 3) if counts.written_bytes else 1.0,
            **{f"cold_{name}": value for name, value in dataclasses.asdict(counts).items()},
        }

    # ------------------------------------------------------------------ inside

    def _blocks(self, namespace: bytes, wanted: Sequence[tuple[bytes, Place]], deadline: float) -> Bodies:
        """As `read`, in whole blocks."""
        bad: list[tuple[Key, Place]] = []
        reading = self.reader.read([(place.offset, place.length) for _, place in wanted], deadline)
        try:
            for (page_hash, place), view in zip(wanted, reading, strict=True):
                if view is None:
                    self.counts.unreadable += 1
                elif xxhash.xxh3_64_intdigest(view[: place.length], checksum_seed(namespace, page_hash)) != place.checksum:
                    bad.append((Key(namespace, page_hash), place))
                    view = None
                yield view
        finally:
            reading.close()
            if bad:
                self.damaged(bad)

    def _note(self, added: bool, pages: Iterable[Key]) -> None:
        pages = list(pages)
        if not added:
            self._gone.extend(pages)
        if self.changes_lost:
            return
        self._changes.extend((added, key) for key in pages)
        if len(self._changes) > MAX_CHANGES:
            self._changes.clear()
            self.changes_lost = True

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """A disk or an index that fails is no reason to fail with it."""
        try:
            yield
        except (OSError, lmdb.Error) as error:
            self._fail(what, error)

    def _fail(self, what: str, error: Exception) -> None:
        self.counts.errors += 1
        self._failed_until = time.monotonic() + _RETRY_S
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
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


def _locked(path: Path, directory: Path) -> int:
    """Raises ColdError where another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ColdError(
            f"--cold {directory}: another node uses it. Stop it, or give this one a directory of its own"
        ) from error
    return fd


def _report_others(directory: Path, own: str) -> None:
    """What another version has left stays, and takes room."""
    for other in sorted(directory.glob("pages-*")):
        if other.name != own:
            log.warning(
                "cold tier: %s is of another version and is left alone. Delete it when no node needs it any more", other
            )
