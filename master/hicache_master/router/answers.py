"""What an answer says about itself, found in its first and last bytes: nothing between them is looked at. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

_LOOKED_AT = 16 << 10
"""Bytes from each end of an answer."""
_PIECES = 16
_COUNT = re.compile(rb'"(cached_tokens|prompt_tokens|completion_tokens)"\s*:\s*(\d{1,9})')  # quoted text has \" here
_DETAILS = re.compile(rb'"cached_tokens_details"\s*:\s*(\{[^{}]{0,400}\})')
_ERROR = re.compile(rb'^\s*(?:data:\s*)?\{\s*"error"\s*:')
_CODE = re.compile(rb'"code"\s*:\s*(\d{3})\b')

TIERS = ("device", "host", "storage")


@dataclass(frozen=True, slots=True)
class Usage:
    """None for what the engine did not say. `by_tier`: cached tokens by SGLang's names of tiers."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    by_tier: dict[str, int] = field(default_factory=dict)


def read_usage(data: bytes) -> Usage:
    """The last of each count: a stream of SGLang's repeats them, growing."""
    if b"_tokens" not in data:
        return Usage()
    found = {name: int(value) for name, value in _COUNT.findall(data)}
    by_tier: dict[str, int] = {}
    details = _DETAILS.findall(data)
    if details:
        try:
            told = msgspec.json.decode(details[-1])
        except msgspec.DecodeError:
            told = {}
        by_tier = {tier: told[tier] for tier in TIERS if isinstance(told.get(tier), int) and told[tier] >= 0}
    return Usage(found.get(b"prompt_tokens"), found.get(b"cached_tokens"), found.get(b"completion_tokens"), by_tier)


def error_code(data: bytes) -> int | None:
    """Of an answer whose first bytes are an error although its status is 200: that of the error, 500 if it does not say."""
    if not _ERROR.match(data[:256]):
        return None
    code = _CODE.search(data[:_LOOKED_AT])
    return int(code.group(1)) if code is not None else 500


@dataclass(slots=True)
class Ends:
    """The ends of a stream of pieces: keeps the first and some of the last."""

    first: bytes = b""
    _last: list[bytes] = field(default_factory=list)

    def add(self, piece: bytes) -> None:
        if not self.first:
            self.first = piece
            return
        self._last.append(piece)
        if len(self._last) > 2 * _PIECES:
            del self._last[:_PIECES]

    def tail(self) -> bytes:
        return b"".join(piece[-_LOOKED_AT:] for piece in self._last[-_PIECES:])[-_LOOKED_AT:]

    def usage(self) -> Usage:
        """Of the whole answer: what its end says, else what its beginning says."""
        last, first = read_usage(self.tail()), read_usage(self.first[:_LOOKED_AT] + b"\n" + self.first[-_LOOKED_AT:])
        return Usage(
            last.prompt_tokens if last.prompt_tokens is not None else first.prompt_tokens,
            last.cached_tokens if last.cached_tokens is not None else first.cached_tokens,
            last.completion_tokens if last.completion_tokens is not None else first.completion_tokens,
            last.by_tier or first.by_tier,
        )
