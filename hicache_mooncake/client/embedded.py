"""The embedded node: with nothing configured, the first rank on a host starts the store node itself.

Any number of ranks may start at once; a lock file lets one of them start the node while the others wait for its socket. The
node outlives them, so a restarted engine finds its cache warm, and ends by itself after `IDLE_EXIT_S` without a rank.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from hicache_mooncake.client import child
from hicache_mooncake.config import Settings
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.wire import WireClosed, WireTimeout, connect

log = logging.getLogger(__name__)

IDLE_EXIT_S = 3600.0
_POLL_S = 0.02
_MAX_LOG_BYTES = 16 << 20

quiet = QuietLog(log)


def own_user_only(settings: Settings) -> bool:
    """On the default path, in a folder that any user could have made first, only a node of this user or root is trusted."""
    return settings.sources.get("socket", "default") == "default"


def node_answers(socket_path: str, timeout_s: float = 0.5, *, own_user: bool = False) -> bool:
    try:
        connect(socket_path, timeout_s, own_user=own_user).close()
    except (WireClosed, WireTimeout):
        return False
    return True


def ensure_node(settings: Settings, timeout_s: float) -> bool:
    """True when a node serves `settings.socket`, started here if need be. Never raises; False means: not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s

    def answers() -> bool:
        return node_answers(settings.socket, own_user=own_user_only(settings))

    if answers():
        return True
    path = Path(settings.socket)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid not in (os.getuid(), 0):
            raise PermissionError(errno.EPERM, f"the folder belongs to user {path.parent.stat().st_uid}")
        lock_fd = _open(f"{path}.start", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        text = f"cannot start the embedded node: {path.parent}: {error.strerror or error}. Set `socket` to a place of your own"
        quiet(logging.ERROR, "place", text)
        return False
    try:
        while True:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if answers():
                    return True
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        if answers():
            return True
        pid = _start(settings)
        while pid is not None and time.monotonic() < deadline:
            if answers():
                log.info("started the embedded store node: pid %d, socket %s", pid, settings.socket)
                return True
            if not Path(f"/proc/{pid}").exists():
                quiet(logging.ERROR, "ended", f"the embedded node ended at once: {settings.socket}.log says why")
                return False
            time.sleep(_POLL_S)
        return False
    finally:
        os.close(lock_fd)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _start(settings: Settings) -> int | None:
    """Start the node as nobody's child: SGLang ends every process below its own when it stops, and this one stays."""
    environment = {name: value for name, value in child.environment().items() if not name.startswith("CUDA_")}
    command = [sys.executable, "-m", "hicache_mooncake.cli", "node", "--embedded", *settings.node_options()]
    command += ["--idle-exit-s", str(IDLE_EXIT_S)]
    log_path = f"{settings.socket}.log"
    try:
        fresh = os.O_TRUNC if os.path.exists(log_path) and os.path.getsize(log_path) > _MAX_LOG_BYTES else os.O_APPEND
        log_fd = _open(log_path, os.O_WRONLY | os.O_CREAT | fresh)
        try:
            parent = subprocess.run(
                ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_fd,
                env=environment,
                cwd="/",
                start_new_session=True,
                check=True,
                timeout=5,
            )
        finally:
            os.close(log_fd)
        return int(parent.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        quiet(logging.ERROR, "start", f"cannot start the embedded node: {error}")
        return None
