"""What the engines of a node's host do with the pool, and why one that does not use it does not: for `status` and `doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache_mooncake.cli.checks import OK, WARN, Check
from hicache_mooncake.protocol import RankIdentity, Unshared
from hicache_mooncake.sharing import BIGRAMS, OFFLOAD, sentence

TITLES = ("engine", "role", "ranks", "writes by", "asked", "found", "loaded", "stored", "what that means")


@dataclass
class EngineUse:
    """An engine as its ranks on this host describe it. `counts`: of each kind that of the rank with the most; pages."""

    label: str
    role: str
    writer: str
    chain: str
    size: int
    ranks: int = 0
    off: str = ""
    shares: bool = True
    flags: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def row(self) -> tuple[str, ...]:
        """Texts under TITLES."""
        figures = (f"{self.counts[name]:,}" for name in ("asked", "found", "loaded", "stored"))
        return (
            self.label,
            self.role or "both",
            f"{self.ranks} of {self.size}",
            f"{self.writer}, pairs of tokens" if self.chain == BIGRAMS else self.writer,
            *figures,
            "; ".join(explain(self)),
        )


def uses(ranks: Sequence[RankIdentity], unshared: Sequence[Unshared]) -> list[EngineUse]:
    """The engines of these ranks, in the order of their names."""
    alone = {engine for pair in unshared for engine in (pair.prefill, pair.decode)}
    found: dict[tuple[bytes, str], EngineUse] = {}
    for rank in ranks:
        size = rank.size[0] * rank.size[1] * rank.size[2]
        use = found.setdefault(
            (rank.engine, rank.writer), EngineUse(rank.label, rank.role, rank.writer, rank.chain, size, flags=rank.flags)
        )
        use.ranks += 1
        use.off = use.off or rank.off
        use.shares = rank.engine not in alone
        use.counts |= Counter(rank.counts)
    return sorted(found.values(), key=lambda use: (use.label, use.writer))


def explain(use: EngineUse) -> list[str]:
    """Why it does not use the pool, as far as counters can tell: a few words each. The last resort is that it does."""
    if use.off:
        return [f"L3 is off: {use.off}"]
    found = [] if use.shares else ["it shares with no engine of the other side"]
    return found + ([] if use.writer == OFFLOAD else _reading(use)) + _writing(use) or ["in use"]


def _reading(use: EngineUse) -> list[str]:
    counts, threshold = use.counts, use.flags.get("prefetch_threshold", "256")
    if not counts["asked"]:
        return [
            f"never asked: no prompt lacked {threshold} tokens (prefetch_threshold) in L1 and L2, or there was none; "
            "POST /flush_cache empties both"
        ]
    if not counts["found"]:
        return ["asked, and nothing was there: nobody has stored these prompts, or under another identity"]
    if not counts["wanted"]:
        return [
            f"found, and never loaded: less than {threshold} tokens each time (prefetch_threshold), no room in the host pool, "
            "or the request went ahead"
        ]
    if not counts["loaded"]:
        return ["every load failed: see the misses by reason"]
    if use.flags.get("prefetch_policy") == "best_effort" and 2 * counts["loaded"] < counts["found"]:
        return ["less than half of what was found is loaded: best_effort stops a prefetch when its request is scheduled"]
    return []


def _writing(use: EngineUse) -> list[str]:
    counts, policy = use.counts, use.flags.get("write_policy", "")
    if not counts["offered"]:
        if use.writer == OFFLOAD:
            return ["wrote nothing yet: only whole pages of answers are written"]
        when = {
            "write_through_selective": ": pages are written when they are asked for a second time (write_through_selective)",
            "write_back": ": pages are written when the GPU evicts them (write_back)",
        }
        return [f"wrote nothing yet{when.get(policy, '')}"]
    if not counts["stored"]:
        return ["every store failed: see the misses by reason"]
    return ["writes, and reads nothing by design"] if use.writer == OFFLOAD else []


def check(ranks: Sequence[RankIdentity], unshared: Sequence[Unshared]) -> Check:
    """A finding of `doctor`."""
    name, found = "engines", uses(ranks, unshared)
    if not found:
        return Check(name, OK, "none of this host has said who it is: none runs with this backend, or only just")
    roles = Counter(use.role or "both" for use in found)
    text = f"{len(found)} on this host: {', '.join(f'{count} {role}' for role, count in sorted(roles.items()))}"
    table = (TITLES, *(use.row() for use in found))
    if unshared:
        return Check(name, WARN, f"{text}; some can never share", "; ".join(sentence(pair) for pair in unshared), table)
    if any(use.off for use in found):
        return Check(name, WARN, f"{text}; L3 is off for some", "see their logs", table)
    return Check(name, OK, text, "", table)
