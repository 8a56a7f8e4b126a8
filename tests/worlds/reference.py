"""The codec in plain numpy: the definition that the compiled passes are tested with, bit by bit, for codes of any bits.

The same order of float32 operations, hence the same bits; only the sum of a check and all counting are in integers.
Rows are in row order here, not in packet order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT, rounding_seed
from tailbound.codec.planes import REACH
from tailbound.codec.scale import NEED_LEAST, Weights
from tailbound.codec.shape import Shape
from tailbound.wire.schema import EXPONENT_NONE

_F = np.float32
#: Bits of the rounding offset: what float32 holds beside the zero.
_OFFSET_BITS = {16: 8, 8: 16, 4: 16}


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
    """+1 or -1 for every entry: f32[T, V]. Rows of a group share hashes, 32 each, and take their bits from the top."""
    first = shape.layout.rows[shape.layout.of]
    word, bit = np.divmod(np.arange(shape.rows) - first, 32)
    index = (first + word)[:, None] * shape.entries + np.arange(shape.entries) + seed
    return np.where(fmix(index.astype(np.uint32)) << bit[:, None].astype(np.uint32) >> np.uint32(31), _F(-1), _F(1))


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
    return [slice(first, end) for first, end in itertools.pairwise(shape.layout.rows.tolist())]


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


def reaches(x: NDArray[np.float32], y: NDArray[np.float32], shape: Shape, rotate: bool) -> NDArray[np.float32]:
    """Normalised values that the codes of groups are to reach, f32[G]: the largest one.

    At 4 bits no more than the root mean square of ``x``, over the columns that it has, says.
    """
    groups, squares = by_group(shape), np.square(in_rows(x, shape), dtype=np.float64)
    reach = np.array([np.abs(y[rows]).max().astype(np.float64) / root_of(rows, rotate) for rows in groups], np.float32)
    if shape.bits == 4:
        there = np.minimum(np.diff(shape.layout.entries), shape.entries)
        means = [squares[rows].sum() / ((rows.stop - rows.start) * n) for rows, n in zip(groups, there, strict=True)]
        reach = np.minimum(reach.astype(np.float64), REACH * np.sqrt(means)).astype(np.float32)
    return reach


def needs(reach: NDArray[np.float32]) -> NDArray[np.int16]:
    """ceil(4 log2 v) of every value, by comparison with float32 quarter powers: i16[G]."""
    out = np.full(reach.size, EXPONENT_NONE, np.int16)
    for g, normal in enumerate(reach):
        if normal > 0:
            fraction, power = np.frexp(normal)
            quarters = (1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75)
            above = sum(_F(2 * fraction) > _F(q) for q in quarters)
            out[g] = max(4 * (int(power) - 1) + above, NEED_LEAST)
    return out


def own_scales(reach: NDArray[np.float32], cap: int) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Exponents and weights of the smallest scales that hold ``reach`` f32[G], searched among all."""
    exponents, weights = np.zeros(reach.size, np.int16), np.zeros(reach.size, np.uint8)
    for g, value in enumerate(reach.tolist()):
        least = 1 << cap.bit_length() - 1  # weights have all bits of the largest one
        scales = ((4 * power, weight) for power in range(NEED_LEAST // 4 - 2, 128) for weight in range(least, cap + 1))
        smallest = 2.0 ** (NEED_LEAST // 4)
        exponents[g], weights[g] = next((e, w) for e, w in scales if value <= w * scale_of(e) >= smallest)
    return exponents, weights


def scale_of(e: int) -> float:
    """2^(e/4) in float64."""
    return float(np.ldexp((1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75)[e & 3], e >> 2))


def columns(entries: int, seed: int, stage: int) -> NDArray[np.int64]:
    """The parts of the columns in rounding offsets, in units of 2^-16: i64[V]."""
    rounding = np.array([rounding_seed(seed, stage)], np.uint32)
    index: NDArray[np.uint32] = np.arange(entries, dtype=np.uint32)
    index += fmix(rounding ^ np.uint32(0xA511E9B3))
    return (fmix(index) >> np.uint32(16)).astype(np.int64)


def offsets(rows: NDArray[np.integer[Any]], entries: int, seed: int, stage: int) -> NDArray[np.int64]:
    """Rounding offsets of the entries of ``rows`` in units of 2^-16: i64[rows, V]."""
    rounding = np.array([rounding_seed(seed, stage)], np.uint32)
    keys: NDArray[np.uint32] = rounding + rows.astype(np.uint32) * np.uint32(0x9E3779B1)
    row = fmix(keys).astype(np.int64)
    return (columns(entries, seed, stage) + row[:, None]) % 65536


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


class Sum(NamedTuple):
    """What a slot holds: ``lanes`` i64, and what ``tb_slot`` says of them (codec-9)."""

    lanes: NDArray[np.int64]
    exponent: int
    units: int
    count: int

    @property
    def octets(self) -> NDArray[np.uint8]:
        """The lanes as the slot has them."""
        found: NDArray[np.uint8] = self.lanes.astype("<u2").view(np.uint8)
        return found


def lanes_of(payload: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """The bytes of a contribution, or its halves of bytes, in lanes: of eight the even ones, then the odd ones."""
    codes = unpack(payload, 4) if bits == 4 else payload.astype(np.int64)
    return codes.reshape(-1, 4, 2).swapaxes(1, 2).reshape(-1)


def own_bits(k: int, seed: int) -> int:
    """By what the owner rounds its own row ``k`` into the sum."""
    rounding = np.array([rounding_seed(seed, STAGE_CONTRIBUTION) ^ 0x6F776E], np.uint32)
    return int(fmix(rounding + np.array([k], np.uint32) * np.uint32(0x9E3779B1))[0])


def added(
    total: Sum | None, payload: NDArray[np.uint8], exponent: int, weight: int, weights: Weights, bits: int = 8,
    rounding: int = 0,
) -> Sum:  # fmt: skip
    """A sum, or none yet, and one contribution more, which ``rounding`` (u32) rounds."""
    lanes = lanes_of(payload, bits)
    spare = weights.spare + (weights.cap // weight).bit_length() - 1
    if total is None:
        return Sum(lanes * (weight << spare), exponent - 4 * spare, 128 * (weight << spare), 1)
    sums, e, units, count = total
    lanes = np.pad(lanes, (0, len(sums) - len(lanes)))
    up = (exponent - e) // 4
    if up > spare:
        move = up - spare
        sums, e, units, up = sums >> min(move, 16), e + 4 * move, units >> min(move, 16), spare
    if up >= 0:
        weight <<= up
        return Sum(sums + lanes * weight, e, units + 128 * weight, count + 1)
    down = min(-up, 3 if bits == 4 else 7)
    if (rounding >> 8) % (1 << min(-up - down, 16)):
        return Sum(sums, e, units, count + 1)
    lanes = lanes * weight + rounding % (1 << down) >> down
    return Sum(sums + lanes, e, units + (128 * weight >> down), count + 1)


class Coded(NamedTuple):
    """``payload`` u8[T, B], ``need`` i16[G], ``exponents`` i16[G], ``weights`` u8[G], ``clipped`` entries."""

    payload: NDArray[np.uint8]
    need: NDArray[np.int16]
    exponents: NDArray[np.int16]
    weights: NDArray[np.uint8]
    clipped: int


def encode(
    x: NDArray[np.float32], shape: Shape, seed: int, cap: int, exponents: NDArray[np.int16] | None = None,
    rotate: bool = True,
) -> Coded:  # fmt: skip
    """What ``codec.encode.encode`` makes of finite ``x``, in row order; with ``exponents``, i16[G], for a switch."""
    bits, y = shape.bits, rotated(x, shape, seed, rotate)
    reach = reaches(x, y, shape, rotate)
    if exponents is None:
        given, (exponents, weights) = False, own_scales(reach, 1 if bits == 16 else cap)
    else:
        given, weights = True, np.ones(shape.groups, np.uint8)
    u = with_zero(offsets(np.arange(shape.rows), shape.entries, seed, STAGE_CONTRIBUTION), bits)
    codes = np.zeros(y.shape, np.int64)
    span, clipped = zero_of(bits) - 1, 0
    for rows, e, weight in zip(by_group(shape), exponents.tolist(), weights.tolist(), strict=True):
        scale = weight * scale_of(e) * root_of(rows, rotate)
        if given or bits == 4:
            clipped += int(np.count_nonzero(np.abs(y[rows]) > _F(scale)))
        codes[rows] = code(y[rows] * _F(span / scale) + u[rows], bits)
    return Coded(pack(codes, bits), needs(reach), exponents, weights, clipped)


class Mean(NamedTuple):
    """One result row: ``payload`` u8[B], ``scale`` its largest value, negative where offsets are subtracted."""

    payload: NDArray[np.uint8]
    scale: np.float32


def mean(total: Sum, k: int, seed: int, bits: int = 8, rotate: bool = True, there: int = 1 << 16) -> Mean:
    """The result of row ``k`` of an op; ``there`` columns have entries.

    Even columns say by their zeros whether odd ones have their offsets taken off, and odd ones for even ones: what
    decides on an offset must not depend on it. With codes of 16 bits no offsets are taken off.
    """
    zero, lanes = zero_of(bits), total.lanes.reshape(-1, 2, 4).swapaxes(1, 2).reshape(-1)
    u = with_zero(offsets(np.array([k]), lanes.size // (2 if bits == 16 else 1), seed, STAGE_RESULT)[0], max(bits, 8))
    unit = scale_of(total.exponent) / (zero - 1)
    if bits == 16:
        d = 256 * lanes[: lanes.size // 2] + lanes[lanes.size // 2 :] - 256 * total.units
        most = int(np.abs(d).max())
        if most == 0:
            return Mean(pack(np.full(d.size, zero), bits), _F(0))
        codes = code(d.astype(np.float32) * _F((zero - 1) / most) + u, bits)
        return Mean(pack(codes, bits), _F(most * unit / total.count))
    there = min(there, lanes.size)
    empty = lanes[:there] == total.units * zero >> 7
    d = 65536 * lanes - (zero * total.units << 9)
    u_all = offsets(np.array([k]), lanes.size, seed, STAGE_CONTRIBUTION)[0]
    off = (u_all * total.units >> 7) - 256 * total.units
    for even in (0, 1):
        if rotate and 4 * np.count_nonzero(empty[even::2]) <= there:
            d[1 - even :: 2] -= off[1 - even :: 2]
    plain, most = not rotate or 2 * np.count_nonzero(empty) > there, int(np.abs(d).max())
    if most == 0:
        return Mean(np.full(lanes.size, 128, np.uint8), _F(0))
    scale = _F(most * unit / total.count / 65536)
    return Mean(pack(code(d.astype(np.float32) * _F(127 / most) + u), 8), scale if plain else -scale)


def decode(
    payload: NDArray[np.uint8], scale: NDArray[np.float32], present: NDArray[np.bool_], shape: Shape, seed: int,
    rotate: bool = True, stage: int = STAGE_RESULT,
) -> NDArray[np.float32]:  # fmt: skip
    """Rows of results, or of contributions (u8[T, B], f32[T], bool[T], row order), as f32[numel]."""
    zero = zero_of(shape.bits)
    distance = unpack(payload, shape.bits) - zero
    factors = np.where(present, (np.abs(scale).astype(np.float64) / (zero - 1)).astype(np.float32), _F(0))
    if shape.bits < 16:  # less their offsets where the scale is negative
        u = offsets(np.arange(len(distance)), distance.shape[1], seed, stage) - 32768
        distance, factors = 65536 * distance - (scale < 0)[:, None] * u, factors * _F(2.0**-16)
    return restored(distance.astype(np.float32) * factors[:, None], present, shape, seed, rotate)


def decode_sums(
    sums: NDArray[np.uint16], counts: NDArray[np.uint16], scale: NDArray[np.float32], present: NDArray[np.bool_],
    shape: Shape, seed: int, rotate: bool = True,
) -> NDArray[np.float32]:  # fmt: skip
    """A switch's sums (u16[T, V] in code order, contributors u16[T], f32[T], bool[T]) as f32[numel]."""
    divisor = 127 * np.where(present, counts, 1).astype(np.float64)
    factors = np.where(present, (scale.astype(np.float64) / divisor).astype(np.float32), _F(0))
    distance = sums.astype(np.int32) - 128 * counts.astype(np.int32)[:, None]
    return restored(distance.astype(np.float32) * factors[:, None], present, shape, seed, rotate)


def restored(
    values: NDArray[np.float32], present: NDArray[np.bool_], shape: Shape, seed: int, rotate: bool
) -> NDArray[np.float32]:
    """Rotated values f32[T, V] as f32[numel]; those of rows that are not present (bool[T]) are set to zero."""
    values[~present] = 0
    received = [int(present[rows].sum()) for rows in by_group(shape)]
    factors = [_F(root_of(rows, rotate) / n) if n else _F(0) for rows, n in zip(by_group(shape), received, strict=True)]
    return turned_back(values, factors, shape, seed, rotate)


def turned_back(
    values: NDArray[np.float32], factors: Sequence[np.float32], shape: Shape, seed: int, rotate: bool
) -> NDArray[np.float32]:
    """Rotated values f32[T, V] as f32[numel]; ``factors`` f32[G] of groups, 0: of those of which nothing came."""
    by_sign, out = signs(shape, seed), np.zeros(shape.numel, np.float32)
    ends = itertools.pairwise(shape.layout.entries.tolist())
    for rows, factor, (first, end) in zip(by_group(shape), factors, ends, strict=True):
        y = values[rows]
        if turned(rows, rotate):
            y = transform(y) * factor * by_sign[rows] if factor else np.zeros_like(y)
        out[first:end] = y.reshape(-1)[: end - first]
    return out
