"""`hicache-mooncake demo`: two real SGLang servers share one pool on this machine, and their answers and times are compared."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache_mooncake.cli.demo_stage import Stage, answered, perform
from hicache_mooncake.testing.sglang_cpu.pool import NodeProcess
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess
from hicache_mooncake.testing.sglang_cpu.servers import (
    NO_CACHE,
    Answer,
    SglangServer,
    full_pages,
    generate,
    pool_caching,
    tokens_written_to_l3,
    wait_written_to_l3,
)

ANSWER_TOKENS = 48
DOCUMENT_SENTENCES = 40
QUESTIONS = (
    "Which of these machines hold the pages of the first shelf, and who asked for them last?",
    "And which of them were written twice? Name the shelf, the machine and the time of day.",
    "Compare the second shelf with the first one. Where would you look for a page that nobody asked for?",
    "Now tell it all again, in the order of the time of day, and leave out what was asked for only once.",
)
MEMORY_GIB = 6.5
"""Two servers at 2.2 GB, two nodes at 0.5, and some air."""


@dataclass(frozen=True)
class Turn:
    """One turn of the chat: who got which prompt, what it answered, and what a server without any cache answered."""

    server: str
    prompt: tuple[int, ...]
    reference: Answer
    answer: Answer

    @property
    def same(self) -> bool:
        return self.answer.output_ids == self.reference.output_ids


def run_demo(keep: bool, workdir: Path, model: Path | None) -> int:
    """Run the demo; the exit code is 0 only if every answer equals the one without a cache and server B found its prompt in L3.

    Logs and the tiny model go to `workdir`. With `keep`, master, nodes and servers outlive the call; else nothing does.
    """
    console = Console()

    def run(stage: Stage) -> Callable[[Sequence[ManagedProcess]], int]:
        turns, moved_bytes = Demo(stage).run(model.resolve() if model is not None else workdir.resolve() / "model")
        return lambda kept: report(console, turns, moved_bytes, kept=kept, logs=stage.directory)

    return perform(console, workdir, keep, MEMORY_GIB, run)


class Demo:
    """Starts everything, asks, and measures."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._steps = stage.steps

    def run(self, model: Path) -> tuple[list[Turn], int]:
        """Returns the turns, and the bytes that the nodes sent each other for the last one."""
        self._stage.make_model(model)
        chat = Chat(model)
        reference = self._run_reference(model, chat)

        node_a, node_b = self._stage.start_pool("node-a", "node-b")
        a = self._server("server A", model, node_a)
        b = self._server("server B", model, node_b)
        self._stage.start_servers(a, b)
        with self._steps.step("warm up A and B with another prompt"):
            self._warm_up([a, b], chat)

        turns: list[Turn] = []
        for number, (prompt, cold) in enumerate(reference[:-1], start=1):
            with self._steps.step(f"turn {number} to server A"):
                turns.append(Turn("A", prompt, cold, self._ask(a, prompt)))
        with self._steps.step("wait until A has written its pages to the pool"):
            # All of turn 3 that is in whole pages; the last token of an answer has no KV yet. The warm-up came before.
            chain = full_pages(len(prompt) + ANSWER_TOKENS - 1)
            wait_written_to_l3(a.url, chain + full_pages(len(chat.warm_up)))
            _wait_until_steady(a)
        prompt, cold = reference[-1]
        sent = self._sent_bytes(node_a, node_b)
        with self._steps.step(f"turn {len(reference)} to server B"):
            turns.append(Turn("B", prompt, cold, self._ask(b, prompt)))
        return turns, self._sent_bytes(node_a, node_b) - sent

    def _run_reference(self, model: Path, chat: Chat) -> list[tuple[tuple[int, ...], Answer]]:
        """The whole chat on a server without any cache: what the answers must be, and how long cold prompts take."""
        name = "reference server"
        server = SglangServer(name, model=model, caching=NO_CACHE, log=self._stage.directory / "reference.log")
        self._stage.start_servers(server)
        with self._steps.step("the whole chat without any cache, as the reference"):
            self._warm_up([server], chat)
            turns = []
            history: tuple[int, ...] = chat.opening
            for question in QUESTIONS:
                prompt = (*history, *chat.question(question))
                answer = self._ask(server, prompt)
                turns.append((prompt, answer))
                history = (*prompt, *answer.output_ids)
        self._stage.stop(server)
        return turns

    def _server(self, name: str, model: Path, node: NodeProcess) -> SglangServer:
        return SglangServer(name, model=model, caching=pool_caching(node.socket_path), log=self._stage.log_of(name))

    def _ask(self, server: SglangServer, prompt: Sequence[int]) -> Answer:
        return answered(server, lambda: generate(server.url, prompt, max_new_tokens=ANSWER_TOKENS))

    def _warm_up(self, servers: Sequence[SglangServer], chat: Chat) -> None:
        """The first prompt of a fresh server pays for much that is not its own; it must not be one that is measured."""
        for server in servers:
            self._ask(server, chat.warm_up)

    @staticmethod
    def _sent_bytes(*nodes: NodeProcess) -> int:
        return sum(node.metric("remote_sent_bytes_total") for node in nodes)


class Chat:
    """The prompts, as token ids: a chat whose history must stay the same token by token cannot go through text and back."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.opening = self.document("system", DOCUMENT_SENTENCES)
        self.warm_up = self._encode("<s>user: Warm up. " + _notes(DOCUMENT_SENTENCES + 20))

    def document(self, speaker: str, sentences: int) -> tuple[int, ...]:
        """What a chat begins with."""
        return self._encode(f"<s>{speaker}: Answer from these notes.\n{_notes(sentences)}\n")

    def question(self, text: str) -> tuple[int, ...]:
        return self._encode(f"\n<s>user: {text}\nassistant:")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _notes(sentences: int) -> str:
    """Some text that does not repeat itself."""
    shelves = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
    return " ".join(
        f"At {i // 4 + 6}:{i * 7 % 60:02d} machine {i * 5 % 13} asked for page {i * 37 % 101} of the {shelves[i % 7]} shelf."
        for i in range(sentences)
    )


def report(console: Console, turns: Sequence[Turn], moved_bytes: int, *, kept: Sequence[ManagedProcess], logs: Path) -> int:
    """Print what happened; 0 if it is what a shared cache must do."""
    table = Table(title="One chat, two SGLang servers, one pool", box=box.SIMPLE_HEAD)
    for column in ("turn", "server", "prompt\ntokens", "L1\ndevice", "L2\nhost", "L3\npool"):
        table.add_column(column, justify="right")
    for column in ("TTFT (s)\nno cache", "TTFT (s)\nhere"):
        table.add_column(column, justify="right")
    table.add_column("greedy\nanswer")
    for number, turn in enumerate(turns, start=1):
        cached = turn.answer.cached
        table.add_row(
            *(str(number), turn.server, str(turn.answer.prompt_tokens)),
            *(str(cached.device), str(cached.host), f"[bold]{cached.storage}[/]" if cached.storage else "0"),
            *(f"{turn.reference.ttft_s:.3f}", f"{turn.answer.ttft_s:.3f}"),
            "same" if turn.same else "[bold red]different[/]",
        )
    console.print(table)
    last = turns[-1]
    hit = last.answer.cached.storage
    console.print(
        f"Server B had never seen this chat: {hit} of {last.answer.prompt_tokens} prompt tokens came from the pool, "
        f"{moved_bytes / 1e6:.1f} MB moved from node A to node B, "
        f"TTFT {last.answer.ttft_s:.3f} s instead of {last.reference.ttft_s:.3f} s "
        f"({last.answer.ttft_s / last.reference.ttft_s:.2f} x).",
        highlight=False,
        soft_wrap=True,
    )
    same = all(turn.same for turn in turns)
    if same:
        console.print(f"All {len(turns)} greedy answers are identical to those of a server without any cache.")
    else:
        console.print("[bold red]Failed:[/] greedy answers differ from those of a server without any cache.")
    if hit == 0:
        console.print(f"[bold red]Failed:[/] server B found nothing in the pool; its log is in {escape(str(logs))}.")
    if kept:
        _explain_kept(console, kept)
    return 0 if same and hit > 0 else 1


def _explain_kept(console: Console, kept: Sequence[ManagedProcess]) -> None:
    servers = [process for process in kept if isinstance(process, SglangServer)]
    nodes = [process for process in kept if isinstance(process, NodeProcess)]
    body = '\'{"text": "Tell me", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}\''
    lines = ["", "Everything keeps running:"]
    lines += [f"  curl -s {s.url}/generate -H 'Content-Type: application/json' -d {body}   # {s.name}" for s in servers]
    lines += [
        f"  curl -s -X POST {servers[-1].url}/flush_cache   # {servers[-1].name} forgets L1 and L2: the next hit is from L3"
    ]
    lines += [f"  curl -s {n.url}/metrics   # {n.name}, socket {n.socket_path}" for n in nodes]
    lines += [f"  {sys.executable} -m hicache_mooncake.cli status --socket {nodes[0].socket_path}"]
    lines += ["Stop it all:", f"  kill {' '.join(str(process.pid) for process in reversed(kept))}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _wait_until_steady(server: SglangServer, *, quiet_s: float = 1.5, timeout_s: float = 20.0) -> None:
    """Wait until the server has written nothing to L3 for a moment."""
    written, since, end = tokens_written_to_l3(server.url), time.monotonic(), time.monotonic() + timeout_s
    while time.monotonic() - since < quiet_s and time.monotonic() < end:
        time.sleep(0.2)
        if (now := tokens_written_to_l3(server.url)) != written:
            written, since = now, time.monotonic()
