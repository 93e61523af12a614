"""The node's TCP port: other hosts' movers ask for pages by key and get them straight from the segment.

A page is pinned while it is sent. A reader that stops reading is cut off at the send deadline, and its pins with it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Protocol

from hicache_mooncake import protocol as p
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.mapping import Mapping

log = logging.getLogger(__name__)

_MAX_READERS = 8192
"""One a rank of each other host."""
_SEND_DEADLINE_S = 10.0
_IDLE_S = 600.0


class Holder(Protocol):
    """Whose pages are served: a node."""

    name: str
    core: NodeCore
    lock: threading.Lock
    """Held around every call of the core."""
    segment: Mapping

    def new_owner(self) -> int: ...


class DataServer:
    """A thread per reader. Counters are written under `_lock`."""

    def __init__(self, node: Holder, listener: socket.socket) -> None:
        self._node = node
        self._listener = listener
        self._lock = threading.Lock()
        self._readers: set[socket.socket] = set()
        self._stopping = False
        self._quiet = QuietLog(log)
        self.sent_pages = 0
        self.sent_bytes = 0
        self.failed_readers = 0
        self.refused_readers = 0

    def start(self) -> None:
        threading.Thread(target=self._accept, name="data-accept", daemon=True).start()

    def stop(self) -> None:
        self._stopping = True
        with self._lock:
            readers = list(self._readers)
        for sock in readers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def report(self) -> dict[str, int | float | str | bool]:
        with self._lock:
            return {
                "remote_readers": len(self._readers),
                "remote_sent_pages": self.sent_pages,
                "remote_sent_bytes": self.sent_bytes,
                "remote_failed_readers": self.failed_readers,
                "remote_refused_readers": self.refused_readers,
            }

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._stopping or self._listener.fileno() < 0:
                    return
                time.sleep(0.05)
                continue
            with self._lock:
                full = len(self._readers) >= _MAX_READERS
                if full:
                    self.refused_readers += 1
                else:
                    self._readers.add(sock)
            if full:
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), name="data-reader", daemon=True).start()
            except RuntimeError as error:  # no more threads for this user or container: not the end of the port
                with self._lock:
                    self._readers.discard(sock)
                    self.refused_readers += 1
                sock.close()
                self._quiet(logging.ERROR, "thread", f"a reader was turned away: {error}. Raise the limit of processes")
                time.sleep(0.05)

    def _serve(self, sock: socket.socket) -> None:
        try:
            tcp.prepare(sock)
            while True:
                try:
                    fetch = tcp.receive_message(sock, tcp.fetch_decoder, time.monotonic() + _IDLE_S)
                except TimeoutError:
                    return  # idle: the reader connects again when it needs to
                self._answer(sock, fetch)
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

    def _answer(self, sock: socket.socket, fetch: p.Fetch) -> None:
        deadline = time.monotonic() + _SEND_DEADLINE_S
        tcp.set_timeouts(sock, _SEND_DEADLINE_S)
        if not p.PROTOCOL_MIN <= fetch.version <= p.PROTOCOL_MAX:
            reason = f"node {self._node.name} speaks protocol {p.PROTOCOL_MIN}..{p.PROTOCOL_MAX}, not {fetch.version}"
            tcp.send_message(sock, p.Refused(reason))
            raise p.ProtocolError(f"reader {fetch.requester} speaks protocol {fetch.version}")
        node = self._node
        owner = node.new_owner()
        with node.lock:
            served = node.core.fetch(owner, fetch, time.monotonic())
        sent = 0
        try:
            tcp.send_message(sock, served.reply)
            segment = node.segment.view
            tcp.send_bodies(sock, [segment[at : at + fetch.length] for at in served.offsets], deadline)
            sent = len(served.offsets)
        finally:
            with node.lock:
                node.core.fetched(owner, served, sent)
        with self._lock:
            self.sent_pages += sent
            self.sent_bytes += sent * fetch.length
