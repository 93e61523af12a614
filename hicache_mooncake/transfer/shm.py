"""Between processes of one host: whoever asks copies, in one pass, from or to the peer's memory.

Memory that is a mapping of a descriptor is mapped here too: the descriptor comes over the channel (SCM_RIGHTS) when it is
learned of. Other memory is reached by process_vm_readv and process_vm_writev, where the kernel's ptrace rules allow it.

Since the copy is done by the other process, `Link.close` asks it to stop and waits for its answer: each end shuts its side of
the channel down when it has stopped copying. A process that dies does so too, as the kernel takes its memory before its files.
A peer that is stopped (SIGSTOP, a frozen cgroup) answers nothing, and might be in the middle of a copy: then the fence fails.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from fcntl import F_GETFL, fcntl
from typing import ClassVar

from hicache_mooncake.transfer.shm_copy import Copier
from hicache_mooncake.transfer.shm_link import FENCE_S, MAPPED, MAX_REGIONS, PROCESS, TOKEN, ShmLink
from hicache_mooncake.transfer.transport import Extents, Link, Transport, TransportError, TransportOptions

_HELLO = b"hicache-mooncake shm 1\n"
_UCRED = struct.Struct("@iII")
_MAX_LINKS = 1024


class _Own:
    """A stretch that is registered here."""

    def __init__(self, number: int, address: int, length: int, fd: int, fd_offset: int) -> None:
        self.id, self.address, self.length, self.fd, self.fd_offset = number, address, length, fd, fd_offset


class ShmTransport(Transport):
    """`TransportOptions.copy_threads` threads copy large batches beside whoever waits for them; 0: one."""

    scheme: ClassVar[str] = "shm"
    local_only: ClassVar[bool] = True

    def __init__(self, options: TransportOptions) -> None:
        self._lock = threading.Lock()
        self.extents = Extents()
        """What is registered here."""
        self._own: dict[int, _Own] = {}
        self._links: set[ShmLink] = set()
        self._next_id = int.from_bytes(os.urandom(6), "little")
        self._closed = False
        self.copier = Copier(max(1, options.copy_threads))

    def register(self, address: int, length: int, fd: int = -1, fd_offset: int = 0) -> bytes:
        if length <= 0:
            raise TransportError("memory", f"a registration of {length} bytes: at least one is needed")
        if fd >= 0:
            _check_descriptor(fd, length, fd_offset)
        former = None
        with self._lock:
            self._check_open()
            if len(self._own) >= MAX_REGIONS:
                raise TransportError("memory", f"{MAX_REGIONS} stretches of memory are registered: register larger ones")
            self._next_id += 1
            own = _Own(self._next_id, address, length, fd, fd_offset)
            token = TOKEN.pack(MAPPED if fd >= 0 else PROCESS, own.id)
            self.extents.add(address, length, token)
            former = next((old for old in self._own.values() if old.address == address), None)
            if former is not None:
                del self._own[former.id]
            self._own[own.id] = own
        if former is not None:
            self._revoke(former)
        return token

    def unregister(self, address: int) -> None:
        """Raises TransportError when a peer has not confirmed it: the links to such peers are ended then, and the memory must
        not be used again until those processes are gone."""
        with self._lock:
            own = next((own for own in self._own.values() if own.address == address), None)
            if own is None:
                return
            del self._own[own.id]
            self.extents.remove(address)
        self._revoke(own)

    def _revoke(self, own: _Own) -> None:
        with self._lock:
            links = list(self._links)
        until = time.monotonic() + FENCE_S
        asked = [link for link in links if link.ask_to_forget(own.id)]
        silent = [link for link in asked if not link.forgotten(own.id, until)]
        for link in silent:
            link.stop("peer", "it did not confirm that it has forgotten memory that is not registered any more")
        if silent:
            raise TransportError(
                "peer",
                f"processes {', '.join(str(link.pid) for link in silent)} did not confirm within {FENCE_S:g} s that they "
                f"forgot {own.length} bytes at {own.address:#x}: are they stopped? Do not use it before they have ended",
            )

    def connect(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        return self._link(channels, deadline)

    def accept(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        return self._link(channels, deadline)

    def _link(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        try:
            if len(channels) != 1 or channels[0].family != socket.AF_UNIX:
                raise TransportError("unavailable", "shared memory needs one UNIX socket as its channel")
            pid = _greet(channels[0], deadline)
            link = ShmLink(self, channels[0], pid)
            with self._lock:
                try:
                    self._check_open()
                    if len(self._links) >= _MAX_LINKS:
                        raise TransportError("memory", f"{_MAX_LINKS} links are open: close those that are not needed")
                    link.start()
                except TransportError:
                    link.abandon()
                    raise
                self._links.add(link)
        except BaseException:
            for channel in channels:
                channel.close()
            raise
        return link

    def close(self) -> None:
        """Raises TransportError when a link could not be fenced, after all others are closed."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        until = time.monotonic() + FENCE_S
        for link in links:
            link.stop()
        problem = None
        for link in links:
            try:
                link.close(until)
            except TransportError as error:
                problem = error
        self.copier.close()
        with self._lock:
            for own in self._own.values():
                self.extents.remove(own.address)
            self._own.clear()
        if problem is not None:
            raise problem

    def report(self) -> dict[str, int | float | str | bool]:
        with self._lock:
            links = list(self._links)
            regions = len(self._own)
        return {
            "links": sum(link.alive for link in links),
            "regions": regions,
            "mapped_bytes": sum(link.mapped_bytes for link in links),
            "copied_bytes": sum(link.copied_bytes for link in links),
            "copy_threads": self.copier.threads,
        }

    # ---- for links

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("closed", "this transport was closed")

    def own(self, number: int) -> _Own | None:
        with self._lock:
            return self._own.get(number)

    def forget(self, link: ShmLink) -> None:
        with self._lock:
            self._links.discard(link)


def _check_descriptor(fd: int, length: int, fd_offset: int) -> None:
    try:
        status, flags = os.fstat(fd), fcntl(fd, F_GETFL)
    except OSError as error:
        raise TransportError("memory", f"descriptor {fd} of memory to be registered: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise TransportError("memory", f"descriptor {fd} is of no memory: a memfd or a file of /dev/shm is needed")
    if flags & os.O_ACCMODE != os.O_RDWR:
        raise TransportError("memory", f"descriptor {fd} is not open for reading and writing: open it with O_RDWR")
    if fd_offset < 0 or fd_offset + length > status.st_size:
        raise TransportError(
            "memory", f"{length} bytes from {fd_offset} are not in the {status.st_size} bytes that descriptor {fd} has"
        )


def _greet(channel: socket.socket, deadline: float) -> int:
    """The peer's pid, by what the kernel says of who sent its greeting; 0 where it is in a pid namespace that is not seen here.

    SO_PEERCRED would name who called listen(), which need not be the process that answers."""
    try:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        mine = _UCRED.pack(os.getpid(), os.getuid(), os.getgid())
        channel.sendmsg([_HELLO], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, mine)])
        said, pid = b"", 0
        while len(said) < len(_HELLO):
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
            data, told, _, _ = channel.recvmsg(len(_HELLO) - len(said), socket.CMSG_SPACE(_UCRED.size))
            if not data:
                raise TransportError("peer", "the peer closed the channel instead of greeting")
            said += data
            for level, kind, body in told:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid = _UCRED.unpack(body)[0]
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    except TimeoutError as error:
        raise TransportError("deadline", "the peer did not greet before the deadline") from error
    except OSError as error:
        raise TransportError("peer", f"greeting the peer over its channel: {error.strerror or error}") from error
    if said != _HELLO:
        raise TransportError("peer", f"what is at the other end does not speak this shared memory: it said {said[:32]!r}")
    return pid
