"""`hicache-mooncake replay --through-pool`: how many pages of a trace real store nodes have, beside what theory says."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hicache_master.conductor.replay import read_trace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hicache_mooncake.cli import charts
from hicache_mooncake.config_values import MIN_DRAM_BYTES
from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.node.policy import POLICIES
from hicache_mooncake.testing.pool_replay import BLOCK_TOKENS, Replayed, Shape, replay
from hicache_mooncake.testing.sglang_cpu.processes import ProcessError

_UNUSABLE = 2
_FAILED = 1
_COLUMNS = 120

Run = tuple[Shape, Replayed]


def run_pool_replay(
    trace: Path,
    nodes: Sequence[int],
    capacities: Sequence[float],
    evictions: Sequence[str],
    requests: int | None,
    plot: Path | None,
    *,
    watermarks: bool,
    as_json: bool,
) -> int:
    """Returns the exit status. `capacities`: millions of tokens a node."""
    try:
        pages = [arrival.pages for arrival in read_trace(trace, requests)]
        shapes = _shapes(nodes, capacities, evictions, max(map(len, pages)), exact=not watermarks)
    except (OSError, ValueError) as error:
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        return _UNUSABLE
    try:
        runs = _replay(pages, shapes)
    except (AssertionError, ProcessError, RuntimeError) as error:
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        return _FAILED
    if as_json:
        print(json.dumps([{"shape": asdict(shape), **asdict(replayed)} for shape, replayed in runs]))
    else:
        show(runs, Console(width=None if sys.stdout.isatty() else _COLUMNS))
    if plot is not None:
        try:
            print(f"wrote {charts.write(plot, [_chart(runs)])}", file=sys.stderr)
        except OSError as error:
            print(f"hicache-mooncake: --plot: {error}", file=sys.stderr)
            return _UNUSABLE
    return 0


def _shapes(
    nodes: Sequence[int], capacities: Sequence[float], evictions: Sequence[str], longest: int, *, exact: bool
) -> list[Shape]:
    """Raises ValueError. Several nodes are replayed twice: each alone, and as a pool."""
    least = max(MIN_DRAM_BYTES // GRANULE, longest)
    for capacity in capacities:
        if capacity * 1e6 / BLOCK_TOKENS < least:
            raise ValueError(
                f"--capacity {capacity:g}: {least} pages must have room on each node, since the longest prompt has {longest}: "
                f"give {least * BLOCK_TOKENS / 1e6:.3f} at least"
            )
    for eviction in evictions:
        if eviction not in POLICIES:
            raise ValueError(f"--eviction {eviction}: none of {', '.join(POLICIES)}")
    return [
        Shape(count, round(capacity * 1e6), shared, eviction, exact)
        for eviction in evictions
        for capacity in capacities
        for count in nodes
        for shared in ((True,) if count == 1 else (False, True))
    ]


def _replay(pages: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Run]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    runs: list[Run] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for shape in shapes:
            task = progress.add_task(_name(shape), total=len(pages))

            def tell(done: int, task: object = task) -> None:
                progress.update(task, completed=done)  # type: ignore[arg-type]

            runs.append((shape, replay(pages, shape, tell)))
    return runs


def _name(shape: Shape) -> str:
    kind = "one node" if shape.nodes == 1 else f"{shape.nodes} nodes, {'one pool' if shape.shared else 'each alone'}"
    return f"{kind}, {shape.tokens / 1e6:g} M tokens each, {shape.eviction}"


def show(runs: Sequence[Run], console: Console) -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("pages of the trace that the pool had", no_wrap=True)
    for heading in ("hits", "share", "plain LRU", "to that", "from other nodes", "to alone", "s"):
        table.add_column(heading, justify="right")
    alone: dict[tuple[int, int, str], int] = {}
    for shape, replayed in runs:
        same = shape.nodes, shape.tokens, shape.eviction
        to_alone = replayed.hits / alone[same] if alone.get(same) and shape.shared else None
        if not shape.shared:
            alone[same] = replayed.hits
        table.add_row(
            _name(shape),
            f"{replayed.hits:,}",
            f"{replayed.hits / replayed.pages:.2%}",
            f"{replayed.expected:,}",
            f"{replayed.hits / replayed.expected:.3f}" if replayed.expected else "-",
            f"{replayed.remote:,}" if shape.nodes > 1 and shape.shared else "-",
            f"{to_alone:.2f} x" if to_alone is not None else "",
            f"{replayed.seconds:.0f}",
        )
    console.print(table)
    requests, pages = runs[0][1].requests, runs[0][1].pages
    console.print(f"{requests:,} requests of {pages:,} pages; every page that counts as a hit was loaded and compared.")


def _chart(runs: Sequence[Run]) -> charts.Lines:
    """Shares of hits over the room of all nodes together, ours and theory's."""
    lines: dict[str, list[tuple[float, float]]] = {}
    ours: set[str] = set()
    for shape, replayed in runs:
        kind = shape.eviction if shape.nodes == 1 else f"{shape.eviction}, {'one pool' if shape.shared else 'each alone'}"
        ours.add(kind)
        room = shape.nodes * shape.tokens / 1e6
        lines.setdefault(kind, []).append((room, replayed.hits / replayed.pages))
        theory = "plain LRU, exact" if shape.shared else "plain LRU, each alone, exact"
        lines.setdefault(theory, []).append((room, replayed.expected / replayed.pages))
    ordered = {name: sorted(set(points)) for name, points in lines.items()}
    return charts.Lines("Hits", "millions of tokens, all nodes", "share of the pages", ordered, frozenset(ours))
