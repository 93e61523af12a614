"""The holder's side of a link: pages of its segment are written into the peer's, and it is known what became of that."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_mooncake.protocol import ProtocolError
from hicache_mooncake.transfer.transport import Link, Piece, TransportError


class Sent(enum.Enum):
    WHOLE = enum.auto()
    """All of it is there, and nothing is under way any more."""
    NOTHING = enum.auto()
    """Nothing was begun."""
    FAILED = enum.auto()
    """Something was begun and has failed: what it still does to the peer's memory ends with the peer's end of the link."""


@dataclass(frozen=True, slots=True)
class Way:
    """A link that is up, and where both segments lie: this node's at `here`, the peer's `length` bytes at `there`."""

    id: int
    link: Link
    here: int
    there: int
    length: int


def pieces_of(way: Way, offsets: Sequence[int], places: Sequence[int], length: int) -> list[Piece]:
    """Bodies of `length` bytes at `offsets` of this node's segment, to `places` in the peer's; neighbours that stay neighbours
    are one piece. Raises ProtocolError for a place outside the peer's segment."""
    pieces: list[Piece] = []
    for offset, place in zip(offsets, places, strict=True):
        if place < 0 or place + length > way.length:
            raise ProtocolError(f"{length} bytes at {place} are not in a segment of {way.length} bytes")
        local, remote = way.here + offset, way.there + place
        if pieces and pieces[-1].local + pieces[-1].length == local and pieces[-1].remote + pieces[-1].length == remote:
            pieces[-1] = Piece(pieces[-1].local, pieces[-1].remote, pieces[-1].length + length)
        else:
            pieces.append(Piece(local, remote, length))
    return pieces


def write(way: Way, pieces: Sequence[Piece], deadline: float) -> tuple[Sent, TransportError | None]:
    """Waits for the end of it, which is at the deadline at the latest. Returns what became of it, and why where it failed. The
    pages must stay where they are meanwhile."""
    try:
        pending = way.link.submit("write", pieces, deadline)
    except TransportError as error:
        return Sent.NOTHING, error
    try:
        pending.wait()
    except TransportError as error:
        return Sent.FAILED, error
    return Sent.WHOLE, None
