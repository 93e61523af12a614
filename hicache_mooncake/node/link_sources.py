"""What a node's link reads of what the node holds: changes and snapshots of each of its tiers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hicache_mooncake.node.link_session import Usage
from hicache_mooncake.protocol import COLD, DRAM, HASH_BYTES

PART_KEYS = 4_096
"""Keys a snapshot part. About 5 ms of a master's time: its other work never waits longer for one."""
READ_KEYS = 16_384
"""Keys read for one part, of which most may be of other shards: heartbeats wait for that."""

Keys = list[tuple[bytes, bytes]]
"""Pairs of (namespace, blob of 32-byte hashes)."""


class Changes(Protocol):
    """What the link reads of a tier. All of it is called on the link's thread, and should return within milliseconds:
    heartbeats wait for it. Each may raise Busy instead of waiting for a lock; then it is asked again soon."""

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        """Up to `limit` keys (added, removed) since the last call, oldest first; a key is at most in one of the two, its last
        state. Both empty when there are none."""

    def snapshot(self) -> Iterator[Keys]:
        """Everything held, in parts, which are read as they are sent. What changes from the first part on must still come out
        of `drain_changes`; whether a part already shows it makes no difference. With several masters, what was not drained yet
        before that must come out as well, since the snapshot goes to one of them."""

    def changes_lost(self) -> bool:
        """Were changes dropped since the last snapshot began, because nobody drained them in time? Then every master gets
        one."""


class ChangeSource(Changes, Protocol):
    """The node: its DRAM, and how it is."""

    def usage(self) -> Usage:
        """Figures for the heartbeat."""


class ColdSource(Protocol):
    """The node's cold tier. As `Changes`, in the words of `ColdTier`."""

    @property
    def changes_lost(self) -> bool: ...

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]: ...

    def snapshot_parts(self) -> Iterator[Keys]: ...


@dataclass(frozen=True, slots=True)
class _Cold:
    tier: ColdSource

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        return self.tier.drain_changes(limit)

    def snapshot(self) -> Iterator[Keys]:
        return self.tier.snapshot_parts()

    def changes_lost(self) -> bool:
        return self.tier.changes_lost


def tiers_of(dram: ChangeSource, cold: ColdSource | None) -> dict[int, Changes]:
    return {DRAM: dram} if cold is None else {DRAM: dram, COLD: _Cold(cold)}


class Part(NamedTuple):
    """Of a snapshot."""

    keys: Keys
    tier: int
    last: bool


def begin(source: Changes) -> Iterator[Keys]:
    """A snapshot whose first part has been read, so that it is as of now. Raises Busy."""
    parts = source.snapshot()
    first = next(parts, None)
    return iter(()) if first is None else itertools.chain([first], parts)


def cut(snapshots: Iterable[tuple[int, Iterator[Keys]]], of_shard: Callable[[Keys], Keys]) -> Iterator[Part]:
    """What these tiers' snapshots have of a shard, as one, in parts of at most PART_KEYS; at least one part."""
    before: Part | None = None
    for tier, parts in snapshots:
        for keys in _rechunk(parts, of_shard):
            if before is not None:
                yield before
            before = Part(keys, tier, last=False)
    yield (before or Part([], DRAM, last=False))._replace(last=True)


def _rechunk(parts: Iterable[Keys], of_shard: Callable[[Keys], Keys]) -> Iterator[Keys]:
    step = PART_KEYS * HASH_BYTES
    batch: Keys = []
    size = read = 0
    for part in parts:
        read += sum(len(hashes) for _, hashes in part)
        for namespace, hashes in of_shard(part):
            for at in range(0, len(hashes), step):
                blob = hashes[at : at + step]
                if size + len(blob) > step:
                    yield batch
                    batch, size = [], 0
                batch.append((namespace, blob))
                size += len(blob)
        if read >= READ_KEYS * HASH_BYTES:
            yield batch
            batch, size, read = [], 0, 0
    if batch:
        yield batch
