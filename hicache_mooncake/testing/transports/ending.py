"""Batches, links and registrations end when they should, with the right reason, and then not a byte lands any more."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from hicache_mooncake.testing.transports.harness import (
    End,
    Memory,
    ProcessPeer,
    TransportHarness,
    fails,
    in_threads,
    pattern,
    same,
)
from hicache_mooncake.testing.transports.moving import each_op
from hicache_mooncake.transfer.transport import Op, Pending, Piece, TransportError

_SIZE = 8 << 20


def _landing(memory: Memory) -> Callable[[], bool]:
    """Whether bytes have landed there since now."""
    mark = b"nothing has landed here yet"
    memory.view[: len(mark)] = mark
    return lambda: memory.bytes(0, len(mark)) != mark


class EndingTests(TransportHarness):
    def _endless(self, end: End, op: Op, here: Memory, there: Memory, remote: int = 0, seconds: float | None = None) -> Pending:
        """A batch that goes on whatever this machine can do, and has moved something. `remote` is where `there` lies for the
        end that is asked, if not where it lies here."""
        landed = _landing(here if op == "read" else there)
        batch = end.submit(op, [Piece(here.address, remote or there.address, _SIZE)] * self.endless, seconds)
        self.wait_until(lambda: landed() or batch.done, "the first bytes land")
        return batch

    # ----------------------------------------------------------------- bounds

    @each_op
    def test_pieces_outside_of_what_both_ends_know_move_nothing(self, op: Op) -> None:
        near, _, mine, theirs = self.sharing(1 << 16)
        before = mine.bytes(), theirs.bytes()
        good = Piece(mine.address, theirs.address + 5, 100)
        for bad in (
            Piece(mine.address - 1, theirs.address, 2),
            Piece(mine.address + mine.length - 1, theirs.address, 2),
            Piece(mine.address, theirs.address - 1, 2),
            Piece(mine.address, theirs.address + theirs.length - 1, 2),
            Piece(mine.address, 0, 1),
            Piece(0, theirs.address, 1),
            Piece(mine.address, theirs.address, -1),
            Piece(mine.address, theirs.address, mine.length + 1),
        ):
            fails("bounds", lambda bad=bad: near.submit(op, [good, bad]))  # type: ignore[misc]
        same(mine.bytes() + theirs.bytes(), b"".join(before), "what was there before")
        near.move(op, [good])

    @each_op
    def test_memory_that_was_not_registered_is_refused(self, op: Op) -> None:
        near, _, _, theirs = self.sharing(4096)
        other = self.memory(4096)
        fails("bounds", lambda: near.submit(op, [Piece(other.address, theirs.address, 10)]))

    @each_op
    def test_a_wrong_token_reaches_nothing(self, op: Op) -> None:
        near, far = self.pair()
        mine, theirs = self.memory(1 << 16).fill(1), self.memory(1 << 16).fill(2)
        near.share(mine, far)
        token = far.transport.register(theirs.address, theirs.length, theirs.shared_fd)
        before = mine.bytes(), theirs.bytes()

        def use() -> None:
            near.link.learn(theirs.address, theirs.length, self.spoil(token))
            near.move(op, [Piece(mine.address, theirs.address, 5000)])

        fails("bounds", use)
        same(mine.bytes() + theirs.bytes(), b"".join(before), "what was there before")

    @each_op
    def test_unregistered_memory_is_out_of_reach(self, op: Op) -> None:
        """Whoever learned its token before gets nothing from it, and puts nothing there."""
        near, far, mine, theirs = self.sharing(1 << 16)
        pieces = [Piece(mine.address, theirs.address, 5000)]
        near.move(op, pieces)
        far.transport.unregister(theirs.address)
        mine.fill(5)
        theirs.fill(6)
        before = mine.bytes(), theirs.bytes()
        fails("bounds", lambda: near.move(op, pieces))
        same(mine.bytes() + theirs.bytes(), b"".join(before), "what was there before")

    def test_what_was_unregistered_here_is_refused_here(self) -> None:
        near, _, mine, theirs = self.sharing(1 << 16)
        near.transport.unregister(mine.address)
        fails("bounds", lambda: near.submit("read", [Piece(mine.address, theirs.address, 10)]))
        near.transport.unregister(mine.address)  # nothing lies there now, which is what was asked for

    def test_memory_may_be_registered_again(self) -> None:
        near, far, mine, theirs = self.sharing(1 << 16)
        for seed in range(3):
            far.transport.unregister(theirs.address)
            theirs.fill(seed)
            far.share(theirs, near)
            near.move("read", [Piece(mine.address, theirs.address, theirs.length)])
            same(mine.bytes(), theirs.bytes(), "what was moved")

    @pytest.mark.parametrize(("first", "length"), [(0, 5000), (4096, 61440)])
    def test_another_stretch_of_it_may_be_registered_later(self, first: int, length: int) -> None:
        """Memory is freed, and what is made next lies partly where it was."""
        near, far, mine, theirs = self.sharing(1 << 16)
        far.transport.unregister(theirs.address)
        part = theirs.address + first
        token = far.transport.register(part, length, theirs.shared_fd, first)
        near.link.learn(part, length, token)
        near.move("read", [Piece(mine.address, part, length)])
        same(mine.bytes(0, length), theirs.bytes(first, length), "what was moved")
        fails("bounds", lambda: near.move("read", [Piece(mine.address, theirs.address + (0 if first else 65_535), 1)]))

    def test_registrations_that_overlap_are_refused(self) -> None:
        near, _, mine, theirs = self.sharing(1 << 16)
        with pytest.raises(TransportError):
            near.transport.register(mine.address + 4096, 4096)
        near.move("read", [Piece(mine.address, theirs.address, 4096)])
        same(mine.bytes(0, 4096), theirs.bytes(0, 4096), "what was moved")

    def test_nothing_lands_in_memory_that_was_unregistered_under_way(self) -> None:
        near, far, mine, theirs = self.sharing(_SIZE)
        batch = self._endless(far, "write", theirs, mine)
        near.transport.unregister(mine.address)
        self.stays(mine, "unregister")
        fails(("bounds", "peer"), batch.wait)

    # ----------------------------------------------------------------- deadlines and cancelling

    @each_op
    def test_a_deadline_that_has_passed_moves_nothing(self, op: Op) -> None:
        near, _, mine, theirs = self.sharing(1 << 20)
        before = mine.bytes(), theirs.bytes()
        fails("deadline", lambda: near.move(op, [Piece(mine.address, theirs.address, mine.length)], -1.0))
        same(mine.bytes() + theirs.bytes(), b"".join(before), "what was there before")

    @each_op
    def test_a_batch_ends_at_its_deadline(self, op: Op) -> None:
        near, _, mine, theirs = self.sharing(_SIZE)
        batch = self._endless(near, op, mine, theirs, seconds=0.5)
        fails("deadline", batch.wait)
        assert batch.done
        self.stays(mine, "the deadline")
        fails("deadline", batch.wait)

    def test_a_batch_that_is_only_looked_at_ends_at_its_deadline(self) -> None:
        near, _, mine, theirs = self.sharing(_SIZE)
        batch = self._endless(near, "read", mine, theirs, seconds=0.3)
        self.wait_until(lambda: batch.done, "the batch is done")
        self.stays(mine, "the deadline")
        fails("deadline", batch.wait)

    @each_op
    def test_a_batch_that_is_cancelled_ends(self, op: Op) -> None:
        near, _, mine, theirs = self.sharing(_SIZE)
        batch = self._endless(near, op, mine, theirs)
        assert not batch.done
        batch.cancel()
        assert batch.done
        self.stays(mine, "cancel")
        fails("cancelled", batch.wait)

    def test_batches_that_end_early_leave_the_others_right(self) -> None:
        """Some are cancelled or late, at any moment, while others of the same link are done and have all their bytes. What a
        write that failed does to the peer's memory is not promised, so such go where nobody looks."""
        size, slots, rounds = 400_000, 4, 50
        near, far, mine, theirs = self.sharing(2 * slots * size)

        def work(slot: int) -> None:
            rng = random.Random(slot)
            end, here, there = ((near, mine, theirs), (far, theirs, mine))[slot % 2]
            at = slot * size
            for number in range(rounds):
                op: Op = "read" if rng.random() < 0.5 else "write"
                source, target = (there, here) if op == "read" else (here, there)
                source.view[at : at + size] = pattern(1000 * slot + number, size)
                early = rng.random() < 0.5
                elsewhere = slots * size if early and op == "write" else 0
                steps = range(at, at + size, rng.randint(1, 9) * 10_000)
                pieces = [Piece(here.address + i, there.address + i + elsewhere, min(steps.step, at + size - i)) for i in steps]
                try:
                    batch = end.submit(op, pieces, rng.random() * 0.01 if early else None)
                    if early and rng.random() < 0.5:
                        batch.cancel()
                    batch.wait()
                except TransportError as error:
                    if early:
                        continue
                    self.wait_until(lambda: not end.link.alive, f"the link ends, if that is why: {error}")
                    return
                if not elsewhere:
                    same(target.bytes(at, size), source.bytes(at, size), f"slot {slot}, round {number}")

        in_threads(*(partial(work, slot) for slot in range(slots)))

    def test_cancelling_what_is_done_changes_nothing(self) -> None:
        near, _, mine, theirs = self.sharing(4096)
        batch = near.submit("read", [Piece(mine.address, theirs.address, 4096)])
        batch.wait()
        assert batch.done
        batch.cancel()
        batch.wait()
        same(mine.bytes(), theirs.bytes(), "what was moved")

    def test_a_thread_that_waits_learns_of_a_cancel(self) -> None:
        near, _, mine, theirs = self.sharing(_SIZE)
        batch = self._endless(near, "read", mine, theirs)
        reasons: list[str] = []

        def wait() -> None:
            try:
                batch.wait()
            except TransportError as error:
                reasons.append(error.reason)

        thread = threading.Thread(target=wait)
        thread.start()
        batch.cancel()
        thread.join(self.patience_s)
        assert reasons == ["cancelled"]

    # ----------------------------------------------------------------- links

    @each_op
    def test_closing_ends_what_is_under_way(self, op: Op) -> None:
        near, _, mine, theirs = self.sharing(_SIZE)
        batches = [self._endless(near, op, mine, theirs) for _ in range(3)]
        near.link.close()
        assert all(batch.done for batch in batches)
        assert not near.link.alive
        self.stays(mine, "close")
        for batch in batches:
            fails("closed", batch.wait)

    def test_closing_ends_what_the_peer_is_writing(self) -> None:
        near, far, mine, theirs = self.sharing(_SIZE)
        batch = self._endless(far, "write", theirs, mine)
        if near.transport.fences:
            near.link.close()
            self.stays(mine, "close")
        else:
            near.link.close()
        fails(("peer", "closed"), batch.wait)

    def test_a_closed_link_stays_closed(self) -> None:
        near, _, mine, theirs = self.sharing(4096)
        near.link.close()
        near.link.close()
        assert not near.link.alive
        fails("closed", lambda: near.submit("read", [Piece(mine.address, theirs.address, 10)]))
        if self.notifies:
            fails("closed", lambda: near.notify(b"late"))

    def test_a_link_ends_with_the_peers_end(self) -> None:
        near, far, mine, theirs = self.sharing(_SIZE)
        batch = self._endless(near, "read", mine, theirs)
        far.link.close()
        fails("peer", batch.wait)
        self.stays(mine, "the peer closed the link")
        self.wait_until(lambda: not near.link.alive, "the link ends")
        fails("peer", lambda: near.submit("read", [Piece(mine.address, theirs.address, 10)]))

    def test_an_idle_link_ends_with_the_peers_end(self) -> None:
        near, far = self.pair()
        assert near.link.alive
        far.link.close()
        self.wait_until(lambda: not near.link.alive, "the link ends")

    def test_other_links_live_on(self) -> None:
        near, _, mine, theirs = self.sharing(1 << 16)
        other, _ = self.pair(near=near.transport)
        other.link.close()
        near.move("read", [Piece(mine.address, theirs.address, 5000)])
        same(mine.bytes(0, 5000), theirs.bytes(0, 5000), "what was moved")

    def test_a_transport_that_is_closed_closes_its_links(self) -> None:
        near, _, mine, theirs = self.sharing(_SIZE)
        batch = self._endless(near, "read", mine, theirs)
        near.transport.close()
        fails("closed", batch.wait)
        assert not near.link.alive
        self.stays(mine, "the transport was closed")
        near.transport.close()
        with pytest.raises(TransportError):
            near.transport.register(mine.address, mine.length, mine.shared_fd)

    @pytest.mark.parametrize("side", ["connect", "accept"])
    @pytest.mark.parametrize("how", ["silent", "gone", "garbage"])
    def test_a_handshake_that_fails_closes_its_channels(self, side: str, how: str) -> None:
        near = self.transport()
        ours, theirs = self.make_channels(near, near.channels)
        with contextlib.ExitStack() as open_channels:
            for sock in theirs:
                open_channels.enter_context(sock)
                if how == "gone":
                    sock.close()
                elif how == "garbage":
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            begin = near.connect if side == "connect" else near.accept
            fails(("deadline", "peer"), lambda: begin(ours, time.monotonic() + (0.3 if how == "silent" else self.patience_s)))
        assert [sock.fileno() for sock in ours] == [-1] * len(ours)

    # ----------------------------------------------------------------- peers that stop or die

    def _writing(self) -> tuple[ProcessPeer, Memory]:
        """A peer process that writes to this process's memory and does not stop."""
        peer = self.process_peer(_SIZE)
        mine = self.memory(_SIZE).fill(1)
        peer.share(mine)
        landed = _landing(mine)
        peer.keep_moving("write", 0, mine.address, _SIZE)
        self.wait_until(landed, "the peer's bytes land")
        return peer, mine

    def _reading(self) -> tuple[ProcessPeer, Memory, Pending]:
        """A batch that reads from a peer process."""
        peer = self.process_peer(_SIZE)
        mine = self.memory(_SIZE).fill(1)
        peer.share(mine)
        return peer, mine, self._endless(peer.near, "read", mine, peer.memory, peer.remote)

    def test_bytes_of_a_peer_in_another_process(self) -> None:
        peer = self.process_peer(1 << 20)
        mine = self.memory(1 << 20).fill(1)
        peer.share(mine)
        peer.near.move("read", [Piece(mine.address, peer.remote, 1 << 19)])
        same(mine.bytes(0, 1 << 19), peer.memory.bytes(0, 1 << 19), "what was moved")
        peer.near.move("write", [Piece(mine.address + (1 << 19), peer.remote + 1, 5000)])
        same(peer.memory.bytes(1, 5000), mine.bytes(1 << 19, 5000), "what was moved")
        peer.memory.fill(8)
        assert peer.ask(do="move", op="write", seconds=self.patience_s, pieces=[[3, mine.address + 7, 100_000]]) == {}
        same(mine.bytes(7, 100_000), peer.memory.bytes(3, 100_000), "what was moved")
        mine.fill(9)
        assert peer.ask(do="move", op="read", seconds=self.patience_s, pieces=[[3, mine.address + 7, 100_000]]) == {}
        same(mine.bytes(7, 100_000), peer.memory.bytes(3, 100_000), "what was moved")

    def test_a_peer_that_stops_costs_no_more_than_the_deadline(self) -> None:
        peer, mine, endless = self._reading()
        peer.stop()
        batch = peer.near.submit("read", [Piece(mine.address, peer.remote, _SIZE)] * 100, 0.5)
        fails(("deadline", "peer"), batch.wait)
        endless.cancel()
        self.stays(mine, "the deadline, from a peer that was stopped meanwhile", peer.go_on)

    def test_closing_while_the_peer_is_stopped_in_mid_write(self) -> None:
        """It wakes later, and goes on where it was."""
        peer, mine = self._writing()
        peer.stop()
        if self.closes_on_stopped_peers:
            peer.near.link.close()
        else:
            with pytest.raises(TransportError):
                peer.near.link.close()
            return
        self.stays(mine, "close, from a peer that was stopped meanwhile", peer.go_on)

    def test_closing_while_the_peer_goes_on_writing(self) -> None:
        peer, mine = self._writing()
        peer.near.link.close()
        self.stays(mine, "close, from a peer that goes on")
        assert peer.ask(do="alive") is not None

    def test_a_peer_that_dies_in_mid_body(self) -> None:
        peer, mine, batch = self._reading()
        peer.kill()
        fails("peer", batch.wait)
        self.stays(mine, "the peer died")
        self.wait_until(lambda: not peer.near.link.alive, "the link ends")
        again = self.process_peer(_SIZE, near=peer.near.transport)
        again.near.move("read", [Piece(mine.address, again.remote, _SIZE)])
        same(mine.bytes(), again.memory.bytes(), "what was moved")

    def test_a_peer_that_dies_while_it_writes(self) -> None:
        peer, mine = self._writing()
        peer.kill()
        self.wait_until(lambda: not peer.near.link.alive, "the link ends")
        peer.near.link.close()
        self.stays(mine, "the peer died and the link was closed")

    def test_a_peer_that_dies_while_it_is_stopped(self) -> None:
        peer, mine, batch = self._reading()
        peer.stop()
        peer.kill()
        fails("peer", batch.wait)
        peer.near.link.close()
        self.stays(mine, "the peer died")
