"""What masters have just said of pages that a rank looked up: the load that follows need not ask them again. No I/O, no clock.

An engine loads what its lookup found, a moment later and in slices. The holder is asked by key, so what is out of date by then
costs a miss and nothing else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hicache_mooncake import protocol as p

RECALL_S = 2.0
MAX_ANSWERS = 64
MAX_BYTES = 8 << 20
"""Of hashes, in all."""


@dataclass(frozen=True, slots=True)
class _Heard:
    namespace: bytes
    hashes: bytes
    answer: p.Answer
    until: float


class Recall:
    """The newest answers, a few. Not thread-safe."""

    def __init__(self) -> None:
        self._heard: deque[_Heard] = deque()
        self._bytes = 0

    def learn(self, namespace: bytes, hashes: bytes, answer: p.Answer, now: float) -> None:
        """A master has answered for these pages."""
        if len(hashes) > MAX_BYTES or not answer.peers:
            return
        self._heard.append(_Heard(namespace, hashes, answer, now + RECALL_S))
        self._bytes += len(hashes)
        while len(self._heard) > MAX_ANSWERS or self._bytes > MAX_BYTES or self._heard[0].until <= now:
            self._bytes -= len(self._heard.popleft().hashes)

    def find(self, namespace: bytes, hashes: bytes, now: float) -> p.Answer | None:
        """As a master would answer, if each of these pages, in this order and next to each other, was found lately."""
        for heard in reversed(self._heard):
            if heard.until <= now:
                break
            if heard.namespace != namespace:
                continue
            at = heard.hashes.find(hashes)
            if at < 0 or at % p.HASH_BYTES:
                continue
            pages = slice(at // p.HASH_BYTES, (at + len(hashes)) // p.HASH_BYTES)
            holder = heard.answer.holder[pages]
            if len(holder) * p.HASH_BYTES == len(hashes) and 0 not in holder:
                return p.Answer(holder, heard.answer.peers, heard.answer.others[pages], heard.answer.tiers)
        return None

    def forget(self) -> None:
        """Something has happened that may make it wrong."""
        self._heard.clear()
        self._bytes = 0
