"""Frames of msgpack messages over a UNIX stream socket, with file descriptors riding along.

A frame is a little-endian u32 length and the body. Descriptors sent with a frame arrive with its first byte, so they are
in `Wire.take_fds()` once `receive` has returned that frame's message.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from hicache_mooncake.protocol import MAX_FRAME_BYTES, Message, ProtocolError, encode

_HEADER = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_UCRED = struct.Struct("@iII")
_libc = ctypes.PyDLL(None, use_errno=True)
"""Keeps the interpreter lock: for system calls that do not wait."""
_send_now = _libc.send
_send_now.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_send_now.restype = ctypes.c_ssize_t
_receive_now = _libc.recv
_receive_now.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_receive_now.restype = ctypes.c_ssize_t
_yield_core = _libc.sched_yield
MAX_FDS = 250
_READ_BYTES = 1 << 16


class WireClosed(ConnectionError):
    """The peer is gone (or the frame it was sending never ended)."""


class WireTimeout(TimeoutError):
    """The deadline passed. The stream may be in mid-frame: the only thing left to do with it is `close()`."""


_LOOK_S = 0.00015
_MAX_SKIPPED = 64


class Soon:
    """Whether to look for an answer for a moment before sleeping for it.

    Waking a sleeper takes the kernel some 50 us, as long as a node needs for an answer; and beside a busy thread who slept
    waits a whole switch interval (5 ms) for the interpreter lock, which looking does not give up. Looking is bounded to
    150 us, and done ever more seldom while it is in vain. Not with a single core: then the peer needs it. Of one waiter;
    not thread-safe.
    """

    def __init__(self, cores: int | None = None) -> None:
        """`cores`: how many this process may use; by default what the system says."""
        self._off = (len(os.sched_getaffinity(0)) if cores is None else cores) < 2
        self._skipping = 0
        self._skipped = 0

    def look_s(self) -> float:
        """How long to look this time, 0.0 for not at all. After anything else tell what came of it: `paid` or `in_vain`."""
        if self._off:
            return 0.0
        if self._skipped < self._skipping:
            self._skipped += 1
            return 0.0
        return _LOOK_S

    def paid(self) -> None:
        self._skipping = self._skipped = 0

    def in_vain(self) -> None:
        self._skipping, self._skipped = min(_MAX_SKIPPED, 2 * self._skipping + 1), 0


class Wire:
    """One connection. Not thread-safe: one user at a time. Owns its socket and every descriptor not yet taken."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._bounded = False
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._looked: ctypes.Array[ctypes.c_char] | None = None
        """Where what is found by looking lands."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, fds: Iterable[int] = (), deadline: float | None = None) -> None:
        """Raises WireClosed when the peer is gone, WireTimeout when it does not read."""
        body = encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {len(body)} bytes: the limit is {MAX_FRAME_BYTES}")
        data = _HEADER.pack(len(body)) + body
        descriptors = list(fds)
        try:
            sent = 0
            if descriptors:
                self._wait_writable(deadline)
                sent = socket.send_fds(self._sock, [data], descriptors, socket.MSG_DONTWAIT)
            while (sent := sent + self._send_at_once(data[sent:] if sent else data)) < len(data):
                self._wait_writable(deadline)
        except WireTimeout:
            raise
        except BlockingIOError as error:
            raise WireTimeout("peer does not read") from error
        except OSError as error:
            raise WireClosed(str(error)) from error

    def receive(self, decoder: msgspec.msgpack.Decoder[Any], deadline: float | None = None, soon: Soon | None = None) -> Any:
        """The next message. `deadline` is on `time.monotonic()`; None waits for ever. Raises WireClosed, WireTimeout,
        or ProtocolError for a frame that does not decode.

        `soon`: look for it before sleeping. Only for messages that bring no descriptors."""
        buffer = self._buffer
        while True:
            if len(buffer) >= 4:
                (length,) = _HEADER.unpack_from(buffer)
                if length > MAX_FRAME_BYTES:
                    raise ProtocolError(f"frame of {length} bytes announced: the limit is {MAX_FRAME_BYTES}")
                if len(buffer) >= 4 + length:
                    body = bytes(memoryview(buffer)[4 : 4 + length])
                    del buffer[: 4 + length]
                    try:
                        return decoder.decode(body)
                    except msgspec.MsgspecError as error:
                        raise ProtocolError(f"message not understood: {error}") from error
            if soon is not None and self._look(soon):
                continue
            self._bound_receive(deadline)
            try:
                data, fds, _flags, _address = socket.recv_fds(self._sock, _READ_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError as error:
                raise WireTimeout("no answer before the deadline") from error
            except OSError as error:
                raise WireClosed(str(error)) from error
            self._fds.extend(fds)
            if len(self._fds) > MAX_FDS:
                raise ProtocolError(f"{len(self._fds)} descriptors came: a message has at most {MAX_FDS}")
            if not data:
                raise WireClosed("peer closed the connection")
            buffer += data

    def take_fds(self) -> list[int]:
        """Descriptors received so far; the caller owns them now."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        for fd in self.take_fds():
            os.close(fd)
        self._sock.close()

    def finish(self) -> None:
        """Nothing more is sent; the peer sees WireClosed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def wake(self) -> None:
        """Wake a thread that is blocked in `receive` on this connection; it sees WireClosed, and the peer nothing."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def shutdown(self) -> None:
        """Wake a thread that is blocked in `receive` on this connection; it sees WireClosed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send_at_once(self, data: bytes) -> int:
        """What the socket takes without waiting, and without giving up the interpreter lock: beside a busy thread every such
        turn costs a whole switch interval (5 ms), more than a batch of pages takes."""
        sent: int = _send_now(self._sock.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if sent >= 0:
            return sent
        error = ctypes.get_errno()
        if error in (errno.EAGAIN, errno.EINTR):
            return 0
        raise OSError(error, os.strerror(error))

    def _look(self, soon: Soon) -> bool:
        """Whether something came while looking. Keeps the interpreter lock all the while."""
        look_s = soon.look_s()
        if not look_s:
            return False
        if self._looked is None:
            self._looked = ctypes.create_string_buffer(_READ_BYTES)
        fd, until = self._sock.fileno(), time.monotonic() + look_s
        while True:
            got = _receive_now(fd, self._looked, _READ_BYTES, socket.MSG_DONTWAIT)
            if got > 0:
                soon.paid()
                self._buffer += memoryview(self._looked)[:got]
                return True
            if got == 0:
                raise WireClosed("peer closed the connection")
            error = ctypes.get_errno()
            if error not in (errno.EAGAIN, errno.EINTR):
                raise WireClosed(os.strerror(error))
            if time.monotonic() >= until:
                soon.in_vain()
                return False
            _yield_core()

    def _wait_writable(self, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        left = None if deadline is None else _left(deadline) * 1000
        if not poll.poll(left):
            raise WireTimeout("peer does not read")

    def _bound_receive(self, deadline: float | None) -> None:
        """Bound the next wait by the kernel: Python's own timeouts are one more system call, and one more such turn."""
        if deadline is None and not self._bounded:
            return
        left = 0.0 if deadline is None else _left(deadline)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(left), int(left % 1 * 1_000_000)))
        self._bounded = deadline is not None


def _left(deadline: float) -> float:
    """Seconds left, at least a millisecond. Raises WireTimeout when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise WireTimeout("deadline passed")
    return max(left, 0.001)


def connect(path: str, timeout_s: float, *, own_user: bool = False) -> Wire:
    """Connect to a node's UNIX socket. Raises WireClosed (with the reason) or WireTimeout.

    With `own_user` whoever serves it must run as this user or as root: for places where anybody could have put a socket.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(path)
    except TimeoutError as error:
        sock.close()
        raise WireTimeout(f"no store node accepted on {path} within {timeout_s:g} s") from error
    except OSError as error:
        sock.close()
        raise WireClosed(f"no store node on {path}: {error.strerror or error}") from error
    if own_user:
        uid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
        if uid not in (os.getuid(), 0):
            sock.close()
            raise WireClosed(f"{path} is served by user {uid}, not by this one: set `socket` to a place of your own")
    return Wire(sock)
