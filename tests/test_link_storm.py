"""Loads over links while everything goes wrong at random: every page that is said to be loaded is compared, and afterwards all
room has come back or is known to be lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading

import pytest

from hicache_mooncake.node import link_book
from tests.conftest import wait_until
from tests.linked import COUNT, LONG_S, NS, Linked, MakePair, faults, figure, nothing_lent, pair
from tests.memory_transport import Faults, opener

__all__ = ["faults", "pair"]

STEPS = 20


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_faults_spoils_no_page_and_loses_no_room(
    pair: MakePair, faults: Faults, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(link_book, "RETRY_FIRST_S", 0.01)  # a storm of links too
    monkeypatch.setattr(link_book, "RETRY_MAX_S", 0.1)
    rng = random.Random(seed)
    linked = Linked(pair(opener(faults)), faults, deadline_s=3.0)
    others = [linked.both.rank(linked.b, deadline_s=3.0) for _ in range(2)]
    readers = [linked.reader, *others]
    others[0].shared = True
    pages = linked.pages
    for_all = linked.both.stored(linked.writer, linked.reader, *(f"shared {i}" for i in range(COUNT)))
    stop = threading.Event()
    wrong: list[BaseException] = []

    def load(which: int) -> None:
        try:
            while not stop.is_set():
                readers[which].load(NS, for_all if readers[which].shared else pages)  # compares
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=load, args=(which,), daemon=True) for which in range(len(readers))]
    for thread in threads:
        thread.start()
    for _ in range(STEPS):
        match rng.choice(["fail", "hang", "hang", "corrupt", "kill", "kill", "clear", "stillborn", "nothing", "nothing"]):
            case "fail":
                faults.fail = True
            case "corrupt":
                faults.corrupt = True
            case "stillborn":
                faults.stillborn = True
            case "hang":
                faults.gate.clear()
            case "kill":
                pid = rng.choice(readers).client.mover_pids()["load"]
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            case "clear":
                linked.b.clear(NS, everywhere=False)
        writes = faults.writes
        with contextlib.suppress(AssertionError):
            wait_until(lambda writes=writes: faults.writes > writes, 0.1 + rng.random() * 0.3)  # type: ignore[misc]
        faults.gate.set()
        faults.fail = faults.corrupt = faults.stillborn = False
    wait_until(lambda: faults.writes > STEPS // 2, 2 * LONG_S, "links are used")
    stop.set()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert wrong == []
    assert faults.late == 0
    nothing_lent(linked.b)
    assert figure(linked.b, "quarantined_bytes") == 0
    with linked.b.lock:
        linked.b.core.clear(NS, 0.0)
        while linked.b.core.store.sweep():
            pass
        assert linked.b.store.used_bytes == 0, "no room is lost"
        linked.b.core.validate()
