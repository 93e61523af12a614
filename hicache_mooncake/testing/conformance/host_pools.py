"""Host pools for the conformance suite: the public accessors and the byte geometry of SGLang's, in a few kilobytes.

SGLang's own pools need device pools, and their constructors change with every release. A storage backend sees a pool only
through the accessors that are here, and those have been the same since 0.5.9.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from hicache_mooncake.testing.local import pattern

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = LAYOUTS[:3]

PAGE_SIZE = 4
"""Tokens a page of the pools here."""
PAGES = 16


class PlainAllocator:
    """Anonymous memory of this process, as SGLang's default allocator gives."""

    def allocate(self, dims: Sequence[int], dtype: Any) -> Any:
        return torch.zeros(tuple(dims), dtype=dtype)

    def close(self) -> None:
        pass


class MemfdAllocator:
    """Memory in a memfd, with the attributes of SGLang's `ShmHostTensorAllocator`: `fds` and `mms`, one entry an allocation.

    The descriptors are the allocator's, until `close`. The mappings live as long as a tensor over them.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.mms: list[mmap.mmap] = []

    def allocate(self, dims: Sequence[int], dtype: Any) -> Any:
        elements = 1
        for dim in dims:
            elements *= dim
        length = max(1, elements * dtype.itemsize)
        fd = os.memfd_create("conformance-pool", os.MFD_CLOEXEC)
        os.ftruncate(fd, length)
        mapping = mmap.mmap(fd, length)
        self.fds.append(fd)
        self.mms.append(mapping)
        return torch.frombuffer(mapping, dtype=torch.uint8)[: elements * dtype.itemsize].view(dtype).view(tuple(dims))

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.mms.clear()


ALLOCATORS = {"anonymous": PlainAllocator, "memfd": MemfdAllocator}


class HostPool:
    """What all host pools have. Slots are tokens; page i is slots [i * page_size, (i + 1) * page_size).

    `memory` says where the buffers lie: "anonymous" or "memfd". `page_size` is physical; with `dcp_size` above 1 the slots
    that SGLang passes are logical, `dcp_size` to a physical one. Not thread-safe.
    """

    device = "cpu"
    pin_memory = False
    storage_format_tag = None
    start_layer = 0
    dcp_size = 1
    dcp_rank = 0
    layer_num = 1
    kv_buffer: Any = None

    def __init__(self, layout: str, dtype: Any, *, page_size: int = PAGE_SIZE, pages: int = PAGES, memory: str = "anonymous"):
        self.layout = layout
        self.dtype = dtype
        self.page_size = page_size
        self.page_num = pages
        self.size = pages * page_size
        self.allocator: Any = ALLOCATORS[memory]()

    @property
    def end_layer(self) -> int:
        return self.start_layer + self.layer_num

    @property
    def target_layer_num(self) -> int:
        return self.layer_num

    @property
    def logical_size(self) -> int:
        return self.size * self.dcp_size

    @property
    def logical_page_size(self) -> int:
        return self.page_size * self.dcp_size

    def buffers(self) -> list[Any]:
        """Every tensor with bytes of pages."""
        return list(self.kv_buffer) if isinstance(self.kv_buffer, list | tuple) else [self.kv_buffer]

    def get_hybrid_pool_buffer(self) -> list[Any]:
        return self.buffers()

    def runs(self, page: int) -> list[tuple[int, int]]:
        """(address, length) of each contiguous part of a page, in the order that get_page_buffer_meta has them."""
        raise NotImplementedError

    def views(self, page: int) -> list[Any]:
        """The page's elements as tensor views, in the order of get_data_page."""
        raise NotImplementedError

    def get_page_buffer_meta(self, indices: Any) -> Any:
        """(addresses, lengths) of all parts of the pages that `indices`, a 1-D tensor of slots, name."""
        assert len(indices) % self.logical_page_size == 0
        runs = [
            run for slot in indices[:: self.logical_page_size].tolist() for run in self.runs(slot // self.logical_page_size)
        ]
        return [address for address, _ in runs], [length for _, length in runs]

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int | None:
        return self.runs(0)[0][1] // split_factor

    def get_data_page(self, index: Any, flat: bool = True) -> Any:
        parts = [view.reshape(-1) for view in self.views(int(index) // self.logical_page_size)]
        return torch.cat(parts) if flat else self.views(int(index) // self.logical_page_size)[0]

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: Any, data_page: Any) -> None:
        at = 0
        for view in self.views(int(index) // self.logical_page_size):
            view.copy_(data_page[at : at + view.numel()].reshape(view.shape))
            at += view.numel()

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        return False

    def close(self) -> None:
        """Give the buffers back. The backend must have been closed before."""
        self.kv_buffer = None
        self.allocator.close()


class Plane:
    """One tensor of one kind of row (K, V, or MLA's rows) in a layout. `heads` is None for MLA, whose rows have one."""

    def __init__(self, pool: HostPool, layers: int, heads: int, width: int):
        self.layout, self.page_size = pool.layout, pool.page_size
        self.layers, self.heads, self.width = layers, heads, width
        self.itemsize = int(pool.dtype.itemsize)
        self.dims = {
            "layer_first": (layers, pool.size, heads, width),
            "page_first": (pool.size, layers, heads, width),
            "page_first_direct": (pool.page_num, layers, pool.page_size, heads, width),
            "page_head": (pool.page_num, heads, pool.page_size, layers, width),
        }[pool.layout]
        self.tensor: Any = None

    def runs(self, page: int) -> list[tuple[int, int]]:
        row = self.heads * self.width * self.itemsize
        base = int(self.tensor.data_ptr())
        if self.layout == "layer_first":
            layer_bytes, length = self.dims[1] * row, self.page_size * row
            return [(base + layer * layer_bytes + page * length, length) for layer in range(self.layers)]
        length = self.layers * self.page_size * row
        return [(base + page * length, length)]

    def view(self, page: int) -> Any:
        slots = slice(page * self.page_size, (page + 1) * self.page_size)
        if self.layout == "layer_first":
            return self.tensor[:, slots]
        return self.tensor[slots] if self.layout == "page_first" else self.tensor[page]


class MHAPool(HostPool):
    """K and V of every head: page parts k0, v0, k1, v1, ... (layer_first) or K, V. `v_head_dim` other than `head_dim` makes two
    buffers, and the generic accessors raise, as in SGLang."""

    def __init__(
        self,
        layout: str = "page_first",
        *,
        layers: int = 2,
        heads: int = 2,
        head_dim: int = 8,
        v_head_dim: int | None = None,
        start_layer: int = 0,
        dtype: Any = torch.bfloat16,
        page_size: int = PAGE_SIZE,
        pages: int = PAGES,
        memory: str = "anonymous",
    ):
        super().__init__(layout, dtype, page_size=page_size, pages=pages, memory=memory)
        self.layer_num, self.head_num, self.start_layer = layers, heads, start_layer
        self.head_dim, self.v_head_dim = head_dim, v_head_dim or head_dim
        self.planes = [Plane(self, layers, heads, width) for width in (self.head_dim, self.v_head_dim)]
        self.size_per_token = layers * heads * (self.head_dim + self.v_head_dim) * dtype.itemsize
        if self.head_dim == self.v_head_dim:
            self.kv_buffer = self.allocator.allocate((2, *self.planes[0].dims), dtype)
        else:
            self.kv_buffer = tuple(self.allocator.allocate(plane.dims, dtype) for plane in self.planes)
        for plane, tensor in zip(self.planes, self.kv_buffer, strict=True):
            plane.tensor = tensor

    def runs(self, page: int) -> list[tuple[int, int]]:
        k, v = (plane.runs(page) for plane in self.planes)
        return [run for pair in zip(k, v, strict=True) for run in pair]

    def views(self, page: int) -> list[Any]:
        if self.head_dim != self.v_head_dim:
            raise NotImplementedError("flat pages of a pool whose head_dim is not its v_head_dim")
        return [plane.view(page) for plane in self.planes]

    def get_split_heads_page_buffer_meta(self, indices: Any, split_factor: int) -> Any:
        """page_head only: per page and group of heads, K and V. Raises AssertionError where the heads do not divide."""
        assert self.layout == "page_head"
        assert self.head_num % split_factor == 0
        pointers: list[int] = []
        sizes: list[int] = []
        for slot in indices[:: self.page_size].tolist():
            (k, length), (v, _) = self.runs(slot // self.page_size)
            part = length // split_factor
            for group in range(split_factor):
                pointers += [k + group * part, v + group * part]
                sizes += [part, part]
        return pointers, sizes

    def close(self) -> None:
        for plane in self.planes:
            plane.tensor = None
        super().close()


class MHATokenToKVPoolHost(MHAPool):
    """The same by the name of SGLang's class, for backends that know by it which bytes are whose head."""

    @property
    def k_buffer(self) -> Any:
        return self.kv_buffer[0]

    @property
    def v_buffer(self) -> Any:
        return self.kv_buffer[1]


class MLAPool(HostPool):
    """Rows that every tensor-parallel rank holds alike: one part a page, or one a layer (layer_first)."""

    head_num = 1

    def __init__(
        self,
        layout: str = "page_first",
        *,
        layers: int = 2,
        kv_cache_dim: int = 24,
        start_layer: int = 0,
        dtype: Any = torch.bfloat16,
        page_size: int = PAGE_SIZE,
        pages: int = PAGES,
        dcp_size: int = 1,
        dcp_rank: int = 0,
        memory: str = "anonymous",
    ):
        super().__init__(layout, dtype, page_size=page_size, pages=pages, memory=memory)
        self.layer_num, self.kv_cache_dim, self.start_layer = layers, kv_cache_dim, start_layer
        self.dcp_size, self.dcp_rank = dcp_size, dcp_rank
        self.size_per_token = layers * kv_cache_dim * dtype.itemsize
        self.plane = Plane(self, layers, 1, kv_cache_dim)
        self.kv_buffer = self.plane.tensor = self.allocator.allocate(self.plane.dims, dtype)

    def runs(self, page: int) -> list[tuple[int, int]]:
        return self.plane.runs(page)

    def views(self, page: int) -> list[Any]:
        return [self.plane.view(page)]

    def close(self) -> None:
        self.plane.tensor = None
        super().close()


class PagedPool(HostPool):
    """Rows of `page_bytes` a page and layer that mean something to the model only: sparse-attention indexers, compressed
    regions and their states. page_first: one part a page. layer_first: one tensor, and one part, a layer."""

    def __init__(
        self,
        layout: str = "page_first",
        *,
        layers: int = 2,
        page_bytes: int = 96,
        page_size: int = PAGE_SIZE,
        pages: int = PAGES,
        memory: str = "anonymous",
    ):
        super().__init__(layout, torch.uint8, page_size=page_size, pages=pages, memory=memory)
        self.layer_num = layers
        self.item_bytes = self.size_per_token = page_bytes
        if layout == "layer_first":
            self.kv_buffer = [self.allocator.allocate((pages, page_bytes), self.dtype) for _ in range(layers)]
        else:
            self.kv_buffer = self.allocator.allocate((pages, layers, page_bytes), self.dtype)

    def views(self, page: int) -> list[Any]:
        return [buffer[page] for buffer in self.buffers()]

    def runs(self, page: int) -> list[tuple[int, int]]:
        return [
            (int(buffer.data_ptr()) + page * buffer.stride(0), buffer.numel() // self.page_num) for buffer in self.buffers()
        ]


class StatePool(HostPool):
    """Mamba states: page_size 1, one slot a state; parts temporal, conv_0, conv_1, each in a buffer of its own."""

    def __init__(
        self, layout: str = "page_first", *, layers: int = 2, state: int = 6, pages: int = PAGES, memory: str = "anonymous"
    ):
        super().__init__(layout, torch.float32, page_size=1, pages=pages, memory=memory)
        self.layer_num = layers
        self.temporal_buffer = self.allocator.allocate((pages, layers, state), torch.float32)
        self.conv_buffer = [self.allocator.allocate((pages, layers, width), torch.bfloat16) for width in (5, 3)]
        self.kv_buffer = [self.temporal_buffer, *self.conv_buffer]
        self.size_per_token = sum(length for _, length in self.runs(0))

    def views(self, page: int) -> list[Any]:
        return [buffer[page].view(torch.uint8) for buffer in self.kv_buffer]

    def runs(self, page: int) -> list[tuple[int, int]]:
        return [(int(buffer[page].data_ptr()), buffer[page].numel() * buffer.element_size()) for buffer in self.kv_buffer]

    def close(self) -> None:
        self.temporal_buffer = None
        self.conv_buffer.clear()
        super().close()


class LogicalPool(HostPool):
    """DeepSeek-V4's anchor: slots without bytes. What belongs to its pages lies in side pools."""

    def __init__(
        self, layout: str = "page_first", *, page_size: int = PAGE_SIZE, pages: int = PAGES, memory: str = "anonymous"
    ):
        super().__init__(layout, torch.uint8, page_size=page_size, pages=pages, memory=memory)
        self.layer_num = self.size_per_token = 0
        self.allocator = None

    def buffers(self) -> list[Any]:
        return []

    def runs(self, page: int) -> list[tuple[int, int]]:
        return []

    def get_page_buffer_meta(self, indices: Any) -> None:
        return None

    def get_page_buffer_element_size(self, split_factor: int = 1) -> None:
        return None

    def get_data_page(self, index: Any, flat: bool = True) -> Any:
        return torch.empty(0, dtype=torch.uint8)

    def get_dummy_flat_data_page(self) -> Any:
        return torch.empty(0, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: Any, data_page: Any) -> None:
        pass

    def close(self) -> None:
        pass


class BrokenPool(PagedPool):
    """A pool that no backend can store whole. `fault` says why:

    raises      its accessors raise, as the pools of MXFP8 do
    empty       it has no page
    no_parts    a page has no part
    uneven      pages differ in length
    outside     a page lies outside the pool's own buffers
    """

    def __init__(self, fault: str, *, memory: str = "anonymous"):
        super().__init__(memory=memory)
        self.fault = fault
        if fault == "empty":
            self.size = self.page_num = 0

    def runs(self, page: int) -> list[tuple[int, int]]:
        if self.fault == "raises":
            raise NotImplementedError("this pool has no flat pages")
        runs = [(int(self.kv_buffer.data_ptr()) + page * 192, 192)]
        if self.fault == "no_parts":
            return []
        if self.fault == "uneven":
            return [(address, length - page % 2) for address, length in runs]
        if self.fault == "outside":
            return [(address + (1 << 30), length) for address, length in runs]
        return runs

    def views(self, page: int) -> list[Any]:
        if self.fault == "raises":
            raise NotImplementedError("this pool has no flat pages")
        return super().views(page)


FAULTS = ("raises", "empty", "no_parts", "uneven", "outside")


# --------------------------------------------------------------------------- bytes that name their page


def body(pool: str, key: str, length: int, generation: int = 0) -> bytes:
    """The bytes of one page of one pool: nobody else's page has them."""
    return pattern(f"{pool}/{key}".encode(), length, generation)


def page_bytes(pool: HostPool) -> int:
    return sum(length for _, length in pool.runs(0))


def read_page(pool: HostPool, page: int) -> bytes:
    return b"".join(ctypes.string_at(address, length) for address, length in pool.runs(page))


def write_page(pool: HostPool, page: int, content: bytes) -> None:
    at = 0
    for address, length in pool.runs(page):
        ctypes.memmove(address, content[at : at + length], length)
        at += length


def snapshot(pool: HostPool) -> list[bytes]:
    """Every page of a pool."""
    return [read_page(pool, page) for page in range(pool.page_num)]


def scramble(pool: HostPool) -> None:
    """Fill the whole pool with bytes that no page has."""
    for buffer in pool.buffers():
        buffer.view(torch.uint8).fill_(0x5A)


def slots(pool: HostPool, pages: Sequence[int]) -> Any:
    """The slots of whole pages in order, as SGLang passes them: a 1-D int64 CPU tensor."""
    if not pages:
        return torch.empty(0, dtype=torch.int64)
    size = pool.logical_page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size, dtype=torch.int64) for page in pages])
