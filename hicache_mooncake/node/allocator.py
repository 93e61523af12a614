"""Allocation inside a segment: offsets only, no memory touched.

A coalescing allocator with size bins in the manner of TLSF: exact bins for small blocks, eight bins per power of two above,
found through a bitmap. Uniform pages (the common case) hit their exact bin; mixed sizes coalesce with their neighbours when
freed, so eviction of neighbours makes room for larger pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GRANULE = 4096
"""Bodies are page-aligned: a copy between differently aligned pages runs at half the rate."""

_EXACT = 64
_SUB = 8
_OWN_BIN_SCAN = 8


def _bin_of(granules: int) -> int:
    if granules < _EXACT:
        return granules
    log = granules.bit_length() - 1
    return _EXACT + (log - 6) * _SUB + ((granules >> (log - 3)) & 7)


def blocks_of(size_bytes: int) -> int:
    """Bytes that a block of this size takes."""
    return (size_bytes + GRANULE - 1) // GRANULE * GRANULE


class Allocator:
    """Offsets in [0, capacity), multiples of GRANULE. Not thread-safe; O(1) for the sizes that repeat."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity = capacity_bytes // GRANULE * GRANULE
        if self.capacity <= 0:
            raise ValueError(f"segment of {capacity_bytes} bytes: at least {GRANULE} are needed")
        self.used = 0
        self._begins = bytearray((self.capacity // GRANULE + 7) // 8)
        """A bit a granule: 1 where a block begins that is used. Its size is its owner's to know, who has it anyway."""
        self._size_of_free: dict[int, int] = {}
        self._start_of_free_end: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}
        self._bitmap = 0
        self._insert_free(0, self.capacity)

    def allocate(self, size_bytes: int) -> int | None:
        """Offset of a block of at least `size_bytes` (> 0), or None when no free block is large enough."""
        if size_bytes <= 0:
            raise ValueError(f"allocation of {size_bytes} bytes")
        offsets = self.allocate_many(size_bytes, 1)
        return offsets[0] if offsets else None

    def allocate_many(self, size_bytes: int, count: int) -> list[int]:
        """Up to `count` blocks of one size, carved side by side where there is room: as many as fit without anything else."""
        size = blocks_of(size_bytes)
        offsets: list[int] = []
        begins = self._begins
        while len(offsets) < count:
            start = self._find(size)
            if start is None:
                break
            free_size = self._size_of_free[start]
            take = min(count - len(offsets), free_size // size)
            self._remove_free(start, free_size)
            end = start + take * size
            if end < start + free_size:
                self._insert_free(end, start + free_size - end)
            for granule in range(start // GRANULE, end // GRANULE, size // GRANULE):
                begins[granule >> 3] |= 1 << (granule & 7)
            offsets.extend(range(start, end, size))
        self.used += len(offsets) * size
        return offsets

    def free(self, offset: int, size_bytes: int) -> int:
        """Give a block back that was allocated with this size; returns how many bytes are free now that were not. Raises
        KeyError for an offset where none begins that is allocated."""
        return self.free_many((offset,), size_bytes)

    def free_many(self, offsets: Sequence[int], size_bytes: int) -> int:
        """The same of any number of blocks of one size, at little more than the cost of one where they lie side by side. After
        a KeyError those before the one at fault, by their offsets, are free."""
        size = blocks_of(size_bytes)
        begins = self._begins
        start = end = 0
        for offset in sorted(offsets):
            granule = offset // GRANULE
            bit = 1 << (granule & 7)
            if offset % GRANULE or not 0 <= offset < self.capacity or not begins[granule >> 3] & bit:
                self._coalesce(start, end)
                raise KeyError(offset)
            begins[granule >> 3] ^= bit
            if offset != end:
                self._coalesce(start, end)
                start = offset
            end = offset + size
        self._coalesce(start, end)
        return size * len(offsets)

    def _coalesce(self, start: int, end: int) -> None:
        """What is between these offsets is free now, as one block with what is free on both sides of it."""
        if start == end:
            return
        self.used -= end - start
        left = self._start_of_free_end.get(start)
        if left is not None:
            self._remove_free(left, start - left)
            start = left
        right_size = self._size_of_free.get(end)
        if right_size is not None:
            self._remove_free(end, right_size)
            end += right_size
        self._insert_free(start, end - start)

    def free_before(self, offset: int) -> int:
        """Bytes that are free right before this offset."""
        start = self._start_of_free_end.get(offset)
        return 0 if start is None else offset - start

    def free_behind(self, offset: int) -> int:
        """Bytes that are free from this offset on, if the block before it is used."""
        return self._size_of_free.get(offset, 0)

    def _find(self, size: int) -> int | None:
        index = _bin_of(size // GRANULE)
        own = self._bins.get(index)
        if own:
            for scanned, start in enumerate(own):
                if self._size_of_free[start] >= size:
                    return start
                if scanned >= _OWN_BIN_SCAN:
                    break
        larger = self._bitmap >> (index + 1)
        if not larger:
            # Last resort before saying no: the rest of the own bin, whose blocks may be large enough.
            if own:
                return next((start for start in own if self._size_of_free[start] >= size), None)
            return None
        lowest = index + 1 + (larger & -larger).bit_length() - 1
        return next(iter(self._bins[lowest]))

    def _insert_free(self, start: int, size: int) -> None:
        index = _bin_of(size // GRANULE)
        self._size_of_free[start] = size
        self._start_of_free_end[start + size] = start
        self._bins.setdefault(index, {})[start] = None
        self._bitmap |= 1 << index

    def _remove_free(self, start: int, size: int) -> None:
        index = _bin_of(size // GRANULE)
        del self._size_of_free[start]
        del self._start_of_free_end[start + size]
        members = self._bins[index]
        del members[start]
        if not members:
            del self._bins[index]
            self._bitmap &= ~(1 << index)

    def validate(self, used: Iterable[tuple[int, int]]) -> None:
        """`used`: offset and size of all that its users hold. Every byte is in exactly one block, no two free blocks touch, the
        bins hold exactly the free blocks."""
        held = [(offset, blocks_of(size)) for offset, size in used]
        begins = bytearray(len(self._begins))
        for offset, _ in held:
            begins[offset // GRANULE >> 3] |= 1 << (offset // GRANULE & 7)
        assert begins == self._begins, "a block without an owner, or an owner without a block"
        blocks = [(o, s, True) for o, s in held] + [(o, s, False) for o, s in self._size_of_free.items()]
        blocks.sort()
        at, last_free = 0, False
        for offset, size, taken in blocks:
            assert offset == at, f"gap or overlap at {at}"
            assert size > 0
            assert size % GRANULE == 0
            assert taken or not last_free, f"free blocks touch at {offset}"
            at, last_free = offset + size, not taken
        assert at == self.capacity, f"blocks end at {at} of {self.capacity}"
        assert self.used == sum(size for _, size in held)
        binned = {start: index for index, members in self._bins.items() for start in members}
        assert binned == {start: _bin_of(size // GRANULE) for start, size in self._size_of_free.items()}
        assert self._bitmap == sum(1 << index for index in self._bins)
        assert self._start_of_free_end == {start + size: start for start, size in self._size_of_free.items()}
