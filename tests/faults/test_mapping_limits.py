"""P113 for shared memory: what limits a mapping is named, with the command that raises it; what limits only locked memory does
not matter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import NodeProcess, environment

BIG = """
import resource, sys
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
fd = create_memfd("big", 1 << 33)
"""

CASES = {
    "address space": (
        BIG
        + "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))\n"
        + "Mapping(fd, 1 << 33, writable=True)",
        ["mapping 8589934592 bytes", "address space is 4294967296 bytes", "ulimit -v unlimited", "LimitAS=infinity"],
    ),
    "mappings": (
        BIG
        + """
most = int(open("/proc/sys/vm/max_map_count").read())
if most > 300_000:
    print("skip")
    sys.exit()
try:
    while True:
        Mapping(fd, 4096, offset=0, writable=True)
        Mapping(fd, 4096, offset=8192, writable=False)
except OSError as error:
    sys.exit(str(error))
""",
        ["vm.max_map_count", "sysctl -w vm.max_map_count="],
    ),
    "locked memory": (
        BIG
        + "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))\n"
        + "m = Mapping(fd, 1 << 33, writable=True)\nm.populate(1 << 20)\nm.view[0] = 1\nprint('mapped')",
        [],
    ),
}


@pytest.mark.parametrize("limit", CASES)
def test_a_mapping_that_fails_names_its_limit(limit: str) -> None:
    code, said = CASES[limit]
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=100)
    if "skip" in done.stdout:
        pytest.skip("this kernel allows too many mappings to run into the limit")
    assert (done.returncode == 0) == (not said), done.stderr
    assert "mapped" in done.stdout or said
    for part in said:
        assert part in done.stderr


ENGINE = """
import logging, resource, sys
logging.basicConfig(level=logging.WARNING)
from hicache_mooncake.config import load_settings
from hicache_mooncake.client.mover_process import MoverUnavailable
from hicache_mooncake.testing.local import FakeRank, page_hash
explicit = {"socket": sys.argv[1], "node": "external", "copy_mode": sys.argv[2]}
settings = load_settings({}, {}, explicit)[0]
pages = int(sys.argv[3])

import hicache_mooncake.testing.local as local
share = local.PoolClient.share
def share_with_a_limit(self, geometry):
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[4]), before[1]))
    try:
        return share(self, geometry)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
local.PoolClient.share = share_with_a_limit
try:
    rank = FakeRank(settings, pages=pages, page_bytes=1 << 20)
except MoverUnavailable as error:
    print("refused:", error)
    sys.exit()
print("mode:", rank.mode, rank.client.mode_reason)
outcome = rank.store(b"n" * 16, [page_hash(i) for i in range(4)])
print("stored:", outcome.ok.count(1), outcome.reasons)
rank.close()
"""


def engine(node: NodeProcess, mode: str, pages: int, limit: int) -> tuple[str, str]:
    command = [sys.executable, "-c", ENGINE, node.socket, mode, str(pages), str(limit)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_an_engine_whose_movers_cannot_map_its_pool_is_told_why(start_node: Callable[..., NodeProcess]) -> None:
    node = start_node()
    out, _ = engine(node, "memfd", 8192, 4 << 30)
    assert "refused:" in out
    assert "ulimit -v unlimited" in out
    out, err = engine(node, "auto", 8192, 4 << 30)
    assert "mode: segment" in out, "another way is used where one works"
    assert "stored: 4" in out
    assert "ulimit -v unlimited" in err


def test_a_mover_that_cannot_map_the_segment_says_so_and_counts_it(start_node: Callable[..., NodeProcess]) -> None:
    node = start_node(dram="8GiB")
    out, err = engine(node, "memfd", 64, 4 << 30)
    assert "stored: 0 {'segment_map': 4}" in out
    assert "segment cannot be mapped" in err
    assert "ulimit -v unlimited" in err
