"""The engine's L2 memory as a mover reaches it: mapped from a memfd, or through process_vm_readv/writev.

Both copy a page body run by run in chunks that stay in the CPU's cache, so that the checksum reads each chunk from there:
copy and checksum together cost little more than the copy. What a load returns is the checksum of the bytes that arrived.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import xxhash

from hicache_mooncake.protocol import Region
from hicache_mooncake.transfer.mapping import Mapping

CHUNK = 256 << 10
"""Copy and checksum step: measured best between 128 KiB and 512 KiB (benchmarks/shm.py prints the ratio to memcpy)."""


class EngineMemoryError(Exception):
    """Engine memory could not be reached: an address outside the regions shared at attach, or a refused system call."""


Source = Callable[[list[memoryview]], int]
"""Receives into buffers, as many bytes as come before its deadline, and says how many: 0 when the peer has closed."""


class EngineMemory(Protocol):
    """Where page bodies come from and go to. A body is the concatenation of the runs at `addresses`, of `lengths` bytes; `seed`
    is the page's `checksum_seed`."""

    def store(
        self, addresses: Sequence[int], lengths: Sequence[int], target: memoryview, target_address: int, seed: int
    ) -> int:
        """Engine -> segment. Returns xxh3-64 of the body as it lies in the segment."""

    def load(self, source: memoryview, source_address: int, addresses: Sequence[int], lengths: Sequence[int], seed: int) -> int:
        """Segment -> engine. Returns xxh3-64 of what arrived."""

    def receive(
        self, source: Source, pages: Sequence[Sequence[int]], lengths: Sequence[int], seeds: Sequence[int]
    ) -> Iterator[int]:
        """Peer -> engine, bodies one after the other; yields xxh3-64 of each as it has arrived. `pages` are their addresses.
        Raises ConnectionError when the peer ends in mid-body and TimeoutError when it is too slow."""

    def close(self) -> None: ...


class MappedMemory:
    """Regions that came as memfds, mapped here. Owns the mappings, not the descriptors."""

    def __init__(self, regions: Sequence[Region], fds: Sequence[int]) -> None:
        self._mappings: list[Mapping] = []
        self._starts: list[int] = []
        try:
            for region in sorted(regions, key=lambda r: r.address):
                mapping = Mapping(fds[region.fd], region.length, offset=region.fd_offset, writable=True)
                mapping.populate_in_background()
                self._mappings.append(mapping)
                self._starts.append(region.address)
        except OSError:
            self.close()
            raise

    def _view(self, address: int, length: int) -> memoryview:
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            offset = address - self._starts[at]
            mapping = self._mappings[at]
            if offset + length <= mapping.length:
                return mapping.view[offset : offset + length]
        raise EngineMemoryError(f"{length} bytes at {address:#x} are outside the memory shared at attach")

    def store(
        self, addresses: Sequence[int], lengths: Sequence[int], target: memoryview, target_address: int, seed: int
    ) -> int:
        return self._copy(target, addresses, lengths, seed, to_engine=False)

    def load(self, source: memoryview, source_address: int, addresses: Sequence[int], lengths: Sequence[int], seed: int) -> int:
        return self._copy(source, addresses, lengths, seed, to_engine=True)

    def _copy(self, body: memoryview, addresses: Sequence[int], lengths: Sequence[int], seed: int, *, to_engine: bool) -> int:
        digest = xxhash.xxh3_64(seed=seed)
        at = 0
        for address, length in zip(addresses, lengths, strict=True):
            engine, stored = self._view(address, length), body[at : at + length]
            target, source = (engine, stored) if to_engine else (stored, engine)
            for start in range(0, length, CHUNK):
                piece = target[start : start + CHUNK]
                piece[:] = source[start : start + CHUNK]
                digest.update(piece)
            at += length
        return digest.intdigest()

    def receive(
        self, source: Source, pages: Sequence[Sequence[int]], lengths: Sequence[int], seeds: Sequence[int]
    ) -> Iterator[int]:
        runs = len(lengths)
        seed = iter(seeds)
        for group in _groups(pages, lengths):
            views = [self._view(address, length) for page in group for address, length in zip(page, lengths, strict=True)]
            if len(group) > 1:
                fill(source, views)
                for first in range(0, len(views), runs):
                    digest = xxhash.xxh3_64(seed=next(seed))
                    for view in views[first : first + runs]:
                        digest.update(view)
                    yield digest.intdigest()
                continue
            digest = xxhash.xxh3_64(seed=next(seed))
            for view in views:
                for start in range(0, len(view), CHUNK):
                    piece = view[start : start + CHUNK]
                    fill(source, [piece])
                    digest.update(piece)
            yield digest.intdigest()

    def close(self) -> None:
        for mapping in self._mappings:
            mapping.close()
        self._mappings = []
        self._starts = []


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_VM_ARGS = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
for _name in ("process_vm_readv", "process_vm_writev"):
    _function = getattr(_libc, _name)
    _function.argtypes = _VM_ARGS
    _function.restype = ctypes.c_ssize_t
_MAX_IOV = 512


class ForeignMemory:
    """Memory of another process, by system call. Needs ptrace rights over it (same user, and Yama where it is on)."""

    def __init__(self, pid: int, regions: Sequence[Region]) -> None:
        self._pid = pid
        self._regions = sorted((region.address, region.address + region.length) for region in regions)
        self._starts = [start for start, _ in self._regions]
        self._bounce = memoryview(ctypes.create_string_buffer(CHUNK)).cast("B")
        self._bounce_address = ctypes.addressof(ctypes.c_char.from_buffer(self._bounce))

    def _check(self, address: int, length: int) -> None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address + length > self._regions[at][1]:
            raise EngineMemoryError(f"{length} bytes at {address:#x} are outside the memory shared at attach")

    def transfer(self, write: bool, local: int, remote: Sequence[tuple[int, int]]) -> None:
        """Move the concatenation of `remote` (address, length) pairs to or from `local`, in whole."""
        call = _libc.process_vm_writev if write else _libc.process_vm_readv
        for first in range(0, len(remote), _MAX_IOV):
            part = remote[first : first + _MAX_IOV]
            total = sum(length for _, length in part)
            mine = _IoVec(local, total)
            theirs = (_IoVec * len(part))(*(_IoVec(address, length) for address, length in part))
            moved = call(self._pid, ctypes.addressof(mine), 1, ctypes.addressof(theirs), len(part), 0)
            if moved != total:
                error = ctypes.get_errno() if moved < 0 else 0
                verb = "write" if write else "read"
                raise EngineMemoryError(f"process_vm_{verb}v of {total} bytes: {os.strerror(error) if error else moved}")
            local += total

    def _pieces(self, addresses: Sequence[int], lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
        """The body in groups of at most CHUNK bytes, each a list of (address, length)."""
        groups: list[list[tuple[int, int]]] = [[]]
        room = CHUNK
        for address, length in zip(addresses, lengths, strict=True):
            self._check(address, length)
            at = 0
            while at < length:
                if room == 0:
                    groups.append([])
                    room = CHUNK
                step = min(room, length - at)
                groups[-1].append((address + at, step))
                at += step
                room -= step
        return groups

    def store(
        self, addresses: Sequence[int], lengths: Sequence[int], target: memoryview, target_address: int, seed: int
    ) -> int:
        return self._copy(target, target_address, addresses, lengths, seed, to_engine=False)

    def load(self, source: memoryview, source_address: int, addresses: Sequence[int], lengths: Sequence[int], seed: int) -> int:
        return self._copy(source, source_address, addresses, lengths, seed, to_engine=True)

    def _copy(
        self,
        body: memoryview,
        body_address: int,
        addresses: Sequence[int],
        lengths: Sequence[int],
        seed: int,
        *,
        to_engine: bool,
    ) -> int:
        # The checksum is taken after the copy: had the body changed before or during it, the checksum would tell.
        digest = xxhash.xxh3_64(seed=seed)
        at = 0
        for group in self._pieces(addresses, lengths):
            size = sum(length for _, length in group)
            self.transfer(to_engine, body_address + at, group)
            digest.update(body[at : at + size])
            at += size
        return digest.intdigest()

    def receive(
        self, source: Source, pages: Sequence[Sequence[int]], lengths: Sequence[int], seeds: Sequence[int]
    ) -> Iterator[int]:
        for addresses, seed in zip(pages, seeds, strict=True):
            digest = xxhash.xxh3_64(seed=seed)
            for group in self._pieces(addresses, lengths):
                piece = self._bounce[: sum(length for _, length in group)]
                fill(source, [piece])
                self.transfer(True, self._bounce_address, group)
                digest.update(piece)
            yield digest.intdigest()

    def close(self) -> None:
        pass


def _groups(pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> Iterator[Sequence[Sequence[int]]]:
    """Pages that are received together: small ones share a system call, as long as they fit the cache."""
    together = max(1, min(CHUNK // sum(lengths), _MAX_IOV // len(lengths)))
    for first in range(0, len(pages), together):
        yield pages[first : first + together]


def fill(source: Source, views: list[memoryview]) -> None:
    """Receive until every view is full. Raises ConnectionError, or what `source` raises."""
    while views:
        got = source(views)
        if got == 0:
            raise ConnectionError("peer closed the connection in mid-body")
        done = 0
        while done < len(views) and got >= len(views[done]):
            got -= len(views[done])
            done += 1
        views = views[done:]
        if got:
            views[0] = views[0][got:]


_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p
_SHORT = 64 << 10
"""A copy of up to this length keeps the interpreter lock: beside a busy thread getting it back takes far longer."""


def copy_here(buffer: int, addresses: Sequence[int], lengths: Sequence[int], deadline: float, *, out: bool) -> bool:
    """Copy one page between its runs in this process's memory and a contiguous buffer (`out`: to the buffer).

    False when the deadline has passed; the copy may then be in part.
    """
    at = buffer
    for address, length in zip(addresses, lengths, strict=True):
        if time.monotonic() > deadline:
            return False
        move = _memmove if length <= _SHORT else ctypes.memmove
        if out:
            move(at, address, length)
        else:
            move(address, at, length)
        at += length
    return True


_PR_SET_PTRACER = 0x59616D61


def allow_movers() -> None:
    """Under Yama (`ptrace_scope` 1, as on Ubuntu) a child may not reach its parent. Declaring ourselves our own tracer lets
    our descendants in, and nobody else. Without Yama this does nothing."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)
