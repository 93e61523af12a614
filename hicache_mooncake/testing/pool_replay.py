"""Traces of requests through real nodes: each page of a prompt is looked up, loaded, compared and stored, as by an engine.

A page of one granule stands for each page of the trace, so that what decides about hits, the keys, the directory, eviction,
spill and replicas, is the real thing, and gigabytes are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_mooncake.client.client import Outcome
from hicache_mooncake.config import load_settings
from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.protocol import HASH_BYTES
from hicache_mooncake.testing.local import FakeRank
from hicache_mooncake.testing.sglang_cpu.pool import MasterProcess, NodeProcess

BLOCK_TOKENS = 512
"""Of a page of a trace."""
_NAMESPACE = b"traces-in-a-pool"
_JOIN_S = 60.0
_DEADLINE_S = 7.5
_STORE_TRIES = 20
_STORE_PAUSE_S = 0.05


@dataclass(frozen=True)
class Shape:
    """`tokens`: what each node has room for. `shared`: one pool of all nodes; otherwise each is alone. `exact`: a node evicts a
    page when one comes that has no room, as in theory; otherwise it evicts ahead of need, by the watermarks that are its
    defaults."""

    nodes: int = 1
    tokens: int = 3_000_000
    shared: bool = True
    eviction: str = "lru"
    exact: bool = True

    @property
    def blocks(self) -> int:
        """Of each node."""
        return self.tokens // BLOCK_TOKENS


@dataclass
class Replayed:
    """Pages, all together. `expected`: hits of plain LRU, one of the pool's size or one for each node alone."""

    requests: int = 0
    pages: int = 0
    hits: int = 0
    expected: int = 0
    remote: int = 0
    """Hits that came from another node."""
    told: int = 0
    """What lookups found: more than what was then loaded where pages went in between."""
    seconds: float = 0.0


class Lru:
    """Plain LRU over so many pages. A request is looked up before it is stored; of what it used its tail is the oldest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def request(self, pages: Sequence[int]) -> int:
        hits = next((at for at, page in enumerate(pages) if page not in self._held), len(pages))
        for page in reversed(pages):
            self._held[page] = None
            self._held.move_to_end(page)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return hits


def replay(requests: Sequence[Sequence[int]], shape: Shape, progress: Callable[[int], object] = lambda done: None) -> Replayed:
    """Every request goes to the next node in turn, one after the other. Raises AssertionError for a page with wrong bytes, and
    `ProcessError` when a node or master does not start."""
    if not requests:
        raise ValueError("no requests to replay")
    longest = max(map(len, requests))
    alone = [Lru(shape.blocks) for _ in range(shape.nodes)]
    one = Lru(shape.blocks * shape.nodes)
    replayed = Replayed()
    with _ranks(shape, longest) as ranks:
        started = time.monotonic()
        for number, pages in enumerate(requests):
            turn = number % shape.nodes
            _request(ranks[turn], pages, replayed)
            replayed.expected += (one if shape.shared else alone[turn]).request(pages)
            progress(number + 1)
        replayed.seconds = time.monotonic() - started
    return replayed


def _request(rank: FakeRank, pages: Sequence[int], replayed: Replayed) -> None:
    hashes = [hashlib.sha256(page.to_bytes(8, "little")).digest() for page in pages]
    found = rank.exists(_NAMESPACE, hashes)
    hits = _load(rank, hashes[:found], replayed) if found else 0
    replayed.requests += 1
    replayed.pages += len(pages)
    replayed.told += found
    replayed.hits += hits
    for page in range(hits, len(hashes)):
        rank.write(page, _body(hashes[page]))
    outcome = Outcome(b"\x00")
    for _ in range(_STORE_TRIES):
        outcome = rank.transfer("store", _NAMESPACE, hashes)  # what is there is told, and costs no bytes
        if all(outcome.ok):
            return
        time.sleep(_STORE_PAUSE_S)
    raise RuntimeError(f"pages cannot be stored: {outcome.reasons}")


def _load(rank: FakeRank, hashes: Sequence[bytes], replayed: Replayed) -> int:
    """How many came, from the head on."""
    for page in range(len(hashes)):
        rank.write(page, bytes(rank.page_bytes))
    outcome = rank.transfer("load", _NAMESPACE, hashes)
    came = outcome.ok.find(0) if 0 in outcome.ok else len(hashes)
    for page in range(came):
        if rank.read(page) != _body(hashes[page]):
            raise AssertionError(f"page {page} of {len(hashes)} has wrong bytes")
    replayed.remote += outcome.remote_bytes // rank.page_bytes
    return came


def _body(page_hash: bytes) -> bytes:
    return page_hash * (GRANULE // HASH_BYTES)


@contextlib.contextmanager
def _ranks(shape: Shape, longest: int) -> Iterator[list[FakeRank]]:
    """One rank on each of the nodes, which are processes of their own and end with this."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-replay-", ignore_cleanup_errors=True)))
        master = None
        if shape.shared and shape.nodes > 1:
            master = stack.enter_context(MasterProcess("master", log=directory / "master.log"))
        options = ["--eviction", shape.eviction, "--drain-s", "0"]
        if shape.exact:
            options += ["--high-watermark", "1", "--low-watermark", "0.99"]
        ranks = []
        for number in range(shape.nodes):
            name = f"node-{number}"
            node = NodeProcess(
                name,
                socket_path=directory / f"{name}.sock",
                master=master,
                log=directory / f"{name}.log",
                dram=str(shape.blocks * GRANULE),
                args=options,
            )
            stack.enter_context(node)
            settings, _ = load_settings(
                {}, {}, {"socket": str(node.socket_path), "node": "external", "deadline_s": _DEADLINE_S}
            )
            rank = FakeRank(settings, pages=longest, page_bytes=GRANULE)
            stack.callback(rank.close)
            ranks.append(rank)
        if master is not None:
            _wait_for_all(ranks)
        yield ranks


def _wait_for_all(ranks: Sequence[FakeRank]) -> None:
    """Until each node finds what the others store."""
    until = time.monotonic() + _JOIN_S
    for number, writer in enumerate(ranks):
        page = hashlib.sha256(f"joined {number}".encode()).digest()
        writer.write(0, _body(page))
        writer.transfer("store", _NAMESPACE, [page])
        for reader in ranks:
            while reader.exists(_NAMESPACE, [page]) != 1:
                if time.monotonic() >= until:
                    raise RuntimeError("the nodes do not find each other's pages")
                time.sleep(0.05)
    ranks[0].client.clear(_NAMESPACE)
