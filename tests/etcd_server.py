"""A real etcd in a process of its own, for tests: tools/get_etcd.sh fetches one; without it they are skipped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from hicache_mooncake.testing.local import free_port

START_S = 30.0


def find_etcd() -> str | None:
    """The binary in this virtual environment or in PATH."""
    for prefix in (Path(sys.prefix), Path(__file__).resolve().parents[1] / ".venv"):
        if (prefix / "etcd/usr/bin/etcd").exists():
            return str(prefix / "etcd/usr/bin/etcd")
    return shutil.which("etcd")


class EtcdServer:
    """One etcd server on ports of its own; what it holds is in `directory` and outlives `kill`."""

    def __init__(self, directory: Path) -> None:
        binary = find_etcd()
        if binary is None:
            pytest.skip("no etcd here: tools/get_etcd.sh fetches one")
        pytest.importorskip("etcd3gw")
        self._directory = directory
        self._binary = binary
        self.port = free_port()
        self._peer_port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> EtcdServer:
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [self._binary, "--name", "one", "--data-dir", str(self._directory / "etcd"), "--log-level", "error"]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "etcd.out").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=kept)
        deadline = time.monotonic() + START_S
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            try:
                with opener.open(f"{self.url}/health", timeout=2) as response:
                    if b"true" in response.read():
                        return self
            except OSError:
                pass
            assert self.process.poll() is None, (self._directory / "etcd.out").read_text()
            assert time.monotonic() < deadline, "etcd did not start in time"
            time.sleep(0.1)

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
