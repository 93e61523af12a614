"""The verbs transport keeps the contract of transports, over one and over two fake devices."""

from __future__ import annotations

import itertools

import msgspec

from hicache_mooncake.testing import TransportTests
from hicache_mooncake.testing.fake_verbs import FakeFabric
from hicache_mooncake.transfer.transport import Transport, TransportOptions
from hicache_mooncake.transfer.verbs.transport import VerbsTransport


class TestVerbs(TransportTests):
    scheme = "verbs"
    peers_in_processes = False
    transfers = 5000
    cards = ("mlx5_0",)

    def begin(self) -> None:
        super().begin()
        self._fabric = FakeFabric()
        self._names = itertools.count()

    def end(self) -> None:
        super().end()
        self._fabric.close()

    def make_transport(self, options: TransportOptions) -> Transport:
        host = self._fabric.host(f"host {next(self._names)}", self.cards)
        return VerbsTransport(options, host.binding())

    def spoil(self, token: bytes) -> bytes:
        start, length, devices = msgspec.msgpack.decode(token)
        wrong = {name: (step, [key ^ 0xFF0000 for key in keys]) for name, (step, keys) in devices.items()}
        return msgspec.msgpack.encode((start, length, wrong))


class TestVerbsOverTwoRails(TestVerbs):
    transfers = 1000
    cards = ("mlx5_0", "mlx5_1")
