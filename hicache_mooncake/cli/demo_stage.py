"""What the demos have in common: a stage on which processes are started and shown, and that is empty again at the end."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from hicache_mooncake.testing.sglang_cpu.pool import MasterProcess, NodeProcess
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, ProcessError, stop_all, tail
from hicache_mooncake.testing.sglang_cpu.servers import Answer, SglangServer, start_servers
from hicache_mooncake.testing.sglang_cpu.tiny_model import make_tiny_model

QUIET_REPORT_S = 15.0


class Stage:
    """Starts processes and says so. Every process goes to `started` before it starts; `perform` ends them."""

    def __init__(self, directory: Path, sockets: Path, steps: Steps) -> None:
        self.directory = directory
        self.sockets = sockets
        self.steps = steps
        self.started: list[ManagedProcess] = []

    def make_model(self, model: Path) -> None:
        if not (model / "config.json").exists():
            with self.steps.step("make the tiny model"):
                make_tiny_model(model)

    def start_pool(self, *names: str) -> list[NodeProcess]:
        """A master and nodes."""
        master = MasterProcess("master", log=self.directory / "master.log")
        nodes = [
            NodeProcess(name, socket_path=self.sockets / f"{name}.sock", master=master, log=self.directory / f"{name}.log")
            for name in names
        ]
        processes: list[MasterProcess | NodeProcess] = [master, *nodes]
        for process in processes:
            self.started.append(process)
            with self.steps.step(f"start {process.name}"):
                process.start_and_wait()
        return nodes

    def start_servers(self, *servers: SglangServer) -> None:
        """At the same time."""
        self.started += servers
        with contextlib.ExitStack() as stack:
            rows = {server: stack.enter_context(self.steps.step(f"start {server.name} (SGLang, CPU)")) for server in servers}

            def progress(server: SglangServer, waited_s: float, ready: bool) -> None:
                if ready:
                    rows[server].done()
                else:
                    rows[server].tick(waited_s)

            start_servers(servers, progress=progress)

    def stop(self, *processes: ManagedProcess) -> None:
        """Before the end, all at once."""
        stop_all(processes)
        for process in processes:
            self.started.remove(process)

    def log_of(self, name: str) -> Path:
        return self.directory / f"{name.replace(' ', '-').lower()}.log"


def perform(
    console: Console,
    workdir: Path,
    keep: bool,
    memory_gib: float,
    run: Callable[[Stage], Callable[[Sequence[ManagedProcess]], int]],
) -> int:
    """Run a demo, which returns its report; this returns the exit code that the report does.

    Logs go to `workdir`. With `keep` what was started outlives the call, and is given to the report; else nothing does.
    """
    if importlib.util.find_spec("sglang") is None:
        console.print(
            "The demo needs SGLang, which this Python does not have: run `make demo` in a checkout, it makes a virtual "
            f"environment with everything. (Python: {sys.executable})"
        )
        return 1
    run_dir = (workdir / time.strftime("%Y%m%d-%H%M%S")).resolve()
    run_dir.mkdir(parents=True)
    # Not in the work directory: a UNIX socket's path has at most 107 bytes.
    stage = Stage(run_dir, Path(tempfile.mkdtemp(prefix="hicache-demo-")), Steps(console))
    kept = False
    try:
        with _ending_on_signals(), stage.steps:
            if (available := _available_gib()) < memory_gib:
                stage.steps.note(
                    f"{available:.1f} GiB of memory are available and some {memory_gib} are needed: this may fail."
                )
            report = run(stage)
            if keep:
                for process in stage.started:
                    process.detach()
                kept = True
        return report(stage.started if kept else [])
    except ProcessError as error:
        _explain(console, error, stage.started)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    finally:
        if not kept:
            with contextlib.suppress(ProcessError):
                stop_all(stage.started)
            shutil.rmtree(stage.sockets, ignore_errors=True)
            console.print(f"All processes have ended. Logs: {run_dir}", highlight=False, soft_wrap=True)


def answered(server: ManagedProcess, ask: Callable[[], Answer]) -> Answer:
    """What `ask` returns; an error says which server it is about."""
    try:
        return ask()
    except ProcessError as error:
        raise ProcessError(f"{server.name}: {error}", server.log) from error


def _explain(console: Console, error: ProcessError, started: Sequence[ManagedProcess]) -> None:
    """Say what failed, and show the end of the log of who is to blame, and of whoever else is dead."""
    console.print(f"[bold red]Failed:[/] {escape(str(error))}", soft_wrap=True)
    logs = [error.log] if error.log is not None else []
    logs += [process.log for process in started if process.returncode is not None and process.log not in logs]
    for log in logs:
        console.print(f"The last lines of {log}:", markup=False, highlight=False, soft_wrap=True)
        console.print(tail(log) or "(empty)", markup=False, highlight=False, soft_wrap=True)


class Step:
    """One line of progress: a row with a spinner and its seconds on a terminal, else a line now and then."""

    def __init__(self, name: str, console: Console, progress: Progress | None) -> None:
        self.name = name
        self._console = console
        self._progress = progress
        self._began = time.monotonic()
        self._reported_s = 0.0
        self._ended = False
        self._row: TaskID | None = progress.add_task(name, total=1) if progress is not None else None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def tick(self, waited_s: float) -> None:
        if self._progress is None and waited_s - self._reported_s >= QUIET_REPORT_S:
            self._reported_s = waited_s
            self._console.print(f"  {self.name}: {waited_s:.0f} s ...", markup=False, highlight=False)

    def done(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._progress is not None and self._row is not None:
            self._progress.update(self._row, completed=1)
        else:
            self._console.print(f"  {self.name}: {self.elapsed_s:.1f} s", markup=False, highlight=False)


class Steps:
    """What the demo is doing, and for how long."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console)

    def __enter__(self) -> Steps:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """A step that is done when the block ends well, if nobody has said so before."""
        step = Step(name, self._console, self._progress)
        yield step
        step.done()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo the way Ctrl-C does, which works in the background too; under nohup SIGHUP does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _available_gib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / (1 << 20)
    return float("inf")
