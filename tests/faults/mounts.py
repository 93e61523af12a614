"""A part of the file system that nobody else sees. Needs root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_CLONE_NEWNS = 0x00020000


class NoMounts(Exception):
    """This machine does not allow mount namespaces; the message says why."""


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoMounts(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def in_private_mounts(work: Callable[[], None]) -> None:
    """Run it on a thread with mounts of its own, which threads and processes that it starts have too, and which end with the
    last of them. What it raises is raised here; NoMounts where this cannot be had."""
    failed: list[BaseException] = []

    def apart() -> None:
        try:
            if os.geteuid() or ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
                raise NoMounts("needs root and the right to make mount namespaces")
            _mount("--make-rprivate", "/")
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=apart, name="private-mounts", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def small_disk(at: Path, *, size: str = "64k", files: int = 0) -> None:
    """A file system of this size at this place, with room for so many files (0: as many as there is room for)."""
    at.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}" + (f",nr_inodes={files + 1}" if files else ""), "tmpfs", str(at))


def disk_that_freezes(at: Path, image: Path, *, size_bytes: int) -> None:
    """A file system of its own at this place, which `freeze` stops as a disk that does not answer does."""
    with image.open("wb") as file:
        file.truncate(size_bytes)
    try:
        done = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoMounts("there is no mkfs.ext4") from None
    if done.returncode:
        raise NoMounts(f"mkfs.ext4: {done.stderr.strip()}")
    at.mkdir()
    _mount("-o", "loop", str(image), str(at))


@contextlib.contextmanager
def frozen(at: Path) -> Iterator[None]:
    """Whoever writes to it sleeps, and no signal wakes him."""
    subprocess.run(["fsfreeze", "-f", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(at)], check=True)


def fill(at: Path) -> Path:
    """Write until there is no room. Returns the file to remove for there to be room again."""
    ballast = at / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    return ballast
