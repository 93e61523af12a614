"""`python -m benchmarks.streams`: KV from prefill to decode, layer by layer while prefill computes, or all of it after that.

Two processes, real engines over tcp on loopback, every byte checksummed at both ends. Prefill is simulated: layer n is computed
when n times the time of a layer has passed, as on a device that needs none of the host's processors; `--busy` burns one in
Python meanwhile. The time of a layer is such that computing all of them takes 0.5, 1 and 2 times as long as sending them, which
is measured in the same rounds. A trial ends when the source knows that all has arrived.

Nothing can be faster than the longer of computing and sending; the tail is what is left to wait for when the last layer has
been computed, in times that a layer takes to be sent. Sending alone is put against one write of the engine, without checksums,
sessions and layers.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from statistics import median

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness import Row, interleave, report, save, spread, write_table
from hicache_mooncake import TransferEngine
from hicache_mooncake.messenger.layout import Layout
from hicache_mooncake.messenger.stream import Buffers, Messenger

KIB = 1 << 10
LAYERS = 32
RATIOS = (0.5, 1.0, 2.0)
_PATIENT_S = 120.0


def soon() -> float:
    return time.monotonic() + _PATIENT_S


def layout_of(part_bytes: int) -> Layout:
    return Layout("bench", "bfloat16", 64, ((part_bytes, part_bytes),) * LAYERS)


class End:
    """An engine with the pages of one request. Some of them are neighbours."""

    def __init__(self, name: str, transport: str, part_bytes: int, pages: int) -> None:
        self.layout, self.pages = layout_of(part_bytes), pages
        self.engine = TransferEngine(name, transports=(transport,))
        length = part_bytes * pages
        self.region, self.view = self.engine.allocate(2 * LAYERS * length, name="pool")
        self.bases = [[self.region.address + (2 * layer + part) * length for part in range(2)] for layer in range(LAYERS)]
        self.places = [page ^ 4 for page in range(pages)]
        self.messenger = Messenger(self.engine)

    def close(self) -> None:
        self.messenger.close()
        self.engine.close()


def destination(transport: str, part_bytes: int, pages: int) -> None:
    """The other process: takes what comes until its standard input ends."""
    end = End("decode", transport, part_bytes, pages)
    end.view[:] = bytes(len(end.view))
    end.messenger.accept(end.layout, lambda stream: Buffers(end.bases, end.places))
    print(end.engine.address, flush=True)
    for line in sys.stdin:
        end.messenger.incoming(line.strip(), soon()).result(soon())
    end.close()


@contextlib.contextmanager
def decode(options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    arguments = ["--destination", "--transport", options.transport, "--part", str(options.part), "--pages", str(options.pages)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.streams", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


class Trials:
    """The prefill side."""

    def __init__(self, end: End, other: subprocess.Popen[str], busy: bool) -> None:
        assert other.stdin is not None
        assert other.stdout is not None
        self._end, self._orders, self._busy = end, other.stdin, busy
        self._address = other.stdout.readline().strip()
        self._number = 0
        self.computed: list[float] = []
        self.arrived: list[float] = []
        """Of the last trial: when each layer was and had."""

    def run(self, layer_s: float, streaming: bool) -> float:
        """Seconds from the beginning of prefill until all has arrived."""
        end = self._end
        self._number += 1
        request = f"request-{self._number}"
        self._orders.write(request + "\n")
        self._orders.flush()
        self.computed, self.arrived = [], [0.0] * LAYERS
        began = time.perf_counter()
        stream = end.messenger.send(self._address, request, end.layout, end.bases, end.pages, deadline=soon())

        def push(layer: int) -> None:
            stream.push(layer, 0, end.places, lambda _: self._note(layer, began))

        for layer in range(LAYERS):
            self._compute_until(began + (layer + 1) * layer_s)
            self.computed.append(time.perf_counter() - began)
            if streaming:
                push(layer)
        if not streaming:
            for layer in range(LAYERS):
                push(layer)
        stream.finish(1)
        stream.wait(soon())
        return time.perf_counter() - began

    def plain_write(self) -> float:
        """Seconds for the same bytes by one write of the engine."""
        end = self._end
        peer = end.engine.connect(self._address, soon())
        there = peer.wait_region("pool", soon())
        began = time.perf_counter()
        peer.write([(end.region.address, there.address, there.length)], soon()).wait()
        return time.perf_counter() - began

    def _note(self, layer: int, began: float) -> None:
        self.arrived[layer] = time.perf_counter() - began

    def _compute_until(self, until: float) -> None:
        while (left := until - time.perf_counter()) > 0:
            if not self._busy:
                time.sleep(left)


def measure(trials: Trials, rounds: int, progress: Progress) -> tuple[list[Row], dict[str, tuple[list[float], list[float]]]]:
    """Rows, and of the median trials of ratio 1 when layers were computed and had arrived."""
    trials.run(0.0, True)
    calibrated = median(trials.run(0.0, True) for _ in range(5))
    seen: dict[str, list[tuple[float, list[float], list[float]]]] = {"streamed": [], "after prefill": []}

    def trial(ratio: float, name: str) -> Callable[[int], float]:
        def run(_round: int) -> float:
            took = trials.run(ratio * calibrated / LAYERS, name == "streamed")
            if ratio == 1.0:
                seen[name].append((took, trials.computed, trials.arrived))
            return took * 1e3

        return run

    contenders = {f"{name} {ratio:g}": trial(ratio, name) for ratio in RATIOS for name in ("streamed", "after prefill")}
    contenders["sending alone"] = lambda _: trials.run(0.0, True) * 1e3
    contenders["plain write"] = lambda _: trials.plain_write() * 1e3
    figures = interleave(contenders, rounds, progress, "streams")
    sending = median(figures["sending alone"])
    plain, alone = median(figures["plain write"]), figures["sending alone"]
    rows = [Row("sending alone", sending, plain, "ms", "ms, a plain write", spread(alone), None, True)]
    for ratio in RATIOS:
        compute = ratio * calibrated * 1e3
        floor = max(compute, sending)
        what = f"compute {compute:.0f} ms, sending {sending:.0f} ms"
        for name, promised in (("streamed", 0.9), ("after prefill", None)):
            total = figures[f"{name} {ratio:g}"]
            rows.append(Row(f"{what}: {name}", median(total), floor, "ms", "ms, the longer", spread(total), promised, True))
        tail = (median(figures[f"streamed {ratio:g}"]) - compute) / (sending / LAYERS)
        # While it computes at most as much can have been sent as there was time for.
        allowed = 1.5 + max(0.0, sending - compute) / (sending / LAYERS)
        rows.append(Row(f"{what}: tail when streamed", tail, allowed, "layers", "layers allowed", 0.0, 1.0, True))
    typical = {name: sorted(each)[len(each) // 2] for name, each in seen.items()}
    return rows, {name: (computed, arrived) for name, (_, computed, arrived) in typical.items()}


def plot(lines: dict[str, tuple[list[float], list[float]]]) -> str:
    """When each layer was computed, and when it had arrived, as SVG."""
    width, height, left, top = 640, 320, 50, 20
    end = max(max(arrived) for _, arrived in lines.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + left + 150} {height + top + 45}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#444"/>',
        f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">milliseconds since prefill began</text>',
        f'<text x="14" y="{top + height / 2}" text-anchor="middle" transform="rotate(-90 14 {top + height / 2})">layers</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + share * width
        parts.append(f'<text x="{x:.0f}" y="{top + height + 18}" text-anchor="middle">{share * end * 1e3:.0f}</text>')
        parts.append(
            f'<text x="{left - 6}" y="{top + height * (1 - share) + 4:.0f}" text-anchor="end">{share * LAYERS:.0f}</text>'
        )
    series = {"computed": ("#444", lines["streamed"][0])}
    series |= {"arrived, streamed": ("#1a7f37", lines["streamed"][1])}
    series |= {"arrived, after prefill": ("#c4432b", lines["after prefill"][1])}
    for number, (name, (colour, times)) in enumerate(series.items()):
        points = " ".join(
            f"{left + at / end * width:.1f},{top + height * (1 - (layer + 1) / LAYERS):.1f}" for layer, at in enumerate(times)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + width + 8}" y="{top + 20 + 18 * number}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part", type=int, default=128, help="KiB of a page's K, and of its V")
    parser.add_argument("--pages", type=int, default=32, help="of the request, a multiple of 8")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--busy", action="store_true", help="prefill burns a processor in Python")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/performance.md")
    parser.add_argument("--plot", type=Path, help="SVG of when layers were computed and had arrived")
    parser.add_argument("--destination", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args()
    if options.pages < 8 or options.pages % 8:
        parser.error("--pages: a multiple of 8")
    if options.destination:
        destination(options.transport, options.part * KIB, options.pages)
        return
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    end = End("prefill", options.transport, options.part * KIB, options.pages)
    end.view[:] = bytes(range(256)) * (len(end.view) // 256)
    with contextlib.closing(end), decode(options) as other, Progress(*columns, transient=True) as progress:
        rows, lines = measure(Trials(end, other, options.busy), options.rounds, progress)
    mib = LAYERS * 2 * options.part * options.pages >> 10
    title = f"medians of {options.rounds} interleaved rounds; {LAYERS} layers, {mib} MiB, {options.transport}"
    report(rows, title)
    print(f"saved as {save(rows, 'streams', path=options.out)}")
    if options.plot:
        options.plot.write_text(plot(lines))
    if options.docs:
        print(f"written into {write_table(rows, title, 'benchmarks.streams')}")


if __name__ == "__main__":
    main()
