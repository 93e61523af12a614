"""/health is not green while nothing moves, and says what is wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from hicache_mooncake import protocol as p
from hicache_mooncake.config import load_settings
from hicache_mooncake.config_values import split_address
from hicache_mooncake.node import core, data_server, rank_server, service
from hicache_mooncake.node.service import Node
from hicache_mooncake.testing.local import free_port, page_hash
from hicache_mooncake.transfer import tcp
from hicache_mooncake.wire import WireClosed, connect
from tests.conftest import wait_until

StartNode = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartNode]:
    started: list[Node] = []

    def start(**settings: object) -> Node:
        options = {"socket": str(tmp_path / "n.sock"), "dram": "4MiB", "node": "embedded", "metrics": "127.0.0.1:0"}
        started.append(Node(load_settings({}, {}, options | settings)[0]))
        started[-1].start()
        return started[-1]

    yield start
    for node in started:
        node.stop()


def health(node: Node) -> tuple[int, str, str]:
    """Status of HTTP and of the answer, and its problems."""
    try:
        with urllib.request.urlopen(f"http://{node.metrics_address}/health", timeout=10) as answer:
            code, said = answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        code, said = error.code, json.load(error)
    return code, said["status"], "; ".join(said["problems"])


def metric(node: Node, name: str) -> float:
    with urllib.request.urlopen(f"http://{node.metrics_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"hicache_node_{name} ")).split()[1])


def test_a_node_that_works_says_so(start: StartNode) -> None:
    node = start()
    assert health(node) == (200, "ok", "")
    assert metric(node, "degraded") == 0


def test_a_writer_that_hangs_shows_until_it_is_gone(start: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "STUCK_S", 0.2)
    node = start()
    wire = connect(node.settings.socket, 5.0)
    wire.send(p.Hello(1, 2, "store", "hangs"))
    wire.receive(p.decoder(p.FromNode), time.monotonic() + 5)
    wire.send(p.Reserve(b"n" * 16, page_hash(1), 4096))
    assert isinstance(wire.receive(p.decoder(p.FromNode), time.monotonic() + 5), p.Reserved)
    wait_until(lambda: health(node)[1] == "degraded", 30)
    code, _, problems = health(node)
    assert code == 503
    assert "a writer has held room" in problems
    assert metric(node, "degraded") == 1
    wire.close()
    wait_until(lambda: health(node) == (200, "ok", ""), 30)


def test_a_lock_that_nobody_lets_go_of_shows(start: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HEALTH_LOCK_S", 0.1)
    node = start()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with node.lock:
            held.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    code, status, problems = health(node)
    done.set()
    holder.join()
    assert (code, status) == (503, "degraded")
    assert "lock" in problems
    wait_until(lambda: health(node) == (200, "ok", ""), 30)


def test_masters_that_are_away_degrade_a_node_that_goes_on_serving(start: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Well all the same: whoever starts such a node anew loses its pages."""
    monkeypatch.setattr(service, "_MASTERS_AWAY_S", 0.3)
    node = start(masters=f"127.0.0.1:{free_port()}")
    wait_until(lambda: health(node)[1] == "degraded", 30)
    code, _, problems = health(node)
    assert code == 200
    assert "no master has answered for" in problems
    assert metric(node, "degraded") == 1


def test_a_refusal_by_the_masters_shows_in_health_and_metric(start: StartNode) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def refuse() -> None:
        while not stop.is_set():
            if router.poll(50):
                sender, _ = router.recv_multipart()
                router.send_multipart([sender, p.encode(p.Refused("too old: install a newer release"))])

    master = threading.Thread(target=refuse)
    master.start()
    try:
        node = start(masters=f"127.0.0.1:{port}")
        wait_until(lambda: health(node)[1] == "degraded", 20)
        code, _, problems = health(node)
        assert code == 200
        assert "too old: install a newer release" in problems
        assert metric(node, "master_refused") == 1
    finally:
        stop.set()
        master.join()
        router.close(0)
        context.term()


def test_readers_and_clients_beyond_the_limit_are_turned_away_and_the_others_served(
    start: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "_MAX_READERS", 3)
    monkeypatch.setattr(rank_server, "_MAX_CONNECTIONS", 3)
    node = start(listen="127.0.0.1:0")
    host, port = split_address(node.data_address)
    peer = p.Peer(node.name, node.incarnation, host, port)
    readers = [tcp.PeerConnection(peer, time.monotonic() + 5) for _ in range(5)]
    wires = [connect(node.settings.socket, 5.0) for _ in range(5)]
    served = 0
    for reader in readers:
        with contextlib.suppress(OSError):
            reader.request(p.Fetch(2, "x", b"n" * 16, page_hash(1), 4096), time.monotonic() + 5)
            served += reader.reply(time.monotonic() + 5).status == bytes([p.MISS])
    welcomed = 0
    for wire in wires:
        with contextlib.suppress(WireClosed):
            wire.send(p.Hello(1, 2, "query", "x"))
            welcomed += isinstance(wire.receive(p.decoder(p.FromNode), time.monotonic() + 5), p.Welcome)
    assert (served, welcomed) == (3, 3)
    report = node.report()
    assert (report["remote_refused_readers"], report["connections_refused"]) == (2, 2)
    for reader in readers:
        reader.close()
    for wire in wires:
        wire.close()
    wait_until(lambda: node.report()["remote_readers"] == 0, 30)
    tcp.PeerConnection(peer, time.monotonic() + 5).close()


def test_a_log_that_nobody_reads_holds_up_whoever_writes_to_it_and_nobody_else(start: StartNode) -> None:
    """What the core has to say under the node's lock is written without it."""
    node = start()
    free: list[bool] = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "could not read from node" in record.getMessage():
                free.append(node.lock.acquire(timeout=5))
                if free[-1]:
                    node.lock.release()

    handler = Slow()
    service.log.addHandler(handler)
    try:
        answer = node.handle(node.new_owner(), p.Release(0, peer_down=["b"]))
    finally:
        service.log.removeHandler(handler)
    assert answer is None
    assert free == [True]
