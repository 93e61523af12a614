"""`make bench-answers`: does an engine answer with the pool what it answers without any cache?

Real SGLang servers on CPUs with a tiny model: some on store nodes of their own, which are too small for the chats, so that
pages are evicted all the time, and one just like them that caches nothing and computes every prompt from its first token. Both
get the same turns of the same chats at the same time; the next turns come to another of the engines with the pool, whose L1 and
L2 are dropped before most of them. The token ids of every answer are compared.

The first part is greedy, several requests at once. The second samples at temperature 1, one request at a time: SGLang takes a
seed for each request only with attention kernels for GPUs, but two servers with the same `--random-seed` draw the same numbers
as long as they are asked for the same number of tokens. If they do not do so for prompts that neither has seen, it is left out.
Exits with 1 if a single answer differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.machine import machine
from benchmarks.real_engines import (
    RESULTS,
    Engine,
    Pool,
    Prompt,
    check_sglang,
    progress_bar,
    running_pool,
    running_servers,
    save_figures,
    text,
)
from hicache_mooncake.testing.sglang_cpu.processes import ProcessError
from hicache_mooncake.testing.sglang_cpu.servers import (
    NO_CACHE,
    REQUEST_TIMEOUT_S,
    Answer,
    Cached,
    SglangServer,
    flush_cache,
    pool_caching,
    post,
    request_body,
    stream,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import make_tiny_model

LIVE, TURNS, SYSTEMS = 24, 5, 4
SYSTEM_TOKENS, FIRST_TOKENS, ADDED_TOKENS, ANSWER_TOKENS = 96, (60, 200), (30, 110), 16
AT_ONCE = 4
DRAM = "12mb"
"""Of each node: LIVE chats have some 40 MB of KV."""
FLUSHED = 0.75
"""Share of the turns before which L1 and L2 are dropped; at the others they take part."""
DEVICE_TOKENS, HOST_RATIO = 4096, 2
PROBES = 3
"""Sampled answers to prompts that nobody has seen, before those that count."""


@dataclass(frozen=True)
class Request:
    number: int
    chat: int
    prompt: Prompt


class Chats:
    """Chats of several turns, some of which begin alike. Whoever is next is drawn, and a chat that has ended is followed by a
    new one: the same for the same seed and the same answers. No I/O."""

    def __init__(self, seed: int, *, live: int = LIVE, turns: int = TURNS) -> None:
        self._rng = random.Random(seed)
        self._systems = [(1, *text(self._rng, SYSTEM_TOKENS - 1)) for _ in range(SYSTEMS)]
        self._turns = turns
        self._begun = 0
        self._asked = 0
        self._histories: dict[int, tuple[int, Prompt]] = {}
        for _ in range(live):
            self._begin()

    def _begin(self) -> None:
        opening = (*self._rng.choice(self._systems), *text(self._rng, self._rng.randint(*FIRST_TOKENS)))
        self._histories[self._begun] = (0, opening)
        self._begun += 1

    def draw(self, count: int) -> list[Request]:
        """The next turns of as many different chats. Each is to be `answered` before the next draw."""
        requests = []
        for chat in self._rng.sample(sorted(self._histories), count):
            turn, history = self._histories[chat]
            prompt = (*history, *text(self._rng, self._rng.randint(*ADDED_TOKENS))) if turn else history
            requests.append(Request(self._asked, chat, prompt))
            self._asked += 1
        return requests

    def answered(self, request: Request, output_ids: Sequence[int]) -> None:
        turn, _ = self._histories[request.chat]
        if turn + 1 < self._turns:
            self._histories[request.chat] = (turn + 1, (*request.prompt, *output_ids))
        else:
            del self._histories[request.chat]
            self._begin()


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Position of the first token that is not the same, or that only one has."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@dataclass(frozen=True)
class Difference:
    """`cached`: where the engine with the pool had its prompt from. `gap`: how far apart the two tokens are for the one
    without a cache, as a difference of their log probabilities; where that is next to nothing, rounding decides."""

    request: int
    chat: int
    engine: str
    prompt: Prompt
    position: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    cached: Cached
    gap: float | None = None

    def __str__(self) -> str:
        gap = "" if self.gap is None else f"; their log probabilities differ by {self.gap:.2g}"
        return (
            f"request {self.request} (chat {self.chat}, {len(self.prompt)} prompt tokens, {self.cached}) to {self.engine}, "
            f"at position {self.position} of the answer: {list(self.ours)} instead of {list(self.theirs)}{gap}"
        )


@dataclass
class Tally:
    """Of one part. Tokens are those of the prompts of the engines with the pool."""

    compared: int = 0
    different: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    from_storage: int = 0
    """Answers to prompts of which a part came from storage."""
    first: Difference | None = None

    def add(self, request: Request, engine: str, ours: Answer, theirs: Answer) -> None:
        self.compared += 1
        self.prompt_tokens += len(request.prompt)
        self.answer_tokens += len(ours.output_ids)
        self.device_tokens += ours.cached.device
        self.host_tokens += ours.cached.host
        self.storage_tokens += ours.cached.storage
        self.from_storage += ours.cached.storage > 0
        position = first_difference(ours.output_ids, theirs.output_ids)
        if position is None:
            return
        self.different += 1
        if self.first is None:
            outputs = (ours.output_ids, theirs.output_ids)
            self.first = Difference(
                request.number, request.chat, engine, request.prompt, position, *outputs, cached=ours.cached
            )


@dataclass
class Arms:
    """The engines with the pool, and the one without any cache. `until`: on time.monotonic(), no new turn after it."""

    engines: Sequence[SglangServer]
    reference: SglangServer
    until: float
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    flushes: int = 0

    def ask(self, requests: Sequence[Request], engine: SglangServer, temperature: float) -> list[tuple[Answer, Answer]]:
        """All at once to both arms; answers of the engine and of the reference."""
        if self.rng.random() < FLUSHED:
            flush_cache(engine.url)
            self.flushes += 1
        with ThreadPoolExecutor(2 * len(requests)) as threads:
            asked = [
                [threads.submit(answer, to.url, each.prompt, temperature) for to in (engine, self.reference)]
                for each in requests
            ]
            return [(ours.result(), theirs.result()) for ours, theirs in asked]


def logprob_gap(url: str, difference: Difference) -> float | None:
    """Asks the engine without a cache. None where one answer has ended there, or a token is not among the likeliest."""
    if difference.position >= min(len(difference.ours), len(difference.theirs)):
        return None
    prompt = [*difference.prompt, *difference.theirs[: difference.position]]
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}
    asked = body | {"return_logprob": True, "top_logprobs_num": 20}
    found = json.loads(post(f"{url}/generate", asked, REQUEST_TIMEOUT_S))["meta_info"]["output_top_logprobs"][0]
    likely = {token: logprob for logprob, token, *_ in found}
    ours, theirs = (likely.get(ids[difference.position]) for ids in (difference.ours, difference.theirs))
    return None if ours is None or theirs is None else abs(ours - theirs)


def answer(url: str, prompt: Prompt, temperature: float) -> Answer:
    body = request_body(prompt, max_new_tokens=ANSWER_TOKENS, cache_salt=None)
    sampling = {"temperature": temperature, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return stream(url, body | {"sampling_params": sampling}, REQUEST_TIMEOUT_S, None)


def compare(
    arms: Arms, requests: int, *, at_once: int, temperature: float, seed: int, advance: Callable[[int], object]
) -> Tally:
    """Hold chats until so many requests have been answered. A chat goes on with the answer of the engine without a cache, so
    that one that differs makes no other differ. What is sampled goes to the first engine only, which then draws as often as the
    reference."""
    chats, tally = Chats(seed), Tally()
    engines = arms.engines if not temperature else arms.engines[:1]
    turn = 0
    while tally.compared < requests and time.monotonic() < arms.until:
        drawn = chats.draw(min(at_once, requests - tally.compared))
        engine = engines[turn % len(engines)]
        for request, (ours, theirs) in zip(drawn, arms.ask(drawn, engine, temperature), strict=True):
            tally.add(request, engine.name, ours, theirs)
            chats.answered(request, theirs.output_ids)
        advance(len(drawn))
        turn += 1
    return tally


def draw_alike(arms: Arms) -> bool:
    """Whether both arms sample the same answers to prompts that neither has seen."""
    rng = random.Random(99)
    for number in range(PROBES):
        request = Request(number, -1, (1, *text(rng, 150)))
        ((ours, theirs),) = arms.ask([request], arms.engines[0], 1.0)
        if ours.cached == Cached() and ours.output_ids != theirs.output_ids:
            return False
    return True


@dataclass
class Outcome:
    greedy: Tally
    sampled: Tally | None
    """None: the two arms do not draw alike."""
    figures: dict[str, float]

    @property
    def different(self) -> int:
        return self.greedy.different + (self.sampled.different if self.sampled else 0)


def run(options: argparse.Namespace, progress: Progress) -> Outcome:
    logs = options.logs or RESULTS / "logs" / "answers"
    seeded = ("--random-seed", "1", "--max-total-tokens", str(DEVICE_TOKENS))
    with tempfile.TemporaryDirectory(prefix="hicache-bench-model-") as folder:
        model = make_tiny_model(Path(folder) / "llama")
        with running_pool(options.engines, dram=options.dram, logs=logs) as pool:
            engines = [
                Engine(f"engine-{n}", pool_caching(node.socket_path, ratio=HOST_RATIO), seeded)
                for n, node in enumerate(pool.nodes)
            ]
            engines.append(Engine("reference", NO_CACHE, seeded))
            with running_servers(model, engines, logs, progress) as (*servers, reference):
                return _compare_both(options, Arms(servers, reference, 0.0), pool, progress)


def _compare_both(options: argparse.Namespace, arms: Arms, pool: Pool, progress: Progress) -> Outcome:
    began = time.monotonic()
    span_s = 60 * options.minutes
    sampled_count = int(options.requests * options.sampled)
    task = progress.add_task("answers compared", total=options.requests)

    def advance(count: int) -> None:
        progress.advance(task, count)

    arms.until = began + span_s * (1 - options.sampled)
    counts = (options.requests - sampled_count, sampled_count)
    greedy = compare(arms, counts[0], at_once=AT_ONCE, temperature=0.0, seed=options.seed, advance=advance)
    if greedy.first is not None:
        greedy.first = dataclasses.replace(greedy.first, gap=logprob_gap(arms.reference.url, greedy.first))
    arms.until = began + span_s
    sampled: Tally | None = None
    if not counts[1]:
        sampled = Tally()
    elif draw_alike(arms):
        sampled = compare(arms, counts[1], at_once=1, temperature=1.0, seed=options.seed + 1, advance=advance)
    names = ("evicted", "stored", "spilled", "replicated", "remote_sent_pages")
    figures: dict[str, float] = {name: pool.count(f"{name}_total") for name in names}
    return Outcome(greedy, sampled, figures | {"flushes": arms.flushes, "seconds": time.monotonic() - began})


def lines(outcome: Outcome) -> list[str]:
    """What is printed."""
    found = []
    for name, tally in (("greedy", outcome.greedy), ("sampled", outcome.sampled)):
        if tally is None:
            found.append("sampled: left out; two servers that have cached nothing do not draw the same numbers here")
            continue
        found.append(
            f"{name}: {tally.compared:,} answers compared ({tally.answer_tokens:,} tokens), {tally.different:,} different; "
            f"of {tally.prompt_tokens:,} prompt tokens device had {tally.device_tokens:,}, host {tally.host_tokens:,}, "
            f"storage {tally.storage_tokens:,} ({tally.from_storage:,} requests)"
        )
    figures = outcome.figures
    found.append(
        f"the pool: {figures['stored']:,.0f} pages stored, {figures['evicted']:,.0f} evicted, {figures['spilled']:,.0f} given "
        f"to nodes with room, {figures['remote_sent_pages']:,.0f} sent between nodes; L1 and L2 were dropped "
        f"{figures['flushes']:,.0f} times; {figures['seconds']:.0f} s"
    )
    for name, tally in (("greedy", outcome.greedy), ("sampled", outcome.sampled)):
        if tally is not None and tally.first is not None:
            found.append(f"the first {name} answer that differs: {tally.first}")
    return found


def verdict(outcome: Outcome) -> str | None:
    """Why this is a failure, or None."""
    if outcome.different:
        return f"{outcome.different:,} answers differ from those without a cache"
    if not outcome.greedy.storage_tokens or not outcome.figures["evicted"]:
        return "nothing came from the pool, or it evicted nothing: this has tried nothing, give it more --requests"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=24 * 60, help="end after so many, with fewer requests")
    parser.add_argument("--sampled", type=float, default=0.2, help="share of the requests that are sampled")
    parser.add_argument("--engines", type=int, default=2, help="with the pool, each on a node of its own")
    parser.add_argument("--dram", default=DRAM, help="of each node")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes there")
    options = parser.parse_args()
    if options.requests < 1 or options.engines < 1 or not 0 <= options.sampled < 1:
        parser.error("--requests and --engines are at least 1, --sampled is from 0 to below 1")
    check_sglang()
    console = Console(soft_wrap=True, highlight=False)
    console.print(machine())
    try:
        with progress_bar() as progress:
            outcome = run(options, progress)
    except ProcessError as error:
        raise SystemExit("\n".join([f"failed: {error}", *getattr(error, "__notes__", [])])) from None
    for line in lines(outcome):
        console.print(line, markup=False)
    path = save_figures("answers", dataclasses.asdict(outcome) | {"options": {k: str(v) for k, v in vars(options).items()}})
    console.print(f"saved as {path}", markup=False)
    if (failure := verdict(outcome)) is not None:
        raise SystemExit(failure)


if __name__ == "__main__":
    main()
