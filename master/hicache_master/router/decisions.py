"""Why requests went where they went: some of them, in memory and in a file, a JSON object a line. Never a word of a prompt."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from hicache_master.conductor.admission import Rejection
from hicache_master.conductor.policies import Candidate

from .routing import Flight

log = logging.getLogger("hicache_master.router")

KEPT = 256
MAX_CANDIDATES = 32
"""Of one decision, the best ones."""
MAX_FILE_BYTES = 64 << 20
"""Then it becomes FILE.1, in place of an older one."""

Entry = dict[str, object]


def describe(flight: Flight, rejection: Rejection | None, avoided: Iterable[str] = ()) -> Entry:
    """Times in milliseconds."""
    entry: Entry = {
        "at": time.time(),
        "request": flight.id,
        "tokens": flight.tokens,
        "pages": len(flight.keys),
        "read": flight.read,
        "priority": flight.wishes.priority,
    }
    candidates = sorted(flight.candidates or (), key=lambda each: each.ttft_s)[:MAX_CANDIDATES]
    entry["candidates"] = [describe_candidate(each) for each in candidates]
    entry["avoided"] = sorted(avoided)[:MAX_CANDIDATES]
    if rejection is not None:
        entry["rejected"] = describe_rejection(rejection)
    elif flight.decision is not None:
        decision = flight.decision
        entry["known_pages"] = decision.known_pages
        entry["chosen"] = decision.prefill.engine
        entry["decode"] = decision.decode
        entry["tbt_ms"] = round(decision.tbt_s * 1e3, 3)
        entry["fetches"] = [list(fetch) for fetch in decision.fetches[:MAX_CANDIDATES]]
    return entry


def describe_candidate(candidate: Candidate) -> Entry:
    entry: Entry = {"engine": candidate.engine, "pages": candidate.pages, "own_pages": candidate.own_pages}
    for name in ("queue_s", "load_s", "transfer_s", "prefill_s", "ttft_s"):
        entry[f"{name[:-2]}_ms"] = round(getattr(candidate, name) * 1e3, 3)
    return entry


def describe_rejection(rejection: Rejection) -> Entry:
    finite = rejection.load if rejection.load < 1e9 else None
    return {"reason": rejection.reason, "load": finite, "retry_after_s": rejection.retry_after_s}


class Decisions:
    """Keeps every `every`-th, 0 for none. A file that cannot be written is given up, with a warning. Not thread-safe."""

    def __init__(self, every: int = 100, path: Path | None = None) -> None:
        self._every = every
        self._count = 0
        self._kept: deque[Entry] = deque(maxlen=KEPT)
        self._path = path
        self._file: IO[str] | None = path.open("a", encoding="utf-8") if path is not None else None

    def wanted(self) -> bool:
        """Is the next one to be kept?"""
        if not self._every:
            return False
        self._count += 1
        return self._count % self._every == 0

    def keep(self, entry: Entry) -> None:
        self._kept.append(entry)
        if self._file is None or self._path is None:
            return
        try:
            self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")
            self._file.flush()
            if self._file.tell() > MAX_FILE_BYTES:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            log.warning("decisions are written no more: %s: %s", self._path, error)
            self._file = None

    def latest(self, count: int = KEPT) -> list[Entry]:
        """The newest first."""
        return list(reversed(self._kept))[:count]

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
