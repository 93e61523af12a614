"""A mover's reads from the cold tier: bodies come from the disk into memory of the mover's own, and are copied on from there.

The disk never writes engine memory, nor the node's: a read that hangs in the kernel costs a buffer, and the batch ends in time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hicache_mooncake import protocol as p
from hicache_mooncake.client.batch import Batch
from hicache_mooncake.client.remote import Doubt
from hicache_mooncake.cold.reading import Groups, Reader
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import EngineMemory, Stretch


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
        after each read."""
        first = 0
        with contextlib.closing(self._groups(reader, batch.body_bytes, deadline)) as groups:
            for came, places in groups:
                pages = self.pages[first : first + len(places)]
                first += len(pages)
                between()
                if not isinstance(came, memoryview):
                    why = "deadline" if came is None and time.monotonic() >= deadline else "cold_unreadable"
                    self.failed.update((page.number, Doubt(why, [])) for page in pages)
                    continue
                group = batch.group([(page.number, place) for page, place in zip(pages, places, strict=True)])
                copied = memory.load_pages(group, batch.layout, Stretch.of(came))
                for page, place, arrived in zip(pages, places, copied, strict=True):
                    if self._arrived(page, arrived, batch, ok) and page.room >= 0 and segment is not None:
                        segment.view[page.room : page.room + batch.body_bytes] = came[place : place + batch.body_bytes]
                        self._stay[page.number] = True

    def commit(self) -> p.Commit | None:
        """What has been copied into the segment, where there was room for some."""
        return p.Commit(self.txn, bytes(self._stay.values()), list(self._checksums.values())) if self._stay else None

    def _groups(self, reader: Reader | None, length: int, deadline: float) -> Groups:
        if reader is None:  # the connection to the node was lost meanwhile
            yield None, [0] * len(self.pages)
            return
        with contextlib.closing(reader.groups([(page.offset, length) for page in self.pages], deadline)) as groups:
            yield from groups

    def _arrived(self, page: ColdPage, checksum: int | None, batch: Batch, ok: bytearray) -> bool:
        """Whether all of it has come."""
        if checksum == page.checksum:
            ok[page.number] = 1
            self.loaded += 1
            return True
        self.failed[page.number] = Doubt("engine_memory" if checksum is None else "checksum_cold", [])
        if checksum is not None:
            self.bad.append((p.select_hashes(batch.job.hashes, [page.number]), page.offset))
        return False
