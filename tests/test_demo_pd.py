"""What the demo of prefill and decode says of what it has seen."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from hicache_mooncake.cli.demo_pd import HICACHE, NOTHING, POOL, PROMPTS, ROUNDS, USERS, Run, Turn, plot_png, report
from hicache_mooncake.testing.sglang_cpu.servers import Answer, Cached


def run(name: str, found: Callable[[int], int], *, says: int = 7) -> Run:
    """Of every prompt, which has 100 tokens more in each round, `found(round)` tokens are found."""

    def turn(number: int) -> Turn:
        length = 100 * (number + 1)
        cached = Cached(storage=found(number))
        return Turn((1,) * length, Answer((says,), "", length, cached, 0.1 + (length - found(number)) / 1000, 1.0))

    return Run(name, [[turn(number) for _ in range(USERS)] for number in range(ROUNDS)])


def four(*, pool: Callable[[int], int] = lambda number: 100 * number, says: int = 7) -> list[Run]:
    return [
        run(NOTHING, lambda number: 0),
        run(HICACHE, lambda number: 40 * number if number < 5 else 0),
        run(PROMPTS, lambda number: 80 * number),
        run(POOL, pool, says=says),
    ]


def told(runs: list[Run], directory: Path) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=120)
    code = report(console, runs, kept=[], directory=directory)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_what_was_found_is_told_and_plotted(tmp_path: Path) -> None:
    code, text = told(four(), tmp_path)
    assert code == 0
    assert "turn  2:   300 /   240 /   120" in text
    assert "turn 10:  2700 /  2160 /     0" in text
    assert "All 30 greedy answers are the same in all four." in text
    tokens, times = text.split("tokens found, of at most 3000")[1].split("TTFT, median")
    for plot, last in ((tokens, "h" + " " * 42 + "o" + " " * 10 + "●"), (times, "●")):
        rows = [line.partition("│")[2] for line in plot.splitlines() if "│" in line]
        assert len(rows) == ROUNDS
        assert last in rows[-1]


def test_other_answers_and_a_pool_that_finds_nothing_more_are_failures(tmp_path: Path) -> None:
    code, text = told(four(says=8), tmp_path)
    assert code == 1
    assert "greedy answers differ" in text
    code, text = told(four(pool=lambda number: 0), tmp_path)
    assert code == 1
    assert "did not find more" in text


def test_the_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = plot_png(four(), tmp_path / "pd.png")
    assert image is not None
    assert image.read_bytes().startswith(b"\x89PNG")
