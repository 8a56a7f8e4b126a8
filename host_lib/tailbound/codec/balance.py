"""Tensors that share a group (codec-18): powers of two by ranges of entries, taken off before rotation, put on after.

Rotation spreads rounding errors evenly over a group, so a small tensor beside a large one gets the large one's error.
Entries are therefore divided by a power of two for their range before signs and rotation, and multiplied by it after.
Powers of two change no mantissa: without rotation, rounding and clipping the same bits would come out.

Exponents are 0 or above, the smallest entries are left as they are. So what is decoded never becomes subnormal by its
exponent, and its bits do not depend on how a processor treats that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import halves
from tailbound.codec.halves import Floats, entries
from tailbound.codec.planes import energy
from tailbound.codec.scale import OVERFLOW_BITS
from tailbound.codec.shape import Shape
from tailbound.wire.jit import compiled

#: Largest exponent.
EXPONENT_MOST = 24
#: Of ranges of more than so many entries, runs of so many are looked at (``powers``), which begin so many apart: a
#: prime, so that they are of all columns of a matrix, however wide it is.
_WHOLE, _CHUNK, _APART = 4096, 64, 521


class Ranges(NamedTuple):
    """Exponents of an op's entries, as compiled passes take them; empty: all are 0.

    Attributes:
        ends: i64[n], rising: where each range ends; the last one takes all that is left.
        down, up: f32[n], the powers of two before rotation (1 at most) and after it (1 at least).
    """

    ends: NDArray[np.int64]
    down: NDArray[np.float32]
    up: NDArray[np.float32]


def ranges_of(ends: Sequence[int] | NDArray[np.int64], exponents: Sequence[int] | NDArray[np.uint8]) -> Ranges:
    """Ranges of an op that end at ``ends`` and whose entries are divided by 2 to the power of ``exponents``.

    Raises:
        ValueError: they do not rise, or an exponent is not in 0..EXPONENT_MOST.
    """
    stops, powers = np.array(ends, np.int64), np.array(exponents, np.int32)
    if stops.shape != powers.shape or (np.diff(stops, prepend=0) <= 0).any():
        raise ValueError(f"{len(stops)} ends of ranges, {len(powers)} exponents: give as many of both, ends that rise")
    if powers.size and not 0 <= powers.min() <= powers.max() <= EXPONENT_MOST:
        raise ValueError(f"exponents {powers.min()} to {powers.max()}: give 0 to {EXPONENT_MOST}")
    one = np.float32(1.0)
    return Ranges(stops, np.ldexp(one, -powers), np.ldexp(one, powers))


#: All exponents are 0.
EVEN = ranges_of([], [])


def overflow_of(ranges: Ranges) -> np.uint32:
    """Bits of a rotated value from which on it counts as not finite: multiplied by its power it must not overflow."""
    return np.uint32(OVERFLOW_BITS - (EXPONENT_MOST << 23 if len(ranges.ends) else 0))


@compiled
def range_at(ends, entry):  # type: ignore[no-untyped-def]
    """The range in which ``entry`` lies."""
    low, high = 0, ends.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle] <= entry:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _moved(ends, here, entry):  # type: ignore[no-untyped-def]
    """The range in which ``entry`` lies, from the one ``here`` of an entry before it."""
    last = ends.shape[0] - 1
    while here < last and ends[here] <= entry:
        here += 1
    return here


@compiled
def scale(values, at, first, size, ends, factors):  # type: ignore[no-untyped-def]
    """Multiplies ``values[at : at + size]``, the entries of an op from ``first`` on, by the factors of their ranges."""
    if ends.shape[0] == 0:
        return
    last, here = ends.shape[0] - 1, range_at(ends, first)
    begin = first
    while begin < first + size:
        end = first + size if here == last else min(ends[here], first + size)
        factor = factors[here]
        if factor != np.float32(1.0):
            part = values[at + begin - first : at + end - first]
            for i in range(part.shape[0]):
                part[i] *= factor
        begin, here = end, here + 1


@compiled
def _scaled(source, at, first, codes, ranges, here, out, into):  # type: ignore[no-untyped-def]
    """A row of ``source`` times the factors of its ranges to ``out``; its first entry lies in the range ``here``."""
    last, begin = ranges.ends.shape[0] - 1, first
    while begin < first + codes:
        end = first + codes if here == last else min(ranges.ends[here], first + codes)
        part, target = source[at + begin - first : at + end - first], out[into + begin - first : into + end - first]
        factor = ranges.down[here]
        for i in range(target.shape[0]):
            target[i] = part[i] * factor
        begin, here = end, here + 1


@compiled
def point(source, at, first, rows, codes, ranges, due, memory):  # type: ignore[no-untyped-def]
    """Where the rows of a group are, and what each is multiplied by: to ``memory.addresses`` and ``memory.powers``.

    A row in which ranges meet is multiplied here, in ``memory.group`` (a copy, if ``source`` is other memory; copies
    are close together, so that they stay in cache). Not ``due``: exponents have been taken off.
    """
    begins, copy = np.int64(source.ctypes.data) + 4 * at, np.int64(memory.group.ctypes.data)
    ends, last = ranges.ends, ranges.ends.shape[0] - 1
    for r in range(rows):
        memory.addresses[r] = begins + 4 * r * codes
        memory.powers[r] = np.float32(1.0)
    if not due or last < 0:
        return
    here, copies = range_at(ends, first), 0
    for r in range(rows):
        begin = first + r * codes
        here = _moved(ends, here, begin)
        if here == last or ends[here] >= begin + codes:
            memory.powers[r] = ranges.down[here]
            continue
        if begins == copy:
            scale(memory.group, r * codes, begin, codes, ends, ranges.down)
            continue
        _scaled(source, at + r * codes, begin, codes, ranges, here, memory.group, copies * codes)
        memory.addresses[r] = copy + 4 * copies * codes
        copies += 1


@compiled
def powers_up(factor, first, codes, ranges, powers):  # type: ignore[no-untyped-def]
    """What each of 8 rows from entry ``first`` on is multiplied by in the end; whether none is left to ``scale_met``.

    That is ``factor`` times the power of the row's range, or ``factor`` alone where ranges meet in the row.
    """
    ends, last = ranges.ends, ranges.ends.shape[0] - 1
    if last < 0:
        powers[:8] = factor
        return True
    whole, here = True, range_at(ends, first)
    for i in range(8):
        here = _moved(ends, here, first + i * codes)
        if here == last or ends[here] >= first + (i + 1) * codes:
            powers[i] = factor * ranges.up[here]
        else:
            powers[i], whole = factor, False
    return whole


@compiled
def scale_met(values, at, first, codes, ranges):  # type: ignore[no-untyped-def]
    """Of 8 rows from ``at`` on, those in which ranges meet: entries times their powers."""
    ends, last, here = ranges.ends, ranges.ends.shape[0] - 1, range_at(ranges.ends, first)
    for i in range(8):
        begin = first + i * codes
        here = _moved(ends, here, begin)
        if here < last and ends[here] < begin + codes:
            scale(values, at + i * codes, begin, codes, ends, ranges.up)


@compiled
def _powers(x, ends, chunk, row, powers):  # type: ignore[no-untyped-def]
    last = np.int64(0)
    for i in range(ends.shape[0]):
        begin, last = last, ends[i]
        step = _CHUNK if last - begin <= _WHOLE else _APART
        total, seen = np.float64(0.0), 0
        while begin < last:
            size = min(last - begin, np.int64(_CHUNK))
            if size == _CHUNK and x.whole.shape[0] > 0:
                total += energy(x.whole, begin, size)
            else:
                halves.read(x, begin, size, chunk, row)
                for j in range(size):
                    total += np.float64(chunk[j]) * np.float64(chunk[j])
            seen += size
            begin += step
        powers[i] = total / seen


def powers(values: Floats, shape: Shape, ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean squares of the ranges of ``values`` that end at ``ends``, f64[n]; of long ones only 64 of every 521 entries.

    Args:
        values: [numel], of a type of ``codec.halves``, C-contiguous.
        shape: of the op.
        ends: i64[n], rising, at most numel.

    Raises:
        ValueError: ``values`` do not fit the shape, or an end lies outside of them.
    """
    if len(ends) == 0 or ends[-1] > shape.numel:
        raise ValueError(f"ranges of {values.size} entries that end at {ends[-1:]}: give ends within them")
    found = np.zeros(len(ends))
    _powers(entries("average", values, shape), ends, np.zeros(_CHUNK, np.float32), np.zeros(_CHUNK, np.uint16), found)
    return found
