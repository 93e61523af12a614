"""This rank's own connection to the local node: lookups, clears, reports."""

from __future__ import annotations

import logging
import threading
import time

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import BLAME_AFTER_S, LEAST_S, Backoff
from hicache_mooncake.client.embedded import ensure_node, own_user_only
from hicache_mooncake.config import Settings
from hicache_mooncake.wire import Soon, Wire, WireClosed, WireTimeout, connect

log = logging.getLogger(__name__)

_from_node = p.decoder(p.FromNode)

_RETRY_FIRST_S, _RETRY_MAX_S = 0.1, 8.0
_PROBE_S = 5.0
_NODE_START_FIRST_S, _NODE_START_MAX_S = 2.0, 300.0
EMBEDDED_START_S = 10.0


class NodeQueries:
    """This rank's own connection to the node, for questions that move no pages. Thread-safe; reconnects by itself."""

    def __init__(self, settings: Settings, client: str, *, embedded: bool) -> None:
        self._settings = settings
        self._client = client
        self._embedded = embedded
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._soon = Soon()
        self._retry = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        self._start_node = Backoff(_NODE_START_FIRST_S, _NODE_START_MAX_S)
        self._starting = False
        self._silent = False
        """The node took a call's time and did not answer: until it does, it is asked beside the calls and not inside one."""
        self._probing = False
        self._closed = False
        self.node = ""
        self.problem = ""

    def ask(self, message: p.Message, timeout_s: float) -> tuple[p.Message | None, str]:
        """(answer, "") or (None, reason). Never raises, never takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return None, "busy"
        try:
            asked_at = time.monotonic()
            if deadline - asked_at < LEAST_S:
                return None, "deadline"
            for attempt in (0, 1):
                fresh = self._wire is None
                wire, reason = self._connected(deadline)
                if wire is None:
                    return None, reason
                try:
                    wire.send(message, deadline=deadline)
                    answer = wire.receive(_from_node, deadline, self._soon)
                except WireTimeout:
                    self._silent = time.monotonic() - asked_at >= BLAME_AFTER_S
                    self._drop("no answer before the deadline")
                    return None, "node_timeout"
                except (WireClosed, p.ProtocolError) as error:
                    self._drop(str(error))
                    if fresh or attempt:
                        return None, "node_down"
                    self._retry.retry_now()  # it was good: the node may have restarted
                    continue
                except BaseException:
                    self._drop("interrupted")  # the answer is still to come: nobody may take it for another's
                    raise
                self._retry.succeeded()
                if isinstance(answer, p.Refused):
                    self.problem = answer.reason
                    return None, "node_refused"
                assert isinstance(answer, p.Message)
                return answer, ""
            raise AssertionError("unreachable")
        finally:
            self._lock.release()

    def tell(self, message: p.Message) -> bool:
        """One-way, only over a connection that is open and free. False when it was not sent; who asks nothing, and so has no
        connection, gets one for the next time, beside the calls."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._wire is None:
                if self._retry.due():
                    self._probe_beside_calls()
                return False
            self._wire.send(message, deadline=time.monotonic() + 0.05)
        except (WireClosed, WireTimeout) as error:
            self._drop(str(error))
            return False
        finally:
            self._lock.release()
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._wire is not None:
                self._wire.close()
                self._wire = None
            self._embedded = False

    def _connected(self, deadline: float) -> tuple[Wire | None, str]:
        if self._wire is not None:
            return self._wire, ""
        if self._silent:
            if self._retry.due():
                self._probe_beside_calls()
            return None, "node_timeout"
        if not self._retry.due():
            return None, "node_down"
        return self._settle(*self._handshake(deadline))

    def _handshake(self, deadline: float) -> tuple[Wire | None, str, str]:
        """(wire, "", the node's name) or (None, reason, problem). Touches nothing of ours."""
        try:
            left = max(0.001, deadline - time.monotonic())
            wire = connect(self._settings.socket, left, own_user=own_user_only(self._settings))
        except (WireClosed, WireTimeout) as error:
            return None, "node_down", str(error)
        try:
            wire.send(p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, "query", self._client), deadline=deadline)
            welcome = wire.receive(_from_node, deadline)
        except (WireClosed, WireTimeout, p.ProtocolError) as error:
            wire.close()
            return None, "node_timeout" if isinstance(error, WireTimeout) else "node_down", str(error)
        if not isinstance(welcome, p.Welcome):
            wire.close()
            return None, "node_refused", welcome.reason if isinstance(welcome, p.Refused) else "unexpected answer"
        return wire, "", welcome.node

    def _settle(self, wire: Wire | None, reason: str, name: str) -> tuple[Wire | None, str]:
        """What a handshake's outcome means. Under the lock."""
        if wire is None:
            self._silent = reason == "node_timeout"
            self._drop(name, at_least_s=1.0 if reason == "node_refused" else 0.0)
            if reason == "node_down":
                self._start_embedded()
            return None, reason
        if self._closed:
            wire.close()
            return None, "node_down"
        if self.problem:
            log.warning("store node %s is back on %s", name, self._settings.socket)
        self._wire, self.node, self.problem, self._silent = wire, name, "", False
        return wire, ""

    def _probe_beside_calls(self) -> None:
        if self._probing or self._closed:
            return
        self._probing = True

        def work() -> None:
            try:
                outcome = self._handshake(time.monotonic() + _PROBE_S)
                with self._lock:
                    if self._settle(*outcome)[0] is not None:
                        self._retry.succeeded()
            finally:
                self._probing = False

        try:
            threading.Thread(target=work, name="probe-node", daemon=True).start()
        except RuntimeError:  # no more threads: tried again by a later call
            self._probing = False
            self._retry.failed()

    def _drop(self, problem: str, at_least_s: float = 0.0) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if not self.problem:
            log.warning(
                "store node on %s does not serve (%s): everything is a miss until it is back. Check `hicache-mooncake status`",
                self._settings.socket,
                problem,
            )
        self.problem = problem
        self._retry.failed(at_least_s)

    def _start_embedded(self) -> None:
        """A killed embedded node is started again, beside the calls and not inside one; ever more seldom if it ends."""
        if not self._embedded or self._starting or not self._start_node.due():
            return
        self._starting = True

        def work() -> None:
            try:
                if ensure_node(self._settings, EMBEDDED_START_S):
                    self._start_node.succeeded()
                    self._retry.retry_now()
                else:
                    self._start_node.failed()
            finally:
                self._starting = False

        try:
            threading.Thread(target=work, name="embedded-node", daemon=True).start()
        except RuntimeError:  # no more threads: tried again later
            self._starting = False
            self._start_node.failed()
