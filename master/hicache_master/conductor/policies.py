"""Which prefill engine gets a request: Algorithm 1 of Mooncake (FAST'25), and what it is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Sources = Literal["own", "holder", "pool"]
"""Where an engine may get pages that it has not: nowhere, from the one other holder that has most of them, from any holder."""


class Fetch(NamedTuple):
    """Pages [start, end) of the prompt from this holder."""

    holder: str
    start: int
    end: int
    cold: bool


@dataclass(slots=True)
class Candidate:
    """What one prefill engine would make of a request, at its best."""

    engine: str
    queue_s: float
    pages: int
    """That are not computed: its own and those that it loads."""
    own_pages: int
    """Of these, in its own tiers or on its host; the others are fetched."""
    load_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float


class Policy(Protocol):
    """Chooses one of the prefill engines. Candidates come in the order in which the engines joined, at least one."""

    name: str
    sources: Sources

    def choose(self, candidates: Sequence[Candidate]) -> Candidate: ...


class Random:
    name = "random"
    sources: Sources = "own"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return candidates[self._random.randrange(len(candidates))]


class RoundRobin:
    name = "round-robin"
    sources: Sources = "own"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        self._next += 1
        return candidates[(self._next - 1) % len(candidates)]


class LeastQueue:
    name = "least-queue"
    sources: Sources = "own"

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda each: each.queue_s)


class LongestPrefix:
    name = "longest-prefix"
    sources: Sources = "own"

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda each: (-each.pages, each.queue_s))


class _Soonest:
    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda each: (each.ttft_s, each.queue_s))


class LocalAware(_Soonest):
    """Knows what each engine has, but moves nothing."""

    name = "local-aware"
    sources: Sources = "own"


class Algorithm1(_Soonest):
    """Pages come from the one node that has most of them, as the paper has it."""

    name = "algorithm-1"
    sources: Sources = "holder"


class PoolAware(_Soonest):
    """The least TTFT with the whole pool as a source: what the conductor does."""

    name = "pool-aware"
    sources: Sources = "pool"


POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (Random, RoundRobin, LeastQueue, LongestPrefix, LocalAware, Algorithm1, PoolAware)
}
