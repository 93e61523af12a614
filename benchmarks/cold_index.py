"""What the index of a cold tier costs: `python -m benchmarks.cold_index DIR [--pages 1000000] [--batch 512]`.

Fills the index of a tier in DIR with pages of 16 KiB, at least 65,536, and prints what a page takes of the file and of the
process's own memory, what a batch costs to be found and to be put, how long it takes to open, to be checked after a crash, to
tell all of it to a master and to empty a segment: CPU time of the thread and wall time, which has the disk in it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from hicache_mooncake.cold.directory import INDEX, PAGES, own_path
from hicache_mooncake.cold.health import walk
from hicache_mooncake.cold.index import Index, Place, map_bytes_for
from hicache_mooncake.cold.layout import SEGMENT_BYTES, Segment
from hicache_mooncake.cold.tier import ColdTier
from hicache_mooncake.protocol import HASH_BYTES

NAMESPACE = b"n" * 16
PAGE_BYTES = 16 << 10
SEGMENT_PAGES = SEGMENT_BYTES // PAGE_BYTES


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
    directory, pages, batch = options.directory / "cold-index", options.pages, options.batch
    capacity, path = -(-pages // SEGMENT_PAGES) * SEGMENT_BYTES, own_path(directory) / INDEX
    shutil.rmtree(directory, ignore_errors=True)
    path.mkdir(mode=0o700, parents=True)
    dice = random.Random(0)
    index = Index(path, map_bytes_for(capacity))
    for name, value in (("capacity", capacity), ("segment bytes", SEGMENT_BYTES)):
        index.set_number(name, value)
    before = own_bytes()
    number, some, put = index.id_of(NAMESPACE), [], []
    for first in range(0, pages, batch):
        segment = Segment(first // SEGMENT_PAGES, 1 + first // SEGMENT_PAGES, SEGMENT_BYTES)
        hashes = [dice.randbytes(32) for _ in range(min(batch, pages - first))]
        records = [(number, each, Place(PAGE_BYTES * (first + at), segment.filling, 1, 7, 7)) for at, each in enumerate(hashes)]
        put.append(timed(lambda s=segment, r=records: index.put(s, r)))  # type: ignore[misc]
        if not some or first // batch % max(1, pages // batch // 200) == 0:
            some.append(hashes[:128])
    own, live, size = own_bytes() - before, index.live_bytes, index.file_bytes
    file = f"{live / pages:.0f} bytes of the file a page, {size / pages:.0f} with what is free in it"
    print(f"{index.pages():,} pages: {file}; {own / pages:.1f} of the process's own memory")
    show(f"put {batch} pages, synced", put)
    show("find 128 pages", [timed(lambda h=each: index.find(NAMESPACE, h)) for each in some])  # type: ignore[misc]
    index.close()
    show("tell all to a master, a part", told(directory, capacity, pages))
    opened: list[Index] = []
    show("open", [timed(lambda: opened.append(Index(path, map_bytes_for(capacity))))])
    index = opened.pop()
    show(f"empty a segment of {SEGMENT_PAGES:,}, a part", emptied(index))
    index.close()
    show("check after a crash", [timed(lambda: walk(path))])
    shutil.rmtree(directory)


def told(directory: Path, capacity: int, pages: int) -> list[tuple[float, float]]:
    """What a tier's node reads for a master, a part at a time: its heartbeats go between two parts."""
    with (own_path(directory) / PAGES).open("wb") as file:
        os.truncate(file.fileno(), capacity)  # sparse
    tier = ColdTier(directory, capacity, floor_bytes=0)
    parts, times, keys = tier.snapshot_parts(), [], 0
    part: list[list[tuple[bytes, bytes]]] = [[]]
    while part:
        part.clear()
        times.append(timed(lambda: part.extend(itertools.islice(parts, 1))))
        keys += sum(len(blob) for each in part for _, blob in each) // HASH_BYTES
    tier.close()
    if keys != pages:
        raise RuntimeError(f"{keys:,} of {pages:,} pages were told")
    cpu, wall = (sum(each[at] for each in times) / pages * 1e3 for at in (0, 1))
    print(f"told to a master: {cpu:.2f} us of CPU a page, {wall:.2f} us")
    return times


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
