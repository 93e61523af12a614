"""Runs in a guest (`make test-rdma`): a master and two store nodes, in processes of their own as two hosts, and ranks with
their movers. Pages go from node to node over rxe devices."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from hicache_mooncake.client.embedded import node_answers
from hicache_mooncake.config import load_settings
from hicache_mooncake.testing.local import FakeRank, free_port, page_hash
from tests.conftest import environment, wait_until

NS = b"n" * 16
COUNT = 8
ALL = b"\x01" * COUNT
PAGE = 64 << 10
PATIENT_S = 300.0


class Cluster:
    """Node a speaks to its devices by one package and b by the other; `a` and `b` are ranks beside them."""

    BINDINGS: ClassVar = {"a": "ibverbs", "b": "pyverbs"}

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: list[FakeRank] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files = contextlib.ExitStack()

    def start(self) -> None:
        master = f"127.0.0.1:{free_port()}"
        self._start("master", "--listen", master, "--metrics", "")
        for name, binding in self.BINDINGS.items():
            self._start(
                "node", "--socket", self._socket(name), "--dram", "16MiB", "--listen", "127.0.0.1:0", "--name", name,
                "--host-id", name, "--master", master, "--metrics", "", "--transport", "verbs", "--verbs-binding", binding,
                "--replicate-after", "0",
            )  # fmt: skip
        for name in "ab":
            wait_until(lambda name=name: node_answers(self._socket(name)), PATIENT_S, f"node {name}")
        self.a, self.b = self._rank("a"), self._rank("b")
        wait_until(self._joined, PATIENT_S, "both nodes joined")

    def _start(self, command: str, *options: str) -> None:
        log = self._files.enter_context((self._folder / f"{command}{len(self._processes)}.log").open("wb"))
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "hicache_mooncake.cli", command, *options], stdout=log, stderr=log, env=environment()
            )
        )

    def _socket(self, name: str) -> str:
        return str(self._folder / f"{name}.sock")

    def _rank(self, name: str) -> FakeRank:
        given = {"socket": self._socket(name), "node": "external", "deadline_s": 7.5}
        self._ranks.append(FakeRank(load_settings({}, {}, given)[0], page_bytes=PAGE))
        return self._ranks[-1]

    def _joined(self) -> bool:
        reports = [rank.client.status() for rank in (self.a, self.b)]
        return all(report and sum(node.state == "active" for node in report.cluster) == 2 for report in reports)

    def stored(self, writer: FakeRank, reader: FakeRank, *names: object) -> list[bytes]:
        """New pages of the writer's node that the reader finds."""
        pages = [page_hash(name) for name in names]
        wait_until(lambda: writer.store(NS, pages).ok == ALL, PATIENT_S, "stored")
        wait_until(lambda: reader.exists(NS, pages) == len(pages), PATIENT_S, "found")
        return pages

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._files.close()
        for log in sorted(self._folder.glob("*.log")):  # shown when the test failed
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")


def report(rank: FakeRank) -> dict[str, int | float | str | bool]:
    """Of its node."""
    found = rank.client.status()
    return found.node if found else {}


def loads(rank: FakeRank, pages: list[bytes], over_link: bool) -> bool:
    """Whether all pages came, and by RDMA or not as is said. `FakeRank.load` compares the bytes."""
    before = int(report(rank).get("link_received_bytes", 0))
    outcome = rank.load(NS, pages)
    came = int(report(rank).get("link_received_bytes", 0)) - before
    return outcome.ok == ALL and came == (COUNT * PAGE if over_link else 0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(tmp_path)) as made:
        made.start()
        yield made


def set_links(up: bool) -> None:
    for interface in ("dummy0", "dummy1"):
        subprocess.run(["ip", "link", "set", interface, "up" if up else "down"], check=True)


def test_pages_cross_by_rdma_by_tcp_when_it_fails_and_by_rdma_again(cluster: Cluster) -> None:
    pages = cluster.stored(cluster.a, cluster.b, *range(COUNT))
    wait_until(lambda: loads(cluster.b, pages, over_link=True), PATIENT_S, "pages by RDMA")
    assert report(cluster.b)["transport"] == "verbs"
    assert report(cluster.b)["peer a"] == "verbs up"
    others = cluster.stored(cluster.b, cluster.a, *(f"other {n}" for n in range(COUNT)))
    wait_until(lambda: loads(cluster.a, others, over_link=True), PATIENT_S, "pages by RDMA the other way")

    set_links(False)
    try:
        wait_until(lambda: loads(cluster.b, pages, over_link=False), PATIENT_S, "pages by tcp, without RDMA")
    finally:
        set_links(True)
    wait_until(lambda: loads(cluster.b, pages, over_link=True), PATIENT_S, "pages by RDMA again")
    for rank in (cluster.a, cluster.b):
        wait_until(lambda rank=rank: report(rank)["landing_bytes"] == 0, PATIENT_S, "the room that was lent has gone back")
