"""Codes that are no bytes: in planes, and in halves of bytes (``codec.format``).

Where codes of 4 bits end: of a normal variable that is cut off at c standard deviations and rounded to steps of c / 7
with its offset taken off again, (c / 7)^2 / 12 + 2 ((1 + c^2) Q(c) - c phi(c)) of its square is lost, with phi its
density and Q its tail: 0.0130 at c = 2.48, and no less at another. Scales are a quarter apart at most; the one above
2.4 leaves c between 2.4 and 3.0, and 0.0156 at worst. The nearest to 2.48 would leave 0.0140 at worst, but cuts more
off, and that is what does not average out: over ops, and where ranks agree.

What is cut off makes the mean shorter, by 2 Q(c): 0.4 to 1.6 %, the same whoever is absent, as a learning rate would.
Over the signs of many ops little else is left of it: columns with more of the energy lose more. Error feedback says it
later.
"""

from __future__ import annotations

import numpy as np

from tailbound.codec import kernels
from tailbound.codec.hashing import bits_of, float_of
from tailbound.wire.jit import compiled

#: Codes of 4 bits reach to so many standard deviations at least, unless the largest value is less (codec-12).
REACH = 2.4


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
def within(most, total, size):  # type: ignore[no-untyped-def]
    """Bits of the value that codes are to reach which clip, from those of the largest one and the sum of squares."""
    if most == 0:
        return most
    limit = REACH * np.sqrt(total / size)
    if limit < np.float64(float_of(most)):
        return bits_of(np.float32(limit))
    return most


@compiled
def reach(most, code, source, at, rows, codes, entries):  # type: ignore[no-untyped-def]
    """Bits of the value that a group's codes are to reach, from those of its largest one.

    ``source`` from ``at`` on holds the ``rows`` of ``codes`` before rotation, which changes no sum of squares.
    """
    if not code.clips or most == 0:
        return most
    return within(most, energy(source, at, rows * codes), spread_over(rows, codes, entries))


@compiled
def spread_over(rows, codes, entries):  # type: ignore[no-untyped-def]
    """Rotated values of a group that are not zero: rotation fills all rows of the columns that its entries have."""
    return rows * min(codes, entries)


@compiled
def _offset(part, key):  # type: ignore[no-untyped-def]
    """zero + u of codes of 16 bits, from the parts of a column and of a row."""
    u = np.int32((np.uint32(part) + key) & np.uint32(0xFFFF))
    return np.float32(32768.0) + np.float32(u >> 8) * np.float32(2.0**-8)


@compiled
def _code(value):  # type: ignore[no-untyped-def]
    return np.int32(min(max(value, np.float32(1.0)), np.float32(65535.0)))


@compiled
def _quantise(values, factor, key, parts, codes):  # type: ignore[no-untyped-def]
    """Codes of a run of values, u16. Loops this plain are vectors."""
    for j in range(codes.shape[0]):
        codes[j] = _code(values[j] * factor + _offset(parts[j], key))


@compiled
def write_row16(values, factor, key, parts, work, target):  # type: ignore[no-untyped-def]
    """A row of values as the bytes of its codes; ``work`` u16[V], ``key`` and ``parts`` of its rounding offsets."""
    _quantise(values, factor, key, parts, work)
    half = work.shape[0]
    upper, lower = target[:half], target[half:]
    for j in range(half):
        upper[j] = work[j] >> 8
    for j in range(half):
        lower[j] = work[j] & 255


@compiled
def read_row16(payload, entries, factor, out, at):  # type: ignore[no-untyped-def]
    """The values of one row's codes, f32, to ``out`` from ``at`` on."""
    upper, lower, values = payload[:entries], payload[entries:], out[at : at + entries]
    for j in range(entries):
        values[j] = np.float32((np.int32(upper[j]) << 8 | np.int32(lower[j])) - 32768) * factor


_LOWER, _EIGHTS, _FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0808080808080808), np.uint64(4)


@compiled
def pack(codes, target):  # type: ignore[no-untyped-def]
    """Codes of 4 bits as ``kernels`` make them, u8[V] of 121 to 135, as their bytes u8[V / 2]."""
    words, out = codes.view(np.uint64), target.view(np.uint64)
    for i in range(out.shape[0]):
        low, high = (words[2 * i] ^ _EIGHTS) & _LOWER, (words[2 * i + 1] ^ _EIGHTS) & _LOWER
        out[i] = low | high << _FOUR


@compiled
def unpack(payload, codes):  # type: ignore[no-untyped-def]
    """The bytes of codes of 4 bits, u8[V / 2], as the codes: u8[V] of 1 to 15."""
    words, out = payload.view(np.uint64), codes.view(np.uint64)
    for i in range(words.shape[0]):
        out[2 * i] = words[i] & _LOWER
        out[2 * i + 1] = words[i] >> _FOUR & _LOWER


@compiled
def settle_far(work, rows, entries, pitch):  # type: ignore[no-untyped-def]
    """Butterflies between rows 8, 16 and 32 apart, in place."""
    for i in range(8):
        if rows == 64:
            kernels.settle8(work, i * pitch, 8 * pitch, entries)
        elif rows == 32:
            kernels.settle4(work, i * pitch, 8 * pitch, entries)
        elif rows == 16:
            kernels.settle2(work, i * pitch, 8 * pitch, entries)


@compiled
def settle_near(work, rows, entries, pitch):  # type: ignore[no-untyped-def]
    """Butterflies between rows 1, 2 and 4 apart, in place."""
    if rows == 2:
        kernels.settle2(work, 0, pitch, entries)
    elif rows == 4:
        kernels.settle4(work, 0, pitch, entries)
    else:
        for r in range(0, rows, 8):
            kernels.settle8(work, r * pitch, pitch, entries)


@compiled
def _distance16(row, zero, entries):  # type: ignore[no-untyped-def]
    """Sums of bytes, u16 in lane order, as the largest distance of a sum of codes from ``zero``."""
    most = 0
    for j in range(entries):
        d = (np.int64(row[j]) << 8) + np.int64(row[entries + j]) - zero
        most = max(most, abs(d))
    return most


@compiled
def _requantise16(row, zero, entries, factor, key, parts, target):  # type: ignore[no-untyped-def]
    for base in range(0, entries, 8):
        for lane in range(8):
            j = base + lane
            d = (np.int64(row[j]) << 8) + np.int64(row[entries + j]) - zero
            code = _code(np.float32(d) * factor + _offset(parts[j], key))
            at = base + (2 * lane if lane < 4 else 2 * lane - 7)  # lane order: codes 0 2 4 6 1 3 5 7
            target[at] = code >> 8
            target[entries + at] = code & 255


@compiled
def requantise16(row, total, entries, key, parts, target):  # type: ignore[no-untyped-def]
    """A row of sums (``scale.Sum``) coded again; returns the largest distance from zero, 0 for a row of zeros."""
    zero = 256 * np.int64(total.units)
    most = _distance16(row, zero, entries)
    if most == 0:
        target[:entries] = np.uint8(128)
        target[entries:] = np.uint8(0)
    else:
        _requantise16(row, zero, entries, np.float32(32767.0 / most), key, parts, target)
    return most
