"""The cold tier by itself: what is written is found again, and nothing else ever is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake.cold.index import Key
from hicache_mooncake.cold.pages_file import ColdError
from hicache_mooncake.cold.tier import ColdTier
from tests.cold import MIB, NS, OTHER, SMALL, announced, body, hashes, load, opened, small_tiers, store


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ColdTier]:
    tier = opened(tmp_path)
    yield tier
    tier.close()


def test_what_is_written_is_read_again(tier: ColdTier) -> None:
    for length in (1, 4096, 5000, 65536, 3 * MIB + 77):
        pages = hashes(5)
        assert store(tier, pages, length) == [True] * 5
        assert tier.present(NS, pages) == b"\x01" * 5
        assert load(tier, pages, length) == [True] * 5
    assert tier.present(OTHER, pages) == bytes(5)
    assert tier.locate(NS, pages, 4096) == [None] * 5, "another length is another page"


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    pages = hashes(40)
    tier = opened(tmp_path)
    store(tier, pages, 70_000)
    tier.close()
    tier = opened(tmp_path)
    assert load(tier, pages, 70_000) == [True] * 40
    more = hashes(40)
    store(tier, more, 70_000)
    assert load(tier, pages + more, 70_000) == [True] * 80
    assert announced(tier) == {(NS, each) for each in pages + more}
    tier.close()


def test_the_oldest_go_first_and_the_cap_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiers(monkeypatch)
    tier = opened(tmp_path, SMALL)
    length, pages = SMALL // 64, hashes(200)
    for page in pages:
        assert store(tier, [page], length) == [True]
        assert os.stat(tier.path / "pages").st_size <= SMALL
    here = tier.present(NS, pages)
    kept = here.count(1)
    assert kept * length >= SMALL * 3 // 4 - 8 * length
    assert here == bytes(200 - kept) + b"\x01" * kept
    assert load(tier, pages, length) == [bool(each) for each in here]
    report = tier.report()
    assert report["cold_evicted"] == 200 - kept
    assert report["cold_write_amplification"] == 1.0
    tier.close()


def test_what_is_asked_for_again_and_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiers(monkeypatch)
    tier = opened(tmp_path, SMALL)
    length, hot = SMALL // 64, hashes(4)
    store(tier, hot, length)
    for page in hashes(200):
        tier.locate(NS, hot, length)
        store(tier, [page], length)
    assert load(tier, hot, length) == [True] * 4
    report = tier.report()
    assert report["cold_kept"]
    assert report["cold_written"] == 204
    assert 1.0 < report["cold_write_amplification"] <= 2.0  # type: ignore[operator]
    tier.close()


def test_a_cleared_namespace_is_gone_and_the_masters_hear_of_it(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    pages = hashes(20)
    store(tier, pages, 4096)
    store(tier, pages, 4096, OTHER)
    tier.drain_changes(1000)
    tier.clear(NS)
    assert tier.present(NS, pages) == bytes(20)
    store(tier, pages[:5], 4096)  # stored anew: not to be taken for gone
    while tier.sweep():
        pass
    added, removed = tier.drain_changes(1000)
    assert added == [(NS, b"".join(pages[:5]))]
    assert [(namespace, len(blob) // 32) for namespace, blob in removed] == [(NS, 15)]
    tier.clear(NS)
    tier.close()
    tier = opened(tmp_path)
    assert tier.present(NS, pages) == bytes(20)
    assert load(tier, pages, 4096, OTHER) == [True] * 20
    tier.close()


def test_what_was_on_its_way_when_its_namespace_was_cleared_does_not_come_back(tier: ColdTier) -> None:
    pages = hashes(3)
    since = tier.clears
    bodies = [body(each, 4096) for each in pages]
    tier.clear(NS)
    assert tier.write(bodies, since) == [False] * 3
    assert tier.present(NS, pages) == bytes(3)
    assert tier.write(bodies, tier.clears) == [True] * 3


def test_a_clear_that_does_not_wait_for_the_disk_holds_at_once(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    pages = hashes(3)
    store(tier, pages, 4096)
    tier._lock.acquire()  # a disk that hangs
    tier.clear(NS, wait=False)
    assert tier.present(NS, pages) == bytes(3)
    tier._lock.release()
    tier.sweep()
    tier.close()
    tier = opened(tmp_path)
    assert tier.present(NS, pages) == bytes(3)
    tier.close()


def test_what_is_here_already_is_known_by_its_checksum(tier: ColdTier) -> None:
    first, other = hashes(2)
    store(tier, [first], 4096)
    right = body(first, 4096).checksum
    assert tier.here([(Key(NS, first), right), (Key(NS, first), right ^ 1), (Key(NS, other), 5)]) == [True, False, False]


def test_a_flipped_bit_is_a_miss_and_is_forgotten(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    pages = hashes(8)
    store(tier, pages, 65536)
    place = tier.locate(NS, pages[3:4], 65536)[0]
    assert place is not None
    with open(tier.path / "pages", "r+b") as file:
        file.seek(place.offset + 12345)
        byte = file.read(1)[0]
        file.seek(place.offset + 12345)
        file.write(bytes([byte ^ 1]))
    assert load(tier, pages, 65536) == [True] * 3 + [False] + [True] * 4
    assert tier.present(NS, pages) == b"\x01\x01\x01\0\x01\x01\x01\x01"
    assert tier.report()["cold_damaged"] == 1
    assert (NS, pages[3]) not in announced(tier)
    tier.sweep()
    assert tier.drain_changes(100)[1] == [(NS, pages[3])]
    assert store(tier, pages[3:4], 65536) == [True]
    assert load(tier, pages, 65536) == [True] * 8
    tier.close()


def test_a_second_node_is_refused(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    with pytest.raises(ColdError, match="another node uses it"):
        opened(tmp_path)
    tier.close()
    opened(tmp_path).close()


def test_without_room_it_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ColdError, match="are needed"):
        ColdTier(tmp_path, 1 << 50)
    with pytest.raises(ColdError, match="too few"):
        ColdTier(tmp_path / "b", 1 << 20)


def test_a_shorter_file_costs_what_was_there_and_no_more(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    pages = hashes(20)
    store(tier, pages, MIB)
    tier.close()
    os.truncate(tier.path / "pages", 8 * MIB)
    tier = opened(tmp_path)
    assert load(tier, pages, MIB) == [True] * 8 + [False] * 12
    assert store(tier, pages[8:], MIB) == [True] * 12
    assert load(tier, pages, MIB) == [True] * 20
    tier.close()


def test_without_masters_nothing_is_remembered_for_them(tmp_path: Path) -> None:
    tier = opened(tmp_path, track_changes=False)
    pages = hashes(3)
    store(tier, pages, 4096)
    tier.clear(NS)
    while tier.sweep():
        pass
    assert tier.drain_changes(100) == ([], [])
    assert len(tier.take_gone()) == 3
    tier.close()
