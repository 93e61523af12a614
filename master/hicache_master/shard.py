"""Which part of all keys a master has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache_mooncake.protocol import HASH_BYTES

MAX_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of `count`: the keys with `protocol.shard_of(hash, count) == index`."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def own(self, hashes: bytes) -> tuple[bytes, int]:
        """Those of these hashes (n x 32 bytes) that are of this shard, in order, and how many others there were."""
        if self.count == 1 or not hashes:
            return hashes, 0
        words = np.frombuffer(hashes, "<u4").reshape(-1, HASH_BYTES // 4)[:, 5]  # bytes 20 to 23, as shard_of has it
        mine = words % self.count == self.index
        foreign = len(mine) - int(np.count_nonzero(mine))
        if not foreign:
            return hashes, 0
        return np.frombuffer(hashes, f"V{HASH_BYTES}")[mine].tobytes(), foreign


def make_shard(index: int, count: int) -> Shard:
    """Raises ValueError for a shard that cannot be."""
    if not 1 <= count <= MAX_SHARDS or not 0 <= index < count:
        raise ValueError(f"shard {index}/{count}: the first number counts from 0 and is below the second, at most {MAX_SHARDS}")
    return Shard(index, count)
