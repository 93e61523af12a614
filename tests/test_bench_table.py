"""What `make bench` prints and writes: ratios, missed targets, and a table that replaces the former one and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Row


def test_a_ratio_is_better_the_larger_it_is() -> None:
    rate = Row("rate", 3.0, 4.0, "GB/s", "memcpy", 0.0, 0.7)
    time = Row("time", 0.2, 0.15, "ms", "ms allowed", 0.0, 1.0, lower_is_better=True)
    assert (rate.ratio, time.ratio) == (0.75, pytest.approx(0.75))
    assert not rate.missed
    assert time.missed
    assert not Row("untold", 0.1, 4.0, "GB/s", "memcpy", 0.0).missed


def test_a_table_replaces_the_former_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter <!-- y: begin --><!-- y: end -->\n")
    for lines in (["a", "b"], ["c"]):
        harness.write_between("x", lines, path)
        text = "\n".join(
            ["before", "<!-- x: begin -->", *lines, "<!-- x: end -->", "after <!-- y: begin --><!-- y: end -->", ""]
        )
        assert path.read_text() == text
    with pytest.raises(RuntimeError, match="no place"):
        harness.write_between("z", ["d"], path)


def test_the_page_has_a_place_for_each_table() -> None:
    page = (harness.ROOT / "docs" / "performance.md").read_text()
    for marker in ("make bench", "benchmarks.where", "benchmarks.streams", "benchmarks.engines"):
        assert page.count(f"<!-- {marker}: begin -->") == page.count(f"<!-- {marker}: end -->") == 1
