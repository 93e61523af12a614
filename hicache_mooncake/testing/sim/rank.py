"""An engine rank of the simulated cluster: it looks pages up, loads and stores them, gives up, clears and dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hicache_mooncake import protocol as p

from .mover import Job, Mover, Outcome, Promised
from .network import Listener, Network, Stream
from .pages import HostPage, Ledger, Pool, page_hash
from .world import Process, Violation, World, short

MOVER_SHARE, RANK_SHARE = 0.7, 0.9
"""Of a call's time: when the mover stops by itself, and when the rank kills it."""
RESTART_S = 0.3
"""A node that came back may not be known yet."""
LATE_S = 0.11
"""A mover's last words to its node may take so long past its time."""


@dataclass
class Workload:
    """What the ranks of a run do."""

    pools: list[Pool]
    chains: int
    pages: int
    deadline_s: float = 2.0
    think_s: float = 0.05
    step_s: float = 0.0005
    abort: float = 0.02
    die: float = 0.005
    clear: float = 0.005
    shared: float = 0.3
    promise_s: float = 0.0
    """So long ranks count on what they were told of; 0: they do not."""
    check_checksums: bool = True
    pins_hold: bool = False
    """Pins outlast every call: then no checksum ever fails."""


@dataclass
class Call:
    """A load or store under way: the pages that the engine has lent to it."""

    job: Job
    chain: int
    places: list[HostPage]
    began: float
    mover: Mover
    over: bool = False


@dataclass
class Counters:
    stores: int = 0
    loads: int = 0
    loaded: int = 0
    stored: int = 0
    lookups: int = 0
    found: int = 0
    kept: int = 0
    """Loads of which every page that was promised came."""


class Rank:
    """One rank: a query connection to its node, a load mover and a store mover."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        host: str,
        find_node: Callable[[], Listener | None],
        disturbed_at: Callable[[], float],
        find_peer: Callable[[p.Peer], tuple[str, Listener | None]],
        workload: Workload,
        ledger: Ledger,
        keeps: Callable[[Pool, bytes], bool],
        excuses: Callable[[], tuple[object, ...]],
    ) -> None:
        self.world, self.network = world, network
        self.name, self.host = name, host
        self.find_node, self.find_peer = find_node, find_peer
        self.disturbed_at = disturbed_at
        """When something happened to the local node last that excuses it, on the world's clock."""
        self.keeps, self.excuses = keeps, excuses
        """Of the local node: is this page promised, in its DRAM, and what must be as it was for that to stay so?"""
        self.workload = workload
        self.ledger = ledger
        self.counters = Counters()
        self.reasons: Counter[str] = Counter()
        self.running = True
        self.process = Process(world, f"rank {name}")
        self.movers: dict[str, Mover] = {}
        self.calls: dict[str, Call] = {}
        self._query: Stream | None = None
        self._asked: Callable[[p.Message | None], None] | None = None
        self._lives = 0
        self._act_later()

    # ------------------------------------------------------------------ what it does

    def _act_later(self) -> None:
        self.process.later(self.world.rng.expovariate(1 / self.workload.think_s), self._act)

    def _act(self) -> None:
        if not self.running:
            return
        rng, load = self.world.rng, self.workload
        dice = rng.random()
        if dice < load.die:
            self.die()
            return
        if dice < load.die + load.clear:
            self.clear(rng.choice(load.pools))
        elif dice < 0.5:
            self.store(rng.choice(load.pools), rng.randrange(load.chains))
        else:
            self.look_and_load(rng.choice(load.pools), rng.randrange(load.chains))
        self._act_later()

    def chain(self, chain: int) -> list[bytes]:
        return [page_hash(chain, index) for index in range(self.workload.pages)]

    def store(self, pool: Pool, chain: int, done: Callable[[Outcome | None], None] | None = None) -> None:
        """Back a chain, or a prefix of it, up. `done` gets the outcome, None where there was none."""
        if "store" in self.calls:
            return
        hashes = self.chain(chain)
        if done is None:
            hashes = hashes[: self.world.rng.randrange(1, len(hashes) + 1)]
        places = []
        for of in hashes:
            place = HostPage(pool.length)
            place.data[:] = self.ledger.write(pool, of)
            places.append(place)
        self.counters.stores += 1
        job = Job("store", pool, hashes, places, 0.0)
        self._call(job, chain, done)

    def look_and_load(self, pool: Pool, chain: int) -> None:
        hashes = self.chain(chain)

        parts = [part.namespace for part in self.workload.pools if part.group == pool.group and part is not pool]
        leading = [pool.namespace]
        sparse: list[bytes] = []
        (leading if self.world.chance(0.5) else sparse).extend(parts)

        def answered(answer: p.Message | None) -> None:
            if not isinstance(answer, p.Found):
                return
            runs, columns = answer.runs, answer.columns
            if len(runs) != len(leading) or not all(0 <= run <= len(hashes) for run in runs):
                raise Violation(f"{self.name}: Found {runs} of {len(hashes)} pages")
            if len(columns) != len(sparse) or not all(len(column) == len(hashes) for column in columns):
                raise Violation(f"{self.name}: Found {len(columns)} columns of {len(sparse)} for {len(hashes)} pages")
            count = min(runs)
            self.counters.lookups += 1
            self.counters.found += count
            if not count:
                return
            if self.world.chance(0.3) and self._query is not None:
                self._query.send(p.Touch(pool.namespace, b"".join(hashes[:count])))
            if not promise_s:
                self.load(pool, chain, count)
                return
            here = {i for i, of in enumerate(hashes[:count]) if self.keeps(pool, of)}
            promised = Promised(here, asked_at + promise_s, (self._query, *self.excuses()))
            pause = self.world.rng.uniform(0.0, 0.6 * promise_s)
            self.process.later(pause, lambda: self.load(pool, chain, count, promised=promised))

        promise_s, asked_at = self.workload.promise_s, self.world.now
        self.ask(
            p.Exists(leading, b"".join(hashes), sparse, self.workload.deadline_s / 2, promise_s, self.name),
            answered,
        )

    def load(
        self,
        pool: Pool,
        chain: int,
        count: int,
        done: Callable[[Outcome | None], None] | None = None,
        shared: bool | None = None,
        promised: Promised | None = None,
    ) -> None:
        if "load" in self.calls:
            return
        hashes = self.chain(chain)[:count]
        places = [HostPage(pool.length) for _ in hashes]
        self.counters.loads += 1
        if shared is None:
            shared = self.world.chance(self.workload.shared)
        job = Job("load", pool, hashes, places, 0.0, shared, self.world.chance(0.5), self.name, promised)
        self._call(job, chain, done)

    def clear(self, pool: Pool) -> None:
        self.ask(p.Clear(pool.namespace), lambda answer: None)

    # ------------------------------------------------------------------ calls

    def _call(self, job: Job, chain: int, done: Callable[[Outcome | None], None] | None) -> None:
        mover = self.movers.get(job.op)
        if mover is None or not mover.process.alive:
            self._lives += 1
            mover = self.movers[job.op] = Mover(
                self.world,
                self.network,
                f"{self.name}.{job.op}.{self._lives}",
                job.op,
                self.host,
                self.find_node,
                self.find_peer,
                step_s=self.workload.step_s,
                check_checksums=self.workload.check_checksums,
            )
        job.budget_s = self.workload.deadline_s * MOVER_SHARE
        call = Call(job, chain, job.places, self.world.now, mover)
        self.calls[job.op] = call
        self.process.later(self.workload.deadline_s * RANK_SHARE, self._fence, call, done)
        if self.world.chance(self.workload.abort) and done is None:
            self.process.later(self.world.rng.uniform(0, 0.05), self._abort, call)

        def finished(outcome: Outcome) -> None:
            self.process.call(self._finished, call, outcome, done)

        mover.process.call(mover.run, job, finished)

    def _return(self, call: Call) -> None:
        """The call is over: the engine has its pages back."""
        call.over = True
        del self.calls[call.job.op]
        for place in call.places:
            place.lent = False

    def _finished(self, call: Call, outcome: Outcome, done: Callable[[Outcome | None], None] | None) -> None:
        if call.over:
            return
        self._return(call)
        took = self.world.now - call.began
        self.world.note(f"rank {self.name} {call.job.op} ok={outcome.ok.hex()} {dict(sorted(outcome.reasons.items()))}")
        if took > self.workload.deadline_s * MOVER_SHARE + LATE_S and not call.mover.frozen:
            raise Violation(f"{self.name}: a {call.job.op} took {took:.3f} s of {self.workload.deadline_s:g} s")
        if sum(outcome.reasons.values()) != outcome.ok.count(0):
            raise Violation(f"{self.name}: {outcome.ok.count(0)} misses, and reasons {dict(outcome.reasons)}")
        local = outcome.reasons["node_timeout"] + outcome.reasons["node_down"] + outcome.reasons["node_refused"]
        if local and self.disturbed_at() < call.began - RESTART_S:
            raise Violation(f"{self.name}: {dict(outcome.reasons)}, and nothing happened to the node")
        damaged = outcome.reasons["checksum"] + outcome.reasons["checksum_remote"]
        if damaged and self.workload.pins_hold:
            raise Violation(f"{self.name}: {damaged} pages were damaged under their pins")
        self.reasons.update(outcome.reasons)
        if call.job.op == "load":
            for i, whole in enumerate(outcome.ok):
                if whole:
                    self.ledger.check(call.job.pool, call.job.hashes[i], call.places[i].data, self.name)
            self._check_promised(call.job, outcome)
            self.counters.loaded += outcome.ok.count(1)
        else:
            self.counters.stored += outcome.ok.count(1)
        if done is not None:
            done(outcome)

    def _check_promised(self, job: Job, outcome: Outcome) -> None:
        """What the node had in DRAM when it said so comes, if it is loaded in time and nothing has happened to the node."""
        promised = job.counts_on
        if promised is None or not promised.pages or self.world.now > promised.until:
            return
        if promised.excuses != (self._query, *self.excuses()) or self.disturbed_at() > promised.until - self.workload.promise_s:
            return
        missing = [i for i in promised.pages if not outcome.ok[i]]
        self.counters.kept += not missing
        if missing and outcome.reasons.keys() <= {"absent", "gone_remote", "wrong_length", "master_down", "master_warming"}:
            raise Violation(f"{self.name}: {len(missing)} of {len(promised.pages)} promised pages: {dict(outcome.reasons)}")

    def _fence(self, call: Call, done: Callable[[Outcome | None], None] | None) -> None:
        """Time is up: the mover is killed, and only then the pages are the engine's again."""
        if call.over:
            return
        if not call.mover.frozen:
            raise Violation(f"{self.name}: a {call.job.op} had to be fenced, and nothing was frozen")
        call.mover.process.end()
        self._return(call)
        if done is not None:
            done(None)

    def _abort(self, call: Call) -> None:
        """The request was given up: the same fence, earlier."""
        if not call.over:
            self.world.note(f"rank {self.name} aborts its {call.job.op}")
            call.mover.process.end()
            self._return(call)

    def ask(self, message: p.Message, done: Callable[[p.Message | None], None]) -> None:
        """A question to the node on the rank's own connection, one at a time; no answer within the deadline is None."""
        if self._asked is not None:
            return

        asked_at = self.world.now

        def answered(answer: p.Message | None) -> None:
            if self._asked is answered:
                if answer is None and self.disturbed_at() < asked_at - RESTART_S:
                    raise Violation(f"{self.name}: no answer to {type(message).__name__}, and nothing happened to the node")
                self._asked = None
                if answer is None and self._query is not None:
                    self._query.close()
                    self._query = None
                if answer is not None:
                    self.world.note(f"rank {self.name} <- {short(answer)}")
                done(answer)

        self._asked = answered
        self.process.later(self.workload.deadline_s, answered, None)
        if self._query is not None and self._query.open:
            self._query.send(message)
            return

        def connected(stream: Stream | None) -> None:
            if stream is None or self._asked is not answered:
                if stream is not None:
                    stream.close()
                answered(None)
                return
            self._query = stream
            stream.received = self._answer
            stream.closed = lambda: self._answer(None)
            stream.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, "query", self.name))
            stream.send(message)

        self.network.connect(self.process, self.host, self.host, self.find_node(), connected)

    def _answer(self, answer: p.Message | tuple[object, ...] | None) -> None:
        if isinstance(answer, tuple):
            return  # welcome
        if answer is None:
            self._query = None
        if self._asked is not None:
            self._asked(answer)

    # ------------------------------------------------------------------ its end

    def die(self) -> None:
        """kill -9 of the engine: its movers end with it. Another one takes its place a little later."""
        self.stop()
        self.process = Process(self.world, f"rank {self.name}")
        self.running = True
        self.process.later(self.world.rng.uniform(0.05, 1.0), self._act)

    def revive(self) -> None:
        """A rank that does only what it is told."""
        self.stop()
        self.process = Process(self.world, f"rank {self.name}")

    def stop(self) -> None:
        self.running = False
        for call in list(self.calls.values()):
            call.mover.process.end()
            self._return(call)
        for mover in self.movers.values():
            mover.process.end()
        self.movers.clear()
        self._query = None
        self._asked = None
        self.process.end()
