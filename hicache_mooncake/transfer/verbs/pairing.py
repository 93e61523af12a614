"""How the rails of a link come up and go down, as both ends agree on it: `handshake` says in which words."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer import gids
from hicache_mooncake.transfer.transport import TransportError
from hicache_mooncake.transfer.verbs.api import Device, QpOptions, Status, VerbsError
from hicache_mooncake.transfer.verbs.handshake import (
    Control,
    Gone,
    Lost,
    NotPaired,
    Pair,
    Paired,
    Ready,
    check_ports,
    check_rail,
    remote_qp,
    short,
)
from hicache_mooncake.transfer.verbs.progress import Progress
from hicache_mooncake.transfer.verbs.rails import MAX_RAILS, PROBE_S, Loss, Network, Port, Rail, Rails, State, pairs, routes
from hicache_mooncake.transfer.verbs.send_queue import SendQueue
from hicache_mooncake.transfer.verbs.traffic import Queue, Traffic

quietly = QuietLog(logging.getLogger(__name__))

PATIENCE = QpOptions(ack_timeout=16, retries=4)
"""A rail that does not answer fails after about 1.3 s: early enough for another one within a call's usual deadline."""
_MAX_REFUSALS = 8

OfRail = Paired | NotPaired | Ready | Lost | Gone
"""What is said of a rail that both ends know."""


@dataclass(slots=True)
class LocalPort:
    """A port of this host that links use."""

    device: Device
    port: Port
    gid_index: int
    network: Network | None = None
    """Of the GID's address; None where it is not known."""


def common_rails(local: Sequence[LocalPort], theirs: Sequence[Port], peer: str, *, connected: bool, named: bool) -> Rails:
    """The rails of a link. The side that connected decides which there are, and names their ports where the peer takes that
    (`named`); else they are the same on both ends. Raises TransportError, `unavailable`, where there can be none."""
    ours = [at.port for at in local]
    found = routes(ours, [at.network for at in local], theirs) if named else None
    made = (
        found.pairs if found else pairs(ours, theirs) if connected else [(here, there) for there, here in pairs(theirs, ours)]
    )
    if not made:
        raise TransportError(
            "unavailable",
            "the hosts have no RDMA ports of one fabric: "
            + "; ".join(
                f"{side} {', '.join(f'{port.name} {port.link_layer} {port.gid}' for port in some)}"
                for side, some in ((peer, theirs), ("here", ours))
            )
            + _why_not(ours, theirs),
        )
    if found is None:
        return Rails(made)
    return Rails(made, others=found.others) if connected else Rails([])


def _why_not(ours: Sequence[Port], theirs: Sequence[Port]) -> str:
    """Of the first port on either side."""
    if not ours or not theirs:
        return ""
    here, there = ours[0], theirs[0]
    why = gids.mismatch(here.gid, there.gid, here.link_layer, there.link_layer)
    return f". {why[:1].upper()}{why[1:]}" if why else ""


class Pairing:
    """Of one link. Not thread-safe: the link's lock is held for every call. Each raises TransportError when the link is over
    with it: the peer says what makes no sense, the channel is broken, a queue pair cannot be destroyed, or no rail is left."""

    def __init__(
        self,
        ports: Sequence[LocalPort],
        theirs: Sequence[Port],
        rails: Rails,
        traffic: Traffic,
        progress: Progress,
        peer: str,
        *,
        connected: bool,
        named: bool,
        say: Callable[[Control], None],
        completed: Callable[[Rail, Queue], None],
    ) -> None:
        """`named`: both ends take Pair's word for the ports of a rail. `completed` is called in the thread of `progress` when a
        queue pair may have completions."""
        self._ports, self._theirs, self._rails, self._traffic = ports, theirs, rails, traffic
        self._progress, self._peer, self._connected, self._say = progress, peer, connected, say
        self._completed, self._named = completed, named
        self.begun = False
        """Every rail has been tried: from now on the link needs one."""
        self.refusals: list[str] = []
        """The last failures, for messages."""

    def begin(self) -> None:
        """Raises TransportError where no rail is up."""
        if not self._rails.up:
            raise TransportError("unavailable", "no rail could be made: " + ("; ".join(self.refusals) or "none was tried"))
        self.begun = True

    def ask(self, now: float) -> None:
        """Pairs what is due: on the side that connected."""
        for rail in self._rails.due(now):
            generation = self._rails.pairing(rail, now)
            try:
                queue = self._make_queue(rail)
                address = queue.qp.address(self._ports[rail.local].gid_index)
            except VerbsError as error:
                self.lose(rail, Loss.FAILED, f"no queue pair: {error.reason}", gone=True)
                continue
            ports = (rail.local, rail.remote) if self._named else (-1, -1)
            self._say(Pair(rail.index, generation, address.number, address.psn, address.rd_atomic, *ports))

    def answer(self, message: Pair) -> None:
        """On the other side."""
        if self._named:
            check_ports(message, len(self._theirs), len(self._ports))
            if message.rail == len(self._rails.all) < MAX_RAILS:
                self._rails.add(message.to, message.port)
        rail = self._find(message)
        if rail.state is not State.DOWN or message.generation <= rail.generation:
            raise TransportError("peer", f"{self._peer} pairs rail {rail.index} again, which is {rail.state.value}")
        if self._named:
            rail.local, rail.remote = message.to, message.port
        self._rails.pairing(rail, time.monotonic(), message.generation)
        try:
            queue = self._make_queue(rail)
            address = queue.qp.address(self._ports[rail.local].gid_index)
            self._connect(rail, queue, message)
        except VerbsError as error:
            self.lose(rail, Loss.FAILED, f"no queue pair: {error.reason}", gone=True)
            self._say(NotPaired(rail.index, message.generation, short(error.reason)))
            return
        self._say(Paired(rail.index, message.generation, address.number, address.psn, address.rd_atomic))

    def hear(self, message: OfRail) -> None:
        rail = self._find(message)
        if message.generation != rail.generation:
            return
        match message, rail.state:
            case Paired(), State.PAIRING if self._connected:
                queue = self._traffic.queues[rail.index]
                try:
                    self._connect(rail, queue, message)
                    queue.probe()
                except VerbsError as error:
                    self.lose(rail, Loss.FAILED, f"not connected: {error.reason}", gone=False)
                    return
                self._rails.probe(rail, time.monotonic())
            case NotPaired(), State.PAIRING if self._connected:
                self.lose(rail, Loss.FAILED, f"the peer has no queue pair: {short(message.reason)}", gone=True)
            case Ready(), State.PAIRING if not self._connected:
                self._rails.came_up(rail, time.monotonic())
            case Lost(), State.UP | State.PAIRING:
                loss = Loss.FAILED if message.failed else Loss.FENCED
                self.lose(rail, loss, f"lost by the peer: {short(message.reason)}", gone=True)
                self._say(Gone(rail.index, rail.generation))
            case Lost(), State.ENDING:
                self._gone(rail)
                self._say(Gone(rail.index, rail.generation))
            case Gone(), State.ENDING:
                self._gone(rail)

    def probed(self, rail: Rail) -> None:
        """Its queue pair may have been tried."""
        try:
            answer = self._traffic.queues[rail.index].answer()
        except VerbsError as error:
            self.lose(rail, Loss.FAILED, f"completions: {error.reason}", gone=False)
            return
        if answer is None:
            return
        if answer.status:
            blame = "peer" if answer.status == Status.RETRY_EXC_ERR else "device"
            self.lose(rail, Loss.FAILED, f"nothing gets through: {answer.status_text}", gone=False, blame=blame)
            return
        self._rails.came_up(rail, time.monotonic())
        self._say(Ready(rail.index, rail.generation))

    def expire(self, now: float) -> None:
        for rail in self._rails.unanswered(now):
            self.lose(rail, Loss.FAILED, f"nothing gets through: no completion in {PROBE_S:g} s", gone=False)

    def lose(self, rail: Rail, loss: Loss, reason: str, *, gone: bool, blame: str = "device") -> None:
        """Ends this life of a rail. `gone`: the peer has no queue pair of it, or has destroyed it; else it is told to."""
        queue = self._traffic.queues.get(rail.index)
        if queue is not None:
            self._progress.unwatch(queue.cq.fileno())
        what = f"rail {self._ports[rail.local].port.name} to {self._theirs[rail.remote].name} of {self._peer}"
        now = time.monotonic()
        loss = self._traffic.lose(rail, loss, now, TransportError(blame, f"{what} failed: {reason}"), gone=gone)
        if loss is Loss.FAILED:
            self.refusals.append(f"{what}: {reason}")
            del self.refusals[:-_MAX_REFUSALS]
            state = "is quarantined" if rail.quarantined else "is set aside for a while"
            quietly(logging.WARNING, f"rail {self._peer} {rail.index}", f"{what} failed and {state}: {reason}")
        if self._traffic.unfenced:
            raise TransportError("device", f"{what}: its queue pair cannot be destroyed: {self._traffic.unfenced}")
        if self.begun and self._rails.hopeless(now):
            raise TransportError(blame, f"no rail to {self._peer} is left: {'; '.join(self.refusals)}")
        if not gone:
            self._say(Lost(rail.index, rail.generation, loss is Loss.FAILED, short(reason)))

    def _gone(self, rail: Rail) -> None:
        self._rails.gone(rail)
        self._traffic.restore(rail)

    def _find(self, message: Pair | OfRail) -> Rail:
        check_rail(message, len(self._rails.all))
        return self._rails.all[message.rail]

    def _make_queue(self, rail: Rail) -> Queue:
        local = self._ports[rail.local]
        queue: Queue = SendQueue(local.device, local.port.number)
        self._traffic.queues[rail.index] = queue
        self._progress.watch(queue.cq.fileno(), lambda _events: self._completed(rail, queue))
        return queue

    def _connect(self, rail: Rail, queue: Queue, message: Pair | Paired) -> None:
        local, there = self._ports[rail.local], self._theirs[rail.remote]
        queue.qp.connect(remote_qp(message, there), local.gid_index, min(local.port.mtu, there.mtu), PATIENCE)
