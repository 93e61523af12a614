"""The cold tier of a simulated node: a disk that outlives its process, and what of `ColdTier` the core, the link, the data port
and the movers need, in the same words. Writing takes time, and a kill in between leaves torn bodies that no index knows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hicache_mooncake.cold.index import Key
from hicache_mooncake.cold.tier import by_namespace
from hicache_mooncake.node.allocator import blocks_of
from hicache_mooncake.node.asking import ColdPlace
from hicache_mooncake.node.keeping import Batch
from hicache_mooncake.node.store import Entry

from .pages import Pool, checksum
from .world import Violation

if TYPE_CHECKING:
    from .node import SimNode

_SEGMENT = 4
"""Pages that are emptied at once."""
_SLOT_BYTES = 8192
_SEGMENT_BYTES = _SEGMENT * _SLOT_BYTES
_PASSED_OVER_SHARE = 8
_LOOK_S, _SWEEP_S = 0.05, 1.0
_OFTEN = 2


class Place(NamedTuple):
    offset: int
    length: int
    checksum: int


class Disk:
    """Bodies by their offsets, and the index as of its last commit."""

    def __init__(self, pages: int) -> None:
        self.slots = max(2, pages // _SEGMENT) * _SEGMENT
        self.bodies: dict[int, bytearray] = {}
        self.index: dict[Key, Place] = {}
        self.next = 0
        self.hanging = self.failing = self.full = False

    def read(self, at: int, size: int) -> bytes | None:
        """What lies there now; None: an error."""
        if self.failing:
            return None
        offset = at - at % _SLOT_BYTES
        body = self.bodies.get(offset, b"")
        return bytes(body[at - offset : at - offset + size]).ljust(size, b"\0")

    def damage(self, offset: int) -> None:
        self.bodies[offset][-1] ^= 1


class SimCold:
    """One life of a node's tier, and its writer."""

    def __init__(self, node: SimNode, disk: Disk) -> None:
        self.node, self.disk = node, disk
        self.changes_lost = False
        self.written = 0
        self._clears = 0
        self._cleared: dict[bytes, int] = {}
        self._to_clear: set[bytes] = set()
        """Cleared while the disk failed: it does not know yet."""
        self._bad: dict[Key, Place] = {}
        self._asked: Counter[Key] = Counter()
        self._promised: dict[int, float] = {}
        """Segments in which somebody counts on pages: until when."""
        self._changes: deque[tuple[bool, Key]] = deque()
        self._gone: list[Key] = []
        self._doubted: list[tuple[Key, int]] = []
        self._swept_at = 0.0

    # ------------------------------------------------------------------ reading

    def find(self, key: Key) -> Place | None:
        place = self.disk.index.get(key)
        return None if key.namespace in self._to_clear or self._bad.get(key) == place else place

    def present(self, namespace: bytes, hashes: Sequence[bytes], promised_until: float = 0.0) -> bytes:
        places = [self.find(Key(namespace, each)) for each in hashes]
        for place in places if promised_until else ():
            if place is not None:
                self._promised[place.offset // _SEGMENT_BYTES] = promised_until
        return bytes(place is not None for place in places)

    def locate(self, namespace: bytes, hashes: Sequence[bytes], length: int) -> list[ColdPlace | None]:
        found: list[ColdPlace | None] = []
        for key in [Key(namespace, each) for each in hashes]:
            place = self.find(key)
            if place is None or place.length != length:
                found.append(None)
                continue
            self._asked[key] += 1
            found.append(ColdPlace(place.offset, place.checksum, self._asked[key] >= _OFTEN))
        return found

    def proved(self, key: Key, place: ColdPlace, length: int) -> bytes | None:
        """The body, for another node."""
        body = self.disk.read(place.offset, length)
        if body is not None and checksum(Pool(key.namespace, b"", length), key.hash, body) == place.checksum:
            return body
        self._look_at(key, place.offset)
        return None

    def doubt(self, namespace: bytes, page_hash: bytes, offset: int) -> None:
        self._doubted.append((Key(namespace, page_hash), offset))

    def _look_at(self, key: Key, offset: int) -> None:
        place = self.find(key)
        if place is not None and place.offset == offset:
            body = self.disk.read(offset, place.length)
            if body is None or checksum(Pool(key.namespace, b"", place.length), key.hash, body) != place.checksum:
                self._bad[key] = place

    # ------------------------------------------------------------------ the writer, as node/cold_writer.py

    def start(self) -> None:
        self.node.process.later(_LOOK_S, self._look)

    def _look(self) -> None:
        if self.disk.hanging:
            self.node.process.later(_LOOK_S, self._look)
            return
        self._keep_house()
        node, keeping = self.node, self.node.core.keeping
        assert keeping is not None
        keeping.able = not self.disk.failing
        batch = keeping.next(node.cold_owner, node.process.now) if keeping.able else None
        if batch is None:
            node.process.later(_LOOK_S, self._look)
        else:
            self._write(batch, self._clears)

    def _keep_house(self) -> None:
        now = self.node.process.now
        for key, offset in self._doubted:
            self._look_at(key, offset)
        self._doubted.clear()
        if now - self._swept_at >= _SWEEP_S and not self.disk.failing:
            self._swept_at = now
            for namespace in self._to_clear:
                self._forget(namespace)
            self._to_clear.clear()
            self._drop(key for key, place in self._bad.items() if self.disk.index.get(key) == place)
            self._bad.clear()
            self.node.core.gone_cold(self._take_gone())
            self.node.link.notify()

    def _write(self, batch: Batch, since: int) -> None:
        here = [self._has(part) for part in batch.parts]
        new = [part for part, there in zip(batch.parts, here, strict=True) if not there]
        places = [self._slot(part) for part in new]
        for part, offset in zip(new, places, strict=True):
            if offset is not None:
                half = part.length // 2
                self.disk.bodies[offset][:half] = self.node.segment.read(part.offset, half)
        pause = self.node.world.rng.choice([0.001, 0.02, 0.2])
        self.node.process.later(pause, self._written, batch, since, here, new, places)

    def _written(self, batch: Batch, since: int, here: list[bool], new: list[Entry], places: list[int | None]) -> None:
        if self.disk.hanging:
            self.node.process.later(_LOOK_S, self._written, batch, since, here, new, places)
            return
        written: list[bool] = []
        for part, offset in zip(new, places, strict=True):
            ok = offset is not None and not self.disk.failing and self._cleared.get(part.namespace, 0) <= since
            if ok and offset is not None:
                self.disk.bodies[offset][:] = self.node.segment.read(part.offset, part.length)
                key = Key(part.namespace, part.hash)
                self.disk.index[key] = Place(offset, part.length, part.checksum)
                self._changes.append((True, key))
                self.written += 1
            written.append(ok)
        each = iter(written)
        keeping = self.node.core.keeping
        assert keeping is not None
        keeping.done(self.node.cold_owner, batch, [there or next(each) for there in here])
        self.node.core.gone_cold(self._take_gone())
        self.node.link.notify()
        self.node.validate()
        self.node.process.later(0.0, self._look)

    def _has(self, part: Entry) -> bool:
        place = self.find(Key(part.namespace, part.hash))
        return place is not None and place.checksum == part.checksum

    def _slot(self, part: Entry) -> int | None:
        """Where it is written to: where nothing lies that can be found. None: there is no room."""
        disk = self.disk
        if disk.failing or blocks_of(part.length) > _SLOT_BYTES or (disk.full and disk.next not in disk.bodies):
            return None
        if disk.next % _SEGMENT_BYTES == 0:
            for _ in range(disk.slots // _SEGMENT // _PASSED_OVER_SHARE):
                if self._promised.get(disk.next // _SEGMENT_BYTES, 0.0) <= self.node.process.now:
                    break
                disk.next = (disk.next + _SEGMENT_BYTES) % (disk.slots * _SLOT_BYTES)
            taken = range(disk.next, disk.next + _SEGMENT * _SLOT_BYTES)
            self._drop(key for key, place in disk.index.items() if place.offset in taken)
        offset = disk.next
        disk.bodies[offset] = bytearray(part.length)
        disk.next = (offset + _SLOT_BYTES) % (disk.slots * _SLOT_BYTES)
        return offset

    # ------------------------------------------------------------------ what goes

    def clear(self, namespace: bytes) -> None:
        self._clears += 1
        self._cleared[namespace] = self._clears
        if self.disk.failing or self.disk.hanging:
            self._to_clear.add(namespace)
        else:
            self._forget(namespace)

    def lose(self, key: Key) -> None:
        """Of one page, as if its bytes were damaged and that had been seen."""
        self._drop([key] if key in self.disk.index else [])

    def _forget(self, namespace: bytes) -> None:
        self._drop(key for key in self.disk.index if key.namespace == namespace)

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            del self.disk.index[key]
            self._changes.append((False, key))
            self._gone.append(key)

    def _take_gone(self) -> list[Key]:
        gone, self._gone = self._gone, []
        return gone

    # ------------------------------------------------------------------ what the masters are told

    def drain_changes(self, limit: int) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
        last: dict[Key, bool] = {}
        for _ in range(min(limit, len(self._changes))):
            added, key = self._changes.popleft()
            last[key] = added
        return by_namespace(key for key in last if last[key]), by_namespace(key for key in last if not last[key])

    def snapshot_parts(self) -> Iterator[list[tuple[bytes, bytes]]]:
        keys = list(self.disk.index)
        for at in range(0, len(keys), 7):
            yield by_namespace(key for key in keys[at : at + 7] if self.find(key) is not None)

    def validate(self) -> None:
        offsets = [place.offset for place in self.disk.index.values()]
        if len(offsets) != len(set(offsets)):
            raise Violation(f"{self.node.name}: two pages of the cold tier lie in one place")
