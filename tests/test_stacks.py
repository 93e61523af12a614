"""A daemon that stands still says where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import environment

HUNG = """
import sys, time
from hicache_mooncake.config import load_settings
from hicache_mooncake.node.service import Node
from hicache_mooncake.stacks import StackDump

node = Node(load_settings({}, {}, {"socket": sys.argv[1], "dram": "4MiB", "node": "embedded"})[0])
node.alive = StackDump(float(sys.argv[2])).alive
node.start()
time.sleep(1.5)
print("before", file=sys.stderr, flush=True)

def hold_the_lock():
    with node.lock:
        time.sleep(6)

hold_the_lock()
node.stop()
"""


def stderr_of_a_node_whose_lock_is_held(folder: Path, still_s: float) -> tuple[str, str]:
    """Before, and since the lock is held."""
    command = [sys.executable, "-c", HUNG, str(folder / "n.sock"), str(still_s)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    before, _, since = done.stderr.partition("before\n")
    return before, since


def test_a_node_whose_lock_is_never_given_back_says_who_holds_it(tmp_path: Path) -> None:
    before, since = stderr_of_a_node_whose_lock_is_held(tmp_path, 3.0)
    assert "most recent call first" not in before, "it was well"
    assert "hold_the_lock" in since
    assert "_housekeeping" in since, "who waits for it is there too"


def test_a_node_that_stood_still_for_less_says_nothing(tmp_path: Path) -> None:
    assert "most recent call first" not in "".join(stderr_of_a_node_whose_lock_is_held(tmp_path, 30.0))
