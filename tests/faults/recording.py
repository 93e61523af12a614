"""Which faults have been tried, what users see of each, and how long: the marker `fault` and the fixture `measured`.

    @pytest.mark.fault("a node is killed under load", sees="misses for its pages", part="host")
    def test_...(measured): ...
        measured("longest call", 0.3)

`part` is one of `tools.failures.PARTS`. A row counts only when its test has passed, set-up and teardown included. The
longest storage call of a test is measured for every row by itself. At the end of the session the rows are merged into the JSON
file that the environment variable HICACHE_FAILURES names; tools/failures.py makes docs/failures.md of it. Tests without the
marker have their row in `tests.faults.elsewhere`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.client.client import PoolClient
from tests.faults.elsewhere import ELSEWHERE
from tools import failures

Measured = Callable[[str, float], None]

LONGEST = "longest call"

_MEASURED = pytest.StashKey[dict[str, float]]()
_SHOWN = pytest.StashKey[dict[str, failures.Row]]()
_FAILED = pytest.StashKey[set[str]]()
_PASSED = pytest.StashKey[bool]()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """`measured("longest gap", seconds)`: goes into the test's row; of several under one name the longest."""
    kept = request.node.stash.setdefault(_MEASURED, {})

    def say(what: str, seconds: float) -> None:
        kept[what] = max(kept.get(what, 0.0), seconds)

    return say


def base_id(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]


def fault_of(item: pytest.Item) -> failures.Claim | None:
    """What this test claims to show, if anything."""
    marker = item.get_closest_marker("fault")
    if marker is not None:
        return str(marker.args[0]), str(marker.kwargs["sees"]), str(marker.kwargs["part"])
    return ELSEWHERE.get(base_id(item))


@contextlib.contextmanager
def timed(kept: dict[str, float]) -> Iterator[None]:
    """The longest call of any rank in this process goes into `kept`."""
    methods = {name: getattr(PoolClient, name) for name in ("find", "transfer")}

    def watch(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return methods[name](*args, **kwargs)
            finally:
                kept[LONGEST] = max(kept.get(LONGEST, 0.0), time.monotonic() - began)

        return call

    for name in methods:
        setattr(PoolClient, name, watch(name))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(PoolClient, name, method)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(what, sees, part): a row of docs/failures.md: what is done, what users see")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    if "HICACHE_FAILURES" not in os.environ or fault_of(item) is None:
        return (yield)
    with timed(item.stash.setdefault(_MEASURED, {})):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fault = fault_of(item)
    if fault is None:
        return report
    if report.when == "call":
        item.stash[_PASSED] = report.passed and not hasattr(report, "wasxfail")
    if report.failed:
        item.config.stash.setdefault(_FAILED, set()).add(base_id(item))
    elif report.when == "teardown" and item.stash.get(_PASSED, False):
        shown = item.config.stash.setdefault(_SHOWN, {})
        row = shown.setdefault(base_id(item), failures.Row(*fault, base_id(item), {}))
        for what, seconds in item.stash.get(_MEASURED, {}).items():
            row.measured[what] = max(row.measured.get(what, 0.0), seconds)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, shown = os.environ.get("HICACHE_FAILURES"), session.config.stash.get(_SHOWN, {})
    failed = session.config.stash.get(_FAILED, set())
    if path and (shown or failed):
        failures.merge(Path(path), [row for test, row in shown.items() if test not in failed], failed)
