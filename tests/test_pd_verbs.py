"""KV from prefill to decode by RDMA, over devices that are not there: layer streams, and the engine that SGLang uses."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence

import pytest

from hicache_mooncake.messenger.actions import Limits
from hicache_mooncake.messenger.mooncake_engine import TransferEngine
from hicache_mooncake.messenger.options import P2P
from hicache_mooncake.testing.fake_verbs import FakeCard, FakeFabric, FakeHost
from hicache_mooncake.transfer import engine
from hicache_mooncake.transfer.transport import Transport, TransportOptions, open_transport
from hicache_mooncake.transfer.verbs.transport import VerbsTransport
from tests.messenger_ends import LAYERS, PAGES, End, layout_of, soon

PAGE_BYTES = 4096
LAYOUT = layout_of(PAGE_BYTES)
HALF = LAYERS // 2
LIMITS = Limits(silence_s=20, quiet_s=20)
"""A busy machine is no broken link."""


class Fabric:
    """A host with two cards for each engine, in the order in which they are made."""

    def __init__(self, fabric: FakeFabric) -> None:
        self.hosts = [fabric.host(name, ("mlx5_0", "mlx5_1")) for name in ("prefill", "decode")]
        self._left: Iterator[FakeHost] = iter(self.hosts)

    def opened(self, scheme: str, options: TransportOptions) -> Transport:
        return VerbsTransport(options, next(self._left).binding()) if scheme == "verbs" else open_transport(scheme, options)

    @property
    def cards(self) -> list[FakeCard]:
        return [card for host in self.hosts for card in host.cards.values()]

    def bytes(self) -> int:
        return sum(card.counts.bytes for card in self.cards)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    with FakeFabric() as made:
        fabric = Fabric(made)
        monkeypatch.setattr(engine, "open_transport", fabric.opened)
        yield fabric


def streamed(source: End, destination: End, request: str, broken: Sequence[FakeCard] = ()) -> None:
    """A whole session. These cards break when half of its layers are there."""
    stream = source.send(destination.engine.address, request)
    source.push(stream, range(HALF))
    there = destination.messenger.incoming(request, soon())
    there.wait_layer(HALF - 1, soon())
    for card in broken:
        card.break_queue_pairs()
    source.push(stream, range(HALF, LAYERS))
    stream.finish(4711, b"aux")
    result = there.result(soon())
    stream.wait(soon())
    assert (result.first_token, result.aux) == (4711, b"aux")
    assert destination.holds(request)
    destination.done_with(request)


def test_layers_are_streamed_by_rdma_and_all_bytes_arrive(fabric: Fabric) -> None:
    with End("prefill", ("verbs",), LAYOUT, LIMITS) as source, End("decode", ("verbs",), LAYOUT, LIMITS) as destination:
        destination.accept()
        before = fabric.bytes()
        streamed(source, destination, "r")
        assert fabric.bytes() >= before + LAYOUT.all_bytes * PAGES
        assert [peer.transport for peer in source.engine.peers] == ["verbs"]
        assert source.messenger.report()["resumed"] == 0


def test_a_card_of_two_that_fails_in_mid_stream_costs_nothing(fabric: Fabric) -> None:
    with End("prefill", ("verbs",), LAYOUT, LIMITS) as source, End("decode", ("verbs",), LAYOUT, LIMITS) as destination:
        destination.accept()
        streamed(source, destination, "r", broken=[host.cards["mlx5_0"] for host in fabric.hosts])
        assert source.messenger.report()["ended_ok"] == 1


def test_when_all_cards_fail_in_mid_stream_it_goes_on_by_tcp(fabric: Fabric) -> None:
    schemes = ("verbs", "tcp")
    with End("prefill", schemes, LAYOUT, LIMITS) as source, End("decode", schemes, LAYOUT, LIMITS) as destination:
        destination.accept()
        streamed(source, destination, "r", broken=fabric.cards)
        assert source.messenger.report()["resumed"] >= 1
        assert [peer.transport for peer in source.engine.peers] == ["tcp"]


def test_sglangs_engine_moves_kv_by_rdma_where_it_is_asked_for(fabric: Fabric) -> None:
    size = 3 << 20
    prefill, decode = TransferEngine(), TransferEngine()
    try:
        assert prefill.initialize("127.0.0.1", P2P, "rdma", "") == 0
        assert decode.initialize("127.0.0.1", P2P, "rdma", "") == 0
        mine, theirs = ctypes.create_string_buffer(os.urandom(size), size), ctypes.create_string_buffer(size)
        source, target = ctypes.addressof(mine), ctypes.addressof(theirs)
        assert prefill.register_memory(source, size) == 0
        assert decode.register_memory(target, size) == 0
        session = f"127.0.0.1:{decode.get_rpc_port()}"
        before = fabric.bytes()
        assert prefill.transfer_sync_write(session, source, target, size) == 0
        assert theirs.raw == mine.raw
        assert prefill.batch_transfer_sync_write(session, [source, source + 7], [target + 8, target], [3, 5]) == 0
        assert theirs.raw[:5] == mine.raw[7:12]
        assert theirs.raw[8:11] == mine.raw[:3]
        assert fabric.bytes() >= before + size + 8
    finally:
        prefill.close()
        decode.close()
