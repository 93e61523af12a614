"""Which prefill and decode engines can never find each other's pages, and in what they differ: the comparison, without I/O."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
import pytest

from hicache_mooncake.keys import Namespace
from hicache_mooncake.protocol import PoolIdentity, RankIdentity, Unshared
from hicache_mooncake.sharing import (
    BIGRAMS,
    DECODE,
    EVERY_S,
    MAX_KINDS,
    MAX_RANK_BYTES,
    MAX_RANKS,
    MAX_RANKS_OF_SOURCE,
    MAX_UNSHARED,
    OFFLOAD,
    PLAIN,
    PREFILL,
    SETTLED_S,
    TREE,
    SharingTable,
    clip,
    sentence,
    told,
)

BASE = Namespace(
    model="tiny",
    model_id="f00d",
    family="MHATokenToKVPoolHost",
    dtype="torch.bfloat16",
    layout="page_first",
    page_size=64,
    layers=4,
    start_layer=0,
    end_layer=4,
    target_layers=4,
    heads=2,
    head_dim=64,
    v_head_dim=64,
    details=("platform=cuda",),
    run_bytes=(65536, 65536),
    tp_rank=0,
    tp_size=1,
)


def identity(pool: str, *parts: Namespace) -> PoolIdentity:
    return PoolIdentity(pool, [part.digest() for part in parts], parts[0].described())


def engine(
    name: str,
    role: str,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    writer: str = TREE,
    chain: str = PLAIN,
    sides: tuple[str, ...] = (),
    **fields: Any,
) -> list[RankIdentity]:
    """An engine's ranks, as their backends describe themselves. `fields`: of the namespace."""
    ranks = []
    for t, q, c in ((t, q, c) for t in range(tp) for q in range(pp) for c in range(cp)):
        layers = fields.get("layers", 4) // pp
        own = dataclasses.replace(BASE, **fields)
        own = dataclasses.replace(
            own,
            tp_rank=t,
            tp_size=tp,
            pp_rank=q,
            pp_size=pp,
            cp_rank=c,
            cp_size=cp,
            layers=layers,
            start_layer=q * layers,
            end_layer=(q + 1) * layers,
            heads=max(1, (own.heads or 2) // tp),
        )
        pools = [identity("kv", own)] + [identity(side, dataclasses.replace(own, pool=side)) for side in sides]
        size = (tp, pp, cp)
        ranks.append(RankIdentity(name.encode(), f"{role} engine {name}", role, writer, chain, (t, q, c), size, pools, "1"))
    return ranks


class Table:
    """With a clock, validated after everything that happens to it."""

    def __init__(self) -> None:
        self.table = SharingTable()
        self.now = 100.0

    def put(self, source: str, ranks: list[RankIdentity]) -> None:
        self.table.put(source, ranks, self.now)
        self.table.validate()

    def drop(self, source: str) -> None:
        self.table.drop(source, self.now)
        self.table.validate()

    def settled(self) -> list[Unshared]:
        self.now += SETTLED_S
        return self.look()

    def look(self) -> list[Unshared]:
        self.now += EVERY_S
        found = list(self.table.verdict(self.now).unshared)
        self.table.validate()
        return found


def compared(prefill: list[RankIdentity], decode: list[RankIdentity]) -> list[tuple[str, str, str]] | None:
    """How a prefill and a decode engine differ, None where they share."""
    table = Table()
    table.put("host-p", prefill)
    table.put("host-d", decode)
    found = table.settled()
    assert len(found) <= 1
    assert table.table.verdict(table.now).engines == ({b"p", b"d"} if found else set())
    return found[0].differences if found else None


def test_two_sides_that_are_alike_share() -> None:
    assert compared(engine("p", PREFILL, tp=2), engine("d", DECODE, tp=2)) is None
    assert compared(engine("p", PREFILL, tp=2), engine("d", DECODE, tp=2, writer=OFFLOAD)) is None


DIFFERENT: dict[str, tuple[dict[str, Any], list[tuple[str, str, str]]]] = {
    "served name": ({"model": "/models/tiny"}, [("model", "tiny", "/models/tiny")]),
    "checkpoint": ({"model_id": "beef"}, [("model_id", "f00d", "beef")]),
    "weights": ({"weight_version": "2"}, [("weight_version", "", "2")]),
    "tag": ({"tag": "canary"}, [("tag", "", "canary")]),
    "tenant": ({"tenant": "b"}, [("tenant", "", "b")]),
    "dtype": ({"dtype": "torch.float16"}, [("dtype", "torch.bfloat16", "torch.float16")]),
    "fp8 of another kind": (
        {"details": ("platform=cuda", "kv_cache_dtype=fp8_e4m3")},
        [("kv_cache_dtype", "", "fp8_e4m3")],
    ),
    "platform": ({"details": ("platform=hip",)}, [("platform", "cuda", "hip")]),
    "layout": ({"layout": "page_first_direct"}, [("layout", "page_first", "page_first_direct")]),
    "page size, and with it the length": (
        {"page_size": 16, "run_bytes": (16384, 16384)},
        [("page_size", "64", "16")],
    ),
    "form": ({"storage_format": "+data_page"}, [("storage_format", "", "+data_page")]),
    "length alone": ({"run_bytes": (1, 1)}, [("run_bytes", "65536+65536", "1+1")]),
    "tensor parallel": ({"tp": 2}, [("tp_size", "1", "2")]),
    "pipeline": ({"pp": 2}, [("pp_size", "1", "2")]),
    "context parallel": ({"cp": 2}, [("cp_size", "1", "2")]),
    "decode context parallel": ({"dcp_size": 2, "dcp_rank": 1}, [("dcp_size", "1", "2")]),
    "a draft packed into the pages": (
        {"layers": 5, "target_layers": 4, "details": ("platform=cuda", "draft=abc")},
        [("layers", "4", "5"), ("draft", "", "abc")],
    ),
    "several at once": (
        {"page_size": 16, "tp": 2, "model": "other"},
        [("model", "tiny", "other"), ("page_size", "64", "16"), ("tp_size", "1", "2")],
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_field_that_differs_is_named_with_both_values(what: str) -> None:
    fields, expected = DIFFERENT[what]
    found = compared(engine("p", PREFILL), engine("d", DECODE, **fields))
    assert found == expected


def test_every_field_of_a_namespace_is_noticed() -> None:
    """Also one that comes later: two that differ in it never share, and it is named or stands behind one that is."""
    for name in {field.name for field in dataclasses.fields(Namespace)} - {"pool"}:
        before = getattr(BASE, name)
        other: Any = {str: "x", int: 7, tuple: ("a=b",) if name == "details" else (7,), type(None): 7}[type(before)]
        if name == "head_range":
            other = (0, 1, 8)
        changed = dataclasses.replace(BASE, **{name: other})
        mine, theirs = engine("p", PREFILL), engine("d", DECODE)
        theirs[0].pools = [identity("kv", changed)]
        found = compared(mine, theirs)
        assert found, name
        assert found[0][0] != "version", f"{name} is noticed and not named"


def test_eagle_beside_decode_offload_is_named() -> None:
    prefill = engine("p", PREFILL, chain=BIGRAMS)
    found = compared(prefill, engine("d", DECODE, writer=OFFLOAD))
    assert found == [("chain", "bigrams", "plain")]
    assert compared(prefill, engine("d", DECODE, chain=BIGRAMS)) is None
    assert compared(engine("p", PREFILL), engine("d", DECODE, chain=BIGRAMS)) == [("chain", "plain", "bigrams")]


def test_offload_lacks_the_side_pools_that_prefill_needs() -> None:
    prefill = engine("p", PREFILL, sides=("indexer",))
    assert compared(prefill, engine("d", DECODE, writer=OFFLOAD)) == [("pools", "indexer, kv", "kv")]
    assert compared(prefill, engine("d", DECODE, sides=("indexer",))) is None


def test_a_side_pool_that_only_a_reading_decode_engine_has_matters_to_that_one() -> None:
    decode = engine("d", DECODE, sides=("draft",))
    assert compared(engine("p", PREFILL), decode) == [("pools", "kv", "draft, kv")]
    writes_alone = [msgspec.structs.replace(rank, writer=OFFLOAD) for rank in decode]
    assert compared(engine("p", PREFILL), writes_alone) is None


def test_a_side_pool_that_differs_is_named_with_its_pool() -> None:
    mine, theirs = engine("p", PREFILL, sides=("swa",)), engine("d", DECODE, sides=("swa",))
    theirs[0].pools[1] = identity("swa", dataclasses.replace(BASE, pool="swa", heads=4))
    assert compared(mine, theirs) == [("swa.heads", "2", "4")]


def heads(name: str, role: str, tp: int, total: int = 8, each: int = 1) -> list[RankIdentity]:
    """With share_across_tp: every head an object, as any tensor-parallel size and layout stores it."""
    ranks = engine(name, role, tp=tp)
    held = max(1, total // tp)
    for t, rank in enumerate(ranks):
        first = t * total // tp
        parts = [
            dataclasses.replace(
                BASE, layout="heads", heads=each, head_range=(at, at + each, total), tp_rank=None, tp_size=None, run_bytes=(9,)
            )
            for at in range(first, first + held, each)
        ]
        rank.pools = [identity("kv", *parts)]
    return ranks


def test_tensor_parallel_sizes_that_share_head_by_head_are_no_problem() -> None:
    assert compared(heads("p", PREFILL, 2), heads("d", DECODE, 4)) is None
    assert compared(heads("p", PREFILL, 16), heads("d", DECODE, 4)) is None, "more ranks than heads"


def test_sharing_head_by_head_on_one_side_only_is_the_one_thing_that_is_named() -> None:
    assert compared(heads("p", PREFILL, 2), engine("d", DECODE, tp=4)) == [("share_across_tp", "true", "")]


def test_another_number_of_heads_in_all_is_named() -> None:
    assert compared(heads("p", PREFILL, 2), heads("d", DECODE, 2, total=4)) == [("kv_heads", "8", "4")]


def mla(name: str, role: str, tp: int) -> list[RankIdentity]:
    ranks = engine(name, role, tp=tp)
    for rank in ranks:
        rank.pools = [identity("kv", dataclasses.replace(BASE, tp_rank=None, tp_size=None, heads=1))]
    return ranks


def test_pages_that_all_ranks_hold_alike_share_across_sizes() -> None:
    assert compared(mla("p", PREFILL, 8), mla("d", DECODE, 2)) is None


# --------------------------------------------------------------------------- who is compared with whom


def test_an_engine_with_one_partner_is_fine_whatever_the_others_are() -> None:
    table = Table()
    table.put("1", engine("p", PREFILL))
    table.put("2", engine("d", DECODE))
    table.put("3", engine("d2", DECODE))
    assert table.settled() == []


def test_the_second_prefill_that_is_unlike_all_others_is_named() -> None:
    table = Table()
    table.put("1", engine("p", PREFILL))
    table.put("2", engine("d", DECODE))
    table.put("3", engine("p2", PREFILL, page_size=16))
    (pair,) = table.settled()
    assert (pair.prefill, pair.decode) == (b"p2", b"d")
    assert pair.differences == [("page_size", "16", "64")]
    assert table.table.verdict(table.now).engines == {b"p2"}


def test_the_nearest_engine_is_the_one_compared_with() -> None:
    table = Table()
    table.put("1", engine("far", PREFILL, tp=2, page_size=16, layout="page_head"))
    table.put("2", engine("near", PREFILL, tp=2))
    table.put("3", engine("d", DECODE, tp=4))
    pairs = table.settled()
    assert [pair.differences for pair in pairs if pair.prefill == b"near"] == [[("tp_size", "2", "4")]]
    assert {(pair.prefill, pair.decode) for pair in pairs} == {(b"near", b"d"), (b"far", b"d")}
    assert table.table.verdict(table.now).engines == {b"near", b"far", b"d"}


def test_two_clusters_under_one_master_are_not_mixed_up() -> None:
    table = Table()
    table.put("1", engine("p-a", PREFILL))
    table.put("2", engine("d-a", DECODE))
    table.put("3", engine("d-b", DECODE, model="other", model_id="beef"))
    assert table.settled() == [], "the prefill engine of the other model has its decode engine, and is not meant"
    table.put("4", engine("p-b", PREFILL, model="other", model_id="beef", page_size=16))
    (pair,) = table.settled()
    assert (pair.prefill, pair.decode, pair.differences) == (b"p-b", b"d-b", [("page_size", "16", "64")])


def test_names_that_differ_are_found_where_both_sides_are_alone() -> None:
    found = compared(engine("p", PREFILL, model="a", model_id="1"), engine("d", DECODE, model="b", model_id="2"))
    assert found == [("model", "a", "b"), ("model_id", "1", "2")]


def test_engines_that_serve_both_are_not_compared() -> None:
    table = Table()
    table.put("1", engine("one", ""))
    table.put("2", engine("d", DECODE, page_size=16))
    assert table.settled() == []
    assert table.table.roles() == {"both": 1, "decode": 1}


# --------------------------------------------------------------------------- coming and going


def test_nothing_is_said_of_engines_that_are_still_starting() -> None:
    table = Table()
    table.put("1", engine("p", PREFILL, tp=2))
    ranks = engine("d", DECODE, tp=2, page_size=16)
    table.put("2", ranks[:1])
    assert table.settled() == [], "a rank is missing"
    table.put("2", ranks)
    assert table.look() == []
    table.now += SETTLED_S - 3 * EVERY_S
    assert table.look() == []
    table.now += EVERY_S
    assert len(table.look()) == 1


def test_ranks_of_one_engine_may_be_on_several_hosts() -> None:
    table = Table()
    for side, ranks in (("p", engine("p", PREFILL, tp=4)), ("d", engine("d", DECODE, tp=4, page_size=16))):
        table.put(f"{side}1", ranks[:2])
        table.put(f"{side}2", ranks[2:])
    (pair,) = table.settled()
    assert pair.differences == [("page_size", "64", "16")]
    table.drop("d2")
    assert table.look() == [], "half an engine is not judged"


def test_leaving_ends_it_and_coming_back_begins_it_anew() -> None:
    table = Table()
    table.put("1", engine("p", PREFILL))
    table.put("2", engine("d", DECODE, page_size=16))
    assert len(table.settled()) == 1
    table.drop("2")
    assert table.look() == []
    table.put("2", engine("d", DECODE))
    assert table.settled() == []
    table.put("2", engine("d", DECODE, page_size=16))
    assert table.look() == []
    assert len(table.settled()) == 1


def test_saying_the_same_again_changes_nothing() -> None:
    """Ranks say who they are all the time, with new counts."""
    table = Table()
    table.put("1", engine("p", PREFILL))
    table.put("2", engine("d", DECODE, page_size=16))
    assert len(table.settled()) == 1
    again = [msgspec.structs.replace(rank, counts={"stored": 7}) for rank in engine("d", DECODE, page_size=16)]
    table.put("2", again)
    assert len(table.look()) == 1


def test_a_rank_that_is_off_is_not_judged() -> None:
    table = Table()
    table.put("1", engine("p", PREFILL))
    off = [msgspec.structs.replace(rank, off="the weights are being updated") for rank in engine("d", DECODE, page_size=16)]
    table.put("2", off)
    assert table.settled() == []


# --------------------------------------------------------------------------- bounds


def test_what_is_told_is_bounded() -> None:
    table = Table()
    for source in range(MAX_RANKS // MAX_RANKS_OF_SOURCE + 3):
        ranks = [engine(f"{source} {n}", DECODE, page_size=n)[0] for n in range(MAX_RANKS_OF_SOURCE + 5)]
        table.put(str(source), ranks)
    assert len(table.table.ranks()) == MAX_RANKS
    assert "0" not in table.table.sources(), "the oldest goes"
    assert table.table.sources()[-1] == str(source)
    table.put("p", [engine(f"p {n}", PREFILL, page_size=1000 + n)[0] for n in range(MAX_RANKS_OF_SOURCE)])
    assert len(table.settled()) == MAX_UNSHARED
    alone = [name.decode().split() for name in table.table.verdict(table.now).engines]
    assert len({number for side, number in alone if side == "p"}) == MAX_KINDS
    assert len({number for side, number in alone if side != "p"}) == MAX_KINDS


def test_a_rank_that_says_too_much_is_cut_or_left_out() -> None:
    (rank,) = engine("d", DECODE)
    assert clip(rank) == rank
    rank.pools[0].fields = {str(n): "x" * 100 for n in range(1000)}
    cut = clip(rank)
    assert cut is not None
    assert cut.pools[0].namespaces == rank.pools[0].namespaces
    assert cut.pools[0].fields == {}
    rank.pools[0].namespaces = [bytes(16)] * MAX_RANK_BYTES
    assert clip(rank) is None
    table = Table()
    table.put("1", [rank])
    assert table.table.ranks() == []


def test_without_fields_a_difference_is_still_found() -> None:
    mine, theirs = engine("p", PREFILL), engine("d", DECODE, page_size=16)
    for rank in (*mine, *theirs):
        rank.pools[0].fields = {}
    assert compared(mine, theirs) == [("version", "1", "1")]


def test_a_master_is_told_nothing_that_changes_all_the_time() -> None:
    (rank,) = engine("d", DECODE)
    assert told(msgspec.structs.replace(rank, flags={"a": "b"}, counts={"stored": 1})) == rank


def test_the_sentence_says_what_to_change_on_which_side() -> None:
    table = Table()
    table.put("1", engine("p", PREFILL))
    table.put("2", engine("d", DECODE, page_size=16, tenant="b"))
    (pair,) = table.settled()
    text = sentence(pair)
    assert text.startswith("prefill engine p and decode engine d never find each other's pages")
    assert "page_size is 64 in prefill and 16 in decode (start both sides with the same --page-size)" in text
    assert "tenant is not set in prefill and b in decode" in text


def test_random_comings_and_goings_leave_no_trace() -> None:
    rng = random.Random(7)
    table = Table()
    for _ in range(400):
        source = str(rng.randrange(6))
        if rng.random() < 0.3:
            table.drop(source)
        else:
            role = rng.choice((PREFILL, DECODE, ""))
            ranks = engine(f"e{rng.randrange(4)}", role, tp=rng.choice((1, 2)), page_size=rng.choice((16, 64)))
            table.put(source, rng.sample(ranks, rng.randint(0, len(ranks))))
        table.now += rng.random() * SETTLED_S
        for pair in table.look():
            assert pair.differences
    for source in table.table.sources():
        table.drop(source)
    assert table.look() == []
    assert table.table.roles() == {}
