"""The thin client: one request a batch to the local store node or to this rank's movers; no page byte is touched here.

Nothing raises out of the data calls: what fails is a miss with a counted reason, within the deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Backoff
from hicache_mooncake.client.embedded import ensure_node, own_user_only
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.client.mover_process import START_S, MoverProcess, MoverUnavailable
from hicache_mooncake.client.promised import LOOKUP_S, Told
from hicache_mooncake.client.queries import EMBEDDED_START_S, NodeQueries
from hicache_mooncake.config import Settings
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer.mapping import Mapping as SharedMapping
from hicache_mooncake.transfer.mapping import create_memfd
from hicache_mooncake.transfer.memory import allow_movers, copy_here, in_small_pieces
from hicache_mooncake.wire import MAX_FDS

log = logging.getLogger(__name__)

_MAX_LOOKUP_KEYS = 65_536
_REPORT_MISSES_EVERY_S = 1.0
_BOUNCE_BYTES = 64 << 20
_LEAST_BATCH_S = 0.1
"""With less time than this a batch is not begun: it would end in the fence, which costs the next one too."""


@dataclass(frozen=True)
class Body:
    """What is one object of a page: its namespace, the group that it lives and dies with, and where its bytes lie."""

    namespace: bytes
    runs: tuple[p.Run, ...]
    group: bytes = b""
    shared: bool = False
    """Every rank of this host reads the same objects (MLA): one of them fetches a remote page, for all."""

    @property
    def length(self) -> int:
        return sum(run.length for run in self.runs)


@dataclass
class Outcome:
    """One batch. `ok` has one byte per key; everything that is 0 has a reason."""

    ok: bytes
    reasons: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    remote_bytes: int = 0
    had: int = 0


class Bounce:
    """The third way to reach memory: a memfd shared with the mover, and a copy between it and the real place in this process.

    Slower under a busy interpreter than the two others, and needs nothing from the system. Not thread-safe.
    """

    def __init__(self, role: str) -> None:
        self.fd = create_memfd(f"hicache-mooncake-{role}", _BOUNCE_BYTES)
        self.mapping = SharedMapping(self.fd, _BOUNCE_BYTES, writable=True)
        self.mapping.populate_in_background()
        self.region = p.Region(self.mapping.address, _BOUNCE_BYTES, 0)

    def slots(self, body_bytes: int) -> tuple[int, p.Run]:
        """(how many bodies fit at once, the run of a slot). Raises ValueError for a body larger than the whole."""
        stride = -(-body_bytes // 4096) * 4096
        if stride > _BOUNCE_BYTES:
            raise ValueError(f"a page of {body_bytes} bytes does not fit the copy buffer of {_BOUNCE_BYTES}")
        return _BOUNCE_BYTES // stride, p.Run(self.mapping.address, stride, body_bytes)

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)


class PoolClient:
    """One rank's access to the pool. All methods are thread-safe; loads, stores and lookups run beside each other. `promise_s`:
    how long this rank counts on what a lookup found; 0: not at all."""

    def __init__(self, settings: Settings, client: str, promise_s: float = 0.0) -> None:
        self.settings = settings
        self.client = client
        self.embedded = settings.node == "embedded"
        self.enabled = settings.node != "off"
        self.mode = ""
        self.mode_reason = ""
        self.reasons: Counter[str] = Counter()
        """Misses since start, by reason. Written under a lock, by `miss`."""
        self.broken: Counter[str] = Counter()
        """Of those, pages that were found so lately that they should have been there. Written under the same lock."""
        self._told = Told(promise_s) if promise_s > 0 else None
        self.quiet = QuietLog(log)
        self._reasons_lock = threading.Lock()
        self._unreported: Counter[str] = Counter()
        self._unreported_broken: Counter[str] = Counter()
        self._report_at = 0.0
        self._queries = NodeQueries(settings, client, embedded=self.embedded)
        self._movers = {role: MoverProcess(role) for role in ("load", "store")}
        self._bounce_movers = {role: MoverProcess(role) for role in ("load", "store")}
        self._bounces: dict[str, Bounce] = {}
        self._bounce_locks = {role: threading.Lock() for role in ("load", "store")}
        self._bounce_retry = {role: Backoff(0.5, 30.0) for role in ("load", "store")}
        self._pools: dict[str, PoolGeometry] = {}
        self._canary = ctypes.create_string_buffer(os.urandom(64), 64)

    # ------------------------------------------------------------------ set-up

    def start(self) -> None:
        """Make sure that a node is there, where it is ours to start. Never raises: without a node everything is a miss."""
        if self.enabled and self.embedded and not ensure_node(self.settings, EMBEDDED_START_S):
            log.error("no store node on %s: running without L3 until there is one", self.settings.socket)

    def share(self, geometry: PoolGeometry) -> str:
        """Share a pool's memory with the movers; returns the mode in use (`memfd`, `process_vm`, `segment`).

        Raises MoverUnavailable when the mode that the operator forces does not work here.
        """
        self._pools[geometry.pool] = geometry  # a pool that is registered anew replaces its former self
        known: list[p.Region] = []
        known_fds: list[int] = []
        for pool in self._pools.values():
            for region in pool.regions:
                fd = region.fd + len(known_fds) if region.fd >= 0 else -1
                known.append(p.Region(region.address, region.length, fd, region.fd_offset))
            known_fds.extend(pool.fds)
        wanted = self.settings.copy_mode
        all_memfd = all(region.fd >= 0 for region in known) and len(known_fds) <= MAX_FDS
        if wanted == "segment":
            self.mode, self.mode_reason = "segment", "copy_mode"
            self._warm_bounces()
            return self.mode
        if wanted == "memfd" and not all_memfd:
            problem = (
                f"this engine's host pools are in {len(known_fds)} memfds, and {MAX_FDS} can be shared. Use another "
                "--hicache-mem-layout"
                if len(known_fds) > MAX_FDS
                else "this engine's host pool is not in a memfd. Use --hicache-storage-backend mooncake with this package's "
                'plugin, or "allocator": "shm" with the dynamic backend (sglang >= 0.5.18)'
            )
            raise MoverUnavailable("attach", f"copy_mode memfd: {problem}, or another copy_mode")
        use_memfd = all_memfd and wanted in ("auto", "memfd")
        regions = known if use_memfd else [p.Region(r.address, r.length, -1) for r in known]
        if not use_memfd:
            allow_movers()
        attach = self._attach(regions)
        attach.canary_address, attach.canary = ctypes.addressof(self._canary), self._canary.raw
        attach.strided = self.settings.share_across_tp
        attach.numa = self.settings.numa == "auto"
        fds = known_fds if use_memfd else []
        try:
            for mover in self._movers.values():
                self.mode = mover.attach(attach, fds)
            self.mode_reason = "copy_mode" if wanted != "auto" else "host pool is a memfd" if use_memfd else "no memfd"
        except MoverUnavailable as error:
            for mover in self._movers.values():
                mover.close()
            if wanted != "auto":
                raise
            self.mode, self.mode_reason = "segment", f"{'memfd' if use_memfd else 'process_vm'} does not work here: {error}"
            log.warning("copying through the shared segment, which is slower: %s", self.mode_reason)
        if self.mode == "segment" or (self.mode == "process_vm" and in_small_pieces(geometry.runs)):
            self._warm_bounces()
        return self.mode

    # ------------------------------------------------------------------ data calls

    def exists(self, namespace: bytes, hashes: bytes) -> int:
        """How many leading pages of one namespace can be loaded, here or from another node."""
        return self.find([namespace], hashes).runs[0]

    def find(self, leading: Sequence[bytes], hashes: bytes, sparse: Sequence[bytes] = ()) -> p.Found:
        """Which pages of several namespaces can be loaded: leading runs for `leading`, one byte a page for `sparse`. In one
        message; a very long chain in a few, and no further than the shortest run."""
        total = p.Found([0] * len(leading), [b""] * len(sparse))
        if not self.enabled or not hashes:
            return total
        promise_s = self._told.seconds if self._told is not None else 0.0
        deadline = time.monotonic() + (min(LOOKUP_S, self.settings.deadline_s) if promise_s else self.settings.deadline_s)
        pages_at_once = max(1, _MAX_LOOKUP_KEYS // (len(leading) + len(sparse)))
        step = pages_at_once * p.HASH_BYTES
        for at in range(0, len(hashes), step):
            part = hashes[at : at + step]
            left = max(0.001, deadline - time.monotonic())
            question = p.Exists(list(leading), part, list(sparse), left, promise_s, self.client)
            answer, reason = self._queries.ask(question, left)
            count = len(part) // p.HASH_BYTES
            if not isinstance(answer, p.Found):
                self.miss({reason: count})
                return total
            shape = [len(column) for column in answer.columns]
            fits = all(0 <= run <= count for run in answer.runs) and shape == [count] * len(sparse)
            if len(answer.runs) != len(leading) or not fits:
                self.miss({"node_answer": count})
                return total
            if answer.reason:
                self.miss({answer.reason: 1})
            if self._told is not None:
                run, now = min(answer.runs, default=count), time.monotonic()
                columns = [b"\x01" * run for _ in leading] + [column[:run] for column in answer.columns]
                for namespace, here in zip((*leading, *sparse), columns, strict=True):
                    self._told.told(namespace, part, here, now)
            total.runs = [a + b for a, b in zip(total.runs, answer.runs, strict=True)]
            total.columns = [a + b for a, b in zip(total.columns, answer.columns, strict=True)]
            if min(answer.runs, default=count) < count:
                break
        return total

    def transfer(
        self,
        op: str,
        body: Body,
        hashes: bytes,
        pages: array[int] | None,
        addresses: array[int] | None = None,
        deadline: float | None = None,
        touch: bool = True,
    ) -> Outcome:
        """Load or store one page per hash, to or from the memory shared by `share`. `pages` if affine, else `addresses`.

        Returns by `deadline` (`time.monotonic()`; by default `deadline_s` from now). `touch`: the pages count as used now."""
        count = len(hashes) // p.HASH_BYTES
        if not self.enabled:
            return self._settle(Outcome(bytes(count), {"off": count}))
        left = self.settings.deadline_s if deadline is None else deadline - time.monotonic()
        if left < min(_LEAST_BATCH_S, self.settings.deadline_s / 4):
            return self._settle(Outcome(bytes(count), {"deadline": count}), op, body, hashes)
        if self.mode == "segment" or (self.mode == "process_vm" and in_small_pieces(body.runs)):
            flat = addresses if addresses is not None else array("q")
            if addresses is None and pages is not None:
                flat = array("q", [run.address + page * run.stride for page in pages for run in body.runs])
            return self.transfer_through_bounce(op, body, hashes, flat, deadline, touch)
        page_bytes = pages.tobytes() if pages is not None else b""
        address_bytes = addresses.tobytes() if addresses is not None else b""

        def job(budget_s: float) -> p.Transfer:
            return p.Transfer(
                op,
                body.namespace,
                hashes,
                list(body.runs),
                page_bytes,
                budget_s,
                address_bytes,
                group=body.group,
                shared=body.shared,
                touch=touch,
            )

        return self._settle(self._run(self._movers[op], job, count, left), op, body, hashes)

    def transfer_through_bounce(
        self,
        op: str,
        body: Body,
        hashes: bytes,
        addresses: array[int],
        deadline: float | None = None,
        touch: bool = True,
    ) -> Outcome:
        """The same for memory that is not shared with anybody: `addresses` has one entry per run of each page."""
        count = len(hashes) // p.HASH_BYTES
        started = time.monotonic()
        if deadline is None:
            deadline = started + self.settings.deadline_s
        if not self.enabled or not count:
            return self._settle(Outcome(bytes(count), {"off": count} if count else {}))
        if not self._bounce_locks[op].acquire(timeout=max(0.0, deadline - started) / 2):
            return self._settle(Outcome(bytes(count), {"busy": count}), op, body, hashes)
        try:
            if not self.enabled:  # closed while we waited: nothing may touch engine memory any more
                return self._settle(Outcome(bytes(count), {"off": count}))
            return self._settle(self._bounce_rounds(op, body, hashes, addresses, deadline, touch), op, body, hashes)
        finally:
            self._bounce_locks[op].release()

    def _bounce_rounds(
        self, op: str, body: Body, hashes: bytes, addresses: array[int], deadline: float, touch: bool
    ) -> Outcome:
        count = len(hashes) // p.HASH_BYTES
        try:
            bounce = self._bounce(op, self.settings.deadline_s / 2)
            at_once, slot = bounce.slots(body.length)
        except (MoverUnavailable, OSError, ValueError) as error:
            self.quiet(logging.WARNING, "bounce", f"no copy buffer: {error}")
            return Outcome(bytes(count), {error.reason if isinstance(error, MoverUnavailable) else "copy_buffer": count})
        ok = bytearray()
        total = Outcome(b"")
        reasons: Counter[str] = Counter()
        runs = len(body.runs)

        def place(page: int) -> tuple[int, Sequence[int]]:
            return slot.address + page % at_once * slot.stride, addresses[page * runs : (page + 1) * runs]

        for first in range(0, count, at_once):
            batch = range(first, min(first + at_once, count))
            left = deadline - time.monotonic()
            if left < min(_LEAST_BATCH_S, self.settings.deadline_s / 4):
                reasons["deadline"] += len(batch)
                ok += bytes(len(batch))
                continue

            if op == "store" and not all(copy_here(*place(page), body.runs, deadline, out=True) for page in batch):
                reasons["deadline"] += len(batch)
                ok += bytes(len(batch))
                continue
            blob = hashes[first * p.HASH_BYTES : (first + len(batch)) * p.HASH_BYTES]
            numbers = array("q", range(len(batch))).tobytes()

            def job(budget_s: float, blob: bytes = blob, numbers: bytes = numbers) -> p.Transfer:
                return p.Transfer(
                    op,
                    body.namespace,
                    blob,
                    [slot],
                    numbers,
                    budget_s,
                    group=body.group,
                    shared=body.shared,
                    touch=touch,
                )

            part = self._run(self._bounce_movers[op], job, len(batch), max(0.001, deadline - time.monotonic()))
            if op == "load":
                arrived = bytearray(part.ok)
                for index, page in enumerate(batch):
                    if arrived[index] and not copy_here(*place(page), body.runs, deadline, out=False):
                        arrived[index] = 0
                        reasons["deadline"] += 1
                part.ok = bytes(arrived)
            ok += part.ok
            reasons.update(part.reasons)
            total.local_bytes += part.local_bytes
            total.remote_bytes += part.remote_bytes
            total.had += part.had
        total.ok, total.reasons = bytes(ok), dict(reasons)
        return total

    def clear(self, namespace: bytes) -> int:
        """Forget this namespace, everywhere. Other namespaces are not touched. Returns how many objects went here."""
        answer, reason = self._queries.ask(p.Clear(namespace), self.settings.deadline_s)
        if isinstance(answer, p.Cleared):
            return answer.objects
        self.miss({reason: 1})
        return 0

    def touch(self, namespace: bytes, hashes: bytes) -> None:
        """Pages of one chain, head first, count as used now. Said once, and not again if it does not get through."""
        if self.enabled and hashes:
            self._queries.tell(p.Touch(namespace, hashes))

    def status(self) -> p.AdminReport | None:
        answer, _ = self._queries.ask(p.AdminStatus(), self.settings.deadline_s)
        return answer if isinstance(answer, p.AdminReport) else None

    def mover_pids(self) -> dict[str, int | None]:
        movers = self._bounce_movers if self.mode == "segment" else self._movers
        return {role: mover.pid for role, mover in movers.items()}

    def close(self) -> None:
        """Ends the movers (nothing touches engine memory after this) and the connection. The node stays."""
        self.enabled = False
        for mover in (*self._movers.values(), *self._bounce_movers.values()):
            mover.close()
        for role, lock in self._bounce_locks.items():
            with lock:
                bounce = self._bounces.pop(role, None)
                if bounce is not None:
                    bounce.close()
        self._queries.close()

    # ------------------------------------------------------------------ inside

    def _attach(self, regions: list[p.Region]) -> p.Attach:
        """What any mover of this rank is told of its node and its memory."""
        settings = self.settings
        return p.Attach(
            settings.socket,
            os.getpid(),
            self.client,
            regions,
            own_user_only(settings),
            lanes=settings.lanes,
            copy_threads=settings.copy_threads,
        )

    def _warm_bounces(self) -> None:
        """Have the copy buffers and their movers before the first call, which has no time for it. One that does not start now
        is tried again by a call."""
        for role, lock in self._bounce_locks.items() if self.enabled else ():
            with lock, contextlib.suppress(MoverUnavailable, OSError):
                self._bounce(role, START_S)

    def _bounce(self, role: str, timeout_s: float) -> Bounce:
        """The copy buffer and its mover, made on first use (by the caller who holds the role's lock)."""
        bounce = self._bounces.get(role)
        if bounce is None:
            if not self._bounce_retry[role].due():
                raise MoverUnavailable("mover_down", "its mover did not start a moment ago")
            bounce = Bounce(role)
            try:
                self._bounce_movers[role].attach(self._attach([bounce.region]), [bounce.fd], timeout_s=timeout_s)
            except BaseException:
                self._bounce_retry[role].failed()
                bounce.close()
                raise
            self._bounces[role] = bounce
        return bounce

    def _run(self, mover: MoverProcess, job: Callable[[float], p.Transfer], count: int, timeout_s: float) -> Outcome:
        try:
            done = mover.run(job, timeout_s)
        except MoverUnavailable as error:
            text = f"{mover.role} of {count} pages failed: {error} (counted as {error.reason})"
            self.quiet(logging.WARNING, error.reason, text)
            return Outcome(bytes(count), {error.reason: count})
        if len(done.ok) != count:
            return Outcome(bytes(count), {"mover_answer": count})
        return Outcome(done.ok, done.reasons, done.local_bytes, done.remote_bytes, done.had)

    def _settle(self, outcome: Outcome, op: str = "", body: Body | None = None, hashes: bytes = b"") -> Outcome:
        """Every key that is not ok has a reason; what the parts did not name is counted as `other`."""
        missing = outcome.ok.count(0) - sum(outcome.reasons.values())
        if missing > 0:
            outcome.reasons["other"] = outcome.reasons.get("other", 0) + missing
        broken: dict[str, int] = {}
        if self._told is not None and op == "load" and body is not None and 0 in outcome.ok:
            broken = self._told.broken(body.namespace, hashes, outcome.ok, outcome.reasons, time.monotonic())
        if broken and self._told is not None:
            text = (
                f"{sum(broken.values())} pages could not be loaded that SGLang was told of less than {self._told.seconds:g} s "
                f"before ({broken}): it fails the request that counts on them. docs/sglang.md says what to do"
            )
            self.quiet(logging.ERROR, "promise", text)
        self.miss(outcome.reasons, broken)
        return outcome

    def miss(self, reasons: Mapping[str, int], broken: Mapping[str, int] | None = None) -> None:
        """Count misses, and tell the node of them now and then: its metrics are where operators look. `broken`: those of them
        that were promised."""
        reasons = {reason: count for reason, count in reasons.items() if count}
        if not reasons:
            return
        now = time.monotonic()
        with self._reasons_lock:
            self.reasons.update(reasons)
            self.broken.update(broken or {})
            self._unreported.update(reasons)
            self._unreported_broken.update(broken or {})
            if now < self._report_at:
                return
            self._report_at = now + _REPORT_MISSES_EVERY_S
            report, self._unreported = self._unreported, Counter()
            broken, self._unreported_broken = self._unreported_broken, Counter()
        if not self._queries.tell(p.Missed(dict(report), dict(broken))):
            with self._reasons_lock:
                self._unreported.update(report)
                self._unreported_broken.update(broken)
