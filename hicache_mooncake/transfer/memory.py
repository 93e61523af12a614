"""The engine's L2 memory as a mover reaches it: mapped from a memfd, or through process_vm_readv/writev.

Both copy a page body part by part, in chunks that stay in the CPU's cache, so that the checksum reads each chunk from there:
copy and checksum together cost little more than the copy. What a load returns is the checksum of the bytes that arrived.

Strided runs (`Run.dims`) are gathered and scattered by numpy, which is imported when the first one is met.
"""

from __future__ import annotations

import abc
import bisect
import ctypes
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import xxhash

from hicache_mooncake.protocol import Region, Run
from hicache_mooncake.transfer.mapping import Mapping

CHUNK = 256 << 10
"""Copy and checksum step: measured best between 128 KiB and 512 KiB."""
STRIDED_CHUNK = 128 << 10
"""The same for strided runs. Smaller, since what was scattered is read back for its checksum, and pieces that lie a power of
two apart share few of the cache's sets."""


class EngineMemoryError(Exception):
    """Engine memory could not be reached: an address outside the regions shared at attach, or a refused system call."""


Dims = tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """A step of a copy: `size` bytes of the body, from `offset` past the address of run number `run`. With `dims` (as in `Run`)
    they lie there as equal pieces, of `size` over the product of the counts."""

    run: int
    offset: int
    size: int
    dims: Dims = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(count for count, _ in self.dims)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(step for _, step in self.dims)

    @property
    def piece(self) -> int:
        return self.size // math.prod(self.shape)


class BodyLayout:
    """How a page body lies in engine memory, for many pages alike. The runs must have been checked: counts and steps above
    0, lengths that are a multiple of the product of the counts.

    `length` is the body's, `extents` says for each run how far its last byte is from its address, and `parts` cover the body in
    order, each small enough to stay in the cache.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = len(runs)
        self.length = sum(run.length for run in runs)
        self.extents = [extent(run) for run in runs]
        self.strided = any(run.dims for run in runs)
        self.small = not self.strided and self.length <= CHUNK
        """A body that stays in the cache as a whole: then a step for each run is enough."""
        self.parts: list[Part] = []
        for number, run in enumerate(runs):
            self.parts += _split(number, 0, tuple((count, step) for count, step in run.dims), run.length)

    @functools.cached_property
    def gathered(self) -> list[list[Part]]:
        """The parts in groups of at most CHUNK bytes; a strided one is alone."""
        groups: list[list[Part]] = []
        room = 0
        for part in self.parts:
            if part.dims or part.size > room:
                groups.append([])
                room = CHUNK
            groups[-1].append(part)
            room = 0 if part.dims else room - part.size
        return groups


def extent(run: Run) -> int:
    """Bytes from the address of a run to the end of its last piece."""
    piece = run.length // math.prod(count for count, _ in run.dims)
    return piece + sum((count - 1) * step for count, step in run.dims)


_SMALL_PIECE = 2 << 10


def in_small_pieces(runs: Sequence[Run]) -> bool:
    """Whether process_vm, which pays nearly 1 us a piece, is slower for these runs than a copy within the engine's process."""
    return any(run.dims and run.length // math.prod(count for count, _ in run.dims) < _SMALL_PIECE for run in runs)


def _split(run: int, offset: int, dims: Dims, size: int, limit: int = STRIDED_CHUNK) -> Iterator[Part]:
    if not dims:
        for start in range(0, size, CHUNK):
            yield Part(run, offset + start, min(CHUNK, size - start))
        return
    (count, step), inner = dims[0], dims[1:]
    inner_size = size // count
    at_once = limit // inner_size
    if at_once:
        for first in range(0, count, at_once):
            now = min(at_once, count - first)
            yield Part(run, offset + first * step, now * inner_size, ((now, step), *inner))
    else:
        for number in range(count):
            yield from _split(run, offset + number * step, inner, inner_size, limit)


@functools.lru_cache(maxsize=64)
def _void(size: int) -> Any:
    """The numpy dtype of a piece: copied whole, by one memmove."""
    import numpy

    return numpy.dtype((numpy.void, size))


def _strided(buffer: Any, offset: int, part: Part) -> Any:
    """Array of the pieces of a strided part, where they lie in a buffer. No copy."""
    import numpy

    return numpy.ndarray(part.shape, _void(part.piece), buffer, offset, part.steps)


def _packed(buffer: Any, part: Part) -> Any:
    """Array of the pieces of a strided part that lie one after the other from the start of a buffer. No copy."""
    import numpy

    return numpy.ndarray(part.shape, _void(part.piece), buffer)


class Group(NamedTuple):
    """Pages of one layout that are copied by one call."""

    offsets: Sequence[int]
    """Where the body of each begins in the segment."""
    addresses: Sequence[Sequence[int]]
    """For each run, where it begins in the engine: of all pages."""
    seeds: Sequence[int]


class Stretch(NamedTuple):
    """Memory that bodies are copied from or to, by offsets: as much of a `Mapping` as that takes, of any buffer."""

    view: memoryview
    address: int
    length: int

    @classmethod
    def of(cls, view: memoryview) -> Stretch:
        """Good as long as whoever has it keeps the view."""
        return cls(view, ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))


Source = Callable[[list[memoryview]], int]
"""Receives into buffers, as many bytes as come before its deadline, and says how many: 0 when the peer has closed."""


class EngineMemory(Protocol):
    """Where page bodies come from and go to. A body is the concatenation of the runs of `layout`, which lie at `addresses`;
    `seed` is the page's `checksum_seed`. Each raises EngineMemoryError, before any byte is moved if a run is not in the memory
    that was shared."""

    reads_back: bool
    """`load` tells of bytes read from the engine after the copy, and not of those it copied from."""

    def store(self, addresses: Sequence[int], layout: BodyLayout, target: memoryview, target_address: int, seed: int) -> int:
        """Engine -> segment. Returns xxh3-64 of the body as it lies in the segment."""

    def load(self, source: memoryview, source_address: int, addresses: Sequence[int], layout: BodyLayout, seed: int) -> int:
        """Segment -> engine. Returns xxh3-64 of what arrived."""

    def store_pages(self, group: Group, layout: BodyLayout, segment: Mapping) -> Iterator[int | None]:
        """`store` of several pages: each is copied when its checksum is asked for. None for one that raised EngineMemoryError,
        which is no matter of the others."""

    def load_pages(self, group: Group, layout: BodyLayout, segment: Mapping | Stretch) -> Iterator[int | None]:
        """The same for `load`."""

    def receiving(
        self, pages: Sequence[Sequence[int]], layout: BodyLayout, seeds: Sequence[int]
    ) -> Iterator[list[memoryview] | int]:
        """Peer -> engine, bodies one after the other, without I/O: yields views that must be full of what comes next before it
        goes on, and after each body xxh3-64 of it as it has arrived. `pages` are their addresses. Several may be under way."""

    def close(self) -> None: ...


class _Common(abc.ABC):
    """What an EngineMemory can do by its other calls: `receive`, and several pages one after the other."""

    @abc.abstractmethod
    def store(
        self, addresses: Sequence[int], layout: BodyLayout, target: memoryview, target_address: int, seed: int
    ) -> int: ...

    @abc.abstractmethod
    def load(self, source: memoryview, source_address: int, addresses: Sequence[int], layout: BodyLayout, seed: int) -> int: ...

    @abc.abstractmethod
    def receiving(
        self, pages: Sequence[Sequence[int]], layout: BodyLayout, seeds: Sequence[int]
    ) -> Iterator[list[memoryview] | int]: ...

    def receive(
        self, source: Source, pages: Sequence[Sequence[int]], layout: BodyLayout, seeds: Sequence[int]
    ) -> Iterator[int]:
        """`receiving` from one peer: yields only the checksums. Raises ConnectionError when the peer ends in mid-body and
        TimeoutError when it is too slow."""
        for wanted in self.receiving(pages, layout, seeds):
            if isinstance(wanted, int):
                yield wanted
            else:
                fill(source, wanted)

    def store_pages(self, group: Group, layout: BodyLayout, segment: Mapping) -> Iterator[int | None]:
        def store(addresses: Sequence[int], body: memoryview, body_address: int, seed: int) -> int:
            return self.store(addresses, layout, body, body_address, seed)

        return _one_by_one(store, group, layout, segment)

    def load_pages(self, group: Group, layout: BodyLayout, segment: Mapping | Stretch) -> Iterator[int | None]:
        def load(addresses: Sequence[int], body: memoryview, body_address: int, seed: int) -> int:
            return self.load(body, body_address, addresses, layout, seed)

        return _one_by_one(load, group, layout, segment)


def _one_by_one(
    copy: Callable[[Sequence[int], memoryview, int, int], int], group: Group, layout: BodyLayout, segment: Mapping | Stretch
) -> Iterator[int | None]:
    for offset, addresses, seed in zip(group.offsets, zip(*group.addresses, strict=True), group.seeds, strict=True):
        body = segment.view[offset : offset + layout.length]
        try:
            checksum = copy(addresses, body, segment.address + offset, seed)
        except EngineMemoryError:
            checksum = None
        yield checksum


def _copy(target: memoryview, source: memoryview) -> None:
    """Without the interpreter lock: several threads copy at once."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes into {len(target)}")
    here, there = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (target, source))
    ctypes.memmove(here, there, len(source))


_Step = tuple[memoryview, int, list[int], int, bool]
"""A part of all pages of a group: the mapping of engine memory that it is in, with its address here, where each page's begins
in it, its size, and whether it is copied without the interpreter lock."""


def _storing(
    steps: Sequence[Sequence[_Step]], segment: memoryview, segment_address: int, offsets: Sequence[int], seeds: Sequence[int]
) -> Iterator[int]:
    """Engine -> segment. Small pages pay for each line of it, so that nothing is in the loop that could be done before.

    Short copies and small bodies keep the interpreter lock, which costs less; the others let go of it: several threads copy at
    once.
    """
    for page, (at, seed) in enumerate(zip(offsets, seeds, strict=True)):
        digest = xxhash.xxh3_64(seed=seed)
        for group in steps:
            begin = at
            for view, address, places, size, unlocked in group:
                place = places[page]
                if unlocked:
                    ctypes.memmove(segment_address + at, address + place, size)
                else:
                    segment[at : at + size] = view[place : place + size]
                at += size
            digest.update(segment[begin:at])
        yield digest.intdigest()


def _loading(
    steps: Sequence[Sequence[_Step]], segment: memoryview, segment_address: int, offsets: Sequence[int], seeds: Sequence[int]
) -> Iterator[int]:
    """Segment -> engine, and what arrived is read back."""
    for page, (at, seed) in enumerate(zip(offsets, seeds, strict=True)):
        digest = xxhash.xxh3_64(seed=seed)
        for group in steps:
            for view, address, places, size, unlocked in group:
                place = places[page]
                there = view[place : place + size]
                if unlocked:
                    ctypes.memmove(address + place, segment_address + at, size)
                else:
                    there[:] = segment[at : at + size]
                digest.update(there)
                at += size
        yield digest.intdigest()


class MappedMemory(_Common):
    """Regions that came as memfds, mapped here. Owns the mappings, not the descriptors. Not thread-safe, but for copies between
    it and a segment of pages without strided runs.

    Every checksum of a load is of bytes read back from engine memory after the copy, strided ones too. `former`: what was
    mapped before; its mappings of the same files are taken over, and the others closed.
    """

    reads_back = True

    def __init__(self, regions: Sequence[Region], fds: Sequence[int], former: MappedMemory | None = None) -> None:
        self._mappings: list[Mapping] = []
        self._starts: list[int] = []
        self._files: list[tuple[int, ...]] = []
        known = {} if former is None else dict(zip(former._files, former._mappings, strict=True))
        try:
            for region in sorted(regions, key=lambda r: r.address):
                file = os.fstat(fds[region.fd])
                key = (file.st_dev, file.st_ino, region.length, region.fd_offset)
                mapping = known.pop(key, None)
                if mapping is None:
                    mapping = Mapping(fds[region.fd], region.length, offset=region.fd_offset, writable=True)
                    mapping.populate_in_background()
                self._mappings.append(mapping)
                self._starts.append(region.address)
                self._files.append(key)
        except OSError:
            self.close()
            raise
        finally:
            for mapping in known.values():
                mapping.close()
            if former is not None:
                former._mappings, former._starts, former._files = [], [], []

    @functools.cached_property
    def _scratch(self) -> memoryview:
        return memoryview(bytearray(STRIDED_CHUNK))

    def _mapping(self, address: int, length: int) -> tuple[Mapping, int]:
        """The mapping that these bytes are in, and where in it they begin."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            offset = address - self._starts[at]
            mapping = self._mappings[at]
            if offset + length <= mapping.length:
                return mapping, offset
        raise EngineMemoryError(f"{length} bytes at {address:#x} are outside the memory shared at attach")

    def _locate(self, address: int, length: int) -> tuple[memoryview, int]:
        mapping, offset = self._mapping(address, length)
        return mapping.view, offset

    def _check(self, addresses: Sequence[int], layout: BodyLayout) -> None:
        for address, length in zip(addresses, layout.extents, strict=True):
            self._locate(address, length)

    def _runs(self, addresses: Sequence[int], layout: BodyLayout) -> list[memoryview]:
        """The contiguous runs of a page where they lie."""
        runs: list[memoryview] = []
        for address, length in zip(addresses, layout.extents, strict=True):
            view, offset = self._locate(address, length)
            runs.append(view[offset : offset + length])
        return runs

    def _view(self, addresses: Sequence[int], part: Part) -> memoryview:
        """A contiguous part where it lies."""
        view, offset = self._locate(addresses[part.run] + part.offset, part.size)
        return view[offset : offset + part.size]

    def _pieces(self, addresses: Sequence[int], part: Part) -> Any:
        """The pieces of a strided part where they lie. The whole run has been checked; numpy checks once more."""
        view, offset = self._locate(addresses[part.run] + part.offset, part.piece)
        return _strided(view, offset, part)

    def _put(self, addresses: Sequence[int], part: Part, source: memoryview) -> memoryview:
        """Copy one part to the engine and give back what lies there now."""
        if not part.dims:
            there = self._view(addresses, part)
            _copy(there, source)
            return there
        pieces = self._pieces(addresses, part)
        pieces[...] = _packed(source, part)
        back = self._scratch[: part.size]
        _packed(back, part)[...] = pieces
        return back

    def _steps(self, group: Group, layout: BodyLayout, segment: Mapping | Stretch) -> list[list[_Step]] | None:
        """The parts of a group's pages, as in `gathered`. None for strided pages, and where a run is not in one region for all
        of them, or in none for some: then they are copied one by one."""
        if not 0 <= min(group.offsets) <= max(group.offsets) <= segment.length - layout.length:
            raise ValueError(f"bodies of {layout.length} bytes in {segment.length}, from {min(group.offsets)} on")
        if layout.strided:
            return None
        found: list[tuple[memoryview, int, int]] = []
        for places, length in zip(group.addresses, layout.extents, strict=True):
            lowest = min(places)
            try:
                mapping, offset = self._mapping(lowest, max(places) - lowest + length)
            except EngineMemoryError:
                return None
            found.append((mapping.view, mapping.address, offset - lowest))
        steps: list[list[_Step]] = []
        for parts in layout.gathered:
            steps.append([])
            for run, offset, size, _ in parts:
                view, address, shift = found[run]
                shift += offset
                unlocked = size > _SHORT and not layout.small
                steps[-1].append((view, address, [place + shift for place in group.addresses[run]], size, unlocked))
        return steps

    def store_pages(self, group: Group, layout: BodyLayout, segment: Mapping) -> Iterator[int | None]:
        steps = self._steps(group, layout, segment)
        if steps is None:
            return super().store_pages(group, layout, segment)
        return _storing(steps, segment.view, segment.address, group.offsets, group.seeds)

    def load_pages(self, group: Group, layout: BodyLayout, segment: Mapping | Stretch) -> Iterator[int | None]:
        steps = self._steps(group, layout, segment)
        if steps is None:
            return super().load_pages(group, layout, segment)
        return _loading(steps, segment.view, segment.address, group.offsets, group.seeds)

    def store(self, addresses: Sequence[int], layout: BodyLayout, target: memoryview, target_address: int, seed: int) -> int:
        if layout.small:
            at = 0
            for run in self._runs(addresses, layout):
                target[at : at + len(run)] = run
                at += len(run)
            return xxhash.xxh3_64_intdigest(target[:at], seed)
        self._check(addresses, layout)
        digest = xxhash.xxh3_64(seed=seed)
        at = 0
        for part in layout.parts:
            body = target[at : at + part.size]
            if part.dims:
                _packed(body, part)[...] = self._pieces(addresses, part)
            else:
                _copy(body, self._view(addresses, part))
            digest.update(body)
            at += part.size
        return digest.intdigest()

    def load(self, source: memoryview, source_address: int, addresses: Sequence[int], layout: BodyLayout, seed: int) -> int:
        if layout.small:
            digest = xxhash.xxh3_64(seed=seed)
            at = 0
            for run in self._runs(addresses, layout):
                run[:] = source[at : at + len(run)]
                digest.update(run)
                at += len(run)
            return digest.intdigest()
        self._check(addresses, layout)
        return self._scatter(source, addresses, layout, seed)

    def _scatter(self, body: memoryview, addresses: Sequence[int], layout: BodyLayout, seed: int) -> int:
        digest = xxhash.xxh3_64(seed=seed)
        at = 0
        for part in layout.parts:
            digest.update(self._put(addresses, part, body[at : at + part.size]))
            at += part.size
        return digest.intdigest()

    def receiving(
        self, pages: Sequence[Sequence[int]], layout: BodyLayout, seeds: Sequence[int]
    ) -> Iterator[list[memoryview] | int]:
        seed = iter(seeds)
        received = memoryview(bytearray(CHUNK if layout.strided else 0))
        for group in _groups(pages, layout):
            if len(group) > 1 and not layout.strided:
                yield from self._receiving_together(group, layout, seed)
                continue
            for addresses in group:
                self._check(addresses, layout)
            if len(group) > 1:
                bodies = received[: len(group) * layout.length]
                yield [bodies]
                for number, addresses in enumerate(group):
                    body = bodies[number * layout.length : (number + 1) * layout.length]
                    yield self._scatter(body, addresses, layout, next(seed))
                continue
            digest = xxhash.xxh3_64(seed=next(seed))
            for parts in layout.gathered:
                if parts[0].dims:
                    body = received[: parts[0].size]
                    yield [body]
                    digest.update(self._put(group[0], parts[0], body))
                    continue
                for at in range(0, len(parts), _MAX_IOV):
                    views = [self._view(group[0], part) for part in parts[at : at + _MAX_IOV]]
                    yield list(views)
                    for view in views:
                        digest.update(view)
            yield digest.intdigest()

    def _receiving_together(
        self, group: Sequence[Sequence[int]], layout: BodyLayout, seed: Iterator[int]
    ) -> Iterator[list[memoryview] | int]:
        bodies = [self._runs(addresses, layout) for addresses in group]
        yield [run for body in bodies for run in body]
        for body in bodies:
            if len(body) == 1:
                yield xxhash.xxh3_64_intdigest(body[0], next(seed))
                continue
            digest = xxhash.xxh3_64(seed=next(seed))
            for run in body:
                digest.update(run)
            yield digest.intdigest()

    def close(self) -> None:
        for mapping in self._mappings:
            mapping.close()
        self._mappings, self._starts, self._files = [], [], []


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_VM_ARGS = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
for _name in ("process_vm_readv", "process_vm_writev"):
    _function = getattr(_libc, _name)
    _function.argtypes = _VM_ARGS
    _function.restype = ctypes.c_ssize_t
_MAX_IOV = 512


class ForeignMemory(_Common):
    """Memory of another process, by system call. Needs ptrace rights over it (same user, and Yama where it is on). Not
    thread-safe, but for copies between it and a segment of pages without strided runs.

    The checksum of a load is of the body, read after it was copied: what was written cannot be read back for less than it cost.
    """

    reads_back = False

    def __init__(self, pid: int, regions: Sequence[Region]) -> None:
        self._pid = pid
        self._regions = sorted((region.address, region.address + region.length) for region in regions)
        self._starts = [start for start, _ in self._regions]

    def _check(self, address: int, length: int) -> None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address + length > self._regions[at][1]:
            raise EngineMemoryError(f"{length} bytes at {address:#x} are outside the memory shared at attach")

    def transfer(self, write: bool, local: int, remote: Sequence[tuple[int, int]]) -> None:
        """Move the concatenation of `remote` (address, length) pairs to or from `local`, in whole."""
        for first in range(0, len(remote), _MAX_IOV):
            part = remote[first : first + _MAX_IOV]
            total = sum(length for _, length in part)
            theirs = (_IoVec * len(part))(*(_IoVec(address, length) for address, length in part))
            self._call(write, local, total, ctypes.addressof(theirs), len(part))
            local += total

    def _transfer_pieces(self, write: bool, local: int, address: int, part: Part) -> None:
        """The same for a strided part whose first piece is at `address`."""
        import numpy

        piece = part.piece
        places: Any = numpy.array([address], numpy.uint64)
        for count, step in part.dims:
            places = numpy.add.outer(places, numpy.arange(count, dtype=numpy.uint64) * numpy.uint64(step)).ravel()
        theirs: Any = numpy.full((places.size, 2), piece, numpy.uint64)
        theirs[:, 0] = places
        for first in range(0, len(theirs), _MAX_IOV):
            some = theirs[first : first + _MAX_IOV]
            self._call(write, local, len(some) * piece, some.ctypes.data, len(some))
            local += len(some) * piece

    def _call(self, write: bool, local: int, total: int, theirs: int, count: int) -> None:
        mine = _IoVec(local, total)
        call = _libc.process_vm_writev if write else _libc.process_vm_readv
        moved = call(self._pid, ctypes.addressof(mine), 1, theirs, count, 0)
        if moved != total:
            error = ctypes.get_errno() if moved < 0 else 0
            verb = "write" if write else "read"
            raise EngineMemoryError(f"process_vm_{verb}v of {total} bytes: {os.strerror(error) if error else moved}")

    def _move(self, write: bool, local: int, addresses: Sequence[int], parts: list[Part]) -> None:
        """One group of `BodyLayout.gathered`, to or from `local`."""
        if parts[0].dims:
            self._transfer_pieces(write, local, addresses[parts[0].run] + parts[0].offset, parts[0])
        else:
            self.transfer(write, local, [(addresses[part.run] + part.offset, part.size) for part in parts])

    def _check_all(self, addresses: Sequence[int], layout: BodyLayout) -> None:
        for address, length in zip(addresses, layout.extents, strict=True):
            self._check(address, length)

    def store(self, addresses: Sequence[int], layout: BodyLayout, target: memoryview, target_address: int, seed: int) -> int:
        return self._copy(target, target_address, addresses, layout, seed, to_engine=False)

    def load(self, source: memoryview, source_address: int, addresses: Sequence[int], layout: BodyLayout, seed: int) -> int:
        return self._copy(source, source_address, addresses, layout, seed, to_engine=True)

    def _copy(
        self,
        body: memoryview,
        body_address: int,
        addresses: Sequence[int],
        layout: BodyLayout,
        seed: int,
        *,
        to_engine: bool,
    ) -> int:
        # The checksum is taken after the copy: had the body changed before or during it, the checksum would tell.
        self._check_all(addresses, layout)
        digest = xxhash.xxh3_64(seed=seed)
        at = 0
        for parts in layout.gathered:
            size = sum(part.size for part in parts)
            self._move(to_engine, body_address + at, addresses, parts)
            digest.update(body[at : at + size])
            at += size
        return digest.intdigest()

    def receiving(
        self, pages: Sequence[Sequence[int]], layout: BodyLayout, seeds: Sequence[int]
    ) -> Iterator[list[memoryview] | int]:
        bounce = memoryview(ctypes.create_string_buffer(CHUNK)).cast("B")
        bounce_address = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
        for addresses, seed in zip(pages, seeds, strict=True):
            self._check_all(addresses, layout)
            digest = xxhash.xxh3_64(seed=seed)
            for parts in layout.gathered:
                piece = bounce[: sum(part.size for part in parts)]
                yield [piece]
                self._move(True, bounce_address, addresses, parts)
                digest.update(piece)
            yield digest.intdigest()

    def close(self) -> None:
        pass


def _groups(pages: Sequence[Sequence[int]], layout: BodyLayout) -> Iterator[Sequence[Sequence[int]]]:
    """Pages that are received together: small ones share a system call, as long as they fit the cache."""
    together = max(1, min(CHUNK // layout.length, _MAX_IOV // layout.runs))
    for first in range(0, len(pages), together):
        yield pages[first : first + together]


def fill(source: Source, views: list[memoryview]) -> None:
    """Receive until every view is full. Raises ConnectionError, or what `source` raises."""
    while views:
        got = source(views)
        if got == 0:
            raise ConnectionError("peer closed the connection in mid-body")
        views = advanced(views, got)


def advanced(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them after so many bytes, as a list of its own."""
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    left = views[done:]
    if count:
        left[0] = left[0][count:]
    return left


_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p
_SHORT = 64 << 10
"""A copy of up to this length keeps the interpreter lock: beside a busy thread getting it back takes far longer."""
_FEW = 480
"""numpy, too, keeps the lock for a copy of up to 500 pieces."""


def copy_here(buffer: int, addresses: Sequence[int], runs: Sequence[Run], deadline: float, *, out: bool) -> bool:
    """Copy one page between its runs in this process's memory and a contiguous buffer (`out`: to the buffer).

    False when the deadline has passed; the copy may then be in part.
    """
    at = buffer
    for address, run in zip(addresses, runs, strict=True):
        if time.monotonic() > deadline:
            return False
        if run.dims:
            dims = tuple((count, step) for count, step in run.dims)
            piece = run.length // math.prod(count for count, _ in dims)
            for part in _split(0, 0, dims, run.length, min(STRIDED_CHUNK, _FEW * piece)):
                _copy_part(at, address + part.offset, part, out=out)
                at += part.size
            continue
        move = _memmove if run.length <= _SHORT else ctypes.memmove
        if out:
            move(at, address, run.length)
        else:
            move(address, at, run.length)
        at += run.length
    return True


def _copy_part(packed: int, address: int, part: Part, *, out: bool) -> None:
    """Addresses in this process, of the body's side and of the first piece."""
    if not part.dims:
        _memmove(*((packed, address) if out else (address, packed)), part.size)
        return
    length = part.piece + sum((count - 1) * step for count, step in part.dims)
    there = _strided((ctypes.c_char * length).from_address(address), 0, part)
    here = _packed((ctypes.c_char * part.size).from_address(packed), part)
    if out:
        here[...] = there
    else:
        there[...] = here


_PR_SET_PTRACER = 0x59616D61


def allow_movers() -> None:
    """Under Yama (`ptrace_scope` 1, as on Ubuntu) a child may not reach its parent. Declaring ourselves our own tracer lets
    our descendants in, and nobody else. Without Yama this does nothing."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)
