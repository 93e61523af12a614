"""What a node holds: index, allocation, pins, reservations and eviction as one state machine, without I/O, clocks or threads.

An object is one page of one namespace, as one body. Its record (namespace, full hash, length, checksum) lies here, never
before the body, so bodies stay page-aligned. An object becomes visible in `commit` and not before; memory is reused only when
nothing is pinned or reserved on it.

Objects of one group and one hash are the parts of one logical page: the shards of its ranks, its index, its windowed or
recurrent state. A part without the others restores nothing, so they have one place in the eviction order, a reader or a
writer of one keeps all, and damage to one ends all. Which page goes first is a policy's to say (`node.policy`).

Millions of pages are kept, so a page of one part costs under 400 bytes, nothing here is seen by the garbage collector, and no
call looks at all of them.

Owners are connections. Whatever an owner holds (pins, reservations) ends with `drop_owner`; pins also end by expiry.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from hicache_mooncake.node.allocator import GRANULE, Allocator, blocks_of
from hicache_mooncake.node.policy import DEFAULT_POLICY, Evictable, Lru, Policy, make_policy
from hicache_mooncake.node.promises import Promise, Promises
from hicache_mooncake.protocol import FETCH, HASH_BYTES, HAVE, LOCAL, REMOTE, WAIT, WRITE, WRONG_LENGTH, split

_MAX_EVICTIONS_PER_ALLOCATION = 4096
_SCANNED_FOR_WINDOWS = (2048, 8192)
_WINDOWS_AT_ONCE = 32
_EVICTED_AT_ONCE = 256

OWN, GUEST, REPLICA = 0, 1, 2
"""What a page is to this node: its own; given away by another node and evicted before the own ones; a copy of what other nodes
hold as well, and evicted before all others."""
_EVICTED = (REPLICA, GUEST, OWN)

_GRANULE_BITS = 40
_GRANULES = (1 << _GRANULE_BITS) - 1


class Stranded(NamedTuple):
    """Room that something may be writing to."""

    offsets: list[int]
    size_bytes: int


class Home:
    """The pages of one namespace, until it is cleared; `pages` by hash."""

    __slots__ = ("name", "pages")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.pages: dict[bytes, LogicalPage] = {}

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self.pages

    def __len__(self) -> int:
        return len(self.pages)


class Entry(msgspec.Struct, gc=False, eq=False):
    """The record of one object. `pins` counts readers; a `dead` one has left the index and waits for its last reader."""

    home: Home
    """Where it is found, until that namespace is cleared."""
    hash: bytes
    body: int
    """Its checksum, over the number of the granule where it begins: one integer costs half of two."""
    length: int
    pins: int = 0
    dead: bool = False

    @property
    def namespace(self) -> bytes:
        return self.home.name

    @property
    def offset(self) -> int:
        return (self.body & _GRANULES) * GRANULE

    @property
    def checksum(self) -> int:
        return self.body >> _GRANULE_BITS


class LogicalPage(Evictable, gc=False, eq=False):
    """The parts of one page that this node holds. `writers` counts reservations for more of them, `rank` is OWN, GUEST or
    REPLICA. Each of `parts` has `namespace`, `hash`, `offset`, `length` and `checksum`; all of it is for reading only."""

    group: bytes = b""
    held: Entry | list[Entry] | None = None
    """Its parts; one by itself, as most pages have no more."""
    rank: int = OWN
    writers: int = 0
    kept: int = 0
    """The life of the cold tier in which all of its parts are there: see `Store.is_kept`."""
    promises: int = 0
    """As in `Promises`."""

    @property
    def parts(self) -> list[Entry]:
        held = self.held
        return held if isinstance(held, list) else [] if held is None else [held]

    @property
    def in_use(self) -> bool:
        """Somebody reads or writes it, or counts on it."""
        held = self.held
        if self.writers or self.promises:
            return True
        return held.pins > 0 if isinstance(held, Entry) else any(part.pins for part in held or ())

    @property
    def size_bytes(self) -> int:
        """Of the segment."""
        held = self.held
        return blocks_of(held.length) if isinstance(held, Entry) else sum(blocks_of(part.length) for part in held or ())

    def part(self, home: Home) -> Entry:
        """Its object in a namespace that has it."""
        held = self.held
        if isinstance(held, Entry):
            return held
        return next(part for part in self.parts if part.home is home)

    def add(self, part: Entry) -> None:
        self.kept = 0
        held = self.held
        if held is None:
            self.held = part
        elif isinstance(held, list):
            held.append(part)
        else:
            self.held = [held, part]

    def take(self, part: Entry) -> None:
        left = [other for other in self.parts if other is not part]
        self.held = left if len(left) > 1 else left[0] if left else None


class Group:
    """The pages of one group. Those all of whose parts are in the namespace `first` and that nobody writes are found there;
    all others are in `pages`. So the usual group, of one namespace, costs no second index."""

    __slots__ = ("count", "first", "name", "pages")

    def __init__(self, name: bytes, first: bytes) -> None:
        self.name = name
        self.first = first
        self.pages: dict[bytes, LogicalPage] = {}
        self.count = 0
        """Of all its pages."""


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
    evicted_unkept: int = 0
    """Of them, those that the cold tier did not have: the disk was behind."""
    refused: int = 0
    discarded: int = 0
    expired_pins: int = 0
    abandoned: int = 0
    """Reservations that ended without a commit (a writer died or gave up)."""
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)


class Store:
    """Not thread-safe: the service holds one lock around every call. All calls are O(keys asked) plus evictions.

    `policy`: which of its own pages go first, by its name in `node.policy.POLICIES` (ValueError for another); guests and
    replicas are least recently used first. `max_objects`: never more objects than this, 0 for any number."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        high_watermark: float = 0.95,
        low_watermark: float = 0.90,
        pin_seconds: float = 30.0,
        claim_seconds: float = 4.0,
        max_pinned_share: float = 0.5,
        promise_share: float = 0.125,
        track_changes: bool = False,
        max_changes: int = 1_000_000,
        max_objects: int = 0,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self.allocator = Allocator(capacity_bytes)
        self.high_bytes = int(self.allocator.capacity * high_watermark)
        self.low_bytes = int(self.allocator.capacity * low_watermark)
        self.pin_seconds = pin_seconds
        self.claim_seconds = claim_seconds
        self.max_pinned_share = max_pinned_share
        self.stats = Stats()
        self.promises: Promises[LogicalPage] = Promises(int(self.allocator.capacity * promise_share), _size_of)
        self.pinned_bytes = 0
        self._index: dict[bytes, Home] = {}
        self._groups: dict[bytes, Group] = {}
        self._policies: list[Policy[LogicalPage]] = [make_policy(policy), Lru(), Lru()]
        """By rank: they have the pages that have parts."""
        self._foreign = 0
        """Pages that are not OWN."""
        self.max_objects = max_objects
        self._objects = 0
        self._reserved = 0
        self._pins: dict[int, PinSet] = {}
        self._reservations: dict[int, Reservation] = {}
        self._claims: dict[tuple[bytes, bytes], tuple[int, float]] = {}
        """(namespace, hash) of what claimed reservations are for: the transaction, and until when others wait for it."""
        self._held_by: dict[int, set[int]] = {}
        """Ids of the pins and reservations of each owner."""
        self._lent: dict[int, int] = {}
        """Offset -> length of bodies that are no objects: room that links write to, and what is never used again."""
        self._condemned: deque[Home] = deque()
        """Namespaces that were cleared: out of the index, their objects still to be taken apart by `sweep`."""
        self._next_id = 1
        self._evicting = False
        self.keeping = False
        """There is a cold tier, to which pages are written before they are evicted."""
        self.tier_life = 1
        """Another one, when the tier has lost all: no page is kept any more."""
        self._track_changes = track_changes
        self._max_changes = max_changes
        self._changes: deque[tuple[bool, bytes, tuple[bytes, ...]]] = deque()
        """(added or removed, namespace, hashes), in the order in which it was."""
        self._changes_waiting = 0
        """Hashes in them."""
        self.changes_lost = False
        """More changes than `max_changes` were waiting: the next reader of changes must send a snapshot instead."""

    # ------------------------------------------------------------------ lookups

    @property
    def objects(self) -> int:
        return self._objects

    def pages(self, rank: int) -> int:
        """How many logical pages of this rank are held."""
        return len(self._policies[rank])

    @property
    def used_bytes(self) -> int:
        return self.allocator.used

    def present(self, namespace: bytes, hashes: bytes, *, touch: bool = True) -> bytes:
        """One byte per key: 1 where this node holds it. Touches leaf first; pins nothing."""
        home = self._index.get(namespace)
        count = len(hashes) // HASH_BYTES
        self.stats.lookups += 1
        self.stats.lookup_keys += count
        if home is None:
            return bytes(count)
        found = list(map(home.pages.get, split(hashes)))
        if None not in found:
            column = b"\x01" * count
            here = found
        else:
            column = bytes([page is not None for page in found])
            here = [page for page in found if page is not None]
        if touch and here:
            self._touched(here)  # type: ignore[arg-type]
        self.stats.hit_keys += len(here)
        return column

    def locate(
        self,
        owner: int,
        namespace: bytes,
        hashes: bytes,
        length: int,
        now: float,
        *,
        touch: bool = True,
        pinned_share: float = 1.0,
    ) -> tuple[int, bytearray, list[int], list[int]]:
        """Pin what is here: (pin id, status column, offsets, checksums). The pin ends by release, expiry or its owner's end.

        `pinned_share`: how much of what may be pinned at all this reader leaves pinned, together with all others."""
        home = self._index.get(namespace)
        count = len(hashes) // HASH_BYTES
        status, where, checksum = bytearray(count), [0] * count, [0] * count
        pinned: list[Entry] = []
        pages: list[LogicalPage] = []
        budget = int(self.allocator.capacity * self.max_pinned_share * pinned_share)
        pinned_bytes = self.pinned_bytes
        found = map(home.pages.get, split(hashes)) if home is not None else ()
        for i, page in enumerate(found):
            if page is None:
                continue
            entry = page.held
            if not isinstance(entry, Entry):
                assert home is not None
                entry = page.part(home)
            if entry.length != length:
                status[i] = WRONG_LENGTH
                self.stats.reasons["wrong_length"] += 1
                continue
            if not entry.pins:
                if pinned_bytes + length > budget and pinned_bytes > 0 and not page.promises:
                    self.stats.reasons["pin_limit"] += 1
                    continue
                pinned_bytes += length
            entry.pins += 1
            pinned.append(entry)
            pages.append(page)
            body = entry.body
            status[i], where[i], checksum[i] = LOCAL, (body & _GRANULES) * GRANULE, body >> _GRANULE_BITS
        self.pinned_bytes = pinned_bytes
        if touch and pages:
            self._touched(pages)
        pin = self._new_id()
        if pinned:
            self._pins[pin] = PinSet(owner, pinned, now + self.pin_seconds)
            self._hold(owner, pin)
        return pin, status, where, checksum

    def promise(self, owner: int, reader: str, namespace: bytes, hashes: bytes, until: float) -> Promise[LogicalPage] | None:
        """Those of these pages that are here stay here until this reader has loaded them (`Promises.fulfil`), its owner or
        the time ends it, or too many are promised. None when nothing is here. `hashes`: of one chain, its head first."""
        home = self._index.get(namespace)
        if home is None:
            return None
        pages = list(map(home.pages.get, split(hashes)))
        while pages and pages[-1] is None:
            pages.pop()
        if not pages:
            return None
        return self.promises.make(owner, reader, namespace, hashes[: len(pages) * HASH_BYTES], pages, until)

    def release(self, owner: int, pin: int, *, loaded: int = 0) -> None:
        """Ends a pin of this owner; `loaded` of its objects arrived. Ids it does not hold are ignored: pins expire."""
        held = self._pins.get(pin)
        if held is None or held.owner != owner:
            return
        del self._pins[pin]
        self._let_go(owner, pin)
        loaded = min(loaded, len(held.entries))
        self.stats.loaded += loaded
        self.stats.loaded_bytes += loaded * held.entries[0].length
        self._unpin(held.entries)

    def expire_pins(self, now: float) -> int:
        """Ends the pins whose time is over. Their readers verify what they read, so the worst is a miss."""
        ended = [pin for pin, _ in itertools.takewhile(lambda item: item[1].expires <= now, self._pins.items())]
        for pin in ended:
            held = self._pins.pop(pin)
            self._let_go(held.owner, pin)
            self._unpin(held.entries)
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
        home = self._index.get(namespace)
        count = len(hashes) // HASH_BYTES
        status, where = bytearray(count), [0] * count
        each = split(hashes)
        found = [None] * count if home is None else list(map(home.pages.get, each))
        present: list[LogicalPage] = []
        parts: list[Entry] = []
        missing: list[int] = []
        for i, known in enumerate(found):
            if known is None:
                missing.append(i)
                continue
            assert home is not None
            part = known.part(home)
            if part.length != length:
                missing.append(i)
                found[i] = None
                continue
            present.append(known)
            parts.append(part)
            self._pin(part)  # not evicted to make room for its own suffix
        pages = self._written(group or namespace, namespace, [each[i] for i in missing])
        offsets = self._allocate_many(length, len(missing), evict)
        for i, offset in zip(missing, offsets, strict=False):
            status[i], where[i] = WRITE, offset
        self._not_written(pages[len(offsets) :])
        end = missing[len(offsets)] if len(offsets) < len(missing) else count
        self.stats.refused += len(missing) - len(offsets)
        for i, known in enumerate(found[:end]) if parts else ():
            if known is not None:
                status[i] = HAVE
        self._unpin(parts)
        if rank != REPLICA and self._foreign:
            for page in present:
                # Who gives a page away (`evict` False) has it no longer: what was a copy of that is a copy no more.
                worse = (page.rank == GUEST and rank == OWN) or (page.rank == REPLICA and not evict)
                if worse and page.held is not None:
                    self._rank(page, rank)
        if present:
            self._touched([page for page in present if page.held is not None], arranged=True)
        self.stats.had += len(present)
        txn = self._new_id()
        if offsets:
            written = pages[: len(offsets)]
            self._reservations[txn] = Reservation(owner, namespace, length, written, offsets, hashes, rank)
            self._reserved += len(offsets)
            self._hold(owner, txn)
        return txn, status, where

    def claim(
        self,
        owner: int,
        namespace: bytes,
        hashes: bytes,
        length: int,
        now: float,
        group: bytes = b"",
        batch: bytes = b"",
        rank: int = REPLICA,
        *,
        evict: bool = True,
    ) -> tuple[int, bytearray, list[int]]:
        """Room for pages that one reader fetches from another node, or from the cold tier, for all readers of this one:
        (transaction, a column of FETCH, WAIT where another has claimed the page, REMOTE where there is no room, offsets of the
        FETCH ones). `batch`: all pages of the read, in the order of their chain.

        The pages become of `rank`. Commit the transaction like that of `reserve`; the claims end with it, or after
        `claim_seconds`: the reader is frozen.
        """
        count = len(hashes) // HASH_BYTES
        each = split(hashes)
        first = {page_hash: i for i, page_hash in reversed(list(enumerate(each)))}
        free = [
            i for i, page_hash in enumerate(each) if first[page_hash] == i and not self._is_claimed(namespace, page_hash, now)
        ]
        column = bytearray([WAIT]) * count
        wanted = b"".join(each[i] for i in free)
        txn, status, where = self.reserve(owner, namespace, wanted, length, group, rank=rank, evict=evict)
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
        return any(self._is_claimed(namespace, page_hash, now) for page_hash in split(hashes))

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
        self._let_go(owner, txn)
        self._end_claims(txn, reservation)
        namespace, length = reservation.namespace, reservation.length
        pages, offsets = reservation.pages, reservation.offsets
        result = bytearray(len(offsets))
        home = self._index.get(namespace)
        if home is None:
            home = Home(namespace)
        new: list[LogicalPage] = []
        stored: list[bytes] = []
        unused: list[int] = []
        done = 0
        for done, (page, offset, whole, checksum) in enumerate(zip(pages, offsets, ok, checksums, strict=False), 1):
            if not whole:
                unused.append(offset)
                self.stats.abandoned += 1
                continue
            result[done - 1] = 1
            page_hash = page.hash
            other = home.pages.get(page_hash)
            if other is not None:
                existing = other.part(home)
                if existing.length == length:
                    unused.append(offset)
                    continue
                self._remove([(other, existing)])
            entry = Entry(home, page_hash, checksum << _GRANULE_BITS | offset // GRANULE, length)
            home.pages[page_hash] = page
            if page.held is None:
                page.rank = reservation.rank
                page.held = entry
                page.kept = 0
                new.append(page)
            else:
                if reservation.rank < page.rank:
                    self._rank(page, reservation.rank)
                page.add(entry)
            stored.append(page_hash)
        if stored:
            self._index[namespace] = home
            self._objects += len(stored)
            self.stats.stored += len(stored)
            self.stats.stored_bytes += len(stored) * length
            self._note(True, namespace, stored)
        self.stats.abandoned += len(offsets) - done
        self.allocator.free_many(unused + offsets[done:], length)
        self._not_written(pages)
        if new:
            self._policies[reservation.rank].inserted(new)
            if reservation.rank != OWN:
                self._foreign += len(new)
        if stored and len(new) * HASH_BYTES < len(reservation.batch):
            self.touch(namespace, reservation.batch)
        return bytes(result)

    # ------------------------------------------------------------------ removal

    def drop_owner(self, owner: int) -> None:
        """A connection ended: its pins, its uncommitted reservations and its promises are over."""
        self.promises.drop_owner(owner)
        for held in self._held_by.pop(owner, ()):
            pin = self._pins.pop(held, None)
            if pin is not None:
                self._unpin(pin.entries)
                continue
            reservation = self._reservations.pop(held)
            self._reserved -= len(reservation.offsets)
            self._end_claims(held, reservation)
            self._not_written(reservation.pages)
            self.allocator.free_many(reservation.offsets, reservation.length)
            self.stats.abandoned += len(reservation.offsets)

    def strand(self, owner: int, txn: int) -> Stranded:
        """A reservation of this owner is over, and its room is not used before `take_back`: something may still be writing to
        it."""
        reservation = self._reservations.get(txn)
        if reservation is None or reservation.owner != owner:
            return Stranded([], 0)
        del self._reservations[txn]
        self._reserved -= len(reservation.offsets)
        self._let_go(owner, txn)
        self._end_claims(txn, reservation)
        self._not_written(reservation.pages)
        self._lent |= dict.fromkeys(reservation.offsets, reservation.length)
        self.stats.abandoned += len(reservation.offsets)
        return Stranded(list(reservation.offsets), blocks_of(reservation.length) * len(reservation.offsets))

    def lend(self, length: int, count: int) -> list[int]:
        """Offsets of up to `count` bodies that are no objects, of what is free: nothing is evicted. Until `take_back`."""
        offsets = self.allocator.allocate_many(length, count) if count else []
        self._lent |= dict.fromkeys(offsets, length)
        return offsets

    def take_back(self, offsets: Iterable[int]) -> None:
        """What `lend` gave, or `strand` kept. Nothing writes to it any more."""
        for offset in offsets:
            self.allocator.free(offset, self._lent.pop(offset))

    def discard(self, namespace: bytes, hashes: bytes, reason: str) -> int:
        """Forget objects whose bytes are not what they should be, and the other parts of their pages. Returns how many
        objects went."""
        dropped = 0
        for page_hash in split(hashes):
            home = self._index.get(namespace)
            page = home.pages.get(page_hash) if home is not None else None
            if page is not None:
                dropped += self._remove_page(page)
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
            if not home.pages:
                self._condemned.popleft()
                continue
            # From the end: a dict's first item is found by passing over all that went before.
            pages = [home.pages.popitem()[1] for _ in range(min(limit - swept, len(home)))]
            self._remove([(page, page.part(home)) for page in pages])
            swept += len(pages)
        return swept

    def evict_kept(self, length: int, count: int) -> int:
        """Make room for so many bodies below the high watermark, as far as pages go for it that are in the cold tier. Returns
        for how many there is room now."""
        size = blocks_of(length)
        while (missing := size * count - (self.high_bytes - self.allocator.used)) > 0:
            if not self._evict_first(_EVICTED_AT_ONCE, missing, kept_only=True):
                break
        return min(count, max(0, self.high_bytes - self.allocator.used) // size)

    def evict_to_low(self, limit: int = 256, *, kept_only: bool = False) -> int:
        """Background eviction above the high watermark, at most `limit` objects a call. Returns how many went. `kept_only`:
        up to the first page that is not in the cold tier yet."""
        if self.allocator.used <= self.high_bytes and not self._evicting:
            return 0
        self._evicting = self.allocator.used > self.low_bytes
        gone = 0
        while gone < limit and (above := self.allocator.used - self.low_bytes) > 0:
            went = self._evict_first(limit - gone, above, kept_only=kept_only)
            if not went:
                break
            gone += went
        if (gone == 0 and not kept_only) or self.allocator.used <= self.low_bytes:
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
        policies = self._policies[rank : rank + 1] if rank is not None else [self._policies[each] for each in _EVICTED]
        free = (page for policy in policies for page in policy.coldest() if not page.in_use)
        return list(itertools.islice(free, limit))

    def going(self) -> Iterator[LogicalPage]:
        """All pages in the order in which they would be evicted, those in use among them. Nothing may change meanwhile."""
        return itertools.chain.from_iterable(self._policies[rank].coldest() for rank in _EVICTED)

    def hottest(self, limit: int, rank: int | None = None) -> list[LogicalPage]:
        """At most `limit` pages that nobody writes, most recently used first, the head of a chain before its tail."""
        policies = (
            self._policies[rank : rank + 1] if rank is not None else [self._policies[each] for each in reversed(_EVICTED)]
        )
        whole = (page for policy in policies for page in policy.hottest() if not page.writers)
        return list(itertools.islice(whole, limit))

    def page(self, namespace: bytes, page_hash: bytes) -> LogicalPage | None:
        """The page of which a part is in this namespace."""
        home = self._index.get(namespace)
        return None if home is None else home.pages.get(page_hash)

    def keep(self, namespace: bytes, hashes: Iterable[bytes]) -> None:
        """These came from the cold tier, whole: pages of one part need not be written there again."""
        home = self._index.get(namespace)
        for page_hash in hashes if home is not None else ():
            page = home.pages.get(page_hash)  # type: ignore[union-attr]
            if page is not None and isinstance(page.held, Entry):
                page.kept = self.tier_life

    def is_kept(self, page: LogicalPage) -> bool:
        """Is it in the cold tier, all of it?"""
        return page.kept == self.tier_life

    def holds(self, part: Entry) -> bool:
        """Can it be found? False once it is removed or its namespace cleared."""
        return not part.dead and self._index.get(part.namespace) is part.home

    def pin_pages(self, owner: int, pages: Iterable[LogicalPage], now: float) -> int:
        """Pins all parts of these pages, those that are still held; ends like the pin of `locate`. Returns the pin's id."""
        entries = [part for page in pages for part in page.parts if not part.dead]
        pin = self._new_id()
        for entry in entries:
            self._pin(entry)
        if entries:
            self._pins[pin] = PinSet(owner, entries, now + self.pin_seconds)
            self._hold(owner, pin)
        return pin

    def remove_page(self, page: LogicalPage, parts: Sequence[Entry] | None = None) -> int:
        """Forget a page; memory comes back when its last reader is done. Returns how many objects went: none when it is gone
        already, more of it is being written, or, with `parts`, it has not exactly these any longer."""
        if page.writers or (parts is not None and set(parts) != set(page.parts)):
            return 0
        return self._remove_page(page)

    def set_rank(self, page: LogicalPage, rank: int) -> None:
        """Make it OWN, GUEST or REPLICA. It counts as used now among those of its new rank. Nothing for a page that is gone."""
        if page.held is not None and page.rank != rank:
            self._rank(page, rank)

    # ------------------------------------------------------------------ directory

    def drain_changes(self, limit: int) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
        """Up to `limit` changes since the last call, in an order in which the last word on a key is right: pairs of
        (namespace, blob of hashes), added and removed, no key in both."""
        last: dict[bytes, dict[bytes, bool]] = {}
        while limit > 0 and self._changes:
            added, namespace, hashes = self._changes.popleft()
            if len(hashes) > limit:
                self._changes.appendleft((added, namespace, hashes[limit:]))
                hashes = hashes[:limit]
            limit -= len(hashes)
            self._changes_waiting -= len(hashes)
            last.setdefault(namespace, {}).update(dict.fromkeys(hashes, added))
        return _those(last, True), _those(last, False)

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        """Every key held, as pairs of (namespace, blob of hashes). Pending changes stay: another master may need them."""
        return [part for parts in self.snapshot_parts() for part in parts]

    def snapshot_parts(self, keys: int = 16_384) -> Iterator[list[tuple[bytes, bytes]]]:
        """The same in parts of at most so many keys. Not even the namespaces have to be of one moment: each step needs the
        lock, and between two of them it may be given up. What changes after its part was made is in the changes, which must be
        told after that part."""
        self.changes_lost = False
        for namespace in list(self._index):
            home = self._index.get(namespace)
            if home is None:
                continue
            held = list(home.pages)
            for at in range(0, len(held), keys):
                yield [(namespace, b"".join(held[at : at + keys]))]

    def namespaces(self) -> dict[bytes, int]:
        return {namespace: len(home) for namespace, home in self._index.items()}

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
                if not self.sweep(1) and not self._evict_first(1):
                    break
            count = min(count, max(0, self.max_objects - self._objects - self._reserved))
        offsets = self.allocator.allocate_many(length, count) if count else []
        if evict and len(offsets) < count:
            self._make_room(length, count - len(offsets))
            offsets += self.allocator.allocate_many(length, count - len(offsets))
        for scanned in _SCANNED_FOR_WINDOWS if evict else ():
            if len(offsets) < count:
                self._make_windows(length, count - len(offsets), scanned)
                offsets += self.allocator.allocate_many(length, count - len(offsets))
        while evict and len(offsets) < count:
            offset = self._allocate(length)
            if offset is None:
                break
            offsets.append(offset)
        return offsets

    def _allocate(self, length: int) -> int | None:
        """Room for one body; cleared objects make it first, then the pages that go first, until there is a block that fits."""
        if length > self.allocator.capacity:
            return None
        for _ in range(_MAX_EVICTIONS_PER_ALLOCATION):
            offset = self.allocator.allocate(length)
            if offset is not None:
                return offset
            if not self.sweep(1) and not self._evict_first(1):
                return None
        return None

    def _make_room(self, length: int, count: int) -> None:
        """As many bytes as so many bodies need, wherever."""
        needed = blocks_of(length) * count
        if length > self.allocator.capacity:
            return
        while (missing := needed - (self.allocator.capacity - self.allocator.used)) > 0:
            if not self.sweep(count) and not self._evict_first(_EVICTED_AT_ONCE, missing):
                return

    def _make_windows(self, length: int, count: int, scanned: int) -> None:
        """There are bytes enough, in pieces: pages of another size were here before. Of the pages that would go soon those go
        now that lie side by side, the fewest bytes first, instead of all that it takes until by chance one fits."""
        size = blocks_of(length)
        if size > self.allocator.capacity:
            return
        count = max(count, min(_WINDOWS_AT_ONCE, self.allocator.capacity // 64 // size))
        cold: dict[int, tuple[int, LogicalPage]] = {}
        for page in self.coldest(scanned):
            for part in page.parts:
                cold[part.offset] = blocks_of(part.length), page
        windows: list[tuple[int, int, list[LogicalPage]]] = []
        window: deque[tuple[int, LogicalPage | None]] = deque()
        wide = lost = end = 0
        for offset in sorted(cold):
            taken, page = cold[offset]
            free = self.allocator.free_before(offset)
            if offset - free != end:
                window.clear()
                wide = lost = 0
            elif window and free:
                window.pop()  # it was counted as what lies behind the last one
                wide -= free
            behind = self.allocator.free_behind(offset + taken)
            for block in ((free, None), (taken, page), (behind, None)):
                if block[0]:
                    window.append(block)
                    wide += block[0]
                    lost += block[0] if block[1] is not None else 0
            end = offset + taken
            while window and wide - window[0][0] >= size:
                first, of = window.popleft()
                wide -= first
                lost -= first if of is not None else 0
            if wide >= size:
                windows.append((lost, wide, [of for _, of in window if of is not None]))
                window.clear()
                wide = lost = 0
                end = -1
        windows.sort(key=lambda each: each[0] / (each[1] // size))
        for _, wide, pages in windows:
            if count <= 0:
                break
            count -= wide // size
            self._evict([(page, part) for page in dict.fromkeys(pages) for part in page.parts])

    def _evict_first(self, limit: int, needed: int = 1, *, kept_only: bool = False) -> int:
        """Forget pages that go first of those that nobody reads or writes, at most `limit` and no more than it takes for
        `needed` bytes. Returns how many went: fewer than that maybe, but 0 only where none may go. `kept_only`: as in
        `evict_to_low`."""
        for rank in _EVICTED:
            victims = self._policies[rank].victims(limit)
            if not victims:
                continue
            went = 0
            parts: list[tuple[LogicalPage, Entry]] = []
            for page in victims:
                if kept_only and page.kept != self.tier_life and rank != REPLICA:
                    break
                went += 1
                for part in page.parts:
                    parts.append((page, part))
                    needed -= blocks_of(part.length)
                if needed <= 0:
                    break
            self._evict(parts)
            return went
        return 0

    def _evict(self, parts: Sequence[tuple[LogicalPage, Entry]]) -> None:
        self.stats.evicted += len(parts)
        self.stats.evicted_bytes += sum([part.length for _, part in parts])
        if self.keeping:
            self.stats.evicted_unkept += sum([page.kept != self.tier_life and page.rank != REPLICA for page, _ in parts])
        self._remove(parts, evicted=True)

    def _rank(self, page: LogicalPage, rank: int) -> None:
        self._foreign += (rank != OWN) - (page.rank != OWN)
        self._policies[page.rank].removed((page,), evicted=False)
        page.rank = rank
        self._policies[rank].inserted((page,))

    def _remove_page(self, page: LogicalPage) -> int:
        parts = page.parts
        self._remove([(page, part) for part in parts])
        return len(parts)

    def _remove(self, parts: Sequence[tuple[LogicalPage, Entry]], *, evicted: bool = False) -> None:
        """Out of the index now; memory when the last reader is done."""
        gone: dict[Home, list[bytes]] = {}
        free: dict[int, list[int]] = {}
        empty: list[LogicalPage] = []
        for page, part in parts:
            home, page_hash = part.home, part.hash
            home.pages.pop(page_hash, None)
            gone.setdefault(home, []).append(page_hash)
            part.dead = True
            if not part.pins:
                free.setdefault(part.length, []).append((part.body & _GRANULES) * GRANULE)
            if page.held is part:
                page.held = None
                empty.append(page)
            else:
                page.take(part)
        self._objects -= len(parts)
        for home, hashes in gone.items():
            if not home.pages and self._index.get(home.name) is home:
                del self._index[home.name]
            anew = self._index.get(home.name)
            if anew is not None and anew is not home:  # since this one was cleared
                hashes = [page_hash for page_hash in hashes if page_hash not in anew]
            self._note(False, home.name, hashes)
        for length, offsets in free.items():
            self.allocator.free_many(offsets, length)
        for rank, of_it in self._by_rank(empty):
            self._policies[rank].removed(of_it, evicted=evicted)
            self._foreign -= len(of_it) if rank != OWN else 0
        for page in empty if len(self.promises) else ():
            if page.promises:
                self.promises.gone(page)
        self._drop_empty(empty)

    def touch(self, namespace: bytes, hashes: bytes) -> None:
        """These pages are one chain, head first: those that are here count as recent, the head most of all, so that it goes
        last. It says nothing of anybody asking for them once more."""
        home = self._index.get(namespace)
        if home is not None:
            found = map(home.pages.get, split(hashes))
            self._touched([page for page in found if page is not None], arranged=True)

    def _touched(self, pages: Sequence[LogicalPage], *, arranged: bool = False) -> None:
        """Head of the chain first."""
        for rank, of_it in self._by_rank(pages):
            policy = self._policies[rank]
            if arranged:
                policy.arranged(of_it)
            else:
                policy.touched(of_it)

    def _by_rank(self, pages: Sequence[LogicalPage]) -> Iterable[tuple[int, Sequence[LogicalPage]]]:
        if not self._foreign:
            return ((OWN, pages),)
        return [(rank, [page for page in pages if page.rank == rank]) for rank in _EVICTED]

    def _hold(self, owner: int, held: int) -> None:
        self._held_by.setdefault(owner, set()).add(held)

    def _let_go(self, owner: int, held: int) -> None:
        of_owner = self._held_by[owner]
        of_owner.discard(held)
        if not of_owner:
            del self._held_by[owner]

    def _end_claims(self, txn: int, reservation: Reservation) -> None:
        for page in reservation.pages if reservation.claimed else ():
            key = (reservation.namespace, page.hash)
            if self._claims.get(key, (0, 0.0))[0] == txn:  # else another reader has taken it over
                del self._claims[key]

    def _written(self, name: bytes, namespace: bytes, hashes: Sequence[bytes]) -> list[LogicalPage]:
        """The logical pages of these hashes, each with one more writer."""
        if not hashes:
            return []
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, namespace)
        elif not group.pages and group.first not in self._index:
            group.first = namespace
        first = self._index.get(group.first)
        known, name = group.pages, group.name
        pages: list[LogicalPage] = []
        for page_hash in hashes:
            page = known.get(page_hash)
            if page is None:
                page = first.pages.get(page_hash) if first is not None else None
                if page is None or page.group != name:
                    page = LogicalPage(page_hash, group=name)
                    group.count += 1
                known[page_hash] = page
            page.writers += 1
            pages.append(page)
        return pages

    def _not_written(self, pages: Sequence[LogicalPage]) -> None:
        """Pages of one group, each with one writer less."""
        if not pages:
            return
        group = self._groups[pages[0].group]
        first = self._index.get(group.first)
        for page in pages:
            page.writers -= 1
            held = page.held
            if isinstance(held, Entry) and held.home is first and not page.writers and group.pages.get(page.hash) is page:
                del group.pages[page.hash]
        self._drop_empty(dict.fromkeys([page for page in pages if page.held is None]))

    def _drop_empty(self, pages: Iterable[LogicalPage]) -> None:
        """Of pages without parts, those that nobody writes."""
        for page in pages:
            if page.writers:
                continue
            group = self._groups[page.group]
            if group.pages.get(page.hash) is page:
                del group.pages[page.hash]
            group.count -= 1
            if not group.count:
                del self._groups[page.group]

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
                    self.allocator.free(entry.offset, entry.length)

    def _note(self, added: bool, namespace: bytes, hashes: Sequence[bytes]) -> None:
        if not self._track_changes or self.changes_lost or not hashes:
            return
        if self._changes_waiting + len(hashes) > self._max_changes:
            self._changes.clear()
            self._changes_waiting = 0
            self.changes_lost = True
            return
        self._changes.append((added, namespace, tuple(hashes)))
        self._changes_waiting += len(hashes)

    def entries(self) -> Iterator[Entry]:
        """Every object, those of the pages that go first first."""
        return (part for rank in _EVICTED for page in self._policies[rank].coldest() for part in page.parts)

    def validate(self) -> None:
        """Everything that must hold between two calls; tests run it after every event."""
        self.promises.validate()
        homes = [*self._index.values(), *self._condemned]
        indexed: list[Entry] = []
        pages: list[LogicalPage] = []
        for home in homes:
            for page_hash, page in home.pages.items():
                assert page.hash == page_hash
                assert [part.home for part in page.parts].count(home) == 1
                assert page.part(home).home is home
                indexed.append(page.part(home))
                pages.append(page)
        assert all(not entry.dead and entry.hash in entry.home.pages for entry in indexed)
        assert sorted(map(id, indexed)) == sorted(map(id, self.entries())), "index and eviction order hold the same objects"
        assert len(indexed) == self._objects
        pages = list({id(page): page for page in pages}.values())
        for rank, policy in enumerate(self._policies):
            policy.validate()
            ranked = sorted(id(page) for page in pages if page.rank == rank)
            assert ranked == sorted(map(id, policy.coldest())), "pages with parts can be evicted, each by its rank"
            assert ranked == sorted(map(id, policy.hottest()))
            assert len(policy) == len(ranked)
        assert self._foreign == sum(page.rank != OWN for page in pages)
        pages += [page for group in self._groups.values() for page in group.pages.values() if page.held is None]
        assert all(page.held is None or isinstance(page.held, Entry) or len(page.held) > 1 for page in pages)
        counted = Counter(page.group for page in pages)
        assert counted == {name: group.count for name, group in self._groups.items()}
        for group in self._groups.values():
            assert all(page.group == group.name and page.hash == page_hash for page_hash, page in group.pages.items())
            assert {id(page) for page in group.pages.values()} <= set(map(id, pages))
        for page in pages:
            known = self._groups[page.group].pages.get(page.hash)
            plain = all(part.namespace == self._groups[page.group].first for part in page.parts)
            condemned = all(part.home in self._condemned for part in page.parts)
            assert known is page or (plain and not page.writers) or (condemned and not page.writers), "it is found as a whole"
        assert self._reserved == sum(len(held.offsets) for held in self._reservations.values())
        assert not self.max_objects or self._objects + self._reserved <= self.max_objects
        owned = {(held.owner, pin) for pin, held in self._pins.items()}
        owned |= {(held.owner, txn) for txn, held in self._reservations.items()}
        assert owned == {(owner, held) for owner, of_owner in self._held_by.items() for held in of_owner}
        assert all(self._held_by.values())
        writers = Counter(id(page) for held in self._reservations.values() for page in held.pages)
        assert all((page.parts or page.writers) and page.writers == writers[id(page)] for page in pages)
        assert set(map(id, self.promises)) <= set(map(id, pages)), "what has gone is promised no more"
        assert all(part.hash == page.hash for page in pages for part in page.parts)
        assert set(writers) <= set(map(id, pages))
        for (namespace, page_hash), (txn, _) in self._claims.items():
            claimant = self._reservations[txn]
            assert claimant.claimed
            assert claimant.namespace == namespace
            assert page_hash in {page.hash for page in claimant.pages}
        assert all(home.pages and home.name == namespace for namespace, home in self._index.items()), "none is kept empty"
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
        blocks = [(entry.offset, entry.length) for entry in by_id.values()]
        blocks += [(offset, held.length) for held in self._reservations.values() for offset in held.offsets]
        self.allocator.validate([*blocks, *self._lent.items()])


def _size_of(page: LogicalPage) -> int:
    held = page.held
    return -(-held.length // GRANULE) * GRANULE if isinstance(held, Entry) else page.size_bytes


def _those(last: dict[bytes, dict[bytes, bool]], added: bool) -> list[tuple[bytes, bytes]]:
    blobs = [(namespace, b"".join([key for key, was in of_it.items() if was is added])) for namespace, of_it in last.items()]
    return [(namespace, blob) for namespace, blob in blobs if blob]
