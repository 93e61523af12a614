"""What fails under a cold tier costs pages and nothing else: a disk, its room, a damaged index, a clear at any moment."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest

from hicache_mooncake.cli import cold
from hicache_mooncake.cold import tier as tier_module
from hicache_mooncake.cold.index import Index, Key, Place
from hicache_mooncake.cold.layout import Segment
from hicache_mooncake.cold.pages_file import ColdError
from hicache_mooncake.cold.tier import ColdTier
from tests.cold import NS, OTHER, SMALL, announced, body, hashes, load, opened, small_tiers, store
from tests.conftest import environment, wait_until

PAGE = SMALL // 64
"""Eight of them are a segment of a small tier."""
SEGMENT = SMALL // 8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiers(monkeypatch)
    monkeypatch.setattr(tier_module, "_PATIENCE_S", 20.0)  # the machine may be busy


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ColdTier]:
    tier = opened(tmp_path, SMALL)
    yield tier
    tier.close()


def at_once(call: Callable[[], object]) -> None:
    """The call ends, with the tier's lock held by somebody whose disk hangs."""
    done = threading.Thread(target=call, daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive()


def tried_again(tier: ColdTier) -> None:
    """The time is over for which a tier is left alone that has failed."""
    assert not tier.ready()
    tier._failed_until = 0.0


def test_a_disk_that_hangs_does_not_keep_a_tier_from_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_CLOSE_S", 0.05)
    tier = opened(tmp_path, SMALL)
    page = hashes(1)
    with tier._lock:  # who has it waits for the disk
        at_once(tier.close)
    assert store(tier, page, PAGE) == [True], "it was left open"
    tier.close()
    tier = opened(tmp_path, SMALL)
    assert load(tier, page, PAGE) == [True]
    tier.close()


def test_an_index_whose_disk_hangs_is_waited_for_by_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every lookup would hang, of pages in DRAM as well."""
    monkeypatch.setattr(tier_module, "_PATIENCE_S", 0.05)
    tier = opened(tmp_path, SMALL)
    page = hashes(1)
    store(tier, page, PAGE)
    find, asked, comes_back = tier._index.find, threading.Event(), threading.Event()

    def hangs(namespace: bytes, each: Sequence[bytes]) -> list[Place | None]:
        asked.set()
        comes_back.wait()
        return find(namespace, each)

    monkeypatch.setattr(tier._index, "find", hangs)
    first = threading.Thread(target=tier.present, args=(NS, page), daemon=True)
    first.start()
    assert asked.wait(20)
    wait_until(lambda: tier._patience.over, 20, "it hangs")
    at_once(lambda: tier.present(NS, page))
    assert tier.locate(NS, page, PAGE) == [None]
    assert "the index cannot be read" in str(tier.report()["cold_problem"])
    comes_back.set()
    first.join(20)
    wait_until(lambda: tier.report()["cold_problem"] == "", 20, "it hangs no more")
    assert tier.present(NS, page) == b"\x01"
    tier.close()


def test_figures_do_not_wait_for_an_index_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks at a node because its disk hangs is to be told so."""
    monkeypatch.setattr(tier_module, "_PATIENCE_S", 0.05)
    tier = opened(tmp_path, SMALL)
    store(tier, hashes(3), PAGE)
    wait_until(lambda: tier.report()["cold_pages"] == 3, 20, "there are figures")
    pages, comes_back = tier._index.pages, threading.Event()

    def hangs() -> int:
        comes_back.wait()
        return pages()

    monkeypatch.setattr(tier._index, "pages", hangs)
    before = threading.active_count()
    at_once(tier.report)
    at_once(lambda: [tier.report() for _ in range(5)])
    figures = tier.report()
    assert figures["cold_pages"] == 3, "as of before"
    assert "the index cannot be read" in str(figures["cold_problem"])
    assert threading.active_count() <= before + 1
    store(tier, hashes(2), PAGE)
    comes_back.set()
    wait_until(lambda: tier.report()["cold_pages"] == 5, 20, "the figures are new")
    wait_until(lambda: tier.report()["cold_problem"] == "", 20, "it hangs no more")
    tier.close()


# --------------------------------------------------------------------------- clears


def test_a_clear_that_the_disk_refuses_holds_and_is_saved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path, SMALL)
    pages = hashes(4)
    store(tier, pages, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "save_cleared", refusing(lmdb.DiskError("no")))
        tier.clear(NS)
    assert tier.present(NS, pages) == bytes(4)
    assert not announced(tier)
    tried_again(tier)
    store(tier, pages[:2], PAGE)
    tier.close()
    tier = opened(tmp_path, SMALL)
    assert tier.present(NS, pages) == b"\1\1\0\0"
    tier.close()


def test_what_is_kept_of_a_segment_is_not_brought_back_from_a_clear(tier: ColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = hashes(4)
    store(tier, hot, PAGE)
    for _ in range(3):
        tier.locate(NS, hot, PAGE)
    to_keep = tier._to_keep

    def cleared_meanwhile(*arguments: object) -> object:
        found = to_keep(*arguments)  # type: ignore[arg-type]
        tier.clear(NS)
        return found

    monkeypatch.setattr(tier, "_to_keep", cleared_meanwhile)
    for page in hashes(80):
        store(tier, [page], PAGE, OTHER)
    assert tier.report()["cold_kept"] == 4
    assert tier.present(NS, hot) == bytes(4)


def test_a_clear_in_the_middle_of_a_write_holds_for_all_of_it(tier: ColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pages = tier._file.write, hashes(20)

    def clearing(offset: int, views: Sequence[memoryview]) -> None:
        tier.clear(NS)
        write(offset, views)

    monkeypatch.setattr(tier._file, "write", clearing)
    assert store(tier, pages, PAGE) == [False] * 20
    assert tier.present(NS, pages) == bytes(20)


def test_the_masters_hear_of_cleared_pages_whose_segment_went_first(tier: ColdTier) -> None:
    pages = hashes(4)
    store(tier, pages, PAGE)
    tier.clear(NS)
    for page in hashes(100):
        store(tier, [page], PAGE, OTHER)
    told: set[tuple[bytes, bytes]] = set()
    for namespace, blob in tier.drain_changes(10_000)[1]:
        told.update((namespace, blob[at : at + 32]) for at in range(0, len(blob), 32))
    assert {(NS, each) for each in pages} <= told


def test_junk_of_an_earlier_life_is_swept(tmp_path: Path) -> None:
    tier = opened(tmp_path, SMALL)
    store(tier, hashes(20), PAGE)
    store(tier, hashes(3), PAGE, OTHER)
    tier.clear(NS)
    tier.close()
    tier = opened(tmp_path, SMALL)
    assert tier.report()["cold_pages"] == 23
    while tier.sweep():
        pass
    assert tier.report()["cold_pages"] == 3
    tier.close()


def test_names_of_namespaces_do_not_pile_up(tier: ColdTier) -> None:
    for number in range(40):
        store(tier, hashes(8), PAGE, number.to_bytes(16, "big"))
    tier._look()
    assert 6 <= len(tier.namespaces()) <= 8
    assert len(announced(tier)) == 8 * len(tier.namespaces())


# --------------------------------------------------------------------------- a disk that fails, hangs or is full


def refusing(error: Exception) -> Callable[..., None]:
    def call(*_arguments: object, **_named: object) -> None:
        raise error

    return call


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_writes_that_fail_cost_no_room_and_no_other_page(tier: ColdTier, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    pages = hashes(20)
    store(tier, pages, PAGE)
    used = tier.report()["cold_used_bytes"]
    for _ in range(30):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refusing(OSError(number, os.strerror(number))))
            assert store(tier, hashes(1), PAGE) == [False]
        assert "writing failed" in tier.problem
        assert store(tier, hashes(1), PAGE) == [False], "it is left alone for a while"
        tried_again(tier)
    assert tier.report()["cold_used_bytes"] == used
    assert load(tier, pages, PAGE) == [True] * 20
    more = hashes(20)
    assert store(tier, more, PAGE) == [True] * 20
    assert load(tier, more, PAGE) == [True] * 20
    assert tier.problem == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_what_is_there_and_goes_round_in_it(
    tier: ColdTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store(tier, hashes(24), PAGE)  # three segments
    fallocate = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if offset >= 3 * SEGMENT:
            raise OSError(number, os.strerror(number))
        fallocate(fd, offset, length)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for _ in range(5):
            pages = hashes(8)
            assert store(tier, pages, PAGE) == [True] * 8
            assert load(tier, pages, PAGE) == [True] * 8
            assert len(announced(tier)) >= 16
    assert tier.report()["cold_errors"] == 0
    tier._look()
    store(tier, hashes(48), PAGE)
    assert len(announced(tier)) >= 56, "there is room again"


def test_a_disk_without_any_room_is_not_emptied_for_it(tier: ColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = hashes(24)
    store(tier, pages, PAGE)
    monkeypatch.setattr(os, "posix_fallocate", refusing(OSError(errno.ENOSPC, "full")))
    for _ in range(20):
        store(tier, hashes(3), PAGE)
    assert load(tier, pages, PAGE) == [True] * 24


def test_room_that_it_has_is_used_however_little_others_leave(tier: ColdTier) -> None:
    store(tier, hashes(100), PAGE)
    tier._floor_bytes = 1 << 60
    for _ in range(10):
        pages = hashes(8)
        assert store(tier, pages, PAGE) == [True] * 8
    assert len(announced(tier)) >= 48


def test_room_for_none_of_thousands_of_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColdTier, "_check_room", lambda *_arguments: None)
    tier = ColdTier(tmp_path, 4000 * (256 << 20), floor_bytes=1 << 60)
    assert store(tier, hashes(1), 4096) == [False]
    assert tier.report()["cold_errors"] == 0
    tier.close()


def test_a_restart_needs_no_more_room_than_there_was(tmp_path: Path) -> None:
    tier, pages = opened(tmp_path, SMALL), hashes(8)
    store(tier, pages, PAGE)
    tier.close()
    tier = ColdTier(tmp_path, SMALL, floor_bytes=1 << 60)
    assert load(tier, pages, PAGE) == [True] * 8
    tier.close()
    with pytest.raises(ColdError, match="are needed"):
        ColdTier(tmp_path, 2 * SMALL, floor_bytes=1 << 60)


def test_a_disk_that_hangs_under_a_write_holds_up_no_reader(tier: ColdTier) -> None:
    pages = hashes(4)
    store(tier, pages, PAGE)
    places = tier.locate(NS, pages, PAGE)
    assert places[0] is not None
    bad = [(Key(NS, pages[0]), places[0])]
    with tier._lock:
        at_once(lambda: tier.present(NS, pages))
        at_once(lambda: load(tier, pages, PAGE))
        at_once(lambda: tier.damaged(bad))
        at_once(lambda: tier.drain_changes(10))
        at_once(lambda: announced(tier))
        at_once(tier.report)
        assert tier.present(NS, pages) == b"\0\1\1\1"
    tier.sweep()
    assert tier.drain_changes(10)[1] == [(NS, pages[0])]


@pytest.mark.parametrize("large", [5, 7, 8])
def test_a_body_of_most_of_a_segment_goes_beside_what_is_kept(tier: ColdTier, large: int) -> None:
    """`large` pages long: it needs a segment that is not half full of what was kept."""
    hot = hashes(4)
    store(tier, hot, PAGE)
    for _ in range(20):
        tier.locate(NS, hot, PAGE)
        page = hashes(1)
        assert store(tier, page, large * PAGE) == [True]
        assert load(tier, page, large * PAGE) == [True]
    assert tier.report()["cold_errors"] == 0


def test_pages_that_cannot_be_read_are_forgotten_and_their_neighbours_are_read(
    tier: ColdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = hashes(8)
    store(tier, pages, PAGE)
    places = tier.locate(NS, pages, PAGE)
    assert places[3] is not None
    bad, preadv = places[3].offset, os.preadv

    def sick(fd: int, views: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, views)):
            raise OSError(errno.EIO, "bad sector")
        return preadv(fd, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", sick)
        assert load(tier, pages, PAGE) == [each != 3 for each in range(8)]
        assert tier.present(NS, pages) == b"\1\1\1\0\1\1\1\1"
    store(tier, pages[3:4], PAGE)
    assert load(tier, pages, PAGE) == [True] * 8


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_real_disk_that_fills_up_and_is_emptied(small_disk: Path) -> None:
    tier = opened(small_disk, SMALL)
    pages = hashes(16)
    assert all(store(tier, pages, PAGE))
    with open(small_disk / "others", "wb", buffering=0) as others, suppress(OSError):
        while others.write(bytes(4096)):
            pass
    for _ in range(20):
        store(tier, hashes(8), PAGE)
    assert len(announced(tier)) >= 8
    os.unlink(small_disk / "others")
    tier._failed_until = 0.0
    tier._look()
    pages = hashes(40)
    assert all(store(tier, pages, PAGE))
    assert load(tier, pages, PAGE) == [True] * 40
    tier.close()


def test_a_read_only_file_system_is_refused_with_a_sentence(small_disk: Path) -> None:
    opened(small_disk, SMALL).close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ColdError, match="Read-only file system"):
        opened(small_disk, SMALL)


def test_a_page_larger_than_a_segment_costs_itself_and_the_operator_is_told_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened(tmp_path, SMALL)
    large, others = hashes(1), hashes(4)
    bodies = [body(others[0], PAGE), body(large[0], SEGMENT + 1), *(body(each, PAGE) for each in others[1:])]
    assert tier.write(bodies, tier.clears) == [True, False, True, True, True]
    assert load(tier, others, PAGE) == [True] * 4
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert tier.report()["cold_problem"] in said
    assert f"pages of {(SEGMENT >> 10) + 4} KiB are never kept: one of {SEGMENT >> 10} KiB" in said
    enough = int(re.findall(r"(\d+)mb or more", said)[0]) << 20
    tier.close()
    assert cold.clear(tmp_path, namespace=None, everything=True) == 0
    tier = opened(tmp_path, enough)
    assert store(tier, large, SEGMENT + 1) == [True]
    assert tier.report()["cold_problem"] == ""
    tier.close()


# --------------------------------------------------------------------------- directories


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path, SMALL).close()
    own = tmp_path / next(tmp_path.iterdir()).name
    own.chmod(0o770)
    with pytest.raises(ColdError, match="may be written by others"):
        opened(tmp_path, SMALL)
    own.chmod(0o700)
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ColdError, match="is not a directory"):
        opened(tmp_path, SMALL)
    own.unlink()
    (tmp_path / "elsewhere").rename(own)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ColdError, match="belongs to another user"):
        opened(tmp_path, SMALL)


def test_what_another_version_left_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "pages-0.7"
    other.mkdir()
    (other / "pages").write_bytes(b"x" * 100)
    tier = opened(tmp_path, SMALL)
    assert "pages-0.7 is of another version" in caplog.text
    store(tier, hashes(80), PAGE)
    tier.close()
    assert (other / "pages").read_bytes() == b"x" * 100


def test_files_deleted_under_it(tier: ColdTier) -> None:
    pages = hashes(8)
    store(tier, pages, PAGE)
    shutil.rmtree(tier.path)
    assert load(tier, pages, PAGE) == [True] * 8
    assert all(store(tier, hashes(80), PAGE))
    tier._look()
    assert "was deleted" in tier.problem
    store(tier, hashes(1), PAGE)
    assert "was deleted" in tier.problem


def test_an_index_without_pages_and_pages_without_an_index(tmp_path: Path) -> None:
    for lost in ("pages", "index"):
        tier = opened(tmp_path, SMALL)
        pages = hashes(20)
        store(tier, pages, PAGE)
        tier.close()
        path = tier.path / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        tier = opened(tmp_path, SMALL)
        assert tier.present(NS, pages) == bytes(20)
        assert not announced(tier)
        assert all(store(tier, pages, PAGE))
        assert load(tier, pages, PAGE) == [True] * 20
        tier.close()


@pytest.mark.parametrize("sizes", [(8, 1), (4, 1), (2, 1), (1, 2), (1, 32), (1, 3, 1, 3)])
def test_a_tier_grows_and_shrinks_and_keeps_within_its_cap(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """In multiples of a small tier."""
    for size in sizes:
        tier = opened(tmp_path, size * SMALL)
        for place, there in (("before", announced(tier)), ("after", set())):
            if place == "after":
                for _ in range(24):
                    assert all(store(tier, hashes(4 * size), PAGE))
                there = announced(tier)
                assert len(there) * PAGE >= size * SMALL // 2
            assert load(tier, sorted(page for _, page in there), PAGE) == [True] * len(there)
            assert (tier.path / "pages").stat().st_size <= size * SMALL
            assert tier.report()["cold_used_bytes"] <= size * SMALL  # type: ignore[operator]
        tier.close()


def test_a_tier_of_tens_of_thousands_of_segments_opens_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments stay as small as they were when a tier grows. To compare each of these with each would take minutes."""
    tier = opened(tmp_path, SMALL)
    tier.close()
    monkeypatch.setattr(Index, "segments", lambda _index: [Segment(number, number + 1, 4096) for number in range(60_000)])
    os.truncate(tier.path / "pages", 60_000 * SEGMENT)  # sparse
    monkeypatch.setattr(ColdTier, "_check_room", lambda *_arguments: None)
    monkeypatch.setattr(tier_module, "suits", lambda *_arguments: True)
    tier = opened(tmp_path, 60_000 * SEGMENT)
    assert tier.report()["cold_used_bytes"] == 60_000 * 4096
    tier.close()


# --------------------------------------------------------------------------- the index


def test_a_full_index_makes_room_by_forgetting_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "map_bytes_for", lambda _capacity: 2 << 20)
    tier = opened(tmp_path, 16 * SMALL)
    for _ in range(50):
        pages = hashes(200)
        assert all(store(tier, pages, 100))
        assert load(tier, pages, 100) == [True] * 200
    report = tier.report()
    assert report["cold_evicted"]
    assert report["cold_errors"] == 0
    tier.close()


def test_an_index_that_is_full_of_one_segment_takes_no_more_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "map_bytes_for", lambda _capacity: 1 << 20)
    tier = opened(tmp_path, 128 * SMALL)
    pages = hashes(4000)
    found = [found for at in range(0, 4000, 100) for found in store(tier, pages[at : at + 100], 100)]
    assert any(found)
    assert not all(found)
    assert load(tier, pages, 100) == found
    tried_again(tier)
    assert all(store(tier, pages[-100:], 100))
    assert load(tier, pages[-100:], 100) == [True] * 100
    tier.close()


def test_an_index_that_says_it_is_damaged_is_put_aside_and_the_tier_begins_empty(
    tier: ColdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, old = hashes(8), weakref.ref(tier._index._env)
    store(tier, pages, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "put", refusing(lmdb.CorruptedError("torn")))
        assert store(tier, hashes(1), PAGE) == [False]
    tried_again(tier)
    assert store(tier, pages[:2], PAGE) == [True] * 2
    assert tier.changes_lost
    assert tier.life == 2, "what DRAM has is to be written again"
    assert announced(tier) == {(NS, each) for each in pages[:2]}
    assert load(tier, pages, PAGE) == [True] * 2 + [False] * 6
    assert (tier.path / "index.damaged" / "data.mdb").exists()
    gc.collect()
    assert old() is None, "the old one is let go of"


def test_a_record_that_is_none_is_a_damaged_index(tier: ColdTier) -> None:
    pages = hashes(8)
    store(tier, pages, PAGE)
    index = tier._index
    with index._env.begin(write=True, db=index._pages) as txn:
        txn.put(index.id_of(NS).to_bytes(4, "big") + pages[0], b"short")
    assert tier.present(NS, pages) == bytes(8)
    assert not announced(tier)
    tried_again(tier)
    tier.sweep()
    assert all(store(tier, pages, PAGE))
    assert load(tier, pages, PAGE) == [True] * 8


@pytest.mark.parametrize("damage", ["garbage", "no file", "cut", "meta pages"])
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_an_index_that_was_damaged_meanwhile(tmp_path: Path, damage: str, clean: bool) -> None:
    tier, pages = opened(tmp_path, SMALL), hashes(40)
    for page in pages:
        store(tier, [page], PAGE)
    tier.close()
    if not clean:
        (tier.path / "unclean").touch()
    data = tier.path / "index" / "data.mdb"
    if damage == "no file":
        data.unlink()
    elif damage == "cut":
        os.truncate(data, data.stat().st_size // 2 if not clean else 100)
    else:
        with open(data, "r+b") as file:
            file.write(os.urandom(16384 if damage == "garbage" else 8192))
    tier = opened(tmp_path, SMALL)
    assert load(tier, pages, PAGE) == [False] * 40
    assert all(store(tier, pages, PAGE))
    assert load(tier, pages, PAGE) == [True] * 40
    tier.close()


def test_nothing_raises_when_the_index_does(tier: ColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = hashes(4)
    store(tier, pages, PAGE)
    places = [(page, place) for page, place in zip(pages, tier.locate(NS, pages, PAGE), strict=True) if place is not None]
    with monkeypatch.context() as patch:
        for name in ("find", "pages", "segments", "sweep", "put", "empty", "drop", "save_cleared", "stale_readers", "prune"):
            patch.setattr(Index, name, refusing(lmdb.ReadersFullError("full")))
        for call in (
            lambda: store(tier, hashes(1), PAGE),
            lambda: tier.present(NS, pages),
            lambda: list(tier.read(NS, places, time.monotonic() + 20)),
            lambda: tier.damaged([(Key(NS, page), place) for page, place in places]),
            lambda: tier.clear(OTHER),
            tier.sweep,
            tier.report,
            lambda: tier.drain_changes(10),
            lambda: list(tier.snapshot_parts()),
        ):
            tier._failed_until = 0.0
            call()
    tier._failed_until = 0.0
    assert load(tier, pages, PAGE) == [True] * 4


def test_a_child_that_inherits_the_index_does_no_harm(tier: ColdTier) -> None:
    pages = hashes(8)
    store(tier, pages, PAGE)
    for ending in (lambda: os._exit(0), lambda: (tier._index.close(), os._exit(0))):
        child = os.fork()
        if not child:
            ending()
        assert os.waitpid(child, 0)[1] == 0
        assert load(tier, pages, PAGE) == [True] * 8
        more = hashes(8)
        assert all(store(tier, more, PAGE))
        assert load(tier, more, PAGE) == [True] * 8


def test_who_looks_and_is_killed_pins_nothing(tier: ColdTier, tmp_path: Path) -> None:
    store(tier, hashes(8), PAGE)
    code = f"""
import os
from pathlib import Path
from hicache_mooncake.cold.index import Index
index = Index(Path({str(tier.path / "index")!r}), 0, writable=False)
txn = index._env.begin()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], env=environment())
    assert tier._index.stale_readers() == 1
    tier._look()
    assert tier._index.stale_readers() == 0
    grown = tier._index.file_bytes
    for _ in range(200):
        store(tier, hashes(1), PAGE)
    assert tier._index.file_bytes <= grown + (64 << 12)


def test_many_threads_at_once(tier: ColdTier) -> None:
    """Readers, a writer, clears and masters: no wrong byte, no error, and what is told is what is there."""
    pages = [hashes(8) for _ in range(16)]
    ended = threading.Event()
    told: set[tuple[bytes, bytes]] = set()
    failed: list[BaseException] = []

    def drain() -> None:
        added, removed = tier.drain_changes(10_000)
        for change, what in ((told.difference_update, removed), (told.update, added)):
            for namespace, blob in what:
                change([(namespace, blob[at : at + 32]) for at in range(0, len(blob), 32)])

    def until_the_end(call: Callable[[], object]) -> None:
        try:
            while not ended.is_set():
                call()
        except BaseException as error:
            failed.append(error)

    def read() -> None:
        for batch in pages:
            load(tier, batch, PAGE)
            load(tier, batch, PAGE, OTHER)

    calls = [read, read, read, drain, lambda: announced(tier), tier.report, lambda: (time.sleep(0.01), tier.clear(OTHER))]
    threads = [threading.Thread(target=until_the_end, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    try:
        for batch in pages:
            store(tier, batch, PAGE)
            store(tier, batch[:3], PAGE, OTHER)
            tier.sweep()
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)
    while tier.sweep():
        pass
    drain()
    assert not failed
    assert told == announced(tier)
    report = tier.report()
    assert (report["cold_errors"], report["cold_damaged"]) == (0, 0)
