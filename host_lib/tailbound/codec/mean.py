"""The owner's pass: sums of codes into means, coded again with a scale of each row's own.

All arithmetic before the last rounding is in integers: with d = sum - zero less the rounding offsets, in units of
2^(e/4) / 127, the mean is d / count and the row's scale t = max|d| / count, so the code of an entry is
floor(d * 127 / max|d| + 128 + u), which knows neither e nor count.

Rounding by floor(y + u) leaves the variance f (1 - f) for a y with the fraction f, 1/6 on average; with u - 1/2 taken
off again it is 1/12 for every y (subtractive dither: Roberts 1962, Schuchman 1964). All ranks have the same u, so that
of a sum is taken off at once, times the sum of the weights. Both are unbiased, taken off or not, so a row may be left
as it is:

- ops that are not rotated, so that what is exactly zero on all ranks stays so;
- rows in which more than half of the sums are zero, such as those of a group with few columns that are not: there the
  rounding of the others is the smaller error. Even columns decide on odd ones and odd ones on even ones, because what
  decides on an offset must not depend on it (offsets of different columns are independent).

The result's offset is left to whoever decodes; a negative scale says so.

Lane order of the sums ring: per 8 codes two u64, codes 0 2 4 6 and then codes 1 3 5 7 as u16 lanes. Work stays in that
order, and codes are put back in order at the end. Results of contributions of 4 bits have 8.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import kernels, planes
from tailbound.codec.format import FORMATS, HALVES, PLANES, CodeFormat
from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT, rounding_seed, row_key, write_lanes
from tailbound.codec.laid import array_words, words_at
from tailbound.codec.loader import loader
from tailbound.codec.records import NO_OWN, NO_RESULTS, NO_RING, Coding, Own, Results, Ring, Sums
from tailbound.codec.scale import DOWN_HALVES, DOWN_MOST, NOT_JOINED, SPAN, ZERO, Sum, Weights, begin, join, scale_of
from tailbound.codec.scratch import Scratch, load_memory
from tailbound.codec.shape import GROUP_ROWS, NO_GROUPS, Groups, Shape
from tailbound.codec.simd import LANES
from tailbound.codec.threads import Threads
from tailbound.wire.jit import compiled, entry
from tailbound.wire.proof import absorb
from tailbound.wire.schema import HEADER_BYTES
from tailbound.wire.tag import NO_KEY

#: Keeps the bits by which own rows are rounded into sums apart from their offsets.
_OWN = np.uint32(0x6F776E)


class _Form(NamedTuple):
    """Of an op, for the compiled pass."""

    seed: np.uint32
    key: NDArray[np.uint64]  #: of the check or tag
    layout: Groups
    codes: int  #: bytes of a row of contributions
    entries: int  #: of a row
    code: CodeFormat  #: of contributions
    weights: Weights  #: what sums have room for
    down_most: int  #: of ``scale.join``
    subtract: bool


class _Call(NamedTuple):
    """What the pass is called with."""

    sums: Sums
    own: Own
    out: Results
    form: _Form
    counts: NDArray[np.int64]  #: written, as in ``Means``


_call_at = loader(
    _Call(
        Sums(NO_RING, 0, 0, 0), NO_OWN, NO_RESULTS,
        _Form(np.uint32(0), NO_KEY, NO_GROUPS, 0, 0, FORMATS[8], Weights(1, 0), 0, False),
        np.zeros(1, np.int64)
    )
)  # fmt: skip
_OP, _SHAPE = struct.Struct("=9q"), struct.Struct("=10q")  # words of one op, and behind them those of all


class Means(NamedTuple):
    """What the rows of an owner were made of.

    ``rows`` made, ``kernel`` of them with contributions of peers, ``own_only`` without any, ``missing`` with no
    contributor at all, ``contributions`` of all ranks together.
    """

    rows: int
    kernel: int
    own_only: int
    missing: int
    contributions: int


@compiled
def _even(lane):  # type: ignore[no-untyped-def]
    return lane & 4 == 0


@compiled
def empty_columns(layout, g, entries):  # type: ignore[no-untyped-def]
    """Columns of group ``g``, of a row's ``entries``, that no entry of the bucket is in: they hold zeros."""
    return max(0, entries - (layout.entries[g + 1] - layout.entries[g]))


@compiled
def _zeros(counts, most, entries):  # type: ignore[no-untyped-def]
    """Sums of a row that are zero, in even columns and in odd ones, of those of each lane, which are ``most`` at most.

    0 if they are few in any case.
    """
    even = odd = 0
    if LANES * np.int64(most) <= entries // 2:
        return even, odd
    for lane in range(LANES):
        if _even(lane):
            even += counts[lane]
        else:
            odd += counts[lane]
    return even, odd


@compiled
def _rounded(row, total, empty, keys, zeros, form, memory, target):  # type: ignore[no-untyped-def]
    """Codes a row of sums of 8 or 4 bits; returns its largest one in units of 2^-16, and whether offsets are left.

    ``keys``: the row's parts in the offsets of contributions and of results. ``zeros``: the most in one of
    ``memory.lanes``, ``empty`` columns among them.
    """
    entries, units = np.int64(form.entries), np.int64(total.units)
    there = entries - empty
    even, odd = _zeros(memory.lanes, zeros, entries)
    even, odd = max(0, even - empty // 2), max(0, odd - (empty + 1) // 2)
    of_even, of_odd = form.subtract and 4 * odd <= there, form.subtract and 4 * even <= there
    for lane in range(LANES):
        memory.lanes[lane] = 0xFFFFFFFF if (of_even if _even(lane) else of_odd) else 0
    about = np.int64(keys[0]), units, units * form.code.zero << 9, units << 8
    most = np.int64(kernels.take_off(row, about, memory.columns, memory.lanes, entries, memory.exact))
    factor = np.float32(SPAN / np.float64(most)) if most > 0 else np.float32(0.0)
    if most == 0:
        target[:] = np.uint8(ZERO)
    else:
        at = np.int64(target.ctypes.data)
        kernels.requantise(memory.exact, factor, np.float32(SPAN), keys[1], memory.columns_out, entries, at)
    return most, form.subtract and 2 * (even + odd) <= there


@compiled
def _mean_rows(sums, own, lo, hi, form, out, memory):  # type: ignore[no-untyped-def]
    codes, slots, scales, row = form.codes, sums.ring.slots, own.scales, memory.row
    span, packing = form.code.span, form.code.packing
    mask = sums.ring.rows.shape[0] - 1
    rows = kernel = own_only = missing = 0
    contributions = np.int64(0)
    entries = form.entries
    contributed, rounding = rounding_seed(form.seed, STAGE_CONTRIBUTION), rounding_seed(form.seed, STAGE_RESULT)
    write_lanes(contributed, memory.columns[:entries])
    write_lanes(rounding, memory.columns_out[:entries])
    sums_at = np.int64(sums.ring.rows.ctypes.data)
    own_at = np.int64(own.packets.ctypes.data) + HEADER_BYTES
    for i in range(lo, hi):
        k = own.rows[i]
        g = form.layout.of[k]
        at = (sums.seq0 + i) & mask
        slot = slots[at]
        n, total, added = np.int64(0), Sum(np.int64(0), np.int64(0)), NOT_JOINED
        if slot.cookie == sums.cookie and slot.op == sums.op and slot.count > 0:
            n = np.int64(slot.count)
            total = Sum(np.int64(slot.exponent), np.int64(slot.units))
            kernel += 1
        peers = n > 0
        if own.present:
            e, weight = scales.exponents[g], scales.weights[g]
            if peers:
                bits = row_key(contributed ^ _OWN, k)
                total, added = join(total, e, weight, form.weights, form.down_most, bits)
            else:
                total, added = begin(e, weight, form.weights)
                own_only += 1
            n += 1
        out.contributors[i] = n
        out.usable[i] = n > 0
        if n == 0:
            missing += 1
            out.scale[i] = np.float32(0.0)
            continue
        rows += 1
        contributions += n
        zero = np.uint32(total.units * form.code.zero >> 7 if packing != PLANES else 0)
        zeros = np.uint32(0)
        sum_at = sums_at + at * sums.ring.rows.shape[1]
        code_at = own_at + i * own.packets.shape[1]
        target = out.packets[i, HEADER_BYTES:]
        lanes = codes  # in planes two of an entry
        if packing == HALVES:
            lanes, code_at = entries, np.int64(memory.codes.ctypes.data)
            if own.present:
                planes.unpack(own.packets[i, HEADER_BYTES : HEADER_BYTES + codes], memory.codes[:entries])
        how = added.move, added.weight, added.add, added.down
        if not peers or added.move >= 16:
            zeros = kernels.gather_own(sum_at, code_at, how, zero, lanes, row, memory.lanes)
        elif own.present:
            zeros = kernels.gather_both(sum_at, code_at, how, zero, lanes, row, memory.lanes)
        else:
            zeros = kernels.gather_ring(sum_at, code_at, how, zero, lanes, row, memory.lanes)
        unit, left = 1.0, False
        if packing == PLANES:
            key = row_key(rounding, k)
            most = np.int64(planes.requantise16(row, total, entries, key, memory.columns_out, target))
        else:
            empty = empty_columns(form.layout, g, entries)
            keys = row_key(contributed, k), row_key(rounding, k)
            most, left = _rounded(row, total, empty, keys, zeros, form, memory, target)
            unit = 2.0**-16
        scale = np.float32(np.float64(most) * (scale_of(total.exponent) / span) / np.float64(n) * unit)
        out.scale[i] = -scale if left and most > 0 else scale
        state = out.partials[i]
        state[:] = 0
        absorb(target.view(np.uint64), state, form.key)
    return rows, kernel, own_only, missing, contributions


@compiled
def _mean_at(at, lo, hi, memory_at):  # type: ignore[no-untyped-def]
    call = _call_at(at)
    found = _mean_rows(call.sums, call.own, lo, hi, call.form, call.out, load_memory(memory_at))
    for i, count in enumerate(found):
        call.counts[i] = count
    return 0


def mean_rows(
    sums: Sums,
    own: Own,
    shape: Shape,
    coding: Coding,
    out: Results,
    scratch: Scratch,
) -> Means:
    """Averages the rows of one owner and codes them for the way back (codec-10).

    A row's sum is taken when its record carries (cookie, op); else the own row stands alone.

    Args:
        sums: read.
        own: read, but for the working memory.
        coding: how the ranks code.
        out: written.

    Returns:
        Counts over the rows made.

    Raises:
        ValueError: an array does not fit.
    """
    lay(scratch.call, sums.ring, own, shape, coding, out, scratch)
    lay_op(scratch.call, sums, own, coding, out)
    _mean_at(scratch.call_at, 0, own.rows.shape[0], scratch.memory_at)
    return Means(*scratch.counts.tolist())


def lay(
    words: ctypes.Array[ctypes.c_int64],
    ring: Ring,
    own: Own,
    shape: Shape,
    coding: Coding,
    out: Results,
    scratch: Scratch,
) -> None:
    """Writes those of the words that ``_mean_at`` is called with that do not change from op to op; see ``mean_rows``.

    It counts in ``scratch``.

    Args:
        own, out: those of every op have arrays of these shapes.
        coding: its weights, and whether groups are rotated.

    Raises:
        ValueError: an array does not fit.
    """
    n, codes, made = own.rows.shape[0], shape.codes, shape.results
    fits = out.packets.shape == (n, HEADER_BYTES + made.codes) and out.partials.shape == (n, 4)
    if not fits or (own.present and own.packets.shape != (n, HEADER_BYTES + codes)):
        raise ValueError(
            f"{n} rows of {codes} codes do not fit out {out.packets.shape}, own {own.packets.shape} or "
            f"{out.partials.shape}"
        )
    if (
        2 * shape.code.lanes_a_byte * codes > ring.rows.shape[1]
        or max(codes, made.codes) > scratch.width
        or n > ring.rows.shape[0]
    ):
        raise ValueError(
            f"{n} rows of {codes} codes do not fit sums {ring.rows.shape} or a scratch for {scratch.width}"
        )
    assert coding.weights is not None, "a switch makes the means of its rows"
    code = shape.code
    _SHAPE.pack_into(
        words, _OP.size, words_at(shape.layout), codes, shape.entries, words_at(code), *coding.weights,
        DOWN_HALVES if code.packing == HALVES else DOWN_MOST, coding.rotate and code.offsets,
        *array_words(scratch.counts)
    )  # fmt: skip


def lay_op(words: ctypes.Array[ctypes.c_int64], sums: Sums, own: Own, coding: Coding, out: Results) -> None:
    """Writes those of one op, coded by the seed and key of ``coding``; see ``mean_rows``."""
    made = words_at(sums.ring), *sums[1:], words_at(own), words_at(out)
    _OP.pack_into(words, 0, *made, coding.seed, *array_words(coding.key))


def mean_entry() -> int:
    """Where ``_mean_at`` begins (``wire.jit.entry``)."""
    return entry(_mean_at)


def mean_by(threads: Threads, at: int, rows: int) -> None:
    """``mean_rows`` of all ``rows`` by words at ``at``, shared by ``threads`` in blocks of as many as a group has."""
    if threads.run(_mean_at, at, rows, GROUP_ROWS) < 0:
        raise RuntimeError("the pass that makes means has failed: report it")
