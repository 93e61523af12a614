"""What the two ends of a session tell each other. See docs/messenger.md.

Every message names its session and the generation: which attempt to connect it belongs to. On the wire a checksum follows each.
"""

from __future__ import annotations

from typing import cast

import msgspec
import xxhash

from hicache_mooncake import protocol as p
from hicache_mooncake.messenger.layout import Layout

SESSION_BYTES = 16
MAX_PLACES = 6000
"""Of one message: a notice has 64 KiB."""
MAX_AUX_BYTES = 32 << 10
MAX_REQUEST_BYTES = 1024
_SUM_BYTES = 8


class Open(p.Message):
    """Source: the first message of each attempt."""

    session: bytes
    generation: int
    request: str
    layout: Layout
    pages: int
    checked: bool
    """Each run comes with its checksum."""
    budget_s: float
    """After so long the source gives the session up."""
    fresh: bool
    """The source has not been answered yet: the destination need not know the session."""


class Reserved(p.Message):
    """Destination: write here. `bases`: for each layer the address of page 0 of each part. `pages`: how many places follow."""

    session: bytes
    generation: int
    bases: list[list[int]]
    counts: list[int]
    """For each layer how many pages have been counted: in attempts before this one."""
    pages: int


class Places(p.Message):
    """Destination: at which multiple of its parts' lengths each page lies, from page `first` on."""

    session: bytes
    generation: int
    first: int
    places: list[int]


class Declined(p.Message):
    """Destination: there is no such session (any more)."""

    session: bytes
    generation: int
    reason: str
    detail: str


class Ran(p.Message):
    """Source: these pages of this layer have been written."""

    session: bytes
    generation: int
    layer: int
    first: int
    count: int
    checksum: int


class Counted(p.Message):
    """Destination: so many pages of this layer, from the first on, have come whole."""

    session: bytes
    generation: int
    layer: int
    count: int


class Commit(p.Message):
    """Source: that was all."""

    session: bytes
    generation: int
    first_token: int
    aux: bytes


class Done(p.Message):
    """Destination: it has been delivered."""

    session: bytes
    generation: int


class Abort(p.Message):
    """Either end. The source follows it, or answers it, with Quiet."""

    session: bytes
    generation: int
    to_source: bool
    reason: str
    detail: str


class Quiet(p.Message):
    """Source: nothing of this session is under way any more. `clean`: all writes of this attempt have ended well, so this is
    true of the destination's memory, too."""

    session: bytes
    generation: int
    clean: bool


class Alive(p.Message):
    """Either end, while there is nothing else to tell."""

    session: bytes
    generation: int
    to_source: bool


ToSource = Reserved | Places | Declined | Counted | Done | Abort | Alive
ToDestination = Open | Ran | Commit | Quiet | Abort | Alive
Any = ToSource | ToDestination
_decoder = p.decoder(Reserved | Places | Declined | Counted | Done | Abort | Alive | Open | Ran | Commit | Quiet)


def pack(message: Any) -> bytes:
    body = p.encode(message)
    return body + xxhash.xxh3_64_digest(body)


def unpack(notice: bytes) -> Any:
    """Raises ProtocolError for what is no message, or a damaged one."""
    body = notice[:-_SUM_BYTES]
    if xxhash.xxh3_64_digest(body) != notice[-_SUM_BYTES:]:
        raise p.ProtocolError("a notice that is no message of a messenger, or a damaged one")
    try:
        message = cast(Any, _decoder.decode(body))
    except msgspec.MsgspecError as error:
        raise p.ProtocolError(f"message not understood: {error}") from error
    if len(message.session) != SESSION_BYTES or message.generation < 1:
        raise p.ProtocolError("a session or a generation that is none")
    return message


def for_source(message: Any) -> bool:
    if isinstance(message, Abort | Alive):
        return message.to_source
    return isinstance(message, Reserved | Places | Declined | Counted | Done)
