"""Which pages went lately, at 16 bytes for each page that is here."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator

_STAMPS = 1 << 15
_fingerprint = struct.Struct("<Q").unpack_from


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

    def put(self, hashes: Iterable[bytes], kind: int, held: int) -> None:
        """Pages have gone, in this order, from a cache that held `held` with them. `kind`: 0 or 1."""
        if 4 * held > 2 * len(self._table):
            self._mask = (1 << (4 * held - 1).bit_length()) - 1
            self._table = array("I", bytes(4 * (self._mask + 1)))
        table, mask, stamps, gone = self._table, self._mask, self._stamps, self._gone[kind]
        for (bits,) in map(_fingerprint, hashes):
            gone += 1
            if gone * 32 >= held:
                gone = 0
                stamps[kind] = (stamps[kind] + 1) % _STAMPS
            held -= 1
            slot, mark = bits & mask, bits >> 32 & 0xFFFF
            there, beside = table[slot], table[slot ^ 1]
            if there and there & 0xFFFF != mark:
                age = (stamps[there >> 16 & 1] - (there >> 17)) % _STAMPS
                if not beside or age < (stamps[beside >> 16 & 1] - (beside >> 17)) % _STAMPS:
                    slot ^= 1
            table[slot] = stamps[kind] << 17 | kind << 16 | mark
        self._gone[kind] = gone

    def take(self, hashes: Iterable[bytes]) -> Iterator[tuple[int, int, float]]:
        """(position, kind, how many of its kind have gone since, as a share of those held) of each page that went lately;
        forgets it."""
        table, mask, stamps = self._table, self._mask, self._stamps
        for at, (bits,) in enumerate(map(_fingerprint, hashes)):
            slot, mark = bits & mask, bits >> 32 & 0xFFFF
            if table[slot] & 0xFFFF != mark and table[slot ^ 1] & 0xFFFF != mark:
                continue
            for each in (slot, slot ^ 1):
                entry = table[each]
                age = (stamps[entry >> 16 & 1] - (entry >> 17)) % _STAMPS
                if entry and entry & 0xFFFF == mark and age <= 64:
                    table[each] = 0
                    yield at, entry >> 16 & 1, age / 32
                    break
