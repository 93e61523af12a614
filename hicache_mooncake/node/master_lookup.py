"""Questions to a metadata master, from any thread, and when to leave a silent one alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from hicache_mooncake.config_values import split_address
from hicache_mooncake.protocol import MAX_FRAME_BYTES, FromMaster, Message, decoder, encode

SEND_HWM = 16
BREAKER_S = (0.5, 5.0)
MAX_LOOKUPS_AT_ONCE = 64


class Breaker:
    """Closed, or open until a time; then one caller may try while the others are still refused. Time comes in; not
    thread-safe."""

    def __init__(self, first_s: float = BREAKER_S[0], most_s: float = BREAKER_S[1]) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._open_s = 0.0
        self._until = 0.0
        self._probing = False

    def allows(self, now: float, timeout_s: float) -> bool:
        """May this call be tried? A probe that says yes keeps the others out for `timeout_s`."""
        if not self._open_s:
            return True
        if now < self._until:
            return False
        self._until = now + timeout_s
        self._probing = True
        return True

    def succeeded(self) -> None:
        self._open_s = 0.0
        self._probing = False

    def failed(self, now: float) -> None:
        if self._open_s and not self._probing:
            return  # one of several calls that failed together
        self._probing = False
        self._open_s = min(2 * self._open_s, self._most_s) or self._first_s
        self._until = now + self._open_s


def connect_dealer(context: zmq.Context[zmq.Socket[bytes]], master: str) -> zmq.Socket[bytes]:
    """A new socket, so that the name is resolved anew. It takes messages only while it is connected."""
    host, _ = split_address(master)
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, SEND_HWM)
    dealer.setsockopt(zmq.RCVHWM, SEND_HWM)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.TCP_KEEPALIVE, 1)
    dealer.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    dealer.setsockopt(zmq.IPV6, int(":" in host))
    try:
        dealer.connect(f"tcp://{master}")
    except zmq.ZMQError:
        dealer.close()
        raise
    return dealer


class Asker:
    """Questions to one master, from any thread: a pool of sockets, each used by one caller at a time, and a breaker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], master: str) -> None:
        self._context = context
        self._master = master
        self._lock = threading.Lock()
        self._breaker = Breaker()
        self._idle: list[zmq.Socket[bytes]] = []
        self._room = threading.BoundedSemaphore(MAX_LOOKUPS_AT_ONCE)
        self._decoder = decoder(FromMaster)
        self._closed = False

    def allows(self, timeout_s: float) -> bool:
        with self._lock:
            return not self._closed and self._breaker.allows(time.monotonic(), timeout_s)

    def ask(self, question: Message, timeout_s: float, is_answer: Callable[[Message], bool]) -> Message | None:
        """The answer, or None after at most `timeout_s`; then the breaker is open."""
        deadline = time.monotonic() + timeout_s
        if not self._room.acquire(timeout=timeout_s):
            return None  # says nothing about the master
        dealer: zmq.Socket[bytes] | None = None
        answer: Message | None = None
        try:
            with self._lock:
                dealer = self._idle.pop() if self._idle else None
            if dealer is None:
                dealer = connect_dealer(self._context, self._master)
            answer = self._exchange(dealer, encode(question), deadline, is_answer)
        except (zmq.ZMQError, msgspec.MsgspecError, ValueError):
            answer = None
        finally:
            self._put_back(dealer, answer is not None)
            self._room.release()
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for dealer in idle:
            dealer.close()

    def drained(self, deadline: float) -> bool:
        """Wait until no question is under way. Once, after `close`."""
        return all(self._room.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(MAX_LOOKUPS_AT_ONCE))

    def _exchange(
        self, dealer: zmq.Socket[bytes], body: bytes, deadline: float, is_answer: Callable[[Message], bool]
    ) -> Message | None:
        if not dealer.poll(milliseconds(deadline), zmq.POLLOUT):
            return None
        dealer.send(body, zmq.NOBLOCK)
        while dealer.poll(milliseconds(deadline), zmq.POLLIN):
            message = self._decoder.decode(dealer.recv(zmq.NOBLOCK))
            if is_answer(message):
                return message
        return None

    def _put_back(self, dealer: zmq.Socket[bytes] | None, succeeded: bool) -> None:
        drop = [] if dealer is None else [dealer]
        with self._lock:
            if succeeded and dealer is not None:
                self._breaker.succeeded()
                if not self._closed:
                    self._idle.append(dealer)
                    drop = []
            else:
                # A socket whose answer may still come is not used again, and the idle ones are no better than it.
                self._breaker.failed(time.monotonic())
                drop += self._idle
                self._idle = []
        for old in drop:
            old.close()


def milliseconds(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000 + 0.999))
