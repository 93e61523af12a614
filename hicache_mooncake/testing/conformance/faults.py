"""Conformance: storage that loses, damages or refuses, calls at the same time, and arguments that make no sense."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import hicache_storage

from hicache_mooncake.testing.conformance.harness import HAS_V2, KV, Harness, Rank, fresh_keys, key, needs_v2
from hicache_mooncake.testing.conformance.host_pools import BrokenPool, HostPool, MHAPool, PagedPool, page_bytes, slots

SENSELESS_KEYS: tuple[Any, ...] = (None, 5, "abc", object(), [None], [5], [[]], [key(1), None], (key(1), key(2)))


class FaultTests(Harness):
    # ------------------------------------------------------------------ damage

    def test_a_page_that_was_evicted_ends_the_prefix(self) -> None:
        """Eviction between lookup and load is ordinary: a plain False for that page, whole pages for the others."""
        rank = self.rank()
        keys = fresh_keys(5)
        rank.store(keys)
        assert rank.exists(keys) == 5
        self.evict_part(rank.backend, KV, keys[2])
        assert rank.load(keys)[:3] == [True, True, False]
        assert rank.exists(keys) == 2
        assert rank.store(keys[2:3]) == [True]
        assert rank.load(keys[:3]) == [True] * 3

    @needs_v2
    @pytest.mark.parametrize("pool", [KV, "indexer"])
    def test_a_part_that_was_evicted_takes_its_page_with_it(self, pool: str) -> None:
        """A page that has lost a part in one pool is no page: the usable prefix is the least over all pools, for a lookup
        with side pools and for one without."""
        rank = self.rank({KV: self.mha(), "indexer": PagedPool(memory=self.memory)})
        keys = fresh_keys(5)
        rank.store_everywhere(keys)
        self.evict_part(rank.backend, pool, keys[2])
        assert rank.query(keys, {"indexer": None}).kv_hit_pages == 2
        assert rank.exists(keys) <= 2
        verdict = rank.load(keys) if pool == KV else rank.load_side(pool, keys)
        assert verdict[:3] == [True, True, False]

    @pytest.mark.parametrize("position", [0, 100, -1])
    def test_a_damaged_page_is_never_delivered(self, position: int) -> None:
        """One changed byte, wherever it is, makes the page a miss, and a page stored anew is whole again. Otherwise the answer
        is garbage, with no error anywhere."""
        rank = self.rank()
        keys = fresh_keys(3)
        rank.store(keys)
        self.flip_byte(rank.backend, KV, keys[1], position)
        assert rank.load(keys) == [True, False, True]
        eventually(lambda: rank.store(keys) and rank.load(keys) == [True] * 3, "the page is stored anew")

    @needs_v2
    def test_a_damaged_part_is_never_delivered(self) -> None:
        """The same for a side pool."""
        rank = self.rank({KV: self.mha(), "indexer": PagedPool(memory=self.memory)})
        keys = fresh_keys(3)
        rank.store_everywhere(keys)
        self.flip_byte(rank.backend, "indexer", keys[1], 7)
        assert rank.load_side("indexer", keys) == [True, False, True]

    @pytest.mark.parametrize("length", [0, 1, 100, 1000])
    def test_a_page_of_another_length_is_never_delivered(self, length: int) -> None:
        """An object that is not exactly as long as the page is a miss: read into the page, a shorter one would leave
        somebody's bytes in its tail, and a longer one is the page of another shape."""
        rank = self.rank()
        keys = fresh_keys(3)
        rank.store(keys)
        assert page_bytes(rank.anchor) not in (length, 0)
        self.resize_part(rank.backend, KV, keys[1], length)
        assert rank.load(keys) == [True, False, True]

    def test_without_storage_everything_is_a_miss(self) -> None:
        """A storage that is gone is a miss in every call and an exception in none: up to 0.5.20 an exception ends the storage
        thread, and the other ranks wait for it for ever. When the storage is back, so is the cache, without a new engine."""
        rank = self.rank()
        keys = fresh_keys(3)
        rank.store(keys)
        self.stop_storage()
        assert rank.exists(keys) == 0
        assert rank.load(keys) == [False] * 3
        assert rank.store(keys) == [False] * 3
        rank.backend.clear()
        rank.backend.get_stats()
        self.start_storage()
        eventually(lambda: all(rank.store(keys)), "pages are stored again")
        eventually(lambda: rank.exists(keys) == 3, "pages are found again")
        assert rank.load(keys) == [True] * 3

    @needs_v2
    def test_without_storage_side_pools_are_misses(self) -> None:
        """The same for the v2 calls."""
        rank = self.rank({KV: self.mha(), "indexer": PagedPool(memory=self.memory)})
        keys = fresh_keys(3)
        rank.store_everywhere(keys)
        self.stop_storage()
        assert rank.query(keys, {"indexer": None}).kv_hit_pages == 0
        assert rank.load_side("indexer", keys) == [False] * 3
        assert rank.store_side("indexer", keys) == [False] * 3

    def test_a_backend_made_without_storage_heals(self) -> None:
        """An engine that starts while the storage is down serves without cache, and with it once it is there."""
        self.stop_storage()
        rank = self.rank()
        keys = fresh_keys(2)
        assert rank.exists(keys) == 0
        assert rank.store(keys) == [False] * 2
        self.start_storage()
        eventually(lambda: all(rank.store(keys)), "pages are stored")
        assert rank.load(keys) == [True] * 2

    # ------------------------------------------------------------------ refusals

    @pytest.mark.parametrize("fault", ["raises", "empty", "no_parts", "uneven", "outside"])
    def test_an_anchor_that_cannot_be_stored_turns_the_model_off(self, fault: str) -> None:
        """A pool that cannot be stored whole is refused at registration, and then there is nothing to find. The attach may
        fail, with a message; a call may not."""
        rank = self.unregistered(BrokenPool(fault, memory=self.memory))
        message = rank.refused()
        if message is not None:
            assert message, "the attach failed without a message"
            return
        keys = fresh_keys(2)
        indices = slots(rank.anchor, [0, 1])
        if self.zero_copy:
            assert rank.backend.batch_set_v1(keys, indices) == [False] * 2
            assert rank.backend.batch_get_v1(keys, indices) == [False] * 2
        assert rank.exists(keys) == 0

    # ------------------------------------------------------------------ the rest of the interface

    def test_statistics_are_drained_and_of_the_right_class(self) -> None:
        """The scheduler asserts isinstance(stats, StorageMetrics) at every step and dies if not; a sample is reported once."""
        rank = self.rank(enable_storage_metrics=True) if _has_metrics() else self.rank()
        keys = fresh_keys(3)
        rank.store(keys)
        rank.load(keys)
        stats = rank.backend.get_stats()
        if stats is None:
            return
        assert isinstance(stats, _storage_metrics())
        assert all(pages >= 0 for pages in (*stats.prefetch_pgs, *stats.backup_pgs))
        again = rank.backend.get_stats()
        assert again is None or again.prefetch_pgs == again.backup_pgs == []
        assert again is None or again.prefetch_bandwidth == again.backup_bandwidth == []

    def test_calls_after_close_are_misses(self) -> None:
        """close comes at detach and at exit, while storage threads may still be in a call; after it nothing is found, and
        nothing raises. A second close is harmless."""
        rank = self.rank()
        keys = fresh_keys(2)
        rank.store(keys)
        if not hasattr(rank.backend, "close"):
            pytest.skip("this backend has no close, and SGLang calls none")
        rank.close()
        rank.close()
        assert rank.exists(keys) == 0
        assert rank.load(keys) == [False] * 2
        assert rank.store(keys) == [False] * 2
        if HAS_V2:
            assert rank.query(keys, {}).kv_hit_pages == 0
            assert rank.backend.batch_get_v2([]) == {}
        rank.backend.get_stats()
        rank.backend.clear()

    def test_gets_sets_and_lookups_at_the_same_time(self) -> None:
        """SGLang has one get, one set and two lookups under way at once, in threads of its own: each gets its own answers and
        bytes."""
        rank = self.rank(self.mha(pages=24))
        known = [fresh_keys(4) for _ in range(8)]
        for keys in known:
            rank.store(keys)
        new = [fresh_keys(4) for _ in range(24)]
        wrong: list[str] = []

        def sets() -> None:
            for keys in new:
                rank.fill(KV, keys, range(4))
                if rank.set(keys, range(4)) != [True] * 4:
                    wrong.append("a set failed")

        def gets() -> None:
            for turn in range(24):
                keys = known[turn % 8]
                pages = [8 + (turn + i) % 8 for i in range(4)]
                verdict = rank.get(keys, pages)
                if verdict != [True] * 4:
                    wrong.append("a get missed")
                rank.compare(KV, keys, pages, verdict, [], 0)

        def lookups() -> None:
            for turn in range(48):
                if rank.exists(known[turn % 8]) != 4:
                    wrong.append("a lookup missed")

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=guarded, args=(work,)) for work in (sets, gets, lookups, lookups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        for keys in new:
            assert rank.load(keys) == [True] * 4

    # ------------------------------------------------------------------ arguments that make no sense

    def test_lookups_take_any_argument(self) -> None:
        """batch_exists is called on the scheduler's own thread on decode nodes, where an exception ends the server."""
        rank = self.rank()
        for keys in SENSELESS_KEYS:
            assert rank.backend.batch_exists(keys) == 0, f"batch_exists({keys!r})"
            assert rank.backend.batch_exists(keys, object()) == 0, f"batch_exists({keys!r}, object())"
            if not isinstance(keys, list | tuple):
                assert rank.backend.exists(keys) is False, f"exists({keys!r})"

    def test_gets_and_sets_take_any_argument(self) -> None:
        """Whatever is passed, the answer is a list of False, one a key where there are keys, and no exception: an exception in
        a storage thread ends it, up to 0.5.20."""
        if not self.zero_copy:
            pytest.skip("SGLang does not use the zero-copy calls of this backend")
        rank = self.rank()
        keys = fresh_keys(2)
        good = slots(rank.anchor, [0, 1])
        calls: list[tuple[Any, Any]] = [
            (keys, None), (keys, "no"), (keys, 5), (keys, object()), (keys, [object(), object()]), (keys, []),
            (keys, good.view(2, -1)), (keys, good.to(torch.float32) + 0.5), (keys, torch.tensor(3)), (keys, good.bool()),
            (keys, torch.full_like(good, 2**62)), (keys, torch.full_like(good, -(2**63))),
            ([None, 5], good), ([[], {}], good),
        ]  # fmt: skip
        for call in (rank.backend.batch_get_v1, rank.backend.batch_set_v1):
            for names, indices in calls:
                assert call(names, indices) == [False] * 2, f"{call.__name__}({names!r}, {indices!r})"
            for names in (None, 5):
                assert not call(names, good), f"{call.__name__}({names!r}, ...)"
        assert rank.exists(keys) == 0

    def test_the_generic_calls_take_any_argument(self) -> None:
        """The five abstract methods, on every backend: nothing found, nothing stored, nothing raised."""
        backend = self.rank().backend
        (name,) = fresh_keys(1)
        tensor = torch.zeros(8)
        for bad in (None, 5, object()):
            assert backend.get(name, bad) is None
            assert not backend.set(name, bad)
            assert all(page is None for page in backend.batch_get([name], [bad]))
            assert not backend.batch_set([name], [bad])
            assert not backend.batch_set([name], bad)
        assert all(page is None for page in backend.batch_get([name], None))
        for bad_key in (None, 5, "no key"):
            assert backend.get(bad_key, tensor) is None
            assert backend.exists(bad_key) is False
        assert backend.exists(name) is False

    @needs_v2
    def test_the_v2_calls_take_any_argument(self) -> None:
        """Up to 0.5.21 an exception in batch_set_v2 loses the anchor's pages too, and one in batch_get_v2 the request's."""
        rank = self.rank({KV: MHAPool(memory=self.memory), "indexer": PagedPool(memory=self.memory)})
        keys = fresh_keys(2)
        good = slots(rank.pools["indexer"], [0, 1])
        transfer = hicache_storage.PoolTransfer
        for transfers in (None, 5, "no", [None], [object()], [5]):
            answer = rank.backend.batch_exists_v2(keys, transfers)
            assert answer.kv_hit_pages == 0, f"batch_exists_v2(keys, {transfers!r})"
            for call in (rank.backend.batch_get_v2, rank.backend.batch_set_v2):
                assert not any(any(verdict) for verdict in call(transfers).values()), f"{call.__name__}({transfers!r})"
        bad_keys: list[Any] = [None, 5, [None], ["no"], [[]]]
        for names in bad_keys:
            assert rank.backend.batch_exists_v2(names, [rank.transfer("indexer", None, None)]).kv_hit_pages == 0
        broken = [
            transfer(name="indexer", keys=keys, host_indices=None),
            transfer(name="indexer", keys=None, host_indices=good),
            transfer(name="indexer", keys=None, host_indices=None),
            transfer(name="indexer", keys=[], host_indices=good),
            transfer(name="indexer", keys=[None, 5], host_indices=good),
            transfer(name="indexer", keys=[[], {}], host_indices=good),
            transfer(name="indexer", keys=5, host_indices=good),
            transfer(name="indexer", keys=keys, host_indices="no"),
            transfer(name=None, keys=keys, host_indices=good),
            transfer(name=7, keys=keys, host_indices=good),
        ]
        for one in broken:
            for call in (rank.backend.batch_get_v2, rank.backend.batch_set_v2):
                answer = call([one])
                assert not any(answer[one.name]), f"{call.__name__}({one!r})"
                if isinstance(one.keys, list):
                    assert len(answer[one.name]) == len(one.keys), f"{call.__name__}({one!r})"
            assert rank.backend.batch_exists_v2(keys, [one]).kv_hit_pages == 0

    def test_calls_before_any_pool_is_known(self) -> None:
        """Storage threads start before the pools are registered."""
        pools: dict[str, HostPool] = {KV: self.mha()}
        rank: Rank = self.unregistered(pools)
        keys = fresh_keys(2)
        assert rank.exists(keys) == 0
        if self.zero_copy:
            assert rank.get(keys, [0, 1]) == [False] * 2
            assert rank.set(keys, [0, 1]) == [False] * 2
        if HAS_V2:
            assert rank.query(keys, {}).kv_hit_pages == 0
            assert rank.backend.batch_get_v2([]) == {}
        rank.backend.get_stats()
        rank.backend.clear()


def eventually(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Wait for what must come true; how long it takes is not what is tested."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def _has_metrics() -> bool:
    return "enable_storage_metrics" in getattr(hicache_storage.HiCacheStorageConfig, "__dataclass_fields__", {})


def _storage_metrics() -> Any:
    try:
        from sglang.srt.observability.metrics_collector import StorageMetrics
    except ImportError:  # before 0.5.10
        from sglang.srt.metrics.collector import StorageMetrics
    return StorageMetrics
