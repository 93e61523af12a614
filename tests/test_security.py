"""One key makes a cluster: the file, what is derived from it, and what a stranger gets without it, which is nothing."""

from __future__ import annotations

import base64
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from hicache_mooncake import protocol as p
from hicache_mooncake import security
from hicache_mooncake.cli import doctor
from hicache_mooncake.cli.status import Unreachable, ask_master
from hicache_mooncake.config import load_settings
from hicache_mooncake.security import ClusterKey, HandshakeWatch, SecurityError, secure_client, secure_server
from hicache_mooncake.transfer import tcp

KEY, OTHER = ClusterKey(bytes(range(32))), ClusterKey(bytes(range(1, 33)))
DERIVED = {
    "data": "78ce295d798fde53c2e7567cc6e77023b9c97579a31f85fcc780dffb65fbfba8",
    "server": "j[]%%f?S>WF/{r@(TQhOIJtTCv$(12JqFPeyBCA:",
    "client": "i/uMMI0:[IzJ&aazW=l?U3]giv50fAkJb2EI#5x8",
    "fingerprint": "0c2232ff",
}
FROM_DATA: msgspec.msgpack.Decoder[p.Message] = p.decoder(p.FromData)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


# --------------------------------------------------------------------------- the key and its file


def test_a_key_comes_back_from_its_file_which_only_its_owner_reads(tmp_path: Path) -> None:
    key, path = ClusterKey.generate(), tmp_path / "pool.key"
    old = os.umask(0)
    try:
        key.save(str(path))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterKey.load(str(path)) == key
    assert ClusterKey.generate() != key


def test_a_key_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "pool.key"
    KEY.save(str(path))
    with pytest.raises(FileExistsError):
        OTHER.save(str(path))
    assert ClusterKey.load(str(path)) == KEY


def test_no_secret_gets_into_a_log_by_accident() -> None:
    assert repr(KEY) == "ClusterKey()"
    assert KEY.fingerprint not in KEY.secret.hex()
    assert KEY.fingerprint != OTHER.fingerprint


def test_what_is_derived_from_a_key_stays_the_same_in_every_release() -> None:
    # A change here cuts a cluster in two in the middle of an upgrade.
    assert KEY.data_key.hex() == DERIVED["data"]
    assert KEY.curve_server()[0].decode() == DERIVED["server"]
    assert KEY.curve_client()[0].decode() == DERIVED["client"]
    assert KEY.fingerprint == DERIVED["fingerprint"]
    parts = [KEY.data_key, *KEY.curve_server(), *KEY.curve_client(), KEY.secret]
    assert len(set(parts)) == len(parts)


LINE = KEY.to_text().splitlines()[1]
BODY = LINE.partition(":")[2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no key"),
        ("# only a comment\n\n", "holds no key"),
        ("hunter2\n", "does not hold a key that begins with"),
        (BODY, "does not hold a key that begins with"),
        (LINE.replace("-1:", "-2:"), "does not hold a key that begins with"),
        (f"{LINE}\n{LINE}\n", "more than one line"),
        (LINE[:-8], "cut short"),
        (LINE[:-1], "characters that do not belong there"),
        (LINE + "AAAA", "cut short or has too much"),
        (LINE.replace(BODY[10], "é", 1), "does not"),
        (LINE.replace(BODY, "é" * len(BODY)), "characters that do not belong there"),
        (LINE.replace(BODY, BODY[:5] + " " + BODY[6:]), "characters that do not belong there"),
        (LINE.replace(BODY, base64.b64encode(bytes(range(100, 136))).decode()), "was altered"),
        (LINE.replace(BODY, base64.b64encode(bytes(36)).decode()), "was altered"),
        (b"\xff\xfe" + LINE.encode(), "utf-8"),
        (b"\x00" * 64, "does not hold a key"),
        (b"x" * 5000, "larger than 4096 bytes"),
    ],
)
def test_a_malformed_key_is_refused_with_the_file_the_fault_and_what_to_do(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    path = tmp_path / "pool.key"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o600)
    with pytest.raises(SecurityError) as caught:
        ClusterKey.load(str(path))
    text = str(caught.value)
    assert text.startswith(f"key file {path}: ")
    assert words in text
    assert "hicache-mooncake keygen" in text
    assert BODY[:12] not in text


def test_lines_that_say_what_a_file_is_are_passed_over(tmp_path: Path) -> None:
    assert ClusterKey.from_text(f"# the key of cluster prod\n\n  {LINE}  \r\n# end\n") == KEY


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o666, 0o777, 0o602])
def test_a_key_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "pool.key"
    KEY.save(str(path))
    path.chmod(mode)
    with pytest.raises(SecurityError, match=rf"mode {mode:04o}\): chmod 600 {re.escape(str(path))}"):
        ClusterKey.load(str(path))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_key_may_be_read_by_the_group_of_a_service(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "pool.key"
    KEY.save(str(path))
    path.chmod(mode)
    assert ClusterKey.load(str(path)) == KEY


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"there is none\. Make one with `hicache-mooncake keygen FILE`"):
        ClusterKey.load(str(tmp_path / "none"))
    with pytest.raises(SecurityError, match="is no file"):
        ClusterKey.load(str(tmp_path))
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SecurityError, match="is no file"):
        ClusterKey.load(str(tmp_path / "fifo"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.key"
    KEY.save(str(path))
    os.chown(path, 12345, 12345)
    with pytest.raises(SecurityError, match="belongs to user 12345: chown it"):
        ClusterKey.load(str(path))


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hicache_mooncake.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_keygen_says_what_to_do_with_the_file_and_refuses_to_overwrite_it(tmp_path: Path) -> None:
    path = tmp_path / "pool.key"
    done = cli("keygen", str(path))
    assert done.returncode == 0, done.stderr
    key = ClusterKey.load(str(path))
    for words in (str(path), key.fingerprint, "Copy it to every host", "--key-file", "HICACHE_MOONCAKE_KEY_FILE"):
        assert words in done.stdout
    assert path.read_text().splitlines()[1] not in done.stdout
    again = cli("keygen", str(path))
    assert again.returncode == 1
    assert "exists and is left as it is" in again.stderr
    assert ClusterKey.load(str(path)) == key
    nowhere = cli("keygen", str(tmp_path / "none" / "pool.key"))
    assert nowhere.returncode == 1
    assert nowhere.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("node", "--dram", "16mb"), ("master", "--listen", "127.0.0.1:0")])
def test_a_key_that_cannot_be_used_ends_the_start_with_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "pool.key"
    KEY.save(str(path))
    path.chmod(0o644)
    socket_option = ("--socket", str(tmp_path / "n.sock")) if command[0] == "node" else ()
    done = cli(*command, *socket_option, "--key-file", str(path))
    assert done.returncode in (1, 2)
    assert f"chmod 600 {path}" in done.stderr
    assert "Traceback" not in done.stderr


# --------------------------------------------------------------------------- masters: CURVE


class StolenServerKey(ClusterKey):
    """Knows the masters' public key, as somebody who once was a master's operator may, but is no member."""

    def curve_client(self) -> tuple[bytes, bytes]:
        return OTHER.curve_client()


@contextmanager
def guarded_server(key: ClusterKey | None) -> Iterator[tuple[str, zmq.Socket[bytes], security.Doorkeeper | None]]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    doorkeeper = secure_server(router, key, context)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield f"tcp://127.0.0.1:{port}", router, doorkeeper
    finally:
        router.close()
        if doorkeeper is not None:
            doorkeeper.close()
        context.term()


@contextmanager
def client(address: str, key: ClusterKey | None) -> Iterator[tuple[zmq.Socket[bytes], HandshakeWatch]]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    secure_client(dealer, key)
    watch = HandshakeWatch(dealer)
    dealer.connect(address)
    try:
        yield dealer, watch
    finally:
        watch.close()
        dealer.close()
        context.term()


def turned_away(watch: HandshakeWatch) -> bool:
    end = soon()
    while time.monotonic() < end:
        if watch.failed():
            return True
        time.sleep(0.02)
    return False


def test_members_reach_a_master() -> None:
    with guarded_server(KEY) as (address, router, doorkeeper), client(address, KEY) as (dealer, watch):
        dealer.send(b"who is there")
        assert router.poll(10_000)
        peer, body = router.recv_multipart()
        router.send_multipart([peer, body + b"?"])
        assert dealer.poll(10_000)
        assert dealer.recv() == b"who is there?"
        assert watch.failed() == 0
        assert doorkeeper is not None
        assert (doorkeeper.admitted, doorkeeper.refused) == (1, 0)


@pytest.mark.parametrize("key", [None, OTHER, StolenServerKey(KEY.secret)], ids=["none", "another", "only the server's"])
def test_a_stranger_reaches_no_master(key: ClusterKey | None) -> None:
    with guarded_server(KEY) as (address, router, doorkeeper), client(address, key) as (dealer, watch):
        dealer.send(p.encode(p.ClusterStatus()))
        assert turned_away(watch)
        with client(address, KEY) as (member, _):  # one that comes later is served: by then the stranger's had its chance
            member.send(b"member")
            assert router.poll(10_000)
            assert router.recv_multipart()[1] == b"member"
        assert not router.poll(0)
        assert doorkeeper is not None
        assert doorkeeper.admitted == 1


def test_members_of_a_cluster_with_a_key_do_not_speak_to_a_master_without() -> None:
    with guarded_server(None) as (address, router, _), client(address, KEY) as (dealer, watch):
        dealer.send(b"secret")
        assert turned_away(watch)
        assert not router.poll(0)


def test_garbage_on_a_masters_port_does_not_keep_members_out() -> None:
    with guarded_server(KEY) as (address, router, _):
        host, port = address.removeprefix("tcp://").split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(os.urandom(4096))
        with client(address, KEY) as (member, _):
            member.send(b"member")
            assert router.poll(10_000)
            assert router.recv_multipart()[1] == b"member"
        for stranger in strangers:
            stranger.close()


def test_the_tools_tell_another_key_from_no_master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with guarded_server(KEY) as (address, _, _):
        address = address.removeprefix("tcp://")
        with pytest.raises(Unreachable, match=f"turns us away.*the key {OTHER.fingerprint} was offered"):
            ask_master(address, key=OTHER)
        with pytest.raises(Unreachable, match=r"turns us away.*no key was offered: set key_file"):
            ask_master(address)
        OTHER.save(str(tmp_path / "other.key"))
        settings, _ = load_settings({}, {}, {"master": address, "key_file": str(tmp_path / "other.key")})
        (check,) = doctor.masters(settings)
        assert check.status == "fail"
        assert OTHER.fingerprint in check.found
        assert "fingerprints" in check.advice


def test_doctor_looks_at_the_key(tmp_path: Path) -> None:
    path = tmp_path / "pool.key"
    KEY.save(str(path))

    def found(**explicit: object) -> doctor.Check:
        return doctor.key(load_settings({}, {}, explicit)[0])

    assert found().status == "ok"
    assert found(allow_unauthenticated=True).status == "warn"
    assert found(key_file=str(path)).status == "ok"
    assert KEY.fingerprint in found(key_file=str(path)).found
    path.chmod(0o644)
    assert found(key_file=str(path)).status == "fail"
    assert found(key_file=str(path), node="external").status == "warn"
    assert doctor.masters(load_settings({}, {}, {"key_file": str(path), "master": "localhost"})[0])[0].status == "skipped"


# --------------------------------------------------------------------------- data ports: proof


NODE = "node-a"
PAGES = b"h" * 32


@contextmanager
def holder(
    data_key: bytes, name: str = NODE, seconds: float = 10.0
) -> Iterator[tuple[p.Peer, list[str | BaseException | p.Message]]]:
    """A data port that takes one connection after another and answers Fetches; and what came of each, in order."""
    listener = tcp.listen("127.0.0.1:0")
    said: list[str | BaseException | p.Message] = []

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            try:
                tcp.prepare(sock)
                said.append(tcp.accept_proof(sock, data_key, name, soon(seconds)))
                while True:
                    fetch = tcp.receive_message(sock, tcp.request_decoder, soon())
                    said.append(fetch)
                    tcp.send_message(sock, p.FetchReply(name, b"i" * 16, bytes([p.MISS]), [0], id=fetch.id))
            except (OSError, p.ProtocolError) as error:
                said.append(error)
            finally:
                sock.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield p.Peer(name, b"i" * 16, *listener.getsockname()[:2]), said
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


def fetch(number: int = 1) -> p.Fetch:
    return p.Fetch(p.PROTOCOL_MAX, "1:m:0", b"n" * 16, PAGES, 64, id=number)


def raw(peer: p.Peer) -> socket.socket:
    sock = socket.create_connection((peer.host, peer.port), timeout=10)
    tcp.prepare(sock)
    return sock


def refusal(sock: socket.socket) -> str:
    """The reason with which the other side ends a connection; fails when it says anything else, or goes on."""
    answer = tcp.receive_message(sock, FROM_DATA, soon())
    assert isinstance(answer, p.Refused), answer
    with pytest.raises(ConnectionError):
        tcp.receive_message(sock, FROM_DATA, soon())
    sock.close()
    return answer.reason


def test_a_member_is_served() -> None:
    with holder(KEY.data_key) as (peer, said):
        connection = tcp.PeerConnection(peer, soon(), KEY.data_key, "7:model:0")
        for number in (1, 2):
            connection.request(fetch(number), soon())
            assert connection.reply(soon()).id == number
        connection.close()
        assert said[:3] == ["7:model:0", fetch(1), fetch(2)]


def test_without_a_key_the_wire_is_as_it_was() -> None:
    with holder(b"") as (peer, said):
        connection = tcp.PeerConnection(peer, soon())
        connection.request(fetch(), soon())
        assert connection.reply(soon()).node == NODE
        connection.close()
        assert said[:2] == ["", fetch()]


STRANGERS: dict[str, Callable[[], list[p.Message]]] = {
    "asks for pages": lambda: [fetch()],
    "gives pages": lambda: [p.Push(p.PROTOCOL_MAX, "x", b"n" * 16, b"", PAGES, 64, [0])],
    "proves before it was asked": lambda: [p.Proof(b"", bytes(32))],
    "proves with nothing": lambda: [p.Prove(2, "x", security.new_nonce()), p.Proof(b"", b"")],
    "guesses": lambda: [p.Prove(2, "x", security.new_nonce()), p.Proof(b"", os.urandom(32))],
    "skips the proof": lambda: [p.Prove(2, "x", security.new_nonce()), fetch()],
    "asks twice": lambda: [p.Prove(2, "x", security.new_nonce())] * 2,
    "sends no nonce": lambda: [p.Prove(2, "x", b"")],
    "sends a short nonce": lambda: [p.Prove(2, "x", b"n")],
    "sends a long nonce": lambda: [p.Prove(2, "x", b"n" * 33)],
    "sends a long name": lambda: [p.Prove(2, "x" * 5000, security.new_nonce())],
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_is_refused_and_gets_nothing(what: str) -> None:
    with holder(KEY.data_key) as (peer, said):
        sock = raw(peer)
        messages = STRANGERS[what]()
        for number, message in enumerate(messages):
            tcp.send_message(sock, message)
            if number + 1 < len(messages):
                assert isinstance(tcp.receive_message(sock, FROM_DATA, soon()), p.Proof)
        assert refusal(sock)
        assert [type(item) for item in said] == [p.ProtocolError]


def test_a_stranger_that_proves_nothing_is_told_what_is_missing() -> None:
    with holder(KEY.data_key) as (peer, _):
        connection = tcp.PeerConnection(peer, soon())
        connection.request(fetch(), soon())
        with pytest.raises(p.ProtocolError, match=f"node {NODE} refused: this cluster has a key.*set key_file"):
            connection.reply(soon())
        connection.close()


def test_another_key_is_noticed_by_the_reader_first_and_no_proof_of_its_own_is_given_away() -> None:
    with holder(KEY.data_key) as (peer, said), pytest.raises(p.ProtocolError, match=f"did not prove that it is node {NODE}"):
        tcp.PeerConnection(peer, soon(), OTHER.data_key, "1:m:0")
    assert [type(item) for item in said] == [ConnectionError]


def test_the_holder_checks_too_and_does_not_rely_on_the_reader() -> None:
    with holder(KEY.data_key) as (peer, said):
        sock = raw(peer)
        nonce = security.new_nonce()
        tcp.send_message(sock, p.Prove(2, "x", nonce))
        answer = tcp.receive_message(sock, FROM_DATA, soon())
        assert isinstance(answer, p.Proof)
        mac = security.proof(OTHER.data_key, security.READER, nonce, answer.nonce, "x", NODE)
        tcp.send_message(sock, p.Proof(b"", mac))
        assert "did not prove that it has this cluster's key" in refusal(sock)
        assert [type(item) for item in said] == [p.ProtocolError]


def recorded_handshake(peer: p.Peer) -> list[p.Message]:
    """What a member sends when it proves itself, as somebody on the network sees it."""
    seen: list[p.Message] = []
    listener = tcp.listen("127.0.0.1:0")

    def relay() -> None:
        reader, _ = listener.accept()
        tcp.prepare(reader)
        onward = raw(peer)
        seen.append(tcp.receive_message(reader, tcp.request_decoder, soon()))
        tcp.send_message(onward, seen[-1])
        tcp.send_message(reader, tcp.receive_message(onward, FROM_DATA, soon()))
        seen.append(tcp.receive_message(reader, tcp.request_decoder, soon()))
        tcp.send_message(onward, seen[-1])
        reader.close()
        onward.close()

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    between = p.Peer(peer.node, peer.incarnation, *listener.getsockname()[:2])
    tcp.PeerConnection(between, soon(), KEY.data_key, "7:model:0").close()
    thread.join(10)
    listener.close()
    assert len(seen) == 2
    return seen


def test_a_proof_that_was_recorded_is_worth_nothing_later() -> None:
    with holder(KEY.data_key) as (peer, said):
        prove, answer = recorded_handshake(peer)
        sock = raw(peer)
        tcp.send_message(sock, prove)
        assert isinstance(tcp.receive_message(sock, FROM_DATA, soon()), p.Proof)
        tcp.send_message(sock, answer)
        assert "did not prove" in refusal(sock)
        assert said[0] == "7:model:0"  # that was the member
        assert isinstance(said[-1], p.ProtocolError)


def test_the_holders_own_proof_sent_back_to_it_proves_nothing() -> None:
    with holder(KEY.data_key) as (peer, _):
        sock = raw(peer)
        tcp.send_message(sock, p.Prove(2, "x", security.new_nonce()))
        answer = tcp.receive_message(sock, FROM_DATA, soon())
        assert isinstance(answer, p.Proof)
        tcp.send_message(sock, p.Proof(b"", answer.mac))
        assert "did not prove" in refusal(sock)


def test_a_holder_does_not_sign_for_another_of_its_connections() -> None:
    """A stranger lets the holder itself sign, on a second connection, what the first one asks for."""
    with holder(KEY.data_key) as (peer, said):
        first, second = raw(peer), raw(peer)
        nonce = security.new_nonce()
        tcp.send_message(first, p.Prove(2, "x", nonce))
        asked = tcp.receive_message(first, FROM_DATA, soon())
        assert isinstance(asked, p.Proof)
        first.close()  # the port of this test serves one after another
        tcp.send_message(second, p.Prove(2, "x", asked.nonce))
        signed = tcp.receive_message(second, FROM_DATA, soon())
        assert isinstance(signed, p.Proof)
        tcp.send_message(second, p.Proof(b"", signed.mac))
        assert "did not prove" in refusal(second)
        expected = security.proof(KEY.data_key, security.READER, nonce, asked.nonce, "x", NODE)
        assert signed.mac != expected
        assert all(isinstance(item, BaseException) for item in said)


def test_a_proof_of_one_node_does_not_serve_for_another() -> None:
    with holder(KEY.data_key, name="node-b") as (peer, said):
        wanted = p.Peer(NODE, b"i" * 16, peer.host, peer.port)
        with pytest.raises(p.ProtocolError, match="did not prove that it is node node-a of this cluster"):
            tcp.PeerConnection(wanted, soon(), KEY.data_key, "1:m:0")
    assert isinstance(said[0], ConnectionError)


@pytest.mark.parametrize(
    "answer",
    [
        p.Proof(b"", b""),
        p.Proof(bytes(32), bytes(32)),
        p.Proof(b"n", os.urandom(32)),
        p.Refused("go away"),
        p.FetchReply("x", b"i", b"", []),
    ],
    ids=["empty", "zeros", "short nonce", "refused", "a reply"],
)
def test_a_reader_believes_no_node_that_does_not_prove_itself(answer: p.Message) -> None:
    listener = tcp.listen("127.0.0.1:0")
    after: list[bytes] = []

    def impostor() -> None:
        sock, _ = listener.accept()
        tcp.prepare(sock)
        tcp.receive_message(sock, tcp.request_decoder, soon())
        tcp.send_message(sock, answer)
        after.append(sock.recv(4096))
        sock.close()

    thread = threading.Thread(target=impostor, daemon=True)
    thread.start()
    peer = p.Peer(NODE, b"i" * 16, *listener.getsockname()[:2])
    with pytest.raises(p.ProtocolError):
        tcp.PeerConnection(peer, soon(), KEY.data_key, "1:m:0")
    thread.join(10)
    listener.close()
    assert after == [b""]  # not a byte more, and the connection is closed


HEADER = struct.Struct("<I")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x01",
        HEADER.pack(40) + b"\x00" * 39,
        HEADER.pack(0),
        HEADER.pack(5) + b"hello",
        HEADER.pack(4097),
        HEADER.pack(0xFFFFFFFF) + b"x" * 100,
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + bytes(range(256)),
    ],
    ids=["nothing", "a byte", "one short", "empty", "no message", "too long", "4 GiB", "http", "tls"],
)
def test_garbage_and_handshakes_that_break_off_end_the_connection_and_nothing_else(sent: bytes) -> None:
    with holder(KEY.data_key) as (peer, said):
        sock = raw(peer)
        sock.sendall(sent)
        with suppress(OSError):  # it may be gone already
            sock.shutdown(socket.SHUT_WR)
        sock.settimeout(10)
        with suppress(ConnectionError):  # of the bytes that nobody read
            while sock.recv(4096):
                pass
        sock.close()
        tcp.PeerConnection(peer, soon(), KEY.data_key, "after").close()
    assert isinstance(said[0], ConnectionError | p.ProtocolError)
    assert said[1] == "after"


def test_random_bytes_never_pass_for_a_member() -> None:
    with holder(KEY.data_key) as (peer, said):
        for size in range(1, 40):
            sock = raw(peer)
            sock.sendall(HEADER.pack(size) + os.urandom(size))
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while sock.recv(4096):
                    pass
            sock.close()
    assert len(said) == 39
    assert all(isinstance(item, ConnectionError | p.ProtocolError) for item in said)


def test_a_stranger_that_drips_bytes_is_cut_off_at_the_deadline() -> None:
    with holder(KEY.data_key, seconds=0.3) as (peer, said):
        sock = raw(peer)
        sock.sendall(HEADER.pack(4000))
        with suppress(ConnectionError):
            for _ in range(4000):  # each byte comes well before a wait of its own would end
                if said:
                    break
                sock.sendall(b"x")
                time.sleep(0.02)
        sock.close()
        assert [type(item) for item in said] == [TimeoutError]


def test_a_stranger_that_says_nothing_after_the_first_message_is_cut_off_too() -> None:
    with holder(KEY.data_key, seconds=0.3) as (peer, said):
        sock = raw(peer)
        tcp.send_message(sock, p.Prove(2, "x", security.new_nonce()))
        assert isinstance(tcp.receive_message(sock, FROM_DATA, soon()), p.Proof)
        with pytest.raises(ConnectionError):
            tcp.receive_message(sock, FROM_DATA, soon())
        sock.close()
        assert [type(item) for item in said] == [TimeoutError]


def test_a_node_that_does_not_answer_the_handshake_costs_its_reader_no_more_than_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(TimeoutError):
        tcp.PeerConnection(p.Peer(NODE, b"i" * 16, *mute.getsockname()[:2]), soon(0.3), KEY.data_key, "1:m:0")


def test_a_node_without_a_key_is_named_when_it_ends_the_handshake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def keyless() -> None:
            sock, _ = listener.accept()
            tcp.prepare(sock)
            tcp.receive_message(sock, tcp.request_decoder, soon())
            sock.close()

        thread = threading.Thread(target=keyless, daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match=f"node {NODE} broke off instead of proving itself"):
            tcp.PeerConnection(p.Peer(NODE, b"i" * 16, *listener.getsockname()[:2]), soon(), KEY.data_key, "1:m:0")
        thread.join(10)
