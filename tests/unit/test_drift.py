"""The count sketch: right on average and close every time, wherever the drift sits (codec-14)."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.needs("torch")


def distance(x: np.ndarray, y: np.ndarray, seed: int) -> float:
    from tailbound.torch.drift import BINS, add_to_bins

    bins = np.zeros((2, BINS))
    for row, values in zip(bins, (x, y), strict=True):
        add_to_bins(values, 0, seed, row)
    a, b = bins.astype(np.float32)
    return float(np.linalg.norm(a.astype(np.float64) - b))


@pytest.mark.parametrize("where", ["everywhere", "one_layer", "one_entry"])
def test_the_distance_is_estimated_within_a_tenth_or_two(where: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(200_000).astype(np.float32)
    moved = {"everywhere": slice(None), "one_layer": slice(70_000, 70_500), "one_entry": slice(5, 6)}[where]
    y = x.copy()
    y[moved] += 0.01 * rng.standard_normal(y[moved].size).astype(np.float32)
    truth = float(np.linalg.norm(x.astype(np.float64) - y))
    ratios = [distance(x, y, seed) / truth for seed in range(40)]
    assert abs(np.mean(ratios) - 1) < 0.03
    assert 0.8 < min(ratios) < max(ratios) < 1.2


def test_equal_parameters_have_no_distance() -> None:
    x = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    assert distance(x, x.copy(), 9) == 0


def test_a_sketch_may_be_made_in_pieces() -> None:
    from tailbound.torch.drift import BINS, add_to_bins

    x = np.random.default_rng(5).standard_normal(5000).astype(np.float32)
    whole, pieces = np.zeros(BINS), np.zeros(BINS)
    norm = add_to_bins(x, 0, 7, whole)
    parts = [add_to_bins(x[lo:hi], lo, 7, pieces) for lo, hi in ((0, 1), (1, 1700), (1700, 5000))]
    np.testing.assert_allclose(pieces, whole, rtol=1e-12)
    assert sum(parts) == pytest.approx(norm)
    assert norm == pytest.approx(float(np.square(x.astype(np.float64)).sum()))


def test_the_estimate_is_of_all_slices_measured() -> None:
    from tailbound.torch.drift import BINS, Drift

    drift = Drift(4)
    assert drift.relative == 0
    zeros = np.zeros(BINS, np.float32)
    apart = zeros.copy()
    apart[3] = 0.3
    drift.observe(0, apart, zeros, 9.0)
    assert drift.relative == pytest.approx(0.1)
    drift.observe(1, zeros, zeros, 0.09 / 0.0025 - 9.0)
    assert drift.relative == pytest.approx(0.05)
    drift.observe(2, apart * np.nan, zeros, 1.0)  # counts for nothing
    drift.equal(0)
    assert drift.relative == 0
