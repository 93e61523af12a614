"""What goes wrong in a run: processes that crash, freeze and come back, networks that part, hosts without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster import Cluster
    from .cold import Disk

KINDS = {
    "crash_node": 3.0,
    "freeze_node": 3.0,
    "crash_master": 2.0,
    "freeze_master": 2.0,
    "drain_node": 1.5,
    "cut": 3.0,
    "isolate": 1.5,
    "slow": 2.0,
    "break_connection": 4.0,
    "no_room": 1.0,
    "freeze_mover": 3.0,
}
"""Kinds of faults and how often each comes, relative to the others."""
COLD_KINDS = {"hang_disk": 2.0, "fail_disk": 2.0, "fill_disk": 1.0, "damage_disk": 3.0}
"""Those of clusters with cold tiers."""


@dataclass
class Plan:
    """Which faults a run has, and how often one begins."""

    every_s: float = 1.0
    weights: dict[str, float] = field(default_factory=lambda: dict(KINDS))


class Faults:
    """Begins faults until `stop`, which ends all that are going on."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.plan = plan
        self.running = bool(plan.weights)
        self._next()

    def stop(self) -> None:
        """Everybody is back: what was cut is whole, who was frozen goes on, who was dead is started anew."""
        self.running = False
        cluster = self.cluster
        cluster.network.heal()
        cluster.network.loss = cluster.network.repeat = 0.0
        for node in cluster.nodes:
            node.refuse_room = False
            if node.disk is not None:
                node.disk.hanging = node.disk.failing = node.disk.full = False
            node.process.resume()
            if node.alive and node.core.draining:
                node.crash()
            if not node.alive:
                node.start()
        for master in cluster.masters:
            master.process.resume()
            if not master.alive:
                master.start()
        for rank in cluster.ranks:
            for mover in rank.movers.values():
                mover.process.resume()

    def _next(self) -> None:
        if self.running:
            self.world.after(self.world.rng.expovariate(1 / self.plan.every_s), self._begin)

    def _begin(self) -> None:
        if not self.running:
            return
        kinds = list(self.plan.weights)
        kind = self.world.rng.choices(kinds, [self.plan.weights[kind] for kind in kinds])[0]
        getattr(self, f"_{kind}")()
        self._next()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        def now() -> None:
            if self.running:
                what()

        self.world.after(seconds, now)

    def _crash_node(self) -> None:
        rng = self.world.rng
        node = rng.choice(self.cluster.nodes)
        if node.alive:
            node.crash()
            self._later(rng.choice([0.01, 0.3, 3.0, 15.0]), lambda: None if node.alive else node.start())

    def _drain_node(self) -> None:
        rng = self.world.rng
        node = rng.choice(self.cluster.nodes)
        pause = rng.choice([0.1, 2.0])
        process = node.process

        def told() -> None:
            if self.running and process is node.process:
                node.terminate(lambda: self._later(pause, lambda: None if node.alive else node.start()))

        if node.alive:
            process.call(told)

    def _freeze_node(self) -> None:
        node = self.world.rng.choice(self.cluster.nodes)
        process = node.process
        process.pause()
        self._later(self.world.rng.choice([0.02, 0.5, 3.0, 8.0, 20.0]), process.resume)

    def _crash_master(self) -> None:
        rng = self.world.rng
        master = rng.choice(self.cluster.masters)
        if master.alive:
            master.crash()
            self._later(rng.choice([0.01, 1.0, 5.0]), lambda: None if master.alive else master.start())

    def _freeze_master(self) -> None:
        process = self.world.rng.choice(self.cluster.masters).process
        process.pause()
        self._later(self.world.rng.choice([0.1, 1.0, 4.0, 12.0]), process.resume)

    def _cut(self) -> None:
        rng, network = self.world.rng, self.cluster.network
        a, b = rng.sample(self.cluster.hosts, 2)
        self.world.note(f"nothing gets from {a} to {b}")
        network.cut(a, b)
        if rng.random() < 0.6:
            network.cut(b, a)
        self._later(rng.choice([0.3, 2.0, 10.0]), network.heal)

    def _isolate(self) -> None:
        rng, network = self.world.rng, self.cluster.network
        alone = rng.choice(self.cluster.hosts)
        one_way = rng.random() < 0.3
        self.world.note(f"{alone} is cut off{' on its way out' if one_way else ''}")
        for other in self.cluster.hosts:
            if other != alone:
                network.cut(alone, other)
                if not one_way:
                    network.cut(other, alone)
        self._later(rng.choice([0.5, 3.0, 12.0]), network.heal)

    def _slow(self) -> None:
        rng, network = self.world.rng, self.cluster.network
        a, b = rng.sample(self.cluster.hosts, 2)
        factor = rng.choice([10.0, 100.0, 2000.0])
        self.world.note(f"{a} to {b} is {factor:g} times slower")
        network.slow(a, b, factor)
        self._later(rng.choice([1.0, 5.0]), network.heal)

    def _break_connection(self) -> None:
        self.cluster.network.break_one()

    def _no_room(self) -> None:
        node = self.world.rng.choice(self.cluster.nodes)
        node.refuse_room = True

        def over() -> None:
            node.refuse_room = False

        self._later(self.world.rng.uniform(0.1, 2.0), over)

    def _disk(self) -> Disk | None:
        node = self.world.rng.choice(self.cluster.nodes)
        return node.disk

    def _for_a_while(self, disk: Disk | None, what: str) -> None:
        if disk is not None:
            setattr(disk, what, True)
            self._later(self.world.rng.choice([0.1, 1.0, 5.0]), lambda: setattr(disk, what, False))

    def _hang_disk(self) -> None:
        self._for_a_while(self._disk(), "hanging")

    def _fail_disk(self) -> None:
        self._for_a_while(self._disk(), "failing")

    def _fill_disk(self) -> None:
        self._for_a_while(self._disk(), "full")

    def _damage_disk(self) -> None:
        disk = self._disk()
        if disk is not None and disk.bodies:
            disk.damage(self.world.rng.choice(list(disk.bodies)))

    def _freeze_mover(self) -> None:
        movers = [mover for rank in self.cluster.ranks for mover in rank.movers.values() if mover.process.alive]
        if movers:
            mover = self.world.rng.choice(movers)
            mover.frozen = True
            mover.process.pause()
            self._later(self.world.rng.choice([0.05, 1.0, 5.0]), mover.process.resume)
