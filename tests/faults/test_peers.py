"""A mover and the nodes that it reads from, over real sockets with every fault between them: the bytes are right or the page is
a miss, another holder serves what the first does not, the call ends in time, and nothing lands after it."""

from __future__ import annotations

import ast
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client.node_link import NodeUnavailable
from hicache_mooncake.testing.local import pattern
from hicache_mooncake.transfer import tcp
from tests.conftest import ROOT, wait_until
from tests.faults.holders import PAGE, PageServer, Reader, names
from tests.faults.proxy import Faults, SilentPort

ALL = b"\x01" * 8
BUDGET_S = 2.0
HANG_S = 10.0
"""More than any call here may take: a limit on hangs, not a measurement."""

Nodes = Callable[..., PageServer]


@pytest.fixture
def node() -> Iterator[Nodes]:
    made: list[PageServer] = []

    def make(name: str, **options: object) -> PageServer:
        made.append(PageServer(name, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def faulty(**what: object) -> Callable[[PageServer], None]:
    def put(server: PageServer) -> None:
        server.proxy.faults = Faults(**what)  # type: ignore[arg-type]

    return put


def refuse(server: PageServer) -> None:
    server.proxy.refuse()
    server.proxy.drop_all()


def die_young(server: PageServer) -> None:
    server.proxy.faults = Faults(die_after_s=0.0)
    server.proxy.drop_all()


def lose_pages(server: PageServer) -> None:
    server.pages.clear()


def damage(server: PageServer) -> None:
    """In the holder's memory: it sends other bytes than those that its checksums are of."""
    server.pages = {page: body[:-1] + bytes([body[-1] ^ 1]) for page, body in server.pages.items()}


def another_version(server: PageServer) -> None:
    def refusing(sock: socket.socket, fetch: p.Fetch) -> None:
        tcp.send_message(sock, p.Refused("this node speaks another version"))
        raise p.ProtocolError("another version")

    server.answer = refusing  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[PageServer], None], bool]] = {
    "refuses": (refuse, True),
    "accepts and never answers": (faulty(swallow=True), True),
    "stops in mid-header": (faulty(after_bytes=3, swallow=True), True),
    "stops in mid-body": (faulty(after_bytes=PAGE + 1000, swallow=True), True),
    "resets at once": (faulty(cut=True), True),
    "resets in mid-body": (faulty(after_bytes=3 * PAGE, cut=True), True),
    "resets every connection": (die_young, True),
    "corrupts a length": (faulty(after_bytes=3, corrupt=True), True),
    "corrupts a body": (faulty(after_bytes=2 * PAGE, corrupt=True), True),
    "corrupts the request": (faulty(after_bytes=100, corrupt=True, upstream=True), False),
    "has lost the pages": (lose_pages, False),
    "has damaged pages": (damage, True),
    "speaks another version": (another_version, True),
}


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "new"])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_first_holder_does_the_second_serves(node: Nodes, reader: Reader, fault: str, connected: bool) -> None:
    """P14 P18 P70: and it is told of once, unless it only does not have the page any more."""
    first, second = node("first"), node("second")
    pages = names(*range(8))
    first.hold(pages)
    second.hold(pages)
    reader.place(pages, first, second)
    if connected:
        assert reader.load(pages).ok == ALL
    put, blamed = FAULTS[fault]
    put(first)
    began = time.monotonic()
    done = reader.load(pages, BUDGET_S)
    assert time.monotonic() - began < HANG_S
    assert done.ok == ALL, done.reasons
    assert reader.directory.down == (["first"] if blamed else [])
    assert reader.load(pages, BUDGET_S).ok == ALL


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_recalled_holder_does_one_that_is_known_since_serves(node: Nodes, reader: Reader, fault: str) -> None:
    """What a lookup learned is out of date: the masters are asked after all, in time for what they say."""
    first, second = node("first"), node("second")
    pages = names(*range(8))
    first.hold(pages)
    second.hold(pages)
    reader.remember(pages, first)
    reader.place(pages, first, second)
    assert reader.load(pages).ok == ALL
    assert [asked.again for asked in reader.directory.asked] == [False], "no master was asked"
    put, blamed = FAULTS[fault]
    put(first)
    done = reader.load(pages, BUDGET_S)
    assert done.ok == ALL, done.reasons
    assert [asked.again for asked in reader.directory.asked[1:]] == [False, True]
    assert reader.directory.down == (["first"] if blamed else []), "once"


def test_what_masters_do_not_know_better_is_missed_once_and_for_the_first_reason(node: Nodes, reader: Reader) -> None:
    first, second = node("first"), node("second")
    lost, held, hung = names("lost", "lost too"), names(*range(3)), names("hung")
    first.hold(held)
    second.hold(hung)
    reader.remember([*lost, *held], first)
    reader.remember(hung, second)
    second.proxy.faults = Faults(swallow=True)
    for now_at in ((), (first,)):
        reader.place(lost, *now_at)
        reader.place(hung, *([second] if now_at else []))
        done = reader.load([*lost, *held, *hung], BUDGET_S)
        assert done.ok == b"\x00\x00\x01\x01\x01\x00"
        assert done.reasons in ({"gone_remote": 2, "deadline": 1}, {"gone_remote": 2, "peer_down": 1})
    assert reader.directory.down == ["second"]


def test_a_node_that_cannot_be_asked_again_leaves_what_has_come(
    node: Nodes, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node("first")
    lost, held = names("lost"), names(*range(3))
    first.hold(held)
    reader.remember([*lost, *held], first)
    ask = reader.directory.ask

    def only_once(message: p.Message, deadline: float) -> p.Message:
        if isinstance(message, p.Locate) and message.again:
            raise NodeUnavailable("node_timeout", "frozen")
        return ask(message, deadline)

    monkeypatch.setattr(reader.directory, "ask", only_once)
    done = reader.load([*lost, *held], BUDGET_S)
    assert done.ok == b"\x00\x01\x01\x01"
    assert done.reasons == {"gone_remote": 1}


def test_a_call_with_little_time_recalls_nothing(node: Nodes, reader: Reader) -> None:
    """Half of it would not tell a holder that hangs from one that was given no time, and that one would never be left alone."""
    first, second = node("first"), node("second")
    pages = names(*range(8))
    second.hold(pages)
    reader.remember(pages, first)
    reader.place(pages, second)
    assert reader.load(pages, 0.4).ok == ALL
    assert [(asked.recall, asked.again) for asked in reader.directory.asked] == [(False, False)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_without_a_second_holder_is_misses_with_reasons_and_then_heals(node: Nodes, reader: Reader, fault: str) -> None:
    """P30 P63: verdicts are per page, those that arrived before the fault count, and the node is tried again by itself."""
    only, healthy = node("only"), node("healthy")
    pages, others = names(*range(8)), names("a", "b")
    only.hold(pages)
    healthy.hold(others)
    reader.place(pages, only)
    reader.place(others, healthy)
    assert reader.load(pages).ok == ALL
    held, answer = dict(only.pages), only.answer
    FAULTS[fault][0](only)
    began = time.monotonic()
    done = reader.load([*pages, *others], 1.0)
    assert time.monotonic() - began < HANG_S
    assert done.ok[8:] == b"\x01\x01", "the healthy node's pages do not wait for the other's"
    assert done.ok[:8] != ALL
    only.proxy.faults = Faults()
    only.proxy.accept()
    only.pages, only.answer = held, answer  # type: ignore[method-assign]
    wait_until(lambda: reader.load(pages).ok == ALL, 30, "healed")


def test_both_holders_fail_and_the_pages_are_misses(node: Nodes, reader: Reader) -> None:
    first, second = node("first"), node("second")
    pages = names(*range(8))
    first.hold(pages)
    second.hold(pages)
    reader.place(pages, first, second)
    first.proxy.faults = Faults(swallow=True)
    second.proxy.faults = Faults(after_bytes=6 * PAGE, cut=True)
    done = reader.load(pages, BUDGET_S)
    arrived = done.ok.count(1)  # a connection that is reset may take with it what was not read yet
    assert arrived <= 6
    assert done.ok == b"\x01" * arrived + bytes(8 - arrived)
    assert sorted(reader.directory.down) == ["first", "second"]


def test_a_silent_rack_costs_one_connect_and_blames_nobody_else(node: Nodes, reader: Reader) -> None:
    """Connects run beside each other: the healthy node is not out of time, and called dead, because of the dead ones."""
    rack = [SilentPort() for _ in range(8)]
    healthy = node("healthy")
    lost, held = names(*range(8)), names("a", "b")
    healthy.hold(held)
    for number, port in enumerate(rack):
        reader.place([lost[number]], p.Peer(f"silent{number}", b"i" * 8, "127.0.0.1", port.port))
    reader.place(held, healthy)
    done = reader.load([*lost, *held], BUDGET_S)
    assert done.ok == bytes(8) + b"\x01\x01"
    assert done.reasons == {"peer_down": 8}
    assert sorted(reader.directory.down) == [f"silent{number}" for number in range(8)]
    again = reader.load([*lost, *held], BUDGET_S)
    assert again.reasons == {"peer_down": 8}
    assert len(reader.directory.down) == 8, "their breakers are open: nobody was tried"
    for port in rack:
        port.close()


# --------------------------------------------------------------------------- the fence


@pytest.mark.parametrize("second_serves", [True, False])
def test_nothing_lands_after_the_call_or_over_the_other_holders_bytes(node: Nodes, reader: Reader, second_serves: bool) -> None:
    """P14: a slow get outlives its time while its memory is used for other pages. What the first holder still sends, after the
    page was asked of the second and after the call, lands nowhere."""
    first, second = node("first"), node("second")
    pages = names(*range(8))
    first.hold(pages)
    second.hold(pages)
    reader.place(pages, first, *([second] if second_serves else []))
    assert reader.load(pages).ok == ALL
    first.proxy.faults = Faults(after_bytes=2 * PAGE + 100, swallow=True)
    done = reader.load(pages, 1.0)
    assert (done.ok == ALL) == second_serves
    reader.view.view[:] = b"\x55" * reader.view.length  # the engine uses its pages for something else
    first.proxy.faults = Faults()  # and now everything that was sent arrives
    time.sleep(0.3)
    assert bytes(reader.view.view) == b"\x55" * reader.view.length


def test_memory_that_the_holder_uses_anew_in_mid_send_is_a_miss(node: Nodes, reader: Reader) -> None:
    """P14: whatever made a holder let go of a page that is being sent, the reader notices."""
    first = node("first")
    pages, other = names(*range(8)), names("other")[0]
    first.hold(pages)
    reader.place(pages, first)

    def reuse(sock: socket.socket, bodies: list[memoryview], deadline: float) -> None:
        half = PAGE // 2
        torn = [memoryview(bytes(body[:half]) + pattern(other, PAGE)[half:]) for body in bodies[4:]]
        tcp.send_bodies(sock, [*bodies[:4], *torn], deadline)

    first.send = reuse
    done = reader.load(pages)
    assert done.ok == b"\x01" * 4 + bytes(4)
    assert done.reasons == {"checksum_remote": 4}
    assert reader.directory.down == ["first"]


def test_no_deadline_looks_at_the_wall_clock() -> None:
    """P14 with skewed clocks: what hosts and processes think the time of day is plays no part in any lease, pin or deadline."""
    wall = {"time.time", "time.time_ns", "time.localtime", "datetime.now", "datetime.utcnow"}
    used: set[tuple[str, str]] = set()
    monotonic = 0
    for folder in ("hicache_mooncake/client", "hicache_mooncake/node", "hicache_mooncake/transfer", "master/hicache_master"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for part in ast.walk(ast.parse(path.read_text())):
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                    name = f"{part.value.id}.{part.attr}"
                    monotonic += name == "time.monotonic"
                    if name in wall:
                        used.add((path.name, name))
    told = {("server.py", "datetime.now"), ("decisions.py", "time.time"), ("events_socket.py", "time.time")}
    assert used <= {("canary.py", "time.time")} | told, "to name pages, and to tell people and subscribers"
    assert monotonic > 10, "it looks where the clocks are"


# --------------------------------------------------------------------------- slow, large, many


@pytest.mark.parametrize(("size", "rate"), [(8 << 20, 1_000_000), (16 << 10, 20_000)], ids=["large pages", "small pages"])
def test_a_slow_node_takes_nothing_from_a_healthy_one(node: Nodes, size: int, rate: float) -> None:
    """Pages far larger than what a socket buffers, and many small ones at once: all are received piece by piece, whoever has
    sent some."""
    count = 2 if size > 1 << 20 else 40
    reader = Reader(pages=count + 4, page_bytes=size)
    slow, healthy = node("slow", page_bytes=size), node("healthy", page_bytes=size)
    crawling, quick = names(*(("slow", i) for i in range(count))), names(*range(4))
    slow.hold(crawling)
    healthy.hold(quick)
    reader.place(crawling, slow)
    reader.place(quick, healthy)
    whole = b"\x01" * (count + 4)
    assert reader.load([*crawling, *quick], 20.0).ok == whole
    slow.proxy.faults = Faults(after_bytes=4096, rate_bytes_s=rate)
    done = reader.load([*crawling, *quick], 3.0)
    assert done.ok[count:] == b"\x01" * 4, done.reasons
    assert done.ok != whole
    assert set(done.reasons) == {"deadline"}
    reader.close()


def test_a_large_batch_over_a_slow_link_is_what_arrived_in_time(node: Nodes, reader: Reader) -> None:
    """P30: a verdict a page, not one for all; and a link that is slow and works is used by the next batch, too."""
    only = node("only")
    pages = names(*range(64))
    only.hold(pages)
    reader.place(pages, only)
    only.proxy.faults = Faults(after_bytes=4096, rate_bytes_s=800_000)
    for _ in range(2):
        done = reader.load(pages, 2.5)
        arrived = done.ok.count(1)
        assert 0 < arrived < 64
        assert done.ok == b"\x01" * arrived + bytes(64 - arrived), "in the order of the chain: a prefix can be used"
        assert done.reasons == {"deadline": 64 - arrived}
    assert reader.directory.down == []


def test_pages_evicted_after_the_lookup_shorten_the_prefix_and_fail_nothing(node: Nodes, reader: Reader) -> None:
    """P29: a third of the keys goes between lookup and load."""
    first, second = node("first"), node("second")
    pages = names(*range(60))
    first.hold(pages)
    reader.place(pages, first, second)
    gone = random.Random(29).sample(range(60), 20)
    for index in gone:
        del first.pages[pages[index]]
    second.hold([pages[index] for index in gone[:10]])
    done = reader.load(pages)
    assert [i for i, ok in enumerate(done.ok) if not ok] == sorted(gone[10:])
    assert done.reasons == {"gone_remote": 10}
    assert reader.directory.down == [], "to evict is no failure"


def test_peers_that_drop_connections_in_mid_body_again_and_again(node: Nodes, reader: Reader) -> None:
    """P70: a few hundred connections end in the middle of something. No wrong byte, no crash, no descriptor left."""
    servers = [node(name) for name in ("first", "second", "third")]
    pages = names(*range(16))
    rng = random.Random(70)
    for server in servers:
        server.hold(pages)
    for page in pages:
        reader.place([page], *rng.sample(servers, 2))
    assert reader.load(pages).ok == b"\x01" * 16
    before = descriptors()
    ends: set[bytes] = set()
    for _ in range(150):
        for server in servers:
            cut = rng.random() < 0.6
            server.proxy.faults = Faults(after_bytes=rng.randrange(12 * PAGE), cut=True) if cut else Faults()
        reader.mover._peers._breakers.clear()  # or most rounds would try nobody
        ends.add(reader.load(pages, BUDGET_S).ok)
    assert sum(server.proxy.cuts for server in servers) > 100
    assert len(ends) > 5, "some rounds failed in part, some did not"
    for server in servers:
        server.proxy.faults = Faults()
    reader.mover._peers._breakers.clear()
    assert reader.load(pages).ok == b"\x01" * 16
    wait_until(lambda: descriptors() <= before + 6, 30, "as many descriptors as before")


def descriptors() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


def test_a_node_whose_connections_die_at_once_is_left_alone_and_the_other_used(node: Nodes, reader: Reader) -> None:
    """P101: every new connection is gone within milliseconds. No storm of them: it is tried ever more seldom."""
    dying, healthy = node("dying"), node("healthy")
    pages = names(*range(8))
    healthy.hold(pages)
    dying.hold(pages)
    reader.place(pages, dying, healthy)
    dying.proxy.faults = Faults(die_after_s=0.0)
    began = time.monotonic()
    batches = 0
    while time.monotonic() - began < 3.0:
        assert reader.load(pages, BUDGET_S).ok == ALL
        batches += 1
    assert batches > 8
    assert dying.proxy.accepted <= 5, f"{dying.proxy.accepted} connections in {batches} batches"
    dying.proxy.faults = Faults()
    served = len(dying.served)
    wait_until(lambda: reader.load(pages, BUDGET_S).ok == ALL and len(dying.served) > served, 30, "probed, and used again")


# --------------------------------------------------------------------------- a cluster with a key


def test_a_mover_proves_that_it_is_of_the_cluster(node: Nodes, reader: Reader) -> None:
    key = b"k" * 32
    keyed = node("keyed", data_key=key)
    pages = names(*range(8))
    keyed.hold(pages)
    reader.place(pages, keyed)
    reader.directory.data_key = key
    assert reader.load(pages).ok == ALL
    assert reader.load(pages).ok == ALL
    assert keyed.proxy.accepted == 1, "proved once a connection"


def test_a_node_that_does_not_prove_itself_gives_no_page(node: Nodes, reader: Reader) -> None:
    stranger, member = node("stranger", data_key=b"x" * 32), node("member", data_key=b"k" * 32)
    pages = names(*range(8))
    stranger.hold(pages)
    member.hold(pages)
    reader.place(pages, stranger, member)
    reader.directory.data_key = b"k" * 32
    assert reader.load(pages).ok == ALL
    assert stranger.served == []
    assert reader.directory.down == ["stranger"]
    reader.directory.data_key = b""
    assert reader.load(pages).ok == bytes(8), "and without a key the cluster's nodes give nothing"


@pytest.mark.parametrize("seen", ["before it is used", "only when it is used"])
def test_an_old_connection_that_has_ended_is_no_failure(node: Nodes, reader: Reader, seen: str) -> None:
    """The node was restarted, or closed what was idle: that costs a new connection, no page and no blame."""
    only = node("only")
    pages = names(*range(8))
    only.hold(pages)
    reader.place(pages, only)
    assert reader.load(pages).ok == ALL
    if seen == "before it is used":
        only.proxy.drop_all()
        wait_until(lambda: only.proxy.connections == 0, 30)
    else:
        answer = only.answer

        def hang_up(sock: socket.socket, fetch: p.Fetch) -> None:
            only.answer = answer  # type: ignore[method-assign]
            raise ConnectionError("restarting")

        only.answer = hang_up  # type: ignore[method-assign]
    assert reader.load(pages).ok == ALL
    assert only.proxy.accepted == 2
    assert reader.directory.down == []
