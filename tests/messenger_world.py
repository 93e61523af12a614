"""A session's two state machines with the memory of both ends and a network between them that does what it likes, from a seed.

A link that is lost may be seen to be so at either end much later; what was being written over it lands in the destination's
memory, as garbage, at any time until that end has fenced the link. Pages are overwritten as soon as they are released, and
buffers as soon as they are free, so whoever uses them too long is found out.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hicache_mooncake.messenger import actions as a
from hicache_mooncake.messenger import messages as m
from hicache_mooncake.messenger.destination import Destination, DestinationState
from hicache_mooncake.messenger.layout import Layout
from hicache_mooncake.messenger.source import Source, SourceState

LAYOUT = Layout("model", "bf16", 4, ((2, 3), (2, 3), (4,)))
PAGES = 5
SLOTS = 8
"""Places for pages in each memory."""
LIMITS = a.Limits(
    window_bytes=18, chunk_bytes=10, resume_s=8.0, silence_s=2.0, quiet_s=1.0, fence_retry_s=1.0, unclaimed_s=500.0
)
SESSION = bytes(16)


def bases() -> list[list[int]]:
    at, found = 0, []
    for parts in LAYOUT.runs:
        found.append([])
        for length in parts:
            found[-1].append(at)
            at += length * SLOTS
    return found


BASES = bases()
MEMORY = LAYOUT.all_bytes * SLOTS


@dataclass(eq=False)
class Link:
    alive: bool = True
    to_destination: deque[Any] = field(default_factory=deque)
    to_source: deque[Any] = field(default_factory=deque)
    ghosts: list[tuple[int, int]] = field(default_factory=list)
    """(address, bytes) that may still land."""
    fenced: bool = False


@dataclass(frozen=True)
class Trouble:
    """How likely each is in a step."""

    cut: float = 0.01
    repeat: float = 0.02
    abort: float = 0.0
    replace: float = 0.0
    silence: float = 0.0
    fail: float = 0.0
    """Of a write over a link that goes on."""


class World:
    def __init__(self, seed: int, trouble: Trouble, limits: a.Limits = LIMITS) -> None:
        self.random = random.Random(seed)
        self.trouble = trouble
        self.limits = limits
        self.now = 100.0
        self.source_memory = bytearray(self.random.randbytes(MEMORY))
        self.there = bytearray(MEMORY)
        self.source_places = self.random.sample(range(SLOTS), PAGES)
        self.places = self.random.sample(range(SLOTS), PAGES)
        if seed % 2:
            self.source_places, self.places = list(range(PAGES)), list(range(2, 2 + PAGES))
        self.expected = {(n, page): self.page(self.source_memory, self.source_places, n, page) for n, page in everything()}
        self.source = Source(SESSION, "r", LAYOUT, BASES, PAGES, limits, self.now, self.now + 200)
        self.destination: Destination | None = None
        self.links: dict[int, Link] = {}
        self.writes: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        self.todo: list[tuple[str, Any]] = []
        """What the machines asked for and has not been done yet, in order for each kind."""
        self.heard: list[tuple[bool, Any]] = []
        self.buffers = "none"
        self.released: list[tuple[tuple[int, int, int], bool]] = []
        self.pushed: list[tuple[int, int, int]] = []
        self.replaced = False
        self.endings: dict[str, a.Ended] = {}
        self.do_source()

    # ---- memory

    def page(self, memory: bytearray, places: list[int], layer: int, page: int) -> bytes:
        parts = zip(LAYOUT.runs[layer], BASES[layer], strict=True)
        return b"".join(bytes(memory[base + places[page] * n : base + (places[page] + 1) * n]) for n, base in parts)

    def checksum(self, memory: bytearray, places: list[int], layer: int, first: int, count: int) -> int:
        return zlib.crc32(b"".join(self.page(memory, places, layer, page) for page in range(first, first + count)))

    def scribble(self, layer: int, first: int, count: int) -> None:
        for page in range(first, first + count):
            for length, base in zip(LAYOUT.runs[layer], BASES[layer], strict=True):
                at = base + self.source_places[page] * length
                self.source_memory[at : at + length] = bytes(self.random.randbytes(length))

    def land(self, address: int, data: bytes) -> None:
        assert self.buffers == "held", f"a write lands in buffers that are {self.buffers}"
        self.there[address : address + len(data)] = data

    # ---- what the machines want

    def do_source(self) -> None:
        self.source.validate()
        for action in self.source.take():
            match action:
                case a.Tell():
                    link = self.links.get(action.message.generation)
                    if link is not None and link.alive:
                        link.to_destination.append(action.message)
                case a.Write():
                    self.writes[action.ticket] = (action.generation, action.pieces)
                case a.Release():
                    self.released.append((action.tag, action.arrived))  # type: ignore[arg-type]
                    self.scribble(*action.tag)  # type: ignore[misc]
                case a.Ended():
                    assert "source" not in self.endings
                    self.endings["source"] = action
                case _:
                    self.todo.append((type(action).__name__, action))

    def do_destination(self) -> None:
        assert self.destination is not None
        self.destination.validate()
        for action in self.destination.take():
            match action:
                case a.Tell():
                    link = self.links.get(action.message.generation)
                    if link is not None and link.alive:
                        link.to_source.append(action.message)
                case a.Free():
                    assert self.buffers == "held", f"buffers are freed that are {self.buffers}"
                    self.buffers = "free"
                case a.Ended():
                    assert "destination" not in self.endings
                    self.endings["destination"] = action
                    if not action.reason:
                        self.deliver()
                case _:
                    self.todo.append((type(action).__name__, action))

    def deliver(self) -> None:
        assert self.destination is not None
        assert self.buffers == "held"
        self.buffers = "delivered"
        assert self.destination.claimed()
        assert (self.destination.first_token, self.destination.aux) == (7, b"aux")
        for layer, page in everything():
            assert self.page(self.there, self.places, layer, page) == self.expected[layer, page], "wrong bytes are delivered"

    # ---- steps

    def step(self, calm: bool = False) -> None:
        trouble = Trouble(0.0, 0.0) if calm else self.trouble
        roll = self.random.random
        choices = [self.push, self.hear, self.hear, self.finish_write, self.work, self.notice, self.tick]
        self.random.choice(choices)()
        if roll() < trouble.cut and self.links:
            self.cut(max(self.links))
        if roll() < trouble.repeat and self.heard:
            self.deliver_message(*self.random.choice(self.heard))
        if roll() < trouble.abort:
            if self.random.random() < 0.5:
                self.source.abort(self.now)
                self.do_source()
            elif self.destination is not None:
                self.destination.abort(self.now)
                self.do_destination()
        if roll() < trouble.replace and self.source.state is SourceState.STREAMING:
            held = [tag for tag in self.pushed if all(tag != released for released, _ in self.released)]
            if held:
                self.replaced = True
                self.scribble(*self.random.choice(held))
        if roll() < trouble.silence:
            self.now += 2.5
        for link in self.links.values():
            if link.ghosts and roll() < 0.3:
                address, length = link.ghosts.pop(self.random.randrange(len(link.ghosts)))
                self.land(address, bytes([0xEE]) * length)

    def push(self) -> None:
        behind = [n for n, pushed in enumerate(self.source.pushed) if pushed < PAGES]
        if self.source.ended or self.source.failing:
            return
        if not behind:
            if "finish" not in self.endings:
                self.endings["finish"] = a.Ended("", "")
                self.source.finish(self.now, 7, b"aux")
                self.do_source()
            return
        layer = self.random.choice(behind)
        first = self.source.pushed[layer]
        for run in self.source.cut(layer, first, self.random.randint(1, PAGES - first)):
            places = [self.source_places[page] for page in run]
            tag = (layer, run.start, len(run))
            self.pushed.append(tag)
            self.source.push(layer, run.start, places, self.checksum(self.source_memory, self.source_places, *tag), tag)
        self.do_source()

    def hear(self) -> None:
        waiting = [(True, link.to_destination) for link in self.links.values() if link.to_destination]
        waiting += [(False, link.to_source) for link in self.links.values() if link.to_source]
        if waiting:
            there, queue = self.random.choice(waiting)
            message = queue.popleft()
            self.heard.append((there, message))
            self.deliver_message(there, message)

    def deliver_message(self, there: bool, message: Any) -> None:
        if not there:
            self.source.told(self.now, message)
            self.do_source()
        elif self.destination is None:
            if isinstance(message, m.Open):
                assert message.fresh, "a destination that has never heard of the session cannot know it"
                self.destination = Destination(message, LAYOUT, self.limits, self.now)
                self.do_destination()
        else:
            if isinstance(message, m.Open):
                self.destination.opened(self.now, message)
            else:
                self.destination.told(self.now, message)
            self.do_destination()

    def finish_write(self) -> None:
        if not self.writes:
            return
        ticket = self.random.choice(list(self.writes))
        generation, pieces = self.writes.pop(ticket)
        link = self.links[generation]
        if link.alive and self.random.random() >= self.trouble.fail:
            for here, there, length in pieces:
                self.land(there, bytes(self.source_memory[here : here + length]))
            self.source.wrote(self.now, ticket)
        else:
            if not link.fenced:
                link.ghosts += [(there, length) for _, there, length in pieces]
            self.source.wrote(self.now, ticket, "peer", "the write failed")
        self.do_source()

    def work(self) -> None:
        if not self.todo:
            return
        kinds = sorted({kind for kind, _ in self.todo})
        kind = self.random.choice(kinds)
        at = next(n for n, (each, _) in enumerate(self.todo) if each == kind)
        action = self.todo.pop(at)[1]
        match action:
            case a.Connect():
                self.close_links()
                if self.random.random() < 0.1:
                    self.source.not_connected(self.now, action.generation, "refused")
                else:
                    self.links.setdefault(action.generation, Link())
                    self.source.connected(self.now, action.generation)
                self.do_source()
            case a.Drop():
                self.close_links()
            case a.Reserve():
                self.buffers = "held"
                assert self.destination is not None
                self.destination.reserved(self.now, BASES, self.places)
                self.do_destination()
            case a.Verify():
                assert self.destination is not None
                assert self.buffers == "held", f"buffers are read that are {self.buffers}"
                came = self.checksum(self.there, self.places, action.layer, action.first, action.count)
                self.destination.verified(self.now, action.layer, action.first, action.count, came == action.checksum)
                self.do_destination()
            case a.Fence():
                assert self.destination is not None
                link = self.links[action.generation]
                link.alive = False
                done = self.random.random() < 0.95
                if done:
                    link.fenced = True
                    link.ghosts.clear()
                    for ticket, (generation, _) in list(self.writes.items()):
                        if generation == action.generation:
                            del self.writes[ticket]
                            self.source.wrote(self.now, ticket, "peer", "the link broke")
                            self.do_source()
                self.destination.fenced(self.now, action.generation, done)
                self.do_destination()

    def close_links(self) -> None:
        for link in self.links.values():
            link.alive = False

    def cut(self, generation: int) -> None:
        link = self.links[generation]
        link.alive = False
        if self.random.random() < 0.5:  # what was told and not heard is lost; else it is heard late
            link.to_destination.clear()
            link.to_source.clear()

    def notice(self) -> None:
        dead = [generation for generation, link in self.links.items() if not link.alive]
        if not dead:
            return
        generation = self.random.choice(dead)
        if self.random.random() < 0.5:
            self.source.link_failed(self.now, generation, "the link broke")
            self.do_source()
        elif self.destination is not None:
            self.destination.link_failed(self.now, generation)
            self.do_destination()

    def tick(self) -> None:
        self.now += self.random.choice((0.0, 0.01, 0.1))
        self.source.tick(self.now)
        self.do_source()
        if self.destination is not None:
            self.destination.tick(self.now)
            self.do_destination()

    # ---- a whole life

    @property
    def over(self) -> bool:
        return self.source.ended and (self.destination is None or self.destination.ended)

    def run(self, steps: int = 400) -> None:
        for _ in range(steps):
            self.step()
        for _ in range(60_000):
            if self.over:
                break
            self.step(calm=True)
        assert self.over, (self.source.state, self.destination and self.destination.state, self.todo)
        assert sorted(tag for tag, _ in self.released) == sorted(self.pushed), "pages have come back twice, or never"
        delivered = self.buffers == "delivered"
        if self.source.state is SourceState.DONE:
            assert delivered, "the source was told that it is done, and it is not"
            assert all(arrived for _, arrived in self.released)
        if self.destination is not None and self.destination.state is DestinationState.FREED:
            assert self.buffers in ("free", "none")
        if not self.replaced:
            reasons = {self.source.reason, self.destination.reason if self.destination else ""}
            assert not reasons & {"checksum", "protocol"}, (self.source.detail, self.destination and self.destination.detail)


def everything() -> list[tuple[int, int]]:
    return [(layer, page) for layer in range(LAYOUT.layers) for page in range(PAGES)]
