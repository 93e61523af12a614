"""A node of protocol version 1 with this master and this reader, byte for byte as it was released: nodes are upgraded one at a
time."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import time

import pytest
from hicache_master.core import MasterCore

from hicache_mooncake import protocol as new
from hicache_mooncake.testing.local import page_hash
from hicache_mooncake.transfer import tcp
from tests import old_protocol as old
from tests.faults.holders import PageServer, Reader

NS = b"n" * 16


def hashes(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "little")).digest() for number in numbers)


class Wire:
    """This master, and what each side's own decoder makes of the other's bytes."""

    def __init__(self) -> None:
        self.core = MasterCore(b"master-1", rng=random.Random(3))
        self.now = 10.0
        self._to_master = new.decoder(new.ToMaster)
        self._from_master = {1: old.decoder(old.FromMaster), 2: new.decoder(new.FromMaster)}

    def say(self, node: str, message: old.Message | new.Message) -> list[tuple[str, object]]:
        """Returns (receiver, message) as each receiver's version reads it. Nodes called `old...` are of version 1."""
        encode = old.encode if isinstance(message, old.Message) else new.encode
        output = self.core.handle(self._to_master.decode(encode(message)), node.encode(), self.now)  # type: ignore[arg-type]
        self.core.validate()
        read = []
        for receiver, reply in output:
            version = 1 if receiver.startswith(b"old") else 2
            read.append((receiver.decode(), self._from_master[version].decode(new.encode(reply))))
        return read

    def answer(self, node: str, message: old.Message | new.Message) -> object:
        ((receiver, reply),) = self.say(node, message)
        assert receiver == node
        return reply


@pytest.fixture
def wire() -> Wire:
    """An old node and a new one, each with a page of its own, and one that both hold."""
    wire = Wire()
    assert wire.answer("old", old.Join(1, 1, "old", b"i1", "10.0.0.1", 7000, 1 << 30, 0)) == old.Joined(
        1, b"master-1", 1.0, 5.0, want_snapshot=False
    )
    joined = wire.answer("new", new.Join(1, 2, "new", b"i1", "10.0.0.2", 7000, 1 << 30, 0, "host-2"))
    assert isinstance(joined, new.Joined)
    assert joined.version == 2
    assert wire.say("old", old.Update("old", b"i1", 1, [(NS, hashes(1, 3))], [])) == []
    assert wire.say("new", new.Update("new", b"i1", 1, [(NS, hashes(2, 3))], [])) == []
    return wire


def test_old_and_new_nodes_find_each_others_pages(wire: Wire) -> None:
    reply = wire.answer("old", old.Lookup(7, [old.Question(NS, hashes(1, 2, 3), False)], "old"))
    assert reply == old.LookupReply(7, [old.Answer(b"\0\1\1", [old.Peer("new", b"i1", "10.0.0.2", 7000)])])
    reply = wire.answer("new", new.Lookup(8, [new.Question(NS, hashes(1, 2, 3), False)], "new"))
    assert isinstance(reply, new.LookupReply)
    assert reply.answers == [new.Answer(b"\1\0\1", [new.Peer("old", b"i1", "10.0.0.1", 7000)])]


def test_an_old_nodes_heartbeats_snapshots_and_end_are_as_ever(wire: Wire) -> None:
    assert wire.answer("old", old.Beat("old", b"i1", 1, 10, 20, 2, 3, 4)) == old.BeatReply(b"master-1", True, False)
    assert wire.say("old", old.Update("old", b"i1", 3, [(NS, hashes(4))], [])) == []
    assert wire.answer("old", old.Beat("old", b"i1", 3, 10, 20, 2)) == old.BeatReply(b"master-1", True, want_snapshot=True)
    assert wire.say("old", old.Snapshot("old", b"i1", 4, 0, True, [(NS, hashes(4))])) == []
    assert wire.core.holders(NS, hashes(1)) == set()
    assert wire.core.holders(NS, hashes(4)) == {("old", new.DRAM)}
    assert wire.say("old", old.Leave("old", b"i1")) == []
    assert wire.core.holders(NS, hashes(4)) == set()


def test_a_clear_goes_both_ways(wire: Wire) -> None:
    assert wire.say("old", old.ClearNamespace(NS, "old")) == [("new", new.ClearNamespace(NS, "old", 1))]
    assert wire.say("new", new.ClearNamespace(NS, "new")) == [("old", old.ClearNamespace(NS, "new"))]


def test_an_old_status_command_reads_the_report_of_states_it_never_heard_of(wire: Wire) -> None:
    wire.say("new", new.Beat("new", b"i1", 1, 1, 2, 3, draining=True))
    report = wire.answer("old", old.ClusterStatus())
    assert isinstance(report, old.ClusterReport)
    assert {info.node: info.state for info in report.nodes} == {"old": "active", "new": "draining"}
    assert report.version == 2


def test_an_old_node_gives_and_takes_none_of_what_came_later(wire: Wire) -> None:
    """It has no data port that takes pages, so it is offered to nobody; it may be reported by those who read from it."""
    reply = wire.answer("new", new.Beat("new", b"i1", 1, 1, 2, 3, want_room=True))
    assert isinstance(reply, new.BeatReply)
    assert reply.room == []
    wire.say("new", new.Report("new", b"i1", {"old": 2}))
    reply = wire.answer("new", new.Lookup(8, [new.Question(NS, hashes(1), False)], "new"))
    assert isinstance(reply, new.LookupReply)
    assert reply.answers[0].holder == b"\0"


def test_what_an_old_node_is_refused_with_it_can_read(wire: Wire) -> None:
    reply = wire.answer("old", old.Join(1, 1, "old", b"i1", "0.0.0.0", 7000, 1, 0))
    assert isinstance(reply, old.Refused)
    assert "--advertise" in reply.reason


def test_upgraded_in_place_it_is_a_new_life_that_speaks_the_new_version(wire: Wire) -> None:
    joined = wire.answer("new-a", new.Join(1, 2, "old", b"i2", "10.0.0.1", 7000, 1 << 30, 0))
    assert isinstance(joined, new.Joined)
    assert joined.version == 2
    assert wire.core.holders(NS, hashes(1)) == set()
    reply = wire.answer("new", new.Beat("new", b"i1", 1, 1, 2, 3, want_room=True))
    assert isinstance(reply, new.BeatReply)
    assert reply.room == [], "what it holds is not known before its first heartbeat"
    wire.now += 1
    wire.say("new-a", new.Beat("old", b"i2", 0, 1, 1 << 30, 3, room_bytes=5))
    reply = wire.answer("new", new.Beat("new", b"i1", 1, 1, 2, 3, want_room=True))
    assert isinstance(reply, new.BeatReply)
    assert [room.peer.node for room in reply.room] == ["old"]


class OldNode(PageServer):
    """A data port of version 1: it refuses what is newer than itself."""

    def _serve(self, sock: socket.socket) -> None:
        decoder = old.decoder(old.Fetch)
        with sock, contextlib.suppress(OSError):
            tcp.prepare(sock)
            while True:
                fetch = tcp.receive_message(sock, decoder, time.monotonic() + 60)
                if not old.PROTOCOL_MIN <= fetch.version <= old.PROTOCOL_MAX:
                    tcp.send_message(sock, new.Refused(f"speaks protocol 1..1, not {fetch.version}"))
                    return
                self.answer(sock, fetch)


def test_a_new_reader_gets_the_pages_of_an_old_node() -> None:
    pages = [page_hash(number) for number in range(4)]
    with contextlib.closing(OldNode("old")) as node, contextlib.closing(Reader()) as reader:
        node.hold(pages)
        reader.place(pages, node)
        assert reader.load(pages).ok == b"\x01" * 4


def test_an_old_reader_is_understood_by_a_new_node() -> None:
    fetch = old.Fetch(1, "old", NS, hashes(1), 64, 7)
    read = new.decoder(new.ToData).decode(old.encode(fetch))
    assert read == new.Fetch(1, "old", NS, hashes(1), 64, 7)
    assert new.PROTOCOL_MIN <= 1, "or it would be refused"
    reply = new.FetchReply("new", b"i", bytes([new.LOCAL]), [5], 7)
    assert old.decoder(old.FetchReply).decode(new.encode(reply)) == old.FetchReply("new", b"i", bytes([new.LOCAL]), [5], 7)
