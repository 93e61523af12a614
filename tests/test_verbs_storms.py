"""Whatever devices do, in whatever order: bytes that are reported moved are right, nothing lands late, nothing is left over."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time

import pytest

from hicache_mooncake.testing.fake_verbs import FakeCard, FakeFabric
from hicache_mooncake.transfer.transport import Op, Piece, TransportError, TransportOptions
from hicache_mooncake.transfer.verbs.link import VerbsLink
from tests.test_verbs_transport import LONG, SIZE, End, Pair, connected, until

SLOTS = 8
SLOT = SIZE // 4 // SLOTS
"""A quarter of a memory each: what left writes to right, what right writes to left, what left reads, what right reads."""
BATCHES = 20


class Worker(threading.Thread):
    """Moves one slot after the other between its end and the other one, and looks at every byte."""

    def __init__(self, here: End, there: End, quarter: int, op: Op, seed: int) -> None:
        super().__init__(daemon=True)
        self.here, self.there, self.start_at, self.op = here, there, quarter * SIZE // 4, op
        self.rng = random.Random(seed)
        self.moved = 0
        self.known: dict[int, bytes] = {}
        """What must lie where this worker's bytes land, by slot."""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(BATCHES):
                self.step()
        except BaseException as error:  # for the thread that joins
            self.error = error

    def step(self) -> None:
        source = self.here if self.op == "write" else self.there
        slot = self.rng.randrange(SLOTS)
        at = self.start_at + slot * SLOT
        self.check(slot)
        body = self.rng.randbytes(SLOT)
        source.memory.map[at : at + SLOT] = body
        self.known.pop(slot, None)
        step = self.rng.choice((SLOT, 64 << 10, 9_973))
        pieces = [
            Piece(self.here.memory.address + at + i, self.there.memory.address + at + i, min(step, SLOT - i))
            for i in range(0, SLOT, step)
        ]
        try:
            batch = self.here.link.submit(
                self.op, self.rng.sample(pieces, len(pieces)), time.monotonic() + self.rng.uniform(0.02, 1)
            )
            if self.rng.random() < 0.15:
                batch.cancel()
            batch.wait()
        except TransportError as error:
            if error.reason not in ("deadline", "cancelled", "peer", "device"):
                raise
            if self.op == "read":  # done: nothing of it lands any more
                self.known[slot] = bytes(self.here.memory.map[at : at + SLOT])
        else:
            self.moved += 1
            self.known[slot] = body
            self.check(slot)

    def check(self, slot: int) -> None:
        target = self.there if self.op == "write" else self.here
        at = self.start_at + slot * SLOT
        if slot in self.known:
            assert target.memory.bytes(at, SLOT) == self.known[slot], f"{self.op} of slot {slot}: other bytes"


def trouble(card: FakeCard, rng: random.Random) -> None:
    match rng.randrange(8):
        case 0:
            card.hold(after_bytes=rng.randrange(SLOT))
        case 1 | 2:
            card.resume()
        case 3:
            card.port_state(1, rng.choice(("DOWN", "ACTIVE", "ACTIVE")))
        case 4:
            card.fail_posts(1)
        case 5:
            card.break_queue_pairs(rng.choice((0, 3, None, None)))
        case 6:
            card.lose_completions(1)
        case 7:
            card.slow(rng.choice((0.0, 100e6)))


def heal(card: FakeCard) -> None:
    card.resume()
    card.port_state(1, "ACTIVE")
    card.fail_posts(0)
    card.break_queue_pairs(None)
    card.lose_completions(0)
    card.slow(0.0)


def validate(end: End) -> None:
    assert isinstance(end.link, VerbsLink)
    with end.transport.lock:
        end.link.validate()


@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_right_whatever_devices_do(seed: int) -> None:
    rng = random.Random(seed)
    with FakeFabric() as fabric:
        pair = Pair(fabric, cards=1 + seed % 3)
        ends = (pair.left, pair.right)
        cards = [card for end in ends for card in end.host.cards.values()]
        workers = [
            Worker(pair.left, pair.right, 0, "write", 4 * seed),
            Worker(pair.right, pair.left, 1, "write", 4 * seed + 1),
            Worker(pair.left, pair.right, 2, "read", 4 * seed + 2),
            Worker(pair.right, pair.left, 3, "read", 4 * seed + 3),
        ]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            trouble(rng.choice(cards), rng)
            for end in ends:
                validate(end)
            time.sleep(rng.uniform(0, 0.02))
        for worker in workers:
            worker.join()
        for card in cards:
            heal(card)
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        if pair.left.link.alive and pair.right.link.alive:
            until(lambda: "up" in pair.left.states() or not pair.left.link.alive)
        for worker in workers:
            for slot in range(SLOTS):
                worker.check(slot)
        until(lambda: pair.left.link.alive == pair.right.link.alive)
        if pair.left.link.alive:
            pair.write(seconds=LONG).wait()
            assert pair.same()
        pair.close()
        assert not fabric.qps


def test_links_that_fail_in_whatever_way_leave_nothing_behind() -> None:
    """Descriptors, threads, queue pairs: of a hundred as of one."""
    rng = random.Random(7)
    with FakeFabric() as fabric:
        names = ("mlx5_0", "mlx5_1")
        ends = [End(fabric.host(name, names), TransportOptions(), seed) for seed, name in enumerate(("left", "right"), 1)]
        cards = [card for end in ends for card in end.host.cards.values()]

        def try_one(number: int) -> None:
            for card in cards:
                if number and rng.random() < 0.7:
                    trouble(card, rng)
                    card.lose_completions(0)  # costs seconds each time, and nothing else
            try:
                link, other = connected(ends[0].transport, ends[1].transport)
            except (TransportError, AssertionError):
                pass  # of either side
            else:
                link.learn(ends[1].memory.address, SIZE, ends[1].token)
                piece = Piece(ends[0].memory.address, ends[1].memory.address, SLOT)
                with contextlib.suppress(TransportError):
                    link.submit("write", [piece], time.monotonic() + rng.uniform(0.0, 0.02)).wait()
                link.close()
                other.close()
            for card in cards:
                heal(card)

        def left() -> tuple[int, int]:
            until(lambda: not fabric.qps and not any(end.transport._links for end in ends))
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        try_one(0)
        for number in range(1, 20):
            try_one(number)
        before = left()
        for number in range(100):
            try_one(number + 20)
        until(lambda: left() <= before)
        for end in ends:
            end.transport.close()
            assert end.host.pinned == 0
