"""The node's TCP port: other hosts' movers ask for pages by key and get them straight from the segment; other nodes push pages.

A page is pinned while it is sent. A reader that stops reading is cut off at the send deadline, and its pins with it. The room
that pages are pushed into belongs to the push: it is freed by the thread that wrote to it, and by nobody else.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import xxhash

from hicache_mooncake import protocol as p
from hicache_mooncake.cold.index import Place
from hicache_mooncake.cold.tier import ColdTier
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.node.core import NodeCore, Served, Taking
from hicache_mooncake.node.links import Links
from hicache_mooncake.node.rooms import Rooms
from hicache_mooncake.node.sending import Sent
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.security import HANDSHAKE_S
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import fill
from hicache_mooncake.transfer.tls import DataSocket, Tls, TlsSocket

log = logging.getLogger(__name__)

_MAX_READERS = 8192
"""One a rank of each other host."""
_MAX_UNPROVEN = 512
"""Strangers may take these places for a while, and no others."""
_SEND_DEADLINE_S = 10.0
_TAKE_DEADLINE_S = 20.0
_LINK_SEND_S = 5.0
"""Writing over a link: its reader has long given up when this has passed."""
_COLD_PATIENCE_S = 0.5
"""With a disk from which nothing comes: what is in DRAM waits in the same answer, and its reader a second at most."""
_IDLE_S = 600.0
_STOP_S = 2.0
_CHUNK = 256 << 10
_MAX_TOGETHER = 512
"""Bodies that are received by one call."""


class Holder(Protocol):
    """Whose pages are served: a node."""

    name: str
    core: NodeCore
    lock: threading.Lock
    """Held around every call of the core."""
    segment: Mapping
    links: Links
    rooms: Rooms
    cold: ColdTier | None
    data_key: bytes
    """What proves membership; empty: nothing does."""
    tls: Tls | None
    """Without it connections are in the clear."""

    def new_owner(self) -> int: ...

    def changed(self) -> None:
        """The masters should hear of it."""


class DataServer:
    """A thread per reader. Counters are written under `_lock`."""

    def __init__(self, node: Holder, listener: socket.socket) -> None:
        self._node = node
        self._listener = listener
        self._lock = threading.Lock()
        self._readers: set[DataSocket] = set()
        self._unproven = 0
        """Of them, those that have not proved yet that they belong to the cluster."""
        self._stopping = False
        self._quiet = QuietLog(log)
        self.sent_pages = 0
        self.sent_bytes = 0
        self.failed_readers = 0
        self.refused_readers = 0
        self._sending = 0
        """Reads under way; this and `_sent_at` are written under the node's lock."""
        self._sent_at = float("-inf")

    def start(self) -> None:
        threading.Thread(target=self._accept, name="data-accept", daemon=True).start()

    def stop(self) -> None:
        with self._lock:
            self._stopping = True  # from here on nobody is let in: readers that were cut off come back at once
            readers = list(self._readers)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing it would not wake the thread that accepts
        for sock in readers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # The segment is unmapped next: nobody may be writing to it.
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            with self._lock:
                if not self._readers:
                    break
            time.sleep(0.005)

    def report(self) -> dict[str, int | float | str | bool]:
        with self._lock:
            return {
                "remote_readers": len(self._readers),
                "remote_sent_pages": self.sent_pages,
                "remote_sent_bytes": self.sent_bytes,
                "remote_failed_readers": self.failed_readers,
                "remote_refused_readers": self.refused_readers,
            }

    def quiet_for(self) -> float:
        """Seconds since somebody read last."""
        with self._node.lock:
            return 0.0 if self._sending else time.monotonic() - self._sent_at

    def _accept(self) -> None:
        while not self._stopping:
            try:
                raw, _ = self._listener.accept()
                tcp.prepare(raw)
                sock: DataSocket = raw
                if self._node.tls is not None:
                    sock = TlsSocket(self._node.tls.server_context, raw, server_side=True)
            except OSError:
                if self._stopping or self._listener.fileno() < 0:
                    return
                time.sleep(0.05)
                continue
            with self._lock:
                full = self._stopping or len(self._readers) >= _MAX_READERS or self._unproven >= _MAX_UNPROVEN
                if full:
                    self.refused_readers += 1
                else:
                    self._readers.add(sock)
                    self._unproven += 1
            if full:
                self._turn_away(sock, "it ends" if self._stopping else "it has as many connections as it can serve")
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="data-reader", daemon=True).start()
            except RuntimeError as error:  # no more threads for this user or container: not the end of the port
                with self._lock:
                    self._readers.discard(sock)
                    self._unproven -= 1
                    self.refused_readers += 1
                self._turn_away(sock, str(error))
                self._quiet(logging.ERROR, "thread", f"a reader was turned away: {error}. Raise the limit of processes")
                time.sleep(0.05)

    def _turn_away(self, sock: DataSocket, why: str) -> None:
        """Say why, so that whoever reads does not take this node for broken. Under TLS nothing can be said before a handshake,
        for which there is no time here."""
        if not isinstance(sock, TlsSocket):
            tcp.refuse(sock, f"node {self._node.name} takes no more readers now: {why}", full=True)
        sock.close()

    def _serve(self, sock: DataSocket) -> None:
        try:
            try:
                deadline = time.monotonic() + HANDSHAKE_S
                if isinstance(sock, TlsSocket):
                    sock.handshake(deadline)
                proven = tcp.accept_proof(sock, self._node.data_key, self._node.name, deadline)
            finally:
                with self._lock:
                    self._unproven -= 1
            while True:
                try:
                    message = tcp.receive_message(sock, tcp.request_decoder, time.monotonic() + _IDLE_S)
                except TimeoutError:
                    return  # idle: the reader connects again when it needs to
                match message:
                    case p.Fetch():
                        self._answer(sock, message)
                    case p.Push():
                        self._take(sock, message)
                    case p.Link():
                        self._check_version(sock, message.version, message.requester)
                        if self._node.links.accept(sock, message, proven):
                            return
                    case _:
                        raise p.ProtocolError(f"unexpected {type(message).__name__}")
        except ConnectionError:
            pass
        except (OSError, TimeoutError, p.ProtocolError) as error:
            if not self._stopping:
                with self._lock:
                    self.failed_readers += 1
                self._quiet(logging.WARNING, "reader", f"a reader's connection ended: {error}")
        except Exception:
            log.exception("a reader's connection ended by an internal error")
        finally:
            with self._lock:
                self._readers.discard(sock)
            sock.close()

    def _answer(self, sock: DataSocket, fetch: p.Fetch) -> None:
        deadline = time.monotonic() + _SEND_DEADLINE_S
        tcp.set_timeouts(sock, _SEND_DEADLINE_S)
        self._check_version(sock, fetch.version, fetch.requester)
        node = self._node
        owner = node.new_owner()
        with node.lock:
            served = node.core.fetch(owner, fetch, time.monotonic())
            self._sending += 1
        sent, linked = 0, False
        try:
            cold = self._in_cold(fetch, served.reply)
            reply = self._send_over_link(fetch, served) if fetch.link and not cold else served.reply
            linked = reply.linked
            segment = node.segment.view
            bodies = [] if linked else [segment[at : at + fetch.length] for at in served.offsets]
            if cold:
                self._send_with_cold(sock, fetch, reply, bodies, cold, deadline)
            else:
                tcp.send_bodies(sock, [memoryview(tcp.frame(reply)), *bodies], deadline)  # the reader is woken once for all
            sent = len(served.offsets)
        finally:
            with node.lock:
                node.core.fetched(owner, served, sent)
                self._sending -= 1
                self._sent_at = time.monotonic()
        if linked:
            return  # it is counted where links are
        with self._lock:
            self.sent_pages += sent
            self.sent_bytes += sent * fetch.length

    def _in_cold(self, fetch: p.Fetch, reply: p.FetchReply) -> dict[int, Place]:
        """Where in the cold tier those are that are not in DRAM."""
        cold = self._node.cold
        missing = [i for i, status in enumerate(reply.status) if status == p.MISS]
        if cold is None or not missing:
            return {}
        places = cold.locate(fetch.namespace, p.split(p.select_hashes(fetch.hashes, missing)), fetch.length)
        return {i: place for i, place in zip(missing, places, strict=True) if place is not None}

    def _send_with_cold(
        self,
        sock: DataSocket,
        fetch: p.Fetch,
        reply: p.FetchReply,
        bodies: Sequence[memoryview],
        cold: dict[int, Place],
        deadline: float,
    ) -> None:
        """The answer, and the bodies in the order of their keys, from DRAM and from the disk. It says of those that cannot be
        read before the first that can that they are not here, which are all while the disk hangs. For one that cannot be read
        after that zeros go out: the reader sees by its checksum that it did not come."""
        assert self._node.cold is not None
        there = dict(cold)
        wanted = [(fetch.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES], place) for i, place in cold.items()]
        with contextlib.closing(self._node.cold.read(fetch.namespace, wanted, deadline, _COLD_PATIENCE_S)) as reading:
            body = None
            for i in cold:
                body = next(reading)
                if body is not None:
                    break
                del there[i]
            queue = [memoryview(tcp.frame(_with_cold(reply, there)))]
            here = iter(bodies)
            for i, each in enumerate(reply.status):
                if i in there:
                    tcp.send_bodies(sock, [*queue, memoryview(bytes(fetch.length)) if body is None else body], deadline)
                    queue = []
                    body = next(reading, None)
                elif each == p.LOCAL:
                    queue.append(next(here))
        tcp.send_bodies(sock, queue, deadline)
        with self._lock:
            self.sent_pages += len(there)
            self.sent_bytes += len(there) * fetch.length

    def _send_over_link(self, fetch: p.Fetch, served: Served) -> p.FetchReply:
        """Write what is here straight into the reader's segment, if that can be: the answer says so."""
        reply = served.reply
        if len(fetch.into) != len(reply.status):
            raise p.ProtocolError(f"{len(fetch.into)} places for {len(reply.status)} pages")
        places = [place for place, status in zip(fetch.into, reply.status, strict=True) if status == p.LOCAL]
        until = time.monotonic() + _LINK_SEND_S
        done = self._node.links.send(fetch.link, fetch.requester, served.offsets, places, fetch.length, until)
        return msgspec.structs.replace(reply, linked=done is Sent.WHOLE, link_failed=done is Sent.FAILED)

    def _take(self, sock: DataSocket, push: p.Push) -> None:
        """Pages that another node gives away: what there is room for, each checked before it counts."""
        deadline = time.monotonic() + _TAKE_DEADLINE_S
        tcp.set_timeouts(sock, _SEND_DEADLINE_S)
        self._check_version(sock, push.version, push.requester)
        node = self._node
        owner = node.new_owner()
        linked = False
        try:
            with node.lock:
                taking = node.core.push_offer(owner, push, time.monotonic())
            linked = bool(push.link and taking.offsets) and node.links.begin(push.link, push.requester)
            if linked:
                whole = self._take_over_link(sock, push, taking, owner, deadline)
            else:
                tcp.send_message(sock, taking.reply)
                if not taking.offsets:
                    return
                places = [(offset, seed) for offset, _, seed in _expected(push, taking)]
                came = _receive(tcp.receiver(sock, deadline), node.segment.view, places, push.length)
                whole = bytearray(arrived == checksum for arrived, checksum in zip(came, taking.checksums, strict=True))
            if 0 in whole:
                text = f"{whole.count(0)} of {len(whole)} pages that node {push.requester} pushed had a wrong checksum"
                self._quiet(logging.ERROR, "push checksum", text)
            with node.lock:
                done = node.core.push_done(owner, taking, bytes(whole), push.length)
            node.changed()
            tcp.set_timeouts(sock, _SEND_DEADLINE_S)
            tcp.send_message(sock, p.Pushed(done, push.id))
        finally:
            if linked:
                node.links.done(push.link)
            with node.lock:
                node.core.drop_owner(owner)

    def _take_over_link(self, sock: DataSocket, push: p.Push, taking: Taking, owner: int, deadline: float) -> bytearray:
        """The giver writes to the room of `taking`, and says when it has. Returns 1 for each body that is whole. After anything
        else than that the link is ended before the room can go back, or else the room is never used again."""
        node = self._node
        said_whole = False
        try:
            tcp.send_message(sock, msgspec.structs.replace(taking.reply, places=taking.offsets))
            wrote = tcp.receive_message(sock, tcp.request_decoder, deadline)
            if not isinstance(wrote, p.Wrote) or wrote.id != push.id:
                raise p.ProtocolError(f"Wrote was to come, and not {type(wrote).__name__}")
            said_whole = wrote.ok
        finally:
            if not said_whole and not node.links.fence(push.link, "pages that were given over it did not come whole"):
                node.rooms.strand(owner, taking.txn, push.link)
        if not said_whole:
            return bytearray(len(taking.offsets))
        whole = bytearray()
        for offset, checksum, seed in _expected(push, taking):
            arrived = xxhash.xxh3_64_intdigest(node.segment.view[offset : offset + push.length], seed)
            whole.append(arrived == checksum)
        node.links.received(whole.count(1) * push.length)
        return whole

    def _check_version(self, sock: DataSocket, version: int, requester: str) -> None:
        if not p.PROTOCOL_MIN <= version <= p.PROTOCOL_MAX:
            reason = f"node {self._node.name} speaks protocol {p.PROTOCOL_MIN}..{p.PROTOCOL_MAX}, not {version}"
            tcp.send_message(sock, p.Refused(reason))
            raise p.ProtocolError(f"reader {requester} speaks protocol {version}")


def _with_cold(reply: p.FetchReply, there: dict[int, Place]) -> p.FetchReply:
    """Of the keys that are not in DRAM these come from the disk."""
    status, checksum = bytearray(reply.status), list(reply.checksum)
    for i, place in there.items():
        status[i], checksum[i] = p.LOCAL, place.checksum
    column = bytes(i in there for i in range(len(status))) if there else b""
    return msgspec.structs.replace(reply, status=bytes(status), checksum=checksum, cold=column)


def _expected(push: p.Push, taking: Taking) -> Iterator[tuple[int, int, int]]:
    """Of each body that is to come: its place in the segment, its checksum, and what that is seeded with."""
    column = zip(taking.offsets, taking.checksums, range(0, len(taking.hashes), p.HASH_BYTES), strict=True)
    for offset, checksum, at in column:
        yield offset, checksum, checksum_seed(push.namespace, taking.hashes[at : at + p.HASH_BYTES])


def _receive(receive: tcp.Receive, segment: memoryview, places: Sequence[tuple[int, int]], length: int) -> Iterator[int]:
    """Fill bodies of `length` bytes, as (offset, seed of the checksum), and yield xxh3-64 of each as it has arrived. Small ones
    share a system call, as long as they stay in the cache for their checksum."""
    together = max(1, min(_CHUNK // length, _MAX_TOGETHER))
    for first in range(0, len(places), together):
        group = places[first : first + together]
        bodies = [segment[offset : offset + length] for offset, _ in group]
        if len(bodies) > 1:
            fill(receive, bodies)
            for body, (_, seed) in zip(bodies, group, strict=True):
                yield xxhash.xxh3_64_intdigest(body, seed)
            continue
        digest = xxhash.xxh3_64(seed=group[0][1])
        for at in range(0, length, _CHUNK):
            chunk = bodies[0][at : at + _CHUNK]
            fill(receive, [chunk])
            digest.update(chunk)
        yield digest.intdigest()
