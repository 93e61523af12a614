"""The far end of tests of `mooncake.engine`: a process with such an engine, told over pipes what to do.

`python -m tests.engine_far HOST PROTOCOL` reads one JSON list a line, the name of a call and its arguments, and answers each
with a line.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from hicache_mooncake.messenger.mooncake_engine import TransferEngine
from hicache_mooncake.transfer import tcp_lane
from tests.conftest import environment

LONG_S = 60.0


class Far:
    """In the test's process. `memory` is what is there at any time, also in a process that is stopped."""

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", environ: Mapping[str, str] | None = None) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.engine_far", host, protocol],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment() | dict(environ or {}),
        )
        self.pid = self._child.pid
        self.code, port = self._answer()
        bare = host.partition(":")[0] if host.count(":") == 1 else host
        self.session = f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def call(self, name: str, *arguments: Any) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, "the far end has ended"
        return json.loads(line)

    def memory(self, address: int, length: int) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as file:
            file.seek(address)
            content = file.read(length)
        assert len(content) == length
        return content

    def stop(self) -> None:
        """All its threads stand still when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        until = time.monotonic() + LONG_S
        while any(_state(self.pid, task) != "T" for task in os.listdir(f"/proc/{self.pid}/task")):
            assert time.monotonic() < until
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._child.kill()
        self._child.communicate()


def _state(pid: int, task: str) -> str:
    with open(f"/proc/{pid}/task/{task}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def main(host: str, protocol: str) -> None:
    engine = TransferEngine()
    code = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    print(json.dumps([code, engine.get_rpc_port()]), flush=True)
    buffers = []

    def allocate(length: int, fill: str = "") -> int:
        buffers.append(ctypes.create_string_buffer(bytes.fromhex(fill), length))
        return ctypes.addressof(buffers[-1])

    def slow(seconds: float) -> None:
        receive = tcp_lane.Lane._receive

        def slowly(lane: tcp_lane.Lane) -> bool:
            time.sleep(seconds)
            return receive(lane)

        tcp_lane.Lane._receive = slowly  # type: ignore[method-assign]

    def peers() -> list[str]:
        return [peer.transport for peer in engine._engine.peers if peer.alive] if engine._engine else []

    own = {"allocate": allocate, "slow": slow, "peers": peers}
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps((own.get(name) or getattr(engine, name))(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
