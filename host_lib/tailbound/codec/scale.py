"""Scales of contributions, and sums of contributions with different scales (codec-5, codec-6, codec-9).

A scale is weight 2^(e/4), with an integer exponent e. Every rank has its own for each group, with e a multiple of 4, so
that sums are aligned by shifts. A switch cannot shift: there the weight is 1 and all ranks have the same e, at first by
their ``need``, the smallest e that holds a group's largest rotated value, then from the switch's results.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import ConfigError
from tailbound.wire.jit import compiled
from tailbound.wire.schema import EXPONENT_NONE, HEADROOM

#: Code of the value 0, and the largest distance from it.
ZERO = 128
SPAN = 127
#: No need below this one (2^-75): no sum or product of a decoded value is then ever subnormal, so that neither speed
#: nor bits depend on a thread's flush-to-zero mode. Groups that small are coded with this scale.
NEED_LEAST = -300
#: Rotated values of 2^120 or more count as not finite: their sums could overflow float32 on the way back.
OVERFLOW_BITS = (120 + 127) << 23

_Q1 = int(np.float32(2.0**0.25).view(np.uint32)) & 0x7FFFFF
_Q2 = int(np.float32(2.0**0.5).view(np.uint32)) & 0x7FFFFF
_Q3 = int(np.float32(2.0**0.75).view(np.uint32)) & 0x7FFFFF
_QUARTERS = (1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75)


class Weights(NamedTuple):
    """What sums of a job have room for: weights of contributions up to ``cap``, and ``spare`` doublings above them."""

    cap: int
    spare: int


def weights_of(world_size: int) -> Weights:
    """The largest weight, 7, 3 or 1, and the doublings above it, with 255 N cap 2^spare <= 65535 (codec-6).

    Raises:
        ConfigError: no job is that large.
    """
    if not 1 <= world_size <= 257:
        raise ConfigError(f"world size {world_size}: give 1..257, as sums of more do not fit u16 lanes")
    room = 257 // world_size
    cap = max(each for each in (7, 3, 1) if each <= room)
    return Weights(cap, (room // cap).bit_length() - 1)


def agreed(needs: NDArray[np.int16]) -> NDArray[np.int16]:
    """e of each group for a key's first op where a switch sums: the largest need of those heard, with headroom.

    Args:
        needs: i16[ranks heard (own included), G].

    Returns:
        i16[G].
    """
    most: NDArray[np.int16] = np.maximum(needs.max(axis=0), np.int16(NEED_LEAST))
    return most + np.int16(HEADROOM)


def warm_exponents(row_exponents: NDArray[np.int16], rows: NDArray[np.int64]) -> NDArray[np.int16]:
    """e of each group from the results of a switch in the key's previous op: the largest of its rows.

    Args:
        row_exponents: i16[T], next exponent by row k; EXPONENT_NONE where nothing was received.
        rows: i64[G + 1], where groups begin (``shape.Groups``).

    Returns:
        i16[G]; EXPONENT_NONE for a group of which nothing was received.
    """
    largest: NDArray[np.int16] = np.maximum.reduceat(row_exponents, rows[:-1])
    return largest


@compiled
def own_scale(bits: Any, cap: Any) -> tuple[Any, Any]:
    """The exponent, a multiple of 4, and the weight of the smallest scale ``weight 2^(exponent/4)`` that holds a value.

    Weights are those with the top bit of ``cap``, so scales lie a quarter apart at most where it is 7 (codec-5).

    Args:
        bits: of a finite float32 v >= 0; below 2^-75 it is held by the smallest scale.
    """
    value, least = np.int64(bits), np.int64(cap + 1) // 2
    weight = least + ((value & 0x7FFFFF) * least + 0x7FFFFF >> 23)
    power = (value >> 23) - 127
    if power < NEED_LEAST // 4:
        power, weight = np.int64(NEED_LEAST // 4), least
    elif weight > cap:
        power, weight = power + 1, least
    return 4 * (power - (least >> 1)), weight


class Sum(NamedTuple):
    """What a row of sums is (``tb_slot``): its unit is 2^(exponent/4), ``units`` the sum where all codes are 128."""

    exponent: Any
    units: Any


class Join(NamedTuple):
    """How a row is added: the sum is shifted down by ``move``; codes times ``weight`` and ``add`` by ``down``."""

    move: Any
    weight: Any
    add: Any
    down: Any


#: Of a row to which nothing is added.
NOT_JOINED = Join(0, 0, 0, 0)
#: What ``Join.down`` is at most, for codes of bytes and of halves.
DOWN_MOST, DOWN_HALVES = 7, 3
#: A contribution that lies so many doublings further down is taken in once in so many.
_FAR_MOST = 16


@compiled
def _spare_of(weights: Any, weight: Any) -> Any:
    """F for one weight: a smaller one than others may be doubled further."""
    return weights.spare + (2 * weight <= weights.cap) + (4 * weight <= weights.cap)


@compiled
def begin(exponent: Any, weight: Any, weights: Any) -> tuple[Sum, Join]:
    """The sum that a first contribution makes, and how it is stored (codec-9)."""
    weight, zero = np.int64(weight), np.int64(0)
    spare = _spare_of(weights, weight)
    weight <<= spare
    return Sum(np.int64(exponent) - 4 * spare, 128 * weight), Join(zero, weight, zero, zero)


@compiled
def join(total: Any, exponent: Any, weight: Any, weights: Any, down_most: Any, bits: Any) -> tuple[Sum, Join]:
    """What a sum becomes by a contribution with a scale of its own, and how its codes are added (codec-9).

    Args:
        total: the sum so far.
        exponent, weight: of the contribution.
        weights: of the job.
        down_most: ``DOWN_MOST`` or ``DOWN_HALVES``.
        bits: u32 by which it is rounded, others for each row, rank and op.
    """
    e, units, zero = np.int64(total.exponent), np.int64(total.units), np.int64(0)
    weight, bits = np.int64(weight), np.int64(bits)
    spare = _spare_of(weights, weight)
    up, move = (np.int64(exponent) - e) >> 2, zero
    if up > spare:
        move = min(up - spare, np.int64(16))
        e += 4 * (up - spare)
        units >>= move
        up = np.int64(spare)
    if up >= 0:
        weight <<= up
        return Sum(e, units + 128 * weight), Join(move, weight, zero, zero)
    down = min(-up, np.int64(down_most))
    far = min(-up - down, np.int64(_FAR_MOST))
    if bits >> 8 & (np.int64(1) << far) - 1:
        weight = zero
    return Sum(e, units + (128 * weight >> down)), Join(move, weight, bits & (np.int64(1) << down) - 1, down)


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
def root_of(group_rows: int) -> float:
    """sqrt(R) in float64."""
    return math.sqrt(float(group_rows))
