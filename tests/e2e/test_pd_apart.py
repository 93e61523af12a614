"""A prefill and a decode server that are configured apart: answers stay right, and everybody says which settings differ.

Real SGLang on CPU, each server with the store node of its own host. What is right is what transformers answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.pd import ask_pair
from hicache_mooncake.testing.sglang_cpu.reference import Turn, reference_answers
from hicache_mooncake.testing.sglang_cpu.servers import (
    PAGE_TOKENS,
    Cached,
    flush_cache,
    full_pages,
    own_environment,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family
from tests.conftest import START_S, wait_until
from tests.e2e.support import MARKS, Engine, Host, Writes, cached_tokens, prompt, running_hosts

pytestmark = [*MARKS, pytest.mark.slow]

ANSWER_TOKENS = 40
APART = ("tag is blue in prefill and green in decode", "layout is page_first in prefill and page_first_direct in decode")


def turn(prefill: Host, decode: Host, asked: Turn) -> Cached:
    """One turn of a chat, which is written when this returns. What was cached: L1 and L2 are empty, it is from L3."""
    ids, right = asked
    flush_cache(prefill.engine.url)
    writes = Writes(decode.node)
    answer = ask_pair(prefill.engine, decode.engine, ids, max_new_tokens=ANSWER_TOKENS)
    assert answer.output_ids == right
    pages = (cached_tokens(ids, answer) - full_pages(len(ids))) // PAGE_TOKENS
    wait_until(lambda: writes.pages >= pages, START_S, "the answer is written")
    return answer.cached


def finding(host: Host) -> dict[str, object]:
    """What `doctor` says of the engines on this host."""
    command = [sys.executable, "-m", "hicache_mooncake.cli", "doctor", "--json", "--socket", str(host.node.socket_path)]
    done = subprocess.run(command, env=own_environment(), capture_output=True, text=True, timeout=300, check=False)
    return next(dict(check) for check in json.loads(done.stdout)["checks"] if check["name"] == "engines")


def test_a_pair_that_can_never_share_is_named_everywhere_and_answers_right(
    tiny_model: Callable[[Family], Path], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    ((first, second),) = reference_answers(model, [[prompt(1, 401), prompt(2, 90)]], max_new_tokens=ANSWER_TOKENS)
    engines = [
        Engine(model, role="prefill", ratio=2, extra={"tag": "blue"}),
        Engine(
            model,
            role="decode",
            ratio=2,
            extra={"tag": "green"},
            args=("--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"),
        ),
    ]
    with running_hosts(tmp_path, *engines) as (prefill, decode):
        assert turn(prefill, decode, first) == Cached()
        found = turn(prefill, decode, second)
        assert found == Cached(storage=full_pages(len(first[0]))), "its own pages, and none of the other's"
        for process in (prefill.engine, decode.engine, prefill.node, decode.node, prefill.master):
            wait_until(lambda: all(words in process.log.read_text() for words in APART), START_S, f"{process.name} says it")  # noqa: B023
        for host in (prefill, decode):
            assert host.node.metric("unshared_engines") == 1
            said = finding(host)
            assert said["status"] == "warn"
            assert all(words in str(said["advice"]) for words in APART)
