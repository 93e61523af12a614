"""Which pages went lately, at 16 bytes for each page that is here."""

from __future__ import annotations

from array import array

_STAMPS = 1 << 15


class Ghosts:
    """Fingerprints of the last pages that went, of two kinds, in a table without chains: one that is full of younger entries
    forgets the older. A page is remembered while twice as many of its kind have gone as are held; 1 in some 20,000 answers is
    wrong, which costs a page an undeserved place in the order and nothing else."""

    __slots__ = ("_gone", "_mask", "_stamps", "_table")

    def __init__(self) -> None:
        self._table = array("I", bytes(4 * 64))
        self._mask = 63
        self._stamps = [1, 1]
        self._gone = [0, 0]

    def put(self, page_hash: bytes, kind: int, held: int) -> None:
        """A page has gone from a cache that holds `held`. `kind`: 0 or 1."""
        if 4 * held > 2 * len(self._table):
            self._mask = (1 << (4 * held - 1).bit_length()) - 1
            self._table = array("I", bytes(4 * (self._mask + 1)))
        self._gone[kind] += 1
        if self._gone[kind] * 32 >= held:
            self._gone[kind] = 0
            self._stamps[kind] = (self._stamps[kind] + 1) % _STAMPS
        bits = int.from_bytes(page_hash[:8], "little")
        slot, mark = bits & self._mask, bits >> 32 & 0xFFFF
        table = self._table
        if table[slot] & 0xFFFF != mark and self._age(table[slot]) < self._age(table[slot ^ 1]):
            slot ^= 1
        table[slot] = self._stamps[kind] << 17 | kind << 16 | mark

    def take(self, page_hash: bytes) -> tuple[int, float] | None:
        """(kind, how many of its kind have gone since, as a share of those held) of a page that went lately; forgets it."""
        bits = int.from_bytes(page_hash[:8], "little")
        slot, mark = bits & self._mask, bits >> 32 & 0xFFFF
        for each in (slot, slot ^ 1):
            entry = self._table[each]
            if entry and entry & 0xFFFF == mark:
                age = self._age(entry)
                if age <= 64:
                    self._table[each] = 0
                    return entry >> 16 & 1, age / 32
        return None

    def _age(self, entry: int) -> int:
        return (self._stamps[entry >> 16 & 1] - (entry >> 17)) % _STAMPS if entry else _STAMPS
