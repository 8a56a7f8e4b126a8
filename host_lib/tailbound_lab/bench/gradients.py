"""Seeded gradients for benchmarks of the error: layers of given sizes, independent between ranks or correlated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound_lab.bench.figures import nmse

#: (name, entries, standard deviation of an entry) of each tensor, in order.
Layers = tuple[tuple[str, int, float], ...]

#: A small transformer. Unequal on purpose: neighbours share groups.
LAYERS: Layers = (
    ("embedding", 32768 * 4, 1e-4),
    ("attention", 4 * 256 * 256, 1e-2),
    ("attention.bias", 4 * 256, 1e-1),
    ("norm", 256, 1.0),
    ("mlp", 8 * 256 * 256, 3e-3),
    ("mlp.bias", 5 * 256, 3e-2),
    ("head", 256 * 100, 1e-1),
    ("head.bias", 100, 1.0),
)


#: Entries of each.
SIZES = tuple(entries for _, entries, _ in LAYERS)


def draw(
    layers: Layers, ranks: int, correlation: float = 0.0, rng: np.random.Generator | None = None
) -> list[NDArray[np.float32]]:
    """Normal gradients: f32[sum of entries] by rank; any two ranks have ``correlation``. ``rng``: by default seeded."""
    rng, shared = rng or np.random.default_rng(7), np.random.default_rng(8)
    gradients = [_one(layers, rng) for _ in range(ranks)]
    if correlation:
        common = _one(layers, shared)
        one, all_of = np.float32(math.sqrt(1 - correlation)), np.float32(math.sqrt(correlation))
        gradients = [one * x + all_of * common for x in gradients]
    return gradients


def exact_mean(gradients: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """The mean of f32[n] by rank, in float64."""
    return np.asarray(np.mean(gradients, axis=0, dtype=np.float64))


def _one(layers: Layers, rng: np.random.Generator) -> NDArray[np.float32]:
    return np.concatenate([rng.standard_normal(n, np.float32) * np.float32(size) for _, n, size in layers])


def worst_tensor(value: NDArray[np.float32], exact: NDArray[np.float64], layers: Layers = LAYERS) -> tuple[str, float]:
    """Name and NMSE of the tensor of ``value`` that is furthest off ``exact`` (both [sum of entries])."""
    found: list[tuple[float, str]] = []
    first = 0
    for name, entries, _ in layers:
        part = slice(first, first + entries)
        found.append((nmse(value[part], exact[part]), name))
        first += entries
    error, name = max(found)
    return name, error
