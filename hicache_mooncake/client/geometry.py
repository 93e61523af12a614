"""What one page of a host pool is made of, found once at registration and checked.

Most layouts are affine: run r of page i lies at `address_r + i * stride_r`, so a batch names only page numbers. Where a pool
says otherwise, or moves its pages about, every batch carries the address of each run.

A pool is known by what it answers: `get_page_buffer_meta`, `size` and `page_size` (`logical_size` and `logical_page_size` where
ranks share a page), and whatever else it has to say about its buffers and bytes. Only `replicated` knows classes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from hicache_mooncake.protocol import Region, Run

_Runs = list[tuple[int, int]]
"""(address, bytes) each."""


class GeometryError(ValueError):
    """The pool cannot be stored whole; the message names pool, class, layout and reason."""


class NoBuffer(GeometryError):
    """The pool has no bytes of its own: it only numbers pages whose bytes are in other pools (SGLang's logical anchor)."""


@dataclasses.dataclass(frozen=True)
class PoolGeometry:
    """`runs` in body order; `regions` and `fds` are the memory that has to be shared.

    A page is named by `page_tokens` host indices in a row; there are `page_count`. The descriptors belong to the pool's
    allocator. `affine` False: `runs` carry lengths only, and a page's addresses hold for one batch (`run_addresses`).
    """

    pool: str
    runs: tuple[Run, ...]
    page_tokens: int
    page_count: int
    regions: tuple[Region, ...]
    fds: tuple[int, ...]
    affine: bool

    @property
    def body_bytes(self) -> int:
        return sum(run.length for run in self.runs)


def of_pool(pool: Any, name: str) -> PoolGeometry:
    """Geometry of a host pool of SGLang, of any class with `get_page_buffer_meta`. Reads the pool and changes nothing in it.

    Raises GeometryError for a pool that fails or contradicts itself, for pages that differ in size, overlap, or lie outside the
    pool's buffers, and for pages that are less than the whole page by any account that the pool gives of its bytes; NoBuffer
    for a pool that has none. Whether all pages are affine is concluded from the first two, the last and two between.
    """
    examination = _Examination(pool, name)
    try:
        return examination.geometry()
    except GeometryError:
        raise
    except Exception as error:
        raise examination.refusal(f"its answers are not understood: {error!r}") from error


class _Examination:
    def __init__(self, pool: Any, name: str) -> None:
        self.pool = pool
        self.name = name
        self.where = f"pool {name} ({type(pool).__name__}, layout {getattr(pool, 'layout', '?')})"
        rows, page_rows = _integer(pool, "size"), _integer(pool, "page_size")
        self.page_rows = page_rows
        self.page_tokens = _integer(pool, "logical_page_size") or page_rows
        self.page_count = rows // page_rows if page_rows > 0 else 0
        if self.page_count < 1:
            raise self.refusal(f"no pages (size {rows} tokens, page_size {page_rows})")
        slots = _integer(pool, "logical_size") or rows
        if slots // self.page_tokens != self.page_count:
            raise self.refusal(
                f"{slots} slots in pages of {self.page_tokens}, but {rows} rows in pages of {page_rows}: "
                "the pages that host indices name are spread over several ranks"
            )

    def refusal(self, reason: str) -> GeometryError:
        return GeometryError(f"{self.where}: {reason}")

    def geometry(self) -> PoolGeometry:
        arena = getattr(self.pool, "shared_allocation_domain", None)
        return self._fixed() if arena is None else self._moving(arena)

    def _moving(self, arena: Any) -> PoolGeometry:
        """Pages of an arena that is compacted while it serves: only an allocated page has an address, and not for long."""
        try:
            length = int(self.pool.get_page_buffer_element_size() or 0)
        except Exception as error:
            raise self.refusal(f"get_page_buffer_element_size failed: {error!r}") from error
        spans = self._spans([getattr(arena, "raw", None)])
        if length < 1 or not spans:
            raise self.refusal("its pages move, and it does not say how long they are or in which memory")
        self._check_bytes(length, data_page=False)
        shared, fds = self._memfds()
        if not shared or not all(_inside(_of(shared), *span) for span in spans):
            shared, fds = tuple(Region(address, size, -1) for address, size in spans), ()
        return PoolGeometry(self.name, (Run(0, 0, length),), self.page_tokens, self.page_count, shared, fds, affine=False)

    def _fixed(self) -> PoolGeometry:
        last = self.page_count - 1
        pages = {page: self._runs([page]) for page in sorted({0, min(1, last), min(7, last), last // 2, last})}
        first, second = pages[0], pages[min(1, last)]
        lengths = [length for _, length in first]
        for page, runs in pages.items():
            if [length for _, length in runs] != lengths:
                raise self.refusal(f"page 0 is {lengths} bytes, page {page} is {[length for _, length in runs]}")
        order = list(pages)[::-1]
        if self._runs(order) != [run for page in order for run in pages[page]]:
            raise self.refusal("get_page_buffer_meta answers several pages in another way than one by one")
        regions, fds = self._regions(pages)
        self._check_bytes(sum(lengths), data_page=True)
        self._check_apart(pages)
        strides = [b - a for (a, _), (b, _) in zip(first, second, strict=True)]
        spans = _of(regions)
        affine = all(
            [address for address, _ in runs] == [a + page * stride for (a, _), stride in zip(first, strides, strict=True)]
            for page, runs in pages.items()
        ) and all(_inside(spans, *a) == _inside(spans, *b) for a, b in zip(first, pages[last], strict=True))
        if affine:
            self._check_progressions(first, strides)
        return PoolGeometry(
            pool=self.name,
            runs=tuple(Run(a, stride, n) if affine else Run(0, 0, n) for (a, n), stride in zip(first, strides, strict=True)),
            page_tokens=self.page_tokens,
            page_count=self.page_count,
            regions=regions,
            fds=fds,
            affine=affine,
        )

    # ------------------------------------------------------------------ what the pool says

    def _runs(self, pages: Sequence[int]) -> _Runs:
        import torch

        slots = [torch.arange(page * self.page_tokens, (page + 1) * self.page_tokens, dtype=torch.int64) for page in pages]
        try:
            meta = self.pool.get_page_buffer_meta(torch.cat(slots))
        except Exception as error:
            raise self.refusal(f"get_page_buffer_meta failed: {error!r}") from error
        if meta is None:
            raise NoBuffer(f"{self.where}: no buffer of its own (get_page_buffer_meta gave None)")
        pointers, sizes = meta
        if not pointers or len(pointers) != len(sizes) or min(sizes) <= 0:
            raise self.refusal(f"pages {list(pages)} have {len(pointers)} addresses and {len(sizes)} sizes, {sizes[:4]}...")
        return [(int(address), int(size)) for address, size in zip(pointers, sizes, strict=True)]

    def _buffers(self) -> list[Any]:
        """The tensors that the pool names for transfers: each is part of every page."""
        named = self.pool.get_hybrid_pool_buffer() if hasattr(self.pool, "get_hybrid_pool_buffer") else None
        return list(named) if named else _flat(getattr(self.pool, "kv_buffer", None))

    def _spans(self, tensors: Iterable[Any]) -> _Runs:
        spans = []
        for tensor in tensors:
            if tensor is None or tensor.numel() == 0:
                continue
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise self.refusal(f"a buffer on {tensor.device} of strides {tensor.stride()} is not plain host memory")
            spans.append((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
        return spans

    def _memfds(self) -> tuple[tuple[Region, ...], tuple[int, ...]]:
        """Every memfd that the pool's allocator made for it."""
        allocator = getattr(self.pool, "allocator", None)
        shared: list[Region] = []
        fds: list[int] = []
        for fd, mapping in zip(getattr(allocator, "fds", None) or [], getattr(allocator, "mms", None) or [], strict=False):
            if fd is None or fd < 0 or mapping is None:
                continue
            shared.append(Region(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), len(mapping), len(fds)))
            fds.append(fd)
        return tuple(shared), tuple(fds)

    # ------------------------------------------------------------------ what must be true of it

    def _regions(self, pages: dict[int, _Runs]) -> tuple[tuple[Region, ...], tuple[int, ...]]:
        """The memory to share: memfds where they hold every page, else buffers. Every buffer must be in every page."""
        spans = self._spans(self._buffers())
        for name in _MORE_BUFFERS:
            spans += [
                span
                for span in self._spans(_flat(getattr(self.pool, name, None)))
                if not _inside(spans, *span) and any(_inside([span], *run) for run in pages[0])
            ]
        shared, fds = self._memfds()
        runs = [run for page in pages.values() for run in page]
        if not shared or not all(_inside(_of(shared), *run) for run in runs):
            shared, fds = tuple(Region(address, length, -1) for address, length in spans), ()
        for page, parts in pages.items():
            for run in parts:
                if not _inside(_of(shared), *run):
                    raise self.refusal(f"page {page} lies outside the pool's buffers")
        for address, length in {*spans, *_of(shared)}:
            part = sum(size for at, size in pages[0] if address <= at < address + length)
            # A pool may keep a page or two more than it has numbers for, and a mapping is rounded up.
            if part == 0 or length - part * self.page_count > max(2 * part, 4096):
                raise self.refusal(
                    f"a buffer of {length} bytes has {part} bytes in a page, which in {self.page_count} pages leaves some out: "
                    "a page would not be whole"
                )
        return shared, fds

    def _check_bytes(self, body: int, *, data_page: bool) -> None:
        """A page's bytes by the pool's other accounts: its size per token, and the page that it hands out as a copy."""
        per_token = _integer(self.pool, "size_per_token")
        by_layer = per_token in (_integer(self.pool, "item_bytes"), _integer(self.pool, "state_page_bytes"))
        # DeepSeek-V4's pools call the bytes of one layer's page their size per token.
        due = per_token * (_integer(self.pool, "layer_num") if by_layer else self.page_rows)
        if data_page and hasattr(self.pool, "get_data_page"):
            with contextlib.suppress(Exception):  # many pools have no such copy, and say so in many ways
                page = self.pool.get_data_page(0, flat=True)
                due = max(due, page.numel() * page.element_size())
        if body < due:
            raise self.refusal(f"get_page_buffer_meta gives {body} bytes of a page that has {due}: a page would not be whole")

    def _check_apart(self, pages: dict[int, _Runs]) -> None:
        runs = sorted((address, length, page) for page, runs in pages.items() for address, length in runs)
        for (address, length, page), (after, _, other) in itertools.pairwise(runs):
            if address + length > after:
                raise self.refusal(f"runs of pages {page} and {other} overlap")

    def _check_progressions(self, first: _Runs, strides: Sequence[int]) -> None:
        """No two runs of any pages overlap: each run of the first page, repeated at its stride, stays clear of the others.

        Of itself it does by `_check_apart`, which has seen the first two pages.
        """
        tracks = []
        for (address, length), stride in zip(first, strides, strict=True):
            ends = (address, address + (self.page_count - 1) * stride)
            tracks.append((min(ends), max(ends) + length, length, stride))
        tracks.sort()
        for i, (low, high, length, stride) in enumerate(tracks):
            for other_low, _, other_length, other_stride in tracks[i + 1 :]:
                if other_low >= high:
                    break
                between = (other_low - low) % abs(stride) if stride else 0
                if stride != other_stride or between < length or abs(stride) - between < other_length:
                    raise self.refusal("runs of different pages overlap")


_MORE_BUFFERS = ("k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer")
"""Where SGLang's pools keep what they do not name for transfers (Ascend's split of K, V and indexer)."""

_REPLICATED = {
    "MHATokenToKVPoolHost": False,
    "MHATokenToKOnlyPoolHost": False,
    "MiniMaxM3Nvfp4IndexKPoolHost": False,
    "MambaPoolHost": False,
    "QSAIndexerPoolHost": False,
    "UnifiedPageEnvelopeHostPool": False,
    "PageInterleaveHostPool": False,
    "MLATokenToKVPoolHost": True,
    "DSAIndexerPoolHost": True,
    "DeepSeekV4PagedHostPool": True,
    "DeepSeekV4StateHostPool": True,
    "LogicalHostPool": True,
}
"""By the nearest class in a pool's ancestry; see `replicated`."""


def replicated(pool: Any) -> bool | None:
    """Whether all tensor-parallel ranks hold the same bytes in such a pool, where SGLang's storage config says `is_mla_model`.

    That flag speaks of the primary KV pool. Beside it, a model may have pools that each rank has its own part of: Mamba and
    linear-attention states, and the KV of a draft model with ordinary attention. Under decode context parallelism the ranks
    with one `dcp_rank` are meant. None for a class that is not known. By class name, so that nothing of SGLang is imported.
    """
    pool = getattr(getattr(pool, "anchor_entry", None), "host_pool", pool)  # a HostPoolGroup answers for its anchor (0.5.14)
    return next((_REPLICATED[c.__name__] for c in type(pool).__mro__ if c.__name__ in _REPLICATED), None)


def page_numbers(indices: Any, page_tokens: int, page_count: int, expected: int) -> array[int] | None:
    """Page numbers of a 1-D tensor of token slots, one per key; None when it does not name `expected` whole pages in order."""
    if len(indices) != expected * page_tokens:
        return None
    firsts = array("q", indices[::page_tokens].tolist())
    if any(slot % page_tokens or not 0 <= slot // page_tokens < page_count for slot in firsts):
        return None
    if len(indices) > expected and bool((indices.reshape(expected, page_tokens).diff() != 1).any()):
        return None
    return array("q", [slot // page_tokens for slot in firsts])


def run_addresses(pool: Any, indices: Any, runs: Sequence[Run], expected: int) -> array[int] | None:
    """Addresses for a pool that is not affine; None when the pool's answer does not fit the registered lengths.

    They hold for this batch only. Where pages move, the caller must be under SGLang's `layout_lease` until the copy is done;
    SGLang's controller is, around every storage call.
    """
    meta = pool.get_page_buffer_meta(indices)
    if meta is None or len(meta[0]) != expected * len(runs) or list(meta[1]) != [run.length for run in runs] * expected:
        return None
    return array("q", meta[0])


def _integer(pool: Any, name: str) -> int:
    try:
        return operator.index(getattr(pool, name, 0))
    except TypeError:
        return 0


def _flat(buffers: Any) -> list[Any]:
    return list(buffers) if isinstance(buffers, list | tuple) else [buffers]


def _of(regions: Iterable[Region]) -> _Runs:
    return [(region.address, region.length) for region in regions]


def _inside(spans: _Runs, address: int, length: int) -> tuple[int, int] | None:
    """The span that a run lies in as a whole."""
    return next(((at, size) for at, size in spans if at <= address and address + length <= at + size), None)
