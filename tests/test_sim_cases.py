"""What users of such pools have reported, each as a course of events in a simulated cluster."""

from __future__ import annotations

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.testing.sim import Cluster, Options, Plan, run
from hicache_mooncake.testing.sim.mover import Outcome
from hicache_mooncake.testing.sim.pages import Pool
from hicache_mooncake.testing.sim.rank import Rank
from tests.test_sim import TIGHT, peaceful, quick, store_all


def found(cluster: Cluster, rank: Rank, pool: Pool, chain: int) -> tuple[int, str]:
    """How many leading pages of a chain a rank's node finds, and why not more."""
    answers: list[p.Message | None] = []
    rank.ask(p.Exists([pool.namespace], b"".join(rank.chain(chain))), answers.append)
    until = cluster.world.now + 3.0
    while not answers and cluster.world.now < until:
        cluster.world.run_for(0.005)
    (answer,) = answers
    assert isinstance(answer, p.Found)
    return answer.runs[0], answer.reason


def load(cluster: Cluster, rank: Rank, pool: Pool, chain: int, *, shared: bool = False) -> Outcome:
    """Every page that comes as loaded has been compared with what was stored."""
    outcomes: list[Outcome | None] = []
    rank.load(pool, chain, cluster.workload.pages, outcomes.append, shared=shared)
    while not outcomes:
        cluster.world.run_for(0.005)
    assert outcomes[0] is not None
    return outcomes[0]


def other(cluster: Cluster, node: int = 1) -> Rank:
    return next(rank for rank in cluster.ranks if rank.host == cluster.nodes[node].host)


def whole(cluster: Cluster) -> bytes:
    return b"\x01" * cluster.workload.pages


# --------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("path", ["local", "remote", "through the segment"])
def test_a_read_that_outlives_its_pin_gives_a_miss_and_no_foreign_byte(path: str) -> None:
    """P14: pins of 50 ms, a transfer of seconds, and a pool so full that each block is used again meanwhile. The clocks of the
    hosts have nothing in common."""
    slow_node = {"pin_seconds": 0.05, "step_s": 0.001 if path == "local" else 0.7, "spill": False, "replicate_after": 0}
    workload = {"chains": 12, "pages": 4, "deadline_s": 8.0}
    cluster = peaceful(2, masters=1, shards=1, nodes=2, ranks=2, capacity=18, node=slow_node, workload=workload)
    writer, pool = cluster.ranks[0], cluster.pools[0]
    writer.store(pool, 0, lambda outcome: None)
    cluster.world.run_for(1.0)
    outcomes: list[Outcome | None] = []
    reader = cluster.ranks[1] if path == "local" else other(cluster)
    reader.load(pool, 0, 4, outcomes.append, shared=path == "through the segment")
    if path == "local":
        reader.movers["load"].step_s = 0.5
    for chain in range(1, 12):
        writer.store(pool, chain, lambda outcome: None)
        cluster.world.run_for(0.2)
    cluster.world.run_for(8.0)
    assert cluster.nodes[0].store.stats.expired_pins > 0
    assert outcomes[0] is not None
    assert outcomes[0].reasons["checksum" if path == "local" else "checksum_remote"] > 0
    # That the pages which did come are right is what the simulator looks at. What is stored anew is read again.
    writer.store(pool, 0, lambda outcome: None)
    cluster.world.run_for(1.0)
    assert bytes(load(cluster, writer, pool, 0).ok) == whole(cluster)


@pytest.mark.parametrize("moment_s", [0.0, 0.002, 0.01, 0.03, 0.06])
def test_a_page_that_is_cleared_while_it_is_fetched_does_not_come_back(moment_s: float) -> None:
    """P17: neither what lay here as a copy, nor what was on its way here just then."""
    cluster = peaceful(11, masters=1, shards=1, nodes=2, node={"step_s": 0.01}, workload={"step_s": 0.005})
    pool, (a, b) = cluster.pools[0], (cluster.ranks[0], other(cluster))
    store_all(cluster, 0)
    assert bytes(load(cluster, b, pool, 0, shared=True).ok) == whole(cluster), "a copy stays with the reader's node"
    assert cluster.holds(cluster.nodes[1], pool, b.chain(0)[0])
    outcomes: list[Outcome | None] = []
    b.load(pool, 1, cluster.workload.pages, outcomes.append, shared=True)
    cluster.world.run_for(moment_s)
    a.clear(pool)
    cluster.world.run_for(3.0)
    assert outcomes
    for chain in (0, 1):
        assert found(cluster, a, pool, chain)[0] == 0
        assert found(cluster, b, pool, chain)[0] == 0
        assert not any(load(cluster, b, pool, chain).ok)
    assert not any(cluster.holds(node, pool, of) for node in cluster.nodes for of in cluster.hashes())


def test_pages_that_move_away_between_lookup_and_read_are_read_or_missed() -> None:
    """P23: a full node gives its coldest pages away while others are on their way to read just these."""
    workload = {"chains": 40, "pages": 4}
    cluster = peaceful(16, masters=1, shards=1, nodes=3, ranks=1, capacity=60, node={"step_s": 0.005}, workload=workload)
    cluster.world.run_for(60.0)  # newcomers are given little
    pool, writer, readers = cluster.pools[0], cluster.ranks[0], cluster.ranks[1:]
    cluster.network.slow(readers[0].host, writer.host, 100.0)
    for chain in range(40):
        writer.store(pool, chain, lambda outcome: None)
        for reader in readers:
            reader.load(pool, max(0, chain - 12), 4, lambda outcome: None, shared=False)
        cluster.world.run_for(0.5)
    figures = cluster.figures()
    assert figures["spilled"] > 0
    assert figures["taken"] > 0
    assert figures["loaded"] > 0
    cluster.network.heal()
    cluster.settle(10.0)
    whole_chains = sum(found(cluster, readers[0], pool, chain)[0] == 4 for chain in range(40))
    assert whole_chains > 60 // 4, "more than one node could hold"


@pytest.mark.parametrize("how", ["cleared", "frozen", "killed"])
def test_pages_that_are_elsewhere_since_their_lookup_are_loaded_from_there(how: str) -> None:
    """The load recalls what the lookup learned, and asks the masters after all for what does not come."""
    cluster = peaceful(17, masters=1, shards=1, nodes=3, ranks=1, node={"replicate_after": 0, "spill": False})
    pool, first = cluster.pools[0], cluster.nodes[0]
    store_all(cluster, 0)
    reader = other(cluster)
    assert found(cluster, reader, pool, 0)[0] == cluster.workload.pages
    other(cluster, 2).store(pool, 0, lambda outcome: None)
    cluster.world.run_for(0.5)
    if how == "cleared":
        first.core.clear(pool.namespace, first.process.now)
    elif how == "frozen":
        first.process.pause()
    else:
        first.crash()
    assert bytes(load(cluster, reader, pool, 0).ok) == whole(cluster)
    assert cluster.nodes[1].core.recalled == 1


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_writer_that_dies_leaves_its_page_to_the_next(how: str) -> None:
    """P132: the key can be written again at once, and what the dead one still had in hand lands nowhere."""
    cluster = peaceful(5, masters=1, shards=1, nodes=2, ranks=2, workload={"step_s": 0.02})
    first, second = cluster.ranks[:2]
    pool = cluster.pools[0]
    first.store(pool, 0, lambda outcome: None)
    cluster.world.run_for(0.05)
    node = cluster.nodes[0]
    assert node.store.used_bytes > 0
    assert node.store.objects == 0, "reserved, and nothing of it visible"
    mover = first.movers["store"]
    if how == "killed":
        first.stop()
        cluster.world.run_for(0.01)
        assert node.store.used_bytes == 0, "its room is back"
    else:
        mover.frozen = True
        mover.process.pause()
    outcomes: list[Outcome | None] = []
    second.store(pool, 0, outcomes.append)
    cluster.world.run_for(1.0)
    assert outcomes[0] is not None
    assert bytes(outcomes[0].ok) == whole(cluster)
    assert bytes(load(cluster, second, pool, 0).ok) == whole(cluster)
    if how == "frozen":
        cluster.world.run_for(2.0)
        assert not mover.process.alive, "fenced by its rank"
        mover.process.resume()
        cluster.world.run_for(1.0)
    assert bytes(load(cluster, second, pool, 0).ok) == whole(cluster)
    first.stop()
    second.stop()
    cluster.world.run_for(1.0)
    cluster.check_idle()


# --------------------------------------------------------------------------- masters


def test_a_master_that_restarts_empty_knows_everything_again() -> None:
    """P118: nodes join again with their addresses within a heartbeat or two, and other nodes can read from them."""
    cluster = peaceful(3, masters=1, shards=1, nodes=3)
    store_all(cluster, 0)
    cluster.masters[0].crash()
    cluster.masters[0].start()
    cluster.world.run_for(2 * cluster.heartbeat_s)
    member = cluster.masters[0].core.membership.get("n0")
    assert member is not None
    assert member.address == (cluster.nodes[0].address, cluster.nodes[0].port)
    cluster.settle(5.0)
    assert bytes(load(cluster, other(cluster), cluster.pools[0], 0).ok) == whole(cluster)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_master_that_is_killed_costs_no_hit_where_there_is_another(shards: int) -> None:
    """P121: every lookup right after it is answered in full by the other one, in under a second; the new one is whole again
    within seconds, from what the nodes hold."""
    cluster = peaceful(4, masters=2, shards=shards, nodes=3, workload={"chains": 6})
    store_all(cluster, 0)
    reader = other(cluster)
    for shard in range(shards):
        cluster.masters[2 * shard].crash()
    for chain in range(6):
        began = cluster.world.now
        assert found(cluster, reader, cluster.pools[0], chain) == (cluster.workload.pages, "")
        assert cluster.world.now - began < 1.0
    for shard in range(shards):
        cluster.masters[2 * shard].start()
    assert cluster.settle(10.0) < 5.0


def test_the_only_master_that_is_killed_costs_what_is_elsewhere_and_for_seconds() -> None:
    cluster = peaceful(4, masters=1, shards=1, nodes=2)
    store_all(cluster, 0)
    reader, pool = other(cluster), cluster.pools[0]
    cluster.masters[0].crash()
    count, reason = found(cluster, reader, pool, 0)
    assert (count, reason) == (0, "master_down")
    outcome = load(cluster, reader, pool, 0)
    assert not any(outcome.ok)
    assert outcome.reasons == {"master_down": cluster.workload.pages}
    assert bytes(load(cluster, cluster.ranks[0], pool, 0).ok) == whole(cluster), "what is here needs no master"
    cluster.masters[0].start()
    assert cluster.settle(10.0) < 5.0
    assert found(cluster, reader, pool, 0)[0] == cluster.workload.pages


def test_a_master_that_has_heard_half_says_so_and_gives_nothing_that_is_not_there() -> None:
    """P122: one node's snapshot has come, the other's cannot get through."""
    cluster = peaceful(6, masters=1, shards=1, nodes=3)
    pool = cluster.pools[0]
    store_all(cluster, 0)
    lost = cluster.nodes[0]
    master = cluster.masters[0]
    master.crash()
    cluster.network.cut(lost.host, master.host)
    master.start()
    reader = other(cluster)
    cluster.world.run_for(1.0)
    assert master.core.warming
    assert found(cluster, reader, pool, 0) == (0, "master_warming")
    assert load(cluster, reader, pool, 0).reasons == {"master_warming": cluster.workload.pages}
    cluster.network.heal()
    cluster.settle(20.0)
    assert found(cluster, reader, pool, 0) == (cluster.workload.pages, "")
    assert bytes(load(cluster, reader, pool, 0).ok) == whole(cluster)


@pytest.mark.parametrize("seed", range(4))
def test_updates_that_are_lost_and_repeated_are_noticed_by_their_numbers(seed: int) -> None:
    """P155: a hundredth of them each; afterwards every master knows exactly what the nodes hold."""
    bad = {"loss": 0.02, "repeat": 0.02}
    figures = run(seed, quick(network=bad, plan=Plan(1.0, {}), nodes=3, ranks=1, capacity=12, workload=TIGHT)).figures
    assert figures["evicted"] > 0
    assert figures["snapshots"] > 0


# --------------------------------------------------------------------------- nodes


@pytest.mark.parametrize("pause_s", [5.0, 15.0, 40.0])
def test_a_node_that_stood_still_comes_back_with_everything(pause_s: float) -> None:
    """P123: for longer than the time to live, and for longer than until it is forgotten: the same life, nothing lost."""
    cluster = peaceful(8, masters=1, shards=1, nodes=3, times=(1.0, 10.0, 30.0))
    store_all(cluster, 0)
    node, reader, pool = cluster.nodes[0], other(cluster), cluster.pools[0]
    held = node.store.objects
    life = node.incarnation
    node.process.pause()
    cluster.world.run_for(pause_s)
    member = cluster.masters[0].core.membership.get("n0")
    if pause_s > 10.0:
        assert member is None or member.state == "suspected"
        assert found(cluster, reader, pool, 0)[0] == 0, "nobody is sent to it"
    else:
        assert member is not None
        assert member.state == "active"
    node.process.resume()
    cluster.settle(20.0)
    assert (node.store.objects, node.incarnation) == (held, life)
    assert found(cluster, reader, pool, 0)[0] == cluster.workload.pages
    assert bytes(load(cluster, reader, pool, 0).ok) == whole(cluster)


def test_a_node_that_dies_takes_the_chains_of_its_own_engines_and_no_others() -> None:
    """P51: pages stay where they were written, so one of eight nodes costs an eighth of the prefixes, not a hole in each."""
    workload = {"chains": 24, "pages": 8}
    cluster = peaceful(9, masters=1, shards=1, nodes=8, ranks=1, capacity=300, workload=workload)
    pool = cluster.pools[0]
    for chain in range(24):
        outcomes: list[Outcome | None] = []
        cluster.ranks[chain % 8].store(pool, chain, outcomes.append)
        while not outcomes:
            cluster.world.run_for(0.01)
    cluster.world.run_for(1.0)
    cluster.nodes[3].crash()
    cluster.world.run_for(cluster.ttl_s + 1.0)
    reader = cluster.ranks[0]
    usable = [found(cluster, reader, pool, chain)[0] for chain in range(24)]
    assert sum(usable) >= 24 * 8 * 7 // 8
    assert [chain for chain, count in enumerate(usable) if count < 8] == [3, 11, 19]


def test_a_node_that_ends_hands_its_hot_pages_over() -> None:
    cluster = peaceful(10, masters=1, shards=1, nodes=3, node={"drain_s": 5.0})
    pool = cluster.pools[0]
    store_all(cluster, 0)
    cluster.world.run_for(2.0)
    node = cluster.nodes[0]
    gone: list[float] = []
    began = cluster.world.now
    node.terminate(lambda: gone.append(cluster.world.now))
    cluster.world.run_for(0.01)
    assert bytes(load(cluster, cluster.ranks[0], pool, 0).ok) == whole(cluster), "reads are served to the end"
    while not gone:
        cluster.world.run_for(0.1)
    assert gone[0] - began < 5.0 + 2.0
    assert node.figures()["handed_over"] > 0
    cluster.world.run_for(2.0)
    reader = other(cluster)
    counts = [found(cluster, reader, pool, chain)[0] for chain in range(cluster.workload.chains)]
    assert sum(counts) > 0
    for chain, count in enumerate(counts):
        assert bytes(load(cluster, reader, pool, chain).ok).count(1) >= count


def test_a_node_that_cannot_be_read_from_leaves_the_rotation_and_comes_back() -> None:
    """Its heartbeats arrive all the while."""
    cluster = peaceful(12, masters=1, shards=1, nodes=4, ranks=1, node={"replicate_after": 0})
    pool = cluster.pools[0]
    store_all(cluster, 0)
    sick = cluster.nodes[0]
    for node in cluster.nodes[1:]:
        cluster.network.cut(node.host, sick.host)
    states = []
    for _ in range(30):
        for reader in cluster.ranks[1:]:
            reader.load(pool, 0, cluster.workload.pages, lambda outcome: None, shared=False)
        cluster.world.run_for(0.5)
        member = cluster.masters[0].core.membership.get("n0")
        assert member is not None
        states.append(member.state)
    assert "sick" in states
    assert "suspected" not in states
    cluster.network.heal()
    cluster.settle(150.0)
    assert bytes(load(cluster, cluster.ranks[1], pool, 0).ok) == whole(cluster)


def test_a_page_that_is_fetched_again_and_again_gets_a_copy_here() -> None:
    cluster = peaceful(13, masters=1, shards=1, nodes=2)
    pool, reader = cluster.pools[0], other(cluster)
    store_all(cluster, 0)
    for _ in range(3):
        assert bytes(load(cluster, reader, pool, 0).ok) == whole(cluster)
    assert all(cluster.holds(cluster.nodes[1], pool, of) for of in reader.chain(0))
    cluster.nodes[0].crash()
    assert bytes(load(cluster, reader, pool, 0).ok) == whole(cluster)


def test_a_cluster_of_many_shards_finds_what_each_has() -> None:
    cluster = peaceful(14, masters=1, shards=4, nodes=3)
    store_all(cluster, 0)
    reader = other(cluster)
    for pool in cluster.pools:
        for chain in range(cluster.workload.chains):
            assert found(cluster, reader, pool, chain) == (cluster.workload.pages, "")
    cluster.masters[2].crash()
    count, reason = found(cluster, reader, cluster.pools[0], 0)
    first = next(i for i, of in enumerate([*reader.chain(0), b""]) if not of or p.shard_of(of, 4) == 2)
    assert count == first
    assert reason == ("master_down" if first < cluster.workload.pages else "")
    assert bytes(load(cluster, reader, cluster.pools[0], 0).ok) == bytes(p.shard_of(of, 4) != 2 for of in reader.chain(0))


def test_a_master_with_another_number_of_shards_is_not_used() -> None:
    cluster = peaceful(15, masters=3, shards=1, nodes=3)
    store_all(cluster, 0)
    odd = cluster.masters[2]
    odd.crash()
    odd.options = odd.options | {"shard": (0, 2)}
    odd.start()
    cluster.world.run_for(5.0)
    states = {view.master: view.shard for node in cluster.nodes for view in node.link.core.view().masters}
    assert states == {cluster.masters[0].address: 0, cluster.masters[1].address: 0, odd.address: -1}
    reader = other(cluster)
    for chain in range(cluster.workload.chains):
        assert found(cluster, reader, cluster.pools[0], chain) == (cluster.workload.pages, "")
    odd.crash()
    odd.options = odd.options | {"shard": (0, 1)}
    odd.start()
    cluster.settle(20.0)


def test_options_that_are_set_are_not_drawn() -> None:
    cluster = peaceful(1, masters=2, shards=3, nodes=4, ranks=1)
    assert (len(cluster.masters), cluster.shards, len(cluster.nodes), len(cluster.ranks)) == (6, 3, 4, 4)
    assert Options().nodes is None
