"""Pages that are copied by one call: byte for byte what plain Python copies, and a page that cannot be costs no other one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hicache_mooncake import protocol as p
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.memory import CHUNK, BodyLayout, EngineMemory, ForeignMemory, Group, MappedMemory, extent
from tests.test_memory_strided import MEMORY_BYTES, SEED, Engine, bodies, digest, reach

OUTSIDE = 1 << 40
NOISE = random.Random(0).randbytes(MEMORY_BYTES)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@pytest.fixture(scope="module")
def segment() -> Iterator[Mapping]:
    fd = create_memfd("segment", MEMORY_BYTES)
    mapping = Mapping(fd, MEMORY_BYTES, writable=True)
    yield mapping
    mapping.close()
    os.close(fd)


def halves(engine: Engine) -> MappedMemory:
    """The same memory as two regions that do not lie one after the other."""
    half = engine.length // 2
    regions = [p.Region(engine.address, half, 0), p.Region(engine.address + OUTSIDE, half, 0, half)]
    return MappedMemory(regions, [engine.fd])


@pytest.fixture(scope="module", params=["mapped", "two regions", "process_vm"])
def memory(request: pytest.FixtureRequest, engine: Engine) -> Iterator[EngineMemory]:
    made = halves(engine) if request.param == "two regions" else reach(request.param, engine)
    yield made
    made.close()


LENGTHS = st.one_of(st.integers(1, 4096), st.sampled_from([32 << 10, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]))


@st.composite
def contiguous(draw: st.DrawFn) -> tuple[list[p.Run], list[int]]:
    runs, offsets, at = [], [], 0
    for length in draw(st.lists(LENGTHS, min_size=1, max_size=6)):
        at += draw(st.integers(0, 70))
        runs.append(p.Run(0, 0, length))
        offsets.append(at)
        at += length
    return runs, offsets


def in_order(pages: int, data: st.DataObject) -> list[int]:
    return data.draw(st.permutations(range(pages)))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.one_of(contiguous(), bodies()), count=st.integers(1, 9), seed=st.integers(0, 1 << 20), data=st.data())
def test_pages_of_one_call_come_and_go_like_in_plain_python(
    memory: EngineMemory,
    engine: Engine,
    segment: Mapping,
    body: tuple[list[p.Run], list[int]],
    count: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """In any order on both sides, over one region or two, and with some of them out of the memory that was shared."""
    runs, offsets = body
    layout = BodyLayout(runs)
    apart = max(offset + extent(run) for run, offset in zip(runs, offsets, strict=True))
    half = engine.length // 2
    count = min(count, half // apart)
    assume(count > 0)
    two = isinstance(memory, MappedMemory) and len(memory._starts) > 1
    away = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    strangers = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    here = [in_order(count, data)[page] * apart + half * away[page] for page in range(count)]
    places = [slot * layout.length for slot in in_order(count, data)]

    def shared_at(page: int, start: int) -> int:
        if page in strangers:
            return 3 * OUTSIDE + start
        return engine.address + (OUTSIDE - half if two and away[page] else 0) + start

    columns = [[shared_at(page, here[page] + offset) for page in range(count)] for offset in offsets]
    seeds = [SEED] * count
    group = Group(places, columns, seeds)
    mine = [[engine.address + here[page] + offset for offset in offsets] for page in range(count)]
    windows = [slice(0, count * apart), slice(half, half + count * apart)]

    def fill(start: int) -> None:
        for window in windows:
            engine.memory.view[window] = NOISE[start : start + count * apart]

    def contents() -> list[bytes]:
        return [bytes(engine.memory.view[window]) for window in windows]

    fill(seed)
    before = contents()
    segment.view[: count * layout.length] = b"\xee" * (count * layout.length)
    wanted = [engine.gather(runs, mine[page]) for page in range(count)]
    stored = list(memory.store_pages(group, layout, segment))
    assert stored == [None if page in strangers else digest(wanted[page]) for page in range(count)]
    for page, place in enumerate(places):
        untouched = b"\xee" * layout.length
        assert segment.view[place : place + layout.length] == (untouched if page in strangers else wanted[page])
    assert contents() == before

    segment.view[: count * layout.length] = NOISE[seed + 1 : seed + 1 + count * layout.length]
    bodies_there = [bytes(segment.view[place : place + layout.length]) for place in places]
    for page in set(range(count)) - strangers:
        engine.scatter(bodies_there[page], runs, mine[page])
    after = contents()
    fill(seed)
    loaded = list(memory.load_pages(group, layout, segment))
    assert loaded == [None if page in strangers else digest(bodies_there[page]) for page in range(count)]
    assert contents() == after


@pytest.mark.parametrize("length", [4096, CHUNK, CHUNK + 4096])
def test_a_load_is_checked_by_what_arrived(engine: Engine, length: int) -> None:
    """The engine's memory is the segment, some bytes on: what arrives is not what was there, and neither is what is left."""
    segment = Mapping(engine.fd, engine.length, writable=True)
    memory = MappedMemory(engine.regions(), [engine.fd])
    layout = BodyLayout([p.Run(0, 0, length)])
    try:
        for shift in (1, 100, 777, 3001):
            segment.view[: length + shift] = NOISE[shift : length + 2 * shift]
            (arrived,) = memory.load_pages(Group([0], [[engine.address + shift]], [SEED]), layout, segment)
            assert arrived == digest(bytes(engine.memory.view[shift : shift + length]))
    finally:
        memory.close()
        segment.close()


def test_a_store_is_checked_by_what_lies_in_the_segment(engine: Engine) -> None:
    segment = Mapping(engine.fd, engine.length, writable=True)
    memory = MappedMemory(engine.regions(), [engine.fd])
    layout = BodyLayout([p.Run(0, 0, 4096)])
    try:
        for shift in (1, 100, 777, 3001):
            segment.view[: 4096 + shift] = NOISE[shift : 4096 + 2 * shift]
            (stored,) = memory.store_pages(Group([shift], [[engine.address]], [SEED]), layout, segment)
            assert stored == digest(bytes(engine.memory.view[shift : shift + 4096]))
    finally:
        memory.close()
        segment.close()


@pytest.mark.parametrize("op", ["store_pages", "load_pages"])
def test_a_page_is_copied_when_its_checksum_is_asked_for(
    memory: EngineMemory, engine: Engine, segment: Mapping, op: str
) -> None:
    """Whoever stops asking, since the time is up, knows that no byte moves any more."""
    layout = BodyLayout([p.Run(0, 0, 4096)])
    group = Group([0, 4096, 8192], [[engine.address + at for at in (0, 4096, 8192)]], [SEED] * 3)
    engine.memory.view[:16384] = b"\x11" * 16384
    segment.view[:16384] = b"\x22" * 16384
    target, filled = (segment.view, b"\x11") if op == "store_pages" else (engine.memory.view, b"\x22")
    untouched = bytes(target[:1])
    call: Callable[..., Iterator[int | None]] = getattr(memory, op)
    copying = call(group, layout, segment)
    assert target[:12288] == untouched * 12288
    next(copying)
    assert target[:12288] == filled * 4096 + untouched * 8192


@pytest.mark.parametrize("offsets", [[-1, 0], [0, MEMORY_BYTES - 4095]], ids=["before", "behind"])
@pytest.mark.parametrize("op", ["store_pages", "load_pages"])
def test_a_place_out_of_the_segment_is_refused(engine: Engine, segment: Mapping, op: str, offsets: Sequence[int]) -> None:
    memory = MappedMemory(engine.regions(), [engine.fd])
    layout = BodyLayout([p.Run(0, 0, 4096)])
    with pytest.raises(ValueError, match="4096 bytes"):
        getattr(memory, op)(Group(offsets, [[engine.address] * 2], [SEED] * 2), layout, segment)
    memory.close()


def test_a_process_that_has_gone_costs_each_of_its_pages(segment: Mapping) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    memory = ForeignMemory(pid, [p.Region(4096, 1 << 20, -1)])
    group = Group([0, 64], [[4096, 8192]], [SEED] * 2)
    assert list(memory.store_pages(group, BodyLayout([p.Run(0, 0, 64)]), segment)) == [None, None]
