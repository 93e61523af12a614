"""Links over RDMA verbs, on devices that are not there: what users see when rails, peers and devices fail."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from hicache_mooncake.testing.fake_verbs import FakeCard, FakeFabric, FakeHost, FakeQp
from hicache_mooncake.transfer.transport import Link, Pending, Piece, TransportError, TransportOptions
from hicache_mooncake.transfer.verbs import handshake, rails
from hicache_mooncake.transfer.verbs import transport as verbs_transport
from hicache_mooncake.transfer.verbs.api import VerbsError, Work
from hicache_mooncake.transfer.verbs.handshake import announce, frame
from hicache_mooncake.transfer.verbs.link import VerbsLink
from hicache_mooncake.transfer.verbs.traffic import Traffic
from hicache_mooncake.transfer.verbs.transport import VerbsTransport

LONG = 60.0
SIZE = 8 << 20


def until(what: Callable[[], object], seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not in {seconds} s"
        time.sleep(0.002)


class Memory:
    def __init__(self, size: int = SIZE, seed: int = 0) -> None:
        self.map = mmap.mmap(-1, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if seed:
            self.map[:] = random.Random(seed).randbytes(size)

    def bytes(self, start: int = 0, length: int = SIZE) -> bytes:
        return self.map[start : start + length]


class End:
    """One host: its transport, its registered memory, and its link to the other end."""

    def __init__(self, host: FakeHost, options: TransportOptions, seed: int) -> None:
        self.host = host
        self.transport = VerbsTransport(options, host.binding())
        self.memory = Memory(seed=seed)
        self.token = self.transport.register(self.memory.address, SIZE)
        self.link: Link

    @property
    def card(self) -> FakeCard:
        return next(iter(self.host.cards.values()))

    def states(self) -> list[str]:
        assert isinstance(self.link, VerbsLink)
        return [rail.state for rail in self.link.report()]


class Pair:
    """Two linked hosts. `left` has connected."""

    def __init__(self, fabric: FakeFabric, cards: int = 1, options: TransportOptions | None = None) -> None:
        names = [f"mlx5_{i}" for i in range(cards)]
        options = options or TransportOptions()
        self.left = End(fabric.host("left", names), options, seed=1)
        self.right = End(fabric.host("right", names), options, seed=2)
        self.left.link, self.right.link = connected(self.left.transport, self.right.transport)
        self.left.link.learn(self.right.memory.address, SIZE, self.right.token)
        self.right.link.learn(self.left.memory.address, SIZE, self.left.token)

    def write(self, start: int = 0, length: int = SIZE, seconds: float = LONG) -> Pending:
        """From left to right."""
        return self.move("write", start, length, seconds)

    def move(self, op: str, start: int = 0, length: int = SIZE, seconds: float = LONG, step: int = 64 << 10) -> Pending:
        left, right = self.left.memory.address, self.right.memory.address
        pieces = [
            # Every other piece apart from its neighbour on the other side, so that they stay pieces.
            Piece(left + at, right + at, min(step, start + length - at))
            for at in sorted(range(start, start + length, step), key=lambda at: (at // step % 2, at))
        ]
        return self.left.link.submit("read" if op == "read" else "write", pieces, time.monotonic() + seconds)

    def same(self, start: int = 0, length: int = SIZE) -> bool:
        return self.left.memory.bytes(start, length) == self.right.memory.bytes(start, length)

    def both_up(self, count: int = 1) -> bool:
        return self.left.states() == self.right.states() == ["up"] * count

    def close(self) -> None:
        self.left.transport.close()
        self.right.transport.close()


def connected(left: VerbsTransport, right: VerbsTransport, seconds: float = LONG) -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    made: list[Link | TransportError] = []

    def accept() -> None:
        try:
            made.append(right.accept([theirs], time.monotonic() + seconds))
        except TransportError as error:
            made.append(error)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        link = left.connect([ours], time.monotonic() + seconds)
    finally:
        thread.join()
    (other,) = made
    assert isinstance(other, Link)
    return link, other


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy for a while is neither a rail on which nothing moves nor a peer that does not answer."""
    monkeypatch.setattr(rails, "STALLED_S", LONG)
    monkeypatch.setattr(rails, "ANSWER_S", LONG)
    monkeypatch.setattr(rails, "PROBE_S", LONG)


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with FakeFabric() as made:
        yield made


@pytest.fixture
def pair(fabric: FakeFabric) -> Iterator[Pair]:
    made = Pair(fabric)
    yield made
    made.close()


@pytest.fixture
def two_rails(fabric: FakeFabric) -> Iterator[Pair]:
    made = Pair(fabric, cards=2)
    yield made
    made.close()


def reason_of(pending: Pending) -> str:
    with pytest.raises(TransportError) as caught:
        pending.wait()
    return caught.value.reason


# ---------------------------------------------------------------------- rails


def test_a_batch_goes_over_all_rails_with_one_list_of_works_each(two_rails: Pair) -> None:
    cards = list(two_rails.left.host.cards.values())
    before = [card.counts.posts for card in cards]
    two_rails.write(length=2 << 20).wait()
    assert two_rails.same(length=2 << 20)
    assert [card.counts.posts for card in cards] == [count + 1 for count in before]
    assert all(card.counts.bytes >= 512 << 10 for card in cards)


def test_layers_that_lie_apart_here_and_together_there_are_one_work(pair: Pair) -> None:
    left, right = pair.left.memory.address, pair.right.memory.address
    layers = [Piece(left + layer * 9000, right + layer * 500, 500) for layer in range(30)]
    before = pair.left.card.counts.works
    pair.left.link.submit("write", layers, time.monotonic() + LONG).wait()
    assert pair.left.card.counts.works == before + 1
    for layer in range(30):
        assert pair.right.memory.bytes(layer * 500, 500) == pair.left.memory.bytes(layer * 9000, 500)


@pytest.mark.parametrize("op", ["read", "write"])
def test_what_a_failed_rail_had_not_moved_goes_over_the_other_one(two_rails: Pair, op: str) -> None:
    first = two_rails.left.card
    first.hold(after_bytes=200_000)
    batch = two_rails.move(op)
    until(lambda: first.held)
    first.port_state(1, "DOWN")
    first.resume()
    batch.wait()
    assert two_rails.same()
    until(lambda: two_rails.left.states()[0] == "down")
    assert two_rails.left.states()[1] == "up"
    assert two_rails.left.link.alive
    assert two_rails.right.link.alive


def test_a_rail_comes_back_when_its_port_does(two_rails: Pair) -> None:
    first = two_rails.left.card
    first.port_state(1, "DOWN")
    two_rails.write().wait()
    until(lambda: two_rails.left.states() == ["down", "up"])
    first.port_state(1, "ACTIVE")
    until(lambda: two_rails.both_up(2))
    before = first.counts.bytes
    two_rails.move("read").wait()
    assert first.counts.bytes > before


def test_nothing_late_of_a_failed_rail_lands_behind_what_went_over_the_other(two_rails: Pair) -> None:
    """The peer's end of the rail is gone before its bytes go elsewhere."""
    first, second = two_rails.left.host.cards.values()
    first.hold(after_bytes=100_000)
    second.hold()
    batch = two_rails.write()
    until(lambda: first.held and second.held)
    qps = [qp for qp in first.fabric.qps.values() if qp.card in two_rails.right.host.cards.values()]
    first.vanish()
    second.resume()
    batch.wait()
    assert two_rails.same()
    assert sum(qp.closed for qp in qps) == 1


def test_with_every_rail_failing_the_batch_and_the_link_end_at_once(two_rails: Pair) -> None:
    for card in two_rails.left.host.cards.values():
        card.hold(after_bytes=100_000)
    batch = two_rails.write()
    until(lambda: all(card.held for card in two_rails.left.host.cards.values()))
    for card in two_rails.left.host.cards.values():
        card.port_state(1, "DOWN")
        card.resume()
    assert reason_of(batch) in ("peer", "device")
    until(lambda: not two_rails.left.link.alive and not two_rails.right.link.alive)
    with pytest.raises(TransportError):
        two_rails.write()


def test_the_only_rail_failing_ends_the_link(pair: Pair) -> None:
    pair.left.card.port_state(1, "DOWN")
    assert reason_of(pair.write()) == "peer"
    assert not pair.left.link.alive
    until(lambda: not pair.right.link.alive)


def test_queue_pairs_that_die_again_at_once_are_left_alone_longer_and_longer(two_rails: Pair) -> None:
    """A storm of reconnects, as users saw it: every new queue pair of a card dies within milliseconds."""
    first = two_rails.left.card
    first.break_queue_pairs(after_works=0)
    for _ in range(40):
        two_rails.write(length=2 << 20).wait()
        time.sleep(0.05)
    assert first.counts.queue_pairs <= 5
    assert two_rails.left.link.alive
    assert two_rails.same(length=2 << 20)


def test_a_post_that_fails_costs_the_rail_and_no_batch(two_rails: Pair) -> None:
    two_rails.left.card.fail_posts(1)
    two_rails.write().wait()
    assert two_rails.same()


def test_a_card_that_vanishes_costs_its_rail_only(two_rails: Pair) -> None:
    two_rails.left.card.vanish(flushes=False)
    two_rails.write().wait()
    assert two_rails.same()
    assert two_rails.left.states() == ["down", "up"]


# ---------------------------------------------------------------------- which ports make a rail


def cabled(host: FakeHost, *networks: str) -> FakeHost:
    for number, network in enumerate(networks):
        host.add_card(f"mlx5_{number}").network = network
    return host


def ends_of(fabric: FakeFabric, left: str, right: str) -> tuple[End, End]:
    """Of hosts whose cards are on these networks, a letter a card."""
    here = End(cabled(fabric.host("left", ()), *left), TransportOptions(), 1)
    there = End(cabled(fabric.host("right", ()), *right), TransportOptions(), 2)
    here.link, there.link = connected(here.transport, there.transport)
    here.link.learn(there.memory.address, SIZE, there.token)
    there.link.learn(here.memory.address, SIZE, here.token)
    return here, there


def made_of(end: End) -> set[tuple[str, str]]:
    assert isinstance(end.link, VerbsLink)
    return {(rail.here, rail.there) for rail in end.link.report() if rail.state == "up"}


@pytest.mark.parametrize(
    ("left", "right", "rails"),
    [
        ("ab", "ba", {(0, 1), (1, 0)}),
        ("ab", "b", {(1, 0)}),
        ("b", "ab", {(0, 1)}),
        ("abc", "cab", {(0, 1), (1, 2), (2, 0)}),
        ("ab", "abba", {(0, 0), (1, 1), (1, 2), (0, 3)}),
        ("ab", "ca", {(0, 1)}),
    ],
)
def test_ports_find_those_that_they_reach(fabric: FakeFabric, left: str, right: str, rails: set[tuple[int, int]]) -> None:
    """Of hosts that are not cabled alike. Nobody's write has to fail for it."""
    here, there = ends_of(fabric, left, right)
    expected = {(f"mlx5_{one}:1", f"mlx5_{other}:1") for one, other in rails}
    until(lambda: made_of(here) == expected and made_of(there) == {(b, a) for a, b in expected})
    for end, other, op in ((here, there, "write"), (there, here, "write")):
        piece = Piece(end.memory.address, other.memory.address, SIZE)
        end.link.submit(op, [piece], time.monotonic() + LONG).wait()
        assert here.memory.bytes() == there.memory.bytes()
    for end in (here, there):
        end.transport.close()
    assert not fabric.qps


def test_hosts_whose_ports_do_not_reach_each_other_have_no_link_and_few_queue_pairs(fabric: FakeFabric) -> None:
    with pytest.raises(TransportError, match=r"no rail could be made.*nothing gets through: retries exceeded"):
        ends_of(fabric, "ab", "cd")
    until(lambda: not fabric.qps)
    assert sum(card.counts.queue_pairs for host in fabric.hosts for card in host.cards.values()) <= 12


def test_a_card_that_answers_nothing_costs_its_rail_only(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rails, "PROBE_S", 0.2)
    left = cabled(fabric.host("left", ()), "a", "b")
    left.cards["mlx5_0"].lose_completions(1 << 30)
    here = End(left, TransportOptions(), 1)
    there = End(cabled(fabric.host("right", ()), "a", "b"), TransportOptions(), 2)
    here.link, there.link = connected(here.transport, there.transport)
    assert made_of(here) == {("mlx5_1:1", "mlx5_1:1")}
    for end in (here, there):
        end.transport.close()


def test_ends_that_do_not_take_ports_from_each_other_number_the_same_rails(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between releases: it is what the former one does."""
    monkeypatch.setattr(handshake, "announce", lambda ports: replace_struct(announce(ports), takes_ports=False))
    here, there = ends_of(fabric, "ab", "ab")
    assert made_of(here) == {("mlx5_0:1", "mlx5_0:1"), ("mlx5_1:1", "mlx5_1:1")}
    for end in (here, there):
        end.transport.close()


# ---------------------------------------------------------------------- deadlines, cancelling, fences


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_batch_that_never_completes_ends_at_its_deadline_and_nothing_lands_after(pair: Pair, op: str) -> None:
    pair.left.card.hold(after_bytes=300_000)
    assert reason_of(pair.move(op, seconds=0.3)) == "deadline"
    here, there = pair.left.memory.bytes(), pair.right.memory.bytes()
    pair.left.card.resume()
    time.sleep(0.3)
    assert (pair.left.memory.bytes(), pair.right.memory.bytes()) == (here, there)


def test_after_a_fence_the_link_has_a_new_queue_pair(pair: Pair) -> None:
    pair.left.card.hold(after_bytes=300_000)
    batch = pair.write()
    until(lambda: pair.left.card.held)
    batch.cancel()
    assert batch.done
    assert reason_of(batch) == "cancelled"
    pair.left.card.resume()
    pair.write().wait()
    assert pair.same()
    assert pair.left.link.alive
    assert pair.left.card.counts.queue_pairs == 2


def test_queue_pairs_and_their_like_do_not_grow_with_the_lives_of_a_rail(pair: Pair) -> None:
    """A link that stands for weeks is fenced many times."""
    ends = (pair.left, pair.right)
    devices = [device for end in ends for device in end.card.devices]
    had = [(len(device.mrs), len(device.cqs)) for device in devices]
    for life in range(2, 8):
        pair.left.card.hold(after_bytes=300_000)
        batch = pair.write()
        until(lambda: pair.left.card.held)
        batch.cancel()
        pair.left.card.resume()
        pair.write().wait()
        assert pair.left.card.counts.queue_pairs == life
        assert len(pair.left.card.fabric.qps) == 2, "one at each end"
    assert [(len(device.mrs), len(device.cqs)) for device in devices] == had


def test_a_cancelled_batch_costs_others_on_its_rail_nothing_but_time(pair: Pair) -> None:
    pair.left.card.hold(after_bytes=100_000)
    doomed = pair.write(length=SIZE // 2)
    other = pair.write(start=SIZE // 2, length=SIZE // 2)
    until(lambda: pair.left.card.held)
    doomed.cancel()
    pair.left.card.resume()
    other.wait()
    assert pair.same(SIZE // 2, SIZE // 2)


def test_a_card_that_loses_completions_is_left_alone_after_a_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rails, "STALLED_S", 0.0)
    pair.left.card.lose_completions(1 << 30)

    def dead() -> bool:
        if pair.left.link.alive:
            with pytest.raises(TransportError):
                pair.write(seconds=0.3).wait()
        return not pair.left.link.alive

    until(dead)


def test_a_peer_that_does_not_answer_a_fence_loses_the_link(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is frozen, or its thread is: no new queue pair will come of it."""
    assert isinstance(pair.right.link, VerbsLink)
    monkeypatch.setattr(rails, "ANSWER_S", 0.1)
    pair.right.transport.progress.unwatch(pair.right.link._channel._sock.fileno())
    pair.left.card.hold(after_bytes=100_000)
    batch = pair.write()
    other = pair.move("read")
    until(lambda: pair.left.card.held)
    batch.cancel()
    assert reason_of(other) == "peer"
    assert not pair.left.link.alive


def test_close_ends_what_is_under_way_and_the_peers_writes(pair: Pair) -> None:
    pair.left.card.hold(after_bytes=300_000)
    batch = pair.write()
    until(lambda: pair.left.card.held)
    pair.right.link.close()
    there = pair.right.memory.bytes()
    pair.left.card.resume()
    assert reason_of(batch) == "peer"
    assert pair.right.memory.bytes() == there
    assert not pair.left.link.alive
    pair.right.link.close()


@pytest.mark.parametrize("where", ["collect", "pump", "ended"])
def test_a_mistake_in_its_own_code_ends_the_link_and_its_batches(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """A link that half works would let its batches wait for ever."""
    pair.left.card.hold(after_bytes=100_000)
    batch = pair.write()
    until(lambda: pair.left.card.held)

    def fail(*_arguments: object) -> None:
        raise KeyError("of all things")

    monkeypatch.setattr(Traffic, where, fail)
    pair.left.card.resume()
    if where == "pump":
        pair.write()
    elif where == "ended":
        with contextlib.suppress(TransportError):
            batch.cancel()
    until(lambda: not pair.left.link.alive and batch.done)
    until(lambda: not pair.right.link.alive)
    assert "of all things" in caplog.text


def test_close_says_so_when_a_queue_pair_cannot_be_destroyed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_qp: FakeQp) -> None:
        raise VerbsError("destroy a queue pair: device or resource busy", 16)

    with monkeypatch.context() as patch:
        patch.setattr(FakeQp, "close", refuse)
        with pytest.raises(TransportError, match="do not use the memory") as caught:
            pair.left.link.close()
        assert caught.value.reason == "device"
    assert not pair.left.link.alive


# ---------------------------------------------------------------------- memory


def test_memory_that_the_peer_has_taken_back_is_out_of_bounds_and_the_link_lives(pair: Pair) -> None:
    pair.right.transport.unregister(pair.right.memory.address)
    before = pair.right.memory.bytes()
    assert reason_of(pair.write()) == "bounds"
    assert pair.right.memory.bytes() == before
    token = pair.right.transport.register(pair.right.memory.address, SIZE)
    pair.left.link.learn(pair.right.memory.address, SIZE, token)
    pair.write().wait()
    assert pair.same()
    assert pair.left.link.alive


def test_a_wrong_key_of_one_batch_does_not_hurt_another(pair: Pair) -> None:
    extra = Memory(1 << 20)
    token = pair.right.transport.register(extra.address, extra.size)
    pair.left.link.learn(extra.address, extra.size, token)
    pair.right.transport.unregister(extra.address)
    pair.left.card.hold()
    bad = pair.left.link.submit("write", [Piece(pair.left.memory.address, extra.address, 1000)], time.monotonic() + LONG)
    good = pair.write()
    pair.left.card.resume()
    assert reason_of(bad) == "bounds"
    good.wait()
    assert pair.same()


def test_own_memory_that_is_unregistered_in_mid_batch_ends_the_batch(pair: Pair) -> None:
    pair.left.card.hold(after_bytes=300_000)
    batch = pair.write()
    until(lambda: pair.left.card.held)
    pair.left.transport.unregister(pair.left.memory.address)
    pair.left.card.resume()
    assert reason_of(batch) == "bounds"
    assert pair.left.link.alive


def test_memory_of_several_parts_is_moved_across_their_borders(fabric: FakeFabric) -> None:
    left, right = fabric.host("left", ()), fabric.host("right", ())
    for host in (left, right):
        card = host.add_card("mlx5_0")
        card.limits = replace(card.limits, max_mr_size=(1 << 20) + 5, max_sge=2, max_msg_sz=100_000)
        card.ports[1] = replace(card.ports[1], max_msg_sz=100_000)
    ends = End(left, TransportOptions(), 1), End(right, TransportOptions(), 2)
    links = connected(ends[0].transport, ends[1].transport)
    links[0].learn(ends[1].memory.address, SIZE, ends[1].token)
    pieces = [Piece(ends[0].memory.address + 13, ends[1].memory.address + 7, SIZE - 20)]
    links[0].submit("write", pieces, time.monotonic() + LONG).wait()
    assert ends[1].memory.bytes(7, SIZE - 20) == ends[0].memory.bytes(13, SIZE - 20)
    for end in ends:
        end.transport.close()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_card_that_could_not_register_the_memory_is_passed_by(fabric: FakeFabric, side: str) -> None:
    names = ("mlx5_0", "mlx5_1")
    hosts = {name: fabric.host(name, names) for name in ("left", "right")}
    hosts[side].cards["mlx5_1"].fail_registrations(1)
    left, right = (End(hosts[name], TransportOptions(), seed) for seed, name in enumerate(hosts, 1))
    left.link, right.link = connected(left.transport, right.transport)
    left.link.learn(right.memory.address, SIZE, right.token)
    pieces = [Piece(left.memory.address, right.memory.address, SIZE)]
    left.link.submit("write", pieces, time.monotonic() + LONG).wait()
    assert right.memory.bytes() == left.memory.bytes()
    assert hosts["left"].cards["mlx5_1"].counts.bytes == 0
    for end in (left, right):
        end.transport.close()


# ---------------------------------------------------------------------- fairness and bounds


def test_a_small_batch_does_not_wait_for_a_huge_one(pair: Pair) -> None:
    left, right = pair.left.memory.address, pair.right.memory.address
    pair.left.card.slow(200e6)
    huge = pair.left.link.submit("write", [Piece(left, right, SIZE)] * 4000, time.monotonic() + LONG)
    small = pair.left.link.submit("write", [Piece(left, right, 1000)], time.monotonic() + LONG)
    small.wait()
    assert not huge.done
    huge.cancel()


def test_a_device_that_is_done_at_once_keeps_nobody_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Soft-RoCE, where works are carried out by whoever posts them: there is always another completion."""

    def at_once(card: FakeCard, qp: FakeQp, works: Sequence[Work]) -> int:
        for work in works:
            qp.outstanding.append(work)
            status = card._carry_out(qp, work)
            if status is not None:
                qp.complete(work, status)
        return 0

    monkeypatch.setattr(FakeCard, "begin", at_once)
    left, right = pair.left.memory.address, pair.right.memory.address
    endless = [
        pair.left.link.submit("write", [Piece(left, right, SIZE)] * 100_000, time.monotonic() + LONG),
        pair.left.link.submit("read", [Piece(left, right, SIZE)] * 100_000, time.monotonic() + LONG),
    ]
    for i in range(20):
        pair.left.link.submit("write", [Piece(left + i, right + i, 1000)], time.monotonic() + LONG).wait()
        pair.left.link.notify(b"x", time.monotonic() + LONG)
    endless[0].cancel()
    assert not endless[1].done, "800 GB in no time"
    pair.left.link.close()
    assert reason_of(endless[1]) == "closed"


def test_bytes_in_flight_are_bounded(fabric: FakeFabric) -> None:
    made = Pair(fabric, options=TransportOptions(max_in_flight=1 << 20))
    card = made.left.card
    card.hold()
    batch = made.write()
    until(lambda: card.held)
    (qp,) = [qp for qp in fabric.qps.values() if qp.card is card]
    assert 0 < sum(length for work in qp.outstanding for _, length, _ in work.sges) <= 1 << 20
    card.resume()
    batch.wait()
    assert made.same()
    made.close()


@pytest.mark.parametrize("refuses", [False, True], ids=["as it says", "less at once"])
def test_a_queue_pair_never_has_more_works_than_it_takes(fabric: FakeFabric, refuses: bool) -> None:
    left, right = fabric.host("left", ()), fabric.host("right", ())
    for host in (left, right):
        card = host.add_card("mlx5_0")
        card.limits = replace(card.limits, max_qp_wr=5)
    ends = End(left, TransportOptions(), 1), End(right, TransportOptions(), 2)
    if refuses:  # the works it can do at most, but not with all stretches
        for end in ends:
            end.card.limits = replace(end.card.limits, max_sge=2)
    links = connected(ends[0].transport, ends[1].transport)
    links[0].learn(ends[1].memory.address, SIZE, ends[1].token)
    pieces = [Piece(ends[0].memory.address + 100 * i, ends[1].memory.address + 77 * i, 50) for i in range(3000)]
    links[0].submit("write", pieces, time.monotonic() + LONG).wait()
    for i in range(0, 3000, 113):
        assert ends[1].memory.bytes(77 * i, 50) == ends[0].memory.bytes(100 * i, 50)
    for end in ends:
        end.transport.close()


# ---------------------------------------------------------------------- the channel


def test_a_channel_that_breaks_ends_the_link_on_both_sides(fabric: FakeFabric) -> None:
    made = Pair(fabric)
    made.left.card.hold(after_bytes=100_000)
    batch = made.write()
    until(lambda: made.left.card.held)
    assert isinstance(made.right.link, VerbsLink)
    made.right.link._channel._sock.shutdown(socket.SHUT_RDWR)
    assert reason_of(batch) == "peer"
    until(lambda: not made.left.link.alive and not made.right.link.alive)
    until(lambda: not fabric.qps)
    made.close()


@pytest.mark.parametrize(
    "said", [b"", b"\x02\x00\x00\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "nonsense", "http"]
)
def test_a_peer_that_does_not_speak_the_handshake_is_refused(fabric: FakeFabric, said: bytes) -> None:
    transport = VerbsTransport(TransportOptions(), fabric.host("left").binding())
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(said)
        with pytest.raises(TransportError) as caught:
            transport.accept([ours], time.monotonic() + (0.3 if not said else LONG))
    assert caught.value.reason == ("deadline" if not said else "peer")
    assert ours.fileno() == -1
    transport.close()


def test_a_peer_that_is_gone_after_its_first_word_leaves_no_queue_pair(fabric: FakeFabric) -> None:
    names = ("mlx5_0", "mlx5_1")
    transport = VerbsTransport(TransportOptions(), fabric.host("left", names).binding())
    ours, theirs = socket.socketpair()
    theirs.sendall(frame(announce([at.port for at in transport.ports])))
    theirs.close()
    with pytest.raises(TransportError) as caught:
        transport.connect([ours], time.monotonic() + LONG)
    assert caught.value.reason == "peer"
    assert not fabric.qps
    assert ours.fileno() == -1
    transport.close()


def test_a_link_without_a_channel_is_refused(fabric: FakeFabric) -> None:
    transport = VerbsTransport(TransportOptions(), fabric.host("left").binding())
    for begin in (transport.connect, transport.accept):
        with pytest.raises(TransportError, match="no channel"):
            begin([], time.monotonic() + LONG)
    transport.close()


@pytest.mark.parametrize("without", ["both", "one"])
def test_infiniband_ports_without_a_gid_are_linked_by_their_lids(fabric: FakeFabric, without: str) -> None:
    hosts = [fabric.host(name, ()) for name in ("left", "right")]
    for host in hosts:
        card = host.add_card("mlx5_0", link_layer="InfiniBand")
        if without == "both" or host is hosts[0]:
            card.gid_table(1, ())
    left, right = (End(host, TransportOptions(), seed) for seed, host in enumerate(hosts, 1))
    left.link, right.link = connected(left.transport, right.transport)
    left.link.learn(right.memory.address, SIZE, right.token)
    left.link.submit("write", [Piece(left.memory.address, right.memory.address, SIZE)], time.monotonic() + LONG).wait()
    assert right.memory.bytes() == left.memory.bytes()
    for end in (left, right):
        end.transport.close()


def fail_to_accept(transport: VerbsTransport, channel: socket.socket, errors: list[TransportError]) -> None:
    try:
        transport.accept([channel], time.monotonic() + LONG)
    except TransportError as error:
        errors.append(error)


def test_hosts_without_a_common_fabric_are_told_so_on_both_sides(fabric: FakeFabric) -> None:
    left, right = fabric.host("left"), fabric.host("right", ())
    right.add_card("mlx5_0", link_layer="InfiniBand")
    transports = [VerbsTransport(TransportOptions(), host.binding()) for host in (left, right)]
    ours, theirs = socket.socketpair()
    errors: list[TransportError] = []
    thread = threading.Thread(target=fail_to_accept, args=(transports[1], theirs, errors))
    thread.start()
    with pytest.raises(TransportError, match=r"one fabric.*One end is InfiniBand and the other is not"):
        transports[0].connect([ours], time.monotonic() + LONG)
    thread.join()
    assert "one fabric" in str(errors[0])
    for transport in transports:
        transport.close()


def test_no_rail_at_the_beginning_is_an_error_that_says_why(fabric: FakeFabric) -> None:
    left, right = fabric.host("left"), fabric.host("right")
    transports = [VerbsTransport(TransportOptions(), host.binding()) for host in (left, right)]
    right.cards["mlx5_0"].vanish()
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=fail_to_accept, args=(transports[1], theirs, []))
    thread.start()
    with pytest.raises(TransportError, match=r"no rail could be made.*mlx5_0 is gone"):
        transports[0].connect([ours], time.monotonic() + LONG)
    thread.join()
    for transport in transports:
        transport.close()


# ---------------------------------------------------------------------- devices


def open_on(host: FakeHost, *devices: str, gid_index: int = -1) -> VerbsTransport:
    return VerbsTransport(TransportOptions(devices=devices, gid_index=gid_index), host.binding())


def test_ports_that_are_up_are_used_and_named_ones_alone_where_some_are_named(fabric: FakeFabric) -> None:
    host = fabric.host("left", ("mlx5_0", "mlx5_1"))
    host.add_card("mlx5_2", ports=2)
    host.cards["mlx5_1"].port_state(1, "DOWN")

    def used(*devices: str) -> list[str]:
        transport = open_on(host, *devices)
        found = [at.port.name for at in transport.ports]
        transport.close()
        return found

    assert used() == ["mlx5_0:1", "mlx5_2:1", "mlx5_2:2"]
    assert used("mlx5_2") == ["mlx5_2:1", "mlx5_2:2"]
    assert used("mlx5_2:2") == ["mlx5_2:2"]
    assert used("mlx5_2:2", "mlx5_2:1", "mlx5_0") == ["mlx5_2:1", "mlx5_2:2", "mlx5_0:1"]
    assert all(not card.devices for card in host.cards.values())


@pytest.mark.parametrize(
    ("devices", "gid_index", "words"),
    [
        (("mlx5_9",), -1, ("mlx5_9", "mlx5_0 port 1 ACTIVE", "mlx5_1 port 1 DOWN", "10.0.0.1")),
        (("mlx5_1",), -1, ("mlx5_1 port 1 is DOWN", "10.0.0.2")),
        (("mlx5_0:2",), -1, ("mlx5_0 has no port 2", "port 1 ACTIVE", "10.0.0.1")),
        (("mlx5_0:x",), -1, ("mlx5_0:x", "name:port")),
        (("mlx5_0",), 77, ("no GID 77", "10.0.0.1")),
    ],
    ids=["unknown", "down", "port", "syntax", "gid"],
)
def test_a_named_device_that_cannot_be_used_is_an_error_with_its_state_and_gids(
    fabric: FakeFabric, devices: tuple[str, ...], gid_index: int, words: tuple[str, ...]
) -> None:
    host = fabric.host("left", ("mlx5_0", "mlx5_1"))
    host.cards["mlx5_1"].port_state(1, "DOWN")
    with pytest.raises(TransportError) as caught:
        open_on(host, *devices, gid_index=gid_index)
    assert caught.value.reason == "device"
    assert all(word in str(caught.value) for word in words)
    assert all(not card.devices for card in host.cards.values())


def test_no_device_or_none_that_is_up_is_unavailable(fabric: FakeFabric) -> None:
    empty, down = fabric.host("empty", ()), fabric.host("down")
    down.cards["mlx5_0"].port_state(1, "DOWN")
    for host, words in ((empty, "no RDMA device"), (down, "mlx5_0 port 1 is DOWN")):
        with pytest.raises(TransportError, match=words) as caught:
            open_on(host)
        assert caught.value.reason == "unavailable"


def linked_anew(here: End, there: End) -> None:
    """As a node does it: with what is registered as it is now."""
    here.link, there.link = connected(here.transport, there.transport)
    for end, other in ((here, there), (there, here)):
        end.link.learn(other.memory.address, SIZE, other.transport.token(other.memory.address))


@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
def test_a_port_that_was_down_at_the_start_is_used_once_it_is_up(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, side: int
) -> None:
    monkeypatch.setattr(verbs_transport, "LOOK_AGAIN_S", 0.02)
    names = ("mlx5_0", "mlx5_1")
    hosts = [fabric.host(name, names) for name in ("left", "right")]
    late = hosts[side].cards["mlx5_1"]
    late.port_state(1, "DOWN")
    ends = [End(host, TransportOptions(), seed) for seed, host in enumerate(hosts, 1)]
    linked_anew(*ends)
    with caplog.at_level(logging.INFO):
        late.port_state(1, "ACTIVE")
        until(lambda: len(ends[side].transport.ports) == 2)
        time.sleep(0.2)
    assert sum("mlx5_1:1 has come up" in record.getMessage() for record in caplog.records) == 1
    former = [end.link for end in ends]
    linked_anew(*ends)
    for link in former:
        link.close()
    for end, other in (ends, ends[::-1]):
        before = late.counts.bytes
        piece = Piece(end.memory.address, other.memory.address, SIZE)
        end.link.submit("write" if end is ends[side] else "read", [piece], time.monotonic() + LONG).wait()
        assert ends[0].memory.bytes() == ends[1].memory.bytes()
        if end is ends[side]:
            assert late.counts.bytes > before
    for end in ends:
        end.transport.close()
        assert end.host.pinned == 0
        assert all(not card.devices for card in end.host.cards.values())
    assert not fabric.qps


def test_a_card_that_was_reset_is_opened_anew(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened before stays dead, and with it every link until the process started anew."""
    monkeypatch.setattr(verbs_transport, "LOOK_AGAIN_S", 0.02)
    made = Pair(fabric)
    made.left.card.vanish()
    assert reason_of(made.write()) in ("peer", "device")
    until(lambda: not made.right.link.alive)
    made.left.card.come_back()

    def works() -> bool:
        try:
            linked_anew(made.left, made.right)
        except TransportError:
            return False
        made.write().wait()
        return made.same()

    until(works)
    made.close()
    assert made.left.host.pinned == 0
    assert all(not card.devices for card in made.left.host.cards.values())


def test_the_report_says_what_each_port_does(two_rails: Pair) -> None:
    two_rails.write().wait()
    report = two_rails.left.transport.report()
    assert report["binding"] == "fake"
    assert report["links"] == 1
    assert report["mlx5_0:1 gid"] == "3 0000:0000:0000:0000:0000:ffff:0a00:0001"
    for port in ("mlx5_0:1", "mlx5_1:1"):
        names = ("state", "rails", "rails not up", "failures")
        assert [report[f"{port} {name}"] for name in names] == ["ACTIVE", 1, 0, 0]
        assert float(report[f"{port} bytes_per_s"]) > 0
    assert int(report["mlx5_0:1 bytes"]) + int(report["mlx5_1:1 bytes"]) == SIZE

    two_rails.left.card.port_state(1, "DOWN")

    def found_down() -> bool:
        two_rails.write().wait()
        return two_rails.left.states() == ["down", "up"]

    until(found_down)
    report = two_rails.left.transport.report()
    assert [report[f"mlx5_0:1 {name}"] for name in ("state", "rails", "rails not up")] == ["DOWN", 0, 1]
    assert int(report["mlx5_0:1 failures"]) >= 1
    assert report["rail mlx5_0:1 to mlx5_0:1 of a process of this host"] == "down"


def test_what_was_counted_stays_counted_when_a_link_ends(pair: Pair) -> None:
    pair.write().wait()
    pair.left.link.close()
    report = pair.left.transport.report()
    assert report["mlx5_0:1 bytes"] == SIZE
    assert report["mlx5_0:1 rails"] == report["links"] == 0


def test_nothing_is_left_of_a_closed_transport(fabric: FakeFabric) -> None:
    made = Pair(fabric, cards=2)
    made.write().wait()
    made.close()
    made.close()
    for end in (made.left, made.right):
        assert end.host.pinned == 0
        assert all(not card.devices for card in end.host.cards.values())
        with pytest.raises(TransportError) as caught:
            end.transport.register(end.memory.address, SIZE)
        assert caught.value.reason == "closed"
    assert not fabric.qps
