"""The engine without a model: what it promises to those who test or measure with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from hicache_mooncake.testing.fake_engine import FakeEngine
from hicache_mooncake.testing.fake_engine_settings import FakeEngineSettings, Fault
from hicache_mooncake.testing.fake_pages import PageCache, pages_of
from hicache_mooncake.testing.fake_tokenizer import words, write_tokenizer
from tests.conftest import START_S

PAGE = 16
SETTINGS = FakeEngineSettings(page_size=PAGE)
Body = dict[str, Any]


def run(scenario: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            await scenario(session)

    asyncio.run(main())


async def ask(session: aiohttp.ClientSession, engine: FakeEngine, body: Body, path: str = "/generate") -> Body:
    async with session.post(engine.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        answer: Body = await response.json()
        return answer


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    found = []
    async for line in response.content:
        if line.startswith(b"data: "):
            found.append("[DONE]" if line.strip() == b"data: [DONE]" else json.loads(line[6:]))
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def prompt(tokens: int, first: int = 0) -> Body:
    return {"input_ids": list(range(first, first + tokens)), "sampling_params": {"max_new_tokens": 4}}


def test_a_prompt_is_cached_by_whole_pages_but_its_last_token_never() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(SETTINGS) as engine:
            first = await ask(session, engine, prompt(4 * PAGE))
            again = await ask(session, engine, prompt(4 * PAGE))
            longer = await ask(session, engine, prompt(4 * PAGE + 1))
            other = await ask(session, engine, prompt(4 * PAGE, first=7))
            cached = [each["meta_info"]["cached_tokens"] for each in (first, again, longer, other)]
            assert cached == [0, 3 * PAGE, 4 * PAGE, 0]
            assert first["text"] == again["text"] != other["text"]
            assert first["meta_info"]["prompt_tokens"] == 4 * PAGE
            assert first["meta_info"]["completion_tokens"] == len(first["output_ids"]) == 4

    run(scenario)


def test_the_next_turn_finds_the_answer_too() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(SETTINGS) as engine:
            text = "x" * (2 * PAGE)
            params = {"max_new_tokens": 2 * PAGE + 1}  # the last one's KV is never computed
            answer = await ask(session, engine, {"text": text, "sampling_params": params})
            turn = await ask(session, engine, {"text": text + answer["text"] + "and then?", "sampling_params": params})
            assert turn["meta_info"]["cached_tokens"] == 4 * PAGE

    run(scenario)


def test_the_next_turn_of_a_chat_finds_the_answer_with_a_tokenizer_too(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")

    async def scenario(session: aiohttp.ClientSession) -> None:
        settings = FakeEngineSettings(page_size=PAGE, tokenizer=str(write_tokenizer(tmp_path)))
        async with FakeEngine(settings) as engine:
            messages = [{"role": "user", "content": words(1, 40)}]
            chat = {"messages": messages, "max_tokens": 4 * PAGE}
            answer = await ask(session, engine, chat, "/v1/chat/completions")
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
            turn = await ask(session, engine, chat, "/v1/chat/completions")
            known = (answer["usage"]["total_tokens"] - 1) // PAGE * PAGE
            assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == known

    run(scenario)


def test_requests_of_different_salts_share_nothing() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(SETTINGS) as engine:
            cached = [
                (await ask(session, engine, prompt(4 * PAGE + 1) | salt))["meta_info"]["cached_tokens"]
                for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "a"})
            ]
            assert cached == [0, 0, 0, 4 * PAGE]

    run(scenario)


def test_a_full_cache_drops_the_chain_that_was_used_least_recently_tail_first() -> None:
    cache = PageCache(4)
    old, new = pages_of(range(3 * PAGE), PAGE), pages_of(range(1000, 1000 + 3 * PAGE), PAGE)
    cache.insert(old)
    stored, removed = cache.insert(new)
    assert stored == new
    assert removed == [old[2], old[1]]
    assert (len(cache), cache.match(old), cache.match(new)) == (4, 1, 3)


def test_streams_say_what_whole_answers_say() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(SETTINGS) as engine:
            await ask(session, engine, prompt(PAGE + 1))
            bodies: dict[str, Body] = {
                "/generate": prompt(PAGE + 1),
                "/v1/completions": {"prompt": "hello " * PAGE, "max_tokens": 5},
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
            }
            streamed, whole = {}, {}
            for path, body in bodies.items():
                whole[path] = await ask(session, engine, body, path)
                asked = body | {"stream": True, "stream_options": {"include_usage": True}}
                async with session.post(engine.url + path, json=asked) as response:
                    assert response.content_type == "text/event-stream"
                    streamed[path] = await events(response)
            assert all(each[-1] == "[DONE]" for each in streamed.values())
            assert [event["text"] for event in streamed["/generate"][:-1]] == [
                whole["/generate"]["text"][:end] for end in (1, 2, 3, 4)
            ]
            assert streamed["/generate"][-2]["meta_info"]["cached_tokens"] == PAGE
            pieces = [event["choices"][0]["text"] for event in streamed["/v1/completions"][:-2]]
            assert "".join(pieces) == whole["/v1/completions"]["choices"][0]["text"]
            deltas = [event["choices"][0]["delta"]["content"] or "" for event in streamed["/v1/chat/completions"][:-2]]
            assert "".join(deltas) == whole["/v1/chat/completions"]["choices"][0]["message"]["content"]
            for path in ("/v1/completions", "/v1/chat/completions"):
                usage = streamed[path][-2]["usage"]
                assert usage["completion_tokens"] == 5
                assert usage["prompt_tokens"] == whole[path]["usage"]["prompt_tokens"]

    run(scenario)


def test_prefills_are_computed_one_after_the_other() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(FakeEngineSettings(page_size=PAGE, prefill_s=0.05)) as engine:
            await asyncio.gather(*(ask(session, engine, prompt(PAGE, first=each * 100)) for each in range(4)))
            assert engine.stats.max_waiting == 4
            assert engine.stats.busy_s >= 0.2

    run(scenario)


def test_a_client_that_hangs_up_is_counted_and_leaves_the_queue() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(FakeEngineSettings(page_size=PAGE, prefill_s=3600)) as engine:
            asking = [asyncio.create_task(ask(session, engine, prompt(PAGE))) for _ in range(2)]
            await until(lambda: engine.stats.waiting == 2)
            asking[1].cancel()
            await until(lambda: engine.stats.disconnects == 1)
            assert engine.stats.waiting == 1
            asking[0].cancel()
            await until(lambda: engine.stats.running == 0)

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_ends_the_request_that_has_the_name(stream: bool) -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(FakeEngineSettings(page_size=PAGE, decode_token_s=3600)) as engine:
            body = prompt(PAGE) | {"rid": "this", "stream": stream}
            asking = asyncio.create_task(session.post(engine.url + "/generate", json=body).__aenter__())
            await until(lambda: engine.stats.prompt_tokens > 0)
            for rid in ("another", "this"):
                await (await session.post(engine.url + "/abort_request", json={"rid": rid})).read()
            response = await asking
            last = (await events(response))[-2] if stream else await response.json()
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert (engine.stats.aborts, engine.stats.disconnects, engine.stats.running) == (1, 0, 0)

    run(scenario)


def test_an_abort_hits_all_whose_names_begin_with_one_that_runs() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(FakeEngineSettings(page_size=PAGE, prefill_s=3600)) as engine:
            asking = [asyncio.create_task(ask(session, engine, prompt(PAGE) | {"rid": rid})) for rid in ("a", "ab", "b")]
            await until(lambda: engine.stats.waiting == 3)
            for rid in ("", "ab-and-more", "a"):
                await (await session.post(engine.url + "/abort_request", json={"rid": rid})).read()
            assert [(await each)["meta_info"]["finish_reason"]["type"] for each in asking[:2]] == ["abort", "abort"]
            assert (engine.stats.aborts, engine.stats.running) == (2, 1)
            asking[2].cancel()

    run(scenario)


def test_a_decode_engine_answers_when_its_prefill_half_has_come() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with (
            FakeEngine(FakeEngineSettings(page_size=PAGE, mode="prefill")) as prefill,
            FakeEngine(FakeEngineSettings(page_size=PAGE, mode="decode")) as decode,
        ):
            for room, cached in ((11, 0), (12, PAGE)):
                meet = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}
                body = prompt(PAGE + 1) | meet
                halves = [asyncio.create_task(ask(session, decode, body))]
                await until(lambda: decode.stats.running == 1)
                halves.append(asyncio.create_task(ask(session, prefill, body)))
                answer, half = await asyncio.gather(*halves)
                assert answer["meta_info"]["cached_tokens"] == half["meta_info"]["cached_tokens"] == cached
                assert len(answer["output_ids"]) == 4
            assert prefill.stats.computed_tokens == PAGE + 2
            assert decode.stats.computed_tokens == 0

    run(scenario)


def test_a_half_whose_other_half_ends_fails() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with (
            FakeEngine(FakeEngineSettings(page_size=PAGE, mode="prefill", prefill_s=3600)) as prefill,
            FakeEngine(FakeEngineSettings(page_size=PAGE, mode="decode")) as decode,
        ):
            meet = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 1}
            half = asyncio.create_task(ask(session, prefill, prompt(PAGE) | meet))
            asking = asyncio.create_task(session.post(decode.url + "/generate", json=prompt(PAGE) | meet).__aenter__())
            await until(lambda: prefill.stats.waiting == 1 and decode.stats.running == 1)
            half.cancel()
            assert (await asking).status == 500
            assert decode.stats.failures == 1

    run(scenario)


def test_faults_are_what_was_asked_for_and_end() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(SETTINGS) as engine:
            for fault in (Fault("refuse"), Fault("error"), Fault("die", chunks=2), Fault("error", health=True)):
                async with session.post(engine.url + "/faults", json=msgspec.to_builtins(fault)) as response:
                    assert response.status == 200
            body = prompt(PAGE) | {"stream": True}
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.post(engine.url + "/generate", json=body)
            assert (await session.post(engine.url + "/generate", json=body)).status == 500
            response = await session.post(engine.url + "/generate", json=body)
            with pytest.raises(aiohttp.ClientError):
                await events(response)
            assert (await session.get(engine.url + "/health")).status == 500
            assert (await session.get(engine.url + "/health")).status == 200
            await ask(session, engine, prompt(PAGE))
            assert (engine.stats.failures, engine.stats.finished) == (3, 1)

    run(scenario)


def test_a_stopped_engine_comes_back_at_its_port_with_nothing_cached() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(SETTINGS) as engine:
            url = engine.url
            await ask(session, engine, prompt(PAGE + 1))
            started = (await (await session.get(url + "/get_server_info")).json())["startup_time"]
            await engine.stop()
            with pytest.raises(aiohttp.ClientConnectionError):
                await ask(session, engine, prompt(PAGE + 1))
            await engine.start()
            answer = await ask(session, engine, prompt(PAGE + 1))
            assert engine.url == url
            assert answer["meta_info"]["cached_tokens"] == 0
            assert (await (await session.get(url + "/get_server_info")).json())["startup_time"] > started

    run(scenario)


def test_kv_events_name_what_is_stored_and_removed_and_are_sent_again_on_request() -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        async with FakeEngine(FakeEngineSettings(page_size=PAGE, cache_pages=3, kv_events=True)) as engine:
            info = await (await session.get(engine.url + "/server_info")).json()
            described = info["kv_events"]
            context = zmq.asyncio.Context()
            replay = context.socket(zmq.REQ)
            replay.connect(f"tcp://127.0.0.1:{described['replay_endpoint_port_base']}")
            for first in (0, 1000):
                await ask(session, engine, prompt(2 * PAGE, first))
            await (await session.post(engine.url + "/flush_cache")).read()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(f"tcp://127.0.0.1:{described['replay_endpoint_port_base']}")
            await dealer.send_multipart([b"", (1).to_bytes(8, "big")])
            batches = []
            while (frames := await dealer.recv_multipart())[2] != (-1).to_bytes(8, "big", signed=True):
                batches.append((int.from_bytes(frames[2], "big"), msgspec.msgpack.decode(frames[3])))
            context.destroy(linger=0)
            assert [number for number, _ in batches] == [1, 2]
            old, new = (pages_of(range(first, first + 2 * PAGE), PAGE) for first in (0, 1000))
            events_of_second = batches[0][1][1]
            assert [event["type"] for event in events_of_second] == ["BlockStored", "BlockStored", "BlockRemoved"]
            assert [event["block_hashes"] for event in events_of_second] == [[new[0].key], [new[1].key], [old[1].key]]
            assert events_of_second[1]["parent_block_hash"] == new[0].key
            assert events_of_second[1]["token_ids"] == list(range(1000 + PAGE, 1000 + 2 * PAGE))
            assert batches[1][1][1] == [{"type": "AllBlocksCleared"}]

    run(scenario)
