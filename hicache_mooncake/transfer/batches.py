"""What links of all transports share, without I/O: batches and how they end, turns between them, bytes under way, notices."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hicache_mooncake.transfer.transport import Extents, Op, Pending, Piece, TransportError

TURN_BYTES = 1 << 20
"""What a batch moves before the next one has its turn."""
TURN_PIECES = 256
MAX_BATCHES = 1024
"""Of a link, not done yet; one more waits."""
_MAX_NOTICES, _MAX_NOTICES_BYTES = 4096, 4 << 20


class Fenced:
    """What threads use in short holds, and what can be ended: once it has ended and the last hold is gone it is `quiet`, for
    good. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds = 0
        self._quiet = threading.Event()
        self.ended = False
        """Whoever holds it should let go soon."""
        self.error: TransportError | None = None
        """Why it ended; None is success. Settled when `ended`."""

    def hold(self) -> bool:
        """False when it has ended. True: it will not be quiet before `release`."""
        with self._lock:
            if not self.ended:
                self._holds += 1
            return not self.ended

    def release(self) -> None:
        with self._lock:
            assert self._holds > 0
            self._holds -= 1
            if self.ended and not self._holds:
                self._quiet.set()

    def end(self, error: TransportError | None = None) -> bool:
        """The first end counts; False when it had ended before. Does not wait."""
        with self._lock:
            if self.ended:
                return False
            self.error = error
            self.ended = True
            if not self._holds:
                self._quiet.set()
            return True

    @property
    def quiet(self) -> bool:
        return self._quiet.is_set()

    def wait_quiet(self, seconds: float) -> bool:
        return self._quiet.wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))


class Batch(Fenced, Pending):
    """One call of `Link.submit`. Whoever moves bytes of it between this process's memory and anything else holds it meanwhile,
    looks at `ended` between short steps, and releases it; so it is done only when nothing of it moves any more.

    A deadline needs no timer: whoever looks at `done`, waits, or cuts the next turn enforces it.
    """

    def __init__(self, op: Op, pieces: Sequence[Piece], deadline: float, stopped: Callable[[Batch], None]) -> None:
        """`stopped` is called once, from any thread, after the batch was ended from outside (deadline, cancel): whoever holds
        it is to be hurried. It must not wait."""
        super().__init__()
        self.op = op
        self.pieces = [piece for piece in pieces if piece.length]
        self.total = sum(piece.length for piece in self.pieces)
        self.deadline = deadline
        self.left = self.total
        """Bytes that have not been moved yet."""
        self._stopped = stopped
        self._next = 0
        self._offset = 0

    @property
    def done(self) -> bool:
        if not self.ended and time.monotonic() > self.deadline:
            self.expire()
        return self.quiet

    def wait(self) -> None:
        if not self.wait_quiet(self.deadline - time.monotonic()):
            self.expire()
            self._quiet.wait()
        if self.error is not None:
            raise TransportError(self.error.reason, str(self.error))

    def cancel(self) -> None:
        self.stop(TransportError("cancelled", "the batch was cancelled"))
        self._quiet.wait()

    def expire(self) -> None:
        moved = self.total - self.left
        self.stop(TransportError("deadline", f"{self.op} of {self.total} bytes: {moved} were moved before the deadline"))

    def stop(self, error: TransportError) -> None:
        """End it from outside. Does not wait."""
        if self.end(error):
            self._stopped(self)

    @property
    def uncut(self) -> bool:
        """Whether there are pieces that no turn has."""
        return not self.ended and self._next < len(self.pieces)

    def cut(self, most_bytes: int, most_pieces: int) -> Turn:
        """The next pieces, at most so much of them. Not thread-safe. A piece that is longer is split."""
        pieces: list[Piece] = []
        size = 0
        while self._next < len(self.pieces) and size < most_bytes and len(pieces) < most_pieces:
            piece = self.pieces[self._next]
            if not self._offset and piece.length <= most_bytes - size:
                pieces.append(piece)
                size += piece.length
                self._next += 1
                continue
            local, remote, length = piece
            length = min(length - self._offset, most_bytes - size)
            pieces.append(Piece(local + self._offset, remote + self._offset, length))
            size += length
            self._offset += length
            if self._offset == self.pieces[self._next].length:
                self._next, self._offset = self._next + 1, 0
        return Turn(self, pieces, size)


class Turn(NamedTuple):
    """Some of a batch's pieces, `size` bytes, moved together."""

    batch: Batch
    pieces: list[Piece]
    size: int


class Batches:
    """The batches of one link. Thread-safe.

    The link calls `admit` for each submit, and its workers `cut` turns, move them, and give each back with `landed` or `lost`.
    Batches have turns one after the other, so a huge one delays a small one by its turns that are under way and no more. In
    each direction at most `max_in_flight` bytes are cut and not given back; also of batches that have ended meanwhile, since
    a peer may be moving them still.
    """

    def __init__(
        self,
        max_in_flight: int,
        stopped: Callable[[], None],
        *,
        turn_bytes: int = TURN_BYTES,
        turn_pieces: int = TURN_PIECES,
        max_batches: int = MAX_BATCHES,
    ) -> None:
        """`stopped`: a batch was ended from outside while somebody held it; hurry. It must not wait."""
        self._condition = threading.Condition()
        self._max_in_flight = max(1, max_in_flight)
        self._turn_bytes = max(1, min(turn_bytes, max_in_flight // 2))
        self._turn_pieces = turn_pieces
        self._max_batches = max_batches
        self._hurry = stopped
        self._live: set[Batch] = set()
        self._queues: dict[Op, deque[Batch]] = {"read": deque(), "write": deque()}
        self._in_flight: dict[Op, int] = {"read": 0, "write": 0}
        self._moved: dict[Op, int] = {"read": 0, "write": 0}
        self._error: TransportError | None = None

    def admit(self, op: Op, pieces: Sequence[Piece], deadline: float) -> Batch:
        """A batch, ready to be cut; without bytes it is done. Waits while there are too many. Raises TransportError."""
        batch = Batch(op, pieces, deadline, self._stopped)
        with self._condition:
            while self._error is None and len(self._live) >= self._max_batches:
                left = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                if left <= 0:
                    raise TransportError("deadline", f"{len(self._live)} batches are under way on this link")
                self._condition.wait(left)
            if self._error is not None:
                raise TransportError(self._error.reason, str(self._error))
            if not batch.pieces:
                batch.end()
                return batch
            self._live.add(batch)
            self._queues[op].append(batch)
        return batch

    def ready(self, op: Op) -> bool:
        """Whether `cut` may have something. A hint: it takes no lock."""
        return bool(self._queues[op]) and self._room(op)

    def _room(self, op: Op) -> bool:
        return self._in_flight[op] + self._turn_bytes <= self._max_in_flight

    def cut(self, op: Op) -> Turn | None:
        """The next turn, or None while there is none or too much is under way."""
        late: list[Batch] = []
        try:
            with self._condition:
                queue = self._queues[op]
                while queue and self._room(op):
                    batch = queue.popleft()
                    if time.monotonic() > batch.deadline:
                        late.append(batch)
                    elif batch.uncut:
                        turn = batch.cut(self._turn_bytes, self._turn_pieces)
                        self._in_flight[op] += turn.size
                        if batch.uncut:
                            queue.append(batch)
                        return turn
                return None
        finally:
            for batch in late:
                batch.expire()

    def landed(self, turn: Turn) -> None:
        """All bytes of the turn were moved. With its last one the batch is done, unless it had ended before."""
        batch = turn.batch
        with self._condition:
            self._in_flight[batch.op] -= turn.size
            self._moved[batch.op] += turn.size
            batch.left -= turn.size
            if batch.left:
                return
            self._forget(batch)
        batch.end()

    def lost(self, turn: Turn, error: TransportError | None = None) -> None:
        """The turn is not under way any more. The batch ends with `error`, which may be left out if it has ended already."""
        batch = turn.batch
        with self._condition:
            self._in_flight[batch.op] -= turn.size
            self._forget(batch)
        assert error is not None or batch.ended
        if error is not None and batch.end(error):
            self._hurry()

    def close(self, error: TransportError) -> None:
        """All batches end with `error`, and none is admitted any more. Does not wait for those who hold one."""
        with self._condition:
            self._error = self._error or error
            live, self._live = self._live, set()
            for queue in self._queues.values():
                queue.clear()
            self._condition.notify_all()
        for batch in live:
            batch.end(error)

    def in_flight(self, op: Op) -> int:
        return self._in_flight[op]

    def moved(self, op: Op) -> int:
        """Bytes, since the link was made."""
        return self._moved[op]

    def _stopped(self, batch: Batch) -> None:
        with self._condition:
            self._forget(batch)
            with contextlib.suppress(ValueError):  # it would be kept until there is room to cut
                self._queues[batch.op].remove(batch)
        if not batch.quiet:
            self._hurry()

    def _forget(self, batch: Batch) -> None:
        if batch in self._live:
            self._live.remove(batch)
            self._condition.notify()


def check_pieces(pieces: Sequence[Piece], local: Extents, remote: Extents) -> None:
    """Raises TransportError, `bounds`, unless each piece lies in what is registered here and in what was learned."""
    for side, extents in ((0, local), (1, remote)):
        start = end = 0
        for piece in pieces:
            address, length = piece[side], piece.length
            if length < 0:
                raise TransportError("bounds", f"a length of {length}")
            if length and not (start <= address and address + length <= end):
                start, size, _ = extents.find(address, length)
                end = start + size


def runs(places: Iterable[tuple[int, int]], extents: Extents) -> Iterator[tuple[int, int, bytes]]:
    """(address, length, token) of each (address, length); those that follow each other within a stretch are one. Raises
    TransportError, `bounds`."""
    start = end = first = last = 0
    token = b""
    for address, length in places:
        if address == last and address + length <= end:
            last += length
            continue
        if last > first:
            yield first, last - first, token
        if not (start <= address and address + length <= end):
            start, size, token = extents.find(address, length)
            end = start + size
        first, last = address, address + length
    if last > first:
        yield first, last - first, token


class Inbox:
    """Notices that nobody has looked at yet. Thread-safe."""

    def __init__(self, max_notices: int = _MAX_NOTICES, max_bytes: int = _MAX_NOTICES_BYTES) -> None:
        self._lock = threading.Lock()
        self._notices: list[bytes] = []
        self._bytes = 0
        self._max_notices, self._max_bytes = max_notices, max_bytes

    def put(self, notice: bytes) -> bool:
        """False when there would be too many: then the link must end."""
        with self._lock:
            if len(self._notices) >= self._max_notices or self._bytes + len(notice) > self._max_bytes:
                return False
            self._notices.append(notice)
            self._bytes += len(notice)
            return True

    def take(self) -> list[bytes]:
        with self._lock:
            taken, self._notices, self._bytes = self._notices, [], 0
            return taken
