"""Codes of 16 and of 4 bits (codec-12), in rows of bytes that the datapath sums as it sums codes of 8 bits.

A row of V entries has two *planes*, one in each half of something, so that sums stay separable:

- 16 bits: V upper bytes, then V lower ones. Bytes are summed in u16 lanes of their own, as ever, and
  256 * (sum of upper) + (sum of lower) is the sum of the codes. Twice the bytes; nothing below the codec knows.
- 4 bits: V / 2 bytes, entry j in the lower half of byte j, entry V / 2 + j in its upper half. The datapath takes the
  halves apart (``Flag.NIBBLES``) and sums them in u8 lanes: per eight bytes, eight sums of lower halves, then eight of
  upper ones. 15 * 17 = 255, so that is exact for up to 17 ranks; a sum takes the same memory as at 8 bits.

code = clamp(floor(y * span / scale + zero + u), 1, 2 zero - 1), with zero 32768 or 8 and span one less. What float32
holds exactly beside the zero limits u to 8 bits for codes of 16. Rounding is 2^-15 of the scale there, and nobody takes
offsets off.
"""

from __future__ import annotations

import numpy as np

from tailbound.codec import kernels
from tailbound.codec.hashing import bits_of, float_of
from tailbound.codec.shape import BITS
from tailbound.errors import ConfigError
from tailbound.wire.jit import compiled

#: Ranks whose codes of 4 bits fit u8 lanes.
RANKS_4 = 17
#: Codes of 4 bits reach to so many standard deviations, unless the largest value is less (codec-12).
SIGMAS = 2.5


def check_bits(bits: int, ranks: int, *, switched: bool = False) -> None:
    """Refuses codes that could not be summed.

    Raises:
        ConfigError: not 16, 8 or 4 bits; 4 bits, and too many ranks; a switch, and other codes than those of 8 bits.
    """
    if bits not in BITS:
        raise ConfigError(f"bits={bits}: give one of {', '.join(map(str, BITS))}")
    if switched and bits != 8:
        raise ConfigError(f"a switch sums codes of 8 bits, not of {bits}: give bits=8")
    if bits == 4 and ranks > RANKS_4:
        raise ConfigError(f"codes of 4 bits are summed in 8: at most {RANKS_4} ranks, not {ranks}; use 8 bits")


@compiled
def zero_of(bits):  # type: ignore[no-untyped-def]
    """Code of the value 0; the largest distance from it is one less."""
    return 1 << (bits - 1)


@compiled
def energy(x, at, size):  # type: ignore[no-untyped-def]
    """Sum of squares in float64, in eight sums of which none waits for another; ``size`` is a multiple of 8."""
    part = x[at : at + size]  # from here on no index can be negative, which would cost a check of each
    a = b = c = d = e = f = g = h = 0.0
    for i in range(size // 8):
        k = 8 * i
        a += np.float64(part[k]) * np.float64(part[k])
        b += np.float64(part[k + 1]) * np.float64(part[k + 1])
        c += np.float64(part[k + 2]) * np.float64(part[k + 2])
        d += np.float64(part[k + 3]) * np.float64(part[k + 3])
        e += np.float64(part[k + 4]) * np.float64(part[k + 4])
        f += np.float64(part[k + 5]) * np.float64(part[k + 5])
        g += np.float64(part[k + 6]) * np.float64(part[k + 6])
        h += np.float64(part[k + 7]) * np.float64(part[k + 7])
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@compiled
def reach(most, bits, source, at, size):  # type: ignore[no-untyped-def]
    """Bits of the value that a group's codes are to reach, from those of its largest one.

    ``source`` from ``at`` on holds the ``size`` entries before rotation, which changes no sum of squares.
    """
    if bits != 4 or most == 0:
        return most
    limit = SIGMAS * np.sqrt(energy(source, at, size) / size)
    if limit < np.float64(float_of(most)):
        return bits_of(np.float32(limit))
    return most


@compiled
def _offset(part, key, bits):  # type: ignore[no-untyped-def]
    """zero + u from the parts of a column and of a row."""
    u = np.int32((np.uint32(part) + key) & np.uint32(0xFFFF))
    if bits == 16:
        return np.float32(32768.0) + np.float32(u >> 8) * np.float32(2.0**-8)
    return np.float32(8.0) + np.float32(u) * np.float32(2.0**-16)


@compiled
def _code(value, top):  # type: ignore[no-untyped-def]
    return np.int32(min(max(value, np.float32(1.0)), top))


@compiled
def _quantise(values, factor, key, parts, bits, top, codes):  # type: ignore[no-untyped-def]
    """Codes of a run of values, u16. Loops this plain are vectors."""
    if bits == 16:
        for j in range(codes.shape[0]):
            codes[j] = _code(values[j] * factor + _offset(parts[j], key, 16), top)
    else:
        for j in range(codes.shape[0]):
            codes[j] = _code(values[j] * factor + _offset(parts[j], key, 4), top)


@compiled
def _pack(codes, bits, target):  # type: ignore[no-untyped-def]
    """Codes of a row, u16, as its bytes."""
    if bits == 16:
        half = codes.shape[0]
        upper, lower = target[:half], target[half:]
        for j in range(half):
            upper[j] = codes[j] >> 8
        for j in range(half):
            lower[j] = codes[j] & 255
        return
    half = target.shape[0]
    low, high = codes[:half], codes[half:]
    for j in range(half):
        target[j] = low[j] | high[j] << 4


@compiled
def write_row(values, factor, key, parts, bits, work, target):  # type: ignore[no-untyped-def]
    """A row of values as the bytes of its codes; ``work`` u16[V], ``key`` and ``parts`` of its rounding offsets."""
    top = np.float32(2 * zero_of(bits) - 1)
    _quantise(values, factor, key, parts, bits, top, work)
    _pack(work, bits, target)


@compiled
def read_row(payload, entries, bits, reading, parts, out, at):  # type: ignore[no-untyped-def]
    """The values of one row's codes, f32, to ``out`` from ``at`` on; ``reading`` u32[4] and ``parts`` as in ``expand``.

    Of codes of 16 bits ``reading`` says the factor alone.
    """
    factor, zero, key, mask = float_of(reading[0]), np.int32(reading[1]), reading[2], reading[3]
    if bits == 16:
        upper, lower, values = payload[:entries], payload[entries:], out[at : at + entries]
        for j in range(entries):
            values[j] = np.float32((np.int32(upper[j]) << 8 | np.int32(lower[j])) - 32768) * factor
        return
    half = entries // 2
    low, high = out[at : at + half], out[at + half : at + entries]
    left, right = parts[:half], parts[half:entries]
    for j in range(half):
        below = np.int32(np.uint32(key - np.uint32(left[j])) & mask)
        low[j] = np.float32(((np.int32(payload[j]) & 15) << 16 | below) - zero) * factor
    for j in range(half):
        below = np.int32(np.uint32(key - np.uint32(right[j])) & mask)
        high[j] = np.float32(((np.int32(payload[j]) >> 4) << 16 | below) - zero) * factor


@compiled
def settle_far(work, rows, entries, pitch):  # type: ignore[no-untyped-def]
    """Butterflies between rows 8, 16 and 32 apart, in place."""
    for i in range(8):
        if rows == 64:
            kernels.settle(work, i * pitch, 8 * pitch, entries)
        elif rows == 32:
            kernels.settle4(work, i * pitch, 8 * pitch, entries)
        else:
            kernels.settle2(work, i * pitch, 8 * pitch, entries)


@compiled
def settle_near(work, rows, entries, pitch):  # type: ignore[no-untyped-def]
    """Butterflies between rows 1, 2 and 4 apart, in place."""
    for r in range(0, rows, 8):
        kernels.settle(work, r * pitch, pitch, entries)


@compiled
def _distance16(row, units, entries):  # type: ignore[no-untyped-def]
    """Sums of bytes, u16 in lane order, as the largest distance of a sum of codes from ``units`` zeros."""
    most = 0
    for j in range(entries):
        d = (np.int64(row[j]) << 8) + np.int64(row[entries + j]) - 32768 * units
        most = max(most, abs(d))
    return most


@compiled
def _requantise16(row, units, entries, factor, key, parts, target):  # type: ignore[no-untyped-def]
    top = np.float32(65535.0)
    for base in range(0, entries, 8):
        for lane in range(8):
            j = base + lane
            d = (np.int64(row[j]) << 8) + np.int64(row[entries + j]) - 32768 * units
            value = np.float32(d) * factor + _offset(parts[j], key, 16)
            code = _code(value, top)
            at = base + (2 * lane if lane < 4 else 2 * lane - 7)  # lane order: codes 0 2 4 6 1 3 5 7
            target[at] = code >> 8
            target[entries + at] = code & 255


@compiled
def gather4(ring, own, peers, with_own, codes, row):  # type: ignore[no-untyped-def]
    """Sums of half bytes in the order of entries, own ones added, u16[2 codes]."""
    for j in range(codes):
        low = high = np.int64(0)
        if peers:
            at = 16 * (j >> 3) + (j & 7)
            low, high = np.int64(ring[at]), np.int64(ring[at + 8])
        if with_own:
            low += np.int64(own[j] & 15)
            high += np.int64(own[j] >> 4)
        row[j] = low
        row[codes + j] = high


@compiled
def requantise4(exact, entries, factor, key, parts, target):  # type: ignore[no-untyped-def]
    """Sums less their offsets, i32 in the order of entries, as codes of 4 bits."""
    top, half = np.float32(15.0), entries // 2
    left, right, below, above = exact[:half], exact[half:entries], parts[:half], parts[half:entries]
    for j in range(half):
        low = _code(np.float32(left[j]) * factor + _offset(below[j], key, 4), top)
        high = _code(np.float32(right[j]) * factor + _offset(above[j], key, 4), top)
        target[j] = low | high << 4


@compiled
def requantise16(row, units, entries, key, parts, target):  # type: ignore[no-untyped-def]
    """A row of sums of ``units`` codes coded again; returns the largest distance from zero, 0 for a row of zeros."""
    most = _distance16(row, units, entries)
    if most == 0:
        target[:entries] = np.uint8(128)
        target[entries:] = np.uint8(0)
    else:
        _requantise16(row, units, entries, np.float32(32767.0 / most), key, parts, target)
    return most
