"""The parts of the router that do no I/O: bodies, answers, accounts, fairness, and what the conductor is told."""

from __future__ import annotations

import json
import random

import pytest
from hicache_master.conductor.admission import Admission, Rejection
from hicache_master.conductor.decide import Conductor
from hicache_master.conductor.policies import POLICIES
from hicache_master.conductor.prefixes import COLD, DEVICE, DRAM, HOST, Prefixes
from hicache_master.router.accounts import Accounts, Assumed, PrefillMeter, sort_out
from hicache_master.router.answers import Ends, Usage, error_code, read_usage
from hicache_master.router.app import Options
from hicache_master.router.bodies import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    BadRequest,
    Wishes,
    read_asked,
    read_wishes,
    rough,
    tenant,
    with_bootstrap,
)
from hicache_master.router.fairness import Gate
from hicache_master.router.metrics import Metrics
from hicache_master.router.routing import Flight, Routing
from hicache_master.router.workers import Facts, Worker, Workers, make_spec
from hypothesis import given
from hypothesis import strategies as st


def asked(path: str = GENERATE, **body: object):  # type: ignore[no-untyped-def]
    return read_asked(path, json.dumps(body).encode())


def test_a_body_stays_as_it_is_but_for_an_id_at_its_head() -> None:
    raw = b' {"text": "a\\u00e9", "big": 123456789012345678901234567890, "x": 1.10}'
    found = read_asked(GENERATE, raw)
    assert found.raw.endswith(raw.strip()[1:])
    assert json.loads(found.raw) == {**json.loads(raw), "rid": found.rid}
    assert read_asked(GENERATE, b'{"text": "a", "rid": "mine"}').raw == b'{"text": "a", "rid": "mine"}'
    assert json.loads(read_asked(GENERATE, b"{}").raw).keys() == {"rid"}


def test_both_halves_of_a_pair_are_told_where_they_meet() -> None:
    body = json.loads(with_bootstrap(asked(text="a"), "10.0.0.1", 8998))
    assert (body["text"], body["bootstrap_host"], body["bootstrap_port"]) == ("a", "10.0.0.1", 8998)
    assert 0 <= body["bootstrap_room"] < 1 << 63
    batch = json.loads(with_bootstrap(asked(text=["a", "b"]), "10.0.0.1", None))
    assert batch["bootstrap_host"] == ["10.0.0.1"] * 2
    assert len(set(batch["bootstrap_room"])) == 2
    assert json.loads(with_bootstrap(asked(COMPLETIONS, prompt=[1, 2]), "h", 1))["bootstrap_host"] == "h"


def test_a_client_cannot_choose_where_engines_connect() -> None:
    found = asked(text="a", bootstrap_host="evil", bootstrap_room=1)
    assert b"evil" not in found.raw
    assert with_bootstrap(found, "10.0.0.1", 1).count(b"bootstrap_host") == 1


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'"a"', b"\xff{}", b'{"text": "\xff"}', b"[" * 100_000, b'{"rid": "' + b"x" * 300 + b'"}']
)
def test_what_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        read_asked(GENERATE, raw)


@pytest.mark.parametrize(
    "headers", [{"x-slo-ttft-ms": "0"}, {"x-slo-tbt-ms": "nan"}, {"x-slo-ttft-ms": "soon"}, {"x-priority": "-1"}]
)
def test_wishes_that_make_no_sense_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match=next(iter(headers))):
        read_wishes(headers)


def test_a_tenant_is_who_has_the_key_and_not_who_somebody_says_to_be() -> None:
    one = tenant({"Authorization": "Bearer a"})
    assert one == tenant({"Authorization": "Bearer a", "x-tenant": "b", "x-user": "c"})
    assert one != tenant({"Authorization": "Bearer b"})
    assert "Bearer" not in one
    assert tenant({}) == ""


def test_texts_that_begin_alike_share_keys_and_others_do_not() -> None:
    common = "x" * 4 * 64 * 3
    one, two = rough(asked(text=common + "a" * 300), 64), rough(asked(text=common + "b" * 300), 64)
    assert one.keys[:3] == two.keys[:3]
    assert one.keys[3] != two.keys[3]
    assert set(rough(asked(text="y" + common), 64).keys).isdisjoint(one.keys)
    chat = [{"role": "user", "content": common}]
    longer = [*chat, {"role": "assistant", "content": "z"}, {"role": "user", "content": common}]
    before, after = rough(asked(CHAT, messages=chat), 64), rough(asked(CHAT, messages=longer), 64)
    assert after.keys[: len(before.keys)] == before.keys


@pytest.mark.parametrize("field", ["cache_salt", "extra_key", "lora_path", "model"])
def test_other_salts_share_no_key(field: str) -> None:
    """What one tenant has sent does not become visible to another in the time that its own request takes."""
    common = "x" * 2000
    keys = [rough(asked(text=common, **more), 64).keys for more in ({}, {field: "a"}, {field: "b"}, {field: "a"})]
    assert keys[1] == keys[3]
    assert set(keys[0]).isdisjoint(keys[1])
    assert set(keys[1]).isdisjoint(keys[2])
    assert json.loads(asked(text=common, **{field: "a"}).raw)[field] == "a"


def test_usage_is_found_in_each_form() -> None:
    generate = (
        b'data: {"text":"a","meta_info":{"prompt_tokens":30,"completion_tokens":1,"cached_tokens":20,'
        b'"cached_tokens_details":{"device":4,"host":16}}}'
    )
    found = read_usage(generate)
    assert (found.prompt_tokens, found.cached_tokens, found.by_tier) == (30, 20, {"device": 4, "host": 16})
    chat = b'"usage":{"prompt_tokens":30,"total_tokens":34,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":20}}}'
    assert read_usage(chat).cached_tokens == 20
    assert read_usage(b'{"choices":[]}').cached_tokens is None


def test_an_answer_that_talks_about_usage_is_not_taken_for_it() -> None:
    text = json.dumps(
        {"text": '{"cached_tokens": 999, "prompt_tokens": 999}', "meta_info": {"prompt_tokens": 3, "cached_tokens": 2}}
    )
    assert read_usage(text.encode()).cached_tokens == 2
    assert read_usage(json.dumps({"text": '"cached_tokens": 999'}).encode()).cached_tokens is None


def test_usage_is_found_at_the_end_of_a_stream_however_it_is_cut() -> None:
    stream = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n' * 40
    usage = b'{"prompt_tokens":30,"completion_tokens":40,"prompt_tokens_details":{"cached_tokens":20}}'
    stream += b'data: {"usage":' + usage + b"}\n\ndata: [DONE]\n\n"
    for size in (20_000, 100, 60):
        ends = Ends()
        for start in range(0, len(stream), size):
            ends.add(stream[start : start + size])
        assert ends.usage().completion_tokens == 40


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'data: {"error": {"message": "x", "code": 503}}\n\n', 503),
        (b'{"error":{"message":"x"}}', 500),
        (b'data: {"text": "\\"error\\":"}', None),
        (b"", None),
    ],
)
def test_an_error_at_the_head_of_an_answer_is_seen(data: bytes, code: int | None) -> None:
    assert error_code(data) == code


counts = st.integers(0, 40)


@given(
    st.integers(0, 2000),
    st.sampled_from([1, 16, 64]),
    counts,
    counts,
    counts,
    st.none() | st.integers(-10, 4000),
    st.booleans(),
)
def test_each_token_is_counted_once_and_no_more_are_cached_than_there_are(
    tokens: int, page: int, pages: int, known: int, expected: int, cached: int | None, read: bool
) -> None:
    done = sort_out(tokens, page, pages, known, expected, cached, read)
    assert 0 <= done.cached <= done.tokens == tokens
    assert done.cached + sum(done.missed.values()) == tokens
    assert all(lost > 0 for lost in done.missed.values())
    accounts = Accounts()
    accounts.add(done, {"device": 5000, "host": 5000})
    accounts.validate()


@pytest.mark.parametrize(
    ("cached", "missed"),
    [
        (640, {"tail": 60}),
        (512, {"new": 128, "tail": 60}),
        (320, {"elsewhere": 192, "new": 128, "tail": 60}),
        (64, {"gone": 256, "elsewhere": 192, "new": 128, "tail": 60}),
        (None, {"unreported": 700}),
    ],
)
def test_each_computed_token_has_its_reason(cached: int | None, missed: dict[str, int]) -> None:
    """Ten pages, of which eight were known and five expected in the engine."""
    assert sort_out(700, 64, 10, 8, 5, cached, read=True).missed == missed
    if cached:
        assert sort_out(700, 64, 0, 0, 0, cached, read=False).missed == {"unread": 700 - cached}


def test_cached_tokens_and_bytes_are_exported_by_tier_and_no_more_than_were_found() -> None:
    accounts = Accounts()
    accounts.add(sort_out(100, 10, 10, 5, 5, 50, True), {"device": 20, "host": 10, "storage": 20})
    accounts.add(sort_out(100, 10, 10, 5, 5, 10, True), {"device": 10, "storage": 30})
    accounts.validate()
    value = Metrics((), Gate(1, 1), accounts, lambda: 4.0, lambda: {"pool_known": 3.0}).registry.get_sample_value
    tokens = {
        tier: value("hicache_router_cached_tokens_by_tier_total", {"tier": tier}) for tier in ("device", "host", "storage")
    }
    assert tokens == {"device": 30, "host": 10, "storage": 20}
    assert sum(tokens.values()) == value("hicache_router_cached_tokens_total") == 60
    assert value("hicache_router_cached_bytes_by_tier_total", {"tier": "storage"}) == 80
    assert value("hicache_router_pool_known") == 3


def test_prefills_that_cannot_be_told_apart_are_measured_together() -> None:
    meter = PrefillMeter()
    for _ in range(3):
        meter.began("e", 10.0)
    assert meter.done("e", 100, 0, 11.5) is None
    assert meter.done("e", 100, 50, 11.5) is None
    assert meter.done("e", 300, 0, 13.0) == (150.0, (100 * 100 + 100 * 100 - 50 * 50 + 300 * 300) / 3, 1.0)
    assert meter.done("e", 100, 0, 14.0) is None
    meter.began("e", 20.0)
    meter.began("e", 20.0)
    meter.lost("e")
    assert meter.done("e", 100, 0, 30.0) is None, "how long the lost one took is not known"
    meter.began("e", 40.0)
    assert meter.done("e", 100, 0, 42.0) == (100.0, 10_000.0, 2.0)


def test_what_an_engine_is_assumed_to_have_is_bounded_by_its_room() -> None:
    assumed = Assumed(100)
    assert assumed.stored("e", tuple(range(6)), 10) == []
    assert assumed.stored("e", (0, 1, 2, 100, 101, 102, 103), 10) == []
    assumed.validate()
    assert assumed.stored("e", (200,), 10) == [3, 4, 5]
    assumed.validate()
    assert assumed.stored("e", tuple(range(11)), 10) == []
    for number in range(1000):
        assumed.stored("e", (number,), 0)
        assumed.validate()


# Fairness


def test_a_tenant_that_floods_does_not_starve_another() -> None:
    gate = Gate(waiting=10, room=4)
    for _ in range(4):
        assert gate.ask("flood") == (None, None)
    tickets = [gate.ask("flood") for _ in range(10)]
    assert all(victim is None for _, victim in tickets)
    ticket, victim = gate.ask("flood")
    assert victim == ticket, "the waiting room is full of its own"
    quiet, victim = gate.ask("quiet")
    assert victim == tickets[-1][0], "it makes room for who has less there"
    gate.leave("flood")
    assert gate.admit() == [quiet]
    gate.validate()


def test_tenants_that_both_want_all_get_equal_shares() -> None:
    gate, chance = Gate(waiting=100, room=8), random.Random(1)
    owner: dict[int, str] = {}
    inside: list[str] = []
    for step in range(4000):
        name = chance.choice(["a"] * 9 + ["b"])
        refused = gate.refuses(name)
        ticket, victim = gate.ask(name)
        assert refused == (ticket is not None and ticket == victim)
        if victim is not None:
            owner.pop(victim, None)
        if ticket is None:
            inside.append(name)
        elif ticket != victim:
            owner[ticket] = name
        if inside and step % 6 == 0:
            gate.leave(inside.pop(chance.randrange(len(inside))))
            inside += [owner.pop(each) for each in gate.admit()]
        gate.validate()
        if step > 500:
            assert inside.count("b") >= 3
    assert len(inside) == 8


# Routing


class World:
    """Plain engines p0.. that prefill 1,000 tokens a second."""

    def __init__(self, engines: int, policy: str = "pool-aware", **admission: object) -> None:
        options = Options(prefill_tokens_s=1000.0, decode_step_s=0.001, decode_request_s=0.001)
        costs = options.costs()
        conductor = Conductor(POLICIES[policy](), costs, Prefixes(), Admission(**admission))  # type: ignore[arg-type]
        self.conductor, self.workers = conductor, Workers()
        self.routing = Routing(conductor, self.workers)
        for number in range(engines):
            self.join(number, "1")

    def join(self, number: int, incarnation: str, now: float = 0.0) -> Worker:
        spec = make_spec({"url": f"http://p{number}:1", "name": f"p{number}"})
        worker = self.workers.add(spec, now)
        self.workers.answered(worker.name, Facts(incarnation, "plain", "m", 64, max_tokens=64_000), now)
        self.routing.joined(worker, now)
        return worker

    def send(self, name: str, keys: range, now: float = 0.0, **more: object) -> Flight:
        flight = Flight(name, 64 * len(keys), keys, read=True, **more)  # type: ignore[arg-type]
        assert self.routing.route(flight, now) is None
        self.routing.sent(flight, now)
        self.conductor.validate()
        return flight

    def answer(self, flight: Flight, now: float, cached: int = 0) -> None:
        self.routing.prefilled(flight, now, Usage(64 * len(flight.keys), cached))
        self.routing.ended(flight, now, well=True)
        self.conductor.validate()


def test_requests_that_share_nothing_go_to_all_engines_though_one_is_never_hit() -> None:
    """The death spiral: an engine with few hits has few pages, so it looks idle for ever to who counts hits alone."""
    world, sent = World(3), []
    for number in range(60):
        sent.append(world.send(str(number), range(1000 * number, 1000 * number + 10)))
    counts = [sum(flight.prefill.name == f"p{engine}" for flight in sent if flight.prefill) for engine in range(3)]
    assert max(counts) - min(counts) <= 1


def test_long_answers_are_spread_even_when_no_prompt_waits() -> None:
    world = World(2)
    used = []
    for number in range(10):
        flight = world.send(str(number), range(number, number + 1), now=float(number))
        world.routing.prefilled(flight, number + 0.1, None)
        assert flight.prefill is not None
        used.append(flight.prefill.name)
    assert used.count("p0") == used.count("p1") == 5


def test_a_popular_prefix_is_spread_when_its_engine_is_busy_and_kept_there_when_not() -> None:
    world = World(4)
    world.answer(world.send("first", range(20)), 2.0)
    followers = [world.send(f"f{number}", range(20), now=3.0) for number in range(2)]
    assert {flight.prefill.name for flight in followers if flight.prefill} == {"p0"}
    crowd = [world.send(f"c{number}", range(20), now=3.0) for number in range(600)]
    assert len({flight.prefill.name for flight in crowd if flight.prefill}) > 1


def test_zipf_prefixes_keep_their_hits_without_one_engine_having_all_of_them() -> None:
    """Thirty-two engines, two thirds busy if nothing were ever hit: hits as with affinity alone, and nobody waits for long."""
    world, chance, now = World(32), random.Random(3), 0.0
    prefixes = [range(1000 * number, 1000 * number + 16) for number in range(200)]
    weights = [1 / (rank + 1) for rank in range(200)]
    ends: dict[str, float] = {}
    queue: list[tuple[float, Flight, int]] = []
    seen: set[tuple[str, int]] = set()
    total = hit = 0
    for number in range(3000):
        now += 0.055
        for end, flight, cached in sorted((each for each in queue if each[0] <= now), key=lambda each: each[0]):
            world.answer(flight, end, cached)
        queue = [each for each in queue if each[0] > now]
        prefix = chance.choices(range(200), weights)[0]
        flight = Flight(str(number), 16 * 64, prefixes[prefix], read=True)
        assert world.routing.route(flight, now) is None
        world.routing.sent(flight, now)
        assert flight.prefill is not None
        name = flight.prefill.name
        cached = 16 * 64 if (name, prefix) in seen else 0
        seen.add((name, prefix))
        total, hit = total + 1, hit + bool(cached)
        ends[name] = max(now, ends.get(name, 0.0)) + 0.01 + (16 * 64 - cached) / 1000
        queue.append((ends[name], flight, cached))
    assert hit / total >= 0.9 * (1 - 200 / total)
    waits = [max(0.0, end - now) for end in ends.values()]
    assert max(waits) <= 3.0, "a prompt that has to be computed takes one second"


def test_an_engine_that_starts_anew_has_nothing_of_what_was_known() -> None:
    world = World(2)
    world.answer(world.send("first", range(20)), 2.0)
    running = world.send("second", range(20), now=2.0)
    assert running.decision is not None
    assert running.decision.prefill.pages == 20
    world.join(0, "2", now=3.0)
    third = Flight("third", 64 * 20, range(20), read=True)
    assert world.routing.route(third, 3.0) is None
    assert third.decision is not None
    assert third.decision.prefill.pages == 0
    world.answer(running, 4.0)
    fourth = Flight("fourth", 64 * 20, range(20), read=True)
    assert world.routing.route(fourth, 4.0) is None
    assert fourth.decision is not None
    assert fourth.decision.prefill.own_pages <= 20
    assert world.conductor.prefixes.match(range(20), 4.0).length(DEVICE, "p1") in (0, 20)
    world.conductor.validate()


def test_an_engine_on_which_a_request_failed_gets_it_again_only_if_there_is_no_other() -> None:
    world = World(2)
    flight = world.send("r", range(10))
    assert flight.prefill is not None
    world.routing.ended(flight, 0.1, well=False)
    assert world.routing.route(flight, 0.1, frozenset({flight.prefill.name})) is None
    assert flight.prefill.name == "p1"
    world.routing.sent(flight, 0.1)
    world.routing.ended(flight, 0.2, well=False)
    assert world.routing.route(flight, 0.2, frozenset({"p0", "p1"})) is None
    assert len(world.conductor) == 1


def test_what_no_prompt_could_make_good_is_rejected_before_it_is_read() -> None:
    world = World(2, ttft_slo_s=1.0)
    for number in range(4):
        world.send(str(number), range(1000 * number, 1000 * number + 15), wishes=Wishes(ttft_s=100.0))
    rejection = world.routing.hopeless(Flight("r", 1, (), read=False), 0.0)
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "prefill"
    assert rejection.retry_after_s is not None
    assert world.routing.hopeless(Flight("r", 1, (), read=False, wishes=Wishes(ttft_s=50.0)), 0.0) is None
    assert len(world.conductor) == 4


def test_the_decode_load_rejects_before_the_prefill_and_steadily() -> None:
    """Prefill engines are idle, decode is full: nothing is computed in vain, and as many are let in as end."""
    world = World(1, tbt_slo_s=0.05, decode_s=10.0)
    now, running, taken = 0.0, [], []
    for number in range(4000):
        now += 0.02
        for flight in [each for each in running if each.prefilled_at + 10.0 <= now]:
            running.remove(flight)
            world.routing.ended(flight, now, well=True)
        flight = Flight(str(number), 64, range(number, number + 1), read=True)
        if world.routing.route(flight, now) is None:
            world.routing.sent(flight, now)
            world.routing.prefilled(flight, now, None)
            running.append(flight)
            taken.append(now)
        assert len(running) <= 60
    rates = [sum(start <= at < start + 10 for at in taken) for start in (30, 40, 50, 60)]
    assert min(rates) > 0.9 * max(rates)


def test_tokens_that_were_guessed_are_corrected_by_what_the_engine_counts() -> None:
    """Four characters for a token, and it was one: what is learned and counted does not mix both measures."""
    world = World(1)
    seconds = world.conductor.costs.prefill.seconds(640, 0)
    for number in range(60):
        flight = world.send(str(number), range(100 * number, 100 * number + 10), now=float(10 * number))
        world.routing.prefilled(flight, 10 * number + 2 * seconds, Usage(2560, 0))
        world.routing.ended(flight, 10 * number + 5, well=True)
    assert world.conductor.costs.prefill.seconds(640, 0) == pytest.approx(2 * seconds, rel=0.1)
    again = world.send("again", range(10), now=1000.0)
    done = world.routing.account(again, Usage(2560, 2048), 1001.0)
    assert done.missed == {"gone": 256, "tail": 256}, "the last token is always computed, and its page with it"


def test_an_explanation_leaves_no_trace() -> None:
    world = World(2)
    flight = Flight("explain", 640, range(10), read=True, candidates=[])
    assert world.routing.explain(flight, 0.0) is None
    assert flight.candidates is not None
    assert [each.engine for each in flight.candidates] == ["p0", "p1"]
    assert len(world.conductor) == 0
    assert world.conductor.prefixes.expected_keys == 0
    world.conductor.validate()


def test_pages_of_an_engines_own_store_have_their_price_whatever_their_size() -> None:
    options = Options(token_bytes=1000, local_bandwidth=1e9, cold_bandwidth=1e8)
    costs = options.costs()
    for page_tokens in (64, 16):
        options.size_pages(costs, page_tokens)
        assert costs.page_bytes == page_tokens * 1000
        assert [costs.own_page_s(tier) for tier in (DEVICE, HOST, DRAM, COLD)] == [
            0.0,
            0.0,
            pytest.approx(page_tokens * 1e-6),
            pytest.approx(page_tokens * 1e-5),
        ]
