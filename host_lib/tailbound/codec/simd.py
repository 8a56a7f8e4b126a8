"""Vector code for the codec's loops, written out instead of hoped for.

LLVM's vectoriser gives up on loops with as many pointers as an 8-way butterfly has (it cannot rule out that they
overlap). These helpers emit the vector operations directly, as LLVM's portable vector types: every target lowers them
to what it has, and since all of it is element-wise, vector length never changes a bit of the result. No operation
carries a fast-math flag, so nothing is contracted into a fused multiply-add.

A kernel is a function that emits the body of one intrinsic, in terms of ``Emit``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils as _untyped
from numba.core import config

cgutils: Any = _untyped

#: Elements of a vector: 8 of them and their temporaries should fit the machine's vector registers.
LANES = 16 if getattr(config, "CPU_NAME", None) is None and binding.get_host_cpu_features().get("avx512f") else 8

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


def vector(element: Any, lanes: int = LANES) -> Any:
    """The LLVM type of ``lanes`` elements."""
    return ir.VectorType(element, lanes)


VI8, VI16, VI32, VF32 = (vector(t) for t in (I8, I16, I32, F32))


class Emit:
    """A thin layer over llvmlite's builder: addresses are i64, vectors have ``LANES`` elements."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context = context
        self.b = builder

    def address(self, array_type: Any, array: Any, offset: Any = None) -> Any:
        """Address of an array's element ``offset`` (counted in elements), as i64."""
        data = self.context.make_array(array_type)(self.context, self.b, array).data
        at = self.b.ptrtoint(data, I64)
        if offset is None:
            return at
        size = self.context.get_abi_sizeof(self.context.get_data_type(array_type.dtype))
        return self.b.add(at, self.b.mul(offset, I64(size)))

    def step(self, at: Any, count: Any, size: int) -> Any:
        """Address ``count`` elements of ``size`` bytes further."""
        return self.b.add(at, self.b.mul(count, I64(size)))

    def load(self, at: Any, kind: Any, align: int) -> Any:
        """A value of LLVM type ``kind``."""
        return self.b.load(self.b.inttoptr(at, kind.as_pointer()), align=align)

    def store(self, value: Any, at: Any, align: int, stream: bool = False) -> None:
        """``stream``: around the caches, for memory that is not read again soon; needs full alignment."""
        done = self.b.store(value, self.b.inttoptr(at, value.type.as_pointer()), align=align)
        if stream:
            done.set_metadata("nontemporal", self.b.module.add_metadata([I32(1)]))

    def prefetch(self, at: Any) -> None:
        """Asks for a line to be read into the second-level cache. Any address is allowed."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        self.b.call(function, [self.b.inttoptr(at, I8.as_pointer()), I32(0), I32(2), I32(1)])

    @contextmanager
    def columns(self, count: Any) -> Iterator[Any]:
        """A loop over the columns 0, LANES, 2 LANES, ... below ``count``."""
        with cgutils.for_range_slice(self.b, I64(0), count, I64(LANES), I64) as (column, _):
            yield column

    def const(self, kind: Any, value: Any) -> Any:
        """A vector with ``value`` in every element, or with the given sequence."""
        values = list(value) if isinstance(value, Sequence | range) else [value] * kind.count
        return ir.Constant(kind, [kind.element(v) for v in values])

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        """A vector with a scalar in every element."""
        kind = vector(value.type, lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.b.insert_element(undefined, value, I32(0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(vector(I32, lanes), [I32(0)] * lanes))

    def shuffle(self, value: Any, order: Sequence[int]) -> Any:
        """Elements of a vector in another order."""
        return self.b.shuffle_vector(value, value, ir.Constant(vector(I32, len(order)), [I32(i) for i in order]))

    def umax(self, a: Any, b: Any) -> Any:
        """Larger element, unsigned."""
        return self.b.select(self.b.icmp_unsigned(">", a, b), a, b)

    def smax(self, a: Any, b: Any) -> Any:
        """Larger element, signed."""
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def smin(self, a: Any, b: Any) -> Any:
        """Smaller element, signed."""
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def variable(self, value: Any) -> Any:
        """A mutable value for loops, started with ``value``; becomes a register."""
        at = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, at)
        return at

    def largest(self, value: Any) -> Any:
        """Largest element of an unsigned vector, a scalar."""
        lanes = value.type.count
        while lanes > 1:
            lanes //= 2
            low = self.shuffle(value, range(lanes))
            high = self.shuffle(value, range(lanes, 2 * lanes))
            value = self.umax(low, high)
        return self.b.extract_element(value, I32(0))

    def clamp(self, value: Any, below: Any, above: Any) -> Any:
        """Elements of a float vector limited to ``below`` .. ``above``, vectors (NaN becomes ``below``)."""
        value = self.b.select(self.b.fcmp_ordered(">", value, below), value, below)
        return self.b.select(self.b.fcmp_ordered("<", value, above), value, above)

    def hadamard(self, values: list[Any]) -> list[Any]:
        """Butterflies over 2^m vectors at the distances 1, 2, 4, ..."""
        step = 1
        while step < len(values):
            for i in range(len(values)):
                if not i & step:
                    a, b = values[i], values[i + step]
                    values[i], values[i + step] = self.b.fadd(a, b), self.b.fsub(a, b)
            step *= 2
        return values
