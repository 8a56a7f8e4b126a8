"""The tail benchmark's pure parts: the search for a background, phases, rows, aims, taking turns, ending together."""

from __future__ import annotations

import io
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailbound_lab.bench import calibrate
from tailbound_lab.bench.crew import Phase
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.tail import BOTH, ENVS, aims, aims_table, summarize, table
from tailbound_lab.bench.tail_worker import order_of
from tailbound_lab.lab.spec import Background


def model(background: Background, p50: float, slope: float, seed: int = 1) -> list[float]:
    """Iterations of which a tenth is hit by a burst and takes ``slope`` times its length longer."""
    generator = random.Random(seed)
    return [
        p50 * generator.uniform(0.99, 1.01)
        + (slope * background.on_ms / 1e3 * generator.uniform(0.9, 1.1) if generator.random() < 0.1 else 0)
        for _ in range(200)
    ]


@pytest.mark.parametrize("target", [1.5, 3.0])
@pytest.mark.parametrize("slope", [0.2, 0.9, 2.5])
def test_the_search_finds_the_background(target: float, slope: float) -> None:
    first = calibrate.guess(target, 0.35, 4, 10**9, 60)
    found, tried = calibrate.search(target, first, lambda b: model(b, 0.35, slope))
    assert calibrate.near(calibrate.tail(model(found, 0.35, slope, seed=2)), target)
    assert 1 <= len(tried) <= 4
    assert tried[0][0] == first.on_ms
    assert found.off_ms == first.off_ms


def test_the_search_ends_with_the_nearest_when_nothing_comes_near() -> None:
    ratios = iter([9.0, 2.0, 8.0, 7.0])
    lengths = []

    def measure(background: Background) -> list[float]:
        lengths.append(background.on_ms)
        return [1.0] * 90 + [next(ratios)] * 10

    found, tried = calibrate.search(3.0, Background(10**9, 100.0, 1000.0), measure)
    assert [ratio for _, ratio in tried] == [9.0, 2.0, 8.0, 7.0]
    assert found.on_ms == lengths[1] == pytest.approx(100 / 3)


def test_a_burst_that_changes_nothing_is_made_longer_by_a_bounded_factor() -> None:
    before = Background(10**9, 100.0, 1000.0)
    assert calibrate.corrected(before, 0.9, 1.5).on_ms == 300.0
    assert calibrate.corrected(before, 1.01, 3.0).on_ms == 300.0
    assert calibrate.corrected(before, 50.0, 1.5).on_ms == pytest.approx(100 / 3)
    assert calibrate.corrected(Background(10**9, 9000.0, 1000.0), 1.0, 3.0).on_ms == 10_000.0


def test_bursts_hit_a_quarter_of_the_iterations_at_most() -> None:
    for target, seconds in ((1.5, 60), (3.0, 60), (3.0, 10)):
        background = calibrate.guess(target, 0.35, 4, 10**9, seconds)
        hits = 4 / (background.off_ms / 1e3) * (0.35 + background.on_ms / 1e3)
        assert hits <= 0.25 + 1e-9
        assert background.rate == 900_000_000


def test_names_take_turns() -> None:
    assert [order_of(["a", "b"], i) for i in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def _report(rank: int, **values: Any) -> dict[str, Any]:
    base = {
        "rank": rank,
        "expected": 100,
        "delivered": 100,
        "deadline_hits": 0,
        "deadlines_ms": [50.0, 9.0],
        "nmse": [1e-3],
        "spent": [["tailbound", 0.05, 0.02 if rank == 0 else 0.0, 1], ["gloo", 0.1, 0.0, 1]],
    }
    return base | values


def _phase() -> Phase:
    times = {"tailbound": [[0.1, 0.3], [0.2, 0.1]], "gloo": [[0.5], [0.7]]}
    return Phase(
        times, [_report(0, delivered=99, deadline_hits=2), _report(1, deadlines_ms=[70.0, 8.0])], [("gloo", 20.0)]
    )


def test_an_iteration_takes_as_long_as_its_slowest_rank_and_stuck_ones_count() -> None:
    phase = _phase()
    assert phase.slowest("tailbound") == [0.2, 0.3]
    assert phase.slowest("tailbound", without=1) == [0.1, 0.3]
    assert phase.slowest("gloo") == [0.7, 20.0]
    assert phase.slowest("nobody") == []
    phase.add(Phase({"tailbound": [[0.4], [0.1]]}, [_report(0)], []))
    assert phase.slowest("tailbound") == [0.2, 0.3, 0.4]
    assert len(phase.reports) == 3


def test_rows_have_the_fields_of_the_allreduce_benchmark_and_those_of_their_own() -> None:
    settings = {"lab": True, "wire": True, "rate": None, "loss": 0.01, "burst_loss": None, "straggler": None}
    ours, theirs = summarize("loss1", _phase(), 1 << 20, settings | {"datapath": "xdp"})
    assert [ours["name"], theirs["name"]] == list(BOTH)
    assert (ours["env"], ours["workers"], ours["bytes"], ours["iters"]) == ("loss1", 2, 1 << 20, 2)
    assert ours["mean_ms"] == pytest.approx(250)
    assert (ours["p50_ms"], ours["p99_ms"], ours["max_ms"]) == (200, 300, 300)
    assert ours["tail"] == pytest.approx(1.5)
    assert ours["delivered"] == 199 / 200
    assert (ours["deadline_hits"], ours["stuck"]) == (2, 0)
    assert (ours["deadline_1_ms"], ours["deadline_2_ms"]) == (70.0, 9.0)
    assert (ours["cpu_ms"], ours["kernel_ms"], theirs["cpu_ms"]) == (
        pytest.approx(60), pytest.approx(10), pytest.approx(100),
    )  # fmt: skip
    assert (theirs["stuck"], theirs["max_ms"], theirs["delivered"], theirs["nmse"]) == (1, 20_000, 1.0, None)
    assert (ours["datapath"], theirs["datapath"]) == ("xdp", "tcp")
    (alone,) = summarize("loss1", Phase({"tailbound": [[0.1]], "gloo": [[]]}), 8, settings | {"datapath": "udp"})
    assert (alone["name"], alone["cpu_ms"]) == ("tailbound", None)


def test_what_was_not_reported_is_not_known_and_reaches_no_aim() -> None:
    """An all-reduce of Gloo did not end, and nobody reported the phase."""
    times = {"tailbound": [[0.1, 0.3], [0.2, 0.1]], "gloo": [[0.5], [0.7]]}
    rows = summarize("loss0.1", Phase(times, [], [("gloo", 20.0)]), 1 << 20, {"datapath": "xdp"})
    counted = ("delivered", "deadline_hits", "deadline_1_ms", "deadline_2_ms", "nmse", "cpu_ms")
    assert {rows[0][name] for name in counted} == {None}
    assert (rows[1]["delivered"], rows[1]["deadline_hits"]) == (1.0, 0)
    found = {what: (value, reached) for what, value, _, reached in aims(rows)}
    assert found["loss0.1: delivered"] == (None, False)
    assert aims([_row("stopped", "tailbound", deadline_1_ms=None)])[0][1:] == (None, "<= 1", False)
    text = io.StringIO()
    console = Console(file=text, width=80)
    console.print(table(rows))
    console.print(aims_table(aims(rows)))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert "tailbound 2 200.0 250.0 300.0 300.0 1.50 - - - 0 -" in lines
    assert "loss0.1: delivered - >= 0.999 not measured" in lines


def test_the_table_fits_a_terminal() -> None:
    """A whole minute under losses, in which Gloo got stuck."""
    settings = {"lab": True, "wire": True, "rate": None, "loss": 0.01, "burst_loss": None, "straggler": None}
    rows = summarize("loss1", _phase(), 25 << 20, settings | {"datapath": "xdp"})
    rows[1] |= {"iters": 200, "p50_ms": 12_345.6, "mean_ms": 13_456.7, "max_ms": 54_321.0, "cpu_ms": 123.4, "stuck": 12}
    text = io.StringIO()
    Console(file=text, width=80).print(table(rows))
    assert "…" not in text.getvalue()
    (theirs,) = (line for line in text.getvalue().splitlines() if "gloo" in line)
    assert " ".join(theirs.split()) == "gloo 200 12346 13457 20000 54321 28.57 123.4 100.000 0 12 -"


def _row(env: str, name: str, **values: Any) -> dict[str, Any]:
    return {
        "env": env, "name": name, "tail": 1.1, "mean_ms": 100.0, "p99_ms": 100.0, "delivered": 1.0, "cost_ms": 40.0,
        "deadline_1_ms": 50.0,
    } | values  # fmt: skip


def test_aims() -> None:
    good = [
        _row("tail1.5", "tailbound"), _row("tail1.5", "gloo", tail=1.6), _row("tail3", "tailbound", mean_ms=102.0),
        _row("tail3", "gloo", tail=2.8), _row("loss1", "tailbound"), _row("loss1", "gloo", p99_ms=1000.0),
        _row("loss0.1", "tailbound", delivered=0.9995), _row("stopped", "tailbound"),
    ]  # fmt: skip
    found = aims(good)
    assert len(found) == 8
    assert all(reached for *_, reached in found)
    bad = [
        _row("tail1.5", "tailbound", tail=1.21), _row("tail1.5", "gloo", tail=1.7),
        _row("tail3", "tailbound", tail=1.31, mean_ms=104.0), _row("tail3", "gloo", tail=4.0),
        _row("loss1", "tailbound"), _row("loss1", "gloo", p99_ms=900.0),
        _row("loss0.1", "tailbound", delivered=0.998), _row("stopped", "tailbound", cost_ms=60.0),
    ]  # fmt: skip
    assert not any(reached for *_, reached in aims(bad))
    assert aims([_row("calm", "tailbound")]) == []
    assert {row["env"] for row in good} < set(ENVS)


def test_a_start_line_ends_for_all_in_the_same_round(tmp_path: Path) -> None:
    path = tmp_path / "line"
    StartLine.create(path, 3)
    rounds: dict[int, int] = {}

    def run(rank: int) -> None:
        line, number = StartLine(path, rank, 3, timeout=20), 0
        while True:
            line.wait(last=number == 5)  # only rank 0 is heard
            if line.over:
                break
            number += 1
        rounds[rank] = number

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert rounds == {0: 5, 1: 5, 2: 5}
