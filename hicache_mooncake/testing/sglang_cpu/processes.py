"""A child process that leaves nothing behind, whatever happens to it or to us."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hicache_mooncake.testing.sglang_cpu import guard as _guard

GRACE_S = 15.0
"""How long a child may take to end after SIGTERM before everything below it is killed."""
KILL_WAIT_S = 10.0
LOG_TAIL_LINES = 30

Progress = Callable[[float], None]
"""Called several times a second with the seconds waited so far."""


class ProcessError(Exception):
    """A child could not be started, died too early, or could not be ended. `log` is its output, where there is any."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log
        if log is not None and (lines := tail(log)):
            self.add_note(f"{log}:\n{lines}")  # shown with a traceback, where the log itself may be gone by the time it is read


class ManagedProcess:
    """One command with everything it starts, its output in a log file.

    A guard process (see `guard.py`) holds the command: `stop()`, leaving the context, the end of this interpreter, a SIGKILL to
    it or to the guard, each ends the whole tree. Processes that daemonise or change their session are ended too. Not
    thread-safe, except that different objects may be used from different threads.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, grace_s: float = GRACE_S
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.env = dict(env) if env is not None else None
        self.grace_s = grace_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None

    @property
    def pid(self) -> int:
        """Process id of the guard, which is also its process group and session: `kill PID` ends the whole tree in order."""
        if self._guard is None:
            raise ProcessError(f"{self.name} was not started")
        return self._guard.pid

    @property
    def returncode(self) -> int | None:
        """The command's exit code, None while it runs or was never started; 128 + n after signal n."""
        return None if self._guard is None else self._guard.poll()

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Start the command. Output is appended to the log. Raises `ProcessError` when it runs already."""
        if self.running:
            raise ProcessError(f"{self.name} is already running as process {self.pid}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        theirs, ours = os.pipe()
        try:
            with self.log.open("ab") as output:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", _guard.__file__, str(theirs), str(self.grace_s), *self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self.env,
                    pass_fds=[theirs],
                    start_new_session=True,
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._pipe = ours
        _live.add(self)

    def stop(self) -> None:
        """SIGTERM, then after `grace_s` SIGKILL to all that is left. Does nothing when it is not running.

        Raises `ProcessError` when a process is left at the end.
        """
        self.begin_stop()
        self._finish(self.grace_s + KILL_WAIT_S)

    def begin_stop(self) -> None:
        """Ask for the end without waiting for it, so that several can end at once; `stop()` waits."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def kill(self) -> None:
        """SIGKILL to the command and to everything below it, now; like `kill -9`, it gets no chance to say goodbye."""
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, b"k")
        self._finish(KILL_WAIT_S)

    def detach(self) -> None:
        """Let the command outlive us. `kill PID` (see `pid`) is then the way to end it."""
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, b"d")
            self.begin_stop()
        _live.discard(self)

    def descendants(self) -> list[int]:
        """Live processes of the tree, the guard not among them."""
        return _guard.descendants(self._guard.pid) if self._guard is not None else []

    def start_until(self, ready: Callable[[], bool], *, timeout_s: float, poll_s: float = 0.25) -> None:
        """Start it and `wait_until`; stopped again where that fails."""
        self.start()
        try:
            self.wait_until(ready, timeout_s=timeout_s, poll_s=poll_s)
        except BaseException:
            self.stop()
            raise

    def wait_until(
        self, ready: Callable[[], bool], *, timeout_s: float, progress: Progress | None = None, poll_s: float = 0.25
    ) -> float:
        """Poll `ready` and return the seconds it took. Raises `ProcessError` when the command or the time ends first."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            if progress is not None:
                progress(waited)
            if ready():
                return waited
            self.check_running(waited, timeout_s)
            time.sleep(poll_s)

    def check_running(self, waited_s: float, timeout_s: float) -> None:
        """Raise `ProcessError` when the command has ended or has had its time; for those who wait for it to get ready."""
        if not self.running:
            raise ProcessError(f"{self.name} ended with exit code {self.returncode} after {waited_s:.0f} s", self.log)
        if waited_s > timeout_s:
            raise ProcessError(f"{self.name} was not ready after {timeout_s:.0f} s", self.log)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        return tail(self.log, lines)

    def _finish(self, timeout_s: float) -> None:
        if self._guard is None:
            return
        group = self._guard.pid
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            left = _guard.descendants(group)
            for pid in [*left, group]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(KILL_WAIT_S)
        self.begin_stop()
        _live.discard(self)
        if group_is_alive(group):
            raise ProcessError(
                f"{self.name}: processes of group {group} are left; end them with: kill -KILL -- -{group}", self.log
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


_live: weakref.WeakSet[ManagedProcess] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for process in list(_live):
        process.begin_stop()
    for process in list(_live):
        with contextlib.suppress(ProcessError):
            process.stop()


def stop_all(processes: Sequence[ManagedProcess]) -> None:
    """End several at once: they all get SIGTERM first. Every one is tried; the first `ProcessError` is raised at the end."""
    for process in processes:
        process.begin_stop()
    failed: list[ProcessError] = []
    for process in processes:
        try:
            process.stop()
        except ProcessError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def group_is_alive(group: int) -> bool:
    """Whether a process group has a member that is not a zombie."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
            return True
    return False


def tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a file, "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 400 * lines))
            return "\n".join(deque(file.read().decode(errors="replace").splitlines(), maxlen=lines))
    except OSError:
        return ""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now, and another one each time.

    Not one of those that the kernel gives to connections: a server takes minutes to come to its port, and such a one may be
    gone by then. Somebody else may take this one too.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, first if first > 12_000 else 1 << 16), 1_000):
        if port not in _given and _is_free(host, port):
            _given.add(port)
            return port
    raise ProcessError(f"none of a thousand ports of {host} is free")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


_given: set[int] = set()
