"""Which page is asked of which node, and what is tried at another one after a failure. No I/O and no clock: time comes in.

A page has up to two holders. It is asked of the first, and whatever goes wrong there, of the second, within the same deadline.
Where a second one exists, the first gets half of the time that is left, so that one that hangs leaves time for the other. So do
holders that were only recalled: the other half is for those that masters name by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import LEAST_S, Admission
from hicache_mooncake.transfer.peers import Address, address_of

_MAX_ASK_PAGES = 1024
"""Asked for at once: more go in several turns, so that no holder keeps pages pinned for the whole of a large batch."""
_PROBE_S = 0.5


class Ask:
    """Pages to be read from one node in one request, which has a connection to itself. `left`: those of which it is not known
    yet what became of them."""

    def __init__(
        self,
        peer: p.Peer,
        pages: Sequence[int],
        now: float,
        until: float,
        *,
        probe: bool,
        lanes: int = 1,
        over_link: bool = False,
    ) -> None:
        self.peer = peer
        self.pages = list(pages)
        self.asked_at = now
        self.until = until
        """When it is to be given up, at the latest."""
        self.probe = probe
        self.lanes = lanes
        """Of so many that were asked of this node at once, this is one."""
        self.over_link = over_link
        self.left = dict.fromkeys(self.pages)
        self.blamed = False

    @property
    def arrived(self) -> bool:
        """Something of it is settled: the node has answered."""
        return len(self.left) < len(self.pages)


def one_lane(_peer: p.Peer, _pages: int) -> int:
    return 1


def no_link(_peer: p.Peer, _pages: Sequence[int]) -> list[int]:
    return []


class Doubt(NamedTuple):
    """A page did not come from where it was recalled to be, and masters may know better."""

    why: str
    tried: list[Address]


class FetchPlan:
    """The pages of one batch that come from other nodes. Every page ends as arrived or under one reason in `reasons`. With
    `recalled_until`, when the last Ask ends, it ends as `doubtful` instead where masters may know better. `before` are such
    pages: who was tried before is tried last, and a page keeps its reason when nobody can be tried.
    `lanes` says how many Asks of one node may be under way at once for so many pages: they are split evenly between them;
    `over_link` which of the pages may come over a link now. Those are one Ask, with half of the time, since a link that has
    died without a word leaves the other half for tcp.

    Use: `add` the pages, then until `done`: carry out what `next` says, report of each Ask `arrived` and `missed` pages and its
    end (`ended`, `again`), and end those that are `expired`. What is under way for a page must have been stopped, so that it
    cannot write any more, before its Ask is reported as ended.
    """

    def __init__(
        self,
        deadline: float,
        lanes: Callable[[p.Peer, int], int] = one_lane,
        over_link: Callable[[p.Peer, Sequence[int]], list[int]] = no_link,
        recalled_until: float | None = None,
        before: Mapping[int, Doubt] | None = None,
    ) -> None:
        self.deadline = deadline
        self._recalled = recalled_until is not None
        self._until = deadline if recalled_until is None else recalled_until
        self._lanes = lanes
        self._over_link = over_link
        self.reasons: Counter[str] = Counter()
        self.doubtful: dict[int, Doubt] = {}
        self.blamed: list[str] = []
        """Nodes that failed, once a failure: they could not be reached, broke off, were silent, or sent damaged bytes."""
        self.unsettled = 0
        self._holders: dict[int, list[p.Peer]] = {}
        self._before = before or {}
        self._why = {page: doubt.why for page, doubt in self._before.items()}
        self._tried: dict[int, list[Address]] = {}
        """Of recalled holders."""
        self._stayed: set[int] = set()
        self._waiting: dict[Address, list[int]] = {}
        self._asks: dict[Address, list[Ask]] = {}
        """Those under way."""
        self._had: dict[Address, int] = {}
        """How many connections a node lets us have, where that was seen."""

    @property
    def done(self) -> bool:
        return self.unsettled == 0

    def add(self, page: int, holders: Sequence[p.Peer]) -> None:
        """`holders` in the order in which they are tried, at least one."""
        if len(holders) > 1:
            several = {address_of(peer): peer for peer in reversed(holders)}
            holders = tuple(reversed(several.values()))
        self._holders[page] = list(holders)
        if page in self._before:
            self._holders[page].sort(key=lambda peer: address_of(peer) in self._before[page].tried)
        self.unsettled += 1
        self._queue(page)

    def next(self, now: float, admit: Callable[[p.Peer], Admission]) -> list[Ask]:
        """What to ask now: as many Asks of a node as it has lanes. What is left waits until they have ended. Nodes that may not
        be tried are passed over."""
        if self._until - now < LEAST_S:
            for pages in self._take_waiting():
                for page in pages:
                    self._end(page, "deadline")
            return []
        asks: list[Ask] = []
        passed_over = True
        while passed_over:
            passed_over = False
            for address in [address for address in self._waiting if address not in self._asks]:
                pages = self._waiting.pop(address)
                peer = self._holders[pages[0]][0]
                admission = admit(peer)
                if admission is Admission.NO:
                    for page in pages:
                        passed_over |= self._elsewhere(page, "peer_down", tried=False)
                    continue
                made, rest = self._make(peer, pages, now, probe=admission is Admission.PROBE)
                asks += made
                for page in rest:
                    if admission is Admission.PROBE and self._has_other(page):
                        passed_over |= self._elsewhere(page, "peer_down", tried=False)
                    else:
                        self._queue(page)
        return asks

    def accompanied(self, ask: Ask) -> bool:
        """Others ask the same node."""
        return len(self._asks.get(address_of(ask.peer), ())) > 1

    def due(self) -> float | None:
        """When the next Ask is to be given up."""
        return min((ask.until for asks in self._asks.values() for ask in asks), default=None)

    def expired(self, now: float) -> list[Ask]:
        return [ask for asks in self._asks.values() for ask in asks if now >= ask.until]

    def arrived(self, ask: Ask, page: int) -> None:
        """Whole, with the right checksum."""
        del ask.left[page]
        self.unsettled -= 1

    def missed(self, ask: Ask, page: int, reason: str, *, blame: bool = False) -> None:
        """This node does not have it, or has sent all of it and it is damaged."""
        del ask.left[page]
        if blame:
            self._blame(ask)
        self._elsewhere(page, reason)

    def ended(self, ask: Ask, reason: str = "", *, blame: bool = False, stay: bool = False, final: bool = False) -> None:
        """No more comes of it. What is left is tried elsewhere; with `stay` (the node is slow, and not broken) pages that
        nobody else has are asked of it once more; with `final` there is no use in trying."""
        self._forget(ask)
        if blame:
            self._blame(ask)
        left, ask.left = list(ask.left), {}
        for page in left:
            if final:
                self._end(page, reason, final=True)
            elif stay and not self._has_other(page) and page not in self._stayed:
                self._stayed.add(page)
                self._why[page] = reason
                self._queue(page)
            else:
                self._elsewhere(page, reason)

    def landed(self, ask: Ask) -> None:
        """All of it is on this host, and only to be copied on: meanwhile its node may be asked for more, if that can come over
        the link as well."""
        waiting = self._waiting.get(address_of(ask.peer), [])
        if self._over_link(ask.peer, waiting[:_MAX_ASK_PAGES]):
            self._forget(ask)

    def again(self, ask: Ask) -> None:
        """The connection was stale, which says nothing about the node: what is left is asked of it once more."""
        self._forget(ask)
        left, ask.left = list(ask.left), {}
        for page in left:
            self._queue(page)

    def crowded(self, ask: Ask, reason: str) -> None:
        """Its connection was one too many: what is left waits for those that there are."""
        self._forget(ask)
        self._had[address_of(ask.peer)] = max(1, len(self._asks.get(address_of(ask.peer), ())))
        left, ask.left = list(ask.left), {}
        for page in left:
            self._why.setdefault(page, reason)
            self._queue(page)

    # ------------------------------------------------------------------ inside

    def _make(self, peer: p.Peer, pages: list[int], now: float, *, probe: bool) -> tuple[list[Ask], list[int]]:
        """The Asks, a lane each or one over a link, and those of the pages that are in none."""
        linked: list[int] = []
        if probe:  # with a page that is lost otherwise, where there is one
            chosen = next((page for page in pages if not self._has_other(page)), pages[0])
            shares, rest = [[chosen]], [page for page in pages if page != chosen]
        elif linked := self._over_link(peer, pages[:_MAX_ASK_PAGES]):
            asked = set(linked)
            shares, rest = [linked], [page for page in pages if page not in asked]
        else:
            had = self._had.get(address_of(peer), len(pages))
            lanes = max(1, min(self._lanes(peer, len(pages)), had, len(pages)))
            size = min(-(-len(pages) // lanes), _MAX_ASK_PAGES)
            shares = [pages[at : at + size] for at in range(0, min(size * lanes, len(pages)), size)]
            rest = pages[size * lanes :]
        asks: list[Ask] = []
        for share in shares:
            until = self._until
            if linked or any(self._has_other(page) for page in share):
                until = now + (until - now) / 2
            if probe:
                until = min(until, now + _PROBE_S)
            asks.append(Ask(peer, share, now, until, probe=probe, lanes=len(shares), over_link=bool(linked)))
        self._asks[address_of(peer)] = list(asks)
        return asks, rest

    def _forget(self, ask: Ask) -> None:
        """It is not under way any more."""
        asks = self._asks.get(address_of(ask.peer), [])
        if ask in asks:
            asks.remove(ask)
            if not asks:
                del self._asks[address_of(ask.peer)]

    def _has_other(self, page: int) -> bool:
        return len(self._holders[page]) > 1

    def _elsewhere(self, page: int, reason: str, *, tried: bool = True) -> bool:
        """To the next holder. False when there is none: then that was the end of it."""
        if tried or page not in self._why:
            self._why[page] = reason
        holders = self._holders[page]
        left = holders.pop(0)
        if self._recalled:
            self._tried.setdefault(page, []).append(address_of(left))
        if not holders:
            self._end(page, self._why[page])
            return False
        self._queue(page)
        return True

    def _queue(self, page: int) -> None:
        self._waiting.setdefault(address_of(self._holders[page][0]), []).append(page)

    def _take_waiting(self) -> list[list[int]]:
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def _end(self, page: int, reason: str, *, final: bool = False) -> None:
        if self._recalled and not final:
            self.doubtful[page] = Doubt(reason, self._tried.get(page, []))
        else:
            self.reasons[reason] += 1
        self.unsettled -= 1

    def _blame(self, ask: Ask) -> None:
        """Lanes that fail together are one failure."""
        if not ask.blamed:
            ask.blamed = True
            for other in self._asks.get(address_of(ask.peer), ()):
                other.blamed = True
            self.blamed.append(ask.peer.node)
