"""What the end-to-end tests share: prompts, hosts with a node and an engine each, and asking so that hits are certain."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hicache_mooncake.testing.sglang_cpu.pool import MasterProcess, NodeProcess
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, stop_all
from hicache_mooncake.testing.sglang_cpu.servers import (
    Answer,
    Caching,
    Extra,
    Role,
    SglangServer,
    decode_tree_caching,
    full_pages,
    generate,
    offload_caching,
    pool_caching,
    start_servers,
    tokens_written_to_l3,
    wait_written_to_l3,
)

MARKS = [
    pytest.mark.e2e,
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("sglang", "torch", "hicache_mooncake.backend")),
        reason="needs sglang, torch and the storage backend",
    ),
]
ANSWER_TOKENS = 24
END_TO_END = "end to end"
"""In the support matrix: two engines, one reads what the other has written."""
RUNNING: list[ManagedProcess] = []
"""What is started now: a test that fails shows the ends of their logs."""
Prompt = tuple[int, ...]


def prompt(seed: int, tokens: int) -> Prompt:
    rng = random.Random(seed)
    return (1, *(rng.randrange(3, 320) for _ in range(tokens - 1)))


@dataclass(frozen=True)
class Engine:
    """How one host's engine is started. Without `attached` it has no L3 until it is given one.

    One with `role` decode writes what it computes to L3 and keeps nothing, or with `tree` has a HiCache of its own. `ratio`:
    tokens in L2 for each one in L1.
    """

    model: Path
    tp: int = 1
    dynamic: bool = False
    attached: bool = True
    role: Role | None = None
    tree: bool = False
    ratio: float | None = None
    args: Sequence[str] = ()
    extra: Extra | None = None

    def caching(self, socket: Path) -> Caching:
        if self.role == "decode":
            caching = decode_tree_caching if self.tree else offload_caching
            return caching(socket, dynamic=self.dynamic, ratio=self.ratio, extra=self.extra)
        return pool_caching(socket if self.attached else None, dynamic=self.dynamic, ratio=self.ratio, extra=self.extra)


@dataclass(frozen=True)
class Host:
    engine: SglangServer
    node: NodeProcess
    master: MasterProcess


class Writes:
    """Pages that a node was given from now on."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._before = self._now()

    def _now(self) -> list[int]:
        return [self._node.metric(f"{name}_total") for name in ("stored", "had", "stored_bytes")]

    @property
    def stored(self) -> int:
        return self._now()[0] - self._before[0]

    @property
    def had(self) -> int:
        return self._now()[1] - self._before[1]

    @property
    def pages(self) -> int:
        """Stored, or there already."""
        return self.stored + self.had

    @property
    def stored_bytes(self) -> int:
        return self._now()[2] - self._before[2]


@contextlib.contextmanager
def running_hosts(logs: Path, *engines: Engine) -> Iterator[list[Host]]:
    """A master, and for each engine a store node of its own; everything is ended at the end."""
    sockets = Path(tempfile.mkdtemp(prefix="hicache-e2e-"))  # pytest's own paths are too long for a UNIX socket
    started = RUNNING
    try:
        master = MasterProcess("master", log=logs / "master.log")
        started.append(master)
        master.start_and_wait()
        hosts = []
        for letter, engine in zip("abcd", engines, strict=False):
            node = NodeProcess(f"node-{letter}", socket_path=sockets / letter, master=master, log=logs / f"node-{letter}.log")
            started.append(node)
            node.start_and_wait()
            server = SglangServer(
                f"engine-{letter}",
                model=engine.model,
                caching=engine.caching(node.socket_path),
                log=logs / f"engine-{letter}.log",
                tp=engine.tp,
                role=engine.role,
                args=engine.args,
            )
            hosts.append(Host(server, node, master))
        started += [host.engine for host in hosts]
        start_servers([host.engine for host in hosts])
        yield hosts
    finally:
        for process in started:
            if isinstance(process, NodeProcess):
                process.thaw()
        stopping, started[:] = started[::-1], []
        stop_all(stopping)
        shutil.rmtree(sockets)


def ask(server: SglangServer, ids: Prompt, *, tokens: int = ANSWER_TOKENS) -> Answer:
    return generate(server.url, ids, max_new_tokens=tokens)


def ask_and_wait_until_written(server: SglangServer, ids: Prompt, *, tokens: int = ANSWER_TOKENS, copies: int = 1) -> Answer:
    """For prompts that share no page with what the server has written before. `copies`: ranks that write, each its part of a
    page."""
    written = tokens_written_to_l3(server.url)
    answer = ask(server, ids, tokens=tokens)
    wait_written_to_l3(server.url, written + copies * cached_tokens(ids, answer))
    return answer


def cached_tokens(ids: Prompt, answer: Answer) -> int:
    """Tokens of the whole pages of a prompt and its answer; the last token of an answer is never computed."""
    return full_pages(len(ids) + len(answer.output_ids) - 1)
