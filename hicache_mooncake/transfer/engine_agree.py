"""Which transport two engines use: one after the other is tried over their control connection, until one works.

The side that connected decides what is tried. Both ends run the transport's handshake on its channels and say how it ended; it
is used where both have a link.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence

from hicache_mooncake import protocol as p
from hicache_mooncake.transfer import engine_wire as w
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.shm_copy import unreachable
from hicache_mooncake.transfer.transport import Link, Transport, TransportError
from hicache_mooncake.wire import Wire

_HANDSHAKE_S = 10.0
"""For one transport, so that another can still be tried."""
_MAX_CHANNELS = 64
_log = logging.getLogger("hicache_mooncake.engine")


def agree(
    dialler: w.Dialler,
    address: str,
    wire: Wire,
    greeted: w.Greeted,
    schemes: Sequence[str],
    transports: Mapping[str, Transport],
    unusable: Mapping[str, str],
    boot_id: str,
    deadline: float,
) -> tuple[str, Link, str]:
    """The side that connected: scheme and link of the first of `schemes` that works, and why it is that one. Raises
    TransportError when none does, OSError or ProtocolError when the control connection `wire` fails."""
    passed: list[str] = []
    failed = False
    for scheme in schemes:
        if scheme in unusable:
            passed.append(f"{scheme} is not usable here ({unusable[scheme]})")
            continue
        transport = transports[scheme]
        if scheme not in greeted.schemes:
            passed.append(f"the peer has no {scheme}")
            continue
        if transport.local_only and greeted.boot_id != boot_id:
            passed.append(f"the peer is on another host, so no {scheme}")
            continue
        if transport.local_only and (problem := out_of_reach(greeted.sample)):
            passed.append(f"{problem}, so no {scheme}")
            continue
        try:
            link = _try(dialler, wire, scheme, transport, greeted, deadline)
        except TransportError as error:
            passed.append(f"{scheme} failed ({error})")
            failed = True
            continue
        why = f"{scheme}: " + ("; ".join(passed) or "the first choice")
        if failed:
            _log.warning("peer %s is reached over %s", address, why)
        return scheme, link, why
    raise TransportError("unavailable", f"no transport works with engine {address}: {'; '.join(passed)}")


def _try(dialler: w.Dialler, wire: Wire, scheme: str, transport: Transport, greeted: w.Greeted, deadline: float) -> Link:
    count = min(transport.channels, _MAX_CHANNELS)
    until = min(deadline, time.monotonic() + _HANDSHAKE_S)
    wire.send(w.Open(scheme, count, max(0.0, until - time.monotonic())), deadline=deadline)
    opened = wire.receive(w.opened_decoder, deadline)
    if isinstance(opened, p.Refused):
        raise TransportError("unavailable", opened.reason)
    link, failure = None, ""
    channels: list[socket.socket] = []
    try:
        for index in range(count):
            channels.append(dialler.unix(greeted.socket, until) if transport.local_only else dialler.tcp(until))
            tcp.send_message(channels[-1], w.Channel(opened.ticket, index))
            w.unbounded(channels[-1])
    except (OSError, p.ProtocolError) as error:
        failure = f"its channels cannot be made: {error}"
        for channel in channels:
            channel.close()
    else:
        try:
            link = transport.connect(channels, until)
        except TransportError as error:
            failure = str(error)
    return _settle(wire, link, failure, deadline)


def answer(
    wire: Wire, door: w.Door, transports: Mapping[str, Transport], name: str, sample: w.Sample | None, deadline: float
) -> tuple[str, Link]:
    """The side that was connected to: takes part in what the other side tries until something works. `sample`: the other
    side's. Raises OSError or ProtocolError when the control connection fails."""
    while True:
        asked = wire.receive(w.asked_decoder, deadline)
        if not isinstance(asked, w.Open):
            raise p.ProtocolError("the other side has settled what it had not begun")
        transport = transports.get(asked.scheme)
        if transport is None or not 0 < asked.channels <= _MAX_CHANNELS:
            wire.send(p.Refused(f"{name} has no transport {asked.scheme}"), deadline=deadline)
            continue
        if transport.local_only and (problem := out_of_reach(sample)):
            wire.send(p.Refused(f"seen from engine {name} {problem}"), deadline=deadline)
            continue
        until = min(deadline, time.monotonic() + min(max(asked.budget_s, 0.0), _HANDSHAKE_S))
        link, failure = None, ""
        ticket, gathering = door.ticket(asked.channels)
        try:
            wire.send(w.Opened(ticket), deadline=deadline)
            channels = gathering.take(wire.fileno(), until)
        finally:
            door.void(ticket)
        if channels is None:
            failure = "its channels did not come"
        else:
            try:
                link = transport.accept(channels, until)
            except TransportError as error:
                failure = str(error)
        try:
            return asked.scheme, _settle(wire, link, failure, deadline)
        except TransportError as error:
            _log.info("engine %s: %s failed with a peer: %s", name, asked.scheme, error)


def out_of_reach(sample: w.Sample | None) -> str:
    """Why the process that has it cannot be reached into from here; empty if it can, or need not be."""
    if sample is None:
        return ""
    problem = unreachable(sample.pid, sample.address, sample.content)
    return problem and f"the peer has memory without a descriptor, and its process cannot be reached into ({problem})"


def _settle(wire: Wire, link: Link | None, failure: str, deadline: float) -> Link:
    """Tell how the handshake ended here, and hear how it ended there. Raises TransportError unless both have a link."""
    try:
        wire.send(w.Settled(failure), deadline=deadline)
        theirs: w.Settled = wire.receive(w.settled_decoder, deadline)
    except BaseException:
        if link is not None:
            link.close()
        raise
    if link is None:
        raise TransportError("peer", failure + (f"; the peer says: {theirs.error}" if theirs.error else ""))
    if theirs.error:
        link.close()
        raise TransportError("peer", f"it failed at the peer: {theirs.error}")
    return link
