"""`hicache-mooncake replay`: what each way to route requests would have made of a trace."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hicache_master.conductor.replay import Arrival, Outcome, Replay, Setup, read_trace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hicache_mooncake.cli import charts

_UNUSABLE = 2
_COLUMNS = 120
"""Of tables that do not go to a terminal."""
_TTFT_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
_TIMES = 60
"""Points of a line over time."""
_BLOCKS = " ▁▂▃▄▅▆▇█"

Run = tuple[str, Setup, Outcome]


def run_replay(
    trace: Path, setups: Sequence[tuple[str, Setup]], requests: int | None, plot: Path | None, *, as_json: bool
) -> int:
    """Returns the exit status. Setups come with the name that they have in the tables."""
    try:
        arrivals = read_trace(trace, requests)
    except (OSError, ValueError) as error:
        print(f"hicache-mooncake: --trace: {error}", file=sys.stderr)
        return _UNUSABLE
    runs = _replay(arrivals, setups)
    if as_json:
        print(json.dumps([figures(*run) for run in runs]))
    else:
        show(runs, Console(width=None if sys.stdout.isatty() else _COLUMNS))
    if plot is not None:
        try:
            written = charts.write(plot, _charts(runs))
        except OSError as error:
            print(f"hicache-mooncake: --plot: {error}", file=sys.stderr)
            return _UNUSABLE
        print(f"wrote {written}", file=sys.stderr)
    return 0


def _replay(arrivals: Sequence[Arrival], setups: Sequence[tuple[str, Setup]]) -> list[Run]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    runs: list[Run] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for name, setup in setups:
            task = progress.add_task(name, total=len(arrivals))

            def tell(done: int, task: object = task) -> None:
                progress.update(task, completed=done)  # type: ignore[arg-type]

            runs.append((name, setup, Replay(setup).run(arrivals, tell)))
    return runs


def figures(name: str, setup: Setup, outcome: Outcome) -> dict[str, object]:
    """What --json prints of a run. Times in seconds; None where there is nothing to say."""
    shares = {f"p{share}": outcome.quantile_s(share / 100) for share in (50, 90, 99)}
    return {
        "name": name,
        "setup": asdict(setup),
        "requests": outcome.requests,
        "ttft_s": {key: _finite(value) for key, value in {"mean": outcome.mean_ttft_s, **shares}.items()},
        "tbt_mean_s": _finite(outcome.mean_tbt_s),
        "hit_ratio": outcome.hit_ratio,
        "fetched_pages": outcome.fetched_pages,
        "prefill_busy_s": outcome.busy_s,
        "prefill_max_over_mean": outcome.imbalance,
        "rejected": outcome.rejected,
        "wasted_prefill_share": outcome.wasted_share,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(runs: Sequence[Run], console: Console) -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("TTFT (s)", no_wrap=True)
    for heading in ("mean", "p50", "p90", "p99", "hits", "busy", "max/mean", "rejected", "late", "wasted"):
        table.add_column(heading, justify="right")
    for name, _, outcome in runs:
        times = (outcome.mean_ttft_s, *(outcome.quantile_s(share) for share in (0.5, 0.9, 0.99)))
        table.add_row(
            name,
            *(f"{seconds:.3f}" if math.isfinite(seconds) else "-" for seconds in times),
            f"{outcome.hit_ratio:.1%}",
            f"{sum(outcome.busy_s) / outcome.requests:.3f}",
            f"{outcome.imbalance:.2f}",
            f"{outcome.rejections:,}",
            f"{outcome.late:,}",
            f"{outcome.wasted_share:.1%}",
        )
    console.print(table)
    console.print("busy: s of a prefill engine for each request; late: rejected after their prefill; wasted: prefill for those")
    console.print()
    cdf = Table(box=None, header_style="bold")
    cdf.add_column("TTFT at most", no_wrap=True)
    for bound in _TTFT_S:
        cdf.add_column(f"{bound:g} s", justify="right")
    cdf.add_column("load of each prefill engine")
    for name, _, outcome in runs:
        count = max(1, len(outcome.ttft_s))
        shares = (sum(seconds <= bound for seconds in outcome.ttft_s) / count for bound in _TTFT_S)
        most = max(outcome.busy_s) or 1.0
        bars = "".join(_BLOCKS[round(busy / most * (len(_BLOCKS) - 1))] for busy in outcome.busy_s)
        cdf.add_row(name, *(f"{share:.0%}" for share in shares), bars)
    console.print(cdf)


def _over_time(outcome: Outcome, most: int) -> list[tuple[float, float]]:
    """(minutes, mean of the requests that were being decoded over `most`)."""
    width_s = max(1e-9, (outcome.arrived_s[-1] - outcome.arrived_s[0]) / _TIMES)
    seen: dict[int, list[int]] = {}
    for at_s, count in zip(outcome.arrived_s, outcome.decoding, strict=True):
        seen.setdefault(int((at_s - outcome.arrived_s[0]) / width_s), []).append(count)
    return [((number + 0.5) * width_s / 60, sum(counts) / len(counts) / most) for number, counts in sorted(seen.items())]


def _charts(runs: Sequence[Run]) -> list[charts.Chart]:
    lines = {}
    for name, _, outcome in runs:
        ordered = sorted(outcome.ttft_s)
        step = max(1, len(ordered) // 400)
        lines[name] = [(seconds, (at + 1) / len(ordered)) for at, seconds in enumerate(ordered)][::step] + [
            (seconds, 1.0) for seconds in ordered[-1:]
        ]
    reasons = ["prefill", "decode", "decode, after prefill"]
    drawn: list[charts.Chart] = [
        charts.Lines("TTFT", "seconds", "share of requests", lines),
        charts.Bars(
            "Load of the prefill engines",
            "busy seconds",
            [str(number) for number in range(max(len(outcome.busy_s) for _, _, outcome in runs))],
            {name: outcome.busy_s for name, _, outcome in runs},
        ),
    ]
    if any(outcome.rejections for _, _, outcome in runs):
        rejected = {name: [float(outcome.rejected.get(reason, 0)) for reason in reasons] for name, _, outcome in runs}
        drawn.append(charts.Bars("Rejections", "requests", reasons, rejected))
        most = max(max(outcome.decoding) for _, _, outcome in runs) or 1
        loads = {name: _over_time(outcome, most) for name, _, outcome in runs}
        drawn.append(charts.Lines("Decode load", "minutes", f"of {most} requests", loads, linear=True))
    return drawn
