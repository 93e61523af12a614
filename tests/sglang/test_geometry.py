"""Geometry against SGLang's own pools of every family, layout and allocator: every page, every byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from hicache_mooncake.client.geometry import (
    GeometryError,
    PoolGeometry,
    of_pool,
    replicated,
    run_addresses,
)
from tests.sglang.families import (
    FAMILIES,
    Family,
    FamilyPool,
    content,
    fill,
    holds,
    page_runs,
    page_tokens,
    scramble,
    slots,
    usable_pages,
)

CASES = [
    (family, layout, allocator) for family in FAMILIES.values() for layout in family.layouts for allocator in family.allocators
]
IDS = [f"{family.name}-{layout}-{allocator}" for family, layout, allocator in CASES]
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


@every_case
def test_pools_that_share_indices_have_pages_of_the_same_slots(family: Family, layout: str, allocator: str) -> None:
    """What a batch may rely on: one list of host indices names one page each in all pools that follow it."""
    if family.name == "page_interleave":
        pytest.skip("no pool of it can be stored")
    pools = {member.name: member for member in family.build(layout, allocator)}
    for member in pools.values():
        source = pools[member.indices_from].pool if member.indices_from else member.pool
        assert page_tokens(member.pool) == page_tokens(source)
        assert member.pool.size // member.pool.page_size >= source.size // source.page_size
        assert replicated(member.pool) is member.replicated_over_tp


@pytest.mark.parametrize(
    ("family", "layout"),
    [(f, layout) for f in FAMILIES.values() for layout in f.unbuildable],
    ids=lambda v: getattr(v, "name", v),
)
def test_layouts_that_sglang_does_not_build(family: Family, layout: str) -> None:
    with pytest.raises((ValueError, AssertionError, NotImplementedError), match=family.unbuildable[layout]):
        family.build(layout)
