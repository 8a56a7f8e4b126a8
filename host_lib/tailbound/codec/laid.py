"""Arguments of compiled passes as words in memory, so that a pass is called with an address and not with arrays.

numba takes every array of every argument apart at each call. A pass has two dozen, and after a wait nothing of that is
in a cache: at 1 MiB it took as long as the pass itself. Records that live as long as their memory are ``laid``: their
words are written once. What changes from op to op are a few words in front of their addresses.

A word is 64 bits. An array is its address and its shape, a tuple its parts in order, a laid record its address.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.extending import intrinsic
from numba.np import arrayobj
from numpy.typing import NDArray

#: Typed loosely: the compiler of numba calls these, not Python.
_kernel: Any = intrinsic
_arrays: Any = arrayobj
_WORD = ir.IntType(64)
_TUPLE: Any = types.BaseTuple
Record = TypeVar("Record")
#: What places of rows are, of either sign.
_INDICES = {np.dtype(np.int32), np.dtype(np.uint32)}


def laid(record: type[Record]) -> type[Record]:
    """Makes a NamedTuple a record whose words are written once (``words_at``)."""
    made = {"__doc__": record.__doc__, "__module__": record.__module__, "laid": None}
    return type(record.__name__, (record,), made)


def words_at(record: Any) -> int:
    """Where the words of a laid record are, as long as it lives; its arrays may change, but stay where they are.

    Raises:
        ValueError: an array has gaps, or is not of the type that passes read.
    """
    kept: dict[str, Any] = record.__dict__
    if "at" not in kept:
        for name, value, known in zip(record._fields, record, record.laid or (), strict=False):
            if isinstance(known, np.ndarray) and not _alike(value, known):
                raise ValueError(f"{name} {value.dtype}{value.shape} is none of {known.dtype}, {known.ndim} dimensions")
        kept["words"] = words = np.array([*_words(record)], np.int64)
        kept["at"] = int(words.ctypes.data)
    return kept["at"]  # type: ignore[no-any-return]


def array_words(array: NDArray[Any]) -> tuple[int, ...]:
    """The words of an array.

    Raises:
        ValueError: it has gaps.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"an array {array.shape} has gaps: passes walk through it without strides")
    return array.ctypes.data, *array.shape


def _alike(array: NDArray[Any], known: NDArray[Any]) -> bool:
    return array.ndim == known.ndim and (array.dtype == known.dtype or {array.dtype, known.dtype} == _INDICES)


def _words(value: Any) -> Iterator[int]:
    if isinstance(value, np.ndarray):
        yield from array_words(value)
    elif isinstance(value, tuple):
        for part in value:
            yield from [words_at(part)] if hasattr(part, "laid") else _words(part)
    else:
        yield int(value)


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
