"""A node that is told to end: nothing new is stored, its hot pages go to other nodes, and it is read from until nobody does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hicache_mooncake import protocol as p
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.data_server import DataServer
from hicache_mooncake.node.giver import Giver
from hicache_mooncake.node.master_link import MasterLink

log = logging.getLogger(__name__)

_STEP_S = 0.02
_ROOM_S = 1.5
"""How long is waited for a master to say who has room."""
_SETTLE_S = 0.3
"""Until the masters have heard of what others took."""
_QUIET_S = 0.25
"""Nobody reads any more, when nobody has for so long."""
_LINGER_S = 1.5


class Draining(Protocol):
    """What ends: a node."""

    name: str
    core: NodeCore
    lock: threading.Lock
    link: MasterLink
    data: DataServer
    giver: Giver

    def room(self) -> Sequence[p.Room]: ...


def drain(node: Draining, drain_s: float, interrupted: Callable[[], bool]) -> None:
    """Returns after at most `drain_s` and a linger of 1.5 s, or at once when `interrupted` says so. Afterwards the masters do
    not know this node any more, and it can be stopped."""
    started = time.monotonic()
    until = started + drain_s

    def wait(condition: Callable[[], bool], deadline: float) -> bool:
        while not interrupted() and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(_STEP_S)
        return False

    with node.lock:
        node.core.draining = True
    node.link.beat_now()
    counts = node.core.spilling.counts
    if drain_s > 0 and _others(node):
        if wait(lambda: bool(node.room()), min(until, started + _ROOM_S)):
            node.giver.hand_over(until)
            wait(node.giver.handed_over.is_set, until)
            if counts.handed_over:
                wait(lambda: False, min(until, time.monotonic()) + _SETTLE_S)
        log.info(
            "node %s handed %d pages (%d bytes) over in %.1f s",
            node.name,
            counts.handed_over,
            counts.handed_over_bytes,
            time.monotonic() - started,
        )
    node.link.close()
    if drain_s > 0:
        wait(lambda: node.data.quiet_for() >= _QUIET_S, min(time.monotonic(), until) + _LINGER_S)


def _others(node: Draining) -> bool:
    """Is there anybody to give pages to, or who could be reading?"""
    if node.link.state != "joined":
        return False
    cluster = node.link.cluster_status(0.5)
    return cluster is not None and any(other.state == "active" and other.node != node.name for other in cluster.nodes)
