"""The thread that carries links on: it waits for descriptors and for time to pass, and calls who asked for it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

MOST_WAIT_S = 1.0
_ERRORS = select.EPOLLERR | select.EPOLLHUP


class Progress:
    """One thread, a daemon, from the first `watch` or `wake` to `close`. Thread-safe.

    `turn` is called in the thread after every wait, and says for how many seconds there is nothing to do unless a descriptor or
    `wake` says otherwise; None for ever. Callbacks get what epoll reported; those of a descriptor that is not watched any more
    may still be called once, and must bear it.
    """

    def __init__(self, name: str, turn: Callable[[], float | None]) -> None:
        self._name = name
        self._turn = turn
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._event, select.EPOLLIN)
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._thread: threading.Thread | None = None
        self._woken = False
        self._ended = False

    def watch(self, fd: int, callback: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Also changes what is watched. Nothing once closed."""
        with self._lock:
            if self._ended:
                return
            if fd in self._callbacks:
                self._epoll.modify(fd, events)
            else:
                self._epoll.register(fd, events)
            self._callbacks[fd] = callback
            self._start()

    def unwatch(self, fd: int) -> None:
        """Before the descriptor is closed."""
        with self._lock:
            if self._callbacks.pop(fd, None) is not None and not self._ended:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(fd)

    def wake(self) -> None:
        """The thread calls `turn` soon. Does not wait."""
        with self._lock:
            if self._woken or self._ended:
                return
            self._woken = True
            self._start()
            os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Returns when the thread has ended, unless it is the caller."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            thread = self._thread
            os.eventfd_write(self._event, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if thread is None:
            self._release()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _release(self) -> None:
        self._epoll.close()
        os.close(self._event)

    def _run(self) -> None:
        try:
            while not self._ended:
                timeout = self._guarded_turn()
                for fd, events in self._epoll.poll(min(timeout, MOST_WAIT_S)):
                    if fd == self._event:
                        with self._lock, contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._event)
                            self._woken = False
                        continue
                    callback = self._callbacks.get(fd)
                    if callback is not None:
                        self._guarded(callback, events)
        finally:
            with self._lock:
                self._release()

    def _guarded_turn(self) -> float:
        try:
            timeout = self._turn()
        except Exception:
            log.exception("%s: a turn failed", self._name)
            return MOST_WAIT_S
        return MOST_WAIT_S if timeout is None else max(timeout, 0.0)

    def _guarded(self, callback: Callable[[int], None], events: int) -> None:
        try:
            callback(events)
        except Exception:
            log.exception("%s: a callback failed", self._name)
