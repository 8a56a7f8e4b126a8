"""Scales as quarter powers of two (codec-5, codec-6).

A group's scale is 2^(e/4) with an integer code e (int16), so that ranks agree on it exactly. ``need`` is the smallest
e that holds a group's largest rotated value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.format import FORMATS
from tailbound.errors import ConfigError
from tailbound.wire.jit import compiled
from tailbound.wire.schema import EXPONENT_NONE

#: Code of the value 0, and the largest distance from it.
ZERO = 128
SPAN = 127
#: No need below this one (2^-75): no sum or product of a decoded value is then ever subnormal, so that neither speed
#: nor bits depend on a thread's flush-to-zero mode. Groups that small are coded with this scale.
NEED_LEAST = -300
#: Rotated values of 2^120 or more count as not finite: their sums could overflow float32 on the way back.
OVERFLOW_BITS = (120 + 127) << 23

#: Quarter powers of two by which a scale rises from one op to the next as long as shifts take up the rest, and the
#: doublings that are left for what comes on top.
_RISE, _SPARE = 1, 2

_Q1 = int(np.float32(2.0**0.25).view(np.uint32)) & 0x7FFFFF
_Q2 = int(np.float32(2.0**0.5).view(np.uint32)) & 0x7FFFFF
_Q3 = int(np.float32(2.0**0.75).view(np.uint32)) & 0x7FFFFF
_QUARTERS = (1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75)


def headroom_of(world_size: int, bits: int = 8) -> int:
    """h, in quarter powers of two: what e leaves above the largest need seen; none with codes that clip.

    More headroom costs precision in every op (NMSE at 64 ranks: 7.9e-4 with 2, 1.46e-3 with 4) and pays only where few
    spare bits are left to shift into: for gradients ten times larger than a step before, 64 ranks give 4e-4 with
    either, 128 ranks 3.5e-2 with 2 and 5e-3 with 4. Less than 1 has more groups shifted, which are coded twice.
    """
    if FORMATS[bits].clips:
        return 0
    if shift_cap_of(world_size) > _SPARE:
        return 1
    return 2 if world_size <= 64 else 4


def shift_cap_of(world_size: int) -> int:
    """kcap: the largest shift with 255 * N * 2^kcap <= 65535.

    Raises:
        ConfigError: no job is that large.
    """
    if not 1 <= world_size <= 257:
        raise ConfigError(f"world size {world_size}: give 1..257, as sums of more do not fit u16 lanes")
    return (257 // world_size).bit_length() - 1


def cold_exponents(needs: NDArray[np.int16], headroom: int) -> NDArray[np.int16]:
    """e of each group for a key's first op: the largest need of those heard, plus headroom.

    A group that is zero everywhere gets the smallest scale, not none: no rank would ever contribute to it again.

    Args:
        needs: i16[ranks heard (own included), G].

    Returns:
        i16[G].
    """
    most = np.maximum(needs.max(axis=0), np.int16(NEED_LEAST))
    exponents: NDArray[np.int16] = (most + headroom).astype(np.int16)
    return exponents


def warm_exponents(row_exponents: NDArray[np.int16], rows: NDArray[np.int64]) -> NDArray[np.int16]:
    """e of each group from the results received in the key's previous op: the largest of its rows.

    Args:
        row_exponents: i16[T], next exponent by row k, own rows included; EXPONENT_NONE where nothing was received.
        rows: i64[G + 1], where groups begin (``shape.Groups``).

    Returns:
        i16[G]; EXPONENT_NONE for a group of which nothing was received.
    """
    largest: NDArray[np.int16] = np.maximum.reduceat(row_exponents, rows[:-1])
    return largest


@compiled
def next_exponent(e: Any, need: Any, headroom: Any, cap: Any) -> int:
    """e of a group for the key's next op, from what the largest need in this op was (codec-10).

    Args:
        e: of this op; EXPONENT_NONE: not known.
        need: EXPONENT_NONE: no rank had anything.
        headroom: h.
        cap: kcap; 0 where contributions cannot be shifted.
    """
    if need == EXPONENT_NONE:
        return int(e)
    found: int = need + headroom
    if cap > _SPARE and e > NEED_LEAST + headroom:  # else unknown, or the scale of zeros
        found = max(min(found, e + _RISE), found - 4 * (cap - _SPARE))
    return found


@compiled
def scale_of(e: Any) -> float:
    """2^(e/4) in float64, the same bits everywhere: no pow() of a C library."""
    return math.ldexp(_QUARTERS[e & 3], e >> 2)


def scales_of(exponents: NDArray[np.int16]) -> NDArray[np.float32]:
    """2^(e/4) of every e (i16[n]) in float32; of EXPONENT_NONE it is 0."""
    scales: NDArray[np.float32] = np.ldexp(np.array(_QUARTERS)[exponents & 3], exponents >> 2).astype(np.float32)
    return scales


@compiled
def need_of(bits: Any) -> int:
    """ceil(4 log2 v) for the bits of a finite float32 v >= 0, at least NEED_LEAST; EXPONENT_NONE for 0."""
    if bits == 0:
        return EXPONENT_NONE
    fraction = bits & 0x7FFFFF
    need: int = 4 * ((bits >> 23) - 127)
    if fraction > 0:
        need += 1
    if fraction > _Q1:
        need += 1
    if fraction > _Q2:
        need += 1
    if fraction > _Q3:
        need += 1
    return max(need, NEED_LEAST)


@compiled
def shift_of(want: Any, e: Any, cap: Any) -> int:
    """k: doublings of the scale ``e`` until a group that needs ``want`` fits, at most ``cap``."""
    return min((want - e + 3) // 4, cap) if want > e else 0


@compiled
def root_of(group_rows: int) -> float:
    """sqrt(R) in float64."""
    return math.sqrt(float(group_rows))
