"""CPU seconds and memory of processes, beside the wall time of what they did.

A contender's turn in `harness.interleave` is metered as a whole, or, where a part of it is what counts (a load, and not the
store before it), that part: the last one that said `with METER.timed()`. Not for use by several threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from statistics import median


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one turn. `cpu_s`: of all threads of all its processes. `peak_bytes`: the most private memory that each of them had
    resident meanwhile, summed up, and the shared memory that any of them has mapped, once."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


class Figures(list[float]):
    """What a contender did, one a round, and what its turns cost."""

    def __init__(self, values: Sequence[float] = ()) -> None:
        super().__init__(values)
        self.costs: list[Cost] = []


def cost_of(values: Sequence[float]) -> Cost | None:
    """Medians; the peak is that of all rounds. None for figures that were not metered."""
    costs = values.costs if isinstance(values, Figures) else []
    if not costs:
        return None
    return Cost(
        median(each.wall_s for each in costs),
        median(each.cpu_s for each in costs),
        max(each.peak_bytes for each in costs),
    )


class Meter:
    """`apart`: children of this process that are not ours, such as a peer's. Who starts one adds it, and removes it."""

    def __init__(self) -> None:
        self.apart: set[int] = set()
        self._turn = False
        self._last: Cost | None = None

    @contextlib.contextmanager
    def timed(self, pids: Collection[int] = ()) -> Iterator[None]:
        """Meters what happens inside: in these processes, or else in this one and those that it has started. Nothing
        outside of a turn."""
        if not self._turn:
            yield
            return

        def now() -> Collection[int]:
            return pids or tree(os.getpid(), self.apart)

        own = not pids
        before = now()
        for pid in before:
            _forget_peak(pid)
        used, started = _cpu_s(before, own), time.perf_counter()
        yield
        wall, used = time.perf_counter() - started, _cpu_s(before, own) - used
        after = now()  # looking for them costs milliseconds that are not theirs
        used += _cpu_s(set(after) - set(before), False)
        self._last = Cost(wall, used, _peak(after))

    def turn(self, run: Callable[[int], float], number: int) -> tuple[float, Cost]:
        """Its figure, and what it cost."""
        self._turn, self._last = True, None
        try:
            with self.timed():
                figure = run(number)
                narrow = self._last
        finally:
            self._turn = False
        assert self._last is not None
        return figure, narrow or self._last


METER = Meter()
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero")


def tree(root: int, without: Collection[int] = ()) -> list[int]:
    """A process and those that it and its children have started, but for `without` and theirs."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry))
    found, to_do = [], [root]
    while to_do:
        pid = to_do.pop()
        found.append(pid)
        to_do += [child for child in children.get(pid, ()) if child not in without]
    return found


def _cpu_s(pids: Collection[int], with_ended: bool) -> float:
    """So far, and of the children of this process that have ended, if asked for."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)
    if with_ended:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        total += ended.ru_utime + ended.ru_stime
    return total


def _forget_peak(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak(pids: Collection[int]) -> int:
    """Nothing of those that have ended."""
    private, shared = 0, {}
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
            private += max(0, kib.get("VmHWM", 0) - kib.get("RssShmem", 0)) << 10
            for place in Path(f"/proc/{pid}/maps").read_text().splitlines():
                span, _, offset, device, inode, *name = place.split(maxsplit=5)
                if name and name[0].startswith(_SHARED):
                    first, last = (int(each, 16) for each in span.split("-"))
                    end = int(offset, 16) + last - first
                    shared[device, inode] = max(end, shared.get((device, inode), 0))
    return private + sum(shared.values())
