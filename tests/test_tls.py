"""TLS on data ports: who shows no certificate of the cluster's authority gets nothing, and nothing goes in the clear."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client import fetch
from hicache_mooncake.config import load_settings
from hicache_mooncake.node import data_server
from hicache_mooncake.node.service import Node, NodeError
from hicache_mooncake.testing.local import FakeRank, page_hash, pattern
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.peers import peer_closed
from hicache_mooncake.transfer.tls import Tls, TlsError, TlsSocket, connect
from tests.certificates import Authority, needs_openssl
from tests.conftest import MasterProcess, NodeProcess, wait_until
from tests.faults.holders import PageServer, Reader, names

pytestmark = needs_openssl
NS = b"n" * 16
PATIENT_S = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is given the time for a handshake."""
    monkeypatch.setattr(fetch, "_CONNECTING_S", PATIENT_S)
    monkeypatch.setattr(fetch, "_SENDING_S", PATIENT_S)
    monkeypatch.setattr(data_server, "HANDSHAKE_S", PATIENT_S)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "other")


def made(authority: Authority, name: str) -> Tls:
    settings = authority.settings(name)
    tls = Tls.load(settings["tls_cert"], settings["tls_key"], settings["tls_ca"])
    assert tls is not None
    return tls


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# --------------------------------------------------------------------------- files


def test_without_certificates_there_is_no_tls() -> None:
    assert Tls.load("", "", "") is None


def test_certificates_that_peers_would_refuse_are_refused_at_the_start(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    cert, key = map(str, authority.sign("n"))
    ca = str(authority.ca)
    garbage, secret = tmp_path / "garbage.pem", tmp_path / "secret.key"
    garbage.write_text("nothing")
    secret.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIBvTBX\n-----END ENCRYPTED PRIVATE KEY-----\n")
    expired = str(authority.sign("expired", "-days", "-1")[0])
    for arguments, says in (
        ((cert, "", ca), "belong together: tls_key not set"),
        ((cert, str(tmp_path / "none"), ca), f"tls_key {tmp_path / 'none'}: there is no such file"),
        ((str(tmp_path), key, ca), "tls_cert .*: (is no file|cannot be read)"),
        ((str(garbage), key, ca), "tls_cert .*: holds no certificate in PEM form"),
        ((cert, cert, ca), "tls_key .*: holds no private key in PEM form"),
        ((cert, str(authority.sign("another")[1]), ca), "tls_key is not the key of tls_cert"),
        ((cert, key, str(stranger.ca)), "peers would refuse this certificate: unable to get local issuer certificate"),
        ((expired, str(authority.folder / "ca-expired.key"), ca), "certificate has expired"),
        ((cert, str(secret), ca), "tls_key"),
    ):
        with pytest.raises(TlsError, match=says):
            Tls.load(*arguments)


def test_a_node_does_not_start_with_certificates_that_do_not_fit(authority: Authority, tmp_path: Path) -> None:
    settings = authority.settings("n") | {"tls_key": str(authority.sign("another")[1])}
    options = {"socket": str(tmp_path / "n.sock"), "dram": "16MiB", "listen": "127.0.0.1:0", "metrics": ""}
    with pytest.raises(NodeError, match="tls_key is not the key of tls_cert"):
        Node(load_settings({}, {}, options | settings)[0]).start()


def test_the_key_is_not_shown(authority: Authority) -> None:
    tls = made(authority, "n")
    assert "PRIVATE" not in repr(tls)
    assert tls == Tls(tls.cert, tls.key, tls.ca)


# --------------------------------------------------------------------------- a socket


@pytest.fixture
def pair(authority: Authority, resources: ExitStack) -> tuple[TlsSocket, TlsSocket]:
    tls = made(authority, "n")
    ours, theirs = socket.socketpair()
    server = TlsSocket(tls.server_context, theirs, server_side=True)
    thread = threading.Thread(target=server.handshake, args=(time.monotonic() + PATIENT_S,))
    thread.start()
    client = connect(tls, ours, time.monotonic() + PATIENT_S)
    thread.join()
    for sock in (client, server):
        sock.set_timeouts(PATIENT_S)
        resources.callback(sock.close)
    return client, server


def test_bytes_arrive_in_pieces_of_any_size(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    rng = random.Random(1)
    data = rng.randbytes(3 << 20)
    pieces = [memoryview(data)[at : at + 100_003] for at in range(0, len(data), 100_003)]
    sender = threading.Thread(target=tcp.send_bodies, args=(server, pieces, time.monotonic() + PATIENT_S))
    sender.start()
    into = bytearray(len(data))
    view, at = memoryview(into), 0
    while at < len(data):
        sizes = [rng.randrange(1, 50_000) for _ in range(rng.randrange(1, 4))]
        views = []
        for size in sizes:
            views.append(view[at + sum(map(len, views)) :][:size])
        flags = rng.choice([0, socket.MSG_WAITALL, socket.MSG_DONTWAIT])
        with contextlib.suppress(BlockingIOError):
            at += client.recvmsg_into([v for v in views if len(v)], 0, flags)[0]
    sender.join()
    assert bytes(into) == data


def test_a_socket_says_when_nothing_is_there_and_when_time_is_up(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    with pytest.raises(BlockingIOError):
        client.recv(1, socket.MSG_DONTWAIT)
    client.set_timeouts(0.01)
    with pytest.raises(BlockingIOError):
        client.recv(1)
    server.sendall(b"abc")
    client.set_timeouts(PATIENT_S)
    assert client.recv(2, socket.MSG_WAITALL) == b"ab"
    assert client.buffered, "what poll does not see"
    client.set_timeouts(0.01)
    assert client.recv(5, socket.MSG_WAITALL) == b"c", "what came, as a socket does"
    server.set_timeouts(0.2)
    with pytest.raises(BlockingIOError):  # who does not read is waited for so long and no longer
        server.sendall(bytes(64 << 20))


def test_an_idle_connection_is_known_to_be_closed(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    assert not peer_closed(client), "the handshake left nothing behind"
    server.sendall(b"ab")
    assert select.select([client], [], [], PATIENT_S)[0]
    assert peer_closed(client), "out of step"
    assert client.recv(1) == b"a"
    assert peer_closed(client), "out of step, with what was decrypted already"
    assert client.recv(1) == b"b"
    server.close()
    assert select.select([client], [], [], PATIENT_S)[0]
    assert peer_closed(client)
    assert client.recv(1) == b""


def test_shutting_down_from_another_thread_sends_nothing_in_the_clear(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    woken = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):
            server.recv(1)
        woken.set()

    threading.Thread(target=read, daemon=True).start()
    server.shutdown(socket.SHUT_RDWR)
    assert woken.wait(PATIENT_S)
    with pytest.raises((ConnectionError, BrokenPipeError)):
        server.sendall(b"secret" * 1000)
    assert b"secret" not in _raw(client)


def _raw(sock: TlsSocket) -> bytes:
    with contextlib.suppress(OSError):
        return socket.socket.recv(sock._sock, 1 << 20, socket.MSG_DONTWAIT)
    return b""


# --------------------------------------------------------------------------- who is let in


@pytest.fixture
def start(tmp_path: Path, resources: ExitStack) -> Callable[[dict[str, str]], tuple[Node, p.Peer]]:
    def start(extra: dict[str, str]) -> tuple[Node, p.Peer]:
        options = {"socket": str(tmp_path / "n.sock"), "dram": "16MiB", "listen": "127.0.0.1:0", "metrics": "", "name": "n"}
        node = Node(load_settings({}, {}, options | extra)[0])
        node.start()
        resources.callback(node.stop)
        host, _, port = node.data_address.rpartition(":")
        return node, p.Peer("n", node.incarnation, host, int(port))

    return start


def ask(peer: p.Peer, tls: Tls | None) -> bytes:
    """The verdict on one page that is not there."""
    deadline = time.monotonic() + PATIENT_S
    with closing(tcp.PeerConnection(peer, deadline, b"", "r", tls)) as connection:
        connection.request(p.Fetch(2, "r", NS, page_hash(1), 64, 1), deadline)
        return connection.reply(deadline).status


Start = Callable[[dict[str, str]], tuple[Node, p.Peer]]


def test_members_read_and_others_are_told_why_not(start: Start, authority: Authority, stranger: Authority) -> None:
    node, peer = start(authority.settings("n"))
    assert ask(peer, made(authority, "r")) == bytes([p.MISS])
    with pytest.raises(p.ProtocolError, match="set tls_cert, tls_key and tls_ca on every node"):
        ask(peer, None)
    with pytest.raises(p.ProtocolError, match=r"its certificate is refused here: .*Is it signed by this node's tls_ca"):
        ask(peer, made(stranger, "r"))
    ours, theirs = made(authority, "r"), made(stranger, "r")
    with pytest.raises((p.ProtocolError, OSError), match="refused this node's certificate"):
        ask(peer, Tls(theirs.cert, theirs.key, ours.ca))
    wait_until(lambda: node.data.report()["remote_failed_readers"] == 3, PATIENT_S, "each is counted")


def test_a_node_without_tls_is_not_spoken_to_in_the_clear(
    start: Start, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    node, peer = start({})
    with pytest.raises(p.ProtocolError, match="has that node tls_cert, tls_key and tls_ca"):
        ask(peer, made(authority, "r"))
    wait_until(lambda: node.data.report()["remote_failed_readers"] == 1, PATIENT_S, "it was refused")
    assert "the other end speaks TLS, and this node does not" in caplog.text
    assert ask(peer, None) == bytes([p.MISS])


def test_the_certificate_replaces_no_key(start: Start, authority: Authority, tmp_path: Path) -> None:
    from hicache_mooncake.security import ClusterKey

    ClusterKey.generate().save(str(tmp_path / "key"))
    node, peer = start(authority.settings("n") | {"key_file": str(tmp_path / "key")})
    with pytest.raises(p.ProtocolError, match="key_file"):
        ask(peer, made(authority, "r"))
    deadline = time.monotonic() + PATIENT_S
    tcp.PeerConnection(peer, deadline, node.data_key, "r", made(authority, "r")).close()


# --------------------------------------------------------------------------- pages


class TlsServer(PageServer):
    """A page server that speaks TLS, and whose connections can be listened to."""

    def __init__(self, name: str, tls: Tls, page_bytes: int) -> None:
        self.tls = tls
        super().__init__(name, page_bytes)

    def _serve(self, sock: socket.socket) -> None:
        wrapped = TlsSocket(self.tls.server_context, sock, server_side=True)
        with closing(wrapped), contextlib.suppress(OSError, p.ProtocolError):
            wrapped.handshake(time.monotonic() + PATIENT_S)
            while True:
                fetch = tcp.receive_message(wrapped, tcp.fetch_decoder, time.monotonic() + PATIENT_S)
                self.answer(wrapped, fetch)  # type: ignore[arg-type]


@pytest.mark.parametrize(("peers", "lanes", "page_bytes"), [(1, 0, 5000), (1, 3, 128 << 10), (3, 0, 96 << 10), (3, 2, 300_001)])
def test_pages_come_over_tls_from_any_number_of_nodes(
    resources: ExitStack, authority: Authority, peers: int, lanes: int, page_bytes: int
) -> None:
    tls = made(authority, "n")
    servers = [resources.enter_context(closing(TlsServer(f"n{i}", tls, page_bytes))) for i in range(peers)]
    reader = resources.enter_context(closing(Reader(96, page_bytes, lanes)))
    reader.directory.tls = tls
    pages = names(*range(96))
    for number, server in enumerate(servers):
        server.hold(pages[number::peers])
        reader.place(pages[number::peers], server)
    for _ in range(2):
        assert reader.load(pages, PATIENT_S).ok == b"\x01" * 96
    assert reader.directory.down == []


def test_a_cluster_with_tls_loads_and_is_served(
    start_master: Callable[[], MasterProcess],
    start_node: Callable[..., NodeProcess],
    authority: Authority,
    resources: ExitStack,
) -> None:
    """Real nodes and movers."""
    master = start_master()
    ranks = []
    for name in "ab":
        options = [word for key, path in authority.settings(name).items() for word in (f"--{key.replace('_', '-')}", path)]
        node = start_node(name, "64MiB", (master.address,), (*options, "--host-id", name))
        ranks.append(resources.enter_context(closing(FakeRank(node.settings(deadline_s=7.0)))))
    a, b = ranks
    pages = [page_hash(number) for number in range(12)]
    wait_until(lambda: _active(a) == _active(b) == 2, PATIENT_S, "both nodes are members")
    assert a.store(NS, pages).ok == b"\x01" * 12
    wait_until(lambda: b.exists(NS, pages) == 12, PATIENT_S, "found through the master")
    wait_until(lambda: b.load(NS, pages).ok == b"\x01" * 12, PATIENT_S, "all are loaded")


def _active(rank: FakeRank) -> int:
    report = rank.client.status()
    return 0 if report is None else sum(node.state == "active" for node in report.cluster)


def test_what_goes_over_the_wire_is_not_the_page(resources: ExitStack, authority: Authority) -> None:
    tls = made(authority, "n")
    server = resources.enter_context(closing(TlsServer("n", tls, 64 << 10)))
    reader = resources.enter_context(closing(Reader(4, 64 << 10)))
    reader.directory.tls = tls
    pages = names(*range(4))
    server.hold(pages)
    seen = _Tap(server.address)
    resources.callback(seen.close)
    reader.place(pages, p.Peer("n", b"i" * 8, "127.0.0.1", seen.port))
    assert reader.load(pages, PATIENT_S).ok == b"\x01" * 4
    assert len(seen.bytes) > 4 * (64 << 10)
    for page in pages:
        body = pattern(page, 64 << 10)
        assert not any(body[at : at + 16] in seen.bytes for at in range(0, len(body), 4096))
        assert page not in seen.bytes


class _Tap:
    """Forwards one connection after the other, and keeps what went through, both ways."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.bytes = b""
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(self._to)
                for ends in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pump, args=(ends,), daemon=True).start()

    def _pump(self, ends: Sequence[socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while data := ends[0].recv(1 << 16):
                self.bytes += data
                ends[1].sendall(data)
            ends[1].shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_connections_over_tls_leave_no_descriptors(start: Start, authority: Authority) -> None:
    node, peer = start(authority.settings("n"))
    tls = made(authority, "r")
    ask(peer, tls)
    wait_until(lambda: node.data.report()["remote_readers"] == 0, PATIENT_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        ask(peer, tls)
        with pytest.raises(p.ProtocolError):
            ask(peer, None)
    wait_until(lambda: node.data.report()["remote_readers"] == 0, PATIENT_S)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, PATIENT_S, "all are closed")
