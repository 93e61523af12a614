"""An engine whose cache is not what the router takes it for is told of: once, when it lasts, and with what to do."""

from __future__ import annotations

import random

from hicache_master.router.agreement import LASTS_S, LEAST, MAX_ENGINES, Agreement


def run(
    agreement: Agreement, requests: int, expected: int, found: int, start: float = 0.0, namespaced: bool = False
) -> list[str]:
    """A request a second. What was to be logged."""
    said = [agreement.observe("e", expected, found, start + second, namespaced=namespaced) for second in range(requests)]
    return [text for text in said if text]


def test_an_engine_that_finds_what_is_expected_is_no_news() -> None:
    agreement = Agreement()
    assert run(agreement, 1_000, 512, 512) == []
    assert agreement.problems() == {}
    assert agreement.tokens == {"expected": 512_000, "found": 512_000, "unexpected": 0, "missing": 0}


def test_pages_that_are_named_otherwise_are_noticed() -> None:
    agreement = Agreement()
    (said,) = run(agreement, 500, 0, 512)
    assert "100% of the tokens that e finds" in said
    assert all(word in said for word in ("--page-size", "tokenizer", "chat template", "--kv-events-config"))
    assert agreement.problems() == {"e": said}


def test_an_engine_that_fetches_what_nobody_told_it_to_is_no_news() -> None:
    agreement = Agreement()
    assert not any(agreement.observe("e", 0, 512, float(second), known=512) for second in range(500))
    assert agreement.tokens["unexpected"] == 0


def test_what_is_expected_and_not_there_is_noticed() -> None:
    (said,) = run(Agreement(), 500, 1024, 128)
    assert "88% of the tokens that e was expected to find" in said
    assert "replay_endpoint" in said


def test_neither_a_few_requests_nor_a_short_while_is_an_alarm() -> None:
    assert run(Agreement(), LEAST - 1, 0, 512) == []
    agreement = Agreement()
    burst = [agreement.observe("e", 0, 512, 0.01 * number) for number in range(1_000)]
    assert not any(burst), "ten seconds"
    assert agreement.observe("e", 0, 512, LASTS_S + 1.0) != ""


def test_noise_is_no_alarm() -> None:
    """Evictions that are not heard of yet, siblings that have just come: a fifth of the requests is off, in both directions."""
    agreement, rng = Agreement(), random.Random(1)
    for second in range(3_000):
        expected = rng.choice((0, 256, 512))
        found = expected if rng.random() < 0.8 else rng.choice((0, 256, 512))
        assert agreement.observe("e", expected, found, float(second)) == ""


def test_an_alarm_ends_and_may_come_again() -> None:
    agreement = Agreement()
    assert len(run(agreement, 300, 0, 512)) == 1
    assert run(agreement, 1_000, 512, 512, 300.0) == []
    assert agreement.problems() == {}
    assert len(run(agreement, 600, 0, 512, 1_300.0)) == 1


def test_salts_and_adapters_alone_have_an_advice_of_their_own() -> None:
    agreement = Agreement()
    said = []
    for second in range(400):
        said.append(agreement.observe("e", 0, 512, float(second), namespaced=True))
        said.append(agreement.observe("e", 64, 64, float(second)))
    (text,) = [each for each in said if each]
    assert "adapter" in text
    assert "dynamo" in text


def test_engines_are_judged_each_by_itself_and_forgotten() -> None:
    agreement = Agreement()
    for second in range(300):
        agreement.observe("good", 512, 512, float(second))
        agreement.observe("bad", 0, 512, float(second))
    assert list(agreement.problems()) == ["bad"]
    agreement.forget("bad")
    assert agreement.problems() == {}
    for number in range(2 * MAX_ENGINES):
        agreement.observe(f"e{number}", 1, 1, 300.0)
    assert len(agreement._engines) == MAX_ENGINES


def test_requests_that_neither_expect_nor_find_anything_say_nothing() -> None:
    agreement = Agreement()
    run(agreement, 300, 0, 0)
    assert len(run(agreement, 130, 0, 512, 300.0)) == 1
