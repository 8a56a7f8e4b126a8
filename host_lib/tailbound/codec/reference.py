"""The codec in plain numpy: the definition that the compiled passes are tested with, bit by bit.

The same order of float32 operations, hence the same bits; only the sum of a check and all counting are in integers.
Rows are in row order here (row k = g * R + r), not in packet order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT, rounding_seed
from tailbound.codec.scale import NEED_LEAST
from tailbound.codec.shape import Shape
from tailbound.wire.schema import EXPONENT_NONE

_F = np.float32


def fmix(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Finaliser of MurmurHash3."""
    h = h ^ h >> np.uint32(16)
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ h >> np.uint32(13)
    h = h * np.uint32(0xC2B2AE35)
    return h ^ h >> np.uint32(16)


def signs(shape: Shape, seed: int) -> NDArray[np.float32]:
    """+1 or -1 for every entry: f32[T, V]."""
    index = np.arange(shape.rows * shape.codes, dtype=np.uint32) + np.uint32(seed)
    return np.where(fmix(index) >> np.uint32(31), _F(-1), _F(1)).reshape(shape.rows, shape.codes)


def transform(y: NDArray[np.float32]) -> NDArray[np.float32]:
    """H_R along the middle axis of f32[G, R, V], not normalised, stages in the order 8, 16, 32, 1, 2, 4."""
    groups, rows, codes = y.shape
    for step in (8, 16, 32, 1, 2, 4):
        if step < rows:
            pairs = y.reshape(groups, rows // (2 * step), 2, step, codes)
            a, b = pairs[:, :, 0], pairs[:, :, 1]
            y = np.stack((a + b, a - b), axis=2).reshape(groups, rows, codes)
    return y


def rotated(x: NDArray[np.float32], shape: Shape, seed: int, rotate: bool = True) -> NDArray[np.float32]:
    """H_R (s * x), not normalised, f32[G, R, V]; x itself without ``rotate``."""
    padded = np.zeros(shape.rows * shape.codes, np.float32)
    padded[: x.size] = x
    rows = padded.reshape(shape.rows, shape.codes)
    if rotate:
        rows = rows * signs(shape, seed)
    grouped = rows.reshape(shape.groups, shape.group_rows, shape.codes)
    return transform(grouped) if rotate else grouped


def needs(y: NDArray[np.float32], root: float) -> NDArray[np.int16]:
    """ceil(4 log2 max|y / root|) a group, by comparison with float32 quarter powers: i16[G]."""
    largest = np.abs(y).max(axis=(1, 2)).astype(np.float64)
    out = np.full(y.shape[0], EXPONENT_NONE, np.int16)
    for g, value in enumerate(largest):
        normal = _F(value / root)
        if normal > 0:
            fraction, power = np.frexp(normal)
            quarters = (1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75)
            above = sum(_F(2 * fraction) > _F(q) for q in quarters)
            out[g] = max(4 * (int(power) - 1) + above, NEED_LEAST)
    return out


def scale_of(e: int) -> float:
    """2^(e/4) in float64."""
    return float(np.ldexp((1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75)[e & 3], e >> 2))


def _key(seed: int, row: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return fmix(np.uint32(seed) + row * np.uint32(0x9E3779B1))


def offsets(shape: Shape, seed: int, rank: int) -> NDArray[np.float32]:
    """128 + u for every entry of a contribution: f32[T, V]."""
    pair = np.arange(shape.rows // 2, dtype=np.uint32)
    column = np.arange(shape.codes, dtype=np.uint32)
    h = fmix(_key(rounding_seed(seed, rank, STAGE_CONTRIBUTION), pair)[:, None] + column)
    u = np.stack((h & np.uint32(0xFFFF), h >> np.uint32(16)), axis=1).reshape(shape.rows, shape.codes)
    return _F(128) + u.astype(np.float32) * _F(2.0**-16)


def _code(v: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.floor(np.clip(v, _F(1), _F(255))).astype(np.uint8)


class Coded(NamedTuple):
    """``codes`` u8[T, V] (0 where skipped), ``need`` i16[G], ``shift`` u8[G], ``clipped`` entries."""

    codes: NDArray[np.uint8]
    need: NDArray[np.int16]
    shift: NDArray[np.uint8]
    clipped: int


def encode(
    x: NDArray[np.float32],
    shape: Shape,
    seed: int,
    rank: int,
    shift_cap: int,
    exponents: NDArray[np.int16],
    rotate: bool = True,
) -> Coded:
    """What ``codec.encode.encode`` makes of finite ``x``, in row order."""
    root = float(np.sqrt(shape.group_rows)) if rotate else 1.0
    y = rotated(x, shape, seed, rotate)
    need = needs(y, root)
    u = offsets(shape, seed, rank).reshape(y.shape)
    codes = np.zeros(y.shape, np.uint8)
    shift = np.zeros(shape.groups, np.uint8)
    clipped = 0
    for g in range(shape.groups):
        e = int(exponents[g])
        if e == EXPONENT_NONE:
            continue
        shift[g] = min(max(-(-(int(need[g]) - e) // 4), 0), shift_cap)
        scale = scale_of(e + 4 * int(shift[g])) * root
        if need[g] > e + 4 * int(shift[g]):
            clipped += int(np.count_nonzero(np.abs(y[g]) > _F(scale)))
        codes[g] = _code(y[g] * _F(127 / scale) + u[g])
    return Coded(codes.reshape(shape.rows, shape.codes), need, shift, clipped)


def to_lanes(codes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Codes [..., V] in the lane order of the sums ring: u16[..., V]."""
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 4, 2)
    return np.swapaxes(eights, -1, -2).astype(np.uint16).reshape(codes.shape)


def from_lanes(lanes: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """The way back: u16[..., V] in the order of the codes."""
    eights = lanes.reshape(*lanes.shape[:-1], lanes.shape[-1] // 8, 2, 4)
    return np.swapaxes(eights, -1, -2).reshape(lanes.shape)


class Mean(NamedTuple):
    """One result row: ``codes`` u8[V], ``scale`` its largest absolute value."""

    codes: NDArray[np.uint8]
    scale: np.float32


def mean(lanes: NDArray[np.uint16], units: int, count: int, e: int, seed: int, rank: int, place: int) -> Mean:
    """Result row of ``rank`` at ``place`` from the sums of ``count`` contributors, u16[V] in lane order."""
    d = lanes.astype(np.int64) - 128 * units
    most = int(np.abs(d).max())
    if most == 0:
        return Mean(np.full(lanes.size, 128, np.uint8), _F(0))
    scale = _F(most * (scale_of(e) / 127) / count)
    lane = np.arange(lanes.size, dtype=np.uint32)
    key = _key(rounding_seed(seed, rank, STAGE_RESULT), np.array([place], np.uint32))
    u = (fmix(key + lane) >> np.uint32(16)).astype(np.float32) * _F(2.0**-16) + _F(128)
    codes = _code(d.astype(np.float32) * _F(127 / most) + u)
    return Mean(from_lanes(codes.astype(np.uint16)).astype(np.uint8), scale)


def decode(
    codes: NDArray[np.uint8],
    scale: NDArray[np.float32],
    present: NDArray[np.bool_],
    shape: Shape,
    seed: int,
    rotate: bool = True,
) -> NDArray[np.float32]:
    """Result rows (u8[T, V], f32[T], bool[T], row order) as f32[numel]."""
    factors = np.where(present, (scale.astype(np.float64) / 127).astype(np.float32), _F(0))
    return _restore((codes.astype(np.float32) - _F(128)) * factors[:, None], present, shape, seed, rotate)


def decode_sums(
    sums: NDArray[np.uint16],
    counts: NDArray[np.uint16],
    scale: NDArray[np.float32],
    present: NDArray[np.bool_],
    shape: Shape,
    seed: int,
    rotate: bool = True,
) -> NDArray[np.float32]:
    """A switch's sums (u16[T, V] in code order, contributors u16[T], f32[T], bool[T]) as f32[numel]."""
    divisor = 127 * np.where(present, counts, 1).astype(np.float64)
    factors = np.where(present, (scale.astype(np.float64) / divisor).astype(np.float32), _F(0))
    distance = sums.astype(np.int32) - 128 * counts.astype(np.int32)[:, None]
    return _restore(distance.astype(np.float32) * factors[:, None], present, shape, seed, rotate)


def _restore(
    values: NDArray[np.float32], present: NDArray[np.bool_], shape: Shape, seed: int, rotate: bool
) -> NDArray[np.float32]:
    """Rotated values f32[T, V] as f32[numel]."""
    values[~present] = 0
    y = values.reshape(shape.groups, shape.group_rows, shape.codes)
    if rotate:
        received = present.reshape(shape.groups, shape.group_rows).sum(axis=1)
        factor = np.where(received > 0, np.sqrt(shape.group_rows) / np.maximum(received, 1), 0).astype(np.float32)
        y = transform(y) * factor[:, None, None]
        y = y * signs(shape, seed).reshape(y.shape)
    return y.reshape(-1)[: shape.numel].copy()
