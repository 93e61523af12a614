"""The peers of `make bench`: processes of whatever has each, asked for one batch at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness import Bench
from benchmarks.machine import ROOT
from benchmarks.usage import METER, tree
from hicache_mooncake.testing.local import free_port

_NAMES = {"local": "Mooncake in-process", "dummy": "Mooncake dummy client", "remote": "Mooncake tcp"}


class Rival:
    """Owns the processes. `_serve` starts what the client needs and returns the client's command."""

    def __init__(self, name: str, env: dict[str, str]) -> None:
        self.name = name
        self._processes: list[subprocess.Popen[str]] = []
        self._env = os.environ | env
        try:
            self._client = self._start(*self._serve())
            self._answer(self._client)
        except BaseException:
            self.close()
            raise

    def _serve(self) -> Sequence[str]:
        raise NotImplementedError

    def _start(self, *command: str, port: int = 0) -> subprocess.Popen[str]:
        """Waits until it listens on the port, if one is given."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._processes.append(subprocess.Popen(command, text=True, env=self._env, **pipes))  # type: ignore[call-overload]
        process, until = self._processes[-1], time.monotonic() + 60
        METER.apart.add(process.pid)
        while port and not _answers(port):
            if time.monotonic() > until or process.poll() is not None:
                raise RuntimeError(f"{process.args} does not start: run it by hand to see why")
            time.sleep(0.1)
        return process

    def _answer(self, process: subprocess.Popen[str]) -> object:
        assert process.stdout is not None
        for line in process.stdout:  # among what it logs
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
        raise RuntimeError(f"{process.args} ended with {process.wait()}: run it by hand to see why")

    def pids(self) -> list[int]:
        return [pid for process in self._processes for pid in tree(process.pid)]

    def rate(self, op: str, page: int, count: int) -> float:
        """GB/s of one call for so many pages."""
        assert self._client.stdin is not None
        with METER.timed(self.pids()):
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
            METER.apart.discard(process.pid)


class Mooncake(Rival):
    """One way to use the store: `local`, `dummy` or `remote` (see `mooncake_pool`)."""

    def __init__(self, python: str, kind: str) -> None:
        self._python, self._kind = python, kind
        super().__init__(_NAMES[kind], {"MC_STORE_MEMCPY": "0" if kind == "remote" else "1"})

    def _serve(self) -> Sequence[str]:
        folder = Path(self._python).parent
        master, client = free_port(), free_port()
        self._start(str(folder / "mooncake_master"), f"--rpc_port={master}", f"--metrics_port={free_port()}", port=master)
        script = [self._python, str(ROOT / "benchmarks" / "mooncake_pool.py"), f"127.0.0.1:{master}"]
        if self._kind == "remote":
            self._answer(self._start(*script, "owner"))
        if self._kind == "dummy":
            where = ("--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{master}", "--protocol=tcp")
            size = "--global_segment_size=1GB"
            self._start(str(folder / "mooncake_client"), f"--port={client}", "--host=127.0.0.1", *where, size)
            time.sleep(4.0)
        return [*script, self._kind, f"127.0.0.1:{client}"]


class LmCache(Rival):
    """LMCache's server and its connector, over loopback (see `lmcache_pool`)."""

    def __init__(self, python: str) -> None:
        self._python = python
        super().__init__("LMCache server", {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"})

    def _serve(self) -> Sequence[str]:
        port = free_port()
        self._start(self._python, "-m", "lmcache.v1.server", "127.0.0.1", str(port), port=port)
        return [self._python, str(ROOT / "benchmarks" / "lmcache_pool.py"), str(port)]


class RedisLike(Rival):
    """A server that speaks Redis' protocol, with nothing kept on a disk, and a client of ours (see `redis_pool`)."""

    def __init__(self, name: str, program: str) -> None:
        self._program = program
        super().__init__(name, {"PYTHONPATH": str(ROOT)})

    def _serve(self) -> Sequence[str]:
        port = free_port()
        options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory", "2gb", "--dir", "/tmp")
        self._start(self._program, "--port", str(port), *options, port=port)
        return [sys.executable, "-m", "benchmarks.redis_pool", str(port)]


class PickledDict(Rival):
    """What one would write in an hour (see `pickle_pool`)."""

    def __init__(self) -> None:
        super().__init__("dict, pickled", {"PYTHONPATH": str(ROOT)})

    def _serve(self) -> Sequence[str]:
        port, script = free_port(), [sys.executable, "-m", "benchmarks.pickle_pool"]
        self._start(*script, str(port), "serve", port=port)
        return [*script, str(port)]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


@contextlib.contextmanager
def mooncakes(bench: Bench, *kinds: str) -> Iterator[list[Rival]]:
    """None where no Python that has Mooncake was named."""
    with contextlib.ExitStack() as stack:
        if not bench.mooncake:
            bench.skipped["Mooncake"] = "no --mooncake PYTHON that has mooncake-transfer-engine-non-cuda"
        yield [stack.enter_context(contextlib.closing(Mooncake(bench.mooncake, kind))) for kind in kinds if bench.mooncake]


@contextlib.contextmanager
def over_tcp(bench: Bench) -> Iterator[list[Rival]]:
    """Those whose Python was named."""
    with contextlib.ExitStack() as stack:
        made: list[Rival] = stack.enter_context(mooncakes(bench, "remote"))
        if bench.lmcache:
            made.append(stack.enter_context(contextlib.closing(LmCache(bench.lmcache))))
        else:
            bench.skipped["LMCache"] = "no --lmcache PYTHON that has lmcache"
        yield made


@contextlib.contextmanager
def stores(bench: Bench) -> Iterator[list[Rival]]:
    """General ones, where their servers are in PATH, and a dict behind a socket."""
    with contextlib.ExitStack() as stack:
        made: list[Rival] = []
        for name, command in (("Redis", "redis-server"), ("Valkey", "valkey-server")):
            if program := shutil.which(command):
                made.append(stack.enter_context(contextlib.closing(RedisLike(name, program))))
            else:
                bench.skipped[name] = f"no {command} in PATH"
        made.append(stack.enter_context(contextlib.closing(PickledDict())))
        yield made


def promised(rival: Rival, op: str, page: int) -> float | None:
    """How much faster than this one pages cross between hosts, at least."""
    if isinstance(rival, LmCache):
        return 1.0 if op == "load" else None
    if isinstance(rival, Mooncake):
        return 2.5 if page == 64 << 10 else 1.3
    return 1.0
