"""Pages that somebody counts on: which are kept, for how long and how many; and that nothing evicts them meanwhile."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_mooncake import protocol as p
from hicache_mooncake.client import engine_facts
from hicache_mooncake.client.promised import MAX_TOLD, PROMISE_S, Told, promise_seconds
from hicache_mooncake.config import load_settings
from hicache_mooncake.config_values import MAX_PROMISE_S
from hicache_mooncake.node.core import NOBODY
from hicache_mooncake.node.policy import POLICIES
from hicache_mooncake.node.promises import Promise, Promises
from hicache_mooncake.node.store import GUEST, OWN, REPLICA, Store
from hicache_mooncake.testing.local import page_hash
from tests.test_node_core import B, Directory, drive, make_core
from tests.test_node_core import hashes as named

NS, OTHER = b"n" * 16, b"o" * 16
PAGE = 4096


@dataclass(eq=False)
class Page:
    hash: bytes
    size: int = 1
    promises: int = 0


def chain(*numbers: int) -> bytes:
    return b"".join(page_hash(number) for number in numbers)


@dataclass
class Made:
    """A promise, as the model has it."""

    owner: int
    reader: str
    numbers: list[int]
    there: list[bool]
    until: float
    left: set[int]
    times: int = 1

    @property
    def key(self) -> tuple[str, int]:
        return self.reader, self.numbers[-1]


@dataclass
class Model:
    """The same in plain words, each step a look at everything."""

    most: int
    sizes: dict[int, int]
    made: list[Made] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    """Left the store while they were promised; nothing is kept of them until they are promised anew."""

    def kept(self) -> set[int]:
        return {number for each in self.made for number in each.left} - self.gone

    def bytes(self) -> int:
        return sum(self.sizes[number] for number in self.kept())

    def make(self, owner: int, reader: str, numbers: list[int], there: list[bool], until: float) -> None:
        for each in self.made:
            if (each.reader, each.numbers, each.there) == (reader, numbers, there) and len(each.left) == sum(there):
                self.made.remove(each)
                self.made.append(each)
                each.owner, each.until, each.times = owner, max(until, each.until), each.times + 1
                return
        size = 0
        for at, (number, here) in enumerate(zip(numbers, there, strict=True)):
            size += self.sizes[number] if here else 0
            if size > self.most:
                numbers, there = numbers[:at], there[:at]
                break
        left = {number for number, here in zip(numbers, there, strict=True) if here}
        if not left:
            return
        new = Made(owner, reader, numbers, there, until, left)
        self.made = [each for each in self.made if each.key != new.key]
        self.made.append(new)
        self.gone -= left
        self._settle()
        while self.bytes() > self.most:
            self.made.pop(0)
            self._settle()

    def fulfil(self, reader: str, numbers: list[int], here: list[bool], made: list[Made]) -> None:
        """`made`: in the order in which they are looked at."""
        for each in made:
            if each.reader == reader and numbers[0] in each.numbers:
                tail = each.numbers[each.numbers.index(numbers[0]) :]
                count = min(len(tail), len(numbers))
                if tail[:count] == numbers[:count]:
                    if each.times == 1:
                        each.left -= {number for number, yes in zip(numbers[:count], here, strict=False) if yes}
                        self._drop_empty()
                    return

    def end(self, which: object) -> None:
        self.made = [each for each in self.made if not which(each)]  # type: ignore[operator]
        self._settle()

    def _drop_empty(self) -> None:
        self.made = [each for each in self.made if each.left]
        self._settle()

    def _settle(self) -> None:
        self.gone &= {number for each in self.made for number in each.left}


SIZES = dict(enumerate([1, 1, 2, 3, 1, 5, 1, 1, 2, 1]))
CHAINS = st.integers(0, 7).flatmap(lambda first: st.integers(first + 1, 10).map(lambda end: list(range(first, end))))
STEPS = st.one_of(
    st.tuples(st.just("make"), st.sampled_from([1, 2]), st.sampled_from("ab"), CHAINS, st.integers(0, 1023), st.integers(1, 9)),
    st.tuples(st.just("fulfil"), st.sampled_from("ab"), CHAINS, st.integers(0, 1023)),
    st.tuples(st.just("expire"), st.integers(0, 9)),
    st.tuples(st.just("owner"), st.sampled_from([1, 2])),
    st.tuples(st.just("gone"), st.integers(0, 9)),
)


@given(st.integers(3, 30), st.lists(STEPS, max_size=25))
def test_what_is_kept_is_what_is_promised_and_fits(most: int, steps: list[tuple[object, ...]]) -> None:
    pages = {number: Page(page_hash(number), size) for number, size in SIZES.items()}
    promises: Promises[Page] = Promises(most, lambda page: page.size)
    model = Model(most, SIZES)
    for step in steps:
        match step:
            case ("make", int(owner), str(reader), list(numbers), int(mask), int(until)):
                there = [bool(mask >> number & 1) for number in numbers]
                while there and not there[-1]:  # as the store asks for it
                    there.pop()
                numbers = numbers[: len(there)]
                if not numbers:
                    continue
                some = [pages[number] if here else None for number, here in zip(numbers, there, strict=True)]
                promises.make(owner, reader, NS, chain(*numbers), some, float(until))
                model.make(owner, reader, numbers, there, float(until))
            case ("fulfil", str(reader), list(numbers), int(mask)):
                here = [bool(mask >> number & 1) for number in numbers]
                made = in_order(promises, model)
                promises.fulfil(reader, NS, chain(*numbers), here)
                model.fulfil(reader, numbers, here, made)
            case ("expire", int(now)):
                promises.expire(float(now))
                model.end(lambda each, now=now: each.until <= now)
            case ("owner", int(owner)):
                promises.drop_owner(owner)
                model.end(lambda each, owner=owner: each.owner == owner)
            case ("gone", int(number)):
                promises.gone(pages[number])
                if number in model.kept():
                    model.gone.add(number)
        promises.validate()
        counts = Counter(number for each in model.made for number in each.left)
        assert {number: page.promises for number, page in pages.items()} == {number: counts[number] for number in pages}
        assert {page.hash for page in promises} == {page_hash(number) for number in model.kept()}
        assert promises.bytes == model.bytes() <= most


def in_order(promises: Promises[Page], model: Model) -> list[Made]:
    """The model's promises in the order in which the real ones of a reader are looked at."""
    keys = [key for of_reader in promises._readers.values() for key in of_reader]
    return sorted(model.made, key=lambda each: keys.index((each.reader, NS, page_hash(each.numbers[-1]))))


def test_the_oldest_goes_first_and_the_head_of_what_is_too_long_is_kept() -> None:
    promises: Promises[Page] = Promises(4, lambda page: page.size)
    pages = [Page(page_hash(number)) for number in range(10)]

    def make(first: int, count: int) -> Promise[Page]:
        return promises.make(1, "a", NS, chain(*range(first, first + count)), pages[first : first + count], 1.0)

    make(0, 2)
    make(2, 2)
    make(0, 2)  # renewed: now the other one is older
    make(4, 2)
    assert [page.promises for page in pages[:6]] == [1, 1, 0, 0, 1, 1]
    assert promises.dropped == 2
    make(0, 10)
    assert [page.promises for page in pages] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert promises.dropped == 2 + 6 + 4
    promises.validate()


def test_what_was_not_told_after_all_is_let_go() -> None:
    promises: Promises[Page] = Promises(100, lambda page: page.size)
    pages = [Page(page_hash(number)) for number in range(6)]
    promise = promises.make(1, "a", NS, chain(*range(6)), pages, 1.0)
    promises.cut(promise, 4)
    promises.validate()
    assert (len(promises), promises.made) == (4, 4)
    promises.fulfil("a", NS, chain(0, 1, 2, 3), [True] * 4)
    assert (len(promises), promises.loaded) == (0, 4)
    promise = promises.make(1, "a", NS, chain(*range(6)), pages, 1.0)
    promises.expire(1.0)
    promises.cut(promise, 0)  # it is over already
    promises.cut(promises.make(1, "a", NS, chain(*range(6)), pages, 1.0), 0)
    promises.validate()
    assert not len(promises)


def test_two_requests_with_one_prompt_both_find_it() -> None:
    """The first one's load does not end what the second one counts on."""
    promises: Promises[Page] = Promises(100, lambda page: page.size)
    pages = [Page(page_hash(number)) for number in range(4)]
    for _ in range(2):
        promises.make(1, "a", NS, chain(*range(4)), pages, 1.0)
    promises.fulfil("a", NS, chain(*range(4)), [True] * 4)
    assert len(promises) == 4
    promises.expire(2.0)
    assert not len(promises)


def test_another_reader_s_load_ends_nothing() -> None:
    promises: Promises[Page] = Promises(100, lambda page: page.size)
    pages = [Page(page_hash(number)) for number in range(4)]
    promises.make(1, "a", NS, chain(*range(4)), pages, 1.0)
    promises.fulfil("b", NS, chain(*range(4)), [True] * 4)
    promises.fulfil("a", OTHER, chain(*range(4)), [True] * 4)
    promises.fulfil("a", NS, chain(0, 2), [True] * 2)
    assert len(promises) == 4
    promises.fulfil("a", NS, chain(1, 2), [True, False])
    assert [page.promises for page in pages] == [1, 0, 1, 1]


# --------------------------------------------------------------------------- the store


def store_chain(store: Store, name: object, count: int, namespace: bytes = NS, rank: int = OWN) -> bytes:
    hashes = b"".join(page_hash((name, i)) for i in range(count))
    txn, status, _ = store.reserve(1, namespace, hashes, PAGE, rank=rank)
    written = status.count(p.WRITE)
    store.commit(1, txn, b"\x01" * written, [0] * written)
    return hashes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rank", [OWN, GUEST, REPLICA])
def test_eviction_at_full_speed_passes_over_what_is_promised(policy: str, rank: int) -> None:
    store = Store(64 * PAGE, policy=policy)
    promised = store_chain(store, "promised", 8, rank=rank)
    store.promise(5, "a", NS, promised, 10.0)
    for round_ in range(40):
        store_chain(store, round_, 16)
        store.evict_to_low(10_000)
        store.validate()
        assert store.present(NS, promised, touch=False) == b"\x01" * 8
        assert not any(page.promises for page in store.coldest(1000)), "nor is it given away"
    assert store.stats.evicted > 400
    store.promises.expire(10.0)
    assert {page.hash for page in store.coldest(1000)} >= set(p.split(promised)), "they may go again"
    store.validate()


def test_promises_leave_room_for_stores() -> None:
    store = Store(64 * PAGE, promise_share=0.25)
    for number in range(8):
        store.promise(5, "a", NS, store_chain(store, number, 8), 10.0)
        store.validate()
    assert store.promises.bytes == 16 * PAGE
    assert store.promises.dropped == 48
    assert len(store_chain(store, "new", 40)) == 40 * p.HASH_BYTES
    assert store.stats.refused == 0


def test_a_page_of_several_parts_is_kept_whole() -> None:
    store = Store(64 * PAGE)
    hashes = store_chain(store, "x", 4)
    txn, status, _ = store.reserve(1, OTHER, hashes, PAGE, NS)
    store.commit(1, txn, b"\x01" * status.count(p.WRITE), [0] * 4)
    store.promise(5, "a", NS, hashes, 10.0)
    assert store.promises.bytes == 8 * PAGE
    for round_ in range(40):
        store_chain(store, round_, 16)
    assert store.present(OTHER, hashes) == b"\x01" * 4
    store.validate()


def test_clears_and_damage_come_before_promises() -> None:
    store = Store(64 * PAGE)
    cleared, damaged = store_chain(store, "c", 4, OTHER), store_chain(store, "d", 4)
    store.promise(5, "a", OTHER, cleared, 10.0)
    store.promise(5, "a", NS, damaged, 10.0)
    assert store.clear(OTHER) == 4
    store.discard(NS, damaged[:32], "checksum")
    store.sweep()
    store.validate()
    assert store.present(OTHER, cleared) == bytes(4)
    assert store.used_bytes == 3 * PAGE, "the memory is back although somebody counted on it"
    assert (len(store.promises), store.promises.lost) == (3, 5)
    store.promise(5, "a", NS, store_chain(store, "d", 4), 10.0)
    store.validate()
    assert len(store.promises) == 4
    store.drop_owner(5)
    store.validate()
    assert not len(store.promises)


def test_what_is_promised_is_read_though_readers_have_pinned_all_they_may() -> None:
    store = Store(64 * PAGE, max_pinned_share=0.25)
    promised = store_chain(store, "promised", 4)
    others = [store_chain(store, number, 16) for number in range(2)]
    store.promise(5, "a", NS, promised, 10.0)
    assert store.locate(2, NS, others[0], PAGE, 0.0)[1].count(p.LOCAL) == 16
    assert store.locate(3, NS, others[1], PAGE, 0.0)[1].count(p.LOCAL) == 0
    assert store.locate(4, NS, promised, PAGE, 0.0)[1].count(p.LOCAL) == 4
    store.validate()


# --------------------------------------------------------------------------- the node


def exists(hashes: list[bytes], promise_s: float = 5.0, reader: str = "rank") -> p.Exists:
    return p.Exists([NS], b"".join(hashes), promise_s=promise_s, reader=reader)


def test_a_lookup_that_counts_on_pages_keeps_them_until_they_are_loaded() -> None:
    core, directory = make_core(), Directory()
    pages = named(*range(6))
    store_named(core.store, pages[:4])
    assert drive(core, core.handle(7, exists(pages), 0.0), directory) == p.Found([4])
    assert len(core.store.promises) == 4
    assert drive(core, core.handle(7, exists(pages, promise_s=0.0), 0.0), directory) == p.Found([4])
    locate = p.Locate(NS, b"".join(pages[:2]), PAGE, reader="rank")
    located = drive(core, core.handle(8, locate, 1.0), directory)
    assert isinstance(located, p.Located)
    assert located.status == bytes([p.LOCAL] * 2)
    assert len(core.store.promises) == 2
    core.drop_owner(8)
    assert len(core.store.promises) == 2
    core.drop_owner(7)
    assert core.report(1.0)["promised"] == 0
    core.validate()


def test_time_ends_a_promise_and_nobody_gets_one_for_long() -> None:
    core, directory = make_core(), Directory()
    pages = named(*range(4))
    store_named(core.store, pages)
    drive(core, core.handle(7, exists(pages, promise_s=1e9), 0.0), directory)
    core.tick(MAX_PROMISE_S - 1)
    assert len(core.store.promises) == 4
    core.tick(MAX_PROMISE_S + 1)
    assert not len(core.store.promises)
    assert core.report(0.0)["promises_expired"] == 4


def test_pages_behind_a_hole_are_not_kept() -> None:
    """They lie here, and nobody has what is before them."""
    core, directory = make_core(), Directory({page: [B] for page in named(2)})
    pages = named(*range(8))
    store_named(core.store, [*pages[:2], *pages[3:4], *pages[6:]])
    assert drive(core, core.handle(7, exists(pages), 0.0), directory) == p.Found([4])
    assert len(core.store.promises) == 3
    core.validate()


def test_a_miss_reserves_nothing() -> None:
    core, directory = make_core(), Directory()
    for number in range(100):
        assert drive(core, core.handle(7, exists(named((number, 0), (number, 1))), 0.0), directory) == p.Found([0])
    report = core.report(0.0)
    assert (report["promised"], report["promises"], report["used_bytes"], report["pinned_bytes"]) == (0, 0, 0, 0)


def test_masters_hear_who_counts_on_it_and_the_holder_from_them() -> None:
    core, directory = make_core(), Directory()
    asks = []
    directory.tell = lambda ask: asks.append(ask)  # type: ignore[method-assign, assignment, func-returns-value]
    drive(core, core.handle(7, exists(named(1)), 0.0), directory)
    assert [(ask.promise_s, ask.reader) for ask in asks] == [(5.0, "rank")]

    holder = make_core()
    pages = named(*range(4))
    store_named(holder.store, pages[:3])
    keep = p.Keep("b", "rank", 5.0, [(NS, b"".join(pages))])
    assert holder.keep_promised(keep, 0.0) == [(NS, pages[3])], "its cold tier may have it"
    assert len(holder.store.promises) == 3
    holder.drop_owner(NOBODY + 1)

    def fetch(requester: str, reader: str) -> None:
        served = holder.fetch(9, p.Fetch(1, requester, NS, b"".join(pages[:3]), PAGE, reader=reader), 0.0)
        holder.fetched(9, served, 3)

    fetch("c", "rank")  # the rank of another host that is called the same
    fetch("b", "")
    assert len(holder.store.promises) == 3
    fetch("b", "rank")
    assert not len(holder.store.promises)
    holder.validate()


def test_a_promise_that_comes_after_its_page_has_gone_keeps_nothing_and_is_counted_on_both_sides() -> None:
    """The holder evicted between the master's answer and the word of it: nothing is found here, and the reader counts why."""
    holder = make_core()
    pages = named(*range(4))
    store_named(holder.store, pages)
    told = Told(5.0)
    told.told(NS, b"".join(pages), b"\1" * 4, 0.0)
    for page_hash_ in pages[1:3]:
        page = holder.store.page(NS, page_hash_)
        assert page is not None
        holder.store.remove_page(page)
    keep = p.Keep("b", "rank", 5.0, [(NS, b"".join(pages))])
    assert holder.keep_promised(keep, 0.0) == [(NS, pages[1] + pages[2])]
    assert len(holder.store.promises) == 2, "what is left is kept: it is asked for by page"
    assert holder.report(0.0)["promises_late"] == 2
    served = holder.fetch(9, p.Fetch(1, "b", NS, b"".join(pages), PAGE, reader="rank"), 0.0)
    assert [status == p.LOCAL for status in served.reply.status] == [True, False, False, True]
    assert told.broken(NS, b"".join(pages), b"\1\0\0\1", {"gone_remote": 2}, 1.0) == {"evicted": 2}
    assert holder.keep_promised(p.Keep("b", "rank", 5.0, [(b"never" * 3 + b"!", pages[0])]), 0.0) != []
    assert holder.promises_late == 3, "also of a namespace of which nothing is left"
    holder.validate()


def test_what_is_not_in_dram_is_late_only_when_the_disk_has_it_neither() -> None:
    holder = make_core()
    holder.keep(0)
    assert holder.keep_promised(p.Keep("b", "rank", 5.0, [(NS, named("gone")[0])]), 0.0) != []
    assert holder.promises_late == 0, "the cold tier's writer is asked, and counts"


def store_named(store: Store, pages: list[bytes], namespace: bytes = NS) -> None:
    txn, status, _ = store.reserve(1, namespace, b"".join(pages), PAGE)
    store.commit(1, txn, b"\x01" * status.count(p.WRITE), [0] * len(pages))


# --------------------------------------------------------------------------- the rank


def test_what_was_told_and_does_not_come_is_counted_by_why() -> None:
    told = Told(2.0)
    blob = chain(*range(6))
    told.told(NS, blob, b"\x01" * 4, 10.0)
    ok = bytes([1, 1, 0, 0, 0, 0])
    assert told.broken(NS, blob, ok, {"absent": 4}, 11.0) == {"evicted": 2}
    assert told.broken(NS, blob, ok, {"peer_down": 4}, 11.0) == {"node_gone": 2}
    assert told.broken(NS, blob, ok, {"checksum": 1, "deadline": 3}, 11.0) == {"deadline": 2}
    assert told.broken(NS, blob, ok, {"mover_killed": 4}, 11.0) == {"other": 2}
    assert told.broken(NS, blob, ok, {"absent": 4}, 12.5) == {}, "that was too long ago"
    assert told.broken(OTHER, blob, ok, {"absent": 4}, 11.0) == {}
    assert told.broken(NS, chain(7, 8), bytes(2), {"absent": 2}, 11.0) == {}, "nobody was told of these"
    told.told(OTHER, blob, bytes([0, 0, 1, 0, 1, 1]), 10.0)
    assert told.broken(OTHER, blob, bytes(6), {"absent": 6}, 11.0) == {"evicted": 3}


def test_what_is_remembered_of_it_is_bounded() -> None:
    told = Told(2.0)
    for number in range(3 * MAX_TOLD):
        told.told(NS, chain(number), b"\x01", 0.0)
    assert len(told._told) == MAX_TOLD
    assert told._bytes == 32 * MAX_TOLD
    assert told.broken(NS, chain(0), b"\x00", {"absent": 1}, 0.0) == {}


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ({}, 0.0),
        ({"disaggregation_mode": "decode", "enable_hierarchical_cache": True}, 0.0),
        ({"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}, 0.0),
        (
            {
                "disaggregation_mode": "prefill",
                "disaggregation_decode_enable_radix_cache": True,
                "enable_hierarchical_cache": True,
            },
            0.0,
        ),
        (
            {
                "disaggregation_mode": "decode",
                "disaggregation_decode_enable_radix_cache": True,
                "enable_hierarchical_cache": True,
            },
            PROMISE_S,
        ),
    ],
)
def test_decode_servers_with_a_radix_cache_promise_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], seconds: float
) -> None:
    given = SimpleNamespace(get_global_server_args=lambda: SimpleNamespace(**arguments))
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", given)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", SimpleNamespace())
    facts = engine_facts.read(None)
    assert promise_seconds(load_settings({}, {})[0], facts) == seconds
    assert promise_seconds(load_settings({"promise_s": "auto"}, {})[0], facts) == seconds
    assert promise_seconds(load_settings({"promise_s": 0}, {})[0], facts) == 0.0
    assert promise_seconds(load_settings({"promise_s": 2}, {})[0], facts) == 2.0
