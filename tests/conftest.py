"""Fixtures: one real node, one real master, patterns that name the page they belong to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from hicache_mooncake.client.embedded import node_answers
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.testing.local import free_port
from tests.faults.recording import (  # noqa: F401 (what pytest looks for)
    measured,
    pytest_configure,
    pytest_runtest_call,
    pytest_runtest_makereport,
    pytest_sessionfinish,
)

ROOT = Path(__file__).resolve().parents[1]

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


def environment() -> dict[str, str]:
    """Child processes see this checkout, and none of the operator's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MOONCAKE_", "HICACHE_MOONCAKE_"))}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "master"), kept.get("PYTHONPATH", "")])
    return kept


START_S = 60.0
"""A limit on how long a process may take to start, and to be known: a machine may have much else to do."""


@dataclass
class NodeProcess:
    """A real `hicache-mooncake node` in a process of its own, and as if on a host of its own."""

    socket: str
    dram: str
    masters: tuple[str, ...] = ()
    name: str = "node"
    extra: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    _files: list[object] = field(default_factory=list)

    def start(self) -> NodeProcess:
        command = [sys.executable, "-m", "hicache_mooncake.cli", "node", "--socket", self.socket, "--dram", self.dram]
        command += ["--listen", "127.0.0.1:0", "--name", self.name, "--host-id", self.name]
        for master in self.masters:
            command += ["--master", master]
        self.log = Path(self.socket + ".out")
        with self.log.open("ab") as output:
            self.process = subprocess.Popen([*command, *self.extra], stdout=output, stderr=output, env=environment())
        wait_until(lambda: node_answers(self.socket) or self.process.poll() is not None, START_S, "an answer")  # type: ignore[union-attr]
        assert self.process.poll() is None, self.log.read_text()
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.process.wait(15)

    def signal(self, signum: int) -> None:
        """A node that is to stand still does so when this returns: on a busy machine its threads run on for a while."""
        assert self.process is not None
        self.process.send_signal(signum)
        if signum == signal.SIGSTOP:
            pid = self.process.pid
            wait_until(lambda: stands_still(pid), 60, "the node stands still")

    def settings(self, **explicit: object) -> Settings:
        return load_settings({}, {}, {"socket": self.socket, "node": "external"} | explicit)[0]


def stands_still(pid: int) -> bool:
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@dataclass
class MasterProcess:
    address: str
    process: subprocess.Popen[bytes] | None = None
    extra: tuple[str, ...] = ()

    def start(self) -> MasterProcess:
        command = [sys.executable, "-m", "hicache_mooncake.cli", "master", "--listen", self.address, "--metrics", ""]
        self.process = subprocess.Popen(
            [*command, *self.extra], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Start real nodes; all are ended after the test."""
    started: list[NodeProcess] = []

    def start(name: str = "a", dram: str = "256MiB", masters: tuple[str, ...] = (), extra: tuple[str, ...] = ()) -> NodeProcess:
        node = NodeProcess(str(tmp_path / f"{name}.sock"), dram, masters, name, extra)
        started.append(node)
        return node.start()

    yield start
    for node in started:
        if node.process is not None and node.process.poll() is None:
            node.stop()


@pytest.fixture
def start_master() -> Iterator[Callable[..., MasterProcess]]:
    started: list[MasterProcess] = []

    def start(*extra: str) -> MasterProcess:
        master = MasterProcess(f"127.0.0.1:{free_port()}", extra=extra)
        started.append(master)
        return master.start()

    yield start
    for master in started:
        if master.process is not None and master.process.poll() is None:
            master.kill()


def wait_until(condition: Callable[[], object], timeout_s: float, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.02)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For several workers: the tests of one file stay together, and so do all that start SGLang servers."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # its groups by marker are passed over by pytest 9.2
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "servers" if file.startswith("tests/e2e/") else file

    return ByFile(config, log)
