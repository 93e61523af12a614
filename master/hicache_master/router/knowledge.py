"""What a router knows of prompts and caches: set up when engines say what is needed for it, and kept while they are there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hicache_master.conductor.prefixes import Prefixes
from hicache_mooncake.security import ClusterKey

from .kv_events import EventSource, KvEvents
from .pool import PoolView
from .prompts import Prompts
from .workers import Facts, Worker

log = logging.getLogger("hicache_master.router")

AUTO = "auto"
OFF = "off"


class Knowledge:
    """`tokenizer`: a folder; `auto` for the engines' own, where it can be seen from here; `off`. `masters`: of the pool, none
    for no pool. `ready` is called once, when prompts can be read. For one event loop."""

    def __init__(
        self,
        prefixes: Prefixes,
        tokenizer: str,
        masters: Sequence[str],
        key: ClusterKey | None,
        ready: Callable[[Prompts, PoolView | None], None],
    ) -> None:
        self._prefixes, self._tokenizer, self._ready = prefixes, tokenizer, ready
        self._masters, self._key = masters, key
        self.pool: PoolView | None = None
        self._events: dict[str, KvEvents] = {}
        self._workers: dict[str, Worker] = {}
        self._reading: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.prompts: Prompts | None = None

    def joined(self, worker: Worker) -> None:
        """It answers, for the first time or in another incarnation."""
        self.left(worker)
        if worker.facts is None:
            return
        self._workers[worker.name] = worker
        if self._reading is None and self._tokenizer != OFF:
            self._reading = asyncio.create_task(self._read_prompts(worker.facts))
        if self.prompts is not None:
            self._follow(worker, worker.facts)

    def left(self, worker: Worker) -> None:
        self._workers.pop(worker.name, None)
        events = self._events.pop(worker.name, None)
        if events is not None:
            task = asyncio.create_task(events.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def follows(self, name: str) -> bool:
        """What this engine has is known from itself."""
        events = self._events.get(name)
        return events is not None and events.connected and not events.problem

    def counts(self) -> dict[str, float]:
        """For metrics."""
        found: dict[str, float] = {"events_followed": sum(map(self.follows, self._events))}
        for events in self._events.values():
            for name, count in events.counts.items():
                found[f"events_{name}"] = found.get(f"events_{name}", 0) + count
        if self.pool is not None:
            found |= {f"pool_{name}": float(count) for name, count in self.pool.counts.items()}
        return found

    def problems(self) -> list[str]:
        """What the router does without although it should not have to, and what to do."""
        found = [events.problem for events in self._events.values()]
        found.append(self.pool.problem if self.pool is not None else "")
        return [problem for problem in found if problem]

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self.pool is not None:
            await self.pool.close()
        events, self._events = list(self._events.values()), {}
        await asyncio.gather(*(each.close() for each in events), *self._closing, return_exceptions=True)
        if self.prompts is not None:
            self.prompts.close()

    async def _read_prompts(self, facts: Facts) -> None:
        """Takes seconds: libraries are loaded. Requests go by their texts until then."""
        path = facts.tokenizer if self._tokenizer == AUTO else self._tokenizer
        if self._tokenizer == AUTO and not Path(path).is_dir():
            log.info("prompts are not tokenised: the engines' tokenizer %s is not here; give --tokenizer", path)
            return
        try:
            self.prompts = await asyncio.to_thread(
                Prompts,
                path,
                facts.page_size,
                bigrams=facts.bigrams,
                dynamo=facts.dynamo,
                adapters=facts.adapters,
                served_model_name=facts.model,
                chat_template=_template(facts.chat_template),
                template_defaults=facts.template_defaults,
            )
        except Exception as error:  # libraries raise what they like about a folder
            log.warning("prompts are not tokenised: %s: %s", path, error)
            return
        log.info("prompts are tokenised with %s, in pages of %d tokens", path, facts.page_size)
        if self._masters:
            self.pool = PoolView(self._masters, key=self._key, model=facts.model, bigrams=facts.bigrams)
            await self.pool.start()
        self._ready(self.prompts, self.pool)
        for worker in list(self._workers.values()):
            if worker.facts is not None:
                self._follow(worker, worker.facts)

    def _follow(self, worker: Worker, facts: Facts) -> None:
        source = self._source(worker)
        if source is not None and worker.role != "decode":
            self._events[worker.name] = KvEvents(self._prefixes, worker.name, facts.incarnation, source, facts.page_size)
            self._events[worker.name].start()

    @staticmethod
    def _source(worker: Worker) -> EventSource | None:
        facts = worker.facts
        if worker.spec.kv_events:
            return EventSource(worker.spec.kv_events)
        if facts is None or not facts.kv_events:
            return None
        info: Mapping[str, object] = {"kv_events": dict(facts.kv_events)}
        host = f"[{worker.spec.host}]" if ":" in worker.spec.host else worker.spec.host
        return EventSource.of_server(host, info)


def _template(path: str) -> str:
    """The source of the template that an engine was started with; "" for the model's own. Raises OSError."""
    return Path(path).read_text(encoding="utf-8") if path.endswith(".jinja") else ""
