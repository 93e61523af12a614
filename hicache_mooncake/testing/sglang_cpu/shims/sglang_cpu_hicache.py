"""An SGLang plugin that lets HiCache run on `--device cpu`: the copies between the device pool (L1) and the host pool (L2).

Three things stop HiCache on CPU in SGLang 0.5.23:

1. the host pool asks for pinned memory, which needs CUDA;
2. the copy kernels of `sgl_kernel.kvcacheio` do not exist, so the pools get the same functions, with the same argument lists,
   written as plain torch indexing. Streams and events are no-ops on CPU, so they run on the scheduler thread;
3. ten GiB of host memory must stay free beside the host pool, more than a laptop has. Here it is 1 GiB.

It covers MHA, MLA and Mamba pools, layouts layer_first, page_first and page_first_direct, I/O backends `kernel` and `direct`.
It does nothing unless SGLang runs on its CPU engine.
"""

import ctypes

import numpy as np
import torch

HOST_MEMORY_RESERVE_BYTES = 1 << 30


# --------------------------------------------------------------------------- I/O backend "direct"


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Host (page, layer, token in page, ...) to one device layer (token, ...)."""
    src_pages = src_indices[::page_size] // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[src_pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """All device layers, K before V, to one host tensor each for K and V."""
    dst_pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            dst[dst_pages, layer] = src_ptrs[i * layers + layer][src_indices].unflatten(0, (-1, page_size))


# --------------------------------------------------------------------------- I/O backend "kernel"


def _rows_at(address, rows, row_bytes):
    memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(int(address))
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(rows, row_bytes)


def _row_count(indices):
    return int(indices.max()) + 1 if indices.numel() else 0


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_):
    dst_k[dst_indices] = src_k[src_indices]
    dst_v[dst_indices] = src_v[src_indices]


def transfer_kv_per_layer_pf_lf(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_):
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_all_layer(
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers, **_
):
    """Device and host layers come as tensors of addresses."""
    src_rows, dst_rows = _row_count(src_indices), _row_count(dst_indices)
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for layer in range(num_layers):
            source = _rows_at(src[layer], src_rows, item_size)
            _rows_at(dst[layer], dst_rows, item_size)[dst_indices] = source[src_indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    src_rows = _row_count(src_indices)
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        rows = _rows_at(dst.data_ptr(), dst.shape[0], dst_layout_dim).view(-1, num_layers, item_size)
        for layer in range(num_layers):
            rows[dst_indices, layer] = _rows_at(src[layer], src_rows, item_size)[src_indices]


def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, **_):
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_):
    dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_all_layer_mla(src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, **_):
    """Device and host layers come as tensors of addresses."""
    src_rows, dst_rows = _row_count(src_indices), _row_count(dst_indices)
    for layer in range(num_layers):
        source = _rows_at(src_layers[layer], src_rows, item_size)
        _rows_at(dst_layers[layer], dst_rows, item_size)[dst_indices] = source[src_indices]


def transfer_kv_all_layer_mla_lf_pf(src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_):
    src_rows = _row_count(src_indices)
    rows = _rows_at(dst.data_ptr(), dst.shape[0], dst_layout_dim).view(-1, num_layers, item_size)
    for layer in range(num_layers):
        rows[dst_indices, layer] = _rows_at(src_layers[layer], src_rows, item_size)[src_indices]


def transfer_kv_mamba_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_):
    """Host (slot, layer, 1, ...) to one device layer (slot, ...)."""
    dst[dst_indices] = src[src_indices, layer_id, 0]


def transfer_kv_mamba_lf_pf(src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_):
    transfer_kv_all_layer_mla_lf_pf(src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


_COPIES = (
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_all_layer,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_mla,
    transfer_kv_per_layer_mla_pf_lf,
    transfer_kv_all_layer_mla,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_mamba_pf_lf,
    transfer_kv_mamba_lf_pf,
)


def _without_pinned_memory(*args, **kwargs):
    kwargs["pin_memory"] = False
    return args, kwargs


def activate():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    from sglang.srt.mem_cache.pool_host import base, mamba, mha, mla

    for pool in ("base.HostKVCache", "mamba.MambaPoolHost"):
        HookRegistry.register(f"sglang.srt.mem_cache.pool_host.{pool}.__init__", _without_pinned_memory, HookType.BEFORE)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = min(base.HICACHE_HOST_MEMORY_RESERVE_BYTES, HOST_MEMORY_RESERVE_BYTES)
    for module in (mha, mla, mamba):
        for copy in _COPIES:
            if not hasattr(module, copy.__name__):
                setattr(module, copy.__name__, copy)
