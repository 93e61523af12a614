"""What `make bench` keeps of its rows: where they come from, and what they cost beside the time they took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.progress import Progress

from benchmarks import harness, machine
from benchmarks.harness import Bench, compare, interleave
from benchmarks.usage import METER, Figures, cost_of, tree
from tests.conftest import START_S, wait_until

BURNT_S = 0.2


def burn() -> None:
    """Processor time of this thread."""
    until = time.thread_time() + BURNT_S
    while time.thread_time() < until:
        pass


def test_a_tree_has_the_children_of_a_process_but_for_those_left_out() -> None:
    script = "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert set(tree(parent.pid)) == {parent.pid, child}
            assert {parent.pid, child} <= set(tree(os.getpid()))
            assert tree(parent.pid, without={child}) == [parent.pid]
            assert not {parent.pid, child} & set(tree(os.getpid(), without={parent.pid}))
        finally:
            os.kill(child, 9)
            parent.kill()


def test_a_turn_costs_what_the_part_costs_that_it_times() -> None:
    def whole(_round: int) -> float:
        burn()
        return 1.0

    def part(_round: int) -> float:
        burn()
        with METER.timed():
            pass
        return 1.0

    with Progress(disable=True) as progress:
        figures = interleave({"whole": whole, "part": part}, 1, progress, "")
    whole_cost, part_cost = cost_of(figures["whole"]), cost_of(figures["part"])
    assert whole_cost is not None
    assert part_cost is not None
    assert whole_cost.cpu_s >= BURNT_S > part_cost.cpu_s


def test_children_that_have_ended_within_a_turn_count() -> None:
    script = f"import time\nwhile time.process_time() < {BURNT_S}: pass"
    _, cost = METER.turn(lambda _: float(subprocess.run([sys.executable, "-c", script], check=True).returncode), 0)
    assert cost.cpu_s >= BURNT_S


def test_a_peer_that_is_apart_does_not_count_as_ours_and_is_metered_by_itself() -> None:
    script = "import time\nheld = b'x' * (300 << 20)\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as peer:
        try:
            assert peer.stdout is not None
            peer.stdout.readline()
            METER.apart.add(peer.pid)

            def until_it_has_worked(_round: int) -> float:
                before = time.clock_gettime((~peer.pid << 3) | 2)
                wait_until(lambda: time.clock_gettime((~peer.pid << 3) | 2) > before + BURNT_S, START_S)
                return 0.0

            def theirs(number: int) -> float:
                with METER.timed([peer.pid]):
                    return until_it_has_worked(number)

            _, ours = METER.turn(until_it_has_worked, 0)
            _, other = METER.turn(theirs, 0)
        finally:
            METER.apart.discard(peer.pid)
            peer.kill()
    assert other.cpu_s >= BURNT_S > ours.cpu_s
    assert other.peak_bytes >= 300 << 20


def test_memory_that_processes_share_counts_once() -> None:
    memory = harness.Memory(256 << 20)
    script = f"import mmap; held = mmap.mmap({memory.fd}, 256 << 20); held.find(b'no such bytes'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory.fd]
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        _, cost = METER.turn(lambda _: 0.0, 0)
        alone = METER.turn(lambda number: float(other.kill() or other.wait() or number), 0)[1]
    memory.close()
    assert 256 << 20 < cost.peak_bytes < alone.peak_bytes + (128 << 20)


def test_nothing_is_metered_outside_of_a_turn() -> None:
    with METER.timed():
        burn()
    _, cost = METER.turn(lambda _: 0.0, 0)
    assert cost.cpu_s < BURNT_S


def test_a_row_has_the_costs_of_both_and_none_of_what_is_only_allowed() -> None:
    with Progress(disable=True) as progress:
        figures = interleave({"ours": lambda _: 2.0, "theirs": lambda _: 4.0}, 3, progress, "")
    row = compare("rate", figures["ours"], figures["theirs"], "GB/s", "memcpy", 0.7)
    assert (row.ours, row.ceiling, row.ratio, row.missed) == (2.0, 4.0, 0.5, True)
    assert row.ours_cost is not None
    assert row.ours_cost.peak_bytes > 0
    assert row.ceiling_cost == cost_of(figures["theirs"])
    allowed = compare("time", figures["ours"], 1.0, "ms", "ms allowed", 1.0, True)
    assert (allowed.ceiling, allowed.ceiling_cost) == (1.0, None)
    assert cost_of(Figures([1.0])) is None
    assert cost_of([1.0]) is None


def test_a_result_says_where_it_comes_from_and_what_did_not_take_part(tmp_path: Path) -> None:
    with Progress(disable=True) as progress:
        bench = Bench(progress, 3, disk=str(tmp_path), skipped={"Redis": "no redis-server in PATH"})
        figures = bench.interleave({"ours": lambda _: 2.0}, "")["ours"]
    path = harness.save([compare("rate", figures, 4.0, "GB/s", "memcpy")], "some", bench, tmp_path / "new" / "some.json")
    record = json.loads(path.read_text())
    assert {"benchmark", "time", "commit", "dirty", "versions"} <= set(record)
    assert {"cpu", "cores", "memory_bytes", "kernel", "python", "disk"} == set(record["machine"])
    assert record["machine"]["disk"]["bytes"] > 0
    assert record["skipped"] == {"Redis": "no redis-server in PATH"}
    (row,) = record["rows"]
    assert row["ratio"] == 0.5
    assert row["ours_cost"]["wall_s"] > 0
    assert row["ceiling_cost"] is None


def test_versions_are_those_of_the_python_that_a_peer_runs_on() -> None:
    found = machine.versions({"lmcache": sys.executable, "nixl": ""})
    assert "msgspec" in found
    assert not any(name.startswith("nixl:") for name in found)
    with pytest.raises(KeyError):
        machine.versions({"somebody": sys.executable})
