"""What one page of a host pool is made of, found once at registration and checked.

Most layouts are affine: run r of page i lies at `address_r + i * stride_r`, so a batch names only page numbers. Where a pool
says otherwise, every batch carries the address of each run.
"""

from __future__ import annotations

import ctypes
import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

from hicache_mooncake.protocol import Region, Run


class GeometryError(ValueError):
    """The pool cannot be stored whole; the message names pool, layout and reason."""


@dataclasses.dataclass(frozen=True)
class PoolGeometry:
    """`runs` in body order; `page_tokens` token slots a page; `regions` and `fds` are the memory that has to be shared.

    The descriptors belong to the pool's allocator. `affine` False: `runs` carry lengths only.
    """

    pool: str
    runs: tuple[Run, ...]
    page_tokens: int
    page_count: int
    regions: tuple[Region, ...]
    fds: tuple[int, ...]
    affine: bool

    @property
    def body_bytes(self) -> int:
        return sum(run.length for run in self.runs)


def of_pool(pool: Any, name: str) -> PoolGeometry:
    """Geometry of an SGLang `HostKVCache` (any class with `get_page_buffer_meta`). Raises GeometryError."""
    import torch

    layout = str(getattr(pool, "layout", "?"))
    where = f"pool {name} ({type(pool).__name__}, layout {layout})"
    page_tokens = int(getattr(pool, "page_size", 0))
    slots = int(getattr(pool, "size", 0))
    pages = slots // page_tokens if page_tokens > 0 else 0
    if pages < 1:
        raise GeometryError(f"{where}: no pages (size {slots} tokens, page_size {page_tokens})")

    def runs_of(page: int) -> list[tuple[int, int]]:
        indices = torch.arange(page * page_tokens, (page + 1) * page_tokens, dtype=torch.int64)
        try:
            meta = pool.get_page_buffer_meta(indices)
        except Exception as error:
            raise GeometryError(f"{where}: get_page_buffer_meta failed: {error}") from error
        if meta is None:
            raise GeometryError(f"{where}: the pool has no buffer of its own (get_page_buffer_meta gave None)")
        pointers, sizes = meta
        if not pointers or len(pointers) != len(sizes) or min(sizes) <= 0:
            raise GeometryError(f"{where}: page {page} has {len(pointers)} addresses and {len(sizes)} sizes")
        return [(int(address), int(size)) for address, size in zip(pointers, sizes, strict=True)]

    first = runs_of(0)
    lengths = [length for _, length in first]
    strides = [0] * len(first)
    if pages > 1:
        strides = [b[0] - a[0] for a, b in zip(first, runs_of(1), strict=True)]
    affine = True
    for page in sorted({pages - 1, pages // 2, min(7, pages - 1)}):
        runs = runs_of(page)
        if [length for _, length in runs] != lengths:
            raise GeometryError(f"{where}: pages differ in size, {lengths} and {[length for _, length in runs]}")
        if [address for address, _ in runs] != [a + page * s for (a, _), s in zip(first, strides, strict=True)]:
            affine = False
    regions, fds = _regions(pool)
    geometry = PoolGeometry(
        pool=name,
        runs=tuple(Run(a, s, n) for (a, n), s in zip(first, strides, strict=True)),
        page_tokens=page_tokens,
        page_count=pages,
        regions=regions,
        fds=fds,
        affine=affine,
    )
    for page in (0, pages - 1):
        for address, length in runs_of(page):
            if not any(r.address <= address and address + length <= r.address + r.length for r in regions):
                raise GeometryError(f"{where}: page {page} lies outside the pool's buffers")
    return geometry


def _regions(pool: Any) -> tuple[tuple[Region, ...], tuple[int, ...]]:
    """The pool's memory: its memfds where its allocator has them for all of it, else its buffers without descriptors."""
    tensors = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else None
    if not tensors:
        buffer = getattr(pool, "kv_buffer", None)
        tensors = list(buffer) if isinstance(buffer, list | tuple) else [buffer]
    spans = [
        (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        for tensor in tensors
        if tensor is not None and tensor.numel() > 0
    ]
    allocator = getattr(pool, "allocator", None)
    shared: list[Region] = []
    fds: list[int] = []
    for fd, mapping in zip(getattr(allocator, "fds", None) or [], getattr(allocator, "mms", None) or [], strict=False):
        if fd is None or fd < 0 or mapping is None:
            continue
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        shared.append(Region(address, len(mapping), len(fds)))
        fds.append(fd)
    covered = all(any(r.address <= a and a + n <= r.address + r.length for r in shared) for a, n in spans)
    if shared and covered:
        return tuple(shared), tuple(fds)
    return tuple(Region(address, length, -1) for address, length in spans), ()


def page_numbers(indices: Any, page_tokens: int, page_count: int, expected: int) -> array[int] | None:
    """Page numbers of a 1-D tensor of token slots, one per key; None when it does not name `expected` whole pages."""
    if len(indices) != expected * page_tokens:
        return None
    firsts = array("q", indices[::page_tokens].tolist())
    if any(slot % page_tokens or not 0 <= slot // page_tokens < page_count for slot in firsts):
        return None
    return array("q", [slot // page_tokens for slot in firsts])


def run_addresses(pool: Any, indices: Any, runs: Sequence[Run], expected: int) -> array[int] | None:
    """Addresses for a pool that is not affine; None when the pool's answer does not fit the registered lengths."""
    pointers, sizes = pool.get_page_buffer_meta(indices)
    if len(pointers) != expected * len(runs) or list(sizes) != [run.length for run in runs] * expected:
        return None
    return array("q", pointers)
