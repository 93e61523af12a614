"""The tcp transport with rules broken on purpose: what `TransportTests` must notice."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import socket
from typing import ClassVar

from hicache_mooncake.transfer.batches import Inbox
from hicache_mooncake.transfer.tcp_transport import TcpLink, TcpTransport
from hicache_mooncake.transfer.transport import Extents, Link, Op, Pending, Piece, Transport, TransportError, TransportOptions


@dataclass(frozen=True)
class Faults:
    loses_last_byte: bool = False
    words_only: bool = False
    first_pieces_only: bool = False
    counts_32_bits: bool = False
    empty_hangs: bool = False
    zero_length_is_checked: bool = False
    near_may_not_be_asked: bool = False
    one_batch_at_a_time: bool = False
    mixes_up_peers: bool = False
    done_too_early: bool = False
    leaks_descriptor: bool = False
    leaks_thread_per_link: bool = False
    dies_of_idleness: bool = False
    notices_reversed: bool = False
    notices_cut: bool = False
    notices_unbounded: bool = False
    long_notices: bool = False
    bounds_unchecked: bool = False
    any_token: bool = False
    unregister_ignored: bool = False
    local_unregister_ignored: bool = False
    registers_once: bool = False
    registers_overlaps: bool = False
    learns_for_good: bool = False
    ignores_deadline: bool = False
    late_is_tried: bool = False
    ignores_cancel: bool = False
    cancel_spoils_what_is_done: bool = False
    byte_after_cancel: bool = False
    byte_after_deadline: bool = False
    byte_after_close: bool = False
    byte_after_peers_end: bool = False
    close_is_no_fence: bool = False
    close_forgets_batches: bool = False
    closes_once: bool = False
    always_alive: bool = False
    closes_all: bool = False
    transport_close_ignored: bool = False
    wrong_reason: bool = False
    keeps_channels: bool = False


def _first_bytes(pieces: Sequence[Piece], count: int) -> list[Piece]:
    first = []
    for piece in pieces:
        first.append(piece._replace(length=min(piece.length, count)))
        count -= first[-1].length
    return first


class FaultyBatch(Pending):
    def __init__(self, link: FaultyLink, inner: Pending | None, pieces: Sequence[Piece]) -> None:
        self._link, self._inner, self._faults = link, inner, link.faults
        self._local = next((piece.local for piece in pieces if piece.length), 0)
        self._spoiled = False

    @property
    def done(self) -> bool:
        if self._inner is None:
            return True
        return self._inner.done

    def wait(self) -> None:
        if self._spoiled:
            raise TransportError("cancelled", "it was done before")
        if self._inner is None:
            return
        try:
            self._inner.wait()
        except TransportError as error:
            byte = {"deadline": self._faults.byte_after_deadline, "peer": self._faults.byte_after_peers_end}
            if byte.get(error.reason):
                self._link.transport.move_later(self._local)
            raise TransportError("device" if self._faults.wrong_reason else error.reason, str(error)) from error

    def cancel(self) -> None:
        assert self._inner is not None
        self._spoiled = self._faults.cancel_spoils_what_is_done and self._inner.done
        if self._faults.ignores_cancel:
            return
        self._inner.cancel()
        if self._faults.byte_after_cancel:
            self._link.transport.move_later(self._local)


class FaultyLink(Link):
    def __init__(self, transport: FaultyTransport, inner: TcpLink) -> None:
        self.transport, self._inner, self.faults = transport, inner, transport.faults
        self._used = time.monotonic()
        self._last: Pending | None = None
        self._local = 0
        self._soft_closed = False
        self._learned = Extents()
        if self.faults.notices_unbounded:
            inner.inbox = Inbox(1 << 30, 1 << 40)
        if self.faults.leaks_thread_per_link:
            transport.start(transport.over.wait)

    def learn(self, address: int, length: int, token: bytes) -> None:
        if self.faults.learns_for_good:
            self._learned.add(address, length, token)
        self._inner.learn(address, length, token)

    def submit(self, op: Op, pieces: Sequence[Piece], deadline: float) -> Pending:
        faults, moved = self.faults, list(pieces)
        if faults.zero_length_is_checked and any(not piece.length and not piece.local for piece in pieces):
            raise TransportError("bounds", "a length of 0 in no memory")
        if faults.near_may_not_be_asked and not self.transport.connected:
            raise TransportError("peer", "this end only answers")
        if faults.dies_of_idleness and time.monotonic() - self._used > 0.5:
            raise TransportError("peer", "nobody used it for a while")
        self._used = time.monotonic()
        if faults.leaks_descriptor:
            self.transport.files.append(os.dup(0))
        if faults.empty_hangs and not any(piece.length for piece in pieces):
            raise TransportError("deadline", "waits for the last of no bytes")
        if moved and faults.loses_last_byte:
            moved[-1] = moved[-1]._replace(length=max(0, moved[-1].length - 1))
        if faults.words_only:
            moved = [Piece(p.local & ~3, p.remote & ~3, p.length) if p.length > 64 else p for p in moved]
        if faults.first_pieces_only:
            moved = moved[:1000]
        if faults.counts_32_bits:
            moved = _first_bytes(moved, sum(piece.length for piece in moved) % (1 << 32))
        if faults.bounds_unchecked:
            try:
                return FaultyBatch(self, self._inner.submit(op, moved, deadline), moved)
            except TransportError:
                return FaultyBatch(self, None, moved)
        if faults.done_too_early:
            self.transport.start(lambda: self._submit_later(op, moved))
            return FaultyBatch(self, None, moved)
        if faults.one_batch_at_a_time and self._last is not None:
            with contextlib.suppress(TransportError):
                self._last.wait()
        late = deadline < time.monotonic()
        if faults.ignores_deadline or (late and faults.late_is_tried):
            deadline += 1000
        link = self.transport.other_link(self) if faults.mixes_up_peers else self._inner
        try:
            inner = link.submit(op, moved, deadline)
        except TransportError as error:
            raise TransportError("device" if faults.wrong_reason else error.reason, str(error)) from error
        self._last = inner
        self._local = next((piece.local for piece in moved if piece.length), 0)
        return FaultyBatch(self, inner, moved)

    def _submit_later(self, op: Op, pieces: Sequence[Piece]) -> None:
        self.transport.over.wait(0.2)
        with contextlib.suppress(TransportError):
            self._inner.submit(op, pieces, time.monotonic() + 20).wait()

    def notify(self, message: bytes, deadline: float) -> None:
        if self.faults.long_notices:
            message = message[: 64 << 10]
        self._inner.notify(message[:4096] if self.faults.notices_cut else message, deadline)

    def notices(self) -> list[bytes]:
        return self._inner.notices()[:: -1 if self.faults.notices_reversed else 1]

    @property
    def alive(self) -> bool:
        return not self._soft_closed and (self.faults.always_alive or self._inner.alive)

    def close(self) -> None:
        again, self._soft_closed = self._soft_closed, True
        if again and self.faults.closes_once:
            raise TransportError("closed", "it is closed already")
        if self.faults.close_is_no_fence and not again:
            return
        if self.faults.close_forgets_batches and not again and self._last is not None and not self._last.done:
            return
        self._inner.close()
        if self.faults.byte_after_close and self._local:
            self.transport.move_later(self._local)
        if self.faults.closes_all:
            for link in self.transport.links:
                link._inner.close()


class FaultyTransport(Transport):
    """Wraps a `TcpTransport`. Everything is right where `faults` says nothing."""

    scheme: ClassVar[str] = "tcp"

    def __init__(self, options: TransportOptions, faults: Faults) -> None:
        self.inner = TcpTransport(options)
        self.faults, self.over = faults, threading.Event()
        self.links: list[FaultyLink] = []
        self.files: list[int] = []
        self.connected = False
        self._threads: list[threading.Thread] = []
        self._known: dict[int, bytes] = {}
        if faults.any_token:
            find = self.inner.find
            regions = self.inner._regions
            self.inner.find = lambda token: find(token) or next(iter(regions.values()), None)  # type: ignore[method-assign]

    def start(self, target: Callable[[], object]) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()

    def move_later(self, address: int) -> None:
        """A thread that did not learn that it was over."""
        byte = ctypes.c_ubyte.from_address(address)

        def write() -> None:
            while not self.over.wait(0.01):
                byte.value = (byte.value + 1) % 256

        self.start(write)

    def end(self) -> None:
        """Of the test, before memory is unmapped."""
        self.over.set()
        for thread in self._threads:
            thread.join()
        self.inner.close()

    @property
    def channels(self) -> int:
        return self.inner.channels

    def register(self, address: int, length: int, fd: int = -1, fd_offset: int = 0) -> bytes:
        if self.faults.registers_once and address in self._known:
            return self._known[address]
        if self.faults.registers_overlaps:
            try:
                return self.inner.register(address, length, fd, fd_offset)
            except TransportError:
                return bytes(16)
        self._known[address] = self.inner.register(address, length, fd, fd_offset)
        return self._known[address]

    def unregister(self, address: int) -> None:
        if not (self.faults.unregister_ignored or (self.faults.local_unregister_ignored and self.connected)):
            self.inner.unregister(address)

    def other_link(self, link: FaultyLink) -> Link:
        at = self.links.index(link)
        return self.links[at ^ 1]._inner if (at ^ 1) < len(self.links) else link._inner

    def _wrap(self, inner: TcpLink) -> Link:
        self.links.append(FaultyLink(self, inner))
        return self.links[-1]

    def _keep(self, channels: Sequence[socket]) -> list[socket]:
        return [channel.dup() for channel in channels] if self.faults.keeps_channels else list(channels)

    def connect(self, channels: Sequence[socket], deadline: float) -> Link:
        self.connected = True
        return self._wrap(self.inner.connect(self._keep(channels), deadline))

    def accept(self, channels: Sequence[socket], deadline: float) -> Link:
        return self._wrap(self.inner.accept(self._keep(channels), deadline))

    def close(self) -> None:
        if self.faults.transport_close_ignored:
            return
        for file in self.files:
            os.close(file)
        self.files.clear()
        self.inner.close()
