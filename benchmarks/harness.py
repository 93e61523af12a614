"""Rounds, medians, ceilings and results: what every benchmark here shares."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import ROOT, machine, provenance
from benchmarks.usage import METER, Cost, Figures, cost_of
from hicache_mooncake.client.embedded import node_answers
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.config_values import join_address
from hicache_mooncake.testing.local import free_port
from hicache_mooncake.transfer.mapping import Mapping as SharedMapping
from hicache_mooncake.transfer.mapping import create_memfd


@dataclasses.dataclass
class Row:
    """One line of the table. `ours` and `ceiling` are medians in `unit`; for a rate the ratio is ours / ceiling, for a time
    ceiling / ours. `target` is the least ratio that we promise, or None. Costs are None where nothing was metered."""

    what: str
    ours: float
    ceiling: float
    unit: str
    ceiling_name: str
    spread: float
    target: float | None = None
    lower_is_better: bool = False
    ours_cost: Cost | None = None
    ceiling_cost: Cost | None = None

    @property
    def ratio(self) -> float:
        return self.ceiling / self.ours if self.lower_is_better else self.ours / self.ceiling

    @property
    def missed(self) -> bool:
        return self.target is not None and self.ratio < self.target


def compare(
    what: str,
    ours: Sequence[float],
    ceiling: Sequence[float] | float,
    unit: str,
    ceiling_name: str,
    target: float | None = None,
    lower_is_better: bool = False,
) -> Row:
    """A row of figures, and of what they cost. `ceiling` is figures too, or what is allowed."""
    bound, theirs = (ceiling, None) if isinstance(ceiling, float) else (median(ceiling), cost_of(ceiling))
    return Row(what, median(ours), bound, unit, ceiling_name, spread(ours), target, lower_is_better, cost_of(ours), theirs)


@dataclasses.dataclass
class Bench:
    """How a section is to measure. `mooncake`, `lmcache`, `nixl`: the Python that has it, or "". `disk`: where the cold
    tier is measured. `models`: which of `geometry.PRESETS`. `skipped`: what did not take part, and why."""

    progress: Progress
    rounds: int
    mooncake: str = ""
    lmcache: str = ""
    nixl: str = ""
    disk: str = "/var/tmp"
    models: Sequence[str] = ()
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)

    def interleave(
        self, contenders: Mapping[str, Callable[[int], float]], what: str, rounds: int | None = None
    ) -> dict[str, Figures]:
        return interleave(contenders, self.rounds if rounds is None else rounds, self.progress, what)


def interleave(
    contenders: Mapping[str, Callable[[int], float]], rounds: int, progress: Progress, what: str
) -> dict[str, Figures]:
    """Run every contender once a round, in an order that changes; the first round is a warm-up and not counted.

    A contender gets the round's number and returns its figure; `usage` says what its turn cost.
    """
    figures = {name: Figures() for name in contenders}
    task = progress.add_task(what, total=rounds + 1)
    for number in range(rounds + 1):
        names = list(contenders)
        random.Random(number).shuffle(names)
        for name in names:
            figure, cost = METER.turn(contenders[name], number)
            if number:
                figures[name].append(figure)
                figures[name].costs.append(cost)
        progress.advance(task)
    progress.remove_task(task)
    return figures


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a part of the median."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2 / median(ordered)


class Memory:
    """Page-aligned shared memory, faulted in. Owns the descriptor and the mapping."""

    def __init__(self, length: int) -> None:
        self.fd = create_memfd("bench", length)
        self.mapping = SharedMapping(self.fd, length, writable=True)
        self.mapping.populate()
        self.mapping.view[:] = random.Random(0).randbytes(1 << 20) * (length >> 20)
        self.address = self.mapping.address
        self.length = length

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)


def memcpy_rate(source: Memory, target: Memory, page: int, count: int) -> float:
    """GB/s of a plain memcpy of `count` pages, in one thread: the ceiling for shared memory."""
    with METER.timed([os.getpid()]):
        started = time.perf_counter()
        for at in range(0, page * count, page):
            ctypes.memmove(target.address + at, source.address + at, page)
        took = time.perf_counter() - started
    return page * count / took / 1e9


@contextlib.contextmanager
def pool(nodes: int = 1, dram: int = 1 << 30, *, one_host: bool = False, extra: Sequence[str] = ()) -> Iterator[list[Settings]]:
    """Real store nodes in processes of their own, as hosts of their own unless `one_host`, with a master when there is more
    than one; settings for ranks of each. `extra` arguments are for the nodes."""
    processes: list[subprocess.Popen[bytes]] = []
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "master")])}
    command = [sys.executable, "-m", "hicache_mooncake.cli"]
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        try:
            masters: list[str] = []
            if nodes > 1:
                masters = ["--master", join_address("127.0.0.1", free_port())]
                processes.append(
                    subprocess.Popen([*command, "master", "--listen", masters[1]], env=env, stderr=subprocess.DEVNULL)
                )
            settings = []
            for number in range(nodes):
                path = f"{folder}/{number}.sock"
                host = "bench" if one_host else f"bench-{number}"
                arguments = ["node", "--socket", path, "--dram", str(dram), "--name", f"bench-{number}", "--host-id", host]
                arguments += [*masters, *extra]
                processes.append(subprocess.Popen([*command, *arguments], env=env, stderr=subprocess.DEVNULL))
                deadline = time.monotonic() + 30
                while not node_answers(path):
                    if time.monotonic() > deadline or processes[-1].poll() is not None:
                        raise RuntimeError("the benchmark's store node did not start: run `hicache-mooncake doctor`")
                    time.sleep(0.05)
                settings.append(load_settings({}, {}, {"socket": path, "node": "external", "deadline_s": 7.0})[0])
            time.sleep(nodes * dram / (1 << 30))  # its memory is faulted in behind the first answers
            yield settings
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(20)


def report(rows: list[Row], title: str) -> None:
    table = Table(title=title)
    for column in ("what", "ours", "ceiling", "ratio", "target", "± (quartiles)"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.ours:.3g} {row.unit}",
            f"{row.ceiling:.3g} {row.ceiling_name}",
            f"[{'red' if row.missed else 'green'}]{row.ratio:.2f}",
            "" if row.target is None else f"{row.target:g}",
            f"{row.spread * 100:.0f} %",
        )
    Console(width=max(132, Console().width)).print(table)


def write_table(rows: list[Row], title: str, marker: str = "make bench") -> Path:
    """This table of docs/performance.md anew."""
    lines = [f"{machine()}; {title}:", "", "| what | ours | ceiling | ratio | promised |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        ratio = f"**{row.ratio:.2f}**" if row.missed else f"{row.ratio:.2f}"
        target = "" if row.target is None else f"{row.target:g}"
        lines.append(f"| {row.what} | {row.ours:.3g} {row.unit} | {row.ceiling:.3g} {row.ceiling_name} | {ratio} | {target} |")
    return write_between(marker, lines)


def write_between(marker: str, lines: Sequence[str], path: Path = ROOT / "docs" / "performance.md") -> Path:
    """Replace what is between the two comments of this name. Raises RuntimeError where they are missing."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    before, begun, rest = path.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise RuntimeError(f"{path} has no place for the table: {begin} and {end}")
    path.write_text(before + "\n".join([begin, *lines, end]) + after)
    return path


def save(rows: Sequence[Row], name: str, bench: Bench | None = None, path: Path | None = None) -> Path:
    """Keep what was printed, with the commit, the machine and the versions, and what was skipped and why. By default in
    `benchmarks/results`."""
    skipped = dict(bench.skipped) if bench else {}
    pythons = {"mooncake": bench.mooncake, "lmcache": bench.lmcache, "nixl": bench.nixl} if bench else {}
    record = provenance(name, pythons, bench.disk if bench else "/var/tmp")
    record |= {"rounds": bench.rounds if bench else None, "skipped": skipped}
    return keep(record | {"rows": as_records(rows)}, name, path)


def as_records(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]


def keep(record: Mapping[str, object], name: str, path: Path | None = None) -> Path:
    path = path or ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
