"""How a rank appears to others: who it is, what it stores, how much it has read and written, and what it says of itself."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from hicache_mooncake import __version__
from hicache_mooncake.client import engine_facts
from hicache_mooncake.client.introduction import Introduction
from hicache_mooncake.client.pools import StoredPool
from hicache_mooncake.client.registry import Registry
from hicache_mooncake.config import Settings
from hicache_mooncake.keys import Namespace
from hicache_mooncake.protocol import PoolIdentity, RankIdentity, Unshared
from hicache_mooncake.sharing import sentence

log = logging.getLogger(__name__)


class PageCounts:
    """Pages of the KV pool since the rank started, by what became of them. Thread-safe.

    `asked` in `lookups`, of which `found`; `wanted` by loads, of which `loaded`; `offered` by stores, of which `stored`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **pages: int) -> None:
        with self._lock:
            self._counts.update(pages)

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Presence:
    """One per backend. `config` is SGLang's `HiCacheStorageConfig`; `namespaces` gives those of the objects that a page of a
    pool is stored as. `in_a_tree` is set where pools are registered as a prefix cache does it, not as a decode offload does."""

    def __init__(
        self,
        config: Any,
        settings: Settings,
        facts: engine_facts.EngineFacts,
        client: str,
        registry: Registry,
        namespaces: Callable[[StoredPool], tuple[Namespace, ...]],
    ) -> None:
        self.counts = PageCounts()
        self.in_a_tree = False
        self._config = config
        self._registry = registry
        self._namespaces = namespaces
        self._facts = facts
        self._anchor: Any = None
        self._unshared: list[Unshared] = []
        self._introduction = Introduction(settings, client, self.identity, self._hear)

    def begin(self, anchor: Any) -> None:
        """An attach begins with this pool."""
        self._anchor, self.in_a_tree = anchor, False
        self._introduction.start()

    def close(self) -> None:
        self._introduction.close()

    def say(self) -> None:
        """Into the log of the engine's first rank: how it uses the pool, and which of its settings are without effect or
        against each other."""
        if not engine_facts.is_first(self._config):
            return
        writer, chain = self._writing()
        page_tokens = int(getattr(self._config, "logical_page_size", None) or getattr(self._anchor, "page_size", 0) or 1)
        given = (self._facts, writer, chain, page_tokens, *engine_facts.pool_tokens(self._anchor))
        log.info("%s", engine_facts.summary(*given))
        for text in engine_facts.contradictions(*given):
            log.warning("%s", text)

    def identity(self) -> RankIdentity:
        """For the node, and by it for the masters: what decides whether another engine finds what this rank stores."""
        view, config, facts = self._registry.view, self._config, self._facts
        writer, chain = self._writing()
        pools = []
        for name, pool in view.pools.items() if view.usable else ():
            parts = self._namespaces(pool)
            pools.append(PoolIdentity(name, [part.digest() for part in parts], parts[0].described()))
        return RankIdentity(
            facts.id,
            facts.label,
            facts.role,
            writer,
            chain,
            (int(getattr(config, "tp_rank", 0)), int(getattr(config, "pp_rank", 0)), int(getattr(config, "attn_cp_rank", 0))),
            (int(getattr(config, "tp_size", 1)), int(getattr(config, "pp_size", 1)), int(getattr(config, "attn_cp_size", 1))),
            pools,
            __version__,
            view.off or "; ".join(view.refused.values()) or ("" if pools else "no pool is registered"),
            facts.flags,
            self.counts.read(),
        )

    def _writing(self) -> tuple[str, str]:
        """(who writes, what page hashes are of)."""
        writer = self._facts.writer(in_a_tree=self.in_a_tree)
        return writer, self._facts.chain(writer, recurrent="mamba" in self._registry.view.pools)

    def _hear(self, unshared: list[Unshared]) -> None:
        """The node's answer, on its own thread: said once for the engine, and again when it changes."""
        before, self._unshared = self._unshared, unshared
        if not engine_facts.is_first(self._config):
            return
        for pair in unshared:
            if pair not in before:
                log.warning("%s", sentence(pair))
        if before and not unshared:
            log.info("the other side and this engine share pages from here on, or it is no longer there")
