"""A lock that a busy thread does not keep to itself."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_mooncake.transfer.verbs.fair_lock import FairLock


def test_who_waits_has_it_before_who_takes_it_again_at_once() -> None:
    lock = FairLock()
    order = []

    def wait() -> None:
        with lock:
            order.append("who waited")

    for _ in range(50):
        order.clear()
        lock.acquire()
        thread = threading.Thread(target=wait)
        thread.start()
        while not lock._next.locked():
            time.sleep(0.0001)
        lock.release()
        with lock:
            order.append("again")
        thread.join(60)
        assert order == ["who waited", "again"]


def test_it_excludes_and_may_be_taken_again_by_its_holder() -> None:
    lock = FairLock()
    count = 0

    def add() -> None:
        nonlocal count
        for _ in range(2000):
            with lock, lock:
                before = count
                count = before + 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert count == 8000


def test_it_works_beneath_a_condition_also_when_held_twice() -> None:
    lock = FairLock()
    changed = threading.Condition(lock)  # type: ignore[arg-type]
    told: list[int] = []

    def tell() -> None:
        with lock:
            told.append(1)
            changed.notify_all()

    with lock, lock:
        thread = threading.Thread(target=tell)
        thread.start()
        assert changed.wait_for(lambda: told, 60)
        told.append(2)
    thread.join(60)
    with lock:  # it is free again
        assert told == [1, 2]


def test_only_its_holder_lets_go_of_it() -> None:
    lock = FairLock()
    with pytest.raises(AssertionError):
        lock.release()


def test_who_waits_for_some_time_only_leaves_it_to_others() -> None:
    lock = FairLock()
    got: list[bool] = []
    with lock:
        assert lock.acquire(0.0), "it is this thread's"
        lock.release()
        thread = threading.Thread(target=lambda: got.append(lock.acquire(0.01)))
        thread.start()
        thread.join()
    assert got == [False]
    assert lock.acquire(0.0)
    lock.release()
