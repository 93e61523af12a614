"""P81: other SGLang releases build the backend by both names and call every method of it.

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

VERSIONS = ("0.5.9", "0.5.14", "0.5.21", "0.5.22")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_release_builds_it_and_calls_every_method(version: str, start_node: Callable[..., NodeProcess]) -> None:
    wheel = Path(sys.prefix) / f"sglang-{version}"
    if not wheel.is_dir():
        pytest.skip(f"sglang {version} is not in {wheel}: make versions")
    node = start_node(dram="16MiB")
    env = environment() | {"SGLANG_USE_CPU_ENGINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(wheel), str(SHIMS), env["PYTHONPATH"]])
    command = [sys.executable, "-m", "tests.sglang.interface_check", node.socket]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["version"].startswith(version)
    assert result | {"version": ""} == {"version": "", "missing": [], "dynamic": [], "mooncake": []}
