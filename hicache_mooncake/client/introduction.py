"""A rank says to its node who it is and what it stores, again and again, and hears with which engines it can never share.

On a thread and a connection of its own, so that no call of SGLang's ever waits for it, and so that the node knows from the end
of the connection that the rank is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Backoff
from hicache_mooncake.client.embedded import own_user_only
from hicache_mooncake.config import Settings
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.wire import Wire, WireClosed, WireTimeout, connect

log = logging.getLogger(__name__)

_from_node = p.decoder(p.FromNode)

SINCE_VERSION = 2
FIRST_S, EVERY_S = 1.0, 10.0
"""Pauses: at first short, then twice as long each time, up to the longest."""
_ANSWER_S = 3.0
_RETRY_FIRST_S, _RETRY_MAX_S = 0.5, 30.0
_OLD_NODE_S = 300.0


class Introduction:
    """`make` says who the rank is at the moment, None while that is not known; `hear` is called with each answer. Both are
    called on the thread that `start` starts. `close` ends it, from any thread."""

    def __init__(
        self,
        settings: Settings,
        client: str,
        make: Callable[[], p.RankIdentity | None],
        hear: Callable[[list[p.Unshared]], None],
        *,
        first_s: float | None = None,
        every_s: float | None = None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._make = make
        self._hear = hear
        self._first_s = FIRST_S if first_s is None else first_s
        self._every_s = EVERY_S if every_s is None else every_s
        self._quiet = QuietLog(log)
        self._retry = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._started = False
        self._wire: Wire | None = None

    def start(self) -> None:
        """Once; more often does nothing."""
        with self._lock:
            if self._started or self._closed.is_set() or self._settings.node == "off":
                return
            self._started = True
        try:
            threading.Thread(target=self._run, name="introduction", daemon=True).start()
        except RuntimeError as error:  # no more threads: nothing of L3 depends on this one
            log.warning("the node is not told what this engine stores: %s", error)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._wire is not None:
                self._wire.shutdown()

    def _run(self) -> None:
        pause_s = self._first_s
        while not self._closed.wait(pause_s):
            try:
                pause_s = self._introduce(pause_s)
            except Exception:
                pause_s = _RETRY_MAX_S
                text = "telling the node what this engine stores failed. Please report this"
                self._quiet(logging.ERROR, "introduction", text, exc_info=True)
        self._hang_up()

    def _introduce(self, pause_s: float) -> float:
        """Returns how long to wait until the next time."""
        rank = self._make()
        if rank is None:
            return self._first_s
        deadline = time.monotonic() + _ANSWER_S
        try:
            if self._wire is None and not self._connect(deadline):
                return _OLD_NODE_S
            assert self._wire is not None
            self._wire.send(p.Describe(rank), deadline=deadline)
            answer = self._wire.receive(_from_node, deadline)
        except (WireClosed, WireTimeout, p.ProtocolError):  # what fails is said by the calls that need the node
            self._hang_up()
            self._retry.failed()
            return max(self._first_s, self._retry.at - time.monotonic())
        self._retry.succeeded()
        if isinstance(answer, p.Described):
            self._hear(answer.unshared)
        return min(2 * pause_s, self._every_s)

    def _connect(self, deadline: float) -> bool:
        """False for a node of an older release, which is told nothing."""
        wire = connect(self._settings.socket, max(0.001, deadline - time.monotonic()), own_user=own_user_only(self._settings))
        try:
            wire.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, "identity", self._client), deadline=deadline)
            welcome = wire.receive(_from_node, deadline)
        except BaseException:
            wire.close()
            raise
        if not isinstance(welcome, p.Welcome) or welcome.version < SINCE_VERSION:
            wire.close()
            return False
        with self._lock:
            self._wire = wire
        if self._closed.is_set():
            raise WireClosed("closed meanwhile")
        return True

    def _hang_up(self) -> None:
        with self._lock:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
