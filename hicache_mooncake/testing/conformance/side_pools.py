"""Conformance: models with more than one host pool, by the v2 calls. One logical page is what all pools hold of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hicache_mooncake.testing.conformance.harness import (
    KV,
    PLACEHOLDER,
    TRAILING_PAGES,
    Harness,
    Rank,
    checked_result,
    each_test_needs_v2,
    expected_restorable,
    fresh_keys,
    is_logical,
    pool_name,
    reports_restorable,
    verdict_of,
)
from hicache_mooncake.testing.conformance.host_pools import (
    FAULTS,
    BrokenPool,
    HostPool,
    LogicalPool,
    MHAPool,
    MLAPool,
    PagedPool,
    StatePool,
    slots,
    snapshot,
)

Windows = dict[str, int | None]
"""Side pool -> None for ALL_PAGES, the number of pages for TRAILING_PAGES."""


@dataclass(frozen=True)
class Family:
    """A model family: its pools, anchor first, and what a prefix needs of each side pool."""

    make: Callable[[str], dict[str, HostPool]]
    windows: Windows
    layout: str = "page_first"


FAMILIES: dict[str, Family] = {
    "sparse attention (indexer)": Family(
        lambda memory: {KV: MLAPool(memory=memory), "indexer": PagedPool(memory=memory)}, {"indexer": None}
    ),
    "sparse attention (indexer), layer_first": Family(
        lambda memory: {KV: MLAPool("layer_first", memory=memory), "indexer": PagedPool("layer_first", memory=memory)},
        {"indexer": None},
        "layer_first",
    ),
    "sliding window": Family(
        lambda memory: {KV: MHAPool(memory=memory), "swa": MHAPool(layers=3, pages=12, memory=memory)}, {"swa": 2}
    ),
    "Mamba": Family(lambda memory: {KV: MHAPool(memory=memory), "mamba": StatePool(memory=memory)}, {"mamba": 1}),
    "draft model": Family(
        lambda memory: {KV: MHAPool(memory=memory), "draft": MHAPool(layers=1, memory=memory)}, {"draft": None}
    ),
    "DeepSeek-V4": Family(
        lambda memory: {
            KV: LogicalPool(memory=memory),
            "deepseek_v4_c4": PagedPool(memory=memory),
            "deepseek_v4_c4_indexer": PagedPool(page_bytes=33, memory=memory),
            "swa": PagedPool(page_bytes=64, pages=12, memory=memory),
            "deepseek_v4_c4_state": PagedPool(page_bytes=40, pages=12, memory=memory),
        },
        {"deepseek_v4_c4": None, "deepseek_v4_c4_indexer": None, "swa": 2, "deepseek_v4_c4_state": 2},
    ),
    "a pool of tomorrow": Family(
        lambda memory: {KV: MHAPool(memory=memory), "pool_of_tomorrow": PagedPool(page_bytes=77, memory=memory)},
        {"pool_of_tomorrow": None},
    ),
}

THREE: Windows = {"indexer": None, "swa": 2}
"""The side pools of most tests here."""

PATTERNS: dict[str, tuple[str, str, str]] = {
    # six pages: KV, indexer (all pages), swa (window of 2); "x" is there
    "everything": ("xxxxxx", "xxxxxx", "xxxxxx"),
    "nothing": ("......", "......", "......"),
    "anchor only": ("xxxxxx", "......", "......"),
    "side pools only": ("......", "xxxxxx", "xxxxxx"),
    "one side pool missing": ("xxxxxx", "xxxxxx", "......"),
    "hole in the anchor": ("xxx.xx", "xxxxxx", "xxxxxx"),
    "anchor without its head": (".xxxxx", "xxxxxx", "xxxxxx"),
    "hole in the indexer": ("xxxxxx", "xx.xxx", "xxxxxx"),
    "indexer without its head": ("xxxxxx", ".xxxxx", "xxxxxx"),
    "indexer shorter": ("xxxxxx", "xxxxx.", "xxxxxx"),
    "window at the end alone": ("xxxxxx", "xxxxxx", "....xx"),
    "window in the middle alone": ("xxxxxx", "xxxxxx", "..xx.."),
    "two windows with a hole between": ("xxxxxx", "xxxxxx", "xx..xx"),
    "half windows": ("xxxxxx", "xxxxxx", ".x.x.x"),
    "the first page is a window of its own": ("xxxxxx", "xxxxxx", "x....."),
    "window beyond the indexer": ("xxxxxx", "xxx...", "...xxx"),
    "window beyond the anchor": ("xxx...", "xxxxxx", "...xxx"),
    "ends that never meet": ("xxxxxx", "xx....", "..xxxx"),
}


@each_test_needs_v2
class SidePoolTests(Harness):
    def family(self, name: str, **fields: Any) -> Rank:
        return self.rank(FAMILIES[name].make(self.memory), **fields)

    def three_pools(self, **fields: Any) -> Rank:
        pools = {KV: self.mha(), "indexer": PagedPool(memory=self.memory), "swa": MHAPool(layers=1, memory=self.memory)}
        return self.rank(pools, **fields)

    def store_pattern(self, rank: Rank, keys: list[str], stored: dict[str, list[bool]]) -> None:
        """Store the pages that a pattern has, side pools first."""
        for pool in reversed(rank.pools):
            chosen = [i for i, there in enumerate(stored[pool]) if there]
            if chosen:
                names = [keys[i] for i in chosen]
                done = rank.store(names, chosen) if pool == rank.anchor_name else rank.store_side(pool, names, chosen)
                assert done == [True] * len(chosen), f"{pool} was not stored"

    def check_query(self, rank: Rank, keys: list[str], stored: dict[str, list[bool]], windows: Windows, name: str = "") -> None:
        """Ask, and compare with the definition. `name` of what was stored, for the message."""
        name = name or str(stored)
        everything: Windows = {rank.anchor_name: None, **windows}
        expected = expected_restorable(len(keys), stored, everything)
        result = rank.query(keys, windows)
        assert result.kv_hit_pages == max(expected, default=0), f"{name}: {result} instead of {expected}"
        if reports_restorable():
            assert sorted(result.restorable_prefix_pages) == expected, f"{name}: {result} instead of {expected}"
        reported = {str(getattr(name, "value", name)): count for name, count in result.extra_pool_hit_pages.items()}
        prefix = max(expected_restorable(len(keys), stored, {rank.anchor_name: None}), default=0)
        for pool, count in reported.items():
            if pool == rank.anchor_name and is_logical(rank.anchor):
                continue
            own = expected_restorable(prefix, stored, {pool: everything[pool]})
            assert count == max(own, default=0), f"{name}: {pool} has {max(own, default=0)} pages, {count} were reported"
        if expected and not is_logical(rank.anchor):
            assert set(reported) == set(everything), f"{name}: a pool that was found has no verdict"

    # ------------------------------------------------------------------ bytes

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_pool_of_a_family_comes_back_whole(self, family: str) -> None:
        """A hit restores what every pool holds of the page: with one left out, the model runs on leftover bytes of somebody
        else's indexer, window or state."""
        rank = self.family(family)
        windows = FAMILIES[family].windows
        keys = fresh_keys(5)
        for pool in windows:
            assert rank.load_side(pool, keys) == [False] * 5
        assert rank.query(keys, windows).kv_hit_pages == 0
        rank.store_everywhere(keys)
        self.check_query(rank, keys, {pool: [True] * 5 for pool in rank.pools}, windows)
        assert rank.load(keys, [9, 3, 15, 0, 11]) == [True] * 5
        for pool in windows:
            assert rank.load_side(pool, keys, [9, 3, 1, 0, 11]) == [True] * 5
        self.covers(family=family.split(",")[0], layout=FAMILIES[family].layout, shape="one rank")

    def test_pools_do_not_mix(self) -> None:
        """Pools of one size and one page hash are different things."""
        pools: dict[str, HostPool] = {KV: self.mha(), "swa": self.mha(), "draft": self.mha()}
        rank = self.rank(pools)
        keys = fresh_keys(2)
        rank.store(keys)
        assert rank.load_side("swa", keys) == [False] * 2
        rank.store_side("swa", keys)
        assert rank.load_side("draft", keys) == [False] * 2
        rank.store_side("draft", keys)
        assert rank.load(keys, [4, 5]) == [True] * 2
        for pool in ("swa", "draft"):
            assert rank.load_side(pool, keys, [4, 5]) == [True] * 2

    def test_several_pools_in_one_call(self) -> None:
        """One call has one transfer per pool, each with its own keys and places; the answer has one list per pool, found by
        the transfer's name or by the plain string."""
        rank = self.three_pools()
        keys = fresh_keys(5)
        parts: dict[str, tuple[list[str], Sequence[int]]] = {"indexer": (keys, range(5)), "swa": (keys[3:], [7, 2])}
        for pool, (names, pages) in parts.items():
            rank.fill(pool, names, pages)
        assert rank.set_all(parts) == {"indexer": [True] * 5, "swa": [True] * 2}
        before = {pool: rank.scrambled(pool) for pool in parts}
        parts = {"indexer": (keys[1:], [9, 8, 7, 6]), "swa": (keys[2:], [0, 1, 2])}
        answer = rank.backend.batch_get_v2([rank.transfer(pool, *part) for pool, part in parts.items()])
        assert {str(getattr(name, "value", name)) for name in answer} == {"indexer", "swa"}
        assert answer["indexer"] == [True] * 4
        assert answer[pool_name("swa")] == [False, True, True]
        for pool, (names, pages) in parts.items():
            rank.compare(pool, names, pages, answer[pool], before[pool], 0)

    def test_a_transfer_with_and_without_extra_info(self) -> None:
        """Up to 0.5.21 SGLang passes the transfers alone, later extra_info by keyword."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        rank = self.family("draft model")
        keys = fresh_keys(2)
        rank.fill("draft", keys, [0, 1])
        info = HiCacheStorageExtraInfo(prefix_keys=fresh_keys(2))
        transfer = rank.transfer("draft", keys, [0, 1])
        assert rank.backend.batch_set_v2([transfer], extra_info=info)["draft"] == [True] * 2
        assert rank.backend.batch_set_v2([transfer])["draft"] == [True] * 2
        assert rank.backend.batch_get_v2([transfer], extra_info=info)["draft"] == [True] * 2
        assert rank.backend.batch_get_v2([transfer])["draft"] == [True] * 2

    def test_no_transfers_no_verdicts(self) -> None:
        """SGLang calls batch_get_v2 with an empty list."""
        rank = self.three_pools()
        assert rank.backend.batch_get_v2([]) == {}
        assert rank.backend.batch_set_v2([]) == {}

    def test_a_whole_node_in_one_set(self) -> None:
        """Side pools are stored a whole node at once, without the limit of 128 pages of the anchor."""
        pools = {KV: self.mha(), "indexer": PagedPool(pages=300, memory=self.memory)}
        rank = self.rank(pools)
        keys = fresh_keys(300)
        assert rank.store_side("indexer", keys) == [True] * 300
        assert rank.load_side("indexer", keys) == [True] * 300

    def test_states_of_one_slot(self) -> None:
        """A Mamba pool has page_size 1: one index, one key, and a state only where a node ends."""
        rank = self.family("Mamba")
        keys = fresh_keys(6)
        rank.store(keys)
        assert rank.store_side("mamba", [keys[3]], [13]) == [True]
        assert rank.query(keys, {"mamba": 1}).kv_hit_pages == 4
        assert rank.load_side("mamba", [keys[3]], [2]) == [True]
        assert rank.store_side("mamba", [keys[5]], [13]) == [True]
        stored = {KV: [True] * 6, "mamba": [i in (3, 5) for i in range(6)]}
        self.check_query(rank, keys, stored, {"mamba": 1})

    # ------------------------------------------------------------------ what can be restored

    def test_exactly_the_restorable_lengths(self) -> None:
        """A prefix length can be restored if the anchor and every ALL_PAGES pool have all its pages and every TRAILING_PAGES
        pool has the last pages of it, as many as its window. SGLang intersects these sets over the ranks: a length too many
        is a prefix with a hole, one too few is lost."""
        rank = self.three_pools()
        for name, pattern in PATTERNS.items():
            keys = fresh_keys(6)
            stored = {pool: [mark == "x" for mark in marks] for pool, marks in zip(rank.pools, pattern, strict=True)}
            self.store_pattern(rank, keys, stored)
            self.check_query(rank, keys, stored, THREE, name)

    def random_patterns(self, rank: Rank, pages: int, count: int, seed: int) -> list[tuple[list[str], dict[str, list[bool]]]]:
        """Stored patterns of holes: (keys, which page is there in which pool). A logical anchor has no holes."""
        rng = random.Random(seed)
        made = []
        for _ in range(count):
            keys = fresh_keys(pages)
            stored = {}
            for pool in rank.pools:
                density = 1.0 if is_logical(rank.pools[pool]) else rng.choice([0.6, 0.9, 1.0])
                stored[pool] = [rng.random() < density for _ in range(pages)]
            self.store_pattern(rank, keys, stored)
            made.append((keys, stored))
        return made

    @pytest.mark.parametrize("window", [1, 2, 3, 9])
    def test_random_holes_and_windows(self, window: int) -> None:
        """The same on holes at random, with windows from one page to more than there are."""
        rank = self.three_pools()
        for keys, stored in self.random_patterns(rank, 7, 16, seed=window):
            self.check_query(rank, keys, stored, {"indexer": None, "swa": window})

    def test_a_query_names_only_the_pools_it_needs(self) -> None:
        """The answer depends on the pools of the query: an operation without one of them is not held up by its holes."""
        rank = self.three_pools()
        keys = fresh_keys(4)
        stored = {KV: [True] * 4, "indexer": [True] * 4, "swa": [True, False, False, False]}
        self.store_pattern(rank, keys, stored)
        self.check_query(rank, keys, stored, {"indexer": None})
        self.check_query(rank, keys, stored, {"swa": 1})
        self.check_query(rank, keys, stored, {"swa": 1, "indexer": None})

    def test_an_empty_query(self) -> None:
        """No keys, no pages."""
        rank = self.three_pools()
        assert rank.query([], THREE).kv_hit_pages == 0

    def test_a_query_without_side_pools(self) -> None:
        """batch_exists_v2 without transfers asks for the anchor alone."""
        rank = self.rank()
        keys = fresh_keys(4)
        rank.store(keys[:3])
        no_transfers: list[list[Any] | None] = [None, []]
        for transfers in no_transfers:
            result = checked_result(rank.backend.batch_exists_v2(keys, transfers), 4)
            assert result.kv_hit_pages == 3

    def test_only_the_number_of_a_windows_keys_counts(self) -> None:
        """At query time a window's keys are placeholders, and only how many there are means something, at least one: the
        real keys are the last ones of each prefix."""
        rank = self.family("sliding window")
        keys = fresh_keys(4)
        stored = {KV: [True] * 4, "swa": [True, False, True, True]}
        self.store_pattern(rank, keys, stored)
        asked: list[list[str] | None] = [None, [], ["one"], [PLACEHOLDER] * 2, ["x", "y"], keys[:3]]
        for names in asked:
            transfer = rank.transfer("swa", names, None, TRAILING_PAGES)
            result = checked_result(rank.backend.batch_exists_v2(keys, [transfer]), 4)
            expected = expected_restorable(4, stored, {KV: None, "swa": max(1, len(names or []))})
            assert result.kv_hit_pages == max(expected, default=0), names
            if reports_restorable():
                assert sorted(result.restorable_prefix_pages) == expected, names

    def test_a_placeholder_is_no_key(self) -> None:
        """A page stored under the placeholder would be everybody's page."""
        rank = self.family("sliding window")
        (name,) = fresh_keys(1)
        rank.fill("swa", [name, PLACEHOLDER], [0, 1])
        assert rank.set_side("swa", [name, PLACEHOLDER], [0, 1]) == [True, False]
        assert rank.load_side("swa", [PLACEHOLDER, name]) == [False, True]
        assert rank.query([PLACEHOLDER], {"swa": 1}).kv_hit_pages == 0

    # ------------------------------------------------------------------ what is not known

    @pytest.mark.parametrize("policy", ["block_groups", "policy_of_tomorrow"])
    def test_an_unknown_hit_policy_gets_no_verdict(self, policy: str) -> None:
        """A policy that the backend does not know has no entry in the answer, which SGLang reads as "no verdict"; it must
        not raise, and it must not add a hit. BLOCK_GROUPS, which has such an entry at most, never holds up the anchor."""
        rank = self.three_pools()
        keys = fresh_keys(4)
        rank.store_everywhere(keys[:3])
        transfers = [rank.transfer("indexer", None, None), rank.transfer("swa", [PLACEHOLDER], None, policy)]
        result = checked_result(rank.backend.batch_exists_v2(keys, transfers), 4)
        assert "swa" not in result.extra_pool_hit_pages
        assert result.kv_hit_pages == 3 if policy == "block_groups" else result.kv_hit_pages <= 3

    def test_a_pool_that_was_never_registered(self) -> None:
        """Nothing of a pool without memory can be restored: no hit, no verdict but False, and the others as ever."""
        rank = self.three_pools()
        keys = fresh_keys(3)
        rank.store_everywhere(keys)
        strange = rank.transfer("indexer", None, None)
        strange.name = pool_name("deepseek_v4_c128")
        result = checked_result(rank.backend.batch_exists_v2(keys, [strange]), 3)
        assert result.kv_hit_pages == 0
        strange.keys, strange.host_indices = keys, slots(rank.pools["indexer"], range(3))
        known = rank.transfer("indexer", keys, range(3))
        for call in (rank.backend.batch_set_v2, rank.backend.batch_get_v2):
            answer = call([strange, known])
            assert verdict_of(answer[strange.name], 3) == [False] * 3
            assert verdict_of(answer["indexer"], 3) == [True] * 3

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_side_pool_that_cannot_be_stored_turns_the_model_off(self, fault: str, caplog: pytest.LogCaptureFixture) -> None:
        """A pool that cannot be stored whole is refused when it is registered, by name; from then on nothing of the model is
        found: a hit without that pool is a hit for part of a page."""
        rank = self.unregistered({KV: self.mha(), "indexer": BrokenPool(fault, memory=self.memory)})
        message = rank.refused()
        if message is not None:  # fails the attach, which is as clear
            assert "indexer" in message
            return
        assert any("indexer" in record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)
        keys = fresh_keys(3)
        rank.store(keys)
        transfer = rank.transfer("indexer", keys, None)
        transfer.host_indices = slots(rank.anchor, range(3))
        assert verdict_of(rank.backend.batch_set_v2([transfer])["indexer"], 3) == [False] * 3
        assert rank.exists(keys) == 0
        assert rank.query(keys, {"indexer": None}).kv_hit_pages == 0
        assert verdict_of(rank.backend.batch_get_v2([transfer])["indexer"], 3) == [False] * 3

    def test_a_side_pool_stored_in_part_never_yields_a_hit(self) -> None:
        """A set that failed for one pool leaves its pages without that part: the pages before them are the hit."""
        rank = self.three_pools()
        keys = fresh_keys(4)
        rank.store_everywhere(keys[:2])
        rank.fill("swa", keys, range(4))
        assert rank.set_side("swa", keys[2:], [2, 3]) == [True] * 2
        refused = rank.transfer("indexer", keys[2:], [2, 3])
        refused.host_indices = refused.host_indices[:-1]
        assert verdict_of(rank.backend.batch_set_v2([refused])["indexer"], 2) == [False] * 2
        rank.store(keys[2:], [2, 3])
        assert rank.query(keys, THREE).kv_hit_pages == 2
        assert rank.exists(keys) <= 2

    def test_bad_indices_of_one_pool_leave_the_others_alone(self) -> None:
        """One transfer that cannot be done is refused whole; the other pools of the call get theirs."""
        rank = self.three_pools()
        pool = rank.pools["indexer"]
        good = slots(pool, [2, 5])
        wrong = {
            "no indices": None,
            "one slot short": good[:-1],
            "beyond the pool": slots(pool, [2, pool.page_num]),
            "misaligned": good + 1,
            "too many": slots(pool, [2, 5, 6]),
        }
        for fault, indices in wrong.items():
            keys = fresh_keys(2)
            rank.store_side("swa", keys)
            rank.store_side("indexer", keys)
            bad, fine = rank.transfer("indexer", keys, [0, 1]), rank.transfer("swa", keys, [7, 8])
            bad.host_indices = indices
            before, other = rank.scrambled("indexer"), rank.scrambled("swa")
            answer = rank.backend.batch_get_v2([bad, fine])
            assert verdict_of(answer["indexer"], 2) == [False] * 2, fault
            assert snapshot(pool) == before, fault
            assert verdict_of(answer["swa"], 2) == [True] * 2, fault
            rank.compare("swa", keys, [7, 8], [True] * 2, other, 0)
            bad.keys = fresh_keys(2)
            assert verdict_of(rank.backend.batch_set_v2([bad])["indexer"], 2) == [False] * 2, fault

    # ------------------------------------------------------------------ order of registration

    def test_a_pool_that_arrives_late(self) -> None:
        """Draft pools come after the end of the attach, without a second one. From then on a page without its draft part is
        not a whole page, and with it it is."""
        rank = self.rank()
        keys = fresh_keys(3)
        rank.store(keys)
        assert rank.exists(keys) == 3
        rank.register_late("draft", MHAPool(layers=1, memory=self.memory))
        assert rank.query(keys, {"draft": None}).kv_hit_pages == 0
        assert rank.load_side("draft", keys) == [False] * 3
        assert rank.store_side("draft", keys) == [True] * 3
        assert rank.query(keys, {"draft": None}).kv_hit_pages == 3
        assert rank.load(keys, [4, 5, 6]) == [True] * 3
        assert rank.load_side("draft", keys, [4, 5, 6]) == [True] * 3

    def test_clear_forgets_every_pool(self) -> None:
        """After clear no pool has a page of this model left, and other models have all of theirs."""
        ours, theirs = self.three_pools(), self.three_pools(model_name="another")
        keys = fresh_keys(3)
        ours.store_everywhere(keys)
        theirs.store_everywhere(keys, generation=1)
        ours.backend.clear()
        assert ours.query(keys, THREE).kv_hit_pages == 0
        for pool in THREE:
            assert ours.load_side(pool, keys) == [False] * 3
        assert theirs.query(keys, THREE).kv_hit_pages == 3
        for pool in THREE:
            assert theirs.load_side(pool, keys, generation=1) == [True] * 3

    # ------------------------------------------------------------------ the anchor without bytes

    def test_an_anchor_without_bytes_is_decided_by_its_side_pools(self) -> None:
        """DeepSeek-V4's anchor has slots and no bytes: SGLang stores and loads it like any other, and a False there ends the
        operation, so it is always there. What can be restored is up to the side pools."""
        rank = self.family("DeepSeek-V4")
        windows = FAMILIES["DeepSeek-V4"].windows
        keys = fresh_keys(3)
        assert rank.set(keys, range(3)) == [True] * 3
        assert rank.get(keys, range(3)) == [True] * 3
        assert rank.exists(keys) == 0
        assert rank.query(keys, windows).kv_hit_pages == 0
        rank.store_everywhere(keys)
        assert rank.query(keys, windows).kv_hit_pages == 3
        assert rank.exists(keys) == 3
        assert rank.get(keys, [4, 5, 6]) == [True] * 3

    def test_holes_under_an_anchor_without_bytes(self) -> None:
        """The restorable lengths are exact there too."""
        rank = self.family("DeepSeek-V4")
        windows = FAMILIES["DeepSeek-V4"].windows
        for keys, stored in self.random_patterns(rank, 6, 12, seed=4):
            self.check_query(rank, keys, stored, windows)

    def test_an_anchor_without_bytes_alone_has_no_pages(self) -> None:
        """With no side pool there is nothing to restore, and so nothing to find."""
        rank = self.rank(LogicalPool())
        keys = fresh_keys(2)
        rank.set(keys, [0, 1])
        assert rank.exists(keys) == 0

    # ------------------------------------------------------------------ v1 on a model with side pools

    def test_batch_exists_promises_no_more_than_the_side_pools_can_restore(self) -> None:
        """A decode node asks with batch_exists, without the side pools, and tells prefill that it has the pages: the answer
        must be a length that all of them can restore."""
        rank = self.three_pools()
        for keys, stored in self.random_patterns(rank, 6, 24, seed=33):
            expected = expected_restorable(6, stored, {KV: None, **THREE})
            promised = rank.exists(keys)
            assert promised == 0 or promised in expected, f"{promised} promised, restorable are {expected} of {stored}"

    def test_batch_exists_finds_what_all_pools_have(self) -> None:
        """And what is whole is found that way too."""
        rank = self.three_pools()
        keys = fresh_keys(4)
        rank.store_everywhere(keys[:3])
        assert rank.exists(keys) == 3

    # ------------------------------------------------------------------ ranks

    def test_states_of_mla_models_belong_to_their_rank(self) -> None:
        """MLA pages are the same on every tensor-parallel rank, the Mamba states beside them are not: each rank stores its
        own, and reads its own."""
        pools = [{KV: MLAPool(memory=self.memory), "mamba": StatePool(memory=self.memory)} for _ in range(2)]
        zero, three = (self.rank(dict(pools[i]), tp_rank=3 * i, tp_size=4) for i in range(2))
        keys = fresh_keys(2)
        zero.store(keys)
        assert zero.store_side("mamba", keys) == [True] * 2
        assert three.load_side("mamba", keys) == [False] * 2
        assert three.query(keys, {"mamba": 1}).kv_hit_pages == 0
        assert three.store_side("mamba", keys, generation=1) == [True] * 2
        assert three.query(keys, {"mamba": 1}).kv_hit_pages == 2
        assert zero.load_side("mamba", keys) == [True] * 2
        assert three.load_side("mamba", keys, generation=1) == [True] * 2
        assert three.load(keys) == [True] * 2
        self.covers(family="MLA with Mamba", layout="page_first", shape="TP 4")

    def test_side_pools_that_differ_are_not_shared(self) -> None:
        """What tells two anchors apart tells two side pools apart: their bytes, their shape, their rank."""
        keys = fresh_keys(2)
        ranks = [
            self.rank({KV: self.mha(), "indexer": PagedPool(page_bytes=96, memory=self.memory)}),
            self.rank({KV: self.mha(), "indexer": PagedPool(page_bytes=95, memory=self.memory)}),
            self.rank({KV: self.mha(), "indexer": PagedPool(layers=4, page_bytes=48, memory=self.memory)}),
            self.rank({KV: self.mha(), "indexer": PagedPool(memory=self.memory)}, model_name="another"),
            self.rank({KV: self.mha(), "indexer": PagedPool(memory=self.memory)}, tp_rank=1, tp_size=2),
            self.rank({KV: self.mha(), "indexer": PagedPool(memory=self.memory)}, pp_rank=1, pp_size=2),
        ]
        for generation, rank in enumerate(ranks):
            assert rank.load_side("indexer", keys) == [False] * 2, f"rank {generation} finds another's pages"
            assert rank.store_side("indexer", keys, generation=generation) == [True] * 2
        for generation, rank in enumerate(ranks):
            assert rank.load_side("indexer", keys, generation=generation) == [True] * 2

    def test_side_pools_of_engines_that_are_alike_are_shared(self) -> None:
        """Two engines alike in all that counts share the side pools too."""
        writer, reader = self.three_pools(), self.three_pools()
        keys = fresh_keys(3)
        writer.store_everywhere(keys)
        assert reader.query(keys, THREE).kv_hit_pages == 3
        assert reader.load(keys) == [True] * 3
        for pool in THREE:
            assert reader.load_side(pool, keys) == [True] * 3
