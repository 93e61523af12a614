"""Which page is asked of which node, and what is tried at another one after a failure. No I/O and no clock: time comes in.

A page has up to two holders. It is asked of the first, and whatever goes wrong there, of the second, within the same deadline.
Where a second one exists, the first gets half of the time that is left, so that one that hangs leaves time for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import LEAST_S, Admission
from hicache_mooncake.transfer.peers import Address, address_of

_MAX_ASK_PAGES = 1024
"""Asked for at once: more go in several turns, so that no holder keeps pages pinned for the whole of a large batch."""
_PROBE_S = 0.5


class Ask:
    """Pages to be read from one node in one request. `left`: those of which it is not known yet what became of them."""

    def __init__(self, peer: p.Peer, pages: Sequence[int], now: float, until: float, *, probe: bool) -> None:
        self.peer = peer
        self.pages = list(pages)
        self.asked_at = now
        self.until = until
        """When it is to be given up, at the latest."""
        self.probe = probe
        self.left = dict.fromkeys(self.pages)
        self.blamed = False

    @property
    def arrived(self) -> bool:
        """Something of it is settled: the node has answered."""
        return len(self.left) < len(self.pages)


class FetchPlan:
    """The pages of one batch that come from other nodes. Every page ends as arrived or under one reason in `reasons`.

    Use: `add` the pages, then until `done`: carry out what `next` says, report of each Ask `arrived` and `missed` pages and its
    end (`ended`, `again`), and end those that are `expired`. What is under way for a page must have been stopped, so that it
    cannot write any more, before its Ask is reported as ended.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.reasons: Counter[str] = Counter()
        self.blamed: list[str] = []
        """Nodes that failed, once a failure: they could not be reached, broke off, were silent, or sent damaged bytes."""
        self.unsettled = 0
        self._holders: dict[int, list[p.Peer]] = {}
        self._why: dict[int, str] = {}
        self._stayed: set[int] = set()
        self._waiting: dict[Address, list[int]] = {}
        self._asks: dict[Address, Ask] = {}

    @property
    def done(self) -> bool:
        return self.unsettled == 0

    def add(self, page: int, holders: Sequence[p.Peer]) -> None:
        """`holders` in the order in which they are tried, at least one."""
        several = {address_of(peer): peer for peer in reversed(holders)}
        self._holders[page] = list(reversed(several.values()))
        self.unsettled += 1
        self._queue(page)

    def next(self, now: float, admit: Callable[[p.Peer], Admission]) -> list[Ask]:
        """What to ask now: at most one Ask a node is under way. Nodes that may not be tried are passed over."""
        if self.deadline - now < LEAST_S:
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
                ask, rest = self._make(peer, pages, now, probe=admission is Admission.PROBE)
                asks.append(ask)
                for page in rest:
                    if admission is Admission.PROBE and self._has_other(page):
                        passed_over |= self._elsewhere(page, "peer_down", tried=False)
                    else:
                        self._queue(page)
        return asks

    def due(self) -> float | None:
        """When the next Ask is to be given up."""
        return min((ask.until for ask in self._asks.values()), default=None)

    def expired(self, now: float) -> list[Ask]:
        return [ask for ask in self._asks.values() if now >= ask.until]

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
        if self._asks.get(address_of(ask.peer)) is ask:
            del self._asks[address_of(ask.peer)]
        if blame:
            self._blame(ask)
        left, ask.left = list(ask.left), {}
        for page in left:
            if final:
                self._end(page, reason)
            elif stay and not self._has_other(page) and page not in self._stayed:
                self._stayed.add(page)
                self._why[page] = reason
                self._queue(page)
            else:
                self._elsewhere(page, reason)

    def again(self, ask: Ask) -> None:
        """The connection was stale, which says nothing about the node: what is left is asked of it once more."""
        del self._asks[address_of(ask.peer)]
        left, ask.left = list(ask.left), {}
        for page in left:
            self._queue(page)

    # ------------------------------------------------------------------ inside

    def _make(self, peer: p.Peer, pages: list[int], now: float, *, probe: bool) -> tuple[Ask, list[int]]:
        """The Ask, and those of the pages that are not in it."""
        chosen, rest = pages[:_MAX_ASK_PAGES], pages[_MAX_ASK_PAGES:]
        if probe:  # with a page that is lost otherwise, where there is one
            chosen = [next((page for page in pages if not self._has_other(page)), pages[0])]
            rest = [page for page in pages if page != chosen[0]]
        until = self.deadline
        if any(self._has_other(page) for page in chosen):
            until = now + (self.deadline - now) / 2
        if probe:
            until = min(until, now + _PROBE_S)
        ask = self._asks[address_of(peer)] = Ask(peer, chosen, now, until, probe=probe)
        return ask, rest

    def _has_other(self, page: int) -> bool:
        return len(self._holders[page]) > 1

    def _elsewhere(self, page: int, reason: str, *, tried: bool = True) -> bool:
        """To the next holder. False when there is none: then that was the end of it."""
        if tried or page not in self._why:
            self._why[page] = reason
        holders = self._holders[page]
        holders.pop(0)
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

    def _end(self, page: int, reason: str) -> None:
        self.reasons[reason] += 1
        self.unsettled -= 1

    def _blame(self, ask: Ask) -> None:
        if not ask.blamed:
            ask.blamed = True
            self.blamed.append(ask.peer.node)
