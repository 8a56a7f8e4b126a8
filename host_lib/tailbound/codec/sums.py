"""Reading the results of a switch that sends sums: u16 lanes, big-endian, in code order.

A switch pipeline cannot divide, so it leaves that to the workers: an entry of a row to which n ranks contributed is
(sum - 128 n) * 2^(e/4) / (127 n). Kernels as in ``codec.kernels``; everything after this pass is the same.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from tailbound.codec.simd import F32, I32, I64, VF32, VI16, VI32, Emit

_kernel: Any = intrinsic
_INDEX = types.int64


def _expand_rows(rows: int) -> Any:
    @_kernel
    def expand(
        typing: Any, sources: Any, factors: Any, zeros: Any, first: Any, columns: Any, work: Any, into: Any, pitch: Any
    ) -> Any:
        """Sums at the addresses ``sources[first + 8 p]``, as (sum - zero) * factor, P-way butterflies, to ``work``."""
        signature = types.void(sources, factors, zeros, _INDEX, _INDEX, work, _INDEX, _INDEX)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            e = Emit(context, builder)
            source_at = e.address(sig.args[0], args[0], args[3])
            factor_at = e.address(sig.args[1], args[1], args[3])
            zero_at = e.address(sig.args[2], args[2], args[3])
            sources = [e.load(e.step(source_at, I64(8 * p), 8), I64, 8) for p in range(rows)]
            factors = [e.splat(e.load(e.step(factor_at, I64(8 * p), 4), F32, 4)) for p in range(rows)]
            zeros = [e.splat(e.load(e.step(zero_at, I64(8 * p), 4), I32, 4)) for p in range(rows)]
            target = e.address(sig.args[5], args[5], args[6])
            pitch8 = builder.mul(args[7], I64(8))
            with e.columns(args[4]) as column:
                values = []
                for p in range(rows):
                    raw = e.load(e.step(sources[p], column, 2), VI16, 1)
                    high = builder.shl(raw, e.const(VI16, 8))
                    total = builder.zext(builder.or_(high, builder.lshr(raw, e.const(VI16, 8))), VI32)
                    value = builder.sitofp(builder.sub(total, zeros[p]), VF32)
                    values.append(builder.fmul(value, factors[p]))
                for p, value in enumerate(e.hadamard(values)):
                    e.store(value, e.step(target, builder.add(builder.mul(pitch8, I64(p)), column), 4), 4)
            return context.get_dummy_value()

        return signature, emit

    return expand


expand1, expand2, expand4, expand8 = _expand_rows(1), _expand_rows(2), _expand_rows(4), _expand_rows(8)
