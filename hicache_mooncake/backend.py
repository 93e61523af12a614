"""`HiCacheMooncake`: SGLang's `HiCacheStorage` over the shared pool.

Source of the interface: `sglang.srt.mem_cache.hicache_storage`. Data calls never raise, return one verdict per key, default
False, and after they return no byte moves in engine memory. Used as `--hicache-storage-backend mooncake` (through the plugin)
or `dynamic` with this module and class.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from hicache_mooncake import __version__, plugin
from hicache_mooncake.client.client import Body, Outcome, PoolClient
from hicache_mooncake.client.geometry import GeometryError, PoolGeometry, of_pool, page_numbers, run_addresses
from hicache_mooncake.client.identity import namespace_of
from hicache_mooncake.client.mover_process import MoverUnavailable
from hicache_mooncake.config import ConfigError, Settings, load_settings
from hicache_mooncake.keys import Namespace, pack_hashes
from hicache_mooncake.protocol import HASH_BYTES, Run, select_hashes

log = logging.getLogger(__name__)

_KV = "kv"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class RegisteredPool:
    """A host pool that can be stored whole: its geometry and the digest that all its pages' identities start with."""

    pool: Any
    geometry: PoolGeometry
    namespace: Namespace
    digest: bytes


class HiCacheMooncake(HiCacheStorage):  # type: ignore[misc]
    """One per rank. Thread-safe: SGLang calls from its query, read and write threads and from the scheduler.

    `storage_config` is SGLang's `HiCacheStorageConfig`; the second argument is the host pool (built-in names) or a dict
    (`dynamic`), and not used: pools come through `register_mem_pool_host`. Raises ConfigError for a configuration that
    cannot work. Without a reachable node everything is a miss, and heals when the node is there.
    """

    def __init__(self, storage_config: Any, mem_pool_host: Any = None, **_kwargs: Any) -> None:
        extra_config = dict(getattr(storage_config, "extra_config", None) or {})
        settings, notices = load_settings(extra_config)
        if plugin.summary:
            log.info("%s", plugin.summary)
        for notice in notices:
            log.warning("%s", notice)
        self._config = storage_config
        self._settings: Settings = settings
        self._pool: RegisteredPool | None = None
        self._refused: dict[str, str] = {}
        self._metrics = StorageFigures(bool(getattr(storage_config, "enable_storage_metrics", False)))
        rank = f"tp{getattr(storage_config, 'tp_rank', 0)}pp{getattr(storage_config, 'pp_rank', 0)}"
        self.client = PoolClient(settings, f"{os.getpid()}:{getattr(storage_config, 'model_name', '')}:{rank}")
        self.client.start()
        if extra_config.get("backend_name") and not extra_config.get("interface_v1"):
            log.warning(
                'the dynamic backend runs without "interface_v1": 1 in its extra config: every page is copied once more and '
                "shared only with engines that run without it too. Add it"
            )

    # ------------------------------------------------------------------ registration

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Share the KV pool's memory. A pool that cannot be stored whole is refused in the log and then never hits."""
        super().register_mem_pool_host(mem_pool_host)
        self._pool = None
        self._refused.pop(_KV, None)
        try:
            geometry = of_pool(mem_pool_host, _KV)
            namespace = namespace_of(self._config, mem_pool_host, geometry, self._settings)
            mode = self.client.share(geometry)
        except GeometryError as error:
            self._refuse(_KV, str(error))
            return
        except MoverUnavailable as error:
            raise ConfigError("copy_mode", "", self._settings.copy_mode, str(error)) from error
        self._pool = RegisteredPool(mem_pool_host, geometry, namespace, namespace.digest())
        log.info(
            "hicache-mooncake %s: pool %s, %d pages of %d bytes in %d runs, copied by %s (%s), namespace %s, "
            "node socket %s (%s), deadline %g s",
            __version__,
            _KV,
            geometry.page_count,
            geometry.body_bytes,
            len(geometry.runs),
            mode,
            self.client.mode_reason,
            self._pool.digest.hex(),
            self._settings.socket,
            self._settings.node,
            self._settings.deadline_s,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """The KV pool again (already known), or a side pool: those are not stored yet, and so nothing with them ever hits."""
        self.registered_pools: dict[Any, Any] = getattr(self, "registered_pools", {})
        self.registered_pools[host_pool_name] = host_pool  # as the base class does where it has this method (0.5.14)
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != _KV:
            self._refuse(name, f"pool {name} ({type(host_pool).__name__}): side pools are not supported by this release")

    def on_host_pools_registered(self) -> None:
        """All pools of the attach are known: say once what will not be cached."""
        if self._refused:
            log.error("L3 is off for this model: %s. Every lookup answers 0", "; ".join(self._refused.values()))

    def _refuse(self, pool: str, reason: str) -> None:
        self._refused[pool] = reason
        log.error("refused: %s", reason)

    def _usable(self) -> RegisteredPool | None:
        """None when some part of this model's pages cannot be stored: then nothing is, and nothing is found."""
        return None if self._refused else self._pool

    # ------------------------------------------------------------------ lookups

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages can be loaded (0..len(keys)). `keys`: 64 hex digits each."""
        return self._guard("exists", 0, lambda: self._exists(keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _exists(self, keys: Sequence[str]) -> int:
        pool = self._usable()
        if pool is None or not keys:
            return 0
        hashes, bad = pack_hashes(keys)
        if bad:
            self.client.miss({"bad_key": len(bad)})
            hashes = hashes[: bad[0] * HASH_BYTES]
        return self.client.exists(pool.digest, hashes)

    # ------------------------------------------------------------------ v1: whole pages, zero copy

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool. `host_indices`: int64 token slots, page_size per key, page-aligned.
        True only for pages that are there whole and verified; the others are left as they were, or hold no page."""
        return self._guard("get", [False] * len(keys), lambda: self._transfer("load", keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages from the host pool. True for pages that the pool now holds (also: already held)."""
        return self._guard("set", [False] * len(keys), lambda: self._transfer("store", keys, host_indices))

    def _transfer(self, op: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self._usable()
        if pool is None or not keys:
            return [False] * len(keys)
        geometry = pool.geometry
        hashes, bad = pack_hashes(keys)
        pages = page_numbers(host_indices, geometry.page_tokens, geometry.page_count, len(keys))
        if pages is None:
            self.client.miss({"bad_indices": len(keys)})
            text = (
                f"{op} of {len(keys)} pages refused: {len(host_indices)} host indices are not as many whole aligned pages "
                f"of {geometry.page_tokens} tokens in a pool of {geometry.page_count} pages"
            )
            self.client.quiet(logging.ERROR, "bad_indices", text)
            return [False] * len(keys)
        addresses: array[int] | None = None
        if not geometry.affine:
            addresses = run_addresses(pool.pool, host_indices, geometry.runs, len(keys))
            if addresses is None:
                self.client.miss({"bad_geometry": len(keys)})
                return [False] * len(keys)
        good: Sequence[int] = range(len(keys))
        if bad:
            self.client.miss({"bad_key": len(bad)})
            good = sorted(set(good).difference(bad))
            hashes = select_hashes(hashes, good)
            runs = len(geometry.runs)
            if addresses is not None:
                addresses = array("q", [addresses[i * runs + r] for i in good for r in range(runs)])
            pages = array("q", [pages[i] for i in good])
        verdict = [False] * len(keys)
        if hashes:
            started = time.perf_counter()
            body = Body(pool.digest, geometry.runs)
            outcome = self.client.transfer(op, body, hashes, None if addresses is not None else pages, addresses)
            self._metrics.add(op, outcome, time.perf_counter() - started)
            for i, ok in zip(good, outcome.ok, strict=True):
                verdict[i] = bool(ok)
        return verdict

    # ------------------------------------------------------------------ v2: side pools

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Models with side pools are not stored by this release, so nothing of theirs can be restored."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        hit = 0 if pool_transfers else self.batch_exists(keys, extra_info)
        result = PoolTransferResult(hit, {})
        if hasattr(result, "restorable_prefix_pages"):
            result.restorable_prefix_pages = list(range(1, hit + 1))
        return result

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers or []}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers or []}

    # ------------------------------------------------------------------ generic: tensors, one more copy

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fill the CPU tensors in `target_locations` and return them, None for each that was not found."""
        if target_locations is None:
            return [None] * len(keys)
        targets = list(target_locations)
        if len(targets) != len(keys):
            return [None] * len(keys)
        ok = self._guard("get", [False] * len(keys), lambda: self._tensors("load", keys, targets))
        return [target if good else None for target, good in zip(targets, ok, strict=True)]

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store one CPU tensor per key. True when all are stored."""
        if values is None or len(values) != len(keys):
            return False
        return all(self._guard("set", [False] * len(keys), lambda: self._tensors("store", keys, list(values))))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return value is not None and self.batch_set([key], [value])

    def _tensors(self, op: str, keys: Sequence[str], tensors: list[Any]) -> list[bool]:
        pool = self._usable()
        verdict = [False] * len(keys)
        if pool is None or not keys:
            return verdict
        hashes, bad = pack_hashes(keys)
        self.client.miss({"bad_key": len(bad)})
        by_size: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if i not in bad and tensor is not None and tensor.device.type == "cpu" and tensor.numel():
                if op == "load" and not tensor.is_contiguous():
                    continue
                by_size.setdefault(tensor.numel() * tensor.element_size(), []).append(i)
        for size, members in by_size.items():
            held = [tensors[i].contiguous() for i in members]  # keeps copies alive for the call
            addresses = array("q", [tensor.data_ptr() for tensor in held])
            body = Body(self._flat_digest(pool, size), (Run(0, 0, size),))
            outcome = self.client.transfer_through_bounce(op, body, select_hashes(hashes, members), addresses)
            for i, ok in zip(members, outcome.ok, strict=True):
                verdict[i] = bool(ok)
        return verdict

    def _flat_digest(self, pool: RegisteredPool, size: int) -> bytes:
        """The generic path's byte order is `get_data_page`'s, not the runs' order: a namespace of its own."""
        flat = dataclasses.replace(
            pool.namespace, storage_format=f"{pool.namespace.storage_format}+data_page", run_bytes=(size,)
        )
        return flat.digest()

    # ------------------------------------------------------------------ the rest

    def clear(self) -> None:
        """Forget this model's pages of this rank, in the whole cluster. Other namespaces stay."""
        pool = self._pool
        if pool is None:
            return
        self._guard("clear", 0, lambda: self.client.clear(pool.digest))
        self._guard("clear", 0, lambda: self.client.clear(self._flat_digest(pool, pool.geometry.body_bytes)))

    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics` since the last call: pages and GB/s of each batch. None when metrics are off."""
        return self._guard("stats", None, self._metrics.drain)

    def close(self) -> None:
        """After this nothing touches engine memory. The node keeps the pages for the next engine."""
        self._guard("close", None, self.client.close)

    def _guard(self, what: str, otherwise: _T, work: Callable[[], _T]) -> _T:
        """Nothing raises into SGLang: in older releases that kills a storage thread, and its peers hang."""
        try:
            return work()
        except Exception:
            self.client.miss({"internal": 1})
            text = f"{what} failed inside hicache-mooncake: answered as a miss. Please report this"
            self.client.quiet(logging.ERROR, f"internal {what}", text, exc_info=True)
            return otherwise


class StorageFigures:
    """Samples for SGLang's metrics, bounded, written by the storage threads and drained by the scheduler."""

    _MAX_SAMPLES = 1024

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._samples: dict[str, list[tuple[int, float | None]]] = {"load": [], "store": []}

    def add(self, op: str, outcome: Outcome, seconds: float) -> None:
        pages = outcome.ok.count(1)
        if not self._enabled or not pages:
            return
        moved = outcome.local_bytes + outcome.remote_bytes
        with self._lock:
            samples = self._samples[op]
            if len(samples) < self._MAX_SAMPLES:
                samples.append((pages, moved / max(seconds, 1e-9) / 1e9 if moved else None))

    def drain(self) -> Any:
        if not self._enabled:
            return None
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:  # before 0.5.10
            from sglang.srt.metrics.collector import StorageMetrics
        with self._lock:
            loads, stores = self._samples["load"], self._samples["store"]
            self._samples = {"load": [], "store": []}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            # Pages that were there already moved no bytes: a bandwidth of 0 would be no measurement.
            prefetch_bandwidth=[rate for _, rate in loads if rate is not None],
            backup_bandwidth=[rate for _, rate in stores if rate is not None],
        )
