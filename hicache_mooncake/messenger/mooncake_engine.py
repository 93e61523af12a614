"""`mooncake.engine.TransferEngine` as SGLang uses it, on this package's transfer engine (docs/transfer-engine.md).

Every method answers as Mooncake's does: 0, or a negative number where it failed, and then one line in the log says why.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.messenger import device_memory
from hicache_mooncake.messenger.options import Options, options
from hicache_mooncake.messenger.pieces import Stretches, batch
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.security import SecurityError
from hicache_mooncake.transfer import engine
from hicache_mooncake.transfer.engine_peer import Peer, Region
from hicache_mooncake.transfer.transport import Op, Pending, TransportError, TransportOptions

NAME = "mooncake"
"""Of every such engine: a session says only where one is."""
FAILED = -1
CONNECT_S = 10.0
PROBE_S = 1.5
FENCE_S = 2.0
"""How long a peer may take to say that nothing of a failed write lands there any more."""
SHARE_S = 1.0
"""How long the news that a peer has registered memory may be under way."""
_MAX_ASYNC = 4096
_DONE, _UNDER_WAY = 1, 0
_log = logging.getLogger("hicache_mooncake.engine")
_GONE = ("peer", "closed")
"""Reasons of a link that has ended."""
_FAILURES = (TransportError, ValueError, OSError, SecurityError)
"""Of operation. Others are bugs of this package, and are logged with where they came from."""


class _Wanted(NamedTuple):
    op: Op
    session: str
    local: Sequence[int]
    remote: Sequence[int]
    lengths: Sequence[int]

    def __str__(self) -> str:
        return f"{self.op} of {len(self.lengths)} pieces, session {self.session}, failed"


class _Began(NamedTuple):
    """A batch under way."""

    wanted: _Wanted
    peer: Peer
    pending: Pending


class TransferEngine:
    """One process's end. Thread-safe: calls for one session run side by side, and none waits for another session's peer.

    Sessions are `host:port`, IPv6 in brackets: what SGLang makes of the host name that it gave to `initialize`, and of
    `get_rpc_port`. Addresses are those of this process and of the peer's. The memory stays the caller's, and must stay where it
    is until it is unregistered.
    """

    def __init__(self) -> None:
        self._say = QuietLog(_log)
        self._lock = threading.Lock()
        self._engine: engine.TransferEngine | None = None
        self._transfer_timeout_s = 30.0
        self._regions: dict[int, Region] = {}
        self._stretches = Stretches([])
        self._numbers = itertools.count(1)
        self._began: dict[int, _Began] = {}

    # ------------------------------------------------------------------ beginning and end

    def initialize(self, hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Listen on `hostname`, an address of this host, and be known by it. See docs/transfer-engine.md for the rest."""
        with self._reporting("initialize", f"the transfer engine cannot start on {hostname}"):
            settings, notices = load_settings(explicit={"node": "off"})
            for notice in notices:
                _log.debug("%s", notice)
            wanted = options(hostname, metadata_server, protocol, device_name, settings, os.environ)
            transport_options = TransportOptions(
                devices=wanted.devices,
                gid_index=settings.gid_index,
                verbs_binding=settings.verbs_binding,
                lanes=settings.lanes,
                max_in_flight=settings.max_in_flight,
                copy_threads=settings.copy_threads,
            )
            with self._lock:
                if self._engine is not None:
                    raise ValueError("it was started before")
                made = _listening(wanted, settings.key_file, transport_options)
                self._engine = made
                self._transfer_timeout_s = settings.transfer_timeout_s
            self._tell(made, wanted, settings)
            return 0
        return FAILED

    def _tell(self, made: engine.TransferEngine, wanted: Options, settings: Settings) -> None:
        no_rdma = made.report().transports.get("verbs")
        if wanted.wants_rdma and no_rdma:
            _log.warning(
                "RDMA was asked for and cannot be used: %s. KV goes by shared memory on one host and by tcp between hosts "
                "(MOONCAKE_PROTOCOL=tcp asks for that)",
                no_rdma,
            )
        usable = ", ".join(scheme for scheme, why in made.report().transports.items() if not why)
        if settings.tls_cert:
            _log.warning("KV that goes to other hosts by this engine is not encrypted, whatever tls_cert says for nodes")
        if settings.key_file:
            who = f"peers prove that they have the key {settings.key_file}"
        elif wanted.without_key == "anybody":
            who = "everybody who reaches it may read and write KV (allow_unauthenticated)"
        else:
            who = "without a key only this host's processes may be its peers: set HICACHE_MOONCAKE_KEY_FILE for other hosts"
        _log.info("transfer engine of hicache-mooncake at %s by %s; %s", made.address.partition("@")[2], usable, who)

    def get_rpc_port(self) -> int:
        with self._reporting("port", "the port of the transfer engine"):
            return int(self._started().address.rpartition(":")[2])
        return FAILED

    def get_engine(self) -> TransferEngine:
        return self

    def close(self) -> int:
        """Mooncake's engine ends with its object; so does this one, or here."""
        with self._lock:
            made, self._engine = self._engine, None
            self._regions, self._stretches = {}, Stretches([])
        if made is not None:
            with self._reporting("close", "closing the transfer engine"):
                made.close()
                return 0
            return FAILED
        return 0

    def __del__(self) -> None:
        if sys.is_finalizing():  # its threads do not run any more, whatever locks they hold; the process's end is the fence
            return
        with contextlib.suppress(Exception):
            self.close()

    # ------------------------------------------------------------------ memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def unregister_memory(self, buffer_addr: int) -> int:
        return self.batch_unregister_memory([buffer_addr])

    def batch_register_memory(self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*") -> int:
        """All of them, or none."""
        made: list[Region] = []
        with self._reporting("register", "memory is not registered"):
            started = self._started()
            if len(buffer_addresses) != len(capacities):
                raise ValueError(f"{len(buffer_addresses)} addresses and {len(capacities)} lengths")
            try:
                cuda = device_memory.driver()
                for address, length in zip(map(int, buffer_addresses), map(int, capacities), strict=True):
                    made.append(self._register(started, address, length, device_memory.is_device(address, cuda)))
            except BaseException:
                for region in made:
                    with contextlib.suppress(TransportError):
                        started.unregister(region)
                raise
            with self._lock:
                self._regions.update((region.address, region) for region in made)
                self._stretches = Stretches((region.address, region.length) for region in self._regions.values())
            return 0
        return FAILED

    def _register(self, started: engine.TransferEngine, address: int, length: int, device: bool) -> Region:
        try:
            return started.register(address, length, device=device)
        except TransportError as error:
            if not device:
                raise
            raise TransportError(
                error.reason,
                f"{length} bytes at {address:#x} are memory of a GPU, which only RDMA reaches here: {error}. Load "
                "nvidia-peermem and see `hicache-mooncake doctor` for the RDMA devices, or install mooncake-transfer-engine "
                "and set HICACHE_MOONCAKE_ENGINE=off",
            ) from error

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """All of them as far as can be. No peer reaches what was unregistered when this returns 0."""
        problems: list[str] = []
        with self._reporting("unregister", "memory is not unregistered"):
            started = self._started()
            for address in map(int, buffer_addresses):
                with self._lock:
                    region = self._regions.pop(address, None)
                    self._stretches = Stretches((each.address, each.length) for each in self._regions.values())
                if region is None:
                    problems.append(f"no memory is registered at {address:#x}")
                    continue
                try:
                    started.unregister(region)
                except TransportError as error:
                    problems.append(str(error))
            if not problems:
                return 0
            raise ValueError("; ".join(problems[:3]))
        return FAILED

    # ------------------------------------------------------------------ transfers

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self._transfer("write", target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self._transfer("read", target_hostname, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """0 when all bytes are in the peer's memory. Otherwise nothing of the call moves any more in either side's memory, but
        that a peer that is stopped or cut off cannot say so: see docs/transfer-engine.md."""
        return self._transfer("write", target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer("read", target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Number of the batch that has begun, or -1. Ask for it: a few thousand are kept."""
        return self._begin_async("write", target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._begin_async("read", target_hostname, buffers, peer_buffer_addresses, lengths)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for all of them: 0, or -1 when one has failed or is not known."""
        codes = [self._end_async(number) for number in batch_ids]
        return 0 if all(code == 0 for code in codes) else FAILED

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self._begin_async("write", target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_check_status(self, batch_id: int) -> int:
        """1: done. 0: under way. -1: failed, or not known."""
        with self._lock:
            began = self._began.get(batch_id)
        if began is not None and not began.pending.done:
            return _UNDER_WAY
        return _DONE if self._end_async(batch_id) == 0 else FAILED

    def send_probe(self, peer_server_name: str) -> int:
        """0 when an engine answers there, on a connection of its own, within a second or two."""
        with self._reporting(f"probe {peer_server_name}", f"no answer from {peer_server_name}", logging.DEBUG):
            self._started().probe(_address(peer_server_name), time.monotonic() + PROBE_S)
            return 0
        return FAILED

    # ------------------------------------------------------------------ how

    def _transfer(self, op: Op, session: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> int:
        wanted = _Wanted(op, session, local, remote, lengths)
        with self._reporting(f"{op} {session}", str(wanted)):
            started = self._started()
            deadline = time.monotonic() + self._transfer_timeout_s
            known = {id(peer) for peer in started.peers}
            peer = self._connect(started, session, deadline)
            try:
                self._end(wanted, peer, self._begin(wanted, peer, deadline))
            except TransportError as error:
                # It may have ended while it was idle, and nobody noticed.
                if error.reason not in _GONE or id(peer) not in known or peer.alive:
                    self._blame(started, wanted, error)
                    raise
                peer = self._connect(started, session, deadline)
                try:
                    self._end(wanted, peer, self._begin(wanted, peer, deadline))
                except TransportError as again:
                    self._blame(started, wanted, again)
                    raise
            return 0
        return FAILED

    def _connect(self, started: engine.TransferEngine, session: str, deadline: float) -> Peer:
        return started.connect(_address(session), min(deadline, time.monotonic() + CONNECT_S))

    def _blame(self, started: engine.TransferEngine, wanted: _Wanted, error: TransportError) -> None:
        if error.reason == "deadline" or error.reason in _GONE:
            started.leave_alone(_address(wanted.session))

    def _begin(self, wanted: _Wanted, peer: Peer, deadline: float) -> Pending:
        """Raises TransportError; nothing has been moved then."""
        until = min(deadline, time.monotonic() + SHARE_S)
        while True:
            heard = peer.heard
            there = Stretches((region.address, region.length) for region in peer.regions.values())
            pieces = batch(wanted.local, wanted.remote, wanted.lengths, self._stretches, there)
            try:
                return peer.submit(wanted.op, pieces, deadline)
            except TransportError as error:
                # What it has registered a moment ago it says on a connection of its own.
                if error.reason != "bounds" or not peer.wait_heard(heard, until):
                    raise

    def _end(self, wanted: _Wanted, peer: Peer, pending: Pending) -> None:
        """Raises TransportError, when nothing of it moves any more."""
        try:
            pending.wait()
        except TransportError as error:
            if wanted.op == "read" or peer.recalls or peer.fence_writes(time.monotonic() + FENCE_S):
                raise
            what = f"the peer did not say within {FENCE_S:g} s that it has stopped taking it in (is it stopped, or cut off?)"
            raise TransportError(error.reason, f"{error}; and {what}") from error

    def _begin_async(self, op: Op, session: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> int:
        wanted = _Wanted(op, session, local, remote, lengths)
        with self._reporting(f"{op} {session}", str(wanted)):
            deadline = time.monotonic() + self._transfer_timeout_s
            with self._lock:
                if len(self._began) >= _MAX_ASYNC:
                    raise ValueError(f"{_MAX_ASYNC} batches have begun whose end nobody has asked for")
            peer = self._connect(self._started(), session, deadline)
            pending = self._begin(wanted, peer, deadline)
            with self._lock:
                number = next(self._numbers)
                self._began[number] = _Began(wanted, peer, pending)
            return number
        return FAILED

    def _end_async(self, number: int) -> int:
        with self._lock:
            began = self._began.pop(number, None)
        if began is None:
            self._say(
                logging.WARNING, "no batch", f"there is no batch {number}: its end was asked for before, or it did not begin"
            )
            return FAILED
        with self._reporting(f"{began.wanted.op} {began.wanted.session}", str(began.wanted)):
            try:
                self._end(*began)
            except TransportError as error:
                self._blame(self._started(), began.wanted, error)
                raise
            return 0
        return FAILED

    def _started(self) -> engine.TransferEngine:
        if self._engine is None:
            raise ValueError("initialize has not been called, or has failed")
        return self._engine

    @contextlib.contextmanager
    def _reporting(self, kind: str, what: str, level: int = logging.WARNING) -> Iterator[None]:
        """What is raised in it becomes a line in the log: the caller returns FAILED after it."""
        try:
            yield
        except _FAILURES as error:
            self._say(level, kind, f"{what}: {error}")
        except Exception as error:
            self._say(logging.ERROR, f"{kind} {error!r}", f"{what}: {error!r}", exc_info=True)


def _listening(wanted: Options, key_file: str, transport_options: TransportOptions) -> engine.TransferEngine:
    """Raises what `engine.TransferEngine` does."""
    for last, listen in enumerate(wanted.listen, 1 - len(wanted.listen)):
        try:
            return engine.TransferEngine(
                NAME,
                listen,
                transports=wanted.transports,
                key_file=key_file,
                options=transport_options,
                advertise=wanted.host,
                without_key=wanted.without_key,
                anonymous=True,
            )
        except OSError:
            if not last:
                raise
    raise AssertionError("no address to listen on")


def _address(session: str) -> str:
    return f"{NAME}@{session}"
