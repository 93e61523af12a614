"""An engine without a model that speaks SGLang's HTTP: for tests of what stands before engines, and for benchmarks of it.

Prompts are cached by pages as SGLang names them, so hits are real; a prefill takes `prefill_s + prefill_token_s * new tokens`,
one after the other; answers follow from the prompt alone. A prefill and a decode engine meet by `bootstrap_room` over TCP.
`GET /stats` says what it saw, `POST /faults` makes it misbehave (`Fault`), `DELETE /faults` ends that.

    async with FakeEngine(FakeEngineSettings()) as engine: ...  # in the running loop
    python -m hicache_mooncake.testing.fake_engine --port 30000 --mode prefill
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web

from hicache_mooncake.testing.fake_answers import FORMS, LETTERS, BadRequest, Form, Job, answer_of, bytes_as_tokens, chat_text
from hicache_mooncake.testing.fake_engine_settings import FakeEngineSettings, FakeStats, Fault, model_info, server_info
from hicache_mooncake.testing.fake_pages import EventPublisher, PageCache, pages_of
from hicache_mooncake.testing.fake_tokenizer import FolderTokenizer

__all__ = ["FakeEngine", "FakeEngineSettings", "FakeStats", "Fault"]

MEET_S = 300.0
"""How long one half of a disaggregated request waits for the other, as SGLang does."""
ROOMS = 65_536


@dataclass
class _Running:
    job: Job
    task: asyncio.Task[Any]
    stream: web.StreamResponse | None = None


class _HalfFailed(Exception):
    """The other half of a disaggregated request failed, or did not come."""


@dataclass
class _Room:
    """Where two halves meet, on the side of the prefill engine."""

    computed: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Cached tokens, as soon as the prefill is done; cancelled when it fails."""
    taken: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the decode engine has them; cancelled when it has gone."""


class FakeEngine:
    """One engine in the running event loop. It may be stopped and started again: at the same ports, with nothing cached."""

    def __init__(self, settings: FakeEngineSettings) -> None:
        self.settings = settings
        self.stats = FakeStats()
        self.faults: list[Fault] = []
        self.cache = PageCache(settings.cache_pages)
        self.port = settings.port
        self.bootstrap_port = settings.bootstrap_port
        self.events: EventPublisher | None = None
        self.last_body: dict[str, Any] = {}
        self.last_headers: dict[str, str] = {}
        self._event_ports = (0, 0)
        self._started = 0.0
        self._queue = asyncio.Lock()
        self._jobs: dict[str, _Running] = {}
        self._rooms: dict[int, _Room] = {}
        self._runner: web.AppRunner | None = None
        self._bootstrap: asyncio.Server | None = None
        self._tokenizer: FolderTokenizer | None = None

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        settings = self.settings
        self.stats, self.cache, self._started = FakeStats(), PageCache(settings.cache_pages), time.time()
        self._queue, self._jobs, self._rooms = asyncio.Lock(), {}, {}
        if settings.tokenizer:
            self._tokenizer = FolderTokenizer(Path(settings.tokenizer))
        if settings.kv_events:
            port, replay_port = self._event_ports
            self.events = EventPublisher(settings.host, port=port, replay_port=replay_port)
            self._event_ports = (self.events.port, self.events.replay_port)
        if settings.mode == "prefill":
            self._bootstrap = await asyncio.start_server(self._meet, settings.host, self.bootstrap_port)
            self.bootstrap_port = self._bootstrap.sockets[0].getsockname()[1]
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, self.port, reuse_address=True, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """As a crash: connections end where they are."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._bootstrap is not None:
            self._bootstrap.close()
        if self.events is not None:
            await self.events.close()
        self._runner = self._bootstrap = self.events = None

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        for form in FORMS:
            app.router.add_post(form.path, self._handler(form))
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        for path in ("/get_server_info", "/server_info"):
            app.router.add_get(path, self._server_info)
        for path in ("/get_model_info", "/model_info"):
            app.router.add_get(path, self._model_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_route("*", "/flush_cache", self._flush)
        app.router.add_get("/stats", self._stats)
        app.router.add_post("/faults", self._add_fault)
        app.router.add_delete("/faults", self._end_faults)
        return app

    # What it says of itself

    async def _health(self, request: web.Request) -> web.Response:
        if fault := self._fault(health=True):
            await self._misbehave(fault, request)
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        info = server_info(self.settings, self.port, self.bootstrap_port, self._event_ports if self.events else None)
        return _json(info | {"startup_time": self._started})

    async def _model_info(self, request: web.Request) -> web.Response:
        return _json(model_info(self.settings))

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.settings.model, "object": "model", "created": int(self._started), "owned_by": "sglang"}
        card |= {"root": self.settings.model, "parent": None, "max_model_len": self.settings.context_tokens}
        return _json({"object": "list", "data": [card]})

    async def _stats(self, request: web.Request) -> web.Response:
        return _json(dataclasses.asdict(self.stats) | {"cached_pages": len(self.cache)})

    # What may be done to it

    async def _abort(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        rid = str(body.get("rid") or "")
        known = body.get("abort_all") or rid in self._jobs
        for name, running in list(self._jobs.items()):
            if known and (body.get("abort_all") or name.startswith(rid)):  # SGLang too takes them by their beginnings
                running.job.finish = "abort"
                running.task.cancel()
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        if self._jobs:
            return web.Response(status=400, text="Flush cache failed.\n")
        self.cache.clear()
        if self.events is not None:
            await self.events.cleared()
        return web.Response(text="Cache flushed.\n")

    async def _add_fault(self, request: web.Request) -> web.Response:
        self.faults.append(Fault(**msgspec.json.decode(await request.read())))
        return web.Response()

    async def _end_faults(self, request: web.Request) -> web.Response:
        self.faults.clear()
        return web.Response()

    def _fault(self, *, health: bool = False) -> Fault | None:
        for fault in self.faults:
            if fault.health == health and fault.times:
                fault.times -= 1
                return fault
        return None

    async def _misbehave(self, fault: Fault, request: web.Request) -> None:
        """Before anything was answered."""
        if fault.kind == "refuse":
            _hang_up(request)
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "error":
            raise web.HTTPInternalServerError(text="a fault was asked for")
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)

    # Requests

    def _handler(self, form: Form) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._serve(form, request)

        return handle

    async def _serve(self, form: Form, request: web.Request) -> web.StreamResponse:
        stats, raw = self.stats, await request.read()
        stats.requests += 1
        stats.running += 1
        stats.max_running = max(stats.max_running, stats.running)
        job: Job | None = None
        try:
            try:
                self.last_body, self.last_headers = msgspec.json.decode(raw), dict(request.headers)
                job = self._job(form, self.last_body)
            except (BadRequest, ValueError, TypeError, AttributeError) as error:
                stats.failures += 1
                return _json(form.error(str(error), 400), status=400)
            fault = self._fault()
            if fault is not None:
                await self._misbehave(fault, request)
            response = await self._answer(form, request, job, self.last_body, fault)
            stats.finished += 1
            return response
        except asyncio.CancelledError:
            if job is None or job.finish != "abort":
                stats.disconnects += 1
                raise
            _current().uncancel()
            stats.aborts += 1
            return await self._aborted(form, job)
        except _HalfFailed as error:
            stats.failures += 1
            return _json(form.error(str(error), 500), status=500)
        except ConnectionError:
            stats.disconnects += 1
            raise
        except web.HTTPException:
            stats.failures += 1
            raise
        finally:
            stats.running -= 1
            if job is not None:
                self._jobs.pop(job.rid, None)

    def _job(self, form: Form, body: dict[str, Any]) -> Job:
        tokens = form.prompt(body, self._tokenize, self._chat_tokens)
        if len(tokens) >= self.settings.context_tokens:
            raise BadRequest(f"The input ({len(tokens)} tokens) is longer than the model's context length.")
        wanted = 1 if self.settings.mode == "prefill" else max(1, form.wanted(body))
        rid = str(body.get("rid") or uuid.uuid4().hex)
        if rid in self._jobs:
            raise BadRequest(f"Duplicate request ID detected: {rid}")
        model = str(body.get("model") or self.settings.model)
        job = Job(rid, model, tokens, wanted, form.wants_usage(body), self.settings.cache_report)
        job.answer = answer_of(tokens, wanted, LETTERS if self._tokenizer is None else self._tokenizer.words)
        self._jobs[rid] = _Running(job, _current())
        return job

    def _tokenize(self, text: str) -> Sequence[int]:
        return bytes_as_tokens(text) if self._tokenizer is None else self._tokenizer.text(text)

    def _chat_tokens(self, messages: Sequence[Any]) -> Sequence[int]:
        return bytes_as_tokens(chat_text(messages)) if self._tokenizer is None else self._tokenizer.chat(messages)

    async def _answer(
        self, form: Form, request: web.Request, job: Job, body: dict[str, Any], fault: Fault | None
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        events = 0
        dies = fault.chunks if fault is not None and fault.kind == "die" else -1
        if dies == 0:
            _hang_up(request)
        async for start in self._compute(job, body):
            if not body.get("stream"):
                continue
            if response is None:
                response = self._jobs[job.rid].stream = await _stream(request)
                await response.write(form.begin(job) + form.piece(job, start))
            else:
                await response.write(form.piece(job, start))
            events += 1
            if events == dies:
                _hang_up(request)
        if response is None:
            if dies >= 0:
                _hang_up(request)
            return _json(form.whole(job))
        await response.write(form.end(job))
        await response.write_eof()
        return response

    async def _aborted(self, form: Form, job: Job) -> web.StreamResponse:
        response = self._jobs[job.rid].stream
        if response is None:
            return _json(form.whole(job))
        await response.write(form.end(job))
        await response.write_eof()
        return response

    async def _compute(self, job: Job, body: dict[str, Any]) -> AsyncIterator[int]:
        """The answer, as the numbers of tokens that were there before each of its steps."""
        if self.settings.mode == "decode":
            job.cached = await self._fetch(body)
        elif self.settings.mode == "prefill" and isinstance(body.get("bootstrap_room"), int):
            await self._prefill_half(job, body, body["bootstrap_room"])
        else:
            await self._prefill(job, body)
        while job.done < job.wanted:
            start, job.done = job.done, min(job.done + self.settings.tokens_a_chunk, job.wanted)
            if start or self.settings.mode == "decode":
                await asyncio.sleep(self.settings.decode_token_s * (job.done - start))
            yield start
        if self.settings.mode != "prefill":
            await self._keep([*job.tokens, *job.ids()[:-1]], body)

    async def _prefill(self, job: Job, body: dict[str, Any]) -> None:
        stats, settings = self.stats, self.settings
        stats.waiting += 1
        stats.max_waiting = max(stats.max_waiting, stats.waiting)
        try:
            async with self._queue:
                began = time.monotonic()
                count = (len(job.tokens) - 1) // settings.page_size  # the last token is always computed
                job.cached = self.cache.match(self._pages(job.tokens, body)[:count]) * settings.page_size
                seconds = settings.prefill_s + settings.prefill_token_s * (len(job.tokens) - job.cached)
                if seconds:
                    await asyncio.sleep(seconds)
                await self._keep(job.tokens, body)
                stats.busy_s += time.monotonic() - began
        finally:
            stats.waiting -= 1
        stats.prompt_tokens += len(job.tokens)
        stats.cached_tokens += job.cached
        stats.computed_tokens += len(job.tokens) - job.cached

    def _pages(self, tokens: Sequence[int], body: dict[str, Any]) -> list[Any]:
        return pages_of(
            tokens, self.settings.page_size, extra_key=body.get("extra_key") or None, cache_salt=body.get("cache_salt") or None
        )

    async def _keep(self, tokens: Sequence[int], body: dict[str, Any]) -> None:
        stored, removed = self.cache.insert(self._pages(tokens, body))
        if self.events is not None:
            await self.events.changed(stored, removed)

    # Disaggregation

    def _room(self, number: int) -> _Room:
        if number not in self._rooms and len(self._rooms) >= ROOMS:
            raise _HalfFailed(f"{ROOMS} requests wait for their other halves")
        return self._rooms.setdefault(number, _Room())

    async def _prefill_half(self, job: Job, body: dict[str, Any], number: int) -> None:
        room = self._room(number)
        try:
            await self._prefill(job, body)
            room.computed.set_result(job.cached)
            if not (await asyncio.wait({room.taken}, timeout=MEET_S))[0] or room.taken.cancelled():
                raise _HalfFailed(f"Prefill transfer failed for request rank=0 room={number}: no decode engine took it")
        finally:
            room.computed.cancel()
            self._rooms.pop(number, None)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A decode engine asks for a room: it is answered when the prefill is done, and hung up on when that fails."""
        with contextlib.suppress(OSError, ValueError, _HalfFailed):
            number = int(await reader.readline())
            room = self._room(number)
            gone = asyncio.ensure_future(reader.read())
            waiting: set[asyncio.Future[Any]] = {room.computed, gone}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if room.computed.done() and not room.computed.cancelled():
                writer.write(b"%d\n" % room.computed.result())
                room.taken.set_result(None)
            else:
                room.taken.cancel()
                self._rooms.pop(number, None)
        writer.close()

    async def _fetch(self, body: dict[str, Any]) -> int:
        """Wait for the prefill engine's half. Returns its cached tokens."""
        host, port, room = body.get("bootstrap_host"), body.get("bootstrap_port"), body.get("bootstrap_room")
        if not isinstance(room, int):
            raise _HalfFailed("Disaggregated request received without bootstrap room id.")
        try:
            async with asyncio.timeout(MEET_S):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(b"%d\n" % room)
                    line = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            raise _HalfFailed(f"Decode transfer failed for request rank=0 room={room}: {error!r}") from error
        if not line:
            raise _HalfFailed(f"Decode transfer failed for request rank=0 room={room}: the prefill engine gave it up")
        return int(line)


def _current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _hang_up(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
    raise web.HTTPInternalServerError(text="nobody reads this")


async def _stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


def _json(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


async def _run(settings: FakeEngineSettings, port_file: str) -> None:
    async with FakeEngine(settings) as engine:
        if port_file:
            Path(port_file).write_text(f"{engine.port} {engine.bootstrap_port}\n")
        print(engine.url, engine.bootstrap_port, flush=True)
        await asyncio.Event().wait()


def main(args: Sequence[str] | None = None) -> int:
    """Run one engine until the process is ended. Every setting is an option of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in dataclasses.fields(FakeEngineSettings):
        option = "--" + each.name.replace("_", "-")
        if isinstance(each.default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=each.default)
        else:
            parser.add_argument(option, type=type(each.default), default=each.default)
    parser.add_argument("--port-file", default="", help="where its port and its bootstrap port are written when it listens")
    given = vars(parser.parse_args(args))
    port_file = given.pop("port_file")
    logging.basicConfig(level=logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(FakeEngineSettings(**given), port_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
