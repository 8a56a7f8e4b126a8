"""The tail benchmark's pure parts: the search for a background."""

from __future__ import annotations

import random

import pytest

from tailbound_lab.bench import calibrate
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


@pytest.mark.parametrize(
    ("on_ms", "ratio", "target", "longer"),
    [(100.0, 0.9, 1.5, 300.0), (100.0, 1.01, 3.0, 300.0), (100.0, 50.0, 1.5, 100 / 3), (9000.0, 1.0, 3.0, 10_000.0)],
)
def test_a_burst_is_made_longer_and_shorter_by_bounded_factors(
    on_ms: float, ratio: float, target: float, longer: float
) -> None:
    assert calibrate.corrected(Background(10**9, on_ms, 1000.0), ratio, target).on_ms == pytest.approx(longer)
