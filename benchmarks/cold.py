"""Section `cold` of `make bench`: the cold tier through the whole pool, against fio and its peers on the same disk.

A cloud disk serves some hundred MiB faster than it sustains, and what was written lately faster than the rest. So each round
has every contender move as many bytes once, past the page cache, from places of its own that nobody has read before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import Bench, Memory, Row, compare, pool
from benchmarks.machine import ROOT
from benchmarks.ranks import BATCH, KIB, MIB, POOL_BYTES, Rank, size_text
from benchmarks.rival import Rival
from benchmarks.usage import METER
from hicache_mooncake import protocol as p
from hicache_mooncake.cold.directory import PAGES, own_path
from hicache_mooncake.cold.reading import DEPTH, READ_BYTES
from hicache_mooncake.node.keeping import BATCH_BYTES
from hicache_mooncake.testing.sglang_cpu.servers import cpu_environment

_ROUNDS = 2
"""For each one elsewhere: the same fio twice in a row differs by a factor of three on a cloud disk. Each round reads pages of
its own, and all of them are written first."""
_UNKEPT_SHARE = 0.85
"""Of DRAM: what need not be on the disk when the writer has caught up."""
_PARTS = 32
"""Of DRAM: less is stored at once than would be evicted before the writer looks."""
_WRITTEN = 512 * MIB
_DRAM = 512 * MIB
_HOT = 128 * MIB


@dataclass(frozen=True)
class Load:
    page: int
    count: int
    batches: int
    """A round; small ones are over before a clock can tell."""
    target: float

    @property
    def size(self) -> int:
        return self.page * self.count * self.batches


LOADS = (Load(64 * KIB, BATCH, 4, 0.7), Load(MIB, BATCH, 1, 0.9), Load(4 * MIB, 64, 1, 0.9))


def cold(bench: Bench) -> list[Row]:
    if not shutil.which("fio"):
        bench.skipped["cold"] = "its ceiling is missing: apt-get install fio"
        return []
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=bench.disk) as folder:
        directory = Path(folder)
        rows = [row for load in LOADS for row in _loads(bench, load, directory / f"load-{load.page}")]
        return rows + _writes(bench, directory / "write")


def _loads(bench: Bench, load: Load, directory: Path) -> list[Row]:
    """Pages that were evicted, each read once: a third of all are still in DRAM, a third is ours to read, a third is fio's."""
    rounds = _ROUNDS * bench.rounds
    third = (rounds + 1) * load.size
    memory = Memory(POOL_BYTES)
    with _node(directory, dram=third) as (settings, file), _rivals(bench, load, directory, rounds) as rivals:
        rank = Rank(settings, memory)
        namespace, batches = os.urandom(16), []
        for _ in range(3 * third // (load.page * load.count)):
            batches.append(os.urandom(p.HASH_BYTES * load.count))
        _evict(rank, namespace, b"".join(batches), load.page, third)

        def ours(number: int) -> float:
            mine = batches[number * load.batches : (number + 1) * load.batches]
            rates = [rank.move("load", namespace, hashes, load.page) for hashes in mine]
            return len(rates) / sum(1 / rate for rate in rates)

        def fio(number: int) -> float:
            return _fio(file, "read", max(load.page, READ_BYTES), DEPTH, third + number * load.size, load.size)

        def exists(number: int) -> float:
            hashes = batches[number * load.batches]
            times = []
            for _ in range(100):
                started = time.perf_counter()
                found = rank.client.exists(namespace, hashes)
                times.append(time.perf_counter() - started)
                if found < load.count:
                    raise RuntimeError(f"{found} of {load.count} pages are in the cold tier: the disk was behind")
            return median(times) * 1e3

        contenders: dict[str, Callable[[int], float]] = {"fio": fio, "ours": ours, "exists": exists}
        for rival in rivals:
            contenders[rival.name] = lambda _round, rival=rival: rival.get(load)  # type: ignore[misc]
        figures = bench.interleave(contenders, f"cold {size_text(load.page)}", rounds)
        rank.client.close()
    memory.close()
    what = f"cold: load {load.count} x {size_text(load.page)}"
    rows = [_row(what, figures, "ours", "fio", load.target)]
    if rivals:
        best = max((rival.name for rival in rivals), key=lambda name: median(figures[name]))
        rows += [_row(what, figures, "ours", rival.name, 1.0 if rival.name == best else None) for rival in rivals]
    if load.page == MIB:
        times = figures["exists"]
        rows.append(compare(f"cold: exists of {load.count} keys", times, 0.15, "ms", "ms in DRAM", None, True))
    return rows


def _writes(bench: Bench, directory: Path) -> list[Row]:
    """What the disk takes while a rank stores more than that, and what that costs who loads from DRAM."""
    rounds = bench.rounds
    memory, other = Memory(POOL_BYTES), Memory(POOL_BYTES)
    with _node(directory, dram=_DRAM, tier=4 * (rounds + 1) * _WRITTEN) as (settings, file):
        writer, reader = Rank(settings, memory), Rank(settings, other)
        beside = file.with_name("fio")
        with beside.open("wb") as made:
            os.posix_fallocate(made.fileno(), 0, (rounds + 1) * _WRITTEN)
        hot = os.urandom(16), os.urandom(p.HASH_BYTES * (_HOT // MIB))
        ceiling: list[float] = []

        def load(_round: int) -> float:
            reader.move("store", *hot, MIB)  # what was stored since has evicted some
            return median(reader.move("load", *hot, MIB) for _ in range(4))

        def fio(number: int) -> float:
            ceiling.append(_fio(beside, "write", BATCH_BYTES, 1, number * _WRITTEN, _WRITTEN))
            return ceiling[-1]

        def write(_round: int) -> float:
            with _storing(writer, 2 * ceiling[-1] if ceiling else 1.0):
                return _write_rate(writer, _WRITTEN)

        def both(_round: int) -> float:
            with _storing(writer, 2 * ceiling[-1] if ceiling else 1.0):
                _write_rate(writer, BATCH_BYTES)
                return load(_round)

        contenders = {"fio": fio, "ours": write, "idle": load, "beside": both}
        figures = bench.interleave(contenders, "cold write", rounds)
        writer.client.close()
        reader.client.close()
    memory.close()
    other.close()
    return [
        _row("cold: write at eviction", figures, "ours", "fio", 0.9),
        _row(f"cold: load {_HOT // MIB} x 1 MiB from DRAM while it writes", figures, "beside", "idle", 0.7),
    ]


def _row(what: str, figures: Mapping[str, Sequence[float]], name: str, ceiling: str, target: float | None) -> Row:
    return compare(what, figures[name], figures[ceiling], "GB/s", ceiling, target)


@contextlib.contextmanager
def _node(directory: Path, dram: int, tier: int = 0) -> Iterator[tuple[object, Path]]:
    """A node with a cold tier there, its settings and its pages' file. What it wrote is deleted with it."""
    size = max(tier, 4 * dram)
    arguments = ("--cold", str(directory), "--cold-bytes", str(size), "--no-spill")
    try:
        with pool(dram=dram, extra=arguments) as (settings,):
            yield settings, own_path(directory) / PAGES
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _evict(rank: Rank, namespace: bytes, hashes: bytes, page: int, dram: int) -> None:
    """Store all of them, and no faster than the writer keeps up: what is evicted before it is written is lost."""
    part = max(1, min(POOL_BYTES, dram // _PARTS) // page)
    stored = 0
    for at in range(0, len(hashes), part * p.HASH_BYTES):
        some = hashes[at : at + part * p.HASH_BYTES]
        rank.move("store", namespace, some, page)
        stored += len(some) // p.HASH_BYTES * page
        _caught_up(rank, stored - dram * _UNKEPT_SHARE)


def _written(rank: Rank) -> int:
    report = rank.client.status()
    if report is None:
        raise RuntimeError("the benchmark's store node does not answer")
    return int(report.node["cold_written_bytes"])


def _caught_up(rank: Rank, size: float) -> None:
    """Until so much is on the disk."""
    until = time.monotonic() + 120
    while _written(rank) < size:
        if time.monotonic() > until:
            raise RuntimeError("the cold tier's writer did not catch up within two minutes")
        time.sleep(0.005)


def _write_rate(rank: Rank, size: int) -> float:
    """GB/s, from the end of one of its writes to the end of another."""
    first, until = _written(rank), time.monotonic() + 120
    began, started, written = first, 0.0, first
    while written - began < size or not started:
        if time.monotonic() > until:
            raise RuntimeError("the cold tier's writer wrote too little within two minutes")
        time.sleep(0.002)
        written = _written(rank)
        if not started and written > first:
            began, started = written, time.perf_counter()
    return (written - began) / (time.perf_counter() - started) / 1e9


@contextlib.contextmanager
def _storing(rank: Rank, rate: float) -> Iterator[None]:
    """New pages come all the time, so many GB/s."""
    stop = threading.Event()

    def store() -> None:
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            due = max(due, time.monotonic() - 1.0) + 32 * MIB / rate / 1e9
            rank.move("store", os.urandom(16), os.urandom(p.HASH_BYTES * 32), MIB)

    thread = threading.Thread(target=store)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _fio(path: Path, how: str, block: int, depth: int, offset: int, size: int) -> float:
    """GB/s, past the page cache."""
    options = {
        "name": "ceiling",
        "filename": path,
        "rw": how,
        "bs": block,
        "iodepth": depth,
        "offset": offset,
        "size": size,
        "ioengine": "libaio",
        "direct": 1,
        "allow_file_create": 0,
        "fallocate": "none",
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][how]
    return float(job["bw_bytes"]) / 1e9


class DiskRival(Rival):
    """A backend that keeps pages in files: see `file_pool`, `sglang_nixl_pool` and `nixl_pool`."""

    def __init__(self, name: str, python: str, script: str, directory: Path, env: dict[str, str]) -> None:
        self._command = [python, str(ROOT / "benchmarks" / script), str(directory)]
        super().__init__(name, env)

    def _serve(self) -> list[str]:
        return self._command

    def get(self, load: Load) -> float:
        with METER.timed(self.pids()):
            rates = [self.rate("get", load.page, load.count) for _ in range(load.batches)]
        return len(rates) / sum(1 / rate for rate in rates)


@contextlib.contextmanager
def _rivals(bench: Bench, load: Load, directory: Path, rounds: int) -> Iterator[list[DiskRival]]:
    """Those that are installed and start, with pages for all rounds on the disk."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-", dir=directory.parent)))
        made = []
        if importlib.util.find_spec("sglang"):
            made.append(("SGLang file", sys.executable, "file_pool.py", folder / "file", cpu_environment()))
        else:
            bench.skipped["SGLang file"] = "no sglang in this environment"
        if importlib.util.find_spec("sglang") and importlib.util.find_spec("nixl"):
            made.append(("SGLang nixl", sys.executable, "sglang_nixl_pool.py", folder / "sglang-nixl", cpu_environment()))
        else:
            bench.skipped["SGLang nixl"] = "no sglang or no nixl in this environment"
        if bench.nixl:
            made.append(("NIXL POSIX", bench.nixl, "nixl_pool.py", folder / "nixl", {}))
        else:
            bench.skipped["NIXL POSIX"] = "no --nixl PYTHON that has nixl"
        rivals = []
        for each in made:
            try:
                rivals.append(stack.enter_context(contextlib.closing(DiskRival(*each))))
            except RuntimeError as error:
                bench.skipped[each[0]] = str(error)
        for rival in rivals:
            for _ in range((rounds + 1) * load.batches):
                rival.rate("put", load.page, load.count)
        yield rivals
