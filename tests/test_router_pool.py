"""What the router sees of the pool: pages that are there with all their parts, by node and tier, as the masters tell it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hicache_master.conductor.prefixes import COLD, DEVICE, DRAM, Prefixes
from hicache_master.router.pool import Located, MasterTable, PoolView, merged, whole_pages
from hicache_master.router.prompts import Prompt

from hicache_mooncake import protocol as p
from hicache_mooncake.client.introduction import Introduction
from hicache_mooncake.security import ClusterKey
from hicache_mooncake.sharing import DECODE, OFFLOAD, PREFILL, SharingTable
from hicache_mooncake.testing.local import FakeRank, page_hash
from tests.conftest import START_S, NodeProcess, wait_until
from tests.etcd import etcd_server, needs_etcd
from tests.test_master_server import Running
from tests.test_sharing import engine

A, B = ("a", "61"), ("b", "62")
PEERS = [p.Peer("a", b"a", "h", 1), p.Peer("b", b"b", "h", 2), p.Peer("a", b"a", "h", 1)]
TIERS = bytes([p.DRAM, p.DRAM, p.COLD])
MODEL = "m"


# --------------------------------------------------------------------------- what pages are made of


def kinds_of(*engines: list[p.RankIdentity]) -> list[p.PageKind]:
    table = SharingTable()
    for number, ranks in enumerate(engines):
        table.put(f"node-{number}", ranks, 0.0)
    return table.page_kinds()


def test_a_page_is_made_of_what_all_ranks_have_of_it() -> None:
    ranks = engine("p", PREFILL, tp=2, sides=("swa",))
    (kind,) = kinds_of(ranks)
    assert set(kind.every) == {digest for rank in ranks for digest in rank.pools[0].namespaces}
    assert len(kind.every) == 2
    assert set(kind.last) == {digest for rank in ranks for digest in rank.pools[1].namespaces}
    assert kinds_of(ranks[:1]) == [], "a rank that has not told yet may have a part of its own"


def test_engines_that_store_alike_are_one_kind() -> None:
    told = kinds_of(
        engine("p", PREFILL), engine("q", PREFILL), engine("d", DECODE, writer=OFFLOAD), engine("o", "", page_size=16)
    )
    assert [(kind.engines, sorted(kind.roles)) for kind in told] == [(3, ["decode", "prefill"]), (1, [""])]


def test_kinds_follow_what_ranks_say() -> None:
    table = SharingTable()
    table.put("n", engine("p", PREFILL), 0.0)
    (before,) = table.page_kinds()
    table.put("n", engine("p", PREFILL, weight_version="2"), 1.0)
    (after,) = table.page_kinds()
    assert before.every != after.every
    table.drop("n", 2.0)
    assert table.page_kinds() == []


# --------------------------------------------------------------------------- from answers to pages


def kind(every: int, last: int = 0) -> p.PageKind:
    names = [bytes([number]) * 16 for number in range(every + last)]
    return p.PageKind(names[:every], names[every:], "plain", ["prefill"], MODEL, 1)


def answer(holder: list[int], others: list[int] | None = None) -> p.Answer:
    return p.Answer(bytes(holder), PEERS, bytes(others or []), TIERS)


def test_pages_are_where_all_their_parts_are() -> None:
    found = whole_pages(kind(2), [answer([1, 1, 1, 2]), answer([1, 2, 3], [2, 1, 0])])
    assert found == [Located(0, 2, {A: DRAM}), Located(2, 3, {A: COLD})]


def test_pages_that_lie_on_several_nodes_count_on_one_of_them() -> None:
    (run,) = whole_pages(kind(3), [answer([1]), answer([1]), answer([2])])
    assert run == Located(0, 1, {A: DRAM})
    (run,) = whole_pages(kind(2), [answer([3]), answer([2])])
    assert set(run.holders.values()) == {COLD}


def test_two_holders_are_both_told() -> None:
    assert whole_pages(kind(1), [answer([1, 2], [2, 1])]) == [Located(0, 2, {A: DRAM, B: DRAM})]
    assert whole_pages(kind(1), [answer([1], [3])]) == [Located(0, 1, {A: DRAM})], "the better tier of one node"


def test_a_prefix_ends_where_side_pools_have_something() -> None:
    def pages(*sides: list[int]) -> int:
        return sum(run.end - run.start for run in whole_pages(kind(1, len(sides)), [answer([1] * 4), *map(answer, sides)]))

    assert pages([0, 0, 0, 1]) == 4
    assert pages([0, 1, 1, 0]) == 3
    assert pages([0, 1, 1, 0], [0, 1, 0, 1]) == 2
    assert pages([0, 0, 0, 0]) == 0


def test_pages_are_there_if_they_are_of_any_kind() -> None:
    one = [Located(0, 2, {A: COLD}), Located(2, 3, {B: DRAM})]
    assert merged([one]) == one
    assert merged([one, [Located(0, 1, {A: DRAM}), Located(1, 4, {B: DRAM})], []]) == [
        Located(0, 1, {A: DRAM}),
        Located(1, 2, {A: COLD, B: DRAM}),
        Located(2, 4, {B: DRAM}),
    ]
    assert merged([[], []]) == []


def test_what_is_located_replaces_what_was_known_of_the_pool_and_nothing_else() -> None:
    prefixes = Prefixes()
    for name in ("engine", "a", "b"):
        prefixes.join(name, "1")
    prefixes.stored("engine", "1", [1, 2], DEVICE)
    prefixes.stored("a", "1", [1, 2, 3], DRAM)
    prefixes.located([1, 2], {"b": COLD, "stranger": DRAM})
    prefixes.located([3, 4], {})
    matches = prefixes.match([1, 2, 3], 0.0)
    assert matches.length(DEVICE, "engine") == 2
    assert (matches.length(DRAM, "a"), matches.length(COLD, "b"), matches.length(DRAM, "b")) == (0, 2, 0)
    assert len(prefixes) == 2, "pages of nobody are not kept"
    prefixes.validate()


def report(shard: int = 0, shards: int = 1, masters: list[str] | None = None) -> p.ClusterReport:
    return p.ClusterReport(b"m", 2, [], 0, shard, shards, masters=masters or [])


def test_masters_are_known_by_what_they_report() -> None:
    table = MasterTable(5.0)
    view = table.take(["x:1"], {"x:1": report(0, 2, ["x:1", "y:1", "z:1"])}, 10.0)
    assert (view.shards, [(m.master, m.shard) for m in view.masters]) == (2, [("x:1", 0), ("y:1", -1), ("z:1", -1)])
    view = table.take(["x:1"], {"x:1": report(0, 2, ["x:1", "y:1", "z:1"]), "y:1": report(1, 2), "z:1": report(0, 1)}, 11.0)
    assert [(m.master, m.shard, m.answers(11.0)) for m in view.masters] == [
        ("x:1", 0, True),
        ("y:1", 1, True),
        ("z:1", -1, True),
    ]
    view = table.take(["x:1", "y:1"], {"y:1": report(1, 2)}, 17.0)
    assert [(m.master, m.shard, m.answers(17.0)) for m in view.masters] == [("x:1", 0, False), ("y:1", 1, True)]
    assert MasterTable(5.0).take(["x:1"], {}, 0.0).shards == 0


# --------------------------------------------------------------------------- with masters and nodes


def prompt(*names: object) -> Prompt:
    hashes = b"".join(map(page_hash, names))
    keys = tuple(int.from_bytes(page_hash(name)[:8], "big", signed=True) for name in names)
    return Prompt(len(names) * 64, keys, hashes, False)


class World:
    """Masters, nodes that a rank each stores into, and engines that say what their pages are made of."""

    def __init__(self, start_node: Callable[..., NodeProcess]) -> None:
        self._start_node = start_node
        self._stack = ExitStack()
        self.masters: list[Running] = []
        self.nodes: dict[str, NodeProcess] = {}
        self.ranks: dict[str, FakeRank] = {}

    def master(self, **options: Any) -> str:
        self.masters.append(Running(**options))
        self._stack.callback(self.masters[-1].close)
        return self.masters[-1].server.address

    def node(self, name: str, *masters: str) -> None:
        self.nodes[name] = self._start_node(name, "64MiB", masters)
        self.ranks[name] = FakeRank(self.nodes[name].settings())
        self._stack.callback(self.ranks[name].close)

    def tell(self, name: str, ranks: list[p.RankIdentity]) -> None:
        for rank in ranks:
            settings = self.nodes[name].settings()
            introduction = Introduction(
                settings, "rank", lambda rank=rank: rank, lambda unshared: None, first_s=0.05, every_s=0.2
            )
            introduction.start()
            self._stack.callback(introduction.close)

    def store(self, name: str, namespace: bytes, *pages: object) -> None:
        outcome = self.ranks[name].store(namespace, [page_hash(page) for page in pages])
        assert all(outcome.ok)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def world(start_node: Callable[..., NodeProcess]) -> Iterator[World]:
    made = World(start_node)
    yield made
    made.close()


@asynccontextmanager
async def seeing(*masters: str, kinds: int = 1, **options: Any) -> Any:
    """A view that has heard of so many kinds of pages."""
    view = PoolView(masters, every_s=0.1, **options)
    await view.start()
    try:
        await until(lambda: len(view.kinds) == kinds)
        yield view
    finally:
        await view.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


PAGES = prompt(*range(6))


async def lengths(view: PoolView, prefixes: Prefixes, tier: int = DRAM) -> dict[str, int] | None:
    """None: nobody answered."""
    if not await view.refresh(PAGES, prefixes, 2.0):
        return None
    return prefixes.match(PAGES.keys, 0.0).lengths[tier]


async def until_seen(view: PoolView, prefixes: Prefixes, wanted: dict[str, int] | None) -> None:
    deadline = time.monotonic() + START_S
    while await lengths(view, prefixes) != wanted:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_pages_are_seen_where_all_ranks_have_stored_them(world: World) -> None:
    address = world.master()
    for name in ("a", "b"):
        world.node(name, address)
    ranks = engine("p", PREFILL, tp=2)
    world.tell("a", ranks)
    first, second = (rank.pools[0].namespaces[0] for rank in ranks)

    async def scenario() -> None:
        prefixes = Prefixes()
        async with seeing(address) as view:
            world.store("a", first, *range(6))
            await until_seen(view, prefixes, {})
            world.store("a", second, *range(4))
            world.store("b", first, *range(2))
            world.store("b", second, *range(2))
            await until_seen(view, prefixes, {"a": 4, "b": 2})
            world.nodes["b"].stop()
            await until_seen(view, prefixes, {"a": 4})
            assert view.problem == ""
            assert view.counts["pages"] > 0

    asyncio.run(scenario())


def test_a_silent_master_costs_the_deadline_and_changes_nothing_and_another_one_is_asked(world: World) -> None:
    addresses = [world.master(), world.master()]
    world.node("a", *addresses)
    ranks = engine("p", PREFILL)
    world.tell("a", ranks)
    world.store("a", ranks[0].pools[0].namespaces[0], *range(6))

    async def scenario() -> None:
        prefixes = Prefixes()
        async with seeing(*addresses) as view:
            await until_seen(view, prefixes, {"a": 6})
            world.masters.pop(0).close()
            for _ in range(20):
                assert await lengths(view, prefixes) == {"a": 6}, "the other one answers"
            world.masters.pop().close()
            assert await lengths(view, prefixes) is None
            assert prefixes.match(PAGES.keys, 0.0).lengths[DRAM] == {"a": 6}
            assert view.counts["unanswered"] > 0
            await until(lambda: "no master answers" in view.problem)

    asyncio.run(scenario())


def test_each_shard_is_asked_for_its_own(world: World) -> None:
    addresses = [world.master(shard=(number, 2)) for number in range(2)]
    world.node("a", *addresses)
    ranks = engine("p", PREFILL)
    world.tell("a", ranks)
    world.store("a", ranks[0].pools[0].namespaces[0], *range(6))

    async def scenario() -> None:
        prefixes = Prefixes()
        async with seeing(*addresses) as view:
            await until_seen(view, prefixes, {"a": 6})
            world.masters.pop().close()
            await until_seen(view, prefixes, None)
            assert view.counts["incomplete"] > 0
            assert prefixes.match(PAGES.keys, 0.0).lengths[DRAM] == {"a": 6}, "what is known stays"

    asyncio.run(scenario())


@needs_etcd
def test_masters_are_found_in_etcd_and_may_change_there(world: World, tmp_path: Path) -> None:
    with etcd_server(tmp_path) as etcd:
        first = world.master(etcd=etcd.address, cluster="prod")
        world.node("a", f"etcd://{etcd.address}/prod")
        ranks = engine("p", PREFILL)
        world.tell("a", ranks)
        world.store("a", ranks[0].pools[0].namespaces[0], *range(6))

        async def scenario() -> None:
            prefixes = Prefixes()
            async with seeing(f"etcd://{etcd.address}/prod") as view:
                await until_seen(view, prefixes, {"a": 6})
                second = await asyncio.to_thread(lambda: world.master(etcd=etcd.address, cluster="prod"))
                assert first != second
                await until(lambda: len(view.masters) == 2)
                await asyncio.to_thread(world.masters[0].close)
                await until(lambda: view.masters == [second])
                await until_seen(view, prefixes, {"a": 6})

        asyncio.run(scenario())


def test_only_members_see_the_pool(world: World) -> None:
    key = ClusterKey.generate()
    address = world.master(key=key)

    async def scenario() -> None:
        for offered, said in ((key, "no engine"), (None, "no master answers"), (ClusterKey.generate(), "no master answers")):
            view = PoolView([address], key=offered, every_s=0.1)
            await view.start()
            await until(lambda view=view, said=said: said in view.problem)
            assert not await view.refresh(PAGES, Prefixes(), 0.1)
            await view.close()

    asyncio.run(scenario())


def test_engines_of_another_model_or_chain_do_not_count(world: World) -> None:
    address = world.master()
    world.node("a", address)
    world.tell("a", engine("p", PREFILL, model="other") + engine("e", PREFILL, chain="bigrams") + engine("d", DECODE))

    async def scenario() -> None:
        async with seeing(address, kinds=1, model="other"), seeing(address, kinds=1, bigrams=True) as view:
            assert view.kinds[0].chain == "bigrams"
        view = PoolView([address], model="third", every_s=0.1)
        await view.start()
        await until(lambda: "'third'" in view.problem)
        await view.close()

    asyncio.run(scenario())


def test_the_loop_goes_on_while_a_master_does_not_answer(
    world: World, start_master: Callable[[], Any], start_node: Callable[..., NodeProcess]
) -> None:
    master = start_master()
    world.node("a", master.address)
    world.tell("a", engine("p", PREFILL))
    wait_until(lambda: world.ranks["a"].client.status() is not None, START_S)

    async def scenario() -> None:
        turns = 0
        async with seeing(master.address) as view:
            master.process.send_signal(signal.SIGSTOP)
            try:
                asking = [asyncio.create_task(view.refresh(PAGES, Prefixes(), 0.5)) for _ in range(100)]
                while not all(task.done() for task in asking):
                    turns += 1
                    await asyncio.sleep(0.001)
                assert not any(task.result() for task in asking)
                assert turns > 10
                assert view.counts["busy"] > 0, "no more than so many wait"
            finally:
                master.process.send_signal(signal.SIGCONT)

    asyncio.run(scenario())
