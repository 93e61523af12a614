"""What a batch costs, counted and not timed: `python -m tests.work` prints it, `--write` keeps it for tests to compare with.

Bytecodes stand for the work of Python; calls are those into C; system calls are those of them that go to sockets, polls and
files. All are of the thread that does the work; the least of several batches repeats, for one version of Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import select
import socket
import sys
import tempfile
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from hicache_master.directory import Directory

from hicache_mooncake import protocol as p
from hicache_mooncake.client.mover import Mover
from hicache_mooncake.client.node_link import NodeLink
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.store import Store
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.memory import MappedMemory
from tests.test_store_parts import BASE, Served

STORED = Path(__file__).parent / "data" / "work.json"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NS = b"n" * 16
PAGE = 64 << 10
FEW, MANY = 64, 128
"""Pages of two batches, so that what a page costs shows beside what a batch costs."""
HELD = 20_000
TRIES = 7
_SYSTEM = (socket.socket, type(select.poll()))


@dataclass
class Work:
    bytecodes: int = 0
    calls: int = 0
    system_calls: int = 0


def work(call: Callable[[], object]) -> Work:
    """Of one call; of several the least, since it depends on others how often they are waited for."""
    call()  # the first one finds and keeps what later ones use
    counts = [_counted(call) for _ in range(TRIES)]
    return Work(*(min(getattr(count, each.name) for count in counts) for each in dataclasses.fields(Work)))


def _counted(call: Callable[[], object]) -> Work:
    done = Work()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        done.bytecodes += event == "opcode"
        return trace

    def profile(_: FrameType, event: str, what: object) -> None:
        if event == "c_call":
            owner = getattr(what, "__self__", None)
            done.calls += 1
            done.system_calls += isinstance(owner, _SYSTEM) or getattr(owner, "__name__", "") in ("posix", "select")

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    done.calls -= 1  # that ended the count
    return done


def hashes(name: int, count: int) -> bytes:
    return Random(name).randbytes(count * p.HASH_BYTES)


def measured() -> dict[str, float]:
    figures: dict[str, float] = {}
    figures |= _batches("mover loads", _mover("load"))
    figures |= _batches("mover stores what is there", _mover("store"))
    figures |= _batches("mover stores", _mover("store", new=True))
    core = _core()
    figures |= _batches("node looks up", lambda count: lambda: _ask(core, p.Exists([NS], hashes(0, count))))
    figures |= _batches("node locates and releases", lambda count: lambda: _located(core, count))
    figures |= _batches("node stores", lambda count: lambda: _stored(core, count))
    directory = _directory()
    figures |= _batches("master finds", lambda count: lambda: directory.find(NS, hashes(0, count), prefix=True, ranks=b"\x01"))
    figures |= _batches("master hears of", lambda count: lambda: _heard(directory, count))
    figures["node, bytes a page"] = _bytes_of(_core)
    figures["master, bytes a key"] = _bytes_of(_directory)
    return {name: round(value, 2) for name, value in figures.items()}


def _batches(name: str, of: Callable[[int], Callable[[], object]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for count in (FEW, MANY):
        for what, value in dataclasses.asdict(work(of(count))).items():
            if what != "system_calls" or name.startswith("mover"):
                figures[f"{name}, {count} pages: {what.replace('_', ' ')}"] = value
    return figures


def _mover(op: str, *, new: bool = False) -> Callable[[int], Callable[[], object]]:
    """The same pages each time, or new ones."""

    def of(count: int) -> Callable[[], object]:
        mover, first = _movers[count]
        jobs = (
            p.Transfer(op, NS, hashes(1000 * count + i, count) if new else first.hashes, first.runs, first.pages, 60.0)
            for i in itertools.count()
        )
        ahead = [next(jobs) for _ in range(2 * TRIES + 1)]

        def batch() -> None:
            done = mover.run(ahead.pop())
            mover.settle()
            assert done.ok == b"\x01" * count, done.reasons

        return batch

    return of


_movers: dict[int, tuple[Mover, p.Transfer]] = {}


@contextmanager
def movers() -> Iterator[None]:
    """With a node and engine memory that holds what both batches store."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "node.sock")
        fd = create_memfd("engine", MANY * PAGE)
        engine = Mapping(fd, MANY * PAGE, writable=True)
        node = Served(path, 64 << 20)
        opened: list[tuple[Mover, NodeLink]] = []
        try:
            for count in (FEW, MANY):
                link = NodeLink(path, "load", "work")
                mover = Mover(MappedMemory([p.Region(BASE, MANY * PAGE, 0)], [os.dup(fd)]), link, os.getpid())
                opened.append((mover, link))
                numbers = array("q", range(count)).tobytes()
                job = p.Transfer("store", NS, hashes(count, count), [p.Run(BASE, PAGE, PAGE)], numbers, 60.0)
                assert mover.run(job).ok == b"\x01" * count
                _movers[count] = mover, job
            yield
        finally:
            _movers.clear()
            for mover, link in opened:
                mover.close()
                link.drop()
            node.close()
            engine.close()
            os.close(fd)


def _core() -> NodeCore:
    core = NodeCore("node", b"i" * 8, Store(4 * HELD * 4096), masters=False, log=lambda *_: None)
    blob = hashes(0, HELD)
    for at in range(0, len(blob), MANY * p.HASH_BYTES):
        batch = blob[at : at + MANY * p.HASH_BYTES]
        txn, status, _ = core.store.reserve(1, NS, batch, 4096)
        core.store.commit(1, txn, b"\x01" * len(status), [0] * len(status))
    return core


def _directory() -> Directory:
    directory = Directory(10 * HELD, Random(0))
    slot = directory.allocate()
    blob = hashes(0, HELD)
    for at in range(0, len(blob), 4096 * p.HASH_BYTES):
        directory.add(slot, NS, blob[at : at + 4096 * p.HASH_BYTES])
    return directory


def _ask(core: NodeCore, message: p.Message) -> p.Message:
    try:
        next(core.handle(1, message, 0.0))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("there is no master to ask")


def _located(core: NodeCore, count: int) -> None:
    located = _ask(core, p.Locate(NS, hashes(0, count), 4096))
    assert isinstance(located, p.Located)
    assert located.status == bytes([p.LOCAL]) * count
    list(core.handle(1, p.Release(located.pin, NS, loaded=count), 0.0))


def _stored(core: NodeCore, count: int) -> None:
    """Pages that are new each time, and go again."""
    reserved = core.reserve(2, p.Reserve(b"o" * 16, hashes(7, count), 4096), 0.0)
    assert core.commit(2, reserved.txn, b"\x01" * count, [0] * count) == b"\x01" * count
    core.clear(b"o" * 16, 0.0)
    while core.store.sweep():
        pass


def _heard(directory: Directory, count: int) -> None:
    directory.add(0, NS, hashes(9, count))
    directory.remove(0, NS, hashes(9, count))


def _bytes_of(make: Callable[[], object]) -> float:
    make()  # what is made once for all of them
    tracemalloc.start()
    try:
        kept = make()
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    del kept
    return size / HELD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"into {STORED.name}, for this version of Python")
    options = parser.parse_args()
    with movers():
        figures = measured()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    former = stored.get(PYTHON, {})
    for name, value in figures.items():
        print(f"{name:55} {value:10.2f}   {f'{former[name]:10.2f}' if name in former else 'new':>10}")
    if options.write:
        STORED.write_text(json.dumps(stored | {PYTHON: figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
