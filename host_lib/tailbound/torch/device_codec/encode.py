"""From gradients on a device to u8 codes on the same device (codec-3, codec-4 and codec-7).

Every operation is one that IEEE 754 defines and is done in the order of ``codec.encode``, so that the codes are those
of the host to the bit, whatever the device; what is decided by group is decided on the host (``codec.plan``). Nothing
here waits for the device.
"""

from __future__ import annotations

import torch

from tailbound.codec.balance import EVEN, Ranges
from tailbound.codec.shape import Shape
from tailbound.torch.device_codec.balance import scale
from tailbound.torch.device_codec.hashing import columns, flip_signs, offsets
from tailbound.torch.device_codec.rotation import transform


def rotated(x: torch.Tensor, shape: Shape, seed: int, *, rotate: bool = True, ranges: Ranges = EVEN) -> torch.Tensor:
    """H_R (s * x) of ``x`` (any float type, [numel]), padded with zeros, not normalised: f32[G, R, V].

    Without ``rotate``, ``x`` itself in that form. Exponents of ``ranges`` are taken off before.
    """
    y = torch.empty((shape.groups, shape.group_rows, shape.codes), dtype=torch.float32, device=x.device)
    flat = y.view(-1)
    flat[: shape.numel].copy_(x)
    scale(flat[: shape.numel], ranges.down, ranges)
    flat[shape.numel :].zero_()
    if not rotate:
        return y
    flip_signs(y, seed)
    return transform(y)


def largest_bits(y: torch.Tensor) -> torch.Tensor:
    """Bits of the largest absolute value of each group of f32[G, R, V]: i32[G]; NaN and Inf are the largest."""
    return (y.view(torch.int32) & 0x7FFFFFFF).amax(dim=(1, 2))


def count_beyond(y: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Entries of f32[G, R, V] that are larger than the limit of their group (f32[G]): i64[]."""
    return (y.abs() > limits[:, None, None]).sum()


def quantised(y: torch.Tensor, factors: torch.Tensor, keys: torch.Tensor, rounding: int) -> torch.Tensor:
    """clamp(floor(y * factor + 128 + u), 1, 255) of f32[G, R, V] (overwritten) and f32[G]: u8[T, V].

    Args:
        y: rotated values, finite.
        factors: by group.
        keys: i32[T], of the rounding offsets (``codec.plan``).
        rounding: ``hashing.rounding_seed`` of the op's contributions.
    """
    groups, rows, codes = y.shape
    y *= factors[:, None, None]
    values = y.view(groups * rows, codes)
    values += offsets(keys, columns(rounding, codes, y.device))
    return values.clamp_(1.0, 255.0).to(torch.uint8)
