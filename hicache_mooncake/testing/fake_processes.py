"""Fake engines (`fake_engine`) in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any, Self

from hicache_mooncake.testing.fake_engine_settings import FakeEngineSettings
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, free_port, stop_all
from hicache_mooncake.testing.sglang_cpu.servers import is_healthy, own_environment

START_S = 60.0


class FakeEngineProcess(ManagedProcess):
    """One engine; ports that the settings leave open are chosen here. `with` starts it and waits until it answers."""

    def __init__(self, name: str, settings: FakeEngineSettings, *, log: Path) -> None:
        bootstrap = settings.bootstrap_port or (free_port() if settings.mode == "prefill" else 0)
        self.settings = dataclasses.replace(settings, port=settings.port or free_port(), bootstrap_port=bootstrap)
        command = [sys.executable, "-m", "hicache_mooncake.testing.fake_engine"]
        for key, value in dataclasses.asdict(self.settings).items():
            option = "--" + key.replace("_", "-")
            if isinstance(value, bool):
                command.append(option if value else f"--no-{option[2:]}")
            else:
                command += [option, str(value)]
        super().__init__(name, command, log=log, env=own_environment())

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.settings.port}"

    def stats(self) -> dict[str, Any]:
        """`FakeStats`, and how many pages are cached."""
        with urllib.request.urlopen(f"{self.url}/stats", timeout=10) as response:
            found: dict[str, Any] = json.load(response)
            return found

    def is_ready(self) -> bool:
        return is_healthy(self.url)

    def __enter__(self) -> Self:
        self.start_until(self.is_ready, timeout_s=START_S, poll_s=0.05)
        return self


def start_fakes(engines: list[FakeEngineProcess]) -> None:
    """All at once, and wait until every one answers. None is left running when one does not."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_until(engine.is_ready, timeout_s=START_S, poll_s=0.05)
    except BaseException:
        stop_all(engines)
        raise
