"""The peers of `make bench`: what they are asked and answer, who is skipped and why, and what pages of real models are."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from rich.progress import Progress

from benchmarks import cold, rival
from benchmarks.geometry import PRESETS, Geometry, Part, attention, gated_delta, latent, of_rank
from benchmarks.harness import Bench, Memory
from benchmarks.models import Prefix
from benchmarks.redis_pool import Client
from hicache_mooncake import protocol as p


@contextlib.contextmanager
def server(talk: Callable[[socket.socket], None]) -> Iterator[Client]:
    """A client of a server that holds this talk."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                talk(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Client(listener.getsockname()[1])
        thread.join(60)


def receive(sock: socket.socket, length: int) -> bytes:
    return sock.recv(length, socket.MSG_WAITALL)


def test_a_batch_is_one_pipeline_of_redis_commands() -> None:
    page = os.urandom(4 << 20)  # more than a socket takes at once
    wanted = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4194304\r\n" + page + b"\r\n"
    seen: list[bytes] = []

    def talk(sock: socket.socket) -> None:
        seen.append(receive(sock, 2 * len(wanted)))
        sock.sendall(b"+OK\r\n+OK\r\n")
        seen.append(receive(sock, 2 * len(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n")))
        sock.sendall((b"$4194304\r\n" + page + b"\r\n") * 2)

    into = bytearray(2 * len(page))
    with server(talk) as client:
        client.put(["k", "k"], [memoryview(page)] * 2)
        client.get(["k", "k"], [memoryview(into)[: len(page)], memoryview(into)[len(page) :]])
    assert seen == [2 * wanted, 2 * b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"]
    assert into == 2 * page


def test_a_page_that_a_server_does_not_have_ends_the_measurement() -> None:
    def talk(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(b"$-1\r\n")

    with server(talk) as client, pytest.raises(SystemExit, match=r"\$-1"):
        client.get(["k"], [memoryview(bytearray(8))])


def test_stores_that_are_not_installed_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with Progress(disable=True) as progress:
        bench = Bench(progress, 1)
        with rival.stores(bench) as found, rival.over_tcp(bench) as named:
            assert [each.name for each in found] == ["dict, pickled"]
            assert named == []
            (figures,) = (bench.interleave(each.contenders(64 << 10, 8), "") for each in found)
    assert all(rate > 0 for rates in figures.values() for rate in rates)
    assert bench.skipped == {
        "Redis": "no redis-server in PATH",
        "Valkey": "no valkey-server in PATH",
        "Mooncake": "no --mooncake PYTHON that has mooncake-transfer-engine-non-cuda",
        "LMCache": "no --lmcache PYTHON that has lmcache",
    }


@pytest.mark.parametrize("program", ["redis-server", "valkey-server"])
def test_a_real_server_takes_and_gives_pages(program: str) -> None:
    if not (path := shutil.which(program)):
        pytest.skip(f"no {program} in PATH")
    with contextlib.closing(rival.RedisLike("Redis", path)) as peer:
        for size in (64 << 10, 4 << 20):
            assert peer.rate("put", size, 8) > 0
            assert peer.rate("get", size, 8) > 0


def test_pages_of_models_are_as_large_as_their_layers_heads_and_dtypes_say() -> None:
    sizes = {name: {part.name: part.size for part in preset.parts} for name, preset in PRESETS.items()}
    assert sizes == {
        "llama-3-70b": {"kv": 64 * 80 * 2 * 1 * 128 * 2},
        "qwen3-32b": {"kv": 64 * 64 * 2 * 2 * 128 * 2},
        "deepseek-v3": {"latent": 64 * 61 * 576 * 2},
        "gpt-oss-120b": {"kv": 64 * 18 * 2 * 8 * 64 * 2, "window": 64 * 18 * 2 * 8 * 64 * 2},
        "qwen3-next": {"kv": 64 * 12 * 2 * 1 * 256 * 2, "state": 36 * (2048 * 3 * 2 + 8 * 128 * 128 * 4)},
    }
    assert sizes["llama-3-70b"]["kv"] == 2_621_440
    assert sizes["deepseek-v3"]["latent"] == 4_497_408
    assert sizes["qwen3-next"]["state"] == 19_316_736


def test_a_rank_has_its_share_of_the_heads_and_at_least_one() -> None:
    assert [of_rank(8, ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]
    with pytest.raises(ValueError, match="cannot be cut"):
        of_rank(8, 3)
    assert attention("kv", 1, 2, 64, ranks=8).size == attention("kv", 1, 2, 64, ranks=2).size


def test_parts_are_contiguous_runs_and_windows_and_states_belong_to_a_prefix_s_end() -> None:
    kv, window = PRESETS["gpt-oss-120b"].parts
    assert (len(kv.runs), len(latent(61, 512, 64).runs)) == (2, 1)
    assert [window.pages(prefix) for prefix in (1, 2, 128)] == [1, 2, 2]
    state = gated_delta(36, 16, 32, 128, kernel=4, ranks=1)
    assert (state.pages(128), kv.pages(128)) == (1, 128)
    assert PRESETS["gpt-oss-120b"].size(128) == 128 * kv.size + 2 * window.size


class Recorder:
    """In the place of a rank: what it is asked to move."""

    def __init__(self) -> None:
        self.moved: list[tuple[str, int, int, list[p.Run]]] = []
        self.client = self

    def move(self, op: str, _namespace: bytes, hashes: bytes, page: int, runs: list[p.Run]) -> float:
        self.moved.append((op, len(hashes) // p.HASH_BYTES, page, runs))
        return 1.0

    def clear(self, _namespace: bytes) -> None:
        pass


def test_a_prefix_fills_its_memory_without_a_gap_or_an_overlap() -> None:
    geometry = Geometry("some", (Part("kv", (4096, 8192)), Part("window", (1 << 20,), last=2)))
    memory, recorder = Memory(geometry.size(16) + (1 << 20) & -(1 << 20)), Recorder()
    prefix = Prefix(geometry, memory, cast(Any, recorder), pages=16)
    assert prefix.load(0) > 0
    assert [(op, count, page) for op, count, page, _ in recorder.moved] == [
        ("store", 16, 12288),
        ("store", 2, 1 << 20),
        ("load", 16, 12288),
        ("load", 2, 1 << 20),
    ]
    places = sorted(
        (run.address + at * run.stride, run.length)
        for _, count, _, runs in recorder.moved[:2]
        for run in runs
        for at in range(count)
    )
    ends = [memory.address, *(at + length for at, length in places)]
    assert [at for at, _ in places] == ends[:-1]
    assert ends[-1] == memory.address + prefix.length == memory.address + geometry.size(16)
    memory.close()


def test_a_peer_that_is_installed_and_does_not_start_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold.importlib.util, "find_spec", lambda _: None)
    with Progress(disable=True) as progress:
        bench = Bench(progress, 1, nixl=sys.executable)  # its script is not there
        monkeypatch.setattr(cold, "ROOT", tmp_path)
        with cold._rivals(bench, cold.LOADS[0], tmp_path / "load", rounds=1) as rivals:
            assert rivals == []
    assert "run it by hand" in bench.skipped["NIXL POSIX"]
