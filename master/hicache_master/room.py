"""Which nodes can take pages of others: a random sample for each node that asks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from hicache_mooncake.protocol import MAX_ROOM_LISTED, Peer, Room

from .membership import ACTIVE, Member

FRESH_S = 0.25
"""How old the list that samples are drawn from may be. States and free bytes are those of the moment of the draw."""
SINCE_VERSION = 2
"""Nodes of an older protocol do not take pages."""
UNSAID_FREE_SHARE = 0.1
"""Of a node that does not say what room it has, so much stays free: what a node has above its low watermark by default."""


def free_bytes(member: Member) -> int:
    """What a node takes before it reaches its own low watermark."""
    if not member.reported:
        return 0
    if member.room_bytes >= 0:
        return member.room_bytes
    return max(0, int(member.capacity_bytes * (1 - UNSAID_FREE_SHARE)) - member.used_bytes)


def has_room(member: Member) -> bool:
    return member.state == ACTIVE and member.version >= SINCE_VERSION and free_bytes(member) > 0


class RoomTable:
    """Not thread-safe."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._candidates: Sequence[Member] = ()
        self._made_at = float("-inf")

    def sample(self, asker: str, members: Iterable[Member], now: float) -> list[Room]:
        """At most MAX_ROOM_LISTED of the active members with room, but not the asker; any as likely as any other."""
        if not 0 <= now - self._made_at < FRESH_S:
            self._candidates = [member for member in members if has_room(member)]
            self._made_at = now
        count = min(len(self._candidates), MAX_ROOM_LISTED + 1)  # one more: the asker may be among them
        drawn = self._rng.sample(self._candidates, count)
        return [
            Room(
                Peer(member.name, member.incarnation, member.host, member.port),
                member.host_id,
                free_bytes(member),
                member.capacity_bytes,
                max(0.0, now - member.since),
            )
            for member in drawn
            if member.name != asker and has_room(member)
        ][:MAX_ROOM_LISTED]
