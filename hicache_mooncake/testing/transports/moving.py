"""Bytes arrive where they belong, whatever the sizes, the number, and whoever else moves some at the same time."""

from __future__ import annotations

import gc
import random
import threading
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from hicache_mooncake.testing.transports.harness import (
    End,
    Memory,
    TransportHarness,
    descriptors,
    fails,
    in_threads,
    pattern,
    same,
)
from hicache_mooncake.transfer.transport import Op, Piece, TransportOptions

_ODD = [1, 2, 3, 7, 63, 64, 65, 511, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1_048_577, 3_145_741]
each_op = pytest.mark.parametrize("op", ["read", "write"])


def _expected(op: Op, pieces: list[Piece], mine: Memory, theirs: Memory) -> tuple[bytes, bytes]:
    """What both memories will be."""
    here, there = bytearray(mine.bytes()), bytearray(theirs.bytes())
    for piece in pieces:
        i, j, length = piece.local - mine.address, piece.remote - theirs.address, piece.length
        if op == "read":
            here[i : i + length] = there[j : j + length]
        else:
            there[j : j + length] = here[i : i + length]
    return bytes(here), bytes(there)


class MovingTests(TransportHarness):
    def _check(self, near: End, op: Op, pieces: list[Piece], mine: Memory, theirs: Memory) -> None:
        expected = _expected(op, pieces, mine, theirs)
        near.move(op, pieces)
        same(mine.bytes(), expected[0], f"{op}: wrong bytes on the side that asked")
        same(theirs.bytes(), expected[1], f"{op}: wrong bytes on the other side")

    @each_op
    @pytest.mark.parametrize("shared", [True, False], ids=["memfd", "plain"])
    def test_pieces_of_any_size_and_alignment(self, op: Op, shared: bool) -> None:
        """Scattered on both sides, and not a byte beside them changes."""
        near, _, mine, theirs = self.sharing(sum(_ODD) + 64 * len(_ODD), shared=shared)
        pieces, i, j = [], 1, theirs.length
        for length in _ODD:
            j -= length + 13
            pieces.append(Piece(mine.address + i, theirs.address + j, length))
            i += length + 31
        self._check(near, op, pieces, mine, theirs)

    @each_op
    def test_thousands_of_pieces_in_one_batch(self, op: Op) -> None:
        near, _, mine, theirs = self.sharing(4 << 20)
        rng = random.Random(7)
        pieces = [Piece(mine.address + i * 700, theirs.address + i * 700, rng.randint(0, 700)) for i in range(5000)]
        rng.shuffle(pieces)
        self._check(near, op, pieces, mine, theirs)

    @each_op
    def test_both_ends_may_begin(self, op: Op) -> None:
        near, far, mine, theirs = self.sharing(1 << 20)
        self._check(near, op, [Piece(mine.address + 5, theirs.address + 100_000, 300_001)], mine, theirs)
        self._check(far, op, [Piece(theirs.address + 7, mine.address + 400_000, 300_001)], theirs, mine)

    @each_op
    def test_nothing_to_move_is_done(self, op: Op) -> None:
        """Also where a stretch of length 0 lies in no memory."""
        near, _, mine, theirs = self.sharing(4096)
        self._check(near, op, [], mine, theirs)
        self._check(near, op, [Piece(0, 0, 0), Piece(mine.address + 4096, theirs.address, 0)], mine, theirs)
        self._check(near, op, [Piece(0, 0, 0), Piece(mine.address, theirs.address + 1, 9), Piece(1, 1, 0)], mine, theirs)

    @each_op
    def test_a_batch_may_be_larger_than_what_may_be_under_way(self, op: Op) -> None:
        near, _, mine, theirs = self.sharing(3_000_001, TransportOptions(max_in_flight=64 << 10))
        self._check(near, op, [Piece(mine.address, theirs.address, mine.length)], mine, theirs)

    @each_op
    def test_the_same_stretch_may_be_moved_to_several_places(self, op: Op) -> None:
        near, _, mine, theirs = self.sharing(1 << 20)
        size = 10_007
        pieces = []
        for i in range(60):
            source, target = i % 3, 3 + i
            here, there = (target, source) if op == "read" else (source, target)
            pieces.append(Piece(mine.address + here * size, theirs.address + there * size, size))
        self._check(near, op, pieces, mine, theirs)

    @pytest.mark.slow
    @each_op
    def test_more_than_4_gib_in_one_batch(self, op: Op) -> None:
        """One stretch many times: what counts bytes in 32 bits loses count."""
        size = 64 << 20
        near, _, mine, theirs = self.sharing(size + 3)
        pieces = [Piece(mine.address, theirs.address, size)] * 65
        pieces.append(Piece(mine.address + size, theirs.address + size, 3))
        expected = (theirs if op == "read" else mine).bytes()
        near.move(op, pieces)
        same(mine.bytes(), expected, "what was moved")
        same(theirs.bytes(), expected, "what was moved")

    def test_random_batches_do_what_copying_would(self) -> None:
        size = 1 << 16
        near, _, mine, theirs = self.sharing(size)
        stretch = st.tuples(st.integers(0, 63), st.integers(0, 63), st.integers(0, size // 64), st.integers(0, 2))
        batch = st.tuples(st.sampled_from(["read", "write"]), st.lists(stretch, max_size=40, unique_by=lambda s: s[0]))

        @hypothesis.settings(
            max_examples=25, deadline=None, derandomize=True, database=None, phases=[hypothesis.Phase.generate]
        )
        @hypothesis.given(st.lists(batch, max_size=4))
        def check(batches: list[tuple[Op, list[tuple[int, int, int, int]]]]) -> None:
            mine.fill(1)
            theirs.fill(2)
            for op, stretches in batches:
                # Each slot of the target is written at most once: the order within a batch is not promised.
                pieces = [
                    Piece(
                        mine.address + (to if op == "read" else source) * (size // 64),
                        theirs.address + (source if op == "read" else to) * (size // 64),
                        max(0, length - cut),
                    )
                    for to, source, length, cut in stretches
                ]
                self._check(near, op, pieces, mine, theirs)

        check()

    # ----------------------------------------------------------------- at the same time

    def test_both_directions_at_once_through_the_smallest_buffers(self) -> None:
        """Two ends that both send and do not read meanwhile wait for each other for ever."""
        size = 1 << 20
        near, far, mine, theirs = self.sharing(4 * size, small=True)
        before = mine.bytes(), theirs.bytes()
        # Quarters: near reads 0 and writes 1, far reads 2 and writes 3, all into the other memory's or its own same quarter.
        pending = [
            near.submit("read", [Piece(mine.address, theirs.address, size)]),
            far.submit("read", [Piece(theirs.address + 2 * size, mine.address + 2 * size, size)]),
            near.submit("write", [Piece(mine.address + size, theirs.address + size, size)]),
            far.submit("write", [Piece(theirs.address + 3 * size, mine.address + 3 * size, size)]),
        ]
        for batch in pending:
            batch.wait()
        same(mine.bytes(), before[1][:size] + before[0][size : 3 * size] + before[1][3 * size :], "what was moved")
        same(theirs.bytes(), before[1][:size] + before[0][size : 3 * size] + before[1][3 * size :], "what was moved")

    def test_reads_and_writes_of_several_threads(self) -> None:
        size, rounds = 300_007, 12
        near, far, mine, theirs = self.sharing(8 * size)
        start = mine.bytes(), theirs.bytes()

        def work(end: End, here: Memory, there: Memory, slot: int, op: Op) -> None:
            for _ in range(rounds):
                at = slot * size
                parts = [
                    Piece(here.address + at + k, there.address + at + k, min(50_000, size - k)) for k in range(0, size, 50_000)
                ]
                end.move(op, parts)

        sides: list[tuple[End, Memory, Memory]] = [(near, mine, theirs), (far, theirs, mine)]
        calls = []
        for slot in range(8):
            end, here, there = sides[slot % 2]
            op: Op = "read" if slot % 4 < 2 else "write"
            calls.append(lambda e=end, h=here, t=there, s=slot, o=op: work(e, h, t, s, o))
        in_threads(*calls)
        # Reads of near and writes of far bring their bytes here; the others take ours there.
        for slot in range(8):
            winner = start[1] if slot % 4 in (0, 3) else start[0]
            at = slot * size
            same(mine.bytes(at, size), winner[at : at + size], f"slot {slot}")
            same(theirs.bytes(at, size), winner[at : at + size], f"slot {slot}")

    def test_eight_peers_at_once(self) -> None:
        size, near = 500_009, self.transport()
        mine = self.memory(16 * size).fill(1)
        token = near.register(mine.address, mine.length, mine.shared_fd)
        ends, others = [], []
        for number in range(8):
            end, far = self.pair(near=near)
            far.link.learn(mine.address, mine.length, token)
            theirs = self.memory(2 * size).fill(10 + number)
            far.share(theirs, end)
            ends.append(end)
            others.append(theirs)
        pending = []
        for number, (end, theirs) in enumerate(zip(ends, others, strict=True)):
            at = mine.address + 2 * number * size
            pending.append(end.submit("read", [Piece(at, theirs.address, size)]))
            pending.append(end.submit("write", [Piece(at + size, theirs.address + size, size)]))
        for batch in pending:
            batch.wait()
        whole = pattern(1, mine.length)
        for number, theirs in enumerate(others):
            at = 2 * number * size
            same(mine.bytes(at, size), pattern(10 + number, 2 * size)[:size], f"peer {number}")
            same(theirs.bytes(size), whole[at + size : at + 2 * size], f"peer {number}")

    @each_op
    def test_a_small_batch_does_not_wait_for_a_huge_one(self, op: Op) -> None:
        size = 16 << 20
        near, _, mine, theirs = self.sharing(size + 4096)
        huge = near.submit(op, [Piece(mine.address, theirs.address, size)] * self.endless)
        for i in range(10):
            near.move(op, [Piece(mine.address + size + i, theirs.address + size + i, 1)])
        assert not huge.done, "all of it was moved first"
        huge.cancel()

    # ----------------------------------------------------------------- what is left over

    def test_no_descriptor_and_no_thread_is_left_behind_by_transfers(self) -> None:
        self._leaves_nothing_behind(self.transfers)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_nothing_is_left_behind_by_a_hundred_thousand_transfers(self) -> None:
        self._leaves_nothing_behind(100_000)

    def _leaves_nothing_behind(self, transfers: int) -> None:
        near, far, mine, theirs = self.sharing(1 << 16)
        sides: list[tuple[End, Op, int, int]] = [
            (near, "read", mine.address, theirs.address),
            (far, "write", theirs.address, mine.address),
        ]
        for end, op, here, there in sides:
            end.move(op, [Piece(here, there, 100)])
        gc.collect()  # what others have left open is closed now, and not meanwhile
        files, threads = descriptors(), threading.active_count()
        for i in range(transfers):
            end, op, here, there = sides[i % 2]
            end.move(op, [Piece(here + i % 50_000, there + i % 40_000, 1 + i % 900)])
        self._wait_for_no_more_than(files, threads)

    def test_links_that_are_closed_leave_nothing_behind(self) -> None:
        near, far = self.transport(), self.transport()
        mine, theirs = self.memory(4096).fill(1), self.memory(4096).fill(2)
        counts = []
        gc.collect()
        for round_ in range(12):
            one, other = self.pair(near=near, far=far)
            one.share(mine, other)
            other.share(theirs, one)
            one.move("read", [Piece(mine.address, theirs.address, 4096)])
            one.link.close()
            other.link.close()
            near.unregister(mine.address)
            far.unregister(theirs.address)
            if round_ >= 2:
                counts.append((descriptors(), threading.active_count()))
        self._wait_for_no_more_than(*counts[0])

    def _wait_for_no_more_than(self, files: int, threads: int) -> None:
        """Threads that have done their work may take a moment to end."""

        def over() -> bool:
            return descriptors() <= files and threading.active_count() <= threads

        self.wait_until(over, f"no more than {files} descriptors and {threads} threads are left")

    def _after_idling(self, seconds: float) -> None:
        near, far, mine, theirs = self.sharing(1 << 16)
        self._check(near, "read", [Piece(mine.address, theirs.address, 5000)], mine, theirs)
        time.sleep(seconds)
        self._check(far, "write", [Piece(theirs.address + 7, mine.address + 9, 5000)], theirs, mine)
        self._check(near, "write", [Piece(mine.address + 7, theirs.address + 9, 6000)], mine, theirs)

    def test_a_link_that_nobody_used_for_a_while_works(self) -> None:
        self._after_idling(self.idle_s)

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_a_link_that_nobody_used_for_a_minute_works(self) -> None:
        self._after_idling(65)

    # ----------------------------------------------------------------- notices

    def _notices(self, end: End, count: int) -> list[bytes]:
        heard: list[bytes] = []

        def enough() -> bool:
            heard.extend(end.link.notices())
            return len(heard) >= count

        self.wait_until(enough, f"{count} notices arrive")
        return heard

    def _needs_notices(self) -> None:
        if not self.notifies:
            pytest.skip("this transport has no notices")

    def test_notices_arrive_whole_and_in_order(self) -> None:
        self._needs_notices()
        near, far = self.pair()
        assert far.link.notices() == []
        sent = [b"", b"x", bytes(range(256)), pattern(5, 64 << 10), *(b"%d" % i for i in range(300))]
        for message in sent:
            near.notify(message)
        far.notify(b"back")
        assert self._notices(far, len(sent)) == sent
        assert self._notices(near, 1) == [b"back"]
        assert far.link.notices() == []

    def test_a_notice_that_is_too_long_is_refused(self) -> None:
        self._needs_notices()
        near, far = self.pair()
        fails("bounds", lambda: near.notify(bytes((64 << 10) + 1)))
        near.notify(b"next")
        assert self._notices(far, 1) == [b"next"]

    def test_a_notice_comes_after_the_batches_that_were_done(self) -> None:
        """The peer may look at the bytes as soon as it hears of them."""
        self._needs_notices()
        near, far, mine, theirs = self.sharing(1 << 20)
        for number in range(40):
            mine.fill(number)
            near.move("write", [Piece(mine.address + i, theirs.address + i, 1 << 18) for i in range(0, 1 << 20, 1 << 18)])
            near.notify(b"%d" % number)
            assert self._notices(far, 1) == [b"%d" % number]
            same(theirs.bytes(), mine.bytes(), "what was moved")

    def test_whoever_is_told_too_much_without_looking_loses_the_link(self) -> None:
        """Else a peer fills this process's memory. 80 MB are too much, and 20,000."""
        self._needs_notices()
        near, far = self.pair()

        def flood() -> None:
            for _ in range(20_000):
                near.notify(bytes(4 << 10))

        fails("peer", flood)
        self.wait_until(lambda: not far.link.alive, "the far end ends the link")
        assert sum(map(len, far.link.notices())) <= 64 << 20
