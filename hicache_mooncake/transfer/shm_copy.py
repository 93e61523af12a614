"""A peer's memory on the same host, as it is copied to and from: mapped, or reached by system call."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Sequence

from hicache_mooncake.transfer.copying import Place
from hicache_mooncake.transfer.mapping import Mapping, keeps_its_size
from hicache_mooncake.transfer.transport import Op, Piece, TransportError

_SHORT = 64 << 10
"""A copy of up to this length keeps the interpreter lock: beside a busy thread getting it back takes far longer."""

_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p
_libc = ctypes.CDLL(None, use_errno=True)
_long_memmove = _libc.memmove
_long_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_long_memmove.restype = ctypes.c_void_p
_process_vm = {"read": _libc.process_vm_readv, "write": _libc.process_vm_writev}
for _function in _process_vm.values():
    _function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    _function.restype = ctypes.c_ssize_t
_file = {"read": _libc.pread, "write": _libc.pwrite}
for _function in _file.values():
    _function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    _function.restype = ctypes.c_ssize_t


class MappedPlace(Place):
    """What the peer could shrink under us is not mapped, since touching it might be SIGBUS, but read and written by system
    call, at some 0.8 of the rate. SGLang's host pools are of that kind."""

    _mapping: Mapping | None = None
    _fd = -1
    """Of what is not mapped."""
    _shift = 0
    """From an address of the peer's to the same byte's here, or in the file."""

    def map(self, fd: int, fd_offset: int) -> None:
        """Map the peer's descriptor, which stays the caller's. Raises TransportError."""
        try:
            sealed = keeps_its_size(fd)  # before we look how long it is
            status = os.fstat(fd)
            if fd_offset < 0 or fd_offset + self.length > status.st_size:
                raise OSError(errno.EINVAL, f"its descriptor has {status.st_size} bytes")
            if not sealed:
                self._fd = os.dup(fd)
                self._shift = fd_offset - self.address
                self.ready = True
                return
            page = max(status.st_blksize, 4096)  # whole pages, of the size that the file has them
            start = fd_offset - fd_offset % page
            end = -(-(fd_offset + self.length) // page) * page
            self._mapping = Mapping(fd, end - start, offset=start, writable=True)
        except OSError as error:
            raise TransportError("memory", f"{self.length} bytes of a peer's memory cannot be mapped: {error}") from error
        self._shift = self._mapping.address + fd_offset - start - self.address
        self.ready = True
        self._mapping.populate_in_background(fd_offset - start + self.length)

    def copy(self, op: Op, pieces: Sequence[Piece]) -> None:
        shift = self._shift
        if self._fd >= 0:
            for here, there, length in pieces:
                self._call(op, here, there + shift, length)
            return
        for here, there, length in pieces:
            move = _memmove if length <= _SHORT else _long_memmove
            if op == "read":
                move(here, there + shift, length)
            else:
                move(there + shift, here, length)

    def _call(self, op: Op, here: int, at: int, length: int) -> None:
        if at + length > os.fstat(self._fd).st_size:  # a write would make it longer again
            raise TransportError("memory", f"{op} of {length} bytes: the peer has made its memory shorter than it said")
        while length:
            moved = _file[op](self._fd, here, length, at)
            if moved <= 0:
                error = os.strerror(ctypes.get_errno()) if moved else "the peer has made its memory shorter than it said"
                raise TransportError("memory", f"{op} of {length} bytes: {error}")
            here, at, length = here + moved, at + moved, length - moved

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessPlace(Place):
    """Reached by process_vm_readv and process_vm_writev."""

    def __init__(self, number: int, address: int, length: int, pid: int, pidfd: int) -> None:
        super().__init__(number, address, length)
        self._pid, self._pidfd = pid, pidfd

    def probe(self) -> None:
        """Try it on a byte. Raises TransportError."""
        if not self._pid:
            raise TransportError(
                "memory",
                "the peer's memory is no memfd, and its process is not seen from here (another pid namespace): share memfds, "
                "let the containers share their pid namespace, or use another transport",
            )
        byte = ctypes.c_ubyte()
        self.copy("read", [Piece(ctypes.addressof(byte), self.address, 1)])
        self.ready = True

    def copy(self, op: Op, pieces: Sequence[Piece]) -> None:
        if process_ended(self._pidfd):  # and its number may be another's by now
            raise TransportError("peer", f"process {self._pid} has ended")
        count, total = len(pieces), sum(piece.length for piece in pieces)
        here = (_IoVec * count)(*[_IoVec(piece.local, piece.length) for piece in pieces])
        there = (_IoVec * count)(*[_IoVec(piece.remote, piece.length) for piece in pieces])
        moved = _process_vm[op](self._pid, ctypes.addressof(here), count, ctypes.addressof(there), count, 0)
        if moved == total:
            return
        error = ctypes.get_errno() if moved < 0 else errno.EFAULT
        if error in (errno.EPERM, errno.ENOSYS):
            raise TransportError(
                "memory",
                f"the peer's memory is no memfd, and process {self._pid} may not be reached into ({os.strerror(error)}): share "
                "memfds, run both as one user, without Yama's ptrace_scope and with process_vm allowed by seccomp, or use "
                "another transport",
            )
        if error == errno.ESRCH:
            raise TransportError("peer", f"process {self._pid} has ended")
        raise TransportError("memory", f"{op} of {total} bytes: {os.strerror(error)}")

    def close(self) -> None:
        """Nothing of it is kept here."""


def unreachable(pid: int, address: int, content: bytes) -> str:
    """Why the memory of process `pid` cannot be reached from here, in which `content` lies at `address`; empty if it can."""
    room = ctypes.create_string_buffer(len(content))
    here, there = (_IoVec(place, len(content)) for place in (ctypes.addressof(room), address))
    moved = _process_vm["read"](pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
    if moved < 0:
        return os.strerror(ctypes.get_errno())
    return "" if room.raw == content else f"process {pid} is another one here"


def process_ended(pidfd: int) -> bool:
    """With all its threads."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
