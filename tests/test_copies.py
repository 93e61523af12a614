"""Large pages are copied by several threads, whose work is over when the batch is."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client import copies as copies_module
from hicache_mooncake.client.batch import Batch
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.copies import GROUP_BYTES, HANDED_BYTES, LARGE_BYTES, Copies, Copy, threads_for
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.testing.local import page_hash, pattern
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.memory import BodyLayout, Group, MappedMemory
from tests.conftest import NodeProcess

NS = b"n" * 16
LARGE = BodyLayout([p.Run(0, LARGE_BYTES, LARGE_BYTES)])
SMALL = BodyLayout([p.Run(0, LARGE_BYTES - 2, LARGE_BYTES - 2)])
STRIDED = BodyLayout([p.Run(0, LARGE_BYTES, LARGE_BYTES, [(2, LARGE_BYTES)])])


@pytest.fixture
def copies() -> Iterator[Copies]:
    made = Copies(3)
    yield made
    made.close()


def test_how_many_threads_there_are_is_bounded() -> None:
    assert [threads_for(cores) for cores in (1, 2, 7, 8, 16, 192)] == [1, 1, 1, 2, 4, 4]
    assert threads_for(2, 6) == 6


def test_large_pages_are_copied_at_once_and_told_of_in_order(copies: Copies) -> None:
    together = threading.Barrier(3)

    def work(item: int) -> tuple[int, int]:
        together.wait(60)  # each waits for two others: one thread alone would never come through
        return item, threading.get_ident()

    done = list(copies.each(work, range(9), LARGE))
    assert [item for item, _ in done] == list(range(9))
    assert len({thread for _, thread in done}) == 3


@pytest.mark.parametrize(("layout", "count"), [(SMALL, 8), (STRIDED, 8), (LARGE, 1)], ids=["small", "strided", "single"])
def test_others_are_copied_by_the_caller(copies: Copies, layout: BodyLayout, count: int) -> None:
    assert set(copies.each(lambda _: threading.get_ident(), range(count), layout)) == {threading.get_ident()}


def test_nothing_is_under_way_when_a_batch_is_left(copies: Copies) -> None:
    running = 0
    lock = threading.Lock()

    def work(item: int) -> int:
        nonlocal running
        with lock:
            running += 1
        time.sleep(0.02)
        with lock:
            running -= 1
        return item

    batch = copies.each(work, range(50), LARGE)
    assert next(batch) == 0
    batch.close()  # type: ignore[attr-defined]
    assert running == 0


def test_without_threads_the_copies_are_made_one_after_the_other(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    for _ in range(2):
        assert list(copies.each(lambda item: (item, threading.get_ident()), range(4), LARGE)) == [
            (item, threading.get_ident()) for item in range(4)
        ]


def test_pages_copied_at_once_are_whole(copies: Copies) -> None:
    size, count = (1 << 20) + (300 << 10) + 6, 8
    fds = [create_memfd(name, size * count) for name in ("engine", "segment")]
    engine = Mapping(fds[0], size * count, writable=True)
    segment = Mapping(fds[1], size * count, writable=True)
    hashes = [page_hash(i) for i in range(count)]
    base, half = 1 << 40, size // 2
    runs = [p.Run(base, size, half), p.Run(base + half, size, size - half)]
    batch = Batch(p.Transfer("load", NS, b"".join(hashes), runs, array("q", range(count)).tobytes(), 1.0))
    memory = MappedMemory([p.Region(base, size * count, 0)], fds[:1])
    bodies = [pattern(page, size) for page in hashes]
    for i, body in enumerate(bodies):
        engine.view[i * size : (i + 1) * size] = body

    places = [(i, i * size) for i in range(count)]

    def copied(copy: Copy) -> list[int | str]:
        groups = list(copies.pages(copy, batch, segment, places, time.monotonic() + 60))
        assert [place for group, _ in groups for place in group] == places
        return [checksum for _, checksums in groups for checksum in checksums]

    stored = copied(memory.store_pages)
    assert [bytes(segment.view[i * size : (i + 1) * size]) == body for i, body in enumerate(bodies)] == [True] * count
    engine.view[:] = bytes(engine.length)
    assert copied(memory.load_pages) == stored
    assert [bytes(engine.view[i * size : (i + 1) * size]) == body for i, body in enumerate(bodies)] == [True] * count
    memory.close()
    for mapping, fd in ((engine, fds[0]), (segment, fds[1])):
        mapping.close()
        os.close(fd)


class Clock:
    """Time that goes on when a page is copied."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("size", [GROUP_BYTES // 4, HANDED_BYTES], ids=["small", "at once"])
def test_after_the_deadline_no_group_is_begun(copies: Copies, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    clock = Clock()
    monkeypatch.setattr(copies_module, "time", clock)
    fd = create_memfd("segment", 1 << 12)
    segment = Mapping(fd, 1 << 12, writable=True)
    count = 12
    job = p.Transfer("load", NS, b"".join(map(page_hash, range(count))), [p.Run(0, size, size)], bytes(8 * count), 1.0)
    asked: list[int] = []

    def copy(group: Group, layout: BodyLayout, segment: Mapping) -> Iterator[int | None]:
        for offset in group.offsets:
            clock.now += 1.0
            asked.append(offset)
            yield None if offset == 1 else offset

    places = [(i, i) for i in range(count)]
    done = [why for _, group in copies.pages(copy, Batch(job), segment, places, 5.5) for why in group]
    assert sorted(asked) == [i for i, why in enumerate(done) if why != "deadline"], "what is told of was copied, and no more"
    assert done[1] == "engine_memory"
    assert done[-1] == "deadline"
    assert len(asked) < 6 + 4, "the group that was under way, or a page of each of the threads"
    assert list(copies.pages(copy, Batch(job), segment, [], 99.0)) == []
    segment.close()
    os.close(fd)


def test_a_rank_with_copy_threads_gets_what_it_stored(start_node: Callable[..., NodeProcess]) -> None:
    size, count = 2 << 20, 8
    fd = create_memfd("engine", size * count)
    engine = Mapping(fd, size * count, writable=True)
    client = PoolClient(start_node(dram="64MiB").settings(copy_threads=3, deadline_s=7.0), "test")
    try:
        run = p.Run(engine.address, size, size)
        client.share(PoolGeometry("kv", (run,), 1, count, (p.Region(engine.address, size * count, 0),), (fd,), affine=True))
        hashes = [page_hash(i) for i in range(count)]
        for i, page in enumerate(hashes):
            engine.view[i * size : (i + 1) * size] = pattern(page, size)
        body, numbers = Body(NS, (run,)), array("q", range(count))
        assert client.transfer("store", body, b"".join(hashes), numbers).ok == b"\x01" * count
        engine.view[:] = bytes(engine.length)
        assert client.transfer("load", body, b"".join(hashes), numbers).ok == b"\x01" * count
        for i, page in enumerate(hashes):
            assert engine.view[i * size : (i + 1) * size] == pattern(page, size)
    finally:
        client.close()
        engine.close()
        os.close(fd)
