"""`make bench`: what moves pages, each part against its ceiling and against its peers, in minutes.

Ceilings: a plain memcpy of the same pages between page-aligned buffers; the same call beside an idle interpreter; a bare
`sendmsg`/`recv_into` loop over loopback; fio on the disk of the cold tier. Every byte that ours moves is checksummed on the
way; the others check nothing. The peers are the Mooncake store (PyPI `mooncake-transfer-engine-non-cuda`), over tcp LMCache's
server (PyPI `lmcache`), and on the disk SGLang's `file` and `nixl` backends and NIXL's files (PyPI `nixl`), each but SGLang in
an environment of its own: `--mooncake PYTHON`, `--lmcache PYTHON` and `--nixl PYTHON` name the Python that has it. Redis and
Valkey take part where `redis-server` and `valkey-server` are in PATH, and a dict behind pickles over TCP everywhere.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import cold, cpu, here, models, pd_payload, posts, stores, there
from benchmarks.geometry import PRESETS
from benchmarks.harness import Bench, Row, report, save, write_table

SECTIONS = {
    "shm": here.shared_memory,
    "batches": here.batches,
    "models": models.models,
    "heads": here.single_heads,
    "busy": here.busy,
    "lookup": here.lookups,
    "first": here.first_use,
    "latency": here.latency,
    "same-host": there.same_host,
    "tcp": there.tcp,
    "push": there.push,
    "stores": stores.general_stores,
    "peers": there.peers,
    "cpu": cpu.cpu,
    "posts": posts.posts,
    "pd": pd_payload.pd,
    "cold": cold.cold,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=[], help="which parts; all without any")
    parser.add_argument("--rounds", type=int, default=5, help="more for figures to publish")
    parser.add_argument(
        "--mooncake", metavar="PYTHON", default="", help="the Python that has mooncake-transfer-engine(-non-cuda)"
    )
    parser.add_argument("--lmcache", metavar="PYTHON", default="", help="the Python that has lmcache")
    parser.add_argument("--nixl", metavar="PYTHON", default="", help="the Python that has nixl")
    parser.add_argument("--disk", metavar="DIR", default="/var/tmp", help="where the cold tier is measured; not a tmpfs")
    parser.add_argument(
        "--model", action="append", choices=list(PRESETS), default=[], help="of the section models; all without any"
    )
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/performance.md")
    options = parser.parse_args()
    pythons = {"mooncake": options.mooncake, "lmcache": options.lmcache, "nixl": options.nixl}
    for name, python in pythons.items():
        if python and not shutil.which(python):
            parser.error(f"--{name} {python}: there is no such program")
    rows: list[Row] = []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        found = {name: shutil.which(python) or "" for name, python in pythons.items()}
        bench = Bench(progress, options.rounds, disk=options.disk, models=options.model, **found)
        for name in options.sections or SECTIONS:
            rows += SECTIONS[name](bench)
    title = f"medians of {options.rounds} interleaved rounds; ours with every byte checksummed"
    report(rows, title)
    missed = [row.what for row in rows if row.missed]
    if missed:
        print(f"{len(missed)} targets missed, printed in red. docs/performance.md says where the time goes.")
    for name, why in bench.skipped.items():
        print(f"{name} did not take part: {why}")
    print(f"saved as {save(rows, 'quick', bench, options.out)}")
    if options.docs:
        print(f"written into {write_table(rows, title)}")


if __name__ == "__main__":
    main()
