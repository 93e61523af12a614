"""What a node answers: to the ranks and movers of its host, to other nodes, to the masters' orders. No I/O, clocks or threads.

Whatever needs a master is a generator that yields `AskMasters` and is sent what they told. The shell (service.py) runs every
step under the node's lock and does the asking without it:

    steps = core.handle(owner, message, now)
    try:
        ask = next(steps)
        while True:
            ask = steps.send(told)   # `told`: what the masters answer to ask.questions within ask.timeout_s, or None
    except StopIteration as end:
        answer = end.value
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

from hicache_mooncake import protocol as p
from hicache_mooncake.node.store import Store

LOOKUP_TIMEOUT_S = 0.5
_MAX_REASONS = 100

Report = dict[str, int | float | str | bool]
Log = Callable[[int, str, str], None]
"""Level, kind (lines of one kind are bounded), text."""


@dataclasses.dataclass(frozen=True, slots=True)
class AskMasters:
    """Yielded by a step: who holds these pages? To be answered within `timeout_s`."""

    questions: list[p.Question]
    timeout_s: float


class Told(Protocol):
    """What the masters answered: one answer a question. `complete` False: a shard of the directory did not answer, and its
    keys count as absent. `warming`: one of those that answered does not know of everything yet."""

    @property
    def answers(self) -> Sequence[p.Answer]: ...
    @property
    def complete(self) -> bool: ...
    @property
    def warming(self) -> bool: ...


_T = TypeVar("_T")
Steps = Generator[AskMasters, Told | None, _T]


@dataclasses.dataclass(slots=True)
class Writing:
    """A transaction of the store that is not committed yet. `void`: its namespace was cleared since it began."""

    owner: int
    namespace: bytes
    since: float
    void: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Pages that another node reads: what to answer, and where the bodies are that follow, pinned until `fetched`."""

    pin: int
    reply: p.FetchReply
    offsets: list[int]


class NodeCore:
    """Not thread-safe: one lock around every call and every step of a generator. Owners are connections, as in `Store`.

    `masters` says whether there is one to ask. Raises ProtocolError for messages that cannot be: the connection they came from
    must be closed."""

    def __init__(self, name: str, incarnation: bytes, store: Store, *, masters: bool, log: Log) -> None:
        self.name = name
        self.incarnation = incarnation
        self.store = store
        self.masters = masters
        self._log = log
        self._writing: dict[int, Writing] = {}
        self._expire_at = 0.0
        self.missed: Counter[str] = Counter()
        """What the ranks of this host report: misses by reason."""
        self.peers_down: Counter[str] = Counter()
        """Nodes that movers of this host could not read from, since the shell last took it (`take_peers_down`)."""

    # ------------------------------------------------------------------ ranks and movers

    def handle(self, owner: int, message: p.Message, now: float) -> Steps[p.Message | None]:
        """Any message of a rank or mover but Hello, AdminStatus and Clear. Returns the answer; None to one-way messages."""
        match message:
            case p.Exists():
                return (yield from self.exists(message))
            case p.Locate():
                return (yield from self.locate(owner, message, now))
            case p.Release():
                self.release(owner, message)
            case p.Reserve():
                return self.reserve(owner, message, now)
            case p.Commit():
                return p.Committed(self.commit(owner, message.txn, message.ok, message.checksum))
            case p.Touch():
                p.count_hashes(message.hashes)
                self.store.touch(message.namespace, message.hashes)
            case p.Missed():
                for reason, count in message.reasons.items():
                    if len(self.missed) < _MAX_REASONS or reason in self.missed:
                        self.missed[reason] += count
            case _:
                raise p.ProtocolError(f"unexpected {type(message).__name__}")
        return None

    def exists(self, message: p.Exists) -> Steps[p.Found]:
        count = p.count_hashes(message.hashes)
        namespaces = [*message.leading, *message.sparse]
        leading = len(message.leading)
        if not 1 <= len(namespaces) <= p.MAX_NAMESPACES_PER_MESSAGE or count * len(namespaces) > p.MAX_KEYS_PER_MESSAGE:
            raise p.ProtocolError(f"{count} pages of {len(namespaces)} namespaces asked for at once")
        columns = [bytearray(self.store.present(namespace, message.hashes)) for namespace in namespaces]
        reason = ""
        questions: list[p.Question] = []
        asked: list[tuple[bytearray, list[int]]] = []
        if self.masters:
            for index, (namespace, column) in enumerate(zip(namespaces, columns, strict=True)):
                missing = [i for i, here in enumerate(column) if not here]
                if missing:
                    wanted = p.select_hashes(message.hashes, missing)
                    questions.append(p.Question(namespace, wanted, prefix=index < leading))
                    asked.append((column, missing))
        if questions:
            told = yield AskMasters(questions, min(LOOKUP_TIMEOUT_S, message.budget_s / 2))
            if told is not None:
                for (column, missing), answer in zip(asked, told.answers, strict=True):
                    for i, holder in zip(missing, answer.holder, strict=False):
                        column[i] = holder > 0
            if any(0 in column for column, _ in asked):
                reason = _why_absent(told)
        headless = sum(column.count(1, first) for column in columns[:leading] if (first := column.find(0)) >= 0)
        self.store.stats.reasons["headless"] += headless
        runs = [count if (first := column.find(0)) < 0 else first for column in columns[:leading]]
        return p.Found(runs, [bytes(column) for column in columns[leading:]], reason)

    def waits(self, message: p.Locate, now: float) -> bool:
        """Is any of these pages being fetched for all? Then a Locate with `wait_s` is answered only when that is over, or that
        long has passed. What ends it are `commit` and `drop_owner`, and time."""
        return self.store.claimed(message.namespace, message.hashes, now)

    def locate(self, owner: int, message: p.Locate, now: float) -> Steps[p.Located]:
        p.count_hashes(message.hashes)
        if message.length <= 0:
            raise p.ProtocolError(f"object of {message.length} bytes")
        namespace, length = message.namespace, message.length
        pin, status, where, checksum = self.store.locate(owner, namespace, message.hashes, length, now, touch=message.touch)
        peers: list[p.Peer] = []
        others: list[int] = []
        reason = ""
        missing = [i for i, s in enumerate(status) if s == p.MISS]
        if missing and self.masters:
            question = p.Question(namespace, p.select_hashes(message.hashes, missing), prefix=False)
            told = yield AskMasters([question], min(LOOKUP_TIMEOUT_S, message.budget_s / 2))
            if told is not None:
                answer = told.answers[0]
                peers = list(answer.peers)
                for i, holder in zip(missing, answer.holder, strict=False):
                    if holder:
                        status[i], where[i] = p.REMOTE, holder - 1
                if answer.others:
                    others = [-1] * len(status)
                    for i, other in zip(missing, answer.others, strict=False):
                        others[i] = other - 1
            if any(status[i] == p.MISS for i in missing):
                reason = _why_absent(told)
        txn = 0
        room: list[int] = []
        wanted = [i for i in missing if status[i] == p.REMOTE] if message.shared else []
        if wanted:
            # Another rank may have brought some of them here while the master was asked.
            self.store.release(owner, pin)
            pin, here, places, checksum = self.store.locate(owner, namespace, message.hashes, length, now, touch=False)
            for i, found in enumerate(here):
                if found != p.MISS or status[i] == p.LOCAL:
                    status[i], where[i] = found, places[i]
            wanted = [i for i in wanted if status[i] == p.REMOTE]
            hashes = p.select_hashes(message.hashes, wanted)
            txn, column, room = self.store.claim(owner, namespace, hashes, length, now, message.group, message.hashes)
            if room:
                self._writing[txn] = Writing(owner, namespace, now)
            for i, claim in zip(wanted, column, strict=True):
                status[i] = claim
        return p.Located(pin, bytes(status), where, checksum, peers, reason, txn, room, others)

    def release(self, owner: int, message: p.Release) -> None:
        self.store.release(owner, message.pin, loaded=message.loaded)
        dropped = self.store.discard(message.namespace, message.bad, "checksum") if message.bad else 0
        if dropped:
            text = (
                f"{dropped} pages failed their checksum on read and were dropped. Memory is being damaged: check this host's "
                "RAM (edac-util, memtester) and whether another process maps the segment"
            )
            self._log(logging.ERROR, "checksum", text)
        for node in message.peer_down:
            text = f"a mover could not read from node {node}; its pages are misses here until it answers again"
            self._log(logging.WARNING, f"peer {node}", text)
            if len(self.peers_down) < _MAX_REASONS or node in self.peers_down:
                self.peers_down[node] += 1

    def take_peers_down(self) -> dict[str, int]:
        """How often reads from other nodes failed, by node, since the last call."""
        taken, self.peers_down = dict(self.peers_down), Counter()
        return taken

    def reserve(self, owner: int, message: p.Reserve, now: float) -> p.Reserved:
        p.count_hashes(message.hashes)
        if message.length <= 0:
            raise p.ProtocolError(f"object of {message.length} bytes")
        txn, status, where = self.store.reserve(owner, message.namespace, message.hashes, message.length, message.group)
        if p.WRITE in status:
            self._writing[txn] = Writing(owner, message.namespace, now)
        return p.Reserved(txn, bytes(status), where)

    def commit(self, owner: int, txn: int, ok: bytes, checksums: Sequence[int]) -> bytes:
        """One byte per WRITE key: 1 where it is stored now. None is when its namespace was cleared since the transaction began:
        nobody must find a page again that was on its way at the time."""
        writing = self._writing.get(txn)
        if writing is not None and writing.owner == owner:
            del self._writing[txn]
            if writing.void:
                ok = bytes(len(ok))
        return self.store.commit(owner, txn, ok, checksums)

    def drop_owner(self, owner: int) -> None:
        """A connection ended: its pins and what it did not commit are over."""
        self.store.drop_owner(owner)
        for txn in [txn for txn, writing in self._writing.items() if writing.owner == owner]:
            del self._writing[txn]

    def clear(self, namespace: bytes) -> int:
        """Forget a namespace, and whatever of it is being written. Returns how many objects that was."""
        for writing in self._writing.values():
            writing.void |= writing.namespace == namespace
        return self.store.clear(namespace)

    # ------------------------------------------------------------------ other nodes

    def fetch(self, owner: int, fetch: p.Fetch, now: float) -> Served:
        """Another node's mover reads pages. They are pinned for `owner` until `fetched`."""
        p.count_hashes(fetch.hashes)
        pin, status, where, checksum = self.store.locate(
            owner, fetch.namespace, fetch.hashes, fetch.length, now, touch=fetch.touch
        )
        reply = p.FetchReply(self.name, self.incarnation, bytes(status), checksum, fetch.id)
        return Served(pin, reply, [at for at, s in zip(where, status, strict=True) if s == p.LOCAL])

    def fetched(self, owner: int, served: Served, sent: int) -> None:
        """The sending is over: so many of the bodies went out whole."""
        self.store.release(owner, served.pin, loaded=sent)

    # ------------------------------------------------------------------ housekeeping

    def tick(self, now: float) -> int:
        """A slice of housekeeping, a few hundred objects at most. Returns how many went: call again at once while it is not 0,
        and a few times a second otherwise."""
        if now >= self._expire_at:
            self.store.expire_pins(now)
            self._expire_at = now + 1.0
        return self.store.evict_to_low() + self.store.sweep()

    def report(self, now: float) -> Report:
        """Figures for people and metrics; counters since start."""
        stats = self.store.stats
        report: Report = {
            "capacity_bytes": self.store.allocator.capacity,
            "used_bytes": self.store.used_bytes,
            "pinned_bytes": self.store.pinned_bytes,
            "objects": self.store.objects,
            "namespaces": len(self.store.namespaces()),
            "lookup_keys": stats.lookup_keys,
            "hit_keys": stats.hit_keys,
            "loaded": stats.loaded,
            "loaded_bytes": stats.loaded_bytes,
            "stored": stats.stored,
            "stored_bytes": stats.stored_bytes,
            "had": stats.had,
            "evicted": stats.evicted,
            "evicted_bytes": stats.evicted_bytes,
            "refused": stats.refused,
            "discarded": stats.discarded,
            "abandoned": stats.abandoned,
            "expired_pins": stats.expired_pins,
            "pin_limit": stats.reasons["pin_limit"],
            "wrong_length": stats.reasons["wrong_length"],
            "headless": stats.reasons["headless"],
        }
        return report | {f"client miss: {reason}": count for reason, count in sorted(self.missed.items())}

    def validate(self) -> None:
        """Everything that must hold between two calls; tests run it after every event."""
        self.store.validate()


def _why_absent(told: Told | None) -> str:
    """Why a page that nobody named may be there all the same; empty when that is plain absence."""
    if told is None or not told.complete:
        return "master_down"
    return "master_warming" if told.warming else ""
