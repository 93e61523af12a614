"""Which batches are one operation's, so that the head of a long chain outlives its tail.

SGLang moves a long prefix in batches of 128 pages, head first, and each batch is more recent than the one before it: without
more, the head of the chain would be evicted before its tail, and a chain without its head is of no use. When an operation has
ended its pages are told to the node once, in order. That two batches are one operation's is seen in their indices: they are
neighbours in one tensor. (A full batch alone proves nothing: prompts of 8,192 tokens all end with one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache_mooncake.keys import pack_hashes
from hicache_mooncake.protocol import HASH_BYTES

PAGES_A_CALL = 128
"""SGLang's `STORAGE_BATCH_SIZE`: a batch of fewer pages is the last of its operation."""
MAX_PAGES = 4096
"""Of a longer chain only the head is told."""


class Chain:
    """The batches of one kind (loads, or stores) as they follow each other. Not thread-safe: SGLang has one thread for each
    kind."""

    def __init__(self) -> None:
        self._hashes = b""
        self._batches = 0
        self._end: tuple[int, int] | None = None

    def begin(self, hashes: bytes, indices: Any, prefix_keys: Sequence[str] | None) -> tuple[bool, bytes]:
        """A batch is about to be moved. Returns (whether it continues the last one; the pages, head first, of an operation that
        turns out to have ended before it, b"" if there is nothing to tell of it). `prefix_keys`: SGLang's own account of what
        comes before the operation, with `hicache_storage_pass_prefix_keys`."""
        place = _place(indices)
        continues = place is not None and self._end is not None and place[0] == self._end
        ended = b"" if continues else self._take()
        if not continues:
            prefix, bad = pack_hashes(prefix_keys or ())
            self._hashes, self._batches = b"" if bad else prefix, int(bool(prefix) and not bad)
        self._hashes = (self._hashes + hashes)[: MAX_PAGES * HASH_BYTES]
        self._batches += 1
        self._end = place[1] if place is not None and len(hashes) == PAGES_A_CALL * HASH_BYTES else None
        return continues, ended

    def finish(self) -> bytes:
        """The batch has been moved. Returns the operation's pages if it was the last one and there is anything to tell."""
        return b"" if self._end is not None else self._take()

    def _take(self) -> bytes:
        hashes, batches = self._hashes, self._batches
        self._hashes, self._batches, self._end = b"", 0, None
        return hashes if batches > 1 else b""


def _place(indices: Any) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where a 1-D tensor's elements begin and end: (memory, element) each. Two slices in a row of one tensor meet there."""
    try:
        memory, first = int(indices.untyped_storage().data_ptr()), int(indices.storage_offset())
        return (memory, first), (memory, first + len(indices))
    except (AttributeError, TypeError, RuntimeError):
        return None
