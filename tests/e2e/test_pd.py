"""Prefill and decode on servers of their own (PD disaggregation): what the decode server computes is found by the next turn.

Two prefill servers and a decode server that offloads, real SGLang on CPU, each with the store node of its own host. What is
right is what transformers answers, which knows neither SGLang nor a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.pd import RouterProcess, ask_pair, have_router
from hicache_mooncake.testing.sglang_cpu.reference import reference_answers
from hicache_mooncake.testing.sglang_cpu.servers import (
    PAGE_TOKENS,
    Answer,
    Cached,
    flush_cache,
    full_pages,
    generate,
    metric_sums,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family
from tests.conftest import wait_until
from tests.e2e.support import END_TO_END, MARKS, Engine, Host, Prompt, Writes, cached_tokens, prompt, running_hosts
from tests.sglang.matrix import Supports

pytestmark = MARKS

KV_BYTES_PER_TOKEN = 4096
ANSWER_TOKENS = 40
WAIT_S = 60
FIRST, OTHER_QUESTION, QUESTION = prompt(1, 601), prompt(2, 90), prompt(3, 70)
SHORT, AFTER_SHORT = prompt(4, 5), prompt(5, 30)
SALTED, AFTER_SALTED = prompt(6, 301), prompt(7, 50)
CHUNKED = prompt(8, 909)
INSIDE_A_PAGE = prompt(9, 409)
LAST = prompt(10, 203)
CHUNK_TOKENS = 256
DECODE_TOKENS = 8192
HOST_RATIO = 0.05
"""Tokens in the decode server's host pool, from which pages are written, for each one on its device: 26 pages."""


@dataclass
class Cluster:
    first: Host
    second: Host
    decode: Host
    right: dict[Prompt, Prompt]

    def ask(self, ids: Prompt, *, prefill: Host | None = None, tokens: int = ANSWER_TOKENS, salt: str | None = None) -> Answer:
        """Neither prefill server has anything in L1 and L2. All that is to be written has been, when it returns."""
        prefill = prefill or self.first
        flush_cache(prefill.engine.url)
        prefill_writes, decode_writes = Writes(prefill.node), Writes(self.decode.node)
        answer = ask_pair(prefill.engine, self.decode.engine, ids, max_new_tokens=tokens, cache_salt=salt)
        assert answer.output_ids == self.right[ids][:tokens]
        prompt_pages = (full_pages(len(ids)) - answer.cached.storage) // PAGE_TOKENS
        answer_pages = (cached_tokens(ids, answer) - full_pages(len(ids))) // PAGE_TOKENS
        wait_until(lambda: prefill_writes.pages >= prompt_pages, WAIT_S, "the prompt is written")
        wait_until(lambda: decode_writes.pages >= answer_pages, WAIT_S, "the answer is written")
        return answer


@pytest.fixture(scope="module")
def cluster(tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tiny_model("llama")
    talks = [[FIRST, OTHER_QUESTION], [FIRST, QUESTION], [SHORT, AFTER_SHORT], [SALTED, AFTER_SALTED]]
    talks += [[ids] for ids in (CHUNKED, INSIDE_A_PAGE, LAST)]
    right = {ids: answer for talk in reference_answers(model, talks, max_new_tokens=ANSWER_TOKENS) for ids, answer in talk}
    # Both ways to name the backend, on either side.
    first = Engine(model, role="prefill", ratio=2, args=("--chunked-prefill-size", str(CHUNK_TOKENS)))
    second = Engine(model, role="prefill", ratio=2, dynamic=True)
    decode = Engine(model, role="decode", ratio=HOST_RATIO, dynamic=True, args=("--max-total-tokens", str(DECODE_TOKENS)))
    with running_hosts(tmp_path_factory.mktemp("pd"), first, second, decode) as hosts:
        yield Cluster(*hosts, right)


def test_the_next_turn_finds_every_full_page_of_prompt_and_answer(cluster: Cluster, supports: Supports) -> None:
    first = cluster.ask(FIRST)
    assert first.cached == Cached()
    known = cached_tokens(FIRST, first)
    assert known == 640, "the answer ends with a page, all of whose tokens have been computed but the last"
    for ids, prefill in ((OTHER_QUESTION, cluster.second), (QUESTION, cluster.first)):
        answer = cluster.ask((*FIRST, *first.output_ids, *ids), prefill=prefill)
        assert answer.cached == Cached(storage=known), prefill.engine.name
    supports(family="mha", layout="page_first", shape=f"{END_TO_END}, PD")


def test_an_answer_to_less_than_a_page_is_found_too(cluster: Cluster) -> None:
    """Its chain has no page of the prompt's to go on from."""
    first = cluster.ask(SHORT)
    answer = cluster.ask((*SHORT, *first.output_ids, *AFTER_SHORT))
    assert answer.cached == Cached(storage=cached_tokens(SHORT, first))


def test_an_answer_is_found_with_the_salt_that_it_was_asked_with(cluster: Cluster) -> None:
    first = cluster.ask(SALTED, salt="mine")
    both = (*SALTED, *first.output_ids, *AFTER_SALTED)
    assert cluster.ask(both).cached == Cached()
    assert cluster.ask(both, salt="yours").cached == Cached()
    assert cluster.ask(both, salt="mine").cached == Cached(storage=cached_tokens(SALTED, first))


def test_a_prompt_that_was_computed_in_chunks_is_found_whole_and_writing_it_again_costs_nothing(cluster: Cluster) -> None:
    assert len(CHUNKED) > 3 * CHUNK_TOKENS
    first = cluster.ask(CHUNKED)
    assert first.cached == Cached()
    prefill, decode = Writes(cluster.first.node), Writes(cluster.decode.node)
    again = cluster.ask(CHUNKED)
    assert again.cached == Cached(storage=full_pages(len(CHUNKED)))
    answer_pages = (cached_tokens(CHUNKED, first) - full_pages(len(CHUNKED))) // PAGE_TOKENS
    assert decode.had == answer_pages, "the decode server writes without asking what there is"
    assert prefill.stored == decode.stored == prefill.stored_bytes == decode.stored_bytes == 0


def test_pages_are_written_once_each_as_soon_as_they_are_full(cluster: Cluster) -> None:
    tokens = 300
    seen: list[int] = []
    prefill, decode = Writes(cluster.first.node), Writes(cluster.decode.node)
    answer = ask_pair(
        cluster.first.engine,
        cluster.decode.engine,
        INSIDE_A_PAGE,
        max_new_tokens=tokens,
        on_tokens=lambda count: seen.append(decode.stored),
    )
    assert answer.output_ids[:ANSWER_TOKENS] == cluster.right[INSIDE_A_PAGE]
    prompt_pages = full_pages(len(INSIDE_A_PAGE)) // PAGE_TOKENS
    pages = (len(INSIDE_A_PAGE) + tokens - 1) // PAGE_TOKENS - prompt_pages
    wait_until(lambda: decode.stored == pages, WAIT_S, "the answer is written")
    assert any(0 < stored < pages for stored in seen), "nothing was written before the answer was whole"
    assert decode.had == 0, "the page that begins with the prompt and ends with the answer is written by one of the two"
    assert decode.stored_bytes == pages * PAGE_TOKENS * KV_BYTES_PER_TOKEN
    wait_until(lambda: prefill.stored == prompt_pages, WAIT_S, "the prompt is written")
    unwritten = len(INSIDE_A_PAGE) + tokens - (prompt_pages + pages) * PAGE_TOKENS
    print(f"\n{unwritten} of {len(INSIDE_A_PAGE) + tokens} tokens of prompt and answer are not written")
    assert 1 <= unwritten <= PAGE_TOKENS


class HungUp(Exception):
    """The client went away."""


def test_requests_of_all_kinds_leave_no_slot_behind(cluster: Cluster) -> None:
    def free() -> list[float]:
        """Slots of the decode server, and those of the prefill server that something needs."""
        prefill, decode = (metric_sums(host.engine.url) for host in (cluster.first, cluster.decode))
        used = prefill["sglang:max_total_num_tokens"] - prefill["sglang:kv_available_tokens"]
        return [decode["sglang:kv_available_tokens"], used - prefill["sglang:kv_evictable_tokens"]]

    def ask(number: int) -> None:
        length, tokens, leaves_at = ((5, 70, 0), (100, 70, 0), (301, 1, 0), (48, 600, 40), (401, 600, 90), (7, 600, 1))[
            number % 6
        ]

        def on_tokens(count: int) -> None:
            if leaves_at and count >= leaves_at:
                raise HungUp

        try:
            ask_pair(
                cluster.first.engine,
                cluster.decode.engine,
                prompt(100 + number, length),
                max_new_tokens=tokens,
                on_tokens=on_tokens,
            )
        except HungUp:
            assert leaves_at
        else:
            assert not leaves_at

    assert free() == [DECODE_TOKENS, 0]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(36)))
    wait_until(lambda: free() == [DECODE_TOKENS, 0], WAIT_S, "every slot on the device is free again")
    # The host pool has room for all pages of this answer only if what was written from it is free again.
    tokens, decode = 300, Writes(cluster.decode.node)
    answer = ask_pair(cluster.second.engine, cluster.decode.engine, LAST, max_new_tokens=tokens)
    assert answer.output_ids[:ANSWER_TOKENS] == cluster.right[LAST]
    pages = (cached_tokens(LAST, answer) - full_pages(len(LAST))) // PAGE_TOKENS
    wait_until(lambda: decode.stored == pages, WAIT_S, "the answer is written")


@pytest.mark.slow
@pytest.mark.skipif(not have_router(), reason="needs sglang-router")
def test_behind_sglangs_own_router_a_chat_finds_its_history(cluster: Cluster, tmp_path: Path) -> None:
    prefills = [cluster.first.engine, cluster.second.engine]
    with RouterProcess("router", prefills, [cluster.decode.engine], log=tmp_path / "router.log") as router:
        history, known = prompt(50, 333), 0
        for turn in range(3):
            decode = Writes(cluster.decode.node)
            answer = generate(router.url, history, max_new_tokens=ANSWER_TOKENS)
            assert answer.cached == Cached(storage=known)
            known = cached_tokens(history, answer)
            wait_until(lambda: decode.pages == (known - full_pages(len(history))) // PAGE_TOKENS, WAIT_S, "it is written")  # noqa: B023
            history = (*history, *answer.output_ids, *prompt(60 + turn, 33))
            for prefill in prefills:
                flush_cache(prefill.url)
