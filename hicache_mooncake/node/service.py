"""The store node: one daemon a host that owns a DRAM segment and outlives the engines.

This is the thin shell around `NodeCore`: a UNIX socket for the ranks and their movers, a TCP port for other nodes, a link to
the metadata masters, `/metrics`, a thread that gives pages away and one that keeps house. One lock around the core.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

from hicache_mooncake import __version__
from hicache_mooncake import protocol as p
from hicache_mooncake.cold.layout import LEAST_SEGMENTS
from hicache_mooncake.cold.pages_file import ColdError
from hicache_mooncake.cold.tier import ColdTier
from hicache_mooncake.config import Settings, join_address
from hicache_mooncake.config_values import MAX_PROMISE_S
from hicache_mooncake.ending import Ending
from hicache_mooncake.node.asking import AskCold, AskMasters, ColdPlace, LocateCold, Told
from hicache_mooncake.node.cold_writer import ColdWriter
from hicache_mooncake.node.core import LOOKUP_TIMEOUT_S, NodeCore, Report, Steps
from hicache_mooncake.node.data_server import DataServer
from hicache_mooncake.node.drain import drain
from hicache_mooncake.node.giver import Giver
from hicache_mooncake.node.link_session import Busy
from hicache_mooncake.node.links import Links
from hicache_mooncake.node.master_link import JoinFacts, MasterLink, Usage
from hicache_mooncake.node.metrics import NodeMetrics
from hicache_mooncake.node.rank_server import RankServer
from hicache_mooncake.node.rooms import Rooms
from hicache_mooncake.node.store import Store
from hicache_mooncake.observe import Observatory
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.security import ClusterKey, SecurityError
from hicache_mooncake.sharing import sentence
from hicache_mooncake.stacks import StackDump
from hicache_mooncake.transfer import addresses
from hicache_mooncake.transfer.mapping import HUGE_PAGE, Mapping, create_memfd
from hicache_mooncake.transfer.numa import Interleaving
from hicache_mooncake.transfer.tcp import listen
from hicache_mooncake.transfer.tls import Tls, TlsError

log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.05
_COMPARE_S = 0.5
"""How often it is looked for engines of this host that cannot share."""
_SNAPSHOT_PART_KEYS = 16_384
_BRIEFLY_S = 0.02
_NEXT_PART_S = 0.2
_HEALTH_LOCK_S = 2.0
_MASTERS_AWAY_S = 30.0
"""Masters may be away for so long before the node says that it is not well."""
_LONGEST_WAIT_S = 10.0
_MAX_TO_SAY = 256
_LARGE_PAGE_BYTES = 64 << 20
"""Larger than those of most models."""

_T = TypeVar("_T")


class NodeError(Exception):
    """The node cannot start; the message says what to change."""


class Node:
    """A running node. `start()` returns when it can serve; `stop()` ends it and closes everything it opened."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._neighbourly = settings.transport != "tcp"
        """Nodes of one host are read through their segments."""
        self.name = settings.name
        self.incarnation = secrets.token_bytes(8)
        self.store = Store(
            settings.dram_bytes,
            high_watermark=settings.high_watermark,
            low_watermark=settings.low_watermark,
            track_changes=bool(settings.masters),
            policy=settings.eviction,
            promise_share=settings.promise_share,
        )
        self.lock = threading.Lock()
        self._unclaimed = threading.Condition(self.lock)
        """Notified when pages that one rank fetches for all may have come."""
        self.metrics_address = ""
        self.data_address = ""
        self._owners = itertools.count(1)
        self._stopping = threading.Event()
        self._cleanup = contextlib.ExitStack()
        self._quiet = QuietLog(log)
        self._to_say: deque[tuple[int, str, str]] = deque(maxlen=_MAX_TO_SAY)
        """What the core says, under the lock: whoever reads our log may be slow, and must not hold everybody up."""
        self.alive: Callable[[], None] = lambda: None
        """Called while the housekeeping goes round; set it before `start`."""
        self.core = NodeCore(
            self.name,
            self.incarnation,
            self.store,
            masters=bool(settings.masters),
            log=lambda level, kind, text: self._to_say.append((level, kind, text)),
            rng=random.Random(),
            spill=settings.spill,
            replicate_after=settings.replicate_after,
            neighbours=self._neighbourly,
            turn=lambda: self.link.turn,
        )
        self.data_key = b""
        self.tls: Tls | None = None
        self.ranks = RankServer(self, settings.socket)
        self.links = Links(self)
        self.rooms = Rooms(self, settings.max_in_flight)
        self.links.looked = self.rooms.expire
        self.links.ended_late = self.rooms.free
        self.giver = Giver(self)
        self.cold: ColdTier | None = None
        self.cold_writer: ColdWriter | None = None
        self.unshared: list[p.Unshared] = []
        """Engines of this host that cannot share with others: as a master says, where there is one. Replaced, never changed."""
        self.started_at = time.monotonic()
        self._joined_at = self.started_at
        """When a master was last known to answer."""

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Raises NodeError, with nothing left behind, when the configuration cannot work on this host."""
        try:
            self._start()
        except (OSError, ValueError) as error:
            self._cleanup.close()
            raise NodeError(str(error)) from error
        except NodeError:
            self._cleanup.close()
            raise

    def _start(self) -> None:
        sys.setswitchinterval(0.0005)  # many short handlers, no long computation: nobody should wait 5 ms for a turn
        key = self._load_key()
        self.tls = self._load_tls()
        self._cleanup.callback(self.ranks.close)
        self.ranks.bind()
        self.segment_fd, self.segment = self._make_segment()
        self._open_cold()
        try:
            tcp = listen(self.settings.listen)
        except OSError as error:
            raise NodeError(f"--listen {self.settings.listen}: {error.strerror}. {_listen_advice(error)}") from error
        self._cleanup.callback(tcp.close)
        try:
            host, port = addresses.advertised(self.settings, *tcp.getsockname()[:2])
        except addresses.AddressError as error:
            raise NodeError(str(error)) from error
        self.data_address = join_address(host, port)
        self.data = DataServer(self, tcp)
        capacity, host_id = self.store.allocator.capacity, self.settings.host_id
        path = os.path.abspath(self.settings.socket) if self._neighbourly else ""
        self.link = MasterLink(
            self.settings.masters,
            lambda: JoinFacts(self.name, self.incarnation, host, port, capacity, host_id, self.core.draining, path),
            self,
            self._clear_from_master,
            log=log,
            on_keep=self._keep_promised,
            cold=self.cold,
            engines=lambda: self.core.engines_told,
            key=key,
            allow_unauthenticated=self.settings.allow_unauthenticated,
        )
        self._cleanup.callback(self.link.close)
        if self.settings.metrics:
            try:
                observatory = Observatory(self.settings.metrics, NodeMetrics(self.report, self._missed), self._health)
            except OSError as error:
                raise NodeError(
                    f"--metrics {self.settings.metrics}: {error.strerror}. Free the port or choose port 0"
                ) from error
            self.metrics_address = observatory.address
            self._cleanup.callback(observatory.stop)
        self.links.start()
        self._cleanup.callback(self.links.stop)
        self.data.start()
        self._cleanup.callback(self.data.stop)
        self.link.start()
        self.giver.start()
        self._cleanup.callback(self.giver.stop)
        if self.cold_writer is not None:
            self.cold_writer.start()
            self._cleanup.callback(self.cold_writer.stop)
        self._thread(self._housekeeping, "housekeeping")
        self.ranks.start()
        self.segment.populate_in_background()
        log.info(
            "node %s serves: socket=%s data=%s metrics=%s dram=%d bytes masters=%s incarnation=%s version=%s",
            self.name,
            self.settings.socket,
            self.data_address,
            self.metrics_address or "off",
            self.store.allocator.capacity,
            ",".join(self.settings.masters) or "none",
            self.incarnation.hex(),
            __version__,
        )

    def drain(self, interrupted: Callable[[], bool]) -> None:
        """Before `stop`: let others have what is hot here, and who reads come to an end. Takes `drain_s` and 1.5 s at most."""
        drain(self, self.settings.drain_s, interrupted)

    def save(self, interrupted: Callable[[], bool]) -> None:
        """Before `stop`, if it is wanted: write what is in DRAM to the cold tier."""
        if self.cold_writer is None or not self.settings.save_on_exit:
            return
        started = time.monotonic()
        self.cold_writer.stop()
        pages, size = self.cold_writer.save(interrupted)
        log.info("node %s saved %d pages (%.1f GB) in %.1f s", self.name, pages, size / 1e9, time.monotonic() - started)

    def stop(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.ranks.hang_up()
        self.link.close()  # first: nobody is to be told of pages that are no longer served
        self._cleanup.close()

    def idle_seconds(self) -> float:
        """How long no rank has been connected."""
        return self.ranks.idle_seconds()

    @property
    def connections_refused(self) -> int:
        return self.ranks.refused

    def _load_key(self) -> ClusterKey | None:
        if not self.settings.key_file:
            return None
        try:
            key = ClusterKey.load(self.settings.key_file)
        except SecurityError as error:
            raise NodeError(str(error)) from error
        self.data_key = key.data_key
        return key

    def _load_tls(self) -> Tls | None:
        settings = self.settings
        try:
            return Tls.load(settings.tls_cert, settings.tls_key, settings.tls_ca)
        except TlsError as error:
            raise NodeError(str(error)) from error

    def _open_cold(self) -> None:
        settings = self.settings
        if not settings.cold:
            return
        try:
            self.cold = ColdTier(
                Path(settings.cold),
                settings.cold_bytes,
                floor_bytes=settings.cold_floor,
                track_changes=bool(settings.masters),
            )
        except ColdError as error:
            raise NodeError(str(error)) from error
        keeping = self.core.keep(settings.cold_after_loads, settings.cold_bytes)
        tier, writer = self.cold, ColdWriter(self, self.cold, keeping)
        self.cold_writer = writer
        self._cleanup.callback(lambda: None if writer.hangs else tier.close())
        how = "past the page cache" if self.cold.direct else "through the page cache, since this file system has no direct I/O"
        log.info("cold tier %s: %d pages found, %d bytes at most, %s", settings.cold, self.cold.pages, settings.cold_bytes, how)
        if self.cold.largest_page < _LARGE_PAGE_BYTES:
            log.warning(
                "cold tier %s is small: pages of more than %d KiB are never kept there, and those of a large model may be "
                "larger. An empty one of %dmb (cold_bytes) takes pages of %d MiB",
                settings.cold,
                self.cold.largest_page >> 10,
                _LARGE_PAGE_BYTES * LEAST_SEGMENTS >> 20,
                _LARGE_PAGE_BYTES >> 20,
            )

    @property
    def _cold_hangs(self) -> bool:
        return self.cold_writer is not None and self.cold_writer.hangs

    def _make_segment(self) -> tuple[int, Mapping]:
        length = self.store.allocator.capacity
        if self.settings.hugepages:
            length = -(-length // HUGE_PAGE) * HUGE_PAGE
        interleaving = Interleaving(self.settings.numa == "auto")
        try:
            with interleaving.allocating():
                fd = create_memfd("hicache-mooncake", length, huge=self.settings.hugepages)
        except OSError as error:
            if self.settings.hugepages:
                raise NodeError(
                    f"hugepages: {error.strerror} for {length // HUGE_PAGE} pages of 2 MiB. Reserve them "
                    f"(sysctl vm.nr_hugepages={length // HUGE_PAGE}) or turn hugepages off"
                ) from error
            raise NodeError(f"--dram {length}: {error.strerror}") from error
        self._cleanup.callback(os.close, fd)
        segment = Mapping(fd, length, writable=True)
        self._cleanup.callback(lambda: None if self.links.unfenced or self._cold_hangs else segment.close())
        interleaving.of(segment.address, length)
        if interleaving.problem:
            log.warning("%s", interleaving.problem)
        return fd, segment

    def _thread(self, target: Callable[[], None], name: str) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    # ------------------------------------------------------------------ ranks and movers

    def new_owner(self) -> int:
        return next(self._owners)

    def welcome(self, version: int, role: str, *, cold: bool) -> tuple[p.Welcome, list[int]]:
        moves = role in ("load", "store")
        data_key = self.data_key if moves else b""
        answer = p.Welcome(version, self.name, self.incarnation, self.segment.length, data_key)
        if moves and self.tls is not None:
            answer.tls_cert, answer.tls_key, answer.tls_ca = self.tls.cert, self.tls.key, self.tls.ca
        fds = [self.segment_fd] if moves else []
        if cold and role == "load" and self.cold is not None:
            answer.cold = 2 if self.cold.direct else 1
            fds.append(self.cold.read_fd)
        return answer, fds

    def gone(self, owner: int) -> None:
        self.rooms.settle_owner(owner)
        with self.lock:
            self.core.drop_owner(owner)
            self._unclaimed.notify_all()

    def handle(self, owner: int, message: p.Message) -> p.Message | None:
        match message:
            case p.Clear():
                return p.Cleared(self.clear(message.namespace, everywhere=message.everywhere))
            case p.AdminStatus():
                cluster = self.link.cluster_status(LOOKUP_TIMEOUT_S)
                with self.lock:
                    ranks = self.core.sharing.ranks()
                return p.AdminReport(self.report(), cluster.nodes if cluster is not None else [], ranks, self.unshared)
            case p.Describe():
                with self.lock:
                    self.core.describe(owner, message.rank, time.monotonic())
                engine = message.rank.engine
                return p.Described([pair for pair in self.unshared if engine in (pair.prefill, pair.decode)])
            case p.Landed():
                self.rooms.landed(owner, message)
                return None
            case p.Locate() if message.wait_s > 0:
                self._wait_for_claims(message)
            case p.Commit():
                self.rooms.settle(owner, message.txn)
        answer = self._drive(self.core.handle(owner, message, time.monotonic()))
        while self._to_say:
            with contextlib.suppress(IndexError):  # another thread may be quicker
                self._quiet(*self._to_say.popleft())
        match message:
            case p.Locate():
                assert isinstance(answer, p.Located)
                return self.rooms.land(owner, message, answer)
            case p.Commit():
                with self.lock:
                    self._unclaimed.notify_all()
            case p.Release():
                if self.cold_writer is not None:
                    for page_hash, offset in message.bad_cold:
                        self.cold_writer.doubt(message.namespace, page_hash, offset)
                if message.peer_down:
                    with self.lock:
                        failed = self.core.take_peers_down()
                    self.link.report(failed)
        return answer

    def answered(self, message: p.Message) -> None:
        """The masters hear of what has changed: their thread would run before the answer is sent if it was woken earlier."""
        if isinstance(message, (p.Commit, p.Reserve)) or (isinstance(message, p.Release) and message.bad):
            self.link.notify()

    def _drive(self, steps: Steps[_T]) -> _T:
        """Run the steps under the lock, and ask the masters and the disk without it."""
        try:
            with self.lock:
                ask = next(steps)
            while True:
                told = self.ask(ask) if isinstance(ask, AskMasters) else self._ask_cold(ask)
                with self.lock:
                    ask = steps.send(told)
        except StopIteration as end:
            return cast(_T, end.value)

    def ask(self, ask: AskMasters) -> Told | None:
        return self.link.lookup(ask.questions, ask.timeout_s, (ask.promise_s, ask.reader))

    def _ask_cold(self, ask: AskCold | LocateCold) -> list[bytes] | list[ColdPlace | None]:
        cold = self.cold
        if isinstance(ask, AskCold):
            until = time.monotonic() + ask.promise_s if ask.promise_s > 0 else 0.0
            return [
                b"" if cold is None else cold.present(namespace, p.split(hashes), until) for namespace, hashes in ask.questions
            ]
        if cold is None:
            return []
        hashes = p.split(ask.hashes)
        places = cold.locate(ask.namespace, hashes, ask.length)
        often = cold.often(ask.namespace, hashes)
        return [
            None if place is None else ColdPlace(place.offset, place.checksum, again)
            for place, again in zip(places, often, strict=True)
        ]

    def room(self) -> Sequence[p.Room]:
        return self.link.room()

    def changed(self) -> None:
        self.link.notify()

    def _wait_for_claims(self, message: p.Locate) -> None:
        until = time.monotonic() + min(message.wait_s, _LONGEST_WAIT_S)
        with self.lock:
            while (now := time.monotonic()) < until and self.core.waits(message, now):
                self._unclaimed.wait(until - now)

    def clear(self, namespace: bytes, *, everywhere: bool) -> int:
        with self.lock:
            dropped = self.core.clear(namespace, time.monotonic())
        if self.cold is not None:
            self.cold.clear(namespace, wait=False)
        if everywhere:
            self.link.clear_namespace(namespace)
        self.link.notify()
        if self.cold is not None:
            self.cold.save_cleared()  # last: whoever else is to hear of it does not wait for this disk
        log.info("cleared %d objects of namespace %s", dropped, namespace.hex())
        return dropped

    # ------------------------------------------------------------------ what the master link reads; it must not wait for long

    @contextlib.contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """The lock, or Busy."""
        if not self.lock.acquire(timeout=seconds):
            raise Busy(f"the node's lock has been held for more than {seconds:g} s")
        try:
            yield
        finally:
            self.lock.release()

    def _clear_from_master(self, namespace: bytes) -> None:
        with self._within(_BRIEFLY_S):
            dropped = self.core.clear(namespace, time.monotonic())
        if self.cold is not None:
            self.cold.clear(namespace, wait=False)  # heartbeats wait for no disk
        self.link.notify()
        log.info("cleared %d objects of namespace %s, as another node asked", dropped, namespace.hex())

    def _keep_promised(self, keep: p.Keep) -> None:
        with self._within(_BRIEFLY_S):
            absent = self.core.keep_promised(keep, time.monotonic())
        if self.cold_writer is not None:
            for namespace, hashes in absent:
                self.cold_writer.promise(namespace, hashes, min(keep.promise_s, MAX_PROMISE_S))

    def drain_changes(self, limit: int) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
        with self._within(_BRIEFLY_S):
            return self.store.drain_changes(limit)

    def changes_lost(self) -> bool:
        with self._within(_BRIEFLY_S):
            return self.store.changes_lost

    def snapshot(self) -> Iterator[list[tuple[bytes, bytes]]]:
        parts = self.store.snapshot_parts(_SNAPSHOT_PART_KEYS)
        wait_s = _BRIEFLY_S  # nothing is lost when the first part has to be asked for again; later ones are worth a wait
        while True:
            with self._within(wait_s):
                part = next(parts, None)
            if part is None:
                return
            yield part
            wait_s = _NEXT_PART_S

    def usage(self) -> Usage:
        with self._within(_BRIEFLY_S):
            return self.core.usage()

    # ------------------------------------------------------------------ housekeeping

    def _housekeeping(self) -> None:
        compare_at = 0.0
        while not self._stopping.wait(_HOUSEKEEPING_S):
            self.alive()
            if time.monotonic() >= compare_at:
                compare_at = time.monotonic() + _COMPARE_S
                self._compare_engines()
            if self.link.state in ("joined", "no master configured"):
                self._joined_at = time.monotonic()
            went = 0
            while not self._stopping.is_set():
                with self.lock:
                    gone = self.core.tick(time.monotonic())
                if not gone:
                    break
                went += gone
                time.sleep(0)  # let the handlers at the lock between two slices
            if went:
                self.link.notify()

    def _compare_engines(self) -> None:
        if self.settings.masters:
            found = self.link.unshared()
        else:
            with self.lock:
                found = list(self.core.sharing.verdict(time.monotonic()).unshared)
        if found == self.unshared:
            return
        before, self.unshared = self.unshared, found
        for pair in found:
            if pair not in before:
                self._quiet(logging.WARNING, f"unshared {pair.prefill.hex()} {pair.decode.hex()}", sentence(pair))
        if not found:
            log.info("every engine of this host that serves prefill or decode shares with one of the other side, or has none")

    def _missed(self) -> tuple[dict[str, int], dict[str, int]]:
        with self._within(_HEALTH_LOCK_S):
            return dict(self.core.missed), dict(self.core.broken)

    def _health(self) -> tuple[bool, dict[str, object]]:
        """Not well, where starting the node anew may help. A node whose masters are away is degraded and well: its own pages
        are served, and would be lost."""
        master = self.link.state
        stuck = self._stuck()
        problems = stuck + self._masters_away(master)
        status = "degraded" if problems else "draining" if self.core.draining else "ok"
        answer = {
            "status": status,
            "node": self.name,
            "master": master,
            "objects": self.store.objects,
            "problems": problems,
            "unshared": [sentence(pair) for pair in self.unshared],
        }
        return not stuck, answer

    def _stuck(self) -> list[str]:
        try:
            with self._within(_HEALTH_LOCK_S):
                return self.core.problems(time.monotonic())
        except Busy as error:
            return [f"{error}: nothing is answered"]

    def _masters_away(self, master: str) -> list[str]:
        away_s = time.monotonic() - self._joined_at
        if master.startswith("refused"):
            return [f"the masters do not take this node ({master}): pages of other nodes are misses here"]
        if away_s > _MASTERS_AWAY_S:
            return [f"no master has answered for {away_s:.0f} s ({master}): pages of other nodes are misses here"]
        return []

    def report(self) -> Report:
        """What `hicache-mooncake status` shows; counters since start."""
        now = time.monotonic()
        master = self.link.state
        problems = self._stuck() + self._masters_away(master)
        report: Report = {
            "name": self.name,
            "incarnation": self.incarnation.hex(),
            "version": __version__,
            "pid": os.getpid(),
            "socket": self.settings.socket,
            "data": self.data_address,
            "metrics": self.metrics_address,
            "master": master,
            "master_refused": master.startswith("refused"),
            "degraded": bool(problems),
            "problems": "; ".join(problems),
            "uptime_s": round(now - self.started_at, 1),
        }
        with self._within(_HEALTH_LOCK_S):
            report |= self.core.report(now)
            engines = {rank.engine for rank in self.core.sharing.ranks()}
        report["engines"] = len(engines)
        report["unshared_engines"] = len(engines & {each for pair in self.unshared for each in (pair.prefill, pair.decode)})
        report.update(self.ranks.report())
        report.update(self.data.report())
        report.update(self.rooms.report())
        report.update(self.links.report())
        if self.cold is not None:
            report.update(self.cold.report())
        return report


def _listen_advice(error: OSError) -> str:
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        with contextlib.suppress(addresses.AddressError):
            return f"This host has {addresses.listing(addresses.table())}"
    if isinstance(error, socket.gaierror):
        return "Give an address of this host, or a name that it knows"
    return "Free the port or choose port 0"


def run_node(settings: Settings, *, embedded: bool = False, idle_exit_s: float | None = None) -> int:
    """Run a node until SIGTERM or SIGINT, or, with `idle_exit_s`, until no rank has been connected for that long.

    Returns the exit status; a configuration that cannot work raises NodeError.
    """
    node = Node(settings)
    stacks = StackDump()
    node.alive = stacks.alive
    node.start()
    ending = Ending()
    while not ending.wait(0.5 + random.random() * 0.1):
        if idle_exit_s is not None and node.idle_seconds() > idle_exit_s:
            log.info("embedded node %s ends: no engine for %.0f s", settings.name, idle_exit_s)
            break
    signals = ending.times
    if ending.by is not None:
        log.info("node %s ends on %s; another one ends it at once", settings.name, ending.by.name)
    node.drain(lambda: ending.times > signals)
    node.save(lambda: ending.times > signals)
    stacks.stop()
    node.stop()
    return 0
