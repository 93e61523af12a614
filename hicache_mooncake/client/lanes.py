"""How many tcp connections a large load uses to one node: as many as were seen to be faster. No I/O and no clock.

One connection is bound by what one flow gets from the network (a cloud's limit for each flow, one queue of a NIC, one path of a
fabric) and by one sending thread. How many help cannot be known ahead, so it is tried: now and then a few loads use one
lane more, which stays when they were clearly faster, or one less, which stays when they were not clearly slower. A try that
changed nothing is repeated ever more seldom.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from hicache_mooncake import protocol as p
from hicache_mooncake.config_values import MAX_LANES
from hicache_mooncake.transfer.peers import Address, address_of

LARGE_BYTES = 4 << 20
"""Smaller loads use one lane, and say nothing of a network."""
_LEAST_LANE_BYTES = 2 << 20
_SAMPLES = 3
"""Loads that one judgement is made from, by their median."""
_GAIN = 1.1
_LOSS = 0.95
_FIRST_PAUSE, _MAX_PAUSE = 4, 256
"""Loads between two tries."""
_MAX_PEERS = 1024


class _Peer:
    """What is known of one node."""

    def __init__(self) -> None:
        self.lanes = 1
        self.rates: deque[float] = deque(maxlen=_SAMPLES)
        """Bytes a second of the last loads with so many lanes."""
        self.trial = 0
        """Lanes that are being tried; 0: none."""
        self.tried: list[float] = []
        self.pause = _FIRST_PAUSE
        self.until_trial = _FIRST_PAUSE
        self.upwards = True


class Lanes:
    """Of one mover. `forced`: this number for every node, nothing is tried; 0: what was seen to be faster. Not thread-safe."""

    def __init__(self, forced: int = 0) -> None:
        self._forced = min(forced, MAX_LANES)
        self._peers: dict[Address, _Peer] = {}

    def of(self, peer: p.Peer, size: int) -> int:
        """How many lanes a load of `size` bytes from this node uses."""
        if size < LARGE_BYTES:
            return 1
        known = self._peers.get(address_of(peer))
        lanes = self._forced or (1 if known is None else known.trial or known.lanes)
        return min(lanes, size // _LEAST_LANE_BYTES)

    def loaded(self, peer: p.Peer, lanes: int, size: int, seconds: float) -> None:
        """`size` bytes came from this node, and from nobody else meanwhile, over connections that stood before."""
        if self._forced or size < LARGE_BYTES or seconds <= 0:
            return
        known = self._peers.pop(address_of(peer), None) or _Peer()
        self._peers[address_of(peer)] = known
        if len(self._peers) > _MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        rate = size / seconds
        if known.trial:
            if lanes == known.trial:
                known.tried.append(rate)
            if len(known.tried) >= _SAMPLES:
                self._judge(known)
        elif lanes == known.lanes:
            known.rates.append(rate)
            known.until_trial -= 1
            if known.until_trial <= 0 and len(known.rates) == _SAMPLES:
                self._try(known)

    def refused(self, peer: p.Peer) -> None:
        """A lane more could not be had: if one was tried, that is the end of it for a while."""
        known = self._peers.get(address_of(peer))
        if known is not None and known.trial > known.lanes:
            self._in_vain(known)

    def _try(self, known: _Peer) -> None:
        upwards = known.upwards if 1 < known.lanes < MAX_LANES else known.lanes == 1
        known.trial = known.lanes + (1 if upwards else -1)
        known.tried = []

    def _judge(self, known: _Peer) -> None:
        before, now = median(known.rates), median(known.tried)
        upwards = known.trial > known.lanes
        if now > before * (_GAIN if upwards else _LOSS):
            known.lanes = known.trial
            known.rates = deque(known.tried, _SAMPLES)
            known.pause = _FIRST_PAUSE
            known.upwards = upwards
            known.trial = 0
            known.until_trial = known.pause
        else:
            self._in_vain(known)

    @staticmethod
    def _in_vain(known: _Peer) -> None:
        known.pause = min(known.pause * 2, _MAX_PAUSE)
        known.upwards = known.trial < known.lanes
        known.trial = 0
        known.until_trial = known.pause
