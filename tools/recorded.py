"""Rows that tests record in a JSON file, and the document that is made of them."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Among processes that change this file one after the other. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A row a line, all of them or none."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")
    os.replace(fresh, path)


def deliver(text: str, output: Path, *, source: Path, check: bool, command: str) -> int:
    """Write the document, or with `check` only say whether it is up to date: an exit status."""
    if not check:
        output.write_text(text)
        return 0
    if not output.exists() or output.read_text() != text:
        print(f"{output} is not what {source} says: run {command}", file=sys.stderr)
        return 1
    return 0
