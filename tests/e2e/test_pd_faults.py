"""Prefill and decode on servers of their own: a decode server with a HiCache of its own, and what dies between and in turns.

A prefill server, a decode server that offloads and one with a tree, real SGLang on CPU, each with the store node of its own
host. What is right is what transformers answers, which knows neither SGLang nor a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.pd import ask_pair
from hicache_mooncake.testing.sglang_cpu.reference import Turn, reference_answers
from hicache_mooncake.testing.sglang_cpu.servers import (
    PAGE_TOKENS,
    Answer,
    Cached,
    ServerError,
    SglangServer,
    flush_cache,
    full_pages,
    start_servers,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family
from tests.conftest import wait_until
from tests.e2e.support import MARKS, Engine, Host, Writes, prompt, running_hosts

pytestmark = [*MARKS, pytest.mark.slow]

ANSWER_TOKENS = 40
WAIT_S = 60
ANSWER_S = 90
"""Within which every request has its answer, or its error."""
TRIES = 20
TALKS = [[prompt(200 + 10 * talk + turn, 90 if turn else 401 + 7 * talk) for turn in range(3)] for talk in range(5)]
OF_A_TREE, NODE_OF_DECODE, NODE_OF_PREFILL, DECODE, MASTER = range(5)


@dataclass
class Cluster:
    prefill: Host
    decode: Host
    tree: Host
    talks: list[list[Turn]]

    def ask(
        self,
        turn: Turn,
        *,
        decode: Host | None = None,
        written: bool = True,
        on_tokens: Callable[[int], object] | None = None,
    ) -> Answer:
        """Every server's L1 and L2 are empty: what is cached comes from L3. `written`: wait until the answer is there, too."""
        decode = decode or self.decode
        for host in (self.prefill, self.tree):
            flush_cache(host.engine.url)
        ids, right = turn
        writes = Writes(decode.node) if written else None
        answer = ask_pair(
            self.prefill.engine,
            decode.engine,
            ids,
            max_new_tokens=ANSWER_TOKENS,
            timeout_s=ANSWER_S,
            on_tokens=on_tokens,
        )
        assert answer.output_ids == right
        if writes is not None:
            wait_until(lambda: writes.pages >= answer_pages(turn), WAIT_S, "the answer is written")
        return answer

    def ask_until(self, turn: Turn, done: Callable[[Answer], bool]) -> None:
        """Again and again: a part of the cluster has just come back."""
        for _ in range(TRIES):
            if done(self.ask(turn, written=False)):
                return
            time.sleep(1.0)
        raise AssertionError(f"{TRIES} answers later it was not back")


@pytest.fixture(scope="module")
def cluster(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tiny_model("llama")
    talks = reference_answers(model, TALKS, max_new_tokens=ANSWER_TOKENS)
    engines = [
        Engine(model, role="prefill", ratio=2),
        Engine(model, role="decode", ratio=2),
        Engine(model, role="decode", ratio=2, tree=True),
    ]
    with running_hosts(tmp_path_factory.mktemp("pd-faults"), *engines) as hosts:
        yield Cluster(*hosts, talks)


@pytest.fixture(autouse=True)
def all_running(cluster: Cluster) -> None:
    """A test that failed leaves nothing dead to the next one."""
    if not cluster.decode.master.running:
        cluster.decode.master.start_and_wait()
    for host in (cluster.prefill, cluster.decode, cluster.tree):
        if not host.node.running:
            host.node.start_and_wait()
    start_servers([host.engine for host in (cluster.prefill, cluster.decode, cluster.tree) if not host.engine.running])


def kept(turn: Turn) -> int:
    """Tokens in whole pages of a prompt and its answer."""
    ids, answer = turn
    return full_pages(len(ids) + len(answer) - 1)


def answer_pages(turn: Turn) -> int:
    """Whole pages that are not of the prompt alone."""
    return (kept(turn) - full_pages(len(turn[0]))) // PAGE_TOKENS


def restart(server: SglangServer) -> None:
    server.kill()
    start_servers([server])


def test_a_decode_server_with_a_tree_writes_whole_turns_and_reads_them_again(cluster: Cluster) -> None:
    first, second, third = cluster.talks[OF_A_TREE]
    node = cluster.tree.node
    cluster.ask(first, decode=cluster.tree)
    wait_until(lambda: node.metric("objects") >= kept(first) // PAGE_TOKENS, WAIT_S, "prompt and answer are written")
    loaded = node.metric("loaded_total")
    answer = cluster.ask(second, decode=cluster.tree)
    assert answer.cached.storage >= kept(first)
    assert node.metric("loaded_total") - loaded >= kept(first) // PAGE_TOKENS, "the decode server has read its own pages"
    wait_until(lambda: node.metric("objects") >= kept(second) // PAGE_TOKENS, WAIT_S, "prompt and answer are written")
    # The other decode server keeps nothing, the prefill server reads what the first one has written.
    assert cluster.ask(third).cached == Cached(storage=kept(second))


def test_a_decode_server_that_is_killed_in_mid_answer_leaves_what_was_written(cluster: Cluster) -> None:
    first, second, _ = cluster.talks[DECODE]
    writes = Writes(cluster.decode.node)

    def kill(tokens: int) -> None:
        if tokens >= ANSWER_TOKENS // 2 and cluster.decode.engine.running:
            wait_until(lambda: writes.stored, WAIT_S, "the first page of the answer is written")
            cluster.decode.engine.kill()

    with pytest.raises(ServerError):  # long enough to be killed in the middle of it
        ask_pair(
            cluster.prefill.engine,
            cluster.decode.engine,
            first[0],
            max_new_tokens=1000,
            timeout_s=ANSWER_S,
            on_tokens=kill,
        )
    start_servers([cluster.decode.engine])
    before = writes.stored
    assert before
    assert cluster.ask(first).cached == Cached(storage=full_pages(len(first[0])))
    assert writes.stored == max(before, answer_pages(first)), "what was there is not written again"
    assert writes.had == min(before, answer_pages(first))
    assert cluster.ask(second).cached == Cached(storage=kept(first))


def test_a_restarted_prefill_server_finds_all_that_was_said(cluster: Cluster) -> None:
    *turns, last = cluster.talks[DECODE]
    for turn in turns:
        cluster.ask(turn)
    restart(cluster.prefill.engine)
    assert cluster.ask(last).cached == Cached(storage=kept(turns[-1]))


def test_a_master_that_restarts_costs_no_answer_and_no_page(cluster: Cluster) -> None:
    first, second, third = cluster.talks[MASTER]
    for turn in (*cluster.talks[DECODE], first):
        cluster.ask(turn)
    cluster.decode.master.kill()
    cluster.ask(second)
    cluster.decode.master.start_and_wait()
    known = cluster.talks[DECODE][-1]  # parts of it are on either host
    cluster.ask_until(known, lambda answer: answer.cached.storage == full_pages(len(known[0]) - 1))
    assert cluster.ask(third).cached == Cached(storage=kept(second))


def test_a_node_that_is_killed_between_turns_costs_its_pages_and_no_answer(cluster: Cluster) -> None:
    for talk, host in ((NODE_OF_DECODE, cluster.decode), (NODE_OF_PREFILL, cluster.prefill)):
        first, second, _ = cluster.talks[talk]
        cluster.ask(first)
        host.node.kill()
        found = cluster.ask(second, written=False).cached
        assert found == Cached(storage=full_pages(len(first[0])) if host is cluster.decode else 0)
        host.node.start_and_wait()
        cluster.ask_until(second, lambda answer: host.node.metric("objects") > 0)  # noqa: B023


def test_while_the_prefill_server_is_gone_requests_end_with_an_error(cluster: Cluster) -> None:
    turn = cluster.talks[NODE_OF_DECODE][0]
    cluster.prefill.engine.kill()
    with pytest.raises(ServerError, match=cluster.prefill.engine.url):
        ask_pair(cluster.prefill.engine, cluster.decode.engine, turn[0], max_new_tokens=ANSWER_TOKENS, timeout_s=ANSWER_S)
    start_servers([cluster.prefill.engine])
    cluster.ask(turn)
