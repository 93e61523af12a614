"""Room of this node's segment that links write to: lent, and fenced before it is used again.

Whose room is what is decided in `landing`, how much there is for whom in `window`; here links are ended, and the store is told.

Lock order: `_lock` before the node's. Neither is held while a link is ended."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

import msgspec

from hicache_mooncake import protocol as p
from hicache_mooncake.node.allocator import blocks_of
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.landing import Landing, Landings
from hicache_mooncake.node.links import Links
from hicache_mooncake.node.window import Window
from hicache_mooncake.quiet import QuietLog

log = logging.getLogger(__name__)

_SHARE = 8
"""This part of the segment, at most, is lent to links at a time."""


class Lending(Protocol):
    """Whose segment it is: a node."""

    core: NodeCore
    lock: threading.Lock
    links: Links


class Rooms:
    """Thread-safe. Owners are connections, as in `Store`. `window_bytes`: what one peer may be writing to at a time."""

    def __init__(self, node: Lending, window_bytes: int) -> None:
        self._node = node
        self._links = node.links
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        """Notified when a landing has ended."""
        self._landings = Landings(node.core.store.allocator.capacity // _SHARE)
        self._window = Window(window_bytes)
        self._given_up = False
        self._quiet = QuietLog(log)

    def land(self, owner: int, asked: p.Locate, located: p.Located) -> p.Located:
        """Say over which links pages of this answer may come, and where to. They are the owner's until `landed`."""
        if not asked.links or not located.peers or not self._links.possible:
            return located
        pages: dict[int, list[int]] = {}
        claims: dict[int, list[tuple[int, int]]] = {}
        room = iter(located.room)
        for key, (status, where) in enumerate(zip(located.status, located.where, strict=True)):
            if status == p.REMOTE and not located.peers[where].socket:  # a neighbour's segment can be mapped
                pages.setdefault(where, []).append(key)
            elif status == p.FETCH:
                claims.setdefault(where, []).append((key, next(room)))
        asked_of = pages.keys() | claims.keys()
        links = [self._links.link_to(peer) if index in asked_of else 0 for index, peer in enumerate(located.peers)]
        if not any(links):
            return located
        return self._lend(owner, asked.length, located, links, pages, claims)

    def _lend(
        self,
        owner: int,
        length: int,
        located: p.Located,
        links: list[int],
        pages: dict[int, list[int]],
        claims: dict[int, list[tuple[int, int]]],
    ) -> p.Located:
        now, size = time.monotonic(), blocks_of(length)
        places = [-1] * len(located.status)
        lent: dict[int, list[int]] = {}
        nodes: dict[int, str] = {}
        claimed: set[int] = set()
        claimed_bytes = 0
        with self._lock:
            if not self._landings.may_open(owner):
                return located
            left = self._landings.room_for(owner, size)
            for index, link in enumerate(links):
                node = located.peers[index].node
                if link not in nodes and (not link or not self._links.begin(link, node)):
                    links[index] = 0
                    continue
                nodes[link] = node  # it may be there more than once
                keys = pages.get(index, [])
                granted = self._window.take(node, owner, size, min(len(keys), left), now) if keys and left else 0
                with self._node.lock:
                    offsets = self._node.core.store.lend(length, granted)
                self._window.give_back(node, owner, size, granted - len(offsets))
                left -= len(offsets)
                of_claims = claims.get(index, [])
                if of_claims and self._landings.may_claim(claimed_bytes + size * len(of_claims)):
                    claimed_bytes += size * len(of_claims)
                    claimed.add(link)
                else:
                    of_claims = []
                for key, offset in [*zip(keys, offsets, strict=False), *of_claims]:
                    places[key] = offset
                lent.setdefault(link, []).extend(offsets)
            for link in [link for link in nodes if not lent[link] and link not in claimed]:
                self._links.done(link)
                links = [0 if each == link else each for each in links]
            if not any(links):
                return located
            landing = self._landings.open(
                owner, size, lent, nodes, now, txn=located.txn, claimed=claimed, claimed_bytes=claimed_bytes
            )
        return msgspec.structs.replace(located, links=links, landing=landing.id, places=places)

    def landed(self, owner: int, message: p.Landed) -> None:
        """The mover is done. Returns when the room has gone back, after the fence of what is not quiet."""
        self._links.received(max(0, message.received))
        with self._lock:
            landing = self._landings.find(owner, message.landing)
            fence = self._landings.begin_end(landing, message.quiet) if landing is not None else None
        if landing is not None and fence is not None:
            self._end(landing, fence)

    def settle(self, owner: int, txn: int) -> None:
        """The room of this transaction is about to be stored or freed: nothing may be under way to it."""
        with self._lock:
            landing = self._landings.of_txn(owner, txn)
        if landing is not None:
            self._settle(landing)

    def settle_owner(self, owner: int) -> None:
        """The same of all that this owner has: its connection has ended."""
        with self._lock:
            landings = self._landings.of_owner(owner)
        for landing in landings:
            self._settle(landing)

    def _settle(self, landing: Landing) -> None:
        with self._lock:
            fence = self._landings.begin_end(landing)
            if fence is None:
                self._settled.wait_for(lambda: self._landings.find(landing.owner, landing.id) is None)
                return
        self._end(landing, fence)

    def _end(self, landing: Landing, fence: set[int]) -> None:
        """Fence these links, and give the room back."""
        refused = {link for link in fence if not self._links.fence(link, "a load over it did not come to its end")}
        with self._lock, self._node.lock:
            if refused & landing.claimed:
                lost = self._node.core.strand(landing.owner, landing.txn)
                self._landings.strand(refused & landing.claimed, *lost)
            ended = self._landings.ended(landing, refused)
            self._node.core.store.take_back(ended.free)
            for link, places in landing.places.items():
                self._window.give_back(landing.nodes[link], landing.owner, landing.length, len(places))
            self._settled.notify_all()
        for link in refused:
            self._look_again(link)
        for link in landing.links:
            self._links.done(link)

    def strand(self, owner: int, txn: int, link: int) -> None:
        """The same of pushed pages, whose link could not be ended."""
        with self._lock, self._node.lock:
            self._landings.strand({link}, *self._node.core.strand(owner, txn))
        self._look_again(link)

    def _look_again(self, link: int) -> None:
        """Its end may have come while its room was set aside."""
        if self._links.fence(link, ""):
            self.free(link)
        else:
            self._tell_stranded()

    def free(self, link: int) -> None:
        """This link has been ended after all: nothing writes any more to what was set aside for it."""
        with self._lock, self._node.lock:
            self._node.core.store.take_back(self._landings.fenced(link))
            if self._given_up and not self._too_much:
                self._given_up = False
                self._links.resume()

    def expire(self) -> None:
        """Ends what is waited for too long."""
        now = time.monotonic()
        with self._lock:
            expired = [(each, self._landings.begin_end(each)) for each in self._landings.expired(now)]
        for landing, fence in expired:
            if fence is not None:
                self._end(landing, fence)

    def report(self) -> dict[str, int | float | str | bool]:
        with self._lock:
            return {
                "landing_bytes": self._landings.landing_bytes,
                "quarantined_bytes": self._landings.stranded_bytes,
            }

    def _tell_stranded(self) -> None:
        with self._lock:
            text = (
                f"{self._landings.stranded_bytes} bytes of the segment are not used: links could not be ended, and may still "
                "write there. They come back when a link's end does, else when this node is started anew"
            )
            if self._too_much:
                self._given_up = True
                self._links.give_up(text)
        self._quiet(logging.WARNING, "stranded", text)

    @property
    def _too_much(self) -> bool:
        return self._landings.stranded_bytes > self._landings.most_bytes // 2
