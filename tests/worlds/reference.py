"""The codec in plain numpy: the definition that the compiled passes are tested with, bit by bit, for codes of any bits.

The same order of float32 operations, hence the same bits; only the sum of a check and all counting are in integers.
Rows are in row order here, not in packet order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT, rounding_seed, step_of
from tailbound.codec.planes import REACH
from tailbound.codec.scale import NEED_LEAST
from tailbound.codec.shape import Shape
from tailbound.wire.schema import EXPONENT_NONE

_F = np.float32
#: Bits of the rounding offset: what float32 holds beside the zero.
_OFFSET_BITS = {16: 8, 8: 16, 4: 16}
_Word = TypeVar("_Word", bound=np.integer[Any])


def zero_of(bits: int) -> int:
    """Code of the value 0."""
    return 1 << bits - 1


def fmix(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Finaliser of MurmurHash3."""
    h = h ^ h >> np.uint32(16)
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ h >> np.uint32(13)
    h = h * np.uint32(0xC2B2AE35)
    return h ^ h >> np.uint32(16)


def signs(shape: Shape, seed: int) -> NDArray[np.float32]:
    """+1 or -1 for every entry: f32[T, V]."""
    index = np.arange(shape.rows * shape.entries, dtype=np.uint32) + np.uint32(seed)
    return np.where(fmix(index) >> np.uint32(31), _F(-1), _F(1)).reshape(shape.rows, shape.entries)


def transform(y: NDArray[np.float32]) -> NDArray[np.float32]:
    """H_R along the first axis of f32[R, V], not normalised, stages in the order 8, 16, 32, 1, 2, 4."""
    rows, codes = y.shape
    for step in (8, 16, 32, 1, 2, 4):
        if step < rows:
            pairs = y.reshape(rows // (2 * step), 2, step, codes)
            a, b = pairs[:, 0], pairs[:, 1]
            y = np.stack((a + b, a - b), axis=1).reshape(rows, codes)
    return y


def by_group(shape: Shape) -> list[slice]:
    """The rows of each group."""
    rows: list[int] = shape.layout.rows.tolist()
    return [slice(first, end) for first, end in itertools.pairwise(rows)]


def turned(rows: slice, rotate: bool) -> bool:
    """Whether a group is rotated: one of a single row never is."""
    return rotate and rows.stop - rows.start > 1


def root_of(rows: slice, rotate: bool) -> float:
    """What the values of a group are divided by."""
    return float(np.sqrt(rows.stop - rows.start)) if turned(rows, rotate) else 1.0


def in_rows(x: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
    """Entries in their rows, f32[T, V], zeros where a group has none."""
    padded = np.zeros((shape.rows, shape.entries), np.float32)
    for rows, (first, end) in zip(by_group(shape), itertools.pairwise(shape.layout.entries.tolist()), strict=True):
        padded[rows].reshape(-1)[: end - first] = x[first:end]
    return padded


def rotated(x: NDArray[np.float32], shape: Shape, seed: int, rotate: bool = True) -> NDArray[np.float32]:
    """H_R (s * x), not normalised, f32[T, V]; x itself without ``rotate`` and in groups of one row."""
    y, by_sign = in_rows(x, shape), signs(shape, seed)
    for rows in by_group(shape):
        if turned(rows, rotate):
            y[rows] = transform(y[rows] * by_sign[rows])
    return y


def needs(x: NDArray[np.float32], y: NDArray[np.float32], shape: Shape, rotate: bool) -> NDArray[np.int16]:
    """ceil(4 log2 max|y|) a group, normalised, by comparison with float32 quarter powers: i16[G].

    At 4 bits of what codes are to reach, by the root mean square of ``x`` over the columns that it has.
    """
    groups, squares = by_group(shape), np.square(in_rows(x, shape), dtype=np.float64)
    reach = np.array([np.abs(y[rows]).max().astype(np.float64) / root_of(rows, rotate) for rows in groups], np.float32)
    if shape.bits == 4:
        there = np.minimum(np.diff(shape.layout.entries), shape.entries)
        means = [squares[rows].sum() / ((rows.stop - rows.start) * n) for rows, n in zip(groups, there, strict=True)]
        reach = np.minimum(reach.astype(np.float64), REACH * np.sqrt(means)).astype(np.float32)
    out = np.full(shape.groups, EXPONENT_NONE, np.int16)
    for g, normal in enumerate(reach):
        if normal > 0:
            fraction, power = np.frexp(normal)
            quarters = (1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75)
            above = sum(_F(2 * fraction) > _F(q) for q in quarters)
            out[g] = max(4 * (int(power) - 1) + above, NEED_LEAST)
    return out


def scale_of(e: int) -> float:
    """2^(e/4) in float64."""
    return float(np.ldexp((1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75)[e & 3], e >> 2))


def columns(entries: int, seed: int, stage: int) -> NDArray[np.int64]:
    """The parts of the columns in rounding offsets, in units of 2^-16: i64[V]."""
    rounding = np.array([rounding_seed(seed, stage)], np.uint32)
    index: NDArray[np.uint32] = np.arange(entries, dtype=np.uint32)
    index += fmix(rounding ^ np.uint32(0xA511E9B3))
    return (fmix(index) >> np.uint32(16)).astype(np.int64)


def offsets(rows: NDArray[np.integer[Any]], entries: int, seed: int, stage: int, step: int = 0) -> NDArray[np.int64]:
    """Rounding offsets of the entries of ``rows`` in units of 2^-16: i64[rows, V]."""
    rounding = np.array([rounding_seed(seed, stage)], np.uint32)
    keys: NDArray[np.uint32] = rounding + rows.astype(np.uint32) * np.uint32(0x9E3779B1)
    row = fmix(keys).astype(np.int64)
    return (columns(entries, seed, stage) + row[:, None] + step) % 65536


def with_zero(u: NDArray[np.int64], bits: int = 8) -> NDArray[np.float32]:
    """zero + u as float32; codes of 4 bits are made about the zero of 8."""
    kept = _OFFSET_BITS[bits]
    return _F(zero_of(max(bits, 8))) + (u >> 16 - kept).astype(np.float32) * _F(2.0**-kept)


def code(v: NDArray[np.float32], bits: int = 8) -> NDArray[np.int64]:
    """Codes of scaled values with ``with_zero`` in them."""
    zero, made = zero_of(bits), zero_of(max(bits, 8))
    codes: NDArray[np.int64] = np.floor(np.clip(v, _F(made - zero + 1), _F(made + zero - 1))).astype(np.int64)
    codes += zero - made
    return codes


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


def to_lanes(codes: NDArray[np.integer[Any]]) -> NDArray[np.uint16]:
    """Codes [..., V] in the lane order of the sums ring: u16[..., V]."""
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 4, 2)
    return np.swapaxes(eights, -1, -2).astype(np.uint16).reshape(codes.shape)


def from_lanes(lanes: NDArray[_Word]) -> NDArray[_Word]:
    """The way back: [..., V] in the order of the codes."""
    eights = lanes.reshape(*lanes.shape[:-1], lanes.shape[-1] // 8, 2, 4)
    return np.swapaxes(eights, -1, -2).reshape(lanes.shape)


def sums_of(payloads: NDArray[np.uint8], shifts: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The bytes that a slot holds for u8[N, B] contributions, each shifted left by its entry of ``shifts``.

    u8[2 B]; of codes of 4 bits u8[4 B].
    """
    codes = unpack(payloads, bits) if bits == 4 else payloads.astype(np.int64)
    lanes = to_lanes(codes).astype(np.int64) << shifts.astype(np.int64)[:, None]
    in_lanes: NDArray[np.uint8] = lanes.sum(0).astype("<u2").view(np.uint8)
    return in_lanes


def totals(sums: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """Sums of codes from what a slot holds, in the order of entries: i64[V]."""
    lanes = from_lanes(sums.view("<u2").astype(np.int64))
    return 256 * lanes[: lanes.size // 2] + lanes[lanes.size // 2 :] if bits == 16 else lanes


class Rank(NamedTuple):
    """A rank of a job."""

    rank: int
    ranks: int


class Coded(NamedTuple):
    """``payload`` u8[T, B], ``need`` i16[G], ``shift`` u8[G], ``clipped`` entries.

    ``values`` f32[T, V] are what codes say.
    """

    payload: NDArray[np.uint8]
    need: NDArray[np.int16]
    shift: NDArray[np.uint8]
    clipped: int
    values: NDArray[np.float64]


def encode(
    x: NDArray[np.float32], shape: Shape, seed: int, rank: int, cap: int, exponents: NDArray[np.int16],
    rotate: bool = True, ranks: int = 1,
) -> Coded:  # fmt: skip
    """What ``codec.encode.encode`` makes of finite ``x``, in row order."""
    bits, y = shape.bits, rotated(x, shape, seed, rotate)
    need = needs(x, y, shape, rotate)
    step = step_of(rank, ranks)
    u = with_zero(offsets(np.arange(shape.rows), shape.entries, seed, STAGE_CONTRIBUTION, step), bits)
    codes = np.zeros(y.shape, np.int64)
    values = np.zeros(y.shape)
    shift = np.zeros(shape.groups, np.uint8)
    span, clipped = zero_of(bits) - 1, 0
    for g, (rows, e) in enumerate(zip(by_group(shape), exponents.tolist(), strict=True)):
        root = root_of(rows, rotate)
        shift[g] = min(max(-(-(int(need[g]) - e) // 4), 0), cap if bits > 4 else 0)
        scale = scale_of(e + 4 * int(shift[g])) * root
        if need[g] > e + 4 * int(shift[g]):
            clipped += int(np.count_nonzero(np.abs(y[rows]) > _F(scale)))
        codes[rows] = code(y[rows] * _F(span / scale) + u[rows], bits)
        values[rows] = (codes[rows] - zero_of(bits)) * (scale / root / span)
    return Coded(pack(codes, bits), need, shift, clipped, values)


class Mean(NamedTuple):
    """One result row: ``payload`` u8[B], ``scale`` its largest value, negative where offsets are subtracted."""

    payload: NDArray[np.uint8]
    scale: np.float32


class Row(NamedTuple):
    """What a row of sums is: row ``k`` of the op, with the exponent ``e`` and ``units``, of the ranks ``members``."""

    k: int
    e: int
    units: int
    members: Sequence[int]


def exact(d: NDArray[np.int64], row: Row, seed: int, ranks: int, rotate: bool = True) -> NDArray[np.int64]:
    """Distances of sums from zero, i64[V], less the offsets of their members, in units of 2^-16.

    Even columns say by their zeros whether odd ones have their offsets taken off, and odd ones for even ones: what
    decides on an offset must not depend on it.
    """
    taken, off = np.zeros(d.size, np.int64), np.zeros(d.size, np.int64)
    if rotate and row.units == len(row.members):
        for even in (0, 1):
            taken[1 - even :: 2] = 2 * np.count_nonzero(d[even::2] == 0) <= d.size // 2
    for rank in row.members:
        off += offsets(np.array([row.k]), d.size, seed, STAGE_CONTRIBUTION, step_of(rank, ranks))[0] - 32768
    return 65536 * d - taken * off


def rounded(
    d: NDArray[np.int64], row: Row, seed: int, ranks: int, rotate: bool = True, zero: int = 128
) -> tuple[NDArray[np.int64], np.float32]:
    """Codes i64[V] and scale of a result row from distances of sums from zero, i64[V].

    ``zero`` is the zero of contributions; results have 8 bits.
    """
    value, plain = exact(d, row, seed, ranks, rotate), not rotate or 2 * np.count_nonzero(d == 0) > d.size
    most = int(np.abs(value).max())
    if most == 0:
        return np.full(d.size, 128), _F(0)
    scale = _F(most * (scale_of(row.e) / (zero - 1)) / len(row.members) / 65536)
    u = with_zero(offsets(np.array([row.k]), d.size, seed, STAGE_RESULT)[0])
    return code(value.astype(np.float32) * _F(127 / most) + u), scale if plain else -scale


def mean(sums: NDArray[np.uint8], row: Row, seed: int, ranks: int, bits: int = 8, rotate: bool = True) -> Mean:
    """A result row from the bytes of sums (``sums_of``); with codes of 16 bits no offsets are taken off."""
    zero = zero_of(bits)
    d = totals(sums, bits) - zero * row.units
    if bits < 16:
        codes, scale = rounded(d, row, seed, ranks, rotate, zero)
        return Mean(pack(codes, 8), scale)
    most = int(np.abs(d).max())
    if most == 0:
        return Mean(pack(np.full(d.size, zero), bits), _F(0))
    u = with_zero(offsets(np.array([row.k]), d.size, seed, STAGE_RESULT)[0], bits)
    codes = code(d.astype(np.float32) * _F((zero - 1) / most) + u, bits)
    return Mean(pack(codes, bits), _F(most * (scale_of(row.e) / (zero - 1)) / len(row.members)))


def decode(
    payload: NDArray[np.uint8], scale: NDArray[np.float32], present: NDArray[np.bool_], shape: Shape, seed: int,
    rotate: bool = True, rank: Rank | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """Rows of results, or of contributions of ``rank`` (u8[T, B], f32[T], bool[T], row order) as f32[numel]."""
    bits = shape.bits
    codes, zero = unpack(payload, bits), zero_of(bits)
    if bits < 16:
        values = valued(codes, scale, present, seed, zero, rank)
        return restored(values, present, shape, seed, rotate)
    factors = np.where(present, (scale.astype(np.float64) / (zero - 1)).astype(np.float32), _F(0))
    values = (codes - zero).astype(np.float32) * factors[:, None]
    return restored(values, present, shape, seed, rotate)


def valued(
    codes: NDArray[Any], scale: NDArray[np.float32], present: NDArray[np.bool_], seed: int, zero: int = 128,
    rank: Rank | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """What the codes of all rows mean, [T, V] as float32; less their offsets where the scale is negative.

    They are results, or contributions of ``rank``.
    """
    stage, step = (STAGE_CONTRIBUTION, step_of(*rank)) if rank else (STAGE_RESULT, 0)
    u = offsets(np.arange(len(codes)), codes.shape[1], seed, stage, step) - 32768
    distance = 65536 * (codes.astype(np.int64) - zero) - np.where(scale < 0, 1, 0)[:, None] * u
    factors = np.where(present, (np.abs(scale).astype(np.float64) / (zero - 1)).astype(np.float32), _F(0))
    return distance.astype(np.float32) * (factors * _F(2.0**-16))[:, None]


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
    return restored(distance.astype(np.float32) * factors[:, None], present, shape, seed, rotate)


def restored(
    values: NDArray[np.float32],
    present: NDArray[np.bool_],
    shape: Shape,
    seed: int,
    rotate: bool,
) -> NDArray[np.float32]:
    """Rotated values f32[T, V] as f32[numel]; those of rows that are not present (bool[T]) are set to zero."""
    values[~present] = 0
    by_sign, out = signs(shape, seed), np.zeros(shape.numel, np.float32)
    for rows, (first, end) in zip(by_group(shape), itertools.pairwise(shape.layout.entries.tolist()), strict=True):
        y, received = values[rows], int(present[rows].sum())
        if turned(rows, rotate):
            factor = _F(np.sqrt(rows.stop - rows.start) / received) if received else _F(0)
            y = transform(y) * factor * by_sign[rows] if received else np.zeros_like(y)
        out[first:end] = y.reshape(-1)[: end - first]
    return out
