"""How far two replicas have drifted apart, told by 1 KiB: a count sketch (codec-14).

Every parameter gets a random sign and one of 256 bins, by a hash that all ranks share and that is new in every step;
the squared norm of the difference of two ranks' bins is an unbiased estimate of the squared distance of their
parameters, with a relative deviation of sqrt(2 / 256) (Charikar, Chen, Farach-Colton: Finding frequent items in data
streams, 2002; AMS sketches before it). Unlike sampled entries it sees drift that sits in one layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.hashing import fmix
from tailbound.wire.jit import Scalar, compiled

#: Bins of a sketch; as float32, 1 KiB.
BINS = 256
_BIN, _SIGN = np.uint32(BINS - 1), np.uint32(31)


@compiled
def add_to_bins(values: NDArray[np.float32], first: Scalar, seed: Scalar, bins: NDArray[np.float64]) -> float:
    """Adds signed ``values`` (f32[n]; entries ``first``, ``first + 1``, ... of all parameters) to ``bins`` (f64[256]).

    Returns:
        Their squared norm.
    """
    norm = 0.0
    key = np.uint32(seed)
    start = np.uint32(first)
    for i in range(values.shape[0]):
        h = fmix(np.uint32(np.uint32(start + np.uint32(i)) ^ key))
        value = np.float64(values[i])
        norm += value * value
        bins[h & _BIN] += -value if h >> _SIGN else value
    return norm


class Drift:
    """Distances to other ranks, slice by slice; the last ones make the estimate for the whole.

    Args:
        slices: how many slices the parameters are cut into.
    """

    def __init__(self, slices: int) -> None:
        self._parts: dict[int, tuple[float, float]] = {}
        self._slices = slices

    def observe(self, which: int, own: NDArray[Any], theirs: NDArray[Any], norm: float) -> None:
        """Takes both ranks' bins (f32[256]) of slice ``which``, and its squared norm here."""
        apart = float(np.square(own.astype(np.float64) - theirs).sum())
        if np.isfinite(apart) and np.isfinite(norm):
            self._parts[which % self._slices] = (apart, norm)

    def equal(self, which: int) -> None:
        """Slice ``which`` is the same on the other rank, or was made so."""
        norm = self._parts.get(which % self._slices, (0.0, 0.0))[1]
        self._parts[which % self._slices] = (0.0, norm)

    @property
    def relative(self) -> float:
        """Estimated distance over norm, of the slices measured so far; 0 when none is."""
        apart = sum(part[0] for part in self._parts.values())
        norm = sum(part[1] for part in self._parts.values())
        return float(np.sqrt(apart / norm)) if norm > 0 else 0.0
