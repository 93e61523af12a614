"""TLS 1.3 on data ports, both ways: who connects and who listens each show a certificate that the cluster's authority signed.

Host names are not looked at, since nodes move: what counts is the authority, which signs for this cluster and for nobody else.
The proof of the cluster's key goes on inside. There is no way back to plain bytes: an end that has certificates speaks with
nobody who shows none, and tells him so.

`ssl` is imported where the first certificate is met: most clusters have none.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from hicache_mooncake import protocol as p

if TYPE_CHECKING:
    import ssl

MAX_FILE_BYTES = 1 << 20
_RECORD, _HELLO = 0x16, 1
_BELIEVED = b"\x01"
"""What the listening side says first, once it has seen the certificate of who connected."""
_WRITE_BYTES = 256 << 10
"""Written at once: how long a write may go on is looked at in between."""
NOT_PLAIN = (
    "page bytes are encrypted in this cluster, and this connection is not: set tls_cert, tls_key and tls_ca on every node"
)


class TlsError(Exception):
    """Certificates that cannot be used. Says which file, what is wrong with it, and what to do."""


@dataclass(frozen=True)
class Tls:
    """What one end shows and whom it believes, as PEM. Its repr does not show the key. Free to share between threads."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)

    @classmethod
    def load(cls, cert: str, key: str, ca: str) -> Tls | None:
        """From the files that the settings tls_cert, tls_key and tls_ca name; None where none is set. Raises TlsError for what
        peers would refuse: unreadable files, another certificate's key, one that the authority has not signed or that is no
        longer, or not yet, valid."""
        paths = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        missing = [name for name, path in paths.items() if not path]
        if len(missing) == len(paths):
            return None
        if missing:
            raise TlsError(f"tls_cert, tls_key and tls_ca belong together: {' and '.join(missing)} not set")
        held = {name: _read(name, path) for name, path in paths.items()}
        for name, wanted in (("tls_cert", b"CERTIFICATE"), ("tls_key", b"PRIVATE KEY"), ("tls_ca", b"CERTIFICATE")):
            if wanted + b"-----" not in held[name]:
                raise TlsError(f"{name} {paths[name]}: holds no {wanted.decode().lower()} in PEM form (-----BEGIN ...)")
        made = cls(held["tls_cert"], held["tls_key"], held["tls_ca"])
        try:
            made.check()
        except TlsError as error:
            raise TlsError(f"tls_cert {cert}, tls_key {key}, tls_ca {ca}: {error}") from None
        return made

    def check(self) -> float:
        """Shake hands with itself, as peers will. Returns until when the certificate is valid, in seconds since 1970. Raises
        TlsError."""
        import ssl

        one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.server_context.wrap_bio(one, other, server_side=True)
        client = self.client_context.wrap_bio(other, one, server_side=False)
        try:
            for _ in range(4):
                for end in (client, server):
                    with contextlib.suppress(ssl.SSLWantReadError):
                        end.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise TlsError(
                f"peers would refuse this certificate: {error.verify_message}. It must be signed by tls_ca, valid now, and "
                "usable for servers and for clients"
            ) from None
        except ssl.SSLError as error:
            raise TlsError(f"no connection can be made with these: {error.reason or error}") from None
        shown = client.getpeercert()
        assert shown is not None
        return ssl.cert_time_to_seconds(str(shown["notAfter"]))

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        return self._context(server=False)

    @cached_property
    def server_context(self) -> ssl.SSLContext:
        context = self._context(server=True)
        context.num_tickets = 0  # between requests nothing may arrive: it would look like a peer that is out of step
        return context

    def _context(self, *, server: bool) -> ssl.SSLContext:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=self.ca.decode("ascii", "replace"))
        except ssl.SSLError as error:
            raise TlsError(f"tls_ca is no certificate that can be read: {error.reason or error}") from None
        # The module takes certificates from files only. This one has no name and is gone with its descriptor.
        fd = os.memfd_create("tls", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(self.cert.rstrip() + b"\n" + self.key)
            context.load_cert_chain(f"/proc/self/fd/{fd}", password=_no_pass_phrase)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise TlsError("tls_key is not the key of tls_cert: make both anew, or name the right file") from None
            raise TlsError(f"tls_cert or tls_key cannot be read: {error.reason or error}") from None
        finally:
            os.close(fd)
        return context


def _no_pass_phrase() -> str:
    raise TlsError("tls_key is encrypted, and nobody is there to type its pass phrase: store it without one, at mode 0600")


def _read(name: str, path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise TlsError(f"{name} {path}: there is no such file") from None
    except OSError as error:
        who = f"user {os.geteuid()}"
        raise TlsError(f"{name} {path}: cannot be read by {who} ({error.strerror}): chown it to {who}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise TlsError(f"{name} {path}: is no file")
        body = os.read(fd, MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(body) > MAX_FILE_BYTES:
        raise TlsError(f"{name} {path}: is larger than {MAX_FILE_BYTES} bytes, so no certificate or key")
    return body


class TlsSocket:
    """A connection under TLS with those methods of a socket that data connections use, and their meaning: MSG_WAITALL,
    MSG_DONTWAIT, and a look with MSG_PEEK; BlockingIOError after the time that `set_timeouts` gives. Owns the socket. One
    thread at a time, except for `shutdown`. After any exception but BlockingIOError of a MSG_DONTWAIT it must be closed."""

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, *, server_side: bool) -> None:
        """Nothing is sent before `handshake`."""
        import ssl

        self._ssl = ssl
        self._server_side = server_side
        self._timeout_s = 0.0
        try:
            self._sock = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        self._sock.setblocking(False)

    def handshake(self, deadline: float) -> None:
        """Raises ProtocolError with a sentence for the operator when the other end has no TLS or a certificate that this one
        does not believe, ConnectionError and BlockingIOError."""
        if self._server_side:
            self._refuse_plain(deadline)
            self._shake_hands(deadline)
            self._write(memoryview(_BELIEVED), deadline)
            return
        self._shake_hands(deadline)
        # A client is done before the server has seen its certificate.
        self._timeout_s = deadline - time.monotonic()
        if self.recv(1, socket.MSG_WAITALL) != _BELIEVED:
            raise ConnectionError("it broke off after the TLS handshake")

    def _shake_hands(self, deadline: float) -> None:
        while True:
            try:
                return self._sock.do_handshake()
            except self._ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except self._ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
            except self._ssl.SSLCertVerificationError as error:
                what = f"its certificate is refused here: {error.verify_message}. Is it signed by this node's tls_ca?"
                raise p.ProtocolError(what) from None
            except (self._ssl.SSLEOFError, ConnectionError):
                raise ConnectionError(
                    "it broke off in the TLS handshake: has that node tls_cert, tls_key and tls_ca?"
                ) from None
            except self._ssl.SSLError as error:
                raise p.ProtocolError(_sentence(error)) from None

    def _refuse_plain(self, deadline: float) -> None:
        self._wait(select.POLLIN, deadline)
        first = socket.socket.recv(self._sock, 6, socket.MSG_PEEK)
        if first and (first[0] != _RECORD or (len(first) == 6 and first[5] != _HELLO)):
            body = p.encode(p.Refused(NOT_PLAIN))
            with contextlib.suppress(OSError):
                socket.socket.send(self._sock, len(body).to_bytes(4, "little") + body)
                # What it has sent is read first: a socket that is closed over unread bytes takes back what it said.
                socket.socket.recv(self._sock, 1 << 16)
            raise p.ProtocolError("it does not speak TLS, which this cluster needs: set tls_cert, tls_key and tls_ca there")

    # ------------------------------------------------------------------ as a socket

    def fileno(self) -> int:
        return self._sock.fileno()

    def set_timeouts(self, seconds: float) -> None:
        """How long each call may take."""
        self._timeout_s = seconds

    @property
    def buffered(self) -> bool:
        """Something was received and not yet read, which poll does not see."""
        return self._sock.pending() > 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        if flags & socket.MSG_PEEK:
            return b"?" if self.buffered else socket.socket.recv(self._sock, size, flags)
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer, size, flags)])

    def recv_into(self, buffer: bytearray | memoryview, size: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer)[: size or len(buffer)]
        until = time.monotonic() + self._timeout_s
        got = 0
        while got < len(view):
            try:
                came = self._sock.read(len(view) - got, view[got:])
            except self._ssl.SSLWantReadError:
                if got and (flags & socket.MSG_DONTWAIT or not flags & socket.MSG_WAITALL):
                    break
                if flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError("nothing is there") from None
                if not self._ready(select.POLLIN, until):
                    if got:
                        break
                    raise BlockingIOError("peer does not send") from None
                continue
            except self._ssl.SSLError as error:
                raise ConnectionError(_sentence(error)) from None
            if not came:
                break
            got += int(came)
            if not flags & (socket.MSG_WAITALL | socket.MSG_DONTWAIT):
                break
        return got

    def recvmsg_into(self, buffers: Sequence[memoryview], _: int = 0, flags: int = 0) -> tuple[int, list[object], int, None]:
        total = 0
        for buffer in buffers:
            try:
                got = self.recv_into(buffer, 0, flags)
            except BlockingIOError:
                if total:
                    break
                raise
            total += got
            if got < len(buffer):
                break
        return total, [], 0, None

    def sendall(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        until = time.monotonic() + self._timeout_s
        for at in range(0, len(view), _WRITE_BYTES):
            self._write(view[at : at + _WRITE_BYTES], until)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """All of them."""
        for buffer in buffers:
            self.sendall(buffer)
        return sum(len(buffer) for buffer in buffers)

    def _write(self, view: memoryview, until: float) -> None:
        while True:
            try:
                self._sock.write(view)
                return
            except self._ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, until)
            except self._ssl.SSLWantReadError:
                self._wait(select.POLLIN, until)
            except self._ssl.SSLError as error:
                raise ConnectionError(_sentence(error)) from None

    def _ready(self, event: int, until: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))

    def _wait(self, event: int, until: float) -> None:
        if not self._ready(event, until):
            raise BlockingIOError("peer neither sends nor reads")

    def shutdown(self, how: int) -> None:
        """From any thread. Not SSLSocket's own, after which it would go on in the clear."""
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        self._sock.close()


DataSocket = socket.socket | TlsSocket
"""Of a data connection."""


def _sentence(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "wrong version number" in reason or "record layer failure" in reason or "http request" in reason:
        return f"it does not answer in TLS ({reason}): has that node tls_cert, tls_key and tls_ca?"
    if "alert" in reason:
        return f"it refused this node's certificate ({reason}): is it signed by that node's tls_ca, and valid?"
    return f"TLS: {reason}"


def connect(tls: Tls, sock: socket.socket, deadline: float) -> TlsSocket:
    """The side that connected. Owns `sock`, and closes it when it raises: ProtocolError, OSError, TimeoutError."""
    wrapped = TlsSocket(tls.client_context, sock, server_side=False)
    try:
        wrapped.handshake(deadline)
    except BlockingIOError as error:
        wrapped.close()
        raise TimeoutError("no TLS handshake before the deadline") from error
    except BaseException:
        wrapped.close()
        raise
    return wrapped
