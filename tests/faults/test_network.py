"""Masters, nodes and engines on hosts of their own, with a key, and a network between them that loses, delays and divides."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake.testing.local import page_hash
from tests.conftest import environment, wait_until
from tests.faults.cluster import HANG_S, NS, Cluster, Load
from tests.faults.network import Host, Network, NoNetwork
from tests.faults.recording import Measured

LASTS_S = 4.0
"""Longer than the ttl of the masters here."""


class Site:
    """Masters on hosts m1 and m2, and hosts a, b, c with a node and an engine each."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.network = network
        self.hosts: dict[str, Host] = {name: network.host(name) for name in ("m1", "m2", "a", "b", "c")}
        self.cluster = Cluster(folder)
        try:
            self._start(folder)
        except BaseException:
            self.cluster.close()
            raise

    def _start(self, folder: Path) -> None:
        key = str(folder / "key")
        command = [sys.executable, "-m", "hicache_mooncake.cli", "keygen", key]
        subprocess.run(command, env=environment(), check=True, capture_output=True)
        for name in ("m1", "m2"):
            host = self.hosts[name]
            options = ("--key-file", key, "--heartbeat-s", "0.5", "--ttl-s", "2")
            self.cluster.master(name, *options, host=host.address, prefix=host.prefix)
        for name in ("a", "b", "c"):
            host = self.hosts[name]
            options = ("--key-file", key, "--host-id", name, "--replicate-after", "0")
            self.cluster.node(name, *options, prefix=host.prefix, listen=f"{host.address}:0", wait=False)
        for name in ("a", "b", "c"):
            self.cluster.nodes[name].wait_ready()
            self.cluster.rank(name, run=self.hosts[name].run)
        self.cluster.whole()

    @property
    def run(self) -> dict[str, Callable[[Callable[[], None]], None]]:
        return {name: host.run for name, host in self.hosts.items()}

    def load(self, seed: int) -> Load:
        return Load(self.cluster, seed=seed, run=self.run, store_pause_s=0.2, pause_s=0.03)

    def reads(self, who: str, chain: list[bytes]) -> bool:
        """Does the rank on this host load all of the chain now?"""
        got: list[bytes] = []
        self.hosts[who].run(lambda: got.append(self.cluster.ranks[who].take(NS, chain)[0].ok))
        return got == [b"\1" * len(chain)]

    def publish(self, who: str, name: object) -> list[bytes]:
        """A chain on this host, known to all others."""
        chain = [page_hash((name, at)) for at in range(8)]
        wait_until(lambda: self.cluster.ranks[who].put(NS, chain).ok == b"\1" * 8, HANG_S, f"{who} stores")
        for other in self.cluster.ranks:
            wait_until(lambda other=other: self.reads(other, chain), HANG_S, f"{other} reads it")  # type: ignore[misc]
        return chain


@pytest.fixture(scope="module")
def one_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        network = Network()
    except NoNetwork as error:
        pytest.skip(f"no network namespaces here: {error}")
    with network:
        made = Site(tmp_path_factory.mktemp("site"), network)
        yield made
        made.cluster.close()


@pytest.fixture
def site(one_site: Site) -> Iterator[Site]:
    """Whatever a test did to the network is over afterwards, and the masters start anew: they remember for a minute who was
    sick, and leave it out for longer each time."""
    yield one_site
    one_site.network.heal()
    for master in one_site.cluster.masters.values():
        master.kill()
    one_site.cluster.heal()


@pytest.mark.fault(
    "the network to a host is gone (blackholed peer), under load, and comes back",
    sees="misses for its pages after at most one deadline a rank, all other pages are served; its own engine is served its "
    "own pages; all is whole when it is back",
    part="network",
)
def test_a_host_disappears(site: Site, measured: Measured) -> None:
    chain = site.publish("a", "before the cut")
    with site.load(1) as load:
        load.settled()
        began = time.monotonic()
        time.sleep(2.0)
        cut = time.monotonic()
        site.hosts["a"].disconnect()
        time.sleep(LASTS_S)
        load.goes_on("b", "c")
        load.goes_on("a", remote=False)
        back = time.monotonic()
        site.hosts["a"].connect()
        wait_until(lambda: site.reads("b", chain) and site.reads("c", chain), 60, "its pages are read again")
        measured("until its pages are read again", time.monotonic() - back)
    site.cluster.whole()
    for who in ("b", "c"):
        measured("p99 of loads before", load.record.p99("load", began, cut, who))
        measured("p99 of loads meanwhile", load.record.p99("load", cut + 2.5, back, who))
        measured("longest time without a loaded page at the others", load.record.gap(cut, back, who, remote=False))


@pytest.mark.fault(
    "one-way partition: what a host sends to one other is lost, though both reach the master",
    sees="misses for its pages at that one host; every other host reads them as ever",
    part="network",
)
def test_a_host_is_not_heard_by_one_other(site: Site, measured: Measured) -> None:
    chain = site.publish("a", "before the one-way partition")
    a, b = site.hosts["a"], site.hosts["b"]
    with site.load(2) as load:
        load.settled()
        cut = time.monotonic()
        a.mute_towards(b)
        time.sleep(LASTS_S)
        load.goes_on("a", "b", "c")
        after = time.monotonic()
        wait_until(lambda: site.reads("c", chain), HANG_S, "the third one reads its pages")
        assert not site.reads("b", chain)
        a.reaches(b)
        wait_until(lambda: site.reads("b", chain), 60, "its pages are read again")
        measured("until its pages are read again", time.monotonic() - after)
    measured("longest time without a page of another host at the third", load.record.gap(cut, after, "c"))
    measured("longest time without a loaded page at the deaf one", load.record.gap(cut, after, "b", remote=False))


@pytest.mark.fault(
    "a host sends at 4 Mbit/s, under load",
    sees="of its pages those that arrive within the deadline; other pages as ever",
    part="network",
)
def test_a_slow_host(site: Site, measured: Measured) -> None:
    chain = site.publish("a", "before the slowness")
    with site.load(4) as load:
        load.settled()
        slow = time.monotonic()
        site.hosts["a"].throttle("4mbit")
        time.sleep(LASTS_S)
        load.goes_on("a", "b", "c")
        after = time.monotonic()
        site.hosts["a"].throttle("")
        wait_until(lambda: site.reads("b", chain) and site.reads("c", chain), 60, "its pages are read again")
    for who in ("b", "c"):
        measured("longest time without a loaded page at the others", load.record.gap(slow, after, who, remote=False))


@pytest.mark.fault(
    "all masters are cut off from all hosts, under load, and come back",
    sees="pages of other hosts are misses, the own ones are served; whole again without a restart",
    part="network",
)
def test_the_masters_are_cut_off(site: Site, measured: Measured) -> None:
    chain = site.publish("a", "before the masters were cut off")
    with site.load(5) as load:
        load.settled()
        cut = time.monotonic()
        for name in ("m1", "m2"):
            site.hosts[name].disconnect()
        time.sleep(LASTS_S)
        load.goes_on("a", "b", "c", remote=False)
        back = time.monotonic()
        for name in ("m1", "m2"):
            site.hosts[name].connect()
        wait_until(lambda: site.reads("b", chain) and site.reads("c", chain), 60, "pages of others are read again")
        measured("until pages of other hosts are read again", time.monotonic() - back)
    site.cluster.whole()
    for who in ("a", "b", "c"):
        measured("longest call meanwhile", load.record.longest(who=who, since=cut, until=back))


@pytest.mark.fault(
    "the cluster is split in two under load, with a master and nodes on either side, and joined again",
    sees="each side goes on with its own pages; those of the other side are misses; whole when it is joined again",
    part="network",
)
def test_a_cluster_in_two_halves(site: Site, measured: Measured) -> None:
    chain = site.publish("a", "before the split")
    other = site.publish("b", "on the other side")
    with site.load(6) as load:
        load.settled()
        cut = time.monotonic()
        for name in ("m1", "a"):
            site.hosts[name].connect(1)
        time.sleep(LASTS_S)
        load.goes_on("a", remote=False)
        load.goes_on("b", "c", remote=True)
        wait_until(lambda: site.reads("c", other), HANG_S, "the halves go on among themselves")
        assert not site.reads("b", chain)
        assert not site.reads("a", other)
        joined = time.monotonic()
        for name in ("m1", "a"):
            site.hosts[name].connect()
        wait_until(lambda: site.reads("b", chain) and site.reads("a", other), 60, "either side reads what the other has")
        measured("until either side reads what the other has", time.monotonic() - joined)
        load.settled()
    for who in ("a", "b", "c"):
        measured("longest call meanwhile", load.record.longest(who=who, since=cut, until=joined))


@pytest.mark.fault(
    "a node lives and sends heartbeats, and nobody can read from it",
    sees="the master takes it out of rotation as `sick` after reports of two readers: lookups name its pages no more, "
    "and again when it can be read from",
    part="network",
)
def test_a_node_that_nobody_can_read_from_is_sick(site: Site, measured: Measured) -> None:
    chain = site.publish("a", "before the sickness")
    a, b, c = (site.hosts[name] for name in ("a", "b", "c"))
    with site.load(3) as load:
        load.settled()
        began = time.monotonic()
        a.mute_towards(b, c)
        try:
            wait_until(lambda: site.cluster.states("b").get("a") == "sick", 30, "the master says that it is sick")
            measured("until it is out of rotation", time.monotonic() - began)
            assert site.cluster.ranks["b"].exists(NS, chain) == 0
        finally:
            a.reaches(b, c)
        healed = time.monotonic()
        wait_until(lambda: site.reads("b", chain) and site.reads("c", chain), 90, "its pages are read again")
        measured("until its pages are read again", time.monotonic() - healed)
