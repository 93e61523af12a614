"""What waits and runs where, as far as the conductor knows: it counts what it routed at once, and takes it back if it fails."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

NS = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Whole nanoseconds: sums of them are exact, so what is taken back leaves no trace."""
    return max(0, round(seconds * NS))


@dataclass
class PrefillQueue:
    """One prefill engine: first come, first served. The first in the queue is the one that runs."""

    _work: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _total: int = 0
    _head_since: float = 0.0

    def __len__(self) -> int:
        return len(self._work)

    def seconds(self, now: float) -> float:
        """Until what is there has been computed. One that takes longer than was predicted counts as about to end."""
        if not self._work:
            return 0.0
        head = next(iter(self._work.values()))
        return (self._total - min(head, to_ns(now - self._head_since))) / NS

    def add(self, request: str, seconds: float, now: float) -> None:
        assert request not in self._work
        if not self._work:
            self._head_since = now
        self._work[request] = to_ns(seconds)
        self._total += self._work[request]

    def remove(self, request: str, now: float) -> None:
        """It was computed, or never will be. The next one runs from now on, if it was the first."""
        if request not in self._work:
            return
        if next(iter(self._work)) == request:
            self._head_since = now
        self._total -= self._work.pop(request)

    def validate(self) -> None:
        assert self._total == sum(self._work.values()) >= 0


@dataclass
class DecodeBatch:
    """One decode engine: what runs in it, and what was routed to it and is still in prefill."""

    _running: OrderedDict[str, tuple[float, int]] = field(default_factory=OrderedDict)
    """Request -> since when, KV tokens; the oldest first."""
    _coming: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Request -> when its prefill should be done, KV tokens."""
    running_tokens: int = 0
    coming_tokens: int = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def coming(self) -> int:
        return len(self._coming)

    def starts(self) -> list[float]:
        """When each of those that run began, in order."""
        return [since for since, _ in self._running.values()]

    def then(self, at: float, decode_s: float) -> tuple[int, int]:
        """Requests and KV tokens in the batch at that time, if every decode lasts `decode_s` and prefills end as predicted."""
        requests = tokens = 0
        for began, held in reversed(self._running.values()):
            if began + decode_s <= at:
                break
            requests += 1
            tokens += held
        for begins, held in self._coming.values():
            if begins <= at < begins + decode_s:
                requests += 1
                tokens += held
        return requests, tokens

    def expect(self, request: str, tokens: int, begins: float) -> None:
        """It was routed here, and its prefill should be done by then."""
        assert request not in self._coming
        self._coming[request] = begins, tokens
        self.coming_tokens += tokens

    def start(self, request: str, tokens: int, now: float) -> None:
        """It joins the batch; expected before or not."""
        self.remove(request)
        self._running[request] = now, tokens
        self.running_tokens += tokens

    def remove(self, request: str) -> float | None:
        """It ended, or will never come. Returns since when it ran, or None."""
        coming = self._coming.pop(request, None)
        if coming is not None:
            self.coming_tokens -= coming[1]
        ran = self._running.pop(request, None)
        if ran is None:
            return None
        self.running_tokens -= ran[1]
        return ran[0]

    def validate(self) -> None:
        assert self.coming_tokens == sum(tokens for _, tokens in self._coming.values()) >= 0
        assert self.running_tokens == sum(tokens for _, tokens in self._running.values()) >= 0
        assert not self._running.keys() & self._coming.keys()
        starts = self.starts()
        assert starts == sorted(starts)
