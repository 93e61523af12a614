"""What an engine says of its cache: SGLang's KV events (--kv-events-config), put into `Prefixes`.

`KvEventStream` has the decisions, without I/O; `KvEvents` the sockets. SGLang numbers its batches from 0 and keeps the last
10,000 for replay; it says nothing of its incarnation. So a restart is known by a batch that is numbered lower and dated later,
or by a replay in which the last batch that was taken has another content.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from hicache_master.conductor.prefixes import DEVICE, HOST, Prefixes

TIERS = {"GPU": DEVICE, "CPU_PINNED": HOST, "CPU": HOST}
"""By the medium that SGLang names. Others are not an engine's."""
MAX_HELD = 4_096
"""Batches that wait while an answer to a replay is on its way."""
MAX_REPLAYS = 8
"""In a row: of a long one some batches may be dropped, and the rest is asked for again."""
REPLAY_S = 10.0
"""Without a batch for so long, a replay has ended."""
COMPLAIN_S = 10.0
MAX_RANKS = 256
MAX_BATCH_BYTES = 64 << 20
EVENT_HWM = 100_000
_NOTHING = -1

log = logging.getLogger("hicache_master.router")


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int]
    block_size: int
    medium: str | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


_Event = _Stored | _Removed | _Cleared
_event_decoder: msgspec.msgpack.Decoder[_Event] = msgspec.msgpack.Decoder(_Event)
_batch_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_events_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


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


class EngineCache:
    """One engine's pages in `prefixes`, put together from its data-parallel ranks: a page is there while any of them has it.

    The engine has joined `prefixes` in this incarnation, or does so here. Pages of another size than `page_size` are not taken:
    their hashes name other tokens. Not thread-safe."""

    def __init__(self, prefixes: Prefixes, name: str, incarnation: str, page_size: int, ranks: int = 1) -> None:
        self._prefixes = prefixes
        self._name = name
        self._incarnation = incarnation
        self.page_size = page_size
        self.ranks = ranks
        self._masks: dict[tuple[int, int], int] = {}
        """With several ranks: (key, tier) -> bits of those that have it."""
        self.counts: Counter[str] = Counter()
        """stored, removed (pages); batches, cleared, gaps, lost (gaps that no replay filled), restarts, duplicates, unread
        (events that nobody here knows), mismatched (pages of another size)."""
        self.other_page_size = 0
        """That the engine uses, if it is not ours."""
        prefixes.join(name, incarnation)

    def stored(self, rank: int, keys: list[int], tier: int, size: int) -> None:
        if size != self.page_size:
            self.counts["mismatched"] += len(keys)
            self.other_page_size = size
            return
        self.counts["stored"] += len(keys)
        if self.ranks > 1:
            for key in keys:
                self._masks[key, tier] = self._masks.get((key, tier), 0) | 1 << rank
            while len(self._masks) > 2 * self._prefixes.max_keys:
                del self._masks[next(iter(self._masks))]
        self._prefixes.stored(self._name, self._incarnation, keys, tier)

    def removed(self, rank: int, keys: list[int], tier: int) -> None:
        self.counts["removed"] += len(keys)
        if self.ranks > 1:
            keys = [key for key in keys if self._without(rank, key, tier)]
        self._prefixes.removed(self._name, self._incarnation, keys, tier)

    def cleared(self, rank: int) -> None:
        """This rank has nothing any more."""
        if self.ranks == 1:
            self._prefixes.forget(self._name, self._incarnation)
            return
        gone: dict[int, list[int]] = {}
        for key, tier in [held for held, mask in self._masks.items() if mask >> rank & 1]:
            if self._without(rank, key, tier):
                gone.setdefault(tier, []).append(key)
        for tier, keys in gone.items():
            self._prefixes.removed(self._name, self._incarnation, keys, tier)

    def _without(self, rank: int, key: int, tier: int) -> bool:
        """Does no rank have it any more, when this one has not?"""
        mask = self._masks.get((key, tier), 0) & ~(1 << rank)
        if mask:
            self._masks[key, tier] = mask
        else:
            self._masks.pop((key, tier), None)
        return not mask


class KvEventStream:
    """The batches of one rank, in order, each once, or else everything of that rank is forgotten.

    stream.received(seq, payload)       # live ones
    stream.connected()                  # whenever the publisher was (re)connected
    if stream.wants:
        ask for a replay from stream.begin_replay(); then stream.replayed(seq, payload) for each, and stream.replay_ended(...)

    A batch that cannot be had any more (`replays` False, or the publisher keeps it no longer) costs all that is known of the
    rank: what it removed would be believed to be there. Not thread-safe."""

    def __init__(self, cache: EngineCache, rank: int = 0, *, replays: bool = True) -> None:
        self._cache = cache
        self._rank = rank
        self._replays = replays
        self._next = _NOTHING
        self._newest = 0.0
        self._last = b""
        """Of the last batch that was taken, what tells its content."""
        self._held: dict[int, bytes] = {}
        self._start: int | None = None
        """Of the replay that is wanted, or on its way."""
        self._asked = False
        self._first = True
        """No batch of this replay has come yet."""
        self._broken = False
        """Some of its batches were dropped on their way."""
        self._tries = 0

    @property
    def counts(self) -> Counter[str]:
        return self._cache.counts

    def connected(self) -> None:
        """Something may have been lost, or the publisher may be another one."""
        if self._replays:
            self._want()

    @property
    def wants(self) -> bool:
        """There is a replay to ask for now."""
        return self._start is not None and not self._asked

    def begin_replay(self) -> int:
        """From where on. Only when it `wants` one."""
        assert self._start is not None
        self._asked, self._first, self._broken = True, True, False
        return self._start

    def received(self, seq: int, payload: bytes) -> None:
        if self._start is not None:
            self._held[seq] = payload
            if len(self._held) > MAX_HELD:
                del self._held[next(iter(self._held))]
            return
        if self._next == _NOTHING or seq == self._next:
            self._take(seq, payload)
            return
        if seq < self._next:
            if _date(payload) <= self._newest:
                self.counts["duplicates"] += 1
                return
            self._restarted()
            if seq == 0:
                self._take(seq, payload)
                return
        else:
            self.counts["gaps"] += 1
        if self._replays:
            self._held[seq] = payload
            self._want()
        else:
            self._lost()
            self._take(seq, payload)

    def replayed(self, seq: int, payload: bytes) -> None:
        first, self._first = self._first, False
        if self._broken or self._start is None:
            return
        if first and seq == self._start == self._next - 1 and _digest(payload) != self._last:
            self._restarted()
            self._broken = True  # it began in the middle of another one's account
            return
        if self._next == _NOTHING or seq == self._next:
            self._take(seq, payload)
        elif seq > self._next:
            if first:
                self._lost()
                self._take(seq, payload)
            else:
                self._broken = True

    def replay_ended(self, whole: bool) -> None:
        """All of it has come (`whole`), or nothing more will."""
        nothing = self._first
        self._start, self._asked = None, False
        if whole and nothing and self._next > 0:
            self._restarted()  # it does not even have the last batch that was taken here
            self._want()
            return
        if self._broken and self._again():
            return
        held, self._held = sorted(self._held.items()), {}
        for at, (seq, payload) in enumerate(held):
            if seq > self._next != _NOTHING:
                if self._again():
                    self._held = dict(held[at:])
                    return
                self._lost()
                self._take(seq, payload)
            else:
                self.received(seq, payload)
        self._tries = 0

    def _again(self) -> bool:
        """Ask for the rest, if that has not been done too often already."""
        self._tries += 1
        if self._tries >= MAX_REPLAYS:
            return False
        self._want()
        return True

    def _want(self) -> None:
        if self._start is None:
            self._start, self._asked = max(self._next - 1, 0), False
            self.counts["replays"] += 1

    def _restarted(self) -> None:
        self.counts["restarts"] += 1
        self._cache.cleared(self._rank)
        self._next, self._newest = 0, 0.0

    def _lost(self) -> None:
        self.counts["lost"] += 1
        self._cache.cleared(self._rank)
        self._next = _NOTHING

    def _take(self, seq: int, payload: bytes) -> None:
        self._next = seq + 1
        self._last = _digest(payload)
        self.counts["batches"] += 1
        try:
            date, events = _parts(payload)
        except (msgspec.MsgspecError, TypeError, ValueError):
            self.counts["unread"] += 1
            return
        self._newest = max(self._newest, date)
        for raw in events:
            self._apply(_read(raw))

    def _apply(self, event: _Event | None) -> None:
        if isinstance(event, _Cleared):
            self.counts["cleared"] += 1
            self._cache.cleared(self._rank)
            return
        tier = None if event is None else TIERS.get(event.medium or "GPU")
        if event is None or tier is None:
            self.counts["unread"] += 1
        elif isinstance(event, _Stored):
            self._cache.stored(self._rank, event.block_hashes, tier, event.block_size)
        else:
            self._cache.removed(self._rank, event.block_hashes, tier)


def _digest(payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(payload)


def _parts(payload: bytes) -> tuple[float, list[msgspec.Raw]]:
    """When, and the events. Raises ValueError for what is no batch, or MsgspecError."""
    batch = _batch_decoder.decode(payload)
    if len(batch) < 2:
        raise ValueError("no batch of events")
    return float(msgspec.msgpack.decode(batch[0])), _events_decoder.decode(batch[1])


def _date(payload: bytes) -> float:
    try:
        return _parts(payload)[0]
    except (msgspec.MsgspecError, TypeError, ValueError):
        return 0.0


def _read(raw: msgspec.Raw) -> _Event | None:
    """SGLang's events are maps, those of older releases arrays with the kind first. None for any other."""
    try:
        return _event_decoder.decode(raw)
    except msgspec.MsgspecError:
        pass
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        fields = msgspec.msgpack.decode(raw)
        if isinstance(fields, list) and fields:
            names: tuple[str, ...] = ("type", "block_hashes", "medium")
            if fields[0] == "BlockStored":
                names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
            return msgspec.convert(dict(zip(names, fields, strict=False)), _Event)
    return None


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
        """Why what is known of this engine's cache is wrong or poor, and what to do; empty if it is not."""
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
        if self.counts["lost"] and not self._source.replay_endpoint:
            return (
                f"events of {self.name} were lost, and all that was known of its cache with them: set replay_endpoint in its"
                " --kv-events-config"
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
