"""Section `stores` of `make bench`: the same pages through general stores, over the same loopback.

A node is given 128 pages and a rank loads 128 of another node's, each page checksummed; the others check nothing.
"""

from __future__ import annotations

import contextlib

from benchmarks.harness import Bench, Memory, Row, compare, pool
from benchmarks.ranks import BATCH, KIB, MIB, Pages, Rank, size_text
from benchmarks.rival import promised, stores
from benchmarks.there import Pusher

SIZES = (64 * KIB, MIB, 4 * MIB)
_ROUNDS = 3
"""At most: these peers are slow, and as far behind in every one."""
_MEMORY = BATCH * SIZES[-1]


def general_stores(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    source, target = Memory(_MEMORY), Memory(_MEMORY)
    with pool(nodes=2, dram=2 * _MEMORY, extra=("--replicate-after", "0")) as (near, far), stores(bench) as theirs:
        writer, reader = Rank(far, source), Rank(near, target)
        with contextlib.closing(Pusher(far, source)) as pusher:
            for size in SIZES:
                pages = Pages(writer, reader, size, count=BATCH)
                contenders = {"load": pages.load, "give": lambda _, size=size: pusher.rate(size, BATCH)}
                for rival in theirs:
                    contenders |= rival.contenders(size, BATCH)
                figures = bench.interleave(contenders, f"stores {size_text(size)}", min(bench.rounds, _ROUNDS))
                what = f"{BATCH} x {size_text(size)}"
                for rival in theirs:
                    for name, mine, op in ((f"give {what} to a node", "give", "store"), (f"load {what}", "load", "load")):
                        other = figures[f"{rival.name} {op}"]
                        least = promised(rival, op, size)
                        rows.append(compare(f"stores, tcp: {name}", figures[mine], other, "GB/s", rival.name, least))
        writer.client.close()
        reader.client.close()
    source.close()
    target.close()
    return rows
