"""Pages that left DRAM, through a real node and its movers: they are loaded from the disk, by this host and by others."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake.cold import directory as places
from hicache_mooncake.testing.local import FakeRank
from tests.conftest import MasterProcess, NodeProcess, wait_until
from tests.test_spill import names, report_of

NS = b"n" * 16
MIB = 1 << 20
DRAM = 16 * MIB


def options(directory: Path, *more: str) -> tuple[str, ...]:
    return ("--cold", str(directory), "--cold-bytes", "256MiB", "--cold-floor", "0", *more)


@pytest.fixture
def rank_of() -> Iterator[Callable[[NodeProcess], FakeRank]]:
    ranks: list[FakeRank] = []

    def make(node: NodeProcess, **options: bool) -> FakeRank:
        ranks.append(FakeRank(node.settings(), **options))  # type: ignore[arg-type]
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()


def store_all(rank: FakeRank, pages: list[bytes]) -> None:
    """Each batch when the node has made room: nearly nothing is evicted before it is on the disk."""
    for first in range(0, len(pages), 16):
        some = pages[first : first + 16]
        assert rank.store(NS, some).ok == b"\x01" * len(some)
        wait_until(lambda: int(report_of(rank)["used_bytes"]) <= 0.95 * DRAM, 30, "room again")


def load_all(rank: FakeRank, pages: list[bytes]) -> tuple[int, Counter[str]]:
    """How many came, every byte of them compared, and why the others did not."""
    reasons: Counter[str] = Counter()
    loaded = 0
    for first in range(0, len(pages), 16):
        outcome = rank.load(NS, pages[first : first + 16])
        loaded += outcome.ok.count(1)
        reasons.update(outcome.reasons)
    return loaded, reasons


def found(rank: FakeRank, pages: list[bytes]) -> int:
    return sum(rank.exists(NS, [page]) for page in pages)


def test_what_left_dram_is_loaded_from_the_disk(
    start_node: Callable[..., NodeProcess], tmp_path: Path, rank_of: Callable[..., FakeRank]
) -> None:
    node = start_node("a", "16MiB", (), options(tmp_path / "cold"))
    rank = rank_of(node)
    pages = names(600)
    store_all(rank, pages)
    figures = report_of(rank)
    assert int(figures["evicted"]) > 300
    lost = int(figures["evicted_unkept"])
    assert lost < 60, figures
    assert found(rank, pages) == 600 - lost
    assert load_all(rank, pages) == (600 - lost, Counter(absent=lost) if lost else Counter())
    assert load_all(rank, pages)[0] == 600 - lost  # asked for twice: promoted, and others written for it
    figures = report_of(rank)
    assert int(figures["promoted"]) > 100
    assert figures["cold_damaged"] == figures["cold_unreadable"] == figures["discarded"] == 0
    assert float(figures["cold_write_amplification"]) <= 1.5


def test_a_restarted_node_has_its_pages_even_after_a_kill(
    start_node: Callable[..., NodeProcess], tmp_path: Path, rank_of: Callable[..., FakeRank]
) -> None:
    node = start_node("a", "16MiB", (), options(tmp_path / "cold"))
    rank = rank_of(node)
    pages = names(400)
    store_all(rank, pages)
    figures = report_of(rank)
    node.kill()
    node.start()
    wait_until(lambda: rank.exists(NS, pages[:1]) in (0, 1) and rank.client.status() is not None, 30, "the node serves")
    here = int(report_of(rank)["cold_pages"])
    assert here >= int(figures["evicted"]) - int(figures["evicted_unkept"]) > 100
    assert found(rank, pages) == here
    assert load_all(rank, pages)[0] == here


def test_dram_is_saved_on_sigterm(
    start_node: Callable[..., NodeProcess], tmp_path: Path, rank_of: Callable[..., FakeRank]
) -> None:
    node = start_node("a", "16MiB", (), options(tmp_path / "cold", "--save-on-exit"))
    rank = rank_of(node)
    pages = names(100)  # all of them fit
    store_all(rank, pages)
    assert report_of(rank)["evicted"] == 0
    node.stop()
    node.start()
    wait_until(lambda: rank.exists(NS, pages) == 100, 30, "all are found")
    assert load_all(rank, pages) == (100, Counter())


@pytest.fixture
def two_hosts(
    start_master: Callable[[], MasterProcess],
    start_node: Callable[..., NodeProcess],
    tmp_path: Path,
    rank_of: Callable[..., FakeRank],
) -> tuple[FakeRank, FakeRank]:
    """A rank beside a node with a cold tier, and one on another host."""
    master = start_master()
    owner = start_node("owner", "16MiB", (master.address,), options(tmp_path / "cold", "--no-spill", "--host-id", "one"))
    reader = start_node("reader", "64MiB", (master.address,), ("--no-spill", "--host-id", "two", "--replicate-after", "0"))
    return rank_of(owner), rank_of(reader)


def test_another_hosts_engines_load_what_is_only_on_this_hosts_disk(two_hosts: tuple[FakeRank, FakeRank]) -> None:
    """In the same request as what is in DRAM here."""
    writer, other = two_hosts
    pages = names(400)
    store_all(writer, pages)
    lost = int(report_of(writer)["evicted_unkept"])
    wait_until(lambda: found(other, pages) == 400 - lost, 30, "the masters know of all")
    mixed = [page for pair in zip(pages[:200], pages[200:], strict=True) for page in pair]  # cold, warm, cold, ...
    assert load_all(other, mixed)[0] == 400 - lost
    assert int(report_of(writer)["remote_sent_pages"]) == 400 - lost


def test_a_damaged_page_is_a_miss_and_blames_nobody(two_hosts: tuple[FakeRank, FakeRank], tmp_path: Path) -> None:
    writer, other = two_hosts
    pages = names(400)
    store_all(writer, pages)
    cold = found(writer, pages)
    with open(places.own_path(tmp_path / "cold") / places.PAGES, "r+b") as file:
        for offset in range(0, os.fstat(file.fileno()).st_size, 64 << 10):  # a byte of each
            file.seek(offset + 100)
            file.write(b"\xa5\x5a")
    here, reasons = load_all(other, pages)
    assert here < cold
    assert set(reasons) <= {"checksum_cold", "absent", "gone_remote", "master_warming"}
    assert reasons["checksum_cold"] + reasons["gone_remote"]
    there, reasons = load_all(writer, pages)
    assert set(reasons) <= {"checksum_cold", "absent", "master_warming"}
    assert there >= here
    wait_until(lambda: int(report_of(writer)["cold_damaged"]) >= 100, 30, "the damaged ones are forgotten")
    assert found(writer, pages) < cold


def test_a_cleared_namespace_does_not_come_back_with_a_restart(
    start_node: Callable[..., NodeProcess], tmp_path: Path, rank_of: Callable[..., FakeRank]
) -> None:
    node = start_node("a", "16MiB", (), options(tmp_path / "cold"))
    rank = rank_of(node)
    pages = names(400)
    store_all(rank, pages)
    rank.client.clear(NS)
    assert found(rank, pages) == 0
    node.kill()
    node.start()
    wait_until(lambda: rank.client.status() is not None, 30, "the node serves")
    assert found(rank, pages) == 0


def test_ranks_that_load_the_same_read_the_disk_once(
    start_node: Callable[..., NodeProcess], tmp_path: Path, rank_of: Callable[..., FakeRank]
) -> None:
    node = start_node("a", "16MiB", (), options(tmp_path / "cold"))
    first, second = rank_of(node, shared=True), rank_of(node, shared=True)
    pages = names(300)
    store_all(first, pages)
    node.kill()
    node.start()  # DRAM is empty now
    wait_until(lambda: first.client.status() is not None and second.client.status() is not None, 30, "the node serves")
    some = [page for page in pages[:100] if first.exists(NS, [page])][:16]
    assert len(some) == 16
    assert first.load(NS, some).ok == second.load(NS, some).ok == b"\x01" * 16
    figures = report_of(first)
    assert figures["promoted"] == figures["stored"] == 16


def test_files_that_are_deleted_under_a_live_node_cost_nobody_anything(
    start_node: Callable[..., NodeProcess], tmp_path: Path, rank_of: Callable[..., FakeRank]
) -> None:
    node = start_node("a", "16MiB", (), options(tmp_path / "cold"))
    rank = rank_of(node)
    pages = names(300)
    store_all(rank, pages[:200])
    here = found(rank, pages)
    shutil.rmtree(tmp_path / "cold")
    assert load_all(rank, pages)[0] == here
    store_all(rank, pages[200:])
    node.kill()
    node.start()
    wait_until(lambda: rank.client.status() is not None, 30, "the node serves")
    assert found(rank, pages) == 0
    store_all(rank, pages)
    assert load_all(rank, pages)[0] > 200


def test_a_node_with_a_tiny_tier_says_how_large_a_page_may_be(start_node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    node = start_node("a", "16MiB", (), options(tmp_path / "cold"))
    assert node.log is not None
    said = node.log.read_text()
    assert "pages of more than 32768 KiB are never kept there" in said
    assert "An empty one of 512mb (cold_bytes)" in said
    larger = start_node("b", "16MiB", (), ("--cold", str(tmp_path / "b"), "--cold-bytes", "512mb", "--cold-floor", "0"))
    assert larger.log is not None
    assert "never kept" not in larger.log.read_text()


def test_a_node_does_not_start_with_what_another_one_uses(start_node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    start_node("a", "16MiB", (), options(tmp_path / "cold"))
    with pytest.raises(AssertionError, match="another node uses it"):
        start_node("b", "16MiB", (), options(tmp_path / "cold"))
