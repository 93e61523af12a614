"""With nothing configured the first rank starts the node; however many start at once, there is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.testing.local import FakeRank, page_hash
from hicache_mooncake.wire import WireClosed, connect
from tests.conftest import environment, wait_until

NS = b"n" * 16


def node_pid(socket_path: str) -> int | None:
    try:
        wire = connect(socket_path, 2.0)
        wire.send(p.Hello(1, 1, "admin", "test"))
        wire.receive(p.decoder(p.FromNode), time.monotonic() + 5)
        wire.send(p.AdminStatus())
        report = wire.receive(p.decoder(p.FromNode), time.monotonic() + 5)
    except WireClosed:
        return None
    wire.close()
    assert isinstance(report, p.AdminReport)
    return int(report.node["pid"])


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """As an engine without configuration has them, with a place of its own and a small pool."""
    socket_path = str(tmp_path / "sub" / "node.sock")
    yield load_settings({"socket": socket_path, "node": "embedded", "dram": "32MiB"}, {})[0]
    pid = node_pid(socket_path)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: node_pid(socket_path) is None, 30)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


RANK = """
import sys, time
from hicache_mooncake.config import load_settings
from hicache_mooncake.testing.local import FakeRank, page_hash
from hicache_mooncake.client.client import PoolClient
settings = load_settings({{"socket": {socket!r}, "node": "embedded", "dram": "32MiB"}}, {{}})[0]
client = PoolClient(settings, "rank")
client.start()
client.close()
rank = FakeRank(settings)
names = [page_hash((sys.argv[1], i)) for i in range(4)]
ok = rank.store(b"n" * 16, names).ok == b"\\x01" * 4 and rank.load(b"n" * 16, names).ok == b"\\x01" * 4
report = rank.client.status()
rank.close()
print("ok" if ok else "failed", report.node["pid"] if report else None, flush=True)
"""


def test_eight_ranks_starting_at_once_make_one_node_that_outlives_them(settings: Settings) -> None:
    """P75."""
    program = RANK.format(socket=settings.socket)
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(n)], env=environment(), stdout=subprocess.PIPE, text=True)
        for n in range(8)
    ]
    answers = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert [answer[0] for answer in answers] == ["ok"] * 8
    pids = {answer[1] for answer in answers}
    assert len(pids) == 1
    assert str(node_pid(settings.socket)) in pids, "it is still there for the next engine"
    pid = node_pid(settings.socket)
    assert pid is not None
    assert parent_of(pid) not in {os.getpid(), *(rank.pid for rank in ranks)}, "SGLang ends every process below its own"
    late = FakeRank(settings)
    assert late.exists(NS, [page_hash(("3", i)) for i in range(4)]) == 4
    late.close()


def test_a_killed_embedded_node_is_started_again_without_the_engine(settings: Settings) -> None:
    rank = FakeRank(settings)
    rank.client.start()
    wait_until(lambda: rank.store(NS, [page_hash("a")]).ok == b"\x01", 30)
    pid = node_pid(settings.socket)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rank.exists(NS, [page_hash("a")]) == 0, 30)

    def healed() -> bool:
        rank.exists(NS, [page_hash("a")])
        return rank.store(NS, [page_hash("a")]).ok == b"\x01"

    wait_until(healed, 30)
    assert node_pid(settings.socket) != pid
    assert rank.load(NS, [page_hash("a")]).ok == b"\x01"
    rank.close()


def test_an_embedded_node_ends_when_no_engine_needs_it(tmp_path: Path) -> None:
    socket_path = str(tmp_path / "node.sock")
    command = [sys.executable, "-m", "hicache_mooncake.cli", "node", "--embedded", "--idle-exit-s", "1.0"]
    node = subprocess.Popen([*command, "--socket", socket_path, "--dram", "1MiB"], env=environment(), stderr=subprocess.DEVNULL)
    assert node.wait(30) == 0
    assert not os.path.exists(socket_path)


def test_a_place_that_cannot_be_written_is_no_l3_and_no_crash(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    settings = load_settings({"socket": str(blocker / "node.sock"), "node": "embedded", "dram": "1MiB"}, {})[0]
    rank = FakeRank(settings)
    rank.client.start()
    assert rank.store(NS, [page_hash("a")]).ok == b"\x00"
    assert rank.exists(NS, [page_hash("a")]) == 0
    rank.close()
