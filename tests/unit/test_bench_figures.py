"""Figures of collectives, and rows made of what ranks report."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tailbound_lab.bench import allreduce, figures
from tailbound_lab.lab.spec import Burst, LabSpec


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 15), (20, 15), (21, 20), (40, 20), (50, 35), (99, 50), (100, 50)]
)
def test_percentiles_are_of_the_nearest_rank(percent: float, expected: float) -> None:
    assert figures.percentile([50, 15, 40, 35, 20], percent) == expected


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_percentiles_of_nothing_are_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match=r"no values|outside"):
        figures.percentile(values, percent)


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    assert figures.slowest([[1, 5, 2], [3, 4, 1]]) == [3, 5, 2]
    with pytest.raises(ValueError, match="shorter"):
        figures.slowest([[1, 2], [1]])


def test_jains_index_is_one_where_all_have_the_same() -> None:
    assert figures.jain([3.0, 3.0]) == 1.0
    assert figures.jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert figures.jain([1.0, 3.0]) == pytest.approx(0.8)
    assert figures.jain([0.0, 0.0]) is None


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert figures.algbw(10**9, 0.5) == 2.0
    assert figures.busbw(10**9, 0.5, 4) == 3.0
    assert figures.busbw(10**9, 0.5, 2) == 2.0


def test_nmse() -> None:
    exact = np.array([3.0, 4.0])
    assert figures.nmse(exact.astype(np.float32), exact) == 0
    assert figures.nmse(np.array([3.0, 4.5], np.float32), exact) == pytest.approx(0.01)
    assert figures.nmse(np.zeros(2, np.float32), exact) == 1


def report(ours: list[float], theirs: list[float], delivered: int = 100) -> dict[str, Any]:
    return {
        "times": {"tailbound": ours, "gloo": theirs},
        "nmse": {"tailbound": [1e-3, 3e-3], "gloo": [1e-14]},
        "expected": 100,
        "delivered": delivered,
        "deadline_hits": 1,
        "link_bytes": 6_000_000,
        "spent": [["tailbound", 0.03, 0.012, 3], ["gloo", 0.06, None, 3]],
    }


SPEC = LabSpec(2, burst=Burst(0.01, 8), wire=True)


def rows() -> list[dict[str, Any]]:
    reports = [report([0.010, 0.030, 0.010], [0.040] * 3), report([0.020, 0.010, 0.010], [0.030] * 3, 90)]
    return allreduce.summarize(4_000_000, reports, allreduce.conditions(SPEC, lab=True), {"tailbound": "xdp"})


def test_rows_are_made_of_the_slowest_ranks() -> None:
    ours, theirs = rows()
    assert (ours["name"], ours["workers"], ours["bytes"], ours["iters"]) == ("tailbound", 2, 4_000_000, 3)
    assert (ours["p50_ms"], ours["p99_ms"], ours["max_ms"]) == (20, 30, 30)
    assert ours["algbw_gbps"] == pytest.approx(0.2)
    assert ours["busbw_gbps"] == pytest.approx(0.2)
    assert ours["delivered"] == 0.95
    assert ours["deadline_hits"] == 2
    assert ours["nmse"] == pytest.approx(2e-3)
    assert ours["ratio_p50"] == 2
    assert (ours["cpu_ms"], ours["kernel_ms"]) == (pytest.approx(14), pytest.approx(4))
    assert (theirs["cpu_ms"], theirs["kernel_ms"]) == (pytest.approx(20), None)
    assert (ours["link_bytes_per_op"], theirs["link_bytes_per_op"]) == (2_000_000, None)
    assert (ours["datapath"], ours["wire"], ours["burst_loss"]) == ("xdp", True, {"loss": 0.01, "length": 8})
    assert (theirs["name"], theirs["p50_ms"], theirs["delivered"], theirs["deadline_hits"]) == ("gloo", 40, 1.0, 0)


def test_the_table_fits_a_terminal_and_shows_every_row() -> None:
    """Also when TCP has waited for its timer, over and over, in the largest of sizes."""
    text = io.StringIO()
    stuck = dict.fromkeys(("p50_ms", "p99_ms", "max_ms", "cpu_ms"), 54_988.7) | {"bytes": 25 << 20, "deadline_hits": 99}
    Console(file=text, width=80).print(allreduce.table([*rows(), rows()[0] | stuck]))
    assert "…" not in text.getvalue()
    lines = text.getvalue().splitlines()
    assert sum("4000000" in line for line in lines) == 2
    ours, slow = (line for line in lines if "tailbound" in line)
    assert slow.split()[:6] == ["26214400", "tailbound", "54989", "54989", "54989", "54989"]
    assert " ".join(ours.split()) == "4000000 tailbound 20.00 30.00 30.00 14.00 0.20 95.000 2 2.0e-03 2.00"
