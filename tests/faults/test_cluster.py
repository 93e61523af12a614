"""Real masters, nodes and movers under load, and what becomes of the load when one of them dies, stops or comes back."""

from __future__ import annotations

import os
import signal
import time

import pytest

from hicache_mooncake.testing.local import page_hash
from tests.conftest import wait_until
from tests.faults.cluster import HANG_S, NS, Cluster, Load, paused
from tests.faults.recording import Measured

BEFORE_S = 2.0


@pytest.mark.fault(
    "kill -9 of a node under load",
    sees="misses for its pages; all others are served; its engine is served again when it is back",
    part="host",
)
def test_a_node_killed_under_load(healthy: Cluster, measured: Measured) -> None:
    c = healthy
    with Load(c, seed=1) as load:
        load.settled()
        began = time.monotonic()
        time.sleep(BEFORE_S)
        died = time.monotonic()
        c.nodes["c"].kill()
        time.sleep(BEFORE_S)
        load.goes_on("a", "b", remote=True)
        back = time.monotonic()
        c.nodes["c"].start()
        c.whole()
        load.settled()
    for who in ("a", "b"):
        measured("p99 of loads before", load.record.p99("load", began, died, who))
        measured("p99 of loads while it is dead", load.record.p99("load", died, back, who))
        measured("longest call of the others", load.record.longest(who=who, since=died))
        measured("longest time without a loaded page at the others", load.record.gap(died, back, who, remote=False))
    reasons = load.record.reasons(died)
    assert reasons["checksum"] == reasons["checksum_remote"] == 0, reasons


@pytest.mark.fault(
    "SIGSTOP of a node for less than its ttl, and SIGCONT",
    sees="misses for its pages, at most one deadline a rank; it returns with everything",
    part="host",
)
def test_a_node_stopped_for_a_moment(healthy: Cluster, measured: Measured) -> None:
    _stop_and_go(healthy, 1.0, measured, seed=2)


@pytest.mark.fault(
    "SIGSTOP of a node for longer than its ttl, and SIGCONT",
    sees="misses for its pages, which lookups stop to name after the ttl; it returns with everything, as the same node",
    part="host",
)
def test_a_node_stopped_for_longer_than_its_ttl(healthy: Cluster, measured: Measured) -> None:
    states = _stop_and_go(healthy, 4.0, measured, seed=3)
    assert "suspected" in states


def _stop_and_go(c: Cluster, seconds: float, measured: Measured, seed: int) -> set[str]:
    incarnation = c.report("c")["incarnation"]
    states: set[str] = set()
    chain = [page_hash((seed, at)) for at in range(8)]
    assert c.ranks["c"].put(NS, chain).ok == b"\1" * 8
    with Load(c, seed=seed) as load:
        load.settled()
        stopped = time.monotonic()
        with paused(c.nodes["c"]):
            until = stopped + seconds
            while time.monotonic() < until:
                states.add(c.states("a").get("c", ""))
                time.sleep(0.1)
        went_on = time.monotonic()
        c.whole()
        measured("until it is active again", time.monotonic() - went_on)
        load.settled()
    assert c.report("c")["incarnation"] == incarnation
    wait_until(lambda: c.ranks["a"].take(NS, chain)[0].ok == b"\1" * 8, HANG_S, "what it had is read from it again")
    for who in ("a", "b"):
        measured("longest call of the others", load.record.longest(who=who, since=stopped))
    return states


@pytest.mark.fault(
    "a node is restarted under its old name, empty",
    sees="misses for what it had; nobody is given its old pages' place",
    part="host",
)
def test_a_new_life_under_an_old_name(healthy: Cluster, measured: Measured) -> None:
    c = healthy
    with Load(c, seed=4) as load:
        load.settled()
        wait_until(lambda: len(load.known("c")) > 3, HANG_S, "it has stored some")
        old = load.known("c")
        load.forget("c")
        c.nodes["c"].kill()
        c.nodes["c"].start()
        began = time.monotonic()
        c.whole()
        measured("until it is active again", time.monotonic() - began)
        measured_from = time.monotonic()
        hashes = [each for _, _, chain in old for each in chain]
        wait_until(
            lambda: not any(c.ranks["a"].exists(NS, [each]) for each in hashes),
            HANG_S,
            "the masters name none of its old pages",
        )
        measured("until lookups name none of its old pages", time.monotonic() - measured_from)


@pytest.mark.fault("kill -9 of one of two masters under load", sees="nothing: lookups go on with the other one", part="masters")
def test_one_of_two_masters_killed(healthy: Cluster, measured: Measured) -> None:
    c = healthy
    for name in ("m1", "m2"):
        with Load(c, seed=5 if name == "m1" else 6) as load:
            load.settled()
            died = time.monotonic()
            c.masters[name].kill()
            time.sleep(BEFORE_S)
            load.settled()
            after = time.monotonic()
        for who in c.ranks:
            measured("longest time without a page of another host", load.record.gap(died, after, who))
        c.heal()


@pytest.mark.fault(
    "SIGSTOP of one of two masters under load, and SIGCONT",
    sees="nothing but a lookup or two that take some hundred milliseconds longer",
    part="masters",
)
def test_one_of_two_masters_stopped(healthy: Cluster, measured: Measured) -> None:
    c = healthy
    with Load(c, seed=7) as load:
        load.settled()
        stopped = time.monotonic()
        with paused(c.masters["m1"]):
            time.sleep(BEFORE_S)
            load.settled()
            after = time.monotonic()
        c.whole()
        load.settled()
    for who in c.ranks:
        measured("longest time without a page of another host", load.record.gap(stopped, after, who))
        measured("longest lookup", load.record.longest("exists", who, stopped, after))


@pytest.mark.fault(
    "all masters are killed, and start again empty",
    sees="pages of other hosts are misses (`master_down`); the host's own pages are served",
    part="masters",
)
def test_the_masters_die_and_come_back_empty(healthy: Cluster, measured: Measured) -> None:
    c = healthy
    with Load(c, seed=8) as load:
        load.settled()
        down = sum(rank.client.reasons["master_down"] for rank in c.ranks.values())
        died = time.monotonic()
        for master in c.masters.values():
            master.kill()
        time.sleep(BEFORE_S)
        load.goes_on(*c.ranks, remote=False)
        back = time.monotonic()
        for master in c.masters.values():
            master.start(wait=False)
        for master in c.masters.values():
            master.wait_ready()
        up = time.monotonic()
        c.whole()
        load.settled()
        measured("from the masters' start until pages of other hosts are loaded again", time.monotonic() - up)
    for who in c.ranks:
        measured("longest call without masters", load.record.longest(who=who, since=died, until=back))
    assert sum(rank.client.reasons["master_down"] for rank in c.ranks.values()) > down


@pytest.mark.fault(
    "a mover is killed in the middle of the load, again and again",
    sees="misses for one batch each time (`mover_down`)",
    part="host",
)
def test_movers_killed_under_load(healthy: Cluster, measured: Measured) -> None:
    c = healthy
    with Load(c, seed=9) as load:
        load.settled()
        began = time.monotonic()
        killed = 0
        for turn in range(8):
            pid = c.ranks["a"].client.mover_pids()[("load", "store")[turn % 2]]
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            time.sleep(0.3)
        after = time.monotonic()
        load.settled()
        measured("longest time without a loaded page", load.record.gap(began, after, "a", remote=False))
    assert killed > 2
    _nothing_left(c)


@pytest.mark.fault(
    "SIGSTOP of a mover in the middle of the load",
    sees="misses for one batch after one deadline (`fenced`); nothing lands afterwards",
    part="host",
)
def test_movers_stopped_under_load(healthy: Cluster, measured: Measured) -> None:
    c = healthy
    with Load(c, seed=10) as load:
        load.settled()
        for role in ("load", "store"):
            pid = c.ranks["a"].client.mover_pids()[role]
            assert pid is not None
            began = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda role=role, pid=pid: c.ranks["a"].client.mover_pids()[role] not in (pid, None), HANG_S)  # type: ignore[misc]
            measured("until there is another one", time.monotonic() - began)
        load.settled()
    assert load.record.reasons()["fenced"] > 0
    _nothing_left(c)


def _nothing_left(c: Cluster) -> None:
    wait_until(lambda: all(c.report(name)["pinned_bytes"] == 0 for name in c.ranks), HANG_S, "no pin is left")
