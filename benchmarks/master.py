"""`make bench-master`: lookups through the master process beside Mooncake's, the directory's memory, and what users feel when a
master restarts, a node goes, or one of two masters is killed.

Everything talks to real `hicache-mooncake master` processes. The peer is the master of Mooncake (PyPI
`mooncake-transfer-engine-non-cuda`, in an environment of its own): `--mooncake PYTHON` names the Python that has it. On a
machine with few cores the clients compete with the master for them: the row about the master's own CPU says what it could do
alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from hicache_master.directory import Directory
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cluster import BATCH, NAMESPACE, Actor, MasterProcess, Node, PlainNode, fill, page_hashes, parts
from benchmarks.conductor import decisions
from benchmarks.harness import Row, interleave, report, save, spread
from benchmarks.machine import ROOT
from hicache_mooncake import protocol as p
from hicache_mooncake.config_values import join_address
from hicache_mooncake.testing.local import free_port

SEED = 7
CLIENTS = 4
IN_FLIGHT = 8
ROUND_S = 1.5
PATIENT = ("--ttl-s", "600", "--heartbeat-s", "1")
"""For nodes that say nothing but what the benchmark has them say."""


class Mooncake:
    """Mooncake's master and clients of it, all under its own Python."""

    def __init__(self, python: str, keys: int) -> None:
        self.address = join_address("127.0.0.1", free_port())
        ports = [f"--rpc_port={self.address.rpartition(':')[2]}", f"--metrics_port={free_port()}"]
        binary = str(Path(python).parent / "mooncake_master")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._processes: list[subprocess.Popen[str]] = [subprocess.Popen([binary, *ports], text=True, **quiet)]
        self._clients: list[subprocess.Popen[str]] = []
        time.sleep(1.0)
        for number in range(CLIENTS):
            command = [python, str(ROOT / "benchmarks" / "mooncake_exist.py"), self.address, str(SEED), str(keys)]
            client = subprocess.Popen(
                [*command, str(int(number == 0))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._clients.append(client)
            self._answer(client)

    def exist(self, clients: int, seconds: float) -> list[tuple[float, float, float]]:
        """What each of so many clients at once says: see `mooncake_exist`."""
        chosen = self._clients[:clients]
        for client in chosen:
            assert client.stdin is not None
            client.stdin.write(f"{seconds}\n")
            client.stdin.flush()
        return [self._answer(client) for client in chosen]

    def close(self) -> None:
        for process in (*self._clients, *self._processes):
            process.kill()
            process.wait(20)

    def _answer(self, client: subprocess.Popen[str]) -> tuple[float, float, float]:
        assert client.stdout is not None
        for line in client.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                answer = json.loads(line)
                return tuple(answer) if isinstance(answer, list) else (0.0, 0.0, 0.0)
        raise RuntimeError(f"Mooncake's client ended with {client.wait()}: run benchmarks/mooncake_exist.py by hand to see why")


@contextlib.contextmanager
def closing(*things: object) -> Iterator[None]:
    try:
        yield
    finally:
        for thing in things:
            thing.close()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------- lookups


def lookups(progress: Progress, options: argparse.Namespace) -> list[Row]:
    """Batches of 128 keys that are all there, against Mooncake's `batch_is_exist` on as many keys."""
    keys, seconds = options.keys, ROUND_S
    master = MasterProcess(*PATIENT)
    nodes = fill(master.address, page_hashes(SEED, keys), 8)
    clients = [Actor(Node, [master.address], number, SEED, keys) for number in range(CLIENTS)]
    peer = Mooncake(options.mooncake, keys) if options.mooncake else None
    times: dict[str, list[tuple[float, float]]] = {}
    cpu: list[float] = []

    def ours(count: int) -> Callable[[int], float]:
        def run(number: int) -> float:
            for client in clients[:count]:
                client.send("lookups", seconds)
            figures = [client.answer() for client in clients[:count]]
            if number:
                times.setdefault(f"ours {count}", []).extend(figure[1:] for figure in figures)
            return sum(figure[0] for figure in figures)

        return run

    def theirs(count: int) -> Callable[[int], float]:
        def run(number: int) -> float:
            assert peer is not None
            figures = peer.exist(count, seconds)
            if number:
                times.setdefault(f"theirs {count}", []).extend(figure[1:] for figure in figures)
            return sum(figure[0] for figure in figures)

        return run

    def in_flight(number: int) -> float:
        before = master.cpu_s()
        for client in clients:
            client.send("in_flight", seconds, IN_FLIGHT)
        rate = sum(client.answer() for client in clients)
        if number:
            cpu.append(rate * seconds / max(0.01, master.cpu_s() - before))
        return float(rate)

    contenders = {"ours 1": ours(1), f"ours {CLIENTS}": ours(CLIENTS), "in flight": in_flight}
    if peer is not None:
        contenders |= {"theirs 1": theirs(1), f"theirs {CLIENTS}": theirs(CLIENTS)}
    with closing(*clients, *nodes, master, *([peer] if peer else [])):
        figures = interleave(contenders, options.rounds, progress, "lookups")
        resident = master.resident_bytes()
    rows = []
    for count in (1, CLIENTS):
        what = f"lookup of {BATCH} of {keys:,} keys, {count} client{'s' if count > 1 else ''}"
        us = figures[f"ours {count}"]
        if peer is not None:
            them = figures[f"theirs {count}"]
            rows.append(Row(what, median(us), median(them), "keys/s", "Mooncake", spread(us), 1.0))
            for name, at in (("p50", 0), ("p99", 1)):
                our_times, their_times = ([one[at] * 1e3 for one in times[f"{who} {count}"]] for who in ("ours", "theirs"))
                row = (f"  a batch, {name}", median(our_times), median(their_times), "ms", "Mooncake", spread(our_times))
                rows.append(Row(*row, lower_is_better=True))
        else:
            rows.append(Row(what, median(us), 1e6, "keys/s", "keys/s wanted", spread(us)))
    what = f"through the master, {CLIENTS} clients with {IN_FLIGHT} batches under way each"
    rows.append(Row(what, median(figures["in flight"]), 1e6, "keys/s", "keys/s wanted", spread(figures["in flight"]), 1.0))
    rows.append(Row("  a second of its loop's CPU", median(cpu), 1e6, "keys", "keys wanted", spread(cpu), 1.0))
    rows.append(Row("  its process, all that it has", resident / keys, 200.0, "B/key", "B allowed", 0.0, 1.0, True))
    return rows


# --------------------------------------------------------------------------- memory


class Memory:
    """A directory in a process of its own, filled with `keys` pages that `holders` of 8 nodes hold each. In an Actor."""

    def fill(self, keys: int, holders: int, turnover: float) -> tuple[float, float, float, float]:
        """(resident bytes a key, what the directory itself says, the longest add, the longest step of a sweep in seconds).
        `turnover`: so often all keys are replaced by new ones, oldest first, before the measurement."""
        start = _resident()
        directory = Directory(1 << 40, random.Random(1))
        slots = [directory.allocate() for _ in range(8)]
        longest = 0.0
        for number in range(-(-keys // 4_096) + int(-(-keys * turnover // 4_096))):
            blob = self._blob(number)
            for slot in self._holders(slots, number, holders):
                before = time.process_time()
                directory.add(slot, NAMESPACE, blob)
                longest = max(longest, time.process_time() - before)
            old = number - -(-keys // 4_096)
            if old >= 0:
                for slot in self._holders(slots, old, holders):
                    directory.remove(slot, NAMESPACE, self._blob(old))
        while directory.sweeping:
            directory.sweep(5_000)
        resident, said = (_resident() - start) / len(directory), directory.resident_bytes / len(directory)
        directory.drop_node(slots[0])
        longest_sweep = 0.0
        while directory.sweeping:
            before = time.process_time()
            directory.sweep(5_000)
            longest_sweep = max(longest_sweep, time.process_time() - before)
        return resident, said, longest, longest_sweep

    @staticmethod
    def _blob(number: int) -> bytes:
        return random.Random(number).randbytes(4_096 * p.HASH_BYTES)

    @staticmethod
    def _holders(slots: list[int], number: int, holders: int) -> list[int]:
        return random.Random(-1 - number).sample(slots, holders)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(progress: Progress, options: argparse.Namespace) -> list[Row]:
    """Resident bytes a key, against the 200 that are allowed."""
    rows = []
    cases = [(1, 1, 0.0), (1, 2, 0.0), (1, 1, 2.0), (1, 2, 2.0)]
    if options.full:
        cases += [(10, 1, 0.0), (10, 2, 0.0), (50, 1, 0.0)]
    task = progress.add_task("memory", total=len(cases))
    for millions, holders, turnover in cases:
        actor = Actor(Memory)
        with closing(actor):
            resident, said, add, sweep = actor.ask("fill", millions * 1_000_000, holders, turnover)
        what = f"{millions} M keys, {holders} holder{'s' if holders > 1 else ''}" + (
            f", replaced {turnover:g} times" if turnover else ""
        )
        rows.append(Row(what, resident, 200.0, "B/key", "B allowed", 0.0, 1.0, True))
        rows.append(Row("  as it says itself", said, resident, "B/key", "B resident", 0.0, None, True))
        rows.append(Row("  longest add of 4096 keys", add * 1e3, 50.0, "ms CPU", "ms allowed", 0.0, 1.0, True))
        rows.append(Row("  longest step of dropping a node", sweep * 1e3, 50.0, "ms CPU", "ms allowed", 0.0, 1.0, True))
        progress.advance(task)
    progress.remove_task(task)
    return rows


# --------------------------------------------------------------------------- what goes wrong


def restart(progress: Progress, options: argparse.Namespace) -> list[Row]:
    """A master is killed and started again: how long until it knows what all nodes hold."""
    share = options.keys // 8
    master = MasterProcess()
    nodes = [Actor(Node, [master.address], number, SEED, options.keys, share, number * share) for number in range(8)]

    def whole() -> bool:
        with contextlib.suppress(RuntimeError):
            said = master.report()
            return said.keys == 8 * share and sum(node.state == "active" for node in said.nodes) == 8
        return False

    def wait() -> float:
        started = time.perf_counter()
        while not whole():
            if time.perf_counter() - started > 120:
                raise RuntimeError("the master did not become whole within two minutes")
            time.sleep(0.05)
        return time.perf_counter() - started

    figures = []
    task = progress.add_task("restart", total=3)
    with closing(*nodes, master):
        wait()
        for _ in range(3):
            master.kill()
            time.sleep(1.0)
            started = time.perf_counter()
            master.start()
            wait()
            figures.append(time.perf_counter() - started)
            progress.advance(task)
    progress.remove_task(task)
    what = f"restarted master whole again, {8 * share:,} keys on 8 nodes"
    return [Row(what, median(figures), 5.0, "s", "s allowed", spread(figures), 1.0, True)]


def dropping(progress: Progress, options: argparse.Namespace) -> list[Row]:
    """A node with a million keys leaves, or throws all of them away: what lookups and heartbeats of others wait meanwhile."""
    count = 1_000_000
    master = MasterProcess(*PATIENT)
    nodes = fill(master.address, page_hashes(SEED, options.keys), 8)
    client = Actor(Node, [master.address], 0, SEED, options.keys)
    hashes = page_hashes(SEED + 1, count)
    longest: dict[str, list[float]] = {}
    beats: dict[str, list[float]] = {}

    def meanwhile(name: str, start: Callable[[], None], over: Callable[[int], bool]) -> None:
        client.send("watch", 2.0)
        time.sleep(0.3)
        start()
        beat, began = 0.0, time.perf_counter()
        while True:
            beat = max(beat, nodes[0].beat())
            done = over(master.report().keys) and time.perf_counter() - began > 2.0
            if done:
                break
            if time.perf_counter() - began > 120:
                raise RuntimeError(f"{name}: not over within two minutes")
            time.sleep(0.02)
        client.send("nothing")
        wait, failed = client.answer()
        client.answer()
        if failed:
            raise RuntimeError(f"{failed} lookups failed")
        longest.setdefault(name, []).append(wait * 1e3)
        beats.setdefault(name, []).append(beat * 1e3)

    task = progress.add_task("dropping", total=3)
    with closing(client, *nodes, master):
        for number in range(3):
            big = PlainNode(master.address, "big", 9_999)
            big.join()
            big.give(hashes)
            meanwhile("nothing", lambda: None, lambda _: True)
            meanwhile("leaves", big.leave, lambda keys: keys <= options.keys)
            big.close()
            big = PlainNode(master.address, f"big-{number}", 9_998)
            big.join()
            big.give(hashes)

            def evict(node: PlainNode = big) -> None:
                for blob in parts(hashes):
                    node.update(removed=blob)

            meanwhile("evicts", evict, lambda keys: keys <= options.keys)
            big.leave()
            big.close()
            progress.advance(task)
    progress.remove_task(task)
    rows = []
    for name, what in (
        ("nothing", "nothing happens"),
        ("leaves", "a node with 1 M keys leaves"),
        ("evicts", "a node evicts 1 M keys at once"),
    ):
        target = None if name == "nothing" else 1.0
        for kind, figures in (("lookup", longest[name]), ("heartbeat", beats[name])):
            row = (f"{what}: longest {kind}", median(figures), 50.0, "ms", "ms allowed", spread(figures), target, True)
            rows.append(Row(*row))
    return rows


def failover(progress: Progress, options: argparse.Namespace) -> list[Row]:
    """kill -9 of one of two masters under a loop of lookups: the longest time without an answer."""
    keys = min(options.keys, 200_000)
    masters = [MasterProcess("--heartbeat-s", "0.5", "--ttl-s", "5") for _ in range(2)]
    addresses = [master.address for master in masters]
    holder = Actor(Node, addresses, 1, SEED, keys, keys)
    client = Actor(Node, addresses, 0, SEED, keys)
    gaps, lost = [], 0

    def ready(master: MasterProcess) -> bool:
        with contextlib.suppress(RuntimeError):
            said = master.report()
            return said.keys == keys and not said.warming and sum(node.state == "active" for node in said.nodes) == 2
        return False

    rounds = 4
    task = progress.add_task("failover", total=rounds)
    with closing(client, holder, *masters):
        for number in range(rounds):
            deadline = time.monotonic() + 120
            while not all(map(ready, masters)):
                if time.monotonic() > deadline:
                    raise RuntimeError("two masters did not become whole within two minutes")
                time.sleep(0.1)
            client.send("watch", 1.0)
            time.sleep(0.5)
            masters[number % 2].kill()
            time.sleep(3.0)
            client.send("nothing")
            gap, failed = client.answer()
            client.answer()
            gaps.append(gap)
            lost += failed
            masters[number % 2].start()
            progress.advance(task)
    progress.remove_task(task)
    what = f"kill -9 of one of two masters: longest gap of {rounds} tries, {lost} lookups without an answer"
    return [Row(what, max(gaps), 1.0, "s", "s allowed", spread(gaps), 1.0, True)]


SECTIONS = {
    "lookup": lookups,
    "memory": memory,
    "restart": restart,
    "drop": dropping,
    "failover": failover,
    "conductor": decisions,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=[], help="which parts; all without any")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keys", type=int, default=1_000_000, help="in the directory; Mooncake gets as many")
    parser.add_argument("--mooncake", metavar="PYTHON", help="the Python that has mooncake-transfer-engine(-non-cuda)")
    parser.add_argument("--full", action="store_true", help="memory of 10 M and 50 M keys too: needs 6 GB and some minutes")
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if not options.mooncake:
        print("without --mooncake PYTHON there is no peer to compare with")
    rows: list[Row] = []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        for name in options.sections or SECTIONS:
            rows += SECTIONS[name](progress, options)
    busy = f"{os.cpu_count()} cores, of which others kept {load:.1f} busy at the start"
    report(rows, f"medians of {options.rounds} interleaved rounds; the longest waits: medians of 3 tries; {busy}")
    print(f"saved as {save(rows, 'master', path=options.out)}")


if __name__ == "__main__":
    main()
