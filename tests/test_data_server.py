"""A node's data port at its end: nobody reads from, or writes to, a segment that is being unmapped."""

from __future__ import annotations

import contextlib
import logging
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
from hicache_mooncake.testing.local import FakeRank, page_hash
from hicache_mooncake.transfer import tcp
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
