"""A link over RDMA: one channel, on which both ends agree, and rails, over which batches move."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer.batches import Batches, Inbox, check_pieces
from hicache_mooncake.transfer.transport import MAX_NOTICE_BYTES, Extents, Link, Op, Pending, Piece, TransportError
from hicache_mooncake.transfer.verbs import handshake
from hicache_mooncake.transfer.verbs.api import Status, VerbsError
from hicache_mooncake.transfer.verbs.channel import Channel
from hicache_mooncake.transfer.verbs.fair_lock import FairLock
from hicache_mooncake.transfer.verbs.handshake import short
from hicache_mooncake.transfer.verbs.pairing import LocalPort, Pairing, common_rails
from hicache_mooncake.transfer.verbs.progress import Progress
from hicache_mooncake.transfer.verbs.rails import ANSWER_S, Loss, Port, Rail, Rails, State
from hicache_mooncake.transfer.verbs.registration import Part, Table, parse_token
from hicache_mooncake.transfer.verbs.slices import Lookup
from hicache_mooncake.transfer.verbs.traffic import Queue, Traffic

log = logging.getLogger(__name__)
quietly = QuietLog(log)

TURN_BYTES = 4 << 20
"""Of a batch, before the next one has its turn: more than over sockets, since these move faster and cost as much."""
POLL_S = 30e-6
"""After a completion the next one is polled for so long before the thread sleeps: an event costs about as much."""
COLLECT_S = 1e-3
"""Of completions of one rail at a time, before others have their turn."""
LOOK_S = 1.0
"""How often batches that nobody waits for are looked at."""
MAX_UNSENT = 1 << 20
"""Bytes for the channel that the peer has not taken; who has more to tell waits."""


class RailReport(NamedTuple):
    peer: str
    here: str
    """The port, as `name:number`."""
    there: str
    state: str
    """`up`, `pairing`, `ending`, `down`, or `quarantined`."""
    bytes: int
    """Moved by this end."""
    bytes_per_s: float
    """An average over the time in which something was under way; 0: not known."""
    failures: int


class Owner(Protocol):
    """The transport, as its links see it."""

    lock: FairLock
    """Of all its links: what they do under it never waits for a peer."""
    progress: Progress
    extents: Extents

    @property
    def ports(self) -> Sequence[LocalPort]: ...

    def local(self, device: str) -> Lookup:
        """Of the memory registered here, by device."""

    def near(self, device: str, address: int) -> float:
        """How near a device is to memory registered here: as in `Rails.choose`."""

    def forget(self, link: VerbsLink) -> None:
        """It is dead."""


class VerbsLink(Link):
    """See the module and `Link`. What the peer says and what completes is heard in the transport's thread; batches are posted
    by whoever submits them, as far as there is room."""

    def __init__(self, owner: Owner, channel: socket.socket, *, connected: bool, max_in_flight: int) -> None:
        """Owns the channel. `connected`: this is the side that connected."""
        self._owner = owner
        self._ports = list(owner.ports)
        """As the peer is told: the owner may have more later."""
        self._channel = Channel(channel, owner.progress, self._on_channel)
        self._connected = connected
        self._lock = owner.lock
        self._changed = threading.Condition(owner.lock)  # type: ignore[arg-type]
        self._batches = Batches(max_in_flight, self._hurry, turn_bytes=TURN_BYTES)
        self._inbox = Inbox()
        self._remote = Extents()
        self._tables: dict[int, dict[str, Table]] = {}
        self._theirs: list[Port] = []
        self._rails = Rails([])
        self._traffic = Traffic(self._batches, self._rails, self._local, self._there, self._near)
        self._pairing: Pairing | None = None
        """Once the peer has announced its ports."""
        self._open = False
        self._error: TransportError | None = None
        self._hurried = False
        self._busy: dict[int, Rail] = {}
        """Rails of which more has been completed than was collected, by number."""
        self._look_at = 0.0
        self.name = self._channel.peer

    # ------------------------------------------------------------------ the contract

    def learn(self, address: int, length: int, token: bytes) -> None:
        tables = parse_token(token, address, length)
        with self._lock:
            for former in self._remote.replace(address, length, token):
                del self._tables[former]
            self._tables[address] = tables

    def unlearn(self, address: int) -> None:
        with self._lock:
            self._remote.remove(address)
            self._tables.pop(address, None)

    def submit(self, op: Op, pieces: Sequence[Piece], deadline: float) -> Pending:
        self._check_alive()
        check_pieces(pieces, self._owner.extents, self._remote)
        batch = self._batches.admit(op, pieces, deadline)
        with self._guarded():
            if self._error is None:
                self._pump()
        return batch

    def notify(self, message: bytes, deadline: float) -> None:
        if len(message) > MAX_NOTICE_BYTES:
            raise TransportError("bounds", f"a notice of {len(message)} bytes: the limit is {MAX_NOTICE_BYTES}")
        with self._lock:
            while self._error is None and self._channel.unsent > MAX_UNSENT:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(min(left, threading.TIMEOUT_MAX)):
                    raise TransportError("deadline", f"the peer has not taken {self._channel.unsent} bytes of notices")
            self._check_alive()
            with self._guarded():
                self._say(handshake.Notice(message))
            self._check_alive()

    def notices(self) -> list[bytes]:
        return self._inbox.take()

    @property
    def alive(self) -> bool:
        return self._open and self._error is None

    def close(self) -> None:
        with self._lock:
            self._die(TransportError("closed", "this end has closed the link"), handshake.Bye())
            if self._traffic.unfenced:
                raise TransportError(
                    "device",
                    f"a queue pair of the link to {self.name} cannot be destroyed ({self._traffic.unfenced}): do not use the "
                    "memory again that it reaches before this process has ended",
                )

    def report(self) -> list[RailReport]:
        with self._lock:
            return [
                RailReport(
                    self.name,
                    self._ports[rail.local].port.name,
                    self._theirs[rail.remote].name,
                    "quarantined" if rail.quarantined and rail.state is State.DOWN else rail.state.value,
                    rail.moved,
                    rail.rate,
                    rail.failures,
                )
                for rail in self._rails.all
            ]

    def validate(self) -> None:
        """What always holds, for tests; under the lock."""
        self._rails.validate()
        self._traffic.validate()

    def _check_alive(self) -> None:
        error = self._error
        if error is not None:
            raise TransportError(error.reason, str(error))
        if not self._open:
            raise TransportError("peer", "the handshake has not ended")

    # ------------------------------------------------------------------ beginning

    def begin(self, deadline: float) -> None:
        """The handshake. Raises TransportError, and the link is over then."""
        with self._guarded():
            self._channel.open()
            if self._connected:
                self._say(handshake.announce([port.port for port in self._ports]))
        with self._lock:
            while self._error is None and not self._open:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._die(TransportError("deadline", f"{self.name} did not end the handshake of a verbs link in time"))
                else:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if self._error is not None:
                raise TransportError(self._error.reason, str(self._error))

    def tick(self, now: float) -> float | None:
        """From the transport's thread. Returns when it is to be called again."""
        with self._guarded():
            if self._error is None:
                return self._tick(now)
        return None

    def _tick(self, now: float) -> float:
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._traffic.expire()
        if self._hurried:
            self._hurried = False
            self._fence()
        busy, self._busy = list(self._busy.values()), {}
        for rail in busy:
            self._collect_some(rail)
        if self._open and self._rails.silent(now):
            raise TransportError("peer", f"{self.name} has not answered for {ANSWER_S:.0f} s, and no rail is up")
        self._advance()
        if self._busy:
            return now
        due = self._rails.next_due() if self._connected else None
        return self._look_at if due is None else min(due, self._look_at)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Under the lock. What goes wrong ends the link, a mistake of this code too: a link that half works may never end its
        batches."""
        with self._lock:
            try:
                yield
            except TransportError as error:
                self._fail(error)
            except Exception as error:
                log.exception("verbs link to %s", self.name)
                self._fail(TransportError("device", f"the link to {self.name} met a mistake in its own code: {error!r}"))

    def _hurry(self) -> None:
        self._hurried = True
        self._owner.progress.wake()

    # ------------------------------------------------------------------ the channel

    def _say(self, message: handshake.Control) -> None:
        self._channel.say(message)

    def _on_channel(self, _events: int) -> None:
        with self._guarded():
            if self._error is not None:
                return
            if self._channel.unsent:
                self._channel.flush()
                self._changed.notify_all()
            for message in self._channel.hear():
                self._heard(message)
            self._advance()

    def _fail(self, error: TransportError) -> None:
        self._die(error, None if self._open else handshake.Refusal(short(str(error))))

    def _heard(self, message: handshake.Control) -> None:
        match message:
            case handshake.Ports() if self._pairing is None:
                self._meet(handshake.announced(message), named=message.takes_ports)
            case handshake.Refusal():
                raise TransportError("peer", f"{self.name} refuses a verbs link: {short(message.reason)}")
            case handshake.Bye():
                raise TransportError("peer", f"{self.name} has closed the link")
            case handshake.Notice():
                if not self._inbox.put(message.body):
                    raise TransportError("peer", f"{self.name} has sent more notices than are looked at")
            case handshake.Begun() if self._pairing is not None and not self._connected and not self._open:
                self._begun(self._pairing)
            case handshake.Pair() if self._pairing is not None and not self._connected:
                self._pairing.answer(message)
            case handshake.Paired() | handshake.NotPaired() | handshake.Ready() | handshake.Lost() | handshake.Gone() if (
                self._pairing is not None
            ):
                self._pairing.hear(message)
            case _:
                raise TransportError("peer", f"{self.name} says {type(message).__name__} where it makes no sense")

    def _meet(self, theirs: list[Port], *, named: bool) -> None:
        self._rails = common_rails(self._ports, theirs, self.name, connected=self._connected, named=named)
        self._theirs = theirs
        self._traffic = Traffic(self._batches, self._rails, self._local, self._there, self._near)
        self._pairing = Pairing(
            self._ports,
            theirs,
            self._rails,
            self._traffic,
            self._owner.progress,
            self.name,
            connected=self._connected,
            named=named,
            say=self._say,
            completed=self._on_completions,
        )
        if not self._connected:
            self._say(handshake.announce([port.port for port in self._ports]))

    def _begun(self, pairing: Pairing) -> None:
        pairing.begin()
        self._open = True
        self._changed.notify_all()

    def _advance(self) -> None:
        """What follows from what was heard, and from the time."""
        pairing = self._pairing
        if self._error is not None or pairing is None:
            return
        if self._connected:
            now = time.monotonic()
            pairing.expire(now)
            pairing.ask(now)
            if not self._open and self._rails.tried(now):
                self._begun(pairing)
                self._say(handshake.Begun())
        if self._open:
            self._pump()

    def _lose(self, rail: Rail, loss: Loss, reason: str, blame: str = "device") -> None:
        assert self._pairing is not None
        self._pairing.lose(rail, loss, reason, gone=False, blame=blame)

    # ------------------------------------------------------------------ batches

    def _near(self, rail: Rail, address: int) -> float:
        return self._owner.near(self._ports[rail.local].port.device, address)

    def _local(self, rail: Rail) -> Lookup:
        return self._owner.local(self._ports[rail.local].port.device)

    def _there(self, rail: Rail) -> Lookup:
        device = self._theirs[rail.remote].device

        def find(address: int) -> Part:
            start, length, _ = self._remote.find(address, 1)
            table = self._tables[start].get(device)
            if table is None:
                raise TransportError("bounds", f"{length} bytes at {start:#x} of the peer are not registered on its {device}")
            return table.part(address)

        return find

    def _pump(self) -> None:
        for rail, error in self._traffic.pump(time.monotonic()):
            if rail.state is State.UP:
                self._lose(rail, Loss.FAILED, f"posting failed: {error.reason}")
        if self._traffic.over:
            self._hurry()

    def _fence(self) -> None:
        """Ends what batches that have ended have posted, and with it what others have on the same rails: they go again."""
        for rail in self._traffic.ended():
            if rail.state is State.UP:
                self._lose(rail, Loss.FENCED, "to end a batch")

    def _on_completions(self, rail: Rail, queue: Queue) -> None:
        with self._guarded():
            if self._traffic.queues.get(rail.index) is not queue:
                return
            try:
                queue.cq.ack()
                queue.armed = False
            except VerbsError as error:
                self._lose(rail, Loss.FAILED, f"completions: {error.reason}")
            if rail.state is State.PAIRING and rail.probing:
                assert self._pairing is not None
                self._pairing.probed(rail)
            self._collect_some(rail)
            self._advance()

    def _collect_some(self, rail: Rail) -> None:
        queue = self._traffic.queues.get(rail.index)
        if queue is not None and rail.state is State.UP:
            try:
                self._collect(rail, queue)
            except VerbsError as error:
                self._lose(rail, Loss.FAILED, f"completions: {error.reason}")

    def _collect(self, rail: Rail, queue: Queue) -> None:
        """Goes on while completions come, and not for long: others want the lock, and other rails have completions, too."""
        begun = now = time.monotonic()
        until = now + POLL_S
        while self._traffic.queues.get(rail.index) is queue:
            some, failure, guilty = self._traffic.collect(rail, now)
            if failure is not None:
                blame = "peer" if failure.status == Status.RETRY_EXC_ERR else "device"
                self._lose(rail, Loss.FENCED if guilty else Loss.FAILED, failure.status_text, blame)
                if self._traffic.over:
                    self._fence()
                return
            now = time.monotonic()
            if some:
                self._pump()
                until = now + POLL_S
                if now > begun + COLLECT_S:
                    self._busy[rail.index] = rail
                    self._owner.progress.wake()
                    return
            elif queue.idle or queue.armed:
                return
            elif now >= until:
                queue.arm()

    # ------------------------------------------------------------------ the end

    def _die(self, error: TransportError, last: handshake.Control | None = None) -> None:
        """The fence of all there is. Batches end with `error`; `last` is what the peer is told."""
        if self._error is not None:
            return
        self._error = error
        self._batches.close(error)
        for queue in self._traffic.queues.values():
            self._owner.progress.unwatch(queue.cq.fileno())
        self._traffic.close()
        self._channel.end(last)
        if error.reason != "closed":
            quietly(logging.INFO, f"link {self.name}", f"verbs link to {self.name} is over: {error}")
        self._owner.forget(self)
        self._changed.notify_all()
