"""`Messenger`: KV from prefill to decode, layer by layer, over a transfer engine. See docs/messenger.md."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hicache_mooncake.messenger import actions as a
from hicache_mooncake.messenger import messages as m
from hicache_mooncake.messenger.layout import Layout, checksum, seed
from hicache_mooncake.messenger.line import Line, Worker, log
from hicache_mooncake.messenger.session import Destination, DestinationState, Source
from hicache_mooncake.protocol import ProtocolError
from hicache_mooncake.transfer.engine import TransferEngine
from hicache_mooncake.transfer.engine_peer import Peer
from hicache_mooncake.transfer.engine_wire import split_name
from hicache_mooncake.transfer.transport import TransportError

_TICK_S = 0.025
_BUSY_S, _IDLE_S = 0.0005, 0.005
"""How often peers' words are looked for, with sessions and without."""
_TELL_S = 5.0
_CONNECT_S = 5.0
_CLOSE_S = 10.0
_REMEMBERED = 4096
_MAX_PEERS = 8
"""Links of one session that are kept track of, beside those that may still write."""


class StreamError(Exception):
    """A session that has failed, or is not there. `reason` is one word: `deadline`, `cancelled`, `peer` (gone, or cannot be
    reached), `layout`, `full`, `declined`, `checksum`, `protocol`, `bounds`, `fence`, `closed`, `unclaimed`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where a session's bytes are to go, in memory that is registered with the engine.

    `bases`: for each layer the address of page 0 of each part. `pages`: at which multiple of its parts' lengths each page of
    the session lies. `free` is called once, when nothing lands in them any more, unless the session is delivered: then they
    are the receiver's from `DestinationStream.result` on. It must not wait."""

    bases: Sequence[Sequence[int]]
    pages: Sequence[int]
    free: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Result:
    """What the source has given to `finish`."""

    first_token: int
    aux: bytes


class _Stream:
    """What both ends share: the state machine's lock, and what follows from its actions."""

    def __init__(self, messenger: Messenger, machine: Source | Destination) -> None:
        self._messenger = messenger
        self._any = machine
        self._cond = threading.Condition()
        self._peers: dict[int, Peer] = {}
        """By generation."""
        self.session = machine.session
        self.request = machine.request
        self.ended_at = 0.0
        """When it had come to its end; 0 before."""
        self._calling = 0
        """Threads in callbacks of the user's."""

    @contextlib.contextmanager
    def _event(self) -> Iterator[None]:
        """Something has happened to the machine: then what it wants is done."""
        calls: list[Callable[[], None]] = []
        try:
            with self._cond:
                try:
                    yield
                finally:
                    for action in self._any.take():
                        self._do(action, calls)
                    self._calling += bool(calls)
                    self._cond.notify_all()
        finally:
            if calls:
                self._call(calls)

    def _call(self, calls: list[Callable[[], None]]) -> None:
        for call in calls:
            try:
                call()
            except Exception:
                log(logging.ERROR, "callback", f"a callback of request {self.request} failed", exc_info=True)
        with self._cond:
            self._calling -= 1
            self._cond.notify_all()

    def _do(self, action: a.Action, calls: list[Callable[[], None]]) -> None:
        match action:
            case a.Tell():
                peer = self._peers.get(action.message.generation)
                if peer is not None:
                    self._messenger.tell(peer, action.message, self._link_failed)
            case a.Ended():
                self.ended_at = time.monotonic()
                self._messenger.note(self.request, self._peer_name(), action)

    @property
    def busy(self) -> bool:
        """Its pages or buffers are not all back with their owner."""
        with self._cond:
            return not self._any.ended or self._calling > 0

    def _peer_name(self) -> str:
        peer = self._peers.get(self._any.generation)
        return peer.name if peer is not None else "nobody"

    def _link_failed(self, generation: int, why: str) -> None:
        raise NotImplementedError

    def look(self) -> None:
        """Whether links have died and time has passed."""
        with self._event():
            generation = self._any.generation
            peer = self._peers.get(generation)
            if peer is not None and not peer.alive:
                self._lost(generation, f"the link to {peer.name} has ended")
            self._any.tick(time.monotonic())

    def _lost(self, generation: int, why: str) -> None:
        raise NotImplementedError

    def _wait(self, met: Callable[[], bool], deadline: float, what: str) -> None:
        """With the lock. Raises StreamError at the deadline."""
        while not met():
            left = deadline - time.monotonic()
            if left <= 0:
                raise StreamError("deadline", f"request {self.request}: {what}")
            self._cond.wait(min(left, threading.TIMEOUT_MAX))

    def _check(self) -> None:
        if self._any.reason:
            raise StreamError(self._any.reason, f"request {self.request}: {self._any.detail}")


@dataclass(slots=True)
class _Push:
    """One call of `push`, which may be several runs."""

    left: int
    released: Callable[[bool], None] | None
    arrived: bool = True

    def release(self, arrived: bool) -> Callable[[], None] | None:
        self.left -= 1
        self.arrived = self.arrived and arrived
        released, ok = self.released, self.arrived
        return None if self.left or released is None else lambda: released(ok)


class SourceStream(_Stream):
    """The prefill side of one session. Made by `Messenger.send`. Thread-safe; one thread pushes a layer."""

    def __init__(self, messenger: Messenger, machine: Source, addresses: Sequence[str], bases: Sequence[Sequence[int]]) -> None:
        super().__init__(messenger, machine)
        self._machine = machine
        self._addresses, self._bases = addresses, bases
        self._tries = 0

    def push(
        self,
        layer: int,
        first: int,
        places: Sequence[int],
        released: Callable[[bool], None] | None = None,
        deadline: float | None = None,
    ) -> None:
        """Send pages `first`, `first` + 1, ... of a layer, which lie at these places: multiples of their parts' lengths, from
        the bases on. Pages of a layer follow each other; layers come in any order.

        Computes the checksums and returns: nothing is waited for, unless more than `Limits.queued_bytes` of this session are
        pushed and have not arrived; then until `deadline`, by default the session's. The pages must not change before
        `released` is called, with whether they have arrived: once for each push that has returned, from any thread, and it
        must not wait. A session that has failed gives pages back at once.

        Raises ValueError for a push that does not follow or lies in no registered memory, and StreamError (`deadline`) when
        it is not queued."""
        machine = self._machine
        places = tuple(places)
        with self._cond:
            until = machine.deadline if deadline is None else deadline
            self._wait(lambda: machine.has_room or machine.failing, until, "too much is pushed that has not arrived")
            failing = machine.failing
            runs = [] if failing else machine.cut(layer, first, len(places))
            if runs:
                self._messenger.check_memory(machine.layout, range(layer, layer + 1), self._bases, places)
            self._calling += failing and released is not None
        if failing:
            if released is not None:
                self._call([lambda: released(False)])
            return
        push = _Push(len(runs), released)
        lengths = machine.layout.runs[layer]
        for run in runs:
            part = places[run.start - first : run.stop - first]
            digest = 0
            if machine.checked:
                start = seed(self.session, layer, run.start, len(run))
                digest = checksum(lengths, self._bases[layer], part, start)
            with self._event():
                machine.push(layer, run.start, part, digest, push)

    def finish(self, first_token: int = 0, aux: bytes = b"") -> None:
        """All has been pushed. Does not wait. Raises ValueError when that is not so."""
        with self._event():
            self._machine.finish(time.monotonic(), first_token, aux)

    def abort(self, detail: str = "the source has aborted the session") -> None:
        """Does not wait. Pages come back when nothing is under way any more; `wait` waits for that, too."""
        with self._event():
            self._machine.abort(time.monotonic(), detail=detail)

    def wait(self, deadline: float) -> None:
        """Until the receiver has it, verified, or the session has failed: then it raises StreamError. All pages have come back
        in both cases, but not at this deadline, which raises it, too."""
        with self._cond:
            self._wait(lambda: not self.busy, deadline, "it has not arrived yet")
            self._check()

    @property
    def ended(self) -> bool:
        """It has arrived, or failed, and all pages have come back."""
        return not self.busy

    @property
    def layers_arrived(self) -> list[int]:
        """Pages of each layer that have arrived whole."""
        with self._cond:
            return list(self._machine.counted)

    @property
    def attempts(self) -> int:
        return self._machine.generation

    # ---- for the messenger

    def begin(self) -> None:
        with self._event():
            pass

    def told(self, message: m.Any) -> None:
        with self._event():
            self._machine.told(time.monotonic(), message)

    def _do(self, action: a.Action, calls: list[Callable[[], None]]) -> None:
        match action:
            case a.Connect():
                address = self._addresses[self._tries % len(self._addresses)]
                self._tries += 1
                self._messenger.worker(address).put(lambda: self._connect(action.generation, address))
            case a.Write():
                peer = self._peers[action.generation]
                until = min(self._machine.deadline, time.monotonic() + self._messenger.limits.write_s)
                ticket = action.ticket
                self._messenger.line(peer).write(
                    action.pieces, action.size, until, lambda reason, why: self._wrote(ticket, reason, why)
                )
            case a.Drop():
                self._messenger.worker(self._addresses[0]).put(self._close_links)
            case a.Release():
                assert isinstance(action.tag, _Push)
                call = action.tag.release(action.arrived)
                if call is not None:
                    calls.append(call)
            case _:
                super()._do(action, calls)

    def _wrote(self, ticket: int, reason: str, why: str) -> None:
        with self._event():
            self._machine.wrote(time.monotonic(), ticket, reason, why)

    def _close_links(self) -> None:
        with self._cond:
            peers, self._peers = self._peers, {}
        for peer in set(peers.values()):
            # What it does not confirm concerns what it writes here; what is written from here has ended all the same.
            with contextlib.suppress(TransportError):
                peer.close()

    def _connect(self, generation: int, address: str) -> None:
        self._close_links()
        if self._machine.failing:
            return
        until = min(self._machine.deadline, time.monotonic() + _CONNECT_S)
        try:
            peer = self._messenger.engine.connect(address, until)
        except (TransportError, ValueError) as error:
            with self._event():
                self._machine.not_connected(time.monotonic(), generation, str(error))
            return
        if generation > 1:
            self._messenger.resumed()
        with self._event():
            self._peers[generation] = peer
            self._machine.connected(time.monotonic(), generation)

    def _link_failed(self, generation: int, why: str) -> None:
        with self._event():
            self._lost(generation, why)

    def _lost(self, generation: int, why: str) -> None:
        self._machine.link_failed(time.monotonic(), generation, why)


class DestinationStream(_Stream):
    """The decode side of one session. Given to `reserve`, and returned by `Messenger.incoming`. Thread-safe."""

    def __init__(self, messenger: Messenger, machine: Destination, opened: m.Open, peer: Peer) -> None:
        super().__init__(messenger, machine)
        self._machine = machine
        self._peers[opened.generation] = peer
        self._buffers: Buffers | None = None
        self.layout, self.pages = machine.layout, machine.pages
        self.peer = peer.name

    @property
    def layers_done(self) -> int:
        """How many layers, from the first on, have come whole."""
        with self._cond:
            return self._machine.layers_done

    def wait_layer(self, layer: int, deadline: float) -> None:
        """Until all layers up to this one have come whole. Their bytes may be read from then on, until `Buffers.free` is
        called. Raises StreamError."""
        with self._cond:
            self._wait(lambda: bool(self._machine.reason) or self._machine.layers_done > layer, deadline, f"layer {layer}")
            self._check()

    def result(self, deadline: float) -> Result:
        """Until all has come, and the source has said that this was all: then the buffers are the caller's. Raises
        StreamError."""
        with self._event():
            self._wait(
                lambda: self._machine.state is DestinationState.COMMITTED or bool(self._machine.reason), deadline, "result"
            )
            self._check()
            self._machine.claimed()
            self._buffers = None
            return Result(self._machine.first_token, self._machine.aux)

    def abort(self, detail: str = "the destination has aborted the session") -> None:
        """Does not wait. The buffers are free when `Buffers.free` is called."""
        with self._event():
            self._machine.abort(time.monotonic(), detail=detail)

    # ---- for the messenger

    @property
    def holds_bytes(self) -> int:
        return self._machine.size_bytes if self._machine.holds_buffers else 0

    @property
    def poisoned(self) -> bool:
        return self._machine.state is DestinationState.POISONED

    def forget(self) -> None:
        """What only a session that goes on needs."""
        with self._cond:
            self._peers.clear()
            self._machine.forget()

    def begin(self) -> None:
        with self._event():
            pass

    def opened(self, message: m.Open, peer: Peer) -> None:
        with self._event():
            self._peers[message.generation] = peer
            for generation in sorted(self._peers)[:-_MAX_PEERS]:
                if not self._machine.is_exposed(generation):
                    del self._peers[generation]
            self._machine.opened(time.monotonic(), message)

    def told(self, message: m.Any) -> None:
        with self._event():
            self._machine.told(time.monotonic(), message)

    def close(self) -> None:
        """The messenger ends."""
        with self._event():
            self._machine.abort(time.monotonic(), "closed", "the destination ends")

    def _do(self, action: a.Action, calls: list[Callable[[], None]]) -> None:
        match action:
            case a.Reserve():
                self._line().put(self._reserve)
            case a.Verify():
                self._line().put(lambda: self._verify(action))
            case a.Fence():
                peer = self._peers[action.generation]
                self._messenger.fencer(peer).put(lambda: self._fence(action.generation, peer))
            case a.Free():
                buffers, self._buffers = self._buffers, None
                if buffers is not None:
                    calls.append(buffers.free)
            case _:
                super()._do(action, calls)

    def _line(self) -> Line:
        return self._messenger.line(self._peers[self._machine.generation])

    def _reserve(self) -> None:
        try:
            buffers = self._messenger.reserve(self)
        except Exception as error:
            if not isinstance(error, StreamError):
                log(logging.ERROR, "reserve", f"reserving buffers for request {self.request} failed", exc_info=True)
            with self._event():
                self._machine.declined(time.monotonic(), "declined", str(error) or type(error).__name__)
            return
        try:
            with self._event():
                self._messenger.check_memory(self.layout, range(self.layout.layers), buffers.bases, buffers.pages)
                self._buffers = buffers
                self._machine.reserved(time.monotonic(), buffers.bases, buffers.pages)
        except (ValueError, IndexError, TypeError) as error:
            log(logging.ERROR, "reserve", f"buffers for request {self.request} do not fit: {error}")
            with self._event():
                self._buffers = None
                self._machine.declined(time.monotonic(), "declined", f"its buffers do not fit: {error}")
            buffers.free()

    def _verify(self, run: a.Verify) -> None:
        machine = self._machine
        start = seed(self.session, run.layer, run.first, run.count)
        places = machine.places[run.first : run.first + run.count]
        came = checksum(machine.layout.runs[run.layer], machine.bases[run.layer], places, start)
        with self._event():
            machine.verified(time.monotonic(), run.layer, run.first, run.count, came == run.checksum)

    def _fence(self, generation: int, peer: Peer) -> None:
        done = self._messenger.engine.fences(peer)
        try:
            peer.close()
        except TransportError as error:
            done = False
            log(logging.WARNING, "fence", f"buffers that {peer.name} may still write to stay out of use: {error}")
        with self._event():
            self._machine.fenced(time.monotonic(), generation, done)

    def _link_failed(self, generation: int, why: str) -> None:
        with self._event():
            self._lost(generation, why)

    def _lost(self, generation: int, why: str) -> None:
        self._machine.link_failed(time.monotonic(), generation)


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
