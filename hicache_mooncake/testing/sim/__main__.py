"""`python -m hicache_mooncake.testing.sim`: many seeds with a progress bar, or one with its trace."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import Options, Violation, run

console = Console(stderr=True)


def main(
    seeds: Annotated[str, typer.Option(help="FIRST:LAST, both included")] = "1:100",
    seed: Annotated[int | None, typer.Option(help="only this one")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="print every event of it, to the standard output")] = False,
    minutes: Annotated[float, typer.Option(help="go on past LAST until so much time is over; 0: stop at LAST")] = 0.0,
    trouble_s: Annotated[float | None, typer.Option(help="virtual seconds of faults, instead of what the seed says")] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="do not stop at the first seed that fails")] = False,
) -> None:
    """Run simulated clusters. Exit status 1 when something did not hold; the command that replays it is printed."""
    options = Options(trouble_s=trouble_s)
    extra = "" if trouble_s is None else f" --trouble-s {trouble_s:g}"
    if seed is not None:
        raise typer.Exit(0 if _one(seed, options, extra, trace=trace) else 1)
    first, _, last = seeds.partition(":")
    try:
        numbers = range(int(first), int(last or first) + 1)
    except ValueError:
        raise typer.BadParameter(f"{seeds!r} is not FIRST:LAST") from None
    until = time.monotonic() + 60 * minutes
    failed = 0
    columns = (TextColumn("seed {task.fields[seed]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(numbers), seed=first)
        number = numbers.start
        while number < numbers.stop or time.monotonic() < until:
            progress.update(bar, seed=number)
            if not _one(number, options, extra):
                failed += 1
                if not keep_going:
                    break
            number += 1
            progress.update(bar, completed=number - numbers.start, total=max(len(numbers), number - numbers.start))
    console.print(f"{number - numbers.start + (failed > 0 and not keep_going)} seeds, {failed} failed")
    if failed:
        raise typer.Exit(1)


def _one(seed: int, options: Options, extra: str, *, trace: bool = False) -> bool:
    try:
        result = run(seed, options, print if trace else None)
    except Exception as error:
        if not isinstance(error, Violation):
            traceback.print_exc()
        sys.stdout.flush()
        console.print(f"seed {seed} fails: {error or type(error).__name__}", markup=False, soft_wrap=True)
        console.print(f"    python -m hicache_mooncake.testing.sim --seed {seed} --trace{extra}", markup=False, soft_wrap=True)
        return False
    if trace:
        print(f"trace {result.trace_hash}, {result.events} events, {result.virtual_s:.0f} s of virtual time")
        print(", ".join(f"{name} {count}" for name, count in sorted(result.figures.items())))
    return True


if __name__ == "__main__":
    typer.run(main)
