"""Rows and tables made of the phases of an experiment, figures of them, and ranks that start and end together."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailbound.errors import ConfigError
from tailbound_lab.bench import allreduce, calibrate, figures
from tailbound_lab.bench.channel import order_of
from tailbound_lab.bench.experiment import Phase, conditions, rows_of
from tailbound_lab.bench.link import link_bytes
from tailbound_lab.bench.start import StartLine
from tailbound_lab.lab.spec import Background, Burst, LabSpec, Straggler

ABOUT = conditions(LabSpec(2, burst=Burst(0.01, 8), wire=True)) | {"datapath": "xdp"}


def report(rank: int, counted: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    base = {
        "rank": rank,
        "counted": {"expected": 100, "delivered": 100, "deadline_hits": 0, "link_bytes": 6_000_000} | (counted or {}),
        "nmse": {"tailbound": [1e-3, 3e-3], "gloo": [1e-14]},
        "spent": [["tailbound", 0.05, 0.02 if rank == 0 else 0.0, 1], ["gloo", 0.1, None, 1]],
    }
    return base | values


def phase() -> Phase:
    times = {"tailbound": [[0.1, 0.3], [0.2, 0.1]], "gloo": [[0.5], [0.7]]}
    return Phase(times, [report(0, {"delivered": 99, "deadline_hits": 2}), report(1)])


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    assert [order_of(["a", "b"], i) for i in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    found = phase()
    assert found.slowest("tailbound") == [0.2, 0.3]
    assert found.slowest("tailbound", without=1) == [0.1, 0.3]
    assert (found.slowest("gloo"), found.slowest("nobody")) == ([0.7], [])
    found.add(Phase({"tailbound": [[0.4], [0.1]]}, [report(0)]))
    assert found.slowest("tailbound") == [0.2, 0.3, 0.4]
    assert len(found.reports) == 3
    with pytest.raises(ValueError, match="shorter"):
        figures.slowest([[1, 2], [1]])


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 15), (20, 15), (21, 20), (40, 20), (50, 35), (99, 50), (100, 50)]
)
def test_percentiles_are_of_the_nearest_rank(percent: float, expected: float) -> None:
    assert figures.percentile([50, 15, 40, 35, 20], percent) == expected


def test_nmse_and_bytes_of_a_link(tmp_path: Path) -> None:
    assert figures.nmse(np.array([3.0, 4.5], np.float32), np.array([3.0, 4.0])) == pytest.approx(0.01)
    dev = tmp_path / "dev"
    rows = (("lo", 100, 100), ("data0", 4_000_000, 1_000_000))
    dev.write_text("".join(f" {name}: {took} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n" for name, took, sent in rows))
    assert (link_bytes("data0", dev), link_bytes("data1", dev)) == (5_000_000, None)


def test_rows_are_made_of_the_slowest_ranks_and_of_counts_of_all() -> None:
    ours, theirs = rows_of(phase(), 4_000_000, ABOUT)
    assert (ours["name"], ours["workers"], ours["bytes"], ours["iters"]) == ("tailbound", 2, 4_000_000, 2)
    assert (ours["p50_ms"], ours["p99_ms"], ours["max_ms"], ours["mean_ms"]) == (200, 300, 300, pytest.approx(250))
    assert ours["tail"] == pytest.approx(1.5)
    assert (ours["delivered"], ours["deadline_hits"]) == (199 / 200, 2)
    assert ours["nmse"] == pytest.approx(2e-3)
    assert (ours["cpu_ms"], ours["kernel_ms"]) == (pytest.approx(60), pytest.approx(10))
    assert (theirs["cpu_ms"], theirs["kernel_ms"]) == (pytest.approx(100), None)
    assert (ours["link_bytes_per_op"], theirs["link_bytes_per_op"]) == (3_000_000, None)
    assert (ours["datapath"], ours["wire"], ours["burst_loss"]) == ("xdp", True, {"loss": 0.01, "length": 8})
    assert (theirs["max_ms"], theirs["delivered"], theirs["datapath"]) == (700, 1.0, "tcp")
    assert ("ratio_p50" in ours, theirs["ratio_p50"]) == (False, pytest.approx(3.5))
    (one, _) = rows_of(phase(), 8, ABOUT, without=0)
    assert (one["delivered"], one["deadline_hits"], one["max_ms"]) == (1.0, 0, 200)
    (alone,) = rows_of(Phase({"tailbound": [[0.1]], "gloo": [[]]}), 8, ABOUT)
    assert (alone["name"], alone["cpu_ms"], alone["delivered"]) == ("tailbound", None, None)


@pytest.mark.parametrize(
    ("spec", "wrong", "words"),
    [
        (LabSpec(2, straggler=Straggler(1, 40.0, None)), {}, "give RANK:MS:EVERY, such as 1:40:160"),
        (LabSpec(2), {"iters": 0}, "at least one"),
        (LabSpec(2), {"sizes": ()}, "at least one"),
        (LabSpec(2), {"sizes": (4,)}, "at least one"),
    ],
)
def test_what_cannot_be_measured_is_refused(spec: LabSpec, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        allreduce.run(spec, **wrong)


def test_ranks_start_together_and_end_in_the_same_round(tmp_path: Path) -> None:
    path = tmp_path / "line"
    StartLine.create(path, 3)
    starts: list[list[int]] = [[], [], []]

    def run(rank: int) -> None:
        line = StartLine(path, rank, 3, timeout=20)
        while True:
            start = line.wait(last=len(starts[rank]) == 5)  # only rank 0 is heard
            if line.over:
                break
            starts[rank].append(start)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert starts[0] == starts[1] == starts[2]
    assert len(starts[0]) == 5
    assert (np.diff(starts[0]) > 0).all()


# -- the search for a background of the tail benchmark ---------------------------------------------------------------


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
    assert calibrate.tail(model(found, 0.35, slope, seed=2)) == pytest.approx(target, rel=0.1)
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
