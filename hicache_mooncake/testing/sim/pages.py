"""What pages there are, what bytes each must have, and the memory that they are copied between."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import xxhash

from hicache_mooncake.keys import checksum_seed

from .world import Violation, World

_generation = struct.Struct("<Q")


@dataclass(frozen=True)
class Pool:
    """A namespace, the group that its objects share a logical page with, and the length of their bodies."""

    namespace: bytes
    group: bytes
    length: int


def page_hash(chain: int, index: int) -> bytes:
    """Page `index` of a prompt: every page names all before it."""
    return hashlib.sha256(struct.pack("<II", chain, index)).digest()


def body(pool: Pool, of: bytes, generation: int) -> bytes:
    """The bytes of one page as its `generation`-th writer has them: no two of (namespace, hash, generation) alike."""
    head = _generation.pack(generation)
    rest = hashlib.shake_128(pool.namespace + of + head).digest(pool.length - len(head))
    return head + rest


def checksum(pool: Pool, of: bytes, data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of a body, seeded with the page's identity: what movers compute over what arrived."""
    return xxhash.xxh3_64_intdigest(bytes(data), checksum_seed(pool.namespace, of))


class Ledger:
    """Who wrote what: the only bytes that a load may ever give."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = 0
        self._of: dict[int, tuple[bytes, bytes]] = {}
        self.written_at: dict[int, float] = {}
        self.checked = 0

    def write(self, pool: Pool, of: bytes) -> bytes:
        """The bytes of a page that a rank computed just now."""
        self._next += 1
        self._of[self._next] = (pool.namespace, of)
        self.written_at[self._next] = self._world.now
        return body(pool, of, self._next)

    def check(self, pool: Pool, of: bytes, data: bytes | bytearray, who: str) -> int:
        """These bytes were given out as this page: returns the generation, raises Violation when they are not that page's."""
        self.checked += 1
        generation = _generation.unpack_from(data)[0]
        if self._of.get(generation) != (pool.namespace, of) or bytes(data) != body(pool, of, generation):
            raise Violation(f"{who}: wrong bytes were given out as page {of[:4].hex()} of {pool.namespace[:4].hex()}")
        return int(generation)


@dataclass(frozen=True)
class Body:
    """A piece of a body on a data connection."""

    at: int
    piece: bytes


class HostPage:
    """A page of an engine's memory. The engine lends it to a call, and has it back when the call returns."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(b"\xaa" * size)
        self.lent = True

    def write(self, at: int, piece: bytes) -> None:
        if not self.lent:
            raise Violation("bytes landed in engine memory after the call that asked for them had returned")
        self.data[at : at + len(piece)] = piece


class Segment:
    """A node's memory. It outlives the node for the movers that have it mapped, as a memfd does."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)

    def read(self, at: int, size: int) -> bytes:
        return bytes(self.data[at : at + size])

    def write(self, at: int, piece: bytes) -> None:
        self.data[at : at + len(piece)] = piece
