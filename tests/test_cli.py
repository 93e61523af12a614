"""The command line: what it says when nothing runs, what it costs to ask it, and what `doctor` finds."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_mooncake import protocol
from hicache_mooncake.cli import doctor, doctor_cold, engines
from hicache_mooncake.cli.status import Unreachable, ask_master, ask_node, human_bytes, rate
from hicache_mooncake.cold import directory as places
from hicache_mooncake.cold.pages_file import PagesFile
from hicache_mooncake.cold.tier import ColdTier
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.wire import Wire, WireClosed
from tests.etcd import etcd_server, needs_etcd

ROOT = Path(__file__).resolve().parent.parent
CLEAN = {name: value for name, value in os.environ.items() if not re.match(r"(HICACHE_|SGLANG_HICACHE_)?MOONCAKE_", name)}


def run(*arguments: str, timeout_s: float = 60, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hicache_mooncake.cli", *arguments]
    path = f"{ROOT}{os.pathsep}{ROOT / 'master'}"
    environment = CLEAN | {"PYTHONPATH": path, "COLUMNS": "200"} | environ
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=timeout_s)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"dram": "64mb"}, {"XDG_RUNTIME_DIR": str(tmp_path)})[0]


# --------------------------------------------------------------------------- a node and a master that answer as told


@contextmanager
def scripted_node(path: Path, answers: dict[type, protocol.Message]) -> Iterator[str]:
    """A UNIX socket that answers each kind of message with one reply; kinds it does not know end the connection."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(8)
    decoder = protocol.decoder(protocol.FromClient)

    def serve() -> None:
        with suppress(OSError):
            while True:
                wire = Wire(listener.accept()[0])
                with suppress(WireClosed):
                    while (answer := answers.get(type(wire.receive(decoder, time.monotonic() + 10)))) is not None:
                        wire.send(answer)
                wire.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def info(name: str, state: str = "active") -> protocol.NodeInfo:
    return protocol.NodeInfo(name, "10.0.0.1", 7000, state, 3 << 30, 4 << 30, 1000, 990, 0.25, hits=3, lookups=4)


HEALTHY: dict[type, protocol.Message] = {
    protocol.Hello: protocol.Welcome(protocol.PROTOCOL_MAX, "n1", b"i" * 16, 4 << 30),
    protocol.AdminStatus: protocol.AdminReport(
        {"used_bytes": 3 << 30, "capacity_bytes": 4 << 30, "objects": 12345, "hit_keys": 3, "lookup_keys": 4, "master": "none"},
        [info("n1"), info("n2", "suspected")],
    ),
}


@contextmanager
def scripted_master(answer: Callable[[bytes], bytes | None]) -> Iterator[str]:
    import zmq

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            if router.poll(20):
                peer, body = router.recv_multipart()
                reply = answer(body)
                if reply is not None:
                    router.send_multipart([peer, reply])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        done.set()
        thread.join(10)
        router.close()
        context.term()


def report_of(*nodes: protocol.NodeInfo) -> Callable[[bytes], bytes]:
    return lambda _: protocol.encode(protocol.ClusterReport(b"m", protocol.PROTOCOL_MAX, list(nodes), keys=1980))


# --------------------------------------------------------------------------- help


def test_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hicache_mooncake.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=CLEAN, timeout=60)
    assert done.returncode == 0
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in loaded
    assert not loaded & {"zmq", "torch", "sglang", "prometheus_client", "lmdb", "numpy", "msgspec", "xxhash"}


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    assert all(re.search(rf"\b{name}\b", shown) for name in ("demo", "keygen", "node", "master", "replay", "status", "doctor"))
    assert run("--version").stdout.startswith("hicache-mooncake ")


def test_every_option_of_a_node_is_an_option_of_the_node_command() -> None:
    shown = run("node", "--help").stdout
    assert all(option in shown for option in Settings().node_options() if option.startswith("--"))


# --------------------------------------------------------------------------- wrong configurations


@pytest.mark.parametrize("command", ["node", "status"])
def test_a_wrong_configuration_ends_in_one_line_that_says_what_to_do(command: str) -> None:
    done = run(command, HICACHE_MOONCAKE_DEADLINE_S="9")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("hicache-mooncake: HICACHE_MOONCAKE_DEADLINE_S = '9'")


def test_a_node_without_memory_is_refused() -> None:
    done = run("node", "--dram", "0")
    assert done.returncode == 2
    assert "would hold nothing" in done.stderr


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    done = run("node", "--interface", "no-such-if")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "there is no network interface 'no-such-if' here, only " in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "nowhere"], "port is missing"),
        (["--listen", "h:1", "--metrics", "x"], "port is missing"),
        (["--heartbeat-s", "5", "--ttl-s", "5"], "at least twice"),
        (["--log-level", "loud"], "choose one of debug"),
        (["--shard", "4/4"], "counted from 0"),
        (["--shard", "1"], "NUMBER/SHARDS"),
        (["--shard", "0/0"], "NUMBER/SHARDS"),
        (["--shard", "-1/4"], "NUMBER/SHARDS"),
        (["--max-bytes", "lots"], "a size is"),
        (["--advertise", "0.0.0.0:50051"], "cannot connect to a wildcard"),
        (["--cluster", "prod"], "give --etcd as well"),
        (["--etcd", "http://127.0.0.1:1", "--cluster", "a/b"], "letters, digits"),
        (["--key-file", "/nowhere/key"], "keygen"),
        (["--kv-events", "127.0.0.1:5557"], "tcp://host:port"),
        (["--kv-events-replay", "tcp://127.0.0.1:5558"], "give --kv-events as well"),
    ],
)
def test_a_wrong_master_is_refused(options: list[str], words: str) -> None:
    done = run("master", *options)
    assert done.returncode == 2
    assert words in done.stderr


# --------------------------------------------------------------------------- status


def test_status_against_nothing_is_one_clear_line_and_exit_1(tmp_path: Path) -> None:
    path = f"{tmp_path}/none.sock"
    done = run("status", "--socket", path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert path in done.stderr
    assert "start one with `hicache-mooncake node`" in done.stderr
    assert "Traceback" not in done.stderr


def test_status_against_no_master_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = run("status", "--master", f"127.0.0.1:{silent.getsockname()[1]}")
    assert done.returncode == 1
    assert "start one with `hicache-mooncake master`" in done.stderr


def test_status_shows_the_node_and_its_cluster(tmp_path: Path) -> None:
    with scripted_node(tmp_path / "n.sock", HEALTHY) as path:
        done = run("status", "--socket", path)
    assert done.returncode == 0, done.stderr
    for words in ("3.0 GiB", "12,345", "75.0%", "n2", "suspected", "10.0.0.1:7000", "2 nodes", "8.0 GiB"):
        assert words in done.stdout


def rank_of(name: str, role: str, **fields: object) -> protocol.RankIdentity:
    rank = protocol.RankIdentity(
        name.encode(), f"{role} engine of tiny on {name}:1", role, "tree", "plain", (0, 0, 0), (1, 1, 1), [], counts={}
    )
    for field, value in fields.items():
        setattr(rank, field, value)
    return rank


USED = {"lookups": 9, "asked": 900, "found": 700, "wanted": 700, "loaded": 650, "offered": 100, "stored": 100}
APART = protocol.Unshared(
    b"p", "prefill engine of tiny on p:1", b"d", "decode engine of tiny on d:1", [("page_size", "64", "16")]
)
NOT_SHARED = "page_size is 64 in prefill and 16 in decode (start both sides with the same --page-size)"


def test_status_shows_the_engines_and_which_of_them_can_never_share(tmp_path: Path) -> None:
    ranks = [rank_of("p", "prefill", counts=USED), rank_of("d", "decode", counts={"offered": 3, "stored": 3})]
    answer = protocol.AdminReport({"master": "none"}, [], ranks, [APART])
    with scripted_node(tmp_path / "n.sock", HEALTHY | {protocol.AdminStatus: answer}) as path:
        done, machine = run("status", "--socket", path), run("status", "--json", "--socket", path)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    for words in ("prefill engine of tiny on p:1", "900", "650", f"not shared: {APART.prefill_label} and {APART.decode_label}"):
        assert words in shown or words in re.sub(r"[│┃\s]+", " ", done.stdout)
    assert NOT_SHARED in shown
    found = json.loads(machine.stdout)
    assert [engine["role"] for engine in found["engines"]] == ["decode", "prefill"]
    assert found["engines"][1]["pages"] == USED
    assert NOT_SHARED in found["unshared"][0]


def test_status_of_a_master_says_which_engines_can_never_share() -> None:
    report = protocol.ClusterReport(b"m", 2, [info("n1")], 1980, unshared=[APART], engines={"prefill": 1, "decode": 1})
    with scripted_master(lambda _: protocol.encode(report)) as master:
        done, machine = run("status", "--master", master), run("status", "--json", "--master", master)
    assert NOT_SHARED in " ".join(done.stdout.split())
    assert json.loads(machine.stdout)["masters"][master]["engines"] == {"prefill": 1, "decode": 1}


def use(writer: str = "tree", flags: dict[str, str] | None = None, **counts: int) -> list[str]:
    (found,) = engines.uses([rank_of("e", "", writer=writer, flags=flags or {}, counts=counts)], [])
    return engines.explain(found)


WROTE = {"offered": 5, "stored": 5}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (use(**WROTE), ["never asked: no prompt lacked 256 tokens"]),
        (use(flags={"prefetch_threshold": "512"}, **WROTE), ["never asked: no prompt lacked 512 tokens"]),
        (use(asked=9, **WROTE), ["asked, and nothing was there"]),
        (use(asked=9, found=9, **WROTE), ["found, and never loaded"]),
        (use(asked=9, found=9, wanted=9, **WROTE), ["every load failed"]),
        (use(asked=9, found=9, wanted=9, loaded=2, flags={"prefetch_policy": "best_effort"}, **WROTE), ["less than half"]),
        (use(asked=9, found=9, wanted=9, loaded=2, flags={"prefetch_policy": "timeout"}, **WROTE), ["in use"]),
        (use(asked=9, found=9, wanted=9, loaded=9, **WROTE), ["in use"]),
        (use(asked=9, found=9, wanted=9, loaded=9), ["wrote nothing yet"]),
        (use(asked=9, found=9, wanted=9, loaded=9, offered=5), ["every store failed"]),
        (use(flags={"write_policy": "write_through_selective"}), ["never asked", "when they are asked for a second time"]),
        (use(flags={"write_policy": "write_back"}), ["never asked", "when the GPU evicts them"]),
        (use("offload"), ["wrote nothing yet: only whole pages of answers"]),
        (use("offload", **WROTE), ["writes, and reads nothing by design"]),
    ],
)
def test_why_an_engine_does_not_use_the_pool(said: list[str], words: list[str]) -> None:
    assert len(said) == len(words)
    for sentence, start in zip(said, words, strict=True):
        assert start in sentence


def test_ranks_of_an_engine_are_one_row_with_the_pages_of_the_busiest() -> None:
    ranks = [rank_of("e", "", rank=(n, 0, 0), size=(4, 1, 1), counts={"asked": n, "stored": 9 - n}) for n in range(3)]
    ranks[1].off = "the weights are being updated"
    (found,) = engines.uses(ranks, [])
    assert found.row()[2:8] == ("3 of 4", "tree", "2", "0", "0", "9")
    assert engines.explain(found) == ["L3 is off: the weights are being updated"]


def test_doctor_says_of_each_engine_what_it_does_with_the_pool() -> None:
    assert engines.check([], []).status == "ok"
    ranks = [rank_of("p", "prefill", counts=USED), rank_of("d", "decode", writer="offload", counts=WROTE)]
    check = engines.check(ranks, [])
    assert (check.status, check.found) == ("ok", "2 on this host: 1 decode, 1 prefill")
    assert [row[-1] for row in check.table[1:]] == ["writes, and reads nothing by design", "in use"]
    check = engines.check(ranks, [APART])
    assert check.status == "warn"
    assert NOT_SHARED in check.advice
    assert "it shares with no engine of the other side" in check.table[1][-1]
    ranks[0].off = "a pool was refused"
    assert engines.check(ranks, []).status == "warn"


def test_doctor_asks_the_node_for_its_engines(settings: Settings, tmp_path: Path) -> None:
    answer = protocol.AdminReport({"master": "none"}, [], [rank_of("p", "prefill", counts=USED)], [])
    with scripted_node(tmp_path / "n.sock", HEALTHY | {protocol.AdminStatus: answer}) as path:
        check = doctor.engines(replace(settings, socket=path))
    assert check.found == "1 on this host: 1 prefill"
    assert doctor.engines(settings).status == "skipped"


@pytest.mark.parametrize(
    ("roles", "unshared", "status", "words"),
    [
        ({"prefill": 2, "decode": 1}, [], "ok", "engines: 1 decode, 2 prefill"),
        ({"prefill": 2}, [], "ok", "no decode engine has said who it is"),
        ({"prefill": 1, "decode": 1}, [APART], "warn", NOT_SHARED),
    ],
)
def test_doctor_tells_of_a_cluster_whether_its_sides_share(
    roles: dict[str, int], unshared: list[protocol.Unshared], status: str, words: str
) -> None:
    report = protocol.ClusterReport(b"m", 2, [info("n1")], 1980, unshared=unshared, engines=roles)
    with scripted_master(lambda _: protocol.encode(report)) as master:
        check = doctor.master(master)
    assert check.status == status
    assert words in check.found + check.advice


COLD = {
    "cold_pages": 54321, "cold_used_bytes": 1 << 30, "cold_capacity_bytes": 4 << 30, "cold_written_bytes": 2 << 30,
    "cold_write_amplification": 1.25, "cold_problem": "",
}  # fmt: skip


@pytest.mark.parametrize("problem", ["", "less than 1024 MiB would be left free"])
def test_status_shows_a_cold_tier_in_a_line(tmp_path: Path, problem: str) -> None:
    answer = protocol.AdminReport(COLD | {"cold_problem": problem}, [])
    with scripted_node(tmp_path / "n.sock", HEALTHY | {protocol.AdminStatus: answer}) as path:
        done = run("status", "--socket", path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "cold tier" in line]
    for words in ("54,321 pages", "1.0 GiB of 4.0 GiB used (25.0%)", "2.0 GiB written × 1.25", problem):
        assert words in line
    assert (";" in line) == bool(problem)


def test_status_says_nothing_of_a_cold_tier_that_there_is_not(tmp_path: Path) -> None:
    with scripted_node(tmp_path / "n.sock", HEALTHY) as path:
        assert "cold" not in run("status", "--socket", path).stdout


def test_status_for_machines(tmp_path: Path) -> None:
    with scripted_node(tmp_path / "n.sock", HEALTHY) as path, scripted_master(report_of(info("n1"))) as master:
        done = run("status", "--json", "--socket", path, "--master", master)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["node"]["objects"] == 12345
    assert [item["node"] for item in shown["cluster"]] == ["n1", "n2"]
    assert shown["masters"][master]["keys"] == 1980
    assert shown["masters"][master]["nodes"][0]["used_bytes"] == 3 << 30


def test_status_of_one_shows_although_the_other_is_down(tmp_path: Path) -> None:
    with scripted_master(report_of(info("n1"))) as master:
        done = run("status", "--socket", f"{tmp_path}/none.sock", "--master", master)
    assert done.returncode == 1
    assert "n1" in done.stdout
    assert "none.sock" in done.stderr


def cluster(*nodes: protocol.NodeInfo, **kind: object) -> Callable[[bytes], bytes]:
    report = protocol.ClusterReport(b"m", protocol.PROTOCOL_MAX, list(nodes), keys=1980)
    for name, value in kind.items():
        setattr(report, name, value)
    return lambda _: protocol.encode(report)


def test_status_asks_every_master_and_tells_them_and_the_nodes_apart() -> None:
    nodes = [info("n1", "sick"), info("n2", "draining"), info("n3", "joining")]
    for node, host in zip(nodes, ("host-a", "host-a", "host-b"), strict=True):
        node.host_id = host
    leader = cluster(*nodes, shard=0, shards=2, role="leader")
    other = cluster(*nodes, shard=1, shards=2, role="follower", warming=True)
    with scripted_master(leader) as first, scripted_master(other) as second:
        done = run("status", "--master", f"{first},{second}")
        told = json.loads(run("status", "--json", "--master", f"{first},{second}").stdout)["masters"]
    assert done.returncode == 0, done.stderr
    for words in ("shard 0/2, leader", "shard 1/2, follower, warming", "sick", "draining", "joining", "host-a", "2 hosts"):
        assert words in done.stdout
    assert [told[address]["shard"] for address in (first, second)] == [0, 1]
    assert told[second]["warming"] is True
    assert told[second]["role"] == "follower"
    assert [node["host_id"] for node in told[first]["nodes"]] == ["host-a", "host-a", "host-b"]


def test_status_says_when_masters_do_not_divide_the_keys_alike() -> None:
    with scripted_master(cluster(shards=2)) as first, scripted_master(cluster(shards=4)) as second:
        done = run("status", "--master", f"{first},{second}")
    assert done.returncode == 1
    assert f"disagree about the number of shards ({first} 2, {second} 4)" in done.stderr


def test_status_of_a_master_of_another_host_needs_no_permission_since_it_starts_no_node() -> None:
    done = run("status", "--master", "192.0.2.1:1")  # an address that nobody has
    assert done.returncode == 1
    assert "no master answers on 192.0.2.1:1" in done.stderr


@needs_etcd
def test_status_and_doctor_find_masters_through_etcd(tmp_path: Path, settings: Settings) -> None:
    import etcd3gw

    with etcd_server(tmp_path) as etcd, scripted_master(report_of(info("n1"))) as master:
        url = f"etcd://{etcd.address}/prod"
        (check,) = doctor.masters(replace(settings, masters=(url,)))
        assert check.status == "fail"
        assert "names no master" in check.found
        etcd3gw.client(host="127.0.0.1", port=etcd.port).put("/hicache-mooncake/prod/masters/0/ab", master)
        done = run("status", "--master", url)
        assert done.returncode == 0, done.stderr
        assert f"as {master} sees it" in done.stdout
        (check,) = doctor.masters(replace(settings, masters=(url,)))
        assert (check.name, check.status) == (f"master {master}", "ok")
        etcd.kill()
        done = run("status", "--master", url)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "no etcd server answers" in done.stderr


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "did not answer properly"),
        ({protocol.Hello: protocol.Refused("protocol 7 is not spoken here")}, "protocol 7 is not spoken here"),
        ({**HEALTHY, protocol.AdminStatus: protocol.Refused("not now")}, "not now"),
        ({**HEALTHY, protocol.AdminStatus: protocol.Found([1])}, "answered with Found"),
    ],
)
def test_a_node_that_answers_wrongly_is_unreachable(tmp_path: Path, answers: dict[type, protocol.Message], words: str) -> None:
    with scripted_node(tmp_path / "n.sock", answers) as path, pytest.raises(Unreachable, match=words):
        ask_node(path)


def test_a_node_that_does_not_answer_costs_no_more_than_the_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(f"{tmp_path}/n.sock")
        mute.listen()
        started = time.monotonic()
        with pytest.raises(Unreachable):
            ask_node(f"{tmp_path}/n.sock", timeout_s=0.2)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("body", [b"\xff\xff", protocol.encode(protocol.Refused("no")), protocol.encode(protocol.Cleared(1))])
def test_a_master_that_answers_wrongly_is_unreachable(body: bytes) -> None:
    with scripted_master(lambda _: body) as address, pytest.raises(Unreachable, match=address):
        ask_master(address)


def test_figures_for_people() -> None:
    shown = [human_bytes(size) for size in (0, 1023, 1536, 3 << 30, 5 << 40)]
    assert shown == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert (rate(3, 4), rate(0, 0)) == ("75.0%", "-")


# --------------------------------------------------------------------------- doctor


def test_doctor_runs_here_and_answers_in_json(tmp_path: Path) -> None:
    done = run("doctor", "--json", XDG_RUNTIME_DIR=str(tmp_path), HICACHE_MOONCAKE_DRAM="64mb", MOONCAKE_PROTOCOL="rdma")
    shown = json.loads(done.stdout)
    checks = {check["name"]: check for check in shown["checks"]}
    assert {check["status"] for check in checks.values()} <= {"ok", "warn", "fail", "skipped"}
    assert {"configuration", "versions", "plugin", "page copies", "process_vm_readv", "memfd_create", "memory", "huge pages",
            "/dev/shm", "locked memory", "RDMA", "node", "cluster key", "master", "canary page"} <= set(checks)  # fmt: skip
    assert checks["memfd_create"]["status"] == "ok"
    assert shown["configuration"]["dram_bytes"] == {"value": 64 << 20, "source": "HICACHE_MOONCAKE_DRAM"}
    assert "RDMA where both have a device" in shown["notices"][0]
    assert shown["failed"] == sum(check["status"] == "fail" for check in checks.values())
    assert done.returncode == (1 if shown["failed"] else 0)
    assert all(check["advice"] for check in checks.values() if check["status"] in ("warn", "fail"))


def test_doctor_for_people_shows_each_finding_and_its_advice(tmp_path: Path) -> None:
    done = run("doctor", "--socket", f"{tmp_path}/none.sock")
    assert done.returncode == 1
    assert re.search(r"^fail +node: no node answers on .*none\.sock", done.stdout, re.MULTILINE)
    assert "-> node=external (auto: the socket is set by --socket): a node must run already" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_reports_a_wrong_configuration_as_a_finding() -> None:
    done = run("doctor", "--json", MOONCAKE_MASTER="redis://h:2379")
    assert done.returncode == 1
    assert "static list" in json.loads(done.stdout)["checks"][0]["found"]


def test_doctor_finds_a_node_that_runs(settings: Settings, tmp_path: Path) -> None:
    with scripted_node(tmp_path / "n.sock", HEALTHY) as path:
        check = doctor.node(replace(settings, socket=path))
    assert check.status == "ok"
    assert f"n1 on {path}, 4.0 GiB" in check.found


def test_doctor_finds_a_node_of_another_protocol(settings: Settings, tmp_path: Path) -> None:
    answers = {**HEALTHY, protocol.Hello: protocol.Welcome(protocol.PROTOCOL_MAX + 1, "n1", b"i" * 16, 4 << 30)}
    with scripted_node(tmp_path / "n.sock", answers) as path:
        assert doctor.node(replace(settings, socket=path)).status == "fail"


def test_doctor_lets_an_embedded_node_be_started_later(settings: Settings) -> None:
    assert doctor.node(settings).status == "ok"
    assert "first engine rank starts one" in doctor.node(settings).found
    assert doctor.node(replace(settings, node="off")).status == "warn"


def test_doctor_asks_each_master(settings: Settings) -> None:
    assert doctor.masters(settings)[0].status == "ok"
    with scripted_master(report_of(info("n1"), info("n2", "suspected"))) as address:
        checks = doctor.masters(replace(settings, masters=(address, "127.0.0.1:1")))
    assert [check.status for check in checks] == ["ok", "fail"]
    assert "1 of 2 nodes active, 1,980 keys" in checks[0].found
    assert "hicache-mooncake master" in checks[1].advice


def test_doctor_tells_what_is_the_matter_with_a_cluster() -> None:
    with scripted_master(cluster(info("n1"), info("n2", "sick"), shard=1, shards=2)) as address:
        check = doctor.master(address)
    assert check.status == "warn"
    assert "1 of 2 nodes active" in check.found
    assert "shard 1/2; others cannot read from n2" in check.found
    with scripted_master(cluster(info("n1"), warming=True)) as address:
        check = doctor.master(address)
    assert check.status == "warn"
    assert "warming" in check.found


def test_doctor_tells_a_master_of_something_else_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_master", lambda address, key: ask_master(address, timeout_s=0.2, key=key))
    with socket.create_server(("127.0.0.1", 0)) as other:
        check = doctor.master(f"127.0.0.1:{other.getsockname()[1]}")
    assert check.status == "fail"
    assert "mooncake_master does not speak this protocol" in check.advice


@pytest.mark.parametrize(
    ("environ", "sglang", "status", "words"),
    [
        ({}, None, "skipped", "not installed"),
        ({}, "0.5.9", "warn", "loads no plugins"),
        ({"HICACHE_MOONCAKE_PLUGIN": "off"}, "0.5.23", "warn", "switches it off"),
        ({"SGLANG_PLUGINS": "other, more"}, "0.5.23", "fail", "leaves it out"),
    ],
)
def test_doctor_tells_why_the_plugin_is_not_used(environ: dict[str, str], sglang: str | None, status: str, words: str) -> None:
    check = doctor.plugin(environ, sglang)
    assert check.status == status
    assert words in check.found


VM_WORKS, VM_FAILS = doctor.Check("vm", "ok", ""), doctor.Check("vm", "fail", "", "allow it")


@pytest.mark.parametrize(
    ("mode", "sglang", "vm", "status", "words"),
    [
        ("auto", "0.5.23", VM_WORKS, "ok", "memfd"),
        ("auto", "0.5.18.post1", VM_FAILS, "ok", "memfd"),
        ("auto", "0.5.14", VM_WORKS, "ok", "process_vm"),
        ("auto", "0.5.14", VM_FAILS, "warn", "segment"),
        ("memfd", "0.5.14", VM_WORKS, "fail", "no host pool in a memfd"),
        ("process_vm", "0.5.23", VM_FAILS, "fail", "does not work"),
        ("segment", "0.5.23", VM_FAILS, "ok", "copy_mode=segment"),
        ("auto", None, VM_WORKS, "skipped", "not installed"),
    ],
)
def test_doctor_tells_how_pages_are_copied(
    settings: Settings, mode: str, sglang: str | None, vm: doctor.Check, status: str, words: str
) -> None:
    check = doctor.page_copies(replace(settings, copy_mode=mode), sglang, vm)
    assert check.status == status
    assert words in check.found


def test_doctor_compares_the_nodes_memory_with_what_there_is(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 1 << 30)
    sizes = {size: doctor.memory(replace(settings, dram_bytes=size)).status for size in (64 << 20, 900 << 20, 2 << 30)}
    assert list(sizes.values()) == ["ok", "warn", "fail"]
    assert doctor.memory(replace(settings, dram_bytes=2 << 30, node="external")).status == "ok"


def test_doctor_wants_huge_pages_only_where_they_are_asked_for(settings: Settings) -> None:
    assert doctor.huge_pages(settings).status == "ok"
    check = doctor.huge_pages(replace(settings, hugepages=True, dram_bytes=1 << 50))
    assert check.status == "fail"
    assert "vm.nr_hugepages=" in check.advice


def cold_tier(settings: Settings, **changed: object) -> doctor.Check:
    (check,) = doctor_cold.examine(replace(settings, **changed))  # type: ignore[arg-type]
    return check


@pytest.fixture
def cold_settings(settings: Settings, tmp_path: Path) -> Settings:
    return replace(settings, cold=str(tmp_path / "not" / "yet"), cold_bytes=512 << 20, cold_floor=0)


def test_doctor_checks_a_cold_tier_where_there_is_to_be_one_and_makes_nothing(
    settings: Settings, cold_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_cold, "_file_system", lambda path: "ext4")
    monkeypatch.setattr(doctor_cold, "_no_direct_io", lambda nearest: None)
    assert doctor_cold.examine(settings) == []
    assert cold_tier(cold_settings).status == "ok"
    check = cold_tier(cold_settings, cold_bytes=64 << 20)
    assert check.status == "warn"
    assert "several times dram" in check.advice
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_why_a_node_would_not_start_with_a_cold_tier(cold_settings: Settings, tmp_path: Path) -> None:
    check = cold_tier(cold_settings, cold_bytes=1 << 60)
    assert check.status == "fail"
    assert "lower cold_bytes" in check.advice
    assert "at least" in cold_tier(cold_settings, cold_bytes=1 << 20).found
    (tmp_path / "file").touch()
    assert "may not write" in cold_tier(cold_settings, cold=str(tmp_path / "file")).found
    own = places.own_path(tmp_path / "open")
    own.mkdir(parents=True)
    own.chmod(0o777)
    assert "may be written by others" in cold_tier(cold_settings, cold=str(tmp_path / "open")).found


def test_doctor_lets_a_tier_that_is_there_make_do_with_a_full_disk(cold_settings: Settings) -> None:
    ColdTier(Path(cold_settings.cold), 64 << 20, floor_bytes=0).close()
    pages = places.own_path(Path(cold_settings.cold)) / places.PAGES
    pages.write_bytes(b"x" * (1 << 20))
    check = cold_tier(cold_settings, cold_bytes=1 << 60)
    assert check.status == "warn"
    assert "makes do" in check.advice


def test_doctor_sees_no_use_in_a_tier_in_memory(
    cold_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_cold, "_file_system", lambda path: "tmpfs")
    check = cold_tier(cold_settings)
    assert check.status == "warn"
    assert "tmpfs" in check.found


def test_doctor_tells_the_file_system_of_a_directory() -> None:
    assert doctor_cold._file_system(Path("/proc")) == "proc"


def test_doctor_says_what_a_disk_without_direct_io_costs(cold_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_cold, "_file_system", lambda path: "ext4")
    monkeypatch.setattr(PagesFile, "_try_direct", lambda file, flags: None)
    check = cold_tier(cold_settings)
    assert check.status == "warn"
    assert "page cache" in check.found


def test_a_temporary_node_leaves_the_cold_tier_alone(cold_settings: Settings) -> None:
    with doctor.temporary_node(cold_settings) as small:
        assert "cold_pages" not in ask_node(small.socket)[1].node
    assert not Path(cold_settings.cold).exists()


def test_a_check_that_breaks_is_a_finding_and_hides_no_other(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Check:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "memfd", broken)
    checks = {check.name: check for check in doctor.examine(replace(settings, node="off"), {})}
    assert checks["memfd_create"].status == "warn"
    assert "boom" in checks["memfd_create"].found
    assert checks["canary page"].status == "skipped"


def test_a_temporary_node_that_does_not_start_leaves_its_reason_and_no_process(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Unreachable, match="temporary node ended with status"), doctor.temporary_node(settings):
        pass


# --------------------------------------------------------------------------- systemd units


@pytest.mark.parametrize("unit", ["node", "master", "conductor"])
def test_the_units_start_commands_that_exist(unit: str) -> None:
    text = (ROOT / "docs" / "systemd" / f"hicache-mooncake-{unit}.service").read_text()
    (start,) = re.findall(r"^ExecStart=/usr/bin/env hicache-mooncake (.*)$", text, re.MULTILINE)
    command, *words = start.split()
    assert command == unit
    shown = run(command, "--help").stdout
    assert all(word in shown for word in words if word.startswith("--"))
    assert "Restart=always" in text
    if unit == "node":
        stop_s = float(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
        assert stop_s >= Settings().drain_s + 5, "systemd must not kill a node that hands its pages over"
    assert "LimitMEMLOCK=" in text
