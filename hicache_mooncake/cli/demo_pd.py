"""`hicache-mooncake demo --pd`: prefill and decode on servers of their own, and what the next turns of several chats find.

The same chats are held four times: without any cache (the prefill server's is flushed before every turn), with HiCache alone,
with the pool as L3 of the prefill server, and with the pages that the decode server writes to it too. The prefill server's own
memory (L1 and L2) is too small for all of the chats.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hicache_mooncake.cli.demo import Chat
from hicache_mooncake.cli.demo_stage import Stage, answered, perform
from hicache_mooncake.testing.sglang_cpu.pd import RouterProcess, ask_pair, have_router
from hicache_mooncake.testing.sglang_cpu.pool import NodeProcess
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess
from hicache_mooncake.testing.sglang_cpu.servers import (
    Answer,
    SglangServer,
    attach_storage,
    clear_storage,
    detach_storage,
    flush_cache,
    generate,
    offload_caching,
    pool_caching,
    pool_config,
)

USERS = 3
ROUNDS = 10
ANSWER_TOKENS = 48
DOCUMENT_SENTENCES = 16
PREFILL_TOKENS, HOST_RATIO = 2048, 2
"""Tokens in L1 of the prefill server, and in its L2 for each of them: from some round on the chats have more. SGLang takes no
page out of L2 that is in L1 too: what comes from L3 has room only in what L2 has more."""
MEMORY_GIB = 6.5
"""Two servers at 2.2 GB, a router at 0.7, a node at 0.5, and some air."""
QUESTIONS = (
    "Which of these machines hold the pages that were asked for last?",
    "And which of them were written twice? Name the shelf.",
    "Compare it with the shelf before. What is missing there?",
    "Tell it again in the order of the time of day.",
    "Who asked first, and who asked only once?",
)
ADMIN_KEY = "demo"
NOTHING, HICACHE, PROMPTS, POOL = "no cache", "HiCache alone", "pool, prompts only", "pool with write-back"
Ask = Callable[[tuple[int, ...]], Answer]


@dataclass(frozen=True)
class Turn:
    """A prompt and what it was answered; `hits`: tokens of the prompt that were not computed."""

    prompt: tuple[int, ...]
    answer: Answer

    @property
    def hits(self) -> int:
        cached = self.answer.cached
        return cached.device + cached.host + cached.storage


@dataclass(frozen=True)
class Run:
    """The chats as held with one way to cache: `rounds[n][user]`."""

    name: str
    rounds: list[list[Turn]]

    def hits(self, number: int) -> int:
        return sum(turn.hits for turn in self.rounds[number])

    def ttft_s(self, number: int) -> float:
        return statistics.median(turn.answer.ttft_s for turn in self.rounds[number])

    def answers(self) -> list[list[tuple[int, ...]]]:
        return [[turn.answer.output_ids for turn in turns] for turns in self.rounds]


def run_pd_demo(keep: bool, workdir: Path, model: Path | None) -> int:
    """Run the demo; the exit code is 0 only if all answers are equal and the pool has more of the prompts than HiCache alone.

    Logs, the plot and the tiny model go to `workdir`. With `keep` what was started for the last of the four outlives the call.
    """
    console = Console()

    def run(stage: Stage) -> Callable[[Sequence[ManagedProcess]], int]:
        runs = PdDemo(stage).run(model.resolve() if model is not None else workdir.resolve() / "model")
        return lambda kept: report(console, runs, kept=kept, directory=stage.directory)

    return perform(console, workdir, keep, MEMORY_GIB, run)


class PdDemo:
    """A prefill server, whose L3 is attached only for the last two, a decode server that offloads, and a router before them."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def run(self, model: Path) -> list[Run]:
        self._stage.make_model(model)
        chat = Chat(model)
        (node,) = self._stage.start_pool("node")
        prefill = SglangServer(
            "prefill",
            model=model,
            caching=pool_caching(None, ratio=HOST_RATIO),
            log=self._stage.log_of("prefill"),
            role="prefill",
            args=("--max-total-tokens", str(PREFILL_TOKENS), "--admin-api-key", ADMIN_KEY),
        )
        decode = SglangServer(
            "decode",
            model=model,
            caching=offload_caching(node.socket_path, ratio=HOST_RATIO),
            log=self._stage.log_of("decode"),
            role="decode",
        )
        self._stage.start_servers(prefill, decode)
        ask = self._through_router(prefill, decode)

        def flush() -> None:
            flush_cache(prefill.url, admin_key=ADMIN_KEY)

        with self._stage.steps.step("warm up"):
            ask(chat.document("warm up", DOCUMENT_SENTENCES))
        flush()
        runs = [self._hold(NOTHING, chat, ask, before_each=flush)]
        flush()
        runs.append(self._hold(HICACHE, chat, ask))
        # Under a name of its own the prefill server finds what it has written itself, and nothing of the decode server.
        for name, identity in ((PROMPTS, {"model_id": "prompts only"}), (POOL, {})):
            flush()
            attach_storage(prefill.url, "mooncake", pool_config(node.socket_path) | identity, admin_key=ADMIN_KEY)
            clear_storage(prefill.url, admin_key=ADMIN_KEY)
            runs.append(self._hold(name, chat, ask))
            if name != POOL:
                flush()
                detach_storage(prefill.url, admin_key=ADMIN_KEY)
        return runs

    def _through_router(self, prefill: SglangServer, decode: SglangServer) -> Ask:
        if not have_router():
            self._stage.steps.note("sglang-router is not installed: requests go to both servers without it.")
            return lambda prompt: answered(decode, lambda: ask_pair(prefill, decode, prompt, max_new_tokens=ANSWER_TOKENS))
        router = RouterProcess("router", [prefill], [decode], log=self._stage.log_of("router"))
        self._stage.started.append(router)
        with self._stage.steps.step("start the router") as step:
            router.start()
            router.wait_ready(progress=step.tick)
        return lambda prompt: answered(router, lambda: generate(router.url, prompt, max_new_tokens=ANSWER_TOKENS))

    def _hold(self, name: str, chat: Chat, ask: Ask, *, before_each: Callable[[], None] | None = None) -> Run:
        """Every user's turn of a round, one after the other, then the next round."""
        histories = [chat.document(f"user {user}", DOCUMENT_SENTENCES) for user in range(USERS)]
        rounds = []
        with self._stage.steps.step(f"{name}: {USERS} users, {ROUNDS} rounds") as step:
            for number in range(ROUNDS):
                turns = []
                for user, history in enumerate(histories):
                    if before_each is not None:
                        before_each()
                    prompt = (*history, *chat.question(QUESTIONS[(number + user) % len(QUESTIONS)]))
                    turns.append(Turn(prompt, ask(prompt)))
                    step.tick(step.elapsed_s)
                histories = [(*turn.prompt, *turn.answer.output_ids) for turn in turns]
                rounds.append(turns)
        return Run(name, rounds)


def report(console: Console, runs: Sequence[Run], *, kept: Sequence[ManagedProcess], directory: Path) -> int:
    """Print what happened; 0 if it is what a shared cache must do."""
    nothing, hicache, prompts, pool = runs
    table = Table(
        title=f"{USERS} chats, a prefill and a decode server: tokens of the prompts that were found", box=box.SIMPLE_HEAD
    )
    columns = [
        "round",
        "prompt\ntokens",
        "found with\nHiCache alone",
        "with the pool,\nprompts only",
        "with the pool\nand write-back",
    ]
    columns += [f"TTFT (s)\n{name}" for name in (NOTHING, HICACHE, POOL)]
    for column in columns:
        table.add_column(column, justify="right")
    for number in range(ROUNDS):
        table.add_row(
            *(str(number + 1), str(sum(len(turn.prompt) for turn in pool.rounds[number]))),
            *(str(run.hits(number)) for run in (hicache, prompts)),
            f"[bold]{pool.hits(number)}[/]",
            *(f"{run.ttft_s(number):.3f}" for run in (nothing, hicache, pool)),
        )
    console.print(table)
    for line in plot_lines(runs):
        console.print(line)
    lines = ["", "Tokens found in turn n, with write-back / with the pool but without write-back / with HiCache alone:"]
    for number in (number for number in (2, 5, 10) if number <= ROUNDS):
        a, b, c = (run.hits(number - 1) for run in (pool, prompts, hicache))
        lines.append(f"  turn {number:2}: {a:5} / {b:5} / {c:5}")
    if (image := plot_png(runs, directory / "pd.png")) is not None:
        lines.append(f"Plotted in {image}.")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    same = all(run.answers() == nothing.answers() for run in runs[1:])
    if same:
        console.print(f"All {USERS * ROUNDS} greedy answers are the same in all four.")
    else:
        console.print("[bold red]Failed:[/] greedy answers differ from those without any cache.")
    more = sum(map(pool.hits, range(ROUNDS))) > sum(map(prompts.hits, range(ROUNDS))) > sum(map(hicache.hits, range(ROUNDS)))
    if not more:
        console.print(
            f"[bold red]Failed:[/] the pool did not find more than HiCache alone; the logs are in {escape(str(directory))}."
        )
    if kept:
        _explain_kept(console, kept)
    return 0 if same and more else 1


_MARKS = {NOTHING: ("·", "dim"), HICACHE: ("h", "yellow"), PROMPTS: ("o", "cyan"), POOL: ("●", "bold green")}
_WIDTH = 60


def plot_lines(runs: Sequence[Run]) -> list[Text]:
    """Two plots for a terminal, a line for each round: tokens found, and the time to the first token."""
    lines = [Text.assemble(*(part for name, (mark, style) in _MARKS.items() for part in ((mark, style), f" {name}   ")))]
    most = max(sum(len(turn.prompt) for turn in turns) for turns in runs[-1].rounds)
    slowest = max(run.ttft_s(number) for run in runs for number in range(ROUNDS))
    plots: list[tuple[str, Callable[[Run, int], float], float]] = [
        (f"tokens found, of at most {most}", lambda run, number: run.hits(number), most),
        (f"TTFT, median of the users, up to {slowest:.2f} s", lambda run, number: run.ttft_s(number), slowest),
    ]
    for title, value, limit in plots:
        lines += [Text(), Text(title)]
        for number in range(ROUNDS):
            cells: list[tuple[str, str]] = [(" ", "")] * (_WIDTH + 1)
            for run in runs:
                cells[round(value(run, number) / limit * _WIDTH)] = _MARKS[run.name]
            lines.append(Text.assemble(f"{number + 1:3} │", *cells))
        lines.append(Text("    └" + "─" * (_WIDTH + 1)))
    return lines


def plot_png(runs: Sequence[Run], path: Path) -> Path | None:
    """The same as an image; None where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = range(1, ROUNDS + 1)
    prompts = [sum(len(turn.prompt) for turn in turns) for turns in runs[-1].rounds]
    left.plot(numbers, prompts, color="0.7", linestyle="--", label="tokens of the prompts")
    for run, color in zip(runs, ("0.4", "tab:orange", "tab:cyan", "tab:green"), strict=True):
        left.plot(numbers, [run.hits(number - 1) for number in numbers], marker="o", markersize=4, color=color, label=run.name)
        right.plot(
            numbers, [run.ttft_s(number - 1) for number in numbers], marker="o", markersize=4, color=color, label=run.name
        )
    left.set_title(f"tokens found, {USERS} users")
    right.set_title("time to the first token, median (s)")
    for axes in (left, right):
        axes.set_xlabel("round")
        axes.set_xticks(list(numbers))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path


def _explain_kept(console: Console, kept: Sequence[ManagedProcess]) -> None:
    lines = ["", "Everything of the last one keeps running:"]
    body = '\'{"text": "Tell me", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}\''
    for process in kept:
        if isinstance(process, RouterProcess):
            lines.append(f"  curl -s {process.url}/generate -H 'Content-Type: application/json' -d {body}   # {process.name}")
        if isinstance(process, NodeProcess):
            lines.append(f"  curl -s {process.url}/metrics   # {process.name}, socket {process.socket_path}")
        if isinstance(process, SglangServer):
            lines.append(f"  curl -s {process.url}/metrics   # {process.name}")
    lines += ["Stop it all:", f"  kill {' '.join(str(process.pid) for process in reversed(kept))}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
