"""`Messenger`: KV from prefill to decode, layer by layer, over a transfer engine. See docs/messenger.md."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from hicache_mooncake.messenger import actions as a
from hicache_mooncake.messenger import messages as m
from hicache_mooncake.messenger.destination import Destination
from hicache_mooncake.messenger.ends import Buffers, DestinationStream, Result, SourceStream, StreamError
from hicache_mooncake.messenger.layout import Layout
from hicache_mooncake.messenger.line import Line, Worker, log
from hicache_mooncake.messenger.source import Source
from hicache_mooncake.protocol import ProtocolError
from hicache_mooncake.transfer.engine import TransferEngine
from hicache_mooncake.transfer.engine_peer import Peer
from hicache_mooncake.transfer.engine_wire import split_name
from hicache_mooncake.transfer.transport import TransportError

__all__ = ["Buffers", "DestinationStream", "Messenger", "Result", "SourceStream", "StreamError"]

_TICK_S = 0.025
_BUSY_S, _IDLE_S = 0.0005, 0.005
"""How often peers' words are looked for, with sessions and without."""
_TELL_S = 5.0
_CLOSE_S = 10.0
_REMEMBERED = 4096


class Messenger:
    """Both ends of sessions, over one transfer engine, whose notices are the messenger's alone. Thread-safe.

    Costs a thread, one for each peer that it has sessions with, and one for each address while that is being connected to. The
    engine stays its owner's, who closes the messenger first."""

    def __init__(self, engine: TransferEngine, limits: a.Limits | None = None) -> None:
        self.engine = engine
        self.limits = limits or a.Limits()
        self._cond = threading.Condition()
        """Of what follows. Whoever has it takes no stream's; a stream's holder may take it."""
        self._sources: dict[bytes, SourceStream] = {}
        self._destinations: dict[bytes, DestinationStream] = {}
        self._remembered: dict[bytes, DestinationStream] = {}
        """Those that are over, oldest first."""
        self._requests: dict[str, DestinationStream] = {}
        """The last session of each request."""
        self._layout: Layout | None = None
        self._reserve: Callable[[DestinationStream], Buffers] | None = None
        self._lines: dict[Peer, Line] = {}
        self._fencers: dict[Peer, Worker] = {}
        self._workers: dict[str, Worker] = {}
        self._endings: Counter[str] = Counter()
        self._resumed = 0
        self._strange = 0
        self._active = False
        self._closed = False
        self._stop = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="messenger", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise TransportError("memory", f"no thread for a messenger: {error}; raise the limit of threads") from error

    # ---- users

    def send(
        self,
        peer_address: str | Sequence[str],
        request_id: str,
        layout: Layout,
        bases: Sequence[Sequence[int]],
        pages: int,
        *,
        deadline: float,
        checked: bool = True,
    ) -> SourceStream:
        """Begin a session of so many pages with the engine at `peer_address`; several addresses are several ways to the same
        engine, tried in turn when a link fails. `bases`: for each layer the address here of page 0 of each part, in registered
        memory. Does not wait: pages may be pushed at once. `checked=False` only where the transport verifies by itself.

        Raises ValueError, and StreamError (`full`, `closed`)."""
        addresses = [peer_address] if isinstance(peer_address, str) else list(peer_address)
        if not addresses:
            raise ValueError("no address to send to")
        for address in addresses:
            split_name(address)
        session = os.urandom(m.SESSION_BYTES)
        now = time.monotonic()
        machine = Source(session, request_id, layout, bases, pages, self.limits, now, deadline, checked=checked)
        stream = SourceStream(self, machine, addresses, bases)
        with self._cond:
            self._check_open()
            if len(self._sources) >= self.limits.sessions:
                raise StreamError("full", f"{len(self._sources)} sessions are being sent: Limits.sessions")
            self._sources[session] = stream
            self._active = True
        self._wake.set()
        stream.begin()
        return stream

    def accept(self, layout: Layout, reserve: Callable[[DestinationStream], Buffers]) -> None:
        """Take sessions of this layout from now on. `reserve` gives buffers for each, or raises StreamError with the reason why
        not; it is called on a thread of the peer's, whose other sessions wait meanwhile. Raises ValueError."""
        layout.check()
        with self._cond:
            self._layout, self._reserve = layout, reserve

    def incoming(self, request_id: str, deadline: float) -> DestinationStream:
        """The last session of this request, as soon as the source has opened it. Raises StreamError (`deadline`, `closed`)."""
        with self._cond:
            while request_id not in self._requests:
                self._check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StreamError("deadline", f"request {request_id}: nobody has begun to send it")
                self._cond.wait(min(left, threading.TIMEOUT_MAX))
            return self._requests[request_id]

    def report(self) -> dict[str, int]:
        """For status pages and metrics: sessions now, how those ended that have (`ended_ok`, `ended_deadline`, ...), bytes."""
        with self._cond:
            sources, destinations = list(self._sources.values()), list(self._destinations.values())
            endings = dict(self._endings)
            lines = list(self._lines.values())
            strange = self._strange
        held = [stream for stream in destinations if stream.holds_bytes]
        return {
            "sending": len(sources),
            "receiving": sum(not stream.poisoned for stream in held),
            "poisoned": sum(stream.poisoned for stream in held),
            "reserved_bytes": sum(stream.holds_bytes for stream in held),
            "poisoned_bytes": sum(stream.holds_bytes for stream in held if stream.poisoned),
            "peak_link_bytes": max((line.peak_bytes for line in lines), default=0),
            "resumed": self._resumed,
            "strange_notices": strange,
            **{f"ended_{reason or 'ok'}": count for reason, count in sorted(endings.items())},
        }

    def close(self) -> None:
        """Ends all sessions, and waits until their pages and buffers are free. Raises StreamError (`fence`) when buffers may
        still be written to: see `Peer.close`."""
        with self._cond:
            if self._closed:
                return
            self._closed = True
            self._cond.notify_all()
            sources, destinations = list(self._sources.values()), list(self._destinations.values())
        for source in sources:
            source.abort("the source ends")
        for destination in destinations:
            destination.close()
        until = time.monotonic() + _CLOSE_S + self.limits.quiet_s
        while (busy := sum(stream.busy for stream in (*sources, *destinations))) and time.monotonic() < until:
            time.sleep(_TICK_S)
        self._stop = True
        self._wake.set()
        self._thread.join()
        if busy:
            raise StreamError("fence", f"{busy} sessions cannot be stopped: do not use their memory before the peer ends")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamError("closed", "this messenger was closed")

    # ---- streams

    def check_memory(self, layout: Layout, layers: range, bases: Sequence[Sequence[int]], places: Sequence[int]) -> None:
        """Raises ValueError unless these pages lie in registered memory: it is read here, for the checksums."""
        layout.check_bases(bases)
        low, high = min(places, default=0), max(places, default=-1) + 1
        for layer in layers:
            for part, (length, base) in enumerate(zip(layout.runs[layer], bases[layer], strict=True)):
                if not self.engine.holds(base + low * length, (high - low) * length):
                    raise ValueError(f"layer {layer}, part {part}: places {low} to {high - 1} are in no one registered memory")

    def tell(self, peer: Peer, message: m.Any, failed: Callable[[int, str], None]) -> None:
        def job() -> None:
            try:
                peer.notify(m.pack(message), time.monotonic() + _TELL_S)
            except TransportError as error:
                failed(message.generation, str(error))

        self.line(peer).put(job)

    def line(self, peer: Peer) -> Line:
        with self._cond:
            if peer not in self._lines:
                self._lines[peer] = Line(peer, self.limits.link_bytes)
            return self._lines[peer]

    def fencer(self, peer: Peer) -> Worker:
        with self._cond:
            return self._fencers.setdefault(peer, Worker("messenger-fence"))

    def worker(self, address: str) -> Worker:
        with self._cond:
            return self._workers.setdefault(address, Worker("messenger-connect"))

    def reserve(self, stream: DestinationStream) -> Buffers:
        reserve = self._reserve
        assert reserve is not None
        return reserve(stream)

    def resumed(self) -> None:
        with self._cond:
            self._resumed += 1

    def note(self, request: str, peer: str, ended: a.Ended) -> None:
        with self._cond:
            self._endings[ended.reason] += 1
        if ended.reason:
            log(logging.WARNING, ended.reason, f"request {request}, with {peer}: {ended.reason}: {ended.detail}")

    # ---- the thread

    def _poll(self) -> None:
        tick_at = 0.0
        while not self._stop:
            try:
                told = self.engine.told()
                for peer, notice in told:
                    self._hear(peer, notice)
                now = time.monotonic()
                if now >= tick_at:
                    tick_at = now + _TICK_S
                    self._look(now)
            except Exception:  # of our own making: the sessions go on
                log(logging.ERROR, "poll", "a messenger's thread goes on after an error", exc_info=True)
                told = []
            if not told:
                self._wake.wait(_BUSY_S if self._active else _IDLE_S)
                self._wake.clear()

    def _look(self, now: float) -> None:
        with self._cond:
            sources, destinations = list(self._sources.values()), list(self._destinations.values())
        for stream in (*sources, *destinations):
            stream.look()
        over = [stream for stream in destinations if not stream.busy]
        gone = [source for source in sources if source.ended]
        for each in over:
            each.forget()
        with self._cond:
            for source in gone:
                del self._sources[source.session]
            for each in over:
                self._remembered[each.session] = self._destinations.pop(each.session)
            for each in list(self._remembered.values()):
                if now <= each.ended_at + self.limits.remember_s and len(self._remembered) <= _REMEMBERED:
                    break
                del self._remembered[each.session]
                if self._requests.get(each.request) is each:
                    del self._requests[each.request]
            self._active = bool(self._sources or self._destinations)
            self._lines = {peer: line for peer, line in self._lines.items() if peer.alive or not line.idle}
            self._fencers = {peer: worker for peer, worker in self._fencers.items() if not worker.idle}
            self._workers = {address: worker for address, worker in self._workers.items() if not worker.idle}

    def _hear(self, peer: Peer, notice: bytes) -> None:
        try:
            message = m.unpack(notice)
        except ProtocolError as error:
            self._strange += 1
            log(logging.WARNING, "strange", f"from {peer.name}: {error}")
            return
        if m.for_source(message):
            source = self._sources.get(message.session)
            if source is not None:
                source.told(message)
            return
        with self._cond:
            stream = self._destinations.get(message.session) or self._remembered.get(message.session)
        if isinstance(message, m.Open):
            if stream is not None:
                stream.opened(message, peer)
            else:
                self._opened(peer, message)
        elif stream is not None:
            stream.told(message)

    def _opened(self, peer: Peer, message: m.Open) -> None:
        if not message.fresh or self._layout is None or self._closed:
            reason, detail = "closed", "this end is closing"
            if not self._closed:
                reason, detail = "declined", "this end takes no sessions"
            if not self._closed and self._layout is not None:
                reason, detail = "peer", "the destination does not know this session (any more)"
            declined = m.Declined(message.session, message.generation, reason, detail)
            self.tell(peer, declined, lambda generation, why: None)
            return
        machine = Destination(message, self._layout, self.limits, time.monotonic(), self._no_room(message))
        stream = DestinationStream(self, machine, message, peer)
        with self._cond:
            if self._closed:
                return
            self._destinations[message.session] = stream
            self._active = True
            if not machine.reason or message.request not in self._requests:
                self._requests[message.request] = stream
            self._cond.notify_all()
        stream.begin()

    def _no_room(self, message: m.Open) -> tuple[str, str]:
        assert self._layout is not None
        with self._cond:
            held = [stream for stream in self._destinations.values() if stream.holds_bytes]
        if any(stream.request == message.request for stream in held):
            return "full", f"request {message.request} is being received already"
        if len(held) >= self.limits.sessions:
            return "full", f"{len(held)} sessions are being received: Limits.sessions"
        size = sum(stream.holds_bytes for stream in held) + message.pages * self._layout.all_bytes
        if size > self.limits.reserved_bytes:
            return "full", f"{size} bytes would be reserved: Limits.reserved_bytes is {self.limits.reserved_bytes}"
        return "", ""
