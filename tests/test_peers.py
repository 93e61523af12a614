"""A reader's connections: kept, bounded, made beside the reader, and let go of."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Admission
from hicache_mooncake.transfer import peers as peers_module
from hicache_mooncake.transfer.peers import Connecting, Peers
from tests.conftest import wait_until


class Connection:
    """One end of a socket pair in the place of a PeerConnection."""

    made: list[Connection]

    def __init__(self, peer: p.Peer, deadline: float, data_key: bytes, requester: str, tls: object = None) -> None:
        self.peer, self.data_key, self.requester = peer, data_key, requester
        self.sock, self.theirs = socket.socketpair()
        Connection.made.append(self)

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def close(self) -> None:
        self.sock.close()
        self.theirs.close()


def peer(name: object, port: int = 1) -> p.Peer:
    return p.Peer(str(name), b"i" * 8, "host", port)


@pytest.fixture
def peers() -> Iterator[Peers]:
    Connection.made = []
    made = Peers(Connection)  # type: ignore[arg-type]
    yield made
    made.close()
    for connection in Connection.made:
        connection.close()


def connect(peers: Peers, to: p.Peer) -> Connecting:
    attempt = peers.connect(to, 1e9)
    assert select.select([peers], [], [], 10)[0]
    assert peers.connected() == [attempt]
    return attempt


def test_a_connection_is_made_once_and_used_again(peers: Peers) -> None:
    assert peers.take(peer("a")) is None
    made = connect(peers, peer("a")).connection
    assert made is not None
    assert peers.take(peer("a")) is None, "in use"
    peers.keep(made)
    assert peers.take(peer("b")) is None
    assert peers.take(peer("a", 2)) is None
    assert peers.take(peer("a")) is made
    assert not select.select([peers], [], [], 0)[0], "what was told once is not told again"


@pytest.mark.parametrize("end", ["closed", "out of step"])
def test_an_idle_connection_on_which_something_came_is_not_used(peers: Peers, end: str) -> None:
    made = connect(peers, peer("a")).connection
    assert isinstance(made, Connection)
    peers.keep(made)  # type: ignore[arg-type]
    if end == "closed":
        made.theirs.close()
    else:
        made.theirs.send(b"?")
    assert peers.take(peer("a")) is None
    assert made.closed


def test_idle_connections_are_bounded_and_the_longest_idle_goes(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_MAX_IDLE", 3)
    made = [Connection(peer(i), 0.0, b"", "") for i in range(5)]
    for connection in made:
        peers.keep(connection)  # type: ignore[arg-type]
    assert [connection.closed for connection in made] == [True, True, False, False, False]
    monkeypatch.setattr(peers_module, "_IDLE_S", 0.0)
    last = Connection(peer("last"), 0.0, b"", "")
    peers.keep(last)  # type: ignore[arg-type]
    assert all(connection.closed for connection in made)


def test_another_key_ends_what_was_proved_with_the_former(peers: Peers) -> None:
    peers.identify(b"k" * 32, "b")
    made = connect(peers, peer("a")).connection
    assert isinstance(made, Connection)
    assert (made.data_key, made.requester) == (b"k" * 32, "b")
    peers.keep(made)  # type: ignore[arg-type]
    peers.identify(b"k" * 32, "b")
    assert not made.closed
    peers.identify(b"x" * 32, "b")
    assert made.closed
    assert peers.take(peer("a")) is None


def test_nobody_keeps_a_connection_that_came_too_late(peers: Peers) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(*arguments: object) -> Connection:
        reached.set()
        go_on.wait(10)
        return Connection(*arguments)  # type: ignore[arg-type]

    peers._connect = slow  # type: ignore[assignment]
    attempt = peers.connect(peer("a"), 1e9)
    assert reached.wait(10)
    peers.abandon(attempt)
    go_on.set()
    wait_until(lambda: Connection.made and Connection.made[0].closed, 30)
    assert peers.connected() == []


def test_without_threads_an_attempt_fails_and_nobody_is_blamed(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        attempt = connect(peers, peer("a"))
    assert attempt.connection is None
    assert not attempt.at_fault
    assert connect(peers, peer("a")).connection is not None


def test_only_so_many_connections_are_made_at_once(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_MAX_CONNECTING", 2)
    go_on = threading.Event()

    def slow(*arguments: object) -> Connection:
        go_on.wait(10)
        return Connection(*arguments)  # type: ignore[arg-type]

    peers._connect = slow  # type: ignore[assignment]
    attempts = [peers.connect(peer(i), 1e9) for i in range(3)]
    assert peers.connected() == [attempts[2]]
    assert not attempts[2].at_fault
    go_on.set()
    ended: list[Connecting] = []
    wait_until(lambda: ended.extend(peers.connected()) or len(ended) == 2, 30)  # type: ignore[func-returns-value]
    assert all(attempt.connection is not None for attempt in ended)


def test_breakers_are_bounded_and_those_of_nodes_that_work_go_first(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_MAX_BREAKERS", 3)
    for name in "abc":
        peers.failed(peer(name))
    assert [peers.admit(peer(name)) for name in "abcd"] == [Admission.NO, Admission.NO, Admission.NO, Admission.GO]
    peers.works(peer("b"))
    assert peers.admit(peer("b")) is Admission.GO
    monkeypatch.setattr("hicache_mooncake.backoff.STABLE_S", -1.0)
    peers.failed(peer("d"))
    assert [peers.admit(peer(name)) for name in "abcd"] == [Admission.NO, Admission.GO, Admission.NO, Admission.NO]
    peers.failed(peer("e"))
    assert len(peers._breakers) == 3
