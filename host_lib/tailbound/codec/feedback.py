"""What a rank's own codes leave unsaid of its gradient: the residual of error feedback.

EF-SGD (Karimireddy et al., ICML 2019) adds the residual of one step to the gradient of the next, so that what rounding
and clipping have kept back is sent later and not lost. Here the residual is that of the contribution. What the owner's
second rounding adds cannot be kept: an owner holds single rows, under signs that are others in the next op, and only a
whole group can be rotated back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.decode import decode_at, lay, lay_op
from tailbound.codec.format import BYTES, FORMATS, CodeFormat
from tailbound.codec.hashing import STAGE_CONTRIBUTION
from tailbound.codec.laid import laid, words_at
from tailbound.codec.loader import loader
from tailbound.codec.mean import empty_columns
from tailbound.codec.records import NO_RECEIVED, NO_SCALES, Coding, Packets, Received, Scales
from tailbound.codec.scale import scale_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import NO_GROUPS, Groups, Shape
from tailbound.codec.threads import Threads
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


@laid
class _Left(NamedTuple):
    """What the pass is called with; ``decode``: where the words are by which codes are read."""

    data: NDArray[np.float32]
    residual: NDArray[np.float32]
    own: Received
    scales: Scales
    layout: Groups
    code: CodeFormat
    codes: int
    signed: bool
    decode: int


_NOTHING: NDArray[np.float32] = np.zeros(1, np.float32)
_left_at = loader(_Left(_NOTHING, _NOTHING, NO_RECEIVED, NO_SCALES, NO_GROUPS, FORMATS[8], 0, False, 0))


@compiled
def _mark_own(call, lo, hi):  # type: ignore[no-untyped-def]
    layout, scales = call.layout, call.scales
    for k in range(layout.rows[lo], layout.rows[hi]):
        g = layout.of[k]
        call.own.scale[k] = scale_of(np.int64(scales.exponents[g])) * scales.weights[g]
    if call.signed:
        _mark(call.own, layout, call.codes, call.code, lo, hi)


@compiled
def _residual_at(at, lo, hi, memory_at):  # type: ignore[no-untyped-def]
    call = _left_at(at)
    _mark_own(call, lo, hi)
    failed = decode_at(call.decode, lo, hi, memory_at)
    first, last = call.layout.entries[lo], call.layout.entries[hi]
    data, residual = call.data[first:last], call.residual[first:last]
    for i in range(len(residual)):
        residual[i] = data[i] - residual[i]
    return failed


@compiled
def _own_at(at, lo, hi, memory_at):  # type: ignore[no-untyped-def]
    _mark_own(_left_at(at), lo, hi)
    return 0


def write_residual(
    data: NDArray[np.float32],
    own: Received,
    scales: Scales,
    shape: Shape,
    coding: Coding,
    residual: NDArray[np.float32],
    threads: Threads | Scratch,
) -> None:
    """Writes ``data`` minus what its codes say.

    Args:
        data: f32[numel], what ``encode`` was given.
        own: of ``read_back``; the scales are written.
        scales, shape, coding: of ``encode``.
        residual: f32[numel], written, C-contiguous; not ``data`` itself.
        threads: share the work.

    Raises:
        ValueError: an array does not fit the shape.
    """
    scratch = threads.scratch
    lay(scratch.call, own, shape, coding, scratch.width, STAGE_CONTRIBUTION)
    lay_op(scratch.call, own, shape, coding, residual)
    left = _left(data, residual, own, scales, shape, coding, scratch.call_at)
    if threads.run(_residual_at, words_at(left), shape.groups) < 0:
        raise ValueError("own codes do not fit the shape")


def mark_own(own: Received, scales: Scales, shape: Shape, coding: Coding) -> None:
    """Writes what the own rows mean: their scales."""
    left = _left(_NOTHING, _NOTHING, own, scales, shape, coding, 0)
    _own_at(words_at(left), 0, shape.groups, 0)


def _left(
    data: NDArray[np.float32], residual: NDArray[np.float32], own: Received, scales: Scales, shape: Shape,
    coding: Coding, decode: int,
) -> _Left:  # fmt: skip
    signed = coding.rotate and shape.code.offsets
    return _Left(data, residual, own, scales, shape.layout, shape.code, shape.codes, signed, decode)
