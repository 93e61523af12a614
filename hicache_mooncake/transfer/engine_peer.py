"""One peer of a transfer engine: its memory as it is told of, and the link to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hicache_mooncake import protocol as p
from hicache_mooncake.transfer.engine_wire import Share, Shared, Unshare, told_decoder
from hicache_mooncake.transfer.transport import Link, Op, Pending, Piece, TransportError
from hicache_mooncake.wire import Wire, WireClosed

MAX_REGIONS = 4096
_ANSWER_S = 10.0
"""How long a peer may leave what is sent to it unread."""
_log = logging.getLogger("hicache_mooncake.engine")


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of registered memory, of this engine or of a peer, by the addresses of the process that registered it."""

    name: str
    address: int
    length: int


@dataclass(frozen=True, slots=True)
class PeerReport:
    name: str
    transport: str
    why: str
    """Why this transport, and what was passed over for which reason."""
    alive: bool
    regions: int


class Peer:
    """Thread-safe. Made by `TransferEngine.connect`, and by others' connecting."""

    def __init__(self, name: str, wire: Wire, link: Link, scheme: str, why: str, forget: Callable[[Peer], None]) -> None:
        self.name = name
        self.transport = scheme
        self.why = why
        self._wire, self._link = wire, link
        self._forget = forget
        self._sending = threading.Lock()
        self._cond = threading.Condition()
        self._regions: dict[str, Region] = {}
        self._told_all = False
        self._heard = 0
        self._ended = False
        self._deaf = False
        """This end reads no more of the control connection, so its end there says nothing of the peer."""
        self._left = False
        self._peer_fenced = False
        """The peer has said its last word, which is that nothing lands at its end any more."""
        self._closing = threading.Lock()
        self._fenced = False

    # ---- for users

    @property
    def regions(self) -> dict[str, Region]:
        """What the peer has registered, by name: a copy."""
        with self._cond:
            return dict(self._regions)

    def wait_region(self, name: str, deadline: float) -> Region:
        """Until the peer has registered memory of this name. Raises TransportError."""
        with self._cond:
            while name not in self._regions:
                if self._ended:
                    raise TransportError("peer", f"{self.name} is gone, and had no memory {name!r}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransportError("deadline", f"{self.name} did not register memory {name!r} before the deadline")
                self._cond.wait(min(left, threading.TIMEOUT_MAX))
            return self._regions[name]

    def read(self, pieces: Iterable[Piece | tuple[int, int, int]], deadline: float) -> Pending:
        """Begin to copy from the peer's memory to this process's. Pieces are (address here, address there, length), and lie in
        registered memory on both sides. `deadline` as `time.monotonic()`. Raises TransportError; see `Link.submit`."""
        return self._link.submit("read", _pieces(pieces), deadline)

    def write(self, pieces: Iterable[Piece | tuple[int, int, int]], deadline: float) -> Pending:
        """Begin to copy from this process's memory to the peer's; the rest as in `read`."""
        return self._link.submit("write", _pieces(pieces), deadline)

    def submit(self, op: Op, pieces: Sequence[Piece], deadline: float) -> Pending:
        """`read` or `write`, without a copy of the list of pieces."""
        return self._link.submit(op, pieces, deadline)

    @property
    def heard(self) -> int:
        """How many times the peer has said what it shares, or does not share any more."""
        return self._heard

    def wait_heard(self, heard: int, until: float) -> bool:
        """Until it has said so more than `heard` times. False when it is gone or the time has come."""
        with self._cond:
            left = min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)
            self._cond.wait_for(lambda: self._heard > heard or self._ended, left)
            return self._heard > heard

    def notify(self, message: bytes, deadline: float) -> None:
        """Tell the peer, which sees it after all batches that were done before. See `Link.notify`."""
        self._link.notify(message, deadline)

    @property
    def alive(self) -> bool:
        return not self._ended and self._link.alive

    def close(self) -> None:
        """The fence: nothing that this peer was writing, or that was being read from it, lands in this process's memory any
        more when this returns. Raises TransportError where that cannot be had: then the registered memory must not be used for
        anything else until the peer's process has ended; `close` again then."""
        self.end()
        self._end_link(self._link.close)

    @property
    def recalls(self) -> bool:
        """See `Link.recalls`: there is nothing to fence after a write that has failed."""
        return self._link.recalls

    def fence_writes(self, until: float) -> bool:
        """End the link, and with it all that this side was writing. True: nothing of it lands in the peer's memory any more.
        False: the peer has not said so before `until`, since it is stopped or cut off. What has reached it and is not taken in
        yet is thrown away there when it goes on, unless the news of the end does not reach it."""
        self._mark_ended()
        try:
            self._end_link(self._link.abort)
        except TransportError as error:
            _log.warning("peer %s: what it was writing here could not be stopped: %s", self.name, error)
        with self._cond:
            self._cond.wait_for(lambda: self._left, max(0.0, until - time.monotonic()))
            confirmed = self._peer_fenced
        self.end()
        return confirmed

    def _end_link(self, end: Callable[[], None]) -> None:
        with self._closing:
            if not self._fenced:
                end()
                self._fenced = True
                self._wire.finish()  # our last word, see _peer_fenced
        self._forget(self)

    def report(self) -> PeerReport:
        return PeerReport(self.name, self.transport, self.why, self.alive, len(self.regions))

    # ---- for the engine

    def start(self, shared: Callable[[], list[Share]]) -> None:
        """`shared` makes this peer one that hears of what is registered from now on, and returns what is already. Then a thread
        of the caller's must call `listen`."""
        with self._sending:
            for share in shared():
                self._send(share)
            self._send(Shared())

    def tell(self, message: Share | Unshare) -> None:
        with self._sending:
            self._send(message)

    def _send(self, message: p.Message) -> None:
        if self._ended:
            return
        try:
            self._wire.send(message, deadline=time.monotonic() + _ANSWER_S)
        except OSError:
            self.end()

    def await_told(self, deadline: float) -> None:
        """Until all that the peer had registered is in `regions`. Raises TransportError."""
        with self._cond:
            self._cond.wait_for(lambda: self._told_all or self._ended, max(0.0, deadline - time.monotonic()))
            if self._ended:
                raise TransportError("peer", f"{self.name} has closed the connection")
            if not self._told_all:
                raise TransportError("deadline", f"{self.name} did not say what it shares before the deadline")

    def notices(self) -> list[bytes]:
        return self._link.notices()

    def listen(self) -> None:
        """Until the control connection ends; then the link is closed, and the peer told so."""
        try:
            while True:
                self._handle(self._wire.receive(told_decoder))
        except p.ProtocolError as error:
            _log.warning("peer %s broke the protocol of transfer engines: %s", self.name, error)
        except WireClosed as error:
            with self._cond:
                self._peer_fenced = error.__cause__ is None and not self._deaf
        except OSError:
            pass
        try:
            self.close()
        except TransportError as error:
            _log.warning("peer %s is gone, but what it writes could not be stopped: %s", self.name, error)
        else:
            with self._sending:
                self._wire.close()
        with self._cond:
            self._left = True
            self._cond.notify_all()

    def _handle(self, message: Share | Unshare | Shared) -> None:
        match message:
            case Share():
                self._learn(message)
            case Unshare():
                with self._cond:
                    self._regions = {n: r for n, r in self._regions.items() if r.address != message.address}
                    self._heard += 1
                    self._cond.notify_all()
                self._link.unlearn(message.address)
            case Shared():
                with self._cond:
                    self._told_all = True
                    self._cond.notify_all()

    def _learn(self, share: Share) -> None:
        if len(self._regions) >= MAX_REGIONS:
            raise p.ProtocolError(f"more than {MAX_REGIONS} stretches of memory")
        if share.name in self._regions:
            raise p.ProtocolError(f"memory {share.name!r} is shared twice")
        try:
            self._link.learn(share.address, share.length, share.token)
        except TransportError as error:
            _log.warning("memory %r of peer %s cannot be reached over %s: %s", share.name, self.name, self.transport, error)
            return
        with self._cond:
            self._regions[share.name] = Region(share.name, share.address, share.length)
            self._heard += 1
            self._cond.notify_all()

    def end(self) -> None:
        """The control connection is not read any more; `listen` ends."""
        self._mark_ended()
        with self._cond:
            self._deaf = True
        self._wire.wake()

    def _mark_ended(self) -> None:
        with self._cond:
            self._ended = True
            self._cond.notify_all()


def _pieces(pieces: Iterable[Piece | tuple[int, int, int]]) -> Sequence[Piece]:
    return [Piece(*piece) for piece in pieces]
