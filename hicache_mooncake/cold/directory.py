"""The directory of a cold tier: whose it is, that one process has it, and what other versions or damage have left beside it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path

from hicache_mooncake import keys
from hicache_mooncake.cold.health import index_is_sound
from hicache_mooncake.cold.pages_file import ColdError

log = logging.getLogger(__name__)

FORMAT = 1
"""Of the file and the index. What another one left is never touched."""
PAGES, INDEX, DAMAGED = "pages", "index", "index.damaged"
_LOCK, _UNCLEAN = "lock", "unclean"


def own_path(directory: Path) -> Path:
    """Where this version's tier is in what the operator names."""
    return directory / f"pages-{FORMAT}.{keys.FORMAT}"


def others(directory: Path) -> list[Path]:
    """What other versions have left there. It stays, and takes room."""
    return sorted(each for each in directory.glob("pages-*") if each != own_path(directory))


def prepare(directory: Path) -> Path:
    """Make it where it is missing. Raises OSError, and ColdError for one that somebody else may write to."""
    path = own_path(directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in others(directory):
        log.warning("cold tier: %s is of another version and is left alone. Delete it when no node needs it any more", other)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_owner(path)
    return path


def check_owner(path: Path) -> None:
    """Raises ColdError for what is no directory of this user's alone."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ColdError(f"--cold {path.parent}: {path} is not a directory")
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ColdError(f"--cold {path.parent}: {path} belongs to another user or may be written by others")


def locked(path: Path) -> int:
    """A descriptor that keeps every other process out as long as it is open. Raises ColdError where one has it already."""
    fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise
        text = "another node uses it. Stop it, or give this one a directory of its own"
        raise ColdError(f"--cold {path.parent}: {text}") from error
    return fd


def check_index(path: Path) -> None:
    """An index that a crash or a disk has damaged could end the process that reads it: another one looks at it, unless the last
    process that had it has closed it."""
    if (path / _UNCLEAN).exists() and (path / INDEX).exists() and not index_is_sound(path / INDEX):
        put_aside(path)
    (path / INDEX).mkdir(mode=0o700, exist_ok=True)


def put_aside(path: Path) -> None:
    """The index is damaged. One of them is kept, to be looked at."""
    aside = path / DAMAGED
    shutil.rmtree(aside, ignore_errors=True)
    (path / INDEX).rename(aside)
    (path / INDEX).mkdir(mode=0o700)
    log.error("cold tier: the index was damaged and is kept as %s; the tier begins empty", aside)


def mark_unclean(path: Path) -> None:
    """Before the index is opened, and so that a loss of power does not lose it: an index that ends every process that opens it
    is found out the next time."""
    (path / _UNCLEAN).touch(mode=0o600)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def mark_clean(path: Path) -> None:
    with contextlib.suppress(OSError):
        (path / _UNCLEAN).unlink()
