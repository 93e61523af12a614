"""Shared memory by descriptor: memfds created, mapped, faulted in ahead and unmapped.

`mmap.mmap` hides the address and holds the GIL while it faults pages in; this maps through libc and releases it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import threading
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_POPULATE_STEP = 64 << 20
_MFD_HUGETLB = 0x0004
HUGE_PAGE = 2 << 20


def create_memfd(name: str, length: int, *, huge: bool = False) -> int:
    """A sealed-size memfd, readable and writable by whoever gets the descriptor and by nobody else.

    With `huge`, of 2 MiB pages (`length` is then a multiple of that). Raises OSError when there are not enough of them.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (_MFD_HUGETLB if huge else 0)
    fd = os.memfd_create(name, flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, length)
        _seal_size(fd)
        if huge:
            # Reserve now: a process that touches a huge page that is not there is killed by SIGBUS, not told.
            os.posix_fallocate(fd, 0, length)
    except OSError:
        os.close(fd)
        raise
    return fd


def _seal_size(fd: int) -> None:
    """Nobody can shrink it under a reader (which would be SIGBUS in whoever touches the missing part)."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def keeps_its_size(fd: int) -> bool:
    """Nobody can shrink this file any more: it is sealed against that, here and now where it was not yet and takes seals. What
    does not (a file of /dev/shm, a memfd made without MFD_ALLOW_SEALING) may be SIGBUS in whoever maps it."""
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
    return True


class Mapping:
    """A shared mapping of a descriptor. `view` is a writable memoryview of bytes even when the mapping is read-only: writing
    through it is then a crash, as it should be. Keeps no descriptor. `close()` must come after every view is released."""

    def __init__(self, fd: int, length: int, *, offset: int = 0, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, offset)
        if address is None or address == _MAP_FAILED:
            error = ctypes.get_errno()
            raise OSError(error, f"mapping {length} bytes of shared memory: {os.strerror(error)}{_which_limit(error, length)}")
        self.address: int = address
        self.length = length
        self._writable = writable
        self._closing = threading.Event()
        self._populated = threading.Event()
        self._populated.set()
        self.view = memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")

    def populate(self, limit: int | None = None) -> bool:
        """Fault pages in, so that first use runs at the warmed rate. Releases the GIL; stops early at `close()`.
        Returns False where the kernel cannot (before 5.14)."""
        advice = _MADV_POPULATE_WRITE if self._writable else _MADV_POPULATE_READ
        end = self.length if limit is None else min(limit, self.length)
        for at in range(0, end, _POPULATE_STEP):
            if self._closing.is_set():
                return False
            if _libc.madvise(self.address + at, min(_POPULATE_STEP, end - at), advice) != 0:
                return False
        return True

    def populate_in_background(self, limit: int | None = None) -> None:
        def work() -> None:
            try:
                self.populate(limit)
            finally:
                self._populated.set()

        self._populated.clear()
        try:
            threading.Thread(target=work, name="populate", daemon=True).start()
        except RuntimeError:  # no more threads: then pages are faulted in when they are first used
            self._populated.set()

    def close(self) -> None:
        self._closing.set()
        self._populated.wait()
        with contextlib.suppress(BufferError):
            self.view.release()
        _libc.munmap(self.address, self.length)


def _which_limit(error: int, length: int) -> str:
    """Which of this process's limits a mapping has met, as far as that can be seen, and what raises it. Memory that is locked
    (RLIMIT_MEMLOCK) is none of them, unless the process locks all that it maps."""
    with contextlib.suppress(OSError, ValueError):
        if error == errno.EAGAIN:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            return (
                f". This process locks what it maps (mlockall), and its limit of locked memory is {limit} bytes: raise it with "
                "`ulimit -l unlimited` before it starts, or LimitMEMLOCK=infinity in its systemd unit"
            )
        if error != errno.ENOMEM:
            return ""
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        if limit != resource.RLIM_INFINITY and used + length > limit:
            return (
                f". The limit of address space is {limit} bytes, and {used} are used: raise it with `ulimit -v unlimited` "
                "before the process starts, or LimitAS=infinity in its systemd unit"
            )
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as maps:
            count = sum(1 for _ in maps)
        if count >= most - 8:
            return f". This process has {count} mappings, and {most} are allowed: `sysctl -w vm.max_map_count={most * 4}`"
    return ""
