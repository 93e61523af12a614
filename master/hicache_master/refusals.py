"""Who was refused lately, and why: for the log, for health and for an operator who asks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_LISTED = 10
QUIET_S = 60.0


@dataclass(slots=True)
class Refusal:
    """`at`: when it was said last, on the caller's clock; `times`: how often since it came on the list."""

    node: str
    reason: str
    at: float
    times: int
    logged_at: float


class Refusals:
    """The last `MAX_LISTED` distinct refusals. A node that is refused tries again every few seconds: it has one entry."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], Refusal] = OrderedDict()

    def add(self, node: str, reason: str, now: float) -> bool:
        """Returns whether this is news for the log: the same was not said there within `QUIET_S`."""
        entry = self._entries.pop((node, reason), None) or Refusal(node, reason, now, 0, float("-inf"))
        self._entries[node, reason] = entry
        entry.at = now
        entry.times += 1
        if len(self._entries) > MAX_LISTED:
            self._entries.popitem(last=False)
        news = now - entry.logged_at >= QUIET_S
        if news:
            entry.logged_at = now
        return news

    def last(self) -> list[Refusal]:
        """Newest first."""
        return list(reversed(self._entries.values()))
