"""What of a request with an adapter, a key or a salt gets to L3 in a release whose hashes do not know them, and of one without.

Run with that release first on PYTHONPATH (`test_isolation.py` does). Trees, scheduler, controller and decode side are the
release's own methods on stand-ins for what they hold. Prints one JSON object: whose request → pages or operations by path.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import sys
import types
from array import array
from typing import Any

import torch

from tests.sglang.weight_updates_check import import_release

PAGE = 16
TOKENS = list(range(2 * PAGE))
REQUESTS = {
    "nobody's": {},
    "an adapter's": {"extra_key": "loraA", "lora_id": "loraA"},
    "a tenant's": {"extra_key": "saltT1"},
    "an empty key's": {"extra_key": ""},
}


def optional(module: str, name: str) -> Any:
    with contextlib.suppress(ModuleNotFoundError):
        return getattr(importlib.import_module(module), name, None)
    return None


class Bench:
    """One tree of the release over a bare controller."""

    def __init__(self, sg: Any, tree_class: Any, radix: Any) -> None:
        self.sg, self.radix = sg, radix
        host = types.SimpleNamespace(
            alloc=lambda count: torch.arange(count), free=lambda indices: None, get_dummy_flat_data_page=lambda: torch.empty(0)
        )
        controller = sg.Controller.__new__(sg.Controller) if tree_class is not None else object.__new__(sg.BaseController)
        controller.backup_queue, controller.prefetch_queue = queue.Queue(), queue.Queue()
        controller.mem_pool_host, controller.prefetch_tokens_occupied = host, 0
        controller.prefetch_rate_limited = lambda: False
        places = ("hicache_storage", "utils", "radix_cache")
        hashes = (optional(f"sglang.srt.mem_cache.{place}", "get_hash_str") for place in places)
        controller.get_hash_str = next(found for found in hashes if found is not None)
        controller._storage_hit_query = lambda operation: (["h"] * 2, len(TOKENS))
        controller.write = lambda **_: torch.arange(PAGE)
        self.controller = controller
        if tree_class is None:
            return
        self.root = self.node({}, [])
        tree = self.tree = tree_class.__new__(tree_class)
        tree.cache_controller, tree.page_size, tree.is_eagle, tree.root_node = controller, PAGE, False, self.root
        tree.prefetch_threshold, tree.enable_storage, tree.hicache_storage_pass_prefix_keys = PAGE, True, False
        tree.ongoing_backup, tree.ongoing_prefetch, tree._components_tuple = {}, {}, ()
        tree._get_extra_pools = dict
        tree._build_sidecar_transfers = lambda *_: []
        tree._all_reduce_attn_groups = lambda *_: None
        tree.inc_host_lock_ref = lambda node: types.SimpleNamespace(to_dec_params=lambda: None)
        tree.mamba_archive_transfers = lambda node: None
        tree.mamba_prefetch_alloc = lambda *_: []
        tree.mamba_host_lru_list = types.SimpleNamespace(in_list=lambda node: False)
        tree._alloc_with_evict = lambda pool, count, evict: torch.arange(count)
        tree._protect_host_node = lambda *_, **__: None
        tree.evict_host = lambda count: 0

    def node(self, whose: dict[str, str], tokens: list[int]) -> Any:
        data = types.SimpleNamespace(host_value=torch.arange(len(tokens)), value=None)
        return types.SimpleNamespace(
            key=self.radix(array("q", tokens), extra_key=whose.get("extra_key")),
            hash_value=["h"] * (len(tokens) // PAGE),
            host_value=data.host_value,
            component_data=[data] * 8,
            backuped=True,
            parent=None,
            protect_host=lambda: None,
            protect_host_mamba=lambda: None,
            get_last_hash_value=lambda: None,
            get_prefix_hash_values=lambda parent: [],
        )

    def request(self, whose: dict[str, str]) -> Any:
        root = getattr(self, "root", None)
        return types.SimpleNamespace(
            rid="r", extra_key=whose.get("extra_key"), lora_id=whose.get("lora_id"), prefix_indices=[], host_hit_length=0,
            last_node=root, last_host_node=root, fill_ids=TOKENS, full_untruncated_fill_ids=TOKENS, origin_input_ids=TOKENS,
            output_ids=list(range(PAGE + 1)), req_pool_idx=0, init_next_round_input=lambda tree, **_: None,
            _compute_max_prefix_len=lambda count: count, finished=lambda: False,
        )  # fmt: skip

    def queued_pages(self) -> int:
        pages = 0
        while not self.controller.backup_queue.empty():
            pages += len(self.controller.backup_queue.get().hash_value)
        return pages

    def write(self, whose: dict[str, str]) -> int:
        self.tree.write_backup_storage(self.node(whose, TOKENS))
        assert len(self.tree.ongoing_backup) == self.controller.backup_queue.qsize()
        self.tree.ongoing_backup.clear()
        return self.queued_pages()

    def prefetch_from_root(self, whose: dict[str, str]) -> int:
        scheduler = self.sg.Scheduler.__new__(self.sg.Scheduler)
        scheduler.enable_hicache_storage, scheduler.tree_cache = True, self.tree
        scheduler._prefetch_kvcache(self.request(whose))
        return self.prefetches()

    def prefetches(self) -> int:
        count = len(self.tree.ongoing_prefetch)
        assert count == self.controller.prefetch_queue.qsize()
        self.tree.ongoing_prefetch.clear()
        self.controller.prefetch_queue.queue.clear()
        return count

    def decode_match(self, match_class: Any, whose: dict[str, str]) -> list[int]:
        """What a decode node with a tree of its own finds, and then fetches."""
        side = type("Queue", (match_class,), {})()
        side.scheduler, side.tree_cache = types.SimpleNamespace(enable_decode_hicache=True), self.tree
        result = types.SimpleNamespace(
            device_indices=[], host_hit_length=0, last_host_node=self.root, last_device_node=self.root
        )
        found = side._build_decode_prefix_match(self.request(whose), result)
        tokens = found.l3_storage_hit_length
        found.l3_storage_hit_length, found.last_host_node = len(TOKENS), self.root  # as if something had been found
        side._start_hicache_prefetch(self.request(whose), found)
        return [tokens, self.prefetches()]

    def decode_offload(self, whose: dict[str, str]) -> list[int]:
        """Copies to the host that are started, and pages that a finished copy queues for L3."""
        manager = self.sg.Decode.__new__(self.sg.Decode)
        manager.cache_controller, manager.page_size, manager.offload_stride = self.controller, PAGE, PAGE
        manager.decode_host_mem_pool = manager.tree_cache = object()
        manager.req_to_token_pool = types.SimpleNamespace(req_to_token={0: torch.arange(4 * PAGE)})
        manager.token_to_kv_pool_allocator = types.SimpleNamespace(free=lambda indices: None)
        manager.request_counter, manager.ongoing_offload, manager.ongoing_backup = 0, {}, {}
        manager.offloaded_state, manager.offload_inflight = {}, {}
        request = self.request(whose)
        started = bool(manager.offload_kv_cache(request))
        assert started == len(manager.ongoing_offload)
        manager._trigger_backup(
            request, torch.arange(PAGE), TOKENS[:PAGE], 0.0, None if hasattr(manager, "_mark_offload_started") else 0
        )
        return [int(started), self.queued_pages()]


def main() -> dict[str, Any]:
    sg = import_release()
    cache = "sglang.srt.mem_cache"
    trees = {
        name: found
        for module, name in (
            ("hiradix_cache", "HiRadixCache"),
            ("hi_mamba_radix_cache", "HiMambaRadixCache"),
            ("unified_radix_cache", "UnifiedRadixCache"),
        )
        if (found := optional(f"{cache}.{module}", name)) is not None
    }
    radix = importlib.import_module(f"{cache}.radix_cache").RadixKey
    match = optional("sglang.srt.disaggregation.decode_hicache_mixin", "DecodeHiCachePreallocMixin")

    def exercise() -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for whose, fields in REQUESTS.items():
            paths: dict[str, Any] = {}
            for name, tree_class in trees.items():
                bench = Bench(sg, tree_class, radix)
                paths[f"{name} write"] = bench.write(fields)
                paths[f"{name} prefetch"] = bench.prefetch_from_root(fields)
                if match is not None and hasattr(tree_class, "query_storage_hit_length"):
                    paths[f"{name} decode"] = bench.decode_match(match, fields)
            paths["decode offload"] = Bench(sg, None, radix).decode_offload(fields)
            seen[whose] = paths
        return seen

    from hicache_mooncake.client import isolation

    before = exercise()
    refusal = isolation.isolate()
    during = exercise()
    bench = Bench(sg, next(iter(trees.values())), radix)
    bench.controller.write_storage(torch.arange(PAGE), TOKENS[:PAGE], hash_value=["h"])
    operations = bench.controller.backup_queue.qsize()
    unvouched = [operations, bench.queued_pages()]
    bench.tree.prefetch_from_storage("r", bench.root, TOKENS)
    unvouched.append(bench.prefetches())
    isolation.undo()
    after = exercise()
    del sg.Scheduler._prefetch_kvcache
    without = isolation.isolate()
    isolation.undo()
    import sglang

    states = {"before": before, "during": during, "after": after}
    return {"version": sglang.__version__, "refusal": refusal, "unvouched": unvouched, "without": without, **states}


if __name__ == "__main__":
    result = main()
    sys.stdout.write(json.dumps(result) + "\n")
