"""The sockets that KV events go out by: what was published, and answers to those who missed some. `EventsOut` decides both."""

from __future__ import annotations

import time

import zmq

from hicache_mooncake.config_values import join_address

from .events_out import EventsOut

PUBLISH_HWM = 2_000
"""Batches queued per subscriber, some 40 KB each at most and shared by all. More are lost to that one, who sees a gap."""
REPLAY_HWM = 64
REQUESTS_A_TURN = 16
ANSWERS_A_TURN = 100
"""A few milliseconds of work: no lookup waits for more of a replay than this."""
MAX_REQUEST_BYTES = 4096


class EventsSocket:
    """Binds in the constructor, which raises zmq.ZMQError. Nothing here waits for anybody. Not thread-safe."""

    def __init__(self, events: EventsOut, publish: tuple[str, int], replay: tuple[str, int] | None) -> None:
        self._events = events
        self._context = zmq.Context(io_threads=1)
        self.replay_socket: zmq.Socket[bytes] | None = None
        """To be polled for requests; None where nothing is replayed."""
        self.replay_address = ""
        self.busy = False
        """Answers are left that can be sent at once."""
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.setsockopt(zmq.SNDHWM, PUBLISH_HWM)
            self.address = _bind(self._publisher, *publish)
            if replay is not None:
                self.replay_socket = self._context.socket(zmq.ROUTER)
                self.replay_socket.setsockopt(zmq.SNDHWM, REPLAY_HWM)
                self.replay_socket.setsockopt(zmq.RCVHWM, REPLAY_HWM)
                self.replay_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_address = _bind(self.replay_socket, *replay)
        except BaseException:
            self.close()
            raise

    def turn(self, now: float) -> None:
        """Publish what has come up; answer a bounded part of what was asked. `now` is monotonic."""
        for batch in self._events.take(time.time()):
            try:
                self._publisher.send_multipart(batch.frames(), zmq.NOBLOCK)
            except zmq.ZMQError:
                self._events.stats.dropped += 1
        if self.replay_socket is not None:
            self._take_requests(self.replay_socket, now)
            self._answer(self.replay_socket, now)

    def close(self) -> None:
        """Once more does no harm."""
        self._context.destroy(linger=0)

    def _take_requests(self, socket: zmq.Socket[bytes], now: float) -> None:
        for _ in range(REQUESTS_A_TURN):
            try:
                client, *request = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._events.ask(client, request[1:] if request and not request[0] else [], now)

    def _answer(self, socket: zmq.Socket[bytes], now: float) -> None:
        self.busy = False
        left = ANSWERS_A_TURN
        for replay in self._events.replays:
            more = True
            while more and left:
                left -= 1
                try:
                    socket.send_multipart([replay.client, b"", *self._events.next_answer(replay)], zmq.NOBLOCK)
                except zmq.ZMQError as error:
                    self._events.stalled(replay, now, gone=not isinstance(error, zmq.Again))
                    break
                more = self._events.answered(replay, now)
        self.busy = not left


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> str:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.bind(f"tcp://{join_address(host, port)}")
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode().removeprefix("tcp://")
