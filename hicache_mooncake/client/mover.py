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
from collections.abc import Mapping as Map
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache_mooncake import protocol as p
from hicache_mooncake.client.batch import Batch, Landing, Layouts
from hicache_mooncake.client.cold_reads import ColdReads
from hicache_mooncake.client.copies import Copies
from hicache_mooncake.client.fetch import RemoteReads
from hicache_mooncake.client.lanes import Lanes
from hicache_mooncake.client.node_link import NodeLink, NodeUnavailable
from hicache_mooncake.client.over_links import OverLinks
from hicache_mooncake.client.remote import Doubt, FetchPlan
from hicache_mooncake.client.siblings import Neighbour, Siblings
from hicache_mooncake.client.storing import LOAD_PARTS, SETTLE_S, Storing, in_parts
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import EngineMemory, EngineMemoryError, ForeignMemory, MappedMemory
from hicache_mooncake.transfer.numa import Nearness
from hicache_mooncake.transfer.peers import Peers
from hicache_mooncake.wire import Wire, WireClosed

_to_mover = p.decoder(p.ToMover)

_SIBLING_SHARE = 0.25
"""Of the time that is left: how long a neighbour on this host is waited for, before its pages are asked for by tcp."""
_NEIGHBOURS_S = 30.0
"""How often a mover without work looks whether it still needs them: what they hold stays while it is connected."""
_WAIT_SHARE = 0.5
"""Of the time that is left: how long a rank waits for another that fetches the same pages, before it fetches them itself."""
_COLD_SHARE = 0.75
"""Of the time that is left: how long pages of the cold tier may take where others are still to come from other nodes."""
_RECALLED_SHARE = 0.5
"""Of the time that is left: how long pages may take to come from where a lookup found them, before masters are asked."""
_RECALL_LEAST_S = 0.5
"""With less time left they are asked at once: who was given a share of it could not be blamed for silence."""


@dataclass
class _Loaded:
    """What came of a load, or of some of its pages."""

    here_bytes: int = 0
    elsewhere_bytes: int = 0
    cold_bytes: int = 0
    """Read from the cold tier, of those from here."""
    waiting: list[int] = field(default_factory=list)
    """Pages that another rank is fetching."""
    doubtful: dict[int, Doubt] = field(default_factory=dict)
    """Pages that did not come from where a lookup found them, or from the cold tier. They are in no reasons yet."""

    def add(self, more: _Loaded) -> None:
        self.here_bytes += more.here_bytes
        self.elsewhere_bytes += more.elsewhere_bytes
        self.cold_bytes += more.cold_bytes
        self.waiting += more.waiting
        self.doubtful |= more.doubtful


class Mover:
    """Carries out batches. One thread, no locks; copies of large pages may have threads of their own."""

    def __init__(
        self,
        memory: EngineMemory,
        link: NodeLink,
        engine_pid: int,
        lanes: int = 0,
        client: str = "",
        copy_threads: int = 0,
    ) -> None:
        """`lanes` and `copy_threads`: as the settings. `client`: as in Hello."""
        self.memory = memory
        self._link = link
        self._peers = Peers()
        self._lanes = Lanes(lanes)
        self._layouts = Layouts()
        self._client = client
        self._siblings = Siblings(client)
        self._copies = Copies(copy_threads)
        self._unsettled: list[p.Message] = []
        self._storing = Storing(link, self._copies, self._unsettled)
        # A child that the engine forks holds the engine's end of our socket open: its end alone does not tell that it is gone.
        self._engine_pid = engine_pid
        self._unsettled_near: list[tuple[Neighbour, p.Release]] = []
        self._all_here = False
        """All pages of the last load were local: those of the next will be."""
        self._engine: int | None = None
        with contextlib.suppress(OSError):  # not in every sandbox: then we look who our parent is
            self._engine = os.pidfd_open(engine_pid)

    def close(self) -> None:
        """Let go of everything but the link. A mover's process just ends."""
        self._peers.close()
        self._siblings.close()
        self._copies.close()
        self.memory.close()
        if self._engine is not None:
            os.close(self._engine)
            self._engine = None

    def warm(self) -> None:
        """Have what the first batch needs: the connection to the node, and its segment."""
        self._link.warm()

    def wait(self, wire: Wire) -> bool:
        """Until there is a batch, or the engine is gone (False). Meanwhile a node that ends is let go of."""
        ready: set[int] = set()
        while True:
            self._siblings.drop(ready)
            poll = select.poll()
            for fd in (wire.fileno(), *self._siblings.filenos()):
                poll.register(fd, select.POLLIN)
            if self._engine is not None:
                poll.register(self._engine, select.POLLIN)
            node = self._link.idle_fileno()
            if node is not None:
                poll.register(node, select.POLLIN)
            look_s = 1.0 if self._engine is None else _NEIGHBOURS_S if self._siblings.filenos() else None
            ready = {fd for fd, _ in poll.poll(None if look_s is None else look_s * 1000)}
            if self._engine in ready or (self._engine is None and os.getppid() != self._engine_pid):
                return False
            if node in ready:
                self._link.drop()
            if wire.fileno() in ready:
                return True

    def run(self, job: p.Transfer) -> p.Transferred:
        deadline = time.monotonic() + job.budget_s
        batch = Batch(job, self._layouts)
        ok = bytearray(batch.count)
        reasons: Counter[str] = Counter()
        try:
            if job.op == "load":
                done = self._load(batch, ok, reasons, deadline)
                return p.Transferred(
                    bytes(ok), dict(reasons), done.here_bytes, done.elsewhere_bytes, id=job.id, cold_bytes=done.cold_bytes
                )
            local, had = self._storing.store(self.memory, batch, ok, reasons, deadline)
            return p.Transferred(bytes(ok), dict(reasons), local, 0, had, job.id)
        except NodeUnavailable as error:
            reasons[error.reason] += ok.count(0) - sum(reasons.values())
            return p.Transferred(bytes(ok), dict(reasons), id=job.id)

    def settle(self) -> None:
        """What the node is still to be told of the last batch: nothing that the rank's answer waits for. To be called after
        every batch, however it ended."""
        for message in self._unsettled:
            self._link.tell(message, time.monotonic() + SETTLE_S)
        self._unsettled.clear()
        near, self._unsettled_near = self._unsettled_near, []
        for neighbour, release in near:
            self._siblings.tell(neighbour, release)
        if apart := self._siblings.take_apart():
            self._link.tell(p.Release(0, apart=apart), time.monotonic() + SETTLE_S)

    # ------------------------------------------------------------------ load

    def _load(self, batch: Batch, ok: bytearray, reasons: Counter[str], deadline: float) -> _Loaded:
        everything = list(range(batch.count))
        # Pages of other nodes are asked for in one question: a master answers it, and their nodes begin to send.
        parts = in_parts(everything, batch.body_bytes, LOAD_PARTS) if self._all_here and not batch.job.shared else [everything]
        done = self._load_parts(batch, parts, ok, reasons, deadline)
        if done.doubtful:
            done.add(self._load_again(batch, done.doubtful, ok, reasons, deadline))
        if waiting := done.waiting:  # another rank fetches them for all. If it does not come to an end, they are fetched anew
            wait_s = max(0.0, deadline - time.monotonic()) * _WAIT_SHARE
            located = self._link.ask(self._locate(batch, waiting, deadline, wait_s=wait_s), deadline)
            done.add(self._load_located(batch, waiting, located, ok, reasons, deadline))
        return done

    def _load_again(
        self, batch: Batch, doubtful: Map[int, Doubt], ok: bytearray, reasons: Counter[str], deadline: float
    ) -> _Loaded:
        """Masters may know better by now where these pages are. Without their answer it stays at why they did not come."""
        pages = list(doubtful)
        try:
            located = self._link.ask(self._locate(batch, pages, deadline, again=True), deadline)
        except NodeUnavailable:
            reasons.update(doubt.why for doubt in doubtful.values())
            return _Loaded()
        return self._load_located(batch, pages, located, ok, reasons, deadline, doubtful)

    def _load_parts(
        self, batch: Batch, parts: list[list[int]], ok: bytearray, reasons: Counter[str], deadline: float
    ) -> _Loaded:
        """Load these parts of the batch. While one part is copied the node looks the next one up."""
        questions = [self._locate(batch, part, deadline, shared=batch.job.shared) for part in parts]
        answers = [self._link.ask(questions[0], deadline)]
        for question in questions[1:]:
            self._link.ask_ahead(question, deadline)
        done = _Loaded()
        self._all_here = True
        for number, part in enumerate(parts):
            if number == len(answers):
                answers.append(self._link.take(deadline))
            located = answers[number]
            assert isinstance(located, p.Located)
            if located.status.count(p.LOCAL) < len(part):
                self._all_here = False
                answers += [self._link.take(deadline) for _ in parts[len(answers) :]]  # the node is asked more for these
            done.add(self._load_located(batch, part, located, ok, reasons, deadline))
        if len(parts) > 1 and batch.job.touch:  # the head was asked for first, and must go last
            self._unsettled.append(p.Touch(batch.job.namespace, batch.job.hashes))
        return done

    def _locate(
        self,
        batch: Batch,
        pages: Sequence[int],
        deadline: float,
        *,
        shared: bool = False,
        wait_s: float = 0.0,
        again: bool = False,
    ) -> p.Locate:
        job = batch.job
        hashes = job.hashes if len(pages) == batch.count else p.select_hashes(job.hashes, pages)
        left = max(0.0, deadline - time.monotonic() - wait_s)
        return p.Locate(
            job.namespace,
            hashes,
            batch.body_bytes,
            shared,
            job.group,
            wait_s,
            job.touch,
            left,
            links=True,
            recall=not wait_s and not again and left >= _RECALL_LEAST_S,
            again=again,
            cold=not again,
            reader=self._client,
        )

    def _load_located(
        self,
        batch: Batch,
        pages: Sequence[int],
        located: p.Message,
        ok: bytearray,
        reasons: Counter[str],
        deadline: float,
        before: Map[int, Doubt] | None = None,
    ) -> _Loaded:
        """Load pages that the node has said where to find. Those in `before` did not come by a recalled answer."""
        job = batch.job
        assert isinstance(located, p.Located)
        segment = self._link.segment
        if segment is None:  # the connection was lost while another part was loaded
            raise NodeUnavailable("node_down", "connection lost")
        self._peers.identify(self._link.data_key, self._link.node, self._link.tls)
        before = before or {}
        links = OverLinks(located, pages, batch.body_bytes)
        cold = ColdReads(located, pages)
        now = time.monotonic()
        plan = FetchPlan(
            deadline,
            lambda peer, count: self._lanes.of(peer, count * batch.body_bytes),
            links.choose,
            now + max(0.0, deadline - now) * _RECALLED_SHARE if located.recalled else None,
            before,
        )
        local: list[tuple[int, int, int]] = []
        near: dict[int, list[int]] = {}
        holders: dict[int, list[p.Peer]] = {}
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
                holders[i] = [located.peers[holder] for holder in (where, other) if holder >= 0]
                if status == p.REMOTE and holders[i][0].socket:
                    near.setdefault(where, []).append(i)
                else:
                    plan.add(i, holders[i])
                if status == p.FETCH:
                    landing.offsets[i] = next(room)
            elif status == p.WAIT:
                waiting.append(i)
            elif status not in (p.READ, p.READ_ON):
                absent = "wrong_length" if status == p.WRONG_LENGTH else located.reason or "absent"
                reasons[before[i].why if i in before else absent] += 1
        reads = RemoteReads(
            self._peers, self.memory, batch, landing, ok, plan, self._link.node, self._lanes, links, self._client
        )
        try:
            asked = self._ask_siblings(batch, [(located.peers[at], some) for at, some in near.items()], deadline)
            for i in (i for neighbour, some, _ in asked if neighbour is None for i in some):
                plan.add(i, holders[i])
            # Peers that we are connected to start sending while the local pages are copied, and the others are connected to.
            reads.begin()
            loaded, bad = self._copy_local(batch, segment, local, ok, reasons, deadline, reads)
            release = p.Release(located.pin, job.namespace, bad, loaded=loaded)
            for neighbour, some, until in asked:
                if neighbour is not None:
                    came = self._copy_near(batch, neighbour, some, until, ok, deadline, reads)
                    loaded += came or 0
                    for i in some:
                        if not ok[i]:  # by tcp; of who did not answer last, since it may hang
                            plan.add(i, holders[i] if came is not None else holders[i][1:] + holders[i][:1])
            if cold.pages:
                stays = self._link.segment is segment  # else the room went back with the connection
                now = time.monotonic()
                until = deadline if plan.done else now + (deadline - now) * _COLD_SHARE
                cold.load(self._link.cold, self.memory, batch, segment if stays else None, ok, until, reads.poke)
                release.bad_cold = cold.bad
            if plan.done and not plan.doubtful and not cold.failed and not bad:
                self._unsettled.append(release)
            else:  # the others may take long
                self._link.tell(release, deadline + 0.1)
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
        if cold_commit := cold.commit():
            with contextlib.suppress(NodeUnavailable):
                self._link.ask_same(cold_commit, deadline + 0.1)
        if plan.blamed:
            self._link.tell(p.Release(0, peer_down=plan.blamed), deadline + 0.1)
        return _Loaded(
            (loaded + cold.loaded) * batch.body_bytes,
            reads.received_bytes,
            cold.loaded * batch.body_bytes,
            waiting,
            plan.doubtful | cold.failed,
        )

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
        for pages, copied in self._copies.pages(self.memory.load_pages, batch, segment, local, deadline):
            reads.poke()
            for (i, _, checksum), arrived in zip(pages, copied, strict=True):
                if arrived == checksum:
                    ok[i] = 1
                    loaded += 1
                elif isinstance(arrived, str):
                    reasons[arrived] += 1
                else:
                    reasons["checksum"] += 1
                    bad += batch.job.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES]
        return loaded, bytes(bad)

    def _ask_siblings(
        self, batch: Batch, near: list[tuple[p.Peer, list[int]]], deadline: float
    ) -> list[tuple[Neighbour | None, list[int], float]]:
        """Ask neighbours for these pages: (who answers, or None where nobody does, the pages, until when to wait for it)."""
        asked: list[tuple[Neighbour | None, list[int], float]] = []
        job = batch.job
        for peer, pages in near:
            now = time.monotonic()
            until = now + max(0.0, deadline - now) * _SIBLING_SHARE
            hashes = p.select_hashes(job.hashes, pages)
            question = p.Locate(job.namespace, hashes, batch.body_bytes, touch=job.touch, here_only=True)
            asked.append((self._siblings.ask(peer, question, until), pages, until))
        return asked

    def _copy_near(
        self,
        batch: Batch,
        neighbour: Neighbour,
        pages: list[int],
        until: float,
        ok: bytearray,
        deadline: float,
        reads: RemoteReads,
    ) -> int | None:
        """Pages of a neighbour on this host, from its segment: how many came whole, or None when it did not answer. Those that
        did not come are asked for elsewhere, where their reasons are counted."""
        now = time.monotonic()
        answer = self._siblings.answer(neighbour, until, now + (deadline - now) / 2)
        if answer is None:
            return None
        located, segment = answer
        local = [
            (i, where, checksum)
            for i, status, where, checksum in zip(pages, located.status, located.where, located.checksum, strict=False)
            if status == p.LOCAL and 0 <= where <= segment.length - batch.body_bytes
        ]
        loaded, bad = self._copy_local(batch, segment, local, ok, Counter(), deadline, reads)
        release = p.Release(located.pin, batch.job.namespace, bad, loaded=loaded)
        if bad:
            self._siblings.tell(neighbour, release)
        else:
            self._unsettled_near.append((neighbour, release))
        return loaded


def _attach(wire: Wire, attach: p.Attach, former: EngineMemory | None, placed: str) -> EngineMemory | None:
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
    wire.send(p.Attached(mode, placed=placed))
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
    near = Nearness()
    try:
        while mover is None or mover.wait(wire):
            job = wire.receive(_to_mover)
            if isinstance(job, p.Attach):
                placed = near.move_to(job.engine_pid, [(r.address, r.length) for r in job.regions]) if job.numa else ""
                memory = _attach(wire, job, mover.memory if mover else None, placed)
                if memory is None:
                    return
                if mover is None:
                    link = NodeLink(job.socket_path, role, job.client, own_user=job.own_user)
                    mover = Mover(memory, link, job.engine_pid, job.lanes, job.client, job.copy_threads)
                mover.memory = memory
                mover.warm()
                continue
            if mover is None or not isinstance(job, p.Transfer):
                raise p.ProtocolError("the first message must be Attach, and the others Attach or Transfer")
            try:
                wire.send(mover.run(job))
            except p.ProtocolError as error:
                wire.send(p.Refused(str(error)))
            finally:
                mover.settle()
    except WireClosed:
        pass


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine; the mover ends with it
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy, where it is needed, must not start one thread a core
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    os._exit(0)  # no destructor may wait for a background fault-in


if __name__ == "__main__":
    main()
