"""Keeps requests with a LoRA adapter, an extra key or a cache salt out of L3 where SGLang's page hashes know nothing of them.

From 0.5.20 on SGLang seeds a request's hash chain with its extra key (which ends in the adapter's id) and its salt. Before, the
chain is of tokens alone: pages of two adapters, or of two tenants, have one key. In such a release `isolate` wraps the
methods that know whose pages they handle:

* a tree's `write_backup_storage` (the node's key says whose it is) and the decode offload's `offload_kv_cache`, on the way in;
* the scheduler's `_prefetch_kvcache` and the decode side's prefix match, on the way out. The tree's own methods do not know:
  where nothing matched locally they start at the root, which belongs to everybody.

Below them nothing reaches L3 on its own account: a write or a look-up that none of these methods vouches for is left empty.
All of it runs on the scheduler's thread. Requests of the base model without a key are served as ever.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from hicache_mooncake.client.hooks import Hooks, engine_setting, loaded, quietly, subclasses

log = logging.getLogger(__name__)

_SEED = ("sglang.srt.mem_cache.utils", "storage_namespace_seed")
_TREE = ("sglang.srt.mem_cache.base_prefix_cache", "BasePrefixCache")
_CONTROLLER = ("sglang.srt.managers.cache_controller", "HiCacheController")
_SCHEDULER = ("sglang.srt.managers.scheduler", "Scheduler")
_DECODE_OFFLOAD = ("sglang.srt.disaggregation.decode_kvcache_offload_manager", "DecodeKVCacheOffloadManager")
_DECODE_MATCH = ("sglang.srt.disaggregation.decode_hicache_mixin", "DecodeHiCachePreallocMixin")


def isolate() -> str:
    """Make sure that no request ever finds pages of another adapter or tenant. Call it when a backend is built, on the
    scheduler's thread; more than once does no harm.

    Returns "" when that holds: by SGLang's own hashes, or by wrappers that are on now. Otherwise a sentence on why it cannot
    be done in this release: then the backend must not store anything. Never raises.
    """
    with contextlib.suppress(ImportError):
        if hasattr(importlib.import_module(_SEED[0]), _SEED[1]):
            return ""
    return _isolation.put()


def undo() -> None:
    """Every method as SGLang has it: for tests."""
    _isolation.hooks.take_off()


class _Isolation:
    def __init__(self) -> None:
        self.hooks = Hooks()
        self._vouched = threading.local()

    def put(self) -> str:
        scheduler, controller, tree = loaded(*_SCHEDULER), loaded(*_CONTROLLER), loaded(*_TREE)
        if scheduler is None or controller is None or tree is None:
            return _refusal("its scheduler is not in this process")
        if engine_setting("memory", "hicache_host_memory_mode") == "buffer_only":
            return _refusal("with host memory as a buffer only it writes past its tree")
        missing: list[str] = []

        def put(owner: Any, name: str, around: Any, *, needed: bool = True) -> None:
            if not self.hooks.put(owner, name, around) and needed:
                missing.append(f"{owner.__name__}.{name}")

        put(scheduler, "_prefetch_kvcache", self._around_request)
        put(controller, "write_storage", self._around_write_storage)
        for derived in subclasses(controller)[1:]:
            put(derived, "write_storage", self._around_write_storage, needed=False)
        trees = [each for each in subclasses(tree) if hasattr(each, "prefetch_from_storage")]
        for each in trees:
            put(each, "prefetch_from_storage", self._around_prefetch, needed=False)
            put(each, "query_storage_hit_length", self._around_query, needed=False)
            put(each, "write_backup_storage", self._around_write_backup, needed=False)
        if trees and not any(hasattr(each, "write_backup_storage") for each in trees):
            missing.append("write_backup_storage of a tree")
        decode, match = loaded(*_DECODE_OFFLOAD), loaded(*_DECODE_MATCH)
        if decode is not None:
            put(decode, "offload_kv_cache", self._around_offload)
            put(decode, "_trigger_backup", self._around_request)
        if match is not None:
            put(match, "_build_decode_prefix_match", self._around_request)
            put(match, "_start_hicache_prefetch", self._around_request)
        if missing:
            return _refusal(f"it has no {', '.join(missing)}")
        return ""

    # ------------------------------------------------------------------ who vouches

    def _around_request(self, original: Any, owner: Any, *arguments: Any, **keywords: Any) -> Any:
        """A method whose first argument is the request: what it does below counts as done for that request."""
        request = arguments[0] if arguments else keywords.get("req")
        with self._vouch(not _namespaced(request)):
            return original(owner, *arguments, **keywords)

    def _around_write_backup(self, original: Any, tree: Any, *arguments: Any, **keywords: Any) -> Any:
        node = arguments[0] if arguments else keywords.get("node", keywords.get("node_id"))
        if quietly("whose node it is", _plain_node, tree, node) is not True:
            return None
        with self._vouch(True):
            return original(tree, *arguments, **keywords)

    def _around_offload(self, original: Any, manager: Any, *arguments: Any, **keywords: Any) -> Any:
        request = arguments[0] if arguments else keywords.get("req")
        if _namespaced(request):
            return False  # as when there is nothing to offload: the caller then frees the request's pages itself
        return original(manager, *arguments, **keywords)

    # ------------------------------------------------------------------ what needs it

    def _around_prefetch(self, original: Any, tree: Any, *arguments: Any, **keywords: Any) -> Any:
        return original(tree, *arguments, **keywords) if self._is_vouched() else None

    def _around_query(self, original: Any, tree: Any, *arguments: Any, **keywords: Any) -> Any:
        return original(tree, *arguments, **keywords) if self._is_vouched() else 0

    def _around_write_storage(self, original: Any, controller: Any, *arguments: Any, **keywords: Any) -> Any:
        """Unvouched: the operation is queued and answered as ever, so that its host pages are freed, but names no page."""
        tokens = arguments[1] if len(arguments) > 1 else keywords.get("token_ids")
        if not self._is_vouched() and not (hasattr(tokens, "extra_key") and not _namespaced(tokens)):
            positional = list(arguments)
            for place, name, nothing in ((2, "hash_value", []), (4, "extra_pools", None)):
                if place < len(positional):
                    positional[place] = nothing
                elif name in keywords or name == "hash_value":
                    keywords[name] = nothing
            arguments = tuple(positional)
        return original(controller, *arguments, **keywords)

    @contextlib.contextmanager
    def _vouch(self, plain: bool) -> Iterator[None]:
        before = self._is_vouched()
        self._vouched.value = plain
        try:
            yield
        finally:
            self._vouched.value = before

    def _is_vouched(self) -> bool:
        return getattr(self._vouched, "value", False) is True


def _namespaced(thing: Any) -> bool:
    """Does this request, or this key of a node, belong to an adapter, a tenant or a class of requests?"""
    return thing is None or any(getattr(thing, name, None) is not None for name in ("extra_key", "cache_salt", "lora_id"))


def _plain_node(tree: Any, node: Any) -> bool:
    """Is it the base model's, and nobody's in particular? Trees hand out nodes, newer ones numbers of nodes."""
    if isinstance(node, int):
        return all(part is None for part in tree.tree_core.prefetch_anchor_info(node))
    return not _namespaced(node.key)


def _refusal(why: str) -> str:
    return (
        "this SGLang gives pages of different LoRA adapters, extra keys and cache salts the same hash, and they cannot be kept "
        f"apart: {why}. Use SGLang 0.5.20 or newer"
    )


_isolation = _Isolation()
