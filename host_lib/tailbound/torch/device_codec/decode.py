"""From codes on a device to averages on the same device (codec-11).

Every rank must get the same bits from the same codes, also where some decode on the host and some on a GPU: the
operations and their order are those of ``codec.decode``, each rounded once (no TF32, no fused multiply-add: separate
operations of torch are never contracted). Nothing here waits for the device.
"""

from __future__ import annotations

import torch

from tailbound.codec.balance import EVEN, Ranges
from tailbound.codec.planes import zero_of
from tailbound.codec.shape import Shape
from tailbound.torch.device_codec.balance import scale
from tailbound.torch.device_codec.hashing import columns, flip_signs, left_below
from tailbound.torch.device_codec.rotation import transform


def values_of_codes(
    codes: torch.Tensor, keys: torch.Tensor, factors: torch.Tensor, rounding: int, bits: int = 8
) -> torch.Tensor:
    """(code - zero) * factor of u8[T, V] and f32[T], less rounding offsets where there is a key: f32[T, V].

    Codes of 16 bits have no offsets taken off.

    Args:
        codes: of the rows of an op; of 4 bits two in a byte, u8[T, V / 2], of 16 bits in two bytes, u8[T, 2 V].
        keys, factors: i32[T] and f32[T] of ``codec.staging.Unpacked``.
        rounding: ``hashing.rounding_seed`` of the op's results, or contributions.
        bits: of a code.
    """
    if bits == 16:
        upper, lower = codes.int().view(len(codes), 2, -1).unbind(1)
        exact: torch.Tensor = ((upper << 8) + lower - zero_of(bits)).float()
        return exact.mul_(factors[:, None])
    if bits == 4:
        eights = codes.view(len(codes), -1, 8)
        codes = torch.stack((eights & 15, eights >> 4), 2).flatten(1)
    parts = columns(rounding, codes.shape[1], codes.device)
    fixed = codes.int().bitwise_left_shift_(16).bitwise_or_(left_below(keys, parts))
    fixed -= ((keys >= 0).int() * 32767 + (zero_of(bits) << 16))[:, None]
    values = fixed.float()
    values *= (factors * 2.0**-16)[:, None]
    return values


def values_of_sums(octets: torch.Tensor, zeros: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """(sum - zero) * factor of a switch's sums: u8[T, 2 V] (big-endian u16), i32[T] and f32[T] give f32[T, V]."""
    words = octets.view(octets.shape[0], -1, 2).int()
    total = (words[..., 0] << 8) + words[..., 1] - zeros[:, None]
    values = total.float()
    values *= factors[:, None]
    return values


def restore(
    values: torch.Tensor,
    group_factors: torch.Tensor,
    shape: Shape,
    seed: int,
    out: torch.Tensor,
    *,
    rotate: bool = True,
    failed: bool = False,
    ranges: Ranges = EVEN,
) -> None:
    """Rotated values (f32[T, V], overwritten; +0 where missing) back into ``out`` (any float type, [numel]).

    Args:
        values: by row.
        group_factors: f32[G], sqrt(R) / received, 0 where nothing was; not read without ``rotate``.
        shape: how the bucket is cut into rows.
        seed: ``hashing.seed_of(cookie, op)``.
        out: written, rounded to its type last.
        rotate: whether the op is rotated; without it nothing is corrected.
        failed: whether there are groups of which nothing was received.
        ranges: whose exponents are put on again.
    """
    y = values.view(shape.groups, shape.group_rows, shape.entries)
    if rotate:
        y = transform(y)
        y *= group_factors[:, None, None]
        flip_signs(y, seed)
        if failed:  # zero, and not minus zero
            y.masked_fill_((group_factors == 0)[:, None, None], 0.0)
    found = y.view(-1)[: shape.numel]
    scale(found, ranges.up, ranges)
    out.copy_(found)
