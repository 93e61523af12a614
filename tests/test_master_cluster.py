"""The master of a cluster: shards, tiers, who is answered and in what order, who has room, and what it says of itself."""

from __future__ import annotations

import hashlib
import logging
import random

import pytest
from hicache_master import streams as master_streams
from hicache_master.core import MasterCore
from hicache_master.shard import Shard, make_shard

from hicache_mooncake.protocol import (
    COLD,
    DRAM,
    MAX_ROOM_LISTED,
    Answer,
    Beat,
    BeatReply,
    ClearNamespace,
    ClusterReport,
    ClusterStatus,
    Join,
    Joined,
    Leave,
    Lookup,
    LookupReply,
    Message,
    NodeInfo,
    ProtocolError,
    Question,
    Refused,
    Report,
    Room,
    Snapshot,
    Update,
    shard_of,
)

NS = b"n" * 16
GIB = 1 << 30


def hashes(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in numbers)


class Master:
    """A core with a clock, validated after everything that happens to it."""

    def __init__(self, seed: int = 3, **options: object) -> None:
        self.core = MasterCore(b"master-1", rng=random.Random(seed), **options)  # type: ignore[arg-type]
        self.now = 100.0

    def take(self, message: Message, sender: bytes = b"?") -> list[tuple[bytes, Message]]:
        output = self.core.handle(message, sender, self.now)
        self.core.validate()
        return output

    def answer(self, message: Message, sender: bytes = b"?") -> Message:
        ((receiver, reply),) = self.take(message, sender)
        assert receiver == sender
        return reply

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.core.validate()

    def run(self, seconds: float, *beating: str, every_s: float = 1.0) -> None:
        """Time passes, and these nodes beat."""
        for _ in range(round(seconds / every_s)):
            self.pass_time(every_s)
            for node in beating:
                self.beat(node, self.seq(node))

    def seq(self, node: str) -> int:
        stream = self.core.streams.get(node)
        assert stream is not None
        return stream.seq

    def join(self, node: str, seq: int = 0, **more: object) -> Joined:
        joined = self.answer(Join(1, 2, node, b"i1", "10.0.0.1", 7000 + len(node), GIB, seq, **more), node.encode())  # type: ignore[arg-type]
        assert isinstance(joined, Joined)
        return joined

    def beat(self, node: str, seq: int = 0, used_bytes: int = 0, **more: object) -> BeatReply:
        reply = self.answer(Beat(node, b"i1", seq, used_bytes, GIB, 0, **more), node.encode())  # type: ignore[arg-type]
        assert isinstance(reply, BeatReply)
        return reply

    def add(self, node: str, seq: int, *numbers: int, tier: int = DRAM) -> None:
        assert self.take(Update(node, b"i1", seq, [(NS, hashes(*numbers))], [], tier), node.encode()) == []

    def remove(self, node: str, seq: int, *numbers: int, tier: int = DRAM) -> None:
        assert self.take(Update(node, b"i1", seq, [], [(NS, hashes(*numbers))], tier), node.encode()) == []

    def report(self, reader: str, *failed: str) -> None:
        assert self.take(Report(reader, b"i1", dict.fromkeys(failed, 3)), reader.encode()) == []

    def ask(self, *numbers: int, asker: str = "", prefix: bool = False) -> Answer:
        reply = self.answer(Lookup(7, [Question(NS, hashes(*numbers), prefix)], asker))
        assert isinstance(reply, LookupReply)
        (answer,) = reply.answers
        return answer

    def who(self, *numbers: int, asker: str = "") -> list[str]:
        answer = self.ask(*numbers, asker=asker)
        return [answer.peers[holder - 1].node if holder else "" for holder in answer.holder]

    def others(self, *numbers: int, asker: str = "") -> list[str]:
        answer = self.ask(*numbers, asker=asker)
        return [answer.peers[holder - 1].node if holder else "" for holder in answer.others]

    def status(self, brief: bool = False) -> ClusterReport:
        report = self.answer(ClusterStatus(brief))
        assert isinstance(report, ClusterReport)
        return report

    def info(self, node: str) -> NodeInfo:
        return next(info for info in self.status().nodes if info.node == node)

    def notes(self, level: int = logging.WARNING) -> list[str]:
        return [text for at, text in self.core.notes if at >= level]


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def three(master: Master) -> Master:
    """Nodes a, b and c, which all hold page 1."""
    for node in "abc":
        master.join(node)
        master.add(node, 1, 1)
    return master


# --------------------------------------------------------------------------- shards


def test_a_shard_cuts_a_blob_as_the_rule_of_the_protocol_does() -> None:
    blob = hashes(*range(200))
    pages = [blob[at : at + 32] for at in range(0, len(blob), 32)]
    parts = []
    for index in range(3):
        own, foreign = Shard(index, 3).own(blob)
        assert own == b"".join(page for page in pages if shard_of(page, 3) == index)
        assert foreign == 200 - len(own) // 32
        parts.append(own)
    assert len(b"".join(parts)) == len(blob)
    assert all(parts)
    assert Shard(0, 1).own(blob) == (blob, 0)
    assert Shard(1, 3).own(b"") == (b"", 0)


@pytest.mark.parametrize("shard", [(1, 1), (-1, 2), (0, 0), (0, 5000)])
def test_a_shard_that_cannot_be_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="counts from 0"):
        make_shard(*shard)


def test_a_master_keeps_the_keys_of_its_shard_only_and_counts_the_others() -> None:
    master = Master(shard=(1, 4))
    mine = [number for number in range(40) if shard_of(hashes(number), 4) == 1]
    master.join("a")
    master.join("b", seq=5)
    master.add("a", 1, *range(40))
    master.take(Snapshot("b", b"i1", 5, 0, True, [(NS, hashes(*range(40)))]), b"b")
    assert [bool(node) for node in master.who(*range(40))] == [number in mine for number in range(40)]
    assert len(master.core.directory) == len(mine)
    assert master.core.stats.foreign_keys == 2 * (40 - len(mine))
    report = master.status(brief=True)
    assert (report.shard, report.shards, report.nodes, report.version) == (1, 4, [], 2)


def test_a_node_of_version_1_at_a_shard_is_taken_in_and_warned_of() -> None:
    master = Master(shard=(0, 2))
    reply = master.answer(Join(1, 1, "old", b"i1", "10.0.0.1", 7000, GIB, 0))
    assert isinstance(reply, Joined)
    assert reply.version == 1
    assert any("knows no shards" in note for note in master.notes())


# --------------------------------------------------------------------------- tiers


def test_each_tier_of_a_node_comes_and_goes_by_itself_and_dram_is_answered_first(master: Master) -> None:
    master.join("a")
    master.join("b")
    master.add("a", 1, 1, tier=COLD)
    master.add("b", 1, 1, 2)
    for _ in range(20):
        answer = master.ask(1)
        assert [(answer.peers[i - 1].node, answer.tiers[i - 1]) for i in (answer.holder[0], answer.others[0])] == [
            ("b", DRAM),
            ("a", COLD),
        ]
    assert master.ask(2).tiers == b"", "nothing to say where all is DRAM"
    master.add("a", 2, 2)
    master.remove("a", 3, 2, tier=COLD)  # it was not there
    assert master.core.holders(NS, hashes(2)) == {("a", DRAM), ("b", DRAM)}
    master.remove("a", 4, 1, tier=COLD)
    assert master.core.holders(NS, hashes(1)) == {("b", DRAM)}
    assert master.info("a").keys == 1


def test_a_node_that_holds_a_page_in_both_tiers_is_one_holder_of_it(master: Master) -> None:
    for node in ("a", "b"):
        master.join(node)
        master.add(node, 1, 1)
        master.add(node, 2, 1, tier=COLD)
    assert master.info("a").keys == 2
    for _ in range(20):
        answer = master.ask(1)
        assert {peer.node for peer in answer.peers} == {"a", "b"}
        assert not any(answer.tiers), "both of them in DRAM"
    assert master.who(1, asker="a") == ["b"]
    assert master.others(1, asker="a") == [], "b's cold copy is no second holder beside b"
    master.remove("b", 3, 1)
    for _ in range(20):
        answer = master.ask(1)
        named = [(answer.peers[i - 1].node, answer.tiers[i - 1]) for i in (answer.holder[0], answer.others[0])]
        assert named == [("a", DRAM), ("b", COLD)], "what left one tier stays in the other"
    master.remove("a", 3, 1, tier=COLD)
    assert master.core.holders(NS, hashes(1)) == {("a", DRAM), ("b", COLD)}
    master.take(Leave("a", b"i1"))
    assert (master.who(1), master.others(1)) == (["b"], [])


def test_of_a_page_that_very_many_keep_cold_those_that_have_it_in_dram_are_named() -> None:
    master = Master()
    names = [f"n{number}" for number in range(60)]
    for node in names:
        master.join(node)
        master.add(node, 1, 1, tier=DRAM if node in ("n20", "n41") else COLD)
    for _ in range(30):
        assert set(master.who(1) + master.others(1)) <= {"n20", "n41"}


def test_both_tiers_of_a_node_go_with_it_and_with_a_namespace(master: Master) -> None:
    for node in ("a", "b"):
        master.join(node)
        master.add(node, 1, 1, 2)
        master.add(node, 2, 2, 3, tier=COLD)
    master.take(ClearNamespace(NS, "b"), b"b")
    assert master.who(1, 2, 3) == ["", "", ""]
    assert master.info("a").keys == 0
    master.add("a", 3, 1)
    master.add("a", 4, 3, tier=COLD)
    assert master.who(1, 3) == ["a", "a"]
    master.take(Leave("a", b"i1"))
    assert master.who(1, 3) == ["", ""]
    master.pass_time(0.1)
    assert len(master.core.directory) == 0


def test_tiers_may_come_in_any_order_in_a_snapshot_and_do_not_empty_each_other(master: Master) -> None:
    master.join("a", seq=9)
    for part, (tier, number) in enumerate([(COLD, 1), (DRAM, 1), (COLD, 2), (DRAM, 3)]):
        master.take(Snapshot("a", b"i1", 9, part, part == 3, [(NS, hashes(number))], tier), b"a")
    held = {number: {tier for _, tier in master.core.holders(NS, hashes(number))} for number in (1, 2, 3)}
    assert held == {1: {DRAM, COLD}, 2: {COLD}, 3: {DRAM}}


def test_pages_in_dram_are_answered_before_a_large_cold_tier_has_all_come() -> None:
    master = Master(ttl_s=1.0)
    master.join("a", seq=9)

    def part(number: int, tier: int, *pages: int, last: bool = False) -> None:
        master.take(Snapshot("a", b"i1", 9, number, last, [(NS, hashes(*pages))], tier), b"a")

    part(0, DRAM, 1, 2)
    master.add("a", 10, 4)
    master.remove("a", 11, 2)
    assert master.who(1, 4) == ["", ""], "joining"
    part(1, COLD, 5)
    assert master.who(1, 2, 4, 5) == ["a", "", "a", ""]
    master.run(3, "a", every_s=0.5)
    assert master.core.warming, "what is not known may be in the cold tier"
    master.add("a", 12, 2)
    master.remove("a", 13, 1)
    master.add("a", 14, 7, tier=COLD)
    part(2, COLD, 6, last=True)
    assert master.who(1, 2, 4, 5, 6, 7) == ["", "a", "a", "a", "a", "a"]
    master.run(1, "a")
    assert not master.core.warming
    assert not master.beat("a", 14).want_snapshot


def test_a_snapshot_that_breaks_off_in_the_cold_tier_leaves_what_is_known_of_each(master: Master) -> None:
    master.join("a")
    master.add("a", 1, 1)
    master.add("a", 2, 2, tier=COLD)
    master.take(Snapshot("a", b"i1", 9, 0, False, [(NS, hashes(3))]), b"a")
    master.take(Snapshot("a", b"i1", 9, 1, False, [(NS, hashes(4))], COLD), b"a")
    master.take(Snapshot("a", b"i1", 9, 3, True, [(NS, hashes(5))], COLD), b"a")
    held = {number for number in range(6) if master.core.holders(NS, hashes(number))}
    assert held == {2, 3}
    assert master.beat("a", 9).want_snapshot


def test_a_snapshot_has_all_tiers_and_replaces_all(master: Master) -> None:
    master.join("a")
    master.add("a", 1, 1, 2)
    master.add("a", 2, 3, tier=COLD)
    master.take(Snapshot("a", b"i1", 9, 0, False, [(NS, hashes(2, 4))]), b"a")
    assert master.core.holders(NS, hashes(3)) == {("a", COLD)}, "until the new one is whole, the old one is answered"
    master.take(Snapshot("a", b"i1", 9, 1, True, [(NS, hashes(5))], COLD), b"a")
    held = {number: master.core.holders(NS, hashes(number)) for number in range(1, 6)}
    assert held == {1: set(), 2: {("a", DRAM)}, 3: set(), 4: {("a", DRAM)}, 5: {("a", COLD)}}
    master.take(Snapshot("a", b"i1", 10, 0, True, []), b"a")
    master.pass_time(0.1)
    assert len(master.core.directory) == 0


@pytest.mark.parametrize("message", [Update("a", b"i1", 1, [], [], 7), Snapshot("a", b"i1", 1, 0, True, [], -1)])
def test_a_tier_that_there_is_none_of_changes_nothing(master: Master, message: Message) -> None:
    master.join("a")
    with pytest.raises(ProtocolError, match="tier"):
        master.take(message)


# --------------------------------------------------------------------------- who is answered


def test_a_page_of_several_nodes_has_a_second_holder_to_try(three: Master) -> None:
    seen = {(three.who(1)[0], three.others(1)[0]) for _ in range(100)}
    assert {first for first, _ in seen} == set("abc")
    answer = three.ask(1, asker="a")
    assert {answer.peers[answer.holder[0] - 1].node, answer.peers[answer.others[0] - 1].node} == {"b", "c"}
    three.add("a", 2, 2)
    assert three.ask(2).others == b"", "no page of it has one"
    assert three.others(1, 2)[1] == ""


def test_the_less_loaded_of_two_holders_is_asked_first(three: Master) -> None:
    three.beat("a", 1, load=5 * GIB)
    three.beat("b", 1, load=1)
    three.beat("c", 1, load=GIB)
    for _ in range(50):
        assert three.who(1) != ["a"], "whoever it is compared with sends less"
    assert three.info("a").load == 5 * GIB
    three.beat("a", 1, load=0)
    assert {three.who(1)[0] for _ in range(50)} == {"a", "b"}


def test_a_holder_on_the_askers_host_is_preferred(master: Master) -> None:
    for node, host_id in (("a", "h1"), ("b", "h2"), ("c", "h1"), ("d", ""), ("e", "")):
        master.join(node, host_id=host_id)
        master.add(node, 1, 1)
    assert master.info("c").host_id == "h1"
    assert {master.who(1, asker="a")[0] for _ in range(30)} == {"c"}
    assert len({master.who(1, asker="d")[0] for _ in range(60)}) == 4, "a host without a name is nobody else's"
    master.beat("c", 1, load=5 * GIB)
    assert {master.who(1, asker="a")[0] for _ in range(30)} == {"c"}


def test_a_draining_node_is_answered_after_all_others_until_it_leaves(three: Master) -> None:
    three.beat("a", 1, draining=True)
    assert three.info("a").state == "draining"
    assert {three.who(1)[0] for _ in range(30)} == {"b", "c"}
    three.add("a", 2, 2)
    assert three.who(2) == ["a"], "only it has it"
    three.take(Leave("c", b"i1"))
    assert (three.who(1), three.others(1)) == (["b"], ["a"])
    three.take(Leave("b", b"i1"))
    assert three.who(1) == ["a"]
    three.take(Leave("a", b"i1"))
    three.take(Leave("a", b"i1"))  # once more: it is off the list, and that is all
    assert three.who(1, 2) == ["", ""]
    assert three.status().nodes == []


def test_a_node_that_its_readers_cannot_reach_is_not_answered_though_it_beats(three: Master) -> None:
    three.report("b", "a")
    assert three.info("a").state == "active"
    three.report("c", "a")
    assert three.info("a").state == "sick"
    assert any("'a' at 10.0.0.1:7001 is sick" in note for note in three.notes())
    assert {three.who(1)[0] for _ in range(30)} == {"b", "c"}
    three.run(4, "a", "b", "c")
    assert three.info("a").state == "sick"
    three.run(2, "a", "b", "c")
    assert three.info("a").state == "active"
    assert "a" in {three.who(1)[0] for _ in range(60)}, "with everything that it held"
    three.report("b", "a")
    assert three.info("a").state == "sick", "once more, and one word was enough"
    assert three.core.stats.sick == 2


def test_reports_of_those_who_are_no_members_do_not_count(three: Master) -> None:
    three.report("stranger", "a")
    three.take(Report("b", b"i0", {"a": 5}), b"b")
    three.report("c", "a")
    assert three.info("a").state == "active"
    assert three.core.stats.unknown_node == 2


# --------------------------------------------------------------------------- room


def test_a_node_that_asks_gets_a_sample_of_those_with_room(master: Master) -> None:
    for node in ("a", "bb", "full", "old", "sick", "drains"):
        master.join(node)
        master.beat(node, used_bytes=GIB // 2, room_bytes=100)
    master.core.membership._members["old"].version = 1
    master.beat("full", room_bytes=0)
    master.beat("drains", draining=True, room_bytes=100)
    master.join("joins", seq=4)
    master.report("a", "sick")
    master.report("bb", "sick")
    master.run(3, "bb")
    assert master.beat("a").room == [], "not asked for"
    (room,) = master.beat("a", want_room=True).room
    assert isinstance(room, Room)
    assert (room.peer.node, room.peer.port, room.capacity_bytes) == ("bb", 7002, GIB)
    assert room.age_s == pytest.approx(3)


def test_free_bytes_are_those_below_the_watermark_or_guessed_low(master: Master) -> None:
    master.join("a")
    master.join("b")
    master.beat("b", used_bytes=GIB // 2, room_bytes=77)
    assert [room.free_bytes for room in master.beat("a", want_room=True).room] == [77]
    master.beat("b", used_bytes=GIB // 2)
    assert [room.free_bytes for room in master.beat("a", want_room=True).room] == [pytest.approx(0.4 * GIB, abs=1)]
    master.beat("b", used_bytes=GIB)
    assert master.beat("a", want_room=True).room == []


def test_in_a_large_cluster_the_sample_is_bounded_and_everybodys_turn_comes(master: Master) -> None:
    names = [f"n{number}" for number in range(200)]
    for name in names:
        master.join(name)
        master.beat(name)
    seen: set[str] = set()
    for _ in range(600):
        room = master.beat("n0", want_room=True).room
        assert len(room) == MAX_ROOM_LISTED
        listed = [entry.peer.node for entry in room]
        assert len(set(listed)) == len(listed)
        seen |= set(listed)
    assert seen == set(names) - {"n0"}


def test_a_node_that_left_is_not_offered_any_more(master: Master) -> None:
    for node in "ab":
        master.join(node)
        master.beat(node)
    assert len(master.beat("a", want_room=True).room) == 1
    master.take(Leave("b", b"i1"))
    assert master.beat("a", want_room=True).room == []


# --------------------------------------------------------------------------- warming


def test_a_master_is_warming_until_a_ttl_has_passed_and_all_that_joined_are_whole(master: Master) -> None:
    assert master.join("a", seq=5).warming
    reply = master.answer(Lookup(1, [Question(NS, hashes(1), False)]))
    assert isinstance(reply, LookupReply)
    assert reply.warming
    assert master.status(brief=True).warming
    master.run(6, "a")
    assert master.beat("a", 5).warming, "a's snapshot is not there yet"
    master.take(Snapshot("a", b"i1", 5, 0, True, [(NS, hashes(1))]), b"a")
    master.pass_time(0.1)
    assert not master.beat("a", 5).warming
    master.join("b", seq=9)
    master.pass_time(0.1)
    assert not master.beat("b", 9).warming, "once warm it stays so: b is new, and was nowhere before"


def test_it_serves_what_it_knows_meanwhile(master: Master) -> None:
    master.join("a", seq=5)
    master.join("b")
    master.add("b", 1, 1)
    assert master.who(1) == ["b"]
    assert master.core.warming


def test_warming_ends_after_a_minute_even_without_a_nodes_snapshot(master: Master) -> None:
    master.join("a", seq=5)
    master.run(59, "a")
    assert master.core.warming
    master.run(2, "a")
    assert not master.core.warming
    assert any("no first snapshot of 1 nodes" in note for note in master.notes())


def test_a_node_that_died_before_its_snapshot_does_not_hold_it_up(master: Master) -> None:
    master.join("a", seq=5)
    for _ in range(7):
        master.pass_time(1)
    assert master.info("a").state == "suspected"
    assert not master.core.warming


def test_half_a_snapshot_is_never_served(master: Master) -> None:
    """The master restarted, and the connection breaks in the middle of a node's snapshot: what has come is not answered, and
    the master says that it does not know everything."""
    master.join("a", seq=5)
    master.take(Snapshot("a", b"i1", 5, 0, False, [(NS, hashes(1, 2))]), b"a")
    assert master.who(1, 2) == ["", ""]
    assert master.join("a", seq=5).want_snapshot, "a new connection: from the beginning"
    master.take(Snapshot("a", b"i1", 5, 1, True, [(NS, hashes(3))]), b"a")  # the rest of the old one
    assert master.who(1, 2, 3) == ["", "", ""]
    assert master.core.warming
    master.take(Snapshot("a", b"i1", 6, 0, True, [(NS, hashes(1, 2, 3))]), b"a")
    assert master.who(1, 2, 3) == ["a", "a", "a"]


def test_updates_are_gathered_for_longer_in_a_larger_cluster(master: Master) -> None:
    assert master.join("n0").gather_s == 0.005
    for number in range(1, 100):
        master.join(f"n{number}")
    assert master.beat("n0").gather_s == pytest.approx(0.02)
    assert master.join("m").gather_s == pytest.approx(0.0202)
    for number in range(100, 1020):
        master.core.handle(Join(1, 2, f"n{number}", b"i1", "10.0.0.1", 7000, GIB, 0), b"?", master.now)
    assert master.beat("n0").gather_s == pytest.approx(0.2042)


# --------------------------------------------------------------------------- pauses and restarts


def test_a_node_that_only_beats_for_an_hour_is_served_as_before(master: Master) -> None:
    """With the defaults, an idle node is no dead one."""
    master.join("a")
    master.add("a", 1, 1)
    for _ in range(3600):
        master.pass_time(1.0)
        assert master.beat("a", 1) == BeatReply(
            b"master-1", known=True, want_snapshot=False, warming=master.core.warming, gather_s=0.005
        )
    assert master.info("a").state == "active"
    assert master.who(1) == ["a"]
    assert master.core.stats.joins == 1


def test_a_node_that_only_updates_is_alive_too(master: Master) -> None:
    master.join("a")
    for seq in range(1, 30):
        master.pass_time(1.0)
        master.add("a", seq, seq)
    assert master.info("a").state == "active"


def test_a_paused_node_is_not_answered_and_returns_with_everything_if_it_is_the_same(master: Master) -> None:
    master = Master(ttl_s=10.0)
    master.join("a")
    master.join("b")
    master.add("a", 1, *range(50))
    master.run(15, "b")
    assert master.info("a").state == "suspected"
    assert set(master.who(*range(50))) == {""}
    assert master.beat("a", 1) == BeatReply(b"master-1", known=True, want_snapshot=False, warming=False)
    assert set(master.who(*range(50))) == {"a"}
    assert len(master.core.directory) == 50


def test_a_new_life_of_a_paused_node_inherits_nothing(master: Master) -> None:
    master.join("a")
    master.add("a", 1, 1, 2)
    master.pass_time(8)
    reply = master.answer(Join(1, 2, "a", b"i2", "10.0.0.1", 7000, GIB, 0), b"a")
    assert isinstance(reply, Joined)
    assert not reply.want_snapshot
    assert master.who(1, 2) == ["", ""]
    late = Snapshot("a", b"i1", 2, 0, True, [(NS, hashes(1, 2))])
    assert master.take(late, b"a") == [(b"a", BeatReply(b"master-1", known=False, want_snapshot=False))]
    assert master.who(1, 2) == ["", ""]


def test_a_pause_of_the_master_suspects_nobody_and_breaks_no_snapshot_off(master: Master) -> None:
    master.join("a")
    master.join("b", seq=3)
    master.add("a", 1, 1)
    master.take(Snapshot("b", b"i1", 3, 0, False, [(NS, hashes(2))]), b"b")
    master.now += 90.0
    master.core.excuse(90.0, master.now)
    master.pass_time(0.05)
    assert master.who(1) == ["a"]
    master.take(Snapshot("b", b"i1", 3, 1, True, [(NS, hashes(3))]), b"b")
    assert master.who(2, 3) == ["b", "b"]


def test_a_restarted_master_knows_nobody_and_takes_each_back_with_its_address(three: Master) -> None:
    three.add("a", 2, 2)
    restarted = Master()
    reply = restarted.take(Beat("a", b"i1", 2, 0, GIB, 0), b"a")
    assert reply == [(b"a", BeatReply(b"master-1", known=False, want_snapshot=False))]
    assert restarted.join("a", seq=2).want_snapshot
    restarted.take(Snapshot("a", b"i1", 3, 0, True, [(NS, hashes(1, 2))]), b"a")
    answer = restarted.ask(1, 2)
    assert answer.holder == b"\1\1"
    assert [(peer.node, peer.host, peer.port) for peer in answer.peers] == [("a", "10.0.0.1", 7001)]


def test_clocks_that_turn_back_make_no_negative_figures(three: Master) -> None:
    three.now -= 1000
    three.pass_time(0)
    three.beat("a", 1)
    assert all(info.age_s >= 0 for info in three.status().nodes)
    assert all(room.age_s >= 0 for room in three.beat("b", 1, want_room=True).room)
    assert three.who(1) != [""]
    before = vars_of(three)
    three.pass_time(2000)
    assert all(after >= then for then, after in zip(before, vars_of(three), strict=True))


def vars_of(master: Master) -> list[int]:
    stats = master.core.stats
    return [getattr(stats, name) for name in stats.__slots__]


# --------------------------------------------------------------------------- limits, removals


def test_removing_what_is_not_there_and_clearing_twice_is_no_error(three: Master) -> None:
    three.remove("a", 2, 1, 99)
    three.remove("a", 3, 1, 99)
    assert three.beat("a", 3) == BeatReply(b"master-1", known=True, want_snapshot=False, warming=True)
    for _ in range(2):
        assert len(three.take(ClearNamespace(NS, "b"), b"b")) == 2
        assert three.who(1) == [""]
    three.add("a", 4, 1)
    assert three.who(1) == ["a"], "a cleared page may come again"


def test_a_question_keeps_nothing_alive(three: Master) -> None:
    for _ in range(3):
        assert three.who(1) != [""]
    for node in "abc":
        three.remove(node, 2, 1)
    assert len(three.core.directory) == 0


def test_a_full_directory_says_so_and_takes_the_rest_when_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    master = Master(max_keys=100)
    master.join("a")
    master.add("a", 1, *range(90))
    master.add("a", 2, *range(90, 120))
    assert len(master.core.directory) == 100
    assert master.core.directory.refused_adds == 20
    (note,) = master.notes()
    assert "directory is full with 100 keys" in note
    assert "--max-keys" in note
    master.add("a", 3, *range(120, 130))
    assert len(master.notes()) == 1, "said once"
    assert not master.beat("a", 3).want_snapshot, "there is still no room"
    master.remove("a", 4, *range(50))
    assert master.beat("a", 4).want_snapshot, "what was not taken is asked for again"
    master.take(Snapshot("a", b"i1", 5, 0, True, [(NS, hashes(*range(50, 130)))]), b"a")
    master.pass_time(0.1)
    assert master.who(*range(50, 130)) == ["a"] * 80
    assert not master.beat("a", 5).want_snapshot


def test_updates_that_wait_for_a_snapshot_are_bounded_in_keys_and_in_number(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_streams, "MAX_LATER_UPDATES", 10)
    master.join("a", seq=5)
    master.take(Snapshot("a", b"i1", 5, 0, False, [(NS, hashes(1))]), b"a")
    for seq in range(6, 17):
        master.add("a", seq)
    assert master.core.stats.snapshots_broken == 1
    assert master.beat("a", 16).want_snapshot


def test_notes_and_refusals_do_not_grow_with_those_who_try_again(master: Master) -> None:
    for round_ in range(30):
        for number in range(20):
            reply = master.answer(Join(8, 9, f"n{number}", b"i", "10.0.0.1", 7000, 1, 0))
            assert isinstance(reply, Refused)
        assert len(master.notes()) == (20 if round_ % 6 == 0 else 0), "each a line a minute"
        master.core.notes.clear()
        master.pass_time(10.0)
    assert master.core.stats.refused_joins == 600
    last = master.core.refusals.last()
    assert [refusal.node for refusal in last] == [f"n{number}" for number in range(19, 9, -1)]
    assert all("upgrade the master" in refusal.reason for refusal in last)


def test_one_node_that_tries_again_has_one_entry_and_a_line_a_minute(master: Master) -> None:
    for _ in range(18):
        master.answer(Join(8, 9, "old", b"i", "10.0.0.1", 7000, 1, 0))
        master.pass_time(10.0)
    (refusal,) = master.core.refusals.last()
    assert (refusal.times, refusal.at) == (18, pytest.approx(270.0))
    assert len(master.notes()) == 3
