"""A link over RDMA: one channel, on which both ends agree, and rails, over which batches move."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer import gids
from hicache_mooncake.transfer.batches import Batches, Inbox, check_pieces
from hicache_mooncake.transfer.transport import MAX_NOTICE_BYTES, Extents, Link, Op, Pending, Piece, TransportError
from hicache_mooncake.transfer.verbs import handshake
from hicache_mooncake.transfer.verbs.api import Device, QpOptions, Status, VerbsError
from hicache_mooncake.transfer.verbs.channel import Channel
from hicache_mooncake.transfer.verbs.fair_lock import FairLock
from hicache_mooncake.transfer.verbs.handshake import check_rail, remote_qp, short
from hicache_mooncake.transfer.verbs.progress import Progress
from hicache_mooncake.transfer.verbs.rails import ANSWER_S, Loss, Port, Rail, Rails, State, pairs
from hicache_mooncake.transfer.verbs.registration import Part, Table, parse_token
from hicache_mooncake.transfer.verbs.send_queue import SendQueue
from hicache_mooncake.transfer.verbs.slices import Lookup
from hicache_mooncake.transfer.verbs.traffic import Queue, Traffic

log = logging.getLogger(__name__)
quietly = QuietLog(log)

TURN_BYTES = 4 << 20
"""Of a batch, before the next one has its turn: more than over sockets, since these move faster and cost as much."""
POLL_S = 30e-6
"""After a completion the next one is polled for so long before the thread sleeps: an event costs about as much."""
PATIENCE = QpOptions(ack_timeout=16, retries=4)
"""A rail that does not answer fails after about 1.3 s: early enough for another one within a call's usual deadline."""
COLLECT_S = 1e-3
"""Of completions of one rail at a time, before others have their turn."""
LOOK_S = 1.0
"""How often batches that nobody waits for are looked at."""
MAX_UNSENT = 1 << 20
"""Bytes for the channel that the peer has not taken; who has more to tell waits."""


@dataclass(slots=True)
class LocalPort:
    """A port of this host that links use."""

    device: Device
    port: Port
    gid_index: int


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
        self._refusals: list[str] = []
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
            self._remote.add(address, length, token)
            self._tables[address] = tables

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
                    self._owner.ports[rail.local].port.name,
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
                self._say(handshake.announce([port.port for port in self._owner.ports]))
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
        if self._error is None:
            try:
                self._channel.say(message)
            except TransportError as error:
                self._die(error)

    def _on_channel(self, _events: int) -> None:
        with self._guarded():
            if self._error is None and self._channel.unsent:
                self._channel.flush()
                self._changed.notify_all()
            if self._error is None:
                for message in self._channel.hear():
                    self._heard(message)
                    if self._error is not None:
                        return
                self._advance()

    def _fail(self, error: TransportError) -> None:
        self._die(error, None if self._open else handshake.Refusal(short(str(error))))

    def _heard(self, message: handshake.Control) -> None:
        match message:
            case handshake.Ports() if not self._theirs:
                self._meet(message)
            case handshake.Refusal():
                raise TransportError("peer", f"{self.name} refuses a verbs link: {short(message.reason)}")
            case handshake.Bye():
                raise TransportError("peer", f"{self.name} has closed the link")
            case handshake.Notice():
                if not self._inbox.put(message.body):
                    raise TransportError("peer", f"{self.name} has sent more notices than are looked at")
            case handshake.Begun() if not self._connected and not self._open:
                self._settle()
            case handshake.Pair() if not self._connected:
                check_rail(message, len(self._rails.all))
                self._answer_pair(self._rails.all[message.rail], message)
            case handshake.Paired() | handshake.NotPaired() | handshake.Ready() | handshake.Lost() | handshake.Gone():
                check_rail(message, len(self._rails.all))
                rail = self._rails.all[message.rail]
                if message.generation == rail.generation:
                    self._heard_of_rail(rail, message)
            case _:
                raise TransportError("peer", f"{self.name} says {type(message).__name__} where it makes no sense")

    def _meet(self, message: handshake.Ports) -> None:
        self._theirs = handshake.announced(message)
        ports = self._owner.ports
        ours = [port.port for port in ports]
        made = pairs(ours, self._theirs) if self._connected else [(here, there) for there, here in pairs(self._theirs, ours)]
        if not made:
            raise TransportError(
                "unavailable",
                "the hosts have no RDMA ports of one fabric: "
                + "; ".join(
                    f"{side} {', '.join(f'{port.name} {port.link_layer} {port.gid}' for port in some)}"
                    for side, some in ((self.name, self._theirs), ("here", ours))
                )
                + _why_not(ours, self._theirs),
            )
        self._rails = Rails(made)
        self._traffic = Traffic(self._batches, self._rails, self._local, self._there, self._near)
        if not self._connected:
            self._say(handshake.announce(ours))

    def _settle(self) -> None:
        if not self._rails.up:
            raise TransportError("unavailable", "no rail could be made: " + ("; ".join(self._refusals[:8]) or "none was tried"))
        self._open = True
        self._changed.notify_all()

    # ------------------------------------------------------------------ rails

    def _advance(self) -> None:
        """What follows from what was heard, and from the time."""
        if self._error is not None or not self._theirs:
            return
        now = time.monotonic()
        if self._connected:
            for rail in self._rails.due(now):
                self._ask_for_pair(rail)
            if not self._open and not any(rail.state is State.PAIRING for rail in self._rails.all):
                self._settle()
                self._say(handshake.Begun())
        if self._open:
            self._pump()

    def _make_queue(self, rail: Rail) -> Queue:
        local = self._owner.ports[rail.local]
        queue: Queue = SendQueue(local.device, local.port.number)
        self._traffic.queues[rail.index] = queue
        self._owner.progress.watch(queue.cq.fileno(), partial(self._on_completions, rail, queue))
        return queue

    def _ask_for_pair(self, rail: Rail) -> None:
        generation = self._rails.pairing(rail, time.monotonic())
        try:
            queue = self._make_queue(rail)
            address = queue.qp.address(self._owner.ports[rail.local].gid_index)
        except VerbsError as error:
            self._lose(rail, Loss.FAILED, f"no queue pair: {error.reason}", gone=True)
            return
        self._say(handshake.Pair(rail.index, generation, address.number, address.psn, address.rd_atomic))

    def _answer_pair(self, rail: Rail, message: handshake.Pair) -> None:
        if rail.state is not State.DOWN or message.generation <= rail.generation:
            raise TransportError("peer", f"{self.name} pairs rail {rail.index} again, which is {rail.state.value}")
        self._rails.pairing(rail, time.monotonic(), message.generation)
        try:
            queue = self._make_queue(rail)
            address = queue.qp.address(self._owner.ports[rail.local].gid_index)
            self._connect(rail, queue, message)
        except VerbsError as error:
            self._lose(rail, Loss.FAILED, f"no queue pair: {error.reason}", gone=True)
            self._say(handshake.NotPaired(rail.index, message.generation, short(error.reason)))
            return
        self._say(handshake.Paired(rail.index, message.generation, address.number, address.psn, address.rd_atomic))

    def _connect(self, rail: Rail, queue: Queue, message: handshake.Pair | handshake.Paired) -> None:
        local, there = self._owner.ports[rail.local], self._theirs[rail.remote]
        queue.qp.connect(remote_qp(message, there), local.gid_index, min(local.port.mtu, there.mtu), PATIENCE)

    def _heard_of_rail(
        self,
        rail: Rail,
        message: handshake.Paired | handshake.NotPaired | handshake.Ready | handshake.Lost | handshake.Gone,
    ) -> None:
        match message, rail.state:
            case handshake.Paired(), State.PAIRING if self._connected:
                try:
                    self._connect(rail, self._traffic.queues[rail.index], message)
                except VerbsError as error:
                    self._lose(rail, Loss.FAILED, f"not connected: {error.reason}", gone=False)
                    return
                self._rails.came_up(rail, time.monotonic())
                self._say(handshake.Ready(rail.index, rail.generation))
            case handshake.NotPaired(), State.PAIRING if self._connected:
                self._lose(rail, Loss.FAILED, f"the peer has no queue pair: {short(message.reason)}", gone=True)
            case handshake.Ready(), State.PAIRING if not self._connected:
                self._rails.came_up(rail, time.monotonic())
            case handshake.Lost(), State.UP | State.PAIRING:
                loss = Loss.FAILED if message.failed else Loss.FENCED
                self._lose(rail, loss, f"lost by the peer: {short(message.reason)}", gone=True)
                self._say(handshake.Gone(rail.index, rail.generation))
            case handshake.Lost(), State.ENDING:
                self._gone(rail)
                self._say(handshake.Gone(rail.index, rail.generation))
            case handshake.Gone(), State.ENDING:
                self._gone(rail)

    def _gone(self, rail: Rail) -> None:
        self._rails.gone(rail)
        self._traffic.restore(rail)

    def _lose(self, rail: Rail, loss: Loss, reason: str, *, gone: bool, blame: str = "device") -> None:
        """Ends this life of a rail. With none left, or one that cannot be ended, the link is over."""
        if self._error is not None:
            return
        queue = self._traffic.queues.get(rail.index)
        if queue is not None:
            self._owner.progress.unwatch(queue.cq.fileno())
        local, there = self._owner.ports[rail.local].port, self._theirs[rail.remote]
        what = f"rail {local.name} to {there.name} of {self.name}"
        now = time.monotonic()
        error = TransportError(blame, f"{what} failed: {reason}")
        loss = self._traffic.lose(rail, loss, now, error, gone=gone)
        if not gone:
            self._say(handshake.Lost(rail.index, rail.generation, loss is Loss.FAILED, short(reason)))
        if loss is Loss.FAILED:
            self._refusals.append(f"{what}: {reason}")
            del self._refusals[:-8]
            state = "is quarantined" if rail.quarantined else "is set aside for a while"
            quietly(logging.WARNING, f"rail {self.name} {rail.index}", f"{what} failed and {state}: {reason}")
        if self._traffic.unfenced:
            self._die(TransportError("device", f"{what}: its queue pair cannot be destroyed: {self._traffic.unfenced}"))
        elif self._open and self._rails.hopeless(now):
            self._die(TransportError(blame, f"no rail to {self.name} is left: {'; '.join(self._refusals)}"))

    # ------------------------------------------------------------------ batches

    def _near(self, rail: Rail, address: int) -> float:
        return self._owner.near(self._owner.ports[rail.local].port.device, address)

    def _local(self, rail: Rail) -> Lookup:
        return self._owner.local(self._owner.ports[rail.local].port.device)

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
                self._lose(rail, Loss.FAILED, f"posting failed: {error.reason}", gone=False)
        if self._traffic.over:
            self._hurry()

    def _fence(self) -> None:
        """Ends what batches that have ended have posted, and with it what others have on the same rails: they go again."""
        for rail in self._traffic.ended():
            if rail.state is State.UP:
                self._lose(rail, Loss.FENCED, "to end a batch", gone=False)

    def _on_completions(self, rail: Rail, queue: Queue, _events: int) -> None:
        with self._guarded():
            if self._traffic.queues.get(rail.index) is not queue:
                return
            try:
                queue.cq.ack()
                queue.armed = False
            except VerbsError as error:
                self._lose(rail, Loss.FAILED, f"completions: {error.reason}", gone=False)
            self._collect_some(rail)
            if self._error is None:
                self._advance()

    def _collect_some(self, rail: Rail) -> None:
        queue = self._traffic.queues.get(rail.index)
        if queue is not None and rail.state is State.UP:
            try:
                self._collect(rail, queue)
            except VerbsError as error:
                self._lose(rail, Loss.FAILED, f"completions: {error.reason}", gone=False)

    def _collect(self, rail: Rail, queue: Queue) -> None:
        """Goes on while completions come, and not for long: others want the lock, and other rails have completions, too."""
        begun = now = time.monotonic()
        until = now + POLL_S
        while self._traffic.queues.get(rail.index) is queue:
            some, failure, guilty = self._traffic.collect(rail, now)
            if failure is not None:
                blame = "peer" if failure.status == Status.RETRY_EXC_ERR else "device"
                self._lose(rail, Loss.FENCED if guilty else Loss.FAILED, failure.status_text, gone=False, blame=blame)
                if self._error is None and self._traffic.over:
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


def _why_not(ours: Sequence[Port], theirs: Sequence[Port]) -> str:
    """Of the first port on either side."""
    if not ours or not theirs:
        return ""
    here, there = ours[0], theirs[0]
    why = gids.mismatch(here.gid, there.gid, here.link_layer, there.link_layer)
    return f". {why[:1].upper()}{why[1:]}" if why else ""
