"""An engine's cache from the batches of SGLang's KV events, in order, without I/O.

SGLang numbers its batches from 0 and keeps the last 10,000 for replay; it says nothing of its incarnation. So a restart is
known by a batch that is numbered lower and dated later, or by a replay in which the last batch taken has another content.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import msgspec
import xxhash

from hicache_master.conductor.prefixes import DEVICE, HOST, Prefixes

TIERS = {"GPU": DEVICE, "CPU_PINNED": HOST, "CPU": HOST}
"""By the medium that SGLang names. Others are not an engine's."""
MAX_HELD = 4_096
"""Batches that wait while an answer to a replay is on its way."""
MAX_REPLAYS = 8
"""In a row: of a long one some batches may be dropped, and the rest is asked for again."""
_NOTHING = -1


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int]
    block_size: int
    medium: str | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


_Event = _Stored | _Removed | _Cleared
_event_decoder: msgspec.msgpack.Decoder[_Event] = msgspec.msgpack.Decoder(_Event)
_batch_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_events_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


class EngineCache:
    """One engine's pages in `prefixes`, put together from its data-parallel ranks: a page is there while any of them has it.

    The engine has joined `prefixes` in this incarnation, or does so here. Pages of another size than `page_size` are not taken:
    their hashes name other tokens. Not thread-safe."""

    def __init__(self, prefixes: Prefixes, name: str, incarnation: str, page_size: int, ranks: int = 1) -> None:
        self._prefixes = prefixes
        self._name = name
        self._incarnation = incarnation
        self.page_size = page_size
        self.ranks = ranks
        self._masks: dict[tuple[int, int], int] = {}
        """With several ranks: (key, tier) -> bits of those that have it."""
        self.counts: Counter[str] = Counter()
        """stored, removed (pages); batches, cleared, gaps, lost (gaps that no replay filled), restarts, duplicates, unread
        (events that nobody here knows), mismatched (pages of another size)."""
        self.other_page_size = 0
        """That the engine uses, if it is not ours."""
        prefixes.join(name, incarnation)

    def stored(self, rank: int, keys: list[int], tier: int, size: int) -> None:
        if size != self.page_size:
            self.counts["mismatched"] += len(keys)
            self.other_page_size = size
            return
        self.counts["stored"] += len(keys)
        if self.ranks > 1:
            for key in keys:
                self._masks[key, tier] = self._masks.get((key, tier), 0) | 1 << rank
            while len(self._masks) > 2 * self._prefixes.max_keys:
                del self._masks[next(iter(self._masks))]
        self._prefixes.stored(self._name, self._incarnation, keys, tier)

    def removed(self, rank: int, keys: list[int], tier: int) -> None:
        self.counts["removed"] += len(keys)
        if self.ranks > 1:
            keys = [key for key in keys if self._without(rank, key, tier)]
        self._prefixes.removed(self._name, self._incarnation, keys, tier)

    def cleared(self, rank: int) -> None:
        """This rank has nothing any more."""
        if self.ranks == 1:
            self._prefixes.forget(self._name, self._incarnation)
            return
        gone: dict[int, list[int]] = {}
        for key, tier in [held for held, mask in self._masks.items() if mask >> rank & 1]:
            if self._without(rank, key, tier):
                gone.setdefault(tier, []).append(key)
        for tier, keys in gone.items():
            self._prefixes.removed(self._name, self._incarnation, keys, tier)

    def _without(self, rank: int, key: int, tier: int) -> bool:
        """Does no rank have it any more, when this one has not?"""
        mask = self._masks.get((key, tier), 0) & ~(1 << rank)
        if mask:
            self._masks[key, tier] = mask
        else:
            self._masks.pop((key, tier), None)
        return not mask


class KvEventStream:
    """The batches of one rank, in order, each once, or else everything of that rank is forgotten.

    stream.received(seq, payload)       # live ones
    stream.connected()                  # whenever the publisher was (re)connected
    if stream.wants:
        ask for a replay from stream.begin_replay(); then stream.replayed(seq, payload) for each, and stream.replay_ended(...)

    A batch that cannot be had any more (`replays` False, or the publisher keeps it no longer) costs all that is known of the
    rank: what it removed would be believed to be there. Not thread-safe."""

    def __init__(self, cache: EngineCache, rank: int = 0, *, replays: bool = True) -> None:
        self._cache = cache
        self._rank = rank
        self._replays = replays
        self._next = _NOTHING
        self._newest = 0.0
        self._last = b""
        """Of the last batch that was taken, what tells its content."""
        self._held: dict[int, bytes] = {}
        self._start: int | None = None
        """Of the replay that is wanted, or on its way."""
        self._asked = False
        self._first = True
        """No batch of this replay has come yet."""
        self._broken = False
        """Some of its batches were dropped on their way."""
        self._tries = 0

    @property
    def counts(self) -> Counter[str]:
        return self._cache.counts

    def connected(self) -> None:
        """Something may have been lost, or the publisher may be another one."""
        if self._replays:
            self._want()

    @property
    def wants(self) -> bool:
        """There is a replay to ask for now."""
        return self._start is not None and not self._asked

    def begin_replay(self) -> int:
        """From where on. Only when it `wants` one."""
        assert self._start is not None
        self._asked, self._first, self._broken = True, True, False
        return self._start

    def received(self, seq: int, payload: bytes) -> None:
        if self._start is not None:
            self._held[seq] = payload
            if len(self._held) > MAX_HELD:
                del self._held[next(iter(self._held))]
            return
        if self._next == _NOTHING or seq == self._next:
            self._take(seq, payload)
            return
        if seq < self._next:
            if _date(payload) <= self._newest:
                self.counts["duplicates"] += 1
                return
            self._restarted()
            if seq == 0:
                self._take(seq, payload)
                return
        else:
            self.counts["gaps"] += 1
        if self._replays:
            self._held[seq] = payload
            self._want()
        else:
            self._lost()
            self._take(seq, payload)

    def replayed(self, seq: int, payload: bytes) -> None:
        first, self._first = self._first, False
        if self._broken or self._start is None:
            return
        if first and seq == self._start == self._next - 1 and _digest(payload) != self._last:
            self._restarted()
            self._broken = True  # it began in the middle of another one's account
            return
        if self._next == _NOTHING or seq == self._next:
            self._take(seq, payload)
        elif seq > self._next:
            if first:
                self._lost()
                self._take(seq, payload)
            else:
                self._broken = True

    def replay_ended(self, whole: bool) -> None:
        """All of it has come (`whole`), or nothing more will."""
        nothing = self._first
        self._start, self._asked = None, False
        if whole and nothing and self._next > 0:
            self._restarted()  # it does not even have the last batch that was taken here
            self._want()
            return
        if self._broken and self._again():
            return
        held, self._held = sorted(self._held.items()), {}
        for at, (seq, payload) in enumerate(held):
            if seq > self._next != _NOTHING:
                if self._again():
                    self._held = dict(held[at:])
                    return
                self._lost()
                self._take(seq, payload)
            else:
                self.received(seq, payload)
        self._tries = 0

    def _again(self) -> bool:
        """Ask for the rest, if that has not been done too often already."""
        self._tries += 1
        if self._tries >= MAX_REPLAYS:
            return False
        self._want()
        return True

    def _want(self) -> None:
        if self._start is None:
            self._start, self._asked = max(self._next - 1, 0), False
            self.counts["replays"] += 1

    def _restarted(self) -> None:
        self.counts["restarts"] += 1
        self._cache.cleared(self._rank)
        self._next, self._newest = 0, 0.0

    def _lost(self) -> None:
        self.counts["lost"] += 1
        self._cache.cleared(self._rank)
        self._next = _NOTHING

    def _take(self, seq: int, payload: bytes) -> None:
        self._next = seq + 1
        self._last = _digest(payload)
        self.counts["batches"] += 1
        try:
            date, events = _parts(payload)
        except (msgspec.MsgspecError, TypeError, ValueError):
            self.counts["unread"] += 1
            return
        self._newest = max(self._newest, date)
        for raw in events:
            self._apply(_read(raw))

    def _apply(self, event: _Event | None) -> None:
        if isinstance(event, _Cleared):
            self.counts["cleared"] += 1
            self._cache.cleared(self._rank)
            return
        tier = None if event is None else TIERS.get(event.medium or "GPU")
        if event is None or tier is None:
            self.counts["unread"] += 1
        elif isinstance(event, _Stored):
            self._cache.stored(self._rank, event.block_hashes, tier, event.block_size)
        else:
            self._cache.removed(self._rank, event.block_hashes, tier)


def _digest(payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(payload)


def _parts(payload: bytes) -> tuple[float, list[msgspec.Raw]]:
    """When, and the events. Raises ValueError for what is no batch, or MsgspecError."""
    batch = _batch_decoder.decode(payload)
    if len(batch) < 2:
        raise ValueError("no batch of events")
    return float(msgspec.msgpack.decode(batch[0])), _events_decoder.decode(batch[1])


def _date(payload: bytes) -> float:
    try:
        return _parts(payload)[0]
    except (msgspec.MsgspecError, TypeError, ValueError):
        return 0.0


def _read(raw: msgspec.Raw) -> _Event | None:
    """SGLang's events are maps, those of older releases arrays with the kind first. None for any other."""
    try:
        return _event_decoder.decode(raw)
    except msgspec.MsgspecError:
        pass
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        fields = msgspec.msgpack.decode(raw)
        if isinstance(fields, list) and fields:
            names: tuple[str, ...] = ("type", "block_hashes", "medium")
            if fields[0] == "BlockStored":
                names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
            event: _Event = msgspec.convert(dict(zip(names, fields, strict=False)), _Event)
            return event
    return None
