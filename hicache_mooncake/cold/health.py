"""Is an index whole? Asked of another process, since a damaged one can end the process that reads it."""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import lmdb

from hicache_mooncake.client.child import environment

log = logging.getLogger(__name__)

_TIMEOUT_S = 300.0
_DAMAGED_EXIT = 3
_DIED_OF_IT = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE}
_READ_BYTES = 8 << 20
_LENGTHS = {b"names": (16, 4), b"segments": (4, 12), b"pages": (36, 28), b"written": (8, None), b"meta": (None, None)}
"""Of the keys and values of each table, where they are always the same."""


def index_is_sound(path: Path) -> bool:
    """Is every record of every table one, and in order? About a million of them a second. A check that cannot be made, or that
    takes minutes, is no proof of damage: what the index says is proved again by each body's checksum."""
    command = [sys.executable, "-m", "hicache_mooncake.cold.health", str(path)]
    try:
        done = subprocess.run(command, timeout=_TIMEOUT_S, check=False, capture_output=True, text=True, env=environment())
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("cold tier: the index could not be checked (%s), and is used as it is", error)
        return True
    if done.returncode == _DAMAGED_EXIT or done.returncode in _DIED_OF_IT:
        log.error(
            "cold tier: what is wrong with the index: %s", done.stderr.strip() or f"it ends who reads it ({done.returncode})"
        )
        return False
    if done.returncode:
        log.warning("cold tier: the index could not be checked (%s), and is used as it is", done.stderr.strip()[-200:])
    return True


def walk(path: Path) -> int:
    """How many records there are. Raises lmdb.Error, OSError and ValueError for what is wrong."""
    _read_through(path / "data.mdb")
    env = lmdb.open(str(path), readonly=True, lock=False, max_dbs=16, create=False, map_size=1 << 40)
    try:
        pages = env.info()["last_pgno"] + 1
        if (path / "data.mdb").stat().st_size < pages * env.stat()["psize"]:
            raise ValueError("it has lost its end")
        with open(os.devnull, "wb") as nowhere:
            env.copyfd(nowhere.fileno(), compact=True)  # finds out about pages that are both free and used, or neither
        with env.begin() as txn:
            return sum(_walk_table(env, txn, bytes(name)) for name, _ in txn.cursor())
    finally:
        env.close()


def _walk_table(env: lmdb.Environment, txn: lmdb.Transaction, name: bytes) -> int:
    db = env.open_db(name, txn=txn, create=False)
    key_bytes, value_bytes = _LENGTHS[name]
    entries, count, last = txn.stat(db)["entries"], 0, b""
    for raw, value in txn.cursor(db):
        key = bytes(raw)
        count += 1
        if (count > 1 and key <= last) or count > entries:
            raise ValueError(f"{name!r} is not in order")
        if (key_bytes and len(key) != key_bytes) or (value_bytes and len(value) != value_bytes):
            raise ValueError(f"{name!r} has something that is no record")
        last = key
    if count != entries:
        raise ValueError(f"{name!r} lacks {entries - count} records")
    return count


def _read_through(path: Path) -> None:
    """In order, which a disk does fast. What cannot be read is an error here, and the end of who meets it in the map."""
    buffer = bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _main(path: Path) -> int:
    try:
        walk(path)
    except (lmdb.Error, OSError, ValueError, KeyError, struct.error) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _DAMAGED_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
