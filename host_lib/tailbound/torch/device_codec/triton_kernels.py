"""The device form of the codec as Triton kernels: two for encoding, one for decoding (codec-3 to -7, -11, -12).

Bits are those of the plain torch form and of the host. For that, all of these have to hold, and tests look at each:

- Butterflies are additions and subtractions in the host's order (8, 16, 32, 1, 2, 4), no matrix product.
- A product and a sum after it are two operations. The compiler makes a fused one of them unless it is launched with
  ``enable_fp_fusion=False``, which both LLVM and ptxas are then told.
- Everything else is integers, or conversions that round to nearest.

A program has BLOCK columns of one group, all R rows of them, and reads and writes memory once: butterflies stay in
registers. Whether a kernel is compiled or interpreted is decided when this module, and triton, are imported.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tailbound.codec import format as of_codes

_BYTES, _PLANES = tl.constexpr(of_codes.BYTES), tl.constexpr(of_codes.PLANES)


@triton.jit
def _fmix(h):  # type: ignore[no-untyped-def]
    """The finaliser of MurmurHash3 of u32."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _flip(values, at, codes, seed, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """f32[ROWS, BLOCK] times the signs of the entries ``at`` (i64) of the op: of 32 rows in a hash, by columns."""
    row = tl.arange(0, ROWS)[:, None]
    hashes = _fmix((at - (row - row // 32) * codes).to(tl.uint32) + seed.to(tl.uint32))
    signs = (hashes << (row % 32).to(tl.uint32)) & 0x80000000
    return (values.to(tl.uint32, bitcast=True) ^ signs).to(tl.float32, bitcast=True)


@triton.jit
def _parts(column, first):  # type: ignore[no-untyped-def]
    """The parts of columns in rounding offsets: i32, 16 bits; ``first``: the mixed seed of the op's columns."""
    return (_fmix(column.to(tl.uint32) + first.to(tl.uint32)) >> 16).to(tl.int32)


@triton.jit
def _to_bfloat16(values):  # type: ignore[no-untyped-def]
    """f32 that are not NaN, rounded to nearest even: the interpreter's own conversion would cut off."""
    bits = values.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _turn(values, STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One stage of butterflies, between rows STEP apart: f32[ROWS, BLOCK]."""
    pairs = tl.permute(tl.reshape(values, (ROWS // (2 * STEP), 2, STEP, BLOCK)), (0, 2, 3, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), (ROWS, BLOCK))


@triton.jit
def _transform(values, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """H_R down the columns of f32[ROWS, BLOCK], not normalised."""
    if ROWS > 8:
        values = _turn(values, 8, ROWS, BLOCK)
    if ROWS > 16:
        values = _turn(values, 16, ROWS, BLOCK)
    if ROWS > 32:
        values = _turn(values, 32, ROWS, BLOCK)
    values = _turn(values, 1, ROWS, BLOCK)
    if ROWS > 2:
        values = _turn(values, 2, ROWS, BLOCK)
    if ROWS > 4:
        values = _turn(values, 4, ROWS, BLOCK)
    return values


@triton.jit
def _places(groups, first_rows, codes, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where this program works: its group, rows i64[ROWS] of the op, columns i32[BLOCK], places i64[ROWS, BLOCK].

    ``codes``: entries of a row. Places count from the first row of the op on.
    """
    group = tl.load(groups + tl.program_id(0))
    row = tl.load(first_rows + group) + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return group, row, column, row[:, None] * codes + column[None, :]


@triton.jit
def _entries(group, row, at, first_rows, first_entries, codes):  # type: ignore[no-untyped-def]
    """The entries at the places ``at`` of a group, i64, and whether there are any."""
    entry = at + tl.load(first_entries + group) - tl.load(first_rows + group) * codes
    return entry, entry < tl.load(first_entries + group + 1)


@triton.jit
def _values(x, group, row, at, there, first_rows, first_entries, codes):  # type: ignore[no-untyped-def]
    """Entries of ``x`` at the places ``at`` as f32; zeros behind the end of the group and where not ``there``."""
    entry, given = _entries(group, row, at, first_rows, first_entries, codes)
    return tl.load(x + entry, mask=there & given, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["seed"])
def largest(  # type: ignore[no-untyped-def]
    x, out, squares, groups, first_rows, first_entries, codes, seed,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Bits of the largest absolute value of each group: i32[G], zeros before.

    If ``SQUARES``, also the sum of squares of this program's values before rotation: f64[G, programs of a group].
    """
    group, row, column, at = _places(groups, first_rows, codes, ROWS, BLOCK)
    there = (column < codes)[None, :]
    values = _values(x, group, row, at, there, first_rows, first_entries, codes)
    if SQUARES:
        wide = values.to(tl.float64)
        total = tl.sum(tl.sum(wide * wide, 0), 0)
        tl.store(squares + group * tl.num_programs(1) + tl.program_id(1), total)
    if ROTATE:
        values = _transform(_flip(values, at, codes, seed, ROWS), ROWS, BLOCK)
    bits = tl.where(there, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_max(out + group, tl.max(tl.max(bits, 0), 0))


@triton.jit(do_not_specialize=["seed", "first"])
def encode(  # type: ignore[no-untyped-def]
    x, factors, limits, keys, out, beyond, groups, first_rows, first_entries, codes, seed, first,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr,
    PACKING: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Codes u8[T, V] to ``out``, and how many entries are above the limits of their groups added to ``beyond`` i64[1].

    clamp(floor(value * factor + (128 + u)), 129 - ZERO, 127 + ZERO) - 128 + ZERO, in this order; where codes lie in
    planes (``codec.format``), 32768 takes the place of 128. ``first``: the mixed seed of the columns' parts.
    """
    group, row, column, at = _places(groups, first_rows, codes, ROWS, BLOCK)
    there = (column < codes)[None, :]
    values = _values(x, group, row, at, there, first_rows, first_entries, codes)
    if ROTATE:
        values = _transform(_flip(values, at, codes, seed, ROWS), ROWS, BLOCK)
    above = there & (tl.abs(values) > tl.load(limits + group))
    tl.atomic_add(beyond, tl.sum(tl.sum(above.to(tl.int32), 0), 0).to(tl.int64))
    u = (tl.load(keys + row)[:, None] + _parts(column, first)[None, :]) & 0xFFFF
    MADE: tl.constexpr = 32768 if PACKING == _PLANES else 128
    if PACKING == _PLANES:
        offset = ((u >> 8) | 0x47000000).to(tl.float32, bitcast=True)  # the last place of 32768 is 2^-8
    else:
        offset = (u | 0x43000000).to(tl.float32, bitcast=True)  # the last place of 128 is 2^-16
    value = values * tl.load(factors + group) + offset
    code = tl.minimum(tl.maximum(value, MADE + 1.0 - ZERO), MADE - 1.0 + ZERO).to(tl.int32) - (MADE - ZERO)
    if PACKING == _BYTES:
        tl.store(out + at, code.to(tl.uint8), mask=there)
    elif PACKING == _PLANES:
        to = at + row.to(tl.int64)[:, None] * codes
        tl.store(out + to, (code >> 8).to(tl.uint8), mask=there)
        tl.store(out + to + codes, (code & 255).to(tl.uint8), mask=there)
    else:
        halves = tl.permute(tl.reshape(code, (ROWS, BLOCK // 16, 2, 8)), (0, 1, 3, 2))
        lower, upper = tl.split(halves)
        octet = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        to = row.to(tl.int64)[:, None] * (codes // 2) + octet[None, :]
        both = tl.reshape(lower | (upper << 4), (ROWS, BLOCK // 2))
        tl.store(out + to, both.to(tl.uint8), mask=(octet < codes // 2)[None, :])


@triton.jit(do_not_specialize=["seed", "first"])
def decode(  # type: ignore[no-untyped-def]
    rows, factors, keys, zeros, group_factors, out, groups, first_rows, first_entries, codes, seed, first,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr, SUMMED: tl.constexpr,
    PACKING: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Averages to ``out`` (any float type, [numel]) from codes u8[T, V], or a switch's sums u8[T, 2 V] if ``SUMMED``.

    The others are those of ``codec.staging.Unpacked``; of ``keys`` and ``zeros`` one is read.
    """
    group, row, column, at = _places(groups, first_rows, codes, ROWS, BLOCK)
    there = (column < codes)[None, :]
    factor = tl.load(factors + row)
    if SUMMED:
        high = tl.load(rows + 2 * at, mask=there, other=0).to(tl.int32)
        low = tl.load(rows + 2 * at + 1, mask=there, other=0).to(tl.int32)
        fixed = (high << 8) + low - tl.load(zeros + row)[:, None]
    elif PACKING == _PLANES:
        octet = at + row.to(tl.int64)[:, None] * codes
        high = tl.load(rows + octet, mask=there, other=0).to(tl.int32)
        low = tl.load(rows + octet + codes, mask=there, other=0).to(tl.int32)
        fixed = (high << 8) + low - ZERO
    else:
        if PACKING == _BYTES:
            code = tl.load(rows + at, mask=there, other=0).to(tl.int32)
        else:
            octet = (column // 16 * 8 + column % 8)[None, :]
            both = tl.load(rows + row.to(tl.int64)[:, None] * (codes // 2) + octet, mask=there, other=0).to(tl.int32)
            code = (both >> (column // 8 % 2 * 4)[None, :]) & 15
        zero = ZERO << 16
        key = tl.load(keys + row)
        below = tl.where((key >= 0)[:, None], (key[:, None] - _parts(column, first)[None, :]) & 0xFFFF, 0)
        fixed = ((code << 16) | below) - tl.where(key >= 0, 32767 + zero, zero)[:, None]
        factor = factor * 0.0000152587890625  # 2^-16
    values = fixed.to(tl.float32) * factor[:, None]
    if ROTATE:
        group_factor = tl.load(group_factors + group)
        values = _flip(_transform(values, ROWS, BLOCK) * group_factor, at, codes, seed, ROWS)
        values = tl.where(group_factor == 0.0, 0.0, values)  # and not minus zero
    if out.dtype.element_ty == tl.bfloat16:
        values = _to_bfloat16(values)
    entry, given = _entries(group, row, at, first_rows, first_entries, codes)
    tl.store(out + entry, values.to(out.dtype.element_ty), mask=there & given)
