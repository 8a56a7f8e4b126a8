"""How each group of an op is to be coded, from its largest value: what a device asks of the host in between.

A device finds the largest value of each group and makes codes by the factors it is given. All that is decided by group
is decided here, by the functions of the compiled pass, so that it cannot be decided otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import hashing
from tailbound.codec.encode import normalised
from tailbound.codec.hashing import row_key
from tailbound.codec.scale import OVERFLOW_BITS, SPAN, need_of, root_of, scale_of, shift_of
from tailbound.codec.scratch import readonly
from tailbound.codec.shape import Shape
from tailbound.wire.jit import compiled
from tailbound.wire.schema import EXPONENT_NONE


class Plan(NamedTuple):
    """Not ``finite``: nothing may be sent. ``beyond``: groups with a value that does not fit even when shifted."""

    finite: bool
    beyond: int


@compiled
def _plan(  # type: ignore[no-untyped-def]
    bits, rows, rotate, cap, exponents, rounding, need, shift, skipped, factors, limits, keys
):
    beyond = 0
    root = root_of(rows) if rotate else 1.0
    for g in range(bits.shape[0]):
        if bits[g] >= OVERFLOW_BITS:
            return -1
        want = need_of(normalised(bits[g], rows, rotate))
        e = np.int64(exponents[g])
        need[g] = want
        shift[g] = 0
        skipped[g] = e == EXPONENT_NONE
        factors[g] = np.float32(0.0)
        limits[g] = np.float32(np.inf)
        if e == EXPONENT_NONE:
            continue
        k = shift_of(want, e, cap)
        shift[g] = k
        scale = scale_of(e + 4 * k) * root
        factors[g] = np.float32(SPAN / scale)
        if want > e + 4 * k:
            limits[g] = np.float32(scale)
            beyond += 1
    for pair in range(keys.shape[0]):
        keys[pair] = row_key(rounding, np.uint32(pair))
    return beyond


def plan(
    bits: NDArray[np.uint32],
    shape: Shape,
    seed: int,
    rank: int,
    shift_cap: int,
    exponents: NDArray[np.int16],
    need: NDArray[np.int16],
    shift: NDArray[np.uint8],
    skipped: NDArray[np.uint8],
    factors: NDArray[np.float32],
    limits: NDArray[np.float32],
    keys: NDArray[np.uint32],
    *,
    rotate: bool = True,
) -> Plan:
    """Settles need, shift and scale of every group (codec-4 to codec-7), and the keys of the rounding offsets.

    Args:
        bits: u32[G], of the largest absolute value of the group, rotated but not normalised.
        shape, seed, rank, shift_cap, exponents, need, shift, skipped, rotate: as of ``codec.encode.encode``.
        factors: f32[G], written: what a value is multiplied by to be a code; 0 where the group is skipped.
        limits: f32[G], written: values above it do not fit; infinite where all do.
        keys: u32[T / 2], written: ``hashing.row_key`` of each pair of rows.
    """
    rounding = np.uint32(hashing.rounding_seed(seed, rank, hashing.STAGE_CONTRIBUTION))
    beyond = _plan(
        readonly(bits), shape.group_rows, rotate, shift_cap, exponents, rounding, need, shift, skipped, factors,
        limits, keys,
    )  # fmt: skip
    return Plan(beyond >= 0, max(0, int(beyond)))
