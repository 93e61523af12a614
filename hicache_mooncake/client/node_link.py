"""A mover's connection to the local store node, and its mapping of the node's segment."""

from __future__ import annotations

import logging
import os
import time

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import BLAME_AFTER_S, LEAST_S, Backoff
from hicache_mooncake.cold.pages_file import PagesFile
from hicache_mooncake.cold.reading import Reader
from hicache_mooncake.quiet import QuietLog
from hicache_mooncake.transfer.mapping import Mapping
from hicache_mooncake.transfer.tls import Tls
from hicache_mooncake.wire import Soon, Wire, WireClosed, WireTimeout, connect

log = logging.getLogger(__name__)
_quiet = QuietLog(log)

_from_node = p.decoder(p.FromNode)

_WARM_S = 0.5
_NODE_RETRY_FIRST_S, _NODE_RETRY_MAX_S = 0.05, 8.0
_POPULATE_BYTES = 16 << 30
"""How much of the node's segment each mover maps ahead; of a larger one the rest is mapped on first use."""


class NodeUnavailable(Exception):
    """The local node did not answer; `reason` is the miss reason to count."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class NodeLink:
    """This mover's connection to the local node, and its mapping of the node's segment. Reconnects by itself."""

    def __init__(self, socket_path: str, role: str, client: str, *, own_user: bool = False) -> None:
        self._path = socket_path
        self._role = role
        self._client = client
        self._own_user = own_user
        self._wire: Wire | None = None
        self._soon = Soon()
        self._ahead = 0
        """Questions that were asked ahead, whose answers are still to be taken."""
        self._retry = Backoff(_NODE_RETRY_FIRST_S, _NODE_RETRY_MAX_S)
        self.segment: Mapping | None = None
        self.cold: Reader | None = None
        """Of the node's cold tier, for a mover that loads."""
        self.node = ""
        self.data_key = b""
        """Of the node's cluster: what other nodes' data ports want proved."""
        self.tls: Tls | None = None
        """The node's, in a cluster with certificates."""

    def warm(self) -> None:
        """Connect, so that the segment is mapped and faulted in before the first batch. One that does not serve yet is met
        again by that."""
        try:
            self._connected(time.monotonic() + _WARM_S)
        except NodeUnavailable:
            self._retry.retry_now()

    def ask(self, message: p.Message, deadline: float) -> p.Message:
        """One request, one answer. A connection that turns out dead is made anew once: the node may have restarted.
        Too late is too late: then nothing is asked, and a node that was not given the time to answer is not blamed."""
        if deadline - time.monotonic() < LEAST_S:
            raise NodeUnavailable("deadline", "no time left to ask the node")
        asked_at = time.monotonic()
        self._drop_what_is_ahead()
        for attempt in (0, 1):
            fresh = self._wire is None
            wire = self._connected(deadline)
            try:
                wire.send(message, deadline=deadline)
                answer = wire.receive(_from_node, deadline, self._soon)
            except WireTimeout as error:
                self.drop()  # the answer is still to come
                if time.monotonic() - asked_at >= BLAME_AFTER_S:
                    self._retry.failed(at_least_s=1.0)  # a frozen node costs a deadline: not at every call
                raise NodeUnavailable("node_timeout", str(error)) from error
            except (WireClosed, p.ProtocolError) as error:
                self.drop()
                if fresh or attempt:
                    self._retry.failed()
                    raise NodeUnavailable("node_down", str(error)) from error
                continue
            if isinstance(answer, p.Refused):
                raise NodeUnavailable("node_refused", answer.reason)
            assert isinstance(answer, p.Message)
            self._retry.succeeded()
            return answer
        raise AssertionError("unreachable")

    def ask_same(self, message: p.Message, deadline: float) -> p.Message:
        """Like `ask`, but only on the connection that is open: for messages that refer to an earlier answer."""
        self._drop_what_is_ahead()
        self.ask_ahead(message, deadline)
        return self.take(deadline)

    def ask_ahead(self, message: p.Message, deadline: float) -> None:
        """Ask on the connection that is open, and do something else until the answer is wanted: `take` gives the answers in
        the order in which they were asked for. Each must be taken: any other question drops the connection else."""
        if self._wire is None:
            raise NodeUnavailable("node_down", "connection lost")
        try:
            self._wire.send(message, deadline=deadline)
        except (WireTimeout, WireClosed, p.ProtocolError) as error:
            raise self._lost(error) from error
        self._ahead += 1

    def take(self, deadline: float) -> p.Message:
        """The next answer to what was asked ahead. Raises NodeUnavailable; then the connection is gone, and all others with
        it, unless the node refused just this one."""
        if self._wire is None or not self._ahead:
            raise NodeUnavailable("node_down", "connection lost")
        try:
            answer = self._wire.receive(_from_node, deadline, self._soon)
        except (WireTimeout, WireClosed, p.ProtocolError) as error:
            raise self._lost(error) from error
        self._ahead -= 1
        if isinstance(answer, p.Refused):
            raise NodeUnavailable("node_refused", answer.reason)
        assert isinstance(answer, p.Message)
        return answer

    def _lost(self, error: Exception) -> NodeUnavailable:
        self.drop()
        return NodeUnavailable("node_timeout" if isinstance(error, WireTimeout) else "node_down", str(error))

    def _drop_what_is_ahead(self) -> None:
        """Answers that nobody took would be taken for those to the next question."""
        if self._ahead:
            self.drop()

    def tell(self, message: p.Message, deadline: float) -> None:
        """One-way; a failure only costs the connection."""
        if self._wire is None:
            return
        try:
            self._wire.send(message, deadline=deadline)
        except (WireClosed, WireTimeout):
            self.drop()

    def _connected(self, deadline: float) -> Wire:
        if self._wire is not None:
            return self._wire
        if not self._retry.due():
            raise NodeUnavailable("node_down", "the node did not serve a moment ago")
        try:
            wire = connect(self._path, max(0.001, deadline - time.monotonic()), own_user=self._own_user)
        except (WireClosed, WireTimeout) as error:
            self._retry.failed()
            raise NodeUnavailable("node_down", str(error)) from error
        try:
            hello = p.Hello(p.PROTOCOL_MIN, p.PROTOCOL_MAX, self._role, self._client, cold=self._role == "load")
            wire.send(hello, deadline=deadline)
            welcome = wire.receive(_from_node, deadline)
            if isinstance(welcome, p.Refused):
                raise NodeUnavailable("node_refused", welcome.reason)
            fds = wire.take_fds()
            if not isinstance(welcome, p.Welcome) or len(fds) != 1 + bool(welcome.cold):
                for fd in fds:
                    os.close(fd)
                raise p.ProtocolError("the node's welcome has no segment")
            cold = fds.pop() if welcome.cold else None
            try:
                segment = Mapping(fds[0], welcome.segment_bytes, writable=True)
            except OSError as error:
                _quiet(logging.ERROR, "segment", f"no page can be moved, since the node's segment cannot be mapped: {error}")
                if cold is not None:
                    os.close(cold)
                raise NodeUnavailable("segment_map", str(error)) from error
            finally:
                for fd in fds:
                    os.close(fd)
        except NodeUnavailable:
            wire.close()
            self._retry.failed(at_least_s=1.0)
            raise
        except WireTimeout as error:
            wire.close()
            self._retry.failed(at_least_s=1.0)
            raise NodeUnavailable("node_timeout", str(error)) from error
        except (WireClosed, p.ProtocolError, OSError) as error:
            wire.close()
            self._retry.failed()
            raise NodeUnavailable("node_down", str(error)) from error
        segment.populate_in_background(_POPULATE_BYTES)
        self.segment = segment
        self.cold = Reader(PagesFile.of(cold, direct=welcome.cold == 2)) if cold is not None else None
        self.node = welcome.node
        self.data_key = welcome.data_key
        tls = Tls(welcome.tls_cert, welcome.tls_key, welcome.tls_ca) if welcome.tls_cert else None
        if tls != self.tls:  # the same one keeps what it has read from them
            self.tls = tls
        self._wire = wire
        return wire

    def idle_fileno(self) -> int | None:
        """To wait on between batches: readable then means that the node is gone."""
        return self._wire.fileno() if self._wire is not None else None

    def drop(self) -> None:
        """Close the connection and let go of the segment: a dead node's memory must not stay because we had mapped it."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self._ahead = 0
        if self.segment is not None:
            self.segment.close()
            self.segment = None
        if self.cold is not None:
            self.cold.close()
            self.cold.file.close()
            self.cold = None
