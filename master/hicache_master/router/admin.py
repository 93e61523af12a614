"""The rest of a router's HTTP: health, metrics, workers, decisions, and what is passed to engines as it is."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
from aiohttp import web

from .bodies import PATHS, BadRequest, read_wishes
from .probes import Prober
from .proxy import forwarded
from .serving import Refused, Serving
from .workers import WorkerError, make_spec

ADMIN_BYTES = 1 << 20
ASK_S = 30.0
_PASSED = ("/v1/models", "/get_model_info", "/model_info", "/get_server_info", "/server_info")
_ROLES = {"regular": "plain"}
"""As SGLang's own router calls them."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """`token`: who has it may change what engines there are; without one everybody may, which is for routers that only this
    host can reach: `open_` says whether that is so."""

    def __init__(self, serving: Serving, prober: Prober, token: str, open_: bool, problems: Callable[[], list[str]]) -> None:
        self._problems = problems
        self._serving, self._prober = serving, prober
        self._token, self._open = token, open_
        self._workers = serving.routing.workers

    def routes(self, app: web.Application) -> None:
        router = app.router
        for path in ("/health", "/health_generate", "/readiness"):
            router.add_get(path, self._health)
        router.add_get("/liveness", _alive)
        router.add_get("/metrics", self._metrics)
        for path in _PASSED:
            router.add_get(path, self._pass)
        router.add_post("/abort_request", self._abort)
        router.add_get("/workers", self._guarded(self._list))
        router.add_post("/workers", self._guarded(self._register))
        router.add_delete("/workers/{name:.+}", self._guarded(self._remove))
        router.add_post("/workers/{name:.+}/drain", self._guarded(self._drain))
        router.add_get("/decisions", self._guarded(self._decisions))
        router.add_post("/explain", self._guarded(self._explain))
        router.add_route("*", "/flush_cache", self._guarded(self._flush))

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(http: web.Request) -> web.StreamResponse:
            given = http.headers.get("Authorization", "").removeprefix("Bearer ")
            if self._token and not hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode()):
                return Refused(401, "admin", "this needs the router's admin token, as Authorization: Bearer TOKEN").response()
            if not self._token and not self._open:
                message = "other hosts can reach this router, so this needs an admin token: start it with --admin-token-file"
                return Refused(403, "admin", message).response()
            return await handler(http)

        return guarded

    async def _health(self, http: web.Request) -> web.Response:
        workers = self._workers
        ready = workers.ready(asyncio.get_running_loop().time())
        states: dict[str, int] = {}
        for worker in workers:
            states[worker.state] = states.get(worker.state, 0) + 1
        gate = self._serving.gate
        reads = self._serving.prompts is not None
        answer = {"ready": ready, "workers": states, "in_flight": gate.inside, "waiting": gate.queued, "reads_prompts": reads}
        answer["problems"] = [*self._problems(), *self._serving.routing.agreement.problems().values()]
        return web.json_response(answer, status=200 if ready else 503)

    async def _metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self._serving.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _pass(self, http: web.Request) -> web.Response:
        """From the first engine that answers requests."""
        now = asyncio.get_running_loop().time()
        avoid = self._workers.avoid(now)
        workers = sorted((each for each in self._workers if each.name not in avoid), key=lambda each: each.role == "prefill")
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        for worker in workers:
            try:
                async with self._serving.proxy.session.get(
                    worker.url + http.path, headers=forwarded(http.headers), timeout=timeout, allow_redirects=False
                ) as answer:
                    kind = answer.headers.get("Content-Type", "application/json")
                    return web.Response(status=answer.status, body=await answer.read(), headers={"Content-Type": kind})
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
        return Refused(503, "no engine", "no engine answers now", 1.0).response()

    async def _abort(self, http: web.Request) -> web.Response:
        try:
            body = await _object(http)
        except BadRequest as error:
            return Refused(400, "bad request", str(error)).response()
        rid = body.get("rid")
        if not isinstance(rid, str) or not rid:
            message = "name one request by its rid: through a router not all can be aborted, since they are others' as well"
            return Refused(400, "bad request", message).response()
        course = self._serving.flights.get(rid)
        if course is None:
            return web.json_response({"aborted": False})
        self._serving.proxy.abort(course.flight, course.asked)
        return web.json_response({"aborted": True})

    async def _list(self, http: web.Request) -> web.Response:
        return web.json_response({"workers": [worker.describe() for worker in self._workers]})

    async def _register(self, http: web.Request) -> web.Response:
        try:
            body = await _object(http)
            kind = body.pop("worker_type", None)
            if kind is not None:
                body.setdefault("role", _ROLES.get(str(kind), kind))
            worker = self._prober.add(make_spec(body))
        except (BadRequest, WorkerError) as error:
            return Refused(400, "bad request", str(error)).response()
        return web.json_response(worker.describe(), status=202)

    async def _remove(self, http: web.Request) -> web.Response:
        return self._leave(http, remove=True)

    async def _drain(self, http: web.Request) -> web.Response:
        return self._leave(http, remove=False)

    def _leave(self, http: web.Request, remove: bool) -> web.Response:
        name = http.match_info["name"]
        named = next((each.name for each in self._workers if name in (each.name, each.url)), name)
        worker = self._workers.drain(named, remove=remove)
        if worker is None:
            return Refused(404, "no worker", f"there is no worker {name!r}").response()
        described = worker.describe()
        self._serving.resize()
        self._prober.sweep()
        return web.json_response(described)

    async def _decisions(self, http: web.Request) -> web.Response:
        return web.json_response({"decisions": self._serving.decisions.latest()}, dumps=_dumps)

    async def _explain(self, http: web.Request) -> web.Response:
        try:
            asked = await _object(http)
            path, body = asked.get("path", "/generate"), asked.get("body")
            if path not in PATHS or not isinstance(body, dict):
                raise BadRequest(f"give a path, which is one of {', '.join(PATHS)}, and a body")
            return web.json_response(await self._serving.look(str(path), body, read_wishes(http.headers)), dumps=_dumps)
        except BadRequest as error:
            return Refused(400, "bad request", str(error)).response()

    async def _flush(self, http: web.Request) -> web.Response:
        """The caches of all engines."""
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        proxy = self._serving.proxy

        async def flush(url: str) -> int:
            try:
                async with proxy.session.post(f"{url}/flush_cache", headers=proxy.admin_headers, timeout=timeout) as answer:
                    return answer.status
            except (aiohttp.ClientError, OSError, TimeoutError):
                return 0

        workers = list(self._workers)
        statuses = await asyncio.gather(*(flush(worker.url) for worker in workers))
        answer = {worker.name: status for worker, status in zip(workers, statuses, strict=True)}
        return web.json_response(answer, status=200 if all(status == 200 for status in statuses) else 502)


async def _alive(http: web.Request) -> web.Response:
    return web.json_response({"alive": True})


async def _object(http: web.Request) -> dict[str, object]:
    if (http.content_length or 0) > ADMIN_BYTES and http.path != "/explain":
        raise BadRequest(f"the body has more than {ADMIN_BYTES} bytes")
    try:
        body = msgspec.json.decode(await http.read())
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _dumps(value: object) -> str:
    return json.dumps(value, default=str)
