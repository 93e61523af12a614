"""What `answers` and `engines` share: real SGLang servers on CPUs, and store nodes as if on hosts of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.machine import ROOT, provenance
from hicache_mooncake.testing.sglang_cpu.pool import MasterProcess, NodeProcess
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, stop_all
from hicache_mooncake.testing.sglang_cpu.servers import Caching, SglangServer, start_servers

RESULTS = ROOT / "benchmarks" / "results"
KV_BYTES_PER_TOKEN = 4096
"""Of the tiny llama."""
Prompt = tuple[int, ...]


def text(rng: random.Random, tokens: int) -> Prompt:
    """Of tokens that the tiny model has."""
    return tuple(rng.randrange(3, 320) for _ in range(tokens))


def check_sglang() -> None:
    """Raises SystemExit where there is none."""
    if importlib.util.find_spec("sglang") is None:
        raise SystemExit(f"this needs SGLang, which {sys.executable} does not have: run it by `make`, which installs it")


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns)


@dataclass(frozen=True)
class Engine:
    """A server as it is to be started."""

    name: str
    caching: Caching
    args: Sequence[str] = ()


class Pool:
    """A master and nodes, each as if on a host of its own."""

    def __init__(self, count: int, *, dram: str, sockets: Path, logs: Path) -> None:
        self.master = MasterProcess("master", log=logs / "master.log")
        self.nodes = [
            NodeProcess(f"node-{n}", socket_path=sockets / str(n), master=self.master, log=logs / f"node-{n}.log", dram=dram)
            for n in range(count)
        ]

    def count(self, name: str) -> int:
        """A figure of the nodes' /metrics, of all of them together."""
        return sum(node.metric(name) for node in self.nodes)


@contextlib.contextmanager
def running_pool(count: int, *, dram: str, logs: Path) -> Iterator[Pool]:
    """Ended at the end, as are those of `running_servers`. Raises `ProcessError` when a process does not start."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as sockets:
        pool = Pool(count, dram=dram, sockets=Path(sockets), logs=logs)
        started: list[ManagedProcess] = []
        try:
            for process in (pool.master, *pool.nodes):
                started.append(process)
                process.start_and_wait()
            yield pool
        finally:
            stop_all(started[::-1])


@contextlib.contextmanager
def running_servers(model: Path, engines: Sequence[Engine], logs: Path, progress: Progress) -> Iterator[list[SglangServer]]:
    servers = [
        SglangServer(each.name, model=model, caching=each.caching, log=logs / f"{each.name}.log", args=each.args)
        for each in engines
    ]
    task = progress.add_task(f"start {len(servers)} SGLang servers", total=len(servers))
    ready: set[str] = set()

    def show(server: SglangServer, _waited_s: float, answers: bool) -> None:
        if answers:
            ready.add(server.name)
        progress.update(task, completed=len(ready))

    start_servers(servers, progress=show)
    progress.remove_task(task)
    try:
        yield servers
    finally:
        stop_all(servers)


def save_figures(name: str, figures: Mapping[str, object]) -> Path:
    """Keep them, with the commit and the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(provenance(name) | dict(figures), indent=1) + "\n")
    return path
