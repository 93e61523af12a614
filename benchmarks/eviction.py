"""Eviction policies on traces of real requests: `python -m benchmarks.eviction --trace FILE [--trace FILE]`.

A trace is a file of JSON objects, one a request, in the order of time: `timestamp` (ms) and `hash_ids`, the names of the
prompt's blocks, head first, equal where the whole prefix is equal (the format of the traces that the Mooncake project
published). A request is one after the other: it hits the leading run of its blocks that are there, and then all its blocks are
stored. Several traces are also replayed as one, merged by time, each with blocks of its own.

Prints hits, their ratio to plain LRU's, and the orphan share: the part of the blocks held that lie behind one that is not held,
at the mean of 20 looks. With `--store` the real store of a node decides instead, pages of one granule each.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.node.policy import POLICIES, Evictable, Policy, make_policy
from hicache_mooncake.node.store import Store

BLOCK_TOKENS = 512
MILLIONS_OF_TOKENS = (0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 50)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in order: when, and the blocks of each, by number from 0."""

    name: str
    times_ms: list[int]
    requests: list[list[int]]

    def hashes(self) -> list[bytes]:
        """A name for each block, as a page has one."""
        last = max(max(blocks) for blocks in self.requests)
        return [hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(last + 1)]


def read_trace(path: Path) -> Trace:
    """Raises ValueError, with the line, for a file that is not a trace."""
    times: list[int] = []
    requests: list[list[int]] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                request = json.loads(line)
                times.append(int(request["timestamp"]))
                requests.append([int(block) for block in request["hash_ids"]])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error!r} instead of a request with timestamp and hash_ids"
                ) from error
    return Trace(path.stem.removesuffix("_trace"), times, requests)


def merge(traces: Sequence[Trace]) -> Trace:
    """All of them at once, by time; no two share a block."""
    count = len(traces)
    every = [
        (at, which, [block * count + which for block in blocks])
        for which, trace in enumerate(traces)
        for at, blocks in zip(trace.times_ms, trace.requests, strict=True)
    ]
    every.sort(key=lambda request: request[:2])
    return Trace("all at once", [at for at, _, _ in every], [blocks for _, _, blocks in every])


class Cache(Protocol):
    """What is replayed into."""

    def request(self, blocks: list[int]) -> int:
        """How many leading blocks were there; now all are."""

    def probe(self, blocks: list[int], touch: bool) -> None:
        """Somebody looks for them and does not fetch them."""

    def __contains__(self, block: int) -> bool: ...

    def __len__(self) -> int: ...


class PolicyAlone:
    """A policy over so many blocks, without a store."""

    def __init__(self, policy: str, capacity: int, hashes: list[bytes]) -> None:
        self.policy: Policy[Evictable] = make_policy(policy)
        self._capacity = capacity
        self._hashes = hashes
        self._held: dict[int, Evictable] = {}
        self._numbers: dict[bytes, int] = {}

    def request(self, blocks: list[int]) -> int:
        held = self._held
        pages = [held.get(block) for block in blocks]
        hits = pages.index(None) if None in pages else len(pages)
        found = [page for page in pages[:hits] if page is not None]
        new = [block for block, page in zip(blocks, pages, strict=True) if page is None]
        # What is there behind a gap is stored anew by the engine, which finds it here: its place in the chain, not a use.
        self.policy.touched(found)
        fresh = [Evictable(self._hashes[block]) for block in new]
        self.policy.inserted(fresh)
        held.update(zip(new, fresh, strict=True))
        self._numbers.update((page.hash, block) for block, page in zip(new, fresh, strict=True))
        if len(found) < len(blocks):
            self.policy.arranged([held[block] for block in blocks])
        while len(held) > self._capacity:
            gone = self.policy.victims(len(held) - self._capacity)
            assert gone
            self.policy.removed(gone, evicted=True)
            for page in gone:
                del held[self._numbers.pop(page.hash)]
        return hits

    def probe(self, blocks: list[int], touch: bool) -> None:
        found = [page for block in blocks if (page := self._held.get(block)) is not None]
        if touch:
            self.policy.touched(found)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def __len__(self) -> int:
        return len(self._held)


class RealStore:
    """The store of a node with room for so many blocks, through the calls that a rank's lookups, loads and stores make."""

    _NAMESPACE = b"n" * 16

    def __init__(self, policy: str, capacity: int, hashes: list[bytes]) -> None:
        # The batch that is being written is in use, so room for the longest prompt must be there besides.
        self.store = Store(capacity * GRANULE, policy=policy, high_watermark=1.0, low_watermark=1.0, max_pinned_share=1.0)
        self._hashes = hashes

    def _blob(self, blocks: list[int]) -> bytes:
        return b"".join([self._hashes[block] for block in blocks])

    def request(self, blocks: list[int]) -> int:
        blob = self._blob(blocks)
        column = self.store.present(self._NAMESPACE, blob)
        hits = column.find(0) if 0 in column else len(blocks)
        txn, status, _ = self.store.reserve(1, self._NAMESPACE, blob, GRANULE)
        writes = status.count(1)
        self.store.commit(1, txn, b"\x01" * writes, [0] * writes)
        return hits

    def probe(self, blocks: list[int], touch: bool) -> None:
        self.store.present(self._NAMESPACE, self._blob(blocks), touch=touch)

    def __contains__(self, block: int) -> bool:
        return self.store.present(self._NAMESPACE, self._hashes[block], touch=False) == b"\x01"

    def __len__(self) -> int:
        return self.store.objects


@dataclasses.dataclass
class Replayed:
    hits: int
    orphans: float
    """Share of the blocks held that lie behind one that is not."""
    seconds: float


def replay(trace: Trace, cache: Cache, *, probes: str = "", looks: int = 20, limit: int | None = None) -> Replayed:
    """The first `limit` requests. `probes`: with every request another one, of the past, is looked for and not fetched:
    `touch` for lookups that count as use, `plain` for those that do not."""
    rng = random.Random(0)
    before: dict[int, int] = {}
    hits, orphans, seconds = 0, [], 0.0
    requests = trace.requests[:limit]
    every = max(1, len(requests) // looks) if looks else len(requests) + 1
    for number, blocks in enumerate(requests):
        started = time.perf_counter()
        hits += cache.request(blocks)
        seconds += time.perf_counter() - started
        if probes and number:
            cache.probe(requests[rng.randrange(number)], probes == "touch")
        before.update(zip(blocks[1:], blocks, strict=False))
        if number % every == every - 1:
            orphans.append(orphan_share(before, cache))
    return Replayed(hits, sum(orphans) / len(orphans) if orphans else 0.0, seconds)


def orphan_share(before: dict[int, int], cache: Cache) -> float:
    """`before`: of every block but the heads the block before it."""
    behind: dict[int, bool] = {}
    for block in before:
        path = []
        at: int | None = block
        while at is not None and at not in behind:
            path.append(at)
            at = before.get(at)
        gap = behind[at] if at is not None else False
        for each in reversed(path):
            # `behind`: is this block, or one before it, missing?
            gap = gap or each not in cache
            behind[each] = gap
    lost = sum(block in cache and behind[before[block]] for block in before)
    return lost / max(1, len(cache))


def _figures(
    trace: Trace, policies: Iterable[str], capacities: Sequence[int], real: bool, limit: int | None
) -> Iterator[tuple[str, int, Replayed]]:
    hashes = trace.hashes()
    make = RealStore if real else PolicyAlone
    for policy in policies:
        for capacity in capacities:
            yield policy, capacity, replay(trace, make(policy, capacity, hashes), limit=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--policy", action="append", choices=list(POLICIES), help="all without any")
    parser.add_argument("--tokens", type=float, nargs="*", default=MILLIONS_OF_TOKENS, help="capacities in millions")
    parser.add_argument("--store", action="store_true", help="through the store of a node")
    parser.add_argument("--probes", action="store_true", help="what it costs that lookups which fetch nothing count as use")
    parser.add_argument("--requests", type=int, help="only so many")
    options = parser.parse_args()
    traces = [read_trace(path) for path in options.trace]
    if len(traces) > 1:
        traces.append(merge(traces))
    capacities = [int(millions * 1e6) // BLOCK_TOKENS for millions in options.tokens]
    policies = ["lru", *(name for name in options.policy or POLICIES if name != "lru")]
    console = Console()
    for trace in traces:
        columns = [f"{millions:g} M" for millions in options.tokens]
        table = Table(title=f"{trace.name}: {len(trace.requests)} requests; capacity in tokens")
        for name in ("policy", "", *columns):
            table.add_column(name, justify="right")
        if options.probes:
            hashes = trace.hashes()
            for policy in policies:
                for probes in ("", "plain", "touch"):
                    results = [
                        replay(trace, PolicyAlone(policy, c, hashes), probes=probes, looks=0, limit=options.requests)
                        for c in capacities
                    ]
                    table.add_row(policy, f"probes: {probes or 'none'}", *(f"{result.hits:,}" for result in results))
            console.print(table)
            continue
        lru: dict[int, int] = {}
        rows: dict[str, list[Replayed]] = {}
        for policy, capacity, result in _figures(trace, policies, capacities, options.store, options.requests):
            lru.setdefault(capacity, result.hits)
            rows.setdefault(policy, []).append(result)
        for policy, results in rows.items():
            table.add_row(policy, "hits", *(f"{result.hits:,}" for result in results))
            ratios = (f"{r.hits / lru[c]:.3f}" if lru[c] else "-" for c, r in zip(capacities, results, strict=True))
            table.add_row("", "to LRU", *ratios)
            table.add_row("", "orphans", *(f"{result.orphans:.2%}" for result in results))
            table.add_row("", "seconds", *(f"{result.seconds:.1f}" for result in results), end_section=True)
        console.print(table)


if __name__ == "__main__":
    main()
