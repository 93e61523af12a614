"""Which nodes hold which page: the master's soft state, without I/O and without a clock."""

from __future__ import annotations

import heapq
import random
import sys
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import filterfalse, islice, repeat
from typing import NamedTuple

import numpy as np

from hicache_mooncake.protocol import HASH_BYTES

MAX_PEERS_PER_REPLY = 255
"""A holder column has one byte a key, and 0 says nobody."""
MAX_INTERNED_VALUES = 65_536
TABLE_KEYS = 8_192
"""Keys a table on average, up to 4096 tables a namespace. Splitting one takes some milliseconds."""
PREFIX_STEP = 128
WEIGHED = 8
"""Of a page that more than twice as many hold, so many of the best rank are compared; the others are as good."""
COMPACT_PART = 6
"""A log is compacted when so small a part of it is dead."""
COMPACT_LEAST = 64
COMPACT_STEP = 8
"""Log entries looked at with a removal, and per key of it, while a log is compacted."""
ACCOUNT_EVERY = 4_096

KEY_BYTES = 32
VALUE_BYTES = 32
ENTRY_BYTES = 9
DEAD_BYTES = 100
NAMESPACE_BYTES = 4_096
HELD_BYTES = 512

_KEY_BITS = 60
"""An int of up to 60 bits takes 32 bytes, a larger one 48."""
_FEW, _MANY = 256, 4_096
"""Tables at most, first and once those are all there."""
_NO_TWINS: Mapping[int, int] = {}
_FIELD = 0xFFFF
_FIELD_BITS = 16

_Table = dict[int, int]


class Holders(NamedTuple):
    """Who holds some pages. `column` has 0 (nobody) or 1 + an index into `slots` a page, `others` a second holder in the same
    way, or nothing when no page has one."""

    column: bytes
    others: bytes
    slots: list[int]


class _Pages:
    """One namespace: key -> value, in tables by the key's leading bits. Tables split one at a time while the namespace grows,
    so that no call waits for a large one to be rehashed."""

    __slots__ = ("bytes", "changes", "keys", "looked_at", "shift", "span", "split_at", "tables")

    def __init__(self) -> None:
        self.tables: list[_Table] = [{}] * _FEW
        """By `key >> shift`; neighbours share one."""
        self.shift = _KEY_BITS - _FEW.bit_length() + 1
        self.keys = 0
        self.bytes = NAMESPACE_BYTES
        self.changes = 0
        self.looked_at = 0
        self.span = _FEW
        """Neighbours that share a table which is not split yet in this round. `split_at` is the first of them."""
        self.split_at = 0

    def distinct(self) -> list[_Table]:
        return list({id(table): table for table in self.tables}.values())

    def places(self, hashes: bytes) -> tuple[list[int], list[int]]:
        """Of each page hash the key and the index of its table."""
        keys = np.frombuffer(hashes, "<u8")[:: HASH_BYTES // 8] >> (64 - _KEY_BITS)
        return keys.tolist(), (keys >> self.shift).tolist()

    def values(self, hashes: bytes) -> list[int]:
        """What the tables have for these pages, 0 for nothing."""
        keys, indexes = self.places(hashes)
        return list(map(dict.get, map(self.tables.__getitem__, indexes), keys, repeat(0)))

    def grow(self) -> None:
        while self.keys > TABLE_KEYS * (len(self.tables) + self.split_at) // self.span:
            if self.span == 1:
                if len(self.tables) > _FEW:
                    return
                self.tables = [table for table in self.tables for _ in range(_MANY // _FEW)]
                self.shift -= (_MANY // _FEW).bit_length() - 1
                self.span = _MANY // _FEW
            first, half = self.split_at, self.span // 2
            table = self.tables[first]
            bound = (first + half) << self.shift
            lower = {key: value for key, value in table.items() if key < bound}
            upper = {key: value for key, value in table.items() if key >= bound}
            self.tables[first : first + self.span] = [lower] * half + [upper] * half
            self.split_at += self.span
            if self.split_at == len(self.tables):
                self.split_at, self.span = 0, half

    def account(self) -> None:
        """Count the tables' bytes anew, and make one table compact that has room for far more than it holds: a dict whose keys
        come and go grows to 120 B a key, a fresh copy has 30 to 60."""
        self.changes = 0
        first = self.looked_at
        table = self.tables[first]
        end = first + 1
        while end < len(self.tables) and self.tables[end] is table:
            end += 1
        if sys.getsizeof(table) > 100 * len(table) + 4_096:
            self.tables[first:end] = [dict(table)] * (end - first)
        self.looked_at = end % len(self.tables)
        self.bytes = NAMESPACE_BYTES + 8 * len(self.tables) + sum(map(sys.getsizeof, self.distinct()))


class _Held:
    """What one slot holds of one namespace: a log of keys, each once, and those of it that were removed again.

    A dict would cost 30 to 120 B a key, a log costs 8. It is compacted in place, a few entries with every removal:
    [0, write) is done, [write, read) is free, [read, end) is to be looked at; new keys go to the end."""

    __slots__ = ("count", "dead", "log", "read", "write")

    def __init__(self) -> None:
        self.log: array[int] = array("Q")
        self.dead: dict[int, None] = {}
        self.count = 0
        self.read = 0
        self.write = 0

    def compact(self, removed: int) -> int:
        """Do the compacting that is due after so many removals; returns by how many entries the log has shrunk."""
        if not self.read and len(self.dead) * COMPACT_PART < len(self.log):
            return 0
        before = len(self.log)
        piece = self.log[self.read : self.read + COMPACT_LEAST + COMPACT_STEP * removed].tolist()
        kept = self._bury(piece)
        self.log[self.write : self.write + len(kept)] = array("Q", kept)
        self.read += len(piece)
        self.write += len(kept)
        if self.read >= len(self.log):
            del self.log[self.write :]
            self.read = self.write = 0
        return before - len(self.log)

    def take(self, limit: int) -> tuple[list[int], int]:
        """Take up to `limit` entries off the log's end; returns the living keys of them, and by how much the log has shrunk."""
        before = len(self.log)
        if self.read and before <= self.read:
            del self.log[self.write :]
            self.read = self.write = 0
        start = max(len(self.log) - limit, self.read)
        piece = self.log[start:].tolist()
        del self.log[start:]
        return self._bury(piece), before - len(self.log)

    def _bury(self, piece: list[int]) -> list[int]:
        """The living of these keys, which leave the log; the dead ones are not dead any more."""
        if not self.dead:
            return piece
        is_dead = self.dead.__contains__
        living = list(filterfalse(is_dead, piece))
        if len(living) < len(piece):
            for key in filter(is_dead, piece):
                del self.dead[key]
        return living

    def entries(self) -> Iterator[int]:
        """For tests: every entry of the log."""
        yield from self.log[: self.write]
        yield from self.log[self.read :]


class _Slot:
    """One node's side of the directory, by namespace."""

    __slots__ = ("count", "dying", "held", "mine")

    def __init__(self, slot: int) -> None:
        self.mine = slot + 1
        """The value of a page that only this slot holds: one object for all of them."""
        self.held: dict[bytes, _Held] = {}
        self.count = 0
        self.dying = False


class Directory:
    """Soft state page -> slots, both directions.

    A *slot* is one tier of one node; `allocate` hands out the lowest free one. A page is a namespace and 60 leading bits of its
    hash: an answer is a hint, which the node that holds the page checks in full. Among 50 M pages two that look alike are found
    once in a thousand directories, and cost a miss.

    Memory: a key is an int of 32 B, an entry of a dict (30 to 60 B; up to 100 B where keys come and go), and 9 B a holder in
    its log. The value is a number of 16-bit fields, one a holder: shared by all pages of one slot, else at most 32 B for up to
    three holders. Measured for a million keys (`make bench-master`): 87 B a key with one holder and 104 with two, 154 and
    181 when all of them have been replaced twice. Every step is bounded: tables split one at a time, logs are compacted as keys
    go, nodes and namespaces are dropped by `sweep`. Not thread-safe: one loop owns it.
    """

    def __init__(self, max_keys: int, rng: random.Random | None = None, max_bytes: int | None = None) -> None:
        self.max_keys = max_keys
        self.max_bytes = max_bytes
        """Adds beyond either cap are not kept; None is no cap on bytes."""
        self.refused_adds = 0
        """Adds that were not taken because of a cap: those pages are misses for other nodes."""
        self._rng = rng or random.Random()
        self._pages: dict[bytes, _Pages] = {}
        self._slots: dict[int, _Slot] = {}
        self._free: list[int] = []
        self._next_slot = 0
        self._keys = 0
        self._holdings = 0
        self._entries = 0
        self._helds = 0
        self._table_bytes = 0
        self._interned: dict[int, int] = {}
        self._crowded = False
        """Are there so many different sets of holders that each page may have its own?"""
        self._dying: list[int] = []
        self._graveyard: list[_Table | dict[int, None]] = []
        self._buried = 0

    def __len__(self) -> int:
        """Distinct pages that some slot holds."""
        return self._keys

    @property
    def sweeping(self) -> bool:
        """Is there anything left for `sweep` to do?"""
        return bool(self._dying or self._graveyard)

    @property
    def holdings(self) -> int:
        """Pairs of a page and a slot that holds it."""
        return self._holdings

    @property
    def resident_bytes(self) -> int:
        """An estimate of the memory that the directory takes, rather too high; it follows the tables' growth within a few
        thousand changes."""
        further = self._holdings - self._keys
        exact = (
            self._table_bytes
            + KEY_BYTES * self._keys
            + VALUE_BYTES * (further if self._crowded else min(further, len(self._interned)))
            + ENTRY_BYTES * self._entries
            + DEAD_BYTES * (self._entries - self._holdings + self._buried)
            + HELD_BYTES * self._helds
        )
        return exact * 11 // 10  # what the allocator loses

    def allocate(self) -> int:
        """A slot that holds nothing. The caller gives it back with `drop_node`."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._next_slot
            if slot >= _FIELD:
                raise RuntimeError(f"{slot} slots are in use, the most that a page's holders can name")
            self._next_slot += 1
        self._slots[slot] = _Slot(slot)
        return slot

    def keys_of(self, slot: int) -> int:
        """Pages that this slot holds."""
        return self._slots[slot].count

    def has(self, slot: int, namespace: bytes) -> bool:
        """Does this slot hold any page of this namespace?"""
        return namespace in self._slots[slot].held

    # ------------------------------------------------------------------ changes

    def add(self, slot: int, namespace: bytes, hashes: bytes) -> None:
        """This slot holds these pages (`hashes`: n x 32 bytes). Beyond a cap an add is counted, not kept; a further holder of a
        known page needs no key, but bytes."""
        node = self._living(slot)
        pages = self._pages.get(namespace)
        if pages is None:
            pages = self._pages[namespace] = _Pages()
            self._table_bytes += pages.bytes
        held = node.held.get(namespace)
        if held is None:
            held = node.held[namespace] = _Held()
            self._helds += 1
        mine = node.mine
        tables = pages.tables
        dead = held.dead
        key_room = self.max_keys - self._keys
        byte_room = sys.maxsize
        if self.max_bytes is not None:
            byte_room = (self.max_bytes - self.resident_bytes) // (KEY_BYTES + VALUE_BYTES + ENTRY_BYTES)
        new = taken = 0
        fresh: list[int] = []
        for key, index in zip(*pages.places(hashes), strict=True):
            table = tables[index]
            value = table.get(key)
            if value is None:
                if new >= key_room or taken >= byte_room:
                    self.refused_adds += 1
                    continue
                new += 1
                table[key] = mine
            elif value == mine or (value > _FIELD and mine in _fields(value)):
                continue
            elif taken >= byte_room:
                self.refused_adds += 1
                continue
            else:
                table[key] = self._intern(value | mine << _width(value))
            taken += 1
            if dead and key in dead:
                del dead[key]  # its entry in the log lives again
            else:
                fresh.append(key)
        held.log.extend(fresh)
        held.count += taken
        node.count += taken
        pages.keys += new
        self._keys += new
        self._holdings += taken
        self._entries += len(fresh)
        if new:
            pages.grow()
        self._changed(namespace, pages, taken)
        self._drop_if_empty(namespace, node)

    def remove(self, slot: int, namespace: bytes, hashes: bytes) -> None:
        """This slot no longer holds these pages. Pages it was not known to hold are ignored."""
        node = self._living(slot)
        held = node.held.get(namespace)
        if held is None:
            return
        pages = self._pages[namespace]
        mine = node.mine
        tables = pages.tables
        gone = []
        last = 0
        for key, index in zip(*pages.places(hashes), strict=True):
            table = tables[index]
            value = table.get(key, 0)
            if value == mine:
                del table[key]
                last += 1
            elif value > _FIELD and mine in _fields(value):
                table[key] = self._without(value, mine)
            else:
                continue
            gone.append(key)
        pages.keys -= last
        self._keys -= last
        held.dead.update(dict.fromkeys(gone))
        held.count -= len(gone)
        node.count -= len(gone)
        self._holdings -= len(gone)
        self._entries -= held.compact(len(gone))
        self._changed(namespace, pages, len(gone))
        self._drop_if_empty(namespace, node)

    def drop_namespace(self, namespace: bytes) -> None:
        """Forget one namespace of every slot, at a cost of the number of slots; its memory comes back with `sweep`."""
        pages = self._pages.pop(namespace, None)
        if pages is None:
            return
        self._keys -= pages.keys
        self._table_bytes -= pages.bytes
        for table in pages.distinct():
            self._bury(table)
        for node in self._slots.values():
            held = node.held.pop(namespace, None)
            if held is not None:
                node.count -= held.count
                self._discard(held)

    def drop_node(self, slot: int) -> None:
        """Give a slot back. Its keys go in steps, with `sweep` or `drop_some`; until then give it no rank."""
        self._living(slot).dying = True
        self._dying.append(slot)

    def drop_some(self, slot: int, limit: int) -> int:
        """Drop up to `limit` keys of a slot that was given back; returns how many it dropped. The slot is free when none are
        left."""
        node = self._slots[slot]
        if not node.dying:
            raise ValueError(f"slot {slot} is in use: drop_node it first")
        dropped = looked_at = 0
        while node.held and looked_at < limit:
            namespace, held = next(iter(node.held.items()))
            pages = self._pages[namespace]
            keys, shrunk = held.take(limit - looked_at)
            looked_at += max(1, shrunk)
            last = 0
            for key in keys:
                table = pages.tables[key >> pages.shift]
                if table[key] == node.mine:
                    del table[key]
                    last += 1
                else:
                    table[key] = self._without(table[key], node.mine)
            pages.keys -= last
            self._keys -= last
            dropped += len(keys)
            held.count -= len(keys)
            node.count -= len(keys)
            self._holdings -= len(keys)
            self._entries -= shrunk
            self._changed(namespace, pages, len(keys))
            self._drop_if_empty(namespace, node)
        if not node.held:
            self._dying.remove(slot)
            del self._slots[slot]
            heapq.heappush(self._free, slot)
        return dropped

    def sweep(self, limit: int) -> int:
        """Drop up to `limit` keys of slots and namespaces that were given up; returns how many are done. ~0.5 us a key."""
        done = 0
        while done < limit and self._dying:
            done += max(1, self.drop_some(self._dying[-1], limit - done))
        while done < limit and self._graveyard:
            table = self._graveyard[-1]
            before = done
            while table and done < limit:
                table.popitem()
                done += 1
            self._buried -= done - before
            if not table:
                self._graveyard.pop()
        return done

    # ------------------------------------------------------------------ questions

    def find(
        self,
        namespace: bytes,
        hashes: bytes,
        *,
        prefix: bool,
        ranks: bytes | bytearray,
        exclude: Container[int] = (),
        near: Container[int] = (),
        load: Callable[[int], float] | None = None,
        twins: Mapping[int, int] = _NO_TWINS,
    ) -> Holders:
        """Who holds these pages.

        `ranks` has one byte a slot: 0 is never an answer, else a lower one is better (DRAM before a cold tier before nodes that
        are about to leave); slots past its end count as 0. Slots in `exclude` (the asker's own) are never an answer, those in
        `near` (on the asker's host) come before others of their rank. Among equals one that this answer names already is
        taken, so that a batch goes to few peers, else the one with less `load` of two at random. The second holder is chosen in
        the same way from the others, but for the first one's slot in `twins`: both are of one node. Of a page with more than 16
        holders 8 of the best rank are compared, at random.

        With `prefix` the column ends before the first page that nobody holds. A page that would need a 256th peer counts as
        held by nobody.
        """
        count = len(hashes) // HASH_BYTES
        pages = self._pages.get(namespace)
        if pages is None or not count:
            return Holders(b"" if prefix else bytes(count), b"", [])
        choice = _Choice(self._rng, ranks, exclude, near, load, twins)
        firsts = choice.firsts
        column = b""
        parts: list[list[int]] = []
        step = PREFIX_STEP if prefix else count
        for start in range(0, count, step):
            part = pages.values(hashes[start * HASH_BYTES : (start + step) * HASH_BYTES])
            ended = False
            for value in _distinct(part):
                if value not in firsts:
                    choice.decide(value)
                if prefix and not firsts[value]:
                    del part[part.index(value) :]
                    ended = True
                    break
            column += _column(part, firsts)
            parts.append(part)
            if ended:
                break
        others = b""
        if seconds := choice.seconds():
            others = b"".join([_column(part, seconds) for part in parts])
        return Holders(column, others if any(others) else b"", choice.slots)

    # ------------------------------------------------------------------ inside

    def validate(self) -> None:
        """Both directions agree, and every count is what it counts. For tests: costs the whole directory."""
        holders: dict[tuple[bytes, int], set[int]] = {}
        entries = helds = holdings = 0
        for slot, node in self._slots.items():
            count = 0
            for namespace, held in node.held.items():
                logged = list(held.entries())
                living = set(logged) - set(held.dead)
                assert len(set(logged)) == len(logged), "a log has a key twice"
                assert set(held.dead) <= set(logged), "a key is dead that is in no log"
                assert living, f"slot {slot} keeps an empty namespace {namespace.hex()}"
                assert len(living) == held.count
                assert 0 <= held.write <= held.read <= len(held.log)
                for key in living:
                    holders.setdefault((namespace, key), set()).add(slot)
                count += len(living)
                entries += len(held.log)
                helds += 1
            assert count == node.count, f"slot {slot} says {node.count} keys and holds {count}"
            assert node.dying == (slot in self._dying)
            holdings += count
        pages: dict[tuple[bytes, int], set[int]] = {}
        for namespace, space in self._pages.items():
            assert space.keys, f"empty namespace {namespace.hex()} was kept"
            assert space.keys == sum(map(len, space.distinct()))
            for table in space.distinct():
                for key, value in table.items():
                    assert space.tables[key >> space.shift] is table
                    fields = list(_fields(value))
                    assert len(set(fields)) == len(fields)
                    assert all(fields)
                    pages[namespace, key] = {field - 1 for field in fields}
        assert pages == holders, "pages -> slots and slots -> pages disagree"
        assert len(pages) == self._keys <= self.max_keys
        assert (entries, helds, holdings) == (self._entries, self._helds, self._holdings)
        assert self._table_bytes == sum(space.bytes for space in self._pages.values())
        assert self._buried == sum(map(len, self._graveyard))
        assert len(set(self._free)) == len(self._free)
        assert set(self._free) | set(self._slots) == set(range(self._next_slot))
        assert not set(self._free) & set(self._slots)

    def _living(self, slot: int) -> _Slot:
        node = self._slots[slot]
        if node.dying:
            raise ValueError(f"slot {slot} was given back")
        return node

    def _intern(self, value: int) -> int:
        # Most pages that two nodes hold are held by the same two.
        if len(self._interned) >= MAX_INTERNED_VALUES:
            self._interned.clear()
            self._crowded = True
        return self._interned.setdefault(value, value)

    def _without(self, value: int, mine: int) -> int:
        """One holder less of several."""
        left = 0
        for at, field in enumerate(field for field in _fields(value) if field != mine):
            left |= field << at * _FIELD_BITS
        return self._slots[left - 1].mine if left <= _FIELD else self._intern(left)

    def _changed(self, namespace: bytes, pages: _Pages, changes: int) -> None:
        pages.changes += changes
        if pages.changes > min(ACCOUNT_EVERY, 64 + pages.keys // 8) and pages.keys:
            self._table_bytes -= pages.bytes
            pages.account()
            self._table_bytes += pages.bytes

    def _drop_if_empty(self, namespace: bytes, node: _Slot) -> None:
        held = node.held.get(namespace)
        if held is not None and not held.count:
            del node.held[namespace]
            self._discard(held)
        pages = self._pages.get(namespace)
        if pages is not None and not pages.keys:
            del self._pages[namespace]
            self._table_bytes -= pages.bytes

    def _discard(self, held: _Held) -> None:
        self._helds -= 1
        self._entries -= len(held.log)
        self._holdings -= held.count
        self._bury(held.dead)

    def _bury(self, table: _Table | dict[int, None]) -> None:
        if table:
            self._graveyard.append(table)
            self._buried += len(table)


class _Choice:
    """Which holders one answer names. Everything is decided once per set of holders, not per page."""

    def __init__(
        self,
        rng: random.Random,
        ranks: bytes | bytearray,
        exclude: Container[int],
        near: Container[int],
        load: Callable[[int], float] | None,
        twins: Mapping[int, int],
    ) -> None:
        self.firsts: dict[int, int] = {0: 0}
        """Value of a page -> 1 + index into `slots`, or 0."""
        self.slots: list[int] = []
        self._named: dict[int, int] = {}
        self._spare: dict[int, list[tuple[int, int]]] = {}
        self._rng = rng
        self._ranks = ranks
        self._exclude = exclude
        self._near = near
        self._load = load
        self._twins = twins
        self._one_rank = not ranks.translate(None, b"\0\1")

    def decide(self, value: int) -> None:
        if value <= _FIELD:
            slot = value - 1
            answerable = slot < len(self._ranks) and self._ranks[slot] and slot not in self._exclude
            self.firsts[value] = self._name(slot) if answerable else 0
            return
        candidates = self._candidates(value)
        self.firsts[value] = self._pick(candidates)
        if candidates:
            self._spare[value] = candidates

    def seconds(self) -> dict[int, int]:
        """The same for second holders; empty when no page has one. After all firsts, so that these never take a first one's
        place among the peers."""
        if not self._spare:
            return {}
        return dict.fromkeys(self.firsts, 0) | {value: self._pick(candidates) for value, candidates in self._spare.items()}

    def _candidates(self, value: int) -> list[tuple[int, int]]:
        """(rank, slot) of the holders that may be answered."""
        fields: Iterable[int] = _fields(value)
        limit = 2 * WEIGHED
        if value >> limit * _FIELD_BITS:
            fields, limit = self._best(fields), WEIGHED
        ranks, end = self._ranks, len(self._ranks)
        answerable = (
            (2 * ranks[field - 1] - (field - 1 in self._near), field - 1)
            for field in fields
            if field <= end and ranks[field - 1] and field - 1 not in self._exclude
        )
        return list(islice(answerable, limit))

    def _best(self, fields: Iterable[int]) -> list[int]:
        """Those of the best rank, begun at random; all of them, in the order of their ranks, when these are few."""
        ranks, end = self._ranks, len(self._ranks)
        listed = list(fields)
        start = self._rng.randrange(len(listed))
        listed = listed[start:] + listed[:start]
        if self._one_rank:
            return listed
        best = [field for field in listed if field <= end and ranks[field - 1] == 1]
        if len(best) < WEIGHED:
            return sorted((field for field in listed if field <= end), key=lambda field: ranks[field - 1])
        return best

    def _pick(self, candidates: list[tuple[int, int]]) -> int:
        """Take the best one off the list; returns 1 + its index among the peers, 0 when there is none or no place."""
        if not candidates:
            return 0
        best = min(candidates)[0]
        equals = [candidate for candidate in candidates if candidate[0] == best]
        chosen = next((candidate for candidate in equals if candidate[1] in self._named), None)
        if chosen is None and len(self.slots) >= MAX_PEERS_PER_REPLY:
            chosen = next((candidate for candidate in candidates if candidate[1] in self._named), None)
            if chosen is None:
                return 0
        if chosen is None:
            chosen = equals[0] if len(equals) == 1 else self._of_two(equals)
        candidates.remove(chosen)
        twin = self._twins.get(chosen[1])
        if twin is not None:
            candidates[:] = [candidate for candidate in candidates if candidate[1] != twin]
        return self._name(chosen[1])

    def _name(self, slot: int) -> int:
        """1 + its index among the peers, 0 when there is no place for another one."""
        named = self._named.get(slot, 0)
        if not named and len(self.slots) < MAX_PEERS_PER_REPLY:
            self.slots.append(slot)
            named = self._named[slot] = len(self.slots)
        return named

    def _of_two(self, equals: list[tuple[int, int]]) -> tuple[int, int]:
        one, two = self._rng.sample(equals, 2)
        if self._load is not None and self._load(two[1]) < self._load(one[1]):
            return two
        return one


def _distinct(values: list[int]) -> Iterable[int]:
    """In order of their first appearance. Mostly there is one: a chain lies where it was computed."""
    if values.count(values[0]) == len(values):
        return (values[0],)
    return dict.fromkeys(values)


def _column(values: list[int], entries: dict[int, int]) -> bytes:
    if values and values.count(values[0]) == len(values):
        return bytes((entries[values[0]],)) * len(values)
    return bytes(map(entries.__getitem__, values))


def _width(value: int) -> int:
    return -(-value.bit_length() // _FIELD_BITS) * _FIELD_BITS


def _fields(value: int) -> Iterable[int]:
    """1 + the slot of each holder."""
    if value <= _FIELD:
        return (value,)
    if value <= 0xFFFFFFFF:
        return (value & _FIELD, value >> _FIELD_BITS)
    return array("H", value.to_bytes(_width(value) // 8, sys.byteorder))
