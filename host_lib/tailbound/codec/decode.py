"""From result rows back to gradients.

Every rank must get the same bits from the same codes: no fastmath and no fused multiply-add here (numba emits none
unless fastmath allows contraction; a test looks at the machine code), and sums have a fixed order.

A code c with the rounding offset u stands for c - 128 where the scale of its row is positive, and for c - 128 - (u -
1/2) where it is negative. Four words a row say how codes are read (``readings``): a value is
``((c << 16 | (key - part) & mask) - zero) * factor``, with the part of the column in u. The key is the complement of
the row's part, so that one subtraction gives 65535 - u.

An entry of a switch's row to which n ranks contributed is (sum - 128 n) * 2^(e/4) / (127 n).
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import numpy as np

from tailbound.codec import halves, kernels, planes
from tailbound.codec.format import BYTES, FORMATS, HALVES, PLANES, CodeFormat
from tailbound.codec.halves import NO_ENTRIES, Entries, Floats, entry_words
from tailbound.codec.hashing import (
    STAGE_RESULT,
    bits_of,
    float_of,
    rounding_seed,
    row_key,
    write_columns,
    write_signs,
)
from tailbound.codec.laid import words_at
from tailbound.codec.loader import loader
from tailbound.codec.records import NO_RECEIVED, Coding, Received
from tailbound.codec.scale import root_of
from tailbound.codec.scratch import PITCH_EXTRA, Scratch, load_memory
from tailbound.codec.shape import NO_GROUPS, Groups, Shape
from tailbound.codec.simd import LANES
from tailbound.codec.threads import Threads
from tailbound.wire.jit import compiled
from tailbound.wire.schema import HEADER_BYTES

#: ``source`` of a row that is missing.
MISSING = -1


class _Form(NamedTuple):
    """Of an op, for the compiled pass."""

    seed: np.uint32
    layout: Groups
    codes: int  #: of a row
    code: CodeFormat
    rotate: bool
    stage: int  #: whose rounding offsets the codes have


class _Call(NamedTuple):
    """What the pass is called with."""

    out: Entries
    received: Received
    form: _Form


_call_at = loader(_Call(NO_ENTRIES, NO_RECEIVED, _Form(np.uint32(0), NO_GROUPS, 0, FORMATS[8], False, 0)))
_OP, _SHAPE = struct.Struct("=7q"), struct.Struct("=5q")  # words of one op, and behind them those of all


def own_source(place: int) -> int:
    """``source`` of the own result row at ``place``."""
    return -(place + 2)


@compiled
def key_of(rounding, row):  # type: ignore[no-untyped-def]
    """The key of a row whose offsets are subtracted."""
    return np.uint32(~row_key(rounding, row))


@compiled
def _read_as(reading, scale, count, row, form, rounding):  # type: ignore[no-untyped-def]
    """How the codes of ``row`` are read, or, where it has a ``count``, the sums of so many."""
    span = form.code.span
    if count > 0:
        reading[0] = bits_of(np.float32(np.float64(scale) / (span * count)))
        reading[1] = form.code.zero * count
        return
    if form.code.packing == PLANES:
        reading[0] = bits_of(np.float32(np.float64(scale) / span))
        return
    reading[0] = bits_of(np.float32(np.float64(abs(scale)) / span) * np.float32(2.0**-16))
    reading[1] = form.code.zero << 16
    reading[2] = reading[3] = 0
    if scale < 0:
        reading[1] += 32767
        reading[2] = key_of(rounding, row)
        reading[3] = 0xFFFF


@compiled
def _expand(addresses, readings, columns, rows, codes, work, pitch, summed):  # type: ignore[no-untyped-def]
    """First pass: codes, or sums of them, to values, and the butterflies between rows 8, 16 and 32 apart."""
    for i in range(min(rows, 8)):
        if rows == 64:
            kernels.expand8(addresses, readings, columns, i, codes, work, i * pitch, pitch, summed)
        elif rows == 32:
            kernels.expand4(addresses, readings, columns, i, codes, work, i * pitch, pitch, summed)
        elif rows == 16:
            kernels.expand2(addresses, readings, columns, i, codes, work, i * pitch, pitch, summed)
        else:
            kernels.expand1(addresses, readings, columns, i, codes, work, i * pitch, pitch, summed)


@compiled
def _restore(memory, codes, rows, factor, target, at, stream):  # type: ignore[no-untyped-def]
    """Second pass: butterflies between neighbours, the group's factor and signs, to ``target`` from ``at`` on."""
    work, signs, pitch = memory.work, memory.signs, codes + PITCH_EXTRA
    if rows == 2:
        kernels.restore2(work, 0, pitch, factor, signs, 0, target, at, codes)
    elif rows == 4:
        kernels.restore4(work, 0, pitch, factor, signs, 0, target, at, codes)
    else:
        for r in range(0, rows, 8):
            if stream:
                kernels.restore_stream(work, r * pitch, pitch, factor, signs, r, target, at + r * codes, codes)
            else:
                kernels.restore8(work, r * pitch, pitch, factor, signs, r, target, at + r * codes, codes)


@compiled
def _unfold(results, first, rows, form, memory, out, at, apart):  # type: ignore[no-untyped-def]
    """Codes of 16 bits of a group's rows to values, ``apart`` in ``out``; a missing row is zero."""
    for r in range(rows):
        where = results.source[first + r]
        begin = at + r * apart
        if where == MISSING:
            for j in range(begin, begin + form.codes):
                out[j] = np.float32(0.0)
        elif where >= 0:
            planes.read_row16(results.ring[where], form.codes, float_of(memory.readings[r, 0]), out, begin)
        else:
            payload = results.own[-where - 2, HEADER_BYTES:]
            planes.read_row16(payload, form.codes, float_of(memory.readings[r, 0]), out, begin)


@compiled
def _decode(results, lo, hi, form, memory, out):  # type: ignore[no-untyped-def]
    ring, own, source, scale, counts = results
    codes = form.codes
    work, padded, addresses, readings = memory.work, memory.group, memory.addresses, memory.readings
    columns = memory.columns
    failed = 0
    pitch = codes + PITCH_EXTRA
    ring_at = np.int64(ring.ctypes.data)
    own_at = np.int64(own.ctypes.data) + HEADER_BYTES
    codes_at = np.int64(memory.codes.ctypes.data)
    summed = counts.shape[0] > 0
    rounding = rounding_seed(form.seed, form.stage)
    write_columns(rounding, columns[:codes])
    for g in range(lo, hi):
        received, row = 0, form.layout.rows[g]
        rows = form.layout.rows[g + 1] - row
        turn, size = form.rotate and rows > 1, rows * codes
        for r in range(rows):
            k = row + r
            at = source[k]
            addresses[r] = np.int64(memory.blank.ctypes.data)
            if at == MISSING:
                readings[r, 0] = readings[r, 3] = 0
                readings[r, 1] = 0 if summed else form.code.zero << 16
                continue
            if at >= ring.shape[0] or -at - 2 >= own.shape[0]:
                return -1
            received += 1
            addresses[r] = ring_at + at * ring.shape[1] if at >= 0 else own_at - (at + 2) * own.shape[1]
            if form.code.packing == HALVES:
                unpacked = memory.codes[r * codes : (r + 1) * codes]
                if at >= 0:
                    planes.unpack(ring[at, : codes // 2], unpacked)
                else:
                    planes.unpack(own[-at - 2, HEADER_BYTES : HEADER_BYTES + codes // 2], unpacked)
                addresses[r] = codes_at + r * codes
            _read_as(readings[r], scale[k], np.int64(counts[k]) if summed else np.int64(0), k, form, rounding)
        first, last = form.layout.entries[g], form.layout.entries[g + 1]
        if received == 0:
            failed += 1
            halves.clear(out, first, last)
            continue
        whole = last - first == size and out.whole.shape[0] > 0  # else by way of float32 in cache
        target, at = (out.whole, first) if whole else (padded, np.int64(0))
        if form.code.packing == PLANES:
            apart, values, begin = (pitch, work, np.int64(0)) if turn else (codes, target, at)
            _unfold(results, row, rows, form, memory, values, begin, apart)
            if turn:
                planes.settle_far(work, rows, codes, pitch)
        elif not turn:
            for r in range(rows):
                kernels.expand1(addresses, readings, columns, r, codes, target, at + r * codes, 0, summed)
        else:
            _expand(addresses, readings, columns, rows, codes, work, pitch, summed)
        if turn:
            factor = np.float32(root_of(rows) / received)
            write_signs(form.seed, row, rows, codes, memory.signs)
            # around the caches only by whole lines: half ones would be written to memory twice
            stream = LANES == 16 and whole and halves.address(out, first)[0] % 64 == 0
            _restore(memory, codes, rows, factor, target, at, stream)
        if not whole:
            halves.write(padded, last - first, out, first, memory.row)
    return failed


@compiled
def decode_at(at, lo, hi, memory_at):  # type: ignore[no-untyped-def]
    """The pass of ``decode``: by words at ``at`` (``lay``), for groups ``lo`` to ``hi``."""
    call = _call_at(at)
    return _decode(call.received, lo, hi, call.form, load_memory(memory_at), call.out)


def decode(
    received: Received,
    shape: Shape,
    coding: Coding,
    out: Floats,
    threads: Threads | Scratch,
) -> int:
    """Decodes the results of an op (codec-11).

    Args:
        shape: of the op; ``shape.results`` are looked at.
        coding: its seed, and whether groups are rotated.
        out: [numel], of a type of ``codec.halves``, written, C-contiguous. Missing rows count as zero, and each group
            is multiplied by R / received; a group of which nothing came is zero. Where groups are not rotated missing
            entries are zero and nothing is corrected.
        threads: share the work.

    Returns:
        Groups of which nothing was received.

    Raises:
        ValueError: an array does not fit the shape, or a source is out of range.
    """
    scratch = threads.scratch
    lay(scratch.call, received, shape.results, coding, scratch.width)
    lay_op(scratch.call, received, shape.results, coding, out)
    failed = threads.run(decode_at, scratch.call_at, shape.groups)
    if failed < 0:
        raise ValueError(
            f"a source lies outside the ring of {len(received.ring)} rows or the {len(received.own)} own rows"
        )
    return failed


def lay(
    words: ctypes.Array[ctypes.c_int64],
    received: Received,
    shape: Shape,
    coding: Coding,
    width: int,
    stage: int = STAGE_RESULT,
) -> None:
    """Writes those of the words that ``decode_at`` is called with that do not change from op to op; see ``decode``.

    Args:
        received: what is received of every op has arrays of these shapes.
        coding: whether groups are rotated.
        width: of rows that its working memory is for.
        stage: whose rounding offsets the codes have, those of results or of contributions.

    Raises:
        ValueError: an array does not fit the shape.
    """
    ring, _, source, scale, counts = received
    summed = len(counts) > 0
    if summed and shape.code.packing != BYTES:
        raise ValueError(f"sums of a switch have codes of 8 bits, not {shape.bits}")
    codes_bytes = shape.codes * (1 + summed)
    if codes_bytes > min(width, ring.shape[1]) or len(source) != shape.rows or len(scale) != shape.rows:
        raise ValueError(f"ring {ring.shape}, {len(source)} sources or a scratch for {width} do not fit {shape}")
    _SHAPE.pack_into(words, _OP.size, words_at(shape.layout), shape.entries, words_at(shape.code), coding.rotate, stage)


def lay_op(
    words: ctypes.Array[ctypes.c_int64],
    received: Received,
    shape: Shape,
    coding: Coding,
    out: Floats,
) -> None:
    """Writes those of one op, decoded into ``out`` by the seed of ``coding``; see ``decode``.

    Raises:
        ValueError: ``out`` does not fit the shape.
    """
    _OP.pack_into(words, 0, *entry_words("output", out, shape), words_at(received), coding.seed)
