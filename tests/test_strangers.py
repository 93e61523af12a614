"""A real master and real nodes with a key, and somebody without: nothing is listed, read, given, cleared or joined."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.cli.status import Unreachable, ask_master, ask_node
from hicache_mooncake.security import ClusterKey
from hicache_mooncake.testing.local import FakeRank, free_port, page_hash
from hicache_mooncake.transfer import tcp
from tests.conftest import START_S, NodeProcess, environment, wait_until
from tests.test_security import client, raw, refusal, soon, turned_away

NAMESPACE = b"n" * 16
HASHES = [page_hash(number) for number in range(4)]
FROM_DATA: msgspec.msgpack.Decoder[p.Message] = p.decoder(p.FromData)


@dataclass
class Cluster:
    key: ClusterKey
    key_file: str
    master: str
    a: NodeProcess
    b: NodeProcess

    def nodes(self) -> dict[str, p.NodeInfo]:
        """Those that are active, as the master says to a member."""
        with contextlib.suppress(Unreachable):
            report = ask_master(self.master, key=self.key)
            return {node.node: node for node in report.nodes if node.state == "active"}
        return {}

    def data_port(self, name: str) -> p.Peer:
        node = self.nodes()[name]
        return p.Peer(name, b"", node.host, node.port)


@pytest.fixture
def cluster(tmp_path: Path, start_node: Callable[..., NodeProcess]) -> Iterator[Cluster]:
    key, path, address = ClusterKey.generate(), tmp_path / "pool.key", f"127.0.0.1:{free_port()}"
    key.save(str(path))
    command = [sys.executable, "-m", "hicache_mooncake.cli", "master", "--listen", address, "--key-file", str(path)]
    with (tmp_path / "master.log").open("wb") as log:
        master = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    try:
        nodes = [start_node(name, "64MiB", (address,), ("--key-file", str(path))) for name in ("a", "b")]
        made = Cluster(key, str(path), address, *nodes)
        wait_until(lambda: set(made.nodes()) == {"a", "b"}, START_S, "both nodes joined")
        yield made
    finally:
        master.kill()
        master.wait()


@contextlib.contextmanager
def rank(node: NodeProcess) -> Iterator[FakeRank]:
    made = FakeRank(node.settings())
    try:
        yield made
    finally:
        made.close()


def test_members_share_pages_and_their_engines_need_no_key(cluster: Cluster) -> None:
    with rank(cluster.a) as writer, rank(cluster.b) as reader:
        assert list(writer.store(NAMESPACE, HASHES).ok) == [1] * 4
        wait_until(lambda: reader.exists(NAMESPACE, HASHES) == 4, 20, "the directory heard of the pages")
        outcome = reader.load(NAMESPACE, HASHES)
        assert list(outcome.ok) == [1] * 4


def test_a_stranger_gets_nothing_from_a_master_with_another_key_or_none(cluster: Cluster) -> None:
    messages = [
        p.ClusterStatus(),
        p.Lookup(1, [p.Question(NAMESPACE, b"".join(HASHES), False)]),
        p.ClearNamespace(NAMESPACE),
        p.Join(1, 2, "a", b"x" * 16, "127.0.0.1", 1, 1 << 30, 0),
        p.Join(1, 2, "stranger", b"y" * 16, "127.0.0.1", 1, 1 << 30, 0),
        p.Leave("b", b"z" * 16),
    ]
    with rank(cluster.a) as writer:
        writer.store(NAMESPACE, HASHES)
        for key in (None, ClusterKey.generate()):
            for message in messages:
                with client(f"tcp://{cluster.master}", key) as (dealer, watch):
                    dealer.send(p.encode(message))
                    assert turned_away(watch)
                    assert not dealer.poll(0)
            with pytest.raises(Unreachable, match="turns us away"):
                ask_master(cluster.master, key=key)
        assert set(cluster.nodes()) == {"a", "b"}
        assert list(writer.load(NAMESPACE, HASHES).ok) == [1] * 4  # nothing was cleared


def test_a_stranger_on_a_nodes_data_port_is_refused_and_reads_and_leaves_nothing(cluster: Cluster) -> None:
    messages: list[p.Message] = [
        p.Fetch(p.PROTOCOL_MAX, "stranger", NAMESPACE, b"".join(HASHES), 64 << 10),
        p.Push(p.PROTOCOL_MAX, "stranger", NAMESPACE, b"", page_hash("planted"), 64, [0]),
        p.Prove(p.PROTOCOL_MAX, "stranger", b"n" * 32),
    ]
    with rank(cluster.a) as writer:
        writer.store(NAMESPACE, HASHES)
        port = cluster.data_port("a")
        for message in messages:
            sock = raw(port)
            tcp.send_message(sock, message)
            if isinstance(message, p.Prove):
                assert isinstance(tcp.receive_message(sock, FROM_DATA, soon()), p.Proof)
                tcp.send_message(sock, p.Proof(b"", bytes(32)))
            assert refusal(sock)
        after = ask_node(cluster.a.socket)[1].node
        assert after["objects"] == len(HASHES)
        assert after["remote_sent_bytes"] == 0
        assert writer.exists(NAMESPACE, [page_hash("planted")]) == 0


def test_a_node_with_another_key_joins_nothing_and_serves_its_own_host_all_the_same(
    cluster: Cluster, start_node: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    other = tmp_path / "other.key"
    ClusterKey.generate().save(str(other))
    node = start_node("c", "64MiB", (cluster.master,), ("--key-file", str(other)))
    with rank(cluster.a) as writer, rank(node) as alone:
        writer.store(NAMESPACE, HASHES)
        own = [page_hash("own")]
        assert list(alone.store(NAMESPACE, own).ok) == [1]
        assert list(alone.load(NAMESPACE, own).ok) == [1]
        assert alone.exists(NAMESPACE, HASHES) == 0
        assert set(cluster.nodes()) == {"a", "b"}


def test_a_node_or_master_that_others_could_reach_does_not_start_without_a_key(tmp_path: Path) -> None:
    for command in (
        ["node", "--socket", str(tmp_path / "n.sock"), "--dram", "16mb", "--listen", "0.0.0.0:0"],
        ["node", "--socket", str(tmp_path / "n.sock"), "--dram", "16mb", "--master", "192.0.2.1:50051"],
        ["master", "--listen", "0.0.0.0:0"],
        ["master"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "hicache_mooncake.cli", *command],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )
        assert done.returncode in (1, 2), command
        for words in ("hicache-mooncake keygen FILE", "--key-file", "--allow-unauthenticated"):
            assert words in done.stderr, command
        assert "Traceback" not in done.stderr
