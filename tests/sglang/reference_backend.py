"""The contract in its simplest form: a backend whose storage is a dict. It passes the whole conformance suite, and with one
rule left out (`Faults`) it must not: that is how the suite itself is tested."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import re
import threading
import zlib
from typing import Any

import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

log = logging.getLogger(__name__)

_PAGE_KEY = re.compile(r"[0-9a-f]{64}\Z")
_SHAPE = (
    "dtype", "layout", "page_size", "layer_num", "start_layer", "head_num", "head_dim", "v_head_dim", "kv_cache_dim",
)  # fmt: skip
_CONFIG = ("model_name", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")
_POLICIES = ("all_pages", "trailing_pages")


@dataclasses.dataclass(frozen=True)
class Faults:
    """Rules that a backend may forget. All False: it keeps the contract."""

    short_list: bool = False
    counts_all_hits: bool = False
    no_checksum: bool = False
    no_length_check: bool = False
    first_part_only: bool = False
    into_next_page: bool = False
    ignores: str = ""
    """A field of the config or of the pool that is not in the identity."""
    mla_by_rank: bool = False
    clear_everything: bool = False
    raises: bool = False
    any_key: bool = False
    any_indices: bool = False
    side_pools_unchecked: bool = False
    """batch_exists looks at the anchor alone."""
    contiguous_lengths: bool = False
    """Reports every length up to the longest as restorable."""
    window_of_one: bool = False
    placeholder_keys: bool = False
    unknown_policy_raises: bool = False
    accepts_broken_pools: bool = False
    pools_share_keys: bool = False
    works_after_close: bool = False
    keeps_stats: bool = False
    late_pools_ignored: bool = False
    logical_anchor_absent: bool = False
    resurrects: bool = False
    clears_anchor_only: bool = False
    writes_the_source: bool = False
    any_head: bool = False
    """Takes whatever is stored under the hash for its own head."""
    late_copy: bool = False
    """Copies a page when it is next asked for instead of when it is stored."""


class Storage:
    """What all backends of one storage share. `up` False: unreachable."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Any, ...], bytes] = {}
        self.checksums: dict[tuple[Any, ...], int] = {}
        self.cleared: dict[tuple[Any, ...], bytes] = {}
        self.lock = threading.Lock()
        self.up = True


class ReferenceBackend(HiCacheStorage):  # type: ignore[misc]
    def __init__(self, config: Any, storage: Storage, faults: Faults = Faults()) -> None:
        self.config, self.storage, self.faults = config, storage, faults
        self.anchor: Any = None
        self.pools: dict[str, Any] = {}
        self.refused: set[str] = set()
        self.burst_over = False
        self.closed = False
        self.stats: list[int] = []
        self.late: dict[tuple[Any, ...], tuple[Any, int]] = {}

    # ------------------------------------------------------------------ registration

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self._register("kv", mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not (self.burst_over and self.faults.late_pools_ignored):
            self._register(str(getattr(host_pool_name, "value", host_pool_name)), host_pool)

    def on_host_pools_registered(self) -> None:
        self.burst_over = True

    def _register(self, name: str, pool: Any) -> None:
        self.pools[name] = pool
        self.refused.discard(name)
        problem = self._problem(pool, name)
        if problem and not self.faults.accepts_broken_pools:
            self.refused.add(name)
            log.error("pool %s refused: %s", name, problem)

    def _problem(self, pool: Any, name: str) -> str | None:
        if pool.size < pool.page_size:
            return "no pages"
        spans = [(b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b in pool.get_hybrid_pool_buffer()]
        sizes = None
        for page in (0, pool.page_num - 1):
            try:
                meta = pool.get_page_buffer_meta(self._slots(pool, page))
            except Exception as error:
                return repr(error)
            if meta is None:
                return None if name == "kv" else "no buffer"
            if not meta[0] or (sizes is not None and sizes != meta[1]):
                return "pages differ"
            sizes = meta[1]
            for at, length in zip(*meta, strict=True):
                if not any(start <= at and at + length <= end for start, end in spans):
                    return "outside its buffers"
        return None

    # ------------------------------------------------------------------ identity

    def object_name(self, pool_name: str, key: str) -> tuple[Any, ...]:
        pool = self.pools[pool_name]
        replicated = self.config.is_mla_model and pool_name != "mamba" and not self.faults.mla_by_rank
        fields = {name: getattr(self.config, name, None) for name in _CONFIG}
        fields |= {name: str(getattr(pool, name, None)) for name in _SHAPE}
        fields |= {"class": type(pool).__name__, "runs": tuple(length for _, length in self._runs(pool, 0))}
        if not replicated:
            fields |= {"tp_rank": self.config.tp_rank, "tp_size": self.config.tp_size}
        fields = {name: value for name, value in fields.items() if name not in self.faults.ignores.split(",")}
        if self.faults.any_head:
            fields = {}
        return (tuple(fields.items()), "" if self.faults.pools_share_keys else pool_name, key)

    # ------------------------------------------------------------------ lookups

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        if not self._usable() or not isinstance(keys, list):
            return 0
        sides = [] if self.faults.side_pools_unchecked else [name for name in self.pools if name != "kv"]
        if self._logical() and not sides:
            return 0
        found = [self._has("kv", key) and all(self._has(side, key) for side in sides) for key in keys]
        if self.faults.counts_all_hits:
            return sum(found)
        return found.index(False) if False in found else len(found)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        result = hicache_storage.PoolTransferResult(0, {})
        if not self._usable() or not isinstance(keys, list):
            return self._restorable(result, [])
        transfers = [] if pool_transfers is None else pool_transfers
        if not isinstance(transfers, list) or any(not hasattr(one, "hit_policy") for one in transfers):
            return self._restorable(result, [])
        kv = [self._has("kv", key) for key in keys]
        prefix = kv.index(False) if False in kv else len(kv)
        lengths = set(range(1, prefix + 1))
        if prefix:
            result.extra_pool_hit_pages[_pool_name("kv")] = prefix
        for transfer in transfers:
            policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
            if policy not in _POLICIES:
                if self.faults.unknown_policy_raises:
                    raise ValueError(policy)
                continue
            name = _name(transfer)
            pages = [name in self.pools and self._has(name, key) for key in keys[:prefix]]
            window = max(1, len(transfer.keys or [])) if policy == "trailing_pages" else None
            if self.faults.window_of_one and window:
                window = 1
            own = {n for n in range(1, prefix + 1) if all(pages[0 if window is None else max(0, n - window) : n])}
            result.extra_pool_hit_pages[transfer.name] = max(own, default=0)
            lengths &= own
        if self._logical() and not transfers:
            lengths = set()
        return self._restorable(result, sorted(lengths))

    def _restorable(self, result: Any, lengths: list[int]) -> Any:
        result.kv_hit_pages = max(lengths, default=0)
        if hasattr(result, "restorable_prefix_pages"):
            result.restorable_prefix_pages = lengths
            if self.faults.contiguous_lengths:
                result.restorable_prefix_pages = list(range(1, result.kv_hit_pages + 1))
        return result

    def _has(self, pool: str, key: Any) -> bool:
        if not self._key(key):
            return False
        if pool == "kv" and self._logical():
            return not self.faults.logical_anchor_absent
        with self.storage.lock:
            return self.object_name(pool, key) in self.storage.objects

    # ------------------------------------------------------------------ pages

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move("kv", keys, host_indices, self._load)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move("kv", keys, host_indices, self._store)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._each(transfers, self._load)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._each(transfers, self._store)

    def _each(self, transfers: Any, work: Any) -> dict[Any, list[bool]]:
        if not isinstance(transfers, list):
            return {}
        known = [one for one in transfers if hasattr(one, "host_indices")]
        return {one.name: self._move(_name(one), one.keys, one.host_indices, work) for one in known}

    def _move(self, pool_name: str, keys: Any, indices: Any, work: Any) -> list[bool]:
        if self.faults.raises and work == self._load and not all(self._has(pool_name, key) for key in keys):
            raise KeyError(keys)
        if not isinstance(keys, list):
            return []
        pool = self.pools.get(pool_name)
        if pool is None or not self._usable():
            return [False] * len(keys)
        pages = self._pages(pool, indices, len(keys))
        if pages is None:
            return [False] * len(keys)
        if pool_name == "kv" and self._logical():
            return [self._key(key) for key in keys]
        verdict = [self._key(key) and work(pool_name, pool, key, page) for key, page in zip(keys, pages, strict=True)]
        self.stats.append(sum(verdict))
        return verdict[:-1] if self.faults.short_list and len(keys) > 1 else verdict

    def _store(self, pool_name: str, pool: Any, key: str, page: int) -> bool:
        content = b"".join(ctypes.string_at(address, length) for address, length in self._runs(pool, page))
        name = self.object_name(pool_name, key)
        with self.storage.lock:
            content = self.storage.cleared.get(name, content) if self.faults.resurrects else content
            if name not in self.storage.objects or self._damaged(name, len(content)):
                self.storage.objects[name] = content
                self.storage.checksums[name] = zlib.crc32(content)
                self.late[name] = (pool, page)
        if self.faults.writes_the_source:
            address, length = self._runs(pool, page)[-1]
            ctypes.memset(address, 0, length)
        return True

    def _load(self, pool_name: str, pool: Any, key: str, page: int) -> bool:
        name = self.object_name(pool_name, key)
        runs = self._runs(pool, page + 1 if self.faults.into_next_page and page + 1 < pool.page_num else page)
        with self.storage.lock:
            content = self.storage.objects.get(name)
            if self.faults.late_copy and name in self.late:
                source = self._runs(*self.late.pop(name))
                content = b"".join(ctypes.string_at(address, length) for address, length in source)
                self.storage.objects[name], self.storage.checksums[name] = content, zlib.crc32(content)
            if content is None or self._damaged(name, sum(length for _, length in runs)):
                return False
        for address, length in runs[:1] if self.faults.first_part_only else runs:
            ctypes.memmove(address, content[:length], min(length, len(content)))
            content = content[length:]
        return True

    def _damaged(self, name: tuple[Any, ...], length: int) -> bool:
        content = self.storage.objects[name]
        wrong_length = len(content) != length and not self.faults.no_length_check
        return wrong_length or (
            zlib.crc32(content) != self.storage.checksums[name]
            and not self.faults.no_checksum
            and not (self.faults.no_length_check and len(content) != length)
        )

    # ------------------------------------------------------------------ arguments

    def _usable(self) -> bool:
        open_ = not self.closed or self.faults.works_after_close
        return bool(self.pools) and not self.refused and open_ and self.storage.up

    def _logical(self) -> bool:
        return getattr(self.pools.get("kv"), "kv_buffer", None) is None

    def _key(self, key: Any) -> bool:
        if key == "__placeholder__":
            return self.faults.placeholder_keys
        return isinstance(key, str) and (self.faults.any_key or _PAGE_KEY.match(key) is not None)

    def _pages(self, pool: Any, indices: Any, count: int) -> list[int] | None:
        size = pool.logical_page_size
        if not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64 or indices.dim() != 1:
            return None
        slots = indices.tolist()
        firsts = slots[::size]
        if self.faults.any_indices:
            return [max(0, min(slot // size, pool.page_num - 1)) for slot in firsts][:count] if len(firsts) >= count else None
        whole = [slot for first in firsts for slot in range(first, first + size)]
        if slots != whole or len(firsts) != count or any(f % size or not 0 <= f // size < pool.page_num for f in firsts):
            return None
        return [first // size for first in firsts]

    def _slots(self, pool: Any, page: int) -> Any:
        return torch.arange(page * pool.logical_page_size, (page + 1) * pool.logical_page_size)

    def _runs(self, pool: Any, page: int) -> list[tuple[int, int]]:
        meta = pool.get_page_buffer_meta(self._slots(pool, page))
        return [] if meta is None else list(zip(*meta, strict=True))

    # ------------------------------------------------------------------ the rest

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        if not self._usable():
            return
        with self.storage.lock:
            pools = ["kv"] if self.faults.clears_anchor_only else list(self.pools)
            ours = {self.object_name(pool, "")[:2] for pool in pools}
            for name in list(self.storage.objects):
                if name[:2] in ours or self.faults.clear_everything:
                    self.storage.cleared[name] = self.storage.objects.pop(name)

    def get_stats(self) -> Any:
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:
            from sglang.srt.metrics.collector import StorageMetrics
        pages = list(self.stats)
        if not self.faults.keeps_stats:
            self.stats.clear()
        return StorageMetrics(prefetch_pgs=pages, backup_pgs=[], prefetch_bandwidth=[], backup_bandwidth=[])

    def close(self) -> None:
        self.closed = True


def _name(transfer: Any) -> str:
    return str(getattr(transfer.name, "value", transfer.name))


def _pool_name(name: str) -> Any:
    return hicache_storage.PoolName(name)
