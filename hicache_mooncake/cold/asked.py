"""How often pages were asked for lately, roughly: counters that several pages may share, halved now and then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_mooncake.protocol import HASH_BYTES

_ROWS = 4
_MOST = 15
_ADDED_A_COUNTER = 8
"""After so many counts, a counter, all are halved: what was asked for long ago fades."""


_Counters = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
_Places = np.ndarray[tuple[int, int], np.dtype[np.uint32]]


class Asked:
    """A count-min sketch. Never says less than what was counted since the last halving, up to 15; now and then more. Not exact
    when several threads count at once, which does not matter."""

    def __init__(self, counters: int = 1 << 20) -> None:
        """`counters` a row, a power of two: about as many as pages that are asked for between two halvings."""
        self._mask = np.uint32(counters - 1)
        self._rows: _Counters = np.zeros((_ROWS, counters), np.uint8)
        self._left = self._until_halved = counters * _ADDED_A_COUNTER

    def more(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """Count each once."""
        if not hashes:
            return
        for row, at in zip(self._rows, self._places(namespace, b"".join(hashes)), strict=True):
            row[at] = np.minimum(row[at] + 1, _MOST)
        self._left -= len(hashes)
        if self._left <= 0:
            self._left = self._until_halved
            self._rows >>= 1

    def times(self, namespace: bytes, hashes: Sequence[bytes]) -> list[int]:
        """How often each was counted."""
        if not hashes:
            return []
        places = self._places(namespace, b"".join(hashes))
        counts = np.min([row[at] for row, at in zip(self._rows, places, strict=True)], axis=0)
        return [int(count) for count in counts]

    def _places(self, namespace: bytes, hashes: bytes) -> _Places:
        """Which counter of each row is whose. Hashes are random already."""
        words = np.frombuffer(hashes, "<u4").reshape(-1, HASH_BYTES // 4)[:, :_ROWS]
        salt = np.frombuffer(namespace[:4], "<u4")
        places: _Places = ((words ^ salt) & self._mask).T
        return places
