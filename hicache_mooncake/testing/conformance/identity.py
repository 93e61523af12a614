"""Conformance: who shares pages with whom. SGLang's key is a hash of tokens; everything else is the backend's to tell apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hicache_mooncake.testing.conformance.harness import KV, Harness, Rank, fresh_keys
from hicache_mooncake.testing.conformance.host_pools import (
    PAGE_SIZE,
    HostPool,
    MHAPool,
    MHATokenToKVPoolHost,
    MLAPool,
    PagedPool,
    body,
    page_bytes,
    read_page,
)

MakePool = Callable[..., HostPool]


@dataclass(frozen=True)
class Side:
    """One of two ranks that differ: fields of its config, and its pool."""

    config: dict[str, Any]
    pool: MakePool = MHAPool
    shape: tuple[tuple[str, Any], ...] = ()

    def make(self, memory: str) -> HostPool:
        return self.pool(**dict(self.shape), memory=memory)


def _config(one: dict[str, Any], other: dict[str, Any], pool: MakePool = MHAPool) -> tuple[Side, Side]:
    return Side(one, pool), Side(other, pool)


def _pools(pool: MakePool, one: dict[str, Any], other: dict[str, Any]) -> tuple[Side, Side]:
    return Side({}, pool, tuple(one.items())), Side({}, pool, tuple(other.items()))


def _dcp(rank: int, size: int = 2) -> Side:
    config = {"tp_rank": rank, "tp_size": 4, "dcp_rank": rank, "dcp_size": size, "logical_page_size": PAGE_SIZE * size}
    return Side(config, MLAPool, (("dcp_size", size), ("dcp_rank", rank)))


DIFFERENCES: dict[str, tuple[Side, Side]] = {
    "model": _config({"model_name": "a"}, {"model_name": "b"}),
    "model, separators": _config({"model_name": "a/b"}, {"model_name": "a-b"}),
    "tp_rank": _config({"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}),
    "tp_size": _config({"tp_rank": 0, "tp_size": 2}, {"tp_rank": 0, "tp_size": 4}),
    "pp_rank": _config({"pp_rank": 0, "pp_size": 2}, {"pp_rank": 1, "pp_size": 2}),
    "pp_size": _config({"pp_rank": 1, "pp_size": 2}, {"pp_rank": 1, "pp_size": 4}),
    "pp_rank, MLA": _config({"pp_rank": 0, "pp_size": 2}, {"pp_rank": 1, "pp_size": 2}, MLAPool),
    "tp and pp swapped": _config(
        {"tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 2}, {"tp_rank": 0, "tp_size": 2, "pp_rank": 1, "pp_size": 2}
    ),
    "attn_cp_rank": _config({"attn_cp_rank": 0, "attn_cp_size": 2}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
    "attn_cp_rank, MLA": _config({"attn_cp_rank": 0, "attn_cp_size": 2}, {"attn_cp_rank": 1, "attn_cp_size": 2}, MLAPool),
    "attn_cp_size": _config({"attn_cp_rank": 0, "attn_cp_size": 2}, {"attn_cp_rank": 0, "attn_cp_size": 4}),
    "dcp_rank": (_dcp(0), _dcp(1)),
    "dcp_size": (_dcp(0), _dcp(0, 4)),
    "dtype": _pools(MHAPool, {"dtype": torch.bfloat16}, {"dtype": torch.float16}),
    "dtype, half the bytes": _pools(MHAPool, {"dtype": torch.bfloat16}, {"dtype": torch.uint8}),
    "dtype, MLA": _pools(MLAPool, {"dtype": torch.bfloat16}, {"dtype": torch.float16}),
    "layout, direct": _pools(MHAPool, {"layout": "page_first"}, {"layout": "page_first_direct"}),
    "layout, page_head": _pools(MHAPool, {"layout": "page_first"}, {"layout": "page_head"}),
    "layout, layer_first": _pools(MHAPool, {"layout": "page_first"}, {"layout": "layer_first"}),
    "layout, MLA": _pools(MLAPool, {"layout": "page_first"}, {"layout": "page_first_direct"}),
    "layers": _pools(MHAPool, {"layers": 2}, {"layers": 3}),
    "layers, equal bytes": _pools(MHAPool, {"layers": 2, "heads": 4}, {"layers": 4, "heads": 2}),
    "layer range": _pools(MHAPool, {"start_layer": 0}, {"start_layer": 2}),
    "heads": _pools(MHAPool, {"heads": 2}, {"heads": 1}),
    "heads, equal bytes": _pools(MHAPool, {"heads": 2, "head_dim": 8}, {"heads": 4, "head_dim": 4}),
    "page size": _pools(MHAPool, {"page_size": 4}, {"page_size": 8}),
    "page size, equal bytes": _pools(MHAPool, {"page_size": 4, "head_dim": 8}, {"page_size": 8, "head_dim": 4}),
    "kv_cache_dim": _pools(MLAPool, {"kv_cache_dim": 24}, {"kv_cache_dim": 32}),
    "a longer page": _pools(PagedPool, {"page_bytes": 96}, {"page_bytes": 97}),
    "a shorter page": _pools(PagedPool, {"page_bytes": 96}, {"page_bytes": 95}),
    "kind of pool": (Side({}, MHAPool), Side({"is_mla_model": False}, MLAPool, (("kv_cache_dim", 32),))),
}


SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("one rank", {}),
    ("TP 4", {"tp_rank": 3, "tp_size": 4}),
    ("TP 2, PP 2", {"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2}),
    ("TP 2, CP 2", {"tp_rank": 1, "tp_size": 2, "attn_cp_rank": 1, "attn_cp_size": 2}),
)


class IdentityTests(Harness):
    @pytest.mark.parametrize("difference", DIFFERENCES)
    def test_engines_that_differ_never_share(self, difference: str) -> None:
        """Two engines whose pages differ in meaning, length or byte order have no page in common, whatever their tokens:
        each finds its own, and nothing of the other's. Otherwise one computes with the other's bytes."""
        sides = DIFFERENCES[difference]
        keys = fresh_keys(2)
        one, other = (self.rank({KV: side.make(self.memory)}, **({"model_name": self._model} | side.config)) for side in sides)
        assert one.store(keys) == [True] * 2
        assert other.exists(keys) == 0
        assert other.load(keys) == [False] * 2
        assert other.store(keys, generation=1) == [True] * 2
        assert one.load(keys) == [True] * 2
        assert other.load(keys, generation=1) == [True] * 2

    @pytest.mark.parametrize("shape", range(len(SHAPES)), ids=[name for name, _ in SHAPES])
    @pytest.mark.parametrize("make_pool", [MHAPool, MLAPool])
    def test_engines_that_differ_in_nothing_share(self, make_pool: type[MHAPool] | type[MLAPool], shape: int) -> None:
        """Two engines alike in all that counts share every page: otherwise the pool is a cache that nobody reads."""
        name, config = SHAPES[shape]
        writer, reader = (self.rank(make_pool(memory=self.memory), **config) for _ in range(2))
        keys = fresh_keys(3)
        assert writer.store(keys) == [True] * 3
        assert reader.exists(keys) == 3
        assert reader.load(keys, [8, 2, 5]) == [True] * 3
        self.covers(family="MHA" if make_pool is MHAPool else "MLA", layout="page_first", shape=name)

    def test_every_rank_has_its_own_page_under_one_hash(self) -> None:
        """All ranks of a model store under the same hashes at the same time, each its own shard."""
        ranks: list[tuple[Rank, int]] = []
        for tp in range(2):
            for pp in range(2):
                fields = {"tp_rank": tp, "tp_size": 2, "pp_rank": pp, "pp_size": 2}
                ranks.append((self.rank(self.mha(start_layer=2 * pp), **fields), 2 * tp + pp))
        keys = fresh_keys(2)
        for rank, generation in ranks:
            assert rank.store(keys, generation=generation) == [True] * 2
        for rank, generation in ranks:
            assert rank.exists(keys) == 2
            assert rank.load(keys, generation=generation) == [True] * 2

    def test_heads_that_are_split_for_another_tp_size_are_the_right_ones(self) -> None:
        """With `tp_lcm_size` a rank of TP 2 may store its heads apart, so that ranks of TP 4 find theirs. A backend that does
        not is right to refuse or to miss; one that does must deliver the head of that very rank, and to no other rank."""

        def rank(heads: int, tp_rank: int, tp_size: int) -> Rank:
            pool = MHATokenToKVPoolHost("page_head", heads=heads, memory=self.memory)
            return self.rank(pool, tp_rank=tp_rank, tp_size=tp_size, tp_lcm_size=4, should_split_heads=tp_size < 4)

        writer = rank(2, 0, 2)
        keys = fresh_keys(3)
        stored = writer.store(keys)
        assert writer.exists(keys) == (3 if all(stored) else 0)
        shared = []
        for tp_rank in range(3):
            reader = rank(1, tp_rank, 4)
            before = reader.scrambled(KV)
            places = [4, 9, 1]
            verdict = reader.get(keys, places)
            assert tp_rank < 2 or verdict == [False] * 3, "a head of another rank"
            for name, page, loaded in zip(keys, places, verdict, strict=True):
                whole = body(KV, name, page_bytes(writer.anchor))
                head = len(whole) // 4  # of K, and as much of V
                due = b"".join(whole[half * 2 * head :][tp_rank * head : (tp_rank + 1) * head] for half in range(2))
                assert not loaded or read_page(reader.anchor, page) == due, "not the bytes of this rank's head"
            assert [read_page(reader.anchor, page) for page in (0, 2, 3)] == [before[page] for page in (0, 2, 3)]
            shared.append(verdict)
        if shared[:2] == [[True] * 3] * 2:
            self.covers(family="MHA", layout="page_head", shape="TP 2 writes, TP 4 reads (tp_lcm_size)")

    @pytest.mark.parametrize("layout", ["page_first", "layer_first"])
    def test_mla_pages_of_one_rank_are_read_by_all(self, layout: str) -> None:
        """MLA pages are the same on every tensor-parallel rank, and SGLang lets only rank 0 store them: with the rank in the
        key, all others miss."""
        writer = self.rank(MLAPool(layout, memory=self.memory), tp_rank=0, tp_size=4)
        keys = fresh_keys(3)
        assert writer.store(keys) == [True] * 3
        for tp_rank in (1, 3):
            reader = self.rank(MLAPool(layout, memory=self.memory), tp_rank=tp_rank, tp_size=4)
            assert reader.exists(keys) == 3
            assert reader.load(keys, [4, 9, 1]) == [True] * 3
        self.covers(family="MLA", layout=layout, shape="TP 4")

    def test_mla_pages_are_read_under_another_tp_size(self) -> None:
        """A prefill engine with 4 ranks and a decode engine with 8 hold the same MLA pages."""
        writer = self.rank(MLAPool(memory=self.memory), tp_rank=0, tp_size=4)
        reader = self.rank(MLAPool(memory=self.memory), tp_rank=5, tp_size=8)
        keys = fresh_keys(2)
        writer.store(keys)
        assert reader.exists(keys) == 2
        assert reader.load(keys) == [True] * 2
        self.covers(family="MLA", layout="page_first", shape="TP 4 writes, TP 8 reads")

    def test_data_parallel_replicas_share(self) -> None:
        """dp_rank numbers replicas of one model: their pages are the same."""
        writer, reader = self.rank(dp_rank=0), self.rank(dp_rank=1)
        keys = fresh_keys(2)
        writer.store(keys)
        assert reader.exists(keys) == 2
        assert reader.load(keys) == [True] * 2
        self.covers(family="MHA", layout="page_first", shape="DP 2")

    def test_decode_context_parallel_pages_come_back_whole(self) -> None:
        """Under DCP the slots that SGLang passes are logical, several to a physical one, and each rank holds its part of
        every page; ranks of other DCP groups hold the same part."""
        config = {"tp_size": 4, "dcp_size": 2, "logical_page_size": 2 * PAGE_SIZE}
        keys = fresh_keys(3)
        for dcp_rank in range(2):
            ranks = [
                self.rank(
                    MLAPool(dcp_size=2, dcp_rank=dcp_rank, memory=self.memory),
                    tp_rank=2 * group + dcp_rank,
                    dcp_rank=dcp_rank,
                    **config,
                )
                for group in range(2)
            ]
            writer, reader = ranks
            assert writer.store(keys, generation=dcp_rank) == [True] * 3
            assert reader.exists(keys) == 3
            assert reader.load(keys, [9, 3, 15], generation=dcp_rank) == [True] * 3
        self.covers(family="MLA", layout="page_first", shape="TP 4, DCP 2")
