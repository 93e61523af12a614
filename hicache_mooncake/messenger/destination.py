"""The decode side of one session, `Destination`, without clock, socket or thread.

Time and events come in; what is to be done is in `take()`. Not thread-safe. docs/messenger.md has the states.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from hicache_mooncake.messenger import actions as a
from hicache_mooncake.messenger import messages as m
from hicache_mooncake.messenger.layout import MAX_PAGES, Layout

_FENCE_RETRY_GROWTH = 6


class DestinationState(enum.Enum):
    RESERVING = enum.auto()
    RECEIVING = enum.auto()
    RESUMING = enum.auto()
    """The link before is being fenced."""
    COMMITTED = enum.auto()
    POISONED = enum.auto()
    """It has failed, and its buffers may still be written to."""
    FREED = enum.auto()


_LIVE = (DestinationState.RESERVING, DestinationState.RECEIVING, DestinationState.RESUMING)


class Destination:
    """The decode side."""

    def __init__(
        self, opened: m.Open, layout: Layout, limits: a.Limits, now: float, refused: tuple[str, str] = ("", "")
    ) -> None:
        """`layout`: of this side. `refused`: (reason, detail) when there is no room for another session."""
        self.session, self.generation = opened.session, opened.generation
        self.request, self.pages, self.layout, self.checked = opened.request, opened.pages, layout, opened.checked
        self.state = DestinationState.RESERVING
        self.reason = self.detail = ""
        self.counted = [0] * layout.layers
        """Pages of each layer that have come whole, from the first on."""
        self.first_token = 0
        self.aux = b""
        self.stale = self.repeated = 0
        self.bases: Sequence[Sequence[int]] = ()
        self.places: Sequence[int] = ()
        self._limits = limits
        self._actions: list[a.Action] = []
        self._claimed = [0] * layout.layers
        """The same with those that are being verified."""
        self._verifying = 0
        self._reserving = False
        self._exposed: set[int] = set()
        """Attempts that were told addresses, and may still write."""
        self._fencing: set[int] = set()
        self._fence_at = math.inf
        self._fence_retry_s = limits.fence_retry_s
        self._deadline = now + max(0.0, min(opened.budget_s, 86_400.0))
        self._heard = self._spoke = now
        self._closed_at = math.inf
        self._quiet_until = math.inf
        self._unclaimed_until = math.inf
        self._end: tuple[int, bytes] | None = None
        reason, detail = refused
        disagreement = layout.disagreement(opened.layout)
        if disagreement:
            reason, detail = "layout", f"{disagreement} (here: the destination)"
        elif not 1 <= opened.pages <= MAX_PAGES:
            reason, detail = "layout", f"a session of {opened.pages} pages"
        if reason:
            self._decline(opened.generation, reason, detail)
        else:
            self._reserving = True
            self._actions.append(a.Reserve())

    def take(self) -> list[a.Action]:
        taken, self._actions = self._actions, []
        return taken

    @property
    def ended(self) -> bool:
        """Its buffers are its user's, or free."""
        return self.state is DestinationState.FREED or (
            self.state is DestinationState.COMMITTED and self._unclaimed_until == math.inf
        )

    @property
    def holds_buffers(self) -> bool:
        return not self.ended

    def is_exposed(self, generation: int) -> bool:
        """Whether what comes over this link may still land."""
        return generation in self._exposed

    def forget(self) -> None:
        """It has ended: only how is kept."""
        assert self.ended
        self.bases, self.places = (), ()

    @property
    def size_bytes(self) -> int:
        return self.pages * self.layout.all_bytes

    @property
    def layers_done(self) -> int:
        """How many layers, from the first on, are whole."""
        return next((layer for layer, count in enumerate(self.counted) if count < self.pages), self.layout.layers)

    # ---- the user

    def reserved(self, now: float, bases: Sequence[Sequence[int]], places: Sequence[int]) -> None:
        """Raises ValueError when these are no buffers for this session; then `declined` is to follow."""
        self.layout.check_bases(bases)
        if len(places) != self.pages or min(places) < 0:
            raise ValueError(f"{len(places)} places for {self.pages} pages, or one below 0")
        self._reserving = False
        self.bases, self.places = bases, places
        if self.state is DestinationState.RESERVING:
            self._answer(now)
        else:
            self._drain(now)

    def declined(self, now: float, reason: str, detail: str) -> None:
        """The user has no buffers for it."""
        self._reserving = False
        if self.state is DestinationState.RESERVING:
            self._decline(self.generation, reason, detail)
        else:
            self.state = DestinationState.FREED

    def verified(self, now: float, layer: int, first: int, count: int, matches: bool) -> None:
        self._verifying -= 1
        if self.state in (DestinationState.RECEIVING, DestinationState.RESUMING):
            if not matches:
                self._poison(
                    now,
                    "checksum",
                    f"pages {first} to {first + count - 1} of layer {layer} are not what was pushed: damaged on the way, or "
                    "replaced in the source's memory before they were sent",
                )
            else:
                self._count(now, layer, first + count)
        if self.state is DestinationState.RESUMING:
            self._go_on(now)
        self._drain(now)

    def abort(self, now: float, reason: str = "cancelled", detail: str = "the destination has aborted the session") -> None:
        if self.state is DestinationState.COMMITTED:
            self._unclaim()
        else:
            self._poison(now, reason, detail)

    def claimed(self) -> bool:
        """The user takes the buffers. False when it is too late."""
        if self.state is not DestinationState.COMMITTED:
            return False
        self._unclaimed_until = math.inf
        return True

    def _unclaim(self) -> None:
        if self._unclaimed_until < math.inf:
            self._unclaimed_until = math.inf
            self.state = DestinationState.FREED
            self.reason, self.detail = "unclaimed", "it was delivered, and nobody has asked for it"
            self._actions.append(a.Free())

    # ---- the link

    def link_failed(self, now: float, generation: int) -> None:
        if generation == self.generation and self._closed_at == math.inf:
            self._closed_at = now
            if self.state is DestinationState.POISONED:
                self._quiet_until = now
                self._drain(now)

    def fenced(self, now: float, generation: int, done: bool) -> None:
        self._fencing.discard(generation)
        if done:
            self._exposed.discard(generation)
        if self.state is DestinationState.RESUMING:
            if done:
                self._go_on(now)
            else:
                self._poison(now, "fence", "what the link before was writing cannot be stopped")
        if not done:
            self._fence_at = now + self._fence_retry_s
            self._fence_retry_s = min(2 * self._fence_retry_s, _FENCE_RETRY_GROWTH * self._limits.fence_retry_s)
        self._drain(now)

    # ---- the peer

    def opened(self, now: float, message: m.Open) -> None:
        """Another attempt of the same session, or the first one once more."""
        if message.generation < self.generation:
            self.stale += 1
            return
        if self.state is DestinationState.COMMITTED or (self.state is DestinationState.FREED and self.reason == "unclaimed"):
            self.generation = message.generation
            self._tell(now, m.Done(self.session, self.generation))
            return
        if self.state not in _LIVE:
            self._tell(now, m.Declined(self.session, message.generation, self.reason, self.detail))
            return
        self._heard = now
        if message.generation == self.generation:
            self.repeated += 1
            return
        self.generation = message.generation
        self._closed_at = math.inf
        self._end = None
        if self.state is DestinationState.RECEIVING:
            self.state = DestinationState.RESUMING
            self._fence(now)

    def told(self, now: float, message: m.Any) -> None:
        if message.generation != self.generation or self.state in (DestinationState.COMMITTED, DestinationState.FREED):
            self.stale += 1
            return
        self._heard = now
        match message:
            case m.Ran() if self.state is DestinationState.RECEIVING:
                self._ran(now, message)
            case m.Commit() if self.state is DestinationState.RECEIVING:
                self._end = (message.first_token, message.aux)
                if any(claimed < self.pages for claimed in self._claimed):
                    self._poison(now, "protocol", "the source has committed before all had come")
                self._commit(now)
            case m.Abort():
                self._poison(now, message.reason, message.detail, tell=False)
            case m.Quiet():
                self._poison(now, "peer", "the source has given the session up", tell=False)
                if message.clean:
                    self._exposed.discard(message.generation)
                self._quiet_until = now
                self._drain(now)
            case _:
                pass

    def _ran(self, now: float, message: m.Ran) -> None:
        layer, first, end = message.layer, message.first, message.first + message.count
        if not 0 <= layer < self.layout.layers or message.count < 1 or first < 0 or end > self.pages:
            self._poison(now, "protocol", f"{message.count} pages from {first} on of layer {layer} are not in this session")
        elif end <= self._claimed[layer]:
            self.repeated += 1
        elif first != self._claimed[layer]:
            self._poison(now, "protocol", f"pages of layer {layer}: {self._claimed[layer]} is next, and {first} has come")
        else:
            self._claimed[layer] = end
            if self.checked:
                self._verifying += 1
                self._actions.append(a.Verify(layer, first, message.count, message.checksum))
            else:
                self._count(now, layer, end)

    # ---- what follows

    def _count(self, now: float, layer: int, end: int) -> None:
        self.counted[layer] = end
        if self.state is DestinationState.RECEIVING:
            self._tell(now, m.Counted(self.session, self.generation, layer, end))
            self._commit(now)

    def _commit(self, now: float) -> None:
        if self.state is not DestinationState.RECEIVING or self._end is None or self.layers_done < self.layout.layers:
            return
        self.state = DestinationState.COMMITTED
        self.first_token, self.aux = self._end
        self._unclaimed_until = now + self._limits.unclaimed_s
        self._exposed.clear()
        self._tell(now, m.Done(self.session, self.generation))
        self._actions.append(a.Ended("", ""))

    def _answer(self, now: float) -> None:
        self.state = DestinationState.RECEIVING
        self._exposed.add(self.generation)
        self._claimed = list(self.counted)
        bases = [list(parts) for parts in self.bases]
        self._tell(now, m.Reserved(self.session, self.generation, bases, list(self.counted), self.pages))
        for first in range(0, self.pages, m.MAX_PLACES):
            part = list(self.places[first : first + m.MAX_PLACES])
            self._tell(now, m.Places(self.session, self.generation, first, part))

    def _go_on(self, now: float) -> None:
        """When nothing of the links before lands any more, and nothing that has landed is still being looked at."""
        if not self._exposed and not self._verifying:
            self._answer(now)

    def _fence(self, now: float) -> None:
        self._fence_at = math.inf
        for generation in sorted(self._exposed - self._fencing):
            self._fencing.add(generation)
            self._actions.append(a.Fence(generation))

    def _decline(self, generation: int, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        self.state = DestinationState.FREED
        self._actions += [a.Tell(m.Declined(self.session, generation, reason, detail)), a.Ended(reason, detail)]

    def _poison(self, now: float, reason: str, detail: str, *, tell: bool = True) -> None:
        if self.state not in _LIVE:
            return
        self.state = DestinationState.POISONED
        self.reason, self.detail = reason, detail
        linked = self._closed_at == math.inf
        self._quiet_until = now + self._limits.quiet_s if linked else now
        if tell and linked:
            self._tell(now, m.Abort(self.session, self.generation, True, reason, detail))
        self._actions.append(a.Ended(reason, detail))
        self._drain(now)

    def _drain(self, now: float) -> None:
        """Free the buffers when nobody can write to or reads them any more, and see to it that this comes about."""
        if self.state is not DestinationState.POISONED or self._reserving or self._verifying:
            return
        if not self._exposed:
            self.state = DestinationState.FREED
            if self.bases:
                self._actions.append(a.Free())
        elif now >= self._quiet_until and (self._fence_at == math.inf or now >= self._fence_at):
            self._fence(now)

    def _tell(self, now: float, message: m.Any) -> None:
        self._spoke = now
        self._actions.append(a.Tell(message))

    def tick(self, now: float) -> None:
        if self.state is DestinationState.POISONED:
            self._drain(now)
        elif self.state is DestinationState.COMMITTED:
            if now >= self._unclaimed_until:
                self._unclaim()
        elif self.state in _LIVE:
            lost_at = min(self._closed_at, self._heard + self._limits.silence_s)
            if now >= self._deadline:
                self._poison(now, "deadline", "the source's deadline has passed")
            elif now >= lost_at + self._limits.resume_s:
                self._poison(now, "peer", "the source is gone, and has not come back")
            elif self._closed_at == math.inf and now - self._spoke >= self._limits.silence_s / a.BEATS:
                self._tell(now, m.Alive(self.session, self.generation, True))

    def validate(self) -> None:
        """For tests: what always holds."""
        for counted, claimed in zip(self.counted, self._claimed, strict=True):
            assert 0 <= counted <= claimed <= self.pages or self.state is DestinationState.RESUMING
        assert self._verifying >= 0
        if self.state is DestinationState.COMMITTED:
            assert self.layers_done == self.layout.layers
            assert not self._exposed
            assert not self._verifying
        if self.state is DestinationState.FREED:
            assert not self._exposed
            assert not self._verifying
        if self.state is DestinationState.RESERVING:
            assert not self._exposed
        if self.state is DestinationState.RECEIVING:
            assert self._exposed == {self.generation}
