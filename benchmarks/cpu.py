"""CPU seconds for each GB that is moved, by process: the engine's, its mover's, and the nodes'."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.harness import Bench, Memory, Row, memcpy_rate, pool, spread
from benchmarks.ranks import BATCH, KIB, MIB, POOL_BYTES, BareLoop, Rank, size_text
from hicache_mooncake import protocol as p

_REPEAT = {64 * KIB: 16, MIB: 2}


def used(pid: int) -> float:
    """CPU seconds of a process so far, of those of its threads that still run."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _each(pids: dict[str, int], work: Callable[[], float]) -> dict[str, float]:
    """CPU seconds a GB of each process during `work`, which returns GB."""
    before = {who: used(pid) for who, pid in pids.items()}
    moved = work()
    return {who: (used(pid) - before[who]) / moved for who, pid in pids.items()}


def _pid_of(rank: Rank) -> int:
    report = rank.client.status()
    assert report is not None
    return int(report.node["pid"])


def cpu(bench: Bench) -> list[Row]:
    """Shared memory against memcpy; tcp against each end of a bare loop."""
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    bare = BareLoop(source, target)
    me = os.getpid()
    figures: dict[str, list[float]] = {}
    ceilings: dict[str, str] = {}
    with pool(nodes=2, extra=("--replicate-after", "0")) as (near, far):
        writer, reader = Rank(far, source), Rank(near, target)
        roles = (("store", writer, "store"), ("load", writer, "load"), ("remote", reader, "load"))
        movers = {who: int(rank.client.mover_pids()[role] or 0) for who, rank, role in roles}
        pids = {"engine": me, "node": _pid_of(writer)}

        def note(what: str, ceiling: str, values: dict[str, float]) -> None:
            for who, value in values.items():
                figures.setdefault(f"{what}, {who}", []).append(value)
                ceilings[f"{what}, {who}"] = ceiling

        def round_of(size: int) -> None:
            repeat, gigabytes = _REPEAT[size], BATCH * size / 1e9
            name = size_text(size)

            def repeated(step: Callable[[], object]) -> Callable[[], float]:
                def work() -> float:
                    for _ in range(repeat):
                        step()
                    return repeat * gigabytes

                return work

            kept: list[tuple[bytes, bytes]] = []

            def store() -> None:
                kept.append((os.urandom(16), os.urandom(p.HASH_BYTES * BATCH)))
                writer.move("store", *kept[-1], size)

            memcpy = _each({"memcpy": me}, repeated(lambda: memcpy_rate(source, target, size, BATCH)))
            note(f"memcpy {name}", "", memcpy)
            stored = _each(pids | {"mover": movers["store"]}, repeated(store))
            note(f"shm store {name}", f"memcpy {name}, memcpy", stored)
            loaded = _each(pids | {"mover": movers["load"]}, repeated(lambda: writer.move("load", *kept[-1], size)))
            note(f"shm load {name}", f"memcpy {name}, memcpy", loaded)
            loop = _each({"receiver": me, "sender": bare.pid}, repeated(lambda: bare.rate(size, BATCH)))
            note(f"bare loop {name}", "", loop)
            reader.wait_for(*kept[-1])
            ends = {"engine": me, "mover": movers["remote"], "node": _pid_of(writer)}
            over = _each(ends, repeated(lambda: reader.move("load", *kept[-1], size)))
            note(f"tcp load {name}", f"bare loop {name}, receiver", {who: over[who] for who in ("engine", "mover")})
            note(f"tcp load {name}", f"bare loop {name}, sender", {"node that sends": over["node"]})
            for namespace, _ in kept:
                writer.client.clear(namespace)

        task = bench.progress.add_task("CPU seconds", total=bench.rounds + 1)
        for number in range(bench.rounds + 1):
            for size in _REPEAT:
                round_of(size)
            if not number:
                figures.clear()  # a warm-up
            bench.progress.advance(task)
        bench.progress.remove_task(task)
        writer.client.close()
        reader.client.close()
    bare.close()
    source.close()
    target.close()
    return [
        Row(
            f"CPU: {what}",
            median(values),
            median(figures[ceilings[what]]),
            "s/GB",
            ceilings[what].rpartition(", ")[2],
            spread(values),
            None,
            True,
        )
        for what, values in figures.items()
        if ceilings[what]
    ]
