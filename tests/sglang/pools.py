"""Real SGLang host pools on the CPU, and pages in them that name themselves."""

from __future__ import annotations

import ctypes
import hashlib
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
    """Token slots of whole pages, in order."""
    return torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages])


def runs(pool: Any, page: int) -> list[tuple[int, int]]:
    pointers, sizes = pool.get_page_buffer_meta(indices(page))
    return list(zip(pointers, sizes, strict=True))


def fill(pool: Any, page: int, name: str, generation: int = 0) -> None:
    """Write the pattern of (name, generation) into a page."""
    body = pattern(name.encode(), sum(size for _, size in runs(pool, page)), generation)
    at = 0
    for address, size in runs(pool, page):
        ctypes.memmove(address, body[at : at + size], size)
        at += size


def content(pool: Any, page: int) -> bytes:
    return b"".join(ctypes.string_at(address, size) for address, size in runs(pool, page))


def holds(pool: Any, page: int, name: str, generation: int = 0) -> bool:
    body = content(pool, page)
    return body == pattern(name.encode(), len(body), generation)


def scramble(pool: Any) -> None:
    pool.kv_buffer.view(torch.uint8).fill_(0x5A)
