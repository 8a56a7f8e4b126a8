"""What others do with the same bits: quantisers of papers, built from their descriptions, to measure beside our codec.

They are references in numpy, with none of their authors' code. All of them rotate by a randomised Hadamard transform,
so that entries are nearly normal. That is done in blocks, each with a norm of its own: a whole vector would be filled
up to a power of two, and what was spent on the zeros would not be the same number of bits any more.

- **EDEN** (Vargaftik et al., ICML 2022; with one bit it is DRIVE, NeurIPS 2021): each sender has a rotation of its own,
  takes the nearest of the 2^b centroids that are best for a normal distribution, and a scale that makes the whole
  unbiased, |y|^2 / <y, q>. Scales and rotations are the senders' own: their codes cannot be summed as integers.
- **THC, uniform** (Li et al., NSDI 2024): one rotation and one range for all, from the largest norm of a sender; values
  are clamped to it and rounded stochastically to 2^b levels at equal distances. Codes are summed as integers, and the
  sum is sent back whole. The paper's tables of unequal levels are not built here.
- **Correlated quantisation** (Suresh et al., ICML 2022): the same, but the senders' offsets of rounding lie at equal
  distances in an order drawn for every entry, so that errors cancel where senders agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
_NORMAL = NormalDist()
#: Entries that are rotated together.
BLOCK = 1 << 15


def hadamard(x: Vector) -> Vector:
    """The orthonormal Hadamard transform along the last axis of f32[..., d], d a power of two; its own inverse."""
    y, size, step = x.copy(), x.shape[-1], 1
    while step < size:
        pairs = y.reshape(-1, 2, step)
        upper, lower = pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]
        pairs[:, 0], pairs[:, 1] = upper, lower
        step *= 2
    y *= np.float32(1 / math.sqrt(size))
    return y


class Rotation:
    """Random signs and a Hadamard transform of each block of ``entries``; the last block is filled up with zeros."""

    def __init__(self, entries: int, rng: np.random.Generator) -> None:
        self.entries = entries
        block = min(BLOCK, 1 << (entries - 1).bit_length())
        self.shape = -(-entries // block), block
        self._signs = rng.choice(np.array([-1, 1], np.float32), self.shape)

    def there(self, x: Vector) -> Vector:
        """Rotates f32[entries] to f32[blocks, block]."""
        padded = np.zeros(self.shape, np.float32)
        padded.reshape(-1)[: self.entries] = x
        return hadamard(padded * self._signs)

    def back(self, y: Vector) -> Vector:
        """The way back."""
        turned = hadamard(y)
        turned *= self._signs
        return turned.reshape(-1)[: self.entries]


@cache
def centroids(bits: int) -> NDArray[np.float64]:
    """The 2^bits values that leave the least squared error of a standard normal variable (Lloyd and Max), rising."""
    levels = 1 << bits
    start = NormalDist(0, math.sqrt(3))  # the density of the best levels, where they are many (Panter and Dite)
    found = np.array([start.inv_cdf((i + 0.5) / levels) for i in range(levels)])
    for _ in range(300):
        edges = [-math.inf, *((found[1:] + found[:-1]) / 2).tolist(), math.inf]
        density = np.array([_NORMAL.pdf(e) if math.isfinite(e) else 0.0 for e in edges])
        below = np.array([_NORMAL.cdf(e) if math.isfinite(e) else float(e > 0) for e in edges])
        found = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
        found = (found - found[::-1]) / 2  # symmetric in spite of rounding
    return found


def eden(x: Vector, bits: int, rng: np.random.Generator) -> Vector:
    """What a receiver makes of one sender's f32[n] in codes of ``bits``; zeros stay zeros."""
    rotation = Rotation(x.size, rng)
    y = rotation.there(x)
    size, norms = y.shape[1], _norms(y)
    unit = y * (np.float32(math.sqrt(size)) / np.where(norms > 0, norms, 1))
    levels = centroids(bits).astype(np.float32)
    q = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)]
    along = np.einsum("bi,bi->b", y, q, dtype=np.float64)[:, None]
    scales = np.where(along > 0, norms.astype(np.float64) ** 2 / np.where(along > 0, along, 1), 0)
    return rotation.back(q * scales.astype(np.float32))


def eden_mean(gradients: Sequence[Vector], bits: int, rng: np.random.Generator) -> Vector:
    """The mean of what the senders' codes say, in float32."""
    total = np.zeros_like(gradients[0])
    for x in gradients:
        total += eden(x, bits, rng)
    total /= np.float32(len(gradients))
    return total


def rounding_error(bits: int, reach: float) -> float:
    """Mean squared error of a standard normal variable clamped to +-reach and rounded stochastically to 2^bits levels.

    Within the range that is step^2 times the mean of f (1 - f), 1/6 for fractions f that are spread evenly.
    """
    step = 2 * reach / ((1 << bits) - 1)
    outside = 2 * ((1 + reach * reach) * (1 - _NORMAL.cdf(reach)) - reach * _NORMAL.pdf(reach))
    return step * step / 6 * (2 * _NORMAL.cdf(reach) - 1) + outside


@cache
def best_reach(bits: int) -> float:
    """Standard deviations to clamp at, for the least ``rounding_error``; to a hundredth."""
    return min((i / 100 for i in range(50, 700)), key=lambda reach: rounding_error(bits, reach))


def thc_mean(gradients: Sequence[Vector], bits: int, rng: np.random.Generator) -> Vector:
    """The mean by THC's uniform case, clamped where that is best for normal entries."""
    return _summed(gradients, bits, rng, lambda shape, _: rng.random(shape, np.float32))


def correlated_mean(gradients: Sequence[Vector], bits: int, rng: np.random.Generator) -> Vector:
    """The same with correlated offsets of rounding."""
    ranks = len(gradients)
    turns = rng.random((ranks, *Rotation(gradients[0].size, rng).shape), np.float32).argsort(axis=0)

    def offsets(shape: tuple[int, int], rank: int) -> Vector:
        return np.asarray((turns[rank] + rng.random(shape, np.float32)) / ranks, np.float32)

    return _summed(gradients, bits, rng, offsets)


def _summed(
    gradients: Sequence[Vector],
    bits: int,
    rng: np.random.Generator,
    offsets: Callable[[tuple[int, int], int], Vector],
) -> Vector:
    """The mean by sums of integers; ``offsets(shape, rank)`` are in 0..1."""
    rotation = Rotation(gradients[0].size, rng)
    turned = [rotation.there(x) for x in gradients]
    norms = np.max([_norms(y) for y in turned], axis=0)  # [blocks, 1]
    reach = best_reach(bits) * norms / np.float32(math.sqrt(rotation.shape[1]))
    most = (1 << bits) - 1
    step = np.where(reach > 0, 2 * reach / np.float32(most), 1).astype(np.float32)
    total = np.zeros(rotation.shape, np.int64)
    for rank, y in enumerate(turned):
        codes = np.floor((np.clip(y, -reach, reach) + reach) / step + offsets(rotation.shape, rank))
        total += np.clip(codes, 0, most).astype(np.int64)
    mean = np.where(reach > 0, total / len(gradients) * step - reach, 0)
    return rotation.back(mean.astype(np.float32))


def _norms(y: Vector) -> Vector:
    """Length of each block: f32[blocks, 1]."""
    return np.asarray(np.linalg.norm(y.astype(np.float64), axis=1, keepdims=True), np.float32)
