"""What a node holds: index, allocation, pins, reservations and eviction as one state machine, without I/O, clocks or threads.

An object is one page of one namespace, as one body. Its record (namespace, full hash, length, checksum) lies here, never
before the body, so bodies stay page-aligned. An object becomes visible in `commit` and not before; memory is reused only when
nothing is pinned or reserved on it.

Objects of one group and one hash are the parts of one logical page: the shards of its ranks, its index, its windowed or
recurrent state. A part without the others restores nothing, so they have one place in the eviction order, a reader or a
writer of one keeps all, and damage to one ends all.

Owners are connections. Whatever an owner holds (pins, reservations) ends with `drop_owner`; pins also end by expiry.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

from hicache_mooncake.node.allocator import Allocator
from hicache_mooncake.protocol import FETCH, HASH_BYTES, HAVE, LOCAL, REMOTE, WAIT, WRITE, WRONG_LENGTH

_MAX_EVICTIONS_PER_ALLOCATION = 4096

OWN, GUEST, REPLICA = 0, 1, 2
"""What a page is to this node: its own; given away by another node and evicted before the own ones; a copy of what other nodes
hold as well, and evicted before all others."""
_EVICTED = (REPLICA, GUEST, OWN)


class LogicalPage:
    """The parts of one page that this node holds. `writers` counts reservations for more of them, `rank` is OWN, GUEST or
    REPLICA. Each of `parts` has `namespace`, `hash`, `offset`, `length` and `checksum`; all of it is for reading only."""

    __slots__ = ("group", "hash", "parts", "rank", "writers")

    def __init__(self, group: bytes, page_hash: bytes) -> None:
        self.group = group
        self.hash = page_hash
        self.parts: list[Entry] = []
        self.writers = 0
        self.rank = OWN

    @property
    def in_use(self) -> bool:
        return self.writers > 0 or any(part.pins for part in self.parts)


class Entry:
    """The record of one object. `pins` counts readers; a `dead` entry has left the index and waits for its last reader."""

    __slots__ = ("checksum", "dead", "hash", "home", "length", "namespace", "offset", "page", "pins")

    def __init__(
        self,
        home: dict[bytes, Entry],
        page: LogicalPage,
        namespace: bytes,
        page_hash: bytes,
        offset: int,
        length: int,
        checksum: int,
    ) -> None:
        self.home = home
        """The dict that holds it: its namespace's in the index, until that namespace is cleared."""
        self.page = page
        self.namespace = namespace
        self.hash = page_hash
        self.offset = offset
        self.length = length
        self.checksum = checksum
        self.pins = 0
        self.dead = False


@dataclasses.dataclass(slots=True)
class PinSet:
    owner: int
    entries: list[Entry]
    expires: float


@dataclasses.dataclass(slots=True)
class Reservation:
    """Room for objects that are being written: parallel lists, one entry per WRITE key."""

    owner: int
    namespace: bytes
    length: int
    pages: list[LogicalPage]
    offsets: list[int]
    batch: bytes = b""
    """Hashes of the whole batch that these are of, in the order of its chain."""
    rank: int = OWN
    claimed: bool = False
    """The bodies come from another node, and whoever else wants them waits for this."""


@dataclasses.dataclass(slots=True)
class Stats:
    """Counters since start; every one only grows."""

    lookups: int = 0
    lookup_keys: int = 0
    hit_keys: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    had: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    refused: int = 0
    discarded: int = 0
    expired_pins: int = 0
    abandoned: int = 0
    """Reservations that ended without a commit (a writer died or gave up)."""
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)


class Store:
    """Not thread-safe: the service holds one lock around every call. All calls are O(keys asked) plus evictions."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        high_watermark: float = 0.95,
        low_watermark: float = 0.90,
        pin_seconds: float = 30.0,
        claim_seconds: float = 4.0,
        max_pinned_share: float = 0.5,
        track_changes: bool = False,
        max_changes: int = 1_000_000,
        max_objects: int = 0,
    ) -> None:
        self.allocator = Allocator(capacity_bytes)
        self.high_bytes = int(self.allocator.capacity * high_watermark)
        self.low_bytes = int(self.allocator.capacity * low_watermark)
        self.pin_seconds = pin_seconds
        self.claim_seconds = claim_seconds
        self.max_pinned_share = max_pinned_share
        self.stats = Stats()
        self.pinned_bytes = 0
        self._index: dict[bytes, dict[bytes, Entry]] = {}
        self._pages: dict[bytes, dict[bytes, LogicalPage]] = {}
        """By group and hash, those with parts or writers."""
        self._orders: list[OrderedDict[LogicalPage, None]] = [OrderedDict(), OrderedDict(), OrderedDict()]
        """By rank, those with parts, least recently used first. Touched leaf first, so that the head of a chain outlives its
        tail."""
        self.max_objects = max_objects
        self._objects = 0
        self._reserved = 0
        self._pins: dict[int, PinSet] = {}
        self._reservations: dict[int, Reservation] = {}
        self._claims: dict[tuple[bytes, bytes], tuple[int, float]] = {}
        """(namespace, hash) of what claimed reservations are for: the transaction, and until when others wait for it."""
        self._condemned: deque[dict[bytes, Entry]] = deque()
        """Namespaces that were cleared: out of the index, their objects still to be taken apart by `sweep`."""
        self._next_id = 1
        self._evicting = False
        self._track_changes = track_changes
        self._max_changes = max_changes
        self._changes: deque[tuple[bool, bytes, bytes]] = deque()
        self.changes_lost = False
        """More changes than `max_changes` were waiting: the next reader of changes must send a snapshot instead."""

    # ------------------------------------------------------------------ lookups

    @property
    def objects(self) -> int:
        return self._objects

    @property
    def used_bytes(self) -> int:
        return self.allocator.used

    def present(self, namespace: bytes, hashes: bytes, *, touch: bool = True) -> bytes:
        """One byte per key: 1 where this node holds it. Touches leaf first; pins nothing."""
        objects = self._index.get(namespace)
        count = len(hashes) // HASH_BYTES
        self.stats.lookups += 1
        self.stats.lookup_keys += count
        if not objects:
            return bytes(count)
        get = objects.get
        found = [get(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]
        if touch:
            for entry in reversed(found):
                if entry is not None:
                    self._orders[entry.page.rank].move_to_end(entry.page)
        column = bytes([entry is not None for entry in found])
        self.stats.hit_keys += column.count(1)
        return column

    def locate(
        self, owner: int, namespace: bytes, hashes: bytes, length: int, now: float, *, touch: bool = True
    ) -> tuple[int, bytearray, list[int], list[int]]:
        """Pin what is here: (pin id, status column, offsets, checksums). The pin ends by release, expiry or its owner's end."""
        objects = self._index.get(namespace) or {}
        count = len(hashes) // HASH_BYTES
        status, where, checksum = bytearray(count), [0] * count, [0] * count
        pinned: list[Entry] = []
        budget = int(self.allocator.capacity * self.max_pinned_share)
        for i in range(count):
            entry = objects.get(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES])
            if entry is None:
                continue
            if entry.length != length:
                status[i] = WRONG_LENGTH
                self.stats.reasons["wrong_length"] += 1
                continue
            if entry.pins == 0 and self.pinned_bytes + length > budget and self.pinned_bytes > 0:
                self.stats.reasons["pin_limit"] += 1
                continue
            self._pin(entry)
            pinned.append(entry)
            status[i], where[i], checksum[i] = LOCAL, entry.offset, entry.checksum
        if touch:
            for entry in reversed(pinned):
                self._orders[entry.page.rank].move_to_end(entry.page)
        pin = self._new_id()
        if pinned:
            self._pins[pin] = PinSet(owner, pinned, now + self.pin_seconds)
        return pin, status, where, checksum

    def release(self, owner: int, pin: int, *, loaded: int = 0) -> None:
        """Ends a pin of this owner; `loaded` of its objects arrived. Ids it does not hold are ignored: pins expire."""
        held = self._pins.get(pin)
        if held is None or held.owner != owner:
            return
        del self._pins[pin]
        loaded = min(loaded, len(held.entries))
        self.stats.loaded += loaded
        self.stats.loaded_bytes += loaded * held.entries[0].length
        self._unpin(held.entries)

    def expire_pins(self, now: float) -> int:
        """Ends the pins whose time is over. Their readers verify what they read, so the worst is a miss."""
        ended = [pin for pin, held in self._pins.items() if held.expires <= now]
        for pin in ended:
            self._unpin(self._pins.pop(pin).entries)
        self.stats.expired_pins += len(ended)
        return len(ended)

    # ------------------------------------------------------------------ stores

    def reserve(
        self,
        owner: int,
        namespace: bytes,
        hashes: bytes,
        length: int,
        group: bytes = b"",
        *,
        rank: int = OWN,
        evict: bool = True,
    ) -> tuple[int, bytearray, list[int]]:
        """Room for the keys that are not here: (transaction, status column, offsets). Evicts as needed, unless told not to,
        but no part of the pages that are being written. Without a group the namespace is its own.

        Pages become of `rank`; one that has parts of a better rank keeps that. A guest that is stored here is an own page.

        After the first key without room the rest is REFUSED too: without that page nobody could use them.
        """
        objects = self._index.get(namespace) or {}
        count = len(hashes) // HASH_BYTES
        status, where = bytearray(count), [0] * count
        reservation = Reservation(owner, namespace, length, [], [], hashes, rank)
        each = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        found = [objects.get(page_hash) for page_hash in each]
        present = [entry for entry in found if entry is not None and entry.length == length]
        for entry in present:
            self._pin(entry)  # not evicted to make room for its own suffix
        missing = [i for i, entry in enumerate(found) if entry is None or entry.length != length]
        pages = [self._written(group or namespace, each[i]) for i in missing]
        offsets = self._allocate_many(length, len(missing), evict)
        for i, offset in zip(missing, offsets, strict=False):
            status[i], where[i] = WRITE, offset
            reservation.offsets.append(offset)
        reservation.pages = pages[: len(offsets)]
        for page in pages[len(offsets) :]:
            self._not_written(page)
        end = missing[len(offsets)] if len(offsets) < len(missing) else count
        self.stats.refused += len(missing) - len(offsets)
        for i, known in enumerate(found[:end]):
            if known is not None and known.length == length:
                status[i] = HAVE
        self._unpin(present)
        for entry in reversed(present):
            if not entry.dead:
                if rank == OWN and entry.page.rank == GUEST:
                    self._rank(entry.page, OWN)
                self._orders[entry.page.rank].move_to_end(entry.page)
        self.stats.had += len(present)
        txn = self._new_id()
        if reservation.offsets:
            self._reservations[txn] = reservation
            self._reserved += len(reservation.offsets)
        return txn, status, where

    def claim(
        self, owner: int, namespace: bytes, hashes: bytes, length: int, now: float, group: bytes = b"", batch: bytes = b""
    ) -> tuple[int, bytearray, list[int]]:
        """Room for pages that one reader fetches from another node for all readers of this one: (transaction, a column of
        FETCH, WAIT where another has claimed the page, REMOTE where there is no room, offsets of the FETCH ones). `batch`: all
        pages of the read, in the order of their chain.

        The pages become replicas. Commit the transaction like that of `reserve`; the claims end with it, or after
        `claim_seconds`: the reader is frozen.
        """
        count = len(hashes) // HASH_BYTES
        each = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        first = {page_hash: i for i, page_hash in reversed(list(enumerate(each)))}
        free = [
            i for i, page_hash in enumerate(each) if first[page_hash] == i and not self._is_claimed(namespace, page_hash, now)
        ]
        column = bytearray([WAIT]) * count
        wanted = b"".join(each[i] for i in free)
        txn, status, where = self.reserve(owner, namespace, wanted, length, group, rank=REPLICA)
        for i, reserved in zip(free, status, strict=True):
            column[i] = FETCH if reserved == WRITE else REMOTE
        reservation = self._reservations.get(txn)
        if reservation is not None:
            reservation.claimed = True
            reservation.batch = batch or hashes
            self._claims.update({(namespace, page.hash): (txn, now + self.claim_seconds) for page in reservation.pages})
        return txn, column, [offset for offset, reserved in zip(where, status, strict=True) if reserved == WRITE]

    def claimed(self, namespace: bytes, hashes: bytes, now: float) -> bool:
        """Is any of these pages being fetched for all?"""
        if not self._claims:
            return False
        each = range(0, len(hashes), HASH_BYTES)
        return any(self._is_claimed(namespace, hashes[at : at + HASH_BYTES], now) for at in each)

    def _is_claimed(self, namespace: bytes, page_hash: bytes, now: float) -> bool:
        claim = self._claims.get((namespace, page_hash))
        return claim is not None and claim[1] > now

    def commit(self, owner: int, txn: int, ok: bytes, checksums: Iterable[int]) -> bytes:
        """Make the whole ones visible, give the others' memory back. One byte per WRITE key: 1 where it is now stored.

        A key that somebody else committed meanwhile counts as stored; the copy written here is given back.
        """
        reservation = self._reservations.get(txn)
        if reservation is None or reservation.owner != owner:
            return bytes(len(ok))
        del self._reservations[txn]
        self._reserved -= len(reservation.offsets)
        self._end_claims(txn, reservation)
        result = bytearray(len(reservation.offsets))
        fresh: list[Entry] = []
        column = zip(reservation.pages, reservation.offsets, ok, checksums, strict=False)
        done = 0
        for i, (page, offset, whole, checksum) in enumerate(column):
            done = i + 1
            page_hash = page.hash
            if not whole:
                self.allocator.free(offset)
                self.stats.abandoned += 1
                continue
            result[i] = 1
            objects = self._index.setdefault(reservation.namespace, {})
            existing = objects.get(page_hash)
            if existing is not None:
                if existing.length == reservation.length:
                    self.allocator.free(offset)
                    continue
                self._remove(existing)
                objects = self._index.setdefault(reservation.namespace, {})
            entry = Entry(objects, page, reservation.namespace, page_hash, offset, reservation.length, checksum)
            objects[page_hash] = entry
            if not page.parts:
                page.rank = reservation.rank
                self._orders[page.rank][page] = None
            elif reservation.rank < page.rank:
                self._rank(page, reservation.rank)
            page.parts.append(entry)
            self._objects += 1
            fresh.append(entry)
            self.stats.stored += 1
            self.stats.stored_bytes += entry.length
            self._note(True, entry)
        for offset in reservation.offsets[done:]:
            self.allocator.free(offset)
            self.stats.abandoned += 1
        for page in reservation.pages:
            self._not_written(page)
        if fresh:
            self.touch(reservation.namespace, reservation.batch)
        return bytes(result)

    # ------------------------------------------------------------------ removal

    def drop_owner(self, owner: int) -> None:
        """A connection ended: its pins and its uncommitted reservations are over."""
        for pin in [pin for pin, held in self._pins.items() if held.owner == owner]:
            self._unpin(self._pins.pop(pin).entries)
        for txn in [txn for txn, held in self._reservations.items() if held.owner == owner]:
            reservation = self._reservations.pop(txn)
            self._reserved -= len(reservation.offsets)
            self._end_claims(txn, reservation)
            for page, offset in zip(reservation.pages, reservation.offsets, strict=True):
                self._not_written(page)
                self.allocator.free(offset)
            self.stats.abandoned += len(reservation.offsets)

    def discard(self, namespace: bytes, hashes: bytes, reason: str) -> int:
        """Forget objects whose bytes are not what they should be, and the other parts of their pages. Returns how many
        objects went."""
        dropped = 0
        for at in range(0, len(hashes), HASH_BYTES):
            entry = self._index.get(namespace, {}).get(hashes[at : at + HASH_BYTES])
            if entry is not None:
                dropped += self._remove_page(entry.page)
        self.stats.discarded += dropped
        self.stats.reasons[reason] += dropped
        return dropped

    def clear(self, namespace: bytes) -> int:
        """Forget one namespace at once; returns how many objects that was. Their memory comes back through `sweep`, and that of
        objects being read when the last reader is done."""
        home = self._index.pop(namespace, None)
        if home is None:
            return 0
        self._condemned.append(home)
        return len(home)

    def sweep(self, limit: int = 256) -> int:
        """Take at most `limit` objects of cleared namespaces apart. Returns how many."""
        swept = 0
        while swept < limit and self._condemned:
            home = self._condemned[0]
            if not home:
                self._condemned.popleft()
                continue
            self._remove(next(iter(home.values())))
            swept += 1
        return swept

    def evict_to_low(self, limit: int = 256) -> int:
        """Background eviction above the high watermark, at most `limit` objects a call. Returns how many went."""
        if self.allocator.used <= self.high_bytes and not self._evicting:
            return 0
        self._evicting = self.allocator.used > self.low_bytes
        gone = 0
        while gone < limit and self.allocator.used > self.low_bytes and self._evict_one():
            gone += 1
        if gone == 0 or self.allocator.used <= self.low_bytes:
            self._evicting = False
        return gone

    # ------------------------------------------------------------------ whole pages: what is given away, what is kept

    @property
    def free_below_low(self) -> int:
        """Bytes that can come before the low watermark is reached."""
        return max(0, self.low_bytes - self.allocator.used)

    def coldest(self, limit: int, rank: int | None = None) -> list[LogicalPage]:
        """At most `limit` pages that nobody reads or writes, in the order in which they would be evicted: of one rank, or of
        all. Changes nothing."""
        orders = [self._orders[rank]] if rank is not None else [self._orders[each] for each in _EVICTED]
        free = (page for order in orders for page in order if not page.in_use)
        return list(itertools.islice(free, limit))

    def hottest(self, limit: int, rank: int | None = None) -> list[LogicalPage]:
        """At most `limit` pages that nobody writes, most recently used first, the head of a chain before its tail."""
        orders = [self._orders[rank]] if rank is not None else [self._orders[each] for each in reversed(_EVICTED)]
        whole = (page for order in orders for page in reversed(order) if not page.writers)
        return list(itertools.islice(whole, limit))

    def pin_pages(self, owner: int, pages: Iterable[LogicalPage], now: float) -> int:
        """Pins all parts of these pages, those that are still held; ends like the pin of `locate`. Returns the pin's id."""
        entries = [part for page in pages for part in page.parts if not part.dead]
        pin = self._new_id()
        for entry in entries:
            self._pin(entry)
        if entries:
            self._pins[pin] = PinSet(owner, entries, now + self.pin_seconds)
        return pin

    def remove_page(self, page: LogicalPage, parts: Sequence[Entry] | None = None) -> int:
        """Forget a page; memory comes back when its last reader is done. Returns how many objects went: none when it is gone
        already, more of it is being written, or, with `parts`, it has not exactly these any longer."""
        if page.writers or (parts is not None and (len(parts) != len(page.parts) or any(a not in page.parts for a in parts))):
            return 0
        return self._remove_page(page)

    def set_rank(self, page: LogicalPage, rank: int) -> None:
        """Make it OWN, GUEST or REPLICA. It counts as used now among those of its new rank. Nothing for a page that is gone."""
        if page.parts and page.rank != rank:
            self._rank(page, rank)

    # ------------------------------------------------------------------ directory

    def drain_changes(self, limit: int) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
        """Up to `limit` changes since the last call, in an order in which the last word on a key is right: pairs of
        (namespace, blob of hashes), added and removed, no key in both."""
        last: dict[tuple[bytes, bytes], bool] = {}
        for _ in range(min(limit, len(self._changes))):
            added, namespace, page_hash = self._changes.popleft()
            last[namespace, page_hash] = added
        return _group(key for key, added in last.items() if added), _group(key for key, added in last.items() if not added)

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        """Every key held, as pairs of (namespace, blob of hashes). Pending changes stay: another master may need them."""
        self.changes_lost = False
        return [(namespace, b"".join(objects)) for namespace, objects in self._index.items() if objects]

    def namespaces(self) -> dict[bytes, int]:
        return {namespace: len(objects) for namespace, objects in self._index.items()}

    # ------------------------------------------------------------------ inside

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _allocate_many(self, length: int, count: int, evict: bool) -> list[int]:
        """Room for up to `count` bodies, within the cap on objects."""
        if not count:
            return []
        if self.max_objects:
            while evict and self._objects + self._reserved + count > self.max_objects:
                if not self.sweep(1) and not self._evict_one():
                    break
            count = min(count, max(0, self.max_objects - self._objects - self._reserved))
        offsets = self.allocator.allocate_many(length, count) if count else []
        while evict and len(offsets) < count:
            offset = self._allocate(length)
            if offset is None:
                break
            offsets.append(offset)
        return offsets

    def _allocate(self, length: int) -> int | None:
        """Room for one body; cleared objects make it first, then least recently used ones, until there is a block that fits."""
        if length > self.allocator.capacity:
            return None
        for _ in range(_MAX_EVICTIONS_PER_ALLOCATION):
            offset = self.allocator.allocate(length)
            if offset is not None:
                return offset
            if not self.sweep(1) and not self._evict_one():
                return None
        return None

    def _evict_one(self) -> bool:
        """Forget the page that goes first of those that nobody reads or writes. Those in use met on the way move up."""
        for rank in _EVICTED:
            order = self._orders[rank]
            for _ in range(len(order)):
                page = next(iter(order))
                if page.in_use:
                    order.move_to_end(page)
                    continue
                self.stats.evicted_bytes += sum(part.length for part in page.parts)
                self.stats.evicted += self._remove_page(page)
                return True
        return False

    def _rank(self, page: LogicalPage, rank: int) -> None:
        del self._orders[page.rank][page]
        page.rank = rank
        self._orders[rank][page] = None

    def _remove_page(self, page: LogicalPage) -> int:
        parts = list(page.parts)
        for part in parts:
            self._remove(part)
        return len(parts)

    def _remove(self, entry: Entry) -> None:
        """Out of the index now; memory when the last reader is done."""
        del entry.home[entry.hash]
        if not entry.home and self._index.get(entry.namespace) is entry.home:
            del self._index[entry.namespace]
        page = entry.page
        page.parts.remove(entry)
        self._objects -= 1
        if not page.parts:
            del self._orders[page.rank][page]
            self._drop_if_empty(page)
        entry.dead = True
        self._note(False, entry)
        if entry.pins == 0:
            self.allocator.free(entry.offset)

    def touch(self, namespace: bytes, hashes: bytes) -> None:
        """These pages of a chain, head first, count as used now, those that are here: the head last, so that it goes last."""
        objects = self._index.get(namespace)
        if not objects:
            return
        for at in range(len(hashes) - HASH_BYTES, -1, -HASH_BYTES):
            entry = objects.get(hashes[at : at + HASH_BYTES])
            if entry is not None:
                self._orders[entry.page.rank].move_to_end(entry.page)

    def _end_claims(self, txn: int, reservation: Reservation) -> None:
        for page in reservation.pages if reservation.claimed else ():
            key = (reservation.namespace, page.hash)
            if self._claims.get(key, (0, 0.0))[0] == txn:  # else another reader has taken it over
                del self._claims[key]

    def _written(self, group: bytes, page_hash: bytes) -> LogicalPage:
        """The logical page, with one more writer."""
        pages = self._pages.setdefault(group, {})
        page = pages.get(page_hash)
        if page is None:
            page = pages[page_hash] = LogicalPage(group, page_hash)
        page.writers += 1
        return page

    def _not_written(self, page: LogicalPage) -> None:
        page.writers -= 1
        self._drop_if_empty(page)

    def _drop_if_empty(self, page: LogicalPage) -> None:
        if page.parts or page.writers:
            return
        pages = self._pages[page.group]
        if pages.pop(page.hash, None) is not None and not pages:
            del self._pages[page.group]

    def _pin(self, entry: Entry) -> None:
        if entry.pins == 0:
            self.pinned_bytes += entry.length
        entry.pins += 1

    def _unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.pins -= 1
            if entry.pins == 0:
                self.pinned_bytes -= entry.length
                if entry.dead:
                    self.allocator.free(entry.offset)

    def _note(self, added: bool, entry: Entry) -> None:
        if not self._track_changes or self.changes_lost:
            return
        if not added and entry.hash in self._index.get(entry.namespace, ()):
            return  # stored anew since its namespace was cleared
        if len(self._changes) >= self._max_changes:
            self._changes.clear()
            self.changes_lost = True
            return
        self._changes.append((added, entry.namespace, entry.hash))

    def entries(self) -> Iterator[Entry]:
        """Every object, those of the pages that go first first."""
        return (part for rank in _EVICTED for page in self._orders[rank] for part in page.parts)

    def validate(self) -> None:
        """Everything that must hold between two calls; tests run it after every event."""
        self.allocator.validate()
        homes = [*self._index.values(), *self._condemned]
        indexed = [entry for objects in homes for entry in objects.values()]
        assert all(entry.home is objects for objects in homes for entry in objects.values())
        assert sorted(map(id, indexed)) == sorted(map(id, self.entries())), "index and eviction order hold the same objects"
        assert len(indexed) == self._objects
        pages = [page for pages in self._pages.values() for page in pages.values()]
        assert all(self._pages[page.group][page.hash] is page for page in pages)
        for rank, order in enumerate(self._orders):
            ranked = {id(page) for page in pages if page.parts and page.rank == rank}
            assert ranked == set(map(id, order)), "pages with parts can be evicted, each by its rank"
        assert self._reserved == sum(len(held.offsets) for held in self._reservations.values())
        assert not self.max_objects or self._objects + self._reserved <= self.max_objects
        writers = Counter(id(page) for held in self._reservations.values() for page in held.pages)
        assert all((page.parts or page.writers) and page.writers == writers[id(page)] for page in pages)
        assert all(part.page is page and part.hash == page.hash for page in pages for part in page.parts)
        assert set(writers) <= set(map(id, pages))
        for (namespace, page_hash), (txn, _) in self._claims.items():
            claimant = self._reservations[txn]
            assert claimant.claimed
            assert claimant.namespace == namespace
            assert page_hash in {page.hash for page in claimant.pages}
        for namespace, objects in self._index.items():
            assert objects, "an empty namespace has no dict"
            for page_hash, entry in objects.items():
                assert (entry.namespace, entry.hash) == (namespace, page_hash)
                assert not entry.dead
        pins: Counter[int] = Counter()
        by_id: dict[int, Entry] = {}
        for held in self._pins.values():
            for entry in held.entries:
                pins[id(entry)] += 1
                by_id[id(entry)] = entry
        for entry in indexed:
            by_id[id(entry)] = entry
        for key, entry in by_id.items():
            assert entry.pins == pins[key], f"{entry.pins} pins counted, {pins[key]} held"
        assert self.pinned_bytes == sum(entry.length for entry in by_id.values() if entry.pins)
        blocks = [entry.offset for entry in by_id.values()]
        blocks += [offset for held in self._reservations.values() for offset in held.offsets]
        assert len(blocks) == len(set(blocks)), "two objects share a block"
        assert sorted(blocks) == sorted(self.allocator._size_of_used), "a block without an owner, or an owner without a block"


def _group(keys: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    grouped: dict[bytes, list[bytes]] = {}
    for namespace, page_hash in keys:
        grouped.setdefault(namespace, []).append(page_hash)
    return [(namespace, b"".join(hashes)) for namespace, hashes in grouped.items()]
