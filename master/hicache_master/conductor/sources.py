"""What one prefill engine would make of a request: which pages it has, which it would load, and what that takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Protocol

from .cost import Costs, PrefillCost
from .policies import Candidate, Fetch, Sources
from .prefixes import COLD, DRAM, HOST, TIERS, Matches, bit


class Elsewhere(Protocol):
    """Pages of one prompt that can be fetched. Made once a decision, asked by every engine."""

    def offers(self, own: int) -> Iterator[tuple[int, float]]:
        """How long a prefix an engine can have that has `own` pages itself, and in how many seconds."""

    def fetches(self, own: int, reach: int) -> tuple[Fetch, ...]:
        """What brings the pages from `own` to `reach`, which was offered."""


class Nowhere:
    def offers(self, own: int) -> Iterator[tuple[int, float]]:
        return iter(())

    def fetches(self, own: int, reach: int) -> tuple[Fetch, ...]:
        return ()


class OneHolder:
    """The store node that has the longest run from the head on; among several the one that sends soonest."""

    def __init__(self, matches: Matches, costs: Costs) -> None:
        self._best: list[tuple[int, float, float, str, bool]] = []
        """Of each tier: pages, seconds a page, latency, holder, cold."""
        links = costs.links
        for tier in (DRAM, COLD):
            cold = tier == COLD
            found = [
                (-pages, links.page_s(name, costs.page_bytes, cold), name) for name, pages in matches.lengths[tier].items()
            ]
            if found:
                pages, page_s, name = min(found)
                self._best.append((-pages, page_s, links.latency_s + cold * links.cold_latency_s, name, cold))

    def offers(self, own: int) -> Iterator[tuple[int, float]]:
        for pages, page_s, latency_s, _, _ in self._best:
            if pages > own:
                yield pages, latency_s + (pages - own) * page_s

    def fetches(self, own: int, reach: int) -> tuple[Fetch, ...]:
        name, cold = next((name, cold) for pages, _, _, name, cold in self._best if pages == reach)
        return (Fetch(name, own, reach, cold),)


_Source = tuple[float, int, str]
"""Seconds a page, the bit of the holder and tier, the holder."""


class Pool:
    """All that store nodes have, wherever each page is.

    A page comes from the holder that is the quickest now, from a disk only when nobody has it in DRAM, and from the holder of
    the page before as long as no other one is quicker. One after the other: the engine's own link is the limit where several
    send at once."""

    def __init__(self, matches: Matches, costs: Costs) -> None:
        links = costs.links
        self._latency_s = links.latency_s, links.latency_s + links.cold_latency_s
        in_dram, on_disk = (_quickest(matches, costs, tier) for tier in (DRAM, COLD))
        self._starts: list[int] = []
        self._end = matches.runs[-1].end if matches.runs else 0
        self._sources: list[_Source | None] = []
        self._cold: list[bool] = []
        self._before_s: list[float] = [0.0]
        """All pages before each run."""
        last: _Source | None = None
        for start, end, holders in matches.runs:
            source, cold = _choose(in_dram, holders, last), False
            if source is None:
                source, cold = _choose(on_disk, holders, last), True
            last = source
            self._starts.append(start)
            self._sources.append(source)
            self._cold.append(cold)
            self._before_s.append(self._before_s[-1] + (end - start) * (source[0] if source is not None else 0.0))
        self._reach = self._reaches(cold=False), self._reaches(cold=True)

    def offers(self, own: int) -> Iterator[tuple[int, float]]:
        if own >= self._end:
            return
        run = bisect_right(self._starts, own) - 1
        offered = own
        for cold in (False, True):
            reach = self._reach[cold][run]
            if reach > offered:
                offered = reach
                yield reach, self._latency_s[cold] + self._until_s(reach) - self._until_s(own)

    def fetches(self, own: int, reach: int) -> tuple[Fetch, ...]:
        found: list[Fetch] = []
        start, run = own, bisect_right(self._starts, own) - 1
        while start < reach:
            end = min(reach, self._starts[run + 1] if run + 1 < len(self._starts) else self._end)
            source = self._sources[run]
            assert source is not None
            if found and found[-1].holder == source[2] and found[-1].cold == self._cold[run]:
                found[-1] = found[-1]._replace(end=end)
            else:
                found.append(Fetch(source[2], start, end, self._cold[run]))
            start, run = end, run + 1
        return tuple(found)

    def _until_s(self, page: int) -> float:
        run = bisect_right(self._starts, page) - 1
        source = self._sources[run]
        return self._before_s[run] + (page - self._starts[run]) * (source[0] if source is not None else 0.0)

    def _reaches(self, cold: bool) -> list[int]:
        """For each run, up to where pages can be fetched from there on; 0 for not at all."""
        reaches = [0] * len(self._starts)
        end = self._end
        for run in reversed(range(len(self._starts))):
            if self._sources[run] is None or (self._cold[run] and not cold):
                end = self._starts[run]
            else:
                reaches[run] = end
        return reaches


def _quickest(matches: Matches, costs: Costs, tier: int) -> list[_Source]:
    involved = 0
    for run in matches.runs:
        involved |= run.holders
    sources = [
        (costs.links.page_s(name, costs.page_bytes, tier == COLD), bit(slot, tier), name)
        for slot, name in matches.slots.items()
        if involved & bit(slot, tier)
    ]
    return sorted(sources, key=lambda source: source[0])


def _choose(sources: list[_Source], holders: int, last: _Source | None) -> _Source | None:
    for source in sources:
        if source[1] & holders:
            return last if last is not None and last[1] & holders and last[0] <= source[0] else source
    return None


def elsewhere(sources: Sources, matches: Matches, costs: Costs) -> Elsewhere:
    if sources == "own":
        return Nowhere()
    return OneHolder(matches, costs) if sources == "holder" else Pool(matches, costs)


def evaluate(
    engine: str,
    store: str,
    queue_s: float,
    tokens: int,
    matches: Matches,
    others: Elsewhere,
    prefill: PrefillCost,
    costs: Costs,
) -> Candidate:
    """The soonest way for this engine: to compute everything, to use what it has in its own tiers, or to fetch more.

    `store`: the store node of its host, "" for none."""
    best_s = prefill_s = prefill.seconds(tokens, 0)
    best = Candidate(engine, queue_s, 0, 0, 0.0, 0.0, prefill_s, queue_s + prefill_s)
    own, load_s = 0, 0.0
    for tier in TIERS:
        length = matches.lengths[tier].get(engine if tier <= HOST else store, 0)
        if length <= own:
            continue
        load_s += (length - own) * costs.own_page_s(tier)
        own = length
        prefill_s = prefill.seconds(tokens, min(tokens, own * costs.page_tokens))
        if load_s + prefill_s < best_s:
            best_s = load_s + prefill_s
            best = Candidate(engine, queue_s, own, own, load_s, 0.0, prefill_s, queue_s + best_s)
    for reach, transfer_s in others.offers(own):
        if reach <= costs.threshold * own:
            continue
        prefill_s = prefill.seconds(tokens, min(tokens, reach * costs.page_tokens))
        waited_s = max(0.0, transfer_s - queue_s) if costs.fetch_while_queued else transfer_s
        if load_s + waited_s + prefill_s < best_s:
            best_s = load_s + waited_s + prefill_s
            best = Candidate(engine, queue_s, reach, own, load_s, transfer_s, prefill_s, queue_s + best_s)
    return best
