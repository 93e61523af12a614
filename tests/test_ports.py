"""Ports: what is advertised is what was bound, however many start at once."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.cli.status import Unreachable, ask_master, find_masters
from hicache_mooncake.testing.local import page_hash
from hicache_mooncake.transfer import tcp
from tests.conftest import MasterProcess, NodeProcess, environment, wait_until
from tests.etcd import etcd_server, needs_etcd
from tests.test_security import soon

NODES = 6
PER_HOST, HOSTS = 14, 8


def who_listens(peer: p.Peer) -> str:
    """The name that the node at this address gives itself."""
    connection = tcp.PeerConnection(peer, soon())
    try:
        connection.request(p.Fetch(p.PROTOCOL_MAX, "test", b"n" * 16, page_hash("none"), 64), soon())
        return connection.reply(soon()).node
    finally:
        connection.close()


def test_many_that_let_the_system_choose_at_once_get_a_port_each_and_know_it() -> None:
    with ThreadPoolExecutor(PER_HOST) as pool:
        listeners = list(pool.map(lambda _: tcp.listen("127.0.0.1:0"), range(PER_HOST * HOSTS)))
    try:
        ports = {listener.getsockname()[1] for listener in listeners}
        assert len(ports) == PER_HOST * HOSTS
        assert 0 not in ports
    finally:
        for listener in listeners:
            listener.close()


def test_nodes_that_start_at_once_advertise_what_each_has_bound(
    start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]
) -> None:
    master = start_master()
    names = [f"node-{number}" for number in range(NODES)]
    with ThreadPoolExecutor(NODES) as pool:
        list(pool.map(lambda name: start_node(name, "1MiB", (master.address,)), names))

    def active() -> dict[str, p.NodeInfo]:
        return {node.node: node for node in ask_master(master.address).nodes if node.state == "active"}

    wait_until(lambda: len(active()) == NODES, 30, "all nodes joined")
    nodes = active()
    assert sorted(nodes) == sorted(names)
    assert len({node.port for node in nodes.values()}) == NODES
    for name, node in nodes.items():
        assert who_listens(p.Peer(name, b"", node.host, node.port)) == name


def test_a_host_to_advertise_comes_with_the_port_that_was_bound(
    start_master: Callable[[], MasterProcess], start_node: Callable[..., NodeProcess]
) -> None:
    master = start_master()
    start_node("a", "1MiB", (master.address,), ("--listen", "127.0.0.1:0", "--advertise", "localhost"))
    wait_until(lambda: ask_master(master.address).nodes, 20, "the node joined")
    (node,) = ask_master(master.address).nodes
    assert node.host == "localhost"
    assert who_listens(p.Peer("a", b"", "127.0.0.1", node.port)) == "a"


@pytest.mark.parametrize("command", ["node", "master"])
def test_a_port_that_is_taken_ends_the_start_and_is_named(tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        more = ["--socket", str(tmp_path / "n.sock"), "--dram", "1MiB"] if command == "node" else []
        started = [sys.executable, "-m", "hicache_mooncake.cli", command, "--listen", address, *more]
        done = subprocess.run(started, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 1
    assert address in done.stderr
    assert "Traceback" not in done.stderr


@needs_etcd
def test_masters_that_start_at_once_are_found_where_each_has_bound(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as etcd:
        options = ["--listen", "127.0.0.1:0", "--etcd", f"http://{etcd.address}", "--cluster", "prod"]
        command = [sys.executable, "-m", "hicache_mooncake.cli", "master", *options]
        logs = [tmp_path / f"master-{number}.log" for number in range(3)]
        masters = []
        try:
            for log in logs:
                with log.open("wb") as output:
                    masters.append(subprocess.Popen(command, env=environment(), stdout=output, stderr=output))

            def found() -> list[str]:
                try:
                    return find_masters([f"etcd://{etcd.address}/prod"])
                except Unreachable:
                    return []

            wait_until(lambda: len(found()) == len(masters), 30, "all masters registered")
            incarnations = {ask_master(address).master for address in found()}
            assert len(incarnations) == len(masters)
            said = "".join(log.read_text() for log in logs)
            assert all(f"address={address} " in said for address in found())
        finally:
            for master in masters:
                master.terminate()
            for master in masters:
                master.wait(15)
        assert found() == []  # they took their entries with them
