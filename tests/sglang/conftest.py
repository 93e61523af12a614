"""SGLang in the test's own process, on the CPU. Everything here is skipped where sglang is not installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

import hicache_mooncake.testing

SHIMS = Path(hicache_mooncake.testing.__file__).parent / "sglang_cpu" / "shims"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)


if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    if torch.version.cuda is None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        sys.path.insert(0, str(SHIMS))
        spec = importlib.util.spec_from_file_location("hicache_shims", SHIMS / "sitecustomize.py")
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
