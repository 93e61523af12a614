"""`hicache-mooncake cold`: what it says of a tier, with a node at work in it and without."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from hicache_mooncake.cli import cold
from hicache_mooncake.cold import directory as places
from hicache_mooncake.cold.index import Index
from hicache_mooncake.cold.layout import LEAST_BYTES
from hicache_mooncake.cold.tier import ColdTier
from tests.cold import NS, OTHER, announced, hashes, load, opened, store
from tests.test_cli import run

PAGE = 20_000


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ColdTier]:
    tier = opened(tmp_path)
    store(tier, hashes(30), PAGE)
    store(tier, hashes(5), 100, OTHER)
    yield tier
    tier.close()


def stopped(tier: ColdTier) -> Path:
    tier.close()
    return tier.path.parent


def test_stat_and_verify_beside_a_node_at_work(tier: ColdTier) -> None:
    directory = str(tier.path.parent)
    (tier.path.parent / "pages-0.1").mkdir()
    done = run("cold", "stat", directory, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["in_use"] is True
    assert report["pages"] == 35
    assert report["capacity_bytes"] == LEAST_BYTES
    assert report["namespaces"] == {
        NS.hex(): {"pages": 30, "bytes": 30 * PAGE},
        OTHER.hex(): {"pages": 5, "bytes": 500},
    }
    assert list(report["other_versions"]) == [str(tier.path.parent / "pages-0.1")]
    done = run("cold", "verify", directory, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "pages": 35,
        "bytes": 30 * PAGE + 500,
        "damaged": 0,
        "unreadable": 0,
        "overwritten": 0,
    }


def test_stat_says_it_to_people(tier: ColdTier, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    directory = stopped(tier)
    assert cold.run(lambda: cold.stat(directory, as_json=False)) == 0
    shown = capsys.readouterr().out
    assert f"namespace {NS.hex()}" in shown
    assert "30 pages, 585.9 KiB" in shown
    assert "in use" in shown
    assert "False" in shown


def test_verify_finds_what_is_damaged(tier: ColdTier, capsys: pytest.CaptureFixture[str]) -> None:
    place = next(place for part in tier._index.entries() for key, place in part if key.namespace == NS)
    directory = stopped(tier)
    with open(tier.path / "pages", "r+b") as file:
        file.seek(place.offset + 777)
        file.write(b"damaged")
    assert cold.run(lambda: cold.verify(directory, as_json=False)) == 1
    shown = capsys.readouterr()
    assert "35 pages" in shown.out
    assert "1 damaged" in shown.out
    assert shown.err.count("damaged: ") == 1


def test_what_a_node_writes_over_meanwhile_is_not_called_damaged(
    tier: ColdTier, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the index's answer and the reading, the page moved and its old place has other bytes."""
    directory, find = stopped(tier), Index.find

    def moved(index: Index, namespace: bytes, wanted: list[bytes]) -> list[object]:
        return [None if namespace == NS else place for place in find(index, namespace, wanted)]

    monkeypatch.setattr(Index, "find", moved)
    with open(tier.path / "pages", "r+b") as file:
        file.write(os.urandom(30 * 20480))
    assert cold.run(lambda: cold.verify(directory, as_json=True)) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["damaged"], counts["overwritten"]) == (0, 30)


def test_a_shorter_file_is_unreadable_pages(tier: ColdTier, capsys: pytest.CaptureFixture[str]) -> None:
    directory = stopped(tier)
    os.truncate(tier.path / "pages", 10 * 20480)
    assert cold.run(lambda: cold.verify(directory, as_json=True)) == 1
    assert json.loads(capsys.readouterr().out)["unreadable"] == 25


def test_what_changes_something_needs_the_node_stopped(tier: ColdTier, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tier.path.parent
    for command in (
        lambda: cold.gc(directory, other_versions=False),
        lambda: cold.clear(directory, namespace=None, everything=True),
        lambda: cold.clear(directory, namespace=NS.hex(), everything=False),
    ):
        assert cold.run(command) == 2
        assert "stop the node first" in capsys.readouterr().err
    assert len(announced(tier)) == 35


def test_gc_gives_back_what_nobody_can_find(
    tier: ColdTier, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cold, "_COMPACT_BYTES", 0)
    store(tier, hashes(2000), 1)
    tier.clear(NS)
    directory = stopped(tier)
    other, index = directory / "pages-0.1", tier.path / "index" / "data.mdb"
    other.mkdir()
    (other / "pages").write_bytes(bytes(5000))
    (tier.path / "index.damaged").mkdir()
    before = index.stat().st_size
    assert cold.run(lambda: cold.gc(directory, other_versions=False)) == 0
    assert "2,030 pages" in capsys.readouterr().out
    assert index.stat().st_size < before / 2
    assert other.exists()
    assert not (tier.path / "index.damaged").exists()
    assert sorted(each.name for each in tier.path.iterdir()) == ["index", "lock", "pages"]
    assert cold.run(lambda: cold.gc(directory, other_versions=True)) == 0
    assert not other.exists()
    again = opened(directory)
    assert {namespace for namespace, _ in announced(again)} == {OTHER}
    pages = hashes(50)
    assert all(store(again, pages, PAGE))
    assert load(again, pages, PAGE) == [True] * 50
    again.close()


def test_gc_leaves_another_version_alone_that_is_in_use(tier: ColdTier, capsys: pytest.CaptureFixture[str]) -> None:
    directory = stopped(tier)
    other = directory / "pages-0.1"
    other.mkdir()
    fd = places.locked(other)
    assert cold.run(lambda: cold.gc(directory, other_versions=True)) == 2
    assert "stop the node first" in capsys.readouterr().err
    os.close(fd)
    assert other.exists()


def test_clear_forgets_one_namespace_or_all(tier: ColdTier, capsys: pytest.CaptureFixture[str]) -> None:
    directory = stopped(tier)

    def clear(namespace: str | None, everything: bool = False) -> int:
        return cold.run(lambda: cold.clear(directory, namespace=namespace, everything=everything))

    assert clear(None) == 2
    assert clear("xyz") == 2
    assert clear("00" * 16) == 1
    assert clear(NS.hex()) == 0
    again = opened(directory)
    assert {namespace for namespace, _ in announced(again)} == {OTHER}
    again.close()
    assert clear(None, everything=True) == 0
    again = opened(directory)
    assert not announced(again)
    assert all(store(again, hashes(3), PAGE))
    again.close()


def test_where_there_is_none_it_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pages-0.1").mkdir()
    for command in (lambda: cold.stat(tmp_path, as_json=False), lambda: cold.gc(tmp_path, other_versions=False)):
        assert cold.run(command) == 2
        assert "there is no cold tier of this version" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["pages-0.1"]


def test_an_index_that_is_none_is_said(tier: ColdTier, capsys: pytest.CaptureFixture[str]) -> None:
    directory = stopped(tier)
    (tier.path / "index" / "data.mdb").write_bytes(os.urandom(16384))
    with pytest.raises(lmdb.Error):
        Index(tier.path / "index", 0, writable=False)
    assert cold.run(lambda: cold.stat(directory, as_json=False)) == 2
    assert "cannot be used" in capsys.readouterr().err
