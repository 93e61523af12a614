"""Which nodes cannot be read from, though they live: failure reports of readers, judged without I/O and without a clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

WINDOW_S = 10.0
"""Reports older than this count no more."""
SICK_S = (5.0, 60.0)
"""How long a node is kept out of lookups the first time, and at most: each relapse doubles it."""
HALF_OPEN_S = 10.0
"""So long after its return a single report is enough."""
RELAPSE_S = 60.0
"""Sick again within this time of its return is a relapse; later it is a new case."""
JUDGED_S = 1.0
"""How old the verdict on a reader may be, and what is outdated here: both are looked through as a whole."""


@dataclass(slots=True)
class _Case:
    """A node that is sick, or was a short while ago."""

    until: float
    lasts_s: float
    back_at: float | None = None


@dataclass(slots=True)
class _Reader:
    """What one reporter said lately: node -> when last."""

    failed: dict[str, float] = field(default_factory=dict)
    cut_off: bool = False
    """Does it reach so few that its word does not count? As of `judged_at`."""
    judged_at: float = float("-inf")


class Rotation:
    """Takes reports of failed reads and says who is to be taken out of lookups, and who comes back.

    A node is sick when two distinct readers report it within `WINDOW_S`, or one where there is only one other node. A reader
    that reports more than half of all nodes in that time is itself cut off, and does not count. Memory is bounded by the square
    of the number of nodes, and everything in it ends with `WINDOW_S` or `RELAPSE_S`. When a rack fails, all others say so at
    once: a report looks at the few readers that it takes, not at all of them. Not thread-safe.
    """

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}
        self._about: dict[str, dict[str, None]] = {}
        """Node -> the readers that said something of it."""
        self._pruned_at = float("-inf")
        self._cases: dict[str, _Case] = {}

    def is_sick(self, node: str) -> bool:
        case = self._cases.get(node)
        return case is not None and case.back_at is None

    def lasts_s(self, node: str) -> float:
        """For how long a sick node was taken out, at its last relapse."""
        return self._cases[node].lasts_s

    def report(self, reader: str, failed: Iterable[str], nodes: Collection[str], now: float) -> list[str]:
        """Reads of `reader` from the nodes `failed` went wrong. `nodes`: all that lookups may answer, and those that are sick.

        Returns those that are sick from now on. Names that are not in `nodes`, and the reader's own, are ignored."""
        named = [node for node in failed if node in nodes and node != reader]
        if not named:
            return []
        mine = self._readers.setdefault(reader, _Reader())
        for node in named:
            mine.failed[node] = max(now, mine.failed.get(node, now))
            self._about.setdefault(node, {})[reader] = None
        mine.judged_at = float("-inf")
        if self._is_cut_off(mine, nodes, now):
            return []
        needed = max(1, min(2, len(nodes) - 1))
        sick = []
        for node in dict.fromkeys(named):
            if self.is_sick(node):
                continue
            case = self._cases.get(node)
            half_open = case is not None and case.back_at is not None and now - case.back_at <= HALF_OPEN_S
            if half_open or self._said_by(needed, node, nodes, now):
                self._fall_sick(node, case, now)
                sick.append(node)
        return sick

    def recover(self, now: float) -> list[str]:
        """Let time pass: returns those that are answered again, on probation."""
        back = []
        for node, case in list(self._cases.items()):
            if case.back_at is None and now >= case.until:
                case.back_at = now
                back.append(node)
                self._unsay(node)  # it is answered for: the probation asks for a report of its own
            elif case.back_at is not None and now - case.back_at > RELAPSE_S:
                del self._cases[node]
        if not 0 <= now - self._pruned_at < JUDGED_S:
            self._pruned_at = now
            self._prune(now)
        return back

    def forget(self, node: str) -> None:
        """It left, is gone, or has started anew: nothing that was said of it, or by it, counts any more."""
        self._cases.pop(node, None)
        self._unsay(node)
        reader = self._readers.pop(node, None)
        if reader is not None:
            for about in reader.failed:
                self._withdraw(node, about)

    def validate(self, nodes: Collection[str]) -> None:
        """For tests: everything here is about nodes that there are."""
        assert set(self._cases) <= set(nodes)
        assert set(self._readers) <= set(nodes)
        for name, reader in self._readers.items():
            assert set(reader.failed) <= set(nodes) - {name}
            assert all(name in self._about[node] for node in reader.failed)
        assert sum(map(len, self._about.values())) == sum(len(reader.failed) for reader in self._readers.values())
        assert all(self._about.values())
        for case in self._cases.values():
            assert SICK_S[0] <= case.lasts_s <= SICK_S[1]

    def _fall_sick(self, node: str, before: _Case | None, now: float) -> None:
        lasts_s = SICK_S[0] if before is None else min(SICK_S[1], 2 * before.lasts_s)
        self._cases[node] = _Case(now + lasts_s, lasts_s)

    def _said_by(self, needed: int, node: str, nodes: Collection[str], now: float) -> bool:
        """Do so many readers say that they cannot read from this node?"""
        for name in self._about[node]:
            reader = self._readers[name]
            if now - reader.failed[node] <= WINDOW_S and not self._is_cut_off(reader, nodes, now):
                needed -= 1
                if not needed:
                    return True
        return False

    def _is_cut_off(self, reader: _Reader, nodes: Collection[str], now: float) -> bool:
        if not 0 <= now - reader.judged_at < JUDGED_S:
            lately = sum(node in nodes and now - at <= WINDOW_S for node, at in reader.failed.items())
            reader.cut_off = 2 * lately > len(nodes)
            reader.judged_at = now
        return reader.cut_off

    def _prune(self, now: float) -> None:
        for name, reader in list(self._readers.items()):
            for node in [node for node, at in reader.failed.items() if now - at > WINDOW_S]:
                del reader.failed[node]
                self._withdraw(name, node)
            if not reader.failed:
                del self._readers[name]

    def _unsay(self, node: str) -> None:
        for name in self._about.pop(node, ()):
            del self._readers[name].failed[node]

    def _withdraw(self, reader: str, node: str) -> None:
        """The reader's word on this node is taken back."""
        readers = self._about[node]
        del readers[reader]
        if not readers:
            del self._about[node]
