"""`make bench-all`: every section of every benchmark here, each in a process of its own, and which targets were met.

Each section's JSON and what it printed are kept in `benchmarks/results/all/`, where `summary.json` has the table. A section
that fails or runs out of its time does not end the others. `--quick`: few rounds and small sizes, which shows that everything
runs and little else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import master, quick, router
from benchmarks.harness import keep
from benchmarks.machine import ROOT, provenance

LIMIT_S = 1200.0
"""For one section."""
_QUICK = {
    "quick": ("--rounds", "3"),
    "master": ("--rounds", "2", "--keys", "100000"),
    "router": ("--rounds", "1"),
    "streams": ("--rounds", "3"),
    "scale": ("--seconds", "1", "--nodes", "100", "--pages", "1000000", "--shards", "1"),
}
_PEERS = {"quick": ("mooncake", "lmcache", "nixl"), "master": ("mooncake",)}


@dataclass(frozen=True)
class Section:
    """`part`: of the benchmark, or "" where it has only one."""

    benchmark: str
    part: str = ""

    @property
    def name(self) -> str:
        return f"{self.benchmark}-{self.part}" if self.part else self.benchmark

    def command(self, out: Path, peers: Mapping[str, str], *, disk: str = "", small: bool = False) -> list[str]:
        command = [sys.executable, "-m", f"benchmarks.{self.benchmark}", *([self.part] if self.part else []), "--out", str(out)]
        for peer in _PEERS.get(self.benchmark, ()):
            if peers.get(peer):
                command += [f"--{peer}", peers[peer]]
        if disk and self.benchmark == "quick":
            command += ["--disk", disk]
        return command + list(_QUICK[self.benchmark] if small else ())


SECTIONS = [
    *(Section("quick", part) for part in quick.SECTIONS),
    *(Section("master", part) for part in master.SECTIONS),
    *(Section("router", part) for part in router.SECTIONS),
    Section("streams"),
    Section("scale"),
]


@dataclass
class Result:
    """Of a section. `trouble`: why there are no rows. `missed`: the rows that did not reach what is promised."""

    name: str
    seconds: float
    rows: int = 0
    met: int = 0
    missed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    trouble: str = ""


def judge(name: str, seconds: float, record: Mapping[str, Any]) -> Result:
    rows: Sequence[Mapping[str, Any]] = record.get("rows", ())
    promised = [row for row in rows if row["target"] is not None]
    missed = [f"{row['what']}: {row['ratio']:.2f} of {row['ceiling_name']}" for row in promised if row["ratio"] < row["target"]]
    return Result(name, seconds, len(rows), len(promised) - len(missed), missed, dict(record.get("skipped", {})))


def measure(section: Section, command: Sequence[str], out: Path, limit_s: float = LIMIT_S) -> Result:
    """Run it, with its output in a log beside its JSON; one of an earlier run is removed first."""
    out.unlink(missing_ok=True)
    log, started = out.with_suffix(".log"), time.monotonic()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "master")])}
    with log.open("wb") as lines:
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever it has left behind goes too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = time.monotonic() - started
    if status is None:
        return Result(section.name, took, trouble=f"did not end within {limit_s:g} s: see {log}")
    if status or not out.exists():
        return Result(section.name, took, trouble=f"ended with {status}: see {log}")
    return judge(section.name, took, json.loads(out.read_text()))


def show(results: Sequence[Result], console: Console) -> None:
    table = Table(title="targets")
    for column in ("section", "rows", "met", "missed", "seconds", ""):
        table.add_column(column, justify="left" if column in ("section", "") else "right")
    for result in results:
        remark = result.trouble or "; ".join(f"no {name}: {why}" for name, why in result.skipped.items())
        missed = f"[red]{len(result.missed)}" if result.missed else "0"
        colour = "[red]" if result.trouble else ""
        table.add_row(
            result.name, str(result.rows), str(result.met), missed, f"{result.seconds:.0f}", colour + remark.replace("[", r"\[")
        )
    console.print(table)
    for result in results:
        for line in result.missed:
            console.print(f"missed, {result.name}: {line}", style="red", markup=False)
    met, missed_all = sum(result.met for result in results), sum(len(result.missed) for result in results)
    console.print(f"{met} targets met, {missed_all} missed, {sum(1 for r in results if r.trouble)} sections without a result")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [section.name for section in SECTIONS]
    parser.add_argument("sections", nargs="*", choices=[[], *names], default=[], metavar="SECTION", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes")
    for peer in ("mooncake", "lmcache", "nixl"):
        parser.add_argument(f"--{peer}", metavar="PYTHON", default="", help=f"the Python that has {peer}")
    parser.add_argument("--disk", metavar="DIR", default="/var/tmp", help="where the cold tier is measured; not a tmpfs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "all", help="a folder for the results")
    options = parser.parse_args()
    peers = {peer: getattr(options, peer) for peer in ("mooncake", "lmcache", "nixl")}
    for peer, python in peers.items():
        if python and not shutil.which(python):
            parser.error(f"--{peer} {python}: there is no such program")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the section under way ends too
    folder: Path = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=max(132, Console().width))
    results: list[Result] = []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        wanted = [section for section in SECTIONS if section.name in (options.sections or names)]
        task = progress.add_task("", total=len(wanted))
        for section in wanted:
            progress.update(task, description=section.name)
            out = folder / f"{section.name}.json"
            command = section.command(out, peers, disk=options.disk, small=options.quick)
            results.append(measure(section, command, out))
            progress.advance(task)
    show(results, console)
    record = provenance("all", peers, options.disk) | {"quick": options.quick, "sections": [asdict(each) for each in results]}
    print(f"saved as {keep(record, 'summary', folder / 'summary.json')}")
    return 1 if any(result.trouble for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
