"""A lookup without I/O: its shares of each shard, the second master that is asked in time, and the answer put together."""

from __future__ import annotations

import hashlib
import random

import pytest

from hicache_mooncake.node.link_core import LinkView, MasterView
from hicache_mooncake.node.lookup_plan import Answers, Lookups
from hicache_mooncake.protocol import COLD, Answer, Lookup, LookupReply, Peer, ProtocolError, Question, shard_of

NS = b"n" * 16
NOW = 100.0


def page_hash(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def blob(*numbers: int) -> bytes:
    return b"".join(map(page_hash, numbers))


def peer(name: str) -> Peer:
    return Peer(name, name.encode(), "10.0.0.1", 7000)


def view_of(master: str, shard: int = 0, **changes: object) -> MasterView:
    fields: dict[str, object] = {
        "master": master,
        "state": "joined",
        "shard": shard,
        "refusal": "",
        "answered_at": NOW,
        "ttl_s": 5.0,
        "warming": False,
        "version": 2,
    }
    return MasterView(**(fields | changes))  # type: ignore[arg-type]


def view(*masters: MasterView, shards: int = 1) -> LinkView:
    return LinkView(shards, masters)


class Holders:
    """What a directory of so many shards answers, worked out one page at a time."""

    def __init__(self, rng: random.Random, numbers: range, names: list[str]) -> None:
        self.holders = {page_hash(n): rng.sample(names, rng.choice((0, 1, 1, 2))) for n in numbers}

    def reply(self, lookup: Lookup) -> LookupReply:
        answers = []
        for question in lookup.questions:
            peers: list[str] = []
            holder, others = bytearray(), bytearray()
            for at in range(0, len(question.hashes), 32):
                names = self.holders.get(question.hashes[at : at + 32], [])
                if not names and question.prefix:
                    break
                codes = []
                for name in names:
                    if name not in peers:
                        peers.append(name)
                    codes.append(peers.index(name) + 1)
                holder.append(codes[0] if codes else 0)
                others.append(codes[1] if len(codes) > 1 else 0)
            answers.append(Answer(bytes(holder), [peer(name) for name in peers], bytes(others) if any(others) else b""))
        return LookupReply(lookup.id, answers)


def named(answer: Answer) -> list[list[str]]:
    others = answer.others or bytes(len(answer.holder))
    return [[answer.peers[code - 1].node for code in pair if code] for pair in zip(answer.holder, others, strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_the_answer_of_many_shards_is_that_of_one(seed: int) -> None:
    rng = random.Random(seed)
    shards = rng.choice((1, 2, 3, 4, 7))
    holders = Holders(rng, range(60), [f"node-{i}" for i in range(5)])
    questions = [
        Question(NS, blob(*rng.sample(range(80), rng.randrange(40))), rng.random() < 0.5) for _ in range(rng.randrange(1, 5))
    ]
    plan = Lookups().begin(questions, view(*(view_of(f"m{i}", i) for i in range(shards)), shards=shards), "asker", NOW, 1.0)
    asks = plan.step(NOW)
    rng.shuffle(asks)
    for ask in asks:
        shard = int(ask.master[1:])
        for question in ask.message.questions:
            hashes = [question.hashes[at : at + 32] for at in range(0, len(question.hashes), 32)]
            assert {shard_of(h, shards) for h in hashes} <= {shard}
        assert plan.received(ask.master, holders.reply(ask.message), NOW)
    assert plan.done
    plan.end(NOW)
    result = plan.result()
    assert result is not None
    assert result.complete
    for question, answer in zip(questions, result, strict=True):
        expected = []
        for at in range(0, len(question.hashes), 32):
            names = holders.holders.get(question.hashes[at : at + 32], [])
            if question.prefix and not names:
                break
            expected.append(names)
        assert named(answer) == expected


def test_a_prefix_ends_at_the_first_page_of_any_shard_that_is_not_known() -> None:
    numbers = list(range(12))
    holders = Holders(random.Random(0), range(0), [])
    holders.holders = {page_hash(n): ["b"] for n in numbers if n != 5}
    plan = Lookups().begin(
        [Question(NS, blob(*numbers), True)], view(view_of("m0", 0), view_of("m1", 1), shards=2), "a", NOW, 1
    )
    for ask in plan.step(NOW):
        plan.received(ask.master, holders.reply(ask.message), NOW)
    result = plan.result()
    assert result is not None
    assert result[0].holder == b"\1" * 5


def test_a_shard_without_an_answer_leaves_its_pages_absent_and_says_so() -> None:
    numbers = list(range(40))
    holders = Holders(random.Random(0), range(0), [])
    holders.holders = {page_hash(n): ["b"] for n in numbers}
    questions = [Question(NS, blob(*numbers), False), Question(NS, blob(*numbers), True)]
    plan = Lookups().begin(questions, view(view_of("m0", 0), view_of("m1", 1), shards=2), "a", NOW, 1.0)
    for ask in plan.step(NOW):
        if ask.master == "m1":
            plan.received(ask.master, holders.reply(ask.message), NOW)
    assert not plan.done
    assert plan.step(NOW + 1.0) == []
    assert plan.done
    result = plan.result()
    assert isinstance(result, Answers)
    assert not result.complete
    assert result[0].holder == bytes(shard_of(page_hash(n), 2) for n in numbers)
    first = next(n for n in numbers if shard_of(page_hash(n), 2) == 0)
    assert result[1].holder == b"\1" * first
    nobody = Lookups().begin(questions, view(view_of("m0", 0), shards=0), "a", NOW, 1.0)
    assert nobody.done
    assert nobody.result() is None


def test_a_shard_that_has_no_pages_of_the_question_is_not_asked() -> None:
    number = next(n for n in range(100) if shard_of(page_hash(n), 4) == 3)
    masters = [view_of(f"m{i}", i) for i in range(4)]
    plan = Lookups().begin([Question(NS, page_hash(number), True)], view(*masters, shards=4), "a", NOW, 1.0)
    assert [ask.master for ask in plan.step(NOW)] == ["m3"]
    plan = Lookups().begin([Question(NS, b"", True)], view(*masters, shards=4), "a", NOW, 1.0)
    assert plan.done
    result = plan.result()
    assert result is not None
    assert result.complete
    assert [answer.holder for answer in result] == [b""]


# --------------------------------------------------------------------------- whom to ask


def question() -> list[Question]:
    return [Question(NS, blob(1, 2), False)]


def good(number: int, holder: bytes = b"\1\0", *, warming: bool = False) -> LookupReply:
    return LookupReply(number, [Answer(holder, [peer("b")] if any(holder) else [])], warming)


@pytest.mark.parametrize(("timeout_s", "hedge_s"), [(0.2, 0.05), (0.4, 0.1), (2.0, 0.15)])
def test_a_silent_master_costs_a_quarter_of_the_time_and_then_nothing(timeout_s: float, hedge_s: float) -> None:
    lookups = Lookups()
    masters = view(view_of("m0"), view_of("m1"))
    plan = lookups.begin(question(), masters, "a", NOW, timeout_s)
    (first,) = plan.step(NOW)
    assert plan.step(NOW + hedge_s / 2) == []
    assert plan.next_due(NOW) == pytest.approx(NOW + hedge_s)
    (second,) = plan.step(NOW + hedge_s)
    assert {first.master, second.master} == {"m0", "m1"}
    assert first.message == second.message
    assert plan.received(second.master, good(second.message.id), NOW + hedge_s + 0.001)
    assert plan.done
    plan.end(NOW + hedge_s + 0.001)
    assert plan.blamed == {first.master}
    result = plan.result()
    assert result is not None
    assert result.complete
    assert result[0].holder == b"\1\0"
    # For half a second nobody asks it, then one does.
    assert [a.master for a in lookups.begin(question(), masters, "a", NOW, 2).step(NOW + 0.2)] == [second.master]
    assert [a.master for a in lookups.begin(question(), masters, "a", NOW, 2).step(NOW + 1.0)] == [first.master]
    assert [a.master for a in lookups.begin(question(), masters, "a", NOW, 2).step(NOW + 1.0)] == [second.master]


def test_the_first_answer_wins_and_the_late_one_is_not_blamed_for_a_photo_finish() -> None:
    lookups = Lookups()
    plan = lookups.begin(question(), view(view_of("m0"), view_of("m1")), "a", NOW, 2.0)
    (first,) = plan.step(NOW)
    (second,) = plan.step(NOW + 0.15)
    plan.received(first.master, good(first.message.id), NOW + 0.16)
    plan.end(NOW + 0.16)
    assert plan.done
    assert plan.blamed == set()
    assert lookups.breaker(second.master).allows(NOW + 0.16, 1.0)


def test_a_third_master_is_asked_when_two_are_silent() -> None:
    plan = Lookups().begin(question(), view(view_of("m0"), view_of("m1"), view_of("m2")), "a", NOW, 2.0)
    asked = [plan.step(NOW + t)[0].master for t in (0.0, 0.16, 0.32)]
    assert sorted(asked) == ["m0", "m1", "m2"]
    assert plan.step(NOW + 1.0) == []
    assert not plan.done
    plan.step(NOW + 2.0)
    assert plan.done
    assert plan.result() is None
    assert plan.blamed == set(asked)


def test_a_master_that_cannot_be_reached_or_talks_nonsense_is_replaced_at_once() -> None:
    for failure in (
        None,
        LookupReply(1, []),
        LookupReply(1, [Answer(b"\2\0", [peer("b")])]),
        LookupReply(1, [Answer(b"\1", [])]),
    ):
        plan = Lookups().begin(question(), view(view_of("m0"), view_of("m1")), "a", NOW, 2.0)
        (first,) = plan.step(NOW)
        if failure is None:
            plan.failed(first.master, NOW)
        else:
            plan.received(first.master, failure, NOW)
        (second,) = plan.step(NOW)
        assert second.master != first.master
        plan.received(second.master, good(second.message.id), NOW)
        assert plan.result() is not None
        assert plan.garbage == (failure is not None)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"\1\0", [peer("b")], others=b"\1"),
        Answer(b"\1\0", [peer("b")], others=b"\2\0"),
        Answer(b"\1\0", [peer("b")], tiers=b"\0\0"),
        Answer(b"\1\0\0", [peer("b")]),
        Answer(b"\1", [peer("b")]),
    ],
)
def test_columns_that_do_not_fit_are_garbage(answer: Answer) -> None:
    plan = Lookups().begin(question(), view(view_of("m0")), "a", NOW, 1.0)
    (ask,) = plan.step(NOW)
    plan.received("m0", LookupReply(ask.message.id, [answer]), NOW)
    assert plan.garbage == 1
    assert plan.done
    assert plan.result() is None


@pytest.mark.parametrize(
    "worse",
    [
        {"warming": True},
        {"state": "joining"},
        {"state": "waiting"},
        {"answered_at": NOW - 6},
        {"warming": True, "answered_at": 0.0},
    ],
)
def test_masters_that_are_well_come_first(worse: dict[str, object]) -> None:
    for names in (("m0", "m1"), ("m1", "m0")):
        plan = Lookups().begin(question(), view(view_of(names[0], **worse), view_of(names[1])), "a", NOW, 1.0)
        assert [ask.master for ask in plan.step(NOW)] == [names[1]]
    alone = Lookups().begin(question(), view(view_of("m0", **worse)), "a", NOW, 1.0)
    assert [ask.master for ask in alone.step(NOW)] == ["m0"], "it is all there is"


def test_masters_that_refused_or_do_not_fit_are_never_asked() -> None:
    plan = Lookups().begin(question(), view(view_of("m0", refusal="no"), view_of("m1", shard=-1)), "a", NOW, 1.0)
    assert plan.step(NOW) == []
    assert plan.done
    assert plan.result() is None


def test_nodes_spread_over_masters_that_are_equal() -> None:
    masters = view(view_of("m0"), view_of("m1"), view_of("m2"))
    first = [Lookups().begin(question(), masters, f"node-{i}", NOW, 1.0).step(NOW)[0].master for i in range(60)]
    assert min(first.count(m) for m in ("m0", "m1", "m2")) >= 10


def test_warming_is_passed_on_when_any_shard_is() -> None:
    masters = view(view_of("m0", 0), view_of("m1", 1, warming=True), shards=2)
    plan = Lookups().begin([Question(NS, blob(*range(20)), False)], masters, "a", NOW, 1.0)
    for ask in plan.step(NOW):
        count = len(ask.message.questions[0].hashes) // 32
        plan.received(ask.master, LookupReply(ask.message.id, [Answer(bytes(count), [])], ask.master == "m1"), NOW)
    result = plan.result()
    assert result is not None
    assert result.complete
    assert result.warming
    assert result.answers is result


def test_one_node_in_two_tiers_stays_two_holders() -> None:
    masters = view(view_of("m0", 0), view_of("m1", 1), shards=2)
    numbers = list(range(16))
    plan = Lookups().begin([Question(NS, blob(*numbers), False)], masters, "a", NOW, 1.0)
    for ask in plan.step(NOW):
        count = len(ask.message.questions[0].hashes) // 32
        tier = COLD if ask.master == "m1" else 0
        answer = Answer(b"\1" * count, [peer("b")], tiers=bytes([tier]) if tier else b"")
        plan.received(ask.master, LookupReply(ask.message.id, [answer]), NOW)
    result = plan.result()
    assert result is not None
    (answer,) = result
    assert [answer.tiers[code - 1] for code in answer.holder] == [shard_of(page_hash(n), 2) for n in numbers]


def test_more_holders_than_a_column_can_name_cost_hits_and_nothing_else() -> None:
    """Four shards that name 255 nodes each: an answer has 255."""
    masters = view(*(view_of(f"m{i}", i) for i in range(4)), shards=4)
    numbers = list(range(1200))
    plan = Lookups().begin([Question(NS, blob(*numbers), False)], masters, "a", NOW, 1.0)
    told: dict[bytes, str] = {}
    for ask in plan.step(NOW):
        hashes = ask.message.questions[0].hashes
        names = [f"{ask.master}-{i}" for i in range(255)]
        holder = bytes(1 + i % 255 for i in range(len(hashes) // 32))
        for i, code in enumerate(holder):
            told[hashes[32 * i : 32 * i + 32]] = names[code - 1]
        plan.received(ask.master, LookupReply(ask.message.id, [Answer(holder, [peer(name) for name in names])]), NOW)
    result = plan.result()
    assert result is not None
    (answer,) = result
    assert len(answer.peers) == 255
    for n, code in zip(numbers, answer.holder, strict=True):
        assert not code or answer.peers[code - 1].node == told[page_hash(n)]
    assert answer.holder.count(0) < len(numbers) - 200


def test_late_and_foreign_replies_are_not_taken() -> None:
    lookups = Lookups()
    old = lookups.begin(question(), view(view_of("m0")), "a", NOW, 1.0)
    (ask,) = old.step(NOW)
    old.end(NOW + 0.001)
    plan = lookups.begin(question(), view(view_of("m0")), "a", NOW, 1.0)
    plan.step(NOW)
    assert not plan.received("m0", good(ask.message.id), NOW)
    assert not plan.received("m9", good(ask.message.id + 1), NOW)
    assert not plan.done


def test_a_call_without_time_blames_nobody() -> None:
    lookups = Lookups()
    plan = lookups.begin(question(), view(view_of("m0")), "a", NOW, 0.01)
    plan.step(NOW)
    plan.step(NOW + 0.01)
    assert plan.done
    assert plan.blamed == set()


def test_ragged_and_oversized_questions_are_refused() -> None:
    with pytest.raises(ProtocolError):
        Lookups().begin([Question(NS, b"x" * 33, False)], view(view_of("m0")), "a", NOW, 1.0)
    with pytest.raises(ProtocolError):
        Lookups().begin([Question(NS, b"x" * 32 * 131_073, False)], view(view_of("m0")), "a", NOW, 1.0)
