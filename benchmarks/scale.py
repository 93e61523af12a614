"""`make bench-scale`: one shard of a cluster of 1,000 nodes and 100 M pages, on paper and simulated.

On paper: rates from the figures of the cluster, and costs a message and a page measured on a master of 8 nodes and 100,000
pages. Simulated: the real MasterCore of one shard, all 1,000 nodes' messages encoded, decoded and answered on a virtual clock,
as many pages as the shard has, or as memory allows. What differs between the two is what size itself costs. Sockets are not
simulated: what they cost is measured apart, and added to both.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq
from hicache_master.core import GATHER_S, GATHER_S_PER_NODE, MasterCore
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.harness import Row, save
from hicache_mooncake import protocol as p

NAMESPACE = b"benchmark-of-16B"
BATCH = 128
PART_KEYS = 4_096
TICK_S = 0.05
MEMORY_PAGE = 100.0
"""Bytes of one that one node holds. They are 75 to 125, depending on how far the tables are from their next doubling."""


@dataclass(frozen=True)
class Cluster:
    """What the whole cluster does a second."""

    nodes: int = 1_000
    pages: int = 100_000_000
    written: int = 20_000
    """Pages a second, and as many are evicted: the pool is full."""
    tokens: int = 2_000_000
    """Of prompts, a second."""
    page_tokens: int = 64
    ranks: int = 8
    """Each asks for its own part of a page."""
    asked: int = 2
    """Times that a rank's page comes to a master: whether it is there, and then where. The worst: none is on the own node."""
    shards: int = 4
    heartbeat_s: float = 1.0

    @property
    def gather_s(self) -> float:
        return max(GATHER_S[0], min(GATHER_S[1], self.nodes * GATHER_S_PER_NODE))

    @property
    def lookups(self) -> float:
        """Messages a second that ask, and each of them goes to every shard."""
        return self.tokens / self.page_tokens * self.ranks * self.asked / BATCH

    @property
    def keys_a_lookup(self) -> int:
        """Of one shard."""
        return max(1, BATCH // self.shards)

    @property
    def updates(self) -> float:
        """Messages a second to one shard's master, when pages come one by one: the more windows have something to say."""
        changes = self.written / self.nodes / self.shards * self.gather_s
        return self.nodes / self.gather_s * (1 - float(np.exp(-changes)))

    @property
    def changes(self) -> float:
        """Pages added, and as many removed, a second in one shard."""
        return self.written / self.shards

    @property
    def beats(self) -> float:
        return self.nodes / self.heartbeat_s


@dataclass
class Cost:
    """What one kind of message costs the master."""

    messages: int = 0
    keys: int = 0
    cpu_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0


KINDS = ("updates", "beats", "lookups", "ticks")


class Shard:
    """The master of shard 0 and all nodes' messages to it. Page `j` of node `i` has a hash that is computed, so that no node
    keeps a list: it holds [first, next) of its own."""

    def __init__(self, cluster: Cluster, pages: int, seed: int = 1) -> None:
        self.cluster = cluster
        self.rng = random.Random(seed)
        self.core = MasterCore(
            b"scale", max_keys=1 << 40, shard=(0, cluster.shards), ttl_s=5.0, heartbeat_s=cluster.heartbeat_s, rng=self.rng
        )
        self.costs = {kind: Cost() for kind in KINDS}
        self.fill_s = 0.0
        self.fill_longest_s = 0.0
        self.longest_s = 0.0
        self.kept = pages // cluster.nodes
        """Pages of one node in this shard."""
        self._decode = p.decoder(p.ToMaster).decode
        self._first = [0] * cluster.nodes
        self._next = [0] * cluster.nodes
        self._seq = [1] * cluster.nodes
        self._used = Counter[str]()

    # ------------------------------------------------------------------ messages

    def hashes(self, node: int, start: int, count: int) -> bytes:
        """Of this shard: bytes 20 to 23 are a multiple of the number of shards."""
        index = (np.uint64(node) << np.uint64(40)) + np.arange(start, start + count, dtype=np.uint64)
        words = index[:, None] * np.uint64(4) + np.arange(4, dtype=np.uint64)
        words = (words + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
        words ^= words >> np.uint64(31)
        shards = np.uint32(self.cluster.shards)
        narrow = np.ascontiguousarray(words).view(np.uint32)
        if shards > 1:
            narrow[:, 5] = narrow[:, 5] % np.uint32((1 << 32) // int(shards)) * shards
        return narrow.tobytes()

    def deliver(self, kind: str, message: p.Message, sender: bytes, now: float, keys: int = 0) -> None:
        """One message through the codec and the core, and its answers encoded, as the server does it."""
        body = p.encode(message)
        cost = self.costs[kind]
        started = time.thread_time()
        output = self.core.handle(self._decode(body), sender, now)
        answers = [p.encode(answer) for _, answer in output]
        took = time.thread_time() - started
        cost.cpu_s += took
        cost.messages += 1
        cost.keys += keys
        cost.bytes_in += len(body)
        cost.bytes_out += sum(map(len, answers))
        self.longest_s = max(self.longest_s, took)

    def name(self, node: int) -> str:
        return f"node-{node:04d}.rack-{node // 40:02d}.example"

    def incarnation(self, node: int) -> bytes:
        return node.to_bytes(8, "little")

    def fill(self) -> None:
        """All nodes join and send their snapshots, as after a restart of this master."""
        for node in range(self.cluster.nodes):
            host = f"10.{node >> 8}.{node & 255}.7"
            facts = (self.name(node), self.incarnation(node), host, 7000, 1 << 40, 1, f"host-{node}")
            self.core.handle(p.Join(1, 2, *facts), self.incarnation(node), 0.0)
        for start in range(0, self.kept, PART_KEYS):
            for node in range(self.cluster.nodes):
                count = min(PART_KEYS, self.kept - start)
                blob = self.hashes(node, start, count)
                last = start + count >= self.kept
                body = p.encode(
                    p.Snapshot(self.name(node), self.incarnation(node), 1, start // PART_KEYS, last, [(NAMESPACE, blob)])
                )
                started = time.thread_time()
                self.core.handle(self._decode(body), self.incarnation(node), 1.0)
                took = time.thread_time() - started
                self.fill_s += took
                self.fill_longest_s = max(self.fill_longest_s, took)
        self._next = [self.kept] * self.cluster.nodes
        assert len(self.core.directory) == self.kept * self.cluster.nodes

    def update(self, node: int, written: int, now: float) -> None:
        """Pages written since the last window, and the node's oldest evicted for them."""
        self._seq[node] += 1
        added = self.hashes(node, self._next[node], written)
        removed = self.hashes(node, self._first[node], written)
        self._next[node] += written
        self._first[node] += written
        message = p.Update(
            self.name(node), self.incarnation(node), self._seq[node], [(NAMESPACE, added)], [(NAMESPACE, removed)]
        )
        self.deliver("updates", message, self.incarnation(node), now, 2 * written)

    def beat(self, node: int, now: float) -> None:
        beat = p.Beat(
            self.name(node),
            self.incarnation(node),
            self._seq[node],
            1 << 39,
            1 << 40,
            self.kept,
            9,
            9,
            False,
            1 << 30,
            True,
            1 << 36,
        )
        self.deliver("beats", beat, self.incarnation(node), now)

    def lookup(self, count: int, now: float) -> None:
        """A chain of which one node holds the first half, asked for by another one."""
        holder, asker = self.rng.sample(range(self.cluster.nodes), 2)
        known = -(-count // 2)
        at = self.rng.randrange(self._first[holder], self._next[holder] - known)
        hashes = self.hashes(holder, at, known) + self.hashes(self.cluster.nodes, at, count - known)
        lookup = p.Lookup(1, [p.Question(NAMESPACE, hashes, True)], self.name(asker))
        self.deliver("lookups", lookup, self.incarnation(asker), now, count)

    def tick(self, now: float) -> None:
        started = time.thread_time()
        self.core.tick(now)
        took = time.thread_time() - started
        self.costs["ticks"].cpu_s += took
        self.costs["ticks"].messages += 1
        self.longest_s = max(self.longest_s, took)

    def after_a_change(self, now: float) -> float:
        """CPU seconds of a lookup that is the first one after a node has come."""
        times = []
        for number in range(20):
            facts = (f"late-{number}", b"late", "10.9.9.9", 7000 + number, 1 << 40, 0)
            self.core.handle(p.Join(1, 2, *facts), b"late", now)
            before = self.costs["lookups"].cpu_s
            self.lookup(self.cluster.keys_a_lookup, now)
            times.append(self.costs["lookups"].cpu_s - before)
        return sorted(times)[10]

    # ------------------------------------------------------------------ the virtual clock

    def run(self, seconds: float, start: float = 1.5) -> None:
        """Every node's windows and heartbeats at a phase of its own, lookups at random moments."""
        cluster, rng = self.cluster, self.rng
        for cost in self.costs.values():
            cost.__init__()  # type: ignore[misc]
        self.longest_s = 0.0
        rate = cluster.written / cluster.nodes / cluster.shards * cluster.gather_s
        poisson = np.random.default_rng(3).poisson
        events: list[tuple[float, int, Callable[[float], None], float]] = []

        def window(node: int) -> Callable[[float], None]:
            def go(now: float) -> None:
                if written := int(poisson(rate)):
                    self.update(node, written, now)

            return go

        def beat(node: int) -> Callable[[float], None]:
            return lambda now: self.beat(node, now)

        for node in range(cluster.nodes):
            events.append((start + rng.uniform(0, cluster.gather_s), len(events), window(node), cluster.gather_s))
            events.append((start + rng.uniform(0, cluster.heartbeat_s), len(events), beat(node), cluster.heartbeat_s))
        asked = cluster.keys_a_lookup
        events.append((start, len(events), lambda now: self.lookup(asked, now), 1 / cluster.lookups))
        events.append((start, len(events), self.tick, TICK_S))
        heapq.heapify(events)
        while events[0][0] < start + seconds:
            now, number, what, every = events[0]
            what(now)
            heapq.heapreplace(events, (now + every, number, what, every))


# --------------------------------------------------------------------------- the two columns


def calibrate(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """CPU seconds (a message, a key) of each kind, on a master of 8 nodes and 100,000 pages; of snapshots a key."""
    small = Shard(dataclasses.replace(cluster, nodes=8, shards=1), 100_000)
    small.fill()
    costs = {"snapshots": (0.0, small.fill_s / len(small.core.directory))}
    for kind, few, many in (("updates", 1, 64), ("lookups", 2, 256)):
        times = []
        for keys in (few, many):
            small.costs[kind] = Cost()
            for number in range(2_000):
                if kind == "updates":
                    small.update(number % 8, keys, 20.0)
                else:
                    small.lookup(keys, 20.0)
            cost = small.costs[kind]
            times.append((cost.cpu_s / cost.messages, cost.keys / cost.messages))
        (few_s, few_keys), (many_s, many_keys) = times
        a_key = (many_s - few_s) / (many_keys - few_keys)
        costs[kind] = (few_s - a_key * few_keys, a_key)
    for number in range(2_000):
        small.beat(number % 8, 20.0)
        small.tick(20.0)
    for kind in ("beats", "ticks"):
        costs[kind] = (small.costs[kind].cpu_s / small.costs[kind].messages, 0.0)
    return costs


def sockets() -> tuple[float, float]:
    """CPU seconds that the master's thread spends on receiving one message of 4 KiB, and on sending an answer of 256 B."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        count, body = 5_000, os.urandom(4096)

        def ask() -> None:
            for _ in range(count):
                dealer.send(body)

        thread = threading.Thread(target=ask)
        thread.start()
        receiving, senders = 0.0, []
        for _ in range(count):
            router.poll()
            started = time.thread_time()
            senders.append(router.recv_multipart(zmq.NOBLOCK)[0])
            receiving += time.thread_time() - started
        thread.join()
        started = time.thread_time()
        for sender in senders[:900]:  # fewer than the high-water mark
            router.send_multipart((sender, body[:256]), zmq.NOBLOCK)
        return receiving / count, (time.thread_time() - started) / 900


def paper(cluster: Cluster, costs: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float, float]]:
    """Kind -> (messages, keys, CPU seconds) a second at one shard's master."""
    rates = {
        "updates": (cluster.updates, 2 * cluster.changes),
        "beats": (cluster.beats, 0.0),
        "lookups": (cluster.lookups, cluster.lookups * cluster.keys_a_lookup),
        "ticks": (1 / TICK_S, 0.0),
    }
    return {kind: (m, k, m * costs[kind][0] + k * costs[kind][1]) for kind, (m, k) in rates.items()}


def bytes_on_paper(cluster: Cluster, kind: str) -> float:
    """Bytes a second into one master: 32 a hash, and 90 for names, numbers and the frame of a message; a namespace takes 20."""
    messages, keys, _ = paper(cluster, dict.fromkeys(KINDS, (0.0, 0.0)))[kind]
    extra = {"updates": 40, "lookups": 20}.get(kind, 0)
    return messages * (90 + extra) + 32 * keys


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def simulate(cluster: Cluster, pages: int, seconds: float) -> tuple[Shard, float]:
    """The shard after the run, and the resident bytes of a page."""
    before = resident()
    shard = Shard(cluster, pages)
    shard.fill()
    a_page = (resident() - before) / max(1, len(shard.core.directory))
    shard.run(seconds)
    return shard, a_page


def rows(
    cluster: Cluster,
    costs: dict[str, tuple[float, float]],
    receive: float,
    send: float,
    options: argparse.Namespace,
    progress: Progress,
) -> Iterator[tuple[str, float, float, str]]:
    """(what, on paper, simulated, unit)."""
    pages = min(cluster.pages // cluster.shards, int(options.memory_gb * 1e9 / 160))
    task = progress.add_task(f"a shard of {cluster.shards}: {pages / 1e6:.1f} M pages")
    shard, a_page = simulate(cluster, pages, options.seconds)
    progress.remove_task(task)
    on_paper = paper(cluster, costs)
    measured = {kind: dataclasses.replace(cost) for kind, cost in shard.costs.items()}
    after_a_change = shard.after_a_change(1.5 + options.seconds)
    yield "pages in the directory", cluster.pages / cluster.shards / 1e6, len(shard.core.directory) / 1e6, "M"
    total = [0.0, 0.0]
    messages = answers = 0.0
    for kind in KINDS:
        cost = measured[kind]
        m, k, cpu = on_paper[kind]
        if kind != "ticks":
            yield f"{kind}: messages", m, cost.messages / options.seconds, "/s"
            messages += m
            answers += m if kind != "updates" else 0.0
        if k:
            yield f"{kind}: pages", k, cost.keys / options.seconds, "/s"
        if kind != "ticks":
            yield f"{kind}: received", bytes_on_paper(cluster, kind) / 1e6, cost.bytes_in / options.seconds / 1e6, "MB/s"
        yield f"{kind}: CPU", cpu * 1e3, cost.cpu_s / options.seconds * 1e3, "ms/s"
        total[0] += cpu
        total[1] += cost.cpu_s / options.seconds
    in_sockets = messages * receive + answers * send
    yield "sockets: CPU", in_sockets * 1e3, in_sockets * 1e3, "ms/s"
    yield "master's loop: CPU", (total[0] + in_sockets) * 1e3, (total[1] + in_sockets) * 1e3, "ms/s"
    sent = sum(cost.bytes_out for cost in measured.values()) / options.seconds / 1e6
    yield "answers sent", float("nan"), sent, "MB/s"
    held, due = len(shard.core.directory), cluster.pages / cluster.shards
    yield "memory a page", MEMORY_PAGE, a_page, "B"
    yield "memory of the directory", due * MEMORY_PAGE / 1e9, a_page * held / 1e9, "GB"
    yield "CPU until whole after a restart", due * costs["snapshots"][1], shard.fill_s, "s"
    yield "first lookup after a node has come: CPU", float("nan"), after_a_change * 1e3, "ms"
    yield "longest single message", float("nan"), max(shard.longest_s, shard.fill_longest_s) * 1e3, "ms"


def by_shards(costs: dict[str, tuple[float, float]], receive: float, send: float, options: argparse.Namespace) -> Table:
    """How many shards it takes, on paper: one master of each, and one node with two masters a shard."""
    table = Table(title="on paper: one master, by the number of shards; and what one node sends to two masters of each")
    for column in ("shards", "loop's CPU", "directory", "whole after a restart", "messages in", "a node sends"):
        table.add_column(column, justify="right")
    for shards in (1, 2, 4, 8, 16, 32):
        cluster = Cluster(nodes=options.nodes, pages=options.pages, shards=shards)
        rates = paper(cluster, costs)
        messages = sum(m for kind, (m, _, _) in rates.items() if kind != "ticks")
        answers = messages - rates["updates"][0]
        cpu = sum(cpu for _, _, cpu in rates.values()) + messages * receive + answers * send
        pages = cluster.pages / shards
        a_node = 2 * shards * (rates["updates"][0] + rates["beats"][0]) / cluster.nodes
        table.add_row(
            str(shards),
            f"{cpu * 100:.0f} %",
            f"{pages * MEMORY_PAGE / 1e9:.2f} GB",
            f"{pages * costs['snapshots'][1]:.1f} s",
            f"{messages:,.0f} /s",
            f"{a_node:,.0f} /s",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 4, 16], help="in how many the directory is cut")
    parser.add_argument("--seconds", type=float, default=5.0, help="virtual seconds")
    parser.add_argument("--nodes", type=int, default=Cluster.nodes)
    parser.add_argument("--pages", type=int, default=Cluster.pages)
    parser.add_argument("--memory-gb", type=float, default=4.0, help="most that the simulated directory may take")
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args()
    kept: list[Row] = []
    console = Console(width=max(100, Console().width))
    costs = calibrate(Cluster(nodes=options.nodes))
    receive, send = sockets()
    console.print(by_shards(costs, receive, send, options))
    for shards in options.shards:
        cluster = Cluster(nodes=options.nodes, pages=options.pages, shards=shards)
        table = Table(title=f"one master of {shards}: {cluster.nodes:,} nodes, {cluster.pages / 1e6:g} M pages in all")
        for column in ("a second", "on paper", "simulated", "unit"):
            table.add_column(column, justify="left" if column == "a second" else "right")
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True) as progress:
            for what, plan, ran, unit in rows(cluster, costs, receive, send, options, progress):
                table.add_row(what, "" if plan != plan else f"{plan:,.4g}", f"{ran:,.4g}", unit)
                kept.append(Row(f"shard of {shards}: {what}", ran, ran if plan != plan else plan, unit, "on paper", 0.0))
        console.print(table)
    print(f"saved as {save(kept, 'scale', path=options.out)}")


if __name__ == "__main__":
    main()
