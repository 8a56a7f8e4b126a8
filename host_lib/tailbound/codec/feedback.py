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
from tailbound.codec.scale import scales_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape


def write_residual(
    data: NDArray[np.float32],
    packets: NDArray[np.uint8],
    position: NDArray[np.int32],
    exponents: NDArray[np.int16],
    shift: NDArray[np.uint8],
    skipped: NDArray[np.uint8],
    shape: Shape,
    seed: int,
    scratch: Scratch,
    source: NDArray[np.int64],
    scale: NDArray[np.float32],
    residual: NDArray[np.float32],
    *,
    rotate: bool = True,
    groups: tuple[int, int] | None = None,
) -> None:
    """Writes ``data`` minus what its codes say; all of ``data`` where a group was not coded.

    Args:
        data: f32[numel], what ``encode`` was given.
        packets, position, exponents, shift, skipped: of ``encode``.
        seed: ``hashing.seed_of(cookie, op)``.
        source, scale: i64[T] and f32[T], working memory.
        residual: f32[numel], written, C-contiguous; not ``data`` itself.
        rotate: as given to ``encode``.
        groups: only the groups of this half-open range; ``source``, ``scale`` and ``residual`` are written there alone.

    Raises:
        ValueError: an array does not fit the shape.
    """
    lo, hi = groups or (0, shape.groups)
    part = slice(lo, hi)
    by_group = source.reshape(shape.groups, shape.group_rows)[part]
    np.negative(position.reshape(shape.groups, shape.group_rows)[part], out=by_group)
    by_group -= 2  # decode.own_source of every packet position
    by_group[skipped[part].astype(bool)] = MISSING
    told = np.where(skipped[part], np.int16(0), exponents[part]) + 4 * shift[part].astype(np.int16)
    scale.reshape(shape.groups, shape.group_rows)[part] = scales_of(told)[:, None]
    decode(packets, packets, source, scale, shape, seed, scratch, residual, rotate=rotate, groups=(lo, hi))
    size = shape.group_rows * shape.entries
    entries = slice(lo * size, hi * size)
    np.subtract(data[entries], residual[entries], out=residual[entries])
