"""How the pieces of a batch become RDMA work requests, without I/O.

A batch is cut in two steps. `Cutter` hands out *slices*: so many bytes in order, for one rail. `requests` makes the work
requests of a slice, by the limits of that rail's device: stretches that are contiguous in the peer's memory share one
request, whose scatter/gather list names where they lie here (a WRITE gathers, a READ scatters).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from hicache_mooncake.transfer.transport import Piece
from hicache_mooncake.transfer.verbs.api import Sge
from hicache_mooncake.transfer.verbs.registration import Part

MIN_SLICE = 64 << 10
"""Bytes. Below this a request costs the card and this process more than its bytes, so smaller slices gain nothing."""


Lookup = Callable[[int], Part]
"""The part of registered memory in which an address lies, all of it, with its lkey or rkey. Raises TransportError, `bounds`."""


class Request(NamedTuple):
    """One work request: all of `local`, in order, from or to `length` bytes at `remote`."""

    local: tuple[Sge, ...]
    remote: int
    rkey: int
    length: int

    def pieces(self) -> Iterator[Piece]:
        """What it moves, to be asked for again elsewhere."""
        remote = self.remote
        for address, length, _ in self.local:
            yield Piece(address, remote, length)
            remote += length


class Limits(NamedTuple):
    """Of one rail: the smaller of what its device, its port and its queue pair allow."""

    max_sge: int
    max_message: int


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in fewer pieces: empty ones left out, neighbours that are contiguous on both sides made one."""
    last: Piece | None = None
    for piece in pieces:
        if not piece.length:
            continue
        if last is None:
            last = piece
        elif last.local + last.length == piece.local and last.remote + last.length == piece.remote:
            last = Piece(last.local, last.remote, last.length + piece.length)
        else:
            yield last
            last = piece
    if last is not None:
        yield last


class Cutter:
    """What is left of a batch to be handed out. Not thread-safe."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = deque(merged(pieces))
        self.left = sum(piece.length for piece in self._pieces)
        """Bytes."""

    def take(self, most_bytes: int, most_pieces: int) -> list[Piece]:
        """The next bytes, at most so many, in at most so many pieces. Slices of less than MIN_SLICE come about only where the
        batch, its pieces or `most_bytes` leave no choice."""
        taken: list[Piece] = []
        room = most_bytes
        while self._pieces and room > 0 and len(taken) < most_pieces:
            piece = self._pieces[0]
            if piece.length > room:
                if room < MIN_SLICE <= most_bytes - room:
                    break
                short = MIN_SLICE - (self.left - room)
                now = room - short if short > 0 and most_bytes - short >= MIN_SLICE and room > short else room
                self._pieces[0] = Piece(piece.local + now, piece.remote + now, piece.length - now)
                taken.append(Piece(piece.local, piece.remote, now))
                self.left -= now
                break
            self._pieces.popleft()
            taken.append(piece)
            room -= piece.length
            self.left -= piece.length
        return taken

    @property
    def next_local(self) -> int:
        """Where here the next bytes go to or come from, if any are left."""
        return self._pieces[0].local

    def put_back(self, pieces: Iterable[Piece]) -> None:
        """They were taken and have not been moved: they come next."""
        again = list(merged(pieces))
        self._pieces.extendleft(reversed(again))
        self.left += sum(piece.length for piece in again)

    def drop(self) -> None:
        """Nothing more of this batch is handed out."""
        self._pieces.clear()
        self.left = 0


def requests(pieces: Iterable[Piece], limits: Limits, local: Lookup, remote: Lookup) -> Iterator[Request]:
    """The work requests that move these pieces, each byte exactly once: none longer than `max_message`, none with more than
    `max_sge` local stretches, none over the border of a part of the peer's memory. `local` and `remote` find the parts here
    and there, and are asked only where the last answer does not do."""
    max_sge, max_message = limits
    gathered: list[Sge] = []
    start = size = 0
    here_from = here_end = lkey = there_from = there_end = rkey = 0
    for address, target, left in pieces:
        while left:
            if not there_from <= target < there_end:
                if gathered:
                    yield Request(tuple(gathered), start, rkey, size)
                    gathered, size = [], 0
                there_from, length, rkey = remote(target)
                there_end = there_from + length
            if not here_from <= address < here_end:
                here_from, length, lkey = local(address)
                here_end = here_from + length
            if gathered and (target != start + size or len(gathered) == max_sge or size == max_message):
                yield Request(tuple(gathered), start, rkey, size)
                gathered, size = [], 0
            if not gathered:
                start = target
            now = min(left, here_end - address, there_end - target, max_message - size)
            gathered.append(Sge(address, now, lkey))
            size += now
            address, target, left = address + now, target + now, left - now
    if gathered:
        yield Request(tuple(gathered), start, rkey, size)
