"""Sections of `make bench` on one host: shared memory, single KV heads, a busy interpreter, lookups, first use."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from benchmarks.harness import Bench, Memory, Row, compare, memcpy_rate, pool
from benchmarks.ranks import BATCH, KIB, MIB, POOL_BYTES, Pages, Rank
from benchmarks.rival import mooncakes
from hicache_mooncake import protocol as p


def shared_memory(bench: Bench) -> list[Row]:
    """One host: store and load against memcpy, and against Mooncake in the engine's process and over shared memory."""
    rows: list[Row] = []
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    targets = {64 * KIB: 0.5, 256 * KIB: 0.7, MIB: 0.85, 4 * MIB: 0.85}
    with pool() as (settings,), mooncakes(bench, "local", "dummy") as theirs:
        for mode, size in [*(("memfd", s) for s in targets), ("process_vm", MIB), ("segment", MIB)]:
            ranks = {mode: Rank(settings, source, mode)}
            if mode == "memfd" and size >= MIB:  # what a host with more cores does by default
                ranks["memfd, 2 copy threads"] = Rank(dataclasses.replace(settings, copy_threads=2), source, mode)
            ours = {name: Pages(rank, rank, size) for name, rank in ranks.items()}

            def memcpy(_round: int, pages: Pages = ours[mode]) -> float:
                return memcpy_rate(source, target, pages.page, pages.count)

            contenders = {"memcpy": memcpy}
            for name, pages in ours.items():
                contenders |= {f"{name} store": pages.store, f"{name} load": pages.load}
            rivals = theirs if mode == "memfd" else []
            for rival in rivals:
                contenders |= rival.contenders(size, ours[mode].count)
            figures = bench.interleave(contenders, f"{mode} {size // KIB} KiB")
            for name, pages in ours.items():
                mine = figures | {op: figures[f"{name} {op}"] for op in ("store", "load")}
                rows += pages.rows(name, mine, "memcpy", ["store", "load"], targets[size] if mode == "memfd" else None)
                if rivals:
                    rows += pages.rival_rows(name, mine, [rival.name for rival in rivals], 1.0)
            for rank in ranks.values():
                rank.client.close()
    source.close()
    target.close()
    return rows


def single_heads(bench: Bench, sizes: tuple[int, ...] = (MIB,)) -> list[Row]:
    """One of a rank's 8 KV heads as an object: pieces of 256 bytes, against memcpy and against contiguous pages."""
    rows: list[Row] = []
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    with pool() as (settings,):
        rank = Rank(settings, source)
        for size in sizes:
            count = POOL_BYTES // size // 8
            plain = Pages(rank, rank, size, count=count)

            def memcpy(_round: int, pages: Pages = plain) -> float:
                return memcpy_rate(source, target, pages.page, pages.count)

            layouts = ("page_first", "page_first_direct", "layer_first")
            heads = {layout: Pages(rank, rank, size, runs=rank.head(layout, size), count=count) for layout in layouts}
            contenders = {"memcpy": memcpy, "contiguous store": plain.store, "contiguous load": plain.load}
            for layout, pages in heads.items():
                contenders |= {f"{layout} store": pages.store, f"{layout} load": pages.load}
            figures = bench.interleave(contenders, f"single heads {size // KIB} KiB")
            for layout, pages in heads.items():
                for op in ("store", "load"):
                    for ceiling in ("memcpy", f"contiguous {op}"):
                        ours = {op: figures[f"{layout} {op}"], ceiling: figures[ceiling]}
                        rows += pages.rows(f"one head, {layout}", ours, ceiling, [op], None)
        rank.client.close()
    source.close()
    target.close()
    return rows


@contextmanager
def busy_interpreter() -> Iterator[None]:
    """A thread that never lets go of the interpreter by itself: the scheduler of a loaded engine."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(200))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def busy(bench: Bench) -> list[Row]:
    """One host, with and without a busy Python thread in the engine's process."""
    memory = Memory(POOL_BYTES)
    rows: list[Row] = []
    with pool() as (settings,):
        rank = Rank(settings, memory)

        def beside_a_busy_thread(contender: Callable[[int], float]) -> Callable[[int], float]:
            def run(number: int) -> float:
                with busy_interpreter():
                    return contender(number)

            return run

        for size in (MIB, 2 * MIB):
            pages = Pages(rank, rank, size)
            for op, contender in (("store", pages.store), ("load", pages.load)):
                contenders = {"idle": contender, op: beside_a_busy_thread(contender)}
                figures = bench.interleave(contenders, f"busy thread, {op} {size // KIB} KiB")
                rows += pages.rows("busy Python thread", figures, "idle", [op], 0.7)
        rank.client.close()
    memory.close()
    return rows


def batches(bench: Bench) -> list[Row]:
    """One host, from a page to 128 at once: what a batch costs besides its pages."""
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    rows: list[Row] = []
    with pool() as (settings,):
        rank = Rank(settings, source)
        for size in (64 * KIB, MIB):
            made = {count: Pages(rank, rank, size, count=count) for count in (1, 8, 32, BATCH)}
            contenders: dict[str, Callable[[int], float]] = {}
            for count, pages in made.items():
                contenders |= {f"{count} store": pages.store, f"{count} load": pages.load}
                contenders[f"{count} memcpy"] = lambda _, each=pages: memcpy_rate(source, target, each.page, each.count)
            figures = bench.interleave(contenders, f"batches {size // KIB} KiB")
            for count, pages in made.items():
                mine = {"memcpy": figures[f"{count} memcpy"]} | {op: figures[f"{count} {op}"] for op in ("store", "load")}
                rows += pages.rows("batches", mine, "memcpy", ["store", "load"], None)
        rank.client.close()
    source.close()
    target.close()
    return rows


def lookups(bench: Bench) -> list[Row]:
    """Existence of keys, of which all are there, none, or the first half: the whole call, against the time allowed."""
    memory = Memory(POOL_BYTES)
    rows: list[Row] = []
    with pool() as (settings,):
        rank = Rank(settings, memory)
        namespace, stored = os.urandom(16), os.urandom(p.HASH_BYTES * 16_000)
        for first in range(0, 16_000, BATCH):
            rank.move("store", namespace, stored[first * p.HASH_BYTES : (first + BATCH) * p.HASH_BYTES], 8 * KIB)
        unknown = os.urandom(len(stored))
        for count, allowed_ms in ((128, 0.15), (1000, 1.0), (16_000, 10.0)):

            def lookup(_round: int, there: int, count: int = count) -> float:
                hashes = stored[: there * p.HASH_BYTES] + unknown[: (count - there) * p.HASH_BYTES]
                times = []
                for _ in range(20):
                    started = time.perf_counter()
                    found = rank.client.exists(namespace, hashes)
                    times.append(time.perf_counter() - started)
                    if found != there:
                        raise RuntimeError(f"lookup of {count} keys, of which {there} are there, found {found}")
                return median(times) * 1e3

            kinds = {"": count, ", none there": 0, ", half there": count // 2}
            contenders = {kind: partial(lookup, there=there) for kind, there in kinds.items()}
            figures = bench.interleave(contenders, f"lookup of {count}")
            for kind, times in figures.items():
                rows.append(compare(f"lookup of {count} keys{kind}", times, allowed_ms, "ms", "ms allowed", 1.0, True))
        rank.client.close()
    memory.close()
    return rows


def first_use(bench: Bench) -> list[Row]:
    """The first batch of a fresh node and fresh movers, a second after their start, against later ones of the same."""
    memory = Memory(POOL_BYTES)
    rows: list[Row] = []
    figures: dict[str, list[float]] = {}

    def fresh(_round: int) -> float:
        with pool() as (settings,):
            rank = Rank(settings, memory, warm=False)
            time.sleep(1.0)
            for number in range(7):
                namespace, hashes = os.urandom(16), os.urandom(p.HASH_BYTES * BATCH)
                for op in ("store", "load"):
                    kind = "warmed" if number else "first"
                    figures.setdefault(f"{kind} {op}", []).append(rank.move(op, namespace, hashes, MIB))
            rank.client.close()
        return 0.0

    for _ in range(min(bench.rounds, 5)):
        bench.interleave({"fresh pool": fresh}, "first use", rounds=0)
    for op in ("store", "load"):
        first, warmed = figures[f"first {op}"], figures[f"warmed {op}"]
        what = f"first {op} of a fresh pool, {BATCH} x 1 MiB"
        rows.append(compare(what, first, warmed, "GB/s", "warmed", 0.8))
    memory.close()
    return rows


def latency(bench: Bench) -> list[Row]:
    """One small call on an idle machine, as the engine's thread sees it: medians of 100 calls a round. Before a page is loaded
    over tcp it is looked up, as SGLang does, out of the time."""
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    rows: list[Row] = []
    calls, page = 100, 64 * KIB
    with pool(nodes=2, extra=("--replicate-after", "0")) as (near, far):
        writer, reader = Rank(far, source), Rank(near, target)
        namespace, hashes = os.urandom(16), os.urandom(p.HASH_BYTES * BATCH)
        writer.move("store", namespace, hashes, page)
        reader.wait_for(namespace, hashes)
        one = hashes[: p.HASH_BYTES]

        def timed(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> Callable[[int], float]:
            def run(_round: int) -> float:
                times = []
                for _ in range(calls):
                    before()
                    started = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - started)
                return median(times) * 1e3

            return run

        contenders = {
            "exists of 128 keys": timed(lambda: writer.client.exists(namespace, hashes)),
            "one 64 KiB page loaded, shm": timed(lambda: writer.move("load", namespace, one, page)),
            "one 64 KiB page loaded, tcp": timed(
                lambda: reader.move("load", namespace, one, page), lambda: reader.client.exists(namespace, one)
            ),
            "one 64 KiB page stored": timed(lambda: writer.move("store", os.urandom(16), one, page)),
        }
        figures = bench.interleave(contenders, "latency")
        allowed = {"exists of 128 keys": 0.15, "one 64 KiB page loaded, shm": 0.2, "one 64 KiB page loaded, tcp": 0.3}
        for name, values in figures.items():
            what = f"latency: {name}"
            if name in allowed:
                rows.append(compare(what, values, allowed[name], "ms", "ms allowed", 1.0, True))
            else:
                rows.append(compare(what, values, figures["one 64 KiB page loaded, shm"], "ms", "loaded", None, True))
        writer.client.close()
        reader.client.close()
    source.close()
    target.close()
    return rows
