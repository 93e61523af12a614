"""The router, `hicache-mooncake conductor`, as a process of its own in front of engines."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, free_port
from hicache_mooncake.testing.sglang_cpu.servers import HOST, own_environment, post

READY_S = 180.0
"""It may have a tokenizer to load."""


class ConductorProcess(ManagedProcess):
    """`engines`: options and their values, such as `("--worker", url)`. `with` starts it and waits until all of them are up,
    and, with `reads`, until it can read prompts."""

    def __init__(
        self,
        engines: Sequence[tuple[str, str]],
        *,
        log: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        reads: bool = False,
    ) -> None:
        self.port = port if port is not None else free_port()
        self.engines = len(engines)
        self.reads = reads
        command = [sys.executable, "-m", "hicache_mooncake.cli", "conductor", "--listen", f"{HOST}:{self.port}"]
        command += [word for pair in engines for word in pair]
        super().__init__("conductor", [*command, *args], log=log, env=dict(own_environment() if env is None else env))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def knows_all(self) -> bool:
        try:
            up = sum(1 for worker in self.workers() if worker["state"] == "up")
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                reads = bool(json.load(response)["reads_prompts"])
        except (OSError, HTTPException):
            return False
        return up == self.engines and (reads or not self.reads)

    def workers(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/workers", timeout=10) as response:
            found: list[dict[str, Any]] = json.load(response)["workers"]
            return found

    def explain(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Where this request would go, and why. Raises `ServerError`."""
        found: dict[str, Any] = json.loads(post(f"{self.url}/explain", {"path": path, "body": body}, 30.0))
        return found

    def __enter__(self) -> Self:
        self.start_until(self.knows_all, timeout_s=READY_S, poll_s=0.2)
        return self
