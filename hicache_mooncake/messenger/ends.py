"""The two ends of a session as their users see them: `SourceStream` and `DestinationStream`. See docs/messenger.md."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_mooncake.messenger import actions as a
from hicache_mooncake.messenger import messages as m
from hicache_mooncake.messenger.destination import Destination, DestinationState
from hicache_mooncake.messenger.layout import checksum, seed
from hicache_mooncake.messenger.line import Line, log
from hicache_mooncake.messenger.source import Source
from hicache_mooncake.transfer.engine_peer import Peer
from hicache_mooncake.transfer.transport import TransportError

if TYPE_CHECKING:
    from hicache_mooncake.messenger.stream import Messenger

_CONNECT_S = 5.0
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
