"""Routers and engines without a model, in one event loop, for tests of the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
from hicache_master.router.app import Options, Router
from hicache_master.router.workers import Role, Spec, parse_spec

from hicache_mooncake.testing.fake_engine import FakeEngine, FakeEngineSettings
from tests.conftest import START_S

TEXT = "the quick brown fox jumps over the lazy dog. " * 20
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 6}}),
    ("/v1/completions", {"model": "fake", "prompt": TEXT, "max_tokens": 6}),
    ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6}),
]
OPTIONS = Options(listen="127.0.0.1:0", decisions_every=1, tokenizer="off", probe_s=0.5)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(START_S):
        while not condition():
            await asyncio.sleep(0.01)


def spec(engine: FakeEngine, role: Role = "plain") -> Spec:
    return parse_spec(engine.url, role)


class Client:
    def __init__(self, router: Router, session: aiohttp.ClientSession) -> None:
        self.router, self.session = router, session

    def post(self, path: str, body: Any, **headers: str) -> Any:
        return self.session.post(f"http://{self.router.address}{path}", json=body, headers=headers)

    async def ask(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.post(path, body, **headers) as response:
            return response.status, json.loads(await response.text())

    async def get(self, path: str) -> Any:
        async with self.session.get(f"http://{self.router.address}{path}") as response:
            return json.loads(await response.text())

    async def metric(self, name: str) -> float:
        async with self.session.get(f"http://{self.router.address}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextlib.asynccontextmanager
async def routed(options: Options, engines: int | None = None) -> AsyncIterator[Client]:
    """A router whose engines are all up, and whose books are right at the end."""
    wanted = len(options.workers) if engines is None else engines
    async with Router(options) as router, aiohttp.ClientSession() as session:
        await until(lambda: sum(worker.state == "up" for worker in router.workers) >= wanted)
        yield Client(router, session)
        await until(lambda: not router.gate.inside and not len(router.conductor))
        router.conductor.validate()
        router.workers.validate()
        router.gate.validate()
        router.routing.accounts.validate()
        assert all(worker.in_flight == 0 for worker in router.workers)


@contextlib.asynccontextmanager
async def engines(*settings: FakeEngineSettings) -> AsyncIterator[list[FakeEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine(each)) for each in settings]


def plain(count: int = 2, **more: Any) -> Sequence[FakeEngineSettings]:
    return [FakeEngineSettings(**more)] * count


PAIR = (FakeEngineSettings(mode="prefill"), FakeEngineSettings(mode="decode"))


def with_engines(found: Sequence[FakeEngine], options: Options = OPTIONS) -> Options:
    roles: dict[str, Role] = {"null": "plain", "prefill": "prefill", "decode": "decode"}
    return replace(options, workers=[spec(engine, roles[engine.settings.mode]) for engine in found])


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]
