"""Is an index whole? Asked of another process, since a damaged one can end the process that reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmdb

_TIMEOUT_S = 300.0


def index_is_sound(path: Path) -> bool:
    """Every record of every table can be read: about two million of them a second."""
    command = [sys.executable, "-m", "hicache_mooncake.cold.health", str(path)]
    try:
        return subprocess.run(command, timeout=_TIMEOUT_S, check=False, capture_output=True).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def walk(path: Path) -> int:
    """How many records there are. Raises lmdb.Error, and for a file that has lost its end it raises ValueError."""
    env = lmdb.open(str(path), readonly=True, lock=False, max_dbs=16, create=False)
    try:
        pages = env.info()["last_pgno"] + 1
        if (path / "data.mdb").stat().st_size < pages * env.stat()["psize"]:
            raise ValueError(f"{path} has lost its end")
        count = 0
        with env.begin() as txn:
            for name in [bytes(key) for key, _ in txn.cursor()]:
                with env.begin(db=env.open_db(name, txn=txn, create=False)) as reading:
                    count += sum(1 for _ in reading.cursor())
        return count
    finally:
        env.close()


if __name__ == "__main__":
    walk(Path(sys.argv[1]))
