"""`python -m benchmarks.router real`: the same chats behind our router and behind SGLang's, before real SGLang servers on CPUs
that share a pool. Some 10 minutes, 8 GB of memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.router_load import Chats, hold
from benchmarks.router_stage import Ours, Router, Sglang, environment
from hicache_mooncake.testing.sglang_cpu.pool import MasterProcess, NodeProcess
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, free_port, stop_all
from hicache_mooncake.testing.sglang_cpu.servers import (
    MODEL_NAME,
    SglangServer,
    flush_cache,
    metric_sums,
    pool_caching,
    start_servers,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from benchmarks.router import Stage

SERVERS = 2
SLO_S = 2.0
LOAD = Chats(
    count=24,
    turns=4,
    systems=3,
    system_words=100,
    turn_words=(30, 90),
    answer=16,
    think_s=(0.2, 1.0),
    start_s=6.0,
    model=MODEL_NAME,
)


def real(stage: Stage) -> None:
    from benchmarks.router import chat_figures, show_chats, shuffled

    with tempfile.TemporaryDirectory(prefix="hicache-bench-model-") as folder:
        model = make_tiny_model(Path(folder) / "llama")
        with servers(model, stage.folder) as (engines, nodes, master), contextlib.ExitStack() as stack:
            workers = [("--worker", f"{engine.url},store={node.name}") for engine, node in zip(engines, nodes, strict=True)]
            args = ["--prefill-rate", "1500", "--token-bytes", "4096", "--tokenizer", str(model), "--master", master.address]
            routers: dict[str, Router] = {
                "ours": stack.enter_context(
                    Ours(workers, log=stage.folder / "real-ours.log", args=args, env=environment(), reads=True)
                )
            }
            if stage.sglang:
                urls = [engine.url for engine in engines]
                routers["sglang-router"] = stack.enter_context(Sglang(urls, log=stage.folder / "real-sglang-router.log"))
            found: dict[str, list[dict[str, float]]] = {name: [] for name in routers}
            for number in range(stage.rounds + 1):  # the first is a warm-up
                for place, name in enumerate(shuffled(list(routers), number)):
                    for engine in engines:
                        flush_cache(engine.url)
                    load = replace(LOAD, seed=number, text=1_000_000 * (number * len(routers) + place + 1))
                    before = [prefilled(engine) for engine in engines]
                    outcomes = asyncio.run(hold(routers[name].url, load))
                    computed = [prefilled(engine) - was for engine, was in zip(engines, before, strict=True)]
                    figures = chat_figures(outcomes, load, SLO_S)
                    figures["max_mean_load"] = max(computed) / (sum(computed) / len(computed))
                    if number:
                        found[name].append(figures)
    rows = {}
    for name, rounds in found.items():
        figures = {key: median(each[key] for each in rounds) for key in rounds[0]}
        stage.figures[f"real {name}"] = figures | {"rounds": len(rounds)}
        rows[name] = show_chats(figures, SLO_S)
    title = f"{LOAD.count} chats of {LOAD.turns} turns before {SERVERS} real servers with a pool, {stage.rounds} rounds (ms)"
    stage.show(title, rows)


def prefilled(engine: SglangServer) -> float:
    """Prompt tokens that it has computed since its start."""
    sums = metric_sums(engine.url)
    return sums.get("sglang:prompt_tokens_total", 0.0) - sums.get("sglang:cached_tokens_total", 0.0)


@contextlib.contextmanager
def servers(model: Path, logs: Path) -> Iterator[tuple[list[SglangServer], list[NodeProcess], MasterProcess]]:
    """Each with the store node of a host of its own, and KV events."""
    started: list[ManagedProcess] = []
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as sockets:
        try:
            master = MasterProcess("master", log=logs / "master.log")
            started.append(master)
            master.start_and_wait()
            nodes, engines = [], []
            for number in range(SERVERS):
                node = NodeProcess(
                    f"node-{number}", socket_path=Path(sockets) / str(number), master=master, log=logs / f"node-{number}.log"
                )
                started.append(node)
                node.start_and_wait()
                nodes.append(node)
                ports = {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}
                events = json.dumps({"publisher": "zmq", **ports})
                engines.append(
                    SglangServer(
                        f"engine-{number}",
                        model=model,
                        caching=pool_caching(node.socket_path),
                        log=logs / f"engine-{number}.log",
                        args=("--kv-events-config", events),
                    )
                )
            started += engines
            start_servers(engines)
            yield engines, nodes, master
        finally:
            stop_all(started[::-1])
