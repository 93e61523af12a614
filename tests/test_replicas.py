"""Hot pages of another host come to stay: real nodes, a real master."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hicache_mooncake.testing.local import FakeRank
from tests.conftest import MasterProcess, NodeProcess, wait_until
from tests.test_pool_cluster import NS, found_everywhere, hashes, report_of

Hosts = tuple[NodeProcess, NodeProcess, FakeRank, FakeRank]


@pytest.fixture
def hosts(start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]) -> Iterator[Callable[..., Hosts]]:
    ranks: list[FakeRank] = []

    def start(*extra: str) -> Hosts:
        master = start_master()
        a, b = (start_node(name, "64MiB", (master.address,), extra) for name in ("a", "b"))
        ranks.extend(FakeRank(node.settings()) for node in (a, b))
        return a, b, ranks[0], ranks[1]

    yield start
    for rank in ranks:
        rank.close()


def test_the_second_fetch_brings_pages_to_stay_and_they_outlive_their_writer(hosts: Callable[..., Hosts]) -> None:
    node_a, _, a, b = hosts()
    pages = hashes(*range(8))
    a.store(NS, pages)
    found_everywhere(b, pages, 8)
    for expected in (8, 8, 0, 0):
        outcome = b.load(NS, pages)
        assert outcome.ok == b"\x01" * 8, outcome.reasons
        assert outcome.remote_bytes == expected * b.page_bytes
    assert report_of(b)["replicated"] == 8
    assert report_of(b)["objects"] == 8
    node_a.kill()
    outcome = b.load(NS, pages)
    assert outcome.ok == b"\x01" * 8
    wait_until(lambda: report_of(b)["replicas_kept"] == 8, 30, "the last copies are own pages")


def test_a_replica_goes_with_a_clear_and_does_not_come_back(hosts: Callable[..., Hosts]) -> None:
    _, _, a, b = hosts()
    pages = hashes(*range(4))
    a.store(NS, pages)
    found_everywhere(b, pages, 4)
    for _ in range(3):
        assert b.load(NS, pages).ok == b"\x01" * 4
    assert report_of(b)["objects"] == 4
    assert a.client.clear(NS) == 4
    for rank in (a, b):
        wait_until(lambda rank=rank: rank.exists(NS, pages) == 0, 30, "cleared everywhere")  # type: ignore[misc]
        for _ in range(3):
            assert rank.load(NS, pages).ok == bytes(4)
    assert a.store(NS, pages, generation=1).ok == b"\x01" * 4
    found_everywhere(b, pages, 4)
    for _ in range(3):
        assert b.load(NS, pages, generation=1).ok == b"\x01" * 4


def test_no_replicas_where_they_are_off(hosts: Callable[..., Hosts]) -> None:
    _, _, a, b = hosts("--replicate-after", "0")
    pages = hashes(*range(4))
    a.store(NS, pages)
    found_everywhere(b, pages, 4)
    for _ in range(4):
        assert b.load(NS, pages).remote_bytes == 4 * b.page_bytes
    assert report_of(b)["objects"] == 0


def test_pages_evicted_after_the_lookup_shorten_the_prefix_and_fail_nothing(hosts: Callable[..., Hosts]) -> None:
    """Every third of them goes between lookup and load; what is left is loaded, and the rest is absent."""
    _, _, a, b = hosts()
    other = b"o" * 16
    pages = hashes(*range(12))
    gone = pages[::3]
    a.store(NS, [page for page in pages if page not in gone])
    a.store(other, gone)
    found_everywhere(b, pages[1:3], 2)
    a.client.clear(other)
    outcome = b.load(NS, pages)
    assert [page for page, ok in zip(pages, outcome.ok, strict=True) if not ok] == gone
    assert sum(outcome.reasons.values()) == len(gone)
