"""A page written and read back through a node by the same path that a rank uses: `doctor`'s last word."""

from __future__ import annotations

import os
import time

from hicache_mooncake.config import Settings
from hicache_mooncake.testing.local import FakeRank, page_hash

_PAGES = 4
_PAGE_BYTES = 256 << 10


class CanaryError(Exception):
    """The pool did not give back what it was given; the message says which step failed and why."""


def write_and_read_back(settings: Settings) -> str:
    """Store a few pages, look them up, load them, compare every byte, forget them. Returns what was done, for the operator.

    Uses a namespace of its own. Raises CanaryError.
    """
    rank = FakeRank(settings, pages=_PAGES, page_bytes=_PAGE_BYTES)
    namespace = os.urandom(16)
    pages = [page_hash((os.getpid(), time.time(), i)) for i in range(_PAGES)]
    try:
        stored = rank.store(namespace, pages)
        if stored.ok.count(1) != _PAGES:
            raise CanaryError(f"store: {stored.ok.count(1)} of {_PAGES} pages, {stored.reasons}")
        found = rank.exists(namespace, pages)
        if found != _PAGES:
            raise CanaryError(f"lookup: {found} of {_PAGES} pages found")
        started = time.perf_counter()
        try:
            loaded = rank.load(namespace, pages)
        except AssertionError as error:
            raise CanaryError(f"load: {error}") from error
        took = time.perf_counter() - started
        if loaded.ok.count(1) != _PAGES:
            raise CanaryError(f"load: {loaded.ok.count(1)} of {_PAGES} pages, {loaded.reasons}")
        rank.client.clear(namespace)
        return (
            f"{_PAGES} pages of {_PAGE_BYTES >> 10} KiB by {rank.mode}, read back in {took * 1e3:.1f} ms, every byte compared"
        )
    finally:
        rank.close()
