"""What the index of a cold tier costs: `python -m benchmarks.cold_index DIR [--pages 1000000] [--batch 512]`.

Fills an index in DIR with pages of one block, and prints what a page takes of the file and of the process's own memory, what a
batch costs to be found and to be put, how long it takes to open, to be checked after a crash, to tell all of it to a master and
to empty a segment: CPU time of the thread and wall time, which has the disk in it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from hicache_mooncake.cold.health import walk
from hicache_mooncake.cold.index import Index, Place
from hicache_mooncake.cold.layout import BLOCK, Segment

NAMESPACE = b"n" * 16
SEGMENT_PAGES = 65_536


def own_bytes() -> int:
    """Resident, without what is mapped from files."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of this thread's CPU, and of the clock."""
    cpu, wall = time.thread_time(), time.perf_counter()
    call()
    return (time.thread_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3


def show(name: str, times: list[tuple[float, float]]) -> None:
    cpu, wall = (sorted(each[at] for each in times) for at in (0, 1))
    print(f"{name:<36} p50 {median(cpu):9.3f} ms CPU, {median(wall):9.3f} ms; longest {cpu[-1]:9.3f}, {wall[-1]:9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=512, help="pages written together")
    options = parser.parse_args()
    path, pages, batch = options.directory / "cold-index", options.pages, options.batch
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    dice = random.Random(0)
    index = Index(path, 4096 * pages)
    before = own_bytes()
    number, some, put = index.id_of(NAMESPACE), [], []
    for first in range(0, pages, batch):
        segment = Segment(first // SEGMENT_PAGES, 1 + first // SEGMENT_PAGES, BLOCK * SEGMENT_PAGES)
        hashes = [dice.randbytes(32) for _ in range(min(batch, pages - first))]
        records = [(number, each, Place(BLOCK * (first + at), segment.filling, 1, 7, 7)) for at, each in enumerate(hashes)]
        put.append(timed(lambda s=segment, r=records: index.put(s, r)))  # type: ignore[misc]
        if not some or first // batch % max(1, pages // batch // 200) == 0:
            some.append(hashes[:128])
    own, live, size = own_bytes() - before, index.live_bytes, index.file_bytes
    file = f"{live / pages:.0f} bytes of the file a page, {size / pages:.0f} with what is free in it"
    print(f"{index.pages():,} pages: {file}; {own / pages:.1f} of the process's own memory")
    show(f"put {batch} pages, synced", put)
    show("find 128 pages", [timed(lambda h=each: index.find(NAMESPACE, h)) for each in some])  # type: ignore[misc]
    index.close()
    opened: list[Index] = []
    show("open", [timed(lambda: opened.append(Index(path, 4096 * pages)))])
    index = opened.pop()
    show("tell all to a master", [timed(lambda: sum(len(part) for part in index.entries()))])
    show(f"empty a segment of {SEGMENT_PAGES:,}, a part", emptied(index))
    index.close()
    show("check after a crash", [timed(lambda: walk(path))])
    shutil.rmtree(path)


def emptied(index: Index) -> list[tuple[float, float]]:
    """Each part holds the tier's lock."""
    segment, last, times = index.segments()[0], False, []
    while not last:
        done: list[bool] = []
        times.append(timed(lambda d=done: d.append(index.empty(segment)[1])))  # type: ignore[misc]
        last = done[0]
    return times


if __name__ == "__main__":
    main()
