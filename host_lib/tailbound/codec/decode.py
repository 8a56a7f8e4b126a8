"""From result rows back to gradients.

Every rank must get the same bits from the same codes: no fastmath and no fused multiply-add here (numba emits none
unless fastmath allows contraction; a test looks at the machine code), and sums have a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tailbound.codec import halves, kernels, planes, sums
from tailbound.codec.halves import Floats, entries
from tailbound.codec.records import Coding, Received
from tailbound.codec.scale import SPAN, ZERO, root_of
from tailbound.codec.scratch import PITCH_EXTRA, Scratch, readonly
from tailbound.codec.shape import Shape
from tailbound.codec.simd import LANES
from tailbound.wire.jit import compiled
from tailbound.wire.schema import HEADER_BYTES

#: ``source`` of a row that is missing.
MISSING = -1
_NO_COUNTS = np.zeros(0, np.uint16)


class _Form(NamedTuple):
    """Of an op, for the compiled pass."""

    rows: int  #: of a group
    codes: int  #: of a row
    bits: int  #: of a code
    seed: np.uint32
    rotate: bool


def own_source(place: int) -> int:
    """``source`` of the own result row at ``place``."""
    return -(place + 2)


@compiled
def _expand(addresses, factors, rows, codes, work, pitch):  # type: ignore[no-untyped-def]
    """First pass: codes to values, and the butterflies between rows 8, 16 and 32 apart."""
    for i in range(8):
        if rows == 64:
            kernels.expand8(addresses, factors, i, codes, work, i * pitch, pitch)
        elif rows == 32:
            kernels.expand4(addresses, factors, i, codes, work, i * pitch, pitch)
        else:
            kernels.expand2(addresses, factors, i, codes, work, i * pitch, pitch)


@compiled
def _expand_sums(addresses, factors, zeros, rows, codes, work, pitch):  # type: ignore[no-untyped-def]
    """The same from sums."""
    for i in range(8):
        if rows == 64:
            sums.expand8(addresses, factors, zeros, i, codes, work, i * pitch, pitch)
        elif rows == 32:
            sums.expand4(addresses, factors, zeros, i, codes, work, i * pitch, pitch)
        else:
            sums.expand2(addresses, factors, zeros, i, codes, work, i * pitch, pitch)


@compiled
def _unfold(results, first, form, factors, out, at, apart):  # type: ignore[no-untyped-def]
    """Codes of 16 or 4 bits of a group's rows to values, ``apart`` in ``out``; a missing row is zero."""
    for r in range(form.rows):
        where = results.source[first + r]
        begin = at + r * apart
        if where == MISSING:
            for j in range(begin, begin + form.codes):
                out[j] = np.float32(0.0)
        elif where >= 0:
            planes.read_row(results.ring[where], form.codes, form.bits, factors[r], out, begin)
        else:
            planes.read_row(results.own[-where - 2, HEADER_BYTES:], form.codes, form.bits, factors[r], out, begin)


@compiled
def _decode(results, lo, hi, form, memory, out):  # type: ignore[no-untyped-def]
    ring, own, source, scale, counts = results
    rows, codes, seed, rotate = form.rows, form.codes, form.seed, form.rotate
    work, padded, factors, addresses, zeros = memory.work, memory.group, memory.factors, memory.addresses, memory.zeros
    span = SPAN if form.bits == 8 else planes.zero_of(form.bits) - 1
    failed = 0
    pitch = codes + PITCH_EXTRA
    size = rows * codes
    ring_at = np.int64(ring.ctypes.data)
    own_at = np.int64(own.ctypes.data) + HEADER_BYTES
    # around the caches only by whole lines: half ones would be written to memory twice
    stream = LANES == 16 and halves.address(out, np.int64(0))[0] % 64 == 0
    summed = counts.shape[0] > 0
    for g in range(lo, hi):
        received = 0
        for r in range(rows):
            k = g * rows + r
            at = source[k]
            addresses[r] = np.int64(memory.blank.ctypes.data)
            factors[r] = np.float32(0.0)
            zeros[r] = 0
            if at == MISSING:
                continue
            if at >= ring.shape[0] or -at - 2 >= own.shape[0]:
                return -1
            received += 1
            addresses[r] = ring_at + at * ring.shape[1] if at >= 0 else own_at - (at + 2) * own.shape[1]
            factors[r] = np.float32(np.float64(scale[k]) / span)
            if summed:
                factors[r] = np.float32(np.float64(scale[k]) / (SPAN * np.int64(counts[k])))
                zeros[r] = ZERO * np.int32(counts[k])
        first = np.int64(g) * size
        last = min(first + size, halves.count(out))
        if received == 0:
            failed += 1
            halves.clear(out, first, last)
            continue
        whole = last - first == size and out.whole.shape[0] > 0  # else by way of float32 in cache
        target, at = (out.whole, first) if whole else (padded, np.int64(0))
        if form.bits != 8:
            apart, values, begin = (pitch, work, np.int64(0)) if rotate else (codes, target, at)
            _unfold(results, g * rows, form, factors, values, begin, apart)
            if rotate:
                planes.settle_far(work, rows, codes, pitch)
        elif not rotate:
            for r in range(rows):
                if summed:
                    sums.expand1(addresses, factors, zeros, r, codes, target, at + r * codes, 0)
                else:
                    kernels.expand1(addresses, factors, r, codes, target, at + r * codes, 0)
        elif summed:
            _expand_sums(addresses, factors, zeros, rows, codes, work, pitch)
        else:
            _expand(addresses, factors, rows, codes, work, pitch)
        if rotate:
            factor = np.float32(root_of(rows) / received)
            for r in range(0, rows, 8):
                index = np.uint32(seed + np.uint32(first + r * codes))
                if whole and stream:
                    kernels.restore_stream(work, r * pitch, pitch, factor, index, target, at + r * codes, codes)
                else:
                    kernels.restore(work, r * pitch, pitch, factor, index, target, at + r * codes, codes)
        if not whole:
            halves.write(padded, last - first, out, first, memory.row)
    return failed


def decode(
    received: Received,
    shape: Shape,
    coding: Coding,
    out: Floats,
    scratch: Scratch,
    *,
    groups: tuple[int, int] | None = None,
) -> int:
    """Decodes the results of an op (codec-11).

    Args:
        coding: its seed, and whether groups are rotated.
        out: [numel], of a type of ``codec.halves``, written, C-contiguous. Missing rows count as zero, and each group
            is multiplied by R / received; a group of which nothing came is zero. Where groups are not rotated missing
            entries are zero and nothing is corrected.
        groups: only the groups of this half-open range.

    Returns:
        Groups of which nothing was received.

    Raises:
        ValueError: an array does not fit the shape, or a source is out of range.
    """
    ring, own, source, scale, counts = received
    values = entries("output", out, shape)
    if counts is not None and shape.bits != 8:
        raise ValueError(f"sums of a switch have codes of 8 bits, not {shape.bits}")
    codes_bytes = shape.codes * (1 if counts is None else 2)
    if codes_bytes > min(scratch.width, ring.shape[1]) or len(source) != shape.rows or len(scale) != shape.rows:
        raise ValueError(
            f"ring {ring.shape}, {len(source)} sources or a scratch for {scratch.width} do not fit {shape}"
        )
    lo, hi = groups or (0, shape.groups)
    rows = Received(readonly(ring), own, source, scale, _NO_COUNTS if counts is None else counts)
    form = _Form(shape.group_rows, shape.entries, shape.bits, np.uint32(coding.seed), coding.rotate)
    failed = _decode(rows, lo, hi, form, scratch.memory, values)
    if failed < 0:
        raise ValueError(f"a source lies outside the ring of {ring.shape[0]} rows or the {own.shape[0]} own rows")
    return int(failed)
