"""What the router turns away, who may change what, and what it shows, in front of engines without a model."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from hicache_master.router.serving import Limits

from hicache_mooncake.testing.fake_engine import FakeEngineSettings
from tests.routed import OPTIONS, PAIR, TEXT, engines, plain, routed, run, until, with_engines


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


SLOW = {"prefill_s": 0.01, "decode_token_s": 0.005}


@pytest.mark.parametrize("settings", [plain(2, **SLOW), [replace(each, **SLOW) for each in PAIR]], ids=["plain", "pair"])
def test_clients_that_come_and_go_at_any_time_leave_nothing_behind(settings: Sequence[FakeEngineSettings]) -> None:
    async def test() -> None:
        chance = random.Random(1)
        options = replace(OPTIONS, waiting=20, max_running=3)
        async with engines(*settings) as found, routed(with_engines(found, options)) as client:

            async def visit(number: int) -> int:
                await asyncio.sleep(chance.random())
                body = {"text": f"{number} {TEXT}", "stream": number % 2 == 0, "sampling_params": {"max_new_tokens": 4}}
                try:
                    async with asyncio.timeout(chance.random() * 0.3), client.post("/generate", body) as response:
                        await response.read()
                        return int(response.status)
                except TimeoutError:
                    return 0

            statuses = await asyncio.gather(*(visit(number) for number in range(300)))
            assert {0, 200} <= set(statuses) <= {0, 200, 429}
            await until(lambda: not any(engine.stats.running for engine in found))
            assert client.router.gate.queued == 0

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
