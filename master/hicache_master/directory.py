"""Which nodes hold which page: the master's soft state, without I/O and without a clock."""

from __future__ import annotations

import heapq
import random
import struct

from hicache_mooncake.protocol import DIRECTORY_HASH_BYTES, HASH_BYTES

SHARDS = 16
"""Each table is cut in this many dicts, so that growing one of them (10 M keys) rehashes a sixteenth, not all."""
MAX_PEERS_PER_REPLY = 255
"""A holder column has one byte a key, and 0 says nobody."""
MAX_INTERNED_MASKS = 65_536

_leading = struct.Struct(f"{DIRECTORY_HASH_BYTES}s{HASH_BYTES - DIRECTORY_HASH_BYTES}x")


class _Slot:
    """One node's side of the directory: per namespace, the keys it holds. Dicts, not sets: a set grows by four below 50,000
    entries and would cost up to 107 B a key, a dict costs 30 to 60 B, and both pop in constant time."""

    __slots__ = ("count", "dying", "tables")

    def __init__(self) -> None:
        self.tables: dict[bytes, list[dict[bytes, None]]] = {}
        self.count = 0
        self.dying = False


class Directory:
    """Soft state page -> nodes, both directions.

    A node is a *slot*, a bit of a holder mask; `allocate` hands out the lowest free one. A page is a namespace and the leading
    16 bytes of its hash: an answer is a hint, which the node that holds the page checks in full.

    Memory, measured (resident set, CPython 3.11): a page on one node costs 134 to 193 B, depending on how far the dicts are
    from their next doubling (350 k keys 190, 720 k 183, 1 M 148, 4 M 150, 10 M 134). Each further holder of a page adds about
    110 B (2 M pages on two nodes each: 260 B a page). Not thread-safe: one loop owns it.
    """

    def __init__(self, max_keys: int, rng: random.Random | None = None) -> None:
        self.max_keys = max_keys
        self.refused_adds = 0
        """Adds that were not taken because `max_keys` were known already: those pages are misses for other nodes."""
        self._rng = rng or random.Random()
        self._pages: dict[bytes, list[dict[bytes, int]]] = {}
        self._slots: dict[int, _Slot] = {}
        self._free: list[int] = []
        self._next_slot = 0
        self._keys = 0
        self._masks: dict[int, int] = {}
        self._dying: list[int] = []
        self._graveyard: list[dict[bytes, int] | dict[bytes, None]] = []

    def __len__(self) -> int:
        """Distinct pages that some slot holds."""
        return self._keys

    @property
    def sweeping(self) -> bool:
        """Is there anything left for `sweep` to do?"""
        return bool(self._dying or self._graveyard)

    def allocate(self) -> int:
        """A slot that holds nothing. The caller gives it back with `drop_node`."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._next_slot
            self._next_slot += 1
        self._slots[slot] = _Slot()
        return slot

    def keys_of(self, slot: int) -> int:
        """Pages that this slot holds."""
        return self._slots[slot].count

    def add(self, slot: int, namespace: bytes, hashes: bytes) -> None:
        """This slot holds these pages (`hashes`: n x 32 bytes). Beyond `max_keys` pages an add is counted, not kept."""
        node = self._living(slot)
        pages = self._pages.get(namespace)
        if pages is None:
            pages = self._pages[namespace] = [{} for _ in range(SHARDS)]
        held = node.tables.get(namespace)
        if held is None:
            held = node.tables[namespace] = [{} for _ in range(SHARDS)]
        bit = self._intern(1 << slot)
        room = self.max_keys - self._keys
        new = taken = 0
        for (key,) in _leading.iter_unpack(hashes):
            shard = key[0] % SHARDS
            table = pages[shard]
            mask = table.get(key)
            if mask is None:
                if new >= room:
                    self.refused_adds += 1
                    continue
                new += 1
                table[key] = bit
            elif mask & bit:
                continue
            else:
                table[key] = self._intern(mask | bit)
            held[shard][key] = None
            taken += 1
        self._keys += new
        node.count += taken
        self._drop_if_empty(namespace, node)

    def remove(self, slot: int, namespace: bytes, hashes: bytes) -> None:
        """This slot no longer holds these pages. Pages it was not known to hold are ignored."""
        node = self._living(slot)
        held = node.tables.get(namespace)
        if held is None:
            return
        pages = self._pages[namespace]
        bit = 1 << slot
        for (key,) in _leading.iter_unpack(hashes):
            shard = key[0] % SHARDS
            if key not in held[shard]:
                continue
            del held[shard][key]
            node.count -= 1
            self._clear_bit(pages, shard, key, bit)
        self._drop_if_empty(namespace, node)

    def lookup(
        self, namespace: bytes, hashes: bytes, exclude_slot: int | None, prefix: bool, allowed_slots: int
    ) -> tuple[bytes, list[int]]:
        """Who holds these pages: a column with 0 (nobody) or 1 + an index into the list of slots that comes with it.

        Only slots in the mask `allowed_slots` are answered, `exclude_slot` never. Where several hold a page, one that this
        answer already names is preferred, then a random one: few peers a batch, and load spread over batches. With `prefix`
        the column ends before the first page that nobody holds. A page that would need a 256th peer counts as held by nobody.
        """
        if exclude_slot is not None:
            allowed_slots &= ~(1 << exclude_slot)
        pages = self._pages.get(namespace)
        slots: list[int] = []
        if pages is None or not allowed_slots:
            return (b"" if prefix else bytes(len(hashes) // HASH_BYTES)), slots
        column = bytearray()
        chosen: dict[int, int] = {}  # slot -> 1 + index
        by_mask: dict[int, int] = {0: 0}
        for (key,) in _leading.iter_unpack(hashes):
            mask = pages[key[0] % SHARDS].get(key, 0)
            holder = by_mask.get(mask)
            if holder is None:
                holder = self._choose(mask & allowed_slots, chosen, slots)
                if holder or not mask & allowed_slots:
                    by_mask[mask] = holder
            if not holder and prefix:
                break
            column.append(holder)
        return bytes(column), slots

    def drop_namespace(self, namespace: bytes) -> None:
        """Forget one namespace of every slot, at a cost of the number of slots; its memory comes back with `sweep`."""
        pages = self._pages.pop(namespace, None)
        if pages is None:
            return
        self._keys -= sum(map(len, pages))
        self._graveyard.extend(table for table in pages if table)
        for node in self._slots.values():
            held = node.tables.pop(namespace, None)
            if held is not None:
                node.count -= sum(map(len, held))
                self._graveyard.extend(table for table in held if table)

    def drop_node(self, slot: int) -> None:
        """Give a slot back. Its keys go in steps, with `sweep` or `drop_some`; until then leave it out of `allowed_slots`."""
        self._living(slot).dying = True
        self._dying.append(slot)

    def drop_some(self, slot: int, limit: int) -> int:
        """Drop up to `limit` keys of a slot that was given back; returns how many it dropped. The slot is free when none are
        left."""
        node = self._slots[slot]
        if not node.dying:
            raise ValueError(f"slot {slot} is in use: drop_node it first")
        bit = 1 << slot
        dropped = 0
        while node.tables and dropped < limit:
            namespace, held = next(iter(node.tables.items()))
            pages = self._pages[namespace]
            for shard, keys in enumerate(held):
                while keys and dropped < limit:
                    key, _ = keys.popitem()
                    self._clear_bit(pages, shard, key, bit)
                    dropped += 1
            if not any(held):
                self._drop_if_empty(namespace, node)
        node.count -= dropped
        if not node.tables:
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
            while table and done < limit:
                table.popitem()
                done += 1
            if not table:
                self._graveyard.pop()
        return done

    def validate(self) -> None:
        """Both directions agree, and every count is what it counts. For tests: costs the whole directory."""
        masks: dict[tuple[bytes, bytes], int] = {}
        for slot, node in self._slots.items():
            count = 0
            for namespace, held in node.tables.items():
                assert any(held), f"slot {slot} keeps an empty namespace {namespace.hex()}"
                for shard, table in enumerate(held):
                    count += len(table)
                    for key in table:
                        assert key[0] % SHARDS == shard
                        masks[namespace, key] = masks.get((namespace, key), 0) | 1 << slot
            assert count == node.count, f"slot {slot} says {node.count} keys and holds {count}"
            assert node.dying == (slot in self._dying)
        pages = {}
        for namespace, shards in self._pages.items():
            assert any(shards), f"empty namespace {namespace.hex()} was kept"
            pages.update({(namespace, key): mask for table in shards for key, mask in table.items()})
        assert pages == masks, "pages -> slots and slots -> pages disagree"
        assert len(pages) == self._keys <= self.max_keys
        assert len(set(self._free)) == len(self._free)
        assert set(self._free) | set(self._slots) == set(range(self._next_slot))
        assert not set(self._free) & set(self._slots)

    def _living(self, slot: int) -> _Slot:
        node = self._slots[slot]
        if node.dying:
            raise ValueError(f"slot {slot} was given back")
        return node

    def _intern(self, mask: int) -> int:
        # Past 8 bits an int is an object of its own, and a million pages of one node share one mask.
        if len(self._masks) >= MAX_INTERNED_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def _clear_bit(self, pages: list[dict[bytes, int]], shard: int, key: bytes, bit: int) -> None:
        table = pages[shard]
        mask = table[key] & ~bit
        if mask:
            table[key] = self._intern(mask)
            return
        del table[key]
        self._keys -= 1
        if not table:
            pages[shard] = {}  # a dict that was emptied keeps its size

    def _drop_if_empty(self, namespace: bytes, node: _Slot) -> None:
        held = node.tables.get(namespace)
        if held is not None and not any(held):
            del node.tables[namespace]
        pages = self._pages.get(namespace)
        if pages is not None and not any(pages):
            del self._pages[namespace]

    def _choose(self, mask: int, chosen: dict[int, int], slots: list[int]) -> int:
        candidates = []
        while mask:
            low = mask & -mask
            slot = low.bit_length() - 1
            if slot in chosen:
                return chosen[slot]
            candidates.append(slot)
            mask ^= low
        if not candidates or len(slots) >= MAX_PEERS_PER_REPLY:
            return 0
        slot = self._rng.choice(candidates)
        slots.append(slot)
        chosen[slot] = len(slots)
        return len(slots)
