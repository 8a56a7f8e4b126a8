"""Signs and rounding offsets (codec-3, codec-7): hashes computed in the loops instead of stored.

Signs are equal on all ranks and new in every op (fixed ones would lose the same directions for ever). Both come from
the finaliser of MurmurHash3 (A. Appleby, public domain): a hash with one multiplication is not random enough.

A rounding offset is a fraction of a code, in units of 2^-16: ``(column + row) mod 2^16``, with a hash of the column and
one of the row. Any two offsets are independent, and errors of unbiased rounding are then uncorrelated: nothing in an
error's mean or variance tells them from a hash an entry, and a loop over a row only adds. They are the same on all
ranks, so that a sum of codes with any weights has one offset, times the sum of the weights (``codec.mean``).

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


_STAGES = np.uint32(0x5BD1E995)
_ROW = np.uint32(0x9E3779B1)
#: Keeps columns and rows apart.
COLUMN = 0xA511E9B3
_COLUMN = np.uint32(COLUMN)


@compiled
def rounding_seed(seed: Any, stage: Any) -> Any:
    """Seed of the rounding offsets in the op with ``seed``, a u32, the same on all ranks; ``stage`` as above."""
    return fmix(np.uint32(fmix(np.uint32(np.uint32(seed) ^ _STAGES)) + np.uint32(stage)))


@compiled
def row_key(rounding: Any, row: Any) -> Any:
    """The part of row k in its rounding offsets; the lower 16 bits count."""
    return fmix(np.uint32(rounding + np.uint32(np.uint32(row) * _ROW)))


@compiled
def write_signs(seed: Any, row: Any, rows: Any, codes: Any, signs: Any) -> None:
    """The signs of a group of ``rows`` from ``row`` on, u32: 32 of a column a word, the first one its top bit."""
    first = np.uint32(seed + np.uint32(row * codes))
    for j in range(codes if rows <= 32 else 2 * codes):
        signs[j] = fmix(np.uint32(first + np.uint32(j)))


@compiled
def write_columns(rounding: Any, columns: Any) -> None:
    """The parts of the columns in the rounding offsets: u16[V], written."""
    first = fmix(np.uint32(rounding ^ _COLUMN))
    for j in range(columns.shape[0]):
        columns[j] = fmix(np.uint32(first + np.uint32(j))) >> _S16


@compiled
def write_lanes(rounding: Any, columns: Any) -> None:
    """The same in the lane order of the sums ring: of eight columns 0 2 4 6, then 1 3 5 7."""
    first = fmix(np.uint32(rounding ^ _COLUMN))
    for j in range(columns.shape[0]):
        lane = j & 7
        column = (j & ~7) + (2 * lane if lane < 4 else 2 * lane - 7)
        columns[j] = fmix(np.uint32(first + np.uint32(column))) >> _S16
