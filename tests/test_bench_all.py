"""`make bench-all`: what each section is told, what becomes of one that fails, and which targets were met."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import everything
from benchmarks.everything import SECTIONS, Result, Section, judge, measure
from benchmarks.harness import Row, as_records
from benchmarks.router import promises
from tests.conftest import START_S


def test_each_section_runs_by_itself_and_gets_the_peers_that_it_knows(tmp_path: Path) -> None:
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)
    assert {"quick-tcp", "quick-stores", "quick-models", "master-conductor", "router-latency", "scale"} <= set(names)
    peers = {"mooncake": "m", "lmcache": "", "nixl": "n"}
    out = str(tmp_path / "x.json")
    command = Section("quick", "tcp").command(Path(out), peers, disk="d", small=True)
    told = ["tcp", "--out", out, "--mooncake", "m", "--nixl", "n", "--disk", "d", "--rounds", "3"]
    assert command[1:] == ["-m", "benchmarks.quick", *told]
    assert Section("streams").command(Path(out), peers, disk="d")[1:] == ["-m", "benchmarks.streams", "--out", out]


def test_targets_are_counted_and_those_that_were_missed_are_named() -> None:
    rows = [
        Row("met", 2.0, 2.0, "GB/s", "memcpy", 0.0, 0.9),
        Row("missed", 1.0, 2.0, "GB/s", "memcpy", 0.0, 0.9),
        Row("late", 2.0, 1.0, "ms", "ms allowed", 0.0, 1.0, True),
        Row("untold", 1.0, 2.0, "GB/s", "memcpy", 0.0),
    ]
    result = judge("some", 1.0, {"rows": as_records(rows), "skipped": {"Redis": "absent"}})
    assert (result.rows, result.met, result.skipped) == (4, 1, {"Redis": "absent"})
    assert result.missed == ["missed: 0.50 of memcpy", "late: 0.50 of ms allowed"]
    printed = StringIO()
    console = Console(width=132, file=printed)
    everything.show([result, Result("other", 2.0, trouble="ended with 3: see [log]")], console)
    shown = printed.getvalue()
    assert "1 targets met, 2 missed, 1 sections without a result" in shown
    assert "no Redis: absent" in shown
    assert "see [log]" in shown


@pytest.mark.parametrize(
    ("script", "limit_s", "trouble"),
    [
        ("raise SystemExit(3)", START_S, "ended with 3"),
        ("pass", START_S, "ended with 0"),
        ("import time; time.sleep(600)", 0.5, "did not end within 0.5 s"),
    ],
)
def test_a_section_that_fails_says_so_and_leaves_no_older_result(
    tmp_path: Path, script: str, limit_s: float, trouble: str
) -> None:
    out = tmp_path / "some.json"
    out.write_text('{"rows": []}')
    result = measure(Section("quick", "tcp"), [sys.executable, "-c", script], out, limit_s)
    assert result.trouble.startswith(trouble)
    assert str(out.with_suffix(".log")) in result.trouble
    assert not out.exists()


def test_a_section_that_ends_well_is_judged_by_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    script = "import sys; open(sys.argv[1], 'w').write('{\"rows\": []}'); print('hello')"
    result = measure(Section("streams"), [sys.executable, "-c", script, str(out)], out)
    assert (result.name, result.trouble, result.rows) == ("streams", "", 0)
    assert out.with_suffix(".log").read_text() == "hello\n"


def test_what_is_promised_of_the_router_is_in_its_rows() -> None:
    figures = {
        "latency 300 tokens ours": {"added_p50_ms": 1.0},
        "latency 4,000 tokens ours": {"added_p50_ms": -0.2},
        "latency 300 tokens sglang-router": {"added_p50_ms": 9.0},
        "streams ours": {"events_s": 80.0},
        "streams direct": {"events_s": 100.0},
    }
    rows = promises(figures)
    assert [row.missed for row in rows] == [False, False, True]
    assert [row.ratio for row in rows if row.unit == "events/s"] == [0.8]
    assert promises({}) == []
