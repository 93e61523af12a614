"""Runs one command and outlives all that it started. As a script: `python -I guard.py FD GRACE_S COMMAND...`.

The guard leads a session of its own and is the subreaper of all its descendants, so none of them escapes it by forking or by
changing its session. FD is a pipe from the owner. When the owner closes it or dies, in whatever way, or when the guard gets
SIGTERM or SIGINT, the guard ends the command with SIGTERM, waits GRACE_S, kills every descendant that is left, and exits with
the command's own exit code (128 + n after signal n). A byte from the owner: `k` kills at once, `d` lets the command outlive
the owner.

Standard library only and no import of this package: it starts in some 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def descendants(root: int) -> list[int]:
    """Every live (not zombie) process below `root`, from /proc."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        children.setdefault(int(parent), []).append((int(name), state not in (b"Z", b"X")))
    found: list[int] = []
    pending = [root]
    while pending:
        for pid, live in children.get(pending.pop(), []):
            pending.append(pid)
            if live:
                found.append(pid)
    return found


class Guard:
    def __init__(self, owner: int, grace_s: float, command: list[str]) -> None:
        self.owner: int | None = owner
        self.grace_s = grace_s
        self.command = command
        self.stop = False
        self.code: int | None = None
        self.child = 0

    def run(self) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.set_inheritable(self.owner or 0, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        guard = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            # If the guard itself is killed, the command goes too. The check closes the gap before prctl.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(1)
            try:
                os.execvp(self.command[0], self.command)
            except OSError as error:
                os.write(2, f"cannot run {self.command[0]}: {error}\n".encode())
                os._exit(127)
        kill = False
        while self.code is None and not self.stop and not kill:
            kill = self._hear_owner()
            self._reap()
        if self.code is None and not kill:
            os.kill(self.child, signal.SIGTERM)
            deadline = time.monotonic() + self.grace_s
            while self.code is None and not kill and time.monotonic() < deadline:
                kill = self._hear_owner()
                self._reap()
        # Orphans become our children, so having none is the proof; a look at /proc can miss one whose parent dies meanwhile.
        while self._reap():
            for pid in descendants(guard):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        return self.code if self.code is not None else 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def _hear_owner(self) -> bool:
        """Wait a moment; True when the owner wants an immediate kill."""
        if self.owner is None:
            time.sleep(_POLL_S)
            return False
        if not select.select([self.owner], [], [], _POLL_S)[0]:
            return False
        word = os.read(self.owner, 1)
        if word == b"k":
            return True
        os.close(self.owner)
        self.owner = None
        self.stop = word != b"d"
        return False

    def _reap(self) -> bool:
        """Collect who has ended; False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(Guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]).run())
