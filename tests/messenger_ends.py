"""The two ends of sessions for tests, with memory whose every page says what it is; and the same as a process of its own.

`python messenger_ends.py source|destination SCHEME PAGE_BYTES LIMITS`, LIMITS in JSON: it prints its engine's address, does
what it is told line by line (`send ADDRESS REQUEST LAYERS`: push so many layers, and finish when these are all), and prints
what comes of it, in JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from hicache_mooncake import TransferEngine
from hicache_mooncake.messenger.actions import Limits
from hicache_mooncake.messenger.layout import Layout
from hicache_mooncake.messenger.stream import Buffers, DestinationStream, Messenger, SourceStream, StreamError

LAYERS, PAGES = 32, 6
LONG_S = 90.0


def soon() -> float:
    return time.monotonic() + LONG_S


def layout_of(page_bytes: int, layers: int = LAYERS) -> Layout:
    return Layout("model", "bf16", 64, ((page_bytes, page_bytes // 2),) * layers)


def content(request: str, layer: int, part: int, page: int, length: int) -> bytes:
    seed = abs(hash_of(f"{request}/{layer}/{part}/{page}"))
    return np.random.default_rng(seed).bytes(length)


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[-16:].rjust(16, b"-"), "little")


class End:
    """An engine, a messenger, and memory for `slots` sessions."""

    def __init__(self, name: str, schemes: Sequence[str], layout: Layout, limits: Limits, slots: int = 2, pages: int = PAGES):
        self.layout, self.pages = layout, pages
        self.engine = TransferEngine(name, transports=schemes)
        self.region, self.view = self.engine.allocate(layout.all_bytes * pages * slots, name="pool")
        self.messenger = Messenger(self.engine, limits)
        self.cond = threading.Condition()
        self.slots = list(range(slots))
        self.taken: dict[str, int] = {}
        self.freed: list[str] = []
        self.released: Counter[bool] = Counter()
        self.bases: list[list[int]] = []
        at = self.region.address
        for parts in layout.runs:
            self.bases.append([])
            for length in parts:
                self.bases[-1].append(at)
                at += length * pages * slots

    def places(self, slot: int) -> list[int]:
        """Scattered: some are neighbours, and some not."""
        first = slot * self.pages
        return [first + 1, first, *range(first + 2, first + self.pages)]

    # ---- as a destination

    def accept(self) -> None:
        self.messenger.accept(self.layout, self.reserve)

    def reserve(self, stream: DestinationStream) -> Buffers:
        with self.cond:
            if not self.slots:
                raise StreamError("declined", "no slot is free")
            slot = self.taken[stream.request] = self.slots.pop()
        return Buffers(self.bases, self.places(slot), lambda: self.free(stream.request))

    def free(self, request: str) -> None:
        with self.cond:
            self.freed.append(request)
            slot = self.taken.pop(request)
            for layer in range(self.layout.layers):
                for part in range(len(self.layout.runs[layer])):
                    for page in range(self.pages):
                        self.part(slot, layer, part, page)[:] = b"\xaa" * self.layout.runs[layer][part]
            self.slots.append(slot)
            self.cond.notify_all()

    def done_with(self, request: str) -> None:
        with self.cond:
            self.slots.append(self.taken.pop(request))

    def wait_freed(self, request: str, seconds: float = LONG_S) -> bool:
        with self.cond:
            return self.cond.wait_for(lambda: request in self.freed, seconds)

    def part(self, slot: int, layer: int, part: int, page: int) -> memoryview:
        length = self.layout.runs[layer][part]
        at = self.bases[layer][part] - self.region.address + self.places(slot)[page] * length
        return self.view[at : at + length]

    def untouched(self, slot: int) -> bool:
        """Since `free`."""
        whole = ((layer, part) for layer in range(self.layout.layers) for part in range(len(self.layout.runs[layer])))
        return all(
            bytes(self.part(slot, layer, part, page)).count(0xAA) == self.layout.runs[layer][part]
            for layer, part in whole
            for page in range(self.pages)
        )

    def holds(self, request: str) -> bool:
        slot = self.taken[request]
        return all(
            bytes(self.part(slot, layer, part, page)) == content(request, layer, part, page, length)
            for layer, parts in enumerate(self.layout.runs)
            for part, length in enumerate(parts)
            for page in range(self.pages)
        )

    # ---- as a source

    def fill(self, request: str, slot: int = 0) -> None:
        for layer, parts in enumerate(self.layout.runs):
            for part, length in enumerate(parts):
                for page in range(self.pages):
                    self.part(slot, layer, part, page)[:] = content(request, layer, part, page, length)

    def send(self, address: str | Sequence[str], request: str, slot: int = 0, **options: Any) -> SourceStream:
        self.fill(request, slot)
        options = {"deadline": soon()} | options
        return self.messenger.send(address, request, self.layout, self.bases, self.pages, **options)

    def push(self, stream: SourceStream, layers: Sequence[int], slot: int = 0, first: int = 0, last: int = PAGES) -> None:
        for layer in layers:
            stream.push(layer, first, self.places(slot)[first:last], self.note)

    def note(self, arrived: bool) -> None:
        with self.cond:
            self.released[arrived] += 1
            self.cond.notify_all()

    def close(self) -> None:
        self.messenger.close()
        self.engine.close()

    def __enter__(self) -> End:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def receive(end: End, request: str) -> None:
    try:
        result = end.messenger.incoming(request, soon()).result(soon())
    except StreamError as error:
        say(request=request, reason=error.reason, detail=str(error))
        return
    say(request=request, reason="", equal=end.holds(request), first_token=result.first_token, aux=result.aux.hex())
    end.done_with(request)


def main() -> None:
    role, schemes, page_bytes = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
    end = End(role, schemes, layout_of(page_bytes), Limits(**json.loads(sys.argv[4])))
    say(address=end.engine.address)
    if role == "destination":
        end.accept()
    stream: SourceStream | None = None
    for line in sys.stdin:
        verb, *rest = line.split()
        if verb == "receive":
            threading.Thread(target=receive, args=(end, rest[0]), daemon=True).start()
        elif verb == "send":
            address, request, layers = rest[0], rest[1], int(rest[2])
            stream = end.send(address, request)
            end.push(stream, range(layers))
            if layers == LAYERS:
                stream.finish(11, b"aux of " + request.encode())
            say(pushed=layers)
        elif verb == "wait":
            assert stream is not None
            try:
                stream.wait(soon())
                say(reason="", released=end.released[True])
            except StreamError as error:
                say(reason=error.reason, detail=str(error), released=sum(end.released.values()))
        elif verb == "report":
            say(**end.messenger.report())
    end.close()
    say(closed=True)


if __name__ == "__main__":
    main()
