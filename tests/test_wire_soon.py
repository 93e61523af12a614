"""Looking for an answer before sleeping for it: it finds what is there, is rare where it is in vain, and changes nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.wire import Soon, Wire, WireClosed, WireTimeout

_from_node = p.decoder(p.FromNode)
ANSWER = p.Found([7], [b"\x01\x00"], "")


@pytest.fixture
def wires() -> Iterator[tuple[Wire, socket.socket]]:
    """The end that waits, and the other one as a bare socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    wire = Wire(ours)
    yield wire, theirs
    wire.close()
    with contextlib.suppress(OSError):
        theirs.close()


def frame(message: p.Message) -> bytes:
    body = p.encode(message)
    return len(body).to_bytes(4, "little") + body


def nobody_may_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sleeps fails."""

    def sleeps(*_: object) -> None:
        raise AssertionError("it slept for what was there")

    monkeypatch.setattr(socket, "recv_fds", sleeps)


def test_what_is_there_is_found_without_sleeping(wires: tuple[Wire, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    wire, theirs = wires
    nobody_may_sleep(monkeypatch)
    theirs.sendall(frame(ANSWER) + frame(p.Cleared(3)))
    soon = Soon(cores=2)
    assert wire.receive(_from_node, time.monotonic() + 20, soon) == ANSWER
    assert wire.receive(_from_node, time.monotonic() + 20, soon) == p.Cleared(3)
    assert soon.look_s() > 0


class Noticed(Soon):
    """Tells when somebody has looked in vain."""

    def __init__(self) -> None:
        super().__init__(cores=2)
        self.looked = threading.Event()

    def in_vain(self) -> None:
        super().in_vain()
        self.looked.set()


def test_what_comes_late_is_slept_for_and_makes_looking_rare(wires: tuple[Wire, socket.socket]) -> None:
    wire, theirs = wires
    soon = Noticed()

    def send() -> None:
        soon.looked.wait(20)
        theirs.sendall(frame(ANSWER))

    sender = threading.Thread(target=send)
    sender.start()
    assert wire.receive(_from_node, time.monotonic() + 30, soon) == ANSWER
    sender.join()
    assert soon.look_s() == 0.0


def test_an_answer_in_pieces_is_put_together(wires: tuple[Wire, socket.socket]) -> None:
    wire, theirs = wires
    whole = frame(ANSWER)
    theirs.sendall(whole[:6])
    sender = threading.Timer(0.2, theirs.sendall, [whole[6:]])
    sender.start()
    assert wire.receive(_from_node, time.monotonic() + 30, Soon(cores=2)) == ANSWER
    sender.join()


def test_a_peer_that_is_gone_and_one_that_is_silent_are_told_apart(wires: tuple[Wire, socket.socket]) -> None:
    wire, theirs = wires
    with pytest.raises(WireTimeout):
        wire.receive(_from_node, time.monotonic() + 0.05, Soon(cores=2))
    theirs.close()
    with pytest.raises(WireClosed):
        wire.receive(_from_node, time.monotonic() + 20, Soon(cores=2))


def test_with_one_core_nobody_looks() -> None:
    soon = Soon(cores=1)
    assert [soon.look_s() for _ in range(100)] == [0.0] * 100


def test_looking_in_vain_gets_rarer_and_one_success_brings_it_back() -> None:
    soon = Soon(cores=8)
    pauses = []
    for _ in range(10):
        looked = soon.look_s()
        assert 0 < looked <= 0.001, "bounded"
        soon.in_vain()
        skipped = 0
        while not soon.look_s():
            skipped += 1
        pauses.append(skipped)
    assert pauses == sorted(pauses)
    assert pauses[0] == 1
    assert 16 <= pauses[-1] <= 64, "rare, but not never"
    soon.paid()
    assert all(soon.look_s() > 0 for _ in range(10))
