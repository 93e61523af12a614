"""The peer's side of `make bench`: LMCache's connector to its server, run by the Python that has LMCache.

Argument: the server's port. Then each line on stdin is `put BYTES COUNT` or `get BYTES COUNT`, answered by a line of JSON: the
seconds that it took. Pages lie in the connector's own pool, page-aligned, as an engine's would. A put has ended when the server
has all of it, which the connector does not wait for: the answer to a question behind it tells. The first get of a size compares
the bytes, outside of the time.
"""

import asyncio
import json
import os
import sys
import time

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

TOKENS = 64
DTYPE = torch.bfloat16


class Pool:
    """Pages in the connector's memory, and in the server's under the same keys at each put, since the server drops nothing."""

    def __init__(self, port: int, loop: asyncio.AbstractEventLoop) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=1.0,
            extra_config={"local_cpu.pinned_align_bytes": 4096},
        )
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, DTYPE, (1, 2, TOKENS, 8, 128), chunk_size=TOKENS)
        self._backend = LocalCPUBackend(config, metadata)
        self._connector = LMCServerConnector("127.0.0.1", port, loop, self._backend)
        self._compared: set[int] = set()

    def _pages(self, page: int, count: int) -> list[MemoryObj]:
        shape = torch.Size([2, 1, TOKENS, page // (2 * TOKENS * DTYPE.itemsize)])
        pages = [self._backend.allocate(shape, DTYPE, MemoryFormat.KV_2LTD) for _ in range(count)]
        for number, each in enumerate(pages):
            if each.data_ptr % 4096 or each.get_size() != page:
                raise SystemExit(f"lmcache: a page of {each.get_size()} bytes at {each.data_ptr:#x} is not what was asked for")
            each.byte_array.cast("B")[:] = pattern(number, page)
        return pages

    async def put(self, page: int, count: int) -> float:
        keys, pages = names(count), self._pages(page, count)
        started = time.perf_counter()
        for key, each in zip(keys, pages, strict=True):
            await self._connector.put(key, each)
        there = await self._connector.exists(keys[-1])
        took = time.perf_counter() - started
        if not there:
            raise SystemExit("lmcache: what was put is not there")
        self._free(pages)
        return took

    async def get(self, page: int, count: int) -> float:
        keys = names(count)
        started = time.perf_counter()
        pages = [await self._connector.get(key) for key in keys]
        took = time.perf_counter() - started
        if any(each is None or each.get_size() != page for each in pages):
            raise SystemExit(f"lmcache: get of {count} x {page} did not bring all")
        if page not in self._compared:
            self._compared.add(page)
            if any(bytes(each.byte_array) != pattern(number, page) for number, each in enumerate(pages)):
                raise SystemExit("lmcache: other bytes came back than were put")
        self._free(pages)
        return took

    @staticmethod
    def _free(pages: list[MemoryObj]) -> None:
        for each in pages:
            each.ref_count_down()


def names(count: int) -> list[CacheEngineKey]:
    return [CacheEngineKey("bench", 1, 0, number, DTYPE) for number in range(count)]


def pattern(number: int, page: int) -> bytes:
    return number.to_bytes(8, "little") * (page // 8)


def main() -> None:
    loop = asyncio.new_event_loop()
    pool = Pool(int(sys.argv[1]), loop)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        op, page, count = line.split()[0], *map(int, line.split()[1:])
        print(json.dumps(loop.run_until_complete(getattr(pool, op)(page, count))), flush=True)
    os._exit(0)  # its threads are of no use any more


if __name__ == "__main__":
    main()
