"""Between processes of one host: whoever asks copies, in one pass, from or to the peer's memory.

Memory that is a mapping of a descriptor is mapped here too: the descriptor comes over the channel (SCM_RIGHTS) when it is
learned of. One whose size cannot be sealed is copied from and to by pread and pwrite, which tell of an end that has moved.
Other memory is reached by process_vm_readv and process_vm_writev, where the kernel's ptrace rules allow it.

Since the copy is done by the other process, `Link.close` asks it to stop and waits for its answer: each end shuts its side of
the channel down when it has stopped copying. A process that dies does so too, as the kernel takes its memory before its files.
A peer that is stopped (SIGSTOP, a frozen cgroup) answers nothing, and might be in the middle of a copy: then the fence fails.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import time
from fcntl import F_GETFL, fcntl
from typing import ClassVar

from hicache_mooncake.transfer.batches import Batch
from hicache_mooncake.transfer.channel_link import ChannelLink, Memory
from hicache_mooncake.transfer.channel_transport import ChannelTransport, Own
from hicache_mooncake.transfer.copying import Copier, Place
from hicache_mooncake.transfer.mapping import keeps_its_size
from hicache_mooncake.transfer.shm_copy import MappedPlace, ProcessPlace, process_ended
from hicache_mooncake.transfer.transport import Pending, TransportError, TransportOptions

_HELLO = b"hicache-mooncake shm 1\n"
_UCRED = struct.Struct("@iII")
_INT = struct.Struct("@i")
_SO_PASSPIDFD, _SCM_PIDFD = 76, 4
"""Linux 6.5, and not in Python's socket module."""
_MAPPED, _PROCESS = b"map1", b"pid1"
_INLINE_BYTES = 1 << 20
"""A batch of up to this size is copied by whoever submits it: to wake another thread costs as much."""


class ShmTransport(ChannelTransport):
    """`TransportOptions.copy_threads` threads copy large batches beside whoever waits for them; 0: one."""

    scheme: ClassVar[str] = "shm"
    local_only: ClassVar[bool] = True

    def __init__(self, options: TransportOptions) -> None:
        super().__init__()
        self._copier = Copier(max(1, options.copy_threads), "shm-copy")

    def admit(self, address: int, length: int, fd: int, fd_offset: int) -> bytes:
        if fd < 0:
            return _PROCESS
        _check_descriptor(fd, length, fd_offset)
        keeps_its_size(fd)  # where it can be: peers map it then
        return _MAPPED

    def meet(self, channel: socket.socket, deadline: float) -> ChannelLink:
        if channel.family != socket.AF_UNIX:
            raise TransportError("unavailable", "shared memory needs a UNIX socket as its channel")
        return ShmLink(self, channel, *_greet(channel, deadline), self._copier)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._copier.close()


class ShmLink(ChannelLink):
    turn_bytes: ClassVar[int] = 4 << 20
    recalls: ClassVar[bool] = True

    def __init__(self, transport: ShmTransport, channel: socket.socket, pid: int, pidfd: int, copier: Copier) -> None:
        """As from `_greet`. The descriptor is the link's."""
        super().__init__(transport, channel, f"process {pid}" if pid else "a process of another pid namespace")
        self._pid, self._pidfd = pid, pidfd
        self._copier = copier

    def place(self, kind: bytes, number: int, address: int, length: int) -> Place:
        if kind == _MAPPED:
            return MappedPlace(number, address, length)
        if kind == _PROCESS:
            return ProcessPlace(number, address, length, self._pid, self._pidfd)
        raise TransportError("bounds", "a token that is none of shared memory's")

    def offer(self, own: Own) -> tuple[Memory, list[int]]:
        if own.fd < 0:
            return Memory(own.id, True), []
        return Memory(own.id, True, True, own.fd_offset), [own.fd]

    def reach(self, place: Place, memory: Memory, fd: int) -> None:
        if isinstance(place, MappedPlace) and fd >= 0:
            place.map(fd, memory.fd_offset)
        elif isinstance(place, ProcessPlace) and fd < 0:
            place.probe()
        else:
            raise TransportError("peer", f"memory at {place.address:#x} is not of the kind that its token says")

    def begin(self, batch: Batch) -> Pending:
        if batch.total <= _INLINE_BYTES:
            self.help(batch)
        else:
            self._copier.put(self.turn)
        return _ShmPending(self, batch)

    def peer_ended(self) -> bool:
        return self._pidfd >= 0 and process_ended(self._pidfd)

    def let_go(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


class _ShmPending(Pending):
    """Whoever waits copies, too."""

    def __init__(self, link: ShmLink, batch: Batch) -> None:
        self._link, self._batch = link, batch

    @property
    def done(self) -> bool:
        return self._batch.done

    def wait(self) -> None:
        self._link.help(self._batch)
        self._batch.wait()

    def cancel(self) -> None:
        self._batch.cancel()


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


def _greet(channel: socket.socket, deadline: float) -> tuple[int, int]:
    """The peer's pid, and a descriptor of its process, by what the kernel says of who sent its greeting; 0 and -1 where it is
    in a pid namespace that is not seen here.

    SO_PEERCRED would name who called listen(), which need not be the process that answers. The number alone may be another
    process's by the time that it is looked at: the descriptor is the one that the kernel gives with the greeting."""
    pidfds: list[int] = []
    try:
        pid = _hello(channel, deadline, pidfds)
        if not pid:
            return 0, -1
        pidfd = pidfds.pop() if pidfds else _pidfd_of(pid, channel)
        if pidfd < 0 or process_ended(pidfd):
            pidfds.append(pidfd)
            raise TransportError("peer", f"process {pid} at the other end is gone")
        return pid, pidfd
    finally:
        for fd in pidfds:
            if fd >= 0:
                os.close(fd)


def _pidfd_of(pid: int, channel: socket.socket) -> int:
    """For kernels before 6.5. -1 if the process has ended: then its end of the channel has, and the number may be another's."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(channel, 0)
        if not poll.poll(0):  # no POLLHUP
            return pidfd
        os.close(pidfd)
    return -1


def _hello(channel: socket.socket, deadline: float, pidfds: list[int]) -> int:
    """Greet, and be greeted: the peer's pid. `pidfds` gets what the kernel gives of its process, the last one last; negative
    where it has ended."""
    try:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with contextlib.suppress(OSError):
            channel.setsockopt(socket.SOL_SOCKET, _SO_PASSPIDFD, 1)
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        mine = _UCRED.pack(os.getpid(), os.getuid(), os.getgid())
        channel.sendmsg([_HELLO], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, mine)])
        said, pid = b"", 0
        while len(said) < len(_HELLO):
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
            room = socket.CMSG_SPACE(_UCRED.size) + socket.CMSG_SPACE(_INT.size)
            data, told, _, _ = channel.recvmsg(len(_HELLO) - len(said), room)
            for level, kind, body in told:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid = _UCRED.unpack(body)[0]
                elif (level, kind) == (socket.SOL_SOCKET, _SCM_PIDFD):
                    pidfds.append(_INT.unpack(body)[0])
            if not data:
                raise TransportError("peer", "the peer closed the channel instead of greeting")
            said += data
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        with contextlib.suppress(OSError):
            channel.setsockopt(socket.SOL_SOCKET, _SO_PASSPIDFD, 0)
    except TimeoutError as error:
        raise TransportError("deadline", "the peer did not greet before the deadline") from error
    except OSError as error:
        raise TransportError("peer", f"greeting the peer over its channel: {error.strerror or error}") from error
    if said != _HELLO:
        raise TransportError("peer", f"what is at the other end does not speak this shared memory: it said {said[:32]!r}")
    return pid
