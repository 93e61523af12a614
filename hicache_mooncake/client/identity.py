"""The namespace of a host pool: everything that SGLang's page hash leaves out, read off the storage config and the pool."""

from __future__ import annotations

import dataclasses
from typing import Any

from hicache_mooncake.client.geometry import PoolGeometry, replicated
from hicache_mooncake.config import ConfigError, Settings
from hicache_mooncake.keys import Namespace


@dataclasses.dataclass(frozen=True)
class Weights:
    """Which weights the engine serves at the moment. `model_id`: the operator's own name for them, else a fingerprint of the
    checkpoint; `version` distinguishes later states of them."""

    model_id: str
    version: str


def namespace_of(config: Any, pool: Any, geometry: PoolGeometry, settings: Settings, weights: Weights) -> Namespace:
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
        model_id=weights.model_id,
        weight_version=weights.version,
        tag=settings.tag,
        tenant=settings.tenant,
        pool=geometry.pool,
        family=type(pool).__name__,
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


def _maybe_int(pool: Any, name: str) -> int | None:
    value = getattr(pool, name, None)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None
