"""One tiny model of a family for the whole session, rows for the support matrix, and the servers' logs where a test fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.tiny_model import Family, make_tiny_model
from tests.e2e.support import RUNNING
from tests.sglang.matrix import pytest_runtest_makereport, pytest_sessionfinish, supports  # noqa: F401 (what pytest looks for)


def pytest_exception_interact(report: pytest.TestReport) -> None:
    report.sections += [(f"end of the log of {process.name}", process.log_tail()) for process in RUNNING]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    base = tmp_path_factory.mktemp("models")

    @cache
    def make(family: Family) -> Path:
        return make_tiny_model(base / family, family)

    return make
