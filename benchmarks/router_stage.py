"""What `make bench-router` measures: engines, and the two routers that may stand before them, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Protocol, Self

from benchmarks.machine import ROOT
from hicache_mooncake.testing.conductor import ConductorProcess
from hicache_mooncake.testing.fake_engine_settings import FakeEngineSettings
from hicache_mooncake.testing.fake_processes import FakeEngineProcess, start_fakes
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, free_port, stop_all
from hicache_mooncake.testing.sglang_cpu.servers import HOST, SHIMS, cpu_environment

READY_S = 180.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Target(Protocol):
    """Where requests are sent."""

    @property
    def url(self) -> str: ...


class Usage(ManagedProcess):
    """A process that tells what it takes."""

    def cpu_s(self) -> float:
        """Processor time since its start, of all its threads and children."""
        return sum(_cpu_s(pid) for pid in self.descendants())

    def memory(self) -> int:
        """Resident bytes."""
        return sum(_resident(pid) for pid in self.descendants())


class Ours(ConductorProcess, Usage):
    """`hicache-mooncake conductor`."""


class Sglang(Usage):
    """`sglang-router` from PyPI, cache_aware; some 20 s to start, for it imports SGLang."""

    def __init__(self, engines: Sequence[str], *, log: Path, args: Sequence[str] = ()) -> None:
        self.port, self.engines = free_port(), len(engines)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *engines, "--policy", "cache_aware"]
        command += ["--host", HOST, "--port", str(self.port), "--prometheus-port", str(free_port()), "--log-level", "error"]
        super().__init__("sglang-router", [*command, *args], log=log, env=environment())

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def knows_all(self) -> bool:
        found = _get(f"{self.url}/readiness")
        return isinstance(found, dict) and found.get("healthy_workers") == self.engines

    def __enter__(self) -> Self:
        self.start_until(self.knows_all, timeout_s=READY_S, poll_s=0.2)
        return self


Router = Ours | Sglang


@contextlib.contextmanager
def engines(count: int, settings: FakeEngineSettings, folder: Path) -> Iterator[list[FakeEngineProcess]]:
    started = [FakeEngineProcess(f"engine {number}", settings, log=folder / f"engine-{number}.log") for number in range(count)]
    start_fakes(started)
    try:
        yield started
    finally:
        stop_all(started)


def flush(engine: FakeEngineProcess) -> None:
    """Nothing is cached there any more."""
    with urllib.request.urlopen(f"{engine.url}/flush_cache", timeout=30) as response:
        response.read()


def environment() -> dict[str, str]:
    """For processes that import transformers beside a CPU torch: this checkout, and the shims."""
    return cpu_environment() | {"PYTHONPATH": os.pathsep.join([str(SHIMS), str(ROOT), str(ROOT / "master")])}


def _get(url: str) -> object:
    """None for no answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return json.load(response)
    except (OSError, HTTPException, ValueError):
        return None


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0
