"""A cold tier that is killed, whose files are damaged or set back, or that does anything in any order: no wrong byte, nothing
told of that is not there, nothing cleared that comes back, and never more than its capacity."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_mooncake.cold.layout import blocks
from hicache_mooncake.cold.tier import ColdTier
from tests.cold import MIB, NS, OTHER, SMALL, announced, body, hashes, load, opened, small_tiers, store

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.test_cold_crashes"])


def quick_directory() -> str | None:
    """Where nothing waits for a disk: what is asked here is about processes that end, not about loss of power."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def quick_path() -> Iterable[Path]:
    with tempfile.TemporaryDirectory(dir=quick_directory()) as path:
        yield Path(path)


def length_of(page_hash: bytes) -> int:
    return 1 + int.from_bytes(page_hash[:2], "big") % (12 * 4096)


def small_tier(path: Path, capacity: int) -> ColdTier:
    with pytest.MonkeyPatch.context() as patch:
        small_tiers(patch)
        return opened(path, capacity)


def proved(tier: ColdTier) -> set[tuple[bytes, bytes]]:
    """All that is announced is found, and has the right bytes."""
    there = announced(tier)
    for namespace, page_hash in there:
        assert load(tier, [page_hash], length_of(page_hash), namespace) == [True]
    report = tier.report()
    used = sum(blocks(length_of(page_hash)) for _, page_hash in there)
    assert used <= report["cold_used_bytes"] <= report["cold_capacity_bytes"] <= tier.capacity_bytes  # type: ignore[operator]
    assert (tier.path / "pages").stat().st_size <= tier.capacity_bytes
    return there


# --------------------------------------------------------------------------- killed at any moment


def _busy(path: Path, capacity: int, seed: int, told: Connection) -> None:
    """Store, ask for, clear and sweep until somebody ends this. Says which namespaces have been cleared and are done with."""
    dice = random.Random(seed)
    tier = small_tier(path, capacity)
    told.send(0)
    first, hot = seed << 16, hashes(3)
    for at in range(1 << 15):
        current = (first + at // 5).to_bytes(16, "big")
        pages = [dice.randbytes(32) for _ in range(dice.randrange(1, 16))]
        tier.write([body(each, length_of(each), current) for each in pages], tier.clears)
        for each in hot:
            tier.locate(NS, [each], length_of(each))
        tier.write([body(each, length_of(each)) for each in hot], tier.clears)
        if at % 5 == 4 and dice.random() < 0.5:
            tier.clear(current)
            told.send(first + at // 5)
        if dice.random() < 0.3:
            tier.sweep()


def _killed_again_and_again(path: Path, capacity: int, rounds: int) -> None:
    cleared: set[bytes] = set()
    found = 0
    for seed in range(1, rounds + 1):
        ours, theirs = _processes.Pipe(duplex=False)
        child = _processes.Process(target=_busy, args=(path, capacity, seed, theirs), daemon=True)
        child.start()
        theirs.close()
        for _ in range(2 if seed == 1 else 1):  # that it is there, and once that something was cleared
            assert ours.poll(60)
            cleared.add(ours.recv().to_bytes(16, "big"))
        child.join(random.random() * 0.4)
        child.kill()
        child.join(30)
        assert child.exitcode == -9
        with suppress(EOFError):
            while True:
                cleared.add(ours.recv().to_bytes(16, "big"))
        tier = small_tier(path, capacity)
        there = proved(tier)
        assert not {namespace for namespace, _ in there} & cleared
        assert tier.report()["cold_errors"] == tier.report()["cold_damaged"] == 0
        assert not (tier.path / "index.damaged").exists()
        found += len(there)
        tier.close()
    assert found
    assert len(cleared) > 1


def test_a_tier_that_is_killed_has_what_it_had(quick_path: Path) -> None:
    _killed_again_and_again(quick_path, 4 * MIB, 10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_tier_that_is_killed_two_hundred_times_has_what_it_had(tmp_path: Path) -> None:
    _killed_again_and_again(tmp_path, 64 * MIB, 200)


# --------------------------------------------------------------------------- files that are not what they were


def _asked_for(count: int) -> list[bytes]:
    return [_whole(each[:8]) for each in hashes(count)]


def _whole(head: bytes) -> bytes:
    """A hash of which no other one differs in a few bits, as it is with SHA-256: nobody asks for such a one."""
    return head + random.Random(head).randbytes(24)


def _filled(path: Path, pages: int) -> None:
    tier = small_tier(path, 8 * MIB)
    for _ in range(0, pages, 50):
        batch = _asked_for(50)
        tier.write([body(each, 1 + each[0] % 8, NS if each[1] & 1 else OTHER) for each in batch], tier.clears)
    tier.close()
    (tier.path / "unclean").touch()


def _used(path: Path) -> None:
    """Does with it what a node does. Ends this process with 1 for a wrong byte, and with 0 when all is well."""
    try:
        tier = small_tier(path, 8 * MIB)
        there = announced(tier)
        for namespace in (NS, OTHER):
            pages = [page_hash for each, page_hash in there if each == namespace and page_hash == _whole(page_hash[:8])]
            for length in range(1, 9):
                load(tier, [each for each in pages if each[0] % 8 + 1 == length], length, namespace)
        tier.clear(OTHER)
        while tier.sweep():
            pass
        assert not tier.present(OTHER, [page_hash for _, page_hash in there]).count(1)
        for _ in range(10):
            batch = hashes(300)
            store(tier, batch, 4096)
            load(tier, batch, 4096)
            tier._failed_until = 0.0
        batch = hashes(50)
        if not all(store(tier, batch, 4096)) or not all(load(tier, batch, 4096)):
            os._exit(2)  # it is of no use
        tier.close()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _flipped(path: Path, dice: random.Random, *, first: int = 0, last: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice([1, 1, 4, 64])):
        at = dice.randrange(first, last or len(data))
        data[at] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _heals(path: Path, most: int) -> None:
    """Of use again after at most so many ends of the process."""
    ends = []
    for _ in range(most):
        child = _processes.Process(target=_used, args=(path,), daemon=True)
        child.start()
        child.join(60)
        ends.append(child.exitcode)
        assert child.exitcode != 1, "a wrong byte, or it raised"
        if child.exitcode == 0:
            return
        assert child.exitcode is not None
    raise AssertionError(f"it does not heal: {ends}")


def _flips(path: Path, rounds: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    _filled(path / "base", 3000)
    for at in range(rounds):
        copy = path / "copy"
        shutil.copytree(path / "base", copy)
        index = next(copy.glob("pages-*")) / "index" / "data.mdb"
        _flipped(index, dice, last=8192 if at % 3 == 0 else None)
        _heals(copy, 3)
        shutil.rmtree(copy)


def test_flipped_bits_in_the_index_end_no_node_twice(quick_path: Path) -> None:
    _flips(quick_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_flipped_bits_in_the_index(quick_path: Path) -> None:
    _flips(quick_path, 200)


def test_flipped_bits_in_pages_are_misses(quick_path: Path) -> None:
    tier = small_tier(quick_path, 4 * MIB)
    pages = hashes(100)
    tier.write([body(each, length_of(each)) for each in pages], tier.clears)
    data = tier.path / "pages"
    _flipped(data, random.Random(5), last=tier.report()["cold_used_bytes"])  # type: ignore[arg-type]
    dice = random.Random(6)
    for _ in range(40):
        _flipped(data, dice, last=2 * MIB)
    here = [load(tier, [each], length_of(each)) == [True] for each in pages]
    assert any(here)
    assert not all(here)
    report = tier.report()
    assert report["cold_damaged"] == here.count(False)
    assert announced(tier) == {(NS, each) for each, is_here in zip(pages, here, strict=True) if is_here}
    tier.close()


@pytest.mark.parametrize("what", ["index", "pages"])
def test_one_of_the_files_is_older_than_the_other(quick_path: Path, what: str) -> None:
    """As after a backup, or a disk that lost what it had said was written."""
    directory = quick_path / "tier"
    for round_ in range(4):
        tier = small_tier(directory, 2 * MIB)
        for _ in range(round_ * 7):
            tier.write([body(each, length_of(each)) for each in hashes(9)], tier.clears)
        tier.close()
        if round_ % 2 == 0:
            shutil.copytree(tier.path, quick_path / "older", dirs_exist_ok=True)
            continue
        older, path = quick_path / "older" / what, tier.path / what
        shutil.copytree(older, path, dirs_exist_ok=True) if path.is_dir() else shutil.copy(older, path)
        tier = small_tier(directory, 2 * MIB)
        for namespace, page_hash in announced(tier):
            load(tier, [page_hash], length_of(page_hash), namespace)  # every byte of what is read is compared
        proved(tier)
        tier.write([body(each, length_of(each)) for each in hashes(40)], tier.clears)
        tier.close()


# --------------------------------------------------------------------------- anything, in any order

_PAGES = [bytes([number]) * 32 for number in range(60)]
_NAMESPACES = [NS, OTHER, b"p" * 16]
_LENGTHS = [1, 4096, 4097, 30_000, SMALL // 32, SMALL // 8, SMALL // 8 + 1]


class AnythingInAnyOrder(RuleBasedStateMachine):
    """A tier beside a dict of what was last stored under each key."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=quick_directory()))
        self.stored: dict[tuple[bytes, bytes], int] = {}
        self.told: set[tuple[bytes, bytes]] = set()

    @initialize()
    def begin(self) -> None:
        self.tier = small_tier(self.directory, SMALL)

    def teardown(self) -> None:
        with suppress(AttributeError):
            self.tier.close()
        shutil.rmtree(self.directory)

    @rule(
        pages=st.lists(st.sampled_from(_PAGES), min_size=1, max_size=20, unique=True),
        namespace=st.sampled_from(_NAMESPACES),
        length=st.sampled_from(_LENGTHS),
    )
    def store(self, pages: list[bytes], namespace: bytes, length: int) -> None:
        found = store(self.tier, pages, length, namespace)
        assert all(found) == (length <= SMALL // 8)
        for page, here in zip(pages, found, strict=True):
            if here:
                self.stored[namespace, page] = length

    @rule(namespace=st.sampled_from(_NAMESPACES))
    def clear(self, namespace: bytes) -> None:
        self.tier.clear(namespace)
        self.stored = {key: length for key, length in self.stored.items() if key[0] != namespace}

    @rule(pages=st.lists(st.sampled_from(_PAGES), max_size=10), namespace=st.sampled_from(_NAMESPACES))
    def ask_for(self, pages: list[bytes], namespace: bytes) -> None:
        for page in pages:
            load(self.tier, [page], self.stored.get((namespace, page), 5), namespace)

    @rule(capacity=st.sampled_from([SMALL, SMALL, SMALL // 2, 2 * SMALL]))
    def restart(self, capacity: int) -> None:
        self.tier.close()
        self.tier = small_tier(self.directory, capacity)
        self.told = announced(self.tier)  # as a master hears it

    @rule()
    def look(self) -> None:
        self.tier._look()

    @rule()
    def drain(self) -> None:
        added, removed = self.tier.drain_changes(1 << 20)
        self.told.difference_update(_each(removed))
        self.told.update(_each(added))

    @invariant()
    def what_is_told_is_there_and_right(self) -> None:
        if not hasattr(self, "tier"):
            return
        while self.tier.sweep():
            pass
        self.drain()
        there = announced(self.tier)
        assert there == self.told
        assert there <= set(self.stored)
        for namespace in _NAMESPACES:
            here = {page for page, byte in zip(_PAGES, self.tier.present(namespace, _PAGES), strict=True) if byte}
            assert here == {page for each, page in there if each == namespace}
            for page in here:
                assert load(self.tier, [page], self.stored[namespace, page], namespace) == [True]
        report = self.tier.report()
        assert report["cold_errors"] == report["cold_damaged"] == 0
        assert report["cold_used_bytes"] <= self.tier.capacity_bytes  # type: ignore[operator]
        assert (self.tier.path / "pages").stat().st_size <= self.tier.capacity_bytes


def _each(groups: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(namespace, blob[at : at + 32]) for namespace, blob in groups for at in range(0, len(blob), 32)]


TestAnythingInAnyOrder: Any = AnythingInAnyOrder.TestCase
TestAnythingInAnyOrder.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
