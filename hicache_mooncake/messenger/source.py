"""The prefill side of one session, `Source`, without clock, socket or thread.

Time and events come in; what is to be done is in `take()`. Not thread-safe. docs/messenger.md has the states.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_mooncake.messenger import actions as a
from hicache_mooncake.messenger import messages as m
from hicache_mooncake.messenger.layout import MAX_PAGES, Layout, pieces

_RETRY_FIRST_S, _RETRY_MAX_S = 0.1, 1.0


class SourceState(enum.Enum):
    CONNECTING = enum.auto()
    OPENING = enum.auto()
    STREAMING = enum.auto()
    ABORTING = enum.auto()
    """It has failed, and something is still under way."""
    DONE = enum.auto()
    FAILED = enum.auto()


class _At(enum.Enum):
    QUEUED = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    TOLD = enum.auto()


@dataclass(slots=True, eq=False)
class _Run:
    ticket: int
    layer: int
    first: int
    places: Sequence[int]
    checksum: int
    size: int
    tag: object
    at: _At = _At.QUEUED

    @property
    def end(self) -> int:
        return self.first + len(self.places)


class Source:
    """The prefill side. Pages of each layer are pushed from first to last, the layers in any order."""

    def __init__(
        self,
        session: bytes,
        request: str,
        layout: Layout,
        bases: Sequence[Sequence[int]],
        pages: int,
        limits: a.Limits,
        now: float,
        deadline: float,
        *,
        checked: bool = True,
    ) -> None:
        """`bases`: for each layer the address here of page 0 of each part. Raises ValueError."""
        layout.check()
        layout.check_bases(bases)
        if not 1 <= pages <= MAX_PAGES:
            raise ValueError(f"a session has 1 to {MAX_PAGES} pages, not {pages}")
        if len(request.encode()) > m.MAX_REQUEST_BYTES:
            raise ValueError(f"a request id has at most {m.MAX_REQUEST_BYTES} bytes")
        self.session, self.request, self.layout, self.pages = session, request, layout, pages
        self.checked = checked
        self.deadline = deadline
        self.state = SourceState.CONNECTING
        self.generation = 1
        self.reason = self.detail = ""
        self.pushed = [0] * layout.layers
        self.counted = [0] * layout.layers
        self.queued_bytes = 0
        """Pushed, and not counted."""
        self.writing_bytes = 0
        self.stale = 0
        """Messages of attempts that are over."""
        self.resent_bytes = 0
        self._bases, self._limits = bases, limits
        self._actions: list[a.Action] = [a.Connect(1)]
        self._runs: dict[int, _Run] = {}
        """All that is not counted yet, in the order of pushing."""
        self._queue: deque[_Run] = deque()
        self._order: deque[_Run] = deque()
        """Written or being written, in the order in which they will be told."""
        self._told: list[deque[_Run]] = [deque() for _ in range(layout.layers)]
        self._next_ticket = 0
        self._their_bases: list[list[int]] = []
        self._their_counts: list[int] = []
        self._their_places: list[int] = []
        self._dirty = False
        """A write of this attempt failed: what it does to the peer's memory ends with the peer's end of the link only."""
        self._connected = False
        self._retry_at = math.inf
        self._retry_s = _RETRY_FIRST_S
        self._give_up_at = min(deadline, now + limits.resume_s)
        self._lost = ""
        self._open_until = math.inf
        self._quiet_until = math.inf
        self._heard = self._spoke = now
        self._end: tuple[int, bytes] | None = None
        self._committed = False
        self._answered = False

    def take(self) -> list[a.Action]:
        """What is to be done, in order, since the last call."""
        taken, self._actions = self._actions, []
        return taken

    @property
    def ended(self) -> bool:
        return self.state in (SourceState.DONE, SourceState.FAILED)

    @property
    def failing(self) -> bool:
        return self.state in (SourceState.ABORTING, SourceState.FAILED)

    @property
    def has_room(self) -> bool:
        """Whether another push may be queued."""
        return not self._runs or self.queued_bytes < self._limits.queued_bytes

    # ---- the caller

    def cut(self, layer: int, first: int, count: int) -> list[range]:
        """How a push is to be cut into runs. Raises ValueError for a push that does not continue its layer."""
        if not 0 <= layer < self.layout.layers:
            raise ValueError(f"layer {layer}: there are {self.layout.layers}")
        if first != self.pushed[layer]:
            raise ValueError(f"layer {layer}: page {self.pushed[layer]} is next, not {first}")
        if count < 1 or first + count > self.pages:
            raise ValueError(f"layer {layer}: {count} pages from {first} on are not in a session of {self.pages}")
        step = max(1, self._limits.chunk_bytes // self.layout.page_bytes(layer))
        return [range(at, min(at + step, first + count)) for at in range(first, first + count, step)]

    def push(self, layer: int, first: int, places: Sequence[int], checksum: int, tag: object = None) -> None:
        """One run, as from `cut`. `places`: of each page, as a multiple of its parts' lengths. The memory is the session's
        until Release with this `tag`."""
        if self.failing:
            self._actions.append(a.Release(tag, False))
            return
        if self._end is not None:
            raise ValueError("the session has been finished")
        self.cut(layer, first, len(places))
        run = _Run(self._next_ticket, layer, first, places, checksum, self.layout.page_bytes(layer) * len(places), tag)
        self._next_ticket += 1
        self.pushed[layer] = run.end
        self.queued_bytes += run.size
        self._runs[run.ticket] = run
        self._queue.append(run)
        self._write()

    def finish(self, now: float, first_token: int, aux: bytes) -> None:
        """Raises ValueError when not all has been pushed."""
        if self._end is not None:
            raise ValueError("the session has been finished")
        if len(aux) > m.MAX_AUX_BYTES:
            raise ValueError(f"aux has at most {m.MAX_AUX_BYTES} bytes, not {len(aux)}")
        if self.failing:
            return
        for layer, pushed in enumerate(self.pushed):
            if pushed != self.pages:
                raise ValueError(f"layer {layer}: {pushed} of {self.pages} pages were pushed")
        self._end = (first_token, aux)
        self._speak(now)

    def abort(self, now: float, reason: str = "cancelled", detail: str = "the source has aborted the session") -> None:
        self._fail(now, reason, detail, tell=True)

    # ---- the link

    def connected(self, now: float, generation: int) -> None:
        """Nothing of the links before is under way here any more."""
        if generation != self.generation or self.state is not SourceState.CONNECTING:
            return
        self._connected = True
        self._open(now)

    def not_connected(self, now: float, generation: int, why: str) -> None:
        if generation != self.generation or self.state is not SourceState.CONNECTING:
            return
        self._lost = why
        self._retry_at = now + self._retry_s
        self._retry_s = min(_RETRY_MAX_S, 2 * self._retry_s)
        self.tick(now)

    def link_failed(self, now: float, generation: int, why: str) -> None:
        if generation != self.generation or self.state not in (SourceState.OPENING, SourceState.STREAMING):
            return
        self._lost = why
        self._connected = False
        if self.state is SourceState.STREAMING:
            self._give_up_at = min(self.deadline, now + self._limits.resume_s)
        self.state = SourceState.CONNECTING
        if self.generation >= self._limits.attempts:
            self._fail(now, "peer", f"{why}; {self.generation} links failed", tell=False)
            return
        self.generation += 1
        self._retry_at = math.inf
        self._actions.append(a.Connect(self.generation))

    def wrote(self, now: float, ticket: int, reason: str = "", why: str = "") -> None:
        """The Write of this ticket has ended; without a reason all of it was moved."""
        run = self._runs.get(ticket)
        if run is None or run.at is not _At.WRITING:
            return
        self.writing_bytes -= run.size
        if reason:
            run.at = _At.QUEUED
            self._dirty = True
            if reason == "bounds":
                self._fail(now, reason, why, tell=True)
            else:
                self.link_failed(now, self.generation, why)
        else:
            run.at = _At.WRITTEN
        self._speak(now)
        self._open(now)
        self._settle(now)

    # ---- the peer

    def told(self, now: float, message: m.Any) -> None:
        if message.generation != self.generation or self.ended:
            self.stale += 1
            return
        self._heard = now
        match message:
            case m.Declined():
                self._fail(now, message.reason, message.detail, tell=False)
            case m.Abort():
                self._fail(now, message.reason, message.detail, tell=False)
            case m.Reserved() if self.state is SourceState.OPENING and not self._their_bases:
                self._reserved(now, message)
            case m.Places() if self.state is SourceState.OPENING and self._their_bases:
                self._learn(now, message)
            case m.Counted() if self.state is SourceState.STREAMING:
                self._count(now, message)
            case m.Done() if self.state in (SourceState.OPENING, SourceState.STREAMING):
                self._done(now)
            case _:
                pass

    def _reserved(self, now: float, message: m.Reserved) -> None:
        try:
            self.layout.check_bases(message.bases)
            if message.pages != self.pages or len(message.counts) != self.layout.layers:
                raise ValueError(f"{message.pages} places and {len(message.counts)} counts for {self.pages} pages")
            for count, pushed in zip(message.counts, self.pushed, strict=True):
                if not 0 <= count <= pushed:
                    raise ValueError(f"{count} pages counted where {pushed} were pushed")
        except ValueError as error:
            self._fail(now, "protocol", f"the destination's answer: {error}", tell=True)
            return
        self._their_bases, self._their_counts = message.bases, message.counts
        self._answered = True

    def _learn(self, now: float, message: m.Places) -> None:
        if message.first != len(self._their_places) or message.first + len(message.places) > self.pages:
            self._fail(now, "protocol", "the destination's places do not follow each other", tell=True)
            return
        self._their_places += message.places
        if len(self._their_places) == self.pages:
            self._resume(now)

    def _resume(self, now: float) -> None:
        for layer, count in enumerate(self._their_counts):
            self._settle_count(layer, count)
        if any(run.first < self._their_counts[run.layer] for run in self._runs.values()):
            self._fail(now, "protocol", "the destination has counted half of a run", tell=True)
            return
        if self.generation > 1:
            self.resent_bytes += sum(run.size for run in self._runs.values() if run.at is not _At.QUEUED)
        for told in self._told:
            told.clear()
        self._order.clear()
        for run in self._runs.values():
            run.at = _At.QUEUED
        self._queue = deque(self._runs.values())
        self.state = SourceState.STREAMING
        self._retry_s = _RETRY_FIRST_S
        self._give_up_at = math.inf
        self._speak(now)

    def _count(self, now: float, message: m.Counted) -> None:
        if not 0 <= message.layer < self.layout.layers:
            self._fail(now, "protocol", f"the destination counts layer {message.layer}", tell=True)
            return
        told = self._told[message.layer]
        while told and told[0].end <= message.count:
            self._arrived(told.popleft())
        self._write()
        self._speak(now)

    def _settle_count(self, layer: int, count: int) -> None:
        for run in [run for run in self._runs.values() if run.layer == layer and run.end <= count]:
            self._arrived(run)

    def _arrived(self, run: _Run) -> None:
        del self._runs[run.ticket]
        self.counted[run.layer] = run.end
        self.queued_bytes -= run.size
        self._actions.append(a.Release(run.tag, True))

    def _done(self, now: float) -> None:
        if self._end is None or any(run.at is _At.WRITING for run in self._runs.values()):
            self._fail(now, "protocol", "the destination is done before the source is", tell=True)
            return
        for run in list(self._runs.values()):
            self._arrived(run)
        self.state = SourceState.DONE
        self._actions.append(a.Ended("", ""))

    # ---- what follows

    def _open(self, now: float) -> None:
        if self.state is not SourceState.CONNECTING or not self._connected or self.writing_bytes:
            return
        self.state = SourceState.OPENING
        self._their_bases, self._their_counts, self._their_places = [], [], []
        self._dirty = self._committed = False
        self._heard = now
        self._open_until = now + self._limits.open_s
        budget = max(0.0, self.deadline - now)
        fresh = not self._answered
        self._tell(
            now, m.Open(self.session, self.generation, self.request, self.layout, self.pages, self.checked, budget, fresh)
        )

    def _write(self) -> None:
        while self.state is SourceState.STREAMING and self._queue:
            run = self._queue[0]
            if self.writing_bytes and self.writing_bytes + run.size > self._limits.window_bytes:
                return
            self._queue.popleft()
            run.at = _At.WRITING
            self._order.append(run)
            self.writing_bytes += run.size
            theirs = self._their_places[run.first : run.end]
            cut = pieces(self.layout.runs[run.layer], self._bases[run.layer], run.places, self._their_bases[run.layer], theirs)
            self._actions.append(a.Write(run.ticket, self.generation, cut, run.size))

    def _speak(self, now: float) -> None:
        """Tell what has been written, in order, and begin to write more."""
        if self.state is not SourceState.STREAMING:
            return
        while self._order and self._order[0].at is _At.WRITTEN:
            run = self._order.popleft()
            run.at = _At.TOLD
            self._told[run.layer].append(run)
            self._tell(now, m.Ran(self.session, self.generation, run.layer, run.first, len(run.places), run.checksum))
        self._write()
        if self._end is not None and not self._order and not self._queue and not self._committed:
            self._committed = True
            self._tell(now, m.Commit(self.session, self.generation, *self._end))

    def _tell(self, now: float, message: m.Any) -> None:
        self._spoke = now
        self._actions.append(a.Tell(message))

    def _fail(self, now: float, reason: str, detail: str, *, tell: bool) -> None:
        if self.ended or self.state is SourceState.ABORTING:
            return
        linked = self.state in (SourceState.OPENING, SourceState.STREAMING)
        self._connected = linked
        self.reason, self.detail = reason, detail
        self.state = SourceState.ABORTING
        self._quiet_until = now + self._limits.quiet_s
        if linked and tell:
            self._tell(now, m.Abort(self.session, self.generation, False, reason, detail))
        self._settle(now)

    def _settle(self, now: float) -> None:
        if self.state is not SourceState.ABORTING or self.writing_bytes:
            return
        if self._connected:
            self._tell(now, m.Quiet(self.session, self.generation, not self._dirty))
        self._actions += [a.Release(run.tag, False) for run in self._runs.values()]
        self._runs.clear()
        self._queue.clear()
        self._order.clear()
        self.queued_bytes = 0
        self.state = SourceState.FAILED
        self._actions.append(a.Ended(self.reason, self.detail))

    def tick(self, now: float) -> None:
        if self.ended:
            return
        if self.state is SourceState.ABORTING:
            if now >= self._quiet_until:
                self._quiet_until = math.inf
                self._connected = False
                self._actions.append(a.Drop(self.generation))
            return
        if now >= self.deadline:
            self._fail(now, "deadline", f"not delivered before the deadline: {self._lost or self._stage()}", tell=True)
        elif self.state is SourceState.CONNECTING:
            if now >= self._give_up_at:
                self._fail(now, "peer", self._lost or "the destination cannot be reached", tell=False)
            elif now >= self._retry_at:
                self._retry_at = math.inf
                self._actions.append(a.Connect(self.generation))
        elif self.state is SourceState.OPENING and now >= self._open_until:
            self._fail(now, "deadline", f"the destination had no buffers within {self._limits.open_s:g} s", tell=True)
        elif now - self._heard >= self._limits.silence_s:
            self.link_failed(now, self.generation, f"the destination was not heard of for {self._limits.silence_s:g} s")
        elif now - self._spoke >= self._limits.silence_s / a.BEATS:
            self._tell(now, m.Alive(self.session, self.generation, False))

    def _stage(self) -> str:
        return f"{sum(self.counted)} of {self.pages * self.layout.layers} pages of layers have arrived"

    def validate(self) -> None:
        """For tests: what always holds."""
        writing = [run for run in self._runs.values() if run.at is _At.WRITING]
        assert self.writing_bytes == sum(run.size for run in writing)
        assert len(writing) <= 1 or self.writing_bytes <= self._limits.window_bytes
        assert self.queued_bytes == sum(run.size for run in self._runs.values())
        assert all(0 <= c <= pushed <= self.pages for c, pushed in zip(self.counted, self.pushed, strict=True))
        assert not self.ended or not self._runs
        assert not writing or self.state not in (SourceState.OPENING, SourceState.DONE, SourceState.FAILED)
