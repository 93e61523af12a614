"""A mover's reads from the cold tier: bodies come from the disk into memory of the mover's own, and are copied on from there.

The disk never writes engine memory, nor the node's: a read that hangs in the kernel costs a buffer, and the batch ends in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hicache_mooncake import protocol as p
from hicache_mooncake.client.batch import Batch
from hicache_mooncake.client.remote import Doubt
from hicache_mooncake.cold.reading import Reader, Results
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import EngineMemory, EngineMemoryError


class ColdPage(NamedTuple):
    """Page `number` of the batch: where in the file, its checksum, and where in the segment it is to stay, or -1."""

    number: int
    offset: int
    checksum: int
    room: int


class ColdReads:
    """The pages of one batch that lie in the cold tier; after `load` it says what became of them."""

    def __init__(self, located: p.Located, pages: Sequence[int]) -> None:
        room = iter(located.cold_room)
        self.pages = [
            ColdPage(page, where, checksum, next(room) if status == p.READ_ON else -1)
            for page, status, where, checksum in zip(pages, located.status, located.where, located.checksum, strict=True)
            if status in (p.READ, p.READ_ON)
        ]
        self.txn = located.cold_txn
        self.loaded = 0
        self.failed: dict[int, Doubt] = {}
        """Pages that did not come, and why."""
        self.bad: list[tuple[bytes, int]] = []
        """As in Release."""
        self._stay: dict[int, bool] = {page.number: False for page in self.pages if page.room >= 0}
        self._checksums = {page.number: page.checksum for page in self.pages if page.room >= 0}

    def load(
        self,
        reader: Reader | None,
        memory: EngineMemory,
        batch: Batch,
        segment: Mapping | None,
        ok: bytearray,
        deadline: float,
        between: Callable[[], None],
    ) -> None:
        """Read and copy them, into `segment` as well where there is room for them there and it is given; `between` is called
        after each."""
        with contextlib.closing(self._bodies(reader, batch.body_bytes, deadline)) as bodies:
            for page, view in zip(self.pages, bodies, strict=True):
                between()
                reason = self._copy(page, view, memory, batch, deadline)
                if reason:
                    self.failed[page.number] = Doubt(reason, [])
                    continue
                ok[page.number] = 1
                self.loaded += 1
                if page.room >= 0 and segment is not None and isinstance(view, memoryview):
                    segment.view[page.room : page.room + batch.body_bytes] = view[: batch.body_bytes]
                    self._stay[page.number] = True

    def commit(self) -> p.Commit | None:
        """What has been copied into the segment, where there was room for some."""
        return p.Commit(self.txn, bytes(self._stay.values()), list(self._checksums.values())) if self._stay else None

    def _bodies(self, reader: Reader | None, length: int, deadline: float) -> Results:
        if reader is None:  # the connection to the node was lost meanwhile
            yield from [None] * len(self.pages)
            return
        with contextlib.closing(reader.read([(page.offset, length) for page in self.pages], deadline)) as bodies:
            yield from bodies

    def _copy(
        self, page: ColdPage, view: memoryview | BaseException | None, memory: EngineMemory, batch: Batch, deadline: float
    ) -> str:
        """Why it did not come; "" when it did."""
        i = page.number
        if not isinstance(view, memoryview):
            return "deadline" if view is None and time.monotonic() >= deadline else "cold_unreadable"
        body = view[: batch.body_bytes]
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        try:
            arrived = memory.load(body, address, batch.addresses(i), batch.layout, batch.seed(i))
        except EngineMemoryError:
            return "engine_memory"
        if arrived == page.checksum:
            return ""
        self.bad.append((p.select_hashes(batch.job.hashes, [i]), page.offset))
        return "checksum_cold"
