"""The transports over other projects' engines, run with the real ones where their wheels are installed."""

from __future__ import annotations

import os
import sys
import time

import pytest

from hicache_mooncake import TransferEngine
from hicache_mooncake.testing import TransportTests
from hicache_mooncake.transfer.transport import Piece, TransportError, TransportOptions, open_transport
from tests.linked import ALL, COUNT, NS, PAGE, Linked, MakePair, faults, figure, pair
from tests.memory_transport import Faults

__all__ = ["faults", "pair"]


def missing(scheme: str) -> str:
    try:
        open_transport(scheme, TransportOptions()).close()
    except TransportError as error:
        return str(error)
    return ""


MISSING = {scheme: missing(scheme) for scheme in ("mooncake", "nixl")}


class ForeignTests(TransportTests):
    """As far as an engine that recalls nothing can keep the contract."""

    transfers = 500
    closes_on_stopped_peers = False


if not MISSING["mooncake"]:

    class TestMooncake(ForeignTests):
        scheme = "mooncake"

        def test_a_peer_that_stops_costs_no_more_than_the_deadline(self) -> None:
            """And the link, since what is under way lands when the peer goes on: it cannot be recalled."""
            peer, mine, endless = self._reading()
            peer.stop()
            with pytest.raises(TransportError) as caught:
                peer.near.submit("read", [Piece(mine.address, peer.remote, mine.length)], 0.5).wait()
            assert caught.value.reason in ("deadline", "peer")
            endless.cancel()
            assert not peer.near.link.alive


if not MISSING["nixl"]:

    class TestNixl(ForeignTests):
        scheme = "nixl"

        @pytest.mark.skip(reason="NIXL keeps two descriptors for each agent that it has met")
        def test_links_that_are_closed_leave_nothing_behind(self) -> None: ...


@pytest.mark.parametrize("scheme", sorted(MISSING))
def test_two_transfer_engines_use_the_real_one(scheme: str) -> None:
    if MISSING[scheme]:
        pytest.skip(MISSING[scheme])
    deadline = time.monotonic() + 60.0
    with TransferEngine("one", transports=(scheme,)) as one, TransferEngine("other", transports=(scheme,)) as other:
        pages, content = one.allocate(1 << 20, name="pages")
        content[:] = os.urandom(1 << 20)
        room, landed = other.allocate(1 << 20)
        peer = other.connect(one.address, deadline)
        assert peer.transport == scheme
        peer.read([(room.address, pages.address, 1 << 20)], deadline).wait()
        assert landed == content
        landed[:3] = b"abc"
        peer.write([(room.address, pages.address + 7, 3)], deadline).wait()
        assert bytes(content[7:10]) == b"abc"


@pytest.mark.parametrize("scheme", sorted(MISSING))
def test_pages_between_nodes_come_over_the_real_one(pair: MakePair, faults: Faults, scheme: str) -> None:
    if MISSING[scheme]:
        pytest.skip(MISSING[scheme])
    linked = Linked(pair(lambda _scheme, options: open_transport(scheme, options), transport=scheme), faults)
    before = figure(linked.b, "link_received_bytes")
    outcome = linked.reader.load(NS, linked.pages)
    assert outcome.ok == ALL, outcome.reasons
    assert figure(linked.b, "link_received_bytes") == before + COUNT * PAGE


@pytest.mark.parametrize(
    ("scheme", "modules", "package"),
    [
        ("mooncake", ["mooncake", "mooncake.engine"], "mooncake-transfer-engine"),
        ("nixl", ["nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api", "nixl", "nixl._api"], "nixl-cu12"),
    ],
    ids=["mooncake", "nixl"],
)
def test_without_the_wheel_it_is_said_which_to_install(
    monkeypatch: pytest.MonkeyPatch, scheme: str, modules: list[str], package: str
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportError, match=f"pip install {package}") as caught:
        open_transport(scheme, TransportOptions())
    assert caught.value.reason == "unavailable"
