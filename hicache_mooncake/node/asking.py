"""What a step of a node asks of the masters, and what it is sent back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from hicache_mooncake import protocol as p


@dataclasses.dataclass(frozen=True, slots=True)
class AskMasters:
    """Yielded by a step: who holds these pages? To be answered within `timeout_s`."""

    questions: list[p.Question]
    timeout_s: float


class Told(Protocol):
    """What the masters answered: one answer a question. `complete` False: a shard of the directory did not answer, and its
    keys count as absent. `warming`: one of those that answered does not know of everything yet."""

    @property
    def answers(self) -> Sequence[p.Answer]: ...
    @property
    def complete(self) -> bool: ...
    @property
    def warming(self) -> bool: ...
