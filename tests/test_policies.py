"""Which page goes first: the order that policies keep, what they make of real requests, and that the books hold under each."""

from __future__ import annotations

import itertools
import os
import random
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule, run_state_machine_as_test

from benchmarks.eviction import PolicyAlone, RealStore, Trace, merge, orphan_share, read_trace, replay
from hicache_mooncake.config_values import EVICTIONS
from hicache_mooncake.node.allocator import GRANULE
from hicache_mooncake.node.policy import POLICIES, Evictable, Policy, make_policy
from hicache_mooncake.node.policy.adaptive import Adaptive
from hicache_mooncake.node.policy.ghosts import Ghosts
from hicache_mooncake.node.policy.queue import Queue, leave
from hicache_mooncake.node.store import GUEST, OWN, REPLICA, LogicalPage, Store
from hicache_mooncake.protocol import FETCH, WRITE
from hicache_mooncake.testing.local import page_hash

NS, OTHER, MODEL = b"n" * 16, b"o" * 16, b"g" * 16
TRACES = Path(os.environ.get("HICACHE_TRACES", "traces"))

every_policy = pytest.mark.parametrize("policy", list(POLICIES))


class Busy(Evictable, gc=False, eq=False):
    """A page of which the test says whether it is in use."""

    busy: bool = False

    @property
    def in_use(self) -> bool:
        return self.busy


def chain(name: object, pages: int) -> list[Busy]:
    return [Busy(page_hash((name, i))) for i in range(pages)]


def evict(policy: Policy[Any], count: int = 1) -> list[Any]:
    gone = []
    for _ in range(count):
        (page,) = policy.victims(1)
        policy.removed((page,), evicted=True)
        gone.append(page)
    return gone


def test_the_setting_offers_every_policy_but_the_one_for_comparisons() -> None:
    assert set(EVICTIONS) == set(POLICIES) - {"s3fifo"}
    with pytest.raises(ValueError, match="must be one of adaptive, lru"):
        make_policy("random")
    with pytest.raises(ValueError, match="'random'"):
        Store(GRANULE, policy="random")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["append", "append", "leave", "victim"]), st.lists(st.integers(0, 400), max_size=300)))
)
def test_a_queue_is_an_ordered_dict_at_a_fraction_of_its_memory(steps: list[tuple[str, list[int]]]) -> None:
    queues: list[Queue[Busy]] = [Queue(), Queue()]
    models: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]
    pages = [Busy(bytes([n & 255, n >> 8])) for n in range(401)]
    number = {page.hash: n for n, page in enumerate(pages)}
    for at, (what, names) in enumerate(steps):
        queue, model, other = queues[at % 2], models[at % 2], models[1 - at % 2]
        if what == "append":
            queue.append([pages[n] for n in names], at)
            once = dict.fromkeys(names)
            if len(names) > 128:  # of a page in two segments the later place counts, as it is appended later
                last = {n: place // 128 for place, n in enumerate(names)}
                once = dict.fromkeys(n for place, n in enumerate(names) if last[n] == place // 128)
            for n in once:
                other.pop(n, None)
                model.pop(n, None)
                model[n] = None
        elif what == "leave":
            leave([pages[n] for n in names[:5]])
            for n in names[:5]:
                model.pop(n, None)
                other.pop(n, None)
        else:
            for n in names[:5]:
                pages[n].busy = not pages[n].busy
            victims = list(queue.victims(len(names) + 1, at))
            for n in list(model):
                if not pages[n].busy:
                    break
                model.move_to_end(n)
            idle = itertools.takewhile(lambda n: not pages[n].busy, model)
            assert victims == [pages[n] for n in itertools.islice(idle, len(victims))]
            assert len(victims) <= len(names) + 1
            assert victims or all(pages[n].busy for n in model)
        for each, expected in zip(queues, models, strict=True):
            each.validate()
            assert [number[page.hash] for page in each] == list(expected)
            assert [number[page.hash] for page in reversed(each)] == list(reversed(expected))
    for queue in queues:
        queue.clear()
        queue.validate()
    assert all(page.segment is None for page in pages)


@every_policy
def test_a_chains_tail_goes_before_its_head(policy: str) -> None:
    order = make_policy(policy)
    pages = chain("a", 300)
    for first in range(0, 300, 100):  # as SGLang stores it, and then says what belongs together
        order.inserted(pages[first : first + 100])
        order.arranged(pages[first : first + 100])
    order.arranged(pages)
    order.validate()
    assert [page.hash for page in order.coldest()] == [page.hash for page in reversed(pages)]
    order.touched(pages[:150])
    assert evict(order, 300) == pages[::-1]
    assert not order.victims(100)


@every_policy
def test_pages_in_use_stay_and_those_behind_them_go(policy: str) -> None:
    order = make_policy(policy)
    pages = chain("a", 40)
    order.inserted(pages)
    order.touched(pages[:30])
    for page in pages[::2]:
        page.busy = True
    gone = evict(order, 20)
    assert sorted(map(id, gone)) == sorted(map(id, pages[1::2]))
    assert not order.victims(100)
    order.validate()
    for page in pages[::2]:
        page.busy = False
    assert len(evict(order, 20)) == 20
    assert len(order) == 0


@every_policy
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_pages_that_go_together_are_those_that_would_go_one_by_one(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    together, single = make_policy(policy), make_policy(policy)
    pages: dict[bytes, tuple[Busy, Busy]] = {}
    for step in range(40):
        new = chain((seed, step // 2), rng.randrange(1, 60))  # every other one has gone before, in part
        new = [page for page in new if page.hash not in pages]
        pages |= {page.hash: (page, Busy(page.hash)) for page in new}
        together.inserted(new)
        single.inserted([pages[page.hash][1] for page in new])
        for event in ("touched", "arranged"):
            some = rng.sample(sorted(pages), min(len(pages), rng.randrange(30)))
            for which, order in enumerate((together, single)):
                getattr(order, event)([pages[name][which] for name in some])
        for name in rng.sample(sorted(pages), min(len(pages), 3)):
            for page in pages[name]:
                page.busy = not page.busy
        left = rng.randrange(60)
        while left:
            gone = together.victims(left)[: rng.randrange(1, 60)]
            assert len(gone) <= left
            together.removed(gone, evicted=True)
            assert [page.hash for page in gone] == [page.hash for page in evict(single, len(gone))]
            for page in gone:
                del pages[page.hash]
            left -= len(gone)
            if not gone:
                assert not single.victims(1), "all are in use"
                break
        assert [page.hash for page in together.coldest()] == [page.hash for page in single.coldest()]
        together.validate()


@every_policy
def test_looking_at_the_order_does_not_change_it(policy: str) -> None:
    rng = random.Random(3)
    order = make_policy(policy)
    chains = [chain(n, rng.randrange(1, 40)) for n in range(30)]
    for pages in chains:
        order.inserted(pages)
        order.touched(rng.choice(chains[: chains.index(pages) + 1]))
    coldest = list(order.coldest())
    assert coldest == list(order.coldest()) == list(order.hottest())[::-1] or policy == "adaptive"
    assert sorted(map(id, order.hottest())) == sorted(map(id, coldest))
    assert list(order.coldest()) == coldest
    if policy != "s3fifo":  # which gives pages with uses another round, whatever it looks like
        assert evict(order, len(coldest)) == coldest or policy == "cost"


def test_pages_asked_for_again_survive_a_flood_of_pages_that_never_are() -> None:
    """A thousand long prompts pass through, each once; what a conversation needs every while stays."""

    def left(policy: str) -> int:
        order = make_policy(policy)
        talk = chain("talk", 50)
        order.inserted(talk)
        held = 50
        for n in range(1000):
            prompt = chain(n, 20)
            order.inserted(prompt)
            held += 20
            if n % 12 == 0:
                order.touched([page for page in talk if page.segment is not None])
            while held > 200:
                evict(order)
                held -= 1
        return sum(page.segment is not None for page in talk)

    assert left("lru") == 0
    assert left("adaptive") == left("s3fifo") == 50


def test_the_factor_follows_what_comes_back() -> None:
    order: Adaptive[Busy] = Adaptive()
    for n in range(10):
        order.inserted(chain(n, 20))
    before = order.factor
    gone = evict(order, 10)
    order.inserted([Busy(page.hash) for page in reversed(gone)])
    assert order.factor < before, "pages nobody had asked for were let go too soon"
    order.touched(list(order.hottest()))
    before = order.factor
    gone = evict(order, 10)
    order.inserted([Busy(page.hash) for page in reversed(gone)])
    assert order.factor > before
    for _ in range(200):
        gone = evict(order, 10)
        pages = [Busy(page.hash) for page in reversed(gone)]
        order.inserted(pages)
        order.touched(pages)
    assert order.factor == 64.0, "and has an end"


def test_a_page_that_went_is_remembered_for_two_generations_and_no_longer() -> None:
    ghosts = Ghosts()
    ghosts.put([page_hash("a")], 1, 100)
    for n in range(150):
        ghosts.put([page_hash(n)], 1, 100)
    ((_, kind, age),) = ghosts.take([page_hash("b"), page_hash("a")])
    assert kind == 1
    assert 1.1 < age < 1.6
    assert not list(ghosts.take([page_hash("a")])), "once"
    ghosts.put([page_hash("b")], 0, 100)
    for n in range(260):
        ghosts.put([page_hash(("x", n))], 0, 100)
    assert not list(ghosts.take([page_hash("b")]))
    assert len(list(ghosts.take(page_hash(("never", n)) for n in range(5000)))) <= 3
    remembered = list(ghosts.take(page_hash(("x", n)) for n in range(200, 260)))
    assert len(remembered) > 50, "most of them; collisions lose a few"


@every_policy
def test_the_parts_of_a_page_live_and_die_together(policy: str) -> None:
    """P46: K and V of two ranks, an index, and far too little room."""
    rng = random.Random(5)
    spaces = [b"%16d" % n for n in range(5)]
    store = Store(160 * GRANULE, policy=policy, high_watermark=1.0, low_watermark=1.0, max_pinned_share=1.0)
    chains = [[page_hash((n, i)) for i in range(rng.randrange(2, 7))] for n in range(30)]
    for _ in range(400):
        blob = b"".join(rng.choice(chains))
        for namespace in spaces:
            length = GRANULE * (1 + spaces.index(namespace) % 2)
            txn, status, _ = store.reserve(1, namespace, blob, length, MODEL)
            store.commit(1, txn, b"\x01" * status.count(WRITE), [0] * status.count(WRITE))
        for page in store.coldest(1000):
            assert len(page.parts) == 5, "never one without the others"
        store.present(spaces[0], b"".join(rng.choice(chains)))
    store.validate()
    assert store.stats.evicted > 1000


def conversations(seed: int, requests: int = 1500) -> Trace:
    """Forty talks that go on in turns, with others' turns between and a new one for each that ends, and as many prompts that
    come once; all with the same beginning."""
    rng = random.Random(seed)
    fresh = iter(range(1, 10**9))
    talks: list[list[int]] = [[0] for _ in range(40)]
    asked: list[list[int]] = []
    for _ in range(requests):
        if rng.random() < 0.5:
            asked.append([0, *(next(fresh) for _ in range(rng.randrange(5, 50)))])
            continue
        which = rng.randrange(len(talks))
        talks[which] += [next(fresh) for _ in range(rng.randrange(3, 25))]
        asked.append(list(talks[which]))
        if len(talks[which]) > 150:
            talks[which] = [0]
    return Trace("talks", list(range(requests)), asked)


@pytest.mark.parametrize("capacity", [500, 1500, 3000, 8000])
def test_the_default_wins_where_room_is_short_and_is_lru_where_it_is_not(capacity: int) -> None:
    trace = conversations(1)
    hashes = trace.hashes()
    hits = {policy: replay(trace, PolicyAlone(policy, capacity, hashes)) for policy in ("lru", "adaptive")}
    assert hits["adaptive"].hits >= (1.05 if capacity < 3000 else 0.99) * hits["lru"].hits
    assert hits["adaptive"].orphans < 0.001


@pytest.mark.parametrize("policy", ["adaptive", "lru", "cost"])
def test_a_store_hits_what_its_policy_alone_hits(policy: str) -> None:
    """Through lookups, reservations and commits, with pages of one size: nearly the same pages are there."""
    trace = conversations(2, 800)
    hashes = trace.hashes()
    alone, real = PolicyAlone(policy, 1000, hashes), RealStore(policy, 1000, hashes)
    expected, seen = replay(trace, alone), replay(trace, real)
    real.store.validate()
    assert abs(seen.hits - expected.hits) <= 0.03 * expected.hits
    assert seen.orphans < 0.005


def test_orphans_are_pages_behind_a_gap() -> None:
    class Held(PolicyAlone):
        def __init__(self, held: set[int]) -> None:
            self.held = held

        def __contains__(self, block: int) -> bool:
            return block in self.held

        def __len__(self) -> int:
            return len(self.held)

    before = {1: 0, 2: 1, 3: 2, 5: 4}
    assert orphan_share(before, Held({0, 1, 2, 3, 4, 5})) == 0
    assert orphan_share(before, Held({0, 2, 3, 5})) == 3 / 4


# Exact hits of one shared LRU, request by request, at capacities in blocks: conversation, synthetic.
LRU_HITS = {
    488: (12_168, 5_352),
    1_953: (15_370, 17_351),
    5_859: (39_258, 37_703),
    19_531: (82_273, 69_059),
    97_656: (104_870, 77_953),
}


def trace_of(name: str) -> Trace:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}: HICACHE_TRACES names the folder of the public Mooncake traces")
    return read_trace(path)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_lru_hits_on_public_traces_are_exact(name: str) -> None:
    trace = trace_of(name)
    hashes = trace.hashes()
    column = ["conversation", "synthetic"].index(name)
    for capacity, hits in LRU_HITS.items():
        assert replay(trace, PolicyAlone("lru", capacity, hashes), looks=0).hits == hits[column]


@pytest.mark.parametrize("names", [("conversation",), ("synthetic",), ("conversation", "synthetic")], ids="+".join)
def test_the_default_wins_on_public_traces_and_orphans_nothing(names: tuple[str, ...]) -> None:
    """P45: a policy that knows chains must not lose to plain LRU, nor keep what nobody can use."""
    trace = merge([trace_of(name) for name in names])
    hashes = trace.hashes()
    for capacity, at_least in ((5_859, 1.03), (39_062, 0.99)):
        lru = replay(trace, PolicyAlone("lru", capacity, hashes), looks=0)
        ours = replay(trace, PolicyAlone("adaptive", capacity, hashes), looks=3)
        assert ours.hits >= at_least * lru.hits
        assert ours.orphans < 0.001


def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 0}\n')
    with pytest.raises(ValueError, match="line 2: KeyError"):
        read_trace(path)


def test_a_page_costs_less_than_400_bytes() -> None:
    """Of one part, with its checksum and whatever the policy and the allocator need for it."""
    count = 50_000
    store = Store((count + 100) * GRANULE, high_watermark=1.0, low_watermark=1.0)
    hashes = b"".join(page_hash(n) for n in range(128))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    stored = 0
    while stored < count:
        blob = b"".join(bytes((*stored.to_bytes(8, "little"), *hashes[at : at + 24])) for at in range(0, 128 * 32, 32))
        txn, status, _ = store.reserve(1, NS, blob, GRANULE)
        wanted = status.count(WRITE)
        store.commit(1, txn, b"\x01" * wanted, [(1 << 64) - 1 - n for n in range(wanted)])
        stored += 128
        if not wanted:
            break
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert store.objects >= count
    # Python's blocks are multiples of 16 bytes, of which tracemalloc sees what was asked for.
    assert grown / store.objects < 370


@pytest.mark.parametrize("seed", range(3))
def test_pages_of_many_sizes_use_nine_tenths_of_the_segment_for_ever(seed: int) -> None:
    """P106: models with pages of five sizes come and go; nobody is refused, and no page goes while a tenth lies idle."""
    rng = random.Random(seed)
    sizes = [GRANULE * granules for granules in ((4, 16, 64, 256, 1024), (9, 72, 23, 300, 16), (1, 512))[seed]]
    store = Store((1 << 17) * GRANULE, high_watermark=1.0, low_watermark=1.0)
    talks: list[tuple[int, list[bytes]]] = []
    least = 1.0
    for step in range(1500):
        if talks and rng.random() < 0.6:
            model, pages = talks[-1 - min(len(talks) - 1, int(rng.expovariate(1 / 80)))]
        else:
            model, pages = rng.randrange(len(sizes)), []
            talks.append((model, pages))
        if len(pages) < 50:
            pages += [page_hash((len(talks), step, n)) for n in range(rng.randrange(1, 12))]
        namespace, blob = b"%16d" % model, b"".join(pages)
        store.present(namespace, blob)
        txn, status, _ = store.reserve(1, namespace, blob, sizes[model])
        assert 0 not in status, "refused"
        store.commit(1, txn, b"\x01" * status.count(WRITE), [0] * status.count(WRITE))
        if step > 700:
            least = min(least, store.used_bytes / store.allocator.capacity)
    store.validate()
    assert least > 0.9


def test_pages_of_another_model_get_room_though_the_segment_is_full_of_small_ones() -> None:
    """P106: one page of 256 granules in a segment of single ones takes the place of about 256 of them, not of thousands."""
    rng = random.Random(1)
    store = Store(8192 * GRANULE, high_watermark=1.0, low_watermark=1.0, policy="lru")
    names = [page_hash(n) for n in range(8192)]
    for first in range(0, 8192, 8):
        txn, _, _ = store.reserve(1, NS, b"".join(names[first : first + 8]), GRANULE)
        store.commit(1, txn, b"\x01" * 8, [0] * 8)
    for _ in range(8192):
        store.present(NS, rng.choice(names))
    txn, status, _ = store.reserve(1, OTHER, page_hash("large"), 256 * GRANULE)
    assert status == bytes([WRITE])
    store.validate()
    assert store.objects > 8192 - 1024


@every_policy
def test_a_writer_that_died_leaves_its_key_to_the_next_one(policy: str) -> None:
    """P132: killed between reservation and commit."""
    store = Store(4 * GRANULE, policy=policy, high_watermark=1.0, low_watermark=1.0, max_pinned_share=1.0)
    blob = b"".join(page_hash(n) for n in range(4))
    dead, status, _ = store.reserve(1, NS, blob, GRANULE)
    assert status.count(WRITE) == 4
    _, refused, _ = store.reserve(2, OTHER, page_hash("x"), GRANULE)
    assert WRITE not in refused, "its memory is not given to anybody while it may still write"
    store.drop_owner(1)
    store.validate()
    txn, status, _ = store.reserve(2, NS, blob, GRANULE)
    assert store.commit(1, dead, b"\x01" * 4, [0] * 4) == bytes(4), "what it says from the grave counts for nothing"
    assert store.commit(2, txn, b"\x01" * 4, [7] * 4) == b"\x01" * 4
    store.validate()
    assert store.locate(3, NS, blob, GRANULE, 0.0)[3] == [7] * 4


class StoreMachine(RuleBasedStateMachine):
    """Everything that ranks, other nodes and the housekeeping can do to a store, in any order, with its books checked after
    each step and with the stream of changes beside the truth."""

    txns = Bundle("txns")
    pins = Bundle("pins")

    @initialize(policy=st.sampled_from(list(POLICIES)), most=st.sampled_from([0, 0, 12]))
    def begin(self, policy: str, most: int) -> None:
        self.store = Store(
            32 * GRANULE,
            policy=policy,
            max_objects=most,
            high_watermark=0.9,
            low_watermark=0.6,
            pin_seconds=5.0,
            track_changes=True,
        )
        self.now = 0.0
        self.known: set[tuple[bytes, bytes]] = set()

    owners = st.integers(1, 3)
    spaces = st.sampled_from([NS, OTHER])
    lengths = st.sampled_from([GRANULE, 2 * GRANULE, 3 * GRANULE - 7])
    groups = st.sampled_from([b"", MODEL, MODEL, MODEL])
    blobs = st.lists(st.integers(0, 24), min_size=1, max_size=8).map(lambda names: b"".join(page_hash(n) for n in names))
    ranks = st.sampled_from([OWN, GUEST, REPLICA])

    @rule(
        target=txns,
        owner=owners,
        namespace=spaces,
        blob=blobs,
        length=lengths,
        group=groups,
        rank=ranks,
        evict=st.booleans(),
    )
    def reserve(
        self, owner: int, namespace: bytes, blob: bytes, length: int, group: bytes, rank: int, evict: bool
    ) -> tuple[int, int, int]:
        before = self.store.stats.evicted
        txn, status, _ = self.store.reserve(owner, namespace, blob, length, group, rank=rank, evict=evict)
        assert evict or self.store.stats.evicted == before
        return owner, txn, status.count(WRITE)

    @rule(target=txns, owner=owners, namespace=spaces, blob=blobs, length=lengths, group=groups)
    def claim(self, owner: int, namespace: bytes, blob: bytes, length: int, group: bytes) -> tuple[int, int, int]:
        txn, column, where = self.store.claim(owner, namespace, blob, length, self.now, group)
        assert len(where) == column.count(FETCH)
        return owner, txn, len(where)

    @rule(txn=txns, whole=st.lists(st.booleans(), min_size=8, max_size=8))
    def commit(self, txn: tuple[int, int, int], whole: list[bool]) -> None:
        owner, number, count = txn
        self.store.commit(owner, number, bytes(whole[:count]), range(count))

    @rule(target=pins, owner=owners, namespace=spaces, blob=blobs, length=lengths, touch=st.booleans())
    def locate(self, owner: int, namespace: bytes, blob: bytes, length: int, touch: bool) -> tuple[int, int]:
        return owner, self.store.locate(owner, namespace, blob, length, self.now, touch=touch)[0]

    @rule(target=pins, owner=owners, limit=st.integers(0, 5))
    def pin_coldest(self, owner: int, limit: int) -> Any:
        pages = self.store.coldest(limit)
        return (owner, self.store.pin_pages(owner, pages, self.now)) if pages else multiple()

    @rule(pin=pins)
    def release(self, pin: tuple[int, int]) -> None:
        self.store.release(*pin)

    @rule(namespace=spaces, blob=blobs, touch=st.booleans())
    def look(self, namespace: bytes, blob: bytes, touch: bool) -> None:
        order = list(self.store.entries())
        column = self.store.present(namespace, blob, touch=touch)
        held = dict(self.held())
        assert [bool(each) for each in column] == [(namespace, blob[at : at + 32]) in held for at in range(0, len(blob), 32)]
        assert touch or order == list(self.store.entries()), "a probe changes nothing"

    @rule(namespace=spaces, blob=blobs)
    def tell_a_chain(self, namespace: bytes, blob: bytes) -> None:
        self.store.touch(namespace, blob)

    @rule(which=st.integers(0, 30), rank=ranks)
    def rank(self, which: int, rank: int) -> None:
        for page in self.store.hottest(which)[-1:]:
            self.store.set_rank(page, rank)
            assert page.rank == rank

    @rule(which=st.integers(0, 30), some=st.booleans())
    def give_away(self, which: int, some: bool) -> None:
        for page in self.store.coldest(which)[-1:]:
            parts = page.parts[some:]
            whole = len(parts) == len(page.parts)
            assert self.store.remove_page(page, parts) == (len(parts) if whole else 0)
            assert (page.held is None) == whole

    @rule(namespace=spaces, blob=blobs)
    def discard(self, namespace: bytes, blob: bytes) -> None:
        self.store.discard(namespace, blob[:32], "checksum")
        assert self.store.present(namespace, blob[:32], touch=False) == b"\x00"

    @rule(namespace=spaces)
    def clear(self, namespace: bytes) -> None:
        self.store.clear(namespace)

    @rule(limit=st.integers(0, 4))
    def housekeeping(self, limit: int) -> None:
        self.store.sweep(limit)
        self.store.evict_to_low(limit)

    @rule(by=st.floats(0, 4))
    def time_passes(self, by: float) -> None:
        self.now += by
        self.store.expire_pins(self.now)

    @rule(owner=owners)
    def an_owner_ends(self, owner: int) -> None:
        self.store.drop_owner(owner)

    def held(self) -> dict[tuple[bytes, bytes], LogicalPage]:
        return {(name, each): page for name, home in self.store._index.items() for each, page in home.pages.items()}

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.validate()
        added, removed = self.store.drain_changes(1000)
        self.known |= {(name, blob[i : i + 32]) for name, blob in added for i in range(0, len(blob), 32)}
        self.known -= {(name, blob[i : i + 32]) for name, blob in removed for i in range(0, len(blob), 32)}
        parts = [part for step in self.store.snapshot_parts(3) for part in step]
        assert all(len(blob) <= 3 * 32 for _, blob in parts)
        held = {(name, blob[i : i + 32]) for name, blob in parts for i in range(0, len(blob), 32)}
        assert held == set(self.held())
        assert self.known >= held
        if not self.store._condemned:
            assert self.known == held, "the stream of changes and the truth agree"

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for owner in range(1, 4):
            self.store.drop_owner(owner)
        for namespace in (NS, OTHER):
            self.store.clear(namespace)
        while self.store.sweep():
            self.store.validate()
        assert self.store.used_bytes == self.store.pinned_bytes == self.store.objects == 0
        assert not self.store._groups
        assert not self.store._held_by


def test_any_order_of_events_keeps_the_books_of_a_store() -> None:
    steps = settings(
        max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    run_state_machine_as_test(StoreMachine, settings=steps)


def test_a_store_that_is_dropped_leaves_nothing_behind() -> None:
    """Its pages are not seen by the garbage collector, so their cycles must be ended."""
    store = Store(64 * GRANULE)
    txn, _, _ = store.reserve(1, NS, b"".join(page_hash(n) for n in range(32)), GRANULE)
    store.commit(1, txn, b"\x01" * 32, [0] * 32)
    pages = store.coldest(32)
    assert all(page.segment is not None for page in pages)
    del store
    assert all(page.segment is None for page in pages)
