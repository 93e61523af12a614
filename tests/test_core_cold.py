"""What a node with a cold tier answers: the steps of a real core, with a tier that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.node.asking import AskCold, Asked, ColdPlace, LocateCold
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.store import OWN, REPLICA
from tests.test_node_core import GROUP, NS, PAGE, B, Directory, hashes, held, make_core, store

OTHER = b"o" * 16


class Node:
    """A core whose cold tier has these pages; `asked`: of what it and the masters were asked."""

    def __init__(self, cold: Sequence[bytes] = (), often: bool = False, pages: int = 64) -> None:
        self.core: NodeCore = make_core(pages)
        self.core.keep(0)
        self.cold = {page: ColdPlace(4096 * at, 100 + at, often) for at, page in enumerate(cold, 1)}
        self.directory = Directory()
        self.asked: list[Asked] = []
        self.meanwhile: Callable[[], object] = lambda: None
        """Happens while the tier is asked."""

    def handle(self, message: p.Message, owner: int = 1, now: float = 0.0) -> object:
        steps = self.core.handle(owner, message, now)
        told: object = None
        try:
            while True:
                ask = steps.send(told)
                self.core.validate()
                told = self.tell(ask)
        except StopIteration as end:
            self.core.validate()
            return end.value

    def tell(self, ask: Asked) -> object:
        self.asked.append(ask)
        match ask:
            case AskCold():
                answer: object = [bytes(page in self.cold for page in p.split(blob)) for _, blob in ask.questions]
            case LocateCold():
                answer = [self.cold.get(page) for page in p.split(ask.hashes)]
            case _:
                return self.directory.tell(ask)
        self.meanwhile()
        return answer

    def exists(self, pages: Sequence[bytes], sparse: Sequence[bytes] = ()) -> p.Found:
        found = self.handle(p.Exists([NS], b"".join(pages), list(sparse)))
        assert isinstance(found, p.Found)
        return found

    def locate(self, pages: Sequence[bytes], owner: int = 1, now: float = 0.0, **fields: object) -> p.Located:
        fields = {"cold": True, "group": GROUP} | fields
        located = self.handle(p.Locate(NS, b"".join(pages), PAGE, **fields), owner, now)  # type: ignore[arg-type]
        assert isinstance(located, p.Located)
        return located


ONE, TWO, THREE, FOUR = hashes(1, 2, 3, 4)


# --------------------------------------------------------------------------- lookups


def test_the_tier_is_asked_for_what_is_not_in_dram_and_the_masters_for_the_rest() -> None:
    node = Node([TWO])
    store(node.core, [ONE])
    node.directory.held[THREE] = [B]
    assert node.exists([ONE, TWO, THREE, FOUR]).runs == [3]
    cold, masters = node.asked
    assert isinstance(cold, AskCold)
    assert cold.questions == [(NS, TWO + THREE + FOUR)]
    assert [question.hashes for question in masters.questions] == [THREE + FOUR]  # type: ignore[union-attr]


def test_nobody_is_asked_for_what_is_in_dram() -> None:
    node = Node([ONE])
    store(node.core, [ONE, TWO])
    assert node.exists([ONE, TWO]).runs == [2]
    assert list(node.locate([ONE, TWO]).status) == [p.LOCAL, p.LOCAL]
    assert node.asked == []


def test_each_pool_is_looked_for_by_itself() -> None:
    node = Node([ONE, TWO])
    store(node.core, [ONE, TWO])
    found = node.exists([ONE, TWO], [OTHER])
    assert found.runs == [2]
    assert found.columns == [b"\x01\x01"]
    assert node.asked == [AskCold([(NS, b""), (OTHER, ONE + TWO)])]


@pytest.mark.parametrize("answer", [b"", b"\x01"])
def test_a_tier_that_answers_less_than_it_was_asked_has_nothing_more(answer: bytes) -> None:
    node = Node()
    node.directory.away = True
    steps = node.core.handle(1, p.Exists([NS], ONE + TWO), 0.0)
    assert isinstance(next(steps), AskCold)
    steps.send([answer])
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value.runs == [len(answer)]


def test_a_node_without_a_tier_asks_the_masters_at_once() -> None:
    node = Node([ONE])
    node.core.keeping = None
    node.directory.held[ONE] = [B]
    assert list(node.locate([ONE]).status) == [p.REMOTE]
    assert not any(isinstance(ask, LocateCold) for ask in node.asked)


# --------------------------------------------------------------------------- reads


def test_a_page_that_is_asked_for_once_is_read_past_dram() -> None:
    node = Node([TWO])
    store(node.core, [ONE])
    node.directory.held[THREE] = [B]
    located = node.locate([ONE, TWO, THREE, FOUR])
    assert list(located.status) == [p.LOCAL, p.READ, p.REMOTE, p.MISS]
    assert (located.where[1], located.checksum[1]) == (4096, 101)
    assert (located.cold_txn, located.cold_room) == (0, [])
    assert node.core.store.used_bytes == PAGE


@pytest.mark.parametrize("fields", [{"cold": False}, {"here_only": True}])
def test_who_cannot_read_from_the_tier_is_not_told_of_it(fields: dict[str, bool]) -> None:
    node = Node([ONE])
    assert list(node.locate([ONE], **fields).status) == [p.MISS]
    assert not any(isinstance(ask, LocateCold) for ask in node.asked)


def test_a_page_that_is_asked_for_often_comes_back_into_dram() -> None:
    node = Node([ONE, TWO], often=True)
    located = node.locate([ONE, TWO])
    assert list(located.status) == [p.READ_ON, p.READ_ON]
    assert len(set(located.cold_room)) == 2
    assert not any(held(node.core, ONE, TWO)), "not before it is committed"
    committed = node.handle(p.Commit(located.cold_txn, b"\x01\x00", [101, 102]))
    assert committed == p.Committed(b"\x01\x00")
    assert held(node.core, ONE, TWO) == b"\x01\x00"
    assert node.core.promoted == 1
    page = node.core.store.page(NS, ONE)
    assert page is not None
    assert page.kept
    assert page.rank == OWN
    again = node.locate([ONE, TWO])
    assert list(again.status) == [p.LOCAL, p.READ_ON]
    assert again.checksum == [101, 102]


def test_one_of_several_ranks_reads_for_all() -> None:
    node = Node([ONE])
    first = node.locate([ONE], owner=1, shared=True)
    second = node.locate([ONE], owner=2, shared=True)
    alone = node.locate([ONE], owner=3)
    assert [list(each.status) for each in (first, second, alone)] == [[p.READ_ON], [p.WAIT], [p.READ]]
    assert node.core.waits(p.Locate(NS, ONE, PAGE, wait_s=1.0), 0.1)
    node.handle(p.Commit(first.cold_txn, b"\x01", [101]), owner=1)
    assert not node.core.waits(p.Locate(NS, ONE, PAGE, wait_s=1.0), 0.1)
    assert list(node.locate([ONE], owner=2, wait_s=1.0).status) == [p.LOCAL]


def test_a_reader_that_ends_or_freezes_leaves_the_page_to_the_next() -> None:
    node = Node([ONE])
    node.locate([ONE], owner=1, shared=True)
    node.core.drop_owner(1)
    frozen = node.locate([ONE], owner=2, shared=True)
    assert list(frozen.status) == [p.READ_ON]
    late = node.locate([ONE], owner=3, shared=True, now=node.core.store.claim_seconds + 1.0)
    assert list(late.status) == [p.READ_ON]
    assert late.cold_room != frozen.cold_room, "the frozen one may still write"
    node.core.drop_owner(2)
    node.core.drop_owner(3)
    assert node.core.store.used_bytes == 0


def test_pages_for_which_there_is_no_room_are_read_past_dram() -> None:
    node = Node([ONE, TWO], often=True, pages=4)
    store(node.core, hashes(*range(10, 14)))
    node.handle(p.Locate(NS, b"".join(hashes(*range(10, 14))), PAGE), owner=7)  # pinned, as far as may be
    node.core.store.reserve(8, OTHER, b"".join(hashes(*range(20, 24))), PAGE, GROUP)
    located = node.locate([ONE, TWO])
    assert list(located.status) == [p.READ, p.READ]
    assert located.cold_room == []


def test_what_is_asked_for_twice_in_one_message_is_read_into_dram_once() -> None:
    node = Node([ONE], often=True)
    located = node.locate([ONE, ONE])
    assert list(located.status) == [p.READ_ON, p.READ]
    assert len(located.cold_room) == 1
    assert located.where[1] == 4096


def test_a_node_that_ends_brings_nothing_back() -> None:
    node = Node([ONE], often=True)
    node.core.draining = True
    assert list(node.locate([ONE], shared=True).status) == [p.READ]


def test_a_page_that_came_into_dram_while_the_tier_was_asked_is_read_from_the_disk_once_more() -> None:
    node = Node([ONE], often=True)
    node.meanwhile = lambda: store(node.core, [ONE], owner=5)
    located = node.locate([ONE])
    assert list(located.status) == [p.READ]
    assert located.where == [4096]
    assert node.core.store.used_bytes == PAGE
    node.meanwhile = lambda: None
    assert list(node.locate([ONE]).status) == [p.LOCAL]


def test_pages_that_came_into_dram_while_the_masters_were_asked_are_read_there() -> None:
    node = Node([TWO], often=True)
    node.directory.held[ONE] = [B]
    node.meanwhile = lambda: store(node.core, [ONE, TWO], owner=5)
    located = node.locate([ONE, TWO], shared=True)
    assert list(located.status) == [p.LOCAL, p.LOCAL]
    assert located.checksum == [0, 1]
    assert located.cold_room == []


def test_pages_of_both_other_nodes_and_the_tier_have_room_of_their_own() -> None:
    node = Node([ONE], often=True)
    node.directory.held[TWO] = [B]
    located = node.locate([ONE, TWO], shared=True)
    assert list(located.status) == [p.READ_ON, p.FETCH]
    assert located.txn != located.cold_txn
    assert len({*located.room, *located.cold_room}) == 2
    node.handle(p.Commit(located.txn, b"\x01", [7]))
    node.handle(p.Commit(located.cold_txn, b"\x01", [101]))
    pages = [node.core.store.page(NS, page) for page in (ONE, TWO)]
    assert [(page.rank, page.kept) for page in pages if page is not None] == [(OWN, True), (REPLICA, False)]


# --------------------------------------------------------------------------- clears


def test_what_is_cleared_while_the_tier_is_asked_does_not_come_back() -> None:
    node = Node([ONE], often=True)
    node.meanwhile = lambda: node.core.clear(NS, 0.0)
    located = node.locate([ONE], shared=True)
    assert located.cold_room == []
    assert node.core.store.used_bytes == 0


def test_what_is_cleared_while_it_is_read_does_not_come_back() -> None:
    node = Node([ONE], often=True)
    located = node.locate([ONE])
    node.core.clear(NS, 0.0)
    assert node.handle(p.Commit(located.cold_txn, b"\x01", [101])) == p.Committed(b"\x00")
    assert held(node.core, ONE) == b"\x00"
    assert node.core.promoted == 0


def test_another_namespace_that_is_cleared_is_no_matter_of_it() -> None:
    node = Node([ONE], often=True)
    located = node.locate([ONE])
    node.core.clear(OTHER, 0.0)
    node.handle(p.Commit(located.cold_txn, b"\x01", [101]))
    assert held(node.core, ONE) == b"\x01"


def test_a_page_that_leaves_the_tier_while_it_is_brought_back_is_not_kept() -> None:
    """Else it would be evicted as one that the disk has."""
    node = Node([ONE, TWO], often=True)
    located = node.locate([ONE, TWO])
    node.core.gone_cold([(NS, ONE), (OTHER, TWO)])
    node.handle(p.Commit(located.cold_txn, b"\x01\x01", [101, 102]))
    pages = [node.core.store.page(NS, page) for page in (ONE, TWO)]
    assert [page.kept for page in pages if page is not None] == [False, True]
