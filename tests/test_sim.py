"""Whole clusters in the simulator: seeds that must hold, fresh ones, and what is broken on purpose must be seen."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest
from hicache_master.core import MasterCore

from hicache_mooncake import protocol as p
from hicache_mooncake.client.remote import Doubt
from hicache_mooncake.cold.index import Key
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.store import LogicalPage, Store
from hicache_mooncake.testing.sim import Cluster, Options, Plan, Violation, run
from hicache_mooncake.testing.sim.cold import SimCold
from hicache_mooncake.testing.sim.link import SimLink
from hicache_mooncake.testing.sim.mover import Mover, Outcome
from hicache_mooncake.testing.sim.rank import Call, Rank
from hicache_mooncake.testing.sim.reader import Sleep
from hicache_mooncake.testing.sim.world import Process, World
from tests.conftest import environment

FIXED = range(1, 41)
FRESH = 3


def quick(**changes: Any) -> Options:
    return Options(**{"trouble_s": 3.0, "validate_share": 0.03} | changes)


@pytest.mark.parametrize("seed", FIXED)
def test_a_cluster_in_trouble_keeps_its_promises(seed: int) -> None:
    run(seed, quick())


@pytest.mark.parametrize("number", range(FRESH))
def test_fresh_seeds(number: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"python -m hicache_mooncake.testing.sim --seed {seed} --trace --trouble-s 3")
    run(seed, quick(validate_share=0.1))


def test_a_seed_is_a_run_in_every_process() -> None:
    """Whatever the order that this process gives to its sets."""
    program = "from hicache_mooncake.testing.sim import Options, run; print(run(5, Options(trouble_s=2.0)).trace_hash)"
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=environment() | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert traces == {run(5, Options(trouble_s=2.0)).trace_hash + "\n"}
    assert traces != {run(6, Options(trouble_s=2.0)).trace_hash + "\n"}


def test_something_happens_in_these_runs() -> None:
    """Bytes are compared, pages are evicted and given away, calls are fenced: else the above says nothing."""
    figures = [run(seed, quick(trouble_s=8.0)).figures for seed in (2, 4, 6, 16, 41)]
    total = {name: sum(each.get(name, 0) for each in figures) for name in figures[0]}
    for what in ("checked", "loaded", "stored", "found", "evicted", "spilled", "taken", "replicated", "recalled", "snapshots"):
        assert total[what] > 0, (what, total)


# --------------------------------------------------------------------------- broken on purpose


def fails(options: Options, match: str, seeds: range = range(1, 16)) -> None:
    """Some seed finds it."""
    found = ""
    for seed in seeds:
        try:
            run(seed, options)
        except Violation as error:
            found = str(error)
            break
    assert match in found, found or f"{len(seeds)} seeds have not noticed"


TIGHT: dict[str, Any] = {"think_s": 0.02, "chains": 8, "pages": 4}


@pytest.mark.parametrize("checks", [False, True])
def test_a_mover_that_checks_no_checksum_is_found_out(checks: bool) -> None:
    """Its pin ends while it copies, and the memory is used again: the checksum alone keeps the foreign bytes out."""
    workload = {"chains": 12, "pages": 4, "deadline_s": 8.0, "check_checksums": checks}
    node = {"pin_seconds": 0.05, "spill": False}
    cluster = peaceful(2, masters=1, shards=1, nodes=2, ranks=2, capacity=18, node=node, workload=workload)
    (writer, reader), pool = cluster.ranks[:2], cluster.pools[0]
    writer.store(pool, 0, lambda outcome: None)
    cluster.world.run_for(1.0)
    reader.load(pool, 0, 4, lambda outcome: None, shared=False)
    reader.movers["load"].step_s = 0.5

    def goes_on() -> None:
        for chain in range(1, 12):
            writer.store(pool, chain, lambda outcome: None)
            cluster.world.run_for(0.2)
        cluster.world.run_for(8.0)

    if checks:
        goes_on()
        assert reader.reasons["checksum"] > 0
    else:
        with pytest.raises(Violation, match="wrong bytes"):
            goes_on()


def test_a_mover_that_takes_what_is_recalled_for_the_last_word_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def misses(self: Mover, job: Any, doubtful: dict[int, Doubt], outcome: Outcome, deadline: float) -> Any:
        outcome.reasons.update(doubt.why for doubt in doubtful.values())
        yield Sleep(0.0)

    monkeypatch.setattr(Mover, "_load_again", misses)
    fails(quick(nodes=3, trouble_s=1.0), "did not find it where it is now", range(2, 16))


COUNTING: dict[str, Any] = {"nodes": 2, "capacity": 24, "cold": False, "node": {"promise_share": 0.5}}


def test_what_is_promised_is_loaded() -> None:
    figures = run(3, quick(workload={"promise_s": 3.0} | TIGHT, **COUNTING)).figures
    assert figures["kept"] > 0, figures
    assert figures["evicted"] > 0, figures


def test_what_goes_although_it_was_promised_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use(page: LogicalPage) -> bool:
        return page.writers > 0 or any(part.pins for part in page.parts)

    monkeypatch.setattr(LogicalPage, "in_use", property(in_use))
    fails(quick(workload={"promise_s": 3.0} | TIGHT, **COUNTING), "promised")


def test_memory_that_is_given_back_before_its_reader_is_done_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = NodeCore.fetch

    def unpinned(self: NodeCore, owner: int, message: p.Fetch, now: float) -> Any:
        served = fetch(self, owner, message, now)
        self.store.release(owner, served.pin)
        return served

    monkeypatch.setattr(NodeCore, "fetch", unpinned)
    node = {"pin_seconds": 30.0, "step_s": 0.01}
    fails(quick(capacity=12, nodes=3, node=node, workload={"step_s": 0.002} | TIGHT), "damaged under their pins")


@pytest.mark.parametrize("broken", [True, False])
def test_pins_that_never_end_are_found_out(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """A mover is frozen in the middle of its copy, and its rank is patient."""
    if broken:
        monkeypatch.setattr(Store, "expire_pins", lambda self, now: 0)
    cluster = peaceful(3, masters=1, nodes=2, node={"pin_seconds": 0.2}, workload={"deadline_s": 10.0, "step_s": 0.01})
    store_all(cluster, 0)
    rank = cluster.ranks[0]
    rank.load(cluster.pools[0], 0, 4, lambda outcome: None, shared=False)
    cluster.world.run_for(0.02)
    assert cluster.nodes[0].store.pinned_bytes > 0
    mover = rank.movers["load"]
    mover.frozen = True
    mover.process.pause()
    if broken:
        with pytest.raises(Violation, match="past their end"):
            cluster.world.run_for(5.0)
    else:
        cluster.world.run_for(5.0)
        assert cluster.nodes[0].store.pinned_bytes == 0


def test_a_removal_that_is_lost_without_a_gap_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = SimLink.drain_changes

    def lossy(self: SimLink, limit: int) -> Any:
        added, removed = drain(self, limit)
        return added, removed[1:]

    monkeypatch.setattr(SimLink, "drain_changes", lossy)
    plan = Plan(1.0, {"break_connection": 1.0})
    fails(quick(plan=plan, settle_s=20.0, capacity=12, workload=TIGHT), "not on")


def test_an_owner_whose_end_is_not_noticed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeCore, "drop_owner", lambda self, owner: None)
    fails(quick(workload={"abort": 0.3} | TIGHT), "for nobody")


def test_a_call_that_returns_before_its_mover_has_ended_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def returns(self: Rank, call: Call) -> None:
        if not call.over:
            del self.movers[call.job.op]
            self._return(call)

    monkeypatch.setattr(Rank, "_abort", returns)
    fails(quick(workload={"abort": 0.5, "step_s": 0.005} | TIGHT), "after the call")


def test_pages_that_come_back_after_a_clear_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeCore, "clear", lambda self, namespace, now: self.store.clear(namespace))
    fails(quick(trouble_s=1.0, nodes=4), "that was cleared", range(1, 40))


def test_a_master_that_takes_a_new_life_for_the_old_one_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with the numbers of the old life, as if nothing had been lost."""
    handle = MasterCore.handle
    lives: dict[str, bytes] = {}
    numbers: dict[str, int] = {}
    offsets: dict[str, int] = {}

    def same(self: MasterCore, message: p.Message, sender: bytes, now: float) -> Any:
        if isinstance(message, p.Join | p.Beat | p.Update | p.Snapshot):
            node = message.node
            if isinstance(message, p.Join) and lives.setdefault(node, message.incarnation) != message.incarnation:
                offsets[node] = numbers[node] - message.seq
                lives[node] = message.incarnation
            numbers[node] = message.seq + offsets.get(node, 0)
            message = msgspec.structs.replace(message, incarnation=b"same", seq=numbers[node])
        return handle(self, message, sender, now)

    monkeypatch.setattr(MasterCore, "handle", same)
    cluster = peaceful(7, settled=False, masters=1, shards=1, nodes=2)
    store_all(cluster, 0)
    cluster.nodes[0].crash()
    cluster.nodes[0].start()
    cluster.world.run_for(5.0)
    assert any("not on [('n0', 0)]" in difference for difference in cluster.differences())
    monkeypatch.undo()
    cluster = peaceful(7, masters=1, shards=1, nodes=2)
    store_all(cluster, 0)
    cluster.nodes[0].crash()
    cluster.nodes[0].start()
    cluster.world.run_for(5.0)
    assert cluster.differences() == []


def with_disks(**changes: Any) -> Options:
    workload = {"chains": 20, "pages": 4, "think_s": 0.02}
    return quick(
        cold=True, capacity=12, node={"cold_pages": 16, "cold_after_loads": 2, "spill": False}, workload=workload, **changes
    )


def test_something_happens_on_the_disks() -> None:
    total: Counter[str] = Counter()
    for seed in (1, 2, 3):
        total.update(run(seed, with_disks()).figures)
    for what in ("cold written", "promoted", "loaded", "evicted"):
        assert total[what] > 0, (what, total)


def test_a_mover_that_does_not_check_what_the_disk_gives_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mover._read_cold

    def unchecked(self: Mover, *arguments: Any) -> Any:
        reason = yield from read(self, *arguments)
        return "" if reason == "checksum_cold" else reason

    monkeypatch.setattr(Mover, "_read_cold", unchecked)
    fails(with_disks(plan=Plan(0.05, {"damage_disk": 1.0})), "wrong bytes")


@pytest.mark.parametrize("broken", [False, True])
def test_a_page_that_left_the_disk_and_counts_as_kept_is_found_out(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    node = {"cold_pages": 40, "cold_after_loads": 0, "spill": False}
    cluster = peaceful(2, masters=1, shards=1, nodes=2, ranks=1, capacity=24, cold=True, node=node)
    if broken:
        monkeypatch.setattr(NodeCore, "gone_cold", lambda self, pages: None)
    holder, pool = cluster.nodes[0], cluster.pools[0]
    for chain, pools in itertools.product(range(4), cluster.pools):
        cluster.ranks[0].store(pools, chain, lambda outcome: None)
        cluster.world.run_for(1.0)
    for chain in range(4, 12):
        cluster.ranks[0].store(pool, chain, lambda outcome: None)
        cluster.world.run_for(1.0)
    kept = [page for page in holder.store.hottest(100) if holder.store.is_kept(page)]
    assert kept
    for part in (part for page in kept for part in page.parts):
        assert holder.cold is not None
        holder.cold.lose(Key(part.namespace, part.hash))
    if broken:
        with pytest.raises(Violation, match="for kept that are not"):
            cluster.settle(5.0)
    else:
        cluster.settle(5.0)


def test_what_the_disk_lost_and_no_master_hears_of_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = SimCold.drain_changes
    monkeypatch.setattr(SimCold, "drain_changes", lambda self, limit: (drain(self, limit)[0], []))
    fails(with_disks(settle_s=20.0), "is on")


def peaceful(seed: int, *, settled: bool = True, **changes: Any) -> Cluster:
    """A cluster in which nothing happens but what the test does; settled."""
    workload = {"chains": 4, "pages": 4, "abort": 0.0, "shared": 0.0} | changes.pop("workload", {})
    options = {"capacity": 200, "times": (0.5, 2.0, 10.0), "cold": False} | changes
    cluster = Cluster(World(seed), Options(workload=workload, **options))
    for rank in cluster.ranks:
        rank.revive()
    cluster.world.run_for(3.0)
    if settled:
        cluster.settle(30.0)
    return cluster


def store_all(cluster: Cluster, rank: int) -> None:
    """This rank stores every chain of every pool, whole, and the masters hear of it."""
    ok: list[bytes] = []
    for pool, chain in itertools.product(cluster.pools, range(cluster.workload.chains)):
        before = len(ok)
        cluster.ranks[rank].store(pool, chain, lambda outcome: ok.append(bytes(outcome.ok) if outcome else b""))
        while len(ok) == before:
            cluster.world.run_for(0.01)
    assert set(ok) == {b"\x01" * cluster.workload.pages}
    cluster.world.run_for(1.0)


def test_a_process_that_was_frozen_does_everything_that_waited_in_order() -> None:
    world = World(1)
    process = Process(world, "one")
    done: list[int] = []
    process.pause()
    for number in range(3):
        process.later(0.1 * number, done.append, number)
    world.run_for(1.0)
    assert done == []
    process.resume()
    process.call(done.append, 3)
    world.run_for(0.1)
    assert done == [0, 1, 2, 3]
    process.pause()
    process.call(done.append, 4)
    process.end()
    world.run_for(1.0)
    assert done == [0, 1, 2, 3]
