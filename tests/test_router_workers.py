"""What the router knows of its engines: how they are named, when they get nothing, and when they are gone."""

from __future__ import annotations

import pytest
from hicache_master.router.workers import (
    FAILURES,
    MAX_WORKERS,
    MISSED_PROBES,
    OPEN_S,
    Breaker,
    Facts,
    Spec,
    Worker,
    WorkerError,
    Workers,
    make_spec,
    parse_spec,
    read_facts,
)


def facts(incarnation: str = "1", role: str = "plain", model: str = "m", page_size: int = 64, **more: object) -> Facts:
    return Facts(incarnation, role, model, page_size, **more)  # type: ignore[arg-type]


def spec(number: int, role: str = "plain", **more: object) -> Spec:
    return make_spec({"url": f"http://10.0.0.{number}:30000", "role": role, **more})


def up(workers: Workers, number: int, role: str = "plain", now: float = 0.0) -> Worker:
    worker = workers.add(spec(number, role), now)
    assert workers.answered(worker.name, facts(role=role, bootstrap_port=8998), now)
    workers.validate()
    return worker


@pytest.mark.parametrize(
    ("text", "url", "port"),
    [
        ("http://h:30000", "http://h:30000", None),
        ("http://h:30000:8998", "http://h:30000", 8998),
        ("http://h:30000/,bootstrap=8998", "http://h:30000", 8998),
        ("http://[::1]:30000", "http://[::1]:30000", None),
        ("http://[::1]:30000:8998", "http://[::1]:30000", 8998),
    ],
)
def test_a_prefill_engine_is_given_with_its_bootstrap_port_or_without(text: str, url: str, port: int | None) -> None:
    found = parse_spec(text, "prefill")
    assert (found.url, found.bootstrap_port, found.role) == (url, port, "prefill")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("h:30000", "http://host:port"),
        ("http://h:30000/v1", "http://host:port"),
        ("http://user:secret@h:30000", "http://host:port"),
        ("http://h:99999", "url"),
        ("http://h:30000,color=red", "color=red"),
        ("http://h:30000,bootstrap=no", "numbers"),
    ],
)
def test_what_is_no_engine_is_refused_with_what_would_be_one(text: str, problem: str) -> None:
    with pytest.raises(WorkerError, match=problem):
        parse_spec(text, "prefill")


def test_an_engine_says_what_it_is() -> None:
    info = {
        "served_model_name": "m",
        "page_size": 32,
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 8999,
        "max_total_num_tokens": 1000,
        "dp_size": 2,
        "startup_time": {"total": 1.5},
        "internal_states": [{"effective_max_running_requests_per_dp": 40}],
    }
    found = read_facts(info)
    assert (found.role, found.bootstrap_port, found.page_size, found.max_tokens, found.max_running) == (
        "prefill",
        8999,
        32,
        2000,
        80,
    )
    assert read_facts(info).incarnation == found.incarnation
    assert read_facts({**info, "startup_time": {"total": 1.6}}).incarnation != found.incarnation


@pytest.mark.parametrize("value", [None, "x", -1, [], {}, True, 1.5])
def test_nonsense_from_an_engine_is_left_out(value: object) -> None:
    names = ("page_size", "dp_size", "internal_states", "kv_events", "lora_paths", "max_total_num_tokens", "startup_time")
    found = read_facts(dict.fromkeys(names, value))
    assert (found.page_size, found.max_running, found.max_tokens, dict(found.adapters)) == (1, 0, 0, {})


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_try() -> None:
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.failed(0.0)
    assert breaker.admits(0.0)
    breaker.failed(0.0)
    assert not breaker.admits(0.5 * OPEN_S[0])
    assert breaker.admits(OPEN_S[0])
    breaker.take(OPEN_S[0])
    assert not breaker.admits(OPEN_S[0]), "the one that tries has not come back"
    breaker.failed(OPEN_S[0])
    assert not breaker.admits(2.9 * OPEN_S[0])
    assert breaker.admits(3 * OPEN_S[0])
    breaker.succeeded()
    assert breaker.admits(0.0)
    assert not breaker.open


def test_a_breaker_never_stays_open_for_longer_than_its_limit() -> None:
    breaker, now = Breaker(), 0.0
    for _ in range(50):
        breaker.failed(now, certain=True)
        now += OPEN_S[1]
        assert breaker.admits(now)


def test_an_engine_gets_requests_once_it_has_answered_and_until_it_misses_probes() -> None:
    workers = Workers()
    worker = workers.add(spec(1), 0.0)
    assert workers.avoid(0.0) == {worker.name}
    assert not workers.ready(0.0)
    assert workers.answered(worker.name, facts(), 0.0)
    assert not workers.answered(worker.name, facts(), 1.0), "nothing new"
    assert workers.avoid(0.0) == set()
    for _ in range(MISSED_PROBES - 1):
        assert not workers.missed(worker.name, "slow", 2.0)
    assert workers.missed(worker.name, "slow", 2.0)
    assert worker.state == "down"
    assert workers.answered(worker.name, facts(), 3.0)
    assert workers.missed(worker.name, "nobody listens", 4.0, certain=True)


def test_another_incarnation_is_told() -> None:
    workers = Workers()
    worker = up(workers, 1)
    worker.breaker.failed(0.0, certain=True)
    assert workers.answered(worker.name, facts("2"), 1.0)
    assert worker.usable(1.0), "what the former one did is not held against it"


def test_engines_of_another_model_or_page_size_get_nothing_and_hear_why() -> None:
    workers = Workers()
    up(workers, 1)
    for number, (said, problem) in enumerate(
        [(facts(model="other"), "other"), (facts(page_size=1), "page size is 1"), (facts(role="decode"), "runs as decode")], 2
    ):
        worker = workers.add(spec(number), 0.0)
        assert not workers.answered(worker.name, said, 0.0)
        assert problem in worker.problem
        assert worker.name in workers.avoid(0.0)


def test_halves_of_pairs_get_nothing_without_the_other_half() -> None:
    workers = Workers()
    prefill = up(workers, 1, "prefill")
    assert prefill.name in workers.avoid(0.0)
    decode = up(workers, 2, "decode")
    assert workers.avoid(0.0) == set()
    workers.drain(decode.name)
    assert workers.avoid(0.0) == {prefill.name, decode.name}


def test_an_engine_that_is_drained_gets_nothing_new_and_goes_when_it_is_empty() -> None:
    workers = Workers()
    worker = up(workers, 1)
    worker.in_flight = 1
    workers.drain(worker.name, remove=True)
    assert worker.name in workers.avoid(0.0)
    assert workers.gone(0.0) == []
    worker.in_flight = 0
    assert workers.gone(0.0) == [worker]
    assert len(workers) == 0


def test_a_registration_with_a_ttl_ends_unless_it_is_renewed() -> None:
    workers = Workers()
    workers.add(spec(1, ttl_s=10), 0.0)
    workers.add(spec(1, ttl_s=10), 9.0)
    assert workers.gone(18.0) == []
    assert [each.name for each in workers.gone(19.0)] == ["10.0.0.1:30000"]


def test_engines_that_are_down_for_long_are_forgotten_unless_the_command_line_named_them() -> None:
    workers = Workers(forget_s=600)
    fixed = workers.add(parse_spec("http://10.0.0.9:1", "plain"), 0.0)
    registered = up(workers, 1)
    workers.missed(registered.name, "nobody listens", 100.0, certain=True)
    assert workers.gone(699.0) == []
    assert workers.gone(701.0) == [registered]
    assert workers.get(fixed.name) is fixed


def test_there_is_a_limit_on_engines_and_no_two_with_one_address() -> None:
    workers = Workers()
    for number in range(MAX_WORKERS):
        workers.add(make_spec({"url": f"http://h:{number + 1}"}), 0.0)
    with pytest.raises(WorkerError, match="already"):
        workers.add(make_spec({"url": "http://h:9999"}), 0.0)
    workers.drain("h:1", remove=True)
    workers.gone(0.0)
    with pytest.raises(WorkerError, match="there already"):
        workers.add(make_spec({"url": "http://h:2", "name": "again"}), 0.0)


def test_what_decides_about_the_names_of_pages_is_read_from_what_an_engine_says() -> None:
    facts = read_facts({"speculative_algorithm": "FROZEN_KV_MTP", "default_chat_template_kwargs": {"enable_thinking": False}})
    assert facts.bigrams
    assert facts.template_defaults == {"enable_thinking": False}
    assert read_facts({"speculative_algorithm": "EAGLE3"}).bigrams
    plain = read_facts({"speculative_algorithm": "NGRAM", "default_chat_template_kwargs": None})
    assert not plain.bigrams
    assert plain.template_defaults == {}
