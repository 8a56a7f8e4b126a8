"""Signs and rounding offsets (codec-3, codec-7): hashes computed in the loops instead of stored.

Signs are equal on all ranks and new in every op (fixed ones would lose the same directions for ever); rounding offsets
also depend on the rank, because equal gradients rounded alike do not average. Both come from the finaliser of
MurmurHash3 (A. Appleby, public domain): a hash with one multiplication is not random enough.

numba promotes ``uint32 * uint32`` to 64 bits, so every step is cast back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tailbound.wire.jit import compiled

#: Typed loosely: the compiler of numba calls these, not Python.
_kernel: Any = intrinsic
_U32 = 0xFFFFFFFF
#: Keeps the rounding of contributions and of results apart.
STAGE_CONTRIBUTION = 1
STAGE_RESULT = 2

_C1 = np.uint32(0x85EBCA6B)
_C2 = np.uint32(0xC2B2AE35)
_S13, _S16 = np.uint32(13), np.uint32(16)


@_kernel
def bits_of(context: Any, value: Any) -> Any:
    """Bits of a float32 as uint32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), emit


@_kernel
def float_of(context: Any, value: Any) -> Any:
    """float32 with the bits of a uint32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), emit


@compiled
def fmix(h: Any) -> Any:
    """Finaliser of MurmurHash3, 32 bits."""
    h = np.uint32(h ^ (h >> _S16))
    h = np.uint32(h * _C1)
    h = np.uint32(h ^ (h >> _S13))
    h = np.uint32(h * _C2)
    return np.uint32(h ^ (h >> _S16))


def mix(value: int) -> int:
    """``fmix`` of a Python integer (taken modulo 2**32)."""
    value &= _U32
    value = (value ^ value >> 16) * 0x85EBCA6B & _U32
    value = (value ^ value >> 13) * 0xC2B2AE35 & _U32
    return value ^ value >> 16


def seed_of(cookie: int, op: int) -> int:
    """The op's seed, a u32: base of the sign hash, the same on all ranks."""
    return mix(mix(cookie + 0x9E3779B9) + op)


def rounding_seed(seed: int, rank: int, stage: int) -> int:
    """Seed of the rounding offsets of ``rank`` in the op with ``seed``, a u32; ``stage`` as above."""
    return mix(mix(seed ^ 0x5BD1E995) + (rank << 8 | stage))


_ROW = np.uint32(0x9E3779B1)


@compiled
def row_key(seed: Any, row: Any) -> Any:
    """Key of the rounding offsets of a row (results), or of a pair of rows (contributions).

    Column w of a row takes 16 bits of ``fmix(key + w)``. Contributions: rows 2m and 2m + 1 share the key of m, the even
    row takes the low bits, the odd one the high bits. Results: the high bits, w counted in lanes of the sums ring.
    """
    return fmix(np.uint32(seed + np.uint32(row * _ROW)))
