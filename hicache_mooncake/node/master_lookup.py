"""Questions to the metadata masters, from any thread: the sockets around `lookup_plan`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from hicache_mooncake.config_values import split_address
from hicache_mooncake.node.link_core import LinkView
from hicache_mooncake.node.lookup_plan import NO_PROMISE, Answers, Breaker, LookupPlan, Lookups
from hicache_mooncake.protocol import (
    MAX_FRAME_BYTES,
    ClusterReport,
    ClusterStatus,
    FromMaster,
    Message,
    Question,
    decoder,
    encode,
)
from hicache_mooncake.security import ClusterKey, secure_client

__all__ = ["Asker", "Breaker", "connect_dealer"]

SEND_HWM = 16
MAX_LOOKUPS_AT_ONCE = 64
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)

Socket = zmq.Socket[bytes]
Resolve = Callable[[str], str]
"""From a master's address as it is configured to the one to connect to now."""


def connect_dealer(
    context: zmq.Context[Socket],
    master: str,
    key: ClusterKey | None = None,
    resolve: Resolve | None = None,
    watch: Callable[[Socket], None] | None = None,
) -> Socket:
    """A new socket, so that the name is resolved anew. It takes messages only while it is connected. `watch` is called with it
    before it connects. Raises zmq.ZMQError, and what `resolve` raises."""
    address = master if resolve is None else resolve(master)
    host, _ = split_address(address)
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.SNDHWM, SEND_HWM)
        dealer.setsockopt(zmq.RCVHWM, SEND_HWM)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.TCP_KEEPALIVE, 1)
        dealer.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        dealer.setsockopt(zmq.IPV6, int(":" in host))
        secure_client(dealer, key)
        if watch is not None:
            watch(dealer)
        dealer.connect(f"tcp://{address}")
    except BaseException:
        dealer.close()
        raise
    return dealer


class _Talk:
    """One message to one master on a socket of its own, and what comes back."""

    def __init__(self, dealer: Socket, message: Message) -> None:
        self.dealer = dealer
        self._unsent: bytes | None = encode(message)
        self._send()

    @property
    def events(self) -> int:
        """What to poll for."""
        return _IN if self._unsent is None else _OUT

    def go_on(self, decode: Callable[[bytes], Message]) -> Message | None:
        """Send or receive what can be. Raises zmq.ZMQError and msgspec.MsgspecError."""
        if self._unsent is None:
            try:
                return decode(self.dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
        self._send()
        return None

    def _send(self) -> None:
        assert self._unsent is not None
        try:
            self.dealer.send(self._unsent, zmq.NOBLOCK)
            self._unsent = None
        except zmq.Again:
            pass  # it is not connected yet


class Asker:
    """Questions from any thread: each call has sockets of its own while it lasts, and polls all of them on its caller's thread.
    Sockets are kept for the next call, at most MAX_LOOKUPS_AT_ONCE a master."""

    def __init__(self, connect: Callable[[str], Socket]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._lookups = Lookups()
        self._idle: dict[str, list[Socket]] = {}
        self._room = threading.BoundedSemaphore(MAX_LOOKUPS_AT_ONCE)
        self._decode = decoder(FromMaster).decode
        self._closed = False

    def lookup(
        self,
        questions: Sequence[Question],
        view: LinkView,
        asker: str,
        timeout_s: float,
        promise: tuple[float, str] = NO_PROMISE,
    ) -> tuple[Answers | None, int]:
        """The answers, or None when no master gave one within `timeout_s`; and how many replies were nonsense. Raises
        ProtocolError for a ragged blob of hashes or too many."""
        started = time.monotonic()
        plan = self._lookups.begin(questions, view, asker, started, timeout_s, promise)
        if self._closed or plan.done or not self._room.acquire(timeout=timeout_s):
            return plan.result(), 0  # says nothing about the masters
        talks: dict[str, _Talk] = {}
        try:
            while not plan.done:
                self._start(plan, talks)
                if not plan.done:
                    self._go_on(plan, talks)
        finally:
            with self._lock:
                plan.end(time.monotonic())
            self._put_back(talks, plan.blamed)
            self._room.release()
        return plan.result(), plan.garbage

    def cluster_status(self, view: LinkView, timeout_s: float) -> ClusterReport | None:
        """What the master best off knows of all nodes, or None."""
        now = time.monotonic()
        deadline = now + timeout_s
        masters = [master.master for master in sorted(view.masters, key=lambda m: (not m.answers(now), m.warming))]
        refused = {master.master for master in view.masters if master.refusal}
        with self._lock:
            allowed = (m for m in masters if m not in refused and self._lookups.breaker(m).allows(now, timeout_s))
            chosen = next(allowed, None)
        if self._closed or chosen is None or not self._room.acquire(timeout=timeout_s):
            return None
        talks: dict[str, _Talk] = {}
        report: Message | None = None
        try:
            talk = talks[chosen] = self._talk(chosen, ClusterStatus())
            while not isinstance(report, ClusterReport) and talk.dealer.poll(_milliseconds(deadline), talk.events):
                report = talk.go_on(self._decode)
        except (zmq.ZMQError, msgspec.MsgspecError, OSError, ValueError):
            report = None
        finally:
            well = isinstance(report, ClusterReport)
            with self._lock:
                if well:
                    self._lookups.breaker(chosen).succeeded()
                else:
                    self._lookups.breaker(chosen).failed(time.monotonic())
            self._put_back(talks, set() if well else {chosen})
            self._room.release()
        return report if isinstance(report, ClusterReport) else None

    def drop(self, master: str) -> None:
        """Its connections are not to be relied on: the next call makes a new one, with the name resolved anew."""
        with self._lock:
            gone = self._idle.pop(master, [])
        for socket in gone:
            socket.close()

    def keep(self, masters: Sequence[str]) -> None:
        """These are the masters now: forget what was remembered of others."""
        with self._lock:
            self._lookups.keep(masters)
            gone = [socket for master in list(self._idle) if master not in masters for socket in self._idle.pop(master)]
        for socket in gone:
            socket.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.keep(())

    def drained(self, deadline: float) -> bool:
        """Wait until no question is under way. Once, after `close`."""
        return all(self._room.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(MAX_LOOKUPS_AT_ONCE))

    # ------------------------------------------------------------------ inside

    def _start(self, plan: LookupPlan, talks: dict[str, _Talk]) -> None:
        now = time.monotonic()
        with self._lock:
            asks = plan.step(now)
        for ask in asks:
            try:
                talks[ask.master] = self._talk(ask.master, ask.message)
            except (zmq.ZMQError, OSError, ValueError):
                with self._lock:
                    plan.failed(ask.master, now)

    def _go_on(self, plan: LookupPlan, talks: dict[str, _Talk]) -> None:
        wait_ms = _milliseconds(plan.next_due(time.monotonic()))
        ready: list[str]
        if len(talks) == 1:
            ((master, talk),) = talks.items()
            ready = [master] if talk.dealer.poll(wait_ms, talk.events) else []
        else:
            poller = zmq.Poller()
            for talk in talks.values():
                poller.register(talk.dealer, talk.events)
            polled = dict(poller.poll(wait_ms))
            ready = [master for master, talk in talks.items() if talk.dealer in polled]
        for master in ready:
            try:
                message = talks[master].go_on(self._decode)
            except (zmq.ZMQError, msgspec.MsgspecError):
                talks.pop(master).dealer.close()
                with self._lock:
                    plan.failed(master, time.monotonic())
                continue
            if message is not None:
                with self._lock:
                    plan.received(master, message, time.monotonic())

    def _talk(self, master: str, message: Message) -> _Talk:
        with self._lock:
            idle = self._idle.get(master)
            dealer = idle.pop() if idle else None
        dealer = dealer or self._connect(master)
        try:
            return _Talk(dealer, message)
        except zmq.ZMQError:
            dealer.close()
            raise

    def _put_back(self, talks: dict[str, _Talk], blamed: set[str]) -> None:
        """Keep the sockets, also those whose answer is late: the next call knows it by its number. But after a failure a new
        one has the name resolved anew, and idle ones are no better."""
        drop = []
        with self._lock:
            for master, talk in talks.items():
                if self._closed or master in blamed:
                    drop.append(talk.dealer)
                else:
                    self._idle.setdefault(master, []).append(talk.dealer)
            for master in blamed:
                drop += self._idle.pop(master, [])
        for socket in drop:
            socket.close()


def _milliseconds(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000 + 0.999))
