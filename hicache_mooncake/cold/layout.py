"""Where bodies lie in the pages' file: equal segments, written in order, and emptied whole, the oldest first. No I/O.

Bodies are appended to the open segment, so writes are large and sequential whatever the size of a page, and pages that left
DRAM together lie side by side. When no segment is free the oldest is emptied: nothing is moved to make room, and so nothing is
written twice, but for those of its pages that are asked for again and again, at most half of a segment (`keep_bytes`).

Each filling of a segment has a number of its own. Who finds a body by an older number finds another one's bytes there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[Any]]
    Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

BLOCK = 4096
"""Bodies begin at multiples of it, and take whole ones: as direct I/O wants it, and as they lie in DRAM."""
SEGMENT_BYTES = 256 << 20
LEAST_SEGMENTS = 8
"""Emptying one must not cost much of what there is."""
LEAST_BYTES = 64 << 20
_KEPT_SHARE = 0.5
_GROWN = 16


@dataclass(slots=True)
class Segment:
    """A stretch of the file that has been written to: its number in the file, and that of its filling."""

    number: int
    filling: int
    used: int = 0


def blocks(length: int) -> int:
    """Bytes of the file that a body of this length takes."""
    return -(-length // BLOCK) * BLOCK


def segment_bytes_for(capacity_bytes: int) -> int:
    """Raises ValueError for less than there is any use in."""
    if capacity_bytes < LEAST_BYTES:
        raise ValueError(f"{capacity_bytes} bytes are too few: a cold tier has at least {LEAST_BYTES >> 20}mb")
    return min(SEGMENT_BYTES, capacity_bytes // LEAST_SEGMENTS // BLOCK * BLOCK)


def suits(segment_bytes: int, capacity_bytes: int) -> bool:
    """Can segments of this size, of a tier that had another capacity, be gone on with?"""
    enough = capacity_bytes // segment_bytes >= LEAST_SEGMENTS // 2
    return enough and segment_bytes * _GROWN >= segment_bytes_for(capacity_bytes)


class Layout:
    """Of `segments` segments. `filled`: those that hold something, as the index remembers them; the last one filled is gone on
    with. Not thread-safe."""

    def __init__(self, segments: int, segment_bytes: int, filled: Iterable[Segment] = ()) -> None:
        self.segments = segments
        self.segment_bytes = segment_bytes
        self._filled = {segment.number: segment for segment in sorted(filled, key=lambda segment: segment.filling)}
        self._free = [number for number in reversed(range(segments)) if number not in self._filled]
        self._fillings = max((segment.filling for segment in self._filled.values()), default=0)
        self._lost: list[int] = []
        self._open: Segment | None = None
        if self._filled:
            last = next(reversed(self._filled.values()))
            if last.used < segment_bytes:
                self._open = last

    @property
    def used_bytes(self) -> int:
        """Of the file, with what is dead in segments that are not emptied yet."""
        return sum(segment.used for segment in self._filled.values())

    @property
    def keep_bytes(self) -> int:
        """How much of an emptied segment may be written anew: then no more than twice as much is written as came."""
        return int(self.segment_bytes * _KEPT_SHARE)

    @property
    def open(self) -> Segment | None:
        return self._open

    def room(self) -> int:
        """Bytes left in the open segment."""
        return self.segment_bytes - self._open.used if self._open is not None else 0

    def append(self, length: int) -> int:
        """Offset in the file of a body that is written next. There must be room."""
        segment = self._open
        if segment is None or blocks(length) > self.room():
            raise ValueError(f"no room for {length} bytes")
        at = segment.number * self.segment_bytes + segment.used
        segment.used += blocks(length)
        return at

    def take_back(self, used: int) -> None:
        """What was appended to the open segment since it had so many bytes has not been written."""
        if self._open is not None:
            self._open.used = used

    @property
    def free(self) -> int:
        """How many segments are."""
        return len(self._free)

    def next_free(self) -> int | None:
        """The segment that `begin` would open, or None: then the oldest has to be emptied."""
        return self._free[-1] if self._free else None

    def begin(self) -> Segment:
        """Open the next free segment; what was open is full now, whatever room it has left."""
        self._fillings += 1
        segment = self._open = Segment(self._free.pop(), self._fillings)
        self._filled[segment.number] = segment
        return segment

    def seal(self) -> None:
        """What is open takes no more, and can be emptied."""
        self._open = None

    def oldest(self) -> Segment | None:
        """The one to be emptied next; never the open one."""
        first = next(iter(self._filled.values()), None)
        return first if first is not self._open else None

    def oldest_few(self, count: int) -> list[Segment]:
        """The oldest first; never the open one."""
        return list(itertools.islice((segment for segment in self._filled.values() if segment is not self._open), count))

    def emptied(self, segment: Segment) -> None:
        del self._filled[segment.number]
        self._free.append(segment.number)

    def lose(self, number: int) -> None:
        """A free segment that cannot be used: the disk has no room for it."""
        self._free.remove(number)
        self._lost.append(number)

    def regain(self) -> None:
        """Try those again: others may have freed room."""
        self._free[:0] = self._lost
        self._lost.clear()

    def holds(self, offset: int, length: int, filling: int) -> bool:
        """Can a body of this filling lie there? Not across segments, nor past what was written."""
        number, at = divmod(offset, self.segment_bytes)
        segment = self._filled.get(number)
        return (
            segment is not None
            and segment.filling == filling
            and length > 0
            and at + length <= segment.used
            and at % BLOCK == 0
        )

    def holds_each(self, offsets: Numbers, lengths: Numbers, fillings: Numbers) -> Mask:
        """`holds` of many bodies. May be called beside a writer."""
        import numpy as np  # movers read the file too, and have no use for it

        used: Numbers = np.zeros(self.segments + 1, np.uint64)
        filling: Numbers = np.zeros(self.segments + 1, np.uint32)
        for segment in list(self._filled.values()):
            used[segment.number], filling[segment.number] = segment.used, segment.filling
        number, at = np.divmod(offsets, np.uint64(self.segment_bytes))
        number = np.minimum(number, np.uint64(self.segments))  # of a segment that there is not: filling 0
        inside = (lengths > 0) & (at + lengths <= used[number]) & (at % np.uint64(BLOCK) == 0)
        good: Mask = inside & (filling[number] == fillings)
        return good
