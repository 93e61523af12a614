"""Real SGLang servers on CPU, each with the store node of its own host: what they share, and what they survive.

What is right is what transformers answers, which knows neither SGLang nor a cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.pool import NodeProcess
from hicache_mooncake.testing.sglang_cpu.reference import reference_answers
from hicache_mooncake.testing.sglang_cpu.servers import (
    Answer,
    Cached,
    SglangServer,
    chat,
    flush_cache,
    full_pages,
    generate,
    start_servers,
    tokens_written_to_l3,
    wait_written_to_l3,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family
from tests.e2e.support import (
    ANSWER_TOKENS,
    END_TO_END,
    MARKS,
    Engine,
    Prompt,
    ask,
    ask_and_wait_until_written,
    cached_tokens,
    prompt,
    running_hosts,
)
from tests.sglang.matrix import Supports

pytestmark = MARKS

KV_BYTES_PER_TOKEN = 4096
SHARED = prompt(1, 1101)
NEXT_QUESTION = prompt(2, 90)
RESTARTED = prompt(3, 901)
UNDER_LOAD = [prompt(10 + i, 403 + 37 * i) for i in range(6)]
AFTER_THE_NODE = prompt(30, 701)
SALTED = prompt(31, 401)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def right(model: Path) -> dict[Prompt, tuple[int, ...]]:
    """The answers, by prompt."""
    talks = [[SHARED, NEXT_QUESTION], *([ids] for ids in (RESTARTED, AFTER_THE_NODE, *UNDER_LOAD))]
    return dict(turn for talk in reference_answers(model, talks, max_new_tokens=ANSWER_TOKENS) for turn in talk)


@dataclass
class Cluster:
    a: SglangServer
    b: SglangServer
    node_a: NodeProcess
    node_b: NodeProcess


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Both ways to name the backend, sharing pages; one computes prompts in chunks.
    a_engine, b_engine = Engine(model, args=("--chunked-prefill-size", "512")), Engine(model, dynamic=True)
    with running_hosts(tmp_path_factory.mktemp("logs"), a_engine, b_engine) as (a, b):
        yield Cluster(a.engine, b.engine, a.node, b.node)


def test_an_engine_on_another_host_reads_what_the_first_one_computed(
    cluster: Cluster, right: dict[Prompt, tuple[int, ...]], supports: Supports
) -> None:
    sent = cluster.node_a.metric("remote_sent_bytes_total")
    first = ask_and_wait_until_written(cluster.a, SHARED)
    assert first.cached == Cached()
    assert first.output_ids == right[SHARED]

    second = ask(cluster.b, SHARED)
    assert second.cached == Cached(storage=full_pages(len(SHARED)))
    assert second.output_ids == right[SHARED]
    moved = cluster.node_a.metric("remote_sent_bytes_total") - sent
    assert moved == full_pages(len(SHARED)) * KV_BYTES_PER_TOKEN
    supports(family="mha", layout="page_first", shape=END_TO_END)


def test_the_next_turn_finds_the_pages_of_the_answer_too(cluster: Cluster, right: dict[Prompt, tuple[int, ...]]) -> None:
    first = ask(cluster.a, SHARED)
    flush_cache(cluster.b.url)
    second_turn = (*SHARED, *first.output_ids, *NEXT_QUESTION)
    answer = ask(cluster.b, second_turn)
    assert answer.cached == Cached(storage=cached_tokens(SHARED, first))
    assert answer.output_ids == right[second_turn]


def test_a_cache_salt_keeps_apart_what_is_equal_otherwise(cluster: Cluster) -> None:
    def salted(server: SglangServer, salt: str | None) -> Cached:
        return generate(server.url, SALTED, max_new_tokens=1, cache_salt=salt).cached

    written = tokens_written_to_l3(cluster.a.url)
    assert salted(cluster.a, "mine") == Cached()
    wait_written_to_l3(cluster.a.url, written + full_pages(len(SALTED)))
    assert salted(cluster.b, None) == Cached()
    assert salted(cluster.b, "yours") == Cached()
    assert salted(cluster.b, "mine") == Cached(storage=full_pages(len(SALTED) - 1))


def test_openai_chat_finds_its_history_on_the_other_host(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "Which machine asked for page 17? " * 20}]
    written = tokens_written_to_l3(cluster.a.url)
    first = chat(cluster.a.url, messages)
    assert first.cached_tokens == 0
    wait_written_to_l3(cluster.a.url, written + full_pages(first.prompt_tokens))
    second = chat(cluster.b.url, messages)
    assert second.cached_tokens >= full_pages(first.prompt_tokens - 1)
    assert second.text == first.text


def test_an_engine_that_was_killed_finds_its_cache_warm(cluster: Cluster, right: dict[Prompt, tuple[int, ...]]) -> None:
    ask_and_wait_until_written(cluster.a, RESTARTED)
    cluster.a.kill()
    start_servers([cluster.a])
    sent = cluster.node_b.metric("remote_sent_bytes_total")  # after SGLang's own warm-up prompt
    answer = ask(cluster.a, RESTARTED)
    assert answer.cached == Cached(storage=full_pages(len(RESTARTED)))
    assert answer.output_ids == right[RESTARTED]
    assert cluster.node_b.metric("remote_sent_bytes_total") == sent, "the pages were on this host"


class Load:
    """Asks one prompt after the other, always from L3 or from nothing, in a thread, until it is told to stop."""

    def __init__(self, server: SglangServer, prompts: list[Prompt]) -> None:
        self.answers: list[tuple[Prompt, Answer]] = []
        self.error: BaseException | None = None
        self._server = server
        self._prompts = prompts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(120)

    def wait_for_more(self, answers: int, timeout_s: float = 120.0) -> None:
        goal, end = len(self.answers) + answers, time.monotonic() + timeout_s
        while len(self.answers) < goal:
            assert self.error is None, f"request {len(self.answers)} failed: {self.error}"
            assert time.monotonic() < end, f"{len(self.answers)} of {goal} answers after {timeout_s:.0f} s"
            time.sleep(0.05)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                ids = self._prompts[len(self.answers) % len(self._prompts)]
                self.answers.append((ids, ask(self._server, ids)))
                flush_cache(self._server.url)
        except BaseException as error:
            self.error = error


def test_a_node_that_is_killed_under_load_costs_no_answer(cluster: Cluster, right: dict[Prompt, tuple[int, ...]]) -> None:
    engine = cluster.a.pid
    for ids in UNDER_LOAD:
        ask(cluster.a, ids)
    time.sleep(2.0)
    flush_cache(cluster.a.url)
    with Load(cluster.a, UNDER_LOAD) as load:
        load.wait_for_more(len(UNDER_LOAD))
        assert sum(answer.cached.storage for _, answer in load.answers) > 0, "L3 was not in use before the kill"
        cluster.node_a.kill()
        load.wait_for_more(len(UNDER_LOAD) + 1)
        dead = load.answers[-1][1]
        cluster.node_a.start_and_wait()
        load.wait_for_more(2)
    assert load.error is None
    for ids, answer in load.answers:
        assert answer.output_ids == right[ids]
    assert dead.cached == Cached(), "nothing could come from a node that is dead"
    assert max(answer.total_s for _, answer in load.answers) < 30

    # Back without a restart of the engine: what is written now is found again.
    for _ in range(20):
        ask(cluster.a, AFTER_THE_NODE)
        time.sleep(2.0)
        flush_cache(cluster.a.url)
        answer = ask(cluster.a, AFTER_THE_NODE)
        assert answer.output_ids == right[AFTER_THE_NODE]
        if answer.cached.storage:
            break
        flush_cache(cluster.a.url)
    assert answer.cached.storage == full_pages(len(AFTER_THE_NODE))
    assert cluster.a.running
    assert cluster.a.pid == engine
