"""Traces through the conductor in simulated time: the simulation itself, what each policy makes of a trace, and the command."""

from __future__ import annotations

import json
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hicache_master.conductor.replay import Arrival, Outcome, Replay, Setup, read_trace
from typer.testing import CliRunner

from hicache_mooncake.cli import app, charts

CONVERSATION = Path(os.environ.get("HICACHE_TRACES", "traces")) / "conversation_trace.jsonl"
needs_trace = pytest.mark.skipif(not CONVERSATION.exists(), reason="HICACHE_TRACES names no folder with the public traces")


@cache
def talks(seed: int = 0, requests: int = 400) -> tuple[Arrival, ...]:
    """Conversations that share their first page and come back with a longer prompt."""
    rng = random.Random(seed)
    open_talks: list[list[int]] = []
    named, now, arrivals = 1, 0.0, []
    for _ in range(requests):
        now += rng.expovariate(2)
        if open_talks and rng.random() < 0.7:
            pages = rng.choice(open_talks[-60:])
        else:
            pages = [0]
            open_talks.append(pages)
        more = rng.randrange(2, 30)
        pages += range(named, named + more)
        named += more
        arrivals.append(Arrival(now, 512 * len(pages) - rng.randrange(512), rng.randrange(1, 400), tuple(pages)))
    return tuple(arrivals)


@cache
def replayed(policy: str, **more: float) -> Outcome:
    return Replay(Setup(policy=policy, prefills=4, decodes=0, **more)).run(talks())  # type: ignore[arg-type]


def test_every_request_ends_once_and_the_same_way_each_time() -> None:
    setup = Setup(prefills=3, decodes=3, admission="predictive", ttft_slo_s=3.0, tbt_slo_s=0.03, noise=0.2)
    outcomes = [Replay(setup).run(talks()) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0].ttft_s) + outcomes[0].rejections == outcomes[0].requests == 400
    assert outcomes[0].rejections > 0


def test_the_books_are_empty_at_the_end() -> None:
    for more in (
        {},
        {"fetch_while_queued": True, "noise": 0.3, "prior": 2.0},
        {"cache_tokens": 40_000, "cold_tokens": 400_000},
    ):
        replay = Replay(Setup(prefills=4, decodes=4, **more))  # type: ignore[arg-type]
        replay.run(talks())
        assert len(replay.conductor) == 0
        assert replay.conductor.prefixes.expected_keys == 0
        assert all(replay.conductor.costs.links.in_flight(f"prefill-{number}") == 0 for number in range(4))
        replay.conductor.validate()


def test_one_request_takes_what_the_model_says() -> None:
    outcome = Replay(Setup(prefills=2, decodes=1)).run([Arrival(5.0, 8192, 100, tuple(range(16)))])
    work = Setup().model.work(8192) / (8 * 312e12 * 0.5)
    assert outcome.ttft_s == [pytest.approx(0.02 + work)]
    assert outcome.mean_tbt_s == pytest.approx(0.015 + 0.004 + 8192 * 327_680 / (8 * 2.039e12))


def test_decodes_that_share_an_engine_slow_each_other_down() -> None:
    both = [Arrival(0.0, 512, 100, (number,)) for number in (1, 2)]
    alone = Replay(Setup(prefills=2, decodes=2)).run(both)
    together = Replay(Setup(prefills=2, decodes=1)).run(both)
    assert together.mean_tbt_s == pytest.approx(alone.mean_tbt_s + 0.004, rel=0.01)


def test_waiting_is_part_of_the_ttft() -> None:
    burst = [Arrival(0.0, 8192, 1, tuple(range(100 * number, 100 * number + 16))) for number in range(3)]
    first, second, third = Replay(Setup(prefills=1, decodes=0)).run(burst).ttft_s
    assert (second, third) == (pytest.approx(2 * first), pytest.approx(3 * first))
    faster = Replay(Setup(prefills=1, decodes=0, speed=2.0)).run([Arrival(10 * n, 8192, 1, (n,)) for n in range(3)])
    assert faster.ttft_s == [pytest.approx(first)] * 3


def test_ours_beats_what_does_not_move_pages_and_spreads_the_load() -> None:
    ours, local, queue, longest = (replayed(each) for each in ("pool-aware", "local-aware", "least-queue", "longest-prefix"))
    assert ours.mean_ttft_s < local.mean_ttft_s < queue.mean_ttft_s < longest.mean_ttft_s
    assert ours.imbalance < 1.2
    assert longest.imbalance == pytest.approx(4.0), "all share their first page"
    assert ours.hit_ratio > local.hit_ratio > queue.hit_ratio
    assert ours.fetched_pages > 0 == local.fetched_pages


def test_predictions_that_start_wrong_are_mended_on_the_way() -> None:
    right, wrong = replayed("pool-aware", noise=0.1), replayed("pool-aware", noise=0.1, prior=3.0)
    assert wrong.mean_ttft_s < 1.2 * right.mean_ttft_s


def test_a_cold_tier_saves_what_dram_has_no_room_for() -> None:
    small = replayed("pool-aware", cache_tokens=30_000)
    cold = replayed("pool-aware", cache_tokens=30_000, cold_tokens=3_000_000)
    assert cold.hit_ratio > 1.2 * small.hit_ratio
    assert cold.mean_ttft_s < small.mean_ttft_s


def test_a_slow_network_costs_and_is_not_used_at_all_costs() -> None:
    fast, slow, none = (replayed("pool-aware", bandwidth=rate) for rate in (87e9, 3e9, 1e6))
    assert fast.mean_ttft_s < slow.mean_ttft_s <= none.mean_ttft_s
    assert none.fetched_pages == 0
    assert none.mean_ttft_s == pytest.approx(replayed("local-aware").mean_ttft_s, rel=0.01)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "at least one token"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "order of time"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "order of time"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n' + line + "\n")
    with pytest.raises(ValueError, match=words) as error:
        read_trace(path)
    assert "line 2" in str(error.value)
    assert len(read_trace(path, requests=1)) == 1
    path.write_text("")
    with pytest.raises(ValueError, match="no request"):
        read_trace(path)


@pytest.mark.parametrize("more", [{"policy": "best"}, {"admission": "x"}, {"prefills": 0}, {"mfu": 0}, {"noise": -1}])
def test_a_cluster_that_cannot_be_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(more))):
        Setup(**more)  # type: ignore[arg-type]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as lines:
        for each in talks()[:60]:
            row = {"timestamp": each.at_s * 1e3, "input_length": each.tokens, "output_length": each.output_tokens}
            lines.write(json.dumps(row | {"hash_ids": each.pages}) + "\n")
    return path


def replay(*options: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", *options])


def test_the_command_compares_policies_and_draws_them(trace: Path, tmp_path: Path) -> None:
    policies = ("--policy", "random", "--policy", "pool-aware", "--prefill", "3", "--decode", "2")
    shown = replay("--trace", str(trace), *policies, "--plot", str(tmp_path / "charts.svg"))
    assert shown.exit_code == 0, shown.output
    assert "TTFT (s)" in shown.stdout
    assert {"random", "pool-aware"} <= set(shown.stdout.split())
    assert ElementTree.parse(tmp_path / "charts.svg").getroot().tag.endswith("svg")
    machine = replay("--trace", str(trace), *policies, "--admission", "early", "--requests", "20", "--json")
    rows = json.loads(machine.stdout)
    assert [row["name"] for row in rows] == ["random, early", "pool-aware, early"]
    assert [row["requests"] for row in rows] == [20, 20]
    assert all(len(row["prefill_busy_s"]) == 3 and row["ttft_s"]["mean"] > 0 for row in rows)


def test_where_requests_are_turned_away_the_decode_load_is_drawn_over_time(trace: Path, tmp_path: Path) -> None:
    options = ("--policy", "pool-aware", "--admission", "off", "--admission", "early", "--ttft-slo", "0.1", "--decode", "2")
    shown = replay("--trace", str(trace), *options, "--plot", str(tmp_path / "charts.svg"))
    assert shown.exit_code == 0, shown.output
    lines = ElementTree.parse(tmp_path / "charts.svg").findall(".//{*}polyline")
    assert len(lines) == 4, "of each admission the TTFT and the load"
    places = [float(point.split(",")[0]) for point in lines[-1].get("points", "").split()]
    assert places == sorted(places)
    assert places[-1] > 10 * places[0] > 0, "minutes from the first request on"


def test_what_the_command_cannot_do_is_one_line(trace: Path, tmp_path: Path) -> None:
    for options, words in (
        (("--trace", str(tmp_path / "none")), "No such file"),
        (("--trace", str(trace), "--policy", "best"), "none of random, round-robin"),
        (("--trace", str(trace), "--admission", "best"), "none of off, baseline"),
        (("--trace", str(trace), "--requests", "2", "--plot", str(tmp_path / "none" / "a.svg")), "--plot"),
    ):
        refused = replay(*options)
        assert refused.exit_code == 2
        assert words in refused.stderr


CHARTS = [
    charts.Lines("TTFT", "seconds", "share", {"a <b>": [(0.0, 0.1), (10.0, 1.0)], "none": []}),
    charts.Bars("Load", "s", ["0", "1"], {"a <b>": [1.0, 2.0], "none": [0.0, 0.0]}),
]


def test_without_matplotlib_a_picture_is_an_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert charts.write(tmp_path / "a.png", CHARTS) == tmp_path / "a.svg"
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert {"TTFT", "Load", "a <b>"} <= {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.get("fill") == "#1f77b4"]
    assert [float(each.get("height", 0)) for each in bars] == [10.0, 130.0, 260.0, 10.0], "two between the keys of two charts"


def test_with_matplotlib_it_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert charts.write(tmp_path / "a.png", CHARTS) == tmp_path / "a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@cache
def conversation() -> list[Arrival]:
    return read_trace(CONVERSATION)


@needs_trace
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_the_conversation_trace_moving_pages_pays() -> None:
    ours, local, queue = (
        Replay(Setup(policy=policy, decodes=0)).run(conversation()) for policy in ("pool-aware", "local-aware", "least-queue")
    )
    assert queue.mean_ttft_s / ours.mean_ttft_s >= 1.7
    assert local.mean_ttft_s / ours.mean_ttft_s >= 1.15
    assert ours.imbalance <= 1.1
    # The published comparison's own simulation, of which ties between idle engines are not specified: 2.845, 1.889, 1.587.
    assert queue.mean_ttft_s == pytest.approx(2.845, rel=0.07)
    assert local.mean_ttft_s == pytest.approx(1.889, rel=0.02)
    assert ours.mean_ttft_s == pytest.approx(1.587, rel=0.03)


@needs_trace
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_the_conversation_trace_prediction_keeps_prefills_from_being_in_vain() -> None:
    baseline, early, predictive = (
        Replay(Setup(speed=2.0, prefills=4, admission=mode)).run(conversation()) for mode in ("baseline", "early", "predictive")
    )
    assert early.wasted_share <= 0.75 * baseline.wasted_share
    assert predictive.wasted_share <= 0.35 * baseline.wasted_share
    assert predictive.late < early.late < baseline.late
