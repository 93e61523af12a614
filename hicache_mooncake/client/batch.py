"""One batch as a mover sees it: which pages, and where in the engine's memory and in the node's segment their bytes go."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence

from hicache_mooncake import protocol as p
from hicache_mooncake.keys import checksum_seeds
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.memory import BodyLayout, Group

_MAX_BODY_BYTES = 4 << 30
_MAX_DIMS = 8
_MAX_LAYOUTS = 16


class Landing:
    """Where in the node's segment pages from other nodes go first, for all ranks of this host. `checksums` has those that came
    whole. Not to be written to once the connection to the node has gone: the room is somebody else's then."""

    def __init__(self, segment: Mapping, txn: int) -> None:
        self.segment = segment
        self.txn = txn
        self.offsets: dict[int, int] = {}
        self.checksums: dict[int, int] = {}


class Layouts:
    """Of the last batches: an engine's pools are few, and one of many layers takes a millisecond to work out."""

    def __init__(self) -> None:
        self._known: deque[tuple[list[p.Run], BodyLayout]] = deque(maxlen=_MAX_LAYOUTS)

    def of(self, runs: list[p.Run]) -> BodyLayout:
        """Raises ProtocolError for runs that cannot be."""
        for known, layout in self._known:
            if known == runs:
                return layout
        for run in runs:
            _check_run(run)
        body_bytes = sum(run.length for run in runs)
        if not 0 < body_bytes <= _MAX_BODY_BYTES:
            raise p.ProtocolError(f"page bodies of {body_bytes} bytes")
        layout = BodyLayout(runs)
        self._known.append((runs, layout))
        return layout


class Batch:
    """Geometry of one Transfer: the run addresses of page i. Raises ProtocolError for one that cannot be."""

    def __init__(self, job: p.Transfer, layouts: Layouts | None = None) -> None:
        self.job = job
        self.count = p.count_hashes(job.hashes)
        self.layout = (layouts or Layouts()).of(job.runs)
        self.body_bytes = self.layout.length
        self._places = [(run.address, run.stride) for run in job.runs]
        self._seeds = checksum_seeds(job.namespace, job.hashes)
        self._pages = array("q", job.pages)
        self._addresses = array("q", job.addresses)
        expected = self.count * len(job.runs) if job.addresses else self.count
        if len(self._addresses or self._pages) != expected:
            raise p.ProtocolError(
                f"batch of {self.count} keys does not match its {len(self._addresses or self._pages)} addresses"
            )

    def seed(self, i: int) -> int:
        return self._seeds[i]

    def addresses(self, i: int) -> Sequence[int]:
        if self._addresses:
            runs = len(self.job.runs)
            return self._addresses[i * runs : (i + 1) * runs]
        page = self._pages[i]
        return [address + page * stride for address, stride in self._places]

    def group(self, places: Sequence[tuple[int, ...]]) -> Group:
        """These pages, as (page, offset in the segment, ...), to be copied by one call."""
        numbers = [place[0] for place in places]
        return Group([place[1] for place in places], self._columns(numbers), [self._seeds[i] for i in numbers])

    def _columns(self, numbers: Sequence[int]) -> list[list[int]]:
        if self._addresses:
            runs = len(self.job.runs)
            return [[self._addresses[i * runs + run] for i in numbers] for run in range(runs)]
        pages = [self._pages[i] for i in numbers]
        return [[address + page * stride for page in pages] for address, stride in self._places]


def _check_run(run: p.Run) -> None:
    counts = [count for count, _ in run.dims]
    steps = [step for _, step in run.dims]
    if run.length <= 0 or len(run.dims) > _MAX_DIMS or min(counts, default=1) <= 0 or min(steps, default=1) <= 0:
        raise p.ProtocolError(f"a run of {run.length} bytes with counts {counts} and steps {steps}")
    if run.length % math.prod(counts):
        raise p.ProtocolError(f"a run of {run.length} bytes cannot be {counts} equal pieces")
