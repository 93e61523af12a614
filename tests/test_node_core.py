"""What a node answers, without sockets: the steps of a real core, driven by hand, and a directory that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.node.asking import AskMasters
from hicache_mooncake.node.core import APART_S, CLEARED_S, MAX_TAKING, STALLED_S, STUCK_S, NodeCore, Steps
from hicache_mooncake.node.heat import Heat
from hicache_mooncake.node.store import GUEST, OWN, REPLICA, Store
from hicache_mooncake.testing.local import page_hash

NS, GROUP = b"n" * 16, b"g" * 16
PAGE = 4096
B, C = p.Peer("b", b"b" * 8, "10.0.0.2", 1), p.Peer("c", b"c" * 8, "10.0.0.3", 1)


def hashes(*names: object) -> list[bytes]:
    return [page_hash(name) for name in names]


@dataclass
class Directory:
    """Who holds what, and how it answers."""

    held: dict[bytes, list[p.Peer]] = field(default_factory=dict)
    complete: bool = True
    warming: bool = False
    away: bool = False

    def tell(self, ask: AskMasters) -> Told | None:
        if self.away:
            return None
        return Told([self._answer(question) for question in ask.questions], self.complete, self.warming)

    def _answer(self, question: p.Question) -> p.Answer:
        peers = [B, C]
        holder, others = bytearray(), bytearray()
        for at in range(0, len(question.hashes), p.HASH_BYTES):
            held = self.held.get(question.hashes[at : at + p.HASH_BYTES], [])
            if question.prefix and not held:
                break
            holder.append(1 + peers.index(held[0]) if held else 0)
            others.append(1 + peers.index(held[1]) if len(held) > 1 else 0)
        return p.Answer(bytes(holder), peers, bytes(others))


@dataclass
class Told:
    answers: Sequence[p.Answer]
    complete: bool = True
    warming: bool = False


def make_core(pages: int = 64, **options: object) -> NodeCore:
    store = Store(pages * PAGE, track_changes=True)
    return NodeCore("a", b"a" * 8, store, masters=True, log=lambda *_: None, **options)  # type: ignore[arg-type]


def drive(core: NodeCore, steps: Steps[object], directory: Directory) -> object:
    told = None
    try:
        ask = next(steps)
        while True:
            core.validate()
            told = directory.tell(ask)
            ask = steps.send(told)
    except StopIteration as end:
        core.validate()
        return end.value


def handle(core: NodeCore, message: p.Message, directory: Directory | None = None, owner: int = 1, now: float = 0.0) -> object:
    return drive(core, core.handle(owner, message, now), directory or Directory(away=True))


def store(core: NodeCore, pages: Sequence[bytes], owner: int = 1, namespace: bytes = NS) -> None:
    reserved = handle(core, p.Reserve(namespace, b"".join(pages), PAGE, GROUP), owner=owner)
    assert isinstance(reserved, p.Reserved)
    count = reserved.status.count(p.WRITE)
    handle(core, p.Commit(reserved.txn, b"\x01" * count, list(range(count))), owner=owner)


def locate(core: NodeCore, pages: Sequence[bytes], directory: Directory, now: float = 0.0, **fields: object) -> p.Located:
    message = p.Locate(NS, b"".join(pages), PAGE, group=GROUP, **fields)  # type: ignore[arg-type]
    located = handle(core, message, directory, now=now)
    assert isinstance(located, p.Located)
    handle(core, p.Release(located.pin))
    return located


def held(core: NodeCore, *pages: bytes) -> bytes:
    return core.store.present(NS, b"".join(pages), touch=False)


# --------------------------------------------------------------------------- lookups


def test_a_second_holder_is_named_where_there_is_one() -> None:
    core = make_core()
    one, two, three = hashes(1, 2, 3)
    store(core, [two])
    located = locate(core, [one, two, three], Directory({one: [B, C], three: [C]}))
    assert list(located.status) == [p.REMOTE, p.LOCAL, p.REMOTE]
    assert [located.peers[i].node for i in (located.where[0], located.where[2])] == ["b", "c"]
    assert located.peers[located.others[0]].node == "c"
    assert located.others[1:] == [-1, -1]


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        (Directory(), ""),
        (Directory(away=True), "master_down"),
        (Directory(complete=False), "master_down"),
        (Directory(warming=True), "master_warming"),
        (Directory({page_hash(1): [B]}, warming=True), ""),
    ],
)
def test_an_absent_page_says_why_it_may_be_there_all_the_same(directory: Directory, reason: str) -> None:
    core = make_core()
    assert locate(core, hashes(1), directory).reason == reason
    found = handle(core, p.Exists([NS], page_hash(1)), directory)
    assert isinstance(found, p.Found)
    assert found.reason == reason


def test_what_an_incomplete_answer_names_still_counts() -> None:
    core = make_core()
    one, two = hashes(1, 2)
    found = handle(core, p.Exists([NS], one + two, [NS]), Directory({one: [B]}, complete=False))
    assert found == p.Found([1], [b"\x01\x00"], "master_down")


def found(core: NodeCore, pages: Sequence[bytes], directory: Directory, now: float = 0.0) -> int:
    answer = handle(core, p.Exists([NS], b"".join(pages)), directory, now=now)
    assert isinstance(answer, p.Found)
    return answer.runs[0]


def test_a_load_asks_no_master_for_what_its_lookup_has_just_found() -> None:
    core = make_core()
    pages = hashes(1, 2, 3, 4)
    store(core, [pages[0]])
    assert found(core, pages, Directory({page: [B, C] for page in pages})) == 4
    away = Directory(away=True)
    located = locate(core, pages[1:3], away, now=1.0, recall=True)
    assert [located.peers[at].node for at in located.where] == ["b", "b"]
    assert [located.peers[at].node for at in located.others] == ["c", "c"]
    assert (located.recalled, located.reason) == (True, "")
    assert list(locate(core, pages, away, now=1.0, recall=True).status) == [p.LOCAL, p.REMOTE, p.REMOTE, p.REMOTE]
    assert core.report(1.0)["lookups_recalled"] == 2
    for asked, now in (([*pages[1:3], page_hash(9)], 1.0), (pages[1:3], 3.0)):
        located = locate(core, asked, away, now=now, recall=True)
        assert p.REMOTE not in located.status
        assert (located.recalled, located.reason) == (False, "master_down"), "all or nothing, and not for long"


def test_who_does_not_ask_for_it_is_told_what_masters_say_now() -> None:
    """A mover of an older build would not ask again for what does not come."""
    core = make_core()
    assert found(core, hashes(1), Directory({page_hash(1): [B]})) == 1
    located = locate(core, hashes(1), Directory({page_hash(1): [C]}))
    assert ([located.peers[at].node for at in located.where], located.recalled) == (["c"], False)


def test_a_load_that_asks_again_is_told_what_masters_say_now_and_what_was_recalled_is_forgotten() -> None:
    core = make_core(replicate_after=2)
    pages = hashes(1, 2)
    assert found(core, pages, Directory({page: [B] for page in pages})) == 2
    assert locate(core, pages, Directory(), recall=True).recalled
    located = locate(core, pages[:1], Directory({pages[0]: [C]}), again=True)
    assert [located.peers[at].node for at in located.where] == ["c"]
    assert list(located.status) == [p.REMOTE], "the same fetch once more makes no page hot"
    assert not locate(core, pages, Directory(), recall=True).recalled


@pytest.mark.parametrize("directory", [Directory(complete=False), Directory(warming=True)], ids=["incomplete", "warming"])
def test_what_masters_say_that_do_not_know_of_everything_is_not_recalled(directory: Directory) -> None:
    core = make_core()
    directory.held = {page_hash(1): [B]}
    assert found(core, hashes(1), directory) == 1
    assert not locate(core, hashes(1), directory, recall=True).recalled


@pytest.mark.parametrize("event", ["a holder is down", "cleared", "masters do not answer", "a master went"])
def test_what_may_be_wrong_by_now_is_asked_again(event: str) -> None:
    turn = [0]
    core = make_core(turn=lambda: turn[0])
    assert found(core, hashes(1), Directory({page_hash(1): [B]})) == 1
    match event:
        case "a holder is down":
            handle(core, p.Release(0, peer_down=["b"]))
        case "cleared":
            core.clear(NS, 0.5)
        case "masters do not answer":
            found(core, hashes(2), Directory(away=True))
        case _:
            turn[0] += 1
    assert not locate(core, hashes(1), Directory(away=True), now=0.5, recall=True).recalled


def test_a_clear_while_masters_are_asked_leaves_nothing_to_recall() -> None:
    core = make_core()
    steps = core.handle(1, p.Exists([NS], page_hash(1)), 0.0)
    ask = next(steps)
    core.clear(NS, 0.0)
    with pytest.raises(StopIteration):
        steps.send(Directory({page_hash(1): [B]}).tell(ask))
    assert not locate(core, hashes(1), Directory(away=True), recall=True).recalled


# --------------------------------------------------------------------------- hot pages


def fetch_into(core: NodeCore, located: p.Located) -> None:
    count = located.status.count(p.FETCH)
    handle(core, p.Commit(located.txn, b"\x01" * count, [0] * count))


def test_a_page_fetched_twice_within_a_minute_stays_as_a_replica() -> None:
    core = make_core(replicate_after=2)
    one, two = hashes(1, 2)
    directory = Directory({one: [B], two: [C]})
    assert locate(core, [one], directory, now=0).status == bytes([p.REMOTE])
    located = locate(core, [one, two], directory, now=59)
    assert list(located.status) == [p.FETCH, p.REMOTE]
    assert len(located.room) == 1
    fetch_into(core, located)
    assert held(core, one, two) == b"\x01\x00"
    assert [page.rank for page in core.store.coldest(9)] == [REPLICA]
    assert core.report(0)["replicated"] == core.report(0)["replicas"] == 1


def test_fetches_far_apart_or_repeated_within_one_read_make_no_replica() -> None:
    core = make_core(replicate_after=2)
    one = hashes(1)
    directory = Directory({one[0]: [B]})
    assert locate(core, one, directory, now=0).status == bytes([p.REMOTE])
    assert locate(core, one, directory, now=1, wait_s=0.1).status == bytes([p.REMOTE])  # the same read, after a wait
    assert locate(core, one, directory, now=60).status == bytes([p.REMOTE])
    assert locate(core, one, directory, now=61).status == bytes([p.FETCH])
    never = make_core(replicate_after=0)
    for _ in range(5):
        assert locate(never, one, directory).status == bytes([p.REMOTE])


def test_nobody_waits_for_a_page_that_is_only_hot() -> None:
    core = make_core(replicate_after=1)
    one = hashes(1)
    directory = Directory({one[0]: [B]})
    assert locate(core, one, directory).status == bytes([p.FETCH])
    assert locate(core, one, directory).status == bytes([p.REMOTE]), "another engine fetches it just now"
    assert locate(core, one, directory, shared=True).status == bytes([p.WAIT]), "ranks that share do wait"


def test_heat_is_bounded() -> None:
    heat = Heat(2, max_pages=3)
    for name in range(10):
        assert not heat.fetched(NS, page_hash(name), 0.0)
    assert len(heat) == 3
    assert heat.fetched(NS, page_hash(9), 1.0)
    assert not heat.fetched(NS, page_hash(0), 1.0)


def test_heat_keeps_no_page_much_longer_than_its_window() -> None:
    heat = Heat(2, window_s=10)
    for name in range(1000):
        heat.fetched(NS, page_hash(name), 0.0)
    assert len(heat) == 1000
    for name in range(2000, 3000):
        heat.fetched(NS, page_hash(name), 20.0)
    assert len(heat) == 1000


def test_a_replica_that_nobody_else_holds_any_more_becomes_an_own_page() -> None:
    core = make_core(replicate_after=1)
    one, two = hashes(1, 2)
    directory = Directory({one: [B], two: [C]})
    fetch_into(core, locate(core, [one, two], directory))
    del directory.held[two]
    directory.away = True
    drive(core, core.check_replicas(100), directory)
    assert [page.rank for page in core.store.coldest(9)] == [REPLICA, REPLICA], "no answer is no proof"
    directory.away = False
    drive(core, core.check_replicas(101), directory)
    assert [page.rank for page in core.store.coldest(9)] == [REPLICA, REPLICA], "asked every few seconds only"
    drive(core, core.check_replicas(106), directory)
    assert {page.hash: page.rank for page in core.store.coldest(9)} == {one: REPLICA, two: OWN}


# --------------------------------------------------------------------------- clears against what is on its way


def test_a_page_on_its_way_is_not_there_after_a_clear() -> None:
    """A fetch that fills a local copy, a push of another node, and a store: none brings back what was cleared meanwhile."""
    core = make_core(replicate_after=1)
    one, two, three = hashes(1, 2, 3)
    located = locate(core, [one], Directory({one: [B]}))
    taking = core.push_offer(2, p.Push(2, "b", NS, GROUP, two, PAGE, [0]), 0.0)
    reserved = handle(core, p.Reserve(NS, three, PAGE, GROUP), owner=3)
    assert isinstance(reserved, p.Reserved)
    core.clear(NS, 1.0)
    assert handle(core, p.Commit(located.txn, b"\x01", [0])) == p.Committed(b"\x00")
    assert core.push_done(2, taking, b"\x01", PAGE) == b"\x00"
    assert handle(core, p.Commit(reserved.txn, b"\x01", [0]), owner=3) == p.Committed(b"\x00")
    assert held(core, one, two, three) == bytes(3)
    assert core.store.used_bytes == 0
    core.validate()


def test_a_clear_leaves_other_namespaces_on_their_way_alone() -> None:
    core = make_core()
    reserved = handle(core, p.Reserve(NS, page_hash(1), PAGE, GROUP))
    assert isinstance(reserved, p.Reserved)
    core.clear(b"o" * 16, 1.0)
    assert handle(core, p.Commit(reserved.txn, b"\x01", [0])) == p.Committed(b"\x01")


def test_a_replica_does_not_survive_a_clear_nor_come_back_from_a_node_that_has_not_heard_of_it() -> None:
    core = make_core(replicate_after=1)
    one = page_hash(1)
    directory = Directory({one: [B]})
    fetch_into(core, locate(core, [one], directory))
    core.clear(NS, 10.0)
    assert held(core, one) == b"\x00"
    assert locate(core, [one], directory, now=10.1).status == bytes([p.REMOTE]), "read it may be, but not kept"
    assert core.push_offer(2, p.Push(2, "b", NS, GROUP, one, PAGE, [0]), 10.1).reply.status == bytes([p.REFUSED])
    assert core.push_offer(2, p.Push(2, "b", b"o" * 16, GROUP, one, PAGE, [0]), 10.1).reply.status == bytes([p.WRITE])
    core.drop_owner(2)
    assert locate(core, [one], directory, now=10.1 + CLEARED_S).status == bytes([p.FETCH])
    store(core, hashes(2))
    assert held(core, *hashes(2)) == b"\x01", "what is stored here after the clear is there"


# --------------------------------------------------------------------------- other nodes' reads


def test_slow_readers_elsewhere_leave_this_hosts_engines_what_they_need() -> None:
    core = make_core(pages=100)
    pages = hashes(*range(80))
    store(core, pages)
    reads = [core.fetch(10 + i, p.Fetch(2, "r", NS, b"".join(pages[10 * i : 10 * i + 10]), PAGE), 0.0) for i in range(5)]
    assert [len(served.offsets) for served in reads] == [10, 10, 10, 7, 0], "three quarters of what may be pinned"
    located = locate(core, pages[50:60], Directory())
    assert located.status == bytes([p.LOCAL]) * 10
    for i, served in enumerate(reads):
        core.fetched(10 + i, served, 0)
    assert len(core.fetch(20, p.Fetch(2, "r", NS, b"".join(pages[:20]), PAGE), 1.0).offsets) == 20
    core.drop_owner(20)
    core.validate()


# --------------------------------------------------------------------------- pushed pages


def push(core: NodeCore, pages: Sequence[bytes], owner: int = 2, *, hot: bool = False, id: int = 0) -> p.PushReply:
    message = p.Push(2, "b", NS, GROUP, b"".join(pages), PAGE, list(range(len(pages))), hot, id)
    taking = core.push_offer(owner, message, 0.0)
    core.validate()
    core.push_done(owner, taking, b"\x01" * len(taking.offsets), PAGE)
    core.validate()
    return taking.reply


def test_pushed_pages_are_guests_and_hot_ones_like_own() -> None:
    core = make_core()
    one, two, three = hashes(1, 2, 3)
    store(core, [one])
    assert push(core, [one, two], id=7) == p.PushReply(bytes([p.HAVE, p.WRITE]), 7)
    push(core, [three], hot=True)
    assert {page.hash: page.rank for page in core.store.coldest(9)} == {one: OWN, two: GUEST, three: OWN}
    assert next(page.hash for page in core.store.coldest(9)) == two
    report = core.report(0)
    assert (report["taken"], report["guests"], report["writing"]) == (2, 1, 0)
    assert sum(len(blob) for _, blob in core.store.drain_changes(99)[0]) == 3 * p.HASH_BYTES, "the masters hear of them"


def test_pushed_pages_evict_nothing_and_stop_at_the_low_watermark() -> None:
    core = make_core(pages=100)
    own = hashes(*range(85))
    store(core, own)
    given = [page_hash(("given", i)) for i in range(10)]
    assert push(core, given).status == bytes([p.WRITE] * 5 + [p.REFUSED] * 5)
    assert core.store.used_bytes == core.store.low_bytes
    assert held(core, *own) == b"\x01" * 85
    assert core.report(0)["pushes_refused"] == 5


def test_pushed_pages_of_an_odd_length_stop_at_the_low_watermark_too() -> None:
    """A page takes whole blocks, however little of the last one it needs."""
    core = make_core(pages=100)
    given = [page_hash(("given", i)) for i in range(90)]
    taking = core.push_offer(2, p.Push(2, "b", NS, GROUP, b"".join(given), PAGE + 1, [0] * 90), 0.0)
    assert taking.reply.status == bytes([p.WRITE] * 45 + [p.REFUSED] * 45)
    assert core.store.used_bytes <= core.store.low_bytes


def test_a_pushed_page_with_a_wrong_checksum_does_not_count() -> None:
    core = make_core()
    one, two = hashes(1, 2)
    taking = core.push_offer(2, p.Push(2, "b", NS, GROUP, one + two, PAGE, [5, 6]), 0.0)
    assert taking.checksums == [5, 6]
    assert core.push_done(2, taking, b"\x01\x00", PAGE) == b"\x01\x00"
    assert held(core, one, two) == b"\x01\x00"


def test_room_for_a_push_comes_back_with_its_connection() -> None:
    core = make_core()
    taking = core.push_offer(2, p.Push(2, "b", NS, GROUP, page_hash(1), PAGE, [5]), 0.0)
    assert core.store.used_bytes == PAGE
    core.drop_owner(2)
    assert core.store.used_bytes == 0
    assert core.push_done(2, taking, b"\x01", PAGE) == b"\x00"
    core.validate()


def test_only_so_many_pushes_are_taken_at_once() -> None:
    core = make_core(pages=200)
    replies = []
    for owner in range(2, MAX_TAKING + 4):
        message = p.Push(2, "b", NS, GROUP, page_hash(owner), PAGE, [5])
        replies.append(core.push_offer(owner, message, 0.0).reply.status[0])
        core.validate()
    assert replies == [p.WRITE] * MAX_TAKING + [p.REFUSED] * 2
    core.drop_owner(2)
    assert push(core, hashes("next"), owner=99).status == bytes([p.WRITE])


@pytest.mark.parametrize(("length", "checksums"), [(0, 1), (-1, 1), (PAGE, 0), (PAGE, 2)])
def test_a_push_that_cannot_be_is_refused_with_its_connection(length: int, checksums: int) -> None:
    core = make_core()
    with pytest.raises(p.ProtocolError):
        core.push_offer(2, p.Push(2, "b", NS, GROUP, page_hash(1), length, [5] * checksums), 0.0)
    assert core.store.used_bytes == 0


# --------------------------------------------------------------------------- the end, and what is wrong


def test_a_node_that_ends_takes_nothing_new_and_serves_what_it_has() -> None:
    core = make_core(replicate_after=1)
    one, two = hashes(1, 2)
    store(core, [one])
    core.draining = True
    assert handle(core, p.Reserve(NS, one + two, PAGE)) == p.Reserved(0, bytes([p.REFUSED] * 2), [0, 0])
    assert push(core, [two]).status == bytes([p.REFUSED])
    assert list(locate(core, [one, two], Directory({two: [B]})).status) == [p.LOCAL, p.REMOTE]
    served = core.fetch(5, p.Fetch(2, "x", NS, one, PAGE), 0.0)
    assert served.reply.status == bytes([p.LOCAL])
    core.fetched(5, served, 1)
    usage = core.usage()
    assert (usage.room_bytes, usage.sent_bytes, usage.want_room) == (0, PAGE, True)


def test_a_writer_that_died_leaves_its_key_writable_at_once() -> None:
    core = make_core()
    first = handle(core, p.Reserve(NS, page_hash(1), PAGE), owner=1)
    second = handle(core, p.Reserve(NS, page_hash(1), PAGE), owner=2)
    assert isinstance(first, p.Reserved)
    assert isinstance(second, p.Reserved)
    assert first.where != second.where, "the dead one may still have been writing there"
    core.drop_owner(1)
    assert handle(core, p.Commit(second.txn, b"\x01", [9]), owner=2) == p.Committed(b"\x01")
    assert handle(core, p.Commit(first.txn, b"\x01", [8]), owner=1) == p.Committed(b"\x00")
    assert held(core, page_hash(1)) == b"\x01"
    assert core.store.used_bytes == PAGE


def test_what_hangs_is_a_problem_with_a_sentence() -> None:
    core = make_core()
    core.tick(0.0)
    assert core.problems(1.0) == []
    handle(core, p.Reserve(NS, page_hash(1), PAGE), now=1.0)
    core.tick(1 + STUCK_S)
    assert core.problems(1 + STUCK_S) == []
    core.tick(2 + STUCK_S)
    (problem,) = core.problems(2 + STUCK_S)
    assert "a writer has held room for 61 s" in problem
    core.drop_owner(1)
    assert core.problems(2 + STUCK_S) == []
    (problem,) = core.problems(2 + STUCK_S + STALLED_S + 1)
    assert "housekeeping has stood still for 11 s" in problem


def test_a_reader_that_hangs_is_a_problem_for_a_while() -> None:
    core = make_core()
    store(core, hashes(1))
    handle(core, p.Locate(NS, page_hash(1), PAGE), now=0.0)
    core.tick(31.0)
    (problem,) = core.problems(32.0)
    assert "until its pin expired" in problem
    core.tick(100.0)
    assert core.problems(100.0) == []


def test_nodes_that_could_not_be_read_from_are_counted_for_the_masters() -> None:
    core = make_core()
    handle(core, p.Release(0, peer_down=["b", "c"]))
    handle(core, p.Release(0, peer_down=["b"]))
    assert core.take_peers_down() == {"b": 2, "c": 1}
    assert core.take_peers_down() == {}
    for i in range(500):
        handle(core, p.Release(0, peer_down=[f"n{i}"]))
    assert len(core.take_peers_down()) <= 100


# --------------------------------------------------------------------------- neighbours

NEAR = p.Peer("near", b"i" * 8, "10.0.0.4", 1, "/near.sock")


class Neighbourhood(Directory):
    """Its second node is on this host."""

    def tell(self, ask: AskMasters) -> Told | None:
        told = super().tell(ask)
        assert told is not None
        for answer in told.answers:
            answer.peers[1] = NEAR
        return told


def test_a_neighbour_that_movers_cannot_reach_is_a_node_of_another_host_for_a_while() -> None:
    """Each rank of the host fetched its pages for itself, by tcp, every time."""
    said: list[str] = []
    core = NodeCore("a", b"a" * 8, Store(64 * PAGE), masters=True, log=lambda level, kind, text: said.append(text))
    pages = hashes(1, 2)
    directory = Neighbourhood({page: [C, B] for page in pages})
    near = locate(core, pages, directory, shared=True)
    assert (list(near.status), near.peers[near.where[0]].socket) == ([p.REMOTE] * 2, NEAR.socket)
    for now in (0.0, 30.0):
        handle(core, p.Release(0, apart=[("near", NEAR.incarnation, "Permission denied")]), now=now)
    for now in (30.0, 29.0 + APART_S):
        far = locate(core, pages, directory, now, shared=True)
        assert list(far.status) == [p.FETCH] * 2, "by one rank, for all"
        assert far.peers[far.where[0]] == p.Peer("near", NEAR.incarnation, NEAR.host, NEAR.port)
        core.drop_owner(1)
    again = locate(core, pages, directory, 30.0 + APART_S, shared=True)
    assert (list(again.status), again.peers[again.where[0]].socket) == ([p.REMOTE] * 2, NEAR.socket)
    handle(core, p.Release(0, apart=[("near", NEAR.incarnation, "Permission denied")]), now=200.0)
    assert len(said) == 1
    assert "near" in said[0]
    assert "Permission denied" in said[0]


def test_a_new_life_of_such_a_neighbour_is_tried_at_once() -> None:
    core = make_core()
    handle(core, p.Release(0, apart=[("near", b"former--", "gone")]))
    page = page_hash(1)
    located = locate(core, [page], Neighbourhood({page: [C]}))
    assert located.peers[located.where[0]].socket == NEAR.socket


def test_what_is_known_of_such_neighbours_is_bounded() -> None:
    core = make_core()
    handle(core, p.Release(0, apart=[("near", number.to_bytes(8, "little"), "gone") for number in range(1000)]))
    core.validate()
