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
HIGH_WATERMARK = 0.6
WATERMARKS = ("--low-watermark", "0.5", "--high-watermark", str(HIGH_WATERMARK))
"""With room for a whole turn above them nothing is evicted before it is written, however slow the disk is."""
PROBE = prompt(90, 40)
WAIT_S = 30
CHATS, ROUNDS = 10, 3
FIRST_TOKENS, ADDED_TOKENS = 210, 110
SAID = [[prompt(1000 * chat + turn, ADDED_TOKENS if turn else FIRST_TOKENS) for turn in range(ROUNDS)] for chat in range(CHATS)]
"""Each round is the next turn of every chat. In the last one the node with the cold tier is killed."""


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
            args=(*WATERMARKS, *args),
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


def test_chats_that_do_not_fit_into_dram_find_their_history_in_the_cold_tier(bench: Bench, model: Path, tmp_path: Path) -> None:
    *talks, (probe,) = reference_answers(model, [*SAID, [PROBE]], max_new_tokens=ANSWER_TOKENS)
    *rounds, last = zip(*talks, strict=True)
    half = CHATS // 2
    parts = [*rounds, last[:half], last[half:]]
    working_set = sum(full_pages(len(ids)) for ids, _ in last) * KV_BYTES_PER_TOKEN
    third = working_set // 3
    with bench.pool("all-in-dram", 2 * working_set) as pool:
        whole = [pool.round(turns) for turns in parts]
    with bench.pool("no-tier", third) as pool:
        without = [pool.round(turns) for turns in parts]
    options = ("--cold", str(tmp_path / "cold"), "--cold-bytes", "64mb", "--cold-floor", "0")
    with bench.pool("cold-tier", third, *options) as pool:
        pool.ask(probe)
        tier = [pool.round(turns) for turns in parts[:-1]]
        figures = {
            name: pool.node.metric(f"{name}_total") for name in ("cold_written", "evicted", "evicted_unkept", "promoted")
        }
        pool.kill_and_restart(probe)
        tier.append(pool.round(parts[-1]))
    print(f"\ntokens from L3, {third >> 10} KiB of DRAM for {working_set >> 10} KiB of pages; the last figure: after a kill -9")
    print(f"  all in DRAM {whole}\n  no tier {without}\n  cold tier {tier} {figures}")
    assert figures["evicted_unkept"] == 0
    assert sum(tier[:-1]) >= 0.95 * sum(whole[:-1]), (tier, whole, figures)
    assert tier[-1] >= 0.5 * whole[-1], "what DRAM alone had is lost with the node, what the disk has is not"
    assert sum(without) <= 0.5 * sum(whole), "the chats are too few to say anything of a cold tier"
