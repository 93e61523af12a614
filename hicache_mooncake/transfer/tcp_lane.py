"""One lane of a link over tcp: a connected socket, and the thread that moves bytes between it and registered memory.

Every message is a header of fixed size, then what it announces:

    READ    rows (address, length, token)            answered with DATA or FAIL
    WRITE   rows, then the bytes                     answered with DONE or FAIL
    DATA    the bytes
    DONE, FAIL
    NOTICE  the message

A lane reads whenever there is something to read, whatever it has to send, so two full sockets never wait for each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_mooncake.transfer.batches import TURN_BYTES, TURN_PIECES, Fenced, Turn, runs
from hicache_mooncake.transfer.memory import advanced
from hicache_mooncake.transfer.transport import MAX_NOTICE_BYTES, Op, TransportError

if TYPE_CHECKING:
    from hicache_mooncake.transfer.tcp_transport import TcpLink

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<BxxxIQQ")
"""What it is, how many rows, the number of the turn, how many bytes of body."""
_ROW = struct.Struct("<QQ16s")
_READ, _WRITE, _DATA, _DONE, _FAIL, _NOTICE = range(1, 7)
TOKEN_BYTES = 16
_MAX_IOV = 512
_LANE_WINDOW = 4 << 20
"""Bytes that a lane has asked for and not received. More would make a small read wait behind them."""
_LANE_TURNS = 256
"""Turns of a lane that the peer has not answered, of each kind."""
_MAX_ANSWERS = 2 * _LANE_TURNS
"""Reads of the peer that a lane owes. A peer of this build asks for far fewer at a time."""
_MAX_ROWS, _MAX_BODY = 2 * TURN_PIECES, 16 * TURN_BYTES
_AT_ONCE = struct.pack("@ii", 1, 0)
"""Of SO_LINGER."""
_ZEROS = memoryview(bytes(TURN_BYTES))
_SCRATCH = memoryview(bytearray(TURN_BYTES))
"""Where bytes land that nobody wants any more; of all lanes."""

Views = list[memoryview]


class Broken(Exception):
    """The peer broke the protocol, or is gone."""


class Region(Fenced):
    """Registered memory. Held while a peer's bytes move in or out of it."""

    def __init__(self, address: int, length: int) -> None:
        super().__init__()
        self.address, self.length = address, length
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.view = memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")

    def part(self, address: int, length: int) -> memoryview:
        return self.view[address - self.address : address - self.address + length]


class Note:
    """A notice on its way out."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.gone = threading.Event()
        self.sent = False

    def let_go(self, *, sent: bool) -> None:
        self.sent = sent
        self.gone.set()


@dataclass(slots=True)
class _Landing:
    """A body that arrives. `holds` is empty when nobody wants it: then it goes to the scratch."""

    holds: list[Fenced]
    finish: Callable[[bool], None]
    """Called with the last byte: whether all of it has landed."""
    of_peer: bool = False
    """A write of the peer's."""


@dataclass(slots=True)
class _Answer:
    """A read of the peer that is to be answered."""

    number: int
    views: Views
    regions: list[Region]


@dataclass(slots=True)
class _Outgoing:
    """What is being sent: `views` is what is left of it, the last `body` bytes of which are from registered memory."""

    views: Views = field(default_factory=list)
    left: int = 0
    body: int = 0
    turn: Turn | None = None
    regions: list[Region] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


class Lane:
    """One socket of a link. All but `start`, `wake`, `join` and the notes is for its own thread."""

    def __init__(self, link: TcpLink, sock: socket.socket, number: int) -> None:
        self._link, self._sock = link, sock
        self.idle = False
        """It sleeps, and would begin any turn at once."""
        self.living = True
        self.notes: deque[Note] = deque()
        self.sending: list[Region] = []
        self._batches = link.batches
        self._turns: dict[int, Turn] = {}
        self._writes = 0
        """Of the turns, the number of writes."""
        self._number = 0
        self._reading = 0
        self._control = bytearray()
        self._answers: deque[_Answer] = deque()
        self._answers_turn = False
        self._out = _Outgoing()
        self._blocked = False
        self._header = bytearray(_HEADER.size)
        self._into: Views = [memoryview(self._header)]
        self._then: Callable[[], None] = self._parse
        self._landing: _Landing | None = None
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)
        self._wake_lock = threading.Lock()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"tcp-lane-{number}", daemon=True)
        self._started = False

    def start(self) -> None:
        self._thread.start()
        self._started = True

    def join(self, seconds: float) -> bool:
        if not self._started:
            self._leave()
        elif self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._started or not self._thread.is_alive()

    def wake(self) -> None:
        with self._wake_lock:
            if self._wakes >= 0:
                os.eventfd_write(self._wakes, 1)

    def drop_notes(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.notes.popleft().let_go(sent=False)

    # ----------------------------------------------------------------- the thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        poll.register(self._sock, select.POLLIN)
        try:
            while not self._link.ended:
                moved = self._receive()
                moved = self._send() or moved
                if not moved:
                    self._sleep(poll)
        except (OSError, Broken) as error:
            self._link.fail(TransportError("peer", f"the link over tcp broke: {error}"))
        except Exception as error:  # of our own making: whoever waits for a batch must still hear of its end
            log.exception("a lane of a link over tcp ends, and its link with it")
            self._link.fail(TransportError("device", f"a lane over tcp ended: {error!r}"))
        finally:
            self._leave()

    def _sleep(self, poll: select.poll) -> None:
        blocked = bool(self._out.views)
        if blocked != self._blocked:
            poll.modify(self._sock, select.POLLIN | (select.POLLOUT if blocked else 0))
            self._blocked = blocked
        self.idle = not blocked and self._may_read() and self._may_write()
        # Whoever adds work after this look sees `idle`, and wakes.
        if not self._link.ended and (blocked or not self._can_begin()):
            for file, _ in poll.poll():
                if file == self._wakes:
                    os.eventfd_read(file)
        self.idle = False

    def _leave(self) -> None:
        """The fence of this lane: it touches no memory from here on, and says so to whoever waits."""
        if not self._link.delivers:
            with contextlib.suppress(OSError):  # a reset: what the peer has not received is thrown away
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._sock.close()
        self._let_go_of_landing()
        self._let_go_of_outgoing()
        error = self._link.error or TransportError("closed", "the link has ended")
        for turn in self._turns.values():
            self._batches.lost(turn, error)
        self._turns.clear()
        for note in self._out.notes:
            note.let_go(sent=False)
        self.living = False
        self.drop_notes()
        with self._wake_lock:
            if self._wakes >= 0:
                os.close(self._wakes)
            self._wakes = -1

    # ----------------------------------------------------------------- receiving

    def _receive(self) -> bool:
        """One system call. The header that follows a body is received along with it."""
        landing = self._landing
        if landing is not None and (any(held.ended for held in landing.holds) or (landing.of_peer and self._peer_ended())):
            self._discard()
        try:
            got = self._sock.recvmsg_into(self._into[:_MAX_IOV])[0]
        except BlockingIOError:
            return False
        if not got:
            raise Broken("the peer has closed it")
        self._into = advanced(self._into, got)
        if self._landing is not None and len(self._into) <= 1:
            self._landed()
        if not self._into:
            self._then()
        return True

    def _peer_ended(self) -> bool:
        """It sends nothing more. What is received after that is not to land: who has ended a link in mid-write relies on that,
        also when this process was stopped meanwhile."""
        return bool(self._hung_up.poll(0))

    def _expect_header(self, body: Views, landing: _Landing | None) -> None:
        self._into = [*body, memoryview(self._header)]
        self._then = self._parse
        self._landing = landing
        if landing is not None and not body:
            self._landed()

    def _landed(self) -> None:
        assert self._landing is not None
        landing = self._landing
        self._let_go_of_landing()
        landing.finish(bool(landing.holds))

    def _let_go_of_landing(self) -> None:
        if self._landing is not None:
            for held in self._landing.holds:
                held.release()
        self._landing = None

    def _discard(self) -> None:
        landing = self._landing
        assert landing is not None
        self._let_go_of_landing()
        self._landing = _Landing([], landing.finish)
        self._into = [*_fill(_SCRATCH, sum(map(len, self._into[:-1]))), self._into[-1]]

    def _parse(self) -> None:
        kind, rows, number, body = _HEADER.unpack(self._header)
        if body > _MAX_BODY or rows > _MAX_ROWS or (rows > 0) != (kind in (_READ, _WRITE)):
            raise Broken(f"the peer announced {body} bytes in {rows} rows as message {kind}")
        if rows:
            table = bytearray(rows * _ROW.size)
            self._into = [memoryview(table)]
            self._then = lambda: self._asked(kind, number, body, table)
        elif kind == _DATA:
            self._expect_data(number, body)
        elif kind == _DONE:
            self._expect_header([], None)
            self._batches.landed(self._answered(number, "write"))
            self._more()
        elif kind == _FAIL:
            self._expect_header([], None)
            turn = self._answered(number)
            detail = (
                f"the peer refused to {turn.batch.op} {turn.size} bytes: its memory is not registered any more, or not there"
            )
            self._batches.lost(turn, TransportError("bounds", detail))
            self._more()
        elif kind == _NOTICE and body <= MAX_NOTICE_BYTES:
            notice = bytearray(body)
            self._expect_header([memoryview(notice)] if body else [], _Landing([], lambda _: self._noticed(notice)))
        else:
            raise Broken(f"the peer sent message {kind} of {body} bytes, which this build does not know")

    def _answered(self, number: int, op: Op | None = None) -> Turn:
        turn = self._turns.pop(number, None)
        if turn is None or op not in (None, turn.batch.op):
            raise Broken("the peer answered what nobody asked")
        if turn.batch.op == "read":
            self._reading -= turn.size
        else:
            self._writes -= 1
        return turn

    def _more(self) -> None:
        if self._batches.ready("read") or self._batches.ready("write"):
            self._link.kick(all_lanes=False)

    def _noticed(self, notice: bytearray) -> None:
        if not self._link.inbox.put(bytes(notice)):
            raise Broken("the peer sent more notices than this end looks at")

    def _expect_data(self, number: int, body: int) -> None:
        turn = self._answered(number, "read")
        if turn.size != body:
            self._batches.lost(turn, TransportError("peer", f"{body} bytes came for {turn.size}"))
            raise Broken(f"the peer sent {body} bytes and not {turn.size}")

        def finish(kept: bool) -> None:
            if kept:
                self._batches.landed(turn)
            else:
                self._batches.lost(turn)
            self._more()

        if turn.batch.hold():
            try:
                views = self._link.transport.views(turn.pieces)
            except TransportError as error:
                turn.batch.release()
                self._batches.lost(turn, error)
                self._expect_header(_fill(_SCRATCH, body), _Landing([], lambda _: self._more()))
                return
            self._expect_header(views, _Landing([turn.batch], finish))
        else:
            self._expect_header(_fill(_SCRATCH, body), _Landing([], finish))

    def _asked(self, kind: int, number: int, body: int, table: bytearray) -> None:
        """The peer wants to read or write; whether it may is decided here."""
        views: Views = []
        regions: list[Region] = []
        valid, total = True, 0
        for address, length, token in _ROW.iter_unpack(table):
            total += length
            region = self._link.transport.find(token)
            if not length or region is None or address < region.address or address + length > region.address + region.length:
                valid = False
                continue
            views.append(region.part(address, length))
            if region not in regions:
                regions.append(region)
        if total > _MAX_BODY or (kind == _WRITE and total != body) or (kind == _READ and body):
            raise Broken(f"the peer announced {body} bytes and named {total}")
        if kind == _READ:
            self._expect_header([], None)
            if not valid:
                self._say(_FAIL, number)
            elif len(self._answers) >= _MAX_ANSWERS:
                raise Broken(f"the peer asked for more than {_MAX_ANSWERS} things at a time")
            else:
                self._answers.append(_Answer(number, views, regions))
            return

        def finish(kept: bool) -> None:
            self._say(_DONE if kept else _FAIL, number)

        if valid and _hold_all(regions):
            self._expect_header(views, _Landing(list(regions), finish, of_peer=True))
        else:
            self._expect_header(_fill(_SCRATCH, body), _Landing([], finish))

    # ----------------------------------------------------------------- sending

    def _say(self, kind: int, number: int) -> None:
        if len(self._control) > _MAX_ANSWERS * _HEADER.size:
            raise Broken("the peer writes and does not read the answers")
        self._control += _HEADER.pack(kind, 0, number, 0)

    def _can_begin(self) -> bool:
        return bool(
            self._control
            or self._answers
            or self.notes
            or (self._batches.ready("read") and self._may_read())
            or (self._batches.ready("write") and self._may_write())
        )

    def _may_read(self) -> bool:
        return self._reading < _LANE_WINDOW and len(self._turns) - self._writes < _LANE_TURNS

    def _may_write(self) -> bool:
        return self._writes < _LANE_TURNS

    def _send(self) -> bool:
        """One system call."""
        if not self._out.views:
            self._begin()
        out = self._out
        if not out.views:
            return False
        if out.turn is not None and out.turn.batch.ended:
            self._send_zeros()
        try:
            sent = self._sock.sendmsg(out.views[:_MAX_IOV])
        except BlockingIOError:
            return False
        out.views = advanced(out.views, sent)
        out.left -= sent
        if not out.views:
            for note in out.notes:
                note.let_go(sent=True)
            self._let_go_of_outgoing()
            self._out = _Outgoing()
        return True

    def _begin(self) -> None:
        """What is sent next: all small messages, then one body."""
        while self._may_read() and (turn := self._batches.cut("read")) is not None:
            if (asked := self._ask(_READ, turn)) is not None:
                self._reading += turn.size
                self._control += asked
        out = _Outgoing()
        while self.notes and len(self._control) < TURN_BYTES:
            note = self.notes.popleft()
            out.notes.append(note)
            self._control += _HEADER.pack(_NOTICE, 0, 0, len(note.message)) + note.message
        head, self._control = self._control, bytearray()
        body: Views = []
        # Turn about, so that neither end's writes starve the other end's reads.
        self._answers_turn = not self._answers_turn
        for answers in (self._answers_turn, not self._answers_turn):
            began = self._begin_answer(out, head) if answers else self._begin_write(out, head)
            if began is not None:
                body = began
                break
        out.body = sum(map(len, body))
        out.left = len(head) + out.body
        out.views = [memoryview(head), *body] if head else body
        self._out = out

    def _begin_answer(self, out: _Outgoing, head: bytearray) -> Views | None:
        while self._answers:
            answer = self._answers.popleft()
            if _hold_all(answer.regions):
                out.regions = self.sending = answer.regions
                head += _HEADER.pack(_DATA, 0, answer.number, sum(map(len, answer.views)))
                return answer.views
            head += _HEADER.pack(_FAIL, 0, answer.number, 0)
        return None

    def _begin_write(self, out: _Outgoing, head: bytearray) -> Views | None:
        while self._may_write() and (turn := self._batches.cut("write")) is not None:
            if not turn.batch.hold():
                self._batches.lost(turn)
                continue
            try:
                views = self._link.transport.views(turn.pieces)
            except TransportError as error:
                turn.batch.release()
                self._batches.lost(turn, error)
                continue
            asked = self._ask(_WRITE, turn)
            if asked is None:
                turn.batch.release()
                continue
            self._writes += 1
            out.turn = turn
            head += asked
            return views
        return None

    def _ask(self, kind: int, turn: Turn) -> bytes | None:
        """The message that begins a turn, which is under way from now on."""
        places = ((piece.remote, piece.length) for piece in turn.pieces)
        try:
            rows = [_ROW.pack(*run) for run in runs(places, self._link.remote)]
        except TransportError as error:
            self._batches.lost(turn, error)
            return None
        self._number += 1
        self._turns[self._number] = turn
        body = turn.size if kind == _WRITE else 0
        return _HEADER.pack(kind, len(rows), self._number, body) + b"".join(rows)

    def _send_zeros(self) -> None:
        """In place of the rest of a body whose batch has ended: its memory may be another's by now."""
        out = self._out
        left_of_body = min(out.body, out.left)
        head = _first(out.views, out.left - left_of_body)
        out.views = [*head, *_fill(_ZEROS, left_of_body)]
        self._let_go_of_outgoing()

    def _let_go_of_outgoing(self) -> None:
        out = self._out
        if out.turn is not None:
            out.turn.batch.release()
        for region in out.regions:
            region.release()
        out.turn, out.regions, self.sending = None, [], []


def _hold_all(regions: Sequence[Region]) -> bool:
    for number, region in enumerate(regions):
        if not region.hold():
            for held in regions[:number]:
                held.release()
            return False
    return True


def _first(views: Views, count: int) -> Views:
    """So many bytes of them, from the beginning."""
    taken: Views = []
    for view in views:
        if not count:
            break
        taken.append(view[:count])
        count -= len(taken[-1])
    return taken


def _fill(source: memoryview, length: int) -> Views:
    """Views of `source`, over and over, so many bytes."""
    whole, rest = divmod(length, len(source))
    return [source] * whole + ([source[:rest]] if rest else [])
