"""A master of the simulated cluster: the real core behind a router that frames, queues and loses as the real server does."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hicache_master.core import MasterCore

from hicache_mooncake import protocol as p

from .network import Listener, Network, Stream
from .world import Process, Violation, World, short

TICK_S = 0.1
_STOOD_STILL_S = 1.0
_MAX_UNREAD = 1000
_to_master = p.decoder(p.ToMaster)


class SimMaster:
    """A master at an address, through all its lives."""

    def __init__(
        self, world: World, network: Network, address: str, host: str, options: dict[str, Any], validate: float
    ) -> None:
        self.world, self.network = world, network
        self.address, self.host = address, host
        self.options = options
        self.validate_share = validate
        self.skew_s = world.rng.uniform(0, 1e5)
        self.process = Process(world, f"master {address}")
        self.process.alive = False
        self.core: MasterCore
        self.listener: Listener | None = None
        self.lives = 0

    @property
    def alive(self) -> bool:
        return self.process.alive

    def start(self) -> None:
        """A new life, which knows nothing."""
        self.lives += 1
        self.process = Process(self.world, f"master {self.address}", self.skew_s)
        self.core = MasterCore(self.world.token(), rng=random.Random(self.world.rng.getrandbits(64)), **self.options)
        self._senders: dict[bytes, Stream] = {}
        self._backlog: deque[tuple[bytes, p.Message, float]] = deque()
        self._next_sender = 0
        self._working = False
        self._tick_at = self.process.now
        self.listener = Listener(self.process, self._accept)
        self.world.note(f"{self.process.name} starts as {self.core.incarnation.hex()}")
        self._tick()

    def crash(self) -> None:
        self.listener = None
        self.process.end()

    # ------------------------------------------------------------------ in

    def _accept(self, stream: Stream) -> None:
        self._next_sender += 1
        sender = self._next_sender.to_bytes(5, "big")
        self._senders[sender] = stream
        stream.received = lambda body: self._received(sender, body)
        stream.closed = lambda: self._closed(sender)

    def _closed(self, sender: bytes) -> None:
        del self._senders[sender]

    def _received(self, sender: bytes, body: bytes) -> None:
        """As the real server: questions at once, what changes the directory in line."""
        message = _to_master.decode(body)
        now = self.process.now
        if isinstance(message, p.Lookup | p.Join | p.ClusterStatus):
            self._handle(message, sender, now)
            return
        self.core.heard(message, now)
        self._backlog.append((sender, message, now))
        if not self._working:
            self._working = True
            self.process.later(self.world.rng.uniform(0.0, 0.002), self._work)

    def _work(self) -> None:
        self._working = False
        for _ in range(8):
            if not self._backlog:
                return
            sender, message, received_at = self._backlog.popleft()
            self._handle(message, sender, received_at)
        self._working = True
        self.process.later(0.001, self._work)

    def _handle(self, message: p.Message, sender: bytes, now: float) -> None:
        if not isinstance(message, p.Beat):
            self.world.note(f"{self.process.name} <- {short(message)}")
        try:
            output = self.core.handle(message, sender, now)
        except p.ProtocolError as error:
            raise Violation(f"{self.process.name}: an honest node's {type(message).__name__} was refused: {error}") from error
        self._send(output)
        self._validate()

    def _send(self, output: list[tuple[bytes, p.Message]]) -> None:
        for receiver, message in output:
            stream = self._senders.get(receiver)
            if stream is not None and stream.other.unread < _MAX_UNREAD:
                body = p.encode(message)
                stream.send(body, len(body))

    def _tick(self) -> None:
        late = self.process.now - self._tick_at
        if late > _STOOD_STILL_S:
            self.core.excuse(late, self.process.now)
        self._tick_at = self.process.now + TICK_S
        self._send(self.core.tick(self.process.now))
        self.core.notes.clear()
        self.process.later(TICK_S, self._tick)

    def _validate(self) -> None:
        if self.world.rng.random() < self.validate_share:
            self.core.validate()
