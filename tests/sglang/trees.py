"""SGLang's own tree with HiCache, and the pool as its L3, whole and on the CPU: device pool, host pool, controller and threads.

Nothing here imitates SGLang. A `Tree` is what a scheduler has, and a test does by hand what the scheduler does once a step.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.disaggregation.decode_hicache_mixin import (
    DecodeHiCachePreallocMixin,
    DecodeHiCacheTransferMixin,
    DecodePrefixMatch,
    HiCacheRestoreResult,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import base, common, mha
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

from hicache_mooncake.testing.local import pattern
from hicache_mooncake.testing.sglang_cpu.shims import sglang_cpu_hicache
from tests.conftest import START_S, NodeProcess, wait_until

PAGE = 16
LAYERS = 2
ONE_RANK = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_rank": 0, "attn_dcp_size": 1}
Prompt = tuple[int, ...]


def prompt(seed: int, pages: int) -> Prompt:
    """Whole pages, none of which another seed's has."""
    return tuple(seed * 100_003 + i for i in range(pages * PAGE))


def request(name: str, ids: Sequence[int]) -> Req:
    return Req(name, "", array("q", ids), SamplingParams(max_new_tokens=1))


@contextlib.contextmanager
def configured(
    node: NodeProcess | str,
    extra: dict[str, Any] | None = None,
    parallel: dict[str, int] | None = None,
    **server_args: Any,
) -> Iterator[None]:
    """SGLang's configuration, of an engine with HiCache and this node (or its socket)."""
    backend = {
        "backend_name": "mooncake",
        "module_path": "hicache_mooncake.backend",
        "class_name": "HiCacheMooncake",
        "interface_v1": 1,
        "allocator": "shm",
        "socket": node if isinstance(node, str) else node.socket,
        "prefetch_threshold": PAGE,
    }
    fields = {
        "page_size": PAGE,
        "served_model_name": "tiny",
        "enable_hierarchical_cache": True,
        "hicache_ratio": 3.0,
        "hicache_size": 0,
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(backend | (extra or {})),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(**(fields | server_args)))
        stack.enter_context(get_parallel().override(**(ONE_RANK | (parallel or {}))))
        stack.enter_context(mock.patch.object(common, "_cuda_host_register"))
        stack.enter_context(base.host_memory_budget_scope(2 << 30))
        for copy in sglang_cpu_hicache._COPIES:
            stack.enter_context(mock.patch.object(mha, copy.__name__, copy, create=True))
        yield


class Pools:
    """An engine's L1, in pages."""

    def __init__(self, pages: int) -> None:
        self.kv = MHATokenToKVPool(
            size=pages * PAGE,
            page_size=PAGE,
            layer_num=LAYERS,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=64,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, torch.bfloat16, "cpu", self.kv, False)
        self.rows = ReqToTokenPool(8, 4096, "cpu", False)

    def write(self, slots: torch.Tensor, ids: Sequence[int]) -> None:
        """What a model would compute: here each token's bytes name it and those before it in its page."""
        for layer, buffer in self._buffers():
            for at in range(0, len(ids), PAGE):
                content = _content(layer, ids[at : at + PAGE], buffer[0].numel() * buffer.element_size() * PAGE)
                rows = torch.frombuffer(bytearray(content), dtype=buffer.dtype).view(PAGE, *buffer.shape[1:])
                buffer[slots[at : at + PAGE]] = rows[: len(slots[at : at + PAGE])]

    def holds(self, slots: torch.Tensor, ids: Sequence[int]) -> bool:
        assert len(slots) == len(ids)
        for layer, buffer in self._buffers():
            for at in range(0, len(ids), PAGE):
                content = _content(layer, ids[at : at + PAGE], buffer[0].numel() * buffer.element_size() * PAGE)
                if buffer[slots[at : at + PAGE]].contiguous().view(torch.uint8).numpy().tobytes() != content:
                    return False
        return True

    def _buffers(self) -> list[tuple[int, Any]]:
        return list(enumerate([*self.kv.k_buffer, *self.kv.v_buffer]))


def _content(layer: int, ids: Sequence[int], size: int) -> bytes:
    return pattern(repr((layer, tuple(ids))).encode(), size)


class Tree:
    """One engine's L1 and L2 in front of the pool. Made within `configured`."""

    def __init__(self, device_pages: int = 16, **params: Any) -> None:
        self.pools = Pools(device_pages)
        init = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pools.rows,
            token_to_kv_pool_allocator=self.pools.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            **params,
        )
        self.tree = UnifiedRadixCache(init)
        self.tree.init_hicache(SimpleNamespace(file_storage_path=None), init)
        self.controller = self.tree.cache_controller
        self.backend = self.controller.storage_backend
        self.l2 = self.controller.mem_pool_host

    def close(self) -> None:
        self.tree.shutdown()
        self.backend.close()
        self.l2.destroy()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Scheduler steps until it is so."""
        wait_until(lambda: (self.tree.check_hicache_events(), condition())[1], START_S, what)

    def match(self, ids: Sequence[int]) -> Any:
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids))))

    def compute(self, ids: Sequence[int]) -> None:
        """A prompt that nobody has is prefilled, and done."""
        self.make_room(len(ids))
        slots = self.pools.allocator.alloc(len(ids))
        assert slots is not None
        self.pools.write(slots, ids)
        self.tree.insert(InsertParams(key=RadixKey(array("q", ids)), value=slots))

    def make_room(self, tokens: int) -> None:
        missing = tokens - self.pools.allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))

    def idle(self) -> bool:
        return not (self.tree.ongoing_write_through or self.tree.ongoing_backup or self.controller.write_queue)

    def compute_and_write(self, ids: Sequence[int]) -> None:
        self.compute(ids)
        self.until(self.idle, "all is written that will be")

    def forget(self) -> None:
        """Nothing is left in L1 and L2. Only when nothing is on its way."""
        assert self.idle()
        self.tree.evict(EvictParams(num_tokens=self.pools.kv.size))
        self.tree.evict_host(self.l2.size)
        assert self.l2.available_size() == self.l2.size

    def start_prefetch(self, req: Req) -> None:
        """As the scheduler of a prefill server does before a request is computed."""
        found = match_kv_cache(req, self.tree, req.origin_input_ids)
        known, last = found.device_prefix_len + found.host_hit_length, found.last_host_node
        self.tree.prefetch_from_storage(
            req.cache_request_handle,
            last,
            req.origin_input_ids[known:],
            self.tree.get_last_hash_value(last),
            matched_prefix_tokens=req.origin_input_ids[:known],
        )

    def prefetch(self, req: Req) -> int:
        """All of it. Returns the tokens that came from L3."""
        self.start_prefetch(req)
        self.until(lambda: self.tree.check_prefetch_progress(req.cache_request_handle), "the prefetch is over")
        return int(self.tree.pop_prefetch_loaded_tokens(req.cache_request_handle))

    def load(self, ids: Sequence[int]) -> bool:
        """Bring these tokens from L2 into L1. Are their bytes what was computed?"""
        req = request("load", ids)
        found = match_kv_cache(req, self.tree, req.origin_input_ids)
        self.tree.init_load_back(
            InitLoadBackParams(best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=req)
        )
        self.tree.ready_to_load_host_cache()
        found = match_kv_cache(req, self.tree, req.origin_input_ids)
        return found.device_prefix_len == len(ids) and self.pools.holds(self.tree.prefix_device_indices(req), ids)


class DecodeSide(DecodeHiCachePreallocMixin, DecodeHiCacheTransferMixin):  # type: ignore[misc]
    """SGLang's decode server between a request's arrival and its first token, as far as its tree is concerned."""

    def __init__(self, tree: Tree) -> None:
        self.whole = tree
        self.tree_cache = tree.tree
        self.scheduler = SimpleNamespace(enable_decode_hicache=True)

    def look_up(self, req: Req) -> DecodePrefixMatch:
        found = match_kv_cache(req, self.tree_cache, req.origin_input_ids)
        req.lock = self.tree_cache.lock(found.last_device_node)
        return self._build_decode_prefix_match(req, found)

    def promise(self, req: Req) -> DecodePrefixMatch:
        """What the prefill server is told: it sends only the rest."""
        match = self.look_up(req)
        self._start_hicache_prefetch(req, match)
        return match

    def restore(self, req: Req, match: DecodePrefixMatch) -> Any:
        """Load what was promised. Returns the request with its outcome."""
        decoding = SimpleNamespace(
            req=req,
            prefix_match=match,
            hicache_restored_kv_indices=None,
            hicache_restore_lock=None,
            hicache_load_consumer_index=-1,
            hicache_restore_status=HiCacheRestoreResult.PENDING,
        )

        def over() -> bool:
            self._process_hicache_local_restores([decoding])
            return decoding.hicache_restore_status != HiCacheRestoreResult.PENDING

        self.whole.until(over, "the restore has ended")
        return decoding


MakeTree = Callable[..., Tree]
