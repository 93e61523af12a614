"""Charts in one picture, side by side: a PNG where matplotlib is installed, else an SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 260, 64, 30
_LEAST = 1e-3
"""Where a logarithmic axis begins at the lowest."""


@dataclass(frozen=True)
class Lines:
    """Of points (x, y); x on a logarithmic axis unless it is `linear`, y from 0 to 1. `dots`: of these the points alone are
    drawn."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    dots: frozenset[str] = frozenset()
    linear: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.lines)


@dataclass(frozen=True)
class Bars:
    """Groups of bars, one in each group for each name."""

    title: str
    y: str
    groups: Sequence[str]
    bars: Mapping[str, Sequence[float]]

    @property
    def names(self) -> list[str]:
        return list(self.bars)


Chart = Lines | Bars


def write(path: Path, charts: Sequence[Chart]) -> Path:
    """Returns what was written: with the suffix .svg where a PNG cannot be made. Raises OSError."""
    if path.suffix.lower() != ".svg" and _write_with_matplotlib(path, charts):
        return path
    path = path.with_suffix(".svg")
    path.write_text(svg(charts), encoding="utf-8")
    return path


def _write_with_matplotlib(path: Path, charts: Sequence[Chart]) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(charts), figsize=(5.2 * len(charts), 4), squeeze=False)
    for chart, axis in zip(charts, axes[0], strict=True):
        axis.set_title(chart.title)
        axis.set_ylabel(chart.y)
        for number, name in enumerate(chart.names):
            colour = _COLOURS[number % len(_COLOURS)]
            if isinstance(chart, Lines):
                points = chart.lines[name]
                kind = "o" if name in chart.dots else "-"
                axis.plot([x for x, _ in points], [y for _, y in points], kind, label=name, color=colour)
            else:
                width = 0.8 / len(chart.names)
                places = [group + (number + 0.5) * width - 0.4 for group in range(len(chart.groups))]
                axis.bar(places[: len(chart.bars[name])], chart.bars[name], width, label=name, color=colour)
        if isinstance(chart, Lines):
            axis.set_xscale("linear" if chart.linear else "log")
            axis.set_xlabel(chart.x)
        else:
            axis.set_xticks(range(len(chart.groups)), chart.groups)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, format=path.suffix.lstrip(".") or "png", dpi=120)
    pyplot.close(figure)
    return True


def svg(charts: Sequence[Chart]) -> str:
    names = max((len(chart.names) for chart in charts), default=0)
    wide, high = len(charts) * (_WIDTH + _LEFT + 20), _TOP + _HEIGHT + 48 + 16 * names
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        parts.append(f'<g transform="translate({number * (_WIDTH + _LEFT + 20) + _LEFT},{_TOP})">')
        parts += _text(_WIDTH / 2, -10, chart.title, anchor="middle")
        parts.append(f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>')
        parts += _lines(chart) if isinstance(chart, Lines) else _bars(chart)
        for row, name in enumerate(chart.names):
            y = _HEIGHT + 44 + 16 * row
            parts.append(f'<rect x="0" y="{y - 9}" width="12" height="10" fill="{_COLOURS[row % len(_COLOURS)]}"/>')
            parts += _text(18, y, name)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start") -> Iterator[str]:
    yield f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _y_axis(label: str, most: float) -> Iterator[str]:
    for part in range(5):
        yield from _text(-6, _HEIGHT * (1 - part / 4) + 4, f"{most * part / 4:.3g}", anchor="end")
    yield from _text(4, 14, label)


def _lines(chart: Lines) -> Iterator[str]:
    values = [x for points in chart.lines.values() for x, _ in points] or [1.0]
    if chart.linear:
        most = max(*values, _LEAST)

        def place(x: float) -> float:
            return x / most

        ticks = [(part / 4, f"{most * part / 4:.3g}") for part in range(5)]
    else:
        low = math.floor(math.log10(max(_LEAST, min(values))))
        high = max(low + 1, math.ceil(math.log10(max(_LEAST, *values))))

        def place(x: float) -> float:
            return (math.log10(max(_LEAST, x)) - low) / (high - low)

        ticks = [((power - low) / (high - low), f"{10.0**power:g}") for power in range(low, high + 1)]
    for at, text in ticks:
        yield from _text(at * _WIDTH, _HEIGHT + 15, text, anchor="middle")
    yield from _text(_WIDTH / 2, _HEIGHT + 28, chart.x, anchor="middle")
    yield from _y_axis(chart.y, 1.0)
    for number, (name, points) in enumerate(chart.lines.items()):
        places = [(f"{place(x) * _WIDTH:.1f}", f"{(1 - y) * _HEIGHT:.1f}") for x, y in points]
        colour = _COLOURS[number % len(_COLOURS)]
        if name in chart.dots:
            for x, y in places:
                yield f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>'
            continue
        line = " ".join(f"{x},{y}" for x, y in places)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _bars(chart: Bars) -> Iterator[str]:
    most = max((value for values in chart.bars.values() for value in values), default=0.0) or 1.0
    group_width = _WIDTH / max(1, len(chart.groups))
    width = group_width * 0.8 / max(1, len(chart.bars))
    for group, label in enumerate(chart.groups):
        yield from _text((group + 0.5) * group_width, _HEIGHT + 15, label, anchor="middle")
    yield from _y_axis(chart.y, most)
    for number, values in enumerate(chart.bars.values()):
        for group, value in enumerate(values):
            x = group * group_width + 0.1 * group_width + number * width
            tall = value / most * _HEIGHT
            colour = _COLOURS[number % len(_COLOURS)]
            yield f'<rect x="{x:.1f}" y="{_HEIGHT - tall:.1f}" width="{width:.1f}" height="{tall:.1f}" fill="{colour}"/>'
