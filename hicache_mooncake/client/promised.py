"""What a decode server's rank was told of and counts on: how long, and which of it could not be loaded after all.

SGLang's decode side tells its prefill server how much of a prompt it will load from here. When a page of that does not come, it
fails the request.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from hicache_mooncake.client.engine_facts import EngineFacts
from hicache_mooncake.config import Settings
from hicache_mooncake.protocol import HASH_BYTES, select_hashes, split

PROMISE_S = 5.0
"""From a lookup to the load that follows it: SGLang asks when a request is given its memory, and reads a moment later."""
LOOKUP_S = 0.5
"""The scheduler of a decode server stands still while it asks."""
MAX_TOLD = 1024
MAX_BYTES = 16 << 20

_WHY = {
    "absent": "evicted",
    "gone_remote": "evicted",
    "wrong_length": "evicted",
    "node_down": "node_gone",
    "node_timeout": "node_gone",
    "node_refused": "node_gone",
    "peer_down": "node_gone",
    "peer_failed": "node_gone",
    "peer_full": "node_gone",
    "master_down": "node_gone",
    "master_warming": "node_gone",
    "checksum": "damaged",
    "checksum_remote": "damaged",
    "checksum_cold": "damaged",
    "cold_unreadable": "damaged",
    "deadline": "deadline",
    "busy": "deadline",
}


def promise_seconds(settings: Settings, facts: EngineFacts) -> float:
    """How long this engine counts on what a lookup found; 0: not at all."""
    if settings.promise_s >= 0:
        return settings.promise_s
    return PROMISE_S if facts.promises else 0.0


class Told:
    """The newest lookups' answers. Thread-safe; bounded."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._told: OrderedDict[tuple[bytes, bytes], tuple[bytes, float]] = OrderedDict()
        """(namespace, last hash): all hashes, and until when they count. The oldest first."""
        self._bytes = 0

    def told(self, namespace: bytes, hashes: bytes, here: Sequence[int], now: float) -> None:
        """Those of these pages for which `here` says so can be loaded."""
        if 0 in here:
            hashes = select_hashes(hashes, [i for i, each in enumerate(here) if each])
        else:
            hashes = hashes[: len(here) * HASH_BYTES]
        if not hashes:
            return
        key = namespace, hashes[-HASH_BYTES:]
        with self._lock:
            self._drop(key)
            self._told[key] = hashes, now + self.seconds
            self._bytes += len(hashes)
            while len(self._told) > MAX_TOLD or self._bytes > MAX_BYTES:
                self._drop(next(iter(self._told)))

    def broken(self, namespace: bytes, hashes: bytes, ok: bytes, reasons: Mapping[str, int], now: float) -> dict[str, int]:
        """A load did not get all of these pages: how many of the others it was told of lately, by why they did not come."""
        with self._lock:
            lately = [told for (of, _), (told, until) in self._told.items() if of == namespace and until > now]
        told = {page_hash for blob in lately for page_hash in split(blob)}
        left = sum(not arrived and page_hash in told for page_hash, arrived in zip(split(hashes), ok, strict=True))
        broken: Counter[str] = Counter()
        for reason, count in Counter(reasons).most_common():
            some = min(left, count)
            if some:
                broken[_WHY.get(reason, "other")] += some
            left -= some
        return dict(broken)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        if key in self._told:
            self._bytes -= len(self._told.pop(key)[0])
