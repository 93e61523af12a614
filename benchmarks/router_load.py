"""The clients of `make bench-router`: single requests, streams in a closed loop, arrivals in an open one, and chats."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from hicache_mooncake.testing.fake_tokenizer import words

CHAT = "/v1/chat/completions"
_TAIL = 4096


@dataclass(slots=True)
class Outcome:
    """Of one request, as its client sees it. Times are seconds since it was sent; `status` 0: no answer, or not a whole one."""

    status: int
    began: float
    headers_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    events: int = 0
    gaps: list[float] = field(default_factory=list)
    """Between pieces of its stream."""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retry_after: str | None = None


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        yield session


def chat_body(messages: Sequence[dict[str, str]], answer: int, model: str = "fake") -> dict[str, Any]:
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": answer,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
    }


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    *,
    path: str = CHAT,
    headers: dict[str, str] | None = None,
    keep: bool = False,
) -> Outcome:
    """One stream, to its end. `keep`: its text and its usage are wanted, which takes time."""
    began = last = time.perf_counter()
    outcome = Outcome(0, began)
    pieces: list[bytes] = []
    tail = b""
    sent = {"Content-Type": "application/json"} | (headers or {})
    try:
        async with session.post(url + path, data=body, headers=sent) as response:
            outcome.headers_s = time.perf_counter() - began
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                if not outcome.events:
                    outcome.ttft_s = now - began
                else:
                    outcome.gaps.append(now - last)
                last = now
                outcome.events += piece.count(b"data: ")
                if keep:
                    pieces.append(piece)
                tail = (tail + piece)[-_TAIL:]
            outcome.total_s = time.perf_counter() - began
            outcome.retry_after = response.headers.get("Retry-After")
            whole = response.status != 200 or tail.rstrip().endswith(b"data: [DONE]")
            outcome.status = response.status if whole else 0
    except (TimeoutError, aiohttp.ClientError, OSError):
        outcome.total_s = time.perf_counter() - began
        return outcome
    if keep and outcome.status == 200:
        _read(outcome, b"".join(pieces))
    return outcome


def _read(outcome: Outcome, stream: bytes) -> None:
    for line in stream.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            outcome.text += choice.get("delta", {}).get("content") or ""
        if usage := event.get("usage"):
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class PlainClient:
    """A kept connection, one request after the other, with as little of its own as can be. `quick`: it acknowledges every
    packet at once; else as Linux does, which is up to 40 ms later."""

    def __init__(self, url: str, *, quick: bool = False) -> None:
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._quick = quick

    def ask(self, body: bytes) -> Outcome:
        """A stream that is sent in chunks."""
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        outcome = Outcome(0, began := time.perf_counter())
        self._socket.sendall(head.encode() + body)
        answer = b""
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            if self._quick:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise ConnectionError("hung up in the middle of an answer")
            answer += piece
            if not outcome.ttft_s and b"data: " in answer:
                outcome.ttft_s = time.perf_counter() - began
        outcome.total_s = time.perf_counter() - began
        outcome.status = int(answer.split(b" ", 2)[1])
        outcome.events = answer.count(b"data: ")
        return outcome

    def close(self) -> None:
        self._socket.close()


async def streams(urls: Sequence[str], bodies: Sequence[bytes], *, at_once: int, seconds: float) -> list[Outcome]:
    """`at_once` clients, each with one request after the other, as long as `seconds` are not over. Returns all that ended
    whole or not, the last ones too."""
    outcomes: list[Outcome] = []
    until = time.perf_counter() + seconds

    async def work(number: int, session: aiohttp.ClientSession) -> None:
        turn = number
        while time.perf_counter() < until:
            outcomes.append(await ask(session, urls[turn % len(urls)], bodies[turn % len(bodies)]))
            turn += at_once

    async with client() as session:
        await asyncio.gather(*(work(number, session) for number in range(at_once)))
    return outcomes


async def arrivals(
    url: str, bodies: Sequence[bytes], *, rate: float, seconds: float, headers: dict[str, str], watch: Callable[[], None]
) -> list[Outcome]:
    """So many requests a second, whatever becomes of them. `watch` is called ten times a second."""
    tasks: list[asyncio.Task[Outcome]] = []

    async def look() -> None:
        while True:
            watch()
            await asyncio.sleep(0.1)

    async with client() as session:
        looking = asyncio.create_task(look())
        began = time.perf_counter()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(session, url, bodies[number % len(bodies)], headers=headers)))
        outcomes = list(await asyncio.gather(*tasks))
        looking.cancel()
    return outcomes


@dataclass(frozen=True)
class Chats:
    """Chats of several turns, some of which begin with the same system prompt; popular ones are shared by more (Zipf)."""

    count: int = 48
    turns: int = 6
    systems: int = 6
    system_words: int = 600
    turn_words: tuple[int, int] = (40, 400)
    answer: int = 48
    think_s: tuple[float, float] = (0.5, 3.0)
    start_s: float = 20.0
    """They begin within so many seconds."""
    seed: int = 7
    text: int = 0
    """Chats with other texts share nothing with these."""
    model: str = "fake"


async def hold(url: str, chats: Chats, headers: dict[str, str] | None = None) -> list[Outcome]:
    """All chats, at once. The next turn has the answer in it and comes when somebody has thought about it; the load is the
    same each time, as far as the answers come at the same time."""
    chosen = random.Random(chats.seed)
    weights = [1 / (rank + 1) for rank in range(chats.systems)]
    plans = []
    for number in range(chats.count):
        system = chosen.choices(range(chats.systems), weights)[0]
        turns = [(chosen.randint(*chats.turn_words), chosen.uniform(*chats.think_s)) for _ in range(chats.turns)]
        plans.append((number, system, chosen.uniform(0, chats.start_s), turns))
    outcomes: list[Outcome] = []

    async def talk(
        session: aiohttp.ClientSession, number: int, system: int, start: float, turns: list[tuple[int, float]]
    ) -> None:
        messages = [{"role": "system", "content": words(chats.text + system, chats.system_words)}]
        await asyncio.sleep(start)
        for turn, (length, think) in enumerate(turns):
            messages.append({"role": "user", "content": words(chats.text + 1000 + 100 * number + turn, length)})
            body = json.dumps(chat_body(messages, chats.answer, chats.model)).encode()
            outcome = await ask(session, url, body, headers=headers, keep=True)
            outcomes.append(outcome)
            if outcome.status != 200:
                return
            messages.append({"role": "assistant", "content": outcome.text})
            await asyncio.sleep(think)

    async with client() as session:
        await asyncio.gather(*(talk(session, *plan) for plan in plans))
    return outcomes


def quantile(values: Sequence[float], part: float) -> float:
    """nan for nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")
