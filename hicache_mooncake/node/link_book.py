"""Which links to other nodes there are, being made, or left alone for a while, and who is using which. No I/O and no clock.

A link is known by the id that its maker chose. It is MAKING, UP, or DOWN; a DOWN one is remembered until nobody uses it, since
room that its peer may have written to must not be used before it is known what became of its end."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import STABLE_S, Backoff

RETRY_FIRST_S, RETRY_MAX_S = 0.5, 300.0
"""A link that dies again and again is made ever more seldom."""
REFUSED_S = 30.0
UNKNOWN_S = 300.0
"""How long a node is left alone that does not know of links."""
IDLE_S = 600.0
_MAX_LINKS = 1024
_MAX_MAKING = 8
_MAX_OF_PEER = 2
"""Two nodes that begin at the same time have one each; a third means that its maker has lost the first."""
_MAX_PEERS = 4096


class State(enum.Enum):
    MAKING = "making"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class Entry:
    """One link. `users`: landings and transfers that may have something under way on it."""

    id: int
    node: str
    incarnation: bytes
    state: State
    since: float
    used_at: float
    users: int = 0


@dataclass(slots=True)
class _Peer:
    retry: Backoff
    why: str = ""
    """The last link's end, or why none could be made."""


@dataclass(frozen=True, slots=True)
class PeerView:
    """For status pages: `state` is up, making, or down."""

    node: str
    state: str
    why: str


class LinkBook:
    """Not thread-safe."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 0.0
        self._links: dict[int, Entry] = {}
        self._by_node: dict[str, list[Entry]] = {}
        self._peers: dict[tuple[str, bytes], _Peer] = {}
        """By node and its life, longest unused first. Masters may for a while name both of two lives."""

    def __contains__(self, link_id: int) -> bool:
        return link_id in self._links

    def find(self, link_id: int) -> Entry | None:
        return self._links.get(link_id)

    def count(self, state: State) -> int:
        return sum(entry.state is state for entry in self._links.values())

    def link_to(self, node: str, incarnation: bytes, now: float) -> int:
        """The id of the newest link that is up to this life of the node; 0: there is none."""
        found = [entry for entry in self._of(node) if entry.state is State.UP and entry.incarnation == incarnation]
        if not found:
            return 0
        newest = max(found, key=lambda entry: entry.since)
        newest.used_at = now
        return newest.id

    # ------------------------------------------------------------------ beginnings

    def want(self, peer: p.Peer, link_id: int, now: float) -> bool:
        """There is no link to this node and one would be of use. True: make it now, with this id, and tell `up` or `down`."""
        self._now = now
        known = self._peer(peer.node, peer.incarnation)
        if any(entry.state is State.MAKING for entry in self._of(peer.node)) or not known.retry.due():
            return False
        if self.count(State.MAKING) >= _MAX_MAKING:
            return False
        if len(self._links) >= _MAX_LINKS:
            known.why = f"there are {_MAX_LINKS} links already"
            return False
        self._add(Entry(link_id, peer.node, peer.incarnation, State.MAKING, now, now))
        return True

    def accept(self, link_id: int, node: str, incarnation: bytes, now: float) -> str:
        """A node asks for a link by this id: "" and it is MAKING, or why not."""
        self._now = now
        if not link_id or link_id in self._links:
            return "a link by this id is known already"
        if len(self._links) >= _MAX_LINKS:
            return f"there are {_MAX_LINKS} links already"
        self._peer(node, incarnation)
        self._add(Entry(link_id, node, incarnation, State.MAKING, now, now))
        return ""

    def up(self, link_id: int, now: float) -> list[int]:
        """The link works. Returns links of that node that are to be ended: of a former life, or that this one replaces."""
        entry = self._links[link_id]
        entry.state, entry.since, entry.used_at = State.UP, now, now
        others = [each for each in self._of(entry.node) if each.state is State.UP and each is not entry]
        former = [each.id for each in others if each.incarnation != entry.incarnation]
        same = sorted((each for each in others if each.incarnation == entry.incarnation), key=lambda each: each.since)
        return former + [each.id for each in same[: max(0, len(same) + 1 - _MAX_OF_PEER)]]

    # ------------------------------------------------------------------ ends

    def down(self, link_id: int, now: float, why: str, *, at_least_s: float = 0.0) -> None:
        """It could not be made, or has ended. It is not made anew before a while, which is longer each time; one that stood for
        long begins with a short one."""
        self._now = now
        entry = self._links[link_id]
        if entry.state is State.DOWN:
            return
        peer = self._peer(entry.node, entry.incarnation)
        if entry.state is State.UP and now - entry.since >= STABLE_S:
            peer.retry.succeeded()
        peer.retry.failed(at_least_s)
        peer.why = why
        entry.state, entry.since = State.DOWN, now

    def idle(self, now: float) -> list[int]:
        """Links that nobody has used for long: to be ended."""
        return [
            each.id
            for each in self._links.values()
            if each.state is State.UP and not each.users and now - each.used_at >= IDLE_S
        ]

    def forget(self) -> list[int]:
        """The links that are down and used by nobody: not known any more from here on."""
        gone = [each.id for each in self._links.values() if each.state is State.DOWN and not each.users]
        for link_id in gone:
            entry = self._links.pop(link_id)
            of_node = self._by_node[entry.node]
            of_node.remove(entry)
            if not of_node:
                del self._by_node[entry.node]
        return gone

    # ------------------------------------------------------------------ users

    def use(self, link_id: int, now: float) -> bool:
        """Something is to be under way on it until `unuse`. False when it is not up."""
        entry = self._links.get(link_id)
        if entry is None or entry.state is not State.UP:
            return False
        entry.users += 1
        entry.used_at = now
        return True

    def unuse(self, link_id: int) -> None:
        self._links[link_id].users -= 1

    # ------------------------------------------------------------------ for people

    def views(self, limit: int) -> list[PeerView]:
        """Of at most so many nodes, those with links first."""
        latest = {node: peer for (node, _), peer in self._peers.items()}
        views: list[PeerView] = []
        for node, peer in latest.items():
            states = {entry.state for entry in self._of(node)}
            state = next((state for state in (State.UP, State.MAKING) if state in states), State.DOWN)
            views.append(PeerView(node, state.value, "" if state is State.UP else peer.why))
        views.sort(key=lambda view: (view.state != State.UP.value, view.node))
        return views[:limit]

    def validate(self) -> None:
        """Everything that must hold between two calls; tests run it after every event."""
        assert len(self._links) <= _MAX_LINKS
        assert len(self._peers) <= _MAX_PEERS
        assert all(entry.id == link_id and entry.users >= 0 for link_id, entry in self._links.items())
        indexed = sorted(entry.id for of_node in self._by_node.values() for entry in of_node)
        assert indexed == sorted(self._links)
        assert all(of_node and {entry.node for entry in of_node} == {node} for node, of_node in self._by_node.items())

    # ------------------------------------------------------------------ inside

    def _add(self, entry: Entry) -> None:
        self._links[entry.id] = entry
        self._by_node.setdefault(entry.node, []).append(entry)

    def _of(self, node: str) -> list[Entry]:
        return self._by_node.get(node, [])

    def _peer(self, node: str, incarnation: bytes) -> _Peer:
        """What is known of this life of a node. Nothing is held against a new one."""
        life = (node, incarnation)
        peer = self._peers.pop(life, None)
        if peer is None:
            peer = _Peer(Backoff(RETRY_FIRST_S, RETRY_MAX_S, lambda: self._now, self._rng))
        self._peers[life] = peer
        if len(self._peers) > _MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        return peer
