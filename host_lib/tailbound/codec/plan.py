"""How each group of an op is to be coded, from its largest value: what a device asks of the host in between.

A device finds the largest value of each group and makes codes by the factors it is given. All that is decided by group
is decided here, by the functions of the compiled pass, so that it cannot be decided otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import hashing, planes
from tailbound.codec.encode import cap_of, normalised, scale_for
from tailbound.codec.hashing import float_of, row_key
from tailbound.codec.records import Coding, Scales
from tailbound.codec.scale import OVERFLOW_BITS, root_of
from tailbound.codec.scratch import readonly
from tailbound.codec.shape import Shape
from tailbound.wire.jit import compiled


class Plan(NamedTuple):
    """Not ``finite``: nothing may be sent. ``beyond``: groups with a value that does not fit."""

    finite: bool
    beyond: int


class Factors(NamedTuple):
    """What a device codes by.

    Attributes:
        factors: f32[G], what a value is multiplied by to be a code.
        limits: f32[G], values above it do not fit; infinite where all do.
        keys: u32[T], the part of each row in its rounding offsets.
    """

    factors: NDArray[np.float32]
    limits: NDArray[np.float32]
    keys: NDArray[np.uint32]


_NO_SQUARES = readonly(np.zeros(0))


@compiled
def _plan(bits, squares, codes, span, layout, rotate, cap, rounding, scales, by):  # type: ignore[no-untyped-def]
    beyond = 0
    for g in range(bits.shape[0]):
        rows, entries = layout.rows[g + 1] - layout.rows[g], layout.entries[g + 1] - layout.entries[g]
        turn = rotate and rows > 1
        root = root_of(rows) if turn else 1.0
        if bits[g] >= OVERFLOW_BITS:
            return -1
        most = normalised(bits[g], rows, turn)
        if squares.shape[0] > 0:
            most = planes.within(most, squares[g], planes.spread_over(rows, codes, entries))
        scale = scale_for(most, cap, scales, g) * root
        by.factors[g] = np.float32(span / scale)
        by.limits[g] = np.float32(np.inf)
        if (cap == 0 or squares.shape[0] > 0) and np.float64(float_of(bits[g])) > scale:
            by.limits[g] = np.float32(scale)
            beyond += 1
    for k in range(by.keys.shape[0]):
        by.keys[k] = row_key(rounding, k)
    return beyond


def plan(
    bits: NDArray[np.uint32],
    shape: Shape,
    coding: Coding,
    scales: Scales,
    by: Factors,
    squares: NDArray[np.float64] = _NO_SQUARES,
) -> Plan:
    """Settles the scale of every group (codec-4 to codec-7), and the keys of the rounding offsets.

    Args:
        bits: u32[G], of the largest absolute value of the group, rotated but not normalised.
        shape, coding, scales: as of ``codec.encode.encode``.
        by: written.
        squares: f64[G], sum of squares of the group before rotation; with codes that clip only (codec-12).
    """
    rounding = np.uint32(hashing.rounding_seed(coding.seed, hashing.STAGE_CONTRIBUTION))
    span, cap = shape.code.span, cap_of(coding, shape)
    of_groups = readonly(bits), readonly(squares)
    beyond = _plan(*of_groups, shape.entries, span, shape.layout, coding.rotate, cap, rounding, scales, by)
    return Plan(beyond >= 0, max(0, int(beyond)))
