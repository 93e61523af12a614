"""Room in this node's segment that other nodes write pages to over links, and what must be ended before it is used again.

A landing is what one answer to a mover's Locate has: for each link the places that its peer may write to. It ends when the
mover says that it is done, when its connection ends, or by time. Links of which it is not known that they have written all that
they were asked for are *fenced* first, by whoever calls: only then does their room go back. Where a fence cannot be had, the
room is *stranded*: it is not used, and counts as lent, until all links that may write there have been ended after all, which
may be never. No I/O and no clock."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

KEEP_S = 30.0
"""A mover that is not done by then is frozen. It only reads from here, and checks what it reads."""
_MAX_OF_OWNER = 8


@dataclasses.dataclass(slots=True)
class Landing:
    """`places` by link. `claimed`: links that may also write to the room of the store's transaction `txn` (0: none), which is
    `claimed_bytes`."""

    id: int
    owner: int
    length: int
    places: dict[int, list[int]]
    nodes: dict[int, str]
    """Whose window its places are of, by link."""
    txn: int
    claimed: frozenset[int]
    claimed_bytes: int
    until: float
    ending: bool = False
    """Somebody is at it, and will call `ended`."""

    @property
    def links(self) -> set[int]:
        """All that may write for it."""
        return self.places.keys() | self.claimed


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What is to be done with a landing's room: `free` goes back, `stranded` never does."""

    free: list[int]
    stranded: list[int]


@dataclasses.dataclass(slots=True)
class _Lost:
    """Stranded room, and the links that may write there. `lent`: by a landing; else it was a transaction's."""

    links: set[int]
    offsets: list[int]
    size_bytes: int
    lent: bool


class Landings:
    """`most_bytes` are lent at a time, and as many claimed; those that are stranded are among them. Not thread-safe.

    A landing is ended in two steps, since a fence takes time: `begin_end` says which links to fence, and makes sure that nobody
    else does it; `ended` says what becomes of the room."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.lent_bytes = 0
        self.claimed_bytes = 0
        self._lost: list[_Lost] = []
        self._open: dict[int, Landing] = {}
        self._of_owner: dict[int, list[int]] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def room_for(self, owner: int, length: int) -> int:
        """How many more bodies of this length, in blocks of the segment, may be lent to this owner."""
        if not self.may_open(owner):
            return 0
        return max(0, (self.most_bytes - self.lent_bytes) // length)

    def may_claim(self, size_bytes: int) -> bool:
        """May links write to so much more room of transactions?"""
        return self.claimed_bytes + size_bytes <= self.most_bytes

    def may_open(self, owner: int) -> bool:
        """An owner has a few at a time."""
        return len(self._of_owner.get(owner, ())) < _MAX_OF_OWNER

    def open(
        self,
        owner: int,
        length: int,
        places: Mapping[int, Sequence[int]],
        nodes: Mapping[int, str],
        now: float,
        *,
        txn: int = 0,
        claimed: Iterable[int] = (),
        claimed_bytes: int = 0,
    ) -> Landing:
        """Room has been taken: by link, offsets of bodies of `length` bytes (as blocks of the segment)."""
        landing = Landing(
            next(self._ids),
            owner,
            length,
            {link: list(of_link) for link, of_link in places.items() if of_link},
            dict(nodes),
            txn,
            frozenset(claimed),
            claimed_bytes,
            now + KEEP_S,
        )
        self._open[landing.id] = landing
        self._of_owner.setdefault(owner, []).append(landing.id)
        self.lent_bytes += length * sum(map(len, landing.places.values()))
        self.claimed_bytes += claimed_bytes
        return landing

    def find(self, owner: int, landing_id: int) -> Landing | None:
        """None for one that is not this owner's, or has ended."""
        landing = self._open.get(landing_id)
        return landing if landing is not None and landing.owner == owner else None

    def of_owner(self, owner: int) -> list[Landing]:
        return [self._open[each] for each in self._of_owner.get(owner, ())]

    def of_txn(self, owner: int, txn: int) -> Landing | None:
        """Whose links may write to the room of this transaction."""
        return next((each for each in self.of_owner(owner) if each.txn == txn and each.claimed), None)

    def expired(self, now: float) -> list[Landing]:
        """Those without claimed room whose time is over. Claimed room is its writer's until the connection ends."""
        return [each for each in self._open.values() if now >= each.until and not each.claimed and not each.ending]

    def begin_end(self, landing: Landing, quiet: Iterable[int] = ()) -> set[int] | None:
        """The links to fence; None when somebody is at it already."""
        if landing.ending:
            return None
        landing.ending = True
        return landing.links - set(quiet)

    def ended(self, landing: Landing, refused: Iterable[int] = ()) -> Ended:
        """All that `begin_end` named are fenced but those that `refused`."""
        assert landing.ending
        refused = set(refused)
        del self._open[landing.id]
        of_owner = self._of_owner[landing.owner]
        of_owner.remove(landing.id)
        if not of_owner:
            del self._of_owner[landing.owner]
        free = [at for link, places in landing.places.items() if link not in refused for at in places]
        self.lent_bytes -= landing.length * len(free)
        self.claimed_bytes -= landing.claimed_bytes
        stranded: list[int] = []
        for link in landing.places.keys() & refused:
            places = landing.places[link]
            stranded += places
            self._lost.append(_Lost({link}, places, landing.length * len(places), lent=True))
        return Ended(free, stranded)

    # ------------------------------------------------------------------ what is stranded

    @property
    def stranded_bytes(self) -> int:
        return sum(lost.size_bytes for lost in self._lost)

    @property
    def landing_bytes(self) -> int:
        """Lent, and not stranded."""
        return self.lent_bytes - sum(lost.size_bytes for lost in self._lost if lost.lent)

    def strand(self, links: Iterable[int], offsets: Sequence[int], size_bytes: int) -> None:
        """Room of a transaction, to which these links may write that could not be ended."""
        if offsets:
            self._lost.append(_Lost(set(links), list(offsets), size_bytes, lent=False))
            self.claimed_bytes += size_bytes

    def fenced(self, link: int) -> list[int]:
        """This link has been ended after all. Returns what room goes back with that."""
        for lost in self._lost:
            lost.links.discard(link)
        over = [lost for lost in self._lost if not lost.links]
        self._lost = [lost for lost in self._lost if lost.links]
        for lost in over:
            if lost.lent:
                self.lent_bytes -= lost.size_bytes
            else:
                self.claimed_bytes -= lost.size_bytes
        return [offset for lost in over for offset in lost.offsets]

    def validate(self) -> None:
        """Everything that must hold between two calls; tests run it after every event."""
        lent = [(at, each.length) for each in self._open.values() for places in each.places.values() for at in places]
        assert len({at for at, _ in lent}) == len(lent), "a place of two links"
        assert self.landing_bytes == sum(length for _, length in lent)
        assert self.lent_bytes <= self.most_bytes
        in_use = sum(each.claimed_bytes for each in self._open.values())
        assert self.claimed_bytes == in_use + sum(lost.size_bytes for lost in self._lost if not lost.lent)
        assert all(lost.links and lost.offsets for lost in self._lost)
        owned = sorted(each for of_owner in self._of_owner.values() for each in of_owner)
        assert owned == sorted(self._open)
        assert all(0 < len(of_owner) <= _MAX_OF_OWNER for of_owner in self._of_owner.values())
