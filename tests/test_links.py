"""Pages between nodes over links: written by their holder into the reader's segment, checked, and never into room that is used
for something else."""

from __future__ import annotations

from collections.abc import Callable

from hicache_mooncake.transfer.tcp_transport import TcpTransport
from hicache_mooncake.transfer.transport import TransportOptions
from tests.conftest import wait_until
from tests.linked import LONG_S, NS, PAGE, Pair, pair

__all__ = ["pair"]


def by_tcp(_scheme: str, options: TransportOptions) -> TcpTransport:
    return TcpTransport(options)


def test_pages_come_over_a_link_once_it_stands(pair: Callable[..., Pair]) -> None:
    both = pair(by_tcp)
    writer, reader = both.rank(both.a), both.rank(both.b)
    pages = both.stored(writer, reader, *range(8))
    both.link_up(reader, pages)
    before = int(both.b.report()["link_received_bytes"])
    outcome = reader.load(NS, pages)
    assert outcome.ok == b"\x01" * 8, outcome.reasons
    assert outcome.remote_bytes == 8 * PAGE
    assert int(both.b.report()["link_received_bytes"]) == before + 8 * PAGE
    wait_until(lambda: both.b.report()["landing_bytes"] == 0, LONG_S, "the room has gone back")
    both.b.store.validate()
