"""A mover whose pages come over links and stay in the node's segment: what it says was stored is what lies there."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.client import over_links
from hicache_mooncake.client.fetch import RemoteReads
from hicache_mooncake.testing.local import pattern
from hicache_mooncake.transfer import tcp
from hicache_mooncake.transfer.memory import ForeignMemory
from tests.conftest import wait_until
from tests.faults.holders import PAGE, Directory, PageServer, Reader, checksum_of, names

LINK, LANDING, TXN = 7, 3, 5
LONG_S = 30.0


class LinkedHolder(PageServer):
    """Writes over a link into the segment of `directory`. It waits for `go_on` when it is asked for the second time."""

    def __init__(self, name: str, directory: Directory, go_on: Callable[[], bool]) -> None:
        super().__init__(name)
        self._directory = directory
        self._go_on = go_on
        self.lands = True

    def answer(self, sock: socket.socket, fetch: p.Fetch) -> None:
        each = [fetch.hashes[at : at + p.HASH_BYTES] for at in range(0, len(fetch.hashes), p.HASH_BYTES)]
        self.served.append(each)
        if len(self.served) > 1:
            wait_until(self._go_on, LONG_S, "the other holder's page has come")
        assert fetch.link == LINK
        for page, at in zip(each, fetch.into, strict=True):
            if page in self.pages and self.lands:
                self._directory.segment.view[at : at + PAGE] = self.pages[page]
        status = bytes(p.LOCAL if page in self.pages else p.MISS for page in each)
        tcp.set_timeouts(sock, LONG_S)
        checksum = [checksum_of(page, PAGE) for page in each]
        tcp.send_message(sock, p.FetchReply(self.name, b"i" * 8, status, checksum, fetch.id, linked=True))


class Claiming(Directory):
    """Every page is to stay here, and its first holder has a link. Takes down what the mover says of that."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: p.Commit | None = None
        self.landed: p.Landed | None = None

    def ask(self, message: p.Message, deadline: float) -> p.Message:
        located = super().ask(message, deadline)
        assert isinstance(located, p.Located)
        located.status = bytes([p.FETCH]) * len(located.status)
        located.txn, located.landing = TXN, LANDING
        located.room = located.places = [place * PAGE for place in range(len(located.status))]
        located.links = [LINK, *[0] * (len(located.peers) - 1)]
        return located

    def ask_same(self, message: p.Message, deadline: float) -> p.Message:
        assert isinstance(message, p.Commit)
        self.committed = message
        return p.Committed(message.ok)

    def tell(self, message: p.Message, deadline: float) -> None:
        if isinstance(message, p.Landed):
            self.landed = message


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    made.directory.close()
    made.directory = Claiming()
    made.mover._link = made.directory  # type: ignore[assignment]
    yield made
    made.close()


def test_a_page_that_went_past_its_place_while_the_link_was_busy_is_not_stored(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first holder had lost it. The second one's bytes came while the first was writing others, so they went straight to
    the engine: the node would have given out what happened to lie in the page's place, as damaged memory."""
    monkeypatch.setattr(over_links, "_SPLIT_BYTES", 1)  # two turns
    directory = reader.directory
    assert isinstance(directory, Claiming)
    pages = names(*range(4))
    first = LinkedHolder("first", directory, lambda: reader.read(0) == pattern(pages[0], PAGE))
    second = PageServer("second")
    try:
        first.hold(pages[1:])
        second.hold(pages[:1])
        reader.place(pages[:1], first, second)
        reader.place(pages[1:], first)
        done = reader.load(pages, budget_s=LONG_S)
    finally:
        first.close()
        second.close()
    assert done.ok == b"\x01" * 4, done.reasons
    assert [len(asked) for asked in first.served] == [2, 2]
    assert directory.landed == p.Landed(LANDING, [LINK], 3 * PAGE)
    assert directory.committed is not None
    assert directory.committed.ok == b"\x00\x01\x01\x01"
    for place, page in enumerate(pages):
        lies_there = bytes(directory.segment.view[place * PAGE : (place + 1) * PAGE]) == pattern(page, PAGE)
        assert lies_there == bool(directory.committed.ok[place])


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside another node"])
def test_a_link_is_not_ended_for_what_its_reader_was_busy_with(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """Copies of pages that were here took all the time that the link had, while its answer lay there: the link was ended, and
    the pages came once more by tcp."""
    directory = reader.directory
    assert isinstance(directory, Claiming)
    pages = names(*range(4))
    first, second = LinkedHolder("first", directory, lambda: True), PageServer("second")
    run = RemoteReads.run

    def late(reads: RemoteReads) -> None:
        def answered() -> bool:
            reads.poke()
            streams = list(reads._streams.values())
            return len(streams) == 1 + others and all(len(select.select([stream], [], [], 0)[0]) for stream in streams)

        wait_until(answered, LONG_S, "answers lie there")
        for stream in reads._streams.values():
            if stream.ask.over_link:
                stream.ask.until = time.monotonic()
        run(reads)

    monkeypatch.setattr(RemoteReads, "run", late)
    try:
        first.hold(pages)
        second.hold(pages[3:])
        reader.place(pages[:3], first)
        reader.place(pages[3:], second if others else first)
        done = reader.load(pages, budget_s=LONG_S)
    finally:
        first.close()
        second.close()
    assert done.ok == b"\x01" * 4, done.reasons
    assert len(first.served) == 1
    assert directory.landed == p.Landed(LANDING, [LINK], (3 if others else 4) * PAGE)


def test_bytes_that_land_after_the_holders_word_are_a_miss(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """They came between the copy to the engine, which is not read back, and the checksum of what had been copied."""
    directory = reader.directory
    assert isinstance(directory, Claiming)
    (page,) = names("late")
    holder = LinkedHolder("first", directory, lambda: True)
    holder.lands = False
    reader.mover.memory = ForeignMemory(os.getpid(), [p.Region(reader.view.address, reader.view.length, -1)])
    reader._run = p.Run(reader.view.address, PAGE, PAGE)
    move = ForeignMemory._move

    def then_it_lands(memory: ForeignMemory, write: bool, *where: Any) -> None:
        move(memory, write, *where)
        directory.segment.view[:PAGE] = pattern(page, PAGE)

    monkeypatch.setattr(ForeignMemory, "_move", then_it_lands)
    try:
        holder.hold([page])
        reader.place([page], holder)
        done = reader.load([page], budget_s=LONG_S)  # compares
    finally:
        holder.close()
    assert done.reasons == {"checksum_remote": 1}
    assert directory.committed is not None
    assert directory.committed.ok == b"\x00"
