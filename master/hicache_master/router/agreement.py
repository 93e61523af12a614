"""Does the router know the engines' caches? What it expected them to find, against what they say that they found. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST = 50
"""Requests of an engine before it is judged."""
WINDOW = 200
"""Requests that count, about: older ones ever less."""
LASTS_S = 60.0
"""A disagreement that is over sooner is a burst, a restart or a flush, and no news."""
ALARM, CALM = 0.5, 0.25
"""Shares of tokens at which an alarm begins, and ends."""
MAX_ENGINES = 1024

UNEXPECTED, MISSING = "unexpected", "missing"
NAMES = (
    "the router names pages otherwise than the engine. Compare --page-size, the tokenizer, the chat template and its defaults,"
    ' whether the engine runs EAGLE, and "format" in its --kv-events-config'
)
_ADVICE = {
    UNEXPECTED: "either nothing is known of its cache (are --kv-events-config and the masters set, and do they answer?), or "
    + NAMES,
    MISSING: (
        "it drops pages sooner than the router hears of it (set --kv-events-config, with a replay_endpoint), does not load them"
        " (--disable-radix-cache, a prefetch policy that does not wait), or " + NAMES
    ),
}
_NAMESPACED = (
    "only requests with an adapter, an extra key or a salt disagree: give the router the adapters with the paths that"
    ' --lora-paths has, and set "format": "dynamo" in --kv-events-config on both sides'
)


@dataclass
class _Sums:
    """Tokens, of which older ones have faded."""

    requests: float = 0.0
    expected: float = 0.0
    found: float = 0.0
    wrong: dict[str, float] = field(default_factory=lambda: {UNEXPECTED: 0.0, MISSING: 0.0})
    plainly_wrong: dict[str, float] = field(default_factory=lambda: {UNEXPECTED: 0.0, MISSING: 0.0})
    """The same of requests without adapter, extra key and salt."""

    def add(self, expected: int, found: int, wrong: Mapping[str, int], namespaced: bool) -> None:
        keep = 1 - 1 / WINDOW
        self.requests = self.requests * keep + 1
        self.expected = self.expected * keep + expected
        self.found = self.found * keep + found
        for kind, tokens in wrong.items():
            self.wrong[kind] = self.wrong[kind] * keep + tokens
            self.plainly_wrong[kind] = self.plainly_wrong[kind] * keep + (0 if namespaced else tokens)

    def share(self, kind: str) -> float:
        """Of what was found, or expected, what was not expected, or not found."""
        whole = self.found if kind == UNEXPECTED else self.expected
        return self.wrong[kind] / whole if whole else 0.0


@dataclass
class _Engine:
    sums: _Sums = field(default_factory=_Sums)
    since: dict[str, float] = field(default_factory=dict)
    """Kind -> when its share went above ALARM, if it has not been below CALM since."""
    told: set[str] = field(default_factory=set)
    problem: str = ""


class Agreement:
    """Judges each engine by its last requests. Bounded; time comes in; not thread-safe."""

    def __init__(self, least: int = LEAST, lasts_s: float = LASTS_S) -> None:
        self._least, self._lasts_s = least, lasts_s
        self._engines: OrderedDict[str, _Engine] = OrderedDict()
        self.tokens = {"expected": 0, "found": 0, UNEXPECTED: 0, MISSING: 0}
        """Of all engines since the start."""

    def observe(self, engine: str, expected: int, found: int, now: float, *, known: int = 0, namespaced: bool = False) -> str:
        """Of one request whose pages were read: tokens that this engine was expected to have or to be sent, and those that it
        reports as cached; `known` to be anywhere, where that is more: an engine may fetch what nobody told it to. Returns what
        to log, once for each disagreement that begins; else "".

        Requests without either say nothing, and an engine never finds the last token: round to whole pages before that."""
        wrong = {UNEXPECTED: max(0, found - max(expected, known)), MISSING: max(0, expected - found)}
        for name, tokens in {"expected": expected, "found": found, **wrong}.items():
            self.tokens[name] += tokens
        if not expected and not found:
            return ""
        entry = self._engines.setdefault(engine, _Engine())
        self._engines.move_to_end(engine)
        while len(self._engines) > MAX_ENGINES:
            self._engines.popitem(last=False)
        entry.sums.add(expected, found, wrong, namespaced)
        return self._judge(engine, entry, now)

    def forget(self, engine: str) -> None:
        """It is gone, or another one now."""
        self._engines.pop(engine, None)

    def problems(self) -> Mapping[str, str]:
        """By engine: in what it disagrees, and what to do. Those that agree are left out."""
        return {engine: entry.problem for engine, entry in self._engines.items() if entry.problem}

    def _judge(self, engine: str, entry: _Engine, now: float) -> str:
        news = ""
        sums = entry.sums
        if sums.requests < min(self._least, WINDOW / 2):
            return ""
        for kind in (UNEXPECTED, MISSING):
            share = sums.share(kind)
            if share < CALM:
                entry.since.pop(kind, None)
                entry.told.discard(kind)
            elif share > ALARM:
                entry.since.setdefault(kind, now)
            if kind in entry.since and now - entry.since[kind] >= self._lasts_s and kind not in entry.told:
                entry.told.add(kind)
                news = _sentence(engine, kind, sums)
        if news:
            entry.problem = news
        elif not entry.told:
            entry.problem = ""
        return news


def _sentence(engine: str, kind: str, sums: _Sums) -> str:
    share = f"{sums.share(kind):.0%}"
    what = {
        UNEXPECTED: f"{share} of the tokens that {engine} finds in a cache were not expected there",
        MISSING: f"{share} of the tokens that {engine} was expected to find in a cache are not there",
    }[kind]
    plain = sums.plainly_wrong[kind] > 0.1 * sums.wrong[kind]
    return f"{what}: {_ADVICE[kind] if plain else _NAMESPACED}"
