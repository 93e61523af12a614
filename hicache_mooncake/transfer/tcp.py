"""Pages between nodes over TCP: headers as frames, bodies as raw bytes straight from the segment into the destination.

The reader names pages by key and never by address. A connection carries one request at a time; whoever gives up in mid-body
closes it, which is the fence: nothing that the peer still sends can land anywhere.

In a cluster with a key both ends first prove that they have it: the reader sends Prove with a nonce, the holder answers with a
nonce of its own and the proof over both, and the reader answers with its proof (`hicache_mooncake.security`). Nothing else is
served, and nothing is believed, before that. The bytes that follow are not encrypted, unless the cluster has certificates: then
all of it goes on inside TLS (`hicache_mooncake.transfer.tls`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from hicache_mooncake import protocol as p
from hicache_mooncake import security
from hicache_mooncake.config_values import split_address
from hicache_mooncake.transfer import tls as tls_
from hicache_mooncake.transfer.tls import DataSocket, Tls, TlsSocket

_HEADER = struct.Struct("<I")
_TLS_RECORD, _TLS_HELLO_AT, _TLS_HELLO = b"\x16\x03", 2, 1
"""How a connection under TLS begins, which takes for a length what is none."""
_MAX_HEADER_BYTES = 16 << 20
_MAX_STRANGER_BYTES = 4096
"""Of a message from whom nothing has been proved yet."""
_MAX_REQUESTER = 256
_SEND_BYTES = 4 << 20
_MAX_IOV = 512
_REFUSE_S = 0.2
_REBOUND_S = 0.005
"""A wait may end this much after its deadline: setting it anew before each is a system call more."""

fetch_decoder = p.decoder(p.Fetch)
reply_decoder = p.decoder(p.FetchReply | p.Refused)
request_decoder = p.decoder(p.ToData)
_proof_decoder = p.decoder(p.Proof | p.Refused)


def listen(address: str) -> socket.socket:
    """Bind and listen on `host:port`, by IPv4 where a name has both, and by both where it is `[::]`. Raises ValueError for
    another form, OSError as the system says it (address in use)."""
    host, port = split_address(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        sock.bind(where)
        sock.listen(256)
    except OSError:
        sock.close()
        raise
    return sock


def set_timeouts(sock: DataSocket, seconds: float) -> None:
    """Bound each blocking send and receive by the kernel, without Python's poll before every call."""
    seconds = max(seconds, 0.001)
    if isinstance(sock, TlsSocket):
        sock.set_timeouts(seconds)
        return
    value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def prepare(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def frame(message: p.Message) -> bytes:
    """As it goes over the wire."""
    body = p.encode(message)
    return _HEADER.pack(len(body)) + body


def send_message(sock: DataSocket, message: p.Message) -> None:
    try:
        sock.sendall(frame(message))
    except BlockingIOError as error:
        raise TimeoutError("peer does not read") from error


def receive_message(
    sock: DataSocket, decoder: msgspec.msgpack.Decoder[Any], deadline: float, limit: int = _MAX_HEADER_BYTES
) -> Any:
    """Raises ConnectionError, TimeoutError, or ProtocolError for what does not decode or is longer than `limit` bytes."""
    reading = incoming(decoder, limit)
    wanted = next(reading)
    try:
        while True:
            wanted[:] = _receive_exactly(sock, len(wanted), deadline)
            wanted = next(reading)
    except StopIteration as read:
        return read.value


def incoming(decoder: msgspec.msgpack.Decoder[Any], limit: int = _MAX_HEADER_BYTES) -> Generator[memoryview, None, Any]:
    """The same without I/O: yields the buffers that the next bytes belong into, to be filled whole, and returns the message."""
    header = bytearray(_HEADER.size)
    yield memoryview(header)
    (length,) = _HEADER.unpack(header)
    begun = bytearray()
    if header[:2] == _TLS_RECORD and length >= _TLS_HELLO_AT:
        begun = bytearray(_TLS_HELLO_AT)
        yield memoryview(begun)
        if begun[-1] == _TLS_HELLO:  # no message: there an array begins with its name
            what = "the other end speaks TLS, and this node does not: set tls_cert, tls_key and tls_ca here, too"
            raise p.ProtocolError(what)
    if length > limit:
        raise p.ProtocolError(f"header of {length} bytes announced: the limit is {limit}")
    body = begun + bytearray(length - len(begun))
    if length > len(begun):
        yield memoryview(body)[len(begun) :]
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise p.ProtocolError(f"message not understood: {error}") from error


def _receive_exactly(sock: DataSocket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        set_timeouts(sock, left)
        try:
            part = sock.recv(size - len(data), socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("peer does not send") from error
        if not part:
            raise ConnectionError("peer closed the connection")
        data += part
    return bytes(data)


def send_bodies(sock: DataSocket, bodies: Sequence[memoryview], deadline: float) -> None:
    """Send every body whole, gathered into few system calls. Raises ConnectionError or TimeoutError."""
    queue: list[memoryview] = list(bodies)
    first = 0
    while first < len(queue):
        size, last = 0, first
        while last < len(queue) and last - first < _MAX_IOV and size < _SEND_BYTES:
            size += len(queue[last])
            last += 1
        if time.monotonic() > deadline:
            raise TimeoutError("peer reads too slowly")
        try:
            sent = sock.sendmsg(queue[first:last])
        except BlockingIOError as error:
            raise TimeoutError("peer does not read") from error
        while first < last and sent >= len(queue[first]):
            sent -= len(queue[first])
            first += 1
        if sent:
            queue[first] = queue[first][sent:]


Receive = Callable[[list[memoryview]], int]
"""Fills buffers with what comes, until they are full or the peer has closed; says how many bytes."""


def receiver(sock: DataSocket, deadline: float) -> Receive:
    """Receives pieces of bodies; each wait ends at the deadline with TimeoutError."""
    bound_at = 0.0

    def receive(views: list[memoryview]) -> int:
        nonlocal bound_at
        now = time.monotonic()
        if now - bound_at > _REBOUND_S or now > deadline:
            _bound(sock, deadline)
            bound_at = now
        try:
            if len(views) == 1:
                return sock.recv_into(views[0], 0, socket.MSG_WAITALL)
            return sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as error:
            raise TimeoutError("peer stopped sending") from error

    return receive


def accept_proof(sock: DataSocket, data_key: bytes, name: str, deadline: float) -> str:
    """The listening side, first of all on a new connection: who has connected, once proved to be of this cluster.

    `name` is this node's. Without a key nothing is read, and the answer is "". Whoever proves nothing is told so with Refused,
    as far as that can be sent at once, and ProtocolError is raised; ConnectionError and TimeoutError as ever, at the deadline
    however slowly a stranger sends. After any exception the connection must be closed.
    """
    if not data_key:
        return ""
    try:
        prove = receive_message(sock, request_decoder, deadline, _MAX_STRANGER_BYTES)
        if not isinstance(prove, p.Prove):
            raise p.ProtocolError("this cluster has a key, and none was proved: set key_file on every node")
        if len(prove.nonce) != security.NONCE_BYTES:
            raise p.ProtocolError(f"a nonce of {len(prove.nonce)} bytes: it has {security.NONCE_BYTES}")
        nonce = security.new_nonce()
        said = (prove.nonce, nonce, prove.requester, name)
        set_timeouts(sock, deadline - time.monotonic())
        send_message(sock, p.Proof(nonce, security.proof(data_key, security.HOLDER, *said)))
        answer = receive_message(sock, request_decoder, deadline, _MAX_STRANGER_BYTES)
        expected = security.proof(data_key, security.READER, *said)
        if not isinstance(answer, p.Proof) or not security.same_proof(answer.mac, expected):
            who = repr(prove.requester[:128])
            raise p.ProtocolError(f"{who} did not prove that it has this cluster's key: is its key_file the same?")
    except p.ProtocolError as error:
        refuse(sock, str(error))
        raise
    return prove.requester


def prove(sock: DataSocket, peer: p.Peer, data_key: bytes, requester: str, deadline: float) -> None:
    """The connecting side, first of all on a new connection, where the cluster has a key: proves that `requester` is of it, and
    asks for the proof that the other end is `peer.node`. Raises ProtocolError, ConnectionError (PeerFull, too) and
    TimeoutError; after any exception the connection must be closed.
    """
    mine, requester = security.new_nonce(), requester[:_MAX_REQUESTER]
    _bound(sock, deadline)
    send_message(sock, p.Prove(p.PROTOCOL_MAX, requester, mine))
    try:
        answer = receive_message(sock, _proof_decoder, deadline, _MAX_STRANGER_BYTES)
    except ConnectionError as error:
        raise ConnectionError(f"node {peer.node} broke off instead of proving itself (has it a key_file?)") from error
    if isinstance(answer, p.Refused):
        raise refusal(peer, answer)
    said = (mine, answer.nonce, requester, peer.node)
    expected = security.proof(data_key, security.HOLDER, *said)
    if len(answer.nonce) != security.NONCE_BYTES or not security.same_proof(answer.mac, expected):
        where = f"{peer.host}:{peer.port}"
        raise p.ProtocolError(f"{where} did not prove that it is node {peer.node} of this cluster: is its key_file the same?")
    _bound(sock, deadline)
    send_message(sock, p.Proof(b"", security.proof(data_key, security.READER, *said)))


def _bound(sock: DataSocket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    set_timeouts(sock, left)


def refuse(sock: DataSocket, reason: str, *, full: bool = False) -> None:
    """Tell why, as far as that can be sent at once. Raises nothing."""
    with contextlib.suppress(OSError):
        set_timeouts(sock, _REFUSE_S)
        send_message(sock, p.Refused(reason, full))


class PeerFull(ConnectionError):
    """The node takes no more connections now, and nothing is wrong with it."""


def refusal(peer: p.Peer, said: p.Refused) -> PeerFull | p.ProtocolError:
    text = f"node {peer.node} refused: {said.reason}"
    return PeerFull(text) if said.full else p.ProtocolError(text)


class PeerConnection:
    """A reader's connection to one node's data port. Not thread-safe. After any exception it must be closed."""

    def __init__(
        self, peer: p.Peer, deadline: float, data_key: bytes = b"", requester: str = "", tls: Tls | None = None
    ) -> None:
        """Raises OSError or TimeoutError when the peer cannot be reached before the deadline (`time.monotonic()`), and
        ProtocolError when it does not prove that it is `peer.node` of this cluster, and PeerFull where it says so instead; then
        nothing is left open.

        `data_key` is the cluster's (`Welcome.data_key`), empty where it has none; `requester` says who connects; `tls` is
        what this end shows, in a cluster with certificates.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed before connecting")
        self.peer = peer
        sock = socket.create_connection((peer.host, peer.port), timeout=left)
        self.sock: DataSocket = sock
        try:
            prepare(sock)
            if tls is not None:
                try:
                    self.sock = tls_.connect(tls, sock, deadline)
                except (p.ProtocolError, ConnectionError) as error:
                    raise p.ProtocolError(f"node {peer.node} at {peer.host}:{peer.port}: {error}") from error
            if data_key:
                prove(self.sock, peer, data_key, requester, deadline)
        except BaseException:
            self.sock.close()
            raise

    def request(self, fetch: p.Fetch, deadline: float) -> None:
        self._bound(deadline)
        send_message(self.sock, fetch)

    def reply(self, deadline: float) -> p.FetchReply:
        """The peer's verdicts; bodies follow for LOCAL ones. Raises ProtocolError or PeerFull when the peer refuses."""
        message = receive_message(self.sock, reply_decoder, deadline)
        if isinstance(message, p.Refused):
            raise refusal(self.peer, message)
        assert isinstance(message, p.FetchReply)
        return message

    def _bound(self, deadline: float) -> None:
        _bound(self.sock, deadline)

    def source(self, deadline: float) -> Receive:
        """Receives pieces of bodies; each wait ends at the deadline with TimeoutError."""
        return receiver(self.sock, deadline)

    @property
    def buffered(self) -> bool:
        """Something was received that poll does not see."""
        return isinstance(self.sock, TlsSocket) and self.sock.buffered

    def close(self) -> None:
        self.sock.close()
