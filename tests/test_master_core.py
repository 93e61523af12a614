"""The master's answers: joins, the numbered stream with its gaps and snapshots, lookups; and a cluster on a bad network."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import pytest
from hicache_master.core import MasterCore
from hicache_master.streams import ASKED_S, MAX_SNAPSHOTS

from hicache_mooncake.protocol import (
    COLD,
    DRAM,
    Beat,
    BeatReply,
    ClearNamespace,
    ClusterReport,
    ClusterStatus,
    Hello,
    Join,
    Joined,
    Leave,
    Lookup,
    LookupReply,
    Message,
    ProtocolError,
    Question,
    Refused,
    Report,
    Snapshot,
    Update,
    shard_of,
)

NS, OTHER = b"n" * 16, b"o" * 16


def hashes(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in numbers)


class Master:
    """A core with a clock, validated after everything that happens to it."""

    def __init__(self, **options: int) -> None:
        self.core = MasterCore(b"master-1", rng=random.Random(3), **options)
        self.now = 100.0

    def take(self, message: Message, sender: bytes = b"") -> list[tuple[bytes, Message]]:
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

    def join(self, node: str, seq: int = 0, host: str = "10.0.0.1", incarnation: bytes = b"i1", port: int = 7000) -> Message:
        return self.answer(Join(1, 2, node, incarnation, host, port, 1 << 30, seq), node.encode())

    def beat(self, node: str, seq: int, incarnation: bytes = b"i1") -> BeatReply:
        reply = self.answer(Beat(node, incarnation, seq, 1, 2, 3), node.encode())
        assert isinstance(reply, BeatReply)
        return reply

    def update(
        self, node: str, seq: int, added: tuple[int, ...] = (), removed: tuple[int, ...] = (), incarnation: bytes = b"i1"
    ) -> list[tuple[bytes, Message]]:
        return self.take(Update(node, incarnation, seq, [(NS, hashes(*added))], [(NS, hashes(*removed))]), node.encode())

    def snapshot(self, node: str, seq: int, part: int, last: bool, *added: int) -> None:
        assert self.take(Snapshot(node, b"i1", seq, part, last, [(NS, hashes(*added))]), node.encode()) == []

    def who(self, *numbers: int, asker: str = "", namespace: bytes = NS) -> list[str]:
        reply = self.answer(Lookup(7, [Question(namespace, hashes(*numbers), False)], asker))
        assert isinstance(reply, LookupReply)
        assert reply.id == 7
        (answer,) = reply.answers
        return [answer.peers[holder - 1].node if holder else "" for holder in answer.holder]

    def state(self, node: str) -> str:
        report = self.answer(ClusterStatus())
        assert isinstance(report, ClusterReport)
        return next((info.state for info in report.nodes if info.node == node), "")


@pytest.fixture
def master() -> Master:
    return Master()


# --------------------------------------------------------------------------- joining


def test_a_node_that_never_sent_anything_is_active_at_once(master: Master) -> None:
    joined = master.join("a")
    assert joined == Joined(2, b"master-1", 1.0, 5.0, want_snapshot=False, warming=True, gather_s=0.005)
    assert master.state("a") == "active"
    master.update("a", 1, (1, 2))
    assert master.who(1, 2, 3) == ["a", "a", ""]


def test_a_node_with_a_past_is_joining_until_its_snapshot_is_whole(master: Master) -> None:
    joined = master.join("a", seq=9)
    assert isinstance(joined, Joined)
    assert joined.want_snapshot
    master.snapshot("a", 9, 0, False, 1)
    assert master.state("a") == "joining"
    assert master.who(1) == [""]
    master.snapshot("a", 9, 1, True, 2)
    assert master.state("a") == "active"
    assert master.who(1, 2) == ["a", "a"]
    assert not master.beat("a", 9).want_snapshot


@pytest.mark.parametrize(("low", "high", "what"), [(3, 4, "upgrade the master"), (0, 0, "upgrade the node")])
def test_a_node_of_another_protocol_is_refused_with_both_ranges(master: Master, low: int, high: int, what: str) -> None:
    reply = master.answer(Join(low, high, "a", b"i", "10.0.0.1", 7000, 1, 0))
    assert isinstance(reply, Refused)
    assert f"{low} to {high}" in reply.reason
    assert "1 to 2" in reply.reason
    assert what in reply.reason
    assert master.core.stats.refused_joins == 1
    assert master.state("a") == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_to_listen_on_is_refused(master: Master, host: str) -> None:
    reply = master.join("a", host=host)
    assert isinstance(reply, Refused)
    assert "--advertise" in reply.reason


def test_a_port_or_a_name_that_cannot_be_is_refused(master: Master) -> None:
    assert isinstance(master.join("a", port=0), Refused)
    assert isinstance(master.join("", port=7), Refused)
    assert isinstance(master.join("x" * 300, port=7), Refused)


def test_what_is_kept_of_a_refusal_is_short_however_long_the_names_are(master: Master) -> None:
    long = "n" * 1_000_000
    for message in (
        Join(8, 9, long, b"i1", "10.0.0.1", 7000, 1, 0),
        Join(1, 2, "a", b"i1", long, 7000, 1, 0),
        Join(1, 2, long, b"i1", "10.0.0.1", 7000, 1, 0),
    ):
        reply = master.answer(message)
        assert isinstance(reply, Refused)
        assert len(reply.reason) < 2_000
    assert all(len(refusal.node) + len(refusal.reason) < 3_000 for refusal in master.core.refusals.last())
    assert all(len(text) < 2_000 for _, text in master.core.notes)


def test_loopback_is_fine_among_loopback_only(master: Master) -> None:
    assert isinstance(master.join("a", host="127.0.0.1"), Joined)
    assert isinstance(master.join("b", host="localhost"), Joined)
    output = master.take(Join(1, 1, "c", b"i1", "10.0.0.3", 7000, 1, 0), b"c")
    assert {receiver: type(message) for receiver, message in output} == {b"a": Refused, b"b": Refused, b"c": Joined}
    assert not master.beat("a", 0).known
    reply = master.join("a", host="::1")
    assert isinstance(reply, Refused)
    assert "'c'" in reply.reason
    assert "--advertise" in reply.reason


def test_a_new_incarnation_starts_empty_and_the_old_one_is_unknown(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1,))
    master.join("a", incarnation=b"i2")
    assert master.who(1) == [""]
    assert not master.beat("a", 1).known
    assert master.update("a", 2, (2,)) == [(b"a", BeatReply(b"master-1", known=False, want_snapshot=False))]
    assert master.who(2) == [""]


def test_two_nodes_of_one_name_are_noted(master: Master) -> None:
    master.join("a", incarnation=b"i1", host="10.0.0.1")
    master.join("a", incarnation=b"i2", host="10.0.0.2")
    assert master.core.membership.name_clashes == 1
    assert any("two nodes are called 'a'" in note for _, note in master.core.notes)


def test_a_node_that_joins_again_after_losing_nothing_needs_no_snapshot(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1,))
    joined = master.join("a", seq=1)
    assert isinstance(joined, Joined)
    assert not joined.want_snapshot
    again = master.join("a", seq=3)
    assert isinstance(again, Joined)
    assert again.want_snapshot
    assert master.who(1) == ["a"], "what is known stays: a stale hint costs a miss, as none does"


# --------------------------------------------------------------------------- the stream


def test_a_gap_asks_for_a_snapshot_and_keeps_what_is_known(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1,))
    master.update("a", 3, (3,))
    assert master.core.stats.gaps == 1
    assert master.beat("a", 3) == BeatReply(b"master-1", True, want_snapshot=True, warming=True)
    assert master.who(1, 3) == ["a", "a"]
    master.snapshot("a", 3, 0, True, 1, 2, 3)
    assert master.who(1, 2, 3) == ["a", "a", "a"]
    assert not master.beat("a", 3).want_snapshot


def test_a_lost_last_update_is_seen_by_the_heartbeat(master: Master) -> None:
    master.join("a")
    assert master.beat("a", 1).want_snapshot


def test_updates_that_came_before_are_ignored(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1,))
    master.update("a", 2, (), (1,))
    master.update("a", 1, (1,))
    assert master.who(1) == [""]
    assert not master.beat("a", 2).want_snapshot


def test_updates_between_the_parts_of_a_snapshot_follow_it(master: Master) -> None:
    master.join("a", seq=5)
    master.snapshot("a", 5, 0, False, 1, 2)
    master.update("a", 5, (9,))  # before the snapshot: it has it, or not
    master.update("a", 6, (4,), (1,))
    master.update("a", 7, (1,), (2,))
    master.snapshot("a", 5, 1, True, 3)
    assert master.who(1, 2, 3, 4, 9) == ["a", "", "a", "a", ""]
    assert not master.beat("a", 7).want_snapshot


def test_a_hole_in_what_follows_a_snapshot_asks_for_the_next(master: Master) -> None:
    master.join("a", seq=5)
    master.snapshot("a", 5, 0, False, 1)
    master.update("a", 7, (7,))
    master.snapshot("a", 5, 1, True, 2)
    assert master.state("a") == "active"
    assert master.beat("a", 7).want_snapshot


def test_a_snapshot_that_lost_a_part_is_asked_for_again(master: Master) -> None:
    master.join("a", seq=5)
    master.snapshot("a", 5, 0, False, 1)
    assert not master.beat("a", 5).want_snapshot, "it is on its way"
    master.snapshot("a", 5, 2, True, 3)
    assert master.beat("a", 5).want_snapshot
    assert master.who(1, 3) == ["", ""]
    master.snapshot("a", 5, 0, True, 1, 2, 3)
    assert master.who(1, 2, 3) == ["a", "a", "a"]


def test_a_snapshot_that_stops_is_asked_for_again(master: Master) -> None:
    master.join("a", seq=5)
    master.snapshot("a", 5, 0, False, 1)
    for _ in range(16):
        master.pass_time(1.0)
        reply = master.beat("a", 5)
    assert reply.want_snapshot
    assert master.core.stats.snapshots_broken == 1


def test_while_a_node_sends_its_snapshot_again_its_pages_are_still_answered(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1, 2))
    master.update("a", 3)
    master.snapshot("a", 3, 0, False, 2)
    assert master.who(1, 2) == ["a", "a"]
    master.snapshot("a", 3, 1, True, 3)
    assert master.who(1, 2, 3) == ["", "a", "a"]


def test_too_many_updates_behind_a_snapshot_break_it_off(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_master.streams.MAX_LATER_KEYS", 3)
    master.join("a", seq=5)
    master.snapshot("a", 5, 0, False, 1)
    master.update("a", 6, (1, 2))
    master.update("a", 7, (3, 4))
    assert master.beat("a", 7).want_snapshot


@pytest.mark.parametrize(
    "message",
    [
        Lookup(1, [Question(b"short", hashes(1), True)]),
        Lookup(1, [Question(NS, b"x" * 33, True)]),
        Update("a", b"i1", 1, [(NS, hashes(1)), (NS, b"x")], []),
        Update("a", b"i1", 1, [], [(b"", hashes(1))]),
        Snapshot("a", b"i1", 1, 0, True, [(NS, b"x")]),
        Snapshot("a", b"i1", -1, 0, True, []),
        ClearNamespace(b"short"),
        Hello(1, 1, "load", "x"),
    ],
)
def test_what_no_honest_node_sends_raises_and_changes_nothing(master: Master, message: Message) -> None:
    master.join("a")
    with pytest.raises(ProtocolError):
        master.take(message, b"a")
    master.core.validate()
    assert len(master.core.directory) == 0


# --------------------------------------------------------------------------- silence, leaving, clearing


def test_a_suspected_node_is_not_answered_and_straight_back_with_a_beat(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1,))
    master.pass_time(5.5)
    assert master.state("a") == "suspected"
    assert master.who(1) == [""]
    assert master.beat("a", 1) == BeatReply(b"master-1", known=True, want_snapshot=False, warming=False)
    assert master.who(1) == ["a"]


def test_a_node_that_is_gone_loses_its_keys_and_must_join_again(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1,))
    master.pass_time(61)
    master.pass_time(1)
    assert master.state("a") == "gone"
    assert len(master.core.directory) == 0
    assert not master.beat("a", 1).known
    joined = master.join("a", seq=1)
    assert isinstance(joined, Joined)
    assert joined.want_snapshot


def test_a_node_that_leaves_is_not_answered_any_more(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1,))
    assert master.take(Leave("a", b"i9")) == []
    assert master.who(1) == ["a"]
    master.take(Leave("a", b"i1"))
    assert master.who(1) == [""]
    assert master.state("a") == ""
    master.pass_time(0)
    assert not master.core.sweeping


def test_a_dropped_node_goes_in_steps_that_keep_requests_short(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_master.core.SWEEP_KEYS_PER_TICK", 10)
    master.join("a")
    master.update("a", 1, tuple(range(100)))
    master.take(Leave("a", b"i1"))
    assert len(master.core.directory) == 100
    assert master.who(1) == [""]
    for left in range(90, -1, -10):
        master.pass_time(0)
        assert len(master.core.directory) == left
    master.pass_time(0)
    assert not master.core.sweeping


def test_a_clear_empties_one_namespace_and_goes_to_every_other_node(master: Master) -> None:
    for node in ("a", "b", "c"):
        master.join(node)
        master.take(Update(node, b"i1", 1, [(NS, hashes(1)), (OTHER, hashes(1))], []), node.encode())
    passed_on = ClearNamespace(NS, "a", 1)
    assert sorted(master.take(ClearNamespace(NS, "a"), b"a")) == [(b"b", passed_on), (b"c", passed_on)]
    assert master.who(1) == [""]
    assert master.who(1, namespace=OTHER) != [""]


def test_what_a_node_stored_after_its_own_clear_is_not_forgotten_with_the_rest(master: Master) -> None:
    """Its clear comes behind its updates, or again after it was cut off."""
    master.join("a")
    master.join("b", port=7001)
    master.update("a", 1, added=(1, 2))
    master.update("b", 1, added=(3,))
    master.update("a", 2, removed=(1, 2))
    master.take(ClearNamespace(NS, "a"), b"a")
    assert not master.beat("a", 2).want_snapshot, "a clear with nothing behind it costs no snapshot"
    assert not master.beat("b", 1).want_snapshot
    master.update("a", 3, added=(4,))
    master.take(ClearNamespace(NS, "a"), b"a")
    assert master.beat("a", 3).want_snapshot
    master.snapshot("a", 4, 0, False, 4)
    master.take(ClearNamespace(NS, "a"), b"a")
    assert master.beat("a", 4).want_snapshot, "what came of a snapshot is gone as well"
    master.snapshot("a", 5, 0, True, 4)
    assert master.who(3, 4) == ["", "a"]
    with pytest.raises(ProtocolError):
        master.take(ClearNamespace(NS, "a" * 5000), b"a")


def test_however_many_namespaces_were_cleared_a_node_that_joins_gets_its_answer_first(master: Master) -> None:
    """The queue to a peer has 256 places, and what finds none is lost."""
    master.pass_time(0.1)
    master.join("a")
    clears = [ClearNamespace(number.to_bytes(16, "big"), "a") for number in range(500)]
    for clear in clears:
        master.take(clear, b"a")
    output = master.take(Join(1, 2, "b", b"i1", "10.0.0.1", 7001, 1 << 30, 0), b"b")
    assert isinstance(output[0][1], Joined)
    told = [message for _, message in output[1:]]
    while len(told) < len(clears):
        assert len(output) < 128, "with room for others"
        output = master.take(Beat("b", b"i1", 0, 1, 2, 3), b"b")
        reply = output[0][1]
        assert isinstance(reply, BeatReply)
        assert reply.clears == len(told), "those that were told before it"
        assert len(output) > 1
        told += [message for _, message in output[1:]]
    assert told == [ClearNamespace(clear.namespace, "a", number) for number, clear in enumerate(clears[::-1], 1)]
    assert master.beat("b", 0).clears == len(clears)


def test_a_namespace_that_is_cleared_once_more_meanwhile_is_told_of_once(master: Master) -> None:
    """What was stored in it since would be lost else."""
    master.pass_time(0.1)
    master.join("a")
    for number in range(200):
        master.take(ClearNamespace(number.to_bytes(16, "big"), "a"), b"a")
    last = bytes(16)
    told = [message for _, message in master.take(Join(1, 2, "b", b"i1", "10.0.0.1", 7001, 1 << 30, 0), b"b")[1:]]
    told += [message for _, message in master.take(ClearNamespace(last, "a"), b"a")]
    for _ in range(4):
        told += [message for _, message in master.take(Beat("b", b"i1", 0, 1, 2, 3), b"b")[1:]]
    assert [message.namespace for message in told if isinstance(message, ClearNamespace)].count(last) == 1
    assert len(told) == 200


def test_a_restarted_master_reads_a_few_snapshots_at_a_time(master: Master) -> None:
    """All at once would all be whole at the end only, and lookups would wait for a part of each."""
    names = [f"n{number}" for number in range(50)]
    replies = {name: master.join(name, seq=1, port=7000 + port) for port, name in enumerate(names)}
    first = {name for name, reply in replies.items() if isinstance(reply, Joined) and reply.want_snapshot}
    assert len(first) == MAX_SNAPSHOTS
    assert {name for name in names if master.beat(name, 1).want_snapshot} == first, "the answer may have been lost"
    stuck, *sending = sorted(first)
    for name in sending:
        master.snapshot(name, 2, 0, False, 1)
    master.pass_time(ASKED_S - 1)
    assert not any(master.beat(name, 1).want_snapshot for name in names if name not in first)
    for name in sending:
        master.snapshot(name, 2, 1, False, 2)
    master.pass_time(2)
    (second,) = [name for name in names if name not in first and master.beat(name, 1).want_snapshot]
    assert second != stuck, "whoever does not begin makes room for another one"
    for _ in range(10):
        for name in names:
            if name in sending:
                master.snapshot(name, 2, 2, True, 3)
                sending.remove(name)
            elif master.beat(name, 1).want_snapshot:
                master.snapshot(name, 3, 0, True, 4)
    assert {master.state(name) for name in names} == {"active"}


def test_a_master_that_stands_still_at_its_start_warms_for_as_long_as_any(master: Master) -> None:
    master.pass_time(0.1)
    assert master.core.warming
    master.now += 20
    master.core.excuse(20, master.now)
    master.pass_time(0.1)
    assert master.core.warming, "nobody had the time to join"
    for _ in range(60):
        master.pass_time(0.1)
    assert not master.core.warming


def test_the_asker_is_never_the_answer(master: Master) -> None:
    master.join("a")
    master.join("b")
    master.update("a", 1, (1, 2))
    master.update("b", 1, (2,))
    assert master.who(1, 2, asker="a") == ["", "b"]
    assert master.who(1, 2, asker="b") == ["a", "a"]


def test_the_report_lists_every_node(master: Master) -> None:
    master.join("a")
    master.update("a", 1, (1, 2))
    master.beat("a", 1)
    master.pass_time(2)
    report = master.answer(ClusterStatus())
    assert isinstance(report, ClusterReport)
    (info,) = report.nodes
    assert (info.node, info.keys, info.used_bytes, info.capacity_bytes, info.objects) == ("a", 2, 1, 2, 3)
    assert info.age_s == pytest.approx(2)
    assert report.keys == 2


# --------------------------------------------------------------------------- a cluster on a bad network


@dataclass
class Node:
    """What a node's link does, in one process: numbered updates, snapshots when asked, joins when unknown. One of version 1 has
    no cold tier, does not drain and reports nobody."""

    name: str
    incarnation: bytes
    version: int = 2
    held: dict[int, set[int]] = field(default_factory=lambda: {DRAM: set(), COLD: set()})
    seq: int = 1
    joined: bool = False
    alive: bool = True
    draining: bool = False

    def join(self) -> Message:
        return Join(
            1, self.version, self.name, self.incarnation, "10.0.0.1", 7000, 1, self.seq, f"host-{self.name}", self.draining
        )

    def change(self, tier: int, added: set[int], removed: set[int]) -> Message:
        self.held[tier] = (self.held[tier] | added) - removed
        self.seq += 1
        columns = [(NS, hashes(*(added - removed)))], [(NS, hashes(*removed))]
        return Update(self.name, self.incarnation, self.seq, *columns, tier)

    def beat(self) -> Message:
        if not self.joined:
            return self.join()
        return Beat(self.name, self.incarnation, self.seq, 0, 10, 0, draining=self.draining, want_room=True)

    def snapshot(self, rng: random.Random) -> list[Message]:
        update = self.change(DRAM, set(), set())  # each snapshot has a number of its own
        parts: list[tuple[int, list[int]]] = []
        for tier, held in self.held.items():
            keys = sorted(held)
            cuts = sorted(rng.sample(range(len(keys) + 1), min(2, len(keys))))
            parts += [(tier, keys[a:b]) for a, b in zip([0, *cuts], [*cuts, len(keys)], strict=True)]
        return [update] + [
            Snapshot(self.name, self.incarnation, self.seq, i, i == len(parts) - 1, [(NS, hashes(*part))], tier)
            for i, (tier, part) in enumerate(parts)
        ]


class Cluster:
    """Four nodes, one of them of version 1, and a master of a shard that crash and restart; they drain, move pages between
    tiers and report each other; and a network that loses, repeats and reorders."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.born = 0
        self.wire: list[tuple[str, Message]] = []
        self.bad = True
        self.named = 0
        self.loss = (0.15, 0.02, 0.02)[seed % 3]
        self.shard = (0, 1) if seed % 2 else (1, 2)
        self.nodes = {name: self.new_node(name) for name in "abcd"}
        self.restart_master()

    def new_node(self, name: str) -> Node:
        return Node(name, self.incarnation(), version=1 if name == "d" else 2)

    def incarnation(self) -> bytes:
        self.born += 1
        return self.born.to_bytes(8, "little")

    def restart_master(self) -> None:
        rng = random.Random(self.born)
        self.master = MasterCore(self.incarnation(), ttl_s=5.0, forget_s=20.0, shard=self.shard, rng=rng)

    def send(self, node: Node, *messages: Message) -> None:
        for message in messages:
            if self.bad and self.rng.random() < self.loss:
                continue
            self.wire.append((node.name, message))
            if self.bad and self.rng.random() < self.loss:
                self.wire.append((node.name, message))

    def deliver(self) -> None:
        if not self.wire:
            return
        name, message = self.wire.pop(self.rng.randrange(min(len(self.wire), 6)) if self.bad else 0)
        for receiver, reply in self.master.handle(message, name.encode(), self.now):
            self.master.validate()
            if not self.bad or self.rng.random() > self.loss:
                self.reply(self.nodes[receiver.decode()], reply)
        self.master.validate()

    def reply(self, node: Node, reply: Message) -> None:
        if not node.alive:
            return
        if isinstance(reply, Joined):
            node.joined = True
        elif isinstance(reply, BeatReply) and not reply.known:
            node.joined = False
            self.send(node, node.join())
        if isinstance(reply, Joined | BeatReply) and reply.want_snapshot:
            self.send(node, *node.snapshot(self.rng))

    def event(self) -> None:
        rng = self.rng
        if rng.random() < 0.2:
            self.look(rng.choice("abcd"))
        node = self.nodes[rng.choice("abcd")]
        dice = rng.random()
        if dice < 0.35:
            for _ in range(4):
                self.deliver()
        elif dice < 0.65:
            if node.alive:
                numbers = range(20)
                tier = rng.choice((DRAM, DRAM, COLD)) if node.version > 1 else DRAM
                added, removed = rng.sample(numbers, rng.randrange(4)), rng.sample(numbers, rng.randrange(3))
                self.send(node, node.change(tier, set(added), set(removed)))
        elif dice < 0.82:
            if node.alive:
                self.send(node, node.beat())
        elif dice < 0.85:
            if node.alive and node.version > 1:
                node.draining = rng.random() < 0.3
                self.send(node, Report(node.name, node.incarnation, dict.fromkeys(rng.sample("abcd", 2), 1)))
        elif dice < 0.90:
            node.alive = False
        elif dice < 0.95:
            if not node.alive:
                self.nodes[node.name] = self.new_node(node.name)
        elif dice < 0.953:
            self.restart_master()
        elif dice < 0.96:
            if node.alive:
                self.send(node, Leave(node.name, node.incarnation))
        else:
            self.now += rng.random() * 2
            self.master.tick(self.now)
            self.master.validate()

    def look(self, asker: str) -> None:
        """Whoever is named is in rotation, in its present life, and not the asker."""
        ((_, reply),) = self.master.handle(Lookup(1, [Question(NS, hashes(*range(20)), False)], asker), b"?", self.now)
        assert isinstance(reply, LookupReply)
        (answer,) = reply.answers
        in_rotation = {
            (member.name, member.incarnation) for member in self.master.membership if member.state in ("active", "draining")
        }
        assert {(peer.node, peer.incarnation) for peer in answer.peers} <= in_rotation
        assert asker not in {peer.node for peer in answer.peers}
        for first, second in zip(answer.holder, answer.others, strict=False):
            assert not second or answer.peers[first - 1].node != answer.peers[second - 1].node
        self.named += len(answer.peers)

    def quiet_down(self) -> None:
        self.bad = False
        for _ in range(60):
            for node in self.nodes.values():
                if node.alive:
                    self.send(node, node.beat())
            while self.wire:
                self.deliver()
            self.now += 1.0
            self.master.tick(self.now)
            self.master.validate()

    def known(self) -> set[tuple[str, int, int]]:
        """(node, tier, page) as the master has it."""
        return {(*holder, number) for number in range(20) for holder in self.master.holders(NS, hashes(number))}

    def held(self) -> set[tuple[str, int, int]]:
        """The same as it is, of the master's shard."""
        index, count = self.shard
        return {
            (node.name, tier, number)
            for node in self.nodes.values()
            if node.alive
            for tier, held in node.held.items()
            for number in held
            if shard_of(hashes(number), count) == index
        }


@pytest.mark.parametrize("seed", range(60))
def test_after_any_trouble_the_directory_is_the_truth_again(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(700):
        cluster.event()
    assert cluster.named or cluster.loss > 0.1, "and meanwhile it was of use"
    cluster.quiet_down()
    assert cluster.known() == cluster.held()
    states = {member.name: member.state for member in cluster.master.membership}
    for name, node in cluster.nodes.items():
        if node.alive:
            assert states[name] == ("draining" if node.draining else "active")
        else:
            assert states.get(name, "gone") == "gone"
    assert cluster.master.directory.sweeping is False
    assert not cluster.master.warming
