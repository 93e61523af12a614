"""What an engine says of its cache: SGLang's KV events (--kv-events-config), put into `Prefixes`.

The sockets around `event_stream`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from hicache_master.conductor.prefixes import Prefixes

from .event_stream import EngineCache, KvEventStream

REPLAY_S = 10.0
"""Without a batch for so long, a replay has ended."""
COMPLAIN_S = 10.0
MAX_RANKS = 256
MAX_BATCH_BYTES = 64 << 20
EVENT_HWM = 100_000

log = logging.getLogger("hicache_master.router")


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine publishes. Rank r of `ranks` data-parallel ones is at the r-th port from there on."""

    endpoint: str
    """tcp://host:port"""
    replay_endpoint: str = ""
    topic: str = ""
    ranks: int = 1
    block_size: int = 0
    """The page size that the engine told; 0: it did not."""

    @classmethod
    def of_server(cls, host: str, info: Mapping[str, Any]) -> EventSource | None:
        """From what SGLang's /server_info says; None where it says nothing of events. `host`: how the engine is reached."""
        told = info.get("kv_events")
        if not isinstance(told, dict) or not isinstance(told.get("endpoint_port_base"), int):
            return None
        replay = told.get("replay_endpoint_port_base")
        ranks, size = told.get("dp_size"), told.get("block_size")
        return cls(
            f"tcp://{host}:{told['endpoint_port_base']}",
            f"tcp://{host}:{replay}" if isinstance(replay, int) else "",
            str(told.get("topic") or ""),
            min(ranks, MAX_RANKS) if isinstance(ranks, int) and ranks > 0 else 1,
            size if isinstance(size, int) else 0,
        )

    def at(self, rank: int) -> tuple[str, str]:
        """Endpoint and replay endpoint of this rank."""
        return _offset(self.endpoint, rank), _offset(self.replay_endpoint, rank)


def _offset(endpoint: str, rank: int) -> str:
    if not endpoint or not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"


class KvEvents:
    """Listens to one engine's events and puts them into `prefixes`, on the event loop that calls `start`, until `close`.

    The engine should have joined `prefixes` before, in the same incarnation. When the engine is known to have restarted, close
    this one and make another with its new incarnation. What it says of itself: `counts`, `connected`, `problem`."""

    def __init__(self, prefixes: Prefixes, name: str, incarnation: str, source: EventSource, page_size: int) -> None:
        self.name = name
        self._source = source
        self._cache = EngineCache(prefixes, name, incarnation, page_size, source.ranks)
        self._context = zmq.asyncio.Context.instance()
        self._tasks: list[asyncio.Task[None]] = []
        self._connected: set[int] = set()
        self._told: set[str] = set()
        self._waited = False

    @property
    def counts(self) -> Counter[str]:
        """As in `EngineCache`."""
        return self._cache.counts

    @property
    def connected(self) -> bool:
        """To all of its ranks."""
        return len(self._connected) == self._source.ranks

    @property
    def problem(self) -> str:
        """Why nothing is known of this engine's cache, and what to do; empty if it is."""
        size = self._cache.other_page_size or self._source.block_size
        if size and size != self._cache.page_size:
            return (
                f"{self.name} has pages of {size} tokens, and this router reckons with {self._cache.page_size}: its events are"
                " not used; start both with the same page size"
            )
        if not self.connected:
            return (
                f"no events come from {self.name} at {self._source.endpoint}: is --kv-events-config set there, and can that be"
                " reached from here?"
            )
        return ""

    def start(self) -> None:
        for rank in range(self._source.ranks):
            self._tasks.append(asyncio.create_task(self._follow(rank), name=f"events of {self.name} {rank}"))

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, rank: int) -> None:
        """Over whatever happens, forever."""
        while True:
            try:
                await self._listen(rank)
            except (zmq.ZMQError, OSError, ValueError) as error:
                self._tell(f"events of {self.name} at {self._source.at(rank)[0]}: {error}; trying again")
            self._connected.discard(rank)
            await asyncio.sleep(1.0)

    async def _listen(self, rank: int) -> None:
        endpoint, replay_endpoint = self._source.at(rank)
        stream = KvEventStream(self._cache, rank, replays=bool(replay_endpoint))
        self._cache.cleared(rank)
        socket = self._context.socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        wake = asyncio.Event()
        tasks: list[asyncio.Task[Any]] = []
        try:
            _set_up(socket, endpoint, EVENT_HWM)
            socket.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            tasks = [
                asyncio.create_task(self._watch(monitor, stream, rank, wake)),
                asyncio.create_task(_receive(socket, stream, wake)),
                asyncio.create_task(wake.wait()),
            ]
            socket.connect(endpoint)
            while True:
                await asyncio.wait(tasks, timeout=COMPLAIN_S, return_when=asyncio.FIRST_COMPLETED)
                self._complain()
                for task in tasks[:-1]:
                    if task.done():
                        task.result()
                if wake.is_set():
                    wake.clear()
                    tasks[-1] = asyncio.create_task(wake.wait())
                while stream.wants:
                    await self._replay(replay_endpoint, stream)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            socket.close(linger=0)

    async def _watch(self, monitor: zmq.asyncio.Socket, stream: KvEventStream, rank: int, wake: asyncio.Event) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.add(rank)
                stream.connected()
            else:
                self._connected.discard(rank)
            wake.set()

    async def _replay(self, endpoint: str, stream: KvEventStream) -> None:
        """One request, and all answers to it."""
        start, whole = stream.begin_replay(), False
        socket = self._context.socket(zmq.DEALER)
        try:
            _set_up(socket, endpoint, 2 * EVENT_HWM)
            socket.connect(endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while await socket.poll(int(REPLAY_S * 1000)):
                frames = await socket.recv_multipart()
                seq = int.from_bytes(frames[-2], "big", signed=True) if len(frames) > 2 else -1
                if seq < 0:
                    whole = True
                    break
                stream.replayed(seq, frames[-1])
        finally:
            socket.close(linger=0)
            stream.replay_ended(whole)

    def _complain(self) -> None:
        if (problem := self.problem) and (self.connected or self._waited):
            self._tell(problem)
        if self.counts["lost"] and not self._source.replay_endpoint:
            self._tell(
                f"events of {self.name} were lost, and all that was known of its cache with them: set replay_endpoint in its"
                " --kv-events-config"
            )
        self._waited = True

    def _tell(self, text: str) -> None:
        """Once, and in a bounded memory."""
        if text not in self._told and len(self._told) < 16:
            self._told.add(text)
            log.warning("%s", text)


async def _receive(socket: zmq.asyncio.Socket, stream: KvEventStream, wake: asyncio.Event) -> None:
    while True:
        frames = await socket.recv_multipart()
        if len(frames) == 3 and len(frames[1]) == 8:
            stream.received(int.from_bytes(frames[1], "big"), frames[2])
            if stream.wants:
                wake.set()
        else:
            stream.counts["unread"] += 1


def _set_up(socket: zmq.asyncio.Socket, endpoint: str, hwm: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
