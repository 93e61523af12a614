"""A node's data port at its end: nobody reads from, or writes to, a segment that is being unmapped."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_mooncake import protocol as p
from hicache_mooncake.config import load_settings
from hicache_mooncake.node import data_server
from hicache_mooncake.node.service import Node
from hicache_mooncake.security import ClusterKey
from hicache_mooncake.testing.local import FakeRank, page_hash, pattern
from hicache_mooncake.transfer import tcp
from tests.cold import body, content, hashes
from tests.conftest import wait_until

NS = b"n" * 16


def test_readers_that_come_back_at_once_do_not_hold_up_the_end_nor_read_what_is_unmapped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"socket": str(tmp_path / "node.sock"), "dram": "16MiB", "listen": "127.0.0.1:0", "metrics": "", "name": "n"}
    settings = load_settings({}, {}, options)[0]
    node = Node(settings)
    before = set(threading.enumerate())
    node.start()
    rank = FakeRank(settings)
    pages = [page_hash(number) for number in range(8)]
    assert rank.store(NS, pages).ok == b"\x01" * 8
    host, _, port = node.data_address.rpartition(":")
    peer = p.Peer("n", node.incarnation, host, int(port))
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError, p.ProtocolError):
                connection = tcp.PeerConnection(peer, time.monotonic() + 5)
                with contextlib.closing(connection):
                    while not ended.is_set():
                        connection.request(p.Fetch(2, "r", NS, b"".join(pages), rank.page_bytes, 1), time.monotonic() + 5)
                        held = connection.reply(time.monotonic() + 5).status.count(p.LOCAL)
                        _skip(connection.source(time.monotonic() + 5), held * rank.page_bytes)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        wait_until(lambda: node.data.sent_pages > 100, 30, "they read")
        rank.close()
        with caplog.at_level(logging.WARNING):
            node.stop()
        assert node.data.report()["remote_readers"] == 0
        with pytest.raises(ConnectionRefusedError):
            tcp.PeerConnection(peer, time.monotonic() + 1)
    finally:
        ended.set()
        for reader in readers:
            reader.join()

    def left() -> set[str]:
        return {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("data-")}

    wait_until(lambda: not left(), 30, "its threads have ended")
    assert not [record.getMessage() for record in caplog.records if "internal error" in record.getMessage()]


def _skip(source: Callable[[list[memoryview]], int], count: int) -> None:
    into = memoryview(bytearray(1 << 20))
    while count:
        got = source([into[: min(count, len(into))]])
        if not got:
            raise ConnectionError("closed")
        count -= got


def test_strangers_who_prove_nothing_take_no_place_of_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_server, "_MAX_UNPROVEN", 3)
    monkeypatch.setattr(data_server, "HANDSHAKE_S", 4.0)
    ClusterKey.generate().save(str(tmp_path / "key"))
    options = {"socket": str(tmp_path / "node.sock"), "dram": "16MiB", "listen": "127.0.0.1:0", "metrics": "", "name": "n"}
    node = Node(load_settings({}, {}, options | {"key_file": str(tmp_path / "key")})[0])
    node.start()
    host, _, port = node.data_address.rpartition(":")
    peer = p.Peer("n", node.incarnation, host, int(port))

    def member() -> tcp.PeerConnection:
        return tcp.PeerConnection(peer, time.monotonic() + 60, node.data_key, "r")

    try:
        with contextlib.closing(member()) as connection, contextlib.ExitStack() as strangers:
            for _ in range(3):
                strangers.enter_context(socket.create_connection((host, int(port))))
            wait_until(lambda: node.data.report()["remote_readers"] == 4, 30, "all are let in")
            with pytest.raises(tcp.PeerFull, match="takes no more readers now"):
                member()
            connection.request(p.Fetch(2, "r", NS, page_hash(1), 64, 1), time.monotonic() + 10)
            assert connection.reply(time.monotonic() + 10).status == bytes([p.MISS])
            wait_until(lambda: node.data.report()["remote_readers"] == 1, 60, "strangers are gone")
            member().close()
    finally:
        node.stop()


def test_a_node_that_has_enough_readers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closed the connection without a word, and was taken for broken."""
    monkeypatch.setattr(data_server, "_MAX_READERS", 1)
    options = {"socket": str(tmp_path / "node.sock"), "dram": "16MiB", "listen": "127.0.0.1:0", "metrics": "", "name": "n"}
    node = Node(load_settings({}, {}, options)[0])
    node.start()
    host, _, port = node.data_address.rpartition(":")
    peer = p.Peer("n", node.incarnation, host, int(port))
    fetch = p.Fetch(2, "r", NS, page_hash(1), 64, 1)
    try:
        with contextlib.closing(tcp.PeerConnection(peer, time.monotonic() + 30)) as first:
            first.request(fetch, time.monotonic() + 30)
            assert first.reply(time.monotonic() + 30).status == bytes([p.MISS])
            for _ in range(20):
                with contextlib.closing(tcp.PeerConnection(peer, time.monotonic() + 30)) as second:
                    with contextlib.suppress(ConnectionError):  # it may have closed already
                        second.request(fetch, time.monotonic() + 30)
                    with pytest.raises(tcp.PeerFull):
                        second.reply(time.monotonic() + 30)
        assert node.data.report()["remote_refused_readers"] == 20
    finally:
        node.stop()


def test_a_disk_that_hangs_keeps_no_other_host_from_what_is_in_dram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"socket": str(tmp_path / "node.sock"), "dram": "16MiB", "listen": "127.0.0.1:0", "metrics": "", "name": "n"}
    options |= {"cold": str(tmp_path / "cold"), "cold_bytes": "64MiB", "cold_floor": "0"}
    settings = load_settings({}, {}, options)[0]
    node = Node(settings)
    node.start()
    rank = FakeRank(settings)
    size = rank.page_bytes
    warm, cold = [page_hash(number) for number in range(4)], hashes(4)
    assert rank.store(NS, warm).ok == b"\x01" * 4
    assert node.cold is not None
    assert all(node.cold.write([body(each, size) for each in cold], node.cold.clears))
    fd, preadv, go_on = node.cold._file.fd, os.preadv, threading.Event()

    def hanging(of: int, views: list[memoryview], offset: int) -> int:
        assert of != fd or go_on.wait(60)
        return preadv(of, views, offset)

    host, _, port = node.data_address.rpartition(":")
    peer = p.Peer("n", node.incarnation, host, int(port))
    pages = [page for pair in zip(cold, warm, strict=True) for page in pair]

    def fetched(within_s: float) -> list[bytes | None]:
        with contextlib.closing(tcp.PeerConnection(peer, time.monotonic() + 30)) as connection:
            connection.request(p.Fetch(2, "r", NS, b"".join(pages), size, 1), time.monotonic() + 30)
            until = time.monotonic() + within_s
            status = connection.reply(until).status
            source = connection.source(until)
            return [_body(source, size) if each == p.LOCAL else None for each in status]

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", hanging)
            for _ in range(3):  # the answer has ten seconds
                assert fetched(within_s=8) == [pattern(page, size) if page in warm else None for page in pages]
            go_on.set()
        tier = node.cold
        wait_until(lambda: tier.reader.stuck == 0, 30, "the disk answers")
        assert fetched(within_s=30) == [pattern(page, size) if page in warm else content(page, size) for page in pages]
    finally:
        go_on.set()
        rank.close()
        node.stop()


def _body(source: Callable[[list[memoryview]], int], size: int) -> bytes:
    into = memoryview(bytearray(size))
    left = into
    while left:
        left = left[source([left]) :]
    return bytes(into)
