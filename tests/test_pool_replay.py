"""Traces through real nodes: as many hits as theory says, and what the command makes of them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from hicache_master.conductor.replay import read_trace
from typer.testing import CliRunner

from hicache_mooncake.cli import app
from hicache_mooncake.testing import pool_replay
from hicache_mooncake.testing.local import FakeRank
from hicache_mooncake.testing.pool_replay import BLOCK_TOKENS, Lru, Shape, replay

CONVERSATION = Path(os.environ.get("HICACHE_TRACES", "traces")) / "conversation_trace.jsonl"
needs_trace = pytest.mark.skipif(not CONVERSATION.exists(), reason="HICACHE_TRACES names no folder with the public traces")
BLOCKS = 256
TOKENS = BLOCKS * BLOCK_TOKENS


def talks(requests: int = 150, seed: int = 3) -> list[list[int]]:
    """Conversations that share their first page and come back with a longer prompt."""
    rng = random.Random(seed)
    open_talks: list[list[int]] = []
    named, prompts = 1, []
    for _ in range(requests):
        pages = rng.choice(open_talks[-20:]) if open_talks and rng.random() < 0.8 else [0]
        if len(pages) == 1 or len(pages) > 40:
            pages = [0]
            open_talks.append(pages)
        more = rng.randrange(1, 12)
        pages += range(named, named + more)
        named += more
        prompts.append(list(pages))
    return prompts


def write(path: Path, prompts: list[list[int]]) -> Path:
    rows = [
        {"timestamp": at, "input_length": len(pages) * BLOCK_TOKENS, "output_length": 1, "hash_ids": pages}
        for at, pages in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_plain_lru_by_hand() -> None:
    lru = Lru(3)
    assert lru.request([1, 2, 3]) == 0
    assert lru.request([1, 4]) == 1
    assert lru.request([1, 2, 3]) == 2, "the tail of the first one went"
    assert lru.request([4]) == 0


def test_a_node_hits_what_plain_lru_hits_to_the_page() -> None:
    done: list[int] = []
    prompts = talks()
    replayed = replay(prompts, Shape(tokens=TOKENS), done.append)
    assert replayed.hits == replayed.told == replayed.expected > 0
    unbounded = Lru(10**9)
    assert replayed.hits < sum(map(unbounded.request, prompts)), "something was evicted"
    assert (replayed.requests, replayed.pages) == (len(prompts), sum(map(len, prompts)))
    assert done == list(range(1, len(prompts) + 1))


def test_wrong_bytes_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRank, "read", lambda self, page: bytes(self.page_bytes))
    with pytest.raises(AssertionError, match="wrong bytes"):
        replay(talks(20), Shape(tokens=TOKENS))


@needs_trace
@pytest.mark.parametrize(("blocks", "hits"), [(1_000, 1_038), (5_000, 2_630)])
def test_a_node_hits_what_is_known_of_the_public_trace(blocks: int, hits: int) -> None:
    prompts = [arrival.pages for arrival in read_trace(CONVERSATION, 1_000)]
    assert replay(prompts, Shape(tokens=blocks * BLOCK_TOKENS)).hits == hits


def test_the_command_compares_nodes_alone_with_a_pool_of_them_and_draws_it(tmp_path: Path) -> None:
    trace = write(tmp_path / "talks.jsonl", talks())
    plot = tmp_path / "hits.svg"
    arguments = ["--through-pool", "--nodes", "2", "--capacity", str(TOKENS / 1e6), "--plot", str(plot), "--json"]
    result = CliRunner().invoke(app, ["replay", "--trace", str(trace), *arguments])
    assert result.exit_code == 0, result.output
    alone, pool = json.loads(result.stdout)
    assert (alone["shape"]["shared"], pool["shape"]["shared"]) == (False, True)
    assert pool["hits"] > alone["hits"] == alone["expected"]
    assert pool["remote"] > alone["remote"] == 0
    drawn = plot.read_text()
    assert drawn.count("<circle") == 2, "what was measured, over lines for theory"
    assert "lru, one pool" in drawn
    assert "plain LRU, each alone, exact" in drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "0.01"], "256 pages must have room on each node"),
        (["--eviction", "mru"], "--eviction mru: none of"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    trace = write(tmp_path / "talks.jsonl", talks(5))
    result = CliRunner().invoke(app, ["replay", "--trace", str(trace), "--through-pool", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_pages_that_cannot_be_stored_end_the_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(rank: FakeRank, *_: object) -> pool_replay.Outcome:
        return pool_replay.Outcome(b"\x00", {"no_room": 1})

    monkeypatch.setattr(FakeRank, "transfer", refused)
    trace = write(tmp_path / "talks.jsonl", talks(1))
    result = CliRunner().invoke(app, ["replay", "--trace", str(trace), "--through-pool", "--capacity", "1"])
    assert result.exit_code == 1
    assert "cannot be stored: {'no_room': 1}" in result.output
