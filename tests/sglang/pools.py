"""Real SGLang host pools on the CPU, and pages in them that name themselves."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hicache_mooncake.testing.local import pattern

PAGE_SIZE = 16
LAYERS = 4
PAGES = 24


def _pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha_pool(
    layout: str = "page_first",
    *,
    allocator: str = "shm",
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    head_dim: int = 64,
    layers: int = LAYERS,
    pages: int = PAGES,
) -> Any:
    """An `MHATokenToKVPoolHost` as the engine builds it. `allocator` shm: in a memfd; default: an anonymous mapping."""
    slots = PAGE_SIZE * 2
    k = [torch.zeros((slots, heads, head_dim), dtype=dtype) for _ in range(layers)]
    v = [torch.zeros((slots, heads, head_dim), dtype=dtype) for _ in range(layers)]
    buffers = KVBuffers(k=tuple(k), v=tuple(v), k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE_SIZE,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE_SIZE,
        layout,
        pin_memory=False,
        allocator_type=allocator,
        device_capacity_tokens=slots,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=pages * PAGE_SIZE,
    )


def mla_pool(layout: str = "page_first", *, allocator: str = "shm", layers: int = LAYERS, pages: int = PAGES) -> Any:
    """An `MLATokenToKVPoolHost`: 64 + 16 wide rows, one head."""
    slots = PAGE_SIZE * 2
    rows = [torch.zeros((slots, 1, 80), dtype=torch.bfloat16) for _ in range(layers)]
    info = MLABufferInfo(
        buffers=tuple(rows),
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=PAGE_SIZE,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        kv_cache_dim=80,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE_SIZE,
        layout,
        pin_memory=False,
        allocator_type=allocator,
        device_capacity_tokens=slots,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
        host_token_capacity=pages * PAGE_SIZE,
    )


def storage_config(**fields: Any) -> HiCacheStorageConfig:
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "tiny",
    }
    return HiCacheStorageConfig(**(values | fields))


def key(name: object) -> str:
    """A page key as SGLang makes it."""
    return hashlib.sha256(repr(name).encode()).hexdigest()


def indices(*pages: int) -> torch.Tensor:
    """`slots` of the pools made here."""
    return torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages])


def slots(pool: Any, pages: Iterable[int]) -> torch.Tensor:
    """The `host_indices` that SGLang would pass for these pages of any host pool: int64, one run of slots a page, in order."""
    tokens = page_tokens(pool)
    parts = [torch.arange(page * tokens, (page + 1) * tokens, dtype=torch.int64) for page in pages]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def page_tokens(pool: Any) -> int:
    """Slots a page, as SGLang counts them: under decode context parallelism a page has slots on every rank."""
    return int(getattr(pool, "logical_page_size", pool.page_size))


def usable_pages(pool: Any) -> range | list[int]:
    """The pages that have an address: all, but in an arena whose pages move those that are allocated."""
    arena = getattr(pool, "shared_allocation_domain", None)
    if arena is not None:
        return sorted(arena.sides[pool.pool_label].logical_to_physical)
    return range(int(pool.size) // int(pool.page_size))


def page_runs(pool: Any, page: int) -> list[tuple[int, int]]:
    """(address, bytes) of each part of a page, in SGLang's order; none for a pool without bytes of its own."""
    pointers, sizes = pool.get_page_buffer_meta(slots(pool, [page])) or ((), ())
    return list(zip(pointers, sizes, strict=True))


def fill(pool: Any, page: int, tag: str, generation: int = 0) -> None:
    """Write the pattern of (tag, generation) into a page."""
    body = pattern(tag.encode(), sum(size for _, size in page_runs(pool, page)), generation)
    at = 0
    for address, size in page_runs(pool, page):
        ctypes.memmove(address, body[at : at + size], size)
        at += size


def content(pool: Any, page: int) -> bytes:
    return b"".join(ctypes.string_at(address, size) for address, size in page_runs(pool, page))


def holds(pool: Any, page: int, tag: str, generation: int = 0) -> bool:
    body = content(pool, page)
    return body == pattern(tag.encode(), len(body), generation)


def scramble(pool: Any) -> None:
    """Overwrite every byte of every page."""
    for page in usable_pages(pool):
        for address, size in page_runs(pool, page):
            ctypes.memset(address, 0x5A, size)
