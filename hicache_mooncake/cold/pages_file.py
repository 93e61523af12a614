"""The file that bodies are in: preallocated segment by segment, read and written past the page cache where that can be."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hicache_mooncake.cold.layout import BLOCK
from hicache_mooncake.transfer.mapping import HUGE_PAGE

_MAX_VIEWS = 512
"""Fewer than IOV_MAX."""


class ColdError(Exception):
    """The cold tier cannot be used as it is configured: a sentence for the operator."""


def scratch(length: int) -> memoryview:
    """Memory that direct I/O takes."""
    return memoryview(mmap.mmap(-1, length))


def huge_scratch(length: int) -> memoryview:
    """The same, in huge pages where the kernel has some: a disk is given one piece instead of 256 a MiB, which halves the CPU
    time of a read, and no request is split for having too many."""
    size = -(-length // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # a fork during a read could leave it the page that the disk writes to
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    return memoryview(memory)[begin : begin + size]


class PagesFile:
    """`read` and `write` are for any thread, and let go of the interpreter lock. Raises OSError."""

    def __init__(self, path: Path, *, writable: bool, direct: bool = True) -> None:
        """`direct` False: never past the page cache. Makes the file, for its owner only, where it is to be writable."""
        self.path = path
        flags = os.O_CLOEXEC | (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY)
        self.fd = os.open(path, flags, 0o600)
        self.direct = False
        if direct:
            self._try_direct(flags & ~os.O_CREAT)

    def _try_direct(self, flags: int) -> None:
        """One probe: a file system that takes the flag may still refuse such reads."""
        try:
            fd = os.open(self.path, flags | os.O_DIRECT)
        except OSError:
            return
        try:
            os.preadv(fd, [scratch(BLOCK)], 0)
        except OSError:
            os.close(fd)
            return
        os.close(self.fd)
        self.fd, self.direct = fd, True

    @classmethod
    def of(cls, fd: int, *, direct: bool) -> PagesFile:
        """What another process has opened. It is this object's from here on."""
        file = cls.__new__(cls)
        file.path, file.fd, file.direct = Path(f"/proc/self/fd/{fd}"), fd, direct
        return file

    def close(self) -> None:
        os.close(self.fd)

    @property
    def deleted(self) -> bool:
        """Its name is gone: what is written is lost with this process."""
        return os.fstat(self.fd).st_nlink == 0

    def allocated_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def allocate(self, offset: int, length: int, floor_bytes: int) -> None:
        """Have room on the disk for this stretch, and leave `floor_bytes` free where it takes any. Raises OSError (ENOSPC)."""
        size = os.fstat(self.fd).st_size
        new = length - min(length, max(0, size - offset))
        space = os.fstatvfs(self.fd)
        if new and space.f_bavail * space.f_frsize - new < floor_bytes:
            raise OSError(errno.ENOSPC, f"less than {floor_bytes >> 20} MiB would be left free", str(self.path))
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError:
            if new:
                os.ftruncate(self.fd, size)  # a part of it may have been had
            raise

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """All of them, one behind the other. Lengths and memory must be multiples of BLOCK for direct I/O."""
        _all(os.pwritev, self.fd, offset, views)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of them. By preadv, and never into engine memory: see `client.mover_process` on who hangs in it."""
        _all(os.preadv, self.fd, offset, views)

    def forget(self, offset: int, length: int) -> None:
        """Where I/O goes through the page cache: what was written is not going to be read soon."""
        if not self.direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)


def _all(call: Callable[[int, list[memoryview], int], int], fd: int, offset: int, views: Sequence[memoryview]) -> None:
    left = list(views)
    while left:
        done = call(fd, left[:_MAX_VIEWS], offset)
        if done <= 0:
            raise OSError(errno.EIO, f"the file ends at {offset}")
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
