"""Signs and rounding offsets by hash, as torch operations: the bits of ``codec.hashing`` on any device.

The hash works on u32. torch multiplies few unsigned types, and i64 would move twice the bytes, so words are i32 here:
products wrap alike, and only shifts to the right need a mask.
"""

from __future__ import annotations

import torch

from tailbound.codec.hashing import COLUMN, mix

#: Sign bit of a float32, as i32.
SIGN = -(1 << 31)
#: 128 as float32 has a unit of 2^-16 in its last place, 32768 one of 2^-8: bits put there make zero + u.
_OFFSET_BITS, _OFFSET_BITS_16 = 0x43000000, 0x47000000


def signed(word: int) -> int:
    """The i32 with the bits of a u32 (``word`` is taken modulo 2**32)."""
    return (word + (1 << 31) & 0xFFFFFFFF) - (1 << 31)


_C1, _C2 = signed(0x85EBCA6B), signed(0xC2B2AE35)


def fmix(h: torch.Tensor, *, top_only: bool = False) -> torch.Tensor:
    """Finaliser of MurmurHash3 of every word of ``h`` (i32, any shape), in place.

    ``top_only``: only the upper 16 bits are right, one step less.
    """
    h ^= (h >> 16) & 0xFFFF
    h *= _C1
    h ^= (h >> 13) & 0x7FFFF
    h *= _C2
    if not top_only:
        h ^= (h >> 16) & 0xFFFF
    return h


def flip_signs(y: torch.Tensor, seed: int) -> None:
    """Multiplies f32 ``y`` (contiguous; entry i is entry i of the op) by the op's signs, in place (codec-3)."""
    bits = y.view(-1).view(torch.int32)
    h = torch.arange(bits.numel(), dtype=torch.int32, device=y.device)
    bits ^= fmix(h.add_(signed(seed)), top_only=True).bitwise_and_(SIGN)


def columns(rounding: int, codes: int, device: torch.device) -> torch.Tensor:
    """The parts of the columns in the rounding offsets of ``rounding`` (``codec.hashing.rounding_seed``): i32[V]."""
    h = torch.arange(codes, dtype=torch.int32, device=device).add_(signed(mix(rounding ^ COLUMN)))
    return (fmix(h, top_only=True) >> 16).bitwise_and_(0xFFFF)


def offsets(keys: torch.Tensor, parts: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """128 + u for every entry of a contribution, 32768 + u with codes of 16 ``bits``: f32[T, V] (codec-7, codec-12).

    Args:
        keys: i32[T], of the rows (``codec.plan``).
        parts: i32[V], of the columns.
        bits: of a code.
    """
    u = (keys[:, None] + parts).bitwise_and_(0xFFFF)
    if bits == 16:
        return (u >> 8).bitwise_or_(_OFFSET_BITS_16).view(torch.float32)
    return u.bitwise_or_(_OFFSET_BITS).view(torch.float32)


def left_below(keys: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """65535 - u for every entry of results, in units of 2^-16: i32[T, V]; 0 in rows without (a key of -1)."""
    below = (keys[:, None] - parts).bitwise_and_(0xFFFF)
    return below.masked_fill_((keys < 0)[:, None], 0)
