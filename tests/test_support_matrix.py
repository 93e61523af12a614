"""The support matrix: only tests that passed make rows, and the document says what the rows say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment
from tools import support_matrix

TESTS = """
import pytest

def test_passes(supports):
    supports(family="MHA", layout="page_first", shape="one rank", outcome="works")
    supports(family="MHA", layout="page_head", shape="one rank", outcome="refused: no page_head here")

def test_fails(supports):
    supports(family="fails", layout="x", shape="one rank")
    assert False

@pytest.fixture
def bad_teardown():
    yield
    raise OSError("teardown")

def test_fails_in_teardown(supports, bad_teardown):
    supports(family="teardown", layout="x", shape="one rank")

@pytest.mark.xfail(strict=True)
def test_expected_to_fail(supports):
    supports(family="xfail", layout="x", shape="one rank")
    assert False

@pytest.mark.xfail
def test_unexpectedly_passes(supports):
    supports(family="xpass", layout="x", shape="one rank")

def test_skipped(supports):
    supports(family="skip", layout="x", shape="one rank")
    pytest.skip("no")

def test_contradicts(supports):
    supports(family="MHA", layout="page_first", shape="one rank", outcome="refused: on a whim")

def test_says_nonsense(supports):
    with pytest.raises(ValueError):
        supports(family="nonsense", layout="x", shape="one rank", outcome="perhaps")
"""


def test_rows_of_passed_tests_are_merged_into_the_file(tmp_path: Path) -> None:
    (tmp_path / "test_rows.py").write_text(TESTS)
    matrix = tmp_path / "sub" / "matrix.json"
    support_matrix.merge(matrix, {("MHA", "page_first", "one rank", "0.5.0"): "works"})
    release = tmp_path / "sglang-9.9.9.dist-info"
    release.mkdir()
    (release / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    env = environment() | {"HICACHE_MATRIX": str(matrix)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.sglang.matrix", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "another test has shown 'works'" in done.stdout, done.stdout + done.stderr
    assert re.search(r"1 failed, .*2 errors", done.stdout.splitlines()[-1]), done.stdout
    rows = json.loads(matrix.read_text())
    assert [(row["sglang"], row["layout"], row["outcome"]) for row in rows] == [
        ("0.5.0", "page_first", "works"),
        ("9.9.9", "page_first", "works"),
        ("9.9.9", "page_head", "refused: no page_head here"),
    ]
    assert [path.name for path in matrix.parent.iterdir()] == ["matrix.json"]


ROWS = {
    ("MHA", "page_first", "one rank", "0.5.9"): "works",
    ("MHA", "page_first", "one rank", "0.5.14"): "works",
    ("MHA", "page_first", "TP 16", "0.5.14"): "works",
    ("MHA", "page_first", "TP 2", "0.5.14"): "works",
    ("MHA", "layer_first", "one rank", "0.5.9"): "works",
    ("MHA", "layer_first", "one rank", "0.5.14"): "works",
    ("MXFP8", "page_first", "one rank", "0.5.14"): "refused: its pool has no flat pages",
    ("MXFP4", "page_first", "one rank", "0.5.14"): "refused: its pool has no flat pages",
}


def test_what_fares_alike_is_one_line() -> None:
    lines = support_matrix.render(ROWS).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table == [
        "| family | layouts | shapes | 0.5.14 | 0.5.9 |",
        "|---|---|---|---|---|",
        "| MHA | layer_first, page_first | one rank | yes | yes |",
        "|  | page_first | TP 2; TP 16 | yes | – |",
        "| MXFP4 | page_first | one rank | no [1] | – |",
        "| MXFP8 | page_first | one rank | no [1] | – |",
    ]
    assert "1. its pool has no flat pages" in lines


def test_check_fails_when_the_document_lags_behind(tmp_path: Path) -> None:
    source, document = tmp_path / "m.json", tmp_path / "m.md"
    files = ["--json", str(source), "--output", str(document)]
    assert support_matrix.main(files) == 2
    support_matrix.merge(source, ROWS)
    assert support_matrix.main([*files, "--check"]) == 1
    assert support_matrix.main(files) == 0
    assert support_matrix.main([*files, "--check"]) == 0
    support_matrix.merge(source, {("MHA", "page_first", "one rank", "0.5.9"): "refused: too old"})
    assert support_matrix.main([*files, "--check"]) == 1


def test_a_row_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outcome"):
        support_matrix.check_outcome("refused: ")
    source = tmp_path / "m.json"
    source.write_text('[{"family": "a", "layout": "b", "shape": "c", "sglang": "1", "outcome": "maybe"}]')
    with pytest.raises(ValueError, match="maybe"):
        support_matrix.load(source)
