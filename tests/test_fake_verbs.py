"""The fake RDMA device does what rxe devices do in `tests/rdma`, and has limits and faults that they do not have."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from hicache_mooncake.testing.fake_verbs import CardLimits, FakeCard, FakeFabric
from hicache_mooncake.transfer.verbs.api import Gid, Status, VerbsError, Work
from tests.conftest import wait_until

pytest.register_assert_rewrite("tests.rdma.suite")
from tests.rdma.suite import SIZE, End, Rig, VerbsTests, connect, write  # noqa: E402 (rewritten first)

CARDS = ("mlx5_0", "mlx5_1")
TIMEOUT_S = 30


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with FakeFabric() as fabric:
        yield fabric


@pytest.fixture
def rig(fabric: FakeFabric) -> Rig:
    hosts = [fabric.host(name, CARDS) for name in "ab"]

    def set_link(device: str, up: bool) -> None:
        for host in hosts:
            host.cards[device].port_state(1, "ACTIVE" if up else "DOWN")

    return Rig((hosts[0].binding(), hosts[1].binding()), CARDS, set_link)


class TestFakeVerbs(VerbsTests):
    pass


Pair = Callable[..., tuple[End, End, FakeCard, FakeCard]]


@pytest.fixture
def pair(fabric: FakeFabric) -> Iterator[Pair]:
    """Two connected ends on two hosts, and their cards."""
    with contextlib.ExitStack() as stack:

        def make(limits: CardLimits | None = None, entries: int = 512) -> tuple[End, End, FakeCard, FakeCard]:
            hosts = [fabric.host(name, ()) for name in "ab"]
            cards = [host.add_card("mlx5_0", limits=limits) for host in hosts]
            ends = [End(host.binding(), "mlx5_0", entries) for host in hosts]
            for end in ends:
                stack.callback(end.close)
            connect(*ends)
            ends[0].memory[:] = random.Random(3).randbytes(SIZE)
            return ends[0], ends[1], cards[0], cards[1]

        yield make


def whole(a: End, b: End) -> Work:
    return write(a.sges([(0, SIZE)]), b, 0)


@pytest.mark.parametrize("closed", ["queue pair", "memory", "device"])
def test_what_is_closed_in_the_middle_of_a_write_gets_no_more_bytes(pair: Pair, closed: str) -> None:
    a, b, card, _ = pair()
    card.hold(after_bytes=100_000)
    a.qp.post([whole(a, b)])
    wait_until(lambda: card.held and card.counts.bytes == 100_000, TIMEOUT_S)
    {"queue pair": b.qp.close, "memory": b.registration.close, "device": b.device.close}[closed]()
    card.resume()
    assert a.completed(1)[0].status in (Status.RETRY_EXC_ERR, Status.REM_ACCESS_ERR)
    assert b.memory[:] == a.memory[:100_000] + bytes(SIZE - 100_000)


def test_a_reader_that_closes_gets_no_more_bytes(pair: Pair) -> None:
    a, b, _, card = pair()
    card.hold(after_bytes=100_000)
    b.qp.post([Work("read", b.sges([(0, SIZE)]), a.base, a.rkey, 1)])
    wait_until(lambda: card.held and card.counts.bytes == 100_000, TIMEOUT_S)
    b.qp.close()
    card.resume()
    wait_until(lambda: not card.busy, TIMEOUT_S)
    assert b.memory[:] == a.memory[:100_000] + bytes(SIZE - 100_000)
    assert not b.cq.poll(10)


def test_a_call_that_posts_may_fail(pair: Pair) -> None:
    a, b, card, _ = pair()
    card.fail_posts(1)
    with pytest.raises(VerbsError) as caught:
        a.qp.post([whole(a, b)])
    assert caught.value.errno == errno.ENOMEM
    a.qp.post([whole(a, b)])
    assert a.completed(1)[0].status == 0


def test_a_completion_may_be_lost_although_the_bytes_landed(pair: Pair) -> None:
    a, b, card, _ = pair()
    card.lose_completions(1)
    a.qp.post([write(a.sges([(0, 64)]), b, 0, 1), write(a.sges([(64, 64)]), b, 64, 2)])
    assert [done[:2] for done in a.completed(1)] == [(2, 0)]
    assert b.memory[:128] == a.memory[:128]
    assert not a.cq.poll(10)


def test_a_card_may_break_every_queue_pair(pair: Pair) -> None:
    a, b, card, _ = pair()
    card.break_queue_pairs(after_works=1)
    for number in range(3):
        a.qp.post([write(a.sges([(0, 64)]), b, 64 * n, n) for n in range(3)])
        statuses = [done.status for done in a.completed(3)]
        assert statuses == [0, Status.RETRY_EXC_ERR, Status.WR_FLUSH_ERR], number
        for end in (a, b):
            end.qp.close()
            end.make_qp()
        connect(a, b)
    card.break_queue_pairs(None)
    a.qp.post([whole(a, b)])
    assert a.completed(1)[0].status == 0
    assert card.counts.queue_pairs == 4


@pytest.mark.parametrize("flushes", [True, False])
def test_a_card_may_vanish_and_come_back(pair: Pair, flushes: bool) -> None:
    a, b, card, _ = pair()
    card.hold()
    a.qp.post([whole(a, b)])
    wait_until(lambda: card.held, TIMEOUT_S)
    card.vanish(flushes)
    if flushes:
        assert a.completed(1)[0].status == Status.WR_FLUSH_ERR
    wait_until(lambda: not card.busy, TIMEOUT_S)
    assert not a.cq.poll(10)
    assert not card.host.binding().devices()
    with pytest.raises(VerbsError, match="only: none"):
        card.host.binding().open("mlx5_0")
    with pytest.raises(VerbsError, match="gone"):
        a.qp.post([whole(a, b)])
    b.qp.post([write(b.sges([(0, 64)]), a, 0, 1)])
    assert b.completed(1)[0].status == Status.RETRY_EXC_ERR

    card.come_back()
    card.resume()
    with pytest.raises(VerbsError, match="gone"):
        a.device.port(1)
    other = End(card.host.binding(), "mlx5_0")
    b.qp.close()
    b.make_qp()
    connect(other, b)
    other.qp.post([whole(other, b)])
    assert other.completed(1)[0].status == 0
    other.close()


def test_a_message_above_the_limit_breaks_the_queue_pair(pair: Pair) -> None:
    a, b, _, _ = pair(CardLimits(max_msg_sz=1 << 20))
    a.qp.post([whole(a, b)])
    assert a.completed(1)[0].status == Status.LOC_LEN_ERR
    assert b.memory[:] == bytes(SIZE)


def test_a_send_queue_has_room_again_only_when_a_completion_was_polled(pair: Pair) -> None:
    a, b, _, _ = pair()
    silent = [write(a.sges([(0, 64)]), b, 0, n, False) for n in range(127)]
    a.qp.post([*silent, write(a.sges([(0, 64)]), b, 0, 127)])
    wait_until(lambda: a.device.card.counts.completions, TIMEOUT_S)  # type: ignore[attr-defined]
    with pytest.raises(VerbsError) as caught:
        a.qp.post(silent[:1])
    assert caught.value.errno == errno.ENOMEM
    assert a.completed(1)[0].wr_id == 127
    a.qp.post(silent)


def test_a_queue_with_more_completions_than_it_has_room_for_is_broken(pair: Pair) -> None:
    a, b, card, _ = pair(entries=4)
    a.qp.post([write(a.sges([(0, 64)]), b, 0, n) for n in range(6)])
    wait_until(lambda: card.counts.completions == 6, TIMEOUT_S)
    with pytest.raises(VerbsError, match="4"):
        a.cq.poll(1)


@pytest.mark.parametrize("difference", ["network", "RoCE version", "psn", "port of the peer"])
def test_ends_that_do_not_fit_do_not_reach_each_other(fabric: FakeFabric, difference: str) -> None:
    hosts = [fabric.host(name) for name in "ab"]
    a, b = (End(host.binding(), "mlx5_0") for host in hosts)
    here, there = a.qp.address(3), b.qp.address(2 if difference == "RoCE version" else 3)
    if difference == "psn":
        there = there._replace(psn=there.psn ^ 1)
    a.qp.connect(there, 3, 4096)
    b.qp.connect(here, 2 if difference == "RoCE version" else 3, 4096)
    if difference == "network":
        hosts[1].cards["mlx5_0"].network = "another"
    if difference == "port of the peer":
        hosts[1].cards["mlx5_0"].port_state(1, "DOWN")
    a.qp.post([write(a.sges([(0, 64)]), b, 0)])
    assert a.completed(1)[0].status == Status.RETRY_EXC_ERR
    a.close()
    b.close()


def test_registration_meets_the_limits_of_the_card_and_the_host(fabric: FakeFabric) -> None:
    host = fabric.host("a", (), memlock=10 << 20)
    card = host.add_card("mlx5_0", limits=CardLimits(max_mr_size=4 << 20, max_mr=2))
    device = host.binding().open("mlx5_0")

    def refused(length: int) -> int:
        with pytest.raises(VerbsError) as caught:
            device.register(1 << 30, length)
        return caught.value.errno

    assert refused((4 << 20) + 1) == errno.EINVAL
    first, second = device.register(0, 4 << 20), device.register(0, 4 << 20)
    assert refused(4096) == errno.ENOMEM  # max_mr
    second.close()
    second.close()
    host.memlock = 5 << 20
    assert refused(2 << 20) == errno.ENOMEM
    card.fail_registrations(1, errno.EFAULT)
    assert refused(4096) == errno.EFAULT
    device.register(0, 4096)
    first.close()
    device.close()
    assert host.pinned == 0
    assert not card.devices


def test_tables_and_limits_of_queues_are_checked(fabric: FakeFabric) -> None:
    host = fabric.host("a")
    device = host.binding().open("mlx5_0")
    cq = device.completions(16)
    for call in (
        lambda: device.completions(1 << 20),
        lambda: device.queue_pair(cq, 2, 16, 1),
        lambda: device.queue_pair(cq, 1, 1 << 20, 1),
        lambda: device.queue_pair(cq, 1, 16, 31),
        lambda: device.port(2),
        lambda: device.queue_pair(cq, 1, 16, 1).address(9),
        lambda: device.queue_pair(cq, 1, 16, 1).post([]),
    ):
        with pytest.raises(VerbsError):
            call()
    host.cards["mlx5_0"].gid_table(1, [Gid(5, "fe80" + ":0000" * 7, "RoCE v2", "eth0")])
    assert [gid.index for gid in device.port(1).gids] == [5]


def test_it_counts_calls_works_and_bytes(pair: Pair) -> None:
    a, b, card, other = pair()
    a.qp.post([write(a.sges([(0, 100)]), b, 0, n, n == 9) for n in range(10)])
    a.completed(1)
    assert (card.counts.posts, card.counts.works, card.counts.bytes, card.counts.completions) == (1, 10, 1000, 1)
    assert other.counts.posts == 0


def test_a_slow_card_is_as_slow_as_was_said_and_a_fabric_that_ends_waits_for_none() -> None:
    before = threading.active_count()
    with FakeFabric() as fabric:
        hosts = [fabric.host(name) for name in "ab"]
        a, b = (End(host.binding(), "mlx5_0") for host in hosts)
        connect(a, b)
        hosts[0].cards["mlx5_0"].slow(200 << 10)
        a.qp.post([whole(a, b)])  # 20 s
        wait_until(lambda: hosts[0].cards["mlx5_0"].counts.bytes, TIMEOUT_S)
        assert not a.cq.poll(1)
    assert threading.active_count() == before
    assert hosts[0].cards["mlx5_0"].counts.bytes < SIZE
    a.close()
    b.close()
