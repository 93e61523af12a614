"""The mover: a child process of an engine rank that copies pages between the engine's L2 memory and the store nodes.

One mover does one batch at a time for one rank (a rank has one for loads and one for stores). It is a process of its own for
two reasons. The engine's interpreter lock never meets a page: the rank sends one request a batch and waits for one answer.
And it can be fenced: when a call's time is up the rank kills its mover, and the kernel guarantees that no byte lands in
engine memory afterwards, however frozen the mover, the node or the network may have been. The node itself never writes
engine memory.

Started as `python -m hicache_mooncake.client.mover FD`; ends when the engine's end of that socket does.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence

from hicache_mooncake import protocol as p
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import EngineMemory, EngineMemoryError, ForeignMemory, MappedMemory
from hicache_mooncake.transfer.tcp import PeerConnection
from hicache_mooncake.wire import Wire, WireClosed, WireTimeout, connect

_from_node = p.decoder(p.FromNode)
_to_mover = p.decoder(p.ToMover)

_PEER_CONNECT_S = 0.5
_BREAKER_FIRST_S, _BREAKER_MAX_S = 0.5, 8.0
_NO_ROOM_RETRIES_S = (0.01, 0.03)
_POPULATE_BYTES = 16 << 30
"""How much of the node's segment each mover maps ahead; of a larger one the rest is mapped on first use."""


class NodeUnavailable(Exception):
    """The local node did not answer; `reason` is the miss reason to count."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class NodeLink:
    """This mover's connection to the local node, and its mapping of the node's segment. Reconnects by itself."""

    def __init__(self, socket_path: str, role: str, client: str) -> None:
        self._path = socket_path
        self._role = role
        self._client = client
        self._wire: Wire | None = None
        self.segment: Mapping | None = None
        self.node = ""

    def ask(self, message: p.Message, deadline: float) -> p.Message:
        """One request, one answer. A connection that turns out dead is made anew once: the node may have restarted."""
        for attempt in (0, 1):
            fresh = self._wire is None
            wire = self._connected(deadline)
            try:
                wire.send(message, deadline=deadline)
                answer = wire.receive(_from_node, deadline)
            except WireTimeout as error:
                self.drop()
                raise NodeUnavailable("node_timeout", str(error)) from error
            except (WireClosed, p.ProtocolError) as error:
                self.drop()
                if fresh or attempt:
                    raise NodeUnavailable("node_down", str(error)) from error
                continue
            if isinstance(answer, p.Refused):
                raise NodeUnavailable("node_refused", answer.reason)
            assert isinstance(answer, p.Message)
            return answer
        raise AssertionError("unreachable")

    def ask_same(self, message: p.Message, deadline: float) -> p.Message:
        """Like `ask`, but only on the connection that is open: for messages that refer to an earlier answer."""
        if self._wire is None:
            raise NodeUnavailable("node_down", "connection lost")
        wire = self._wire
        try:
            wire.send(message, deadline=deadline)
            answer = wire.receive(_from_node, deadline)
        except (WireTimeout, WireClosed, p.ProtocolError) as error:
            self.drop()
            raise NodeUnavailable("node_timeout" if isinstance(error, WireTimeout) else "node_down", str(error)) from error
        assert isinstance(answer, p.Message)
        return answer

    def tell(self, message: p.Message, deadline: float) -> None:
        """One-way; a failure only costs the connection."""
        if self._wire is None:
            return
        try:
            self._wire.send(message, deadline=deadline)
        except (WireClosed, WireTimeout):
            self.drop()

    def _connected(self, deadline: float) -> Wire:
        if self._wire is not None:
            return self._wire
        try:
            wire = connect(self._path, max(0.001, deadline - time.monotonic()))
        except (WireClosed, WireTimeout) as error:
            raise NodeUnavailable("node_down", str(error)) from error
        try:
            wire.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, self._role, self._client), deadline=deadline)
            welcome = wire.receive(_from_node, deadline)
            if isinstance(welcome, p.Refused):
                raise NodeUnavailable("node_refused", welcome.reason)
            fds = wire.take_fds()
            if not isinstance(welcome, p.Welcome) or len(fds) != 1:
                raise p.ProtocolError("the node's welcome has no segment")
            try:
                segment = Mapping(fds[0], welcome.segment_bytes, writable=self._role == "store")
            finally:
                for fd in fds:
                    os.close(fd)
        except NodeUnavailable:
            wire.close()
            raise
        except WireTimeout as error:
            wire.close()
            raise NodeUnavailable("node_timeout", str(error)) from error
        except (WireClosed, p.ProtocolError, OSError) as error:
            wire.close()
            raise NodeUnavailable("node_down", str(error)) from error
        if self.segment is not None:
            self.segment.close()
        segment.populate_in_background(_POPULATE_BYTES)
        self.segment = segment
        self.node = welcome.node
        self._wire = wire
        return wire

    def drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class Peers:
    """Connections to other nodes' data ports, one each, and a breaker each: a dead peer costs one connect, then nothing."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], PeerConnection] = {}
        self._closed_until: dict[tuple[str, int], tuple[float, float]] = {}

    def get(self, peer: p.Peer, deadline: float) -> tuple[PeerConnection, bool] | None:
        """(connection, is it reused), or None while its breaker is open or when it cannot be reached."""
        key = (peer.host, peer.port)
        connection = self._open.get(key)
        if connection is not None:
            return connection, True
        now = time.monotonic()
        until, pause = self._closed_until.get(key, (0.0, _BREAKER_FIRST_S / 2))
        if now < until:
            return None
        try:
            connection = PeerConnection(peer, min(deadline, now + _PEER_CONNECT_S))
        except (OSError, TimeoutError):
            self.failed(peer, pause)
            return None
        self._open[key] = connection
        return connection, False

    def failed(self, peer: p.Peer, last_pause: float | None = None) -> None:
        key = (peer.host, peer.port)
        connection = self._open.pop(key, None)
        if connection is not None:
            connection.close()
        if last_pause is None:
            last_pause = self._closed_until.get(key, (0.0, _BREAKER_FIRST_S / 2))[1]
        pause = min(last_pause * 2, _BREAKER_MAX_S)
        self._closed_until[key] = (time.monotonic() + pause * random.uniform(0.8, 1.2), pause)

    def drop(self, peer: p.Peer) -> None:
        """Close without blame: the connection was old, or we stopped in mid-body."""
        connection = self._open.pop((peer.host, peer.port), None)
        if connection is not None:
            connection.close()

    def works(self, peer: p.Peer) -> None:
        self._closed_until.pop((peer.host, peer.port), None)


class Batch:
    """Geometry of one Transfer: the run addresses of page i."""

    def __init__(self, job: p.Transfer) -> None:
        self.job = job
        self.count = p.count_hashes(job.hashes)
        self.lengths = [run.length for run in job.runs]
        self.body_bytes = sum(self.lengths)
        self._pages = array("q", job.pages)
        self._addresses = array("q", job.addresses)
        expected = self.count * len(job.runs) if job.addresses else self.count
        if self.body_bytes <= 0 or len(self._addresses or self._pages) != expected:
            raise p.ProtocolError(
                f"batch of {self.count} keys does not match its {len(self._addresses or self._pages)} addresses"
            )

    def addresses(self, i: int) -> Sequence[int]:
        if self._addresses:
            runs = len(self.lengths)
            return self._addresses[i * runs : (i + 1) * runs]
        page = self._pages[i]
        return [run.address + page * run.stride for run in self.job.runs]


class Mover:
    """Carries out batches. One thread, no locks."""

    def __init__(self, memory: EngineMemory, link: NodeLink) -> None:
        self._memory = memory
        self._link = link
        self._peers = Peers()

    def run(self, job: p.Transfer) -> p.Transferred:
        deadline = time.monotonic() + job.budget_s
        batch = Batch(job)
        ok = bytearray(batch.count)
        reasons: Counter[str] = Counter()
        try:
            if job.op == "load":
                local, remote = self._load(batch, ok, reasons, deadline)
                return p.Transferred(bytes(ok), dict(reasons), local, remote)
            local, had = self._store(batch, ok, reasons, deadline)
            return p.Transferred(bytes(ok), dict(reasons), local, 0, had)
        except NodeUnavailable as error:
            reasons[error.reason] += ok.count(0) - sum(reasons.values())
            return p.Transferred(bytes(ok), dict(reasons))

    # ------------------------------------------------------------------ load

    def _load(self, batch: Batch, ok: bytearray, reasons: Counter[str], deadline: float) -> tuple[int, int]:
        job = batch.job
        located = self._link.ask(p.Locate(job.namespace, job.hashes, batch.body_bytes), deadline)
        assert isinstance(located, p.Located)
        segment = self._link.segment
        assert segment is not None
        by_peer: dict[int, list[int]] = {}
        local: list[int] = []
        for i, status in enumerate(located.status):
            if status == p.LOCAL:
                local.append(i)
            elif status == p.REMOTE:
                by_peer.setdefault(located.where[i], []).append(i)
            else:
                reasons["wrong_length" if status == p.WRONG_LENGTH else located.reason or "absent"] += 1
        peer_down: list[str] = []
        # The peers start sending while the local pages are copied.
        requested = [
            (located.peers[at], wanted, connection)
            for at, wanted in by_peer.items()
            if (connection := self._request(located.peers[at], batch, wanted, deadline, reasons, peer_down)) is not None
        ]
        bad = bytearray()
        local_bytes = 0
        for i in local:
            if time.monotonic() > deadline:
                reasons["deadline"] += 1
                continue
            offset = located.where[i]
            body = segment.view[offset : offset + batch.body_bytes]
            try:
                arrived = self._memory.load(body, segment.address + offset, batch.addresses(i), batch.lengths)
            except EngineMemoryError:
                reasons["engine_memory"] += 1
                continue
            if arrived == located.checksum[i]:
                ok[i] = 1
                local_bytes += batch.body_bytes
            else:
                reasons["checksum"] += 1
                bad += job.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES]
        self._link.tell(p.Release(located.pin, job.namespace, bytes(bad)), deadline + 0.1)
        remote_bytes = 0
        for peer, wanted, connection in requested:
            remote_bytes += self._receive(peer, connection, batch, wanted, ok, reasons, deadline, peer_down)
        if peer_down:
            self._link.tell(p.Release(0, peer_down=peer_down), deadline + 0.1)
        return local_bytes, remote_bytes

    def _request(
        self, peer: p.Peer, batch: Batch, wanted: list[int], deadline: float, reasons: Counter[str], peer_down: list[str]
    ) -> PeerConnection | None:
        """Send the Fetch. A reused connection that is dead is made anew once."""
        job = batch.job
        hashes = b"".join(job.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES] for i in wanted)
        fetch = p.Fetch(p.PROTOCOL_MAX, self._link.node, job.namespace, hashes, batch.body_bytes)
        for _attempt in (0, 1):
            got = self._peers.get(peer, deadline)
            if got is None:
                break
            connection, reused = got
            try:
                if reused and _peer_closed(connection.sock):
                    raise ConnectionError("idle connection was closed by the peer")
                connection.request(fetch, deadline)
                return connection
            except (OSError, TimeoutError):
                if not reused:
                    self._peers.failed(peer)
                    break
                self._peers.drop(peer)
        reasons["peer_down"] += len(wanted)
        peer_down.append(peer.node)
        return None

    def _receive(
        self,
        peer: p.Peer,
        connection: PeerConnection,
        batch: Batch,
        wanted: list[int],
        ok: bytearray,
        reasons: Counter[str],
        deadline: float,
        peer_down: list[str],
    ) -> int:
        received, settled = 0, 0
        try:
            reply = connection.reply(deadline)
            if len(reply.status) != len(wanted) or len(reply.checksum) != len(wanted):
                raise p.ProtocolError("reply does not match the request")
            for i, status, checksum in zip(wanted, reply.status, reply.checksum, strict=True):
                if status == p.LOCAL:
                    arrived = self._memory.receive(connection.bound(deadline), batch.addresses(i), batch.lengths)
                    received += batch.body_bytes
                    if arrived == checksum:
                        ok[i] = 1
                    else:
                        reasons["checksum_remote"] += 1
                else:
                    reasons["wrong_length" if status == p.WRONG_LENGTH else "gone_remote"] += 1
                settled += 1
            self._peers.works(peer)
        except (OSError, TimeoutError, p.ProtocolError, EngineMemoryError) as error:
            # Closing is the fence: whatever the peer still sends lands nowhere.
            reason = "engine_memory" if isinstance(error, EngineMemoryError) else "peer_failed"
            if isinstance(error, TimeoutError):
                reason = "deadline"
            if reason == "engine_memory":
                self._peers.drop(peer)
            else:
                self._peers.failed(peer)
                peer_down.append(peer.node)
            reasons[reason] += len(wanted) - settled
        return received

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
        hashes = b"".join(job.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES] for i in todo)
        reserved = self._link.ask(p.Reserve(job.namespace, hashes, batch.body_bytes), deadline)
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
                        checksum = self._memory.store(batch.addresses(i), batch.lengths, body, segment.address + offset)
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


def _peer_closed(sock: socket.socket) -> bool:
    """Between requests nothing may arrive: readable means closed, or out of step."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _attach(wire: Wire, role: str) -> Mover | None:
    """Take the engine's memory over. Answers Attached with the mode, or with the problem, and returns None then."""
    attach = wire.receive(_to_mover)
    if not isinstance(attach, p.Attach):
        raise p.ProtocolError("the first message must be Attach")
    fds = wire.take_fds()
    memory: EngineMemory
    try:
        if all(region.fd >= 0 for region in attach.regions):
            memory, mode = MappedMemory(attach.regions, fds), "memfd"
        else:
            foreign = ForeignMemory(attach.engine_pid, attach.regions)
            _check_canary(foreign, attach)
            memory, mode = foreign, "process_vm"
    except (OSError, IndexError, EngineMemoryError) as error:
        wire.send(p.Attached("", str(error)))
        return None
    finally:
        for fd in fds:
            os.close(fd)
    wire.send(p.Attached(mode))
    return Mover(memory, NodeLink(attach.socket_path, role, attach.client))


def _check_canary(memory: ForeignMemory, attach: p.Attach) -> None:
    """Read the engine's canary and write it back: both directions are allowed, or process_vm is not used at all."""
    size = len(attach.canary)
    buffer = memoryview(bytearray(size))
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer.obj))
    memory.transfer(False, address, [(attach.canary_address, size)])
    if bytes(buffer) != attach.canary:
        raise EngineMemoryError("the canary read through process_vm is not the engine's (another process under this pid?)")
    memory.transfer(True, address, [(attach.canary_address, size)])


def serve(sock: socket.socket, role: str) -> None:
    """Until the engine's end closes."""
    wire = Wire(sock)
    try:
        mover = _attach(wire, role)
        while mover is not None:
            job = wire.receive(_to_mover)
            if not isinstance(job, p.Transfer):
                raise p.ProtocolError("expected Transfer")
            try:
                wire.send(mover.run(job))
            except p.ProtocolError as error:
                wire.send(p.Refused(str(error)))
    except WireClosed:
        pass


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine; the mover ends with it
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    os._exit(0)  # no destructor may wait for a background fault-in


if __name__ == "__main__":
    main()
