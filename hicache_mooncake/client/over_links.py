"""Pages of one batch that may come over links, and where in the node's segment they land first. No I/O and no clock.

The node has lent room, and said which link may write to which of it; pages take turns in it, since what has been copied on into
the engine needs its place no longer. A link that was asked for pages is *quiet* again when the holder has answered: until then,
and for good if it never does, something may still be written to these places, and they are not used again in this batch."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_mooncake import protocol as p
from hicache_mooncake.client.remote import Ask
from hicache_mooncake.transfer.peers import Address, address_of

MAX_ASK_BYTES = 32 << 20
_SPLIT_BYTES = 2 << 20
"""So much and more is asked for in two parts at least: one is copied on while the next one is written."""


class _Way:
    """To one peer. `free` places are anybody's; a page in `own` has one of its own, which stays when it has been copied."""

    def __init__(self, link: int) -> None:
        self.link = link
        self.most = 1
        """Pages to ask for at once."""
        self.free: list[int] = []
        self.own: dict[int, int] = {}
        self.unanswered = 0
        self.failed = False


class OverLinks:
    """`pages`: the batch's page numbers of the columns of `located`."""

    def __init__(self, located: p.Located, pages: Sequence[int], body_bytes: int) -> None:
        self.landing = located.landing
        self.received_bytes = 0
        self._ways: dict[Address, _Way] = {}
        self._taken: dict[Ask, dict[int, int]] = {}
        if not located.landing:
            return
        for page, status, where, place in zip(pages, located.status, located.where, located.places, strict=True):
            if place < 0 or status not in (p.REMOTE, p.FETCH) or not located.links[where]:
                continue
            way = self._ways.setdefault(address_of(located.peers[where]), _Way(located.links[where]))
            if status == p.FETCH:
                way.own[page] = place
            else:
                way.free.append(place)
        for way in self._ways.values():
            places = len(way.free) + len(way.own)
            split = places * body_bytes >= _SPLIT_BYTES
            way.most = max(1, min(MAX_ASK_BYTES // body_bytes, -(-places // 2) if split else places))

    def choose(self, peer: p.Peer, pages: Sequence[int]) -> list[int]:
        """Which of these pages may be asked of this peer over a link now; none: ask for them without."""
        way = self._ways.get(address_of(peer))
        if way is None or way.failed or way.unanswered:
            return []
        chosen: list[int] = []
        free = len(way.free)
        for page in pages:
            if page not in way.own:
                if not free:
                    continue
                free -= 1
            chosen.append(page)
            if len(chosen) == way.most:
                break
        return chosen

    def take(self, ask: Ask) -> tuple[int, list[int]]:
        """The ask is about to be sent: over which link, and where each page goes. (0, []): over none."""
        way = self._ways.get(address_of(ask.peer)) if ask.over_link else None
        if way is None:
            return 0, []
        places = {page: way.own[page] if page in way.own else way.free.pop() for page in ask.pages}
        self._taken[ask] = places
        way.unanswered += 1
        return way.link, list(places.values())

    def place(self, ask: Ask, page: int) -> int:
        return self._taken[ask][page]

    def answered(self, ask: Ask, *, failed: bool) -> None:
        """The holder says that nothing is under way any more, or, with `failed`, that it cannot tell."""
        if ask in self._taken:
            way = self._ways[address_of(ask.peer)]
            way.unanswered -= 1
            way.failed |= failed

    def copied(self, ask: Ask) -> None:
        """All that came of it has been copied on: its places are free for the next one."""
        places = self._taken.pop(ask, {})
        way = self._ways.get(address_of(ask.peer))
        if way is not None and not way.failed:
            way.free += [place for page, place in places.items() if page not in way.own]

    def spoilt(self) -> set[int]:
        """Pages whose own place something may still be written to: what lies there must not be stored."""
        return {page for way in self._ways.values() if way.failed or way.unanswered for page in way.own}

    def quiet(self) -> list[int]:
        """Links that have written all that they were asked for, or were asked for nothing."""
        return [way.link for way in self._ways.values() if not way.failed and not way.unanswered]

    def give_up(self) -> None:
        """The room is no longer ours: the connection to the node that lent it has ended."""
        self.landing = 0
        for way in self._ways.values():
            way.failed = True
