"""A node's link where it has a cold tier: one stream of updates of both, snapshots of both, and masters that know only one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hicache_master.core import MasterCore

from hicache_mooncake.node import link_sources
from hicache_mooncake.node.link_core import Keys
from hicache_mooncake.protocol import COLD, DRAM, HASH_BYTES, BeatReply, ClearNamespace, Snapshot, Update, shard_of
from tests.test_link_core import NS, Cold, Net, Node, OldMaster, joined, page_hash, sent

PAGES = range(100)


def known(net: Net, master: str, pages: range = PAGES) -> set[tuple[str, int, int]]:
    """(node, tier, page) as this master has it."""
    core = net.masters[master]
    assert isinstance(core, MasterCore)
    return {(*holder, number) for number in pages for holder in core.holders(NS, page_hash(number))}


def held(node: Node, cold: Cold, *, shard: int = 0, shards: int = 1) -> set[tuple[str, int, int]]:
    """The same as it is."""
    return {
        (node.name, tier, number)
        for tier, source in ((DRAM, node.source), (COLD, cold.source))
        for number in source.held
        if shard_of(page_hash(number), shards) == shard
    }


def old_master() -> OldMaster:
    return OldMaster(MasterCore(b"old", rng=random.Random(1)))


def test_the_masters_hear_of_both_tiers_in_one_stream() -> None:
    net, cold = Net(), Cold()
    core = net.master("m1")
    node = net.node("a", "m1", cold=cold)
    node.source.add(1, 2)
    cold.source.add(2, 3)
    net.until(lambda: known(net, "m1") == held(node, cold), 3)
    node.source.remove(2)
    cold.source.add(4)
    net.until(lambda: known(net, "m1") == held(node, cold), 3)
    cold.source.remove(2, 3)
    node.source.add(3)
    net.until(lambda: known(net, "m1") == {("a", DRAM, 1), ("a", DRAM, 3), ("a", COLD, 4)}, 3)
    assert core.stats.gaps == 0
    assert node.core.counters["snapshots"] == 1, "the one it was asked for when it joined"


def test_a_page_that_goes_down_is_told_to_be_there_before_it_is_told_to_have_left() -> None:
    net, cold = Net(), Cold()
    net.master("m1")
    node = net.node("a", "m1", cold=cold)
    node.source.add(1)
    net.until(lambda: known(net, "m1") == {("a", DRAM, 1)}, 3)
    net.sent.clear()
    cold.source.add(1)
    node.source.remove(1)
    net.until(lambda: known(net, "m1") == {("a", COLD, 1)}, 3)
    assert [(m.tier, bool(m.added)) for m in sent(net, Update)] == [(COLD, True), (DRAM, False)]  # type: ignore[attr-defined]


def test_a_snapshot_has_both_tiers_in_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_sources, "PART_KEYS", 5)
    net, cold = Net(), Cold()
    net.master("m1")
    node = net.node("a", "m1", cold=cold)
    node.source.add(*range(20))
    cold.source.add(*range(10, 40))
    net.until(lambda: known(net, "m1") == held(node, cold), 3)
    net.sent.clear()
    net.master("m1")
    net.until(lambda: known(net, "m1") == held(node, cold), 5)
    parts = [message for message in sent(net, Snapshot) if isinstance(message, Snapshot)]
    assert [(part.part, part.last) for part in parts] == [(i, i == len(parts) - 1) for i in range(len(parts))]
    tiers = [part.tier for part in parts]
    assert tiers == sorted(tiers)
    assert set(tiers) == {DRAM, COLD}


@pytest.mark.parametrize("tier", [DRAM, COLD])
def test_a_snapshot_of_one_tier_alone_is_whole(tier: int) -> None:
    net, cold = Net(), Cold()
    net.master("m1")
    node = net.node("a", "m1", cold=cold)
    (cold.source if tier == COLD else node.source).held[7] = None  # from before it joined
    net.until(lambda: known(net, "m1") == {("a", tier, 7)}, 3)


@pytest.mark.parametrize("tier", [DRAM, COLD])
def test_changes_that_either_tier_lost_cost_one_snapshot_of_all_for_every_master(tier: int) -> None:
    net, cold = Net(), Cold()
    net.master("m1")
    net.masters["old"] = old_master()
    node = net.node("a", "m1", "old", cold=cold)
    node.source.add(*range(10))
    cold.source.add(*range(20, 30))
    net.until(lambda: known(net, "m1") == held(node, cold) and len(net.knows("old", PAGES)) == 10, 5)
    lossy = cold.source if tier == COLD else node.source
    net.sent.clear()
    lossy.held[50] = None
    lossy.lost = True
    net.run(5)
    assert known(net, "m1") == held(node, cold)
    assert set(net.knows("old", PAGES)) == set(node.source.held)
    assert [master for _, master, m in net.sent if isinstance(m, Snapshot) and m.last] == ["m1", "old"]


def test_a_master_of_version_1_hears_nothing_of_the_cold_tier_and_sees_no_gap() -> None:
    net, cold = Net(), Cold()
    net.masters["old"] = old_master()
    node = net.node("a", "old", cold=cold)
    node.source.add(*range(10))
    cold.source.add(*range(20, 30))
    net.until(lambda: set(net.knows("old", PAGES)) == set(range(10)), 3)
    for number in range(30, 40):
        cold.source.add(number)
        node.source.add(number + 20)
        net.run(0.2)
    net.run(3)
    assert set(net.knows("old", PAGES)) == set(node.source.held)
    assert all(m.tier == DRAM for m in sent(net, Update) + sent(net, Snapshot))  # type: ignore[attr-defined]
    assert len([m for m in sent(net, Snapshot) if isinstance(m, Snapshot) and m.last]) == 1
    cold.source.lost = True
    net.run(3)
    assert len([m for m in sent(net, Snapshot) if isinstance(m, Snapshot) and m.last]) == 2, "once, and not for ever"


def test_changes_of_the_cold_tier_while_a_master_of_today_takes_the_node_in_are_not_lost() -> None:
    net, cold = Net(), Cold()
    core = net.master("m1")
    node = net.node("a", "m1", cold=cold)
    net.until(lambda: net.state("a", "m1") == "joining", 2)
    cold.source.add(5)
    node.core.notify()
    net.until(lambda: joined(net), 2)
    net.until(lambda: known(net, "m1") == {("a", COLD, 5)}, 3)
    assert core.stats.gaps == 0


def test_a_clear_of_a_large_cold_tier_costs_no_snapshot() -> None:
    """It forgets bit by bit, long after the masters have forgotten all of it."""
    net, cold = Net(), Cold()
    net.master("m1")
    node = net.node("a", "m1", cold=cold)
    cold.source.add(*range(10))
    net.until(lambda: known(net, "m1") == held(node, cold), 3)
    node.core.clear_namespace(NS)
    net.until(lambda: not known(net, "m1"), 3)
    for number in range(10):
        cold.source.remove(number)
        net.run(0.5)
    assert not known(net, "m1")
    assert node.core.counters["snapshots"] == 1


def test_what_a_cold_tier_took_after_a_clear_is_not_forgotten_when_that_is_told_again() -> None:
    net, cold = Net(), Cold()
    net.master("m1")
    node = net.node("a", "m1", cold=cold)
    net.until(lambda: joined(net), 3)
    net.loses = lambda name, message: isinstance(message, BeatReply)  # so it does not know whether the clear arrived
    node.core.clear_namespace(NS)
    net.run(0.5)
    cold.source.add(5)
    net.until(lambda: known(net, "m1") == {("a", COLD, 5)}, 3)
    net.loses = lambda name, message: False
    clears = len(sent(net, ClearNamespace))
    node.core.lost("m1", net.now, "closed the connection")
    net.until(lambda: joined(net) and len(sent(net, ClearNamespace)) > clears, 3)
    net.until(lambda: known(net, "m1") == {("a", COLD, 5)}, 3)


def test_a_cold_tier_that_fails_does_not_keep_the_dram_from_the_masters() -> None:
    net, cold = Net(), Cold()
    net.master("m1")
    node = net.node("a", "m1", cold=cold)
    net.until(lambda: joined(net), 2)
    net.run(1)
    drain = cold.source.drain_changes

    def fails(limit: int) -> tuple[Keys, Keys]:
        raise RuntimeError("a bug")

    cold.source.drain_changes = fails  # type: ignore[method-assign]
    node.source.add(1)
    cold.source.add(2)
    net.until(lambda: known(net, "m1") >= {("a", DRAM, 1)}, 3)
    cold.source.drain_changes = drain  # type: ignore[method-assign]
    net.until(lambda: known(net, "m1") == held(node, cold), 5)


def test_no_part_of_a_snapshot_is_read_for_long_however_few_keys_are_of_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts the node's heart beats."""
    monkeypatch.setattr(link_sources, "READ_KEYS", 10)
    read = 0

    def parts() -> Iterator[Keys]:
        nonlocal read
        for number in range(100):
            read += 1
            yield [(NS, page_hash(number))]

    cutting = link_sources.cut([(COLD, parts())], lambda keys: [])
    most = before = 0
    for part in cutting:
        assert sum(len(blob) for _, blob in part.keys) % HASH_BYTES == 0
        most, before = max(most, read - before), read
    assert read == 100
    assert most <= 20


@pytest.mark.parametrize("seed", range(4))
def test_after_any_trouble_every_master_knows_both_tiers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, repeats and reordering, changes that are lost, a restarted master; sharded for every other seed, and with a
    master of version 1 for the others."""
    monkeypatch.setattr(link_sources, "PART_KEYS", 3)
    net, rng = Net(seed), random.Random(seed)
    shards = 1 + seed % 2
    addresses = ["m0", "m1"]
    for number, address in enumerate(addresses):
        net.master(address, (number % shards, shards), forget_s=20.0)
    if shards == 1:
        net.masters["old"] = old_master()
    colds = {name: Cold() for name in "ab"}
    nodes = {name: net.node(name, *net.masters, cold=cold) for name, cold in colds.items()}
    net.bad = True
    for turn in range(40):
        for index, (name, node) in enumerate(nodes.items()):
            numbers = range(20 * index, 20 * index + 20)
            for source in (node.source, colds[name].source):
                source.add(*rng.sample(numbers, rng.randrange(5)))
                source.remove(*rng.sample(numbers, rng.randrange(5)))
                if rng.random() < 0.04:
                    source.lost = True
                    source.changes.clear()
            node.core.notify()
        if turn == 20:
            net.master("m0", (0, shards), forget_s=20.0)
        net.run(rng.random() * 0.5)
    net.bad = False

    def converged() -> bool:
        for number, address in enumerate(addresses):
            there = [held(nodes[name], colds[name], shard=number % shards, shards=shards) for name in nodes]
            if known(net, address, range(40)) != set().union(*there):
                return False
        in_dram = {number for node in nodes.values() for number in node.source.held}
        return shards > 1 or set(net.knows("old", range(40))) == in_dram

    net.until(converged, 40)
    assert all(node.core.counters["failures"] == 0 for node in nodes.values())
