"""The thread that gives pages away, as the core says: pushes them to other nodes' data ports, each within a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from typing import Protocol

import msgspec

from hicache_mooncake import protocol as p
from hicache_mooncake.config import Settings
from hicache_mooncake.node.asking import AskMasters, Told
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.links import Links
from hicache_mooncake.node.sending import Sent
from hicache_mooncake.node.spill import Give, Given, GiveSteps
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.peers import peer_closed
from hicache_mooncake.transfer.tls import Tls

log = logging.getLogger(__name__)

_push_decoder = p.decoder(p.PushReply | p.Pushed | p.Refused)

LOOK_S = 0.1
"""How often is looked whether there is anything to give."""
_AFTER_NOTHING_S = 1.0
_CONNECT_S = 1.0
_PUSH_S = 10.0
_BATCH_S = 20.0
"""For all parts of a batch: less than a pin lasts."""
_ANSWER_S = 0.2
"""For a few bytes, when a write over a link has taken all the time."""
_MAX_CONNECTIONS = 8


class Giving(Protocol):
    """Whose pages are given away: a node."""

    name: str
    settings: Settings
    core: NodeCore
    lock: threading.Lock
    segment: Mapping
    links: Links
    data_key: bytes
    tls: Tls | None

    def new_owner(self) -> int: ...
    def changed(self) -> None: ...
    def ask(self, ask: AskMasters) -> Told | None: ...
    def room(self) -> Sequence[p.Room]: ...


class Giver:
    """One thread, one batch at a time: spill goes on beside everything else, and takes no more than that from it."""

    def __init__(self, node: Giving) -> None:
        self._node = node
        self._urgent = threading.Event()
        self._end_at = float("inf")
        self._batch_until = 0.0
        self._connections: OrderedDict[tuple[str, int], tcp.PeerConnection] = OrderedDict()
        self._quiet = QuietLog(log)
        self._thread = threading.Thread(target=self._run, name="giver", daemon=True)
        self.handed_over = threading.Event()
        """Set when a node that ends has given what it could."""

    def start(self) -> None:
        self._thread.start()

    def hand_over(self, until: float) -> None:
        """The core is draining: hand the hottest pages over, at most until then."""
        self._end_at = until
        self._urgent.set()

    def stop(self) -> None:
        self._end_at = float("-inf")
        self._urgent.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        node = self._node
        owner = node.new_owner()
        pause_s = LOOK_S
        while not self._urgent.wait(pause_s):
            try:
                pause_s = self._look(owner)
            except Exception:
                self._quiet(logging.ERROR, "giver", "giving pages away failed; trying on. Please report this", exc_info=True)
                pause_s = _AFTER_NOTHING_S
        try:
            self._hand_over(owner)
        except Exception:
            log.exception("handing pages over failed. Please report this")
        finally:
            self._close_all()
            self.handed_over.set()

    def _look(self, owner: int) -> float:
        """Do what is due. Returns the pause before the next look."""
        node = self._node
        rooms = node.room()
        now = time.monotonic()
        with node.lock:
            node.core.placement.update(rooms, now)
            due = node.core.give_due(now)
            replicas = node.core.check_replicas(now)
        self._drive(replicas)
        if not due:
            return LOOK_S
        if not self._drive(node.core.give(owner, now)):
            return _AFTER_NOTHING_S
        node.changed()
        return 0.0

    def _hand_over(self, owner: int) -> None:
        node = self._node
        while (now := time.monotonic()) < self._end_at:
            rooms = node.room()
            with node.lock:
                node.core.placement.update(rooms, now)
            if not self._drive(node.core.give(owner, now)):
                break

    def _drive(self, steps: GiveSteps | Generator[AskMasters, Told | None, int]) -> int:
        node = self._node
        answer: Told | Given | None = None
        self._batch_until = time.monotonic() + _BATCH_S
        try:
            with node.lock:
                wanted = next(steps)
            while True:
                answer = self._push(wanted) if isinstance(wanted, Give) else node.ask(wanted)
                with node.lock:
                    wanted = steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            return int(end.value)
        finally:
            with node.lock:
                steps.close()  # what it had pinned is let go of under the lock

    def _push(self, give: Give) -> Given | None:
        deadline = min(time.monotonic() + _PUSH_S, self._batch_until, self._end_at)
        key = (give.peer.host, give.peer.port)
        try:
            connection = self._connected(give.peer, deadline)
            return self._exchange(connection, give, deadline)
        except (OSError, p.ProtocolError) as error:
            broken = self._connections.pop(key, None)
            if broken is not None:
                broken.close()
            text = f"pages could not be given to node {give.peer.node} at {key[0]}:{key[1]}: {error}"
            self._quiet(logging.WARNING, f"push {give.peer.node}", text)
            return None

    def _connected(self, peer: p.Peer, deadline: float) -> tcp.PeerConnection:
        key = (peer.host, peer.port)
        connection = self._connections.pop(key, None)
        if connection is not None and (connection.peer != peer or peer_closed(connection.sock)):
            connection.close()
            connection = None
        if connection is None:
            until = min(deadline, time.monotonic() + _CONNECT_S)
            connection = tcp.PeerConnection(peer, until, self._node.data_key, self._node.name, self._node.tls)
        self._connections[key] = connection
        if len(self._connections) > _MAX_CONNECTIONS:
            self._connections.popitem(last=False)[1].close()
        return connection

    def _exchange(self, connection: tcp.PeerConnection, give: Give, deadline: float) -> Given:
        sock = connection.sock
        push = msgspec.structs.replace(give.push, link=self._link(give.peer))
        tcp.set_timeouts(sock, deadline - time.monotonic())
        tcp.send_message(sock, push)
        reply = tcp.receive_message(sock, _push_decoder, deadline)
        if not isinstance(reply, p.PushReply) or reply.id != push.id or len(reply.status) != len(give.offsets):
            raise p.ProtocolError(reply.reason if isinstance(reply, p.Refused) else "the answer does not match what was pushed")
        offsets = [at for at, status in zip(give.offsets, reply.status, strict=True) if status == p.WRITE]
        if not offsets:
            return Given(reply.status, b"")
        if reply.places:
            if len(reply.places) != len(offsets) or not push.link:
                raise p.ProtocolError(f"{len(reply.places)} places for {len(offsets)} pages")
            sent = self._node.links.send(push.link, give.peer.node, offsets, reply.places, push.length, deadline)
            tcp.set_timeouts(sock, max(_ANSWER_S, deadline - time.monotonic()))
            tcp.send_message(sock, p.Wrote(sent is Sent.WHOLE, push.id))
        else:
            view = self._node.segment.view
            tcp.set_timeouts(sock, deadline - time.monotonic())
            tcp.send_bodies(sock, [view[at : at + push.length] for at in offsets], deadline)
        pushed = tcp.receive_message(sock, _push_decoder, deadline)
        if not isinstance(pushed, p.Pushed) or pushed.id != push.id or len(pushed.ok) != len(offsets):
            raise p.ProtocolError("the answer does not match the pages that were sent")
        return Given(reply.status, pushed.ok)

    def _link(self, peer: p.Peer) -> int:
        """0: none. What stays on this host is no card's business."""
        here = self._node.settings.host_id
        if any(room.host_id == here and room.peer.node == peer.node for room in self._node.room() if here):
            return 0
        return self._node.links.link_to(peer)

    def _close_all(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()
