"""Sections of `make bench` between hosts, which are nodes on this one: loads and gifts over tcp, more and more peers, and a
neighbour on the same host."""

from __future__ import annotations

import contextlib
import os
import time

import xxhash

from benchmarks.harness import Bench, Memory, Row, compare, memcpy_rate, pool
from benchmarks.ranks import BATCH, KIB, MIB, POOL_BYTES, BareLoop, Pages, Rank, size_text
from benchmarks.rival import over_tcp, promised
from benchmarks.usage import METER
from hicache_mooncake import protocol as p
from hicache_mooncake.config import Settings
from hicache_mooncake.config_values import split_address
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.transfer import tcp as wire

SIZES = (64 * KIB, 256 * KIB, MIB)
_PATIENT_S = 20.0
_pushed_decoder = p.decoder(p.PushReply | p.Pushed | p.Refused)


def tcp(bench: Bench) -> list[Row]:
    """Loads of pages that another node holds, against a bare loop over the same loopback, and against the
    peers'."""
    rows: list[Row] = []
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    bare = BareLoop(source, target)
    with pool(nodes=2, extra=("--replicate-after", "0")) as (near, far), over_tcp(bench) as theirs:
        writer, reader = Rank(far, source), Rank(near, target)
        for size in SIZES:
            pages = Pages(writer, reader, size)

            def loop(_round: int, pages: Pages = pages) -> float:
                return bare.rate(pages.page, pages.count)

            contenders = {"load": pages.load, "bare loop": loop}
            for rival in theirs:
                contenders |= rival.contenders(size, pages.count)
            figures = bench.interleave(contenders, f"tcp {size // KIB} KiB")
            rows += pages.rows("tcp", figures, "bare loop", ["load"], 0.9)
            for rival in theirs:
                ours = {"load": figures["load"], rival.name: figures[f"{rival.name} load"]}
                rows += pages.rows("tcp", ours, rival.name, ["load"], promised(rival, "load", size))
        writer.client.close()
        reader.client.close()
    bare.close()
    source.close()
    target.close()
    return rows


class Pusher:
    """Gives pages of some memory to a node, as another node does when it is full or ends. The node checks each."""

    def __init__(self, settings: Settings, memory: Memory) -> None:
        self._memory = memory
        self._rank = Rank(settings, memory)
        report = self._rank.client.status()
        assert report is not None
        host, port = split_address(str(report.node["data"]))
        peer = p.Peer(str(report.node["name"]), bytes.fromhex(str(report.node["incarnation"])), host, port)
        self._connection = wire.PeerConnection(peer, time.monotonic() + _PATIENT_S)

    def rate(self, page: int, count: int) -> float:
        """GB/s, from the offer to the answer that all are whole. The checksums are known before, as a node's are."""
        namespace, hashes = os.urandom(16), os.urandom(p.HASH_BYTES * count)
        bodies = [self._memory.mapping.view[at * page : (at + 1) * page] for at in range(count)]
        names = [hashes[at : at + p.HASH_BYTES] for at in range(0, len(hashes), p.HASH_BYTES)]
        seeds = [checksum_seed(namespace, name) for name in names]
        checksums = [xxhash.xxh3_64_intdigest(body, seed) for body, seed in zip(bodies, seeds, strict=True)]
        push = p.Push(p.PROTOCOL_MAX, "bench", namespace, namespace, hashes, page, checksums, hot=True)
        with METER.timed():
            started = time.perf_counter()
            self._give(push, bodies)
            took = time.perf_counter() - started
        self._rank.client.clear(namespace)
        return page * count / took / 1e9

    def _give(self, push: p.Push, bodies: list[memoryview]) -> None:
        sock, deadline, count = self._connection.sock, time.monotonic() + _PATIENT_S, len(bodies)
        wire.set_timeouts(sock, _PATIENT_S)
        wire.send_message(sock, push)
        reply = wire.receive_message(sock, _pushed_decoder, deadline)
        if not isinstance(reply, p.PushReply) or reply.status.count(p.WRITE) != count:
            raise RuntimeError(f"a node took {reply} of {count} pages")
        wire.set_timeouts(sock, _PATIENT_S)
        wire.send_bodies(sock, bodies, deadline)
        pushed = wire.receive_message(sock, _pushed_decoder, deadline)
        if not isinstance(pushed, p.Pushed) or pushed.ok.count(1) != count:
            raise RuntimeError(f"pushed pages came to {pushed}")

    def close(self) -> None:
        self._connection.close()
        self._rank.client.close()


def push(bench: Bench) -> list[Row]:
    """The way by which pages are stored on another node: what a full node gives away, and one that ends."""
    rows: list[Row] = []
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    bare = BareLoop(source, target)
    with pool(nodes=2) as (_, far), contextlib.closing(Pusher(far, source)) as pusher, over_tcp(bench) as theirs:
        for size in SIZES:
            count = min(BATCH, POOL_BYTES // size)
            contenders = {
                "push": lambda _, size=size, count=count: pusher.rate(size, count),
                "bare loop": lambda _, size=size, count=count: bare.rate(size, count),
            }
            for rival in theirs:
                contenders[rival.name] = rival.contenders(size, count)[f"{rival.name} store"]
            figures = bench.interleave(contenders, f"push {size // KIB} KiB")
            what, ours = f"tcp: give {count} x {size_text(size)} to a node", figures["push"]
            ceilings = {"bare loop": 0.9} | {rival.name: promised(rival, "store", size) for rival in theirs}
            for ceiling, least in ceilings.items():
                rows.append(compare(what, ours, figures[ceiling], "GB/s", ceiling, least))
    bare.close()
    source.close()
    target.close()
    return rows


def peers(bench: Bench) -> list[Row]:
    """The same load spread over more and more nodes: what a second peer costs, or brings."""
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    most, pages = 8, 64
    with pool(nodes=most + 1, dram=256 * MIB, extra=("--replicate-after", "0")) as (near, *others):
        reader = Rank(near, target)
        namespace = os.urandom(16)
        shares = [os.urandom(p.HASH_BYTES * pages) for _ in others]
        for other, hashes in zip(others, shares, strict=True):
            writer = Rank(other, source)
            writer.move("store", namespace, hashes, MIB)
            writer.client.close()
        for hashes in shares:
            reader.wait_for(namespace, hashes)

        def spread_over(count: int) -> float:
            each = pages // count * p.HASH_BYTES
            return reader.move("load", namespace, b"".join(hashes[:each] for hashes in shares[:count]), MIB)

        counts = (1, 2, 4, most)
        contenders = {str(count): lambda _, count=count: spread_over(count) for count in counts}
        figures = bench.interleave(contenders, "peers")
        reader.client.close()
    source.close()
    target.close()
    what = f"tcp: load {pages} x 1 MiB from"
    return [compare(f"{what} {count} nodes", figures[str(count)], figures["1"], "GB/s", "one node") for count in counts[1:]]


def same_host(bench: Bench) -> list[Row]:
    """Pages that another node of this host holds, which are copied from its memory, against memcpy."""
    rows: list[Row] = []
    source, target = Memory(POOL_BYTES), Memory(POOL_BYTES)
    with pool(nodes=2, one_host=True, extra=("--replicate-after", "0")) as (near, far):
        writer, reader = Rank(far, source), Rank(near, target)
        for size in SIZES:
            pages = Pages(writer, reader, size)

            def memcpy(_round: int, pages: Pages = pages) -> float:
                return memcpy_rate(source, target, pages.page, pages.count)

            figures = bench.interleave({"load": pages.load, "memcpy": memcpy}, f"same host {size // KIB} KiB")
            rows += pages.rows("a neighbour's pages", figures, "memcpy", ["load"], None)
        writer.client.close()
        reader.client.close()
    source.close()
    target.close()
    return rows
