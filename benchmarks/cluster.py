"""Masters, nodes and clients for benchmarks of the cluster: real master processes, and whoever talks to them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import zmq

from benchmarks.machine import ROOT
from hicache_mooncake import protocol as p
from hicache_mooncake.config_values import join_address
from hicache_mooncake.node.master_link import ChangeSource, JoinFacts, Keys, MasterLink, Usage
from hicache_mooncake.testing.local import free_port

NAMESPACE = b"benchmark-of-16B"
BATCH = 128
PATIENCE_S = 120.0

_decode = p.decoder(p.FromMaster).decode
_spawn = multiprocessing.get_context("spawn")


def page_hashes(seed: int, count: int) -> bytes:
    """`count` page hashes, the same for every process that asks with this seed."""
    return random.Random(seed).randbytes(count * p.HASH_BYTES)


def parts(hashes: bytes, keys: int = 4_096) -> Iterator[bytes]:
    for at in range(0, len(hashes), keys * p.HASH_BYTES):
        yield hashes[at : at + keys * p.HASH_BYTES]


class MasterProcess:
    """`hicache-mooncake master` on a port of its own, that it keeps over restarts."""

    def __init__(self, *options: str) -> None:
        self.address = join_address("127.0.0.1", free_port())
        self._options = options
        self.start()

    def start(self) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "master")])}
        command = [sys.executable, "-m", "hicache_mooncake.cli", "master", "--listen", self.address, "--log-level", "error"]
        self.process = subprocess.Popen([*command, *self._options], env=env)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def cpu_s(self) -> float:
        """CPU seconds of its loop's thread, without ZMQ's own."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def report(self) -> p.ClusterReport:
        """What it says of itself; raises when it does not answer."""
        with Dealer(self.address) as dealer:
            reply = dealer.ask(p.ClusterStatus(), p.ClusterReport)
        assert isinstance(reply, p.ClusterReport)
        return reply

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


class Dealer:
    """A plain connection to a master."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.connect(f"tcp://{address}")

    def __enter__(self) -> Dealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, message: p.Message, kind: type[p.Message], timeout_s: float = PATIENCE_S) -> p.Message:
        """Send and wait for an answer of this kind."""
        self.socket.send(p.encode(message))
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            reply = _decode(self.socket.recv())
            if isinstance(reply, kind):
                return reply
            if isinstance(reply, p.Refused):
                raise RuntimeError(reply.reason)
        raise RuntimeError(f"no answer to {type(message).__name__} within {timeout_s:g} s")


class PlainNode:
    """A node that is nothing but its messages. Its masters must be patient with silent nodes (`--ttl-s`)."""

    def __init__(self, address: str, name: str, port: int) -> None:
        self.dealer = Dealer(address)
        self.name = name
        self.incarnation = os.urandom(8)
        self.seq = 1
        self._port = port

    def join(self) -> None:
        facts = (self.name, self.incarnation, "127.0.0.1", self._port, 1 << 40, self.seq)
        self.dealer.ask(p.Join(p.PROTOCOL_MIN, p.PROTOCOL_MAX, *facts), p.Joined)

    def give(self, hashes: bytes) -> None:
        """Send a snapshot of all this, and wait until the master has it."""
        blobs = list(parts(hashes))
        for number, blob in enumerate(blobs):
            last = number == len(blobs) - 1
            snapshot = p.Snapshot(self.name, self.incarnation, self.seq, number, last, [(NAMESPACE, blob)])
            self.dealer.socket.send(p.encode(snapshot))
        self.beat()

    def update(self, added: bytes = b"", removed: bytes = b"") -> None:
        self.seq += 1
        changes = [[(NAMESPACE, blob)] if blob else [] for blob in (added, removed)]
        self.dealer.socket.send(p.encode(p.Update(self.name, self.incarnation, self.seq, *changes)))

    def beat(self) -> float:
        """Seconds until the master answered, and with that had done what came before."""
        started = time.perf_counter()
        reply = self.dealer.ask(p.Beat(self.name, self.incarnation, self.seq, 0, 1 << 40, 0), p.BeatReply)
        assert isinstance(reply, p.BeatReply)
        if not reply.known or reply.want_snapshot:
            raise RuntimeError(f"the master lost track of {self.name}")
        return time.perf_counter() - started

    def leave(self) -> None:
        self.dealer.socket.send(p.encode(p.Leave(self.name, self.incarnation)))

    def close(self) -> None:
        self.dealer.socket.close()


def fill(address: str, hashes: bytes, nodes: int) -> list[PlainNode]:
    """Nodes that hold these pages, each its part."""
    share = -(-len(hashes) // p.HASH_BYTES // nodes) * p.HASH_BYTES
    members = [PlainNode(address, f"plain-{number}", 10_000 + number) for number in range(nodes)]
    for number, node in enumerate(members):
        node.join()
        node.give(hashes[number * share : (number + 1) * share])
    return members


class Actor:
    """A function in a process of its own, which it serves over a pipe: `ask` calls its method `name` there."""

    def __init__(self, make: Callable[..., object], *args: object) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self.answer()  # it is made

    def send(self, name: str, *args: object) -> None:
        self._pipe.send((name, args))

    def answer(self) -> Any:
        if not self._pipe.poll(PATIENCE_S * 5):
            raise RuntimeError("a process of the benchmark does not answer")
        worked, value = self._pipe.recv()
        if not worked:
            raise RuntimeError(value)
        return value

    def ask(self, name: str, *args: object) -> Any:
        self.send(name, *args)
        return self.answer()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, make: Callable[..., object], args: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR)
    try:
        served: object = make(*args)
        pipe.send((True, None))
    except Exception as error:
        pipe.send((False, repr(error)))
        return
    if hasattr(served, "attach"):
        served.attach(pipe)
    with contextlib.suppress(EOFError):
        while request := pipe.recv():
            name, arguments = request
            try:
                pipe.send((True, getattr(served, name)(*arguments)))
            except Exception as error:
                pipe.send((False, repr(error)))
    if hasattr(served, "close"):
        served.close()


class Held(ChangeSource):
    """What a node holds, and it never changes."""

    def __init__(self, hashes: bytes) -> None:
        self._hashes = hashes

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        return [], []

    def snapshot(self) -> Iterator[Keys]:
        for blob in parts(self._hashes):
            yield [(NAMESPACE, blob)]

    def changes_lost(self) -> bool:
        return False

    def usage(self) -> Usage:
        return Usage(len(self._hashes), 1 << 40, len(self._hashes) // p.HASH_BYTES)


class Node:
    """The real link of a node with `held` pages, and what its engines ask through it: batches of the first `known` pages of the
    seed. Runs in an Actor."""

    def __init__(self, masters: list[str], number: int, seed: int, known: int, held: int = 0, first: int = 0) -> None:
        self._known = page_hashes(seed, known)
        held_hashes = self._known[first * p.HASH_BYTES : (first + held) * p.HASH_BYTES]
        facts = JoinFacts(f"link-{number}", os.urandom(8), "127.0.0.1", 20_000 + number, 1 << 40)
        self._masters = masters
        self._rng = random.Random(number)
        self._link = MasterLink(masters, lambda: facts, Held(held_hashes), lambda _: None, log=logging.getLogger("bench"))
        self._link.start()
        deadline = time.monotonic() + PATIENCE_S
        while self._link.state != "joined":
            if time.monotonic() > deadline:
                raise RuntimeError(f"node {number} did not join: {self._link.state}")
            time.sleep(0.02)

    def attach(self, pipe: Connection) -> None:
        self._pipe = pipe

    def lookups(self, seconds: float) -> tuple[float, float, float]:
        """One batch after the other through the link: (keys a second, median and 99th percentile of a batch's seconds)."""
        times, started = [], time.perf_counter()
        while time.perf_counter() - started < seconds:
            before = time.perf_counter()
            self._batch(2.0)
            times.append(time.perf_counter() - before)
        took = time.perf_counter() - started
        times.sort()
        return len(times) * BATCH / took, times[len(times) // 2], times[len(times) * 99 // 100]

    def watch(self, timeout_s: float) -> tuple[float, int]:
        """The same until something comes over the pipe: (longest time without an answer, batches without one)."""
        longest, failed, answered_at = 0.0, 0, time.perf_counter()
        while not self._pipe.poll(0):
            try:
                self._batch(timeout_s)
            except RuntimeError:
                failed += 1
                continue
            now = time.perf_counter()
            longest, answered_at = max(longest, now - answered_at), now
        return max(longest, time.perf_counter() - answered_at), failed

    def nothing(self) -> None:
        """Ends `watch`."""

    def in_flight(self, seconds: float, depth: int) -> float:
        """Keys a second with `depth` lookups under way at a time on one plain connection, as engines of a host make them."""
        bodies = [p.encode(p.Lookup(number, [self._question()], "nobody")) for number in range(512)]
        keys, order = 0, itertools.cycle(bodies)
        with Dealer(self._masters[0]) as dealer:
            for _ in range(depth):
                dealer.socket.send(next(order))
            started = time.perf_counter()
            while time.perf_counter() - started < seconds:
                reply = dealer.socket.recv()
                dealer.socket.send(next(order))
                keys += BATCH
                if keys % (BATCH * 64) == 0:
                    self._check(_decode(reply))
            return keys / (time.perf_counter() - started)

    def close(self) -> None:
        self._link.close()

    def _question(self) -> p.Question:
        at = self._rng.randrange(len(self._known) // p.HASH_BYTES - BATCH) * p.HASH_BYTES
        return p.Question(NAMESPACE, self._known[at : at + BATCH * p.HASH_BYTES], True)

    def _batch(self, timeout_s: float) -> None:
        answers = self._link.lookup([self._question()], timeout_s)
        if answers is None or len(answers[0].holder) != BATCH:
            raise RuntimeError("a lookup of pages that are there did not find them")

    @staticmethod
    def _check(reply: p.Message) -> None:
        if not isinstance(reply, p.LookupReply) or len(reply.answers[0].holder) != BATCH:
            raise RuntimeError(f"a lookup of pages that are there brought {reply}")
