"""One lookup at the masters as a state machine without I/O: split by shard, each shard's masters asked in turn, answers merged.

plan = lookups.begin(questions, core.view(), asker, now, timeout_s)
while not plan.done:
    for ask in plan.step(now): ...          # send ask.message to ask.master; if it cannot be sent:
                                            # plan.failed(ask.master, now)
    ... plan.received(master, reply, now)   # whatever comes, until plan.next_due(now)
plan.end(now)
answers = plan.result()
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from hicache_mooncake.node.link_core import LinkView, MasterView, positions_by_shard
from hicache_mooncake.protocol import HASH_BYTES, Answer, Lookup, LookupReply, Message, Peer, Question, count_hashes

BREAKER_S = (0.5, 5.0)
HEDGE_S = 0.15
HEDGE_SHARE = 4
BLAME_S = 0.02
"""A master that had less time than this to answer is not blamed."""
MAX_PEERS = 255
NO_PROMISE = 0.0, ""

_Column = np.ndarray[tuple[int], np.dtype[np.uint8]]
_Positions = np.ndarray[tuple[int], np.dtype[np.intp]]


class Breaker:
    """Closed, or open until a time; then one caller may try while the others are still refused. Time comes in; not
    thread-safe."""

    def __init__(self, first_s: float = BREAKER_S[0], most_s: float = BREAKER_S[1]) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._open_s = 0.0
        self._until = 0.0
        self._probing = False

    def allows(self, now: float, timeout_s: float) -> bool:
        """May this call be tried? A probe that says yes keeps the others out for `timeout_s`."""
        if not self._open_s:
            return True
        if now < self._until:
            return False
        self._until = now + timeout_s
        self._probing = True
        return True

    def succeeded(self) -> None:
        self._open_s = 0.0
        self._probing = False

    def failed(self, now: float) -> None:
        if self._open_s and not self._probing:
            return  # one of several calls that failed together
        self._probing = False
        self._open_s = min(2 * self._open_s, self._most_s) or self._first_s
        self._until = now + self._open_s


class Answers(list[Answer]):
    """One answer a question, in order. With `prefix` a column ends before the first page that nobody else holds, or of which it
    is not known; without it, it has one entry a page.

    `complete`: every shard of the directory answered; else the pages of those that did not count as held by nobody. `warming`:
    one of those that answered does not know of everything yet, so what it does not know may still be there."""

    def __init__(self, answers: Sequence[Answer] = (), *, complete: bool = True, warming: bool = False) -> None:
        super().__init__(answers)
        self.complete = complete
        self.warming = warming

    @property
    def answers(self) -> Sequence[Answer]:
        return self


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this to that master, and hear what it says until the plan is done."""

    master: str
    message: Lookup


@dataclass(slots=True)
class _Part:
    """What one shard is asked. `positions`: for each of its questions, those of its hashes in the whole one; None where it is
    the whole one."""

    questions: list[Question]
    counts: list[int]
    indices: list[int]
    positions: list[_Positions] | None
    candidates: list[str]
    asked: dict[str, float] = field(default_factory=dict)
    """Master -> when, those that may still answer."""
    next_at: float = 0.0
    answer: LookupReply | None = None


class Lookups:
    """What is remembered from one lookup to the next: which masters were silent. Not thread-safe, and quick."""

    def __init__(self) -> None:
        self._breakers: dict[str, Breaker] = {}
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        return next(self._ids)

    def breaker(self, master: str) -> Breaker:
        return self._breakers.setdefault(master, Breaker())

    def keep(self, masters: Sequence[str]) -> None:
        """Forget all other masters."""
        self._breakers = {master: breaker for master, breaker in self._breakers.items() if master in masters}

    def begin(
        self,
        questions: Sequence[Question],
        view: LinkView,
        asker: str,
        now: float,
        timeout_s: float,
        promise: tuple[float, str] = NO_PROMISE,
    ) -> LookupPlan:
        """`promise`: promise_s and reader of Lookup. Raises ProtocolError for a ragged blob of hashes or too many."""
        counts = [count_hashes(question.hashes) for question in questions]
        return LookupPlan(self, questions, counts, view, asker, now, timeout_s, promise)


class LookupPlan:
    """A lookup on its way; see the module."""

    def __init__(
        self,
        lookups: Lookups,
        questions: Sequence[Question],
        counts: list[int],
        view: LinkView,
        asker: str,
        now: float,
        timeout_s: float,
        promise: tuple[float, str],
    ) -> None:
        self._lookups = lookups
        self._promise = promise
        self._questions = questions
        self._counts = counts
        self._asker = asker
        self._timeout_s = timeout_s
        self._deadline = now + timeout_s
        self._hedge_s = min(HEDGE_S, timeout_s / HEDGE_SHARE)
        self._id = lookups.next_id()
        self._parts = _parts(questions, counts, view, asker, now)
        self.garbage = 0
        self.blamed: set[str] = set()
        """Masters that failed or were silent for too long: nothing that was sent to them is worth waiting for."""
        for part in self._parts:
            part.next_at = now

    @property
    def done(self) -> bool:
        return all(part.answer is not None or not (part.asked or part.candidates) for part in self._parts)

    def step(self, now: float) -> list[Ask]:
        """Whom to ask now. Past the deadline the plan is done, and whoever was silent for long is blamed."""
        if now >= self._deadline:
            self.end(now)
            return []
        asks = []
        for part in self._parts:
            while part.answer is None and part.candidates and (now >= part.next_at or not part.asked):
                master = part.candidates.pop(0)
                if self._lookups.breaker(master).allows(now, self._timeout_s):
                    part.asked[master] = now
                    part.next_at = now + self._hedge_s
                    asks.append(Ask(master, Lookup(self._id, part.questions, self._asker, *self._promise)))
                    break
        return asks

    def next_due(self, now: float) -> float:
        """When `step` has something to do if nothing comes."""
        due = [part.next_at for part in self._parts if part.answer is None and part.candidates]
        return min([self._deadline, *due])

    def received(self, master: str, message: Message, now: float) -> bool:
        """Take a message from a master; returns whether it was the answer to this lookup."""
        if not isinstance(message, LookupReply) or message.id != self._id:
            return False
        part = next((part for part in self._parts if master in part.asked), None)
        if part is None:
            return False
        if len(message.answers) != len(part.questions) or not all(map(_fits, part.questions, part.counts, message.answers)):
            self.garbage += 1
            self.failed(master, now)
            return True
        del part.asked[master]
        self._lookups.breaker(master).succeeded()
        if part.answer is None:
            part.answer = message
            part.candidates.clear()
            # Asked before this one, and silent still.
            self._blame(part, now)
        return True

    def failed(self, master: str, now: float) -> None:
        """This master cannot be asked, or said nonsense."""
        for part in self._parts:
            if part.asked.pop(master, None) is not None:
                self._fail(master, now)
                part.next_at = now

    def end(self, now: float) -> None:
        """No more is waited for. Call it also when the plan is done."""
        for part in self._parts:
            part.candidates.clear()
            self._blame(part, now)
            part.asked.clear()

    def _blame(self, part: _Part, now: float) -> None:
        """Whoever let the time pass after which another one is asked is left alone for a while."""
        for master, since in list(part.asked.items()):
            if now - since >= max(BLAME_S, 0.99 * self._hedge_s):
                del part.asked[master]
                self._fail(master, now)

    def _fail(self, master: str, now: float) -> None:
        self._lookups.breaker(master).failed(now)
        self.blamed.add(master)

    def result(self) -> Answers | None:
        """None when no master answered anything."""
        answered = [part for part in self._parts if part.answer is not None]
        if not answered and any(self._counts):
            return None
        complete = len(answered) == len(self._parts)
        warming = any(part.answer.warming for part in answered if part.answer is not None)
        if len(answered) == 1 and answered[0].positions is None:
            assert answered[0].answer is not None
            return Answers(answered[0].answer.answers, complete=complete, warming=warming)
        merged = [_Merged(question.prefix, count) for question, count in zip(self._questions, self._counts, strict=True)]
        for part in answered:
            assert part.answer is not None
            assert part.positions is not None
            for index, positions, answer in zip(part.indices, part.positions, part.answer.answers, strict=True):
                merged[index].add(positions, answer)
        return Answers([each.answer() for each in merged], complete=complete, warming=warming)


class _Merged:
    """One question's answer, put together from those of the shards."""

    def __init__(self, prefix: bool, count: int) -> None:
        self._prefix = prefix
        self._holder: _Column = np.zeros(count, np.uint8)
        self._others: _Column = np.zeros(count, np.uint8)
        self._peers: dict[tuple[str, bytes, str, int, int], int] = {}
        self._list: list[Peer] = []
        self._tiers = bytearray()

    def add(self, positions: _Positions, answer: Answer) -> None:
        table: _Column = np.zeros(256, np.uint8)
        for index, peer in enumerate(answer.peers[:MAX_PEERS]):
            tier = answer.tiers[index] if index < len(answer.tiers) else 0
            key = (peer.node, peer.incarnation, peer.host, peer.port, tier)
            at = self._peers.get(key, 0)
            if not at and len(self._list) < MAX_PEERS:
                self._list.append(peer)
                self._tiers.append(tier)
                at = self._peers[key] = len(self._list)
            table[index + 1] = at  # 0 past the 255th: one holder fewer
        for column, codes in ((self._holder, answer.holder), (self._others, answer.others)):
            column[positions[: len(codes)]] = table[np.frombuffer(codes, np.uint8)]

    def answer(self) -> Answer:
        holder, others = self._holder, self._others
        swap = (holder == 0) & (others != 0)
        holder[swap], others[swap] = others[swap], 0
        if self._prefix:
            unknown = np.flatnonzero(holder == 0)
            end = int(unknown[0]) if len(unknown) else len(holder)
            holder, others = holder[:end], others[:end]
        return Answer(
            holder.tobytes(),
            self._list,
            others.tobytes() if others.any() else b"",
            bytes(self._tiers) if any(self._tiers) else b"",
        )


def _parts(questions: Sequence[Question], counts: list[int], view: LinkView, asker: str, now: float) -> list[_Part]:
    if view.shards <= 1:
        candidates = _candidates(view, 0, asker, now) if view.shards else []
        return [_Part(list(questions), counts, list(range(len(questions))), None, candidates)]
    by_shard: list[_Part] = []
    columns = [positions_by_shard(question.hashes, view.shards) for question in questions]
    for shard in range(view.shards):
        part = _Part([], [], [], [], [])
        assert part.positions is not None
        for index, question in enumerate(questions):
            positions = columns[index][shard]
            if len(positions):
                rows = np.frombuffer(question.hashes, np.uint8).reshape(-1, HASH_BYTES)[positions]
                part.questions.append(Question(question.namespace, rows.tobytes(), question.prefix))
                part.counts.append(len(positions))
                part.indices.append(index)
                part.positions.append(positions)
        if part.questions:
            part.candidates = _candidates(view, shard, asker, now)
            by_shard.append(part)
    return by_shard


def _candidates(view: LinkView, shard: int, asker: str, now: float) -> list[str]:
    """The masters of a shard, best first; among equals each node has an order of its own, so that all of them have work."""

    def rank(master: MasterView) -> tuple[bool, bool, int]:
        return not master.answers(now), master.warming, xxhash.xxh64_intdigest(f"{asker} {master.master}".encode())

    usable = [master for master in view.masters if master.shard == shard and not master.refusal]
    if len(usable) > 1:
        usable.sort(key=rank)
    return [master.master for master in usable]


def _fits(question: Question, count: int, answer: Answer) -> bool:
    entries, peers = len(answer.holder), len(answer.peers)
    return (
        (entries <= count if question.prefix else entries == count)
        and max(answer.holder, default=0) <= peers
        and len(answer.others) in (0, entries)
        and max(answer.others, default=0) <= peers
        and len(answer.tiers) in (0, peers)
    )
