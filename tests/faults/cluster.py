"""A cluster of real processes under load: masters, nodes, ranks with their movers, and threads that write and read.

Every byte that a rank is told it has is compared with what (namespace, page hash) says, and every call is written down: who,
when, how long, what became of it. A test does something to the cluster meanwhile and looks at the record afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hicache_mooncake.client.client import Body, Outcome
from hicache_mooncake.client.embedded import node_answers
from hicache_mooncake.config import Settings, load_settings
from hicache_mooncake.testing.local import FakeRank, free_port, page_hash, pattern
from tests.conftest import START_S, environment, wait_until

NS = b"n" * 16
HANG_S = 20.0
"""More than any call may take however busy the machine is: a limit on hangs, not a measurement."""

Run = Callable[[Callable[[], None]], None]


def here(work: Callable[[], None]) -> None:
    """Runs something on the host that the test itself is on."""
    work()


class CheckedRank(FakeRank):
    """A rank whose pages have bytes that say which namespace and hash they are of. Stores and loads run beside each other, each
    kind in its half of the memory and one at a time."""

    def __init__(self, settings: Settings, *, batch: int = 8, page_bytes: int = 64 << 10, shared: bool = False) -> None:
        super().__init__(settings, pages=2 * batch, page_bytes=page_bytes, shared=shared)
        self.batch = batch
        self._putting, self._taking = threading.Lock(), threading.Lock()

    def put(self, namespace: bytes, hashes: Sequence[bytes]) -> Outcome:
        """Store at most `batch` pages."""
        with self._putting:
            for page, each in enumerate(hashes):
                self.write(page, pattern(namespace + each, self.page_bytes))
            return self.transfer("store", namespace, hashes, range(len(hashes)))

    def take(self, namespace: bytes, hashes: Sequence[bytes], within_s: float | None = None) -> tuple[Outcome, int]:
        """Load at most `batch` pages, within the deadline or a time of the caller's own. Returns the outcome, and how many
        pages are said to be loaded and have other bytes than they should."""
        pages = range(self.batch, self.batch + len(hashes))
        blank = b"\xaa" * self.page_bytes
        with self._taking:
            for page in pages:
                self.write(page, blank)
            deadline = None if within_s is None else time.monotonic() + within_s
            body = Body(namespace, self.runs, shared=self.shared)
            outcome = self.client.transfer("load", body, b"".join(hashes), array("q", pages), deadline=deadline)
            wrong = 0
            for page, each, ok in zip(pages, hashes, outcome.ok, strict=True):
                wrong += bool(ok) and self.read(page) != pattern(namespace + each, self.page_bytes)
        return outcome, wrong


@dataclass
class Daemon:
    """A process of the cluster. `prefix` is what it is started under: a network namespace, a time namespace, a limit."""

    name: str
    command: list[str]
    log: Path
    ready: Callable[[str], bool]
    """Does it serve? It is given what was logged since the start."""
    prefix: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    _log_from: int = 0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, wait: bool = True) -> None:
        with self.log.open("ab") as output:
            self._log_from = output.tell()
            self.process = subprocess.Popen(
                [*self.prefix, *self.command], stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment()
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        wait_until(lambda: not self.alive or self.ready(self.said()), START_S, f"{self.name} is ready")
        assert self.alive, self.said()

    def said(self) -> str:
        """What it has logged since it was started."""
        return self.log.read_bytes()[self._log_from :].decode(errors="replace")

    def signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def ended(self, timeout_s: float = 30.0) -> int:
        """Wait for its end; returns the exit status."""
        assert self.process is not None
        return self.process.wait(timeout_s)


class Cluster:
    """Processes in one folder. Close it, or use it as a context manager: nothing that it started lives on."""

    def __init__(self, folder: Path, *, page_bytes: int = 64 << 10, batch: int = 8) -> None:
        self.folder = folder
        self.page_bytes, self.batch = page_bytes, batch
        self.masters: dict[str, Daemon] = {}
        self.nodes: dict[str, Daemon] = {}
        self.ranks: dict[str, CheckedRank] = {}
        self.addresses: dict[str, str] = {}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def master(
        self, name: str, *options: str, host: str = "127.0.0.1", prefix: tuple[str, ...] = (), wait: bool = True
    ) -> Daemon:
        """Start a master. `host`: the address to listen on."""
        address = f"{host}:{free_port()}"
        command = [sys.executable, "-m", "hicache_mooncake.cli", "master", "--listen", address, *options]
        daemon = Daemon(name, command, self.folder / f"{name}.out", lambda said: " serves: " in said, prefix)
        self.masters[name], self.addresses[name] = daemon, address
        daemon.start(wait)
        return daemon

    def node(
        self, name: str, *options: str, dram: str = "256MiB", prefix: tuple[str, ...] = (), wait: bool = True, listen: str = ""
    ) -> Daemon:
        """Start a node that knows all masters there are by now, as if on a host of its own."""
        socket = str(self.folder / f"{name}.sock")
        command = [sys.executable, "-m", "hicache_mooncake.cli", "node", "--socket", socket, "--dram", dram, "--name", name]
        command += ["--listen", listen or "127.0.0.1:0", "--host-id", name]
        for address in self.addresses.values():
            command += ["--master", address]
        daemon = Daemon(name, [*command, *options], self.folder / f"{name}.out", lambda _: node_answers(socket), prefix)
        self.nodes[name] = daemon
        daemon.start(wait)
        return daemon

    def settings(self, node: str, **explicit: object) -> Settings:
        socket = str(self.folder / f"{node}.sock")
        return load_settings({}, {}, {"socket": socket, "node": "external"} | explicit)[0]

    def rank(self, node: str, *, name: str = "", run: Run = here, shared: bool = False, **settings: object) -> CheckedRank:
        """An engine rank beside a node. `run` puts it, and so its movers, on another host."""
        made: list[CheckedRank] = []

        def make() -> None:
            of_node = self.settings(node, **settings)
            made.append(CheckedRank(of_node, batch=self.batch, page_bytes=self.page_bytes, shared=shared))

        run(make)
        self.ranks[name or node] = made[0]
        return made[0]

    def states(self, by: str) -> dict[str, str]:
        """The state of each node, as the rank of this name is told."""
        report = self.ranks[by].client.status()
        return {} if report is None else {info.node: info.state for info in report.cluster}

    def report(self, rank: str) -> dict[str, int | float | str | bool]:
        """What the rank's node says of itself."""
        answer = self.ranks[rank].client.status()
        assert answer is not None
        return answer.node

    def whole(self, *, by: Iterable[str] = (), timeout_s: float = 60.0) -> None:
        """Wait until every node that runs is active, as every rank sees it."""
        expected = {name for name, daemon in self.nodes.items() if daemon.alive}
        for rank in by or self.ranks:
            wait_until(
                lambda rank=rank: {n for n, state in self.states(rank).items() if state == "active"} >= expected,  # type: ignore[misc]
                timeout_s,
                f"{rank} sees all of {sorted(expected)} active",
            )

    def heal(self) -> None:
        """Whatever a test left dead or stopped runs again."""
        for daemon in [*self.masters.values(), *self.nodes.values()]:
            if daemon.alive:
                daemon.signal(signal.SIGCONT)
            else:
                daemon.start()
        self.whole()
        # A rank whose node was gone leaves it alone for a while, which is longer each time.
        for name, rank in self.ranks.items():
            page = [page_hash(("healed", name))]
            wait_until(lambda rank=rank, page=page: rank.put(NS, page).ok == b"\1", 60, f"{name} stores")  # type: ignore[misc]
            wait_until(lambda rank=rank, page=page: rank.take(NS, page)[0].ok == b"\1", 60, f"{name} loads")  # type: ignore[misc]

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()
        self.ranks.clear()
        for daemon in [*self.nodes.values(), *self.masters.values()]:
            if daemon.alive:
                daemon.signal(signal.SIGCONT)
            daemon.kill()


@dataclass(frozen=True)
class Call:
    """One storage call. `at` and `took_s` are on the test's monotonic clock."""

    who: str
    op: str
    at: float
    took_s: float
    pages: int
    whole: int
    remote_bytes: int = 0
    reasons: tuple[tuple[str, int], ...] = ()

    @property
    def end(self) -> float:
        return self.at + self.took_s


@dataclass
class Record:
    """What happened. `wrong` must stay 0, and `errors` empty."""

    calls: list[Call] = field(default_factory=list)
    """The latest, as many as the load keeps."""
    slowest_s: float = 0.0
    """Of all calls, also those that are not kept."""
    wrong: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def longest(self, op: str | None = None, who: str | None = None, since: float = 0.0, until: float = float("inf")) -> float:
        return max((call.took_s for call in self.select(op, who, since, until)), default=0.0)

    def select(
        self, op: str | None = None, who: str | None = None, since: float = 0.0, until: float = float("inf")
    ) -> list[Call]:
        """Calls that overlap this time."""
        return [
            call
            for call in self.calls
            if (op is None or call.op == op) and (who is None or call.who == who) and call.end >= since and call.at <= until
        ]

    def p99(self, op: str, since: float, until: float, who: str | None = None) -> float:
        took = sorted(call.took_s for call in self.select(op, who, since, until))
        return took[min(len(took) - 1, int(len(took) * 0.99))] if took else 0.0

    def gap(self, since: float, until: float, who: str | None = None, *, remote: bool = True) -> float:
        """The longest time without a load that brought pages (of other hosts)."""
        ends = [since]
        for call in sorted(self.select("load", who, since, until), key=lambda call: call.end):
            if call.whole and (call.remote_bytes or not remote):
                ends.append(min(call.end, until))
        ends.append(until)
        return max(after - before for before, after in itertools.pairwise(ends))

    def reasons(self, since: float = 0.0) -> Counter[str]:
        counted: Counter[str] = Counter()
        for call in self.select(since=since):
            counted.update(dict(call.reasons))
        return counted


class Load:
    """Two threads a rank: one stores new chains, the other looks up and loads chains that anybody stored.

    `run` gives for each rank how to get onto its host. `hurried` is the part of the loads whose time is cut short, as that of
    requests that are aborted. Use it as a context manager; what is wrong raises at the end."""

    def __init__(
        self,
        cluster: Cluster,
        ranks: Sequence[str] = (),
        *,
        namespaces: Sequence[bytes] = (NS,),
        remembered: int = 64,
        pause_s: float = 0.01,
        store_pause_s: float = 0.05,
        writers: Sequence[str] | None = None,
        run: dict[str, Run] | None = None,
        seed: int = 1,
        keep: int = 200_000,
        hurried: float = 0.0,
    ) -> None:
        self.cluster = cluster
        self.names = list(ranks or cluster.ranks)
        self.writers = self.names if writers is None else list(writers)
        self.namespaces = list(namespaces)
        self.record = Record()
        self._calls: deque[Call] = deque(maxlen=keep)
        self._known: deque[tuple[str, bytes, list[bytes]]] = deque(maxlen=remembered)
        self._pause_s, self._store_pause_s = pause_s, store_pause_s
        self._run = run or {}
        self._seed = seed
        self._hurried = hurried
        self._stop = threading.Event()
        self._busy = threading.Event()
        self._busy.set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()
        if kind is None:
            self.check()

    def start(self) -> None:
        for number, name in enumerate(self.names):
            for work in [self._read, self._write] if name in self.writers else [self._read]:
                thread = threading.Thread(target=self._on_host, args=(work, name, self._seed * 1000 + number), daemon=True)
                self._threads.append(thread)
                thread.start()

    def rest(self) -> None:
        """No call begins until `work`."""
        self._busy.clear()

    def work(self) -> None:
        self._busy.set()

    def stop(self) -> None:
        self._stop.set()
        self._busy.set()
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "a call hangs"
        self.record.calls = list(self._calls)

    def check(self) -> None:
        """No wrong byte, nothing raised, no call hung. Raises AssertionError."""
        if self.record.wrong:
            raise AssertionError(f"{self.record.wrong} wrong pages")  # not an assert: also under -O
        if self.record.errors:
            raise AssertionError(f"raised into a rank: {self.record.errors[:3]}") from self.record.errors[0]
        assert self.record.slowest_s < HANG_S
        assert any(call.whole for call in self.record.calls), "nothing was ever loaded: the test shows nothing"

    def so_far(self) -> list[Call]:
        return list(self._calls)

    def known(self, by: str | None = None) -> list[tuple[str, bytes, list[bytes]]]:
        """(who stored it, namespace, chain), the newest last."""
        with self._lock:
            return [entry for entry in self._known if by is None or entry[0] == by]

    def forget(self, by: str) -> None:
        """Chains of a writer whose pages are gone are not asked for any more."""
        with self._lock:
            kept = [entry for entry in self._known if entry[0] != by]
            self._known.clear()
            self._known.extend(kept)

    def settled(self) -> None:
        """Wait until loads of other hosts' pages succeed at every rank."""
        self.goes_on(*self.names, remote=True)

    def goes_on(self, *names: str, remote: bool | None = None) -> None:
        """Wait until each of these ranks has loaded pages anew: of other hosts, its own, or either."""
        since = time.monotonic()
        for name in names:
            wait_until(
                lambda name=name: any(  # type: ignore[misc]
                    call.who == name
                    and call.op == "load"
                    and call.at > since
                    and call.whole
                    and (remote is None or remote == bool(call.remote_bytes))
                    for call in list(self._calls)
                ),
                HANG_S * 2,
                f"{name} loads pages" + {None: "", True: " of other hosts", False: " of its own"}[remote],
            )

    def _on_host(self, work: Callable[[str, random.Random], None], name: str, seed: int) -> None:
        try:
            self._run.get(name, here)(lambda: work(name, random.Random(seed)))
        except BaseException as error:
            self.record.errors.append(error)

    def _goes_on(self, pause_s: float) -> bool:
        """After this time and its rests; False at the end."""
        if not self._stop.wait(pause_s):
            self._busy.wait()
        return not self._stop.is_set()

    def _write(self, name: str, rng: random.Random) -> None:
        number = 0
        while self._goes_on(self._store_pause_s * rng.uniform(0.5, 1.5)):
            rank = self.cluster.ranks[name]
            namespace = rng.choice(self.namespaces)
            chain = [page_hash((self._seed, name, number, at)) for at in range(rank.batch)]
            number += 1
            at = time.monotonic()
            outcome = rank.put(namespace, chain)
            self._note(name, "store", at, len(chain), outcome)
            if outcome.ok[0]:
                with self._lock:
                    self._known.append((name, namespace, chain[: (outcome.ok + b"\0").index(0)]))

    def _read(self, name: str, rng: random.Random) -> None:
        while self._goes_on(self._pause_s * rng.uniform(0.5, 1.5)):
            rank = self.cluster.ranks[name]
            with self._lock:
                entry = rng.choice(self._known) if self._known else None
            if entry is None:
                continue
            _, namespace, chain = entry
            at = time.monotonic()
            found = rank.exists(namespace, chain)
            self._note(name, "exists", at, len(chain), Outcome(b"\1" * found + bytes(len(chain) - found)))
            if not found:
                continue
            at = time.monotonic()
            outcome, wrong = rank.take(
                namespace, chain[:found], rng.uniform(0.1, 0.3) if rng.random() < self._hurried else None
            )
            self._note(name, "load", at, found, outcome)
            if wrong:
                with self._lock:
                    self.record.wrong += wrong

    def _note(self, who: str, op: str, at: float, pages: int, outcome: Outcome) -> None:
        reasons = tuple(outcome.reasons.items())
        took_s = time.monotonic() - at
        with self._lock:
            self.record.slowest_s = max(self.record.slowest_s, took_s)
        self._calls.append(Call(who, op, at, took_s, pages, outcome.ok.count(1), outcome.remote_bytes, reasons))


# --------------------------------------------------------------------------- a process's own account, from /proc


def resident_bytes(pid: int) -> int:
    """Memory of its own, without what it shares with others (segments, host pools)."""
    statm = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(statm[1]) - int(statm[2])) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@contextlib.contextmanager
def paused(daemon: Daemon) -> Iterator[None]:
    daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.signal(signal.SIGCONT)
