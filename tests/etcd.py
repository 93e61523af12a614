"""A real etcd server for tests, where `tools/get_etcd.sh` could get one."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache_mooncake.testing.local import free_port

BINARY = next(
    (path for path in (Path(sys.prefix) / "etcd/usr/bin/etcd", Path(shutil.which("etcd") or "/none")) if path.is_file()), None
)
_REASON = (
    "no etcd server here: tools/get_etcd.sh gets one"
    if BINARY is None
    else "the package etcd3gw is not installed"
    if importlib.util.find_spec("etcd3gw") is None
    else ""
)
needs_etcd = pytest.mark.skipif(bool(_REASON), reason=_REASON)
"""For tests that start one."""


class EtcdProcess:
    """One server with a data directory of its own. After `kill` it may be started again with what it had."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self._peer_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> EtcdProcess:
        assert BINARY is not None
        url, peer = f"http://{self.address}", f"http://127.0.0.1:{self._peer_port}"
        command = [str(BINARY), "--name", "test", "--data-dir", str(self.directory / "data")]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"test={peer}"]
        log = self.directory / "etcd.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + 30
        while not self._healthy():
            assert self._process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)
        return self

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=1) as answer:
                return json.load(answer)["health"] == "true"
        except (OSError, urllib.error.URLError, ValueError):
            return False


@contextmanager
def etcd_server(directory: Path) -> Iterator[EtcdProcess]:
    """A server that answers, ended on leaving."""
    server = EtcdProcess(directory)
    try:
        yield server.start()
    finally:
        server.kill()
