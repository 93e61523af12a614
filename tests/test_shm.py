"""Shared memory between processes of one host: what the other process may do to the memory, and until when."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from hicache_mooncake.transfer import channel_link, channel_transport, shm
from hicache_mooncake.transfer.mapping import Mapping, create_memfd
from hicache_mooncake.transfer.shm import ShmTransport, _greet
from hicache_mooncake.transfer.shm_copy import ProcessPlace
from hicache_mooncake.transfer.transport import MAX_NOTICE_BYTES, Link, Piece, TransportError, TransportOptions
from hicache_mooncake.wire import Wire
from tests import shm_peer

LONG_S = 60.0


def soon() -> float:
    return time.monotonic() + LONG_S


def until(met: Callable[[], bool]) -> None:
    end = soon()
    while not met():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Memory:
    """A memfd with its mapping, or memory of the heap."""

    def __init__(self, length: int, kind: str = "memfd") -> None:
        self.length, self.fd = length, -1
        if kind == "memfd":
            self.fd = create_memfd("test", length)
            self._mapping = Mapping(self.fd, length, writable=True)
            self.address = self._mapping.address
        else:
            self._heap = ctypes.create_string_buffer(length)
            self.address = ctypes.addressof(self._heap)

    def put(self, data: bytes, at: int = 0) -> None:
        ctypes.memmove(self.address + at, data, len(data))

    def get(self, at: int = 0, length: int = -1) -> bytes:
        return ctypes.string_at(self.address + at, self.length if length < 0 else length)

    def close(self) -> None:
        if self.fd >= 0:
            self._mapping.close()
            os.close(self.fd)


class Pair:
    """Two transports in this process, and a link between them."""

    def __init__(self, **options: int) -> None:
        self.near, self.far = (ShmTransport(TransportOptions(**options)) for _ in range(2))
        self.link, self.other = self.join()

    def join(self) -> tuple[Link, Link]:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        made: list[Link] = []
        accepting = threading.Thread(target=lambda: made.append(self.far.accept([theirs], soon())))
        accepting.start()
        link = self.near.connect([ours], soon())
        accepting.join()
        return link, made[0]

    def share(self, memory: Memory) -> None:
        """The far end's, for the near one."""
        self.link.learn(memory.address, memory.length, self.far.register(memory.address, memory.length, memory.fd))

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@contextlib.contextmanager
def memories(*lengths: int, kind: str = "memfd") -> Iterator[list[Memory]]:
    made = [Memory(length, kind) for length in lengths]
    try:
        yield made
    finally:
        for memory in made:
            memory.close()


@pytest.mark.parametrize("kind", ["memfd", "heap"])
def test_bytes_arrive_where_they_belong_and_nowhere_else(pair: Pair, kind: str) -> None:
    with memories(1 << 20, 1 << 20, kind=kind) as (mine, theirs):
        pair.near.register(mine.address, mine.length, mine.fd)
        pair.share(theirs)
        body = os.urandom(1 << 20)
        theirs.put(body)
        pieces = [Piece(mine.address + 7, theirs.address + 100_001, 333_333), Piece(mine.address + 500_000, theirs.address, 1)]
        pair.link.submit("read", pieces, soon()).wait()
        assert mine.get() == bytes(7) + body[100_001:433_334] + bytes(500_000 - 333_340) + body[:1] + bytes((1 << 20) - 500_001)

        mine.put(b"back again")
        pair.link.submit("write", [Piece(mine.address, theirs.address + 4096, 10)], soon()).wait()
        assert theirs.get() == body[:4096] + b"back again" + body[4106:]


def test_a_large_batch_is_copied_without_anybody_waiting_for_it(pair: Pair) -> None:
    with memories(40 << 20, 40 << 20) as (mine, theirs):
        pair.near.register(mine.address, mine.length, mine.fd)
        pair.share(theirs)
        body = os.urandom(1 << 20) * 40
        theirs.put(body)
        pending = pair.link.submit("read", [Piece(mine.address, theirs.address, len(body))], soon())
        until(lambda: pending.done)
        pending.wait()
        assert mine.get() == body


def test_more_threads_copy_the_same_bytes() -> None:
    pair = Pair(copy_threads=3)
    with memories(40 << 20, 40 << 20) as (mine, theirs):
        pair.near.register(mine.address, mine.length, mine.fd)
        pair.share(theirs)
        body = os.urandom(1 << 20) * 40
        theirs.put(body)
        pieces = [Piece(mine.address + at, theirs.address + at, 333_000) for at in range(0, 40_000_000, 333_000)]
        pair.link.submit("read", pieces, soon()).wait()
        assert mine.get(length=39_960_000) == body[:39_960_000]
        pair.close()


def test_memory_at_an_offset_of_its_file_is_found(pair: Pair) -> None:
    with memories(1 << 20) as (whole,):
        body = os.urandom(1 << 20)
        whole.put(body)
        at = 12_345
        token = pair.far.register(whole.address + at, 100_000, whole.fd, at)
        pair.link.learn(whole.address + at, 100_000, token)
        with memories(100_000) as (mine,):
            pair.near.register(mine.address, mine.length, mine.fd)
            pair.link.submit("read", [Piece(mine.address, whole.address + at, 100_000)], soon()).wait()
            assert mine.get() == body[at : at + 100_000]
        with pytest.raises(TransportError) as caught:
            pair.link.submit("read", [Piece(whole.address, whole.address + at - 1, 100)], soon())
        assert caught.value.reason == "bounds"


def test_memory_that_was_taken_back_is_out_of_bounds_and_not_mapped_any_more(pair: Pair) -> None:
    with memories(1 << 20, 1 << 20) as (mine, theirs):
        pair.near.register(mine.address, mine.length, mine.fd)
        pair.share(theirs)
        piece = Piece(mine.address, theirs.address, 1 << 20)
        pair.link.submit("read", [piece], soon()).wait()
        assert pair.near.report()["reached_bytes"] == 1 << 20
        pair.far.unregister(theirs.address)
        assert pair.near.report()["reached_bytes"] == 0
        with pytest.raises(TransportError) as caught:
            pair.link.submit("read", [piece], soon())
        assert caught.value.reason == "bounds"
        assert pair.link.alive


def test_a_token_from_before_is_out_of_bounds(pair: Pair) -> None:
    with memories(4096, 4096) as (mine, theirs):
        pair.near.register(mine.address, mine.length, mine.fd)
        token = pair.far.register(theirs.address, theirs.length, theirs.fd)
        pair.far.unregister(theirs.address)
        pair.link.learn(theirs.address, theirs.length, token)
        with pytest.raises(TransportError) as caught:
            pair.link.submit("read", [Piece(mine.address, theirs.address, 10)], soon())
        assert caught.value.reason == "bounds"


def test_descriptors_go_with_their_messages_also_when_several_arrive_at_once(pair: Pair) -> None:
    with memories(4096, *[4096] * 40) as (mine, *theirs):
        pair.near.register(mine.address, mine.length, mine.fd)
        for number, memory in enumerate(theirs):
            token = pair.far.register(memory.address, memory.length, memory.fd)
            memory.put(bytes([number]) * 4096)
            if number % 2:
                pair.far.unregister(memory.address)  # its answer has no descriptor
            pair.link.learn(memory.address, memory.length, token)
        for number, memory in enumerate(theirs):
            if number % 2 == 0:
                pair.link.submit("read", [Piece(mine.address, memory.address, 4096)], soon()).wait()
                assert mine.get() == bytes([number]) * 4096


@pytest.mark.parametrize(
    ("flags", "size", "said"),
    [(os.O_RDONLY, 4096, "O_RDWR"), (os.O_RDWR, 1000, "1000 bytes")],
    ids=["read-only", "too short"],
)
def test_a_descriptor_that_cannot_serve_is_refused_with_what_is_wrong(
    pair: Pair, tmp_path: Path, flags: int, size: int, said: str
) -> None:
    file = tmp_path / "memory"
    file.write_bytes(bytes(size))
    fd = os.open(file, flags)
    try:
        with pytest.raises(TransportError, match=said) as caught:
            pair.far.register(4096, 4096, fd)
        assert caught.value.reason == "memory"
    finally:
        os.close(fd)


class Unsealed(Memory):
    """A memfd as other programs make it. SGLang's host pools take no seals."""

    def __init__(self, length: int, flags: int = 0) -> None:
        self.length, self.fd = length, os.memfd_create("unsealed", flags)
        os.ftruncate(self.fd, length)
        self._mapping = Mapping(self.fd, length, writable=True)
        self.address = self._mapping.address


def test_memory_that_could_be_made_shorter_is_moved_all_the_same(pair: Pair) -> None:
    with memories(3 << 20) as (mine,), contextlib.closing(Unsealed(3 << 20)) as theirs:
        pair.near.register(mine.address, mine.length, mine.fd)
        at = 4096 + 5
        pair.link.learn(
            theirs.address + at, theirs.length - at, pair.far.register(theirs.address + at, theirs.length - at, theirs.fd, at)
        )
        body = os.urandom(theirs.length)
        theirs.put(body)
        pieces = [
            Piece(mine.address, theirs.address + at, 2 << 20),
            Piece(mine.address + (2 << 20), theirs.address + at + 7, 9),
        ]
        pair.link.submit("read", pieces, soon()).wait()
        assert mine.get(length=(2 << 20) + 9) == body[at : at + (2 << 20)] + body[at + 7 : at + 16]
        pair.link.submit("write", [Piece(mine.address, theirs.address + at + 100, 1000)], soon()).wait()
        assert theirs.get() == body[: at + 100] + mine.get(length=1000) + body[at + 1100 :]


@pytest.mark.parametrize("op", ["read", "write"])
def test_memory_that_is_made_shorter_under_a_peer_ends_no_process(pair: Pair, op: Literal["read", "write"]) -> None:
    """It was mapped, and the peer died of SIGBUS."""
    with memories(1 << 20) as (mine,), contextlib.closing(Unsealed(1 << 20)) as theirs:
        pair.near.register(mine.address, mine.length, mine.fd)
        pair.share(theirs)
        pair.link.submit("read", [Piece(mine.address, theirs.address, 1 << 20)], soon()).wait()
        os.ftruncate(theirs.fd, 4096)
        with pytest.raises(TransportError, match="shorter") as caught:
            pair.link.submit(op, [Piece(mine.address, theirs.address, 1 << 20)], soon()).wait()
        assert caught.value.reason == "memory"
        assert os.fstat(theirs.fd).st_size == 4096
        pair.link.submit(op, [Piece(mine.address, theirs.address, 4096)], soon()).wait()


def test_memory_that_takes_seals_is_sealed_and_mapped(pair: Pair) -> None:
    with memories(4096) as (mine,), contextlib.closing(Unsealed(4096, os.MFD_ALLOW_SEALING)) as theirs:
        pair.near.register(mine.address, mine.length, mine.fd)
        pair.share(theirs)
        with pytest.raises(PermissionError):
            os.ftruncate(theirs.fd, 0)
        pair.link.submit("read", [Piece(mine.address, theirs.address, 4096)], soon()).wait()
        (place,) = pair.link._places.values()  # type: ignore[attr-defined]
        assert place._mapping is not None


def test_a_tcp_socket_is_no_channel() -> None:
    transport = ShmTransport(TransportOptions())
    with socket.socket() as channel, pytest.raises(TransportError) as caught:
        transport.connect([channel], soon())
    assert caught.value.reason == "unavailable"
    assert channel.fileno() == -1


def test_a_peer_that_speaks_something_else_is_told_apart() -> None:
    transport = ShmTransport(TransportOptions())
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
    with theirs, pytest.raises(TransportError, match="does not speak") as caught:
        transport.connect([ours], soon())
    assert caught.value.reason == "peer"


GREETS_AND_ENDS = """
import os, socket, struct, sys
said = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("@iII", os.getpid(), os.getuid(), os.getgid()))]
socket.socket(fileno=int(sys.argv[1])).sendmsg([b"hicache-mooncake shm 1\\n"], said)
"""


@pytest.mark.parametrize("kernel", ["gives descriptors of processes", "does not"])
def test_another_process_under_the_number_of_a_peer_that_has_ended_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Its memory would have been read, and written."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    held = theirs.dup()  # somebody has inherited its end of the channel
    with ours, held:
        with theirs:
            subprocess.run(
                [sys.executable, "-c", GREETS_AND_ENDS, str(theirs.fileno())], pass_fds=[theirs.fileno()], check=True
            )
        another = os.getpid()
        opened = os.pidfd_open

        def reused(pid: int) -> int:
            if kernel == "does not":  # then the end of the channel has to tell
                held.close()
            return opened(another)

        monkeypatch.setattr(os, "pidfd_open", reused)
        if kernel == "does not":
            monkeypatch.setattr(shm, "_SO_PASSPIDFD", 9999)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TransportError, match="is gone") as caught:
            ShmTransport(TransportOptions()).connect([ours], soon())
        assert caught.value.reason == "peer"
        assert len(os.listdir("/proc/self/fd")) <= before


# --------------------------------------------------------------------------- a peer that says anything


class RawPeer:
    """The other end of a link, message by message."""

    def __init__(self) -> None:
        self.transport = ShmTransport(TransportOptions())
        ours, self.sock = socket.socketpair(socket.AF_UNIX)
        greeting = threading.Thread(target=lambda: os.close(_greet(self.sock, soon())[1]))
        greeting.start()
        self.link = self.transport.connect([ours], soon())
        greeting.join()
        self.wire = Wire(self.sock)

    def learn(self, number: int, address: int, length: int) -> None:
        """A token of this peer, which is asked what it stands for."""
        self.link.learn(address, length, channel_link.TOKEN.pack(b"map1", number))

    def gives(self, number: int, memory: Memory) -> None:
        self.wire.send(channel_link.Memory(number, True, True), [memory.fd])
        link = self.link
        assert isinstance(link, channel_link.ChannelLink)
        until(lambda: link._places[number].ready)

    def close(self) -> None:
        self.wire.close()
        self.transport.close()


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    peer = RawPeer()
    yield peer
    peer.close()


def test_memory_that_is_learned_anew_in_mid_batch_is_not_touched_before_the_peer_has_given_it(
    raw: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it lies is not known until then: at that address is something else of this process, or nothing."""
    with memories(8 << 20, 8 << 20) as (mine, theirs):
        raw.transport.register(mine.address, mine.length, mine.fd)
        theirs.put(b"x" * theirs.length)
        raw.learn(1, theirs.address, theirs.length)
        raw.gives(1, theirs)
        monkeypatch.setattr(raw.transport._copier, "put", lambda turn: None)  # it has not had its first turn yet
        pending = raw.link.submit("read", [Piece(mine.address, theirs.address, 8 << 20)], soon())
        raw.learn(2, theirs.address, theirs.length)
        with pytest.raises(TransportError) as caught:
            pending.wait()
        assert caught.value.reason == "bounds"
        assert mine.get() == bytes(8 << 20)


def test_a_token_stands_for_one_stretch_of_memory(raw: RawPeer) -> None:
    """Else a peer could have bytes moved outside what is mapped of it."""
    with memories(4096, 4096, 4096) as (mine, one, other):
        raw.transport.register(mine.address, mine.length, mine.fd)
        one.put(b"1" * 4096)
        raw.learn(1, one.address, 4096)
        raw.gives(1, one)
        with pytest.raises(TransportError) as caught:
            raw.learn(1, other.address, 4096)
        assert caught.value.reason == "bounds"
        raw.link.submit("read", [Piece(mine.address, one.address, 4096)], soon()).wait()
        assert mine.get() == b"1" * 4096


def test_memory_that_is_told_of_again_is_mapped_once(raw: RawPeer) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("told-of-again")

    fd = create_memfd("told-of-again", 4096)
    try:
        theirs = Memory(4096, "heap")
        theirs.fd = fd
        for _ in range(3):
            raw.learn(1, theirs.address, 4096)
            raw.gives(1, theirs)
        assert mapped() == 1
        raw.link.learn(theirs.address, 4096, channel_link.TOKEN.pack(b"map1", 2))
        raw.gives(2, theirs)
        assert mapped() == 1
    finally:
        os.close(fd)


def test_who_tells_a_peer_that_does_not_read_waits_for_its_own_time_only(raw: RawPeer) -> None:
    link = raw.link
    assert isinstance(link, channel_link.ChannelLink)

    def tell() -> None:
        with contextlib.suppress(TransportError):
            while True:
                link.notify(bytes(MAX_NOTICE_BYTES), soon())

    patient = threading.Thread(target=tell)
    patient.start()
    until(lambda: link._sending.locked() and not select.select([], [link._channel], [], 0)[1])
    with pytest.raises(TransportError) as caught:
        link.notify(b"x", time.monotonic() + 0.2)
    assert caught.value.reason == "deadline"
    assert patient.is_alive()
    assert link.alive
    raw.wire.close()
    patient.join()


def test_descriptors_that_nobody_asked_for_end_the_link(raw: RawPeer) -> None:
    """A peer could take all that this process may have."""

    def held() -> int:
        names = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sum("nobody-asked-for" in name for name in names)

    fd = create_memfd("nobody-asked-for", 4096)
    try:
        with contextlib.suppress(OSError):
            for _ in range(100):
                raw.wire.send(channel_link.Revoked(1), [fd] * 100, soon())
        until(lambda: not raw.link.alive)
        raw.wire.close()
        raw.link.close()
        assert held() == 1
    finally:
        os.close(fd)


# --------------------------------------------------------------------------- another process


class Other:
    """`shm_peer` in a process of its own, linked to a transport of this one."""

    def __init__(self, folder: Path, kind: str = "memfd") -> None:
        path = str(folder / "channel")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(LONG_S)
            self.process = subprocess.Popen(
                [sys.executable, shm_peer.__file__, path, kind], env={**os.environ, "PYTHONPATH": "."}
            )
            channel, _ = listener.accept()
        self.transport = ShmTransport(TransportOptions())
        self.link = self.transport.accept([channel], soon())
        told: list[bytes] = []
        until(lambda: bool(told.extend(self.link.notices()) or told))
        address, token = told[0].decode().split()
        self.address, self.token = int(address), bytes.fromhex(token)

    def learn(self) -> None:
        self.link.learn(self.address, shm_peer.LENGTH, self.token)

    def writes_into(self, memory: Memory) -> None:
        """And does not stop."""
        token = self.transport.register(memory.address, memory.length, memory.fd)
        self.link.notify(f"write {memory.address} {memory.length} {token.hex()}".encode(), soon())
        until(lambda: memory.get(memory.length - 1, 1) == b"\xff")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        until(lambda: all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads.iterdir()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.transport.close()


@contextlib.contextmanager
def other(folder: Path, kind: str = "memfd") -> Iterator[Other]:
    peer = Other(folder, kind)
    try:
        yield peer
    finally:
        peer.close()


def stays(memory: Memory, byte: int) -> None:
    """Nothing else is written there for a while."""
    ctypes.memset(memory.address, byte, memory.length)
    for _ in range(20):
        time.sleep(0.01)
        assert memory.get() == bytes([byte]) * memory.length


@pytest.mark.parametrize("kind", ["memfd", "heap"])
def test_memory_of_another_process_is_read(tmp_path: Path, kind: str) -> None:
    with other(tmp_path, kind) as peer, memories(shm_peer.LENGTH, kind=kind) as (mine,):
        peer.transport.register(mine.address, mine.length, mine.fd)
        peer.learn()
        peer.link.submit("read", [Piece(mine.address, peer.address, shm_peer.LENGTH)], soon()).wait()
        assert mine.get() == bytes([shm_peer.FILL]) * shm_peer.LENGTH


def test_after_close_a_peer_that_went_on_writing_writes_no_more(tmp_path: Path) -> None:
    with other(tmp_path) as peer, memories(shm_peer.LENGTH) as (mine,):
        peer.writes_into(mine)
        peer.link.close()
        stays(mine, 0x11)


def test_after_unregister_a_peer_that_went_on_writing_writes_no_more(tmp_path: Path) -> None:
    with other(tmp_path) as peer, memories(shm_peer.LENGTH) as (mine,):
        peer.writes_into(mine)
        peer.transport.unregister(mine.address)
        stays(mine, 0x11)


def test_a_stopped_peer_is_not_fenced_until_it_has_ended(tmp_path: Path, short_fence: None) -> None:
    with other(tmp_path) as peer, memories(shm_peer.LENGTH) as (mine,):
        peer.writes_into(mine)
        peer.stop()
        with pytest.raises(TransportError, match="is it stopped") as caught:
            peer.link.close()
        assert caught.value.reason == "peer"
        peer.process.kill()
        peer.process.wait()
        peer.link.close()
        stays(mine, 0x11)


def test_memory_that_a_stopped_peer_may_write_to_is_not_taken_back(tmp_path: Path, short_fence: None) -> None:
    with other(tmp_path) as peer, memories(shm_peer.LENGTH) as (mine,):
        peer.writes_into(mine)
        peer.stop()
        with pytest.raises(TransportError, match="stopped"):
            peer.transport.unregister(mine.address)
        assert not peer.link.alive
        peer.process.kill()
        peer.process.wait()
        peer.link.close()


def test_a_peer_that_was_only_stopped_for_a_while_is_fenced_when_it_goes_on(tmp_path: Path, short_fence: None) -> None:
    with other(tmp_path) as peer, memories(shm_peer.LENGTH) as (mine,):
        peer.writes_into(mine)
        peer.stop()
        with pytest.raises(TransportError):
            peer.link.close()
        peer.process.send_signal(signal.SIGCONT)
        until(lambda: closes(peer.link))
        stays(mine, 0x11)


@pytest.fixture
def short_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped peer never answers: nothing is lost by not waiting for it."""
    monkeypatch.setattr(channel_transport, "FENCE_S", 0.3)
    monkeypatch.setattr(channel_link, "FENCE_S", 0.3)


def closes(link: Link) -> bool:
    try:
        link.close()
    except TransportError:
        return False
    return True


def test_a_peer_that_was_stopped_before_it_gave_its_memory_costs_the_deadline(tmp_path: Path) -> None:
    with other(tmp_path) as peer, memories(4096) as (mine,):
        peer.transport.register(mine.address, mine.length, mine.fd)
        peer.stop()
        peer.learn()
        with pytest.raises(TransportError) as caught:
            peer.link.submit("read", [Piece(mine.address, peer.address, 4096)], time.monotonic() + 0.2).wait()
        assert caught.value.reason == "deadline"
        peer.process.send_signal(signal.SIGCONT)
        peer.link.submit("read", [Piece(mine.address, peer.address, 4096)], soon()).wait()
        assert mine.get() == bytes([shm_peer.FILL]) * 4096


@pytest.mark.parametrize("kind", ["memfd", "heap"])
def test_a_killed_peer_ends_the_link(tmp_path: Path, kind: str) -> None:
    with other(tmp_path, kind) as peer, memories(4096) as (mine,):
        peer.transport.register(mine.address, mine.length, mine.fd)
        peer.learn()
        piece = Piece(mine.address, peer.address, 4096)
        peer.link.submit("read", [piece], soon()).wait()
        peer.process.kill()
        peer.process.wait()
        until(lambda: not peer.link.alive)
        with pytest.raises(TransportError) as caught:
            peer.link.submit("read", [piece], soon())
        assert caught.value.reason == "peer"
        peer.link.close()


def test_descriptors_and_threads_do_not_grow_with_links(pair: Pair) -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with memories(1 << 20, 1 << 20) as (mine, theirs):
        pair.near.register(mine.address, mine.length, mine.fd)
        pair.share(theirs)
        before = used()
        for _ in range(30):
            link, far = pair.join()
            link.learn(theirs.address, theirs.length, pair.far.register(theirs.address, theirs.length, theirs.fd))
            link.submit("read", [Piece(mine.address, theirs.address, 1 << 20)], soon()).wait()
            link.close()
            far.close()
        until(lambda: used() <= before)


REACH = """
import os, sys
from hicache_mooncake.transfer.shm_copy import ProcessPlace
from hicache_mooncake.transfer.transport import TransportError
pid, address = map(int, sys.argv[1:])
pidfd = os.pidfd_open(pid)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    ProcessPlace(1, address, 4096, pid, pidfd).probe()
except TransportError as error:
    print(error.reason, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_memory_of_another_users_process_is_refused_with_what_to_do() -> None:
    with memories(4096, kind="heap") as (mine,):
        program = [sys.executable, "-c", REACH, str(os.getpid()), str(mine.address)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        said = subprocess.run(program, capture_output=True, text=True, check=True, env=environment).stdout
    assert said.startswith("memory ")
    assert "share memfds" in said
    assert "ptrace_scope" in said


def test_memory_of_a_process_in_another_pid_namespace_is_refused_with_what_to_do() -> None:
    with pytest.raises(TransportError, match="pid namespace") as caught:
        ProcessPlace(1, 4096, 4096, 0, -1).probe()
    assert caught.value.reason == "memory"
