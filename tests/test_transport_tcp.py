"""The tcp transport keeps the contract of transports."""

from __future__ import annotations

from hicache_mooncake.testing import TransportTests


class TestTcp(TransportTests):
    scheme = "tcp"
