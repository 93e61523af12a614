"""`make bench-engines`: what HiCache and each L3 behind it save in chats of several rounds, on real SGLang servers (CPU).

In the manner of SGLang's `benchmark/hicache/bench_multiturn.py`: each client sends its whole history and something new, round
after round, a few clients at once, and all of a round before the next. L1 and L2 have no room for all of the chats, an L3 has.
The same prompts for every arm, and arms take turns: without HiCache, HiCache alone, and HiCache with each L3 backend that runs
here, attached to the same server: SGLang's `file`, `nixl` (POSIX) where it is installed, and this pool. Another row is the time
to the first token of a long prompt of which 95 % are in the pool, on an engine that has never seen it, over that of a miss.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.real_engines import (
    RESULTS,
    Engine,
    Prompt,
    check_sglang,
    progress_bar,
    running_pool,
    running_servers,
    save_figures,
    text,
)
from benchmarks.router_load import quantile
from hicache_mooncake.cli import charts
from hicache_mooncake.testing.sglang_cpu.processes import ProcessError
from hicache_mooncake.testing.sglang_cpu.servers import (
    PAGE_TOKENS,
    Answer,
    Cached,
    Caching,
    Refused,
    SglangServer,
    attach_storage,
    detach_storage,
    flush_cache,
    full_pages,
    generate,
    pool_caching,
    pool_config,
    tokens_written_to_l3,
    wait_written_to_l3,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import make_tiny_model

PLAIN, HICACHE, FILE, NIXL, OURS = "no HiCache", "HiCache, no L3", "HiCache + file", "HiCache + nixl (POSIX)", "HiCache + pool"
CLIENTS, ROUNDS, AT_ONCE = 12, 5, 4
FIRST_TOKENS, ADDED_TOKENS, ANSWER_TOKENS = 400, 100, 16
DEVICE_TOKENS, HOST_RATIO = 4096, 2
"""L1, and tokens in L2 for each of it, those of L1 among them: the chats of the last rounds have more."""
LONG_TOKENS, IN_L3, PAIRS, TARGET = 2400, 0.95, 5, 0.25
DRAM = "512mb"
ADMIN_KEY = "bench"


@dataclass(frozen=True)
class Sample:
    """One request. `round` counts from 0."""

    round: int
    prompt_tokens: int
    ttft_s: float
    cached: Cached
    output_ids: tuple[int, ...]

    @property
    def hits(self) -> int:
        return self.cached.device + self.cached.host + self.cached.storage


@dataclass(frozen=True)
class Run:
    """All rounds of all clients, with one arm; in the order of rounds and clients."""

    samples: Sequence[Sample]
    seconds: float


@dataclass(frozen=True)
class Pair:
    """Seconds to the first token of two prompts of one length: of one 95 % were in L3, the other nobody had seen."""

    hit_s: float
    miss_s: float
    storage_tokens: int


def figures(runs: Sequence[Run], reference: Sequence[Run]) -> dict[str, object]:
    """Of one arm. Rates are medians of its runs, tokens by round their means; `different`: answers that are not those of the
    reference, which was asked the same in the same order."""
    samples = [sample for run in runs for sample in run.samples]
    ttft = [sample.ttft_s for sample in samples]
    by_round = [[sample for sample in samples if sample.round == number] for number in sorted({s.round for s in samples})]
    pairs = [pair for run, other in zip(runs, reference, strict=True) for pair in zip(run.samples, other.samples, strict=True)]
    return {
        "runs": len(runs),
        "requests": len(samples),
        "ttft_mean_s": mean(ttft),
        "ttft_p50_s": quantile(ttft, 0.5),
        "ttft_p99_s": quantile(ttft, 0.99),
        "requests_per_s": median(len(run.samples) / run.seconds for run in runs),
        "prompt_tokens_per_s": median(sum(s.prompt_tokens for s in run.samples) / run.seconds for run in runs),
        "prompt_tokens_by_round": [sum(s.prompt_tokens for s in each) / len(runs) for each in by_round],
        "hits_by_round": [sum(s.hits for s in each) / len(runs) for each in by_round],
        "storage_by_round": [sum(s.cached.storage for s in each) / len(runs) for each in by_round],
        "ttft_mean_s_by_round": [mean(s.ttft_s for s in each) for each in by_round],
        "different": sum(a.output_ids != b.output_ids for a, b in pairs),
    }


def long_prompt(pairs: Sequence[Pair]) -> dict[str, float]:
    """The row of the long prompt; `ratio` is the median of the pairs'."""
    return {
        "pairs": len(pairs),
        "prompt_tokens": LONG_TOKENS,
        "storage_tokens": min(pair.storage_tokens for pair in pairs),
        "hit_ttft_s": median(pair.hit_s for pair in pairs),
        "miss_ttft_s": median(pair.miss_s for pair in pairs),
        "ratio": median(pair.hit_s / pair.miss_s for pair in pairs),
        "target": TARGET,
    }


def columns(found: Mapping[str, object]) -> list[str]:
    """Of one arm, for both tables."""
    by_round = "".join(f" {tokens:,.0f}" for tokens in _list(found["hits_by_round"]))
    return [
        *(f"{_number(found[name]):.3f}" for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")),
        f"{_number(found['requests_per_s']):.2f}",
        f"{_number(found['prompt_tokens_per_s']):,.0f}",
        by_round.strip().replace(" ", " / "),
        f"{sum(_list(found['storage_by_round'])):,.0f}",
        str(found["different"]),
    ]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _list(value: object) -> list[float]:
    assert isinstance(value, list)
    return value


HEADINGS = [
    "TTFT mean (s)",
    "p50",
    "p99",
    "requests/s",
    "prompt tokens/s",
    "hit tokens by round",
    "of them L3",
    "answers differ",
]


def markdown(arms: Mapping[str, Mapping[str, object]], row: Mapping[str, float]) -> list[str]:
    """The table for docs/performance.md."""
    lines = ["| arm | " + " | ".join(HEADINGS) + " |", "| --- |" + " ---: |" * len(HEADINGS)]
    lines += [f"| {name} | " + " | ".join(columns(found)) + " |" for name, found in arms.items()]
    return [*lines, "", long_prompt_line(row)]


def long_prompt_line(row: Mapping[str, float]) -> str:
    judged = "met" if row["ratio"] <= row["target"] else "missed"
    return (
        f"A prompt of {row['prompt_tokens']:,.0f} tokens on an engine that has never seen it, of which "
        f"{row['storage_tokens']:,.0f} came from another host's node: first token after {row['hit_ttft_s']:.3f} s instead of "
        f"{row['miss_ttft_s']:.3f} s, {row['ratio']:.2f} of the miss (target {row['target']:g}: {judged}; median of "
        f"{row['pairs']:.0f} pairs)."
    )


def plots(arms: Mapping[str, Mapping[str, object]]) -> list[charts.Chart]:
    rounds = [str(number + 1) for number in range(len(_list(next(iter(arms.values()))["hits_by_round"])))]
    drawn = [("Tokens found, by round", "tokens", "hits_by_round"), ("TTFT, by round", "mean (s)", "ttft_mean_s_by_round")]
    return [charts.Bars(title, y, rounds, {name: _list(found[key]) for name, found in arms.items()}) for title, y, key in drawn]


@dataclass(frozen=True)
class Arm:
    """`backend`: of the L3 that is attached to the server for it, and its config."""

    name: str
    server: SglangServer
    backend: str | None = None
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def refused(self) -> str | None:
        """Why its L3 does not come up here, or None."""
        if self.backend is None:
            return None
        try:
            attach_storage(self.server.url, self.backend, self.config, admin_key=ADMIN_KEY)
            detach_storage(self.server.url, admin_key=ADMIN_KEY)
        except Refused as error:
            return str(error)
        return None

    def hold(self, seed: int) -> Run:
        """With nothing in L1 and L2 at the beginning, and no prompt that was ever asked."""
        flush_cache(self.server.url, admin_key=ADMIN_KEY)
        if self.backend is None:
            return hold(self.server.url, seed)
        attach_storage(self.server.url, self.backend, self.config, admin_key=ADMIN_KEY)
        held = hold(self.server.url, seed)
        flush_cache(self.server.url, admin_key=ADMIN_KEY)
        detach_storage(self.server.url, admin_key=ADMIN_KEY)
        return held


def hold(url: str, seed: int) -> Run:
    rng = random.Random(seed)
    said = [[text(rng, ADDED_TOKENS if number else FIRST_TOKENS) for number in range(ROUNDS)] for _ in range(CLIENTS)]
    histories: list[Prompt] = [()] * CLIENTS
    samples: list[Sample] = []
    began = time.monotonic()

    def ask(prompt: Prompt) -> Answer:
        return generate(url, prompt, max_new_tokens=ANSWER_TOKENS)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for number in range(ROUNDS):
            prompts = [(*history, *added[number]) for history, added in zip(histories, said, strict=True)]
            answers = list(threads.map(ask, prompts))
            samples += [
                Sample(number, len(prompt), each.ttft_s, each.cached, each.output_ids)
                for prompt, each in zip(prompts, answers, strict=True)
            ]
            histories = [(*prompt, *each.output_ids) for prompt, each in zip(prompts, answers, strict=True)]
    return Run(samples, time.monotonic() - began)


def compare(arms: Sequence[Arm], runs: int, progress: Progress) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    task = progress.add_task("chats", total=runs * len(arms))
    for number in range(runs):
        for arm in random.Random(number).sample(arms, len(arms)):
            found[arm.name].append(arm.hold(1000 + number))
            progress.advance(task)
    return found


def ask_long_prompts(writer: SglangServer, reader: SglangServer, pairs: int, progress: Progress) -> list[Pair]:
    """The writer's node has 95 % of a prompt; the reader, on another host's node, is asked for all of it, and for another one.
    The first pair is a warm-up and not counted."""
    rng = random.Random(7)
    known = full_pages(int(LONG_TOKENS * IN_L3) + PAGE_TOKENS)
    task = progress.add_task("long prompts", total=pairs + 1)
    found = []
    for number in range(pairs + 1):
        prompt, other = text(rng, LONG_TOKENS), text(rng, LONG_TOKENS)
        written = tokens_written_to_l3(writer.url)
        generate(writer.url, prompt[:known], max_new_tokens=1)
        wait_written_to_l3(writer.url, written + known)
        times = {}
        for asked in (prompt, other) if number % 2 else (other, prompt):
            times[asked] = generate(reader.url, asked, max_new_tokens=1)
        if number:
            found.append(Pair(times[prompt].ttft_s, times[other].ttft_s, times[prompt].cached.storage))
        progress.advance(task)
    return found


def run(options: argparse.Namespace, progress: Progress) -> tuple[dict[str, dict[str, object]], dict[str, float]]:
    logs = options.logs or RESULTS / "logs" / "engines"
    limits = ("--max-total-tokens", str(DEVICE_TOKENS), "--admin-api-key", ADMIN_KEY)
    with tempfile.TemporaryDirectory(prefix="hicache-bench-model-") as folder, running_pool(2, dram=DRAM, logs=logs) as pool:
        model = make_tiny_model(Path(folder) / "llama")
        disk = Path(folder)
        nixl_env = {"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(disk / "nixl")}
        detached = pool_caching(None, ratio=HOST_RATIO)
        config = pool_config(pool.nodes[0].socket_path)
        engines = [
            Engine("plain", Caching(()), limits),
            Engine("hicache", Caching(detached.args, {**detached.env, **nixl_env}), limits),
            Engine("reader", pool_caching(pool.nodes[1].socket_path)),
        ]
        with running_servers(model, engines, logs, progress) as (plain, hicache, reader):
            threshold = {"prefetch_threshold": PAGE_TOKENS}
            arms = [
                Arm(PLAIN, plain),
                Arm(HICACHE, hicache),
                Arm(FILE, hicache, "file", threshold | {"file_storage_path": str(disk / "file")}),
                Arm(OURS, hicache, "mooncake", config),
            ]
            if importlib.util.find_spec("nixl") is not None:
                posix = {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False}
                nixl = Arm(NIXL, hicache, "nixl", threshold | posix)
                if (reason := nixl.refused()) is None:
                    arms.insert(3, nixl)
                else:
                    progress.console.print(f"{NIXL} is left out: {reason}", markup=False)
            for server in (plain, hicache, reader):
                generate(server.url, text(random.Random(0), LONG_TOKENS), max_new_tokens=ANSWER_TOKENS)
            found = compare(arms, options.runs, progress)
            attach_storage(hicache.url, "mooncake", config, admin_key=ADMIN_KEY)
            row = long_prompt(ask_long_prompts(hicache, reader, options.pairs, progress))
    return {name: figures(runs, found[PLAIN]) for name, runs in found.items()}, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each arm")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of long prompts")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes there")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/performance.md too")
    options = parser.parse_args()
    if options.runs < 1 or options.pairs < 1:
        parser.error("--runs and --pairs are at least 1")
    check_sglang()
    console = Console(soft_wrap=True, highlight=False)
    console.print(machine())
    if importlib.util.find_spec("nixl") is None:
        console.print("without nixl (pip install nixl) its arm is left out")
    try:
        with progress_bar() as progress:
            arms, row = run(options, progress)
    except ProcessError as error:
        raise SystemExit("\n".join([f"failed: {error}", *getattr(error, "__notes__", [])])) from None
    table = Table(title=f"{CLIENTS} clients, {ROUNDS} rounds, {AT_ONCE} at once", title_justify="left")
    for heading in ("arm", *HEADINGS):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for name, found in arms.items():
        table.add_row(name, *columns(found))
    Console(width=max(160, console.width)).print(table)
    console.print(long_prompt_line(row), markup=False)
    path = save_figures("engines", {"arms": arms, "long_prompt": row})
    console.print(f"saved as {path}, plotted in {charts.write(path.with_suffix('.png'), plots(arms))}", markup=False)
    if options.docs:
        write_docs(arms, row, options.runs)


def write_docs(arms: Mapping[str, Mapping[str, object]], row: Mapping[str, float], runs: int) -> None:
    from benchmarks.harness import write_between

    title = f"{machine()}; {CLIENTS} clients, {ROUNDS} rounds, {AT_ONCE} at once, {runs} runs of each arm:"
    write_between("benchmarks.engines", [title, "", *markdown(arms, row)])


if __name__ == "__main__":
    main()
