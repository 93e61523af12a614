"""`hicache-mooncake conductor` as a process: what it refuses, how it ends, and how it explains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from hicache_mooncake.testing.conductor import ConductorProcess
from hicache_mooncake.testing.fake_engine import FakeEngineSettings
from hicache_mooncake.testing.fake_processes import FakeEngineProcess
from tests.conftest import START_S, environment, wait_until


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hicache_mooncake.cli", "conductor", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=START_S, check=False)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--worker", "localhost:30000"], "http://host:port"),
        (["--prefill", "http://h:1"], "give both"),
        (["--worker", "http://h:1", "--worker", "http://h:1/"], "same name or address"),
        (["--policy", "best"], "pool-aware"),
        (["--admission", "never"], "predictive"),
        (["--listen", "nowhere"], "nowhere"),
        (["--max-body", "large"], "large"),
        (["--admin-token-file", "/nonexistent"], "--admin-token-file"),
        (["--key-file", "/nonexistent"], "/nonexistent"),
        (["explain"], "--prompt"),
        (["explain", "--prompt", "a", "--router", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_refused_at_once_with_what_to_do(args: list[str], problem: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_without_its_http_library_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError('no such module', name='aiohttp')\n")
    found = environment()
    found["PYTHONPATH"] = f"{tmp_path}:{found['PYTHONPATH']}"
    command = [sys.executable, "-m", "hicache_mooncake.cli", "conductor"]
    done = subprocess.run(command, capture_output=True, text=True, env=found, timeout=START_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'hicache-mooncake[conductor]'" in done.stderr


def test_it_explains_and_ends_when_what_runs_has_ended(tmp_path: Path) -> None:
    settings = FakeEngineSettings(decode_token_s=0.1)
    with FakeEngineProcess("engine", settings, log=tmp_path / "engine.log") as engine:
        router = ConductorProcess([("--worker", engine.url)], log=tmp_path / "router.log", env=environment())
        with router:
            shown = run("explain", "--router", router.url, "--prompt", "the quick brown fox " * 40)
            assert shown.returncode == 0, shown.stderr
            assert "pages" in shown.stdout
            assert f"goes to {engine.url.removeprefix('http://')}" in shown.stdout
            answers: list[bytes] = []
            body = b'{"text": "a", "sampling_params": {"max_new_tokens": 20}}'

            def ask() -> None:
                with urllib.request.urlopen(f"{router.url}/generate", body, timeout=START_S) as response:
                    answers.append(response.read())

            asking = threading.Thread(target=ask)
            asking.start()
            wait_until(lambda: any(worker["in_flight"] for worker in router.workers()), START_S, "a request in the engine")
            os.kill(router.descendants()[0], signal.SIGTERM)
            asking.join(START_S)
            assert len(answers) == 1
            wait_until(lambda: not router.running, START_S, "the end of the router")
            assert router.returncode == 0
            with pytest.raises(OSError, match=r"refused|reset"):
                router.workers()
