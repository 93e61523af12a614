"""Ranks without engines, their pages, and a bare TCP loop: what the sections of `make bench` measure with."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from array import array
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.harness import Memory, Row, compare
from benchmarks.usage import METER
from hicache_mooncake import protocol as p
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.config import Settings

KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 256 * MIB
BATCH = 128


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


class Rank:
    """A client over memory shaped as SGLang's page_first pools: K and V of a page half the pool apart."""

    def __init__(self, settings: Settings, memory: Memory, copy_mode: str = "memfd", *, warm: bool = True) -> None:
        self._memory = memory
        self.client = PoolClient(dataclasses.replace(settings, copy_mode=copy_mode), "bench")
        fds = (memory.fd,) if copy_mode == "memfd" else ()
        region = p.Region(memory.address, memory.length, 0 if fds else -1)
        self.client.share(PoolGeometry("kv", (), 1, 1, (region,), fds, affine=True))
        if warm:  # both movers fault the segment in behind their first batch
            key = os.urandom(16), os.urandom(p.HASH_BYTES)
            self.move("store", *key, 64 * KIB)
            self.move("load", *key, 64 * KIB)
            self.client.clear(key[0])
            time.sleep(1.5)

    def halves(self, page: int) -> list[p.Run]:
        return [p.Run(self._memory.address + part * self._memory.length // 2, page // 2, page // 2) for part in (0, 1)]

    def head(self, layout: str, body: int) -> list[p.Run]:
        """K and V of the first of 8 KV heads: 64 tokens of as many layers as make `body` bytes, in the canonical order."""
        row, tokens, heads = 256, 64, 8
        layers = body // 2 // tokens // row
        pages = self._memory.length // (heads * body)
        token, layer, page = {
            "page_first": (layers * heads * row, heads * row, heads * body // 2),
            "page_first_direct": (heads * row, tokens * heads * row, heads * body // 2),
            "layer_first": (heads * row, pages * tokens * heads * row, tokens * heads * row),
        }[layout]
        dims = [(tokens * layers, layer)] if token == layers * layer else [(tokens, token), (layers, layer)]
        starts = (self._memory.address + part * self._memory.length // 2 for part in (0, 1))
        return [p.Run(start, page, body // 2, dims) for start in starts]

    def move(self, op: str, namespace: bytes, hashes: bytes, page: int, runs: list[p.Run] | None = None) -> float:
        """One batch, one page per hash, of `runs` (by default two halves); GB/s. Raises when a page did not make it."""
        count = len(hashes) // p.HASH_BYTES
        runs = runs or self.halves(page)
        started = time.perf_counter()
        outcome = self.client.transfer(op, Body(namespace, tuple(runs)), hashes, array("q", range(count)))
        took = time.perf_counter() - started
        if outcome.ok.count(1) != count:
            raise RuntimeError(f"{op} of {count} pages of {page} bytes: {outcome.reasons}")
        return count * page / took / 1e9

    def wait_for(self, namespace: bytes, hashes: bytes) -> None:
        """Until all of them can be loaded: another host's master hears of new pages within milliseconds."""
        until = time.monotonic() + 20
        while self.client.exists(namespace, hashes) < len(hashes) // p.HASH_BYTES:
            if time.monotonic() > until:
                raise RuntimeError("pages of another node were not found for 20 s")
            time.sleep(0.002)


class Pages:
    """One page size through one rank: stores of new keys, loads of what another round's store left."""

    def __init__(
        self, writer: Rank, reader: Rank, page: int, *, runs: list[p.Run] | None = None, count: int | None = None
    ) -> None:
        self.page = page
        self.count = count or min(BATCH, POOL_BYTES // page)
        self._writer, self._reader, self._runs = writer, reader, runs

    def _fresh(self) -> tuple[bytes, bytes]:
        return os.urandom(16), os.urandom(p.HASH_BYTES * self.count)

    def store(self, _round: int) -> float:
        namespace, hashes = self._fresh()
        with METER.timed():
            rate = self._writer.move("store", namespace, hashes, self.page, self._runs)
        self._writer.client.clear(namespace)
        return rate

    def load(self, _round: int) -> float:
        namespace, hashes = self._fresh()
        self._writer.move("store", namespace, hashes, self.page, self._runs)
        self._reader.wait_for(namespace, hashes)
        with METER.timed():
            rate = self._reader.move("load", namespace, hashes, self.page, self._runs)
        self._writer.client.clear(namespace)
        return rate

    def rows(
        self, name: str, figures: Mapping[str, Sequence[float]], ceiling: str, ops: list[str], target: float | None
    ) -> list[Row]:
        what = f"{self.count} x {size_text(self.page)}"
        return [compare(f"{name}: {op} {what}", figures[op], figures[ceiling], "GB/s", ceiling, target) for op in ops]

    def rival_rows(self, name: str, figures: Mapping[str, Sequence[float]], rivals: Sequence[str], target: float) -> list[Row]:
        """Against whichever of them is the fastest at each."""
        rows = []
        for op in ("store", "load"):
            best = max((f"{rival} {op}" for rival in rivals), key=lambda which: median(figures[which]))
            ours = {op: figures[op], best.removesuffix(f" {op}"): figures[best]}
            rows += self.rows(name, ours, best.removesuffix(f" {op}"), [op], target)
        return rows


class BareLoop:
    """The ceiling for TCP: pages sent by one process and received by another over loopback, nothing else."""

    def __init__(self, source: Memory, target: Memory) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._target = target
        self.pid = os.fork()
        if self.pid == 0:
            try:
                sock, _ = listener.accept()
                while request := sock.recv(16, socket.MSG_WAITALL):
                    page, count = int.from_bytes(request[:8], "little"), int.from_bytes(request[8:], "little")
                    for at in range(0, page * count, page):
                        view = source.mapping.view[at : at + page]
                        while view:
                            view = view[sock.sendmsg([view]) :]
            finally:
                os._exit(0)
        METER.apart.add(self.pid)
        self._sock = socket.create_connection(listener.getsockname())
        listener.close()

    def rate(self, page: int, count: int) -> float:
        with METER.timed([os.getpid(), self.pid]):
            started = time.perf_counter()
            self._sock.sendall(page.to_bytes(8, "little") + count.to_bytes(8, "little"))
            view = self._target.mapping.view[: page * count]
            for at in range(0, page * count, page):
                got = 0
                while got < page:
                    got += self._sock.recv_into(view[at + got : at + page], page - got, socket.MSG_WAITALL)
            took = time.perf_counter() - started
        return page * count / took / 1e9

    def close(self) -> None:
        self._sock.close()
        os.waitpid(self.pid, 0)
        METER.apart.discard(self.pid)
