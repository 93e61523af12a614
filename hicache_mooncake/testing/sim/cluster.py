"""A whole simulated cluster, drawn from a seed, and what must hold of it after every event and at the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hicache_mooncake import protocol as p
from hicache_mooncake.cold.index import Key
from hicache_mooncake.node.store import Store

from .faults import COLD_KINDS, KINDS, Faults, Plan
from .master import SimMaster
from .mover import Outcome
from .network import Listener, Network
from .node import NodeOptions, SimNode
from .pages import Ledger, Pool, page_hash
from .rank import Rank, Workload
from .world import Violation, World

GRANULE = 4096
PIN_SLACK_S = 1.5
"""Pins are looked through once a second."""
LONGEST_SEND_S = 12.0
"""A node lets go of a reader after ten seconds."""
TRIES = 3
MAX_CHECKED = 16
"""Chains that each node is asked for at the end."""
SETTLE_S = 240.0
"""Longer than anything that heals by itself takes: a node that fell sick often is out for a minute."""


@dataclass
class Options:
    """What may be set for a run besides its seed; what is None is drawn from it."""

    trouble_s: float | None = None
    nodes: int | None = None
    masters: int | None = None
    shards: int | None = None
    ranks: int | None = None
    capacity: int | None = None
    """Pages of 4 KiB a node."""
    times: tuple[float, float, float] | None = None
    """heartbeat_s, ttl_s and forget_s of the masters."""
    cold: bool | None = None
    """Have the nodes cold tiers?"""
    plan: Plan | None = None
    workload: dict[str, Any] = field(default_factory=dict)
    node: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    validate_share: float = 0.1
    """Of all events after which the state machine that took them checks itself whole."""
    store: Callable[[dict[str, Any]], Store] = lambda options: Store(**options)
    settle_s: float = SETTLE_S
    """How long masters may need after the last fault."""
    sabotage: Callable[[Cluster], None] | None = None
    """Breaks something on purpose, once the cluster is made: the run must fail."""


@dataclass
class Result:
    """What came of a run that held."""

    seed: int
    trace_hash: str
    events: int
    virtual_s: float
    figures: dict[str, int]


class Cluster:
    """Masters, nodes and ranks on hosts of one network."""

    def __init__(self, world: World, options: Options) -> None:
        self.world = world
        self.options = options
        rng = world.rng
        lossy = rng.random() < 0.3
        self.network = Network(world, **({"loss": 0.01 if lossy else 0.0, "repeat": 0.01 if lossy else 0.0} | options.network))
        shards = options.shards or rng.choice([1, 1, 2, 3])
        replicas = options.masters or rng.choice([1, 2, 2, 3])
        self.shards = shards
        self.ledger = Ledger(world)
        drawn_times = rng.choice([(0.2, 0.6, 2.0), (0.5, 2.0, 10.0), (0.5, 2.0, 10.0), (1.0, 5.0, 60.0)])
        self.heartbeat_s, self.ttl_s, self.forget_s = options.times or drawn_times
        self.masters: list[SimMaster] = []
        self._by_address: dict[str, SimMaster] = {}
        for shard in range(shards):
            for replica in range(replicas):
                address = f"m{shard}{replica}:50051"
                master_options = {
                    "heartbeat_s": self.heartbeat_s,
                    "ttl_s": self.ttl_s,
                    "forget_s": self.forget_s,
                    "shard": (shard, shards),
                }
                master = SimMaster(world, self.network, address, address[:3], master_options, options.validate_share)
                self.masters.append(master)
                self._by_address[address] = master
        pools = [Pool(b"model-a kv      ", b"model-a group   ", 160), Pool(b"model-a index   ", b"model-a group   ", 64)]
        pools += [Pool(b"model-b kv      ", b"model-b group   ", 96), Pool(b"model-c kv      ", b"model-c group   ", 5000)]
        self.pools = pools[: rng.choice([1, 2, 3, 4])]
        count = options.nodes or rng.randrange(2, 6)
        drawn: dict[str, Any] = {
            "pin_seconds": rng.choice([0.05, 1.0, 30.0]),
            "step_s": rng.choice([0.0002, 0.001, 0.01]),
            "validate_share": options.validate_share,
            "store": options.store,
        }
        apart = random.Random(f"cold {world.seed}")  # by itself: a seed without a cold tier is the run that it was
        self.cold = options.cold if options.cold is not None else apart.random() < 0.5
        if self.cold:
            drawn["cold_pages"], drawn["cold_after_loads"] = apart.choice([12, 40, 200]), apart.choice([0, 0, 2])
        apart = random.Random(f"promises {world.seed}")
        promise_s = apart.choice([0.0, 0.0, 0.5, 3.0])
        if promise_s:
            drawn["promise_share"] = apart.choice([0.125, 0.5])
        node_options = NodeOptions(**(drawn | options.node))
        addresses = list(self._by_address)
        self.nodes = [
            SimNode(
                world,
                self.network,
                f"n{i}",
                f"h{i}",
                (options.capacity or rng.choice([12, 24, 60])) * GRANULE,
                addresses,
                self.find_master,
                self.find_peer,
                node_options,
            )
            for i in range(count)
        ]
        workload: dict[str, Any] = {
            "pools": self.pools,
            "chains": rng.choice([3, 8, 20]),
            "pages": rng.choice([1, 4, 8]),
            "think_s": rng.choice([0.02, 0.1, 0.3]),
            "step_s": rng.choice([0.0001, 0.001, 0.005]),
            "promise_s": promise_s,
        }
        if node_options.pin_seconds >= 30.0:
            workload["pins_hold"] = True
        self.workload = Workload(**(workload | options.workload))
        for master in self.masters:
            master.start()
        for node in self.nodes:
            node.start()
        self.ranks = [
            Rank(
                world,
                self.network,
                f"{node.name}.{r}",
                node.host,
                self._finder(node),
                self._disturbance(node),
                self.find_peer,
                self.workload,
                self.ledger,
                node.promised,
                self._excuses(node),
            )
            for node in self.nodes
            for r in range(options.ranks or rng.randrange(1, 3))
        ]
        self.faults: Faults | None = None
        world.after_event.append(self.check_bounds)

    @property
    def hosts(self) -> list[str]:
        return [*(node.host for node in self.nodes), *(master.host for master in self.masters)]

    @staticmethod
    def _finder(node: SimNode) -> Callable[[], Listener | None]:
        return lambda: node.unix if node.alive else None

    @staticmethod
    def _disturbance(node: SimNode) -> Callable[[], float]:
        return lambda: float("inf") if node.process.behind or not node.alive else node.process.disturbed_at

    @staticmethod
    def _excuses(node: SimNode) -> Callable[[], tuple[object, ...]]:
        return lambda: node.excuses

    def find_master(self, address: str) -> tuple[str, Listener | None]:
        master = self._by_address[address]
        return master.host, master.listener if master.alive else None

    def find_peer(self, peer: p.Peer) -> tuple[str, Listener | None]:
        for node in self.nodes:
            if (node.address, node.port) == (peer.host, peer.port):
                return node.host, node.data if node.alive else None
        raise Violation(f"nobody ever had the address {peer.host}:{peer.port}")

    # ------------------------------------------------------------------ what must hold

    def check_bounds(self) -> None:
        """After every event: what must not grow has not grown."""
        if self.world.events % 64:
            return
        for node in self.nodes:
            if not node.alive:
                continue
            ranks = sum(rank.host == node.host for rank in self.ranks)
            store = node.store
            # A rank's connections, those of a few movers that were just killed, and readers of other nodes.
            if len(node.connections) > 8 * ranks + 8:
                raise Violation(f"{node.name} has {len(node.connections)} connections of {ranks} ranks")
            if len(store._reservations) > 8 * ranks + 16:
                raise Violation(f"{node.name} holds {len(store._reservations)} reservations for {ranks} ranks")
            if store.pinned_bytes > store.allocator.used:
                raise Violation(f"{node.name}: more is pinned than there is")
            if not node.process.behind and self.world.now - node.process.disturbed_at > PIN_SLACK_S:
                late = sum(held.expires < node.process.now - PIN_SLACK_S for held in store._pins.values())
                if late:
                    raise Violation(f"{node.name}: {late} pins are past their end")
            for asker in node.link._askers.values():
                if asker.waiting > 200:
                    raise Violation(f"{node.name}: {asker.waiting} lookups wait for {asker.master}")

    def differences(self) -> list[str]:
        """Where a master's view is not what the nodes hold."""
        found = []
        for master in self.masters:
            shard, shards = master.options["shard"]
            for pool in self.pools:
                for of in self.hashes():
                    if p.shard_of(of, shards) != shard:
                        continue
                    known = master.core.holders(pool.namespace, of)
                    held = {(node.name, tier) for node in self.nodes for tier in self.tiers(node, pool, of)}
                    if known != held:
                        found.append(f"{master.address}: {of[:4].hex()} is on {sorted(held)}, not on {sorted(known)}")
            for node in self.nodes:
                member = master.core.membership.get(node.name, node.incarnation)
                state = member.state if member is not None else "unknown"
                if state != "active":
                    found.append(f"{master.address} says that {node.name} is {state}")
            if master.core.warming:
                found.append(f"{master.address} is warming")
        for node in self.nodes:
            found += self._not_kept(node)
            for view in node.link.core.view().masters:
                if not view.answers(node.process.now):
                    found.append(f"{node.name} is {view.state} at {view.master}")
        return found

    def hashes(self) -> list[bytes]:
        load = self.workload
        return [page_hash(chain, index) for chain in range(load.chains) for index in range(load.pages)]

    @staticmethod
    def tiers(node: SimNode, pool: Pool, of: bytes) -> list[int]:
        """Where it has this page."""
        here = [p.DRAM] if of in node.store._index.get(pool.namespace, ()) else []
        cold = node.cold is not None and node.cold.find(Key(pool.namespace, of)) is not None
        return [*here, p.COLD] if cold else here

    def holds(self, node: SimNode, pool: Pool, of: bytes) -> bool:
        return bool(self.tiers(node, pool, of))

    def _not_kept(self, node: SimNode) -> list[str]:
        """What it would evict as written although the disk does not have it."""
        if node.cold is None:
            return []
        parts = [part for page in node.store.hottest(1 << 20) if node.store.is_kept(page) for part in page.parts]
        lost = [part for part in parts if node.cold.find(Key(part.namespace, part.hash)) is None]
        return [f"{node.name} takes {len(lost)} pages for kept that are not"] if lost else []

    def settle(self, limit_s: float | None = None) -> float:
        """Let time pass until every master knows what every node holds; returns how long it took."""
        limit_s = self.options.settle_s if limit_s is None else limit_s
        began = self.world.now
        while found := self.differences():
            if self.world.now - began > limit_s:
                raise Violation(f"after {limit_s:g} s of peace: {'; '.join(found[:5])} ({len(found)} differences)")
            self.world.run_for(0.5)
        return self.world.now - began

    def leftovers(self) -> list[str]:
        """What is held although nobody is there any more."""
        found = []
        for node in self.nodes:
            store = node.store
            held = {
                "pins": len(store._pins),
                "pinned bytes": store.pinned_bytes,
                "reservations": len(store._reservations),
                "claims": len(store._claims),
                "connections": len(node.connections),
                "readers": len(node.readers),
                "transactions": len(node.core._writing),
                "waiting": len(node._waiting),
                "promises": len(store.promises),
            }
            left = {what: count for what, count in held.items() if count}
            if left:
                found.append(f"{node.name} keeps {left} for nobody")
        return found

    def check_idle(self) -> None:
        """Nobody is there any more: nothing is held for anybody."""
        if found := self.leftovers():
            raise Violation("; ".join(found))
        for node in self.nodes:
            node.core.validate()
            node.link.core.validate()
        for master in self.masters:
            master.core.validate()
            if len(master._senders) > 4 * len(self.nodes) * (1 + len(self.masters)):
                raise Violation(f"{master.address} has {len(master._senders)} connections of {len(self.nodes)} nodes")

    def check_lookups(self) -> None:
        """In peace every node finds and loads what any node holds."""
        for node in self.nodes:
            rank = next(rank for rank in self.ranks if rank.host == node.host)
            rank.revive()
            chains = [(pool, chain) for pool in self.pools for chain in range(self.workload.chains)]
            for pool, chain in self.world.rng.sample(chains, min(len(chains), MAX_CHECKED)):
                for _ in range(TRIES):  # what moves just now is seen in a moment
                    wrong = self._check_chain(node, rank, pool, chain)
                    if not wrong:
                        break
                    self.world.run_for(1.0)
                else:
                    raise Violation(wrong)
            rank.stop()
        self.world.run_for(1.0)

    def _check_chain(self, node: SimNode, rank: Rank, pool: Pool, chain: int) -> str:
        """What is wrong, or nothing."""
        hashes = rank.chain(chain)
        expected = 0
        while expected < len(hashes) and any(self.holds(other, pool, hashes[expected]) for other in self.nodes):
            expected += 1
        answers: list[p.Message | None] = []
        rank.ask(p.Exists([pool.namespace], b"".join(hashes)), answers.append)
        self._run_until(lambda: bool(answers))
        runs = [answer.runs for answer in answers if isinstance(answer, p.Found)]
        if runs != [[expected]]:
            return f"{node.name} finds {runs} of chain {chain}, of which {expected} pages are there"
        if not expected:
            return ""
        outcomes: list[Outcome | None] = []
        rank.load(pool, chain, expected, outcomes.append, shared=False)
        self._run_until(lambda: bool(outcomes))
        outcome = outcomes[0] if outcomes else None
        if outcome is None or outcome.ok.count(1) != expected:
            reasons: Counter[str] = outcome.reasons if outcome is not None else Counter()
            got = outcome.ok.hex() if outcome is not None else "nothing"
            return f"{node.name} loads {got} of {expected} pages that are there: {dict(reasons)}"
        return ""

    def _run_until(self, done: Callable[[], bool]) -> None:
        until = self.world.now + 2 * self.workload.deadline_s
        while not done() and self.world.now < until:
            self.world.run_for(0.02)

    def check_recalled(self) -> None:
        """A page that goes to another node between lookup and load is loaded from there: what was recalled was only a hint."""
        for pool, chain in [(pool, chain) for pool in self.pools for chain in range(self.workload.chains)]:
            without = [node for node in self.nodes if not self.holds(node, pool, page_hash(chain, 0))]
            if 1 < len(without) < len(self.nodes):
                self._check_recalled(pool, chain, *without[:2])
                return

    def _check_recalled(self, pool: Pool, chain: int, node: SimNode, taker: SimNode) -> None:
        reader, writer = (next(rank for rank in self.ranks if rank.host == host) for host in (node.host, taker.host))
        for rank in (reader, writer):
            rank.revive()
        first = reader.chain(chain)[0]
        answers: list[p.Message | None] = []
        reader.ask(p.Exists([pool.namespace], first), answers.append)
        outcomes: list[Outcome | None] = []
        writer.store(pool, chain, outcomes.append)
        self._run_until(lambda: bool(answers and outcomes))
        until, before = self.world.now + 1.0, node.core.recalled
        while self.world.now < until and (not self.holds(taker, pool, first) or self.differences()):
            self.world.run_for(0.05)
        if self.world.now < until:
            for other in self.nodes:
                if other is not taker:
                    other.store.discard(pool.namespace, first, "lost")
                    if other.cold is not None:
                        other.cold.lose(Key(pool.namespace, first))
                    other.link.notify()
            outcomes.clear()
            reader.load(pool, chain, 1, outcomes.append, shared=False)
            self._run_until(lambda: bool(outcomes))
            outcome = outcomes[0] if outcomes else None
            if node.core.recalled > before and (outcome is None or not outcome.ok[0]):
                raise Violation(f"{node.name} recalled a page, and did not find it where it is now: {outcome}")
        for rank in (reader, writer):
            rank.stop()
        self.world.run_for(1.0)

    def check_clear(self) -> None:
        """What was cleared everywhere is nowhere, also what was on its way from one node to another just then."""
        pool, rng = self.pools[0], self.world.rng
        for rank in self.ranks:
            rank.revive()
            rank.load(pool, rng.randrange(self.workload.chains), self.workload.pages, lambda outcome: None, shared=True)
        self.world.run_for(rng.uniform(0.0, 0.05))
        self.ranks[0].clear(pool)
        self.world.run_for(5.0)
        for rank in self.ranks:
            rank.stop()
        for node in self.nodes:
            if any(self.holds(node, pool, of) for of in self.hashes()):
                raise Violation(f"{node.name} still has pages of a namespace that was cleared")
        self.restart()
        for node in self.nodes:
            if any(self.holds(node, pool, of) for of in self.hashes()):
                raise Violation(f"{node.name} has pages of a namespace again that was cleared before its restart")

    def restart(self) -> None:
        """kill -9 of all nodes with a cold tier: what they had there they have."""
        for node in self.nodes:
            if node.cold is not None:
                node.crash()
                node.start()
        if self.cold:
            self.world.run_for(max(5.0, 2 * self.ttl_s))

    def figures(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for rank in self.ranks:
            total.update(vars(rank.counters))
            total.update({f"miss {reason}": count for reason, count in sorted(rank.reasons.items())})
        total["checked"] = self.ledger.checked
        for node in self.nodes:
            total.update(node.figures())
        return dict(total)


def run(seed: int, options: Options | None = None, trace: Callable[[str], None] | None = None) -> Result:
    """One run. Raises Violation, or whatever a state machine raised, when something that must hold did not."""
    options = options or Options()
    world = World(seed, trace)
    cluster = Cluster(world, options)
    if options.sabotage is not None:
        options.sabotage(cluster)
    began = world.now
    world.run_for(1.0)
    trouble_s = options.trouble_s if options.trouble_s is not None else world.rng.choice([5.0, 10.0, 20.0])
    kinds = KINDS | COLD_KINDS if cluster.cold else KINDS
    plan = options.plan or Plan(world.rng.choice([0.1, 0.3, 1.0, 3.0]), dict(kinds))
    faults = Faults(cluster, plan)
    world.run_for(trouble_s)
    world.note("peace")
    faults.stop()
    world.run_for(1.0)
    for rank in cluster.ranks:
        rank.stop()
    world.run_for(max(5.0, 2 * cluster.ttl_s))
    took = cluster.settle()
    world.note(f"settled after {took:.1f} s")
    until = world.now + LONGEST_SEND_S + max(node.options.pin_seconds for node in cluster.nodes)
    while world.now < until and cluster.leftovers():
        world.run_for(1.0)
    cluster.check_idle()
    cluster.check_lookups()
    if cluster.cold:
        cluster.restart()
        cluster.settle()
        cluster.check_lookups()
    cluster.check_recalled()
    cluster.check_clear()
    cluster.settle()
    return Result(seed, world.trace_hash, world.events, world.now - began, cluster.figures())
