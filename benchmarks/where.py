"""`python -m benchmarks.where`: where each microsecond of a page goes, in the mover and in the node that sends, and of a call.

A mover is run in this process, for a real node and over a real network, with and without Python's profiler. The profiler makes
calls of Python dearer than they are: read its shares, and the times without it.

One call of an idle rank goes through several processes: of each the CPU time, how long it waited for a core after it was woken,
and how often it was put on one, as the kernel counts them (`/proc/PID/task/*/schedstat`).
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import pstats
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.cpu import used
from benchmarks.harness import Memory, pool, write_between
from benchmarks.machine import machine
from benchmarks.ranks import BATCH, KIB, POOL_BYTES, Rank, size_text
from hicache_mooncake import protocol as p
from hicache_mooncake.client.mover import Mover
from hicache_mooncake.client.node_link import NodeLink
from hicache_mooncake.config import Settings
from hicache_mooncake.transfer.memory import MappedMemory

_SHOWN = 12
_CALLS = 300
_HEADINGS = {
    "function": ("calls a page", "us a page, profiled"),
    "process": ("us of CPU a call", "us of waiting for a core", "times put on a core"),
}


Cells = tuple[str, *tuple[float, ...]]


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


def taken(profile: cProfile.Profile, pages: int) -> list[Cells]:
    """(function, calls a page, microseconds a page within it) of the dearest ones."""
    entries = sorted(pstats.Stats(profile).stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
    return [
        (name if file == "~" else f"{os.path.basename(file)} {name}", calls / pages, inside / pages * 1e6)
        for (file, _, name), (_, calls, inside, _, _) in entries[:_SHOWN]
    ]


def scheduled(pid: int) -> tuple[float, float, int]:
    """Of a process so far, of those of its threads that still run: seconds on a core and waiting for one, and how often one of
    them was put on a core."""
    total = [0, 0, 0]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total = [a + int(b) for a, b in zip(total, (task / "schedstat").read_text().split(), strict=True)]
    return total[0] / 1e9, total[1] / 1e9, total[2]


def calls_by_process(
    call: Callable[[], object], before: Callable[[], object], pids: dict[str, int]
) -> tuple[float, list[Cells]]:
    """Median of the microseconds of one call, and for each process what a call costs it. `before` is not counted in the first
    figure, and subtracted from the others."""

    def run(*steps: Callable[[], object]) -> dict[str, tuple[float, ...]]:
        start = {who: scheduled(pid) for who, pid in pids.items()}
        for _ in range(_CALLS):
            for step in steps:
                began = time.perf_counter()
                step()
                times.append(time.perf_counter() - began)
        end = {who: scheduled(pid) for who, pid in pids.items()}
        return {who: tuple((b - a) / _CALLS for a, b in zip(start[who], end[who], strict=True)) for who in pids}

    times: list[float] = []
    run(before, call)
    alone = run(before)
    times.clear()
    both = run(before, call)
    rows = []
    for who in pids:
        cpu, waited, runs = (max(0.0, b - a) for a, b in zip(alone[who], both[who], strict=True))
        rows.append((who, cpu * 1e6, waited * 1e6, runs))
    return median(times[1::2]) * 1e6, rows


def show(console: Console, title: str, kind: str, rows: list[Cells]) -> None:
    table = Table(title=title)
    table.add_column(kind)
    for column in _HEADINGS[kind]:
        table.add_column(column, justify="right")
    for name, *figures in rows:
        table.add_row(name, *[f"{figure:.2f}" for figure in figures])
    console.print(table)


def text(title: str, kind: str, rows: list[Cells]) -> list[str]:
    """The same for docs/performance.md."""
    columns = (kind, *_HEADINGS[kind])
    lines = ["", f"{title[0].upper()}{title[1:]}", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    mark = "`" if kind == "function" else ""
    return lines + [f"| {mark}{name}{mark} | {' | '.join(f'{figure:.2f}' for figure in figures)} |" for name, *figures in rows]


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
            show(console, title, "function", rows)
            written += text(title, "function", rows)
            inside.close()
        far_pids = {"rank": os.getpid(), "its mover": int(writer.client.mover_pids()["load"] or 0), "its node": node}
        near_report = reader.client.status()
        assert near_report is not None
        near_pids = {"rank": os.getpid(), "its mover": int(reader.client.mover_pids()["load"] or 0)}
        near_pids |= {"its node": int(near_report.node["pid"]), "the other node": node}
        one = hashes[: p.HASH_BYTES]
        calls: tuple[tuple[str, Callable[[], object], Callable[[], object], dict[str, int]], ...] = (
            ("exists of 128 keys", lambda: writer.client.exists(namespace, hashes), lambda: None, far_pids),
            ("one page loaded by shm", lambda: writer.move("load", namespace, one, page), lambda: None, far_pids),
            (
                "one page loaded by tcp",
                lambda: reader.move("load", namespace, one, page),
                lambda: reader.client.exists(namespace, one),
                near_pids,
            ),
        )
        for name, call, before, pids in calls:
            wall, rows = calls_by_process(call, before, pids)
            title = f"{name}: {wall:.0f} us a call"
            show(console, title, "process", rows)
            written += text(title, "process", rows)
        writer.client.close()
        reader.client.close()
    source.close()
    target.close()
    if options.docs:
        print(f"written into {write_between('benchmarks.where', written)}")


if __name__ == "__main__":
    main()
