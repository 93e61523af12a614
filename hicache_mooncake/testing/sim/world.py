"""Virtual time, one source of chance, and processes that crash, pause and wake: what everything in a simulated cluster runs on.

Nothing here knows of the pool. All order comes from (time, number of scheduling), all chance from one seeded generator, so a
seed is a run: the hash of the trace is the same in every process.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from hicache_mooncake import protocol as p

MAX_LISTED = 40
"""Fields of a message longer than this stand in a trace as their length."""


class Violation(AssertionError):
    """Something that must always hold did not."""


class World:
    """Clock, chance, the queue of what comes next, and the trace of what came."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.events = 0
        self.after_event: list[Callable[[], None]] = []
        """Called after every event: the cheap invariants."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._trace = trace
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def trace_hash(self) -> str:
        return self._digest.hexdigest()

    def note(self, text: str) -> None:
        """One line of the trace."""
        line = f"{self.now:.6f} {text}"
        self._digest.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def at(self, time: float, function: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (max(time, self.now), self._scheduled, function, arguments))

    def after(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay_s, function, *arguments)

    def run_until(self, end: float) -> None:
        """Let everything happen that is due by `end`."""
        while self._queue and self._queue[0][0] <= end:
            self.now, _, function, arguments = heapq.heappop(self._queue)
            self.events += 1
            function(*arguments)
            for check in self.after_event:
                check()
        self.now = end

    def run_for(self, seconds: float) -> None:
        self.run_until(self.now + seconds)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def token(self, size: int = 8) -> bytes:
        return self.rng.randbytes(size)


class Process:
    """One life of an operating system process. What is to happen in it goes through `call`, so that a pause delays it and its
    end cancels it."""

    def __init__(self, world: World, name: str, skew_s: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.skew_s = skew_s
        """By how much its clock differs: monotonic clocks of two hosts have nothing in common."""
        self.alive = True
        self.paused = False
        self.disturbed_at = world.now
        """When it was started, frozen, woken or ended last, on the world's clock."""
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._draining = False
        self.at_end: list[Callable[[], None]] = []
        """What the kernel does when it ends: closes its connections."""

    @property
    def now(self) -> float:
        return self.world.now + self.skew_s

    @property
    def behind(self) -> bool:
        """Is there something that waits for its end of a freeze?"""
        return self.paused or bool(self._backlog)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run this in the process: now, when it wakes, or never."""
        if not self.alive:
            return
        if self.paused or self._backlog:
            self._backlog.append((function, arguments))
            return
        function(*arguments)

    def later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        self.world.after(delay_s, self.call, function, *arguments)

    def pause(self) -> None:
        """SIGSTOP: time passes, what comes in waits."""
        if self.alive and not self.paused:
            self.paused = True
            self.disturbed_at = self.world.now
            self.world.note(f"{self.name} is frozen")

    def resume(self) -> None:
        if self.alive and self.paused:
            self.paused = False
            self.disturbed_at = self.world.now
            self.world.note(f"{self.name} goes on, {len(self._backlog)} things waited")
            self._drain()

    def end(self) -> None:
        """kill -9."""
        if not self.alive:
            return
        self.alive = False
        self.disturbed_at = self.world.now
        self._backlog.clear()
        self.world.note(f"{self.name} is dead")
        for close in list(self.at_end):
            close()
        self.at_end.clear()

    def _drain(self) -> None:
        """What waited comes in its order, each a moment after the other: nothing overtakes it."""
        if self._draining:
            return
        self._draining = True
        self.world.after(1e-5, self._drain_one)

    def _drain_one(self) -> None:
        self._draining = False
        if not self.alive or self.paused or not self._backlog:
            return
        function, arguments = self._backlog.popleft()
        function(*arguments)
        if self._backlog:
            self._drain()


def short(message: p.Message) -> str:
    """A message as it stands in a trace."""
    parts = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, bytes):
            parts.append(f"{name}={value.hex() if len(value) <= 8 else f'{value[:4].hex()}..{len(value)}'}")
        elif isinstance(value, list) and len(repr(value)) > MAX_LISTED:
            parts.append(f"{name}=[{len(value)}]")
        else:
            parts.append(f"{name}={value!r}")
    return f"{type(message).__name__}({', '.join(parts)})"
