"""The peer's side of `make bench`: SGLang's own `file` backend, run by a Python that has SGLang.

Argument: a directory. Lines on stdin and their answers: as in `file_script`. When a put has been answered its pages are on the
disk, and the page cache has none of them any more.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path

import torch
from file_script import pattern, serve
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig


class Pool:
    """Pages in page-aligned tensors, one a page, as SGLang's generic calls hand them over."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "bench")
        self._backend = HiCacheFile(config, str(directory))
        self._batches: deque[list[str]] = deque()
        self._compared: set[int] = set()

    def put(self, page: int, count: int) -> float:
        keys = [os.urandom(32).hex() for _ in range(count)]
        values = [torch.frombuffer(bytearray(pattern(number, page)), dtype=torch.uint8) for number in range(count)]
        started = time.perf_counter()
        done = self._backend.batch_set(keys, values)
        took = time.perf_counter() - started
        if not done:
            raise SystemExit("file: a page was not stored")
        self._batches.append(keys)
        os.sync()
        for key in keys:
            forget(self._directory / f"{self._backend._get_suffixed_key(key)}.bin")
        return took

    def get(self, page: int, count: int) -> float:
        keys, values = self._batches.popleft(), list(torch.zeros(count, page, dtype=torch.uint8))
        started = time.perf_counter()
        got = self._backend.batch_get(keys, values)
        took = time.perf_counter() - started
        if any(each is None for each in got):
            raise SystemExit("file: a page was not there")
        if page not in self._compared:
            self._compared.add(page)
            if any(value.numpy().tobytes() != pattern(number, page) for number, value in enumerate(values)):
                raise SystemExit("file: other bytes came back than were put")
        return took


def forget(path: Path) -> None:
    """The page cache has it no more. It is on the disk already."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def main() -> None:
    serve(Pool(Path(sys.argv[1])))
    os._exit(0)  # its threads are of no use any more


if __name__ == "__main__":
    main()
