"""The thread of the verbs transport: it hears of descriptors and of time, and outlives what goes wrong in a callback."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hicache_mooncake.transfer.verbs.progress import Progress

LONG = 60.0


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_callbacks_come_in_its_thread_until_they_are_not_wanted(ends: tuple[socket.socket, socket.socket]) -> None:
    progress = Progress("a thread", lambda: None)
    heard: list[tuple[str, bytes]] = []
    progress.watch(ends[0].fileno(), lambda _: heard.append((threading.current_thread().name, ends[0].recv(100))))
    ends[1].send(b"one")
    until(lambda: heard)
    assert heard == [("a thread", b"one")]
    progress.unwatch(ends[0].fileno())
    ends[1].send(b"two")
    progress.wake()
    time.sleep(0.05)
    assert len(heard) == 1
    progress.close()


def test_what_is_watched_for_may_change(ends: tuple[socket.socket, socket.socket]) -> None:
    progress = Progress("x", lambda: None)
    events: list[int] = []

    def ready(found: int) -> None:
        events.append(found)
        progress.watch(ends[0].fileno(), ready)

    progress.watch(ends[0].fileno(), ready, select.EPOLLIN | select.EPOLLOUT)
    until(lambda: events)
    assert events == [select.EPOLLOUT]
    progress.close()


def test_a_turn_follows_a_wake_and_a_time() -> None:
    turns: list[float] = []
    waits = iter([None, 0.01, None])

    def turn() -> float | None:
        turns.append(time.monotonic())
        return next(waits, None)

    progress = Progress("x", turn)
    assert turns == []
    progress.wake()
    until(lambda: len(turns) >= 3)
    progress.close()


def test_what_fails_is_logged_and_the_thread_goes_on(
    ends: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[int] = []

    def fail(_events: int = 0) -> None:
        failed.append(1)
        ends[0].recv(1)
        raise ValueError("out of order")

    progress = Progress("x", lambda: None)
    progress.watch(ends[0].fileno(), fail)
    with caplog.at_level(logging.ERROR):
        ends[1].send(b"ab")
        until(lambda: len(failed) == 2)
    progress.close()
    assert "out of order" in caplog.text


def test_closing_ends_the_thread_and_leaves_no_descriptor(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    closed: list[int] = []
    eventfd, close = os.eventfd, os.close
    monkeypatch.setattr(os, "eventfd", lambda *how: opened.append(eventfd(*how)) or opened[-1])
    monkeypatch.setattr(os, "close", lambda fd: closed.append(fd) or close(fd))
    for used in (True, False):
        progress = Progress("to be closed", lambda: None)
        if used:
            progress.watch(ends[0].fileno(), lambda _: None)
        progress.close()
        progress.close()
        progress.wake()
        progress.watch(ends[0].fileno(), lambda _: None)
        progress.unwatch(ends[0].fileno())
        assert progress._epoll.closed
    assert not any(thread.name == "to be closed" for thread in threading.enumerate())
    assert len(opened) == 2
    assert [fd for fd in closed if fd in opened] == opened


def test_it_may_be_closed_from_its_own_thread() -> None:
    closed = threading.Event()

    def turn() -> None:
        progress.close()
        closed.set()

    progress = Progress("x", turn)
    progress.wake()
    assert closed.wait(LONG)
    until(lambda: not any(thread.name == "x" for thread in threading.enumerate()))
