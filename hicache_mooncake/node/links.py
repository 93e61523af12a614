"""This node's links to other nodes: makes them, writes over them, and ends them.

A link is made on a thread of its own when a rank of this host first reads from the other node, over a connection to that node's
data port; until it stands, and whenever it does not, pages come by tcp. Either side writes over it. Which ones there are to be
is decided in `link_book`, what others write to is in `rooms`; here are the threads, the sockets and the transport."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hicache_mooncake import protocol as p
from hicache_mooncake.config import Settings
from hicache_mooncake.node.link_book import REFUSED_S, UNKNOWN_S, LinkBook, State
from hicache_mooncake.node.sending import Sent, Way, pieces_of, write
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.tls import DataSocket
from hicache_mooncake.transfer.transport import Link, Transport, TransportError, TransportOptions, open_transport

log = logging.getLogger(__name__)

_linked_decoder = p.decoder(p.Linked | p.Refused)

_MAKE_S = 5.0
_READY_S = 2.0
"""Who asks for a link while this node still registers its segment waits so long."""
_REOPEN_S = 60.0
"""A transport that cannot be had is tried again after this time: its card may have come up."""
_FENCE_S = 3.0
"""Who ends a link waits no longer for it: its driver may hang."""
_HANGING_FENCE_S = 0.2
"""The same while it is known to hang."""
_END_AGAIN_S = 30.0
"""A link that could not be ended is tried again after this time."""
_MOST_UNENDED = 64
"""With more links that cannot be ended none is made any more."""
_LOOK_S = 0.2
_MAX_PEERS_SHOWN = 64
_MAX_NAME = 256
_SILENT_S = 15
"""A peer's host that has gone without a word is noticed after this and a few probes more, on a link that nobody uses."""
_MAX_LINK_MESSAGE = 4 << 20
"""Of Linked: a token names every memory region of a large segment on every device."""


class Linking(Protocol):
    """Whose links these are: a node."""

    name: str
    incarnation: bytes
    settings: Settings
    segment: Mapping
    segment_fd: int
    data_key: bytes


@dataclass(slots=True)
class _Held:
    """A link, until nobody uses it any more. `fenced`: whether its end could be had; None before."""

    way: Way
    node: str
    fenced: bool | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while its end is begun and waited for."""
    tried: threading.Event = field(default_factory=threading.Event)
    """Its close has returned, or raised `error`."""
    error: Exception | None = None
    again_at: float = 0.0


class _Unwanted(Exception):
    """The other node makes no links, now or at all; `for_s`: ask it again after this time."""

    def __init__(self, why: str, for_s: float) -> None:
        super().__init__(why)
        self.for_s = for_s


class Links:
    """Thread-safe. `start` when the segment is there; `stop` before it goes."""

    def __init__(self, node: Linking) -> None:
        settings = node.settings
        self._node = node
        self._scheme = {"auto": "verbs", "tcp": ""}.get(settings.transport, settings.transport)
        """Of the links' transport; empty: there are no links."""
        if settings.tls_cert:
            self._scheme = ""
        self._forced = settings.transport not in ("auto", "tcp")
        self._options = TransportOptions(
            devices=settings.rdma_devices,
            gid_index=settings.gid_index,
            verbs_binding=settings.verbs_binding,
            lanes=settings.lanes,
            max_in_flight=settings.max_in_flight,
            copy_threads=settings.copy_threads,
        )
        self._transport: Transport | None = None
        self._token = b""
        self._why_not = "" if self._scheme else "tls_cert: links are not encrypted" if settings.tls_cert else "transport=tcp"
        self._lock = threading.Lock()
        """Not held while a link is made, ended or written to."""
        self._book = LinkBook(random.Random())
        self._held: dict[int, _Held] = {}
        self._unended: dict[int, _Held] = {}
        """Those whose end could not be had, until it is."""
        self._sending: dict[object, tuple[int, float]] = {}
        """What is being written: the link, and by when that ends."""
        self._ready = threading.Event()
        """The transport is there, or it is known that there is none."""
        self._opening = threading.Lock()
        """Held while the transport is opened, and when it is closed."""
        self._stopping = threading.Event()
        self._stopped = False
        self._quiet = QuietLog(log)
        self._made = self._failed = self._fences = self._unfenced = 0
        self._sent_bytes = self._received_bytes = 0
        self._given_up = False
        self.looked: Callable[[], None] = lambda: None
        """Called some times a second while there is a transport; set it before `start`."""
        self.ended_late: Callable[[int], None] = lambda link_id: None
        """Called for a link whose `fence` has failed: nothing of it lands any more now. Set it before `start`."""
        self.unfenced = False
        """After `stop`: something may still write to the segment, which must stay where it is."""

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Opens the transport and registers the segment beside everything else: that takes seconds where it is large."""
        if self._scheme:
            threading.Thread(target=self._run, name="links", daemon=True).start()
        else:
            self._ready.set()

    def stop(self) -> None:
        """Ends all links. Returns when nothing writes to the segment any more, or sets `unfenced`."""
        with self._lock:
            self._stopped = True
            held = list(self._held)
        self._stopping.set()
        until = time.monotonic() + 2 * _FENCE_S
        for link_id in held:
            self.unfenced |= not self.fence(link_id, "this node ends", until)
        with self._lock:
            self.unfenced |= bool(self._unended) or (self._unfenced > 0 and not self._fences_kept)
        closing = threading.Thread(target=self._close_transport, name="links end", daemon=True)
        closing.start()
        closing.join(_MAKE_S)
        self.unfenced |= closing.is_alive()  # the segment is being registered just now, or a driver hangs

    def _close_transport(self) -> None:
        with self._opening:
            try:
                if self._transport is not None:
                    self._transport.close()
            except Exception as error:
                self.unfenced = True
                log.error("the %s transport could not be closed: %s", self._scheme, error)

    def _run(self) -> None:
        while not self._stopping.is_set() and self._open_again():
            self._stopping.wait(_REOPEN_S)
        while self._transport is not None and not self._stopping.wait(_LOOK_S):
            try:
                self._look()
            except Exception:
                self._quiet(logging.ERROR, "look", "looking after links failed; going on. Please report this", exc_info=True)

    def _open_again(self) -> bool:
        """Open the transport. True: it cannot be had now, and may be later."""
        try:
            with self._opening:
                if not self._stopped:
                    self._open()
        except TransportError as error:
            if str(error) != self._why_not:
                level = logging.WARNING if self._forced else logging.INFO
                log.log(level, "pages of other hosts come by tcp; no %s links: %s", self._scheme, error)
            self._why_not = str(error)
            return error.reason in ("unavailable", "device")  # a card may come up; a limit of this process stays
        except Exception as error:
            self._why_not = f"internal error: {error}"
            log.exception("pages of other hosts come by tcp; the %s transport failed. Please report this", self._scheme)
        finally:
            self._ready.set()
        return False

    def _open(self) -> None:
        node = self._node
        transport = open_transport(self._scheme, self._options)
        try:
            self._token = transport.register(node.segment.address, node.segment.length, node.segment_fd)
        except TransportError:
            transport.close()
            raise
        self._transport = transport
        self._why_not = ""
        log.info("links to other nodes are made by %s", self._scheme)

    def _look(self) -> None:
        """Ends what is dead or idle."""
        now = time.monotonic()
        with self._lock:
            up = [(link_id, held) for link_id, held in self._held.items() if held.fenced is None]
            idle = self._book.idle(now)
            overdue = {link_id for link_id, until in self._sending.values() if now > until + _FENCE_S}
            failed = [held for held in self._unended.values() if held.fenced is False and held.tried.is_set()]
            again = [held for held in failed if now >= held.again_at]
        for link_id, held in up:
            if not held.way.link.alive:
                self.fence(link_id, "it has died")
        for link_id in idle:
            self.fence(link_id, "nobody used it")
        for link_id in overdue:
            self.fence(link_id, "what was written over it did not end in its time")
        for held in again:
            self._begin_end(held)
        with self._lock:
            for link_id in self._book.forget():
                self._held.pop(link_id, None)
        self.looked()

    @property
    def possible(self) -> bool:
        """There is a transport that links are made by."""
        return self._transport is not None

    @property
    def _hanging(self) -> int:
        """Ends of links that do not return: their transport is not touched meanwhile, since it may hang as a whole. Under the
        lock."""
        return sum(held.fenced is False and not held.tried.is_set() for held in self._unended.values())

    @property
    def _fences_kept(self) -> bool:
        return self._transport is not None and self._transport.fences

    @property
    def _unusable(self) -> str:
        """Why no link is made or used now. Under the lock."""
        if self._given_up:
            return self._why_not
        if self._hanging:
            return f"{self._hanging} links do not come to an end: the driver of a device may hang"
        if len(self._unended) > _MOST_UNENDED:
            return f"{len(self._unended)} links could not be ended"
        return ""

    # ------------------------------------------------------------------ making links

    def link_to(self, peer: p.Peer) -> int:
        """The id of a link to this node, over which either side may write. 0: there is none, and one is begun to be made if
        that is of use."""
        if self._transport is None or peer.socket:  # on one host pages come through shared memory
            return 0
        now = time.monotonic()
        with self._lock:
            if self._stopped or self._unusable:
                return 0
            found = self._book.link_to(peer.node, peer.incarnation, now)
            if found:
                return found if self._held[found].way.link.alive else 0
            link_id = secrets.randbits(62) + 1
            if not self._book.want(peer, link_id, now):
                return 0
        try:
            threading.Thread(target=self._make, args=(peer, link_id), name=f"link {peer.node}", daemon=True).start()
        except RuntimeError as error:  # no more threads for this user or container
            with self._lock:
                self._book.down(link_id, now, str(error))
        return 0

    def _make(self, peer: p.Peer, link_id: int) -> None:
        at_least_s = 0.0
        try:
            link, linked = self._connect(peer, link_id)
        except _Unwanted as error:
            why, at_least_s = str(error), error.for_s
        except (OSError, TransportError, p.ProtocolError) as error:
            why = str(error)
        except Exception as error:
            log.exception("a link to node %s could not be made. Please report this", peer.node)
            why = f"internal error: {error}"
        else:
            self._stands(link_id, peer.node, link, linked.address, linked.length)
            return
        with self._lock:
            self._failed += 1
            self._book.down(link_id, time.monotonic(), why, at_least_s=at_least_s)
        self._quiet(logging.INFO, f"link {peer.node}", f"no {self._scheme} link to node {peer.node}, tcp is used: {why}")

    def _connect(self, peer: p.Peer, link_id: int) -> tuple[Link, p.Linked]:
        node, transport = self._node, self._transport
        assert transport is not None
        deadline = time.monotonic() + _MAKE_S
        connection = tcp.PeerConnection(peer, deadline, node.data_key, node.name)
        sock = connection.sock
        assert isinstance(sock, socket.socket)  # with TLS there are no links
        try:
            tcp.set_timeouts(sock, deadline - time.monotonic())
            tcp.send_message(sock, self._offer(link_id))
            try:
                answer = tcp.receive_message(sock, _linked_decoder, deadline, _MAX_LINK_MESSAGE)
            except ConnectionError as error:
                raise _Unwanted("it broke off, as an older release does that knows no links", UNKNOWN_S) from error
            if isinstance(answer, p.Refused):
                raise _Unwanted(answer.reason, REFUSED_S)
            if (answer.node, answer.incarnation) != (peer.node, peer.incarnation):
                raise p.ProtocolError(f"at {peer.host}:{peer.port} is node {answer.node} in another life than the masters know")
        except BaseException:
            connection.close()
            raise
        link = transport.connect([_plain(sock)], deadline)
        _learn(link, answer.address, answer.length, answer.token)
        return link, answer

    def _offer(self, link_id: int) -> p.Link:
        node = self._node
        return p.Link(
            p.PROTOCOL_MAX,
            node.name,
            node.incarnation,
            self._scheme,
            link_id,
            node.segment.address,
            node.segment.length,
            self._told(),
        )

    def _told(self) -> bytes:
        """The segment's token as it is now."""
        assert self._transport is not None
        return self._transport.token(self._node.segment.address) or self._token

    def accept(self, sock: DataSocket, asked: p.Link, proven: str) -> bool:
        """Another node asks for a link on this connection; `proven` is who it has proved to be, where the cluster has a key.
        True: the connection is the link's from here on, or has been closed. False: it was refused, and goes on as before."""
        now = time.monotonic()
        self._ready.wait(_READY_S)
        transport, node = self._transport, self._node
        problem = self._unfit(sock, asked, proven)
        if not problem:
            with self._lock:
                problem = (
                    "this node ends"
                    if self._stopped
                    else self._unusable or self._book.accept(asked.id, asked.requester, asked.incarnation, now)
                )
        if problem:
            tcp.send_message(sock, p.Refused(f"node {node.name} makes no link: {problem}"))
            return False
        assert transport is not None
        assert isinstance(sock, socket.socket)
        deadline = now + _MAKE_S
        tcp.set_timeouts(sock, _MAKE_S)
        try:
            linked = p.Linked(node.name, node.incarnation, node.segment.address, node.segment.length, self._told())
            tcp.send_message(sock, linked)
            link = transport.accept([_plain(socket.socket(fileno=sock.detach()))], deadline)
            _learn(link, asked.address, asked.length, asked.token)
        except Exception as error:
            with self._lock:
                self._failed += 1
                self._book.down(asked.id, time.monotonic(), str(error))
            sock.close()
            if not isinstance(error, OSError | TransportError):
                raise
            text = f"no {self._scheme} link with node {asked.requester}, which asked for one: {error}"
            self._quiet(logging.INFO, f"link {asked.requester}", text)
            return True
        self._stands(asked.id, asked.requester, link, asked.address, asked.length)
        return True

    def _unfit(self, sock: DataSocket, asked: p.Link, proven: str) -> str:
        """Why there is no link for whoever asks; "" when there is no reason."""
        if self._transport is None:
            return self._why_not or "its segment is still being registered"
        if asked.scheme != self._scheme:
            return f"its links are by {self._scheme}, not {asked.scheme[:_MAX_NAME]}"
        if not 0 < len(asked.requester) <= _MAX_NAME or len(asked.incarnation) > _MAX_NAME:
            return f"names have 1 to {_MAX_NAME} characters"
        if self._node.data_key and asked.requester != proven:
            return f"{asked.requester!r} has proved to be {proven!r}"
        if asked.requester == self._node.name:
            return "the other end has the same name: give each node its own (--name)"
        if not isinstance(sock, socket.socket):
            return "the cluster's data ports use TLS, and links would pass it by"
        return ""

    def _stands(self, link_id: int, peer: str, link: Link, address: int, length: int) -> None:
        way = Way(link_id, link, self._node.segment.address, address, length)
        with self._lock:
            self._held[link_id] = _Held(way, peer)
            former = self._book.up(link_id, time.monotonic())
            self._made += 1
            if self._stopped:
                former.append(link_id)
        for each in former:
            self.fence(each, "another one replaces it")
        log.info("%s link to node %s stands", self._scheme, peer)

    # ------------------------------------------------------------------ ends

    def fence(self, link_id: int, why: str, until: float | None = None) -> bool:
        """End a link that is in use. True: nothing of it lands in the segment any more. False: that cannot be had, or not soon,
        and the room that it may write to must not be used again before `ended_late` names it."""
        with self._lock:
            held = self._held.get(link_id)
        if held is None:
            return True  # it never stood, or has ended while nobody used it
        with held.lock:
            if held.fenced is not None:
                return held.fenced
            with self._lock:
                self._book.down(link_id, time.monotonic(), why)
                patience = _HANGING_FENCE_S if self._hanging else _FENCE_S
            self._begin_end(held)
            held.tried.wait(patience if until is None else max(0.0, until - time.monotonic()))
            with self._lock:
                fenced = held.fenced = self._fences_kept and held.tried.is_set() and held.error is None
                problem = f"could not be ended: {held.error}" if held.error is not None else "its end does not return"
                told = why if fenced or not self._fences_kept else f"{why}; {problem}"
                self._fences += 1
                self._unfenced += not fenced
        self._quiet(logging.INFO, f"end {held.node}", f"the {self._scheme} link to node {held.node} has been ended: {told}")
        return fenced

    def _begin_end(self, held: _Held) -> None:
        """On a thread of its own, which is left alone where it does not return."""
        with self._lock:
            self._unended[held.way.id] = held
            held.tried.clear()
        try:
            threading.Thread(target=self._end, args=(held,), name=f"link {held.node} ends", daemon=True).start()
        except RuntimeError as error:  # no more threads for this user or container
            self._tried(held, error)

    def _end(self, held: _Held) -> None:
        error: Exception | None = None
        try:
            held.way.link.close()
        except Exception as raised:  # whatever it is, somebody waits for the end, and nothing is known of it
            error = raised
            if not isinstance(raised, TransportError):
                self._quiet(
                    logging.ERROR,
                    "close",
                    f"the {self._scheme} transport failed to end a link. Please report this",
                    exc_info=True,
                )
        self._tried(held, error)

    def _tried(self, held: _Held, error: Exception | None) -> None:
        with self._lock:
            held.error = error
            held.again_at = time.monotonic() + _END_AGAIN_S
            held.tried.set()
            if error is None or not self._fences_kept:
                self._unended.pop(held.way.id, None)
            late = error is None and self._fences_kept and held.fenced is False
            if late:
                held.fenced = True
        if late:
            log.info("the %s link to node %s has come to its end after all", self._scheme, held.node)
            self.ended_late(held.way.id)

    def give_up(self, why: str) -> None:
        """Links do more harm than good: none is used any more before `resume`."""
        with self._lock:
            self._given_up = True
            self._why_not = why

    def resume(self) -> None:
        with self._lock:
            if self._given_up:
                self._given_up = False
                self._why_not = ""

    # ------------------------------------------------------------------ what goes over them

    def send(
        self, link_id: int, peer: str, offsets: Sequence[int], places: Sequence[int], length: int, deadline: float
    ) -> Sent:
        """Write bodies of the segment into the peer's, over this link; waits for the end. Raises ProtocolError for places that
        cannot be."""
        if not self.begin(link_id, peer):
            return Sent.NOTHING
        me = object()
        try:
            way = self._held[link_id].way
            pieces = pieces_of(way, offsets, places, length)
            with self._lock:
                self._sending[me] = link_id, deadline
            sent, error = write(way, pieces, deadline) if pieces else (Sent.WHOLE, None)
            if error is None:
                with self._lock:
                    self._sent_bytes += length * len(offsets)
            elif sent is Sent.FAILED or error.reason != "deadline":  # else too much is under way: the link is good
                self.fence(link_id, f"{error.reason}: {error}")
            return sent
        finally:
            with self._lock:
                self._sending.pop(me, None)
            self.done(link_id)

    def begin(self, link_id: int, peer: str) -> bool:
        """Something is to be under way between this node and that one on this link, until `done`. False: there is no such link
        that is up."""
        with self._lock:
            entry = self._book.find(link_id)
            known = entry is not None and entry.node == peer and not self._unusable
            return known and self._book.use(link_id, time.monotonic())

    def done(self, link_id: int) -> None:
        with self._lock:
            self._book.unuse(link_id)

    def received(self, size: int) -> None:
        """Bytes of pages that came over links, whole."""
        with self._lock:
            self._received_bytes += size

    # ------------------------------------------------------------------ for people

    def report(self) -> dict[str, int | float | str | bool]:
        with self._lock:
            report: dict[str, int | float | str | bool] = {
                "transport": self._scheme if self._transport is not None else "tcp",
                "transport_why": self._why_not or self._unusable,
                "links": self._book.count(State.UP),
                "links_making": self._book.count(State.MAKING),
                "links_made": self._made,
                "links_failed": self._failed,
                "link_fences": self._fences,
                "link_fences_failed": self._unfenced,
                "link_ends_hanging": self._hanging,
                "link_sent_bytes": self._sent_bytes,
                "link_received_bytes": self._received_bytes,
            }
            for view in self._book.views(_MAX_PEERS_SHOWN):
                how = f"{self._scheme} {view.state}"
                report[f"peer {view.node}"] = f"{how}; tcp is used: {view.why}" if view.state != State.UP.value else how
            touchable = self._transport is not None and not self._hanging
        if self._transport is not None and touchable:
            with contextlib.suppress(TransportError):
                report |= {f"{self._scheme} {key}": value for key, value in self._transport.report().items()}
        return report


def _plain(sock: socket.socket) -> socket.socket:
    """As a transport wants it: it blocks, without a limit of its own, and a peer's host that has gone breaks it."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, _SILENT_S), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, 0))
    return sock


def _learn(link: Link, address: int, length: int, token: bytes) -> None:
    """Raises TransportError, and ends the link then."""
    try:
        link.learn(address, length, token)
    except TransportError:
        link.close()
        raise
