"""Models with more than one host pool: one logical page in several parts, all or nothing (the v2 calls)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from hicache_mooncake import protocol as p
from hicache_mooncake.backend import HiCacheMooncake
from tests.conftest import NodeProcess, wait_until
from tests.sglang.conftest import MakeBackend
from tests.sglang.pools import PAGE_SIZE, fill, holds, indices, key, mha_pool, mla_pool, scramble, storage_config
from tests.test_pool_local import Admin

ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
INDEXER, SWA = PoolName.INDEXER, PoolName.SWA
WINDOW = 2


class Model:
    """KV with an index for every page and a window of two pages, as one rank of an engine has them."""

    def __init__(self, make: MakeBackend, **config: Any) -> None:
        self.kv, self.index, self.window = mha_pool(), mla_pool(), mha_pool(layers=2)
        self.backend = make(self.kv, **config)
        self.backend.register_mem_host_pool_v2(self.index, INDEXER)
        self.backend.register_mem_host_pool_v2(self.window, SWA)
        self.backend.on_host_pools_registered()

    def store(self, names: list[str], window_at: list[int], generation: int = 0) -> dict[Any, list[bool]]:
        """As SGLang does: the side pools of the node first, then its KV. `window_at`: positions that have a window page."""
        for page, name in enumerate(names):
            fill(self.kv, page, name, generation)
            fill(self.index, page, "index" + name, generation)
            fill(self.window, page, "window" + name, generation)
        side = self.backend.batch_set_v2(
            [
                PoolTransfer(INDEXER, host_indices=indices(*range(len(names))), keys=names, hit_policy=ALL),
                PoolTransfer(SWA, host_indices=indices(*window_at), keys=[names[i] for i in window_at], hit_policy=TRAILING),
            ]
        )
        return {**side, PoolName.KV: self.backend.batch_set_v1(names, indices(*range(len(names))))}

    def query(self, names: list[str]) -> Any:
        placeholders = ["__placeholder__"] * WINDOW
        return self.backend.batch_exists_v2(
            names, [PoolTransfer(INDEXER, hit_policy=ALL), PoolTransfer(SWA, keys=placeholders, hit_policy=TRAILING)]
        )

    def load(self, names: list[str], at: int = 10) -> int:
        """As SGLang does. Returns how many pages are usable, after every byte of them has been compared."""
        hits = self.query(names).kv_hit_pages
        for pool in (self.kv, self.index, self.window):
            scramble(pool)
        slots = indices(*range(at, at + hits)) if hits else torch.empty(0, dtype=torch.int64)
        kv = self.backend.batch_get_v1(names[:hits], slots)
        index = self.backend.batch_get_v2([PoolTransfer(INDEXER, host_indices=slots, keys=names[:hits])])[INDEXER]
        usable = [*(a and b for a, b in zip(kv, index, strict=True)), False].index(False)
        if usable < hits:
            return 0  # a shorter prefix has another window, which was not asked for
        if hits:
            last = range(max(0, hits - WINDOW), hits)
            transfer = PoolTransfer(SWA, host_indices=indices(*(at + i for i in last)), keys=[names[i] for i in last])
            if not all(self.backend.batch_get_v2([transfer])[SWA]):
                return 0
            assert all(holds(self.window, at + i, "window" + names[i]) for i in last)
        for i in range(usable):
            assert holds(self.kv, at + i, names[i])
            assert holds(self.index, at + i, "index" + names[i])
        return usable

    def namespace(self, name: str) -> bytes:
        return self.backend._pools.view.pools[name].bodies[0].namespace


@pytest.fixture
def admin(node: NodeProcess) -> Iterator[Admin]:
    admin = Admin(node)
    yield admin
    admin.close()


def test_all_parts_come_back(make_backend: MakeBackend) -> None:
    writer, reader = Model(make_backend), Model(make_backend)
    names = [key(("whole", i)) for i in range(5)]
    stored = writer.store(names, [3, 4])
    assert stored == {INDEXER: [True] * 5, SWA: [True] * 2, PoolName.KV: [True] * 5}
    result = reader.query([*names, key("absent")])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (5, [5])
    assert result.extra_pool_hit_pages == {PoolName.KV: 5, INDEXER: 5, SWA: 5}
    assert reader.load(names) == 5


def test_a_lookup_without_side_pools_promises_no_more_than_they_can_restore(make_backend: MakeBackend) -> None:
    """P33: a decode node asks so on its scheduler, and fails the request when a promised page does not come."""
    writer, reader = Model(make_backend), Model(make_backend)
    names = [key(("promise", i)) for i in range(4)]
    writer.store(names, [0, 1])
    assert reader.backend.batch_exists(names) == 0, "nobody has told this rank how long the window is"
    assert reader.query(names).kv_hit_pages == 2
    assert reader.backend.batch_exists(names) == 2
    assert reader.backend.batch_exists(names[:1]) == 1


def test_a_page_whose_side_part_found_no_room_is_not_stored(make_backend: MakeBackend) -> None:
    """P06 P07: its KV would restore nothing and only take room."""
    model = Model(make_backend)
    names = [key(("room", i)) for i in range(4)]
    bad = PoolTransfer(INDEXER, host_indices=indices(0, 1, 2), keys=names, hit_policy=ALL)  # one page short: nothing is stored
    assert model.backend.batch_set_v2([bad]) == {INDEXER: [False] * 4}
    assert model.backend.batch_set_v1(names, indices(0, 1, 2, 3)) == [False] * 4
    assert model.store(names, [2, 3])[PoolName.KV] == [True] * 4, "the next time its side part came first"
    assert model.load(names) == 4


def test_a_pool_that_comes_late_counts_from_then_on(make_backend: MakeBackend) -> None:
    """P50: a draft registered after the attach. What was stored without it is not wholly usable."""
    model = Model(make_backend)
    names = [key(("draft", i)) for i in range(3)]
    model.store(names, [1, 2])
    assert model.load(names) == 3
    draft = mha_pool(layers=1)
    model.backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    asked = [
        PoolTransfer(INDEXER, hit_policy=ALL),
        PoolTransfer(SWA, keys=["__placeholder__"] * WINDOW, hit_policy=TRAILING),
        PoolTransfer(PoolName.DRAFT, hit_policy=ALL),
    ]
    assert model.backend.batch_exists_v2(names, asked).restorable_prefix_pages == []
    for page, name in enumerate(names):
        fill(draft, page, "draft" + name)
    transfer = PoolTransfer(PoolName.DRAFT, host_indices=indices(0, 1, 2), keys=names, hit_policy=ALL)
    assert model.backend.batch_set_v2([transfer]) == {PoolName.DRAFT: [True] * 3}
    assert model.backend.batch_exists_v2(names, asked).kv_hit_pages == 3
    scramble(draft)
    assert model.backend.batch_get_v2([transfer]) == {PoolName.DRAFT: [True] * 3}
    assert all(holds(draft, page, "draft" + name) for page, name in enumerate(names))


def test_a_refused_side_pool_turns_everything_off(make_backend: MakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    """P06: a hit for the KV part alone would be garbage."""
    model = Model(make_backend)
    names = [key(("refused", i)) for i in range(2)]
    model.store(names, [0, 1])
    other = mha_pool(layers=1)
    other.get_page_buffer_meta = lambda _indices: ([other.kv_buffer.data_ptr()], [64])
    model.backend.register_mem_host_pool_v2(other, "another_index")
    assert "pool another_index (MHATokenToKVPoolHost" in caplog.text
    assert model.backend.batch_exists(names) == 0
    assert model.query(names).restorable_prefix_pages == []
    assert model.backend.batch_get_v1(names, indices(0, 1)) == [False] * 2
    assert model.store(names, [0, 1]) == {INDEXER: [False] * 2, SWA: [False] * 2, PoolName.KV: [False] * 2}
    model.backend.register_mem_host_pool_v2(mha_pool(layers=1), "another_index")
    assert model.query(names).kv_hit_pages == 2, "registered anew, and whole this time"


def test_a_logical_anchor_leaves_the_verdict_to_the_side_pools(
    make_backend: MakeBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Anchor:
        layout, page_size, size, kv_buffer = "page_first", PAGE_SIZE, PAGE_SIZE * 24, None

        def get_page_buffer_meta(self, _indices: torch.Tensor) -> None:
            return None

    backend = make_backend(Anchor(), is_mla_model=True)
    names = [key(("logical", i)) for i in range(3)]
    assert "no side pool came with it" in caplog.text
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1(names, indices(0, 1, 2)) == [False] * 3
    compressed = mla_pool()
    backend.register_mem_host_pool_v2(compressed, "deepseek_v4_c4")
    asked = [PoolTransfer(PoolName.DEEPSEEK_V4_C4, hit_policy=ALL)]
    assert backend.batch_exists_v2(names, asked).kv_hit_pages == 0
    for page, name in enumerate(names):
        fill(compressed, page, name)
    transfer = PoolTransfer(PoolName.DEEPSEEK_V4_C4, host_indices=indices(0, 1), keys=names[:2], hit_policy=ALL)
    assert backend.batch_set_v2([transfer]) == {PoolName.DEEPSEEK_V4_C4: [True, True]}
    assert backend.batch_set_v1(names, indices(0, 1, 2)) == [True] * 3
    result = backend.batch_exists_v2(names, asked)
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (2, {PoolName.KV: 3, PoolName.DEEPSEEK_V4_C4: 2})
    assert backend.batch_exists(names) == 2
    assert backend.batch_get_v1(names, indices(0, 1, 2)) == [True] * 3


@pytest.mark.parametrize("pool", ["kv", "indexer", "swa"])
def test_a_part_that_is_lost_between_lookup_and_load_is_missed(
    make_backend: MakeBackend,
    admin: Admin,
    pool: str,
) -> None:
    """P07: what is used is what every pool still has, and the next lookup knows."""
    writer, reader = Model(make_backend), Model(make_backend)
    names = [key(("lost", pool, i)) for i in range(4)]
    writer.store(names, [0, 1, 2, 3])
    find: Callable[[list[str]], Any] = reader.query

    def lookup(asked: list[str]) -> Any:
        found = find(asked)
        assert found.kv_hit_pages == 4
        admin.wire.send(p.Release(0, writer.namespace(pool), bad=bytes.fromhex(names[2])))
        assert isinstance(admin.ask(p.Reserve(b"q" * 16, bytes(32), 4096)), p.Reserved), "the node has done it"
        return found

    reader.query = lookup  # type: ignore[method-assign]
    assert reader.load(names) == 0
    reader.query = find  # type: ignore[method-assign]
    assert reader.load(names) == 2
    assert writer.store(names, [2, 3])[PoolName.KV] == [True] * 4
    assert isinstance(admin.ask(p.Clear(writer.namespace(pool), everywhere=False)), p.Cleared)
    assert reader.load(names) == 0, "one pool has nothing left"


def test_damage_to_one_part_ends_the_page(make_backend: MakeBackend, admin: Admin) -> None:
    model = Model(make_backend)
    names = [key(("damage", i)) for i in range(3)]
    model.store(names, [0, 1, 2])
    admin.damage(
        model.namespace("indexer"), bytes.fromhex(names[1]), model.backend._pools.view.pools["indexer"].bodies[0].length
    )
    assert model.load(names) == 0
    one = {PoolName.KV: 1, INDEXER: 1, SWA: 1}
    wait_until(lambda: model.query(names).extra_pool_hit_pages == one, 30, "the mover has told the node")
    assert model.store(names, [0, 1, 2]) == {INDEXER: [True] * 3, SWA: [True] * 3, PoolName.KV: [True] * 3}
    assert model.load(names) == 3


def test_a_draft_with_heads_beside_replicated_kv_needs_the_name_mooncake(
    make_backend: MakeBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for dynamic in (False, True):
        caplog.clear()
        backend = make_backend(mla_pool(), {"backend_name": "pool"} if dynamic else {}, is_mla_model=True, tp_size=2)
        backend.register_mem_host_pool_v2(mha_pool(layers=1), PoolName.DRAFT)
        assert ("Use --hicache-storage-backend mooncake" in caplog.text) is dynamic
        assert backend._pools.view.usable is not dynamic


def test_ranks_share_the_replicated_pools_and_keep_their_own_state(make_backend: MakeBackend) -> None:
    """P13: MLA KV once, recurrent state of each rank; a rank that lacks its own restores nothing."""
    names = [key(("ranks", i)) for i in range(2)]
    ranks = []
    for rank in range(2):
        kv, state = mla_pool(), mha_pool(layers=1, heads=1)
        backend = make_backend(kv, is_mla_model=True, tp_size=2, tp_rank=rank)
        backend.register_mem_host_pool_v2(state, PoolName.MAMBA)
        ranks.append((backend, kv, state))
    asked = [PoolTransfer(PoolName.MAMBA, keys=["__placeholder__"], hit_policy=TRAILING)]
    for rank, (backend, kv, state) in enumerate(ranks):
        fill(state, 0, f"rank {rank}")
        transfer = PoolTransfer(PoolName.MAMBA, host_indices=indices(0), keys=names[1:], hit_policy=TRAILING)
        assert backend.batch_set_v2([transfer]) == {PoolName.MAMBA: [True]}
        if rank == 0:
            assert ranks[1][0].batch_exists_v2(names, asked).restorable_prefix_pages == []
            for page, name in enumerate(names):
                fill(kv, page, name)
            assert backend.batch_set_v1(names, indices(0, 1)) == [True, True]
            assert ranks[1][0].batch_exists_v2(names, asked).extra_pool_hit_pages == {PoolName.KV: 2, PoolName.MAMBA: 0}
    for rank, (backend, kv, state) in enumerate(ranks):
        assert backend.batch_exists_v2(names, asked).restorable_prefix_pages == [2]
        scramble(kv)
        scramble(state)
        assert backend.batch_get_v1(names, indices(4, 5)) == [True, True]
        transfer = PoolTransfer(PoolName.MAMBA, host_indices=indices(7), keys=names[1:])
        assert backend.batch_get_v2([transfer]) == {PoolName.MAMBA: [True]}
        assert holds(kv, 4, names[0])
        assert holds(state, 7, f"rank {rank}")


def test_the_dynamic_loader_without_interface_v1_finds_what_it_stored(node: NodeProcess) -> None:
    pool = mha_pool()
    extra = {"socket": node.socket, "backend_name": "pool", "module_path": "x", "class_name": "y"}
    backend = HiCacheMooncake(storage_config(extra_config=extra), {})
    backend.register_mem_pool_host(pool)
    names = [key(("flat", i)) for i in range(3)]
    for page, name in enumerate(names):
        fill(pool, page, name)
    assert backend.batch_set(names, [pool.get_data_page(page * PAGE_SIZE, flat=True) for page in range(3)])
    assert backend.batch_exists([*names, key("absent")]) == 3
    scramble(pool)
    for page, tensor in enumerate(backend.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])):
        pool.set_from_flat_data_page((5 + page) * PAGE_SIZE, tensor)
        assert holds(pool, 5 + page, names[page])
    backend.clear()
    assert backend.batch_exists(names) == 0
    backend.close()


def test_one_pool_that_failed_is_not_forgotten_for_another_that_did_not(make_backend: MakeBackend) -> None:
    model = Model(make_backend)
    draft = mha_pool(layers=1)
    model.backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    names = [key(("two", i)) for i in range(2)]
    bad = PoolTransfer(INDEXER, host_indices=indices(0), keys=names, hit_policy=ALL)  # a page short
    good = PoolTransfer(PoolName.DRAFT, host_indices=indices(0, 1), keys=names, hit_policy=ALL)
    for transfers in ([bad, good], [good, bad]):
        model.backend.batch_set_v2(transfers)
        assert model.backend.batch_set_v1(names, indices(0, 1)) == [False, False]


def test_a_short_prompt_does_not_shorten_the_window(make_backend: MakeBackend) -> None:
    model = Model(make_backend)
    names = [key(("window", i)) for i in range(4)]
    model.store(names, [3])
    assert model.query(names).kv_hit_pages == 0
    model.backend.batch_exists_v2(names[:1], [PoolTransfer(SWA, keys=["__placeholder__"], hit_policy=TRAILING)])
    assert model.backend.batch_exists(names) == 0, "a window of one page would promise what two pages must restore"


def test_recurrent_state_needs_no_lookup_to_be_known(make_backend: MakeBackend) -> None:
    """A decode node never makes the lookup that would say how long the window is; a state is one page at the end."""
    kv, state = mha_pool(), mha_pool(layers=1)
    backend = make_backend(kv)
    backend.register_mem_host_pool_v2(state, PoolName.MAMBA)
    names = [key(("state", i)) for i in range(3)]
    for page, name in enumerate(names):
        fill(kv, page, name)
    backend.batch_set_v2([PoolTransfer(PoolName.MAMBA, host_indices=indices(0), keys=names[1:2], hit_policy=TRAILING)])
    assert backend.batch_set_v1(names, indices(0, 1, 2)) == [True] * 3
    assert backend.batch_exists(names) == 2


def test_a_sharded_pool_that_sglang_stores_on_rank_0_alone_is_refused(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend(mla_pool(), is_mla_model=True, tp_size=2)
    backend.register_mem_host_pool_v2(mha_pool(layers=1), "tomorrows_pool")
    assert "SGLang stores those of rank 0 alone" in caplog.text
    assert not backend._pools.view.usable


def test_a_pool_that_cannot_be_shared_for_want_of_descriptors_is_refused(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that comes late is registered in the scheduler's loop: nothing may raise there."""
    model = Model(make_backend)

    def none_left(_geometry: Any) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(model.backend.client, "share", none_left)
    model.backend.register_mem_host_pool_v2(mha_pool(layers=1), PoolName.DRAFT)
    assert "Too many open files" in model.backend._pools.view.refused["draft"]
    assert model.backend.batch_exists([key(1)]) == 0
