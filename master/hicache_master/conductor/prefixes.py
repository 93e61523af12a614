"""Who holds, and who will soon hold, which pages of which prefix, and in which tier."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Key = bytes | int
"""The hash of a page, which names its whole prefix."""

DEVICE, HOST, DRAM, COLD = range(4)
"""L1 and L2 of an engine; DRAM and disk of a store node, from which every engine can load."""
TIERS = (DEVICE, HOST, DRAM, COLD)
MAX_HOLDERS = 1024
"""Engines and store nodes, those counted that left a moment ago."""
SPECULATIVE_S = 120.0
"""Pages that a request is expected to bring are counted for so long, if nobody says that they came or that it failed."""
SWEPT = 256
"""Keys that are looked at, with each change, for what holders left behind."""

_WIDTH = len(TIERS)
_EACH_TIER = (1 << _WIDTH) - 1


def bit(slot: int, tier: int) -> int:
    """Of a page that this holder has in this tier."""
    return 1 << _WIDTH * slot + tier


class Run(NamedTuple):
    """Neighbouring pages with the same holders."""

    start: int
    end: int
    holders: int
    """Bits as in `Prefixes`."""


@dataclass(slots=True)
class Matches:
    """What of one prompt is held where. Lengths are in pages, from the head."""

    pages: int
    """Of the prompt."""
    lengths: list[dict[str, int]]
    """For each tier: how long a leading run each holder has in it or in a better tier of the same kind (DEVICE is better than
    HOST, DRAM than COLD). Those with nothing are left out. Speculative pages count as in DEVICE."""
    runs: list[Run]
    """All pages up to the first that nobody has, without speculative ones."""
    slots: dict[int, str]
    """Who the bits of `runs` are."""

    def length(self, tier: int, holder: str) -> int:
        return self.lengths[tier].get(holder, 0)

    def known_pages(self) -> int:
        """From the head on, that somebody has or will soon have."""
        held = self.runs[-1].end if self.runs else 0
        return max(held, *(max(lengths.values(), default=0) for lengths in self.lengths))


@dataclass(slots=True)
class _Holder:
    name: str
    incarnation: str
    slot: int


@dataclass(slots=True)
class _Expected:
    request: str
    keys: tuple[Key, ...]
    slot: int
    until: float


@dataclass
class Prefixes:
    """Page -> holders, as an integer of `slot * 4 + tier` bits a page.

    A holder that starts anew has another incarnation: what was known of the former one ends at once, and what comes late
    from it is ignored. At most `max_keys` pages are known, those that were neither stored nor asked for longest go first; at
    most as many are expected. Time comes in; not thread-safe.
    """

    max_keys: int = 2_000_000
    speculative_s: float = SPECULATIVE_S
    dropped_keys: int = 0
    """Of held pages, for want of room."""
    _held: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    _expected: dict[Key, int] = field(default_factory=dict)
    _expected_count: int = 0
    """Bits in all of `_expected`."""
    _more: dict[tuple[Key, int], int] = field(default_factory=dict)
    """How many requests, besides the first one, will bring this page to this slot."""
    _requests: dict[str, _Expected] = field(default_factory=dict)
    _by_time: deque[_Expected] = field(default_factory=deque)
    _holders: dict[str, _Holder] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _valid: int = 0
    _free: list[int] = field(default_factory=list)
    _next_slot: int = 0
    _dead: list[int] = field(default_factory=list)
    """Slots whose bits may still be somewhere."""
    _sweeping: list[int] = field(default_factory=list)
    _to_sweep: list[Key] = field(default_factory=list)

    def __len__(self) -> int:
        """Pages that are held, or were by somebody who left."""
        return len(self._held)

    @property
    def expected_keys(self) -> int:
        return self._expected_count

    def join(self, name: str, incarnation: str) -> bool:
        """It is there. Returns False when it was already, in this incarnation; another one takes its place, with nothing.

        Raises ValueError when there are MAX_HOLDERS."""
        holder = self._holders.get(name)
        if holder is not None and holder.incarnation == incarnation:
            return False
        if holder is None and len(self._holders) >= MAX_HOLDERS:
            raise ValueError(f"{name} is one holder too many: the limit is {MAX_HOLDERS}")
        self.leave(name)
        slot = self._slot()
        self._holders[name] = _Holder(name, incarnation, slot)
        self._names[slot] = name
        self._valid |= _EACH_TIER << _WIDTH * slot
        return True

    def leave(self, name: str) -> None:
        holder = self._holders.pop(name, None)
        if holder is not None:
            del self._names[holder.slot]
            self._valid &= ~(_EACH_TIER << _WIDTH * holder.slot)
            for request in [each.request for each in self._requests.values() if each.slot == holder.slot]:
                self.withdraw(request)
            self._dead.append(holder.slot)

    def forget(self, name: str, incarnation: str) -> None:
        """The holder has nothing any more, nor is anything expected of it; it stays, in this incarnation."""
        if self._current(name, incarnation) is not None:
            self.leave(name)
            self.join(name, incarnation)

    def stored(self, name: str, incarnation: str, keys: Iterable[Key], tier: int) -> None:
        """The holder says that it has these pages in this tier."""
        holder = self._current(name, incarnation)
        if holder is None:
            return
        mark = bit(holder.slot, tier)
        held = self._held
        for key in keys:
            held[key] = held.get(key, 0) | mark
            held.move_to_end(key)
        while len(held) > self.max_keys:
            held.popitem(last=False)
            self.dropped_keys += 1
        self._sweep(SWEPT)

    def removed(self, name: str, incarnation: str, keys: Iterable[Key], tier: int) -> None:
        """The holder says that it has them there no more."""
        holder = self._current(name, incarnation)
        if holder is None:
            return
        mark = bit(holder.slot, tier)
        for key in keys:
            mask = self._held.get(key)
            if mask is not None:
                self._put(key, mask & ~mark)
        self._sweep(SWEPT)

    def located(self, keys: Iterable[Key], holders: Mapping[str, int]) -> None:
        """These pages are with these store nodes, each in its tier, and in no others' DRAM or COLD. Those that have not joined
        are passed over."""
        mark = 0
        for name, tier in holders.items():
            if (holder := self._holders.get(name)) is not None:
                mark |= bit(holder.slot, tier)
        pattern = ((1 << _WIDTH * self._next_slot) - 1) // _EACH_TIER
        others = ~(pattern << DRAM | pattern << COLD)
        held = self._held
        for key in keys:
            mask = held.get(key, 0)
            if mask or mark:
                held[key] = mask
                self._put(key, mask & others | mark)
        while len(held) > self.max_keys:
            held.popitem(last=False)
            self.dropped_keys += 1
        self._sweep(SWEPT)

    def expect(self, request: str, name: str, keys: Sequence[Key], now: float) -> None:
        """The request will bring these pages to this engine: the next one with the same prefix may count on them."""
        self.withdraw(request)
        self.expire(now)
        holder = self._holders.get(name)
        if holder is None or not 0 < len(keys) <= self.max_keys:
            return
        while self._by_time and self._expected_count + len(keys) > self.max_keys:
            self._drop(self._by_time.popleft())
        expected = _Expected(request, tuple(keys), holder.slot, now + self.speculative_s)
        mark = bit(holder.slot, DEVICE)
        soon = self._expected
        for key in expected.keys:
            mask = soon.get(key, 0)
            if mask & mark:
                self._more[key, holder.slot] = self._more.get((key, holder.slot), 0) + 1
            else:
                soon[key] = mask | mark
                self._expected_count += 1
        self._requests[request] = expected
        self._by_time.append(expected)

    def withdraw(self, request: str) -> None:
        """It failed, or what it brought is known by now. Unknown ones are ignored."""
        expected = self._requests.get(request)
        if expected is not None:
            self._drop(expected)

    def expire(self, now: float) -> None:
        queue = self._by_time
        while queue and (queue[0].until <= now or self._requests.get(queue[0].request) is not queue[0]):
            self._drop(queue.popleft())
        if len(queue) > 2 * len(self._requests) + SWEPT:  # those that ended before older ones
            self._by_time = deque(each for each in queue if self._requests.get(each.request) is each)

    def match(self, keys: Sequence[Key], now: float) -> Matches:
        """Who has how much of this prompt. Costs a dictionary lookup a page, and work only where holders change."""
        self.expire(now)
        pattern = self._pattern()
        alive = [pattern] * len(TIERS)
        lengths: list[dict[str, int]] = [{} for _ in TIERS]
        runs: list[Run] = []
        held, expected, valid = self._held, self._expected, self._valid
        last = last_found = -1
        start, holders, anybody, leading = 0, 0, True, pattern
        for depth, key in enumerate(keys):
            found = held.get(key, 0)
            mask = found | expected.get(key, 0)
            if mask == last and found == last_found:
                continue
            last, last_found = mask, found
            if anybody:
                found &= valid
                if found != holders:
                    if depth > start:
                        runs.append(Run(start, depth, holders))
                    start, holders = depth, found
                anybody = found != 0
            if leading:
                leading = 0
                best = mask & pattern, (mask | mask >> 1) & pattern, (mask >> 2) & pattern, (mask >> 2 | mask >> 3) & pattern
                for tier in TIERS:
                    gone = alive[tier] & ~best[tier]
                    if gone:
                        alive[tier] &= best[tier]
                        if depth:
                            self._note(lengths[tier], gone, depth)
                    leading |= alive[tier]
            if not anybody and not leading:
                break
        else:
            if anybody and len(keys) > start:
                runs.append(Run(start, len(keys), holders))
            for tier in TIERS if keys else ():
                self._note(lengths[tier], alive[tier], len(keys))
        return Matches(len(keys), lengths, runs, self._names)

    def touch(self, keys: Iterable[Key]) -> None:
        """They were asked for: they are forgotten after those that were not."""
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)

    def validate(self) -> None:
        """For tests."""
        assert len(self._held) <= self.max_keys
        assert self._expected_count == sum(mask.bit_count() for mask in self._expected.values()) <= self.max_keys
        claims: dict[tuple[Key, int], int] = {}
        for request, each in self._requests.items():
            assert each.request == request
            for key in each.keys:
                claims[key, each.slot] = claims.get((key, each.slot), 0) + 1
        assert {claim: count - 1 for claim, count in claims.items() if count > 1} == self._more
        masks: dict[Key, int] = {}
        for key, slot in claims:
            masks[key] = masks.get(key, 0) | bit(slot, DEVICE)
        assert masks == self._expected
        assert {id(each) for each in self._requests.values()} <= {id(each) for each in self._by_time}
        assert len(self._by_time) <= 2 * len(self._requests) + SWEPT + 1
        slots = {holder.slot for holder in self._holders.values()}
        assert slots == set(self._names)
        others = [*self._free, *self._dead, *self._sweeping]
        assert sorted([*slots, *others]) == list(range(self._next_slot))
        loose = sum(_EACH_TIER << _WIDTH * slot for slot in self._free)
        assert all(mask and not mask & loose for mask in self._held.values())

    def _pattern(self) -> int:
        """The lowest tier's bit of every holder there is."""
        return self._valid & (((1 << _WIDTH * self._next_slot) - 1) // _EACH_TIER)

    def _note(self, lengths: dict[str, int], slots: int, depth: int) -> None:
        while slots:
            low = slots & -slots
            lengths[self._names[(low.bit_length() - 1) // _WIDTH]] = depth
            slots ^= low

    def _current(self, name: str, incarnation: str) -> _Holder | None:
        holder = self._holders.get(name)
        return holder if holder is not None and holder.incarnation == incarnation else None

    def _slot(self) -> int:
        if not self._free and self._next_slot >= MAX_HOLDERS:
            self._sweep(math.inf)
        if self._free:
            return self._free.pop()
        self._next_slot += 1
        return self._next_slot - 1

    def _put(self, key: Key, mask: int) -> None:
        if mask:
            self._held[key] = mask
        else:
            del self._held[key]

    def _drop(self, expected: _Expected) -> None:
        if self._requests.get(expected.request) is not expected:
            return
        del self._requests[expected.request]
        mark = bit(expected.slot, DEVICE)
        soon, more = self._expected, self._more
        for key in expected.keys:
            others = more.get((key, expected.slot), 0) if more else 0
            if others:
                if others > 1:
                    more[key, expected.slot] = others - 1
                else:
                    del more[key, expected.slot]
                continue
            mask = soon[key] & ~mark
            if mask:
                soon[key] = mask
            else:
                del soon[key]
            self._expected_count -= 1

    def _sweep(self, budget: float) -> None:
        """Take bits of those who left out of `budget` keys; their slots are free again when all keys have been seen."""
        while budget > 0 and (self._sweeping or self._dead):
            if not self._sweeping:
                self._sweeping, self._dead = self._dead, []
                self._to_sweep = list(self._held)
            gone = sum(_EACH_TIER << _WIDTH * slot for slot in self._sweeping)
            while self._to_sweep and budget > 0:
                budget -= 1
                key = self._to_sweep.pop()
                mask = self._held.get(key, 0)
                if mask & gone:
                    self._put(key, mask & ~gone)
            if not self._to_sweep:
                self._free += self._sweeping
                self._sweeping = []
