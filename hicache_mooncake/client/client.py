"""The thin client: one request a batch to the local store node or to this rank's movers; no page byte is touched here.

Nothing raises out of the data calls: what fails is a miss with a counted reason, within the deadline.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache_mooncake import protocol as p
from hicache_mooncake.client.embedded import ensure_node
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.client.mover_process import MoverProcess, MoverUnavailable
from hicache_mooncake.config import Settings
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.wire import Wire, WireClosed, WireTimeout, connect

log = logging.getLogger(__name__)

_from_node = p.decoder(p.FromNode)

_RETRY_FIRST_S, _RETRY_MAX_S = 0.1, 2.0
_BOUNCE_BYTES = 64 << 20
_EMBEDDED_START_S = 10.0
_LOG_EVERY_S = 30.0


@dataclass
class Outcome:
    """One batch. `ok` has one byte per key; everything that is 0 has a reason."""

    ok: bytes
    reasons: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    remote_bytes: int = 0
    had: int = 0


class NodeQueries:
    """This rank's own connection to the node, for questions that move no pages. Thread-safe; reconnects by itself."""

    def __init__(self, settings: Settings, client: str, *, embedded: bool) -> None:
        self._settings = settings
        self._client = client
        self._embedded = embedded
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._retry_at = 0.0
        self._retry_pause = _RETRY_FIRST_S
        self._starting = False
        self.node = ""
        self.problem = ""

    def ask(self, message: p.Message, timeout_s: float) -> tuple[p.Message | None, str]:
        """(answer, "") or (None, reason). Never raises, never takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return None, "busy"
        try:
            for attempt in (0, 1):
                fresh = self._wire is None
                wire, reason = self._connected(deadline)
                if wire is None:
                    return None, reason
                try:
                    wire.send(message, deadline=deadline)
                    answer = wire.receive(_from_node, deadline)
                except WireTimeout:
                    self._drop("no answer before the deadline")
                    return None, "node_timeout"
                except (WireClosed, p.ProtocolError) as error:
                    self._drop(str(error))
                    if fresh or attempt:
                        return None, "node_down"
                    self._retry_at = 0.0  # a connection that was good: the node may have restarted, try once at once
                    continue
                if isinstance(answer, p.Refused):
                    self.problem = answer.reason
                    return None, "node_refused"
                assert isinstance(answer, p.Message)
                return answer, ""
            raise AssertionError("unreachable")
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            if self._wire is not None:
                self._wire.close()
                self._wire = None
            self._embedded = False

    def _connected(self, deadline: float) -> tuple[Wire | None, str]:
        if self._wire is not None:
            return self._wire, ""
        now = time.monotonic()
        if now < self._retry_at:
            return None, "node_down"
        try:
            wire = connect(self._settings.socket, max(0.001, deadline - now))
        except (WireClosed, WireTimeout) as error:
            self._drop(str(error))
            self._start_embedded()
            return None, "node_down"
        try:
            wire.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, "query", self._client), deadline=deadline)
            welcome = wire.receive(_from_node, deadline)
        except (WireClosed, WireTimeout, p.ProtocolError) as error:
            wire.close()
            self._drop(str(error))
            return None, "node_timeout" if isinstance(error, WireTimeout) else "node_down"
        if not isinstance(welcome, p.Welcome):
            wire.close()
            self._drop(welcome.reason if isinstance(welcome, p.Refused) else "unexpected answer")
            return None, "node_refused"
        if self.problem:
            log.warning("store node %s is back on %s", welcome.node, self._settings.socket)
        self._wire, self.node, self.problem = wire, welcome.node, ""
        self._retry_pause = _RETRY_FIRST_S
        return wire, ""

    def _drop(self, problem: str) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if not self.problem:
            log.warning(
                "store node on %s does not serve (%s): everything is a miss until it is back. Check `hicache-mooncake status`",
                self._settings.socket,
                problem,
            )
        self.problem = problem
        self._retry_at = time.monotonic() + self._retry_pause
        self._retry_pause = min(self._retry_pause * 2, _RETRY_MAX_S)

    def _start_embedded(self) -> None:
        """A killed embedded node is started again, beside the calls and not inside one."""
        if not self._embedded or self._starting:
            return
        self._starting = True

        def work() -> None:
            try:
                if ensure_node(self._settings, _EMBEDDED_START_S):
                    self._retry_at = 0.0
            finally:
                self._starting = False

        threading.Thread(target=work, name="embedded-node", daemon=True).start()


class Bounce:
    """The third way to reach memory: a memfd shared with the mover, and a copy between it and the real place in this process.

    Slower under a busy interpreter than the two others, and needs nothing from the system. Not thread-safe.
    """

    def __init__(self, role: str) -> None:
        self.fd = create_memfd(f"hicache-mooncake-{role}", _BOUNCE_BYTES)
        self.mapping = Mapping(self.fd, _BOUNCE_BYTES, writable=True)
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
    """One rank's access to the pool. All methods are thread-safe; loads, stores and lookups run beside each other."""

    def __init__(self, settings: Settings, client: str) -> None:
        self.settings = settings
        self.client = client
        self.embedded = settings.node == "embedded"
        self.enabled = settings.node != "off"
        self.mode = ""
        self.mode_reason = ""
        self.reasons: Counter[str] = Counter()
        self._reasons_lock = threading.Lock()
        self._logged_at: dict[str, float] = {}
        self._queries = NodeQueries(settings, client, embedded=self.embedded)
        self._movers = {role: MoverProcess(role) for role in ("load", "store")}
        self._bounce_movers = {role: MoverProcess(role) for role in ("load", "store")}
        self._bounces: dict[str, Bounce] = {}
        self._bounce_locks = {role: threading.Lock() for role in ("load", "store")}
        self._regions: list[p.Region] = []
        self._fds: list[int] = []
        self._canary = ctypes.create_string_buffer(os.urandom(64), 64)

    # ------------------------------------------------------------------ set-up

    def start(self) -> None:
        """Make sure that a node is there, where it is ours to start. Never raises: without a node everything is a miss."""
        if self.enabled and self.embedded and not ensure_node(self.settings, _EMBEDDED_START_S):
            log.error("no store node on %s: running without L3 until there is one", self.settings.socket)

    def share(self, geometry: PoolGeometry) -> str:
        """Share a pool's memory with the movers; returns the mode in use (`memfd`, `process_vm`, `segment`).

        Raises MoverUnavailable when the mode that the operator forces does not work here.
        """
        base = len(self._fds)
        for region in geometry.regions:
            fd = region.fd + base if region.fd >= 0 else -1
            moved = p.Region(region.address, region.length, fd, region.fd_offset)
            if moved.address not in {known.address for known in self._regions}:
                self._regions.append(moved)
        self._fds.extend(geometry.fds)
        wanted = self.settings.copy_mode
        all_memfd = all(region.fd >= 0 for region in self._regions)
        if wanted == "segment":
            self.mode, self.mode_reason = "segment", "copy_mode"
            return self.mode
        if wanted == "memfd" and not all_memfd:
            raise MoverUnavailable(
                "attach",
                "copy_mode memfd: this engine's host pool is not in a memfd. Use --hicache-storage-backend mooncake with this "
                'package\'s plugin, or "allocator": "shm" with the dynamic backend (sglang >= 0.5.18), or another copy_mode',
            )
        use_memfd = all_memfd and wanted in ("auto", "memfd")
        regions = self._regions if use_memfd else [p.Region(r.address, r.length, -1) for r in self._regions]
        attach = p.Attach(
            socket_path=self.settings.socket,
            engine_pid=os.getpid(),
            client=self.client,
            regions=regions,
            canary_address=ctypes.addressof(self._canary),
            canary=self._canary.raw,
        )
        fds = self._fds if use_memfd else []
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
        return self.mode

    # ------------------------------------------------------------------ data calls

    def exists(self, namespace: bytes, hashes: bytes) -> int:
        """How many leading pages can be loaded, here or from another node."""
        if not self.enabled or not hashes:
            return 0
        answer, reason = self._queries.ask(p.Exists(namespace, hashes), self.settings.deadline_s)
        if isinstance(answer, p.Found):
            if answer.reason:
                self._count({answer.reason: 1})
            return min(answer.prefix, len(hashes) // p.HASH_BYTES)
        self._count({reason: len(hashes) // p.HASH_BYTES})
        return 0

    def transfer(
        self,
        op: str,
        namespace: bytes,
        hashes: bytes,
        runs: Sequence[p.Run],
        pages: array[int] | None,
        addresses: array[int] | None,
    ) -> Outcome:
        """Load or store one page per hash, to or from the memory shared by `share`. `pages` if affine, else `addresses`."""
        count = len(hashes) // p.HASH_BYTES
        if not self.enabled:
            return self._settle(Outcome(bytes(count), {"off": count}))
        if self.mode == "segment":
            flat = addresses if addresses is not None else array("q")
            if addresses is None and pages is not None:
                flat = array("q", [run.address + page * run.stride for page in pages for run in runs])
            return self.transfer_through_bounce(op, namespace, hashes, [run.length for run in runs], flat)
        page_bytes = pages.tobytes() if pages is not None else b""
        address_bytes = addresses.tobytes() if addresses is not None else b""

        def job(budget_s: float) -> p.Transfer:
            return p.Transfer(op, namespace, hashes, list(runs), page_bytes, budget_s, address_bytes)

        return self._settle(self._run(self._movers[op], job, count, self.settings.deadline_s))

    def transfer_through_bounce(
        self, op: str, namespace: bytes, hashes: bytes, lengths: Sequence[int], addresses: array[int]
    ) -> Outcome:
        """The same for memory that is not shared with anybody: `addresses` has one entry per run of each page."""
        count = len(hashes) // p.HASH_BYTES
        deadline = time.monotonic() + self.settings.deadline_s
        if not self.enabled or not count:
            return self._settle(Outcome(bytes(count), {"off": count} if count else {}))
        if not self._bounce_locks[op].acquire(timeout=self.settings.deadline_s / 2):
            return self._settle(Outcome(bytes(count), {"busy": count}))
        try:
            return self._settle(self._bounce_rounds(op, namespace, hashes, lengths, addresses, deadline))
        finally:
            self._bounce_locks[op].release()

    def _bounce_rounds(
        self, op: str, namespace: bytes, hashes: bytes, lengths: Sequence[int], addresses: array[int], deadline: float
    ) -> Outcome:
        count = len(hashes) // p.HASH_BYTES
        try:
            bounce = self._bounce(op)
            at_once, slot = bounce.slots(sum(lengths))
        except (MoverUnavailable, OSError, ValueError) as error:
            self._log_once("bounce", f"no copy buffer: {error}")
            return Outcome(bytes(count), {error.reason if isinstance(error, MoverUnavailable) else "copy_buffer": count})
        ok = bytearray()
        total = Outcome(b"")
        reasons: Counter[str] = Counter()
        runs = len(lengths)
        for first in range(0, count, at_once):
            batch = range(first, min(first + at_once, count))
            left = deadline - time.monotonic()
            if left <= 0.02:
                reasons["deadline"] += len(batch)
                ok += bytes(len(batch))
                continue
            if op == "store":
                for index, page in enumerate(batch):
                    self._copy(
                        slot.address + index * slot.stride, addresses[page * runs : (page + 1) * runs], lengths, out=True
                    )
            blob = hashes[first * p.HASH_BYTES : (first + len(batch)) * p.HASH_BYTES]
            numbers = array("q", range(len(batch))).tobytes()

            def job(budget_s: float, blob: bytes = blob, numbers: bytes = numbers) -> p.Transfer:
                return p.Transfer(op, namespace, blob, [slot], numbers, budget_s)

            part = self._run(self._bounce_movers[op], job, len(batch), left)
            if op == "load":
                for index, page in enumerate(batch):
                    if part.ok[index]:
                        at = slot.address + index * slot.stride
                        self._copy(at, addresses[page * runs : (page + 1) * runs], lengths, out=False)
            ok += part.ok
            reasons.update(part.reasons)
            total.local_bytes += part.local_bytes
            total.remote_bytes += part.remote_bytes
            total.had += part.had
        total.ok, total.reasons = bytes(ok), dict(reasons)
        return total

    @staticmethod
    def _copy(slot: int, addresses: Sequence[int], lengths: Sequence[int], *, out: bool) -> None:
        at = slot
        for address, length in zip(addresses, lengths, strict=True):
            ctypes.memmove(at, address, length) if out else ctypes.memmove(address, at, length)
            at += length

    def clear(self, namespace: bytes) -> int:
        """Forget this namespace, everywhere. Other namespaces are not touched. Returns how many objects went here."""
        answer, reason = self._queries.ask(p.Clear(namespace), self.settings.deadline_s)
        if isinstance(answer, p.Cleared):
            return answer.objects
        self._count({reason: 1})
        return 0

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

    def _bounce(self, role: str) -> Bounce:
        bounce = self._bounces.get(role)
        if bounce is None:
            bounce = Bounce(role)
            attach = p.Attach(self.settings.socket, os.getpid(), self.client, [bounce.region])
            try:
                self._bounce_movers[role].attach(attach, [bounce.fd], timeout_s=max(self.settings.deadline_s, 1.0))
            except MoverUnavailable:
                bounce.close()
                raise
            self._bounces[role] = bounce
        return bounce

    def _run(self, mover: MoverProcess, job: object, count: int, timeout_s: float) -> Outcome:
        try:
            done = mover.run(job, timeout_s)  # type: ignore[arg-type]
        except MoverUnavailable as error:
            self._log_once(error.reason, f"{mover.role} of {count} pages failed: {error}")
            return Outcome(bytes(count), {error.reason: count})
        if len(done.ok) != count:
            return Outcome(bytes(count), {"mover_answer": count})
        return Outcome(done.ok, done.reasons, done.local_bytes, done.remote_bytes, done.had)

    def _settle(self, outcome: Outcome) -> Outcome:
        """Every key that is not ok has a reason; what the parts did not name is counted as `other`."""
        missing = outcome.ok.count(0) - sum(outcome.reasons.values())
        if missing > 0:
            outcome.reasons["other"] = outcome.reasons.get("other", 0) + missing
        self._count(outcome.reasons)
        return outcome

    def _count(self, reasons: dict[str, int]) -> None:
        if reasons:
            with self._reasons_lock:
                self.reasons.update(reasons)

    def _log_once(self, what: str, text: str) -> None:
        """The first of a kind at once, then at most one every half minute: a failing part must not fill the disk."""
        now = time.monotonic()
        if now - self._logged_at.get(what, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_at[what] = now
            log.warning("%s (counted as %s; not logged again for %.0f s)", text, what, _LOG_EVERY_S)
