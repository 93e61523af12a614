"""Pages that every rank of a host reads alike cross the network once, and whatever becomes of the rank that fetches them, the
others get them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.testing.local import FakeRank, page_hash
from tests.conftest import MasterProcess, NodeProcess, wait_until
from tests.test_pool_local import Admin

NS = b"n" * 16
RANKS = 4


class Hosts:
    """A writer on host a and the ranks of one engine on host b."""

    def __init__(self, a: NodeProcess, b: NodeProcess, dram_ranks: int, mode: str) -> None:
        settings = {"copy_mode": mode}
        self.b = b
        self.writer = FakeRank(a.settings())
        self.readers = [FakeRank(b.settings(**settings), memfd=mode == "memfd", shared=True) for _ in range(dram_ranks)]

    def ready(self, pages: list[bytes]) -> None:
        """Every reader finds the pages, and its mover runs."""
        absent = names("absent")
        for reader in self.readers:
            wait_until(lambda reader=reader: reader.exists(NS, pages) == len(pages), 20, "pages found")  # type: ignore[misc]
            wait_until(lambda reader=reader: reader.load(NS, absent).reasons == {"absent": 1}, 20, "mover up")  # type: ignore[misc]

    def load_all(self, pages: list[bytes]) -> list[tuple[bytes, dict[str, int]]]:
        outcomes: list[tuple[bytes, dict[str, int]]] = [(b"", {})] * len(self.readers)
        start = threading.Barrier(len(self.readers))

        def load(rank: int) -> None:
            start.wait()
            outcome = self.readers[rank].load(NS, pages)
            outcomes[rank] = (outcome.ok, outcome.reasons)

        threads = [threading.Thread(target=load, args=(rank,)) for rank in range(len(self.readers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def sent(self) -> int:
        report = self.writer.client.status()
        assert report is not None
        return int(report.node["remote_sent_pages"])

    def held(self) -> int:
        report = self.readers[0].client.status()
        assert report is not None
        return int(report.node["objects"])


@pytest.fixture
def hosts(start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def build(dram: str = "16MiB", ranks: int = RANKS, mode: str = "memfd") -> Hosts:
        master = start_master()
        a, b = start_node("a", "64MiB", (master.address,)), start_node("b", dram, (master.address,))
        made.append(Hosts(a, b, ranks, mode))
        return made[-1]

    yield build
    for built in made:
        for rank in (built.writer, *built.readers):
            rank.close()


def names(*which: object) -> list[bytes]:
    return [page_hash(name) for name in which]


@pytest.mark.parametrize("mode", ["memfd", "process_vm", "segment"])
def test_all_ranks_of_a_host_load_with_one_read_from_the_other(hosts: Callable[..., Hosts], mode: str) -> None:
    """P144: one copy, one network read per host, the rest through its own memory."""
    both = hosts(mode=mode)
    pages = names(*range(12))
    assert both.writer.store(NS, pages).ok == b"\x01" * 12
    both.ready(pages)
    assert both.load_all(pages) == [(b"\x01" * 12, {})] * RANKS
    assert both.sent() == 12, "each page crossed once, not once a rank"
    assert both.held() == 12
    assert both.load_all(pages) == [(b"\x01" * 12, {})] * RANKS
    assert both.sent() == 12, "and is here now"


def test_a_rank_that_fetches_and_never_ends_costs_the_others_a_wait(hosts: Callable[..., Hosts]) -> None:
    both = hosts(ranks=2)
    pages = names(*range(4))
    both.writer.store(NS, pages)
    both.ready(pages)
    frozen = Admin(both.b)
    located = frozen.ask(p.Locate(NS, b"".join(pages), both.writer.page_bytes, shared=True))
    assert isinstance(located, p.Located)
    assert list(located.status) == [p.FETCH] * 4
    assert len(set(located.room)) == 4
    assert both.load_all(pages) == [(b"\x01" * 4, {})] * 2
    assert both.held() == 0
    frozen.close()
    wait_until(lambda: both.load_all(pages) == [(b"\x01" * 4, {})] * 2 and both.held() == 4, 10, "its claim ended with it")


def test_damage_on_the_way_is_kept_from_everybody(hosts: Callable[..., Hosts]) -> None:
    both = hosts(ranks=2)
    pages = names("good", "bad", "fine")
    both.writer.store(NS, pages)
    both.ready(pages)
    admin = Admin(NodeOf(both.writer))
    admin.damage(NS, pages[1], both.writer.page_bytes)
    admin.close()
    outcomes = both.load_all(pages)
    assert [ok for ok, _ in outcomes] == [b"\x01\x00\x01"] * 2
    assert all("checksum_remote" in reasons for _, reasons in outcomes)
    assert both.held() == 2


def test_without_room_here_pages_still_come(hosts: Callable[..., Hosts]) -> None:
    both = hosts(dram="1MiB", ranks=1)
    mine = names(*(("mine", i) for i in range(16)))
    both.readers[0].store(NS, mine)
    keeper = Admin(both.b)
    for part in (mine[:8], mine[8:]):
        assert isinstance(keeper.ask(p.Locate(NS, b"".join(part), both.writer.page_bytes)), p.Located)
    pages = names(*range(10))
    both.writer.store(NS, pages)
    both.ready(pages)
    assert both.load_all(pages)[0][0] == b"\x01" * 10
    keeper.close()


class NodeOf:
    """The node that a rank is connected to, as far as Admin needs it."""

    def __init__(self, rank: FakeRank) -> None:
        self.socket = rank.client.settings.socket
