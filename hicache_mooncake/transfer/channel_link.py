"""Links of transports in which the side that asks moves the bytes, in both directions: shared memory and foreign engines.

One stream socket, the channel, carries what must be said: which of the peer's memory may be reached and how, when that ends,
and notices. Each end shuts its side of the channel down when it moves nothing any more, which is what a close waits for.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from hicache_mooncake.protocol import Message, ProtocolError, decoder
from hicache_mooncake.transfer.batches import Batch, Batches, Fenced, Inbox, check_pieces
from hicache_mooncake.transfer.copying import Place
from hicache_mooncake.transfer.transport import (
    MAX_NOTICE_BYTES,
    Extents,
    Link,
    Op,
    Pending,
    Piece,
    TransportError,
)
from hicache_mooncake.wire import Wire, WireClosed, WireTimeout

if TYPE_CHECKING:
    from hicache_mooncake.transfer.channel_transport import ChannelTransport, Own

log = logging.getLogger(__name__)

FENCE_S = 3.0
"""How long a peer may take to say that it has stopped. It has a step to finish, which takes milliseconds."""
MAX_REGIONS = 4096
TOKEN = struct.Struct("<4sQ")
_ANSWER_S = 10.0
"""How long a peer may leave what is sent to it unread."""
_TELL_S = 1.0
"""The same, while somebody waits."""
_LOOK_S = 0.1
_MAX_FDS = 64
"""That have come and whose message has not. They come with the first byte of a frame, so few do before it is whole."""
_UNBOUNDED = 1 << 62
"""Bytes under way: a turn for each thread that copies."""


class Want(Message):
    """The region of this id, which the peer was told of."""

    id: int


class Memory(Message):
    """The answer to Want. If the memory has a descriptor it rides on the frame; those of several frames may arrive together."""

    id: int
    valid: bool
    has_fd: bool = False
    fd_offset: int = 0
    how: bytes = b""
    """What a foreign engine needs to reach it."""


class Revoke(Message):
    """Do not touch this region any more, and say so."""

    id: int


class Revoked(Message):
    id: int


class Notice(Message):
    body: bytes


_ToPeer = Want | Memory | Revoke | Revoked | Notice
_decoder = decoder(_ToPeer)


class ChannelLink(Link):
    """One end. A thread of its own reads what the peer says. Subclasses say what a peer's memory is and how it is copied."""

    turn_bytes: ClassVar[int]
    """Copied before a cancel, a deadline or a close is heard."""
    patience_s: ClassVar[float] = threading.TIMEOUT_MAX
    """How long a close waits for copies of this process that are under way."""

    def __init__(self, transport: ChannelTransport, channel: socket.socket, who: str) -> None:
        """`who`: the peer, for errors. The subclass starts it when it is ready to copy."""
        self.who = who
        self._transport = transport
        self._channel = channel
        self._wire = Wire(channel)
        self._batches = Batches(_UNBOUNDED, lambda: None, turn_bytes=self.turn_bytes)
        self._copying = Fenced()
        """Held by whoever copies."""
        self._inbox = Inbox()
        self._sending = threading.Lock()
        self._cond = threading.Condition()
        # What follows is guarded by _cond's lock.
        self._learned = Extents()
        self._places: dict[int, Place] = {}
        self._given: set[int] = set()
        """Ids of own regions that the peer may reach."""
        self._peer_stopped = False
        """It said that it touches nothing any more, or it is gone."""
        self._closed = False
        self._fds: list[int] = []
        """That came, and whose message has not been read yet. Of the reader."""
        self._reader = threading.Thread(target=self._read, name="transport-link", daemon=True)

    def start(self) -> None:
        try:
            self._reader.start()
        except RuntimeError as error:
            raise TransportError("memory", f"no thread for a link: {error}; raise the limit of threads (ulimit -u)") from error

    def abandon(self) -> None:
        """It never started."""
        self._wire.close()
        self.let_go()

    # ---- what subclasses say

    @abc.abstractmethod
    def place(self, kind: bytes, number: int, address: int, length: int) -> Place:
        """Memory of the peer that is to be reached, by the kind in its token. Raises TransportError."""

    @abc.abstractmethod
    def offer(self, own: Own) -> tuple[Memory, list[int]]:
        """What the peer needs to reach this memory, and the descriptors that ride on it."""

    @abc.abstractmethod
    def reach(self, place: Place, memory: Memory, fd: int) -> None:
        """The peer's offer has come: make the place ready. `fd` is -1 or stays the caller's. Raises TransportError."""

    @abc.abstractmethod
    def begin(self, batch: Batch) -> Pending:
        """See that `turn` is called until the batch is done."""

    def peer_ended(self) -> bool:
        """Its process is known to have ended, whatever its channel says."""
        return False

    def let_go(self) -> None:
        """Of what the link has, at its end. Once."""

    # ---- the contract

    def learn(self, address: int, length: int, token: bytes) -> None:
        try:
            kind, number = TOKEN.unpack(token)
        except struct.error:
            kind, number = b"", 0
        place = self.place(kind, number, address, length)
        with self._cond:
            self._check_alive()
            if len(self._places) >= MAX_REGIONS:
                raise TransportError(
                    "memory", f"{MAX_REGIONS} stretches of a peer's memory are known: it must share larger ones"
                )
            same = self._places.get(number)
            if same is not None and (same.address, same.length) != (address, length):
                raise TransportError("bounds", f"the token of {length} bytes at {address:#x} is that of other memory")
            if same is not None and type(same) is type(place) and not same.ended:
                return
            starts = self._learned.replace(address, length, token)
            former = [old for old in self._places.values() if old.address in starts]
            self._places[number] = place
        for old in former:
            self._drop(old)
        self._tell(Want(number), time.monotonic() + _ANSWER_S)

    def submit(self, op: Op, pieces: Sequence[Piece], deadline: float) -> Pending:
        self._check_alive()
        check_pieces(pieces, self._transport.extents, self._learned)
        self._await_places(pieces, deadline)
        return self.begin(self._batches.admit(op, pieces, deadline))

    def notify(self, message: bytes, deadline: float) -> None:
        if len(message) > MAX_NOTICE_BYTES:
            raise TransportError("bounds", f"a notice of {len(message)} bytes: at most {MAX_NOTICE_BYTES} are allowed")
        self._check_alive()
        if not self._sending.acquire(timeout=_left(deadline)):
            raise TransportError("deadline", f"{self.who} has not taken what others told it before")
        try:
            told = self._send(Notice(message), deadline)
        finally:
            self._sending.release()
        if not told:
            self._check_alive()

    def notices(self) -> list[bytes]:
        return self._inbox.take()

    @property
    def alive(self) -> bool:
        return not self._copying.ended

    def close(self, until: float | None = None) -> None:
        """May be called again after it has failed, and then waits again. `until`: of the fence."""
        self.stop()
        until = time.monotonic() + FENCE_S if until is None else until
        if not self._wait(lambda: self._peer_stopped, until):
            raise TransportError(
                "peer",
                f"{self.who} did not confirm within {FENCE_S:g} s that it has stopped copying: is it stopped? Do not use what "
                "it may write to before it has ended",
            )
        if not self._copying.quiet:
            raise TransportError("peer", f"copies from or to {self.who} have not ended: do not use their memory")
        with self._cond:
            if self._closed:
                return
            self._closed = True
        self._wire.shutdown()
        self._reader.join()
        for fd in self._fds:
            os.close(fd)
        with self._sending:
            self._wire.close()
        with self._cond:
            places, self._places = list(self._places.values()), {}
        for place in places:
            self._drop(place)
        self._transport.forget(self)
        self.let_go()

    # ---- copying

    def turn(self) -> bool:
        """Copy some bytes of a batch. False when there is nothing to do."""
        return self._turn("read") or self._turn("write")

    def _turn(self, op: Op) -> bool:
        turn = self._batches.cut(op)
        if turn is None:
            return False
        problem = self._copying.error
        if self._copying.hold():
            try:
                if turn.batch.hold():
                    try:
                        problem = self._move(op, turn.pieces)
                    finally:
                        turn.batch.release()
            finally:
                self._copying.release()
        if problem is None and not turn.batch.ended:
            self._batches.landed(turn)
        else:
            self._batches.lost(turn, problem)
        return True

    def _move(self, op: Op, pieces: Sequence[Piece]) -> TransportError | None:
        at = 0
        while at < len(pieces):
            place = self._place_of(pieces[at])
            last = at + 1
            while place is not None and last < len(pieces) and place.holds(pieces[last]):
                last += 1
            if place is None or not place.hold():
                return TransportError("bounds", f"the peer has taken back its memory at {pieces[at].remote:#x}")
            if not place.ready:  # it was learned anew since the batch was submitted
                place.release()
                return TransportError("bounds", f"the peer has registered its memory at {pieces[at].remote:#x} anew")
            try:
                place.copy(op, pieces[at:last])
            except TransportError as error:
                return error
            finally:
                place.release()
            at = last
        return None

    def help(self, batch: Batch) -> None:
        """Copy until it has no bytes left to take."""
        while batch.uncut and self._turn(batch.op):
            pass

    def _place_of(self, piece: Piece) -> Place | None:
        with self._cond:
            try:
                token = self._learned.find(piece.remote, piece.length)[2]
            except TransportError:
                return None
            return self._places.get(TOKEN.unpack(token)[1])

    def _await_places(self, pieces: Sequence[Piece], deadline: float) -> None:
        """Until the peer has given the memory in which these lie."""
        place: Place | None = None
        for piece in pieces:
            if not piece.length or (place is not None and place.holds(piece)):
                continue
            place = self._place_of(piece)
            with self._cond:
                while place is not None and not place.ready and not place.ended and self.alive:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TransportError("deadline", "the peer did not give its memory before the deadline")
                    self._cond.wait(min(left, threading.TIMEOUT_MAX))
            self._check_alive()
            if place is None:
                raise TransportError("bounds", f"the peer has taken back its memory at {piece.remote:#x}")
            if place.error is not None:
                raise TransportError(place.error.reason, str(place.error))

    # ---- ending

    def stop(self, reason: str = "closed", detail: str = "this link was closed") -> None:
        """Ends what is under way here, and asks the peer for the same. Does not wait for the peer."""
        self.end(reason, detail)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def end(self, reason: str, detail: str) -> None:
        """Nothing is copied here any more when this returns, as far as that can be had in `patience_s`. The first reason
        counts."""
        error = TransportError(reason, detail)
        self._copying.end(error)
        self._batches.close(self._copying.error or error)
        with self._cond:
            self._cond.notify_all()
        self._copying.wait_quiet(self.patience_s)

    def _check_alive(self) -> None:
        error = self._copying.error
        if error is not None:
            raise TransportError(error.reason, str(error))

    def _wait(self, met: Callable[[], bool], until: float) -> bool:
        """Until it is met, the peer's end included, or the time has come."""
        with self._cond:
            while not met():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._cond.wait(min(left, _LOOK_S))
                # The channel says so too, unless somebody else has inherited the peer's end of it.
                if not self._closed and self.peer_ended():
                    self._peer_stopped = True
        return True

    # ---- memory

    def _drop(self, place: Place) -> None:
        """Nobody copies from or to it any more when it is quiet then."""
        place.end(TransportError("bounds", f"the peer has taken back its memory at {place.address:#x}"))
        place.wait_quiet(self.patience_s)
        if place.quiet:
            place.close()
        with self._cond:
            if self._places.get(place.number) is place:
                del self._places[place.number]
            self._cond.notify_all()

    def ask_to_forget(self, number: int) -> bool:
        """Whether the peer has to confirm that it does not touch this region of ours any more."""
        with self._cond:
            if number not in self._given or self._peer_stopped:
                return False
        self._tell(Revoke(number), time.monotonic() + _TELL_S)
        return True

    def forgotten(self, number: int, until: float) -> bool:
        return self._wait(lambda: number not in self._given or self._peer_stopped, until)

    # ---- the channel

    def _tell(self, message: Message, deadline: float, fds: Sequence[int] = ()) -> bool:
        """False when the link has ended for it."""
        if not self._sending.acquire(timeout=_left(deadline)):
            self._stop_unread()
            return False
        try:
            return self._send(message, deadline, fds)
        finally:
            self._sending.release()

    def _send(self, message: Message, deadline: float, fds: Sequence[int] = ()) -> bool:
        """The same, with the lock."""
        try:
            self._wire.send(message, fds, deadline)
        except WireTimeout:
            # In the middle of a frame, perhaps.
            self._stop_unread()
        except (WireClosed, OSError):
            self.stop("peer", f"{self.who} has closed the link")
        else:
            return True
        return False

    def _stop_unread(self) -> None:
        self.stop("peer", f"{self.who} does not read what it is sent: is it stopped?")

    def _read(self) -> None:
        """Each end shuts its side of the channel down when it has stopped copying, and stops when it sees the other's end."""
        detail = f"{self.who} has closed the link"
        try:
            while True:
                message = self._wire.receive(_decoder)
                self._fds += self._wire.take_fds()
                if len(self._fds) > _MAX_FDS:
                    raise ProtocolError("descriptors came that no memory was announced with")
                self._handle(message)
        except ProtocolError as error:
            detail = f"{self.who} broke the protocol of shared memory: {error}"
        except (WireClosed, OSError):
            pass
        except Exception as error:  # what a foreign engine raises, say: a close waits for this thread
            log.exception("the link to %s ends", self.who)
            detail = f"the link to {self.who} met {error!r}"
        self.stop("peer", detail)
        with contextlib.suppress(OSError):
            while self._channel.recv(1 << 16):
                pass
        with self._cond:
            self._peer_stopped = True
            self._cond.notify_all()

    def _handle(self, message: _ToPeer) -> None:
        match message:
            case Notice():
                if not self._inbox.put(message.body):
                    raise ProtocolError("it told more than was looked at")
            case Want():
                self._give(message.id)
            case Memory():
                self._received(message)
            case Revoke():
                with self._cond:
                    place = self._places.get(message.id)
                    if place is not None:
                        self._learned.remove(place.address)
                if place is not None:
                    self._drop(place)
                    if not place.quiet:
                        self.end("peer", f"copies from or to memory that {self.who} takes back have not ended")
                        return
                self._tell(Revoked(message.id), time.monotonic() + _ANSWER_S)
            case Revoked():
                with self._cond:
                    self._given.discard(message.id)
                    self._cond.notify_all()

    def _give(self, number: int) -> None:
        with self._cond:
            self._given.add(number)
        # From here on an unregister asks this link to forget it.
        own = self._transport.own(number)
        until = time.monotonic() + _ANSWER_S
        if own is None:
            with self._cond:
                self._given.discard(number)
                self._cond.notify_all()
            self._tell(Memory(number, False), until)
        else:
            offer, fds = self.offer(own)
            self._tell(offer, until, fds)

    def _received(self, message: Memory) -> None:
        if message.has_fd and not self._fds:
            raise ProtocolError("memory came without its descriptor")
        fd = self._fds.pop(0) if message.has_fd else -1
        try:
            with self._cond:
                place = self._places.get(message.id)
            if place is None or place.ready or not place.hold():
                return
            try:
                if not message.valid:
                    raise TransportError("bounds", f"the peer has no memory registered at {place.address:#x} by this token")
                self.reach(place, message, fd)
            except TransportError as error:
                place.end(error)
            finally:
                place.release()
            with self._cond:
                self._cond.notify_all()
        finally:
            if fd >= 0:
                os.close(fd)

    @property
    def reached_bytes(self) -> int:
        """Of the peer's memory."""
        with self._cond:
            return sum(place.length for place in self._places.values() if place.ready)

    @property
    def copied_bytes(self) -> int:
        return self._batches.moved("read") + self._batches.moved("write")


def _left(deadline: float) -> float:
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
