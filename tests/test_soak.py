"""The soak's own judgement: what grows is noticed, what only moves or is young is not; and a short run of the whole."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.soak import ALLOWED, COLD_COUNTERS, MIB, NODES, Series, Soak, plot, run, table, tier_bytes
from tests.faults.cluster import Cluster

LENGTH_S = 1200.0


def series(what: str, values: list[tuple[float, int, float]]) -> Series:
    return Series("node a", what, values)


def over_time(what: str, start: float, an_hour: float, noise: float = 0.0, pid: int = 1, since: float = 0.0) -> Series:
    times = [since + 5.0 * i for i in range(int((LENGTH_S - since) / 5) + 1)]
    return series(what, [(at, pid, start + an_hour * at / 3600 + noise * math.sin(at)) for at in times])


@pytest.mark.parametrize("what", ALLOWED)
def test_a_leak_is_noticed_and_noise_is_not(what: str) -> None:
    start = {"memory": 100.0 * MIB, "pinned": 0.0, "reserved": 0.0}.get(what, 1000.0)
    most = ALLOWED[what](start)
    leak = over_time(what, start, an_hour=12 * most, noise=most / 8)
    assert what in leak.grew(LENGTH_S)
    assert leak.slope() == pytest.approx(12 * most, rel=0.2)
    assert over_time(what, start, an_hour=0.0, noise=most / 4).grew(LENGTH_S) == ""
    assert over_time(what, start, an_hour=-12 * most).grew(LENGTH_S) == "", "what shrinks does not grow"


def test_what_fills_up_to_its_bound_does_not_grow() -> None:
    values = [(at, pid, min(value, 56.0 * MIB)) for at, pid, value in over_time("memory", 30.0 * MIB, 120.0 * MIB).points]
    assert values[-1][2] == 56.0 * MIB
    assert series("memory", values).grew(LENGTH_S) == ""
    still = [(at, pid, value + at * 4 * MIB / 300) for at, pid, value in values]
    assert "memory" in series("memory", still).grew(LENGTH_S), "a leak beside it is noticed"


def test_a_young_process_is_not_compared_with_its_former_life() -> None:
    old = over_time("memory", 40.0 * MIB, 0.0).points[:200]
    young = over_time("memory", 400.0 * MIB, 0.0, pid=2, since=1000.0).points
    restarted = series("memory", [*old, *young])
    assert restarted.grew(LENGTH_S) == ""
    assert not restarted.lived(LENGTH_S)
    assert restarted.between(0.25, 0.5, LENGTH_S) is None


def test_what_a_cold_tier_must_never_do_is_noticed(tmp_path: Path) -> None:
    soak = Soak(Cluster(tmp_path), 1, cold=tmp_path)
    soak.series["node a", "tier file"] = over_time("tier file", tier_bytes("a"), 0.0)
    soak.series["node a", "write amplification"] = over_time("write amplification", 1.5, 1.4)
    soak.series["node c", "write amplification"] = over_time("write amplification", 9.0, 0.0, since=LENGTH_S / 2)
    soak.totals.update(dict.fromkeys(COLD_COUNTERS, 1) | {"cold_damaged": 0, "cold_errors": 0})
    assert soak.tiers_wrong(LENGTH_S) == []
    soak.totals.update(cold_damaged=3, cold_errors=1)
    soak.tier_problems["a: writing failed"] += 1
    soak.series["node a", "tier file"].points.append((LENGTH_S, 1, tier_bytes("a") + 3.0 * MIB))
    soak.series["node a", "write amplification"].points.append((LENGTH_S, 1, 2.01))
    wrong = " ".join(soak.tiers_wrong(LENGTH_S))
    for each in ("cold_damaged", "cold_errors", "writing failed", "387 MiB, more than it may", "was 2.01"):
        assert each in wrong


def test_the_table_and_the_plot_show_every_process(tmp_path: Path) -> None:
    soak = Soak(Cluster(tmp_path), 1)
    for who in ("node a", "load mover a", "node <b>"):
        soak.series[who, "memory"] = Series(who, "memory", over_time("memory", 30.0 * MIB, 0.0).points)
    soak.series["node a", "threads"] = over_time("threads", 12.0, 0.0)
    console = Console(record=True, width=140, file=(tmp_path / "out").open("w"))
    console.print(table(soak, LENGTH_S))
    text = console.export_text()
    assert "memory, MiB" in text
    assert "node <b>" in text
    assert "30.0" in text
    root = ET.fromstring(plot(soak, LENGTH_S, "a & b"))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    assert {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")} >= {
        "a & b",
        "node <b>",
        "load movers",
        "threads",
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("links", "idle_s", "tier"),
    [("", 0.0, False), ("tcp", 1.0, False), ("", 0.0, True)],
    ids=["tcp", "links and rests", "cold tiers"],
)
def test_a_short_soak_loses_nothing(tmp_path: Path, links: str, idle_s: float, tier: bool) -> None:
    """A minute of everything at once: too short to tell growth from warming up, long enough for wrong bytes, hangs and
    leftovers."""
    cold = None
    if tier:
        cold = tmp_path / "cold"
        cold.mkdir()
    with (tmp_path / "out").open("w") as out:
        soak, load, length_s, problems = run(1.0, 7, tmp_path, Console(file=out), links=links, idle_s=idle_s, cold=cold)
    assert [problem for problem in problems if "grew" not in problem] == []
    assert load.record.wrong == 0
    assert length_s >= 60
    assert len(soak.faults) >= 6, soak.faults
    assert {f"node {name}" for name in NODES} <= {who for who, _ in soak.series}
