"""HiCacheMooncake on SGLang's own host pools: what SGLang calls, with what it passes, every byte compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageExtraInfo, PoolName
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.observability.metrics_collector import StorageMetrics

from hicache_mooncake.backend import HiCacheMooncake
from hicache_mooncake.client import weight_updates
from hicache_mooncake.config import ConfigError
from tests.conftest import NodeProcess, wait_until
from tests.sglang.conftest import MakeBackend
from tests.sglang.pools import (
    PAGE_SIZE,
    PAGES,
    content,
    fill,
    holds,
    indices,
    key,
    mha_pool,
    mla_pool,
    scramble,
    storage_config,
)

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def store(backend: HiCacheMooncake, pool: Any, names: list[str], generation: int = 0) -> list[bool]:
    for page, name in enumerate(names):
        fill(pool, page, name, generation)
    return backend.batch_set_v1(names, indices(*range(len(names))))


@pytest.mark.parametrize("allocator", ["shm", "default"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mha_pages_come_back_into_other_places(make_backend: MakeBackend, layout: str, allocator: str) -> None:
    pool = mha_pool(layout, allocator=allocator)
    backend = make_backend(pool)
    assert backend.client.mode == ("memfd" if allocator == "shm" else "process_vm")
    names = [key(i) for i in range(6)]
    assert store(backend, pool, names) == [True] * 6
    assert backend.batch_exists([*names, key("absent")]) == 6
    scramble(pool)
    places = [20, 3, 11, 0, 23, 7]
    assert backend.batch_get_v1(names, indices(*places)) == [True] * 6
    assert all(holds(pool, place, name) for place, name in zip(places, names, strict=True))


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_mla_pages_are_shared_by_all_ranks(make_backend: MakeBackend, layout: str) -> None:
    writer_pool, reader_pool = mla_pool(layout), mla_pool(layout)
    writer = make_backend(writer_pool, is_mla_model=True, tp_rank=0, tp_size=4)
    reader = make_backend(reader_pool, is_mla_model=True, tp_rank=3, tp_size=4)
    names = [key(("mla", i)) for i in range(4)]
    assert store(writer, writer_pool, names) == [True] * 4
    assert reader.batch_exists(names) == 4
    assert reader.batch_get_v1(names, indices(5, 6, 7, 8)) == [True] * 4
    assert all(holds(reader_pool, 5 + i, name) for i, name in enumerate(names))


def test_the_copy_through_the_segment_is_the_same(make_backend: MakeBackend) -> None:
    pool = mha_pool("layer_first", allocator="default")
    backend = make_backend(pool, {"copy_mode": "segment"})
    names = [key(i) for i in range(6)]
    assert store(backend, pool, names) == [True] * 6
    scramble(pool)
    assert backend.batch_get_v1(names, indices(*range(6))) == [True] * 6
    assert all(holds(pool, page, name) for page, name in enumerate(names))


def test_ranks_of_a_tensor_parallel_model_never_meet(make_backend: MakeBackend) -> None:
    """P13: two ranks, one hash, two pages."""
    pools = [mha_pool(), mha_pool()]
    ranks = [make_backend(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    name = key("same")
    for rank, (backend, pool) in enumerate(zip(ranks, pools, strict=True)):
        assert store(backend, pool, [name], generation=rank) == [True]
    for rank, (backend, pool) in enumerate(zip(ranks, pools, strict=True)):
        scramble(pool)
        assert backend.batch_get_v1([name], indices(0)) == [True]
        assert holds(pool, 0, name, generation=rank)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, object], dict[str, Any]]] = {
    "dtype": ({"dtype": torch.float16}, {}, {}),
    "fp8": ({"dtype": torch.float8_e4m3fn}, {}, {}),
    "layers": ({"layers": 3}, {}, {}),
    "heads": ({"heads": 1}, {}, {}),
    "heads and width": ({"heads": 1, "head_dim": 128}, {}, {}),
    "layout": ({"layout": "page_first_direct"}, {}, {}),
    "page_head": ({"layout": "page_head"}, {}, {}),
    "weights": ({}, {"model_id": "other-revision"}, {}),
    "weight version": ({}, {"weight_version": "2"}, {}),
    "tenant": ({}, {"tenant": "b"}, {}),
    "tag": ({}, {"extra_backend_tag": "canary"}, {}),
    "model": ({}, {}, {"model_name": "tiny-2"}),
    "slash": ({}, {}, {"model_name": "ti/ny"}),
    "tp size": ({}, {}, {"tp_size": 2}),
    "pp": ({}, {}, {"pp_size": 2, "pp_rank": 0}),
    "cp": ({}, {}, {"attn_cp_size": 2}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_engines_that_differ_never_share(make_backend: MakeBackend, what: str) -> None:
    """P01 P02: same tokens, same served name, one difference: zero hits, and a forced read leaves the page alone."""
    pool_fields, extra, config = DIFFERENT[what]
    mine, theirs = mha_pool(), mha_pool(**({"layout": "page_first"} | pool_fields))
    writer, reader = make_backend(mine), make_backend(theirs, extra, **config)
    names = [key(i) for i in range(4)]
    assert store(writer, mine, names) == [True] * 4
    assert reader.batch_exists(names) == 0
    scramble(theirs)
    before = content(theirs, 0)
    assert reader.batch_get_v1(names, indices(0, 1, 2, 3)) == [False] * 4
    assert content(theirs, 0) == before


def test_engines_that_do_not_differ_always_share(make_backend: MakeBackend) -> None:
    """P44, with another pool size and another allocator: those are not part of a page's identity."""
    mine, theirs = mha_pool(), mha_pool(allocator="default", pages=PAGES + 8)
    writer, reader = make_backend(mine), make_backend(theirs)
    names = [key(i) for i in range(4)]
    store(writer, mine, names)
    assert reader.batch_exists(names) == 4
    assert reader.batch_get_v1(names, indices(30, 1, 2, 3)) == [True] * 4
    assert holds(theirs, 30, names[0])


def test_the_prefix_ends_at_the_first_page_that_is_missing(make_backend: MakeBackend) -> None:
    pool = mha_pool()
    backend = make_backend(pool)
    names = [key(i) for i in range(6)]
    store(backend, pool, names[:2])
    fill(pool, 3, names[3])
    backend.batch_set_v1([names[3]], indices(3))
    assert backend.batch_exists(names) == 2
    verdict = backend.batch_get_v1(names, indices(*range(6)))
    assert verdict[:3] == [True, True, False]
    assert len(verdict) == 6


def test_bad_input_gets_a_verdict_and_harms_nothing(make_backend: MakeBackend) -> None:
    pool = mha_pool()
    backend = make_backend(pool)
    good = [key(i) for i in range(3)]
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], torch.empty(0, dtype=torch.int64)) == []
    assert backend.batch_set_v1([], torch.empty(0, dtype=torch.int64)) == []
    for page, name in enumerate([good[0], "not hex", good[1]]):
        fill(pool, page, name)
    assert backend.batch_set_v1([good[0], "not hex", good[1]], indices(0, 1, 2)) == [True, False, True]
    assert backend.batch_exists([good[0], "not hex", good[1]]) == 1
    scramble(pool)
    assert backend.batch_get_v1([good[0], "", good[1]], indices(4, 5, 6)) == [True, False, True]
    assert holds(pool, 4, good[0])
    assert holds(pool, 6, good[1])
    assert backend.batch_exists(["__placeholder__"]) == 0
    short, shifted, beyond = indices(0)[:-1], indices(0) + 1, indices(PAGES)
    for wrong in (short, shifted, beyond, torch.empty(0, dtype=torch.int64)):
        assert backend.batch_set_v1([good[2]], wrong) == [False]
        assert backend.batch_get_v1([good[2]], wrong) == [False]
    assert backend.batch_exists([good[2]]) == 0
    reasons = backend.client.reasons
    assert reasons["bad_key"] >= 4
    assert reasons["bad_indices"] >= 8
    assert reasons["internal"] == 0


def test_duplicate_keys_in_one_batch(make_backend: MakeBackend) -> None:
    pool = mha_pool()
    backend = make_backend(pool)
    name = key("twice")
    fill(pool, 0, name)
    fill(pool, 1, name)
    assert backend.batch_set_v1([name, name], indices(0, 1)) == [True, True]
    scramble(pool)
    assert backend.batch_get_v1([name, name], indices(2, 3)) == [True, True]
    assert holds(pool, 2, name)
    assert holds(pool, 3, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_generic_calls_with_tensors(make_backend: MakeBackend, layout: str) -> None:
    """What `dynamic` without interface_v1 uses: get_data_page, batch_set, batch_get, set_from_flat_data_page."""
    pool = mha_pool(layout)
    backend = make_backend(pool, {"interface_v1": 0})
    names = [key(("g", i)) for i in range(3)]
    for page, name in enumerate(names):
        fill(pool, page, name)
    assert backend.batch_set(names, [pool.get_data_page(page * PAGE_SIZE) for page in range(3)]) is True
    scramble(pool)
    targets = [pool.get_dummy_flat_data_page() for _ in range(4)]
    got = backend.batch_get([*names, key("absent")], targets)
    assert got[3] is None
    for page, tensor in enumerate(got[:3]):
        pool.set_from_flat_data_page((page + 8) * PAGE_SIZE, tensor)
        assert holds(pool, page + 8, names[page])
    single = pool.get_dummy_flat_data_page()
    assert backend.get(names[0], single) is single
    assert backend.get(key("absent"), single) is None
    assert backend.get(names[0]) is None
    assert backend.set(key("one"), pool.get_data_page(0))
    assert backend.set(key("one")) is False
    assert backend.batch_get(names) == [None] * 3
    assert backend.batch_set(names, []) is False


def test_generic_and_zero_copy_pages_do_not_mix(make_backend: MakeBackend) -> None:
    """Their byte order differs for layer_first: they must not read each other's."""
    pool = mha_pool("layer_first")
    backend = make_backend(pool)
    name = key("v1")
    store(backend, pool, [name])
    assert backend.get(name, pool.get_dummy_flat_data_page()) is None


def test_clear_is_scoped_and_stats_are_drained(make_backend: MakeBackend) -> None:
    """P126, and SGLang's `assert isinstance(stats, StorageMetrics)`."""
    pools = [mha_pool(), mha_pool()]
    one, two = make_backend(pools[0], model_name="one"), make_backend(pools[1], model_name="two")
    names = [key(i) for i in range(4)]
    for backend, pool in ((one, pools[0]), (two, pools[1])):
        store(backend, pool, names)
        backend.batch_get_v1(names, indices(*range(4)))
    stats = one.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([4], [4])
    assert all(rate > 0 for rate in stats.prefetch_bandwidth + stats.backup_bandwidth)
    assert one.get_stats().prefetch_pgs == []
    one.clear()
    assert one.batch_exists(names) == 0
    assert two.batch_exists(names) == 4


def test_metrics_off_means_none(make_backend: MakeBackend) -> None:
    assert make_backend(mha_pool(), enable_storage_metrics=False).get_stats() is None


class ShortPage:
    """A page of it is less than what it says a page has."""

    layout = "page_first"
    page_size = PAGE_SIZE
    size = PAGE_SIZE * 4

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(4 * 4096, dtype=torch.uint8)

    def get_page_buffer_meta(self, slots: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [int(slot) // PAGE_SIZE for slot in slots[::PAGE_SIZE]]
        return [self.kv_buffer.data_ptr() + page * 4096 for page in pages], [2048] * len(pages)


def test_a_pool_that_cannot_be_stored_whole_is_refused_by_name(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend(ShortPage())
    assert "pool kv (ShortPage, layout page_first)" in caplog.text
    assert "would not be whole" in caplog.text
    assert backend.batch_exists([key(1)]) == 0
    assert backend.batch_set_v1([key(1)], indices(0)) == [False]
    assert backend.get_stats() is not None
    backend.clear()


class ScatteredPool:
    """A pool whose pages are not affine: every second page lies at the far end."""

    layout = "odd"
    page_size = PAGE_SIZE
    dtype = torch.uint8
    layer_num = 1

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(8 * 4096, dtype=torch.uint8)
        self.size = 8 * PAGE_SIZE

    def get_page_buffer_meta(self, slots: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [int(slot) // PAGE_SIZE for slot in slots[::PAGE_SIZE]]
        places = [page // 2 if page % 2 == 0 else 7 - page // 2 for page in pages]
        return [self.kv_buffer.data_ptr() + place * 4096 for place in places], [4096] * len(pages)


@pytest.mark.parametrize("mode", ["process_vm", "segment"])
def test_a_pool_that_is_not_affine_sends_its_addresses(make_backend: MakeBackend, mode: str) -> None:
    pool = ScatteredPool()
    backend = make_backend(pool, {"copy_mode": mode})
    assert not backend._pools.view.pools["kv"].geometry.affine
    names = [key(i) for i in range(5)]
    for page, name in enumerate(names):
        fill(pool, page, name)
    order = [names[0], "bad", names[2], names[3]]
    assert backend.batch_set_v1(order, indices(0, 1, 2, 3)) == [True, False, True, True]
    pool.kv_buffer.fill_(0)
    assert backend.batch_get_v1([names[3], names[0]], indices(6, 7)) == [True, True]
    assert holds(pool, 6, names[3])
    assert holds(pool, 7, names[0])


def test_pages_without_a_models_name_are_refused(node: NodeProcess) -> None:
    pool = mha_pool()
    backend = HiCacheMooncake(storage_config(extra_config={"socket": node.socket}, model_name=None), {})
    with pytest.raises(ConfigError, match="--served-model-name"):
        backend.register_mem_pool_host(pool)
    backend.close()


def test_a_configuration_that_cannot_work_names_its_setting(node: NodeProcess) -> None:
    """P116."""
    with pytest.raises(ConfigError, match="deadline_s"):
        HiCacheMooncake(storage_config(extra_config={"socket": node.socket, "deadline_s": 60}), {})


def test_nothing_raises_into_sglang(make_backend: MakeBackend, node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(mha_pool())

    def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(backend.client, "exists", broken)
    monkeypatch.setattr(backend.client, "transfer", broken)
    monkeypatch.setattr(backend.client, "transfer_through_bounce", broken)
    monkeypatch.setattr(backend.client, "clear", broken)
    names = [key(1)]
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, indices(0)) == [False]
    assert backend.batch_set_v1(names, indices(0)) == [False]
    assert backend.batch_set(names, [torch.zeros(4)]) is False
    assert backend.batch_get(names, [torch.zeros(4)]) == [None]
    backend.clear()
    assert backend.client.reasons["internal"] >= 6
    assert backend.batch_exists(None) == 0  # type: ignore[arg-type]


def test_the_engine_goes_on_while_the_node_restarts(make_backend: MakeBackend, node: NodeProcess) -> None:
    pool = mha_pool()
    backend = make_backend(pool)
    names = [key(i) for i in range(4)]
    store(backend, pool, names)
    node.kill()
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, indices(0, 1, 2, 3)) == [False] * 4
    node.start()
    wait_until(lambda: all(store(backend, pool, names)), 30)
    wait_until(lambda: backend.batch_exists(names) == 4, 30)


# --------------------------------------------------------------------------- through SGLang's own factory (P81)


def test_the_factory_builds_it_by_the_dynamic_name(node: NodeProcess) -> None:
    extra = {
        "backend_name": "mooncake",
        "module_path": "hicache_mooncake.backend",
        "class_name": "HiCacheMooncake",
        "interface_v1": 1,
        "socket": node.socket,
    }
    pool = mha_pool()
    backend = StorageBackendFactory.create_backend("dynamic", storage_config(extra_config=extra), pool)
    assert isinstance(backend, HiCacheMooncake)
    exercise(backend, pool)


def test_the_factory_builds_it_by_the_name_mooncake_after_the_plugin(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache_mooncake import plugin

    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "0")  # what the plugin would set, and nobody would take back
    monkeypatch.setattr(plugin, "summary", "")
    registry = dict(StorageBackendFactory._registry)
    try:
        plugin.activate()
        pool = mha_pool()
        backend = StorageBackendFactory.create_backend("mooncake", storage_config(extra_config={"socket": node.socket}), pool)
        assert isinstance(backend, HiCacheMooncake)
        exercise(backend, pool)
    finally:
        StorageBackendFactory._registry.clear()
        StorageBackendFactory._registry.update(registry)


def exercise(backend: HiCacheStorage, pool: Any) -> None:
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.on_host_pools_registered()
    names = [key(i) for i in range(3)]
    for page, name in enumerate(names):
        fill(pool, page, name)
    info = HiCacheStorageExtraInfo(prefix_keys=None)
    assert backend.batch_set_v1(names, indices(0, 1, 2), info) == [True] * 3
    assert backend.batch_exists(names, info) == 3
    assert backend.batch_exists_v2(names, None, info).restorable_prefix_pages == [1, 2, 3]
    scramble(pool)
    assert backend.batch_get_v1(names, indices(4, 5, 6), info) == [True] * 3
    assert all(holds(pool, 4 + page, name) for page, name in enumerate(names))
    assert backend.exists(names[0])
    backend.close()  # type: ignore[attr-defined]


def test_every_method_that_sglang_may_call_is_ours() -> None:
    """P81: a method that a newer SGLang adds to the interface shows here."""
    ours = {name for name in vars(HiCacheMooncake) if not name.startswith("_")}
    theirs = {name for name, value in vars(HiCacheStorage).items() if callable(value) and not name.startswith("_")}
    assert theirs <= ours, f"not implemented: {sorted(theirs - ours)}"


def test_extra_config_survives_as_json() -> None:
    """What operators write on the command line is JSON: the keys of the README's example parse."""
    example = (
        '{"backend_name":"mooncake","module_path":"hicache_mooncake.backend","class_name":"HiCacheMooncake","interface_v1":1}'
    )
    assert json.loads(example)["class_name"] == HiCacheMooncake.__name__


@pytest.mark.parametrize("flush_first", [False, True])
def test_pages_of_old_weights_are_not_found_and_late_ones_not_stored(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, flush_first: bool
) -> None:
    """P04: a live update; what was under way lands in the old namespace or nowhere, and another engine of the old weights
    still finds its pages."""

    def mark(whose: str) -> None:
        monkeypatch.setattr(weight_updates, "change_mark", lambda: (whose, 1))

    mark("this engine's update")
    pool, other_pool = mha_pool(), mha_pool()
    backend, other = make_backend(pool), make_backend(other_pool)
    names = [key(("weights", i)) for i in range(3)]
    assert store(backend, pool, names) == [True] * 3
    registry = backend._pools
    registry.weights_changing()
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1([key("late")], indices(0)) == [False]
    steps = [lambda: registry.weights_changed("v2", None, True), registry.caches_flushed]
    for step in reversed(steps) if flush_first else steps:
        assert backend.batch_get_v1(names, indices(0, 1, 2)) == [False] * 3
        step()
    assert backend.batch_exists(names) == 0
    assert backend.batch_exists([key("late")]) == 0
    assert store(backend, pool, names, generation=2) == [True] * 3
    assert other.batch_get_v1(names, indices(4, 5, 6)) == [True] * 3
    assert all(holds(other_pool, 4 + i, name) for i, name in enumerate(names)), "the old weights' engine has the old pages"
    mark("another engine's update")
    other._pools.weights_changing()
    other._pools.weights_changed("v2", None, True)
    other._pools.caches_flushed()
    assert other.batch_exists(names) == 0, "another run may have called its second step v2 as well"
    again = make_backend(other_pool)  # detached and attached: the process still knows
    mark("this engine's update")
    again._pools.weights_changing()
    again._pools.weights_changed("v2", None, True)
    again._pools.caches_flushed()
    assert again.batch_get_v1(names, indices(4, 5, 6)) == [True] * 3
    assert all(holds(other_pool, 4 + i, name, 2) for i, name in enumerate(names))


def updated(backend: HiCacheMooncake, version: str) -> None:
    backend._pools.weights_changing()
    backend._pools.weights_changed(version, None, True)
    backend._pools.caches_flushed()


def test_versions_that_never_come_again_are_shared(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [mha_pool(), mha_pool()]
    engines = [make_backend(pool, {"share_weight_versions": True}) for pool in pools]
    marks = [("x", 1), ("y", 1)]
    for engine in engines:
        monkeypatch.setattr(weight_updates, "change_mark", lambda: marks[0])
        updated(engine, "run7-2")
        marks.reverse()
    names = [key("shared version")]
    assert store(engines[0], pools[0], names) == [True]
    assert engines[1].batch_exists(names) == 1
    monkeypatch.setattr(weight_updates, "change_mark", lambda: ("z", 2))
    updated(engines[1], "run7-2")
    assert engines[1].batch_exists(names) == 0, "the second part of one version: what was stored between is neither"


def test_ranks_that_share_pages_need_versions_that_never_come_again(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend(mla_pool(), is_mla_model=True, tp_size=2)
    updated(backend, "2")
    assert "Set share_weight_versions" in caplog.text
    assert not backend._pools.view.usable
    sure = make_backend(mla_pool(), {"share_weight_versions": True}, is_mla_model=True, tp_size=2)
    updated(sure, "2")
    assert sure._pools.view.usable


def test_l3_that_waits_for_a_flush_says_so_and_counts(make_backend: MakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    backend = make_backend(mha_pool())
    backend._pools.weights_changing()
    backend._pools.weights_changed("v2", None, True)
    assert "POST /flush_cache" in caplog.text
    assert backend.batch_exists([key(1), key(2)]) == 0
    assert backend.client.reasons["l3_off"] == 2


@pytest.mark.parametrize(("version", "ok"), [(None, True), ("v2", False)])
def test_an_update_that_names_no_version_or_fails_leaves_l3_off(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture, version: str | None, ok: bool
) -> None:
    pool = mha_pool()
    backend = make_backend(pool)
    store(backend, pool, [key("a")])
    backend._pools.weights_changing()
    backend._pools.weights_changed(version, None, ok)
    backend._pools.caches_flushed()
    assert "weight_version" in caplog.text
    assert backend.batch_exists([key("a")]) == 0
    assert store(backend, pool, [key("b")]) == [False]
    backend._pools.weights_changing()
    backend._pools.weights_changed("v3", None, True)
    backend._pools.caches_flushed()
    assert store(backend, pool, [key("b")]) == [True]


def test_a_flush_alone_changes_nothing(make_backend: MakeBackend) -> None:
    pool = mha_pool()
    backend = make_backend(pool)
    store(backend, pool, [key("a")])
    backend._pools.caches_flushed()
    backend._pools.weights_changed("label", None, True)
    assert backend.batch_exists([key("a")]) == 1


def test_requests_that_cannot_be_told_apart_are_refused(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P03: an SGLang whose page hashes know no adapter, and that cannot be taught."""
    from hicache_mooncake.client import isolation

    monkeypatch.setattr(isolation, "isolate", lambda: "pages of adapters cannot be told apart")
    pool = mha_pool()
    backend = HiCacheMooncake(storage_config(extra_config={"socket": node.socket}), pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert "L3 is off for this model: pages of adapters cannot be told apart" in caplog.text
    assert store(backend, pool, [key("a")]) == [False]
    assert backend.batch_exists([key("a")]) == 0
    backend.close()


def test_the_backend_listens_to_the_engines_updates(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(weight_updates, "watch", lambda listener: heard.append(listener) or "updates cannot be seen here")
    backend = HiCacheMooncake(storage_config(extra_config={"socket": node.socket}), {})
    assert heard == [backend._pools]
    assert "updates cannot be seen here" in caplog.text
    backend.close()
