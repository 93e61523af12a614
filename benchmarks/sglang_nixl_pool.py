"""The peer's side of `make bench`: SGLang's own `nixl` backend on NIXL's POSIX plugin, run by a Python that has both.

Argument: a directory. Lines on stdin and their answers: as in `file_script`. The calls are those of SGLang's storage interface
(`batch_set_v1`, `batch_get_v1`), for latent pages, each of which is one file; files are read and written past the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from file_script import pattern, serve
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

POOL = 256 << 20


class HostPool:
    """As much of a host pool as the backend asks for: pages of one token, `page` bytes each."""

    layout, page_size, pin_memory = "page_first", 1, False

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, POOL)
        self.kv_buffer = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.page = 0

    def is_stride_page_aligned(self, alignment: int) -> bool:
        return self.kv_buffer.data_ptr() % alignment == 0

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        return [self.kv_buffer.data_ptr() + int(at) * self.page for at in indices], [self.page] * len(indices)


class Pool:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        extra = {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False, "use_direct_io": True}
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, True, False, True, "bench", extra_config=extra)
        self._backend = HiCacheNixl(config, str(directory))
        self._host = HostPool()
        self._backend.register_mem_pool_host(self._host)
        self._batches: deque[list[str]] = deque()
        self._compared: set[int] = set()

    def put(self, page: int, count: int) -> float:
        for number in range(count):
            self._host.memory[number * page : (number + 1) * page] = pattern(number, page)
        self._batches.append([os.urandom(32).hex() for _ in range(count)])
        return self._move(self._backend.batch_set_v1, self._batches[-1], page)

    def get(self, page: int, count: int) -> float:
        ctypes.memset(self._host.kv_buffer.data_ptr(), 1, page * count)
        took = self._move(self._backend.batch_get_v1, self._batches.popleft(), page)
        if page not in self._compared:
            self._compared.add(page)
            if any(self._host.memory[at * page : (at + 1) * page] != pattern(at, page) for at in range(count)):
                raise SystemExit("SGLang's nixl: other bytes came back than were put")
        return took

    def _move(self, call: Any, keys: list[str], page: int) -> float:
        self._host.page = page
        started = time.perf_counter()
        done = call(keys, torch.arange(len(keys)))
        took = time.perf_counter() - started
        if len(done) != len(keys) or not all(done):
            raise SystemExit(f"SGLang's nixl: {sum(map(bool, done))} of {len(keys)} pages were moved")
        return took


def main() -> None:
    serve(Pool(Path(sys.argv[1])))
    os._exit(0)  # its threads are of no use any more


if __name__ == "__main__":
    main()
