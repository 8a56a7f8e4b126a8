"""Which exponents tensors get, from the sizes that averages of earlier steps had (codec-18). Pure.

What rotation leaves of rounding errors is the same for all entries of a group. With s the root mean square of a tensor
and f what its entries are multiplied by, the error of the whole is the mean of (f s)^2 times the mean of 1 / f^2, which
is least where f is s^-1/2 (Cauchy and Schwarz): tensors get *half* of the exponent by which they differ from the mean.
A tensor that would still be more than twice as small or large as the others gets the rest, too: that costs the
whole next to nothing and the smallest tensors are no longer noise. One of few entries that is far below the mean is
lifted above it, to four times as large: it is one of 64 rows in its columns, so that this costs a quarter at most, and
it may shrink that much more before its exponent follows.

**Scales move with exponents** (``moves``), so that an op under new ones needs no agreement on scales. For the entries
of a group let ``old - new`` lie between a and b. Whatever the entries are, a rotated value is a sum of them with random
signs, and under new exponents it has the same terms, each times 2^a to 2^b. By the contraction principle (Ledoux and
Talagrand 1991, theorem 4.4) the group's largest rotated value is then above 2^b t with at most twice the probability
with which it is above t under the old ones, over the signs, which are new in every op. So a scale that is moved by 4 b
quarter powers of two is as safe as one that is carried on: it is too small at most twice as often. For the same reason
it has to move by 4 a at least. Between the two an average says by how much; what is still missing then is a shift
(codec-6). The bound 4 b alone would not do: where large tensors are divided by 2^10 and a tiny one beside them stays as
it is, b is 0, and the rounding errors of the large ones would be 2^10 times as large for an op.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.balance import EXPONENT_MOST
from tailbound.codec.scale import NEED_LEAST
from tailbound.wire.schema import EXPONENT_NONE

#: Large tensors are cut into blocks of about so many entries.
BLOCK = 1 << 14
#: What may be left of a difference between a tensor and the mean, as a power of two, up and down.
_LEFT = 1.0
#: Tensors that differ by more than this power of two from the mean count as if it were this one.
_FARTHEST = 11.0
#: Tensors of so many entries are lifted to the mean, smaller ones higher, as far as they are below it: the root of the
#: ratio, at most by ``_LIFTED`` powers of two, in full from ``_BELOW`` on.
_FEW, _LIFTED, _BELOW = 4096, 2.0, 8.0
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
    lift = _LEFT + np.clip(np.log2(_FEW / entries) / 2, -_LEFT, _LIFTED)
    found: NDArray[np.float64] = apart - np.clip(apart / 2, -_LEFT, _LEFT) - lift * np.clip(-apart / _BELOW, 0, 1)
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


def changes(
    ends: tuple[NDArray[np.int64], NDArray[np.int64]], exponents: tuple[NDArray[np.uint8], NDArray[np.uint8]], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """By how many powers of two the entries of each group become larger: the least and the most, i16[G] each.

    Args:
        ends, exponents: of the op's ranges, before and after.
        size: entries of a group.
    """
    all_ends = np.union1d(*ends)
    old, new = (e[np.searchsorted(at, all_ends)].astype(np.int16) for at, e in zip(ends, exponents, strict=True))
    groups = np.arange(-(-int(all_ends[-1]) // size)) * size
    first = np.searchsorted(all_ends, groups, "right")
    last = np.searchsorted(all_ends, np.minimum(groups + size, all_ends[-1]))
    apart = [(old - new)[a : b + 1] for a, b in zip(first, last, strict=True)]
    return np.array([each.min() for each in apart]), np.array([each.max() for each in apart])


def moves(
    needs: tuple[NDArray[np.int16], NDArray[np.int16]], bounds: tuple[NDArray[np.int16], NDArray[np.int16]], spare: int
) -> NDArray[np.int16]:
    """By how many quarter powers of two the scales of groups move, i16[G].

    Args:
        needs: of an average, i16[G], by the exponents before and after.
        bounds: what ``changes`` gives.
        spare: what is added, as far as the bounds let it.
    """
    before, after = (need.astype(np.int32) for need in needs)
    seen = np.where((before == EXPONENT_NONE) | (after == EXPONENT_NONE), 0, after - before)
    low, high = (4 * bound.astype(np.int32) for bound in bounds)
    found: NDArray[np.int16] = np.clip(seen + spare, low, high).astype(np.int16)
    return found


def moved(scales: NDArray[np.int16], by: NDArray[np.int16]) -> NDArray[np.int16]:
    """``scales`` of groups (i16[G]) moved; a scale that is not known stays so, and none is below the least."""
    found: NDArray[np.int16] = np.where(
        scales == EXPONENT_NONE, scales, np.maximum(scales.astype(np.int32) + by, NEED_LEAST)
    ).astype(np.int16)
    return found
