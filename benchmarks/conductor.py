"""A section of `make bench-master`: how long the conductor thinks about one request."""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

from hicache_master.conductor.admission import Admission
from hicache_master.conductor.cost import LLAMA3_70B, Costs, DecodeCost, Links, PrefillCost
from hicache_master.conductor.decide import Conductor, Decision, Request
from hicache_master.conductor.policies import PoolAware
from hicache_master.conductor.prefixes import COLD, DRAM, Prefixes
from rich.progress import Progress

from benchmarks.harness import Row, spread

ENGINES = 20
PAGES = 250
IN_BOOKS = 400
ROUND = 50


def _conductor() -> Conductor:
    """20 prefill and 20 decode engines with 20 requests each in the books."""
    costs = Costs(
        PrefillCost(LLAMA3_70B.prefill_prior(1e15, 0.02)),
        DecodeCost((0.015, 0.004, 1e-8)),
        Links(25e9, 6e9),
        64,
        64 * LLAMA3_70B.token_bytes,
        cold_page_s=0.004,
    )
    conductor = Conductor(PoolAware(), costs, Prefixes(), Admission("predictive", 1e6, 1e6), unconfirmed_s=1e9)
    for number in range(ENGINES):
        conductor.add_prefill(f"prefill-{number}", "1", 0.0, store=f"prefill-{number}")
        conductor.add_decode(f"decode-{number}")
    for number in range(IN_BOOKS):
        conductor.route(Request(f"before {number}", [number.to_bytes(32, "big")], 64), 0.0)
        if number % 2:
            conductor.prefilled(f"before {number}", 0.0)
    return conductor


def _hold(conductor: Conductor, scattered: bool, rng: random.Random) -> list[bytes]:
    """A prompt of which two store nodes have a long prefix each; or of which each page is somewhere else, some on disks."""
    keys = [rng.randbytes(32) for _ in range(PAGES)]
    if scattered:
        for key in keys:
            for number in rng.sample(range(ENGINES), 3):
                conductor.prefixes.stored(f"prefill-{number}", "1", [key], rng.choice((DRAM, DRAM, COLD)))
    else:
        conductor.prefixes.stored("prefill-3", "1", keys[:200], DRAM)
        conductor.prefixes.stored("prefill-7", "1", keys[:120], DRAM)
    return keys


def decisions(progress: Progress, options: argparse.Namespace) -> list[Row]:
    rng = random.Random(0)
    shapes = {"two holders": False, "every page elsewhere": True}
    task = progress.add_task("decisions", total=options.rounds * len(shapes))
    rows = []
    for what, scattered in shapes.items():
        conductor = _conductor()
        times = []
        for number in range(options.rounds):
            prompts = [_hold(conductor, scattered, rng) for _ in range(ROUND)]
            requests = [Request(f"{number} {at}", keys, 64 * PAGES) for at, keys in enumerate(prompts)]
            started = time.thread_time()
            routed = [conductor.route(request, 0.0) for request in requests]
            times.append((time.thread_time() - started) / ROUND * 1e3)
            assert all(isinstance(each, Decision) for each in routed)
            for request in requests:
                conductor.failed(request.id, 0.0)
            progress.advance(task)
        name = f"conductor: a decision, {ENGINES} + {ENGINES} engines, {PAGES} pages, {what}"
        rows.append(Row(name, median(times), 1.0, "ms of CPU", "ms allowed", spread(times), 1.0, True))
    progress.remove_task(task)
    return rows
