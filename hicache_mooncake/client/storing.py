"""A mover's stores: room reserved at the node, pages copied into it, committed; a large batch in parts that overlap."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median

from hicache_mooncake import protocol as p
from hicache_mooncake.client.batch import Batch
from hicache_mooncake.client.copies import Copies
from hicache_mooncake.client.node_link import NodeLink, NodeUnavailable
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import EngineMemory

_NO_ROOM_RETRIES_S = (0.01, 0.03)
_STORE_PARTS = (0.25, 0.5, 0.25)
"""How a large batch is split, head first: the node reserves and commits one part while another is copied. The first and the
last are small, since nothing is copied while the node answers for them."""
LOAD_PARTS = (0.25, 0.75)
"""The same for loads of pages that are here."""
_PARTS_FROM_PAGES, _PARTS_FROM_BYTES = 24, 1 << 20
"""Of fewer pages or bytes a question more costs what it saves."""
_PARTS_TO_PAGES = 8192
"""Of more the answers to what was asked ahead (20 bytes a page) might fill the socket: then the node reads no further question,
and each waits for the other."""
SETTLE_S = 0.1
_SAMPLES = 3
_TRY_EVERY = 16
"""Large stores: one of so many is made the other way, to see."""


class Parts:
    """Whether large stores are faster in parts. They are where the node has a core to itself meanwhile; where all are busy,
    each message more costs the mover a turn. Tried both ways, judged by medians. No clock: times come in."""

    def __init__(self) -> None:
        self._took: dict[bool, deque[float]] = {way: deque(maxlen=_SAMPLES) for way in (True, False)}
        self._stores = 0

    def split(self) -> bool:
        """Is this store to be split?"""
        for way in (True, False):
            if len(self._took[way]) < _SAMPLES:
                return way
        self._stores += 1
        better = median(self._took[True]) <= median(self._took[False])
        return better != (self._stores % _TRY_EVERY == 0)

    def took(self, split: bool, seconds_a_byte: float) -> None:
        """A large store that was copied in whole took so long."""
        self._took[split].append(seconds_a_byte)


class Storing:
    """Of one mover. `later` gets what the node is to be told after the rank has its answer."""

    def __init__(self, link: NodeLink, copies: Copies, later: list[p.Message]) -> None:
        self._link = link
        self._copies = copies
        self._later = later
        self._parts = Parts()

    def store(
        self, memory: EngineMemory, batch: Batch, ok: bytearray, reasons: Counter[str], deadline: float
    ) -> tuple[int, int]:
        """All keys, in rounds: what found no room is tried again shortly after, while there is time."""
        todo = list(range(batch.count))
        stored_bytes, had = 0, 0
        large = is_large(batch.count, batch.body_bytes)
        split = large and self._parts.split()
        began = time.monotonic()
        for pause in (*_NO_ROOM_RETRIES_S, None):
            refused, copied, already = self._store_once(memory, batch, todo, ok, reasons, deadline, split=split)
            stored_bytes += copied
            had += already
            if not refused or pause is None or time.monotonic() + pause > deadline:
                if refused:
                    reasons["no_room"] += len(refused)
                break
            time.sleep(pause)
            todo = refused
        if large and stored_bytes == batch.count * batch.body_bytes:
            self._parts.took(split, (time.monotonic() - began) / stored_bytes)
        return stored_bytes, had

    def _store_once(
        self,
        memory: EngineMemory,
        batch: Batch,
        todo: list[int],
        ok: bytearray,
        reasons: Counter[str],
        deadline: float,
        *,
        split: bool,
    ) -> tuple[list[int], int, int]:
        """One round: (pages that found no room, bytes copied, pages that were there already).

        All room is reserved before anything is committed, head first, as if it were one question: no part is evicted for
        another, and if it is not enough the tail goes without."""
        job = batch.job
        parts = in_parts(todo, batch.body_bytes, _STORE_PARTS) if split else [todo]
        until = deadline + SETTLE_S
        reserved = self._link.ask(self._reserve(batch, parts[0]), deadline)
        segment = self._link.segment
        assert segment is not None
        for part in parts[1:]:
            self._link.ask_ahead(self._reserve(batch, part), until)
        refused: list[int] = []
        commits: list[tuple[list[int], bytes]] = []
        had = 0
        for number, part in enumerate(parts):
            if number:
                reserved = self._link.take(until)
            assert isinstance(reserved, p.Reserved)
            places: list[tuple[int, int]] = []
            for i, status, offset in zip(part, reserved.status, reserved.where, strict=True):
                if status == p.HAVE:
                    ok[i] = 1
                    had += 1
                elif status == p.REFUSED:
                    refused.append(i)
                else:
                    places.append((i, offset))
            if places:
                whole, checksums = self._copy_out(memory, batch, segment, places, reasons, deadline)
                self._link.ask_ahead(p.Commit(reserved.txn, whole, checksums), until)
                commits.append(([i for i, _ in places], whole))
        copied = 0
        for written, whole in commits:
            committed = self._link.take(until)
            if not isinstance(committed, p.Committed):
                raise NodeUnavailable("node_refused", "commit refused")
            for i, good, done in zip(written, whole, committed.ok, strict=False):
                if done:
                    ok[i] = 1
                    copied += batch.body_bytes
                elif good:
                    reasons["not_committed"] += 1
        if len(commits) > 1:  # the head came first, and must go last
            touch = p.Touch(job.namespace, p.select_hashes(job.hashes, todo))
            if refused:  # room is going to be asked for once more: not the head's
                self._link.tell(touch, until)
            else:
                self._later.append(touch)
        return refused, copied, had

    @staticmethod
    def _reserve(batch: Batch, pages: list[int]) -> p.Reserve:
        job = batch.job
        return p.Reserve(job.namespace, p.select_hashes(job.hashes, pages), batch.body_bytes, job.group)

    def _copy_out(
        self,
        memory: EngineMemory,
        batch: Batch,
        segment: Mapping,
        places: list[tuple[int, int]],
        reasons: Counter[str],
        deadline: float,
    ) -> tuple[bytes, list[int]]:
        """Pages as (page, offset), from the engine to the segment: which came whole, and the checksums."""
        copied: list[int | str] = []
        for _, group in self._copies.pages(memory.store_pages, batch, segment, places, deadline):
            copied += group
        reasons.update(why for why in copied if isinstance(why, str))
        whole = bytes(not isinstance(checksum, str) for checksum in copied)
        return whole, [0 if isinstance(checksum, str) else checksum for checksum in copied]


def is_large(pages: int, body_bytes: int) -> bool:
    """Large enough for parts, and not too large."""
    return _PARTS_FROM_PAGES <= pages <= _PARTS_TO_PAGES and pages * body_bytes >= _PARTS_FROM_BYTES


def in_parts(pages: list[int], body_bytes: int, shares: Sequence[float]) -> list[list[int]]:
    """A large batch in parts, head first; a small one whole, and one that is too large for that, too."""
    count = len(pages)
    if not is_large(count, body_bytes):
        return [pages]
    cuts = [0, *(int(count * share) for share in itertools.accumulate(shares[:-1])), count]
    return [pages[first:end] for first, end in itertools.pairwise(cuts)]
