"""Batches as SGLang gives them, three lists of numbers, made into few pieces. Without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hicache_mooncake.transfer.transport import Piece, TransportError

Numbers = Any
"""A numpy array of int64."""


class Stretches:
    """Stretches of memory that do not overlap, to look many addresses up in. Immutable."""

    def __init__(self, stretches: Iterable[tuple[int, int]]) -> None:
        """(address, length) of each."""
        ordered = sorted(stretches)
        self.starts: Numbers = np.array([start for start, _ in ordered], np.int64)
        self._ends: Numbers = np.array([start + length for start, length in ordered], np.int64)

    def outside(self, addresses: Numbers, lengths: Numbers) -> int:
        """Index of the first (address, length) that lies in none of them, or -1."""
        if not len(self.starts):
            return 0 if len(addresses) else -1
        at = np.searchsorted(self.starts, addresses, "right") - 1
        fine = (at >= 0) & (addresses + lengths <= self._ends[at])
        return -1 if fine.all() else int(np.argmin(fine))


def batch(
    buffers: Sequence[int], peer_buffers: Sequence[int], lengths: Sequence[int], here: Stretches, there: Stretches
) -> list[Piece]:
    """Pieces without those of length 0; neighbours that follow each other on both sides, and lie in one stretch on each, are
    one. `here`: what is registered in this process. Raises TransportError, `bounds`."""
    try:
        local, remote, size = (np.asarray(column, np.int64) for column in (buffers, peer_buffers, lengths))
    except (OverflowError, TypeError, ValueError) as error:
        raise TransportError("bounds", f"these are no addresses and lengths: {error}") from error
    if not (local.ndim == 1 and local.shape == remote.shape == size.shape):
        raise TransportError("bounds", f"{local.size} buffers, {remote.size} of the peer's, and {size.size} lengths")
    if len(size) and int(size.min()) < 0:
        raise TransportError("bounds", f"a length of {int(size.min())}")
    if not size.all():
        wanted = size > 0
        local, remote, size = local[wanted], remote[wanted], size[wanted]
    if not len(size):
        return []
    stray = here.outside(local, size)
    if stray >= 0:
        raise TransportError("bounds", f"{size[stray]} bytes at {local[stray]:#x} are in no memory that is registered here")
    follows = (local[1:] == local[:-1] + size[:-1]) & (remote[1:] == remote[:-1] + size[:-1])
    if follows.any():
        follows &= ~np.isin(local[1:], here.starts) & ~np.isin(remote[1:], there.starts)
        first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        local, remote, size = local[first], remote[first], np.add.reduceat(size, first)
    return list(map(Piece, local.tolist(), remote.tolist(), size.tolist()))
