"""Which NUMA node memory is on, and what follows: movers run beside the engine's memory, the store's is spread over all nodes.

On a host with one node nothing is done. What the system refuses (containers often lack CAP_SYS_NICE) is told once and left:
placement is speed, never correctness.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hicache_mooncake.transfer.topology import NumaNode, cpu_list, read_numa_nodes

_SAMPLES, _MAX_SAMPLES = 64, 4096
"""Pages asked about of each stretch of memory, and of all together."""
_MOSTLY = 0.8
"""Part of the pages that must be on one node for it to be the memory's."""
_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3
_MASK_BITS = 1024
_NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "move_pages": 279},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "move_pages": 239},
}
"""Of the system calls: the C library has no functions for them."""
_REFUSED = "the system refuses it ({}): in a container, --cap-add SYS_NICE, or a seccomp profile with {}"


class System:
    """The kernel's calls. Each raises OSError."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._numbers = _NUMBERS.get(platform.machine(), {})

    def _call(self, name: str, *arguments: object) -> None:
        number = self._numbers.get(name)
        if number is None:
            raise OSError(errno.ENOSYS, f"{name} is not known on {platform.machine()}")
        if self._libc.syscall(ctypes.c_long(number), *arguments) < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def nodes_of_pages(self, pid: int, addresses: Sequence[int]) -> list[int]:
        """The NUMA node of the page at each address in a process, 0 being this one; negative where none is there yet."""
        pages = (ctypes.c_void_p * len(addresses))(*addresses)
        status = (ctypes.c_int * len(addresses))()
        self._call("move_pages", ctypes.c_int(pid), ctypes.c_ulong(len(addresses)), pages, None, status, ctypes.c_int(0))
        return list(status)

    def interleave_memory(self, address: int, length: int, nodes: Sequence[int]) -> None:
        """Pages that are still to come go to these nodes by turns, whoever touches them first."""
        self._call(
            "mbind",
            ctypes.c_void_p(address),
            ctypes.c_ulong(length),
            ctypes.c_int(_MPOL_INTERLEAVE),
            _mask(nodes),
            ctypes.c_ulong(_MASK_BITS),
            ctypes.c_uint(0),
        )

    def interleave_thread(self, nodes: Sequence[int]) -> None:
        """The same for what this thread touches first from now on. No nodes: as usual again."""
        mode = _MPOL_INTERLEAVE if nodes else _MPOL_DEFAULT
        self._call(
            "set_mempolicy", ctypes.c_int(mode), _mask(nodes) if nodes else None, ctypes.c_ulong(_MASK_BITS if nodes else 0)
        )

    def cpus(self) -> set[int]:
        """Which this thread may run on."""
        return os.sched_getaffinity(0)

    def run_on(self, cpus: Iterable[int]) -> None:
        """This thread, and those that it will start."""
        os.sched_setaffinity(0, cpus)

    def memory_nodes(self) -> list[int]:
        """Which NUMA nodes this process may have memory on."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                return list(cpu_list(line.partition(":")[2]))
        raise OSError(errno.ENOSYS, "the kernel does not say which NUMA nodes may be used")


def _mask(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_ulong]:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // bits))()
    for node in nodes:
        mask[node // bits] |= 1 << (node % bits)
    return mask


# --------------------------------------------------------------------------- where memory is


def sample(address: int, length: int, most: int = _SAMPLES) -> list[int]:
    """Addresses of pages spread over a stretch of memory, unevenly: memory that goes to the nodes by turns has a period."""
    first = address // mmap.PAGESIZE
    pages = (address + length - 1) // mmap.PAGESIZE - first + 1
    count = min(pages, most)
    step = pages // count
    return [(first + number * pages // count + (number * 0x9E3779B1 >> 16) % step) * mmap.PAGESIZE for number in range(count)]


def node_of(pid: int, regions: Iterable[tuple[int, int]], system: System) -> int | None:
    """The NUMA node that nearly all of a process's memory in these (address, length) is on, as far as it has been touched.
    None where it is spread, or nothing was touched yet. Raises OSError."""
    found: Counter[int] = Counter()
    asked = sorted(regions, key=lambda region: -region[1])[:_MAX_SAMPLES]
    for address, length in asked:
        if length > 0:
            sampled = sample(address, length, min(_SAMPLES, _MAX_SAMPLES // len(asked)))
            for node in system.nodes_of_pages(pid, sampled):
                if node >= 0:
                    found[node] += max(1, length // len(sampled))
    if not found:
        return None
    node, size = found.most_common(1)[0]
    return node if size >= _MOSTLY * found.total() else None


# --------------------------------------------------------------------------- movers


class Nearness:
    """Keeps the calling thread, and those that it starts, on the processors beside some memory. Not thread-safe."""

    def __init__(self, system: System | None = None, root: str | Path = "/sys") -> None:
        self._system = system or System()
        self._nodes = {node.number: node for node in read_numa_nodes(root)}
        self._allowed: set[int] | None = None
        """Before anything was changed."""

    def move_to(self, pid: int, regions: Iterable[tuple[int, int]]) -> str:
        """Beside a process's memory, or anywhere that was allowed in the beginning where that memory is spread. Returns what
        was done, or "" where there is nothing to do. Raises nothing."""
        if len(self._nodes) < 2:
            return ""
        try:
            if self._allowed is None:
                self._allowed = self._system.cpus()
            number = node_of(pid, regions, self._system)
            node = self._nodes.get(number) if number is not None else None
            near = self._allowed & set(node.cpus) if node is not None else set()
            self._system.run_on(near or self._allowed)
        except OSError as error:
            return "not kept beside the engine's memory: " + _REFUSED.format(error.strerror, "move_pages")
        return f"on NUMA node {number}, beside the engine's memory" if near else ""


# --------------------------------------------------------------------------- the store's memory


def spread(nodes: Sequence[NumaNode], allowed: Sequence[int]) -> list[int]:
    """The nodes over which a store's memory goes: those with memory and processors that may be used. Fewer than two: none."""
    chosen = [node.number for node in nodes if node.has_memory and node.cpus and node.number in allowed]
    return chosen if len(chosen) > 1 else []


class Interleaving:
    """Spreads memory over all NUMA nodes, so that no processor and no NIC is far from all of it."""

    def __init__(self, enabled: bool = True, system: System | None = None, root: str | Path = "/sys") -> None:
        self.problem = ""
        """Why it is not spread, as a sentence for the log."""
        self._system = system or System()
        self.nodes: list[int] = []
        if enabled:
            with contextlib.suppress(OSError, ValueError):
                self.nodes = spread(read_numa_nodes(root), self._system.memory_nodes())

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Around calls of this thread that allocate at once, such as of huge pages."""
        changed = False
        if self.nodes:
            try:
                self._system.interleave_thread(self.nodes)
                changed = True
            except OSError as error:
                self._refused(error, "set_mempolicy")
        try:
            yield
        finally:
            if changed:
                with contextlib.suppress(OSError):
                    self._system.interleave_thread([])

    def of(self, address: int, length: int) -> None:
        """A mapping of which nothing has been touched yet. Holds for all processes that map the same memfd."""
        if self.nodes:
            try:
                self._system.interleave_memory(address, length, self.nodes)
            except OSError as error:
                self._refused(error, "mbind")

    def _refused(self, error: OSError, call: str) -> None:
        self.problem = f"memory is not spread over the NUMA nodes {self.nodes}: " + _REFUSED.format(error.strerror, call)
