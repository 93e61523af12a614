"""Conformance: one pool, whole pages. batch_exists, batch_get_v1, batch_set_v1, or the generic calls in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageExtraInfo

from hicache_mooncake.testing.conformance.harness import Harness, Rank, fresh_keys, key
from hicache_mooncake.testing.conformance.host_pools import (
    LAYOUTS,
    MLA_LAYOUTS,
    HostPool,
    MLAPool,
    PagedPool,
    body,
    page_bytes,
    read_page,
    scramble,
    slots,
    snapshot,
)

ABSTRACT = ("get", "batch_get", "set", "batch_set", "exists")

BAD_KEYS: dict[str, Any] = {
    "empty": "",
    "placeholder": "__placeholder__",
    "short": key("bad")[:-1],
    "long": key("bad") + "0",
    "upper case": key("bad").upper(),
    "no hex": "g" * 64,
    "space": " " + key("bad")[1:],
    "newline": key("bad") + "\n",
    "full-width digits": "\uff11" * 64,
    "a path": "../" + key("bad")[3:],
    "null byte": "\0" * 64,
    "None": None,
    "number": 5,
    "bytes": key("bad").encode(),
}

BAD_INDICES = (
    "misaligned",
    "beyond the pool",
    "negative",
    "one slot short",
    "one slot too many",
    "a page short",
    "not contiguous",
)


def bad_indices(kind: str, pool: HostPool) -> Any:
    """Slots for two keys that are not two whole pages of the pool."""
    size = pool.page_size
    good = slots(pool, [2, 5])
    if kind == "misaligned":
        return good + 1
    if kind == "beyond the pool":
        return slots(pool, [2, pool.page_num])
    if kind == "negative":
        return slots(pool, [2, -1])
    if kind == "one slot short":
        return good[:-1]
    if kind == "one slot too many":
        return torch.cat([good, good[-1:] + 1])
    if kind == "a page short":
        return good[:size]
    torn = good.clone()
    torn[1], torn[size + 1] = good[size + 1], good[1]
    return torn


class PageTests(Harness):
    # ------------------------------------------------------------------ the class

    def test_it_is_a_storage_with_every_abstract_method(self) -> None:
        """The factory takes subclasses of HiCacheStorage only, and an abstract method left over fails at construction, in
        the scheduler of every rank at start."""
        backend = self.unregistered().backend
        assert isinstance(backend, HiCacheStorage)
        for name in ABSTRACT:
            assert getattr(type(backend), name) is not getattr(HiCacheStorage, name), f"{name} is inherited"

    # ------------------------------------------------------------------ bytes

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_mha_pages_come_back_whole_into_other_places(self, layout: str) -> None:
        """A page that is reported loaded has every byte of every part, in the place that was named, and nothing else has
        changed: part of a page, or a neighbour's, is wrong tokens without any error."""
        self.round_trip(self.rank(self.mha(layout)))
        self.covers(family="MHA", layout=layout, shape="one rank")

    @pytest.mark.parametrize("layout", MLA_LAYOUTS)
    def test_mla_pages_come_back_whole_into_other_places(self, layout: str) -> None:
        """The same for the pools of MLA models."""
        self.round_trip(self.rank(MLAPool(layout, memory=self.memory)))
        self.covers(family="MLA", layout=layout, shape="one rank")

    @pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
    def test_k_and_v_of_different_width_come_back_whole(self, layout: str) -> None:
        """The parts of a page need not be of one length: a backend that takes the first length for all reads past the end
        of one and leaves the other's tail stale. Zero copy only: SGLang has no flat pages of such pools."""
        if not self.zero_copy:
            pytest.skip("SGLang has no flat pages of such pools")
        self.round_trip(self.rank(self.mha(layout, head_dim=8, v_head_dim=4)))
        self.covers(family="MHA, K and V of different width", layout=layout, shape="one rank")

    @pytest.mark.parametrize("size", [1, 3, 4095, 4097, (256 << 10) + 1])
    def test_pages_of_any_size_come_back_whole(self, size: int) -> None:
        """No page size is promised, nor an alignment: what is cut into blocks must have the last one right."""
        self.round_trip(self.rank(PagedPool(layers=1, page_bytes=size, memory=self.memory)))

    def round_trip(self, rank: Rank) -> None:
        keys = fresh_keys(5)
        assert rank.exists(keys) == 0
        assert rank.load(keys) == [False] * 5
        assert rank.store(keys) == [True] * 5
        assert rank.exists(keys) == 5
        assert rank.load(keys, [9, 3, 15, 0, 11]) == [True] * 5
        assert rank.load(keys[3:], [4, 3]) == [True] * 2

    def test_the_smallest_batches_and_the_largest(self) -> None:
        """One verdict a key from one page to a full batch of 128: SGLang indexes the list by position, and a short one
        fails the whole batch."""
        rank = self.rank(self.mha(pages=128))
        keys = fresh_keys(128)
        assert rank.store(keys[:1]) == [True]
        assert rank.store(keys) == [True] * 128
        assert rank.load(keys) == [True] * 128
        assert rank.exists(keys) == 128
        assert rank.load(keys[77:78], [3]) == [True]

    def test_a_pool_of_one_page(self) -> None:
        """The geometry of a pool may not be guessed from its second page."""
        rank = self.rank(self.mha(pages=1))
        keys = fresh_keys(1)
        assert rank.store(keys) == [True]
        assert rank.load(keys) == [True]

    def test_empty_lists(self) -> None:
        """Calls without keys answer without verdicts: SGLang makes them, for requests that end on a page boundary."""
        rank = self.rank()
        assert rank.exists([]) == 0
        assert rank.get([], []) == []
        if self.zero_copy:
            assert rank.set([], []) == []

    def test_the_source_is_free_after_the_call(self) -> None:
        """A set has the bytes when it returns: SGLang gives the host pages to another request at once."""
        rank = self.rank()
        keys = fresh_keys(3)
        rank.store(keys)
        scramble(rank.anchor)
        other = fresh_keys(3)
        rank.store(other)
        assert rank.load(keys, [7, 8, 9]) == [True] * 3
        assert rank.load(other, [7, 8, 9]) == [True] * 3

    def test_a_set_changes_nothing_in_the_engine(self) -> None:
        """Host pages and index tensors are SGLang's: the indices are views of its free list."""
        rank = self.rank()
        keys = fresh_keys(3)
        rank.fill(rank.anchor_name, keys, [1, 2, 3])
        before = snapshot(rank.anchor)
        indices = slots(rank.anchor, [1, 2, 3])
        given = indices.clone()
        if self.zero_copy:
            rank.backend.batch_set_v1(keys, indices)
            rank.backend.batch_get_v1([key("absent")], indices[: rank.anchor.page_size])
        else:
            rank.set(keys, [1, 2, 3])
        assert torch.equal(indices, given)
        assert snapshot(rank.anchor)[4:] == before[4:]
        assert read_page(rank.anchor, 2) == before[2]

    # ------------------------------------------------------------------ lookups

    def test_a_hole_ends_the_prefix(self) -> None:
        """batch_exists counts the leading pages that are there, and no page after the first that is not: SGLang takes the
        number for a prefix. A get still has one verdict a page."""
        rank = self.rank()
        for hole in range(6):
            keys = fresh_keys(6)
            there = [i for i in range(6) if i != hole]
            assert rank.store([keys[i] for i in there], there) == [True] * 5
            assert rank.exists(keys) == hole
            verdict = rank.load(keys)
            assert verdict[: hole + 1] == [True] * hole + [False]

    def test_never_more_hits_than_keys(self) -> None:
        """Whatever else is stored, the answer lies between 0 and the number of keys: more overruns SGLang's hash list."""
        rank = self.rank()
        keys = fresh_keys(8)
        rank.store(keys)
        for count in range(9):
            assert rank.exists(keys[:count]) == count
        assert rank.exists(keys[:1] * 3) == 3

    def test_a_long_chain_in_one_lookup(self) -> None:
        """A lookup has the whole chain at once, with page_size 1 some 100,000 keys."""
        rank = self.rank()
        keys = fresh_keys(4)
        rank.store(keys)
        assert rank.exists(keys + [key(("long", i)) for i in range(100_000)]) == 4

    def test_absent_keys_are_plain_misses(self) -> None:
        """A get may come without a lookup: SGLang skips it when it believes the pages stored."""
        rank = self.rank()
        keys = fresh_keys(4)
        rank.store(keys[:1])
        assert rank.load([keys[0], *keys[2:]]) == [True, False, False]

    def test_the_prefix_hint_changes_no_answer(self) -> None:
        """extra_info.prefix_keys is a hint: with it, without it, and with what 0.5.9 passes by default, the pages are the
        same."""
        rank = self.rank()
        keys = fresh_keys(4)
        rank.store(keys)
        hints: list[Any] = [
            None,
            HiCacheStorageExtraInfo(),
            HiCacheStorageExtraInfo(prefix_keys=None),
            HiCacheStorageExtraInfo(prefix_keys=fresh_keys(3)),
            HiCacheStorageExtraInfo(prefix_keys=keys[:2], extra_info={"anything": 1}),
        ]
        for hint in hints:
            assert rank.backend.batch_exists(keys, hint) == 4
            if self.zero_copy:
                assert rank.backend.batch_set_v1(keys, slots(rank.anchor, range(4)), hint) == [True] * 4
                assert rank.backend.batch_get_v1(keys, slots(rank.anchor, range(4)), hint) == [True] * 4

    # ------------------------------------------------------------------ what is stored twice, again, anew

    def test_a_page_that_is_there_is_stored(self) -> None:
        """True means that the pool holds the page, not that it was new: one False ends the backup of the whole node."""
        rank = self.rank()
        keys = fresh_keys(3)
        assert rank.store(keys[:2]) == [True] * 2
        assert rank.store(keys) == [True] * 3
        assert rank.load(keys) == [True] * 3

    def test_a_key_twice_in_one_batch(self) -> None:
        """Two requests may bring the same page in one batch."""
        rank = self.rank()
        (name,) = fresh_keys(1)
        assert rank.store([name, name]) == [True] * 2
        assert rank.load([name, name], [5, 6]) == [True] * 2
        assert read_page(rank.anchor, 5) == body(rank.anchor_name, name, page_bytes(rank.anchor))

    def test_a_new_engine_finds_what_the_last_one_stored(self) -> None:
        """The cache outlives its engines: detach, attach, restart."""
        first = self.rank()
        keys = fresh_keys(3)
        first.store(keys)
        first.close()
        second = self.rank()
        assert second.exists(keys) == 3
        assert second.load(keys) == [True] * 3

    def test_clear_forgets_every_page(self) -> None:
        """After clear nothing is found, and what is stored then is what is found: no older page comes back."""
        rank = self.rank()
        keys = fresh_keys(4)
        rank.store(keys)
        rank.backend.clear()
        assert rank.exists(keys) == 0
        assert rank.load(keys) == [False] * 4
        assert rank.store(keys[:2], generation=1) == [True] * 2
        assert rank.exists(keys) == 2
        assert rank.load(keys, generation=1)[:2] == [True] * 2

    def test_clear_leaves_other_models_alone(self) -> None:
        """SGLang calls clear on every rank, from an endpoint that needs no key and when a node changes its role: it must not
        empty the cache of everybody else."""
        ours, theirs = self.rank(), self.rank(model_name="another")
        keys = fresh_keys(3)
        ours.store(keys)
        theirs.store(keys, generation=1)
        ours.backend.clear()
        assert ours.exists(keys) == 0
        assert theirs.exists(keys) == 3
        assert theirs.load(keys, generation=1) == [True] * 3

    # ------------------------------------------------------------------ bad input

    def test_a_bad_key_gets_a_verdict_and_its_neighbours_theirs(self) -> None:
        """What is no page hash names no page: it is not stored, since the next one with the same fault would find it, and
        the other keys of the batch are as good as ever."""
        if not self.zero_copy:
            pytest.skip("the generic batch_set has one verdict for all")
        rank = self.rank()
        for bad in BAD_KEYS.values():
            good = fresh_keys(2)
            keys = [good[0], bad, good[1]]
            names = [str(name) for name in keys]
            rank.fill(rank.anchor_name, names, range(3))
            assert rank.set(keys, range(3)) == [True, False, True], f"storing beside the key {bad!r}"
            assert rank.exists(keys) == 1, f"looking up beside the key {bad!r}"
            assert rank.exists(good) == 2
            before = rank.scrambled(rank.anchor_name)
            verdict = rank.get(keys, [4, 5, 6])
            assert verdict == [True, False, True], f"loading beside the key {bad!r}"
            rank.compare(rank.anchor_name, names, [4, 5, 6], verdict, before, 0)

    def test_a_key_that_only_resembles_a_stored_one_is_a_miss(self) -> None:
        """Keys are compared whole."""
        rank = self.rank()
        (name,) = fresh_keys(1)
        rank.store([name])
        flipped = name[:-1] + ("0" if name[-1] != "0" else "1")
        for other in (flipped, name[::-1], name[1:] + name[0], name[:-1], name + "0", name[:32], name.upper() + " "):
            assert rank.exists([other]) == 0, other
            if self.zero_copy:
                assert rank.get([other], [3]) == [False], other

    def test_indices_that_are_no_whole_pages_move_no_byte(self) -> None:
        """host_indices are whole, aligned pages of the pool, one a key. With anything else a backend that trusts them reads
        or writes somebody else's tokens, or memory that is no pool's."""
        if not self.zero_copy:
            pytest.skip("the generic path has no indices")
        rank = self.rank()
        for kind in BAD_INDICES:
            keys = fresh_keys(2)
            rank.store(keys, [2, 5])
            before = rank.scrambled(rank.anchor_name)
            assert rank.backend.batch_get_v1(keys, bad_indices(kind, rank.anchor)) == [False] * 2, f"loading: {kind}"
            assert snapshot(rank.anchor) == before, f"loading: {kind}"
            other = fresh_keys(2)
            assert rank.backend.batch_set_v1(other, bad_indices(kind, rank.anchor)) == [False] * 2, f"storing: {kind}"
            assert rank.exists(other) == 0
            assert rank.exists(other[1:]) == 0
            assert rank.load(keys) == [True] * 2

    def test_indices_in_a_strided_tensor(self) -> None:
        """The tensor itself may be a view with any stride; only its values count."""
        if not self.zero_copy:
            pytest.skip("the generic path has no indices")
        rank = self.rank()
        keys = fresh_keys(2)
        rank.fill(rank.anchor_name, keys, [2, 5])
        indices = torch.stack([slots(rank.anchor, [2, 5]), slots(rank.anchor, [8, 9])], dim=1)[:, 0]
        assert not indices.is_contiguous()
        assert rank.backend.batch_set_v1(keys, indices) == [True] * 2
        assert rank.load(keys, [2, 5]) == [True] * 2
