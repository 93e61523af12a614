"""The end of a mover that was killed: when it can write no more, and what there is when it does not end."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client import mover_process
from hicache_mooncake.client.mover_process import MoverProcess, MoverUnavailable, _cannot_write

LONG_S = 30.0
EXITING, ALIVE = 0x4, 0x400000
RECVFROM, MADVISE = 45, 28
"""On x86_64."""
FILLS = mover_process._FILLS
PREADV = {"x86_64": (295, 327), "aarch64": (69, 286)}
"""And preadv2."""


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mover_process, "_PROC", tmp_path)
    monkeypatch.setattr(mover_process, "_FILLS", (RECVFROM,))
    return tmp_path / "7" / "task"


def task(tasks: Path, number: int, flags: int, call: str | None) -> None:
    (tasks / str(number)).mkdir(parents=True)
    (tasks / str(number) / "stat").write_text(f"{number} (mover) 1) D 1 1 1 0 -1 {flags} 0 0")
    if call is not None:
        (tasks / str(number) / "syscall").write_text(call)


@pytest.mark.parametrize(
    ("flags", "call", "cannot"),
    [
        (EXITING, "running", True),
        (ALIVE, "running", False),
        (ALIVE, "-1 0x7ffe 0x7f50", True),
        (ALIVE, f"{MADVISE} 0x7f 0x1 0x17 0x0 0x0 0x0 0x7ffe 0x7f50", True),
        (ALIVE, f"{RECVFROM} 0x3 0x7f 0x1 0x0 0x0 0x0 0x7ffe 0x7f50", False),
        (ALIVE, None, False),
    ],
    ids=["exits", "runs", "in a page fault", "in a call that fills nothing", "in a call that fills memory", "not to be seen"],
)
def test_what_a_killed_task_can_still_write(proc: Path, flags: int, call: str | None, cannot: bool) -> None:
    task(proc, 7, EXITING, None)
    task(proc, 8, flags, call)
    assert _cannot_write(7) == cannot
    assert _cannot_write(99), "there is no such process"


def test_on_an_unknown_processor_every_system_call_may_fill_memory(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_process, "_FILLS", None)
    task(proc, 7, ALIVE, f"{MADVISE} 0x7f 0x1 0x17 0x0 0x0 0x0 0x7ffe 0x7f50")
    assert not _cannot_write(7)


@pytest.mark.skipif(os.uname().machine not in PREADV, reason="another processor")
def test_a_disk_that_hangs_keeps_no_call(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover reads the cold tier into memory of its own."""
    monkeypatch.setattr(mover_process, "_FILLS", FILLS)
    for number, call in enumerate(PREADV[os.uname().machine]):
        task(proc, 7 + number, ALIVE, f"{call} 0x3 0x7f 0x1 0x0 0x0 0x0 0x7ffe 0x7f50")
    assert _cannot_write(7)


class Unkillable(subprocess.Popen[bytes]):
    """Sleeps until it is let go, whoever kills it."""

    def __init__(self) -> None:
        super().__init__(["sleep", "1000"])
        self.let_go = threading.Event()
        threading.Thread(target=lambda: (self.let_go.wait(), super(Unkillable, self).kill()), daemon=True).start()

    def kill(self) -> None:
        """In vain."""


@pytest.fixture
def unkillable() -> Iterator[list[Unkillable]]:
    made = [Unkillable() for _ in range(4)]
    yield made
    for process in made:
        process.let_go.set()
        process.wait(LONG_S)


def test_a_mover_for_stores_is_not_waited_for_for_long(unkillable: list[Unkillable], monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes no engine memory."""
    monkeypatch.setattr(mover_process, "_cannot_write", lambda pid: False)
    mover = MoverProcess("store")
    mover._process = unkillable[0]
    ending = threading.Thread(target=mover._stop, daemon=True)
    ending.start()
    ending.join(LONG_S)
    assert not ending.is_alive()


def test_movers_that_do_not_end_do_not_pile_up(unkillable: list[Unkillable], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_process, "_cannot_write", lambda pid: True)
    mover = MoverProcess("load")
    for process in unkillable:
        mover._process = process
        mover._stop()
    attach = p.Attach("/nowhere", os.getpid(), "test", [])
    with pytest.raises(MoverUnavailable, match=str(unkillable[0].pid)) as caught:
        mover.attach(attach, [], timeout_s=LONG_S)
    assert caught.value.reason == "mover_down"
    unkillable[0].let_go.set()
    unkillable[0].wait(LONG_S)
    mover.attach(attach, [], timeout_s=LONG_S)
    mover.close()
