"""Pages given away: the coldest of a node that is nearly full, the hottest of one that ends. No I/O, clocks or threads.

The steps yield `AskMasters` and `Give`. Pages are pinned while they move, travel whole (all parts), and are removed here only
when the receiver has said that all parts are stored there. Foreground stores never wait for any of it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

import xxhash

from hicache_mooncake import protocol as p
from hicache_mooncake.node.allocator import blocks_of
from hicache_mooncake.node.asking import AskMasters, Told
from hicache_mooncake.node.placement import Placement
from hicache_mooncake.node.store import OWN, REPLICA, Entry, LogicalPage, Store

BATCH_BYTES = 64 << 20
BATCH_PAGES = 256
ASK_TIMEOUT_S = 0.5
_TRIES = 8
"""How often in a row nobody has taken anything of a batch of a node that ends, until it is given up."""
MAX_HANDED_OVER = 65_536
"""Pages that a node that ends would hand over if it had the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Give:
    """Yielded by a step: push this to that node. The bodies of the keys that it wants are at these offsets of the segment."""

    peer: p.Peer
    push: p.Push
    offsets: list[int]


class Given(NamedTuple):
    """What came of it: PushReply.status, and Pushed.ok of its WRITE keys. The shell sends None when the peer could not be
    reached, broke off or was too slow."""

    status: bytes
    ok: bytes


GiveSteps = Generator[AskMasters | Give, "Told | Given | None", int]
"""Returns how many pages left, or, at the end of a node, were handed over."""

Parts = list[tuple[LogicalPage, tuple[Entry, ...]]]


@dataclasses.dataclass(slots=True)
class Counts:
    spilled: int = 0
    spilled_bytes: int = 0
    spill_duplicates: int = 0
    """Pages dropped instead, since other nodes had them."""
    spill_failures: int = 0
    handed_over: int = 0
    handed_over_bytes: int = 0
    replicas_kept: int = 0
    """Replicas that became own pages, since nobody else had them any more."""


class Spill:
    """Not thread-safe: every step runs under the node's lock. At most one of the steps at a time."""

    def __init__(self, name: str, store: Store, placement: Placement) -> None:
        self.name = name
        self.store = store
        self.placement = placement
        self.counts = Counts()
        self._last_id = 0
        self._to_hand_over: deque[LogicalPage] | None = None

    def due(self, now: float) -> bool:
        """Is there more than the low watermark allows, and somebody with room?"""
        return self.store.used_bytes > self.store.low_bytes and self.placement.any_room(now)

    def spill(self, owner: int, now: float) -> GiveSteps:
        """Give one batch of the coldest own pages away. Guests never travel on."""
        pages = _first(self.store.coldest(BATCH_PAGES, OWN), self.store.used_bytes - self.store.low_bytes)
        asked_for: Parts = [(page, tuple(page.parts)) for page in pages]
        held = yield from self._held_elsewhere(pages, for_good=True)
        if held is None:
            return 0
        gone = 0
        keep: list[LogicalPage] = []
        for page, parts in asked_for:
            if page.in_use:
                continue  # it was cold when this began
            if page.hash not in held:
                keep.append(page)
            elif self.store.used_bytes > self.store.low_bytes and self.store.remove_page(page, parts):
                gone += 1
                self.counts.spill_duplicates += 1
        moved = yield from self._give(owner, keep, now, hot=False)
        for page, parts in moved:
            if not page.in_use and self.store.remove_page(page, parts):
                gone += 1
                self.counts.spilled += 1
                self.counts.spilled_bytes += sum(part.length for part in parts)
        return gone

    def hand_over(self, owner: int, now: float) -> GiveSteps:
        """The same for a node that ends: its hottest pages, which stay here as well and go on being read. Returns how many
        pages were looked at: 0 when there is nothing left to do, or nobody who takes them."""
        if self._to_hand_over is None:
            promised = dict.fromkeys(self.store.promises)  # somebody is about to load them
            self._to_hand_over = deque(promised | dict.fromkeys(self.store.hottest(MAX_HANDED_OVER)))
        batch: list[LogicalPage] = []
        size = 0
        while self._to_hand_over and len(batch) < BATCH_PAGES and size < BATCH_BYTES:
            page = self._to_hand_over.popleft()
            if page.parts and not page.writers:
                batch.append(page)
                size += page.size_bytes
        held = yield from self._held_elsewhere(batch)
        keep = [page for page in batch if held is None or page.hash not in held]
        handed_over = 0
        tries = 0
        while keep and tries < _TRIES:
            moved = yield from self._give(owner, keep, now, hot=True)
            tries = 0 if moved else tries + 1
            handed_over += len(moved)
            self.counts.handed_over_bytes += sum(part.length for _, parts in moved for part in parts)
            there = {page for page, _ in moved}
            keep = [page for page in keep if page not in there]
        self.counts.handed_over += handed_over
        return len(batch) if handed_over or not keep else 0

    def check_replicas(self) -> Generator[AskMasters, Told | None, int]:
        """The replicas that would go next: those that nobody else holds become own pages. Returns how many."""
        pages = self.store.coldest(BATCH_PAGES, REPLICA)
        held = yield from self._held_elsewhere(pages)
        alone = [] if held is None else [page for page in pages if page.hash not in held and page.rank == REPLICA]
        for page in alone:
            self.store.set_rank(page, OWN)
        self.counts.replicas_kept += len(alone)
        return len(alone)

    # ------------------------------------------------------------------ inside

    def _held_elsewhere(
        self, pages: Sequence[LogicalPage], *, for_good: bool = False
    ) -> Generator[AskMasters, Told | None, set[bytes] | None]:
        """Hashes of those pages all of whose parts other nodes have. None: the masters did not say.

        Holders on a disk do not count. With `for_good` only those do that come before this node in the page's own order of
        nodes: two that drop a page at the same time, each since the other has it, would be the end of it."""
        if not pages:
            return set()
        by_namespace: dict[bytes, list[bytes]] = {}
        for page in pages:
            for part in page.parts:
                by_namespace.setdefault(part.namespace, []).append(page.hash)
        alone: set[bytes] = set()
        asked = list(by_namespace.items())
        for first in range(0, len(asked), p.MAX_NAMESPACES_PER_MESSAGE):
            some = asked[first : first + p.MAX_NAMESPACES_PER_MESSAGE]
            questions = [p.Question(namespace, b"".join(hashes), prefix=False) for namespace, hashes in some]
            told = yield AskMasters(questions, ASK_TIMEOUT_S)
            if told is None:
                return None
            for (_, hashes), answer in zip(some, told.answers, strict=True):
                others = answer.others or bytes(len(hashes))
                tiers = answer.tiers or bytes(len(answer.peers))
                for each, *holders in zip(hashes, answer.holder, others, strict=True):
                    named = [answer.peers[at - 1].node for at in holders if at and tiers[at - 1] == p.DRAM]
                    if for_good:
                        own = precedence(self.name, each)
                        named = [node for node in named if precedence(node, each) > own]
                    if not named:
                        alone.add(each)
        return {page.hash for page in pages if page.parts and page.hash not in alone}

    def _give(
        self, owner: int, pages: Sequence[LogicalPage], now: float, *, hot: bool
    ) -> Generator[AskMasters | Give, Told | Given | None, Parts]:
        """Push as many of these as one node takes. Returns those that are there now, each with the parts that it had."""
        holds = self.store.holds
        moving: Parts = [(page, tuple(page.parts)) for page in pages if page.parts and not page.writers]
        moving = [(page, parts) for page, parts in moving if all(map(holds, parts))]  # what was cleared stays cleared
        peer = None
        size = 0
        while moving:
            size = sum(blocks_of(part.length) for _, parts in moving for part in parts)
            peer = self.placement.choose(size, now)
            if peer is not None:
                break
            moving = moving[: len(moving) // 2]
        if peer is None:
            return []
        self.placement.sent(peer.node, size)
        pin = self.store.pin_pages(owner, [page for page, _ in moving], now)
        failed: set[bytes] = set()
        try:
            for (group, namespace, length), parts in _by_form(moving).items():
                failed.update(part.hash for part in parts if not holds(part))
                parts = [part for part in parts if part.hash not in failed]
                if not parts:
                    continue
                given = yield self._push(peer, group, namespace, length, parts, hot=hot)
                stored = _stored(parts, given) if isinstance(given, Given) else None
                if not stored:  # nothing, or it cannot be reached
                    self.placement.refused(peer.node)
                if stored is None:
                    self.counts.spill_failures += 1
                    return []
                failed.update(part.hash for part in parts if part.hash not in stored)
        finally:
            self.store.release(owner, pin)
        return [(page, parts) for page, parts in moving if page.hash not in failed]

    def _push(self, peer: p.Peer, group: bytes, namespace: bytes, length: int, parts: list[Entry], *, hot: bool) -> Give:
        self._last_id += 1
        hashes = b"".join(part.hash for part in parts)
        checksums = [part.checksum for part in parts]
        push = p.Push(p.PROTOCOL_MAX, self.name, namespace, group, hashes, length, checksums, hot, self._last_id)
        return Give(peer, push, [part.offset for part in parts])


def _stored(parts: Sequence[Entry], given: Given) -> set[bytes] | None:
    """Hashes of what the receiver has now; None for an answer that does not fit."""
    if len(given.status) != len(parts) or given.status.count(p.WRITE) != len(given.ok):
        return None
    whole = iter(given.ok)
    return {
        part.hash
        for part, status in zip(parts, given.status, strict=True)
        if status == p.HAVE or (status == p.WRITE and next(whole))
    }


def _by_form(moving: Parts) -> dict[tuple[bytes, bytes, int], list[Entry]]:
    """What one Push can hold: parts of one group, namespace and length."""
    forms: dict[tuple[bytes, bytes, int], list[Entry]] = {}
    for page, parts in moving:
        for part in parts:
            forms.setdefault((page.group, part.namespace, part.length), []).append(part)
    return forms


def precedence(node: str, page_hash: bytes) -> int:
    """Of the nodes that hold a page, the one with the highest keeps it."""
    return xxhash.xxh3_64_intdigest(page_hash + node.encode())


def _first(pages: Iterable[LogicalPage], excess_bytes: int) -> list[LogicalPage]:
    """As many as it takes to be rid of the excess, within a batch."""
    taken: list[LogicalPage] = []
    size = 0
    for page in pages:
        if size >= min(excess_bytes, BATCH_BYTES):
            break
        taken.append(page)
        size += page.size_bytes
    return taken
