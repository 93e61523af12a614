"""A mover's way to pages that other nodes of its own host hold: their segments, mapped here, instead of the network.

A neighbour is asked as the own node is, over its UNIX socket, and pins what it is asked for until the Release. Its segment is
mapped for reading only, and stays mapped when it dies in the middle of a copy: the checksum decides. Whoever cannot be
reached (another user, another mount namespace) is left to tcp for a while; so is one that did not answer in time. The node
hears of those that cannot (`apart`): it has the host's ranks share their pages then, as it does with any other host's.

Questions to several neighbours are asked before the first answer is waited for, so that they all wait for the slowest and not
one after the other.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Collection

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import BLAME_AFTER_S, Backoff
from hicache_mooncake.transfer.mapping import Mapping, keeps_its_size
from hicache_mooncake.wire import Soon, Wire, WireClosed, WireTimeout, connect

MAX_NEIGHBOURS = 16
"""Connected at once: each has a thread in its node and a mapping here. More go by tcp, until one is not needed any more."""
_CONNECT_S = 0.1
_FIRST_S, _MOST_S = 0.5, 300.0
_UNREACHABLE_S = 30.0
_IDLE_S = 300.0
_MAX_RETRIES = 1024
_TELL_S = 0.1

_from_node = p.decoder(p.FromNode)
Name = tuple[str, bytes, str]


def name_of(peer: p.Peer) -> Name:
    """One life of a node."""
    return peer.node, peer.incarnation, peer.socket


class Neighbour:
    """A connection to one, and its segment once it has said who it is. `asked`: an answer is still to be taken."""

    def __init__(self, peer: p.Peer, wire: Wire, now: float) -> None:
        self.name = name_of(peer)
        self.wire = wire
        self.segment: Mapping | None = None
        self.asked = True
        self.used_at = self.asked_at = now

    def close(self) -> None:
        self.wire.close()
        if self.segment is not None:
            self.segment.close()
            self.segment = None


class _Unreachable(Exception):
    """It will not work a moment later either."""


class Siblings:
    """Of one mover. `ask` and then `answer`, or `ask` returned None and the pages go another way; `tell` ends the pin. Not
    thread-safe. Never raises: what goes wrong is None."""

    def __init__(self, client: str) -> None:
        self._client = client
        self._soon = Soon()
        self._open: dict[Name, Neighbour] = {}
        """Longest unused first."""
        self._retries: dict[Name, Backoff] = {}
        self._why_apart: dict[Name, str] = {}
        """Of those in `_retries` that cannot be reached: why."""
        self._apart: dict[Name, str] = {}
        """Those that were asked for since `take_apart`."""

    # ------------------------------------------------------------------ asking

    def ask(self, peer: p.Peer, question: p.Locate, until: float) -> Neighbour | None:
        """Ask this node for pages, and do not wait for the answer. None: it is to be left alone, or cannot be asked."""
        name = name_of(peer)
        for fresh in (False, True):
            neighbour = self._open.pop(name, None)
            if neighbour is None:
                fresh = True
                neighbour = self._connect(peer, until)
                if neighbour is None:
                    return None
            now = time.monotonic()
            neighbour.asked, neighbour.used_at, neighbour.asked_at = True, now, now
            self._open[name] = neighbour
            try:
                neighbour.wire.send(question, deadline=until)
                return neighbour
            except (WireClosed, WireTimeout, p.ProtocolError):
                self._end(neighbour)
                if fresh:
                    self._failed(name)
                    break
        return None

    def answer(self, neighbour: Neighbour, until: float, at_most: float = 0.0) -> tuple[p.Located, Mapping] | None:
        """What it says, and its segment, which is valid until the next `ask`, `drop` or `close`. None: it is not the node that
        it should be, gone, or too slow; then it is left alone for a while. One that has begun to answer is waited for up to
        `at_most`: who asked may have copied other pages past `until`, which is no fault of the neighbour's."""
        if _readable(neighbour.wire):
            until = max(until, at_most)
        try:
            if neighbour.segment is None:
                neighbour.segment = self._welcomed(neighbour, until)
            located = neighbour.wire.receive(_from_node, until, self._soon)
            if not isinstance(located, p.Located):
                raise p.ProtocolError(f"{type(located).__name__} is no answer to Locate")
        except (_Unreachable, OSError, WireClosed, WireTimeout, p.ProtocolError) as error:
            self._end(neighbour)
            late = isinstance(error, WireTimeout)
            if not late or time.monotonic() - neighbour.asked_at >= BLAME_AFTER_S:
                self._failed(neighbour.name, str(error) if isinstance(error, _Unreachable) else "")
            return None
        neighbour.asked = False
        self._retries.pop(neighbour.name, None)
        self._why_apart.pop(neighbour.name, None)
        return located, neighbour.segment

    def tell(self, neighbour: Neighbour, release: p.Release) -> None:
        """One-way; a failure only costs the connection, with which the pin ends too."""
        if self._open.get(neighbour.name) is not neighbour:
            return
        try:
            neighbour.wire.send(release, deadline=time.monotonic() + _TELL_S)
        except (WireClosed, WireTimeout, p.ProtocolError):
            self._end(neighbour)

    # ------------------------------------------------------------------ between batches

    def take_apart(self) -> list[tuple[str, bytes, str]]:
        """The neighbours that were asked for since the last call and cannot be reached: as in `Release.apart`."""
        apart, self._apart = self._apart, {}
        return [(node, incarnation, why) for (node, incarnation, _), why in apart.items()]

    def filenos(self) -> list[int]:
        """Readable between batches means that a node is gone."""
        return [neighbour.wire.fileno() for neighbour in self._open.values()]

    def drop(self, ready: Collection[int]) -> None:
        """Let go of those whose descriptors these are, of whoever still owes an answer, and of those that were not used for
        long: a dead node's memory must not stay because we had mapped it."""
        now = time.monotonic()
        for neighbour in list(self._open.values()):
            if neighbour.wire.fileno() in ready or neighbour.asked or now - neighbour.used_at > _IDLE_S:
                self._end(neighbour)

    def close(self) -> None:
        for neighbour in list(self._open.values()):
            self._end(neighbour)

    # ------------------------------------------------------------------ inside

    def _connect(self, peer: p.Peer, until: float) -> Neighbour | None:
        """A connection on which a Hello has been sent."""
        name = name_of(peer)
        retry = self._retries.get(name)
        if retry is not None and not retry.due():
            if name in self._why_apart:
                self._apart[name] = self._why_apart[name]
            return None
        if len(self._open) >= MAX_NEIGHBOURS:
            idle = next((other for other in self._open.values() if not other.asked), None)
            if idle is None:
                return None
            self._end(idle)
        now = time.monotonic()
        wire: Wire | None = None
        try:
            # Its path came from a master: nobody but this user or root may be behind it.
            wire = connect(peer.socket, max(0.001, min(_CONNECT_S, until - now)), own_user=True)
            wire.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, "load", self._client), deadline=until)
        except (WireClosed, WireTimeout, ValueError) as error:
            if wire is not None:
                wire.close()
            self._failed(name, "" if isinstance(error, WireTimeout) else str(error))
            return None
        return Neighbour(peer, wire, now)

    @staticmethod
    def _welcomed(neighbour: Neighbour, until: float) -> Mapping:
        welcome = neighbour.wire.receive(_from_node, until)
        fds = neighbour.wire.take_fds()
        try:
            if isinstance(welcome, p.Refused):
                raise _Unreachable(welcome.reason)
            if not isinstance(welcome, p.Welcome) or len(fds) != 1:
                raise _Unreachable("its welcome has no segment")
            node, incarnation, _ = neighbour.name
            if (welcome.node, welcome.incarnation) != (node, incarnation):
                raise _Unreachable(f"it is {welcome.node}, and not {node} in this life of it")
            try:
                if os.fstat(fds[0]).st_size < welcome.segment_bytes:
                    raise _Unreachable("its segment is shorter than it says")
                if not keeps_its_size(fds[0]):
                    raise _Unreachable("its segment could be made shorter while it is read")
                return Mapping(fds[0], welcome.segment_bytes, writable=False)
            except OSError as error:
                raise _Unreachable(str(error)) from error
        finally:
            for fd in fds:
                os.close(fd)

    def _end(self, neighbour: Neighbour) -> None:
        self._open.pop(neighbour.name, None)
        with contextlib.suppress(OSError):
            neighbour.close()

    def _failed(self, name: Name, why_apart: str = "") -> None:
        """`why_apart`: it cannot be reached, and that will not change soon."""
        retry = self._retries.pop(name, None) or Backoff(_FIRST_S, _MOST_S)
        retry.failed(_UNREACHABLE_S if why_apart else 0.0)
        while len(self._retries) >= _MAX_RETRIES:
            oldest = next(iter(self._retries))
            del self._retries[oldest]
            self._why_apart.pop(oldest, None)
        self._retries[name] = retry
        if why_apart:
            self._why_apart[name] = self._apart[name] = why_apart
        else:
            self._why_apart.pop(name, None)


def _readable(wire: Wire) -> bool:
    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    return bool(poll.poll(0))
