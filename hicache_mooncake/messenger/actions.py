"""What the state machines of a session want done, and the limits they keep."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_mooncake.messenger import messages as m

BEATS = 4
"""Words of each end in the time after which silence means loss."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one messenger. Seconds and bytes."""

    sessions: int = 256
    """At each end, those included whose buffers are poisoned."""
    reserved_bytes: int = 1 << 40
    """Of all buffers that may be written to, poisoned ones included."""
    window_bytes: int = 16 << 20
    """Under way, of one session; at least one run."""
    link_bytes: int = 64 << 20
    """The same of all sessions with one peer."""
    chunk_bytes: int = 4 << 20
    """A longer run is cut into runs of whole pages."""
    queued_bytes: int = 4 << 30
    """Pushed and not counted, of one session. More makes `push` wait."""
    open_s: float = 10.0
    """For the answer to Open, with the time that the receiver's `reserve` takes."""
    silence_s: float = 5.0
    """Without a word from the peer the link is taken for lost."""
    resume_s: float = 15.0
    """From the loss of a link until the session is given up."""
    attempts: int = 16
    """Links that a session may have."""
    write_s: float = 30.0
    quiet_s: float = 3.0
    """For what is under way to end by itself after an abort. Then the link is closed."""
    fence_retry_s: float = 5.0
    """Grows to six times as much."""
    unclaimed_s: float = 60.0
    """For the receiver to fetch what was delivered."""
    remember_s: float = 60.0
    """How long an ended session is remembered, so that a peer that has lost its link hears how it ended."""


@dataclass(frozen=True, slots=True)
class Tell:
    message: m.Any


@dataclass(frozen=True, slots=True)
class Connect:
    """Close the link of the generation before; when nothing of it is under way here any more, connect anew."""

    generation: int


@dataclass(frozen=True, slots=True)
class Write:
    """(address here, address there, bytes). Ends with `Source.wrote(ticket)`."""

    ticket: int
    generation: int
    pieces: list[tuple[int, int, int]]
    size: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the link: what is under way on it must end."""

    generation: int


@dataclass(frozen=True, slots=True)
class Release:
    """The source's pages of one push are its caller's again."""

    tag: object
    arrived: bool


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the receiver for buffers. Ends with `Destination.reserved` or `declined`."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare the checksum with that of what has arrived. Ends with `Destination.verified`."""

    layer: int
    first: int
    count: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Fence:
    """See that nothing that came over the link of this generation lands any more. Ends with `Destination.fenced`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Free:
    """Nothing lands in the buffers any more, and they were not delivered: they are their owner's again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last word to whoever uses the session. `reason` is empty when all has been delivered."""

    reason: str
    detail: str


Action = Tell | Connect | Write | Drop | Release | Reserve | Verify | Fence | Free | Ended
