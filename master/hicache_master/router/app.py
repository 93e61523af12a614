"""A router: its parts put together, and its process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from aiohttp import web

from hicache_master.conductor.admission import Admission, Mode
from hicache_master.conductor.cost import Costs, DecodeCost, Links, PrefillCost
from hicache_master.conductor.decide import Conductor
from hicache_master.conductor.policies import POLICIES
from hicache_master.conductor.prefixes import Prefixes
from hicache_mooncake.config_values import join_address, split_address
from hicache_mooncake.security import ClusterKey

from .admin import Admin
from .bodies import PATHS, rough_page_tokens
from .decisions import Decisions
from .fairness import Gate
from .knowledge import AUTO, OFF, Knowledge
from .metrics import Metrics
from .pool import PoolView
from .probes import PROBE_S, Prober
from .prompts import Prompts
from .proxy import Proxy
from .routing import Routing
from .serving import Limits, Serving
from .workers import Spec, Worker, Workers

log = logging.getLogger("hicache_master.router")

ATTENTION_TOKENS = 45_000
"""Length of a prompt at which attention costs as much as everything else, for the prior: that of LLaMA3-70B."""
FIXED_S = 0.01
"""Of a prefill, for the prior."""
CONFIDENCE = 0.95
"""Part of the predicted times that should not turn out too low: of those at the limit, the others are late."""
TICK_S = 1.0
BACKLOG = 4096
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """Times are in seconds. `prefill_tokens_s`, `decode_step_s` and `decode_request_s` are what costs start from; they are
    learned. `model` and `page_size`: "" and 0 for those of the first engine that answers."""

    listen: str = "127.0.0.1:30080"
    workers: Sequence[Spec] = ()
    policy: str = "pool-aware"
    admission: Mode = "predictive"
    ttft_slo_s: float = math.inf
    tbt_slo_s: float = math.inf
    prefill_tokens_s: float = 10_000.0
    decode_step_s: float = 0.01
    decode_request_s: float = 0.0002
    token_bytes: int = 160 << 10
    bandwidth: float = 10e9
    local_bandwidth: float = 10e9
    cold_bandwidth: float = 2e9
    threshold: float = 1.3
    max_running: int = 0
    waiting: int = 1024
    limits: Limits = field(default_factory=Limits)
    probe_s: float = PROBE_S
    stall_s: float = 600.0
    forget_s: float = 600.0
    drain_s: float = 30.0
    decisions_every: int = 100
    decisions_file: Path | None = None
    admin_token: str = ""
    engine_key: str = ""
    model: str = ""
    page_size: int = 0
    tokenizer: str = AUTO
    masters: Sequence[str] = ()
    master_key: ClusterKey | None = None
    max_keys: int = 2_000_000

    def costs(self) -> Costs:
        second = 1 / self.prefill_tokens_s
        costs = Costs(
            PrefillCost((FIXED_S, second, second / ATTENTION_TOKENS)),
            DecodeCost((self.decode_step_s, self.decode_request_s, 1e-9)),
            Links(self.bandwidth, cold_bytes_per_s=self.cold_bandwidth),
            1,
            1,
            fetch_while_queued=True,
            threshold=self.threshold,
        )
        self.size_pages(costs, rough_page_tokens(self.page_size))
        return costs

    def size_pages(self, costs: Costs, page_tokens: int) -> None:
        """Pages in L2 cost nothing: SGLang loads them behind the computation of the layers before."""
        costs.page_tokens, costs.page_bytes = page_tokens, page_tokens * self.token_bytes
        costs.dram_page_s = costs.page_bytes / self.local_bandwidth
        costs.cold_page_s = costs.page_bytes / self.cold_bandwidth


class Router:
    """`async with Router(options) as router`: it listens at `router.address`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._costs = options.costs()
        admission = Admission(options.admission, options.ttft_slo_s, options.tbt_slo_s, confidence=CONFIDENCE)
        prefixes = Prefixes(options.max_keys)
        self.conductor = Conductor(POLICIES[options.policy](), self._costs, prefixes, admission)
        self.workers = Workers(options.forget_s, options.model, options.page_size, options.max_running)
        self.routing = Routing(self.conductor, self.workers)
        self.gate = Gate(options.waiting)
        self.address = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    async def start(self) -> None:
        """Raises OSError when the address cannot be had, and ValueError for one that is none."""
        options = self.options
        host, port = split_address(options.listen)
        self._decisions = Decisions(options.decisions_every, options.decisions_file)
        headers = {"Authorization": f"Bearer {options.engine_key}"} if options.engine_key else {}
        self.proxy = Proxy(options.stall_s, headers)
        self.prober = Prober(self.workers, self.proxy, self._joined, self._left, self._changed, options.probe_s)
        self.metrics = Metrics(self.workers, self.gate, self.routing.accounts, lambda: options.token_bytes, self._knowledge)
        self.serving = Serving(
            self.routing,
            self.gate,
            self.proxy,
            self.prober,
            self.metrics,
            self._decisions,
            options.limits,
        )
        self.knowledge = Knowledge(self.conductor.prefixes, options.tokenizer, options.masters, options.master_key, self._reads)
        self.routing.follows = self.knowledge.follows
        app = web.Application(client_max_size=options.limits.body_bytes)
        for path in PATHS:
            app.router.add_post(path, self.serving.handle)
        open_ = _only_this_host(host)
        Admin(self.serving, self.prober, options.admin_token, open_, self.knowledge.problems).routes(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, backlog=BACKLOG)
        try:
            await self._site.start()
        except OSError:
            await self.stop(0.0)
            raise
        self.address = join_address(host, int(self._runner.addresses[0][1]))
        for spec in options.workers:
            self.prober.add(spec)
        self._ticker = asyncio.create_task(self._tick())

    async def stop(self, drain_s: float) -> None:
        """Takes nothing new; what runs has `drain_s`."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        if runner.addresses:
            await self._site.stop()
            self._ticker.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    while self.gate.inside:
                        await asyncio.sleep(0.05)
        await runner.cleanup()
        await self.prober.close()
        await self.knowledge.close()
        await self.proxy.close()
        self._decisions.close()

    def _reads(self, prompts: Prompts, pool: PoolView | None) -> None:
        """Prompts can be read from now on; pages are then the engines', not pieces of text."""
        gc.freeze()  # what transformers has made stays: each look through it would be a pause of half a second
        self.serving.prompts, self.serving.pool = prompts, pool
        self._size_pages()

    def notices(self) -> list[str]:
        """What an operator should know of what this router does without."""
        notices = []
        if not self.options.workers:
            notices.append("no engines yet: give --worker, or --prefill and --decode, or register them with POST /workers")
        if self.options.tokenizer == OFF:
            notices.append("prompts are not tokenised: requests go by load, and by the text of those that went before")
        if not self.options.masters:
            notices.append("no masters are asked: what the pool holds plays no part; give --master")
        elif self.options.tokenizer == OFF:
            notices.append("what the pool holds plays no part, since prompts are not tokenised")
        return notices

    def _joined(self, worker: Worker) -> None:
        self._size_pages()
        self.routing.joined(worker, asyncio.get_running_loop().time())
        self.knowledge.joined(worker)

    def _left(self, worker: Worker) -> None:
        self.routing.left(worker, asyncio.get_running_loop().time())
        self.knowledge.left(worker)

    def _changed(self) -> None:
        self.serving.resize()

    def _size_pages(self) -> None:
        page_size = self.workers.page_size
        if page_size:
            page_tokens = page_size if self.serving.prompts is not None else rough_page_tokens(page_size)
            self.options.size_pages(self._costs, page_tokens)

    def _knowledge(self) -> dict[str, float]:
        prefixes = self.conductor.prefixes
        return {
            "known_pages": len(prefixes),
            "expected_pages": prefixes.expected_keys,
            "dropped_pages": prefixes.dropped_keys,
            "books": len(self.conductor),
            **{f"agreement_{name}_tokens": float(tokens) for name, tokens in self.routing.agreement.tokens.items()},
            **self.knowledge.counts(),
        }

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            self.prober.sweep()
            self.conductor.expire(loop.time())
            self.serving.resize()


def _only_this_host(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def serve(options: Options, ready: Callable[[Router], object] = lambda router: None) -> None:
    """Until SIGTERM or SIGINT. Raises OSError when the address cannot be had."""
    router = Router(options)
    await router.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready(router)
    await stop.wait()
    log.info("the router ends; what runs has %g s", options.drain_s)
    await router.stop(options.drain_s)


def run(options: Options, ready: Callable[[Router], object] = lambda router: None) -> None:
    """`serve` in a loop of its own: uvloop's where that is installed."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(options, ready))
