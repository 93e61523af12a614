"""What became of the tokens of each prompt: found in a cache, or computed, and for what reason. No I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

Reason = str
REASONS: tuple[Reason, ...] = ("new", "elsewhere", "gone", "tail", "unread", "unreported")
"""Why tokens were computed. `new`: nobody had the page; `elsewhere`: somebody had it, and neither going there nor fetching it
was sooner; `gone`: the engine was expected to find it, and did not; `tail`: the end of a prompt, no whole page or its last one;
`unread`: the router could not tell which pages the prompt has; `unreported`: the engine did not say what it found."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """Of one prompt: `cached` and `missed` add up to `tokens`. `beyond`: cached although nobody was known to have them."""

    tokens: int
    cached: int
    missed: Mapping[Reason, int]
    beyond: int


def sort_out(tokens: int, page_tokens: int, pages: int, known: int, expected: int, cached: int | None, read: bool) -> Sorted:
    """`pages`: whole ones of the prompt; of these `known` to be somewhere, and `expected` in the engine. `cached`: tokens, as
    the engine reports them, which never counts for more than the prompt has; None where it does not."""
    tokens = max(0, tokens)
    if cached is None:
        return Sorted(tokens, 0, {"unreported": tokens} if tokens else {}, 0)
    found = min(max(0, cached), tokens)
    if not read:
        return Sorted(tokens, found, {"unread": tokens - found} if tokens > found else {}, 0)
    ends = [min(tokens, count * page_tokens) for count in (min(expected, known), min(known, pages), pages)]
    missed: dict[Reason, int] = {}
    start = 0
    for reason, end in zip(("gone", "elsewhere", "new", "tail"), (*ends, tokens), strict=True):
        lost = end - max(start, found)
        if lost > 0:
            missed[reason] = lost
        start = max(start, end)
    return Sorted(tokens, found, missed, max(0, found - ends[1]))


@dataclass
class Accounts:
    """Sums since the start, each request once."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    beyond_tokens: int = 0
    missed: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    by_tier: dict[str, int] = field(default_factory=dict)

    def add(self, done: Sorted, by_tier: Mapping[str, int]) -> None:
        self.requests += 1
        self.prompt_tokens += done.tokens
        self.cached_tokens += done.cached
        self.beyond_tokens += done.beyond
        for reason, tokens in done.missed.items():
            self.missed[reason] += tokens
        left = done.cached
        for tier, tokens in by_tier.items():
            counted = min(left, tokens)
            left -= counted
            self.by_tier[tier] = self.by_tier.get(tier, 0) + counted

    def validate(self) -> None:
        """For tests."""
        assert 0 <= self.cached_tokens <= self.prompt_tokens
        assert self.cached_tokens + sum(self.missed.values()) == self.prompt_tokens
        assert sum(self.by_tier.values()) <= self.cached_tokens


_LAST = 8
"""Prefills after which a busy period is measured, even if it goes on."""


@dataclass(slots=True)
class _Busy:
    since: float = 0.0
    waiting: int = 0
    new: float = 0.0
    squares: float = 0.0
    done: int = 0


@dataclass
class PrefillMeter:
    """What prefills take, from when requests go to an engine and when their first tokens come.

    An engine computes several prompts at once or one after the other, which cannot be told apart from outside; but what it did
    from the moment when it had something to do until it had nothing was the sum of it. `done` returns (new tokens, n^2 - p^2,
    seconds), means of the prefills of such a time, for `Regression.observe`."""

    _engines: dict[str, _Busy] = field(default_factory=dict)

    def began(self, engine: str, now: float) -> None:
        busy = self._engines.setdefault(engine, _Busy())
        if not busy.waiting:
            self._engines[engine] = busy = _Busy(since=now)
        busy.waiting += 1

    def done(self, engine: str, tokens: int, cached: int, now: float) -> tuple[float, float, float] | None:
        busy = self._engines.get(engine)
        if busy is None or not busy.waiting:
            return None
        busy.waiting -= 1
        busy.done += 1
        busy.new += tokens - cached
        busy.squares += tokens * tokens - cached * cached
        if busy.waiting and busy.done < _LAST:
            return None
        self._engines[engine] = _Busy(since=now, waiting=busy.waiting)
        if math.isinf(busy.since):
            return None
        return busy.new / busy.done, busy.squares / busy.done, (now - busy.since) / busy.done

    def lost(self, engine: str) -> None:
        """One ended without a first token: what it took of the engine is not known, so this time is not measured."""
        busy = self._engines.get(engine)
        if busy is not None and busy.waiting:
            self._engines[engine] = _Busy(since=math.inf, waiting=busy.waiting - 1)

    def forget(self, engine: str) -> None:
        self._engines.pop(engine, None)


@dataclass
class Assumed:
    """What engines that publish no events should have: the prompts that went there, as long as they have room. What is dropped
    by then is returned for `Prefixes.removed`. The least recently used prompt goes first; at most `most` pages of an engine."""

    most: int
    _prompts: dict[str, deque[tuple[int, ...]]] = field(default_factory=dict)
    _counts: dict[str, dict[int, int]] = field(default_factory=dict)

    def stored(self, engine: str, keys: tuple[int, ...], room: int) -> list[int]:
        """`room`: pages that the engine has room for, 0 for unknown."""
        limit = min(room, self.most) if room else self.most
        if not 0 < len(keys) <= limit:
            return []
        prompts, counts = self._prompts.setdefault(engine, deque()), self._counts.setdefault(engine, {})
        prompts.append(keys)
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        dropped: list[int] = []
        while len(counts) > limit or len(prompts) > self.most:
            for key in prompts.popleft():
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
                    dropped.append(key)
        return dropped

    def forget(self, engine: str) -> None:
        """It is gone, or has started anew."""
        self._prompts.pop(engine, None)
        self._counts.pop(engine, None)

    def validate(self) -> None:
        """For tests."""
        for engine, prompts in self._prompts.items():
            counts: dict[int, int] = {}
            for keys in prompts:
                for key in keys:
                    counts[key] = counts.get(key, 0) + 1
            assert counts == self._counts[engine]
            assert len(counts) <= self.most
