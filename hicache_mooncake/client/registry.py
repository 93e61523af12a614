"""Registration of a rank's host pools, and what becomes of their namespaces when the engine changes its weights.

Holds the current `View`. Writers take the lock and swap it; data calls read it once and work on what they read.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any

from hicache_mooncake import __version__
from hicache_mooncake.client import heads, weight_updates, weights
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.geometry import GeometryError, NoBuffer, PoolGeometry, of_pool
from hicache_mooncake.client.identity import Weights, namespace_of, shared_by_ranks
from hicache_mooncake.client.mover_process import MoverUnavailable
from hicache_mooncake.client.pools import KV, Need, StoredPool, View
from hicache_mooncake.config import ConfigError, Settings
from hicache_mooncake.keys import Namespace

log = logging.getLogger(__name__)


class Registry:
    """`config` is SGLang's `HiCacheStorageConfig`; `dynamic`: SGLang knows the backend by another name than mooncake;
    `refusal`: why this engine's requests cannot be told apart, "" if they can."""

    def __init__(self, config: Any, settings: Settings, client: PoolClient, *, dynamic: bool, refusal: str = "") -> None:
        self.view = View()
        self._config = config
        self._settings = settings
        self._client = client
        self._dynamic = dynamic
        self._refusal = refusal
        self._lock = threading.Lock()
        self._registered: dict[str, Any] = {}
        self._weights = Weights(settings.model_id or weights.of_engine(), settings.weight_version)
        self._next_weights: Weights | None = None
        """After an update of the weights, until the caches are flushed."""
        self._flushed = False

    # ------------------------------------------------------------------ pools

    def begin(self, anchor: Any) -> None:
        """A new attach: this is the KV pool, and there is no other yet. Raises ConfigError for a forced copy_mode that does not
        work here, and when nothing names the model."""
        with self._lock:
            self._registered.clear()
            refused = {"every pool": self._refusal} if self._refusal else {}
            self.view = View(refused=refused, needs=self.view.needs, off=self.view.off)
            self._register(anchor, KV)

    def register(self, host_pool: Any, name: str) -> None:
        """A pool of this attach, at any time. The anchor may come again."""
        with self._lock:
            if self._registered.get(name) is not host_pool:
                self._register(host_pool, name)

    def complete(self) -> None:
        """Say what will not be cached."""
        view = self.view
        if view.off:
            log.warning("L3 is off for now: %s", view.off)
        if view.refused:
            log.error("L3 is off for this model: %s. Every lookup answers 0", "; ".join(view.refused.values()))
        elif KV in view.logical and not view.pools:
            log.error(
                "L3 is off for this model: its KV pool has no bytes and no side pool came with it. Every lookup answers 0"
            )

    def learn(self, needs: Mapping[str, Need]) -> None:
        """Remember what SGLang says a hit needs of its side pools."""
        known = self.view.needs
        # A short prompt names fewer pages than the window has.
        longest = {
            name: Need(need.policy, max(need.window, known[name].window))
            if name in known and known[name].policy == need.policy
            else need
            for name, need in needs.items()
        }
        if all(known.get(name) == need for name, need in longest.items()):
            return
        if self._lock.acquire(blocking=False):  # a registration may take its time, and the next lookup says it again
            try:
                self.view = dataclasses.replace(self.view, needs={**self.view.needs, **longest})
            finally:
                self._lock.release()

    def _register(self, host_pool: Any, name: str) -> None:
        """Whatever the pool was before, it is this one or a refused one afterwards, and refused until it is known."""
        before = self.view
        rest = dataclasses.replace(
            before,
            pools={key: pool for key, pool in before.pools.items() if key != name},
            logical=before.logical - {name},
            refused={key: reason for key, reason in before.refused.items() if key != name},
        )
        self.view = dataclasses.replace(rest, refused={**rest.refused, name: f"pool {name} is being registered"})
        self._registered[name] = host_pool
        try:
            geometry = of_pool(host_pool, name)
            self._check_writers(host_pool, name)
            stored = self._stored(host_pool, geometry)
            mode = self._client.share(geometry)
        except NoBuffer:
            log.info("hicache-mooncake %s: pool %s is logical, the model's bytes are in its side pools", __version__, name)
            self.view = dataclasses.replace(rest, logical=rest.logical | {name})
            return
        except GeometryError as error:
            log.error("refused: %s", error)
            self.view = dataclasses.replace(rest, refused={**rest.refused, name: str(error)})
            return
        except MoverUnavailable as error:
            raise ConfigError("copy_mode", "", self._settings.copy_mode, str(error)) from error
        except ConfigError:
            raise
        except Exception as error:  # out of descriptors, or a defect of ours: a late pool is registered in the scheduler's loop
            log.exception("pool %s cannot be shared", name)
            self.view = dataclasses.replace(rest, refused={**rest.refused, name: f"pool {name} cannot be shared: {error!r}"})
            return
        self.view = dataclasses.replace(rest, pools={**rest.pools, name: stored})
        log.info(
            "hicache-mooncake %s: pool %s (%s), %d pages of %d bytes in %d runs and %d objects, copied by %s (%s), "
            "namespace %s, node socket %s (%s), deadline %g s",
            __version__,
            name,
            type(host_pool).__name__,
            geometry.page_count,
            geometry.body_bytes,
            len(geometry.runs),
            len(stored.bodies),
            mode,
            self._client.mode_reason,
            stored.bodies[0].namespace.hex(),
            self._settings.socket,
            self._settings.node,
            self._settings.deadline_s,
        )

    def _check_writers(self, host_pool: Any, name: str) -> None:
        """Beside replicated KV, SGLang lets the ranks above 0 store their parts of Mamba states, and of a draft with heads if
        the backend is called `mooncake`. Of any other sharded pool those parts never come, and nothing would ever hit."""
        sharded = bool(getattr(self._config, "is_mla_model", False)) and not shared_by_ranks(self._config, host_pool, name)
        if not sharded or int(getattr(self._config, "tp_size", 1)) == 1 or name == "mamba":
            return
        if name not in ("draft", "draft_swa"):
            raise GeometryError(
                f"pool {name} ({type(host_pool).__name__}): its ranks are not known to hold the same bytes, and SGLang stores "
                "those of rank 0 alone beside replicated KV"
            )
        if self._dynamic:
            raise GeometryError(
                f"pool {name} ({type(host_pool).__name__}): SGLang does not store the heads of ranks above 0 of this draft "
                "for a dynamic backend. Use --hicache-storage-backend mooncake with this package's plugin"
            )

    def _stored(self, host_pool: Any, geometry: PoolGeometry) -> StoredPool:
        namespace = namespace_of(self._config, host_pool, geometry, self._settings, self._weights)
        shared = namespace.tp_rank is None and int(getattr(self._config, "tp_size", 1)) > 1
        heads_of = self._head_bodies(host_pool, geometry, namespace) if geometry.pool == KV and not shared else []
        if heads_of:
            return StoredPool(
                host_pool, geometry, namespace, tuple(body for _, body in heads_of), tuple(part for part, _ in heads_of)
            )
        whole = Body(namespace.digest(), geometry.runs, namespace.group(), shared)
        return StoredPool(host_pool, geometry, namespace, (whole,))

    def _head_bodies(self, host_pool: Any, geometry: PoolGeometry, namespace: Namespace) -> list[tuple[Namespace, Body]]:
        """The page's KV heads as objects of their own, where they are to be shared with other tensor-parallel sizes; else none.

        SGLang's own way to that, for page_head pools, is `tp_lcm_size`; it says that the ranks' heads are consecutive."""
        if namespace.tp_rank is None or namespace.tp_size is None:
            return []
        lcm = getattr(self._config, "tp_lcm_size", None)
        native = bool(lcm) and namespace.layout == "page_head"
        if not self._settings.share_across_tp and not native:
            return []
        total = self._settings.kv_heads or heads.total_kv_heads(host_pool, namespace.tp_size)
        if total is None and native:
            total = int(namespace.heads or 0) * namespace.tp_size
        if total is None:
            log.error(
                "share_across_tp: it is not certain which of the model's KV heads this rank holds, so its pages are shared "
                "with engines of tp_size %d alone. If every attention layer spreads its KV heads over the ranks in order, say "
                "how many there are in all with kv_heads",
                namespace.tp_size,
            )
            return []
        held = heads.heads_of_rank(total, namespace.tp_rank, namespace.tp_size)
        if len(held) != namespace.heads:
            raise GeometryError(
                f"pool {geometry.pool}: {total} KV heads over {namespace.tp_size} ranks are {len(held)} a rank, but its pool "
                f"has {namespace.heads}. Correct kv_heads"
            )
        each = heads.heads_per_object(total, lcm)
        bodies = []
        for first, runs in zip(held[::each], heads.head_runs(host_pool, geometry, each), strict=True):
            part = dataclasses.replace(
                namespace,
                layout=heads.BYTE_ORDER,
                heads=each,
                run_bytes=tuple(run.length for run in runs),
                head_range=(first, first + each, total),
                tp_rank=None,
                tp_size=None,
            )
            bodies.append((part, Body(part.digest(), runs, part.group())))
        return bodies

    # ------------------------------------------------------------------ weights (a `weight_updates.Listener`)

    def weights_changing(self) -> None:
        """The engine is about to change its weights. From here to the flush of its caches, what L1 and L2 hold is of the old
        weights, and what is asked for may be of the new ones: nothing is stored and nothing is found."""
        with self._lock:
            self._next_weights, self._flushed = None, False
            self.view = dataclasses.replace(self.view, off="the weights are being updated")

    def weights_changed(self, version: str | None, model_path: str | None, ok: bool) -> None:
        """The update is over. `version`: SGLang's `weight_version` of the request; `model_path`: where they came from."""
        loaded = weights.of_engine(model_path) if ok and model_path else ""
        with self._lock:
            if not self.view.off:
                return
            if not ok or not (version or model_path):
                what = "failed" if not ok else "named no weight_version"
                self._off(
                    f"an update of the weights {what}, so pages could not be told apart from those of other weights",
                    'Update again with "weight_version" in the request, or restart the engine',
                )
                return
            if model_path:
                operators = self._settings.model_id
                self._next_weights = Weights(operators or loaded, f"{loaded if operators else ''} {version or ''}".strip())
            elif self._settings.share_weight_versions:
                # One version may come in several parts: what lies between two of them is neither.
                self._next_weights = Weights(self._weights.model_id, f"{version} part {weight_updates.change_mark()[1]}")
            elif any(body.shared for pool in self.view.pools.values() for body in pool.bodies):
                self._off(
                    "the weights were updated from memory, and this model's ranks share pages, which they could only if its "
                    "versions never came again",
                    "Set share_weight_versions if that is so, or update from files",
                )
                return
            else:
                # A trainer counts 1, 2, 3, and so did the one before it: the version alone does not name the weights.
                self._next_weights = Weights(self._weights.model_id, f"{version} {weight_updates.change_mark()[0]}")
            self._adopt_weights()
            if not self._flushed:
                log.warning(
                    "L3 is off until SGLang has flushed its caches, which hold pages of the old weights: POST /flush_cache"
                )

    def _off(self, reason: str, advice: str) -> None:
        self._next_weights = None
        self.view = dataclasses.replace(self.view, off=reason)
        log.error("L3 is off: %s. %s", reason, advice)

    def caches_flushed(self) -> None:
        """L1 and L2 are empty and no operation from before can come any more."""
        with self._lock:
            self._flushed = True
            self._adopt_weights()

    def _adopt_weights(self) -> None:
        """Once the new weights are named and the caches empty: pages are of the new weights from here on."""
        if self._next_weights is None or not self._flushed:
            return
        self._weights, self._next_weights = self._next_weights, None
        pools = {name: self._stored(pool.pool, pool.geometry) for name, pool in self.view.pools.items()}
        self.view = dataclasses.replace(self.view, pools=pools, off="")
        log.info("the weights were updated: pages are stored and found as of version %r", self._weights.version)
