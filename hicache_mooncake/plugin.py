"""SGLang plugin (entry point group `sglang.srt.plugins`, sglang >= 0.5.14): the name `mooncake` becomes this backend.

Runs in every SGLang process before the arguments are parsed. `HICACHE_MOONCAKE_PLUGIN=off` leaves everything as it was.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

OFF_VALUES = ("off", "0", "false", "no")
_REUSE_TE = "SGLANG_HICACHE_MOONCAKE_REUSE_TE"
_ALLOCATORS = "sglang.srt.mem_cache.pool_host.common"


summary = ""
"""What `activate` did in this process. The backend logs it too: plugins run before SGLang has set its logging up."""


def activate() -> None:
    """Register the backend, give it a shareable host allocator, and keep SGLang from importing an engine that is not there."""
    if os.environ.get("HICACHE_MOONCAKE_PLUGIN", "").strip().lower() in OFF_VALUES:
        log.info("hicache-mooncake: HICACHE_MOONCAKE_PLUGIN=off, the name mooncake stays SGLang's own backend")
        return
    global summary
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    StorageBackendFactory.register_backend("mooncake", "hicache_mooncake.backend", "HiCacheMooncake")
    done = ["the storage backend name mooncake is hicache_mooncake.backend.HiCacheMooncake"]
    if _hook_allocator():
        done.append("its host pools are memfds")
    else:
        done.append("this SGLang has no memfd host allocator, pages go by process_vm or the shared segment")
    if _register_embeddings():
        done.append("so is its store of multimodal embeddings")
    done += _choose_engine()
    summary = f"hicache-mooncake plugin: {'; '.join(done)}. HICACHE_MOONCAKE_PLUGIN=off undoes it"
    log.info("%s", summary)


def _hook_allocator() -> bool:
    """With the name mooncake SGLang asks for Mooncake's own allocator; its memfd allocator is what the movers can share."""
    try:
        module = importlib.import_module(_ALLOCATORS)
    except ImportError:
        return False
    shm_allocator = getattr(module, "ShmHostTensorAllocator", None)
    if shm_allocator is None or not hasattr(module, "get_allocator_from_storage"):
        return False
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def allocator(original: Callable[[str], Any], allocator_type: str) -> Any:
        return shm_allocator() if allocator_type == "mooncake" else original(allocator_type)

    HookRegistry.register(f"{_ALLOCATORS}.get_allocator_from_storage", allocator, HookType.AROUND)
    return True


def _register_embeddings() -> bool:
    try:
        from sglang.srt.mem_cache.embedding_store import EmbeddingStoreFactory
    except ImportError:  # before 0.5.21
        return False
    EmbeddingStoreFactory.register_backend("mooncake", "hicache_mooncake.embeddings", "HiCacheEmbeddings")
    return True


def _choose_engine() -> list[str]:
    """Whose `mooncake.engine` SGLang imports, and that the pool's engines start none that they do not need: what was done."""
    wanted = _wanted_engine()
    theirs = wanted != "on" and _mooncake_engine_imports()
    ours = wanted == "on" or (wanted == "auto" and not theirs)
    done = []
    if _REUSE_TE not in os.environ and not theirs:
        os.environ[_REUSE_TE] = "0"
        done.append(f"{_REUSE_TE}=0 since the pool uses no mooncake.engine")
    if ours:
        from hicache_mooncake.messenger.install import install

        install()
    whose = "hicache-mooncake's" if ours else "Mooncake's" if theirs else "none, since Mooncake's cannot be imported"
    return [*done, f"the engine of disaggregation by mooncake is {whose} (HICACHE_MOONCAKE_ENGINE={wanted})"]


def _wanted_engine() -> str:
    from hicache_mooncake.config import ConfigError, load_settings

    try:
        return load_settings(explicit={"node": "off"})[0].engine
    except ConfigError as error:
        said = os.environ.get("HICACHE_MOONCAKE_ENGINE", "").strip().lower()
        wanted = said if said in ("on", "off") else "auto"
        log.error("hicache-mooncake: HICACHE_MOONCAKE_ENGINE=%s is taken, since settings cannot be used: %s", wanted, error)
        return wanted


def _mooncake_engine_imports() -> bool:
    try:
        if importlib.util.find_spec("mooncake") is None:
            return False
        importlib.import_module("mooncake.engine")
    except Exception:  # a wheel whose native libraries are missing raises more than ImportError
        return False
    return True
