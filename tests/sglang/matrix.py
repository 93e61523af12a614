"""The fixture `supports`: which model family, layout and parallel shape a test has shown to work, or to be refused and why.

A row counts only when its test has passed, set-up and teardown included. At the end of the session the rows are merged into
the JSON file that the environment variable HICACHE_MATRIX names, each with the SGLang release it was seen on;
tools/support_matrix.py makes docs/support-matrix.md of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from importlib.metadata import version
from pathlib import Path

import pytest

from tools import support_matrix

Row = tuple[str, str, str]
Supports = Callable[..., None]

_SAID = pytest.StashKey[list[tuple[Row, str]]]()
_PASSED = pytest.StashKey[bool]()
_SHOWN = pytest.StashKey[dict[Row, str]]()


@pytest.fixture
def supports(request: pytest.FixtureRequest) -> Supports:
    """`supports(family=..., layout=..., shape=..., outcome="works" | "refused: why")`; a bad outcome raises ValueError."""
    said = request.node.stash.setdefault(_SAID, [])

    def say(*, family: str, layout: str, shape: str, outcome: str = support_matrix.WORKS) -> None:
        support_matrix.check_outcome(outcome)
        said.append(((family, layout, shape), outcome))

    return say


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed and not hasattr(report, "wasxfail")
    elif report.when == "teardown" and report.passed and item.stash.get(_PASSED, False):
        shown = item.config.stash.setdefault(_SHOWN, {})
        for row, outcome in item.stash.get(_SAID, []):
            if shown.setdefault(row, outcome) != outcome:
                report.outcome = "failed"
                report.longrepr = f"{row}: another test has shown {shown[row]!r}, and this one {outcome!r}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, shown = os.environ.get("HICACHE_MATRIX"), session.config.stash.get(_SHOWN, {})
    if path and shown:
        release = version("sglang")
        support_matrix.merge(Path(path), {(*row, release): outcome for row, outcome in shown.items()})
