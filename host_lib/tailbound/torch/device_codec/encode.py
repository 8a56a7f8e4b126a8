"""From gradients on a device to bytes of codes on the same device (codec-3, codec-4 and codec-7).

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


def padded(x: torch.Tensor, shape: Shape, ranges: Ranges = EVEN) -> torch.Tensor:
    """``x`` (any float type, [numel]) with zeros behind it and exponents of ``ranges`` taken off: f32[G, R, V]."""
    y = torch.empty((shape.groups, shape.group_rows, shape.entries), dtype=torch.float32, device=x.device)
    flat = y.view(-1)
    flat[: shape.numel].copy_(x)
    scale(flat[: shape.numel], ranges.down, ranges)
    flat[shape.numel :].zero_()
    return y


def rotated(y: torch.Tensor, seed: int) -> torch.Tensor:
    """H_R (s * y) of f32[G, R, V], which is overwritten; not normalised."""
    flip_signs(y, seed)
    return transform(y)


def squares(y: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each group of f32[G, R, V], taken in float64: f64[G].

    The last bits depend on the order of additions. They decide nothing but what scale this rank asks for, and only
    where 2.4 standard deviations are a quarter power of two to 15 digits.
    """
    norms: torch.Tensor = torch.linalg.vector_norm(y.flatten(1), dim=1, dtype=torch.float64)
    return norms.square_()


def largest_bits(y: torch.Tensor) -> torch.Tensor:
    """Bits of the largest absolute value of each group of f32[G, R, V]: i32[G]; NaN and Inf are the largest."""
    return (y.view(torch.int32) & 0x7FFFFFFF).amax(dim=(1, 2))


def count_beyond(y: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Entries of f32[G, R, V] that are larger than the limit of their group (f32[G]): i64[]."""
    return (y.abs() > limits[:, None, None]).sum()


def quantised(y: torch.Tensor, factors: torch.Tensor, keys: torch.Tensor, rounding: int, bits: int = 8) -> torch.Tensor:
    """clamp(floor(y * factor + 128 + u), 1, 255) of f32[G, R, V] (overwritten) and f32[G]: u8[T, V].

    Of 4 bits clamped to 121 and 135, less 120, two in a byte: u8[T, V / 2]. Of 16 bits with 32768 and 65535 in
    the place of 128 and 255, first all upper bytes of a row: u8[T, 2 V] (``codec.planes``).

    Args:
        y: rotated values, finite.
        factors: by group.
        keys: i32[T], of the rounding offsets (``codec.plan``).
        rounding: ``hashing.rounding_seed`` of the op's contributions.
        bits: of a code.
    """
    groups, rows, codes = y.shape
    y *= factors[:, None, None]
    values = y.view(groups * rows, codes)
    values += offsets(keys, columns(rounding, codes, y.device), bits)
    if bits == 8:
        return values.clamp_(1.0, 255.0).to(torch.uint8)
    if bits == 16:
        words = values.clamp_(1.0, 65535.0).int()
        return torch.cat((words >> 8, words & 255), 1).to(torch.uint8)
    lower, upper = (values.clamp_(121.0, 135.0).to(torch.uint8) - 120).view(len(values), -1, 2, 8).unbind(2)
    return (lower | upper << 4).flatten(1)
