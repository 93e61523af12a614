"""A rank without an engine: memory in a memfd or not, pages with bytes that name them, a real client over it."""

from __future__ import annotations

import hashlib
import itertools
import random
import socket
from array import array
from collections.abc import Iterable, Sequence

from hicache_mooncake import protocol as p
from hicache_mooncake.client.client import Body, Outcome, PoolClient
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.config import Settings
from hicache_mooncake.transfer.mapping import Mapping, create_memfd


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page_hash(name: object) -> bytes:
    """A page hash as SGLang would give it: the SHA-256 of something."""
    return hashlib.sha256(repr(name).encode()).digest()


def pattern(page: bytes, size: int, generation: int = 0) -> bytes:
    """`size` bytes that nobody else's page has: a wrong, torn, shifted or stale page shows."""
    seed = int.from_bytes(hashlib.sha256(page + generation.to_bytes(8, "little")).digest()[:8], "little")
    return random.Random(seed).randbytes(size)


_numbers = itertools.count(1)


class FakeRank:
    """Memory of `pages` pages of `page_bytes`, half K and half V, the halves apart as in SGLang's page_first pools."""

    def __init__(
        self, settings: Settings, *, pages: int = 16, page_bytes: int = 64 << 10, memfd: bool = True, shared: bool = False
    ) -> None:
        self.page_bytes = page_bytes
        self.shared = shared
        self.pages = pages
        self.half = page_bytes // 2
        length = pages * page_bytes
        self._fd = create_memfd("fake-rank", length)
        self.memory = Mapping(self._fd, length, writable=True)
        self.runs = (
            p.Run(self.memory.address, self.half, self.half),
            p.Run(self.memory.address + length // 2, self.half, page_bytes - self.half),
        )
        region = p.Region(self.memory.address, length, 0 if memfd else -1)
        fds = (self._fd,) if memfd else ()
        self.geometry = PoolGeometry("kv", self.runs, 1, pages, (region,), fds, affine=True)
        self.client = PoolClient(settings, f"fake-rank-{next(_numbers)}", max(0.0, settings.promise_s))
        self.mode = self.client.share(self.geometry)

    def write(self, page: int, body: bytes) -> None:
        k, v = self._halves(page)
        self.memory.view[k : k + self.half] = body[: self.half]
        self.memory.view[v : v + self.page_bytes - self.half] = body[self.half :]

    def read(self, page: int) -> bytes:
        k, v = self._halves(page)
        return bytes(self.memory.view[k : k + self.half]) + bytes(self.memory.view[v : v + self.page_bytes - self.half])

    def scramble(self) -> None:
        self.memory.view[:] = b"\xaa" * self.memory.length

    def transfer(self, op: str, namespace: bytes, hashes: Sequence[bytes], pages: Iterable[int] | None = None) -> Outcome:
        numbers = array("q", range(len(hashes)) if pages is None else pages)
        return self.client.transfer(op, Body(namespace, self.runs, shared=self.shared), b"".join(hashes), numbers)

    def store(self, namespace: bytes, hashes: Sequence[bytes], generation: int = 0) -> Outcome:
        """Write each hash's own pattern into pages 0.. and store them."""
        for page, page_hash_ in enumerate(hashes):
            self.write(page, pattern(page_hash_, self.page_bytes, generation))
        return self.transfer("store", namespace, hashes)

    def load(self, namespace: bytes, hashes: Sequence[bytes], generation: int = 0) -> Outcome:
        """Scramble, load, and compare every page that is said to be loaded. Raises AssertionError on a wrong byte."""
        self.scramble()
        outcome = self.transfer("load", namespace, hashes)
        for page, page_hash_ in enumerate(hashes):
            if outcome.ok[page] and self.read(page) != pattern(page_hash_, self.page_bytes, generation):
                raise AssertionError(f"page {page} has wrong bytes")  # not an assert: also under -O
        return outcome

    def exists(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        return self.client.exists(namespace, b"".join(hashes))

    def close(self) -> None:
        import os

        self.client.close()
        self.memory.close()
        os.close(self._fd)

    def _halves(self, page: int) -> tuple[int, int]:
        return page * self.half, self.memory.length // 2 + page * self.half
