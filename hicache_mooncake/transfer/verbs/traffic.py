"""The batches of a link on their way over its rails: what is posted where, what came of it, and what must go again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from hicache_mooncake.transfer.batches import Batch, Batches, Turn
from hicache_mooncake.transfer.transport import TransportError
from hicache_mooncake.transfer.verbs.api import Completion, Status, VerbsError
from hicache_mooncake.transfer.verbs.rails import Loss, Rail, Rails
from hicache_mooncake.transfer.verbs.send_queue import SendQueue, Sent
from hicache_mooncake.transfer.verbs.slices import Cutter, Lookup, requests

MAX_TRIES = 2
"""How many rails a turn may fail with before its batch does."""


class Load:
    """A turn of a batch on its way. It holds the batch until nothing of it moves any more."""

    __slots__ = ("barred", "cutter", "out", "queued", "stranded", "tries", "turn")

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.cutter = Cutter(turn.pieces)
        self.out = 0
        """Requests that are posted, or about to be."""
        self.stranded = 0
        """Requests whose rail is lost, and whose peer's end is not known to be gone."""
        self.tries = 0
        self.barred: set[int] = set()
        """Rails, by number, whose devices do not reach its memory on one side."""
        self.queued = False

    @property
    def batch(self) -> Batch:
        return self.turn.batch


Queue: TypeAlias = SendQueue[Load]


class Traffic:
    """Not thread-safe: the link's lock is held for every call, and none of them waits. `local` and `remote` find registered
    memory here and at the peer by a rail's devices."""

    def __init__(
        self,
        batches: Batches,
        rails: Rails,
        local: Callable[[Rail], Lookup],
        remote: Callable[[Rail], Lookup],
        near: Callable[[Rail, int], float] = lambda rail, address: 1.0,
    ) -> None:
        """`near`: of a rail and an address here, as in `Rails.choose`."""
        self._batches, self._rails, self._local, self._remote, self._near = batches, rails, local, remote, near
        self.queues: dict[int, Queue] = {}
        """Of the rails that have a queue pair here, by number."""
        self.unfenced = ""
        """Why a queue pair could not be destroyed: what it moves cannot be stopped."""
        self.over = False
        """A batch has ended of which something is posted: `ended` names the rails."""
        self._loads: set[Load] = set()
        self._ready: deque[Load] = deque()
        self._stranded: dict[int, list[Sent[Load]]] = {}
        self._write_next = False

    # ------------------------------------------------------------------ onto the rails

    def pump(self, now: float) -> list[tuple[Rail, VerbsError]]:
        """Posts what there is room for, as one list a rail. Returns the rails that took it badly."""
        plans: dict[int, list[Sent[Load]]] = {}
        while self._rails.up and (load := self._next()) is not None:
            if not self._hand_out(load, plans, now):
                self._queue(load, first=True)
                break
        failed = []
        for index, sents in plans.items():
            try:
                self.queues[index].post(sents)
            except VerbsError as error:
                failed.append((self._rails.all[index], error))
        return failed

    def _next(self) -> Load | None:
        while self._ready:
            load = self._ready.popleft()
            load.queued = False
            if load in self._loads and load.cutter.left:
                return load
        for _ in range(2):
            turn = self._batches.cut("write" if self._write_next else "read")
            self._write_next = not self._write_next
            if turn is None:
                continue
            if turn.batch.hold():
                load = Load(turn)
                self._loads.add(load)
                return load
            self._batches.lost(turn)
            return self._next()
        return None

    def _queue(self, load: Load, *, first: bool = False) -> None:
        if not load.queued:
            load.queued = True
            if first:
                self._ready.appendleft(load)
            else:
                self._ready.append(load)

    def _hand_out(self, load: Load, plans: dict[int, list[Sent[Load]]], now: float) -> bool:
        """False when no rail has room for the rest of it."""

        def room(rail: Rail) -> int:
            return self.queues[rail.index].room - len(plans.get(rail.index, ()))

        def near(rail: Rail) -> float:
            return self._near(rail, load.cutter.next_local)

        while load.cutter.left:
            size = min(self._rails.slice_bytes(load.turn.size), load.cutter.left)
            rail = self._rails.choose(lambda rail: rail.index not in load.barred and room(rail) > 0, size, near)
            if rail is None:
                return False
            most = room(rail)
            pieces = load.cutter.take(size, most)
            try:
                made = list(requests(pieces, self.queues[rail.index].limits, self._local(rail), self._remote(rail)))
            except TransportError as error:
                load.cutter.put_back(pieces)
                load.barred.add(rail.index)
                if all(rail.index in load.barred for rail in self._rails.up):
                    self.fail(load, error)
                    return True
                continue
            for request in reversed(made[most:]):
                load.cutter.put_back(request.pieces())
            for request in made[:most]:
                plans.setdefault(rail.index, []).append(Sent(load.turn.batch.op, request, load))
                self._rails.posted(rail, request.length, now)
                load.out += 1
        return True

    # ------------------------------------------------------------------ off the rails

    def collect(self, rail: Rail, now: float) -> tuple[bool, Completion | None, bool]:
        """What the rail has completed: whether anything, the completion that broke it, if one did, and whether that was a
        batch's fault and not the rail's. Raises VerbsError when its completion queue is broken."""
        outcome = self.queues[rail.index].poll()
        if outcome.done:
            self._rails.completed(rail, sum(sent.request.length for sent in outcome.done), now)
        for sent in outcome.done:
            sent.load.out -= 1
            self._finish(sent.load)
        if outcome.culprit is not None and outcome.failure is not None:
            at_peer = outcome.failure.status == Status.REM_ACCESS_ERR
            self.fail(
                outcome.culprit.load,
                TransportError(
                    "bounds",
                    f"{outcome.culprit.request.length} bytes at {outcome.culprit.request.remote:#x} of the peer: "
                    f"{'it is not, or not any more, registered there' if at_peer else 'memory here is not registered any more'}"
                    f" ({outcome.failure.status_text})",
                ),
            )
        return bool(outcome.done), outcome.failure, outcome.culprit is not None

    def lose(self, rail: Rail, loss: Loss, now: float, error: TransportError, *, gone: bool) -> Loss:
        """The fence: destroys the rail's queue pair. What it had not completed goes again after `restore`, over whichever rail;
        a batch of which a part has failed too often ends with `error`. Returns as `Rails.lost`."""
        queue = self.queues.pop(rail.index, None)
        left: list[Sent[Load]] = []
        if queue is not None:
            try:
                left = queue.close()
            except VerbsError as failure:
                self.unfenced = failure.reason
                left = queue.outstanding
        loss = self._rails.lost(rail, loss, now, gone=gone)
        loads = {sent.load for sent in left}
        for sent in left:
            sent.load.out -= 1
        for load in loads:
            if loss is Loss.FAILED and not load.batch.ended:
                load.tries += 1
                if load.tries >= MAX_TRIES:
                    self.fail(load, error)
        stranded = [sent for sent in left if not sent.load.batch.ended]
        for sent in stranded:
            sent.load.stranded += 1
        self._stranded[rail.index] = stranded
        if gone:
            self.restore(rail)
        for load in loads:
            self._finish(load)
        return loss

    def restore(self, rail: Rail) -> None:
        """Neither end's queue pair is there any more: what was stranded may go again."""
        for sent in reversed(self._stranded.pop(rail.index, [])):
            load = sent.load
            load.stranded -= 1
            if not load.batch.ended:
                load.cutter.put_back(sent.request.pieces())
                self._queue(load)
            self._finish(load)

    # ------------------------------------------------------------------ ends

    def fail(self, load: Load, error: TransportError) -> None:
        """Its batch ends. What of it is posted still ends with the rails that `ended` names."""
        load.batch.end(error)
        load.cutter.drop()
        self.over = True
        self._finish(load)

    def expire(self) -> None:
        """Batches that are late end, also when nobody waits for them."""
        for batch in {load.batch for load in self._loads}:
            _ = batch.done

    def ended(self) -> list[Rail]:
        """The rails that must be lost, since something of batches that have ended is posted on them."""
        self.over = False
        over = {load for load in self._loads if load.batch.ended}
        if not over:
            return []
        for index, sents in self._stranded.items():
            for sent in sents:
                if sent.load in over:
                    sent.load.stranded -= 1
            self._stranded[index] = [sent for sent in sents if sent.load not in over]
        for load in over:
            load.cutter.drop()
            self._finish(load)
        busy = [index for index, queue in self.queues.items() if any(sent.load in over for sent in queue.outstanding)]
        return [self._rails.all[index] for index in busy]

    def close(self) -> None:
        """The link is over, and its batches have been ended: destroys all queue pairs. `unfenced` says whether one is left."""
        for queue in self.queues.values():
            try:
                queue.close()
            except VerbsError as failure:
                self.unfenced = failure.reason
        self.queues.clear()
        self._stranded.clear()
        self._ready.clear()
        for load in list(self._loads):
            load.out = load.stranded = 0
            load.cutter.drop()
            self._finish(load)

    def _finish(self, load: Load) -> None:
        if load.out or load.stranded or load not in self._loads or (load.cutter.left and not load.batch.ended):
            return
        self._loads.remove(load)
        if load.batch.ended:
            load.cutter.drop()
            self._batches.lost(load.turn)
        else:
            self._batches.landed(load.turn)
        load.batch.release()

    def validate(self) -> None:
        """What always holds, for tests."""
        out = [sent.load for queue in self.queues.values() for sent in queue.outstanding]
        stranded = [sent.load for sents in self._stranded.values() for sent in sents]
        for load in self._loads:
            assert load.out == out.count(load)
            assert load.stranded == stranded.count(load)
            assert load.out or load.stranded or (load.queued and load.cutter.left)
