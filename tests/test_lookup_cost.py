"""What a lookup costs depends on the keys asked for and not on how many are held: the work is counted, not timed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hicache_master.directory import Directory

from hicache_mooncake import protocol as p
from hicache_mooncake.node.core import NodeCore
from hicache_mooncake.node.store import Store
from hicache_mooncake.testing.local import page_hash

NS = b"n" * 16
LENGTH = 4096
FEW, MANY = 500, 20_000


def work(call: Callable[[], Any]) -> int:
    """Bytecodes that a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(former)
    return count


def chain(name: str, count: int) -> list[bytes]:
    return [page_hash((name, i)) for i in range(count)]


def node(pages: list[bytes]) -> NodeCore:
    store = Store(4 * MANY * LENGTH)
    for at in range(0, len(pages), 128):
        batch = pages[at : at + 128]
        txn, _, _ = store.reserve(1, NS, b"".join(batch), LENGTH)
        store.commit(1, txn, b"\x01" * len(batch), range(len(batch)))
    return NodeCore("node", b"i" * 8, store, masters=False, log=lambda *_: None)


def ask(core: NodeCore, message: p.Message) -> Callable[[], Any]:
    return lambda: list(core.handle(1, message, 0.0))


def test_a_nodes_lookups_cost_as_much_in_a_large_index() -> None:
    small, large = (node(chain("held", count)) for count in (FEW, MANY))
    asked = chain("held", 64) + chain("absent", 64)
    random.Random(1).shuffle(asked)
    blob = b"".join(asked)
    promised = p.Exists([NS], blob, promise_s=5.0, reader="r")
    for message in (p.Exists([NS], blob), p.Locate(NS, blob, LENGTH), p.Exists([], blob, [NS]), promised):
        # The first one may find room to tidy up that the index left behind.
        for core in (small, large):
            ask(core, message)()
        costs = [work(ask(core, message)) for core in (small, large)]
        assert costs[0] > 0
        assert costs[1] <= costs[0] * 1.2 + 200, f"{type(message).__name__}: {costs} bytecodes"


def test_a_nodes_lookup_grows_with_the_keys_asked_and_no_faster() -> None:
    core = node(chain("held", 4096))
    costs = []
    for count in (128, 1024):
        message = p.Exists([NS], b"".join(chain("held", count)))
        ask(core, message)()
        costs.append(work(ask(core, message)))
    assert costs[1] <= 8 * costs[0] * 1.2


def directory(pages: list[bytes]) -> tuple[Directory, list[int]]:
    made = Directory(1 << 20, random.Random(1))
    slots = [made.allocate(), made.allocate()]
    for at in range(0, len(pages), 1024):
        blob = b"".join(pages[at : at + 1024])
        for slot in slots:
            made.add(slot, NS, blob)
    return made, slots


def test_the_directorys_lookups_cost_as_much_in_a_large_one() -> None:
    asked = b"".join(chain("held", 64) + chain("absent", 64))
    costs = []
    for count in (FEW, MANY):
        made, slots = directory(chain("held", count))
        ranks = bytes([1] * (max(slots) + 1))

        def find(made: Directory = made, ranks: bytes = ranks) -> object:
            return made.find(NS, asked, prefix=False, ranks=ranks)

        found = find()
        assert found is not None
        costs.append(work(find))
    assert costs[0] > 0
    assert costs[1] <= costs[0] * 1.2 + 200, f"{costs} bytecodes"
