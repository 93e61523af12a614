"""What the peers' sides of `make bench` share that need no package: pages, and the lines that they are asked by.

Each line on stdin is `put BYTES COUNT` or `get BYTES COUNT`, answered by a line of JSON: the seconds that it took. A put has
new keys and ends when the other side has all of it; what was put before is dropped first, outside of the time. The first get
of a size compares the bytes, outside of the time too.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence

POOL = 512 << 20


class Pages:
    """Page-aligned memory, as an engine's pool is."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, POOL, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        self._compared: set[int] = set()
        self._filled = 0

    def views(self, page: int, count: int) -> list[memoryview]:
        whole = memoryview(self._memory)
        return [whole[at * page : (at + 1) * page] for at in range(count)]

    def fill(self, page: int, count: int) -> None:
        """Once for each size that comes after another one."""
        if self._filled != page:
            for number, view in enumerate(self.views(page, count)):
                view[:] = pattern(number, page)
            self._filled = page

    def compare(self, page: int, count: int) -> None:
        if page in self._compared:
            return
        self._compared.add(page)
        if any(view != pattern(number, page) for number, view in enumerate(self.views(page, count))):
            raise SystemExit("other bytes came back than were put")

    def forget(self, page: int, count: int) -> None:
        """Before the first get of a size, so that what is compared has come with it."""
        if page not in self._compared:
            for view in self.views(page, count):
                view[:] = bytes(page)


def pattern(number: int, page: int) -> bytes:
    return (number + 1).to_bytes(8, "little") * (page // 8)


def serve(
    put: Callable[[Sequence[str], Sequence[memoryview]], None],
    get: Callable[[Sequence[str], Sequence[memoryview]], None],
    drop: Callable[[], None],
) -> None:
    pages, keys = Pages(), []
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        op, page, count = line.split()[0], *map(int, line.split()[1:])
        views = pages.views(page, count)
        if op == "put":
            drop()
            keys = [os.urandom(32).hex() for _ in range(count)]
            pages.fill(page, count)
        else:
            pages.forget(page, count)
        started = time.perf_counter()
        (put if op == "put" else get)(keys, views)
        took = time.perf_counter() - started
        if op == "get":
            pages.compare(page, count)
        print(json.dumps(took), flush=True)
