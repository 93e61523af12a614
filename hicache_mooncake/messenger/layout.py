"""What the bytes of a session are, where they lie, and which of them are neighbours."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

MAX_LAYERS = 1024
MAX_PARTS = 4096
"""Of all layers together."""
MAX_PAGE_BYTES = 1 << 30
MAX_PAGES = 1 << 20


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Equal at both ends, or there is no session."""

    namespace: str
    """What makes bytes of this shape mean the same: model, weights, and which of its heads; in whatever form both agree on."""
    dtype: str
    page_tokens: int
    runs: tuple[tuple[int, ...], ...]
    """For each layer the lengths of a page's parts in bytes, as (K, V). The pages of a part lie at multiples of its length."""

    def check(self) -> None:
        """Raises ValueError with what is wrong."""
        if not 1 <= len(self.runs) <= MAX_LAYERS or not all(self.runs) or sum(map(len, self.runs)) > MAX_PARTS:
            raise ValueError(f"a layout has 1 to {MAX_LAYERS} layers, each with a part, and at most {MAX_PARTS} parts")
        if not all(0 < length <= MAX_PAGE_BYTES for parts in self.runs for length in parts) or self.page_tokens <= 0:
            raise ValueError(f"the parts of a page have 1 to {MAX_PAGE_BYTES} bytes, and a page at least one token")
        if len(self.namespace.encode()) + len(self.dtype.encode()) > 4096:
            raise ValueError("namespace and dtype have at most 4096 bytes")

    @property
    def layers(self) -> int:
        return len(self.runs)

    def page_bytes(self, layer: int) -> int:
        return sum(self.runs[layer])

    @property
    def all_bytes(self) -> int:
        """Of one page, in all layers."""
        return sum(map(sum, self.runs))

    def disagreement(self, theirs: Layout) -> str:
        """The first field in which they differ, with both values; empty when they agree."""
        for field in ("namespace", "dtype", "page_tokens"):
            here, there = getattr(self, field), getattr(theirs, field)
            if here != there:
                return f"{field}: {here!r} here, {there!r} there"
        if self.layers != theirs.layers:
            return f"layers: {self.layers} here, {theirs.layers} there"
        for layer, (mine, other) in enumerate(zip(self.runs, theirs.runs, strict=True)):
            if mine != other:
                return f"bytes a page in layer {layer}: {list(mine)} here, {list(other)} there"
        return ""

    def check_bases(self, bases: Sequence[Sequence[int]]) -> None:
        """Raises ValueError unless there is an address for each part of each layer."""
        if [len(parts) for parts in bases] != [len(parts) for parts in self.runs]:
            raise ValueError("there must be one address for each part of each layer: that of page 0")


def neighbours(here: Sequence[int], there: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place here, place there, how many) of pages that follow each other on both sides."""
    at = 0
    while at < len(here):
        first = at
        at += 1
        while at < len(here) and here[at] == here[at - 1] + 1 and there[at] == there[at - 1] + 1:
            at += 1
        yield here[first], there[first], at - first


def pieces(
    lengths: Sequence[int],
    bases: Sequence[int],
    places: Sequence[int],
    their_bases: Sequence[int],
    their_places: Sequence[int],
) -> list[tuple[int, int, int]]:
    """(address here, address there, bytes) of some pages of one layer, neighbours merged."""
    merged = list(neighbours(places, their_places))
    return [
        (base + here * length, their_base + there * length, count * length)
        for length, base, their_base in zip(lengths, bases, their_bases, strict=True)
        for here, there, count in merged
    ]


def seed(session: bytes, layer: int, first: int, count: int) -> int:
    """Of a run's checksum: the bytes of another run, or of another session, do not pass for this one's."""
    return xxhash.xxh3_64_intdigest(session + msgspec.msgpack.encode((layer, first, count)))


def checksum(lengths: Sequence[int], bases: Sequence[int], places: Sequence[int], start: int) -> int:
    """xxh3-64 of some pages of one layer, part by part, seeded with `start`. The memory must be this process's."""
    digest = xxhash.xxh3_64(seed=start)
    merged = list(neighbours(places, places))
    for length, base in zip(lengths, bases, strict=True):
        for place, _, count in merged:
            digest.update((ctypes.c_char * (count * length)).from_address(base + place * length))
    return digest.intdigest()
