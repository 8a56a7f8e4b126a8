"""Which exponents tensors get, from the sizes that averages of earlier steps had (codec-18). Pure.

What rotation leaves of rounding errors is the same for all entries of a group. With s the root mean square of a tensor
and f what its entries are multiplied by, the error of the whole is the mean of (f s)^2 times the mean of 1 / f^2, which
is least where f is s^-1/2 (Cauchy and Schwarz): tensors get *half* of the exponent by which they differ from the mean.
A tensor that would still be more than twice as small or large as the others gets the rest, too: that costs the
whole next to nothing and the smallest tensors are no longer noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.balance import EXPONENT_MOST

#: Large tensors are cut into blocks of about so many entries.
BLOCK = 1 << 14
#: What may be left of a difference between a tensor and the mean, as a power of two, up and down.
_LEFT = 1.0
#: Tensors that differ by more than this power of two from the mean count as if it were this one.
_FARTHEST = 11.0
#: Exponents that are off by more than this are worth an agreement.
_OFF = 1.0


def ends_of(starts: Sequence[int], first: int, size: int) -> NDArray[np.int64]:
    """Where the ranges of an op end, i64[n]: tensors, cut into blocks where they are large.

    Args:
        starts: where the tensors of the bucket begin, rising; empty: the bucket is one.
        first, size: the op's entries in the bucket.
    """
    inside = [start - first for start in starts if first < start < first + size]
    ends: list[int] = []
    begin = 0
    for end in [*inside, size]:
        blocks = -(-(end - begin) // BLOCK)
        ends += [begin + (end - begin) * (i + 1) // blocks for i in range(blocks)]
        begin = end
    return np.array(ends, np.int64)


def sizes_of(powers: NDArray[np.float64]) -> NDArray[np.float64]:
    """log2 of the root mean square of each range, from mean squares; NaN where all is zero: nothing is known."""
    with np.errstate(divide="ignore"):
        return np.where(powers > 0, np.log2(powers) / 2, np.nan)


def merged(known: NDArray[np.float64], seen: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Sizes from those ``known`` and those just ``seen``, which count with ``share``; NaN says nothing."""
    mixed = known + share * (seen - known)
    return np.where(np.isnan(seen), known, np.where(np.isnan(known), seen, mixed))


def wanted(sizes: NDArray[np.float64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """Exponents that the ranges of an op should have, up to one number for all; tensors of zeros count as the mean."""
    entries = np.diff(ends, prepend=0).astype(np.float64)
    known = ~np.isnan(sizes)
    if not known.any():
        return np.zeros(len(sizes))
    top = np.max(sizes[known])
    mean = top + np.log2(np.average(2.0 ** (sizes[known] - top), weights=entries[known]))
    apart = np.where(known, np.clip(sizes - mean, -_FARTHEST, _FARTHEST), 0.0)
    found: NDArray[np.float64] = apart - np.clip(apart / 2, -_LEFT, _LEFT)
    return found


def rounded(wish: NDArray[np.float64]) -> NDArray[np.uint8]:
    """``wanted`` as exponents: whole numbers, the least of them 0."""
    found: NDArray[np.uint8] = np.minimum(np.rint(wish - wish.min()), EXPONENT_MOST).astype(np.uint8)
    return found


def are_off(exponents: NDArray[np.uint8], wish: NDArray[np.float64], ends: NDArray[np.int64]) -> bool:
    """Whether ``exponents`` differ from ``wanted`` by more than is worth keeping them, up to one number for all."""
    apart = wish - exponents
    common = float(np.average(apart, weights=np.diff(ends, prepend=0)))
    return bool(np.abs(apart - common).max() > _OFF)
