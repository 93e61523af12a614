"""A mover in this process, and nodes that hold pages for it: what is between them is real sockets, and may be a fault proxy."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import xxhash

from hicache_mooncake import protocol as p
from hicache_mooncake.client.mover import Mover
from hicache_mooncake.client.node_link import NodeUnavailable
from hicache_mooncake.keys import checksum_seed
from hicache_mooncake.testing.local import page_hash, pattern
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.memory import MappedMemory
from hicache_mooncake.transfer.tls import Tls
from tests.faults.proxy import FaultProxy, Faults

NS = b"n" * 16
PAGE = 64 << 10


def names(*which: object) -> list[bytes]:
    return [page_hash(name) for name in which]


class PageServer:
    """A node's data port and nothing else. `served`: the pages of each Fetch that came."""

    def __init__(self, name: str, page_bytes: int = PAGE, data_key: bytes = b"") -> None:
        self.name = name
        self.page_bytes = page_bytes
        self.served: list[list[bytes]] = []
        self.pages: dict[bytes, bytes] = {}
        self.send: Callable[[socket.socket, list[memoryview], float], None] = tcp.send_bodies
        self._data_key = data_key
        self._listener = tcp.listen("127.0.0.1:0")
        self.address = ("127.0.0.1", int(self._listener.getsockname()[1]))
        self.proxy = FaultProxy(self.address)
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, pages: Sequence[bytes]) -> None:
        self.pages |= {page: pattern(page, self.page_bytes) for page in pages}

    @property
    def peer(self) -> p.Peer:
        """Through the proxy."""
        return p.Peer(self.name, b"i" * 8, "127.0.0.1", self.proxy.port)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                tcp.prepare(sock)
                tcp.accept_proof(sock, self._data_key, self.name, time.monotonic() + 5)
                while True:
                    fetch = tcp.receive_message(sock, tcp.fetch_decoder, time.monotonic() + 60)
                    self.answer(sock, fetch)
            except (OSError, p.ProtocolError):
                pass

    def answer(self, sock: socket.socket, fetch: p.Fetch) -> None:
        each = [fetch.hashes[at : at + p.HASH_BYTES] for at in range(0, len(fetch.hashes), p.HASH_BYTES)]
        self.served.append(each)
        bodies = [memoryview(self.pages[page]) for page in each if page in self.pages]
        status = bytes(p.LOCAL if page in self.pages else p.MISS for page in each)
        checksum = [checksum_of(page, self.page_bytes) if page in self.pages else 0 for page in each]
        tcp.set_timeouts(sock, 10)
        tcp.send_message(sock, p.FetchReply(self.name, b"i" * 8, status, checksum, fetch.id))
        self.send(sock, bodies, time.monotonic() + 10)

    def close(self) -> None:
        self.proxy.close()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def checksum_of(page: bytes, page_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest(pattern(page, page_bytes), seed=checksum_seed(NS, page))


class Directory:
    """In the place of a mover's connection to its node: knows who holds what, and takes down what it is told."""

    def __init__(self) -> None:
        self.holders: dict[bytes, list[p.Peer]] = {}
        self.recalled: dict[bytes, list[p.Peer]] = {}
        """Who held what a moment ago."""
        self.asked: list[p.Locate] = []
        self.down: list[str] = []
        """What the mover said of other nodes, in order."""
        self.node = "reader"
        self.data_key = b""
        self.tls: Tls | None = None
        self._fd = create_memfd("segment", 1 << 20)
        self.segment = Mapping(self._fd, 1 << 20, writable=True)

    def ask(self, message: p.Message, deadline: float) -> p.Message:
        if not isinstance(message, p.Locate):
            raise NodeUnavailable("node_refused", f"unexpected {type(message).__name__}")
        self.asked.append(message)
        each = [message.hashes[at : at + p.HASH_BYTES] for at in range(0, len(message.hashes), p.HASH_BYTES)]
        recalled = message.recall and all(page in self.recalled for page in each)
        known = self.recalled if recalled else self.holders
        peers: list[p.Peer] = []
        columns: list[tuple[int, int, int]] = []
        for page in each:
            holders = known.get(page, [])
            for peer in holders:
                if peer not in peers:
                    peers.append(peer)
            indexes = [peers.index(peer) for peer in holders]
            where, other = [*indexes, -1, -1][:2]
            columns.append((p.REMOTE, where, other) if holders else (p.MISS, 0, -1))
        status, where_, others = ([column[i] for column in columns] for i in range(3))
        return p.Located(0, bytes(status), where_, [0] * len(each), peers, others=others, recalled=recalled)

    def ask_same(self, message: p.Message, deadline: float) -> p.Message:
        raise NodeUnavailable("node_refused", f"unexpected {type(message).__name__}")

    def tell(self, message: p.Message, deadline: float) -> None:
        assert isinstance(message, p.Release)
        self.down += message.peer_down

    def close(self) -> None:
        self.segment.close()
        os.close(self._fd)


class Reader:
    """A mover over memory of its own, asked for batches in this thread."""

    def __init__(self, pages: int = 64, page_bytes: int = PAGE, lanes: int = 0) -> None:
        self.page_bytes = page_bytes
        self._fd = create_memfd("engine", pages * page_bytes)
        self.view = Mapping(self._fd, pages * page_bytes, writable=True)
        base = 1 << 40  # as if at another address in the engine
        self._run = p.Run(base, page_bytes, page_bytes)
        self.directory = Directory()
        memory = MappedMemory([p.Region(base, pages * page_bytes, 0)], [self._fd])
        self.mover = Mover(memory, self.directory, os.getpid(), lanes)  # type: ignore[arg-type]

    def place(self, pages: Sequence[bytes], *holders: PageServer | p.Peer) -> None:
        peers = [holder.peer if isinstance(holder, PageServer) else holder for holder in holders]
        self.directory.holders |= dict.fromkeys(pages, peers)

    def remember(self, pages: Sequence[bytes], *holders: PageServer) -> None:
        """A lookup has found them there; `place` says where they are now."""
        self.directory.recalled |= {page: [holder.peer for holder in holders] for page in pages}

    def load(self, pages: Sequence[bytes], budget_s: float = 4.0) -> p.Transferred:
        """Into pages 0.. of memory that is scrambled first. Every page that is said to be loaded is compared, and every other
        one has a reason."""
        self.view.view[:] = b"\xaa" * self.view.length
        numbers = b"".join(place.to_bytes(8, "little") for place in range(len(pages)))
        done = self.mover.run(p.Transfer("load", NS, b"".join(pages), [self._run], numbers, budget_s))
        for place, page in enumerate(pages):
            if done.ok[place] and self.read(place) != pattern(page, self.page_bytes):
                raise AssertionError(f"page {place} has wrong bytes")
        if sum(done.reasons.values()) != done.ok.count(0):
            raise AssertionError(f"{done.ok.count(0)} misses with the reasons {done.reasons}")
        return done

    def read(self, place: int) -> bytes:
        return bytes(self.view.view[place * self.page_bytes : (place + 1) * self.page_bytes])

    def close(self) -> None:
        self.mover.close()
        self.directory.close()
        self.view.close()
        os.close(self._fd)


__all__ = ["NS", "PAGE", "Directory", "FaultProxy", "Faults", "PageServer", "Reader", "checksum_of", "names"]
