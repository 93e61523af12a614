"""The namespace of a host pool: everything that SGLang's page hash leaves out, read off the storage config and the pool."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any

from hicache_mooncake.client import weights
from hicache_mooncake.client.geometry import PoolGeometry, replicated
from hicache_mooncake.config import ConfigError, Settings
from hicache_mooncake.keys import Namespace


@dataclasses.dataclass(frozen=True)
class Weights:
    """Which weights the engine serves at the moment. `model_id`: the operator's own name for them, else a fingerprint of the
    checkpoint; `version` distinguishes later states of them."""

    model_id: str
    version: str


def namespace_of(config: Any, pool: Any, geometry: PoolGeometry, settings: Settings, served: Weights) -> Namespace:
    """`config` is SGLang's `HiCacheStorageConfig` of any version: fields it does not have take their neutral value.

    Raises ConfigError when nothing names the model: pages without a model's name could be anybody's.
    """
    model = str(getattr(config, "model_name", None) or "")
    if not model and not settings.model_id:
        raise ConfigError(
            "model_id",
            "default",
            "",
            "SGLang gave no model name, so pages could not be told apart from another model's. Start it with "
            "--served-model-name, or set model_id in the backend's extra config",
        )
    shared = shared_by_ranks(config, pool, geometry.pool)
    return Namespace(
        model=model,
        model_id=served.model_id,
        weight_version=served.version,
        tag=settings.tag,
        tenant=settings.tenant,
        pool=geometry.pool,
        family=type(getattr(getattr(pool, "anchor_entry", None), "host_pool", pool)).__name__,
        dtype=str(getattr(pool, "dtype", "")),
        layout=str(getattr(pool, "layout", "")),
        storage_format=str(getattr(pool, "storage_format_tag", None) or ""),
        page_size=int(getattr(config, "logical_page_size", None) or geometry.page_tokens),
        layers=int(getattr(pool, "layer_num", 0)),
        start_layer=_maybe_int(pool, "start_layer"),
        end_layer=_maybe_int(pool, "end_layer"),
        target_layers=_maybe_int(pool, "target_layer_num"),
        heads=_maybe_int(pool, "head_num"),
        head_dim=_maybe_int(pool, "head_dim"),
        v_head_dim=_maybe_int(pool, "v_head_dim"),
        kv_cache_dim=_maybe_int(pool, "kv_cache_dim"),
        details=(*_form_of(pool), *_engine_of(pool, geometry.pool)),
        run_bytes=tuple(run.length for run in geometry.runs),
        tp_rank=None if shared else int(getattr(config, "tp_rank", 0)),
        tp_size=None if shared else int(getattr(config, "tp_size", 1)),
        pp_rank=int(getattr(config, "pp_rank", 0)),
        pp_size=int(getattr(config, "pp_size", 1)),
        cp_rank=int(getattr(config, "attn_cp_rank", 0)),
        cp_size=int(getattr(config, "attn_cp_size", 1)),
        dcp_rank=int(getattr(config, "dcp_rank", 0)),
        dcp_size=int(getattr(config, "dcp_size", 1)),
    )


def shared_by_ranks(config: Any, pool: Any, name: str) -> bool:
    """Do all tensor-parallel ranks hold the same bytes in this pool? SGLang's `is_mla_model` says it of the KV pool. Beside it
    such a model may have pools that are sharded (recurrent state, a draft with heads): a side pool of a class that is not known
    is taken for sharded, so that no rank ever finds another's pages."""
    if not getattr(config, "is_mla_model", False):
        return False
    known = replicated(pool)
    return name == "kv" if known is None else known


_FORM = (
    "kv_lora_rank",
    "qk_rope_head_dim",
    "dsa_kv_cache_store_fp8",
    "_layer_shard_enabled",
    "head_group_num",
    "temporal_dtype",
    "temporal_state_shape",
    "conv_state_shapes",
    "num_mamba_layers",
    "item_bytes",
    "ring_size",
    "state_page_bytes",
    "row_bytes",
    "indexer_dtype",
    "indexer_page_stride_size",
    "_live_target_layers",
)
"""Attributes of SGLang's host pools that say what their bytes are, beside those that have a field of their own: MLA's split of
a row, Mamba's states, DeepSeek-V4's pages, NVFP4's rows, the sparse indexers'."""

_FORM_OF_DEVICE = (
    "index_head_dim",
    "quant_block_size",
    "index_kpool",
    "index_kpool_compress",
    "qsa_compressed_dtype",
    "qsa_compress_ratio",
    "qsa_index_head_dim",
)
"""The same, on the device pool."""

_ENVIRONMENT = (
    "SGLANG_DSV4_KV_LAYOUT",
    "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
    "SGLANG_DSV4_UNIFIED_KV_FP8",
    "SGLANG_HIP_DSV41_INDEX_K_PAGE8",
)
"""Switches of SGLang that change what a page's bytes are and not their number."""


def _form_of(pool: Any) -> list[str]:
    """`name=value` of what this class of pool says of its bytes, sorted by name. Only values that mean the same in every
    process: numbers, texts, dtypes and lists of them."""
    device = getattr(pool, "device_pool", None)
    found = {name: getattr(pool, name, None) for name in _FORM}
    found |= {f"device.{name}": getattr(device, name, None) for name in _FORM_OF_DEVICE}
    infos = getattr(pool, "_buffer_infos", None)
    found["buffers"] = (
        getattr(getattr(infos[0], "buffers", None), "layout", None) if isinstance(infos, list) and infos else None
    )
    texts = {name: _plain(value) for name, value in found.items()}
    return [f"{name}={text}" for name, text in sorted(texts.items()) if text]


def _plain(value: Any) -> str:
    if isinstance(value, bool | int | str):
        return str(value)
    if isinstance(value, enum.Enum):
        return str(value.value)
    if type(value).__name__ == "dtype":
        return str(value)
    if isinstance(value, list | tuple) and all(_plain(item) for item in value):
        return f"[{', '.join(_plain(item) for item in value)}]"
    return ""


def _engine_of(pool: Any, name: str) -> list[str]:
    """What the pool does not know of itself: the platform's byte order, which fp8 its bytes are, whose a draft's layers are."""
    import torch

    arguments = weights.server_args()
    platform = "hip" if torch.version.hip else "cuda" if torch.version.cuda else str(getattr(arguments, "device", "") or "cpu")
    details = [f"platform={platform}"]
    if "int8" in str(getattr(pool, "dtype", "")):  # SGLang keeps every kind of fp8 as bytes
        details.append(f"kv_cache_dtype={getattr(arguments, 'kv_cache_dtype', '')}")
    if "DeepSeekV4" in type(pool).__name__:
        details.append(f"backend={getattr(arguments, 'dsv4_attn_backend', '')}")
    details += [f"{variable}={os.environ[variable]}" for variable in _ENVIRONMENT if variable in os.environ]
    target, layers = getattr(pool, "target_layer_num", None), getattr(pool, "layer_num", None)
    if name.startswith("draft") or (isinstance(target, int) and target != layers):
        details.append(f"draft={weights.of_draft()}")
    return details


def _maybe_int(pool: Any, name: str) -> int | None:
    value = getattr(pool, name, None)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None
