"""Strided runs: what every way to reach engine memory gathers and scatters is what plain Python does, byte for byte."""

from __future__ import annotations

import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hicache_mooncake import protocol as p
from hicache_mooncake.client.batch import Batch, Layouts
from hicache_mooncake.client.client import Body, PoolClient
from hicache_mooncake.client.geometry import PoolGeometry
from hicache_mooncake.config import Settings
from hicache_mooncake.testing.local import page_hash, pattern
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.memory import (
    CHUNK,
    STRIDED_CHUNK,
    BodyLayout,
    EngineMemory,
    EngineMemoryError,
    ForeignMemory,
    MappedMemory,
    copy_here,
    extent,
)
from tests.conftest import MasterProcess, NodeProcess, environment, wait_until

SEED = 0x1234_5678_9ABC_DEF0
MEMORY_BYTES = 8 << 20


def places(run: p.Run, address: int) -> Iterator[tuple[int, int]]:
    """(address, length) of each contiguous piece of a run at `address`, in body order: the reference."""
    piece = run.length
    for count, _ in run.dims:
        piece //= count
    for where in itertools.product(*(range(0, count * step, step) for count, step in run.dims)):
        yield address + sum(where), piece


class Engine:
    """Engine memory in a memfd, read and written by plain slices."""

    def __init__(self, length: int = MEMORY_BYTES) -> None:
        self.fd = create_memfd("strided", length)
        self.memory = Mapping(self.fd, length, writable=True)
        self.address = self.memory.address
        self.length = length

    def regions(self, *, memfd: bool = True) -> list[p.Region]:
        return [p.Region(self.address, self.length, 0 if memfd else -1)]

    def gather(self, runs: Sequence[p.Run], addresses: Sequence[int]) -> bytes:
        view = self.memory.view
        return b"".join(
            view[at - self.address : at - self.address + size]
            for run, address in zip(runs, addresses, strict=True)
            for at, size in places(run, address)
        )

    def scatter(self, body: bytes, runs: Sequence[p.Run], addresses: Sequence[int]) -> None:
        done = 0
        for run, address in zip(runs, addresses, strict=True):
            for at, size in places(run, address):
                self.memory.view[at - self.address : at - self.address + size] = body[done : done + size]
                done += size

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@dataclass
class Way:
    """One way to reach engine memory, under one signature. `body` addresses are in this process."""

    memory: EngineMemory | None

    def store(self, runs: Sequence[p.Run], addresses: Sequence[int], body: Mapping, length: int) -> int:
        view = body.view[:length]
        if self.memory is not None:
            return self.memory.store(addresses, BodyLayout(runs), view, body.address, SEED)
        assert copy_here(body.address, addresses, runs, time.monotonic() + 60, out=True)
        return digest(bytes(view))

    def load(self, runs: Sequence[p.Run], addresses: Sequence[int], body: Mapping, length: int) -> int:
        view = body.view[:length]
        if self.memory is not None:
            return self.memory.load(view, body.address, addresses, BodyLayout(runs), SEED)
        assert copy_here(body.address, addresses, runs, time.monotonic() + 60, out=False)
        return digest(bytes(view))


@pytest.fixture(scope="module", params=["mapped", "process_vm", "here"])
def way(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Way]:
    if request.param == "here":
        yield Way(None)
        return
    memory = reach(request.param, engine)
    yield Way(memory)
    memory.close()


@pytest.fixture(scope="module", params=["mapped", "process_vm"])
def memory(request: pytest.FixtureRequest, engine: Engine) -> Iterator[EngineMemory]:
    memory = reach(request.param, engine)
    yield memory
    memory.close()


@pytest.fixture(scope="module")
def segment() -> Iterator[Mapping]:
    fd = create_memfd("segment", MEMORY_BYTES)
    mapping = Mapping(fd, MEMORY_BYTES, writable=True)
    yield mapping
    mapping.close()
    os.close(fd)


def reach(how: str, engine: Engine) -> EngineMemory:
    if how == "mapped":
        return MappedMemory(engine.regions(), [engine.fd])
    return ForeignMemory(os.getpid(), engine.regions(memfd=False))


def digest(body: bytes) -> int:
    return xxhash.xxh3_64(body, seed=SEED).intdigest()


@st.composite
def run_shapes(draw: st.DrawFn) -> p.Run:
    """A run whose pieces do not overlap, nested in memory in any order, with gaps."""
    piece = draw(st.one_of(st.integers(1, 64), st.sampled_from([128, 256, 2048, 70_000])))
    counts = draw(st.lists(st.integers(1, 24 if piece < 4096 else 3), max_size=3))
    order = draw(st.permutations(range(len(counts))))
    steps = [0] * len(counts)
    size = piece
    for axis in order:
        steps[axis] = size + draw(st.sampled_from([0, 1, 8, 100]))
        size = steps[axis] * (counts[axis] - 1) + size
    length = piece
    for count in counts:
        length *= count
    return p.Run(0, 0, length, list(zip(counts, steps, strict=True)))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[list[p.Run], list[int]]:
    """Runs and where each starts, one after the other in memory with a gap between."""
    runs = draw(st.lists(run_shapes(), min_size=1, max_size=3))
    offsets, at = [], 0
    for run in runs:
        at += draw(st.integers(0, 70))
        offsets.append(at)
        at += extent(run)
    assume(at <= MEMORY_BYTES)
    return runs, offsets


SHAPES = [
    # (count, step) outermost first, piece: token, layer, dim of one head, as the layouts have them
    ("page_first", [(64 * 32, 8 * 256)], 256),
    ("page_first_direct", [(64, 8 * 256), (32, 64 * 8 * 256)], 256),
    ("layer_first", [(64, 2 * 256), (16, 300 * 2 * 256)], 256),
    ("two heads", [(2, 256), (64, 2 * 256), (32, 64 * 2 * 256)], 256),
    ("pieces larger than a chunk", [(3, 600 << 10)], 300 << 10),
    ("a chunk and one byte", [(2, 400 << 10), (STRIDED_CHUNK + 1, 3)], 1),
    ("contiguous by chance", [(4, 1000)], 1000),
]


def shaped(dims: list[tuple[int, int]], piece: int) -> p.Run:
    length = piece
    for count, _ in dims:
        length *= count
    return p.Run(0, 0, length, dims)


def check(way: Way, engine: Engine, segment: Mapping, runs: list[p.Run], offsets: list[int], seed: int) -> None:
    """Store from random memory, then load something else into it: the body is the reference's, and no other byte changes."""
    addresses = [engine.address + offset for offset in offsets]
    length = sum(run.length for run in runs)
    end = max(offset + extent(run) for run, offset in zip(runs, offsets, strict=True))
    engine.memory.view[:end] = random.Random(seed).randbytes(end)
    segment.view[: length + 1] = b"\xee" * (length + 1)
    expected = engine.gather(runs, addresses)

    assert way.store(runs, addresses, segment, length) == digest(expected)
    assert bytes(segment.view[:length]) == expected
    assert segment.view[length] == 0xEE

    body = random.Random(seed + 1).randbytes(length)
    segment.view[:length] = body
    before = bytes(engine.memory.view[: end + 64])
    engine.scatter(body, runs, addresses)
    wanted = bytes(engine.memory.view[: end + 64])
    engine.memory.view[: end + 64] = before
    assert way.load(runs, addresses, segment, length) == digest(body)
    assert bytes(engine.memory.view[: end + 64]) == wanted


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies(), seed=st.integers(0, 1 << 30))
def test_any_shape_comes_and_goes_like_in_plain_python(
    way: Way, engine: Engine, segment: Mapping, body: tuple[list[p.Run], list[int]], seed: int
) -> None:
    check(way, engine, segment, *body, seed)


@pytest.mark.parametrize(("dims", "piece"), [shape[1:] for shape in SHAPES], ids=[shape[0] for shape in SHAPES])
def test_pages_of_many_chunks(way: Way, engine: Engine, segment: Mapping, dims: list[tuple[int, int]], piece: int) -> None:
    run = shaped(dims, piece)
    check(way, engine, segment, [run], [4096], 7)


def test_a_body_of_contiguous_and_strided_runs(way: Way, engine: Engine, segment: Mapping) -> None:
    runs = [shaped([], 300_000), shaped([(64, 1024), (4, 256)], 100), shaped([], 5)]
    check(way, engine, segment, runs, [17, 400_000, 399_990], 3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies(), pages=st.integers(1, 5), portion=st.integers(1, 1 << 20), seed=st.integers(0, 1 << 30))
def test_pages_from_a_peer_are_scattered(
    memory: EngineMemory,
    engine: Engine,
    body: tuple[list[p.Run], list[int]],
    pages: int,
    portion: int,
    seed: int,
) -> None:
    runs, offsets = body
    length = sum(run.length for run in runs)
    end = max(offset + extent(run) for run, offset in zip(runs, offsets, strict=True))
    pages = min(pages, MEMORY_BYTES // end)
    stream = random.Random(seed).randbytes(length * pages)
    spots = [[engine.address + page * end + offset for offset in offsets] for page in range(pages)]
    engine.memory.view[: end * pages] = b"\x5a" * (end * pages)
    for page, addresses in enumerate(spots):
        engine.scatter(stream[page * length : (page + 1) * length], runs, addresses)
    wanted = bytes(engine.memory.view[: end * pages])
    engine.memory.view[: end * pages] = b"\x5a" * (end * pages)
    sent = 0

    def source(views: list[memoryview]) -> int:
        nonlocal sent
        got = 0
        for view in views:
            some = min(len(view), portion - got)
            view[:some] = stream[sent : sent + some]
            sent += some
            got += some
            if got == portion:
                break
        return got

    arrived = list(memory.receive(source, spots, BodyLayout(runs), [SEED] * pages))
    assert arrived == [digest(stream[page * length : (page + 1) * length]) for page in range(pages)]
    assert bytes(engine.memory.view[: end * pages]) == wanted
    assert sent == len(stream)


@pytest.mark.parametrize(("count", "length"), [(3, 100_000), (64, 16 << 10), (2500, 120)])
def test_runs_of_a_page_share_calls_of_the_system_within_its_limits(
    memory: EngineMemory, engine: Engine, count: int, length: int
) -> None:
    """A page of many layers: one call for each run of it made loads from other hosts twice as dear."""
    body = random.Random(count).randbytes(count * length)
    places = [engine.address + number * (length + 7) for number in range(count)]
    calls = 0
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=theirs.sendall, args=(body,))
    sender.start()
    receive = tcp.receiver(ours, time.monotonic() + 60)

    def source(views: list[memoryview]) -> int:
        nonlocal calls
        calls += 1
        return receive(views)

    layout = BodyLayout([p.Run(place, 0, length) for place in places])
    (arrived,) = memory.receive(source, [places], layout, [SEED])
    sender.join()
    ours.close()
    theirs.close()
    assert arrived == digest(body)
    view = engine.memory.view
    got = [bytes(view[at - engine.address : at - engine.address + length]) for at in places]
    assert b"".join(got) == body
    if isinstance(memory, MappedMemory):
        assert calls < count


def test_a_peer_that_ends_early_ends_the_call(memory: EngineMemory, engine: Engine) -> None:
    run = shaped([(64, 1024)], 256)
    portions = [bytes(10_000), b""]

    def source(views: list[memoryview]) -> int:
        data = portions.pop(0)
        views[0][: len(data)] = data
        return len(data)

    with pytest.raises(ConnectionError):
        list(memory.receive(source, [[engine.address]], BodyLayout([run]), [SEED]))


@pytest.mark.parametrize("byte", [0, 255, 256, 64 * 256 - 1])
def test_a_damaged_body_has_another_checksum(memory: EngineMemory, engine: Engine, segment: Mapping, byte: int) -> None:
    run = shaped([(64, 1024)], 256)
    good = memory.store([engine.address], BodyLayout([run]), segment.view[: run.length], segment.address, SEED)
    segment.view[byte] ^= 1
    bad = memory.load(segment.view[: run.length], segment.address, [engine.address], BodyLayout([run]), SEED)
    assert bad != good
    segment.view[byte] ^= 1
    again = memory.load(segment.view[: run.length], segment.address, [engine.address], BodyLayout([run]), SEED)
    assert again == good


def test_a_mapped_load_is_checked_by_what_arrived(engine: Engine, segment: Mapping) -> None:
    """Pieces that overlap cannot all arrive whole: the checksum is read back from engine memory, so it shows."""
    run = shaped([(8, 100)], 256)
    segment.view[: run.length] = random.Random(5).randbytes(run.length)
    body = bytes(segment.view[: run.length])
    memory = MappedMemory(engine.regions(), [engine.fd])
    arrived = memory.load(segment.view[: run.length], segment.address, [engine.address], BodyLayout([run]), SEED)
    lies_there = engine.gather([run], [engine.address])
    assert lies_there != body
    assert arrived == digest(lies_there)

    def source(views: list[memoryview]) -> int:
        views[0][:] = body
        return len(body)

    assert list(memory.receive(source, [[engine.address]], BodyLayout([run]), [SEED])) == [digest(lies_there)]
    memory.close()


OUTSIDE = {
    "before": (-1, shaped([(4, 1024)], 256)),
    "last piece": (MEMORY_BYTES - 3 * 1024 - 255, shaped([(4, 1024)], 256)),
    "outer dimension": (0, shaped([(2, MEMORY_BYTES), (4, 1024)], 256)),
    "far": (1 << 40, shaped([(4, 1024)], 256)),
    "contiguous": (MEMORY_BYTES - 255, shaped([], 256)),
}


@pytest.mark.parametrize("what", OUTSIDE)
@pytest.mark.parametrize("op", ["store", "load", "receive"])
def test_a_run_out_of_the_region_moves_nothing(
    memory: EngineMemory, engine: Engine, segment: Mapping, what: str, op: str
) -> None:
    offset, run = OUTSIDE[what]
    inside = shaped([(4, 1024)], 256)
    layout = BodyLayout([inside, run])
    addresses = [engine.address + 4096, engine.address + offset]
    engine.memory.view[:] = b"\x11" * MEMORY_BYTES
    segment.view[: layout.length] = b"\x22" * layout.length
    body = segment.view[: layout.length]
    calls: dict[str, Callable[[], object]] = {
        "store": lambda: memory.store(addresses, layout, body, segment.address, SEED),
        "load": lambda: memory.load(body, segment.address, addresses, layout, SEED),
        "receive": lambda: list(memory.receive(lambda views: len(views[0]), [addresses], layout, [SEED])),
    }
    with pytest.raises(EngineMemoryError):
        calls[op]()
    assert bytes(engine.memory.view) == b"\x11" * MEMORY_BYTES
    assert bytes(body) == b"\x22" * layout.length


def test_a_run_that_ends_with_its_region_is_inside(way: Way, engine: Engine, segment: Mapping) -> None:
    run = shaped([(4, 1024)], 256)
    body = random.Random(9).randbytes(run.length)
    segment.view[: run.length] = body
    address = engine.address + MEMORY_BYTES - extent(run)
    way.load([run], [address], segment, run.length)
    assert engine.gather([run], [address]) == body


@pytest.mark.parametrize("how", ["mapped", "process_vm"])
def test_a_run_over_two_regions_is_refused(how: str) -> None:
    """Neighbours in the engine's address space may be anywhere in ours."""
    engine = Engine(2 << 20)
    half = engine.length // 2
    fd = 0 if how == "mapped" else -1
    regions = [p.Region(engine.address, half, fd), p.Region(engine.address + half, half, fd, half)]
    memory = MappedMemory(regions, [engine.fd]) if how == "mapped" else ForeignMemory(os.getpid(), regions)
    run = shaped([(2, 4096)], 256)
    body = memoryview(bytearray(run.length))
    with pytest.raises(EngineMemoryError):
        memory.store([engine.address + half - 2048], BodyLayout([run]), body, 0, SEED)
    memory.close()
    engine.close()


REFUSED = {
    "negative step": p.Run(0, 0, 1024, [(4, -256)]),
    "no step": p.Run(0, 0, 1024, [(4, 0)]),
    "no pieces": p.Run(0, 0, 1024, [(0, 256)]),
    "negative count": p.Run(0, 0, 1024, [(-4, 256)]),
    "two negative counts": p.Run(0, 0, 1024, [(-4, 256), (-1, 256)]),
    "ragged": p.Run(0, 0, 1024, [(3, 512)]),
    "more pieces than bytes": p.Run(0, 0, 4, [(8, 1)]),
    "too deep": p.Run(0, 0, 1024, [(1, 1024)] * 9),
    "no bytes": p.Run(0, 0, 0, []),
    "negative length": p.Run(0, 0, -1024, [(4, 256)]),
    "beyond any page": p.Run(0, 0, 1 << 40, [(1 << 20, 1 << 21)]),
}


def job(run: p.Run) -> p.Transfer:
    return p.Transfer("load", bytes(16), page_hash(0), [run], array("q", [0]).tobytes(), 1.0)


@pytest.mark.parametrize("what", REFUSED)
def test_runs_that_cannot_be_are_refused(what: str) -> None:
    with pytest.raises(p.ProtocolError):
        Batch(job(REFUSED[what]))


def test_a_run_that_can_be_is_taken() -> None:
    assert Batch(job(p.Run(0, 0, 1024, [(4, 256)]))).layout.extents == [1024]


def test_a_layout_is_worked_out_once_for_batches_of_the_same_runs() -> None:
    layouts = Layouts()

    def layout(run: p.Run) -> BodyLayout:
        message = p.decoder(p.ToMover).decode(p.encode(job(run)))
        assert isinstance(message, p.Transfer)
        return Batch(message, layouts).layout

    strided, plain = p.Run(0, 0, 1024, [(4, 512)]), p.Run(0, 0, 1024, [])
    first = layout(strided)
    assert layout(plain).extents != first.extents == layout(strided).extents
    assert layout(strided) is first
    for _ in range(2):
        with pytest.raises(p.ProtocolError):
            layout(REFUSED["no bytes"])
    for address in range(1000):
        layout(p.Run(address, 0, 1024, []))
    assert layout(strided) is not first, "a few"


@pytest.mark.parametrize("dims", [[(1, 1)] * 3, [(4096, 300)], [(1000, 7), (130, 9000)]])
def test_parts_cover_the_body_once_and_fit_the_cache(dims: list[tuple[int, int]]) -> None:
    run = shaped(dims, 128)
    layout = BodyLayout([run, shaped([], 3 * CHUNK + 1)])
    assert sum(part.size for part in layout.parts) == layout.length
    assert all(part.size <= (STRIDED_CHUNK if part.dims else CHUNK) for part in layout.parts)
    assert [part for group in layout.gathered for part in group] == layout.parts
    assert all(sum(part.size for part in group) <= CHUNK for group in layout.gathered)
    assert len(layout.parts) <= 2 * (layout.length // STRIDED_CHUNK + 1) + 2


def test_a_mover_of_contiguous_pages_does_not_pay_for_numpy() -> None:
    code = (
        "import sys, hicache_mooncake.client.mover\n"
        "from hicache_mooncake.protocol import Run\n"
        "from hicache_mooncake.transfer.memory import BodyLayout\n"
        "BodyLayout([Run(0, 0, 1 << 20)])\n"
        "print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == "False\n"


class Rank:
    """A client over memory whose pages hold four heads; one object is the bytes of one head, K and V in two runs."""

    HEADS, ROWS, PAGES = 4, 200, 6

    def __init__(self, settings: Settings, *, row_major: bool, memfd: bool = True, piece: int = 256) -> None:
        self.piece = piece
        page = self.HEADS * self.ROWS * piece
        self.engine = Engine(2 * self.PAGES * page)
        self.row_major = row_major
        self.page = page
        region = self.engine.regions(memfd=memfd)[0]
        self.client = PoolClient(settings, "strided-rank")
        self.mode = self.client.share(
            PoolGeometry("kv", (), 1, self.PAGES, (region,), (self.engine.fd,) if memfd else (), affine=True)
        )

    def runs(self, head: int) -> tuple[p.Run, ...]:
        length = self.ROWS * self.piece
        half = self.PAGES * self.page
        if not self.row_major:
            start = self.engine.address + head * length
            return p.Run(start, self.page, length), p.Run(start + half, self.page, length)
        start = self.engine.address + head * self.piece
        dims = [(self.ROWS, self.HEADS * self.piece)]
        return p.Run(start, self.page, length, dims), p.Run(start + half, self.page, length, dims)

    def _addresses(self, page: int, head: int) -> list[int]:
        return [run.address + page * run.stride for run in self.runs(head)]

    def write(self, page: int, head: int, body: bytes) -> None:
        self.engine.scatter(body, self.runs(head), self._addresses(page, head))

    def read(self, page: int, head: int) -> bytes:
        return self.engine.gather(self.runs(head), self._addresses(page, head))

    def transfer(self, op: str, head: int) -> bytes:
        namespace = b"head%12d" % head
        hashes = b"".join(page_hash(page) for page in range(self.PAGES))
        body = Body(namespace, self.runs(head))
        return self.client.transfer(op, body, hashes, array("q", range(self.PAGES))).ok

    def close(self) -> None:
        self.client.close()
        self.engine.close()


def head_body(page: int, head: int, piece: int = 256) -> bytes:
    return pattern(b"%d %d" % (page, head), 2 * Rank.ROWS * piece)


@pytest.mark.parametrize(("mode", "piece"), [("memfd", 256), ("process_vm", 2048), ("process_vm", 256), ("segment", 256)])
def test_heads_go_through_the_pool_whatever_their_stride(start_node: Callable[..., NodeProcess], mode: str, piece: int) -> None:
    """One rank's rows of four heads, another one's blocks of one head: the same objects."""
    node = start_node(dram="128MiB")
    settings_ = node.settings(copy_mode=mode)
    writer = Rank(settings_, row_major=True, memfd=mode == "memfd", piece=piece)
    reader = Rank(settings_, row_major=False, memfd=mode == "memfd", piece=piece)
    assert (writer.mode, reader.mode) == (mode, mode)
    everything = [(page, head) for page in range(Rank.PAGES) for head in range(Rank.HEADS)]
    for page, head in everything:
        writer.write(page, head, head_body(page, head, piece))
    for head in range(Rank.HEADS):
        assert writer.transfer("store", head) == b"\x01" * Rank.PAGES
    for rank in (reader, writer):
        rank.engine.memory.view[:] = b"\xaa" * rank.engine.length
        for head in (2, 0, 3):
            assert rank.transfer("load", head) == b"\x01" * Rank.PAGES
        for page, head in everything:
            wanted = b"\xaa" * (2 * Rank.ROWS * piece) if head == 1 else head_body(page, head, piece)
            assert rank.read(page, head) == wanted, (page, head)
    assert bool(writer.client._bounces) == (mode == "segment" or (mode == "process_vm" and piece < 2048))
    writer.close()
    reader.close()


@pytest.mark.parametrize("memfd", [True, False])
def test_heads_come_from_another_host(
    start_node: Callable[..., NodeProcess], start_master: Callable[[], MasterProcess], memfd: bool
) -> None:
    master = start_master()
    near, far = (start_node(name, dram="64MiB", masters=(master.address,)) for name in ("near", "far"))
    writer, reader = Rank(far.settings(), row_major=False), Rank(near.settings(), row_major=True, memfd=memfd)
    for page in range(Rank.PAGES):
        writer.write(page, 1, head_body(page, 1))
    assert writer.transfer("store", 1) == b"\x01" * Rank.PAGES
    reader.engine.memory.view[:] = b"\xaa" * reader.engine.length
    wait_until(lambda: reader.transfer("load", 1) == b"\x01" * Rank.PAGES, 20, "the pages are found on the other node")
    for page in range(Rank.PAGES):
        assert reader.read(page, 1) == head_body(page, 1)
        assert reader.read(page, 0) == b"\xaa" * (2 * Rank.ROWS * 256)
    writer.close()
    reader.close()
