"""Who belongs to a cluster: one secret key in a file, and everything that is derived from it.

* Masters are CURVE servers (ZeroMQ's encryption and authentication, RFC 26) with a key pair derived from the secret; nodes and
  tools are CURVE clients and share one pair. A master lets nobody else in.
* Data ports of nodes: both ends prove that they know a key derived from the secret (`hicache_mooncake.transfer.tcp`).

What the key proves is membership, not which member. Rotating it means a restart of every node and master.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import stat
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

SECRET_BYTES = 32
NONCE_BYTES = 32
HANDSHAKE_S = 5.0
"""How long a stranger may hold a connection without having proved anything."""
MAX_KEY_FILE_BYTES = 4096

_PREFIX = "hicache-mooncake-key-1:"
_CHECK_BYTES = 4
_PERSON = b"hicache-mooncake"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"hicache-mooncake"


class SecurityError(Exception):
    """A key that cannot be used. Says which file, what is wrong with it, and what to do."""


def _digest(secret: bytes, label: bytes, size: int = 32) -> bytes:
    return hashlib.blake2b(label, key=secret, digest_size=size, person=_PERSON).digest()


@dataclass(frozen=True)
class ClusterKey:
    """The secret of one cluster. Immutable, so free to share between threads. Its repr does not show it."""

    secret: bytes = field(repr=False)
    """32 random bytes."""

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"a cluster's key has {SECRET_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def generate(cls) -> ClusterKey:
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def load(cls, path: str) -> ClusterKey:
        """The key in this file, which may be read by its owner and its group only. Raises SecurityError."""
        make = "make one with `hicache-mooncake keygen FILE` and copy it to every host of the cluster"
        try:
            # A FIFO would block at the open, and its status tells that it is none only after that.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise SecurityError(f"key file {path}: there is none. {make[0].upper()}{make[1:]}") from None
        except OSError as error:
            who = f"user {os.geteuid()}"
            raise SecurityError(f"key file {path}: cannot be read by {who} ({error.strerror}): chown it to {who}") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SecurityError(f"key file {path}: is no file. {make[0].upper()}{make[1:]}")
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o027:
                what = "may be read or changed by others than its owner"
                raise SecurityError(f"key file {path}: {what} (mode {mode:04o}): chmod 600 {path}")
            if status.st_uid not in (0, os.geteuid()):
                raise SecurityError(
                    f"key file {path}: belongs to user {status.st_uid}: chown it to user {os.geteuid()} or root"
                )
            try:
                body = os.read(fd, MAX_KEY_FILE_BYTES + 1)
            except OSError as error:
                raise SecurityError(f"key file {path}: cannot be read ({error.strerror})") from None
        finally:
            os.close(fd)
        if len(body) > MAX_KEY_FILE_BYTES:
            raise SecurityError(
                f"key file {path}: is larger than {MAX_KEY_FILE_BYTES} bytes, so no key. {make[0].upper()}{make[1:]}"
            )
        try:
            return cls.from_text(body.decode())
        except ValueError as error:
            raise SecurityError(f"key file {path}: {error}: copy it again, or {make}") from None

    @classmethod
    def from_text(cls, text: str) -> ClusterKey:
        """Reads what `to_text` wrote; lines that begin with # say what the file is. Raises ValueError with what is wrong."""
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if not lines:
            raise ValueError("holds no key")
        if len(lines) > 1:
            raise ValueError("holds more than one line besides its comments")
        if not lines[0].startswith(_PREFIX):
            raise ValueError(f"does not hold a key that begins with {_PREFIX}")
        try:
            blob = base64.b64decode(lines[0].removeprefix(_PREFIX).encode("ascii"), validate=True)
        except (UnicodeEncodeError, binascii.Error):
            raise ValueError("holds a key with characters that do not belong there") from None
        secret, check = blob[:SECRET_BYTES], blob[SECRET_BYTES:]
        if len(blob) != SECRET_BYTES + _CHECK_BYTES:
            raise ValueError("holds a key that was cut short or has too much")
        if not hmac.compare_digest(check, _digest(secret, b"check", _CHECK_BYTES)):
            raise ValueError("holds a key that was altered: its check sum is wrong")
        return cls(secret)

    def to_text(self) -> str:
        body = base64.b64encode(self.secret + _digest(self.secret, b"check", _CHECK_BYTES)).decode()
        return f"# The key of a hicache-mooncake cluster. Who has it is a member: keep it at mode 0600.\n{_PREFIX}{body}\n"

    def save(self, path: str) -> None:
        """Write a new file, mode 0600. Raises FileExistsError where there is one, else OSError; leaves no half of a file."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w") as file:
                os.fchmod(fd, 0o600)
                file.write(self.to_text())
                file.flush()
                os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    # ---- what is derived

    @property
    def fingerprint(self) -> str:
        """Tells keys apart in a log without giving anything away: 8 hex digits."""
        return _digest(self.secret, b"fingerprint", 4).hex()

    @property
    def data_key(self) -> bytes:
        """What proves membership on data ports; engines' movers get it from their node."""
        return _digest(self.secret, b"data")

    def curve_server(self) -> tuple[bytes, bytes]:
        """(public, secret) of the masters, in ZeroMQ's text form."""
        return _curve_pair(_digest(self.secret, b"curve server"))

    def curve_client(self) -> tuple[bytes, bytes]:
        """(public, secret) of everybody who asks a master, in ZeroMQ's text form."""
        return _curve_pair(_digest(self.secret, b"curve client"))


def load_key(path: str) -> ClusterKey | None:
    """The key of a setting `key_file`; None for "". Raises SecurityError."""
    return ClusterKey.load(path) if path else None


def _curve_pair(secret: bytes) -> tuple[bytes, bytes]:
    import zmq
    from zmq.utils import z85

    if not zmq.has("curve"):
        raise SecurityError(
            "this pyzmq was built without CURVE, which a cluster key needs: pip install --force-reinstall pyzmq"
        )
    text = z85.encode(secret)
    return zmq.curve_public(text), text


# --------------------------------------------------------------------------- control plane: ZeroMQ sockets


def secure_client(socket: zmq.Socket[bytes], key: ClusterKey | None) -> None:
    """Before connect: speak to masters of this cluster only, encrypted. Without a key the socket stays as it is."""
    if key is None:
        return
    public, secret = key.curve_client()
    socket.curve_serverkey = key.curve_server()[0]
    socket.curve_publickey = public
    socket.curve_secretkey = secret


class Doorkeeper:
    """Answers ZeroMQ's question whether a client of this context may come in: only with the client key of the cluster.

    One a context: a ZeroMQ authenticator (RFC 27) on a thread of its own. Close it before the context is terminated, and after
    the sockets that it guards.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: bytes) -> None:
        import zmq
        from zmq.utils import z85

        self._allowed = z85.decode(allowed)
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        try:
            self._zap.bind(_ZAP_ENDPOINT)
        except BaseException:
            self._zap.close()
            raise
        self._stop = threading.Event()
        self.admitted = 0
        self.refused = 0
        """Clients that finished the handshake with another key. Others fail in the handshake itself and never come so far."""
        self._thread = threading.Thread(target=self._run, name="doorkeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        import zmq

        with contextlib.suppress(zmq.ContextTerminated):
            while not self._stop.is_set():
                if self._zap.poll(100):
                    self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
        self._zap.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Reply frames of RFC 27 for request frames: version, id, domain, address, identity, mechanism, credentials."""
        version, number, *rest = [*request, b"", b""]
        domain, mechanism, credentials = rest[0], rest[3:4], rest[4:5]
        fine = (
            version == b"1.0"
            and domain == _ZAP_DOMAIN
            and mechanism == [b"CURVE"]
            and credentials
            and hmac.compare_digest(credentials[0], self._allowed)
        )
        if fine:
            self.admitted += 1
            return [b"1.0", number, b"200", b"OK", b"member", b""]
        self.refused += 1
        return [b"1.0", number, b"400", b"not a member of this cluster", b"", b""]


def secure_server(
    socket: zmq.Socket[bytes], key: ClusterKey | None, context: zmq.Context[zmq.Socket[bytes]]
) -> Doorkeeper | None:
    """Before bind: let in only who has the cluster's key. Close what this returns when the socket is closed.

    Without a key the socket stays as it is, open to everybody who reaches it, and the answer is None.
    """
    if key is None:
        return None
    import zmq

    public, secret = key.curve_server()
    doorkeeper = Doorkeeper(context, key.curve_client()[0])
    socket.curve_server = True
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    socket.zap_domain = _ZAP_DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.handshake_ivl = round(HANDSHAKE_S * 1000)
    return doorkeeper


class HandshakeWatch:
    """Counts what ZeroMQ otherwise keeps to itself: handshakes that failed, because the other side has another key, or none
    where this one has one, or speaks something else. On the socket's own thread; close it before the socket.

    A socket whose handshake was refused by the mechanism or by a doorkeeper does not connect again by itself, even when the
    other side is put right: make a new one.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        event = zmq.Event
        self._socket = socket
        self._monitor = socket.get_monitor_socket(
            event.HANDSHAKE_FAILED_NO_DETAIL | event.HANDSHAKE_FAILED_PROTOCOL | event.HANDSHAKE_FAILED_AUTH
        )

    def failed(self) -> int:
        """How many since the last call. One may be a peer that was just killed; several in a row are another key."""
        import zmq

        count = 0
        with contextlib.suppress(zmq.Again):
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                count += 1
        return count

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()


# --------------------------------------------------------------------------- data plane: who is at the other end

READER, HOLDER = b"reader", b"holder"
"""Roles: who connects, and who listens. Each proves its own, so that nothing that one said serves as the other's proof."""


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def proof(data_key: bytes, role: bytes, reader_nonce: bytes, holder_nonce: bytes, requester: str, holder: str) -> bytes:
    """HMAC-SHA256 over everything that names this one connection, each field framed by its length."""
    fields = (b"data 1", role, reader_nonce, holder_nonce, requester.encode(), holder.encode())
    framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hmac.digest(data_key, framed, "sha256")


def same_proof(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)
