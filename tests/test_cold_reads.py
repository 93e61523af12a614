"""What a mover does with what comes from the cold tier, and with what does not, from a reader that is told what to give."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator, Sequence

import pytest
import xxhash

from hicache_mooncake import protocol as p
from hicache_mooncake.client.batch import Batch
from hicache_mooncake.client.cold_reads import ColdReads
from hicache_mooncake.cold.layout import blocks
from hicache_mooncake.cold.pages_file import scratch
from hicache_mooncake.cold.reading import Groups
from hicache_mooncake.testing.local import page_hash, pattern
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.memory import MappedMemory

NS = b"n" * 16
SIZE = 5000
"""Of a body: no whole block."""
COUNT = 4
BASE = 1 << 40
UNTOUCHED = b"\xaa" * SIZE


class FakeReader:
    """Gives what is on the `disk` (offset -> body or error), up to `together` bodies in one piece of memory, as if they were
    neighbours that were written last one first; from the first that is not there on it gives None."""

    def __init__(self, disk: dict[int, bytes | OSError], together: int = 1) -> None:
        self.disk = disk
        self.together = together
        self.open = 0

    def groups(self, wanted: Sequence[tuple[int, int]], deadline: float) -> Groups:
        self.open += 1
        buffer = scratch(blocks(SIZE) * self.together)
        late = False
        try:
            for first in range(0, len(wanted), self.together):
                some = wanted[first : first + self.together]
                bodies = [self.disk.get(offset) for offset, _ in some]
                late |= None in bodies
                error = next((body for body in bodies if isinstance(body, OSError)), None)
                places = [blocks(SIZE) * number for number in range(len(some))][::-1]
                if late or error:
                    yield None if late else error, places
                    continue
                for place, body in zip(places, bodies, strict=True):
                    assert isinstance(body, bytes)
                    buffer[place : place + len(body)] = body
                yield buffer, places  # one for all: good until the next is asked for
                buffer[:] = b"\xee" * len(buffer)
        finally:
            self.open -= 1


class Engine:
    def __init__(self) -> None:
        self.fds = [create_memfd(name, SIZE * COUNT) for name in ("engine", "segment")]
        self.pages, self.segment = (Mapping(fd, SIZE * COUNT, writable=True) for fd in self.fds)
        self.pages.view[:] = self.segment.view[:] = UNTOUCHED * COUNT
        self.hashes = [page_hash(i) for i in range(COUNT)]
        self.bodies = [pattern(each, SIZE) for each in self.hashes]
        self.ok = bytearray(COUNT)
        self.turns = 0
        self.memory = MappedMemory([p.Region(BASE, SIZE * COUNT, 0)], self.fds[:1])
        self.batch = self._batch()
        self.checksums = [xxhash.xxh3_64_intdigest(body, self.batch.seed(i)) for i, body in enumerate(self.bodies)]

    def _batch(self, base: int = BASE) -> Batch:
        numbers = array("q", range(COUNT)).tobytes()
        return Batch(p.Transfer("load", NS, b"".join(self.hashes), [p.Run(base, SIZE, SIZE)], numbers, 1.0))

    def disk(self, changed: dict[int, bytes | OSError | None] | None = None, together: int = 1) -> FakeReader:
        there = dict(enumerate(self.bodies)) | (changed or {})
        return FakeReader({4096 * i: body for i, body in there.items() if body is not None}, together)

    def located(self, status: Sequence[int]) -> ColdReads:
        rooms = [i * SIZE for i, each in enumerate(status) if each == p.READ_ON]
        where = [4096 * i for i in range(COUNT)]
        located = p.Located(1, bytes(status), where, self.checksums, [], cold_txn=7, cold_room=rooms)
        return ColdReads(located, range(COUNT))

    def load(self, reads: ColdReads, reader: FakeReader | None, *, left_s: float = 20.0, stays: bool = True) -> None:
        segment = self.segment if stays else None
        deadline = time.monotonic() + left_s
        reads.load(reader, self.memory, self.batch, segment, self.ok, deadline, self.turn)  # type: ignore[arg-type]
        assert reader is None or reader.open == 0, "what was read is given back"

    def turn(self) -> None:
        self.turns += 1

    def has(self, mapping: Mapping, i: int) -> bool:
        body = bytes(mapping.view[i * SIZE : (i + 1) * SIZE])
        assert body in (self.bodies[i], UNTOUCHED)
        return body == self.bodies[i]

    def close(self) -> None:
        self.memory.close()
        self.pages.close()
        self.segment.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def test_pages_are_copied_to_the_engine_and_those_that_are_to_stay_to_the_segment(engine: Engine) -> None:
    reads = engine.located([p.READ, p.LOCAL, p.READ_ON, p.MISS])
    engine.load(reads, engine.disk())
    assert engine.ok == bytes([1, 0, 1, 0])
    assert [engine.has(engine.pages, i) for i in range(COUNT)] == [True, False, True, False]
    assert [engine.has(engine.segment, i) for i in range(COUNT)] == [False, False, True, False]
    assert reads.commit() == p.Commit(7, b"\x01", [engine.checksums[2]])
    assert (reads.loaded, reads.failed, reads.bad) == (2, {}, [])
    assert engine.turns == 2, "others get their turn after each"


def test_neighbours_are_copied_each_to_its_own_place(engine: Engine) -> None:
    reads = engine.located([p.READ_ON, p.READ, p.READ_ON, p.READ])
    engine.load(reads, engine.disk(together=3))
    assert engine.ok == b"\x01" * COUNT
    assert all(engine.has(engine.pages, i) for i in range(COUNT))
    assert [engine.has(engine.segment, i) for i in range(COUNT)] == [True, False, True, False]
    assert engine.turns == 2


def test_one_page_that_the_engine_does_not_take_is_no_matter_of_its_neighbours(engine: Engine) -> None:
    numbers = array("q", [0, 1, COUNT, 3]).tobytes()
    engine.batch = Batch(p.Transfer("load", NS, b"".join(engine.hashes), [p.Run(BASE, SIZE, SIZE)], numbers, 1.0))
    reads = engine.located([p.READ_ON] * COUNT)
    engine.load(reads, engine.disk(together=4))
    assert engine.ok == bytes([1, 1, 0, 1])
    assert {i: doubt.why for i, doubt in reads.failed.items()} == {2: "engine_memory"}
    assert reads.commit() == p.Commit(7, b"\x01\x01\x00\x01", engine.checksums)


def test_a_batch_without_cold_pages_commits_nothing(engine: Engine) -> None:
    reads = engine.located([p.LOCAL] * COUNT)
    assert (reads.pages, reads.commit()) == ([], None)


def test_what_does_not_come_in_time_is_a_miss_of_the_deadline(engine: Engine) -> None:
    reads = engine.located([p.READ_ON] * COUNT)
    engine.load(reads, engine.disk({2: None}), left_s=-1.0)
    assert engine.ok == bytes([1, 1, 0, 0])
    assert {i: doubt.why for i, doubt in reads.failed.items()} == {2: "deadline", 3: "deadline"}
    assert not reads.bad
    assert reads.commit() == p.Commit(7, b"\x01\x01\x00\x00", engine.checksums)


def test_what_is_not_read_although_there_is_time_cannot_be_read(engine: Engine) -> None:
    """All threads of the reader hang: nobody waits for the deadline."""
    reads = engine.located([p.READ] * COUNT)
    engine.load(reads, engine.disk({1: None}))
    assert {doubt.why for doubt in reads.failed.values()} == {"cold_unreadable"}
    assert set(reads.failed) == {1, 2, 3}


def test_a_page_that_cannot_be_read_is_no_matter_of_the_others(engine: Engine) -> None:
    reads = engine.located([p.READ_ON] * COUNT)
    engine.load(reads, engine.disk({1: OSError(5, "Input/output error")}))
    assert engine.ok == bytes([1, 0, 1, 1])
    assert {i: doubt.why for i, doubt in reads.failed.items()} == {1: "cold_unreadable"}
    assert not reads.bad
    assert reads.commit() == p.Commit(7, b"\x01\x00\x01\x01", engine.checksums)


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("what", ["a bit", "another page", "zeros"])
def test_what_is_damaged_counts_nowhere_and_its_place_is_told(engine: Engine, what: str, together: int) -> None:
    body = bytearray(engine.bodies[1])
    body[4321] ^= 1
    damaged = {"a bit": bytes(body), "another page": engine.bodies[2], "zeros": bytes(SIZE)}[what]
    reads = engine.located([p.READ_ON] * COUNT)
    engine.load(reads, engine.disk({1: damaged}, together))
    assert engine.ok == bytes([1, 0, 1, 1])
    assert {i: doubt.why for i, doubt in reads.failed.items()} == {1: "checksum_cold"}
    assert reads.bad == [(engine.hashes[1], 4096)]
    assert not engine.has(engine.segment, 1)
    assert reads.commit() == p.Commit(7, b"\x01\x00\x01\x01", engine.checksums)


def test_room_that_went_back_with_the_connection_is_not_written_to(engine: Engine) -> None:
    reads = engine.located([p.READ_ON] * COUNT)
    engine.load(reads, engine.disk(), stays=False)
    assert engine.ok == b"\x01" * COUNT
    assert not any(engine.has(engine.segment, i) for i in range(COUNT))
    assert reads.commit() == p.Commit(7, bytes(COUNT), engine.checksums)


def test_without_the_file_nothing_comes(engine: Engine) -> None:
    reads = engine.located([p.READ_ON, p.READ, p.MISS, p.MISS])
    engine.load(reads, None)
    assert engine.ok == bytes(COUNT)
    assert {doubt.why for doubt in reads.failed.values()} == {"cold_unreadable"}


def test_an_engine_whose_memory_is_not_there_gets_nothing_and_nothing_stays(engine: Engine) -> None:
    engine.batch = engine._batch(base=BASE + SIZE * COUNT)
    reads = engine.located([p.READ_ON] * COUNT)
    engine.load(reads, engine.disk())
    assert {doubt.why for doubt in reads.failed.values()} == {"engine_memory"}
    assert not any(engine.has(engine.segment, i) for i in range(COUNT))
    assert reads.commit() == p.Commit(7, bytes(COUNT), engine.checksums)
