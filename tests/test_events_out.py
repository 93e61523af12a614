"""KV events of the pool: who follows them believes of each node what the node holds, or less, and never more for long."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hicache_master import events_out
from hicache_master.core import MasterCore
from hicache_master.events_out import END_SEQ, MAX_BATCH_HASHES, RESYNC_EVERY_S, SNAPSHOT, EventsOut
from hicache_master.shard import Shard

from hicache_mooncake.protocol import (
    COLD,
    DRAM,
    ClearNamespace,
    Engines,
    Leave,
    RankIdentity,
    Snapshot,
    Update,
    shard_of,
    split,
)
from hicache_mooncake.sharing import PREFILL
from tests.events_listener import Listener, key_of
from tests.test_link_core import Cold, Net, Source, joined, page_hash
from tests.test_master_core import NS, OTHER, Master, hashes
from tests.test_sharing import engine

A, B = "kv@a@tiny", "kv@b@tiny"
POOL, DISK = "EXTERNAL", "DISK"


def described(namespace: bytes = NS, name: str = "e", tp: int = 1, model: str = "tiny") -> list[RankIdentity]:
    """An engine whose first rank has its KV pool in this namespace, and whose other parts are in others."""
    ranks = engine(name, PREFILL, tp=tp, sides=("indexer",), model=model)
    ranks[0].pools[0] = msgspec.structs.replace(ranks[0].pools[0], namespaces=[namespace])
    return ranks


def keys(*numbers: int) -> set[int]:
    return {key_of(each) for each in split(hashes(*numbers))}


def held(medium: str, *numbers: int) -> set[tuple[str, int]]:
    return {(medium, key) for key in keys(*numbers)}


class Telling(Master):
    """A master, and somebody who hears all that it publishes."""

    def __init__(self, kept: int = 1 << 20, **options: int) -> None:
        super().__init__(events_kept_bytes=kept, **options)
        self.listener = Listener()
        assert self.core.events is not None
        self.out: EventsOut = self.core.events

    def describe(self, node: str, ranks: list[RankIdentity]) -> None:
        self.take(Engines(node, b"i1", 1, ranks), node.encode())

    def with_engine(self, *nodes: str) -> Telling:
        for node in nodes:
            self.join(node)
            self.describe(node, described())
        return self

    def hear(self) -> dict[str, set[tuple[str, int]]]:
        for batch in self.out.take(self.now):
            self.listener.hear(*batch)
        self.out.validate()
        return dict(self.listener.holds)

    def replayed(self, *request: bytes, client: bytes = b"c") -> list[list[bytes]]:
        """All frames of the answer to this request, but for the end, which must be there."""
        self.out.ask(client, request, self.now)
        frames = []
        for replay in self.out.replays:
            more = True
            while more:
                frames.append(self.out.next_answer(replay))
                more = self.out.answered(replay, self.now)
        assert frames.pop() == [b"", END_SEQ, b""]
        self.out.validate()
        return frames


@pytest.fixture
def master() -> Telling:
    return Telling()


# --------------------------------------------------------------------------- what is told


def test_pages_are_told_by_the_first_8_bytes_of_their_hashes_with_their_tier_and_page_size(master: Telling) -> None:
    master.with_engine("a")
    master.update("a", 1, (1, 2))
    master.take(Update("a", b"i1", 2, [(NS, hashes(2, 3))], [], COLD), b"a")
    assert master.hear() == {A: held(POOL, 1, 2) | held(DISK, 2, 3)}
    assert master.listener.sizes == {64}
    master.update("a", 3, (), (2,))
    assert master.hear() == {A: held(POOL, 1) | held(DISK, 2, 3)}


def test_a_topic_begins_with_a_clear_since_an_earlier_life_of_the_master_may_have_said_anything(master: Telling) -> None:
    master.with_engine("a")
    master.update("a", 1, (1,))
    master.hear()
    master.update("a", 2, (2,))
    master.hear()
    assert [kind for _, kind in master.listener.events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]


def test_each_node_and_model_has_a_topic_with_numbers_of_its_own(master: Telling) -> None:
    master.with_engine("a", "b").describe("b", described(OTHER, "f", model="large"))
    master.update("a", 1, (1,))
    master.update("b", 1, (2,))
    master.take(Update("b", b"i1", 2, [(OTHER, hashes(3))], []), b"b")
    assert [(topic, seq) for topic, seq, _ in master.out.take(0.0)] == [(A.encode(), 0), (B.encode(), 0), (b"kv@b@large", 0)]
    master.update("b", 3, (4,))
    assert [(topic, seq) for topic, seq, _ in master.out.take(0.0)] == [(B.encode(), 1)]


def test_only_the_kv_pool_of_an_engines_first_rank_is_told_and_nothing_that_nobody_described(master: Telling) -> None:
    ranks = described(tp=2)
    master.join("a")
    master.describe("a", ranks)
    others = [pool.namespaces[0] for rank in ranks for pool in rank.pools if pool.namespaces[0] != NS]
    assert len(others) == 3
    master.take(Update("a", b"i1", 1, [(namespace, hashes(9)) for namespace in [*others, OTHER]], []), b"a")
    assert master.hear() == {}
    master.update("a", 2, (1,))
    assert master.hear() == {A: held(POOL, 1)}


def test_a_large_update_is_told_in_bounded_batches(master: Telling) -> None:
    master.with_engine("a")
    numbers = tuple(range(2 * MAX_BATCH_HASHES + 10))
    master.update("a", 1, numbers, (1,))
    assert master.hear() == {A: held(POOL, *numbers)}
    assert master.listener.largest == MAX_BATCH_HASHES
    assert master.listener.gaps == 0


def test_a_master_of_one_shard_tells_of_its_pages_alone() -> None:
    master = Telling(shard=(1, 2)).with_engine("a")  # type: ignore[arg-type]
    master.update("a", 1, tuple(range(50)))
    own = [n for n in range(50) if shard_of(hashes(n), 2) == 1]
    assert 0 < len(own) < 50
    assert master.hear() == {A: held(POOL, *own)}


def test_an_update_that_came_before_is_not_told_again(master: Telling) -> None:
    master.with_engine("a")
    master.update("a", 1, (1,))
    master.update("a", 2, (), (1,))
    master.update("a", 1, (1,))
    assert master.hear() == {A: set()}


# --------------------------------------------------------------------------- nodes and engines that come and go


def test_pages_that_were_there_before_their_engine_said_who_it_is_are_asked_for_once(master: Telling) -> None:
    master.join("a")
    master.join("b")
    master.update("a", 1, (1,))
    assert not master.beat("a", 1).want_snapshot
    master.describe("b", described())
    assert not master.beat("b", 0).want_snapshot, "it holds nothing of it"
    assert master.beat("a", 1).want_snapshot
    master.snapshot("a", 1, 0, True, 1)
    assert master.hear() == {A: held(POOL, 1)}
    master.describe("b", described())
    assert not master.beat("a", 1).want_snapshot


def test_a_snapshot_that_began_before_its_engine_was_described_is_followed_by_another(master: Telling) -> None:
    master.join("a", seq=5)
    master.snapshot("a", 5, 0, False, 1)
    master.describe("a", described())
    master.snapshot("a", 5, 1, True, 2)
    assert master.who(1, 2) == ["a", "a"], "whose answer it does not delay"
    assert master.hear() == {A: held(POOL, 2)}
    assert master.beat("a", 5).want_snapshot
    master.snapshot("a", 5, 0, True, 1, 2)
    assert master.hear() == {A: held(POOL, 1, 2)}
    assert not master.beat("a", 5).want_snapshot


def test_a_snapshot_replaces_what_was_told(master: Telling) -> None:
    master.with_engine("a")
    master.update("a", 1, (1, 2))
    master.hear()
    master.update("a", 3, (3,))  # the second got lost
    assert master.hear() == {A: held(POOL, 1, 2, 3)}
    master.snapshot("a", 3, 0, False, 3)
    master.update("a", 4, (4,), (3,))  # overtakes the rest
    master.snapshot("a", 3, 1, True, 5)
    assert master.hear() == {A: held(POOL, 4, 5)}


@pytest.mark.parametrize("end", ["leaves", "dies", "starts anew"])
def test_a_node_that_goes_takes_its_pages_along(master: Telling, end: str) -> None:
    master.with_engine("a", "b")
    master.update("a", 1, (1,))
    master.update("b", 1, (2,))
    master.hear()
    match end:
        case "leaves":
            master.take(Leave("a", b"i1"), b"a")
        case "dies":
            master.pass_time(4.0)
            master.beat("b", 1)
            master.pass_time(2.0)
        case _:
            master.join("a", incarnation=b"i2")
    assert master.hear() == {A: set(), B: held(POOL, 2)}
    assert master.listener.gaps == 0


def test_a_node_that_was_silent_is_asked_for_its_pages_when_it_is_back(master: Telling) -> None:
    master.with_engine("a")
    master.update("a", 1, (1,))
    master.pass_time(6.0)
    assert master.hear() == {A: set()}
    master.beat("a", 1)
    master.pass_time(0.1)
    assert master.beat("a", 1).want_snapshot
    master.snapshot("a", 1, 0, True, 1)
    assert master.hear() == {A: held(POOL, 1)}
    master.pass_time(0.1)
    assert not master.beat("a", 1).want_snapshot


def test_a_cleared_namespace_is_told_at_once(master: Telling) -> None:
    master.with_engine("a", "b")
    master.update("a", 1, (1,))
    master.update("b", 1, (2,))
    master.hear()
    master.take(ClearNamespace(OTHER, "b"), b"b")
    assert master.hear() == {A: held(POOL, 1), B: held(POOL, 2)}, "nobody told of that one"
    master.take(ClearNamespace(NS, "b"), b"b")
    assert master.hear() == {A: set(), B: set()}
    assert not master.beat("a", 1).want_snapshot, "there is nothing else on its topic"


def test_what_shares_a_topic_with_a_cleared_namespace_is_told_anew(master: Telling) -> None:
    master.with_engine("a").describe("a", described(OTHER, "f"))
    master.update("a", 1, (1,))
    master.take(Update("a", b"i1", 2, [(OTHER, hashes(2))], []), b"a")
    assert master.hear() == {A: held(POOL, 1, 2)}
    master.take(ClearNamespace(NS, "elsewhere"), b"x")
    assert master.hear() == {A: set()}
    assert master.beat("a", 2).want_snapshot
    master.take(Snapshot("a", b"i1", 2, 0, True, [(OTHER, hashes(2))]), b"a")
    assert master.hear() == {A: held(POOL, 2)}


def test_a_page_stored_anew_in_a_namespace_that_is_known_is_told_after_its_engine_is_gone(master: Telling) -> None:
    master.with_engine("a")
    master.update("a", 1, (1,))
    master.describe("a", [])
    master.update("a", 2, (), (1,))
    assert master.hear() == {A: set()}


def test_namespaces_beyond_the_bound_are_forgotten_with_their_pages(master: Telling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_out, "MAX_NAMESPACES", 1)
    master.with_engine("a")
    master.update("a", 1, (1,))
    master.hear()
    master.describe("a", described(OTHER, "f"))
    master.update("a", 2, (2,))
    master.take(Update("a", b"i1", 3, [(OTHER, hashes(3))], []), b"a")
    assert master.hear() == {A: held(POOL, 3)}


def test_what_is_forgotten_first_is_of_the_engine_that_is_gone_for_longest(
    master: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_out, "MAX_NAMESPACES", 3)
    spaces = [bytes([n]) * 16 for n in range(4)]
    master.join("a")
    master.with_engine("b").describe("b", described(spaces[0], "living"))
    for n in (1, 2, 1, 3):
        master.describe("a", described(spaces[n], f"e{n}"))
    for seq, n in enumerate(range(4), 1):
        master.take(Update("a", b"i1", seq, [(spaces[n], hashes(n))], []), b"a")
    assert master.hear() == {A: held(POOL, 0, 1, 3)}


def test_a_topic_beyond_the_bound_is_cleared(master: Telling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_out, "MAX_TOPICS", 1)
    master.with_engine("a", "b")
    master.update("a", 1, (1,))
    master.hear()
    master.update("b", 1, (2,))
    assert master.hear() == {A: set(), B: held(POOL, 2)}


# --------------------------------------------------------------------------- who missed something


def published(master: Telling, count: int, node: str = "a") -> None:
    """So many batches, a page each."""
    for seq in range(1, count + 1):
        master.update(node, seq, (seq,))
        master.hear()


def numbers(frames: list[list[bytes]]) -> list[tuple[str, int]]:
    return [(topic.decode(), int.from_bytes(seq, "big")) for topic, seq, _ in frames]


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def test_who_missed_batches_gets_them_again_as_they_were(master: Telling) -> None:
    master.with_engine("a", "b")
    published(master, 5)
    published(master, 3, "b")
    assert numbers(master.replayed(number(3), A.encode())) == [(A, 3), (A, 4)]
    assert numbers(master.replayed(number(2))) == [(A, 2), (A, 3), (A, 4), (B, 2)], "of all topics, as SGLang's subscribers ask"
    late = Listener()
    for topic, seq, payload in master.replayed(number(0)):
        late.hear(topic, int.from_bytes(seq, "big"), payload)
    assert late.holds == master.listener.holds
    assert not master.beat("a", 5).want_snapshot


def test_a_replay_ends_with_what_was_published_when_it_was_asked_for_and_may_take_long(master: Telling) -> None:
    master.with_engine("a")
    published(master, 2)
    master.out.ask(b"c", [number(0)], master.now)
    (replay,) = master.out.replays
    assert master.out.next_answer(replay) == master.out.next_answer(replay), "until it is sent"
    assert master.out.answered(replay, master.now)
    master.update("a", 3, (3,))
    master.hear()
    assert master.out.next_answer(replay)[1] == number(1)
    master.out.answered(replay, master.now)
    assert master.out.next_answer(replay)[1] == END_SEQ
    assert not master.out.answered(replay, master.now)
    assert master.out.replays == []


def test_what_is_kept_is_bounded_and_what_is_not_kept_any_more_is_sent_anew_by_its_node() -> None:
    master = Telling(kept=4_000).with_engine("a", "b")
    published(master, 3, "b")
    published(master, 30)
    kept = numbers(master.replayed(number(25), A.encode()))
    assert kept == [(A, seq) for seq in range(25, 30)]
    master.pass_time(0.1)
    assert not master.beat("a", 30).want_snapshot
    oldest = numbers(master.replayed(number(0), A.encode()))[0][1]
    assert oldest > 0
    master.pass_time(0.1)
    assert master.beat("a", 30).want_snapshot
    assert not master.beat("b", 3).want_snapshot
    late = Listener()
    master.listener = late
    master.snapshot("a", 30, 0, True, *range(1, 31))
    assert master.hear() == {A: held(POOL, *range(1, 31))}


def test_a_late_subscriber_that_asks_is_told_of_all_pages_of_all_nodes(master: Telling) -> None:
    master.with_engine("a", "b")
    master.update("a", 1, (1,))
    master.update("b", 1, (2,))
    master.hear()
    master.listener = Listener()
    assert master.replayed(SNAPSHOT) == []
    master.pass_time(0.1)
    for node, page in (("a", 1), ("b", 2)):
        assert master.beat(node, 1).want_snapshot
        master.snapshot(node, 1, 0, True, page)
    assert master.hear() == {A: held(POOL, 1), B: held(POOL, 2)}


def test_snapshots_for_subscribers_come_at_most_once_in_a_while_and_none_is_forgotten(master: Telling) -> None:
    master.with_engine("a", "b")
    published(master, 1)
    published(master, 1, "b")
    master.replayed(SNAPSHOT, A.encode())
    master.pass_time(0.1)
    assert [master.beat(node, 1).want_snapshot for node in "ab"] == [True, False]
    master.snapshot("a", 1, 0, True, 1)
    master.replayed(SNAPSHOT)
    for _ in range(int(RESYNC_EVERY_S) - 1):
        master.pass_time(1.0)
        assert [master.beat(node, 1).want_snapshot for node in "ab"] == [False, False]
    master.pass_time(2.0)
    assert [master.beat(node, 1).want_snapshot for node in "ab"] == [True, True]
    assert master.out.stats.snapshots == 2


def test_requests_that_make_no_sense_and_too_many_are_dropped(master: Telling) -> None:
    master.with_engine("a")
    published(master, 1)
    for request in ([], [b"give"], [number(0), b"x", b"y"]):
        master.out.ask(b"c", request, master.now)
    assert master.out.replays == []
    for client in range(events_out.MAX_REPLAYS + 4):
        master.out.ask(b"%d" % client, [number(0)], master.now)
    assert len(master.out.replays) == events_out.MAX_REPLAYS
    assert master.out.stats.dropped == 3 + 4


def test_a_subscriber_that_does_not_take_its_answer_is_given_up(master: Telling) -> None:
    master.with_engine("a")
    published(master, 1)
    master.out.ask(b"slow", [number(0)], master.now)
    master.out.ask(b"gone", [number(0)], master.now)
    slow, gone = master.out.replays
    master.out.stalled(gone, master.now, gone=True)
    master.out.stalled(slow, master.now + 1)
    assert [replay.client for replay in master.out.replays] == [b"slow"]
    master.out.stalled(slow, master.now + events_out.REPLAY_STALLED_S + 1)
    assert master.out.replays == []


def test_a_master_that_publishes_nothing_keeps_nothing_for_it() -> None:
    assert MasterCore(b"m").events is None


def test_what_is_kept_holds_its_bounds_whatever_happens() -> None:
    rng = random.Random(5)
    out = EventsOut(Shard(), keep_bytes=20_000)
    out.describe(described())
    for seq in itertools.count(1):
        out.changed(rng.choice("abc"), rng.choice((DRAM, COLD)), [(NS, hashes(*range(rng.randrange(200))))], [])
        if rng.random() < 0.1:
            out.cleared(rng.choice("abc"))
        out.take(float(seq))
        out.validate()
        if seq == 300:
            break


@pytest.mark.parametrize("seed", range(4))
def test_over_a_bad_network_a_subscriber_ends_up_with_what_the_nodes_hold(seed: int) -> None:
    """Messages are lost, repeated and out of order; pages come, go and move between tiers; a namespace is cleared; a node
    starts anew."""
    net, rng, listener = Net(seed), random.Random(seed), Listener()
    core = net.master("m1", events_kept_bytes=0)
    colds = {name: Cold() for name in "ab"}

    def start(name: str) -> None:
        net.node(name, "m1", cold=colds[name]).engines = rng.randrange(1, 1 << 30), described()

    def listen() -> bool:
        assert core.events is not None
        for batch in core.events.take(net.now):
            listener.hear(*batch)
        for name, node in net.nodes.items():
            if node.source.cleared:  # a cold tier forgets too
                node.source.cleared.clear()
                colds[name].source.remove(*list(colds[name].source.held))
        return False

    start("a")
    start("b")
    net.until(lambda: joined(net), 10)
    net.bad = True
    for turn in range(150):
        name = rng.choice("ab")
        source = rng.choice((net.nodes[name].source, colds[name].source))
        source.add(*(rng.randrange(60) for _ in range(4)))
        source.remove(*(rng.randrange(60) for _ in range(4)))
        if turn == 60:
            colds["a"].source = Source()
            start("a")
        if turn == 90:
            net.nodes["b"].source.on_clear(NS)
            net.nodes["b"].core.clear_namespace(NS)
        net.run(rng.random(), listen)
    net.bad = False
    net.run(90.0, listen)
    for name in "ab":
        in_dram, in_cold = net.nodes[name].source.held, colds[name].source.held
        expected = {(POOL, key_of(page_hash(n))) for n in in_dram} | {(DISK, key_of(page_hash(n))) for n in in_cold}
        assert listener.holds[f"kv@{name}@tiny"] == expected
    assert listener.gaps == 0
