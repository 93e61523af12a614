"""Section `models` of `make bench`: pages as real models have them (`geometry`), 128 of them, against memcpy of the same runs.

Each pool's pages are a batch of their own, as SGLang asks for them, and a prefix has all pages of some pools and the last ones
of others. The rate is of all bytes over all batches.
"""

from __future__ import annotations

import ctypes
import os
import time

from benchmarks.geometry import PRESETS, Geometry
from benchmarks.harness import Bench, Memory, Row, compare, pool
from benchmarks.ranks import BATCH, MIB, Rank
from benchmarks.usage import METER
from hicache_mooncake import protocol as p


class Prefix:
    """The pages of a prefix of one model in a rank's memory, part after part, run after run, as in page_first pools. Stored at
    `memory`'s beginning; `length` is what that takes."""

    def __init__(self, geometry: Geometry, memory: Memory, rank: Rank, pages: int = BATCH) -> None:
        self._rank = rank
        self._parts: list[tuple[int, list[p.Run], int]] = []
        at = 0
        for part in geometry.parts:
            count, runs = part.pages(pages), []
            for run in part.runs:
                runs.append(p.Run(memory.address + at, run, run))
                at += count * run
            self._parts.append((count, runs, part.size))
        self.length = at

    def _move(self, op: str, keys: list[tuple[bytes, bytes]]) -> float:
        """GB/s."""
        with METER.timed():
            started = time.perf_counter()
            for (_, runs, size), key in zip(self._parts, keys, strict=True):
                self._rank.move(op, *key, size, runs)
            took = time.perf_counter() - started
        return self.length / took / 1e9

    def _fresh(self) -> list[tuple[bytes, bytes]]:
        hashes = os.urandom(p.HASH_BYTES * max(count for count, _, _ in self._parts))
        return [(os.urandom(16), hashes[-p.HASH_BYTES * count :]) for count, _, _ in self._parts]

    def store(self, _round: int) -> float:
        keys = self._fresh()
        rate = self._move("store", keys)
        self._clear(keys)
        return rate

    def load(self, _round: int) -> float:
        keys = self._fresh()
        self._move("store", keys)
        rate = self._move("load", keys)
        self._clear(keys)
        return rate

    def _clear(self, keys: list[tuple[bytes, bytes]]) -> None:
        for namespace, _ in keys:
            self._rank.client.clear(namespace)

    def memcpy(self, source: Memory, target: Memory) -> float:
        """GB/s, run after run, in one thread."""
        with METER.timed([os.getpid()]):
            started, at = time.perf_counter(), 0
            for count, runs, _ in self._parts:
                for run in runs:
                    for _ in range(count):
                        ctypes.memmove(target.address + at, source.address + at, run.length)
                        at += run.length
            took = time.perf_counter() - started
        return self.length / took / 1e9


def models(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for name in bench.models or PRESETS:
        geometry = PRESETS[name]
        length = -(-geometry.size(BATCH) // MIB) * MIB
        source, target = Memory(length), Memory(length)
        with pool(dram=2 * length) as (settings,):
            rank = Rank(settings, source)
            prefix = Prefix(geometry, source, rank)
            contenders = {
                "memcpy": lambda _, prefix=prefix, a=source, b=target: prefix.memcpy(a, b),
                "store": prefix.store,
                "load": prefix.load,
            }
            figures = bench.interleave(contenders, f"models {name}")
            rank.client.close()
        parts = " and ".join(f"{part.pages(BATCH)} x {part.size / MIB:.3g} MiB {part.name}" for part in geometry.parts)
        for op in ("store", "load"):
            what = f"{geometry.title.partition(':')[0]}: {op} {parts}"
            rows.append(compare(what, figures[op], figures["memcpy"], "GB/s", "memcpy", 0.85))
        source.close()
        target.close()
    return rows
