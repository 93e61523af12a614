"""Which nodes are there, and in which state: no I/O, and time comes in as an argument."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hicache_mooncake.protocol import PROTOCOL_MAX

from .rotation import Rotation

JOINING, ACTIVE, SICK, SUSPECTED, DRAINING, GONE = "joining", "active", "sick", "suspected", "draining", "gone"
STATES = (JOINING, ACTIVE, SICK, SUSPECTED, DRAINING, GONE)
MAX_NODES = 1024
GONE_LISTED = 10
"""A gone node stays on the list for this many times `forget_s`, so that an operator sees what is missing."""

_LOOPBACK_NAMES = {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_wildcard(host: str) -> bool:
    """Is this an address to listen on, not one to connect to?"""
    address = _address(host)
    return host.strip() in ("", "*") or (address is not None and address.is_unspecified)


def is_loopback(host: str) -> bool:
    """Can only the node's own host reach this address?"""
    address = _address(host)
    return host.lower().rstrip(".") in _LOOPBACK_NAMES or (address is not None and address.is_loopback)


@dataclass(slots=True)
class Member:
    """A node as the master knows it. `last_heard` and `since` are on the caller's clock."""

    name: str
    incarnation: bytes
    host: str
    port: int
    capacity_bytes: int
    last_heard: float
    since: float
    state: str = JOINING
    complete: bool = False
    """Does the directory have everything this node holds, but for what is on its way?"""
    silent: bool = False
    """Not heard of for `ttl_s`."""
    sick: bool = False
    """Others cannot read from it."""
    draining: bool = False
    """It is about to leave, by its own word."""
    version: int = PROTOCOL_MAX
    """Of the protocol, as negotiated."""
    host_id: str = ""
    socket: str = ""
    """Where ranks and movers of its host reach it."""
    used_bytes: int = 0
    objects: int = 0
    hits: int = 0
    lookups: int = 0
    load: int = 0
    """Bytes sent to other nodes, between its last two heartbeats."""
    room_bytes: int = -1
    """As in Beat."""
    reported: bool = False
    """Has it said what it uses? What a node that joins a restarted master holds is not known before."""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


class NoRoom(Exception):
    """The master has as many nodes as it takes."""


class Membership:
    """Nodes by name, and whether lookups answer them.

    suspected: not heard of for `ttl_s`, kept but not answered, straight back with its next sign of life;
    joining: no complete snapshot yet, not answered;
    sick: lives, but others report that they cannot read from it, not answered for a while;
    draining: says that it will leave, answered after all others;
    active: answered;
    gone: not heard of for `forget_s`, its keys are dropped.
    Where several hold, the first in this order is the state. Every change of who is answered moves `version`. Not thread-safe.
    """

    def __init__(self, ttl_s: float, forget_s: float = 60.0, max_nodes: int = MAX_NODES) -> None:
        self.ttl_s = ttl_s
        self.forget_s = max(forget_s, ttl_s)
        self.max_nodes = max_nodes
        self.version = 0
        self.name_clashes = 0
        self.rotation = Rotation()
        self._counts: tuple[int, dict[str, int]] = (-1, {})
        self._readable: tuple[int, frozenset[str]] = (-1, frozenset())
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        """All members, also those that are gone but still listed."""
        return iter(self._members.values())

    def live(self) -> list[Member]:
        """Every member that is not gone."""
        return [member for member in self._members.values() if member.state != GONE]

    def counts(self) -> dict[str, int]:
        """Members by state."""
        version, counts = self._counts
        if version != self.version:
            counts = dict.fromkeys(STATES, 0)
            for member in self._members.values():
                counts[member.state] += 1
            self._counts = self.version, counts
        return dict(counts)

    @property
    def active(self) -> int:
        """How many members are active."""
        return self.counts()[ACTIVE]

    def get(self, name: str, incarnation: bytes | None = None) -> Member | None:
        """The live member of this name, if it is this incarnation."""
        member = self._members.get(name)
        if member is None or member.state == GONE or (incarnation is not None and member.incarnation != incarnation):
            return None
        return member

    def join(
        self,
        name: str,
        incarnation: bytes,
        host: str,
        port: int,
        capacity_bytes: int,
        now: float,
        *,
        version: int = PROTOCOL_MAX,
        host_id: str = "",
        draining: bool = False,
        socket: str = "",
    ) -> tuple[Member, bool]:
        """Take a node in, or a new incarnation or address of it. Returns the member, and whether its name clashes: the same
        name was heard of within `ttl_s` from another incarnation at another address. The newer wins. Raises NoRoom."""
        old = self.get(name)
        if old is not None and old.incarnation == incarnation:
            old.host, old.port, old.capacity_bytes = host, port, capacity_bytes
            old.version, old.host_id, old.draining, old.socket = version, host_id, draining, socket
            self.version += 1
            self._heard(old, now)
            return old, False
        clash = old is not None and not old.silent and old.address != (host, port)
        if name not in self._members and len(self._members) >= self.max_nodes:
            gone = [member for member in self._members.values() if member.state == GONE]
            if not gone:
                raise NoRoom(f"{len(self._members)} nodes are members already, the most this master takes")
            del self._members[min(gone, key=lambda member: member.last_heard).name]
        self.name_clashes += clash
        self._remove(name)
        member = Member(
            name,
            incarnation,
            host,
            port,
            capacity_bytes,
            last_heard=now,
            since=now,
            version=version,
            host_id=host_id,
            draining=draining,
            socket=socket,
        )
        self._members[name] = member
        return member, clash

    def at_address(self, host: str, port: int, other_than: str) -> str:
        """Name of another live node that advertises this address; "" when there is none."""
        for member in self.live():
            if member.name != other_than and member.address == (host, port) and not member.silent:
                return member.name
        return ""

    def touch(self, name: str, incarnation: bytes, now: float) -> Member | None:
        """A sign of life. None when this incarnation is not a member: it must join again."""
        member = self.get(name, incarnation)
        if member is not None:
            self._heard(member, now)
        return member

    def complete(self, name: str) -> None:
        """The directory now has what this node holds, in DRAM at least."""
        member = self._members[name]
        member.complete = True
        self._settle(member)

    def drain(self, name: str, draining: bool) -> None:
        """The node says whether it is about to leave."""
        member = self._members[name]
        member.draining = draining
        self._settle(member)

    def report(self, reader: str, failed: Iterable[str], now: float) -> list[Member]:
        """A member says that reads from these nodes failed. Returns those that are sick from now on."""
        version, nodes = self._readable
        if version != self.version:
            nodes = frozenset(m.name for m in self._members.values() if m.state in (ACTIVE, DRAINING, SICK))
            self._readable = self.version, nodes
        fallen = [self._members[name] for name in self.rotation.report(reader, failed, nodes, now)]
        for member in fallen:
            member.sick = True
            self._settle(member)
        return fallen

    def recover(self, now: float) -> list[Member]:
        """Let time pass for the sick; returns those that are answered again, on probation."""
        back = [self._members[name] for name in self.rotation.recover(now)]
        for member in back:
            member.sick = False
            self._settle(member)
        return back

    def leave(self, name: str, incarnation: bytes) -> Member | None:
        """Take a node off the list. None when this incarnation is not a member."""
        member = self.get(name, incarnation)
        if member is not None:
            self._remove(name)
        return member

    def expire(self, now: float) -> list[Member]:
        """Suspect who is late; returns the members that are gone with this call, whose keys must be dropped."""
        gone = []
        for member in list(self._members.values()):
            silent_s = now - member.last_heard
            if member.state == GONE:
                if silent_s > GONE_LISTED * self.forget_s:
                    self._remove(member.name)
            elif silent_s > self.forget_s:
                member.state = GONE
                member.sick = False
                self.rotation.forget(member.name)
                self.version += 1
                gone.append(member)
            elif silent_s > self.ttl_s and not member.silent:
                member.silent = True
                self._settle(member)
        return gone

    def excuse(self, seconds: float, now: float) -> None:
        """For so long nobody could be heard: it counts for nobody's silence."""
        for member in self._members.values():
            if member.state != GONE:
                member.last_heard = max(member.last_heard, min(now, member.last_heard + seconds))

    def validate(self) -> None:
        """For tests: names and states are consistent."""
        assert len(self._members) <= self.max_nodes
        counts = dict.fromkeys(STATES, 0)
        for name, member in self._members.items():
            assert member.name == name
            assert member.state == (GONE if member.state == GONE else _state_of(member))
            assert member.sick == (member.state != GONE and self.rotation.is_sick(name))
            assert member.last_heard >= member.since
            counts[member.state] += 1
        assert counts == self.counts()
        self.rotation.validate({member.name for member in self.live()})

    def _heard(self, member: Member, now: float) -> None:
        member.last_heard = max(now, member.last_heard)
        member.silent = False
        self._settle(member)

    def _settle(self, member: Member) -> None:
        state = _state_of(member)
        if state != member.state:
            member.state = state
            self.version += 1

    def _remove(self, name: str) -> None:
        """Whoever still has this member in hand sees that it is gone."""
        member = self._members.pop(name, None)
        self.version += 1
        if member is not None:
            member.state = GONE
            self.rotation.forget(name)


def _state_of(member: Member) -> str:
    if member.silent:
        return SUSPECTED
    if not member.complete:
        return JOINING
    if member.sick:
        return SICK
    return DRAINING if member.draining else ACTIVE
