"""KV events out of a real master, of a real node's pages, over real sockets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest
import zmq
from hicache_master.events_out import END_SEQ, SNAPSHOT
from hicache_master.events_socket import ANSWERS_A_TURN
from hicache_master.server import MasterError, MasterServer

from hicache_mooncake.protocol import Engines, Update
from hicache_mooncake.security import ClusterKey
from hicache_mooncake.testing.local import FakeRank, free_port, page_hash
from tests.conftest import START_S, MasterProcess, NodeProcess, wait_until
from tests.events_listener import Listener, key_of
from tests.test_events_out import described
from tests.test_master_core import NS
from tests.test_master_core import hashes as numbered
from tests.test_master_server import Peer, Running
from tests.test_sharing_cluster import FakeRank as Introduced

TOPIC = "kv@a@tiny"
PAGE_BYTES = 64 << 10


class Subscriber(Listener):
    """A SUB socket, and one that asks for what was missed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, replay_endpoint: str) -> None:
        super().__init__()
        self._subscription = context.socket(zmq.SUB)
        self._subscription.subscribe(b"kv@")
        monitor = self._subscription.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._subscription.connect(endpoint)
        assert monitor.poll(START_S * 1000), "nobody publishes there"
        self._subscription.disable_monitor()
        self._requests = context.socket(zmq.DEALER)
        self._requests.connect(replay_endpoint)

    def ask(self, *request: bytes) -> list[list[bytes]]:
        """Ask the replay endpoint; all of the answer but its end."""
        self._requests.send_multipart([b"", *request])
        answer = []
        while self._requests.poll(START_S * 1000):
            empty, *frames = self._requests.recv_multipart()
            assert empty == b""
            if frames == [b"", END_SEQ, b""]:
                return answer
            answer.append(frames)
        raise AssertionError("no end of the replay")

    def knows(self) -> set[tuple[str, int]]:
        """What is believed of node a, once all that came is read."""
        while self._subscription.poll(0):
            topic, seq, payload = self._subscription.recv_multipart()
            self.hear(topic, int.from_bytes(seq, "big"), payload)
        return self.holds[TOPIC]

    def wait_for(self, expected: set[tuple[str, int]]) -> None:
        wait_until(lambda: self.knows() == expected, START_S, f"{len(expected)} pages are told")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def pool(*hashes: bytes) -> set[tuple[str, int]]:
    return {("EXTERNAL", key_of(each)) for each in hashes}


def test_a_subscriber_follows_a_node_from_its_first_page_to_its_death(
    start_master: Callable[..., MasterProcess],
    start_node: Callable[..., NodeProcess],
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    timing = ("--heartbeat-s", "0.2", "--ttl-s", "3")
    master = start_master("--kv-events", endpoints[0], "--kv-events-replay", endpoints[1], *timing)
    node = start_node("a", "8MiB", (master.address,))
    first = Subscriber(context, *endpoints)
    assert first.ask((0).to_bytes(8, "big")) == []
    with contextlib.ExitStack() as stack:
        (identity,) = described()
        introduced = stack.enter_context(contextlib.closing(Introduced(node.socket, identity)))
        rank = stack.enter_context(contextlib.closing(FakeRank(node.settings(), pages=64, page_bytes=PAGE_BYTES)))
        wait_until(lambda: introduced.answers > 0, START_S, "the node knows the engine")
        few = [page_hash(n) for n in range(3)]
        assert list(rank.store(NS, few).ok) == [1, 1, 1]
        first.wait_for(pool(*few))
        assert first.sizes == {64}

        late = Subscriber(context, *endpoints)
        assert late.ask(SNAPSHOT) == []
        late.wait_for(pool(*few))

        for batch in range(5):  # more than the segment holds
            rank.store(NS, [page_hash((batch, n)) for n in range(64)])
        everything = [*few, *(page_hash((batch, n)) for batch in range(5) for n in range(64))]

        def in_the_node() -> set[tuple[str, int]]:
            return pool(*(each for each in everything if rank.exists(NS, [each])))

        wait_until(lambda: first.knows() == in_the_node(), START_S, "what was evicted is told")
        assert 0 < len(first.knows()) < len(everything)
        assert ("kv@a@tiny", "BlockRemoved") in first.events

        before = len(first.events)
        rank.client.clear(NS)
        first.wait_for(set())
        assert (TOPIC, "AllBlocksCleared") in first.events[before:]
        rank.store(NS, few)
        first.wait_for(pool(*few))
        late.wait_for(pool(*few))
    node.kill()
    first.wait_for(set())
    assert first.events[-1] == (TOPIC, "AllBlocksCleared")
    assert first.gaps == late.gaps == 0
    again = Subscriber(context, *endpoints)
    for topic, seq, payload in again.ask((0).to_bytes(8, "big")):
        again.hear(topic, int.from_bytes(seq, "big"), payload)
    assert again.events == first.events
    assert again.gaps == 0


def test_a_long_replay_comes_whole_while_the_master_serves_and_is_counted(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    running = Running(kv_events="127.0.0.1:0", kv_events_replay="127.0.0.1:0")
    with contextlib.closing(running):
        server = running.server
        subscriber = Subscriber(context, f"tcp://{server.kv_events_address}", f"tcp://{server.kv_events_replay_address}")
        node = Peer(context, server.address)
        node.join("a")
        node.send(Engines("a", b"i1", 1, described()))
        for seq in range(1, 3_001):
            node.send(Update("a", b"i1", seq, [(NS, numbered(seq))], []))
            node.states()  # so that it is told of in many batches
        wait_until(lambda: len(subscriber.knows()) == 3_000, START_S)
        batches = subscriber.next_seq[TOPIC]
        assert batches > 3 * ANSWERS_A_TURN
        replay = subscriber.ask((10).to_bytes(8, "big"), TOPIC.encode())
        assert [int.from_bytes(seq, "big") for _, seq, _ in replay] == list(range(10, batches))
        wait_until(lambda: running.metric("hicache_master_kv_events_total") == len(subscriber.events), START_S)
        assert running.metric("hicache_master_kv_event_replays_total") == 1
        assert running.metric("hicache_master_kv_event_snapshots_total") == 0
        subscriber.ask(SNAPSHOT)
        wait_until(lambda: running.metric("hicache_master_kv_event_snapshots_total") == 1, START_S)


def test_without_a_key_events_stay_on_this_host() -> None:
    with pytest.raises(MasterError, match=r"--kv-events 0\.0\.0\.0:0: what is published there is read by whoever reaches it"):
        MasterServer("127.0.0.1:0", kv_events="0.0.0.0:0")
    with pytest.raises(MasterError, match="--kv-events-replay"):
        MasterServer("127.0.0.1:0", kv_events="127.0.0.1:0", kv_events_replay="0.0.0.0:0")
    for allowed in ({"key": ClusterKey.generate()}, {"allow_unauthenticated": True}):
        MasterServer("127.0.0.1:0", kv_events="0.0.0.0:0", **allowed).close()  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_named() -> None:
    first = MasterServer("127.0.0.1:0", kv_events="127.0.0.1:0")
    try:
        with pytest.raises(MasterError, match=f"{re.escape(first.kv_events_address)}' for KV events"):
            MasterServer("127.0.0.1:0", kv_events=first.kv_events_address)
    finally:
        first.close()
