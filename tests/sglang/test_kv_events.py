"""The router's ear for KV events, over ZMQ, with SGLang's own publisher at the other end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hicache_master.conductor.prefixes import DEVICE, HOST, Prefixes
from hicache_master.router.kv_events import EventSource, KvEvents

from hicache_mooncake.testing.local import free_port
from tests.conftest import START_S

PAGE = 4


@pytest.fixture
def source() -> EventSource:
    return EventSource(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}", "kv", 1)


@pytest.fixture
def publish(source: EventSource) -> Iterator[Callable[..., Any]]:
    from sglang.srt.disaggregation.kv_events import ZmqEventPublisher

    made: list[Any] = []

    def start(**options: Any) -> Any:
        at = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint, "topic": source.topic, "bind": True}
        made.append(ZmqEventPublisher(0, **{**at, **options}))
        return made[-1]

    yield start
    for publisher in made:
        publisher.shutdown()


def batch(*events: Any) -> Any:
    from sglang.srt.disaggregation.kv_events import KVEventBatch

    return KVEventBatch(ts=time.time(), events=list(events))


def stored(keys: list[int], medium: str = "GPU") -> Any:
    from sglang.srt.disaggregation.kv_events import BlockStored

    tokens = list(range(PAGE * len(keys)))
    return BlockStored(
        block_hashes=keys,
        parent_block_hash=None,
        token_ids=tokens,
        block_size=PAGE,
        lora_id=None,
        medium=medium,
        cache_salt="s",
    )


def removed(keys: list[int]) -> Any:
    from sglang.srt.disaggregation.kv_events import BlockRemoved

    return BlockRemoved(block_hashes=keys, medium="GPU")


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def run(prefixes: Prefixes, source: EventSource, scenario: Callable[[KvEvents], Any]) -> None:
    async def inside() -> None:
        events = KvEvents(prefixes, "engine", "1", source, PAGE)
        events.start()
        try:
            await scenario(events)
        finally:
            await events.close()

    asyncio.run(inside())


def length(prefixes: Prefixes, keys: list[int], tier: int = DEVICE) -> int:
    return prefixes.match(keys, 0.0).length(tier, "engine")


def test_what_was_published_before_and_after_the_router_came_is_known(source: EventSource, publish: Callable[..., Any]) -> None:
    prefixes, publisher = Prefixes(), publish()
    publisher.publish(batch(stored([1, 2, 3])))

    async def scenario(events: KvEvents) -> None:
        await until(lambda: length(prefixes, [1, 2, 3]) == 3)
        publisher.publish(batch(removed([3]), stored([3], "CPU_PINNED"), stored([4])))
        await until(lambda: length(prefixes, [4]) == 1)
        assert (length(prefixes, [1, 2, 3]), length(prefixes, [1, 2, 3], HOST)) == (2, 3)
        assert events.connected
        assert events.problem == ""

    run(prefixes, source, scenario)


def test_more_batches_than_fit_into_a_socket_are_all_replayed(source: EventSource, publish: Callable[..., Any]) -> None:
    prefixes, publisher = Prefixes(), publish()
    keys = list(range(5_000))
    for key in keys:
        publisher.publish(batch(stored([key])))
    deadline = time.monotonic() + START_S
    while not publisher._event_queue.empty() and time.monotonic() < deadline:
        time.sleep(0.01)

    async def scenario(events: KvEvents) -> None:
        await until(lambda: length(prefixes, keys) == len(keys))
        assert events.counts["lost"] == 0

    run(prefixes, source, scenario)


def test_an_engine_that_comes_back_anew_has_what_it_says_now(source: EventSource, publish: Callable[..., Any]) -> None:
    prefixes, publisher = Prefixes(), publish()
    publisher.publish(batch(stored([1, 2])))

    async def scenario(events: KvEvents) -> None:
        await until(lambda: length(prefixes, [1, 2]) == 2)
        await asyncio.to_thread(publisher.shutdown)
        await until(lambda: not events.connected)
        again = publish()
        again.publish(batch(stored([5])))
        await until(lambda: length(prefixes, [5]) == 1)
        assert length(prefixes, [1]) == 0
        assert events.counts["restarts"] == 1

    run(prefixes, source, scenario)


def test_without_a_replay_endpoint_the_live_events_are_known(source: EventSource, publish: Callable[..., Any]) -> None:
    prefixes, publisher = Prefixes(), publish(replay_endpoint=None)

    async def scenario(events: KvEvents) -> None:
        await until(lambda: events.connected)
        deadline = time.monotonic() + START_S
        while not length(prefixes, [1]):  # the first may be published before the subscription has arrived
            assert time.monotonic() < deadline
            publisher.publish(batch(stored([1])))
            await asyncio.sleep(0.05)

    run(prefixes, EventSource(source.endpoint, "", source.topic), scenario)


def test_pages_of_another_size_are_refused_with_what_to_do(source: EventSource, publish: Callable[..., Any]) -> None:
    prefixes, publisher = Prefixes(), publish()
    publisher.publish(batch(stored([1])))

    async def scenario() -> None:
        events = KvEvents(prefixes, "engine", "1", source, 64)
        events.start()
        await until(lambda: events.counts["mismatched"] > 0)
        assert "same page size" in events.problem
        assert length(prefixes, [1]) == 0
        await events.close()

    asyncio.run(scenario())
