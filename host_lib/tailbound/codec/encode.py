"""From gradients to packets of u8 codes, one pass over the groups.

A group is multiplied by its signs, rotated in cache, its largest value found, which gives its scale, and its rows are
quantised into packet memory with stochastic rounding, while the state of the check, or of the tag, over each payload is
taken. Nothing is allocated.

code = clamp(floor(y * 127 / (m 2^(e/4)) + 128 + u), 1, 255): zero is exactly 128, and 0 never occurs. ``128 + u``
with a 16-bit u is exact in float32; 24 bits would not be. u is what everybody can compute (``codec.hashing``), so that
whoever averages may take it off again; codes are the same whether it is or not.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import halves, kernels, planes
from tailbound.codec.format import FORMATS, HALVES, PLANES, CodeFormat
from tailbound.codec.halves import NO_ENTRIES, Entries, Floats, entry_words
from tailbound.codec.hashing import (
    STAGE_CONTRIBUTION,
    bits_of,
    float_of,
    rounding_seed,
    row_key,
    write_columns,
    write_signs,
)
from tailbound.codec.laid import array_words, words_at
from tailbound.codec.loader import loader
from tailbound.codec.records import NO_PACKETS, NO_SCALES, Coding, Packets, Scales
from tailbound.codec.scale import OVERFLOW_BITS, need_of, own_scale, root_of, scale_of
from tailbound.codec.scratch import PITCH_EXTRA, Scratch, load_memory
from tailbound.codec.shape import NO_GROUPS, Groups, Shape
from tailbound.codec.threads import Threads
from tailbound.wire.jit import compiled
from tailbound.wire.proof import absorb
from tailbound.wire.schema import HEADER_BYTES
from tailbound.wire.tag import NO_KEY


class _Form(NamedTuple):
    """Of an op, for the compiled passes."""

    seed: np.uint32
    key: NDArray[np.uint64]  #: of the check or tag
    layout: Groups
    codes: int  #: of a row
    code: CodeFormat
    rotate: bool
    cap: int  #: largest weight; 0: scales are given


class _Call(NamedTuple):
    """What a pass is called with."""

    x: Entries
    form: _Form
    packets: Packets
    scales: Scales


class _Measured(NamedTuple):
    """The same, to find scales."""

    x: Entries
    form: _Form
    need: NDArray[np.int16]


_FORM = _Form(np.uint32(0), NO_KEY, NO_GROUPS, 0, FORMATS[8], False, 0)
_call_at = loader(_Call(NO_ENTRIES, _FORM, NO_PACKETS, NO_SCALES))
_measured_at = loader(_Measured(NO_ENTRIES, _FORM, NO_SCALES.need))
_OP, _SHAPE = struct.Struct("=8q"), struct.Struct("=7q")  # of either: words of one op, and behind them those of all


class Encoded(NamedTuple):
    """What became of a bucket. Not ``finite``: nothing may be sent. ``clipped``: entries that did not fit."""

    finite: bool
    clipped: int


@compiled
def _source(x, first, left, size, memory):  # type: ignore[no-untyped-def]
    """Where a group with ``left`` entries is as float32: (array, offset).

    A copy in cache where its entries are of another type, or fewer than ``size``: then filled up with zeros.
    """
    if left == size and x.whole.shape[0] > 0:
        return x.whole, first
    halves.read(x, first, left, memory.group, memory.row)
    memory.group[left:size] = np.float32(0.0)
    return memory.group, np.int64(0)


@compiled
def _ahead(x, at, size, columns):  # type: ignore[no-untyped-def]
    """Where to prefetch: the same rows of the next group; nowhere new at the end (unmapped addresses are slow).

    And where the columns' parts of the rounding offsets are.
    """
    where, width = halves.address(x, at + size if at + size + size // 8 <= halves.count(x) else np.int64(0))
    return where, np.int64(width), np.int64(columns.ctypes.data)


@compiled
def _spread(source, at, row, rows, form, memory):  # type: ignore[no-untyped-def]
    """First pass over the group from ``row`` of the op on: signs, butterflies between rows 8, 16, 32 apart."""
    codes, work, signs = form.codes, memory.work, memory.signs
    pitch = codes + PITCH_EXTRA
    write_signs(form.seed, row, rows, codes, signs)
    for i in range(min(rows, 8)):
        k = np.uint32(i)
        if rows == 64:
            kernels.spread8(source, at + i * codes, codes, signs, k, work, i * pitch, pitch)
        elif rows == 32:
            kernels.spread4(source, at + i * codes, codes, signs, k, work, i * pitch, pitch)
        elif rows == 16:
            kernels.spread2(source, at + i * codes, codes, signs, k, work, i * pitch, pitch)
        else:
            kernels.spread1(source, at + i * codes, codes, signs, k, work, i * pitch, pitch)


@compiled
def normalised(bits, rows, rotate):  # type: ignore[no-untyped-def]
    """Bits of a group's largest value after the factor 1 / sqrt(R)."""
    if rotate:
        return bits_of(np.float32(np.float64(float_of(bits)) / root_of(rows)))
    return bits


@compiled
def _group(form, g):  # type: ignore[no-untyped-def]
    """First row and rows of a group, first entry and entries of it, and whether it is rotated."""
    row, first = form.layout.rows[g], form.layout.entries[g]
    rows = form.layout.rows[g + 1] - row
    return row, rows, first, form.layout.entries[g + 1] - first, form.rotate and rows > 1


@compiled
def _at_once(rows, turn):  # type: ignore[no-untyped-def]
    """Rows of a group that a kernel takes at once."""
    if rows >= 8:
        return 8
    return rows if turn else 1


@compiled
def _quantise(values, first, apart, rows, turn, form, factor, ahead, memory):  # type: ignore[no-untyped-def]
    """Codes of the rows that a kernel takes at once, to ``memory.addresses``."""
    codes, keys, targets, span = form.codes, memory.keys, memory.addresses, np.float32(form.code.span)
    if not turn:
        if rows >= 8:
            kernels.finish_plain8(values, first, apart, codes, factor, span, keys, targets, ahead)
        else:
            kernels.finish_plain1(values, first, apart, codes, factor, span, keys, targets, ahead)
    elif rows >= 8:
        kernels.finish_turned8(values, first, apart, codes, factor, span, keys, targets, ahead)
    elif rows == 4:
        kernels.finish_turned4(values, first, apart, codes, factor, span, keys, targets, ahead)
    else:
        kernels.finish_turned2(values, first, apart, codes, factor, span, keys, targets, ahead)


@compiled
def _largest(values, first, apart, rows, turn, codes, ahead):  # type: ignore[no-untyped-def]
    """Bits of the largest value of the rows that a kernel takes at once."""
    if not turn:
        return (
            kernels.largest_plain8(values, first, apart, codes, ahead)
            if rows >= 8
            else kernels.largest_plain1(values, first, apart, codes, ahead)
        )
    if rows >= 8:
        return kernels.largest_turned8(values, first, apart, codes, ahead)
    return (
        kernels.largest_turned4(values, first, apart, codes, ahead)
        if rows == 4
        else kernels.largest_turned2(values, first, apart, codes, ahead)
    )


@compiled
def _turn(x, g, form, memory):  # type: ignore[no-untyped-def]
    """Group ``g`` up to its last pass: where it lies, and the bits of its largest value, not normalised.

    Codes in planes have that pass behind them, too.
    """
    codes, pitch = form.codes, form.codes + PITCH_EXTRA
    row, rows, first, entries, turn = _group(form, g)
    source, at = _source(x, first, entries, rows * codes, memory)
    settled = turn and form.code.packing == PLANES
    if turn:
        _spread(source, at, row, rows, form, memory)
        if settled:
            planes.settle_near(memory.work, rows, codes, pitch)
    most, step = np.uint32(0), _at_once(rows, turn and not settled)
    for r in range(0, rows, step):
        ahead = _ahead(x, first + r * codes, rows * codes, memory.columns)
        if turn:
            most = max(most, _largest(memory.work, r * pitch, pitch, step, not settled, codes, ahead))
        else:
            most = max(most, _largest(source, at + r * codes, codes, step, False, codes, ahead))
    return source, at, most


@compiled
def _needed(most, source, at, g, form):  # type: ignore[no-untyped-def]
    """Bits of the value that the codes of a group are to reach, from those of its largest one."""
    _, rows, _, entries, turn = _group(form, g)
    return planes.reach(normalised(most, rows, turn), form.code, source, at, rows, form.codes, entries)


@compiled
def _measure(x, lo, hi, form, need, memory):  # type: ignore[no-untyped-def]
    for g in range(lo, hi):
        source, at, most = _turn(x, g, form, memory)
        if most >= OVERFLOW_BITS:
            return False
        need[g] = need_of(_needed(most, source, at, g, form))
    return True


@compiled
def _write_planes(values, first, apart, rows, form, factor, packets, row, memory):  # type: ignore[no-untyped-def]
    """The same as ``_quantise`` of settled values, as planes in packets."""
    codes, keys = form.codes, memory.keys
    parts, work = memory.columns[:codes], memory.row[:codes]
    for i in range(rows):
        begin = first + i * apart
        target = packets.memory[packets.position[row + i], HEADER_BYTES : HEADER_BYTES + 2 * codes]
        planes.write_row16(values[begin : begin + codes], factor, keys[i], parts, work, target)


@compiled
def _finish(x, source, at, g, form, rounding, factor, packets, memory):  # type: ignore[no-untyped-def]
    """Last pass: butterflies between neighbours, codes and check.

    With codes in planes the work memory is settled already.
    """
    row, rows, first, _, turn = _group(form, g)
    codes, work, keys, targets = form.codes, memory.work, memory.keys, memory.addresses
    pitch = codes + PITCH_EXTRA
    out, position = packets.memory, packets.position
    payload = out.shape[1] - HEADER_BYTES
    base = np.int64(out.ctypes.data) + HEADER_BYTES
    step = _at_once(rows, turn)
    for r in range(0, rows, step):
        k = row + r
        for i in range(step):
            targets[i] = base + np.int64(position[k + i]) * out.shape[1]
            if form.code.packing == HALVES:
                targets[i] = np.int64(memory.codes.ctypes.data) + i * codes
            keys[i] = row_key(rounding, k + i)
        values, begin, apart = (work, r * pitch, pitch) if turn else (source, at + r * codes, codes)
        if form.code.packing == PLANES:
            _write_planes(values, begin, apart, step, form, factor, packets, k, memory)
        else:
            ahead = _ahead(x, first + r * codes, rows * codes, memory.columns)
            _quantise(values, begin, apart, rows, turn, form, factor, ahead, memory)
        for i in range(step):
            place = position[k + i]
            if form.code.packing == HALVES:
                made = memory.codes[i * codes : (i + 1) * codes]
                planes.pack(made, out[place, HEADER_BYTES : HEADER_BYTES + codes // 2])
            state = packets.partials[place]
            state[:] = 0
            absorb(out[place, HEADER_BYTES : HEADER_BYTES + payload].view(np.uint64), state, form.key)


@compiled
def _count_beyond(source, at, rows, turn, form, limit, work):  # type: ignore[no-untyped-def]
    """Entries of the group whose absolute value is above ``limit``; settles ``work`` in place, so it comes last."""
    beyond, codes = 0, form.codes
    pitch = codes + PITCH_EXTRA
    if turn and form.code.packing != PLANES:
        planes.settle_near(work, rows, codes, pitch)
    for i in range(rows):
        row = work[i * pitch : i * pitch + codes] if turn else source[at + i * codes : at + (i + 1) * codes]
        for value in row:
            beyond += abs(value) > limit
    return beyond


@compiled
def _encode(x, lo, hi, form, packets, scales, memory):  # type: ignore[no-untyped-def]
    clipped, rounding = 0, rounding_seed(form.seed, STAGE_CONTRIBUTION)
    write_columns(rounding, memory.columns[: form.codes])
    for g in range(lo, hi):
        _, rows, _, _, turn = _group(form, g)
        source, at, most = _turn(x, g, form, memory)
        if most >= OVERFLOW_BITS:
            return False, clipped
        scale = scale_for(_needed(most, source, at, g, form), form.cap, scales, g) * (root_of(rows) if turn else 1.0)
        _finish(x, source, at, g, form, rounding, np.float32(form.code.span / scale), packets, memory)
        if (form.cap == 0 or form.code.clips) and np.float64(float_of(most)) > scale:
            clipped += _count_beyond(source, at, rows, turn, form, np.float32(scale), memory.work)
    return True, clipped


@compiled
def scale_for(bits, cap, scales, g):  # type: ignore[no-untyped-def]
    """The scale of group ``g``, by the value with ``bits`` that codes are to reach; a given one where ``cap`` is 0."""
    if cap > 0:
        e, weight = own_scale(bits, cap)
        scales.exponents[g], scales.weights[g] = e, weight
    else:
        e, weight = np.int64(scales.exponents[g]), np.int64(1)
        scales.need[g], scales.weights[g] = need_of(bits), 1
    return weight * scale_of(e)


def cap_of(coding: Coding, shape: Shape) -> int:
    """The largest weight; 0: scales are given. With codes in planes it is 1: a shift would cut the upper ones."""
    if coding.weights is None:
        return 0
    return 1 if shape.code.packing == PLANES else coding.weights.cap


@compiled
def encode_at(at, lo, hi, memory_at):  # type: ignore[no-untyped-def]
    """The pass of ``encode``: by words at ``at`` (``lay``), for groups ``lo`` to ``hi``; clipped entries, or -1."""
    call = _call_at(at)
    finite, clipped = _encode(call.x, lo, hi, call.form, call.packets, call.scales, load_memory(memory_at))
    return clipped if finite else -1


@compiled
def _measure_at(at, lo, hi, memory_at):  # type: ignore[no-untyped-def]
    call = _measured_at(at)
    return 0 if _measure(call.x, lo, hi, call.form, call.need, load_memory(memory_at)) else -1


def _lay(words: ctypes.Array[ctypes.c_int64], shape: Shape, coding: Coding, width: int, last: tuple[int, ...]) -> None:
    """Writes the words of all calls, of which ``last`` are the last two, for working memory for rows of ``width``."""
    if shape.codes > width:
        raise ValueError(f"rows of {shape.codes} bytes do not fit a scratch for {width}")
    layout, code, cap = words_at(shape.layout), words_at(shape.code), cap_of(coding, shape)
    _SHAPE.pack_into(words, _OP.size, layout, shape.entries, code, coding.rotate, cap, *last)


def measure(
    x: Floats,
    shape: Shape,
    coding: Coding,
    need: NDArray[np.int16],
    threads: Threads | Scratch,
) -> bool:
    """What scale each group needs, where ranks have to agree on scales; codes nothing.

    Args:
        x: [numel], of a type of ``codec.halves``, C-contiguous.
        coding: its seed, and whether groups are rotated.
        need: i16[G], written: ceil(4 log2 max|y|) a group, EXPONENT_NONE where all is zero.
        threads: share the work.

    Returns:
        False when a value is NaN, Inf or beyond 2^120; ``need`` is then undefined and the rank abstains.

    Raises:
        ValueError: an array does not fit the shape.
    """
    scratch = threads.scratch
    _lay(scratch.call, shape, coding, scratch.width, array_words(need))
    lay_op(scratch.call, x, shape, coding)
    return threads.run(_measure_at, scratch.call_at, shape.groups) == 0


def encode(
    x: Floats,
    shape: Shape,
    coding: Coding,
    packets: Packets,
    scales: Scales,
    threads: Threads | Scratch,
) -> Encoded:
    """Codes a bucket into packet memory (codec-3 to codec-7).

    Args:
        x: [numel], of a type of ``codec.halves``, C-contiguous.
        coding: how.
        packets: written, but for ``position``.
        scales: written; ``exponents`` are read where ``coding`` has no weights.
        threads: share the work.

    Returns:
        Whether all is finite (else outputs are undefined and nothing may be sent), and the number of clipped entries.

    Raises:
        ValueError: an array does not fit the shape.
    """
    scratch = threads.scratch
    lay(scratch.call, shape, coding, packets, scales, scratch.width)
    lay_op(scratch.call, x, shape, coding)
    clipped = threads.run(encode_at, scratch.call_at, shape.groups)
    return Encoded(clipped >= 0, max(0, clipped))


def lay(
    words: ctypes.Array[ctypes.c_int64],
    shape: Shape,
    coding: Coding,
    packets: Packets,
    scales: Scales,
    width: int,
) -> None:
    """Writes those of the words that ``encode_at`` is called with that do not change from op to op; see ``encode``.

    Args:
        coding: its weights, and whether groups are rotated.
        width: of rows that its working memory is for.

    Raises:
        ValueError: an array does not fit the shape.
    """
    rows, partials = packets.memory.shape, packets.partials.shape
    if rows != (shape.rows, HEADER_BYTES + shape.codes) or partials != (shape.rows, 4):
        raise ValueError(f"packets {rows} or partials {partials} do not fit {shape}")
    _lay(words, shape, coding, width, (words_at(packets), words_at(scales)))


def lay_op(words: ctypes.Array[ctypes.c_int64], x: Floats, shape: Shape, coding: Coding) -> None:
    """Writes those of one op: of bucket ``x``, coded by the seed and key of ``coding``; see ``encode``.

    Raises:
        ValueError: ``x`` does not fit the shape.
    """
    _OP.pack_into(words, 0, *entry_words("bucket", x, shape), coding.seed, *array_words(coding.key))
