"""`python -m benchmarks.where`: where each microsecond of a page goes, in the mover and in the node that sends.

A mover is run in this process, for a real node and over a real network, with and without Python's profiler. The profiler makes
calls of Python dearer than they are: read its shares, and the times without it.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from array import array

from rich.console import Console
from rich.table import Table

from benchmarks.cpu import used
from benchmarks.harness import Memory, machine, pool, write_between
from benchmarks.ranks import BATCH, KIB, POOL_BYTES, Rank, size_text
from hicache_mooncake import protocol as p
from hicache_mooncake.client.mover import Mover
from hicache_mooncake.client.node_link import NodeLink
from hicache_mooncake.config import Settings
from hicache_mooncake.transfer.memory import MappedMemory

_SHOWN = 12


class Inside:
    """A mover in this process, over the memory of a rank."""

    def __init__(self, settings: Settings, memory: Memory, op: str) -> None:
        region = p.Region(memory.address, memory.length, 0)
        self._op = op
        self._link = NodeLink(settings.socket, op, "where")
        self._mover = Mover(MappedMemory([region], [memory.fd]), self._link, os.getpid())

    def run(self, namespace: bytes, hashes: bytes, runs: list[p.Run]) -> None:
        count = len(hashes) // p.HASH_BYTES
        job = p.Transfer(self._op, namespace, hashes, runs, array("q", range(count)).tobytes(), 7.0)
        done = self._mover.run(job)
        self._mover.settle()
        if done.ok.count(1) != count:
            raise RuntimeError(f"{self._op} of {count} pages: {done.reasons}")

    def close(self) -> None:
        self._mover.close()
        self._link.drop()


def taken(profile: cProfile.Profile, pages: int) -> list[tuple[str, float, float]]:
    """(function, calls a page, microseconds a page within it) of the dearest ones."""
    entries = sorted(pstats.Stats(profile).stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
    return [
        (name if file == "~" else f"{os.path.basename(file)} {name}", calls / pages, inside / pages * 1e6)
        for (file, _, name), (_, calls, inside, _, _) in entries[:_SHOWN]
    ]


def show(console: Console, title: str, rows: list[tuple[str, float, float]]) -> None:
    table = Table(title=title)
    for column in ("function", "calls a page", "us a page, profiled"):
        table.add_column(column, justify="left" if column == "function" else "right")
    for function, calls, inside in rows:
        table.add_row(function, f"{calls:.2f}", f"{inside:.2f}")
    console.print(table)


def text(title: str, rows: list[tuple[str, float, float]]) -> list[str]:
    """The same for docs/performance.md."""
    lines = [
        "",
        f"{title[0].upper()}{title[1:]}",
        "",
        "| function | calls a page | us a page, profiled |",
        "| --- | --- | --- |",
    ]
    return lines + [f"| `{function}` | {calls:.2f} | {inside:.2f} |" for function, calls, inside in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=int, default=64, help="KiB")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--cpu", action="store_true", help="profile CPU time and not waits: on a busy machine")
    parser.add_argument("--docs", action="store_true", help="write it into docs/performance.md")
    options = parser.parse_args()
    page, batches = options.page * KIB, options.batches
    count = min(BATCH, POOL_BYTES // page)
    console = Console(width=132)
    written = [f"{machine()}:"]
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    with pool(nodes=2, extra=("--replicate-after", "0")) as (near, far):
        writer, reader = Rank(far, source), Rank(near, target)
        report = writer.client.status()
        assert report is not None
        node = int(report.node["pid"])
        namespace, hashes = os.urandom(16), os.urandom(p.HASH_BYTES * count)
        writer.move("store", namespace, hashes, page)
        reader.wait_for(namespace, hashes)
        ways = (
            ("store by shm", far, source, "store"),
            ("load by shm", far, source, "load"),
            ("load by tcp", near, target, "load"),
        )
        for name, settings, memory, op in ways:
            inside = Inside(settings, memory, op)
            runs = (reader if memory is target else writer).halves(page)

            def work(inside: Inside = inside, runs: list[p.Run] = runs, op: str = op) -> None:
                for _ in range(batches):
                    key = os.urandom(16) if op == "store" else namespace
                    inside.run(key, hashes, runs)
                    if op == "store":
                        writer.client.clear(key)

            work()
            pages = batches * count
            wall, cpu, theirs = time.perf_counter(), time.thread_time(), used(node)
            work()
            facts = {
                "wall": (time.perf_counter() - wall) / pages * 1e6,
                "CPU of the mover": (time.thread_time() - cpu) / pages * 1e6,
                "CPU of the node": (used(node) - theirs) / pages * 1e6,
            }
            profile = cProfile.Profile(time.thread_time) if options.cpu else cProfile.Profile()
            profile.runcall(work)
            title = f"{name}, {count} x {size_text(page)}: " + ", ".join(
                f"{each} {us:.1f} us a page" for each, us in facts.items()
            )
            rows = taken(profile, pages)
            show(console, title, rows)
            written += text(title, rows)
            inside.close()
        writer.client.close()
        reader.client.close()
    source.close()
    target.close()
    if options.docs:
        print(f"written into {write_between('benchmarks.where', written)}")


if __name__ == "__main__":
    main()
