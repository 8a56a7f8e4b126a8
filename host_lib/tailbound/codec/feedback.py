"""What a rank's own codes leave unsaid of its gradient: the residual of error feedback.

EF-SGD (Karimireddy et al., ICML 2019) adds the residual of one step to the gradient of the next, so that what rounding
and clipping have kept back is sent later and not lost. Here the residual is that of the contribution. What the owner's
second rounding adds cannot be kept: an owner holds single rows, under signs that are others in the next op, and only a
whole group can be rotated back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.decode import decode
from tailbound.codec.format import BYTES
from tailbound.codec.hashing import STAGE_CONTRIBUTION
from tailbound.codec.mean import empty_columns
from tailbound.codec.records import Coding, Packets, Received, Scales
from tailbound.codec.scale import scales_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape
from tailbound.wire.jit import compiled
from tailbound.wire.schema import HEADER_BYTES


def read_back(packets: Packets, source: NDArray[np.int64], scale: NDArray[np.float32]) -> Received:
    """The ``packets`` of ``encode`` as ``decode`` reads them; ``source`` i64[T] and ``scale`` f32[T]: memory for it."""
    np.subtract(-2, packets.position, out=source)
    return Received(packets.memory, packets.memory, source, scale)


@compiled
def _zeros(payload, form):  # type: ignore[no-untyped-def]
    """Codes of a row, in bytes or halves of them, that mean zero."""
    zeros, zero = 0, form.zero
    if form.packing == BYTES:
        for code in payload:
            zeros += code == zero
    else:
        for pair in payload:
            zeros += (pair & 15 == zero) + (pair >> 4 == zero)
    return zeros


@compiled
def _mark(own, layout, codes, form, lo, hi):  # type: ignore[no-untyped-def]
    """Makes the scales of rows of groups ``lo`` to ``hi`` negative whose offsets the owner will take off.

    That is what the owner would do if all ranks had these codes (``codec.mean``): what others have is not known here.
    """
    for k in range(layout.rows[lo], layout.rows[hi]):
        g, entries = layout.of[k], codes * 8 // form.bits
        zeros = _zeros(own.own[-own.source[k] - 2, HEADER_BYTES : HEADER_BYTES + codes], form)
        empty = empty_columns(layout, g, entries)
        if 2 * (zeros - empty) <= entries - empty:
            own.scale[k] = -own.scale[k]


def write_residual(
    data: NDArray[np.float32],
    own: Received,
    scales: Scales,
    shape: Shape,
    coding: Coding,
    residual: NDArray[np.float32],
    scratch: Scratch,
    *,
    groups: tuple[int, int] | None = None,
) -> None:
    """Writes ``data`` minus what its codes say.

    Args:
        data: f32[numel], what ``encode`` was given.
        own: of ``read_back``; the scales are written.
        scales, shape, coding: of ``encode``.
        residual: f32[numel], written, C-contiguous; not ``data`` itself.
        groups: only the groups of this half-open range; ``own`` and ``residual`` are written there alone.

    Raises:
        ValueError: an array does not fit the shape.
    """
    lo, hi = groups or (0, shape.groups)
    mark_own(own, scales, shape, coding, (lo, hi))
    decode(own, shape, coding, residual, scratch, groups=(lo, hi), stage=STAGE_CONTRIBUTION)
    entries = slice(shape.layout.entries[lo], shape.layout.entries[hi])
    np.subtract(data[entries], residual[entries], out=residual[entries])


def mark_own(own: Received, scales: Scales, shape: Shape, coding: Coding, groups: tuple[int, int]) -> None:
    """Writes what the own rows of ``groups`` mean: their scales."""
    lo, hi = groups
    layout, part = shape.layout, slice(lo, hi)
    told = scales_of(scales.exponents[part]) * scales.weights[part]
    rows = slice(layout.rows[lo], layout.rows[hi])
    own.scale[rows] = told[layout.of[rows] - lo]
    if coding.rotate and shape.code.offsets:
        _mark(own, layout, shape.codes, shape.code, lo, hi)
