"""Links between real nodes, by a transport that an installed package brings: here it is tcp, under another name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake.testing.local import FakeRank
from tests.conftest import START_S, MasterProcess, NodeProcess, wait_until
from tests.linked import ALL, COUNT, LONG_S, NS, PAGE, TCP, brought, names
from tests.test_pool_cluster import found_everywhere, is_joined, report_of

NAME = "brought"


class Hosts:
    def __init__(self, master: MasterProcess, nodes: list[NodeProcess]) -> None:
        self.master, self.nodes = master, nodes
        self.writer, self.reader = (FakeRank(node.settings(deadline_s=5.0), page_bytes=PAGE) for node in nodes)

    def link_up(self, pages: list[bytes]) -> None:
        def by_link() -> bool:
            before = int(report_of(self.reader)["link_received_bytes"])
            ok = self.reader.load(NS, pages).ok == b"\x01" * len(pages)
            return ok and int(report_of(self.reader)["link_received_bytes"]) > before

        wait_until(by_link, LONG_S, "pages by the link")


@pytest.fixture
def hosts(
    tmp_path: Path,
    start_master: Callable[[], MasterProcess],
    start_node: Callable[..., NodeProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Hosts]:
    monkeypatch.setenv("PYTHONPATH", brought(tmp_path, NAME, TCP), prepend=os.pathsep)
    master = start_master()
    options = ("--transport", NAME, "--replicate-after", "0")
    nodes = [start_node(name, "64MiB", (master.address,), (*options, "--host-id", name)) for name in ("a", "b")]
    made = Hosts(master, nodes)
    wait_until(lambda: is_joined(made.writer) and is_joined(made.reader), START_S, "both nodes joined")
    yield made
    made.writer.close()
    made.reader.close()


def test_pages_cross_by_the_link_and_a_frozen_holder_costs_a_call_and_no_room(hosts: Hosts) -> None:
    """It stops in mid-write as likely as not; whatever it still sends when it goes on lands nowhere."""
    pages = names(*range(COUNT))
    assert hosts.writer.store(NS, pages).ok == ALL
    found_everywhere(hosts.reader, pages, COUNT)
    hosts.link_up(pages)
    assert report_of(hosts.reader)["transport"] == NAME
    assert report_of(hosts.reader)["peer a"] == f"{NAME} up"
    hosts.nodes[0].signal(signal.SIGSTOP)
    assert hosts.reader.load(NS, pages).ok == bytes(COUNT)
    wait_until(lambda: report_of(hosts.reader)["landing_bytes"] == 0, LONG_S, "the room has gone back")
    assert report_of(hosts.reader)["used_bytes"] == 0
    hosts.nodes[0].signal(signal.SIGCONT)
    hosts.link_up(pages)
    assert report_of(hosts.reader)["quarantined_bytes"] == 0


def test_a_holder_killed_in_mid_load_is_misses_and_its_next_life_has_a_link(hosts: Hosts) -> None:
    pages = names(*range(COUNT))
    assert hosts.writer.store(NS, pages).ok == ALL
    found_everywhere(hosts.reader, pages, COUNT)
    hosts.link_up(pages)
    hosts.nodes[0].kill()
    assert hosts.reader.load(NS, pages).ok == bytes(COUNT)
    wait_until(lambda: report_of(hosts.reader)["links"] == 0, LONG_S, "the link is known to be gone")
    assert report_of(hosts.reader)["used_bytes"] == 0
    hosts.nodes[0].start()
    wait_until(lambda: hosts.reader.exists(NS, pages) == 0, LONG_S, "its new life holds nothing, and the master knows")
    wait_until(lambda: hosts.writer.store(NS, pages).ok == ALL, LONG_S, "stored")
    found_everywhere(hosts.reader, pages, COUNT)
    hosts.link_up(pages)
