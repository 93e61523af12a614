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
import os
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence

from hicache_mooncake import protocol as p
from hicache_mooncake.client.batch import Batch, Landing
from hicache_mooncake.client.fetch import RemoteReads
from hicache_mooncake.client.lanes import Lanes
from hicache_mooncake.client.node_link import NodeLink, NodeUnavailable
from hicache_mooncake.client.over_links import OverLinks
from hicache_mooncake.client.remote import FetchPlan
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import EngineMemory, EngineMemoryError, ForeignMemory, MappedMemory
from hicache_mooncake.transfer.peers import Peers
from hicache_mooncake.wire import Wire, WireClosed

_to_mover = p.decoder(p.ToMover)

_NO_ROOM_RETRIES_S = (0.01, 0.03)
_WAIT_SHARE = 0.5
"""Of the time that is left: how long a rank waits for another that fetches the same pages, before it fetches them itself."""


class Mover:
    """Carries out batches. One thread, no locks."""

    def __init__(self, memory: EngineMemory, link: NodeLink, engine_pid: int, lanes: int = 0) -> None:
        """`lanes`: as the setting."""
        self.memory = memory
        self._link = link
        self._peers = Peers()
        self._lanes = Lanes(lanes)
        # A child that the engine forks holds the engine's end of our socket open: its end alone does not tell that it is gone.
        self._engine_pid = engine_pid
        self._engine: int | None = None
        with contextlib.suppress(OSError):  # not in every sandbox: then we look who our parent is
            self._engine = os.pidfd_open(engine_pid)

    def close(self) -> None:
        """Let go of everything but the link. A mover's process just ends."""
        self._peers.close()
        self.memory.close()
        if self._engine is not None:
            os.close(self._engine)
            self._engine = None

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
        self._peers.identify(self._link.data_key, self._link.node)
        links = OverLinks(located, pages, batch.body_bytes)
        plan = FetchPlan(deadline, lambda peer, count: self._lanes.of(peer, count * batch.body_bytes), links.choose)
        local: list[tuple[int, int, int]] = []
        waiting: list[int] = []
        landing = Landing(segment, located.txn)
        room = iter(located.room)
        others = located.others or itertools.repeat(-1, len(pages))
        for i, status, where, checksum, other in zip(
            pages, located.status, located.where, located.checksum, others, strict=True
        ):
            if status == p.LOCAL:
                local.append((i, where, checksum))
            elif status in (p.REMOTE, p.FETCH):
                plan.add(i, [located.peers[holder] for holder in (where, other) if holder >= 0])
                if status == p.FETCH:
                    landing.offsets[i] = next(room)
            elif status == p.WAIT:
                waiting.append(i)
            else:
                reasons["wrong_length" if status == p.WRONG_LENGTH else located.reason or "absent"] += 1
        reads = RemoteReads(self._peers, self.memory, batch, landing, ok, plan, self._link.node, self._lanes, links)
        try:
            # Peers that we are connected to start sending while the local pages are copied, and the others are connected to.
            reads.begin()
            loaded, bad = self._copy_local(batch, segment, local, ok, reasons, deadline, reads)
            self._link.tell(p.Release(located.pin, job.namespace, bad, loaded=loaded), deadline + 0.1)
            if self._link.segment is not segment:
                landing.offsets.clear()  # the node has given the room back with the connection
                links.give_up()
            reads.run()
        finally:
            reads.close()
            if links.landing:  # before the Commit, for which the node wants to know what may still be written
                landed = p.Landed(links.landing, links.quiet(), links.received_bytes)
                self._link.tell(landed, deadline + 0.1)
        reasons.update(plan.reasons)
        if landing.offsets:
            spoilt = links.spoilt()
            whole = [None if i in spoilt else landing.checksums.get(i) for i in landing.offsets]
            commit = p.Commit(landing.txn, bytes(c is not None for c in whole), [c or 0 for c in whole])
            with contextlib.suppress(NodeUnavailable):  # the pages are in the engine all the same
                self._link.ask_same(commit, deadline + 0.1)
        if plan.blamed:
            self._link.tell(p.Release(0, peer_down=plan.blamed), deadline + 0.1)
        return (loaded * batch.body_bytes, reads.received_bytes), waiting

    def _copy_local(
        self,
        batch: Batch,
        segment: Mapping,
        local: list[tuple[int, int, int]],
        ok: bytearray,
        reasons: Counter[str],
        deadline: float,
        reads: RemoteReads,
    ) -> tuple[int, bytes]:
        """Pages that are here, as (page, offset, checksum): how many came whole, and the hashes of those that are damaged."""
        loaded = 0
        bad = bytearray()
        for i, offset, checksum in local:
            reads.poke()
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
                bad += batch.job.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES]
        return loaded, bytes(bad)

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
                    mover = Mover(memory, link, job.engine_pid, job.lanes)
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
