"""A master and store nodes as processes of their own, started as an operator would: by the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, free_port
from hicache_mooncake.testing.sglang_cpu.servers import HOST, metric_sums, own_environment

READY_TIMEOUT_S = 60.0
DRAM = "512mb"
_COMMAND = (sys.executable, "-m", "hicache_mooncake.cli")


class _PoolProcess(ManagedProcess):
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it accepts connections."""

    def start_and_wait(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        self.start_until(self.is_ready, timeout_s=timeout_s, poll_s=0.05)

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does. `thaw` before it is stopped, or that takes as long as the grace."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def __enter__(self) -> Self:
        self.start_and_wait()
        return self


class MasterProcess(_PoolProcess):
    def __init__(self, name: str, *, log: Path) -> None:
        self.port = free_port()
        super().__init__(name, [*_COMMAND, "master", "--listen", self.address], log=log, env=own_environment())

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def is_ready(self) -> bool:
        return _accepts(socket.AF_INET, (HOST, self.port))


class NodeProcess(_PoolProcess):
    """One store node, as if on a host of its own. Stopped or killed and started again, it has the same name, socket and
    addresses, and no pages but those of its cold tier. Without a master it is alone. `args`: further options of the command
    line."""

    def __init__(
        self,
        name: str,
        *,
        socket_path: Path,
        master: MasterProcess | None,
        log: Path,
        dram: str = DRAM,
        args: Sequence[str] = (),
    ) -> None:
        self.socket_path = socket_path
        self.metrics_port = free_port()
        command = [
            *(*_COMMAND, "node", "--name", name, "--host-id", name, "--dram", dram, "--socket", str(socket_path)),
            *("--listen", f"{HOST}:{free_port()}", "--metrics", f"{HOST}:{self.metrics_port}"),
            *(("--master", master.address) if master is not None else ()),
            *args,
        ]
        super().__init__(name, command, log=log, env=own_environment())

    @property
    def url(self) -> str:
        """Base of the node's /metrics and /health."""
        return f"http://{HOST}:{self.metrics_port}"

    def is_ready(self) -> bool:
        return _accepts(socket.AF_UNIX, str(self.socket_path)) and _accepts(socket.AF_INET, (HOST, self.metrics_port))

    def metric(self, name: str) -> int:
        """A figure of the node's /metrics by its name without prefix, such as `remote_sent_bytes_total`; 0 if unknown."""
        return int(metric_sums(self.url).get(f"hicache_node_{name}", 0))


def _accepts(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        probe.connect(address)
        return True
    return False
