"""The index of the cold tier, in LMDB: which page lies where, of which length and with which checksum.

One environment, one process, one writer at a time (`ColdTier` sees to it). Readers' transactions last for one call, on any
thread, and everything is copied out before they end. A batch of pages is one transaction, synced: after `kill -9` and after a
loss of power the index is as of one of them, and what it says of bodies is proved by their checksums.

The map is made as large as it will ever be (that is address space, not memory), so it never grows under a reader.

pages     id of the namespace, hash -> where
written   filling of a segment, batch -> the keys that were written there
segments  number -> filling, bytes used
names     namespace -> id. A namespace that is cleared loses its id; what has that id is junk, and goes with its segment
meta      what cannot change while there are pages
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb

from hicache_mooncake.cold.layout import Segment
from hicache_mooncake.protocol import HASH_BYTES, NAMESPACE_BYTES

_PLACE = struct.Struct("<QIIQI")
_SEGMENT = struct.Struct("<IQ")
_NUMBER = struct.Struct(">I")
"""Big-endian, so that keys are in the order of their numbers."""
_PAIR = struct.Struct(">II")
_KEY_BYTES = _NUMBER.size + HASH_BYTES
_MAX_READERS = 2048
_BYTES_A_PAGE = 400
"""Of the map, at the most: leaves of the tree are half full at the worst, and `written` has the key once more."""
_LEAST_PAGE_BYTES = 16 << 10
_LEAST_MAP_BYTES = 64 << 20
_SNAPSHOT_KEYS = 16_384


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
    return max(_LEAST_MAP_BYTES, capacity_bytes // _LEAST_PAGE_BYTES * _BYTES_A_PAGE)


class Index:
    """Raises lmdb.Error; lmdb.MapFullError when there is no room for a batch, which is then not there at all."""

    def __init__(self, path: Path, map_bytes: int, *, writable: bool = True) -> None:
        """`writable` False: beside the process that writes, to look."""
        self._env = lmdb.open(
            str(path),
            map_size=map_bytes,
            max_dbs=5,
            max_readers=_MAX_READERS,
            mode=0o600,
            readahead=False,
            meminit=False,
            readonly=not writable,
            create=writable,
        )
        self._meta, self._names, self._segments, self._pages, self._written = (
            self._env.open_db(name, create=writable) for name in (b"meta", b"names", b"segments", b"pages", b"written")
        )
        self._ids: dict[bytes, int] = {}
        self._namespaces: dict[int, bytes] = {}
        self._condemned: deque[tuple[int, bytes]] = deque()
        with self._env.begin(db=self._names) as txn:
            for name, value in txn.cursor():
                self._known(bytes(name), _NUMBER.unpack(value)[0])

    def close(self) -> None:
        self._env.close()

    # ------------------------------------------------------------------ reading, on any thread

    def find(self, namespace: bytes, hashes: Sequence[bytes]) -> list[Place | None]:
        """Where these pages are, as of the last transaction."""
        number = self._ids.get(namespace)
        if number is None:
            return [None] * len(hashes)
        prefix = _NUMBER.pack(number)
        with self._env.begin(db=self._pages) as txn:
            get = txn.get
            found = [get(prefix + each) for each in hashes]
        return [None if value is None else Place(*_PLACE.unpack(value)) for value in found]

    def meta(self, name: str) -> bytes | None:
        with self._env.begin(db=self._meta) as txn:
            value = txn.get(name.encode())
            return None if value is None else bytes(value)

    def segments(self) -> list[Segment]:
        with self._env.begin(db=self._segments) as txn:
            return [Segment(_NUMBER.unpack(key)[0], *_SEGMENT.unpack(value)) for key, value in txn.cursor()]

    def pages(self) -> int:
        """How many records there are, junk included."""
        with self._env.begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    @property
    def file_bytes(self) -> int:
        """Of the index's own file."""
        info = self._env.info()
        return int((info["last_pgno"] + 1) * self._env.stat()["psize"])

    def namespaces(self) -> list[bytes]:
        return list(self._ids)

    def entries(self, keys_at_once: int = _SNAPSHOT_KEYS) -> Iterator[list[tuple[Key, Place]]]:
        """Every page of every namespace that was not cleared, in parts. Each part is as of its own moment."""
        after = b""
        while True:
            part: list[tuple[Key, Place]] = []
            with self._env.begin(db=self._pages) as txn:
                cursor = txn.cursor()
                found = cursor.set_range(after) if after else cursor.first()
                seen = 0
                for raw, value in cursor if found else ():
                    key = bytes(raw)
                    if key == after:
                        continue
                    seen += 1
                    after = key
                    named = self._key(key)
                    if named is not None:
                        part.append((named, Place(*_PLACE.unpack(value))))
                    if seen == keys_at_once:
                        break
            if part:
                yield part
            if seen < keys_at_once:
                return

    def written(self, filling: int) -> list[Key]:
        """What was written in this filling, as far as it can still be named."""
        with self._env.begin(db=self._written) as txn:
            keys = [key for _, blob in _rows(txn.cursor(), filling) for key in _split(blob)]
        return [named for named in map(self._key, keys) if named is not None]

    def stale_readers(self) -> int:
        """Give back what processes that died had; how many that were."""
        return int(self._env.reader_check())

    # ------------------------------------------------------------------ writing, on one thread

    def set_meta(self, values: dict[str, bytes]) -> None:
        with self._env.begin(write=True, db=self._meta) as txn:
            for name, value in values.items():
                txn.put(name.encode(), value)

    def id_of(self, namespace: bytes) -> int:
        """The namespace's id, given to it now if it has none. Ids are never given twice."""
        number = self._ids.get(namespace)
        if number is None:
            with self._env.begin(write=True) as txn:
                last = txn.get(b"last id", db=self._meta)
                number = 1 + (0 if last is None else _NUMBER.unpack(last)[0])
                txn.put(b"last id", _NUMBER.pack(number), db=self._meta)
                txn.put(namespace, _NUMBER.pack(number), db=self._names)
            self._known(namespace, number)
        return number

    def clear(self, namespace: bytes) -> None:
        """Its pages are not found from here on, whatever happens."""
        number = self._ids.get(namespace)
        if number is not None:
            with self._env.begin(write=True, db=self._names) as txn:
                txn.delete(namespace)
            del self._ids[namespace]
            del self._namespaces[number]
            self._condemned.append((number, namespace))

    def sweep(self, limit: int) -> list[Key] | None:
        """Forget at most so many pages of namespaces that were cleared: those that are not found any more by that, or None when
        there is nothing left to do. What a process leaves undone goes with its segments."""
        if not self._condemned:
            return None
        number, namespace = self._condemned[0]
        gone: list[bytes] = []
        with self._env.begin(write=True, db=self._pages) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(_NUMBER.pack(number))
            while more and len(gone) < limit and cursor.key()[: _NUMBER.size] == _NUMBER.pack(number):
                gone.append(bytes(cursor.key())[_NUMBER.size :])
                more = cursor.delete()
        if len(gone) < limit:
            self._condemned.popleft()
        here = self.find(namespace, gone)  # stored anew since
        return [Key(namespace, each) for each, place in zip(gone, here, strict=True) if place is None]

    def put(self, segment: Segment, records: Sequence[tuple[int, bytes, Place]]) -> list[bool]:
        """Pages (id of the namespace, hash, place) that have been written to this segment: one transaction. Returns which are
        found now: not those whose namespace was cleared since it was asked for its id, or that came without one (0)."""
        live = [number in self._namespaces for number, _, _ in records]
        rows = [(_NUMBER.pack(number) + each, _PLACE.pack(*place)) for number, each, place in records]
        rows = [row for row, lives in zip(rows, live, strict=True) if lives]
        with self._env.begin(write=True) as txn:
            pages = txn.cursor(self._pages)
            pages.putmulti(rows)
            last = max((row for row, _ in _rows(txn.cursor(self._written), segment.filling)), default=-1)
            txn.put(_PAIR.pack(segment.filling, last + 1), b"".join(key for key, _ in rows), db=self._written)
            txn.put(_NUMBER.pack(segment.number), _SEGMENT.pack(segment.filling, segment.used), db=self._segments)
        return live

    def empty(self, segment: Segment) -> list[Key]:
        """Forget a segment and what is still found in it: those keys."""
        gone: list[Key] = []
        with self._env.begin(write=True) as txn:
            rows = [(row, _split(blob)) for row, blob in _rows(txn.cursor(self._written), segment.filling)]
            for row, keys in rows:
                for key in keys:
                    value = txn.get(key, db=self._pages)
                    if value is not None and Place(*_PLACE.unpack(value)).filling == segment.filling:
                        txn.delete(key, db=self._pages)
                        named = self._key(key)
                        if named is not None:
                            gone.append(named)
                txn.delete(_PAIR.pack(segment.filling, row), db=self._written)
            txn.delete(_NUMBER.pack(segment.number), db=self._segments)
        return gone

    def drop(self, damaged: Iterable[tuple[Key, Place]]) -> list[Key]:
        """These are damaged: forget them, unless they have been written anew meanwhile. Which were forgotten."""
        gone: list[Key] = []
        with self._env.begin(write=True, db=self._pages) as txn:
            for key, place in damaged:
                number = self._ids.get(key.namespace)
                raw = b"" if number is None else _NUMBER.pack(number) + key.hash
                value = txn.get(raw) if raw else None
                if value is not None and Place(*_PLACE.unpack(value)) == place:
                    txn.delete(raw)
                    gone.append(key)
        return gone

    # ------------------------------------------------------------------ inside

    def _known(self, namespace: bytes, number: int) -> None:
        self._ids[namespace] = number
        self._namespaces[number] = namespace

    def _key(self, raw: bytes) -> Key | None:
        """None: its namespace was cleared."""
        namespace = self._namespaces.get(_NUMBER.unpack_from(raw)[0])
        return None if namespace is None else Key(namespace, raw[_NUMBER.size :])


def _rows(cursor: lmdb.Cursor, filling: int) -> Iterator[tuple[int, bytes]]:
    """(batch, its keys) of one filling."""
    if not cursor.set_range(_PAIR.pack(filling, 0)):
        return
    for key, blob in cursor:
        of, row = _PAIR.unpack(key)
        if of != filling:
            return
        yield row, bytes(blob)


def _split(blob: bytes) -> list[bytes]:
    return [blob[at : at + _KEY_BYTES] for at in range(0, len(blob), _KEY_BYTES)]


assert NAMESPACE_BYTES == 16
