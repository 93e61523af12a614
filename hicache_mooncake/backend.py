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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from hicache_mooncake import plugin
from hicache_mooncake.client import engine_facts, isolation, weight_updates
from hicache_mooncake.client.chain import PAGES_A_CALL, Chain
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.pools import KV, Need, StoredPool, View
from hicache_mooncake.client.presence import Presence
from hicache_mooncake.client.promised import promise_seconds
from hicache_mooncake.client.registry import Registry
from hicache_mooncake.client.restorable import ALL_PAGES, TRAILING_PAGES, both, restorable_lengths, trailing_lengths
from hicache_mooncake.client.worth import Worth
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.keys import Namespace, pack_hashes
from hicache_mooncake.protocol import HASH_BYTES, Run, select_hashes

log = logging.getLogger(__name__)

_LONGEST_CALL_S = 6.0
"""Of a store of side pools, the one call that SGLang does not bound to 128 pages: it has those of a whole node."""
_MAX_REMEMBERED = 65_536
_T = TypeVar("_T")


class HiCacheMooncake(HiCacheStorage):  # type: ignore[misc]
    """One per rank. Thread-safe: SGLang calls from its query, read and write threads and from the scheduler.

    `storage_config` is SGLang's `HiCacheStorageConfig`; the second argument is the host pool (built-in names) or a dict
    (`dynamic`), and not used: pools come through `register_mem_pool_host` and `register_mem_host_pool_v2`. Raises ConfigError
    for a configuration that cannot work. Without a reachable node everything is a miss, and heals when the node is there.
    """

    def __init__(self, storage_config: Any, mem_pool_host: Any = None, **_kwargs: Any) -> None:
        extra_config = dict(getattr(storage_config, "extra_config", None) or {})
        settings, notices = load_settings(extra_config)
        if plugin.summary:
            log.info("%s", plugin.summary)
        for notice in notices:
            log.warning("%s", notice)
        self._settings: Settings = settings
        dynamic = bool(extra_config.get("backend_name"))
        self._generic = dynamic and not extra_config.get("interface_v1")
        """SGLang copies pages into tensors of its own and calls `batch_set` and `batch_get`."""
        self._worth = Worth(settings.skip_when_slower)
        self._chains = {"load": Chain(), "store": Chain()}
        self._incomplete: dict[str, None] = {}
        """Keys for which a side pool's page could not be stored: their KV page would restore nothing. Oldest first."""
        self._metrics = StorageFigures(bool(getattr(storage_config, "enable_storage_metrics", False)))
        rank = f"tp{getattr(storage_config, 'tp_rank', 0)}pp{getattr(storage_config, 'pp_rank', 0)}"
        facts = engine_facts.read(storage_config)
        client = f"{os.getpid()}:{getattr(storage_config, 'model_name', '')}:{rank}"
        self.client = PoolClient(settings, client, promise_seconds(settings, facts))
        self.client.start()
        self._pools = Registry(storage_config, settings, self.client, dynamic=dynamic, refusal=isolation.isolate())
        self._presence = Presence(storage_config, settings, facts, self.client.client, self._pools, self._namespaces)
        self._counts = self._presence.counts
        unseen = weight_updates.watch(self._pools)
        if unseen:
            log.warning("%s", unseen)
        if self._generic:
            log.warning(
                'the dynamic backend runs without "interface_v1": 1 in its extra config: every page is copied once more and '
                "shared only with engines that run without it too. Add it"
            )

    # ------------------------------------------------------------------ registration

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Share the anchor's memory: the KV pool, or a logical one whose bytes all lie in side pools. A pool that cannot be
        stored whole is refused in the log, and then nothing ever hits. An attach begins here: earlier side pools are gone."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools.begin(mem_pool_host)
        self._presence.begin(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Share a side pool's memory, also one that comes long after the attach (a draft's). The anchor comes here again."""
        self.registered_pools: dict[Any, Any] = getattr(self, "registered_pools", {})
        self.registered_pools[host_pool_name] = host_pool  # as the base class does where it has this method
        self._presence.in_a_tree = True
        self._pools.register(host_pool, _name(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """All pools of the attach are known: say once how they are used, what will not be cached, and why."""
        self._pools.complete()
        self._guard("summary", None, self._presence.say)

    def _usable(self, keys: Sequence[str]) -> View | None:
        """The pools as they are at the moment; None, and a counted reason, while nothing may be stored or found."""
        view = self._pools.view
        if keys and not view.usable:
            self.client.miss({"l3_off": len(keys)})
        return view if keys and view.usable else None

    # ------------------------------------------------------------------ lookups

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages can be loaded (0..len(keys)). `keys`: 64 hex digits each.

        Of a model with side pools, how many can be restored whole: a decode node promises them to its prefill node, and the
        request fails where a side pool then has less."""
        found = self._guard("exists", 0, lambda: self._exists(keys))
        self._counts.add(lookups=1, asked=len(_nothing(keys)), found=found)
        return found

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _exists(self, keys: Sequence[str]) -> int:
        view = self._usable(keys)
        if view is None:
            return 0
        needs: dict[str, Need] = {}
        for name in view.side_pools:
            need = view.need(name)
            if need is None or (need.policy == TRAILING_PAGES and not need.window):
                text = f"a lookup that names no side pools answers 0 until SGLang has said what a hit needs of pool {name}"
                self.client.quiet(logging.WARNING, f"need {name}", text)
                return 0
            needs[name] = need
        lengths, _ = self._restorable(view, keys, needs)
        return lengths[-1] if lengths else 0

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Which prefixes can be restored whole, as SGLang's `PoolTransferResult`: the longest, all of them, and how far each
        pool's own pages reach (`kv` among them). Pools whose policy is not known here get no verdict."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        if pool_transfers:
            nothing: tuple[list[int], dict[Any, int]] = ([], {})
            lengths, boundaries = self._guard("exists", nothing, lambda: self._exists_v2(keys, pool_transfers))
            self._counts.add(lookups=1, asked=len(_nothing(keys)), found=lengths[-1] if lengths else 0)
        else:
            lengths, boundaries = list(range(1, self.batch_exists(keys, extra_info) + 1)), {}
        result = PoolTransferResult(lengths[-1] if lengths else 0, boundaries)
        if hasattr(result, "restorable_prefix_pages"):  # 0.5.20 and newer
            result.restorable_prefix_pages = lengths
        return result

    def _exists_v2(self, keys: Sequence[str], transfers: Iterable[Any]) -> tuple[list[int], dict[Any, int]]:
        asked = _readable(transfers)
        if len(asked) != len(list(transfers)):
            return [], {}
        needs = _needs(asked)
        self._pools.learn(needs)
        view = self._usable(keys)
        if view is None:
            return [], {}
        lengths, boundaries = self._restorable(view, keys, needs)
        names = {_name(transfer.name): transfer.name for transfer in asked}
        return lengths, {names.get(name, name): boundary for name, boundary in boundaries.items()}

    def _restorable(self, view: View, keys: Sequence[str], needs: Mapping[str, Need]) -> tuple[list[int], dict[str, int]]:
        """(prefix lengths that can be restored, ascending; how far each pool's own pages reach). One message to the node."""
        hashes, bad = pack_hashes(keys)
        count = len(keys)
        if bad:
            self.client.miss({"bad_key": len(bad)})
            count = bad[0]
            hashes = hashes[: count * HASH_BYTES]
        unknown = [name for name in needs if name not in view.pools]
        whole = [KV] if KV in view.pools else []
        whole += [name for name, need in needs.items() if need.policy == ALL_PAGES and name in view.pools]
        trailing = [name for name, need in needs.items() if need.policy == TRAILING_PAGES and name in view.pools]
        leading = [(name, body.namespace) for name in whole for body in self._bodies(view.pools[name])]
        sparse = [(name, body.namespace) for name in trailing for body in self._bodies(view.pools[name])]
        if not count or not (leading or sparse):
            return [], {}
        found = self.client.find([namespace for _, namespace in leading], hashes, [namespace for _, namespace in sparse])
        boundaries = {KV: count}
        for (name, _), run in zip(leading, found.runs, strict=True):
            boundaries[name] = min(run, boundaries.get(name, count), boundaries[KV])
        served: list[list[int]] = []
        for name in trailing:
            column = both([column for (owner, _), column in zip(sparse, found.columns, strict=True) if owner == name])
            lengths = trailing_lengths(column, needs[name].window, boundaries[KV])
            boundaries[name] = lengths[-1] if lengths else 0
            served.append(lengths)
        if unknown:
            text = f"a lookup names pools that were not registered: {', '.join(unknown)}. It answers 0"
            self.client.quiet(logging.ERROR, "unknown pool", text)
            return [], boundaries | dict.fromkeys(unknown, 0)
        runs = [boundaries[name] for name in whole] or [count]
        lengths = restorable_lengths(runs, served)
        if lengths and not self._is_worth(view, whole):
            self.client.miss({"not_worth_it": lengths[-1]})
            return [], dict.fromkeys(boundaries, 0)
        return lengths, boundaries

    def _is_worth(self, view: View, whole: Sequence[str]) -> bool:
        """Whether a page of these pools is loaded sooner than the engine computes its tokens. What a hit needs only at its end
        is as much for a long prefix as for a short one, and does not count."""
        geometries = [view.pools[name].geometry for name in whole]
        tokens = max((geometry.page_tokens for geometry in geometries), default=0)
        return self._worth.is_worth(sum(geometry.body_bytes for geometry in geometries), tokens, time.time())

    # ------------------------------------------------------------------ v1: the KV pool, zero copy

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool. `host_indices`: int64 token slots, page_size per key, page-aligned.
        True only for pages that are there whole and verified; the others are left as they were, or hold no page."""
        ok = self._guard("get", _nothing(keys), lambda: self._transfer_kv("load", keys, host_indices, extra_info))
        self._counts.add(wanted=len(ok), loaded=ok.count(True))
        return ok

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages from the host pool. True for pages that the pool now holds (also: already held)."""
        ok = self._guard("set", _nothing(keys), lambda: self._set_kv(keys, host_indices, extra_info))
        self._counts.add(offered=len(ok), stored=ok.count(True))
        return ok

    def _set_kv(self, keys: Sequence[str], host_indices: Any, extra_info: Any) -> list[bool]:
        if self._incomplete and not self._incomplete.keys().isdisjoint(keys):
            end = next(i for i, key in enumerate(keys) if key in self._incomplete)
            self.client.miss({"incomplete_page": len(keys) - end})
            tokens = len(host_indices) // len(keys)
            stored = self._transfer_kv("store", keys[:end], host_indices[: end * tokens], extra_info) if end else []
            return [*stored, *[False] * (len(keys) - end)]
        return self._transfer_kv("store", keys, host_indices, extra_info)

    def _transfer_kv(self, op: str, keys: Sequence[str], host_indices: Any, extra_info: Any) -> list[bool]:
        view = self._usable(keys)
        if view is None:
            return [False] * len(keys)
        if KV in view.logical:
            return [True] * len(keys)  # no bytes: the side pools' verdicts say what is there
        deadline = time.monotonic() + self._settings.deadline_s
        return self._transfer(op, view.pools[KV], keys, host_indices, deadline, extra_info)

    def _transfer(
        self, op: str, pool: StoredPool, keys: Sequence[str], host_indices: Any, deadline: float, extra_info: Any = None
    ) -> list[bool]:
        geometry = pool.geometry
        verdict = [False] * len(keys)
        places = None if host_indices is None else pool.places(host_indices, len(keys))
        hashes, bad = pack_hashes(keys)
        if places is None:
            self.client.miss({"bad_indices": len(keys)})
            slots = 0 if host_indices is None else len(host_indices)
            text = (
                f"{op} of {len(keys)} pages of pool {geometry.pool} refused: {slots} host indices are not as many whole "
                f"aligned pages of {geometry.page_tokens} tokens in a pool of {geometry.page_count} pages"
            )
            self.client.quiet(logging.ERROR, "bad_indices", text)
            return verdict
        good: Sequence[int] = range(len(keys))
        if bad:
            self.client.miss({"bad_key": len(bad)})
            good = sorted(set(good).difference(bad))
            hashes = select_hashes(hashes, good)
            places = pool.pick(places, list(good))
        if not hashes:
            return verdict
        for i in good:
            verdict[i] = True
        # Side pages are parts of the same logical pages: the KV pool's chain says when they were used.
        chain = self._chains[op] if geometry.pool == KV else None
        continues, ended = (True, b"") if chain is None else chain.begin(hashes, host_indices, _prefix(extra_info))
        chain_namespace = pool.bodies[0].namespace
        self.client.touch(chain_namespace, ended)
        started, here, elsewhere = time.perf_counter(), 0, 0
        for body in pool.bodies:
            outcome = self.client.transfer(op, body, hashes, *places, deadline, touch=not continues)
            here, elsewhere = here + outcome.local_bytes, elsewhere + outcome.remote_bytes
            for i, ok in zip(good, outcome.ok, strict=True):
                verdict[i] = verdict[i] and bool(ok)
        if chain is not None:
            self.client.touch(chain_namespace, chain.finish())
            self._metrics.add(op, verdict.count(True), here + elsewhere, time.perf_counter() - started)
        if op == "load":
            self._worth.loaded(here, elsewhere, time.perf_counter() - started, time.time())
        return verdict

    # ------------------------------------------------------------------ v2: side pools

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of side pools. Per transfer name one verdict a key; each as in `batch_get_v1`."""
        return self._each("get", "load", transfers)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of side pools: those of a whole node, so the deadline grows with them."""
        return self._each("set", "store", transfers)

    def _each(self, what: str, op: str, transfers: Any) -> dict[Any, list[bool]]:
        asked = _readable(transfers)
        if op == "store":  # how long a window is only lookups say
            self._guard(what, None, lambda: self._pools.learn(_needs(asked, windows=False)))
        results: dict[Any, list[bool]] = {}
        deadline_s = self._settings.deadline_s
        if op == "store":
            batches = -(-sum(len(_keys(transfer)) for transfer in asked) // PAGES_A_CALL)
            deadline_s = max(deadline_s, min(_LONGEST_CALL_S, deadline_s * batches))
        deadline = time.monotonic() + deadline_s
        for transfer in asked:
            keys = _keys(transfer)
            nothing = [False] * len(keys)
            results[transfer.name] = self._guard(
                what,
                nothing,
                lambda transfer=transfer, keys=keys: self._transfer_side(op, transfer, keys, deadline),  # type: ignore[misc]
            )
        if op == "store":
            stored = [(_keys(transfer), results[transfer.name]) for transfer in asked if _policy(transfer) == ALL_PAGES]
            self._guard(what, None, lambda: self._remember_incomplete(stored))
        return results

    def _transfer_side(self, op: str, transfer: Any, keys: Sequence[str], deadline: float) -> list[bool]:
        view = self._usable(keys)
        if view is None:
            return [False] * len(keys)
        pool = view.pools.get(_name(transfer.name))
        if pool is None:
            known = _name(transfer.name) in view.logical
            if not known:
                self.client.miss({"unknown_pool": len(keys)})
                text = f"{op} for pool {_name(transfer.name)}, which was not registered"
                self.client.quiet(logging.ERROR, "unknown pool", text)
            return [known] * len(keys)
        return self._transfer(op, pool, keys, transfer.host_indices, deadline)

    def _remember_incomplete(self, stored: Sequence[tuple[Sequence[str], Sequence[bool]]]) -> None:
        """SGLang stores side pools first, and then the KV pages whatever became of them. `stored`: keys and verdicts of each
        pool that has a page for every KV page."""
        for keys, _ in stored:
            for key in keys:
                self._incomplete.pop(key, None)
        for keys, verdicts in stored:
            self._incomplete |= {key: None for key, ok in zip(keys, verdicts, strict=True) if not ok}
        while len(self._incomplete) > _MAX_REMEMBERED:
            self._incomplete.pop(next(iter(self._incomplete)))

    # ------------------------------------------------------------------ generic: tensors, one more copy

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fill the CPU tensors in `target_locations` and return them, None for each that was not found."""
        nothing = [None] * len(_nothing(keys))
        if not isinstance(target_locations, list | tuple) or len(target_locations) != len(nothing):
            return nothing
        targets = list(target_locations)
        ok = self._guard("get", _nothing(keys), lambda: self._tensors("load", keys, targets))
        self._counts.add(wanted=len(ok), loaded=ok.count(True))
        return [target if good else None for target, good in zip(targets, ok, strict=True)]

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store one CPU tensor per key. True when all are stored."""
        if not isinstance(values, list | tuple) or len(values) != len(_nothing(keys)):
            return False
        ok = self._guard("set", _nothing(keys), lambda: self._tensors("store", keys, list(values)))
        self._counts.add(offered=len(ok), stored=ok.count(True))
        return all(ok)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return value is not None and self.batch_set([key], [value])

    def _tensors(self, op: str, keys: Sequence[str], tensors: list[Any]) -> list[bool]:
        verdict = [False] * len(keys)
        view = self._usable(keys)
        if view is None:
            return verdict
        if KV in view.logical:
            return [True] * len(keys)  # no bytes: the side pools' verdicts say what is there
        pool = view.pools[KV]
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
            outcome = self.client.transfer_through_bounce(op, self._flat(pool, size), select_hashes(hashes, members), addresses)
            for i, ok in zip(members, outcome.ok, strict=True):
                verdict[i] = bool(ok)
        return verdict

    def _flat(self, pool: StoredPool, size: int) -> Body:
        """The generic path's byte order is `get_data_page`'s, not the runs' order: a namespace of its own."""
        flat = self._flat_namespace(pool, size)
        return Body(flat.digest(), (Run(0, 0, size),), flat.group())

    def _flat_namespace(self, pool: StoredPool, size: int) -> Namespace:
        return dataclasses.replace(
            pool.namespace, storage_format=f"{pool.namespace.storage_format}+data_page", run_bytes=(size,)
        )

    def _namespaces(self, pool: StoredPool) -> tuple[Namespace, ...]:
        """Those of the objects that a page of this pool is stored as."""
        if self._generic and pool.geometry.pool == KV:
            return (self._flat_namespace(pool, pool.geometry.body_bytes),)
        return pool.parts or (pool.namespace,)

    def _bodies(self, pool: StoredPool) -> tuple[Body, ...]:
        """The objects that a page of this pool was stored as."""
        if self._generic and pool.geometry.pool == KV:
            return (self._flat(pool, pool.geometry.body_bytes),)
        return pool.bodies

    # ------------------------------------------------------------------ the rest

    def clear(self) -> None:
        """Forget this model's pages of this rank, in the whole cluster. Other namespaces stay."""
        for pool in self._pools.view.pools.values():
            bodies = [*pool.bodies, self._flat(pool, pool.geometry.body_bytes)] if pool.geometry.pool == KV else pool.bodies
            for body in bodies:
                self._guard("clear", 0, lambda body=body: self.client.clear(body.namespace))  # type: ignore[misc]

    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics` since the last call: pages and GB/s of each batch. None when metrics are off."""
        return self._guard("stats", None, self._metrics.drain)

    def close(self) -> None:
        """After this nothing touches engine memory. The node keeps the pages for the next engine."""
        self._guard("close", None, self._presence.close)
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


def _nothing(keys: Any) -> list[bool]:
    """The answer to a call that failed: one verdict a key, as far as there are keys."""
    return [False] * (len(keys) if hasattr(keys, "__len__") else 0)


def _prefix(extra_info: Any) -> list[str] | None:
    return getattr(extra_info, "prefix_keys", None)


def _readable(transfers: Any) -> list[Any]:
    """Those of `transfers` that are pool transfers."""
    given = transfers if isinstance(transfers, list | tuple) else []
    return [transfer for transfer in given if hasattr(transfer, "host_indices")]


def _keys(transfer: Any) -> list[str]:
    return list(transfer.keys) if isinstance(transfer.keys, list | tuple) else []


def _name(pool: Any) -> str:
    return str(getattr(pool, "value", pool))


def _policy(transfer: Any) -> str:
    policy = getattr(transfer, "hit_policy", ALL_PAGES)
    return str(getattr(policy, "value", policy))


def _needs(transfers: Iterable[Any], *, windows: bool = True) -> dict[str, Need]:
    """What a hit needs of each pool. A policy that is not known here (BLOCK_GROUPS, for one) does not decide about it."""
    needs: dict[str, Need] = {}
    for transfer in transfers:
        policy = _policy(transfer)
        if policy == ALL_PAGES:
            needs[_name(transfer.name)] = Need(ALL_PAGES)
        elif policy == TRAILING_PAGES and windows:
            needs[_name(transfer.name)] = Need(TRAILING_PAGES, max(1, len(_keys(transfer))))
    return needs


class StorageFigures:
    """Samples for SGLang's metrics, bounded, written by the storage threads and drained by the scheduler."""

    _MAX_SAMPLES = 1024

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._samples: dict[str, list[tuple[int, float | None]]] = {"load": [], "store": []}

    def add(self, op: str, pages: int, moved: int, seconds: float) -> None:
        if not self._enabled or not pages:
            return
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
