"""The transport through shared memory keeps the contract of transports."""

from __future__ import annotations

from hicache_mooncake.testing import TransportTests
from hicache_mooncake.transfer.transport import Piece


class TestShm(TransportTests):
    scheme = "shm"
    closes_on_stopped_peers = False

    def test_a_peer_that_stops_costs_no_more_than_the_deadline(self) -> None:
        """It costs nothing: its memory is mapped here."""
        peer = self.process_peer(1 << 20)
        mine = self.memory(1 << 20)
        peer.near.transport.register(mine.address, mine.length, mine.fd)
        peer.near.move("read", [Piece(mine.address, peer.remote, 1)])
        peer.stop()
        peer.near.move("read", [Piece(mine.address, peer.remote, 1 << 20)])
        assert mine.bytes() == peer.memory.bytes()
