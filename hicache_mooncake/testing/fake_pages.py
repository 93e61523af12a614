"""What a fake engine (`fake_engine`) keeps of prompts: names of pages as SGLang makes them, an LRU cache of them, KV events."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

REPLAY_BATCHES = 10_000
_END = (-1).to_bytes(8, "big", signed=True)


def page_hashes(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[bytes]:
    """SGLang's 32-byte hashes of the whole pages of `tokens`: each of the hash before it and the page's tokens."""
    raw = memoryview(array("I", tokens).tobytes())
    step = page_size * 4
    prior, hashes = seed, []
    for start in range(0, len(raw) - step + 1, step):
        prior = hashlib.sha256(prior + raw[start : start + step]).digest()
        hashes.append(prior)
    return hashes


def event_key(page_hash: bytes) -> int:
    """How SGLang's KV events name a page."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


def storage_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Of the pages of a request with a namespace of its own; empty without one."""
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            digest.update(b"\x01" + len(part.encode()).to_bytes(8, "little") + part.encode())
    return digest.digest()


def event_seed(cache_salt: str | None) -> bytes:
    """Of a salted request's pages in KV events, which are hashed apart."""
    return b"" if cache_salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest()


@dataclass(frozen=True, slots=True)
class Page:
    hash: bytes
    key: int
    parent: int | None
    tokens: tuple[int, ...]
    salt: str | None


def pages_of(
    tokens: Sequence[int], page_size: int, *, extra_key: str | None = None, cache_salt: str | None = None
) -> list[Page]:
    """The whole pages of a sequence, in order."""
    hashes = page_hashes(tokens, page_size, storage_seed(extra_key, cache_salt))
    named = hashes
    if extra_key is not None or cache_salt is not None:
        named = page_hashes(tokens, page_size, event_seed(cache_salt))
    pages: list[Page] = []
    parent: int | None = None
    for at, (page_hash, name) in enumerate(zip(hashes, named, strict=True)):
        key = event_key(name)
        pages.append(Page(page_hash, key, parent, tuple(tokens[at * page_size : (at + 1) * page_size]), cache_salt))
        parent = key
    return pages


class PageCache:
    """At most `room` pages, least recently used first out, and of a chain its tail before its head. Not thread-safe."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._pages: OrderedDict[bytes, Page] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, pages: Sequence[Page]) -> int:
        """How many pages of this chain are here, from its head."""
        count = 0
        for page in pages:
            if page.hash not in self._pages:
                break
            count += 1
        self._touch(pages[:count])
        return count

    def insert(self, pages: Sequence[Page]) -> tuple[list[Page], list[Page]]:
        """Add a chain, as far as it fits. Returns what is new and what had to go."""
        pages = pages[: self.room]
        stored = [page for page in pages if page.hash not in self._pages]
        for page in stored:
            self._pages[page.hash] = page
        self._touch(pages)
        removed = [self._pages.popitem(last=False)[1] for _ in range(len(self._pages) - self.room)]
        return stored, removed

    def clear(self) -> None:
        self._pages.clear()

    def _touch(self, pages: Sequence[Page]) -> None:
        for page in reversed(pages):
            self._pages.move_to_end(page.hash)


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    """As SGLang's: a map with its class's name as `type`."""


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(_Event):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


class EventPublisher:
    """SGLang's ZMQ publisher: topic, sequence number and batch on a PUB socket, and a ROUTER that sends old ones again.

    Binds free ports of `host` unless told. To be made, used and closed in one event loop.
    """

    def __init__(self, host: str, *, port: int = 0, replay_port: int = 0, topic: str = "") -> None:
        self._context = zmq.asyncio.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._topic = topic.encode()
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self.lose = 0
        """Batches from here on that are numbered and kept, but not published."""
        self.port = _bind(self._publish, host, port)
        self.replay_port = _bind(self._replay, host, replay_port)
        self._answering = asyncio.create_task(self._answer())

    async def changed(self, stored: Sequence[Page], removed: Sequence[Page], *, medium: str = "GPU") -> None:
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [
            BlockStored([page.key], page.parent, list(page.tokens), len(page.tokens), None, medium, page.salt)
            for page in stored
        ]
        events += [BlockRemoved([page.key], medium) for page in removed]
        if events:
            await self._send(events)

    async def cleared(self) -> None:
        await self._send([AllBlocksCleared()])

    async def close(self) -> None:
        self._answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._answering
        self._context.destroy(linger=0)

    async def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        payload = msgspec.msgpack.encode(_Batch(time.time(), events, 0))
        number, self._sequence = self._sequence, self._sequence + 1
        self._kept.append((number, payload))
        if self.lose:
            self.lose -= 1
            return
        await self._publish.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, wanted = frames
            first = int.from_bytes(wanted, "big")
            for number, payload in list(self._kept):
                if number >= first:
                    await self._replay.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", b"", _END, b""])


def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> int:
    if not port:
        return int(socket.bind_to_random_port(f"tcp://{host}"))
    socket.bind(f"tcp://{host}:{port}")
    return port
