"""The router in front of engines without a model: answers, pairs, and whatever fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hicache_mooncake.testing.fake_engine import FakeEngine, FakeEngineSettings, Fault
from hicache_mooncake.testing.fake_tokenizer import words, write_tokenizer
from tests.conftest import START_S
from tests.routed import FORMS, OPTIONS, PAIR, TEXT, engines, plain, routed, run, until, with_engines


def direct(form: tuple[str, dict[str, Any]], stream: bool) -> list[bytes]:
    """What an engine itself answers: an answer of these engines follows from the prompt alone."""
    found: list[bytes] = []

    async def ask() -> None:
        async with (
            engines(*plain(1)) as (engine,),
            aiohttp.ClientSession() as session,
            session.post(engine.url + form[0], json=form[1] | {"stream": stream}) as response,
        ):
            found.append(await response.read())

    run(ask)
    return found


def text_of(answer: bytes) -> list[str]:
    """What an answer says, without its ids and times."""
    found = []
    for line in answer.replace(b"data: ", b"").splitlines():
        if line.startswith(b"{"):
            event = json.loads(line)
            choice = event.get("choices") or [{}]
            found.append(event.get("text") or choice[0].get("text") or str(choice[0].get("message") or choice[0].get("delta")))
    return found


@pytest.mark.parametrize("form", FORMS, ids=[path for path, _ in FORMS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("settings", [plain(), PAIR], ids=["plain", "pair"])
def test_answers_are_those_of_the_engines(
    form: tuple[str, dict[str, Any]], stream: bool, settings: Sequence[FakeEngineSettings]
) -> None:
    async def test() -> None:
        async with engines(*settings) as found, routed(with_engines(found)) as client:
            async with client.post(form[0], form[1] | {"stream": stream}) as response:
                assert response.status == 200
                answer = await response.read()
            assert text_of(answer) == text_of(expected)
            assert (b"[DONE]" in answer) == stream
            assert sum(engine.stats.finished for engine in found) == len({engine.settings.mode for engine in found})
            await until(lambda: client.router.routing.accounts.requests == 1)

    (expected,) = direct(form, stream)
    run(test)


def test_pieces_of_a_stream_come_as_the_engine_sends_them() -> None:
    async def test() -> None:
        async with engines(*plain(1, decode_token_s=0.2)) as found, routed(with_engines(found)) as client:
            body = {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 5}}
            async with client.post("/generate", body) as response:
                await response.content.readany()
                assert found[0].stats.running == 1, "the first piece is here, and the engine is at work"
                await response.read()

    run(test)


def test_the_next_turn_goes_where_the_last_one_was_and_counts_as_a_hit() -> None:
    async def test() -> None:
        async with engines(*plain(4, prefill_token_s=1e-5)) as found, routed(with_engines(found)) as client:
            for chat in range(4):
                turn = f"chat {chat} " * 100
                for _ in range(4):
                    status, _answer = await client.ask("/generate", {"text": turn, "sampling_params": {"max_new_tokens": 2}})
                    assert status == 200
                    turn += f"and another turn of chat {chat} " * 30
            cached, prompts = (
                await client.metric("hicache_router_cached_tokens_total"),
                sum(e.stats.prompt_tokens for e in found),
            )
            assert cached == sum(engine.stats.cached_tokens for engine in found)
            assert cached > 0.5 * prompts
            assert await client.metric("hicache_router_prompt_tokens_total") == prompts
            computed = await client.metric("hicache_router_computed_tokens_total")
            assert computed == prompts - cached

    run(test)


def test_another_salt_finds_nothing_of_what_was_sent_before_and_the_same_one_does() -> None:
    async def test() -> None:
        async with engines(*plain(1)) as found, routed(with_engines(found)) as client:
            known = []
            for salt in ("a", "b", "a"):
                body = {"text": TEXT, "cache_salt": salt, "sampling_params": {"max_new_tokens": 1}}
                assert (await client.ask("/generate", body))[0] == 200
                assert found[0].last_body["cache_salt"] == salt
                decisions = (await client.get("/decisions"))["decisions"]
                known.append(decisions[0]["known_pages"] > 0)
            assert known == [False, False, True]
            assert "quick brown" not in json.dumps(decisions)

    run(test)


# Faults


@pytest.mark.parametrize("kind", ["refuse", "error"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_before_a_byte_came_goes_to_another_engine(kind: Any, stream: bool) -> None:
    async def test() -> None:
        async with engines(*plain()) as found, routed(with_engines(found)) as client:
            found[0].faults.append(Fault(kind, times=-1))
            for number in range(6):
                body = {"text": f"{number} {TEXT}", "stream": stream, "sampling_params": {"max_new_tokens": 2}}
                async with client.post("/generate", body) as response:
                    assert response.status == 200
                    await response.read()
            assert found[1].stats.finished == 6
            assert await client.metric("hicache_router_retries_total") == found[0].stats.requests

    run(test)


def test_an_answer_that_ends_in_the_middle_is_an_error_and_is_not_asked_for_again() -> None:
    async def test() -> None:
        async with engines(*plain()) as found, routed(with_engines(found)) as client:
            for engine in found:
                engine.faults.append(Fault("die", chunks=2))
            body = {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 9}}
            async with client.post("/generate", body) as response:
                assert response.status == 200
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
            assert sum(engine.stats.requests for engine in found) == 1

    run(test)


def test_when_all_engines_fail_the_client_hears_what_they_said() -> None:
    async def test() -> None:
        async with engines(*plain()) as found, routed(with_engines(found)) as client:
            for engine in found:
                engine.faults.append(Fault("error", times=-1))
            status, answer = 0, b""
            async with client.post("/generate", {"text": TEXT}) as response:
                status, answer = response.status, await response.read()
            assert (status, b"a fault was asked for" in answer) == (500, True)

    run(test)


def test_a_bad_request_is_the_clients_and_no_engine_is_blamed() -> None:
    async def test() -> None:
        async with engines(*plain()) as found, routed(with_engines(found)) as client:
            for _ in range(8):
                assert (await client.ask("/v1/completions", {"model": "fake", "prompt": []}))[0] == 400
            assert (await client.ask("/generate", ["no", "object"]))[0] == 400
            assert [worker.state for worker in client.router.workers] == ["up", "up"]
            assert sum(engine.stats.requests for engine in found) == 8

    run(test)


@pytest.mark.parametrize(
    "settings", [plain(1, prefill_s=30.0), (replace(PAIR[0], prefill_s=30.0), PAIR[1])], ids=["plain", "pair"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request_in_all_engines(settings: Sequence[FakeEngineSettings], stream: bool) -> None:
    async def test() -> None:
        async with engines(*settings) as found, routed(with_engines(found)) as client:
            asking = asyncio.create_task(client.ask("/generate", {"text": TEXT, "stream": stream}))
            await until(lambda: all(engine.stats.running for engine in found))
            asking.cancel()
            await until(lambda: not any(engine.stats.running for engine in found))
            assert all(engine.stats.disconnects + engine.stats.aborts == 1 for engine in found)

    run(test)


def test_one_request_can_be_aborted_by_its_id_and_not_all_at_once() -> None:
    async def test() -> None:
        async with engines(*plain(1, decode_token_s=0.5)) as found, routed(with_engines(found)) as client:
            rid = "a-request-with-a-name"
            body = {"text": TEXT, "rid": rid, "sampling_params": {"max_new_tokens": 200}}
            asking = asyncio.create_task(client.ask("/generate", body))
            await until(lambda: found[0].stats.running)
            assert (await client.ask("/abort_request", {"abort_all": True}))[0] == 400
            assert await client.ask("/abort_request", {"rid": "another"}) == (200, {"aborted": False})
            assert await client.ask("/abort_request", {"rid": rid}) == (200, {"aborted": True})
            assert (await asking)[0] == 200
            assert found[0].stats.aborts == 1

    run(test)


def test_a_prefill_engine_that_fails_costs_no_answer_while_there_is_another() -> None:
    async def test() -> None:
        async with engines(PAIR[0], PAIR[0], PAIR[1]) as found, routed(with_engines(found)) as client:
            found[0].faults.append(Fault("error", times=-1))
            for number in range(4):
                body = {"text": f"{number} {TEXT}", "sampling_params": {"max_new_tokens": 2}}
                assert (await client.ask("/generate", body))[0] == 200
            assert found[1].stats.finished == 4

    run(test)


@pytest.mark.parametrize("kind", ["refuse", "error"])
@pytest.mark.parametrize("broken", ["prefill", "decode"])
def test_the_half_of_a_pair_that_fails_is_blamed_and_not_the_other_one(kind: Any, broken: str) -> None:
    async def test() -> None:
        async with engines(*PAIR, *PAIR) as found, routed(with_engines(found)) as client:
            bad = next(engine for engine in found if engine.settings.mode == broken)
            bad.faults.append(Fault(kind, times=-1))
            for number in range(6):
                body = {"text": f"{number} {TEXT}", "sampling_params": {"max_new_tokens": 2}}
                assert (await client.ask("/generate", body))[0] == 200
            blamed = await client.metric(f'hicache_router_engine_failures_total{{worker="{bad.url.removeprefix("http://")}"}}')
            assert blamed == await client.metric("hicache_router_engine_failures_total") > 0

    run(test)


def test_an_engine_that_restarts_is_known_to_be_empty_and_gets_requests_again() -> None:
    async def test() -> None:
        async with engines(*plain(1)) as (engine,), routed(with_engines([engine])) as client:
            body = {"text": TEXT, "sampling_params": {"max_new_tokens": 2}}
            for expected in (False, True):
                assert (await client.ask("/generate", body))[0] == 200
                assert ((await client.get("/decisions"))["decisions"][0]["known_pages"] > 0) is expected
            before = next(iter(client.router.workers)).facts
            await engine.stop()
            status, _ = await client.ask("/generate", body)
            assert status in (502, 503)
            await engine.start()
            await until(lambda: next(iter(client.router.workers)).facts != before)
            await until(lambda: client.router.workers.ready(asyncio.get_running_loop().time()))
            assert (await client.ask("/generate", body))[0] == 200
            assert (await client.get("/decisions"))["decisions"][0]["known_pages"] == 0

    run(test)


def test_a_router_that_restarts_serves_at_once_and_learns_from_what_it_routes() -> None:
    async def test() -> None:
        async with engines(*plain()) as found:
            body = {"text": TEXT, "sampling_params": {"max_new_tokens": 2}}
            for _ in range(2):
                async with routed(with_engines(found)) as client:
                    known = []
                    for _ in range(2):
                        assert (await client.ask("/generate", body))[0] == 200
                        known.append((await client.get("/decisions"))["decisions"][0]["known_pages"] > 0)
                    assert known == [False, True]

    run(test)


def test_engines_that_restart_under_load_cost_no_answer_that_had_not_begun() -> None:
    async def test() -> None:
        async with engines(*plain(2, prefill_s=0.005)) as found, routed(with_engines(found)) as client:
            stop, statuses = asyncio.Event(), []

            async def chat(number: int) -> None:
                while not stop.is_set():
                    body = {"text": f"chat {number} {TEXT}", "sampling_params": {"max_new_tokens": 2}}
                    statuses.append((await client.ask("/generate", body))[0])

            chats = [asyncio.create_task(chat(number)) for number in range(8)]
            for engine in (*found, *found):
                count, before = len(statuses), engine.stats.requests
                await until(lambda: len(statuses) > count + 40 and engine.stats.requests > before)  # noqa: B023
                await engine.stop()
                count = len(statuses)
                await until(lambda: len(statuses) > count + 40)  # noqa: B023
                await engine.start()
                await until(lambda: engine.stats.requests)  # noqa: B023
            stop.set()
            await asyncio.gather(*chats)
            assert set(statuses) == {200}
            accounts = client.router.routing.accounts
            assert accounts.cached_tokens > 0.5 * accounts.prompt_tokens

    run(test)


def test_what_engines_hold_is_known_from_their_events_also_after_a_restart_of_the_router(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    settings = FakeEngineSettings(kv_events=True, tokenizer=str(tmp_path / "tokenizer"), page_size=16, cache_pages=64)
    options = replace(OPTIONS, tokenizer="auto")

    async def test() -> None:
        async with engines(settings, settings) as found, aiohttp.ClientSession() as session:
            text = words(1, 400)
            async with session.post(found[1].url + "/generate", json={"text": text}) as response:
                assert response.status == 200
            for _ in range(2):
                async with routed(with_engines(found, options)) as client:
                    await until(lambda: all(client.router.knowledge.follows(engine.url[7:]) for engine in found))
                    body = {"text": text, "sampling_params": {"max_new_tokens": 1}}

                    async def own(engine: FakeEngine) -> int:
                        answer = (await client.ask("/explain", {"path": "/generate", "body": body}))[1]  # noqa: B023
                        return sum(each["own_pages"] for each in answer["candidates"] if each["engine"] == engine.url[7:])

                    async with asyncio.timeout(START_S):
                        while not await own(found[1]):
                            await asyncio.sleep(0.05)
                    before = found[1].stats.cached_tokens
                    assert (await client.ask("/generate", body))[0] == 200
                    assert found[1].stats.cached_tokens > before
                    accounts = client.router.routing.accounts
                    assert accounts.missed["gone"] == accounts.missed["new"] == 0
                    assert client.router.knowledge.problems() == []
            async with routed(with_engines(found, options)) as client:
                await until(lambda: all(client.router.knowledge.follows(engine.url[7:]) for engine in found))
                async with session.post(found[1].url + "/flush_cache") as response:
                    assert response.status == 200
                async with asyncio.timeout(START_S):
                    while await own(found[1]):
                        await asyncio.sleep(0.05)

    run(test)
