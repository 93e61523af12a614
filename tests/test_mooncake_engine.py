"""The transfer engine that SGLang gets as `mooncake.engine`: its codes, its fences, what of a peer's faults a caller sees."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_mooncake.config import load_settings
from hicache_mooncake.messenger import device_memory, mooncake_engine
from hicache_mooncake.messenger.mooncake_engine import TransferEngine
from hicache_mooncake.messenger.options import options
from hicache_mooncake.messenger.pieces import Stretches, batch
from hicache_mooncake.security import ClusterKey
from hicache_mooncake.transfer import engine as core
from hicache_mooncake.transfer import engine_agree, engine_wire
from hicache_mooncake.transfer.transport import Piece, TransportError
from tests.conftest import environment
from tests.engine_far import Far

LONG_S = 60.0
SCHEMES = ("shm", "tcp")
P2P = "P2PHANDSHAKE"
MIB = 1 << 20


def until(met: Callable[[], Any]) -> Any:
    end = time.monotonic() + LONG_S
    while not (result := met()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return result


class Near:
    """An engine in this process, and memory that is registered with it."""

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp") -> None:
        self.engine = TransferEngine()
        assert self.engine.initialize(host, P2P, protocol, "") == 0
        self.session = f"{host}:{self.engine.get_rpc_port()}"
        self._kept: list[Any] = []

    def memory(self, length: int, content: bytes = b"", *, register: bool = True) -> int:
        buffer = ctypes.create_string_buffer(content, length)
        self._kept.append(buffer)
        if register:
            assert self.engine.register_memory(ctypes.addressof(buffer), length) == 0
        return ctypes.addressof(buffer)

    @property
    def transports(self) -> list[str]:
        assert self.engine._engine is not None
        return [peer.transport for peer in self.engine._engine.peers]


@pytest.fixture
def nears() -> Iterator[Callable[..., Near]]:
    made: list[Near] = []

    def make(*arguments: Any) -> Near:
        made.append(Near(*arguments))
        return made[-1]

    yield make
    for near in made:
        near.engine.close()


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp":
        monkeypatch.setenv("HICACHE_MOONCAKE_TRANSPORT", "tcp")
    return str(request.param)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_MOONCAKE_TRANSPORT", "tcp")


# --------------------------------------------------------------------------- what works


def test_bytes_go_both_ways_between_two_processes(nears: Callable[..., Near], scheme: str) -> None:
    size = 3 * MIB
    body = os.urandom(size)
    near = nears()
    with Far() as far:
        mine = near.memory(size, body)
        theirs = far.call("allocate", size)
        assert far.call("register_memory", theirs, size) == 0
        assert near.engine.transfer_sync_write(far.session, mine, theirs, size) == 0
        assert near.transports == [scheme]
        assert far.memory(theirs, size) == body

        # The other end's engine dials this one by itself.
        assert far.call("transfer_sync_write", near.session, theirs + 1, mine, 5) == 0
        assert ctypes.string_at(mine, 6) == body[1:6] + body[5:6]
        assert near.engine.transfer_sync_read(far.session, mine, theirs, size) == 0
        assert ctypes.string_at(mine, size) == body


def test_scattered_pages_of_many_regions_arrive_where_they_belong(nears: Callable[..., Near], scheme: str) -> None:
    layers, pages, page = 66, 40, 4096
    near = nears()
    with Far() as far:
        mine = [near.memory(pages * page, os.urandom(pages * page), register=False) for _ in range(layers)]
        theirs = [far.call("allocate", pages * page) for _ in range(layers)]
        assert near.engine.batch_register_memory(mine, [pages * page] * layers) == 0
        assert far.call("batch_register_memory", theirs, [pages * page] * layers) == 0
        source = np.random.default_rng(1).permutation(pages)[:20]
        target = np.sort(np.random.default_rng(2).permutation(pages)[:20])
        moves = [
            (a + int(s) * page, b + int(t) * page)
            for a, b in zip(mine, theirs, strict=True)
            for s, t in zip(source, target, strict=True)
        ]
        local, remote = (list(column) for column in zip(*moves, strict=True))
        assert near.engine.batch_transfer_sync_write(far.session, local, remote, [page] * len(moves)) == 0
        for a, b in zip(mine, theirs, strict=True):
            expected = bytearray(pages * page)
            for s, t in zip(source, target, strict=True):
                expected[t * page : (t + 1) * page] = ctypes.string_at(a + int(s) * page, page)
            assert far.memory(b, pages * page) == bytes(expected)
        assert near.engine.batch_unregister_memory(mine) == 0
        assert near.engine.batch_transfer_sync_write(far.session, local, remote, [page] * len(moves)) < 0


def test_a_hundred_thousand_pieces_are_one_call(nears: Callable[..., Near], scheme: str) -> None:
    """None of them can be merged with another."""
    count, piece = 100_000, 64
    near = nears()
    with Far() as far:
        mine, theirs = near.memory(count * piece, os.urandom(count * piece)), far.call("allocate", 2 * count * piece)
        assert far.call("register_memory", theirs, 2 * count * piece) == 0
        local = [mine + number * piece for number in range(count)]
        remote = [theirs + 2 * number * piece for number in range(count)]
        assert near.engine.batch_transfer_sync_write(far.session, local, remote, [piece] * count) == 0
        arrived = np.frombuffer(far.memory(theirs, 2 * count * piece), np.uint8).reshape(count, 2, piece)
        assert arrived[:, 0].tobytes() == ctypes.string_at(mine, count * piece)
        assert not arrived[:, 1].any()


def test_batches_that_are_not_waited_for_are_asked_after(nears: Callable[..., Near], scheme: str) -> None:
    near = nears()
    with Far() as far:
        mine, theirs = near.memory(MIB, os.urandom(MIB)), far.call("allocate", MIB)
        assert far.call("register_memory", theirs, MIB) == 0
        first = near.engine.batch_transfer_async_write(far.session, [mine], [theirs], [MIB // 2])
        second = near.engine.transfer_submit_write(far.session, mine + MIB // 2, theirs + MIB // 2, MIB // 2)
        assert 0 < first < second
        assert near.engine.get_batch_transfer_status([first]) == 0
        assert until(lambda: near.engine.transfer_check_status(second)) == 1
        assert far.memory(theirs, MIB) == ctypes.string_at(mine, MIB)
        assert near.engine.get_batch_transfer_status([first]) == -1  # it was told
        assert near.engine.transfer_check_status(second) == -1
        third = near.engine.batch_transfer_async_read(far.session, [mine], [theirs], [MIB])
        assert near.engine.get_batch_transfer_status([third]) == 0
        assert near.engine.batch_transfer_async_write(far.session, [mine], [1], [MIB]) == -1


@pytest.mark.parametrize("host", ["::1", "localhost", "0:0:0:0:0:0:0:1"])
def test_sessions_of_names_and_of_ipv6_addresses(nears: Callable[..., Near], host: str) -> None:
    near = nears()
    with Far(host) as far:
        mine, theirs = near.memory(100, b"hello"), far.call("allocate", 100)
        assert far.call("register_memory", theirs, 100) == 0
        assert near.engine.transfer_sync_write(far.session, mine, theirs, 5) == 0
        assert far.memory(theirs, 6) == b"hello\0"


def test_a_transfer_waits_for_the_news_of_memory_that_was_registered_a_moment_ago(
    nears: Callable[..., Near], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_engine, "SHARE_S", LONG_S)
    near, far = nears(), nears()
    mine, theirs = near.memory(100, b"early"), far.memory(100, register=False)
    assert near.engine.transfer_sync_write(far.session, mine, far.memory(100), 5) == 0
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(near.engine.transfer_sync_write(far.session, mine, theirs, 5)))
    thread.start()
    (peer,) = near.engine._engine.peers  # type: ignore[union-attr]
    until(lambda: peer._cond._waiters)  # type: ignore[attr-defined]
    assert far.engine.register_memory(theirs, 100) == 0
    thread.join(LONG_S)
    assert codes == [0]
    assert ctypes.string_at(theirs) == b"early"


# --------------------------------------------------------------------------- codes


def test_nothing_works_before_it_was_started_and_nothing_raises(caplog: pytest.LogCaptureFixture) -> None:
    engine = TransferEngine()
    assert engine.get_rpc_port() == -1
    assert engine.register_memory(4096, 100) == -1
    assert engine.unregister_memory(4096) == -1
    assert engine.transfer_sync_write("127.0.0.1:1", 4096, 4096, 1) == -1
    assert engine.batch_transfer_async_read("127.0.0.1:1", [4096], [4096], [1]) == -1
    assert engine.get_batch_transfer_status([7]) == -1
    assert engine.send_probe("127.0.0.1:1") == -1
    assert engine.get_engine() is engine
    assert engine.close() == 0
    assert "initialize has not been called" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("127.0.0.1", "http://here:8080", "tcp", ""), "P2PHANDSHAKE"),
        (("127.0.0.1", P2P, "efa", ""), "HICACHE_MOONCAKE_ENGINE=off"),
        (("127.0.0.1", P2P, "rdma", "mlx5 0"), "is not an RDMA device"),
        (("127.0.0.1:port", P2P, "tcp", ""), "not a port number"),
        (("", P2P, "tcp", ""), "host is missing"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_to_do(
    arguments: tuple[str, str, str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert TransferEngine().initialize(*arguments) == -1
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said in line.getMessage()


def test_settings_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "soon")
    assert TransferEngine().initialize("127.0.0.1", P2P, "tcp", "") == -1
    assert "MC_TRANSFER_TIMEOUT" in caplog.text
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "7")
    monkeypatch.setenv("HICACHE_MOONCAKE_KEY_FILE", "/nowhere")
    assert TransferEngine().initialize("127.0.0.1", P2P, "tcp", "") == -1
    assert "keygen" in caplog.text


def test_it_is_started_once(nears: Callable[..., Near], caplog: pytest.LogCaptureFixture) -> None:
    near = nears()
    port = near.engine.get_rpc_port()
    assert near.engine.initialize("127.0.0.1", P2P, "tcp", "") == -1
    assert near.engine.get_rpc_port() == port


def test_transfers_that_make_no_sense_fail_and_move_nothing(
    nears: Callable[..., Near], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_engine, "SHARE_S", 0.05)
    near, far = nears(), nears()
    mine, theirs = near.memory(100, b"x" * 100), far.memory(100)
    write = near.engine.batch_transfer_sync_write
    assert write(far.session, [], [], []) == 0
    assert write(far.session, [mine], [theirs], [0]) == 0
    assert write(far.session, [mine, mine], [theirs], [1]) < 0
    assert write(far.session, [mine], [theirs], [-1]) < 0
    assert write(far.session, [mine], [theirs], [101]) < 0
    assert write(far.session, [mine, mine], [theirs, theirs + 99], [1, 2]) < 0
    assert write(far.session, [1 << 70], [theirs], [1]) < 0
    assert write(far.session, ["here"], [theirs], [1]) < 0
    assert write("127.0.0.1", [mine], [theirs], [1]) < 0
    assert write("", [mine], [theirs], [1]) < 0
    assert ctypes.string_at(theirs, 100) == bytes(100)
    assert write(far.session, [mine], [theirs], [100]) == 0


def test_registering_is_all_or_nothing(nears: Callable[..., Near]) -> None:
    near = nears()
    memory = near.memory(300, register=False)
    engine = near.engine
    assert engine.batch_register_memory([memory, memory + 50], [100, 100]) == -1  # they overlap
    assert engine.batch_register_memory([memory, memory + 100], [100]) == -1
    assert engine.register_memory(memory, 0) == -1
    assert engine.batch_register_memory([memory, memory + 100], [100, 100]) == 0
    assert engine.register_memory(memory, 100) == -1
    assert engine.batch_unregister_memory([memory, memory + 200, memory + 100]) == -1
    assert engine.batch_unregister_memory([memory, memory + 100]) == -1
    assert engine.batch_register_memory([memory, memory + 50], [50, 250]) == 0


def test_memory_that_is_not_registered_any_more_is_not_written_to(
    nears: Callable[..., Near], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_engine, "SHARE_S", 0.05)
    near = nears()
    with Far() as far:
        mine, theirs = near.memory(100, b"x" * 100), far.call("allocate", 100)
        assert far.call("register_memory", theirs, 100) == 0
        assert near.engine.transfer_sync_write(far.session, mine, theirs, 5) == 0
        assert far.call("unregister_memory", theirs) == 0
        assert near.engine.transfer_sync_write(far.session, mine, theirs, 100) == -1
        assert far.memory(theirs, 100) == b"xxxxx" + bytes(95)
        assert far.call("register_memory", theirs, 100) == 0
        monkeypatch.setattr(mooncake_engine, "SHARE_S", LONG_S)
        assert near.engine.transfer_sync_write(far.session, mine, theirs, 100) == 0
        assert far.memory(theirs, 100) == b"x" * 100


# --------------------------------------------------------------------------- pieces


def test_neighbours_are_merged_but_never_across_the_end_of_a_region() -> None:
    here, there = Stretches([(1000, 100), (1100, 100)]), Stretches([(5000, 1000), (6000, 1000)])
    assert batch([1000, 1010, 1030], [5000, 5010, 5040], [10, 20, 5], here, there) == [
        Piece(1000, 5000, 30),
        Piece(1030, 5040, 5),
    ]
    assert batch([1090, 1100, 1110], [5000, 5010, 5020], [10, 10, 10], here, there) == [
        Piece(1090, 5000, 10),
        Piece(1100, 5010, 20),
    ]
    assert batch([1000, 1010], [5990, 6000], [10, 10], here, there) == [Piece(1000, 5990, 10), Piece(1010, 6000, 10)]
    assert batch([1000, 7, 1010], [5000, 7, 5010], [10, 0, 10], here, there) == [Piece(1000, 5000, 20)]
    with pytest.raises(TransportError) as caught:
        batch([1000, 1095], [5000, 5500], [10, 10], here, there)
    assert (caught.value.reason, "0x447" in str(caught.value)) == ("bounds", True)


# --------------------------------------------------------------------------- faults of a peer


def _timeout(engine: TransferEngine, seconds: float) -> None:
    engine._transfer_timeout_s = seconds


def _linked(near: Near, far: Far, size: int) -> tuple[int, int]:
    """A link is there, and the peer's memory is full of zeros."""
    mine, theirs = near.memory(size, b"\xaa" * size), far.call("allocate", size)
    assert far.call("register_memory", theirs, size) == 0
    assert near.engine.transfer_sync_read(far.session, near.memory(8), theirs, 8) == 0
    return mine, theirs


def test_of_a_write_to_a_stopped_peer_nothing_lands_after_it_has_failed(
    nears: Callable[..., Near], tcp: None, caplog: pytest.LogCaptureFixture
) -> None:
    near, size = nears(), 32 * MIB
    with Far() as far:
        mine, theirs = _linked(near, far, size)
        _timeout(near.engine, 0.5)
        far.stop()
        assert near.engine.transfer_sync_write(far.session, mine, theirs, size) == -1
        assert far.memory(theirs, size) == bytes(size)
        assert "is it stopped" in caplog.text
        far.go_on()
        until(lambda: far.call("peers") == [])
        assert far.memory(theirs, size) == bytes(size)
        # It is a peer like any other again.
        _timeout(near.engine, LONG_S)
        until(lambda: near.engine.send_probe(far.session) == 0)
        assert near.engine.transfer_sync_write(far.session, mine, theirs, size) == 0
        assert far.memory(theirs, size) == b"\xaa" * size


def test_of_a_write_to_a_slow_peer_nothing_lands_after_it_has_failed(
    nears: Callable[..., Near], tcp: None, caplog: pytest.LogCaptureFixture
) -> None:
    near, size = nears(), 64 * MIB
    with Far() as far:
        mine, theirs = _linked(near, far, size)
        far.call("slow", 0.1)
        _timeout(near.engine, 1.0)
        assert near.engine.transfer_sync_write(far.session, mine, theirs, size) == -1
        landed = far.memory(theirs, size)
        assert landed != b"\xaa" * size
        assert "is it stopped" not in caplog.text, "the peer has confirmed"
        assert far.call("peers") == []
        assert far.memory(theirs, size) == landed


def test_a_stopped_peer_delays_nobody_else(nears: Callable[..., Near], tcp: None) -> None:
    near = nears()
    with Far() as stopped, Far() as fine:
        lost, lost_there = _linked(near, stopped, MIB * 32)
        mine, theirs = _linked(near, fine, MIB)
        stopped.stop()
        _timeout(near.engine, LONG_S)
        codes: list[int] = []
        waiting = [
            threading.Thread(
                target=lambda: codes.append(near.engine.transfer_sync_write(stopped.session, lost, lost_there, MIB * 32))
            )
            for _ in range(6)
        ]
        for thread in waiting:
            thread.start()
        done = [near.engine.transfer_sync_write(fine.session, mine, theirs, MIB) for _ in range(20)]
        assert done == [0] * 20
        assert codes == []
        stopped.go_on()
        for thread in waiting:
            thread.join(LONG_S)
        assert codes == [0] * 6
        assert stopped.memory(lost_there, MIB * 32) == b"\xaa" * (MIB * 32)


def test_many_threads_write_to_the_same_and_to_different_peers(nears: Callable[..., Near], scheme: str) -> None:
    near, count, size = nears(), 12, 256 << 10
    with Far() as first, Far() as second:
        fars = [first, second]
        theirs = [far.call("allocate", count * size) for far in fars]
        for far, address in zip(fars, theirs, strict=True):
            assert far.call("register_memory", address, count * size) == 0
        body = os.urandom(count * size)
        mine = near.memory(count * size, body)
        codes: list[int] = []

        def write(number: int) -> None:
            far, address = fars[number % 2], theirs[number % 2]
            for part in range(count):
                at = part * size
                codes.append(near.engine.transfer_sync_write(far.session, mine + at, address + at, size))

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert codes == [0] * (8 * count)
        for far, address in zip(fars, theirs, strict=True):
            assert far.memory(address, count * size) == body


def test_a_dead_peer_fails_once_and_is_then_left_alone_until_it_is_back(
    nears: Callable[..., Near], scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    near, size = nears(), MIB
    with Far() as far:
        mine, theirs = _linked(near, far, size)
        session, port = far.session, far.session.rpartition(":")[2]
    assert near.engine.transfer_sync_write(session, mine, theirs, size) == -1
    assert near.engine.send_probe(session) == -1
    dialled: list[str] = []
    meet = core.TransferEngine._meet
    monkeypatch.setattr(core.TransferEngine, "_meet", lambda self, *rest: dialled.append(rest[0]) or meet(self, *rest))
    monkeypatch.setattr(core.Breaker, "admit", lambda self: core.Admission.NO)
    assert near.engine.transfer_sync_write(session, mine, theirs, size) == -1
    assert dialled == []
    monkeypatch.undo()
    if scheme == "tcp":
        monkeypatch.setenv("HICACHE_MOONCAKE_TRANSPORT", "tcp")
    with Far(f"127.0.0.1:{port}") as again:
        assert again.session == session
        theirs = again.call("allocate", size)
        assert again.call("register_memory", theirs, size) == 0
        assert near.engine.send_probe(session) == 0
        assert near.engine.transfer_sync_write(session, mine, theirs, size) == 0
        assert again.memory(theirs, size) == b"\xaa" * size


def test_a_link_that_ended_while_it_was_idle_costs_no_transfer(
    nears: Callable[..., Near], tcp: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = nears(), nears()
    mine, theirs = near.memory(100, b"idle"), far.memory(100)
    assert near.engine.transfer_sync_write(far.session, mine, theirs, 4) == 0
    (peer,) = near.engine._engine.peers  # type: ignore[union-attr]
    (back,) = far.engine._engine.peers  # type: ignore[union-attr]
    back._link.abort()
    until(lambda: not peer.alive)
    assert near.engine.transfer_sync_write(far.session, mine, theirs, 4) == 0

    (peer,) = near.engine._engine.peers  # type: ignore[union-attr]
    connect = near.engine._engine.connect  # type: ignore[union-attr]
    peer._link.abort()
    answers = iter([peer])  # it is taken before its end is seen, once
    monkeypatch.setattr(near.engine._engine, "connect", lambda *rest: next(answers, None) or connect(*rest))
    assert near.engine.transfer_sync_write(far.session, mine, theirs, 4) == 0
    assert list(answers) == []


def test_a_probe_is_answered_in_time_or_not_at_all(nears: Callable[..., Near]) -> None:
    near = nears()
    with Far() as far:
        assert near.engine.send_probe(far.session) == 0
        far.stop()
        began = time.monotonic()
        assert near.engine.send_probe(far.session) == -1
        assert time.monotonic() - began < 30
        far.go_on()
        until(lambda: near.engine.send_probe(far.session) == 0)
    assert near.engine.send_probe(far.session) == -1
    assert near.engine.send_probe("nonsense") == -1


# --------------------------------------------------------------------------- who may be a peer


def test_with_a_key_only_who_has_it_is_a_peer(
    nears: Callable[..., Near], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("key", "other"):
        ClusterKey.generate().save(str(tmp_path / name))
    stranger = nears()
    monkeypatch.setenv("HICACHE_MOONCAKE_KEY_FILE", str(tmp_path / "other"))
    other = nears()
    monkeypatch.setenv("HICACHE_MOONCAKE_KEY_FILE", str(tmp_path / "key"))
    member, far = nears(), nears()
    theirs = far.memory(100)
    for near, code in ((member, 0), (other, -1), (stranger, -1)):
        assert near.engine.transfer_sync_write(far.session, near.memory(100, b"me"), theirs, 2) == code
        assert near.engine.send_probe(far.session) == code
    assert caplog.text.count("key_file") >= 2
    assert stranger.engine.transfer_sync_write(other.session, stranger.memory(10), theirs, 2) == -1


def test_without_a_key_processes_of_this_host_are_peers_by_any_of_its_addresses(
    nears: Callable[..., Near], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hicache_mooncake.transfer import addresses

    own = [row.address for row in addresses.table() if row.address and ":" not in row.address]
    for host in {own[0], own[-1]}:
        near, far = nears(host), nears(host)
        assert near.engine.transfer_sync_write(far.session, near.memory(10, b"hi"), far.memory(10), 2) == 0
    monkeypatch.setattr(core, "is_own", lambda host: False)
    assert near.engine.transfer_sync_write("192.0.2.77:5000", near.memory(10), 4096, 2) == -1
    assert "key_file" in caplog.text
    monkeypatch.undo()
    caplog.clear()
    monkeypatch.setattr(engine_wire, "same_host", lambda sock: False)
    late = nears(host)
    assert late.engine.transfer_sync_write(far.session, late.memory(10), 4096, 2) == -1
    assert "has no key" in caplog.text


def test_without_a_key_anybody_may_be_let_in(nears: Callable[..., Near], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_MOONCAKE_ALLOW_UNAUTHENTICATED", "true")
    monkeypatch.setattr(engine_wire, "same_host", lambda sock: False)
    near, far = nears(), nears()
    assert near.engine.transfer_sync_write(far.session, near.memory(10, b"hi"), far.memory(10), 2) == 0


# --------------------------------------------------------------------------- transports


def _options(protocol: str = "tcp", host: str = "10.0.0.5", devices: str = "", **environ: str) -> Any:
    settings, _ = load_settings(environ=environ, explicit={"node": "off"})
    return options(host, P2P, protocol, devices, settings, environ)


def test_the_protocol_decides_which_transports_are_tried() -> None:
    assert _options().transports == ("shm", "tcp")
    assert _options("rdma").transports == ("rdma",)
    assert _options("rdma", MC_FORCE_TCP="1").transports == ("shm", "tcp")
    assert _options("rdma", MC_FORCE_TCP="0").transports == ("rdma",)
    assert _options("rdma", HICACHE_MOONCAKE_TRANSPORT="tcp").transports == ("tcp",)
    assert _options("rdma", devices="mlx5_0, mlx5_1").devices == ("mlx5_0", "mlx5_1")
    assert _options("rdma", HICACHE_MOONCAKE_RDMA_DEVICES="mlx5_2").devices == ("mlx5_2",)
    assert _options("tcp", devices="mlx5_0").devices == ()


def test_it_listens_on_the_address_that_peers_are_told() -> None:
    assert _options(host="10.0.0.5").listen == ("10.0.0.5:0", "0.0.0.0:0")
    assert _options(host="10.0.0.5:700").listen == ("10.0.0.5:700", "0.0.0.0:700")
    assert _options(host="fd00::5").listen == ("[fd00::5]:0", "[::]:0")
    assert _options(host="[fd00::5]:700").listen == ("[fd00::5]:700", "[::]:700")
    assert _options(host="prefill-0").listen == ("[::]:0", "0.0.0.0:0")
    assert _options(host="prefill-0").host == "prefill-0"


def test_an_address_that_is_translated_to_this_host_is_told_and_all_are_listened_on(nears: Callable[..., Near]) -> None:
    near = nears("192.0.2.200")
    assert near.engine._engine.address == f"mooncake@{near.session}"  # type: ignore[union-attr]
    far = nears()
    assert far.engine.send_probe(f"127.0.0.1:{near.engine.get_rpc_port()}") == 0


def test_where_rdma_was_asked_for_and_is_not_there_one_line_says_so(
    nears: Callable[..., Near], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(name: str, options: Any) -> Any:
        if name == "verbs":
            raise TransportError("unavailable", "no such card")
        return open_transport(name, options)

    open_transport = core.open_transport
    monkeypatch.setattr(core, "open_transport", opened)
    near, far = nears("127.0.0.1", "rdma"), nears("127.0.0.1", "rdma")
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 2, "one for each engine"
    assert "no such card" in warned[0]
    assert "MOONCAKE_PROTOCOL=tcp" in warned[0]
    assert near.engine.transfer_sync_write(far.session, near.memory(10), far.memory(10), 10) == 0
    assert near.transports == ["shm"]


@pytest.mark.parametrize("end", ["near", "far"])
def test_where_processes_may_not_reach_into_each_other_tcp_is_agreed_on_at_once(
    nears: Callable[..., Near], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    near, far = nears(), nears()
    answers = iter(["Operation not permitted"] if end == "near" else ["", "Operation not permitted"])
    monkeypatch.setattr(engine_agree, "unreachable", lambda *_: next(answers))
    assert near.engine.transfer_sync_write(far.session, near.memory(10, b"hi"), far.memory(10), 2) == 0
    assert near.transports == ["tcp"]
    (peer,) = near.engine._engine.report().peers  # type: ignore[union-attr]
    assert "Operation not permitted" in peer.why


UNPRIVILEGED = """
import ctypes, os, sys
from hicache_mooncake.messenger.mooncake_engine import TransferEngine
engine, memory = TransferEngine(), ctypes.create_string_buffer(b"secret", 100)
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(ctypes.addressof(memory), 100) == 0
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
ctypes.CDLL(None).prctl(4, int(sys.argv[1]))  # PR_SET_DUMPABLE
print(engine.get_rpc_port(), ctypes.addressof(memory), flush=True)
port, address = map(int, sys.stdin.readline().split() or [0, 0])
if port:
    print(engine.transfer_sync_write(f"127.0.0.1:{port}", ctypes.addressof(memory), address, 100))
    print(*(peer.transport for peer in engine._engine.peers), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(("dumpable", "expected"), [("1", "shm"), ("0", "tcp")])
def test_unprivileged_processes_share_anonymous_memory_unless_the_kernel_forbids_it(dumpable: str, expected: str) -> None:
    def start(how: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", UNPRIVILEGED, how],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with start(dumpable) as far, start("1") as near:
        assert far.stdout is not None
        assert near.stdout is not None
        assert near.stdin is not None
        where = far.stdout.readline()
        near.stdout.readline()
        near.stdin.write(where)
        near.stdin.flush()
        assert near.stdout.readline().strip() == "0"
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        forbidden = scope.exists() and scope.read_text().strip() != "0"
        assert near.stdout.readline().strip() == ("tcp" if forbidden else expected)
        near.communicate("\n")
        far.communicate("\n\n")


ENDING = """
import ctypes
from hicache_mooncake.messenger.mooncake_engine import TransferEngine
engine, other, memory = TransferEngine(), TransferEngine(), ctypes.create_string_buffer(100)
for each in (engine, other):
    assert each.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
here, there = ctypes.addressof(memory), ctypes.addressof(memory) + 50
assert engine.register_memory(here, 50) == other.register_memory(there, 50) == 0
assert engine.transfer_sync_write(f"127.0.0.1:{other.get_rpc_port()}", here, there, 50) == 0
assert engine._engine.peers[0]._closing.acquire()
"""


def test_a_process_ends_whatever_locks_the_engines_threads_hold() -> None:
    """At its end they do not run any more, and would never give them back."""
    subprocess.run([sys.executable, "-c", ENDING], env=environment(), check=True, timeout=60)


# --------------------------------------------------------------------------- memory of GPUs


def _driver(memory: dict[int, tuple[int, int]]) -> Any:
    """As libcuda answers for addresses: (memory type, managed)."""

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong)
    def ask(into: int, attribute: int, address: int) -> int:
        if address not in memory:
            return 1  # CUDA_ERROR_INVALID_VALUE
        answer = memory[address][{2: 0, 8: 1}[attribute]]
        ctypes.c_uint.from_address(into).value = answer
        return 0

    return SimpleNamespace(cuPointerGetAttribute=ask)


def test_what_the_driver_says_of_an_address() -> None:
    driver = _driver({0x1000: (2, 0), 0x2000: (1, 0), 0x3000: (2, 1)})
    assert device_memory.is_device(0x1000, driver)
    assert not device_memory.is_device(0x2000, driver)
    assert not device_memory.is_device(0x3000, driver), "managed memory is the CPU's, too"
    assert not device_memory.is_device(0x4000, driver)
    assert not device_memory.is_device(0x1000, None)


def test_the_driver_is_the_one_that_the_process_has_loaded(tmp_path: Path) -> None:
    libm = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so" in line)
    (tmp_path / "libcuda.so.1").symlink_to(libm)
    maps = tmp_path / "maps"
    maps.write_text(f"00400000-00452000 r-xp 00000000 08:02 1 {libm}\n7f00-7f01 rw-p 0 00:00 0\n")
    assert device_memory.driver(str(maps)) is None
    maps.write_text(f"00400000-00452000 r-xp 00000000 08:02 1 {tmp_path}/libcuda.so.1\n")
    assert device_memory.driver(str(maps)) is not None
    maps.write_text("00400000-00452000 r-xp 00000000 08:02 1 /nowhere/libcuda.so.1\n")
    assert device_memory.driver(str(maps)) is None


def test_memory_of_a_gpu_is_refused_without_rdma_and_never_touched(
    nears: Callable[..., Near], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = 0x7F00_0000_0000  # nothing is mapped there: to touch it would be a crash
    monkeypatch.setattr(device_memory, "driver", lambda: _driver({address: (2, 0)}))
    near = nears()
    mine = near.memory(100)
    assert near.engine.register_memory(address, 4096) == -1
    assert near.engine.batch_register_memory([near.memory(100, register=False), address], [100, 4096]) == -1
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    for word in ("nvidia-peermem", "HICACHE_MOONCAKE_ENGINE=off", "doctor"):
        assert word in line
    assert near.engine.transfer_sync_write("127.0.0.1:1", address, mine, 10) == -1


# --------------------------------------------------------------------------- as a module


def _run(program: str, *paths: Path) -> str:
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), env["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


INSTALL = "from hicache_mooncake.messenger.install import install; install(); install(); import sys\n"


def test_the_module_is_there_once_it_is_asked_for_and_nothing_else_of_mooncake() -> None:
    output = _run(
        INSTALL + "assert 'hicache_mooncake.messenger.mooncake_engine' not in sys.modules and 'numpy' not in sys.modules\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('mooncake.engine') is not None\n"
        "from mooncake.engine import TransferEngine\n"
        "import mooncake.engine\n"
        "print(TransferEngine.__module__, [name for name in dir(mooncake.engine) if not name.startswith('_')])\n"
        "for name in ('mooncake.store', 'mooncake.pg', 'mooncake.allocator'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    assert output.splitlines() == [
        "hicache_mooncake.messenger.mooncake_engine ['TransferEngine']",
        *(f"No module named 'mooncake.{name}'" for name in ("store", "pg", "allocator")),
    ]


def test_of_a_mooncake_that_is_there_only_the_engine_is_replaced(tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text("TransferEngine = 'theirs'")
    (package / "store.py").write_text("store = 'theirs'")
    program = "from mooncake.engine import TransferEngine; from mooncake.store import store; print(TransferEngine, store)\n"
    assert _run(program, tmp_path) == "theirs theirs\n"
    assert _run(program + INSTALL + program, tmp_path).splitlines()[1].endswith("TransferEngine'> theirs")
