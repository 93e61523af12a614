"""Two nodes in this process that make links by a transport of the test's choice, and ranks with real movers over them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.node import links as links_module
from hicache_mooncake.node.service import Node
from hicache_mooncake.testing.local import FakeRank, page_hash
from hicache_mooncake.transfer.transport import ENTRY_POINTS, Transport, TransportOptions
from tests.conftest import START_S, MasterProcess, wait_until
from tests.memory_transport import Faults

NS = b"n" * 16
COUNT = 8
ALL = b"\x01" * COUNT
PAGE = 64 << 10
TCP = "hicache_mooncake.transfer.tcp_transport:TcpTransport"
LONG_S = 30.0
"""A limit on hangs, not a measurement."""


def brought(folder: Path, name: str, transport: str) -> str:
    """A package that brings a transport of this name (its class as "module:class"); returns what PYTHONPATH needs for it."""
    package = folder / "packages" / f"{name}-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {transport}\n")
    return str(package.parent)


def names(*which: object) -> list[bytes]:
    return [page_hash(name) for name in which]


class Pair:
    """`a` stores and `b` reads. `transports` are theirs, in the order in which they were opened."""

    def __init__(self, tmp_path: Path, master: MasterProcess, **settings: object) -> None:
        self.tmp_path = tmp_path
        self.master = master
        self.ranks: list[FakeRank] = []
        self.options: dict[str, object] = {"masters": (master.address,), "listen": "127.0.0.1:0", "metrics": ""}
        self.options |= {"dram": "16MiB", "transport": "verbs", "replicate_after": 0} | settings
        self.a, self.b = self.node("a"), self.node("b")

    def node(self, name: str, **settings: object) -> Node:
        own = {"socket": str(self.tmp_path / f"{name}.sock"), "name": name}
        node = Node(load_settings({}, {}, {"host_id": name} | self.options | own | settings)[0])
        node.start()
        wait_until(lambda: node.link.state == "joined", START_S, "joined")
        return node

    def rank(self, node: Node, **settings: object) -> FakeRank:
        options = {"socket": node.settings.socket, "node": "external", "deadline_s": 5.0} | settings
        chosen: Settings = load_settings({}, {}, options)[0]
        self.ranks.append(FakeRank(chosen, page_bytes=PAGE))
        return self.ranks[-1]

    def stored(self, writer: FakeRank, reader: FakeRank, *which: object) -> list[bytes]:
        """Pages by these names, stored by one and found by the other."""
        pages = names(*which)
        wait_until(lambda: writer.store(NS, pages).ok == b"\x01" * len(pages), LONG_S, "stored")
        wait_until(lambda: reader.exists(NS, pages) == len(pages), LONG_S, "found")
        return pages

    def link_up(self, reader: FakeRank, pages: list[bytes]) -> None:
        """Both ends know of a link that works: reading makes one."""

        def up() -> bool:
            reader.load(NS, pages)
            return bool(self.a.report()["links"]) and bool(self.b.report()["links"])

        shared, reader.shared = reader.shared, False  # pages that stay here are not read from elsewhere again
        wait_until(up, LONG_S, "a link")
        reader.shared = shared

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for node in (self.a, self.b):
            node.stop()


MakePair = Callable[..., "Pair"]
Opened = Callable[[str, TransportOptions], Transport]


@pytest.fixture
def pair(
    tmp_path: Path, start_master: Callable[[], MasterProcess], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Pair]]:
    with contextlib.ExitStack() as made:

        def build(opened: Opened, **settings: object) -> Pair:
            monkeypatch.setattr(links_module, "open_transport", opened)
            built = Pair(tmp_path, start_master(), **settings)
            made.callback(built.close)
            return built

        yield build


@pytest.fixture
def faults() -> Faults:
    return Faults()


def in_thread(what: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    return thread


def figure(node: Node, name: str) -> int:
    return int(node.report()[name])


def nothing_lent(node: Node) -> None:
    wait_until(lambda: figure(node, "landing_bytes") == 0 and not figure(node, "writing"), LONG_S, "the room has gone back")
    with node.lock:
        node.store.validate()


class Linked:
    """Pages of `a`, a rank beside `b` that reads them, and a link that has been used."""

    def __init__(self, both: Pair, faults: Faults, *, shared: bool = False, **settings: object) -> None:
        self.both, self.faults = both, faults
        self.a, self.b = both.a, both.b
        self.writer = both.rank(both.a)
        self.reader = both.rank(both.b, **settings)
        first = both.stored(self.writer, self.reader, "first")
        both.link_up(self.reader, first)
        nothing_lent(both.b)
        self.reader.shared = shared
        self.pages = both.stored(self.writer, self.reader, *range(COUNT))

    def load_aside(self) -> tuple[threading.Thread, list[bytes]]:
        """In a thread that stands in the middle of the write."""
        got: list[bytes] = []
        self.faults.gate.clear()
        thread = in_thread(lambda: got.append(self.reader.load(NS, self.pages).ok))
        wait_until(lambda: self.faults.waiting, LONG_S, "a write is under way")
        return thread, got
