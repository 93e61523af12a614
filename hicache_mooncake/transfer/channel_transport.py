"""What transports of `ChannelLink`s share: what is registered, and the links that were told of it."""

from __future__ import annotations

import abc
import os
import socket
import threading
import time
from collections.abc import Sequence

from hicache_mooncake.transfer.channel_link import FENCE_S, MAX_REGIONS, TOKEN, ChannelLink
from hicache_mooncake.transfer.transport import Extents, Link, Transport, TransportError

_MAX_LINKS = 1024


class Own:
    """A stretch that is registered here."""

    def __init__(self, number: int, address: int, length: int, fd: int, fd_offset: int) -> None:
        self.id, self.address, self.length, self.fd, self.fd_offset = number, address, length, fd, fd_offset


class ChannelTransport(Transport):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.extents = Extents()
        """What is registered here."""
        self._own: dict[int, Own] = {}
        self._links: set[ChannelLink] = set()
        self._next_id = int.from_bytes(os.urandom(6), "little")
        self._closed = False

    # ---- what subclasses say

    @abc.abstractmethod
    def admit(self, address: int, length: int, fd: int, fd_offset: int) -> bytes:
        """Memory is to be registered: the kind of its tokens, 4 bytes. Raises TransportError."""

    def expel(self, address: int) -> None:
        """It is registered no more, and no peer reaches it."""

    @abc.abstractmethod
    def meet(self, channel: socket.socket, deadline: float) -> ChannelLink:
        """The handshake, the same on both sides. Raises TransportError."""

    # ---- the contract

    def register(self, address: int, length: int, fd: int = -1, fd_offset: int = 0) -> bytes:
        if length <= 0:
            raise TransportError("memory", f"a registration of {length} bytes: at least one is needed")
        with self._lock:
            self._check_open()
            if len(self._own) >= MAX_REGIONS:
                raise TransportError("memory", f"{MAX_REGIONS} stretches of memory are registered: register larger ones")
            self._next_id += 1
            number = self._next_id
            former = next((old for old in self._own.values() if old.address == address), None)
            self.extents.add(address, length, b"")  # or it overlaps
        if former is not None:
            self.unregister(address)
            self.extents.add(address, length, b"")
        try:
            token = TOKEN.pack(self.admit(address, length, fd, fd_offset), number)
        except BaseException:
            self.extents.remove(address)
            raise
        with self._lock:
            self._own[number] = Own(number, address, length, fd, fd_offset)
        return token

    def unregister(self, address: int) -> None:
        """Raises TransportError when a peer has not confirmed it: the links to such peers are ended then, and the memory must
        not be used again until those processes are gone."""
        with self._lock:
            own = next((own for own in self._own.values() if own.address == address), None)
            if own is None:
                return
            del self._own[own.id]
            self.extents.remove(address)
        self._revoke(own)
        self.expel(address)

    def _revoke(self, own: Own) -> None:
        with self._lock:
            links = list(self._links)
        until = time.monotonic() + FENCE_S
        asked = [link for link in links if link.ask_to_forget(own.id)]
        silent = [link for link in asked if not link.forgotten(own.id, until)]
        for link in silent:
            link.stop("peer", "it did not confirm that it has forgotten memory that is not registered any more")
        if silent:
            raise TransportError(
                "peer",
                f"{', '.join(link.who for link in silent)} did not confirm within {FENCE_S:g} s to have forgotten {own.length} "
                f"bytes at {own.address:#x}: stopped? Do not use this memory before such a process has ended",
            )

    def connect(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        return self._link(channels, deadline)

    def accept(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        return self._link(channels, deadline)

    def _link(self, channels: Sequence[socket.socket], deadline: float) -> Link:
        try:
            if len(channels) != 1:
                raise TransportError("unavailable", f"{self.scheme} needs one channel, not {len(channels)}")
            link = self.meet(channels[0], deadline)
            with self._lock:
                try:
                    self._check_open()
                    if len(self._links) >= _MAX_LINKS:
                        raise TransportError("memory", f"{_MAX_LINKS} links are open: close those that are not needed")
                    link.start()
                except TransportError:
                    link.abandon()
                    raise
                self._links.add(link)
        except BaseException as error:
            for channel in channels:
                channel.close()
            if isinstance(error, OSError):
                raise TransportError("peer", f"the channel to the peer broke: {error}") from error
            raise
        return link

    def close(self) -> None:
        """Raises TransportError when a link could not be fenced, after all others are closed."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        until = time.monotonic() + FENCE_S
        for link in links:
            link.stop()
        problem = None
        for link in links:
            try:
                link.close(until)
            except TransportError as error:
                problem = error
        with self._lock:
            own, self._own = list(self._own.values()), {}
        for each in own:
            self.extents.remove(each.address)
            self.expel(each.address)
        if problem is not None:
            raise problem

    @property
    def links(self) -> list[ChannelLink]:
        with self._lock:
            return list(self._links)

    def report(self) -> dict[str, int | float | str | bool]:
        links = self.links
        return {
            "links": sum(link.alive for link in links),
            "regions": len(self._own),
            "reached_bytes": sum(link.reached_bytes for link in links),
            "copied_bytes": sum(link.copied_bytes for link in links),
        }

    # ---- for links

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("closed", "this transport was closed")

    def own(self, number: int) -> Own | None:
        with self._lock:
            return self._own.get(number)

    def forget(self, link: ChannelLink) -> None:
        with self._lock:
            self._links.discard(link)
