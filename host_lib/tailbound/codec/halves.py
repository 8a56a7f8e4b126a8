"""Gradients in half precision: a group at a time is widened to float32, or narrowed from it, while it lies in cache.

numpy has no bfloat16, so its bits come as uint16. What is narrowed goes to the nearest value, half-way to the even one,
as in torch. All of it is in integers, since not every machine converts float16 by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from tailbound.codec.laid import array_words
from tailbound.codec.shape import Shape
from tailbound.codec.simd import LANES, VF32, VI16, VI32, Emit
from tailbound.wire.jit import compiled

#: Typed loosely: the compiler of numba calls these, not Python.
_kernel: Any = intrinsic
_INDEX = types.int64

#: A bucket: f32[n], f16[n], or the bits of bfloat16 as u16[n].
Floats: TypeAlias = NDArray[Any]
BFLOAT16, FLOAT16 = np.dtype(np.uint16), np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
_KNOWN = FLOAT32, BFLOAT16, FLOAT16
_WHOLE, _BFLOAT16, _FLOAT16 = 0, 1, 2


class Entries(NamedTuple):
    """A bucket as compiled passes take it, of one type whatever its entries are.

    Attributes:
        whole: f32[n], or nothing.
        half: u16[n], or nothing.
        kind: of the entries.
    """

    whole: NDArray[np.float32]
    half: NDArray[np.uint16]
    kind: int


#: One of each type, for ``codec.loader``.
NO_ENTRIES = Entries(np.zeros(0, np.float32), np.zeros(0, np.uint16), _WHOLE)


def entry_words(name: str, values: Floats, shape: Shape) -> tuple[int, ...]:
    """``values`` as words (``codec.laid``) of ``Entries``.

    Raises:
        ValueError: they are no bucket of ``shape``.
    """
    dtype = values.dtype
    if dtype not in _KNOWN or values.shape != (shape.numel,) or not values.flags.c_contiguous:
        raise ValueError(
            f"{name} {dtype}{values.shape} is not a contiguous float32 array of {shape.numel} entries, nor one "
            "of float16 or, for bfloat16, uint16"
        )
    at, count = array_words(values)
    if dtype == FLOAT32:
        return at, count, 0, 0, _WHOLE
    return 0, 0, at, count, _BFLOAT16 if dtype == BFLOAT16 else _FLOAT16


@compiled
def count(x):  # type: ignore[no-untyped-def]
    """How many entries there are."""
    return max(x.whole.shape[0], x.half.shape[0])


@compiled
def address(x, index):  # type: ignore[no-untyped-def]
    """Where entry ``index`` is, and bytes of an entry."""
    if x.kind == _WHOLE:
        return np.int64(x.whole.ctypes.data) + 4 * index, 4
    return np.int64(x.half.ctypes.data) + 2 * index, 2


_VECTORS = {2: VI16, 4: VI32}


def _conversion(come_bytes: int, go_bytes: int, convert: Callable[[Emit, Any], Any]) -> Any:
    """Entries of ``come_bytes`` to entries of ``go_bytes``: what ``convert`` makes of their bits."""

    @_kernel
    def run(typing: Any, source: Any, first: Any, columns: Any, target: Any, into: Any) -> Any:
        """``columns`` entries of ``source`` from ``first`` on to ``target`` from ``into`` on."""
        signature = types.void(source, _INDEX, _INDEX, target, _INDEX)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            come, go = e.address(sig.args[0], args[0], args[1]), e.address(sig.args[3], args[3], args[4])
            with e.columns(args[2]) as column:
                bits = e.load(e.step(come, column, come_bytes), _VECTORS[come_bytes], come_bytes)
                e.store(convert(e, bits), e.step(go, column, go_bytes), go_bytes)
            return context.get_dummy_value()

        return signature, emit

    return run


def _from_bfloat16(e: Emit, bits: Any) -> Any:
    """Bits of bfloat16 as those of float32."""
    return e.b.shl(e.b.zext(bits, VI32), e.const(VI32, 16))


def _from_half(e: Emit, bits: Any) -> Any:
    """Bits of float16 as those of float32; subnormal ones are taken up by a subtraction."""
    b = e.b
    bits = b.zext(bits, VI32)
    exponent = b.and_(bits, e.const(VI32, 0x7C00))
    size = b.add(b.shl(b.and_(bits, e.const(VI32, 0x7FFF)), e.const(VI32, 13)), e.const(VI32, 112 << 23))
    infinite = b.icmp_unsigned("==", exponent, e.const(VI32, 0x7C00))
    size = b.select(infinite, b.add(size, e.const(VI32, 112 << 23)), size)
    least = b.bitcast(e.const(VI32, 113 << 23), VF32)
    small = b.bitcast(b.fsub(b.bitcast(b.add(size, e.const(VI32, 1 << 23)), VF32), least), VI32)
    size = b.select(b.icmp_unsigned("==", exponent, e.const(VI32, 0)), small, size)
    return b.or_(size, b.shl(b.and_(bits, e.const(VI32, 0x8000)), e.const(VI32, 16)))


def _rounded(e: Emit, bits: Any, dropped: int) -> Any:
    """Bits of float32, so that the upper ones are right when ``dropped`` are cut off."""
    odd = e.b.and_(e.b.lshr(bits, e.const(VI32, dropped)), e.const(VI32, 1))
    return e.b.add(e.b.add(bits, e.const(VI32, (1 << dropped - 1) - 1)), odd)


def _to_bfloat16(e: Emit, bits: Any) -> Any:
    """Bits of float32 as those of bfloat16."""
    return e.b.trunc(e.b.lshr(_rounded(e, bits, 16), e.const(VI32, 16)), VI16)


def _to_half(e: Emit, bits: Any) -> Any:
    """Bits of float32 as those of float16; what is subnormal there is rounded by an addition."""
    b = e.b
    size = b.and_(bits, e.const(VI32, 0x7FFFFFFF))
    usual = b.lshr(b.sub(_rounded(e, size, 13), e.const(VI32, 112 << 23)), e.const(VI32, 13))
    half = e.const(VI32, 126 << 23)
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, VF32), b.bitcast(half, VF32)), VI32), half)
    value = b.select(b.icmp_unsigned("<", size, e.const(VI32, 113 << 23)), small, usual)
    value = b.select(b.icmp_unsigned(">=", size, e.const(VI32, 143 << 23)), e.const(VI32, 0x7C00), value)
    value = b.select(b.icmp_unsigned(">", size, e.const(VI32, 0x7F800000)), e.const(VI32, 0x7E00), value)
    return b.trunc(b.or_(value, b.and_(b.lshr(bits, e.const(VI32, 16)), e.const(VI32, 0x8000))), VI16)


_widen_bfloat16, _widen_float16 = _conversion(2, 4, _from_bfloat16), _conversion(2, 4, _from_half)
_narrow_bfloat16, _narrow_float16 = _conversion(4, 2, _to_bfloat16), _conversion(4, 2, _to_half)


@compiled
def _widened(half, kind, first, entries, group, into):  # type: ignore[no-untyped-def]
    if kind == _BFLOAT16:
        _widen_bfloat16(half, first, entries, group, into)
    else:
        _widen_float16(half, first, entries, group, into)


@compiled
def _narrowed(group, first, entries, half, kind, into):  # type: ignore[no-untyped-def]
    if kind == _BFLOAT16:
        _narrow_bfloat16(group, first, entries, half, into)
    else:
        _narrow_float16(group, first, entries, half, into)


@compiled
def read(x, first, entries, group, row):  # type: ignore[no-untyped-def]
    """``entries`` of a bucket from ``first`` on as float32, to the beginning of ``group``; ``row`` u16: for work."""
    if x.kind == _WHOLE:
        for i in range(entries):  # a slice assignment might allocate
            group[i] = x.whole[first + i]
        return
    vectors = entries - entries % LANES
    _widened(x.half, x.kind, first, np.int64(vectors), group, np.int64(0))
    if vectors < entries:  # the end of the bucket: nothing behind it may be read
        for i in range(LANES):
            row[i] = x.half[first + vectors + i] if vectors + i < entries else 0
        _widened(row, x.kind, np.int64(0), np.int64(LANES), group, np.int64(vectors))


@compiled
def write(group, entries, out, first, row):  # type: ignore[no-untyped-def]
    """The beginning of ``group``, f32, as ``entries`` of a bucket from ``first`` on."""
    if out.kind == _WHOLE:
        for i in range(entries):  # a slice assignment might allocate
            out.whole[first + i] = group[i]
        return
    vectors = entries - entries % LANES
    _narrowed(group, np.int64(0), np.int64(vectors), out.half, out.kind, first)
    if vectors < entries:
        _narrowed(group, np.int64(vectors), np.int64(LANES), row, out.kind, np.int64(0))
        for i in range(entries - vectors):
            out.half[first + vectors + i] = row[i]


@compiled
def clear(out, first, last):  # type: ignore[no-untyped-def]
    """Makes entries zero."""
    if out.kind == _WHOLE:
        out.whole[first:last] = np.float32(0.0)
    else:
        out.half[first:last] = np.uint16(0)


def convert(values: Floats, out: Floats) -> None:
    """Writes ``values`` to ``out`` (of equal lengths) in the type of ``out``."""
    if values.dtype == out.dtype:
        out[:] = values
        return
    if values.dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        if out.dtype != BFLOAT16:
            out[:] = values
            return
        bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        out[:] = np.where(np.isnan(values), 0x7FC0, rounded)
