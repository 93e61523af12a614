"""More chats than DRAM has room for, on a real SGLang server: the cold tier has their pages when their next turn comes.

All that is cached comes from L3: L1 and L2 are dropped before each request. One server is given three nodes, one after the
other. What is right is what transformers answers.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.pool import MasterProcess, NodeProcess
from hicache_mooncake.testing.sglang_cpu.processes import stop_all
from hicache_mooncake.testing.sglang_cpu.reference import Turn, reference_answers
from hicache_mooncake.testing.sglang_cpu.servers import (
    SglangServer,
    attach_storage,
    detach_storage,
    flush_cache,
    full_pages,
    pool_caching,
    pool_config,
    start_servers,
)
from hicache_mooncake.testing.sglang_cpu.tiny_model import Family
from tests.conftest import wait_until
from tests.e2e.support import MARKS, RUNNING, ask, prompt

pytestmark = MARKS

KEY = "admin"
KV_BYTES_PER_TOKEN = 4096
ANSWER_TOKENS = 8
HIGH_WATERMARK = 0.95
PROBE = prompt(90, 40)
WAIT_S = 30


@dataclass(frozen=True)
class Chats:
    """Each round is the next turn of every chat. In the last one the node with the cold tier is killed."""

    chats: int
    first_tokens: int
    added_tokens: int
    rounds: int

    def said(self) -> list[list[tuple[int, ...]]]:
        return [
            [prompt(1000 * chat + turn, self.added_tokens if turn else self.first_tokens) for turn in range(self.rounds)]
            for chat in range(self.chats)
        ]


FEW = Chats(chats=10, first_tokens=220, added_tokens=110, rounds=4)
MANY = Chats(chats=24, first_tokens=400, added_tokens=200, rounds=8)


@dataclass
class Bench:
    """A server without an L3 until it is given a node's."""

    server: SglangServer
    master: MasterProcess
    directory: Path
    logs: Path

    @contextlib.contextmanager
    def pool(self, name: str, dram_bytes: int, *args: str) -> Iterator[Pool]:
        """With a node of its own, whose pages no other run sees."""
        node = NodeProcess(
            name,
            socket_path=self.directory / name,
            master=self.master,
            log=self.logs / f"{name}.log",
            dram=str(dram_bytes),
            args=args,
        )
        RUNNING.append(node)
        try:
            node.start_and_wait()
            config = pool_config(node.socket_path) | {"model_id": name}
            attach_storage(self.server.url, "mooncake", config, admin_key=KEY)
            yield Pool(self.server, node, dram_bytes)
            flush_cache(self.server.url, admin_key=KEY)
            detach_storage(self.server.url, admin_key=KEY)
        finally:
            RUNNING.remove(node)
            node.stop()


@dataclass
class Pool:
    server: SglangServer
    node: NodeProcess
    dram_bytes: int

    def ask(self, turn: Turn) -> int:
        """Tokens that came from L3. All that is to be written has been, when it returns."""
        ids, right = turn
        answer = ask(self.server, ids, tokens=ANSWER_TOKENS)
        assert answer.output_ids == right
        assert answer.cached.device == answer.cached.host == 0
        flush_cache(self.server.url, admin_key=KEY)
        wait_until(lambda: self.node.metric("used_bytes") <= HIGH_WATERMARK * self.dram_bytes, WAIT_S, "room again")
        return answer.cached.storage

    def round(self, turns: Sequence[Turn]) -> int:
        return sum(map(self.ask, turns))

    def kill_and_restart(self, probe: Turn) -> None:
        self.node.kill()
        self.node.start_and_wait()
        wait_until(lambda: self.ask(probe) > 0, WAIT_S, "the engine has found its node again")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[Family], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def bench(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    logs = tmp_path_factory.mktemp("cold")
    directory = Path(tempfile.mkdtemp(prefix="hicache-e2e-"))  # pytest's own paths are too long for a UNIX socket
    master = MasterProcess("master", log=logs / "master.log")
    server = SglangServer(
        "engine", model=model, caching=pool_caching(None), log=logs / "engine.log", args=("--admin-api-key", KEY)
    )
    RUNNING[:] = [master, server]
    try:
        master.start_and_wait()
        start_servers([server])
        yield Bench(server, master, directory, logs)
    finally:
        RUNNING.clear()
        stop_all([server, master])
        shutil.rmtree(directory)


@pytest.mark.parametrize("chats", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_chats_that_do_not_fit_into_dram_find_their_history_in_the_cold_tier(
    bench: Bench, model: Path, tmp_path: Path, chats: Chats
) -> None:
    *talks, (probe,) = reference_answers(model, [*chats.said(), [PROBE]], max_new_tokens=ANSWER_TOKENS)
    *rounds, last = zip(*talks, strict=True)
    working_set = sum(full_pages(len(ids)) for ids, _ in last) * KV_BYTES_PER_TOKEN
    third = working_set // 3
    with bench.pool("all-in-dram", 2 * working_set) as pool:
        whole = [pool.round(turns) for turns in (*rounds, last)]
    with bench.pool("without-tier", third) as pool:
        without = [pool.round(turns) for turns in (*rounds, last)]
    options = ("--cold", str(tmp_path / "cold"), "--cold-bytes", str(max(64 << 20, 2 * working_set)), "--cold-floor", "0")
    with bench.pool("cold-tier", third, *options) as pool:
        pool.ask(probe)
        tier = [pool.round(turns) for turns in rounds]
        print({name: pool.node.metric(f"{name}_total") for name in ("cold_written", "evicted", "evicted_unkept", "promoted")})
        half = chats.chats // 2
        before = pool.round(last[:half])
        pool.kill_and_restart(probe)
        after = pool.round(last[half:])
        again = pool.round(last)
        print(working_set, whole, without, tier, before, after, again)
