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


class Rotation:
    """Takes reports of failed reads and says who is to be taken out of lookups, and who comes back.

    A node is sick when two distinct readers report it within `WINDOW_S`, or one where there is only one other node. A reader
    that reports more than half of all nodes in that time is itself cut off, and does not count. Memory is bounded by the square
    of the number of nodes, and everything in it ends with `WINDOW_S` or `RELAPSE_S`. Not thread-safe.
    """

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}
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
        seen = self._readers.setdefault(reader, _Reader()).failed
        for node in named:
            seen[node] = max(now, seen.get(node, now))
        counted = [other for other in self._readers if not self._is_cut_off(other, nodes, now)]
        if reader not in counted:
            return []
        needed = max(1, min(2, len(nodes) - 1))
        sick = []
        for node in dict.fromkeys(named):
            if self.is_sick(node):
                continue
            case = self._cases.get(node)
            half_open = case is not None and case.back_at is not None and now - case.back_at <= HALF_OPEN_S
            readers = sum(self._failed_lately(other, node, now) for other in counted)
            if readers >= (1 if half_open else needed):
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
                # What was said before is answered for: the probation asks for a report of its own.
                for reader in self._readers.values():
                    reader.failed.pop(node, None)
            elif case.back_at is not None and now - case.back_at > RELAPSE_S:
                del self._cases[node]
        for name, reader in list(self._readers.items()):
            for node in [node for node, at in reader.failed.items() if now - at > WINDOW_S]:
                del reader.failed[node]
            if not reader.failed:
                del self._readers[name]
        return back

    def forget(self, node: str) -> None:
        """It left, is gone, or has started anew: nothing that was said of it, or by it, counts any more."""
        self._cases.pop(node, None)
        self._readers.pop(node, None)
        for reader in self._readers.values():
            reader.failed.pop(node, None)

    def validate(self, nodes: Collection[str]) -> None:
        """For tests: everything here is about nodes that there are."""
        assert set(self._cases) <= set(nodes)
        assert set(self._readers) <= set(nodes)
        for name, reader in self._readers.items():
            assert set(reader.failed) <= set(nodes) - {name}
        for case in self._cases.values():
            assert SICK_S[0] <= case.lasts_s <= SICK_S[1]

    def _fall_sick(self, node: str, before: _Case | None, now: float) -> None:
        lasts_s = SICK_S[0] if before is None else min(SICK_S[1], 2 * before.lasts_s)
        self._cases[node] = _Case(now + lasts_s, lasts_s)

    def _failed_lately(self, reader: str, node: str, now: float) -> bool:
        at = self._readers[reader].failed.get(node)
        return at is not None and now - at <= WINDOW_S

    def _is_cut_off(self, reader: str, nodes: Collection[str], now: float) -> bool:
        failed = sum(node in nodes and self._failed_lately(reader, node, now) for node in self._readers[reader].failed)
        return 2 * failed > len(nodes)
