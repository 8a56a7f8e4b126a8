"""Figures of collectives, and bytes of a link."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailbound_lab.bench import figures
from tailbound_lab.bench.link import link_bytes


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


def test_nmse() -> None:
    exact = np.array([3.0, 4.0])
    assert figures.nmse(exact.astype(np.float32), exact) == 0
    assert figures.nmse(np.array([3.0, 4.5], np.float32), exact) == pytest.approx(0.01)
    assert figures.nmse(np.zeros(2, np.float32), exact) == 1


def test_bytes_of_a_link_are_those_of_both_ways(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    rows = (("lo", 100, 100), ("data0", 4_000_000, 1_000_000))
    table.write_text("".join(f" {name}: {took} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n" for name, took, sent in rows))
    assert link_bytes("data0", table) == 5_000_000
    assert link_bytes("data1", table) is None
