"""Every model family that SGLang stores, on its own host pools: all parts of a page come back whole, on every rank, or none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from hicache_mooncake import protocol as p
from hicache_mooncake.backend import HiCacheMooncake
from tests.conftest import NodeProcess
from tests.sglang.families import FAMILIES, Family, FamilyPool, fill, holds, scramble, slots, usable_pages
from tests.sglang.matrix import Supports
from tests.sglang.pools import key, mha_pool, storage_config

COUNT, WINDOW = 4, 2
"""Pages of a chain, and pages of the window of a pool that needs only the end of it."""
LOGICAL = "no buffer of its own"
UNREACHABLE = {
    "unified_envelope": "SGLang attaches no backend but mori to it",
    "page_interleave": "SGLang attaches no backend to it",
    "hisparse_mha": "never registered with a storage backend",
    "hisparse_mla": "never registered with a storage backend",
    "hisparse_v4": "never registered with a storage backend",
    "eagle_mha_on_mla_dcp": "SGLang attaches no storage to it",
}
SHAPES: dict[str, list[dict[str, int]]] = {
    "TP 2": [{"tp_rank": rank, "tp_size": 2} for rank in range(2)],
    "PP 2": [{"pp_rank": rank, "pp_size": 2} for rank in range(2)],
    "CP 2": [{"attn_cp_rank": rank, "attn_cp_size": 2} for rank in range(2)],
}


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess(str(tmp_path_factory.mktemp("families") / "n.sock"), "512MiB").start()
    yield node
    node.stop()


class Rank:
    """One rank of an engine: its pools registered as SGLang registers them, and the calls as SGLang makes them."""

    def __init__(self, node: NodeProcess, family: Family, pools: Sequence[FamilyPool], **config: Any) -> None:
        extra = {"socket": node.socket, "interface_v1": 1}
        self.config = storage_config(extra_config=extra, **(dict(family.config) | config))
        self.pools = {pool.name: pool for pool in pools}
        self.anchor = pools[0]
        self.backend = HiCacheMooncake(self.config, self.anchor.pool)
        self.backend.register_mem_pool_host(self.anchor.pool)
        for pool in pools:
            self.backend.register_mem_host_pool_v2(pool.pool, pool.name)
        self.backend.on_host_pools_registered()

    @property
    def side(self) -> list[FamilyPool]:
        return [pool for pool in self.pools.values() if pool.name != self.anchor.name]

    @property
    def windows(self) -> bool:
        return any(pool.hit_policy == PoolHitPolicy.TRAILING_PAGES for pool in self.side)

    def index_pool(self, pool: FamilyPool) -> Any:
        while pool.indices_from is not None:
            pool = self.pools[pool.indices_from]
        return pool.pool

    def pages(self, pool: FamilyPool, first: int) -> list[int]:
        """COUNT of its pages, from its `first` usable one on."""
        return list(usable_pages(self.index_pool(pool)))[first : first + COUNT]

    def tag(self, pool: FamilyPool, name: str) -> str:
        """What is in this pool's page: the same on every rank where the ranks hold the same, else this rank's own."""
        shared = self.config.is_mla_model and pool.replicated_over_tp
        others = (self.config.pp_rank, self.config.attn_cp_rank, self.config.dcp_rank)
        return f"{pool.name} {name} {others} {'' if shared else self.config.tp_rank}"

    def writes(self, pool: FamilyPool) -> bool:
        """As SGLang's `should_backup` has it for a backend called mooncake."""
        return self.config.is_storage_writer or not pool.replicated_over_tp

    def transfer(self, pool: FamilyPool, names: Sequence[str], first: int) -> PoolTransfer:
        """The pages of this chain that the pool has: all, or those of the window at its end."""
        pages = list(zip(self.pages(pool, first), names, strict=True))
        if pool.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            pages = pages[-WINDOW:]
        indices = slots(self.index_pool(pool), [page for page, _ in pages])
        return PoolTransfer(
            PoolName(pool.name), host_indices=indices, keys=[name for _, name in pages], hit_policy=pool.hit_policy
        )

    def store(self, names: Sequence[str]) -> bool:
        for pool in self.pools.values():
            for page, name in zip(self.pages(pool, 0), names, strict=True):
                fill(pool.pool, page, self.tag(pool, name))
        mine = [pool for pool in self.side if self.writes(pool)]
        done = self.backend.batch_set_v2([self.transfer(pool, names, 0) for pool in mine]) if mine else {}
        verdicts = [ok for column in done.values() for ok in column]
        if self.writes(self.anchor):
            verdicts += self.backend.batch_set_v1(list(names), slots(self.anchor.pool, self.pages(self.anchor, 0)))
        return all(verdicts)

    def query(self, names: Sequence[str]) -> Any:
        if not self.side:
            return self.backend.batch_exists_v2(list(names))
        asked = [
            PoolTransfer(
                PoolName(pool.name),
                keys=["__placeholder__"] * WINDOW if pool.hit_policy == PoolHitPolicy.TRAILING_PAGES else None,
                hit_policy=pool.hit_policy,
            )
            for pool in self.side
        ]
        return self.backend.batch_exists_v2(list(names), asked)

    def load(self, names: Sequence[str], first: int = COUNT) -> dict[str, list[bool]]:
        """Scramble everything, load into other places, and hold every byte against what must be there."""
        for pool in self.pools.values():
            scramble(pool.pool)
        kv = self.backend.batch_get_v1(list(names), slots(self.anchor.pool, self.pages(self.anchor, first)))
        transfers = [self.transfer(pool, names, first) for pool in self.side]
        loaded: dict[str, list[bool]] = {self.anchor.name: kv}
        loaded |= {str(name): column for name, column in self.backend.batch_get_v2(transfers).items()}
        for pool in self.pools.values():
            column = loaded[pool.name]
            there = list(zip(self.pages(pool, first), names, strict=True))[-len(column) :]
            for (page, name), ok in zip(there, column, strict=True):
                if ok:
                    assert holds(pool.pool, page, self.tag(pool, name)), f"wrong bytes in {pool.name}"
        return loaded

    def lose(self, pool: FamilyPool) -> None:
        """What this rank stored of one pool is gone, and nothing else."""
        for body in self.backend._pools.view.pools[pool.name].bodies:
            answer, _ = self.backend.client._queries.ask(p.Clear(body.namespace, everywhere=False), 5.0)
            assert isinstance(answer, p.Cleared)
            assert answer.objects > 0

    def close(self) -> None:
        self.backend.close()


def buildable() -> Iterator[tuple[str, str]]:
    for family in FAMILIES.values():
        for layout in family.layouts:
            yield family.name, layout


def whole(rank: Rank, names: Sequence[str]) -> None:
    """Found, and every byte of every part comes back."""
    result = rank.query([*names, key("absent")])
    assert result.restorable_prefix_pages == ([COUNT] if rank.windows else list(range(1, COUNT + 1)))
    assert result.kv_hit_pages == COUNT
    assert {str(name) for name in result.extra_pool_hit_pages} >= ({pool.name for pool in rank.side})
    assert all(ok for column in rank.load(names).values() for ok in column)


@pytest.mark.parametrize(("name", "layout"), buildable())
def test_every_part_of_a_page_comes_back_or_the_pool_is_refused(
    shared_node: NodeProcess, supports: Supports, caplog: pytest.LogCaptureFixture, name: str, layout: str
) -> None:
    """P06 P09 P145 P146."""
    family = FAMILIES[name]
    rank = Rank(shared_node, family, family.build(layout))
    names = [key((name, layout, i)) for i in range(COUNT)]
    reasons = {pool: reason for (at, pool), reason in family.refused.items() if at == layout and reason != LOGICAL}
    if reasons:
        for pool, reason in reasons.items():
            assert re.search(rf"refused: pool {pool} .*{reason}", caplog.text)
        assert rank.query(names).restorable_prefix_pages == []
        assert rank.backend.batch_exists(names) == 0
        places = slots(rank.anchor.pool, rank.pages(rank.anchor, 0))
        assert rank.backend.batch_set_v1(names, places) == rank.backend.batch_get_v1(names, places) == [False] * COUNT
        transfers = [rank.transfer(pool, names, 0) for pool in rank.side]
        for column in (*rank.backend.batch_set_v2(transfers).values(), *rank.backend.batch_get_v2(transfers).values()):
            assert not any(column)
            assert column
        supports(family=name, layout=layout, shape="one rank", outcome=f"refused: {_plain(rank, reasons)}")
        rank.close()
        return
    assert rank.query(names).kv_hit_pages == 0
    assert rank.store(names)
    whole(rank, names)
    for pool in rank.pools.values():  # a part that is gone ends the page, whichever it is
        if pool.name in rank.backend._pools.view.logical:
            continue
        rank.lose(pool)
        assert rank.query(names).restorable_prefix_pages == [], f"a hit without {pool.name}"
        loaded = rank.load(names)
        assert not any(loaded[pool.name])
        assert rank.store(names)
    whole(rank, names)
    rank.close()
    outcome = f"refused: {UNREACHABLE[name]}" if name in UNREACHABLE else "works"
    supports(family=name, layout=layout, shape="one rank", outcome=outcome)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNREACHABLE])
def test_every_rank_finds_its_own_part(shared_node: NodeProcess, supports: Supports, name: str, shape: str) -> None:
    """P13 P57: one hash, and on each rank other bytes, or the same where ranks hold the same."""
    family = FAMILIES[name]
    layouts = [
        layout for layout in family.layouts if all(at != layout or r == LOGICAL for (at, _), r in family.refused.items())
    ]
    if not layouts or set(SHAPES[shape][0]) & set(family.config):
        pytest.skip("nothing of it can be stored" if not layouts else "the family has its own ranks")
    layout = layouts[-1]
    ranks = [Rank(shared_node, family, family.build(layout), **config) for config in SHAPES[shape]]
    names = [key((name, layout, shape, i)) for i in range(COUNT)]
    for rank in ranks:
        assert rank.query(names).kv_hit_pages == 0, "another rank's part is not this one's" if rank is not ranks[0] else ""
        assert rank.store(names)
        if (
            shape == "TP 2"
            and rank is ranks[0]
            and all(rank.config.is_mla_model and q.replicated_over_tp for q in rank.pools.values())
        ):
            break  # written once, read by all
    for rank in ranks:
        whole(rank, names)
        rank.close()
    supports(family=name, layout=layout, shape=shape)


@pytest.mark.parametrize("rank", range(2))
def test_ranks_of_decode_context_parallelism_have_their_own_shard(
    shared_node: NodeProcess, supports: Supports, rank: int
) -> None:
    family = FAMILIES["mla_dcp"]
    mine = Rank(shared_node, family, family.build("page_first", dcp_rank=rank), tp_rank=rank, dcp_rank=rank)
    names = [key(("dcp", i)) for i in range(COUNT)]
    assert mine.query(names).kv_hit_pages == 0
    assert mine.store(names)
    whole(mine, names)
    # The same shard on another group of ranks: written by the first, read by it.
    other = Rank(shared_node, family, family.build("page_first", dcp_rank=rank), tp_rank=2 + rank, tp_size=4, dcp_rank=rank)
    assert not other.config.is_storage_writer
    assert other.query(names).kv_hit_pages == COUNT
    mine.close()
    other.close()
    supports(family="mla_dcp", layout="page_first", shape="DCP 2")


def test_sixteen_ranks_write_one_hash(shared_node: NodeProcess) -> None:
    """P13: 4 TP x 2 CP x 2 PP."""
    family = FAMILIES["mha"]
    name = [key(("sixteen", i)) for i in range(COUNT)]
    shapes = [
        {"tp_rank": tp, "tp_size": 4, "attn_cp_rank": cp, "attn_cp_size": 2, "pp_rank": pp, "pp_size": 2}
        for tp in range(4)
        for cp in range(2)
        for pp in range(2)
    ]
    pools = family.build("page_first")
    for action in ("store", "load"):
        for shape in shapes:
            rank = Rank(shared_node, family, pools, **shape)
            if action == "store":
                assert rank.query(name).kv_hit_pages == 0
                assert rank.store(name)
            else:
                whole(rank, name)
            rank.close()


@pytest.mark.parametrize("name", ["mha", "dsa", "mamba", "deepseek_v4"])
def test_a_node_that_dies_between_lookup_and_load_leaves_misses(
    start_node: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P18: no exception, every verdict False, no byte of a page changed."""
    node = start_node(dram="64MiB")
    family = FAMILIES[name]
    rank = Rank(node, family, family.build("page_first"))
    names = [key((name, "dies", i)) for i in range(COUNT)]
    assert rank.store(names)
    assert rank.query(names).kv_hit_pages == COUNT
    node.kill()
    loaded = rank.load(names)
    logical = rank.backend._pools.view.logical
    assert not any(ok for pool, column in loaded.items() if pool not in logical for ok in column)
    for pool in rank.pools.values():
        if pool.name not in logical:
            there = zip(rank.pages(pool, COUNT), names, strict=True)
            assert not any(holds(pool.pool, page, rank.tag(pool, each)) for page, each in there)
    assert rank.query(names).restorable_prefix_pages == []
    assert rank.backend.batch_set_v2([rank.transfer(pool, names, 0) for pool in rank.side]) is not None
    rank.close()
    assert "Traceback" not in caplog.text


def test_layouts_of_one_family_do_not_share(shared_node: NodeProcess) -> None:
    """P145: page_first, page_first_direct and page_head pages are equal in size and differ in their bytes' order."""
    names = [key(("layouts", i)) for i in range(COUNT)]
    family = FAMILIES["mha"]
    ranks = {
        layout: Rank(shared_node, family, family.build(layout)) for layout in ("page_first", "page_first_direct", "page_head")
    }
    for layout, rank in ranks.items():
        assert rank.query(names).kv_hit_pages == 0, layout
        assert rank.store(names)
    for rank in ranks.values():
        rank.close()


def test_a_pool_joins_without_a_new_mover(shared_node: NodeProcess) -> None:
    """A model with ten pools must not start its movers ten times."""
    family = FAMILIES["mha"]
    rank = Rank(shared_node, family, family.build("page_first"))
    movers = rank.backend.client.mover_pids()
    late = mha_pool(layers=1)
    rank.backend.register_mem_host_pool_v2(late, PoolName.DRAFT)
    assert rank.backend.client.mover_pids() == movers
    names = [key(("late", i)) for i in range(2)]
    for page, name in enumerate(names):
        fill(late, page, name)
    transfer = PoolTransfer(PoolName.DRAFT, host_indices=slots(late, [0, 1]), keys=names)
    assert rank.backend.batch_set_v2([transfer]) == {PoolName.DRAFT: [True, True]}
    assert rank.store([key(("late kv", i)) for i in range(COUNT)])
    rank.close()


def _plain(rank: Rank, reasons: Mapping[str, str]) -> str:
    """The reason as the operator reads it, without the pool's name and class in front."""
    text = next(text for pool, text in rank.backend._pools.view.refused.items() if pool in reasons)
    return text.split("): ", 1)[1].replace("get_page_buffer_meta failed: ", "")
