"""Clusters of real processes for the tests of faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two masters, nodes a, b and c with a rank each, shared by the tests of a file. Remote pages stay remote."""
    with Cluster(tmp_path_factory.mktemp("city")) as cluster:
        for name in ("m1", "m2"):
            cluster.master(name, "--heartbeat-s", "0.5", "--ttl-s", "2")
        for name in ("a", "b", "c"):
            cluster.node(name, "--replicate-after", "0", "--drain-s", "3", wait=False)
        for daemon in cluster.nodes.values():
            daemon.wait_ready()
        for name in cluster.nodes:
            cluster.rank(name, deadline_s=2.0)
        cluster.whole()
        yield cluster


@pytest.fixture
def healthy(city: Cluster) -> Iterator[Cluster]:
    """The same, whole before the test and after it: what a test did must heal."""
    city.heal()
    yield city
    city.heal()


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Clusters of a test's own; closed after it."""
    made: list[Cluster] = []

    def make(**options: int) -> Cluster:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Cluster(folder, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
