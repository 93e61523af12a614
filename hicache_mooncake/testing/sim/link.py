"""A simulated node's link to the masters: the real `LinkCore` over dealers, and lookups that are asked beside it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hicache_mooncake import protocol as p
from hicache_mooncake.node.link_core import Close, Connect, JoinFacts, Keys, LinkCore, Usage
from hicache_mooncake.node.lookup_plan import NO_PROMISE, Answers, Lookups

from .network import Dealer
from .world import Violation

if TYPE_CHECKING:
    from .node import SimNode

_TAKE = 16
_from_master = p.decoder(p.FromMaster)


class _Strict(logging.Logger):
    """Says nothing, and lets no exception pass for a line in a log."""

    def exception(self, *arguments: object, **options: object) -> None:
        raise


silent = _Strict("hicache_mooncake.testing.sim", logging.CRITICAL + 1)


class SimLink:
    """Of one life of a node."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.world = node.world
        self.core = LinkCore(
            node.masters,
            self._facts,
            self,
            random.Random(self.world.rng.getrandbits(64)),
            silent,
            self._on_clear,
            on_keep=self._on_keep,
            cold=node.cold,
        )
        self.dealers: dict[str, Dealer] = {}
        self.closed = False
        self._due = float("inf")
        self._askers: dict[str, Asker] = {}
        self.lookups = Lookups()

    def start(self) -> None:
        self.pump()

    # ------------------------------------------------------------------ the stream of updates

    def notify(self) -> None:
        self.core.notify()
        self.wake_at(self.core.next_due(self.node.process.now))

    def clear_namespace(self, namespace: bytes) -> None:
        self.core.clear_namespace(namespace)
        self.wake_at(self.node.process.now)

    def report(self, failed: dict[str, int]) -> None:
        self.core.report(failed, self.node.process.now)
        self.wake_at(self.core.next_due(self.node.process.now))

    def beat_now(self) -> None:
        self.core.beat_now(self.node.process.now)
        self.wake_at(self.node.process.now)

    def wake_at(self, time: float) -> None:
        time = max(time, self.node.process.now + 1e-4)
        if time < self._due - 1e-9:
            self._due = time
            self.node.process.later(time - self.node.process.now, self._wake, time)

    def _wake(self, time: float) -> None:
        if time == self._due:
            self._due = float("inf")
            self.pump()

    def pump(self) -> None:
        """A pass of the link's thread."""
        if self.closed:
            return
        now = self.node.process.now
        for action in self.core.step(now):
            if isinstance(action, Connect):
                self._open(action.master)
            elif isinstance(action, Close):
                dealer = self.dealers.pop(action.master, None)
                if dealer is not None:
                    dealer.close()
            else:
                raise AssertionError(action)
        more = False
        for master, dealer in list(self.dealers.items()):
            for _ in range(_TAKE):
                if not dealer.writable:
                    more |= self.core.wants_to_send(master, now)
                    break
                message = self.core.take(master, now)
                if message is None:
                    break
                dealer.send(p.encode(message), may_be_lost=isinstance(message, p.Update | p.Snapshot))
            else:
                more = True
        if self.core.counters["failures"]:
            raise Violation(f"{self.node.name}: the link's source failed")
        if self.world.rng.random() < self.node.options.validate_share:
            self.core.validate()
        self.wake_at(now + 0.001 if more else self.core.next_due(now))

    def close(self) -> None:
        """The node ends in order: the masters hear of it, and nothing more."""
        for master, message in self.core.leave():
            if master in self.dealers:
                self.dealers[master].send(p.encode(message))
        for dealer in self.dealers.values():
            dealer.close()
        self.dealers.clear()
        self.closed = True

    def _open(self, master: str) -> None:
        host, _ = self.node.find_master(master)

        def received(body: bytes) -> None:
            self.core.received(master, _from_master.decode(body), self.node.process.now)
            self.wake_at(self.node.process.now)

        self.dealers[master] = Dealer(
            self.node.network,
            self.node.process,
            self.node.host,
            host,
            lambda: self.node.find_master(master)[1],
            received,
            lambda: self.wake_at(self.node.process.now),
        )

    # ------------------------------------------------------------------ what the core reads

    def _facts(self) -> JoinFacts:
        node = self.node
        return JoinFacts(
            node.name, node.incarnation, node.address, node.port, node.store.allocator.capacity, node.host, node.core.draining
        )

    def _on_clear(self, namespace: bytes) -> None:
        self.world.note(f"{self.node.process.name} is told to clear {namespace[:4].hex()}")
        self.node.clear(namespace)

    def _on_keep(self, keep: p.Keep) -> None:
        self.world.note(f"{self.node.process.name} is told to keep pages for {keep.reader} of {keep.node}")
        self.node.keep_promised(keep)

    def drain_changes(self, limit: int) -> tuple[Keys, Keys]:
        return self.node.store.drain_changes(limit)

    def snapshot(self) -> Iterator[Keys]:
        for namespace, blob in self.node.store.snapshot():
            step = 7 * p.HASH_BYTES
            for at in range(0, len(blob), step):
                yield [(namespace, blob[at : at + step])]

    def changes_lost(self) -> bool:
        return self.node.store.changes_lost

    def usage(self) -> Usage:
        return self.node.core.usage()

    # ------------------------------------------------------------------ lookups

    def ask(
        self,
        questions: list[p.Question],
        timeout_s: float,
        done: Callable[[Answers | None], None],
        promise: tuple[float, str] = NO_PROMISE,
    ) -> None:
        """Ask one master of each shard, another one when it is slow; `done` is called once, within `timeout_s`."""
        if self.closed:
            self.node.process.later(0.0, done, None)
            return
        Asking(self, questions, timeout_s, done, promise).step()

    def asker(self, master: str) -> Asker:
        if master not in self._askers:
            self._askers[master] = Asker(self, master)
        return self._askers[master]


class Asker:
    """Questions to one master on a connection beside the stream of updates."""

    def __init__(self, link: SimLink, master: str) -> None:
        self.link = link
        self.master = master
        self._waiting: dict[int, Callable[[str, p.Message], None]] = {}
        self._unsent: list[bytes] = []
        self._dealer: Dealer | None = None

    def ask(self, lookup: p.Lookup, done: Callable[[str, p.Message], None]) -> None:
        self._waiting[lookup.id] = done
        body = p.encode(lookup)
        if self._dealer is None:
            node = self.link.node
            host, _ = node.find_master(self.master)
            self._dealer = Dealer(
                node.network,
                node.process,
                node.host,
                host,
                lambda: node.find_master(self.master)[1],
                self._received,
                self._connected,
            )
        if self._dealer.writable:
            self._dealer.send(body)
        else:
            self._unsent.append(body)

    def forget(self, number: int, *, silent: bool) -> None:
        """Nobody waits for this answer any more. Of a silent master the connection is of no use either."""
        self._waiting.pop(number, None)
        if silent:
            self._unsent.clear()
            if self._dealer is not None:
                self._dealer.close()
                self._dealer = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _connected(self) -> None:
        assert self._dealer is not None
        for body in self._unsent:
            self._dealer.send(body)
        self._unsent.clear()

    def _received(self, body: bytes) -> None:
        reply = _from_master.decode(body)
        if isinstance(reply, p.LookupReply) and reply.id in self._waiting:
            self._waiting[reply.id](self.master, reply)


class Asking:
    """One lookup: the real plan, and the messages that it wants sent."""

    def __init__(
        self,
        link: SimLink,
        questions: list[p.Question],
        timeout_s: float,
        done: Callable[[Answers | None], None],
        promise: tuple[float, str],
    ) -> None:
        self._link = link
        self._done = done
        self._over = False
        now = link.node.process.now
        self._plan = link.lookups.begin(questions, link.core.view(), link.node.name, now, timeout_s, promise)
        self._asked: list[tuple[Asker, int]] = []
        self._deadline = now + timeout_s

    def step(self) -> None:
        if self._over:
            return
        now = self._link.node.process.now
        for ask in self._plan.step(now):
            asker = self._link.asker(ask.master)
            asker.ask(ask.message, self._received)
            self._asked.append((asker, ask.message.id))
        if self._plan.done:
            self._end()
            return
        self._link.node.process.later(max(0.0, self._plan.next_due(now) - now), self.step)

    def _received(self, master: str, reply: p.Message) -> None:
        if not self._over and self._plan.received(master, reply, self._link.node.process.now):
            self.step()

    def _end(self) -> None:
        self._over = True
        now = self._link.node.process.now
        self._plan.end(now)
        for asker, number in self._asked:
            asker.forget(number, silent=asker.master in self._plan.blamed)
        if self._plan.garbage:
            raise Violation(f"{self._link.node.name}: a master's answer does not fit the question")
        self._done(self._plan.result())
