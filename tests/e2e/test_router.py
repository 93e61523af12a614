"""Real SGLang servers on CPU behind our router: plain ones that share the pool, and a pair of prefill and decode.

What is right is what transformers answers, which knows neither SGLang, nor a router, nor a cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_mooncake.testing.conductor import ConductorProcess
from hicache_mooncake.testing.sglang_cpu.processes import free_port
from hicache_mooncake.testing.sglang_cpu.reference import reference_answers
from hicache_mooncake.testing.sglang_cpu.servers import (
    HOST,
    PAGE_TOKENS,
    SglangServer,
    chat,
    cpu_environment,
    flush_cache,
    full_pages,
    generate,
    metric_sums,
    request_body,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family
from tests.conftest import wait_until
from tests.e2e.support import ANSWER_TOKENS, MARKS, RUNNING, Engine, Host, Prompt, cached_tokens, prompt, running_hosts

pytestmark = MARKS

WAIT_S = 60
LONG_ANSWER = 1500
FIRSTS = [prompt(70 + number, 301 + 50 * number) for number in range(4)]
NEXT = [prompt(80 + number, 40) for number in range(4)]
PAIRED, PAIRED_NEXT = prompt(90, 501), prompt(91, 60)
FLUSHED = prompt(92, 401)
HUNG_UP = prompt(93, 201)


class HungUp(Exception):
    """The client went away."""


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def right(model: Path) -> dict[Prompt, tuple[int, ...]]:
    """The answers, by prompt."""
    talks = [[first, following] for first, following in zip(FIRSTS, NEXT, strict=True)]
    talks += [[PAIRED, PAIRED_NEXT]]
    return dict(turn for talk in reference_answers(model, talks, max_new_tokens=ANSWER_TOKENS) for turn in talk)


@dataclass
class Cluster:
    router: ConductorProcess
    hosts: list[Host]

    @property
    def engines(self) -> list[SglangServer]:
        return [host.engine for host in self.hosts]


def with_events(model: Path) -> Engine:
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}
    return Engine(model, args=("--kv-events-config", json.dumps(config)))


def make_router(engines: list[tuple[str, str]], model: Path, hosts: list[Host], logs: Path) -> ConductorProcess:
    args = ["--tokenizer", str(model), "--master", hosts[0].master.address]
    return ConductorProcess(engines, log=logs / "conductor.log", args=args, env=cpu_environment(), reads=True)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("router")
    with running_hosts(logs, with_events(model), with_events(model)) as hosts:
        engines = [("--worker", f"{host.engine.url},store={host.node.name}") for host in hosts]
        router = make_router(engines, model, hosts, logs)
        RUNNING.append(router)
        with router:
            yield Cluster(router, hosts)


def running(engine: SglangServer) -> float:
    sums = metric_sums(engine.url)
    return sums.get("sglang:num_running_reqs", 0.0) + sums.get("sglang:num_queue_reqs", 0.0)


def test_answers_are_right_and_the_next_turn_finds_all_that_was_computed(
    cluster: Cluster, right: dict[Prompt, tuple[int, ...]]
) -> None:
    answers = {}
    for ids in FIRSTS:
        answers[ids] = generate(cluster.router.url, ids, max_new_tokens=ANSWER_TOKENS)
        assert answers[ids].output_ids == right[ids]
    for ids, more in zip(FIRSTS, NEXT, strict=True):
        turn = (*ids, *answers[ids].output_ids, *more)
        answer = generate(cluster.router.url, turn, max_new_tokens=ANSWER_TOKENS)
        assert answer.output_ids == right[turn]
        found = answer.cached.device + answer.cached.host + answer.cached.storage
        assert found == cached_tokens(ids, answers[ids])


def test_chats_are_answered_as_by_an_engine_asked_directly(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "the quick brown fox " * 20}]
    by_router = chat(cluster.router.url, messages)
    assert [chat(engine.url, messages).text for engine in cluster.engines] == [by_router.text] * 2


def test_a_client_that_hangs_up_ends_its_request_on_the_engine(cluster: Cluster) -> None:
    seen: list[list[float]] = []

    def on_tokens(count: int) -> None:
        if count >= 5:
            seen.append([running(engine) for engine in cluster.engines])
            raise HungUp

    with pytest.raises(HungUp):
        generate(cluster.router.url, HUNG_UP, max_new_tokens=LONG_ANSWER, on_tokens=on_tokens)
    assert sum(seen[0]) >= 1, "nothing ran that could have been ended"
    wait_until(lambda: not any(map(running, cluster.engines)), WAIT_S, "the engines have nothing to do")
    generated = sum(metric_sums(engine.url)["sglang:generation_tokens_total"] for engine in cluster.engines)
    assert generated < LONG_ANSWER, "it was computed to its end"


def test_the_router_hears_what_an_engine_stores_and_what_it_drops(cluster: Cluster) -> None:
    asked = request_body(FLUSHED, max_new_tokens=1, cache_salt=None)
    pages = full_pages(len(FLUSHED)) // PAGE_TOKENS

    def on_device() -> list[str]:
        """Engines that are believed to have all of it where nothing has to be loaded from."""
        candidates = cluster.router.explain("/generate", asked)["candidates"]
        return [each["engine"] for each in candidates if each["own_pages"] >= pages and each["load_ms"] == 0]

    assert on_device() == []
    engine = cluster.engines[1]
    generate(engine.url, FLUSHED, max_new_tokens=1)  # not by the router: only events can tell it
    name = f"{HOST}:{engine.port}"
    wait_until(lambda: on_device() == [name], WAIT_S, "the router knows what the engine has computed")
    assert cluster.router.explain("/generate", asked)["chosen"] == name
    flush_cache(engine.url)
    wait_until(lambda: on_device() == [], WAIT_S, "the router knows that it would have to be loaded from the pool")


@pytest.mark.slow
def test_a_pair_answers_behind_the_router_and_both_halves_end_with_their_client(
    model: Path, right: dict[Prompt, tuple[int, ...]], tmp_path: Path
) -> None:
    with running_hosts(tmp_path, Engine(model, role="prefill", ratio=2), Engine(model, role="decode", ratio=0.05)) as hosts:
        prefill, decode = (host.engine for host in hosts)
        engines = [("--prefill", f"{prefill.url}:{prefill.bootstrap_port}"), ("--decode", decode.url)]
        with make_router(engines, model, hosts, tmp_path) as router:
            first = generate(router.url, PAIRED, max_new_tokens=ANSWER_TOKENS)
            assert first.output_ids == right[PAIRED]
            turn = (*PAIRED, *first.output_ids, *PAIRED_NEXT)
            answer = generate(router.url, turn, max_new_tokens=ANSWER_TOKENS)
            assert answer.output_ids == right[turn]
            assert answer.cached.device + answer.cached.host + answer.cached.storage >= full_pages(len(PAIRED))

            def on_tokens(count: int) -> None:
                if count >= 5:
                    raise HungUp

            with pytest.raises(HungUp):
                generate(router.url, HUNG_UP, max_new_tokens=LONG_ANSWER, on_tokens=on_tokens)
            decode_log = tmp_path / "engine-b.log"
            wait_until(lambda: "POST /abort_request" in decode_log.read_text(), WAIT_S, "the decode server is told to end it")
            wait_until(lambda: not running(prefill) and not running(decode), WAIT_S, "both halves have ended")
