"""The embedded node: with nothing configured, the first rank on a host starts the store node itself.

Any number of ranks may start at once; a lock file lets one of them start the node while the others wait for its socket. The
node outlives them, so a restarted engine finds its cache warm, and ends by itself after `IDLE_EXIT_S` without a rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from hicache_mooncake.config import Settings
from hicache_mooncake.wire import WireClosed, WireTimeout, connect

log = logging.getLogger(__name__)

IDLE_EXIT_S = 3600.0
_POLL_S = 0.02


def node_answers(socket_path: str, timeout_s: float = 0.5) -> bool:
    try:
        connect(socket_path, timeout_s).close()
    except (WireClosed, WireTimeout):
        return False
    return True


def ensure_node(settings: Settings, timeout_s: float) -> bool:
    """True when a node serves `settings.socket`, started here if need be. Never raises; False means: not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    if node_answers(settings.socket):
        return True
    path = Path(settings.socket)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = os.open(f"{path}.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.error("cannot start the embedded node: %s: %s. Set `socket` to a path this user may write", path.parent, error)
        return False
    try:
        while True:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if node_answers(settings.socket):
                    return True
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        if node_answers(settings.socket):
            return True
        process = _start(settings)
        if process is None:
            return False
        while time.monotonic() < deadline:
            if node_answers(settings.socket):
                log.info("started the embedded store node: pid %d, socket %s", process.pid, settings.socket)
                return True
            if process.poll() is not None:
                log.error("the embedded node ended at once (status %d): see %s.log", process.returncode, settings.socket)
                return False
            time.sleep(_POLL_S)
        return False
    finally:
        os.close(lock_fd)


def _start(settings: Settings) -> subprocess.Popen[bytes] | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    package_root = str(Path(__file__).resolve().parents[2])
    roots = [package_root, str(Path(package_root) / "master"), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
    command = [sys.executable, "-m", "hicache_mooncake.cli", "node", "--embedded", *settings.node_options()]
    command += ["--idle-exit-s", str(IDLE_EXIT_S)]
    try:
        with open(f"{settings.socket}.log", "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd="/",
                start_new_session=True,  # it outlives the engine, and the engine's Ctrl-C
            )
    except OSError as error:
        log.error("cannot start the embedded node: %s", error)
        return None


def stop_node(pid: int) -> None:
    """For tests and tools."""
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
