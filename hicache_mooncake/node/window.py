"""How much room each peer may be writing to at a time, shared fairly between those who read from it. No I/O and no clock.

A burst of loads must not have a peer send more than a network card's buffers take, nor one load leave nothing for the others:
the window of a peer is a number of bytes, and each of those who lately asked for some of it gets its part and no more."""

from __future__ import annotations

from dataclasses import dataclass, field

RECENT_S = 1.0
"""Who asked within this time counts as one of those who share."""
_MAX_PEERS = 1024


@dataclass(slots=True)
class _Line:
    held: dict[int, int] = field(default_factory=dict)
    """Bytes by owner."""
    asked: dict[int, float] = field(default_factory=dict)
    """Owner -> when."""


class Window:
    """`limit_bytes` a peer. Not thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lines: dict[str, _Line] = {}

    def take(self, peer: str, owner: int, size: int, count: int, now: float) -> int:
        """How many of `count` bodies of `size` bytes the owner may have under way from this peer now, beside what it has: its
        part of the window, as far as that is free. One, however large, where nothing is under way from the peer."""
        line = self._lines.get(peer)
        if line is None:
            if len(self._lines) >= _MAX_PEERS:
                self._forget()
            line = self._lines[peer] = _Line()
        line.asked = {each: at for each, at in line.asked.items() if now - at < RECENT_S}
        line.asked[owner] = now
        share = self.limit_bytes // len(line.asked.keys() | line.held.keys())
        free = self.limit_bytes - sum(line.held.values())
        granted = max(0, min(count, (share - line.held.get(owner, 0)) // size, free // size))
        if not granted and not line.held:
            granted = min(count, 1)
        if granted:
            line.held[owner] = line.held.get(owner, 0) + granted * size
        return granted

    def give_back(self, peer: str, owner: int, size: int, count: int) -> None:
        """So many of the bodies that were granted are no longer under way."""
        if not count:
            return
        line = self._lines[peer]
        line.held[owner] -= size * count
        if not line.held[owner]:
            del line.held[owner]

    def held(self, peer: str) -> int:
        """Bytes of this peer's window that are taken."""
        line = self._lines.get(peer)
        return sum(line.held.values()) if line is not None else 0

    def validate(self) -> None:
        """Everything that must hold between two calls; tests run it after every event."""
        for line in self._lines.values():
            assert all(held > 0 for held in line.held.values())
            assert sum(line.held.values()) <= self.limit_bytes or len(line.held) == 1, "more than one body too large for it"

    def _forget(self) -> None:
        """Peers that nobody reads from. If there are none, this is one peer more than foreseen, and no harm."""
        idle = [peer for peer, line in self._lines.items() if not line.held]
        for peer in idle:
            del self._lines[peer]
