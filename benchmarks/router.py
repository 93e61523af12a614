"""`make bench-router`: what our router adds to a request, and what it saves, beside `sglang-router` (PyPI, cache_aware).

Before the same engines without a model (`hicache_mooncake.testing.fake_engine`), in interleaved rounds. `latency`: one request
after the other; `streams`: 50 at a time whose tokens come at the pace of a GPU; `capacity`: as fast as the processors allow;
`overload`: ten times what the engines can do; `chats`: turns that share their prefixes, on engines whose prefills take time.
`real` is apart: chats before real SGLang servers on CPUs, minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Row, as_records, keep
from benchmarks.machine import machine, provenance
from benchmarks.router_load import Chats, Outcome, PlainClient, arrivals, chat_body, hold, quantile, streams
from benchmarks.router_stage import Ours, Router, Sglang, Target, engines, environment, flush
from hicache_mooncake.testing.fake_engine_settings import FakeEngineSettings
from hicache_mooncake.testing.fake_processes import FakeEngineProcess
from hicache_mooncake.testing.fake_tokenizer import words, write_tokenizer

PAGE = 64
ADDED_MS = 2.0
"""What ours may add to the time to first token, p50."""
LOSS = 0.10
"""And take of the throughput of 50 streams."""
AT_ONCE = 50


@dataclass
class Stage:
    """`tokenizer`: the folder that engines and router have it from."""

    folder: Path
    tokenizer: Path
    rounds: int
    sglang: bool
    ours_args: Sequence[str] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    console: Console = field(default_factory=lambda: Console(width=max(120, Console().width)))

    def settings(self, **more: Any) -> FakeEngineSettings:
        return FakeEngineSettings(page_size=PAGE, tokenizer=str(self.tokenizer), model_path=str(self.tokenizer), **more)

    @contextlib.contextmanager
    def routers(self, fakes: Sequence[FakeEngineProcess], args: Sequence[str] = ()) -> Iterator[dict[str, Router]]:
        """Those that there are, by their names in tables."""
        urls = [fake.url for fake in fakes]
        with contextlib.ExitStack() as stack:
            found: dict[str, Router] = {}
            found["ours"] = stack.enter_context(self.ours(urls, args))
            if self.sglang:
                found["sglang-router"] = stack.enter_context(Sglang(urls, log=self.folder / "sglang-router.log"))
            yield found

    def ours(self, urls: Sequence[str], args: Sequence[str] = ()) -> Router:
        workers = [("--worker", url) for url in urls]
        log, reads = self.folder / "conductor.log", self.ours_args != ["--tokenizer", "off"]
        return Ours(workers, log=log, args=[*self.ours_args, *args], env=environment(), reads=reads)

    def show(self, title: str, rows: Mapping[str, Mapping[str, str]]) -> None:
        table = Table(title=title, title_justify="left")
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        for column in ("", *columns):
            table.add_column(column, justify="right" if column else "left")
        for name, row in rows.items():
            table.add_row(name, *(row.get(column, "") for column in columns))
        self.console.print(table)


def shuffled(names: Sequence[str], number: int) -> list[str]:
    found = list(names)
    random.Random(number).shuffle(found)
    return found


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def judged(value: str, well: bool) -> str:
    return f"[{'green' if well else 'red'}]{value}"


def latency(stage: Stage) -> None:
    """Sequential requests: time to first token and to the end, less that of a direct one."""
    prompts = {"300 tokens": words(1, 300), "4,000 tokens": words(2, 4000)}
    each = 15
    with engines(1, stage.settings(), stage.folder) as fakes, stage.routers(fakes) as routers:
        clients = {"direct": PlainClient(fakes[0].url)} | {name: PlainClient(each.url) for name, each in routers.items()}
        if stage.sglang:
            clients["sglang-router, quick ACKs"] = PlainClient(routers["sglang-router"].url, quick=True)
        for what, text in prompts.items():
            body = json.dumps(chat_body([{"role": "user", "content": text}], 4)).encode()
            before = {name: router.cpu_s() for name, router in routers.items()}
            found = _in_turn(clients, body, stage.rounds, each)
            cpu = {name: (router.cpu_s() - before[name]) / ((stage.rounds + 1) * each) for name, router in routers.items()}
            if stage.sglang:
                cpu["sglang-router"] /= 2  # it has two clients
            direct = {part: quantile([o.ttft_s for o in found["direct"]], part) for part in (0.5, 0.99)}
            rows = {}
            for name, outcomes in found.items():
                ttft = [o.ttft_s for o in outcomes]
                added = quantile(ttft, 0.5) - direct[0.5]
                stage.figures[f"latency {what} {name}"] = {
                    "ttft_p50_ms": quantile(ttft, 0.5) * 1e3,
                    "ttft_p99_ms": quantile(ttft, 0.99) * 1e3,
                    "total_p50_ms": quantile([o.total_s for o in outcomes], 0.5) * 1e3,
                    "added_p50_ms": added * 1e3,
                    "added_p99_ms": (quantile(ttft, 0.99) - direct[0.99]) * 1e3,
                    "cpu_ms": cpu.get(name, 0.0) * 1e3,
                    "failed": sum(1 for o in outcomes if o.status != 200),
                }
                shown = ms(added)
                rows[name] = {
                    "TTFT p50": ms(quantile(ttft, 0.5)),
                    "p99": ms(quantile(ttft, 0.99)),
                    "added p50": judged(shown, added * 1e3 < ADDED_MS) if name == "ours" else shown,
                    "added p99": ms(quantile(ttft, 0.99) - direct[0.99]),
                    "end p50": ms(quantile([o.total_s for o in outcomes], 0.5)),
                    "CPU": ms(cpu[name]) if name in cpu else "",
                    "failed": str(sum(1 for o in outcomes if o.status != 200)),
                }
            stage.show(f"One request at a time, {what}, {stage.rounds * each} each (ms; target: {ADDED_MS:g} added)", rows)


def _in_turn(clients: Mapping[str, PlainClient], body: bytes, rounds: int, each: int) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {name: [] for name in clients}
    for number in range(rounds + 1):
        for name in shuffled(list(clients), number):
            outcomes = [clients[name].ask(body) for _ in range(each)]
            if number:  # the first round is a warm-up
                found[name] += outcomes
    return found


def _closed_loop(stage: Stage, title: str, key: str, settings: FakeEngineSettings, answer: int, seconds: float) -> None:
    bodies = [json.dumps(chat_body([{"role": "user", "content": words(seed, 300)}], answer)).encode() for seed in range(200)]
    with engines(2, settings, stage.folder) as fakes, stage.routers(fakes) as routers:
        targets: dict[str, list[str]] = {"direct": [fake.url for fake in fakes]}
        targets |= {name: [router.url] for name, router in routers.items()}
        found: dict[str, list[list[Outcome]]] = {name: [] for name in targets}
        rates: dict[str, list[float]] = {name: [] for name in targets}
        cpu: dict[str, float] = dict.fromkeys(routers, 0.0)
        for number in range(stage.rounds + 1):
            for name in shuffled(list(targets), number):
                before = routers[name].cpu_s() if name in routers else 0.0
                began = time.perf_counter()
                outcomes = asyncio.run(streams(targets[name], bodies, at_once=AT_ONCE, seconds=seconds))
                took = time.perf_counter() - began
                if number:
                    found[name].append(outcomes)
                    rates[name].append(sum(o.events for o in outcomes) / took)
                    if name in routers:
                        cpu[name] += routers[name].cpu_s() - before
    rows = {}
    for name, rounds in found.items():
        outcomes = [o for each in rounds for o in each]
        events = sum(o.events for o in outcomes)
        loss = 1 - median(rates[name]) / median(rates["direct"])
        ttft, gaps = [o.ttft_s for o in outcomes], [gap for o in outcomes for gap in o.gaps]
        stage.figures[f"{key} {name}"] = {
            "events_s": median(rates[name]),
            "loss": loss,
            "ttft_p50_ms": quantile(ttft, 0.5) * 1e3,
            "ttft_p99_ms": quantile(ttft, 0.99) * 1e3,
            "gap_p50_ms": quantile(gaps, 0.5) * 1e3,
            "gap_p99_ms": quantile(gaps, 0.99) * 1e3,
            "cpu_us_an_event": cpu.get(name, 0.0) / max(1, events) * 1e6,
            "cpu_us_a_request": cpu.get(name, 0.0) / max(1, len(outcomes)) * 1e6,
            "requests": len(outcomes),
            "failed": sum(1 for o in outcomes if o.status != 200),
        }
        shown = f"{loss:.1%}"
        rows[name] = {
            "events/s": f"{median(rates[name]):,.0f}",
            "loss": judged(shown, loss < LOSS) if name == "ours" and key == "streams" else shown,
            "TTFT p50": ms(quantile(ttft, 0.5)),
            "p99": ms(quantile(ttft, 0.99)),
            "gap p50": ms(quantile(gaps, 0.5)),
            "gap p99": ms(quantile(gaps, 0.99)),
            "CPU µs/event": f"{cpu[name] / max(1, events) * 1e6:.0f}" if name in cpu else "",
            "µs/request": f"{cpu[name] / max(1, len(outcomes)) * 1e6:,.0f}" if name in cpu else "",
            "failed": str(sum(1 for o in outcomes if o.status != 200)),
        }
    stage.show(title, rows)


def fifty(stage: Stage) -> None:
    settings = stage.settings(decode_token_s=0.02, prefill_s=0.001)
    title = f"{AT_ONCE} streams of 100 tokens at 50 tokens/s each, {stage.rounds} rounds of 6 s (ms; target: {LOSS:.0%} loss)"
    _closed_loop(stage, title, "streams", settings, answer=100, seconds=6.0)


def capacity(stage: Stage) -> None:
    title = f"{AT_ONCE} clients, answers of 16 tokens without any pause, all on the same processors (ms)"
    _closed_loop(stage, title, "capacity", stage.settings(), answer=16, seconds=3.0)


def overload(stage: Stage) -> None:
    """Two engines that prefill 10 requests a second each are sent 200 a second, each with a prompt of its own."""
    rate, seconds, slo_ms = 200.0, 6.0, 2000
    bodies = [json.dumps(chat_body([{"role": "user", "content": words(seed, 300)}], 8)).encode() for seed in range(1300)]
    settings = stage.settings(prefill_token_s=1 / 3000, decode_token_s=0.005)
    rows: dict[str, dict[str, str]] = {}
    with engines(2, settings, stage.folder) as fakes:
        args = ["--ttft-slo-ms", str(slo_ms), "--prefill-rate", "3000"]
        with stage.routers(fakes, args) as routers:
            for name, router in routers.items():
                asyncio.run(arrivals(router.url, bodies[-20:], rate=5, seconds=4, headers={}, watch=lambda: None))
                sizes: list[int] = [router.memory()]
                watch: Callable[[], None] = lambda router=router, sizes=sizes: sizes.append(router.memory())  # type: ignore[misc]  # noqa: E731
                outcomes = asyncio.run(arrivals(router.url, bodies, rate=rate, seconds=seconds, headers={}, watch=watch))
                served = [o for o in outcomes if o.status == 200]
                refused = [o for o in outcomes if o.status in (429, 503)]
                late = sum(1 for o in served if o.ttft_s * 1e3 > slo_ms)
                stage.figures[f"overload {name}"] = {
                    "served": len(served),
                    "within_slo": len(served) - late,
                    "refused": len(refused),
                    "refused_p50_ms": quantile([o.total_s for o in refused], 0.5) * 1e3,
                    "refused_p99_ms": quantile([o.total_s for o in refused], 0.99) * 1e3,
                    "with_retry_after": sum(1 for o in refused if o.retry_after),
                    "ttft_p50_ms": quantile([o.ttft_s for o in served], 0.5) * 1e3,
                    "ttft_p99_ms": quantile([o.ttft_s for o in served], 0.99) * 1e3,
                    "memory_before": sizes[0],
                    "memory_most": max(sizes),
                    "failed": len(outcomes) - len(served) - len(refused),
                }
                rows[name] = {
                    "served": str(len(served)),
                    f"TTFT < {slo_ms / 1e3:g} s": str(len(served) - late),
                    "TTFT p50": ms(quantile([o.ttft_s for o in served], 0.5)),
                    "p99": ms(quantile([o.ttft_s for o in served], 0.99)),
                    "429": str(len(refused)),
                    "429 p50": ms(quantile([o.total_s for o in refused], 0.5)),
                    "429 p99": ms(quantile([o.total_s for o in refused], 0.99)),
                    "failed": str(len(outcomes) - len(served) - len(refused)),
                    "MB before": f"{sizes[0] / 1e6:.0f}",
                    "MB most": f"{max(sizes) / 1e6:.0f}",
                }
    stage.show(f"{rate:g} requests/s for {seconds:g} s on engines that can do 20/s (ms)", rows)


def chats(stage: Stage) -> None:
    """Four engines; each computes 2,000 tokens a second and has room for a quarter of all chats."""
    load = Chats()
    slo_s = 1.0
    settings = stage.settings(prefill_s=0.01, prefill_token_s=1 / 2000, decode_token_s=0.01, cache_pages=700)
    rows: dict[str, dict[str, str]] = {}
    with engines(4, settings, stage.folder) as fakes:
        urls = [fake.url for fake in fakes]
        makers: dict[str, Callable[[], Router]] = {"ours": lambda: stage.ours(urls, ["--prefill-rate", "2000"])}
        if stage.sglang:
            makers["sglang-router"] = lambda: Sglang(urls, log=stage.folder / "sglang-router.log")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
        for number in range(max(1, stage.rounds // 5)):
            for name in shuffled(list(makers), number):
                for fake in fakes:
                    flush(fake)
                with makers[name]() as router:
                    found[name].append(_chats_once(router, fakes, replace(load, seed=7 + number), slo_s))
    for name, rounds in found.items():
        figures = {key: median(each[key] for each in rounds) for key in rounds[0]}
        stage.figures[f"chats {name}"] = figures
        rows[name] = show_chats(figures, slo_s)
    title = f"{load.count} chats of {load.turns} turns, {len(found['ours'])} rounds: four engines, 2,000 tokens/s each (ms)"
    stage.show(title, rows)


def _chats_once(router: Target, fakes: Sequence[FakeEngineProcess], load: Chats, slo_s: float) -> dict[str, float]:
    before = [fake.stats() for fake in fakes]
    began = time.perf_counter()
    outcomes = asyncio.run(hold(router.url, load))
    took = time.perf_counter() - began
    busy = [fake.stats()["busy_s"] - was["busy_s"] for fake, was in zip(fakes, before, strict=True)]
    return chat_figures(outcomes, load, slo_s) | {"max_mean_load": max(busy) / (sum(busy) / len(busy)), "seconds": took}


def chat_figures(outcomes: Sequence[Outcome], load: Chats, slo_s: float) -> dict[str, float]:
    served = [o for o in outcomes if o.status == 200]
    ttft = [o.ttft_s for o in served]
    tokens = sum(o.prompt_tokens for o in served)
    return {
        "requests": len(outcomes),
        "failed": load.count * load.turns - len(served),
        "prompt_tokens": tokens,
        "hit_tokens": sum(o.cached_tokens for o in served),
        "hit_rate": sum(o.cached_tokens for o in served) / max(1, tokens),
        "ttft_p50_ms": quantile(ttft, 0.5) * 1e3,
        "ttft_p99_ms": quantile(ttft, 0.99) * 1e3,
        "within_slo": sum(1 for each in ttft if each <= slo_s) / (load.count * load.turns),
    }


def show_chats(figures: Mapping[str, float], slo_s: float) -> dict[str, str]:
    row = {
        "prompt tokens": f"{figures['prompt_tokens']:,.0f}",
        "hits": f"{figures['hit_tokens']:,.0f}",
        "hit rate": f"{figures['hit_rate']:.1%}",
        "TTFT p50": f"{figures['ttft_p50_ms']:,.0f}",
        "p99": f"{figures['ttft_p99_ms']:,.0f}",
        f"TTFT < {slo_s:g} s": f"{figures['within_slo']:.1%}",
        "failed": f"{figures['failed']:.0f}",
    }
    if "max_mean_load" in figures:
        row["max/mean load"] = f"{figures['max_mean_load']:.2f}"
    return row


def real(stage: Stage) -> None:
    from benchmarks import router_real

    router_real.real(stage)


SECTIONS: dict[str, Callable[[Stage], None]] = {
    "latency": latency,
    "streams": fifty,
    "capacity": capacity,
    "overload": overload,
    "chats": chats,
}
APART: dict[str, Callable[[Stage], None]] = {"real": real}


def promises(figures: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """What is promised of ours, as far as it was measured."""
    rows = []
    for key, each in figures.items():
        if key.startswith("latency ") and key.endswith(" ours"):
            what = f"router: added to the first token, {key.removeprefix('latency ').removesuffix(' ours')}"
            added = max(each["added_p50_ms"], 0.001)  # noise makes it negative
            rows.append(Row(what, added, ADDED_MS, "ms", "ms allowed", 0.0, 1.0, True))
    if "streams ours" in figures:
        ours, direct = figures["streams ours"]["events_s"], figures["streams direct"]["events_s"]
        rows.append(Row(f"router: {AT_ONCE} streams", ours, direct, "events/s", "direct", 0.0, 1 - LOSS))
    return rows


def save(stage: Stage, name: str, path: Path | None = None) -> Path:
    return keep(provenance(name) | {"figures": stage.figures, "rows": as_records(promises(stage.figures))}, name, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="*", choices=[[], *SECTIONS, *APART], default=[], help="which parts; all but real without any"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-sglang", action="store_true", help="without sglang-router")
    parser.add_argument("--tokenizer", action=argparse.BooleanOptionalAction, default=True, help="ours reads prompts")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes there")
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args()
    there = importlib.util.find_spec("sglang_router") is not None
    if not there and not options.no_sglang:
        print("without sglang-router (pip install sglang-router) there is no peer to compare with")
    with tempfile.TemporaryDirectory(prefix="hicache-bench-router-") as folder:
        tokenizer = write_tokenizer(Path(folder) / "tokenizer")
        args = ["--tokenizer", str(tokenizer) if options.tokenizer else "off"]
        stage = Stage(options.logs or Path(folder), tokenizer, options.rounds, there and not options.no_sglang, args)
        stage.console.print(f"{machine()}; others kept {os.getloadavg()[0]:.1f} cores busy at the start")
        for name in options.sections or SECTIONS:
            (SECTIONS | APART)[name](stage)
    print(f"saved as {save(stage, 'router', options.out)}")


if __name__ == "__main__":
    main()
