"""The host pools of one engine rank: which can be stored, as what objects, and what a hit needs of each.

A view of them is immutable; the backend swaps it when a pool is registered or the weights change, so a data call works on one
view from its start to its end, whatever happens meanwhile.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping
from typing import Any

from hicache_mooncake.client.client import Body
from hicache_mooncake.client.geometry import PoolGeometry, page_numbers, run_addresses
from hicache_mooncake.client.restorable import ALL_PAGES, TRAILING_PAGES
from hicache_mooncake.keys import Namespace

KV = "kv"


@dataclasses.dataclass(frozen=True)
class StoredPool:
    """A host pool that can be stored whole. `bodies`: the objects of one of its pages; one, or one for each group of heads."""

    pool: Any
    geometry: PoolGeometry
    namespace: Namespace
    bodies: tuple[Body, ...]
    parts: tuple[Namespace, ...] = ()
    """The namespaces of `bodies`, where they are not all of the pool's own."""

    def places(self, indices: Any, count: int) -> tuple[array[int] | None, array[int] | None] | None:
        """(page numbers, None), or (None, run addresses) where the pool is not affine. None when `indices` do not name `count`
        whole aligned pages of this pool. `indices`: 1-D int64 CPU tensor of token slots, which is not looked at afterwards."""
        geometry = self.geometry
        # SGLang may rewrite it meanwhile, when it aborts the request: what is checked must be what is used.
        indices = indices.clone()
        pages = page_numbers(indices, geometry.page_tokens, geometry.page_count, count)
        if pages is None or geometry.affine:
            return None if pages is None else (pages, None)
        addresses = run_addresses(self.pool, indices, geometry.runs, count)
        return None if addresses is None else (None, addresses)

    def pick(
        self, places: tuple[array[int] | None, array[int] | None], which: list[int]
    ) -> tuple[array[int] | None, array[int] | None]:
        """The places of some of the pages."""
        pages, addresses = places
        runs = len(self.geometry.runs)
        return (
            None if pages is None else array("q", [pages[i] for i in which]),
            None if addresses is None else array("q", [addresses[i * runs + r] for i in which for r in range(runs)]),
        )


@dataclasses.dataclass(frozen=True)
class Need:
    """What a hit needs of a side pool: every page of the prefix, or its last `window` pages."""

    policy: str
    window: int = 0
    """0: not known yet."""


_KNOWN = {**dict.fromkeys(("indexer", "draft", "draft_indexer"), Need(ALL_PAGES)), "mamba": Need(TRAILING_PAGES, 1)}
"""What is the same in every release, and so known before SGLang has said it: a page for each KV page, one state at the end."""


@dataclasses.dataclass(frozen=True)
class View:
    """`pools` by SGLang's pool name. `logical` are pools without bytes of their own: the anchor of models whose bytes all lie
    in side pools. `refused` has the reason for each pool that cannot be stored; while there is one nothing is stored or found.
    `off`: why there is no L3 for now, whatever the pools."""

    pools: Mapping[str, StoredPool] = dataclasses.field(default_factory=dict)
    logical: frozenset[str] = frozenset()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, Need] = dataclasses.field(default_factory=dict)
    off: str = ""

    @property
    def usable(self) -> bool:
        known = KV in self.pools or (KV in self.logical and len(self.pools) > 0)
        return known and not self.refused and not self.off

    @property
    def side_pools(self) -> list[str]:
        return [name for name in self.pools if name != KV]

    def need(self, name: str) -> Need | None:
        """What a hit needs of this side pool, where SGLang has said so or it is the same in every release."""
        return self.needs.get(name) or _KNOWN.get(name)
