"""Which rails a link has, how much each carries, and when one that failed is tried again, without I/O.

A *rail* is a pair of ports, one here and one at the peer, of one fabric, with a queue pair (QP) on either side while it is up.
Both ends number the rails alike. A life of a rail has a number, its *generation*: what is said of a former one is ignored.

    DOWN --due--> PAIRING --both QPs ready--> UP --lost--> ENDING --the peer's QP is gone--> DOWN

The time comes in as an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from typing import NamedTuple, TypeAlias

from hicache_mooncake.backoff import STABLE_S, Backoff
from hicache_mooncake.transfer.gids import address, family
from hicache_mooncake.transfer.verbs.slices import MIN_SLICE

MAX_RAILS = 16
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 60.0
STORM = 3
"""A rail whose QPs died so often in a row, each soon after it was made, is quarantined: next tried after MOST_PAUSE_S."""
STALLED_S = 0.5
"""A rail that was fenced, and had completed nothing for so long with work posted, counts as failed."""
ANSWER_S = 5.0
PROBE_S = 3.0
"""A queue pair on which nothing moves in this time, to begin with, is none."""
SAMPLE_BYTES = 1 << 20
"""A rate is taken over at least so many bytes: over fewer it says how far the peer is, not how much the rail can carry."""
KEEP = 0.7
"""Of the average, with each new sample."""
LEAST_SHARE = 1 / 16
"""Of the fastest rail's rate: with less no sample would ever show that a slow rail has become fast."""
MAX_SLICE = 1 << 20
WINDOW_S = 0.05
MIN_WINDOW = 4 << 20
"""A rail has at most WINDOW_S of its rate under way, or MIN_WINDOW: what is posted cannot be overtaken by a smaller batch that
comes later."""


class State(enum.Enum):
    DOWN = "down"
    PAIRING = "pairing"
    UP = "up"
    ENDING = "ending"


class Loss(enum.Enum):
    """Why a rail went down."""

    FENCED = enum.auto()
    """To end a batch. It is paired again at once."""
    FAILED = enum.auto()


@dataclass(slots=True)
class Rail:
    """`local`, `remote`: index of the port in each end's list. `others`: ports of the peer that are tried in its place as long
    as the rail has never been up."""

    index: int
    local: int
    remote: int
    pause: Backoff
    others: tuple[int, ...] = ()
    state: State = State.DOWN
    generation: int = 0
    rate: float = 0.0
    """Bytes/s, an exponential average; 0: not known yet."""
    moved: int = 0
    """Bytes, over all its lives."""
    in_flight: int = 0
    """Bytes that are posted and not known to be completed."""
    failures: int = 0
    deaths: int = 0
    """Failures in a row, none of them later than STABLE_S after it came up."""
    asked_at: float = 0.0
    """PAIRING, ENDING: since when the peer is to answer, or its card."""
    probing: bool = False
    """PAIRING: both ends have a QP, and it is being tried whether bytes get through."""
    proven: bool = False
    """It has been up."""
    up_at: float = 0.0
    progress_at: float = 0.0
    """When something was last completed, or posted while nothing was under way."""
    _sampled_bytes: int = 0
    _sampled_s: float = 0.0

    @property
    def quarantined(self) -> bool:
        return self.deaths >= STORM

    @property
    def window(self) -> int:
        """Bytes that it may have in flight."""
        return max(MIN_WINDOW, int(self.rate * WINDOW_S))

    def sample(self, moved: int, seconds: float) -> None:
        self._sampled_bytes += moved
        self._sampled_s += seconds
        if self._sampled_bytes >= SAMPLE_BYTES and self._sampled_s > 0:
            rate = self._sampled_bytes / self._sampled_s
            self.rate = rate if not self.rate else KEEP * self.rate + (1 - KEEP) * rate
            self.forget_sample()

    def forget_sample(self) -> None:
        self._sampled_bytes, self._sampled_s = 0, 0.0


class Rails:
    """Of one link. Not thread-safe. `pairs` are (local port, remote port) by index; `others` as in `Rail`, of each."""

    def __init__(
        self,
        pairs: Sequence[tuple[int, int]],
        rng: random.Random | None = None,
        others: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._now = 0.0
        self._rng = rng
        self.all: list[Rail] = []
        for number, (here, there) in enumerate(pairs[:MAX_RAILS]):
            self.add(here, there, others[number] if others else ())

    def add(self, here: int, there: int, others: tuple[int, ...] = ()) -> None:
        assert len(self.all) < MAX_RAILS
        pause = Backoff(FIRST_PAUSE_S, MOST_PAUSE_S, lambda: self._now, self._rng)
        self.all.append(Rail(len(self.all), here, there, pause, others))

    def tried(self, now: float) -> bool:
        """Each has been, and one is up or no other port is about to be tried: a rail may come up with another one later."""
        self._now = now
        if any(rail.state is State.PAIRING and not rail.failures for rail in self.all):
            return False
        return bool(self.up) or not any(rail.state is State.PAIRING or rail.pause.due() for rail in self.all)

    @property
    def up(self) -> list[Rail]:
        return [rail for rail in self.all if rail.state is State.UP]

    def hopeless(self, now: float) -> bool:
        """None is up, and none comes up before a pause has passed: the link is dead."""
        self._now = now
        return not any(rail.state in (State.UP, State.PAIRING) or rail.pause.due() for rail in self.all)

    def silent(self, now: float) -> bool:
        """None is up, and the peer has not answered for ANSWER_S."""
        waiting = [rail.asked_at for rail in self.all if rail.state in (State.PAIRING, State.ENDING)]
        return bool(waiting) and not self.up and now - max(waiting) > ANSWER_S

    # ------------------------------------------------------------------ lives

    def due(self, now: float) -> list[Rail]:
        """Those that are to be paired now, by the end that connected."""
        self._now = now
        return [rail for rail in self.all if rail.state is State.DOWN and rail.pause.due()]

    def next_due(self) -> float | None:
        """When to look at `due` again."""
        return min((rail.pause.at for rail in self.all if rail.state is State.DOWN), default=None)

    def pairing(self, rail: Rail, now: float, generation: int = 0) -> int:
        """A new life begins: the next one, or the one that the peer has named. Returns its number."""
        assert rail.state is State.DOWN
        assert not generation or generation > rail.generation
        rail.state, rail.generation = State.PAIRING, generation or rail.generation + 1
        rail.asked_at, rail.probing = now, False
        return rail.generation

    def probe(self, rail: Rail, now: float) -> None:
        assert rail.state is State.PAIRING
        rail.asked_at, rail.probing = now, True

    def unanswered(self, now: float) -> list[Rail]:
        """Those on which nothing has got through for too long."""
        return [rail for rail in self.all if rail.state is State.PAIRING and rail.probing and now - rail.asked_at > PROBE_S]

    def came_up(self, rail: Rail, now: float) -> None:
        assert rail.state is State.PAIRING
        rail.state, rail.up_at, rail.progress_at, rail.proven = State.UP, now, now, True
        rail.forget_sample()

    def lost(self, rail: Rail, loss: Loss, now: float, *, gone: bool) -> Loss:
        """Its QP on this side has been destroyed. `gone`: the peer's, too, or it never came about; else `gone` follows. Returns
        why the rail is down, which is FAILED also for one that was fenced while nothing moved on it."""
        assert rail.state in (State.PAIRING, State.UP)
        self._now = now
        if loss is Loss.FENCED and rail.in_flight and now - rail.progress_at >= STALLED_S:
            loss = Loss.FAILED
        if loss is Loss.FAILED:
            rail.failures += 1
            if rail.state is State.UP:
                if now - rail.up_at > STABLE_S:
                    rail.deaths = 0
                    rail.pause.succeeded()
                rail.deaths += 1
            if not self._turn_to_another(rail):
                rail.pause.failed(MOST_PAUSE_S if rail.quarantined else 0.0)
        rail.state = State.DOWN if gone else State.ENDING
        rail.asked_at = now
        rail.in_flight = 0
        return loss

    def _turn_to_another(self, rail: Rail) -> bool:
        """Another port of the peer is next, where this one never worked. True: at once, since it has not been tried yet."""
        taken = {each.remote for each in self.all if each is not rail and each.local == rail.local}
        free = [port for port in rail.others if port not in taken]
        if rail.proven or not free:
            return False
        rail.others = (*(port for port in rail.others if port != free[0]), rail.remote)
        rail.remote = free[0]
        return rail.failures <= len(rail.others)

    def gone(self, rail: Rail) -> None:
        """The peer's QP has been destroyed, too: what was not completed may be moved over other rails."""
        assert rail.state is State.ENDING
        rail.state = State.DOWN

    # ------------------------------------------------------------------ load

    def choose(
        self, usable: Callable[[Rail], bool], size: int, near: Callable[[Rail], float] = lambda rail: 1.0
    ) -> Rail | None:
        """The rail that would have moved `size` more bytes first, of those that are up, have room in their window and are
        `usable`. So each carries in proportion to what it achieved. `near` multiplies its rate: above 0, and 1 for a device
        that is as near to the memory as any."""
        known = max((rail.rate for rail in self.all), default=0.0) or 1.0

        def finish(rail: Rail) -> float:
            rate = max(rail.rate or known, known * LEAST_SHARE) * near(rail)
            return (rail.in_flight + size) / rate

        open_ = [rail for rail in self.up if rail.in_flight < rail.window and usable(rail)]
        return min(open_, key=finish, default=None)

    def slice_bytes(self, left: int) -> int:
        """How much of what is left of a batch one rail gets at a time."""
        count = len(self.up)
        return left if count < 2 else min(max(left // (2 * count), MIN_SLICE), MAX_SLICE)

    def posted(self, rail: Rail, size: int, now: float) -> None:
        if not rail.in_flight:
            rail.progress_at = now
        rail.in_flight += size

    def completed(self, rail: Rail, size: int, now: float) -> None:
        assert size <= rail.in_flight
        rail.in_flight -= size
        rail.moved += size
        rail.sample(size, now - rail.progress_at)
        rail.progress_at = now

    def validate(self) -> None:
        """What always holds, for tests."""
        for rail in self.all:
            assert rail.in_flight >= 0
            assert not rail.in_flight or rail.state is State.UP
            assert rail.deaths <= rail.failures


@dataclass(frozen=True, slots=True)
class Port:
    """A port as its peer knows it. `gid`: of the index that is used, as in `api.Gid.gid`."""

    device: str
    number: int
    link_layer: str
    gid: str
    lid: int
    mtu: int

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def fabric(port: Port) -> str:
    """Ports of different fabrics cannot reach each other: InfiniBand subnets, and on Ethernet the families of addresses."""
    if port.link_layer == "InfiniBand":
        return f"InfiniBand {port.gid[:19]}"
    return family(port.gid, port.link_layer)


def pairs(ours: Sequence[Port], theirs: Sequence[Port]) -> list[tuple[int, int]]:
    """Which ports make a rail, by index: within each fabric as many as the larger side has, so that every port is used and
    none more often than it must be. The n-th port here with the n-th there: in a cluster whose hosts are cabled alike these
    share a switch. With peers of former releases, which come to the same by themselves."""
    made: list[tuple[int, int]] = []
    for name in dict.fromkeys(map(fabric, ours)):
        here = [index for index, port in enumerate(ours) if fabric(port) == name]
        there = [index for index, port in enumerate(theirs) if fabric(port) == name]
        made += _in_order(here, there)
    return made[:MAX_RAILS]


def _in_order(here: Sequence[int], there: Sequence[int]) -> list[tuple[int, int]]:
    return [(here[i % len(here)], there[i % len(there)]) for i in range(max(len(here), len(there)))] if here and there else []


Network: TypeAlias = IPv4Network | IPv6Network


class Routes(NamedTuple):
    """`others`: for each pair, which ports there may take the place of the one in it."""

    pairs: list[tuple[int, int]]
    others: list[tuple[int, ...]]


def routes(ours: Sequence[Port], networks: Sequence[Network | None], theirs: Sequence[Port]) -> Routes:
    """As `pairs`, but ports that are on one IP network first: that it has to be so is not said, and that it works mostly is.
    `networks`: of our ports, as far as they are known."""
    meeting = [[there for there, port in enumerate(theirs) if _may_meet(mine, port)] for mine in ours]
    near = [
        [there for there in meets if network is not None and address(theirs[there].gid) in network]
        for meets, network in zip(meeting, networks, strict=True)
    ]
    taken = {there for meets in near for there in meets}
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for here, mine in enumerate(ours):
        rest = [there for there in meeting[here] if there not in taken]
        groups.setdefault((fabric(mine), tuple(near[here] or rest or meeting[here])), []).append(here)
    made = [pair for (_, there), here in groups.items() for pair in _in_order(here, there)][:MAX_RAILS]
    return Routes(made, [_others(there, meeting[here], near[here]) for here, there in made])


def _may_meet(mine: Port, other: Port) -> bool:
    """An InfiniBand port without a GID may be in any subnet."""
    unknown = mine.link_layer == other.link_layer == "InfiniBand" and not (mine.gid and other.gid)
    return unknown or fabric(mine) == fabric(other)


def _others(port: int, meeting: Sequence[int], near: Sequence[int]) -> tuple[int, ...]:
    """In order from this one on, those of its network first."""
    others = sorted((each for each in meeting if each != port), key=lambda each: (each not in near, each < port, each))
    return tuple(others)
