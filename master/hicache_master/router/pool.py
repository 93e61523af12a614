"""Which store nodes hold the pages of one prompt: asked of the metadata masters when it is needed, and put into `Prefixes`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from hicache_master.conductor.prefixes import COLD, DRAM, Prefixes
from hicache_mooncake import protocol
from hicache_mooncake.config_values import is_etcd
from hicache_mooncake.node.link_core import LinkView, MasterView
from hicache_mooncake.node.link_session import JOINED, WAITING
from hicache_mooncake.node.lookup_plan import Answers
from hicache_mooncake.node.master_lookup import Asker, Socket, connect_dealer
from hicache_mooncake.protocol import (
    HASH_BYTES,
    MAX_KEYS_PER_MESSAGE,
    MAX_NAMESPACES_PER_MESSAGE,
    Answer,
    ClusterReport,
    ClusterStatus,
    PageKind,
    Question,
)
from hicache_mooncake.security import ClusterKey
from hicache_mooncake.sharing import BIGRAMS, PLAIN

from .prompts import Prompt

EVERY_S = 3.0
STATUS_S = 1.0
MAX_MASTERS = 64
MAX_ASKING = 32
"""Prompts that masters are asked for, or that wait for it, at a time."""
THREADS = 4
_TIERS = {protocol.DRAM: DRAM, protocol.COLD: COLD}

log = logging.getLogger("hicache_master.router")

Node = tuple[str, str]
"""Name and incarnation."""


@dataclass(frozen=True, slots=True)
class Located:
    """Pages `start` to `end` of a prompt are whole on each of these nodes, in this tier of `Prefixes`; where they are whole
    only on several nodes together, on the one that has most of them."""

    start: int
    end: int
    holders: Mapping[Node, int]


def whole_pages(kind: PageKind, answers: Sequence[Answer]) -> list[Located]:
    """From the answers to `questions` of this kind: the pages that are there with all their parts, in DRAM or on a disk, from
    the first one on, up to one at which all side pools have something."""
    every, last = answers[: len(kind.every)], answers[len(kind.every) :]
    pages = min(len(answer.holder) for answer in every)
    while pages and not all(len(side.holder) >= pages and side.holder[pages - 1] for side in last):
        pages -= 1
    columns = [column for answer in every for column in (answer.holder, answer.others or bytes(len(answer.holder)))]
    found: list[Located] = []
    start = 0
    for codes, run in itertools.groupby(itertools.islice(zip(*columns, strict=False), pages)):
        end = start + sum(1 for _ in run)
        holders = _holders(every, codes)
        if not holders:
            break
        _append(found, start, end, holders)
        start = end
    return found


def _holders(answers: Sequence[Answer], codes: tuple[int, ...]) -> dict[Node, int]:
    """`codes`: of one page, two for each answer."""
    parts: list[dict[Node, int]] = []
    for index, answer in enumerate(answers):
        nodes: dict[Node, int] = {}
        for code in codes[2 * index : 2 * index + 2]:
            if code:
                peer = answer.peers[code - 1]
                tier = _TIERS.get(answer.tiers[code - 1] if answer.tiers else protocol.DRAM, COLD)
                node = peer.node, peer.incarnation.hex()
                nodes[node] = min(tier, nodes.get(node, tier))
        parts.append(nodes)
    if not all(parts):
        return {}
    whole = {node: max(part[node] for part in parts) for node in parts[0] if all(node in part for part in parts)}
    if whole:
        return whole
    counts = Counter(node for part in parts for node in part)
    best = max(counts, key=lambda node: counts[node])
    return {best: max(min(part.values()) for part in parts)}


def merged(kinds: Sequence[list[Located]]) -> list[Located]:
    """What is there of any kind."""
    if len(kinds) == 1:
        return kinds[0]
    edges = sorted({edge for runs in kinds for run in runs for edge in (run.start, run.end)})
    at = [0] * len(kinds)
    found: list[Located] = []
    for start, end in itertools.pairwise(edges):
        holders: dict[Node, int] = {}
        for index, runs in enumerate(kinds):
            if at[index] < len(runs) and runs[at[index]].end <= start:
                at[index] += 1
            if at[index] < len(runs):
                for node, tier in runs[at[index]].holders.items():
                    holders[node] = min(tier, holders.get(node, tier))
        _append(found, start, end, holders)
    return found


def _append(found: list[Located], start: int, end: int, holders: dict[Node, int]) -> None:
    if found and found[-1].holders == holders:
        start = found.pop().start
    found.append(Located(start, end, holders))


def questions(kind: PageKind, hashes: bytes) -> list[Question]:
    return [
        *(Question(namespace, hashes, True) for namespace in kind.every),
        *(Question(namespace, hashes, False) for namespace in kind.last),
    ]


class MasterTable:
    """The masters as their reports tell: who is there, and who has which shard. No I/O."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._reports: dict[str, tuple[float, ClusterReport]] = {}
        self.known: list[str] = []

    def take(self, masters: Sequence[str], reports: Mapping[str, ClusterReport], now: float) -> LinkView:
        """`masters`: those that are configured or found. `reports`: of those that answered."""
        told = [other for report in reports.values() for other in report.masters]
        self.known = list(dict.fromkeys([*masters, *told]))[:MAX_MASTERS]
        self._reports |= {master: (now, report) for master, report in reports.items()}
        self._reports = {master: each for master, each in self._reports.items() if master in self.known}
        votes = Counter(report.shards for at, report in self._reports.values() if now - at <= self._ttl_s)
        shards = votes.most_common(1)[0][0] if votes else 0
        return LinkView(shards, tuple(self._view(master, shards) for master in self.known))

    def _view(self, master: str, shards: int) -> MasterView:
        at, report = self._reports.get(master, (float("-inf"), None))
        if report is None:
            return MasterView(master, WAITING, -1, "", at, self._ttl_s, False, 0)
        shard = report.shard if report.shards == shards else -1
        return MasterView(master, JOINED, shard, "", at, self._ttl_s, report.warming, report.version)

    def fresh(self, now: float) -> list[ClusterReport]:
        return [report for at, report in self._reports.values() if now - at <= self._ttl_s]


class PoolView:
    """Asks the masters of a cluster, from one event loop: `start`, `refresh` whenever a request is to be routed, `close`.

    `masters`: host:port, or etcd:// with those that are listed there. `model`: only pages of engines that serve it by this name
    count; "": of all. `bigrams`: as in `Prompts`. Pages count of kinds of engines that compute prompts."""

    def __init__(
        self,
        masters: Sequence[str],
        *,
        key: ClusterKey | None = None,
        model: str = "",
        bigrams: bool = False,
        every_s: float = EVERY_S,
    ) -> None:
        self._masters = list(masters)
        self._key = key
        self._model = model
        self._chain = BIGRAMS if bigrams else PLAIN
        self._every_s = every_s
        self._table = MasterTable(2.5 * every_s + STATUS_S)
        self._view = LinkView()
        self._kinds: list[PageKind] = []
        self._alive: set[str] | None = None
        """Names of the nodes that masters know of."""
        self._joined: dict[str, str] = {}
        self._name = f"router {socket.gethostname()}:{os.getpid()}"
        self._context: zmq.Context[Socket] = zmq.Context()
        self._asker = Asker(self._connect)
        self._dealers: dict[str, Socket] = {}
        self._askers = ThreadPoolExecutor(THREADS, "pool")
        self._status = ThreadPoolExecutor(1, "pool status")
        self._following: asyncio.Task[None] | None = None
        self._asking = 0
        self._problem = ""
        self.counts: Counter[str] = Counter()
        """questions; of these answered, unanswered, incomplete (a shard said nothing), busy (too many at once), nothing
        (no engine has described its pages, or the prompt has no page to ask for); pages: that were found."""

    @property
    def problem(self) -> str:
        """Why the pool is not seen, and what to do; empty if it is."""
        return self._problem

    @property
    def masters(self) -> list[str]:
        """Those that are asked, by address."""
        return self._table.known

    @property
    def kinds(self) -> Sequence[PageKind]:
        """What is asked for."""
        return self._kinds

    async def start(self) -> None:
        """Returns when the masters have been asked once, whatever they said."""
        await self._follow_once()
        self._following = asyncio.create_task(self._follow(), name="pool")

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self._asker.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._end)

    async def refresh(self, prompt: Prompt, prefixes: Prefixes, timeout_s: float) -> bool:
        """Put who holds this prompt's pages into `prefixes`, in place of what was known of them. False when nobody told within
        `timeout_s`: what is known stays."""
        kinds, view = self._kinds, self._view
        if not prompt.hashes or not kinds:
            self.counts["nothing"] += 1
            return False
        if self._asking >= MAX_ASKING:
            self.counts["busy"] += 1
            return False
        self._asking += 1
        self.counts["questions"] += 1
        deadline = time.monotonic() + timeout_s
        try:
            ask = asyncio.get_running_loop().run_in_executor(self._askers, self._ask, prompt.hashes, kinds, view, deadline)
            answers, runs = await ask
        finally:
            self._asking -= 1
        if answers is None or not answers.complete:
            self.counts["unanswered" if answers is None else "incomplete"] += 1
            return False
        self.counts["answered"] += 1
        self._put(prompt, runs, prefixes, whole=not answers.warming)
        return True

    def _put(self, prompt: Prompt, runs: Sequence[Located], prefixes: Prefixes, *, whole: bool) -> None:
        """`whole`: pages of which nothing was said are nowhere."""
        self._forget_the_gone(prefixes)
        end = 0
        for run in runs:
            for node, incarnation in run.holders:
                self._join(prefixes, node, incarnation)
            prefixes.located(prompt.keys[run.start : run.end], {node: tier for (node, _), tier in run.holders.items()})
            end = run.end
        self.counts["pages"] += end
        if whole:
            prefixes.located(prompt.keys[end:], {})

    def _join(self, prefixes: Prefixes, node: str, incarnation: str) -> None:
        with contextlib.suppress(ValueError):  # too many holders: this one is passed over
            prefixes.join(node, incarnation)
            self._joined[node] = incarnation

    def _forget_the_gone(self, prefixes: Prefixes) -> None:
        if self._alive is not None:
            for node in [node for node in self._joined if node not in self._alive]:
                prefixes.leave(node)
                del self._joined[node]

    # ------------------------------------------------------------------ in threads

    def _ask(
        self, hashes: bytes, kinds: Sequence[PageKind], view: LinkView, deadline: float
    ) -> tuple[Answers | None, list[Located]]:
        parts = sum(len(kind.every) + len(kind.last) for kind in kinds)
        hashes = hashes[: MAX_KEYS_PER_MESSAGE // parts * HASH_BYTES]
        asked = [question for kind in kinds for question in questions(kind, hashes)]
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None, []
        answers, _ = self._asker.lookup(asked, view, self._name, left_s)
        return answers, [] if answers is None else merged(_by_kind(kinds, answers))

    def _connect(self, master: str) -> Socket:
        return connect_dealer(self._context, master, self._key)

    def _find_masters(self) -> list[str]:
        if not any(map(is_etcd, self._masters)):
            return self._masters
        from hicache_mooncake.cli.status import Unreachable, find_masters

        try:
            return find_masters(self._masters)
        except Unreachable as error:
            log.warning("%s", error)
            return self._table.known or [master for master in self._masters if not is_etcd(master)]

    def _poll(self) -> tuple[list[str], dict[str, ClusterReport]]:
        """Ask every master what kind of one it is, and what it knows of pages."""
        masters = self._find_masters()
        wanted = list(dict.fromkeys([*masters, *self._table.known]))[:MAX_MASTERS]
        for gone in self._dealers.keys() - set(wanted):
            self._dealers.pop(gone).close()
        reports: dict[str, ClusterReport] = {}
        unsent = set(wanted)
        deadline = time.monotonic() + STATUS_S
        while time.monotonic() < deadline and len(reports) < len(wanted):
            for master in sorted(unsent):
                with contextlib.suppress(zmq.ZMQError, OSError, ValueError):
                    self._dealer(master).send(protocol.encode(ClusterStatus(kinds=True)), zmq.NOBLOCK)
                    unsent.discard(master)
            for master, report in self._received():
                reports[master] = report
        for silent in set(wanted) - set(reports):  # a new connection has its name resolved anew
            if silent in self._dealers:
                self._dealers.pop(silent).close()
        return masters, reports

    def _dealer(self, master: str) -> Socket:
        if master not in self._dealers:
            self._dealers[master] = self._connect(master)
        return self._dealers[master]

    def _received(self) -> Iterator[tuple[str, ClusterReport]]:
        poller = zmq.Poller()
        for dealer in self._dealers.values():
            poller.register(dealer, zmq.POLLIN)
        ready = dict(poller.poll(20))
        decode = protocol.decoder(protocol.FromMaster).decode
        for master, dealer in list(self._dealers.items()):
            if dealer in ready:
                with contextlib.suppress(zmq.ZMQError, msgspec.MsgspecError):
                    message: Any = decode(dealer.recv(zmq.NOBLOCK))
                    if isinstance(message, ClusterReport):
                        yield master, message

    def _end(self) -> None:
        self._asker.drained(time.monotonic() + 1.0)
        self._askers.shutdown(wait=True, cancel_futures=True)
        self._status.shutdown(wait=True, cancel_futures=True)
        for dealer in self._dealers.values():
            dealer.close()
        self._asker.close()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------------ what masters say of themselves

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._follow_once()
            except (zmq.ZMQError, OSError, ValueError) as error:
                log.warning("the masters could not be asked: %s", error)

    async def _follow_once(self) -> None:
        masters, reports = await asyncio.get_running_loop().run_in_executor(self._status, self._poll)
        now = time.monotonic()
        self._view = self._table.take(masters, reports, now)
        self._asker.keep(self._table.known)
        fresh = self._table.fresh(now)
        if fresh:
            self._alive = {info.node for report in fresh for info in report.nodes if info.state != "gone"}
            told = {(*kind.every, b"", *kind.last): kind for report in fresh for kind in report.kinds}
            self._kinds = self._usable(list(told.values()))
        problem = self._why_not(fresh)
        if problem != self._problem:
            log.warning("%s", problem) if problem else log.info("the pool is seen")
            self._problem = problem

    def _usable(self, kinds: Sequence[PageKind]) -> list[PageKind]:
        """Those of engines that compute prompts of this model, as many as go into one message."""
        found, room = [], MAX_NAMESPACES_PER_MESSAGE
        for kind in kinds:
            parts = len(kind.every) + len(kind.last)
            mine = not self._model or kind.model == self._model
            if mine and kind.chain == self._chain and set(kind.roles) != {"decode"} and 0 < parts <= room and kind.every:
                found.append(kind)
                room -= parts
        return found

    def _why_not(self, fresh: Sequence[ClusterReport]) -> str:
        if not fresh:
            return (
                f"no master answers at {', '.join(self._masters)}: what is in the pool is not known here; is the key the same?"
            )
        if set(range(self._view.shards)) - {master.shard for master in self._view.masters}:
            return f"not every one of {self._view.shards} shards of the directory has a master that answers"
        if not self._kinds:
            named = f" that serves {self._model!r}" if self._model else ""
            return (
                f"no engine{named} has told the masters what its pages are made of: the pool is not asked; it takes an engine"
                " with --hicache-storage-backend mooncake and hicache-mooncake of this release, all of whose ranks have started"
            )
        return ""


def _by_kind(kinds: Sequence[PageKind], answers: Answers) -> list[list[Located]]:
    found, at = [], 0
    for kind in kinds:
        parts = len(kind.every) + len(kind.last)
        found.append(whole_pages(kind, answers[at : at + parts]))
        at += parts
    return found
