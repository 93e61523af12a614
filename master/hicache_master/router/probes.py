"""Asks engines how they are, one task for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from .proxy import Proxy
from .workers import Facts, Spec, Worker, WorkerError, Workers, read_facts

log = logging.getLogger("hicache_master.router")

PROBE_S = 5.0
DOWN_PROBE_S = 1.0
PROBE_TIMEOUT_S = 10.0
MAX_INFO_BYTES = 4 << 20
_PATHS = ("/server_info", "/get_server_info")


class Prober:
    """`joined`: it answers, for the first time or as another incarnation; `left`: it is no longer among them; `changed`: it got
    well or unwell. For one event loop."""

    def __init__(
        self,
        workers: Workers,
        proxy: Proxy,
        joined: Callable[[Worker], None],
        left: Callable[[Worker], None],
        changed: Callable[[], None],
        interval_s: float = PROBE_S,
    ) -> None:
        self._workers, self._proxy = workers, proxy
        self._joined, self._left, self._changed = joined, left, changed
        self._interval_s = interval_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pokes: dict[str, asyncio.Event] = {}
        self._loop = asyncio.get_running_loop()

    def add(self, spec: Spec) -> Worker:
        """Raises WorkerError."""
        worker = self._workers.add(spec, self._loop.time())
        if spec.name not in self._tasks:
            self._pokes[spec.name] = asyncio.Event()
            self._tasks[spec.name] = asyncio.create_task(self._watch(worker))
        else:
            self.poke(spec.name)
        self._changed()
        return worker

    def poke(self, name: str) -> None:
        """Something is wrong with it, as a request has seen: ask it now."""
        event = self._pokes.get(name)
        if event is not None:
            event.set()

    def sweep(self) -> None:
        """Take away those that are gone. Cheap; called often."""
        for worker in self._workers.gone(self._loop.time()):
            log.info("worker %s is gone", worker.name)
            self._tasks.pop(worker.name).cancel()
            self._pokes.pop(worker.name)
            self._left(worker)
            self._changed()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        poke = self._pokes[worker.name]
        while True:
            poke.clear()
            was, problem = worker.well, worker.problem
            try:
                await self._probe(worker)
            except Exception:  # whatever an engine answers, it is asked again
                log.exception("probe of %s", worker.name)
            if worker.well != was:
                self._changed()
            if worker.problem and worker.problem != problem:
                log.warning("worker %s gets no requests: %s", worker.name, worker.problem)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s if worker.well else min(DOWN_PROBE_S, self._interval_s)):
                    await poke.wait()
            self.sweep()

    async def _probe(self, worker: Worker) -> None:
        try:
            facts = await self._ask(worker)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, WorkerError) as error:
            certain = isinstance(error, aiohttp.ClientConnectorError)
            problem = str(error) or f"no answer within {PROBE_TIMEOUT_S:g} s"
            if self._workers.missed(worker.name, problem, self._loop.time(), certain):
                self._changed()
            return
        if self._workers.answered(worker.name, facts, self._loop.time()):
            log.info("worker %s is up: role=%s model=%s page_size=%d", worker.name, facts.role, facts.model, facts.page_size)
            self._joined(worker)

    async def _ask(self, worker: Worker) -> Facts:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        for path in _PATHS:
            async with self._proxy.session.get(
                worker.url + path, headers=self._proxy.admin_headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status == 404:
                    continue
                if response.status != 200:
                    raise WorkerError(f"{path} answers with status {response.status}")
                if (response.content_length or 0) > MAX_INFO_BYTES:
                    raise WorkerError(f"{path} answers with {response.content_length} bytes")
                info = msgspec.json.decode(await response.read())
                if not isinstance(info, dict):
                    raise WorkerError(f"{path} answers with no object")
                return read_facts(info)
        raise WorkerError(f"it has none of {', '.join(_PATHS)}: is it SGLang?")
