"""The router in front of engines without a model: answers, pairs, faults, overload, and who may do what."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hicache_master.router.app import Options, Router
from hicache_master.router.serving import Limits
from hicache_master.router.workers import Role, Spec, parse_spec

from hicache_mooncake.testing.fake_engine import FakeEngine, FakeEngineSettings, Fault
from hicache_mooncake.testing.fake_tokenizer import words, write_tokenizer
from tests.conftest import START_S

TEXT = "the quick brown fox jumps over the lazy dog. " * 20
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 6}}),
    ("/v1/completions", {"model": "fake", "prompt": TEXT, "max_tokens": 6}),
    ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6}),
]
OPTIONS = Options(listen="127.0.0.1:0", decisions_every=1, tokenizer="off", probe_s=0.5)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(START_S):
        while not condition():
            await asyncio.sleep(0.01)


def spec(engine: FakeEngine, role: Role = "plain") -> Spec:
    return parse_spec(engine.url, role)


class Client:
    def __init__(self, router: Router, session: aiohttp.ClientSession) -> None:
        self.router, self.session = router, session

    def post(self, path: str, body: Any, **headers: str) -> Any:
        return self.session.post(f"http://{self.router.address}{path}", json=body, headers=headers)

    async def ask(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.post(path, body, **headers) as response:
            return response.status, json.loads(await response.text())

    async def get(self, path: str) -> Any:
        async with self.session.get(f"http://{self.router.address}{path}") as response:
            return json.loads(await response.text())

    async def metric(self, name: str) -> float:
        async with self.session.get(f"http://{self.router.address}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextlib.asynccontextmanager
async def routed(options: Options, engines: int | None = None) -> AsyncIterator[Client]:
    """A router whose engines are all up, and whose books are right at the end."""
    wanted = len(options.workers) if engines is None else engines
    async with Router(options) as router, aiohttp.ClientSession() as session:
        await until(lambda: sum(worker.state == "up" for worker in router.workers) >= wanted)
        yield Client(router, session)
        await until(lambda: not router.gate.inside and not len(router.conductor))
        router.conductor.validate()
        router.workers.validate()
        router.gate.validate()
        router.routing.accounts.validate()
        assert all(worker.in_flight == 0 for worker in router.workers)


@contextlib.asynccontextmanager
async def engines(*settings: FakeEngineSettings) -> AsyncIterator[list[FakeEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine(each)) for each in settings]


def plain(count: int = 2, **more: Any) -> Sequence[FakeEngineSettings]:
    return [FakeEngineSettings(**more)] * count


PAIR = (FakeEngineSettings(mode="prefill"), FakeEngineSettings(mode="decode"))


def with_engines(found: Sequence[FakeEngine], options: Options = OPTIONS) -> Options:
    roles: dict[str, Role] = {"null": "plain", "prefill": "prefill", "decode": "decode"}
    return replace(options, workers=[spec(engine, roles[engine.settings.mode]) for engine in found])


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


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


# Overload


def test_ten_times_too_much_is_turned_away_at_once_and_the_rest_is_served() -> None:
    async def test() -> None:
        limits = Limits(wait_s=20.0)
        options = replace(OPTIONS, waiting=8, max_running=4, limits=limits)
        async with engines(*plain(1, prefill_s=0.02)) as found, routed(with_engines(found, options)) as client:
            body = {"text": TEXT, "sampling_params": {"max_new_tokens": 1}}
            answers = await asyncio.gather(*(client.ask("/generate", body) for _ in range(120)))
            served = [answer for status, answer in answers if status == 200]
            refused = [answer for status, answer in answers if status == 429]
            assert len(served) + len(refused) == 120
            assert len(served) >= 12
            assert len(refused) > 0
            assert found[0].stats.max_running <= 4
            assert all(answer["error"]["retry_after_s"] >= 1 for answer in refused)
            assert await client.metric("hicache_router_rejected_total") == len(refused)

    run(test)


def test_what_would_be_too_late_is_turned_away_with_a_time_to_come_again() -> None:
    async def test() -> None:
        options = replace(OPTIONS, ttft_slo_s=1.0, prefill_tokens_s=1000.0)
        async with engines(*plain(1, prefill_s=0.2)) as found, routed(with_engines(found, options)) as client:
            bodies = [{"text": f"{number} {'x' * 2400}"} for number in range(8)]
            answers = await asyncio.gather(*(client.ask("/generate", body) for body in bodies))
            refused = [answer["error"] for status, answer in answers if status == 429]
            assert 0 < len(refused) < 8
            assert all(error["reason"] == "prefill" and error["load"] > 1 for error in refused)
            patient = await asyncio.gather(
                *(client.ask("/generate", body, **{"x-slo-ttft-ms": "60000"}) for body in bodies),
            )
            assert [status for status, _ in patient] == [200] * 8
            assert (await client.ask("/generate", bodies[0], **{"x-slo-ttft-ms": "no"}))[0] == 400

    run(test)


def test_a_body_that_is_too_large_is_refused_whether_its_length_was_told_or_not() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100_000

    async def test() -> None:
        options = replace(OPTIONS, limits=Limits(body_bytes=1 << 20))
        async with engines(*plain(1)) as found, routed(with_engines(found, options)) as client:
            assert (await client.ask("/generate", {"text": "x" * 2_000_000}))[0] == 413
            url = f"http://{client.router.address}/generate"
            async with client.session.post(url, data=pieces()) as response:
                assert response.status == 413
            assert found[0].stats.requests == 0
            assert (await client.ask("/generate", {"text": TEXT}))[0] == 200

    run(test)


def test_bodies_in_memory_are_bounded_together_while_they_come() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"text": "' + b"x" * 600_000
            await gate.wait()
            yield b'"}'

        options = replace(OPTIONS, limits=Limits(body_bytes=1 << 20, buffered_bytes=1_000_000))
        async with engines(*plain(1, context_tokens=10_000_000)) as found, routed(with_engines(found, options)) as client:
            url = f"http://{client.router.address}/generate"
            first = asyncio.create_task(client.session.post(url, data=slowly()).__aenter__())
            await until(lambda: client.router.serving.buffered >= 600_000)
            assert (await client.ask("/generate", {"text": "x" * 600_000}))[0] == 429
            assert (await client.ask("/generate", {"text": TEXT}))[0] == 200
            gate.set()
            response = await first
            assert response.status == 200
            await response.read()
            assert (await client.ask("/generate", {"text": "x" * 600_000}))[0] == 200
            assert client.router.serving.buffered == 0

    run(test)


def test_a_compressed_body_arrives_as_what_it_was() -> None:
    async def test() -> None:
        async with engines(*plain(1)) as found, routed(with_engines(found)) as client:
            body = gzip.compress(json.dumps({"text": TEXT}).encode())
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            async with client.session.post(f"http://{client.router.address}/generate", data=body, headers=headers) as response:
                assert response.status == 200
            assert found[0].last_body["text"] == TEXT

    run(test)


def test_a_tenant_that_floods_does_not_keep_another_out() -> None:
    async def test() -> None:
        options = replace(OPTIONS, waiting=20, max_running=2)
        async with engines(*plain(1, prefill_s=0.02)) as found, routed(with_engines(found, options)) as client:
            body = {"text": TEXT, "sampling_params": {"max_new_tokens": 1}}
            flood = [asyncio.create_task(client.ask("/generate", body, Authorization="Bearer a")) for _ in range(60)]
            await until(lambda: client.router.gate.queued == 20)
            others = [asyncio.create_task(client.ask("/generate", body, Authorization="Bearer b")) for _ in range(4)]
            assert [status for status, _ in await asyncio.gather(*others)] == [200] * 4
            assert not all(task.done() for task in flood), "the others did not wait for all of it"
            assert {status for status, _ in await asyncio.gather(*flood)} == {200, 429}

    run(test)


# Workers and administration


def test_engines_register_are_drained_and_go() -> None:
    async def test() -> None:
        async with engines(*plain(2, decode_token_s=0.1)) as found, routed(OPTIONS, 0) as client:
            status, answer = await client.ask("/generate", {"text": TEXT})
            assert (status, answer["error"]["reason"]) == (503, "no engine")
            assert (await client.ask("/workers", {"url": "ftp://x"}))[0] == 400
            for engine in found:
                assert (await client.ask("/workers", {"url": engine.url, "worker_type": "regular"}))[0] == 202
            await until(lambda: sum(worker.state == "up" for worker in client.router.workers) == 2)
            name = found[0].url.removeprefix("http://")
            body = {"text": TEXT, "sampling_params": {"max_new_tokens": 10}}
            asking = [asyncio.create_task(client.ask("/generate", body)) for _ in range(4)]
            await until(lambda: found[0].stats.running)
            assert (await client.ask(f"/workers/{name}/drain", {}))[1]["state"] == "draining"
            before = found[0].stats.requests
            assert (await client.ask("/generate", body))[0] == 200
            assert found[0].stats.requests == before
            async with client.session.delete(f"http://{client.router.address}/workers/{name}") as response:
                assert response.status == 200
            assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 4
            await until(lambda: len(client.router.workers) == 1)
            assert (await client.ask("/workers/nobody/drain", {}))[0] == 404

    run(test)


def test_only_who_has_the_token_changes_engines() -> None:
    async def test() -> None:
        registration = {"url": "http://127.0.0.1:1"}
        async with routed(replace(OPTIONS, admin_token="secret"), 0) as client:
            assert (await client.ask("/workers", registration))[0] == 401
            assert (await client.ask("/workers", registration, Authorization="Bearer wrong"))[0] == 401
            assert (await client.ask("/workers", registration, Authorization="Bearer secret"))[0] == 202
        async with routed(replace(OPTIONS, listen="0.0.0.0:0"), 0) as client:
            client.router.address = client.router.address.replace("0.0.0.0", "127.0.0.1")
            status, answer = await client.ask("/workers", registration)
            assert (status, "--admin-token-file" in answer["error"]["message"]) == (403, True)

    run(test)


def test_what_the_router_knows_is_shown_and_an_explanation_sends_nothing() -> None:
    async def test() -> None:
        async with engines(*plain()) as found, routed(with_engines(found)) as client:
            body = {"text": TEXT, "sampling_params": {"max_new_tokens": 1}}
            assert (await client.ask("/generate", body))[0] == 200
            status, answer = await client.ask("/explain", {"path": "/generate", "body": body})
            assert (status, len(answer["candidates"])) == (200, 2)
            best = answer["candidates"][0]
            assert (best["engine"], best["pages"]) == (answer["chosen"], answer["known_pages"])
            assert sum(engine.stats.requests for engine in found) == 1
            assert (await client.get("/health"))["ready"] is True
            assert (await client.get("/v1/models"))["data"][0]["id"] == "fake"
            observed = (await client.get("/decisions"))["decisions"][0]["observed"]
            assert observed["cached"] + sum(observed["computed"].values()) == observed["tokens"]

    run(test)


def test_connections_to_engines_notice_that_a_host_is_gone() -> None:
    async def test() -> None:
        body = {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 3}}
        async with engines(*plain(1, decode_token_s=0.2)) as (engine,), routed(with_engines([engine])) as client:
            response = await client.router.proxy.session.post(engine.url + "/generate", json=body)
            assert response.connection is not None
            assert response.connection.transport is not None
            used = response.connection.transport.get_extra_info("socket")
            assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert 0 < used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
            await response.read()

    run(test)
