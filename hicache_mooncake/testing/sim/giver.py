"""Pages that a simulated node gives to another: the connection, the bodies in pieces, and what the other one says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hicache_mooncake import protocol as p
from hicache_mooncake.node.spill import Give, Given

from .network import Stream
from .pages import Body

if TYPE_CHECKING:
    from .node import SimNode

_DEADLINE_S = 10.0
_WINDOW = 6


class Pushing:
    """One Push on a connection of its own. `done` gets what came of it, None when the peer failed."""

    def __init__(self, node: SimNode, give: Give, done: Callable[[Given | None], None]) -> None:
        self._node = node
        self._give = give
        self._done = done
        self._over = False
        self._stream: Stream | None = None
        self._status = b""
        self._offsets: list[int] = []

    def start(self) -> None:
        node = self._node
        host, listener = node.find_peer(self._give.peer)
        node.network.connect(node.process, node.host, host, listener, self._connected)
        node.process.later(_DEADLINE_S, self._end, None)

    def _connected(self, stream: Stream | None) -> None:
        if stream is None:
            self._end(None)
            return
        if self._over:
            stream.close()
            return
        self._stream = stream
        stream.received = self._received
        stream.closed = lambda: self._end(None)
        stream.send(self._give.push)

    def _received(self, message: Any) -> None:
        match message:
            case p.PushReply():
                self._status = message.status
                wanted = zip(self._give.offsets, message.status, strict=True)
                self._offsets = [offset for offset, status in wanted if status == p.WRITE]
                if self._offsets:
                    self._send(0, 0)
                else:
                    self._end(Given(self._status, b""))
            case p.Pushed():
                self._end(Given(self._status, message.ok))
            case _:
                self._end(None)

    def _send(self, index: int, at: int) -> None:
        stream = self._stream
        if self._over or stream is None or not stream.open or index == len(self._offsets):
            return
        node, length = self._node, self._give.push.length
        if stream.other.unread + len(stream._held) < _WINDOW:
            end = length if node.world.chance(0.5) else node.world.rng.randrange(at, length) + 1
            stream.send(Body(at, node.segment.read(self._offsets[index] + at, end - at)), end - at)
            index, at = (index + 1, 0) if end == length else (index, end)
        node.process.later(node.options.step_s * node.world.rng.uniform(0.1, 1.5), self._send, index, at)

    def _end(self, given: Given | None) -> None:
        if self._over:
            return
        self._over = True
        if self._stream is not None:
            self._stream.close()
        self._done(given)
