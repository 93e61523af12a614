"""A cluster at full load for many minutes: does anything grow? `python -m benchmarks.soak --minutes 20 --plot FILE.svg`

Two masters and three nodes with segments so small that eviction, spill and replicas never rest; two ranks a node that store,
look up and load as fast as the machine lets them, some with their time cut short; a namespace that is cleared every few
seconds; and now and then a fault: a mover killed or stopped, a node stopped, drained or killed and started again, a master
killed. `--links tcp` lets pages of other nodes come by links, which `--links verbs` makes over RDMA where there are devices;
`--idle 120` ends each eighth of the run with two minutes in which nothing is done. `--cold DIR` gives each node a cold tier
there of eight times its DRAM, and asks for more (and larger) pages than DRAM has room for, so that the disk is written and read
all the time. Every loaded byte is compared. Every process is looked at every 5 s: memory of its own (without segments and host
pools, which are shared), descriptors, threads; every node: pinned bytes, room that is reserved and not committed, room that is
lent to links, objects, connections, links and their rails (pairs of RDMA ports, a queue pair at each end), what its tier's
file and index take of the disk; every master: keys.

What lives through most of the run is compared with itself: it grows when it has more in the last quarter than in the second,
and goes on growing to the end; what fills up to its bound and stays there does not. Prints a table and fails (exit status 1)
when something grows, a page is wrong, a call hangs, or what was to be tried did not happen.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.machine import ROOT
from hicache_mooncake.cold.directory import PAGES, own_path
from hicache_mooncake.testing.local import free_port, page_hash
from tests.faults.cluster import HANG_S, NS, Cluster, Load, descriptors, paused, resident_bytes, threads
from tests.linked import TCP, brought

MIB = 1 << 20
SAMPLE_S = 5.0
PAGE_BYTES = 64 << 10
BATCH = 8
NODES = {"a": 48 * MIB, "b": 64 * MIB, "c": 96 * MIB}
"""Their DRAM."""
COLD_PAGE_BYTES = 256 << 10
"""With cold tiers: a disk is to be kept busy by two cores."""
TIER_SHARE = 8
"""A cold tier is so much larger than its node's DRAM."""
MOST_AMPLIFICATION = 2.0
"""Of a tier that began empty: half of each segment that is emptied may be written once more."""
WORKING_SET_SHARE = 2.5
"""With cold tiers: what is asked for, over all of the nodes' DRAM."""
OTHER = b"o" * 16
"""The namespace that is cleared."""
COUNTERS = ("spilled", "replicated", "evicted", "stored", "loaded", "taken", "replicas_kept")
COLD_COUNTERS = (
    "evicted_unkept",
    "promoted",
    "cold_written",
    "cold_written_bytes",
    "cold_kept",
    "cold_kept_bytes",
    "cold_emptied",
    "cold_evicted",
    "cold_unreadable",
    "cold_damaged",
    "cold_not_written",
    "cold_errors",
)
LINK_COUNTERS = ("links_made", "links_failed", "link_fences", "link_fences_failed", "link_received_bytes")
PARTS = 8
"""Each with its time of rest: the quarters that are compared have the same."""
LIVES = 0.6
"""What lived for this part of the run is compared with itself."""

ALLOWED: dict[str, Callable[[float], float]] = {
    "memory": lambda before: max(4 * MIB, before * 0.05),
    "descriptors": lambda before: 4,
    "threads": lambda before: 4,
    "pinned": lambda before: max(4 * MIB, before),
    "reserved": lambda before: max(MIB, before),
    "objects": lambda before: max(64, before * 0.1),
    "connections": lambda before: 4,
    "lent": lambda before: max(MIB, before),
    "links": lambda before: 2,
    "rails": lambda before: 2,
    "keys": lambda before: max(256, before * 0.1),
    "tier file": lambda before: MIB,
    "tier index": lambda before: max(MIB / 4, before * 0.1),
    "write amplification": lambda before: MOST_AMPLIFICATION,
}
"""How much more than in the second quarter of the run counts as noise."""
UNITS = {"memory": MIB, "pinned": MIB, "reserved": MIB, "lent": MIB, "tier file": MIB, "tier index": MIB}


@dataclass
class Series:
    """One figure of one process over time: (seconds since the start, process id, value)."""

    who: str
    what: str
    points: list[tuple[float, int, float]] = field(default_factory=list)

    def life(self) -> list[tuple[float, float]]:
        """The points of the process that is there now."""
        pid = self.points[-1][1]
        return [(at, value) for at, of, value in self.points if of == pid]

    def between(self, first: float, last: float, length_s: float) -> float | None:
        """Median of a part of the run (0 to 1), of the process that is there now; None where it did not live then."""
        values = [value for at, value in self.life() if length_s * first <= at <= length_s * last]
        return median(values) if values else None

    def slope(self) -> float:
        """Per hour, by least squares, over the later half of the life."""
        life = self.life()
        life = life[len(life) // 2 :]
        mean_at, mean = sum(at for at, _ in life) / len(life), sum(v for _, v in life) / len(life)
        spread = sum((at - mean_at) ** 2 for at, _ in life)
        return 3600 * sum((at - mean_at) * (v - mean) for at, v in life) / spread if spread else 0.0

    def lived(self, length_s: float) -> bool:
        return self.life()[0][0] <= length_s * (1 - LIVES)

    def grew(self, length_s: float) -> str:
        """Why this counts as growth, or nothing."""
        before, after = self.between(0.25, 0.5, length_s), self.between(0.75, 1, length_s)
        lately, at_last = self.between(0.75, 0.875, length_s), self.between(0.875, 1, length_s)
        if before is None or after is None or lately is None or at_last is None or not self.lived(length_s):
            return ""
        most = ALLOWED[self.what](before)
        if after - before <= most or at_last - lately <= most / 8:  # steady growth is more than twice as fast
            return ""
        unit = UNITS.get(self.what, 1)
        return f"{self.what} of {self.who} grew from {before / unit:.1f} to {after / unit:.1f}"


class Soak:
    def __init__(self, cluster: Cluster, seed: int, *, links: bool = False, cold: Path | None = None) -> None:
        self.cluster = cluster
        self.links = links
        self.cold = cold
        self.counters = (*COUNTERS, *(LINK_COUNTERS if links else ()), *(COLD_COUNTERS if cold else ()))
        self.rng = random.Random(seed)
        self.series: dict[tuple[str, str], Series] = {}
        self.faults: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self._reported: dict[str, Counter[str]] = {}
        """Of each life of a process, what has been added to the totals."""
        self.tier_problems: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self.began = time.monotonic()
        self.stopping = threading.Event()
        self.resting = threading.Event()

    # ------------------------------------------------------------------ samples

    def sample(self) -> None:
        now = time.monotonic() - self.began
        processes = {f"master {n}": d.pid for n, d in self.cluster.masters.items() if d.alive}
        processes |= {f"node {n}": d.pid for n, d in self.cluster.nodes.items() if d.alive}
        processes["ranks"] = os.getpid()
        for name, rank in self.cluster.ranks.items():
            for role, pid in rank.client.mover_pids().items():
                if pid is not None:
                    processes[f"{role} mover {name}"] = pid
        for who, pid in processes.items():
            try:
                figures = {"memory": resident_bytes(pid), "descriptors": descriptors(pid), "threads": threads(pid)}
                if self.cold is not None:
                    self._add(f"disk {pid}", disk_bytes(pid))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended just now
            self._note(who, pid, now, figures)
        for name in self.cluster.nodes:
            report = self.cluster.ranks[name].client.status()
            if report is None:
                continue
            node = report.node
            pid, objects = int(node["pid"]), int(node["objects"])
            lent = int(node["landing_bytes"])
            reserved = int(node["used_bytes"]) - objects * self.cluster.page_bytes - lent
            figures = {"objects": objects, "reserved": reserved, "connections": int(node["connections"])}
            if self.links:
                rails = [int(value) for key, value in node.items() if key.endswith((" rails", " rails not up"))]
                figures |= {"lent": lent, "links": int(node["links"])} | ({"rails": sum(rails)} if rails else {})
            if self.cold is not None:
                figures |= {
                    "tier file": allocated_bytes(own_path(self.cold / name) / PAGES),
                    "tier index": int(node["cold_index_bytes"]),
                    "write amplification": float(node["cold_write_amplification"]),
                }
                if node["cold_problem"]:
                    self.tier_problems[f"{name}: {node['cold_problem']}"] += 1
            self._note(f"node {name}", pid, now, figures | {"pinned": int(node["pinned_bytes"])})
            self._add(f"node {pid}", {counter: int(node[counter]) for counter in self.counters})
            if report.cluster:
                self._note("masters", 0, now, {"keys": sum(info.keys for info in report.cluster if info.state != "gone")})

    def _add(self, life: str, counted: dict[str, int]) -> None:
        """What this life of a process has counted so far goes into the totals."""
        before = self._reported.setdefault(life, Counter())
        for counter, value in counted.items():
            self.totals[counter] += value - before[counter]
            before[counter] = value

    def _note(self, who: str, pid: int, now: float, figures: Mapping[str, float]) -> None:
        for what, value in figures.items():
            self.series.setdefault((who, what), Series(who, what)).points.append((now, pid, float(value)))

    # ------------------------------------------------------------------ what is done to it

    def clear_now_and_then(self) -> None:
        """Stores into a namespace of its own and clears it, from changing nodes."""
        number = 0
        try:
            while not self.stopping.wait(2.0):
                if self.resting.is_set():
                    continue
                rank = self.cluster.ranks[self.rng.choice(list(NODES))]
                for _ in range(4):
                    number += 1
                    rank.put(OTHER, [page_hash(("other", number, at)) for at in range(BATCH)])
                if number % 20 == 0:
                    rank.client.clear(OTHER)
                    self.faults["a namespace cleared"] += 1
        except BaseException as error:
            self.errors.append(error)

    def break_now_and_then(self, pause_s: float) -> None:
        """A fault, and the time to heal, until the end. Nodes a and b and master m1 live on: what grows in them is seen."""
        kinds = [
            self.mover_killed,
            self.mover_stopped,
            self.node_stopped,
            self.node_killed,
            self.node_drained,
            self.master_killed,
        ]
        turn = 0
        try:
            while not self.stopping.wait(pause_s):
                if self.resting.is_set():
                    continue
                kind = kinds[turn % len(kinds)]
                turn += 1
                kind()
                self.faults[(kind.__doc__ or "").strip(". \n").lower()] += 1
        except BaseException as error:
            self.errors.append(error)

    def mover_killed(self) -> None:
        """A mover killed."""
        self._mover(signal.SIGKILL)

    def mover_stopped(self) -> None:
        """A mover stopped for good."""
        self._mover(signal.SIGSTOP)

    def _mover(self, signum: int) -> None:
        pid = self.cluster.ranks["c"].client.mover_pids()[self.rng.choice(["load", "store"])]
        if pid is not None:
            os.kill(pid, signum)

    def node_stopped(self) -> None:
        """A node stopped for a second or more."""
        with paused(self.cluster.nodes[self.rng.choice(list(NODES))]):
            time.sleep(self.rng.uniform(1, 4))

    def node_killed(self) -> None:
        """A node killed and started again."""
        self.cluster.nodes["c"].kill()
        self.cluster.nodes["c"].start()

    def node_drained(self) -> None:
        """A node drained and started again."""
        self.cluster.nodes["c"].signal(signal.SIGTERM)
        self.cluster.nodes["c"].ended(60)
        handed = re.search(r"handed (\d+) pages", self.cluster.nodes["c"].said())
        self.totals["handed over"] += int(handed[1]) if handed else 0
        self.cluster.nodes["c"].start()

    def master_killed(self) -> None:
        """A master killed and started again."""
        self.cluster.masters["m2"].kill()
        time.sleep(1)
        self.cluster.masters["m2"].start()

    def rest_or_work(self, load: Load) -> None:
        if self.resting.is_set():
            self.resting.clear()
            load.work()
        else:
            self.resting.set()
            load.rest()

    # ------------------------------------------------------------------ what came of it

    def problems(self, load: Load, length_s: float) -> list[str]:
        found = [grew for series in self.series.values() if (grew := series.grew(length_s))]
        if load.record.wrong:
            found.append(f"{load.record.wrong} wrong pages")
        found += [f"raised: {error!r}" for error in [*load.record.errors, *self.errors]]
        if load.record.slowest_s > HANG_S:
            found.append(f"a call took {load.record.slowest_s:.1f} s")
        for counter in (
            "spilled",
            "replicated",
            "evicted",
            "stored",
            "loaded",
            *(["link_received_bytes"] if self.links else []),
            *(["promoted", "cold_written", "cold_emptied", "read from the disk"] if self.cold else []),
        ):
            if not self.totals[counter]:
                found.append(f"nothing was {counter}: this run does not show what it should")
        return found + (self.tiers_wrong(length_s) if self.cold is not None else [])

    def tiers_wrong(self, length_s: float) -> list[str]:
        """What must hold of cold tiers however much goes through them."""
        found = [
            f"{self.totals[counter]} pages or calls: {counter}"
            for counter in ("cold_damaged", "cold_errors")
            if self.totals[counter]
        ]
        for (who, what), series in self.series.items():
            highest = max(value for _, _, value in series.points)
            # The file system's own blocks count as the file's.
            if what == "tier file" and highest > tier_bytes(who.removeprefix("node ")) + MIB:
                found.append(f"the tier's file of {who} had {highest / MIB:.0f} MiB, more than it may")
            # A node that starts with a full tier has written little when it first keeps what is asked for again and again.
            if what == "write amplification" and series.lived(length_s) and highest > MOST_AMPLIFICATION:
                found.append(f"{what} of {who} was {highest:.2f}")
        return found + [f"node {text} ({count} times)" for text, count in self.tier_problems.items()]

    def leftovers(self) -> list[str]:
        """At rest nothing is pinned, reserved or hung on to."""
        until = time.monotonic() + 60
        left: list[str] = []
        while time.monotonic() < until:
            left = []
            for name in NODES:
                node = self.cluster.report(name)
                reserved = int(node["used_bytes"]) - int(node["objects"]) * self.cluster.page_bytes
                lost = node["quarantined_bytes"]
                if node["pinned_bytes"] or reserved or lost:
                    left.append(f"node {name} at rest: {node['pinned_bytes']} bytes pinned, {reserved} reserved, {lost} lost")
            if not left:
                break
            time.sleep(0.2)
        return left


# --------------------------------------------------------------------------- for people


def table(soak: Soak, length_s: float) -> Table:
    shown = Table(title="each process at the start, a quarter, half and the end; slope of the later half of its life")
    for column in ("what", "who", "start", "1/4", "1/2", "end", "slope an hour"):
        shown.add_column(column, justify="left" if column in ("what", "who") else "right")
    for series in sorted(soak.series.values(), key=lambda each: (list(ALLOWED).index(each.what), each.who)):
        life, unit = series.life(), UNITS.get(series.what, 1)
        marks = [life[0][1], *(at_time(life, length_s * part) for part in (0.25, 0.5)), life[-1][1]]
        form = "{:.1f}" if unit == MIB else "{:.3g}" if series.what == "write amplification" else "{:.0f}"
        cells = ["–" if mark is None else form.format(mark / unit) for mark in marks]
        slope = f"{series.slope() / unit:+.1f}" if series.lived(length_s) else f"new at {life[0][0] / 60:.0f} min"
        what = f"{series.what}, MiB" if unit == MIB else series.what
        shown.add_row(what, series.who, *cells, f"[red]{slope}" if series.grew(length_s) else slope)
    return shown


def at_time(life: list[tuple[float, float]], when: float) -> float | None:
    """The value nearest to this time, where the process lived then."""
    if life[0][0] > when:
        return None
    return min(life, key=lambda point: abs(point[0] - when))[1]


COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22", "#e377c2")


def plot(soak: Soak, length_s: float, title: str) -> str:
    """A self-contained SVG: one panel a figure, one line a process; each process has one colour in all, movers are grey."""
    movers = {"load mover": "#aaa", "store mover": "#ddd"}
    others = sorted({series.who for series in soak.series.values() if not series.who.startswith(tuple(movers))})
    colours = {who: COLOURS[number % len(COLOURS)] for number, who in enumerate(others)} | movers
    kinds = [what for what in ALLOWED if any(series.what == what for series in soak.series.values())]
    width, height, left, gap = 900, 170, 70, 46
    total = 40 + len(kinds) * (height + gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + left + 190} {total}" font-family="sans-serif">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for row, what in enumerate(kinds):
        top, unit = 50 + row * (height + gap), UNITS.get(what, 1)
        of_kind = sorted((s for s in soak.series.values() if s.what == what), key=lambda s: s.who)
        highest = max(value for series in of_kind for _, _, value in series.points) / unit or 1.0
        label = f"{what}, MiB" if unit == MIB else what
        parts.append(f'<text x="{left}" y="{top - 6}" font-size="12" font-weight="bold">{label}</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>')
        for part in (0.0, 0.5, 1.0):
            y = top + height * (1 - part)
            parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" font-size="10" text-anchor="end">{highest * part:.4g}</text>')
        for part in range(5):
            x, minutes = left + width * part / 4, length_s * part / 4 / 60
            parts.append(
                f'<text x="{x:.0f}" y="{top + height + 13}" font-size="10" text-anchor="middle">{minutes:.3g} min</text>'
            )
        named: list[str] = []
        for series in of_kind:
            who = next((kind for kind in movers if series.who.startswith(kind)), series.who)
            colour = colours[who]
            for pid in dict.fromkeys(of for _, of, _ in series.points):
                line = " ".join(
                    f"{left + width * min(1.0, at / length_s):.1f},{top + height * (1 - value / unit / highest):.1f}"
                    for at, of, value in series.points
                    if of == pid
                )
                parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
            if who not in named:
                named.append(who)
                y = top + 9 + 13 * (len(named) - 1)
                text = escape(f"{who}s" if who in movers else who)
                parts.append(f'<text x="{left + width + 8}" y="{y:.0f}" font-size="9" fill="{colour}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def disk_bytes(pid: int) -> dict[str, int]:
    """What a process has had the disks read and write."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return {"read from the disk": int(lines["read_bytes"]), "written to the disk": int(lines["write_bytes"])}


def allocated_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@contextlib.contextmanager
def transport_options(links: str, folder: Path) -> Iterator[list[str]]:
    """For nodes whose links are by this transport. `transport=tcp` makes no links: for them tcp comes under another name."""
    before = os.environ.get("PYTHONPATH", "")
    if links == "tcp":
        links = "tcp-links"
        os.environ["PYTHONPATH"] = os.pathsep.join([brought(folder, links, TCP), before])
    try:
        yield ["--transport", links] if links else []
    finally:
        os.environ["PYTHONPATH"] = before


def tier_bytes(name: str) -> int:
    """Of this node's cold tier, if it has one."""
    return TIER_SHARE * NODES[name]


def run(
    minutes: float,
    seed: int,
    folder: Path,
    console: Console,
    *,
    links: str = "",
    idle_s: float = 0.0,
    cold: Path | None = None,
) -> tuple[Soak, Load, float, list[str]]:
    """`cold`: an empty directory, for the nodes' cold tiers."""
    page_bytes = PAGE_BYTES if cold is None else COLD_PAGE_BYTES
    remembered = 250 if cold is None else int(WORKING_SET_SHARE * sum(NODES.values())) // (page_bytes * BATCH)
    with transport_options(links, folder) as transport, Cluster(folder, page_bytes=page_bytes, batch=BATCH) as cluster:
        for name in ("m1", "m2"):
            cluster.master(name)
        for name, dram in NODES.items():
            listen = f"127.0.0.1:{free_port()}"  # the same in every life, as in a cluster that is configured
            tier = () if cold is None else ("--cold", str(cold / name), "--cold-bytes", str(tier_bytes(name)))
            options = ("--drain-s", "3", "--host-id", name, *transport, *tier)
            cluster.node(name, *options, dram=str(dram), listen=listen)
        for name in NODES:
            cluster.rank(name)
            cluster.rank(name, name=f"{name}2", shared=True)
        cluster.whole()
        soak = Soak(cluster, seed, links=bool(links), cold=cold)
        load = Load(
            cluster,
            namespaces=[NS, b"m" * 16],
            remembered=remembered,
            pause_s=0.0,
            store_pause_s=0.05,
            seed=seed,
            keep=50_000 if cold is None else 5_000,  # it is to be full after a quarter of the run
            hurried=0.1,
        )
        helpers = [
            threading.Thread(target=soak.clear_now_and_then, daemon=True),
            threading.Thread(target=soak.break_now_and_then, args=(min(15.0, minutes * 4),), daemon=True),
        ]
        length_s = minutes * 60
        columns = (
            TextColumn("soak"),
            BarColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("soak", total=length_s, now="")
            load.start()
            for helper in helpers:
                helper.start()
            soak.began = time.monotonic()
            while (gone := time.monotonic() - soak.began) < length_s:
                part_s = length_s / PARTS
                if (gone % part_s > part_s - idle_s) != soak.resting.is_set():
                    soak.rest_or_work(load)
                soak.sample()
                done = f"{soak.totals['loaded']} objects loaded, {load.record.wrong} wrong, {sum(soak.faults.values())} faults"
                progress.update(task, completed=gone, now=done)
                time.sleep(min(SAMPLE_S, max(0.0, length_s - gone)))
        length_s = time.monotonic() - soak.began
        soak.stopping.set()
        for helper in helpers:
            helper.join(120)
        found: list[str] = []
        try:
            load.stop()
            cluster.heal()
            found = soak.leftovers()
        except AssertionError as error:  # what was seen until then is worth a report all the same
            found.append(f"at the end: {error}")
        return soak, load, length_s, [*soak.problems(load, length_s), *found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--links", metavar="TRANSPORT", default="", help="of pages of other nodes: tcp, verbs, or one installed"
    )
    parser.add_argument("--cold", metavar="DIR", type=Path, help="nodes have cold tiers in a folder that is made there")
    parser.add_argument("--idle", metavar="SECONDS", type=float, default=0.0, help="of rest in each eighth of the run")
    parser.add_argument("--plot", type=Path, help="write an SVG with everything that was seen")
    options = parser.parse_args()
    console = Console(width=max(110, Console().width))
    with contextlib.ExitStack() as folders:
        folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="hicache-soak-")))
        cold = None
        if options.cold is not None:
            cold = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="hicache-soak-", dir=options.cold)))
        soak, load, length_s, problems = run(
            options.minutes, options.seed, folder, console, links=options.links, idle_s=options.idle, cold=cold
        )
    console.print(table(soak, length_s))
    record = load.record
    took = sorted(call.took_s for call in record.select("load"))
    console.print(f"commit {commit()}, {length_s / 60:.1f} minutes, {os.cpu_count()} cores for everything")
    console.print(f"done to it: {', '.join(f'{what} {count} times' for what, count in soak.faults.items())}")
    console.print(f"counted: {', '.join(f'{count} {what}' for what, count in soak.totals.items())}")
    if took:
        marks = ", ".join(f"{name} {took[int((len(took) - 1) * part)] * 1e3:.0f} ms" for name, part in MARKS)
        console.print(
            f"the last {len(took)} loads of {BATCH} pages at most: {marks}; longest call of all {record.slowest_s:.2f} s"
        )
    console.print(f"misses by reason: {dict(record.reasons().most_common(12))}")
    if options.plot:
        title = f"soak of {length_s / 60:.0f} minutes, commit {commit()}"
        options.plot.write_text(plot(soak, length_s, title))
        console.print(f"plot: {options.plot}")
    for problem in problems:
        console.print(f"[red]{problem}")
    console.print("[red]something is wrong" if problems else "[green]nothing grows, no page was wrong")
    return 1 if problems else 0


MARKS = (("median", 0.5), ("p99", 0.99), ("p99.9", 0.999))

if __name__ == "__main__":
    sys.exit(main())
