"""The contract of a transport (`hicache_mooncake.transfer.transport`) as tests that any transport can be run against."""

from __future__ import annotations

from hicache_mooncake.testing.transports.ending import EndingTests
from hicache_mooncake.testing.transports.harness import End, Memory, ProcessPeer, TransportHarness
from hicache_mooncake.testing.transports.moving import MovingTests

__all__ = ["End", "Memory", "ProcessPeer", "TransportHarness", "TransportTests"]


class TransportTests(MovingTests, EndingTests):
    """What users of a transport rely on, as pytest tests. Subclass it in a test module:

        from hicache_mooncake.testing import TransportTests

        class TestMyTransport(TransportTests):
            scheme = "mine"

    `scheme` is what `open_transport` takes, in this process and in the peer's. A transport that cannot be opened so overrides
    `make_transport(options)` and says `peers_in_processes = False`; one whose channels are special overrides
    `make_channels(transport, count, small=...)`, which by default makes TCP connections over loopback, and UNIX socket pairs
    for a transport that is `local_only`. What a transport cannot do, and `Transport.fences` does not say, is said by the other
    class attributes (see `TransportHarness`), each used sparingly: a pool is built on all of it.

    Promises: bytes are compared, on both sides, beside the pieces too; no assertion depends on how fast something is; whatever
    must not happen (bytes after a fence) is watched for `settle_s`. Needs pytest, hypothesis and Linux; no network, no device.

    A transport that deviates on purpose marks the test in its subclass.
    """
