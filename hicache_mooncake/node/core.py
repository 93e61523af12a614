"""What a node answers: to the ranks and movers of its host, to other nodes, to the masters' orders. No I/O, clocks or threads.

Whatever needs a master or the disk is a generator that yields what it asks (`node.asking`) and is sent what was told. The shell
(service.py) runs every step under the node's lock and does the asking without it:

    steps = core.handle(owner, message, now)
    try:
        ask = next(steps)
        while True:
            ask = steps.send(told)   # `told`: what the masters answer to ask.questions within ask.timeout_s, or None
                                     # what the cold tier says to AskCold and LocateCold
    except StopIteration as end:
        answer = end.value
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from hicache_mooncake import protocol as p
from hicache_mooncake.config_values import MAX_PROMISE_S
from hicache_mooncake.node.allocator import blocks_of
from hicache_mooncake.node.asking import AskCold, Asked, AskMasters, ColdPlace, LocateCold, Told
from hicache_mooncake.node.heat import Heat
from hicache_mooncake.node.keeping import Keeping
from hicache_mooncake.node.link_session import Usage
from hicache_mooncake.node.placement import Placement
from hicache_mooncake.node.promises import Promise
from hicache_mooncake.node.recall import Mark, Recall
from hicache_mooncake.node.spill import GiveSteps, Spill
from hicache_mooncake.node.store import GUEST, OWN, REPLICA, LogicalPage, Store, Stranded
from hicache_mooncake.sharing import MAX_RANKS_OF_SOURCE, SharingTable, told

LOOKUP_TIMEOUT_S = 0.5
STUCK_S = 60.0
"""What is being written for longer belongs to somebody who hangs."""
STALLED_S = 10.0
CLEARED_S = 10.0
"""Other nodes may hear of a clear this much later: what they give or have until then may be of before it."""
REPLICA_CHECK_S = 5.0
MAX_TAKING = 32
"""Pushes that are taken at once."""
_EVICT_SLICE = 256
NOBODY = 0
"""No connection: what readers of other nodes were promised ends by time, or when they load it."""
_GIVING_S = 5.0
"""Pages that nobody took are evicted for so long, before giving them away is waited for again."""
_MAX_REASONS = 100
_MAX_CLEARED = 4096
APART_S = 60.0
"""A neighbour that a mover could not reach is a node of another host for so long; then movers try again."""
_MAX_APART = 256
_PINNED_FOR_OTHERS = 0.75
"""Of what may be pinned: slow readers on other hosts must not keep this host's engines from what lies here."""
_WANT_ROOM = 0.9
"""Of the low watermark: how full a node is when it begins to ask who has room."""

Report = dict[str, int | float | str | bool]
Log = Callable[[int, str, str], None]
"""Level, kind (lines of one kind are bounded), text."""


_T = TypeVar("_T")
Steps = Generator[Asked, Any, _T]
"""Sent back: `Told` or None to AskMasters, to the others what they say."""


@dataclasses.dataclass(slots=True)
class Writing:
    """A transaction of the store that is not committed yet. `void`: its namespace was cleared since it began."""

    owner: int
    namespace: bytes
    since: float
    void: bool = False
    pushed: bool = False
    """Another node gives these pages."""
    replicas: bool = False
    """They are fetched from another node and stay here."""
    promoted: bytes = b""
    """They come from the cold tier: their hashes."""
    gone: set[bytes] = dataclasses.field(default_factory=set)
    """Those of them that have left the tier since."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taking:
    """Pages that another node wants to give: what to answer, and where the bodies of the WRITE keys go."""

    txn: int
    reply: p.PushReply
    offsets: list[int]
    hashes: bytes
    """Of the WRITE keys."""
    checksums: list[int]
    """What these must have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Pages that another node reads: what to answer, and where the bodies are that follow, pinned until `fetched`."""

    pin: int
    reply: p.FetchReply
    offsets: list[int]
    length: int


class NodeCore:
    """Not thread-safe: one lock around every call and every step of a generator. Owners are connections, as in `Store`.

    `masters` says whether there is one to ask, `replicate_after` how many fetches within a minute make another node's page a
    replica here (0: none), `neighbours` whether movers may be told of other nodes' sockets on this host, `turn` as in Recall.
    Raises ProtocolError for messages that cannot be: the connection they came from must be closed."""

    def __init__(
        self,
        name: str,
        incarnation: bytes,
        store: Store,
        *,
        masters: bool,
        log: Log,
        rng: random.Random | None = None,
        spill: bool = False,
        replicate_after: int = 0,
        neighbours: bool = True,
        turn: Callable[[], int] = lambda: 0,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.store = store
        self.masters = masters
        self.placement = Placement(rng or random.Random(name))
        """Its `update` wants every room table that the masters give."""
        self.spilling = Spill(name, store, self.placement)
        self.draining = False
        """The node ends: nothing new is stored here."""
        self.missed: Counter[str] = Counter()
        """What the ranks of this host report: misses by reason."""
        self.broken: Counter[str] = Counter()
        """Of those, pages that had been promised."""
        self.promises_late = 0
        """Pages that readers of other nodes were told of, and that had gone from here when this node heard of it."""
        self.sent_bytes = 0
        self.taken = self.taken_bytes = self.pushes_refused = self.replicated = self.recalled = 0
        self.sharing = SharingTable()
        """The ranks of this host, by connection."""
        self.engines_told: tuple[int, Sequence[p.RankIdentity]] = (0, ())
        """What masters are to be told of them, and a number that grows when it changes. Replaced, never changed: any thread may
        read it."""
        self._engines_number = int.from_bytes(incarnation[:5], "little")
        """Lives of a node begin with different ones: a master that has those of an earlier life sees it."""
        self._described_at = 0.0
        self._spill = spill and masters
        self._neighbours = neighbours
        self._heat = Heat(replicate_after)
        self._recall = Recall(turn)
        self.keeping: Keeping | None = None
        """Of the cold tier, where there is one."""
        self.promoted = 0
        self._log = log
        self._writing: dict[int, Writing] = {}
        self._cleared: OrderedDict[bytes, float] = OrderedDict()
        """Namespaces cleared lately: when."""
        self._peers_down: Counter[str] = Counter()
        self._apart: OrderedDict[bytes, float] = OrderedDict()
        """Lives of neighbours whose segments this host's movers cannot open: until when that is taken for granted."""
        self._brim_bytes = (store.high_bytes + store.allocator.capacity) // 2
        self._nobody_took_at = float("-inf")
        self._expire_at = 0.0
        self._ticked_at = float("inf")
        self._pins_expired_at = float("-inf")
        self._replicas_at = 0.0

    # ------------------------------------------------------------------ ranks and movers

    def handle(self, owner: int, message: p.Message, now: float) -> Steps[p.Message | None]:
        """Any message of a rank or mover but Hello, AdminStatus and Clear. Returns the answer; None to one-way messages."""
        match message:
            case p.Exists():
                return (yield from self.exists(owner, message, now))
            case p.Locate():
                return (yield from self.locate(owner, message, now))
            case p.Release():
                self.release(owner, message, now)
            case p.Reserve():
                return self.reserve(owner, message, now)
            case p.Commit():
                return p.Committed(self.commit(owner, message.txn, message.ok, message.checksum))
            case p.Touch():
                p.count_hashes(message.hashes)
                self.store.touch(message.namespace, message.hashes)
            case p.Missed():
                for counts, reported in ((self.missed, message.reasons), (self.broken, message.broken)):
                    for reason, count in reported.items():
                        if len(counts) < _MAX_REASONS or reason in counts:
                            counts[reason] += count
            case _:
                raise p.ProtocolError(f"unexpected {type(message).__name__}")
        return None

    def exists(self, owner: int, message: p.Exists, now: float) -> Steps[p.Found]:
        count = p.count_hashes(message.hashes)
        namespaces = [*message.leading, *message.sparse]
        leading = len(message.leading)
        if not 1 <= len(namespaces) <= p.MAX_NAMESPACES_PER_MESSAGE or count * len(namespaces) > p.MAX_KEYS_PER_MESSAGE:
            raise p.ProtocolError(f"{count} pages of {len(namespaces)} namespaces asked for at once")
        columns = [bytearray(self.store.present(namespace, message.hashes)) for namespace in namespaces]
        promise_s = min(message.promise_s, MAX_PROMISE_S)
        promises: list[Promise[LogicalPage]] = []
        if promise_s > 0:
            promises = self._promise(owner, message.reader, namespaces, message.hashes, columns, now + promise_s)
        if self.keeping is not None and any(0 in column for column in columns):
            columns = yield from self._exist_cold(namespaces, message.hashes, columns, promise_s)
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
            mark = self._recall.mark()
            told = yield AskMasters(questions, min(LOOKUP_TIMEOUT_S, message.budget_s / 2), max(promise_s, 0.0), message.reader)
            self._learn(mark, questions, told, now)
            if told is not None:
                for (column, missing), answer in zip(asked, told.answers, strict=True):
                    for i, holder in zip(missing, answer.holder, strict=False):
                        column[i] = holder > 0
            if any(0 in column for column, _ in asked):
                reason = _why_absent(told)
        headless = sum(column.count(1, first) for column in columns[:leading] if (first := column.find(0)) >= 0)
        self.store.stats.reasons["headless"] += headless
        runs = [count if (first := column.find(0)) < 0 else first for column in columns[:leading]]
        for promise in promises:
            self.store.promises.cut(promise, min(runs, default=count))
        return p.Found(runs, [bytes(column) for column in columns[leading:]], reason)

    def _promise(
        self,
        owner: int,
        reader: str,
        namespaces: Sequence[bytes],
        hashes: bytes,
        columns: Sequence[bytearray],
        until: float,
    ) -> list[Promise[LogicalPage]]:
        """What is in DRAM stays, from here on: what follows takes time. What then is not told of after all is let go."""
        promises = [
            self.store.promise(owner, reader, namespace, hashes, until)
            for namespace, column in zip(namespaces, columns, strict=True)
            if 1 in column
        ]
        return [promise for promise in promises if promise is not None]

    def keep_promised(self, message: p.Keep, now: float) -> list[tuple[bytes, bytes]]:
        """A master has told a reader of another node that these are here. Returns those that are not in DRAM; where there is no
        cold tier they came too late (`promises_late`)."""
        until = now + min(message.promise_s, MAX_PROMISE_S)
        missing: list[tuple[bytes, bytes]] = []
        for namespace, hashes in message.pages:
            p.count_hashes(hashes)
            self.store.promise(NOBODY, _reader_of(message.node, message.reader), namespace, hashes, until)
            absent = [i for i, here in enumerate(self.store.present(namespace, hashes, touch=False)) if not here]
            if absent:
                missing.append((namespace, p.select_hashes(hashes, absent)))
                if self.keeping is None:
                    self.promises_late += len(absent)
        return missing

    def _learn(self, mark: Mark, questions: Sequence[p.Question], told: Told | None, now: float) -> None:
        """For the loads that follow. Masters that do not know of everything, or do not answer, are asked again by each."""
        if told is None or not told.complete:
            self._recall.forget()
        elif not told.warming:
            for question, answer in zip(questions, told.answers, strict=True):
                self._recall.learn(mark, question, answer, now)

    def _exist_cold(
        self, namespaces: Sequence[bytes], hashes: bytes, columns: list[bytearray], promise_s: float
    ) -> Steps[list[bytearray]]:
        """The columns, with what is in the cold tier."""
        missing = [[i for i, here in enumerate(column) if not here] for column in columns]
        told: list[bytes] = yield AskCold(
            [(namespace, p.select_hashes(hashes, which)) for namespace, which in zip(namespaces, missing, strict=True)],
            promise_s,
        )
        for column, which, answer in zip(columns, missing, told, strict=True):
            for i, here in zip(which, answer, strict=False):
                column[i] = here
        return columns

    def waits(self, message: p.Locate, now: float) -> bool:
        """Is any of these pages being fetched for all? Then a Locate with `wait_s` is answered only when that is over, or that
        long has passed. What ends it are `commit` and `drop_owner`, and time."""
        return self.store.claimed(message.namespace, message.hashes, now)

    def locate(self, owner: int, message: p.Locate, now: float) -> Steps[p.Located]:
        p.count_hashes(message.hashes)
        if message.length <= 0:
            raise p.ProtocolError(f"object of {message.length} bytes")
        namespace, length = message.namespace, message.length
        pin, status, where, checksum = self.store.locate(
            owner,
            namespace,
            message.hashes,
            length,
            now,
            touch=message.touch,
            pinned_share=_PINNED_FOR_OTHERS if message.here_only else 1.0,
        )
        if message.reader and len(self.store.promises):
            pinned = [s == p.LOCAL for s in status]
            self.store.promises.fulfil(message.reader, namespace, message.hashes, pinned)
        if message.here_only:
            return p.Located(pin, bytes(status), where, checksum, [])
        peers: list[p.Peer] = []
        others: list[int] = []
        reason = ""
        recalled = False
        missing = [i for i, s in enumerate(status) if s == p.MISS]
        if self.keeping is not None and self.keeping.counts_loads:
            local = [i for i, s in enumerate(status) if s == p.LOCAL]
            self.keeping.loaded(namespace, (message.hashes[i * p.HASH_BYTES : (i + 1) * p.HASH_BYTES] for i in local), now)
        cold: dict[int, ColdPlace] = {}
        if missing and message.cold and self.keeping is not None:
            told_cold: list[ColdPlace | None] = yield LocateCold(namespace, p.select_hashes(message.hashes, missing), length)
            cold = {i: place for i, place in zip(missing, told_cold, strict=False) if place is not None}
            for i in cold:
                status[i] = p.READ
            missing = [i for i in missing if i not in cold]
        if missing and self.masters:
            told: Told | None = None
            question = p.Question(namespace, p.select_hashes(message.hashes, missing), prefix=False)
            answer = self._recall.find(namespace, question.hashes, now) if message.recall else None
            recalled = answer is not None
            if answer is None:
                if message.again:
                    self._recall.forget_namespace(namespace)
                told = yield AskMasters([question], min(LOOKUP_TIMEOUT_S, message.budget_s / 2))
                answer = told.answers[0] if told is not None else None
            self.recalled += recalled
            if answer is not None:
                peers = [self._reachable(peer, now) for peer in answer.peers]
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
        # What lies in a neighbour's segment is as near as if it lay here: there is no need to fetch it for all.
        wanted = [i for i in missing if status[i] == p.REMOTE and not peers[where[i]].socket]
        if not message.shared:
            wanted = self._hot(message, wanted, now)
        if wanted and not self.draining and not self._cleared_lately(namespace, now):
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
                self._writing[txn] = Writing(owner, namespace, now, replicas=True)
            for i, claim in zip(wanted, column, strict=True):
                if message.shared or claim == p.FETCH:  # for a page that is only hot nobody waits
                    status[i] = claim
        cold_txn, cold_room = self._promote(owner, message, status, cold, now)
        for i, place in cold.items():
            if status[i] in (p.READ, p.READ_ON):
                where[i], checksum[i] = place.offset, place.checksum
        return p.Located(
            pin,
            bytes(status),
            where,
            checksum,
            peers,
            reason,
            txn,
            room,
            others,
            recalled=recalled,
            cold_txn=cold_txn,
            cold_room=cold_room,
        )

    def _promote(
        self, owner: int, message: p.Locate, status: bytearray, cold: Mapping[int, ColdPlace], now: float
    ) -> tuple[int, list[int]]:
        """Of pages that are read from the cold tier those come back into DRAM that are asked for more than once, and those that
        several ranks want: one reads them for all. No page is lost for it that is not on the disk too. Returns the transaction,
        and room for each that became READ_ON."""
        often = [i for i, place in cold.items() if status[i] == p.READ and (place.often or message.shared)]
        if not often or self.draining or self._cleared_lately(message.namespace, now):
            return 0, []
        often = often[: self.store.evict_kept(message.length, len(often))]
        if not often:
            return 0, []
        hashes = p.select_hashes(message.hashes, often)
        txn, column, room = self.store.claim(
            owner, message.namespace, hashes, message.length, now, message.group, message.hashes, rank=OWN, evict=False
        )
        read_on = [i for i, claim in zip(often, column, strict=True) if claim == p.FETCH]
        if room:
            promoted = p.select_hashes(message.hashes, read_on)
            self._writing[txn] = Writing(owner, message.namespace, now, promoted=promoted)
        for i in read_on:
            status[i] = p.READ_ON
        for i, claim in zip(often, column, strict=True):
            if claim == p.WAIT and message.shared:
                status[i] = p.WAIT
        return txn, room

    def _reachable(self, peer: p.Peer, now: float) -> p.Peer:
        """Without the socket of one on this host that cannot be read through it: then it is as any other host's."""
        if not peer.socket or (self._neighbours and now >= self._apart.get(peer.incarnation, now)):
            return peer
        return p.Peer(peer.node, peer.incarnation, peer.host, peer.port)

    def _hot(self, message: p.Locate, remote: list[int], now: float) -> list[int]:
        """Which of these are to stay here, since this host's engines fetch them again and again."""
        if message.again or message.wait_s > 0:
            return []  # the same fetch once more
        size = p.HASH_BYTES
        fetched, namespace, hashes = self._heat.fetched, message.namespace, message.hashes
        return [i for i in remote if fetched(namespace, hashes[i * size : (i + 1) * size], now)]

    def release(self, owner: int, message: p.Release, now: float) -> None:
        self.store.release(owner, message.pin, loaded=message.loaded)
        dropped = self.store.discard(message.namespace, message.bad, "checksum") if message.bad else 0
        if dropped:
            text = (
                f"{dropped} pages failed their checksum on read and were dropped. Memory is being damaged: check this host's "
                "RAM (edac-util, memtester) and whether another process maps the segment"
            )
            self._log(logging.ERROR, "checksum", text)
        for node in message.peer_down:
            self._recall.forget_peer(node)
            text = f"a mover could not read from node {node}; its pages are misses here until it answers again"
            self._log(logging.WARNING, f"peer {node}", text)
            if len(self._peers_down) < _MAX_REASONS or node in self._peers_down:
                self._peers_down[node] += 1
        for node, incarnation, why in message.apart:
            self._keep_apart(node, incarnation, why, now)

    def _keep_apart(self, node: str, incarnation: bytes, why: str, now: float) -> None:
        known = self._apart.pop(incarnation, None)
        self._apart[incarnation] = now + APART_S
        if len(self._apart) > _MAX_APART:
            self._apart.popitem(last=False)
        if known is None:
            text = (
                f"node {node} of this host cannot be read through its segment: {why}. Its pages come by tcp. Run both nodes "
                "and their engines as one user, and where they are in containers put --socket into a directory that these share"
            )
            self._log(logging.WARNING, f"apart {node}", text)

    def describe(self, owner: int, rank: p.RankIdentity, now: float) -> None:
        """Whose connection this is. It counts until `drop_owner`."""
        self._described_at = now
        self.sharing.put(str(owner), [rank], now)
        self._tell_engines()

    def _tell_engines(self) -> None:
        number, before = self.engines_told
        ranks = [told(rank) for rank in self.sharing.ranks()]
        # A rank describes itself again and again, and is then the last of the list.
        after = sorted(ranks[-MAX_RANKS_OF_SOURCE:], key=lambda rank: (rank.engine, rank.writer, rank.rank))
        if after != list(before):
            self.engines_told = max(number, self._engines_number) + 1, after

    def take_peers_down(self) -> dict[str, int]:
        """How often reads from other nodes failed, by node, since the last call."""
        taken, self._peers_down = dict(self._peers_down), Counter()
        return taken

    def reserve(self, owner: int, message: p.Reserve, now: float) -> p.Reserved:
        p.count_hashes(message.hashes)
        if message.length <= 0:
            raise p.ProtocolError(f"object of {message.length} bytes")
        if self.draining:
            count = len(message.hashes) // p.HASH_BYTES
            return p.Reserved(0, bytes([p.REFUSED]) * count, [0] * count)
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
        done = self.store.commit(owner, txn, ok, checksums)
        if writing is not None and writing.replicas:
            self.replicated += done.count(1)
        if writing is not None and writing.promoted:
            self.promoted += done.count(1)
            pages = zip(p.split(writing.promoted), done, strict=False)
            self.store.keep(writing.namespace, [each for each, ok in pages if ok and each not in writing.gone])
        return done

    def strand(self, owner: int, txn: int) -> Stranded:
        """What this transaction reserved is not stored: a link that cannot be ended may write to it. It is not used before the
        store has taken it back."""
        writing = self._writing.get(txn)
        if writing is not None and writing.owner == owner:
            del self._writing[txn]
        return self.store.strand(owner, txn)

    def drop_owner(self, owner: int) -> None:
        """A connection ended: its pins and what it did not commit are over, and so is who it said it was."""
        self.store.drop_owner(owner)
        if str(owner) in self.sharing:
            self.sharing.drop(str(owner), self._described_at)
            self._tell_engines()
        for txn in [txn for txn, writing in self._writing.items() if writing.owner == owner]:
            del self._writing[txn]

    def clear(self, namespace: bytes, now: float) -> int:
        """Forget a namespace, and whatever of it is being written. Returns how many objects that was."""
        self._cleared.pop(namespace, None)
        self._cleared[namespace] = now
        if len(self._cleared) > _MAX_CLEARED:
            self._cleared.popitem(last=False)
        self._recall.forget_namespace(namespace)
        for writing in self._writing.values():
            writing.void |= writing.namespace == namespace
        return self.store.clear(namespace)

    # ------------------------------------------------------------------ other nodes

    def fetch(self, owner: int, fetch: p.Fetch, now: float) -> Served:
        """Another node's mover reads pages. They are pinned for `owner` until `fetched`."""
        p.count_hashes(fetch.hashes)
        pin, status, where, checksum = self.store.locate(
            owner,
            fetch.namespace,
            fetch.hashes,
            fetch.length,
            now,
            touch=fetch.touch,
            pinned_share=_PINNED_FOR_OTHERS,
        )
        if fetch.reader and len(self.store.promises):
            pinned = [s == p.LOCAL for s in status]
            self.store.promises.fulfil(_reader_of(fetch.requester, fetch.reader), fetch.namespace, fetch.hashes, pinned)
        reply = p.FetchReply(self.name, self.incarnation, bytes(status), checksum, fetch.id)
        return Served(pin, reply, [at for at, s in zip(where, status, strict=True) if s == p.LOCAL], fetch.length)

    def fetched(self, owner: int, served: Served, sent: int) -> None:
        """The sending is over: so many of the bodies went out whole."""
        self.store.release(owner, served.pin, loaded=sent)
        self.sent_bytes += sent * served.length

    def push_offer(self, owner: int, push: p.Push, now: float) -> Taking:
        """Another node wants to give pages away. Room is made for none of them: what is free below the low watermark decides.
        The room belongs to `owner` until `push_done`, or `drop_owner` when nothing can write to it any more."""
        count = p.count_hashes(push.hashes)
        if push.length <= 0 or len(push.checksum) != count:
            raise p.ProtocolError(f"{count} pushed pages of {push.length} bytes with {len(push.checksum)} checksums")
        taking = sum(writing.pushed for writing in self._writing.values())
        fits = min(count, self.store.free_below_low // blocks_of(push.length))
        if self.draining or taking >= MAX_TAKING or self._cleared_lately(push.namespace, now):
            fits = 0
        txn, status, where = self.store.reserve(
            owner,
            push.namespace,
            push.hashes[: fits * p.HASH_BYTES],
            push.length,
            push.group,
            rank=OWN if push.hot else GUEST,
            evict=False,
        )
        wanted = [i for i, s in enumerate(status) if s == p.WRITE]
        if wanted:
            self._writing[txn] = Writing(owner, push.namespace, now, pushed=True)
        column = bytes(status) + bytes([p.REFUSED]) * (count - fits)
        self.pushes_refused += column.count(p.REFUSED)
        return Taking(
            txn,
            p.PushReply(column, push.id),
            [where[i] for i in wanted],
            p.select_hashes(push.hashes, wanted),
            [push.checksum[i] for i in wanted],
        )

    def push_done(self, owner: int, taking: Taking, whole: bytes, length: int) -> bytes:
        """All bodies have been received; those marked in `whole` with the checksum that they must have. One byte a WRITE key:
        1 where it is stored now."""
        done = self.commit(owner, taking.txn, whole, taking.checksums)
        self.taken += done.count(1)
        self.taken_bytes += done.count(1) * length
        return done

    def _cleared_lately(self, namespace: bytes, now: float) -> bool:
        at = self._cleared.get(namespace)
        return at is not None and now - at < CLEARED_S

    # ------------------------------------------------------------------ housekeeping

    def tick(self, now: float) -> int:
        """A slice of housekeeping, a few hundred objects at most. Returns how many went: call again at once while it is not 0,
        and a few times a second otherwise."""
        self._ticked_at = now
        if now >= self._expire_at:
            if self.store.expire_pins(now):
                self._pins_expired_at = now
            self.store.promises.expire(now)
            self._expire_at = now + 1.0
        swept = self.store.sweep()
        if self.give_due(now) and now - self._nobody_took_at > _GIVING_S and self.store.used_bytes < self._brim_bytes:
            return swept  # it will be given away: nothing needs to be lost
        written_first = self.keeping is not None and self.keeping.able and self.store.used_bytes < self._brim_bytes
        return swept + self.store.evict_to_low(_EVICT_SLICE, kept_only=written_first)

    def keep(self, after_loads: int, tier_bytes: int = 0) -> Keeping:
        """There is a cold tier of this size from here on. To be called once, before anything else."""
        self.keeping = Keeping(self.store, after_loads, tier_bytes)
        return self.keeping

    def cold_began_anew(self) -> None:
        """The cold tier has lost all that it had."""
        if self.keeping is not None:
            self.keeping.began_anew()
        for writing in self._writing.values():
            writing.gone.update(p.split(writing.promoted))

    def gone_cold(self, pages: Sequence[tuple[bytes, bytes]]) -> None:
        """These have left the cold tier: (namespace, hash)."""
        if not pages or self.keeping is None:
            return
        self.keeping.gone(pages)
        for writing in self._writing.values():
            if writing.promoted:
                promoted = set(p.split(writing.promoted))
                writing.gone |= {each for namespace, each in pages if namespace == writing.namespace and each in promoted}

    def give_due(self, now: float) -> bool:
        """Should `give` run?"""
        return self._spill and not self.draining and self.spilling.due(now)

    def give(self, owner: int, now: float) -> GiveSteps:
        """Give one batch of pages to nodes with room: cold ones, or the hottest of a node that ends. `owner` is the giver's,
        and has one batch at a time. Returns 0 when there was nothing to do or nobody took it."""
        if self.draining:
            return (yield from self.spilling.hand_over(owner, now))
        gone = yield from self.spilling.spill(owner, now)
        if not gone:
            self._nobody_took_at = now
        return gone

    def check_replicas(self, now: float) -> Generator[AskMasters, Told | None, int]:
        """Every few seconds: replicas that nobody else holds any more become own pages. Returns how many."""
        if not self.masters or now < self._replicas_at:
            return 0
        self._replicas_at = now + REPLICA_CHECK_S
        return (yield from self.spilling.check_replicas())

    def usage(self) -> Usage:
        """What the masters are told with every beat."""
        stats = self.store.stats
        return Usage(
            used_bytes=self.store.used_bytes,
            capacity_bytes=self.store.allocator.capacity,
            objects=self.store.objects,
            hits=stats.hit_keys,
            lookups=stats.lookup_keys,
            sent_bytes=self.sent_bytes,
            room_bytes=0 if self.draining else self.store.free_below_low,
            want_room=self.draining or (self._spill and self.store.used_bytes > _WANT_ROOM * self.store.low_bytes),
        )

    def problems(self, now: float) -> list[str]:
        """What is not as it should be, a sentence each: nothing moves though everything answers."""
        found: list[str] = []
        if now - self._ticked_at > STALLED_S:
            found.append(f"housekeeping has stood still for {now - self._ticked_at:.0f} s")
        oldest = min((writing.since for writing in self._writing.values()), default=now)
        if now - oldest > STUCK_S:
            found.append(f"a writer has held room for {now - oldest:.0f} s without an end: its mover or engine hangs")
        if now - self._pins_expired_at < STUCK_S:
            found.append("a reader held pages until its pin expired: its mover or engine hangs")
        return found

    def report(self, now: float) -> Report:
        """Figures for people and metrics; counters since start."""
        stats, counts, promises = self.store.stats, self.spilling.counts, self.store.promises
        report: Report = {
            "capacity_bytes": self.store.allocator.capacity,
            "used_bytes": self.store.used_bytes,
            "pinned_bytes": self.store.pinned_bytes,
            "promised": len(promises),
            "promised_bytes": promises.bytes,
            "objects": self.store.objects,
            "guests": self.store.pages(GUEST),
            "replicas": self.store.pages(REPLICA),
            "writing": len(self._writing),
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
            "evicted_unkept": stats.evicted_unkept,
            "refused": stats.refused,
            "discarded": stats.discarded,
            "abandoned": stats.abandoned,
            "expired_pins": stats.expired_pins,
            "pin_limit": stats.reasons["pin_limit"],
            "wrong_length": stats.reasons["wrong_length"],
            "headless": stats.reasons["headless"],
            "draining": self.draining,
            "spilled": counts.spilled,
            "spilled_bytes": counts.spilled_bytes,
            "spill_duplicates": counts.spill_duplicates,
            "spill_failures": counts.spill_failures,
            "handed_over": counts.handed_over,
            "handed_over_bytes": counts.handed_over_bytes,
            "taken": self.taken,
            "taken_bytes": self.taken_bytes,
            "pushes_refused": self.pushes_refused,
            "replicated": self.replicated,
            "lookups_recalled": self.recalled,
            "replicas_kept": counts.replicas_kept,
            "promoted": self.promoted,
            "promises": promises.made,
            "promises_loaded": promises.loaded,
            "promises_expired": promises.expired,
            "promises_dropped": promises.dropped,
            "promises_lost": promises.lost,
            "promises_late": self.promises_late,
        }
        report |= {f"broken promise: {reason}": count for reason, count in sorted(self.broken.items())}
        return report | {f"client miss: {reason}": count for reason, count in sorted(self.missed.items())}

    def validate(self) -> None:
        """Everything that must hold between two calls; tests run it after every event."""
        self.store.validate()
        self.sharing.validate()
        self._recall.validate()
        assert len(self._cleared) <= _MAX_CLEARED
        assert len(self._apart) <= _MAX_APART
        assert sum(writing.pushed for writing in self._writing.values()) <= MAX_TAKING


def _reader_of(node: str, reader: str) -> str:
    """A reader of another node: ranks of two hosts may say the same of themselves."""
    return f"{reader} of {node}"


def _why_absent(told: Told | None) -> str:
    """Why a page that nobody named may be there all the same; empty when that is plain absence."""
    if told is None or not told.complete:
        return "master_down"
    return "master_warming" if told.warming else ""
