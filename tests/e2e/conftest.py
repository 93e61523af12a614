"""One tiny model of a family for the whole session, and the servers' logs where a test fails."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.tiny_model import Family, make_tiny_model
from tests.e2e.support import RUNNING


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"end of the log of {process.name}", process.log_tail()) for process in RUNNING]
    return report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts servers for more than the first proof")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    base = tmp_path_factory.mktemp("models")

    @cache
    def make(family: Family) -> Path:
        return make_tiny_model(base / family, family)

    return make
