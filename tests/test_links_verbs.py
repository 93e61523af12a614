"""Pages between two nodes by RDMA, over devices that are not there: what the links do is the verbs transport's own work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hicache_mooncake.node import links
from hicache_mooncake.testing.fake_verbs import FakeFabric, FakeHost, FakeQp
from hicache_mooncake.transfer.transport import TransportOptions
from hicache_mooncake.transfer.verbs.transport import VerbsTransport
from tests.conftest import wait_until
from tests.linked import ALL, COUNT, LONG_S, NS, PAGE, Linked, MakePair, faults, figure, nothing_lent, pair
from tests.memory_transport import Faults

__all__ = ["faults", "pair"]


class Fabric:
    """A host with two cards for each node, in the order in which they open their transport."""

    def __init__(self, fabric: FakeFabric) -> None:
        self.hosts = [fabric.host(name, ("mlx5_0", "mlx5_1")) for name in ("one", "other")]
        self._left: Iterator[FakeHost] = iter(self.hosts)

    def opened(self, scheme: str, options: TransportOptions) -> VerbsTransport:
        assert scheme == "verbs"
        return VerbsTransport(options, next(self._left).binding())

    def bytes(self) -> int:
        return sum(card.counts.bytes for host in self.hosts for card in host.cards.values())


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with FakeFabric() as made:
        yield Fabric(made)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_pages_come_by_rdma_into_the_readers_node(fabric: Fabric, pair: MakePair, faults: Faults, shared: bool) -> None:
    linked = Linked(pair(fabric.opened), faults, shared=shared)
    before, moved = figure(linked.b, "link_received_bytes"), fabric.bytes()
    outcome = linked.reader.load(NS, linked.pages)
    assert outcome.ok == ALL, outcome.reasons
    wait_until(lambda: figure(linked.b, "link_received_bytes") == before + COUNT * PAGE, LONG_S, "all pages counted")
    assert fabric.bytes() == moved + COUNT * PAGE
    assert linked.b.report()["transport"] == "verbs"
    assert linked.b.report()["peer a"] == "verbs up"
    nothing_lent(linked.b)


def test_one_card_of_two_that_fails_costs_nothing(fabric: Fabric, pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(fabric.opened), faults)
    for host in fabric.hosts:
        host.cards["mlx5_0"].break_queue_pairs()
    assert linked.reader.load(NS, linked.pages).ok == ALL
    nothing_lent(linked.b)


def test_when_all_cards_fail_pages_come_by_tcp_and_by_rdma_again_later(fabric: Fabric, pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(fabric.opened), faults, deadline_s=7.5)
    cards = [card for host in fabric.hosts for card in host.cards.values()]
    for card in cards:
        card.break_queue_pairs()
    assert linked.reader.load(NS, linked.pages).ok == ALL
    nothing_lent(linked.b)
    for card in cards:
        card.break_queue_pairs(None)

    def by_rdma() -> bool:
        before = figure(linked.b, "link_received_bytes")
        assert linked.reader.load(NS, linked.pages).ok == ALL
        return figure(linked.b, "link_received_bytes") == before + COUNT * PAGE

    wait_until(by_rdma, LONG_S, "a link again")
    nothing_lent(linked.b)


def test_cards_that_stand_still_leave_time_for_tcp_and_nothing_lands_later(
    fabric: Fabric, pair: MakePair, faults: Faults
) -> None:
    linked = Linked(pair(fabric.opened), faults, deadline_s=7.5)
    cards = [card for host in fabric.hosts for card in host.cards.values()]
    for card in cards:
        card.hold()
    assert linked.reader.load(NS, linked.pages).ok == ALL
    nothing_lent(linked.b)
    own = linked.both.stored(linked.reader, linked.reader, *(f"own {i}" for i in range(16)))
    moved = fabric.bytes()
    for card in cards:
        card.resume()
    wait_until(lambda: not any(card.busy for card in cards), LONG_S, "the cards have nothing left to do")
    assert fabric.bytes() == moved
    assert linked.reader.load(NS, own).ok == b"\x01" * 16


def test_a_driver_that_hangs_when_a_queue_pair_is_destroyed_leaves_tcp(
    fabric: Fabric, pair: MakePair, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it hangs whoever uses the transport: nobody does until it is over."""
    monkeypatch.setattr(links, "_FENCE_S", 0.3)
    linked = Linked(pair(fabric.opened), faults, deadline_s=7.5)
    go_on = threading.Event()
    close = FakeQp.close

    def hangs(qp: FakeQp) -> None:
        go_on.wait()
        close(qp)

    cards = [card for host in fabric.hosts for card in host.cards.values()]
    for card in cards:
        card.hold()
    monkeypatch.setattr(FakeQp, "close", hangs)
    try:
        assert linked.reader.load(NS, linked.pages).ok == ALL
        wait_until(lambda: figure(linked.b, "link_ends_hanging") == 1, LONG_S, "it is known to hang")
        assert figure(linked.b, "quarantined_bytes") == COUNT * PAGE
        assert linked.reader.load(NS, linked.pages).ok == ALL
        assert figure(linked.b, "landing_bytes") == 0
    finally:
        go_on.set()
        for card in cards:
            card.resume()
    wait_until(lambda: figure(linked.b, "quarantined_bytes") == 0, LONG_S, "its room comes back")
    nothing_lent(linked.b)
