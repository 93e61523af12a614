"""Pages for a cold tier, whose bytes follow from their keys, and tiers that are small enough to be filled often."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import xxhash

from hicache_mooncake.cold import layout
from hicache_mooncake.cold.index import Key
from hicache_mooncake.cold.layout import blocks
from hicache_mooncake.cold.pages_file import scratch
from hicache_mooncake.cold.tier import Body, ColdTier
from hicache_mooncake.keys import checksum_seed

NS, OTHER = b"n" * 16, b"o" * 16
MIB = 1 << 20
SMALL = 2 * MIB
"""Capacity of a small tier, of eight segments."""


def small_tiers(patch: pytest.MonkeyPatch) -> None:
    """What is too small for an operator is allowed."""
    patch.setattr(layout, "LEAST_BYTES", MIB)


def opened(directory: Path, capacity: int = layout.LEAST_BYTES, **options: object) -> ColdTier:
    return ColdTier(directory, capacity, floor_bytes=0, **options)  # type: ignore[arg-type]


@lru_cache(4096)
def _period(namespace: bytes, page_hash: bytes) -> bytes:
    return random.Random(namespace + page_hash).randbytes(4099)


def content(page_hash: bytes, length: int, namespace: bytes = NS) -> bytes:
    """No block of it is like another one."""
    return (_period(namespace, page_hash) * (length // 4099 + 1))[:length]


def body(page_hash: bytes, length: int, namespace: bytes = NS) -> Body:
    view = scratch(blocks(length))
    view[:length] = content(page_hash, length, namespace)
    checksum = xxhash.xxh3_64_intdigest(view[:length], checksum_seed(namespace, page_hash))
    return Body(Key(namespace, page_hash), view, length, checksum)


def hashes(count: int) -> list[bytes]:
    return [random.randbytes(32) for _ in range(count)]


def store(tier: ColdTier, pages: Sequence[bytes], length: int, namespace: bytes = NS) -> list[bool]:
    return tier.write([body(each, length, namespace) for each in pages], tier.clears)


def load(tier: ColdTier, pages: Sequence[bytes], length: int, namespace: bytes = NS) -> list[bool]:
    """Which can be read; every byte of those is compared."""
    places = tier.locate(namespace, pages, length)
    wanted = [(each, place) for each, place in zip(pages, places, strict=True) if place is not None]
    good: set[bytes] = set()
    for (each, _), view in zip(wanted, tier.read(namespace, wanted, time.monotonic() + 20), strict=True):
        if view is not None:
            assert bytes(view) == content(each, length, namespace)
            good.add(each)
    return [each in good for each in pages]


def announced(tier: ColdTier) -> set[tuple[bytes, bytes]]:
    return {
        (namespace, blob[at : at + 32])
        for part in tier.snapshot_parts()
        for namespace, blob in part
        for at in range(0, len(blob), 32)
    }
