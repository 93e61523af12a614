"""The engine's handle on one mover: start it, give it a batch, and fence it by killing it when time is up."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Backoff
from hicache_mooncake.client import child
from hicache_mooncake.wire import Soon, Wire, WireClosed, WireTimeout

log = logging.getLogger(__name__)

_from_mover = p.decoder(p.FromMover)
START_S = 60.0
"""For the first start, while the engine starts too, and all of its ranks load their weights."""
_RESTART_S = 15.0
_RESTART_FIRST_S, _RESTART_MAX_S = 0.1, 5.0
_FENCE_S = 5.0
_STORE_FENCE_S = 0.1
_MAX_ENDING = 4
_PF_EXITING = 0x4
_PROC = Path("/proc")
_FILLS = {
    "x86_64": (0, 17, 19, 45, 47, 299, 310, 311, 426),
    "aarch64": (63, 65, 67, 207, 212, 243, 270, 271, 426),
}.get(os.uname().machine)
"""System calls that fill memory which the caller names: read and its like, recv and its like, process_vm_readv and _writev,
io_uring_enter. Not preadv: by that a mover reads the cold tier only, into memory of its own, and a disk may hang for ever.
Unknown: all are taken for such."""


class MoverUnavailable(Exception):
    """No batch could be run; `reason` is the miss reason to count."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class MoverProcess:
    """One mover (role `load` or `store`). Thread-safe: batches queue on a lock, each within its own deadline."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.mode = ""
        self._placed = ""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Wire | None = None
        self._soon = Soon()
        self._attach: tuple[p.Attach, tuple[int, ...]] | None = None
        self._restart = Backoff(_RESTART_FIRST_S, _RESTART_MAX_S)
        self._ending: list[subprocess.Popen[bytes]] = []
        """Killed, and not known to be gone."""
        self._last_id = 0
        self._starting = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def attach(self, attach: p.Attach, fds: Sequence[int], timeout_s: float = START_S) -> str:
        """Have a mover over this memory, and over no other; returns the mode in use. One that runs takes it over between two
        batches. Raises MoverUnavailable with what went wrong. The descriptors stay the caller's and must stay open: a killed
        mover is started again with them."""
        with self._lock:
            self._attach = (attach, tuple(fds))
            deadline = time.monotonic() + timeout_s
            if self._wire is not None:
                try:
                    return self._share(self._wire, deadline)
                except MoverUnavailable:
                    pass  # a new one says what is wrong with the memory, if that was it
            self._stop()
            return self._start(deadline)

    def run(self, job: Callable[[float], p.Transfer], timeout_s: float) -> p.Transferred:
        """Run one batch. Returns within `timeout_s`, and then nothing more lands in engine memory.

        `job` gets the seconds left for the mover's own work. Raises MoverUnavailable.
        """
        deadline = time.monotonic() + timeout_s
        if self._starting and self._wire is None:
            raise MoverUnavailable("mover_down", "the mover is being started")
        if not self._lock.acquire(timeout=timeout_s * 0.5):
            raise MoverUnavailable("busy", f"the {self.role} mover was busy for {timeout_s * 0.5:.1f} s")
        try:
            if self._wire is None:
                if self._attach is None:
                    raise MoverUnavailable("not_attached", "no memory is attached")
                self._start_beside_calls()
                raise MoverUnavailable("mover_down", "the mover is being started")
            wire = self._wire
            # The mover stops by itself first, then the rank stops waiting and kills it; both inside the deadline.
            left = deadline - time.monotonic()
            self._last_id += 1
            try:
                batch = job(left * 0.7)
                batch.id = self._last_id
                wire.send(batch, deadline=deadline - left * 0.1)
                answer = wire.receive(_from_mover, deadline - left * 0.1, self._soon)
                if isinstance(answer, p.Transferred) and answer.id != batch.id:
                    raise p.ProtocolError(f"the answer is for batch {answer.id}, not {batch.id}")
            except WireTimeout as error:
                self._fail()
                self._start_beside_calls()
                raise MoverUnavailable("fenced", f"no answer from the {self.role} mover in {left * 0.9:.1f} s") from error
            except (WireClosed, p.ProtocolError) as error:
                self._fail()
                raise MoverUnavailable("mover_down", str(error)) from error
            except BaseException:
                self._fail()  # whatever it was: the answer is still to come, and the batch still to be fenced
                raise
            if not isinstance(answer, p.Transferred):
                raise MoverUnavailable("refused", answer.reason if isinstance(answer, p.Refused) else "unexpected answer")
            self._restart.succeeded()
            return answer
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the mover; returns when it is gone."""
        with self._lock:
            self._attach = None
            self._stop()

    def _start_beside_calls(self) -> None:
        """Start a mover that was killed on a thread of its own, with all the time that it needs on a busy host."""
        if self._starting or not self._restart.due():
            return
        self._starting = True

        def work() -> None:
            try:
                with self._lock, contextlib.suppress(MoverUnavailable):
                    if self._attach is not None and self._wire is None:
                        self._start(time.monotonic() + _RESTART_S)
            finally:
                self._starting = False

        try:
            threading.Thread(target=work, name=f"start-{self.role}-mover", daemon=True).start()
        except RuntimeError:  # no more threads: tried again by a later call
            self._starting = False
            self._restart.failed()

    # ------------------------------------------------------------------ inside, under the lock

    def _start(self, deadline: float) -> str:
        if self._attach is None:
            raise MoverUnavailable("not_attached", "no memory is attached")
        self._ending = [process for process in self._ending if process.poll() is None]
        if len(self._ending) >= _MAX_ENDING:
            self._restart.failed()
            what = (
                f"{_MAX_ENDING} movers that were killed have not ended: what they wait for in the kernel is in /proc/PID/wchan"
            )
            raise MoverUnavailable("mover_down", f"{what} of {', '.join(str(process.pid) for process in self._ending)}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "hicache_mooncake.client.mover", str(theirs.fileno()), self.role]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=child.environment(), cwd="/"
                )
        except OSError as error:
            ours.close()
            self._restart.failed()
            raise MoverUnavailable("mover_down", f"cannot start the mover: {error}") from error
        self._wire = Wire(ours)
        return self._share(self._wire, deadline)

    def _share(self, wire: Wire, deadline: float) -> str:
        """Hand the memory to the mover. One that does not take it is killed."""
        assert self._attach is not None
        try:
            wire.send(*self._attach, deadline)
            answer = wire.receive(_from_mover, deadline)
        except (WireClosed, WireTimeout, p.ProtocolError) as error:
            self._fail()
            raise MoverUnavailable("mover_down", f"the mover did not start: {error}") from error
        except BaseException:
            self._fail()
            raise
        if not isinstance(answer, p.Attached) or answer.problem:
            self._fail()
            raise MoverUnavailable("attach", answer.problem if isinstance(answer, p.Attached) else "unexpected answer")
        self.mode = answer.mode
        if answer.placed and answer.placed != self._placed:
            log.info("the %s mover is %s", self.role, answer.placed)
        self._placed = answer.placed
        return self.mode

    def _fail(self) -> None:
        self._stop()
        self._restart.failed()

    def _stop(self) -> None:
        """Kill and wait: when this returns the process cannot write engine memory any more. One for stores never does."""
        wire, self._wire = self._wire, None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _wait_until_it_cannot_write(process, _STORE_FENCE_S if self.role == "store" else None)
            if process.poll() is None:
                self._ending.append(process)
        if wire is not None:
            with contextlib.suppress(OSError):
                wire.close()


def _wait_until_it_cannot_write(process: subprocess.Popen[bytes], at_most_s: float | None) -> None:
    """After SIGKILL. What may take longer than that, a second and more for a large pool, or for ever where the kernel waits for
    a device, is the end of the process, and that is waited for on a thread of its own."""
    began = time.monotonic()
    complained = False
    while process.poll() is None and not _cannot_write(process.pid):
        time.sleep(0.0005)
        waited_s = time.monotonic() - began
        if at_most_s is not None and waited_s > at_most_s:
            break
        if not complained and waited_s > _FENCE_S:
            # Waiting on is the lesser evil to a wrong page: SGLang leaves the pages alone until the call has returned.
            log.error(
                "mover %d does not end after SIGKILL: waiting, since it could still write engine memory. What holds it is in "
                "/proc/%d/task/*/wchan, the cause perhaps in dmesg",
                process.pid,
                process.pid,
            )
            complained = True
    if process.poll() is None:
        with contextlib.suppress(RuntimeError):  # no more threads: the next process that is started reaps it
            threading.Thread(target=process.wait, name="reap-mover", daemon=True).start()


def _cannot_write(pid: int) -> bool:
    """A process that got SIGKILL, and has no task that can still write its memory: none runs another instruction of the program
    once it is in the kernel. One that has begun to exit (PF_EXITING) is there for good. One that sleeps there, if only for a
    device that never answers (state D), might go on with what a system call does, but not with what met a page fault."""
    try:
        tasks = os.listdir(_PROC / str(pid) / "task")
    except FileNotFoundError:
        return True
    return all(_task_cannot_write(_PROC / str(pid) / "task" / task) for task in tasks)


def _task_cannot_write(task: Path) -> bool:
    try:
        flags = int((task / "stat").read_text().rpartition(")")[2].split()[6])
    except (FileNotFoundError, ProcessLookupError):
        return True
    if flags & _PF_EXITING:
        return True
    try:
        call = (task / "syscall").read_text().split()[0]  # -1: it sleeps, and in none; or "running"
    except OSError:  # it has ended just now, or we may not look
        return False
    return call == "-1" or (call.isdecimal() and _FILLS is not None and int(call) not in _FILLS)
