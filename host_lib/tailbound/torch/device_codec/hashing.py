"""Signs and rounding offsets by hash, as torch operations: the bits of ``codec.hashing`` on any device.

The hash works on u32. torch multiplies few unsigned types, and i64 would move twice the bytes, so words are i32 here:
products wrap alike, and only shifts to the right need a mask.
"""

from __future__ import annotations

import torch

#: Sign bit of a float32, as i32.
SIGN = -(1 << 31)
#: 128 as float32 has a unit of 2^-16 in its last place: 16 bits put there make 128 + u.
_OFFSET_BITS = 0x43000000


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


def offsets(keys: torch.Tensor, codes: int) -> torch.Tensor:
    """128 + u for every entry of a contribution: f32[T, V] (codec-7).

    Args:
        keys: i32[T / 2], ``codec.hashing.row_key`` of each pair of rows: the even row takes the low bits, the odd one
            the high bits.
        codes: V.
    """
    h = fmix(keys[:, None] + torch.arange(codes, dtype=torch.int32, device=keys.device))
    bits = torch.empty((keys.numel(), 2, codes), dtype=torch.int32, device=keys.device)
    torch.bitwise_and(h, 0xFFFF, out=bits[:, 0])
    torch.bitwise_and(h >> 16, 0xFFFF, out=bits[:, 1])
    return bits.bitwise_or_(_OFFSET_BITS).view(torch.float32).view(-1, codes)
