"""The index of the cold tier, in LMDB: which page lies where, of which length and with which checksum.

One environment, one process, one writer at a time (`ColdTier` sees to it). Readers' transactions last for one call, on any
thread, and everything is copied out before they end. A batch of pages is one transaction, synced: after `kill -9` and after a
loss of power the index is as of one of them, and what it says of bodies is proved by their checksums.

The map is made as large as it will ever be (that is address space, not memory), so it never grows under a reader. A quarter of
it is for records: a transaction copies each page that it changes, one that forgets as well, and what it frees is of use to the
next but one. So a full index can always be emptied.

pages     id of the namespace, hash -> where
written   filling of a segment, batch -> the keys that were written there
segments  number -> filling, bytes used
names     namespace -> id. A namespace that is cleared loses its id; what has that id is junk
meta      what cannot change while there are pages
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import lmdb
import numpy as np

from hicache_mooncake.cold.layout import Segment
from hicache_mooncake.protocol import HASH_BYTES, NAMESPACE_BYTES

_PLACE = struct.Struct("<QIIQI")
_SEGMENT = struct.Struct("<IQ")
_NUMBER = struct.Struct(">I")
"""Big-endian, so that keys are in the order of their numbers."""
_PAIR = struct.Struct(">II")
_KEY_BYTES = _NUMBER.size + HASH_BYTES
RECORD = np.dtype(
    [
        ("number", ">u4"),
        ("hash", "V32"),
        ("offset", "<u8"),
        ("filling", "<u4"),
        ("length", "<u4"),
        ("checksum", "<u8"),
        ("written_at", "<u4"),
    ]
)
"""A key of `pages` and what is under it, one behind the other."""
Records = np.ndarray[Any, np.dtype[Any]]
_MAX_READERS = 2048
_BYTES_A_PAGE = 200
"""At the most: leaves of the tree are half full at the worst, and `written` has the key once more."""
_SPARE = 4
_LEAST_PAGE_BYTES = 16 << 10
_LEAST_MAP_BYTES = 64 << 20
_LOOKING_BYTES = 1 << 40
"""Of the map of one who looks: more than the writer's will ever be."""
_LAST_NUMBER = (1 << 32) - 1
_SNAPSHOT_KEYS = 16_384
_ROW_KEYS = 1024
"""Of `written`, at the most: so much is forgotten at once at the least."""
_EMPTIED_KEYS = 4096

DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    getattr(lmdb, "ProblemError", lmdb.CorruptedError),
)
"""An index that raises one of these is not going to recover."""


class Place(NamedTuple):
    """A body: where in the file, in which filling of its segment, how long, xxh3-64 (seeded as in DRAM), when it was written in
    seconds of the system's clock."""

    offset: int
    filling: int
    length: int
    checksum: int
    written_at: int


class Key(NamedTuple):
    namespace: bytes
    hash: bytes


def map_bytes_for(capacity_bytes: int) -> int:
    """More than what an index of so many bytes of pages takes, unless they are tiny; then the index bounds their number."""
    return max(_LEAST_MAP_BYTES, capacity_bytes // _LEAST_PAGE_BYTES * _BYTES_A_PAGE * _SPARE)


class Index:
    """Raises lmdb.Error: one of DAMAGE for an index that is beyond use, lmdb.MapFullError when there is no room for a batch, of
    which nothing is there then."""

    def __init__(self, path: Path, map_bytes: int, *, writable: bool = True) -> None:
        """`writable` False: beside the process that writes, to look."""
        size = _size(path / "data.mdb")
        self._limit = map_bytes // _SPARE
        self._env = lmdb.open(
            str(path),
            map_size=max(map_bytes, size + map_bytes) if writable else _LOOKING_BYTES,
            max_dbs=5,
            max_readers=_MAX_READERS,
            mode=0o600,
            readahead=False,
            meminit=False,
            readonly=not writable,
            create=writable,
        )
        self._dbs = self._meta, self._names, self._segments, self._pages, self._written = tuple(
            self._env.open_db(name, create=writable) for name in (b"meta", b"names", b"segments", b"pages", b"written")
        )
        self._ids: dict[bytes, int] = {}
        self._namespaces: dict[int, bytes] = {}
        self._unsaved: set[int] = set()
        """Ids of namespaces of which nothing has been written yet."""
        self._condemned: dict[int, bytes] = {}
        """Ids that namespaces had, of which there may be junk. No name: they were cleared in an earlier life."""
        self._to_clear: deque[tuple[int, bytes]] = deque()
        """Cleared, and not yet so in the file."""
        with self._begin(self._names) as txn:
            for name, value in txn.cursor():
                self._known(bytes(name), _NUMBER.unpack(value)[0])
        with self._begin(self._meta) as txn:
            last = _NUMBER.unpack(txn.get(b"last id", _NUMBER.pack(0)))[0]
        numbers = self._numbers()
        self._condemned.update((number, b"") for number in numbers if number not in self._namespaces)
        self._last_id = max(last, *numbers, *self._namespaces, 0)

    def close(self) -> None:
        self._env.close()

    # ------------------------------------------------------------------ reading, on any thread

    def find(self, namespace: bytes, hashes: Sequence[bytes]) -> list[Place | None]:
        """Where these pages are, as of the last transaction."""
        number = self._ids.get(namespace)
        if number is None:
            return [None] * len(hashes)
        prefix = _NUMBER.pack(number)
        with self._begin(self._pages) as txn:
            get = txn.get
            found = [get(prefix + each) for each in hashes]
            return [None if value is None else Place(*_PLACE.unpack(value)) for value in found]

    def number(self, name: str) -> int | None:
        """What `set_number` was given."""
        with self._begin(self._meta) as txn:
            value = txn.get(name.encode())
            if value is None:
                return None
            if not bytes(value).isdigit():
                raise lmdb.CorruptedError(f"the index says that {name} is {value!r}")
            return int(value)

    def segments(self) -> list[Segment]:
        with self._begin(self._segments) as txn:
            return [Segment(_NUMBER.unpack(key)[0], *_SEGMENT.unpack(value)) for key, value in txn.cursor()]

    def pages(self) -> int:
        """How many records there are, junk included."""
        with self._begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    @property
    def file_bytes(self) -> int:
        """Of the index's own file."""
        info = self._env.info()
        return int((info["last_pgno"] + 1) * self._env.stat()["psize"])

    @property
    def live_bytes(self) -> int:
        """Of them, those that hold something."""
        with self._begin() as txn:
            return self._live_bytes(txn)

    def namespaces(self) -> list[bytes]:
        return list(self._ids)

    def records(self, keys_at_once: int = _SNAPSHOT_KEYS) -> Iterator[list[tuple[bytes, Records]]]:
        """Every page of every namespace that was not cleared, in parts, by namespace, as arrays of RECORD. Each part is as of
        its own moment, and read by a transaction of its own."""
        after = b""
        while True:
            with self._begin(self._pages) as txn:
                cursor = txn.cursor()
                found = cursor.set_range(after) if after else cursor.first()
                if found and cursor.key() == after:
                    found = cursor.next()
                there = cast("Iterable[tuple[bytes, bytes]]", cursor if found else ())
                raw = list(itertools.chain.from_iterable(itertools.islice(there, keys_at_once)))
                if not set(map(len, raw[::2])) <= {_KEY_BYTES} or not set(map(len, raw[1::2])) <= {_PLACE.size}:
                    raise struct.error("of another length")
                if raw and raw[-2] <= after:
                    raise lmdb.CorruptedError("the index is not in order")
            if not raw:
                return
            after = raw[-2]
            rows = np.frombuffer(b"".join(raw), RECORD)
            numbers, first = np.unique(rows["number"], return_index=True)
            names = map(self._namespaces.get, numbers.tolist())
            spans = itertools.pairwise([*first.tolist(), len(rows)])
            part = [(name, rows[at:end]) for name, (at, end) in zip(names, spans, strict=True) if name is not None]
            if part:
                yield part

    def entries(self, keys_at_once: int = _SNAPSHOT_KEYS) -> Iterator[list[tuple[Key, Place]]]:
        """The same as objects, which takes ten times as long."""
        for part in self.records(keys_at_once):
            yield [(Key(namespace, row[1]), Place(*row[2:])) for namespace, rows in part for row in rows.tolist()]

    def written(self, filling: int) -> list[tuple[int, Key]]:
        """What was written in this filling, as far as it can still be named, with the ids that namespaces have."""
        with self._begin(self._written) as txn:
            keys = [key for _, blob in _rows(txn.cursor(), filling) for key in _split(blob)]
        named = [(_NUMBER.unpack_from(key)[0], self._key(key)) for key in keys]
        return [(number, key) for number, key in named if key is not None]

    def stale_readers(self) -> int:
        """Give back what processes that died had; how many that were."""
        return int(self._env.reader_check())

    # ------------------------------------------------------------------ namespaces

    def id_of(self, namespace: bytes) -> int:
        """The namespace's id, given to it now if it has none. Never one that is in the file already."""
        number = self._ids.get(namespace)
        if number is None:
            number = self._last_id = self._last_id + 1
            self._unsaved.add(number)
            self._known(namespace, number)
        return number

    def forget(self, namespace: bytes) -> None:
        """Its pages are not found from here on; after a restart neither when `save_cleared` has been called. On any thread."""
        number = self._ids.pop(namespace, None)
        if number is not None:
            self._condemned[number] = namespace  # before it loses its name: who empties a segment meanwhile knows it by one
            self._namespaces.pop(number, None)
            self._to_clear.append((number, namespace))

    # ------------------------------------------------------------------ writing, by one thread at a time

    def set_number(self, name: str, value: int) -> None:
        with self._begin(self._meta, write=True) as txn:
            txn.put(name.encode(), b"%d" % value)

    def save_cleared(self) -> None:
        due = list(self._to_clear)
        if due:
            with self._begin(self._names, write=True) as txn:
                for number, namespace in due:
                    _delete_name(txn, number, namespace)
            for _ in due:
                self._to_clear.popleft()

    def sweep(self, limit: int) -> list[Key] | None:
        """Forget at most so many pages of namespaces that were cleared: those that are not found any more by that, or None when
        there is nothing left to do."""
        condemned = list(self._condemned.items())
        if not condemned:
            return None
        gone: list[Key] = []
        done: list[int] = []
        seen = 0
        with self._begin(self._pages, write=True) as txn:
            cursor = txn.cursor()
            for number, namespace in condemned:
                prefix = _NUMBER.pack(number)
                more = cursor.set_range(prefix)
                while more and seen < limit and cursor.key()[: _NUMBER.size] == prefix:
                    gone.append(Key(namespace, bytes(cursor.key())[_NUMBER.size :]))
                    seen += 1
                    more = cursor.delete()
                if seen >= limit:
                    break
                done.append(number)
        for number in done:
            del self._condemned[number]
        return self._not_anew(gone)

    def put(self, segment: Segment, records: Sequence[tuple[int, bytes, Place]]) -> list[bool]:
        """Pages (id of the namespace, hash, place) that have been written to this segment: one transaction. Returns which are
        found now: not those whose namespace was cleared since it was asked for its id, or that came without one (0)."""
        live = [number in self._namespaces for number, _, _ in records]
        rows = [
            (_NUMBER.pack(number) + each, _PLACE.pack(*place))
            for (number, each, place), lives in zip(records, live, strict=True)
            if lives
        ]
        named = self._unsaved & {number for number, _, _ in records}
        with self._begin(write=True) as txn:
            if self._live_bytes(txn) > self._limit:
                raise lmdb.MapFullError("the index has as many pages as it may")
            for number in named:
                namespace = self._namespaces.get(number)
                if namespace is not None:  # it may be cleared at any time
                    txn.put(namespace, _NUMBER.pack(number), db=self._names)
                    txn.put(b"last id", _NUMBER.pack(self._last_id), db=self._meta)
            txn.cursor(self._pages).putmulti(rows)
            row = _next_row(txn.cursor(self._written), segment.filling)
            for at in range(0, len(rows), _ROW_KEYS):
                blob = b"".join(key for key, _ in rows[at : at + _ROW_KEYS])
                txn.put(_PAIR.pack(segment.filling, row), blob, db=self._written)
                row += 1
            txn.put(_NUMBER.pack(segment.number), _SEGMENT.pack(segment.filling, segment.used), db=self._segments)
        self._unsaved -= named
        return live

    def empty(self, segment: Segment, keys_at_once: int = _EMPTIED_KEYS) -> tuple[list[Key], bool]:
        """Forget a segment and what is still found in it, a part of it at a time: those keys, and whether that was all."""
        gone: list[Key] = []
        seen = 0
        with self._begin(write=True) as txn:
            rows = []
            for row, blob in _rows(txn.cursor(self._written), segment.filling):
                rows.append((row, _split(blob)))
                seen += len(rows[-1][1])
                if seen >= keys_at_once:
                    break
            for row, keys in rows:
                for key in keys:
                    value = txn.get(key, db=self._pages)
                    if value is not None and Place(*_PLACE.unpack(value)).filling == segment.filling:
                        txn.delete(key, db=self._pages)
                        number = _NUMBER.unpack_from(key)[0]
                        gone.append(Key(self._namespaces.get(number) or self._condemned.get(number, b""), key[_NUMBER.size :]))
                txn.delete(_PAIR.pack(segment.filling, row), db=self._written)
            last = seen < keys_at_once
            if last:
                txn.delete(_NUMBER.pack(segment.number), db=self._segments)
        return self._not_anew(gone), last

    def drop(self, damaged: Iterable[tuple[Key, Place]]) -> list[Key]:
        """These are damaged: forget them, unless they have been written anew meanwhile. Which were forgotten."""
        gone: list[Key] = []
        with self._begin(self._pages, write=True) as txn:
            for key, place in damaged:
                number = self._ids.get(key.namespace)
                raw = b"" if number is None else _NUMBER.pack(number) + key.hash
                value = txn.get(raw) if raw else None
                if value is not None and Place(*_PLACE.unpack(value)) == place:
                    txn.delete(raw)
                    gone.append(key)
        return gone

    def prune(self) -> None:
        """Forget the names of namespaces that have no pages. Not between `id_of` and `put`."""
        used = set(self._numbers())
        unused = [(number, namespace) for namespace, number in list(self._ids.items()) if number not in used]
        if unused:
            with self._begin(self._names, write=True) as txn:
                for number, namespace in unused:
                    _delete_name(txn, number, namespace)
            for number, namespace in unused:
                self._ids.pop(namespace, None)
                self._namespaces.pop(number, None)
                self._unsaved.discard(number)

    def compact(self, path: Path) -> None:
        """Write the file anew, without what is free in it, and be done with this one: close it next."""
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="compact-") as place:
            self._env.copy(place, compact=True)
            with open(Path(place) / "data.mdb", "rb") as file:
                os.fsync(file.fileno())
            (Path(place) / "data.mdb").replace(path / "data.mdb")

    # ------------------------------------------------------------------ inside

    @contextlib.contextmanager
    def _begin(self, db: lmdb._Database | None = None, *, write: bool = False) -> Iterator[lmdb.Transaction]:
        """One transaction. A record that does not have the form of one is as good as a damaged file."""
        try:
            with self._env.begin(db=db, write=write) as txn:
                yield txn
        except struct.error as error:
            raise lmdb.CorruptedError(f"a record of the index is not one: {error}") from error

    def _live_bytes(self, txn: lmdb.Transaction) -> int:
        stats = [txn.stat(db) for db in self._dbs]
        return sum(each["psize"] * (each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"]) for each in stats)

    def _numbers(self) -> list[int]:
        """Ids of which there are pages."""
        found: list[int] = []
        with self._begin(self._pages) as txn:
            cursor = txn.cursor()
            more = cursor.first()
            while more:
                number = _NUMBER.unpack_from(cursor.key())[0]
                if found and number <= found[-1]:
                    raise lmdb.CorruptedError("the index is not in order")
                found.append(number)
                more = cursor.set_range(_NUMBER.pack(number + 1)) if number < _LAST_NUMBER else False
        return found

    def _known(self, namespace: bytes, number: int) -> None:
        self._namespaces[number] = namespace
        self._ids[namespace] = number

    def _key(self, raw: bytes) -> Key | None:
        """None: its namespace was cleared."""
        namespace = self._namespaces.get(_NUMBER.unpack_from(raw)[0])
        return None if namespace is None else Key(namespace, raw[_NUMBER.size :])

    def _not_anew(self, gone: Iterable[Key]) -> list[Key]:
        """Those that are not found by another record: pages of a namespace that was cleared may have been stored anew."""
        by_namespace: dict[bytes, list[bytes]] = {}
        for key in gone:
            if key.namespace:
                by_namespace.setdefault(key.namespace, []).append(key.hash)
        return [
            Key(namespace, each)
            for namespace, hashes in by_namespace.items()
            for each, place in zip(hashes, self.find(namespace, hashes), strict=True)
            if place is None
        ]


def _delete_name(txn: lmdb.Transaction, number: int, namespace: bytes) -> None:
    """Unless the namespace has another id by now."""
    if txn.get(namespace) == _NUMBER.pack(number):
        txn.delete(namespace)


def _rows(cursor: lmdb.Cursor, filling: int) -> Iterator[tuple[int, bytes]]:
    """(batch, its keys) of one filling."""
    if not cursor.set_range(_PAIR.pack(filling, 0)):
        return
    for key, blob in cursor:
        of, row = _PAIR.unpack(key)
        if of != filling:
            return
        yield row, bytes(blob)


def _next_row(cursor: lmdb.Cursor, filling: int) -> int:
    found = cursor.prev() if cursor.set_range(_PAIR.pack(filling + 1, 0)) else cursor.last()
    of, row = _PAIR.unpack(cursor.key()) if found else (0, 0)
    return int(row) + 1 if of == filling else 0


def _split(blob: bytes) -> list[bytes]:
    if len(blob) % _KEY_BYTES:
        raise struct.error(f"{len(blob)} bytes of keys")
    return [blob[at : at + _KEY_BYTES] for at in range(0, len(blob), _KEY_BYTES)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


assert NAMESPACE_BYTES == 16
assert RECORD.itemsize == _KEY_BYTES + _PLACE.size
