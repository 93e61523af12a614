"""Who was refused lately, and why: for the log, for health and for an operator who asks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_LISTED = 10
MAX_REMEMBERED = 2048
QUIET_S = 60.0


@dataclass(slots=True)
class Refusal:
    """`at`: when it was said last, on the caller's clock; `times`: how often since it came on the list."""

    node: str
    reason: str
    at: float
    times: int


class Refusals:
    """The last `MAX_LISTED` distinct refusals. A node that is refused tries again every few seconds: it has one entry."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], Refusal] = OrderedDict()
        self._logged: OrderedDict[tuple[str, str], float] = OrderedDict()

    def add(self, node: str, reason: str, now: float) -> bool:
        """Returns whether this is news for the log: the same was not said there within `QUIET_S`."""
        key = node, reason
        entry = self._entries.pop(key, None) or Refusal(node, reason, now, 0)
        self._entries[key] = entry
        entry.at = now
        entry.times += 1
        if len(self._entries) > MAX_LISTED:
            self._entries.popitem(last=False)
        if now - self._logged.get(key, float("-inf")) < QUIET_S:
            return False
        self._logged.pop(key, None)
        self._logged[key] = now
        if len(self._logged) > MAX_REMEMBERED:
            self._logged.popitem(last=False)
        return True

    def last(self) -> list[Refusal]:
        """Newest first."""
        return list(reversed(self._entries.values()))
