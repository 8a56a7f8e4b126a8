"""What a rank's own codes leave unsaid of its gradient: the residual of error feedback.

EF-SGD (Karimireddy et al., ICML 2019) adds the residual of one step to the gradient of the next, so that what rounding
and clipping have kept back is sent later and not lost. Here the residual is that of the contribution. What the owner's
second rounding adds cannot be kept: an owner holds single rows, under signs that are others in the next op, and only a
whole group can be rotated back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.decode import MISSING, decode
from tailbound.codec.records import Coding, Packets, Received, Scales
from tailbound.codec.scale import scales_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape


def read_back(packets: Packets, source: NDArray[np.int64], scale: NDArray[np.float32]) -> Received:
    """The ``packets`` of ``encode`` as ``decode`` reads them; ``source`` i64[T] and ``scale`` f32[T]: memory for it."""
    np.subtract(-2, packets.position, out=source)
    return Received(packets.memory, packets.memory, source, scale)


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
    """Writes ``data`` minus what its codes say; all of ``data`` where a group was not coded.

    Args:
        data: f32[numel], what ``encode`` was given.
        own: of ``read_back``; rows that were not coded are taken out, and the scales written.
        scales, shape, coding: of ``encode``.
        residual: f32[numel], written, C-contiguous; not ``data`` itself.
        groups: only the groups of this half-open range; ``own`` and ``residual`` are written there alone.

    Raises:
        ValueError: an array does not fit the shape.
    """
    lo, hi = groups or (0, shape.groups)
    part = slice(lo, hi)
    skipped = scales.skipped[part]
    own.source.reshape(shape.groups, shape.group_rows)[part][skipped.astype(bool)] = MISSING
    told = np.where(skipped, np.int16(0), scales.exponents[part]) + 4 * scales.shift[part].astype(np.int16)
    own.scale.reshape(shape.groups, shape.group_rows)[part] = scales_of(told)[:, None]
    decode(own, shape, coding, residual, scratch, groups=(lo, hi))
    size = shape.group_rows * shape.entries
    entries = slice(lo * size, hi * size)
    np.subtract(data[entries], residual[entries], out=residual[entries])
