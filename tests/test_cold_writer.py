"""The thread that writes to the cold tier, over a tier that takes nothing, or hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hicache_mooncake.cold.index import Key
from hicache_mooncake.cold.tier import Body, ColdTier
from hicache_mooncake.config import Settings
from hicache_mooncake.node import cold_writer, service
from hicache_mooncake.node.cold_writer import ColdWriter
from tests.conftest import wait_until
from tests.test_node_core import make_core

NS = b"n" * 16
LENGTH = 4096
PAGES = 240
"""Of 256 that there is room for."""


class Tier:
    """As much of a ColdTier as the writer uses. `takes`: what becomes of a page."""

    def __init__(self) -> None:
        self.clears = 0
        self.life = 1
        self.takes: Callable[[], bool] = lambda: True
        self.meanwhile: Callable[[], None] = lambda: None
        """What becomes of the tier before it writes."""
        self.batches = 0
        self.written: list[bytes] = []
        self.promised: list[bytes] = []

    def ready(self) -> bool:
        return True

    def here(self, bodies: Sequence[tuple[Key, int]]) -> list[bool]:
        return [key.hash in self.written for key, _ in bodies]

    def write(self, bodies: Sequence[Body], since: int) -> list[bool]:
        self.batches += 1
        self.meanwhile()
        done = [self.takes() for _ in bodies]
        self.written += [body.key.hash for body, took in zip(bodies, done, strict=True) if took]
        return done

    def present(self, namespace: bytes, hashes: Sequence[bytes], promised_until: float) -> bytes:
        self.promised += hashes
        return bytes(each in self.written for each in hashes)

    def lost(self) -> None:
        """Its index was damaged: it begins anew."""
        self.life += 1
        self.written.clear()

    def take_gone(self) -> list[Key]:
        return []

    def sweep(self) -> bool:
        return False


class Node:
    def __init__(self) -> None:
        self.core = make_core(256)
        self.store = self.core.store
        self.keeping = self.core.keep(0)
        self.lock = threading.Lock()
        self.segment = SimpleNamespace(view=memoryview(bytearray(256 * LENGTH)))
        self.tier = Tier()
        self.writer = ColdWriter(self, cast("ColdTier", self.tier), self.keeping)  # type: ignore[arg-type]

    def new_owner(self) -> int:
        return 7

    def changed(self) -> None:
        """To nobody."""

    def fill(self) -> None:
        pages = b"".join(os.urandom(32) for _ in range(PAGES))
        txn, _, offsets = self.store.reserve(1, NS, pages, LENGTH)
        assert self.store.commit(1, txn, b"\x01" * PAGES, range(PAGES)) == b"\x01" * PAGES
        assert len(offsets) == PAGES


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    node.fill()
    yield node
    node.tier.takes = lambda: True
    node.writer.stop()


def test_a_tier_that_takes_nothing_is_left_alone_for_a_while_and_nothing_waits_for_it(node: Node) -> None:
    """A disk without room is no failure of the tier, which goes on serving what it has."""
    node.tier.takes = lambda: False
    assert node.writer._look() >= 1.0
    assert node.tier.batches == 1
    assert not node.keeping.able, "what goes is evicted, without being written first"


def test_a_tier_that_takes_some_is_given_more_at_once(node: Node) -> None:
    node.tier.takes = iter([True] + [False] * PAGES).__next__
    assert node.writer._look() == 0.0
    assert node.keeping.able


def test_a_disk_that_hangs_does_not_keep_a_node_from_ending(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_writer, "_STOP_S", 0.05)
    comes_back = threading.Event()
    node.tier.takes = comes_back.wait
    node.writer.start()
    wait_until(lambda: node.tier.batches == 1, 30, "it writes")
    node.writer.stop()
    assert node.writer.hangs
    assert node.writer.save(lambda: False) == (0, 0), "there is nothing to save to"
    comes_back.set()
    wait_until(lambda: not node.writer.hangs, 30, "it has ended")


def test_a_disk_that_hangs_while_a_node_saves_does_not_keep_it_either(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_writer, "_HANGS_S", 0.05)
    comes_back = threading.Event()
    node.tier.takes = comes_back.wait
    assert node.writer.save(lambda: False) == (0, 0)
    assert node.writer.hangs
    comes_back.set()
    wait_until(lambda: not node.writer.hangs, 30, "it has ended")


def test_a_second_signal_ends_a_save_whose_disk_hangs(node: Node) -> None:
    comes_back = threading.Event()
    node.tier.takes = comes_back.wait
    assert node.writer.save(lambda: node.tier.batches > 0) == (0, 0)
    comes_back.set()
    wait_until(lambda: not node.writer.hangs, 30, "it has ended")


def test_what_a_tier_has_lost_is_written_again(node: Node) -> None:
    """Its index was damaged, and it began anew: pages in DRAM that it had would be evicted as if it still had them."""
    assert node.writer._look() == 0.0
    first = list(node.tier.written)
    assert first
    assert node.writer._look() > 0.0, "what goes first is there"

    node.tier.lost()
    node.writer._swept_at = 0.0
    while not node.writer._look():
        pass
    assert node.tier.written == first


def test_what_a_tier_has_lost_between_a_look_and_a_write_is_not_taken_for_there(node: Node) -> None:
    there = [page.hash for page in node.store.coldest(3)]
    node.tier.written += there
    node.tier.meanwhile = node.tier.lost
    node.writer._look()
    kept = {page.hash for page in node.store.coldest(PAGES) if node.store.is_kept(page)}
    assert kept == set(node.tier.written)
    assert kept
    assert not kept & set(there)


def test_all_that_is_in_dram_is_saved(node: Node) -> None:
    assert node.writer.save(lambda: False) == (PAGES, PAGES * LENGTH)
    assert len(set(node.tier.written)) == PAGES


def test_a_clear_is_told_to_the_others_before_this_nodes_disk_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that hangs would leave their pages of old weights where they are."""
    options = {"cold": str(tmp_path / "cold"), "cold_bytes": 64 << 20, "cold_floor": 0, "listen": "127.0.0.1:0"}
    node = service.Node(Settings(dram_bytes=16 << 20, name="n", socket=str(tmp_path / "s" / "n.sock"), **options))  # type: ignore[arg-type]
    node.start()
    assert node.cold is not None
    told = threading.Event()
    monkeypatch.setattr(node.link, "clear_namespace", lambda _namespace: told.set())
    clearing = threading.Thread(target=lambda: node.clear(NS, everywhere=True), daemon=True)
    with node.cold._lock:  # who has it waits for the disk
        clearing.start()
        assert told.wait(20)
    clearing.join(20)
    node.stop()


def test_a_promise_for_which_the_disk_has_nothing_either_came_too_late(node: Node) -> None:
    there, gone = os.urandom(32), os.urandom(32)
    node.tier.written.append(there)
    node.writer.promise(NS, there + gone, 60)
    node.writer.promise(NS, gone, -1)
    node.writer._look()
    assert node.tier.promised == [there, gone]
    assert node.core.promises_late == 1, "one that is over is no promise"
