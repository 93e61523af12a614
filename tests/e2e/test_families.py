"""Models that keep their cache otherwise than plain attention does: two engines of a kind, real SGLang on CPU, share a pool.

What is right is what transformers answers, which knows neither SGLang nor a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.reference import Turn, reference_answers
from hicache_mooncake.testing.sglang_cpu.servers import (
    PAGE_TOKENS,
    Answer,
    Cached,
    flush_cache,
    full_pages,
    tokens_written_to_l3,
    wait_written_to_l3,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family
from tests.e2e.support import (
    ANSWER_TOKENS,
    END_TO_END,
    MARKS,
    Engine,
    Host,
    Prompt,
    ask,
    cached_tokens,
    prompt,
    running_hosts,
)
from tests.sglang.matrix import Supports

pytestmark = MARKS

CONVERSATION = [prompt(1, 701), prompt(2, 120), prompt(3, 100), prompt(4, 90)]
# Leaves the first turn's prompt inside a page, long before its end.
BRANCH = [(*CONVERSATION[0][:409], *prompt(5, 60))]
# Ends with a page, one before it and one after it.
ENDS = [[prompt(6 + i, 480 + i)] for i in (-1, 0, 1)]

MATRIX_FAMILIES: dict[Family, str] = {"deepseek": "mla", "mellum": "swa", "qwen3-next": "mamba"}

MAMBA_SLOTS = 64
# SGLang keeps recurrent states at the last chunk boundary of a prefill. It also does at multiples of 256 tokens while decoding;
# no answer here reaches one.
STATE_TOKENS = 64


@dataclass(frozen=True)
class Pair:
    family: Family
    a: Host
    b: Host
    conversation: list[Turn]
    branch: Turn
    ends: list[Turn]


def kept(family: Family, ids: Prompt, answer: Answer | None = None) -> int:
    """How much of a prompt, and of its answer, can be found again."""
    if family == "qwen3-next":
        return len(ids) // STATE_TOKENS * STATE_TOKENS
    return full_pages(len(ids) - 1) if answer is None else cached_tokens(ids, answer)


@pytest.fixture(
    scope="module",
    params=[pytest.param("deepseek", marks=pytest.mark.slow), "mellum", pytest.param("qwen3-next", marks=pytest.mark.slow)],
)
def pair(
    request: pytest.FixtureRequest, tiny_model: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    family: Family = request.param
    model = tiny_model(family)
    conversation, *others = reference_answers(model, [CONVERSATION, BRANCH, *ENDS], max_new_tokens=ANSWER_TOKENS)
    branch, *ends = (turns[0] for turns in others)
    # Every rank of an MLA model holds the same pages: written once, and another number of ranks reads them too.
    tp = 2 if family == "deepseek" else 1
    args = ("--max-mamba-cache-size", str(MAMBA_SLOTS)) if family == "qwen3-next" else ()
    with running_hosts(
        tmp_path_factory.mktemp(family), Engine(model, tp=tp, args=args), Engine(model, dynamic=True, args=args)
    ) as (a, b):
        yield Pair(family, a, b, conversation, branch, ends)


def test_a_conversation_goes_on_on_another_engine(pair: Pair, supports: Supports) -> None:
    known = 0
    stored = pair.a.node.metric("stored_total")
    for ids, right in pair.conversation[:3]:
        written = tokens_written_to_l3(pair.a.engine.url)
        answer = ask(pair.a.engine, ids)
        assert answer.output_ids == right
        assert answer.cached == Cached(device=known)
        now_known = kept(pair.family, ids, answer)
        wait_written_to_l3(pair.a.engine.url, written + now_known - known)
        known = now_known
    if pair.family == "deepseek":
        assert pair.a.node.metric("stored_total") - stored == known // PAGE_TOKENS, "one rank writes for both"
    ids, right = pair.conversation[3]
    answer = ask(pair.b.engine, ids)
    assert answer.cached == Cached(storage=known)
    assert answer.output_ids == right
    supports(family=MATRIX_FAMILIES[pair.family], layout="page_first", shape=END_TO_END)
    if pair.a.engine.tp > 1:
        supports(family=MATRIX_FAMILIES[pair.family], layout="page_first", shape=f"{END_TO_END}, another TP size")


def test_every_rank_of_the_writer_reads_its_pages_again(pair: Pair) -> None:
    ids, right = pair.conversation[2]
    flush_cache(pair.a.engine.url)
    answer = ask(pair.a.engine, ids)
    assert answer.cached == Cached(storage=kept(pair.family, ids))
    assert answer.output_ids == right


def test_a_prompt_that_leaves_a_known_one_gets_no_part_of_it_that_is_not_whole(pair: Pair) -> None:
    """Windows and states are in L3 only where a prompt or an answer ended: elsewhere keys and values alone are of no use."""
    ids, right = pair.branch
    flush_cache(pair.b.engine.url)
    answer = ask(pair.b.engine, ids)
    assert answer.output_ids == right
    assert answer.cached == Cached(storage=full_pages(409) if pair.family == "deepseek" else 0)


def test_no_page_is_lost_at_the_end_of_a_prompt(pair: Pair) -> None:
    for ids, right in pair.ends:
        written = tokens_written_to_l3(pair.a.engine.url)
        answer = ask(pair.a.engine, ids)
        assert answer.output_ids == right
        wait_written_to_l3(pair.a.engine.url, written + kept(pair.family, ids, answer))
        again = ask(pair.b.engine, ids)
        assert again.output_ids == right
        assert again.cached == Cached(storage=kept(pair.family, ids))
