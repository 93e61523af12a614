"""The peer's side of `make bench`: NIXL's POSIX backend, run by a Python that has NIXL.

Argument: a directory. Lines on stdin and their answers: as in `file_script`. Files are used as SGLang's `nixl` backend does
with `use_direct_io`: one a page, registered by its path for each transfer and read past the page cache, straight into memory
that is registered once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections import deque
from itertools import count as numbers
from pathlib import Path

from file_script import pattern, serve
from nixl._api import nixl_agent, nixl_agent_config

POOL = 256 << 20


class Pool:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._memory = mmap.mmap(-1, POOL)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._address, 1, POOL)
        self._agent = nixl_agent("bench", nixl_agent_config(backends=["POSIX"]))
        self._agent.register_memory([(self._address, POOL, 0, "")], "DRAM")
        self._batches: deque[list[Path]] = deque()
        self._numbers = numbers(1)
        self._compared: set[int] = set()

    def put(self, page: int, count: int) -> float:
        paths = [self._directory / os.urandom(32).hex() for _ in range(count)]
        for number in range(count):
            self._memory[number * page : (number + 1) * page] = pattern(number, page)
        took = self._move("WRITE", "rw,create,direct", page, paths)
        self._batches.append(paths)
        return took

    def get(self, page: int, count: int) -> float:
        ctypes.memset(self._address, 1, page * count)
        took = self._move("READ", "ro,direct", page, self._batches.popleft())
        if page not in self._compared:
            self._compared.add(page)
            if any(self._memory[at * page : (at + 1) * page] != pattern(at, page) for at in range(count)):
                raise SystemExit("nixl: other bytes came back than were put")
        return took

    def _move(self, op: str, how: str, page: int, paths: list[Path]) -> float:
        started = time.perf_counter()
        here = [(self._address + at * page, page, 0) for at in range(len(paths))]
        files = self._agent.register_memory([(0, page, next(self._numbers), f"{how}:{path}") for path in paths], "FILE")
        descriptors = self._agent.get_xfer_descs(here, "DRAM")
        handle = self._agent.initialize_xfer(op, descriptors, files.trim(), "bench")
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.0001)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        self._agent.deregister_memory(files)
        took = time.perf_counter() - started
        if state != "DONE":
            raise SystemExit(f"nixl: {op} answered {state}")
        return took


def main() -> None:
    serve(Pool(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
