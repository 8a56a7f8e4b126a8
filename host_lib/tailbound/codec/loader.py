"""Reads the arguments of a compiled pass out of memory, as ``codec.laid`` writes them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import typeof, types
from numba.extending import intrinsic
from numba.np import arrayobj

#: Typed loosely: the compiler of numba calls these, not Python.
_kernel: Any = intrinsic
_arrays: Any = arrayobj
_WORD = ir.IntType(64)
_TUPLE: Any = types.BaseTuple


def loader(example: tuple[Any, ...]) -> Any:
    """A function for compiled code: from the address of words, a tuple like ``example``, whose arrays are writable."""
    kind: Any = typeof(example)  # type: ignore[no-untyped-call]
    _note(example)

    @_kernel
    def load(typing: Any, at: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _load(context, builder, kind, _pointer(builder, args[0]))[0]

        return kind(types.int64), emit

    return load


def _note(example: tuple[Any, ...]) -> None:
    """Keeps what laid records are like."""
    if hasattr(example, "laid"):
        type(example).laid = example
    for part in example:
        if isinstance(part, tuple):
            _note(part)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(_WORD))


def _after(builder: Any, words: Any, count: int) -> Any:
    return builder.gep(words, [_WORD(count)])


def _load(context: Any, builder: Any, kind: Any, words: Any) -> tuple[Any, Any]:
    """The value of a kind that begins at ``words``, and where the next one begins."""
    after = _after(builder, words, 1)
    if isinstance(kind, _TUPLE):
        parts = []
        for part in kind.types:
            if hasattr(getattr(part, "instance_class", None), "laid"):
                value = _load(context, builder, part, _pointer(builder, builder.load(words)))[0]
                words = _after(builder, words, 1)
            else:
                value, words = _load(context, builder, part, words)
            parts.append(value)
        return context.make_tuple(builder, kind, parts), words
    if isinstance(kind, types.Array):
        shape = [builder.load(_after(builder, words, 1 + axis)) for axis in range(kind.ndim)]
        size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        strides = [_WORD(size)]
        for extent in shape[:0:-1]:
            strides.insert(0, builder.mul(strides[0], extent))
        array = context.make_array(kind)(context, builder)
        data = builder.inttoptr(builder.load(words), array.data.type)
        _arrays.populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
        return array._getvalue(), _after(builder, words, 1 + kind.ndim)
    return context.cast(builder, builder.load(words), types.int64, kind), after
