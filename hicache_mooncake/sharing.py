"""Which prefill and decode engines can never find each other's pages, and in what they differ. No I/O, no clock.

Both sides of a cluster write into one pool, and a page is found only where all that decides about its bytes is equal
(`hicache_mooncake.keys`) and both hash their tokens alike. Where that is not so nothing fails: every lookup is a miss. So ranks
say what they store, and the engines are compared here, by a master for its cluster and by a node without one for its host.
What is said is for people alone: no page is found or refused by it.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from hicache_mooncake.protocol import PageKind, RankIdentity, Unshared

PREFILL, DECODE = "prefill", "decode"
TREE, OFFLOAD = "tree", "offload"
PLAIN, BIGRAMS = "plain", "bigrams"
KV = "kv"

MAX_RANKS = 2048
"""Told by all sources together. Beyond it the source that was told of longest ago goes."""
MAX_RANKS_OF_SOURCE = 64
MAX_RANK_BYTES = 16 << 10
MAX_UNSHARED = 16
MAX_ENGINES = 512
"""Of a role. More are not compared."""
MAX_KINDS = 16
"""Prefill engines that differ from each other, and decode engines likewise. More are not compared."""
SETTLED_S = 10.0
"""An engine is compared when nothing of it has changed for so long: ranks start one after the other."""
EVERY_S = 1.0
"""Engines are compared no more often: in a large cluster it takes tens of milliseconds."""
_MAX_TEXT = 120
_MAX_DIFFERENCES = 12

_FOLLOWS = {
    "tp_rank": ("tp_size",),
    "heads": ("tp_size",),
    "pp_rank": ("pp_size",),
    "cp_rank": ("cp_size",),
    "dcp_rank": ("dcp_size",),
    "start_layer": ("pp_size", "layers"),
    "end_layer": ("pp_size", "layers"),
    "layers": ("pp_size", "target_layers"),
    "target_layers": ("pp_size",),
    "draft": ("target_layers",),
}
"""A field that differs is no news where one of these does: it could not be equal then."""
_FOLLOWS_SHARING = frozenset({"layout", "heads", "run_bytes", "tp_rank", "tp_size", "kv_heads"})
"""The same, where only one side shares head by head."""

_ADVICE = {
    "chain": (
        "SGLang hashes pairs of tokens with EAGLE, and its decode offload hashes single ones: take "
        "--disaggregation-decode-enable-radix-cache with --enable-hierarchical-cache for the decode offload, or no EAGLE"
    ),
    "pools": (
        "what prefill needs of a page decode does not store: SGLang's decode offload has the KV pool alone; take "
        "--disaggregation-decode-enable-radix-cache with --enable-hierarchical-cache, and the same draft on both sides"
    ),
    "share_across_tp": "set share_across_tp in the extra config of both sides, or of neither",
    "kv_heads": "set the same kv_heads on both sides",
    "model": "give both sides the same --served-model-name",
    "model_id": "serve the same checkpoint on both sides, or set the same model_id in both extra configs",
    "weight_version": "bring both sides to the same weights, and give both the same weight_version",
    "tag": "set the same tag on both sides",
    "tenant": "set the same tenant on both sides",
    "dtype": "start both sides with the same --dtype and --kv-cache-dtype",
    "kv_cache_dtype": "start both sides with the same --kv-cache-dtype",
    "layout": "start both sides with the same --hicache-mem-layout and --hicache-io-backend, or set share_across_tp on both",
    "storage_format": 'by the dynamic loader set "interface_v1": 1 in the extra config of both sides',
    "page_size": "start both sides with the same --page-size",
    "tp_size": "start both sides with the same tensor-parallel size, or set share_across_tp in the extra config of both",
    "pp_size": "start both sides with the same --pp-size: the stages of the one hold other layers than those of the other",
    "cp_size": "start both sides with the same context parallelism: a decode engine without it shares with no prefill under it",
    "dcp_size": "start both sides with the same --dcp-size",
    "target_layers": "start both sides with the same --speculative options: one packs a draft's layers into its pages",
    "layers": "start both sides with the same --speculative options: one packs a draft's layers into its pages",
    "draft": "start both sides with the same draft model",
    "platform": "pages of different kinds of hardware are not of one form: use the same on both sides",
    "version": "install the same hicache-mooncake release on both sides",
}
_OTHERWISE = "make it equal on both sides"


def clip(rank: RankIdentity) -> RankIdentity | None:
    """The same within bounds: without fields where it is too large; None where it is too large without them."""
    if len(msgspec.msgpack.encode(rank)) <= MAX_RANK_BYTES:
        return rank
    pools = [msgspec.structs.replace(pool, fields={}) for pool in rank.pools]
    rank = msgspec.structs.replace(rank, pools=pools, flags={}, counts={})
    return rank if len(msgspec.msgpack.encode(rank)) <= MAX_RANK_BYTES else None


def told(rank: RankIdentity) -> RankIdentity:
    """What a master is told of it: nothing that changes while nothing happens."""
    return msgspec.structs.replace(rank, flags={}, counts={})


def sentence(pair: Unshared) -> str:
    """What is wrong and what to change, for an operator."""
    if not pair.differences:
        return ""
    parts = [
        f"{name} is {_quoted(prefill)} in prefill and {_quoted(decode)} in decode ({advice(name)})"
        for name, prefill, decode in pair.differences
    ]
    return (
        f"{pair.prefill_label} and {pair.decode_label} never find each other's pages, every lookup of the other's is a miss: "
        f"{'; '.join(parts)}"
    )


def advice(name: str) -> str:
    """What to change where this field differs."""
    return _ADVICE.get(name.rpartition(".")[2], _OTHERWISE)


def _quoted(value: str) -> str:
    return value or "not set"


@dataclass
class Engine:
    """The ranks of one engine that write alike. Not changed any more once it is compared."""

    id: bytes
    label: str
    role: str
    writer: str
    chain: str
    version: str
    ranks: list[RankIdentity] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Has each of its ranks said who it is, and is none of them off?"""
        sizes = {rank.size for rank in self.ranks}
        if len(sizes) != 1 or any(rank.off or not rank.pools for rank in self.ranks):
            return False
        (size,) = sizes
        return {rank.rank for rank in self.ranks} >= set(itertools.product(*(range(n) for n in size)))

    @functools.cached_property
    def namespaces(self) -> dict[str, frozenset[bytes]]:
        """By pool."""
        found: dict[str, set[bytes]] = {}
        for rank in self.ranks:
            for pool in rank.pools:
                found.setdefault(pool.pool, set()).update(pool.namespaces)
        return {name: frozenset(digests) for name, digests in found.items()}

    @functools.cached_property
    def values(self) -> dict[str, dict[str, str]]:
        """What its ranks say of each field of each pool: one text, or several, in order."""
        found: dict[str, dict[str, set[str]]] = {}
        for rank in self.ranks:
            for pool in rank.pools:
                fields = found.setdefault(pool.pool, {})
                for name, value in pool.fields.items():
                    fields.setdefault(name, set()).add(value)
        return {
            pool: {name: ", ".join(sorted(values, key=lambda text: (len(text), text))) for name, values in fields.items()}
            for pool, fields in found.items()
        }


@dataclass(frozen=True)
class Verdict:
    """`unshared`: the first of them. `engines`: the ids of all engines that something is wrong with."""

    unshared: tuple[Unshared, ...] = ()
    engines: frozenset[bytes] = frozenset()

    def of(self, engines: Iterable[bytes]) -> list[Unshared]:
        """What concerns any of these."""
        mine = set(engines)
        return [pair for pair in self.unshared if pair.prefill in mine or pair.decode in mine]


@dataclass(frozen=True)
class _Kind:
    """Engines that store and find alike."""

    engines: list[Engine]

    @property
    def first(self) -> Engine:
        return self.engines[0]


class SharingTable:
    """What ranks have said, by who passed it on (`source`), and what comes of it. Not thread-safe.

    The two sides of a cluster: a prefill and a decode engine are meant to share when they have tag, tenant, and model or
    weights in common. Where an engine finds nobody like that, one of the other role is meant that has no partner either: the
    name may be what differs. Engines that are neither prefill nor decode are not compared.
    """

    def __init__(self) -> None:
        self._sources: OrderedDict[str, tuple[int, list[RankIdentity]]] = OrderedDict()
        self._count = 0
        self._changed: dict[tuple[bytes, str], float] = {}
        self._due: float | None = None
        self._judged_at = float("-inf")
        self._verdict = Verdict()
        self._page_kinds: list[PageKind] | None = None

    def put(self, source: str, ranks: Sequence[RankIdentity], now: float, number: int = 0) -> None:
        """The ranks of this source are these, in place of those before. `number` is remembered."""
        bounded = [rank for rank in map(clip, ranks[-MAX_RANKS_OF_SOURCE:]) if rank is not None]
        _, before = self._sources.pop(source, (0, []))
        self._count += len(bounded) - len(before)
        self._sources[source] = number, bounded
        self._touch(before, bounded, now)
        while self._count > MAX_RANKS:
            self.drop(next(iter(self._sources)), now)

    def drop(self, source: str, now: float) -> None:
        """This source is gone, and its ranks are with it."""
        _, before = self._sources.pop(source, (0, []))
        self._count -= len(before)
        self._touch(before, [], now)

    def __contains__(self, source: str) -> bool:
        return source in self._sources

    def number(self, source: str) -> int:
        """As given last; 0 for one that is not there."""
        return self._sources.get(source, (0, []))[0]

    def ids(self, source: str) -> set[bytes]:
        """The engines that this source told of."""
        return {rank.engine for rank in self._sources.get(source, (0, []))[1]}

    def ranks(self) -> list[RankIdentity]:
        return [rank for _, ranks in self._sources.values() for rank in ranks]

    def roles(self) -> dict[str, int]:
        """Engines by role: prefill, decode, both."""
        return dict(Counter(role or "both" for role in {rank.engine: rank.role for rank in self.ranks()}.values()))

    def page_kinds(self) -> list[PageKind]:
        """What pages are made of, once for all complete engines that store alike; MAX_KINDS at most."""
        if self._page_kinds is None:
            self._page_kinds = page_kinds(self._engines())
        return self._page_kinds

    def verdict(self, now: float) -> Verdict:
        """The engines that can never share. Engines whose ranks are not all there, or have just come, are not judged."""
        if self._due is None or now < max(self._due, self._judged_at + EVERY_S):
            return self._verdict
        self._due, self._judged_at = None, now
        ready: dict[str, list[Engine]] = {PREFILL: [], DECODE: []}
        all_there = True
        for engine in self._engines():
            if engine.role not in ready:
                continue
            settled_at = self._changed[engine.id, engine.writer] + SETTLED_S
            if now < settled_at:
                self._due = settled_at if self._due is None else min(self._due, settled_at)
            if now < settled_at or len(ready[engine.role]) >= MAX_ENGINES or not engine.complete:
                all_there = False
            else:
                ready[engine.role].append(engine)
        self._verdict = judge(ready[PREFILL], ready[DECODE], all_there=all_there)
        return self._verdict

    def validate(self) -> None:
        """For tests, after every event."""
        assert self._count == sum(len(ranks) for _, ranks in self._sources.values()) <= MAX_RANKS
        assert all(len(ranks) <= MAX_RANKS_OF_SOURCE for _, ranks in self._sources.values())
        assert set(self._changed) == {(rank.engine, rank.writer) for rank in self.ranks()}
        assert len(self._verdict.unshared) <= MAX_UNSHARED

    def sources(self) -> list[str]:
        return list(self._sources)

    def _touch(self, before: Sequence[RankIdentity], after: Sequence[RankIdentity], now: float) -> None:
        self._page_kinds = None
        there = {(rank.engine, rank.writer) for rank in self.ranks()}
        for rank in [*before, *after]:
            key = rank.engine, rank.writer
            if key not in there:
                self._changed.pop(key, None)
            elif told(rank) not in map(told, before) or told(rank) not in map(told, after):
                self._changed[key] = now
            else:
                continue
            self._due = now

    def _engines(self) -> list[Engine]:
        found: dict[tuple[bytes, str], Engine] = {}
        for rank in self.ranks():
            engine = found.setdefault(
                (rank.engine, rank.writer),
                Engine(rank.engine, rank.label[:_MAX_TEXT], rank.role, rank.writer, rank.chain, rank.version),
            )
            engine.ranks.append(rank)
        return list(found.values())


def page_kinds(engines: Iterable[Engine]) -> list[PageKind]:
    """Of those that are complete, once for all that store alike; MAX_KINDS at most."""
    found: dict[object, PageKind] = {}
    for engine in engines:
        if not engine.complete:
            continue
        pools = engine.namespaces
        first = KV if KV in pools else min(pools)
        every = pools[first]
        last = frozenset[bytes]().union(*(digests for pool, digests in pools.items() if pool != first)) - every
        key = engine.chain, every, last
        if key not in found:
            if len(found) >= MAX_KINDS:
                continue
            found[key] = PageKind(sorted(every), sorted(last), engine.chain, [], _deployment(engine)["model"])
        kind = found[key]
        kind.engines += 1
        if engine.role not in kind.roles:
            kind.roles.append(engine.role)
    return list(found.values())


# --------------------------------------------------------------------------- comparing


def judge(prefills: Sequence[Engine], decodes: Sequence[Engine], *, all_there: bool = True) -> Verdict:
    """Which of these complete engines have no partner of the other role although one is meant to be it. `all_there`: no other
    engine is just starting that may be the partner of one that is alone."""
    left, right = _kinds(prefills), _kinds(decodes)
    shares = {(i, j): _share(p, d) for i, p in enumerate(left) for j, d in enumerate(right)}
    alone_left = [i for i in range(len(left)) if not any(shares[i, j] for j in range(len(right)))]
    alone_right = [j for j in range(len(right)) if not any(shares[i, j] for i in range(len(left)))]
    differ = functools.cache(lambda i, j: differences(left[i].first, right[j].first))
    pairs: dict[tuple[bytes, bytes], Unshared] = {}
    alone: set[bytes] = set()

    def add(prefill: Engine, decode: Engine, differing: list[tuple[str, str, str]], lonely: Engine) -> None:
        alone.add(lonely.id)
        known = Unshared(prefill.id, prefill.label, decode.id, decode.label, differing)
        pairs.setdefault((prefill.id, decode.id), known)

    for i in alone_left:
        meant = [j for j in range(len(right)) if _alike(left[i], right[j])] or (alone_right if all_there else [])
        if meant:
            differing, j = min((differ(i, j), j) for j in meant)
            for engine in left[i].engines:
                add(engine, right[j].first, differing[1], engine)
    for j in alone_right:
        meant = [i for i in range(len(left)) if _alike(left[i], right[j])] or (alone_left if all_there else [])
        if meant:
            differing, i = min((differ(i, j), i) for i in meant)
            for engine in right[j].engines:
                add(left[i].first, engine, differing[1], engine)
    return Verdict(tuple(pairs.values())[:MAX_UNSHARED], frozenset(alone))


def differences(prefill: Engine, decode: Engine) -> tuple[int, list[tuple[str, str, str]]]:
    """(how many, the first of them) fields in which these differ: (field, in prefill, in decode). A field that differs only
    because another one does is left out."""
    found: list[tuple[str, str, str]] = []
    if prefill.chain != decode.chain:
        found.append(("chain", prefill.chain, decode.chain))
    left, right = prefill.namespaces, decode.namespaces
    missing = left.keys() - right.keys() or (decode.writer == TREE and right.keys() - left.keys())
    if missing:
        found.append(("pools", ", ".join(sorted(left)), ", ".join(sorted(right))))
    seen: set[str] = set()
    for pool in sorted(left.keys() & right.keys(), key=lambda name: (name != "kv", name)):
        if left[pool] == right[pool]:
            continue
        mine, theirs = prefill.values[pool], decode.values[pool]
        differing = [name for name in {**mine, **theirs} if mine.get(name, "") != theirs.get(name, "")]
        for name in _causes(differing):
            if name not in seen:  # what the pools have in common is said once
                seen.add(name)
                shown = name if pool == "kv" else f"{pool}.{name}"
                found.append((shown, mine.get(name, "")[:_MAX_TEXT], theirs.get(name, "")[:_MAX_TEXT]))
    if not found:
        found.append(("version", prefill.version, decode.version))
    return len(found), found[:_MAX_DIFFERENCES]


def _causes(differing: Sequence[str]) -> list[str]:
    names = set(differing)
    if "share_across_tp" in names:
        names -= _FOLLOWS_SHARING
    names = {name for name in names if names.isdisjoint(_FOLLOWS.get(name, ()))}
    if len(names) > 1:
        names.discard("run_bytes")
    return [name for name in differing if name in names]


def _kinds(engines: Sequence[Engine]) -> list[_Kind]:
    found: dict[object, _Kind] = {}
    for engine in engines:
        key = (engine.writer, engine.chain, frozenset(engine.namespaces.items()))
        if key in found:
            found[key].engines.append(engine)
        elif len(found) < MAX_KINDS:
            found[key] = _Kind([engine])
    return list(found.values())


def _share(prefill: _Kind, decode: _Kind) -> bool:
    """Does prefill find what decode writes; and decode, where it reads, what prefill writes?"""
    if prefill.first.chain != decode.first.chain or not _finds(prefill, decode):
        return False
    return decode.first.writer == OFFLOAD or _finds(decode, prefill)


def _finds(reader: _Kind, writer: _Kind) -> bool:
    written = writer.first.namespaces
    return all(digests <= written.get(pool, frozenset()) for pool, digests in reader.first.namespaces.items())


def _alike(prefill: _Kind, decode: _Kind) -> bool:
    """Is it meant to be one cluster?"""
    mine, theirs = _deployment(prefill.first), _deployment(decode.first)
    if (mine["tag"], mine["tenant"]) != (theirs["tag"], theirs["tenant"]):
        return False
    return mine["model"] == theirs["model"] or ("" != mine["model_id"] == theirs["model_id"])


def _deployment(engine: Engine) -> dict[str, str]:
    fields = engine.ranks[0].pools[0].fields
    return {name: fields.get(name, "") for name in ("model", "model_id", "tag", "tenant")}
