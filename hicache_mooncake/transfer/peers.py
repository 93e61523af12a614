"""A reader's connections to other nodes' data ports, and when to leave a node alone."""

from __future__ import annotations

import socket

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Backoff
from hicache_mooncake.transfer.tcp import PeerConnection

_BREAKER_FIRST_S, _BREAKER_MAX_S = 0.5, 8.0
_MAX_BREAKERS = 256


class Peers:
    """Connections to other nodes' data ports, one each, and a breaker each: a dead peer costs one connect, then nothing."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], PeerConnection] = {}
        self._retry: dict[tuple[str, int], Backoff] = {}

    def get(self, peer: p.Peer, deadline: float) -> tuple[PeerConnection, bool] | None:
        """(connection, is it reused), or None while its breaker is open. Raises OSError when it cannot be reached."""
        key = (peer.host, peer.port)
        connection = self._open.get(key)
        if connection is not None:
            return connection, True
        if key in self._retry and not self._retry[key].due():
            return None
        connection = self._open[key] = PeerConnection(peer, deadline)
        return connection, False

    def split(self, wanted: list[tuple[p.Peer, list[int]]]) -> tuple[list[tuple[p.Peer, list[int]]], ...]:
        """(those that we are connected to, the others)"""
        here = [entry for entry in wanted if (entry[0].host, entry[0].port) in self._open]
        return here, [entry for entry in wanted if entry not in here]

    def failed(self, peer: p.Peer) -> None:
        """Close, and leave it alone for a while."""
        self.drop(peer)
        if len(self._retry) >= _MAX_BREAKERS:
            self._retry.pop(next(iter(self._retry)))
        self._retry.setdefault((peer.host, peer.port), Backoff(_BREAKER_FIRST_S, _BREAKER_MAX_S)).failed()

    def drop(self, peer: p.Peer) -> None:
        """Close without blame: the connection was old, or we stopped in mid-body."""
        connection = self._open.pop((peer.host, peer.port), None)
        if connection is not None:
            connection.close()

    def works(self, peer: p.Peer) -> None:
        self._retry.pop((peer.host, peer.port), None)


def peer_closed(sock: socket.socket) -> bool:
    """Between requests nothing may arrive: readable means closed, or out of step."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
