"""The tcp transport keeps the contract of transports; and what is its own: lanes, refusals on the wire, links that survive."""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hicache_mooncake.testing import TransportTests
from hicache_mooncake.testing.transports import Memory
from hicache_mooncake.testing.transports.harness import fails, same
from hicache_mooncake.transfer.mapping import _libc
from hicache_mooncake.transfer.tcp_lane import _DATA, _DONE, _FAIL, _HEADER, _NOTICE, _READ, _ROW, _WRITE
from hicache_mooncake.transfer.tcp_transport import _HELLO, _MAGIC, TcpLink, TcpTransport
from hicache_mooncake.transfer.transport import Piece, TransportError, TransportOptions

_BIG = 8 << 20


class TestTcp(TransportTests):
    scheme = "tcp"

    @pytest.mark.parametrize("lanes", [1, 3])
    def test_a_batch_goes_over_all_lanes(self, lanes: int) -> None:
        before = set(threading.enumerate())  # of which other tests' may end, and begin others meanwhile
        near, _, mine, theirs = self.sharing(_BIG, TransportOptions(lanes=lanes))
        assert near.transport.channels == lanes
        for op in ("read", "write"):
            near.move(op, [Piece(mine.address, theirs.address, _BIG)] * 4)  # type: ignore[arg-type]
        same(mine.bytes(), theirs.bytes(), "what was moved")
        names = [each.name for each in threading.enumerate() if each not in before and each.name.startswith("tcp-lane")]
        assert sorted(names) == sorted(2 * [f"tcp-lane-{number}" for number in range(lanes)])

    def test_how_many_lanes_there_may_be(self) -> None:
        assert self.transport().channels == 2
        fails("unavailable", lambda: TcpTransport(TransportOptions(lanes=65)))
        fails("unavailable", lambda: TcpTransport(TransportOptions(lanes=-1)))

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_a_batch_that_is_cancelled_in_mid_body_leaves_the_link_usable(self, op: str) -> None:
        near, far, mine, theirs = self.sharing(_BIG, small=True)
        for _ in range(3):
            batch = near.submit(op, [Piece(mine.address, theirs.address, _BIG)] * 1000)  # type: ignore[arg-type]
            self.wait_until(lambda: near.link.batches.in_flight(op) > 0, "it is under way")  # type: ignore[attr-defined]
            batch.cancel()
            mine.fill(5)
            theirs.fill(6)
            assert near.link.alive
            near.move("read", [Piece(mine.address + 7, theirs.address + 9, 100_000)])
            same(mine.bytes(7, 100_000), theirs.bytes(9, 100_000), "read after a cancel")
            far.move("read", [Piece(theirs.address + 7, mine.address + 9, 100_000)])
            same(theirs.bytes(7, 100_000), mine.bytes(9, 100_000), "read after a cancel, by the other end")

    def test_memory_that_a_peer_was_writing_to_is_left_and_the_link_lives(self) -> None:
        near, far, mine, theirs = self.sharing(_BIG, small=True)
        batch = far.submit("write", [Piece(theirs.address, mine.address, _BIG)] * 1000)
        self.wait_until(lambda: far.link.batches.moved("write") > 0, "it is under way")  # type: ignore[attr-defined]
        near.transport.unregister(mine.address)
        fails("bounds", batch.wait)
        assert near.link.alive
        assert far.link.alive

    def test_what_was_on_its_way_when_the_writer_ended_the_link_does_not_land(self) -> None:
        """The other end hears of that end late, as one does that was stopped."""
        near, far, mine, theirs = self.sharing(_BIG)
        mine.fill(9)
        before = theirs.bytes()
        go_on, asleep = threading.Event(), []
        for lane in far.link._lanes:  # type: ignore[attr-defined]

            def late(receive: Callable[[], bool] = lane._receive) -> bool:
                asleep.append(1)
                go_on.wait()
                return receive()

            lane._receive = late
        near.submit("write", [Piece(mine.address, theirs.address, _BIG)])
        self.wait_until(lambda: asleep and near.link.batches.in_flight("write") == _BIG, "it is sent")  # type: ignore[attr-defined]
        near.link.abort()
        hung_up = select.poll()
        for lane in far.link._lanes:  # type: ignore[attr-defined]
            hung_up.register(lane._sock, select.POLLRDHUP)
        self.wait_until(lambda: len(hung_up.poll(0)) == len(far.link._lanes), "the end has arrived")  # type: ignore[attr-defined]
        go_on.set()
        self.wait_until(lambda: not far.link.alive, "the link ends")
        far.link.close()
        same(theirs.bytes(), before, "memory after the writer's end")

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_memory_that_cannot_be_touched_costs_the_link_and_not_the_process(self, op: str) -> None:
        near, far, mine, theirs = self.sharing(4096)
        away = _libc.mmap(None, 4096, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)  # PROT_NONE
        far.transport.register(away, 4096)
        near.transport.register(away, 4096)
        for end, other, piece in ((near, far, Piece(away, theirs.address, 4096)), (far, near, Piece(away, mine.address, 4096))):
            if end.link.alive:
                fails(("peer", "device"), lambda end=end, piece=piece: end.move(op, [piece]))  # type: ignore[misc]
            self.wait_until(lambda other=other: not other.link.alive, "both ends end")  # type: ignore[misc]
        _libc.munmap(away, 4096)

    def test_a_fault_of_a_lane_ends_its_link(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever waits for a batch would wait for ever."""
        near, far, mine, theirs = self.sharing(4096)
        monkeypatch.setattr(near.link._lanes[0], "_begin", lambda: 1 / 0)  # type: ignore[attr-defined]
        monkeypatch.setattr(near.link._lanes[1], "_begin", lambda: 1 / 0)  # type: ignore[attr-defined]
        fails("device", lambda: near.move("read", [Piece(mine.address, theirs.address, 10)]))
        self.wait_until(lambda: not far.link.alive, "the other end ends")

    def test_report_says_what_is_there(self) -> None:
        near, _, mine, _ = self.sharing(4096)
        assert near.transport.report() == {"links": 1, "lanes": 2, "registered_bytes": mine.length, "bytes_under_way": 0}
        near.link.close()
        assert near.transport.report()["links"] == 0


class RawPeer:
    """The other end of a link of one lane, byte by byte."""

    def __init__(self, transport: TcpTransport) -> None:
        mine, self.sock = socket.socketpair()
        self.sock.settimeout(30)
        self.sock.sendall(_HELLO.pack(_MAGIC, bytes(16), 0, 1))
        self.link: TcpLink = transport.accept([mine], time.monotonic() + 30)
        self.receive(_HELLO.size)

    def receive(self, count: int) -> bytes:
        data = self.sock.recv(count, socket.MSG_WAITALL)
        assert len(data) == count
        return data

    def say(self, kind: int, rows: int = 0, number: int = 0, body: int = 0, rest: bytes = b"") -> None:
        self.sock.sendall(_HEADER.pack(kind, rows, number, body) + rest)

    def hear(self) -> tuple[int, int, int]:
        kind, _, number, body = _HEADER.unpack(self.receive(_HEADER.size))
        return kind, number, body

    def wait_for_the_end(self) -> None:
        with contextlib.suppress(OSError):
            while self.sock.recv(1 << 16):
                pass
        assert not self.link.alive


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    made = TcpTransport(TransportOptions())
    yield made
    made.close()


@pytest.fixture
def peer(transport: TcpTransport) -> Iterator[RawPeer]:
    made = RawPeer(transport)
    yield made
    made.sock.close()


@pytest.fixture
def memory(transport: TcpTransport) -> Iterator[tuple[Memory, bytes]]:
    made = Memory(1 << 20).fill(1)
    yield made, transport.register(made.address, made.length)
    transport.close()
    made.close()


def test_rows_are_checked_by_the_owner_of_the_memory(peer: RawPeer, memory: tuple[Memory, bytes]) -> None:
    """Whatever the peer claims to have learned."""
    mine, token = memory
    before = mine.bytes()
    bad = [
        _ROW.pack(mine.address, 100, bytes(16)),
        _ROW.pack(mine.address - 1, 100, token),
        _ROW.pack(mine.address + mine.length - 99, 100, token),
        _ROW.pack(0, 100, token),
        _ROW.pack((1 << 64) - 50, 100, token),
    ]
    for number, row in enumerate(bad):
        peer.say(_READ, 1, number, 0, row)
        assert peer.hear() == (_FAIL, number, 0)
        peer.say(_WRITE, 1, number, 100, row + b"x" * 100)
        assert peer.hear() == (_FAIL, number, 0)
        good = _ROW.pack(mine.address, 5, token)
        peer.say(_WRITE, 2, number, 105, good + row + b"x" * 105)
        assert peer.hear() == (_FAIL, number, 0), "all rows of a turn, or none"
    same(mine.bytes(), before, "what was there before")
    peer.say(_WRITE, 1, 77, 5, _ROW.pack(mine.address + 3, 5, token) + b"hello")
    assert peer.hear() == (_DONE, 77, 0)
    assert mine.bytes(3, 5) == b"hello"
    peer.say(_READ, 2, 78, 0, _ROW.pack(mine.address + 3, 2, token) + _ROW.pack(mine.address + 7, 1, token))
    assert peer.hear() == (_DATA, 78, 3)
    assert peer.receive(3) == b"heo"


@pytest.mark.parametrize(
    ("kind", "rows", "number", "body"),
    [
        (0, 0, 0, 0), (7, 0, 0, 0), (255, 0, 0, 0), (_DONE, 0, 5, 0), (_FAIL, 0, 5, 0), (_DATA, 0, 5, 10), (_DONE, 1, 5, 0),
        (_READ, 0, 5, 0), (_WRITE, 0, 5, 10), (_READ, 1 << 20, 5, 0), (_WRITE, 1, 5, 1 << 40), (_NOTICE, 0, 0, (64 << 10) + 1),
    ],
)  # fmt: skip
def test_what_is_no_message_ends_the_link(peer: RawPeer, kind: int, rows: int, number: int, body: int) -> None:
    peer.say(kind, rows, number, body)
    peer.wait_for_the_end()
    with pytest.raises(TransportError) as caught:
        peer.link.notify(b"", time.monotonic() + 1)
    assert caught.value.reason == "peer"


def test_rows_that_are_not_as_long_as_the_body_end_the_link(peer: RawPeer, memory: tuple[Memory, bytes]) -> None:
    mine, token = memory
    peer.say(_WRITE, 1, 5, 99, _ROW.pack(mine.address, 100, token))
    peer.wait_for_the_end()


def test_a_peer_that_asks_and_does_not_read_the_answers_loses_the_link(peer: RawPeer, memory: tuple[Memory, bytes]) -> None:
    mine, token = memory
    row = _ROW.pack(mine.address, mine.length, token)
    with contextlib.suppress(OSError):  # it is gone when it has had enough
        for number in range(20_000):
            peer.say(_READ, 1, number, 0, row)
    peer.wait_for_the_end()


def test_a_peer_that_writes_and_does_not_read_the_answers_loses_the_link(peer: RawPeer, memory: tuple[Memory, bytes]) -> None:
    mine, token = memory
    writes = b"".join(_HEADER.pack(_WRITE, 1, n, 1) + _ROW.pack(mine.address, 1, token) + b"x" for n in range(1000))
    with contextlib.suppress(OSError):
        for _ in range(200):
            peer.sock.sendall(writes)
    peer.wait_for_the_end()


def test_memory_that_a_peer_does_not_finish_reading_costs_the_link_when_it_is_unregistered(
    transport: TcpTransport, peer: RawPeer, memory: tuple[Memory, bytes]
) -> None:
    """Its bytes may not be sent once `unregister` has returned, and others may not take their place."""
    mine, token = memory
    peer.say(_READ, 1, 5, 0, _ROW.pack(mine.address, mine.length, token))
    assert peer.hear() == (_DATA, 5, mine.length)  # more than the socket takes
    transport.unregister(mine.address)
    peer.wait_for_the_end()


def test_channels_of_different_links_are_refused(transport: TcpTransport) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    for number, (_, theirs) in enumerate(pairs):
        theirs.sendall(_HELLO.pack(_MAGIC, struct.pack("16s", b"%d" % number), number, 2))
    fails("peer", lambda: transport.accept([mine for mine, _ in pairs], time.monotonic() + 30))
    for _, theirs in pairs:
        theirs.close()


@pytest.mark.parametrize(("number", "count"), [(0, 2), (1, 1), (0, 0)])
def test_a_greeting_for_other_channels_is_refused(transport: TcpTransport, number: int, count: int) -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(_HELLO.pack(_MAGIC, bytes(16), number, count))
        fails("peer", lambda: transport.accept([mine], time.monotonic() + 30))
    assert mine.fileno() == -1


def test_no_channels_are_no_link(transport: TcpTransport) -> None:
    fails("peer", lambda: transport.connect([], time.monotonic() + 30))
