"""Arguments of compiled passes as words in memory, so that a pass is called with an address and not with arrays.

numba takes every array of every argument apart at each call. A pass has two dozen, and after a wait nothing of that is
in a cache: at 1 MiB it took as long as the pass itself. Records that live as long as their memory are ``laid``: their
words are written once. What changes from op to op are a few words in front of their addresses.

A word is 64 bits. An array is its address and its shape, a tuple its parts in order, a laid record its address.
``codec.loader`` reads them. Processes without numba have records, too, so nothing here needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailbound.kernel.core import address

Record = TypeVar("Record")
#: What places of rows are, of either sign.
_INDICES = {np.dtype(np.int32), np.dtype(np.uint32)}


def laid(record: type[Record]) -> type[Record]:
    """Makes a NamedTuple a record whose words are written once (``words_at``)."""
    made = {"__doc__": record.__doc__, "__module__": record.__module__, "laid": None, "__getstate__": lambda self: None}
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
        # another thread may have been quicker, and a pass of it reads its words by now
        words = kept.setdefault("words", np.array([*_words(record)], np.int64))
        kept["at"] = int(words.ctypes.data)
    return kept["at"]  # type: ignore[no-any-return]


def array_words(array: NDArray[Any]) -> tuple[int, ...]:
    """The words of an array.

    Raises:
        ValueError: it has gaps.
    """
    return address(array), *array.shape


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
