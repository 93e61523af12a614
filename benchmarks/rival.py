"""The real Mooncake store as the peer of `make bench`: processes of the Python that has it, asked for one batch at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness import ROOT, Bench
from hicache_mooncake.testing.local import free_port

_NAMES = {"local": "Mooncake in-process", "dummy": "Mooncake dummy client", "remote": "Mooncake tcp"}


class Rival:
    """One way to use it: `local`, `dummy` or `remote` (see `mooncake_pool`). Owns the processes."""

    def __init__(self, python: str, kind: str) -> None:
        self.name = _NAMES[kind]
        self._processes: list[subprocess.Popen[str]] = []
        folder = Path(python).parent
        master, client = free_port(), free_port()
        self._env = os.environ | {"MC_STORE_MEMCPY": "0" if kind == "remote" else "1"}
        try:
            self._start(str(folder / "mooncake_master"), f"--rpc_port={master}", f"--metrics_port={free_port()}")
            time.sleep(1.5)
            script = [python, str(ROOT / "benchmarks" / "mooncake_pool.py"), f"127.0.0.1:{master}"]
            if kind == "remote":
                self._answer(self._start(*script, "owner"))
            if kind == "dummy":
                where = ("--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{master}", "--protocol=tcp")
                size = "--global_segment_size=1GB"
                self._start(str(folder / "mooncake_client"), f"--port={client}", "--host=127.0.0.1", *where, size)
                time.sleep(4.0)
            self._client = self._start(*script, kind, f"127.0.0.1:{client}")
            self._answer(self._client)
        except BaseException:
            self.close()
            raise

    def _start(self, *command: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._processes.append(subprocess.Popen(command, text=True, env=self._env, **pipes))  # type: ignore[call-overload]
        return self._processes[-1]

    def _answer(self, process: subprocess.Popen[str]) -> object:
        assert process.stdout is not None
        for line in process.stdout:  # among what it logs
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
        raise RuntimeError(f"Mooncake's {process.args} ended with {process.wait()}: run it by hand to see why")

    def rate(self, op: str, page: int, count: int) -> float:
        """GB/s of one call for so many pages."""
        assert self._client.stdin is not None
        self._client.stdin.write(f"{op} {page} {count}\n")
        self._client.stdin.flush()
        took = self._answer(self._client)
        assert isinstance(took, float)
        return page * count / took / 1e9

    def contenders(self, page: int, count: int) -> dict[str, Callable[[int], float]]:
        def load(_round: int) -> float:
            self.rate("put", page, count)
            return self.rate("get", page, count)

        return {f"{self.name} store": lambda _round: self.rate("put", page, count), f"{self.name} load": load}

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(20)


@contextlib.contextmanager
def rivals(bench: Bench, *kinds: str) -> Iterator[list[Rival]]:
    """None where no Python that has Mooncake was named."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Rival(bench.mooncake, kind))) for kind in kinds if bench.mooncake]
