"""`make bench`: shared memory, single KV heads, a busy interpreter, lookups and TCP, each against its ceiling, in minutes.

Ceilings: a plain memcpy of the same pages between page-aligned buffers; the same call beside an idle interpreter; a bare
`sendmsg`/`recv_into` loop over loopback. Every byte that ours moves is checksummed on the way; the ceilings check nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness import Memory, Row, interleave, memcpy_rate, pool, report, save, spread
from hicache_mooncake import protocol as p
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.config import Settings

KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 256 * MIB
BATCH = 128


class Rank:
    """A client over memory shaped as SGLang's page_first pools: K and V of a page half the pool apart."""

    def __init__(self, settings: Settings, memory: Memory, copy_mode: str = "memfd") -> None:
        self._memory = memory
        self.client = PoolClient(dataclasses.replace(settings, copy_mode=copy_mode), "bench")
        fds = (memory.fd,) if copy_mode == "memfd" else ()
        region = p.Region(memory.address, memory.length, 0 if fds else -1)
        self.client.share(PoolGeometry("kv", (), 1, 1, (region,), fds, affine=True))
        # Both movers connect and fault the segment in behind their first batch: the warmed rate is what is compared here.
        key = os.urandom(16), os.urandom(p.HASH_BYTES)
        self.move("store", *key, 64 * KIB)
        self.move("load", *key, 64 * KIB)
        self.client.clear(key[0])
        time.sleep(1.5)

    def halves(self, page: int) -> list[p.Run]:
        return [p.Run(self._memory.address + part * self._memory.length // 2, page // 2, page // 2) for part in (0, 1)]

    def head(self, layout: str, body: int) -> list[p.Run]:
        """K and V of the first of 8 KV heads: 64 tokens of as many layers as make `body` bytes, in the canonical order."""
        row, tokens, heads = 256, 64, 8
        layers = body // 2 // tokens // row
        pages = self._memory.length // (heads * body)
        token, layer, page = {
            "page_first": (layers * heads * row, heads * row, heads * body // 2),
            "page_first_direct": (heads * row, tokens * heads * row, heads * body // 2),
            "layer_first": (heads * row, pages * tokens * heads * row, tokens * heads * row),
        }[layout]
        dims = [(tokens * layers, layer)] if token == layers * layer else [(tokens, token), (layers, layer)]
        starts = (self._memory.address + part * self._memory.length // 2 for part in (0, 1))
        return [p.Run(start, page, body // 2, dims) for start in starts]

    def move(self, op: str, namespace: bytes, hashes: bytes, page: int, runs: list[p.Run] | None = None) -> float:
        """One batch, one page per hash, of `runs` (by default two halves); GB/s. Raises when a page did not make it."""
        count = len(hashes) // p.HASH_BYTES
        runs = runs or self.halves(page)
        started = time.perf_counter()
        outcome = self.client.transfer(op, Body(namespace, tuple(runs)), hashes, array("q", range(count)))
        took = time.perf_counter() - started
        if outcome.ok.count(1) != count:
            raise RuntimeError(f"{op} of {count} pages of {page} bytes: {outcome.reasons}")
        return count * page / took / 1e9


class Pages:
    """One page size through one rank: stores of new keys, loads of what another round's store left."""

    def __init__(
        self, writer: Rank, reader: Rank, page: int, *, runs: list[p.Run] | None = None, count: int | None = None
    ) -> None:
        self.page = page
        self.count = count or min(BATCH, POOL_BYTES // page)
        self._writer, self._reader, self._runs = writer, reader, runs

    def _fresh(self) -> tuple[bytes, bytes]:
        return os.urandom(16), os.urandom(p.HASH_BYTES * self.count)

    def store(self, _round: int) -> float:
        namespace, hashes = self._fresh()
        rate = self._writer.move("store", namespace, hashes, self.page, self._runs)
        self._writer.client.clear(namespace)
        return rate

    def load(self, _round: int) -> float:
        namespace, hashes = self._fresh()
        self._writer.move("store", namespace, hashes, self.page, self._runs)
        while self._reader.client.exists(namespace, hashes) < self.count:  # another host: its master hears in milliseconds
            time.sleep(0.002)
        rate = self._reader.move("load", namespace, hashes, self.page, self._runs)
        self._writer.client.clear(namespace)
        return rate

    def rows(self, name: str, figures: dict[str, list[float]], ceiling: str, ops: list[str], target: float | None) -> list[Row]:
        size = f"{self.page // MIB} MiB" if self.page >= MIB else f"{self.page // KIB} KiB"
        return [
            Row(
                f"{name}: {op} {self.count} x {size}",
                median(figures[op]),
                median(figures[ceiling]),
                "GB/s",
                ceiling,
                spread(figures[op]),
                target,
            )
            for op in ops
        ]


def shared_memory(progress: Progress, rounds: int) -> list[Row]:
    """One host: store and load against memcpy."""
    rows: list[Row] = []
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    with pool() as (settings,):
        for mode, size in [*(("memfd", s) for s in (64 * KIB, 256 * KIB, MIB, 4 * MIB)), ("process_vm", MIB), ("segment", MIB)]:
            rank = Rank(settings, source, mode)
            pages = Pages(rank, rank, size)

            def memcpy(_round: int, pages: Pages = pages) -> float:
                return memcpy_rate(source, target, pages.page, pages.count)

            contenders = {"store": pages.store, "load": pages.load, "memcpy": memcpy}
            figures = interleave(contenders, rounds, progress, f"{mode} {size // KIB} KiB")
            promised = 0.6 if mode == "memfd" and size >= 256 * KIB else None
            rows += pages.rows(mode, figures, "memcpy", ["store", "load"], promised)
            rank.client.close()
    source.close()
    target.close()
    return rows


def single_heads(progress: Progress, rounds: int, sizes: tuple[int, ...] = (MIB,)) -> list[Row]:
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
            figures = interleave(contenders, rounds, progress, f"single heads {size // KIB} KiB")
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


def busy(progress: Progress, rounds: int) -> list[Row]:
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
                figures = interleave(contenders, rounds, progress, f"busy thread, {op} {size // KIB} KiB")
                rows += pages.rows("busy Python thread", figures, "idle", [op], 0.7)
        rank.client.close()
    memory.close()
    return rows


def lookups(progress: Progress, rounds: int) -> list[Row]:
    """Existence of keys that are all there: the whole call, against the time allowed."""
    memory = Memory(POOL_BYTES)
    rows: list[Row] = []
    with pool() as (settings,):
        rank = Rank(settings, memory)
        namespace, stored = os.urandom(16), os.urandom(p.HASH_BYTES * 16_000)
        for first in range(0, 16_000, BATCH):
            rank.move("store", namespace, stored[first * p.HASH_BYTES : (first + BATCH) * p.HASH_BYTES], 8 * KIB)
        for count, allowed_ms in ((128, 0.15), (1000, 1.0), (16_000, 10.0)):
            hashes = stored[: count * p.HASH_BYTES]

            def lookup(_round: int, hashes: bytes = hashes, count: int = count) -> float:
                times = []
                for _ in range(20):
                    started = time.perf_counter()
                    found = rank.client.exists(namespace, hashes)
                    times.append(time.perf_counter() - started)
                    if found != count:
                        raise RuntimeError(f"lookup of {count} keys found {found}")
                return median(times) * 1e3

            figures = interleave({"lookup": lookup}, rounds, progress, f"lookup of {count}")["lookup"]
            row = Row(f"lookup of {count} keys", median(figures), allowed_ms, "ms", "ms allowed", spread(figures), 1.0, True)
            rows.append(row)
        rank.client.close()
    memory.close()
    return rows


class BareLoop:
    """The ceiling for TCP: pages sent by one process and received by another over loopback, nothing else."""

    def __init__(self, source: Memory, target: Memory) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._target = target
        self._child = os.fork()
        if self._child == 0:
            try:
                sock, _ = listener.accept()
                while request := sock.recv(16, socket.MSG_WAITALL):
                    page, count = int.from_bytes(request[:8], "little"), int.from_bytes(request[8:], "little")
                    for at in range(0, page * count, page):
                        view = source.mapping.view[at : at + page]
                        while view:
                            view = view[sock.sendmsg([view]) :]
            finally:
                os._exit(0)
        self._sock = socket.create_connection(listener.getsockname())
        listener.close()

    def rate(self, page: int, count: int) -> float:
        started = time.perf_counter()
        self._sock.sendall(page.to_bytes(8, "little") + count.to_bytes(8, "little"))
        view = self._target.mapping.view[: page * count]
        for at in range(0, page * count, page):
            got = 0
            while got < page:
                got += self._sock.recv_into(view[at + got : at + page], page - got, socket.MSG_WAITALL)
        return page * count / (time.perf_counter() - started) / 1e9

    def close(self) -> None:
        self._sock.close()
        os.waitpid(self._child, 0)


def tcp(progress: Progress, rounds: int) -> list[Row]:
    """Two nodes as two hosts: load of pages that the other one holds, against the bare loop."""
    rows: list[Row] = []
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    bare = BareLoop(source, target)
    with pool(nodes=2) as (near, far):
        writer, reader = Rank(far, source), Rank(near, target)
        for size in (64 * KIB, 256 * KIB, MIB):
            pages = Pages(writer, reader, size)

            def loop(_round: int, pages: Pages = pages) -> float:
                return bare.rate(pages.page, pages.count)

            figures = interleave({"load": pages.load, "bare loop": loop}, rounds, progress, f"tcp {size // KIB} KiB")
            rows += pages.rows("tcp", figures, "bare loop", ["load"], 0.5)
        writer.client.close()
        reader.client.close()
    bare.close()
    source.close()
    target.close()
    return rows


SECTIONS = {"shm": shared_memory, "heads": single_heads, "busy": busy, "lookup": lookups, "tcp": tcp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=[], help="which parts; all without any")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows: list[Row] = []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        for name in options.sections or SECTIONS:
            rows += SECTIONS[name](progress, options.rounds)
    report(rows, f"medians of {options.rounds} interleaved rounds; ours with every byte checksummed")
    print(f"saved as {save(rows, 'quick')}")


if __name__ == "__main__":
    main()
