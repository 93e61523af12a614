"""Pages between nodes over links: written by their holder into the reader's segment, checked, and given away the same way."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

import msgspec
import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.node import link_book, links
from hicache_mooncake.node.service import Node
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.tcp_transport import TcpTransport
from hicache_mooncake.transfer.transport import TransportError, TransportOptions
from tests.conftest import wait_until
from tests.faults.holders import PageServer
from tests.linked import ALL, COUNT, LONG_S, NS, PAGE, Linked, MakePair, Pair, faults, figure, nothing_lent, pair
from tests.memory_transport import Faults, opener

__all__ = ["faults", "pair"]


def by_tcp(_scheme: str, options: TransportOptions) -> TcpTransport:
    return TcpTransport(options)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("transport", ["tcp", "memory"])
def test_pages_come_over_a_link_once_it_stands(pair: MakePair, faults: Faults, transport: str, shared: bool) -> None:
    """And a page that stays here for all ranks of the host is found in the segment afterwards, whole."""
    linked = Linked(pair(by_tcp if transport == "tcp" else opener(faults)), faults, shared=shared)
    before, by_socket = figure(linked.b, "link_received_bytes"), figure(linked.a, "remote_sent_bytes")
    outcome = linked.reader.load(NS, linked.pages)
    assert outcome.ok == ALL, outcome.reasons
    assert outcome.remote_bytes == COUNT * PAGE
    wait_until(lambda: figure(linked.b, "link_received_bytes") == before + COUNT * PAGE, LONG_S, "all pages counted")
    assert figure(linked.a, "link_sent_bytes") >= COUNT * PAGE
    assert figure(linked.a, "remote_sent_bytes") == by_socket, "nothing of it by tcp"
    nothing_lent(linked.b)
    again = linked.reader.load(NS, linked.pages)
    assert again.ok == ALL
    assert again.local_bytes == (COUNT * PAGE if shared else 0)


def test_either_side_writes_over_the_one_link(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults)), faults)
    theirs = linked.both.stored(linked.reader, linked.writer, "of b")
    wait_until(lambda: linked.writer.load(NS, theirs).ok == b"\x01", LONG_S, "loaded")
    assert figure(linked.b, "link_sent_bytes") == PAGE
    assert figure(linked.a, "links_made") == figure(linked.b, "links_made") == 1


def test_a_batch_larger_than_what_is_lent_takes_turns_in_its_room(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults), dram="1MiB"), faults)
    before, writes = figure(linked.b, "link_received_bytes"), faults.writes
    assert linked.reader.load(NS, linked.pages).ok == ALL
    wait_until(lambda: figure(linked.b, "link_received_bytes") == before + COUNT * PAGE, LONG_S, "all pages counted")
    assert faults.writes == writes + COUNT // 2
    nothing_lent(linked.b)


def test_a_node_of_an_older_release_is_left_alone(pair: MakePair, faults: Faults) -> None:
    both = pair(opener(faults))
    old = PageServer("old")  # knows Fetch and nothing else
    try:
        assert both.b.links.link_to(old.peer) == 0
        wait_until(lambda: "older release" in str(both.b.report().get("peer old", "")), LONG_S, "it has been tried")
        failed = figure(both.b, "links_failed")
        for _ in range(100):
            assert both.b.links.link_to(old.peer) == 0
        assert (figure(both.b, "links_making"), figure(both.b, "links_failed")) == (0, failed)
    finally:
        old.close()


def test_a_node_without_the_transport_says_why_and_is_read_by_tcp(pair: MakePair, faults: Faults) -> None:
    opened = opener(faults)
    nodes: list[str] = []

    def first_only(scheme: str, options: TransportOptions):  # type: ignore[no-untyped-def]
        nodes.append(scheme)
        if len(nodes) == 1:
            raise TransportError("unavailable", "no RDMA device is up on this host")
        return opened(scheme, options)

    both = pair(first_only)
    writer, reader = both.rank(both.a), both.rank(both.b)
    pages = both.stored(writer, reader, *range(COUNT))
    assert reader.load(NS, pages).ok == ALL
    assert both.a.report()["transport"] == "tcp"
    assert both.a.report()["transport_why"] == "no RDMA device is up on this host"
    wait_until(lambda: "no RDMA device is up" in str(both.b.report().get("peer a", "")), LONG_S, "b knows why")


def test_a_card_that_comes_up_later_is_used_then(
    pair: MakePair, faults: Faults, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing is told once, and not at every try."""
    monkeypatch.setattr(links, "_REOPEN_S", 0.02)
    up = threading.Event()
    tries: list[str] = []

    def opened(scheme: str, options: TransportOptions):  # type: ignore[no-untyped-def]
        tries.append(scheme)
        if not up.is_set():
            raise TransportError("unavailable", "no RDMA device is up on this host")
        return opener(faults)(scheme, options)

    with caplog.at_level(logging.WARNING):
        both = pair(opened)
        wait_until(lambda: len(tries) > 10, LONG_S, "tried again")
    assert [record.getMessage() for record in caplog.records].count(
        "pages of other hosts come by tcp; no verbs links: no RDMA device is up on this host"
    ) == 2, "each node once"
    up.set()
    wait_until(lambda: both.a.report()["transport"] == both.b.report()["transport"] == "verbs", LONG_S, "it is used")
    assert both.a.report()["transport_why"] == ""


def test_without_links_there_is_no_transport(pair: MakePair) -> None:
    def never(_scheme: str, _options: TransportOptions) -> TcpTransport:
        raise AssertionError("opened")

    both = pair(never, transport="tcp")
    writer, reader = both.rank(both.a), both.rank(both.b)
    assert reader.load(NS, both.stored(writer, reader, *range(COUNT))).ok == ALL
    assert both.b.report()["transport"] == "tcp"


def test_links_that_come_and_go_leave_no_descriptor_and_no_thread(
    pair: MakePair, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_book, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(link_book, "RETRY_MAX_S", 0.1)
    linked = Linked(pair(by_tcp), faults)
    ends = (linked.a, linked.b)

    def replaced() -> None:
        made = figure(linked.b, "links_made")
        link = linked.b.links.link_to(p.Peer("a", linked.a.incarnation, "", 0))
        assert linked.b.links.fence(link, "the test ends it")
        wait_until(lambda: not any(figure(end, "links") for end in ends), LONG_S, "both ends know")
        linked.both.link_up(linked.reader, linked.pages)
        assert figure(linked.b, "links_made") > made

    def open_now() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(2):
        replaced()
    before = open_now()
    for _ in range(10):
        replaced()
    wait_until(lambda: all(now <= had for now, had in zip(open_now(), before, strict=True)), LONG_S, "nothing is left open")


# ---------------------------------------------------------------------- pages that are given away


def hand_over(giver: Node) -> None:
    with giver.lock:
        giver.core.draining = True  # from here on it asks who has room
    wait_until(giver.room, LONG_S, "a master says who has room")
    giver.drain(lambda: False)


def test_pages_given_away_go_over_the_link(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults), drain_s=20.0), faults)
    hand_over(linked.a)
    assert figure(linked.a, "handed_over") == COUNT + 1
    assert figure(linked.b, "objects") == COUNT + 1
    assert figure(linked.a, "link_sent_bytes") >= (COUNT + 1) * PAGE
    outcome = linked.reader.load(NS, linked.pages)
    assert (outcome.ok, outcome.local_bytes) == (ALL, COUNT * PAGE)


def test_pages_given_to_a_node_of_the_same_host_go_by_no_card(pair: MakePair, faults: Faults) -> None:
    both = pair(opener(faults), drain_s=20.0, host_id="here")
    both.stored(both.rank(both.a), both.rank(both.b), *range(COUNT))
    hand_over(both.a)
    assert figure(both.a, "handed_over") == COUNT
    assert faults.links == 0
    assert (figure(both.a, "links_making"), figure(both.a, "links_made")) == (0, 0)


def test_pages_given_over_a_link_that_fails_are_not_stored_half(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults), drain_s=20.0), faults)
    faults.fail = True
    used = figure(linked.b, "used_bytes")
    hand_over(linked.a)
    assert figure(linked.b, "objects") in (0, COUNT + 1), "nothing, or by tcp when it was tried again"
    if not figure(linked.b, "objects"):
        assert figure(linked.b, "used_bytes") == used
    assert faults.late == 0
    with linked.b.lock:
        linked.b.store.validate()


def test_what_was_given_and_arrived_damaged_is_not_stored(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults), drain_s=20.0), faults)
    faults.corrupt = True
    hand_over(linked.a)
    stored = figure(linked.b, "objects")
    assert stored < COUNT + 1
    assert figure(linked.b, "taken") == stored


# ---------------------------------------------------------------------- who asks for a link


def offer(both: Pair, **what: object) -> p.Message:
    """What `b` answers to a Link on a connection of its own."""
    asked = p.Link(p.PROTOCOL_MAX, "stranger", b"i" * 8, "verbs", 7, 4096, 4096, b"token")
    host, _, port = both.b.data_address.rpartition(":")
    until = time.monotonic() + LONG_S
    with contextlib.closing(tcp.PeerConnection(p.Peer("b", both.b.incarnation, host, int(port)), until)) as connection:
        tcp.send_message(connection.sock, msgspec.structs.replace(asked, **what))
        answer = tcp.receive_message(connection.sock, p.decoder(p.FromData), until)
        assert isinstance(answer, p.Message)
        if isinstance(answer, p.Refused):  # and serves on
            tcp.send_message(connection.sock, p.Fetch(1, "stranger", NS, b"h" * 32, PAGE))
            assert isinstance(tcp.receive_message(connection.sock, p.decoder(p.FromData), until), p.FetchReply)
        return answer


def test_what_cannot_be_a_link_is_refused_with_a_sentence(pair: MakePair, faults: Faults) -> None:
    both = pair(opener(faults))
    for what, why in (
        ({"scheme": "other"}, "its links are by verbs, not other"),
        ({"requester": "b"}, "give each node its own"),
        ({"requester": "x" * 1000}, "names have"),
        ({"id": 0}, "known already"),
    ):
        answer = offer(both, **what)
        assert isinstance(answer, p.Refused)
        assert why in answer.reason
    assert figure(both.b, "links_making") == 0


def test_who_breaks_off_in_the_handshake_leaves_no_link(pair: MakePair, faults: Faults) -> None:
    both = pair(opener(faults))
    assert isinstance(offer(both), p.Linked)
    wait_until(lambda: figure(both.b, "links_failed") == 1, LONG_S, "it is given up")
    assert figure(both.b, "links") == figure(both.b, "links_making") == 0
    assert "down" in str(both.b.report()["peer stranger"])
