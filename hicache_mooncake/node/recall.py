"""What masters have just said of pages that a rank looked up: the load that follows need not ask them again. No I/O, no clock.

An engine loads what its lookup found, a moment later and in slices. What is recalled may be out of date by then: whoever loads
by it asks the masters after all for what did not come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hicache_mooncake import protocol as p

RECALL_S = 2.0
MAX_ANSWERS = 128
MAX_BYTES = 4 << 20
_PEER_BYTES = 512
"""About what a peer takes, with its strings."""
_MAX_LIVES = 1024

Mark = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Heard:
    namespace: bytes
    hashes: bytes
    answer: p.Answer
    until: float

    @property
    def size_bytes(self) -> int:
        return len(self.hashes) + 2 * len(self.answer.holder) + _PEER_BYTES * len(self.answer.peers)


class Recall:
    """The newest answers, a few. `turn` changes whenever a master came, went, or became another one: nothing that was heard
    before it counts. Not thread-safe."""

    def __init__(self, turn: Callable[[], int] = lambda: 0) -> None:
        self._turn = turn
        self._heard: deque[_Heard] = deque()
        self._bytes = 0
        self._lives: dict[str, bytes] = {}
        """Which life of a node was named last."""
        self._forgotten = 0
        self._heard_in = 0

    def mark(self) -> Mark:
        """To be taken before masters are asked: see `learn`."""
        return self._forgotten, self._turn()

    def learn(self, mark: Mark, question: p.Question, answer: p.Answer, now: float) -> None:
        """Masters have answered this, asked at `now`. Nothing is learned when something was forgotten since `mark`: the answer
        may be of before that."""
        if mark != self.mark():
            return
        heard = _Heard(question.namespace, question.hashes, answer, now + RECALL_S)
        if not answer.holder or heard.size_bytes > MAX_BYTES:
            return
        self._meet(answer.peers)
        self._forget_other_turns()
        self._heard.append(heard)
        self._bytes += heard.size_bytes
        while len(self._heard) > MAX_ANSWERS or self._bytes > MAX_BYTES or self._heard[0].until <= now:
            self._bytes -= self._heard.popleft().size_bytes

    def find(self, namespace: bytes, hashes: bytes, now: float) -> p.Answer | None:
        """As masters would answer, if each of these pages, in this order and next to each other, was found lately."""
        self._forget_other_turns()
        first = hashes[: p.HASH_BYTES]
        for heard in reversed(self._heard):
            if heard.until <= now:
                break
            if heard.namespace != namespace:
                continue
            at = heard.hashes.find(first)
            if at < 0 or at % p.HASH_BYTES or not heard.hashes.startswith(hashes, at):
                continue
            pages = slice(at // p.HASH_BYTES, (at + len(hashes)) // p.HASH_BYTES)
            answer = heard.answer
            holder = answer.holder[pages]
            if len(holder) * p.HASH_BYTES == len(hashes) and 0 not in holder:
                return p.Answer(holder, answer.peers, answer.others[pages], answer.tiers)
        return None

    def forget(self) -> None:
        """The masters cannot be relied on."""
        self._keep(lambda heard: False)

    def forget_namespace(self, namespace: bytes) -> None:
        """It was cleared, or something that was recalled of it turned out to be wrong."""
        self._keep(lambda heard: heard.namespace != namespace)

    def forget_peer(self, node: str) -> None:
        """It could not be read from, or has a new life: masters may know of somebody else."""
        self._keep(lambda heard: all(peer.node != node for peer in heard.answer.peers))

    def validate(self) -> None:
        """For tests, after every event."""
        assert self._bytes == sum(heard.size_bytes for heard in self._heard) <= MAX_BYTES
        assert len(self._heard) <= MAX_ANSWERS
        assert len(self._lives) <= _MAX_LIVES

    def _forget_other_turns(self) -> None:
        turn = self._turn()
        if turn != self._heard_in:
            self._heard_in = turn
            self.forget()

    def _meet(self, peers: list[p.Peer]) -> None:
        for peer in peers:
            if self._lives.get(peer.node, peer.incarnation) != peer.incarnation:
                self.forget_peer(peer.node)
            elif peer.node not in self._lives and len(self._lives) >= _MAX_LIVES:
                self._lives.clear()
            self._lives[peer.node] = peer.incarnation

    def _keep(self, good: Callable[[_Heard], bool]) -> None:
        self._heard = deque(heard for heard in self._heard if good(heard))
        self._bytes = sum(heard.size_bytes for heard in self._heard)
        self._forgotten += 1
