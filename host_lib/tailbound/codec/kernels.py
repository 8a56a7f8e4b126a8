"""The codec's inner loops: each sweeps over the columns of a few rows at once.

R = 8 P rows are transformed in two passes: P rows at distance 8 (P = 1, 2, 4 or 8), then 8 neighbouring rows, or all of
a group of 2 or 4. Between the
passes a group lies in ``work``, which fits a second-level cache; the first pass reads from the bucket (or from result
rows), the second writes packets (or the bucket), so that a group is never stored in between.

All offsets and strides count elements; ``index`` is the hash index of the first element. Widths are multiples of 16.
Stages have the distances 8, 16, 32, then 1, 2, 4, those below R; the reference does the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numba import types
from numba.extending import intrinsic

from tailbound.codec.simd import F32, I16, I32, I64, LANES, VF32, VI8, VI16, VI32, Emit

#: Typed loosely: the compiler of numba calls these, not Python.
_kernel: Any = intrinsic
_INDEX, _FLOAT, _WORD = types.int64, types.float32, types.uint32
_tuple: Any = types.UniTuple
_PLACES = _tuple(_INDEX, 3)
#: Order of codes in a vector's lanes of the sums ring, and back.
LANE_ORDER = tuple(i + j for i in range(0, LANES, 8) for j in (0, 2, 4, 6, 1, 3, 5, 7))
CODE_ORDER = tuple(LANE_ORDER.index(i) for i in range(LANES))


def _flip(e: Emit, value: Any, signs: Any, row: int) -> Any:
    """``value`` with the sign that stands ``row`` bits below the top one."""
    sign = e.b.and_(e.b.shl(signs, e.const(VI32, row)), e.const(VI32, 0x80000000))
    return e.b.bitcast(e.b.xor(e.b.bitcast(value, VI32), sign), VF32)


def _offset(e: Emit, part: Any, key: Any) -> Any:
    """128 + u as floats, from the 16-bit parts of columns and of a row: a float32 of 128 has a last place of 2^-16."""
    u = e.b.zext(e.b.add(part, key), VI32)
    return e.b.bitcast(e.b.or_(u, e.const(VI32, 0x43000000)), VF32)


def _bounds(e: Emit, span: Any) -> tuple[Any, Any]:
    """128 - span and 128 + span as vectors."""
    zero, span = e.const(VF32, 128.0), e.splat(span)
    return e.b.fsub(zero, span), e.b.fadd(zero, span)


def _prefetch(e: Emit, ahead: Any, columns: Any, column: Any, rows: Iterable[int]) -> None:
    """The entries at ``column`` of ``rows`` of ``columns``, as ``ahead`` says where the first row is."""
    at, width = (e.b.extract_value(ahead, i) for i in range(2))
    for row in rows:
        e.prefetch(e.b.add(at, e.b.mul(e.b.add(e.b.mul(columns, I64(row)), column), width)))


def _spread_rows(rows: int) -> Any:
    @_kernel
    def spread(
        typing: Any, x: Any, first: Any, columns: Any, signs: Any, row: Any, work: Any, into: Any, pitch: Any
    ) -> Any:  # fmt: skip
        """Rows of ``x`` at ``first + 8 p columns``, times signs, P-way butterflies, to rows ``into + 8 p pitch``.

        ``signs``: of the group (``hashing.write_signs``); ``row``: the first one in it.
        """
        signature = types.void(x, _INDEX, _INDEX, signs, _WORD, work, _INDEX, _INDEX)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source, target = e.address(sig.args[0], args[0], args[1]), e.address(sig.args[5], args[5], args[6])
            stride8, pitch8 = builder.mul(args[2], I64(8)), builder.mul(args[7], I64(8))
            sign_at, row = e.address(sig.args[3], args[3]), e.splat(args[4])
            with e.columns(args[2]) as column:
                values = []
                for p in range(rows):
                    if p % 4 == 0:  # 32 rows have a word
                        at = builder.add(builder.mul(args[2], I64(p // 4)), column)
                        signs = builder.shl(e.load(e.step(sign_at, at, 4), VI32, 4), row)
                    at = builder.add(builder.mul(stride8, I64(p)), column)
                    values.append(_flip(e, e.load(e.step(source, at, 4), VF32, 4), signs, 8 * p % 32))
                for p, value in enumerate(e.hadamard(values)):
                    at = builder.add(builder.mul(pitch8, I64(p)), column)
                    e.store(value, e.step(target, at, 4), 4)
            return context.get_dummy_value()

        return signature, emit

    return spread


spread1, spread2, spread4, spread8 = (_spread_rows(rows) for rows in (1, 2, 4, 8))


def _finish_rows(rows: int, turn: bool) -> Any:
    @_kernel
    def finish(
        typing: Any,
        work: Any,
        first: Any,
        pitch: Any,
        columns: Any,
        factor: Any,
        span: Any,
        keys: Any,
        targets: Any,
        ahead: Any,
    ) -> Any:
        """Neighbouring rows of ``work``: butterflies, codes to the addresses ``targets``.

        Codes are 128 - ``span`` to 128 + ``span``.
        ``keys`` u32[8]: the parts of the rows in their rounding offsets. ``ahead``: an address and the bytes of an
        entry, half of as many rows from there on are prefetched meanwhile; the address of the columns' parts.
        """
        signature = types.void(work, _INDEX, _INDEX, _INDEX, _FLOAT, _FLOAT, keys, targets, _PLACES)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source = e.address(sig.args[0], args[0], args[1])
            parts = builder.extract_value(args[8], 2)
            key_at = e.address(sig.args[6], args[6])
            keys = [e.splat(builder.trunc(e.load(e.step(key_at, I64(i), 4), I32, 4), I16)) for i in range(rows)]
            target_at = e.address(sig.args[7], args[7])
            targets = [e.load(e.step(target_at, I64(i), 8), I64, 8) for i in range(rows)]
            scale, below, above = e.splat(args[4]), *_bounds(e, args[5])
            with e.columns(args[3]) as column:
                values = []
                for row in range(rows):
                    at = builder.add(builder.mul(args[2], I64(row)), column)
                    values.append(e.load(e.step(source, at, 4), VF32, 4))
                _prefetch(e, args[8], args[3], column, range(rows // 2, rows))
                if turn:
                    values = e.hadamard(values)
                part = e.load(e.step(parts, column, 2), VI16, 2)
                for row in range(rows):
                    offset = _offset(e, part, keys[row])
                    code = e.clamp(builder.fadd(builder.fmul(values[row], scale), offset), below, above)
                    out = builder.trunc(builder.fptosi(code, VI32), VI8)
                    e.store(out, builder.add(targets[row], column), 1)
            return context.get_dummy_value()

        return signature, emit

    return finish


finish_turned2, finish_turned4, finish_turned8 = (_finish_rows(rows, True) for rows in (2, 4, 8))
finish_plain1, finish_plain8 = (_finish_rows(rows, False) for rows in (1, 8))


def _largest_rows(rows: int, turn: bool) -> Any:
    @_kernel
    def largest(typing: Any, work: Any, first: Any, pitch: Any, columns: Any, ahead: Any) -> Any:
        """Bits of the largest value of neighbouring rows of ``work``, after the butterflies between them.

        Half of the rows that ``finish`` is given as ``ahead`` are prefetched here.
        """
        signature = _WORD(work, _INDEX, _INDEX, _INDEX, _PLACES)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source = e.address(sig.args[0], args[0], args[1])
            most = e.variable(e.const(VI32, 0))
            with e.columns(args[3]) as column:
                _prefetch(e, args[4], args[3], column, range(rows // 2))
                at = [e.step(source, builder.add(builder.mul(args[2], I64(row)), column), 4) for row in range(rows)]
                values = [e.load(a, VF32, 4) for a in at]
                found = builder.load(most)
                for value in e.hadamard(values) if turn else values:
                    found = e.umax(found, builder.and_(builder.bitcast(value, VI32), e.const(VI32, 0x7FFFFFFF)))
                builder.store(found, most)
            return e.largest(builder.load(most))

        return signature, emit

    return largest


largest_turned2, largest_turned4, largest_turned8 = (_largest_rows(rows, True) for rows in (2, 4, 8))
largest_plain1, largest_plain8 = (_largest_rows(rows, False) for rows in (1, 8))


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


settle2, settle4, settle8 = _settle_rows(2), _settle_rows(4), _settle_rows(8)


def _expand_rows(rows: int) -> Any:
    @_kernel
    def expand(
        typing: Any, sources: Any, readings: Any, parts: Any, first: Any, columns: Any, work: Any, into: Any,
        pitch: Any, summed: Any,
    ) -> Any:  # fmt: skip
        """Codes at the addresses ``sources[first + 8 p]`` as values, P-way butterflies, to ``work``.

        ``readings`` u32[rows, 4]: how (``codec.decode``). ``parts`` u16: of the columns, in rounding offsets.
        ``summed``: they are u16 lanes, big-endian, in code order: the sums of a switch, which cannot divide.
        """
        signature = types.void(sources, readings, parts, _INDEX, _INDEX, work, _INDEX, _INDEX, types.boolean)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source_at = e.address(sig.args[0], args[0], args[3])
            reading_at = e.step(e.address(sig.args[1], args[1]), args[3], 16)
            part_at = e.address(sig.args[2], args[2])
            sources = [e.load(e.step(source_at, I64(8 * p), 8), I64, 8) for p in range(rows)]
            factors, zeros, keys, masks = (
                [e.splat(e.load(builder.add(reading_at, I64(128 * p + 4 * i)), kind, 4)) for p in range(rows)]
                for i, kind in enumerate((F32, I32, I32, I32))
            )
            target = e.address(sig.args[5], args[5], args[6])
            pitch8 = builder.mul(args[7], I64(8))

            def code(p: int, column: Any, part: Any) -> Any:
                code = builder.zext(e.load(builder.add(sources[p], column), VI8, 1), VI32)
                below = builder.and_(builder.sub(keys[p], part), masks[p])
                return builder.or_(builder.shl(code, e.const(VI32, 16)), below)

            def total(p: int, column: Any, _part: Any) -> Any:
                raw = e.load(e.step(sources[p], column, 2), VI16, 1)
                high = builder.shl(raw, e.const(VI16, 8))
                return builder.zext(builder.or_(high, builder.lshr(raw, e.const(VI16, 8))), VI32)

            with builder.if_else(args[8]) as branches:
                for branch, fixed in zip(branches, (total, code), strict=True):
                    with branch, e.columns(args[4]) as column:
                        part = builder.zext(e.load(e.step(part_at, column, 2), VI16, 2), VI32)
                        values = [
                            builder.fmul(
                                builder.sitofp(builder.sub(fixed(p, column, part), zeros[p]), VF32), factors[p]
                            )
                            for p in range(rows)
                        ]
                        for p, value in enumerate(e.hadamard(values)):
                            e.store(value, e.step(target, builder.add(builder.mul(pitch8, I64(p)), column), 4), 4)
            return context.get_dummy_value()

        return signature, emit

    return expand


expand1, expand2, expand4, expand8 = _expand_rows(1), _expand_rows(2), _expand_rows(4), _expand_rows(8)


def _restore_rows(rows: int, stream: bool) -> Any:
    @_kernel
    def restore(
        typing: Any, work: Any, first: Any, pitch: Any, factor: Any, signs: Any, row: Any, x: Any, into: Any,
        stride: Any,
    ) -> Any:  # fmt: skip
        """Neighbouring rows of ``work``: butterflies, times ``factor``, times signs, to rows of ``x``.

        ``signs``: of the group (``hashing.write_signs``); ``row``: the first one in it.
        """
        signature = types.void(work, _INDEX, _INDEX, _FLOAT, signs, _INDEX, x, _INDEX, _INDEX)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source = e.address(sig.args[0], args[0], args[1])
            target, factor, stride = e.address(sig.args[6], args[6], args[7]), e.splat(args[3]), args[8]
            sign_at = e.address(sig.args[4], args[4], builder.mul(builder.lshr(args[5], I64(5)), stride))
            before = e.splat(builder.trunc(builder.and_(args[5], I64(31)), I32))
            with e.columns(stride) as column:
                values = []
                for row in range(rows):
                    at = builder.add(builder.mul(args[2], I64(row)), column)
                    values.append(e.load(e.step(source, at, 4), VF32, 4))
                signs = builder.shl(e.load(e.step(sign_at, column, 4), VI32, 4), before)
                for row, value in enumerate(e.hadamard(values)):
                    value = _flip(e, builder.fmul(value, factor), signs, row)
                    at = builder.add(builder.mul(stride, I64(row)), column)
                    e.store(value, e.step(target, at, 4), 4 * LANES if stream else 4, stream)
            return context.get_dummy_value()

        return signature, emit

    return restore


restore2, restore4, restore8 = (_restore_rows(rows, False) for rows in (2, 4, 8))
restore_stream = _restore_rows(8, True)


def _count(e: Emit, here: Any, found: Any) -> None:
    """Adds one to the lanes of the variable ``found`` in which ``here``."""
    e.b.store(e.b.sub(e.b.load(found), e.b.sext(here, VI32)), found)


def _gather_row(ring: bool, own: bool) -> Any:
    @_kernel
    def gather(typing: Any, sums: Any, codes: Any, join: Any, zero: Any, columns: Any, lanes: Any, counts: Any) -> Any:
        """Sums of one row, own codes added as ``join`` says, into u16 lanes; those that are ``zero`` are counted.

        ``sums`` and ``codes`` are addresses; which of them are read is the variant's choice. ``join``: what sums are
        shifted down by, what codes are multiplied with, what is added, and what they are shifted down by then
        (``scale.Join``). ``counts`` u32[LANES], written: by lane of a vector. The largest one is returned.
        """
        signature = _WORD(_INDEX, _INDEX, _tuple(_INDEX, 4), _WORD, _INDEX, lanes, counts)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            target, count_at = e.address(sig.args[5], args[5]), e.address(sig.args[6], args[6])
            move, weight, more, down = (
                e.splat(builder.trunc(builder.extract_value(args[2], i), I16)) for i in range(4)
            )
            zero = e.splat(builder.trunc(args[3], I16))
            found = e.variable(e.const(VI32, 0))
            with e.columns(args[4]) as column:
                total = e.const(VI16, 0)
                if ring:
                    total = e.load(e.step(args[0], column, 2), VI16, 2)
                if own:
                    code = e.shuffle(e.load(builder.add(args[1], column), VI8, 1), LANE_ORDER)
                    code = builder.lshr(builder.add(builder.mul(builder.zext(code, VI16), weight), more), down)
                    total = builder.add(builder.lshr(total, move), code) if ring else code
                e.store(total, e.step(target, column, 2), 2)
                _count(e, builder.icmp_unsigned("==", total, zero), found)
            e.store(builder.load(found), count_at, 4)
            return e.largest(builder.load(found))

        return signature, emit

    return gather


gather_ring, gather_own, gather_both = _gather_row(True, False), _gather_row(False, True), _gather_row(True, True)


@_kernel
def take_off(typing: Any, lanes: Any, form: Any, parts: Any, masks: Any, columns: Any, exact: Any) -> Any:
    """u16 lanes as distances from zero in units of 2^-16, less their offsets, i32; the largest one is returned.

    ``form``: the row's part in the offsets, the sum where all codes are 128, zero and what is the same for all lanes
    whose offsets are taken off, in units of 2^-16. ``masks`` u32[LANES]: all ones in these lanes, else 0.
    """
    signature = _WORD(lanes, _tuple(_INDEX, 4), parts, masks, _INDEX, exact)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emit(context, builder)
        source, part_at = e.address(sig.args[0], args[0]), e.address(sig.args[2], args[2])
        target = e.address(sig.args[5], args[5])
        key = e.splat(builder.trunc(builder.extract_value(args[1], 0), I16))
        units, zero, same = (e.splat(builder.trunc(builder.extract_value(args[1], i), I32)) for i in (1, 2, 3))
        mask = e.load(e.address(sig.args[3], args[3]), VI32, 4)
        zero = builder.sub(zero, builder.and_(same, mask))
        most, least = e.variable(e.const(VI32, 0)), e.variable(e.const(VI32, 0))
        with e.columns(args[4]) as column:
            total = builder.zext(e.load(e.step(source, column, 2), VI16, 2), VI32)
            offset = builder.zext(builder.add(e.load(e.step(part_at, column, 2), VI16, 2), key), VI32)
            off = builder.and_(builder.lshr(builder.mul(offset, units), e.const(VI32, 7)), mask)
            value = builder.sub(builder.sub(builder.shl(total, e.const(VI32, 16)), zero), off)
            e.store(value, e.step(target, column, 4), 4)
            builder.store(e.smax(builder.load(most), value), most)
            builder.store(e.smin(builder.load(least), value), least)
        return e.largest(e.umax(builder.load(most), builder.sub(e.const(VI32, 0), builder.load(least))))

    return signature, emit


@_kernel
def requantise(typing: Any, exact: Any, factor: Any, span: Any, key: Any, parts: Any, columns: Any, target: Any) -> Any:
    """i32 in lane order as codes at the address ``target``: floor(value * factor + 128 + u); ``parts`` likewise.

    Codes are 128 - ``span`` to 128 + ``span``.
    """
    signature = types.void(exact, _FLOAT, _FLOAT, _WORD, parts, _INDEX, _INDEX)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        e = Emit(context, builder)
        source, part_at = e.address(sig.args[0], args[0]), e.address(sig.args[4], args[4])
        factor, key = e.splat(args[1]), e.splat(builder.trunc(args[3], I16))
        below, above = _bounds(e, args[2])
        with e.columns(args[5]) as column:
            value = builder.fmul(builder.sitofp(e.load(e.step(source, column, 4), VI32, 4), VF32), factor)
            offset = _offset(e, e.load(e.step(part_at, column, 2), VI16, 2), key)
            code = builder.trunc(builder.fptosi(e.clamp(builder.fadd(value, offset), below, above), VI32), VI8)
            e.store(e.shuffle(code, CODE_ORDER), builder.add(args[6], column), 1)
        return context.get_dummy_value()

    return signature, emit
