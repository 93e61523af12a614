"""SGLang's own host pools of every model family, in miniature and on the CPU.

Nothing here imitates a pool. A family's device pool is one of SGLang's, SGLang's assembler makes the host pools for it, as it
does for a model, and says which pool follows whose indices and how much of it a hit needs. What a CPU lacks is stood in for:
page-locking host memory (nothing), the scheduler's objects around a pool (namespaces), and, where a class is made only on a
certain GPU, the question which GPU this is (see the families' notes).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4
from sglang.srt.mem_cache.deepseek_v4_memory_pool import HiSparseC4DevicePool
from sglang.srt.mem_cache.device_pool_info import MLABufferInfo, MLASplitBuffers
from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool, HiSparseMHAMainPool
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8, MiniMaxSparseKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool
from sglang.srt.mem_cache.page_interleave import PageInterleavePlacement, PageShardSpec
from sglang.srt.mem_cache.ple_state_pool import ShortConvPool
from sglang.srt.mem_cache.pool_host import base, common, mha, mha_mxfp8
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mha import HiSparseMHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.page_interleave import PageInterleaveHostPool
from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_memory_pool import MHASubPoolSpec, UnifiedKVPool, UnifiedMHATokenToKVPool
from sglang.srt.runtime_context import get_context, get_parallel

from tests.sglang.device_pools import (
    DEVICE_SHARE,
    KDA,
    MAMBA2,
    PAGE_SIZE,
    V4_PAGE,
    device_tokens,
    dsa_device,
    linear_device,
    mamba_device,
    mha_device,
    mla_device,
    qsa_device,
    swa_device,
    v4_device,
)
from tests.sglang.pools import content, fill, holds, page_runs, page_tokens, scramble, slots, usable_pages

__all__ = [
    "FAMILIES",
    "Family",
    "FamilyPool",
    "assemble",
    "content",
    "dcp_ranks",
    "engine",
    "fill",
    "holds",
    "page_runs",
    "page_tokens",
    "pools_of",
    "scramble",
    "slots",
    "usable_pages",
]

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
LAYER_FIRST, PAGE_FIRST, DIRECT, PAGE_HEAD = "layer_first", "page_first", "page_first_direct", "page_head"
PAGES = 24


@dataclasses.dataclass(frozen=True)
class FamilyPool:
    """One entry of a model's host pools, the anchor first, as the backend gets them registered."""

    name: str
    pool: Any
    hit_policy: PoolHitPolicy
    indices_from: str | None
    """The pool whose host indices name this one's pages; None: its own."""
    replicated_over_tp: bool
    """Every tensor-parallel rank holds the same bytes, if the storage config says `is_mla_model`."""


@dataclasses.dataclass(frozen=True)
class Family:
    """`build(layout, allocator="shm", **shape)` makes a new, separate set of pools each time.

    `shape` may be `layers` and `pages` (about so many host pages), and what the builder's own keywords are.
    """

    name: str
    layouts: tuple[str, ...]
    build: Callable[..., list[FamilyPool]]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the storage config beside the defaults."""
    allocators: tuple[str, ...] = ("shm", "default")
    refused: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    """(layout, pool) that cannot be stored, with the reason (a regular expression)."""
    unbuildable: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Layouts that SGLang itself refuses to build, with its reason (a regular expression)."""
    note: str = ""


# --------------------------------------------------------------------------- the engine around the pools


class _Controller(HybridCacheController):  # type: ignore[misc]
    """What the assembler hands on of a controller, without its threads, streams and process groups."""

    def __init__(self, _allocator: Any, mem_pool_host: Any, page_size: int, *_args: Any, **kwargs: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self.page_size = page_size
        self.transfer_layer_id_max = kwargs.get("transfer_layer_id_max")


@contextlib.contextmanager
def engine(layout: str, allocator: str, parallel: Mapping[str, Any] | None = None, **server_args: Any) -> Iterator[None]:
    """SGLang's configuration for as long as pools are built, of an engine with this host layout and allocator."""
    fields = {
        "hicache_ratio": float(DEVICE_SHARE),
        "hicache_size": 0,
        "hicache_mem_layout": layout,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps({"allocator": allocator}),
    }
    with (
        get_context().override_server_args(**(fields | server_args)),
        get_parallel().override(**(parallel or {})),
        mock.patch.object(common, "_cuda_host_register"),
        mock.patch.object(assembler, "HybridCacheController", _Controller),
        base.host_memory_budget_scope(2 << 30),
    ):
        yield


def assemble(kvcache: Any, components: set[ComponentType], page_size: int, **params: Any) -> Any:
    """SGLang's strategy for this device pool, run: a StackBuildResult."""
    sub_allocator = SimpleNamespace(alloc=None, free=None)
    mamba_pool = params.pop("mamba_pool", None)
    allocator = SimpleNamespace(
        get_kvcache=lambda: kvcache, swa_attn_allocator=sub_allocator, size_full=params.pop("size_full", kvcache.size)
    )
    defaults = {
        "token_to_kv_pool_allocator": allocator,
        "req_to_token_pool": SimpleNamespace(mamba_pool=mamba_pool, mamba_allocator=sub_allocator),
        "page_size": page_size,
        "pp_size": 1,
        "mtp_draft_device_pools": (),
        "mtp_draft_mamba_pools": (),
        "sidecar_draft_device_pools": (),
        "tp_cache_group": None,
        "attn_cp_cache_group": None,
        "attn_tp_cache_group": None,
        "pp_cache_group": None,
    }
    return assembler._select_strategy(kvcache, components).build(
        cache=SimpleNamespace(page_size=page_size, components=components),
        kvcache=kvcache,
        params=SimpleNamespace(**(defaults | params)),
        server_args=None,
        load_cache_event=None,
    )


def pools_of(result: Any, draft: Any = None) -> list[FamilyPool]:
    """All pools of a result, and those of a draft model that comes later with a device pool of its own."""
    specs = list(result.sidecars)
    if draft is not None:
        tree = SimpleNamespace(cache_controller=result.cache_controller)
        more, entries = assembler.build_hicache_draft_sidecars(draft_device_pools=(draft,), tree_cache=tree)
        specs += more
        for entry in entries:
            result.host_pool_group.add_entry(entry)
    return _group(result.host_pool_group, specs)


def _group(group: Any, specs: Sequence[Any] = ()) -> list[FamilyPool]:
    by_name = {spec.pool_name: spec for spec in specs}
    pools = []
    for entry in group.entries:
        spec = by_name.get(entry.name)
        policy = PoolHitPolicy.TRAILING_PAGES if entry.name in ("swa", "mamba") else PoolHitPolicy.ALL_PAGES
        pools.append(
            _pool(entry.name.value, entry.host_pool, spec.hit_policy if spec else policy, spec and spec.indices_from_pool)
        )
    return pools


def _pool(name: str, pool: Any, policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES, source: Any = None) -> FamilyPool:
    same = (MLATokenToKVPoolHost, DSAIndexerPoolHost, DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool)
    pool.pin_memory = False  # it was not page-locked, and the tensors that it makes for its callers cannot be
    replicated = isinstance(pool, same) and not isinstance(pool, QSAIndexerPoolHost)
    return FamilyPool(name, pool, policy, source.value if source is not None else None, replicated)


# --------------------------------------------------------------------------- families: one KV pool


def _mha(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES, drafts: int = 0, **fields: Any) -> Any:
    with engine(layout, allocator):
        packed = tuple(mha_device(1, pages, **fields) for _ in range(drafts))
        return pools_of(assemble(mha_device(layers, pages, **fields), {FULL}, PAGE_SIZE, mtp_draft_device_pools=packed))


def _mha_mxfp8(layout: str, allocator: str = "shm", *, layers: int = 2, pages: int = PAGES) -> Any:
    device = mha_device(layers, pages, page_size=128, cls=MHATokenToKVPoolMXFP8, dtype=torch.float8_e4m3fn)
    gpu = SimpleNamespace(capabilities=SimpleNamespace(hicache_device_kernels=True))
    with (
        engine(layout, allocator),
        mock.patch.object(mha, "_is_cuda", True),
        mock.patch.object(mha, "current_platform", gpu),
        mock.patch.object(mha, "can_use_hicache_jit_kernel", return_value=True),
        mock.patch.object(mha, "can_use_write_back_jit_kernel", return_value=True),
        mock.patch.object(mha_mxfp8, "can_use_write_back_jit_kernel", return_value=True),
    ):
        return pools_of(assemble(device, {FULL}, 128))


def _mla(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES, drafts: int = 0, **fields: Any) -> Any:
    with engine(layout, allocator):
        packed = tuple(mla_device(1, pages, **fields) for _ in range(drafts))
        return pools_of(assemble(mla_device(layers, pages, **fields), {FULL}, PAGE_SIZE, mtp_draft_device_pools=packed))


def dcp_ranks(rank: int, size: int) -> dict[str, Any]:
    """`engine(parallel=...)` of a rank under decode context parallelism."""
    return {"attn_dcp_size": size, "dcp_enabled": size > 1, "attn_dcp_rank": rank}


def _mla_dcp(
    layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES, dcp_rank: int = 0, dcp_size: int = 2
) -> Any:
    with engine(layout, allocator, dcp_ranks(dcp_rank, dcp_size)):
        return pools_of(assemble(mla_device(layers, pages), {FULL}, PAGE_SIZE * dcp_size))


def _mla_kv_split(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES) -> Any:
    """Ascend's: K, V and index keys of some layers in a buffer each, and none of them named for transfers but K."""
    indexed = tuple(range(0, layers, 2))
    shape = (device_tokens(pages) // PAGE_SIZE, PAGE_SIZE, 1)
    k, v, index_k = (
        torch.zeros(count, *shape, width, dtype=torch.bfloat16)
        for count, width in ((layers, 64), (layers, 16), (len(indexed), 128))
    )
    buffers = MLASplitBuffers(
        k=k, v=v, index_k=index_k, index_scales=None, index_layer_indices=indexed, k_width=64, v_width=16, index_width=128
    )
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=None,
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=PAGE_SIZE,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        kv_cache_dim=80,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    with engine(layout, allocator):
        host = MLATokenToKVPoolHost(
            info,
            float(DEVICE_SHARE),
            0,
            PAGE_SIZE,
            layout,
            allocator_type=allocator,
            device_capacity_tokens=device_tokens(pages),
            start_layer=0,
            end_layer=layers,
            target_layer_num=layers,
        )
    return [_pool("kv", host)]


def _page_interleave(
    layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES, shard_rank: int = 0, shard_size: int = 2
) -> Any:
    (native,) = _mha(layout, allocator, layers=layers, pages=pages)
    spec = PageShardSpec(shard_rank, shard_size, PAGE_SIZE, max_prefix_tokens=64, chunk_tokens=64)
    return [_pool("kv", PageInterleaveHostPool(native.pool, PageInterleavePlacement(spec)))]


def _hisparse_mha(layout: str, allocator: str = "default", *, layers: int = 3, pages: int = PAGES) -> Any:
    device = mha_device(layers, pages, cls=HiSparseMHAMainPool, head_num=1, start_layer=0, end_layer=layers)
    with engine(layout, allocator):
        host = HiSparseMHATokenToKVPoolHost(
            buffer_info=device.get_device_pool_infos()[0].buffer_info,
            host_to_device_ratio=DEVICE_SHARE,
            page_size=device.page_size,
            device_capacity_tokens=device.size,
            start_layer=0,
            end_layer=layers,
        )
    return [_pool("kv", host)]


def _hisparse_mla(layout: str, allocator: str = "default", *, layers: int = 3, pages: int = PAGES) -> Any:
    with engine(layout, allocator):
        device = dsa_device(layers, pages, cls=HiSparseDSATokenToKVPool)
        host = MLATokenToKVPoolHost(
            buffer_info=device.get_device_pool_infos()[0].buffer_info,
            device_capacity_tokens=device.size,
            start_layer=0,
            end_layer=layers,
            target_layer_num=layers,
            host_to_device_ratio=DEVICE_SHARE,
            host_size=0,
            page_size=device.page_size,
            layout=layout,
            override_kv_cache_dim=device.kv_cache_dim,
        )
    return [_pool("kv", host)]


def _hisparse_v4(layout: str, allocator: str = "default", *, layers: int = 2, pages: int = PAGES) -> Any:
    device = HiSparseC4DevicePool(device_tokens(pages, 64), 64, torch.float8_e4m3fn, 448, 64, layers, "cpu", False)
    with engine(layout, allocator):
        host = DeepSeekV4PagedHostPool(
            pool_name="dsv4_hisparse_c4",
            device_buffers=device.kv_buffer,
            item_bytes=device.bytes_per_page_padded,
            num_host_pages=pages,
            slot_page_size=device.page_size,
            layout=layout,
        )
    return [_pool("kv", host)]


# --------------------------------------------------------------------------- families: sparse attention


def _dsa(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES, drafts: int = 0, **fields: Any) -> Any:
    with engine(layout, allocator):
        packed = tuple(dsa_device(1, pages, packed_fp8=fields.get("packed_fp8", False)) for _ in range(drafts))
        return pools_of(assemble(dsa_device(layers, pages, **fields), {FULL}, 64, mtp_draft_device_pools=packed))


def _dsa_mtp(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES) -> Any:
    """Packed fp8 rows, two layers in four with index keys of their own, one draft layer at the end of both pools."""
    skip = [layer % 4 in (1, 2) for layer in range(layers)]
    return _dsa(layout, allocator, layers=layers, pages=pages, drafts=1, packed_fp8=True, skip_topk_layers=skip)


def _dsa_layer_split(
    layout: str, allocator: str = "shm", *, layers: int = 5, pages: int = PAGES, cp_rank: int = 0, cp_size: int = 2
) -> Any:
    """Each context-parallel rank has its part of the layers; the KV pool has room for the largest part on every rank."""
    alone = SimpleNamespace(world_size=1, pynccl_comm=None)
    with engine(layout, allocator, {"attn_cp_group": alone}):
        device = dsa_device(layers, pages, cls=LayerSplitDSATokenToKVPool, layer_shard_rank=cp_rank, layer_shard_size=cp_size)
        return pools_of(assemble(device, {FULL}, 64))


def _minimax(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES, **fields: Any) -> Any:
    sparse = list(range(1, layers))
    with engine(layout, allocator):
        device = MiniMaxSparseKVPool(
            size=device_tokens(pages),
            page_size=PAGE_SIZE,
            idx_head_dim=128,
            dense_layer_ids=[0],
            sparse_layer_ids=sparse,
            disable_value_sparse_layer_ids=sparse,
            device="cpu",
            start_layer=0,
            end_layer=layers,
            **({"dtype": torch.bfloat16, "head_num": 2, "head_dim": 64} | fields),
        )
        return pools_of(assemble(device, {FULL}, PAGE_SIZE))


def _minimax_nvfp4(layout: str, allocator: str = "shm", *, layers: int = 3, pages: int = PAGES) -> Any:
    with engine(layout, allocator, hicache_io_backend="kernel"):
        device = MiniMaxM3Nvfp4KVPool(
            size=device_tokens(pages, 128),
            page_size=128,
            dtype=torch.bfloat16,
            head_num=1,
            head_dim=128,
            idx_head_dim=128,
            dense_layer_ids=[],
            sparse_layer_ids=list(range(layers)),
            disable_value_sparse_layer_ids=list(range(layers)),
            device="cpu",
            start_layer=0,
            end_layer=layers,
        )
        return pools_of(assemble(device, {FULL}, 128))


def _qsa(
    layout: str, allocator: str = "shm", *, layers: int = 2, pages: int = PAGES, eagle: bool = False, **fields: Any
) -> Any:
    with engine(layout, allocator):
        mamba = mamba_device(range(1, 2 * layers, 2), pages)
        result = assemble(qsa_device(mamba, layers, pages, **fields), {FULL, MAMBA}, PAGE_SIZE, mamba_pool=mamba)
        return pools_of(result, qsa_device(mamba_device([1], pages), 1, pages, **fields) if eagle else None)


# --------------------------------------------------------------------------- families: windows and states


def _swa(
    layout: str,
    allocator: str = "shm",
    *,
    layers: int = 2,
    swa_layers: int = 3,
    pages: int = PAGES,
    drafts: bool = False,
    eagle: bool = False,
    **fields: Any,
) -> Any:
    """`drafts`: one more layer packed into each pool; `eagle`: a draft model with a sliding window, in a pool of its own."""
    with engine(layout, allocator):
        packed = [swa_device(1, 0, pages, **fields), swa_device(0, 1, pages, **fields)] if drafts else []
        for draft in packed:
            draft.swa_uses_full_indices = False
        device = swa_device(layers, swa_layers, pages, **fields)
        result = assemble(device, {FULL, SWA}, PAGE_SIZE, mtp_draft_device_pools=tuple(packed))
        return pools_of(result, swa_device(0, 1, pages, **fields) if eagle else None)


def _swa_draft_of_full_indices(
    layout: str, allocator: str = "shm", *, layers: int = 2, swa_layers: int = 3, pages: int = PAGES
) -> Any:
    """A draft layer with a window and heads of its own, whose pool is addressed like the full one."""
    with engine(layout, allocator):
        draft = swa_device(0, 1, pages, window_pages=device_tokens(pages) // PAGE_SIZE, head_num=4)
        draft.swa_uses_full_indices = True
        device = swa_device(layers, swa_layers, pages)
        return pools_of(assemble(device, {FULL, SWA}, PAGE_SIZE, mtp_draft_device_pools=(draft,)))


def _swa_mla(layout: str, allocator: str = "shm", *, layers: int = 2, swa_layers: int = 3, pages: int = PAGES) -> Any:
    part = {"page_size": PAGE_SIZE, "device": "cpu", "enable_memory_saver": False, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
    with engine(layout, allocator):
        device = swa_device(
            layers,
            swa_layers,
            pages,
            token_to_kv_pool_class=MLATokenToKVPool,
            full_kv_pool_kwargs=part,
            swa_kv_pool_kwargs=part,
        )
        full_layers, window_layers = assembler._swa_layer_mappings(device)
        return _group(
            assembler.build_hybrid_swa_group(
                page_size=PAGE_SIZE,
                full_kv_pool=device.full_kv_pool,
                swa_kv_pool=device.swa_kv_pool,
                full_layer_mapping=full_layers,
                swa_layer_mapping=window_layers,
                use_mla=True,
            )
        )


def _mamba(
    layout: str,
    allocator: str = "shm",
    *,
    layers: int = 2,
    pages: int = PAGES,
    shape: Any = MAMBA2,
    side_state: bool = False,
    drafts: int = 0,
    **fields: Any,
) -> Any:
    page_size = fields.get("page_size", PAGE_SIZE)
    with engine(layout, allocator):
        mamba = mamba_device(range(1, 2 * layers, 2), pages, shape)
        if side_state:
            mamba.register_slot_state(
                ShortConvPool(size=mamba.size, state_shape=(32, 3), layer_ids=[1], dtype=torch.bfloat16, device="cpu")
            )
        result = assemble(
            linear_device(mamba, layers, pages, **fields),
            {FULL, MAMBA},
            page_size,
            mamba_pool=mamba,
            mtp_draft_device_pools=tuple(mha_device(1, pages) for _ in range(drafts)),
            mtp_draft_mamba_pools=tuple(mamba_device([0], pages, shape) for _ in range(drafts)),
        )
        return pools_of(result)


def _kimi_linear(layout: str, allocator: str = "shm", *, layers: int = 2, pages: int = PAGES) -> Any:
    mla: dict[str, Any] = {"use_mla": True, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
    return _mamba(layout, allocator, layers=layers, pages=pages, shape=KDA, **mla)


def _kimi_linear_dsa(layout: str, allocator: str = "shm", *, layers: int = 2, pages: int = PAGES) -> Any:
    mla: dict[str, Any] = {"use_mla": True, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "page_size": 64}
    return _mamba(
        layout, allocator, layers=layers, pages=pages, shape=KDA, use_dsa=True, index_head_dim=128, kv_cache_dim=80, **mla
    )


def _mamba_swa(layout: str, allocator: str = "shm", *, layers: int = 2, swa_layers: int = 3, pages: int = PAGES) -> Any:
    with engine(layout, allocator):
        mamba = mamba_device([layers + swa_layers, layers + swa_layers + 1], pages)
        device = swa_device(layers, swa_layers, pages)
        return pools_of(assemble(device, {FULL, SWA, MAMBA}, PAGE_SIZE, mamba_pool=mamba))


# --------------------------------------------------------------------------- families: a draft model with pools of its own


def _eagle_mha(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES, **fields: Any) -> Any:
    with engine(layout, allocator):
        result = assemble(mha_device(layers, pages, **fields), {FULL}, PAGE_SIZE)
        return pools_of(result, mha_device(1, pages, head_num=4, head_dim=32))


def _eagle_mla(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES) -> Any:
    with engine(layout, allocator):
        return pools_of(assemble(mla_device(layers, pages), {FULL}, PAGE_SIZE), mla_device(1, pages))


def _eagle_mha_on_mla(
    layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES, dcp_rank: int = 0, dcp_size: int = 1
) -> Any:
    """Under decode context parallelism the draft's pool is not shared out: its rows are the slots of the target."""
    with engine(layout, allocator, dcp_ranks(dcp_rank, dcp_size)):
        draft = mha_device(1, pages, page_size=PAGE_SIZE * dcp_size)
        return pools_of(assemble(mla_device(layers, pages), {FULL}, PAGE_SIZE * dcp_size), draft)


def _eagle_mha_on_mla_dcp(layout: str, allocator: str = "shm", **shape: Any) -> Any:
    return _eagle_mha_on_mla(layout, allocator, dcp_size=2, **shape)


def _eagle_dsa(layout: str, allocator: str = "shm", *, layers: int = 4, pages: int = PAGES) -> Any:
    with engine(layout, allocator):
        return pools_of(assemble(dsa_device(layers, pages), {FULL}, 64), dsa_device(1, pages))


# --------------------------------------------------------------------------- families: DeepSeek-V4


def _deepseek_v4(
    layout: str,
    allocator: str = "shm",
    *,
    layers: int = 4,
    pages: int = PAGES,
    draft: str = "",
    hip: bool = False,
    unified: bool = False,
    **fields: Any,
) -> Any:
    """`draft`: packed or own. `hip`: AMD's split of FP4 index keys and scales. `unified`: AMD's rows of fp8 and bf16 halves."""
    ratios = fields.pop("ratios", ([0, 4, 128, 4] * layers)[:layers])
    with engine(layout, allocator, enable_deepseek_v4_fp4_indexer=hip):
        with contextlib.ExitStack() as gpu:
            if hip:
                gpu.enter_context(mock.patch.object(v4, "_is_hip", True))
            if unified:
                gpu.enter_context(mock.patch.object(unified_kv_gate, "is_unified_kv_triton", return_value=True))
                fields["unified_fp8"] = True
            device = v4_device(ratios, pages, **fields)
        packed = (v4_device([0], pages),) if draft == "packed" else ()
        size_full = device_tokens(pages, V4_PAGE)
        result = assemble(device, {FULL, SWA}, V4_PAGE, size_full=size_full, mtp_draft_device_pools=packed)
        return pools_of(result, v4_device([0], pages) if draft == "own" else None)


def _deepseek_v41(layout: str, allocator: str = "shm", *, pages: int = PAGES, kv_layout: str = "v41") -> Any:
    """V4.1 with compression by 1 and 2, whose layers share the pages of a source layer."""
    return _deepseek_v4(layout, allocator, pages=pages, ratios=[0, 1, 2, 4, 128], kv_source_layers=(1, 2), kv_layout=kv_layout)


# --------------------------------------------------------------------------- families: one arena for two pools


def _unified_envelope(layout: str, allocator: str = "shm", *, layers: int = 2, swa_layers: int = 3, pages: int = PAGES) -> Any:
    """A third of the pages are allocated: the others have no address."""
    specs = [
        MHASubPoolSpec(name="full", layer_num=layers, grow_direction="up", head_num=2, head_dim=64, store_dtype=torch.bfloat16),
        MHASubPoolSpec(
            name="swa", layer_num=swa_layers, grow_direction="down", head_num=2, head_dim=32, store_dtype=torch.bfloat16
        ),
    ]
    arena = UnifiedKVPool(
        total_bytes=device_tokens(pages) * specs[0].entry_bytes(),
        sub_pool_specs=specs,
        device="cpu",
        enable_memory_saver=False,
        page_size=PAGE_SIZE,
    )
    full, swa = (
        UnifiedMHATokenToKVPool(unified_buffer=arena, sub_pool_name=name, page_size=PAGE_SIZE) for name in ("full", "swa")
    )
    with (
        engine(layout, allocator, hicache_storage_backend=None),
        mock.patch.object(assembler, "_get_allocator_type", return_value=allocator),
    ):
        group = assembler.build_hybrid_swa_group(
            page_size=PAGE_SIZE,
            full_kv_pool=full,
            swa_kv_pool=swa,
            full_layer_mapping={layer: layer for layer in range(layers)},
            swa_layer_mapping={layers + layer: layer for layer in range(swa_layers)},
            use_mla=False,
        )
    pools = _group(group)
    for pool in pools:
        pool.pool.alloc(pages // DEVICE_SHARE * PAGE_SIZE)
    return pools


# --------------------------------------------------------------------------- the table

_ALL = (LAYER_FIRST, PAGE_FIRST, DIRECT)
_BY_PAGE = (PAGE_FIRST, DIRECT)
_MLA_MODEL = {"is_mla_model": True}
_UNSUPPORTED = r"get_page_buffer_meta failed: ValueError\('Unsupported (zero-copy )?layout: "
_ASYMMETRIC = dict.fromkeys((LAYER_FIRST, PAGE_HEAD), "Unsupported layout for models with head_dim != v_head_dim")
_NO_MAMBA = dict.fromkeys((LAYER_FIRST, PAGE_HEAD), "Unsupported layout")
_NO_PAGE_HEAD = {PAGE_HEAD: "Unsupported layout: page_head"}


def _not_by_layer(*pools: str) -> dict[tuple[str, str], str]:
    return {(LAYER_FIRST, pool): f"{_UNSUPPORTED}layer_first" for pool in pools}


def _everywhere(pool: str, reason: str, layouts: Sequence[str]) -> dict[tuple[str, str], str]:
    return {(layout, pool): reason for layout in layouts}


_LOGICAL = _everywhere("kv", "no buffer of its own", _ALL)
_UNIFIED = {("page_unified", "kv"): f"{_UNSUPPORTED}page_unified"}
_DCP_CONFIG = _MLA_MODEL | {"tp_size": 2, "dcp_size": 2, "logical_page_size": 2 * PAGE_SIZE}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("mha", (*_ALL, PAGE_HEAD, "page_unified"), _mha, refused=_UNIFIED),
        Family("mha_asymmetric", _BY_PAGE, partial(_mha, v_head_dim=32), unbuildable=_ASYMMETRIC),
        Family("mha_mtp", (*_ALL, PAGE_HEAD), partial(_mha, drafts=2)),
        Family(
            "mha_mxfp8",
            (PAGE_FIRST,),
            _mha_mxfp8,
            refused={(PAGE_FIRST, "kv"): "a page's UE8M0 scales live outside kv_buffer"},
            unbuildable=dict.fromkeys((LAYER_FIRST, DIRECT, PAGE_HEAD), "supports only the page_first layout"),
            note="Made on CUDA and HIP only: built here with the questions for a GPU and its kernels answered yes.",
        ),
        Family("mla", (*_ALL, "page_unified"), _mla, _MLA_MODEL, refused=_UNIFIED, unbuildable=_NO_PAGE_HEAD),
        Family("mla_mtp", _ALL, partial(_mla, drafts=1), _MLA_MODEL, unbuildable=_NO_PAGE_HEAD),
        Family(
            "mla_kv_split",
            ("page_first_kv_split",),
            _mla_kv_split,
            _MLA_MODEL,
            note="Made on Ascend only; the constructor asks for no NPU. Its FP8 form needs one.",
        ),
        Family("mla_dcp", _ALL, _mla_dcp, _DCP_CONFIG),
        Family("dsa", _ALL, _dsa, _MLA_MODEL, refused=_not_by_layer("indexer"), unbuildable=_NO_PAGE_HEAD),
        Family("dsa_mtp", _ALL, _dsa_mtp, _MLA_MODEL, refused=_not_by_layer("indexer")),
        Family(
            "dsa_layer_split",
            _ALL,
            _dsa_layer_split,
            _MLA_MODEL | {"attn_cp_size": 2},
            refused=_not_by_layer("indexer"),
            note="One context-parallel rank at a time, without the group that broadcasts layers.",
        ),
        Family("minimax", _ALL, _minimax, refused=_not_by_layer("indexer")),
        Family("minimax_nvfp4", _ALL, _minimax_nvfp4, refused=_not_by_layer("kv", "indexer")),
        Family("qsa", _BY_PAGE, _qsa, unbuildable=_NO_MAMBA),
        Family("swa", (*_ALL, PAGE_HEAD), _swa),
        Family(
            "swa_asymmetric",
            _BY_PAGE,
            partial(_swa, v_head_dim=32, swa_head_dim=32, swa_v_head_dim=32),
            unbuildable=_ASYMMETRIC,
        ),
        Family("swa_mtp", (*_ALL, PAGE_HEAD), partial(_swa, drafts=True)),
        Family("swa_full_draft", (*_ALL, PAGE_HEAD), _swa_draft_of_full_indices),
        Family(
            "swa_mla",
            _ALL,
            _swa_mla,
            note="Built by the group's builder: the strategy of 0.5.23 always takes sliding windows for MHA.",
        ),
        Family("mamba", _BY_PAGE, _mamba, unbuildable=_NO_MAMBA),
        Family(
            "mamba_convs",
            _BY_PAGE,
            partial(_mamba, shape=dataclasses.replace(MAMBA2, conv=[(64, 3), (32, 3), (16, 3)])),
        ),
        Family(
            "mamba_conv_only",
            _BY_PAGE,
            partial(_mamba, shape=dataclasses.replace(MAMBA2, temporal=(4, 16, 0))),
        ),
        Family("mamba_mtp", _BY_PAGE, partial(_mamba, drafts=1)),
        Family(
            "mamba_side_state",
            _BY_PAGE,
            partial(_mamba, side_state=True),
            refused=_everywhere("mamba", "does not carry registered slot side states", _BY_PAGE),
        ),
        Family("mamba_swa", _BY_PAGE, _mamba_swa, unbuildable=_NO_MAMBA),
        Family("kimi_linear", _BY_PAGE, _kimi_linear, _MLA_MODEL, unbuildable={LAYER_FIRST: "Unsupported layout"}),
        Family("kimi_linear_dsa", _BY_PAGE, _kimi_linear_dsa, _MLA_MODEL),
        Family("eagle_mha", (*_ALL, PAGE_HEAD), _eagle_mha),
        Family("eagle_mla", _ALL, _eagle_mla, _MLA_MODEL),
        Family("eagle_mha_on_mla", _ALL, _eagle_mha_on_mla, _MLA_MODEL),
        Family("eagle_mha_on_mla_dcp", _ALL, _eagle_mha_on_mla_dcp, _DCP_CONFIG, note="SGLang attaches no storage to it."),
        Family("eagle_dsa", _ALL, _eagle_dsa, _MLA_MODEL, refused=_not_by_layer("indexer", "draft_indexer")),
        Family("eagle_swa", (*_ALL, PAGE_HEAD), partial(_swa, eagle=True)),
        Family("eagle_qsa", _BY_PAGE, partial(_qsa, eagle=True)),
        Family("deepseek_v4", _ALL, _deepseek_v4, _MLA_MODEL, refused=_LOGICAL, unbuildable=_NO_PAGE_HEAD),
        Family("deepseek_v4_mtp", _ALL, partial(_deepseek_v4, draft="packed"), _MLA_MODEL, refused=_LOGICAL),
        Family("deepseek_v4_eagle", _ALL, partial(_deepseek_v4, draft="own"), _MLA_MODEL, refused=_LOGICAL),
        Family("deepseek_v41", _ALL, _deepseek_v41, _MLA_MODEL, refused=_LOGICAL),
        Family(
            "deepseek_v4_fp4",
            _ALL,
            partial(_deepseek_v4, hip=True),
            _MLA_MODEL,
            refused=_LOGICAL,
            note="Index keys and scales lie apart on HIP only: the device pool is built with that question answered yes.",
        ),
        Family(
            "deepseek_v4_unified",
            _ALL,
            partial(_deepseek_v4, unified=True),
            _MLA_MODEL,
            refused=_LOGICAL,
            note="The rope pools exist on AMD gfx95 only: the device pool is built with that question answered yes.",
        ),
        Family(
            "page_interleave",
            _ALL,
            _page_interleave,
            refused=_everywhere("kv", "800 slots in pages of 16, but 400 rows .* spread over several ranks", _ALL),
            note="Its device pool needs NCCL: the host pool is given a plain MHA pool's. SGLang attaches no storage to it.",
        ),
        Family(
            "hisparse_mha",
            (LAYER_FIRST,),
            _hisparse_mha,
            allocators=("default",),
            note="Never registered with a storage backend.",
        ),
        Family("hisparse_mla", (LAYER_FIRST,), _hisparse_mla, _MLA_MODEL, ("default",), note="As hisparse_mha."),
        Family("hisparse_v4", (LAYER_FIRST,), _hisparse_v4, _MLA_MODEL, ("default",), note="As hisparse_mha."),
        Family(
            "unified_envelope",
            _ALL,
            _unified_envelope,
            note="SGLang makes it without a storage backend (or with mori), and attaches no other to it.",
        ),
    )
}
"""By name. What each is for is in its builder."""
