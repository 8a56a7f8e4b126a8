"""``codec.reference`` for codes of any number of bits: what ``codec.planes`` is tested with, bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import reference
from tailbound.codec.balance import EVEN, Ranges
from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT, step_of
from tailbound.codec.planes import REACH, zero_of
from tailbound.codec.reference import Rank, Row
from tailbound.codec.scale import NEED_LEAST
from tailbound.codec.shape import Shape
from tailbound.wire.bits import Bits, both_ways
from tailbound.wire.schema import EXPONENT_NONE

_F = np.float32
#: Bits of the rounding offset: what float32 holds beside the zero.
_OFFSET_BITS = {16: 8, 8: 16, 4: 16}


def pack(codes: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Codes [..., V] as bytes [..., V bits / 8]."""
    if bits == 16:
        return np.concatenate((codes >> 8, codes & 255), axis=-1).astype(np.uint8)
    if bits == 4:
        eights = codes.reshape(*codes.shape[:-1], -1, 2, 8)
        halves: NDArray[np.uint8] = (eights[..., 0, :] | eights[..., 1, :] << 4).astype(np.uint8)
        return halves.reshape(*codes.shape[:-1], -1)
    return codes.astype(np.uint8)


def unpack(payload: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """The way back."""
    data = payload.astype(np.int64)
    half = data.shape[-1] // 2
    if bits == 16:
        return data[..., :half] << 8 | data[..., half:]
    if bits == 4:
        eights = data.reshape(*data.shape[:-1], -1, 8)
        return np.stack((eights & 15, eights >> 4), axis=-2).reshape(*data.shape[:-1], -1)
    return data


def sums_of(payloads: NDArray[np.uint8], shifts: NDArray[np.uint8], bits: int, wide: bool = False) -> NDArray[np.uint8]:
    """The bytes that a slot holds for u8[N, B] contributions, each shifted left by its entry of ``shifts``: u8[2 B].

    ``wide``: of codes of 4 bits in u16 lanes, u8[4 B].
    """
    if bits == 4 and not wide:
        summed: NDArray[np.int64] = unpack(payloads, bits).sum(0)
        assert summed.max() < 256, "sums of half bytes overflow"
        return summed.astype(np.uint8)
    codes = unpack(payloads, bits) if bits == 4 else payloads.astype(np.int64)
    lanes = reference.to_lanes(codes).astype(np.int64) << shifts.astype(np.int64)[:, None]
    in_lanes: NDArray[np.uint8] = lanes.sum(0).astype("<u2").view(np.uint8)
    return in_lanes


def totals(sums: NDArray[np.uint8], bits: int, wide: bool = False) -> NDArray[np.int64]:
    """Sums of codes from what a slot holds, in the order of entries: i64[V]."""
    if bits == 4 and not wide:
        return sums.astype(np.int64)
    lanes = reference.from_lanes(sums.view("<u2").astype(np.int64))
    return 256 * lanes[: lanes.size // 2] + lanes[lanes.size // 2 :] if bits == 16 else lanes


class Coded(NamedTuple):
    """``payload`` u8[T, B] (0 where skipped), ``need`` i16[G], ``shift`` u8[G], ``values`` f32[T, V] that codes say."""

    payload: NDArray[np.uint8]
    need: NDArray[np.int16]
    shift: NDArray[np.uint8]
    values: NDArray[np.float64]


def needs(x: NDArray[np.float32], y: NDArray[np.float32], root: float, shape: Shape) -> NDArray[np.int16]:
    """As ``reference.needs``; at 4 bits of what codes are to reach."""
    out = reference.needs(y, root)
    if shape.bits == 4:
        padded = np.zeros(shape.rows * shape.entries)
        padded[: x.size] = x
        sigma = np.sqrt(np.square(padded).reshape(shape.groups, -1).mean(axis=1))
        for g in range(shape.groups):
            most = _F(float(np.abs(y[g]).max()) / root)
            reach = min(float(most), REACH * float(sigma[g]))
            if out[g] != EXPONENT_NONE:
                out[g] = reference.needs(np.full((1, 1, 1), reach, np.float32), 1.0)[0]
                assert out[g] >= NEED_LEAST
    return out


def _offset(u: NDArray[np.int64], bits: int) -> NDArray[np.float32]:
    """zero + u of ``reference.offsets``; codes of 4 bits are made about the zero of 8."""
    kept = _OFFSET_BITS[bits]
    return _F(zero_of(max(bits, 8))) + (u >> 16 - kept).astype(np.float32) * _F(2.0**-kept)


def _code(v: NDArray[np.float32], bits: int) -> NDArray[np.int64]:
    zero, made = zero_of(bits), zero_of(max(bits, 8))
    codes: NDArray[np.int64] = np.floor(np.clip(v, _F(made - zero + 1), _F(made + zero - 1))).astype(np.int64)
    codes += zero - made
    return codes


def encode(
    x: NDArray[np.float32], shape: Shape, seed: int, rank: int, cap: int, exponents: NDArray[np.int16],
    rotate: bool = True, ranks: int = 1, ranges: Ranges = EVEN,
) -> Coded:  # fmt: skip
    """What ``codec.encode.encode`` makes of finite ``x``, in row order; values are those before ``ranges.up``."""
    x = x * reference.by_entry(ranges.down, ranges, x.size)
    root, bits = float(np.sqrt(shape.group_rows)) if rotate else 1.0, shape.bits
    flat = Shape(shape.numel, shape.width, shape.group_rows, shape.groups, shape.entries)
    y = reference.rotated(x, flat, seed, rotate)
    need = needs(x, y, root, shape)
    every, step = np.arange(shape.rows), step_of(rank, ranks)
    u = reference.offsets(every, shape.entries, seed, STAGE_CONTRIBUTION, step).reshape(y.shape)
    offsets = _offset(u, bits)
    codes = np.zeros(y.shape, np.int64)
    values = np.zeros(y.shape)
    shift = np.zeros(shape.groups, np.uint8)
    span = zero_of(bits) - 1
    for g, e in enumerate(exponents.tolist()):
        if e == EXPONENT_NONE:
            continue
        shift[g] = min(max(-(-(int(need[g]) - e) // 4), 0), cap if bits > 4 else 0)
        scale = reference.scale_of(e + 4 * int(shift[g])) * root
        codes[g] = _code(y[g] * _F(span / scale) + offsets[g], bits)
        values[g] = (codes[g] - zero_of(bits)) * (scale / root / span)
    payload = pack(codes.reshape(shape.rows, -1), bits)
    payload[np.repeat(exponents == EXPONENT_NONE, shape.group_rows)] = 0
    return Coded(payload, need, shift, values.reshape(shape.rows, -1))


class Mean(NamedTuple):
    """One result row: ``payload`` u8[B], ``scale`` as of ``reference.Mean``."""

    payload: NDArray[np.uint8]
    scale: np.float32


def mean(
    sums: NDArray[np.uint8], row: Row, seed: int, ranks: int, bits: Bits, wide: bool = False, rotate: bool = True
) -> Mean:
    """A result row from the bytes of sums (``sums_of``); with codes of 16 bits no offsets are taken off."""
    bits, down = both_ways(bits)
    zero = zero_of(bits)
    d = totals(sums, bits, wide) - zero * row.units
    if bits < 16:
        codes, scale = reference.rounded(d, row, seed, ranks, rotate, zero, zero_of(down))
        return Mean(pack(codes, down), scale)
    most = int(np.abs(d).max())
    if most == 0:
        return Mean(pack(np.full(d.size, zero), bits), _F(0))
    u = _offset(reference.offsets(np.array([row.k]), d.size, seed, STAGE_RESULT)[0], bits)
    codes = _code(d.astype(np.float32) * _F((zero - 1) / most) + u, bits)
    return Mean(pack(codes, bits), _F(most * (reference.scale_of(row.e) / (zero - 1)) / len(row.members)))


def decode(
    payload: NDArray[np.uint8], scale: NDArray[np.float32], present: NDArray[np.bool_], shape: Shape, seed: int,
    rotate: bool = True, rank: Rank | None = None, ranges: Ranges = EVEN,
) -> NDArray[np.float32]:  # fmt: skip
    """Rows of results, or of contributions of ``rank`` (u8[T, B], f32[T], bool[T], row order) as f32[numel]."""
    bits = shape.bits
    flat = Shape(shape.numel, shape.width, shape.group_rows, shape.groups, shape.entries)
    codes, zero = unpack(payload, bits), zero_of(bits)
    if bits < 16:
        values = reference.valued(codes, scale, present, seed, zero, rank)
        return reference.restored(values, present, flat, seed, rotate, ranges)
    factors = np.where(present, (scale.astype(np.float64) / (zero - 1)).astype(np.float32), _F(0))
    values = (codes - zero).astype(np.float32) * factors[:, None]
    return reference.restored(values, present, flat, seed, rotate, ranges)
