"""The network of a simulated cluster: delay, slow links, partitions (also of one direction only), connections that break.

A `Stream` is a TCP connection: in order, whole until it breaks, and a partition only delays what is sent (the kernel sends it
again) until the connection ends. A `Dealer` is a ZMQ DEALER against a ROUTER: a stream that is made anew by itself, and what
was under way when one broke is lost without a word. Where a run is told so it also loses, repeats and delays single messages
of it, which real ZMQ does not: the numbered streams must get along with it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from .world import Process, World

_CONNECT_RETRY_S = 0.1
_MAX_UNSENT = 16
"""High-water mark of a dealer's socket."""


class Network:
    """Who reaches whom, and how fast. Hosts are names."""

    def __init__(self, world: World, *, latency_s: float = 0.0003, loss: float = 0.0, repeat: float = 0.0) -> None:
        self.world = world
        self.latency_s = latency_s
        self.loss, self.repeat = loss, repeat
        """Of single messages of a dealer that may be lost or repeated."""
        self.bytes_s = 1e6
        self._cut: set[tuple[str, str]] = set()
        self._slow: dict[tuple[str, str], float] = {}
        self._streams: dict[int, Stream] = {}
        """By number, in the order of their making: chance must not depend on addresses."""
        self._numbers = itertools.count(1)

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from source to target any more."""
        self._cut.add((source, target))

    def heal(self) -> None:
        """All partitions and slow links are over; what waited goes on."""
        self._cut.clear()
        self._slow.clear()
        for stream in list(self._streams.values()):
            stream.flush()

    def slow(self, source: str, target: str, factor: float) -> None:
        self._slow[source, target] = factor

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def delay(self, source: str, target: str, size: int = 0) -> float:
        factor = self._slow.get((source, target), 1.0)
        base = self.latency_s / 10 if source == target else self.latency_s
        return factor * (base * self.world.rng.uniform(0.5, 2.0) + size / self.bytes_s)

    def connect(
        self, owner: Process, source: str, target: str, listener: Listener | None, connected: Callable[[Stream | None], None]
    ) -> None:
        """Try to connect; `connected` gets the owner's end, or None when the target refuses. In a partition it gets nothing."""

        def arrive() -> None:
            if self.is_cut(source, target) or self.is_cut(target, source):
                return
            accepted = listener is not None and listener.process.alive
            self.world.after(self.delay(target, source), answer, accepted)

        def answer(accepted: bool) -> None:
            if not owner.alive:
                return
            if not accepted or listener is None or not listener.process.alive:
                owner.call(connected, None)
                return
            stream = Stream(self, next(self._numbers), owner, source, listener.process, target)
            self._streams[stream.number] = stream
            listener.process.call(listener.accept, stream.other)
            owner.call(connected, stream)

        self.world.after(self.delay(source, target), arrive)

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def break_one(self) -> None:
        """Break a connection between hosts, as a middlebox that forgets it does."""
        between = [stream for stream in self._streams.values() if stream.host != stream.other.host]
        if between:
            stream = self.world.rng.choice(between)
            self.world.note(f"connection {stream.number} {stream.host}-{stream.other.host} breaks")
            stream.reset()


class Listener:
    """A port: the process behind it, and what it does with a new connection."""

    def __init__(self, process: Process, accept: Callable[[Stream], None]) -> None:
        self.process = process
        self.accept = accept


class Stream:
    """One end of a connection. `received` is called for what the other end sent, `closed` once when it has ended."""

    def __init__(
        self,
        network: Network,
        number: int,
        owner: Process,
        host: str,
        other_owner: Process | None = None,
        other_host: str = "",
    ) -> None:
        self.network = network
        self.number = number
        self.owner = owner
        self.host = host
        self.open = True
        self.received: Callable[[Any], None] = lambda item: None
        self.closed: Callable[[], None] = lambda: None
        self._last_arrival = 0.0
        self._held: deque[tuple[Any, int]] = deque()
        """Sent into a partition."""
        self.unread = 0
        if other_owner is not None:
            self.other = Stream(network, number, other_owner, other_host)
            self.other.other = self
        owner.at_end.append(self.close)

    other: Stream

    def send(self, item: Any, size: int = 64) -> float:
        """Returns when it will be there; what is sent on an ended connection is gone."""
        network = self.network
        now = network.world.now
        if not self.open:
            return now
        if self._held or network.is_cut(self.host, self.other.host):
            self._held.append((item, size))
            return now
        arrival = max(now + network.delay(self.host, self.other.host, size), self._last_arrival + 1e-7)
        self._last_arrival = arrival
        self.other.unread += 1
        network.world.at(arrival, self.other._arrive, item)
        return arrival

    def flush(self) -> None:
        """The way is free again, for both ends."""
        for end in (self, self.other):
            held, end._held = end._held, deque()
            for item, size in held:
                end.send(item, size)

    def close(self) -> None:
        """This end closes: what it sent before still arrives, what comes for it does not."""
        if not self.open:
            return
        self.open = False
        self.network.forget(self.number)
        self._drop()
        if self.other.open:
            self._tell(self.other)

    def reset(self) -> None:
        """Both ends see it end, and what is under way is lost."""
        for end in (self, self.other):
            if end.open:
                end.open = False
                end._drop()
                end.owner.call(end._say_closed)
        self.network.forget(self.number)

    def _tell(self, end: Stream) -> None:
        """The word of the end travels like data, but a partition swallows it: then the other end finds out by its deadlines,
        or when it sends after the partition is over."""
        network = self.network

        def arrive() -> None:
            if not end.open:
                return
            if network.is_cut(self.host, end.host):
                network.world.after(1.0, arrive)
                return
            end.open = False
            end._drop()
            end.owner.call(end._say_closed)

        network.world.at(max(network.world.now + network.delay(self.host, end.host), self._last_arrival + 1e-7), arrive)

    def _drop(self) -> None:
        self._held.clear()
        if self.close in self.owner.at_end:
            self.owner.at_end.remove(self.close)

    def _say_closed(self) -> None:
        self.closed()

    def _arrive(self, item: Any) -> None:
        self.unread -= 1
        if self.open:
            self.owner.call(self._deliver, item)

    def _deliver(self, item: Any) -> None:
        if self.open:
            self.received(item)


class Dealer:
    """A ZMQ DEALER: connects, connects again when that ends, and says nothing of it. Each connection has its own identity at
    the router, as with ZMQ."""

    def __init__(
        self,
        network: Network,
        owner: Process,
        host: str,
        target_host: str,
        find: Callable[[], Listener | None],
        received: Callable[[bytes], None],
        connected: Callable[[], None] | None = None,
    ) -> None:
        self.network = network
        self._owner, self._host, self._target, self._find = owner, host, target_host, find
        self._received, self._connected = received, connected
        self.stream: Stream | None = None
        self._closed = False
        self._attempt = 0
        self._connect()

    @property
    def writable(self) -> bool:
        """ZMQ_IMMEDIATE: only while connected, and while less than the high-water mark is under way."""
        stream = self.stream
        return stream is not None and stream.open and stream.other.unread + len(stream._held) < _MAX_UNSENT

    def send(self, body: bytes, *, may_be_lost: bool = False) -> None:
        """Loses it where ZMQ would: on a connection that breaks before it is there."""
        if self.stream is None:
            return
        network = self.network
        if may_be_lost and network.world.chance(network.loss):
            network.world.note(f"lost {self._host}->{self._target} {len(body)} bytes")
            return
        self.stream.send(body, len(body))
        if may_be_lost and network.world.chance(network.repeat):
            stream = self.stream
            network.world.after(network.world.rng.uniform(0, 0.05), lambda: _send_again(stream, body))

    def close(self) -> None:
        self._closed = True
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _connect(self) -> None:
        if self._closed:
            return
        self._attempt += 1
        attempt = self._attempt
        self.network.connect(
            self._owner, self._host, self._target, self._find(), lambda stream: self._on_connected(stream, attempt)
        )
        self._owner.later(1.0, self._look_again, attempt)

    def _look_again(self, attempt: int) -> None:
        """A partition answers nothing: try anew."""
        if attempt == self._attempt and self.stream is None:
            self._connect()

    def _on_connected(self, stream: Stream | None, attempt: int) -> None:
        if self._closed or attempt != self._attempt:
            if stream is not None:
                stream.close()
            return
        if stream is None:
            self._owner.later(_CONNECT_RETRY_S, self._retry, attempt)
            return
        self.stream = stream
        stream.received = self._received
        stream.closed = self._on_closed
        if self._connected is not None:
            self._connected()

    def _on_closed(self) -> None:
        self.stream = None
        if not self._closed:
            self._owner.later(_CONNECT_RETRY_S, self._retry, self._attempt)

    def _retry(self, attempt: int) -> None:
        if attempt == self._attempt and self.stream is None:
            self._connect()


def _send_again(stream: Stream, body: bytes) -> None:
    stream.send(body, len(body))
