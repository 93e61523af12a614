"""A daemon ends on the first signal, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.conftest import environment

OFTEN = """
import signal, time
from hicache_mooncake.ending import Ending
for _ in range(300):
    ending = Ending([signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)  # into every step of the wait
    until = time.monotonic() + 0.01
    while time.monotonic() < until:
        ending.wait(0.001)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert ending.wait(5)
    assert ending.by == signal.SIGALRM
print("ended")
"""

ONCE = """
from hicache_mooncake.ending import Ending
ending = Ending()
assert not ending.wait(0.01)
print("waits", flush=True)
while not ending.wait(60):
    pass
print(ending.by.name)
"""


def test_a_signal_in_any_moment_of_the_wait_ends_it() -> None:
    """A handler that takes a lock which the main thread holds while it waits never comes back: the daemon ignores SIGTERM."""
    done = subprocess.run(
        [sys.executable, "-c", OFTEN], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ended\n", done.stderr


def test_it_says_which_signal_it_was() -> None:
    with subprocess.Popen([sys.executable, "-c", ONCE], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[0] == "SIGINT\n"
