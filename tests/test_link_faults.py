"""What goes wrong with links costs a miss at most: no page is wrong, and no byte lands in room that is used for another."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.node import links
from hicache_mooncake.node.service import Node
from hicache_mooncake.transfer import tcp
from tests.conftest import wait_until
from tests.linked import ALL, COUNT, LONG_S, NS, PAGE, Linked, MakePair, faults, figure, names, nothing_lent, pair
from tests.memory_transport import Faults, MemoryLink, opener

__all__ = ["faults", "pair"]


@pytest.mark.fault(
    "a link between nodes fails in the middle of a write",
    sees="nothing: the pages come by tcp in the same call; the link is ended before its room is used again, and made anew",
    part="network",
)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_link_that_fails_in_mid_write_costs_no_page(pair: MakePair, faults: Faults, shared: bool) -> None:
    """They come by tcp in the same call; the link is ended before its room is used again, and another one is made."""
    linked = Linked(pair(opener(faults)), faults, shared=shared)
    faults.fail = True
    fences = figure(linked.b, "link_fences")
    outcome = linked.reader.load(NS, linked.pages)
    assert outcome.ok == ALL, outcome.reasons
    wait_until(lambda: figure(linked.b, "link_fences") > fences, LONG_S, "fenced")
    nothing_lent(linked.b)
    assert faults.late == 0
    faults.fail = False
    linked.both.link_up(linked.reader, linked.both.stored(linked.writer, linked.reader, "another"))


@pytest.mark.fault(
    "a link stands still in the middle of a write, and goes on after the call",
    sees="nothing: half of the time is for tcp, and no byte lands in room that others use by then (deadline 7.5 s here)",
    part="network",
)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_link_that_hangs_leaves_time_for_tcp(pair: MakePair, faults: Faults, shared: bool) -> None:
    """And what it still wants to write when it goes on lands nowhere."""
    linked = Linked(pair(opener(faults)), faults, shared=shared, deadline_s=7.5)
    thread, got = linked.load_aside()
    thread.join(LONG_S)
    assert got == [ALL]
    nothing_lent(linked.b)
    own = linked.both.stored(linked.reader, linked.reader, *(f"own {i}" for i in range(16)))
    faults.gate.set()
    wait_until(lambda: not faults.waiting, LONG_S, "the writer has gone on")
    assert faults.late == 0
    assert linked.reader.load(NS, own).ok == b"\x01" * 16


@pytest.mark.fault(
    "a mover is killed while a link writes for it",
    sees="misses of that batch; the links of its load are ended, and its room comes back (deadline 7.5 s here)",
    part="network",
)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_mover_killed_in_mid_load_gives_its_room_back_fenced(pair: MakePair, faults: Faults, shared: bool) -> None:
    linked = Linked(pair(opener(faults)), faults, shared=shared, deadline_s=7.5)
    used = figure(linked.b, "used_bytes")
    thread, got = linked.load_aside()
    assert figure(linked.b, "used_bytes") > used
    pid = linked.reader.client.mover_pids()["load"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    thread.join(LONG_S)
    assert got == [bytes(COUNT)]
    nothing_lent(linked.b)
    assert figure(linked.b, "used_bytes") == used
    faults.gate.set()
    wait_until(lambda: not faults.waiting, LONG_S, "the writer has gone on")
    assert faults.late == 0
    wait_until(lambda: linked.reader.load(NS, linked.pages).ok == ALL, LONG_S, "a new mover loads them")


@pytest.mark.fault(
    "a holder ends while it writes over a link",
    sees="misses; no room is lost (deadline 7.5 s here)",
    part="network",
)
def test_a_holder_that_ends_in_mid_write_is_misses_and_its_room_comes_back(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults)), faults, deadline_s=7.5)
    thread, got = linked.load_aside()
    linked.a.stop()
    thread.join(LONG_S)
    assert got == [bytes(COUNT)]
    nothing_lent(linked.b)
    wait_until(lambda: figure(linked.b, "links") == 0, LONG_S, "the link is known to be gone")
    assert faults.late == 0


@pytest.mark.fault(
    "a link delivers damaged bytes",
    sees="misses (`checksum_remote`)",
    part="network",
)
def test_wrong_bytes_over_a_link_are_a_miss(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults)), faults)
    faults.corrupt = True
    outcome = linked.reader.load(NS, linked.pages)
    assert 0 in outcome.ok, "a piece of each write was damaged"
    assert set(outcome.reasons) == {"checksum_remote"}
    nothing_lent(linked.b)


@pytest.mark.fault(
    "a namespace is cleared while its pages come over a link",
    sees="nothing of it is stored (deadline 7.5 s here)",
    part="network",
)
def test_what_is_cleared_while_it_comes_is_not_stored(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults)), faults, shared=True, deadline_s=7.5)
    thread, _ = linked.load_aside()
    linked.b.clear(NS, everywhere=False)
    faults.gate.set()
    thread.join(LONG_S)
    nothing_lent(linked.b)
    assert figure(linked.b, "objects") == 0


@pytest.mark.fault(
    "a link cannot be ended, and goes on writing",
    sees="nothing: its room is set aside until it can be ended, or the next start (`quarantined_bytes`) (deadline 7.5 s here)",
    part="network",
)
def test_room_of_a_link_that_cannot_be_ended_is_never_used_again(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults)), faults, deadline_s=7.5)
    used = figure(linked.b, "used_bytes")
    faults.unstoppable = True
    thread, got = linked.load_aside()
    thread.join(LONG_S)
    assert got == [ALL]
    wait_until(lambda: figure(linked.b, "quarantined_bytes") == COUNT * PAGE, LONG_S, "its room is set aside")
    assert figure(linked.b, "used_bytes") == used + COUNT * PAGE
    own = linked.both.stored(linked.reader, linked.reader, *(f"own {i}" for i in range(16)))
    faults.gate.set()
    wait_until(lambda: not faults.waiting, LONG_S, "the writer has gone on")
    wait_until(lambda: faults.late > 0, LONG_S, "and has written, after its end")
    assert linked.reader.load(NS, own).ok == b"\x01" * 16
    assert figure(linked.b, "link_fences_failed") == 1
    with linked.b.lock:
        linked.b.store.validate()


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_room_of_a_link_comes_back_when_it_can_be_ended_after_all(
    pair: MakePair, faults: Faults, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(links, "_END_AGAIN_S", 0.1)
    linked = Linked(pair(opener(faults)), faults, shared=shared, deadline_s=7.5)
    used = figure(linked.b, "used_bytes")
    faults.unstoppable = True
    thread, got = linked.load_aside()
    thread.join(LONG_S)
    assert got == [ALL]
    wait_until(lambda: figure(linked.b, "quarantined_bytes") == COUNT * PAGE, LONG_S, "its room is set aside")
    time.sleep(0.5)
    assert figure(linked.b, "quarantined_bytes") == COUNT * PAGE
    faults.unstoppable = False
    wait_until(lambda: figure(linked.b, "quarantined_bytes") == 0, LONG_S, "its room comes back")
    assert figure(linked.b, "used_bytes") == used
    faults.gate.set()
    nothing_lent(linked.b)
    linked.both.link_up(linked.reader, linked.both.stored(linked.writer, linked.reader, "another"))


@pytest.mark.fault(
    "the end of a link does not return: its driver hangs",
    sees="nothing: pages come by tcp, and the room is set aside (`quarantined_bytes`) until it returns (deadline 7.5 s here)",
    part="network",
)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_link_whose_end_does_not_return_holds_nobody_up(
    pair: MakePair, faults: Faults, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(links, "_FENCE_S", 0.3)
    linked = Linked(pair(opener(faults)), faults, shared=shared, deadline_s=7.5)
    used = figure(linked.b, "used_bytes")
    faults.stuck.clear()
    try:
        thread, got = linked.load_aside()
        thread.join(LONG_S)
        assert got == [ALL]
        wait_until(lambda: figure(linked.b, "quarantined_bytes") == COUNT * PAGE, LONG_S, "its room is set aside")
        assert figure(linked.b, "link_ends_hanging") == 1
        assert "hang" in str(linked.b.report()["transport_why"])
        made = faults.links
        more = linked.both.stored(linked.writer, linked.reader, *(f"more {i}" for i in range(4)))
        assert linked.reader.load(NS, more).ok == b"\x01" * 4
        assert faults.links == made, "no other link meanwhile"
    finally:
        faults.stuck.set()
    faults.gate.set()
    wait_until(lambda: figure(linked.b, "quarantined_bytes") == 0, LONG_S, "its room comes back")
    assert figure(linked.b, "link_ends_hanging") == 0
    nothing_lent(linked.b)
    if not shared:
        assert figure(linked.b, "used_bytes") == used
    linked.both.link_up(linked.reader, linked.both.stored(linked.writer, linked.reader, "another"))


def test_a_node_ends_while_the_end_of_a_link_does_not_return(
    pair: MakePair, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_FENCE_S", 0.3)
    monkeypatch.setattr(links, "_MAKE_S", 1.0)
    linked = Linked(pair(opener(faults)), faults)
    faults.stuck.clear()
    try:
        linked.b.stop()
        assert linked.b.links.unfenced
    finally:
        faults.stuck.set()


def test_shared_room_of_a_link_that_cannot_be_ended_is_neither_stored_nor_free(pair: MakePair, faults: Faults) -> None:
    linked = Linked(pair(opener(faults)), faults, shared=True, deadline_s=7.5)
    faults.unstoppable = True
    thread, got = linked.load_aside()
    thread.join(LONG_S)
    assert got == [ALL]
    wait_until(lambda: figure(linked.b, "quarantined_bytes") == COUNT * PAGE, LONG_S, "its room is set aside")
    assert figure(linked.b, "replicated") == 0
    faults.gate.set()
    with linked.b.lock:
        linked.b.store.validate()


def test_a_transport_that_breaks_while_it_ends_a_link_keeps_nobody_waiting(
    pair: MakePair, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was installed raised what the contract does not name: the room stayed in use, the mover's connection
    broke, and the thread that was to give back what it held waited for ever."""
    linked = Linked(pair(opener(faults)), faults, shared=True)
    connections = figure(linked.b, "connections")
    faults.fail = True

    def breaks(_link: MemoryLink) -> None:
        raise RuntimeError("no such session")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryLink, "close", breaks)
        outcome = linked.reader.load(NS, linked.pages)
        assert outcome.ok == ALL, outcome.reasons
        wait_until(lambda: figure(linked.b, "quarantined_bytes") == COUNT * PAGE, LONG_S, "its room is set aside")
        assert figure(linked.b, "connections") >= connections
        nothing_lent(linked.b)


@pytest.mark.fault(
    "every link dies within milliseconds of being made",
    sees="nothing: pages come by tcp, and links are tried ever more seldom",
    part="network",
)
def test_links_that_die_at_once_are_made_ever_more_seldom(pair: MakePair, faults: Faults) -> None:
    faults.stillborn = True
    both = pair(opener(faults))
    writer, reader = both.rank(both.a), both.rank(both.b)
    pages = both.stored(writer, reader, *range(COUNT))
    loads, until = 0, time.monotonic() + 3.0
    while time.monotonic() < until:
        assert reader.load(NS, pages).ok == ALL
        loads += 1
    assert faults.links // 2 <= 5, f"links made during {loads} loads"
    faults.stillborn = False
    both.link_up(reader, pages)


def test_a_giver_that_breaks_off_after_it_was_given_places_costs_its_link_and_no_room(pair: MakePair, faults: Faults) -> None:
    """It may be writing still: the link is ended before the room is free."""
    linked = Linked(pair(opener(faults)), faults)
    used, fences = figure(linked.b, "used_bytes"), figure(linked.b, "link_fences")
    link = linked.b.links.link_to(peer_of(linked.a))
    assert link
    with contextlib.closing(tcp.PeerConnection(peer_of(linked.b), time.monotonic() + LONG_S)) as connection:
        pages = names("given", "also given")
        push = p.Push(p.PROTOCOL_MAX, "a", NS, NS, b"".join(pages), PAGE, [1, 2], link=link)
        tcp.send_message(connection.sock, push)
        reply = tcp.receive_message(connection.sock, p.decoder(p.FromData), time.monotonic() + LONG_S)
        assert isinstance(reply, p.PushReply)
        assert len(reply.places) == 2
        assert figure(linked.b, "used_bytes") == used + 2 * PAGE
    wait_until(lambda: figure(linked.b, "used_bytes") == used, LONG_S, "the room is free")
    assert figure(linked.b, "link_fences") == fences + 1


def peer_of(node: Node) -> p.Peer:
    host, _, port = node.data_address.rpartition(":")
    return p.Peer(node.name, node.incarnation, host, int(port))
