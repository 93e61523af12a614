"""The table of faults: only tests that ran and passed make rows, and every fault that a test claims to show has one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, environment
from tests.faults.elsewhere import ELSEWHERE
from tools import failures

TESTS = """
import pytest

@pytest.mark.fault("it fails at first", sees="little", part="host")
@pytest.mark.parametrize("how", [1.0, 3.0, 2.0])
def test_measures(measured, how):
    measured("the gap", how)

@pytest.mark.fault("one of several is not shown", sees="nothing", part="host")
@pytest.mark.parametrize("how", [True, False])
def test_fails_once(how):
    assert how

@pytest.mark.fault("it is skipped", sees="nothing", part="host")
def test_skipped():
    pytest.skip("not here")

@pytest.fixture
def bad_teardown():
    yield
    raise OSError("teardown")

@pytest.mark.fault("its end fails", sees="nothing", part="host")
def test_fails_in_teardown(bad_teardown):
    pass

@pytest.mark.fault("expected to fail", sees="nothing", part="host")
@pytest.mark.xfail
def test_xpass():
    pass

@pytest.mark.fault("a call is timed", sees="a miss", part="host")
def test_calls(tmp_path):
    import time
    from hicache_mooncake.client.client import PoolClient
    from hicache_mooncake.config import load_settings
    client = PoolClient(load_settings({}, {}, {"socket": str(tmp_path / "none"), "node": "external"})[0], "test")
    assert client.exists(b"n" * 16, b"h" * 32) == 0
    client.close()
"""


def row(test: str, **measured: float) -> failures.Row:
    return failures.Row(f"fault of {test}", "misses", "host", test, measured)


def test_rows_of_passed_tests_are_merged_and_those_of_failed_ones_go(tmp_path: Path) -> None:
    (tmp_path / "test_rows.py").write_text(TESTS)
    path = tmp_path / "sub" / "failures.json"
    failures.merge(
        path, [row("another.py::test_it", gap=1.0), row("test_rows.py::test_fails_once"), row("test_rows.py::test_measures")]
    )
    env = environment() | {"HICACHE_FAILURES": str(path)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.faults.recording", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    rows = {each["test"]: each for each in json.loads(path.read_text())}
    assert set(rows) == {"another.py::test_it", "test_rows.py::test_measures", "test_rows.py::test_calls"}, done.stdout
    assert rows["test_rows.py::test_measures"]["measured"] == {"the gap": 3.0}
    assert rows["test_rows.py::test_measures"]["fault"] == "it fails at first"
    assert rows["test_rows.py::test_calls"]["measured"]["longest call"] >= 0
    assert rows["another.py::test_it"]["measured"] == {"gap": 1.0}
    assert [each.name for each in path.parent.iterdir()] == ["failures.json"]


def test_a_row_names_its_test_and_what_was_measured() -> None:
    text = failures.render([row("tests/test_b.py::test_it", gap=12.3, call=0.0421), row("tests/test_a.py::test_other")])
    table = [line for line in text.splitlines() if line.startswith("| fault of")]
    assert table == [
        "| fault of tests/test_a.py::test_other | misses | – | [`test_other`](../tests/test_a.py) |",
        "| fault of tests/test_b.py::test_it | misses | call 0.042 s; gap 12 s | [`test_it`](../tests/test_b.py) |",
    ]


def test_check_fails_when_the_document_lags_behind_or_a_test_is_gone(tmp_path: Path) -> None:
    source, document = tmp_path / "f.json", tmp_path / "f.md"
    files = ["--json", str(source), "--output", str(document), "--root", str(tmp_path)]
    assert failures.main(files) == 2
    (tmp_path / "test_a.py").write_text("class TestIt:\n    def test_one(self): ...\n\ndef test_two(): ...\n")
    failures.merge(source, [row("test_a.py::TestIt::test_one"), row("test_a.py::test_two")])
    assert failures.main([*files, "--check"]) == 1
    assert failures.main(files) == 0
    assert failures.main([*files, "--check"]) == 0
    failures.merge(source, [row("test_a.py::test_two", gap=2.0)])
    assert failures.main([*files, "--check"]) == 1
    assert failures.main(files) == 0
    (tmp_path / "test_a.py").write_text("def test_two(): ...\n")
    assert failures.main([*files, "--check"]) == 1
    assert failures.main(files) == 0
    assert [row.test for row in failures.load(source)] == ["test_a.py::test_two"]
    assert failures.main([*files, "--check"]) == 0


def test_the_page_in_docs_is_what_was_recorded() -> None:
    assert failures.main(["--check"]) == 0


def test_every_fault_that_a_test_claims_to_show_was_tried() -> None:
    recorded = {row.test: (row.fault, row.sees, row.part) for row in failures.load(failures.DOCS / "failures.json")}
    claimed = ELSEWHERE | failures.claimed(ROOT / "tests")
    assert {test for test, said in claimed.items() if recorded.get(test) != said} == set(), (
        "run these with HICACHE_FAILURES=docs/failures.json, and then tools/failures.py"
    )
    assert set(recorded) == set(claimed)


def test_claims_are_found_by_their_marker(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        '@pytest.mark.fault("a " "b", sees="c", part="host")\n@other\ndef test_one(): ...\n\n@other\ndef test_two(): ...\n'
    )
    assert failures.claimed(tmp_path / "tests") == {"tests/test_a.py::test_one": ("a b", "c", "host")}
