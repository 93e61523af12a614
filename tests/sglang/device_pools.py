"""SGLang's device pools (L1) of every model family, in miniature and on the CPU.

They only have to be there: no test reads them. `pages` is about how many pages the host pool will have. Some constructors read
SGLang's published configuration: make them where the host pools are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape, Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

PAGE_SIZE = 16
DEVICE_SHARE = 3
"""Host pools hold so many times the pages of their device pool; most add one page to that."""


def device_tokens(pages: int, page_size: int = PAGE_SIZE) -> int:
    return max(2, pages // DEVICE_SHARE) * page_size


def mha_device(layers: int, pages: int, *, page_size: int = PAGE_SIZE, cls: Any = MHATokenToKVPool, **fields: Any) -> Any:
    values = {"dtype": torch.bfloat16, "head_num": 2, "head_dim": 64, "device": "cpu", "enable_memory_saver": False}
    return cls(size=device_tokens(pages, page_size), page_size=page_size, layer_num=layers, **(values | fields))


def mla_device(layers: int, pages: int, *, page_size: int = PAGE_SIZE, **fields: Any) -> Any:
    values = {
        "dtype": torch.bfloat16,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return MLATokenToKVPool(size=device_tokens(pages, page_size), page_size=page_size, layer_num=layers, **(values | fields))


def dsa_device(layers: int, pages: int, *, cls: Any = DSATokenToKVPool, packed_fp8: bool = False, **fields: Any) -> Any:
    values = {
        "dtype": torch.float8_e4m3fn if packed_fp8 else torch.bfloat16,
        "kv_cache_dim": 656 if packed_fp8 else 80,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "index_head_dim": 128,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return cls(size=device_tokens(pages, 64), page_size=64, layer_num=layers, **(values | fields))


def swa_device(full: int, swa: int, pages: int, *, window_pages: int | None = None, **fields: Any) -> Any:
    """`full` layers that keep all tokens, and after them `swa` layers that keep half as many, or `window_pages`."""
    tokens = device_tokens(pages)
    return SWAKVPool(
        size=tokens,
        size_swa=tokens // 2 if window_pages is None else window_pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        device="cpu",
        swa_attention_layer_ids=list(range(full, full + swa)),
        full_attention_layer_ids=list(range(full)),
        **({"dtype": torch.bfloat16, "head_num": 2, "head_dim": 64} | fields),
    )


MAMBA2 = Mamba2StateShape.create(
    tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=4, head_dim=16, state_size=16, conv_kernel=4
)
KDA = KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=32)


def mamba_device(layers: Sequence[int], pages: int, shape: Any = MAMBA2) -> MambaPool:
    """States of linear-attention layers: a page is one state."""
    params = (KimiLinearCacheParams if shape is KDA else Mamba2CacheParams)(shape=shape, layers=list(layers))
    size = max(2, pages // DEVICE_SHARE)
    return MambaPool(size=size, spec_state_size=0, cache_params=params, mamba_layer_ids=list(layers), device="cpu")


def linear_device(mamba: MambaPool, layers: int, pages: int, *, page_size: int = PAGE_SIZE, **fields: Any) -> Any:
    """Every second layer has attention, `layers` in all; the others have their states in `mamba`."""
    return HybridLinearKVPool(
        size=device_tokens(pages, page_size),
        page_size=page_size,
        full_attention_layer_ids=list(range(0, 2 * layers, 2)),
        device="cpu",
        mamba_pool=mamba,
        **({"dtype": torch.bfloat16, "head_num": 2, "head_dim": 64} | fields),
    )


def qsa_device(mamba: MambaPool, layers: int, pages: int, **fields: Any) -> Any:
    return QSATokenToKVPool(
        size=device_tokens(pages),
        page_size=PAGE_SIZE,
        full_attention_layer_ids=list(range(0, 2 * layers, 2)),
        device="cpu",
        mamba_pool=mamba,
        qsa_index_kv_heads=1,
        qsa_index_head_dim=128,
        qsa_compress_ratio=4,
        qsa_token_topk=64,
        num_request_slots=4,
        **({"dtype": torch.bfloat16, "head_num": 2, "head_dim": 64} | fields),
    )


V4_PAGE = 256


def v4_device(ratios: Sequence[int], pages: int, **fields: Any) -> Any:
    """A DeepSeek-V4 device pool; `ratios`: each layer's compression."""
    full = device_tokens(pages, V4_PAGE)
    values = {
        "max_num_reqs": 2,
        "swa_size": full // 2,
        "c4_size": full // 4,
        "c128_size": full // 128,
        "c4_state_pool_size": full // 2 // V4_PAGE * 8,
        "c128_state_pool_size": 128,
        "page_size": V4_PAGE,
        "swa_page_size": V4_PAGE,
        "dtype": torch.float8_e4m3fn,
        "c4_state_dtype": torch.float32,
        "c128_state_dtype": torch.float32,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "indexer_head_dim": 128,
        "full_size": full,
    }
    return DeepSeekV4TokenToKVPool(
        layer_num=len(ratios),
        start_layer=0,
        end_layer=len(ratios),
        compression_ratios=list(ratios),
        device="cpu",
        enable_memory_saver=False,
        **(values | fields),
    )
