"""Which pages go when room is needed. Policies know pages only by hash, order and use; docs/eviction.md compares them."""

from __future__ import annotations

from typing import Any

from hicache_mooncake.node.policy.adaptive import Adaptive
from hicache_mooncake.node.policy.base import Policy
from hicache_mooncake.node.policy.cost import Cost
from hicache_mooncake.node.policy.lru import Lru
from hicache_mooncake.node.policy.queue import Evictable
from hicache_mooncake.node.policy.s3fifo import S3Fifo

__all__ = ["DEFAULT_POLICY", "POLICIES", "Evictable", "Lru", "Policy", "make_policy"]

POLICIES: dict[str, type[Policy[Any]]] = {"adaptive": Adaptive, "lru": Lru, "s3fifo": S3Fifo, "cost": Cost}
DEFAULT_POLICY = "adaptive"


def make_policy(name: str) -> Policy[Any]:
    """A new policy by its name; ValueError for one that there is not. The setting has all but `s3fifo`, for comparisons."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"eviction {name!r}: must be one of {', '.join(POLICIES)}") from None
