"""The mover: a child process of an engine rank that copies pages between the engine's L2 memory and the store nodes.

One mover does one batch at a time for one rank (a rank has one for loads and one for stores). It is a process of its own for
two reasons. The engine's interpreter lock never meets a page: the rank sends one request a batch and waits for one answer.
And it can be fenced: when a call's time is up the rank kills its mover, and the kernel guarantees that no byte lands in
engine memory afterwards, however frozen the mover, the node or the network may have been. The node itself never writes
engine memory.

Started as `python -m hicache_mooncake.client.mover FD`; ends when the engine's end of that socket does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import math
import os
import select
import signal
import socket
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import BLAME_AFTER_S
from hicache_mooncake.client.node_link import NodeLink, NodeUnavailable
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import (
    BodyLayout,
    EngineMemory,
    EngineMemoryError,
    ForeignMemory,
    MappedMemory,
    Source,
    fill,
)
from hicache_mooncake.transfer.peers import Peers, peer_closed
from hicache_mooncake.transfer.tcp import PeerConnection
from hicache_mooncake.wire import Wire, WireClosed

_to_mover = p.decoder(p.ToMover)

_MIN_FETCH_S = 0.005
_CONNECTING_S = 0.5
"""For all peers of a batch that have to be connected to, together."""
_NO_ROOM_RETRIES_S = (0.01, 0.03)
_WAIT_SHARE = 0.5
"""Of the time that is left: how long a rank waits for another that fetches the same pages, before it fetches them itself."""


class Fetching:
    """Pages asked for from one peer, whose answer is still to be read."""

    def __init__(self, peer: p.Peer, connection: PeerConnection, wanted: list[int], fetch_id: int) -> None:
        self.fetch_id = fetch_id
        self.peer = peer
        self.connection = connection
        self.wanted = wanted
        self.asked_at = time.monotonic()


class Landing:
    """Where in the node's segment pages from other nodes go first, for all ranks of this host. `checksums` has those that came
    whole. Not to be written to once the connection to the node has gone: the room is somebody else's then."""

    def __init__(self, segment: Mapping, txn: int) -> None:
        self.segment = segment
        self.txn = txn
        self.offsets: dict[int, int] = {}
        self.checksums: dict[int, int] = {}


_MAX_BODY_BYTES = 4 << 30
_MAX_DIMS = 8


class Batch:
    """Geometry of one Transfer: the run addresses of page i. Raises ProtocolError for one that cannot be."""

    def __init__(self, job: p.Transfer) -> None:
        self.job = job
        self.count = p.count_hashes(job.hashes)
        for run in job.runs:
            _check_run(run)
        self.body_bytes = sum(run.length for run in job.runs)
        if not 0 < self.body_bytes <= _MAX_BODY_BYTES:
            raise p.ProtocolError(f"page bodies of {self.body_bytes} bytes")
        self.layout = BodyLayout(job.runs)
        self._pages = array("q", job.pages)
        self._addresses = array("q", job.addresses)
        expected = self.count * len(job.runs) if job.addresses else self.count
        if len(self._addresses or self._pages) != expected:
            raise p.ProtocolError(
                f"batch of {self.count} keys does not match its {len(self._addresses or self._pages)} addresses"
            )

    def seed(self, i: int) -> int:
        return checksum_seed(self.job.namespace, self.job.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES])

    def addresses(self, i: int) -> Sequence[int]:
        if self._addresses:
            runs = len(self.job.runs)
            return self._addresses[i * runs : (i + 1) * runs]
        page = self._pages[i]
        return [run.address + page * run.stride for run in self.job.runs]


def _check_run(run: p.Run) -> None:
    counts = [count for count, _ in run.dims]
    steps = [step for _, step in run.dims]
    if run.length <= 0 or len(run.dims) > _MAX_DIMS or min(counts, default=1) <= 0 or min(steps, default=1) <= 0:
        raise p.ProtocolError(f"a run of {run.length} bytes with counts {counts} and steps {steps}")
    if run.length % math.prod(counts):
        raise p.ProtocolError(f"a run of {run.length} bytes cannot be {counts} equal pieces")


class Mover:
    """Carries out batches. One thread, no locks."""

    def __init__(self, memory: EngineMemory, link: NodeLink, engine_pid: int) -> None:
        self.memory = memory
        self._link = link
        self._peers = Peers()
        self._last_fetch = 0
        # A child that the engine forks holds the engine's end of our socket open: its end alone does not tell that it is gone.
        self._engine_pid = engine_pid
        self._engine: int | None = None
        with contextlib.suppress(OSError):  # not in every sandbox: then we look who our parent is
            self._engine = os.pidfd_open(engine_pid)

    def wait(self, wire: Wire) -> bool:
        """Until there is a batch, or the engine is gone (False). Meanwhile a node that ends is let go of."""
        while True:
            poll = select.poll()
            poll.register(wire.fileno(), select.POLLIN)
            if self._engine is not None:
                poll.register(self._engine, select.POLLIN)
            node = self._link.idle_fileno()
            if node is not None:
                poll.register(node, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(None if self._engine is not None else 1000)}
            if self._engine in ready or (self._engine is None and os.getppid() != self._engine_pid):
                return False
            if node in ready:
                self._link.drop()
            if wire.fileno() in ready:
                return True

    def run(self, job: p.Transfer) -> p.Transferred:
        deadline = time.monotonic() + job.budget_s
        batch = Batch(job)
        ok = bytearray(batch.count)
        reasons: Counter[str] = Counter()
        try:
            if job.op == "load":
                local, remote = self._load(batch, ok, reasons, deadline)
                return p.Transferred(bytes(ok), dict(reasons), local, remote, id=job.id)
            local, had = self._store(batch, ok, reasons, deadline)
            return p.Transferred(bytes(ok), dict(reasons), local, 0, had, job.id)
        except NodeUnavailable as error:
            reasons[error.reason] += ok.count(0) - sum(reasons.values())
            return p.Transferred(bytes(ok), dict(reasons), id=job.id)

    # ------------------------------------------------------------------ load

    def _load(self, batch: Batch, ok: bytearray, reasons: Counter[str], deadline: float) -> tuple[int, int]:
        """Returns (bytes that were here, bytes that came from other nodes)."""
        here, waiting = self._load_some(batch, range(batch.count), ok, reasons, deadline, shared=batch.job.shared)
        if waiting:  # another rank fetches them for all. If it does not come to an end, they are fetched anew
            wait_s = max(0.0, deadline - time.monotonic()) * _WAIT_SHARE
            more, _ = self._load_some(batch, waiting, ok, reasons, deadline, shared=False, wait_s=wait_s)
            here = (here[0] + more[0], here[1] + more[1])
        return here

    def _load_some(
        self,
        batch: Batch,
        pages: Sequence[int],
        ok: bytearray,
        reasons: Counter[str],
        deadline: float,
        *,
        shared: bool,
        wait_s: float = 0.0,
    ) -> tuple[tuple[int, int], list[int]]:
        """Load these pages of the batch: (bytes from here and from elsewhere), and those that another rank is fetching."""
        job = batch.job
        hashes = job.hashes if len(pages) == batch.count else p.select_hashes(job.hashes, pages)
        left = deadline - time.monotonic()
        question = p.Locate(
            job.namespace, hashes, batch.body_bytes, shared, job.group, wait_s, job.touch, max(0.0, left - wait_s)
        )
        located = self._link.ask(question, deadline)
        assert isinstance(located, p.Located)
        segment = self._link.segment
        assert segment is not None
        by_peer: dict[tuple[str, int], tuple[p.Peer, list[int]]] = {}
        local: list[tuple[int, int, int]] = []
        waiting: list[int] = []
        landing = Landing(segment, located.txn)
        room = iter(located.room)
        for i, status, where, checksum in zip(pages, located.status, located.where, located.checksum, strict=True):
            if status == p.LOCAL:
                local.append((i, where, checksum))
            elif status in (p.REMOTE, p.FETCH):
                peer = located.peers[where]
                by_peer.setdefault((peer.host, peer.port), (peer, []))[1].append(i)
                if status == p.FETCH:
                    landing.offsets[i] = next(room)
            elif status == p.WAIT:
                waiting.append(i)
            else:
                reasons["wrong_length" if status == p.WRONG_LENGTH else located.reason or "absent"] += 1
        peer_down: list[str] = []
        fetches: list[Fetching] = []
        # Peers that we are connected to start sending while the local pages are copied; others are connected to afterwards,
        # since one that does not answer must not cost the pages that are here.
        connected, others = self._peers.split(list(by_peer.values()))
        for peer, wanted in connected:
            self._request(peer, batch, wanted, deadline, reasons, peer_down, fetches)
        bad = bytearray()
        loaded = 0
        for i, offset, checksum in local:
            if time.monotonic() > deadline:
                reasons["deadline"] += 1
                continue
            body = segment.view[offset : offset + batch.body_bytes]
            try:
                arrived = self.memory.load(body, segment.address + offset, batch.addresses(i), batch.layout, batch.seed(i))
            except EngineMemoryError:
                reasons["engine_memory"] += 1
                continue
            if arrived == checksum:
                ok[i] = 1
                loaded += 1
            else:
                reasons["checksum"] += 1
                bad += job.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES]
        self._link.tell(p.Release(located.pin, job.namespace, bytes(bad), loaded=loaded), deadline + 0.1)
        connecting_until = min(deadline, time.monotonic() + _CONNECTING_S)
        for peer, wanted in others:
            self._request(peer, batch, wanted, deadline, reasons, peer_down, fetches, connecting_until)
        if self._link.segment is not segment:
            landing.offsets.clear()  # the node has given the room back with the connection
        remote_bytes = self._receive_all(fetches, batch, landing, ok, reasons, deadline, peer_down)
        if landing.offsets:
            whole = [landing.checksums.get(i) for i in landing.offsets]
            commit = p.Commit(landing.txn, bytes(c is not None for c in whole), [c or 0 for c in whole])
            with contextlib.suppress(NodeUnavailable):  # the pages are in the engine all the same
                self._link.ask_same(commit, deadline + 0.1)
        if peer_down:
            self._link.tell(p.Release(0, peer_down=peer_down), deadline + 0.1)
        return (loaded * batch.body_bytes, remote_bytes), waiting

    def _request(
        self,
        peer: p.Peer,
        batch: Batch,
        wanted: list[int],
        deadline: float,
        reasons: Counter[str],
        peer_down: list[str],
        fetches: list[Fetching],
        connecting_until: float = 0.0,
    ) -> None:
        """Send the Fetch. A reused connection that is dead is made anew once."""
        job = batch.job
        if time.monotonic() + _MIN_FETCH_S > deadline:
            reasons["deadline"] += len(wanted)
            return
        self._last_fetch += 1
        hashes = p.select_hashes(job.hashes, wanted)
        fetch = p.Fetch(p.PROTOCOL_MAX, self._link.node, job.namespace, hashes, batch.body_bytes, self._last_fetch, job.touch)
        connecting_until = connecting_until or min(deadline, time.monotonic() + _CONNECTING_S)
        for _attempt in (0, 1):
            reused = False
            try:
                got = self._peers.get(peer, connecting_until)
                if got is None:
                    break  # its breaker is open
                connection, reused = got
                if reused and peer_closed(connection.sock):
                    raise ConnectionError("idle connection was closed by the peer")
                connection.request(fetch, deadline)
                fetches.append(Fetching(peer, connection, wanted, self._last_fetch))
                return
            except (OSError, TimeoutError):
                if not reused:
                    self._peers.failed(peer)
                    peer_down.append(peer.node)
                    break
                self._peers.drop(peer)
        reasons["peer_down"] += len(wanted)

    def _receive_all(
        self,
        fetches: list[Fetching],
        batch: Batch,
        landing: Landing,
        ok: bytearray,
        reasons: Counter[str],
        deadline: float,
        peer_down: list[str],
    ) -> int:
        """Read the peers' answers as they become ready, so that a slow one does not eat the others' time. Returns bytes."""
        received = 0
        poll = select.poll()
        waiting = {fetching.connection.sock.fileno(): fetching for fetching in fetches}
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            left = deadline - time.monotonic()
            ready = poll.poll(max(left, 0) * 1000)
            if not ready:
                for fetching in waiting.values():
                    self._late(fetching.peer, fetching.asked_at, peer_down)
                    reasons["deadline"] += len(fetching.wanted)
                break
            for fd, _ in ready:
                poll.unregister(fd)
                received += self._receive(waiting.pop(fd), batch, landing, ok, reasons, deadline, peer_down)
        return received

    def _receive(
        self,
        fetching: Fetching,
        batch: Batch,
        landing: Landing,
        ok: bytearray,
        reasons: Counter[str],
        deadline: float,
        peer_down: list[str],
    ) -> int:
        peer, connection, wanted = fetching.peer, fetching.connection, fetching.wanted
        received, settled = 0, 0
        started = time.monotonic()
        try:
            reply = connection.reply(deadline)
            if reply.id != fetching.fetch_id or not len(reply.status) == len(reply.checksum) == len(wanted):
                raise p.ProtocolError("reply does not match the request")
            held: list[tuple[int, int]] = []
            for i, status, checksum in zip(wanted, reply.status, reply.checksum, strict=True):
                if status == p.LOCAL:
                    held.append((i, checksum))
                else:
                    reasons["wrong_length" if status == p.WRONG_LENGTH else "gone_remote"] += 1
                    settled += 1
            bodies = self._bodies(connection.source(deadline), batch, [i for i, _ in held], landing)
            for (i, checksum), arrived in zip(held, bodies, strict=True):
                received += batch.body_bytes
                if arrived == checksum:
                    ok[i] = 1
                    if i in landing.offsets:
                        landing.checksums[i] = checksum
                else:
                    reasons["checksum_remote"] += 1
                settled += 1
            self._peers.works(peer)
        # Closing is the fence in each of these: whatever the peer still sends lands nowhere.
        except EngineMemoryError:
            self._peers.drop(peer)
            reasons["engine_memory"] += len(wanted) - settled
        except TimeoutError:
            self._late(peer, started, peer_down)
            reasons["deadline"] += len(wanted) - settled
        except (OSError, p.ProtocolError):
            self._peers.failed(peer)
            peer_down.append(peer.node)
            reasons["peer_failed"] += len(wanted) - settled
        return received

    def _bodies(self, source: Source, batch: Batch, pages: Sequence[int], landing: Landing) -> Iterator[int]:
        """Receive these pages into the engine, those with a place in the segment through it. Yields the checksum of each as it
        has arrived in the engine."""
        for through_segment, group in itertools.groupby(pages, key=lambda i: i in landing.offsets):
            members = list(group)
            if not through_segment:
                places, seeds = [batch.addresses(i) for i in members], [batch.seed(i) for i in members]
                yield from self.memory.receive(source, places, batch.layout, seeds)
                continue
            for i in members:
                offset = landing.offsets[i]
                body = landing.segment.view[offset : offset + batch.body_bytes]
                fill(source, [body])
                at = landing.segment.address + offset
                yield self.memory.load(body, at, batch.addresses(i), batch.layout, batch.seed(i))

    def _late(self, peer: p.Peer, since: float, peer_down: list[str]) -> None:
        if time.monotonic() - since < BLAME_AFTER_S:
            self._peers.drop(peer)
            return
        self._peers.failed(peer)
        peer_down.append(peer.node)

    # ------------------------------------------------------------------ store

    def _store(self, batch: Batch, ok: bytearray, reasons: Counter[str], deadline: float) -> tuple[int, int]:
        """All keys, in rounds: what found no room is tried again shortly after, while there is time."""
        todo = list(range(batch.count))
        stored_bytes, had = 0, 0
        for pause in (*_NO_ROOM_RETRIES_S, None):
            refused, copied, already = self._store_once(batch, todo, ok, reasons, deadline)
            stored_bytes += copied
            had += already
            if not refused or pause is None or time.monotonic() + pause > deadline:
                if refused:
                    reasons["no_room"] += len(refused)
                break
            time.sleep(pause)
            todo = refused
        return stored_bytes, had

    def _store_once(
        self, batch: Batch, todo: list[int], ok: bytearray, reasons: Counter[str], deadline: float
    ) -> tuple[list[int], int, int]:
        job = batch.job
        hashes = p.select_hashes(job.hashes, todo)
        reserved = self._link.ask(p.Reserve(job.namespace, hashes, batch.body_bytes, job.group), deadline)
        assert isinstance(reserved, p.Reserved)
        segment = self._link.segment
        assert segment is not None
        refused: list[int] = []
        written: list[int] = []
        whole = bytearray()
        checksums: list[int] = []
        had = 0
        for i, status, offset in zip(todo, reserved.status, reserved.where, strict=True):
            if status == p.HAVE:
                ok[i] = 1
                had += 1
            elif status == p.REFUSED:
                refused.append(i)
            else:
                written.append(i)
                checksum, good = 0, 0
                if time.monotonic() > deadline:
                    reasons["deadline"] += 1
                else:
                    body = segment.view[offset : offset + batch.body_bytes]
                    try:
                        at = segment.address + offset
                        checksum = self.memory.store(batch.addresses(i), batch.layout, body, at, batch.seed(i))
                        good = 1
                    except EngineMemoryError:
                        reasons["engine_memory"] += 1
                whole.append(good)
                checksums.append(checksum)
        copied = 0
        if written:
            committed = self._link.ask_same(p.Commit(reserved.txn, bytes(whole), checksums), deadline + 0.1)
            if not isinstance(committed, p.Committed):
                raise NodeUnavailable("node_refused", "commit refused")
            for i, good, done in zip(written, whole, committed.ok, strict=False):
                if done:
                    ok[i] = 1
                    copied += batch.body_bytes
                elif good:
                    reasons["not_committed"] += 1
        return refused, copied, had


def _attach(wire: Wire, attach: p.Attach, former: EngineMemory | None) -> EngineMemory | None:
    """Take the engine's memory over, in place of what it shared before. Answers Attached with the mode, or with the problem,
    and returns None then."""
    fds = wire.take_fds()
    if attach.strided:
        importlib.import_module("numpy")
    memory: EngineMemory
    try:
        if all(region.fd >= 0 for region in attach.regions):
            memory, mode = MappedMemory(attach.regions, fds, former if isinstance(former, MappedMemory) else None), "memfd"
        else:
            foreign = ForeignMemory(attach.engine_pid, attach.regions)
            _check_canary(foreign, attach)
            memory, mode = foreign, "process_vm"
            if former is not None:
                former.close()
    except (OSError, IndexError, EngineMemoryError) as error:
        wire.send(p.Attached("", str(error)))
        return None
    finally:
        for fd in fds:
            os.close(fd)
    wire.send(p.Attached(mode))
    return memory


def _check_canary(memory: ForeignMemory, attach: p.Attach) -> None:
    """Read the engine's canary and write it back: both directions are allowed, or process_vm is not used at all."""
    size = len(attach.canary)
    buffer = memoryview(bytearray(size))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer.obj))
    memory.transfer(False, address, [(attach.canary_address, size)])
    if bytes(buffer) != attach.canary:
        raise EngineMemoryError("the canary read through process_vm is not the engine's (another process under this pid?)")
    memory.transfer(True, address, [(attach.canary_address, size)])


def serve(sock: socket.socket, role: str) -> None:
    """Until the engine's end closes, or shares memory that cannot be reached."""
    wire = Wire(sock)
    mover: Mover | None = None
    try:
        while mover is None or mover.wait(wire):
            job = wire.receive(_to_mover)
            if isinstance(job, p.Attach):
                memory = _attach(wire, job, mover.memory if mover else None)
                if memory is None:
                    return
                if mover is None:
                    link = NodeLink(job.socket_path, role, job.client, own_user=job.own_user)
                    mover = Mover(memory, link, job.engine_pid)
                mover.memory = memory
                continue
            if mover is None or not isinstance(job, p.Transfer):
                raise p.ProtocolError("the first message must be Attach, and the others Attach or Transfer")
            try:
                wire.send(mover.run(job))
            except p.ProtocolError as error:
                wire.send(p.Refused(str(error)))
    except WireClosed:
        pass


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine; the mover ends with it
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy, where it is needed, must not start one thread a core
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    os._exit(0)  # no destructor may wait for a background fault-in


if __name__ == "__main__":
    main()
