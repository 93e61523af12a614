"""Carries one request to its engine, or to both halves of a pair, and the answer back as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from .answers import Ends, Usage, error_code
from .bodies import Asked, with_bootstrap
from .routing import Flight
from .workers import Worker

CONNECT_S = 5.0
KEEP_ALIVE_S = 4.0
"""Of idle connections: uvicorn closes them after 5 s, and what is sent just then is lost."""
DEAD_S = 30
"""A host that acknowledges nothing for so long is gone."""
ABORT_S = 5.0
LEG_S = 30.0
"""How long a prefill engine may take to say that it is done, when the answer is complete."""
BLAME_S = 0.3
"""How long the other half of a pair is waited for, when one has failed, to know which of them it was."""
MAX_ERROR_BYTES = 64 << 10
_READ_BYTES = 256 << 10
_LEAST_RID_CHARS = 16
"""SGLang aborts all requests whose ids begin with what it is told; a short one of a client's could hit others."""

_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "content-encoding",
        "accept-encoding",
        "expect",
    }
)
_RETURNED = ("Content-Type", "Content-Length", "Content-Encoding", "Cache-Control", "X-Request-Id")


class EngineFailed(Exception):
    """Nothing has been sent to the client. `status` and `body`: what the engine said, 0 for nothing; `certain`: nobody listens
    there; `fault`: of the engine, so that another one may do better."""

    def __init__(
        self, worker: Worker, problem: str, status: int = 0, body: bytes = b"", certain: bool = False, fault: bool = True
    ) -> None:
        super().__init__(problem)
        self.worker, self.problem, self.status, self.body = worker, problem, status, body
        self.certain, self.fault = certain, fault


class AnswerBroken(Exception):
    """The answer has begun, and will not be complete: the client's connection has been cut, so that it cannot take it for
    whole."""

    def __init__(self, worker: Worker, problem: str, response: web.StreamResponse) -> None:
        super().__init__(problem)
        self.worker, self.problem, self.response = worker, problem, response


class ClientGone(Exception):
    """In the middle of its answer."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__("the client has gone")
        self.response = response


@dataclass(slots=True)
class Answered:
    response: web.StreamResponse
    status: int
    usage: Usage
    well: bool
    """Complete, and no error."""


Prefilled = Callable[[Usage | None, bool], None]
"""The prompt has been computed: what is known of it by now, and whether the client has got something."""


def forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Of the client's headers, those that engines get."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP)


class Proxy:
    """One session with all engines. `stall_s`: an engine that says nothing for so long has failed. For one event loop."""

    def __init__(self, stall_s: float = 600.0, admin_headers: Mapping[str, str] | None = None) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=30, socket_factory=_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=stall_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
            max_line_size=32768,
            max_field_size=32768,
        )
        self._admin_headers = dict(admin_headers or {})
        self._background: set[asyncio.Task[object]] = set()

    @property
    def session(self) -> aiohttp.ClientSession:
        return self._session

    @property
    def admin_headers(self) -> Mapping[str, str]:
        return self._admin_headers

    async def close(self) -> None:
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._session.close()

    async def carry(
        self, http: web.Request, flight: Flight, asked: Asked, headers: CIMultiDict[str], prefilled: Prefilled
    ) -> Answered:
        """Raises EngineFailed, AnswerBroken, ClientGone, and CancelledError when the client goes while it waits. Whatever is
        raised, both engines have been told that nobody wants the answer any more."""
        assert flight.prefill is not None
        assert flight.answers is not None
        leg: asyncio.Task[Usage] | None = None
        upstream: aiohttp.ClientResponse | None = None
        try:
            if flight.pair:
                raw = with_bootstrap(asked, flight.prefill.spec.host, flight.prefill.bootstrap_port)
                leg = asyncio.create_task(self._prefill(flight.prefill, asked.path, raw, headers))
                upstream, first = await self._first_of_pair(flight.answers, asked.path, raw, headers, leg, prefilled)
            else:
                upstream, first = await self._first(flight.answers, asked.path, asked.raw, headers)
            answered = await self._answer(http, flight, asked, upstream, first, prefilled)
        except BaseException:
            if upstream is not None:
                upstream.close()
            if leg is not None:
                self._end(leg)
            self.abort(flight, asked)
            raise
        if leg is not None:
            self._finish(leg)
        return answered

    def abort(self, flight: Flight, asked: Asked) -> None:
        """Tells the engines by the request's id as well: closed connections are not looked at all the time."""
        if not asked.rid or (asked.given_rid and len(asked.rid) < _LEAST_RID_CHARS):
            return
        for worker in {each.url: each for each in (flight.prefill, flight.answers) if each is not None}.values():
            self.spawn(self._tell_abort(worker, asked.rid))

    def spawn(self, work: Coroutine[object, object, object]) -> None:
        """Done besides, and ended by `close`."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tell_abort(self, worker: Worker, rid: str) -> None:
        timeout = aiohttp.ClientTimeout(total=ABORT_S)
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async with self._session.post(
                f"{worker.url}/abort_request", json={"rid": rid}, headers=self._admin_headers, timeout=timeout
            ):
                pass

    def _end(self, leg: asyncio.Task[Usage]) -> None:
        leg.cancel()
        leg.add_done_callback(_forget_result)

    def _finish(self, leg: asyncio.Task[Usage]) -> None:
        """The answer is complete; the prefill engine may have a last word to say."""
        if leg.done():
            _forget_result(leg)
            return
        leg.add_done_callback(_forget_result)

        async def wait() -> None:
            await asyncio.wait({leg}, timeout=LEG_S)
            leg.cancel()

        self.spawn(wait())

    async def _first_of_pair(
        self,
        worker: Worker,
        path: str,
        raw: bytes,
        headers: CIMultiDict[str],
        leg: asyncio.Task[Usage],
        prefilled: Prefilled,
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        opening = asyncio.create_task(self._first(worker, path, raw, headers))
        halves: tuple[asyncio.Task[Any], ...] = (leg, opening)
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            if leg.done() and not opening.done() and leg.exception() is None:
                prefilled(leg.result(), False)
                await asyncio.wait({opening})
            if any(half.done() and half.exception() is not None for half in halves):
                await asyncio.wait(halves, timeout=BLAME_S)
                _blame(leg, opening)
            return await opening
        except BaseException:
            opening.cancel()
            opening.add_done_callback(_close_result)
            raise

    async def _first(
        self, worker: Worker, path: str, raw: bytes, headers: CIMultiDict[str]
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """The response and the first bytes of its body."""
        upstream: aiohttp.ClientResponse | None = None
        try:
            upstream = await self._session.post(worker.url + path, data=raw, headers=headers, allow_redirects=False)
            if upstream.status >= 500:
                body = await upstream.content.read(MAX_ERROR_BYTES)
                raise EngineFailed(worker, f"status {upstream.status}", upstream.status, body)
            first = await upstream.content.readany()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if upstream is not None:
                upstream.close()
            raise _failure(worker, error) from error
        except BaseException:
            if upstream is not None:
                upstream.close()
            raise
        code = error_code(first) if upstream.status == 200 else None
        if code is not None and code >= 500:
            upstream.close()
            raise EngineFailed(worker, f"an error at once, code {code}", code, _plain_error(first))
        return upstream, first

    async def _prefill(self, worker: Worker, path: str, raw: bytes, headers: CIMultiDict[str]) -> Usage:
        """The prefill engine's half: what it says is of use for its counts only. Raises EngineFailed."""
        upstream, piece = await self._first(worker, path, raw, headers)
        try:
            if upstream.status != 200:
                body = piece + await upstream.content.read(MAX_ERROR_BYTES)
                raise EngineFailed(worker, f"status {upstream.status}", upstream.status, body, fault=False)
            ends = Ends()
            while piece:
                ends.add(piece)
                piece = await upstream.content.readany()
            return ends.usage()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _failure(worker, error) from error
        finally:
            upstream.close() if not upstream.content.at_eof() else upstream.release()

    async def _answer(
        self,
        http: web.Request,
        flight: Flight,
        asked: Asked,
        upstream: aiohttp.ClientResponse,
        piece: bytes,
        prefilled: Prefilled,
    ) -> Answered:
        assert flight.answers is not None
        ends = Ends()
        ends.add(piece)
        status = upstream.status
        # A whole answer at once says nothing about when its prompt was done; that of a pair the prefill engine says.
        if status == 200 and asked.stream:
            prefilled(None if flight.pair else ends.usage(), True)
        response = web.StreamResponse(status=status)
        for name in _RETURNED:
            value = upstream.headers.get(name)
            if value is not None:
                response.headers[name] = value
        try:
            await response.prepare(http)
            if piece:
                await response.write(piece)
        except OSError as error:
            raise ClientGone(response) from error
        read = upstream.content.readany
        while piece:
            try:
                piece = await read()
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                if http.transport is not None:
                    http.transport.abort()
                raise AnswerBroken(flight.answers, _describe(error), response) from error
            if piece:
                ends.add(piece)
                try:
                    await response.write(piece)
                except OSError as error:
                    raise ClientGone(response) from error
        upstream.release()
        with contextlib.suppress(OSError):
            await response.write_eof()
        well = status == 200 and b'data: {"error"' not in ends.tail() and error_code(ends.first) is None
        return Answered(response, status, ends.usage() if well else Usage(), well)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """One that notices within half a minute that the other host is gone, whatever it waits for."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_S // 3)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_S // 6)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)
    return made


def _blame(leg: asyncio.Task[Usage], opening: asyncio.Task[tuple[aiohttp.ClientResponse, bytes]]) -> None:
    """One half of a pair has failed, and the other one for that reason, perhaps. Raises the error of the one that broke off:
    one that still answers only tells of it. If both do, it was the prefill engine, without which the other has nothing."""
    if opening.done() and opening.exception() is None:
        return
    errors = [half.exception() for half in (leg, opening) if half.done() and half.exception() is not None]
    broken = [error for error in errors if isinstance(error, EngineFailed) and not error.status]
    error = next(iter(broken or errors))
    assert error is not None
    raise error


def _failure(worker: Worker, error: BaseException) -> EngineFailed:
    return EngineFailed(worker, _describe(error), certain=isinstance(error, aiohttp.ClientConnectorError))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _plain_error(first: bytes) -> bytes:
    """An error that came as the first event of a stream, as the body of a response."""
    text = first.lstrip().removeprefix(b"data:").split(b"\n\n", 1)[0].strip()
    try:
        json.loads(text)
    except ValueError:
        return json.dumps({"error": {"message": text.decode("utf-8", "replace")}}).encode()
    return text


def _forget_result(task: asyncio.Task[Usage]) -> None:
    if not task.cancelled():
        task.exception()


def _close_result(task: asyncio.Task[tuple[aiohttp.ClientResponse, bytes]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[0].close()
