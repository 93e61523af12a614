"""One life of a rail on this side: its queue pair, its completion queue, and what is posted and not known to be done."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from hicache_mooncake.transfer.transport import Op
from hicache_mooncake.transfer.verbs.api import Completion, Device, Qp, Sge, Status, VerbsError, Work
from hicache_mooncake.transfer.verbs.slices import Limits, Request

MAX_WORKS = 256
SIGNAL_EVERY, SIGNAL_BYTES = 16, 1 << 20
"""A completion costs an event and a turn of the thread: one is asked for after so many works or bytes, and at the end."""
_POLL = 64
_PROBE = Work("write", (Sge(0, 0, 0),), 0, 0, 1 << 62)
"""A write of no bytes needs no memory on either side: it is only acknowledged, or not."""


T = TypeVar("T")


class Sent(NamedTuple, Generic[T]):
    op: Op
    request: Request
    load: T
    """Whatever the owner wants to know it by."""


class Outcome(NamedTuple, Generic[T]):
    """Of a poll. `failure`: the completion by which the queue pair is in the error state; `culprit`: the work that brought it
    there by its own addresses or keys, if one did."""

    done: list[Sent[T]]
    failure: Completion | None = None
    culprit: Sent[T] | None = None


_EARNED = {int(Status.LOC_LEN_ERR), int(Status.LOC_PROT_ERR), int(Status.REM_ACCESS_ERR)}


class SendQueue(Generic[T]):
    """Not thread-safe. Owns the queue pair and a completion queue for it alone, which cannot overflow, and has nothing of a
    former life in it."""

    def __init__(self, device: Device, port: int, max_works: int = MAX_WORKS) -> None:
        """Raises VerbsError, also for a port that is not up. A device need not do all at once that it can do at most: what it
        refuses is tried smaller."""
        info, at = device.info, device.port(port)
        if at.state != "ACTIVE":
            raise VerbsError(f"{info.name} port {port} is {at.state}")
        self.max_works = max(1, min(max_works, info.max_qp_wr or max_works, (info.max_cqe or max_works + 1) - 1))
        max_sge = max(1, min(info.max_sge, 30))
        self.cq = device.completions(self.max_works + 1)
        try:
            while True:
                try:
                    self.qp: Qp = device.queue_pair(self.cq, port, self.max_works, max_sge)
                    break
                except VerbsError:
                    if self.max_works <= 16 and max_sge <= 2:
                        raise
                    self.max_works = min(self.max_works, max(self.max_works // 2, 16))
                    max_sge = min(max_sge, max(max_sge // 2, 2))
            self.qp.init()
            self.limits = Limits(max_sge, max(at.max_msg_sz, 1))
        except VerbsError:
            with contextlib.suppress(VerbsError):
                self.cq.close()
            raise
        self.armed = False
        self._sent: deque[tuple[int, Sent[T]]] = deque()
        self._next = 0

    @property
    def room(self) -> int:
        """How many works can be posted."""
        return self.max_works - len(self._sent)

    @property
    def idle(self) -> bool:
        return not self._sent

    @property
    def outstanding(self) -> list[Sent[T]]:
        return [sent for _, sent in self._sent]

    def post(self, batch: Sequence[Sent[T]]) -> None:
        """At most `room` of them, as one list. Raises VerbsError; they count as posted then as well."""
        works = []
        last, since, size = len(batch) - 1, 0, 0
        for index, sent in enumerate(batch):
            since, size = since + 1, size + sent.request.length
            signaled = index == last or since >= SIGNAL_EVERY or size >= SIGNAL_BYTES
            if signaled:
                since = size = 0
            request = sent.request
            works.append(Work(sent.op, request.local, request.remote, request.rkey, self._next, signaled))
            self._sent.append((self._next, sent))
            self._next += 1
        if not self.armed:
            self.arm()
        self.qp.post(works)

    def probe(self) -> None:
        """Try whether the peer's end is reached; before anything else is posted. Raises VerbsError."""
        self.arm()
        self.qp.post([_PROBE])

    def answer(self) -> Completion | None:
        """What became of `probe`; None as long as that is not known. Raises VerbsError."""
        found = self.cq.poll(1)
        if not found:
            self.arm()
            found = self.cq.poll(1)
        return found[0] if found else None

    def arm(self) -> None:
        """The completion queue's descriptor becomes readable at the next completion."""
        self.cq.arm()
        self.armed = True

    def poll(self) -> Outcome[T]:
        """What has been completed, in order. A completion stands for all works before it. Raises VerbsError when the completion
        queue is broken."""
        done: list[Sent[T]] = []
        while completions := self.cq.poll(_POLL):
            for completion in completions:
                if completion.status:
                    return Outcome(done, completion, self._culprit(completion))
                while self._sent and self._sent[0][0] <= completion.wr_id:
                    done.append(self._sent.popleft()[1])
            if len(completions) < _POLL:
                break
        return Outcome(done)

    def _culprit(self, completion: Completion) -> Sent[T] | None:
        if completion.status not in _EARNED:
            return None
        return next((sent for number, sent in self._sent if number == completion.wr_id), None)

    def close(self) -> list[Sent[T]]:
        """The fence. Returns what was posted and is not known to be done. Raises VerbsError when the queue pair cannot be
        destroyed."""
        self.qp.close()
        # The queue pair is gone, and with it every byte: what is left of the completion queue is only memory.
        with contextlib.suppress(VerbsError):
            self.cq.close()
        left = self.outstanding
        self._sent.clear()
        return left
