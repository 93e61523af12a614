"""What the router believes of an engine's cache follows the engine's events, and is less, never more, where some are lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hicache_master.conductor.prefixes import DEVICE, HOST, Prefixes
from hicache_master.router.event_stream import MAX_HELD, MAX_REPLAYS, EngineCache, KvEventStream
from hicache_master.router.kv_events import EventSource

NAME, LIFE, PAGE = "engine", "1", 16
GPU, CPU = "GPU", "CPU_PINNED"


def stored(keys: Sequence[int], medium: str | None = GPU, size: int = PAGE, **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": list(keys), "parent_block_hash": None, "token_ids": [1] * size}
    return {**event, "block_size": size, "lora_id": None, "medium": medium, **more}


def removed(keys: Sequence[int], medium: str = GPU) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """Numbers batches, keeps them for replay, and knows what the engine has."""

    def __init__(self, date: float = 1.0, keeps: int = 10_000) -> None:
        self.buffer: list[tuple[int, bytes]] = []
        self.truth: set[tuple[int, str]] = set()
        self._keeps = keeps
        self._next = 0
        self.date = date

    def publish(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        for event in events:
            held = {(key, event.get("medium")) for key in event.get("block_hashes", [])}
            match event["type"]:
                case "BlockStored":
                    self.truth |= held
                case "BlockRemoved":
                    self.truth -= held
                case _:
                    self.truth.clear()
        self.date += 1.0
        batch = self._next, msgspec.msgpack.encode([self.date, events, 0])
        self._next += 1
        self.buffer = [*self.buffer, batch][-self._keeps :]
        return batch


class Listener:
    def __init__(self, *, replays: bool = True, page_size: int = PAGE, ranks: int = 1) -> None:
        self.prefixes = Prefixes()
        self.cache = EngineCache(self.prefixes, NAME, LIFE, page_size, ranks)
        self.stream = KvEventStream(self.cache, replays=replays)

    def hear(self, *batches: tuple[int, bytes]) -> None:
        for seq, payload in batches:
            self.stream.received(seq, payload)

    def replay(self, publisher: Publisher, *, drop: set[int] = frozenset(), whole: bool = True) -> int:  # type: ignore[assignment]
        """Answer whatever replay is wanted, until none is. Returns how many there were."""
        count = 0
        while self.stream.wants:
            count += 1
            start = self.stream.begin_replay()
            for seq, payload in publisher.buffer:
                if seq >= start and seq not in drop:
                    self.stream.replayed(seq, payload)
            self.stream.replay_ended(whole)
        return count

    def holds(self, key: int, tier: int = DEVICE) -> bool:
        matches = self.prefixes.match([key], 0.0)
        return any(run.holders >> (tier + 4 * slot) & 1 for run in matches.runs for slot in matches.slots)

    def known(self, keys: Sequence[int]) -> set[tuple[int, str]]:
        return {(key, medium) for key in keys for medium, tier in ((GPU, DEVICE), (CPU, HOST)) if self.holds(key, tier)}


def test_pages_are_known_in_the_tier_that_the_engine_has_them_in() -> None:
    engine, router = Publisher(), Listener()
    router.hear(engine.publish(stored([1, 2]), stored([1], CPU)), engine.publish(removed([2]), removed([1])))
    assert router.known([1, 2]) == {(1, CPU)} == engine.truth
    router.hear(engine.publish(stored([3], None)))
    assert router.holds(3), "no medium is the device"
    router.hear(engine.publish(CLEARED, stored([4])))
    assert router.known([1, 2, 3, 4]) == {(4, GPU)} == engine.truth


def test_a_gap_is_filled_by_a_replay() -> None:
    engine, router = Publisher(), Listener()
    router.hear(engine.publish(stored([1])))
    engine.publish(removed([1]), stored([2]))
    router.hear(engine.publish(stored([3])), engine.publish(stored([4])))
    assert not router.holds(3), "it waits for what comes before it"
    assert router.replay(engine) == 1
    assert router.known([1, 2, 3, 4]) == engine.truth
    assert (router.cache.counts["gaps"], router.cache.counts["lost"]) == (1, 0)


@pytest.mark.parametrize("replays", [True, False])
def test_what_cannot_be_had_any_more_costs_all_that_was_known(replays: bool) -> None:
    engine, router = Publisher(keeps=1), Listener(replays=replays)
    router.hear(engine.publish(stored([1, 2])))
    engine.publish(removed([1]))
    router.hear(engine.publish(stored([3])))
    router.replay(engine)
    assert router.known([1, 2, 3]) == {(3, GPU)}
    assert router.cache.counts["lost"] == 1
    router.hear(engine.publish(removed([3])), engine.publish(stored([5])))
    assert router.known([1, 2, 3, 5]) == {(5, GPU)}


def test_a_replay_that_does_not_come_costs_what_was_known_and_nothing_more() -> None:
    engine, router = Publisher(), Listener()
    router.hear(engine.publish(stored([1])))
    engine.publish(removed([1]))
    router.hear(engine.publish(stored([3])))
    while router.stream.wants:
        router.stream.begin_replay()
        router.stream.replay_ended(False)
    assert router.known([1, 3]) == {(3, GPU)}
    router.hear(engine.publish(stored([4])))
    assert router.known([1, 3, 4]) == {(3, GPU), (4, GPU)}


def test_a_replay_with_holes_is_asked_for_again_and_not_forever() -> None:
    engine, router = Publisher(), Listener()
    router.hear(engine.publish(stored([0])))
    for key in range(1, 6):
        engine.publish(stored([key]))
    router.hear(engine.publish(stored([6])))
    start = router.stream.begin_replay()
    for seq, payload in engine.buffer[start:3] + engine.buffer[4:]:
        router.stream.replayed(seq, payload)
    router.stream.replay_ended(True)
    assert router.stream.wants
    assert router.replay(engine) == 1
    assert router.known(range(7)) == engine.truth

    engine.publish(stored([7]))
    lost, _ = engine.publish(stored([8]))
    router.hear(engine.publish(stored([9])))
    assert router.replay(engine, drop={lost}) <= MAX_REPLAYS
    assert router.known(range(10)) == {(9, GPU)}


def test_duplicates_and_late_ones_change_nothing() -> None:
    engine, router = Publisher(), Listener()
    first, second = engine.publish(stored([1])), engine.publish(removed([1]))
    router.hear(first, second, first, second, first)
    assert router.known([1]) == set()
    third, fourth = engine.publish(stored([2])), engine.publish(removed([2]))
    router.hear(fourth, third)
    router.replay(engine)
    assert router.known([1, 2]) == set()
    assert router.cache.counts["restarts"] == 0


def test_an_engine_that_started_anew_has_an_empty_cache() -> None:
    before, router = Publisher(), Listener()
    router.hear(before.publish(stored([1])), before.publish(stored([2])))
    after = Publisher(date=before.date + 5)
    router.hear(after.publish(stored([3])))
    assert router.known([1, 2, 3]) == {(3, GPU)}
    assert router.cache.counts["restarts"] == 1


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 7])
def test_an_engine_that_started_anew_is_known_after_the_connection_was_lost(batches: int) -> None:
    """Also where it has published more than the one before it, by the time that it is heard again."""
    before, router = Publisher(), Listener()
    router.hear(*(before.publish(stored([key])) for key in (1, 2, 3)))
    after = Publisher(date=before.date + 5)
    for key in range(batches):
        after.publish(stored([10 + key]))
    router.stream.connected()
    router.replay(after)
    assert router.known(range(20)) == after.truth
    router.hear(after.publish(stored([19])))
    assert router.known(range(20)) == after.truth


def test_a_connection_that_comes_back_costs_nothing_where_nothing_was_lost() -> None:
    engine, router = Publisher(), Listener()
    router.hear(engine.publish(stored([1])))
    router.stream.connected()
    router.stream.connected()
    router.hear(engine.publish(stored([2])))
    assert router.replay(engine) == 1
    assert router.known([1, 2]) == engine.truth
    assert (router.cache.counts["restarts"], router.cache.counts["lost"]) == (0, 0)


def test_a_router_that_started_later_hears_what_is_kept() -> None:
    engine, router = Publisher(keeps=2), Listener()
    for key in range(5):
        engine.publish(stored([key]))
    router.stream.connected()
    router.hear(engine.publish(stored([5])))
    router.replay(engine)
    assert router.known(range(6)) == {(4, GPU), (5, GPU)}


def test_live_batches_that_wait_for_a_replay_are_bounded() -> None:
    engine, router = Publisher(), Listener()
    router.stream.connected()
    for key in range(MAX_HELD + 10):
        router.hear(engine.publish(stored([key])))
    assert len(router.stream._held) == MAX_HELD
    router.replay(engine)
    assert router.known([0, MAX_HELD + 9]) == {(0, GPU), (MAX_HELD + 9, GPU)}


def test_what_is_not_understood_stops_nothing() -> None:
    engine, router = Publisher(), Listener()
    events = [
        stored([1], cache_salt="s", lora_name="l", something={"new": [1]}),
        {"type": "BlockMoved", "block_hashes": [1]},
        stored([2], "EXTERNAL"),
        removed([77]),
        {"type": "BlockStored", "block_hashes": [b"bytes"], "block_size": PAGE},
        {"type": "BlockStored"},
        "text",
        ["BlockStored", [3], None, [1] * PAGE, PAGE, None, CPU],
        ["BlockStored", [4], None, [1] * PAGE, PAGE, None],
        ["BlockRemoved", [1], GPU],
    ]
    router.stream.received(0, msgspec.msgpack.encode([1.0, events, 0, "more"]))
    assert router.known([1, 2, 3, 4]) == {(3, CPU), (4, GPU)}
    assert router.cache.counts["unread"] == 5
    for payload in (b"", b"\xc1", msgspec.msgpack.encode([]), msgspec.msgpack.encode([None, None]), msgspec.msgpack.encode({})):
        router.stream.received(router.stream._next, payload)
    assert router.cache.counts["unread"] == 10
    assert router.known([3]) == {(3, CPU)}
    assert engine.truth == set()


def test_pages_of_another_size_are_not_taken() -> None:
    engine, router = Publisher(), Listener(page_size=64)
    router.hear(engine.publish(stored([1])))
    assert router.known([1]) == set()
    assert router.cache.other_page_size == PAGE


def test_a_page_is_there_while_any_rank_has_it() -> None:
    router = Listener(ranks=2)
    streams = [KvEventStream(router.cache, rank) for rank in range(2)]
    engines = [Publisher(), Publisher()]
    for stream, engine in zip(streams, engines, strict=True):
        stream.received(*engine.publish(stored([1, 2])))
    streams[0].received(*engines[0].publish(removed([1])))
    assert router.known([1, 2]) == {(1, GPU), (2, GPU)}
    streams[1].received(*engines[1].publish(CLEARED))
    assert router.known([1, 2]) == {(2, GPU)}
    streams[0].received(*engines[0].publish(CLEARED))
    assert router.known([1, 2]) == set()
    assert router.cache._masks == {}


def test_events_of_a_former_incarnation_are_ignored() -> None:
    engine, router = Publisher(), Listener()
    router.hear(engine.publish(stored([1])))
    router.prefixes.join(NAME, "2")
    router.prefixes.stored(NAME, "2", [2], DEVICE)
    router.hear(engine.publish(stored([3])), engine.publish(CLEARED))
    assert router.known([1, 2, 3]) == {(2, GPU)}


@pytest.mark.parametrize("seed", range(20))
def test_lost_doubled_and_late_batches_end_in_the_truth(seed: int) -> None:
    """One in a hundred is dropped, doubled, or comes late; connections break; the engine restarts. What is believed at a moment
    when all that was published has been heard is what is there."""
    rng = random.Random(seed)
    engine, router = Publisher(), Listener()
    keys = range(200)
    late: list[tuple[int, bytes]] = []
    for _ in range(1_500):
        some = rng.sample(keys, 5)
        kind = rng.choices([stored(some), stored(some, CPU), removed(some), removed(some, CPU), CLEARED], [8, 8, 7, 7, 0.1])[0]
        batch = engine.publish(kind)
        fate = rng.random()
        if fate < 0.01:
            continue
        heard = [batch, batch] if fate < 0.02 else [batch]
        if fate > 0.99:
            late, heard = heard, []
        elif late:
            heard, late = heard + late, []
        router.hear(*heard)
        if rng.random() < 0.005:
            router.stream.connected()
        if rng.random() < 0.7:
            router.replay(engine)
        if rng.random() < 0.003:
            engine, late = Publisher(date=engine.date), []
            router.stream.connected()
    router.stream.connected()
    router.replay(engine)
    assert router.known(keys) == engine.truth
    assert router.cache.counts["gaps"] > 0
    router.prefixes.validate()


def test_where_events_are_is_told_by_the_server() -> None:
    info = {"kv_events": {"endpoint_port_base": 5557, "replay_endpoint_port_base": 5600, "dp_size": 2, "block_size": 64}}
    source = EventSource.of_server("[::1]", info)
    assert source == EventSource("tcp://[::1]:5557", "tcp://[::1]:5600", "", 2, 64)
    assert source.at(1) == ("tcp://[::1]:5558", "tcp://[::1]:5601")
    for nothing in ({}, {"kv_events": None}, {"kv_events": {"endpoint_port_base": "x"}}):
        assert EventSource.of_server("h", nothing) is None
