"""To which node pages are given away: the better of two random ones, and newcomers little by little."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from hicache_mooncake.protocol import Peer, Room

RAMP_S = 60.0
"""A newcomer counts for more and more until this age: an empty node must not draw everybody's pages at once."""
FRESH_S = 10.0
"""An older table says nothing."""


@dataclasses.dataclass(slots=True)
class _Candidate:
    room: Room
    left: int

    def takes(self, table_age_s: float) -> float:
        """Bytes, a newcomer's by its age."""
        return self.left * min(1.0, (self.room.age_s + table_age_s) / RAMP_S)


class Placement:
    """The room table that the masters gave last, less what was sent since. Not thread-safe; time and the generator come in.

    `free_bytes` of a room is what the node takes before it reaches its own low watermark: nobody is filled beyond that."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._candidates: dict[str, _Candidate] = {}
        self._since = float("-inf")
        self._table: Sequence[Room] = ()

    def update(self, rooms: Sequence[Room], now: float) -> None:
        """A table came. The same object again is no news."""
        if rooms is self._table:
            return
        self._table = rooms
        self._candidates = {room.peer.node: _Candidate(room, room.free_bytes) for room in rooms}
        self._since = now

    def choose(self, size_bytes: int, now: float) -> Peer | None:
        """A node that takes so many bytes, or None: there is none, or the table is old."""
        age_s = now - self._since
        if age_s > FRESH_S:
            return None
        fitting = [candidate for candidate in self._candidates.values() if candidate.takes(age_s) >= size_bytes]
        if not fitting:
            return None
        two = self._rng.sample(fitting, min(2, len(fitting)))
        return max(two, key=lambda candidate: candidate.takes(age_s) / max(candidate.room.capacity_bytes, 1)).room.peer

    def any_room(self, now: float) -> bool:
        """Does anybody take anything?"""
        return now - self._since <= FRESH_S and any(candidate.left > 0 for candidate in self._candidates.values())

    def sent(self, node: str, size_bytes: int) -> None:
        candidate = self._candidates.get(node)
        if candidate is not None:
            candidate.left -= size_bytes

    def refused(self, node: str) -> None:
        """It has no room after all, or cannot be reached: not before the next table."""
        self._candidates.pop(node, None)
