"""What changes the directory waits here for its turn, each node's in order and the nodes in turns."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hicache_mooncake.protocol import Message


class Waiting(NamedTuple):
    sender: bytes
    message: Message
    size: int
    """Bytes on the wire."""
    received_at: float


class Backlog:
    """A queue a sender, emptied in turns: a node that drops a million pages delays itself, and heartbeats of the others
    are answered between its updates. `bytes` of messages are in it; the caller stops reading when they are too many. Not
    thread-safe."""

    def __init__(self) -> None:
        self.bytes = 0
        self._queues: dict[bytes, deque[Waiting]] = {}
        self._turns: deque[bytes] = deque()

    def __len__(self) -> int:
        """Senders that have something waiting."""
        return len(self._turns)

    def push(self, waiting: Waiting) -> None:
        queue = self._queues.get(waiting.sender)
        if queue is None:
            queue = self._queues[waiting.sender] = deque()
            self._turns.append(waiting.sender)
        queue.append(waiting)
        self.bytes += waiting.size

    def pop(self) -> Waiting:
        """The next one. Raises IndexError when there is none."""
        sender = self._turns.popleft()
        queue = self._queues[sender]
        waiting = queue.popleft()
        self.bytes -= waiting.size
        if queue:
            self._turns.append(sender)
        else:
            del self._queues[sender]
        return waiting
