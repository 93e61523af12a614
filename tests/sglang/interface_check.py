"""What another SGLang release calls, called: run with that release first on PYTHONPATH (`test_versions.py` does).

Prints one JSON object: the release's version and what happened.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import tests.sglang.old_releases  # noqa: F401  lets another release be imported


def main(socket_path: str) -> dict[str, Any]:
    import sglang
    import sglang.srt.managers.scheduler  # as in an engine's process: below 0.5.20 requests are told apart in it
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from hicache_mooncake.backend import HiCacheMooncake

    missing = [
        name
        for name, value in vars(HiCacheStorage).items()
        if callable(value) and not name.startswith("_") and name not in vars(HiCacheMooncake)
    ]
    known = inspect.signature(HiCacheStorageConfig).parameters
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "tiny",
    }  # fmt: skip
    extra = {
        "backend_name": "mooncake",
        "module_path": "hicache_mooncake.backend",
        "class_name": "HiCacheMooncake",
        "interface_v1": 1,
        "socket": socket_path,
    }
    pool = Pool()
    outcomes: dict[str, Any] = {}
    for name in ("dynamic", "mooncake"):
        if name == "mooncake":
            StorageBackendFactory.register_backend("mooncake", "hicache_mooncake.backend", "HiCacheMooncake")
        config = HiCacheStorageConfig(**{k: v for k, v in values.items() if k in known}, extra_config=dict(extra))
        backend = StorageBackendFactory.create_backend(name, config, pool)
        outcomes[name] = exercise(backend, pool, name)
        backend.close()
    return {"version": sglang.__version__, "missing": missing, **outcomes}


class Pool:
    """The least that a host pool has in every release: pages of 4 KiB in one tensor."""

    layout = "page_first"
    page_size = 16
    layer_num = 1

    def __init__(self) -> None:
        import torch

        self.kv_buffer = torch.zeros(16 * 4096, dtype=torch.uint8)
        self.dtype = self.kv_buffer.dtype
        self.size = 16 * self.page_size

    def get_page_buffer_meta(self, slots: Any) -> tuple[list[int], list[int]]:
        pages = [int(slot) // self.page_size for slot in slots[:: self.page_size]]
        return [self.kv_buffer.data_ptr() + page * 4096 for page in pages], [4096] * len(pages)


def exercise(backend: Any, pool: Pool, tag: str) -> list[str]:
    """Every method that any release's controllers call; returns what was wrong."""
    import hashlib

    import torch

    wrong: list[str] = []
    names = [hashlib.sha256(f"{tag}{i}".encode()).hexdigest() for i in range(3)]
    slots = torch.arange(3 * pool.page_size)
    backend.register_mem_pool_host(pool)
    if hasattr(backend, "register_mem_host_pool_v2"):
        backend.register_mem_host_pool_v2(pool, "kv")
    if hasattr(backend, "on_host_pools_registered"):
        backend.on_host_pools_registered()
    for page in range(3):
        pool.kv_buffer[page * 4096 : (page + 1) * 4096] = page + 1
    checks = {
        "set_v1": lambda: backend.batch_set_v1(names, slots) == [True] * 3,
        "exists": lambda: backend.batch_exists(names) == 3 and backend.exists(names[0]),
        "get_v1": lambda: backend.batch_get_v1(names, slots + 8 * pool.page_size) == [True] * 3,
        "bytes": lambda: all(bool((pool.kv_buffer[(8 + p) * 4096 : (9 + p) * 4096] == p + 1).all()) for p in range(3)),
        "generic": lambda: backend.batch_set(names, [torch.full((64,), float(i)) for i in range(3)]),
        "generic get": lambda: float(backend.batch_get(names, [torch.zeros(64) for _ in names])[2][0]) == 2.0,
        "stats": lambda: backend.get_stats() is None,
        "v2": lambda: backend.batch_get_v2([]) == {} and backend.batch_set_v2([]) == {},
        "clear": lambda: backend.clear() is None and backend.batch_exists(names) == 0,
    }
    for name, check in checks.items():
        try:
            if not check():
                wrong.append(name)
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
    return wrong


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
