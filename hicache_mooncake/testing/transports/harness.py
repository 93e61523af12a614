"""What the tests of transports stand on: memory, pairs of links in this process, and a peer in another one."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.transport import (
    Link,
    Op,
    Pending,
    Piece,
    Transport,
    TransportError,
    TransportOptions,
    open_transport,
)

_BLOCK = 1_000_003
"""Patterns repeat after so many bytes, which no size in use divides."""


def wait_until(condition: Callable[[], Any], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}"
        time.sleep(0.002)


def pattern(seed: int, length: int) -> bytes:
    block = random.Random(seed).randbytes(min(_BLOCK, length))
    return (block * (length // len(block) + 1))[:length] if length else b""


def same(actual: bytes, expected: bytes, what: str) -> None:
    """An assertion that says where they differ, without printing megabytes."""
    if actual == expected:
        return
    first, last = 0, min(len(actual), len(expected))  # the first byte that differs lies in between
    while last - first > 1:
        middle = (first + last) // 2
        if actual[first:middle] == expected[first:middle]:
            first = middle
        else:
            last = middle
    raise AssertionError(f"{what}: byte {first} is wrong, of {len(actual)} where {len(expected)} were expected")


class Memory:
    """A stretch of a memfd, mapped here."""

    def __init__(self, length: int, *, shared: bool = True) -> None:
        """Without `shared` the transport is not told the descriptor."""
        self.length = length
        self.fd = create_memfd("transport-tests", length)
        self._mapping = Mapping(self.fd, length, writable=True)
        self.address = self._mapping.address
        self.view = self._mapping.view
        self.shared_fd = self.fd if shared else -1

    def fill(self, seed: int) -> Memory:
        self.view[:] = pattern(seed, self.length)
        return self

    def bytes(self, first: int = 0, length: int | None = None) -> bytes:
        return bytes(self.view[first : self.length if length is None else first + length])

    def close(self) -> None:
        self._mapping.close()
        os.close(self.fd)


@dataclass
class End:
    """One end of a link in this process."""

    transport: Transport
    link: Link
    patience_s: float

    def share(self, memory: Memory, other: End) -> bytes:
        """Register it here, and tell the other end. Returns the token."""
        token = self.transport.register(memory.address, memory.length, memory.shared_fd)
        other.link.learn(memory.address, memory.length, token)
        return token

    def submit(self, op: Op, pieces: Sequence[Piece], seconds: float | None = None) -> Pending:
        return self.link.submit(op, pieces, time.monotonic() + (self.patience_s if seconds is None else seconds))

    def move(self, op: Op, pieces: Sequence[Piece], seconds: float | None = None) -> None:
        self.submit(op, pieces, seconds).wait()

    def notify(self, message: bytes) -> None:
        self.link.notify(message, time.monotonic() + self.patience_s)


class ProcessPeer:
    """The other end of a link in a process of its own (`hicache_mooncake.testing.transports.peer`), over memory that this
    process has mapped too: it can be looked at and filled whatever state the peer is in."""

    near: End

    def __init__(self, memory: Memory, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.memory = memory
        self._process, self._control = process, control
        self._answers = control.makefile("rb")
        self.remote = 0
        """Where the memory lies in the peer."""

    def hear(self) -> dict[str, Any]:
        line = self._answers.readline()
        assert line, "the peer process has ended"
        answer = json.loads(line)
        assert "broken" not in answer, answer
        return dict(answer)

    def ask(self, **command: Any) -> dict[str, Any]:
        self._control.sendall(json.dumps(command).encode() + b"\n")
        return self.hear()

    def share(self, memory: Memory) -> None:
        """Register it on the near side, and tell the peer."""
        token = self.near.transport.register(memory.address, memory.length, memory.shared_fd)
        self.ask(do="learn", address=memory.address, length=memory.length, token=token.hex())

    def keep_moving(self, op: Op, local: int, remote: int, length: int) -> None:
        """From now on the peer moves these bytes over and over, until its link ends. `local` is an offset in its memory."""
        self.ask(do="loop", op=op, pieces=[[local, remote, length]])

    def stop(self) -> None:
        """It does not answer any more."""
        self._process.send_signal(signal.SIGSTOP)
        wait_until(self._stopped, "the peer stops", self.near.patience_s)

    def _stopped(self) -> bool:
        return Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._answers.close()
        self._control.close()


class TransportHarness:
    """What a transport's tests override, and what the tests use."""

    scheme = ""
    """What `open_transport` takes; also in the process of a peer."""
    peers_in_processes = True
    """Whether the other end can be another process. False for one that works within a process only: what only a process
    that is stopped or killed can show is skipped."""
    notifies = True
    """Whether `notify` works."""
    closes_on_stopped_peers = True
    """Whether `Link.close` is had while the peer's process is stopped. False where it raises then, as the contract allows."""
    transfers = 10_000
    """How many small ones leave no descriptor and no thread behind."""
    endless = 20_000
    """How many times 8 MiB are a batch that does not come to its end by itself in any test."""
    idle_s = 1.0
    settle_s = 0.3
    """How long nothing may land after a fence."""
    patience_s = 60.0
    """For whatever is not about time: a loaded machine is slow."""

    def make_transport(self, options: TransportOptions) -> Transport:
        return open_transport(self.scheme, options)

    def make_channels(
        self, transport: Transport, count: int, *, small: bool = False
    ) -> tuple[list[socket.socket], list[socket.socket]]:
        """Connected sockets, of one end and of the other: UNIX ones for a transport that is `local_only`, else TCP over
        loopback. `small`: with the smallest buffers there are, and UNIX ones then, since TCP with a window below its segment
        waits for timers."""
        ends: tuple[list[socket.socket], list[socket.socket]] = ([], [])
        for _ in range(count):
            if transport.local_only or small:
                one, other = socket.socketpair()
                for sock in (one, other) if small else ():
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            else:
                with socket.create_server(("127.0.0.1", 0)) as listening:
                    one = socket.create_connection(listening.getsockname())
                    other, _ = listening.accept()
            ends[0].append(one)
            ends[1].append(other)
        return ends

    def spoil(self, token: bytes) -> bytes:
        """A token that was never given out, and looks like this one."""
        return token[:-1] + bytes([token[-1] ^ 0xFF])

    # ----------------------------------------------------------------- for the tests

    @pytest.fixture(autouse=True)
    def _around(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        self._transports: list[Transport] = []
        self._links: list[Link] = []
        self._memories: list[Memory] = []
        self._processes: list[ProcessPeer] = []

    def end(self) -> None:
        for peer in self._processes:
            peer.close()
        fenced = True
        closings: list[Link | Transport] = [*self._links, *self._transports]
        for closing in closings:
            try:
                closing.close()
            except TransportError:
                fenced = False
        if fenced:  # else somebody may still write there
            for memory in self._memories:
                memory.close()

    def transport(self, options: TransportOptions | None = None) -> Transport:
        made = self.make_transport(options or TransportOptions())
        self._transports.append(made)
        return made

    def memory(self, length: int, *, shared: bool = True) -> Memory:
        memory = Memory(length, shared=shared)
        self._memories.append(memory)
        return memory

    def pair(
        self,
        options: TransportOptions | None = None,
        *,
        near: Transport | None = None,
        far: Transport | None = None,
        small: bool = False,
    ) -> tuple[End, End]:
        """Two ends in this process: near connected, far accepted."""
        near = near or self.transport(options)
        far = far or self.transport(options)
        ours, theirs = self.make_channels(near, near.channels, small=small)
        accepted: list[Link | BaseException] = []

        def accept() -> None:
            try:
                accepted.append(far.accept(theirs, time.monotonic() + self.patience_s))
            except BaseException as error:  # for the thread that waits
                accepted.append(error)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            link = near.connect(ours, time.monotonic() + self.patience_s)
        finally:
            thread.join()
        self._links.append(link)
        if isinstance(accepted[0], BaseException):
            raise accepted[0]
        self._links.append(accepted[0])
        return End(near, link, self.patience_s), End(far, accepted[0], self.patience_s)

    def sharing(
        self, length: int, options: TransportOptions | None = None, *, small: bool = False, shared: bool = True
    ) -> tuple[End, End, Memory, Memory]:
        """Two ends, each with so much memory that the other knows, filled with different patterns."""
        near, far = self.pair(options, small=small)
        mine, theirs = self.memory(length, shared=shared).fill(1), self.memory(length, shared=shared).fill(2)
        near.share(mine, far)
        far.share(theirs, near)
        return near, far, mine, theirs

    def process_peer(
        self, length: int, *, near: Transport | None = None, options: TransportOptions | None = None
    ) -> ProcessPeer:
        """A peer process with so much memory, filled with a pattern, that the near end knows."""
        if not self.peers_in_processes:
            pytest.skip("this transport has no peers in other processes")
        near = near or self.transport()
        memory = self.memory(length).fill(3)
        ours, theirs = self.make_channels(near, near.channels)
        control, its_control = socket.socketpair()
        passed = [its_control.fileno(), memory.fd, *(sock.fileno() for sock in theirs)]
        command = [sys.executable, "-m", "hicache_mooncake.testing.transports.peer", self.scheme, str(length)]
        path = os.pathsep.join([str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen([*command, *map(str, passed)], pass_fds=passed, env={**os.environ, "PYTHONPATH": path})
        for sock in (its_control, *theirs):
            sock.close()
        control.settimeout(self.patience_s)
        peer = ProcessPeer(memory, process, control)
        self._processes.append(peer)
        link = near.connect(ours, time.monotonic() + self.patience_s)
        self._links.append(link)
        peer.near = End(near, link, self.patience_s)
        hello = peer.hear()
        peer.remote = int(hello["address"])
        peer.near.link.learn(peer.remote, length, bytes.fromhex(hello["token"]))
        return peer

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        wait_until(condition, what, self.patience_s)

    def stays(self, memory: Memory, what: str, then: Callable[[], None] = lambda: None) -> None:
        """Nothing lands there any more: what is written there now is found again later, after `then` was called."""
        memory.fill(99)
        expected = memory.bytes()
        then()
        end = time.monotonic() + self.settle_s
        while True:
            last = time.monotonic() > end
            same(memory.bytes(), expected, f"bytes landed after {what}")
            if last:
                return
            time.sleep(0.02)


def fails(reason: str | tuple[str, ...], call: Callable[[], Any]) -> TransportError:
    """It must raise TransportError with this reason, or one of these."""
    with pytest.raises(TransportError) as caught:
        call()
    assert caught.value.reason in ((reason,) if isinstance(reason, str) else reason), caught.value
    assert str(caught.value), "an error without a sentence"
    return caught.value


def in_threads(*calls: Callable[[], None]) -> None:
    """All at once. Raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # for the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
