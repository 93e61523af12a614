"""What machines run out of: disk, shared memory, memory, and clocks that agree."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake.client.client import Outcome
from hicache_mooncake.testing import local
from hicache_mooncake.testing.local import FakeRank, page_hash
from tests.conftest import NodeProcess, wait_until
from tests.faults.cluster import HANG_S, NS, Cluster, Load
from tests.faults.mounts import NoMounts, disk_that_freezes, fill, frozen, in_private_mounts, small_disk
from tests.faults.recording import Measured

NewCluster = Callable[..., Cluster]
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


def chain(name: object, pages: int = 8) -> list[bytes]:
    return [page_hash((name, at)) for at in range(pages)]


def serves(cluster: Cluster, rank: str, name: object) -> bool:
    """Does the rank get back what it stores now?"""
    pages = chain(name)
    stored = cluster.ranks[rank].put(NS, pages).ok
    outcome, wrong = cluster.ranks[rank].take(NS, pages)
    assert not wrong
    return stored == outcome.ok == b"\1" * len(pages)


def apart(work: Callable[[], None]) -> None:
    try:
        in_private_mounts(work)
    except NoMounts as error:
        pytest.skip(f"no mounts of its own here: {error}")


@pytest.mark.fault(
    "the disk with the node's folder has no room for one more file",
    sees="the node does not start, with one line that names the folder",
    part="machines",
)
def test_a_folder_on_a_disk_without_room_for_a_file_ends_the_start_in_one_line(tmp_path: Path) -> None:
    def work() -> None:
        with Cluster(tmp_path) as cluster:
            small_disk(tmp_path / "full", files=1)
            (tmp_path / "full" / "something").touch()
            node = cluster.node("a", "--socket", str(tmp_path / "full" / "a.sock"), wait=False)
            assert node.ended(60) != 0
            said = node.said()
            assert "No space left on device" in said
            assert str(tmp_path / "full") in said
            assert "Traceback" not in said
            cluster.nodes.clear()

    apart(work)


@pytest.mark.fault(
    "the disk with the node's folder and its log is full, before the start or while it runs",
    sees="nothing: it serves on, and logs again when there is room",
    part="machines",
)
def test_a_node_whose_disk_is_full_serves(tmp_path: Path) -> None:
    def work() -> None:
        disk = tmp_path / "small"
        small_disk(disk)
        with Cluster(disk) as cluster:
            ballast = fill(disk)
            cluster.node("a")
            cluster.rank("a")
            assert serves(cluster, "a", "before")
            ballast.unlink()
            cluster.ranks["a"].client.clear(NS)
            wait_until(lambda: "cleared" in cluster.nodes["a"].said(), HANG_S, "it logs when there is room")
            ballast = fill(disk)
            for turn in range(20):
                cluster.ranks["a"].client.clear(NS)
                assert serves(cluster, "a", turn)
            said = len(cluster.nodes["a"].said())
            ballast.unlink()
            cluster.ranks["a"].client.clear(NS)
            wait_until(lambda: len(cluster.nodes["a"].said()) > said, HANG_S, "it logs again")
            cluster.nodes["a"].kill()
            fill(disk)
            assert cluster.ranks["a"].exists(NS, chain(1)) == 0
            cluster.nodes["a"].start()
            wait_until(lambda: serves(cluster, "a", "after"), HANG_S, "a new life serves from the full disk")

    apart(work)


@pytest.mark.fault(
    "/dev/shm is full", sees="nothing: segments and host pools are memfds and take no room there", part="machines"
)
def test_a_full_dev_shm_matters_to_nobody(tmp_path: Path) -> None:
    def work() -> None:
        small_disk(Path("/dev/shm"))
        fill(Path("/dev/shm"))
        with Cluster(tmp_path) as cluster:
            cluster.master("m")
            for name in ("a", "b"):
                cluster.node(name)
                cluster.rank(name)
            cluster.whole()
            assert serves(cluster, "a", "full")
            pages = chain("full")
            wait_until(lambda: cluster.ranks["b"].take(NS, pages)[0].ok == b"\1" * 8, HANG_S, "read from the other node")

    apart(work)


@pytest.mark.fault(
    "the segment cannot be mapped: the node's address space is limited (RLIMIT_AS)",
    sees="the node does not start, with one line that names the limit",
    part="machines",
)
def test_a_segment_beyond_the_nodes_limit_ends_the_start_in_one_line(new_cluster: NewCluster) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("needs the command prlimit")
    node = new_cluster().node("a", dram="8GiB", prefix=("prlimit", f"--as={4 << 30}"), wait=False)
    assert node.ended(60) != 0
    said = node.said()
    assert "ulimit -v" in said
    assert "Traceback" not in said


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[tuple[str, ...]]:
    """What a command is started under to have this memory and no more (cgroup v1)."""
    group = MEMORY_CGROUP / f"hm{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield (sys.executable, "-c", ENTER, str(group / "cgroup.procs"))
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), HANG_S)
        group.rmdir()


ENTER = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"


@pytest.mark.fault(
    "the container has less memory than the node's segment: the kernel kills the node",
    sees="misses (`node_down`); its engine goes on",
    part="machines",
)
def test_a_node_killed_for_want_of_memory(new_cluster: NewCluster, measured: Measured) -> None:
    cluster = new_cluster()
    with memory_limit(192 << 20) as prefix:
        node = cluster.node("a", dram="1GiB", prefix=prefix, wait=False)
        rank = cluster.rank("a")
        wait_until(lambda: not node.alive, HANG_S, "the kernel ends it")
        assert node.ended() == -signal.SIGKILL
        for turn in range(5):
            began = time.monotonic()
            assert rank.put(NS, chain(turn)).ok == bytes(8)
            assert rank.take(NS, chain(turn))[0].ok == bytes(8)
            measured("a store and a load without the node", time.monotonic() - began)
        cluster.nodes.clear()
    cluster.node("a", dram="64MiB")
    wait_until(lambda: serves(cluster, "a", "again"), HANG_S, "with a segment that fits, the same engine is served")


@pytest.mark.fault(
    "clocks that are days and years apart on masters and nodes (time namespaces)",
    sees="nothing: every clock is only compared with itself",
    part="machines",
)
@pytest.mark.slow
def test_clocks_that_do_not_agree(new_cluster: NewCluster) -> None:
    cluster = new_cluster()

    def clock(days: int) -> tuple[str, ...]:
        return ("unshare", "-T", "--monotonic", str(days * 86_400), "--boottime", str(days * 86_400))

    if os.geteuid() or os.spawnvp(os.P_WAIT, "unshare", [*clock(1), "true"]):
        pytest.skip("no time namespaces here")
    for name, days in (("m1", 400), ("m2", 0)):
        cluster.master(name, "--heartbeat-s", "0.5", "--ttl-s", "2", prefix=clock(days))
    for name, days in (("a", 0), ("b", 7), ("c", 4000)):
        cluster.node(name, "--replicate-after", "0", prefix=clock(days), wait=False)
    for name in ("a", "b", "c"):
        cluster.nodes[name].wait_ready()
        cluster.rank(name)
    cluster.whole()
    with Load(cluster) as load:
        load.settled()
        time.sleep(4.0)  # longer than the ttl
        for name in ("a", "b", "c"):
            assert set(cluster.states(name).values()) == {"active"}
        cluster.masters["m2"].kill()
        load.settled()
        cluster.nodes["b"].kill()
        cluster.nodes["b"].start()
        cluster.whole()
        load.settled()
    reasons = load.record.reasons()
    assert not set(reasons) & {"deadline", "fenced", "checksum", "checksum_remote"}, reasons


@pytest.mark.fault(
    "a mover that cannot be killed, since the kernel waits for a device in the middle of a copy",
    sees="misses after one deadline (`fenced`), and nothing lands when the device answers; then all is as before",
    part="machines",
)
def test_a_mover_that_cannot_be_killed_costs_a_call_its_deadline(
    tmp_path: Path, start_node: Callable[..., NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call waited for its end: as long as the device did not answer."""
    node = start_node("a", "64MiB")
    pages = chain("a")

    def work() -> None:
        disk_that_freezes(tmp_path / "disk", tmp_path / "image", size_bytes=32 << 20)
        fd = os.open(tmp_path / "disk" / "memory", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 1 << 20)
        monkeypatch.setattr(local, "create_memfd", lambda _name, _length: fd)
        with contextlib.closing(FakeRank(node.settings(deadline_s=2.0))) as rank:
            assert rank.store(NS, pages).ok == b"\1" * len(pages)
            assert rank.load(NS, pages).ok == b"\1" * len(pages)
            rank.scramble()
            before = bytes(rank.memory.view)
            pid = rank.client.mover_pids()["load"]
            assert pid is not None
            with frozen(tmp_path / "disk"):
                outcomes: list[Outcome] = []
                call = threading.Thread(target=lambda: outcomes.append(rank.transfer("load", NS, pages)), daemon=True)
                call.start()
                wait_until(lambda: outcomes, HANG_S, "the call returns")
                assert outcomes[0].reasons == {"fenced": len(pages)}
                assert state(pid) == "D", "it is still there"
                assert set(rank.transfer("load", NS, pages).reasons) <= {"fenced", "mover_down"}
            wait_until(lambda: state(pid) in ("Z", ""), HANG_S, "it ends")
            assert bytes(rank.memory.view) == before
            wait_until(lambda: rank.load(NS, pages).ok == b"\1" * len(pages), HANG_S, "a new mover")

    apart(work)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
