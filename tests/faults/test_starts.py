"""Starts: everything at once, two of one name, and registrations so large that whatever waits behind them shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_mooncake.testing.local import page_hash
from tests.conftest import environment, wait_until
from tests.faults.cluster import HANG_S, NS, Cluster, Load
from tests.faults.recording import Measured

NewCluster = Callable[..., Cluster]


@pytest.mark.fault(
    "two masters, four nodes and eight engines start in the same moment",
    sees="misses until each part is there; then all is whole by itself",
    part="starts",
)
@pytest.mark.slow
def test_everything_starts_at_once(new_cluster: NewCluster, measured: Measured) -> None:
    """P75 P110."""
    cluster = new_cluster()
    began = time.monotonic()
    for name in ("m1", "m2"):
        cluster.master(name, wait=False)
    for name in ("a", "b", "c", "d"):
        cluster.node(name, "--replicate-after", "0", wait=False)
    ranks = [(node, f"{node}{number}") for node in cluster.nodes for number in (1, 2)]
    failed: list[BaseException] = []

    def start(node: str, name: str) -> None:
        try:
            rank = cluster.rank(node, name=name)
            rank.exists(NS, [page_hash("anything")])
            rank.put(NS, [page_hash((name, "first"))])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=start, args=pair) for pair in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failed
    cluster.whole()
    measured("until all are active", time.monotonic() - began)
    pages = {name: [page_hash((name, at)) for at in range(8)] for _, name in ranks}
    for _, name in ranks:
        wait_until(lambda name=name: cluster.ranks[name].put(NS, pages[name]).ok == b"\1" * 8, HANG_S)  # type: ignore[misc]
    for _, reader in ranks:
        for _, writer in ranks:
            wait_until(
                lambda reader=reader, writer=writer: cluster.ranks[reader].take(NS, pages[writer])[0].ok == b"\1" * 8,  # type: ignore[misc]
                HANG_S,
                f"{reader} reads what {writer} stored",
            )
    measured("until every engine has read every other's pages", time.monotonic() - began)


@pytest.mark.fault(
    "two nodes have one name",
    sees="a warning in the masters' log; pages of one of them are misses elsewhere, never another's bytes; whole "
    "when one has gone",
    part="starts",
)
def test_two_nodes_of_one_name(new_cluster: NewCluster, measured: Measured) -> None:
    cluster = new_cluster()
    master = cluster.master("m", "--heartbeat-s", "0.2", "--ttl-s", "1")
    cluster.node("a", "--replicate-after", "0")
    cluster.node("twin", "--name", "a", "--replicate-after", "0")
    cluster.node("b", "--replicate-after", "0")
    for name in ("a", "twin", "b"):
        cluster.rank(name)
    wait_until(lambda: cluster.states("b").get("b") == "active", HANG_S)
    with Load(cluster, store_pause_s=0.1) as load:
        time.sleep(4.0)
        assert "two nodes are called 'a'" in master.said()
        for name in ("a", "twin", "b"):
            own = [call for call in load.so_far() if call.who == name and call.op == "load" and call.whole]
            assert own, f"{name} is not served its own pages"
        cluster.nodes.pop("twin").kill()
        ended = time.monotonic()
        load.forget("twin")
        cluster.whole(by=("a", "b"))
        pages = [page_hash(("after", at)) for at in range(8)]
        wait_until(lambda: cluster.ranks["a"].put(NS, pages).ok == b"\1" * 8, HANG_S, "it stores")
        wait_until(lambda: cluster.ranks["b"].take(NS, pages)[0].ok == b"\1" * 8, HANG_S, "the one that is left is whole")
        measured("until the one that is left is whole", time.monotonic() - ended)


@pytest.mark.fault(
    "a node faults gigabytes of its segment in, and an engine registers gigabytes of host pool, with a ttl of a second",
    sees="nothing: heartbeats and lookups go on beside it",
    part="starts",
)
@pytest.mark.slow
def test_large_registrations_hold_up_no_heartbeat(new_cluster: NewCluster, measured: Measured) -> None:
    """P104."""
    cluster = new_cluster()
    cluster.master("m", "--heartbeat-s", "0.2", "--ttl-s", "1.5")
    cluster.node("a", "--replicate-after", "0")
    cluster.rank("a")
    seen: set[tuple[str, str]] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.update(cluster.states("a").items())
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with Load(cluster, ["a"], store_pause_s=0.1) as load:
            began = time.monotonic()
            large = cluster.node("large", dram="3GiB")
            registered: list[float] = []
            for _ in range(2):
                at = time.monotonic()
                cluster.batch = 16_384  # 2 GiB of host pool
                cluster.rank("large", name=f"large{len(registered)}").close()
                cluster.ranks.popitem()
                registered.append(time.monotonic() - at)
            cluster.batch = 8
            wait_until(lambda: _resident(large.pid) > 3 << 30, 60, "its segment is there")
            measured("a registration of 2 GiB of host pool", max(registered))
            measured("until a segment of 3 GiB is faulted in", time.monotonic() - began)
            wait_until(lambda: ("large", "active") in seen, HANG_S)
            time.sleep(2.0)
    finally:
        done.set()
        watcher.join()
    assert not any(state == "suspected" for _, state in seen), seen
    measured("longest lookup beside it", load.record.longest("exists"))


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


WRITER = """
import sys, time
from pathlib import Path
from hicache_mooncake.config import load_settings
from tests.faults.cluster import NS, CheckedRank
from hicache_mooncake.testing.local import page_hash
rank = CheckedRank(load_settings({}, {}, {"socket": sys.argv[1], "node": "external"})[0], batch=64)
pages = [page_hash(("shared", at)) for at in range(64)]
print("ready", flush=True)
while True:
    rank.put(NS, pages)
    rank.client.clear(NS)
"""


@pytest.mark.fault(
    "an engine is killed in the middle of a store, again and again, and another one writes the same keys",
    sees="nothing: the keys can be written at once, no half page is found, no memory stays reserved",
    part="starts",
)
def test_a_dead_writers_keys_are_written_by_the_next(new_cluster: NewCluster) -> None:
    """P132."""
    cluster = new_cluster(batch=64)
    cluster.node("a", dram="32MiB")
    rank = cluster.rank("a")
    pages = [page_hash(("shared", at)) for at in range(64)]
    for turn in range(5):
        command = [sys.executable, "-c", WRITER, str(cluster.folder / "a.sock")]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.05 + 0.037 * turn)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            outcome, wrong = rank.take(NS, pages)
            assert not wrong
            wait_until(lambda: rank.put(NS, pages).ok == b"\1" * 64, HANG_S, "its keys can be written")
            outcome, wrong = rank.take(NS, pages)
            assert (outcome.ok, wrong) == (b"\1" * 64, 0)
        rank.client.clear(NS)
        wait_until(lambda: cluster.report("a")["used_bytes"] == 0, HANG_S, "no memory is kept")
