"""The fault proxy does what it says: a fault test that passes because nothing went wrong would be worth nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.faults.proxy import FaultProxy, Faults, SilentPort

ANSWER = bytes(range(256)) * 400


class Answering:
    """Answers every byte that it gets with ANSWER."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self._listener.getsockname()[1]))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while sock.recv(1):
                    sock.sendall(ANSWER)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    server = Answering()
    with FaultProxy(server.address) as made:
        yield made
    server.close()


def connect(proxy: FaultProxy, timeout_s: float = 10.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout_s)


def ask(sock: socket.socket) -> bytes:
    """What comes of one question, until it is whole, or the connection or the patience ends."""
    sock.sendall(b"?")
    got = bytearray()
    try:
        while len(got) < len(ANSWER) and (data := sock.recv(len(ANSWER) - len(got))):
            got += data
    except (TimeoutError, ConnectionError):
        pass
    return bytes(got)


def test_without_faults_all_passes(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        assert [ask(sock), ask(sock)] == [ANSWER, ANSWER]
    wait_until(lambda: proxy.connections == 0, 30, "the end passes too")


@pytest.mark.parametrize("after", [0, 1, 20_000, len(ANSWER) - 1])
def test_cut_strikes_after_so_many_bytes(proxy: FaultProxy, after: int) -> None:
    with connect(proxy) as sock:
        assert ask(sock) == ANSWER
        proxy.faults = Faults(after_bytes=after, cut=True)
        got = ask(sock)
    assert got == ANSWER[: len(got)]
    assert len(got) <= after
    assert proxy.cuts == 1


@pytest.mark.parametrize("after", [0, 7, 16 << 10, 50_000])
def test_corruption_is_one_bit_an_answer(proxy: FaultProxy, after: int) -> None:
    proxy.faults = Faults(after_bytes=after, corrupt=True)
    with connect(proxy) as sock:
        for _ in range(2):
            got = ask(sock)
            assert len(got) == len(ANSWER)
            assert [i for i, (a, b) in enumerate(zip(got, ANSWER, strict=True)) if a != b] == [after]


def test_swallowed_is_late_and_not_lost(proxy: FaultProxy) -> None:
    proxy.faults = Faults(after_bytes=1000, swallow=True)
    with connect(proxy, timeout_s=0.2) as sock:
        got = ask(sock)
        assert got == ANSWER[:1000]
        proxy.faults = Faults()
        sock.settimeout(10)
        while len(got) < len(ANSWER):
            got += sock.recv(1 << 16)
        assert got == ANSWER


def test_a_throttled_answer_is_whole_in_the_end(proxy: FaultProxy) -> None:
    proxy.faults = Faults(after_bytes=50_000, rate_bytes_s=200_000, delay_s=0.05)
    with connect(proxy) as sock:
        assert ask(sock) == ANSWER


def test_a_refusing_port_refuses_and_comes_back(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        assert ask(sock) == ANSWER
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert ask(sock) == ANSWER, "what was open stays"
        proxy.accept()
        with connect(proxy) as again:
            assert ask(again) == ANSWER


def test_connections_that_die_young(proxy: FaultProxy) -> None:
    proxy.faults = Faults(die_after_s=0.01)
    with connect(proxy) as sock:
        assert sock.recv(1) == b""
    wait_until(lambda: proxy.connections == 0, 30)


def test_a_silent_port_does_not_answer() -> None:
    port = SilentPort()
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port.port), timeout=0.3)
    port.close()
