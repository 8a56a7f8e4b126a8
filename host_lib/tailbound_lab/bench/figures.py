"""Figures of collectives; the time of an iteration is the maximum over ranks, percentiles are by nearest rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least ``percent`` % of all do not exceed.

    Raises:
        ValueError: no values, or ``percent`` outside 0 < percent <= 100.
    """
    if not values:
        raise ValueError("no values")
    if not 0 < percent <= 100:
        raise ValueError(f"{percent} is outside 0 < percent <= 100")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Iteration times: the maximum over ranks of each (all ranks have as many).

    Raises:
        ValueError: the ranks have different numbers of iterations.
    """
    return [max(times) for times in zip(*by_rank, strict=True)]


def nmse(value: NDArray[np.float32], exact: NDArray[np.float64]) -> float:
    """Squared error over squared length of what is exact (both [n])."""
    error = value - exact
    return float(error @ error / (exact @ exact))
