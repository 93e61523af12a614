"""Who holds these pages: which nodes are named, and in what order."""

from __future__ import annotations

from collections.abc import Container, Sequence

from hicache_mooncake.protocol import (
    COLD,
    DRAM,
    MAX_KEYS_PER_MESSAGE,
    MAX_NAMESPACES_PER_MESSAGE,
    Answer,
    Lookup,
    Peer,
    ProtocolError,
    Question,
    select_hashes,
)

from .directory import Directory
from .membership import ACTIVE, DRAINING, Member, Membership
from .stats import Stats
from .streams import TIERS, Streams, count_keys

_LAST = 1 + len(TIERS)
"""Rank of nodes that are about to leave, after every tier of the others."""


class _InRotation:
    """Slots that are answered at the moment, and what is known of each."""

    def __init__(self) -> None:
        self.ranks = bytearray()
        """A byte a slot: 0 is not answered, a lower one is before a higher one."""
        self.peers: dict[int, Peer] = {}
        """As nodes of other hosts reach them."""
        self.neighbours: dict[int, Peer] = {}
        """As those of their own host do, by a socket there."""
        self.twins: dict[int, int] = {}
        """The other tier of the same node."""
        self._members: dict[int, Member] = {}
        self._hosts: dict[str, set[int]] = {}

    def add(self, member: Member, slots: dict[int, int]) -> None:
        peer = Peer(member.name, member.incarnation, member.host, member.port)
        neighbour = Peer(member.name, member.incarnation, member.host, member.port, member.socket)
        if len(slots) == len(TIERS):
            self.twins |= {slots[DRAM]: slots[COLD], slots[COLD]: slots[DRAM]}
        for tier, slot in slots.items():
            self.ranks += bytes(max(0, slot + 1 - len(self.ranks)))
            self.ranks[slot] = _LAST if member.state == DRAINING else 1 + TIERS.index(tier)
            self.peers[slot] = peer
            self.neighbours[slot] = neighbour
            self._members[slot] = member
            if member.host_id:
                self._hosts.setdefault(member.host_id, set()).add(slot)

    def near(self, host_id: str) -> Container[int]:
        """Slots of nodes on this host."""
        return self._hosts.get(host_id, ())

    def load(self, slot: int) -> float:
        return self._members[slot].load


def named_first(questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, list[tuple[bytes, bytes]]]:
    """The pages for which each node is the first holder: pairs of (namespace, blob of hashes)."""
    named: dict[str, list[tuple[bytes, bytes]]] = {}
    for question, answer in zip(questions, answers, strict=True):
        for index, peer in enumerate(answer.peers, 1):
            which = [i for i, holder in enumerate(answer.holder) if holder == index]
            if which:
                named.setdefault(peer.node, []).append((question.namespace, select_hashes(question.hashes, which)))
    return named


class Lookups:
    """Answers of active nodes, DRAM before colder tiers, and after them those of draining ones; among equals the asker's own
    host first, then the less loaded of two. Nobody else is named, nor the asker, and no node is a second holder beside itself.
    A node's socket is told on its own host only. Not thread-safe."""

    def __init__(self, directory: Directory, membership: Membership, streams: Streams, stats: Stats) -> None:
        self._directory = directory
        self._membership = membership
        self._streams = streams
        self._stats = stats
        self._rotation = _InRotation()
        self._as_of = (-1, -1)

    def answer(self, message: Lookup) -> list[Answer]:
        """One answer a question. Raises ProtocolError for what no honest node asks."""
        if len(message.questions) > MAX_NAMESPACES_PER_MESSAGE:
            raise ProtocolError(f"{len(message.questions)} questions in one message: the limit is {MAX_NAMESPACES_PER_MESSAGE}")
        keys = count_keys((question.namespace, question.hashes) for question in message.questions)
        if keys > MAX_KEYS_PER_MESSAGE:
            raise ProtocolError(f"{keys} pages asked for in one message: the limit is {MAX_KEYS_PER_MESSAGE}")
        self._stats.lookups += 1
        self._stats.lookup_keys += keys
        rotation = self._in_rotation()
        asker = self._membership.get(message.asker)
        stream = self._streams.get(message.asker)
        own = tuple(stream.slots.values()) if stream is not None else ()
        near = rotation.near(asker.host_id) if asker is not None else ()
        return [self._answer(question, rotation, own, near) for question in message.questions]

    def _answer(self, question: Question, rotation: _InRotation, own: Container[int], near: Container[int]) -> Answer:
        found = self._directory.find(
            question.namespace,
            question.hashes,
            prefix=question.prefix,
            ranks=rotation.ranks,
            exclude=own,
            near=near,
            load=rotation.load,
            twins=rotation.twins,
        )
        tiers = bytes([self._streams.holder(slot).tier for slot in found.slots])
        self._stats.lookup_hits += len(found.column) - found.column.count(0)
        peers = [(rotation.neighbours if slot in near else rotation.peers)[slot] for slot in found.slots]
        return Answer(found.column, peers, found.others, tiers if any(tiers) else b"")

    def _in_rotation(self) -> _InRotation:
        as_of = self._membership.version, self._streams.version
        if as_of != self._as_of:
            self._rotation, self._as_of = _InRotation(), as_of
            for member in self._membership:
                stream = self._streams.get(member.name)
                if member.state in (ACTIVE, DRAINING) and stream is not None:
                    self._rotation.add(member, stream.slots)
        return self._rotation
