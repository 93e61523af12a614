"""P81: other SGLang releases build the backend by both names, call every method of it, and find that it keeps the contract.

Their wheels (without dependencies) lie in `sglang-VERSION` folders of the virtual environment: `make versions` puts them there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, NodeProcess, environment
from tests.sglang.conftest import SHIMS

VERSIONS = ("0.5.9", "0.5.14", "0.5.20", "0.5.21", "0.5.22")


def release(version: str) -> dict[str, str]:
    """Environment of a process that imports this release. Skips the test where it was not fetched."""
    wheel = Path(sys.prefix) / f"sglang-{version}"
    if not wheel.is_dir():
        pytest.skip(f"sglang {version} is not in {wheel}: make versions")
    env = environment() | {"SGLANG_USE_CPU_ENGINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(wheel), env["PYTHONPATH"]])
    return env


@pytest.mark.parametrize("version", VERSIONS)
def test_the_release_builds_it_and_calls_every_method(version: str, start_node: Callable[..., NodeProcess]) -> None:
    env = release(version)
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(SHIMS)])
    node = start_node(dram="16MiB")
    command = [sys.executable, "-m", "tests.sglang.interface_check", node.socket]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["version"].startswith(version)
    assert result | {"version": ""} == {"version": "", "missing": [], "dynamic": [], "mooncake": []}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", [VERSIONS[0], *(pytest.param(version, marks=pytest.mark.slow) for version in VERSIONS[1:])])
def test_the_release_finds_that_it_keeps_the_contract(version: str, tmp_path: Path) -> None:
    """The conformance suite with the release's own classes; what it has shown is recorded for that release."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.sglang.old_releases", "-p", "no:cacheprovider"]
    command += ["-W", "ignore", "--basetemp", str(tmp_path / "inner"), "tests/sglang/test_conformance.py::TestMemfd"]
    done = subprocess.run(command, env=release(version), cwd=ROOT, capture_output=True, text=True, timeout=890, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
