"""Geometry against SGLang's own pools of every family, layout and allocator: every page, every byte."""

from __future__ import annotations

import ast
import ctypes
import itertools
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from hicache_mooncake.client.geometry import (
    GeometryError,
    NoBuffer,
    PoolGeometry,
    of_pool,
    page_numbers,
    replicated,
    run_addresses,
)
from tests.sglang.device_pools import dsa_device
from tests.sglang.families import (
    FAMILIES,
    Family,
    FamilyPool,
    assemble,
    content,
    dcp_ranks,
    engine,
    fill,
    holds,
    page_runs,
    page_tokens,
    pools_of,
    scramble,
    slots,
    usable_pages,
)

CASES = [
    (family, layout, allocator) for family in FAMILIES.values() for layout in family.layouts for allocator in family.allocators
]
IDS = [f"{family.name}-{layout}-{allocator}" for family, layout, allocator in CASES]


def name_of(value: Any) -> str:
    return str(getattr(value, "name", value))


every_case = pytest.mark.parametrize(("family", "layout", "allocator"), CASES, ids=IDS)


def stored(family: Family, layout: str, pools: Sequence[FamilyPool]) -> Iterator[tuple[FamilyPool, PoolGeometry]]:
    """The pools that can be stored, with their geometry; the others are refused for the reason that the family names."""
    for member in pools:
        reason = family.refused.get((layout, member.name))
        if reason is None:
            yield member, of_pool(member.pool, member.name)
            continue
        with pytest.raises(GeometryError, match=reason) as refusal:
            of_pool(member.pool, member.name)
        assert str(refusal.value).startswith(f"pool {member.name} ({type(member.pool).__name__}, layout {layout}): ")


def runs_of(geometry: PoolGeometry, pool: Any, page: int) -> list[tuple[int, int]]:
    """(address, bytes) of a page's runs as a transfer would take them."""
    if geometry.affine:
        return [(run.address + page * run.stride, run.length) for run in geometry.runs]
    addresses = run_addresses(pool, slots(pool, [page]), geometry.runs, 1)
    assert addresses is not None
    return [(address, run.length) for address, run in zip(addresses, geometry.runs, strict=True)]


def histogram(data: torch.Tensor) -> list[int]:
    """How often each byte value occurs."""
    return [int(count) for count in torch.bincount(data, minlength=256)]


@every_case
def test_every_page_is_found_whole_and_apart_from_all_others(family: Family, layout: str, allocator: str) -> None:
    pools = family.build(layout, allocator)
    assert pools[0].name == "kv"
    for member, geometry in stored(family, layout, pools):
        pool = member.pool
        where: list[tuple[int, int]] = []
        for page in usable_pages(pool):
            runs = runs_of(geometry, pool, page)
            assert runs == page_runs(pool, page)
            where += runs
        assert geometry.page_count == pool.size // pool.page_size
        assert len(usable_pages(pool)) == geometry.page_count or not geometry.affine
        where.sort()
        assert all(address + length <= after for (address, length), (after, _) in itertools.pairwise(where))
        for address, length in where:
            holding = [r for r in geometry.regions if r.address <= address and address + length <= r.address + r.length]
            assert len(holding) == 1
        in_memfds = allocator == "shm"
        assert [region.fd for region in geometry.regions] == (
            list(range(len(geometry.fds))) if in_memfds else [-1] * len(geometry.regions)
        )
        assert geometry.affine == (family.name != "unified_envelope")


@every_case
def test_a_page_has_every_byte_that_sglang_copies(family: Family, layout: str, allocator: str) -> None:
    """SGLang's page copy puts back all that the runs hold, and holds no more."""
    copies = 0
    for member, geometry in stored(family, layout, family.build(layout, allocator)):
        pool = member.pool
        if (
            page_tokens(pool) == pool.page_size
        ):  # asserts under decode context parallelism: it asks for a page of this rank's rows
            assert pool.get_page_buffer_element_size() == geometry.runs[0].length
        page, other = usable_pages(pool)[-1], usable_pages(pool)[0]
        fill(pool, page, "page")
        fill(pool, other, "other")
        try:
            copy = pool.get_data_page(page * page_tokens(pool), flat=True).clone()
        except (NotImplementedError, ValueError):
            assert family.name in ("mha_asymmetric", "swa_asymmetric", "mla_kv_split")
            continue
        copies += 1
        assert copy.numel() * copy.element_size() == geometry.body_bytes
        assert histogram(copy.view(torch.uint8)) == histogram(
            torch.frombuffer(bytearray(content(pool, page)), dtype=torch.uint8)
        )
        scramble(pool)
        assert not holds(pool, page, "page")
        pool.set_from_flat_data_page(page * page_tokens(pool), copy)
        assert holds(pool, page, "page")
    assert copies or family.refused or "asymmetric" in family.name or family.name == "mla_kv_split"


@pytest.mark.parametrize(
    ("family", "layout"),
    [(f, layout) for f in FAMILIES.values() for layout in f.layouts if f.name != "page_interleave"],
    ids=name_of,
)
def test_pools_that_share_indices_have_pages_of_the_same_slots(family: Family, layout: str) -> None:
    """What a batch may rely on: one list of host indices names one page each in all pools that follow it."""
    pools = {member.name: member for member in family.build(layout)}
    for member in pools.values():
        source = pools[member.indices_from].pool if member.indices_from else member.pool
        assert page_tokens(member.pool) == page_tokens(source)
        assert member.pool.size // member.pool.page_size >= source.size // source.page_size
        assert replicated(member.pool) is member.replicated_over_tp


@pytest.mark.parametrize(
    ("family", "layout"),
    [(f, layout) for f in FAMILIES.values() for layout in f.unbuildable],
    ids=name_of,
)
def test_layouts_that_sglang_does_not_build(family: Family, layout: str) -> None:
    with pytest.raises((ValueError, AssertionError, NotImplementedError), match=family.unbuildable[layout]):
        family.build(layout)


# --------------------------------------------------------------------------- units, moving pages, ranks


def test_an_indexer_under_decode_context_parallelism_counts_other_slots() -> None:
    """SGLang attaches no storage to such a model: the anchor's indices name pages of 128 slots, the indexer's are of 64."""
    with engine("page_first", "shm", dcp_ranks(0, 2)):
        kv, indexer = pools_of(assemble(dsa_device(2, 24), {ComponentType.FULL}, 128))
    assert of_pool(kv.pool, "kv").page_tokens == 128
    assert of_pool(indexer.pool, "indexer").page_tokens == 64
    assert page_numbers(slots(kv.pool, [0, 1]), 64, 25, expected=2) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_shared_page_has_its_own_part(rank: int) -> None:
    (kv,) = FAMILIES["mla_dcp"].build("page_first", dcp_rank=rank)
    geometry = of_pool(kv.pool, "kv")
    assert (geometry.page_tokens, geometry.page_count) == (32, 25)
    assert geometry.body_bytes == kv.pool.size_per_token * 16
    taken = kv.pool.alloc(3 * 32)
    assert page_numbers(taken, 32, 25, expected=3) == array("q", [0, 1, 2])


def test_indices_that_are_not_whole_pages_in_order_name_none() -> None:
    def numbers(indices: torch.Tensor, expected: int = 2) -> list[int] | None:
        found = page_numbers(indices, 4, 10, expected)
        return None if found is None else list(found)

    whole = torch.cat([torch.arange(20, 24), torch.arange(4, 8)])
    assert numbers(whole) == [5, 1]
    assert numbers(torch.empty(0, dtype=torch.int64), 0) == []
    swapped = whole.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    stray = whole.clone()
    stray[3] = 39
    for wrong in (whole[:-1], whole[:4], whole + 1, whole - 8, whole + 20, swapped, stray):
        assert numbers(wrong) is None
    assert list(page_numbers(torch.tensor([7, 0]), 1, 8, 2) or ()) == [7, 0]
    assert page_numbers(torch.tensor([8, 0]), 1, 8, 2) is None


def test_pages_that_move_are_looked_up_for_every_batch() -> None:
    full, window = FAMILIES["unified_envelope"].build("page_first")
    pool = full.pool
    geometry = of_pool(pool, "kv")
    assert not geometry.affine
    kept = usable_pages(pool)[-1]
    fill(pool, kept, "kept")
    (before,) = runs_of(geometry, pool, kept)
    pool.free(slots(pool, usable_pages(pool)[:-1]))
    window.pool.alloc(window.pool.available_size())  # needs the room of the freed pages in one piece
    (after,) = runs_of(geometry, pool, kept)
    assert before != after
    assert content(pool, kept) == ctypes.string_at(*after)
    assert holds(pool, kept, "kept")
    assert of_pool(pool, "kv") == geometry
    assert of_pool(window.pool, "swa").regions == geometry.regions


SOURCES = [Path(sglang.__file__).parent, *sorted(Path(sys.prefix).glob("sglang-*/sglang"))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_every_host_pool_class_of_a_release_is_known_to_be_replicated_or_not(source: Path) -> None:
    bases: dict[str, list[str]] = {}
    for file in (source / "srt" / "mem_cache").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def made(name: str) -> type:
        return type(name, tuple(made(base) for base in bases.get(name, ())), {})

    derived = {name: made(name) for name in bases if name != "HostKVCache"}
    pools = {name: cls for name, cls in derived.items() if any(base.__name__ == "HostKVCache" for base in cls.mro())}
    assert len(pools) >= 3
    assert {name: replicated(cls()) for name, cls in pools.items() if replicated(cls()) is None} == {}
    sharded = {name for name, cls in pools.items() if not replicated(cls())}
    assert sharded >= {name for name in pools if "MHA" in name or "Mamba" in name}
    assert not {name for name in sharded if "MLA" in name or "DSA" in name or "NSA" in name or "DeepSeek" in name}


def test_a_class_that_is_not_known_is_not_said_to_be_either() -> None:
    assert replicated(SimpleNamespace()) is None
    anchor = SimpleNamespace(host_pool=FAMILIES["mla"].build("page_first")[0].pool)
    assert replicated(SimpleNamespace(anchor_entry=anchor)) is True


# --------------------------------------------------------------------------- pools that contradict themselves


class Parts:
    """A real pool that leaves out of each page what `keep` does not name."""

    def __init__(self, pool: Any, keep: slice) -> None:
        self._pool = pool
        self._keep = keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        runs = len(pointers) * page_tokens(self._pool) // len(indices)
        parts = [range(first, first + runs)[self._keep] for first in range(0, len(pointers), runs)]
        return [pointers[i] for part in parts for i in part], [sizes[i] for part in parts for i in part]


@pytest.mark.parametrize("allocator", ["shm", "default"])
@pytest.mark.parametrize(
    ("family", "layout", "name"),
    [
        ("mha", "layer_first", "kv"),
        ("mha", "page_first", "kv"),
        ("mha_asymmetric", "page_first_direct", "kv"),
        ("mla", "layer_first", "kv"),
        ("mla_dcp", "layer_first", "kv"),
        ("mla_kv_split", "page_first_kv_split", "kv"),
        ("mamba", "page_first", "mamba"),
        ("mamba_convs", "page_first", "mamba"),
        ("minimax_nvfp4", "page_first", "kv"),
        ("deepseek_v4", "layer_first", "swa"),
        ("deepseek_v4", "layer_first", "deepseek_v4_c4_state"),
    ],
)
@pytest.mark.parametrize("keep", [slice(None, -1), slice(1, None)], ids=["the last part", "the first part"])
def test_a_page_without_one_of_its_parts_is_refused(family: str, layout: str, name: str, allocator: str, keep: slice) -> None:
    pool = next(member.pool for member in FAMILIES[family].build(layout, allocator) if member.name == name)
    of_pool(pool, name)
    with pytest.raises(GeometryError, match="a page would not be whole"):
        of_pool(Parts(pool, keep), name)


class Plain:
    """A pool of eight pages of two runs of 512 bytes. In units of that, `place` says where a page has a run, and `buffers` what
    memory the pool names."""

    layout = "plain"
    page_size = 4
    size = 32
    layer_num = 1

    def __init__(
        self, place: Callable[[int, int], int], buffers: Sequence[tuple[int, int]] = ((0, 16),), **answers: Any
    ) -> None:
        self.memory = torch.zeros(40 * 512, dtype=torch.uint8)
        self.kv_buffer = [self.memory[first * 512 : end * 512] for first, end in buffers]
        self.place = place
        self.length: Callable[[int, int], int] = lambda _page, _run: 512
        self.__dict__.update(answers)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        runs = [(int(slot) // 4, run) for slot in indices[::4] for run in (0, 1)]
        start = self.memory.data_ptr()
        return [start + self.place(*run) * 512 for run in runs], [self.length(*run) for run in runs]


def in_order(page: int, run: int) -> int:
    return 2 * page + run


def test_a_pool_of_an_unknown_class_is_known_by_its_answers() -> None:
    pool = Plain(in_order)
    geometry = of_pool(pool, "new")
    assert (geometry.affine, geometry.page_count, geometry.page_tokens, geometry.body_bytes) == (True, 8, 4, 1024)
    assert [r.stride for r in geometry.runs] == [1024, 1024]
    halves = of_pool(Plain(lambda page, run: page + 8 * run), "new")
    assert (halves.affine, [r.stride for r in halves.runs]) == (True, [512, 512])
    backwards = of_pool(Plain(lambda page, run: 15 - page - 8 * run), "new")
    assert (backwards.affine, [r.stride for r in backwards.runs]) == (True, [-512, -512])
    across = of_pool(Plain(lambda page, run: 2 + page + 4 * run, buffers=[(2, 4), (4, 10)], size=16), "new")
    assert (across.affine, len(across.regions)) == (False, 2)
    scattered = Plain(lambda page, run: 2 * (page ^ 2) + run)
    geometry = of_pool(scattered, "new")
    assert (geometry.affine, [r.address for r in geometry.runs]) == (False, [0, 0])
    assert [runs_of(geometry, scattered, page) for page in range(8)] == [page_runs(scattered, page) for page in range(8)]


CONTRADICTIONS: dict[str, tuple[Plain, str]] = {
    "no rows": (Plain(in_order, size=3), "no pages \\(size 3 tokens, page_size 4\\)"),
    "no page size": (Plain(in_order, page_size=None), "no pages"),
    "outside": (Plain(lambda page, run: 2 * page + run + 1), "page 7 lies outside the pool's buffers"),
    "pages overlap": (Plain(lambda page, run: page + run), "runs of pages 0 and 1 overlap"),
    "far pages overlap": (Plain(lambda page, run: page + 5 * run), "runs of different pages overlap"),
    "pages overlap that are not looked at": (
        Plain(
            lambda page, run: 2 * page + 9 * run,
            buffers=[(0, 25)],
            length=lambda page, run: 512 + 488 * run,
        ),
        "runs of different pages overlap",
    ),
    "twice": (Plain(lambda page, run: 2 * page), "runs of pages 0 and 0 overlap"),
    "sizes differ": (
        Plain(in_order, length=lambda page, run: 512 - page // 7),
        "page 7 is .511, 511.",
    ),
    "empty run": (Plain(in_order, length=lambda page, run: 512 * run), "have 2 addresses and 2 sizes"),
    "size per token": (Plain(in_order, size_per_token=257), "gives 1024 bytes of a page that has 1028"),
    "size per layer": (
        Plain(in_order, size_per_token=513, item_bytes=513, layer_num=2),
        "of a page that has 1026",
    ),
    "copy": (Plain(in_order, get_data_page=lambda index, flat: torch.zeros(257)), "gives 1024 bytes of a page that has 1028"),
    "more buffer": (Plain(in_order, buffers=[(0, 40)]), "which in 8 pages leaves some out"),
    "another buffer": (
        Plain(in_order, get_hybrid_pool_buffer=lambda: [torch.zeros(16 * 512, dtype=torch.uint8)]),
        "outside the pool's buffers",
    ),
    "strided buffer": (Plain(in_order, get_hybrid_pool_buffer=lambda: [torch.zeros(4, 4).T]), "is not plain host memory"),
    "slots of other ranks": (Plain(in_order, logical_size=64), "spread over several ranks"),
    "moving, no size": (
        Plain(in_order, shared_allocation_domain=SimpleNamespace()),
        "get_page_buffer_element_size failed",
    ),
    "moving, nowhere": (
        Plain(in_order, shared_allocation_domain=SimpleNamespace(), get_page_buffer_element_size=lambda: 8),
        "its pages move, and it does not say",
    ),
    "no list": (Plain(in_order, get_hybrid_pool_buffer=lambda: 7), "its answers are not understood: TypeError"),
    "raises": (Plain(lambda page, run: 1 // 0), "get_page_buffer_meta failed: ZeroDivisionError"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_pool_that_contradicts_itself_is_refused_with_its_name(what: str) -> None:
    pool, reason = CONTRADICTIONS[what]
    with pytest.raises(GeometryError, match=reason) as refusal:
        of_pool(pool, "odd")
    assert str(refusal.value).startswith("pool odd (Plain, layout plain): ")
    assert not isinstance(refusal.value, NoBuffer)


def test_a_batch_must_be_answered_page_by_page() -> None:
    class RunsFirst(Plain):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
            pointers, sizes = super().get_page_buffer_meta(indices)
            return pointers[::2] + pointers[1::2], sizes

    with pytest.raises(GeometryError, match="answers several pages in another way than one by one"):
        of_pool(RunsFirst(in_order), "odd")


def test_a_buffer_that_no_page_has_a_part_in_is_missed() -> None:
    more = torch.zeros(64, dtype=torch.uint8)
    pool = Plain(in_order)
    pool.__dict__["get_hybrid_pool_buffer"] = lambda: [*pool.kv_buffer, more]
    with pytest.raises(GeometryError, match="a buffer of 64 bytes has 0 bytes in a page"):
        of_pool(pool, "odd")


def test_an_anchor_without_bytes_is_told_apart_from_a_pool_that_cannot_be_stored() -> None:
    anchor = FAMILIES["deepseek_v4"].build("page_first")[0]
    with pytest.raises(NoBuffer, match=r"pool kv \(LogicalHostPool, layout page_first\): no buffer of its own"):
        of_pool(anchor.pool, "kv")


def test_an_answer_that_does_not_fit_the_registered_lengths_is_no_answer() -> None:
    pool = Plain(in_order)
    runs = of_pool(pool, "new").runs
    assert run_addresses(pool, slots(pool, [1, 3]), runs, 3) is None
    assert run_addresses(pool, slots(pool, [1]), runs[:1], 1) is None
    pool.length = lambda page, run: 511
    assert run_addresses(pool, slots(pool, [1]), runs, 1) is None
