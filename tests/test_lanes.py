"""Several connections to one node: how many is learned, pages are split over them, and none is left over."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.backoff import Admission
from hicache_mooncake.client import fetch
from hicache_mooncake.client.lanes import LARGE_BYTES, Lanes
from hicache_mooncake.client.remote import Ask, FetchPlan
from hicache_mooncake.config_values import MAX_LANES
from hicache_mooncake.transfer import peers as peers_module
from hicache_mooncake.transfer import tcp
from tests.conftest import wait_until
from tests.faults.holders import NS, PageServer, Reader, checksum_of, names

MIB = 1 << 20
A, B = (p.Peer(name, b"i" * 8, name, 1) for name in "ab")


def run(lanes: Lanes, network: Callable[[int], float], loads: int, peer: p.Peer = A, size: int = 64 * MIB) -> list[int]:
    """So many loads over a network that gives `network(lanes)` bytes a second: how many lanes each used."""
    used = []
    for _ in range(loads):
        count = lanes.of(peer, size)
        lanes.loaded(peer, count, size, size / network(count))
        used.append(count)
    return used


def limited(each: float, all_: float) -> Callable[[int], float]:
    return lambda lanes: min(lanes * each, all_)


# --------------------------------------------------------------------------- how many


def test_lanes_grow_one_by_one_as_long_as_it_gets_faster() -> None:
    lanes = Lanes()
    used = run(lanes, limited(1e9, 4e9), 100)
    assert used[0] == 1
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(used))
    assert run(lanes, limited(1e9, 4e9), 200).count(4) > 150, "the network gives no more than four lanes do"


def test_a_network_that_one_connection_fills_is_tried_ever_more_seldom() -> None:
    used = run(Lanes(), limited(1e9, 1e9), 1000)
    assert used.count(1) > 950
    assert used[:100].count(2) > used[900:].count(2)


def test_lanes_go_away_when_they_are_of_no_use_any_more() -> None:
    lanes = Lanes()
    run(lanes, limited(1e9, 4e9), 200)
    used = run(lanes, limited(2e9, 2e9), 2000)
    assert used[-200:].count(1) > 150, "one connection gives as much now"


def test_a_little_noise_adds_no_lanes() -> None:
    rng = random.Random(5)
    used = run(Lanes(), lambda _: rng.uniform(0.97, 1.03) * 1e9, 2000)
    assert used.count(1) > 1900


def test_small_loads_use_one_lane_and_teach_nothing() -> None:
    lanes = Lanes()
    run(lanes, limited(1e9, 4e9), 200)
    assert lanes.of(A, LARGE_BYTES - 1) == 1
    assert lanes.of(A, LARGE_BYTES) == 2, "each has enough to carry"
    assert lanes.of(B, 64 * MIB) == 1, "another node has another network"
    fresh = Lanes()
    assert run(fresh, limited(1e9, 4e9), 100, size=MIB) == [1] * 100


def test_a_forced_number_is_used_for_large_loads_and_never_changes() -> None:
    assert set(run(Lanes(3), limited(1e9, 1e9), 300)) == {3}
    assert Lanes(3).of(A, MIB) == 1
    assert Lanes(99).of(A, 1 << 30) == MAX_LANES


def test_what_is_known_of_nodes_is_bounded() -> None:
    lanes = Lanes()
    for number in range(3000):
        run(lanes, limited(1e9, 4e9), 1, p.Peer(str(number), b"i" * 8, "host", 1))
    assert len(lanes._peers) == 1024


# --------------------------------------------------------------------------- which pages on which


def plan_of(pages: int, holders: list[p.Peer], lanes: int) -> FetchPlan:
    plan = FetchPlan(10.0, lambda peer, count: lanes)
    for page in range(pages):
        plan.add(page, holders)
    return plan


def go(_peer: p.Peer) -> Admission:
    return Admission.GO


@pytest.mark.parametrize(("pages", "lanes", "shares"), [(10, 3, [4, 4, 2]), (2, 4, [1, 1]), (5000, 2, [1024, 1024])])
def test_pages_are_split_evenly(pages: int, lanes: int, shares: list[int]) -> None:
    plan = plan_of(pages, [A], lanes)
    asks = plan.next(0.0, go)
    assert [len(ask.pages) for ask in asks] == shares
    assert [page for ask in asks for page in ask.pages] == list(range(sum(shares)))
    assert all(ask.lanes == len(shares) for ask in asks)
    assert plan.next(0.0, go) == [], "until they have ended"


def test_a_lane_that_fails_costs_its_own_pages_and_one_blame() -> None:
    plan = plan_of(8, [A, B], 4)
    asks = plan.next(0.0, go)
    plan.ended(asks[0], "peer_failed", blame=True)
    plan.ended(asks[1], "peer_failed", blame=True)
    again = plan.next(0.0, go)
    assert [(ask.peer.node, ask.pages) for ask in again] == [("b", [page]) for page in (0, 1, 2, 3)]
    for ask in [*asks[2:], *again]:
        for page in ask.pages:
            plan.arrived(ask, page)
        plan.ended(ask)
    assert plan.done
    assert not plan.reasons
    assert plan.blamed == ["a"], "lanes that fail together are one failure"


def test_what_a_lane_was_for_that_is_not_to_be_had_goes_to_those_that_are() -> None:
    """Each of them in turn, and never over more again."""
    plan = plan_of(8, [A], 4)
    first, *others = plan.next(0.0, go)
    for ask in others:
        assert plan.accompanied(ask)
        plan.crowded(ask, "peer_full")
    assert not plan.accompanied(first)
    for ask in (first, *plan.next(0.0, go)):
        assert plan.next(0.0, go) == [], "until it has ended"
        for page in ask.pages:
            plan.arrived(ask, page)
        plan.ended(ask)
    for ask in plan.next(0.0, go):
        assert (ask.pages, ask.lanes) == ([2, 3, 4, 5, 6, 7], 1)
        plan.ended(ask, "peer_full")
    assert plan.done
    assert plan.reasons == {"peer_full": 6}
    assert plan.blamed == []


def test_a_lane_that_was_tried_and_could_not_be_had_is_not_tried_again_soon() -> None:
    lanes = Lanes()
    tries: list[int] = []
    for number in range(200):
        used = lanes.of(A, 64 * MIB)
        if used > 1:
            tries.append(number)
            lanes.refused(A)
        lanes.loaded(A, 1, 64 * MIB, 0.05)
    assert 2 <= len(tries) <= 8
    assert tries[-1] - tries[-2] > tries[1] - tries[0]


def test_a_probe_has_one_lane() -> None:
    (probe,) = plan_of(8, [A], 4).next(0.0, lambda _: Admission.PROBE)
    assert (len(probe.pages), probe.lanes) == (1, 1)


def test_every_page_ends_once_over_any_number_of_lanes() -> None:
    """In any order of successes, failures and time."""
    for seed in range(150):
        rng = random.Random(seed)
        most = rng.randrange(1, 6)
        plan = FetchPlan(10.0, lambda peer, count, most=most, rng=rng: rng.randrange(1, most + 1))
        pages = {page: rng.sample([A, B], rng.choice([1, 2])) for page in range(rng.randrange(1, 40))}
        for page, holders in pages.items():
            plan.add(page, holders)
        under_way: list[Ask] = []
        arrived: set[int] = set()
        now = 0.0
        while True:
            under_way += plan.next(
                now, lambda _, rng=rng: rng.choice([Admission.GO, Admission.GO, Admission.PROBE, Admission.NO])
            )
            asked = [page for ask in under_way for page in ask.left]
            assert len(asked) == len(set(asked))
            assert all(sum(ask.peer is peer for ask in under_way) <= most for peer in (A, B))
            if plan.done:
                break
            now += rng.random() / 10
            late = plan.expired(now)
            for ask in late or ([rng.choice(under_way)] if under_way else []):
                step = "late" if late else rng.choice(["arrived", "bad", "broke", "slow", "stale"])
                if step in ("arrived", "bad") and ask.left:
                    page = next(iter(ask.left))
                    if step == "arrived":
                        plan.arrived(ask, page)
                        assert page not in arrived
                        arrived.add(page)
                    else:
                        plan.missed(ask, page, step, blame=True)
                    if ask.left:
                        continue
                under_way.remove(ask)
                if step == "stale":
                    plan.again(ask)
                else:
                    plan.ended(ask, step, blame=step == "broke", stay=step == "slow")
        assert under_way == []
        assert len(arrived) + sum(plan.reasons.values()) == len(pages)


# --------------------------------------------------------------------------- over real sockets


class Server(PageServer):
    """Knows its checksums, and counts connections: those that stand, and the most at once."""

    def __init__(self, name: str, page_bytes: int) -> None:
        self.made = 0
        self.standing: set[int] = set()
        self._lock = threading.Lock()
        self._checksums: dict[bytes, int] = {}
        super().__init__(name, page_bytes)

    @property
    def peer(self) -> p.Peer:
        return p.Peer(self.name, b"i" * 8, *self.address)

    def hold(self, pages: list[bytes]) -> None:  # type: ignore[override]
        super().hold(pages)
        self._checksums |= {page: checksum_of(page, self.page_bytes) for page in pages}

    def _serve(self, sock) -> None:  # type: ignore[no-untyped-def]
        with self._lock:
            self.made += 1
            self.standing.add(id(sock))
        try:
            super()._serve(sock)
        finally:
            with self._lock:
                self.standing.discard(id(sock))

    def answer(self, sock, fetch: p.Fetch) -> None:  # type: ignore[no-untyped-def]
        each = [fetch.hashes[at : at + p.HASH_BYTES] for at in range(0, len(fetch.hashes), p.HASH_BYTES)]
        self.served.append(each)
        checksums = [self._checksums[page] for page in each]
        tcp.set_timeouts(sock, 30)
        tcp.send_message(sock, p.FetchReply(self.name, b"i" * 8, bytes([p.LOCAL]) * len(each), checksums, fetch.id))
        self.send(sock, [memoryview(self.pages[page]) for page in each], time.monotonic() + 30)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is given the time to connect."""
    monkeypatch.setattr(fetch, "_CONNECTING_S", 60.0)
    monkeypatch.setattr(fetch, "_SENDING_S", 60.0)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_hundred_thousand_pages_over_the_same_connections(resources: ExitStack, lanes: int) -> None:
    """Users ran out of ephemeral ports and of descriptors with a connection for every transfer."""
    count, page_bytes = 1024, 8 << 10
    server = resources.enter_context(closing(Server("a", page_bytes)))
    reader = resources.enter_context(closing(Reader(count, page_bytes, lanes)))
    pages = names(*range(count))
    server.hold(pages)
    reader.place(pages, server)
    assert reader.load(pages, 60.0).ok == b"\x01" * count
    made, open_files = server.made, len(os.listdir("/proc/self/fd"))
    numbers = b"".join(place.to_bytes(8, "little") for place in range(count))
    job = p.Transfer("load", NS, b"".join(pages), [reader._run], numbers, 60.0)
    for _ in range(100):
        assert reader.mover.run(job).ok == b"\x01" * count
    assert reader.load(pages, 60.0).ok == b"\x01" * count, "the last ones are right, too"
    assert made == lanes
    assert server.made == made
    assert len(os.listdir("/proc/self/fd")) <= open_files
    assert {len(share) for share in server.served} == {count // lanes}


def test_what_is_asked_for_is_named_and_not_sent(resources: ExitStack) -> None:
    """Another pool's requests had bodies as large as the pages that they asked for."""
    count, page_bytes = 16, 128 << 10
    server = resources.enter_context(closing(Server("a", page_bytes)))
    reader = resources.enter_context(closing(Reader(count, page_bytes, 1)))
    pages = names(*range(count))
    server.hold(pages)
    reader.place(pages, p.Peer(server.name, b"i" * 8, "127.0.0.1", server.proxy.port))
    assert reader.load(pages, 60.0).ok == b"\x01" * count
    before = server.proxy.asked_bytes
    assert reader.load(pages, 60.0).ok == b"\x01" * count
    assert count * p.HASH_BYTES < server.proxy.asked_bytes - before < count * p.HASH_BYTES + 1024


def test_one_lane_that_breaks_in_mid_body_costs_no_page_that_another_node_has(resources: ExitStack) -> None:
    count, page_bytes = 64, 128 << 10
    first, second = (resources.enter_context(closing(Server(name, page_bytes))) for name in "ab")
    reader = resources.enter_context(closing(Reader(count, page_bytes, 4)))
    pages = names(*range(count))
    first.hold(pages)
    second.hold(pages)
    reader.place(pages, first, second)
    once = threading.Lock()

    def breaking(sock, bodies: list[memoryview], deadline: float) -> None:  # type: ignore[no-untyped-def]
        if once.acquire(blocking=False):
            sock.sendall(bodies[0][: len(bodies[0]) // 2])
            raise ConnectionError("broken")
        tcp.send_bodies(sock, bodies, deadline)

    first.send = breaking
    assert reader.load(pages, 60.0).ok == b"\x01" * count
    assert reader.directory.down == ["a"]
    assert len(first.served) == 4
    assert sum(map(len, second.served)) == 16, "the pages of that lane alone"
    wait_until(lambda: len(first.standing) == 3, 20, "the others are kept")


def test_a_mover_tries_another_lane_by_itself(resources: ExitStack) -> None:
    count, page_bytes = 64, 128 << 10
    server = resources.enter_context(closing(Server("a", page_bytes)))
    reader = resources.enter_context(closing(Reader(count, page_bytes)))
    pages = names(*range(count))
    server.hold(pages)
    reader.place(pages, server)
    for _ in range(1000):
        assert reader.load(pages, 60.0).ok == b"\x01" * count
        if server.made == 2:
            break
    assert server.made == 2, "one more"
    assert min(len(share) for share in server.served[-2:]) == count // 2


def test_lanes_that_cannot_be_opened_cost_no_page(resources: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with few threads, or many nodes that are connected to at once."""
    monkeypatch.setattr(peers_module, "_MAX_CONNECTING", 1)
    count, page_bytes = 64, 128 << 10
    server = resources.enter_context(closing(Server("a", page_bytes)))
    reader = resources.enter_context(closing(Reader(count, page_bytes, 4)))
    pages = names(*range(count))
    server.hold(pages)
    reader.place(pages, server)
    assert reader.load(pages, 60.0).ok == b"\x01" * count
    assert 1 <= server.made <= 4
    assert reader.directory.down == []


def test_lanes_that_a_busy_node_does_not_take_cost_no_page_and_no_blame(resources: ExitStack) -> None:
    """A node whose queue of connections was full lost the pages of each lane but one, and was left alone for a while."""
    count, page_bytes = 64, 128 << 10
    server = resources.enter_context(closing(Server("a", page_bytes)))
    reader = resources.enter_context(closing(Reader(count, page_bytes, 4)))
    peers = reader.mover._peers
    connect, one = peers._connect, threading.Lock()

    def first_only(*how: Any) -> tcp.PeerConnection:
        if one.acquire(blocking=False):
            return connect(*how)
        raise ConnectionRefusedError("its queue is full")

    peers._connect = first_only
    pages = names(*range(count))
    server.hold(pages)
    reader.place(pages, server)
    for _ in range(2):
        assert reader.load(pages, 60.0).ok == b"\x01" * count
    assert server.made == 1
    assert reader.directory.down == []


class FullServer(Server):
    """Takes `room` connections, and others as a node does that is full, or as one of an older release."""

    def __init__(self, page_bytes: int, room: int, says: p.Refused | None) -> None:
        self.room, self.says = room, says
        super().__init__("full", page_bytes)

    def _serve(self, sock) -> None:  # type: ignore[no-untyped-def]
        with self._lock:
            full = self.room <= 0
            self.room -= 1
            self.made += full
        if not full:
            super()._serve(sock)
            return
        if self.says is not None:
            tcp.send_message(sock, self.says)
        sock.close()


FULL = p.Refused("it is full", full=True)


@pytest.mark.parametrize("says", [FULL, None], ids=["says so", "older"])
def test_lanes_that_a_full_node_takes_and_closes_at_once_cost_no_page_and_no_blame(
    resources: ExitStack, says: p.Refused | None
) -> None:
    """The pages of each lane that was too many were lost, and the node was left alone as broken."""
    count, page_bytes = 64, 128 << 10
    server = resources.enter_context(closing(FullServer(page_bytes, 1, says)))
    reader = resources.enter_context(closing(Reader(count, page_bytes, 4)))
    pages = names(*range(count))
    server.hold(pages)
    reader.place(pages, server)
    for _ in range(3):
        done = reader.load(pages, 60.0)
        assert done.ok == b"\x01" * count, done.reasons
    assert reader.directory.down == []


def test_a_node_that_is_full_is_no_broken_node(resources: ExitStack) -> None:
    """Its pages are asked of the other holder, or are misses with that reason; it is asked again when there is room."""
    count, page_bytes = 8, 64 << 10
    server = resources.enter_context(closing(FullServer(page_bytes, 0, FULL)))
    other = resources.enter_context(closing(Server("other", page_bytes)))
    reader = resources.enter_context(closing(Reader(count, page_bytes)))
    pages = names(*range(count))
    for holder in (server, other):
        holder.hold(pages)
    reader.place(pages, server)
    assert reader.load(pages, 60.0).reasons == {"peer_full": count}
    reader.place(pages, server, other)
    assert reader.load(pages, 60.0).ok == b"\x01" * count
    assert reader.directory.down == []
    reader.place(pages, server)
    server.room = 1
    wait_until(lambda: reader.load(pages, 60.0).ok == b"\x01" * count, 30, "asked again")


def test_connections_that_went_stale_on_all_lanes_cost_nothing(resources: ExitStack) -> None:
    count, page_bytes = 64, 128 << 10
    server = resources.enter_context(closing(Server("a", page_bytes)))
    reader = resources.enter_context(closing(Reader(count, page_bytes, 4)))
    pages = names(*range(count))
    server.hold(pages)
    reader.place(pages, server)
    socks: list[tcp.socket.socket] = []
    answer = server.answer

    def noting(sock, fetch: p.Fetch) -> None:  # type: ignore[no-untyped-def]
        socks.append(sock)
        answer(sock, fetch)

    server.answer = noting  # type: ignore[method-assign]
    assert reader.load(pages, 60.0).ok == b"\x01" * count
    for sock in socks:
        sock.shutdown(tcp.socket.SHUT_RDWR)
    wait_until(lambda: not server.standing, 20, "the node has closed them")
    assert reader.load(pages, 60.0).ok == b"\x01" * count
    assert server.made == 8
    assert reader.directory.down == []
