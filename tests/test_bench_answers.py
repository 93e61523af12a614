"""What `make bench-answers` asks, compares and counts; without servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import answers
from benchmarks.answers import Arms, Chats, Outcome, Request, Tally, compare, draw_alike, first_difference, lines, verdict
from hicache_mooncake.testing.sglang_cpu.servers import Answer, Cached


def answer(ids: Sequence[int], cached: Cached | None = None) -> Answer:
    return Answer(tuple(ids), "", 10, cached or Cached(), 0.1, 0.2)


def drawn(seed: int, turns: int) -> list[list[Request]]:
    chats = Chats(seed)
    found = []
    for _ in range(turns):
        requests = chats.draw(3)
        for request in requests:
            chats.answered(request, (7, 8, 9))
        found.append(requests)
    return found


def test_the_same_seed_and_answers_make_the_same_requests() -> None:
    assert drawn(1, 60) == drawn(1, 60)
    assert drawn(1, 60) != drawn(2, 60)


def test_the_next_turn_of_a_chat_begins_with_the_last_one_and_its_answer() -> None:
    before: dict[int, Request] = {}
    continued = 0
    for request in (request for requests in drawn(3, 60) for request in requests):
        if (last := before.get(request.chat)) is not None:
            assert request.prompt[: len(last.prompt) + 3] == (*last.prompt, 7, 8, 9)
            assert len(request.prompt) > len(last.prompt) + 3
            continued += 1
        before[request.chat] = request
    assert continued > 60


def test_a_chat_that_has_had_all_its_turns_is_followed_by_a_new_one() -> None:
    requests = [request for turn in drawn(4, 200) for request in turn]
    turns = [sum(request.chat == chat for request in requests) for chat in {request.chat for request in requests}]
    assert max(turns) == answers.TURNS
    assert len(turns) > answers.LIVE
    assert [request.number for request in requests] == list(range(600))


def test_a_turn_asks_no_chat_twice() -> None:
    assert all(len({request.chat for request in requests}) == 3 for requests in drawn(5, 100))


@pytest.mark.parametrize(
    ("ours", "theirs", "position"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 9, 4), 1), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 2), 2), ((), (), None)],
)
def test_the_first_token_that_is_not_the_same_is_found(
    ours: tuple[int, ...], theirs: tuple[int, ...], position: int | None
) -> None:
    assert first_difference(ours, theirs) == position


def test_answers_and_tiers_are_counted_and_the_first_difference_is_kept() -> None:
    tally = Tally()
    tally.add(Request(0, 5, (1,) * 100), "a", answer([1, 2], Cached(16, 32, 0)), answer([1, 2]))
    tally.add(Request(1, 6, (1,) * 200), "b", answer([1, 3], Cached(0, 0, 96)), answer([1, 2]))
    tally.add(Request(2, 7, (1,) * 50), "a", answer([4, 3], Cached(0, 0, 48)), answer([1, 2]))
    assert (tally.compared, tally.different, tally.from_storage) == (3, 2, 2)
    assert (tally.prompt_tokens, tally.answer_tokens) == (350, 6)
    assert (tally.device_tokens, tally.host_tokens, tally.storage_tokens) == (16, 32, 144)
    assert tally.first is not None
    assert (tally.first.request, tally.first.position, tally.first.engine) == (1, 1, "b")


class FakeArms(Arms):
    """Engines that answer with the length of the prompt; `wrong` requests get another last token from the pool's."""

    def __init__(self, wrong: Sequence[int] = (), cached: Cached | None = None) -> None:
        super().__init__([SimpleNamespace(name="a"), SimpleNamespace(name="b")], SimpleNamespace(name="r"), float("inf"))  # type: ignore[list-item,arg-type]
        self.wrong, self.cached = wrong, cached or Cached()
        self.asked: list[tuple[str, list[Request], float]] = []

    def ask(self, requests, engine, temperature):  # type: ignore[no-untyped-def]
        self.asked.append((engine.name, list(requests), temperature))
        return list(self._answers(requests))

    def _answers(self, requests: Sequence[Request]) -> Iterator[tuple[Answer, Answer]]:
        for request in requests:
            right = (len(request.prompt), 5)
            yield answer((right[0], 6) if request.number in self.wrong else right, self.cached), answer(right)


def test_every_request_is_compared_and_the_engines_take_turns() -> None:
    arms = FakeArms()
    seen: list[int] = []
    tally = compare(arms, 10, at_once=4, temperature=0.0, seed=1, advance=seen.append)
    assert [name for name, _, _ in arms.asked] == ["a", "b", "a"]
    assert seen == [4, 4, 2]
    assert (tally.compared, tally.different) == (10, 0)


def test_an_answer_that_differs_is_found_and_makes_no_other_differ() -> None:
    arms = FakeArms(wrong=[2])
    tally = compare(arms, 80, at_once=4, temperature=0.0, seed=1, advance=lambda _count: None)
    assert tally.different == 1
    assert tally.first is not None
    assert (tally.first.request, tally.first.position) == (2, 1)
    wrong = next(request for _, requests, _ in arms.asked for request in requests if request.number == 2)
    later = [request for _, requests, _ in arms.asked for request in requests if request.chat == wrong.chat][1:]
    assert later
    assert all(request.prompt[len(wrong.prompt) : len(wrong.prompt) + 2] == (len(wrong.prompt), 5) for request in later)


def test_what_is_sampled_goes_to_one_engine_one_at_a_time() -> None:
    arms = FakeArms()
    compare(arms, 5, at_once=1, temperature=1.0, seed=1, advance=lambda _count: None)
    assert [(name, len(requests), heat) for name, requests, heat in arms.asked] == [("a", 1, 1.0)] * 5


def test_nothing_is_asked_when_the_time_is_over() -> None:
    arms = FakeArms()
    arms.until = float("-inf")
    assert compare(arms, 5, at_once=1, temperature=0.0, seed=1, advance=lambda _count: None).compared == 0
    assert arms.asked == []


def test_only_a_difference_where_nothing_was_cached_says_that_servers_do_not_draw_alike() -> None:
    assert draw_alike(FakeArms())
    assert not draw_alike(FakeArms(wrong=[1]))
    assert draw_alike(FakeArms(wrong=[1], cached=Cached(storage=16)))


def outcome(tally: Tally, evicted: float = 3.0) -> Outcome:
    names = ("stored", "spilled", "replicated", "remote_sent_pages", "flushes", "seconds")
    return Outcome(tally, None, dict.fromkeys(names, 1.0) | {"evicted": evicted})


def test_a_run_fails_for_one_difference_and_when_the_pool_had_no_part_in_it() -> None:
    request = Request(0, 0, (1,) * 32)
    good, bad, cold = Tally(), Tally(), Tally()
    good.add(request, "a", answer([1], Cached(storage=16)), answer([1]))
    bad.add(request, "a", answer([2], Cached(storage=16)), answer([1]))
    cold.add(request, "a", answer([1]), answer([1]))
    assert verdict(outcome(good)) is None
    assert "1 answers differ" in str(verdict(outcome(bad)))
    assert "has tried nothing" in str(verdict(outcome(cold)))
    assert "has tried nothing" in str(verdict(outcome(good, evicted=0.0)))


def test_the_first_answer_that_differs_is_printed_and_so_is_a_part_that_was_left_out() -> None:
    tally = Tally()
    tally.add(Request(41, 9, (1,) * 32), "engine-b", answer([4, 5], Cached(storage=16)), answer([4, 6]))
    assert tally.first is not None
    tally.first = replace(tally.first, gap=0.00012)
    text = "\n".join(lines(outcome(tally)))
    for part in (
        "1 different",
        "request 41",
        "position 1",
        "[4, 5] instead of [4, 6]",
        "engine-b",
        "sampled: left out",
        "differ by 0.00012",
    ):
        assert part in text
