"""Pipeline stages that see a request at different times load the same prefix, and what one was told of waits for the other."""

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
from tests.sglang.pp_stages_check import WRITTEN_PAGES
from tests.sglang.trees import PAGE


@pytest.mark.slow
@pytest.mark.parametrize(("promise_s", "pages"), [(60, min(WRITTEN_PAGES)), (0, 0)])
def test_stages_agree_on_what_all_have_and_a_promise_lasts_until_the_late_one_asks(
    start_node: Callable[..., NodeProcess], tmp_path: Path, promise_s: float, pages: int
) -> None:
    """Without a promise the early stage's pages are gone by then, and both load nothing."""
    env = environment() | {"SGLANG_USE_CPU_ENGINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SHIMS), env["PYTHONPATH"]])
    nodes = [start_node(name, dram="16MiB") for name in "ab"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.pp_stages_check"]
    stages = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), node.socket, str(promise_s)],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"stage-{rank}.log").open("w"),
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    try:
        outputs = [stage.communicate(timeout=240)[0] for stage in stages]
    finally:
        for stage in stages:
            stage.kill()
            stage.wait()
    for rank, stage in enumerate(stages):
        assert stage.returncode == 0, (tmp_path / f"stage-{rank}.log").read_text()[-3000:]
    early, late = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert early["evicted"] > 0
    assert (early["found"], late["found"]) == WRITTEN_PAGES
    assert early["loaded"] == late["loaded"] == pages * PAGE
    assert early["right"]
    assert late["right"]
    assert late["broken"] == {}
