"""No part does more work for a page than it did: counts, which repeat, compared with stored ones."""

from __future__ import annotations

import json

import pytest

from tests.work import PYTHON, STORED, measured, movers

WORSE, BETTER = 1.1, 0.8
SLACK = 4.0
"""Of small figures."""
SLACK_CALLS = 16.0
"""Who is waited for is asked once or twice more, on a busy machine."""


def test_a_page_costs_no_more_work_than_it_did() -> None:
    stored = json.loads(STORED.read_text()).get(PYTHON)
    if stored is None:
        pytest.skip(f"nothing is stored for Python {PYTHON}: python -m tests.work --write")
    with movers():
        figures = measured()
    assert figures.keys() == stored.keys()
    slack = {name: SLACK_CALLS if name.endswith("calls") else SLACK for name in stored}
    worse = {
        name: (before, figures[name])
        for name, before in stored.items()
        if figures[name] > before + max(slack[name], (WORSE - 1) * before)
    }
    assert not worse, "(stored, now); if it is worth it: python -m tests.work --write, and say why in the commit"
    better = {
        name: (before, figures[name])
        for name, before in stored.items()
        if figures[name] < before - max(slack[name], (1 - BETTER) * before)
    }
    assert not better, "(stored, now): keep it with python -m tests.work --write"
