"""What a step of a node asks of the masters and of the cold tier, and what it is sent back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hicache_mooncake import protocol as p


@dataclasses.dataclass(frozen=True, slots=True)
class AskMasters:
    """Yielded by a step: who holds these pages? To be answered within `timeout_s`."""

    questions: list[p.Question]
    timeout_s: float
    promise_s: float = 0.0
    """As in Lookup, and so is `reader`."""
    reader: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AskCold:
    """Yielded by a step: which of these are in the cold tier? One byte a page, 1 where it is."""

    questions: list[tuple[bytes, bytes]]
    """(namespace, blob of hashes)."""
    promise_s: float = 0.0
    """So long they are to stay there, as far as may be."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocateCold:
    """Yielded by a step: where are these in the cold tier, to be read now? A ColdPlace or None a page."""

    namespace: bytes
    hashes: bytes
    length: int


class ColdPlace(NamedTuple):
    """Where in the tier's file, xxh3-64 of the body, and whether it was asked for more than once lately."""

    offset: int
    checksum: int
    often: bool


Asked = AskMasters | AskCold | LocateCold
"""What a step may yield."""


class Told(Protocol):
    """What the masters answered: one answer a question. `complete` False: a shard of the directory did not answer, and its
    keys count as absent. `warming`: one of those that answered does not know of everything yet."""

    @property
    def answers(self) -> Sequence[p.Answer]: ...
    @property
    def complete(self) -> bool: ...
    @property
    def warming(self) -> bool: ...
