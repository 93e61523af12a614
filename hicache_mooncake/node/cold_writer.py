"""The thread that writes pages to the cold tier, as the core says, and keeps house there."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hicache_mooncake.cold.index import Key
from hicache_mooncake.cold.tier import Body, ColdTier
from hicache_mooncake.node.allocator import blocks_of
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.keeping import Batch, Keeping
from hicache_mooncake.protocol import split
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer.mapping import Mapping

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_SMALL_SHARE = 8
"""A batch of less than this part of what it may have is small."""
_SWEEP_S = 1.0
_AFTER_FAILURE_S = 1.0
_CHECK_S = 5.0
_MAX_DOUBTED = 1024
_MAX_PROMISED = 1024
_SAVE_LOG_S = 5.0
_STOP_S = 5.0
"""A write that takes longer hangs, as far as a node that ends is concerned."""
_HANGS_S = 30.0
"""The same of one that saves, whose batches are all that it waits for."""
_STEP_S = 0.05


class Kept(Protocol):
    """Whose pages are written: a node."""

    lock: threading.Lock
    segment: Mapping
    core: NodeCore

    def new_owner(self) -> int: ...
    def changed(self) -> None:
        """The masters should hear of it."""


@dataclasses.dataclass(slots=True)
class _Saved:
    """So far."""

    at: float
    """When a batch has ended."""
    pages: int = 0
    size: int = 0


class ColdWriter:
    """One thread, one batch at a time. It takes from the others what a disk takes, and no more."""

    def __init__(self, node: Kept, tier: ColdTier, keeping: Keeping) -> None:
        self._node = node
        self._tier = tier
        self._keeping = keeping
        self._stopping = threading.Event()
        self._doubted: deque[tuple[bytes, bytes, int]] = deque(maxlen=_MAX_DOUBTED)
        self._promised: deque[tuple[bytes, bytes, float]] = deque(maxlen=_MAX_PROMISED)
        self._swept_at = 0.0
        self._life = tier.life
        self._quiet = QuietLog(log)
        self._owner = node.new_owner()
        self._thread = threading.Thread(target=self._run, name="cold-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the batch under way has ended, or after a few seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    @property
    def hangs(self) -> bool:
        """After `stop` and `save`: a write is still under way, out of the segment and under the tier's lock."""
        return self._thread.is_alive()

    def doubt(self, namespace: bytes, page_hash: bytes, offset: int) -> None:
        """Somebody read this page there and its bytes were not right: it is looked at, unless it has moved since."""
        self._doubted.append((namespace, page_hash, offset))

    def promise(self, namespace: bytes, hashes: bytes, seconds: float) -> None:
        """A reader of another node counts on these for so long. No segment is emptied before this has been looked at."""
        self._promised.append((namespace, hashes, time.monotonic() + seconds))

    def save(self, interrupted: Callable[[], bool]) -> tuple[int, int]:
        """After `stop`: write what is in DRAM and not on the disk. Returns pages and bytes written: so far, when it is
        interrupted or the disk hangs."""
        if self.hangs:
            log.error("nothing is saved: the cold tier's disk hangs")
            return 0, 0
        saved = _Saved(time.monotonic())
        self._thread = threading.Thread(target=self._save, args=(saved, interrupted), name="cold-save", daemon=True)
        self._thread.start()
        logged_at = saved.at
        while self._thread.is_alive() and not interrupted():
            self._thread.join(_STEP_S)
            now = time.monotonic()
            if now - saved.at > _HANGS_S:
                log.error("no more is saved: the cold tier's disk hangs")
                break
            if now - logged_at > _SAVE_LOG_S:
                logged_at = now
                log.info("saving: %d pages, %.1f GB so far", saved.pages, saved.size / 1e9)
        return saved.pages, saved.size

    def _save(self, saved: _Saved, interrupted: Callable[[], bool]) -> None:
        while not interrupted():
            since = self._tier.clears
            with self._node.lock:
                batch = self._keeping.save(self._owner, time.monotonic())
            if batch is None:
                return
            kept = self._write(batch, since)
            saved.pages += kept
            saved.size += sum(part.length for part in batch.parts) if kept else 0
            saved.at = time.monotonic()
            if not kept and not self._tier.ready():
                return

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._stopping.wait(pause_s):
            try:
                pause_s = self._look()
            except Exception:
                self._quiet(
                    logging.ERROR, "writer", "the cold tier's writer failed; it goes on. Please report this", exc_info=True
                )
                pause_s = _AFTER_FAILURE_S

    def _look(self) -> float:
        """Do what is due. Returns the pause before the next look."""
        self._keep_house()
        since, able = self._tier.clears, self._tier.ready()
        with self._node.lock:
            self._keeping.able = able
            batch = self._keeping.next(self._owner, time.monotonic()) if able else None
        if batch is None:
            return _LOOK_S
        if self._write(batch, since):
            small = batch.size_bytes < self._keeping.batch_bytes // _SMALL_SHARE
            return _LOOK_S if small else 0.0  # each costs the index some pages of its own: more may come together
        with self._node.lock:
            self._keeping.able = False  # the disk is full perhaps: what goes meanwhile goes unwritten
        return _AFTER_FAILURE_S

    def _write(self, batch: Batch, since: int) -> int:
        """Returns how many of its pages are kept now."""
        view = self._node.segment.view
        life, parts = self._tier.life, batch.parts
        found = [False] * len(parts)
        try:
            here = self._tier.here([(Key(part.namespace, part.hash), part.checksum) for part in parts])
            bodies = [
                Body(
                    Key(part.namespace, part.hash),
                    view[part.offset : part.offset + blocks_of(part.length)],
                    part.length,
                    part.checksum,
                )
                for part, there in zip(parts, here, strict=True)
                if not there
            ]
            written = iter(self._tier.write(bodies, since))
            found = [there or next(written) for there in here]
            if self._tier.life != life:  # what was there is lost
                found = [now and not there for now, there in zip(found, here, strict=True)]
        finally:
            gone = self._tier.take_gone()
            with self._node.lock:
                self._see_life()
                kept = self._keeping.done(self._owner, batch, found)
                self._node.core.gone_cold(gone)
        self._node.changed()
        return kept

    def _see_life(self) -> None:
        """Under the node's lock."""
        life = self._tier.life
        if life != self._life:
            self._life = life
            self._node.core.cold_began_anew()

    def _keep_house(self) -> None:
        now = time.monotonic()
        if now - self._swept_at >= _SWEEP_S:
            if not self._tier.sweep():
                self._swept_at = now
            gone = self._tier.take_gone()
            with self._node.lock:
                self._see_life()
                self._node.core.gone_cold(gone)
            self._node.changed()
        while self._promised and not self._stopping.is_set():
            namespace, hashes, until = self._promised.popleft()
            if until > now:
                here = self._tier.present(namespace, split(hashes), until)
                with self._node.lock:
                    self._node.core.promises_late += here.count(0)
        while self._doubted and not self._stopping.is_set():
            namespace, page_hash, offset = self._doubted.popleft()
            self._tier.check(namespace, page_hash, offset, now + _CHECK_S)
