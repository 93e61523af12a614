"""`hicache-mooncake doctor`: what would be used on this host and why, and what to do about what is wrong.

Each check looks at one thing and returns a `Check`; none changes the host. The canary check may run a small node of its own for
a few seconds, on a socket in a temporary directory.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from hicache_mooncake import __version__, protocol
from hicache_mooncake.cli import doctor_cold, doctor_transports
from hicache_mooncake.cli import engines as host_engines
from hicache_mooncake.cli.checks import FAIL, OK, SKIPPED, WARN, Check, broken, guarded
from hicache_mooncake.cli.status import Unreachable, ask_master, ask_node, find_masters, human_bytes
from hicache_mooncake.config import ConfigError, Settings, available_memory_bytes, load_settings, split_address
from hicache_mooncake.config_table import PLUGIN_ENV, SETTINGS
from hicache_mooncake.config_values import display
from hicache_mooncake.security import ClusterKey, SecurityError, load_key
from hicache_mooncake.sharing import sentence

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "hicache_mooncake"
PLUGINS_SINCE = (0, 5, 14)
"""First SGLang version that loads plugins."""
SHM_ALLOCATOR_SINCE = (0, 5, 18)
"""First SGLang version whose host pool can live in a memfd."""
SYSTEM_SOCKET = "/run/hicache-mooncake/node.sock"
"""Where the systemd unit in docs/systemd puts the node's socket."""


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, enough to compare releases: "0.5.23.post1" is (0, 5, 23)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


# --------------------------------------------------------------------------- software


def versions() -> Check:
    sglang, torch = version_of("sglang"), version_of("torch")
    parts = {"Python": platform.python_version(), "hicache-mooncake": __version__, "SGLang": sglang, "torch": torch}
    found = ", ".join(f"{name} {version or 'not installed'}" for name, version in parts.items())
    if sglang is None:
        return Check("versions", OK, found, "no engine can run from this Python environment; node and master can")
    return Check("versions", OK, found)


def plugin(environ: Mapping[str, str], sglang: str | None) -> Check:
    """Will SGLang's backend name `mooncake` be ours?"""
    name = "plugin"
    if sglang is None:
        return Check(name, SKIPPED, "SGLang is not installed here")
    dynamic = "use --hicache-storage-backend dynamic with module_path hicache_mooncake.backend meanwhile"
    if version_tuple(sglang) < PLUGINS_SINCE:
        since = ".".join(map(str, PLUGINS_SINCE))
        return Check(name, WARN, f"SGLang {sglang} loads no plugins (it does since {since})", f"upgrade SGLang, or {dynamic}")
    if environ.get(PLUGIN_ENV, "").strip().lower() in ("off", "0", "false", "no"):
        return Check(
            name, WARN, f"{PLUGIN_ENV} switches it off: the name mooncake is SGLang's own backend", f"unset {PLUGIN_ENV}"
        )
    allowed = {item.strip() for item in environ.get("SGLANG_PLUGINS", "").split(",") if item.strip()}
    if allowed and PLUGIN_NAME not in allowed:
        return Check(
            name, FAIL, f"SGLANG_PLUGINS={','.join(sorted(allowed))} leaves it out", f"add {PLUGIN_NAME} to SGLANG_PLUGINS"
        )
    points = [point for point in importlib.metadata.entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if not points:
        advice = f"install the package into this environment (pip install hicache-mooncake), or {dynamic}"
        return Check(name, WARN, f"no entry point {PLUGIN_NAME} in {PLUGIN_GROUP}: the package runs from a source tree", advice)
    if importlib.util.find_spec(points[0].module) is None:
        return Check(name, FAIL, f"entry point {points[0].value} names a module that is missing", "reinstall hicache-mooncake")
    return Check(name, OK, f"entry point {points[0].value}: --hicache-storage-backend mooncake is this package")


def page_copies(settings: Settings, sglang: str | None, vm: Check) -> Check:
    """Which way page bytes will take into the engine's host memory."""
    name = "page copies"
    if sglang is None:
        return Check(name, SKIPPED, "SGLang is not installed here")
    has_shm = version_tuple(sglang) >= SHM_ALLOCATOR_SINCE
    mode = settings.copy_mode
    source = f"copy_mode={mode} ({settings.sources.get('copy_mode', 'default')})"
    since = ".".join(map(str, SHM_ALLOCATOR_SINCE))
    if mode == "memfd" and not has_shm:
        return Check(
            name, FAIL, f"{source}, but SGLang {sglang} has no host pool in a memfd (since {since})", "set copy_mode=auto"
        )
    if mode == "process_vm" and vm.status == FAIL:
        return Check(name, FAIL, f"{source}, but process_vm_readv does not work here", vm.advice)
    if mode != "auto":
        return Check(name, OK, source)
    if has_shm:
        return Check(name, OK, f"memfd: SGLang {sglang} keeps its host pool in a memfd, which is mapped by the movers")
    if vm.status == OK:
        return Check(
            name, OK, f"process_vm: SGLang {sglang} has no host pool in a memfd (since {since})", "upgrade SGLang for memfd"
        )
    return Check(
        name,
        WARN,
        f"segment: no memfd with SGLang {sglang}, and process_vm_readv does not work",
        f"upgrade SGLang, or {vm.advice}",
    )


_VM_CHILD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
sys.stdin.readline()
pid, source, target, length = map(int, sys.argv[1:])
bounce = ctypes.create_string_buffer(length)
for call, address in ((libc.process_vm_readv, source), (libc.process_vm_writev, target)):
    mine, theirs = IoVec(ctypes.addressof(bounce), length), IoVec(address, length)
    moved = call(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    if moved != length:
        sys.exit(os.strerror(ctypes.get_errno()))
"""


def process_vm() -> Check:
    """Can a child reach into this process's memory by system call, as a mover into its engine?"""
    import ctypes

    from hicache_mooncake.transfer.memory import allow_movers

    name = "process_vm_readv"
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    yama = f"yama ptrace_scope {scope}" if scope else "no yama"
    word = os.urandom(64)
    source, target = ctypes.create_string_buffer(word, len(word)), ctypes.create_string_buffer(len(word))
    addresses = [str(os.getpid()), str(ctypes.addressof(source)), str(ctypes.addressof(target)), str(len(word))]
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", _VM_CHILD, *addresses], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    allow_movers()  # As a rank does before it starts its movers.
    try:
        _, complaint = child.communicate("go\n", timeout=20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return Check(name, FAIL, f"a child did not get through within 20 s ({yama})", "run doctor again on a quieter machine")
    if child.returncode == 0 and target.raw == word:
        return Check(name, OK, f"a child read and wrote this process's memory ({yama})")
    return Check(
        name,
        FAIL,
        f"a child cannot reach this process's memory: {complaint.strip() or f'exit {child.returncode}'} ({yama})",
        "allow the system call: kernel.yama.ptrace_scope below 2, or in a container --cap-add SYS_PTRACE or a seccomp "
        "profile with it",
    )


# --------------------------------------------------------------------------- memory


def memfd() -> Check:
    name = "memfd_create"
    size = 2 << 20
    try:
        fd = os.memfd_create("hicache-mooncake-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            with mmap.mmap(fd, size) as view:
                view[0], view[size - 1] = 1, 2
        finally:
            os.close(fd)
    except OSError as error:
        return Check(
            name, FAIL, f"does not work: {error}", "allow memfd_create in the container's seccomp profile; the pool lives in it"
        )
    return Check(name, OK, "works")


def memory(settings: Settings) -> Check:
    name = "memory"
    available = available_memory_bytes()
    if available is None:
        return Check(name, WARN, "neither /proc/meminfo nor a cgroup tells how much is available", "check dram yourself")
    source = settings.sources.get("dram_bytes", "default")
    found = f"the node would take {human_bytes(settings.dram_bytes)} ({source}) of {human_bytes(available)} available"
    if settings.node != "embedded":
        return Check(name, OK, f"{human_bytes(available)} available; no node is started from here (node={settings.node})")
    if settings.dram_bytes > available:
        return Check(
            name, FAIL, found, "lower dram (HICACHE_MOONCAKE_DRAM), or raise the container's limit: the node would be killed"
        )
    if settings.dram_bytes > 0.8 * available:
        return Check(name, WARN, found, "leave room for the engine's host memory (--hicache-size): lower dram")
    return Check(name, OK, found)


def huge_pages(settings: Settings) -> Check:
    name = "huge pages"
    info = dict(re.findall(r"^(\w+):\s+(\d+)", _read("/proc/meminfo"), re.MULTILINE))
    size, free = int(info.get("Hugepagesize", "0")) << 10, int(info.get("HugePages_Free", "0"))
    shmem = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    found = f"{free} of {human_bytes(size)} free, transparent for shared memory: {shmem[1] if shmem else 'unknown'}"
    if settings.hugepages and settings.node == "embedded" and free * size < settings.dram_bytes:
        need = -(-settings.dram_bytes // size) if size else 0
        return Check(name, FAIL, found, f"hugepages is set: sysctl vm.nr_hugepages={need} or more, or unset hugepages")
    return Check(name, OK, found)


def dev_shm() -> Check:
    name = "/dev/shm"
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return Check(
            name, WARN, f"not there ({error.strerror})", "SGLang's processes need it; the pool does not, it lives in a memfd"
        )
    free = stat.f_bavail * stat.f_frsize
    total = human_bytes(stat.f_blocks * stat.f_frsize)
    found = f"{human_bytes(free)} of {total} free; the pool lives in a memfd and does not use it"
    if free < 64 << 20:
        return Check(name, WARN, found, "SGLang's processes share tensors through it: docker run --shm-size 8g, or --ipc host")
    return Check(name, OK, found)


# --------------------------------------------------------------------------- node and masters


def _nearest_directory(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.exists())


def node(settings: Settings) -> Check:
    name = "node"
    if settings.node == "off":
        return Check(
            name,
            WARN,
            f"node=off ({settings.sources.get('node', 'default')}): every lookup is a miss",
            "unset node to use the pool",
        )
    try:
        welcome, _ = ask_node(settings.socket)
    except Unreachable as error:
        if settings.node == "external":
            return Check(
                name, FAIL, str(error), f"node=external ({settings.sources.get('node', 'default')}): a node must run already"
            )
        return _embedded_start(name, settings)
    found = f"{welcome.node} on {settings.socket}, {human_bytes(welcome.segment_bytes)}, protocol {welcome.version}"
    spoken = range(protocol.PROTOCOL_MIN, protocol.PROTOCOL_MAX + 1)
    if welcome.version not in spoken:
        return Check(
            name, FAIL, found, f"this package speaks protocol {spoken[0]} to {spoken[-1]}: run the node from the same version"
        )
    return Check(name, OK, found)


def engines(settings: Settings) -> Check:
    """Those of this host: what they do with the pool, and which of them can never share."""
    try:
        _, report = ask_node(settings.socket)
    except Unreachable:
        return Check("engines", SKIPPED, f"no node on {settings.socket} to ask")
    return host_engines.check(report.ranks, report.unshared)


def _embedded_start(name: str, settings: Settings) -> Check:
    """Nothing runs: could the first rank start a node here?"""
    if settings.socket != SYSTEM_SOCKET and os.path.exists(SYSTEM_SOCKET):
        advice = f"set HICACHE_MOONCAKE_SOCKET={SYSTEM_SOCKET} for the engines, or stop the service"
        return Check(name, WARN, f"none on {settings.socket}, but {SYSTEM_SOCKET} is there and would not be used", advice)
    directory = _nearest_directory(Path(settings.socket))
    if not os.access(directory, os.W_OK | os.X_OK) or not directory.is_dir():
        return Check(
            name, FAIL, f"none on {settings.socket}, and {directory} is not writable", "set socket (HICACHE_MOONCAKE_SOCKET)"
        )
    return Check(name, OK, f"none on {settings.socket} yet: the first engine rank starts one")


def masters(settings: Settings) -> list[Check]:
    if not settings.masters:
        return [
            Check(
                "master", OK, "none set: this host's cache alone", "set master (MOONCAKE_MASTER) to share pages between hosts"
            )
        ]
    try:
        cluster_key = load_key(settings.key_file)
    except SecurityError:
        return [Check("master", SKIPPED, "not asked: the key cannot be used")]
    try:
        addresses = find_masters(settings.masters)
    except Unreachable as error:
        advice = "start etcd and `hicache-mooncake master --etcd`, and check address and cluster name"
        return [Check("masters in etcd", FAIL, str(error), advice)]
    return [master(address, cluster_key) for address in addresses]


def key(settings: Settings) -> Check:
    """Is there a key where one is needed, and can it be used?"""
    name = "cluster key"
    if not settings.key_file:
        if settings.allow_unauthenticated:
            who = f"allow_unauthenticated ({settings.sources.get('allow_unauthenticated', 'default')})"
            found = f"none, and {who}: everybody who reaches these ports may read, add and clear pages"
            return Check(name, WARN, found, "make one with `hicache-mooncake keygen FILE` and set key_file everywhere")
        return Check(name, OK, "none: this host's own processes are served, and nobody else")
    try:
        loaded = load_key(settings.key_file)
    except SecurityError as error:
        if settings.node == "external":
            advice = "engines need no key, the node has it; correct it for `hicache-mooncake status`, or unset key_file"
            return Check(name, WARN, str(error), advice)
        return Check(name, FAIL, str(error), "the node would not start")
    assert loaded is not None
    return Check(name, OK, f"{settings.key_file}, fingerprint {loaded.fingerprint}: it must be the same on every host")


def master(address: str, cluster_key: ClusterKey | None = None) -> Check:
    name = f"master {address}"
    host, port = split_address(address)
    started = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError as error:
        return Check(
            name,
            FAIL,
            f"no TCP connection: {error}",
            "start one with `hicache-mooncake master`, check the address and the firewall",
        )
    try:
        report = ask_master(address, key=cluster_key)
    except Unreachable as error:
        advice = (
            "compare the fingerprints of the keys on both hosts; or something else listens there (the built-in backend's "
            "mooncake_master does not speak this protocol)"
        )
        return Check(name, FAIL, f"TCP connects, but {error}", advice)
    elapsed_ms = (time.monotonic() - started) * 1000
    active = sum(info.state == "active" for info in report.nodes)
    found = f"{active} of {len(report.nodes)} nodes active, {report.keys:,} keys, answered in {elapsed_ms:.0f} ms"
    if report.shards > 1:
        found += f", shard {report.shard}/{report.shards}"
    if report.warming:
        return Check(name, WARN, f"{found}, warming: it does not know all keys yet", "ask again in some seconds")
    sick = sorted(info.node for info in report.nodes if info.state == "sick")
    if sick:
        advice = "look at their logs, and at the network between them and the others; they come back by themselves"
        return Check(name, WARN, f"{found}; others cannot read from {', '.join(sick)}", advice)
    roles = report.engines
    if roles:
        found += f", engines: {', '.join(f'{count} {role}' for role, count in sorted(roles.items()))}"
    if report.unshared:
        advice = "; ".join(sentence(pair) for pair in report.unshared)
        return Check(name, WARN, f"{found}; some of them can never share", advice)
    if roles.get("prefill") and not roles.get("decode"):
        advice = (
            "no decode engine has said who it is: what they compute is written back where they are started with "
            "--hicache-storage-backend, and --disaggregation-decode-enable-offload-kvcache or "
            "--disaggregation-decode-enable-radix-cache with --enable-hierarchical-cache"
        )
        return Check(name, OK, found, advice)
    return Check(name, OK, found)


# --------------------------------------------------------------------------- canary


@contextlib.contextmanager
def temporary_node(settings: Settings, start_s: float = 15.0) -> Iterator[Settings]:
    """A small node without masters on a socket of its own, ended on leaving. Raises Unreachable if it does not come up."""
    with tempfile.TemporaryDirectory(prefix="hicache-mooncake-doctor-", dir="/tmp") as directory:
        small = replace(
            settings, socket=f"{directory}/node.sock", node="external", dram_bytes=64 << 20, masters=(), listen="127.0.0.1:0",
            advertise="", name=f"doctor-{os.getpid()}", metrics="", hugepages=False, log_level="warning", key_file="",
            drain_s=0.0, cold="", save_on_exit=False,
        )  # fmt: skip
        command = [sys.executable, "-m", "hicache_mooncake.cli", "node", *small.node_options()]
        with open(f"{directory}/log", "w+") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                _await_node(small.socket, process, start_s, Path(log.name))
                yield small
            finally:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _await_node(socket_path: str, process: subprocess.Popen[bytes], start_s: float, log: Path) -> None:
    end = time.monotonic() + start_s
    while True:
        try:
            ask_node(socket_path, timeout_s=1.0)
            return
        except Unreachable:
            if process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
                continue
        last = " | ".join(log.read_text().strip().splitlines()[-3:])
        state = f"ended with status {process.returncode}" if process.poll() is not None else f"not up after {start_s:g} s"
        raise Unreachable(f"a temporary node {state}: {last}")


def canary(settings: Settings) -> Check:
    """Write a page and read it back through a node with the client that engines use; a small node of our own if none runs."""
    name = "canary page"
    if settings.node == "off":
        return Check(name, SKIPPED, "skipped: node=off")
    for module in ("hicache_mooncake.client.canary", "hicache_mooncake.node.service"):
        if importlib.util.find_spec(module) is None:
            return Check(name, SKIPPED, f"skipped: this build has no {module}")
    client = importlib.import_module("hicache_mooncake.client.canary")
    write_and_read_back = cast(Callable[[Settings], str], client.write_and_read_back)
    advice = "look at the log of the node; if the bytes differ, report it"
    try:
        ask_node(settings.socket)
    except Unreachable:
        if settings.node == "external":
            return Check(name, SKIPPED, f"skipped: no node on {settings.socket}")
        try:
            with temporary_node(settings) as small:
                return Check(name, OK, f"{write_and_read_back(small)} (through a temporary node)")
        except Exception as error:
            return Check(name, FAIL, f"{type(error).__name__}: {error}", advice)
    try:
        return Check(name, OK, write_and_read_back(replace(settings, node="external")))
    except Exception as error:
        return Check(name, FAIL, f"{type(error).__name__}: {error}", advice)


# --------------------------------------------------------------------------- all of it


def examine(settings: Settings, environ: Mapping[str, str]) -> list[Check]:
    """Every check, in reading order. One that breaks is a finding of its own and does not hide the others."""
    sglang = version_of("sglang")
    vm = guarded("process_vm_readv", process_vm)
    checks = [
        guarded("versions", versions),
        guarded("plugin", lambda: plugin(environ, sglang)),
        guarded("page copies", lambda: page_copies(settings, sglang, vm)),
        # What is not going to be used is worth knowing, but no failure.
        replace(vm, status=WARN) if vm.status == FAIL and settings.copy_mode != "process_vm" else vm,
        guarded("memfd_create", memfd),
        guarded("memory", lambda: memory(settings)),
        guarded("huge pages", lambda: huge_pages(settings)),
        guarded("/dev/shm", dev_shm),
        *_guarded_all("RDMA", lambda: doctor_transports.examine(settings)),
        *_guarded_all("cold tier", lambda: doctor_cold.examine(settings)),
        guarded("node", lambda: node(settings)),
        guarded("engines", lambda: engines(settings)),
        guarded("cluster key", lambda: key(settings)),
    ]
    checks += _guarded_all("master", lambda: masters(settings))
    checks.append(guarded("canary page", lambda: canary(settings)))
    return checks


def _guarded_all(name: str, checks: Callable[[], list[Check]]) -> list[Check]:
    try:
        return checks()
    except Exception as error:
        return [broken(name, error)]


def run_doctor(explicit: Mapping[str, object], *, as_json: bool, environ: Mapping[str, str] | None = None) -> int:
    """Check and print. Exit status 1 when any check fails."""
    environ = os.environ if environ is None else environ
    settings: Settings | None = None
    notices: list[str] = []
    try:
        settings, notices = load_settings(environ=environ, explicit=explicit)
        changed = sum(1 for source in settings.sources.values() if source != "default")
        checks = [Check("configuration", OK, f"{changed} settings given, {len(notices)} notices")]
        checks += examine(settings, environ)
    except ConfigError as error:
        checks = [Check("configuration", FAIL, str(error), "correct it; the other checks depend on it"), versions()]
    failed = sum(check.status == FAIL for check in checks)
    if as_json:
        print(json.dumps(_report(checks, settings, notices, failed), indent=2))
    else:
        _show(checks, settings, notices, failed)
    return 1 if failed else 0


def _report(checks: list[Check], settings: Settings | None, notices: list[str], failed: int) -> dict[str, object]:
    configuration = {
        setting.attribute: {
            "value": getattr(settings, setting.attribute),
            "source": settings.sources.get(setting.attribute, "default"),
        }
        for setting in SETTINGS
        if settings is not None
    }
    return {
        "version": __version__,
        "failed": failed,
        "checks": [asdict(check) for check in checks],
        "configuration": configuration,
        "notices": notices,
    }


def _show(checks: list[Check], settings: Settings | None, notices: list[str], failed: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=160)
    if settings is not None:
        table = Table("setting", "value", "from", title="effective configuration", title_justify="left")
        for setting in SETTINGS:
            source = settings.sources.get(setting.attribute, "default")
            table.add_row(setting.attribute, escape(display(getattr(settings, setting.attribute))), escape(source))
        console.print(table)
    for notice in notices:
        console.print(f"notice: {escape(notice)}", soft_wrap=True)
    colours = {OK: "green", WARN: "yellow", FAIL: "red", SKIPPED: "dim"}
    for check in checks:
        mark = f"[{colours[check.status]}]{check.status:<7}[/]"
        console.print(f"{mark} [bold]{escape(check.name)}[/]: {escape(check.found)}", soft_wrap=True)
        if check.advice:
            console.print(f"        -> {escape(check.advice)}", soft_wrap=True)
        if check.table:
            grid = Table(*check.table[0])
            for row in check.table[1:]:
                grid.add_row(*map(escape, row))
            console.print(grid)
    console.print(f"{failed} failed" if failed else "nothing failed")
