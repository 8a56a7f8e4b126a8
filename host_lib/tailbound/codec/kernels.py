"""The codec's inner loops: each sweeps over the columns of a few rows at once.

R = 8 P rows are transformed in two passes: P rows at distance 8 (P = 2, 4 or 8), then 8 neighbouring rows. Between the
passes a group lies in ``work``, which fits a second-level cache; the first pass reads from the bucket (or from result
rows), the second writes packets (or the bucket), so that a group is never stored in between.

All offsets and strides count elements; ``index`` is the hash index of the first element. Widths are multiples of 16.
Stages have the distances 8, 16, 32, then 1, 2, 4; the reference does the same.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from tailbound.codec.simd import F32, I32, I64, LANES, VF32, VI8, VI16, VI32, Emit

#: Typed loosely: the compiler of numba calls these, not Python.
_kernel: Any = intrinsic
_INDEX, _FLOAT, _WORD = types.int64, types.float32, types.uint32
_pair: Any = types.UniTuple
_PLACE = _pair(_INDEX, 2)
#: Order of codes in a vector's lanes of the sums ring, and back.
LANE_ORDER = tuple(i + j for i in range(0, LANES, 8) for j in (0, 2, 4, 6, 1, 3, 5, 7))
CODE_ORDER = tuple(LANE_ORDER.index(i) for i in range(LANES))


def _signs(e: Emit, index: Any) -> Any:
    """Sign bits of neighbouring entries."""
    h = e.fmix(e.b.add(e.splat(index), e.const(VI32, range(LANES))), top_only=True)
    return e.b.and_(h, e.const(VI32, 0x80000000))


def _flip(e: Emit, value: Any, signs: Any) -> Any:
    return e.b.bitcast(e.b.xor(e.b.bitcast(value, VI32), signs), VF32)


def _row_index(e: Emit, index: Any, row: int, stride: Any, column: Any) -> Any:
    at = e.b.add(e.b.mul(stride, I64(row)), column)
    return e.b.add(index, e.b.trunc(at, I32))


def _spread_rows(rows: int) -> Any:
    @_kernel
    def spread(typing: Any, x: Any, first: Any, stride: Any, index: Any, work: Any, into: Any, pitch: Any) -> Any:
        """Rows ``first + 8 p stride`` of ``x``, times signs, P-way butterflies, to rows ``into + 8 p pitch``."""
        signature = types.void(x, _INDEX, _INDEX, _WORD, work, _INDEX, _INDEX)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source = e.address(sig.args[0], args[0], args[1])
            target = e.address(sig.args[4], args[4], args[5])
            stride8, pitch8 = builder.mul(args[2], I64(8)), builder.mul(args[6], I64(8))
            with e.columns(args[2]) as column:
                values = []
                for p in range(rows):
                    at = builder.add(builder.mul(stride8, I64(p)), column)
                    value = e.load(e.step(source, at, 4), VF32, 4)
                    values.append(_flip(e, value, _signs(e, _row_index(e, args[3], p, stride8, column))))
                for p, value in enumerate(e.hadamard(values)):
                    at = builder.add(builder.mul(pitch8, I64(p)), column)
                    e.store(value, e.step(target, at, 4), 4)
            return context.get_dummy_value()

        return signature, emit

    return spread


spread2, spread4, spread8 = _spread_rows(2), _spread_rows(4), _spread_rows(8)


def _finish_rows(turn: bool, quantise: bool) -> Any:
    @_kernel
    def finish(
        typing: Any, work: Any, first: Any, pitch: Any, columns: Any, factor: Any, keys: Any, targets: Any, ahead: Any
    ) -> Any:
        """8 neighbouring rows of ``work``: butterflies, largest bits (returned), codes to the addresses ``targets``.

        ``keys`` u32[4]: rounding key of each pair of rows. ``ahead``: an address and the bytes of an entry; 8 rows of
        entries from there on are prefetched meanwhile.
        """
        signature = _WORD(work, _INDEX, _INDEX, _INDEX, _FLOAT, keys, targets, _PLACE)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source = e.address(sig.args[0], args[0], args[1])
            zero = e.const(VI32, 0)
            most = e.variable(zero)
            ahead, width = (builder.extract_value(args[7], i) for i in range(2))
            if quantise:
                key_at = e.address(sig.args[5], args[5])
                keys = [e.splat(e.load(e.step(key_at, I64(i), 4), I32, 4)) for i in range(4)]
                target_at = e.address(sig.args[6], args[6])
                targets = [e.load(e.step(target_at, I64(i), 8), I64, 8) for i in range(8)]
                scale = e.splat(args[4])
            with e.columns(args[3]) as column:
                values = []
                for row in range(8):
                    at = builder.add(builder.mul(args[2], I64(row)), column)
                    values.append(e.load(e.step(source, at, 4), VF32, 4))
                    coming = builder.add(builder.mul(args[3], I64(row)), column)
                    e.prefetch(builder.add(ahead, builder.mul(coming, width)))
                if turn:
                    values = e.hadamard(values)
                largest = builder.load(most)
                for value in values:
                    bits = builder.and_(builder.bitcast(value, VI32), e.const(VI32, 0x7FFFFFFF))
                    largest = e.umax(largest, bits)
                builder.store(largest, most)
                if quantise:
                    lanes = builder.add(e.splat(builder.trunc(column, I32)), e.const(VI32, range(LANES)))
                    for pair in range(4):
                        h = e.fmix(builder.add(keys[pair], lanes))
                        low = builder.and_(h, e.const(VI32, 0xFFFF))
                        high = builder.lshr(h, e.const(VI32, 16))
                        for row, u in ((2 * pair, low), (2 * pair + 1, high)):
                            offset = builder.bitcast(builder.or_(u, e.const(VI32, 0x43000000)), VF32)
                            code = e.clamp(builder.fadd(builder.fmul(values[row], scale), offset), 1.0, 255.0)
                            out = builder.trunc(builder.fptosi(code, VI32), VI8)
                            e.store(out, builder.add(targets[row], column), 1)
            return e.largest(builder.load(most))

        return signature, emit

    return finish


finish_turned, finish_plain = _finish_rows(True, True), _finish_rows(False, True)
measure_turned, measure_plain = _finish_rows(True, False), _finish_rows(False, False)


def _settle_rows(rows: int) -> Any:
    @_kernel
    def settle(typing: Any, work: Any, first: Any, pitch: Any, columns: Any) -> Any:
        """Butterflies over rows that are ``pitch`` apart, in place: those of ``finish`` for neighbours."""
        signature = types.void(work, _INDEX, _INDEX, _INDEX)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source = e.address(sig.args[0], args[0], args[1])
            with e.columns(args[3]) as column:
                at = [e.step(source, builder.add(builder.mul(args[2], I64(row)), column), 4) for row in range(rows)]
                for place, value in zip(at, e.hadamard([e.load(a, VF32, 4) for a in at]), strict=True):
                    e.store(value, place, 4)
            return context.get_dummy_value()

        return signature, emit

    return settle


settle2, settle4, settle = _settle_rows(2), _settle_rows(4), _settle_rows(8)


def _expand_rows(rows: int) -> Any:
    @_kernel
    def expand(
        typing: Any, sources: Any, factors: Any, first: Any, columns: Any, work: Any, into: Any, pitch: Any
    ) -> Any:
        """Codes at the addresses ``sources[first + 8 p]``, as (code - 128) * factor, P-way butterflies, to ``work``."""
        signature = types.void(sources, factors, _INDEX, _INDEX, work, _INDEX, _INDEX)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source_at = e.address(sig.args[0], args[0], args[2])
            factor_at = e.address(sig.args[1], args[1], args[2])
            sources = [e.load(e.step(source_at, I64(8 * p), 8), I64, 8) for p in range(rows)]
            factors = [e.splat(e.load(e.step(factor_at, I64(8 * p), 4), F32, 4)) for p in range(rows)]
            target = e.address(sig.args[4], args[4], args[5])
            pitch8 = builder.mul(args[6], I64(8))
            with e.columns(args[3]) as column:
                values = []
                for p in range(rows):
                    code = builder.zext(e.load(builder.add(sources[p], column), VI8, 1), VI32)
                    value = builder.sitofp(builder.sub(code, e.const(VI32, 128)), VF32)
                    values.append(builder.fmul(value, factors[p]))
                for p, value in enumerate(e.hadamard(values)):
                    e.store(value, e.step(target, builder.add(builder.mul(pitch8, I64(p)), column), 4), 4)
            return context.get_dummy_value()

        return signature, emit

    return expand


expand1, expand2, expand4, expand8 = _expand_rows(1), _expand_rows(2), _expand_rows(4), _expand_rows(8)


def _restore_rows(stream: bool) -> Any:
    @_kernel
    def restore(
        typing: Any, work: Any, first: Any, pitch: Any, factor: Any, index: Any, x: Any, into: Any, stride: Any
    ) -> Any:
        """8 neighbouring rows of ``work``: butterflies, times ``factor``, times signs, to rows of ``x``."""
        signature = types.void(work, _INDEX, _INDEX, _FLOAT, _WORD, x, _INDEX, _INDEX)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source = e.address(sig.args[0], args[0], args[1])
            target = e.address(sig.args[5], args[5], args[6])
            factor = e.splat(args[3])
            with e.columns(args[7]) as column:
                values = []
                for row in range(8):
                    at = builder.add(builder.mul(args[2], I64(row)), column)
                    values.append(e.load(e.step(source, at, 4), VF32, 4))
                for row, value in enumerate(e.hadamard(values)):
                    signs = _signs(e, _row_index(e, args[4], row, args[7], column))
                    value = _flip(e, builder.fmul(value, factor), signs)
                    at = builder.add(builder.mul(args[7], I64(row)), column)
                    e.store(value, e.step(target, at, 4), 4 * LANES if stream else 4, stream)
            return context.get_dummy_value()

        return signature, emit

    return restore


restore, restore_stream = _restore_rows(False), _restore_rows(True)


def _gather_row(ring: bool, own: bool) -> Any:
    @_kernel
    def gather(typing: Any, sums: Any, codes: Any, shift: Any, zero: Any, columns: Any, lanes: Any) -> Any:
        """Sums of one row, own codes shifted and added, into u16 lanes; returns the largest |sum - zero|.

        ``sums`` and ``codes`` are addresses; which of them are read is the variant's choice.
        """
        signature = _WORD(_INDEX, _INDEX, types.uint16, _WORD, _INDEX, lanes)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            target = e.address(sig.args[5], args[5])
            zero = e.splat(args[3])
            shift = e.splat(args[2])
            most = e.variable(e.const(VI32, 0))
            with e.columns(args[4]) as column:
                total = e.const(VI16, 0)
                if ring:
                    total = e.load(e.step(args[0], column, 2), VI16, 2)
                if own:
                    code = e.shuffle(e.load(builder.add(args[1], column), VI8, 1), LANE_ORDER)
                    total = builder.add(total, builder.shl(builder.zext(code, VI16), shift))
                e.store(total, e.step(target, column, 2), 2)
                d = builder.sub(builder.zext(total, VI32), zero)
                size = e.umin(d, builder.sub(e.const(VI32, 0), d))
                builder.store(e.umax(builder.load(most), size), most)
            return e.largest(builder.load(most))

        return signature, emit

    return gather


gather_ring, gather_own, gather_both = _gather_row(True, False), _gather_row(False, True), _gather_row(True, True)


@_kernel
def requantise(typing: Any, lanes: Any, zero: Any, factor: Any, key: Any, columns: Any, target: Any) -> Any:
    """u16 lanes as codes at the address ``target``: floor((sum - zero) * factor + 128 + u), u numbered by lane."""
    signature = types.void(lanes, _WORD, _FLOAT, _WORD, _INDEX, _INDEX)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emit(context, builder)
        source = e.address(sig.args[0], args[0])
        zero, factor, key = e.splat(args[1]), e.splat(args[2]), e.splat(args[3])
        with e.columns(args[4]) as column:
            d = builder.sub(builder.zext(e.load(e.step(source, column, 2), VI16, 2), VI32), zero)
            lane = builder.add(e.splat(builder.trunc(column, I32)), e.const(VI32, range(LANES)))
            h = e.fmix(builder.add(key, lane), top_only=True)
            u = builder.or_(builder.lshr(h, e.const(VI32, 16)), e.const(VI32, 0x43000000))
            value = builder.fadd(builder.fmul(builder.sitofp(d, VF32), factor), builder.bitcast(u, VF32))
            code = builder.trunc(builder.fptosi(e.clamp(value, 1.0, 255.0), VI32), VI8)
            e.store(e.shuffle(code, CODE_ORDER), builder.add(args[5], column), 1)
        return context.get_dummy_value()

    return signature, emit
