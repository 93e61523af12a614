"""The helpers that start real servers: what they promise is tried on process trees that are cheaper than SGLang."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from hicache_mooncake.testing.sglang_cpu import servers
from hicache_mooncake.testing.sglang_cpu.pd import ask_pair
from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess, ProcessError, free_port, group_is_alive, stop_all
from hicache_mooncake.testing.sglang_cpu.servers import SglangServer

# A parent, a child, a child in a session of its own and an orphan of a dead parent, as badly behaved as they come: all but
# the parent ignore SIGTERM. Each writes its pid.
TREE = """
import os, signal, subprocess, sys, time
out, stubborn = sys.argv[1], sys.argv[2] == "stubborn"
def note(name):
    with open(os.path.join(out, name + ".tmp"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(out, name + ".tmp"), os.path.join(out, name))
def forever(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(name)
    while True:
        time.sleep(60)
if os.fork() == 0:
    forever("child")
if os.fork() == 0:
    os.setsid()
    forever("session")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        forever("orphan")
    os._exit(0)
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("the tree is up", flush=True)
note("parent")
while True:
    time.sleep(60)
"""
NAMES = ("parent", "child", "session", "orphan")


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return False


def tree(tmp_path: Path, *, stubborn: bool = False, grace_s: float = 5.0) -> ManagedProcess:
    kind = "stubborn" if stubborn else "polite"
    return ManagedProcess("tree", [sys.executable, "-c", TREE, str(tmp_path), kind], log=tmp_path / "tree.log", grace_s=grace_s)


def pids(tmp_path: Path) -> list[int]:
    assert eventually(lambda: all((tmp_path / name).exists() for name in NAMES)), "the tree did not come up"
    return [int((tmp_path / name).read_text()) for name in NAMES]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[ManagedProcess, list[int]]]:
    with tree(tmp_path) as process:
        found = pids(tmp_path)
        assert all(map(is_alive, found))
        yield process, found


def test_stop_leaves_no_process_behind(running: tuple[ManagedProcess, list[int]]) -> None:
    process, found = running
    assert sorted(process.descendants()) == sorted(found)
    process.stop()
    assert not any(map(is_alive, found))
    assert not group_is_alive(process.pid)
    assert not process.running
    assert process.returncode == 128 + signal.SIGTERM


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = tree(tmp_path, stubborn=True, grace_s=0.3)
    process.start()
    found = pids(tmp_path)
    began = time.monotonic()
    process.stop()
    assert 0.3 <= time.monotonic() - began < 5
    assert not any(map(is_alive, found))


def test_kill_gives_no_grace(running: tuple[ManagedProcess, list[int]]) -> None:
    process, found = running
    began = time.monotonic()
    process.kill()
    assert time.monotonic() - began < 2
    assert not any(map(is_alive, found))
    assert process.returncode == 128 + signal.SIGKILL


def test_what_a_dead_command_leaves_is_ended(running: tuple[ManagedProcess, list[int]]) -> None:
    process, found = running
    os.kill(found[0], signal.SIGKILL)
    assert eventually(lambda: not process.running)
    assert not any(map(is_alive, found))
    assert process.returncode == 128 + signal.SIGKILL


def test_sigterm_to_the_guard_ends_the_tree(running: tuple[ManagedProcess, list[int]]) -> None:
    process, found = running
    os.kill(process.pid, signal.SIGTERM)
    assert eventually(lambda: not process.running)
    assert not any(map(is_alive, found))


@pytest.mark.parametrize("end", ["SIGKILL", "exception", "sys.exit"])
def test_the_tree_ends_with_its_owner(tmp_path: Path, end: str) -> None:
    owner = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from hicache_mooncake.testing.sglang_cpu.processes import ManagedProcess
        command = [sys.executable, "-c", {TREE!r}, {str(tmp_path)!r}, "polite"]
        ManagedProcess("tree", command, log=Path({str(tmp_path / "tree.log")!r})).start()
        while not all((Path({str(tmp_path)!r}) / name).exists() for name in {NAMES!r}):
            time.sleep(0.02)
        if {end!r} == "exception":
            raise RuntimeError
        if {end!r} == "sys.exit":
            sys.exit(0)
        time.sleep(60)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stderr=subprocess.DEVNULL)
    try:
        found = pids(tmp_path)
        if end == "SIGKILL":
            assert all(map(is_alive, found))
            process.kill()
        process.wait(20)
    finally:
        process.kill()
        process.wait()
    assert eventually(lambda: not any(map(is_alive, found)))


def test_a_detached_command_outlives_its_owner_until_the_guard_is_told(tmp_path: Path) -> None:
    process = tree(tmp_path)
    process.start()
    found = pids(tmp_path)
    process.detach()
    time.sleep(0.3)
    assert all(map(is_alive, found))
    os.kill(process.pid, signal.SIGTERM)
    assert eventually(lambda: not any(map(is_alive, found)))


def test_waiting_for_a_command_that_dies_tells_its_exit_code_and_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(7)"]
    process = ManagedProcess("server", command, log=tmp_path / "server.log")
    process.start()
    with pytest.raises(ProcessError, match=r"server ended with exit code 7") as caught:
        process.wait_until(lambda: False, timeout_s=20, poll_s=0.02)
    assert caught.value.log == tmp_path / "server.log"
    assert process.log_tail() == "no such model"


def test_waiting_ends_with_the_time(running: tuple[ManagedProcess, list[int]]) -> None:
    seen: list[float] = []
    with pytest.raises(ProcessError, match="not ready after 0 s"):
        running[0].wait_until(lambda: False, timeout_s=0.2, progress=seen.append, poll_s=0.02)
    assert len(seen) > 3
    assert seen == sorted(seen)


def test_several_are_stopped_in_the_time_of_one(tmp_path: Path) -> None:
    processes = []
    for name in "abc":
        (tmp_path / name).mkdir()
        processes.append(tree(tmp_path / name, stubborn=True, grace_s=1.0))
        processes[-1].start()
    found = [pid for name in "abc" for pid in pids(tmp_path / name)]
    began = time.monotonic()
    stop_all(processes)
    assert time.monotonic() - began < 2.5
    assert not any(map(is_alive, found))


def test_a_port_is_given_once_and_is_none_that_a_connection_may_get() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports)
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= port <= last for port in ports)


# --------------------------------------------------------------------------- asking a server


class FakeSglang(http.server.BaseHTTPRequestHandler):
    """Streams two tokens, the second one late, with the counts of a half cached prompt."""

    protocol_version = "HTTP/1.1"
    broken = False
    dies = False
    waits_for_abort = False
    bodies: ClassVar[list[dict[str, object]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.path == "/generate" and self.waits_for_abort:
            eventually(lambda: {"rid": body["rid"]} in self.bodies, 30)
        if self.broken or self.waits_for_abort:
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        meta = {
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens_details": {"device": 16, "host": 0, "storage": 32, "storage_backend": "X"},
        }
        for ids, pause_s in (((5,), 0.0), ((5, 6), 0.4)):
            time.sleep(pause_s)
            self._chunk(b"data: " + json.dumps({"output_ids": ids, "text": "t", "meta_info": meta}).encode() + b"\n\n")
        if self.dies:
            self.close_connection = True
            return
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def do_GET(self) -> None:
        page = (
            b"# TYPE sglang:backuped_tokens_total counter\n"
            b'sglang:backuped_tokens_total{tp="0"} 48.0\nsglang:backuped_tokens_total{tp="1"} 16.0\n'
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def fake_url() -> Iterator[str]:
    FakeSglang.broken = FakeSglang.dies = FakeSglang.waits_for_abort = False
    FakeSglang.bodies.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeSglang)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_answer_carries_ids_tiers_and_the_time_of_the_first_token(fake_url: str) -> None:
    answer = servers.generate(fake_url, range(100))
    assert answer.output_ids == (5, 6)
    assert answer.prompt_tokens == 100
    assert answer.cached == servers.Cached(device=16, host=0, storage=32)
    assert answer.ttft_s < 0.3
    assert answer.total_s >= 0.4


def test_an_error_of_the_server_names_the_url_and_the_status(fake_url: str) -> None:
    FakeSglang.broken = True
    with pytest.raises(servers.ServerError, match=r"/generate answered 503"):
        servers.generate(fake_url, range(10))


def test_an_answer_that_ends_in_the_middle_is_none(fake_url: str) -> None:
    FakeSglang.dies = True
    with pytest.raises(servers.ServerError, match=r"/generate failed after"):
        servers.generate(fake_url, range(10))


def test_a_client_that_hangs_up_hears_of_tokens_as_they_come(fake_url: str) -> None:
    seen = []

    def hang_up(tokens: int) -> None:
        seen.append(tokens)
        raise EOFError

    with pytest.raises(EOFError):
        servers.generate(fake_url, range(10), on_tokens=hang_up)
    assert seen == [1]


def pair_on(prefill_port: int, decode_port: int) -> list[SglangServer]:
    """Servers that nobody has started; what listens on their ports answers for them."""
    return [
        SglangServer(role, model=Path("none"), caching=servers.NO_CACHE, log=Path("none"), role=role, port=port)
        for role, port in (("prefill", prefill_port), ("decode", decode_port))
    ]


def test_both_of_a_pair_are_told_where_they_meet_and_the_decode_server_answers(fake_url: str) -> None:
    port = int(fake_url.rpartition(":")[2])
    prefill, decode = pair_on(port, port)
    assert ask_pair(prefill, decode, range(100)).output_ids == (5, 6)
    assert eventually(lambda: len(FakeSglang.bodies) == 2)
    one, other = FakeSglang.bodies
    assert {one["stream"], other["stream"]} == {True, False}
    assert one | {"stream": None} == other | {"stream": None}
    assert one["bootstrap_port"] == prefill.bootstrap_port


def test_a_prefill_server_that_is_gone_is_named_and_the_request_to_the_other_is_ended(fake_url: str) -> None:
    FakeSglang.waits_for_abort = True
    prefill, decode = pair_on(free_port(), int(fake_url.rpartition(":")[2]))
    with pytest.raises(servers.ServerError, match=f"{prefill.url}/generate failed"):
        ask_pair(prefill, decode, range(100), timeout_s=60)
    request = next(body for body in FakeSglang.bodies if "input_ids" in body)
    assert {"rid": request["rid"]} in FakeSglang.bodies


def test_metrics_are_summed_over_their_labels(fake_url: str) -> None:
    assert servers.tokens_written_to_l3(fake_url) == 64
    assert servers.wait_written_to_l3(fake_url, 64, timeout_s=0.1) == 64
    with pytest.raises(servers.ServerError, match="wrote 64 of 65 tokens"):
        servers.wait_written_to_l3(fake_url, 65, timeout_s=0.1)


# --------------------------------------------------------------------------- the environment of a server


def test_a_server_does_not_inherit_settings_meant_for_another_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONCAKE_MASTER", "HICACHE_MOONCAKE_SOCKET", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "MC_FORCE_TCP"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    env = servers.cpu_environment()
    assert "x" not in env.values()
    assert env["PYTHONPATH"].split(os.pathsep) == [str(servers.SHIMS), "/mine"]


def test_the_shims_are_found_by_their_folder_alone() -> None:
    program = (
        "import importlib.metadata as m, sitecustomize, sgl_kernel\n"
        "print(*(e.name for e in m.entry_points(group='sglang.srt.plugins') if e.value.startswith('sglang_cpu_hicache')))\n"
        "print(sitecustomize.__file__)\n"
        "try:\n    sgl_kernel.transfer()\nexcept NotImplementedError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(servers.SHIMS)}, capture_output=True, text=True, check=True
    )
    plugin, site, error = done.stdout.splitlines()
    assert plugin == "cpu_hicache"
    assert Path(site).parent == servers.SHIMS
    assert "sgl_kernel.transfer was called" in error


@pytest.mark.sglang
def test_the_tiny_model_is_made_once_and_is_always_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hicache_mooncake.testing.sglang_cpu.tiny_model import make_tiny_model

    first = make_tiny_model(tmp_path / "one")
    written = (first / "config.json").stat().st_mtime_ns
    assert make_tiny_model(first) == first
    assert (first / "config.json").stat().st_mtime_ns == written
    second = make_tiny_model(tmp_path / "two")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}
