"""The transports over other projects' engines, run with the real ones where their wheels are installed."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from hicache_mooncake import TransferEngine
from hicache_mooncake.testing import TransportTests
from hicache_mooncake.transfer.foreign.base import Engine, ForeignTransport, _greet
from hicache_mooncake.transfer.transport import Link, Op, Piece, TransportError, TransportOptions, open_transport
from tests.conftest import wait_until
from tests.linked import ALL, COUNT, LONG_S, NS, PAGE, Linked, MakePair, faults, figure, pair
from tests.memory_transport import Faults

__all__ = ["faults", "pair"]


def missing(scheme: str) -> str:
    try:
        open_transport(scheme, TransportOptions()).close()
    except TransportError as error:
        return str(error)
    return ""


MISSING = {scheme: missing(scheme) for scheme in ("mooncake", "nixl")}


class ForeignTests(TransportTests):
    """As far as an engine that recalls nothing can keep the contract."""

    transfers = 500
    closes_on_stopped_peers = False


if not MISSING["mooncake"]:

    class TestMooncake(ForeignTests):
        scheme = "mooncake"

        def test_a_peer_that_stops_costs_no_more_than_the_deadline(self) -> None:
            """And the link, since what is under way lands when the peer goes on: it cannot be recalled."""
            peer, mine, endless = self._reading()
            peer.stop()
            with pytest.raises(TransportError) as caught:
                peer.near.submit("read", [Piece(mine.address, peer.remote, mine.length)], 0.5).wait()
            assert caught.value.reason in ("deadline", "peer")
            endless.cancel()
            assert not peer.near.link.alive


if not MISSING["nixl"]:

    class TestNixl(ForeignTests):
        scheme = "nixl"

        @pytest.mark.skip(reason="NIXL keeps two descriptors for each agent that it has met")
        def test_links_that_are_closed_leave_nothing_behind(self) -> None: ...


@pytest.mark.parametrize("scheme", sorted(MISSING))
def test_two_transfer_engines_use_the_real_one(scheme: str) -> None:
    if MISSING[scheme]:
        pytest.skip(MISSING[scheme])
    deadline = time.monotonic() + 60.0
    with TransferEngine("one", transports=(scheme,)) as one, TransferEngine("other", transports=(scheme,)) as other:
        pages, content = one.allocate(1 << 20, name="pages")
        content[:] = os.urandom(1 << 20)
        room, landed = other.allocate(1 << 20)
        peer = other.connect(one.address, deadline)
        assert peer.transport == scheme
        peer.read([(room.address, pages.address, 1 << 20)], deadline).wait()
        assert landed == content
        landed[:3] = b"abc"
        peer.write([(room.address, pages.address + 7, 3)], deadline).wait()
        assert bytes(content[7:10]) == b"abc"


@pytest.mark.parametrize("scheme", sorted(MISSING))
def test_pages_between_nodes_come_over_the_real_one(pair: MakePair, faults: Faults, scheme: str) -> None:
    if MISSING[scheme]:
        pytest.skip(MISSING[scheme])
    linked = Linked(pair(lambda _scheme, options: open_transport(scheme, options), transport=scheme), faults)
    before = figure(linked.b, "link_received_bytes")
    outcome = linked.reader.load(NS, linked.pages)
    assert outcome.ok == ALL, outcome.reasons
    wait_until(lambda: figure(linked.b, "link_received_bytes") == before + COUNT * PAGE, LONG_S, "all pages counted")


@pytest.mark.parametrize(
    ("scheme", "modules", "package"),
    [
        ("mooncake", ["mooncake", "mooncake.engine"], "mooncake-transfer-engine"),
        ("nixl", ["nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api", "nixl", "nixl._api"], "nixl-cu12"),
    ],
    ids=["mooncake", "nixl"],
)
def test_without_the_wheel_it_is_said_which_to_install(
    monkeypatch: pytest.MonkeyPatch, scheme: str, modules: list[str], package: str
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportError, match=f"pip install {package}") as caught:
        open_transport(scheme, TransportOptions())
    assert caught.value.reason == "unavailable"


# --------------------------------------------------------------------------- an engine that does what it is told


class FakeEngine(Engine):
    def __init__(self, move: Callable[[], None]) -> None:
        self._move = move

    def hello(self) -> bytes:
        return b"here"

    def attach(self, hello: bytes, host: str) -> str:
        return host

    def detach(self, peer: str) -> None: ...

    def register(self, address: int, length: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def how(self, address: int) -> bytes:
        return b""

    def reach(self, peer: str, how: bytes) -> None: ...

    def move(self, op: Op, peer: str, pieces: Sequence[Piece]) -> None:
        self._move()

    def close(self) -> None: ...


class FakeTransport(ForeignTransport):
    scheme: ClassVar[str] = "fake"
    magic: ClassVar[bytes] = b"fake"

    def __init__(self, move: Callable[[], None] = lambda: None) -> None:
        super().__init__(TransportOptions())
        self._fake = FakeEngine(move)

    def start(self, host: str) -> Engine:
        return self._fake


@contextlib.contextmanager
def fakes(near: FakeTransport, far: FakeTransport) -> Iterator[Link]:
    """Of `near`, with 10 bytes at 4096 to be moved from or to 10 at 1 << 20."""
    ours, theirs = socket.socketpair()
    deadline = time.monotonic() + 20.0
    accepting = threading.Thread(target=far.accept, args=([theirs], deadline))
    accepting.start()
    link = near.connect([ours], deadline)
    accepting.join()
    near.register(4096, 4096)
    link.learn(1 << 20, 4096, far.register(1 << 20, 4096))
    yield link
    near.close()
    far.close()


def test_an_engine_that_raises_what_it_should_not_ends_the_batch() -> None:
    """Bindings raise what they like, and whoever waits for the batch would wait until its deadline."""

    def move() -> None:
        raise RuntimeError("a bug of the engine")

    with fakes(FakeTransport(move), FakeTransport()) as link:
        for _ in range(5):  # more than there are threads
            with pytest.raises(TransportError, match="a bug of the engine") as caught:
                link.submit("read", [Piece(4096, 1 << 20, 10)], time.monotonic() + 20.0).wait()
            assert caught.value.reason == "device"


def test_an_engine_that_cannot_tell_of_its_memory_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the link can be closed, which waits for its thread on both ends."""
    far = FakeTransport()

    def how(address: int) -> bytes:
        raise RuntimeError("a bug of the engine")

    monkeypatch.setattr(far._fake, "how", how)
    with fakes(FakeTransport(), far) as link:
        with pytest.raises(TransportError) as caught:
            link.submit("read", [Piece(4096, 1 << 20, 10)], time.monotonic() + 20.0).wait()
        assert caught.value.reason == "peer"


def test_a_peer_that_greets_a_byte_at_a_time_has_no_more_time_than_others() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"fake" + bytes(4))
        with pytest.raises(TransportError) as caught:
            _greet(ours, b"fake", b"", time.monotonic() - 1.0)
        assert caught.value.reason == "deadline"


def test_a_channel_that_breaks_while_a_link_is_made_is_the_peers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is asked for when it may be gone already."""
    transport = FakeTransport()

    def attach(hello: bytes, host: str) -> str:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(transport._fake, "attach", attach)
    ours, theirs = socket.socketpair()
    theirs.sendall(b"fake" + bytes(4))
    with theirs, pytest.raises(TransportError) as caught:
        transport.connect([ours], time.monotonic() + 20.0)
    assert caught.value.reason == "peer"
    assert ours.fileno() == -1
    transport.close()
